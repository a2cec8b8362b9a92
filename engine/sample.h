/* Sampling: logits in, one token out. The chain on exact, documented formulas; one counter-based
 * generator a sequence (Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2,
 * 3", SC 2011), so that a seed replays whatever else runs. Part of the engine's public face. */
#ifndef INGOT_SAMPLE_H
#define INGOT_SAMPLE_H

#include "base/base.h"

struct logit_bias {
    int32_t id;
    float bias; /* added to the logit; -INFINITY bans */
};

struct sample_params { /* sample_defaults() gives the neutral chain noted at each field */
    uint64_t seed;     /* 0: one is drawn at random and reported by sampler_seed */
    float temperature; /* 0.8; <= 0: greedy (the highest logit after bias and penalties, lowest id
                          wins) */
    float dynatemp_range, dynatemp_exponent; /* 0, 1: entropy-scaled temperature when range > 0 */
    float top_n_sigma;                       /* 0; <= 0: off */
    int32_t top_k;                           /* 40; <= 0: off */
    float top_p;                             /* 0.95; 1: off */
    float min_p;                             /* 0.05; 0: off */
    float typical_p;                         /* 1: off */
    float xtc_probability, xtc_threshold;    /* 0, 0.1 */
    int32_t repeat_last_n; /* 64 tokens looked back by the penalties; 0 off, -1 the whole context */
    float repeat_penalty;  /* 1: off */
    float presence_penalty, frequency_penalty; /* 0: off */
    float dry_multiplier, dry_base;            /* 0 (off), 1.75 */
    int32_t dry_allowed_length, dry_last_n;    /* 2, -1 */
    const char *const *dry_breakers; /* strings; NULL: newline, colon, double quote, asterisk */
    size_t n_dry_breakers;
    int32_t mirostat;                 /* 0 off, 1, 2 (replaces the truncation stages) */
    float mirostat_tau, mirostat_eta; /* 5, 0.1 */
    int32_t min_keep;                 /* 0 means 1: tokens that truncation must leave */
    const struct logit_bias *bias;
    size_t n_bias;
    int32_t n_probs; /* how many of the best tokens' log-probabilities the caller wants; 0 */
    bool logprob;    /* the caller will ask sampler_logprob; implied by n_probs > 0 */
};
void sample_defaults(struct sample_params *p);
/* One line naming a parameter that is out of its range, with the range. */
int sample_check(const struct sample_params *p, struct err *e);

struct sampler; /* one sequence's state: generator counter, token history, mirostat mu */

struct token_prob {
    int32_t id;
    float
        logprob; /* natural log, of the distribution after bias and penalties, before truncation */
};

/* Everything in p is copied. Scratch for n_vocab candidates is taken here; sampling allocates
 * nothing. max_tokens bounds the history (the context length). The piece look-up serves DRY's
 * sequence breakers: `piece` gives the text of a token; it and user must outlive the sampler. */
typedef const char *(*sample_piece)(const void *user, int32_t id, size_t *n);
int sampler_new(struct sampler **out, const struct sample_params *p, uint32_t n_vocab,
                uint32_t max_tokens, sample_piece piece, const void *user, struct err *e);
void sampler_free(struct sampler *s);
/* Bytes of memory that a sampler of these parameters takes, but for the lists copied from them. */
uint64_t sampler_bytes(const struct sample_params *p, uint32_t n_vocab, uint32_t max_tokens);
/* Tell it of a token of the prompt (or one that was forced), so that penalties see it. Ids outside
 * the vocabulary (image rows) are passed over. */
void sampler_accept(struct sampler *s, int32_t id);
/* Choose from n_vocab logits (not changed) and accept the choice. NaN, +INFINITY or all -INFINITY
 * logits give ERR_DEVICE. `allowed`, when not NULL, is a bit mask of n_vocab bits (a grammar's):
 * bit id % 32 of word id / 32. When bias and mask leave no token, ERR_USAGE. The chain: bias, mask,
 * penalties, DRY, then top-n-sigma, top-k, typical, top-p, min-p, XTC and temperature, or with
 * mirostat only temperature and mirostat; then the draw. Ties go to the lower id. */
int sampler_next(struct sampler *s, int32_t *id, const float *logits, const uint32_t *allowed,
                 struct err *e);
/* After sampler_next: the chosen token's log-probability (NaN when neither logprob nor n_probs
 * asked for it), and the n_probs best, best first, lower id first among equals; banned tokens are
 * never among them, so there may be fewer. Valid until the next call. */
float sampler_logprob(const struct sampler *s);
size_t sampler_top(const struct sampler *s, const struct token_prob **top);
uint64_t sampler_seed(const struct sampler *s); /* the seed in use */

#endif
