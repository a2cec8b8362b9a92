/* Bringing a GGUF into the store. The order makes a kill at any point harmless:
 *
 *   1. models/partial-<key>.db is filled, 32 chunks a commit; <key> is made of headers and sizes,
 * so the next import of the same file finds it and goes on. What is stored already is compared with
 * the file, byte by byte, in the same pass that hashes it.
 *   2. The digest is written into it; it is whole.
 *   3. It is renamed to models/<sha256>.db and the directory is synced.
 *   4. One transaction in the catalogue gives it a name. From here on it exists.
 *
 * A kill between 3 and 4 leaves a whole database that the next import of the file adopts. Locks:
 * the key while importing, the digest around 3 and 4 (removal holds it too). Owns nothing after
 * return. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "store/store_internal.h"

struct import {
    struct store *s;
    const struct store_import *in;
    struct source src;
    struct layout l;
    struct gguf *g;       /* parsed from l's headers */
    struct store_model m; /* what will be catalogued */
    char path[PATH_MAX];  /* of the first file, absolute */
    uint64_t done_bytes;  /* for the progress call */
};

/* ---- the file: what it is and what it will be called ---- */

/* Copy the headers out of the files and make sure that they can be parsed again: from here on the
 * import believes only what it will store. */
static int load_headers(struct import *im, struct err *e)
{
    struct gguf *g = NULL;
    if (gguf_open(&g, im->path, e))
        return -1;
    im->l.shards = mem_array(g->n_shards, sizeof *im->l.shards);
    im->l.n_shards = im->l.shards ? g->n_shards : 0;
    int rc = im->l.shards ? source_open(&im->src, im->path, g->n_shards, e)
                          : err_set(e, ERR_MEMORY, "out of memory importing '%s'", im->path);
    for (uint32_t i = 0; !rc && i < g->n_shards; i++) {
        struct layout_shard *s = &im->l.shards[i];
        s->header_bytes = g->shards[i].header_bytes;
        s->file_bytes = im->src.files[i].at_open.n_bytes;
        if (s->header_bytes > (uint64_t)INT_MAX / 4)
            rc = err_set(e, ERR_LIMIT, "'%s' has a header of %llu bytes; at most %d are stored",
                         im->src.files[i].path, (unsigned long long)s->header_bytes, INT_MAX / 4);
        else if (!(s->header = mem_alloc(s->header_bytes)))
            rc = err_set(e, ERR_MEMORY, "out of memory for the header of '%s'", im->path);
        else
            rc = source_read(&im->src, s->header, i, 0, s->header_bytes, e);
    }
    gguf_free(g);
    if (!rc)
        rc = layout_number(&im->l, e);
    return rc ? rc : layout_parse(&im->g, &im->l, e);
}

/* The block type that most bytes are in, and the number of weights. */
static void count_weights(struct store_model *m, const struct gguf *g)
{
    uint64_t bytes[GGUF_DTYPE_END] = {0};
    uint32_t best = 0;
    for (uint64_t i = 0; i < g->n_tensors; i++) {
        const struct gguf_tensor *t = &g->tensors[i];
        uint64_t n = 1;
        for (int d = 0; d < 4; d++)
            if (mul_over(n, t->ne[d], &n))
                n = 0;
        if (add_over(m->n_params, n, &m->n_params) || m->n_params > INT64_MAX)
            m->n_params = INT64_MAX;
        if (t->type < GGUF_DTYPE_END)
            bytes[t->type] += t->n_bytes;
    }
    for (uint32_t i = 1; i < GGUF_DTYPE_END; i++)
        if (bytes[i] > bytes[best])
            best = i;
    const struct gguf_dtype_info *info = bytes[best] ? gguf_dtype_find(best) : NULL;
    snprintf(m->quant, sizeof m->quant, "%s", info ? info->name : "");
}

