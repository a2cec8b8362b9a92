/* prefix.db itself: its tables, one connection with prepared statements, rows in and out, eviction.
 * A row's sums cover all that a reader relies on, so a row that passes is what was put. Nothing
 * here locks or logs; a connection belongs to one thread, and so does its staging memory. */
#include <sys/stat.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#define ZSTD_STATIC_LINKING_ONLY /* contexts with our allocator */
#include <zstd.h>
#include <zstd_errors.h>

#include "store/prefix_internal.h"

static const char *const schema[] = {
    "CREATE TABLE page(id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, parent BLOB NOT NULL, "
    "ids BLOB NOT NULL, kv_bytes INTEGER NOT NULL, stored INTEGER NOT NULL, tag INTEGER NOT NULL, "
    "cost INTEGER NOT NULL, packed INTEGER NOT NULL, sums BLOB NOT NULL, rank REAL NOT NULL, "
    "hits INTEGER NOT NULL, used INTEGER NOT NULL)",
    "CREATE TABLE data(id INTEGER PRIMARY KEY, kv BLOB NOT NULL)",
    "CREATE TABLE gone(seq INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE)",
    "CREATE TABLE meta(id INTEGER PRIMARY KEY, floor REAL NOT NULL)",
    "CREATE INDEX page_parent ON page(parent)",
    "CREATE INDEX page_rank ON page(rank, id DESC)",
};

#define COLUMNS "id, key, parent, ids, kv_bytes, stored, tag, cost, packed, sums"

/* Eviction is GreedyDual-Size-Frequency (L. Cherkasova, "Improving WWW Proxies Performance with
 * Greedy-Dual-Size-Frequency Caching Policy", HP Labs 1998): rank = floor + uses * cost / size, the
 * lowest goes first and becomes the floor (L in the paper). Two things are added for chains of
 * pages: a page before others is worth at least what they are, because without it they cannot be
 * reached, so that chains shrink from their ends; and every use lifts the floor by the page's share
 * of the cap, so that one turnover of the cache outweighs one use, also while nothing is evicted.
 */
static const char *const sql[PREFIX_N_STMTS] = {
    [ST_BEGIN_WRITE] = "BEGIN IMMEDIATE",
    [ST_COMMIT] = "COMMIT",
    [ST_FIND] = "SELECT " COLUMNS " FROM page WHERE key = ?",
    [ST_FIND_ID] = "SELECT id FROM page WHERE key = ?",
    [ST_NEXT] = "SELECT " COLUMNS " FROM page WHERE id > ? ORDER BY id LIMIT 1",
    [ST_GONE] = "SELECT 1 FROM gone WHERE key = ?",
    [ST_ADD] = "INSERT OR REPLACE INTO page(key, parent, ids, kv_bytes, stored, tag, cost, packed,"
               " sums, rank, hits, used) VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?)",
    [ST_ADD_DATA] = "INSERT OR REPLACE INTO data(id, kv) VALUES(?, ?)",
    [ST_DROP] = "DELETE FROM page WHERE id = ?",
    [ST_DROP_DATA] = "DELETE FROM data WHERE id = ?",
    [ST_REMEMBER] = "INSERT OR REPLACE INTO gone(key) VALUES(?)",
    [ST_FORGET] = "DELETE FROM gone WHERE key = ?",
    [ST_PRUNE] = "DELETE FROM gone WHERE seq <= (SELECT max(seq) FROM gone) - ?",
    [ST_TOUCH] = "UPDATE page SET hits = hits + 1, used = ?2, rank = max(rank,"
                 " ?3 + min(hits + 2, 64) * cost / (stored + 512.0))"
                 " WHERE key = ?1 RETURNING parent, rank, cost, stored",
    [ST_LIFT] = "UPDATE page SET rank = ?3 WHERE key = ?1 AND rank < ?2 RETURNING parent",
    [ST_VICTIM] = "SELECT id, key, rank FROM page AS p WHERE NOT EXISTS (SELECT 1 FROM page AS c"
                  " WHERE c.parent = p.key AND c.id <> p.id) AND p.key <> ?"
                  " ORDER BY rank, id DESC LIMIT 1",
    [ST_ANY_VICTIM] =
        "SELECT id, key, rank FROM page WHERE key <> ? ORDER BY rank, id DESC LIMIT 1",
    [ST_FLOOR] = "SELECT floor FROM meta",
    [ST_SET_FLOOR] = "INSERT OR REPLACE INTO meta(id, floor) VALUES(1, ?)",
    [ST_NEXT_OF_MODEL] = "SELECT id FROM page WHERE id > ?1 AND (?2 OR tag = ?3) ORDER BY id"
                         " LIMIT 1",
    [ST_COUNT] = "SELECT count(*) FROM page",
    [ST_N_PAGES] = "PRAGMA page_count",
    [ST_N_FREE] = "PRAGMA freelist_count",
};

