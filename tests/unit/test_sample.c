/* Sampling, stage by stage, against the reference of sample_ref.h: the tests look into the
 * sampler's pool to see which candidates were left, and check the draw that was made among them. A
 * case in which the reference itself stands within 1e-6 of a cut is passed over. */
#include "tests/unit/sample_ref.h"

static size_t pool_size(const struct pool *p)
{
    size_t n = 0;
    if (p->gathered)
        return p->n;
    for (size_t i = 0; i < p->n_vocab; i++)
        n += p->x[i] > -INFINITY;
    return n;
}

/* The i-th id of the pool in its own order, in which the draw walks. */
static int32_t pool_id(const struct pool *p, size_t i)
{
    return p->gathered ? (int32_t)key_id(p->keys[i]) : (int32_t)i;
}

/* Compare what is left, and the token drawn, with the reference; false if too near to tell. */
static bool same_as_reference(const struct sampler *s, int32_t id, const float *x, const char *what)
{
    struct ref r;
    ref_init(&r, x, s->n_vocab);
    uint64_t at = s->n_drawn - 1;
    bool coin = s->p.xtc_probability > 0 &&
                rng_uniform(s->p.seed, at, RNG_XTC) < (double)s->p.xtc_probability;
    ref_chain(&r, &s->p, coin);
    bool clear = r.margin > 1e-6;
    double *prob = calloc(s->n_vocab, sizeof *prob);
    for (size_t i = 0; i < r.n; i++)
        prob[r.t[i].id] = r.t[i].p;
    if (clear) {
        size_t n = pool_size(&s->pool);
        OK_MSG(n == r.n, "%s n=%u: %zu left, reference %zu", what, s->n_vocab, n, r.n);
        bool *in = calloc(s->n_vocab, 1);
        for (size_t i = 0; i < r.n; i++)
            in[r.t[i].id] = true;
        size_t wrong = 0;
        for (size_t i = 0; s->pool.gathered && i < n; i++)
            wrong += !in[key_id(s->pool.keys[i])];
        OK_MSG(!wrong, "%s n=%u: %zu tokens are not in the reference's set", what, s->n_vocab,
               wrong);
        free(in);
        double u = rng_uniform(s->p.seed, at, RNG_DRAW), before = 0;
        size_t i = 0;
        while (i + 1 < s->pool.n && pool_id(&s->pool, i) != id)
            before += prob[pool_id(&s->pool, i++)];
        OK_MSG(prob[id] > 0, "%s n=%u: token %d has no probability", what, s->n_vocab, (int)id);
        OK_MSG(u > before - 2e-6 && u < before + prob[id] + 2e-6,
               "%s n=%u: token %d drawn by %.9f, its range is %.9f + %.9f", what, s->n_vocab,
               (int)id, u, before, prob[id]);
    }
    free(prob);
    free(r.t);
    return clear;
}

/* Run parameters over sizes and kinds of logits. */
static void compare(const struct sample_params *base, const char *what)
{
    static const uint32_t sizes[] = {1, 2, 3, 17, 255, 256, 257, 1000, 5003, 40009};
    uint64_t rng = 42;
    size_t n_cases = 0, n_clear = 0;
    for (size_t i = 0; i < ARRAY_LEN(sizes); i++) {
        uint32_t n = sizes[i];
        float *x = calloc(n, sizeof *x);
        size_t repeats = n < 300 ? 8 : n < 10000 ? 2 : 1;
        for (size_t k = 0; k < KIND_END * repeats; k++) {
            struct sample_params p = *base;
            p.seed = unit_rand(&rng) | 1;
            struct sampler *s = make(&p, n, 16);
            fill_logits(x, n, (enum logits_kind)(k % KIND_END), &rng);
            int32_t id = next(s, x);
            n_clear += same_as_reference(s, id, x, what);
            n_cases++;
            sampler_free(s);
        }
        free(x);
    }
    OK_MSG(n_clear * 10 > n_cases * 6, "%s: only %zu of %zu cases could tell", what, n_clear,
           n_cases);
}

