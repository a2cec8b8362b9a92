/* The GGUF file: reader, shards, writer and verify. Replays the loader cases and opens every
 * reference model where they are there; everything else is made here. */
#include "gguf/gguf.h"
#include "tests/unit/unit.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

/* ---- a model made here ---- */

struct fill_from {
    const uint8_t *p;
    int fail; /* answer with an error */
};

static int fill(void *user, void *dst, uint64_t offset, size_t n, struct err *e)
{
    struct fill_from *f = user;
    if (f->fail)
        return err_set(e, ERR_IO, "no bytes today");
    memcpy(dst, f->p + offset, n);
    return 0;
}

static const char *const words[] = {"<unk>", "", "a", "\xe2\x96\x81the", "x y"};
static const float scores[] = {0, -1, -2.5f, -INFINITY, 3};
static const int32_t types[] = {2, 1, 1, 1, 4};
static uint8_t weights[64 * 1024];

static void add_keys(struct gguf_writer *w)
{
    struct gguf_str s[5];
    for (int i = 0; i < 5; i++)
        s[i] = (struct gguf_str){words[i], strlen(words[i])};
    gguf_writer_str(w, "general.architecture", "llama", 5);
    gguf_writer_u32(w, "llama.block_count", 1);
    gguf_writer_f32(w, "llama.rope.freq_base", 10000.5f);
    gguf_writer_bool(w, "tokenizer.ggml.add_bos_token", true);
    gguf_writer_str(w, "tokenizer.ggml.model", "llama", 5);
    gguf_writer_strings(w, "tokenizer.ggml.tokens", 5, s);
    gguf_writer_array(w, "tokenizer.ggml.scores", GGUF_FLOAT32, 5, scores);
    gguf_writer_array(w, "tokenizer.ggml.token_type", GGUF_I32, 5, types);
    gguf_writer_u32(w, "tokenizer.ggml.bos_token_id", 4);
}

/* One tensor of each type, 512 x 3, and one of a single value. */
static void add_tensors(struct gguf_writer *w, struct fill_from *from)
{
    uint64_t ne[2] = {512, 3}, one = 1;
    uint64_t seed = 5;
    for (size_t i = 0; i < sizeof weights; i++)
        weights[i] = (uint8_t)(unit_rand(&seed) & 0x3b); /* no half or float of these is wild */
    for (uint32_t t = 0; t < GGUF_DTYPE_END; t++) {
        char name[32];
        if (!gguf_dtype_find(t))
            continue;
        snprintf(name, sizeof name, "t.%u.weight", t);
        gguf_writer_tensor(w, name, t, 2, ne, fill, from);
    }
    gguf_writer_tensor(w, "one", GGUF_F32, 1, &one, fill, from);
}

static const char *in_tmp(const char *name)
{
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", unit_tmpdir(), name);
    return path;
}

static const char *make_model(uint32_t version, uint32_t alignment)
{
    struct fill_from from = {weights, 0};
    struct err e = {0};
    const char *path = in_tmp("m.gguf");
    struct gguf_writer *w = gguf_writer_new(version, alignment);
    add_keys(w);
    add_tensors(w, &from);
    bool ok = OK_CALL(gguf_writer_finish(w, path, &e), e);
    gguf_writer_free(w);
    return ok ? path : NULL;
}

static void check_model(const struct gguf *g)
{
    struct err e = {0};
    uint32_t u = 0;
    float f = 0;
    bool b = false;
    struct gguf_str s = {0};
    OK_CALL(gguf_get_u32(g, "llama.block_count", &u, &e), e);
    OK_CALL(gguf_get_f32(g, "llama.rope.freq_base", &f, &e), e);
    OK_CALL(gguf_get_bool(g, "tokenizer.ggml.add_bos_token", &b, &e), e);
    OK_CALL(gguf_get_str(g, "general.architecture", &s, &e), e);
    OK(u == 1 && f == 10000.5f && b && s.n == 5 && memcmp(s.p, "llama", 5) == 0);
    const struct gguf_kv *kv = gguf_find(g, "tokenizer.ggml.tokens");
    if (OK(kv && kv->type == GGUF_ARRAY && kv->elem_type == GGUF_STRING && kv->n == 5))
        for (int i = 0; i < 5; i++)
            OK(kv->strings[i].n == strlen(words[i]) &&
               memcmp(kv->strings[i].p, words[i], kv->strings[i].n) == 0);
    kv = gguf_find(g, "tokenizer.ggml.scores");
    for (int i = 0; OK(kv && kv->n == 5) && i < 5; i++)
        OK(gguf_kv_number(kv, (uint64_t)i) == (double)scores[i]);
    kv = gguf_find(g, "tokenizer.ggml.token_type");
    for (int i = 0; OK(kv && kv->n == 5) && i < 5; i++)
        OK(gguf_kv_int(kv, (uint64_t)i) == types[i]);
}

