/* What `ingot cache` does with the prefix store: list, trim, clear, export, import. Works on
 * connections of its own, in short transactions, so that a server goes on beside it. A file to be
 * imported is a stranger's: every page is checked before it comes in. */
#include <inttypes.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "store/prefix_internal.h"

enum {
    STEP_ROWS = 64,        /* a transaction at most */
    STEP_BYTES = 16 << 20, /* likewise */
};

static int tool_begin(struct prefix_db *d, struct prefix_store *p, struct err *e)
{
    pthread_mutex_lock(&p->tools_lock);
    if (prefix_db_open(d, p->path, PREFIX_WRITE, e)) {
        pthread_mutex_unlock(&p->tools_lock);
        return -1;
    }
    sqlite3_busy_timeout(d->db, 10000);
    d->max_bytes = p->max_bytes;
    return 0;
}

static int tool_end(struct prefix_db *d, struct prefix_store *p, int rc)
{
    prefix_db_close(d);
    pthread_mutex_unlock(&p->tools_lock);
    return rc;
}

/* ---- list ---- */

static int models_read(struct buf *rows, sqlite3 *db, struct err *e)
{
    sqlite3_stmt *st = NULL;
    bool row = true;
    int rc = db_query(&st, db, e,
                      "SELECT tag, count(*), sum(length(ids)) / 4, sum(kv_bytes), sum(stored), "
                      "sum(hits), max(used) FROM page GROUP BY tag ORDER BY 5 DESC, 1",
                      "");
    while (!rc && row) {
        rc = db_step(&row, st, e);
        if (rc || !row)
            break;
        uint64_t v[7];
        for (int i = 0; i < 7; i++)
            v[i] = (uint64_t)sqlite3_column_int64(st, i);
        struct prefix_model m = {v[0], v[1], v[2], v[3], v[4], v[5], (int64_t)v[6]};
        buf_put(rows, &m, sizeof m);
    }
    sqlite3_finalize(st);
    return rc ? rc : rows->failed ? err_set(e, ERR_MEMORY, "out of memory listing the cache") : 0;
}

int prefix_models(struct prefix_store *p, struct prefix_model **out, size_t *n, struct err *e)
{
    struct prefix_db d;
    struct buf rows = {0};
    *out = NULL;
    *n = 0;
    if (tool_begin(&d, p, e))
        return -1;
    int rc = tool_end(&d, p, models_read(&rows, d.db, e));
    if (rc) {
        buf_fini(&rows);
        return rc;
    }
    *out = (void *)rows.data;
    *n = rows.n / sizeof **out;
    return 0;
}

/* ---- trim and clear ---- */

/* Hand free pages back, then let the file itself shrink: it does when the log is written back. */
static int file_shrink(struct prefix_db *d, struct err *e)
{
    int rc = 0;
    for (bool more = true; !rc && more;)
        rc = prefix_db_shrink(&more, d, e);
    /* A reader in the middle of something only delays this to the next one. */
    if (!rc)
        sqlite3_wal_checkpoint_v2(d->db, NULL, SQLITE_CHECKPOINT_TRUNCATE, NULL, NULL);
    return rc;
}

int prefix_trim(struct prefix_store *p, uint64_t max_bytes, struct err *e)
{
    struct prefix_db d;
    struct prefix_room room = {.bytes = max_bytes, .rows = STEP_ROWS, .below = INFINITY};
    uint64_t n = 0;
    if (tool_begin(&d, p, e))
        return -1;
    int rc = 0;
    do {
        rc = prefix_db_begin(&d, e);
        if (!rc)
            rc = prefix_db_end(&d, rows_evict(&room, &d, e), e);
        n += rc ? 0 : room.n_evicted;
    } while (!rc && !room.fits && room.n_evicted);
    if (!rc)
        rc = file_shrink(&d, e);
    pthread_mutex_lock(&p->lock);
    p->n.evicted += n;
    pthread_mutex_unlock(&p->lock);
    return tool_end(&d, p, rc);
}

