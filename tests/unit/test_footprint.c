/* The memory that is announced is the memory that is taken: every formula of the placement beside
 * the count of live bytes in base/mem.c. The allocator rounds each piece up (by 24 bytes, large ones
 * to a page of the system), and an arena's last block is not full: that, and parts too small to
 * count, is what the tolerances stand for. */
#include "engine/prefix_cache.h"
#include "tests/unit/tiny.h"
#include "tests/unit/unit.h"

#include <stdio.h>
#include <string.h>

enum { ROUNDING = 4096 + 24, ARENA_REST = 64 << 10 };

/* The bytes that were taken since `before` are those announced, but for `slack` more or less. */
static void check_taken(const char *what, uint64_t before, uint64_t announced, uint64_t slack)
{
    uint64_t taken = mem_live_bytes() - before;
    uint64_t off = taken > announced ? taken - announced : announced - taken;
    OK_MSG(off <= slack, "%s: %llu bytes announced, %llu taken; may differ by %llu", what,
           (unsigned long long)announced, (unsigned long long)taken, (unsigned long long)slack);
}

static void test_live_bytes_come_and_go(void)
{
    uint64_t before = mem_live_bytes();
    char *p = mem_alloc(100000);
    check_taken("mem_alloc", before, 100000, ROUNDING);
    p = mem_realloc(p, 300000);
    check_taken("mem_realloc", before, 300000, ROUNDING);
    void *q = mem_array(1000, 64), *r = mem_pages(1 << 20);
    check_taken("all", before, 364000 + (1 << 20), 3 * ROUNDING);
    mem_free(p);
    mem_free(q);
    mem_pages_free(r, 1 << 20);
    mem_free(NULL);
    OK(mem_live_bytes() == before);
    mem_fail_at(1);
    OK(!mem_alloc(64));
    OK(mem_live_bytes() == before);
}

/* ---- the parts ---- */

static void test_sampler_takes_what_it_says(void)
{
    static const uint32_t vocabs[] = {300, 32000, 151936};
    for (size_t v = 0; v < ARRAY_LEN(vocabs); v++) {
        for (int stages = 0; stages < 16; stages++) {
            struct sampler *s = NULL;
            struct err e = {0};
            struct sample_params p;
            sample_defaults(&p);
            p.dry_breakers = (const char *const *)&p; /* an empty list: there are no pieces here */
            p.temperature = stages & 1 ? 1 : 0;
            p.repeat_penalty = stages & 2 ? 1.1f : 1;
            p.repeat_last_n = -1;
            p.dry_multiplier = stages & 4 ? 1 : 0;
            p.typical_p = stages & 8 ? 0.9f : 1;
            p.n_probs = stages & 8 ? 20 : 0;
            uint64_t before = mem_live_bytes();
            OK_CALL(sampler_new(&s, &p, vocabs[v], 4096, NULL, NULL, &e), e);
            char what[64];
            snprintf(what, sizeof what, "sampler of %u, stages %d", vocabs[v], stages);
            check_taken(what, before, sampler_bytes(&p, vocabs[v], 4096),
                        ARENA_REST + 10 * ROUNDING);
            sampler_free(s);
        }
    }
}

static void test_prefix_tree_takes_what_it_says(void)
{
    static const uint32_t pages[] = {1, 40, 1000, 20000};
    for (size_t i = 0; i < ARRAY_LEN(pages); i++) {
        struct err e = {0};
        struct kv_pool pool = {0};
        struct prefix_tree t;
        OK_CALL(kv_pool_init(&pool, pages[i], &e), e);
        uint64_t before = mem_live_bytes();
        OK_CALL(prefix_tree_init(&t, &pool, 7, 4096, &e), e);
        check_taken("prefix tree", before, prefix_tree_bytes(pages[i], 7), 4 * ROUNDING);
        prefix_tree_fini(&t);
        kv_pool_fini(&pool);
    }
}

