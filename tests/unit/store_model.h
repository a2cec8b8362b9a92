/* GGUF files for the store's tests: tensors of random bytes from a seed, as large as asked for.
 * Included by test programs only; the functions are static, memory is the caller's. */
#ifndef INGOT_TEST_STORE_MODEL_H
#define INGOT_TEST_STORE_MODEL_H

#include <dirent.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gguf/gguf.h"
#include "store/store.h"
#include "tests/unit/unit.h"

/* Bytes that depend on seed and position only. */
static int random_fill(void *user, void *dst, uint64_t offset, size_t n, struct err *e)
{
    (void)e;
    uint8_t *p = dst;
    for (size_t i = 0; i < n;) {
        uint64_t state = (uint64_t)(uintptr_t)user * 1000003 + (offset + i) / 8;
        uint64_t v = unit_rand(&state);
        size_t from = (size_t)((offset + i) % 8), part = MIN(n - i, 8 - from);
        memcpy(p + i, (uint8_t *)&v + from, part);
        i += part;
    }
    return 0;
}

struct test_model {
    const char *title; /* general.name, or NULL */
    uint64_t seed;
    uint32_t n_tensors;
    uint64_t rows;            /* each tensor is F32 256 x rows */
    uint32_t shard, n_shards; /* 0, 0: not split */
};

/* The header depends on `title`, the counts and sizes, not on the seed. */
static void write_model(const char *path, struct test_model m)
{
    struct err e = {0};
    struct gguf_writer *w = gguf_writer_new(3, 32);
    gguf_writer_str(w, "general.architecture", "llama", 5);
    if (m.title)
        gguf_writer_str(w, "general.name", m.title, strlen(m.title));
    gguf_writer_u32(w, "llama.context_length", 2048);
    if (m.n_shards) {
        gguf_writer_u32(w, "split.no", m.shard);
        gguf_writer_u32(w, "split.count", m.n_shards);
        gguf_writer_u32(w, "split.tensors.count", m.n_tensors * m.n_shards);
    }
    for (uint32_t i = 0; i < m.n_tensors; i++) {
        char name[64];
        uint64_t ne[2] = {256, m.rows + i}; /* no two alike */
        snprintf(name, sizeof name, "blk.%u.weight", m.shard * m.n_tensors + i);
        gguf_writer_tensor(w, name, GGUF_F32, 2, ne, random_fill,
                           (void *)(uintptr_t)(m.seed * 100 + m.shard * 10 + i));
    }
    OK_CALL(gguf_writer_finish(w, path, &e), e);
    gguf_writer_free(w);
}

static bool same_files(const char *a, const char *b)
{
    struct mapped x = {0}, y = {0};
    struct err e = {0};
    bool same = OK_CALL(file_map(&x, a, &e), e) && OK_CALL(file_map(&y, b, &e), e) && x.n == y.n &&
                !memcmp(x.data, y.data, x.n);
    file_unmap(&x);
    file_unmap(&y);
    return same;
}

/* "<dir>/<name>"; stays until the program ends. */
static const char *in_dir(const char *dir, const char *name)
{
    static struct arena paths;
    char joined[512];
    int n = snprintf(joined, sizeof joined, "%s/%s", dir, name);
    CHECK(n < (int)sizeof joined);
    char *p = arena_strdup(&paths, joined, (size_t)n);
    CHECK(p);
    return p;
}

/* How many files in <home>/models have names of this (shell) pattern. */
static int count_files(const char *home, const char *pattern)
{
    DIR *d = opendir(in_dir(home, "models"));
    int n = 0;
    for (struct dirent *f; d && (f = readdir(d));)
        n += fnmatch(pattern, f->d_name, 0) == 0;
    if (d)
        closedir(d);
    return n;
}

/* Open, read all of it in odd pieces, compare with the plain file. */
static bool reads_like(struct store *s, const char *name, const char *plain)
{
    struct model_file *f = NULL, *p = NULL;
    struct err e = {0};
    enum { PIECE = 700001 };
    uint8_t *got = mem_alloc(PIECE), *want = mem_alloc(PIECE);
    bool same = got && want && OK_CALL(model_file_open(&f, s, name, &e), e) &&
                OK_CALL(model_file_open(&p, NULL, plain, &e), e);
    const struct gguf *g = same ? model_file_gguf(f) : NULL, *h = same ? model_file_gguf(p) : NULL;
    same = same && OK(g->n_tensors == h->n_tensors);
    for (uint64_t i = 0; same && i < g->n_tensors; i++) {
        const struct gguf_tensor *t = &g->tensors[i], *u = &h->tensors[i];
        same = OK(!strcmp(t->name, u->name) && t->n_bytes == u->n_bytes);
        for (uint64_t at = 0; same && at < t->n_bytes; at += PIECE) {
            size_t n = (size_t)MIN(t->n_bytes - at, (uint64_t)PIECE);
            same = OK_CALL(model_file_read(f, t, got, at, n, &e), e) &&
                   OK_CALL(model_file_read(p, u, want, at, n, &e), e) && OK(!memcmp(got, want, n));
        }
    }
    model_file_close(f);
    model_file_close(p);
    mem_free(got);
    mem_free(want);
    return same;
}

/* The digest of the plain file at `path`, last changed `seconds` after 1970. */
static inline void plain_digest(char out[65], const char *path, time_t seconds)
{
    struct model_file *f = NULL;
    struct err e = {0};
    OK(utimensat(AT_FDCWD, path, (struct timespec[2]){{seconds, 0}, {seconds, 0}}, 0) == 0);
    OK_CALL(model_file_open(&f, NULL, path, &e), e);
    snprintf(out, 65, "%s", model_file_digest(f));
    model_file_close(f);
}

#endif
