/* The reader: header bytes to struct gguf. Refuses whatever the bytes do not bear out: counts,
 * lengths and offsets beyond the file, unknown types, duplicates. The result lives in its own arena
 * and points into the caller's bytes; nothing is copied but tensor names. */
#include "gguf/gguf_internal.h"

#include <stdio.h>
#include <string.h>

enum {
    MIN_KEY_BYTES = 8 + 1 + 4 + 1,            /* length, one letter, type, one byte of value */
    MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8, /* length, a letter, n_dims, one, type, offset */
};

struct reader {
    struct gguf *g;
    struct cursor c;
    uint64_t file_bytes; /* of the file, of which the cursor may have only the start */
    uint64_t n_strings;  /* handed out so far */
};

/* Bytes of the file after the cursor, whether they are at hand or not. */
static uint64_t file_left(const struct reader *r)
{
    return r->file_bytes - r->c.at;
}

/* The cursor has run out, in the middle of `what`. */
static int ends_early(const struct reader *r, const char *what, struct err *e)
{
    if (r->c.n < r->file_bytes)
        return err_set(e, ERR_LIMIT, "the header is longer than the %zu bytes at hand (inside %s)",
                       r->c.n, what);
    return err_set(e, ERR_CORRUPT,
                   "file is truncated: its %llu bytes end inside %s; fetch it again",
                   (unsigned long long)r->file_bytes, what);
}

static int out_of_memory(struct err *e)
{
    return err_set(e, ERR_MEMORY, "out of memory reading a GGUF header");
}

/* ---- the first 24 bytes ---- */

static bool starts_with(const struct cursor *c, const char *s)
{
    size_t n = strlen(s);
    return c->n >= n && memcmp(c->p, s, n) == 0;
}

static int magic_wrong(const struct cursor *c, struct err *e)
{
    static const struct {
        const char *start, *what;
    } known[] = {
        {"version https://git-lfs", "a Git LFS pointer: fetch the real file with 'git lfs pull'"},
        {"<", "an HTML or XML page: the download saved an error page"},
        {"lmgg", "a model in the old GGML format: convert it to GGUF"},
        {"tjgg", "a model in the old GGJT format: convert it to GGUF"},
        {"fmgg", "a model in the old GGMF format: convert it to GGUF"},
        {"PK\3\4", "a zip archive (a PyTorch checkpoint?): convert it to GGUF"},
        {"FUGG", "a GGUF file with swapped bytes"},
    };
    for (size_t i = 0; i < ARRAY_LEN(known); i++)
        if (starts_with(c, known[i].start))
            return err_set(e, ERR_CORRUPT, "no GGUF magic at the start; this is %s", known[i].what);
    return err_set(e, ERR_CORRUPT,
                   "no GGUF magic: starts with bytes %02x %02x %02x %02x; this is no GGUF model",
                   c->p[0], c->p[1], c->p[2], c->p[3]);
}

static int read_preamble(struct reader *r, struct err *e)
{
    struct cursor *c = &r->c;
    if (r->file_bytes == 0)
        return err_set(e, ERR_CORRUPT, "file is empty (0 bytes); fetch it again");
    if (c->n >= 4 && memcmp(c->p, "GGUF", 4) != 0)
        return magic_wrong(c, e);
    cursor_bytes(c, 4);
    uint32_t version = cursor_u32(c);
    if (c->bad)
        return ends_early(r, "the magic and version", e);
    if (version != 2 && version != 3) {
        bool swapped = version && !(version & 0xffffff);
        return err_set(e, ERR_UNSUPPORTED, "GGUF version %u %s", swapped ? version >> 24 : version,
                       swapped        ? "in big-endian byte order; ingot reads little-endian files"
                       : version == 1 ? "is too old; convert the model again (2 and 3 are read)"
                                      : "is not known; 2 and 3 are read");
    }
    r->g->version = version;
    r->g->n_tensors = cursor_u64(c);
    r->g->n_kv = cursor_u64(c);
    return c->bad ? ends_early(r, "the tensor and key counts", e) : 0;
}