static void describe(struct import *im)
{
    struct store_model *m = &im->m;
    struct gguf_str arch = {0};
    struct err ignored = {0};
    char key[64];
    gguf_get_str(im->g, "general.architecture", &arch, &ignored);
    snprintf(m->arch, sizeof m->arch, "%.*s", (int)MIN(arch.n, sizeof m->arch - 1),
             arch.n ? arch.p : "");
    /* It goes to terminals and into other tools' tables. */
    for (char *p = m->arch; *p; p++)
        if (*p <= ' ' || *p > '~')
            *p = '?';
    snprintf(key, sizeof key, "%s.context_length", m->arch);
    gguf_get_u32(im->g, key, &m->n_ctx, &ignored);
    m->n_bytes = im->l.n_bytes;
    m->n_shards = im->l.n_shards;
    count_weights(m, im->g);
}

static int check_request(const struct store_import *in, struct err *e)
{
    uint8_t raw[32];
    const char *sha = in->expect_sha256;
    if (sha && (strlen(sha) != 64 || hex_decode(raw, sizeof raw, sha, 64) != 32))
        return err_set(e, ERR_USAGE, "'%.80s' is not a SHA-256 digest of 64 hexadecimal digits",
                       sha);
    return in->name ? name_check(in->name, e) : 0;
}

/* A name that is taken is refused before hours of copying, not after. */
static int choose_name(struct import *im, struct err *e)
{
    struct store_model old;
    char key[STORE_KEY_BYTES];
    bool found;
    if (im->in->name)
        snprintf(im->m.name, sizeof im->m.name, "%s", im->in->name);
    else
        name_make(im->m.name, im->g, im->path, im->m.quant);
    if (catalogue_get(&found, im->s, &old, key, im->m.name, e))
        return -1;
    if (found && !im->in->replace && strcmp(key, im->l.key))
        return err_set(e, ERR_EXISTS,
                       "the name '%s' is taken by another model; give another one with --name, or "
                       "let it go with --replace",
                       old.name);
    return 0;
}

/* The folder is resolved, the last part is not: download caches have links there to files without
 * a speaking name, and the shards of a set are found by their names. */
static int absolute_path(char out[PATH_MAX], const char *path, struct err *e)
{
    char dir[PATH_MAX], real[PATH_MAX];
    const char *slash = strrchr(path, '/'), *last = slash ? slash + 1 : path;
    size_t n = (size_t)(last - path);
    if (n >= sizeof dir)
        return err_set(e, ERR_LIMIT, "path too long: '%.200s...'", path);
    memcpy(dir, path, n);
    dir[n] = 0;
    if (!realpath(n ? dir : ".", real))
        return err_errno(e, "cannot open '%s'", path);
    bool root = !strcmp(real, "/");
    if (snprintf(out, PATH_MAX, "%s/%s", root ? "" : real, last) >= PATH_MAX)
        return err_set(e, ERR_LIMIT, "path too long: '%.200s...'", path);
    return 0;
}

static int open_file(struct import *im, struct err *e)
{
    if (check_request(im->in, e) || store_writable(im->s, e))
        return -1;
    if (absolute_path(im->path, im->in->path, e) || load_headers(im, e))
        return -1;
    describe(im);
    return choose_name(im, e);
}

/* ---- one pass over the file: hash it, and store it or compare it with what is stored ---- */

struct pass {
    struct import *im;
    struct hasher *hasher;
    sqlite3 *db; /* NULL: only hash */
    sqlite3_blob *blob;
    int64_t n_have;   /* chunks 1..n_have are in db and compared; the others are added */
    int64_t in_batch; /* added since the last commit */
    uint8_t *stored;  /* a chunk to compare with */
    bool differs;     /* db is not this file's */
};

static int report(struct import *im, size_t n, struct err *e)
{
    im->done_bytes += n;
    if (!im->in->progress || !im->in->progress(im->in->user, im->done_bytes, im->l.n_bytes))
        return 0;
    return err_set(e, ERR_CANCELLED, "import of '%s' cancelled; import it again to go on",
                   im->in->path);
}

static int keep_chunk(struct pass *p, int64_t chunk, const uint8_t *data, size_t n, struct err *e)
{
    int rc = p->in_batch ? 0 : db_begin(p->db, e);
    if (!rc && (rc = chunk_put(p->db, chunk, data, n, e)) == 0)
        p->in_batch++;
    if (rc)
        return db_end(p->db, rc, e);
    if (p->in_batch < p->im->s->batch_chunks)
        return 0;
    p->in_batch = 0;
    return db_end(p->db, 0, e);
}

