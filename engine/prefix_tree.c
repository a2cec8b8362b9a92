/* The radix tree of KV pages: which text has which page, which one goes when room is needed, and
 * what is remembered of those that went. All memory is taken in prefix_tree_init; a page has one
 * node, so nothing here can run out. It moves no bytes: pages are numbers of the pool.
 *
 * Eviction is GreedyDual-Size (Cao & Irani 1997, "Cost-aware WWW proxy caching algorithms"): a page
 * is ranked clock + cost/size when used, the lowest rank goes, and the clock moves up to it. */
#include "engine/prefix_tree.h"

#include <string.h>

enum { NONE = -1, SEEN_WAYS = 4, MIN_SEEN_SETS = 1024 };

/* What is remembered of a text: the facets it was last seen with, newest first. */
struct prefix_seen {
    struct prefix_trace {
        uint64_t text; /* 0: empty */
        uint32_t part[PREFIX_FACET_END];
    } way[SEEN_WAYS];
};

const char *prefix_miss_name(enum prefix_miss m)
{
    static const char *const names[] = {
        [PREFIX_MISS_FIRST_SEEN] = "first seen",
        [PREFIX_MISS_EVICTED] = "evicted",
        [PREFIX_MISS_OTHER_MODEL] = "other model",
        [PREFIX_MISS_OTHER_KV] = "other KV type",
        [PREFIX_MISS_OTHER_LAYOUT] = "layout version",
        [PREFIX_MISS_OTHER_TENANT] = "other tenant",
        [PREFIX_MISS_CORRUPT] = "corrupt",
        [PREFIX_MISS_IN_FLIGHT] = "in flight",
    };
    return (size_t)m < ARRAY_LEN(names) ? names[m] : "unknown";
}

const char *prefix_tier_name(enum prefix_tier t)
{
    static const char *const names[] = {[PREFIX_RAM] = "ram",
                                        [PREFIX_COPY] = "copy",
                                        [PREFIX_DISK] = "disk",
                                        [PREFIX_SWAP] = "swap"};
    return (size_t)t < ARRAY_LEN(names) ? names[t] : "unknown";
}

/* ---- keys ---- */

uint64_t prefix_text_next(uint64_t parent, const int32_t *ids, int32_t n)
{
    return hash_xxh3(ids, (size_t)n * sizeof *ids, parent).lo | 1;
}

struct hash128 prefix_facet_hash(const void *p, size_t n)
{
    struct sha256 s;
    uint8_t sum[32];
    struct hash128 h;
    sha256_init(&s);
    sha256_add(&s, p, n);
    sha256_done(&s, sum);
    memcpy(&h, sum, sizeof h);
    return h;
}

/* The length tells how many ids there are. */
struct hash128 prefix_key_next(struct hash128 parent, const int32_t *ids, int32_t n)
{
    struct {
        struct hash128 parent;
        int32_t ids[KV_PAGE_TOKENS];
    } in = {.parent = parent};
    CHECK(n > 0 && n <= KV_PAGE_TOKENS);
    memcpy(in.ids, ids, (size_t)n * sizeof *ids);
    return prefix_facet_hash(&in, sizeof in.parent + (size_t)n * sizeof *ids);
}

struct hash128 prefix_key_root(const struct prefix_facets *f)
{
    return prefix_facet_hash(f, sizeof *f);
}

/* ---- opening ---- */

static uint64_t power_of_two(uint64_t n)
{
    uint64_t p = 1;
    while (p < n)
        p *= 2;
    return p;
}

struct tree_sizes {
    uint64_t n_nodes, n_table, n_sets;
};

static struct tree_sizes sizes_of(uint64_t n_pages, uint32_t n_seqs)
{
    /* a root is there for a pinned sequence or for a page below it */
    uint64_t n_nodes = 2 * n_pages + n_seqs;
    return (struct tree_sizes){n_nodes, power_of_two(2 * n_nodes),
                               power_of_two(MAX(n_pages, (uint64_t)MIN_SEEN_SETS))};
}

