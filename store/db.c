/* SQLite as the store uses it: our allocator behind it, our errors in front of it, statements that
 * prepare and bind in one call. Holds no state but SQLite's own; connections belong to callers. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "store/store_internal.h"

/* SQLite wants to know the size of what it allocated: it stands in front of the bytes. */
enum { MEM_HEAD = 16 };

static void *lib_alloc(int n)
{
    size_t *p = n < 0 ? NULL : mem_alloc((size_t)n + MEM_HEAD);
    if (!p)
        return NULL;
    *p = (size_t)n;
    return (char *)p + MEM_HEAD;
}

static void lib_free(void *p)
{
    if (p)
        mem_free((char *)p - MEM_HEAD);
}

static void *lib_realloc(void *p, int n)
{
    size_t *q = n < 0 ? NULL : mem_realloc((char *)p - MEM_HEAD, (size_t)n + MEM_HEAD);
    if (!q)
        return NULL;
    *q = (size_t)n;
    return (char *)q + MEM_HEAD;
}

static int lib_size(void *p)
{
    return p ? (int)*(size_t *)((char *)p - MEM_HEAD) : 0;
}

static int lib_roundup(int n)
{
    return (n + 7) & ~7;
}

static int lib_init(void *unused)
{
    return SQLITE_OK;
}

static void lib_shutdown(void *unused)
{
}

/* Once a process, before the first connection. Not pthread_once: a first try that ran out of memory
 * may be repeated. */
static int lib_start(struct err *e)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static bool configured;
    static const sqlite3_mem_methods methods = {lib_alloc,   lib_free, lib_realloc,  lib_size,
                                                lib_roundup, lib_init, lib_shutdown, NULL};
    pthread_mutex_lock(&lock);
    if (!configured) {
        /* Statistics would put a process-wide mutex around every allocation. */
        sqlite3_config(SQLITE_CONFIG_MEMSTATUS, 0);
        sqlite3_config(SQLITE_CONFIG_MALLOC, &methods);
        configured = true;
    }
    int rc = sqlite3_initialize();
    pthread_mutex_unlock(&lock);
    return rc ? err_set(e, ERR_MEMORY, "cannot start SQLite: %s", sqlite3_errstr(rc)) : 0;
}

static enum err_code code_of(int rc)
{
    if (rc == SQLITE_IOERR_NOMEM)
        return ERR_MEMORY;
    if (rc == SQLITE_IOERR_CORRUPTFS || rc == SQLITE_IOERR_SHORT_READ)
        return ERR_CORRUPT;
    switch (rc & 0xff) {
    case SQLITE_FULL:
        return ERR_FULL;
    case SQLITE_NOMEM:
        return ERR_MEMORY;
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
        return ERR_BUSY;
    case SQLITE_ERROR: /* our statements are right, so the tables are not what they should be */
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
        return ERR_CORRUPT;
    case SQLITE_TOOBIG:
        return ERR_LIMIT;
    default:
        return ERR_IO;
    }
}

static const char *advice_of(enum err_code code)
{
    switch (code) {
    case ERR_FULL:
        return "; free some space and try again";
    case ERR_BUSY:
        return "; another process is using it, try again";
    case ERR_CORRUPT:
        return "; it is damaged: restore it, or move it away to begin anew";
    default:
        return "";
    }
}

int db_fail(sqlite3 *db, int rc, struct err *e)
{
    const char *path = db ? sqlite3_db_filename(db, "main") : NULL;
    enum err_code code = code_of(rc);
    int no = db && (rc & 0xff) != SQLITE_FULL ? sqlite3_system_errno(db) : 0;
    bool os = no && ((rc & 0xff) == SQLITE_CANTOPEN || (rc & 0xff) == SQLITE_IOERR);
    if (os && (no == ENOSPC || no == EDQUOT))
        code = ERR_FULL; /* the log's index has no room, say */
    const char *why = code == ERR_MEMORY ? "out of memory" : sqlite3_errstr(rc & 0xff);
    if (db && sqlite3_extended_errcode(db) == rc && code != ERR_MEMORY)
        why = sqlite3_errmsg(db);
    return err_set(e, code, "'%s': %s%s%s%s", path && *path ? path : "database", why,
                   os ? ": " : "", os ? strerror(no) : "", advice_of(code));
}

/* Name of a database as a URI, so that `immutable` can be said. */
static int uri_of(struct buf *out, const char *path, const char *options, struct err *e)
{
    buf_puts(out, "file:");
    for (; *path; path++) {
        if (strchr("?#%", *path) || (unsigned char)*path < 0x20)
            buf_printf(out, "%%%02x", (unsigned char)*path);
        else
            buf_putc(out, *path);
    }
    buf_puts(out, options);
    return out->failed ? err_set(e, ERR_MEMORY, "out of memory opening a database") : 0;
}