/* Remove up to STEP_ROWS rows above *after; *after is 0 when there are none left. */
static int clear_step(int64_t *after, struct prefix_db *d, const uint64_t *model_tag, struct err *e)
{
    int rc = 0;
    sqlite3_stmt *st = d->st[ST_NEXT_OF_MODEL];
    for (int i = 0; !rc && *after && i < STEP_ROWS; i++) {
        bool row = false;
        sqlite3_bind_int64(st, 1, *after == -1 ? INT64_MIN : *after);
        sqlite3_bind_int64(st, 2, !model_tag);
        sqlite3_bind_int64(st, 3, model_tag ? (int64_t)*model_tag : 0);
        rc = db_step(&row, st, e);
        *after = !rc && row ? sqlite3_column_int64(st, 0) : 0;
        sqlite3_reset(st);
        if (!rc && row)
            rc = row_drop(d, *after, e);
    }
    return rc;
}

int prefix_clear(struct prefix_store *p, const uint64_t *model_tag, struct err *e)
{
    struct prefix_db d;
    int64_t after = -1;
    prefix_flush(p, NULL); /* pages still waiting must not come after the clearing */
    if (tool_begin(&d, p, e))
        return -1;
    int rc = 0;
    while (!rc && after) {
        rc = prefix_db_begin(&d, e);
        if (!rc)
            rc = prefix_db_end(&d, clear_step(&after, &d, model_tag, e), e);
    }
    if (!rc && !model_tag)
        rc = db_exec(d.db,
                     "DELETE FROM gone; DELETE FROM data WHERE id NOT IN (SELECT id FROM page)", e);
    if (!rc)
        rc = file_shrink(&d, e);
    return tool_end(&d, p, rc);
}

/* ---- export and import: rows from one file to another ---- */

struct copy {
    struct prefix_db from, to;
    struct prefix_moved *m;
    prefix_progress progress;
    void *user;
    uint64_t seen, total;
    void *kv;
    size_t kv_room;
};

static int kv_room(struct copy *c, size_t n, struct err *e)
{
    if (n <= c->kv_room)
        return 0;
    mem_free(c->kv);
    c->kv = mem_alloc(n);
    c->kv_room = c->kv ? n : 0;
    return c->kv ? 0 : err_set(e, ERR_MEMORY, "out of memory for a page of %zu bytes", n);
}

/* r is a row of `from` that passed its head's checksum. */
static int row_copy(struct copy *c, struct prefix_row *r, struct err *e)
{
    struct prefix_row have;
    enum row_state s;
    bool added = false;
    uint64_t n_evicted = 0;
    if (row_find(&s, &have, &c->to, &r->key, e))
        return -1;
    if (s == ROW_OK) { /* also with other token ids: what is there has been used here */
        c->m->known++;
        return 0;
    }
    if (s == ROW_BAD && row_drop(&c->to, have.id, e))
        return -1;
    if (kv_room(c, r->kv_bytes, e) || row_load(&s, c->kv, &c->from, r, e))
        return -1;
    if (s != ROW_OK) {
        c->m->corrupt++;
        return 0;
    }
    if (r->kv_bytes > c->to.max_bytes / 2) { /* as prefix_put: it would only clear the rest away */
        c->m->outvalued++;
        return 0;
    }
    if (row_admit(&added, &n_evicted, &c->to, r, r->packed ? c->from.stage : c->kv, e))
        return -1;
    c->m->pages += added;
    c->m->outvalued += !added;
    return 0;
}

/* One transaction's worth of rows above *after; *after stays when there are none left. */
static int copy_step(struct copy *c, int64_t *after, struct err *e)
{
    struct prefix_row r;
    uint64_t bytes = 0;
    int rc = prefix_db_begin(&c->to, e);
    if (rc)
        return rc;
    /* One view of a file that others may be writing: a head and its body belong together. */
    rc = db_exec(c->from.db, "BEGIN", e);
    for (int i = 0; !rc && i < STEP_ROWS && bytes < STEP_BYTES; i++) {
        enum row_state s = ROW_NONE;
        rc = row_next(&s, &r, &c->from, *after, e);
        if (rc || s == ROW_NONE)
            break;
        *after = r.id;
        c->seen++;
        c->m->corrupt += s == ROW_BAD;
        if (s != ROW_OK)
            continue;
        bytes += r.stored_bytes;
        rc = row_copy(c, &r, e);
    }
    if (!sqlite3_get_autocommit(c->from.db))
        sqlite3_exec(c->from.db, "COMMIT", NULL, NULL, NULL);
    return prefix_db_end(&c->to, rc, e);
}

