/* Which candidates are left: gathering them from a vocabulary of logits by threshold or rank, and
 * the selections (k best, a given mass) that need no full sort. Works in the sampler's scratch;
 * allocates nothing. Sums run over blocks of SCAN_BLOCK in order, each by scan_ops.sum. */
#include "engine/sample_internal.h"

/* ---- selection among distinct keys ---- */

/* A fixed sequence of pivots: the same keys always end in the same order. */
static size_t next_pivot(uint64_t *state, size_t n)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (size_t)(((*state >> 32) * (uint64_t)n) >> 32);
}

static uint64_t median3(uint64_t a, uint64_t b, uint64_t c)
{
    uint64_t lo = MIN(a, b), hi = MAX(a, b);
    return c < lo ? lo : c > hi ? hi : c;
}

/* Keys below some pivot to the front; returns how many, neither 0 nor n. n > 2, keys distinct. */
static size_t keys_partition(uint64_t *keys, size_t n, uint64_t *state)
{
    size_t at = next_pivot(state, n - 2);
    uint64_t pivot = median3(keys[0], keys[at + 1], keys[n - 1]);
    size_t n_below = 0;
    for (size_t i = 0; i < n; i++) { /* swaps always: no branch to guess */
        uint64_t k = keys[i];
        keys[i] = keys[n_below];
        keys[n_below] = k;
        n_below += k < pivot;
    }
    return n_below;
}

static void insertion_sort(uint64_t *keys, size_t n)
{
    for (size_t i = 1; i < n; i++) {
        uint64_t k = keys[i];
        size_t j = i;
        for (; j > 0 && keys[j - 1] > k; j--)
            keys[j] = keys[j - 1];
        keys[j] = k;
    }
}

void keys_sort(uint64_t *keys, size_t n)
{
    uint64_t state = n;
    while (n > 24) { /* recursion on the smaller part only: its depth is below log2 n */
        size_t cut = keys_partition(keys, n, &state);
        if (cut < n - cut) {
            keys_sort(keys, cut);
            keys += cut;
            n -= cut;
        } else {
            keys_sort(keys + cut, n - cut);
            n = cut;
        }
    }
    insertion_sort(keys, n);
}

void keys_select(uint64_t *keys, size_t n, size_t k)
{
    uint64_t state = n;
    while (k > 0 && k < n) {
        if (n <= 24) {
            insertion_sort(keys, n);
            return;
        }
        size_t cut = keys_partition(keys, n, &state);
        if (k < cut) {
            n = cut;
        } else {
            keys += cut;
            n -= cut;
            k -= cut;
        }
    }
}

/* ---- mass ---- */

/* The logits of candidates, SCAN_BLOCK at most, in buf. */
static void keys_logits(float *buf, const uint64_t *keys, size_t n, const uint64_t *values)
{
    if (values)
        for (size_t i = 0; i < n; i++)
            buf[i] = key_logit(values[key_id(keys[i])]);
    else
        for (size_t i = 0; i < n; i++)
            buf[i] = key_logit(keys[i]);
}

static double keys_mass(const struct pool *p, const uint64_t *keys, size_t n,
                        const uint64_t *values)
{
    float w[SCAN_BLOCK];
    double mass = 0;
    for (size_t at = 0; at < n; at += SCAN_BLOCK) {
        size_t len = MIN(n - at, (size_t)SCAN_BLOCK);
        keys_logits(w, keys + at, len, values);
        p->ops->weigh(w, w, len, p->max, 1);
        mass += p->ops->sum(w, len);
    }
    return mass;
}

size_t keys_cut_mass(const struct pool *p, uint64_t *keys, size_t n, const uint64_t *values,
                     double target)
{
    uint64_t state = n;
    size_t lo = 0, hi = n;
    while (hi - lo > 24) {
        size_t cut = keys_partition(keys + lo, hi - lo, &state);
        double mass = keys_mass(p, keys + lo, cut, values);
        if (mass >= target) {
            hi = lo + cut;
        } else {
            target -= mass;
            lo += cut;
        }
    }
    insertion_sort(keys + lo, hi - lo);
    double mass = 0;
    for (size_t i = lo; i < hi; i++) {
        mass += keys_mass(p, keys + i, 1, values);
        if (mass >= target)
            return i + 1;
    }
    return hi;
}

/* ---- the pool ---- */

