/* What a sequence's pages hold and where they come from: the tree in RAM first, then the persistent
 * tier, then the beginning of a page by copy. Pages enter the tree as they fill and go to the
 * persistent tier behind the computation, at the latest when they leave RAM. A page in the tree is
 * never written again. All memory is taken in prefix_cache_init; faults of the persistent tier cost
 * time, never a request. */
#include "engine/prefix_cache.h"

#include <string.h>

enum { P = KV_PAGE_TOKENS, KV_LAYOUT_VERSION = 1 };

/* ---- opening ---- */

static struct hash128 facet_of(struct buf *text)
{
    struct hash128 h = prefix_facet_hash(text->data, text->n);
    buf_clear(text);
    return h;
}

/* All that a page's bits depend on beside the token ids, or its place in memory does. */
static int set_facets(struct prefix_cache *pc, const struct loaded *ld,
                      const struct engine_config *c, const char *digest, struct err *e)
{
    const struct model *m = &ld->model;
    const struct hparams *hp = &m->hp;
    struct buf t = {0};
    buf_printf(&t, "%s %a %a %a %u", digest, (double)hp->rope_base, (double)hp->rope_freq_scale,
               (double)m->rope_mscale, hp->n_rot);
    if (m->rope_freqs)
        buf_put(&t, m->rope_freqs, hp->n_rot / 2 * sizeof *m->rope_freqs);
    struct hash128 model = facet_of(&t);
    buf_printf(&t, "%d", (int)ld->lim.kv_type);
    struct hash128 kv = facet_of(&t);
    buf_printf(&t, "%d %d %s %s %s %llu", KV_LAYOUT_VERSION, P, INGOT_VERSION, ld->be->name,
               ld->be->kv_kind ? ld->be->kv_kind(ld->dev) : "", (unsigned long long)pc->page_bytes);
    struct hash128 layout = facet_of(&t);
    buf_puts(&t, c->tenant ? c->tenant : "");
    struct hash128 tenant = facet_of(&t);
    bool failed = t.failed;
    buf_fini(&t);
    if (failed)
        return err_set(e, ERR_MEMORY, "out of memory for the prefix cache");
    pc->facets = (struct prefix_facets){{[PREFIX_FACET_MODEL] = model,
                                         [PREFIX_FACET_KV] = kv,
                                         [PREFIX_FACET_LAYOUT] = layout,
                                         [PREFIX_FACET_TENANT] = tenant}};
    pc->model_tag = model.lo;
    uint8_t start[sizeof pc->model_tag]; /* by this the commands know whose pages they are */
    if (strlen(digest) == 64 && hex_decode(start, sizeof start, digest, 2 * sizeof start) > 0)
        memcpy(&pc->model_tag, start, sizeof start);
    return 0;
}

int prefix_cache_init(struct prefix_cache *pc, struct kv_pool *pool, const struct loaded *ld,
                      const struct engine_config *c, const char *digest, struct err *e)
{
    *pc = (struct prefix_cache){.pool = pool,
                                .store = c->prefix_store,
                                .be = ld->be,
                                .exec = ld->exec,
                                .share = c->share_prefix};
    pc->page_bytes = ld->placement.kv_bytes / MAX(ld->placement.n_pages, 1u);
    if (pc->store) {
        pc->page_bytes = ld->be->kv_page_bytes(ld->exec);
        pc->page = mem_alloc(pc->page_bytes);
        if (!pc->page)
            return err_set(e, ERR_MEMORY, "out of memory for the prefix cache");
    }
    if (prefix_tree_init(&pc->tree, pool, ld->lim.n_seqs, pc->page_bytes, e) ||
        set_facets(pc, ld, c, digest, e)) {
        prefix_cache_fini(pc);
        return -1;
    }
    if (pc->store)
        prefix_roots_read(&pc->roots, pc->store, &pc->facets, pc->model_tag);
    return 0;
}

void prefix_cache_fini(struct prefix_cache *pc)
{
    prefix_tree_fini(&pc->tree);
    mem_free(pc->page);
    *pc = (struct prefix_cache){0};
}

/* ---- the persistent tier ---- */

static struct prefix_key store_key(struct hash128 h)
{
    struct prefix_key k;
    memcpy(k.b, &h, sizeof k.b);
    return k;
}

