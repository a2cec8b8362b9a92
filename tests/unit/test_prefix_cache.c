/* The prefix cache in the engine: what is found where, whose it is, why it is not found; and that a
 * token's bits never depend on it. A spy around the CPU backend keeps which token is at each place
 * of the KV (also on its way through the persistent tier): the logits after the same history must
 * always be the same bits. */
#include "engine/prefix_cache.h"
#include "tests/unit/spy.h"
#include "tests/unit/tiny.h"
#include "tests/unit/unit.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { P = KV_PAGE_TOKENS, N_CTX = 256 };

/* ---- helpers ---- */

static char model_path[4096], other_path[4096];

static bool make_models(void)
{
    struct tiny_spec s;
    struct err e = {0};
    if (*model_path)
        return true;
    const char *dir = unit_tmpdir();
    snprintf(model_path, sizeof model_path, "%s/a.gguf", dir);
    snprintf(other_path, sizeof other_path, "%s/b.gguf", dir);
    tiny_defaults(&s, "llama");
    s.head_dim = 32; /* which every KV type can keep */
    bool ok = OK_CALL(tiny_write(model_path, &s, &e), e);
    s.seed++;
    return ok && OK_CALL(tiny_write(other_path, &s, &e), e);
}

static struct engine *open_engine(const char *path, const struct engine_config *cfg)
{
    struct backend be = spy_backend();
    static struct backend kept;
    struct model_file *f = NULL;
    struct engine *en = NULL;
    struct err e = {0};
    struct engine_config c = *cfg;
    c.quiet_load = true;
    c.n_threads = c.n_threads ? c.n_threads : 1;
    kept = be;
    if (!make_models() || !OK_CALL(model_file_open(&f, NULL, path, &e), e))
        return NULL;
    OK_CALL(engine_open_on(&en, f, &c, &kept, &e), e);
    model_file_close(f);
    return en;
}

static struct prefix_store *open_store(const char *home)
{
    struct prefix_store *s = NULL;
    struct err e = {0};
    OK_CALL(prefix_open(&s, home, NULL, &e), e);
    return s;
}

struct ask { /* one request and what came back */
    int32_t ids[N_CTX], got[N_CTX];
    size_t n_got;
    struct request r;
    struct request_stats s;
    atomic_bool done;
};

static void ask_token(void *user, int32_t id, const char *text, size_t n)
{
    struct ask *a = user;
    a->got[a->n_got++] = id;
}

static void ask_done(void *user, const struct request_stats *s)
{
    struct ask *a = user;
    a->s = *s;
    a->done = true;
}

/* A prompt of n tokens: text number `text` up to n_common, then its own. */
static void ask_init(struct ask *a, uint64_t text, size_t n, size_t n_common, uint64_t own)
{
    memset((void *)a, 0, sizeof *a);
    for (size_t i = 0; i < n; i++) {
        uint64_t seed = (i < n_common ? text : own) * 1000 + i;
        a->ids[i] = 3 + (int32_t)(unit_rand(&seed) % 250);
    }
    a->r = (struct request){.ids = a->ids,
                            .n_ids = n,
                            .max_tokens = 6,
                            .ignore_eog = true,
                            .on_token = ask_token,
                            .on_done = ask_done,
                            .user = a};
    sample_defaults(&a->r.sample);
    a->r.sample.temperature = 0;
}

static bool ask_run(struct ask *a, struct engine *en)
{
    struct err e = {0};
    a->n_got = 0;
    return OK_CALL(engine_run(en, &a->r, &a->s, &e), e) && OK(a->n_got == a->r.max_tokens);
}

static bool ask_wait(struct ask *a)
{
    for (int i = 0; i < 60000 && !a->done; i++)
        usleep(1000);
    return OK(a->done);
}

/* Run the prompt; expect so many tokens to be known. */
static bool expect_cached(struct engine *en, uint64_t text, size_t n, const char *tenant,
                          uint32_t want)
{
    struct ask a;
    ask_init(&a, text, n, n, 0);
    a.r.tenant = tenant;
    return ask_run(&a, en) &&
           OK_MSG(a.s.n_cached == want, "text %d of %zu tokens: %u known, not %u", (int)text, n,
                  a.s.n_cached, want);
}

