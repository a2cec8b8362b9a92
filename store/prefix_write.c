/* The thread that writes prefix pages behind their backs: takes what waits in the ring, a batch a
 * transaction, evicts for it, removes damaged rows, replaces a damaged file. Its faults are one log
 * line and a rest; they reach no caller but prefix_flush. */
#include <errno.h>
#include <math.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>

#include "store/prefix_internal.h"

enum {
    BATCH_BYTES = 16 << 20, /* of the ring, a transaction at most (but one page always) */
    BATCH_PAGES = 512,
    NOTE_DELAY_MS = 1000,       /* touches may wait so long for company */
    RING_KEEP_BYTES = 16 << 20, /* of the ring's memory kept when nothing waits */
    BUSY_TRIES = 3,
};

struct batch {
    struct prefix_dirty *first; /* n_pages from here on are ours until retired */
    uint32_t n_pages, n_notes;
    bool heal, stop;
    uint64_t written, known, outvalued, given_up, evicted, corrupt;
};

/* ---- one transaction ---- */

static int note_write(struct batch *b, struct prefix_db *d, const struct prefix_note *note,
                      struct err *e)
{
    struct prefix_row r;
    enum row_state s;
    if (!note->drop_id)
        return row_touch(d, &note->key, e);
    r.id = 0;
    if (row_find(&s, &r, d, &note->key, e))
        return -1;
    if (s == ROW_NONE || r.id != note->drop_id) /* done by another process */
        return 0;
    b->corrupt++;
    return row_drop(d, r.id, e);
}

static int page_write(struct batch *b, struct prefix_store *p, const struct prefix_page *page,
                      struct err *e)
{
    struct prefix_row r;
    struct prefix_db *d = &p->writer;
    enum row_state s;
    const void *stored;
    bool added = false;
    if (row_find(&s, &r, d, &page->key, e))
        return -1;
    if (s == ROW_OK && row_same(&r, page) && r.kv_bytes == page->kv_bytes) {
        b->known++;
        return 0;
    }
    if (s != ROW_NONE && row_drop(d, r.id, e))
        return -1;
    r.id = 0;
    r.key = page->key;
    r.parent = page->parent;
    r.kv_bytes = page->kv_bytes;
    r.model_tag = page->model_tag;
    r.cost_us = page->cost_us;
    r.n_ids = page->n_ids;
    memcpy(r.ids, page->ids, (size_t)page->n_ids * sizeof r.ids[0]);
    if (row_pack(&r, &stored, d, page->kv, e))
        return -1;
    if (row_admit(&added, &b->evicted, d, &r, stored, e))
        return -1;
    b->written += added;
    b->outvalued += !added;
    return 0;
}

static int batch_write(struct batch *b, struct prefix_store *p, struct err *e)
{
    struct batch n = *b;
    int rc = prefix_db_begin(&p->writer, e);
    if (rc)
        return rc;
    for (uint32_t i = 0; !rc && i < n.n_notes; i++)
        rc = note_write(&n, &p->writer, &p->taken[i], e);
    struct prefix_dirty *d = NULL;
    for (uint32_t i = 0; !rc && i < n.n_pages; i++) {
        d = d ? d->next : n.first; /* the last one's next is not ours to read */
        rc = page_write(&n, p, &d->page, e);
    }
    rc = prefix_db_end(&p->writer, rc, e);
    if (!rc)
        *b = n;
    return rc;
}

/* ---- faults ---- */

static int file_heal(struct prefix_store *p, bool damaged, struct err *e)
{
    if (pthread_mutex_trylock(&p->tools_lock))
        return err_set(e, ERR_BUSY, "'%s' is damaged, and being exported or imported", p->path);
    pthread_mutex_lock(&p->read_lock);
    prefix_disconnect(p);
    int rc = prefix_connect(p, damaged, e);
    pthread_mutex_unlock(&p->read_lock);
    pthread_mutex_unlock(&p->tools_lock);
    return rc;
}

/* Write the batch, whatever it takes within reason. A file found damaged is replaced, once. */
static int batch_work(struct batch *b, struct prefix_store *p, struct err *e)
{
    int rc = -1;
    bool heal = b->heal || !p->writer.db, healed = false;
    for (int tries = 0; rc && tries < BUSY_TRIES; tries++) {
        *e = (struct err){0};
        if (heal && file_heal(p, b->heal, e))
            return -1;
        if (heal) {
            pthread_mutex_lock(&p->lock);
            p->damaged = false;
            pthread_mutex_unlock(&p->lock);
            healed = true;
        }
        rc = batch_write(b, p, e);
        heal = b->heal = rc && e->code == ERR_CORRUPT && !healed;
        if (rc && !heal && e->code != ERR_BUSY)
            break;
    }
    if (rc && e->code == ERR_FULL) /* what the log took for nothing goes back to the others */
        sqlite3_wal_checkpoint_v2(p->writer.db, NULL, SQLITE_CHECKPOINT_TRUNCATE, NULL, NULL);
    return rc;
}

/* ---- the queue; under p->lock ---- */

static bool paused(const struct prefix_store *p)
{
    return p->paused_until && now_ns() < p->paused_until;
}

static bool have_work(const struct prefix_store *p, bool waited)
{
    if (p->oldest && p->oldest->state != DIRTY_FILLING)
        return true;
    if (p->damaged && !p->stop && !paused(p))
        return true;
    return p->n_notes && (waited || p->has_drops || p->n_flushing || p->stop);
}

