/* Reading a model, the same for a plain file (mapped) and for one in the store (chunks, each
 * checked before its bytes are used). For the store there is a small pool of readers, a database
 * connection and one checked chunk each, so that several threads load at once. Owns all of them. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "store/store_internal.h"

enum {
    N_READERS = 16,     /* more threads than that wait for each other */
    SAMPLE_BYTES = 4096 /* of each tensor's start, middle and end, for the identity */
};

struct reader {
    sqlite3 *db;
    sqlite3_blob *blob;
    uint8_t *chunk; /* STORE_CHUNK_BYTES; the checked bytes of chunk `held` */
    int64_t held;   /* 0: none */
    bool busy;
};

struct model_file {
    char *name;      /* as the user knows it */
    char *db_path;   /* NULL for a plain file */
    char digest[65]; /* "" until asked for, when not known */
    struct gguf *g;
    struct layout l;      /* of a stored model; g points into its headers */
    struct hash128 *sums; /* [l.n_chunks] */
    int fd;               /* the database's file, to see when it shrinks; -1: none */
    int64_t file_bytes;   /* its size when it was opened */
    pthread_mutex_t lock; /* of what follows, and of digest */
    pthread_cond_t freed;
    struct reader readers[N_READERS];
};

/* ---- opening ---- */

static int open_stored(struct model_file *f, const struct store *s, const struct store_model *m,
                       struct err *e)
{
    char path[STORE_PATH_BYTES];
    sqlite3 *db = NULL;
    if (model_path(path, s, m->digest, e))
        return -1;
    struct stat st;
    f->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (f->fd < 0 && errno == ENOENT)
        return err_set(e, ERR_NOT_FOUND,
                       "its file '%s' is gone; remove the model and import it again", path);
    if (f->fd < 0 || fstat(f->fd, &st))
        return err_errno(e, "cannot open '%s'", path);
    f->file_bytes = st.st_size;
    if (!(f->db_path = mem_strdup(path)))
        return err_set(e, ERR_MEMORY, "out of memory");
    int rc = db_open(&db, path, DB_IMMUTABLE, e);
    if (!rc)
        rc = model_db_layout(&f->l, db, e);
    if (!rc && strcmp(f->l.digest, m->digest))
        rc = err_set(e, ERR_CORRUPT, "'%s' holds another model; remove it and import again", path);
    if (!rc)
        rc = model_db_sums(&f->sums, db, f->l.n_chunks, e);
    if (!rc)
        rc = layout_parse(&f->g, &f->l, e);
    f->readers[0].db = db; /* the first reader goes on with this connection */
    memcpy(f->digest, m->digest, sizeof f->digest);
    return rc;
}

static int link_changed(const struct store_model *m, struct err *e)
{
    return err_set(e, ERR_CORRUPT,
                   "the linked file '%s' was changed after the import; import it again",
                   m->link_path);
}

/* Only the files' times are other ones (a copy, a touch): the digest says if their bytes are. */
static int check_touched(struct store *s, const struct store_model *m, struct err *e)
{
    struct source src = {0};
    struct link_shard *now = mem_array(m->n_shards, sizeof *now);
    char digest[65];
    int rc = now ? source_open(&src, m->link_path, m->n_shards, e)
                 : err_set(e, ERR_MEMORY, "out of memory opening '%s'", m->link_path);
    log_line(LOG_INFO, "'%s' has another time than when it was linked; checking its digest",
             m->link_path);
    if (!rc)
        rc = source_digest(digest, &src, e);
    if (!rc && strcmp(digest, m->digest))
        rc = link_changed(m, e);
    for (uint32_t i = 0; !rc && i < m->n_shards; i++)
        now[i] = src.files[i].at_open;
    struct err why = {0};
    if (!rc && catalogue_relink(s, m, now, &why)) /* then it is checked again the next time */
        log_line(LOG_INFO, "%s", why.msg);
    source_fini(&src);
    mem_free(now);
    return rc;
}

static int open_linked(struct model_file *f, struct store *s, const struct store_model *m,
                       struct err *e)
{
    struct link_shard *then = NULL, now;
    uint32_t n = 0;
    bool touched = false;
    int rc = catalogue_links(&then, &n, s, m, e);
    if (!rc && n != m->n_shards)
        rc = err_set(e, ERR_CORRUPT, "its catalogue entry is damaged; link the file again");
    for (uint32_t i = 0; !rc && i < n; i++) {
        if (source_stat(&now, m->link_path, i, n, e))
            rc = err_prefix(e, "the linked file is gone; put it back or remove the model");
        else if (now.n_bytes != then[i].n_bytes)
            rc = link_changed(m, e);
        else
            touched = touched || now.mtime_ns != then[i].mtime_ns;
    }
    mem_free(then);
    if (!rc && touched)
        rc = check_touched(s, m, e);
    if (!rc)
        rc = gguf_open(&f->g, m->link_path, e);
    memcpy(f->digest, m->digest, sizeof f->digest);
    return rc;
}

static bool looks_like_path(const char *ref)
{
    size_t n = strlen(ref);
    return strchr(ref, '/') || (n > 5 && !strcasecmp(ref + n - 5, ".gguf"));
}

