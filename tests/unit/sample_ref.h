/* A slow and obvious statement of every sampling stage, in double precision over all candidates in
 * rank order. It shares no code with the sampler. Also what the sampling tests have in common. */
#ifndef INGOT_SAMPLE_REF_H
#define INGOT_SAMPLE_REF_H

#include "engine/sample_internal.h"
#include "tests/unit/unit.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- reference: all candidates in rank order, one stage after the other ---- */

struct ref_token {
    int32_t id;
    double x; /* logit */
    double p; /* of the present distribution */
};

struct ref {
    struct ref_token *t; /* in rank order */
    size_t n;
    double margin; /* nearest that a decision came to its threshold, relative */
    double temperature;
};

static inline int by_rank(const void *a, const void *b)
{
    const struct ref_token *s = a, *t = b;
    return s->x > t->x ? -1 : s->x < t->x ? 1 : s->id - t->id;
}

static inline void ref_softmax(struct ref *r)
{
    double sum = 0, max = r->t[0].x;
    for (size_t i = 0; i < r->n; i++)
        max = MAX(max, r->t[i].x);
    for (size_t i = 0; i < r->n; i++)
        sum += r->t[i].p = exp(r->t[i].x - max);
    for (size_t i = 0; i < r->n; i++)
        r->t[i].p /= sum;
}

static inline void ref_init(struct ref *r, const float *x, size_t n)
{
    *r = (struct ref){.t = calloc(n, sizeof *r->t), .margin = 1};
    for (size_t i = 0; i < n; i++)
        if (x[i] > -INFINITY)
            r->t[r->n++] = (struct ref_token){(int32_t)i, (double)x[i], 0};
    qsort(r->t, r->n, sizeof *r->t, by_rank);
}

static inline void ref_near(struct ref *r, double a, double b)
{
    if (a != b)
        r->margin = MIN(r->margin, fabs(a - b));
}

static inline void ref_cut(struct ref *r, double p, size_t keep)
{
    double sum = 0;
    for (size_t i = 0; i < r->n; i++) {
        sum += r->t[i].p;
        r->margin = MIN(r->margin, fabs(sum - p));
        if (sum >= p) {
            r->n = MIN(MAX(i + 1, keep), r->n);
            return;
        }
    }
}

static inline void ref_sigma(struct ref *r, double n_sigma, size_t keep)
{
    double mean = 0, var = 0;
    for (size_t i = 0; i < r->n; i++)
        mean += r->t[i].x / (double)r->n;
    for (size_t i = 0; i < r->n; i++)
        var += (r->t[i].x - mean) * (r->t[i].x - mean) / (double)r->n;
    double bar = r->t[0].x - n_sigma * sqrt(var);
    size_t n = 0;
    for (size_t i = 0; i < r->n; i++) {
        r->margin = MIN(r->margin, fabs(r->t[i].x - bar) + (r->n == 1));
        n += r->t[i].x >= bar;
    }
    r->n = MIN(MAX(n, keep), r->n);
}

struct deviation {
    double d;
    size_t rank;
};

static inline int by_deviation(const void *a, const void *b)
{
    const struct deviation *s = a, *t = b;
    return s->d < t->d ? -1 : s->d > t->d ? 1 : (int)s->rank - (int)t->rank;
}

static inline void ref_typical(struct ref *r, double p, size_t keep)
{
    ref_softmax(r);
    double entropy = 0, sum = 0;
    for (size_t i = 0; i < r->n; i++)
        entropy -= r->t[i].p > 0 ? r->t[i].p * log(r->t[i].p) : 0;
    struct deviation *d = calloc(r->n, sizeof *d);
    struct ref_token *t = calloc(r->n, sizeof *t);
    for (size_t i = 0; i < r->n; i++) {
        double surprise = r->t[i].p > 0 ? -log(r->t[i].p) : 1e9 - r->t[i].x;
        d[i] = (struct deviation){fabs(surprise - entropy), i};
    }
    for (size_t i = 1; i < r->n; i++) /* equal logits: equal by definition */
        if (r->t[i].x == r->t[i - 1].x)
            d[i].d = d[i - 1].d;
    qsort(d, r->n, sizeof *d, by_deviation);
    size_t n = 0;
    while (n < r->n) {
        t[n] = r->t[d[n].rank];
        sum += t[n++].p;
        r->margin = MIN(r->margin, fabs(sum - p));
        if (sum >= p && n >= keep)
            break;
    }
    if (n < r->n && r->t[d[n].rank].x != t[n - 1].x)
        r->margin = MIN(r->margin, d[n].d - d[n - 1].d);
    memcpy(r->t, t, n * sizeof *t);
    r->n = n;
    qsort(r->t, n, sizeof *t, by_rank);
    free(d);
    free(t);
}

