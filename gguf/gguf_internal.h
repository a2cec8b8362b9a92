/* Private to gguf/: limits, decoders, encoders, the name index and what reader and writer share. */
#ifndef INGOT_GGUF_INTERNAL_H
#define INGOT_GGUF_INTERNAL_H

#include "gguf/gguf.h"

/* Bounds on what a header may make us allocate, beyond "no more items than its bytes can hold".
 * Together they stay below 64 MiB; no published model comes near them. */
enum {
    GGUF_MAX_KEYS = 1 << 16,
    GGUF_MAX_TENSORS = 1 << 16,
    GGUF_MAX_STRINGS = 1 << 21, /* in all arrays of strings together */
    GGUF_MAX_SHARDS = 4096,
    GGUF_MAX_KEY_BYTES = 65535, /* the format's limit */
    GGUF_MAX_NAME_BYTES = 64,   /* the format's limit for a tensor's name */
    GGUF_MAX_DIMS = 4,
    GGUF_DEFAULT_ALIGNMENT = 32,
    GGUF_MIN_ALIGNMENT = 8, /* the format asks for a multiple of 8 */
};

/* printf arguments for "%.*s" of a key or string that may be very long */
#define SHOW(s) (int)MIN((s).n, (size_t)64), (s).p

static inline uint64_t le64(const uint8_t *p)
{
    uint64_t v = 0;
    for (unsigned i = 0; i < 8; i++)
        v |= (uint64_t)p[i] << (8 * i);
    return v;
}

/* Bytes of one item of a value type; 0 for strings, arrays and unknown types. */
size_t gguf_type_bytes(uint32_t type);
const char *gguf_type_name(uint32_t type); /* "u32", or "unknown" */

/* Rows and blocks: bytes of a tensor of this shape; -1 when it does not fit 64 bits. */
int gguf_tensor_bytes(uint64_t *n_bytes, const struct gguf_dtype_info *info, const uint64_t ne[4]);

/* ---- index.c: open-addressed tables from names to positions, keyed with a random seed ---- */
struct gguf_table {
    uint32_t *slots; /* position + 1, 0 = free; owned */
    size_t mask;     /* slots - 1; 0 when there is no table */
};
struct gguf_index {
    uint64_t seed;
    struct gguf_table keys, tensors;
};
struct gguf_index *gguf_index_new(void);
void gguf_index_free(struct gguf_index *x);
uint64_t gguf_index_bytes(const struct gguf_index *x);
/* Enter items from .. to-1 of g (all of them when the table had to grow). Returns 0, -1 when out of
 * memory, or 1 with *dup set to the position of the first item whose name is already there. */
int gguf_index_keys(uint64_t *dup, struct gguf *g);
int gguf_index_tensors(uint64_t *dup, struct gguf *g, uint64_t from);

/* ---- read.c, for shards.c: split.* keys of a parsed file, with their defaults ---- */
struct gguf_split {
    uint32_t no, count, n_tensors; /* 0, 1 and UINT32_MAX when absent */
};
int gguf_split_get(struct gguf_split *s, const struct gguf *g, struct err *e);
/* Parse one file by itself, whichever shard it is. */
int gguf_parse_one(struct gguf **out, const void *p, size_t n, uint64_t file_bytes, struct err *e);

int gguf_verify_keys(const struct gguf *g, struct err *e); /* verify_keys.c */

/* ---- decoders and encoders of the type table ---- */
#define GGUF_CODEC(x)                                                                              \
    void x##_to_f32(float *dst, const void *src, size_t n);                                        \
    void x##_from_f32(void *dst, const float *src, size_t n);
GGUF_CODEC(f32)
void f16_to_f32s(float *dst, const void *src, size_t n);
void f16_from_f32(void *dst, const float *src, size_t n);
void bf16_to_f32s(float *dst, const void *src, size_t n);
void bf16_from_f32(void *dst, const float *src, size_t n);
GGUF_CODEC(q4_0)
GGUF_CODEC(q4_1)
GGUF_CODEC(q5_0)
GGUF_CODEC(q5_1)
GGUF_CODEC(q8_0)
GGUF_CODEC(q2_k)
GGUF_CODEC(q3_k)
GGUF_CODEC(q4_k)
GGUF_CODEC(q5_k)
GGUF_CODEC(q6_k)
GGUF_CODEC(iq4_nl)
GGUF_CODEC(iq4_xs)
#undef GGUF_CODEC

#endif