static void test_a_written_file_reads_back_the_same(void)
{
    static const uint32_t alignments[] = {8, 32, 4096};
    for (uint32_t k = 0; k < 6; k++) {
        struct err e = {0};
        struct gguf *g;
        const char *path = make_model(2 + k % 2, alignments[k / 2]);
        if (!path || !OK_CALL(gguf_open(&g, path, &e), e))
            return;
        OK(g->version == 2 + k % 2 && g->alignment == alignments[k / 2] && g->n_tensors == 16);
        check_model(g);
        for (uint64_t i = 0; i < g->n_tensors; i++) {
            const struct gguf_tensor *t = &g->tensors[i];
            OK(gguf_find_tensor(g, t->name) == t && t->offset % g->alignment == 0);
            OK(memcmp(gguf_tensor_data(g, t), weights, t->n_bytes) == 0);
        }
        OK(gguf_find_tensor(g, "t.12.weight")->n_bytes == 6 * 144);
        OK(!gguf_find_tensor(g, "t.4.weight") && !gguf_find(g, "llama") && !gguf_find(g, ""));
        OK_CALL(gguf_verify(g, true, &e), e);
        gguf_free(g);
    }
}

static void test_copied_keys_keep_their_bytes(void)
{
    struct err e = {0};
    struct gguf *g, *h;
    const char *path = make_model(3, 64);
    if (!path || !OK_CALL(gguf_open(&g, path, &e), e))
        return;
    struct gguf_writer *w = gguf_writer_new(3, 32);
    for (uint64_t i = 0; i < g->n_kv; i++)
        gguf_writer_kv(w, &g->kv[i]);
    path = in_tmp("copy.gguf");
    OK_CALL(gguf_writer_finish(w, path, &e), e);
    gguf_writer_free(w);
    if (OK_CALL(gguf_open(&h, path, &e), e)) {
        OK(h->alignment == 32 && h->n_kv == g->n_kv - 1 && !gguf_find(h, "general.alignment"));
        check_model(h);
        gguf_free(h);
    }
    gguf_free(g);
}

/* Expect the writer to refuse, and to leave nothing behind. */
static void expect_no_file(struct gguf_writer *w, const char *word)
{
    struct err e = {0};
    char list[300];
    const char *dir = unit_tmpdir();
    snprintf(list, sizeof list, "%s/x.gguf", dir);
    OK(gguf_writer_finish(w, list, &e) != 0);
    OK_MSG(strstr(e.msg, word), "'%s' has no '%s'", e.msg, word);
    snprintf(list, sizeof list, "rmdir '%s' && mkdir '%s'", dir, dir);
    OK_MSG(system(list) == 0, "%s is not empty", dir);
    gguf_writer_free(w);
}

static void test_the_writer_refuses_what_the_reader_would_and_leaves_no_file(void)
{
    struct fill_from from = {weights, 0}, none = {weights, 1};
    uint64_t ne[4] = {32, 1, 1, 1}, odd = 33, zero = 0, huge[2] = {UINT64_MAX - 31, 2};
    struct gguf_writer *w = gguf_writer_new(3, 32);
    gguf_writer_u32(w, "twice", 1);
    gguf_writer_u32(w, "twice", 1);
    expect_no_file(w, "duplicate key 'twice'");
    w = gguf_writer_new(3, 32);
    gguf_writer_tensor(w, "t", GGUF_Q8_0, 1, ne, fill, &from);
    gguf_writer_tensor(w, "t", GGUF_Q8_0, 1, ne, fill, &from);
    expect_no_file(w, "duplicate tensor 't'");
    w = gguf_writer_new(3, 32);
    gguf_writer_tensor(w, "t", GGUF_Q8_0, 1, &odd, fill, &from);
    expect_no_file(w, "'t'");
    w = gguf_writer_new(3, 32);
    gguf_writer_tensor(w, "t", GGUF_F32, 1, &zero, fill, &from);
    expect_no_file(w, "zero");
    w = gguf_writer_new(3, 32);
    gguf_writer_tensor(w, "t", GGUF_F32, 2, huge, fill, &from);
    expect_no_file(w, "overflow");
    w = gguf_writer_new(3, 32);
    gguf_writer_tensor(w, "t", 99, 1, ne, fill, &from);
    gguf_writer_u32(w, "later", 1);
    expect_no_file(w, "(99)");
    w = gguf_writer_new(3, 32);
    gguf_writer_tensor(w, "t", GGUF_F32, 1, ne, fill, &none);
    expect_no_file(w, "no bytes today");
    expect_no_file(gguf_writer_new(4, 32), "version");
    expect_no_file(gguf_writer_new(3, 24), "alignment 24");
    expect_no_file(NULL, "memory");
}

