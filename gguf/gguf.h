/* gguf: the model file format. Reader (parse bytes, or open a file by mmap), writer, the table of
 * block types with their scalar reference decoding, and the structural check behind `ingot verify`.
 * Every count and offset is bounded by the bytes that are there before it is believed.
 *
 * Source of the format: the GGUF specification of the ggml project, versions 2 and 3, little endian
 * (a big-endian file is refused by name). Layout: magic "GGUF", u32 version, u64 tensor count, u64
 * key count, keys, tensor table, padding to `general.alignment` (default 32), tensor data. */
#ifndef INGOT_GGUF_H
#define INGOT_GGUF_H

#include "base/base.h"

/* ---- block types ---- */

/* Numbers as in the file. A type that is not in the table below is refused by number. */
enum gguf_dtype {
    GGUF_F32 = 0,
    GGUF_F16 = 1,
    GGUF_Q4_0 = 2,
    GGUF_Q4_1 = 3,
    GGUF_Q5_0 = 6,
    GGUF_Q5_1 = 7,
    GGUF_Q8_0 = 8,
    GGUF_Q2_K = 10,
    GGUF_Q3_K = 11,
    GGUF_Q4_K = 12,
    GGUF_Q5_K = 13,
    GGUF_Q6_K = 14,
    GGUF_IQ4_NL = 20,
    GGUF_IQ4_XS = 23,
    GGUF_BF16 = 30,
    GGUF_DTYPE_END = 64,
};

struct gguf_dtype_info {
    const char *name;   /* "Q4_K" */
    uint32_t block_len; /* values in one block: 1, 32 or 256 */
    uint32_t block_bytes;
    /* Scalar reference: n values (a multiple of block_len) from blocks at src into dst. */
    void (*to_f32)(float *dst, const void *src, size_t n);
    /* Plain round-to-nearest encoder, used by the writer of test and bench models; may be NULL. */
    void (*from_f32)(void *dst, const float *src, size_t n);
};
/* NULL when ingot does not know the type (the number may still be a legal one). */
const struct gguf_dtype_info *gguf_dtype_find(uint32_t type);
int gguf_dtype_by_name(const char *name); /* the number, or -1 */
/* A name for any type number of the specification, known here or not; NULL if it names none. */
const char *gguf_dtype_spec_name(uint32_t type);

float f16_to_f32(uint16_t h); /* IEEE binary16, all values */
uint16_t f32_to_f16(float f); /* round to nearest even */
float bf16_to_f32(uint16_t h);
uint16_t f32_to_bf16(float f); /* round to nearest even */
extern const int8_t gguf_iq4nl_values[16]; /* code book of IQ4_NL and IQ4_XS */

/* ---- a parsed header ---- */

enum gguf_type { /* value types, numbers as in the file */
    GGUF_U8, GGUF_I8, GGUF_U16, GGUF_I16, GGUF_U32, GGUF_I32, GGUF_FLOAT32, GGUF_BOOL,
    GGUF_STRING, GGUF_ARRAY, GGUF_U64, GGUF_I64, GGUF_FLOAT64, GGUF_TYPE_END,
};

struct gguf_str {
    const char *p; /* not NUL-terminated; points into the parsed bytes */
    size_t n;
};

struct gguf_kv {
    struct gguf_str key;
    enum gguf_type type;      /* GGUF_ARRAY: items of elem_type */
    enum gguf_type elem_type; /* arrays only; never GGUF_ARRAY (nested arrays are refused) */
    uint64_t n;               /* items: 1 for scalars */
    const uint8_t *data;      /* the value's first byte, inside the parsed bytes, unaligned */
    size_t n_bytes;           /* the value's size there */
    const struct gguf_str *strings; /* n entries for STRING and arrays of it; owned by the gguf */
};

struct gguf_tensor {
    char name[128];  /* NUL-terminated; longer names are refused */
    uint32_t type;   /* enum gguf_dtype, known here */
    uint32_t n_dims; /* 1..4 */
    uint64_t ne[4];  /* ne[0] is the row length (inputs), ne[1] the rows (outputs); unused are 1 */
    uint64_t offset; /* from the data section of its shard */
    uint64_t n_bytes;
    uint32_t shard;  /* which file holds it: 0 .. n_shards-1 */
};

struct gguf {
    uint32_t version;
    uint64_t alignment;
    uint64_t n_kv, n_tensors;
    struct gguf_kv *kv; /* in file order; duplicates are refused */
    struct gguf_tensor *tensors;
    uint32_t n_shards;
    struct gguf_shard {
        uint64_t header_bytes; /* everything before the data section, padding included */
        uint64_t file_bytes;
        uint64_t alignment; /* of this file's tensors; shards may differ */
        struct mapped map;  /* set by gguf_open only */
    } *shards;
    struct arena arena;
    void *index; /* private: name look-up */
};