static void test_lists_take_what_they_say(void)
{
    const struct limits l = {.n_ctx = 5000,
                             .n_seqs = 9,
                             .queue_len = 300,
                             .pages_per_seq = 157,
                             .n_pages = 3000,
                             .n_swap_pages = 500};
    struct err e = {0};
    struct kv_pool pool = {0};
    struct kv_swap swap = {0};
    struct kv_seq seqs[9] = {0};
    struct schedule schedule = {0};
    uint64_t before = mem_live_bytes();
    OK_CALL(kv_pool_init(&pool, l.n_pages, &e), e);
    OK_CALL(kv_swap_init(&swap, l.n_swap_pages, 64, &e), e);
    for (uint32_t i = 0; i < l.n_seqs; i++)
        OK_CALL(kv_seq_init(&seqs[i], &l, &e), e);
    /* the slots are in an array of the engine's here, the swap area's pages are counted apart */
    check_taken("KV lists", before, kv_lists_bytes(&l) - sizeof seqs + 500 * 64,
                (4 + 3 * (uint64_t)l.n_seqs) * 32 + 3 * ROUNDING);
    for (uint32_t i = 0; i < l.n_seqs; i++)
        kv_seq_fini(&seqs[i]);
    kv_swap_fini(&swap);
    kv_pool_fini(&pool);
    before = mem_live_bytes();
    OK_CALL(schedule_init(&schedule, &l, &e), e);
    check_taken("schedule", before, schedule_bytes(&l), 7 * 32 + ROUNDING);
    schedule_fini(&schedule);
}

/* ---- files and text ---- */

static const char *write_tiny(const char *arch, uint32_t n_vocab, uint32_t n_layers, bool bpe)
{
    static char path[4][160];
    static int at;
    struct err e = {0};
    struct tiny_spec s;
    tiny_defaults(&s, arch);
    s.n_vocab = n_vocab;
    s.n_layers = n_layers;
    s.bpe = bpe;
    char *p = path[at++ & 3];
    snprintf(p, sizeof path[0], "%s/m.gguf", unit_memdir());
    OK_CALL(tiny_write(p, &s, &e), e);
    return p;
}

static void test_text_takes_what_it_says(void)
{
    static const uint32_t vocabs[] = {300, 5000, 60000};
    for (size_t i = 0; i < 2 * ARRAY_LEN(vocabs); i++) {
        struct err e = {0};
        struct gguf *g;
        struct tokenizer *t;
        const char *path = write_tiny("llama", vocabs[i / 2], 1, i % 2);
        uint64_t before = mem_live_bytes();
        if (!OK_CALL(gguf_open(&g, path, &e), e))
            return;
        check_taken("gguf", before, gguf_bytes(g), ARENA_REST + 8 * ROUNDING);
        before = mem_live_bytes();
        OK_CALL(tokenizer_new(&t, g, &e), e);
        uint64_t taken = mem_live_bytes() - before;
        check_taken("tokenizer", before, tokenizer_bytes(t), ARENA_REST + 32 * 1024);
        check_taken("tokenizer, from the header", before, tokenizer_bytes_of(g),
                    ARENA_REST + 64 * 1024 + taken / 4);
        tokenizer_free(t);
        gguf_free(g);
    }
}

/* ---- the whole engine ---- */

struct running { /* requests that hold all that one may ask for, while the bytes are counted */
    struct engine *en;
    pthread_mutex_t mu;
    pthread_cond_t cond;
    uint32_t n_begun, n_done, n;
    uint64_t most;
};

static void on_token(void *user, int32_t id, const char *text, size_t n)
{
    struct running *r = user;
    uint64_t now = mem_live_bytes();
    r->most = MAX(r->most, now);
}

static void on_done(void *user, const struct request_stats *s)
{
    struct running *r = user;
    pthread_mutex_lock(&r->mu);
    r->n_done++;
    pthread_cond_signal(&r->cond);
    pthread_mutex_unlock(&r->mu);
}

/* The most that was live while n requests with every sampling stage ran at the same time. */
static uint64_t run_all_stages(struct engine *en, uint32_t n)
{
    enum { MOST = 8 };
    struct running r = {.en = en, .mu = PTHREAD_MUTEX_INITIALIZER, .cond = PTHREAD_COND_INITIALIZER};
    struct request req[MOST] = {0}, *all[MOST];
    static const int32_t ids[] = {5, 6, 7, 8};
    struct err e = {0};
    CHECK(n <= MOST);
    for (uint32_t i = 0; i < n; i++) {
        req[i] = (struct request){.ids = ids,
                                  .n_ids = ARRAY_LEN(ids),
                                  .max_tokens = 8,
                                  .ignore_eog = true,
                                  .on_token = on_token,
                                  .on_done = on_done,
                                  .user = &r};
        sample_defaults(&req[i].sample);
        req[i].sample.repeat_penalty = 1.1f;
        req[i].sample.repeat_last_n = -1;
        req[i].sample.dry_multiplier = 1;
        req[i].sample.typical_p = 0.9f;
        req[i].sample.n_probs = 20;
        all[i] = &req[i];
    }
    OK_CALL(engine_submit_all(en, all, n, &e), e);
    pthread_mutex_lock(&r.mu);
    while (r.n_done < n && !e.code)
        pthread_cond_wait(&r.cond, &r.mu);
    pthread_mutex_unlock(&r.mu);
    return r.most;
}

