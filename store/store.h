/* store: SQLite files under one directory: the catalogue (ingot.db) and one database a model
 * (models/<sha256>.db) that holds the GGUF bytes as checksummed chunks. Knows the file format and
 * nothing of engines or text.
 *
 * Crash safety: a model is in the catalogue only when its last byte and its digest are on disk. An
 * import that was killed leaves a partial database that the next import of the same file resumes
 * (or `store_open` ignores). Nothing that was acknowledged is lost. */
#ifndef INGOT_STORE_H
#define INGOT_STORE_H

#include "base/base.h"
#include "gguf/gguf.h"
#include "store/prefix.h"

struct store;

enum { STORE_CHUNK_BYTES = 1 << 20 }; /* layout constant: bytes of one weight row in a model file */

/* Open or create the directory: `home`, else $INGOT_HOME, else ~/.ingot. One that cannot be written,
 * also because its disk is full, is opened for reading; from a full disk models can be removed. */
int store_open(struct store **out, const char *home, struct err *e);
void store_close(struct store *s); /* NULL is fine */
const char *store_home(const struct store *s);

struct store_model {
    char name[128];      /* the catalogue's name: [a-z0-9._:/-], unique, case kept but compared without */
    char digest[65];     /* SHA-256 of the whole file (all shards in order), hexadecimal */
    char arch[32];       /* general.architecture */
    char quant[32];      /* the most frequent block type by bytes, e.g. "Q4_K" */
    char link_path[512]; /* plain file used in place (`import --link`); "" when in the store */
    uint64_t n_bytes;    /* of the GGUF file(s) */
    uint64_t n_params;   /* weights counted over all tensors */
    uint32_t n_ctx;      /* context length the header states; 0 if none */
    int64_t added;       /* when the name was: seconds since 1970 */
    uint32_t n_shards;
};

/* Called now and then with bytes done and in all; a non-zero answer cancels (ERR_CANCELLED). */
typedef int (*store_progress)(void *user, uint64_t done, uint64_t total);

struct store_import {
    const char *path;    /* a GGUF file, or the first of a set of shards */
    const char *name;    /* NULL: made from general.name or the file's name */
    bool link;           /* register the file in place, no copy */
    bool replace;        /* an existing name is pointed at the new model */
    const char *expect_sha256; /* hexadecimal, or NULL: refuse a file with another digest */
    store_progress progress;
    void *user;
};
/* Copies (or links) and verifies a file, fills *m. The same bytes imported twice are stored once:
 * the second import only adds the name. Errors leave the catalogue unchanged. */
int store_import(struct store *s, struct store_model *m, const struct store_import *in,
                 struct err *e);
/* Write the GGUF back byte for byte (shard i of a set to `path` with its number set; a single file
 * to `path`). Refuses to overwrite unless `replace`. Checks every chunk and the digest. */
int store_export(struct store *s, const char *name, const char *path, bool replace,
                 store_progress progress, void *user, struct err *e);
/* The models in order of name; *out is an array to be freed with mem_free. */
int store_list(struct store *s, struct store_model **out, size_t *n, struct err *e);
/* By exact name, or by a unique prefix of the digest (8 or more digits). ERR_NOT_FOUND says what
 * names come near. */
int store_find(struct store *s, struct store_model *m, const char *name, struct err *e);
int store_copy(struct store *s, const char *from, const char *to, struct err *e); /* a new name */
/* Drop a name; the database file goes with the last name that points at it. */
int store_remove(struct store *s, const char *name, struct err *e);

/* ---- reading a model: the same for a plain file and for one in the store ---- */

struct model_file;
/* `ref` is a path to a .gguf file, or a name in the store (s may be NULL when only paths can be
 * meant). A path wins when it has a '/' or ends in .gguf. */
int model_file_open(struct model_file **out, struct store *s, const char *ref, struct err *e);
void model_file_close(struct model_file *f); /* NULL is fine */
const struct gguf *model_file_gguf(const struct model_file *f); /* header; lives as long as f */
const char *model_file_name(const struct model_file *f);        /* for messages */
/* Identity of the weights: the SHA-256 digest where known, else XXH3 over header, size, time of
 * the last change and a fixed sample of the data, prefixed "x-". */
const char *model_file_digest(struct model_file *f);
/* Read n bytes of a tensor from `offset` within it. Chunks from the store are checksummed before
 * use; a mismatch is ERR_CORRUPT and names the model, the tensor and the chunk. May be called by
 * several threads at once. */
int model_file_read(struct model_file *f, const struct gguf_tensor *t, void *dst, uint64_t offset,
                    size_t n, struct err *e);
/* Bytes of memory that the open model takes: header, lists and sums; without the pages of a mapped
 * file and without readers, which model_file_forget lets go of. */
uint64_t model_file_bytes(const struct model_file *f);
/* The weights have been copied: let go of readers, their chunks and mapped pages. Reading goes on to
 * work and takes them again. Not while another thread reads the same model_file. */
void model_file_forget(struct model_file *f);
/* The tensor's bytes in memory when the model is a mapped plain file, else NULL. */
const void *model_file_map(const struct model_file *f, const struct gguf_tensor *t);

/* ---- settings: small strings by key ("history", "default-model", ...) ---- */
int store_get_setting(struct store *s, struct buf *out, const char *key, struct err *e); /* "" if none */
int store_set_setting(struct store *s, const char *key, const char *value, struct err *e);
/* Saved chats of `ingot run` (/save): JSON text by name. */
int store_save_chat(struct store *s, const char *name, const char *json, struct err *e);
int store_load_chat(struct store *s, struct buf *out, const char *name, struct err *e);
struct store_chat {
    char name[201];
    int64_t saved; /* seconds since 1970 */
};
/* The saved chats, the newest first; *out is an array to be freed with mem_free. */
int store_list_chats(struct store *s, struct store_chat **out, size_t *n, struct err *e);

#endif
