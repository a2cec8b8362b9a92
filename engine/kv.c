/* KV bookkeeping: the pool of pages and the slots that sequences run in. Page numbers only: the
 * bytes are the backend's. A page has a reference for each slot that holds it and one for the
 * prefix tree, and is written only by a slot that holds it alone. */
#include "engine/engine_internal.h"

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

int kv_seq_init(struct kv_seq *s, const struct limits *l, struct err *e)
{
    s->ids = mem_array(l->n_ctx, sizeof *s->ids);
    s->pages = mem_array(l->pages_per_seq, sizeof *s->pages);
    if (!s->ids || !s->pages)
        return err_set(e, ERR_MEMORY, "out of memory for a sequence of %u tokens", l->n_ctx);
    s->node = -1;
    return 0;
}

void kv_seq_fini(struct kv_seq *s)
{
    mem_free(s->ids);
    mem_free(s->pages);
    *s = (struct kv_seq){0};
}