static void test_the_writer_survives_a_full_disk_and_no_memory(void)
{
    unsigned refused = 0;
    for (uint64_t n = 1;; n++) {
        struct fill_from from = {weights, 0};
        struct err e = {0};
        const char *path = in_tmp("x.gguf");
        struct gguf_writer *w = gguf_writer_new(3, 32);
        add_keys(w);
        add_tensors(w, &from);
        file_fail_at(n, ENOSPC);
        int rc = gguf_writer_finish(w, path, &e);
        file_fail_at(0, 0);
        gguf_writer_free(w);
        OK(access(path, F_OK) == (rc ? -1 : 0));
        if (!rc)
            break;
        OK_MSG(e.code == ERR_FULL, "%s", e.msg);
        refused++;
    }
    OK(refused >= 16);
    int rc = -1;
    for (uint64_t n = 1; rc && n < 1000; n++) {
        struct fill_from from = {weights, 0};
        struct err e = {0};
        mem_fail_at(n);
        struct gguf_writer *w = gguf_writer_new(3, 32);
        add_keys(w);
        add_tensors(w, &from);
        rc = gguf_writer_finish(w, in_tmp("y.gguf"), &e);
        mem_fail_at(0);
        gguf_writer_free(w);
        OK(!rc || e.code == ERR_MEMORY);
    }
    OK(rc == 0);
}

/* ---- getters ---- */

static void test_getters_accept_what_fits_and_name_what_does_not(void)
{
    static const struct {
        enum gguf_type type;
        int64_t v;
        bool fits;
    } ints[] = {{GGUF_U8, 200, true},   {GGUF_I8, -1, false},        {GGUF_U16, 60000, true},
                {GGUF_I16, -2, false},  {GGUF_I32, 70000, true},     {GGUF_U64, 1ll << 32, false},
                {GGUF_I64, 5000, true}, {GGUF_U32, 0xfffffff0, true}};
    static const uint8_t kinds[ARRAY_LEN(ints)] = {1, 1, 2, 2, 4, 8, 8, 4};
    for (size_t i = 0; i < ARRAY_LEN(ints); i++) {
        struct err e = {0};
        uint32_t u = 77;
        float f = 77;
        struct gguf_kv kv = {.key = {"k", 1},
                             .type = ints[i].type,
                             .elem_type = ints[i].type,
                             .n = 1,
                             .data = (const uint8_t *)&ints[i].v,
                             .n_bytes = kinds[i]};
        struct gguf_writer *w = gguf_writer_new(3, 32);
        struct gguf *g;
        const char *path = in_tmp("k.gguf");
        gguf_writer_kv(w, &kv);
        OK_CALL(gguf_writer_finish(w, path, &e), e);
        gguf_writer_free(w);
        if (!OK_CALL(gguf_open(&g, path, &e), e))
            return;
        OK(gguf_kv_int(gguf_find(g, "k"), 0) == ints[i].v);
        OK((gguf_get_u32(g, "k", &u, &e) == 0) == ints[i].fits);
        OK(u == (ints[i].fits ? (uint32_t)ints[i].v : 77));
        OK(ints[i].fits || strstr(e.msg, "'k'"));
        OK(gguf_get_f32(g, "k", &f, &e) == 0 && f == (float)ints[i].v);
        gguf_free(g);
    }
}

static void test_getters_refuse_the_wrong_kind_and_leave_defaults(void)
{
    struct gguf *g;
    struct err e = {0};
    const char *path = make_model(3, 32);
    if (!path || !OK_CALL(gguf_open(&g, path, &e), e))
        return;
    uint32_t u = 7;
    float f = 7;
    bool b = true;
    struct gguf_str s = {"d", 1};
    OK(!gguf_get_u32(g, "no.such", &u, &e) && !gguf_get_f32(g, "no.such", &f, &e) &&
       !gguf_get_bool(g, "no.such", &b, &e) && !gguf_get_str(g, "no.such", &s, &e));
    OK(gguf_get_u32(g, "tokenizer.ggml.scores", &u, NULL));
    OK(gguf_get_u32(g, "llama.rope.freq_base", &u, NULL));
    OK(gguf_get_u32(g, "tokenizer.ggml.add_bos_token", &u, NULL));
    OK(gguf_get_f32(g, "general.architecture", &f, NULL));
    OK(gguf_get_bool(g, "llama.block_count", &b, NULL));
    OK(gguf_get_str(g, "tokenizer.ggml.tokens", &s, &e));
    OK_MSG(strstr(e.msg, "tokenizer.ggml.tokens"), "%s", e.msg);
    OK(u == 7 && f == 7 && b && s.n == 1);
    gguf_free(g);
}

/* ---- bytes that are not what they should be ---- */

static struct buf read_file(const char *path)
{
    struct buf b = {0};
    struct err e = {0};
    OK_CALL(file_read_all(&b, path, 1 << 30, &e), e);
    return b;
}

