/* The sampler's parameters and life cycle, and one step of it: adjust the logits, note the
 * log-probabilities, choose, remember. A sampler owns one arena with its copies of the parameters'
 * arrays, its history and its scratch; a step allocates nothing and never keeps the caller's
 * logits. */
#include "engine/sample_internal.h"

#include <sys/random.h>

void sample_defaults(struct sample_params *p)
{
    *p = (struct sample_params){
        .temperature = 0.8f,
        .dynatemp_exponent = 1,
        .top_k = 40,
        .top_p = 0.95f,
        .min_p = 0.05f,
        .typical_p = 1,
        .xtc_threshold = 0.1f,
        .repeat_last_n = 64,
        .repeat_penalty = 1,
        .dry_base = 1.75f,
        .dry_allowed_length = 2,
        .dry_last_n = -1,
        .mirostat_tau = 5,
        .mirostat_eta = 0.1f,
    };
}

/* ---- ranges ---- */

struct float_range {
    const char *name; /* as in requests */
    size_t at;        /* offset in struct sample_params */
    float lo, hi;     /* both allowed */
};
#define FLOAT_RANGE(field, lo, hi)                                                                 \
    {                                                                                              \
#field, offsetof(struct sample_params, field), lo, hi                                      \
    }
static const struct float_range float_ranges[] = {
    FLOAT_RANGE(temperature, -1e6f, 1e6f),
    FLOAT_RANGE(dynatemp_range, 0, 1e6f),
    FLOAT_RANGE(dynatemp_exponent, 0, 1e6f),
    FLOAT_RANGE(top_n_sigma, -1e6f, 1e6f),
    FLOAT_RANGE(top_p, 0, 1),
    FLOAT_RANGE(min_p, 0, 1),
    FLOAT_RANGE(typical_p, 0, 1),
    FLOAT_RANGE(xtc_probability, 0, 1),
    FLOAT_RANGE(xtc_threshold, 0, 1),
    FLOAT_RANGE(repeat_penalty, 1e-6f, 1e6f),
    FLOAT_RANGE(presence_penalty, -1e6f, 1e6f),
    FLOAT_RANGE(frequency_penalty, -1e6f, 1e6f),
    FLOAT_RANGE(dry_multiplier, 0, 1e6f),
    FLOAT_RANGE(dry_base, 1, 1e6f),
    FLOAT_RANGE(mirostat_tau, 0, 1e6f),
    FLOAT_RANGE(mirostat_eta, 0, 1e6f),
};

struct int_range {
    const char *name;
    size_t at;
    int32_t lo, hi;
};
#define INT_RANGE(field, lo, hi)                                                                   \
    {                                                                                              \
#field, offsetof(struct sample_params, field), lo, hi                                      \
    }
static const struct int_range int_ranges[] = {
    INT_RANGE(repeat_last_n, -1, INT32_MAX),     INT_RANGE(dry_last_n, -1, INT32_MAX),
    INT_RANGE(dry_allowed_length, 0, INT32_MAX), INT_RANGE(mirostat, 0, 2),
    INT_RANGE(min_keep, 0, INT32_MAX),           INT_RANGE(n_probs, 0, INT32_MAX),
};

static int check_lists(const struct sample_params *p, struct err *e)
{
    for (size_t i = 0; i < p->n_bias; i++) {
        float b = p->bias[i].bias;
        if (p->bias[i].id < 0)
            return err_set(e, ERR_USAGE, "logit_bias names token %d; ids start at 0",
                           (int)p->bias[i].id);
        if (!(b <= 1e9f) || (b < -1e9f && b != -INFINITY))
            return err_set(e, ERR_USAGE,
                           "logit_bias of token %d is %g; give -1e9 to 1e9, or minus infinity to "
                           "ban it",
                           (int)p->bias[i].id, (double)b);
    }
    if (!p->dry_breakers)
        return 0;
    if (p->n_dry_breakers > BREAKERS_MAX)
        return err_set(e, ERR_USAGE, "dry_sequence_breakers has %zu strings; at most %d are taken",
                       p->n_dry_breakers, BREAKERS_MAX);
    for (size_t i = 0; i < p->n_dry_breakers; i++) {
        size_t n = p->dry_breakers[i] ? strnlen(p->dry_breakers[i], BREAKER_BYTES + 1) : 0;
        if (n < 1 || n > BREAKER_BYTES)
            return err_set(e, ERR_USAGE, "dry_sequence_breakers[%zu] must have 1 to %d bytes", i,
                           BREAKER_BYTES);
    }
    return 0;
}