/* ---- random numbers and scans ---- */

static void test_philox_gives_the_published_vectors(void)
{
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } known[] = {
        /* the known-answer file of the authors' library */
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < ARRAY_LEN(known); i++) {
        uint32_t out[4];
        philox4x32(out, known[i].counter, known[i].key);
        OK(!memcmp(out, known[i].out, sizeof out));
    }
}

static void test_uniform_numbers_are_uniform(void)
{
    enum { N = 200000 };
    double sum = 0, squares = 0, lag = 0, before = 0.5;
    for (uint64_t i = 0; i < N; i++) {
        double u = rng_uniform(7, i, RNG_DRAW);
        OK(u >= 0 && u < 1);
        sum += u;
        squares += u * u;
        lag += (u - 0.5) * (before - 0.5);
        before = u;
    }
    OK(fabs(sum / N - 0.5) < 0.003);
    OK(fabs(squares / N - 1.0 / 3) < 0.003);
    OK(fabs(lag / N) < 0.001);
    OK(rng_uniform(7, 0, RNG_DRAW) != rng_uniform(7, 0, RNG_XTC));
    OK(rng_uniform(7, 1ull << 40, RNG_DRAW) != rng_uniform(7, 0, RNG_DRAW));
    OK(rng_uniform(7 + (1ull << 40), 0, RNG_DRAW) != rng_uniform(7, 0, RNG_DRAW));
}

static void test_every_scan_level_gives_the_same_bits(void)
{
    const struct scan_ops *plain = scan_ops_find(0);
    uint64_t rng = 3;
    for (int level = 1; scan_ops_find(level); level++) {
        const struct scan_ops *ops = scan_ops_find(level);
        for (size_t n = 1; n < 1200; n = n * 5 / 4 + 1) {
            float x[1300], w[2][1300], m[2][8];
            fill_logits(x, n, (enum logits_kind)(n % KIND_END), &rng);
            OK(plain->block_max(m[0], x, n) == ops->block_max(m[1], x, n));
            OK(!memcmp(m[0], m[1], (n + SCAN_BLOCK - 1) / SCAN_BLOCK * sizeof(float)));
            plain->weigh(w[0], x, n, 9, 0.7f);
            ops->weigh(w[1], x, n, 9, 0.7f);
            OK(!memcmp(w[0], w[1], n * sizeof(float)));
            memcpy(w[1], x, n * sizeof(float)); /* in place, as the pool does it */
            ops->weigh(w[1], w[1], n, 9, 0.7f);
            OK(!memcmp(w[0], w[1], n * sizeof(float)));
            double a = plain->sum(w[0], MIN(n, 256u)), b = ops->sum(w[0], MIN(n, 256u));
            OK(!memcmp(&a, &b, sizeof a));
            x[n / 2] = NAN;
            OK(ops->block_max(m[1], x, n) && plain->block_max(m[0], x, n));
        }
    }
}

static void test_weights_are_exponentials_to_2_ulp(void)
{
    double worst = 0;
    for (float y = 0; y > -86.9f; y -= 0.00137f) {
        float w;
        scan_ops_best()->weigh(&w, &y, 1, 0, 1);
        worst = MAX(worst, fabs((double)w / exp((double)y) - 1));
    }
    OK_MSG(worst < 2.4e-7, "relative error %g", worst);
    const float edge[] = {0, -INFINITY, -FLT_MAX, -1000, -87.5f};
    float w[5];
    scan_ops_best()->weigh(w, edge, 5, 0, 1);
    OK(w[0] == 1 && w[1] == 0 && w[2] == 0 && w[3] == 0 && w[4] == 0);
    scan_ops_best()->weigh(w, edge, 2, 0, FLT_MAX);
    OK(w[0] == 1 && w[1] == 0);
}