/* ---- statements ---- */

/* Bind as db_query does: i int64_t, d double, b blob (pointer, size_t). The statement is reset by
 * st_done; what is bound must live until then. */
static int st_bind(sqlite3_stmt **out, struct prefix_db *d, enum prefix_stmt which, struct err *e,
                   const char *types, ...)
{
    sqlite3_stmt *st = d->st[which];
    int rc = SQLITE_OK;
    va_list ap;
    va_start(ap, types);
    for (int i = 0; !rc && types[i]; i++) {
        const void *p;
        switch (types[i]) {
        case 'i':
            rc = sqlite3_bind_int64(st, i + 1, va_arg(ap, int64_t));
            break;
        case 'd':
            rc = sqlite3_bind_double(st, i + 1, va_arg(ap, double));
            break;
        default:
            p = va_arg(ap, const void *);
            rc = sqlite3_bind_blob64(st, i + 1, p, va_arg(ap, size_t), SQLITE_STATIC);
        }
    }
    va_end(ap);
    *out = st;
    return rc ? db_fail(d->db, rc, e) : 0;
}

static void st_done(sqlite3_stmt *st)
{
    sqlite3_reset(st);
    sqlite3_clear_bindings(st);
}

/* Run a bound statement to its end; *v (may be NULL) gets the first column of the last row. */
static int st_run(int64_t *v, sqlite3_stmt *st, int rc, struct err *e)
{
    for (bool row = true; !rc && row;) {
        rc = db_step(&row, st, e);
        if (!rc && row && v)
            *v = sqlite3_column_int64(st, 0);
    }
    st_done(st);
    return rc;
}

static int st_number(int64_t *v, struct prefix_db *d, enum prefix_stmt which, struct err *e)
{
    sqlite3_stmt *st;
    *v = 0;
    return st_run(v, d->st[which], st_bind(&st, d, which, e, ""), e);
}

static int st_key(struct prefix_db *d, enum prefix_stmt which, const struct prefix_key *key,
                  struct err *e)
{
    sqlite3_stmt *st;
    int rc = st_bind(&st, d, which, e, "b", key->b, sizeof key->b);
    return st_run(NULL, st, rc, e);
}

static int st_id(struct prefix_db *d, enum prefix_stmt which, int64_t id, struct err *e)
{
    sqlite3_stmt *st;
    int rc = st_bind(&st, d, which, e, "i", id);
    return st_run(NULL, st, rc, e);
}

/* ---- opening ---- */

/* Word for word, so that a file made by others has no view or trigger in place of a table. */
static int schema_check(bool *empty, sqlite3 *db, struct err *e)
{
    sqlite3_stmt *st = NULL;
    size_t n = 0;
    bool row = true, same = true;
    int rc = db_query(&st, db, e, "SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL", "");
    while (!rc && row && same) {
        rc = db_step(&row, st, e);
        if (rc || !row)
            break;
        const char *text = (const char *)sqlite3_column_text(st, 0);
        bool known = false;
        for (size_t i = 0; text && i < ARRAY_LEN(schema); i++)
            known = known || !strcmp(text, schema[i]);
        same = known && n++ < ARRAY_LEN(schema);
    }
    sqlite3_finalize(st);
    *empty = n == 0 && same;
    if (!rc && !*empty && (!same || n != ARRAY_LEN(schema)))
        return err_set(
            e, ERR_UNSUPPORTED,
            "'%s' has other tables than a prefix cache; give a file that `ingot cache export` made",
            sqlite3_db_filename(db, "main"));
    return rc;
}

