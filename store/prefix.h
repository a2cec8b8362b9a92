/* The persistent tier of the prefix cache: KV pages in prefix.db under the store's directory, for
 * every process of this user. It knows keys, token ids and bytes; what a key is made of is the
 * engine's matter. It is a cache: damage, a full disk or a second process cost pages, never a
 * request, and never give a wrong page. A page is compared (parent, token ids, size) and checked
 * (XXH3-128) before it is handed out; what came before it is in the parent's key.
 *
 * Writing is behind: prefix_put copies the page and returns; one low-priority thread writes. Every
 * function may be called by several threads at once. prefix_put, prefix_has, prefix_get and
 * prefix_touch never wait for the disk's writer, but for some seconds when a damaged file is being
 * replaced; prefix_put and prefix_touch allocate nothing. */
#ifndef INGOT_PREFIX_H
#define INGOT_PREFIX_H

#include "base/base.h"

struct prefix_store; /* one a process and directory */

enum {
    PREFIX_MAX_IDS = 4096,           /* token ids of one page */
    PREFIX_MAX_KV_BYTES = 256 << 20, /* of one page */
};

struct prefix_config {
    uint64_t max_bytes;   /* of prefix.db; 0: 10 % of the disk's free space, at most 20 GiB */
    uint64_t dirty_bytes; /* memory for pages not yet written; 0: 64 MiB (taken as it fills) */
};

struct prefix_key {
    uint8_t b[16]; /* of SHA-256, chained by the engine over all that the KV depends on */
};

struct prefix_page {
    struct prefix_key key;
    struct prefix_key parent; /* of the page before; the root's key for a first page */
    const int32_t *ids;       /* n_ids token ids of this page */
    int32_t n_ids;            /* 1..PREFIX_MAX_IDS */
    const void *kv;           /* kv_bytes bytes; not used by prefix_get */
    size_t kv_bytes;          /* 1..PREFIX_MAX_KV_BYTES */
    uint64_t model_tag;       /* first 8 bytes of the weights digest: for prefix_models, _clear */
    uint32_t cost_us;         /* to compute it again; decides with size and use what is evicted */
};

/* What became of a look-up; PREFIX_HIT or the reason of the miss. */
enum prefix_get {
    PREFIX_HIT,
    PREFIX_ABSENT,      /* never seen, or long ago */
    PREFIX_EVICTED,     /* gave way to others (known for the last 65536 such pages) */
    PREFIX_OTHER_TEXT,  /* the key is there with other token ids or another parent: a collision */
    PREFIX_OTHER_SIZE,  /* the key is there with another kv_bytes */
    PREFIX_CORRUPT,     /* damaged on disk; logged, and dropped by itself */
    PREFIX_UNAVAILABLE, /* the database cannot be read just now (no memory, I/O, being replaced) */
    PREFIX_N_RESULTS
};
const char *prefix_get_name(enum prefix_get r); /* "hit", "absent", ... for metrics */

/* `home` is store_home(): an existing directory. An unknown or damaged prefix.db is moved aside or
 * replaced, with one line in the log. An error (not writable, no memory) means: go on without. */
int prefix_open(struct prefix_store **out, const char *home, const struct prefix_config *c,
                struct err *e);
/* Writes what is waiting, then frees. NULL is fine. */
void prefix_close(struct prefix_store *p);
/* Bytes of memory it takes at most when its pages have kv_bytes bytes: what waits to be written, the
 * connections' caches, packing. */
uint64_t prefix_store_bytes(const struct prefix_store *p, uint64_t kv_bytes);

/* Look up want->key and compare parent, ids and kv_bytes; on PREFIX_HIT kv holds kv_bytes bytes,
 * otherwise what it holds is undefined. Also finds pages that are not written yet. */
enum prefix_get prefix_get(struct prefix_store *p, void *kv, const struct prefix_page *want);
/* Is a page with this key there (written or waiting)? Saves reading it from the device again. */
bool prefix_has(struct prefix_store *p, const struct prefix_key *key);
/* Copies the page to be written later. False: not kept, because the dirty bound is reached, the
 * disk was full a moment ago, or the page is over the limits. When the file is at its cap, a page
 * comes in only at the cost of pages worth less (and after a page that had to go, never): so put
 * chains from their beginning. */
bool prefix_put(struct prefix_store *p, const struct prefix_page *page);
/* The page was used from memory: keep it (and those before it) on disk as long as if read there. */
void prefix_touch(struct prefix_store *p, const struct prefix_key *key);
/* Wait until everything put so far is written. ERR_FULL or ERR_IO: pages were given up since the
 * last flush. */
int prefix_flush(struct prefix_store *p, struct err *e);
/* The same, but not beyond until_ns (of now_ns), and leaving faults to prefix_flush. */
void prefix_flush_until(struct prefix_store *p, uint64_t until_ns);

struct prefix_stats {
    uint64_t pages, bytes;           /* in prefix.db now: rows, and disk space they take */
    uint64_t max_bytes;              /* the cap */
    uint64_t gets[PREFIX_N_RESULTS]; /* by result, of this process, as are all that follow */
    uint64_t puts, refused;          /* prefix_put true, false */
    uint64_t written, known,
        given_up;              /* pages put: now in the file, already there, lost to a fault */
    uint64_t outvalued;        /* pages put that were worth less than all that is there */
    uint64_t evicted, corrupt; /* pages removed for room, for their checksum */
    uint64_t replaced;         /* times that the whole file had to be replaced */
    uint64_t dirty_pages, dirty_bytes; /* waiting now */
    bool paused;                       /* writing rests after a full disk or a fault */
};
void prefix_stats(struct prefix_store *p, struct prefix_stats *s);
/* Is room being made for what prefix_put refused just now? Takes no look at the disk. */
bool prefix_is_writing(struct prefix_store *p);

/* ---- for `ingot cache`; they work beside other processes ---- */

struct prefix_model {
    uint64_t model_tag;
    uint64_t pages, tokens;
    uint64_t kv_bytes, stored_bytes; /* as in memory; as in the file, compressed where it paid */
    uint64_t hits;
    int64_t last_used; /* seconds since 1970 */
};
/* What is there by model, most bytes first; *out is freed with mem_free. */
int prefix_models(struct prefix_store *p, struct prefix_model **out, size_t *n, struct err *e);
/* Evict until the file's contents take at most max_bytes, and give the space back to the disk. */
int prefix_trim(struct prefix_store *p, uint64_t max_bytes, struct err *e);
/* Drop the pages of one model, or all (model_tag NULL); also those not written yet. */
int prefix_clear(struct prefix_store *p, const uint64_t *model_tag, struct err *e);

struct prefix_moved {
    uint64_t pages;     /* copied */
    uint64_t known;     /* already there (import) */
    uint64_t outvalued; /* worth less than all there, which fills the cap (import) */
    uint64_t corrupt;   /* left out because of their checksum */
};
/* Called now and then with pages done and in all; non-zero cancels (ERR_CANCELLED). */
typedef int (*prefix_progress)(void *user, uint64_t done, uint64_t total);
/* Write all sound pages to a new file (itself a prefix.db); never overwrites: ERR_EXISTS. */
int prefix_export(struct prefix_store *p, struct prefix_moved *m, const char *path,
                  prefix_progress progress, void *user, struct err *e);
/* Add the pages of an exported file, each checked for damage; the cap holds. Checksums are no
 * signature: whoever made the file decides what the models here will read, as with a model file. */
int prefix_import(struct prefix_store *p, struct prefix_moved *m, const char *path,
                  prefix_progress progress, void *user, struct err *e);

#endif
