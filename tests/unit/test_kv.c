/* KV types and windows through the whole engine on the CPU backend: what a type costs in exactness,
 * what is refused, and that a model with a sliding window agrees with the oracle far beyond it, in
 * few pages, whose leaving ones are never read. */
#include "engine/engine_internal.h"
#include "tests/unit/oracle.h"
#include "tests/unit/tiny.h"
#include "tests/unit/unit.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { N_VOCAB = 384, WINDOW = 40, N_IDS = 10 * WINDOW, N_CTX = 512 };

/* ---- a window around the CPU backend: how many pages a sequence holds; with `wipe`, all that the
 * batch does not name are overwritten with NaN before it runs ---- */

static struct {
    int32_t n_pages, most_held, n_gone;
    bool wipe;
} watch;

static int watch_prepare(struct device *d, struct exec **out, const struct plan *p, struct err *e)
{
    watch.n_pages = p->n_pages;
    return backend_cpu.prepare(d, out, p, e);
}

static int watch_run(struct exec *x, const struct batch *b, struct err *e)
{
    bool *named = mem_array((size_t)watch.n_pages, sizeof *named);
    size_t n_bytes = backend_cpu.kv_page_bytes(x);
    uint8_t *bad = mem_alloc(n_bytes);
    CHECK(named && bad);
    memset(named, 0, (size_t)watch.n_pages);
    memset(bad, 0xff, n_bytes);
    for (int32_t s = 0; s < b->n_seqs; s++) {
        int32_t held = 0;
        for (int32_t i = 0; i * KV_PAGE_TOKENS < b->seqs[s].pos + b->seqs[s].n_rows; i++) {
            int32_t page = b->seqs[s].pages[i];
            if (page >= 0)
                named[page] = true;
            held += page >= 0;
            watch.n_gone += page < 0;
        }
        watch.most_held = MAX(watch.most_held, held);
    }
    for (int32_t i = 0; watch.wipe && i < watch.n_pages; i++)
        if (!named[i])
            CHECK(!backend_cpu.kv_write(x, i, bad, e));
    mem_free(named);
    mem_free(bad);
    return backend_cpu.run(x, b, e);
}

static struct engine *open_engine(const char *path, const struct engine_config *cfg)
{
    static struct backend be;
    struct model_file *f = NULL;
    struct engine *en = NULL;
    struct err e = {0};
    be = backend_cpu;
    be.prepare = watch_prepare;
    be.run = watch_run;
    if (OK_CALL(model_file_open(&f, NULL, path, &e), e))
        OK_CALL(engine_open_on(&en, f, cfg, &be, &e), e);
    model_file_close(f);
    return en;
}

static const char *make_model(const char *arch, uint32_t head_dim, uint32_t window)
{
    static char path[4096];
    struct tiny_spec s;
    struct err e = {0};
    tiny_defaults(&s, arch);
    s.head_dim = head_dim;
    s.n_vocab = N_VOCAB;
    s.n_ctx = N_CTX;
    s.window = window;
    snprintf(path, sizeof path, "%s/tiny.gguf", unit_tmpdir());
    return OK_CALL(tiny_write(path, &s, &e), e) ? path : NULL;
}

/* ---- a request that keeps every position's logits ---- */

struct probe {
    int32_t ids[N_IDS];
    float *logits; /* [n_ids][n_vocab] */
    uint32_t n_vocab;
    struct request r;
    struct request_stats s;
    atomic_bool done;
};

static void probe_logits(void *user, uint32_t pos, const float *logits)
{
    struct probe *p = user;
    memcpy(p->logits + (size_t)pos * p->n_vocab, logits, p->n_vocab * sizeof *logits);
}

static void probe_done(void *user, const struct request_stats *s)
{
    struct probe *p = user;
    p->s = *s;
    p->done = true;
}