static int schema_create(sqlite3 *db, struct err *e)
{
    char text[64];
    int rc = db_begin(db, e);
    for (size_t i = 0; !rc && i < ARRAY_LEN(schema); i++)
        rc = db_exec(db, schema[i], e);
    sqlite3_snprintf(sizeof text, text, "PRAGMA user_version = %d", PREFIX_VERSION);
    if (!rc)
        rc = db_exec(db, text, e);
    return db_end(db, rc, e);
}

/* The header is written before the journal mode changes: so it is in the file itself, where the
 * judge of a damaged file looks for it. */
static int header_create(sqlite3 *db, struct err *e)
{
    char text[200];
    sqlite3_snprintf(sizeof text, text,
                     "PRAGMA page_size = %d; PRAGMA auto_vacuum = INCREMENTAL;"
                     "PRAGMA application_id = %d",
                     PREFIX_DB_PAGE, PREFIX_APP_ID);
    int rc = db_exec(db, text, e);
    /* It tells what people asked; SQLite gives its companions the same mode. */
    if (!rc)
        chmod(sqlite3_db_filename(db, "main"), 0600);
    return rc;
}

/* What the header says of the file: ours, or still empty (a kill right after its creation leaves
 * such a one). */
static int header_check(sqlite3 *db, struct err *e)
{
    int64_t app = 0, version = 0, page = 0;
    const char *path = sqlite3_db_filename(db, "main");
    int rc = db_number(&app, db, 0, "PRAGMA application_id", e);
    if (!rc)
        rc = db_number(&version, db, 0, "PRAGMA user_version", e);
    if (!rc)
        rc = db_number(&page, db, 0, "PRAGMA page_size", e);
    if (rc)
        return rc;
    if (app != PREFIX_APP_ID)
        return err_set(e, ERR_UNSUPPORTED,
                       "'%s' is not a prefix cache; give a file that `ingot cache export` made",
                       path);
    if (version > PREFIX_VERSION || page != PREFIX_DB_PAGE)
        return err_set(e, ERR_UNSUPPORTED,
                       "'%s' has version %lld, this ingot knows %d; use the ingot that made it",
                       path, (long long)version, PREFIX_VERSION);
    return 0;
}

static int file_prepare(sqlite3 *db, enum prefix_db_mode mode, struct err *e)
{
    int64_t app = 0, n_objects = 0;
    bool empty = false, writes = mode != PREFIX_READ;
    int rc = db_number(&app, db, 0, "PRAGMA application_id", e);
    if (!rc)
        rc = db_number(&n_objects, db, 0, "SELECT count(*) FROM sqlite_schema", e);
    if (!rc && writes && app == 0 && n_objects == 0)
        rc = header_create(db, e);
    if (!rc)
        rc = header_check(db, e);
    if (!rc && mode == PREFIX_WRITE)
        rc = db_exec(db,
                     "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;"
                     "PRAGMA wal_autocheckpoint = 2048; PRAGMA journal_size_limit = 67108864",
                     e);
    if (!rc && mode == PREFIX_FRESH)
        rc = db_exec(db, "PRAGMA journal_mode = MEMORY; PRAGMA synchronous = OFF", e);
    /* SQLite takes a header it does not know the write version of for a read-only file. */
    if (!rc && writes && sqlite3_db_readonly(db, "main"))
        return err_set(e, access(sqlite3_db_filename(db, "main"), W_OK) ? ERR_IO : ERR_CORRUPT,
                       "'%s' cannot be written to; see its permissions, or choose another --home",
                       sqlite3_db_filename(db, "main"));
    if (!rc)
        rc = schema_check(&empty, db, e);
    if (!rc && empty && !writes)
        return err_set(e, ERR_UNSUPPORTED, "'%s' is not a whole prefix cache",
                       sqlite3_db_filename(db, "main"));
    return rc ? rc : empty ? schema_create(db, e) : 0;
}

