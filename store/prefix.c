/* The prefix store seen by its callers: opening, the ring of pages not yet written, look-ups,
 * counters. Owns all memory of the store; the ring is address space that fills only while the disk
 * is slower than the engine. Refuses (by false or a miss) instead of waiting. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "store/prefix_internal.h"

static const char *const result_names[PREFIX_N_RESULTS] = {
    [PREFIX_HIT] = "hit",
    [PREFIX_ABSENT] = "absent",
    [PREFIX_EVICTED] = "evicted",
    [PREFIX_OTHER_TEXT] = "other_text",
    [PREFIX_OTHER_SIZE] = "other_size",
    [PREFIX_CORRUPT] = "corrupt",
    [PREFIX_UNAVAILABLE] = "unavailable",
};

const char *prefix_get_name(enum prefix_get r)
{
    CHECK(r < PREFIX_N_RESULTS);
    return result_names[r];
}

/* ---- the file: who may replace it, and when ---- */

/* A lock holder replaces a file, which takes milliseconds; one that was stopped in the middle must
 * not stop us. */
static int lock_take(int fd, int how, int wait_ms, const char *path, struct err *e)
{
    uint64_t until = now_ns() + (uint64_t)wait_ms * 1000000u;
    while (flock(fd, how | LOCK_NB)) {
        if (errno == EINTR)
            continue;
        if (errno != EWOULDBLOCK)
            return err_errno(e, "cannot lock '%s.lock'", path);
        if (now_ns() >= until)
            return err_set(e, ERR_BUSY, "'%s' is in use by another ingot process", path);
        nanosleep(&(struct timespec){0, 2000000}, NULL);
    }
    return 0;
}

/* Is this a SQLite database with our mark? (SQLite file format, section 1.3: magic at 0,
 * application id at 68, big-endian.) */
static bool file_is_ours(const char *path)
{
    uint8_t h[72] = {0};
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool ok = fd >= 0 && file_pread(fd, h, sizeof h, 0, path, NULL) == 0;
    if (fd >= 0)
        close(fd);
    uint32_t app = (uint32_t)h[68] << 24 | (uint32_t)h[69] << 16 | (uint32_t)h[70] << 8 | h[71];
    return ok && !memcmp(h, "SQLite format 3", 16) && app == PREFIX_APP_ID;
}

/* Damaged: gone. Not ours, or of another version: kept under another name, once. */
static int file_replace(const char *path, bool keep, struct err *e)
{
    static const char *const tails[] = {"-wal", "-shm", "-journal", ""};
    char from[STORE_PATH_BYTES + 16], to[STORE_PATH_BYTES + 32];
    for (size_t i = 0; i < ARRAY_LEN(tails); i++) {
        snprintf(from, sizeof from, "%s%s", path, tails[i]);
        snprintf(to, sizeof to, "%s.aside%s", path, tails[i]);
        int rc = keep && strcmp(tails[i], "-shm") ? rename(from, to) : unlink(from);
        if (rc && errno != ENOENT)
            return err_errno(e, "cannot replace '%s'", from);
    }
    return 0;
}

/* With the exclusive lock held: open the file for writing, or another in its place. */
static int file_judge(struct prefix_store *p, bool damaged, struct err *e)
{
    struct err why = {0};
    if (!damaged) {
        if (!prefix_db_open(&p->writer, p->path, PREFIX_WRITE, &why))
            return 0;
        if (why.code != ERR_CORRUPT && why.code != ERR_UNSUPPORTED)
            return err_set(e, why.code, "%s", why.msg);
    }
    bool keep = why.code == ERR_UNSUPPORTED || !file_is_ours(p->path);
    if (file_replace(p->path, keep, e))
        return -1;
    log_line(LOG_WARN, "prefix cache: %s%s; %s and started an empty one",
             damaged ? p->path : why.msg, damaged ? " is damaged" : "",
             keep ? "moved it aside" : "removed it");
    pthread_mutex_lock(&p->lock);
    p->n.replaced++;
    pthread_mutex_unlock(&p->lock);
    return prefix_db_open(&p->writer, p->path, PREFIX_WRITE, e);
}

