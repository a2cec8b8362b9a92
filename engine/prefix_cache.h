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
    struct prefix_store *store; /* the caller's; NULL: RAM only */
    const struct backend *be;
    struct exec *exec;
    uint64_t page_bytes;
    uint8_t *page;               /* [page_bytes] between device and store; NULL without a store */
    struct prefix_facets facets; /* the tenant is the one of requests that name none */
    struct prefix_roots roots;
    bool share; /* tenants are one */
    uint64_t model_tag;
    double ns_per_row; /* what a prompt row takes; 0: not known yet */
    struct prefix_counters counters;
};

/* `digest` is the weights'. The pool must be there already, and outlive it. */
int prefix_cache_init(struct prefix_cache *pc, struct kv_pool *pool, const struct loaded *ld,
                      const struct engine_config *c, const char *digest, struct err *e);
/* Hand what is not stored yet to the persistent tier, waiting for it if need be. */
void prefix_cache_drain(struct prefix_cache *pc);
void prefix_cache_fini(struct prefix_cache *pc);

/* A request begins in an empty slot; with no_reuse it keeps out of the tree. */
void prefix_cache_attach(struct prefix_cache *pc, struct kv_seq *kv, const struct request *r);
/* Take over pages of the prompt that are known by now, from RAM or from the persistent tier, until
 * deadline_ns (now_ns; one page at least). False: there are more, come again before computing. The
 * last token of the prompt is always left to compute. */
bool prefix_cache_advance(struct prefix_cache *pc, struct kv_seq *kv, uint64_t deadline_ns);
/* Hold pages for n_tokens positions. */
void prefix_cache_reserve(struct prefix_cache *pc, struct kv_seq *kv, int32_t n_tokens);
/* kv->n_kv has grown: whole pages go into the tree. */
void prefix_cache_filled(struct prefix_cache *pc, struct kv_seq *kv);
/* The request ends: the begun page goes into the tree too, and the slot is empty. */
void prefix_cache_detach(struct prefix_cache *pc, struct kv_seq *kv);
/* The device failed while it wrote to this slot: nothing in RAM is trusted but what other running
 * sequences stand on. The slot is empty. */
void prefix_cache_distrust(struct prefix_cache *pc, struct kv_seq *kv);

/* Hand complete pages to the persistent tier until deadline_ns, one at least. False: nothing is
 * left, or it takes no more for now (*again: it will). */
bool prefix_cache_write_behind(struct prefix_cache *pc, bool *again, uint64_t deadline_ns);

#endif