static inline void ref_min_p(struct ref *r, double min_p, size_t keep)
{
    size_t n = 0;
    for (size_t i = 0; i < r->n; i++) {
        ref_near(r, r->t[i].p / r->t[0].p, min_p);
        n += r->t[i].p >= min_p * r->t[0].p;
    }
    r->n = MIN(MAX(n, keep), r->n);
}

static inline void ref_xtc(struct ref *r, double threshold, size_t keep)
{
    size_t above = 0;
    for (size_t i = 0; i < r->n; i++) {
        ref_near(r, r->t[i].p, threshold);
        above += r->t[i].p >= threshold;
    }
    if (above < 2 || r->n - above + 1 < keep)
        return;
    r->n -= above - 1;
    memmove(r->t, r->t + above - 1, r->n * sizeof *r->t);
}

static inline void ref_temperature(struct ref *r, const struct sample_params *p)
{
    double t = (double)p->temperature, entropy = 0;
    ref_softmax(r);
    for (size_t i = 0; i < r->n; i++)
        entropy -= r->t[i].p > 0 ? r->t[i].p * log(r->t[i].p) : 0;
    if (p->dynatemp_range > 0) {
        double lo = MAX(t - (double)p->dynatemp_range, 0), hi = t + (double)p->dynatemp_range;
        double share = r->n > 1 ? entropy / log((double)r->n) : 0;
        t = lo + (hi - lo) * pow(MAX(share, 0), (double)p->dynatemp_exponent);
    }
    r->temperature = t;
    for (size_t i = 0; i < r->n; i++)
        r->t[i].x /= t > 0 ? t : 1e-30;
    ref_softmax(r);
}

static inline void ref_chain(struct ref *r, const struct sample_params *p, bool coin)
{
    size_t keep = (size_t)MAX(p->min_keep, 1);
    if (p->top_n_sigma > 0)
        ref_sigma(r, (double)p->top_n_sigma, keep);
    if (p->top_k > 0)
        r->n = MIN(r->n, MAX((size_t)p->top_k, keep));
    if (p->typical_p < 1)
        ref_typical(r, (double)p->typical_p, keep);
    ref_softmax(r);
    if (p->top_p < 1)
        ref_cut(r, (double)p->top_p, keep);
    ref_softmax(r);
    if (p->min_p > 0)
        ref_min_p(r, (double)p->min_p, keep);
    ref_softmax(r);
    if (coin && p->xtc_threshold <= 0.5f)
        ref_xtc(r, (double)p->xtc_threshold, keep);
    ref_temperature(r, p);
}

/* ---- helpers ---- */

static inline struct sample_params neutral(void)
{
    struct sample_params p;
    sample_defaults(&p);
    p.temperature = 1;
    p.top_k = 0;
    p.top_p = 1;
    p.min_p = 0;
    p.seed = 1;
    return p;
}

static inline struct sampler *make(const struct sample_params *p, uint32_t n_vocab,
                                   uint32_t max_tokens)
{
    struct sampler *s;
    struct err e = {0};
    OK_CALL(sampler_new(&s, p, n_vocab, max_tokens, NULL, NULL, &e), e);
    CHECK(s);
    return s;
}

static inline int32_t next(struct sampler *s, const float *x)
{
    struct err e = {0};
    int32_t id = -1;
    OK_CALL(sampler_next(s, &id, x, NULL, &e), e);
    return id;
}

enum logits_kind { KIND_NORMAL, KIND_PEAKED, KIND_TIES, KIND_BANNED, KIND_EQUAL, KIND_END };

static inline void fill_logits(float *x, size_t n, enum logits_kind kind, uint64_t *rng)
{
    for (size_t i = 0; i < n; i++) {
        float g = unit_randn(rng);
        x[i] = kind == KIND_PEAKED  ? 6 * g
               : kind == KIND_TIES  ? floorf(2 * g)
               : kind == KIND_EQUAL ? 3
                                    : 2 * g;
        if (kind == KIND_BANNED && unit_rand(rng) % 3 == 0)
            x[i] = -INFINITY;
    }
    if (kind == KIND_BANNED)
        x[unit_rand(rng) % n] = 1;
}

#endif