static void probe_init(struct probe *p, size_t n, uint32_t n_vocab, uint64_t seed)
{
    memset((void *)p, 0, sizeof *p);
    p->n_vocab = n_vocab;
    p->logits = mem_array(n * n_vocab, sizeof *p->logits);
    CHECK(p->logits);
    for (size_t i = 0; i < n; i++)
        p->ids[i] = (int32_t)(3 + unit_rand(&seed) % (n_vocab - 3));
    p->r = (struct request){.ids = p->ids,
                            .n_ids = n,
                            .max_tokens = 1,
                            .ignore_eog = true,
                            .on_logits = probe_logits,
                            .on_done = probe_done,
                            .user = p};
    sample_defaults(&p->r.sample);
}

/* ---- windows ---- */

static void expect_oracle(const struct probe *p, const char *path)
{
    double *want = NULL, worst = 0;
    uint32_t n_vocab;
    struct err e = {0};
    if (!OK_CALL(oracle_file(&want, &n_vocab, path, p->ids, p->r.n_ids, &e), e))
        return;
    for (size_t i = 0; i < p->r.n_ids * n_vocab; i++)
        worst = fmax(worst, fabs(want[i] - (double)p->logits[i]) / (1 + fabs(want[i])));
    OK_MSG(worst < 2e-5, "off by %g", worst);
    mem_free(want);
}

/* The probe beside n - 1 others, on an engine of this shape. */
static bool run_probe(struct probe *p, const char *path, int32_t n_threads, uint32_t max_batch,
                      uint32_t n)
{
    struct engine_config c = {.n_threads = n_threads,
                              .n_ctx = N_CTX,
                              .n_seqs = n,
                              .max_batch = max_batch,
                              .kv_key_type = KV_F32,
                              .kv_value_type = KV_F32,
                              .quiet_load = true};
    static struct probe others[3];
    struct err e = {0};
    memset(&watch, 0, sizeof watch);
    watch.wipe = n == 1;
    struct engine *en = open_engine(path, &c);
    if (!en)
        return false;
    OK_CALL(engine_submit(en, &p->r, &e), e);
    for (uint32_t i = 0; i < n - 1; i++) {
        probe_init(&others[i], 150 + 60 * i, N_VOCAB, i + 7);
        OK_CALL(engine_submit(en, &others[i].r, &e), e);
    }
    for (uint32_t i = 0; i < n; i++) {
        struct probe *q = i ? &others[i - 1] : p;
        for (int t = 0; t < 60000 && !q->done; t++)
            usleep(1000);
        OK(q->done && q->s.finish == FINISH_LENGTH);
        if (i)
            mem_free(q->logits);
    }
    OK_MSG(watch.most_held <= (int32_t)en->ld.lim.max_held, "%d pages held, not %u",
           watch.most_held, en->ld.lim.max_held);
    OK(watch.n_gone > 0 || max_batch >= N_IDS);
    OK(max_batch > 64 || en->ld.lim.max_held < N_IDS / KV_PAGE_TOKENS);
    engine_close(en);
    return true;
}

static void test_window_agrees_with_the_oracle_in_few_pages_and_any_batch(void)
{
    static const char *const isas[] = {"scalar", "avx2", "avx512", "avx512vnni"};
    static const struct {
        int32_t n_threads;
        uint32_t max_batch, n;
    } ways[] = {{1, 512, 1}, {2, 33, 1}, {1, 7, 1}, {2, 64, 4}, {1, 1, 1}};
    const char *path = make_model("qwen3", 20, WINDOW);
    for (size_t k = 0; path && k < ARRAY_LEN(isas); k++) {
        struct device_info info = {0};
        static struct probe first, again;
        setenv("INGOT_ISA", isas[k], 1);
        if (backend_cpu.probe(&info, 1) < 1 || !info.usable)
            continue;
        for (size_t i = 0; i < ARRAY_LEN(ways); i++) {
            struct probe *p = i ? &again : &first;
            probe_init(p, N_IDS, N_VOCAB, 5);
            if (run_probe(p, path, ways[i].n_threads, ways[i].max_batch, ways[i].n)) {
                if (!i)
                    expect_oracle(p, path);
                else
                    OK_MSG(!memcmp(first.logits, again.logits, sizeof(float) * N_IDS * N_VOCAB),
                           "%s: other bits in way %zu", isas[k], i);
            }
            if (i)
                mem_free(again.logits);
        }
        mem_free(first.logits);
    }
    unsetenv("INGOT_ISA");
}

