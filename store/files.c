/* Files of the store beside the databases' insides: paths, advisory locks, and what is swept up
 * when the store opens. Owns no memory. */
#define _GNU_SOURCE /* F_OFD_SETLK */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "store/store_internal.h"

int store_path(char out[STORE_PATH_BYTES], const struct store *s, const char *rel, struct err *e)
{
    if (snprintf(out, STORE_PATH_BYTES, "%s/%s", s->home, rel) >= STORE_PATH_BYTES)
        return err_set(e, ERR_LIMIT, "the store's path '%.80s...' is too long", s->home);
    return 0;
}

int model_path(char out[STORE_PATH_BYTES], const struct store *s, const char *digest, struct err *e)
{
    char rel[96];
    snprintf(rel, sizeof rel, "models/%.64s.db", digest);
    return store_path(out, s, rel, e);
}

int partial_path(char out[STORE_PATH_BYTES], const struct store *s, const char *key, struct err *e)
{
    char rel[96];
    snprintf(rel, sizeof rel, "models/partial-%.32s.db", key);
    return store_path(out, s, rel, e);
}

int dir_sync(const char *path, struct err *e)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return err_errno(e, "cannot open '%s'", path);
    int rc = fsync(fd) ? err_errno(e, "cannot write '%s'", path) : 0;
    close(fd);
    return rc;
}

/* One lock file for everything: a name locks the byte whose position is its first 60 bits. Nothing
 * is ever unlinked, so there is no race about which file is meant. The lock belongs to the open
 * file, so two threads exclude each other as two processes do. */
int store_lock(int *fd, const struct store *s, const char *hex, int wait_ms, const char *what,
               struct err *e)
{
    char path[STORE_PATH_BYTES];
    uint8_t raw[8] = {0};
    *fd = -1;
    CHECK(hex_decode(raw, sizeof raw, hex, 16) == 8);
    if (store_path(path, s, "models/lock", e))
        return -1;
    int f = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (f < 0)
        return err_errno(e, "cannot open '%s'", path);
    uint64_t at = 0;
    for (int i = 0; i < 8; i++)
        at = at << 8 | raw[i];
    struct flock l = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)(at >> 4), .l_len = 1};
    for (int waited = 0; fcntl(f, F_OFD_SETLK, &l); waited += 20) {
        bool held = errno == EAGAIN || errno == EACCES;
        if (!held && errno != EINTR) {
            err_errno(e, "cannot lock '%s'", path);
        } else if (waited >= wait_ms) {
            err_set(e, ERR_BUSY, "%s", what);
        } else {
            nanosleep(&(struct timespec){.tv_nsec = 20 * 1000 * 1000}, NULL);
            continue;
        }
        close(f);
        return -1;
    }
    *fd = f;
    return 0;
}

static bool is_hex(const char *p, size_t n)
{
    return strspn(p, "0123456789abcdef") >= n;
}

/* "partial-<key>.db" */
static bool is_partial(const char *name)
{
    return strlen(name) == 43 && !strncmp(name, "partial-", 8) && is_hex(name + 8, 32) &&
           !strcmp(name + 40, ".db");
}

void sweep_partials(const struct store *s)
{
    char dir[STORE_PATH_BYTES], path[STORE_PATH_BYTES], journal[STORE_PATH_BYTES + 16];
    DIR *d = store_path(dir, s, "models", NULL) ? NULL : opendir(dir);
    for (struct dirent *f; d && (f = readdir(d));) {
        struct stat st;
        int fd;
        if (!is_partial(f->d_name) || partial_path(path, s, f->d_name + 8, NULL) ||
            stat(path, &st) || st.st_mtime > time(NULL) - STORE_PARTIAL_AGE_S ||
            store_lock(&fd, s, f->d_name + 8, 0, "in use", NULL))
            continue;
        snprintf(journal, sizeof journal, "%s-journal", path);
        if (unlink(path))
            log_line(LOG_WARN, "cannot remove the old unfinished import '%s': %s", path,
                     strerror(errno));
        else
            log_line(LOG_INFO, "removed the old unfinished import '%s'", path);
        unlink(journal);
        close(fd);
    }
    if (d)
        closedir(d);
}

