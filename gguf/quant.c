/* Encoders: floats to blocks. A block's scale is chosen among a few near the plain absmax (or
 * minmax) one, each improved by least squares for the values it rounds to; then the values are
 * rounded once more against the scale as it will be decoded. No importance matrix. Values that are
 * not finite give some finite block. Owns no memory; n is a multiple of the block length. */
#include "gguf/gguf_internal.h"
#include "gguf/blocks.h"

#include <math.h>
#include <string.h>

enum {
    FIT_STEPS = 7, /* candidates on each side of the plain scale */
    MAX_PART = 32, /* values that share a scale, at most; always a multiple of 4 */
};

/* Nearest whole number within lo..hi, halves to even; NaN gives lo. Adding 1.5 * 2^23 leaves no bit
 * below one, and unlike a conversion to int it keeps the loops around it in vector registers. */
static inline float round_within(float v, float lo, float hi)
{
    v = v > lo ? v : lo;
    v = v < hi ? v : hi;
    return v + 0x1.8p23f - 0x1.8p23f;
}

static inline int round_to(float v, int lo, int hi)
{
    return (int)round_within(v, (float)lo, (float)hi);
}

static inline float inverse(float d)
{
    return d != 0 && isfinite(1 / d) ? 1 / d : 0;
}

/* The finite half nearest to f; 0 for NaN. */
static uint16_t half_of(float f)
{
    if (isnan(f))
        return 0;
    return f32_to_f16(f > 65504 ? 65504 : f < -65504 ? -65504 : f);
}

/* The value of the largest magnitude, with its sign. */
static float extreme(const float *x, int n)
{
    float best = 0;
    for (int i = 0; i < n; i++)
        if (fabsf(x[i]) > fabsf(best))
            best = x[i];
    return best;
}

/* sum(x q) and sum(q q), in four lanes, so that they fit a vector register. */
static void moments(float *xq, float *qq, const float *x, const float *q, int n)
{
    float a[4] = {0}, b[4] = {0};
    for (int i = 0; i < n; i += 4)
        for (int k = 0; k < 4; k++) {
            a[k] += x[i + k] * q[i + k];
            b[k] += q[i + k] * q[i + k];
        }
    *xq = (a[0] + a[1]) + (a[2] + a[3]);
    *qq = (b[0] + b[1]) + (b[2] + b[3]);
}

static float sum(const float *x, int n)
{
    float a[4] = {0};
    for (int i = 0; i < n; i += 4)
        for (int k = 0; k < 4; k++)
            a[k] += x[i + k];
    return (a[0] + a[1]) + (a[2] + a[3]);
}

/* The best factor d for x ~ d * q found so far. For given q it is sum(xq) / sum(qq), and it lowers
 * the squared error by sum(xq)^2 / sum(qq). */
struct best_factor {
    float d, gain;
};

static void try_factor(struct best_factor *best, const float *x, const float *q, int n)
{
    float xq, qq;
    moments(&xq, &qq, x, q, n);
    if (qq > 0 && xq * xq > best->gain * qq)
        *best = (struct best_factor){xq / qq, xq * xq / qq};
}

/* d with x ~ d * q, q in lo .. -lo-1. */
static float fit_symmetric(const float *x, int n, int lo)
{
    float top = extreme(x, n), q[MAX_PART];
    struct best_factor best = {top / (float)lo, 0};
    if (top == 0)
        return 0;
    for (int step = -FIT_STEPS; step <= FIT_STEPS; step++) {
        float inv = ((float)lo + 0.1f * (float)step) / top;
        for (int i = 0; i < n; i++)
            q[i] = round_within(x[i] * inv, (float)lo, (float)(-lo - 1));
        try_factor(&best, x, q, n);
    }
    return best.d;
}

struct affine {
    float scale, min; /* x ~ scale * q - min */
};