int prefix_connect(struct prefix_store *p, bool damaged, struct err *e)
{
    bool alone = flock(p->lock_fd, LOCK_EX | LOCK_NB) == 0;
    int rc = alone ? file_judge(p, damaged, e) : 0;
    /* Not alone: then the others have a file that works, or must let go of it first. */
    if (!rc)
        rc = lock_take(p->lock_fd, LOCK_SH, 3000, p->path, e);
    if (!rc && damaged && !alone)
        rc = err_set(e, ERR_BUSY, "'%s' is damaged, and another process has it open", p->path);
    if (!rc && !alone)
        rc = prefix_db_open(&p->writer, p->path, PREFIX_WRITE, e);
    if (!rc)
        rc = prefix_db_open(&p->reader, p->path, PREFIX_READ, e);
    if (rc)
        prefix_disconnect(p);
    p->writer.max_bytes = p->max_bytes;
    return rc;
}

void prefix_disconnect(struct prefix_store *p)
{
    prefix_db_close(&p->reader);
    prefix_db_close(&p->writer);
    flock(p->lock_fd, LOCK_UN);
}

/* ---- open and close ---- */

static uint64_t default_cap(const char *home, const char *path)
{
    struct statvfs v;
    uint64_t bytes = 0;
    if (statvfs(home, &v) == 0)
        bytes = (uint64_t)v.f_bavail * v.f_frsize;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    off_t have = fd >= 0 ? lseek(fd, 0, SEEK_END) : 0; /* what it has taken counts as free */
    if (fd >= 0)
        close(fd);
    bytes += have > 0 ? (uint64_t)have : 0;
    return MIN(bytes / 10, (uint64_t)20 << 30);
}

static int locks_init(struct prefix_store *p, struct err *e)
{
    pthread_condattr_t a;
    if (pthread_condattr_init(&a))
        return err_set(e, ERR_MEMORY, "out of memory opening the prefix cache");
    pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
    pthread_mutex_init(&p->lock, NULL);
    pthread_mutex_init(&p->read_lock, NULL);
    pthread_mutex_init(&p->tools_lock, NULL);
    pthread_cond_init(&p->work, &a);
    pthread_cond_init(&p->done, &a);
    pthread_condattr_destroy(&a);
    return 0;
}

