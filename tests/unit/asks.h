/* For tests of a whole engine on the CPU backend: a tiny model on disk, requests that keep what
 * comes back, and stores and engines opened with the failure on record. Prompts are made from
 * numbers, so that two that are to begin alike do. Included by test programs only. */
#ifndef INGOT_TEST_ASKS_H
#define INGOT_TEST_ASKS_H

#include "engine/engine_internal.h"
#include "tests/unit/tiny.h"
#include "tests/unit/unit.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1 }; /* slow: fewer ways of the same */
#else
enum { SANITIZED = 0 };
#endif

enum { P = KV_PAGE_TOKENS, ASK_MAX_IDS = 2048 };

struct ask { /* one request and what came back */
    int32_t ids[ASK_MAX_IDS], got[ASK_MAX_IDS];
    size_t n_got;
    struct request r;
    struct request_stats s;
    struct err e; /* why it was not taken */
    atomic_bool done;
};

static inline void ask_token(void *user, int32_t id, const char *text, size_t n)
{
    struct ask *a = user;
    a->got[a->n_got++] = id;
}

static inline void ask_done(void *user, const struct request_stats *s)
{
    struct ask *a = user;
    a->s = *s;
    a->done = true;
}

/* For a prompt that is in a->ids. */
static inline void ask_ready(struct ask *a, size_t n, uint32_t max_tokens)
{
    a->n_got = 0;
    a->e = (struct err){0};
    a->done = false;
    a->r = (struct request){.ids = a->ids,
                            .n_ids = n,
                            .max_tokens = max_tokens,
                            .ignore_eog = true,
                            .on_token = ask_token,
                            .on_done = ask_done,
                            .user = a};
    sample_defaults(&a->r.sample);
    a->r.sample.temperature = 0;
}

/* A prompt of n tokens: text number `text` up to n_common, then its own. */
static inline void ask_init(struct ask *a, uint64_t text, size_t n, size_t n_common, uint64_t own)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t seed = (i < n_common ? text : own) * 1000003 + i;
        a->ids[i] = 3 + (int32_t)(unit_rand(&seed) % 250);
    }
    ask_ready(a, n, 6);
}

static inline bool ask_submit(struct ask *a, struct engine *en)
{
    return engine_submit(en, &a->r, &a->e) == 0;
}

static inline bool ask_wait(struct ask *a)
{
    for (int i = 0; i < 600000 && !a->done; i++)
        usleep(200);
    return OK_MSG(a->done, "a request was never answered");
}

/* Submit, wait, and expect the answer whole. */
static inline bool ask_run(struct ask *a, struct engine *en)
{
    a->n_got = 0;
    a->done = false;
    return OK_CALL(engine_submit(en, &a->r, &a->e), a->e) && ask_wait(a) &&
           OK_MSG(a->n_got == a->r.max_tokens, "%zu tokens of %u: %s", a->n_got, a->r.max_tokens,
                  a->s.err.msg);
}

/* What came is what was wanted, as far as it goes. */
static inline bool ask_agrees(const struct ask *a, const struct ask *want)
{
    return a->n_got <= want->n_got && !memcmp(a->got, want->got, a->n_got * sizeof *a->got);
}

/* A small llama in a folder of its own, made once for each pair of numbers; static buffer. */
static inline const char *asks_model(uint64_t seed, uint32_t n_ctx)
{
    static struct {
        uint64_t seed;
        uint32_t n_ctx;
        char path[160];
    } made[8];
    size_t i = 0;
    while (i < ARRAY_LEN(made) && made[i].n_ctx &&
           (made[i].seed != seed || made[i].n_ctx != n_ctx))
        i++;
    CHECK(i < ARRAY_LEN(made));
    if (!made[i].n_ctx) {
        struct tiny_spec s;
        struct err e = {0};
        tiny_defaults(&s, "llama");
        s.seed = seed;
        s.n_ctx = n_ctx;
        snprintf(made[i].path, sizeof made[i].path, "%s/model.gguf", unit_memdir());
        OK_CALL(tiny_write(made[i].path, &s, &e), e);
        made[i].seed = seed;
        made[i].n_ctx = n_ctx;
    }
    return made[i].path;
}

static inline struct engine *asks_engine(const char *path, const struct engine_config *cfg,
                                         const struct backend *be)
{
    struct model_file *f = NULL;
    struct engine *en = NULL;
    struct err e = {0};
    struct engine_config c = *cfg;
    c.quiet_load = true;
    c.n_threads = c.n_threads ? c.n_threads : 1;
    if (!OK_CALL(model_file_open(&f, NULL, path, &e), e))
        return NULL;
    OK_CALL(engine_open_on(&en, f, &c, be, &e), e);
    model_file_close(f);
    return en;
}

static inline struct prefix_store *asks_store(const char *home)
{
    struct prefix_store *s = NULL;
    struct err e = {0};
    OK_CALL(prefix_open(&s, home, &(struct prefix_config){1 << 26, 1 << 22}, &e), e);
    return s;
}

static inline void asks_forget(const char *home) /* what the persistent tier has */
{
    static const char *const names[] = {"prefix.db", "prefix.db-wal", "prefix.db-shm",
                                        "prefix.db.aside"};
    char path[300];
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        snprintf(path, sizeof path, "%s/%s", home, names[i]);
        unlink(path);
    }
}

#endif