static struct prefix_counters counters(struct engine *en)
{
    struct engine_counters k;
    engine_counters(en, &k);
    return k.prefix;
}

/* ---- the same bits ---- */

/* Every kind of hit against rows computed plainly. */
static void run_all_ways(const char *home, bool restarted, const struct engine_config *cfg)
{
    struct engine_config c = *cfg;
    struct ask a;
    struct prefix_store *store = c.prefix_store = home ? open_store(home) : NULL;
    struct engine *en = open_engine(model_path, &c);
    for (size_t i = 0; en && i < 24; i++) {
        size_t n = 20 + i * 37 % 180;
        ask_init(&a, 1, n, i % 3 ? n * (i % 3) / 3 : n, i); /* parts early, late or never */
        a.r.no_reuse = !home;
        ask_run(&a, en);
        if (!home)
            OK(a.s.n_cached == 0);
    }
    if (en && home) {
        struct prefix_counters k = counters(en);
        OK(k.hit_tokens[PREFIX_RAM] && k.hit_tokens[PREFIX_COPY]);
        OK_MSG(!k.hit_tokens[PREFIX_DISK] == !restarted, "%llu from the disk",
               (unsigned long long)k.hit_tokens[PREFIX_DISK]);
    }
    engine_close(en);
    prefix_close(store);
}

static bool isa_runs_here(const char *isa)
{
    struct device_info info = {0};
    setenv("INGOT_ISA", isa, 1);
    return backend_cpu.probe(&info, 1) > 0 && info.usable;
}

static void test_hits_in_ram_by_copy_and_after_restart_give_the_same_bits(void)
{
    static const char *const isas[] = {"scalar", "avx2", "avx512", "avx512vnni"};
    static const enum kv_type kvs[][2] = {{KV_F16, KV_F16}, {KV_F32, KV_F32}, {KV_Q8_0, KV_Q4_0}};
    int n_ran = 0;
    for (size_t k = 0; make_models() && k < ARRAY_LEN(isas) * ARRAY_LEN(kvs); k++) {
        const char *isa = isas[k / ARRAY_LEN(kvs)];
        const enum kv_type *kv = kvs[k % ARRAY_LEN(kvs)];
        if (!isa_runs_here(isa))
            continue;
        spy_reset();
        char home[4096];
        snprintf(home, sizeof home, "%s", unit_tmpdir());
        struct engine_config c = {.kv_key_type = kv[0], .kv_value_type = kv[1], .n_seqs = 2};
        run_all_ways(NULL, false, &c);
        int n_plain = spy.n_rows;
        run_all_ways(home, false, &c);
        OK(spy.n_rows - n_plain < n_plain / 2);
        c.n_threads = 2;
        c.max_batch = 7;
        run_all_ways(home, true, &c);
        OK(spy.n_writes > 0 && spy.n_copies > 0);
        OK_MSG(spy.n_again > 200, "only %d of them were seen again", spy.n_again);
        OK_MSG(!spy.n_differ, "%s: %d of %d logits differ", isa, spy.n_differ, spy.n_again);
        spy_reset();
        spy.ids = NULL;
        n_ran++;
    }
    unsetenv("INGOT_ISA");
    OK(n_ran >= 3);
}

/* ---- what is found ---- */

static void test_pages_of_another_isa_are_not_taken(void)
{
    char home[4096];
    snprintf(home, sizeof home, "%s", unit_tmpdir());
    if (!make_models() || !isa_runs_here("avx2")) {
        unsetenv("INGOT_ISA");
        unit_skip("one instruction set only");
        return;
    }
    for (int i = 0; i < 3; i++) {
        setenv("INGOT_ISA", i % 2 ? "scalar" : "avx2", 1);
        struct engine_config c = {.prefix_store = open_store(home)};
        struct engine *en = open_engine(model_path, &c);
        if (en) {
            expect_cached(en, 1, 100, NULL, i < 2 ? 0 : 96);
            OK(counters(en).miss_pages[PREFIX_MISS_OTHER_LAYOUT] == (i == 1 ? 3 : 0));
        }
        engine_close(en);
        prefix_close(c.prefix_store);
    }
    unsetenv("INGOT_ISA");
}

