/* One model database: its tables, writing and reading the chunks, and what may be believed of its
 * contents. Every size in it is checked against the file's own length before memory is taken for
 * it. Connections belong to the callers; layouts own their headers. */
#include <stdio.h>
#include <string.h>

#include "store/store_internal.h"

enum { APP_ID = 0x494e474d /* "INGM" */, MODEL_VERSION = 1 };

/* 64 KiB pages: a chunk is a short local part and 16 overflow pages, written in order and so read
 * in order. The checksums have a table of their own, so that loading them touches no chunk. */
static const char schema[] =
    "CREATE TABLE state("
    " id INTEGER PRIMARY KEY CHECK(id = 1), key TEXT NOT NULL, chunk_bytes INTEGER NOT NULL,"
    " n_shards INTEGER NOT NULL, n_chunks INTEGER NOT NULL, n_bytes INTEGER NOT NULL,"
    " digest TEXT NOT NULL DEFAULT '') STRICT;"
    "CREATE TABLE shard("
    " id INTEGER PRIMARY KEY, file_bytes INTEGER NOT NULL, first_chunk INTEGER NOT NULL,"
    " n_chunks INTEGER NOT NULL, xxh3 BLOB NOT NULL, header BLOB NOT NULL) STRICT;"
    /* For people with sqlite3 in hand; loading parses the header. */
    "CREATE TABLE tensor("
    " id INTEGER PRIMARY KEY, name TEXT NOT NULL, type TEXT NOT NULL, shape TEXT NOT NULL,"
    " shard INTEGER NOT NULL, offset INTEGER NOT NULL, n_bytes INTEGER NOT NULL) STRICT;"
    "CREATE TABLE xxh3(chunk INTEGER PRIMARY KEY, sum BLOB NOT NULL) STRICT;"
    "CREATE TABLE chunk(id INTEGER PRIMARY KEY, data BLOB NOT NULL) STRICT;";

/* Canonical form of XXH3-128: big endian, high half first, as xxhsum prints it. */
static void sum_encode(uint8_t out[16], struct hash128 h)
{
    for (int i = 0; i < 8; i++) {
        out[i] = (uint8_t)(h.hi >> (56 - 8 * i));
        out[8 + i] = (uint8_t)(h.lo >> (56 - 8 * i));
    }
}

static struct hash128 sum_decode(const uint8_t p[16])
{
    struct hash128 h = {0};
    for (int i = 0; i < 8; i++) {
        h.hi = h.hi << 8 | p[i];
        h.lo = h.lo << 8 | p[8 + i];
    }
    return h;
}

static int damaged(sqlite3 *db, const char *what, struct err *e)
{
    const char *path = sqlite3_db_filename(db, "main"), *slash = strrchr(path, '/');
    return err_set(e, ERR_CORRUPT, "'%s' is damaged: %s; remove the model and import it again",
                   slash ? slash + 1 : path, what);
}

/* ---- layout ---- */

int layout_number(struct layout *l, struct err *e)
{
    struct hash128 h = {0};
    uint8_t raw[16];
    int64_t next = 1;
    l->n_bytes = 0;
    for (uint32_t i = 0; i < l->n_shards; i++) {
        struct layout_shard *s = &l->shards[i];
        uint64_t seed = h.lo ^ (h.hi << 1) ^ s->file_bytes;
        if (s->file_bytes < s->header_bytes || s->file_bytes > INT64_MAX ||
            add_over(l->n_bytes, s->file_bytes, &l->n_bytes) || l->n_bytes > INT64_MAX)
            return err_set(e, ERR_CORRUPT, "shard %u has an impossible size", i + 1);
        uint64_t data = s->file_bytes - s->header_bytes;
        s->first_chunk = next;
        s->n_chunks = (int64_t)(data / STORE_CHUNK_BYTES + !!(data % STORE_CHUNK_BYTES));
        next += s->n_chunks;
        h = hash_xxh3(s->header, s->header_bytes, seed);
    }
    l->n_chunks = next - 1;
    sum_encode(raw, h);
    hex_encode(l->key, raw, sizeof raw);
    return 0;
}