/* Least squares of x against q, with min >= 0 when `below` is set; sets the squared error. */
static struct affine solve_affine(float *error, const float *x, const float *q, int n, bool below)
{
    float sx = sum(x, n), sq = sum(q, n), xq, qq, unused, r[MAX_PART];
    moments(&xq, &qq, x, q, n);
    struct affine a = {0, 0};
    float det = (float)n * qq - sq * sq;
    if (det > 0)
        a = (struct affine){((float)n * xq - sq * sx) / det, (sq * xq - qq * sx) / det};
    if (det <= 0 || (below && a.min < 0))
        a = (struct affine){qq > 0 ? xq / qq : 0, 0};
    for (int i = 0; i < n; i++)
        r[i] = a.scale * q[i] - a.min - x[i];
    moments(&unused, error, x, r, n);
    return a;
}

/* Scale and minimum for q in 0..hi. */
static struct affine fit_affine(const float *x, int n, int hi, bool below)
{
    float lo = below ? 0 : x[0], top = x[0], q[MAX_PART];
    for (int i = 0; i < n; i++) {
        lo = x[i] < lo ? x[i] : lo;
        top = x[i] > top ? x[i] : top;
    }
    struct affine best = {(top - lo) / (float)hi, -lo};
    if (!(top > lo))
        return (struct affine){0, -lo};
    float least = INFINITY;
    for (int step = -FIT_STEPS; step <= FIT_STEPS; step++) {
        float inv = ((float)hi + 0.1f * (float)step) / (top - lo), error;
        for (int i = 0; i < n; i++)
            q[i] = round_within((x[i] - lo) * inv, 0, (float)hi);
        struct affine a = solve_affine(&error, x, q, n, below);
        if (error < least && a.scale > 0) {
            least = error;
            best = a;
        }
    }
    return best;
}

/* ---- plain types ---- */

void f32_from_f32(void *dst, const float *src, size_t n)
{
    memcpy(dst, src, n * sizeof *src);
}

void f16_from_f32(void *dst, const float *src, size_t n)
{
    uint16_t *h = dst;
    for (size_t i = 0; i < n; i++)
        h[i] = f32_to_f16(src[i]);
}

void bf16_from_f32(void *dst, const float *src, size_t n)
{
    uint16_t *h = dst;
    for (size_t i = 0; i < n; i++)
        h[i] = f32_to_bf16(src[i]);
}

/* ---- blocks of 32 ---- */

/* 32 small numbers: low nibbles, and bit 4 into the mask qh where there is one. */
static void pack_32(uint8_t *qs, uint8_t *qh, const uint8_t *q)
{
    for (int i = 0; i < 16; i++)
        qs[i] = (uint8_t)((q[i] & 15) | (q[i + 16] & 15) << 4);
    for (int i = 0; qh && i < 4; i++) {
        qh[i] = 0;
        for (int j = 0; j < 8; j++)
            qh[i] |= (uint8_t)((q[8 * i + j] >> 4 & 1) << j);
    }
}

static void round_symmetric(uint8_t *q, const float *x, int n, float d, int lo)
{
    float inv = inverse(d);
    for (int i = 0; i < n; i++)
        q[i] = (uint8_t)(round_to(x[i] * inv, lo, -lo - 1) - lo);
}

static void round_affine(uint8_t *q, const float *x, int n, struct affine a, int hi)
{
    float inv = inverse(a.scale);
    for (int i = 0; i < n; i++)
        q[i] = (uint8_t)round_to((x[i] + a.min) * inv, 0, hi);
}

void q4_0_from_f32(void *dst, const float *src, size_t n)
{
    uint8_t q[32];
    struct block_q4_0 *b = dst;
    for (; n; n -= 32, src += 32, b++) {
        b->d = half_of(fit_symmetric(src, 32, -8));
        round_symmetric(q, src, 32, f16_to_f32(b->d), -8);
        pack_32(b->qs, NULL, q);
    }
}

