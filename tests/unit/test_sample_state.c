/* Sampling: what a sequence remembers (penalties, DRY, mirostat), what it reports, how it fails,
 * what it costs. References are recounts and brute force. */
#include "tests/unit/sample_ref.h"

/* ---- bias, mask, penalties ---- */

static void test_bias_and_mask_change_only_what_they_name(void)
{
    static float x[100];
    uint64_t rng = 4;
    fill_logits(x, 100, KIND_NORMAL, &rng);
    const struct logit_bias bias[] = {{3, 100}, {4, 200}, {7, -INFINITY}, {3, 1}};
    struct sample_params p = neutral();
    p.temperature = 0;
    p.bias = bias;
    p.n_bias = 4;
    struct sampler *s = make(&p, 100, 8);
    OK(next(s, x) == 4);
    OK(s->work[3] == x[3] + 100 + 1 && s->work[7] == -INFINITY && s->work[8] == x[8]);
    uint32_t allowed[4] = {~(1u << 4), ~0u, ~0u, ~0u};
    struct err e = {0};
    int32_t id;
    OK_CALL(sampler_next(s, &id, x, allowed, &e), e);
    OK(id == 3);
    uint32_t only[4] = {0, 0, 0, 1u << 2};
    OK_CALL(sampler_next(s, &id, x, only, &e), e);
    OK(id == 98);
    uint32_t banned[4] = {1u << 7, 0, 0, 0xfffffff0u}; /* the bits above 99 mean nothing */
    OK(sampler_next(s, &id, x, banned, &e) == -1 && e.code == ERR_USAGE);
    sampler_free(s);
}

static void test_a_mask_holds_for_every_draw(void)
{
    static float x[1000];
    uint32_t allowed[32];
    uint64_t rng = 14;
    struct sample_params p = neutral();
    struct sampler *s = make(&p, 1000, 8);
    for (int k = 0; k < 300; k++) {
        fill_logits(x, 1000, (enum logits_kind)(k % KIND_END), &rng);
        for (int i = 0; i < 32; i++)
            allowed[i] = k % 4 ? 0 : ~0u;
        for (int i = 0; i < 5; i++)
            allowed[unit_rand(&rng) % 31] |= 1u << unit_rand(&rng) % 32;
        int32_t id = -1;
        struct err e = {0};
        if (!sampler_next(s, &id, x, allowed, &e))
            OK(allowed[id / 32] >> id % 32 & 1);
        else
            OK(e.code == ERR_USAGE && k % KIND_END == KIND_BANNED);
    }
    sampler_free(s);
}

static void test_penalties_match_a_recount_of_the_window(void)
{
    enum { VOCAB = 50 };
    uint64_t rng = 21;
    const int32_t windows[] = {0, 1, 7, 64, -1};
    for (size_t w = 0; w < ARRAY_LEN(windows); w++) {
        struct sample_params p = neutral();
        p.temperature = 0;
        p.repeat_last_n = windows[w];
        p.repeat_penalty = 1.3f;
        p.presence_penalty = 0.25f;
        p.frequency_penalty = 0.125f;
        struct sampler *s = make(&p, VOCAB, 40);
        int32_t all[500];
        for (int n = 0; n < 500; n++) {
            float x[VOCAB], want[VOCAB];
            fill_logits(x, VOCAB, KIND_BANNED, &rng);
            memcpy(want, x, sizeof x);
            int look = windows[w] < 0 ? 40 : MIN(windows[w], 40), best = 0;
            for (int id = 0; id < VOCAB; id++) {
                float count = 0;
                for (int i = MAX(0, n - look); i < n; i++)
                    count += all[i] == id;
                if (count > 0 && x[id] > -INFINITY) {
                    want[id] = x[id] > 0 ? x[id] / 1.3f : x[id] * 1.3f;
                    want[id] -= count * 0.125f + 0.25f;
                }
            }
            for (int id = 1; id < VOCAB; id++)
                best = want[id] > want[best] ? id : best;
            if (n % 3 == 0) {
                OK(next(s, x) == (all[n] = best));
            } else {
                all[n] = (int32_t)(unit_rand(&rng) % VOCAB);
                sampler_accept(s, all[n]);
            }
        }
        sampler_accept(s, -1);
        sampler_accept(s, VOCAB);
        sampler_free(s);
    }
}