/* Damage counts as a difference, too little memory does not. */
static int compare_chunk(struct pass *p, int64_t chunk, const uint8_t *data, size_t n,
                         struct err *e)
{
    struct err why = {0};
    if (chunk_read(p->stored, &p->blob, p->db, chunk, n, &why) == 0)
        p->differs = memcmp(p->stored, data, n) != 0;
    else if (why.code == ERR_CORRUPT)
        p->differs = true;
    else
        return err_set(e, why.code, "%s", why.msg);
    return 0;
}

static int pass_chunk(struct pass *p, uint32_t shard, int64_t chunk, uint64_t offset, struct err *e)
{
    size_t n = layout_chunk_bytes(&p->im->l, chunk);
    uint8_t *data = hasher_buffer(p->hasher);
    if (source_read(&p->im->src, data, shard, offset, n, e))
        return -1;
    hasher_push(p->hasher, n);
    int rc = 0;
    if (p->db && chunk <= p->n_have)
        rc = compare_chunk(p, chunk, data, n, e);
    else if (p->db)
        rc = keep_chunk(p, chunk, data, n, e);
    return rc ? rc : report(p->im, n, e);
}

static int pass_run(struct pass *p, struct err *e)
{
    const struct layout *l = &p->im->l;
    int rc = 0;
    p->im->done_bytes = 0;
    for (uint32_t i = 0; i < l->n_shards && !rc && !p->differs; i++) {
        const struct layout_shard *s = &l->shards[i];
        hasher_put(p->hasher, s->header, s->header_bytes);
        rc = report(p->im, s->header_bytes, e);
        for (int64_t k = 0; k < s->n_chunks && !rc && !p->differs; k++)
            rc = pass_chunk(p, i, s->first_chunk + k,
                            s->header_bytes + (uint64_t)k * STORE_CHUNK_BYTES, e);
    }
    return rc;
}

/* Hash the whole file; with db, compare its first n_have chunks and add the rest. */
static int pass_file(char digest[65], bool *differs, struct import *im, sqlite3 *db, int64_t n_have,
                     struct err *e)
{
    struct pass p = {.im = im, .db = db, .n_have = n_have};
    int rc = hasher_new(&p.hasher, e);
    digest[0] = 0;
    if (!rc && n_have && !(p.stored = mem_alloc(STORE_CHUNK_BYTES)))
        rc = err_set(e, ERR_MEMORY, "out of memory comparing chunks");
    if (!rc)
        rc = pass_run(&p, e);
    sqlite3_blob_close(p.blob);
    /* After a cancel or a fault of the file, keep what is good: the next try goes on there. */
    if (p.in_batch && db && !sqlite3_get_autocommit(db))
        rc = db_end(db, 0, rc ? NULL : e) ? -1 : rc;
    if (!rc && !p.differs)
        rc = source_unchanged(&im->src, e);
    if (!rc && !p.differs)
        hasher_digest(digest, p.hasher);
    hasher_free(p.hasher);
    mem_free(p.stored);
    *differs = p.differs;
    return rc;
}

static int check_digest(const struct import *im, const char *digest, struct err *e)
{
    const char *want = im->in->expect_sha256;
    if (!want || !strcasecmp(want, digest))
        return 0;
    return err_set(e, ERR_CORRUPT, "'%s' has the digest %s, not %s; get the file again",
                   im->in->path, digest, want);
}

/* ---- the partial database ---- */

static void discard(const char *path)
{
    char journal[STORE_PATH_BYTES + 16];
    snprintf(journal, sizeof journal, "%s-journal", path);
    unlink(path);
    unlink(journal);
}

/* Before anything is written: is there room? */
static int check_room(const struct import *im, const char *partial, struct err *e)
{
    struct statvfs v;
    struct stat st;
    uint64_t need = im->l.n_bytes + im->l.n_bytes / 64 + (1 << 20);
    uint64_t have = stat(partial, &st) == 0 ? (uint64_t)st.st_size : 0;
    if (statvfs(im->s->home, &v))
        return 0; /* no answer is no reason to refuse; writing will tell */
    uint64_t left = (uint64_t)v.f_bavail * v.f_frsize;
    if (need <= have || need - have <= left)
        return 0;
    return err_set(
        e, ERR_FULL,
        "'%s' needs %llu MB in the store '%s', where %llu MB are free; make room, or use the "
        "file where it is with --link",
        im->in->path, (unsigned long long)((need - have) >> 20), im->s->home,
        (unsigned long long)(left >> 20));
}