/* Decoding on past the window, from nothing and from what the prefix cache has: each answer is what
 * the logits of the whole text say. */
struct answer {
    int32_t ids[N_IDS];
    size_t n;
};

static void answer_token(void *user, int32_t id, const char *text, size_t n)
{
    struct answer *a = user;
    a->ids[a->n++] = id;
}

static void test_window_slides_on_while_decoding(void)
{
    enum { N_PROMPT = 36 };
    memset(&watch, 0, sizeof watch);
    const char *path = make_model("llama", 32, WINDOW);
    struct engine_config c = {.n_threads = 1, .n_ctx = N_CTX, .max_batch = 32, .quiet_load = true};
    struct engine *en = path ? open_engine(path, &c) : NULL;
    struct err e = {0};
    static struct probe p;
    for (int pass = 0; en && pass < 2; pass++) {
        struct answer a = {.n = N_PROMPT};
        uint64_t seed = 11;
        for (int i = 0; i < N_PROMPT; i++)
            a.ids[i] = (int32_t)(3 + unit_rand(&seed) % (N_VOCAB - 3));
        struct request r = {.ids = a.ids,
                            .n_ids = N_PROMPT,
                            .max_tokens = N_IDS - N_PROMPT,
                            .ignore_eog = true,
                            .on_token = answer_token,
                            .user = &a};
        struct request_stats s;
        sample_defaults(&r.sample);
        r.sample.temperature = 0;
        if (!OK_CALL(engine_run(en, &r, &s, &e), e) || !OK(a.n == N_IDS))
            break;
        OK_MSG(pass ? s.n_cached >= 32 : !s.n_cached, "%u tokens from the cache", s.n_cached);
        probe_init(&p, N_IDS, N_VOCAB, 5);
        memcpy(p.ids, a.ids, sizeof a.ids);
        OK_CALL(engine_run(en, &p.r, &s, &e), e);
        for (int i = N_PROMPT; i < N_IDS; i++) {
            const float *l = p.logits + (size_t)(i - 1) * N_VOCAB;
            float most = -INFINITY;
            for (int v = 0; v < N_VOCAB; v++)
                most = l[v] > most ? l[v] : most;
            OK_MSG(l[a.ids[i]] == most, "token %d is not the likeliest", i);
        }
        mem_free(p.logits);
    }
    engine_close(en);
}

/* ---- what types cost ---- */

/* Keys and values kept within a part u of their size move scores and what is summed by about u, and
 * the two add as independent errors do; the logits of a model of a few layers move by about as
 * much. Twice that is allowed, in root mean square. Of a block the step is a part of its largest
 * value, which is some 2.5 times the usual one. */
static double unit_of(enum kv_type t)
{
    static const double u[KV_TYPE_END] = {[KV_F16] = 1.0 / 2048, /* half a unit in the last place */
                                          [KV_BF16] = 1.0 / 256,
                                          [KV_F32] = 0,
                                          [KV_Q8_0] = 2.5 / 254, /* half a step of 127 */
                                          [KV_Q4_0] = 2.5 / 16}; /* half a step of 8 */
    return u[t];
}

static bool logits_with(struct probe *p, const char *path, enum kv_type keys, enum kv_type values)
{
    struct engine_config c = {.n_threads = 1,
                              .n_ctx = 256,
                              .kv_key_type = keys,
                              .kv_value_type = values,
                              .quiet_load = true};
    struct engine *en = open_engine(path, &c);
    struct err e = {0};
    if (!en)
        return false;
    probe_init(p, 120, engine_info(en)->n_vocab, 3);
    bool ok = OK_CALL(engine_run(en, &p->r, &p->s, &e), e);
    const struct engine_placement *at = &engine_info(en)->placement;
    size_t row =
        kv_row_bytes(keys, en->ld.plan.head_dim) + kv_row_bytes(values, en->ld.plan.head_dim);
    OK(at->kv_key_type == keys && at->kv_value_type == values);
    OK(at->kv_bytes == (uint64_t)at->n_pages * 32 * row * (uint64_t)en->ld.plan.n_kv_heads *
                           (uint64_t)en->ld.plan.n_kv_layers);
    engine_close(en);
    return ok;
}