static int open_ref(struct model_file *f, struct store *s, const char *ref, struct err *e)
{
    struct store_model m;
    bool path = looks_like_path(ref);
    /* Names may have a '/' too: hf.co/owner/repo. What is there as a file wins. */
    if (path && s && access(ref, F_OK) && !store_find(s, &m, ref, NULL))
        path = false;
    else if (!path && !s)
        return err_set(e, ERR_NOT_FOUND, "'%s' is not a path to a .gguf file", ref);
    else if (!path && store_find(s, &m, ref, e))
        return -1;
    if (!(f->name = mem_strdup(path ? ref : m.name)))
        return err_set(e, ERR_MEMORY, "out of memory opening '%s'", ref);
    if (path)
        return gguf_open(&f->g, ref, e);
    if (*m.link_path ? open_linked(f, s, &m, e) : open_stored(f, s, &m, e))
        return err_prefix(e, "model '%s'", m.name);
    return 0;
}

int model_file_open(struct model_file **out, struct store *s, const char *ref, struct err *e)
{
    struct model_file *f = mem_zalloc(sizeof *f);
    *out = NULL;
    if (!f)
        return err_set(e, ERR_MEMORY, "out of memory opening '%s'", ref);
    f->fd = -1;
    pthread_mutex_init(&f->lock, NULL);
    pthread_cond_init(&f->freed, NULL);
    if (open_ref(f, s, ref, e)) {
        model_file_close(f);
        return -1;
    }
    *out = f;
    return 0;
}

static void drop_readers(struct model_file *f)
{
    for (int i = 0; i < N_READERS; i++) {
        CHECK(!f->readers[i].busy);
        sqlite3_blob_close(f->readers[i].blob);
        db_close(f->readers[i].db);
        mem_free(f->readers[i].chunk);
        f->readers[i] = (struct reader){0};
    }
}

void model_file_close(struct model_file *f)
{
    if (!f)
        return;
    drop_readers(f);
    if (f->fd >= 0)
        close(f->fd);
    gguf_free(f->g);
    layout_fini(&f->l);
    mem_free(f->sums);
    mem_free(f->name);
    mem_free(f->db_path);
    pthread_cond_destroy(&f->freed);
    pthread_mutex_destroy(&f->lock);
    mem_free(f);
}

const struct gguf *model_file_gguf(const struct model_file *f)
{
    return f->g;
}

const char *model_file_name(const struct model_file *f)
{
    return f->name;
}

/* ---- memory ---- */

uint64_t model_file_bytes(const struct model_file *f)
{
    uint64_t n = sizeof *f + gguf_bytes(f->g) + (uint64_t)f->l.n_chunks * sizeof *f->sums;
    for (uint32_t i = 0; i < f->l.n_shards; i++)
        n += sizeof f->l.shards[i] + f->l.shards[i].header_bytes;
    return n;
}

void model_file_forget(struct model_file *f)
{
    drop_readers(f);
    gguf_forget(f->g);
}

/* ---- identity ---- */

/* XXH3 chained over sizes, headers, times of change, and three pieces of every tensor. */
static void sample_digest(char digest[65], const struct gguf *g)
{
    struct hash128 h = {0};
    uint8_t raw[16];
    for (uint32_t i = 0; i < g->n_shards; i++) {
        const struct gguf_shard *s = &g->shards[i];
        h = hash_xxh3(s->map.data, s->header_bytes,
                      h.lo ^ h.hi ^ s->file_bytes ^ (uint64_t)s->map.mtime_ns);
    }
    for (uint64_t i = 0; i < g->n_tensors; i++) {
        const struct gguf_tensor *t = &g->tensors[i];
        const uint8_t *p = gguf_tensor_data(g, t);
        size_t n = (size_t)MIN(t->n_bytes, (uint64_t)SAMPLE_BYTES);
        uint64_t at[3] = {0, (t->n_bytes - n) / 2, t->n_bytes - n};
        for (int k = 0; p && k < 3; k++)
            h = hash_xxh3(p + at[k], n, h.lo ^ h.hi);
    }
    memcpy(raw, &h, sizeof raw);
    memcpy(digest, "x-", 3);
    hex_encode(digest + 2, raw, sizeof raw);
}

const char *model_file_digest(struct model_file *f)
{
    pthread_mutex_lock(&f->lock);
    if (!*f->digest)
        sample_digest(f->digest, f->g);
    pthread_mutex_unlock(&f->lock);
    return f->digest;
}

/* ---- reading ---- */

const void *model_file_map(const struct model_file *f, const struct gguf_tensor *t)
{
    return f->db_path ? NULL : gguf_tensor_data(f->g, t);
}

static int reader_start(struct reader *r, const struct model_file *f, struct err *e)
{
    if (!r->db && db_open(&r->db, f->db_path, DB_IMMUTABLE, e))
        return -1;
    if (!r->chunk) {
        if (!(r->chunk = mem_alloc(STORE_CHUNK_BYTES)))
            return err_set(e, ERR_MEMORY, "out of memory for a chunk of '%s'", f->name);
        /* Mapped, so that a page is copied once and not twice. Where the map does not reach, a few
         * pages of cache: each is used once, and so few stay in the processor's cache. */
        return db_exec(r->db, "PRAGMA cache_size = 8; PRAGMA mmap_size = 2000000000", e);
    }
    return 0;
}