/* Open an unfinished import of this very file, if there is a sound one. */
static int reopen_partial(sqlite3 **db, int64_t *n_have, const struct import *im, const char *path,
                          struct err *e)
{
    struct layout l = {0};
    struct err why = {0};
    *db = NULL;
    *n_have = 0;
    chmod(path, 0600); /* a finished one was made read-only */
    int rc = db_open(db, path, DB_WRITE, &why);
    if (!rc)
        rc = db_exec(*db, "PRAGMA synchronous = FULL; PRAGMA journal_mode = DELETE", &why);
    if (!rc)
        rc = model_db_layout(&l, *db, &why);
    if (!rc)
        rc = model_db_count(n_have, *db, &why);
    if (!rc && (strcmp(l.key, im->l.key) || *n_have > im->l.n_chunks))
        rc = err_set(&why, ERR_CORRUPT, "'%s' belongs to another file", path);
    layout_fini(&l);
    if (!rc)
        return 0;
    db_close(*db);
    *db = NULL;
    *n_have = 0;
    if (why.code != ERR_CORRUPT && why.code != ERR_UNSUPPORTED)
        return err_set(e, why.code, "%s", why.msg);
    log_line(LOG_INFO, "%s; starting afresh", why.msg);
    return 0;
}

static int open_partial(sqlite3 **db, int64_t *n_have, const struct import *im, const char *path,
                        struct err *e)
{
    *db = NULL;
    *n_have = 0;
    if (access(path, F_OK) == 0 && reopen_partial(db, n_have, im, path, e))
        return -1;
    if (*db)
        return 0;
    discard(path);
    return model_db_create(db, path, &im->l, im->g, e);
}

/* Fill the partial database and hash the file; the database is whole and closed afterwards. */
static int fill(char digest[65], struct import *im, const char *path, struct err *e)
{
    bool differs = false;
    for (int tries = 0;; tries++) {
        sqlite3 *db;
        int64_t n_have;
        if (open_partial(&db, &n_have, im, path, e))
            return -1;
        int rc = pass_file(digest, &differs, im, db, n_have, e);
        bool refused = !rc && !differs && check_digest(im, digest, e);
        if (refused)
            rc = -1;
        else if (!rc && !differs)
            rc = db_run(db, e, "UPDATE state SET digest = ?1", "s", digest);
        db_close(db);
        /* Bytes that are known to be wrong, or another file's, are of no use to a later try. */
        if (differs || refused)
            discard(path);
        if (rc || !differs)
            return rc;
        CHECK(tries == 0); /* a fresh database has nothing that could differ */
        log_line(LOG_INFO, "'%s' is not the file it was; starting afresh", im->in->path);
    }
}

/* ---- into the catalogue ---- */

/* Steps 3 and 4 of the head comment. `partial` NULL: the database is in place already, and *gone
 * says if it went meanwhile. */
static int commit(bool *gone, struct import *im, const char *partial, struct err *e)
{
    char path[STORE_PATH_BYTES], dir[STORE_PATH_BYTES];
    int lock;
    *gone = false;
    if (model_path(path, im->s, im->m.digest, e) || store_path(dir, im->s, "models", e) ||
        store_lock(&lock, im->s, im->m.digest, im->s->lock_wait_ms,
                   "the model is being imported or removed by another process; try again", e))
        return -1;
    int rc = 0;
    bool was_there = access(path, F_OK) == 0;
    if (!partial && !was_there) {
        *gone = true;
    } else if (partial) {
        chmod(partial, 0444);
        if (rename(partial, path))
            rc = err_errno(e, "cannot rename '%s' to '%s'", partial, path);
        else
            rc = dir_sync(dir, e);
    }
    if (!rc && !*gone)
        rc = catalogue_add(im->s, &im->m, im->l.key, NULL, im->in->replace, e);
    /* No name for it: back to where the next import, or the sweep, finds it. */
    if (rc && partial && !was_there)
        rename(path, partial);
    close(lock);
    if (!rc && im->in->replace)
        sweep_doomed(im->s);
    return rc;
}