/* ---- DRY ---- */

static const char *const dry_pieces[] = {"a", "b", "c ", "x:", "\n", "E", "N", "D", "d", "END", ""};

static const char *dry_piece(const void *user, int32_t id, size_t *n)
{
    *n = strlen(dry_pieces[id]);
    return dry_pieces[id];
}

/* May a repetition that ends the context begin at token `from`? Not if a breaker's last byte lies
 * in tokens from .. n. */
static bool dry_unbroken(const int32_t *v, int from, int n, const struct sample_params *p)
{
    char text[4096];
    size_t len = 0, mark = 0;
    for (int i = 0; i < n; i++) {
        if (i == from)
            mark = len;
        len += (size_t)sprintf(text + len, "%s", dry_pieces[v[i]]);
    }
    static const char *const usual[] = {"\n", ":", "\"", "*"};
    const char *const *b = p->dry_breakers ? p->dry_breakers : usual;
    size_t n_b = p->dry_breakers ? p->n_dry_breakers : 4;
    for (size_t i = 0; i < n_b; i++)
        for (size_t at = 0; at + strlen(b[i]) <= len; at++)
            if (at + strlen(b[i]) > mark && !memcmp(text + at, b[i], strlen(b[i])))
                return false;
    return true;
}

static double dry_penalty(const int32_t *v, int n, int32_t id, const struct sample_params *p)
{
    int longest = -1, first = p->dry_last_n < 0 ? 0 : MAX(0, n - p->dry_last_n);
    for (int i = first; i < n - 1; i++) { /* v[i + 1] is what came after */
        if (v[i + 1] != id)
            continue;
        int len = 0;
        while (i - len >= first && v[i - len] == v[n - 1 - len] &&
               dry_unbroken(v, n - 1 - len, n, p))
            len++;
        longest = MAX(longest, len);
    }
    if (longest < p->dry_allowed_length)
        return 0;
    return (double)p->dry_multiplier * pow((double)p->dry_base, longest - p->dry_allowed_length);
}

static void test_dry_matches_brute_force(void)
{
    enum { VOCAB = ARRAY_LEN(dry_pieces), N = 120 };
    static const char *const breakers[] = {"END", "a"};
    uint64_t rng = 31;
    for (int round = 0; round < 60; round++) {
        struct sample_params p = neutral();
        p.temperature = 0;
        p.dry_multiplier = 0.5f;
        p.dry_base = 1.5f;
        p.dry_allowed_length = round % 4;
        p.dry_last_n = round % 3 ? -1 : 20;
        if (round % 2) {
            p.dry_breakers = breakers;
            p.n_dry_breakers = (size_t)(round / 2 % 3);
        }
        struct sampler *s;
        struct err e = {0};
        OK_CALL(sampler_new(&s, &p, VOCAB, 1000, dry_piece, NULL, &e), e);
        int32_t v[N];
        float x[VOCAB] = {0};
        uint32_t variety = 2 + (uint32_t)round % (VOCAB - 1); /* few tokens: long repetitions */
        for (int n = 0; n < N; n++) {
            v[n] = (int32_t)((uint32_t)round + unit_rand(&rng) % variety) % VOCAB;
            if (unit_rand(&rng) % 4 && n > 12)
                v[n] = v[n - 9]; /* and repeats on purpose */
            if (round % 4 == 3 && n % 17 >= 5 && n % 17 <= 7)
                v[n] = n % 17; /* E, N, D: a breaker of three tokens */
            sampler_accept(s, v[n]);
            adjust_logits(s, x, NULL);
            for (int32_t id = 0; id < VOCAB; id++) {
                double want = dry_penalty(v, n + 1, id, &p);
                OK_MSG(fabs(-(double)s->work[id] - want) <= 1e-5 * want,
                       "round %d at %d token %d: %g, brute force %g", round, n, (int)id,
                       -(double)s->work[id], want);
            }
        }
        sampler_free(s);
    }
}