/* A copy whose end is the end of its allocation, so that a sanitizer sees one byte too many. */
static struct gguf *parse_exact(const char *p, size_t n, uint64_t file_bytes, uint8_t **copy,
                                struct err *e)
{
    struct gguf *g = NULL;
    *copy = mem_alloc(n);
    CHECK(*copy);
    if (n)
        memcpy(*copy, p, n);
    int rc = gguf_parse(&g, *copy, n, file_bytes, e);
    CHECK(!rc == !!g);
    return g;
}

static void test_every_cut_of_a_file_is_refused_as_truncated(void)
{
    const char *path = make_model(3, 32);
    struct buf b = path ? read_file(path) : (struct buf){0};
    size_t last = b.n - 28; /* the last tensor is one float and its padding */
    for (size_t n = 0; n < b.n; n++) {
        struct err e = {0};
        uint8_t *copy;
        struct gguf *g = parse_exact(b.data, n, n, &copy, &e);
        OK_MSG(!g == (n < last), "cut at %zu of %zu: %s", n, b.n, e.msg);
        OK_MSG(g || strstr(e.msg, "truncated") || strstr(e.msg, "bytes"), "%s", e.msg);
        gguf_free(g);
        mem_free(copy);
    }
    buf_fini(&b);
}

static void test_a_header_alone_is_enough_and_less_asks_for_more(void)
{
    const char *path = make_model(3, 32);
    struct buf b = path ? read_file(path) : (struct buf){0};
    struct gguf *whole = NULL;
    struct err e = {0};
    if (!b.n || !OK_CALL(gguf_parse(&whole, b.data, b.n, b.n, &e), e))
        return;
    for (size_t n = 0; n <= whole->shards[0].header_bytes; n++) {
        uint8_t *copy;
        e = (struct err){0};
        struct gguf *g = parse_exact(b.data, n, b.n, &copy, &e);
        OK_MSG(g ? n + 32 > whole->shards[0].header_bytes : e.code == ERR_LIMIT, "%zu: %s", n,
               e.msg);
        if (g) {
            OK(!gguf_tensor_data(g, &g->tensors[0]) && g->n_tensors == whole->n_tensors);
            OK(gguf_verify(g, false, &e) == 0 && gguf_verify(g, true, &e) != 0);
        }
        OK(n < whole->shards[0].header_bytes || g);
        gguf_free(g);
        mem_free(copy);
    }
    gguf_free(whole);
    buf_fini(&b);
}

/* Touch all that a user of the header would touch. */
static double use_everything(const struct gguf *g)
{
    double sum = 0;
    for (uint64_t i = 0; i < g->n_kv; i++) {
        const struct gguf_kv *kv = &g->kv[i];
        for (uint64_t k = 0; k < kv->n; k++)
            sum += kv->strings
                       ? (double)kv->strings[k].n + (kv->strings[k].n ? kv->strings[k].p[0] : 0)
                       : gguf_kv_number(kv, k);
    }
    for (uint64_t i = 0; i < g->n_tensors; i++)
        sum += (double)(g->tensors[i].offset + g->tensors[i].n_bytes);
    return sum;
}

static void test_random_damage_is_refused_or_safe_to_use(void)
{
    const char *path = unit_shared("cases/loader/ok-base.gguf");
    struct buf b = path ? read_file(path) : (struct buf){0};
    uint64_t seed = 99;
    unsigned opened = 0, refused = 0;
    volatile double sink = 0; /* reading is the point: a sanitizer watches */
    for (int round = 0; b.n && round < 4000; round++) {
        struct err e = {0};
        uint8_t *copy = mem_alloc(b.n);
        struct gguf *g;
        size_t n = unit_rand(&seed) % 8 ? b.n : unit_rand(&seed) % b.n;
        CHECK(copy);
        memcpy(copy, b.data, b.n);
        for (uint64_t k = unit_rand(&seed) % 6 + 1; k; k--) {
            size_t at = unit_rand(&seed) % (round % 2 ? 7900 : 600);
            copy[at] = (uint8_t)(round % 3 ? unit_rand(&seed) : copy[at] ^ 1u << (k & 7));
        }
        if (gguf_parse(&g, copy, n, n, &e) == 0) {
            opened++;
            sink += use_everything(g);
            gguf_verify(g, false, &e);
            gguf_free(g);
        } else {
            refused++;
            OK(e.code && e.msg[0]);
        }
        mem_free(copy);
    }
    OK_MSG(!b.n || (opened > 100 && refused > 1000), "%u opened, %u refused", opened, refused);
    buf_fini(&b);
}

static void test_parsing_survives_every_failed_allocation(void)
{
    const char *path = make_model(3, 32);
    struct gguf *g = NULL;
    uint64_t n = 1;
    for (; path && !g && n < 1000; n++) {
        struct err e = {0};
        mem_fail_at(n);
        int rc = gguf_open(&g, path, &e);
        mem_fail_at(0);
        OK_MSG(!rc || e.code == ERR_MEMORY, "%s", e.msg);
    }
    OK(g && n > 4);
    gguf_free(g);
}