int layout_parse(struct gguf **out, const struct layout *l, struct err *e)
{
    struct gguf *g = NULL;
    const struct layout_shard *s = l->shards;
    *out = NULL;
    if (gguf_parse(&g, s->header, s->header_bytes, s->file_bytes, e))
        return -1;
    int rc = g->n_shards == l->n_shards
                 ? 0
                 : err_set(e, ERR_CORRUPT, "the header speaks of %u shards, there are %u",
                           g->n_shards, l->n_shards);
    for (uint32_t i = 1; !rc && i < l->n_shards; i++)
        rc = gguf_add_shard(g, i, s[i].header, s[i].header_bytes, s[i].file_bytes, e);
    for (uint32_t i = 0; !rc && i < l->n_shards; i++)
        if (g->shards[i].header_bytes != s[i].header_bytes)
            rc = err_set(e, ERR_CORRUPT, "the header of shard %u has another length", i + 1);
    if (rc)
        gguf_free(g);
    else
        *out = g;
    return rc;
}

size_t layout_chunk_bytes(const struct layout *l, int64_t chunk)
{
    for (uint32_t i = 0; i < l->n_shards; i++) {
        const struct layout_shard *s = &l->shards[i];
        int64_t at = chunk - s->first_chunk;
        if (at < 0 || at >= s->n_chunks)
            continue;
        uint64_t left = s->file_bytes - s->header_bytes - (uint64_t)at * STORE_CHUNK_BYTES;
        return (size_t)MIN(left, (uint64_t)STORE_CHUNK_BYTES);
    }
    return 0;
}

void layout_fini(struct layout *l)
{
    for (uint32_t i = 0; l->shards && i < l->n_shards; i++)
        mem_free(l->shards[i].header);
    mem_free(l->shards);
    *l = (struct layout){0};
}

/* ---- making ---- */

static int put_shards(sqlite3 *db, const struct layout *l, struct err *e)
{
    int rc = 0;
    for (uint32_t i = 0; !rc && i < l->n_shards; i++) {
        const struct layout_shard *s = &l->shards[i];
        uint8_t sum[16];
        sum_encode(sum, hash_xxh3(s->header, s->header_bytes, 0));
        rc = db_run(db, e, "INSERT INTO shard VALUES(?1, ?2, ?3, ?4, ?5, ?6)", "iiiibb", (int64_t)i,
                    (int64_t)s->file_bytes, s->first_chunk, s->n_chunks, (const void *)sum,
                    sizeof sum, (const void *)s->header, (size_t)s->header_bytes);
    }
    return rc;
}

static int put_tensors(sqlite3 *db, const struct gguf *g, struct err *e)
{
    int rc = 0;
    for (uint64_t i = 0; !rc && i < g->n_tensors; i++) {
        const struct gguf_tensor *t = &g->tensors[i];
        char shape[96];
        int at = snprintf(shape, sizeof shape, "%llu", (unsigned long long)t->ne[0]);
        for (uint32_t d = 1; d < t->n_dims && d < 4; d++)
            at += snprintf(shape + at, sizeof shape - (size_t)at, "x%llu",
                           (unsigned long long)t->ne[d]);
        rc = db_run(db, e, "INSERT INTO tensor VALUES(?1, ?2, ?3, ?4, ?5, ?6, ?7)", "isssiii",
                    (int64_t)i + 1, t->name, gguf_dtype_find(t->type)->name, shape,
                    (int64_t)t->shard, (int64_t)t->offset, (int64_t)t->n_bytes);
    }
    return rc;
}