static int check_count(const struct reader *r, uint64_t n, const char *what, uint64_t max,
                       struct err *e)
{
    uint64_t each = max == GGUF_MAX_KEYS ? MIN_KEY_BYTES : MIN_TENSOR_BYTES;
    if (n > file_left(r) / each)
        return err_set(e, ERR_CORRUPT,
                       "%s count %llu is more than the remaining %llu bytes can hold (truncated?)",
                       what, (unsigned long long)n, (unsigned long long)file_left(r));
    if (n > max)
        return err_set(e, ERR_LIMIT, "%s count %llu is above the limit of %llu", what,
                       (unsigned long long)n, (unsigned long long)max);
    return 0;
}

/* ---- keys ---- */

static const struct {
    const char *name;
    size_t n_bytes;
} value_types[GGUF_TYPE_END] = {
    [GGUF_U8] = {"u8", 1},       [GGUF_I8] = {"i8", 1},     [GGUF_U16] = {"u16", 2},
    [GGUF_I16] = {"i16", 2},     [GGUF_U32] = {"u32", 4},   [GGUF_I32] = {"i32", 4},
    [GGUF_FLOAT32] = {"f32", 4}, [GGUF_BOOL] = {"bool", 1}, [GGUF_STRING] = {"string", 0},
    [GGUF_ARRAY] = {"array", 0}, [GGUF_U64] = {"u64", 8},   [GGUF_I64] = {"i64", 8},
    [GGUF_FLOAT64] = {"f64", 8},
};

size_t gguf_type_bytes(uint32_t type)
{
    return type < GGUF_TYPE_END ? value_types[type].n_bytes : 0;
}

const char *gguf_type_name(uint32_t type)
{
    return type < GGUF_TYPE_END ? value_types[type].name : "unknown";
}

static int value_ends_early(const struct reader *r, const struct gguf_kv *kv, struct err *e)
{
    char what[100];
    snprintf(what, sizeof what, "the value of key '%.*s'", SHOW(kv->key));
    return ends_early(r, what, e);
}

/* n strings, each a u64 length and its bytes. */
static int read_strings(struct reader *r, struct gguf_kv *kv, struct err *e)
{
    struct cursor *c = &r->c;
    if (kv->n > GGUF_MAX_STRINGS - r->n_strings)
        return err_set(e, ERR_LIMIT, "key '%.*s': %llu strings are above the limit of %d in all",
                       SHOW(kv->key), (unsigned long long)kv->n, GGUF_MAX_STRINGS);
    r->n_strings += kv->n;
    struct gguf_str *s = arena_alloc(&r->g->arena, (size_t)kv->n * sizeof *s);
    if (!s)
        return out_of_memory(e);
    kv->strings = s;
    for (uint64_t i = 0; i < kv->n; i++) {
        if (cursor_left(c) < 8)
            return value_ends_early(r, kv, e);
        uint64_t n = le64(c->p + c->at);
        c->at += 8;
        if (n > file_left(r))
            return err_set(e, ERR_CORRUPT,
                           "key '%.*s': string %llu has a length of %llu bytes, beyond the end of "
                           "the file (truncated?)",
                           SHOW(kv->key), (unsigned long long)i, (unsigned long long)n);
        if (n > cursor_left(c))
            return value_ends_early(r, kv, e);
        s[i] = (struct gguf_str){(const char *)c->p + c->at, (size_t)n};
        c->at += (size_t)n;
    }
    return 0;
}

static int read_array_head(struct reader *r, struct gguf_kv *kv, struct err *e)
{
    uint32_t elem = cursor_u32(&r->c);
    kv->n = cursor_u64(&r->c);
    if (r->c.bad)
        return value_ends_early(r, kv, e);
    if (elem == GGUF_ARRAY)
        return err_set(e, ERR_UNSUPPORTED, "key '%.*s': nested arrays are not supported",
                       SHOW(kv->key));
    if (elem >= GGUF_TYPE_END)
        return err_set(e, ERR_CORRUPT, "key '%.*s': array element type %u does not exist",
                       SHOW(kv->key), elem);
    kv->elem_type = (enum gguf_type)elem;
    uint64_t each = elem == GGUF_STRING ? 8 : gguf_type_bytes(elem);
    if (kv->n > file_left(r) / each)
        return err_set(e, ERR_CORRUPT,
                       "key '%.*s': array of %llu items goes beyond the end of the file "
                       "(truncated?)",
                       SHOW(kv->key), (unsigned long long)kv->n);
    return 0;
}

