/* The whole engine against the reference models: every llama, qwen2 and qwen3 case whose block
 * types ingot has, on every ISA level that this machine runs. Float files must agree to 1e-4;
 * quantized ones to 1.3 times the rounding error that the reference implementation itself has. And
 * op by op against the double-precision oracle, on tiny models made here. */
#include "engine/engine_internal.h"
#include "tests/unit/oracle.h"
#include "tests/unit/tiny.h"
#include "tests/unit/unit.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const cases[] = {
    "llama",      "llama_tied",     "llama_rope3",      "qwen2",        "qwen3",
    "llama-F16",  "llama-BF16",     "llama-Q4_0",       "llama-Q4_1",   "llama-Q5_0",
    "llama-Q8_0", "llama-Q2_K",     "llama-Q3_K",       "llama-Q4_K",   "llama-Q5_K",
    "llama-Q6_K", "llama-Q2_K_mix", "llama-Q4_K_M_mix", "llama-IQ4_NL", "llama-IQ4_XS",
};
static const char *const isas[] = {"scalar", "avx2", "avx512", "avx512vnni"};

struct ref {
    struct ids ids;
    struct buf logits;  /* raw float32 [n_tokens][n_vocab] */
    double rms_allowed; /* of a quantized file's difference; 0 for a float file */
};

static const char *ref_path(const char *name, const char *ext)
{
    char rel[128];
    snprintf(rel, sizeof rel, "refs/%s%s", name, ext);
    return unit_shared(rel);
}

static void ref_fini(struct ref *r)
{
    ids_fini(&r->ids);
    buf_fini(&r->logits);
}

static bool ref_load(struct ref *r, const char *name)
{
    struct err e = {0};
    struct buf text = {0};
    json_error_t je;
    const char *tokens = ref_path(name, ".tokens"), *json = ref_path(name, ".json");
    if (!tokens || !json)
        return false;
    json_t *j = json_load_file(json, 0, &je);
    json_t *rms = json_object_get(j, "quantized_activation_rms_diff");
    r->rms_allowed = json_is_number(rms) ? 1.3 * json_number_value(rms) : 0;
    json_decref(j);
    const char *logits = ref_path(name, r->rms_allowed > 0 ? ".dequant.logits" : ".logits");
    if (!logits || !OK_CALL(file_read_all(&text, tokens, 1 << 20, &e), e) ||
        !OK_CALL(file_read_all(&r->logits, logits, 1 << 26, &e), e))
        return false;
    char *end;
    for (const char *p = buf_str(&text); *p && *p != '\n'; p = end) {
        ids_put(&r->ids, (int32_t)strtol(p, &end, 10));
        end += strspn(end, " ");
    }
    buf_fini(&text);
    return OK(r->ids.n > 0);
}

struct measured {
    const float *want;
    uint32_t n_vocab;
    double sum_sq, max;
    size_t n;
};

static void measure(void *user, uint32_t pos, const float *logits)
{
    struct measured *m = user;
    for (uint32_t i = 0; i < m->n_vocab; i++) {
        double d = fabs((double)logits[i] - (double)m->want[(size_t)pos * m->n_vocab + i]);
        m->sum_sq += d * d;
        m->max = d > m->max || isnan(d) ? d : m->max;
    }
    m->n++;
}

static bool engine_from(struct engine **en, const char *path, enum kv_type kv, struct err *e)
{
    struct model_file *f = NULL;
    struct engine_config c = {
        .backend = "cpu", .kv_key_type = kv, .kv_value_type = kv, .n_ctx = 256, .quiet_load = true};
    int rc = model_file_open(&f, NULL, path, e);
    rc = rc ? rc : engine_open(en, f, &c, e);
    model_file_close(f);
    return rc == 0;
}

static bool isa_runs_here(const char *isa)
{
    struct device_info info = {0};
    setenv("INGOT_ISA", isa, 1);
    return backend_cpu.probe(&info, 1) > 0 && info.usable;
}