static void put_le(struct buf *b, uint64_t v, int n)
{
    for (int i = 0; i < n; i++)
        buf_putc(b, (char)(v >> 8 * i));
}

static void put_header(struct buf *b, uint64_t n_tensors, uint64_t n_kv)
{
    buf_put(b, "GGUF", 4);
    put_le(b, 3, 4);
    put_le(b, n_tensors, 8);
    put_le(b, n_kv, 8);
}

static void put_str(struct buf *b, const char *s)
{
    put_le(b, strlen(s), 8);
    buf_puts(b, s);
}

static void test_a_large_vocabulary_parses_in_milliseconds(void)
{
    struct buf b = {0};
    struct err e = {0};
    struct gguf *g = NULL;
    put_header(&b, 0, 1);
    put_str(&b, "tokenizer.ggml.tokens");
    put_le(&b, GGUF_ARRAY, 4);
    put_le(&b, GGUF_STRING, 4);
    put_le(&b, 1 << 18, 8);
    for (int i = 0; i < 1 << 18; i++)
        put_str(&b, "token");
    uint64_t best = UINT64_MAX;
    for (int i = 0; i < 5; i++) {
        uint64_t t0 = now_ns();
        if (!OK_CALL(gguf_parse(&g, b.data, b.n, b.n, &e), e))
            break;
        best = MIN(best, now_ns() - t0);
        OK(g->kv[0].n == 1 << 18 && g->kv[0].strings[(1 << 18) - 1].n == 5);
        gguf_free(g);
    }
    OK_MSG(best < 50000000, "256 k strings took %.1f ms", (double)best * 1e-6);
    buf_fini(&b);
}

static void test_memory_stays_bounded_however_many_items_are_claimed(void)
{
    struct buf b = {0};
    struct err e = {0};
    struct gguf *g = NULL;
    put_header(&b, 0, 1); /* an array of empty strings: 8 bytes each, twice that to keep */
    put_str(&b, "list");
    put_le(&b, GGUF_ARRAY, 4);
    put_le(&b, GGUF_STRING, 4);
    put_le(&b, 3 << 20, 8);
    for (int i = 0; i < 3 << 20; i++)
        put_le(&b, 0, 8);
    OK(gguf_parse(&g, b.data, b.n, b.n, &e) != 0 && e.code == ERR_LIMIT);
    buf_clear(&b);
    put_header(&b, 0, 1 << 17);
    for (int i = 0; i < 1 << 17; i++) {
        char key[16];
        snprintf(key, sizeof key, "%d", i);
        put_str(&b, key);
        put_le(&b, GGUF_U8, 4);
        put_le(&b, 0, 1);
    }
    e = (struct err){0};
    OK(gguf_parse(&g, b.data, b.n, b.n, &e) != 0 && e.code == ERR_LIMIT);
    memcpy(b.data + 16, "\0\0\1", 3); /* 65536 of them are allowed */
    e = (struct err){0};
    if (OK_CALL(gguf_parse(&g, b.data, b.n, b.n, &e), e)) {
        OK(gguf_find(g, "0") && gguf_find(g, "65535") && !gguf_find(g, "65536"));
        OK(g->arena.used_bytes < 8 << 20);
        gguf_free(g);
    }
    buf_fini(&b);
}

/* ---- shards ---- */

struct shard_keys {
    uint32_t no, count, total; /* split.no, split.count, split.tensors.count */
    const char *tensor;        /* the shard's only tensor */
};

static void write_shard(const char *path, const struct shard_keys *k)
{
    struct fill_from from = {weights + k->no, 0};
    uint64_t ne = 32;
    struct err e = {0};
    struct gguf_writer *w = gguf_writer_new(3, k->no == 1 ? 64 : 32);
    if (k->no == 0)
        add_keys(w);
    gguf_writer_u32(w, "split.no", k->no);
    gguf_writer_u32(w, "split.count", k->count);
    gguf_writer_u32(w, "split.tensors.count", k->total);
    gguf_writer_tensor(w, k->tensor, GGUF_Q8_0, 1, &ne, fill, &from);
    OK_CALL(gguf_writer_finish(w, path, &e), e);
    gguf_writer_free(w);
}

/* Write three shards with these keys (those without a tensor are left out), open the first. */
static int open_shards(struct gguf **g, const struct shard_keys k[3], struct err *e)
{
    char dir[128], path[300];
    snprintf(dir, sizeof dir, "%s", unit_tmpdir());
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/m-%05d-of-00003.gguf", dir, i + 1);
        if (k[i].tensor)
            write_shard(path, &k[i]);
    }
    snprintf(path, sizeof path, "%s/m-00001-of-00003.gguf", dir);
    return gguf_open(g, path, e);
}