void q5_0_from_f32(void *dst, const float *src, size_t n)
{
    uint8_t q[32];
    struct block_q5_0 *b = dst;
    for (; n; n -= 32, src += 32, b++) {
        b->d = half_of(fit_symmetric(src, 32, -16));
        round_symmetric(q, src, 32, f16_to_f32(b->d), -16);
        pack_32(b->qs, b->qh, q);
    }
}

/* Halves of the fitted scale and offset, and the numbers rounded against them. */
static void affine_32(uint16_t *d, uint16_t *m, uint8_t *q, const float *x, int hi)
{
    struct affine a = fit_affine(x, 32, hi, false);
    *d = half_of(a.scale);
    *m = half_of(-a.min);
    round_affine(q, x, 32, (struct affine){f16_to_f32(*d), -f16_to_f32(*m)}, hi);
}

void q4_1_from_f32(void *dst, const float *src, size_t n)
{
    uint8_t q[32];
    struct block_q4_1 *b = dst;
    for (; n; n -= 32, src += 32, b++) {
        affine_32(&b->d, &b->m, q, src, 15);
        pack_32(b->qs, NULL, q);
    }
}

void q5_1_from_f32(void *dst, const float *src, size_t n)
{
    uint8_t q[32];
    struct block_q5_1 *b = dst;
    for (; n; n -= 32, src += 32, b++) {
        affine_32(&b->d, &b->m, q, src, 31);
        pack_32(b->qs, b->qh, q);
    }
}

void q8_0_from_f32(void *dst, const float *src, size_t n)
{
    struct block_q8_0 *b = dst;
    for (; n; n -= 32, src += 32, b++) {
        b->d = half_of(fabsf(extreme(src, 32)) / 127);
        float inv = inverse(f16_to_f32(b->d));
        for (int i = 0; i < 32; i++)
            b->qs[i] = (int8_t)round_to(src[i] * inv, -127, 127);
    }
}

/* ---- the 16-entry code book ---- */

/* The entries nearest to x * inv, and which they are: one more for every midpoint below. */
static void nearest_codes(float *entry, uint8_t *at, const float *x, float inv, int n)
{
    float v[MAX_PART];
    for (int i = 0; i < n; i++) {
        v[i] = x[i] * inv;
        entry[i] = (float)gguf_iq4nl_values[0];
        at[i] = 0;
    }
    for (int k = 0; k < 15; k++) {
        float low = (float)gguf_iq4nl_values[k], high = (float)gguf_iq4nl_values[k + 1];
        for (int i = 0; i < n; i++)
            entry[i] = v[i] > 0.5f * (low + high) ? high : entry[i];
        for (int i = 0; i < n; i++)
            at[i] = (uint8_t)(at[i] + (v[i] > 0.5f * (low + high)));
    }
}

/* d with x ~ d * entry; as fit_symmetric, tried with the extreme at either end of the book. */
static float fit_codes(const float *x, int n)
{
    float top = extreme(x, n), q[MAX_PART];
    uint8_t at[MAX_PART];
    struct best_factor best = {top / (float)gguf_iq4nl_values[0], 0};
    if (top == 0)
        return 0;
    for (int step = -FIT_STEPS; step <= FIT_STEPS; step++) {
        for (int end = 0; end < 16; end += 15) {
            float inv = (float)gguf_iq4nl_values[end] * (1 + 0.02f * (float)step) / top;
            nearest_codes(q, at, x, inv, n);
            try_factor(&best, x, q, n);
        }
    }
    return best.d;
}

static void round_codes(uint8_t *q, const float *x, float d)
{
    float entry[32];
    nearest_codes(entry, q, x, inverse(d), 32);
}

void iq4_nl_from_f32(void *dst, const float *src, size_t n)
{
    uint8_t q[32];
    struct block_iq4_nl *b = dst;
    for (; n; n -= 32, src += 32, b++) {
        b->d = half_of(fit_codes(src, 32));
        round_codes(q, src, f16_to_f32(b->d));
        pack_32(b->qs, NULL, q);
    }
}

