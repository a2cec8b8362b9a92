/* The prefix tree against a model that keeps every page as its whole text and searches linearly. */
#include "engine/prefix_tree.h"
#include "tests/unit/unit.h"

#include <stdio.h>
#include <string.h>

enum { P = KV_PAGE_TOKENS, N_PAGES = 40, N_SEQS = 3, MAX_DEPTH = 6 };

static void fill(int32_t *ids, int32_t value, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        ids[i] = value + i;
}

struct fixture {
    struct kv_pool pool;
    struct prefix_tree t;
};

static bool setup(struct fixture *f)
{
    struct err e = {0};
    memset(f, 0, sizeof *f);
    return OK_CALL(kv_pool_init(&f->pool, N_PAGES, &e), e) &&
           OK_CALL(prefix_tree_init(&f->t, &f->pool, N_SEQS, 1024, &e), e);
}

static void teardown(struct fixture *f)
{
    prefix_tree_fini(&f->t);
    OK_MSG(f->pool.n_free == f->pool.n_pages, "%d of %d pages came back", f->pool.n_free,
           f->pool.n_pages);
    kv_pool_fini(&f->pool);
}

/* Insert a page that only the tree holds. */
static int32_t add(struct fixture *f, int32_t parent, const int32_t *ids, int32_t n, uint32_t cost)
{
    int32_t page = kv_page_take(&f->pool);
    int32_t node = prefix_tree_insert(
        &f->t, parent, &(struct tree_page){.ids = ids, .n_ids = n, .page = page, .cost_us = cost});
    kv_page_drop(&f->pool, page);
    return node;
}

static const struct prefix_facets plain = {{{1, 0}, {2, 0}, {3, 0}, {4, 0}}};

/* ---- single promises ---- */

static void test_equal_ids_below_two_roots_never_meet(void)
{
    struct fixture f;
    int32_t ids[P];
    fill(ids, 5, P);
    if (!setup(&f))
        return;
    int32_t root = prefix_tree_root(&f.t, &plain);
    add(&f, root, ids, P, 1);
    for (int k = 0; k < PREFIX_FACET_END; k++) {
        struct prefix_facets other = plain;
        other.part[k].lo += 100;
        int32_t r = prefix_tree_root(&f.t, &other);
        int32_t n;
        OK(r != root && prefix_tree_child(&f.t, r, ids) < 0);
        OK(prefix_tree_nearest(&f.t, &n, r, ids, P) < 0 && n == 0);
        prefix_tree_unpin(&f.t, r);
    }
    OK(prefix_tree_child(&f.t, root, ids) >= 0);
    prefix_tree_unpin(&f.t, root);
    teardown(&f);
}

static void test_every_miss_has_its_reason(void)
{
    static const enum prefix_miss want[] = {PREFIX_MISS_OTHER_MODEL, PREFIX_MISS_OTHER_KV,
                                            PREFIX_MISS_OTHER_LAYOUT, PREFIX_MISS_OTHER_TENANT};
    struct fixture f;
    int32_t ids[P];
    fill(ids, 5, P);
    if (!setup(&f))
        return;
    uint64_t text = prefix_text_next(0, ids, P);
    OK(prefix_tree_why(&f.t, &plain, text) == PREFIX_MISS_FIRST_SEEN);
    int32_t root = prefix_tree_root(&f.t, &plain);
    add(&f, root, ids, P, 1);
    for (int k = 0; k < PREFIX_FACET_END; k++) {
        struct prefix_facets other = plain;
        other.part[k].lo += 100;
        OK_MSG(prefix_tree_why(&f.t, &other, text) == want[k], "facet %d", k);
    }
    prefix_tree_evict(&f.t, prefix_tree_victim(&f.t));
    OK(prefix_tree_why(&f.t, &plain, text) == PREFIX_MISS_EVICTED);
    OK(prefix_tree_why(&f.t, &plain, text ^ 2) == PREFIX_MISS_FIRST_SEEN);
    prefix_tree_unpin(&f.t, root);
    struct prefix_facets other = plain; /* others with the same text do not make it forgotten */
    for (int i = 0; i < 3; i++) {
        other.part[PREFIX_FACET_TENANT].lo++;
        root = prefix_tree_root(&f.t, &other);
        add(&f, root, ids, P, 1);
        prefix_tree_unpin(&f.t, root);
        OK(prefix_tree_why(&f.t, &plain, text) == PREFIX_MISS_EVICTED);
    }
    for (int m = 0; m < PREFIX_MISS_END; m++)
        OK(strcmp(prefix_miss_name((enum prefix_miss)m), "unknown") != 0);
    teardown(&f);
}