static void test_shards_open_as_one_model(void)
{
    static const struct shard_keys k[3] = {{0, 3, 3, "a"}, {1, 3, 3, "b"}, {2, 3, 3, "c"}};
    struct err e = {0};
    struct gguf *g;
    if (!OK_CALL(open_shards(&g, k, &e), e))
        return;
    OK(g->n_shards == 3 && g->n_tensors == 3 && g->shards[1].alignment == 64);
    check_model(g);
    for (uint32_t i = 0; i < 3; i++) {
        const struct gguf_tensor *t = gguf_find_tensor(g, k[i].tensor);
        OK(t && t->shard == i && memcmp(gguf_tensor_data(g, t), weights + i, 34) == 0);
    }
    OK_CALL(gguf_verify(g, true, &e), e);
    gguf_free(g);
}

static void test_a_set_of_shards_that_disagrees_is_refused_by_what_is_wrong(void)
{
    static const struct {
        struct shard_keys k[3];
        const char *word;
    } sets[] = {
        {{{0, 3, 3, "a"}, {1, 3, 3, NULL}, {2, 3, 3, "c"}}, "m-00002-of-00003.gguf"},
        {{{0, 3, 3, "a"}, {2, 3, 3, "b"}, {2, 3, 3, "c"}}, "split.no is 2"},
        {{{0, 3, 3, "a"}, {1, 4, 3, "b"}, {2, 3, 3, "c"}}, "split.count is 4"},
        {{{0, 3, 3, "a"}, {1, 3, 3, "b"}, {2, 3, 3, "a"}}, "duplicate tensor 'a'"},
        {{{0, 3, 4, "a"}, {1, 3, 4, "b"}, {2, 3, 4, "c"}}, "split.tensors.count"},
        {{{0, 2, 3, "a"}, {1, 2, 3, "b"}, {1, 2, 3, "c"}}, "split.count"},
        {{{1, 3, 3, "a"}, {1, 3, 3, "b"}, {2, 3, 3, "c"}}, "split.no 1"},
        {{{3, 3, 3, "a"}, {1, 3, 3, "b"}, {2, 3, 3, "c"}}, "'split.no' is 3"},
        {{{0, 5000, 3, "a"}, {1, 3, 3, "b"}, {2, 3, 3, "c"}}, "'split.count' is 5000"},
    };
    for (size_t i = 0; i < ARRAY_LEN(sets); i++) {
        struct err e = {0};
        struct gguf *g = NULL;
        OK(open_shards(&g, sets[i].k, &e) != 0 && !g);
        OK_MSG(strstr(e.msg, sets[i].word), "set %zu: '%s' has no '%s'", i, e.msg, sets[i].word);
    }
}

/* ---- verify ---- */

static void test_verify_finds_gaps_rests_and_wild_weights(void)
{
    struct err e = {0};
    const char *path = make_model(3, 32);
    struct buf b = path ? read_file(path) : (struct buf){0};
    struct gguf *g;
    for (int i = 0; i < 64; i++)
        buf_putc(&b, 0);
    uint8_t *name = memmem(b.data, b.n, "\3\0\0\0\0\0\0\0one", 11);
    if (!OK(name))
        return;
    uint8_t *offset = name + 11 + 4 + 8 + 4; /* after n_dims, one dimension, type */
    if (OK_CALL(gguf_parse(&g, b.data, b.n, b.n, &e), e)) {
        OK(gguf_verify(g, false, &e) != 0 && strstr(e.msg, "at the end"));
        gguf_free(g);
    }
    offset[0] = (uint8_t)(offset[0] + 64); /* the last tensor two steps on */
    offset[1] = (uint8_t)(offset[1] + (offset[0] < 64));
    e = (struct err){0};
    if (OK_CALL(gguf_parse(&g, b.data, b.n, b.n, &e), e)) {
        OK(gguf_verify(g, false, &e) != 0 && strstr(e.msg, "before tensor 'one'"));
        gguf_free(g);
    }
    buf_fini(&b);
}

/* A file of the model's keys and one more, which verify must refuse by name. */
static void expect_key_refused(const char *key, enum gguf_type elem, uint64_t n, const void *items)
{
    struct err e = {0};
    struct gguf *g;
    const char *path = in_tmp("v.gguf");
    struct gguf_kv kv = {.key = {key, strlen(key)},
                         .type = elem,
                         .elem_type = elem,
                         .n = 1,
                         .data = items,
                         .n_bytes = 4};
    struct gguf_writer *w = gguf_writer_new(3, 32);
    add_keys(w);
    if (n)
        gguf_writer_array(w, key, elem, n, items);
    else
        gguf_writer_kv(w, &kv);
    OK_CALL(gguf_writer_finish(w, path, &e), e);
    gguf_writer_free(w);
    if (!OK_CALL(gguf_open(&g, path, &e), e))
        return;
    OK_MSG(gguf_verify(g, false, &e) != 0 && strstr(e.msg, key), "%s: '%s'", key, e.msg);
    gguf_free(g);
}