uint64_t prefix_tree_bytes(uint32_t n_pages, uint32_t n_seqs)
{
    struct tree_sizes s = sizes_of(n_pages, n_seqs);
    return s.n_nodes * (sizeof(struct prefix_node) + sizeof(int32_t)) +
           s.n_table * sizeof(int32_t) + s.n_sets * sizeof(struct prefix_seen);
}

int prefix_tree_init(struct prefix_tree *t, struct kv_pool *pool, uint32_t n_seqs,
                     uint64_t page_bytes, struct err *e)
{
    struct tree_sizes s = sizes_of((uint64_t)pool->n_pages, n_seqs);
    uint64_t n_nodes = s.n_nodes, n_table = s.n_table, n_sets = s.n_sets;
    *t = (struct prefix_tree){.pool = pool, .marked_head = NONE, .marked_tail = NONE};
    if (n_nodes > INT32_MAX)
        return err_set(e, ERR_LIMIT, "%d KV pages are too many for the prefix tree", pool->n_pages);
    t->nodes = mem_array(n_nodes, sizeof *t->nodes);
    t->table = mem_array(n_table, sizeof *t->table);
    t->heap = mem_array(n_nodes, sizeof *t->heap);
    t->seen = mem_array(n_sets, sizeof *t->seen);
    if (!t->nodes || !t->table || !t->heap || !t->seen) {
        prefix_tree_fini(t);
        return err_set(e, ERR_MEMORY, "out of memory for a prefix tree of %d pages",
                       pool->n_pages);
    }
    t->n_nodes = (int32_t)n_nodes;
    for (int32_t i = 0; i < t->n_nodes; i++)
        t->nodes[i].next = i + 1 < t->n_nodes ? i + 1 : NONE;
    memset(t->table, 0xff, n_table * sizeof *t->table);
    t->table_mask = n_table - 1;
    t->seen_mask = n_sets - 1;
    t->page_kib = page_bytes ? (double)page_bytes / 1024 : 1;
    return 0;
}

void prefix_tree_fini(struct prefix_tree *t)
{
    for (int32_t i = 0; i < t->n_nodes; i++)
        if (t->nodes[i].n_ids)
            kv_page_drop(t->pool, t->nodes[i].page);
    mem_free(t->nodes);
    mem_free(t->table);
    mem_free(t->heap);
    mem_free(t->seen);
    *t = (struct prefix_tree){0};
}

/* ---- the table: keys of roots and whole pages ---- */

static bool in_table(const struct prefix_node *n)
{
    return n->n_ids == 0 || n->n_ids == KV_PAGE_TOKENS;
}

static void table_put(struct prefix_tree *t, int32_t node)
{
    uint64_t at = t->nodes[node].key.lo & t->table_mask;
    while (t->table[at] != NONE)
        at = (at + 1) & t->table_mask;
    t->table[at] = node;
}

/* Open addressing without tombstones: what follows moves up unless its place is behind the hole. */
static void table_drop(struct prefix_tree *t, int32_t node)
{
    uint64_t mask = t->table_mask, hole = t->nodes[node].key.lo & mask;
    while (t->table[hole] != node)
        hole = (hole + 1) & mask;
    for (uint64_t at = (hole + 1) & mask; t->table[at] != NONE; at = (at + 1) & mask) {
        uint64_t home = t->nodes[t->table[at]].key.lo & mask;
        if (((at - home) & mask) < ((at - hole) & mask))
            continue;
        t->table[hole] = t->table[at];
        hole = at;
    }
    t->table[hole] = NONE;
}

/* By key, and by what the key was made from: two texts never meet. */
static int32_t table_find(const struct prefix_tree *t, struct hash128 key, int32_t parent,
                          const void *made_from, size_t n_bytes)
{
    for (uint64_t at = key.lo & t->table_mask; t->table[at] != NONE;
         at = (at + 1) & t->table_mask) {
        const struct prefix_node *n = &t->nodes[t->table[at]];
        if (n->key.lo == key.lo && n->key.hi == key.hi && n->parent == parent &&
            !memcmp(n->ids, made_from, n_bytes))
            return t->table[at];
    }
    return NONE;
}

