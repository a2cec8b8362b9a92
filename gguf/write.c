/* The writer: keys and tensor records are collected in memory, tensor data is pulled from `fill` in
 * pieces and streamed into a temporary file that takes the final name when it is whole. The header
 * is read back by our own reader before any byte is written, so what it refuses is never made. The
 * first error sticks and comes back from gguf_writer_finish. Owns its buffers and copies. */
#include "gguf/gguf_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { FILL_BYTES = 1 << 20 };

struct writer_tensor {
    struct gguf_tensor t;
    size_t name_bytes;
    gguf_fill fill;
    void *user;
};

struct gguf_writer {
    uint32_t version, alignment;
    uint64_t n_kv;
    struct buf kv; /* key records as in the file */
    struct writer_tensor *tensors;
    size_t n_tensors, cap;
    uint64_t data_bytes; /* of all tensors so far, padding included */
    struct err err;
};

static void put_u32(struct buf *b, uint32_t v)
{
    uint8_t p[4];
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(v >> 8 * i);
    buf_put(b, p, 4);
}

static void put_u64(struct buf *b, uint64_t v)
{
    put_u32(b, (uint32_t)v);
    put_u32(b, (uint32_t)(v >> 32));
}

static void put_string(struct buf *b, const char *p, size_t n)
{
    put_u64(b, n);
    buf_put(b, p, n);
}

static void put_padding(struct buf *b, uint64_t alignment)
{
    while (!b->failed && b->n % alignment)
        buf_putc(b, 0);
}

static bool failed(const struct gguf_writer *w)
{
    return !w || w->err.code;
}

static void put_key(struct gguf_writer *w, const char *key, size_t n, enum gguf_type type)
{
    put_string(&w->kv, key, n);
    put_u32(&w->kv, type);
    w->n_kv++;
}

struct gguf_writer *gguf_writer_new(uint32_t version, uint32_t alignment)
{
    struct gguf_writer *w = mem_zalloc(sizeof *w);
    if (!w)
        return NULL;
    w->version = version;
    w->alignment = alignment;
    if (alignment < GGUF_MIN_ALIGNMENT || (alignment & (alignment - 1)))
        err_set(&w->err, ERR_USAGE, "alignment %u is no power of two from %d on", alignment,
                GGUF_MIN_ALIGNMENT);
    else if (alignment != GGUF_DEFAULT_ALIGNMENT)
        gguf_writer_u32(w, "general.alignment", alignment);
    return w;
}

void gguf_writer_free(struct gguf_writer *w)
{
    if (!w)
        return;
    buf_fini(&w->kv);
    mem_free(w->tensors);
    mem_free(w);
}

void gguf_writer_u32(struct gguf_writer *w, const char *key, uint32_t v)
{
    if (failed(w))
        return;
    put_key(w, key, strlen(key), GGUF_U32);
    put_u32(&w->kv, v);
}

void gguf_writer_f32(struct gguf_writer *w, const char *key, float v)
{
    if (failed(w))
        return;
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    put_key(w, key, strlen(key), GGUF_FLOAT32);
    put_u32(&w->kv, bits);
}

void gguf_writer_bool(struct gguf_writer *w, const char *key, bool v)
{
    if (failed(w))
        return;
    put_key(w, key, strlen(key), GGUF_BOOL);
    buf_putc(&w->kv, (char)v);
}

void gguf_writer_str(struct gguf_writer *w, const char *key, const char *p, size_t n)
{
    if (failed(w))
        return;
    put_key(w, key, strlen(key), GGUF_STRING);
    put_string(&w->kv, p, n);
}

static void put_array_head(struct gguf_writer *w, const char *key, size_t key_bytes,
                           enum gguf_type elem, uint64_t n)
{
    put_key(w, key, key_bytes, GGUF_ARRAY);
    put_u32(&w->kv, elem);
    put_u64(&w->kv, n);
}