static void test_dry_stays_finite_on_endless_repetition(void)
{
    struct sample_params p = neutral();
    p.dry_multiplier = 1;
    p.dry_base = 4;
    p.dry_breakers = dry_pieces;
    struct sampler *s = make(&p, 10, 300);
    float x[10] = {0};
    for (int i = 0; i < 2000; i++)
        sampler_accept(s, 3);
    int32_t id = next(s, x);
    OK(id != 3 && s->work[3] == -1e30f);
    sampler_free(s);
}

static void test_dry_takes_linear_time_in_the_context(void)
{
    enum { N = 100000 };
    struct sample_params p = neutral();
    p.dry_multiplier = 1;
    p.dry_breakers = dry_pieces;
    struct sampler *s = make(&p, 10, N);
    float x[10] = {0};
    for (int i = 0; i < N; i++)
        sampler_accept(s, i < N / 2 ? 3 : 4);
    uint64_t t0 = now_ns(); /* comparing every pair takes 1.2e9 steps */
    next(s, x);
    double seconds = (double)(now_ns() - t0) * 1e-9;
    OK_MSG(seconds < 0.3, "%g s for %d tokens", seconds, N);
    sampler_free(s);
}

static void test_dry_needs_texts_for_its_breakers(void)
{
    struct sample_params p = neutral();
    struct sampler *s;
    struct err e = {0};
    p.dry_multiplier = 1;
    OK(sampler_new(&s, &p, 10, 100, NULL, NULL, &e) == -1 && e.code == ERR_USAGE && !s);
}

/* ---- mirostat ---- */

/* Probabilities in rank order at the temperature, and the rank of a token. */
static size_t ranked(struct ref *r, const float *x, size_t n, double t, int32_t id)
{
    ref_init(r, x, n);
    for (size_t i = 0; i < r->n; i++)
        r->t[i].x /= t;
    ref_softmax(r);
    for (size_t i = 0; i < r->n; i++)
        if (r->t[i].id == id)
            return i;
    return r->n;
}

static void test_mirostat_1_follows_its_recurrence(void)
{
    enum { N = 3000 };
    static float x[N];
    uint64_t rng = 61;
    struct sample_params p = neutral();
    p.mirostat = 1;
    p.mirostat_tau = 3;
    p.mirostat_eta = 0.2f;
    p.temperature = 0.9f;
    struct sampler *s = make(&p, N, 8);
    double mu = 6, eta = (double)p.mirostat_eta, total = 0;
    for (int step = 0; step < 300; step++) {
        fill_logits(x, N, (enum logits_kind)(step % 3), &rng);
        int32_t id = next(s, x);
        struct ref r;
        size_t rank = ranked(&r, x, N, (double)p.temperature, id);
        double top = 0, bottom = 0;
        for (int i = 1; i < 100; i++) {
            double t = log((i + 1.0) / i), b = log(r.t[i - 1].p / r.t[i].p);
            top += t * b;
            bottom += t * t;
        }
        double zipf = top / bottom, eps = zipf - 1;
        double k = pow(eps * pow(2, mu) / (1 - pow(N, -eps)), 1 / zipf);
        size_t whole = k < 1 ? 1 : k > N ? N : (size_t)k;
        if (fabs(k - round(k)) > 1e-4 || k > N + 1)
            OK_MSG(s->pool.n == MIN(whole, r.n) || (!s->pool.gathered && whole == N),
                   "step %d: %zu left, reference %zu", step, s->pool.n, whole);
        OK(rank < whole + 1);
        double surprise = -log2(r.t[rank].p);
        mu -= eta * (surprise - 3);
        total += surprise;
        OK_MSG(fabs(mu - s->mu) < 1e-4, "step %d: mu %g, reference %g", step, s->mu, mu);
        free(r.t);
    }
    OK_MSG(fabs(total / 300 - 3) < 0.4, "mean surprise %g bits instead of 3", total / 300);
    sampler_free(s);
}