static int copy_run(struct copy *c, struct err *e)
{
    int64_t after = 0, before = -1, total = 0;
    int rc = db_number(&total, c->from.db, 0, "SELECT count(*) FROM page", e);
    c->total = (uint64_t)MAX(total, 0);
    while (!rc && after != before) {
        before = after;
        rc = copy_step(c, &after, e);
        if (!rc && c->progress && c->progress(c->user, MIN(c->seen, c->total), c->total))
            rc = err_set(e, ERR_CANCELLED, "cancelled after %" PRIu64 " of %" PRIu64 " pages",
                         MIN(c->seen, c->total), c->total);
    }
    return rc;
}

static void copy_fini(struct copy *c)
{
    prefix_db_close(&c->from);
    prefix_db_close(&c->to);
    mem_free(c->kv);
}

/* Make the file durable and give it its name; link refuses a name that came up meanwhile. */
static int file_finish(const char *tmp, const char *path, struct err *e)
{
    int fd = open(tmp, O_RDONLY | O_CLOEXEC);
    int rc = fd < 0 || fsync(fd) ? err_errno(e, "cannot write '%s'", tmp) : 0;
    if (fd >= 0)
        close(fd);
    if (!rc && link(tmp, path)) {
        /* Some file systems have no links: there the check made before has to do. */
        if (errno == EEXIST)
            rc = err_set(e, ERR_EXISTS, "'%s' is there already; name another file", path);
        else if (rename(tmp, path))
            rc = err_errno(e, "cannot rename '%s' to '%s'", tmp, path);
    }
    return rc;
}

int prefix_export(struct prefix_store *p, struct prefix_moved *m, const char *path,
                  prefix_progress progress, void *user, struct err *e)
{
    char tmp[STORE_PATH_BYTES];
    struct copy c = {.m = m, .progress = progress, .user = user};
    *m = (struct prefix_moved){0};
    if (access(path, F_OK) == 0)
        return err_set(e, ERR_EXISTS, "'%s' is there already; name another file", path);
    const char *slash = strrchr(path, '/');
    if (slash && slash > path) {
        snprintf(tmp, sizeof tmp, "%.*s", (int)(slash - path), path);
        if (access(tmp, F_OK))
            return err_set(e, ERR_NOT_FOUND, "the directory '%s' does not exist; create it first",
                           tmp);
    }
    if (snprintf(tmp, sizeof tmp, "%s.%ld.partial", path, (long)getpid()) >= (int)sizeof tmp)
        return err_set(e, ERR_LIMIT, "path too long: '%.200s...'", path);
    prefix_flush(p, NULL); /* what could not be written is not there to be exported */
    if (tool_begin(&c.from, p, e))
        return -1;
    if (unlink(tmp) && errno != ENOENT)
        return tool_end(&c.from, p, err_errno(e, "cannot replace '%s'", tmp));
    int rc = prefix_db_open(&c.to, tmp, PREFIX_FRESH, e);
    c.to.max_bytes = UINT64_MAX;
    if (!rc)
        rc = copy_run(&c, e);
    copy_fini(&c);
    if (!rc)
        rc = file_finish(tmp, path, e);
    unlink(tmp);
    pthread_mutex_unlock(&p->tools_lock);
    return rc;
}

int prefix_import(struct prefix_store *p, struct prefix_moved *m, const char *path,
                  prefix_progress progress, void *user, struct err *e)
{
    struct copy c = {.m = m, .progress = progress, .user = user};
    *m = (struct prefix_moved){0};
    if (access(path, R_OK))
        return err_errno(e, "cannot read '%s'", path);
    if (tool_begin(&c.to, p, e))
        return -1;
    struct err why = {0};
    int rc = prefix_db_open(&c.from, path, PREFIX_READ, &why);
    if (rc && why.code == ERR_CORRUPT)
        err_set(e, ERR_CORRUPT,
                "'%s' is no prefix cache, or damaged; give a file that `ingot cache export` made",
                path);
    else if (rc)
        err_set(e, why.code, "%s", why.msg);
    if (!rc)
        rc = copy_run(&c, e);
    copy_fini(&c);
    pthread_mutex_unlock(&p->tools_lock);
    return rc;
}