/* The next digest after `digest` on the list of removals, or "". */
static int next_doomed(char digest[65], struct store *s, struct err *e)
{
    char after[65];
    sqlite3_stmt *st = NULL;
    bool row = false;
    memcpy(after, digest, sizeof after);
    digest[0] = 0;
    pthread_mutex_lock(&s->lock);
    int rc =
        db_query(&st, s->db, e,
                 "SELECT digest FROM doomed WHERE digest > ?1 ORDER BY digest LIMIT 1", "s", after);
    if (!rc && !(rc = db_step(&row, st, e)) && row)
        db_text(digest, 65, st, 0);
    sqlite3_finalize(st);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

/* Under the digest's lock: still given up (an import may have taken it back)? Then unlink. */
static int reap(struct store *s, const char *digest, struct err *e)
{
    char path[STORE_PATH_BYTES];
    sqlite3_stmt *st = NULL;
    bool row = false;
    if (model_path(path, s, digest, e))
        return -1;
    pthread_mutex_lock(&s->lock);
    int rc = db_query(&st, s->db, e, "SELECT 1 FROM doomed WHERE digest = ?1", "s", digest);
    if (!rc)
        rc = db_step(&row, st, e);
    sqlite3_finalize(st);
    if (!rc && row && unlink(path) && errno != ENOENT)
        rc = err_errno(e, "cannot remove '%s'", path);
    if (!rc && row)
        rc = db_run(s->db, e, "DELETE FROM doomed WHERE digest = ?1", "s", digest);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

void sweep_doomed(struct store *s)
{
    char digest[65] = "";
    struct err e = {0};
    while (!next_doomed(digest, s, &e) && *digest) {
        int fd;
        if (!is_hex(digest, 64) || store_lock(&fd, s, digest, 0, "in use", &e))
            continue;
        reap(s, digest, &e);
        close(fd);
    }
    if (e.code && e.code != ERR_BUSY)
        log_line(LOG_WARN, "%s; it will be removed when the store opens again", e.msg);
}

/* Does this finished database come from the import `key`? Damage is a plain no. */
static bool has_key(const char *path, const char *key)
{
    sqlite3 *db = NULL;
    sqlite3_stmt *st = NULL;
    bool row = false;
    if (!db_open(&db, path, DB_IMMUTABLE, NULL) &&
        !db_query(&st, db, NULL, "SELECT 1 FROM state WHERE key = ?1 AND digest <> ''", "s", key))
        db_step(&row, st, NULL);
    sqlite3_finalize(st);
    db_close(db);
    return row;
}

int find_orphan(char digest[65], struct store *s, const char *key, struct err *e)
{
    char dir[STORE_PATH_BYTES], path[STORE_PATH_BYTES];
    digest[0] = 0;
    if (store_path(dir, s, "models", e))
        return -1;
    DIR *d = opendir(dir);
    if (!d)
        return err_errno(e, "cannot read '%s'", dir);
    int rc = 0;
    for (struct dirent *f; !rc && !*digest && (f = readdir(d));) {
        if (strlen(f->d_name) != 67 || !is_hex(f->d_name, 64) || strcmp(f->d_name + 64, ".db"))
            continue;
        sqlite3_stmt *st = NULL;
        bool known = false;
        pthread_mutex_lock(&s->lock);
        f->d_name[64] = 0;
        rc = db_query(&st, s->db, e, "SELECT 1 FROM model WHERE digest = ?1 AND link_path = ''",
                      "s", f->d_name);
        if (!rc)
            rc = db_step(&known, st, e);
        sqlite3_finalize(st);
        pthread_mutex_unlock(&s->lock);
        if (!rc && !known && !(rc = model_path(path, s, f->d_name, e)) && has_key(path, key))
            memcpy(digest, f->d_name, 65);
    }
    closedir(d);
    return rc;
}
