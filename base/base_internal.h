/* What base's own files share. */
#ifndef INGOT_BASE_INTERNAL_H
#define INGOT_BASE_INTERNAL_H

#include "base/base.h"

struct hash128 hash_xxh3_avx2(const void *p, size_t n, uint64_t seed);

#endif