/* Not counted: the plan's two copies and its RoPE tables, and per request the copies of its lists.
 * A sampler's arena may have a whole block less than announced. */
static void check_engine(const char *path, struct store *store, const struct engine_config *c)
{
    struct err e = {0};
    struct model_file *f = NULL;
    struct engine *en = NULL;
    struct engine_placement before_load;
    uint64_t before = mem_live_bytes();
    if (!OK_CALL(model_file_open(&f, store, path, &e), e) ||
        !OK_CALL(engine_place(&before_load, f, c, &e), e) ||
        !OK_CALL(engine_open(&en, f, c, &e), e)) {
        model_file_close(f);
        return;
    }
    const struct engine_placement *p = &engine_info(en)->placement;
    uint64_t placed = engine_placed_bytes(p), first = engine_placed_bytes(&before_load);
    uint64_t most = run_all_stages(en, p->n_seqs) - before;
    uint64_t slack = 256 * 1024 + p->n_seqs * (uint64_t)ARENA_REST + placed / 50;
    OK_MSG(most <= placed + slack && placed <= most + slack,
           "%s, %u sequences: placed %llu, taken %llu", path, p->n_seqs, (unsigned long long)placed,
           (unsigned long long)most);
    OK_MSG(first <= placed + slack && placed <= first + slack,
           "%s: placed %llu before loading, %llu after", path, (unsigned long long)first,
           (unsigned long long)placed);
    engine_close(en);
    model_file_close(f);
    OK(mem_live_bytes() - before < 64 * 1024); /* SQLite keeps a little */
}

static void test_engine_takes_what_was_placed(void)
{
    const struct {
        const char *arch;
        uint32_t n_vocab, n_layers;
        bool bpe;
        struct engine_config c;
    } shapes[] = {
        {"llama", 384, 2, false, {.n_seqs = 1}},
        {"llama", 32000, 2, false, {.n_seqs = 4, .max_batch = 64}},
        {"qwen2", 40000, 3, true, {.n_seqs = 2, .queue_len = 1000}},
        {"qwen3", 2000, 8, true, {.n_seqs = 8, .n_ctx = 200, .prefix_ram_bytes = 8 << 20}},
        {"llama", 1000, 2, true, {.n_seqs = 6, .kv_pages = 12, .swap_bytes = 1 << 20}},
    };
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++)
        check_engine(
            write_tiny(shapes[i].arch, shapes[i].n_vocab, shapes[i].n_layers, shapes[i].bpe), NULL,
            &shapes[i].c);
}

/* Readers of the store have a chunk of 1 MiB each, and the threads of the loader a buffer. */
static void test_what_loading_took_is_given_back(void)
{
    struct err e = {0};
    struct store *s = NULL;
    struct store_model m;
    const char *path = write_tiny("llama", 20000, 2, false);
    struct store_import in = {.path = path, .name = "tiny"};
    if (!OK_CALL(store_open(&s, unit_memdir(), &e), e))
        return;
    OK_CALL(store_import(s, &m, &in, &e), e);
    struct engine_config c = {.n_seqs = 2, .max_batch = 32, .n_threads = 4};
    check_engine("tiny", s, &c);
    store_close(s);
}

/* The pages of this file that the process has mapped and resident, bytes. */
static uint64_t resident_of(const char *path)
{
    char line[4096];
    uint64_t sum = 0;
    bool ours = false;
    unsigned long long kib;
    FILE *f = fopen("/proc/self/smaps", "re");
    while (f && fgets(line, sizeof line, f)) {
        if (strchr(line, '-') && !strchr(line, ':'))
            ours = false;
        if (strstr(line, path))
            ours = true;
        else if (line[0] >= '0' && line[0] <= '9')
            ours = false;
        if (ours && sscanf(line, "Rss: %llu kB", &kib) == 1)
            sum += kib << 10;
    }
    if (f)
        fclose(f);
    return sum;
}