int prefix_db_open(struct prefix_db *d, const char *path, enum prefix_db_mode mode, struct err *e)
{
    static const enum db_mode modes[] = {
        [PREFIX_WRITE] = DB_CREATE, [PREFIX_READ] = DB_READ, [PREFIX_FRESH] = DB_CREATE};
    *d = (struct prefix_db){0};
    int rc = db_open(&d->db, path, modes[mode], e);
    if (!rc) {
        sqlite3_busy_timeout(d->db, mode == PREFIX_READ ? 100 : 2000);
        sqlite3_limit(d->db, SQLITE_LIMIT_LENGTH, PREFIX_MAX_KV_BYTES + (1 << 20));
        rc = db_exec(d->db, "PRAGMA cell_size_check = ON", e);
    }
    if (!rc)
        rc = file_prepare(d->db, mode, e);
    for (int i = 0; !rc && i < PREFIX_N_STMTS; i++) {
        if (!sql[i])
            continue;
        rc = sqlite3_prepare_v3(d->db, sql[i], -1, SQLITE_PREPARE_PERSISTENT, &d->st[i], NULL);
        if (rc)
            db_fail(d->db, rc, e);
    }
    if (rc)
        prefix_db_close(d);
    return rc ? -1 : 0;
}

void prefix_db_close(struct prefix_db *d)
{
    for (int i = 0; i < PREFIX_N_STMTS; i++)
        sqlite3_finalize(d->st[i]);
    ZSTD_freeCCtx(d->cctx);
    ZSTD_freeDCtx(d->dctx);
    mem_free(d->stage);
    db_close(d->db);
    *d = (struct prefix_db){0};
}

static int floor_read(struct prefix_db *d, struct err *e)
{
    sqlite3_stmt *st = d->st[ST_FLOOR];
    bool row = false;
    int rc = db_step(&row, st, e);
    double v = !rc && row ? sqlite3_column_double(st, 0) : 0;
    st_done(st);
    d->floor_read = d->floor = v >= 0 && v < 1e300 ? v : 0; /* nothing in there is trusted */
    return rc;
}

static int floor_write(struct prefix_db *d, struct err *e)
{
    sqlite3_stmt *st;
    int rc = st_bind(&st, d, ST_SET_FLOOR, e, "d", d->floor);
    return st_run(NULL, st, rc, e);
}

int prefix_db_begin(struct prefix_db *d, struct err *e)
{
    if (st_run(NULL, d->st[ST_BEGIN_WRITE], 0, e))
        return -1;
    return floor_read(d, e) ? prefix_db_end(d, -1, e) : 0;
}

int prefix_db_end(struct prefix_db *d, int rc, struct err *e)
{
    if (!rc && d->floor > d->floor_read)
        rc = floor_write(d, e);
    if (!rc)
        rc = st_run(NULL, d->st[ST_COMMIT], 0, e);
    if (rc && !sqlite3_get_autocommit(d->db))
        sqlite3_exec(d->db, "ROLLBACK", NULL, NULL, NULL);
    return rc;
}

int prefix_db_size(uint64_t *used, uint64_t *file, struct prefix_db *d, struct err *e)
{
    int64_t n = 0, n_free = 0;
    int rc = st_number(&n, d, ST_N_PAGES, e);
    if (!rc)
        rc = st_number(&n_free, d, ST_N_FREE, e);
    *file = (uint64_t)n * PREFIX_DB_PAGE;
    *used = (uint64_t)MAX(n - n_free, 0) * PREFIX_DB_PAGE;
    return rc;
}

/* ---- rows ---- */

/* Everything fixed about a row, in 64-bit words without padding. */
static struct hash128 head_sum(const struct prefix_row *r)
{
    struct {
        struct prefix_key key, parent;
        uint64_t kv_bytes, stored, tag, cost, packed, n_ids;
        struct hash128 ids, body;
    } h = {.key = r->key, .parent = r->parent};
    h.kv_bytes = r->kv_bytes;
    h.stored = r->stored_bytes;
    h.tag = r->model_tag;
    h.cost = r->cost_us;
    h.packed = r->packed;
    h.n_ids = (uint64_t)r->n_ids;
    h.ids = hash_xxh3(r->ids, (size_t)r->n_ids * sizeof r->ids[0], 0);
    h.body = r->body;
    _Static_assert(sizeof h == 2 * 16 + 6 * 8 + 2 * 16, "no padding is hashed");
    return hash_xxh3(&h, sizeof h, PREFIX_VERSION);
}