/* ---- the heap: leaves where nobody stands, smallest rank first ---- */

static bool goes_before(const struct prefix_tree *t, int32_t a, int32_t b)
{
    const struct prefix_node *x = &t->nodes[a], *y = &t->nodes[b];
    return x->rank < y->rank || (x->rank == y->rank && x->tick < y->tick);
}

static void heap_set(struct prefix_tree *t, int32_t at, int32_t node)
{
    t->heap[at] = node;
    t->nodes[node].heap_at = at;
}

/* The node belongs at `at` or above or below it. */
static void heap_settle(struct prefix_tree *t, int32_t at, int32_t node)
{
    while (at > 0 && goes_before(t, node, t->heap[(at - 1) / 2])) {
        heap_set(t, at, t->heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    for (;;) {
        int32_t child = 2 * at + 1;
        if (child + 1 < t->n_heap && goes_before(t, t->heap[child + 1], t->heap[child]))
            child++;
        if (child >= t->n_heap || !goes_before(t, t->heap[child], node))
            break;
        heap_set(t, at, t->heap[child]);
        at = child;
    }
    heap_set(t, at, node);
}

static void heap_drop(struct prefix_tree *t, int32_t node)
{
    int32_t at = t->nodes[node].heap_at, last = t->heap[--t->n_heap];
    t->nodes[node].heap_at = NONE;
    if (last != node)
        heap_settle(t, at, last);
}

/* Put it where its children and pins now say. */
static void heap_update(struct prefix_tree *t, int32_t node)
{
    struct prefix_node *n = &t->nodes[node];
    bool want = n->n_ids && n->first_child == NONE && !n->pins;
    if (want && n->heap_at == NONE)
        heap_settle(t, t->n_heap++, node);
    else if (want)
        heap_settle(t, n->heap_at, node);
    else if (n->heap_at != NONE)
        heap_drop(t, node);
}

static void rank(struct prefix_tree *t, struct prefix_node *n)
{
    n->rank = t->clock + (double)n->value;
    n->tick = ++t->tick;
}

void prefix_tree_touch(struct prefix_tree *t, int32_t node)
{
    for (int32_t i = node; i != NONE; i = t->nodes[i].parent) {
        rank(t, &t->nodes[i]);
        if (t->nodes[i].heap_at != NONE)
            heap_settle(t, t->nodes[i].heap_at, i);
    }
}

/* ---- nodes ---- */

static int32_t node_new(struct prefix_tree *t, int32_t parent)
{
    int32_t i = t->free_node;
    CHECK(i != NONE);
    struct prefix_node *n = &t->nodes[i];
    t->free_node = n->next;
    *n = (struct prefix_node){.parent = parent,
                              .root = parent == NONE ? i : t->nodes[parent].root,
                              .first_child = NONE,
                              .next = NONE,
                              .prev = NONE,
                              .page = NONE,
                              .heap_at = NONE,
                              .marked_next = NONE,
                              .marked_prev = NONE};
    if (parent == NONE)
        return i;
    struct prefix_node *p = &t->nodes[parent];
    n->depth = p->depth + 1;
    n->next = p->first_child;
    if (n->next != NONE)
        t->nodes[n->next].prev = i;
    p->first_child = i;
    heap_update(t, parent);
    return i;
}

static void node_free(struct prefix_tree *t, int32_t node)
{
    struct prefix_node *n = &t->nodes[node];
    CHECK(n->first_child == NONE && !n->pins);
    if (in_table(n))
        table_drop(t, node);
    if (n->heap_at != NONE)
        heap_drop(t, node);
    prefix_tree_unmark(t, node);
    if (n->prev != NONE)
        t->nodes[n->prev].next = n->next;
    else if (n->parent != NONE)
        t->nodes[n->parent].first_child = n->next;
    if (n->next != NONE)
        t->nodes[n->next].prev = n->prev;
    if (n->n_ids) {
        kv_page_drop(t->pool, n->page);
        t->n_pages--;
    }
    n->n_ids = 0;
    n->next = t->free_node;
    t->free_node = node;
}

/* A node may have become a leaf where nobody stands. */
static void node_settle(struct prefix_tree *t, int32_t node)
{
    struct prefix_node *n = &t->nodes[node];
    if (n->parent == NONE && n->first_child == NONE && !n->pins)
        node_free(t, node);
    else
        heap_update(t, node);
}

void prefix_tree_pin(struct prefix_tree *t, int32_t node)
{
    t->nodes[node].pins++;
    heap_update(t, node);
}

void prefix_tree_unpin(struct prefix_tree *t, int32_t node)
{
    CHECK(t->nodes[node].pins > 0);
    t->nodes[node].pins--;
    node_settle(t, node);
}

int32_t prefix_tree_root(struct prefix_tree *t, const struct prefix_facets *f)
{
    struct hash128 key = prefix_key_root(f);
    int32_t i = table_find(t, key, NONE, f, sizeof *f);
    if (i == NONE) {
        i = node_new(t, NONE);
        t->nodes[i].key = key;
        t->nodes[i].facets = *f;
        table_put(t, i);
    }
    t->nodes[i].pins++;
    return i;
}

/* ---- finding ---- */

int32_t prefix_tree_child(const struct prefix_tree *t, int32_t node, const int32_t *ids)
{
    if (t->nodes[node].first_child == NONE)
        return NONE;
    struct hash128 key = prefix_key_next(t->nodes[node].key, ids, KV_PAGE_TOKENS);
    return table_find(t, key, node, ids, KV_PAGE_TOKENS * sizeof *ids);
}

static int32_t common(const int32_t *a, int32_t n_a, const int32_t *b, int32_t n_b)
{
    int32_t i = 0, n = MIN(n_a, n_b);
    while (i < n && a[i] == b[i])
        i++;
    return i;
}

int32_t prefix_tree_nearest(const struct prefix_tree *t, int32_t *n_common, int32_t node,
                            const int32_t *ids, int32_t n)
{
    int32_t best = NONE;
    *n_common = 0;
    for (int32_t i = t->nodes[node].first_child; i != NONE; i = t->nodes[i].next) {
        int32_t c = common(t->nodes[i].ids, t->nodes[i].n_ids, ids, n);
        if (c > *n_common) {
            best = i;
            *n_common = c;
        }
    }
    return best;
}

/* ---- what was seen ---- */

static struct prefix_trace trace_of(const struct prefix_facets *f, uint64_t text)
{
    struct prefix_trace r = {.text = text};
    for (int k = 0; k < PREFIX_FACET_END; k++)
        r.part[k] = (uint32_t)(f->part[k].lo ^ (f->part[k].hi << 7));
    return r;
}

static bool same_trace(const struct prefix_trace *a, const struct prefix_trace *b)
{
    return a->text == b->text && !memcmp(a->part, b->part, sizeof a->part);
}

static void remember(struct prefix_tree *t, const struct prefix_facets *f, uint64_t text)
{
    struct prefix_trace now = trace_of(f, text);
    struct prefix_trace *way = t->seen[(text >> 1) & t->seen_mask].way;
    int last = 0;
    while (last < SEEN_WAYS - 1 && !same_trace(&way[last], &now))
        last++;
    memmove(way + 1, way, (size_t)last * sizeof *way);
    way[0] = now;
}

enum prefix_miss prefix_facet_miss(enum prefix_facet f)
{
    static const enum prefix_miss reasons[] = {[PREFIX_FACET_MODEL] = PREFIX_MISS_OTHER_MODEL,
                                               [PREFIX_FACET_KV] = PREFIX_MISS_OTHER_KV,
                                               [PREFIX_FACET_LAYOUT] = PREFIX_MISS_OTHER_LAYOUT,
                                               [PREFIX_FACET_TENANT] = PREFIX_MISS_OTHER_TENANT};
    return reasons[f];
}

enum prefix_miss prefix_tree_why(const struct prefix_tree *t, const struct prefix_facets *f,
                                 uint64_t text)
{
    struct prefix_trace want = trace_of(f, text);
    const struct prefix_trace *way = t->seen[(text >> 1) & t->seen_mask].way;
    int best = INT32_MAX, facet = 0; /* the one that is like it but for the fewest parts */
    for (int i = 0; i < SEEN_WAYS; i++) {
        int n = 0, first = 0;
        if (same_trace(&way[i], &want))
            return PREFIX_MISS_EVICTED;
        for (int k = PREFIX_FACET_END - 1; k >= 0; k--)
            if (way[i].part[k] != want.part[k]) {
                first = k;
                n++;
            }
        if (way[i].text == text && n < best) {
            best = n;
            facet = first;
        }
    }
    return best < INT32_MAX ? prefix_facet_miss((enum prefix_facet)facet) : PREFIX_MISS_FIRST_SEEN;
}

/* ---- taking in and giving up ---- */

/* Drop the partial pages after parent that begin p; true if another page covers p itself. */
static bool drop_covered(struct prefix_tree *t, int32_t parent, const struct tree_page *p)
{
    for (int32_t i = t->nodes[parent].first_child, next; i != NONE; i = next) {
        const struct prefix_node *n = &t->nodes[i];
        next = n->next;
        int32_t c = common(n->ids, n->n_ids, p->ids, p->n_ids);
        if (c == p->n_ids)
            return true;
        if (c == n->n_ids)
            node_free(t, i);
    }
    return false;
}

int32_t prefix_tree_insert(struct prefix_tree *t, int32_t parent, const struct tree_page *p)
{
    const struct prefix_node *above = &t->nodes[parent];
    bool whole = p->n_ids == KV_PAGE_TOKENS;
    CHECK(p->n_ids > 0 && p->n_ids <= KV_PAGE_TOKENS && (!above->n_ids || in_table(above)));
    int32_t known = whole ? prefix_tree_child(t, parent, p->ids) : NONE;
    if (known != NONE || drop_covered(t, parent, p))
        return known;
    int32_t i = node_new(t, parent);
    struct prefix_node *n = &t->nodes[i];
    n->n_ids = p->n_ids;
    memcpy(n->ids, p->ids, (size_t)p->n_ids * sizeof *p->ids);
    n->page = p->page;
    kv_page_share(t->pool, p->page);
    t->n_pages++;
    n->value = (float)((double)p->cost_us / t->page_kib);
    n->text = prefix_text_next(above->text, p->ids, p->n_ids);
    if (whole) {
        n->key = prefix_key_next(above->key, p->ids, p->n_ids);
        table_put(t, i);
        remember(t, &t->nodes[n->root].facets, n->text);
    }
    rank(t, n);
    heap_update(t, i);
    return i;
}

int32_t prefix_tree_victim(const struct prefix_tree *t)
{
    return t->n_heap ? t->heap[0] : NONE;
}

void prefix_tree_evict(struct prefix_tree *t, int32_t node)
{
    struct prefix_node *n = &t->nodes[node];
    int32_t parent = n->parent;
    CHECK(n->heap_at != NONE);
    t->clock = MAX(t->clock, n->rank);
    node_free(t, node);
    node_settle(t, parent);
}

void prefix_tree_purge(struct prefix_tree *t)
{
    while (t->n_heap)
        prefix_tree_evict(t, t->heap[0]);
}

/* ---- marks ---- */

void prefix_tree_mark(struct prefix_tree *t, int32_t node)
{
    struct prefix_node *n = &t->nodes[node];
    if (n->marked)
        return;
    n->marked = true;
    n->marked_prev = t->marked_tail;
    n->marked_next = NONE;
    if (t->marked_tail == NONE)
        t->marked_head = node;
    else
        t->nodes[t->marked_tail].marked_next = node;
    t->marked_tail = node;
}

void prefix_tree_unmark(struct prefix_tree *t, int32_t node)
{
    struct prefix_node *n = &t->nodes[node];
    if (!n->marked)
        return;
    n->marked = false;
    if (n->marked_prev == NONE)
        t->marked_head = n->marked_next;
    else
        t->nodes[n->marked_prev].marked_next = n->marked_next;
    if (n->marked_next == NONE)
        t->marked_tail = n->marked_prev;
    else
        t->nodes[n->marked_next].marked_prev = n->marked_prev;
}