static void test_mirostat_2_follows_its_recurrence(void)
{
    enum { N = 1000 };
    static float x[N];
    uint64_t rng = 62;
    struct sample_params p = neutral();
    p.mirostat = 2;
    p.mirostat_tau = 4;
    struct sampler *s = make(&p, N, 8);
    double mu = 8, total = 0;
    for (int step = 0; step < 400; step++) {
        fill_logits(x, N, (enum logits_kind)(step % 4), &rng);
        int32_t id = next(s, x);
        struct ref r;
        size_t rank = ranked(&r, x, N, 1, id), n = 0;
        double margin = 1;
        for (size_t i = 0; i < r.n; i++) {
            margin = MIN(margin, fabs(-log2(r.t[i].p) - mu));
            n += -log2(r.t[i].p) <= mu;
        }
        n = MAX(n, 1);
        if (margin > 1e-5)
            OK_MSG(s->pool.n == n, "step %d: %zu left, reference %zu", step, s->pool.n, n);
        OK(rank < n + 1);
        double surprise = -log2(r.t[rank].p);
        mu -= (double)p.mirostat_eta * (surprise - 4);
        total += surprise;
        OK_MSG(fabs(mu - s->mu) < 1e-4, "step %d: mu %g, reference %g", step, s->mu, mu);
        free(r.t);
    }
    OK_MSG(fabs(total / 400 - 4) < 0.4, "mean surprise %g bits instead of 4", total / 400);
    sampler_free(s);
}

static void test_mirostat_survives_odd_vocabularies(void)
{
    for (int version = 1; version <= 2; version++) {
        for (uint32_t n = 1; n < 40; n++) {
            struct sample_params p = neutral();
            p.mirostat = version;
            p.mirostat_tau = n % 2 ? 0 : 50;
            p.dynatemp_range = n % 3 ? 0 : 0.5f;
            struct sampler *s = make(&p, n, 8);
            float x[40];
            uint64_t rng = n;
            for (int k = 0; k < 60; k++) {
                fill_logits(x, n, (enum logits_kind)(k % KIND_END), &rng);
                int32_t id = next(s, x);
                OK(id >= 0 && (uint32_t)id < n && x[id] > -INFINITY && isfinite(s->mu));
            }
            sampler_free(s);
        }
    }
}

/* ---- log-probabilities ---- */

static void test_log_probabilities_are_those_before_truncation(void)
{
    uint64_t rng = 91;
    static float x[2000];
    for (uint32_t n = 1; n <= 2000; n = n * 3 + 1) {
        for (int k = 0; k < 2 * KIND_END; k++) {
            struct sample_params p;
            sample_defaults(&p);
            p.temperature = k < KIND_END ? 0.7f : 0;
            p.n_probs = 20;
            p.seed = 5;
            struct sampler *s = make(&p, n, 8);
            fill_logits(x, n, (enum logits_kind)(k % KIND_END), &rng);
            int32_t id = next(s, x);
            struct ref r;
            size_t rank = ranked(&r, x, n, 1, id);
            OK(fabs((double)sampler_logprob(s) - log(r.t[rank].p)) < 2e-6);
            const struct token_prob *top;
            size_t n_top = sampler_top(s, &top);
            OK(n_top == MIN(r.n, 20u));
            for (size_t i = 0; i < n_top; i++)
                OK(top[i].id == r.t[i].id && fabs((double)top[i].logprob - log(r.t[i].p)) < 2e-6);
            free(r.t);
            sampler_free(s);
        }
    }
    struct sample_params p = neutral();
    struct sampler *s = make(&p, 10, 8);
    next(s, x);
    const struct token_prob *top;
    OK(isnan(sampler_logprob(s)) && sampler_top(s, &top) == 0);
    sampler_free(s);
    p.logprob = true;
    s = make(&p, 10, 8);
    next(s, x);
    OK(sampler_logprob(s) <= 0 && sampler_top(s, &top) == 0);
    sampler_free(s);
}

