/* Where a value is in a head's K or V of a page, for every kernel level. K lies with its 32 tokens
 * side by side, so that one SIMD lane is one key; V row by row, so that one lane is one value:
 *
 *   f16 bf16 f32   K [head_dim][32]                     V [32][head_dim]
 *   q8_0 q4_0      K, once for each block of 32 dims:   V, once for each token and block:
 *                    scales [32] float16                  scale float16
 *                    codes  [n][32] bytes                 codes [n] bytes
 *
 * A block's codes are n = 32 signed bytes (q8_0), or n = 16 where byte i has value i + 8 in its low
 * nibble and value 16 + i + 8 in the high one (q4_0): the blocks of GGUF, those of K interleaved.
 */
#ifndef INGOT_KV_LAYOUT_H
#define INGOT_KV_LAYOUT_H

#include "backends/cpu/cpu_internal.h"
#include "gguf/blocks.h"

#include <string.h>

enum { KV_BLOCK = 32 };
_Static_assert(sizeof(struct block_q8_0) == 2 + KV_BLOCK, "q8_0 block");
_Static_assert(sizeof(struct block_q4_0) == 2 + KV_BLOCK / 2, "q4_0 block");

static inline bool kv_is_blocks(enum kv_type t)
{
    return t == KV_Q8_0 || t == KV_Q4_0;
}

static inline size_t kv_block_bytes(enum kv_type t)
{
    return t == KV_Q8_0 ? sizeof(struct block_q8_0) : sizeof(struct block_q4_0);
}

struct kv_place {              /* of one token's block: bytes from the start of the head's K or V */
    size_t scale, codes, step; /* step: from code to code */
};

static inline struct kv_place kv_key_place(int32_t block, int32_t at, enum kv_type t)
{
    size_t start = (size_t)block * KV_PAGE_TOKENS * kv_block_bytes(t);
    return (struct kv_place){start + 2 * (size_t)at, start + 2 * KV_PAGE_TOKENS + (size_t)at,
                             KV_PAGE_TOKENS};
}

static inline struct kv_place kv_value_place(int32_t block, int32_t at, int32_t head_dim,
                                             enum kv_type t)
{
    size_t start = (size_t)(at * (head_dim / KV_BLOCK) + block) * kv_block_bytes(t);
    return (struct kv_place){start, start + 2, 1};
}

/* A block taken apart. Codes are -127..127 or -8..7; scale is what is kept, float16. */
struct kv_block {
    uint16_t scale;
    int8_t q[KV_BLOCK];
};

static inline void kv_block_put(uint8_t *head, struct kv_place p, const struct kv_block *b,
                                enum kv_type t)
{
    memcpy(head + p.scale, &b->scale, 2);
    if (t == KV_Q8_0)
        for (size_t i = 0; i < KV_BLOCK; i++)
            head[p.codes + i * p.step] = (uint8_t)b->q[i];
    else
        for (size_t i = 0; i < KV_BLOCK / 2; i++)
            head[p.codes + i * p.step] =
                (uint8_t)((b->q[i] + 8) | (b->q[i + KV_BLOCK / 2] + 8) << 4);
}

#endif