static void test_verify_names_the_key_that_is_out_of_range(void)
{
    static const uint32_t five = 5, none = UINT32_MAX, zero = 0, ids[2] = {4, 5};
    static const int32_t minus = -1;
    static const float nan = NAN, minus_one = -1;
    expect_key_refused("tokenizer.ggml.eos_token_id", GGUF_U32, 0, &five);
    expect_key_refused("tokenizer.ggml.fim_pre_token_id", GGUF_U32, 0, &none);
    expect_key_refused("tokenizer.ggml.any_token_id", GGUF_I32, 0, &minus);
    expect_key_refused("tokenizer.ggml.eot_token_id", GGUF_FLOAT32, 0, &minus_one);
    expect_key_refused("tokenizer.ggml.sep_token_id", GGUF_U32, 1, &zero);
    expect_key_refused("tokenizer.ggml.suppress_tokens", GGUF_U32, 2, ids);
    expect_key_refused("tokenizer.ggml.suppress_tokens", GGUF_U32, 0, &zero);
    expect_key_refused("tokenizer.ggml.precompiled_charsmap", GGUF_U8, 4, &five);
    expect_key_refused("tokenizer.ggml.merges", GGUF_U32, 1, &zero);
    expect_key_refused("tokenizer.chat_template", GGUF_U32, 0, &zero);
    expect_key_refused("llama.context_length", GGUF_U32, 0, &zero);
    expect_key_refused("llama.attention.layer_norm_rms_epsilon", GGUF_FLOAT32, 0, &nan);
    expect_key_refused("llama.attention.layer_norm_epsilon", GGUF_FLOAT32, 0, &minus_one);
}

/* Bytes of a block that make one of its scales infinite. */
static void test_verify_deep_finds_one_wild_value_in_every_type(void)
{
    static const uint8_t at[GGUF_DTYPE_END][2] = {
        [GGUF_F32] = {2, 2},    [GGUF_Q4_1] = {0, 2},     [GGUF_Q5_1] = {0, 2},
        [GGUF_Q2_K] = {80, 82}, [GGUF_Q3_K] = {108, 108}, [GGUF_Q4_K] = {0, 2},
        [GGUF_Q5_K] = {0, 2},   [GGUF_Q6_K] = {208, 208},
    };
    for (uint32_t type = 0; type < GGUF_DTYPE_END; type++) {
        const struct gguf_dtype_info *info = gguf_dtype_find(type);
        for (int k = 0; info && k < 2; k++) {
            struct err e = {0};
            struct gguf *g;
            uint64_t ne = 512 * 20;
            uint8_t *p = mem_zalloc((size_t)ne / info->block_len * info->block_bytes);
            struct fill_from from = {p, 0};
            const char *path = in_tmp("w.gguf");
            CHECK(p);
            struct gguf_writer *w = gguf_writer_new(3, 32);
            uint8_t *block = p + 9 * 256 / info->block_len * info->block_bytes;
            gguf_writer_str(w, "general.architecture", "x", 1);
            gguf_writer_tensor(w, "t", type, 1, &ne, fill, &from);
            memcpy(block + at[type][k],
                   type == GGUF_F32 || type == GGUF_BF16 ? "\x80\x7f" : "\0\xfc", 2);
            OK_CALL(gguf_writer_finish(w, path, &e), e);
            gguf_writer_free(w);
            if (OK_CALL(gguf_open(&g, path, &e), e)) {
                OK_CALL(gguf_verify(g, false, &e), e);
                OK_MSG(gguf_verify(g, true, &e) != 0 && strstr(e.msg, "'t'"), "%s", info->name);
                gguf_free(g);
            }
            mem_free(p);
        }
    }
}

/* ---- the loader cases ---- */

/* Make a sparse file from its pieces. */
static const char *make_sparse(const json_t *c)
{
    const json_t *r = json_object_get(c, "recipe"), *piece;
    const char *path = in_tmp(json_string_value(json_object_get(c, "file")));
    size_t i;
    int fd = open(path, O_CREAT | O_WRONLY, 0600);
    CHECK(fd >= 0 && ftruncate(fd, json_integer_value(json_object_get(r, "sparse_size"))) == 0);
    json_array_foreach(json_object_get(r, "pieces"), i, piece)
    {
        char rel[200];
        struct err e = {0};
        snprintf(rel, sizeof rel, "cases/loader/%s",
                 json_string_value(json_object_get(piece, "file")));
        const char *from = unit_shared(rel);
        struct buf b = from ? read_file(from) : (struct buf){0};
        OK_CALL(file_pwrite(fd, b.data, b.n,
                            (uint64_t)json_integer_value(json_object_get(piece, "at")), path, &e),
                e);
        buf_fini(&b);
    }
    close(fd);
    return path;
}

