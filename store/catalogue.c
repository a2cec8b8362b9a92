/* The catalogue, ingot.db: opening and migrating it, and the rows that say which models there are
 * under which names. A name points at a model; a model is a digest in the store or at a linked
 * path. Refuses to write when the directory cannot be written. Owns the connection. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "store/store_internal.h"

enum { APP_ID = 0x494e4754 /* "INGT" */ };

/* Step i brings a catalogue from user_version i to i + 1. Only ever append. */
static const char *const migrations[] = {
    "CREATE TABLE model("
    " id INTEGER PRIMARY KEY, digest TEXT NOT NULL, link_path TEXT NOT NULL DEFAULT '',"
    " key TEXT NOT NULL, arch TEXT NOT NULL, quant TEXT NOT NULL, n_bytes INTEGER NOT NULL,"
    " n_params INTEGER NOT NULL, n_ctx INTEGER NOT NULL, n_shards INTEGER NOT NULL,"
    " added INTEGER NOT NULL, UNIQUE(digest, link_path)) STRICT;"
    "CREATE TABLE name("
    " name TEXT PRIMARY KEY COLLATE NOCASE,"
    " model INTEGER NOT NULL REFERENCES model(id)) STRICT, WITHOUT ROWID;"
    "CREATE INDEX name_model ON name(model);"
    "CREATE TABLE link_shard("
    " model INTEGER NOT NULL REFERENCES model(id) ON DELETE CASCADE, shard INTEGER NOT NULL,"
    " n_bytes INTEGER NOT NULL, mtime_ns INTEGER NOT NULL,"
    " PRIMARY KEY(model, shard)) STRICT, WITHOUT ROWID;"
    /* Model databases that nothing points at any more, until their file is gone. */
    "CREATE TABLE doomed(digest TEXT PRIMARY KEY) STRICT, WITHOUT ROWID;"
    "CREATE TABLE setting(key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;"
    "CREATE TABLE chat("
    " name TEXT PRIMARY KEY COLLATE NOCASE, json TEXT NOT NULL, saved INTEGER NOT NULL) STRICT;",
    "ALTER TABLE name ADD COLUMN added INTEGER NOT NULL DEFAULT 0;"
    "UPDATE name SET added = (SELECT added FROM model WHERE id = name.model);",
};

static int migrate(sqlite3 *db, const char *path, struct err *e)
{
    int64_t version, app = 0, tables = 0;
    if (db_begin(db, e))
        return -1;
    /* Read under the lock: another process may have done it meanwhile. */
    int rc = db_number(&version, db, 0, "PRAGMA user_version", e);
    if (!rc)
        rc = db_number(&app, db, 0, "PRAGMA application_id", e);
    if (!rc)
        rc = db_number(&tables, db, 0, "SELECT count(*) FROM sqlite_schema", e);
    if (!rc && app != APP_ID && (app || version || tables))
        rc = err_set(e, ERR_CORRUPT, "'%s' is a database of another program; choose another store",
                     path);
    if (!rc && version > (int64_t)ARRAY_LEN(migrations))
        rc =
            err_set(e, ERR_UNSUPPORTED,
                    "'%s' was written by a newer ingot (layout %lld, this one knows %zu); use that "
                    "one",
                    path, (long long)version, ARRAY_LEN(migrations));
    for (size_t i = (size_t)version; !rc && i < ARRAY_LEN(migrations); i++) {
        char pragma[80];
        snprintf(pragma, sizeof pragma, "PRAGMA user_version = %zu; PRAGMA application_id = %d",
                 i + 1, APP_ID);
        if ((rc = db_exec(db, migrations[i], e)) == 0)
            rc = db_exec(db, pragma, e);
    }
    return db_end(db, rc, e);
}

static int make_dirs(const char *path, struct err *e)
{
    char part[STORE_PATH_BYTES];
    size_t n = strlen(path);
    if (!n || n >= sizeof part)
        return err_set(e, ERR_USAGE, "the store's directory needs a name of 1 to %d bytes",
                       STORE_PATH_BYTES - 1);
    memcpy(part, path, n + 1);
    for (size_t i = 1; i <= n; i++) {
        if (part[i] && part[i] != '/')
            continue;
        char c = part[i];
        part[i] = 0;
        /* Only what we make is private: keys and chats are in it. */
        if (mkdir(part, 0700) && errno != EEXIST && errno != EROFS && errno != EACCES)
            return err_errno(e, "cannot create the store '%s' (choose another with --home)", path);
        part[i] = c;
    }
    return 0;
}

