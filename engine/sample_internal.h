/* Private to the sampler: its state, the candidate pool, and the seams between its files.
 *   sample.c            parameters, life cycle, the chain
 *   sample_filters.c    truncation, XTC, temperature, mirostat, the draw
 *   sample_penalties.c  bias, mask, token history, repetition penalties, DRY
 *   sample_pool.c       which candidates are left: gathering, selection, mass
 *   sample_scan.c       the loops over the whole vocabulary
 *   sample_rng.c        random numbers */
#ifndef INGOT_SAMPLE_INTERNAL_H
#define INGOT_SAMPLE_INTERNAL_H

#include "engine/sample.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum {
    SCAN_BLOCK = 256,      /* logits that share one entry of block_max and block_mass */
    BREAKER_BYTES = 64,    /* longest DRY sequence breaker */
    BREAKERS_MAX = 256,    /* most of them */
    MIROSTAT_WINDOW = 100, /* candidates from which mirostat 1 estimates the Zipf exponent */
};

/* ---- random numbers ---- */

enum rng_stream { RNG_DRAW, RNG_XTC };

void philox4x32(uint32_t out[4], const uint32_t counter[4], const uint32_t key[2]);
/* In [0, 1): the draw number `at` of a stream. */
double rng_uniform(uint64_t seed, uint64_t at, enum rng_stream stream);

/* ---- loops over many logits; every level gives the same bits ---- */

struct scan_ops {
    const char *isa;
    /* The highest of each SCAN_BLOCK values (the last block may be short); true if one is NaN. */
    bool (*block_max)(float *block_max, const float *x, size_t n);
    /* w[i] = exp((x[i] - max) * scale): 0 below exp(-87), else within 2 units in the last place.
     * w may be x. */
    void (*weigh)(float *w, const float *x, size_t n, float max, float scale);
    /* Sum of at most SCAN_BLOCK values: 16 running sums (i mod 16), added up in order, in double.
     */
    double (*sum)(const float *w, size_t n);
};
/* Levels from the plainest to the best, which this machine can run: 0 is always there. */
const struct scan_ops *scan_ops_find(int level); /* NULL past the best */
const struct scan_ops *scan_ops_best(void);

/* ---- the pool: the candidates that are still in the race ---- */

/* A candidate is one number, so that ascending order is rank: the higher logit first, among equal
 * logits the lower id. Bits 63..32: the logit, made orderable and inverted; bits 31..0: the id. */
static inline uint32_t float_order(float f)
{
    uint32_t u;
    f += 0.0f; /* -0 ranks as 0 */
    memcpy(&u, &f, 4);
    return u ^ ((u >> 31) ? 0xffffffffu : 0x80000000u);
}

static inline uint64_t key_make(float logit, uint32_t id)
{
    return (uint64_t)~float_order(logit) << 32 | id;
}

static inline float key_logit(uint64_t key)
{
    uint32_t u = ~(uint32_t)(key >> 32);
    u ^= (u >> 31) ? 0x80000000u : 0xffffffffu;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static inline uint32_t key_id(uint64_t key)
{
    return (uint32_t)key;
}

struct pool {
    const struct scan_ops *ops;
    const float *x; /* [n_vocab] logits after bias, mask and penalties; the caller's or work */
    size_t n_vocab;
    float *block_max;   /* [blocks of n_vocab] */
    double *block_mass; /* [blocks of n_vocab] scratch of the draw */
    uint64_t *keys;     /* [n_vocab], unless the choice is greedy and no n_probs are wanted */
    uint64_t *aux;      /* [blocks of n_vocab], with typical_p [n_vocab]: scratch of selections */
    bool gathered;      /* the candidates are keys[0 .. n); else all of x, in order of id */
    size_t n;
    float max; /* the highest logit among the candidates; weights are relative to it */
};

void pool_gather(struct pool *p, float at_least); /* from x, in order of id; never -INFINITY */
void pool_gather_all(struct pool *p);             /* unless gathered already */
void pool_take_top(struct pool *p, size_t k);     /* keep the k best */
void pool_keep_logits(struct pool *p, float at_least, size_t min_keep);
double pool_mass(const struct pool *p, float scale); /* sum of exp((logit - max) * scale) */
/* Keep the best candidates until their mass (at scale 1) reaches `target`; min_keep at least. */
void pool_cut_mass(struct pool *p, double target, size_t min_keep);
/* The first prefix, in ascending order of keys, with that mass; keys[0 .. result) is it. `values`,
 * when not NULL, is what the low halves of the keys index; else keys are candidates themselves. */
size_t keys_cut_mass(const struct pool *p, uint64_t *keys, size_t n, const uint64_t *values,
                     double target);
void keys_select(uint64_t *keys, size_t n, size_t k); /* the k least to the front, in any order */
void keys_sort(uint64_t *keys, size_t n);             /* ascending */
/* Choose one candidate with probability exp((logit - max) * scale) / mass, by u in [0, 1). */
int32_t pool_draw(const struct pool *p, float scale, double u);

/* ---- history and penalties ---- */

struct token_count {
    int32_t id;
    uint32_t n; /* occurrences in the window */
};

struct history {
    int32_t *v;     /* [2 * keep]: the last n tokens, oldest first; moved to the front when full */
    size_t n, keep; /* keep: how many of the last ones anyone looks at; 0: nobody */
    /* what the repetition penalties see */
    size_t window;            /* tokens; 0: off */
    struct token_count *seen; /* [n_seen] the distinct tokens of the window */
    size_t n_seen;
    uint32_t *slot; /* [n_vocab] index in seen + 1, or 0 */
    /* DRY */
    size_t dry_window; /* tokens; 0: off */
    uint32_t *match;   /* [dry_window] Z function of the reversed window */
    uint32_t *
        dry_length; /* [n_vocab] longest match that the token would continue + 1; 0 between steps */
    size_t since_break;       /* tokens after the last sequence breaker */
    char tail[BREAKER_BYTES]; /* the last bytes of text, for breakers that span tokens */
    size_t n_tail;
    bool breaker_end[256]; /* a breaker ends with this byte */
};

struct sampler {
    struct sample_params p; /* its arrays are copies in the arena */
    uint32_t n_vocab;
    uint64_t n_drawn; /* tokens chosen so far: the generator's counter */
    double mu;        /* mirostat's running bound on surprise, bits */
    sample_piece piece;
    const void *user;
    struct history h;
    struct pool pool;
    float *work; /* [n_vocab] adjusted logits, when something adjusts them */
    float logprob;
    struct token_prob *top; /* [min(n_probs, n_vocab)] */
    size_t n_top;
    struct arena arena; /* everything but the struct itself */
};

int history_init(struct sampler *s, uint32_t max_tokens, struct err *e);
uint64_t history_bytes(const struct sample_params *p, uint32_t n_vocab, uint32_t max_tokens);
void history_add(struct sampler *s, int32_t id);
bool adjust_wanted(const struct sampler *s, const uint32_t *allowed);
void adjust_logits(struct sampler *s, const float *logits, const uint32_t *allowed); /* into work */

/* ---- the chain after the penalties ---- */

int32_t chain_draw(struct sampler *s);
int32_t mirostat_draw(struct sampler *s);

#endif