static void run_case(const struct ref *r, const char *name, const char *path, const char *isa)
{
    struct err e = {0};
    struct engine *en = NULL;
    if (!OK_MSG(engine_from(&en, path, KV_F32, &e), "%s: %s", name, e.msg))
        return;
    struct measured m = {.want = (const float *)r->logits.data,
                         .n_vocab = engine_info(en)->n_vocab};
    struct request q = {
        .ids = r->ids.v, .n_ids = r->ids.n, .max_tokens = 1, .on_logits = measure, .user = &m};
    struct request_stats stats;
    sample_defaults(&q.sample);
    if (OK(r->logits.n == r->ids.n * m.n_vocab * sizeof(float)) &&
        OK_CALL(engine_run(en, &q, &stats, &e), e)) {
        double rms = sqrt(m.sum_sq / ((double)m.n * m.n_vocab));
        bool ok = r->rms_allowed > 0 ? rms <= r->rms_allowed : m.max <= 1e-4;
        printf("  %-18s %-11s rms %.6f max %.6f  allowed %s %.6f%s\n", name, isa, rms, m.max,
               r->rms_allowed > 0 ? "rms" : "max", r->rms_allowed > 0 ? r->rms_allowed : 1e-4,
               ok ? "" : "  <-- over");
        OK_MSG(ok, "%s on %s is over what is allowed", name, isa);
        OK(m.n == r->ids.n);
    }
    engine_close(en);
}

static void test_logits_match_the_references_on_every_isa(void)
{
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct ref r = {0};
        const char *path = ref_path(cases[i], ".gguf");
        if (!path || !ref_load(&r, cases[i])) {
            ref_fini(&r);
            return;
        }
        char copy[1024];
        snprintf(copy, sizeof copy, "%s", path);
        for (size_t k = 0; k < ARRAY_LEN(isas); k++) {
            if (isa_runs_here(isas[k]))
                run_case(&r, cases[i], copy, isas[k]);
        }
        unsetenv("INGOT_ISA");
        ref_fini(&r);
    }
}

/* ---- op by op ---- */

enum { N_IDS = 24, MAX_SEEN = 128 }; /* few enough ids for one step that wants every row */

struct seen { /* what the engine's op put out, under the oracle's name for it */
    const char *name;
    int layer;
    int32_t width;
    float *rows; /* [N_IDS][width] */
};
static struct {
    struct seen v[MAX_SEEN];
    size_t n, n_matched;
    const char *what; /* model and ISA, for messages */
    double worst;
} trace;

static const char *oracle_name(const struct op *op)
{
    static const char *const matmul[SLOT_END] = {
        [SLOT_Q] = "q",        [SLOT_K] = "k",      [SLOT_V] = "v",
        [SLOT_G] = "ffn_gate", [SLOT_U] = "ffn_up", [SLOT_LOGITS] = "logits"};
    switch (op->kind) {
    case OP_EMBED:
        return "embedding";
    case OP_NORM:
        if (op->norm.group)
            return NULL; /* q and k: the oracle shows them after the rotation */
        if (!strcmp(trace.v[trace.n - 1].name, "attn_residual"))
            return "ffn_norm";
        return op->out_rows ? "output_norm" : "attn_norm";
    case OP_MATMUL:
        if (op->add >= 0)
            return op->in == SLOT_G ? "layer_output" : "attn_residual";
        return matmul[op->out];
    case OP_ROPE:
        return op->out == SLOT_Q ? "q_rope" : "k_rope";
    case OP_ATTENTION:
        return "attention";
    case OP_GLU:
        return "ffn_act";
    default:
        return NULL;
    }
}

static void tap(void *user, const struct op *op, const float *rows, int32_t n_rows, int32_t width,
                int32_t stride)
{
    if (n_rows != N_IDS || trace.n == MAX_SEEN)
        return; /* the one generated token's step */
    const char *name = oracle_name(op);
    if (!name)
        return;
    struct seen *s = &trace.v[trace.n++];
    bool outside =
        !strcmp(name, "embedding") || !strcmp(name, "output_norm") || !strcmp(name, "logits");
    *s = (struct seen){name, outside ? -1 : op->layer, width, NULL};
    s->rows = mem_array((size_t)n_rows * (size_t)width, sizeof *s->rows);
    for (int32_t i = 0; i < n_rows; i++)
        memcpy(s->rows + i * width, rows + (size_t)i * (size_t)stride,
               (size_t)width * sizeof *rows);
}