/* Part scales to d (a half) times integers lo .. -lo-1; the integers are what is stored. */
static uint16_t scales_symmetric(int8_t *s, const float *scale, int n, int lo)
{
    uint16_t d = half_of(extreme(scale, n) / (float)lo);
    float inv = inverse(f16_to_f32(d));
    for (int i = 0; i < n; i++)
        s[i] = (int8_t)round_to(scale[i] * inv, lo, -lo - 1);
    return d;
}

void iq4_xs_from_f32(void *dst, const float *src, size_t n)
{
    struct block_iq4_xs *b = dst;
    for (; n; n -= 256, src += 256, b++) {
        float scale[8];
        int8_t s[8];
        uint8_t q[32];
        memset(b, 0, sizeof *b);
        for (int k = 0; k < 8; k++)
            scale[k] = fit_codes(src + 32 * k, 32);
        b->d = scales_symmetric(s, scale, 8, -32);
        for (int k = 0; k < 8; k++) {
            unsigned stored = (unsigned)(s[k] + 32);
            b->scales_l[k / 2] |= (uint8_t)((stored & 15) << 4 * (k % 2));
            b->scales_h |= (uint16_t)(stored >> 4 << 2 * k);
            round_codes(q, src + 32 * k, f16_to_f32(b->d) * (float)s[k]);
            pack_32(b->qs + 16 * k, NULL, q);
        }
    }
}

/* ---- blocks of 256 ---- */

/* Two bits of each of 256 numbers, in the order of q2_k. */
static void pack_2bit(uint8_t *qs, const uint8_t *q)
{
    for (int i = 0; i < 64; i++) {
        const uint8_t *v = q + 128 * (i / 32) + i % 32;
        qs[i] = (uint8_t)((v[0] & 3) | (v[32] & 3) << 2 | (v[64] & 3) << 4 | (v[96] & 3) << 6);
    }
}

/* Part scales and minima to a half times 0..hi each; then the numbers of all parts. */
struct affine_parts {
    uint16_t d, dmin;
    uint8_t scale[16], min[16]; /* 0..hi */
    uint8_t q[256];
};

static void affine_parts(struct affine_parts *p, const float *x, int n_parts, int hi_scale, int hi)
{
    struct affine a[16];
    int len = 256 / n_parts;
    float top_scale = 0, top_min = 0;
    for (int k = 0; k < n_parts; k++) {
        a[k] = fit_affine(x + len * k, len, hi, true);
        top_scale = MAX(top_scale, a[k].scale);
        top_min = MAX(top_min, a[k].min);
    }
    p->d = half_of(top_scale / (float)hi_scale);
    p->dmin = half_of(top_min / (float)hi_scale);
    float d = f16_to_f32(p->d), dmin = f16_to_f32(p->dmin);
    for (int k = 0; k < n_parts; k++) {
        p->scale[k] = (uint8_t)round_to(a[k].scale * inverse(d), 0, hi_scale);
        p->min[k] = (uint8_t)round_to(a[k].min * inverse(dmin), 0, hi_scale);
        struct affine used = {d * (float)p->scale[k], dmin * (float)p->min[k]};
        round_affine(p->q + len * k, x + len * k, len, used, hi);
    }
}

void q2_k_from_f32(void *dst, const float *src, size_t n)
{
    struct affine_parts p;
    struct block_q2_k *b = dst;
    for (; n; n -= 256, src += 256, b++) {
        affine_parts(&p, src, 16, 15, 3);
        b->d = p.d;
        b->dmin = p.dmin;
        for (int k = 0; k < 16; k++)
            b->scales[k] = (uint8_t)(p.scale[k] | p.min[k] << 4);
        pack_2bit(b->qs, p.q);
    }
}

/* The inverse of block_scale_min for all eight parts. */
static void pack_scale_min(uint8_t *out, const uint8_t *scale, const uint8_t *min)
{
    for (int k = 0; k < 4; k++) {
        out[k] = (uint8_t)(scale[k] | scale[k + 4] >> 4 << 6);
        out[k + 4] = (uint8_t)(min[k] | min[k + 4] >> 4 << 6);
        out[k + 8] = (uint8_t)((scale[k + 4] & 15) | (min[k + 4] & 15) << 4);
    }
}