static void check_cost(const char *path, const char *what)
{
    static struct probe exact, p;
    char line[256] = "";
    if (!logits_with(&exact, path, KV_F32, KV_F32))
        return;
    for (enum kv_type kt = 0; kt < KV_TYPE_END; kt++)
        for (enum kv_type vt = 0; vt < KV_TYPE_END; vt++) {
            double diff = 0, size = 0, u = hypot(unit_of(kt), unit_of(vt));
            if (!logits_with(&p, path, kt, vt))
                continue;
            for (size_t i = 0; i < 120u * p.n_vocab; i++) {
                double d = (double)p.logits[i] - (double)exact.logits[i];
                diff += d * d;
                size += (double)exact.logits[i] * (double)exact.logits[i];
            }
            double part = sqrt(diff / size);
            OK_MSG(part <= 2 * u && (part > 0) == (u > 0), "%s: %s keys, %s values cost %g", what,
                   kv_type_name(kt), kv_type_name(vt), part);
            if (kt == vt)
                snprintf(line + strlen(line), sizeof line - strlen(line), "  %s %.1e",
                         kv_type_name(kt), part);
            mem_free(p.logits);
        }
    printf("  %-24s%s\n", what, line);
    mem_free(exact.logits);
}

static void test_types_cost_what_their_rounding_says(void)
{
    static const char *const archs[] = {"llama", "qwen2", "qwen3"};
    static const char *const refs[] = {"refs/llama.gguf", "refs/qwen3.gguf"};
    for (size_t i = 0; i < ARRAY_LEN(archs); i++) {
        const char *path = make_model(archs[i], 32, 0);
        if (path)
            check_cost(path, archs[i]);
    }
    for (size_t i = 0; i < ARRAY_LEN(refs); i++) {
        const char *path = unit_shared(refs[i]);
        if (path)
            check_cost(path, refs[i]);
    }
}

static void test_heads_without_whole_blocks_are_refused_with_what_would_do(void)
{
    const char *path = make_model("llama", 48, 0);
    for (int values = 0; path && values < 2; values++) {
        struct engine_config c = {.backend = "cpu", .n_threads = 1};
        struct engine_placement p;
        struct model_file *f = NULL;
        struct err e = {0}, why = {0};
        *(values ? &c.kv_value_type : &c.kv_key_type) = KV_Q4_0;
        if (OK_CALL(model_file_open(&f, NULL, path, &e), e))
            OK(engine_place(&p, f, &c, &why) && why.code == ERR_UNSUPPORTED);
        OK_MSG(strstr(why.msg, "q4_0") && strstr(why.msg, "heads have 48") &&
                   strstr(why.msg, values ? "its values use f16" : "its keys use f16"),
               "%s", why.msg);
        model_file_close(f);
    }
}

static void test_types_are_found_by_name(void)
{
    static const char *const names[] = {"f16", "bf16", "f32", "q8_0", "q4_0"};
    static const size_t bytes[] = {128, 128, 256, 68, 36};
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        OK(kv_type_find(names[i]) == (enum kv_type)i);
        OK(!strcmp(kv_type_name((enum kv_type)i), names[i]));
        OK(kv_row_bytes((enum kv_type)i, 64) == bytes[i]);
    }
    OK(kv_type_find("q8") == KV_TYPE_END && kv_type_find("") == KV_TYPE_END);
    OK(ARRAY_LEN(names) == KV_TYPE_END);
}

int main(int argc, char **argv)
{
#define T(f)                                                                                       \
    {                                                                                              \
#f, test_##f                                                                               \
    }
    static const struct unit_test tests[] = {
        T(types_are_found_by_name),
        T(types_cost_what_their_rounding_says),
        T(heads_without_whole_blocks_are_refused_with_what_would_do),
        T(window_agrees_with_the_oracle_in_few_pages_and_any_batch),
        T(window_slides_on_while_decoding),
    };
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