/* ---- selection ---- */

static int by_key(const void *a, const void *b)
{
    uint64_t s = *(const uint64_t *)a, t = *(const uint64_t *)b;
    return s < t ? -1 : s > t;
}

static void test_selection_finds_the_least_keys(void)
{
    uint64_t rng = 9;
    uint64_t *a = calloc(5000, 8), *b = calloc(5000, 8);
    for (size_t n = 1; n < 5000; n = n * 4 / 3 + 1) {
        for (size_t i = 0; i < n; i++)
            a[i] = key_make(n % 2 ? (float)(i % 7) : unit_randn(&rng), (uint32_t)i);
        memcpy(b, a, n * 8);
        qsort(b, n, 8, by_key);
        size_t k = unit_rand(&rng) % (n + 1);
        keys_select(a, n, k);
        qsort(a, k, 8, by_key);
        OK(!memcmp(a, b, k * 8));
        keys_sort(a, n);
        OK(!memcmp(a, b, n * 8));
    }
    free(a);
    free(b);
    OK(key_make(1, 5) < key_make(0.5f, 0) && key_make(-1, 0) > key_make(0, 9));
    OK(key_make(2, 3) < key_make(2, 4) && key_make(-0.0f, 1) < key_make(0.0f, 2));
    OK(key_logit(key_make(-3.25f, 7)) == -3.25f && key_logit(key_make(3.25f, 7)) == 3.25f);
}

/* ---- greedy ---- */

static void test_greedy_takes_the_highest_and_the_lowest_id_of_equals(void)
{
    static float x[3000];
    uint64_t rng = 5;
    struct sample_params p = neutral();
    p.temperature = 0;
    for (uint32_t n = 1; n <= 3000; n += 1 + n / 3) {
        struct sampler *s = make(&p, n, 8);
        for (int k = 0; k < KIND_END; k++) {
            fill_logits(x, n, (enum logits_kind)k, &rng);
            int32_t best = 0;
            for (uint32_t i = 1; i < n; i++)
                if (x[i] > x[best])
                    best = (int32_t)i;
            OK(next(s, x) == best);
        }
        sampler_free(s);
    }
}

/* ---- each stage, and together ---- */

static void test_top_k_matches_the_reference(void)
{
    struct sample_params p = neutral();
    for (int k = 1; k < 3000; k = k * 3 + 1) {
        p.top_k = k;
        compare(&p, "top_k");
    }
}

static void test_top_p_matches_the_reference(void)
{
    struct sample_params p = neutral();
    const float v[] = {0, 0.1f, 0.5f, 0.9f, 0.95f, 0.999f};
    for (size_t i = 0; i < ARRAY_LEN(v); i++) {
        p.top_p = v[i];
        compare(&p, "top_p");
    }
}

static void test_min_p_matches_the_reference(void)
{
    struct sample_params p = neutral();
    const float v[] = {0.001f, 0.05f, 0.3f, 1};
    for (size_t i = 0; i < ARRAY_LEN(v); i++) {
        p.min_p = v[i];
        compare(&p, "min_p");
    }
}

static void test_typical_matches_the_reference(void)
{
    struct sample_params p = neutral();
    const float v[] = {0, 0.2f, 0.7f, 0.95f};
    for (size_t i = 0; i < ARRAY_LEN(v); i++) {
        p.typical_p = v[i];
        p.top_k = i % 2 ? 30 : 0;
        compare(&p, "typical_p");
    }
}

static void test_top_n_sigma_matches_the_reference(void)
{
    struct sample_params p = neutral();
    p.top_n_sigma = 1;
    compare(&p, "top_n_sigma");
    p.top_n_sigma = 2.5f;
    p.top_k = 20;
    compare(&p, "top_n_sigma and top_k");
}