static void test_longer_page_takes_the_place_of_a_partial_one(void)
{
    struct fixture f;
    int32_t a[P], b[P], n;
    fill(a, 5, P);
    fill(b, 5, P);
    b[20] = 999;
    if (!setup(&f))
        return;
    int32_t root = prefix_tree_root(&f.t, &plain);
    OK(add(&f, root, a, 10, 1) >= 0 && f.t.n_pages == 1);
    OK(add(&f, root, a, 7, 1) < 0 && f.t.n_pages == 1); /* covered */
    OK(add(&f, root, a, 25, 1) >= 0 && f.t.n_pages == 1);
    OK(add(&f, root, b, 25, 1) >= 0 && f.t.n_pages == 2); /* another text from 20 on */
    OK(prefix_tree_nearest(&f.t, &n, root, b, 30) >= 0 && n == 25);
    OK(add(&f, root, a, P, 1) >= 0 && f.t.n_pages == 2);
    OK(prefix_tree_nearest(&f.t, &n, root, a, 31) == prefix_tree_child(&f.t, root, a) && n == 31);
    prefix_tree_unpin(&f.t, root);
    teardown(&f);
}

static void test_cheap_and_old_pages_go_first_and_parents_last(void)
{
    struct fixture f;
    int32_t ids[5][P];
    for (int i = 0; i < 5; i++)
        fill(ids[i], 100 * i, P);
    if (!setup(&f))
        return;
    int32_t root = prefix_tree_root(&f.t, &plain);
    int32_t dear = add(&f, root, ids[0], P, 5000), cheap = add(&f, root, ids[1], P, 10);
    int32_t old = add(&f, root, ids[2], P, 100), young = add(&f, root, ids[3], P, 100);
    int32_t child = add(&f, cheap, ids[4], P, 10);
    prefix_tree_touch(&f.t, child);
    int32_t want[] = {child, cheap, old, young, dear};
    for (int i = 0; i < 5; i++) {
        int32_t v = prefix_tree_victim(&f.t);
        OK_MSG(v == want[i], "%d. to go is node %d, not %d", i + 1, v, want[i]);
        prefix_tree_evict(&f.t, v);
    }
    OK(prefix_tree_victim(&f.t) < 0);
    prefix_tree_unpin(&f.t, root);
    teardown(&f);
}

static void test_pages_never_used_again_go_in_the_end_however_dear(void)
{
    struct fixture f;
    int32_t ids[P];
    fill(ids, 0, P);
    if (!setup(&f))
        return;
    int32_t root = prefix_tree_root(&f.t, &plain), n = 0;
    int32_t dear = add(&f, root, ids, P, 1000);
    for (; n < 100; n++) {
        fill(ids, 1000 * (n + 1), P);
        add(&f, root, ids, P, 100);
        int32_t v = prefix_tree_victim(&f.t);
        prefix_tree_evict(&f.t, v);
        if (v == dear)
            break;
    }
    OK_MSG(n > 7 && n < 12, "after %d others of a tenth of its cost", n);
    prefix_tree_unpin(&f.t, root);
    teardown(&f);
}

