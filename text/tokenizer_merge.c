/* The merge loop that both algorithms share: of all adjacent pairs take the one of lowest rank, the
 * leftmost among equals, until no pair merges. Short words by scanning an array; long ones by a
 * heap over a linked list, O(n log n) whatever the text. Memory is the call's (struct merge_work).
 */
#include "text/text_internal.h"

#include <string.h>

static const uint32_t no_rank = (uint32_t)RANK_NONE;
static const uint32_t no_index = UINT32_MAX;

int merge_begin(struct encode *c, uint32_t n)
{
    struct merge_work *w = &c->work;
    w->n = n;
    if (n <= MERGE_SMALL) {
        w->syms = w->small;
        return 0;
    }
    if (n > w->cap_large) {
        size_t cap = MAX((size_t)n + 1, (size_t)w->cap_large * 2);
        mem_free(w->large);
        mem_free(w->prev);
        mem_free(w->next);
        w->cap_large = 0;
        w->large = mem_array(cap, sizeof *w->large);
        w->prev = mem_array(cap, sizeof *w->prev);
        w->next = mem_array(cap, sizeof *w->next);
        if (!w->large || !w->prev || !w->next)
            return err_set(c->e, ERR_MEMORY, "no memory to tokenize a word of %u symbols", n);
        w->cap_large = (uint32_t)MIN(cap, (size_t)UINT32_MAX);
    }
    w->syms = w->large;
    return 0;
}

void merge_fini(struct merge_work *w)
{
    mem_free(w->large);
    mem_free(w->prev);
    mem_free(w->next);
    mem_free(w->heap);
    mem_free(w->spans);
    mem_free(w->left_bytes);
}

/* What a and its right neighbour b, which ends at byte `end`, would merge to. */
static inline void pair_rank(const struct tokenizer *t, const char *p, struct symbol *a,
                             const struct symbol *b, uint32_t end)
{
    a->rank = no_rank;
    if (t->kind == TOKENIZER_BPE) {
        const struct pair_slot *s = pair_find(t, a->id, b->id);
        if (s) {
            a->rank = s->rank;
            a->to = s->to;
        }
        return;
    }
    int32_t id = piece_find(t, p + a->off, end - a->off);
    if (id >= 0) {
        a->rank = t->ranks[id];
        a->to = id;
    }
}

/* Remember how an unused piece was made, so that it can be taken apart again. */
static int unused_note(struct encode *c, const struct symbol *a, const struct symbol *b)
{
    struct merge_work *w = &c->work;
    if (!c->t->has_unused || c->t->types[a->to] != TOKEN_UNUSED)
        return 0;
    if (!w->left_bytes && !(w->left_bytes = mem_array(c->t->n_vocab, sizeof *w->left_bytes)))
        return err_set(c->e, ERR_MEMORY, "no memory to tokenize");
    w->left_bytes[a->to] = b->off - a->off;
    return 0;
}

static int merge_small(struct encode *c, const char *p, uint32_t n_bytes)
{
    struct symbol *s = c->work.syms;
    uint32_t n = c->work.n;
    for (;;) {
        uint32_t best = 0;
        for (uint32_t i = 1; i < n; i++)
            if (s[i].rank < s[best].rank)
                best = i;
        if (s[best].rank == no_rank)
            break;
        if (unused_note(c, &s[best], &s[best + 1]))
            return -1;
        s[best].id = s[best].to;
        n--;
        memmove(&s[best + 1], &s[best + 2], (n - best - 1) * sizeof *s);
        s[best].rank = no_rank;
        if (best + 1 < n)
            pair_rank(c->t, p, &s[best], &s[best + 1], best + 2 < n ? s[best + 2].off : n_bytes);
        if (best)
            pair_rank(c->t, p, &s[best - 1], &s[best], best + 1 < n ? s[best + 1].off : n_bytes);
    }
    c->work.n = n;
    return 0;
}

/* ---- heap of rank << 32 | index: smallest first, so equal ranks come out left to right ---- */

static void heap_down(struct merge_work *w, size_t i)
{
    uint64_t key = w->heap[i];
    for (size_t child; (child = 2 * i + 1) < w->n_heap; i = child) {
        if (child + 1 < w->n_heap && w->heap[child + 1] < w->heap[child])
            child++;
        if (w->heap[child] >= key)
            break;
        w->heap[i] = w->heap[child];
    }
    w->heap[i] = key;
}