static void test_a_chat_finds_its_own_history_also_after_a_restart(void)
{
    char home[4096];
    snprintf(home, sizeof home, "%s", unit_tmpdir());
    struct ask a, b;
    ask_init(&a, 1, 50, 50, 0);
    a.r.max_tokens = 30;
    for (int restarted = 0; restarted < 2; restarted++) {
        struct engine_config c = {.prefix_store = open_store(home)};
        struct engine *en = open_engine(model_path, &c);
        if (en && (restarted || ask_run(&a, en))) {
            ask_init(&b, 1, 90, 50, 9);
            memcpy(b.ids + 50, a.got, 30 * sizeof *a.got);
            ask_run(&b, en);
            /* 79 tokens had KV; on the disk are whole pages */
            OK_MSG(b.s.n_cached == (restarted ? 64 : 79), "%u known", b.s.n_cached);
        }
        engine_close(en);
        prefix_close(c.prefix_store);
    }
}

static void test_eviction_from_ram_goes_to_the_disk_first(void)
{
    struct prefix_store *store = open_store(unit_tmpdir());
    struct engine_config c = {.n_ctx = 160, .prefix_ram_bytes = 1, .prefix_store = store};
    struct engine *en = open_engine(model_path, &c);
    OK(!en || engine_info(en)->placement.n_prefix_pages == 0);
    for (uint64_t text = 0; en && text < 6; text++)
        expect_cached(en, text, 140, NULL, 0);
    for (uint64_t text = 0; en && text < 6; text++)
        expect_cached(en, text, 140, NULL, 128);
    if (en) {
        struct prefix_counters k = counters(en);
        OK(k.hit_tokens[PREFIX_DISK] == 6 * 128 && k.n_evicted > 20 && !k.n_refused);
        OK(k.miss_pages[PREFIX_MISS_FIRST_SEEN] == 24 && k.miss_pages[PREFIX_MISS_EVICTED] == 0);
    }
    engine_close(en);
    prefix_close(store);
}

static void test_pages_that_were_not_written_behind_yet_are_before_they_go(void)
{
    enum { N = 6 };
    static struct ask a[N];
    struct prefix_store *store = open_store(unit_tmpdir());
    struct engine_config c = {.n_ctx = 160, .prefix_ram_bytes = 1, .prefix_store = store};
    struct engine *en = open_engine(model_path, &c);
    struct err e = {0};
    for (int i = 0; en && i < N; i++) {
        ask_init(&a[i], (uint64_t)i, 140, 140, 0);
        a[i].r.max_tokens = 1; /* nobody ever decodes: there is no gap to write in */
        OK_CALL(engine_submit(en, &a[i].r, &e), e);
    }
    for (int i = 0; en && i < N; i++)
        ask_wait(&a[i]);
    for (uint64_t text = 0; en && text < N; text++)
        expect_cached(en, text, 140, NULL, 128);
    engine_close(en);
    prefix_close(store);
}

static void test_without_a_disk_an_evicted_page_is_computed_and_counted(void)
{
    struct engine_config c = {.n_ctx = 160, .prefix_ram_bytes = 1};
    struct engine *en = open_engine(model_path, &c);
    for (int i = 0; en && i < 2; i++)
        for (uint64_t text = 0; text < 6; text++)
            expect_cached(en, text, 140, NULL, 0);
    if (en) {
        struct prefix_counters k = counters(en);
        OK(k.miss_pages[PREFIX_MISS_FIRST_SEEN] == 24 && k.miss_pages[PREFIX_MISS_EVICTED] == 24);
    }
    engine_close(en);
}

static void test_the_ram_budget_is_pages_beyond_those_of_sequences(void)
{
    struct engine_config c = {.n_ctx = 256, .n_seqs = 4};
    struct engine *en = open_engine(model_path, &c);
    uint64_t page = 0;
    if (en) {
        const struct engine_placement *p = &engine_info(en)->placement;
        OK(p->n_pages == 4 * 8 + 8 && p->n_prefix_pages == 8);
        page = p->kv_bytes / p->n_pages;
    }
    engine_close(en);
    c.prefix_ram_bytes = 13 * page + 5;
    en = page ? open_engine(model_path, &c) : NULL;
    OK(!en || engine_info(en)->placement.n_prefix_pages == 13);
    engine_close(en);
}