static int check_bools(const struct gguf_kv *kv, struct err *e)
{
    for (size_t i = 0; i < kv->n_bytes; i++)
        if (kv->data[i] > 1)
            return err_set(e, ERR_CORRUPT, "key '%.*s': bool with value %u (only 0 and 1 exist)",
                           SHOW(kv->key), kv->data[i]);
    return 0;
}

static int read_value(struct reader *r, struct gguf_kv *kv, struct err *e)
{
    struct cursor *c = &r->c;
    uint32_t type = cursor_u32(c);
    if (c->bad)
        return value_ends_early(r, kv, e);
    if (type >= GGUF_TYPE_END)
        return err_set(e, ERR_CORRUPT, "key '%.*s': value type %u does not exist", SHOW(kv->key),
                       type);
    kv->type = kv->elem_type = (enum gguf_type)type;
    kv->n = 1;
    if (type == GGUF_ARRAY && read_array_head(r, kv, e))
        return -1;
    size_t start = c->at;
    kv->data = c->p + start;
    if (kv->elem_type == GGUF_STRING) {
        if (read_strings(r, kv, e))
            return -1;
    } else if (!cursor_bytes(c, kv->n * gguf_type_bytes(kv->elem_type))) {
        return value_ends_early(r, kv, e);
    }
    kv->n_bytes = c->at - start;
    return kv->elem_type == GGUF_BOOL ? check_bools(kv, e) : 0;
}

static int read_key(struct reader *r, uint64_t i, struct err *e)
{
    struct gguf_kv *kv = &r->g->kv[i];
    char what[60];
    snprintf(what, sizeof what, "the name of key %llu", (unsigned long long)i);
    uint64_t n = cursor_u64(&r->c);
    if (r->c.bad)
        return ends_early(r, what, e);
    if (n == 0)
        return err_set(e, ERR_CORRUPT, "key %llu has an empty name", (unsigned long long)i);
    if (n > GGUF_MAX_KEY_BYTES || n > file_left(r))
        return err_set(e, ERR_CORRUPT, "key %llu: name length %llu is beyond %s",
                       (unsigned long long)i, (unsigned long long)n,
                       n > file_left(r) ? "the end of the file (truncated?)" : "65535 bytes");
    kv->key.p = cursor_bytes(&r->c, n);
    kv->key.n = (size_t)n;
    if (!kv->key.p)
        return ends_early(r, what, e);
    if (memchr(kv->key.p, 0, kv->key.n))
        return err_set(e, ERR_CORRUPT, "key %llu ('%.*s') has a NUL character in its name",
                       (unsigned long long)i, SHOW(kv->key));
    return read_value(r, kv, e);
}

static int read_keys(struct reader *r, struct err *e)
{
    struct gguf *g = r->g;
    if (check_count(r, g->n_kv, "metadata key", GGUF_MAX_KEYS, e))
        return -1;
    g->kv = arena_alloc(&g->arena, (size_t)g->n_kv * sizeof *g->kv);
    if (!g->kv)
        return out_of_memory(e);
    for (uint64_t i = 0; i < g->n_kv; i++)
        if (read_key(r, i, e))
            return -1;
    uint64_t dup = 0;
    int rc = gguf_index_keys(&dup, g);
    if (rc > 0)
        return err_set(e, ERR_CORRUPT, "duplicate key '%.*s'", SHOW(g->kv[dup].key));
    return rc ? out_of_memory(e) : 0;
}

/* ---- tensors ---- */

static int read_tensor_name(struct reader *r, struct gguf_tensor *t, uint64_t i, struct err *e)
{
    uint64_t n = cursor_u64(&r->c);
    char what[60];
    snprintf(what, sizeof what, "the name of tensor %llu", (unsigned long long)i);
    if (r->c.bad)
        return ends_early(r, what, e);
    if (n == 0)
        return err_set(e, ERR_CORRUPT, "tensor %llu has an empty name", (unsigned long long)i);
    if (n > GGUF_MAX_NAME_BYTES)
        return err_set(e, ERR_CORRUPT,
                       "tensor %llu: name too long (%llu bytes; the format allows %d)",
                       (unsigned long long)i, (unsigned long long)n, GGUF_MAX_NAME_BYTES);
    const void *p = cursor_bytes(&r->c, n);
    if (!p)
        return ends_early(r, what, e);
    memcpy(t->name, p, (size_t)n);
    if (strlen(t->name) != n)
        return err_set(e, ERR_CORRUPT, "tensor %llu ('%s') has a NUL character in its name",
                       (unsigned long long)i, t->name);
    return 0;
}

