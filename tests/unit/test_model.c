/* What the engine reads from a model file besides its weights: hyper-parameters that must be
 * honoured or refused by name, the chat template and its BOS, recommended sampling. On tiny models
 * whose keys are changed here; and opening under memory failures. */
#include "engine/engine_internal.h"
#include "tests/unit/tiny.h"
#include "tests/unit/unit.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- changed models ---- */

struct change { /* a key to set (or, with none of the values, to leave out), or a tensor to add */
    const char *key, *str, *tensor;
    float f32;
    uint32_t u32;
};

static int fill_from(void *user, void *dst, uint64_t offset, size_t n, struct err *e)
{
    memcpy(dst, (const char *)user + offset, n);
    return 0;
}

static void put_change(struct gguf_writer *w, const struct change *c)
{
    static float one[1] = {1};
    const uint64_t ne[4] = {1, 1, 1, 1};
    if (c->tensor)
        gguf_writer_tensor(w, c->tensor, GGUF_F32, 1, ne, fill_from, one);
    else if (c->str)
        gguf_writer_str(w, c->key, c->str, strlen(c->str));
    else if (c->f32 != 0)
        gguf_writer_f32(w, c->key, c->f32);
    else if (c->u32)
        gguf_writer_u32(w, c->key, c->u32);
}

/* A tiny model of the architecture with the changes; NULL on failure. */
static const char *make_model(const char *arch, const struct change *c, size_t n)
{
    static char path[256], base[256];
    struct tiny_spec s;
    struct err e = {0};
    struct gguf *g = NULL;
    tiny_defaults(&s, arch);
    snprintf(base, sizeof base, "%s/base.gguf", unit_tmpdir());
    snprintf(path, sizeof path, "%s/changed.gguf", unit_tmpdir());
    if (!OK_CALL(tiny_write(base, &s, &e), e) || !OK_CALL(gguf_open(&g, base, &e), e))
        return NULL;
    struct gguf_writer *w = gguf_writer_new(3, 32);
    for (uint64_t i = 0; i < g->n_kv; i++) {
        bool changed = false;
        for (size_t k = 0; k < n; k++)
            changed |= c[k].key && strlen(c[k].key) == g->kv[i].key.n &&
                       !memcmp(c[k].key, g->kv[i].key.p, g->kv[i].key.n);
        if (!changed)
            gguf_writer_kv(w, &g->kv[i]);
    }
    for (uint64_t i = 0; i < g->n_tensors; i++) {
        struct gguf_tensor *t = &g->tensors[i];
        gguf_writer_tensor(w, t->name, t->type, t->n_dims, t->ne, fill_from,
                           (void *)gguf_tensor_data(g, t));
    }
    for (size_t k = 0; k < n; k++)
        put_change(w, &c[k]);
    OK_CALL(gguf_writer_finish(w, path, &e), e);
    gguf_writer_free(w);
    gguf_free(g);
    return path;
}

static bool open_changed(struct engine **en, const char *arch, const struct change *c, size_t n,
                         struct err *e)
{
    struct model_file *f = NULL;
    struct engine_config cfg = {.backend = "cpu", .n_threads = 1};
    const char *path = make_model(arch, c, n);
    *en = NULL;
    if (!path)
        return false;
    int rc = model_file_open(&f, NULL, path, e);
    rc = rc ? rc : engine_open(en, f, &cfg, e);
    model_file_close(f);
    return rc == 0;
}

/* ---- keys ---- */