/* ---- whose it is, and why it is not found ---- */

static void test_tenants_see_their_own_pages_only_unless_shared(void)
{
    char home[4096];
    snprintf(home, sizeof home, "%s", unit_tmpdir());
    for (int share = 0; share < 2; share++) {
        struct engine_config c = {
            .prefix_ram_bytes = 1 << 20, .prefix_store = open_store(home), .share_prefix = share};
        struct engine *en = open_engine(model_path, &c);
        if (en) {
            expect_cached(en, 1, 100, "alice", 0);
            expect_cached(en, 1, 100, "bob", share ? 99 : 0);
            expect_cached(en, 1, 100, NULL, share ? 99 : 0);
            expect_cached(en, 1, 100, "alice", 99);
            /* bob and nobody; or, when all share, those before who did not */
            OK(counters(en).miss_pages[PREFIX_MISS_OTHER_TENANT] == (share ? 3 : 6));
        }
        engine_close(en);
        en = open_engine(model_path, &c);
        if (en) { /* nor on the disk */
            expect_cached(en, 1, 100, "carol", share ? 96 : 0);
            expect_cached(en, 1, 100, "bob", share ? 99 : 96);
        }
        engine_close(en);
        prefix_close(c.prefix_store);
    }
}

static void test_another_model_or_kv_type_finds_nothing_on_the_disk_and_says_why(void)
{
    struct prefix_store *store = open_store(unit_tmpdir());
    const struct {
        const char *path;
        enum kv_type keys, values;
        uint32_t want;
        enum prefix_miss why;
    } runs[] = {{model_path, KV_F16, KV_F16, 0, PREFIX_MISS_FIRST_SEEN},
                {other_path, KV_F16, KV_F16, 0, PREFIX_MISS_OTHER_MODEL},
                {model_path, KV_Q8_0, KV_Q4_0, 0, PREFIX_MISS_OTHER_KV},
                {model_path, KV_Q4_0, KV_Q8_0, 0, PREFIX_MISS_OTHER_KV},
                {model_path, KV_F16, KV_F16, 96, PREFIX_MISS_END},
                {other_path, KV_F16, KV_F16, 96, PREFIX_MISS_END},
                {model_path, KV_Q8_0, KV_Q4_0, 96, PREFIX_MISS_END}};
    for (size_t i = 0; make_models() && i < ARRAY_LEN(runs); i++) {
        struct engine_config c = {
            .kv_key_type = runs[i].keys, .kv_value_type = runs[i].values, .prefix_store = store};
        struct engine *en = open_engine(runs[i].path, &c);
        if (en) {
            expect_cached(en, 1, 100, NULL, runs[i].want);
            struct prefix_counters k = counters(en);
            for (int m = 0; m < PREFIX_MISS_END; m++)
                OK_MSG(k.miss_pages[m] == ((enum prefix_miss)m == runs[i].why ? 3 : 0),
                       "run %zu: %d pages %s", i, (int)k.miss_pages[m],
                       prefix_miss_name((enum prefix_miss)m));
        }
        engine_close(en);
    }
    prefix_close(store);
}

static void test_a_page_with_a_wrong_bit_is_a_miss_and_the_answer_is_right(void)
{
    char home[4096], path[4200];
    struct ask a, b;
    struct err e = {0};
    snprintf(home, sizeof home, "%s", unit_tmpdir());
    snprintf(path, sizeof path, "%s/prefix.db", home);
    ask_init(&a, 1, 200, 200, 0);
    ask_init(&b, 1, 200, 200, 0);
    for (int pass = 0; pass < 2; pass++) {
        struct engine_config c = {
            .kv_key_type = KV_F32, .kv_value_type = KV_F32, .prefix_store = open_store(home)};
        struct engine *en = open_engine(model_path, &c);
        if (en && ask_run(pass ? &b : &a, en) && pass) {
            OK(!memcmp(a.got, b.got, a.n_got * sizeof *a.got));
            OK_MSG(b.s.n_cached < 192, "%u known", b.s.n_cached);
            OK(counters(en).miss_pages[PREFIX_MISS_CORRUPT] == 1);
        }
        engine_close(en);
        prefix_close(c.prefix_store);
        struct buf file = {0};
        if (pass || !OK_CALL(file_read_all(&file, path, 1 << 28, &e), e))
            break;
        for (size_t i = file.n / 3; i < file.n; i += 4096 + 37)
            file.data[i] ^= 16;
        OK_CALL(file_write_all(path, file.data, file.n, &e), e);
        buf_fini(&file);
    }
}