/* The directory by flag, environment, home; made, and its absolute path kept. */
static int find_home(struct store *s, const char *home, struct err *e)
{
    char path[STORE_PATH_BYTES], real[PATH_MAX];
    if (!home || !*home)
        home = getenv("INGOT_HOME");
    if (!home || !*home) {
        const char *user = getenv("HOME");
        if (!user || !*user)
            return err_set(e, ERR_USAGE,
                           "no place for the store: neither INGOT_HOME nor HOME is set");
        if (snprintf(path, sizeof path, "%s/.ingot", user) >= (int)sizeof path)
            return err_set(e, ERR_LIMIT, "HOME is too long");
        home = path;
    }
    struct stat st;
    if (make_dirs(home, e))
        return -1;
    if (!realpath(home, real) || stat(real, &st))
        return err_errno(e, "cannot open the store '%s'", home);
    if (!S_ISDIR(st.st_mode))
        return err_set(e, ERR_USAGE, "the store '%s' is a file; name a directory", home);
    s->home = mem_strdup(real);
    return s->home ? 0 : err_set(e, ERR_MEMORY, "out of memory opening the store");
}

/* The first switch of a new file to the log is refused at once, whatever the busy timeout says, while
 * another process makes the same switch. */
static int use_log(sqlite3 *db, struct err *e)
{
    enum { TRIES = 500, PAUSE_US = 10000 };
    struct err why = {0};
    for (int i = 0; i < TRIES; i++) {
        why = (struct err){0};
        if (db_exec(db, "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL", &why) == 0)
            return 0;
        if (why.code != ERR_BUSY)
            break;
        usleep(PAUSE_US);
    }
    return err_set(e, why.code, "%s", why.msg);
}

static int open_writable(struct store *s, const char *path, struct err *e)
{
    char models[STORE_PATH_BYTES];
    if (store_path(models, s, "models", e))
        return -1;
    if (mkdir(models, 0700) && errno != EEXIST)
        return err_errno(e, "cannot create '%s'", models);
    if (db_open(&s->db, path, DB_CREATE, e))
        return -1;
    sqlite3_db_config(s->db, SQLITE_DBCONFIG_ENABLE_FKEY, 1, NULL);
    if (use_log(s->db, e))
        return -1;
    return migrate(s->db, path, e);
}

static const char *why_read_only(const struct store *s)
{
    return s->full ? "is on a full disk; free some space"
                   : "cannot be written; choose another with INGOT_HOME or change its permissions";
}

/* A directory that cannot be written (an image, another user's, a full disk): without locks, which
 * need writing; nobody can write there at the same time either. */
static int open_read_only(struct store *s, const char *path, struct err *e)
{
    int64_t version;
    char wal[STORE_PATH_BYTES];
    struct stat st;
    s->read_only = true;
    if (access(path, F_OK))
        return err_set(e, s->full ? ERR_FULL : ERR_IO,
                       "the store '%s' %s (there is nothing in it yet)", s->home, why_read_only(s));
    /* Changes in the log would be missed without locks. */
    if (store_path(wal, s, "ingot.db-wal", e))
        return -1;
    if (stat(wal, &st) == 0 && st.st_size > 0 && s->full)
        return err_set(e, ERR_FULL, "the store '%s' was not closed, and %s", s->home,
                       why_read_only(s));
    if (stat(wal, &st) == 0 && st.st_size > 0)
        return err_set(e, ERR_BUSY,
                       "the store '%s' is in use by another user, or was not closed, and cannot be "
                       "written; open it once with the right to write",
                       s->home);
    if (db_open(&s->db, path, DB_IMMUTABLE, e) ||
        db_number(&version, s->db, 0, "PRAGMA user_version", e))
        return -1;
    if (version != (int64_t)ARRAY_LEN(migrations) && s->full)
        return err_set(e, ERR_FULL, "the store '%s' has to be set up, but it %s", s->home,
                       why_read_only(s));
    if (version != (int64_t)ARRAY_LEN(migrations))
        return err_set(e, ERR_UNSUPPORTED,
                       "the store '%s' has layout %lld, not %zu, and cannot be written to change "
                       "that",
                       s->home, (long long)version, ARRAY_LEN(migrations));
    return 0;
}