static bool column_bytes(void *dst, size_t n, sqlite3_stmt *st, int column)
{
    const void *p = sqlite3_column_blob(st, column);
    if (!p || (size_t)sqlite3_column_bytes(st, column) != n)
        return false;
    memcpy(dst, p, n);
    return true;
}

/* Columns as COLUMNS lists them. False: not as it was put. */
static bool row_parse(struct prefix_row *r, sqlite3_stmt *st)
{
    struct {
        struct hash128 head, body;
    } sums;
    size_t ids_bytes = (size_t)sqlite3_column_bytes(st, 3);
    r->id = sqlite3_column_int64(st, 0);
    if (ids_bytes == 0 || ids_bytes % 4 || ids_bytes > sizeof r->ids)
        return false;
    r->n_ids = (int32_t)(ids_bytes / 4);
    if (!column_bytes(&r->key, sizeof r->key, st, 1) ||
        !column_bytes(&r->parent, sizeof r->parent, st, 2) ||
        !column_bytes(r->ids, ids_bytes, st, 3) || !column_bytes(&sums, sizeof sums, st, 9))
        return false;
    r->kv_bytes = (uint64_t)sqlite3_column_int64(st, 4);
    r->stored_bytes = (uint64_t)sqlite3_column_int64(st, 5);
    r->model_tag = (uint64_t)sqlite3_column_int64(st, 6);
    r->cost_us = (uint32_t)sqlite3_column_int64(st, 7);
    r->packed = sqlite3_column_int64(st, 8) != 0;
    r->body = sums.body;
    struct hash128 head = head_sum(r);
    return head.lo == sums.head.lo && head.hi == sums.head.hi && r->kv_bytes > 0 &&
           r->kv_bytes <= PREFIX_MAX_KV_BYTES &&
           (r->packed ? r->stored_bytes < r->kv_bytes : r->stored_bytes == r->kv_bytes);
}

static int row_get(enum row_state *s, struct prefix_row *r, sqlite3_stmt *st, int rc, struct err *e)
{
    bool row = false;
    *s = ROW_NONE;
    if (!rc)
        rc = db_step(&row, st, e);
    if (!rc && row)
        *s = row_parse(r, st) ? ROW_OK : ROW_BAD;
    st_done(st);
    return rc;
}

int row_find(enum row_state *s, struct prefix_row *r, struct prefix_db *d,
             const struct prefix_key *key, struct err *e)
{
    sqlite3_stmt *st;
    int rc = st_bind(&st, d, ST_FIND, e, "b", key->b, sizeof key->b);
    return row_get(s, r, st, rc, e);
}

int row_next(enum row_state *s, struct prefix_row *r, struct prefix_db *d, int64_t after,
             struct err *e)
{
    sqlite3_stmt *st;
    int rc = st_bind(&st, d, ST_NEXT, e, "i", after);
    r->id = 0;
    rc = row_get(s, r, st, rc, e);
    if (!rc && *s != ROW_NONE && r->id <= after)
        rc = err_set(e, ERR_CORRUPT, "'%s': rows out of order", sqlite3_db_filename(d->db, "main"));
    return rc;
}

bool row_same(const struct prefix_row *r, const struct prefix_page *page)
{
    return !memcmp(&r->parent, &page->parent, sizeof r->parent) && r->n_ids == page->n_ids &&
           !memcmp(r->ids, page->ids, (size_t)r->n_ids * sizeof r->ids[0]);
}

int key_gone(bool *gone, struct prefix_db *d, const struct prefix_key *key, struct err *e)
{
    sqlite3_stmt *st;
    int64_t one = 0;
    int rc = st_bind(&st, d, ST_GONE, e, "b", key->b, sizeof key->b);
    rc = st_run(&one, st, rc, e);
    *gone = one == 1;
    return rc;
}