/* Sleep until there is work; false: stopped, and nothing is left. Without work it does not wake. */
static bool work_wait(struct prefix_store *p)
{
    bool waited = false;
    while (!have_work(p, waited)) {
        if (p->stop && !p->oldest)
            return false;
        if (!p->n_notes && p->ring_peak <= RING_KEEP_BYTES) {
            pthread_cond_wait(&p->work, &p->lock);
            continue;
        }
        uint64_t t = now_ns() + (uint64_t)NOTE_DELAY_MS * 1000000u;
        struct timespec until = {(time_t)(t / 1000000000u), (long)(t % 1000000000u)};
        waited = pthread_cond_timedwait(&p->work, &p->lock, &until) == ETIMEDOUT;
        if (waited && !p->oldest && p->ring_peak > RING_KEEP_BYTES) {
            madvise(p->ring + RING_KEEP_BYTES, p->ring_bytes - RING_KEEP_BYTES, MADV_DONTNEED);
            p->ring_peak = 0;
        }
    }
    return true;
}

static void batch_take(struct batch *b, struct prefix_store *p)
{
    size_t bytes = 0;
    *b = (struct batch){.first = p->oldest, .heal = p->damaged, .stop = p->stop};
    for (struct prefix_dirty *d = p->oldest; d && d->state != DIRTY_FILLING; d = d->next) {
        if (b->n_pages == BATCH_PAGES || (b->n_pages && bytes + d->bytes > BATCH_BYTES))
            break;
        bytes += d->bytes;
        b->n_pages++;
    }
    b->n_notes = p->n_notes;
    memcpy(p->taken, p->notes, p->n_notes * sizeof p->notes[0]);
    p->n_notes = 0;
    p->has_drops = false;
}

static void slot_leave(struct prefix_store *p, const struct prefix_dirty *d)
{
    uint32_t h;
    memcpy(&h, d->page.key.b, sizeof h);
    struct prefix_dirty **at = &p->slots[h % PREFIX_N_BUCKETS];
    while (*at != d)
        at = &(*at)->same_slot;
    *at = d->same_slot;
}

static void batch_retire(const struct batch *b, struct prefix_store *p)
{
    for (uint32_t i = 0; i < b->n_pages; i++) {
        struct prefix_dirty *d = p->oldest;
        slot_leave(p, d);
        p->oldest = d->next;
        p->n.dirty_pages--;
        p->n.dirty_bytes -= d->bytes;
    }
    if (!p->oldest)
        p->newest = NULL;
    p->n_finished += b->n_pages;
    p->n_noted_done += b->n_notes;
    p->n.written += b->written;
    p->n.known += b->known;
    p->n.outvalued += b->outvalued;
    p->n.given_up += b->given_up;
    p->n.evicted += b->evicted;
    p->n.corrupt += b->corrupt;
    pthread_cond_broadcast(&p->done);
}

/* The outcome of a batch: counters, the pause, and at most one line until it works again. */
static bool batch_judge(struct batch *b, struct prefix_store *p, int rc, const struct err *e)
{
    bool first = rc && !p->fault_logged;
    if (!rc) {
        p->fault_logged = p->fault_logged && !b->written;
        p->paused_until = 0;
        return false;
    }
    b->given_up += b->n_pages;
    p->damaged = p->damaged || e->code == ERR_CORRUPT;
    /* No memory, or another process writing: that may be over with the next page. */
    if (p->damaged || (e->code != ERR_MEMORY && e->code != ERR_BUSY))
        p->paused_until = now_ns() + (uint64_t)p->pause_ms * 1000000u;
    p->cause = *e;
    if (b->n_pages)
        p->fault = *e;
    p->fault_logged = true;
    return first;
}

/* ---- a cap that is lower than last time ---- */

static bool stopped(struct prefix_store *p)
{
    pthread_mutex_lock(&p->lock);
    bool stop = p->stop || p->oldest;
    pthread_mutex_unlock(&p->lock);
    return stop;
}

static void cap_enforce(struct prefix_store *p)
{
    uint64_t used = 0, file = 0, n_evicted = 0;
    struct prefix_db *d = &p->writer;
    struct prefix_room room = {.bytes = p->max_bytes, .rows = 64, .below = INFINITY};
    bool more = true;
    int rc = prefix_db_size(&used, &file, d, NULL);
    while (!rc && used > p->max_bytes && !room.fits && !stopped(p)) {
        rc = prefix_db_begin(d, NULL);
        if (!rc)
            rc = prefix_db_end(d, rows_evict(&room, d, NULL), NULL);
        n_evicted += rc ? 0 : room.n_evicted;
        if (!room.n_evicted)
            break;
    }
    while (!rc && file > p->max_bytes && more && !stopped(p))
        rc = prefix_db_shrink(&more, d, NULL);
    pthread_mutex_lock(&p->lock);
    p->n.evicted += n_evicted;
    pthread_mutex_unlock(&p->lock);
}

void *prefix_write_thread(void *store)
{
    struct prefix_store *p = store;
    struct batch b;
    pthread_setname_np(pthread_self(), "prefix-writer");
    /* Linux takes this for the thread alone: answering goes first. */
    setpriority(PRIO_PROCESS, 0, 10);
    cap_enforce(p);
    pthread_mutex_lock(&p->lock);
    while (work_wait(p)) {
        struct err e = {0};
        batch_take(&b, p);
        bool skip = paused(p) || (b.heal && b.stop);
        if (skip) {
            b.given_up = b.n_pages;
            if (b.n_pages)
                p->fault = p->cause;
            batch_retire(&b, p);
            continue;
        }
        pthread_mutex_unlock(&p->lock);
        int rc = batch_work(&b, p, &e);
        pthread_mutex_lock(&p->lock);
        bool say = batch_judge(&b, p, rc, &e);
        batch_retire(&b, p);
        if (say) {
            pthread_mutex_unlock(&p->lock);
            log_line(LOG_WARN, "prefix cache: %s; new pages are not kept for now", e.msg);
            pthread_mutex_lock(&p->lock);
        }
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}