int sample_check(const struct sample_params *p, struct err *e)
{
    for (size_t i = 0; i < ARRAY_LEN(float_ranges); i++) {
        const struct float_range *r = &float_ranges[i];
        float v;
        memcpy(&v, (const char *)p + r->at, sizeof v);
        if (!(v >= r->lo && v <= r->hi)) /* NaN is in no range */
            return err_set(e, ERR_USAGE, "%s is %g; it must lie between %g and %g", r->name,
                           (double)v, (double)r->lo, (double)r->hi);
    }
    for (size_t i = 0; i < ARRAY_LEN(int_ranges); i++) {
        const struct int_range *r = &int_ranges[i];
        int32_t v;
        memcpy(&v, (const char *)p + r->at, sizeof v);
        if (v < r->lo || v > r->hi)
            return err_set(e, ERR_USAGE, "%s is %d; it must lie between %d and %d", r->name, (int)v,
                           (int)r->lo, (int)r->hi);
    }
    return check_lists(p, e);
}

/* ---- life cycle ---- */

/* Make the sampler's parameters independent of the caller's memory. */
static int copy_lists(struct sampler *s, struct err *e)
{
    struct sample_params *p = &s->p;
    if (p->n_bias) {
        size_t n_bytes; /* cannot overflow once the caller holds such an array, but say so */
        CHECK(!mul_over(p->n_bias, sizeof *p->bias, &n_bytes));
        struct logit_bias *bias = arena_alloc(&s->arena, n_bytes);
        if (!bias)
            goto no_memory;
        p->bias = memcpy(bias, p->bias, n_bytes);
    }
    if (p->dry_breakers) {
        const char **list = arena_alloc(&s->arena, p->n_dry_breakers * sizeof *list);
        if (!list)
            goto no_memory;
        for (size_t i = 0; i < p->n_dry_breakers; i++) {
            const char *b = p->dry_breakers[i];
            if (!(list[i] = arena_strdup(&s->arena, b, strlen(b))))
                goto no_memory;
        }
        p->dry_breakers = list;
    }
    return 0;
no_memory:
    return err_set(e, ERR_MEMORY, "no memory for the sampling parameters' lists; send fewer");
}

static int scratch_init(struct sampler *s, struct err *e)
{
    size_t n = s->n_vocab, n_blocks = (n + SCAN_BLOCK - 1) / SCAN_BLOCK;
    size_t n_top = MIN((size_t)s->p.n_probs, n);
    size_t n_keys = s->p.temperature > 0 || n_top ? n : 1;
    size_t n_aux = s->p.typical_p < 1 ? n : n_blocks;
    struct pool *p = &s->pool;
    bool ok = (s->work = arena_alloc(&s->arena, n * sizeof *s->work)) &&
              (p->block_max = arena_alloc(&s->arena, n_blocks * sizeof *p->block_max)) &&
              (p->block_mass = arena_alloc(&s->arena, n_blocks * sizeof *p->block_mass)) &&
              (p->keys = arena_alloc(&s->arena, n_keys * sizeof *p->keys)) &&
              (p->aux = arena_alloc(&s->arena, n_aux * sizeof *p->aux)) &&
              (!n_top || (s->top = arena_alloc(&s->arena, n_top * sizeof *s->top)));
    if (!ok)
        return err_set(e, ERR_MEMORY, "no memory to sample from %zu tokens; run fewer sequences",
                       n);
    p->ops = scan_ops_best();
    p->n_vocab = n;
    return 0;
}

uint64_t sampler_bytes(const struct sample_params *p, uint32_t n_vocab, uint32_t max_tokens)
{
    const uint64_t arena_rest = 64 << 10; /* of its last block */
    uint64_t n = n_vocab, n_blocks = (n + SCAN_BLOCK - 1) / SCAN_BLOCK;
    uint64_t n_top = MIN((uint64_t)MAX(p->n_probs, 0), n);
    uint64_t n_keys = p->temperature > 0 || n_top ? n : 1;
    uint64_t n_aux = p->typical_p < 1 ? n : n_blocks;
    return sizeof(struct sampler) + arena_rest + n * sizeof(float) +
           n_blocks * (sizeof(float) + sizeof(double)) + (n_keys + n_aux) * sizeof(uint64_t) +
           n_top * sizeof(struct token_prob) + history_bytes(p, n_vocab, max_tokens);
}

static int seed_init(struct sampler *s, struct err *e)
{
    while (!s->p.seed)
        if (getrandom(&s->p.seed, sizeof s->p.seed, 0) != sizeof s->p.seed)
            return err_errno(e, "cannot draw a random seed; give one");
    return 0;
}

