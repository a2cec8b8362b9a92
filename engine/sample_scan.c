/* The sampler's loops over a whole vocabulary: highest logits, exponentials, sums. Written so that
 * a compiler turns them into vector code, once for the plain instruction set and once for AVX2.
 * Every step is one IEEE operation in a fixed order, so all levels give the same bits. */
#include "engine/sample_internal.h"

/* Nothing here looks at floating-point exceptions; saying so lets selections become vector code.
 * And a value depends on those at its own place only, so the result may lie where the values were.
 */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math")
#define PLACEWISE _Pragma("GCC ivdep")
#else
#define PLACEWISE
#endif

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16 };

typedef float float8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t int8 __attribute__((vector_size(32)));

INLINE void max8(float8 *m, int8 *nan, const float *x)
{
    float8 v = *(const float8 *)x;
    int8 higher = v > *m; /* never for NaN */
    *m = (float8)(((int8)v & higher) | ((int8)*m & ~higher));
    *nan |= v != v;
}

INLINE bool block_max_body(float *block_max, const float *x, size_t n)
{
    int8 nan = {0};
    for (size_t at = 0; at < n; at += SCAN_BLOCK, block_max++) {
        size_t len = MIN(n - at, (size_t)SCAN_BLOCK), i = 0;
        float8 a = (float8){0} - INFINITY, b = a;
        for (; i + 16 <= len; i += 16) {
            max8(&a, &nan, x + at + i);
            max8(&b, &nan, x + at + i + 8);
        }
        float best = -INFINITY;
        for (; i < len; i++) {
            best = x[at + i] > best ? x[at + i] : best;
            nan[0] |= x[at + i] != x[at + i];
        }
        max8(&a, &nan, (const float *)&b);
        for (int j = 0; j < 8; j++)
            best = a[j] > best ? a[j] : best;
        *block_max = best;
    }
    int32_t any = 0;
    for (int j = 0; j < 8; j++)
        any |= nan[j];
    return any != 0;
}

/* exp(y) for y <= 0: y = k ln 2 + r with |r| <= ln 2 / 2 (two-part ln 2, the high part short enough
 * that k times it is exact: Cody and Waite 1980, chapter 6), exp(r) by its series to r^7 / 7!,
 * whose rest is below 6e-9 of it. */
INLINE float exp_nonpositive(float y)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    float c = y > -87.0f ? y : -87.0f;
    float t = c * 1.44269504f + shift;
    float k = t - shift;
    float r = c - k * 0.693359375f;
    r = r - k * -2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    int32_t bits;
    memcpy(&bits, &t, 4);
    bits = (int32_t)((uint32_t)(bits - 0x4B400000 + 127) << 23);
    float two_k;
    memcpy(&two_k, &bits, 4);
    return y >= -87.0f ? p * two_k : 0.0f;
}

INLINE void weigh_body(float *w, const float *x, size_t n, float max, float scale)
{
    PLACEWISE
    for (size_t i = 0; i < n; i++)
        w[i] = exp_nonpositive((x[i] - max) * scale);
}

INLINE double sum_body(const float *w, size_t n)
{
    float acc[LANES] = {0};
    size_t whole = n / LANES * LANES;
    for (size_t i = 0; i < whole; i += LANES)
        for (size_t j = 0; j < LANES; j++)
            acc[j] += w[i + j];
    for (size_t i = whole; i < n; i++)
        acc[i - whole] += w[i];
    double sum = 0;
    for (int j = 0; j < LANES; j++)
        sum += (double)acc[j];
    return sum;
}

#define DEFINE_LEVEL(level, attr)                                                                  \
    attr static bool block_max_##level(float *block_max, const float *x, size_t n)                 \
    {                                                                                              \
        return block_max_body(block_max, x, n);                                                    \
    }                                                                                              \
    attr static void weigh_##level(float *w, const float *x, size_t n, float max, float scale)     \
    {                                                                                              \
        weigh_body(w, x, n, max, scale);                                                           \
    }                                                                                              \
    attr static double sum_##level(const float *w, size_t n)                                       \
    {                                                                                              \
        return sum_body(w, n);                                                                     \
    }

DEFINE_LEVEL(plain, )
#if defined(__x86_64__)
DEFINE_LEVEL(avx2, __attribute__((target("avx2"))))
#endif

static const struct scan_ops levels[] = {
    {"plain", block_max_plain, weigh_plain, sum_plain},
#if defined(__x86_64__)
    {"avx2", block_max_avx2, weigh_avx2, sum_avx2},
#endif
};

const struct scan_ops *scan_ops_find(int level)
{
    if (level < 0 || level >= (int)ARRAY_LEN(levels))
        return NULL;
#if defined(__x86_64__)
    if (level == 1 && !__builtin_cpu_supports("avx2"))
        return NULL;
#endif
    return &levels[level];
}

const struct scan_ops *scan_ops_best(void)
{
    const struct scan_ops *best = scan_ops_find(0);
    for (int level = 1; scan_ops_find(level); level++)
        best = scan_ops_find(level);
    return best;
}
