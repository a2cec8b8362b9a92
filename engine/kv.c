/* KV bookkeeping: the pool of pages, the slots that sequences run in, and the host memory where
 * pages of swapped sequences wait. The pool has page numbers only: the bytes are the backend's. A
 * page has a reference for each slot that holds it and one for each node of the prefix tree that
 * does. It is written by one slot at most, and only behind what it holds already: the tree may have
 * the beginning of a page that its slot goes on filling. */
#include "engine/engine_internal.h"

uint64_t kv_lists_bytes(const struct limits *l)
{
    uint64_t page = sizeof *(struct kv_pool){0}.free + sizeof *(struct kv_pool){0}.refs +
                    sizeof *(struct kv_pool){0}.slots;
    uint64_t slot = sizeof(struct kv_seq) + (uint64_t)l->n_ctx * sizeof(int32_t) +
                    (uint64_t)l->pages_per_seq * 2 * sizeof(int32_t);
    return page * l->n_pages + slot * l->n_seqs + sizeof(int32_t) * (uint64_t)l->n_swap_pages;
}

int kv_pool_init(struct kv_pool *p, uint32_t n_pages, struct err *e)
{
    p->free = mem_array(n_pages, sizeof *p->free);
    p->refs = mem_array(n_pages, sizeof *p->refs);
    p->slots = mem_array(n_pages, sizeof *p->slots);
    if (!p->free || !p->refs || !p->slots) {
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
    mem_free(p->slots);
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
    if (--p->refs[page] == 0) {
        CHECK(!p->slots[page]);
        p->free[p->n_free++] = page;
    }
}

void kv_seq_add(struct kv_seq *s, struct kv_pool *p, int32_t page)
{
    s->pages[s->n_pages++] = page;
    p->n_held += p->slots[page]++ == 0;
}

static void slot_leaves(struct kv_pool *p, int32_t page)
{
    CHECK(p->slots[page] > 0);
    p->n_held -= --p->slots[page] == 0;
    kv_page_drop(p, page);
}

void kv_seq_replace(struct kv_seq *s, struct kv_pool *p, int32_t at, int32_t page)
{
    int32_t old = s->pages[at];
    s->pages[at] = page;
    p->n_held += p->slots[page]++ == 0;
    slot_leaves(p, old);
}

void kv_seq_slide(struct kv_seq *s, struct kv_pool *p, int32_t n_pages)
{
    for (; s->n_gone < n_pages; s->n_gone++) {
        slot_leaves(p, s->pages[s->n_gone]);
        s->pages[s->n_gone] = -1;
    }
}

void kv_seq_drop(struct kv_seq *s, struct kv_pool *p)
{
    while (s->n_pages > s->n_gone)
        slot_leaves(p, s->pages[--s->n_pages]);
    s->n_pages = s->n_gone = 0;
}

int32_t kv_seq_own(const struct kv_seq *s, const struct kv_pool *p)
{
    int32_t n = 0;
    for (int32_t i = s->n_gone; i < s->n_pages; i++)
        n += p->slots[s->pages[i]] == 1;
    return n;
}

int kv_seq_init(struct kv_seq *s, const struct limits *l, struct err *e)
{
    s->ids = mem_array(l->n_ctx, sizeof *s->ids);
    s->pages = mem_array(l->pages_per_seq, sizeof *s->pages);
    s->parked = mem_array(l->pages_per_seq, sizeof *s->parked);
    if (!s->ids || !s->pages || !s->parked)
        return err_set(e, ERR_MEMORY, "out of memory for a sequence of %u tokens", l->n_ctx);
    for (uint32_t i = 0; i < l->pages_per_seq; i++)
        s->parked[i] = -1;
    s->node = -1;
    return 0;
}

void kv_seq_fini(struct kv_seq *s)
{
    mem_free(s->ids);
    mem_free(s->pages);
    mem_free(s->parked);
    *s = (struct kv_seq){0};
}

/* ---- the swap area ---- */

int kv_swap_init(struct kv_swap *w, uint32_t n_pages, uint64_t page_bytes, struct err *e)
{
    size_t bytes;
    if (!n_pages)
        return 0;
    w->free = mem_array(n_pages, sizeof *w->free);
    if (w->free && !mul_over((size_t)n_pages, (size_t)page_bytes, &bytes))
        w->mem = mem_pages(bytes);
    if (!w->mem) {
        kv_swap_fini(w);
        return err_set(e, ERR_MEMORY, "out of memory for a swap area of %u KV pages", n_pages);
    }
    w->page_bytes = (size_t)page_bytes;
    w->n_pages = w->n_free = (int32_t)n_pages;
    for (int32_t i = 0; i < w->n_free; i++)
        w->free[i] = w->n_free - 1 - i; /* what was never used takes no memory */
    return 0;
}

void kv_swap_fini(struct kv_swap *w)
{
    mem_pages_free(w->mem, (size_t)w->n_pages * w->page_bytes);
    mem_free(w->free);
    *w = (struct kv_swap){0};
}

int32_t kv_swap_take(struct kv_swap *w)
{
    return w->n_free ? w->free[--w->n_free] : -1;
}

void kv_swap_drop(struct kv_swap *w, int32_t at)
{
    CHECK(at >= 0 && at < w->n_pages && w->n_free < w->n_pages);
    w->free[w->n_free++] = at;
}

uint8_t *kv_swap_page(const struct kv_swap *w, int32_t at)
{
    return w->mem + (size_t)at * w->page_bytes;
}