static void test_marks_come_in_order_and_go_with_their_page(void)
{
    struct fixture f;
    int32_t ids[4][P], node[4];
    if (!setup(&f))
        return;
    int32_t root = prefix_tree_root(&f.t, &plain);
    for (int i = 0; i < 4; i++) {
        fill(ids[i], 100 * i, P);
        node[i] = add(&f, root, ids[i], P, (uint32_t)(10 + i));
    }
    const int order[] = {2, 0, 3, 1};
    for (int i = 0; i < 4; i++)
        prefix_tree_mark(&f.t, node[order[i]]);
    prefix_tree_mark(&f.t, node[2]);
    prefix_tree_evict(&f.t, node[0]);
    for (int i = 0; i < 4; i++) {
        if (order[i] == 0)
            continue;
        OK_MSG(f.t.marked_head == node[order[i]], "mark %d", i);
        prefix_tree_unmark(&f.t, f.t.marked_head);
    }
    OK(f.t.marked_head < 0 && f.t.marked_tail < 0);
    prefix_tree_unpin(&f.t, root);
    teardown(&f);
}

static void test_out_of_memory_is_an_error_and_leaks_nothing(void)
{
    struct kv_pool pool = {0};
    struct err e = {0};
    OK_CALL(kv_pool_init(&pool, N_PAGES, &e), e);
    for (uint64_t n = 1; n <= 4; n++) {
        struct prefix_tree t;
        struct err e2 = {0};
        mem_fail_at(n);
        OK(prefix_tree_init(&t, &pool, 1, 1, &e2) && e2.code == ERR_MEMORY);
        mem_fail_at(0);
    }
    kv_pool_fini(&pool);
}

/* ---- the property test ---- */

struct held { /* one page that the tree should have */
    bool used;
    int32_t tenant, depth, n; /* n: ids of its text in all */
    int32_t ids[MAX_DEPTH * P];
    int32_t page, node;
    double rank;
    uint64_t tick;
    float value;
};

struct walker { /* a running sequence: where it stands */
    bool used;
    int32_t at, root, tenant, depth;
    int32_t ids[MAX_DEPTH * P];
};

static struct world {
    struct fixture f;
    struct held held[N_PAGES];
    struct walker w[N_SEQS];
    double clock;
    uint64_t tick, seed;
    int n_insert, n_evict, n_partial, n_hit;
} w;

static uint64_t die(uint64_t n)
{
    return unit_rand(&w.seed) % n;
}

/* Few different pages, so that texts share beginnings and also part within a page. */
static void roll_page(int32_t *ids)
{
    fill(ids, 7, P);
    uint64_t r = die(4);
    if (r)
        for (uint64_t i = 8 * r; i < P; i++)
            ids[i] += 1000;
}

static bool begins(const struct held *h, const struct walker *k)
{
    return h->used && h->tenant == k->tenant &&
           !memcmp(h->ids, k->ids, (size_t)(k->depth * P) * sizeof *k->ids);
}

static bool has_child(const struct held *h)
{
    for (int i = 0; i < N_PAGES; i++) {
        const struct held *o = &w.held[i];
        if (o->used && o->tenant == h->tenant && o->depth == h->depth + 1 &&
            !memcmp(o->ids, h->ids, (size_t)(h->depth * P) * sizeof *h->ids))
            return true;
    }
    return false;
}

static bool stood_on(const struct held *h)
{
    for (int i = 0; i < N_SEQS; i++)
        if (w.w[i].used && w.w[i].at == h->node)
            return true;
    return false;
}

static struct held *model_victim(void)
{
    struct held *best = NULL;
    for (int i = 0; i < N_PAGES; i++) {
        struct held *h = &w.held[i];
        if (!h->used || stood_on(h) || has_child(h))
            continue;
        if (!best || h->rank < best->rank || (h->rank == best->rank && h->tick < best->tick))
            best = h;
    }
    return best;
}

static bool evict_one(void)
{
    struct held *h = model_victim();
    int32_t v = prefix_tree_victim(&w.f.t);
    if (!OK((h != NULL) == (v >= 0)) || !h)
        return false;
    OK_MSG(h->node == v, "the tree gives up node %d, the model %d", v, h->node);
    w.clock = h->rank > w.clock ? h->rank : w.clock;
    prefix_tree_evict(&w.f.t, v);
    h->used = false;
    w.n_evict++;
    return true;
}

