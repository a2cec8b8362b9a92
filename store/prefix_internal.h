/* What the files of the persistent prefix tier share: one connection with its rows (prefix_db.c),
 * the store with its queue (prefix.c), the writing thread (prefix_write.c), the tools
 * (prefix_tools.c).
 *
 *   page  one row a KV page: key, parent, token ids, sizes, sums, and `rank` that orders eviction
 *   data  the bytes of the page with the same id, plain or zstd; apart, so that scans stay small
 *   gone  keys of the last evicted pages, so that a miss can say why
 *   meta  one row: the floor of ranks
 *
 * A process holds a shared flock on prefix.lock while it has connections open; only who gets it
 * exclusively may replace the file. */
#ifndef INGOT_PREFIX_INTERNAL_H
#define INGOT_PREFIX_INTERNAL_H

#include "store/prefix.h"
#include "store/store_internal.h"

enum {
    PREFIX_APP_ID = 0x494e4758, /* "INGX" in the database header: a prefix.db of ours */
    PREFIX_VERSION = 1,         /* of the tables; another one is moved aside */
    PREFIX_DB_PAGE = 16384,     /* SQLite's page size */
    PREFIX_N_GONE = 65536,      /* evicted keys remembered */
    PREFIX_N_NOTES = 4096,      /* touches and drops waiting; more are forgotten */
    PREFIX_N_BUCKETS = 4096,    /* of the dirty pages' table; a power of two */
    PREFIX_PAUSE_MS = 60000,    /* how long writing rests after a fault */
};

/* ---- prefix_db.c: one connection; for one thread at a time ---- */

enum prefix_stmt {
    ST_BEGIN_WRITE,
    ST_COMMIT,
    ST_FIND,
    ST_FIND_ID,
    ST_NEXT,
    ST_GONE,
    ST_ADD,
    ST_ADD_DATA,
    ST_DROP,
    ST_DROP_DATA,
    ST_REMEMBER,
    ST_FORGET,
    ST_PRUNE,
    ST_TOUCH,
    ST_LIFT,
    ST_VICTIM,
    ST_ANY_VICTIM,
    ST_FLOOR,
    ST_SET_FLOOR,
    ST_NEXT_OF_MODEL,
    ST_COUNT,
    ST_N_PAGES,
    ST_N_FREE,
    PREFIX_N_STMTS
};

struct prefix_db {
    sqlite3 *db; /* NULL: closed */
    sqlite3_stmt *st[PREFIX_N_STMTS];
    void *cctx, *dctx;  /* ZSTD_CCtx, ZSTD_DCtx; made when first needed */
    uint8_t *stage;     /* stored form of the page at hand; grows */
    size_t stage_bytes; /* room in stage */
    uint64_t max_bytes; /* of the contents; set by the owner */
    double floor;       /* within a transaction: what a rank starts from; only rises */
    double floor_read;  /* as it stands in the file */
};

/* A row of `page` but for what changes: rank, hits, used. */
struct prefix_row {
    int64_t id; /* 0: not in the file yet */
    struct prefix_key key, parent;
    uint64_t kv_bytes;     /* of the page */
    uint64_t stored_bytes; /* of `data`: kv_bytes, or fewer when packed */
    uint64_t model_tag;
    uint32_t cost_us;
    bool packed;         /* data is one zstd frame */
    int32_t n_ids;       /* 1..PREFIX_MAX_IDS */
    struct hash128 body; /* XXH3-128 of the kv_bytes bytes */
    int32_t ids[PREFIX_MAX_IDS];
};
enum row_state { ROW_NONE, ROW_OK, ROW_BAD }; /* BAD: fails its checksum or cannot be read */

enum prefix_db_mode { PREFIX_WRITE, PREFIX_READ, PREFIX_FRESH /* a new file for an export */ };
/* ERR_CORRUPT: damaged or another's; ERR_UNSUPPORTED: another version. */
int prefix_db_open(struct prefix_db *d, const char *path, enum prefix_db_mode mode, struct err *e);
void prefix_db_close(struct prefix_db *d);
int prefix_db_begin(struct prefix_db *d, struct err *e); /* for writing */
int prefix_db_end(struct prefix_db *d, int rc, struct err *e);
/* Disk space that the contents take (pages in use times their size), and of the file. */
int prefix_db_size(uint64_t *used, uint64_t *file, struct prefix_db *d, struct err *e);

int row_find(enum row_state *s, struct prefix_row *r, struct prefix_db *d,
             const struct prefix_key *key, struct err *e);