/* True when the persistent tier has the page, or will have it. */
static bool put_node(struct prefix_cache *pc, int32_t node)
{
    struct prefix_node *n = &pc->tree.nodes[node];
    struct err e = {0};
    struct prefix_page page = {
        .key = store_key(n->key),
        .parent = store_key(pc->tree.nodes[n->parent].key),
        .ids = n->ids,
        .n_ids = n->n_ids,
        .kv = pc->page,
        .kv_bytes = pc->page_bytes,
        .model_tag = pc->model_tag,
        .cost_us = (uint32_t)((double)n->value * pc->tree.page_kib),
    };
    if (!prefix_has(pc->store, &page.key)) {
        if (pc->be->kv_read(pc->exec, pc->page, n->page, &e)) {
            log_line(LOG_WARN, "a page of the prefix cache is not kept: %s", e.msg);
            return true; /* asking again would not help */
        }
        if (!prefix_put(pc->store, &page))
            return false;
        pc->counters.n_stored++;
    }
    return true;
}

bool prefix_cache_write_behind(struct prefix_cache *pc, bool *again, uint64_t deadline_ns)
{
    struct prefix_tree *t = &pc->tree;
    *again = false;
    while (t->marked_head >= 0) {
        int32_t node = t->marked_head;
        if (!put_node(pc, node)) {
            struct prefix_stats s;
            prefix_stats(pc->store, &s);
            *again = s.dirty_pages && !s.paused;
            if (*again)
                return false;
            pc->counters.n_refused++;
        } else {
            t->nodes[node].stored = true;
        }
        prefix_tree_unmark(t, node);
        if (now_ns() >= deadline_ns)
            return t->marked_head >= 0;
    }
    return false;
}

void prefix_cache_drain(struct prefix_cache *pc)
{
    bool again = false;
    while (prefix_cache_write_behind(pc, &again, UINT64_MAX) || again)
        if (prefix_flush(pc->store, NULL))
            return;
}

/* ---- pages ---- */

static int32_t take_page(struct prefix_cache *pc)
{
    int32_t page = kv_page_take(pc->pool);
    if (page >= 0)
        return page;
    int32_t victim = prefix_tree_victim(&pc->tree);
    if (victim < 0)
        return -1;
    const struct prefix_node *n = &pc->tree.nodes[victim];
    if (pc->store && n->n_ids == P && !n->stored && !put_node(pc, victim))
        pc->counters.n_refused++;
    prefix_tree_evict(&pc->tree, victim);
    pc->counters.n_evicted++;
    return kv_page_take(pc->pool);
}

void prefix_cache_reserve(struct prefix_cache *pc, struct kv_seq *kv, int32_t n_tokens)
{
    while (kv->n_pages * P < n_tokens) {
        /* The pool holds every slot's whole context. What no slot holds is free, or in the tree
         * with nobody below it: a slot holds all pages before the one it stands on. */
        int32_t page = take_page(pc);
        CHECK(page >= 0);
        kv->pages[kv->n_pages++] = page;
    }
}

/* The slot's place in the tree moves on to the page at kv->pages[kv->n_tree]. */
static void step_to(struct prefix_cache *pc, struct kv_seq *kv, int32_t node)
{
    prefix_tree_pin(&pc->tree, node);
    prefix_tree_unpin(&pc->tree, kv->node);
    kv->node = node;
    kv->n_tree++;
}

static void count_hit(struct prefix_cache *pc, struct kv_seq *kv, enum prefix_tier tier, int32_t n)
{
    kv->n_kv += n;
    kv->n_cached += n;
    pc->counters.hit_tokens[tier] += (uint64_t)n;
    pc->counters.hit_pages[tier]++;
}

/* ---- a request begins ---- */

