/* XXH3-128 built with AVX2, for hash.c to choose where the CPU has it: twice as fast as SSE2. */
#include "base/base_internal.h"

#if defined(__x86_64__)
#define XXH_INLINE_ALL
#include <xxhash.h>

struct hash128 hash_xxh3_avx2(const void *p, size_t n, uint64_t seed)
{
    XXH128_hash_t h = XXH3_128bits_withSeed(p, n, seed);
    return (struct hash128){h.low64, h.high64};
}
#endif