static bool message_fits(const json_t *c, const char *msg)
{
    const json_t *any = json_object_get(c, "message_has_any"), *word;
    size_t i;
    json_array_foreach(any, i, word) if (strcasestr(msg, json_string_value(word))) return true;
    return false;
}

static void check_case(const json_t *c)
{
    const char *file = json_string_value(json_object_get(c, "file"));
    const char *expect = json_string_value(json_object_get(c, "expect"));
    const char *by = json_string_value(json_object_get(c, "by"));
    char rel[300];
    snprintf(rel, sizeof rel, "cases/loader/%s", file);
    const char *path = json_object_get(c, "recipe") ? make_sparse(c) : unit_shared(rel);
    struct err e = {0};
    struct gguf *g = NULL;
    if (!path || strcmp(by, "serve") == 0)
        return;
    uint64_t t0 = now_ns();
    int rc = gguf_open(&g, path, &e);
    if (!rc)
        rc = gguf_verify(g, false, &e);
    OK_MSG(now_ns() - t0 < 1000000000, "%s takes over a second", file);
    gguf_free(g);
    if (getenv("INGOT_SHOW_CASES"))
        printf("%-40s %-7s %-7s %s\n", file, expect, by, rc ? e.msg : "opened");
    OK_MSG(!rc || strcmp(expect, "load") != 0, "%s must load: %s", file, e.msg);
    OK_MSG(rc || strcmp(expect, "refuse") != 0 || strcmp(by, "verify") != 0, "%s was accepted",
           file);
    const char *said = rc && strncmp(e.msg, path, strlen(path)) == 0 ? e.msg + strlen(path) : e.msg;
    OK_MSG(!rc || message_fits(c, said), "%s: no word that is wanted in '%s'", file, said);
}

static void test_loader_cases_are_refused_or_opened_as_they_should(void)
{
    const char *path = unit_shared("cases/loader/manifest.jsonl");
    FILE *f = path ? fopen(path, "r") : NULL;
    json_t *c;
    unsigned n = 0;
    if (!f)
        return;
    for (; (c = json_loadf(f, JSON_DISABLE_EOF_CHECK, NULL)); n++) {
        check_case(c);
        json_decref(c);
    }
    fclose(f);
    OK_MSG(n > 200, "only %u cases", n);
}

/* Every reference model whose types are in the table opens and passes the deep check. */
static void test_reference_models_open_and_verify(void)
{
    const char *dir = unit_shared("refs");
    char cmd[1200], path[1024];
    unsigned opened = 0, unsupported = 0;
    if (!dir)
        return;
    snprintf(cmd, sizeof cmd, "ls '%s'/*.gguf", dir);
    FILE *f = popen(cmd, "r");
    while (f && fscanf(f, " %1023[^\n]", path) == 1) {
        struct err e = {0};
        struct gguf *g;
        if (gguf_open(&g, path, &e)) {
            OK_MSG(e.code == ERR_UNSUPPORTED && strstr(e.msg, "is not supported"), "%s", e.msg);
            unsupported++;
            continue;
        }
        opened++;
        OK_CALL(gguf_verify(g, true, &e), e);
        gguf_free(g);
    }
    if (f)
        pclose(f);
    OK_MSG(opened >= 35 && unsupported < opened, "%u opened, %u unsupported", opened, unsupported);
}

#define TEST(name)                                                                                 \
    {                                                                                              \
#name, test_##name                                                                         \
    }
static const struct unit_test tests[] = {
    TEST(a_written_file_reads_back_the_same),
    TEST(copied_keys_keep_their_bytes),
    TEST(the_writer_refuses_what_the_reader_would_and_leaves_no_file),
    TEST(the_writer_survives_a_full_disk_and_no_memory),
    TEST(getters_accept_what_fits_and_name_what_does_not),
    TEST(getters_refuse_the_wrong_kind_and_leave_defaults),
    TEST(every_cut_of_a_file_is_refused_as_truncated),
    TEST(a_header_alone_is_enough_and_less_asks_for_more),
    TEST(random_damage_is_refused_or_safe_to_use),
    TEST(parsing_survives_every_failed_allocation),
    TEST(a_large_vocabulary_parses_in_milliseconds),
    TEST(memory_stays_bounded_however_many_items_are_claimed),
    TEST(shards_open_as_one_model),
    TEST(a_set_of_shards_that_disagrees_is_refused_by_what_is_wrong),
    TEST(verify_finds_gaps_rests_and_wild_weights),
    TEST(verify_names_the_key_that_is_out_of_range),
    TEST(verify_deep_finds_one_wild_value_in_every_type),
    TEST(loader_cases_are_refused_or_opened_as_they_should),
    TEST(reference_models_open_and_verify),
};

int main(int argc, char **argv)
{
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