static void test_keys_that_change_the_answers_are_refused_by_name(void)
{
    static const struct {
        const char *arch, *says;
        struct change c;
    } cases[] = {
        {"llama", "yarn", {.key = "llama.rope.scaling.type", .str = "yarn"}},
        {"llama", "llama.expert_count", {.key = "llama.expert_count", .u32 = 8}},
        {"llama",
         "llama.attention.value_length",
         {.key = "llama.attention.value_length", .u32 = 8}},
        {"llama", "llama.logit_scale", {.key = "llama.logit_scale", .f32 = 2}},
        {"qwen2",
         "qwen2.final_logit_softcapping",
         {.key = "qwen2.final_logit_softcapping", .f32 = 30}},
        {"qwen3", "blk.1.attn_sinks.weight", {.tensor = "blk.1.attn_sinks.weight"}},
        {"llama", "blk.2.attn_norm.weight", {.tensor = "blk.2.attn_norm.weight"}},
        {"qwen2", "'qwen9'", {.key = "general.architecture", .str = "qwen9"}},
        {"llama", "llama.rope.scaling.factor", {.key = "llama.rope.scaling.factor", .f32 = -2}},
        {"llama", "llama.context_length", {.key = "llama.context_length"}},
        {"qwen3",
         "qwen3.attention.sliding_window_pattern",
         {.key = "qwen3.attention.sliding_window_pattern", .u32 = 6}},
        {"llama", "epsilon", {.key = "llama.attention.layer_norm_rms_epsilon"}},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct engine *en;
        struct err e = {0};
        OK_MSG(!open_changed(&en, cases[i].arch, &cases[i].c, 1, &e), "%s was accepted",
               cases[i].says);
        OK_MSG(strstr(e.msg, cases[i].says), "%s: %s", cases[i].says, e.msg);
        engine_close(en);
    }
}

static void test_neutral_keys_and_unused_tensors_are_accepted(void)
{
    static const struct change c[] = {{.key = "llama.logit_scale", .f32 = 1},
                                      {.key = "llama.rope.scaling.type", .str = "none"},
                                      {.key = "llama.rope.scaling.factor", .f32 = 4},
                                      {.tensor = "spare.weight"}};
    struct engine *en;
    struct err e = {0};
    if (OK_MSG(open_changed(&en, "llama", c, ARRAY_LEN(c), &e), "%s", e.msg))
        OK(en->ld.model.hp.rope_freq_scale == 1.0f);
    engine_close(en);
}

static void test_linear_rope_scaling_reaches_the_plan(void)
{
    static const struct change c[] = {{.key = "qwen2.rope.scaling.type", .str = "linear"},
                                      {.key = "qwen2.rope.scaling.factor", .f32 = 4},
                                      {.key = "qwen2.rope.freq_base", .f32 = 12345}};
    struct engine *en;
    struct err e = {0};
    int n = 0;
    if (OK_MSG(open_changed(&en, "qwen2", c, ARRAY_LEN(c), &e), "%s", e.msg))
        for (int32_t i = 0; i < en->ld.plan.n_ops; i++) {
            const struct op *op = &en->ld.plan.ops[i];
            if (op->kind != OP_ROPE)
                continue;
            OK(op->rope.freq_scale == 0.25f && op->rope.base == 12345 && op->rope.halves);
            n++;
        }
    OK(n == 4);
    engine_close(en);
}

static void test_sliding_window_is_in_the_plan_where_the_context_exceeds_it(void)
{
    static const uint32_t windows[] = {100, 256, 1000};
    for (size_t i = 0; i < ARRAY_LEN(windows); i++) {
        struct change c = {.key = "llama.attention.sliding_window", .u32 = windows[i]};
        struct engine *en;
        struct err e = {0};
        int n = 0;
        if (OK_MSG(open_changed(&en, "llama", &c, 1, &e), "%s", e.msg)) {
            OK(engine_info(en)->n_ctx == 256 && engine_info(en)->n_ctx_train == 256);
            for (int32_t k = 0; k < en->ld.plan.n_ops; k++)
                if (en->ld.plan.ops[k].kind == OP_ATTENTION) {
                    OK(en->ld.plan.ops[k].attention.window == (windows[i] < 256 ? 100 : 0));
                    n++;
                }
        }
        OK(n == 2);
        engine_close(en);
    }
}

/* ---- text ---- */

