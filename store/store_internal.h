/* What the files of store/ share: the SQLite helpers, the catalogue's primitives, the layout of a
 * model database, the hashing thread. Nothing outside this folder (and its tests) includes it.
 *
 * A model database holds one GGUF: per shard the header bytes as they were, and the data section
 * cut into chunks of STORE_CHUNK_BYTES. Chunks are numbered from 1 through all shards; the last one
 * of a shard is short. */
#ifndef INGOT_STORE_INTERNAL_H
#define INGOT_STORE_INTERNAL_H

#include <pthread.h>
#include <sqlite3.h>

#include "store/store.h"

enum {
    STORE_PATH_BYTES = 4096,        /* room for any path the store makes */
    STORE_MAX_SHARDS = 99999,       /* five digits in their file names */
    STORE_KEY_BYTES = 33,           /* 32 hexadecimal digits and the NUL */
    STORE_PARTIAL_AGE_S = 7 * 86400 /* an unfinished import is kept so long */
};

struct store {
    char *home;           /* absolute path, owned */
    sqlite3 *db;          /* ingot.db; used under `lock` only */
    pthread_mutex_t lock; /* also makes sqlite3_errmsg belong to the call that failed */
    bool read_only;       /* the directory cannot be written: looking and loading still work */
    bool full;            /* read_only because the disk is full */
    int batch_chunks;     /* an import commits after so many; tests lower it */
    int lock_wait_ms;     /* how long to wait for another import of the same file */
};

/* ---- db.c: SQLite with our allocator, our errors ---- */

enum db_mode {
    DB_CREATE,   /* read and write, made if absent */
    DB_WRITE,    /* read and write, must be there */
    DB_READ,     /* with locks, for a database that others may write */
    DB_IMMUTABLE /* no locks, no journal: a finished model, or a read-only directory */
};
int db_open(sqlite3 **out, const char *path, enum db_mode mode, struct err *e);
void db_close(sqlite3 *db); /* NULL is fine */
/* Turn result code rc of SQLite into an error about db's file; returns -1. */
int db_fail(sqlite3 *db, int rc, struct err *e);
int db_exec(sqlite3 *db, const char *sql, struct err *e);
/* Prepare and bind. `types` has a letter a parameter: s text (NULL is NULL), i int64_t, b blob
 * (pointer, size_t). Bound memory must live until the statement is finalized. */
int db_query(sqlite3_stmt **st, sqlite3 *db, struct err *e, const char *sql, const char *types,
             ...);
/* Advance; *row says whether there is one. */
int db_step(bool *row, sqlite3_stmt *st, struct err *e);
/* db_query, run to the end, finalize. */
int db_run(sqlite3 *db, struct err *e, const char *sql, const char *types, ...);
/* First column of the first row as an integer; `or_else` if there is no row. */
int db_number(int64_t *v, sqlite3 *db, int64_t or_else, const char *sql, struct err *e);
int db_begin(sqlite3 *db, struct err *e);
/* Commit when rc is 0, else roll back; returns 0 only if it committed. */
int db_end(sqlite3 *db, int rc, struct err *e);
/* Copy a text column into a fixed array; false if it does not fit (dst is then ""). */
bool db_text(char *dst, size_t cap, sqlite3_stmt *st, int column);

/* ---- files.c: paths, advisory locks, sweeping ---- */

int store_path(char out[STORE_PATH_BYTES], const struct store *s, const char *rel, struct err *e);
int model_path(char out[STORE_PATH_BYTES], const struct store *s, const char *digest,
               struct err *e);
int partial_path(char out[STORE_PATH_BYTES], const struct store *s, const char *key, struct err *e);
int dir_sync(const char *path, struct err *e); /* make renames in it durable */
/* Lock a hexadecimal name against other processes and threads; waits at most wait_ms, then
 * ERR_BUSY with `what`. *fd is to be closed to unlock; a dead process lets go by itself. */
int store_lock(int *fd, const struct store *s, const char *hex, int wait_ms, const char *what,
               struct err *e);
/* Remove unfinished imports older than STORE_PARTIAL_AGE_S; faults are only logged. */
void sweep_partials(const struct store *s);
/* Finish removals: unlink model databases that the catalogue has given up. */
void sweep_doomed(struct store *s);
/* A whole model database with this import key that the catalogue does not know (a kill between
 * rename and commit). Fills digest, or leaves it "". */
int find_orphan(char digest[65], struct store *s, const char *key, struct err *e);

/* ---- catalogue.c ---- */

struct link_shard {
    uint64_t n_bytes;
    int64_t mtime_ns;
};
/* Put m into the catalogue under m->name in one transaction; m comes back as stored. links: one
 * entry a shard for a linked model, else NULL. */
int catalogue_add(struct store *s, struct store_model *m, const char *key,
                  const struct link_shard *links, bool replace, struct err *e);