/* ---- bodies ---- */

static void *lib_alloc(void *unused, size_t n)
{
    return mem_alloc(n);
}

static void lib_free(void *unused, void *p)
{
    mem_free(p);
}

static int stage_room(struct prefix_db *d, size_t n, struct err *e)
{
    if (n <= d->stage_bytes)
        return 0;
    mem_free(d->stage);
    d->stage = mem_alloc(n);
    d->stage_bytes = d->stage ? n : 0;
    return d->stage ? 0 : err_set(e, ERR_MEMORY, "out of memory for a page of the prefix cache");
}

static int unpack(enum row_state *s, void *kv, struct prefix_db *d, const struct prefix_row *r,
                  struct err *e)
{
    if (!d->dctx)
        d->dctx = ZSTD_createDCtx_advanced((ZSTD_customMem){lib_alloc, lib_free, NULL});
    if (!d->dctx)
        return err_set(e, ERR_MEMORY, "out of memory for a page of the prefix cache");
    size_t n = ZSTD_decompressDCtx(d->dctx, kv, r->kv_bytes, d->stage, r->stored_bytes);
    if (ZSTD_getErrorCode(n) == ZSTD_error_memory_allocation)
        return err_set(e, ERR_MEMORY, "out of memory for a page of the prefix cache");
    *s = n == r->kv_bytes ? ROW_OK : ROW_BAD;
    return 0;
}

/* Damage within one body is that row's matter; whether it can be removed shows when it is. */
static int blob_take(enum row_state *s, void *dst, struct prefix_db *d, const struct prefix_row *r,
                     struct err *e)
{
    sqlite3_blob *blob = NULL;
    int rc = sqlite3_blob_open(d->db, "main", "data", "kv", r->id, 0, &blob);
    *s = ROW_OK;
    if (!rc && (uint64_t)sqlite3_blob_bytes(blob) != r->stored_bytes)
        *s = ROW_BAD;
    if (!rc && *s == ROW_OK)
        rc = sqlite3_blob_read(blob, dst, (int)r->stored_bytes, 0);
    int kind = rc & 0xff;
    if (kind == SQLITE_ERROR || kind == SQLITE_CORRUPT || rc == SQLITE_IOERR_SHORT_READ)
        *s = ROW_BAD;
    else if (rc)
        db_fail(d->db, rc, e);
    sqlite3_blob_close(blob);
    return rc && *s != ROW_BAD ? -1 : 0;
}

int row_load(enum row_state *s, void *kv, struct prefix_db *d, const struct prefix_row *r,
             struct err *e)
{
    *s = ROW_NONE;
    if (r->packed && stage_room(d, r->stored_bytes, e))
        return -1;
    int rc = blob_take(s, r->packed ? d->stage : kv, d, r, e);
    if (!rc && *s == ROW_OK && r->packed)
        rc = unpack(s, kv, d, r, e);
    if (rc || *s != ROW_OK)
        return rc;
    struct hash128 sum = hash_xxh3(kv, r->kv_bytes, 0);
    if (sum.lo != r->body.lo || sum.hi != r->body.hi)
        *s = ROW_BAD;
    return 0;
}

enum {
    SAMPLE_BYTES = 64 << 10, /* tried first: most KV types do not shrink, and time is dear */
    MIN_PACK_BYTES = 256,
};