void gguf_writer_array(struct gguf_writer *w, const char *key, enum gguf_type elem, uint64_t n,
                       const void *items)
{
    size_t bytes;
    if (failed(w))
        return;
    CHECK(gguf_type_bytes(elem));
    if (mul_over(n, gguf_type_bytes(elem), &bytes)) {
        w->kv.failed = true;
        return;
    }
    put_array_head(w, key, strlen(key), elem, n);
    buf_put(&w->kv, items, bytes);
}

void gguf_writer_strings(struct gguf_writer *w, const char *key, uint64_t n,
                         const struct gguf_str *items)
{
    if (failed(w))
        return;
    put_array_head(w, key, strlen(key), GGUF_STRING, n);
    for (uint64_t i = 0; i < n; i++)
        put_string(&w->kv, items[i].p, items[i].n);
}

void gguf_writer_kv(struct gguf_writer *w, const struct gguf_kv *kv)
{
    static const char alignment[] = "general.alignment";
    if (failed(w))
        return;
    /* the alignment is that of the new file, not of the one this key came from */
    if (kv->key.n == sizeof alignment - 1 && memcmp(kv->key.p, alignment, kv->key.n) == 0)
        return;
    if (kv->type == GGUF_ARRAY)
        put_array_head(w, kv->key.p, kv->key.n, kv->elem_type, kv->n);
    else
        put_key(w, kv->key.p, kv->key.n, kv->type);
    buf_put(&w->kv, kv->data, kv->n_bytes);
}

static struct writer_tensor *tensor_room(struct gguf_writer *w)
{
    if (w->n_tensors == w->cap) {
        size_t cap = w->cap ? 2 * w->cap : 64;
        struct writer_tensor *t = mem_realloc(w->tensors, cap * sizeof *t);
        if (!t) {
            err_set(&w->err, ERR_MEMORY, "out of memory for %zu tensors", cap);
            return NULL;
        }
        w->tensors = t;
        w->cap = cap;
    }
    struct writer_tensor *t = &w->tensors[w->n_tensors++];
    memset(t, 0, sizeof *t);
    return t;
}

void gguf_writer_tensor(struct gguf_writer *w, const char *name, uint32_t type, uint32_t n_dims,
                        const uint64_t *ne, gguf_fill fill, void *user)
{
    const struct gguf_dtype_info *info = gguf_dtype_find(type);
    size_t n = strlen(name);
    if (failed(w))
        return;
    if (!info || n > GGUF_MAX_NAME_BYTES || n_dims < 1 || n_dims > GGUF_MAX_DIMS) {
        err_set(&w->err, ERR_USAGE,
                "tensor '%.64s': its type (%u), number of dimensions (%u) or name length (%zu) is "
                "not one that the format has",
                name, type, n_dims, n);
        return;
    }
    struct writer_tensor *t = tensor_room(w);
    if (!t)
        return;
    memcpy(t->t.name, name, n);
    t->name_bytes = n;
    t->t.type = type;
    t->t.n_dims = n_dims;
    for (uint32_t d = 0; d < GGUF_MAX_DIMS; d++)
        t->t.ne[d] = d < n_dims ? ne[d] : 1;
    t->fill = fill;
    t->user = user;
    t->t.offset = w->data_bytes;
    uint64_t end;
    if (gguf_tensor_bytes(&t->t.n_bytes, info, t->t.ne) ||
        add_over(w->data_bytes, t->t.n_bytes, &end) || end > (uint64_t)INT64_MAX - w->alignment) {
        err_set(&w->err, ERR_USAGE, "tensor '%s': its size overflows", name);
        return;
    }
    w->data_bytes = (end + w->alignment - 1) / w->alignment * w->alignment;
}

/* ---- the file ---- */