static void test_xtc_matches_the_reference(void)
{
    struct sample_params p = neutral();
    p.xtc_probability = 0.5f;
    const float v[] = {0.01f, 0.1f, 0.3f, 0.5f, 0.6f};
    for (size_t i = 0; i < ARRAY_LEN(v); i++) {
        p.xtc_threshold = v[i];
        compare(&p, "xtc");
    }
}

static void test_temperature_matches_the_reference(void)
{
    struct sample_params p = neutral();
    const float v[] = {0.1f, 0.8f, 1.7f, 30};
    for (size_t i = 0; i < ARRAY_LEN(v); i++) {
        p.temperature = v[i];
        p.dynatemp_range = 0;
        compare(&p, "temperature");
        p.dynatemp_range = v[i] / 2;
        p.dynatemp_exponent = 1.5f;
        compare(&p, "dynamic temperature");
    }
}

static void test_the_whole_chain_matches_the_reference(void)
{
    struct sample_params p;
    sample_defaults(&p);
    compare(&p, "defaults");
    p.top_k = 0;
    compare(&p, "top_p and min_p");
    p.min_keep = 5;
    compare(&p, "top_p, min_p and min_keep");
    p.top_k = 200;
    p.typical_p = 0.9f;
    p.top_n_sigma = 3;
    p.xtc_probability = 0.7f;
    p.xtc_threshold = 0.05f;
    p.dynatemp_range = 0.3f;
    compare(&p, "everything");
    p.min_keep = 0;
    p.top_k = 0;
    compare(&p, "everything but top_k");
}

static void test_tiny_and_huge_temperatures_stay_finite(void)
{
    const float x[] = {1, 3, 3, -INFINITY, 2.9999f};
    struct sample_params p = neutral();
    p.temperature = 1e-30f;
    struct sampler *s = make(&p, 5, 8);
    for (int i = 0; i < 50; i++) {
        int32_t id = next(s, x);
        OK(id == 1 || id == 2);
    }
    sampler_free(s);
    p.temperature = 1e6f;
    s = make(&p, 5, 8);
    for (int i = 0; i < 200; i++)
        OK(next(s, x) != 3);
    sampler_free(s);
}

/* ---- draws ---- */

/* Chi-square of n_draws against exact probabilities; cells below 5 expected are joined. */
static void check_draws(const struct sample_params *p, const float *x, uint32_t n, const char *what)
{
    enum { DRAWS = 30000 };
    struct sampler *s = make(p, n, 8);
    uint32_t *count = calloc(n, sizeof *count);
    for (int i = 0; i < DRAWS; i++)
        count[next(s, x)]++;
    struct ref r;
    ref_init(&r, x, n);
    ref_chain(&r, p, false);
    double chi = 0, rest = 0, rest_count = 0;
    uint32_t seen = 0, cells = 0;
    for (size_t i = 0; i < r.n; i++) {
        double expect = r.t[i].p * DRAWS, c = count[r.t[i].id];
        seen += count[r.t[i].id];
        if (expect < 5) {
            rest += expect;
            rest_count += c;
            continue;
        }
        chi += (c - expect) * (c - expect) / expect;
        cells++;
    }
    if (rest > 0.5) {
        chi += (rest_count - rest) * (rest_count - rest) / rest;
        cells++;
    }
    OK_MSG(seen == DRAWS, "%s: %u draws outside the set", what, DRAWS - seen);
    double df = cells > 1 ? cells - 1 : 1; /* chi-square is near normal: mean df, variance 2 df */
    OK_MSG(chi < df + 5 * sqrt(2 * df) + 5, "%s: chi-square %.1f for %.0f degrees", what, chi, df);
    free(count);
    free(r.t);
    sampler_free(s);
}