/* Parse one file's header: `n` bytes of it at p (the header must be whole; tensor data may be
 * missing from p), the file being file_bytes long. The result points into p, which must outlive it.
 * ERR_LIMIT with n < file_bytes: the header goes on after the n bytes (or is over a limit).
 * A set of shards is parsed from its first file here with n_shards as `split.count` says and only
 * the first file's tensors; gguf_add_shard adds the others in order. */
int gguf_parse(struct gguf **out, const void *p, size_t n, uint64_t file_bytes, struct err *e);
int gguf_add_shard(struct gguf *g, uint32_t shard, const void *p, size_t n, uint64_t file_bytes,
                   struct err *e);
/* Map a file (and, if it is a first shard `...-00001-of-0000N.gguf`, its siblings) and parse it. */
int gguf_open(struct gguf **out, const char *path, struct err *e);
void gguf_free(struct gguf *g); /* unmaps what gguf_open mapped; NULL is fine */
uint64_t gguf_bytes(const struct gguf *g); /* of memory: lists and look-up, without what is mapped */
/* Let go of the pages of what gguf_open mapped; they are read again when they are looked at. */
void gguf_forget(const struct gguf *g);

/* Checks beyond what parsing refuses anyway: overlapping or gapped tensors, unused bytes at the end,
 * tokenizer arrays of unequal length, special ids outside the vocabulary, NaN or infinite scales in
 * the weights when deep is set. The first finding is the error. */
int gguf_verify(const struct gguf *g, bool deep, struct err *e);

/* Both NULL when absent. */
const struct gguf_kv *gguf_find(const struct gguf *g, const char *key);
const struct gguf_tensor *gguf_find_tensor(const struct gguf *g, const char *name);
/* The tensor's bytes in the mapping; NULL when the file was not opened by gguf_open. */
const void *gguf_tensor_data(const struct gguf *g, const struct gguf_tensor *t);

/* Checked getters: integers of any width are accepted where they fit. A missing key returns 0 and
 * leaves *v as it was (so set the default before); a present one of the wrong kind or range is an
 * error that names it; *v is then untouched. */
int gguf_get_u32(const struct gguf *g, const char *key, uint32_t *v, struct err *e);
int gguf_get_f32(const struct gguf *g, const char *key, float *v, struct err *e);
int gguf_get_bool(const struct gguf *g, const char *key, bool *v, struct err *e);
int gguf_get_str(const struct gguf *g, const char *key, struct gguf_str *v, struct err *e);
/* One item of a numeric array (or, with i = 0, of a scalar); i < kv->n is the caller's duty. */
double gguf_kv_number(const struct gguf_kv *kv, uint64_t i);
int64_t gguf_kv_int(const struct gguf_kv *kv, uint64_t i); /* integers and bools only */

/* ---- writer: builds a whole file in memory order, streams the tensor data ---- */

struct gguf_writer; /* errors are sticky; the first comes back from gguf_writer_finish */
struct gguf_writer *gguf_writer_new(uint32_t version, uint32_t alignment);
void gguf_writer_u32(struct gguf_writer *w, const char *key, uint32_t v);
void gguf_writer_f32(struct gguf_writer *w, const char *key, float v);
void gguf_writer_bool(struct gguf_writer *w, const char *key, bool v);
void gguf_writer_str(struct gguf_writer *w, const char *key, const char *p, size_t n);
void gguf_writer_array(struct gguf_writer *w, const char *key, enum gguf_type elem, uint64_t n,
                       const void *items); /* numbers only, packed little endian */
void gguf_writer_strings(struct gguf_writer *w, const char *key, uint64_t n,
                         const struct gguf_str *items);
void gguf_writer_kv(struct gguf_writer *w, const struct gguf_kv *kv); /* copy a parsed one */
/* Declare a tensor; `fill` yields its n_bytes in order when the file is written. */
typedef int (*gguf_fill)(void *user, void *dst, uint64_t offset, size_t n, struct err *e);
void gguf_writer_tensor(struct gguf_writer *w, const char *name, uint32_t type, uint32_t n_dims,
                        const uint64_t *ne, gguf_fill fill, void *user);
int gguf_writer_finish(struct gguf_writer *w, const char *path, struct err *e);
void gguf_writer_free(struct gguf_writer *w);

#endif