/* ---- at the same time ---- */

static void test_a_prompt_that_waits_takes_what_another_computes(void)
{
    enum { N = 4 };
    static struct ask a[N];
    struct engine_config c = {.n_seqs = N, .max_batch = 32};
    struct engine *en = open_engine(model_path, &c);
    struct err e = {0};
    spy.n_rows = 0;
    for (int i = 0; en && i < N; i++) {
        ask_init(&a[i], 1, 200, 192, (uint64_t)i);
        OK_CALL(engine_submit(en, &a[i].r, &e), e);
    }
    for (int i = 0; en && i < N; i++)
        ask_wait(&a[i]);
    /* once 192 rows, four times 8 and 5 of the answer, and some that ran side by side */
    OK_MSG(!en || spy.n_rows < 192 + N * 13 + 64, "%d rows", spy.n_rows);
    engine_close(en);
}

static void test_cancelled_and_failed_requests_give_back_every_page(void)
{
    struct prefix_store *store = open_store(unit_tmpdir());
    struct engine_config c = {
        .n_seqs = 3, .max_batch = 16, .queue_len = 100, .prefix_store = store};
    struct engine *en = open_engine(model_path, &c);
    static struct ask a[60];
    uint64_t seed = 5;
    struct err e = {0};
    for (size_t i = 0; en && i < ARRAY_LEN(a); i++) {
        ask_init(&a[i], unit_rand(&seed) % 4, 10 + unit_rand(&seed) % 200, 100, i);
        OK_CALL(engine_submit(en, &a[i].r, &e), e);
        if (i % 3 == 0)
            engine_cancel(en, &a[unit_rand(&seed) % (i + 1)].r);
        if (i % 20 == 10)
            spy.fail_run = 3;
    }
    for (size_t i = 0; en && i < ARRAY_LEN(a); i++)
        ask_wait(&a[i]);
    if (en) {
        struct engine_counters k;
        engine_counters(en, &k);
        OK_MSG(k.n_free_pages + k.prefix.n_pages == k.n_pages, "%u free, %u in the tree, %u in all",
               k.n_free_pages, k.prefix.n_pages, k.n_pages);
    }
    engine_close(en);
    prefix_close(store);
}

static void test_a_failed_device_leaves_nothing_to_reuse_in_ram(void)
{
    struct engine_config c = {0};
    struct engine *en = open_engine(model_path, &c);
    struct ask a;
    struct err e = {0};
    ask_init(&a, 1, 100, 100, 0);
    if (en) {
        spy.fail_run = 3;
        OK(engine_run(en, &a.r, &a.s, &e) && e.code == ERR_DEVICE);
        expect_cached(en, 1, 100, NULL, 0);
    }
    engine_close(en);
}

static void test_no_reuse_neither_takes_nor_leaves(void)
{
    struct engine_config c = {0};
    struct engine *en = open_engine(model_path, &c);
    struct ask a;
    ask_init(&a, 1, 100, 100, 0);
    a.r.no_reuse = true;
    if (en && ask_run(&a, en)) {
        expect_cached(en, 1, 100, NULL, 0);
        ask_run(&a, en);
        OK(a.s.n_cached == 0);
    }
    engine_close(en);
}