static void pack_nibble_pairs(uint8_t *qs, const uint8_t *q)
{
    for (int i = 0; i < 128; i++) {
        const uint8_t *v = q + 64 * (i / 32) + i % 32;
        qs[i] = (uint8_t)((v[0] & 15) | (v[32] & 15) << 4);
    }
}

void q4_k_from_f32(void *dst, const float *src, size_t n)
{
    struct affine_parts p;
    struct block_q4_k *b = dst;
    for (; n; n -= 256, src += 256, b++) {
        affine_parts(&p, src, 8, 63, 15);
        b->d = p.d;
        b->dmin = p.dmin;
        pack_scale_min(b->scales, p.scale, p.min);
        pack_nibble_pairs(b->qs, p.q);
    }
}

void q5_k_from_f32(void *dst, const float *src, size_t n)
{
    struct affine_parts p;
    struct block_q5_k *b = dst;
    for (; n; n -= 256, src += 256, b++) {
        affine_parts(&p, src, 8, 63, 31);
        b->d = p.d;
        b->dmin = p.dmin;
        pack_scale_min(b->scales, p.scale, p.min);
        pack_nibble_pairs(b->qs, p.q);
        memset(b->qh, 0, sizeof b->qh);
        for (int i = 0; i < 256; i++)
            b->qh[i % 32] |= (uint8_t)(p.q[i] >> 4 << i / 32);
    }
}

/* 16 parts of 16, symmetric: sets d and the part scales, and numbers 0 .. -2 lo - 1. */
static uint16_t symmetric_parts(int8_t s[16], uint8_t q[256], const float *x, int lo, int lo_scale)
{
    float scale[16];
    for (int k = 0; k < 16; k++)
        scale[k] = fit_symmetric(x + 16 * k, 16, lo);
    uint16_t d = scales_symmetric(s, scale, 16, lo_scale);
    for (int k = 0; k < 16; k++)
        round_symmetric(q + 16 * k, x + 16 * k, 16, f16_to_f32(d) * (float)s[k], lo);
    return d;
}

void q3_k_from_f32(void *dst, const float *src, size_t n)
{
    int8_t s[16];
    uint8_t q[256];
    struct block_q3_k *b = dst;
    for (; n; n -= 256, src += 256, b++) {
        memset(b, 0, sizeof *b);
        b->d = symmetric_parts(s, q, src, -4, -32);
        for (int k = 0; k < 16; k++) {
            unsigned stored = (unsigned)(s[k] + 32);
            b->scales[k % 8] |= (uint8_t)((stored & 15) << 4 * (k / 8));
            b->scales[8 + k % 4] |= (uint8_t)(stored >> 4 << 2 * (k / 4));
        }
        pack_2bit(b->qs, q);
        for (int i = 0; i < 256; i++)
            b->hmask[i % 32] |= (uint8_t)(q[i] >> 2 << i / 32);
    }
}

void q6_k_from_f32(void *dst, const float *src, size_t n)
{
    uint8_t q[256];
    struct block_q6_k *b = dst;
    for (; n; n -= 256, src += 256, b++) {
        b->d = symmetric_parts(b->scales, q, src, -32, -128);
        for (int i = 0; i < 128; i++) {
            const uint8_t *v = q + 128 * (i / 64) + i % 64;
            b->ql[i] = (uint8_t)((v[0] & 15) | (v[64] & 15) << 4);
        }
        for (int i = 0; i < 64; i++) {
            const uint8_t *v = q + 128 * (i / 32) + i % 32;
            b->qh[i] = (uint8_t)(v[0] >> 4 | v[32] >> 4 << 2 | v[64] >> 4 << 4 | v[96] >> 4 << 6);
        }
    }
}