/* The same file may be in the store under another name, or whole but nameless. Then it is only
 * compared, byte by byte: a damaged copy is not accepted but replaced. */
static int try_existing(bool *done, struct import *im, struct err *e)
{
    char path[STORE_PATH_BYTES], digest[65], known[65];
    sqlite3 *db = NULL;
    struct layout l = {0};
    bool differs = true, gone = false;
    int64_t n = 0;
    *done = false;
    if (catalogue_by_key(known, im->s, im->l.key, e) ||
        (!*known && find_orphan(known, im->s, im->l.key, e)))
        return -1;
    if (!*known || model_path(path, im->s, known, e))
        return *known ? -1 : 0;
    bool sound = !db_open(&db, path, DB_IMMUTABLE, NULL) && !model_db_layout(&l, db, NULL) &&
                 !model_db_count(&n, db, NULL) && n == im->l.n_chunks && !strcmp(l.digest, known) &&
                 !strcmp(l.key, im->l.key);
    int rc = sound ? pass_file(digest, &differs, im, db, n, e) : 0;
    layout_fini(&l);
    db_close(db);
    if (!rc && !differs)
        rc = check_digest(im, digest, e);
    if (rc || differs || strcmp(digest, known))
        return rc;
    memcpy(im->m.digest, digest, sizeof digest);
    rc = commit(&gone, im, NULL, e);
    *done = !rc && !gone;
    return rc;
}

static int import_copy(struct import *im, struct err *e)
{
    char partial[STORE_PATH_BYTES];
    bool done = false, gone;
    int lock;
    if (partial_path(partial, im->s, im->l.key, e) ||
        store_lock(&lock, im->s, im->l.key, im->s->lock_wait_ms,
                   "this file is being imported by another process; wait for it, then try again",
                   e))
        return -1;
    int rc = try_existing(&done, im, e);
    if (!rc && !done) {
        rc = check_room(im, partial, e);
        if (!rc)
            rc = fill(im->m.digest, im, partial, e);
        if (!rc)
            rc = commit(&gone, im, partial, e);
    }
    close(lock);
    return rc;
}

static int import_link(struct import *im, struct err *e)
{
    bool unused;
    struct link_shard *now = mem_array(im->src.n, sizeof *now);
    if (!now)
        return err_set(e, ERR_MEMORY, "out of memory linking '%s'", im->path);
    for (uint32_t i = 0; i < im->src.n; i++)
        now[i] = im->src.files[i].at_open;
    int rc = 0;
    if (strlen(im->path) >= sizeof im->m.link_path)
        rc = err_set(e, ERR_LIMIT, "the path of '%s' is too long to link; at most %zu bytes",
                     im->in->path, sizeof im->m.link_path - 1);
    else
        memcpy(im->m.link_path, im->path, strlen(im->path) + 1);
    if (!rc)
        rc = catalogue_link_digest(im->m.digest, im->s, im->path, now, im->src.n, e);
    if (!rc && !*im->m.digest)
        rc = pass_file(im->m.digest, &unused, im, NULL, 0, e);
    if (!rc)
        rc = check_digest(im, im->m.digest, e);
    if (!rc)
        rc = catalogue_add(im->s, &im->m, im->l.key, now, im->in->replace, e);
    if (!rc && im->in->replace)
        sweep_doomed(im->s);
    mem_free(now);
    return rc;
}

int store_import(struct store *s, struct store_model *m, const struct store_import *in,
                 struct err *e)
{
    struct import *im = mem_zalloc(sizeof *im);
    if (!im)
        return err_set(e, ERR_MEMORY, "out of memory importing '%s'", in->path);
    im->s = s;
    im->in = in;
    int rc = open_file(im, e);
    if (!rc)
        rc = in->link ? import_link(im, e) : import_copy(im, e);
    if (!rc)
        *m = im->m;
    gguf_free(im->g);
    layout_fini(&im->l);
    source_fini(&im->src);
    mem_free(im);
    return rc;
}
