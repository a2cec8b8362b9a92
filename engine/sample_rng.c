/* Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random
 * numbers: as easy as 1, 2, 3", SC 2011, section 3.4. It has no state: a draw is a function of
 * (seed, how many tokens were drawn before, what it is for), so that a seed replays whatever else
 * runs, and a stage that tosses a coin does not shift the draws of another. */
#include "engine/sample_internal.h"

static uint32_t mul_hi(uint32_t *lo, uint32_t a, uint32_t b)
{
    uint64_t p = (uint64_t)a * b;
    *lo = (uint32_t)p;
    return (uint32_t)(p >> 32);
}

void philox4x32(uint32_t out[4], const uint32_t counter[4], const uint32_t key[2])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint32_t lo0, lo1;
        uint32_t hi0 = mul_hi(&lo0, 0xD2511F53u, c0);
        uint32_t hi1 = mul_hi(&lo1, 0xCD9E8D57u, c2);
        c0 = hi1 ^ c1 ^ k0;
        c1 = lo1;
        c2 = hi0 ^ c3 ^ k1;
        c3 = lo0;
        k0 += 0x9E3779B9u; /* Weyl sequences: the golden ratio and sqrt(3) - 1, in 32 bits */
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

double rng_uniform(uint64_t seed, uint64_t at, enum rng_stream stream)
{
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    const uint32_t counter[4] = {(uint32_t)at, (uint32_t)(at >> 32), (uint32_t)stream, 0};
    uint32_t r[4];
    philox4x32(r, counter, key);
    /* 53 bits, the most a double in [0, 1) can use evenly */
    uint64_t bits = ((uint64_t)r[0] << 32 | r[1]) >> 11;
    return (double)bits * 0x1p-53;
}
