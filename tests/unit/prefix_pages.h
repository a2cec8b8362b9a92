/* Pages for the tests of the persistent prefix tier: page i of a world is made from its number, so
 * that whatever comes back can be checked without keeping it. Included by test programs only. */
#ifndef INGOT_TEST_PREFIX_PAGES_H
#define INGOT_TEST_PREFIX_PAGES_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "store/prefix_internal.h"
#include "tests/unit/unit.h"

enum { PAGE_IDS = 32, PAGE_MAX = 1 << 20 };

struct made {
    struct prefix_page page; /* points into this struct */
    int32_t ids[PAGE_IDS];
    uint8_t kv[PAGE_MAX];
};

static struct prefix_key make_key(uint64_t i)
{
    struct prefix_key k;
    struct hash128 h = hash_xxh3(&i, sizeof i, 99);
    memcpy(k.b, &h, sizeof k.b);
    return k;
}

/* Every third page shrinks under zstd. */
static void make_page(struct made *m, uint64_t i, size_t kv_bytes)
{
    uint64_t state = i * 77 + 1;
    CHECK(kv_bytes <= sizeof m->kv);
    for (size_t at = 0; at < kv_bytes; at += 8) {
        uint64_t v = unit_rand(&state);
        v = i % 3 == 0 ? v & 0x0f0f0f0f : v;
        memcpy(m->kv + at, &v, MIN(kv_bytes - at, sizeof v));
    }
    for (int k = 0; k < PAGE_IDS; k++)
        m->ids[k] = (int32_t)(i * 100 + (uint64_t)k);
    m->page = (struct prefix_page){
        .key = make_key(i),
        .parent = make_key(i ? i - 1 : 1000000),
        .ids = m->ids,
        .n_ids = PAGE_IDS,
        .kv = m->kv,
        .kv_bytes = kv_bytes,
        .model_tag = i / 100,
        .cost_us = 1000,
    };
}

/* Look page i up; a hit with other bytes is a failure of the test. */
static enum prefix_get get_page(struct prefix_store *p, uint64_t i, size_t kv_bytes)
{
    struct made *m = malloc(sizeof *m);
    uint8_t *got = malloc(kv_bytes);
    CHECK(m && got);
    make_page(m, i, kv_bytes);
    enum prefix_get r = prefix_get(p, got, &m->page);
    OK_MSG(r != PREFIX_HIT || !memcmp(got, m->kv, kv_bytes), "page %d came back wrong", (int)i);
    free(got);
    free(m);
    return r;
}

static bool put_page(struct prefix_store *p, uint64_t i, size_t kv_bytes)
{
    struct made *m = malloc(sizeof *m);
    CHECK(m);
    make_page(m, i, kv_bytes);
    bool ok = prefix_put(p, &m->page);
    memset(m, 0xee, sizeof *m); /* the store has its copy */
    free(m);
    return ok;
}

static struct prefix_store *open_prefix(const char *home, uint64_t max_bytes, uint64_t dirty_bytes)
{
    struct prefix_store *p = NULL;
    struct prefix_config c = {.max_bytes = max_bytes, .dirty_bytes = dirty_bytes};
    struct err e = {0};
    OK_CALL(prefix_open(&p, home, &c, &e), e);
    CHECK(p);
    return p;
}

static struct prefix_stats stats_of(struct prefix_store *p)
{
    struct prefix_stats s;
    prefix_stats(p, &s);
    return s;
}

static const char *path_in(const char *dir, const char *name)
{
    static char paths[4][300];
    static int at;
    char *s = paths[at++ & 3];
    snprintf(s, sizeof paths[0], "%s/%s", dir, name);
    return s;
}

static void flush(struct prefix_store *p)
{
    struct err e = {0};
    OK_CALL(prefix_flush(p, &e), e);
}

#endif