/* Opening for writing takes some bytes, of the log's index at least. Where there are none, what is
 * in the store can still be read, and removed (remove_from_full). */
static int open_as_can_be(struct store *s, const char *path, struct err *e)
{
    struct err why = {0};
    bool writable = access(s->home, W_OK) == 0 && (access(path, F_OK) || access(path, W_OK) == 0);
    if (!writable)
        return open_read_only(s, path, e);
    if (open_writable(s, path, &why) == 0)
        return 0;
    if (why.code != ERR_FULL)
        return err_set(e, why.code, "%s", why.msg);
    log_line(LOG_INFO, "%s; the store is opened for reading", why.msg);
    db_close(s->db);
    s->db = NULL;
    s->full = true;
    return open_read_only(s, path, e);
}

int store_open(struct store **out, const char *home, struct err *e)
{
    char path[STORE_PATH_BYTES];
    struct store *s = mem_zalloc(sizeof *s);
    *out = NULL;
    if (!s)
        return err_set(e, ERR_MEMORY, "out of memory opening the store");
    pthread_mutex_init(&s->lock, NULL);
    s->batch_chunks = 32;
    s->lock_wait_ms = 3000;
    if (find_home(s, home, e) || store_path(path, s, "ingot.db", e))
        goto fail;
    if (open_as_can_be(s, path, e))
        goto fail;
    if (!s->read_only) {
        sweep_doomed(s);
        sweep_partials(s);
    }
    *out = s;
    return 0;
fail:
    store_close(s);
    return -1;
}

void store_close(struct store *s)
{
    if (!s)
        return;
    db_close(s->db);
    pthread_mutex_destroy(&s->lock);
    mem_free(s->home);
    mem_free(s);
}

const char *store_home(const struct store *s)
{
    return s->home;
}

int store_writable(const struct store *s, struct err *e)
{
    if (!s->read_only)
        return 0;
    return err_set(e, s->full ? ERR_FULL : ERR_IO, "the store '%s' %s", s->home, why_read_only(s));
}

/* ---- rows ---- */

#define MODEL_COLUMNS                                                                              \
    "name.name, digest, arch, quant, link_path, n_bytes, n_params, n_ctx, name.added, n_shards,"   \
    " key"
#define MODEL_TABLES " FROM name JOIN model ON model.id = name.model "

static int damaged_row(sqlite3_stmt *st, struct err *e)
{
    return err_set(e, ERR_CORRUPT, "'%s' has a damaged row; restore it from a backup",
                   sqlite3_db_filename(sqlite3_db_handle(st), "main"));
}

static int read_model(struct store_model *m, char key[STORE_KEY_BYTES], sqlite3_stmt *st,
                      struct err *e)
{
    char unused[STORE_KEY_BYTES];
    *m = (struct store_model){0};
    if (!db_text(m->name, sizeof m->name, st, 0) || !db_text(m->digest, sizeof m->digest, st, 1) ||
        !db_text(m->arch, sizeof m->arch, st, 2) || !db_text(m->quant, sizeof m->quant, st, 3) ||
        !db_text(m->link_path, sizeof m->link_path, st, 4) ||
        !db_text(key ? key : unused, STORE_KEY_BYTES, st, 10)) {
        if (sqlite3_errcode(sqlite3_db_handle(st)) == SQLITE_NOMEM)
            return err_set(e, ERR_MEMORY, "out of memory reading the catalogue");
        return damaged_row(st, e);
    }
    m->n_bytes = (uint64_t)sqlite3_column_int64(st, 5);
    m->n_params = (uint64_t)sqlite3_column_int64(st, 6);
    m->n_ctx = (uint32_t)sqlite3_column_int64(st, 7);
    m->added = sqlite3_column_int64(st, 8);
    m->n_shards = (uint32_t)sqlite3_column_int64(st, 9);
    return m->n_shards && m->n_shards <= STORE_MAX_SHARDS ? 0 : damaged_row(st, e);
}

/* All rows of a query whose parameters are the text `a` (and its length where the query asks for
 * it, as ?2). The lock is held. */