static void test_mapped_weights_are_not_resident_after_load(void)
{
    struct err e = {0};
    struct model_file *f = NULL;
    struct engine *en = NULL;
    struct engine_config c = {.n_seqs = 1};
    const char *path = write_tiny("llama", 30000, 2, false);
    uint8_t byte;
    if (!OK_CALL(model_file_open(&f, NULL, path, &e), e))
        return;
    OK_CALL(engine_open(&en, f, &c, &e), e);
    /* the name was looked up once more: one fault brings in up to 64 KiB around it */
    OK_MSG(resident_of(path) <= 256 * 1024, "%llu bytes of the file are resident",
           (unsigned long long)resident_of(path));
    const struct gguf_tensor *t = gguf_find_tensor(model_file_gguf(f), "token_embd.weight");
    OK_CALL(model_file_read(f, t, &byte, t->n_bytes - 1, 1, &e), e); /* it can still be read */
    engine_close(en);
    model_file_close(f);
}

/* ---- does it fit? ---- */

static uint64_t free_bytes; /* of the device, as it is made to say */

static int probe_small(struct device_info *out, int max)
{
    int n = backend_cpu.probe(out, max);
    if (max > 0)
        out->free_bytes = free_bytes;
    return n;
}

static int place_on_small(struct engine_placement *p, struct model_file *f,
                        const struct engine_config *c, struct err *e)
{
    struct backend be = backend_cpu;
    struct loaded ld = {0};
    be.probe = probe_small;
    int rc = loaded_place(&ld, f, c, &be, e);
    *p = ld.placement;
    loaded_fini(&ld);
    return rc;
}

static void test_host_memory_decides_too_whether_it_fits(void)
{
    struct err e = {0};
    struct model_file *f = NULL;
    struct engine_placement p;
    struct engine_config c = {.n_seqs = 4, .kv_pages = 40, .prefix_ram_bytes = 1};
    if (!OK_CALL(model_file_open(&f, NULL, write_tiny("llama", 60000, 2, true), &e), e))
        return;
    free_bytes = UINT64_C(1) << 40;
    OK_CALL(place_on_small(&p, f, &c, &e), e);
    OK(p.host_bytes > p.staging_bytes);
    free_bytes = engine_placed_bytes(&p);
    OK_CALL(place_on_small(&p, f, &c, &e), e);
    free_bytes--;
    OK(place_on_small(&p, f, &c, &e) && e.code == ERR_MEMORY && strstr(e.msg, "host "));
    model_file_close(f);
}

static void test_persistent_tier_stays_below_what_it_says(void)
{
    struct err e = {0};
    struct prefix_store *s;
    enum { N = 300, KV = 100000 };
    struct prefix_config c = {.max_bytes = 64 << 20};
    uint64_t before = mem_live_bytes(), most = 0, seed = 1;
    uint8_t *kv = mem_alloc(KV);
    int32_t ids[32] = {0};
    if (!OK_CALL(prefix_open(&s, unit_memdir(), &c, &e), e))
        return;
    for (int i = 0; i < N; i++) {
        struct prefix_page p = {.ids = ids, .n_ids = 32, .kv = kv, .kv_bytes = KV, .cost_us = 1000};
        memcpy(p.key.b, &i, sizeof i);
        ids[0] = i;
        for (size_t k = 0; k < KV; k += 8) /* half of it does not compress */
            *(uint64_t *)(void *)(kv + k) = k % 16 ? unit_rand(&seed) : 7;
        OK(prefix_put(s, &p));
        if (i % 50 == 49)
            OK_CALL(prefix_flush(s, &e), e);
        most = MAX(most, mem_live_bytes() - before);
    }
    uint64_t announced = prefix_store_bytes(s, KV) + KV; /* and the page here */
    OK_MSG(most <= announced && most >= announced / 2, "announced %llu, taken %llu",
           (unsigned long long)announced, (unsigned long long)most);
    prefix_close(s);
    mem_free(kv);
}

#define TEST(f) {#f, f}
int main(int argc, char **argv)
{
    static const struct unit_test tests[] = {
        TEST(test_live_bytes_come_and_go),
        TEST(test_sampler_takes_what_it_says),
        TEST(test_prefix_tree_takes_what_it_says),
        TEST(test_lists_take_what_they_say),
        TEST(test_text_takes_what_it_says),
        TEST(test_engine_takes_what_was_placed),
        TEST(test_what_loading_took_is_given_back),
        TEST(test_mapped_weights_are_not_resident_after_load),
        TEST(test_host_memory_decides_too_whether_it_fits),
        TEST(test_persistent_tier_stays_below_what_it_says),
    };
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
