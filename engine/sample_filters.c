/* The chain after the penalties: truncation, XTC, temperature, mirostat. Each stage sees the
 * distribution that the one before left over, renormalised, at temperature 1. None sorts the
 * vocabulary; the pool's memory is used, nothing is allocated. */
#include "engine/sample_internal.h"

static size_t min_keep(const struct sampler *s)
{
    return (size_t)MAX(s->p.min_keep, 1);
}

/* Top-n-sigma (Tang et al. 2024, "Top-nσ: not all logits are you need"): keep the logits that are
 * at most n standard deviations (of all finite logits) below the highest. */
static float sigma_floor(const struct sampler *s, const struct pool *p)
{
    double sum = 0, squares = 0;
    size_t n = 0;
    for (size_t i = 0; i < p->n_vocab; i++) {
        if (!(p->x[i] >= -FLT_MAX))
            continue;
        double d = (double)p->x[i] - (double)p->max; /* from the maximum: nothing cancels badly */
        sum += d;
        squares += d * d;
        n++;
    }
    double mean = sum / (double)n;
    double variance = MAX(squares / (double)n - mean * mean, 0.0);
    return (float)((double)p->max - (double)s->p.top_n_sigma * sqrt(variance));
}

/* Min-p (Nguyen et al. 2024, "Turning up the heat: min-p sampling"): keep p_i >= min_p * p_max. */
static float min_p_floor(const struct sampler *s, const struct pool *p)
{
    return (float)((double)p->max + log((double)s->p.min_p));
}

static bool min_p_on(const struct sampler *s)
{
    return s->p.min_p > 0;
}

/* Nucleus (Holtzman et al. 2020, "The curious case of neural text degeneration", eq. 2): the
 * smallest set of best tokens whose probabilities reach top_p. Over a whole vocabulary it is looked
 * for among a few candidates that surely hold it or surely lie inside it. */
static void nucleus(struct sampler *s, struct pool *p)
{
    double mass = pool_mass(p, 1), target = (double)s->p.top_p * mass;
    struct pool whole = *p;
    if (!p->gathered && min_p_on(s) && min_keep(s) == 1) {
        /* What min-p will drop may go now: it is below everything that both keep. */
        pool_gather(p, min_p_floor(s, p));
        if (pool_mass(p, 1) < target)
            return; /* the nucleus is larger than what min-p leaves */
    } else if (!p->gathered) {
        pool_take_top(p, MAX(min_keep(s), p->n_vocab / SCAN_BLOCK / 8));
        if (pool_mass(p, 1) < target) {
            /* n candidates below exp(-d) weigh n exp(-d) at most: for this d less than what the
             * nucleus may leave out, so that it lies above. */
            double spare = mass - target, d = log((double)p->n_vocab / MAX(spare, 1e-30)) + 0.01;
            *p = whole;
            pool_gather(p, (float)((double)p->max - d));
            if (p->n < min_keep(s))
                *p = whole;
        }
    }
    pool_cut_mass(p, target, min_keep(s));
}

/* Locally typical (Meister et al. 2022, "Locally typical sampling", eq. 6): the smallest set of
 * tokens whose surprise is nearest to the entropy, with probability typical_p at least. */
static void typical(struct sampler *s, struct pool *p)
{
    if (p->gathered)
        keys_sort(p->keys, p->n); /* so that equal logits stand in order of id here too */
    pool_gather_all(p);
    double mass = pool_mass(p, 1), log_mass = log(mass), entropy = 0;
    for (size_t at = 0; at < p->n; at += SCAN_BLOCK) {
        float y[SCAN_BLOCK], w[SCAN_BLOCK];
        size_t len = MIN(p->n - at, (size_t)SCAN_BLOCK);
        for (size_t i = 0; i < len; i++)
            y[i] = key_logit(p->keys[at + i]);
        p->ops->weigh(w, y, len, p->max, 1);
        for (size_t i = 0; i < len; i++)
            if (w[i] > 0)
                entropy += (double)w[i] / mass * (log_mass - ((double)y[i] - (double)p->max));
    }
    /* Rank by how far the surprise is off; equal ones in the order of the pool. */
    for (size_t i = 0; i < p->n; i++) {
        double surprise = log_mass - ((double)key_logit(p->keys[i]) - (double)p->max);
        p->aux[i] = (uint64_t)float_order((float)fabs(surprise - entropy)) << 32 | (uint32_t)i;
    }
    size_t n = keys_cut_mass(p, p->aux, p->n, p->keys, (double)s->p.typical_p * mass);
    if (n < min_keep(s)) {
        n = MIN(min_keep(s), p->n);
        keys_select(p->aux, p->n, n);
    }
    uint64_t best = UINT64_MAX;
    for (size_t i = 0; i < n; i++) {
        p->aux[i] = p->keys[key_id(p->aux[i])];
        best = MIN(best, p->aux[i]);
    }
    memcpy(p->keys, p->aux, n * sizeof *p->keys);
    p->n = n;
    p->max = key_logit(best);
}

/* XTC, "exclude top choices" (p-e-w, pull request 6335 of text-generation-webui, 2024): with
 * probability xtc_probability, of the tokens that reach xtc_threshold all but the least likely go.
 */