static int read_dims(struct reader *r, struct gguf_tensor *t, struct err *e)
{
    t->n_dims = cursor_u32(&r->c);
    if (!r->c.bad && (t->n_dims == 0 || t->n_dims > GGUF_MAX_DIMS))
        return err_set(e, ERR_CORRUPT, "tensor '%s' has %u dimensions; 1 to %d are allowed",
                       t->name, t->n_dims, GGUF_MAX_DIMS);
    for (uint32_t d = 0; d < GGUF_MAX_DIMS; d++) {
        t->ne[d] = d < t->n_dims ? cursor_u64(&r->c) : 1;
        if (!r->c.bad && t->ne[d] == 0)
            return err_set(e, ERR_CORRUPT, "tensor '%s': dimension %u is zero", t->name, d);
    }
    return 0;
}

/* Type and size: the number of values must fit 63 bits whatever a value takes. */
static int check_shape(struct gguf_tensor *t, struct err *e)
{
    const struct gguf_dtype_info *info = gguf_dtype_find(t->type);
    const char *spec = gguf_dtype_spec_name(t->type);
    if (!info && spec)
        return err_set(e, ERR_UNSUPPORTED, "tensor '%s': type %s is not supported", t->name, spec);
    if (!info)
        return err_set(e, ERR_CORRUPT, "tensor '%s': type %u does not exist", t->name, t->type);
    uint64_t n = 1;
    for (int d = 0; d < GGUF_MAX_DIMS; d++)
        if (mul_over(n, t->ne[d], &n) || n > INT64_MAX)
            return err_set(e, ERR_CORRUPT,
                           "tensor '%s': dimensions %llu x %llu x %llu x %llu overflow", t->name,
                           (unsigned long long)t->ne[0], (unsigned long long)t->ne[1],
                           (unsigned long long)t->ne[2], (unsigned long long)t->ne[3]);
    if (t->ne[0] % info->block_len)
        return err_set(e, ERR_CORRUPT,
                       "tensor '%s': rows of %llu values are no whole number of %s blocks of %u",
                       t->name, (unsigned long long)t->ne[0], info->name, info->block_len);
    if (gguf_tensor_bytes(&t->n_bytes, info, t->ne))
        return err_set(e, ERR_CORRUPT, "tensor '%s': its size in bytes overflows", t->name);
    return 0;
}

static int read_tensors(struct reader *r, struct err *e)
{
    struct gguf *g = r->g;
    if (check_count(r, g->n_tensors, "tensor", GGUF_MAX_TENSORS, e))
        return -1;
    g->tensors = mem_array((size_t)g->n_tensors, sizeof *g->tensors);
    if (!g->tensors)
        return out_of_memory(e);
    for (uint64_t i = 0; i < g->n_tensors; i++) {
        struct gguf_tensor *t = &g->tensors[i];
        if (read_tensor_name(r, t, i, e) || read_dims(r, t, e))
            return -1;
        t->type = cursor_u32(&r->c);
        t->offset = cursor_u64(&r->c);
        if (r->c.bad) {
            char what[160];
            snprintf(what, sizeof what, "the record of tensor '%s'", t->name);
            return ends_early(r, what, e);
        }
        if (check_shape(t, e))
            return -1;
    }
    uint64_t dup = 0;
    int rc = gguf_index_tensors(&dup, g, 0);
    if (rc > 0)
        return err_set(e, ERR_CORRUPT, "duplicate tensor '%s'", g->tensors[dup].name);
    return rc ? out_of_memory(e) : 0;
}

/* ---- where the data lies ---- */