static struct held *model_child(const struct walker *k, const int32_t *ids)
{
    for (int i = 0; i < N_PAGES; i++) {
        struct held *h = &w.held[i];
        if (begins(h, k) && h->depth == k->depth + 1 && h->n == h->depth * P &&
            !memcmp(h->ids + k->depth * P, ids, P * sizeof *ids))
            return h;
    }
    return NULL;
}

static int32_t model_nearest(const struct walker *k, const int32_t *ids, int32_t n)
{
    int32_t best = 0;
    for (int i = 0; i < N_PAGES; i++) {
        const struct held *h = &w.held[i];
        if (!begins(h, k) || h->depth != k->depth + 1)
            continue;
        int32_t c = 0, most = h->n - k->depth * P;
        while (c < most && c < n && h->ids[k->depth * P + c] == ids[c])
            c++;
        best = MAX(best, c);
    }
    return best;
}

/* The model's side of taking in n ids after k: false when they are covered. */
static bool model_insert(struct walker *k, const int32_t *ids, int32_t n, const int32_t got[2],
                         float value)
{
    if (model_nearest(k, ids, n) == n)
        return false;
    int free_at = -1;
    for (int i = 0; i < N_PAGES; i++) {
        struct held *h = &w.held[i];
        int32_t part = h->n - k->depth * P;
        if (begins(h, k) && h->depth == k->depth + 1 && part < n &&
            !memcmp(h->ids + k->depth * P, ids, (size_t)part * sizeof *ids))
            h->used = false;
        if (!h->used)
            free_at = i;
    }
    CHECK(free_at >= 0);
    struct held *h = &w.held[free_at];
    *h = (struct held){.used = true,
                       .tenant = k->tenant,
                       .depth = k->depth + 1,
                       .n = k->depth * P + n,
                       .node = got[0],
                       .page = got[1],
                       .value = value,
                       .rank = w.clock + (double)value,
                       .tick = ++w.tick};
    memcpy(h->ids, k->ids, (size_t)(k->depth * P) * sizeof *k->ids);
    memcpy(h->ids + k->depth * P, ids, (size_t)n * sizeof *ids);
    return true;
}

static void start(struct walker *k)
{
    struct prefix_facets f = plain;
    *k = (struct walker){.used = true, .tenant = (int32_t)die(3)};
    f.part[PREFIX_FACET_TENANT].hi += (uint64_t)k->tenant;
    k->at = k->root = prefix_tree_root(&w.f.t, &f);
}

static void stand_on(struct walker *k, int32_t node, const int32_t *ids)
{
    prefix_tree_pin(&w.f.t, node);
    prefix_tree_unpin(&w.f.t, k->at);
    memcpy(k->ids + k->depth * P, ids, P * sizeof *ids);
    k->depth++;
    k->at = node;
}

/* Look for n ids after k, take them in, and stand on them if they are a whole page. */
static void advance(struct walker *k, int32_t n)
{
    int32_t ids[P], n_tree;
    roll_page(ids);
    struct held *want = model_child(k, ids);
    int32_t child = prefix_tree_child(&w.f.t, k->at, ids);
    OK(want ? want->node == child : child < 0);
    int32_t near = prefix_tree_nearest(&w.f.t, &n_tree, k->at, ids, n);
    OK_MSG(n_tree == model_nearest(k, ids, n) && (near >= 0) == (n_tree > 0), "common %d", n_tree);
    w.n_hit += child >= 0;
    while (!w.f.pool.n_free)
        if (!evict_one())
            return;
    child = prefix_tree_child(&w.f.t, k->at, ids); /* it may have gone */
    uint32_t cost = (uint32_t)die(4) * 100;
    int32_t page = kv_page_take(&w.f.pool), before = w.f.t.n_pages;
    int32_t node = prefix_tree_insert(
        &w.f.t, k->at, &(struct tree_page){.ids = ids, .n_ids = n, .page = page, .cost_us = cost});
    kv_page_drop(&w.f.pool, page);
    if (model_insert(k, ids, n, (int32_t[]){node, page}, (float)cost)) {
        OK(node >= 0 && w.f.t.nodes[node].page == page && w.f.t.nodes[node].n_ids == n);
        w.n_insert++;
        w.n_partial += n < P;
    } else {
        OK(node == child || n < P);
        OK(w.f.t.n_pages == before);
    }
    if (n == P && OK(node >= 0))
        stand_on(k, node, ids);
}

