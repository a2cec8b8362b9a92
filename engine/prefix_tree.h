/* engine, inside: the prefix tree. A node is one KV page and the token ids it stands for; the way
 * from a root to it is the text before. A root stands for everything but the text that a page's
 * bytes depend on, so that equal ids below two roots never meet. One thread uses a tree.
 *
 *   root(model, kv, layout, tenant) -- [32 ids] page 7 -- [32 ids] page 3 -- [11 ids] page 9
 *                                                     \-- [32 ids] page 4
 *
 * A whole page (KV_PAGE_TOKENS ids) may have children and is shared in place; a partial one is a
 * leaf and is reused by copying. The tree holds one reference of each of its pages in the pool. */
#ifndef INGOT_PREFIX_TREE_H
#define INGOT_PREFIX_TREE_H

#include "engine/engine_internal.h"
#include "engine/prefix.h"

enum prefix_facet { /* what a page's bytes depend on beside the text */
                    PREFIX_FACET_MODEL,
                    PREFIX_FACET_KV,
                    PREFIX_FACET_LAYOUT,
                    PREFIX_FACET_TENANT,
                    PREFIX_FACET_END,
};
struct prefix_facets {
    struct hash128 part[PREFIX_FACET_END]; /* prefix_facet_hash of each */
};

struct prefix_node {
    struct hash128 key; /* of a root: over its facets; of a whole page: over the parent's and ids */
    uint64_t text;      /* chained over the ids alone, whatever the root */
    int32_t parent, first_child, next, prev; /* nodes or -1; next and prev are siblings */
    int32_t root;
    int32_t page;    /* -1: a root */
    int32_t depth;   /* pages before this one, itself included; 0: a root */
    int32_t n_ids;   /* 0: a root */
    int32_t pins;    /* running sequences that stand here */
    int32_t heap_at; /* place among the nodes that may be evicted; -1: may not be */
    int32_t marked_next, marked_prev;
    bool marked;
    bool stored;   /* the persistent tier has it, or was asked to */
    float value;   /* microseconds to compute it again, for each KiB of it */
    double rank;   /* the lowest is evicted first */
    uint64_t tick; /* of two equal ranks, the older use goes */
    union {
        int32_t ids[KV_PAGE_TOKENS];
        struct prefix_facets facets; /* of a root */
    };
};

struct prefix_tree {
    struct kv_pool *pool;
    struct prefix_node *nodes; /* [n_nodes]; owned */
    int32_t n_nodes, free_node;
    int32_t *table; /* [table_mask + 1] node of a key, or -1; open addressing; owned */
    uint64_t table_mask;
    int32_t *heap; /* [n_nodes] smallest rank first; owned */
    int32_t n_heap;
    int32_t marked_head, marked_tail; /* first in, first out */
    int32_t n_pages;                  /* held */
    double page_kib, clock;
    uint64_t tick;
    struct prefix_seen *seen; /* [seen_mask + 1]; owned */
    uint64_t seen_mask;
};

int prefix_tree_init(struct prefix_tree *t, struct kv_pool *pool, uint32_t n_seqs,
                     uint64_t page_bytes, struct err *e);
void prefix_tree_fini(struct prefix_tree *t); /* gives back every page */
uint64_t prefix_tree_bytes(uint32_t n_pages, uint32_t n_seqs); /* of memory that it will take */

/* The first half of SHA-256: a tenant's name cannot be made to meet another's. */
struct hash128 prefix_facet_hash(const void *p, size_t n);
/* The key of a page of n ids after the page with that key, and of its text. */
struct hash128 prefix_key_next(struct hash128 parent, const int32_t *ids, int32_t n);
uint64_t prefix_text_next(uint64_t parent, const int32_t *ids, int32_t n);
struct hash128 prefix_key_root(const struct prefix_facets *f);

/* The root of these facets, made if there is none, pinned. */
int32_t prefix_tree_root(struct prefix_tree *t, const struct prefix_facets *f);
void prefix_tree_pin(struct prefix_tree *t, int32_t node);
/* An unpinned root without children is gone. */
void prefix_tree_unpin(struct prefix_tree *t, int32_t node);
/* The whole page with these KV_PAGE_TOKENS ids after node; -1: not in the tree. */
int32_t prefix_tree_child(const struct prefix_tree *t, int32_t node, const int32_t *ids);
/* The page after node that has the longest common beginning with n ids, whole or not; *n_common is
 * its length. -1: none has any. */
int32_t prefix_tree_nearest(const struct prefix_tree *t, int32_t *n_common, int32_t node,
                            const int32_t *ids, int32_t n);
/* A page was used: it and those before it are the last to go. */
void prefix_tree_touch(struct prefix_tree *t, int32_t node);

struct tree_page {
    const int32_t *ids; /* [n_ids] */
    int32_t n_ids;      /* 1 .. KV_PAGE_TOKENS */
    int32_t page;
    uint32_t cost_us; /* to compute it */
};
/* Take a page in after the whole page (or root) `parent`, which must be pinned or have pinned ones
 * below; the tree takes a reference of it. Gives the new node, or the one that has these ids
 * already (then the page is not taken), or -1 for a partial page that another covers. A partial one
 * that the new page covers is dropped. */
int32_t prefix_tree_insert(struct prefix_tree *t, int32_t parent, const struct tree_page *p);
/* The page to give up first: a leaf where nobody stands; -1 if there is none. */
int32_t prefix_tree_victim(const struct prefix_tree *t);
void prefix_tree_evict(struct prefix_tree *t, int32_t node); /* the victim */
void prefix_tree_purge(struct prefix_tree *t);               /* drop all that may be evicted */

enum prefix_miss prefix_facet_miss(enum prefix_facet f); /* the reason when this one differs */
/* Why a page with this text, wanted under these facets, is not in the tree. */
enum prefix_miss prefix_tree_why(const struct prefix_tree *t, const struct prefix_facets *f,
                                 uint64_t text);

/* Nodes that wait for something (write-behind), in the order of marking; eviction unmarks. */
void prefix_tree_mark(struct prefix_tree *t, int32_t node);
void prefix_tree_unmark(struct prefix_tree *t, int32_t node);

#endif