static void heap_put(struct merge_work *w, const struct symbol *a)
{
    if (a->rank == no_rank)
        return;
    uint64_t key = (uint64_t)a->rank << 32 | (uint32_t)(a - w->syms);
    size_t i = w->n_heap++;
    CHECK(w->n_heap <= w->cap_heap);
    for (; i && w->heap[(i - 1) / 2] > key; i = (i - 1) / 2)
        w->heap[i] = w->heap[(i - 1) / 2];
    w->heap[i] = key;
}

static uint64_t heap_take(struct merge_work *w)
{
    uint64_t top = w->heap[0];
    w->heap[0] = w->heap[--w->n_heap];
    if (w->n_heap)
        heap_down(w, 0);
    return top;
}

/* Links, and the heap of all pairs. Every merge takes one key out and puts at most two in, and
 * there are fewer merges than symbols: 2n keys are enough. */
static int merge_large_begin(struct encode *c)
{
    struct merge_work *w = &c->work;
    size_t need = 2 * (size_t)w->n;
    if (need > w->cap_heap) {
        mem_free(w->heap);
        w->heap = mem_array(need, sizeof *w->heap);
        w->cap_heap = w->heap ? need : 0;
        if (!w->heap)
            return err_set(c->e, ERR_MEMORY, "no memory to tokenize a word of %u symbols", w->n);
    }
    w->n_heap = 0;
    for (uint32_t i = 0; i < w->n; i++) {
        w->prev[i] = i ? i - 1 : no_index;
        w->next[i] = i + 1 < w->n ? i + 1 : no_index;
        if (w->syms[i].rank != no_rank)
            w->heap[w->n_heap++] = (uint64_t)w->syms[i].rank << 32 | i;
    }
    for (size_t i = w->n_heap / 2; i-- > 0;)
        heap_down(w, i);
    return 0;
}

static void pair_update(struct encode *c, const char *p, uint32_t n_bytes, uint32_t i)
{
    struct merge_work *w = &c->work;
    uint32_t j = w->next[i];
    w->syms[i].rank = no_rank;
    if (j == no_index)
        return;
    uint32_t end = w->next[j] == no_index ? n_bytes : w->syms[w->next[j]].off;
    pair_rank(c->t, p, &w->syms[i], &w->syms[j], end);
    heap_put(w, &w->syms[i]);
}

static int merge_large(struct encode *c, const char *p, uint32_t n_bytes)
{
    struct merge_work *w = &c->work;
    if (merge_large_begin(c))
        return -1;
    while (w->n_heap) {
        uint64_t key = heap_take(w);
        uint32_t i = (uint32_t)key, j = w->next[i];
        /* A key is stale when its pair has changed since; a dead symbol has no rank. */
        if (w->syms[i].rank != key >> 32 || j == no_index)
            continue;
        if (unused_note(c, &w->syms[i], &w->syms[j]))
            return -1;
        w->syms[i].id = w->syms[i].to;
        w->syms[j].rank = no_rank;
        w->next[i] = w->next[j];
        if (w->next[i] != no_index)
            w->prev[w->next[i]] = i;
        pair_update(c, p, n_bytes, i);
        if (w->prev[i] != no_index)
            pair_update(c, p, n_bytes, w->prev[i]);
    }
    uint32_t n = 0;
    for (uint32_t i = 0; i != no_index; i = w->next[i])
        w->syms[n++] = w->syms[i];
    w->n = n;
    return 0;
}

int merge_run(struct encode *c, const char *p, uint32_t n_bytes)
{
    struct merge_work *w = &c->work;
    for (uint32_t i = 0; i + 1 < w->n; i++)
        pair_rank(c->t, p, &w->syms[i], &w->syms[i + 1],
                  i + 2 < w->n ? w->syms[i + 2].off : n_bytes);
    if (!w->n)
        return 0;
    w->syms[w->n - 1].rank = no_rank;
    return w->syms == w->small ? merge_small(c, p, n_bytes) : merge_large(c, p, n_bytes);
}