int model_db_create(sqlite3 **out, const char *path, const struct layout *l, const struct gguf *g,
                    struct err *e)
{
    char pragma[80];
    sqlite3 *db = NULL;
    *out = NULL;
    snprintf(pragma, sizeof pragma, "PRAGMA application_id = %d; PRAGMA user_version = %d", APP_ID,
             MODEL_VERSION);
    int rc = db_open(&db, path, DB_CREATE, e);
    if (!rc)
        rc = db_exec(
            db, "PRAGMA page_size = 65536; PRAGMA journal_mode = DELETE; PRAGMA synchronous = FULL",
            e);
    if (!rc && !(rc = db_begin(db, e))) {
        rc = db_exec(db, schema, e);
        if (!rc)
            rc = db_exec(db, pragma, e);
        if (!rc)
            rc = put_shards(db, l, e);
        if (!rc)
            rc = put_tensors(db, g, e);
        if (!rc)
            rc = db_run(db, e,
                        "INSERT INTO state(id, key, chunk_bytes, n_shards, n_chunks, n_bytes)"
                        " VALUES(1, ?1, ?2, ?3, ?4, ?5)",
                        "siiii", l->key, (int64_t)STORE_CHUNK_BYTES, (int64_t)l->n_shards,
                        l->n_chunks, (int64_t)l->n_bytes);
        rc = db_end(db, rc, e);
    }
    if (rc)
        db_close(db);
    else
        *out = db;
    return rc;
}

int chunk_put(sqlite3 *db, int64_t chunk, const void *p, size_t n, struct err *e)
{
    uint8_t sum[16];
    sum_encode(sum, hash_xxh3(p, n, 0));
    int rc = db_run(db, e, "INSERT INTO chunk VALUES(?1, ?2)", "ib", chunk, p, n);
    return rc ? rc
              : db_run(db, e, "INSERT INTO xxh3 VALUES(?1, ?2)", "ib", chunk, (const void *)sum,
                       sizeof sum);
}

/* ---- reading ---- */

static int read_shard(struct layout *l, uint32_t i, sqlite3_stmt *st, sqlite3 *db, struct err *e)
{
    struct layout_shard *s = &l->shards[i];
    const void *header = sqlite3_column_blob(st, 2);
    int n = sqlite3_column_bytes(st, 2);
    if (!header && sqlite3_errcode(db) == SQLITE_NOMEM)
        return db_fail(db, SQLITE_NOMEM, e);
    if (!header || n <= 0 || sqlite3_column_bytes(st, 1) != 16)
        return damaged(db, "a header is missing", e);
    struct hash128 want = sum_decode(sqlite3_column_blob(st, 1)),
                   got = hash_xxh3(header, (size_t)n, 0);
    if (want.lo != got.lo || want.hi != got.hi)
        return damaged(db, "the header fails its checksum", e);
    s->file_bytes = (uint64_t)sqlite3_column_int64(st, 0);
    s->header_bytes = (uint64_t)n;
    if (!(s->header = mem_alloc((size_t)n)))
        return err_set(e, ERR_MEMORY, "out of memory for a header of %d bytes", n);
    memcpy(s->header, header, (size_t)n);
    return 0;
}

static int read_shards(struct layout *l, sqlite3 *db, struct err *e)
{
    sqlite3_stmt *st = NULL;
    bool row = false;
    if (!(l->shards = mem_array(l->n_shards, sizeof *l->shards)))
        return err_set(e, ERR_MEMORY, "out of memory for %u shards", l->n_shards);
    int rc = db_query(&st, db, e, "SELECT file_bytes, xxh3, header FROM shard ORDER BY id", "");
    for (uint32_t i = 0; !rc && i < l->n_shards; i++) {
        rc = db_step(&row, st, e);
        if (!rc)
            rc = row ? read_shard(l, i, st, db, e) : damaged(db, "a shard is missing", e);
    }
    sqlite3_finalize(st);
    return rc;
}