/* Weights of the candidates of one block, in w. */
static size_t block_weigh(float *w, const struct pool *p, size_t at, float scale)
{
    size_t len = MIN(p->n - at, (size_t)SCAN_BLOCK);
    const float *x = p->x + at;
    if (p->gathered) {
        keys_logits(w, p->keys + at, len, NULL);
        x = w;
    }
    p->ops->weigh(w, x, len, p->max, scale);
    return len;
}

double pool_mass(const struct pool *p, float scale)
{
    float w[SCAN_BLOCK];
    double mass = 0;
    for (size_t at = 0; at < p->n; at += SCAN_BLOCK) {
        size_t len = block_weigh(w, p, at, scale);
        mass += p->block_mass[at / SCAN_BLOCK] = p->ops->sum(w, len);
    }
    return mass;
}

void pool_gather(struct pool *p, float at_least)
{
    at_least = MAX(at_least, -FLT_MAX);
    size_t n = 0;
    for (size_t at = 0; at < p->n_vocab; at += SCAN_BLOCK) {
        if (p->block_max[at / SCAN_BLOCK] < at_least)
            continue;
        size_t end = MIN(p->n_vocab, at + SCAN_BLOCK);
        for (size_t i = at; i < end; i++) {
            p->keys[n] = key_make(p->x[i], (uint32_t)i); /* n <= i: in bounds, taken or not */
            n += p->x[i] >= at_least;
        }
    }
    p->n = n;
    p->gathered = true;
}

void pool_gather_all(struct pool *p)
{
    if (!p->gathered)
        pool_gather(p, -FLT_MAX);
}

void pool_take_top(struct pool *p, size_t k)
{
    size_t n_blocks = (p->n_vocab + SCAN_BLOCK - 1) / SCAN_BLOCK;
    if (!p->gathered && k <= n_blocks / 2) {
        /* k blocks reach the k-th highest block maximum, so at least k logits do: none below it
         * can be among the k best. */
        for (size_t b = 0; b < n_blocks; b++)
            p->aux[b] = key_make(p->block_max[b], (uint32_t)b);
        keys_select(p->aux, n_blocks, k);
        uint64_t kth = p->aux[0];
        for (size_t b = 1; b < k; b++)
            kth = MAX(kth, p->aux[b]);
        pool_gather(p, key_logit(kth));
    }
    pool_gather_all(p);
    if (k >= p->n)
        return;
    keys_select(p->keys, p->n, k);
    p->n = k;
}

void pool_keep_logits(struct pool *p, float at_least, size_t min_keep)
{
    struct pool before = *p;
    size_t n = 0;
    if (!p->gathered) {
        pool_gather(p, at_least);
        if (p->n >= min_keep)
            return;
        *p = before;
    } else {
        for (size_t i = 0; i < p->n; i++)
            n += key_logit(p->keys[i]) >= at_least;
    }
    if (n < min_keep) {
        pool_take_top(p, min_keep);
        return;
    }
    n = 0;
    for (size_t i = 0; i < p->n; i++) {
        p->keys[n] = p->keys[i];
        n += key_logit(p->keys[i]) >= at_least;
    }
    p->n = n;
}

void pool_cut_mass(struct pool *p, double target, size_t min_keep)
{
    pool_gather_all(p);
    size_t n = keys_cut_mass(p, p->keys, p->n, NULL, target);
    if (n < min_keep) /* the n best are in front already; this only adds to them */
        pool_take_top(p, min_keep);
    else
        p->n = n;
}

int32_t pool_draw(const struct pool *p, float scale, double u)
{
    double left = u * pool_mass(p, scale);
    size_t end = (p->n - 1) / SCAN_BLOCK, b = 0, last = 0;
    while (end > 0 && !(p->block_mass[end] > 0))
        end--;
    for (; b < end && left >= p->block_mass[b]; b++)
        left -= p->block_mass[b];
    /* Rounding may leave a trace after the last weight of a block: the next candidate with weight
     * takes it, and after all of them the last one. Block `end` has one. */
    for (bool found = false; b <= end && !found; b++) {
        float w[SCAN_BLOCK];
        size_t at = b * SCAN_BLOCK, len = block_weigh(w, p, at, scale);
        for (size_t i = 0; i < len && !found; i++) {
            if (!(w[i] > 0))
                continue;
            last = at + i;
            found = left < (double)w[i];
            left -= (double)w[i];
        }
    }
    return (int32_t)(p->gathered ? key_id(p->keys[last]) : last);
}