int db_open(sqlite3 **out, const char *path, enum db_mode mode, struct err *e)
{
    static const int flags[] = {
        [DB_CREATE] = SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE,
        [DB_WRITE] = SQLITE_OPEN_READWRITE,
        [DB_READ] = SQLITE_OPEN_READONLY,
        [DB_IMMUTABLE] = SQLITE_OPEN_READONLY,
    };
    struct buf uri = {0};
    *out = NULL;
    if (lib_start(e) || uri_of(&uri, path, mode == DB_IMMUTABLE ? "?immutable=1" : "", e)) {
        buf_fini(&uri);
        return -1;
    }
    sqlite3 *db = NULL;
    int rc = sqlite3_open_v2(buf_str(&uri), &db,
                             flags[mode] | SQLITE_OPEN_URI | SQLITE_OPEN_NOMUTEX |
                                 SQLITE_OPEN_PRIVATECACHE | SQLITE_OPEN_EXRESCODE,
                             NULL);
    buf_fini(&uri);
    if (rc) {
        int no = db ? sqlite3_system_errno(db) : 0;
        sqlite3_close(db);
        return err_set(e, code_of(rc), "cannot open '%s': %s", path,
                       no ? strerror(no) : sqlite3_errstr(rc));
    }
    sqlite3_busy_timeout(db, 10000);
    /* A database is data, also one that a stranger made: its schema runs no code of ours. */
    sqlite3_db_config(db, SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0, NULL);
    sqlite3_db_config(db, SQLITE_DBCONFIG_DEFENSIVE, 1, NULL);
    *out = db;
    return 0;
}

void db_close(sqlite3 *db)
{
    sqlite3_close(db);
}

int db_exec(sqlite3 *db, const char *sql, struct err *e)
{
    int rc = sqlite3_exec(db, sql, NULL, NULL, NULL);
    return rc ? db_fail(db, rc, e) : 0;
}

static int query(sqlite3_stmt **st, sqlite3 *db, struct err *e, const char *sql, const char *types,
                 va_list ap)
{
    int rc = sqlite3_prepare_v2(db, sql, -1, st, NULL);
    for (int i = 0; !rc && types[i]; i++) {
        const void *p;
        switch (types[i]) {
        case 's':
            rc = sqlite3_bind_text(*st, i + 1, va_arg(ap, const char *), -1, SQLITE_STATIC);
            break;
        case 'i':
            rc = sqlite3_bind_int64(*st, i + 1, va_arg(ap, int64_t));
            break;
        default:
            p = va_arg(ap, const void *);
            rc = sqlite3_bind_blob64(*st, i + 1, p, va_arg(ap, size_t), SQLITE_STATIC);
        }
    }
    if (!rc)
        return 0;
    db_fail(db, rc, e);
    sqlite3_finalize(*st);
    *st = NULL;
    return -1;
}

int db_query(sqlite3_stmt **st, sqlite3 *db, struct err *e, const char *sql, const char *types, ...)
{
    va_list ap;
    va_start(ap, types);
    int rc = query(st, db, e, sql, types, ap);
    va_end(ap);
    return rc;
}

int db_step(bool *row, sqlite3_stmt *st, struct err *e)
{
    int rc = sqlite3_step(st);
    *row = rc == SQLITE_ROW;
    return *row || rc == SQLITE_DONE ? 0 : db_fail(sqlite3_db_handle(st), rc, e);
}

int db_run(sqlite3 *db, struct err *e, const char *sql, const char *types, ...)
{
    sqlite3_stmt *st = NULL;
    va_list ap;
    va_start(ap, types);
    int rc = query(&st, db, e, sql, types, ap);
    va_end(ap);
    for (bool row = true; !rc && row;)
        rc = db_step(&row, st, e);
    sqlite3_finalize(st);
    return rc;
}

int db_number(int64_t *v, sqlite3 *db, int64_t or_else, const char *sql, struct err *e)
{
    sqlite3_stmt *st = NULL;
    bool row = false;
    int rc = db_query(&st, db, e, sql, "");
    if (!rc)
        rc = db_step(&row, st, e);
    *v = !rc && row ? sqlite3_column_int64(st, 0) : or_else;
    sqlite3_finalize(st);
    return rc;
}

int db_begin(sqlite3 *db, struct err *e)
{
    return db_exec(db, "BEGIN IMMEDIATE", e);
}

int db_end(sqlite3 *db, int rc, struct err *e)
{
    if (!rc)
        rc = db_exec(db, "COMMIT", e);
    /* SQLite has rolled back by itself after some faults; asking twice is harmless. */
    if (rc && !sqlite3_get_autocommit(db))
        sqlite3_exec(db, "ROLLBACK", NULL, NULL, NULL);
    return rc;
}

bool db_text(char *dst, size_t cap, sqlite3_stmt *st, int column)
{
    const unsigned char *p = sqlite3_column_text(st, column);
    int n = sqlite3_column_bytes(st, column);
    dst[0] = 0;
    if (!p || (size_t)n >= cap || memchr(p, 0, (size_t)n))
        return false;
    memcpy(dst, p, (size_t)n);
    dst[n] = 0;
    return true;
}