/* ---- errors and memory ---- */

static void test_bad_logits_are_the_devices_fault(void)
{
    static float x[777];
    struct sample_params p;
    sample_defaults(&p);
    struct sampler *s = make(&p, 777, 8);
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int k = 0; k < 3; k++) {
        for (int at = 0; at < 777; at += 97) {
            memset(x, 0, sizeof x);
            for (int i = 0; i < 777; i++)
                x[i] = k == 2 ? -INFINITY : 0;
            x[at] = bad[k];
            int32_t id;
            struct err e = {0};
            OK(sampler_next(s, &id, x, NULL, &e) == -1 && e.code == ERR_DEVICE);
        }
    }
    sampler_free(s);
}

static void test_parameters_out_of_range_are_named(void)
{
    static const struct logit_bias bad_bias = {-1, 0}, nan_bias = {1, NAN}, far = {10, 1};
    static const char *const empty[] = {""};
    struct sample_params p[12];
    const char *const names[] = {"temperature", "top_p",    "min_p", "typical_p",
                                 "repeat_pen",  "mirostat", "bias",  "bias",
                                 "breakers[0]", "n_probs",  "bias",  "dry_base"};
    for (int i = 0; i < 12; i++)
        p[i] = neutral();
    p[0].temperature = NAN;
    p[1].top_p = 1.5f;
    p[2].min_p = -0.1f;
    p[3].typical_p = INFINITY;
    p[4].repeat_penalty = 0;
    p[5].mirostat = 3;
    p[6].bias = &bad_bias;
    p[7].bias = &nan_bias;
    p[10].bias = &far;
    p[6].n_bias = p[7].n_bias = p[10].n_bias = 1;
    p[8].dry_breakers = empty;
    p[8].n_dry_breakers = 1;
    p[9].n_probs = -1;
    p[11].dry_base = 0.5f;
    for (int i = 0; i < 12; i++) {
        struct err e = {0};
        struct sampler *s;
        OK(sampler_new(&s, &p[i], 10, 10, NULL, NULL, &e) == -1 && e.code == ERR_USAGE && !s);
        OK_MSG(strstr(e.msg, names[i]), "%s: %s", names[i], e.msg);
    }
    struct err e = {0};
    struct sample_params ok;
    sample_defaults(&ok);
    OK_CALL(sample_check(&ok, &e), e);
}

static struct sample_params everything(void)
{
    static const struct logit_bias bias[] = {{1, 1}};
    struct sample_params p;
    sample_defaults(&p);
    p.bias = bias;
    p.n_bias = 1;
    p.repeat_penalty = 1.1f;
    p.dry_multiplier = 0.8f;
    p.dry_breakers = dry_pieces;
    p.n_dry_breakers = 3;
    p.typical_p = 0.95f;
    p.xtc_probability = 0.5f;
    p.n_probs = 5;
    p.seed = 3;
    return p;
}

static const char *any_piece(const void *user, int32_t id, size_t *n)
{
    *n = 1;
    return "z";
}

static void test_sampling_allocates_nothing(void)
{
    static float x[20000];
    uint32_t allowed[625];
    memset(allowed, 0xff, sizeof allowed);
    uint64_t rng = 55;
    for (int k = 0; k < 8; k++) {
        struct sample_params p = k & 1 ? everything() : neutral();
        p.top_k = k & 2 ? 0 : 40;
        p.mirostat = k & 4 ? 1 + (k & 1) : 0;
        p.top_p = 0.9f;
        struct sampler *s;
        struct err e = {0};
        OK_CALL(sampler_new(&s, &p, 20000, 100, any_piece, NULL, &e), e);
        uint64_t before = mem_alloc_count();
        for (int i = 0; i < 60; i++) {
            fill_logits(x, 20000, (enum logits_kind)(i % KIND_END), &rng);
            int32_t id;
            OK_CALL(sampler_next(s, &id, x, i % 2 ? allowed : NULL, &e), e);
        }
        OK(mem_alloc_count() == before);
        sampler_free(s);
    }
}