static int read_models(struct store_model **out, size_t *n, struct store *s, const char *sql,
                       const char *a, struct err *e)
{
    sqlite3_stmt *st = NULL;
    struct store_model *all = NULL;
    size_t used = 0, cap = 0;
    bool row = true;
    int two = a && strstr(sql, "?2");
    int rc = db_query(&st, s->db, e, sql,
                      !a    ? ""
                      : two ? "si"
                            : "s",
                      a, (int64_t)(a ? strlen(a) : 0));
    while (!rc && !(rc = db_step(&row, st, e)) && row) {
        if (used == cap) {
            cap = cap ? cap * 2 : 8;
            struct store_model *more = mem_realloc(all, cap * sizeof *all);
            if (!more) {
                rc = err_set(e, ERR_MEMORY, "out of memory listing models");
                break;
            }
            all = more;
        }
        rc = read_model(&all[used++], NULL, st, e);
    }
    sqlite3_finalize(st);
    if (rc) {
        mem_free(all);
        return -1;
    }
    *out = all;
    *n = used;
    return 0;
}

int store_list(struct store *s, struct store_model **out, size_t *n, struct err *e)
{
    *out = NULL;
    *n = 0;
    pthread_mutex_lock(&s->lock);
    int rc =
        read_models(out, n, s, "SELECT " MODEL_COLUMNS MODEL_TABLES "ORDER BY name.name", NULL, e);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

static int get_locked(bool *found, struct store *s, struct store_model *m,
                      char key[STORE_KEY_BYTES], const char *name, struct err *e)
{
    sqlite3_stmt *st = NULL;
    *found = false;
    int rc = db_query(&st, s->db, e, "SELECT " MODEL_COLUMNS MODEL_TABLES "WHERE name.name = ?1",
                      "s", name);
    if (!rc && !(rc = db_step(found, st, e)) && *found)
        rc = read_model(m, key, st, e);
    sqlite3_finalize(st);
    return rc;
}

int catalogue_get(bool *found, struct store *s, struct store_model *m, char key[STORE_KEY_BYTES],
                  const char *name, struct err *e)
{
    pthread_mutex_lock(&s->lock);
    int rc = get_locked(found, s, m, key, name, e);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

/* ---- finding by what a user may have typed ---- */

static int ambiguous(const char *wanted, const struct store_model *all, size_t n, struct err *e)
{
    err_set(e, ERR_USAGE, "'%s' may mean more than one model; name one of ", wanted);
    for (size_t i = 0; e && i < n; i++) {
        size_t used = strlen(e->msg);
        if (used + strlen(all[i].name) + 8 > sizeof e->msg) {
            snprintf(e->msg + used, sizeof e->msg - used, "...");
            break;
        }
        snprintf(e->msg + used, sizeof e->msg - used, "%s%s", i ? ", " : "", all[i].name);
    }
    return -1;
}

/* The rows of `sql` must all be one model. */
static int find_one(bool *found, struct store_model *m, struct store *s, const char *sql,
                    const char *wanted, struct err *e)
{
    struct store_model *all = NULL;
    size_t n = 0;
    if (read_models(&all, &n, s, sql, wanted, e))
        return -1;
    int rc = 0;
    for (size_t i = 1; i < n && !rc; i++)
        if (strcmp(all[i].digest, all[0].digest))
            rc = ambiguous(wanted, all, n, e);
    *found = n > 0;
    if (n)
        *m = all[0];
    mem_free(all);
    return rc;
}

static int not_found(struct store *s, const char *wanted, struct err *e)
{
    struct store_model *all = NULL;
    size_t n = 0;
    if (read_models(&all, &n, s, "SELECT " MODEL_COLUMNS MODEL_TABLES "ORDER BY name.name", NULL,
                    e))
        return -1;
    err_set(e, ERR_NOT_FOUND, "no model '%.200s' in the store%s", wanted,
            n ? "" : ", which is empty; `ingot import FILE.gguf` brings one in");
    if (e && !strchr(wanted, '/') && access(wanted, F_OK) == 0) {
        size_t at = strlen(e->msg);
        snprintf(e->msg + at, sizeof e->msg - at, "; for the file of that name write ./%.200s",
                 wanted);
    }
    size_t plain = e ? strlen(e->msg) : 0;
    name_suggest(e, wanted, all, n);
    if (e && n && !e->msg[plain])
        snprintf(e->msg + plain, sizeof e->msg - plain, "; `ingot list` shows what is there");
    mem_free(all);
    return -1;
}

/* ---- the ways to find, tried in turn; each says in *found whether it did ---- */

static int find_exact(bool *found, struct store_model *m, struct store *s, const char *name,
                      struct err *e)
{
    return get_locked(found, s, m, NULL, name, e);
}

/* `x:latest` is how some clients write `x`, and `x` may stand for the only `x:tag`. */
static int find_base(bool *found, struct store_model *m, struct store *s, const char *name,
                     struct err *e)
{
    char base[128];
    size_t n = strlen(name);
    if (n >= sizeof base)
        return 0;
    memcpy(base, name, n + 1);
    if (n > 7 && !strcasecmp(base + n - 7, ":latest"))
        base[n - 7] = 0;
    const char *slash = strrchr(base, '/');
    if (!*base || strchr(slash ? slash : base, ':'))
        return 0;
    if (get_locked(found, s, m, NULL, base, e))
        return -1;
    return *found ? 0
                  : find_one(found, m, s,
                             "SELECT " MODEL_COLUMNS MODEL_TABLES
                             "WHERE substr(name.name, 1, ?2 + 1) = ?1 || ':' COLLATE NOCASE "
                             "ORDER BY name.name",
                             base, e);
}

static int find_digest(bool *found, struct store_model *m, struct store *s, const char *name,
                       struct err *e)
{
    const char *hex = strncmp(name, "sha256:", 7) ? name : name + 7;
    size_t n = strlen(hex);
    if (n < 8 || n > 64 || strspn(hex, "0123456789abcdef") != n)
        return 0;
    return find_one(found, m, s,
                    "SELECT " MODEL_COLUMNS MODEL_TABLES
                    "WHERE substr(digest, 1, ?2) = ?1 ORDER BY link_path, name.name",
                    hex, e);
}

static int find_locked(struct store *s, struct store_model *m, const char *name, struct err *e)
{
    static int (*const ways[])(bool *, struct store_model *, struct store *, const char *,
                               struct err *) = {find_exact, find_base, find_digest};
    for (size_t i = 0; i < ARRAY_LEN(ways); i++) {
        bool found = false;
        if (ways[i](&found, m, s, name, e))
            return -1;
        if (found)
            return 0;
    }
    return not_found(s, name, e);
}

int store_find(struct store *s, struct store_model *m, const char *name, struct err *e)
{
    pthread_mutex_lock(&s->lock);
    int rc = find_locked(s, m, name, e);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

/* ---- changing ---- */

/* Models that no name points at leave the catalogue; their files follow (sweep_doomed). */
static int drop_unnamed(struct store *s, struct err *e)
{
    return db_exec(s->db,
                   "INSERT OR IGNORE INTO doomed SELECT digest FROM model"
                   " WHERE link_path = '' AND id NOT IN (SELECT model FROM name);"
                   "DELETE FROM model WHERE id NOT IN (SELECT model FROM name);",
                   e);
}

static int point_name(struct store *s, const struct store_model *m, bool replace, struct err *e)
{
    struct store_model old;
    bool found;
    if (get_locked(&found, s, &old, NULL, m->name, e))
        return -1;
    /* The same weights under the same name is no conflict: linked before, copied now, say. */
    if (found && !replace && strcmp(old.digest, m->digest))
        return err_set(e, ERR_EXISTS,
                       "the name '%s' is taken by another model; give another one with --name, or "
                       "let it go with --replace",
                       old.name);
    /* The time is the name's own; naming the same model so again does not change it. */
    return db_run(s->db, e,
                  "INSERT OR REPLACE INTO name(name, model, added)"
                  " SELECT ?1, id, coalesce((SELECT old.added FROM name AS old"
                  " WHERE old.name = ?1 AND old.model = model.id), ?4)"
                  " FROM model WHERE digest = ?2 AND link_path = ?3",
                  "sssi", m->name, m->digest, m->link_path, (int64_t)time(NULL));
}

static int put_links(struct store *s, const struct store_model *m, const struct link_shard *links,
                     struct err *e)
{
    int rc = 0;
    for (uint32_t i = 0; links && i < m->n_shards && !rc; i++)
        rc = db_run(s->db, e,
                    "INSERT OR REPLACE INTO link_shard SELECT id, ?1, ?2, ?3 FROM model"
                    " WHERE digest = ?4 AND link_path = ?5",
                    "iiiss", (int64_t)i, (int64_t)links[i].n_bytes, links[i].mtime_ns, m->digest,
                    m->link_path);
    return rc;
}

int catalogue_add(struct store *s, struct store_model *m, const char *key,
                  const struct link_shard *links, bool replace, struct err *e)
{
    bool found;
    pthread_mutex_lock(&s->lock);
    int rc = db_begin(s->db, e);
    if (rc) {
        pthread_mutex_unlock(&s->lock);
        return rc;
    }
    rc = db_run(s->db, e,
                "INSERT INTO model(digest, link_path, key, arch, quant, n_bytes, n_params, n_ctx,"
                " n_shards, added) VALUES(?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)"
                " ON CONFLICT(digest, link_path) DO UPDATE SET key = ?3",
                "sssssiiiii", m->digest, m->link_path, key, m->arch, m->quant, (int64_t)m->n_bytes,
                (int64_t)m->n_params, (int64_t)m->n_ctx, (int64_t)m->n_shards, (int64_t)time(NULL));
    if (!rc && !links)
        rc = db_run(s->db, e, "DELETE FROM doomed WHERE digest = ?1", "s", m->digest);
    if (!rc)
        rc = put_links(s, m, links, e);
    if (!rc)
        rc = point_name(s, m, replace, e);
    if (!rc)
        rc = drop_unnamed(s, e);
    if (!rc)
        rc = get_locked(&found, s, m, NULL, m->name, e);
    rc = db_end(s->db, rc, e);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

int catalogue_relink(struct store *s, const struct store_model *m, const struct link_shard *links,
                     struct err *e)
{
    if (store_writable(s, e))
        return -1;
    pthread_mutex_lock(&s->lock);
    int rc = db_begin(s->db, e);
    if (!rc)
        rc = db_end(s->db, put_links(s, m, links, e), e);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

int store_copy(struct store *s, const char *from, const char *to, struct err *e)
{
    struct store_model m, old;
    bool found = false;
    if (store_writable(s, e) || name_check(to, e))
        return -1;
    pthread_mutex_lock(&s->lock);
    int rc = db_begin(s->db, e);
    if (!rc) {
        rc = find_locked(s, &m, from, e);
        if (!rc)
            rc = get_locked(&found, s, &old, NULL, to, e);
        if (!rc && found)
            rc = err_set(e, ERR_EXISTS, "the name '%s' is taken; remove it first", old.name);
        if (!rc) {
            snprintf(m.name, sizeof m.name, "%s", to);
            rc = point_name(s, &m, false, e);
        }
        rc = db_end(s->db, rc, e);
    }
    pthread_mutex_unlock(&s->lock);
    return rc;
}

/* Unlink the file of a model that has no other name. */
static int unlink_last(struct store *s, const struct store_model *m, struct err *e)
{
    char path[STORE_PATH_BYTES];
    int64_t n_names = 0;
    sqlite3_stmt *st = NULL;
    bool row = false;
    int lock;
    if (*m->link_path)
        return store_writable(s, e); /* there is nothing of it here */
    int rc = db_query(&st, s->db, e,
                      "SELECT count(*)" MODEL_TABLES "WHERE digest = ?1 AND link_path = ''", "s",
                      m->digest);
    if (!rc && !(rc = db_step(&row, st, e)) && row)
        n_names = sqlite3_column_int64(st, 0);
    sqlite3_finalize(st);
    if (!rc && n_names != 1)
        rc = store_writable(s, e);
    if (rc || (rc = model_path(path, s, m->digest, e)) ||
        (rc =
             store_lock(&lock, s, m->digest, s->lock_wait_ms,
                        "the model is being imported or removed by another process; try again", e)))
        return rc;
    if (unlink(path) && errno != ENOENT)
        rc = err_errno(e, "cannot remove '%s'", path);
    close(lock);
    return rc;
}

/* On a full disk the catalogue has no room for a change, so that here the model's file goes first
 * and gives some. A kill between the two leaves a name without a file, which says so when it is
 * used and can be removed. */
static int remove_from_full(struct store *s, const char *name, struct err *e)
{
    struct store_model m;
    char path[STORE_PATH_BYTES];
    struct err why = {0};
    sqlite3 *db = s->db;
    if (find_locked(s, &m, name, e) || store_path(path, s, "ingot.db", e) || unlink_last(s, &m, e))
        return -1;
    s->db = NULL;
    if (open_writable(s, path, &why)) {
        db_close(s->db);
        s->db = db;
        return err_set(e, why.code,
                       "the weights of '%s' are removed, the name not yet: %s; free some space and "
                       "remove it again",
                       m.name, why.msg);
    }
    db_close(db);
    s->read_only = s->full = false;
    return 0;
}

int store_remove(struct store *s, const char *name, struct err *e)
{
    struct store_model m;
    pthread_mutex_lock(&s->lock);
    int fit = s->full ? remove_from_full(s, name, e) : store_writable(s, e);
    pthread_mutex_unlock(&s->lock);
    if (fit)
        return -1;
    pthread_mutex_lock(&s->lock);
    int rc = db_begin(s->db, e);
    if (!rc) {
        rc = find_locked(s, &m, name, e);
        if (!rc)
            rc = db_run(s->db, e, "DELETE FROM name WHERE name = ?1", "s", m.name);
        if (!rc)
            rc = drop_unnamed(s, e);
        rc = db_end(s->db, rc, e);
    }
    pthread_mutex_unlock(&s->lock);
    if (!rc)
        sweep_doomed(s);
    return rc;
}

/* ---- what imports ask ---- */

static int one_digest(char digest[65], struct store *s, const char *sql, const char *a,
                      struct err *e)
{
    sqlite3_stmt *st = NULL;
    bool row = false;
    digest[0] = 0;
    pthread_mutex_lock(&s->lock);
    int rc = db_query(&st, s->db, e, sql, "s", a);
    if (!rc && !(rc = db_step(&row, st, e)) && row)
        db_text(digest, 65, st, 0);
    sqlite3_finalize(st);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

int catalogue_by_key(char digest[65], struct store *s, const char *key, struct err *e)
{
    return one_digest(digest, s, "SELECT digest FROM model WHERE key = ?1 AND link_path = ''", key,
                      e);
}

int catalogue_links(struct link_shard **out, uint32_t *n, struct store *s,
                    const struct store_model *m, struct err *e)
{
    sqlite3_stmt *st = NULL;
    bool row = true;
    uint32_t used = 0;
    struct link_shard *all = mem_array(m->n_shards, sizeof *all);
    *out = NULL;
    if (!all)
        return err_set(e, ERR_MEMORY, "out of memory opening '%s'", m->name);
    pthread_mutex_lock(&s->lock);
    int rc = db_query(&st, s->db, e,
                      "SELECT link_shard.n_bytes, mtime_ns FROM link_shard JOIN model"
                      " ON model.id = model WHERE digest = ?1 AND link_path = ?2 ORDER BY shard",
                      "ss", m->digest, m->link_path);
    while (!rc && used < m->n_shards && !(rc = db_step(&row, st, e)) && row) {
        all[used].n_bytes = (uint64_t)sqlite3_column_int64(st, 0);
        all[used++].mtime_ns = sqlite3_column_int64(st, 1);
    }
    sqlite3_finalize(st);
    pthread_mutex_unlock(&s->lock);
    if (rc) {
        mem_free(all);
        return -1;
    }
    *out = all;
    *n = used;
    return 0;
}

int catalogue_link_digest(char digest[65], struct store *s, const char *path,
                          const struct link_shard *now, uint32_t n, struct err *e)
{
    struct store_model m = {.n_shards = n};
    struct link_shard *then = NULL;
    uint32_t n_then = 0;
    if (one_digest(m.digest, s, "SELECT digest FROM model WHERE link_path = ?1 ORDER BY id DESC",
                   path, e))
        return -1;
    digest[0] = 0;
    snprintf(m.link_path, sizeof m.link_path, "%s", path);
    if (!*m.digest || catalogue_links(&then, &n_then, s, &m, e))
        return *m.digest ? -1 : 0;
    if (n_then == n && !memcmp(then, now, n * sizeof *now))
        memcpy(digest, m.digest, sizeof m.digest);
    mem_free(then);
    return 0;
}