/* Exact name only; *found says whether; key (may be NULL) is the model's import key. */
int catalogue_get(bool *found, struct store *s, struct store_model *m, char key[STORE_KEY_BYTES],
                  const char *name, struct err *e);
/* Digest of a stored model with this import key, or "". */
int catalogue_by_key(char digest[65], struct store *s, const char *key, struct err *e);
/* Digest already known for a linked file that has not changed since, or "". */
int catalogue_link_digest(char digest[65], struct store *s, const char *path,
                          const struct link_shard *now, uint32_t n, struct err *e);
/* A linked model's shards as they were when it was registered; *out is freed with mem_free. */
int catalogue_links(struct link_shard **out, uint32_t *n, struct store *s,
                    const struct store_model *m, struct err *e);
/* A linked model's files were looked at again: these are their sizes and times now. */
int catalogue_relink(struct store *s, const struct store_model *m, const struct link_shard *links,
                     struct err *e);
int store_writable(const struct store *s, struct err *e); /* 0, or the error that says why not */

/* ---- names.c ---- */

int name_check(const char *name, struct err *e); /* the rules for a new name */
/* A name for a model that came without one: general.name, else the file's name, with the block
 * type as tag. */
void name_make(char out[128], const struct gguf *g, const char *path, const char *quant);
/* Append `; did you mean a, b?` to e for the names that come near; n names. */
void name_suggest(struct err *e, const char *wanted, const struct store_model *models, size_t n);
/* Path of shard i (from 0) of n: `path` itself when n is 1, else path with its number set. */
int shard_path(char *out, size_t cap, const char *path, uint32_t i, uint32_t n);

/* ---- model_db.c: one model database ---- */

struct layout {
    uint32_t n_shards;
    int64_t n_chunks;
    uint64_t n_bytes;          /* of all shards, headers included */
    char key[STORE_KEY_BYTES]; /* XXH3 of headers and sizes: names the partial database */
    char digest[65];           /* "" until the model is whole */
    struct layout_shard {
        uint8_t *header; /* header_bytes of them; owned by the layout */
        uint64_t header_bytes, file_bytes;
        int64_t first_chunk, n_chunks;
    } * shards; /* owned */
};
/* Give the chunks their numbers from the shards' sizes, and make the key. */
int layout_number(struct layout *l, struct err *e);
int layout_parse(struct gguf **out, const struct layout *l, struct err *e);
size_t layout_chunk_bytes(const struct layout *l, int64_t chunk); /* 0 if there is none such */
void layout_fini(struct layout *l);

int model_db_create(sqlite3 **out, const char *path, const struct layout *l, const struct gguf *g,
                    struct err *e);
int model_db_layout(struct layout *l, sqlite3 *db, struct err *e);
int model_db_count(int64_t *n, sqlite3 *db, struct err *e); /* chunks stored, without a hole */
int model_db_sums(struct hash128 **out, sqlite3 *db, int64_t n, struct err *e);
int chunk_put(sqlite3 *db, int64_t chunk, const void *p, size_t n, struct err *e);
/* Read a chunk's n bytes; *blob is a handle to reuse (NULL at first), closed on failure. */
int chunk_read(void *dst, sqlite3_blob **blob, sqlite3 *db, int64_t chunk, size_t n, struct err *e);

/* ---- source.c: the plain files of one model, read for an import or an export ---- */

struct source {
    uint32_t n; /* shards */
    struct source_file {
        char *path; /* owned */
        int fd;     /* -1 when closed */
        struct link_shard at_open;
    } * files; /* owned */
};
/* Open shards 0..n-1 of the set that `path` is the first of. */
int source_open(struct source *src, const char *path, uint32_t n, struct err *e);
int source_read(struct source *src, void *dst, uint32_t shard, uint64_t offset, size_t n,
                struct err *e);
int source_unchanged(const struct source *src, struct err *e); /* since source_open */
int source_digest(char digest[65], struct source *src, struct err *e); /* reads all of it */
void source_fini(struct source *src);
/* Size and time of shard i's file now; ERR_NOT_FOUND when it is gone. */
int source_stat(struct link_shard *now, const char *path, uint32_t i, uint32_t n, struct err *e);

/* ---- hasher.c: SHA-256 beside the reading and writing ---- */

struct hasher;
int hasher_new(struct hasher **out, struct err *e);
/* The next free buffer of STORE_CHUNK_BYTES; may wait. It stays unchanged until the next call. */
uint8_t *hasher_buffer(struct hasher *h);
void hasher_push(struct hasher *h, size_t n); /* hash the first n bytes of that buffer */
void hasher_put(struct hasher *h, const void *p, size_t n); /* any size, copied */
void hasher_digest(char digest[65], struct hasher *h);      /* waits for the rest; once only */
void hasher_free(struct hasher *h);                         /* NULL is fine */

#endif