static void touch(struct walker *k)
{
    /* from the last page to the first, as the tree does */
    for (int32_t d = k->depth; d > 0; d--)
        for (int i = 0; i < N_PAGES; i++) {
            struct held *h = &w.held[i];
            if (h->used && h->tenant == k->tenant && h->depth == d && h->n == d * P &&
                !memcmp(h->ids, k->ids, (size_t)h->n * sizeof *h->ids)) {
                h->rank = w.clock + (double)h->value;
                h->tick = ++w.tick;
            }
        }
    w.tick++; /* the root's */
    prefix_tree_touch(&w.f.t, k->at);
}

static void check_world(void)
{
    int32_t n = 0;
    for (int i = 0; i < N_PAGES; i++) {
        const struct held *h = &w.held[i];
        n += h->used;
        if (!h->used)
            continue;
        const struct prefix_node *node = &w.f.t.nodes[h->node];
        OK(node->page == h->page && node->depth == h->depth && w.f.pool.refs[h->page] == 1);
    }
    OK_MSG(w.f.t.n_pages == n && w.f.pool.n_free == N_PAGES - n,
           "%d pages, %d in the model, %d free", w.f.t.n_pages, n, w.f.pool.n_free);
}

static void test_random_operations_agree_with_the_model(void)
{
    for (uint64_t round = 0; round < 30; round++) {
        memset(&w, 0, sizeof w);
        w.seed = round;
        if (!setup(&w.f))
            return;
        for (int step = 0; step < 1500; step++) {
            struct walker *k = &w.w[die(N_SEQS)];
            uint64_t what = die(10);
            if (!k->used) {
                start(k);
            } else if (what < 6 && k->depth < MAX_DEPTH - 1) {
                advance(k, P);
            } else if (what == 6) {
                advance(k, 1 + (int32_t)die(P - 1));
            } else if (what == 7) {
                touch(k);
            } else if (what == 8) {
                evict_one();
            } else {
                prefix_tree_unpin(&w.f.t, k->at);
                k->used = false;
            }
            check_world();
        }
        OK(w.n_insert > 100 && w.n_evict > 100 && w.n_partial > 10 && w.n_hit > 50);
        for (int i = 0; i < N_SEQS; i++)
            if (w.w[i].used)
                prefix_tree_unpin(&w.f.t, w.w[i].at);
        prefix_tree_purge(&w.f.t);
        OK(w.f.t.n_pages == 0);
        int32_t n_free = 0;
        for (int32_t i = w.f.t.free_node; i >= 0; i = w.f.t.nodes[i].next)
            n_free++;
        OK_MSG(n_free == w.f.t.n_nodes, "%d of %d nodes came back", n_free, w.f.t.n_nodes);
        teardown(&w.f);
    }
}

int main(int argc, char **argv)
{
#define T(f)                                                                                       \
    {                                                                                              \
#f, test_##f                                                                               \
    }
    static const struct unit_test tests[] = {
        T(equal_ids_below_two_roots_never_meet),
        T(every_miss_has_its_reason),
        T(longer_page_takes_the_place_of_a_partial_one),
        T(cheap_and_old_pages_go_first_and_parents_last),
        T(pages_never_used_again_go_in_the_end_however_dear),
        T(marks_come_in_order_and_go_with_their_page),
        T(out_of_memory_is_an_error_and_leaks_nothing),
        T(random_operations_agree_with_the_model),
    };
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