/* The row with the smallest id above `after`. */
int row_next(enum row_state *s, struct prefix_row *r, struct prefix_db *d, int64_t after,
             struct err *e);
/* Read and check the body into kv (r->kv_bytes); for a packed row d->stage has its stored form. */
int row_load(enum row_state *s, void *kv, struct prefix_db *d, const struct prefix_row *r,
             struct err *e);
/* Make the stored form of kv: sets body, packed and stored_bytes; *stored is kv or d->stage. */
int row_pack(struct prefix_row *r, const void **stored, struct prefix_db *d, const void *kv,
             struct err *e);
int row_drop(struct prefix_db *d, int64_t id, struct err *e);
int row_touch(struct prefix_db *d, const struct prefix_key *key, struct err *e);
bool row_same(const struct prefix_row *r, const struct prefix_page *page); /* parent and ids */
int key_gone(bool *gone, struct prefix_db *d, const struct prefix_key *key, struct err *e);
/* Room wanted in the file. */
struct prefix_room {
    uint64_t bytes;                 /* the contents may take so much */
    uint64_t rows;                  /* rows to evict at most */
    double below;                   /* evict only what ranks lower */
    const struct prefix_key *spare; /* not this page; NULL: any */
    uint64_t n_evicted;             /* result */
    bool fits;                      /* result */
};
int rows_evict(struct prefix_room *room, struct prefix_db *d, struct err *e);
/* Make room for r under d->max_bytes, if r is worth more than what would have to go, and add it.
 * *added says whether. */
int row_admit(bool *added, uint64_t *n_evicted, struct prefix_db *d, const struct prefix_row *r,
              const void *stored, struct err *e);
/* Give free pages of the file back to the disk, a bounded step; *more: there are others. */
int prefix_db_shrink(bool *more, struct prefix_db *d, struct err *e);

/* ---- prefix.c ---- */

/* A page waiting to be written; lies in the ring, its ids and kv behind it. */
struct prefix_dirty {
    struct prefix_dirty *next;      /* younger */
    struct prefix_dirty *same_slot; /* of the table */
    size_t bytes;                   /* in the ring, all in all */
    enum { DIRTY_FILLING, DIRTY_READY } state;
    struct prefix_page page;
};

struct prefix_note {
    struct prefix_key key;
    int64_t drop_id; /* row to remove, or 0: the page was used */
};

struct prefix_store {
    char path[STORE_PATH_BYTES];
    int lock_fd; /* prefix.lock, with a shared flock while connections are open */
    uint64_t max_bytes;
    int pause_ms; /* tests lower it */

    pthread_mutex_t read_lock;
    struct prefix_db reader; /* under read_lock */
    struct prefix_db writer; /* the writing thread's */
    /* Held by whoever has a connection of its own (prefix_tools.c): the file is not replaced then.
     * Taken before the other two. */
    pthread_mutex_t tools_lock;
    struct prefix_note taken[PREFIX_N_NOTES]; /* the writing thread's copy of notes */

    pthread_mutex_t lock; /* everything below; never held over I/O */
    pthread_cond_t work;  /* for the writing thread */
    pthread_cond_t done;  /* a batch is finished */
    pthread_t thread;
    bool started, stop;
    uint8_t *ring; /* ring_bytes of address space, touched as it fills; owned */
    size_t ring_bytes, ring_head, ring_peak;
    struct prefix_dirty *oldest, *newest;
    struct prefix_dirty *slots[PREFIX_N_BUCKETS];
    struct prefix_note notes[PREFIX_N_NOTES];
    uint32_t n_notes;
    uint64_t n_noted, n_noted_done; /* notes ever made, and done with */
    bool has_drops;                 /* one of the notes removes a row: do not wait with it */
    uint64_t n_taken, n_finished;   /* pages ever put into the ring, and out of it again */
    uint32_t n_flushing;            /* callers waiting: notes are written at once */
    uint64_t paused_until;          /* now_ns; 0: not paused */
    bool damaged;                   /* the file must be replaced */
    bool fault_logged;              /* one line until writing works again */
    struct err fault;               /* since the last flush */
    struct err cause;               /* of the pause */
    struct prefix_stats n;          /* counters */
};

/* Open both connections and hold the shared lock. Replaces the file when it is `damaged` or turns
 * out not to be ours, if no other process has it open. */
int prefix_connect(struct prefix_store *p, bool damaged, struct err *e);
void prefix_disconnect(struct prefix_store *p); /* under read_lock, or before the thread starts */

/* ---- prefix_write.c ---- */

void *prefix_write_thread(void *store);

#endif
