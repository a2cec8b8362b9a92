/* The types that keys and values can be kept in, one row each. How a page is laid out is a
 * backend's matter; its size is the same everywhere. Pure look-ups, no memory. */
#include "backends/backend.h"
#include "gguf/blocks.h"

#include <string.h>

static const struct {
    const char *name;
    uint8_t block_len, block_bytes;
} types[KV_TYPE_END] = {
    [KV_F16] = {"f16", 1, 2},
    [KV_BF16] = {"bf16", 1, 2},
    [KV_F32] = {"f32", 1, 4},
    [KV_Q8_0] = {"q8_0", 32, sizeof(struct block_q8_0)},
    [KV_Q4_0] = {"q4_0", 32, sizeof(struct block_q4_0)},
};

enum kv_type kv_type_find(const char *name)
{
    enum kv_type t = 0;
    while (t < KV_TYPE_END && strcmp(types[t].name, name))
        t++;
    return t;
}

const char *kv_type_name(enum kv_type t)
{
    CHECK((unsigned)t < KV_TYPE_END);
    return types[t].name;
}

int32_t kv_type_block(enum kv_type t)
{
    CHECK((unsigned)t < KV_TYPE_END);
    return types[t].block_len;
}

size_t kv_row_bytes(enum kv_type t, int32_t head_dim)
{
    return (size_t)(head_dim / kv_type_block(t)) * types[t].block_bytes;
}