static void test_a_failed_allocation_is_an_error_and_leaks_nothing(void)
{
    struct sample_params p = everything();
    for (uint64_t n = 1;; n++) {
        struct sampler *s;
        struct err e = {0};
        mem_fail_at(n);
        int rc = sampler_new(&s, &p, 50000, 100000, any_piece, NULL, &e);
        mem_fail_at(0);
        if (!rc) {
            OK(n > 5);
            sampler_free(s);
            break;
        }
        OK(e.code == ERR_MEMORY && !s);
    }
}

/* ---- speed ---- */

static double best_us(const struct sample_params *p, const float *x, uint32_t n)
{
    struct sampler *s;
    struct err e = {0};
    OK_CALL(sampler_new(&s, p, n, 4096, any_piece, NULL, &e), e);
    double best = 1e9;
    for (int i = 0; i < 100; i++) {
        uint64_t t0 = now_ns();
        next(s, x);
        best = MIN(best, (double)(now_ns() - t0) * 1e-3);
    }
    sampler_free(s);
    return best;
}

static void test_a_large_vocabulary_takes_microseconds(void)
{
    enum { N = 131072 };
    float *x = calloc(N, sizeof *x);
    uint64_t rng = 1;
    fill_logits(x, N, KIND_NORMAL, &rng);
    struct {
        const char *name;
        struct sample_params p;
        double limit_us;
    } t[8];
    for (int i = 0; i < 8; i++)
        t[i].p = neutral();
    t[0].name = "greedy", t[0].limit_us = 50, t[0].p.temperature = 0;
    t[1].name = "defaults", t[1].limit_us = 200, sample_defaults(&t[1].p);
    t[2].name = "all off", t[2].limit_us = 400;
    t[3].name = "min_p", t[3].limit_us = 400, t[3].p.min_p = 0.1f;
    t[4].name = "top_p, flat", t[4].limit_us = 5000, t[4].p.top_p = 0.95f;
    t[5].name = "top_p, narrow", t[5].limit_us = 1000, t[5].p.top_p = 0.02f;
    t[6].name = "typical, flat", t[6].limit_us = 10000, t[6].p.typical_p = 0.9f;
    t[7].name = "top_k 5000", t[7].limit_us = 5000, t[7].p.top_k = 5000;
    for (int i = 0; i < 8; i++) {
        double us = best_us(&t[i].p, x, N);
        if (getenv("INGOT_TIMES"))
            printf("  %-14s %8.1f us\n", t[i].name, us);
#ifdef NDEBUG
        OK_MSG(us < t[i].limit_us, "%s takes %.0f us for %d tokens", t[i].name, us, N);
#endif
    }
    free(x);
}

int main(int argc, char **argv)
{
#define T(name)                                                                                    \
    {                                                                                              \
#name, name                                                                                \
    }
    static const struct unit_test tests[] = {
        T(test_bias_and_mask_change_only_what_they_name),
        T(test_a_mask_holds_for_every_draw),
        T(test_penalties_match_a_recount_of_the_window),
        T(test_dry_matches_brute_force),
        T(test_dry_stays_finite_on_endless_repetition),
        T(test_dry_takes_linear_time_in_the_context),
        T(test_dry_needs_texts_for_its_breakers),
        T(test_mirostat_1_follows_its_recurrence),
        T(test_mirostat_2_follows_its_recurrence),
        T(test_mirostat_survives_odd_vocabularies),
        T(test_log_probabilities_are_those_before_truncation),
        T(test_bad_logits_are_the_devices_fault),
        T(test_parameters_out_of_range_are_named),
        T(test_sampling_allocates_nothing),
        T(test_a_failed_allocation_is_an_error_and_leaks_nothing),
        T(test_a_large_vocabulary_takes_microseconds),
    };
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
