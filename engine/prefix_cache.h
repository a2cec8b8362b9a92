/* engine, inside: the prefix cache at work. It joins the prefix tree (pages in RAM), the persistent
 * tier and the backend that has the bytes, and gives a sequence its pages: those that are known,
 * and empty ones, for which it evicts. The engine's thread only. */
#ifndef INGOT_PREFIX_CACHE_H
#define INGOT_PREFIX_CACHE_H

#include "engine/prefix_tree.h"
#include "store/prefix.h"

struct prefix_roots { /* that the persistent tier has seen, but for the engine's own */
    struct prefix_facets root[PREFIX_N_ROOTS];
    int n;
};
/* Read them, and leave the own one there. */
void prefix_roots_read(struct prefix_roots *r, struct prefix_store *store,
                       const struct prefix_facets *own, uint64_t model_tag);
/* Is page kv->n_tree of the prompt there below another root? The reason if so, else "first seen".
 */
enum prefix_miss prefix_roots_why(const struct prefix_roots *r, struct prefix_store *store,
                                  struct kv_seq *kv, const struct prefix_facets *own);

struct prefix_cache {
    struct prefix_tree tree;
    struct kv_pool *pool;
    struct kv_swap *swap;
    struct prefix_store *store; /* the caller's; NULL: RAM only */
    struct shared_device *device;
    struct exec *exec;
    uint64_t page_bytes;
    uint8_t *page;               /* [page_bytes] between device and store; NULL without a store */
    struct prefix_facets facets; /* the tenant is the one of requests that name none */
    struct prefix_roots roots;
    bool share; /* tenants are one */
    uint64_t model_tag;
    int32_t window;                        /* attention reaches so many tokens back; 0: all */
    int32_t n_swapped;                     /* sequences that are swapped out or coming back */
    double ns_per_row, ns_per_key;         /* what a prompt row takes, and each token that it looks
                                              at; 0: not known yet */
    uint64_t back_tokens[PREFIX_TIER_END]; /* that came back with swapped ones */
    struct prefix_counters counters;
};

/* `digest` is the weights'. Pool and swap area must be there already, and outlive it. */
int prefix_cache_init(struct prefix_cache *pc, struct kv_pool *pool, struct kv_swap *swap,
                      const struct loaded *ld, const struct engine_config *c, const char *digest,
                      struct err *e);
/* Hand what is not stored yet to the persistent tier, waiting for it if need be, until deadline_ns:
 * what is left then is lost, with a line in the log. */
void prefix_cache_drain(struct prefix_cache *pc, uint64_t deadline_ns);
void prefix_cache_fini(struct prefix_cache *pc);

/* A request begins in an empty slot; with no_reuse it keeps out of the tree. */
void prefix_cache_attach(struct prefix_cache *pc, struct kv_seq *kv, const struct request *r);
/* Take over pages of what the slot is to have that are known by now, from where they are nearest,
 * until deadline_ns (now_ns; one page at least). False: there are more, come again before
 * computing. While kv->looking stays set there was no page to put them in. The last token of a
 * prompt is always left to compute. */
bool prefix_cache_advance(struct prefix_cache *pc, struct kv_seq *kv, uint64_t deadline_ns);
/* Take over the beginning of the next page, if the tree has more of it than the slot, by copy. */
void prefix_cache_copy(struct prefix_cache *pc, struct kv_seq *kv);
/* Hold pages for n_tokens positions. */
void prefix_cache_reserve(struct prefix_cache *pc, struct kv_seq *kv, int32_t n_tokens);
/* kv->n_kv has grown: whole pages go into the tree, and what a window has left is given back. */
void prefix_cache_filled(struct prefix_cache *pc, struct kv_seq *kv);
/* The prompt's last page too, as far as it goes: others may share it while this one goes on. */
void prefix_cache_prompt_done(struct prefix_cache *pc, struct kv_seq *kv);
/* The sequence is swapped out: its pages may go, and the slot is empty but for what is needed to
 * get them back. Later it returns, and prefix_cache_advance does that. */
void prefix_cache_park(struct prefix_cache *pc, struct kv_seq *kv);
void prefix_cache_return(struct prefix_cache *pc, struct kv_seq *kv, const struct request *r);
/* The request ends: the begun page goes into the tree too, and the slot is empty. */
void prefix_cache_detach(struct prefix_cache *pc, struct kv_seq *kv);
/* The device failed while it wrote to this slot: nothing in RAM is trusted but what other running
 * sequences stand on. The slot is empty. */
void prefix_cache_distrust(struct prefix_cache *pc, struct kv_seq *kv);

/* Hand complete pages to the persistent tier until deadline_ns, one at least. False: nothing is
 * left, or it takes no more for now (*again: it will). */
bool prefix_cache_write_behind(struct prefix_cache *pc, bool *again, uint64_t deadline_ns);

#endif