static int files_open(struct prefix_store *p, const char *home, uint64_t max_bytes, struct err *e)
{
    char lock[STORE_PATH_BYTES + 8];
    if (snprintf(p->path, sizeof p->path, "%s/prefix.db", home) >= (int)sizeof p->path)
        return err_set(e, ERR_LIMIT, "path too long: '%.200s...'", home);
    snprintf(lock, sizeof lock, "%s.lock", p->path);
    p->lock_fd = open(lock, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (p->lock_fd < 0)
        return err_errno(e, "cannot open '%s'", lock);
    p->max_bytes = max_bytes ? max_bytes : default_cap(home, p->path);
    return prefix_connect(p, false, e);
}

int prefix_open(struct prefix_store **out, const char *home, const struct prefix_config *c,
                struct err *e)
{
    *out = NULL;
    struct prefix_store *p = mem_zalloc(sizeof *p);
    if (!p)
        return err_set(e, ERR_MEMORY, "out of memory opening the prefix cache");
    p->lock_fd = -1;
    p->pause_ms = PREFIX_PAUSE_MS;
    if (locks_init(p, e)) {
        mem_free(p);
        return -1;
    }
    p->ring_bytes = c && c->dirty_bytes ? MAX(c->dirty_bytes, (uint64_t)64 << 10) : 64u << 20;
    p->ring = mem_pages(p->ring_bytes);
    int rc = p->ring ? 0
                     : err_set(e, ERR_MEMORY, "no memory for %zu bytes of unwritten pages",
                               p->ring_bytes);
    if (!rc)
        rc = files_open(p, home, c ? c->max_bytes : 0, e);
    if (!rc && pthread_create(&p->thread, NULL, prefix_write_thread, p))
        rc = err_set(e, ERR_MEMORY, "cannot start the thread that writes '%s'", p->path);
    p->started = !rc;
    if (rc) {
        prefix_close(p);
        return -1;
    }
    *out = p;
    return 0;
}

void prefix_close(struct prefix_store *p)
{
    if (!p)
        return;
    if (p->started) {
        pthread_mutex_lock(&p->lock);
        p->stop = true;
        pthread_cond_signal(&p->work);
        pthread_mutex_unlock(&p->lock);
        pthread_join(p->thread, NULL);
    }
    if (p->lock_fd >= 0) {
        prefix_disconnect(p);
        close(p->lock_fd);
    }
    mem_pages_free(p->ring, p->ring_bytes);
    pthread_cond_destroy(&p->work);
    pthread_cond_destroy(&p->done);
    pthread_mutex_destroy(&p->lock);
    pthread_mutex_destroy(&p->read_lock);
    pthread_mutex_destroy(&p->tools_lock);
    mem_free(p);
}

uint64_t prefix_store_bytes(const struct prefix_store *p, uint64_t kv_bytes)
{
    /* of a connection: SQLite's page cache (its default, 2,000 KiB), statements and schema; a page
     * as it is stored and what zstd needs for it, which grows with the page up to its window */
    uint64_t cache = 2048u << 10, statements = 256u << 10, zstd = 2304u << 10;
    uint64_t connection = cache + statements + zstd + MIN(kv_bytes, (uint64_t)PREFIX_MAX_KV_BYTES);
    return sizeof *p + p->ring_bytes + 2 * connection;
}

/* ---- the ring of dirty pages; all under p->lock ----
 *
 *   oldest ... newest in one piece, or wrapped: [newest part | free | oldest part | unused tail]
 *
 * They leave in the order in which they came, so that room is always one gap behind ring_head. */

static struct prefix_dirty **slot_of(struct prefix_store *p, const struct prefix_key *key)
{
    uint32_t h;
    memcpy(&h, key->b, sizeof h);
    return &p->slots[h % PREFIX_N_BUCKETS];
}

static struct prefix_dirty *dirty_find(struct prefix_store *p, const struct prefix_key *key)
{
    struct prefix_dirty *d = *slot_of(p, key);
    while (d && memcmp(&d->page.key, key, sizeof *key))
        d = d->same_slot;
    return d;
}

static struct prefix_dirty *ring_take(struct prefix_store *p, size_t bytes)
{
    size_t at = p->oldest ? p->ring_head : 0;
    size_t tail = p->oldest ? (size_t)((uint8_t *)p->oldest - p->ring) : p->ring_bytes;
    if (p->oldest && at > tail) {
        if (p->ring_bytes - at < bytes)
            at = 0;
        else
            tail = p->ring_bytes;
    }
    if (at > tail || tail - at < bytes || (p->oldest && at + bytes == tail))
        return NULL;
    struct prefix_dirty *d = (void *)(p->ring + at);
    *d = (struct prefix_dirty){.bytes = bytes};
    p->ring_head = at + bytes;
    p->ring_peak = MAX(p->ring_peak, p->ring_head);
    if (p->oldest)
        p->newest->next = d;
    else
        p->oldest = d;
    p->newest = d;
    p->n_taken++;
    p->n.dirty_pages++;
    p->n.dirty_bytes += bytes;
    return d;
}

/* PREFIX_HIT, or what differs. */
static enum prefix_get page_compare(const struct prefix_page *a, const struct prefix_page *b)
{
    if (a->n_ids != b->n_ids || memcmp(&a->parent, &b->parent, sizeof a->parent) ||
        memcmp(a->ids, b->ids, (size_t)a->n_ids * sizeof a->ids[0]))
        return PREFIX_OTHER_TEXT;
    return a->kv_bytes == b->kv_bytes ? PREFIX_HIT : PREFIX_OTHER_SIZE;
}

/* 64-byte steps keep the copies aligned. */
static size_t round_up(size_t n)
{
    return (n + 63) & ~(size_t)63;
}

bool prefix_put(struct prefix_store *p, const struct prefix_page *page)
{
    bool sane = page->n_ids >= 1 && page->n_ids <= PREFIX_MAX_IDS && page->kv_bytes >= 1 &&
                page->kv_bytes <= PREFIX_MAX_KV_BYTES && page->kv_bytes <= p->max_bytes / 2;
    size_t ids_bytes = sane ? (size_t)page->n_ids * sizeof page->ids[0] : 0;
    size_t ids_at = round_up(sizeof(struct prefix_dirty)), kv_at = ids_at + round_up(ids_bytes);
    struct prefix_dirty *d = NULL, *same;
    pthread_mutex_lock(&p->lock);
    same = dirty_find(p, &page->key);
    bool known = sane && same && page_compare(&same->page, page) == PREFIX_HIT;
    bool paused = p->paused_until && now_ns() < p->paused_until;
    if (sane && !known && !paused && !p->stop)
        d = ring_take(p, kv_at + round_up(page->kv_bytes));
    p->n.puts += known || d;
    p->n.refused += !known && !d;
    p->n.known += known;
    pthread_mutex_unlock(&p->lock);
    if (!d)
        return known;

    /* The place is ours: nobody looks into it before it is READY. */
    memcpy((uint8_t *)d + ids_at, page->ids, ids_bytes);
    memcpy((uint8_t *)d + kv_at, page->kv, page->kv_bytes);
    pthread_mutex_lock(&p->lock);
    d->page = *page;
    d->page.ids = (const void *)((uint8_t *)d + ids_at);
    d->page.kv = (uint8_t *)d + kv_at;
    d->state = DIRTY_READY;
    d->same_slot = *slot_of(p, &page->key);
    *slot_of(p, &page->key) = d;
    pthread_cond_signal(&p->work);
    pthread_mutex_unlock(&p->lock);
    return true;
}

/* ---- look-ups ---- */

static void note_add(struct prefix_store *p, const struct prefix_key *key, int64_t drop_id)
{
    if (p->n_notes == PREFIX_N_NOTES)
        return;
    if (!p->n_notes || drop_id)
        pthread_cond_signal(&p->work);
    p->has_drops = p->has_drops || drop_id;
    p->n_noted++;
    p->notes[p->n_notes++] = (struct prefix_note){*key, drop_id};
}

void prefix_touch(struct prefix_store *p, const struct prefix_key *key)
{
    pthread_mutex_lock(&p->lock);
    note_add(p, key, 0);
    pthread_mutex_unlock(&p->lock);
}

/* What the file says, within one read transaction; *drop_id is set for a row that must go. */
static enum prefix_get file_get(int64_t *drop_id, struct prefix_db *d, void *kv,
                                const struct prefix_page *want, struct err *e)
{
    struct prefix_row r;
    enum row_state s;
    bool gone = false;
    if (row_find(&s, &r, d, &want->key, e))
        return PREFIX_UNAVAILABLE;
    if (s == ROW_NONE) {
        if (key_gone(&gone, d, &want->key, e))
            return PREFIX_UNAVAILABLE;
        return gone ? PREFIX_EVICTED : PREFIX_ABSENT;
    }
    if (s == ROW_OK && !row_same(&r, want))
        return PREFIX_OTHER_TEXT;
    if (s == ROW_OK && r.kv_bytes != want->kv_bytes)
        return PREFIX_OTHER_SIZE;
    if (s == ROW_OK && row_load(&s, kv, d, &r, e))
        return PREFIX_UNAVAILABLE;
    if (s == ROW_OK && !memcmp(&r.key, &want->key, sizeof r.key))
        return PREFIX_HIT;
    *drop_id = r.id;
    return PREFIX_CORRUPT;
}

static enum prefix_get disk_get(int64_t *drop_id, struct prefix_store *p, void *kv,
                                const struct prefix_page *want, struct err *e)
{
    enum prefix_get got = PREFIX_UNAVAILABLE;
    pthread_mutex_lock(&p->read_lock);
    struct prefix_db *d = &p->reader;
    if (d->db && sqlite3_exec(d->db, "BEGIN", NULL, NULL, NULL) == SQLITE_OK) {
        got = file_get(drop_id, d, kv, want, e);
        if (sqlite3_exec(d->db, "COMMIT", NULL, NULL, NULL))
            sqlite3_exec(d->db, "ROLLBACK", NULL, NULL, NULL);
    }
    pthread_mutex_unlock(&p->read_lock);
    return got;
}

enum prefix_get prefix_get(struct prefix_store *p, void *kv, const struct prefix_page *want)
{
    struct err e = {0};
    int64_t drop_id = 0;
    pthread_mutex_lock(&p->lock);
    struct prefix_dirty *d = dirty_find(p, &want->key);
    enum prefix_get waiting = d ? page_compare(&d->page, want) : PREFIX_ABSENT;
    if (waiting == PREFIX_HIT) {
        memcpy(kv, d->page.kv, want->kv_bytes);
        p->n.gets[PREFIX_HIT]++;
        note_add(p, &want->key, 0);
        pthread_mutex_unlock(&p->lock);
        return PREFIX_HIT;
    }
    pthread_mutex_unlock(&p->lock);
    enum prefix_get got = disk_get(&drop_id, p, kv, want, &e);
    if (d && (got == PREFIX_ABSENT || got == PREFIX_EVICTED))
        got = waiting;

    pthread_mutex_lock(&p->lock);
    if (e.code == ERR_CORRUPT && !p->damaged) {
        got = PREFIX_CORRUPT;
        p->damaged = true;
        pthread_cond_signal(&p->work);
    }
    p->n.gets[got]++;
    if (got == PREFIX_HIT || drop_id)
        note_add(p, &want->key, drop_id);
    pthread_mutex_unlock(&p->lock);
    if (drop_id)
        log_line(LOG_WARN,
                 "prefix cache: a page in '%s' is damaged (row %lld); it is computed again",
                 p->path, (long long)drop_id);
    return got;
}

bool prefix_has(struct prefix_store *p, const struct prefix_key *key)
{
    struct prefix_row r;
    enum row_state s = ROW_NONE;
    bool doomed = false;
    pthread_mutex_lock(&p->lock);
    bool waiting = dirty_find(p, key) != NULL;
    for (uint32_t i = 0; p->has_drops && i < p->n_notes; i++)
        doomed = doomed || (p->notes[i].drop_id && !memcmp(&p->notes[i].key, key, sizeof *key));
    pthread_mutex_unlock(&p->lock);
    if (waiting || doomed)
        return waiting;
    pthread_mutex_lock(&p->read_lock);
    if (p->reader.db && row_find(&s, &r, &p->reader, key, NULL))
        s = ROW_NONE;
    pthread_mutex_unlock(&p->read_lock);
    return s == ROW_OK;
}

/* ---- flush, counters ---- */

/* Under the lock. */
static void flush_wait(struct prefix_store *p, uint64_t until_ns)
{
    struct timespec t = {.tv_sec = (time_t)(until_ns / 1000000000u),
                         .tv_nsec = (long)(until_ns % 1000000000u)};
    uint64_t taken = p->n_taken, noted = p->n_noted;
    p->n_flushing++;
    pthread_cond_signal(&p->work);
    while ((p->n_finished < taken || p->n_noted_done < noted) && now_ns() < until_ns)
        if (until_ns == UINT64_MAX)
            pthread_cond_wait(&p->done, &p->lock);
        else
            pthread_cond_clockwait(&p->done, &p->lock, CLOCK_MONOTONIC, &t);
    p->n_flushing--;
}

void prefix_flush_until(struct prefix_store *p, uint64_t until_ns)
{
    pthread_mutex_lock(&p->lock);
    flush_wait(p, until_ns);
    pthread_mutex_unlock(&p->lock);
}

int prefix_flush(struct prefix_store *p, struct err *e)
{
    pthread_mutex_lock(&p->lock);
    flush_wait(p, UINT64_MAX);
    struct err fault = p->fault;
    p->fault = (struct err){0};
    pthread_mutex_unlock(&p->lock);
    return fault.code ? err_set(e, fault.code, "%s", fault.msg) : 0;
}

static bool is_paused(const struct prefix_store *p)
{
    return p->paused_until && now_ns() < p->paused_until;
}

bool prefix_is_writing(struct prefix_store *p)
{
    pthread_mutex_lock(&p->lock);
    bool writing = p->n.dirty_pages && !is_paused(p);
    pthread_mutex_unlock(&p->lock);
    return writing;
}

void prefix_stats(struct prefix_store *p, struct prefix_stats *s)
{
    uint64_t used = 0, file = 0;
    int64_t pages = 0;
    pthread_mutex_lock(&p->read_lock);
    sqlite3 *db = p->reader.db;
    if (db && (prefix_db_size(&used, &file, &p->reader, NULL) ||
               db_number(&pages, db, 0, "SELECT count(*) FROM page", NULL)))
        used = 0, pages = 0;
    pthread_mutex_unlock(&p->read_lock);
    pthread_mutex_lock(&p->lock);
    *s = p->n;
    s->pages = (uint64_t)pages;
    s->bytes = used;
    s->max_bytes = p->max_bytes;
    s->paused = is_paused(p);
    pthread_mutex_unlock(&p->lock);
}