static void check_chat(const char *tmpl, const char *text)
{
    struct change c = {.key = "tokenizer.chat_template", .str = tmpl};
    struct engine *en;
    struct err e = {0};
    struct ids got = {0}, want = {0};
    json_t *m = json_pack("[{s:s,s:s}]", "role", "user", "content", "Hi there");
    if (OK_MSG(open_changed(&en, "llama", &c, 1, &e), "%s", e.msg) &&
        OK_CALL(engine_chat_ids(&got, en, m, NULL, NULL, &e), e)) {
        const struct tokenizer *t = engine_tokenizer(en);
        ids_put(&want, tokenizer_bos(t));
        OK_CALL(tokenizer_encode(&want, t, text, strlen(text), TOKENIZE_PARSE_SPECIAL, &e), e);
        bool same = got.n == want.n && !memcmp(got.v, want.v, got.n * sizeof *got.v);
        OK_MSG(same, "%zu ids for %zu, with '%s'", got.n, want.n, tmpl);
    }
    json_decref(m);
    ids_fini(&got);
    ids_fini(&want);
    engine_close(en);
}

static void test_chat_begins_with_exactly_one_bos(void)
{
    check_chat("{% for m in messages %}[{{ m.content }}]{% endfor %}", "[Hi there]");
    struct engine *en;
    struct err e = {0};
    struct change c = {.key = "tokenizer.chat_template",
                       .str = "{{ bos_token }}{% for m in messages %}{{ m.role }}{% endfor %}"};
    struct ids got = {0};
    json_t *m = json_pack("[{s:s,s:s}]", "role", "user", "content", "Hi");
    if (OK_MSG(open_changed(&en, "llama", &c, 1, &e), "%s", e.msg) &&
        OK_CALL(engine_chat_ids(&got, en, m, NULL, NULL, &e), e)) {
        int32_t bos = tokenizer_bos(engine_tokenizer(en));
        OK(got.n > 1 && got.v[0] == bos && got.v[1] != bos);
    }
    json_decref(m);
    ids_fini(&got);
    engine_close(en);
}

static void test_chat_without_a_usable_template_says_so(void)
{
    static const struct change none = {.key = "tokenizer.chat_template"},
                               bad = {.key = "tokenizer.chat_template", .str = "{% for %}"};
    struct engine *en;
    json_t *m = json_array();
    for (int i = 0; i < 2; i++) {
        struct err e = {0}, why = {0};
        struct ids ids = {0};
        if (!OK_MSG(open_changed(&en, "llama", i ? &bad : &none, 1, &e), "%s", e.msg))
            continue;
        OK(!engine_template(en));
        OK(engine_chat_ids(&ids, en, m, NULL, NULL, &why) && strstr(why.msg, "chat template"));
        ids_fini(&ids);
        engine_close(en);
    }
    json_decref(m);
}

static void test_recommended_sampling_is_taken_and_nonsense_is_not(void)
{
    static const struct change c[] = {{.key = "general.sampling.temp", .f32 = 0.3f},
                                      {.key = "general.sampling.top_k", .u32 = 11},
                                      {.key = "general.sampling.top_p", .f32 = -7},
                                      {.key = "general.sampling.penalty_last_n", .f32 = 1.5f},
                                      {.key = "general.sampling.min_p", .str = "much"}};
    struct engine *en;
    struct err e = {0};
    struct sample_params p, d;
    sample_defaults(&d);
    if (OK_MSG(open_changed(&en, "qwen3", c, ARRAY_LEN(c), &e), "%s", e.msg)) {
        engine_sample_defaults(&p, en);
        OK(p.temperature == 0.3f && p.top_k == 11);
        OK(p.top_p == d.top_p && p.min_p == d.min_p && p.repeat_last_n == d.repeat_last_n);
    }
    engine_close(en);
}

/* ---- placement and memory ---- */

static void test_placement_is_told_before_and_after_loading(void)
{
    struct engine_placement p = {0};
    struct engine_config cfg = {.backend = "cpu", .n_threads = 1, .n_ctx = 100, .n_seqs = 3};
    struct model_file *f = NULL;
    struct engine *en = NULL;
    struct err e = {0};
    const char *path = make_model("llama", NULL, 0);
    if (path && OK_CALL(model_file_open(&f, NULL, path, &e), e) &&
        OK_CALL(engine_place(&p, f, &cfg, &e), e) && OK_CALL(engine_open(&en, f, &cfg, &e), e)) {
        const struct engine_placement *q = &engine_info(en)->placement;
        OK(p.n_pages == 12 + 3 && p.n_prefix_pages == 3 && p.n_ctx == 100 && p.n_seqs == 3);
        OK(p.weight_bytes == q->weight_bytes && p.kv_bytes == q->kv_bytes);
        OK(p.weight_bytes > engine_info(en)->n_params && p.scratch_bytes > 0);
        OK(p.kv_bytes == 15ull * 32 * 2 * 2 * 32 * 2); /* pages, tokens, k and v, layers, width */
    }
    engine_close(en);
    model_file_close(f);
}