void prefix_cache_attach(struct prefix_cache *pc, struct kv_seq *kv, const struct request *r)
{
    CHECK(!kv->n_kv && !kv->n_pages && kv->node < 0);
    memcpy(kv->ids, r->ids, r->n_ids * sizeof *r->ids);
    kv->n_prompt = (int32_t)r->n_ids;
    kv->n_cached = kv->n_tree = 0;
    kv->looking = false;
    kv->why = PREFIX_MISS_END;
    memset(kv->elsewhere.n_pages, 0, sizeof kv->elsewhere.n_pages);
    if (r->no_reuse || r->on_logits)
        return;
    struct prefix_facets f = pc->facets;
    if (pc->share)
        f.part[PREFIX_FACET_TENANT] = (struct hash128){0};
    else if (r->tenant)
        f.part[PREFIX_FACET_TENANT] = prefix_facet_hash(r->tenant, strlen(r->tenant));
    kv->node = prefix_tree_root(&pc->tree, &f);
    kv->looking = true;
}

/* The next page from the persistent tier into RAM; its node, or -1. */
static int32_t fetch_page(struct prefix_cache *pc, struct kv_seq *kv)
{
    static const enum prefix_miss reasons[PREFIX_N_RESULTS] = {
        [PREFIX_HIT] = PREFIX_MISS_END,
        [PREFIX_ABSENT] = PREFIX_MISS_END,
        [PREFIX_EVICTED] = PREFIX_MISS_EVICTED,
        [PREFIX_OTHER_TEXT] = PREFIX_MISS_END,
        [PREFIX_OTHER_SIZE] = PREFIX_MISS_END,
        [PREFIX_CORRUPT] = PREFIX_MISS_CORRUPT,
        [PREFIX_UNAVAILABLE] = PREFIX_MISS_EVICTED,
    };
    struct prefix_tree *t = &pc->tree;
    struct err e = {0};
    const int32_t *ids = kv->ids + kv->n_kv;
    struct hash128 parent = t->nodes[kv->node].key, key = prefix_key_next(parent, ids, P);
    struct prefix_page want = {.key = store_key(key),
                               .parent = store_key(parent),
                               .ids = ids,
                               .n_ids = P,
                               .kv_bytes = pc->page_bytes};
    enum prefix_get got = prefix_get(pc->store, pc->page, &want);
    kv->why = reasons[got];
    int32_t page = got == PREFIX_HIT ? take_page(pc) : -1, node = -1;
    if (page < 0)
        return -1;
    if (pc->be->kv_write(pc->exec, page, pc->page, &e)) {
        log_line(LOG_WARN, "a page of the prefix cache cannot be used: %s", e.msg);
    } else {
        uint32_t cost = (uint32_t)(pc->ns_per_row * P / 1000);
        node = prefix_tree_insert(
            t, kv->node,
            &(struct tree_page){.ids = ids, .n_ids = P, .page = page, .cost_us = cost});
        t->nodes[node].stored = true;
    }
    kv_page_drop(pc->pool, page); /* the tree has it now */
    return node;
}

/* The beginning of a page that parts from the prompt within it. */
static void copy_begun(struct prefix_cache *pc, struct kv_seq *kv)
{
    int32_t n, most = MIN(P, kv->n_prompt - 1 - kv->n_kv);
    int32_t node = prefix_tree_nearest(&pc->tree, &n, kv->node, kv->ids + kv->n_kv, most);
    if (node < 0)
        return;
    prefix_tree_pin(&pc->tree, node); /* it must not be what take_page evicts */
    int32_t own = take_page(pc);
    if (own >= 0) {
        pc->be->kv_copy(pc->exec, own, pc->tree.nodes[node].page);
        kv->pages[kv->n_pages++] = own;
        prefix_tree_touch(&pc->tree, node);
        count_hit(pc, kv, PREFIX_COPY, n);
    }
    prefix_tree_unpin(&pc->tree, node);
}

/* The look-up is over: what was found stays the longest. */
static void end_looking(struct prefix_cache *pc, struct kv_seq *kv)
{
    kv->looking = false;
    prefix_tree_touch(&pc->tree, kv->node);
    if (pc->store && kv->n_tree) {
        struct prefix_key key = store_key(pc->tree.nodes[kv->node].key);
        prefix_touch(pc->store, &key);
    }
    copy_begun(pc, kv);
}