int sampler_new(struct sampler **out, const struct sample_params *p, uint32_t n_vocab,
                uint32_t max_tokens, sample_piece piece, const void *user, struct err *e)
{
    *out = NULL;
    if (sample_check(p, e))
        return -1;
    if (n_vocab < 1 || n_vocab > INT32_MAX)
        return err_set(e, ERR_USAGE, "a vocabulary of %u tokens cannot be sampled", n_vocab);
    for (size_t i = 0; i < p->n_bias; i++)
        if ((uint32_t)p->bias[i].id >= n_vocab)
            return err_set(e, ERR_USAGE, "logit_bias names token %d; the vocabulary has %u",
                           (int)p->bias[i].id, n_vocab);
    struct sampler *s = mem_zalloc(sizeof *s);
    if (!s)
        return err_set(e, ERR_MEMORY, "no memory for a sampler");
    s->p = *p;
    s->n_vocab = n_vocab;
    s->piece = piece;
    s->user = user;
    s->mu = 2 * (double)p->mirostat_tau; /* where Basu et al. start it */
    s->logprob = NAN;
    if (seed_init(s, e) || copy_lists(s, e) || scratch_init(s, e) ||
        history_init(s, max_tokens, e)) {
        sampler_free(s);
        return -1;
    }
    *out = s;
    return 0;
}

void sampler_free(struct sampler *s)
{
    if (!s)
        return;
    arena_fini(&s->arena);
    mem_free(s);
}

/* ---- a step ---- */

void sampler_accept(struct sampler *s, int32_t id)
{
    if (id >= 0 && (uint32_t)id < s->n_vocab)
        history_add(s, id);
}

static int bad_logits(const struct sampler *s, const float *logits, struct err *e)
{
    size_t i = 0;
    while (i < s->n_vocab && logits[i] <= FLT_MAX)
        i++;
    if (i < s->n_vocab)
        return err_set(e, ERR_DEVICE,
                       "the model gave %s as the logit of token %zu; verify the model file, or try "
                       "another backend",
                       logits[i] != logits[i] ? "NaN" : "infinity", i);
    return err_set(e, ERR_DEVICE,
                   "the model gave minus infinity as the logit of every token; verify "
                   "the model file, or try another backend");
}

/* Look over n_vocab logits: block maxima and the highest; false if they cannot be sampled from. */
static bool pool_init(struct pool *p, const float *x)
{
    p->x = x;
    p->gathered = false;
    p->n = p->n_vocab;
    p->max = -INFINITY;
    bool nan = p->ops->block_max(p->block_max, x, p->n_vocab);
    for (size_t b = 0; b * SCAN_BLOCK < p->n_vocab; b++)
        p->max = MAX(p->max, p->block_max[b]);
    return !nan && p->max > -INFINITY && p->max < INFINITY;
}

static int32_t best_token(const struct pool *p)
{
    size_t b = 0;
    while (p->block_max[b] != p->max)
        b++;
    size_t i = b * SCAN_BLOCK;
    while (p->x[i] != p->max)
        i++;
    return (int32_t)i;
}

/* The n_probs best of the pool's whole distribution, into s->top; leaves the pool as it was. */
static void note_top(struct sampler *s, double log_mass)
{
    struct pool p = s->pool;
    pool_take_top(&p, (size_t)s->p.n_probs);
    keys_sort(p.keys, p.n);
    for (size_t i = 0; i < p.n; i++) {
        double below = (double)key_logit(p.keys[i]) - (double)p.max;
        s->top[i] = (struct token_prob){(int32_t)key_id(p.keys[i]), (float)(below - log_mass)};
    }
    s->n_top = p.n;
}

int sampler_next(struct sampler *s, int32_t *id, const float *logits, const uint32_t *allowed,
                 struct err *e)
{
    struct pool *p = &s->pool;
    s->logprob = NAN;
    s->n_top = 0;
    if (!pool_init(p, logits))
        return bad_logits(s, logits, e);
    if (adjust_wanted(s, allowed)) {
        adjust_logits(s, logits, allowed);
        if (!pool_init(p, s->work))
            return err_set(e, ERR_USAGE,
                           "logit_bias and the grammar leave no token to choose; "
                           "loosen one of them");
    }
    bool want = s->p.logprob || s->p.n_probs > 0;
    double log_mass = want ? log(pool_mass(p, 1)) : 0;
    double max = (double)p->max;
    if (s->p.n_probs > 0)
        note_top(s, log_mass);
    if (!(s->p.temperature > 0))
        *id = best_token(p);
    else
        *id = s->p.mirostat ? mirostat_draw(s) : chain_draw(s);
    if (want)
        s->logprob = (float)((double)p->x[*id] - max - log_mass);
    s->n_drawn++;
    sampler_accept(s, *id);
    return 0;
}

float sampler_logprob(const struct sampler *s)
{
    return s->logprob;
}

size_t sampler_top(const struct sampler *s, const struct token_prob **top)
{
    *top = s->top;
    return s->n_top;
}

uint64_t sampler_seed(const struct sampler *s)
{
    return s->p.seed;
}