/* One that did not come off is an error; what comes is right, whatever was cached in between. */
static void test_any_allocation_may_fail(void)
{
    struct ask want, a;
    struct model_file *f = NULL;
    struct err e = {0};
    struct engine_config c = {.n_threads = 1, .quiet_load = true};
    struct prefix_store *store = open_store(unit_tmpdir());
    struct engine *en = open_engine(model_path, &c);
    ask_init(&want, 1, 100, 100, 0);
    bool whole = !en || !ask_run(&want, en);
    engine_close(en);
    OK_CALL(model_file_open(&f, NULL, model_path, &e), e);
    c.prefix_store = store;
    int n_failed = 0, n_right = 0;
    for (uint64_t n = 1; f && !whole && n < 5000; n++) {
        struct err why = {0};
        ask_init(&a, 1, 100, 100, 0);
        uint64_t before = mem_alloc_count();
        mem_fail_at(n);
        en = NULL;
        int rc = engine_open_on(&en, f, &c, &backend_cpu, &why);
        rc = rc ? rc : engine_run(en, &a.r, &a.s, &why);
        whole = mem_alloc_count() - before < n;
        OK_MSG(!rc || why.code == ERR_MEMORY, "allocation %d: %s", (int)n, why.msg);
        engine_close(en);
        mem_fail_at(0);
        n_failed += rc != 0;
        n_right += !rc && !memcmp(a.got, want.got, sizeof a.got);
        OK(rc || !memcmp(a.got, want.got, sizeof a.got));
    }
    OK(whole && n_failed > 10 && n_right > 0);
    model_file_close(f);
    prefix_close(store);
}

/* ---- more sequences than pages ---- */

enum { N_CROWD = 6 };

/* The answers of six requests, some with a beginning in common, one that keeps out of the tree. */
static void ask_crowd(struct ask *a, struct engine *en, bool alone)
{
    struct request *all[N_CROWD];
    struct err e = {0};
    for (int i = 0; i < N_CROWD; i++) {
        ask_init(&a[i], 5, 70 + (size_t)(i * 13), i % 2 ? 50 : 0, (uint64_t)(20 + i));
        a[i].r.max_tokens = (uint32_t)(110 - i);
        a[i].r.no_reuse = alone || i == 4;
        all[i] = &a[i].r;
        if (alone)
            ask_run(&a[i], en);
    }
    if (!alone) /* at once: nobody may be done before the others come */
        OK_CALL(engine_submit_all(en, all, N_CROWD, &e), e);
    for (int i = 0; !alone && i < N_CROWD; i++)
        OK(ask_wait(&a[i]));
}

static void crowd_on(const struct engine_config *cfg, const struct ask *want,
                     struct engine_counters *k)
{
    static struct ask a[N_CROWD];
    struct engine *en = open_engine(model_path, cfg);
    memset(k, 0, sizeof *k);
    if (!en)
        return;
    ask_crowd(a, en, false);
    for (int i = 0; i < N_CROWD; i++)
        OK_MSG(a[i].n_got == want[i].n_got &&
                   !memcmp(a[i].got, want[i].got, want[i].n_got * sizeof *want[i].got),
               "request %d answers otherwise", i);
    engine_counters(en, k);
    OK_MSG(k->n_swapped_out > 0 && k->n_swapped_in == k->n_swapped_out, "%llu out, %llu in",
           (unsigned long long)k->n_swapped_out, (unsigned long long)k->n_swapped_in);
    OK(!k->n_held_pages && !k->n_swapped);
    engine_close(en);
}

static void check_swapping(enum kv_type keys, enum kv_type values)
{
    static struct ask want[N_CROWD];
    struct engine_config one = {.n_ctx = N_CTX, .kv_key_type = keys, .kv_value_type = values};
    struct engine_config cfg = {.n_ctx = N_CTX,
                                .kv_key_type = keys,
                                .kv_value_type = values,
                                .n_seqs = 4,
                                .kv_pages = N_CTX / P,
                                .prefix_ram_bytes = 1};
    struct engine_counters k;
    if (!make_models())
        return;
    spy_reset();
    struct engine *en = open_engine(model_path, &one);
    if (!en)
        return;
    ask_crowd(want, en, true);
    engine_close(en);
    crowd_on(&cfg, want, &k);
    OK_MSG(k.n_back_tokens[PREFIX_SWAP] > 0, "nothing came from host memory");
    cfg.swap_bytes = 1; /* only the page that was begun has room */
    crowd_on(&cfg, want, &k);
    cfg.prefix_store = open_store(unit_tmpdir());
    crowd_on(&cfg, want, &k);
    OK_MSG(k.n_back_tokens[PREFIX_DISK] > 0, "nothing came from the persistent tier");
    prefix_close(cfg.prefix_store);
    OK_MSG(!spy.n_differ, "%d of %d logits differ", spy.n_differ, spy.n_again);
    spy_reset();
}