static int build_header(struct buf *b, const struct gguf_writer *w, struct err *e)
{
    buf_put(b, "GGUF", 4);
    put_u32(b, w->version);
    put_u64(b, w->n_tensors);
    put_u64(b, w->n_kv);
    buf_put(b, w->kv.data, w->kv.n);
    for (size_t i = 0; i < w->n_tensors; i++) {
        const struct gguf_tensor *t = &w->tensors[i].t;
        put_string(b, t->name, w->tensors[i].name_bytes);
        put_u32(b, t->n_dims);
        for (uint32_t d = 0; d < t->n_dims; d++)
            put_u64(b, t->ne[d]);
        put_u32(b, t->type);
        put_u64(b, t->offset);
    }
    put_padding(b, w->alignment);
    if (b->failed || w->kv.failed)
        return err_set(e, ERR_MEMORY, "out of memory for a GGUF header");
    struct gguf *g;
    if (gguf_parse_one(&g, b->data, b->n, b->n + w->data_bytes, e))
        return -1;
    gguf_free(g);
    return 0;
}

static int write_tensor(const struct writer_tensor *t, int fd, uint64_t start, uint64_t padded,
                        const char *name, struct err *e)
{
    char *piece = mem_alloc(FILL_BYTES);
    if (!piece)
        return err_set(e, ERR_MEMORY, "out of memory writing '%s'", name);
    int rc = 0;
    for (uint64_t at = 0, n; !rc && at < t->t.n_bytes; at += n) {
        n = MIN(t->t.n_bytes - at, (uint64_t)FILL_BYTES);
        rc = t->fill(t->user, piece, at, (size_t)n, e);
        if (!rc)
            rc = file_pwrite(fd, piece, (size_t)n, start + at, name, e);
    }
    for (uint64_t at = t->t.n_bytes, n; !rc && at < padded; at += n) {
        n = MIN(padded - at, (uint64_t)FILL_BYTES);
        memset(piece, 0, (size_t)n);
        rc = file_pwrite(fd, piece, (size_t)n, start + at, name, e);
    }
    mem_free(piece);
    return rc;
}

static int write_file(const struct gguf_writer *w, int fd, const struct buf *header,
                      const char *name, struct err *e)
{
    if (file_pwrite(fd, header->data, header->n, 0, name, e))
        return -1;
    for (size_t i = 0; i < w->n_tensors; i++) {
        const struct writer_tensor *t = &w->tensors[i];
        uint64_t next = i + 1 < w->n_tensors ? t[1].t.offset : w->data_bytes;
        if (write_tensor(t, fd, header->n + t->t.offset, next - t->t.offset, name, e))
            return err_prefix(e, "tensor '%s'", t->t.name);
    }
    return fsync(fd) ? err_errno(e, "cannot write '%s'", name) : 0;
}

int gguf_writer_finish(struct gguf_writer *w, const char *path, struct err *e)
{
    struct buf header = {0};
    char tmp[4200];
    int fd = -1, rc = -1;
    if (!w)
        return err_set(e, ERR_MEMORY, "out of memory for a GGUF writer");
    if (w->err.code) {
        if (e && !e->code)
            *e = w->err;
        return -1;
    }
    if (snprintf(tmp, sizeof tmp, "%s.tmp%ld", path, (long)getpid()) >= (int)sizeof tmp)
        return err_set(e, ERR_LIMIT, "path too long: '%.200s...'", path);
    if (file_check_target(path, e))
        return -1;
    if (build_header(&header, w, e)) {
        err_prefix(e, "cannot write '%.200s'", path);
        goto out;
    }
    fd = open(tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) {
        err_errno(e, "cannot create '%.200s'", tmp);
        goto out;
    }
    rc = write_file(w, fd, &header, tmp, e);
    if (close(fd) && !rc)
        rc = err_errno(e, "cannot write '%.200s'", tmp);
    if (!rc && rename(tmp, path))
        rc = err_errno(e, "cannot rename '%.200s' to '%.200s'", tmp, path);
    if (rc)
        unlink(tmp);
out:
    buf_fini(&header);
    return rc;
}