static void test_draws_follow_the_probabilities(void)
{
    uint64_t rng = 77;
    static float x[1500];
    fill_logits(x, 1500, KIND_BANNED, &rng);
    struct sample_params p = neutral();
    check_draws(&p, x, 7, "plain, 7 tokens");
    check_draws(&p, x, 1500, "plain, 1500 tokens");
    p.temperature = 0.6f;
    check_draws(&p, x, 1500, "temperature");
    p.top_k = 40;
    check_draws(&p, x, 1500, "top_k");
    p.top_p = 0.9f;
    p.min_p = 0.02f;
    check_draws(&p, x, 1500, "chain");
    p.top_k = 700;
    p.top_p = 1;
    p.min_p = 0;
    p.temperature = 2;
    check_draws(&p, x, 1500, "hot, 700 tokens");
}

static void test_xtc_acts_as_often_as_asked(void)
{
    const float x[] = {2, 2, 2, 0};
    struct sample_params p = neutral();
    p.xtc_probability = 0.25f;
    p.xtc_threshold = 0.2f;
    struct sampler *s = make(&p, 4, 8);
    int acted = 0;
    for (int i = 0; i < 20000; i++) {
        next(s, x);
        acted += pool_size(&s->pool) == 2; /* of three equals the last stays */
        OK(pool_size(&s->pool) == 2 || pool_size(&s->pool) == 4);
    }
    OK_MSG(fabs(acted / 20000.0 - 0.25) < 0.015, "acted in %d of 20000", acted);
    sampler_free(s);
}

static void test_a_seed_replays_whatever_else_runs(void)
{
    static float x[500];
    uint64_t rng = 8;
    struct sample_params p;
    sample_defaults(&p);
    p.seed = 123456789012345;
    p.xtc_probability = 0.3f;
    struct sampler *a = make(&p, 500, 64), *b = make(&p, 500, 64);
    p.seed++;
    struct sampler *other = make(&p, 500, 64);
    int same_as_other = 0;
    int32_t got[100];
    for (int i = 0; i < 100; i++) {
        uint64_t r = (uint64_t)i;
        fill_logits(x, 500, KIND_NORMAL, &r);
        got[i] = next(a, x);
        same_as_other += next(other, x) == got[i];
        fill_logits(x, 500, KIND_NORMAL, &rng);
        next(other, x);
    }
    for (int i = 0; i < 100; i++) {
        uint64_t r = (uint64_t)i;
        fill_logits(x, 500, KIND_NORMAL, &r);
        OK(next(b, x) == got[i]);
    }
    OK(same_as_other < 60);
    OK(sampler_seed(a) == 123456789012345);
    sampler_free(a);
    sampler_free(b);
    sampler_free(other);
    p.seed = 0;
    a = make(&p, 5, 8);
    b = make(&p, 5, 8);
    OK(sampler_seed(a) && sampler_seed(b) && sampler_seed(a) != sampler_seed(b));
    sampler_free(a);
    sampler_free(b);
}

int main(int argc, char **argv)
{
#define T(name)                                                                                    \
    {                                                                                              \
#name, name                                                                                \
    }
    static const struct unit_test tests[] = {
        T(test_philox_gives_the_published_vectors),
        T(test_uniform_numbers_are_uniform),
        T(test_every_scan_level_gives_the_same_bits),
        T(test_weights_are_exponentials_to_2_ulp),
        T(test_selection_finds_the_least_keys),
        T(test_greedy_takes_the_highest_and_the_lowest_id_of_equals),
        T(test_top_k_matches_the_reference),
        T(test_top_p_matches_the_reference),
        T(test_min_p_matches_the_reference),
        T(test_typical_matches_the_reference),
        T(test_top_n_sigma_matches_the_reference),
        T(test_xtc_matches_the_reference),
        T(test_temperature_matches_the_reference),
        T(test_the_whole_chain_matches_the_reference),
        T(test_tiny_and_huge_temperatures_stay_finite),
        T(test_draws_follow_the_probabilities),
        T(test_xtc_acts_as_often_as_asked),
        T(test_a_seed_replays_whatever_else_runs),
    };
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
