/* SHA-256 (mbedTLS), XXH3-128 (xxHash) and the clock. */
#include "base/base_internal.h"

#include <mbedtls/sha256.h>
#include <mbedtls/version.h>
#include <string.h>
#include <time.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

_Static_assert(sizeof(mbedtls_sha256_context) <= sizeof(struct sha256), "sha256 context fits");

#if MBEDTLS_VERSION_NUMBER < 0x03000000
#define mbedtls_sha256_starts mbedtls_sha256_starts_ret
#define mbedtls_sha256_update mbedtls_sha256_update_ret
#define mbedtls_sha256_finish mbedtls_sha256_finish_ret
#endif

void sha256_init(struct sha256 *s)
{
    mbedtls_sha256_context *c = (void *)s->state;
    mbedtls_sha256_init(c);
    CHECK(mbedtls_sha256_starts(c, 0) == 0);
}

void sha256_add(struct sha256 *s, const void *p, size_t n)
{
    CHECK(mbedtls_sha256_update((void *)s->state, p, n) == 0);
}

void sha256_done(struct sha256 *s, uint8_t out[32])
{
    CHECK(mbedtls_sha256_finish((void *)s->state, out) == 0);
    mbedtls_sha256_free((void *)s->state);
}

struct hash128 hash_xxh3(const void *p, size_t n, uint64_t seed)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2"))
        return hash_xxh3_avx2(p, n, seed);
#endif
    XXH128_hash_t h = XXH3_128bits_withSeed(p, n, seed);
    return (struct hash128){h.low64, h.high64};
}

uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