static int read_alignment(struct gguf *g, struct err *e)
{
    g->alignment = GGUF_DEFAULT_ALIGNMENT;
    const struct gguf_kv *kv = gguf_find(g, "general.alignment");
    if (!kv)
        return 0;
    if (kv->type != GGUF_U32)
        return err_set(e, ERR_CORRUPT, "key 'general.alignment' is of type %s; the format says u32",
                       gguf_type_name(kv->type));
    g->alignment = (uint64_t)gguf_kv_int(kv, 0);
    if (g->alignment < GGUF_MIN_ALIGNMENT || (g->alignment & (g->alignment - 1)))
        return err_set(e, ERR_CORRUPT,
                       "key 'general.alignment' is %llu; it must be a power of two from %d on",
                       (unsigned long long)g->alignment, GGUF_MIN_ALIGNMENT);
    return 0;
}

static int check_range(const struct gguf *g, const struct gguf_tensor *t, struct err *e)
{
    const struct gguf_shard *s = &g->shards[0];
    if (t->offset % g->alignment)
        return err_set(e, ERR_CORRUPT,
                       "tensor '%s': offset %llu is no multiple of general.alignment (%llu)",
                       t->name, (unsigned long long)t->offset, (unsigned long long)g->alignment);
    uint64_t room = s->file_bytes - s->header_bytes;
    if (t->offset > room || t->n_bytes > room - t->offset)
        return err_set(e, ERR_CORRUPT,
                       "tensor '%s': %llu bytes at data offset %llu go beyond the end of the file "
                       "(truncated?)",
                       t->name, (unsigned long long)t->n_bytes, (unsigned long long)t->offset);
    return 0;
}

static int read_layout(struct reader *r, struct err *e)
{
    struct gguf *g = r->g;
    if (read_alignment(g, e))
        return -1;
    g->n_shards = 1;
    g->shards = arena_alloc(&g->arena, sizeof *g->shards);
    if (!g->shards)
        return out_of_memory(e);
    /* at <= 2^48 and the alignment < 2^32: the sum cannot wrap */
    uint64_t start = (r->c.at + g->alignment - 1) & ~(g->alignment - 1);
    if (start > r->file_bytes) {
        if (g->n_tensors)
            return err_set(e, ERR_CORRUPT,
                           "weights would begin at byte %llu (general.alignment %llu), beyond the "
                           "end of the file (truncated?)",
                           (unsigned long long)start, (unsigned long long)g->alignment);
        start = r->file_bytes; /* a file of keys only needs no padding */
    }
    g->shards[0].header_bytes = start;
    g->shards[0].file_bytes = r->file_bytes;
    g->shards[0].alignment = g->alignment;
    for (uint64_t i = 0; i < g->n_tensors; i++)
        if (check_range(g, &g->tensors[i], e))
            return -1;
    return 0;
}

int gguf_parse_one(struct gguf **out, const void *p, size_t n, uint64_t file_bytes, struct err *e)
{
    *out = NULL;
    struct gguf *g = mem_zalloc(sizeof *g);
    if (!g || !(g->index = gguf_index_new())) {
        gguf_free(g);
        return out_of_memory(e);
    }
    struct reader r = {.g = g, .file_bytes = file_bytes};
    r.c = (struct cursor){.p = p, .n = (size_t)MIN((uint64_t)n, file_bytes)};
    if (read_preamble(&r, e) || read_keys(&r, e) || read_tensors(&r, e) || read_layout(&r, e)) {
        gguf_free(g);
        return -1;
    }
    *out = g;
    return 0;
}

void gguf_free(struct gguf *g)
{
    if (!g)
        return;
    for (uint32_t i = 0; i < g->n_shards; i++)
        file_unmap(&g->shards[i].map);
    gguf_index_free(g->index);
    mem_free(g->tensors);
    arena_fini(&g->arena);
    mem_free(g);
}

uint64_t gguf_bytes(const struct gguf *g)
{
    return sizeof *g + g->arena.used_bytes + g->n_tensors * sizeof *g->tensors +
           gguf_index_bytes(g->index);
}

void gguf_forget(const struct gguf *g)
{
    for (uint32_t i = 0; i < g->n_shards; i++)
        file_forget(&g->shards[i].map);
}

const void *gguf_tensor_data(const struct gguf *g, const struct gguf_tensor *t)
{
    const struct gguf_shard *s = &g->shards[t->shard];
    return s->map.data ? s->map.data + s->header_bytes + t->offset : NULL;
}