struct loading {
    uint64_t done, total;
    int n, cancel_at;
};

static int see_loading(void *user, uint64_t done, uint64_t total)
{
    struct loading *l = user;
    OK(done > l->done && done <= total && (!l->n || total == l->total));
    l->done = done;
    l->total = total;
    return ++l->n == l->cancel_at;
}

static void test_loading_is_told_to_its_end_and_can_be_cancelled(void)
{
    struct loading all = {0}, some = {.cancel_at = 5};
    struct engine_config cfg = {.backend = "cpu", .n_threads = 1, .progress = see_loading};
    struct tiny_spec s;
    struct model_file *f = NULL;
    struct engine *en = NULL;
    struct err e = {0}, why = {0};
    char path[256];
    tiny_defaults(&s, "llama");
    s.rope_factors = true;
    snprintf(path, sizeof path, "%s/factors.gguf", unit_tmpdir());
    if (OK_CALL(tiny_write(path, &s, &e), e) && OK_CALL(model_file_open(&f, NULL, path, &e), e)) {
        cfg.user = &all;
        OK_CALL(engine_open(&en, f, &cfg, &e), e);
        OK(all.done == all.total && all.total == engine_info(en)->weight_file_bytes);
        engine_close(en);
        cfg.user = &some;
        OK(engine_open(&en, f, &cfg, &why) && why.code == ERR_CANCELLED && some.n == 5);
    }
    model_file_close(f);
}

static void test_every_failed_allocation_is_an_error_or_harmless(void)
{
    struct engine_config cfg = {.backend = "cpu", .n_threads = 1, .n_ctx = 64};
    struct model_file *f = NULL;
    struct err e = {0};
    const char *path = make_model("llama", NULL, 0);
    if (!path || !OK_CALL(model_file_open(&f, NULL, path, &e), e))
        return;
    int n_failed = 0;
    uint64_t before = mem_alloc_count(), n = 1;
    for (uint64_t last = 1; n <= last; n += 1 + last / 400) {
        struct engine *en = NULL;
        struct err why = {0};
        struct request_stats stats = {0};
        int32_t ids[3] = {5, 6, 7};
        struct request r = {.ids = ids, .n_ids = 3, .max_tokens = 2};
        sample_defaults(&r.sample);
        if (last > 1)
            mem_fail_at(n);
        int rc = engine_open(&en, f, &cfg, &why);
        if (!rc)
            rc = engine_run(en, &r, &stats, &why);
        mem_fail_at(0);
        if (last == 1) {
            OK(rc == 0);
            last = mem_alloc_count() - before;
            n = 0;
        }
        n_failed += rc != 0;
        OK_MSG(!rc || why.code == ERR_MEMORY, "failing allocation %d: code %d, %s", (int)n,
               why.code, why.msg);
        engine_close(en);
    }
    OK_MSG(n_failed > 50, "only %d opens failed", n_failed);
    model_file_close(f);
}

int main(int argc, char **argv)
{
#define T(f)                                                                                       \
    {                                                                                              \
#f, test_##f                                                                               \
    }
    static const struct unit_test tests[] = {
        T(keys_that_change_the_answers_are_refused_by_name),
        T(neutral_keys_and_unused_tensors_are_accepted),
        T(linear_rope_scaling_reaches_the_plan),
        T(sliding_window_is_in_the_plan_where_the_context_exceeds_it),
        T(chat_begins_with_exactly_one_bos),
        T(chat_without_a_usable_template_says_so),
        T(recommended_sampling_is_taken_and_nonsense_is_not),
        T(placement_is_told_before_and_after_loading),
        T(loading_is_told_to_its_end_and_can_be_cancelled),
        T(every_failed_allocation_is_an_error_or_harmless),
    };
    log_threshold = LOG_ERROR;
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