static void exclude_top(struct sampler *s, struct pool *p)
{
    if (rng_uniform(s->p.seed, s->n_drawn, RNG_XTC) >= (double)s->p.xtc_probability)
        return;
    pool_gather_all(p);
    float bar = (float)((double)p->max + log((double)s->p.xtc_threshold * pool_mass(p, 1)));
    uint64_t last = 0; /* the last in rank of those that reach the bar */
    size_t n_above = 0;
    for (size_t i = 0; i < p->n; i++) {
        if (key_logit(p->keys[i]) < bar)
            continue;
        n_above++;
        last = MAX(last, p->keys[i]);
    }
    if (n_above < 2 || p->n - (n_above - 1) < min_keep(s))
        return;
    size_t n = 0;
    for (size_t i = 0; i < p->n; i++) {
        p->keys[n] = p->keys[i];
        n += p->keys[i] >= last;
    }
    p->n = n;
    p->max = key_logit(last);
}

/* 1 / temperature. Dynamic (Zhu et al. 2024 and its use in text-generation-webui): between
 * temperature - range and temperature + range as the entropy is between 0 and that of a uniform
 * distribution over the candidates, to the power of the exponent. */
static float temperature_scale(struct sampler *s, struct pool *p)
{
    double t = (double)s->p.temperature;
    if (s->p.dynatemp_range > 0) {
        pool_gather_all(p);
        double range = (double)s->p.dynatemp_range, lo = MAX(t - range, 0.0), hi = t + range;
        double mass = pool_mass(p, 1), sum = 0;
        for (size_t i = 0; i < p->n; i++) {
            double y = (double)key_logit(p->keys[i]) - (double)p->max;
            sum += y > -87 ? exp(y) * y : 0;
        }
        double entropy = log(mass) - sum / mass;
        double share = p->n > 1 ? entropy / log((double)p->n) : 0;
        share = share < 0 ? 0 : share > 1 ? 1 : share;
        t = lo + (hi - lo) * pow(share, (double)s->p.dynatemp_exponent);
    }
    return (float)MIN(1 / t, (double)FLT_MAX); /* 1 / 0: only the best keep any weight */
}

int32_t chain_draw(struct sampler *s)
{
    struct pool *p = &s->pool;
    const struct sample_params *a = &s->p;
    /* Both are rules on rank, so they commute; the cut by rank is the cheap one to take first. */
    float sigma = a->top_n_sigma > 0 ? sigma_floor(s, p) : -INFINITY;
    if (a->top_k > 0 && (size_t)a->top_k < p->n_vocab)
        pool_take_top(p, MAX((size_t)a->top_k, min_keep(s)));
    if (sigma > -INFINITY)
        pool_keep_logits(p, sigma, min_keep(s));
    if (a->typical_p < 1)
        typical(s, p);
    if (a->top_p < 1)
        nucleus(s, p);
    if (min_p_on(s))
        pool_keep_logits(p, min_p_floor(s, p), min_keep(s));
    if (a->xtc_probability > 0 && a->xtc_threshold <= 0.5f)
        exclude_top(s, p);
    float scale = temperature_scale(s, p);
    return pool_draw(p, scale, rng_uniform(a->seed, s->n_drawn, RNG_DRAW));
}

/* ---- mirostat: Basu et al. 2021, "Mirostat: a neural text decoding algorithm that directly
 * controls perplexity". Surprise is in bits, under the distribution before its truncation, as in
 * the paper; it is measured after the temperature, which is part of that distribution. ---- */

/* Algorithm 1: the Zipf exponent of the best candidates gives the k whose expected surprise is mu.
 */
static size_t zipf_k(const struct sampler *s, struct pool *p, float scale)
{
    pool_take_top(p, MIN((size_t)MIROSTAT_WINDOW, p->n_vocab));
    keys_sort(p->keys, p->n);
    double tb = 0, tt = 0;
    for (size_t i = 0; i + 1 < p->n; i++) {
        double t = log((double)(i + 2) / (double)(i + 1));
        double b =
            ((double)key_logit(p->keys[i]) - (double)key_logit(p->keys[i + 1])) * (double)scale;
        tb += t * b;
        tt += t * t;
    }
    double exponent = tt > 0 ? tb / tt : 1, off = exponent - 1, n = (double)p->n_vocab;
    /* At exponent 1 the bracket's limit is 2^mu / ln n. */
    double ratio = fabs(off) < 1e-9 ? 1 / log(MAX(n, 2.0)) : off / (1 - pow(n, -off));
    double k = exponent > 1e-9 ? pow(ratio * exp2(s->mu), 1 / exponent) : n;
    return k >= n ? p->n_vocab : k > 1 ? (size_t)k : 1; /* NaN gives 1 */
}

int32_t mirostat_draw(struct sampler *s)
{
    struct pool *p = &s->pool, whole = *p;
    float scale = temperature_scale(s, p);
    *p = whole; /* the temperature may have gathered; the cuts below do it cheaper */
    double mass = pool_mass(p, scale);
    if (s->p.mirostat == 1) {
        size_t k = zipf_k(s, p, scale);
        *p = whole;
        pool_take_top(p, MAX(k, min_keep(s)));
    } else { /* 2: drop what is more surprising than mu (the authors' later, direct form) */
        double most = s->mu * 0.693147180559945309 - log(mass); /* nats below the best */
        pool_keep_logits(p, (float)((double)p->max - most / (double)scale), min_keep(s));
    }
    int32_t id = pool_draw(p, scale, rng_uniform(s->p.seed, s->n_drawn, RNG_DRAW));
    double below = ((double)p->x[id] - (double)p->max) * (double)scale;
    double surprise = (log(mass) - below) / 0.693147180559945309;
    s->mu -= (double)s->p.mirostat_eta * (surprise - (double)s->p.mirostat_tau);
    return id;
}