static void compare(void *user, const char *name, int layer, const double *v, size_t rows,
                    size_t width)
{
    for (size_t k = 0; k < trace.n; k++) {
        const struct seen *s = &trace.v[k];
        if (s->layer != layer || strcmp(s->name, name))
            continue;
        trace.n_matched++;
        if (!OK_MSG((size_t)s->width == width && rows == N_IDS, "%s of layer %d is %d wide", name,
                    layer, s->width))
            return;
        double worst = 0;
        for (size_t i = 0; i < rows * width; i++)
            worst = fmax(worst, fabs(v[i] - (double)s->rows[i]) / (1 + fabs(v[i])));
        OK_MSG(worst < 2e-5, "%s: %s of layer %d is off by %g", trace.what, name, layer, worst);
        trace.worst = fmax(trace.worst, worst);
    }
}

static void trace_model(const char *path, const char *what)
{
    struct err e = {0};
    struct engine *en = NULL;
    struct gguf *g = NULL;
    struct oracle o = {0};
    int32_t ids[N_IDS];
    uint64_t seed = 5;
    if (!OK_MSG(engine_from(&en, path, KV_F32, &e), "%s: %s", what, e.msg))
        return;
    uint32_t n_vocab = engine_info(en)->n_vocab;
    for (int i = 0; i < N_IDS; i++)
        ids[i] = (int32_t)(unit_rand(&seed) % n_vocab);
    struct measured sink = {.n_vocab = 0};
    struct request q = {
        .ids = ids, .n_ids = N_IDS, .max_tokens = 1, .on_logits = measure, .user = &sink};
    struct request_stats stats;
    sample_defaults(&q.sample);
    memset(&trace, 0, sizeof trace);
    trace.what = what;
    engine_set_tap(en, tap, NULL);
    OK_CALL(engine_run(en, &q, &stats, &e), e);
    double *logits = mem_array((size_t)N_IDS * n_vocab, sizeof *logits);
    if (OK_CALL(gguf_open(&g, path, &e), e) && OK_CALL(oracle_init(&o, g, &e), e) && OK(logits)) {
        oracle_run(logits, &o, ids, N_IDS, compare, NULL);
        OK_MSG(trace.n_matched == 3 + 13 * o.n_layers && trace.n == trace.n_matched,
               "%s: %zu of %zu results compared", what, trace.n_matched, trace.n);
        printf("  %-26s %zu results, largest relative difference %.1e\n", what, trace.n_matched,
               trace.worst);
    }
    for (size_t i = 0; i < trace.n; i++)
        mem_free(trace.v[i].rows);
    mem_free(logits);
    oracle_fini(&o);
    gguf_free(g);
    engine_close(en);
}

static void test_every_op_matches_the_oracle(void)
{
    static const char *const names[] = {"llama", "qwen2", "qwen3"};
    for (size_t i = 0; i < 2 * ARRAY_LEN(names); i++) {
        struct tiny_spec s;
        struct err e = {0};
        char path[256], what[64];
        const char *arch = names[i / 2];
        tiny_defaults(&s, arch);
        s.seed = 100 + i;
        s.n_layers = 3;
        if (i % 2) { /* the less usual choices */
            s.rope_factors = true;
            s.tied = !s.tied;
            s.n_heads = 6;
            s.n_kv_heads = 3;
            s.head_dim = 20;
            s.rope_base = 500000;
        }
        snprintf(path, sizeof path, "%s/tiny.gguf", unit_tmpdir());
        if (!OK_CALL(tiny_write(path, &s, &e), e))
            continue;
        for (size_t k = 0; k < ARRAY_LEN(isas); k++) {
            snprintf(what, sizeof what, "%s%s on %s", arch, i % 2 ? ", odd," : "", isas[k]);
            if (isa_runs_here(isas[k]))
                trace_model(path, what);
        }
        unsetenv("INGOT_ISA");
    }
}

int main(int argc, char **argv)
{
    static const struct unit_test tests[] = {
        {"every_op_matches_the_oracle", test_every_op_matches_the_oracle},
        {"logits_match_the_references_on_every_isa", test_logits_match_the_references_on_every_isa},
    };
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