int row_pack(struct prefix_row *r, const void **stored, struct prefix_db *d, const void *kv,
             struct err *e)
{
    size_t n = r->kv_bytes, n_packed = n, most = n - n / 10;
    r->body = hash_xxh3(kv, n, 0);
    *stored = kv;
    r->packed = false;
    r->stored_bytes = n;
    if (n < MIN_PACK_BYTES)
        return 0;
    if (stage_room(d, MAX(most, (size_t)SAMPLE_BYTES), e))
        return -1;
    if (!d->cctx)
        d->cctx = ZSTD_createCCtx_advanced((ZSTD_customMem){lib_alloc, lib_free, NULL});
    if (!d->cctx)
        return err_set(e, ERR_MEMORY, "out of memory for a page of the prefix cache");
    if (n > 4 * (size_t)SAMPLE_BYTES) {
        const char *middle = (const char *)kv + n / 2;
        n_packed = ZSTD_compressCCtx(d->cctx, d->stage, SAMPLE_BYTES - SAMPLE_BYTES / 10, middle,
                                     SAMPLE_BYTES, 1);
        if (ZSTD_isError(n_packed))
            return 0;
    }
    /* No room for more than nine tenths: then it is not kept packed. */
    n_packed = ZSTD_compressCCtx(d->cctx, d->stage, most, kv, n, 1);
    if (ZSTD_isError(n_packed))
        return 0;
    *stored = d->stage;
    r->packed = true;
    r->stored_bytes = n_packed;
    return 0;
}

/* ---- changes; all within a transaction of the caller ---- */

/* Pages before a page get at least its rank. Ends at the first that has it: the strict `<` bounds
 * this even in a file whose parents form a ring. They get a quarter of its value more, so that the
 * next page of the chain, which is worth a little more, does not go up all of the way again. */
static int rank_lift(struct prefix_db *d, struct prefix_key parent, double rank, struct err *e)
{
    double lifted = rank + 0.25 * MAX(rank - d->floor, 0.0);
    int rc = 0;
    for (bool row = true; !rc && row;) {
        sqlite3_stmt *st;
        struct prefix_key key = parent;
        rc = st_bind(&st, d, ST_LIFT, e, "bdd", key.b, sizeof key.b, rank, lifted);
        if (!rc)
            rc = db_step(&row, st, e);
        if (!rc && row)
            row = column_bytes(&parent, sizeof parent, st, 0);
        st_done(st);
    }
    return rc;
}

static double value_of(double cost_us, double stored_bytes)
{
    return cost_us / (stored_bytes + 512);
}

static void floor_lift(struct prefix_db *d, double cost_us, double stored_bytes)
{
    d->floor += value_of(cost_us, stored_bytes) * stored_bytes / (double)MAX(d->max_bytes, 1u);
}

static int row_add(struct prefix_db *d, const struct prefix_row *r, const void *stored,
                   struct err *e)
{
    struct {
        struct hash128 head, body;
    } sums = {head_sum(r), r->body};
    double rank = d->floor + value_of(r->cost_us, (double)r->stored_bytes);
    sqlite3_stmt *st;
    int rc = st_bind(&st, d, ST_ADD, e, "bbbiiiiibdi", r->key.b, sizeof r->key.b, r->parent.b,
                     sizeof r->parent.b, r->ids, (size_t)r->n_ids * sizeof r->ids[0],
                     (int64_t)r->kv_bytes, (int64_t)r->stored_bytes, (int64_t)r->model_tag,
                     (int64_t)r->cost_us, (int64_t)r->packed, &sums, sizeof sums, rank,
                     (int64_t)time(NULL));
    rc = st_run(NULL, st, rc, e);
    int64_t id = sqlite3_last_insert_rowid(d->db), found = 0;
    /* A damaged index may take a key and not find it again: then the file is of no use. */
    if (!rc)
        rc = st_bind(&st, d, ST_FIND_ID, e, "b", r->key.b, sizeof r->key.b);
    if (!rc)
        rc = st_run(&found, st, rc, e);
    if (!rc && found != id)
        rc = err_set(e, ERR_CORRUPT, "'%s' does not find what was put into it",
                     sqlite3_db_filename(d->db, "main"));
    if (!rc)
        rc = st_bind(&st, d, ST_ADD_DATA, e, "ib", id, stored, (size_t)r->stored_bytes);
    if (!rc)
        rc = st_run(NULL, st, rc, e);
    if (!rc)
        rc = st_key(d, ST_FORGET, &r->key, e);
    return rc ? rc : rank_lift(d, r->parent, rank, e);
}