bool prefix_cache_advance(struct prefix_cache *pc, struct kv_seq *kv, uint64_t deadline_ns)
{
    if (kv->node < 0 || kv->n_kv != kv->n_tree * P)
        return true;
    while (kv->n_kv + P < kv->n_prompt) {
        enum prefix_tier tier = PREFIX_RAM;
        int32_t node = prefix_tree_child(&pc->tree, kv->node, kv->ids + kv->n_kv);
        if (node < 0 && kv->looking && pc->store) {
            uint64_t start = now_ns();
            tier = PREFIX_DISK;
            node = fetch_page(pc, kv);
            pc->counters.fetch_ns += now_ns() - start;
        }
        if (node < 0)
            break;
        kv_page_share(pc->pool, pc->tree.nodes[node].page);
        kv->pages[kv->n_pages++] = pc->tree.nodes[node].page;
        step_to(pc, kv, node);
        count_hit(pc, kv, tier, P);
        if (tier == PREFIX_DISK && now_ns() >= deadline_ns)
            return false;
    }
    if (kv->looking)
        end_looking(pc, kv);
    return true;
}

/* ---- pages fill ---- */

/* Page kv->n_tree of the prompt had to be computed: why? */
static void count_miss(struct prefix_cache *pc, struct kv_seq *kv, bool in_flight)
{
    const struct prefix_tree *t = &pc->tree;
    const struct prefix_node *n = &t->nodes[kv->node];
    const struct prefix_facets *own = &t->nodes[n->root].facets;
    enum prefix_miss why = in_flight ? PREFIX_MISS_IN_FLIGHT : kv->why;
    if (why == PREFIX_MISS_END)
        why = prefix_tree_why(t, own, prefix_text_next(n->text, kv->ids + kv->n_tree * P, P));
    if (why == PREFIX_MISS_FIRST_SEEN && pc->store)
        why = prefix_roots_why(&pc->roots, pc->store, kv, own);
    kv->why = PREFIX_MISS_END; /* it was known of the first missing page only */
    pc->counters.miss_pages[why]++;
}

void prefix_cache_filled(struct prefix_cache *pc, struct kv_seq *kv)
{
    struct prefix_tree *t = &pc->tree;
    while (kv->node >= 0 && (kv->n_tree + 1) * P <= kv->n_kv) {
        int32_t *page = &kv->pages[kv->n_tree];
        const int32_t *ids = kv->ids + kv->n_tree * P;
        int32_t node = prefix_tree_child(t, kv->node, ids);
        if ((kv->n_tree + 1) * P <= kv->n_prompt)
            count_miss(pc, kv, node >= 0);
        if (node < 0) {
            uint32_t cost = (uint32_t)(pc->ns_per_row * P / 1000);
            node = prefix_tree_insert(
                t, kv->node,
                &(struct tree_page){.ids = ids, .n_ids = P, .page = *page, .cost_us = cost});
            if (pc->store)
                prefix_tree_mark(t, node);
        } else {
            /* somebody else was first: same ids, same bits, one page is enough */
            kv_page_share(pc->pool, t->nodes[node].page);
            kv_page_drop(pc->pool, *page);
            *page = t->nodes[node].page;
        }
        step_to(pc, kv, node);
    }
}

/* ---- a request ends ---- */

static void let_go(struct prefix_cache *pc, struct kv_seq *kv)
{
    if (kv->node >= 0)
        prefix_tree_unpin(&pc->tree, kv->node);
    kv->node = -1;
    while (kv->n_pages)
        kv_page_drop(pc->pool, kv->pages[--kv->n_pages]);
    kv->n_kv = kv->n_tree = 0;
}

void prefix_cache_detach(struct prefix_cache *pc, struct kv_seq *kv)
{
    int32_t n_begun = kv->n_kv - kv->n_tree * P;
    if (kv->node >= 0) {
        prefix_tree_touch(&pc->tree, kv->node);
        if (n_begun > 0) {
            uint32_t cost = (uint32_t)(pc->ns_per_row * n_begun / 1000);
            prefix_tree_insert(&pc->tree, kv->node,
                               &(struct tree_page){.ids = kv->ids + kv->n_tree * P,
                                                   .n_ids = n_begun,
                                                   .page = kv->pages[kv->n_tree],
                                                   .cost_us = cost});
        }
    }
    let_go(pc, kv);
}

void prefix_cache_distrust(struct prefix_cache *pc, struct kv_seq *kv)
{
    let_go(pc, kv);
    prefix_tree_purge(&pc->tree);
}
