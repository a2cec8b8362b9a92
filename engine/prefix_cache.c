/* What a sequence's pages hold and where they come from: the tree in RAM first, then the swap area
 * (its own, when it had been swapped out), then the persistent tier, then the beginning of a page
 * by copy. Pages enter the tree as they fill and go to the persistent tier behind the computation,
 * at the latest when they leave RAM. What the tree has of a page is never written again. All memory
 * is taken in prefix_cache_init; faults of the persistent tier cost time, never a request. */
#include "engine/prefix_cache.h"

#include <string.h>

enum {
    P = KV_PAGE_TOKENS,
    KV_LAYOUT_VERSION = 2,
    VICTIM_NS = 20000000, /* waiting for the disk before a page goes that somebody wants */
};

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
    buf_printf(&t, "%s %s", kv_type_name(ld->lim.kv_key_type), kv_type_name(ld->lim.kv_value_type));
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

int prefix_cache_init(struct prefix_cache *pc, struct kv_pool *pool, struct kv_swap *swap,
                      const struct loaded *ld, const struct engine_config *c, const char *digest,
                      struct err *e)
{
    *pc = (struct prefix_cache){.pool = pool,
                                .store = c->prefix_store,
                                .device = ld->shared,
                                .exec = ld->exec,
                                .share = c->share_prefix,
                                .swap = swap,
                                .window = (int32_t)ld->lim.window};
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
        if (shared_kv_read(pc->device, pc->exec, pc->page, n->page, &e)) {
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
            *again = prefix_is_writing(pc->store);
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

void prefix_cache_drain(struct prefix_cache *pc, uint64_t deadline_ns)
{
    bool again = false;
    /* a fault, old or new, costs the pages that it met; the store says so and rests by itself */
    while (prefix_cache_write_behind(pc, &again, deadline_ns) || again) {
        if (now_ns() >= deadline_ns) {
            log_line(LOG_WARN, "the disk is too slow: not all of the prefix cache was kept");
            return;
        }
        if (again)
            prefix_flush_until(pc->store, deadline_ns);
    }
}

/* ---- pages ---- */

static int32_t pages_for(int32_t n_tokens)
{
    return (n_tokens + P - 1) / P;
}

/* The page goes, and is not in the persistent tier: there it should be, if anybody waits for it. A
 * disk that is too slow costs computing it again, not everybody's time. */
static void keep_victim(struct prefix_cache *pc, int32_t victim)
{
    const struct prefix_node *n = &pc->tree.nodes[victim];
    if (!pc->store || n->n_ids != P || n->stored || put_node(pc, victim))
        return;
    if (pc->n_swapped) {
        prefix_flush_until(pc->store, now_ns() + VICTIM_NS);
        if (put_node(pc, victim))
            return;
    }
    pc->counters.n_refused++;
}

static int32_t take_page(struct prefix_cache *pc)
{
    int32_t page = kv_page_take(pc->pool), victim;
    /* a page that its slot goes on filling is not free when the tree drops its beginning */
    while (page < 0 && (victim = prefix_tree_victim(&pc->tree)) >= 0) {
        keep_victim(pc, victim);
        prefix_tree_evict(&pc->tree, victim);
        pc->counters.n_evicted++;
        page = kv_page_take(pc->pool);
    }
    return page;
}

void prefix_cache_reserve(struct prefix_cache *pc, struct kv_seq *kv, int32_t n_tokens)
{
    while (kv->n_pages * P < n_tokens) {
        /* The scheduler gives away no more than what no slot holds. That is free, or in the tree
         * with nobody below it: a slot holds all pages before the one it stands on. */
        int32_t page = take_page(pc);
        CHECK(page >= 0);
        kv_seq_add(kv, pc->pool, page);
    }
}

/* The slot's place in the tree moves on to this node; its page becomes the slot's too. */
static void step_to(struct prefix_cache *pc, struct kv_seq *kv, int32_t node)
{
    int32_t page = pc->tree.nodes[node].page;
    prefix_tree_pin(&pc->tree, node);
    prefix_tree_unpin(&pc->tree, kv->node);
    kv->node = node;
    if (kv->n_tree == kv->n_pages || kv->pages[kv->n_tree] != page) {
        kv_page_share(pc->pool, page);
        if (kv->n_tree < kv->n_pages)
            kv_seq_replace(kv, pc->pool, kv->n_tree, page);
        else
            kv_seq_add(kv, pc->pool, page);
    }
    kv->n_tree++;
}

static void count_hit(struct prefix_cache *pc, struct kv_seq *kv, enum prefix_tier tier, int32_t n)
{
    kv->n_kv += n;
    kv->n_had = MAX(kv->n_had, kv->n_kv);
    if (kv->swapped) {
        pc->back_tokens[tier] += (uint64_t)n;
        return;
    }
    kv->n_cached += n;
    kv->n_counted = MAX(kv->n_counted, kv->n_tree);
    pc->counters.hit_tokens[tier] += (uint64_t)n;
    pc->counters.hit_pages[tier]++;
}

/* To compute n tokens after n_before others, which each of them looks at. */
static uint32_t cost_us(const struct prefix_cache *pc, int32_t n_before, int32_t n)
{
    double keys = n * (n_before + (n + 1) / 2.0);
    return (uint32_t)MIN((pc->ns_per_row * n + pc->ns_per_key * keys) / 1000, 4e9);
}

/* Page kv->n_tree is whole and this one: the node that has it. */
static int32_t insert_whole(struct prefix_cache *pc, struct kv_seq *kv, int32_t page)
{
    return prefix_tree_insert(&pc->tree, kv->node,
                              &(struct tree_page){.ids = kv->ids + kv->n_tree * P,
                                                  .n_ids = P,
                                                  .page = page,
                                                  .cost_us = cost_us(pc, kv->n_tree * P, P)});
}

/* The begun page, if it is its only one outside the tree. */
static void insert_begun(struct prefix_cache *pc, struct kv_seq *kv)
{
    int32_t n = kv->n_kv - kv->n_tree * P;
    if (kv->node >= 0 && n > 0 && n < P)
        prefix_tree_insert(&pc->tree, kv->node,
                           &(struct tree_page){.ids = kv->ids + kv->n_tree * P,
                                               .n_ids = n,
                                               .page = kv->pages[kv->n_tree],
                                               .cost_us = cost_us(pc, kv->n_tree * P, n)});
}

/* ---- a request begins, or comes back ---- */

static void enter_tree(struct prefix_cache *pc, struct kv_seq *kv, const struct request *r)
{
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

void prefix_cache_attach(struct prefix_cache *pc, struct kv_seq *kv, const struct request *r)
{
    CHECK(!kv->n_kv && !kv->n_pages && kv->node < 0);
    memcpy(kv->ids, r->ids, r->n_ids * sizeof *r->ids);
    kv->n_prompt = (int32_t)r->n_ids;
    kv->n_cached = kv->n_counted = kv->n_tree = kv->n_had = 0;
    kv->looking = kv->swapped = kv->following = false;
    kv->why = PREFIX_MISS_END;
    memset(kv->elsewhere.n_pages, 0, sizeof kv->elsewhere.n_pages);
    enter_tree(pc, kv, r);
}

void prefix_cache_return(struct prefix_cache *pc, struct kv_seq *kv, const struct request *r)
{
    CHECK(kv->swapped && !kv->n_pages && kv->node < 0);
    while (kv->n_gone < kv->n_parked_gone) {
        kv->pages[kv->n_pages++] = -1;
        kv->n_gone++;
    }
    kv->n_kv = kv->n_gone * P;
    if (!kv->n_gone)
        enter_tree(pc, kv, r);
    kv->looking = true;
}

enum found { FOUND, ABSENT, NO_PAGE };

/* A page of `from` becomes page kv->n_pages of the slot. */
static enum found write_page(struct prefix_cache *pc, struct kv_seq *kv, const uint8_t *from)
{
    struct err e = {0};
    int32_t page = take_page(pc);
    if (page < 0)
        return NO_PAGE;
    if (shared_kv_write(pc->device, pc->exec, page, from, &e)) {
        log_line(LOG_WARN, "a page of the prefix cache cannot be used: %s", e.msg);
        kv_page_drop(pc->pool, page);
        return ABSENT;
    }
    kv_seq_add(kv, pc->pool, page);
    return FOUND;
}

/* The slot's last page is whole and in no node yet. */
static void step_to_own(struct prefix_cache *pc, struct kv_seq *kv, bool stored)
{
    if (kv->node < 0)
        return;
    int32_t node = insert_whole(pc, kv, kv->pages[kv->n_tree]);
    if (stored)
        pc->tree.nodes[node].stored = true;
    else if (pc->store && !pc->tree.nodes[node].stored)
        prefix_tree_mark(&pc->tree, node);
    step_to(pc, kv, node);
}

/* The next page from the persistent tier. */
static enum found fetch_page(struct prefix_cache *pc, struct kv_seq *kv)
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
    const int32_t *ids = kv->ids + kv->n_kv;
    struct hash128 parent = pc->tree.nodes[kv->node].key, key = prefix_key_next(parent, ids, P);
    struct prefix_page want = {.key = store_key(key),
                               .parent = store_key(parent),
                               .ids = ids,
                               .n_ids = P,
                               .kv_bytes = pc->page_bytes};
    uint64_t start = now_ns();
    enum prefix_get got = prefix_get(pc->store, pc->page, &want);
    kv->why = reasons[got];
    enum found found = got == PREFIX_HIT ? write_page(pc, kv, pc->page) : ABSENT;
    if (found == FOUND)
        step_to_own(pc, kv, true);
    pc->counters.fetch_ns += now_ns() - start;
    return found;
}

/* Pages that a window will leave are in the tree as far as one window reaches only: a longer prompt
 * would need no more than its last ones, and the tree has none without those before. */
static bool may_have(const struct prefix_cache *pc, const struct kv_seq *kv)
{
    return !pc->window || (kv->n_tree + 1) * P <= pc->window;
}

/* The next page from the swap area, where it is no longer needed then. */
static enum found unpark_page(struct prefix_cache *pc, struct kv_seq *kv)
{
    int32_t *at = &kv->parked[kv->n_kv / P];
    enum found found = write_page(pc, kv, kv_swap_page(pc->swap, *at));
    if (found == NO_PAGE)
        return NO_PAGE;
    kv_swap_drop(pc->swap, *at);
    *at = -1;
    if (found == FOUND && kv->n_kv + P <= kv->n_parked && may_have(pc, kv))
        step_to_own(pc, kv, false);
    return found;
}

/* The next whole page, from where it is nearest. */
static enum found find_page(struct prefix_cache *pc, struct kv_seq *kv, enum prefix_tier *tier)
{
    int32_t node = -1;
    /* one that has gone on beyond the tree's part of a window finds nothing there any more */
    bool in_tree = kv->node >= 0 && kv->n_kv - kv->n_tree * P < P;
    *tier = PREFIX_RAM;
    if (in_tree)
        node = prefix_tree_child(&pc->tree, kv->node, kv->ids + kv->n_tree * P);
    if (node >= 0) {
        step_to(pc, kv, node);
        return FOUND;
    }
    if (!kv->looking || kv->n_kv % P)
        return ABSENT;
    *tier = PREFIX_SWAP;
    if (kv->swapped && kv->n_kv + P <= kv->n_parked && kv->parked[kv->n_kv / P] >= 0)
        return unpark_page(pc, kv);
    *tier = PREFIX_DISK;
    return pc->store && in_tree ? fetch_page(pc, kv) : ABSENT;
}

void prefix_cache_copy(struct prefix_cache *pc, struct kv_seq *kv)
{
    int32_t n, first = kv->n_tree * P, begun = kv->n_kv - first;
    if (kv->node < 0 || begun >= P)
        return;
    int32_t node = prefix_tree_nearest(&pc->tree, &n, kv->node, kv->ids + first,
                                       MIN(P, kv_find_end(kv) - first));
    if (node < 0 || n <= begun)
        return;
    prefix_tree_pin(&pc->tree, node); /* it must not be what take_page evicts */
    int32_t own = kv->n_pages > kv->n_tree ? kv->pages[kv->n_tree] : -1;
    if (own < 0 && (own = take_page(pc)) >= 0)
        kv_seq_add(kv, pc->pool, own);
    if (own >= 0) {
        shared_kv_copy(pc->device, pc->exec, own, pc->tree.nodes[node].page);
        prefix_tree_touch(&pc->tree, node);
        count_hit(pc, kv, PREFIX_COPY, n - begun);
    }
    prefix_tree_unpin(&pc->tree, node);
}

static void drop_parked(struct prefix_cache *pc, struct kv_seq *kv)
{
    for (int32_t i = 0; i < pages_for(kv->n_parked); i++) {
        if (kv->parked[i] >= 0)
            kv_swap_drop(pc->swap, kv->parked[i]);
        kv->parked[i] = -1;
    }
    kv->n_parked = 0;
}

/* The begun page of one that was swapped out. False: there is no page for it just now. */
static bool find_begun(struct prefix_cache *pc, struct kv_seq *kv)
{
    int32_t n = kv->n_parked - kv->n_kv;
    if (!kv->swapped || n <= 0 || n >= P || kv->n_kv % P || kv->parked[kv->n_kv / P] < 0)
        return true;
    enum found found = unpark_page(pc, kv);
    if (found == FOUND)
        count_hit(pc, kv, PREFIX_SWAP, n);
    return found != NO_PAGE;
}

/* The look-up is over: what was found stays the longest. */
static void end_looking(struct prefix_cache *pc, struct kv_seq *kv)
{
    kv->looking = false;
    if (kv->swapped)
        pc->n_swapped--;
    drop_parked(pc, kv);
    if (kv->node >= 0)
        prefix_tree_touch(&pc->tree, kv->node);
    if (pc->store && kv->n_tree) {
        struct prefix_key key = store_key(pc->tree.nodes[kv->node].key);
        prefix_touch(pc->store, &key);
    }
    prefix_cache_copy(pc, kv);
    kv->swapped = false;
}

/* A window's pages are of use together only. */
static void window_lost(struct prefix_cache *pc, struct kv_seq *kv)
{
    kv_seq_drop(kv, pc->pool);
    kv->n_kv = 0;
}

bool prefix_cache_advance(struct prefix_cache *pc, struct kv_seq *kv, uint64_t deadline_ns)
{
    while (kv->n_kv / P * P + P <= kv_find_end(kv) && (kv->node >= 0 || kv->looking)) {
        enum prefix_tier tier;
        enum found found = find_page(pc, kv, &tier);
        if (found == NO_PAGE)
            return true;
        if (found == ABSENT)
            break;
        count_hit(pc, kv, tier, P - kv->n_kv % P);
        if (tier != PREFIX_RAM && now_ns() >= deadline_ns)
            return false;
    }
    if (!kv->looking || !find_begun(pc, kv))
        return true;
    if (kv->n_gone && kv->n_kv < kv->n_parked)
        window_lost(pc, kv);
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
    if (why == PREFIX_MISS_END) {
        why = prefix_tree_why(t, own, prefix_text_next(n->text, kv->ids + kv->n_tree * P, P));
        /* Asked whatever the tree says: a look-up left out where another tenant has been would tell
         * this one so, by the time to its first token. */
        enum prefix_miss elsewhere =
            pc->store ? prefix_roots_why(&pc->roots, pc->store, kv, own) : why;
        if (why == PREFIX_MISS_FIRST_SEEN)
            why = elsewhere;
    }
    kv->why = PREFIX_MISS_END; /* it was known of the first missing page only */
    kv->n_counted = kv->n_tree + 1;
    pc->counters.miss_pages[why]++;
}

static bool may_enter(const struct prefix_cache *pc, const struct kv_seq *kv)
{
    return kv->node >= 0 && (kv->n_tree + 1) * P <= kv->n_kv && may_have(pc, kv);
}

void prefix_cache_filled(struct prefix_cache *pc, struct kv_seq *kv)
{
    struct prefix_tree *t = &pc->tree;
    kv->n_had = MAX(kv->n_had, kv->n_kv);
    while (may_enter(pc, kv)) {
        int32_t node = prefix_tree_child(t, kv->node, kv->ids + kv->n_tree * P);
        if ((kv->n_tree + 1) * P <= kv->n_prompt && kv->n_tree >= kv->n_counted)
            count_miss(pc, kv, node >= 0);
        if (node < 0) {
            node = insert_whole(pc, kv, kv->pages[kv->n_tree]);
            if (pc->store)
                prefix_tree_mark(t, node);
        }
        /* if somebody else was first: same ids, same bits, one page is enough */
        step_to(pc, kv, node);
    }
    int32_t first = pc->window ? kv->n_kv - pc->window + 1 : 0; /* that the next token sees */
    if (first < P)
        return;
    if (kv->node >= 0)
        prefix_tree_unpin(t, kv->node);
    kv->node = -1;
    kv->n_tree = 0;
    kv_seq_slide(kv, pc->pool, first / P);
}

void prefix_cache_prompt_done(struct prefix_cache *pc, struct kv_seq *kv)
{
    insert_begun(pc, kv);
}

/* ---- a request ends, or leaves for a while ---- */

static void let_go(struct prefix_cache *pc, struct kv_seq *kv)
{
    if (kv->node >= 0)
        prefix_tree_unpin(&pc->tree, kv->node);
    kv->node = -1;
    kv_seq_drop(kv, pc->pool);
    kv->n_kv = kv->n_tree = 0;
}

void prefix_cache_detach(struct prefix_cache *pc, struct kv_seq *kv)
{
    if (kv->swapped)
        pc->n_swapped--;
    kv->swapped = kv->looking = kv->following = false;
    drop_parked(pc, kv);
    if (kv->node >= 0)
        prefix_tree_touch(&pc->tree, kv->node);
    insert_begun(pc, kv);
    let_go(pc, kv);
}

/* Copy a page to the swap area; -1: it has no room. */
static int32_t park_page(struct prefix_cache *pc, int32_t page)
{
    struct err e = {0};
    int32_t at = kv_swap_take(pc->swap);
    if (at >= 0 && shared_kv_read(pc->device, pc->exec, kv_swap_page(pc->swap, at), page, &e)) {
        log_line(LOG_WARN, "a KV page cannot be swapped out: %s", e.msg);
        kv_swap_drop(pc->swap, at);
        return -1;
    }
    return at;
}

/* What nobody else holds and the persistent tier has not; first what the tree has not either. */
static void park_pages(struct prefix_cache *pc, struct kv_seq *kv)
{
    const struct prefix_node *nodes = pc->tree.nodes;
    for (int32_t i = MAX(kv->n_gone, kv->n_tree); i < pages_for(kv->n_kv); i++)
        if (kv->parked[i] < 0)
            kv->parked[i] = park_page(pc, kv->pages[i]);
    for (int32_t node = kv->node, i = kv->n_tree; i-- > 0; node = nodes[node].parent)
        if (kv->parked[i] < 0 && !(pc->store && nodes[node].stored) &&
            pc->pool->slots[kv->pages[i]] == 1)
            kv->parked[i] = park_page(pc, kv->pages[i]);
}

void prefix_cache_park(struct prefix_cache *pc, struct kv_seq *kv)
{
    park_pages(pc, kv);
    pc->n_swapped += !kv->swapped;
    /* when it leaves before all is here again, what still waits goes on waiting */
    kv->n_parked = kv->swapped ? MAX(kv->n_parked, kv->n_kv) : kv->n_kv;
    kv->n_parked_gone = kv->n_gone;
    kv->swapped = true;
    kv->looking = kv->following = false;
    let_go(pc, kv);
}

void prefix_cache_distrust(struct prefix_cache *pc, struct kv_seq *kv)
{
    let_go(pc, kv);
    prefix_tree_purge(&pc->tree);
}