int row_admit(bool *added, uint64_t *n_evicted, struct prefix_db *d, const struct prefix_row *r,
              const void *stored, struct err *e)
{
    uint64_t need = r->stored_bytes + (uint64_t)r->n_ids * 4 + 2 * PREFIX_DB_PAGE;
    struct prefix_room room = {
        .bytes = d->max_bytes > need ? d->max_bytes - need : 0,
        .rows = 4096,
        .below = d->floor + 1.000001 * value_of(r->cost_us, (double)r->stored_bytes),
        .spare = &r->parent,
    };
    /* What comes after a page that had to go cannot be reached. */
    bool orphan = false;
    int rc = key_gone(&orphan, d, &r->parent, e);
    if (!rc && !orphan)
        rc = rows_evict(&room, d, e);
    *n_evicted += room.n_evicted;
    *added = !rc && room.fits;
    if (rc)
        return rc;
    floor_lift(d, r->cost_us, (double)r->stored_bytes);
    return *added ? row_add(d, r, stored, e) : st_key(d, ST_REMEMBER, &r->key, e);
}

int row_drop(struct prefix_db *d, int64_t id, struct err *e)
{
    int rc = st_id(d, ST_DROP_DATA, id, e);
    return rc ? rc : st_id(d, ST_DROP, id, e);
}

int row_touch(struct prefix_db *d, const struct prefix_key *key, struct err *e)
{
    sqlite3_stmt *st;
    struct prefix_key parent;
    bool row = false;
    double rank = 0;
    int rc =
        st_bind(&st, d, ST_TOUCH, e, "bid", key->b, sizeof key->b, (int64_t)time(NULL), d->floor);
    if (!rc)
        rc = db_step(&row, st, e);
    if (!rc && row) {
        rank = sqlite3_column_double(st, 1);
        floor_lift(d, sqlite3_column_double(st, 2), sqlite3_column_double(st, 3));
        row = column_bytes(&parent, sizeof parent, st, 0);
    }
    st_done(st);
    return rc || !row ? rc : rank_lift(d, parent, rank, e);
}

/* ---- room ---- */

struct victim {
    int64_t id; /* 0: there is none */
    struct prefix_key key;
    double rank;
};

static int victim_find(struct victim *v, struct prefix_db *d, enum prefix_stmt which,
                       const struct prefix_key *spare, struct err *e)
{
    sqlite3_stmt *st;
    bool row = false;
    *v = (struct victim){0};
    int rc = st_bind(&st, d, which, e, "b", spare ? spare->b : (const void *)"",
                     spare ? sizeof spare->b : (size_t)0);
    if (!rc)
        rc = db_step(&row, st, e);
    if (!rc && row) {
        v->id = sqlite3_column_int64(st, 0);
        v->rank = sqlite3_column_double(st, 2);
        column_bytes(&v->key, sizeof v->key, st, 1);
    }
    st_done(st);
    return rc;
}

int rows_evict(struct prefix_room *room, struct prefix_db *d, struct err *e)
{
    uint64_t used, file;
    int rc = prefix_db_size(&used, &file, d, e);
    room->n_evicted = 0;
    while (!rc && used > room->bytes && room->n_evicted < room->rows) {
        struct victim v;
        rc = victim_find(&v, d, ST_VICTIM, room->spare, e);
        if (!rc && !v.id) /* no page without successors: only in a file that others made */
            rc = victim_find(&v, d, ST_ANY_VICTIM, room->spare, e);
        if (rc || !v.id || v.rank > room->below)
            break;
        rc = row_drop(d, v.id, e);
        if (!rc)
            rc = st_key(d, ST_REMEMBER, &v.key, e);
        if (!rc)
            rc = prefix_db_size(&used, &file, d, e);
        if (v.rank > d->floor)
            d->floor = v.rank;
        room->n_evicted++;
    }
    if (!rc && room->n_evicted)
        rc = st_id(d, ST_PRUNE, PREFIX_N_GONE, e);
    room->fits = !rc && used <= room->bytes;
    return rc;
}

int prefix_db_shrink(bool *more, struct prefix_db *d, struct err *e)
{
    int64_t n = 0;
    int rc = db_exec(d->db, "PRAGMA incremental_vacuum(1024)", e);
    if (!rc)
        rc = st_number(&n, d, ST_N_FREE, e);
    *more = !rc && n > 0;
    return rc;
}