static void test_sequences_without_pages_are_swapped_out_and_answer_as_alone(void)
{
    check_swapping(KV_F16, KV_F16);
    check_swapping(KV_Q8_0, KV_Q4_0);
}

static void test_fewer_pages_than_a_context_are_refused_with_both_numbers(void)
{
    struct engine_config cfg = {.n_ctx = N_CTX, .n_seqs = 4, .kv_pages = N_CTX / P - 1};
    struct model_file *f = NULL;
    struct engine *en = NULL;
    struct err e = {0}, why = {0};
    if (!make_models() || !OK_CALL(model_file_open(&f, NULL, model_path, &e), e))
        return;
    OK(engine_open(&en, f, &cfg, &why) && why.code == ERR_LIMIT);
    OK_MSG(strstr(why.msg, "7 KV pages") && strstr(why.msg, "need, 8"), "%s", why.msg);
    model_file_close(f);
}

/* Four choices of one prompt: its rows are computed once, but for the last token of each. */
static void test_choices_of_one_prompt_compute_it_once(void)
{
    static struct ask a[4];
    struct request *r[4];
    struct engine_config cfg = {.n_ctx = N_CTX, .n_seqs = 4, .max_batch = 16};
    struct engine *en = open_engine(model_path, &cfg);
    struct engine_counters k;
    struct err e = {0};
    if (!en)
        return;
    for (int i = 0; i < 4; i++) {
        ask_init(&a[i], 9, 150, 150, 1);
        r[i] = &a[i].r;
    }
    OK_CALL(engine_submit_all(en, r, 4, &e), e);
    for (int i = 0; i < 4; i++)
        OK(ask_wait(&a[i]) && !memcmp(a[i].got, a[0].got, sizeof a[i].got));
    engine_counters(en, &k);
    OK_MSG(k.n_prompt_rows == 153, "%llu rows", (unsigned long long)k.n_prompt_rows);
    OK_MSG(a[1].s.n_cached == 149 && a[3].s.n_cached == 149, "%u", a[1].s.n_cached);
    engine_close(en);
    OK(!spy.n_differ);
}

int main(int argc, char **argv)
{
#define T(f)                                                                                       \
    {                                                                                              \
#f, test_##f                                                                               \
    }
    static const struct unit_test tests[] = {
        T(sequences_without_pages_are_swapped_out_and_answer_as_alone),
        T(fewer_pages_than_a_context_are_refused_with_both_numbers),
        T(choices_of_one_prompt_compute_it_once),
        T(hits_in_ram_by_copy_and_after_restart_give_the_same_bits),
        T(pages_of_another_isa_are_not_taken),
        T(a_chat_finds_its_own_history_also_after_a_restart),
        T(eviction_from_ram_goes_to_the_disk_first),
        T(pages_that_were_not_written_behind_yet_are_before_they_go),
        T(without_a_disk_an_evicted_page_is_computed_and_counted),
        T(the_ram_budget_is_pages_beyond_those_of_sequences),
        T(tenants_see_their_own_pages_only_unless_shared),
        T(another_model_or_kv_type_finds_nothing_on_the_disk_and_says_why),
        T(a_page_with_a_wrong_bit_is_a_miss_and_the_answer_is_right),
        T(a_prompt_that_waits_takes_what_another_computes),
        T(cancelled_and_failed_requests_give_back_every_page),
        T(a_failed_device_leaves_nothing_to_reuse_in_ram),
        T(no_reuse_neither_takes_nor_leaves),
        T(any_allocation_may_fail),
    };
    log_threshold = LOG_ERROR;
    int rc = unit_main(argc, argv, tests, ARRAY_LEN(tests));
    spy_reset();
    return rc;
}