/* A free reader, best one that holds `chunk`; waits while all are busy. */
static struct reader *reader_take(struct model_file *f, int64_t chunk)
{
    struct reader *best = NULL;
    pthread_mutex_lock(&f->lock);
    while (!best) {
        for (int i = 0; i < N_READERS && !(best && best->held == chunk); i++) {
            struct reader *r = &f->readers[i];
            if (!r->busy && (!best || r->held == chunk || (r->db && !best->db)))
                best = r;
        }
        if (!best)
            pthread_cond_wait(&f->freed, &f->lock);
    }
    best->busy = true;
    pthread_mutex_unlock(&f->lock);
    return best;
}

static void reader_give(struct model_file *f, struct reader *r)
{
    pthread_mutex_lock(&f->lock);
    r->busy = false;
    pthread_cond_signal(&f->freed);
    pthread_mutex_unlock(&f->lock);
}

/* A whole chunk into dst, checked. */
static int read_chunk(void *dst, const struct model_file *f, struct reader *r, int64_t chunk,
                      size_t n, struct err *e)
{
    struct stat st; /* looked at each time: beyond a mapped file's new end is a signal, no error */
    if (fstat(f->fd, &st) || st.st_size < f->file_bytes)
        return err_set(e, ERR_CORRUPT,
                       "its file has become shorter; remove the model and import it again");
    if (chunk_read(dst, &r->blob, r->db, chunk, n, e))
        return -1;
    struct hash128 h = hash_xxh3(dst, n, 0), want = f->sums[chunk - 1];
    return h.lo == want.lo && h.hi == want.hi
               ? 0
               : err_set(e, ERR_CORRUPT,
                         "the weights fail their checksum; remove the model and import it again");
}

/* n bytes from `from` on of one chunk of `whole` bytes. A whole one goes straight to where it is
 * wanted; of others the rest is kept, for the next read probably continues there. */
struct span {
    int64_t chunk;
    size_t from, n, whole;
};

static int read_span(uint8_t *dst, const struct model_file *f, struct reader *r, struct span p,
                     struct err *e)
{
    if (p.n == p.whole && r->held != p.chunk)
        return read_chunk(dst, f, r, p.chunk, p.whole, e);
    if (r->held != p.chunk) {
        r->held = 0;
        if (read_chunk(r->chunk, f, r, p.chunk, p.whole, e))
            return -1;
        r->held = p.chunk;
    }
    memcpy(dst, r->chunk + p.from, p.n);
    return 0;
}

static int read_stored(struct model_file *f, const struct gguf_tensor *t, uint8_t *dst,
                       uint64_t offset, size_t n, struct err *e)
{
    const struct layout_shard *s = &f->l.shards[t->shard];
    uint64_t at = t->offset + offset, data = s->file_bytes - s->header_bytes;
    struct reader *r = reader_take(f, s->first_chunk + (int64_t)(at / STORE_CHUNK_BYTES));
    int rc = reader_start(r, f, e);
    while (!rc && n) {
        uint64_t start = at - at % STORE_CHUNK_BYTES;
        struct span p = {.chunk = s->first_chunk + (int64_t)(at / STORE_CHUNK_BYTES),
                         .from = (size_t)(at - start),
                         .whole = (size_t)MIN(data - start, (uint64_t)STORE_CHUNK_BYTES)};
        p.n = MIN(n, p.whole - p.from);
        rc = read_span(dst, f, r, p, e);
        if (rc)
            err_prefix(e, "model '%s', tensor '%s', chunk %lld", f->name, t->name,
                       (long long)p.chunk);
        dst += p.n;
        at += p.n;
        n -= p.n;
    }
    reader_give(f, r);
    return rc;
}

int model_file_read(struct model_file *f, const struct gguf_tensor *t, void *dst, uint64_t offset,
                    size_t n, struct err *e)
{
    uint64_t end, shard_end;
    if (offset > t->n_bytes || n > t->n_bytes - offset || t->shard >= f->g->n_shards)
        return err_set(e, ERR_USAGE, "model '%s': read past the end of tensor '%s'", f->name,
                       t->name);
    if (!f->db_path) {
        const uint8_t *p = gguf_tensor_data(f->g, t);
        if (!p)
            return err_set(e, ERR_CORRUPT, "model '%s': tensor '%s' has no bytes", f->name,
                           t->name);
        memcpy(dst, p + offset, n);
        return 0;
    }
    shard_end = f->l.shards[t->shard].file_bytes - f->l.shards[t->shard].header_bytes;
    if (add_over(t->offset, t->n_bytes, &end) || end > shard_end)
        return err_set(e, ERR_CORRUPT, "model '%s': tensor '%s' reaches past the file's end",
                       f->name, t->name);
    return read_stored(f, t, dst, offset, n, e);
}
