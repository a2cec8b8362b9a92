/* KV bookkeeping: which page belongs to whom, which tokens a slot's KV stands for, and what a new
 * prompt can take over. Page numbers only: the bytes are the backend's. A page has a reference for
 * each timeline that holds it and is written only by one that holds it alone. */
#include "engine/engine_internal.h"

#include <string.h>

int kv_pool_init(struct kv_pool *p, uint32_t n_pages, struct err *e)
{
    p->free = mem_array(n_pages, sizeof *p->free);
    p->refs = mem_array(n_pages, sizeof *p->refs);
    if (!p->free || !p->refs) {
        kv_pool_fini(p);
        return err_set(e, ERR_MEMORY, "out of memory for the list of %u KV pages", n_pages);
    }
    p->n_pages = p->n_free = (int32_t)n_pages;
    for (int32_t i = 0; i < p->n_free; i++)
        p->free[i] = p->n_free - 1 - i; /* low numbers are handed out first */
    return 0;
}

void kv_pool_fini(struct kv_pool *p)
{
    mem_free(p->free);
    mem_free(p->refs);
    *p = (struct kv_pool){0};
}

int32_t kv_page_take(struct kv_pool *p)
{
    if (!p->n_free)
        return -1;
    int32_t page = p->free[--p->n_free];
    CHECK(p->refs[page] == 0);
    p->refs[page] = 1;
    return page;
}

void kv_page_share(struct kv_pool *p, int32_t page)
{
    CHECK(p->refs[page] > 0);
    p->refs[page]++;
}

void kv_page_drop(struct kv_pool *p, int32_t page)
{
    CHECK(p->refs[page] > 0);
    if (--p->refs[page] == 0)
        p->free[p->n_free++] = page;
}

bool kv_page_shared(const struct kv_pool *p, int32_t page)
{
    return p->refs[page] > 1;
}

int kv_seq_init(struct kv_seq *s, const struct limits *l, struct err *e)
{
    s->ids = mem_array(l->n_ctx, sizeof *s->ids);
    s->pages = mem_array(l->pages_per_seq, sizeof *s->pages);
    if (!s->ids || !s->pages)
        return err_set(e, ERR_MEMORY, "out of memory for a sequence of %u tokens", l->n_ctx);
    return 0;
}

void kv_seq_fini(struct kv_seq *s)
{
    mem_free(s->ids);
    mem_free(s->pages);
    *s = (struct kv_seq){0};
}

static void drop_from(struct kv_seq *s, struct kv_pool *p, int32_t n_keep)
{
    while (s->n_pages > n_keep)
        kv_page_drop(p, s->pages[--s->n_pages]);
}

void kv_seq_clear(struct kv_seq *s, struct kv_pool *p)
{
    drop_from(s, p, 0);
    s->n_kv = 0;
}

int kv_seq_reserve(struct kv_seq *s, struct kv_pool *p, int32_t n_tokens)
{
    int32_t n = (n_tokens + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
    while (s->n_pages < n) {
        int32_t page = kv_page_take(p);
        if (page < 0)
            return -1;
        s->pages[s->n_pages++] = page;
    }
    return 0;
}

int kv_seq_inherit(struct kv_seq *dst, const struct kv_seq *src, int32_t n_keep, struct kv_pool *p,
                   const struct backend *be, struct exec *x)
{
    CHECK(!dst->owner && n_keep > 0 && n_keep <= src->n_kv);
    int32_t whole = n_keep / KV_PAGE_TOKENS;
    bool part = n_keep % KV_PAGE_TOKENS != 0;
    if (dst != src) {
        kv_seq_clear(dst, p);
        for (int32_t i = 0; i < whole; i++) {
            kv_page_share(p, src->pages[i]);
            dst->pages[dst->n_pages++] = src->pages[i];
        }
        memcpy(dst->ids, src->ids, (size_t)n_keep * sizeof *dst->ids);
    } else {
        drop_from(dst, p, whole + part);
    }
    dst->n_kv = n_keep;
    if (!part || (dst == src && !kv_page_shared(p, dst->pages[whole])))
        return 0;
    int32_t own = kv_page_take(p);
    if (own < 0) {
        kv_seq_clear(dst, p);
        return -1;
    }
    be->kv_copy(x, own, src->pages[whole]);
    if (dst == src)
        kv_page_drop(p, dst->pages[whole]);
    dst->pages[whole] = own;
    dst->n_pages = whole + 1;
    return 0;
}

static int32_t common_prefix(const struct kv_seq *s, const int32_t *ids, size_t n)
{
    int32_t max = (int32_t)MIN((size_t)s->n_kv, n), i = 0;
    while (i < max && s->ids[i] == ids[i])
        i++;
    return i;
}

struct kv_seq *kv_seq_choose(struct kv_seq **src, int32_t *n_keep, struct kv_seq *seqs,
                             uint32_t n_seqs, const int32_t *ids, size_t n)
{
    struct kv_seq *best = NULL, *idle = NULL;
    int32_t best_n = 0;
    for (uint32_t i = 0; i < n_seqs; i++) {
        struct kv_seq *s = &seqs[i];
        int32_t c = common_prefix(s, ids, n - 1);
        /* of two as good, an idle one: it can be taken over without a copy */
        if (c > best_n || (c && c == best_n && best->owner && !s->owner)) {
            best = s;
            best_n = c;
        }
    }
    for (uint32_t i = 0; i < n_seqs; i++) {
        struct kv_seq *s = &seqs[i];
        if (s->owner || s == best)
            continue;
        if (!idle || (idle->n_kv && (!s->n_kv || s->last_used < idle->last_used)))
            idle = s;
    }
    *src = best;
    *n_keep = best_n;
    if (best && !best->owner && (!idle || best_n >= best->n_kv / 2))
        return best;
    CHECK(idle);
    return idle;
}