int model_db_layout(struct layout *l, sqlite3 *db, struct err *e)
{
    sqlite3_stmt *st = NULL;
    bool row = false, texts = false;
    int64_t app = 0, version = 0, chunk_bytes = 0, n_shards = 0, n_chunks = 0, n_bytes = 0;
    *l = (struct layout){0};
    int rc = db_number(&app, db, 0, "PRAGMA application_id", e);
    if (!rc)
        rc = db_number(&version, db, 0, "PRAGMA user_version", e);
    if (!rc && app != APP_ID)
        rc = damaged(db, "it is not a model database", e);
    if (!rc && version != MODEL_VERSION)
        rc = err_set(e, ERR_UNSUPPORTED, "'%s' has layout %lld; this ingot reads layout %d",
                     sqlite3_db_filename(db, "main"), (long long)version, MODEL_VERSION);
    if (!rc)
        rc =
            db_query(&st, db, e,
                     "SELECT key, digest, chunk_bytes, n_shards, n_chunks, n_bytes FROM state", "");
    if (!rc && !(rc = db_step(&row, st, e)) && row) {
        texts =
            db_text(l->key, sizeof l->key, st, 0) && db_text(l->digest, sizeof l->digest, st, 1);
        chunk_bytes = sqlite3_column_int64(st, 2);
        n_shards = sqlite3_column_int64(st, 3);
        n_chunks = sqlite3_column_int64(st, 4);
        n_bytes = sqlite3_column_int64(st, 5);
    }
    sqlite3_finalize(st);
    if (!rc &&
        (!texts || chunk_bytes != STORE_CHUNK_BYTES || n_shards < 1 || n_shards > STORE_MAX_SHARDS))
        rc = damaged(db, "its state row is wrong", e);
    char key[STORE_KEY_BYTES];
    memcpy(key, l->key, sizeof key);
    l->n_shards = rc ? 0 : (uint32_t)n_shards;
    if (!rc && !(rc = read_shards(l, db, e)))
        rc = layout_number(l, e);
    if (!rc && (l->n_chunks != n_chunks || l->n_bytes != (uint64_t)n_bytes || strcmp(key, l->key)))
        rc = damaged(db, "its state row does not fit its headers", e);
    if (rc)
        layout_fini(l);
    return rc;
}

int model_db_count(int64_t *n, sqlite3 *db, struct err *e)
{
    int64_t last = 0;
    if (db_number(n, db, 0, "SELECT count(*) FROM xxh3", e) ||
        db_number(&last, db, 0, "SELECT max(chunk) FROM xxh3", e))
        return -1;
    return last == *n ? 0 : damaged(db, "chunks are missing in the middle", e);
}

int model_db_sums(struct hash128 **out, sqlite3 *db, int64_t n, struct err *e)
{
    sqlite3_stmt *st = NULL;
    struct hash128 *all = NULL;
    bool row = true;
    int64_t stored, i = 0;
    *out = NULL;
    /* Counting first: n is a claim of the database, and memory is taken only for rows. */
    if (model_db_count(&stored, db, e))
        return -1;
    if (stored != n)
        return damaged(db, "it has not the number of chunks that its headers ask for", e);
    if (!(all = mem_array((size_t)n, sizeof *all)))
        return err_set(e, ERR_MEMORY, "out of memory for %lld checksums", (long long)n);
    int rc = db_query(&st, db, e, "SELECT chunk, sum FROM xxh3 ORDER BY chunk", "");
    for (; !rc && !(rc = db_step(&row, st, e)) && row && i < n; i++) {
        const uint8_t *p = sqlite3_column_blob(st, 1);
        if (sqlite3_column_int64(st, 0) != i + 1 || !p || sqlite3_column_bytes(st, 1) != 16)
            rc = damaged(db, "a checksum is missing", e);
        else
            all[i] = sum_decode(p);
    }
    sqlite3_finalize(st);
    if (!rc && i != n)
        rc = damaged(db, "checksums are missing", e);
    if (rc)
        mem_free(all);
    else
        *out = all;
    return rc;
}

int chunk_read(void *dst, sqlite3_blob **blob, sqlite3 *db, int64_t chunk, size_t n, struct err *e)
{
    int rc = *blob ? sqlite3_blob_reopen(*blob, chunk)
                   : sqlite3_blob_open(db, "main", "chunk", "data", chunk, 0, blob);
    bool wrong = !rc && (size_t)sqlite3_blob_bytes(*blob) != n;
    if (!rc && !wrong)
        rc = sqlite3_blob_read(*blob, dst, (int)n, 0);
    if (!rc && !wrong)
        return 0;
    /* SQLITE_ERROR from here is "no such row", or a row that holds no blob. */
    if (wrong)
        damaged(db, "the row has the wrong length", e);
    else if (rc == SQLITE_ERROR || rc == SQLITE_ABORT)
        damaged(db, "the row is missing", e);
    else
        db_fail(db, rc, e);
    sqlite3_blob_close(*blob);
    *blob = NULL;
    return -1;
}
