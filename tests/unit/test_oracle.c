/* The oracle against reference logits of an independent implementation, and the tiny models against
 * the oracle and the format's own check. */
#include "tests/unit/oracle.h"
#include "tests/unit/tiny.h"
#include "tests/unit/unit.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the oracle against the references ---- */

enum { MAX_IDS = 256 };

static size_t read_ids(int32_t *ids, const char *path)
{
    struct buf b = {0};
    struct err e = {0};
    size_t n = 0;
    OK_CALL(file_read_all(&b, path, 1 << 16, &e), e);
    char *p = (char *)buf_str(&b);
    while (*p && *p != '\n' && n < MAX_IDS) {
        ids[n++] = (int32_t)strtol(p, &p, 10);
        while (*p == ' ')
            p++;
    }
    buf_fini(&b);
    return n;
}

/* Largest difference of the oracle from <name><suffix>, or -1 when a file is missing. */
static double reference_difference(const char *name, const char *suffix)
{
    static const char *const ends[] = {".gguf", ".tokens"};
    char rel[128];
    const char *paths[3];
    for (int i = 0; i < 3; i++) {
        snprintf(rel, sizeof rel, "refs/%s%s", name, i < 2 ? ends[i] : suffix);
        if (!(paths[i] = unit_shared(rel)))
            return -1;
    }
    int32_t ids[MAX_IDS];
    size_t n = read_ids(ids, paths[1]);
    struct buf want = {0};
    struct err e = {0};
    double *logits = NULL, worst = 0;
    uint32_t n_vocab = 0;
    OK_CALL(file_read_all(&want, paths[2], 1 << 26, &e), e);
    OK_CALL(oracle_file(&logits, &n_vocab, paths[0], ids, n, &e), e);
    OK_MSG(want.n == n * n_vocab * sizeof(float), "%s: %zu bytes of logits for %zu x %u", name,
           want.n, n, n_vocab);
    for (size_t i = 0; logits && i < want.n / sizeof(float); i++) {
        float f;
        memcpy(&f, want.data + i * sizeof f, sizeof f);
        worst = fmax(worst, fabs(logits[i] - (double)f));
    }
    if (!logits)
        worst = INFINITY;
    mem_free(logits);
    buf_fini(&want);
    return worst;
}

static void test_float_models_match_the_reference_logits(void)
{
    static const char *const names[] = {"llama", "llama_tied", "llama_rope3", "qwen2", "qwen3"};
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        double d = reference_difference(names[i], ".logits");
        OK_MSG(d < 1e-4, "%s: largest difference %g", names[i], d);
    }
}

static void test_quantized_models_match_the_dequantized_reference(void)
{
    static const char *const names[] = {
        "BF16", "F16",  "Q4_0", "Q4_1",   "Q5_0",   "Q8_0",       "Q2_K",     "Q3_K",
        "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "Q4_K_M_mix", "Q2_K_mix",
    };
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        char name[64];
        snprintf(name, sizeof name, "llama-%s", names[i]);
        double d = reference_difference(name, ".dequant.logits");
        OK_MSG(d < 1e-4, "%s: largest difference %g", name, d);
    }
}

static void test_unknown_architectures_are_refused_by_name(void)
{
    static const char *const names[] = {"refs/gemma2.gguf", "refs/llama_moe.gguf"};
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        const char *path = unit_shared(names[i]);
        struct err e = {0};
        double *logits;
        uint32_t n_vocab;
        int32_t id = 1;
        if (!path)
            return;
        OK(oracle_file(&logits, &n_vocab, path, &id, 1, &e) == -1 && e.code == ERR_UNSUPPORTED);
        OK(strstr(e.msg, i ? "experts" : "gemma2"));
    }
}

/* ---- tiny models ---- */

static const char *tiny_path(const struct tiny_spec *s)
{
    static char path[256];
    struct err e = {0};
    snprintf(path, sizeof path, "%s/tiny.gguf", unit_tmpdir());
    OK_CALL(tiny_write(path, s, &e), e);
    return path;
}

static struct hash128 file_hash(const char *path)
{
    struct buf b = {0};
    struct err e = {0};
    OK_CALL(file_read_all(&b, path, 1 << 28, &e), e);
    struct hash128 h = hash_xxh3(b.data, b.n, 0);
    buf_fini(&b);
    return h;
}

static struct tiny_spec spec_at(int i)
{
    static const char *const archs[] = {"llama", "qwen2", "qwen3"};
    struct tiny_spec s;
    tiny_defaults(&s, archs[i % 3]);
    s.seed = (uint64_t)i + 1;
    s.bpe ^= i / 3 % 2;
    s.tied ^= i / 6 % 2;
    s.rope_factors = i / 2 % 2;
    s.biases |= i % 5 == 0;
    s.head_dim = i % 4 == 1 ? 32 : 0;
    s.n_kv_heads = 1u << i % 3;
    s.n_vocab = i % 2 ? 1500 : TINY_MIN_VOCAB;
    s.n_layers = 1 + (uint32_t)i % 3;
    return s;
}

static void test_tiny_files_pass_the_formats_check(void)
{
    static const uint32_t types[] = {GGUF_F32,  GGUF_F16,  GGUF_BF16,
                                     GGUF_Q8_0, GGUF_Q4_0, GGUF_Q5_1};
    for (int i = 0; i < 12; i++) {
        struct tiny_spec s = spec_at(i);
        struct gguf *g = NULL;
        struct err e = {0};
        s.dtype = types[i % 6];
        const char *path = tiny_path(&s);
        OK_CALL(gguf_open(&g, path, &e), e);
        if (!g)
            continue;
        OK_CALL(gguf_verify(g, true, &e), e);
        const struct gguf_kv *tokens = gguf_find(g, "tokenizer.ggml.tokens");
        OK(tokens && tokens->n == s.n_vocab);
        OK(!gguf_find_tensor(g, "output.weight") == s.tied);
        OK(!gguf_find_tensor(g, "rope_freqs.weight") == !s.rope_factors);
        OK(!gguf_find_tensor(g, "blk.0.attn_k.bias") == !s.biases);
        OK(!gguf_find_tensor(g, "blk.0.attn_q_norm.weight") == !s.qk_norm);
        gguf_free(g);
    }
}

static void test_k_quants_need_wider_models_and_then_work(void)
{
    static const uint32_t types[] = {GGUF_Q2_K, GGUF_Q3_K, GGUF_Q4_K,
                                     GGUF_Q5_K, GGUF_Q6_K, GGUF_IQ4_XS};
    for (size_t i = 0; i < ARRAY_LEN(types); i++) {
        struct tiny_spec s;
        struct gguf *g = NULL;
        struct err e = {0};
        tiny_defaults(&s, "llama");
        s.dtype = types[i];
        OK(tiny_write("/nonexistent/x", &s, &e) == -1 && e.code == ERR_USAGE);
        e = (struct err){0};
        s.width = s.n_ffn = 256;
        OK_CALL(gguf_open(&g, tiny_path(&s), &e), e);
        if (g)
            OK_CALL(gguf_verify(g, true, &e), e);
        gguf_free(g);
    }
}

static void test_the_same_seed_gives_the_same_file(void)
{
    struct tiny_spec s;
    tiny_defaults(&s, "llama");
    struct hash128 a = file_hash(tiny_path(&s)), b = file_hash(tiny_path(&s));
    OK(a.lo == b.lo && a.hi == b.hi);
    s.seed = 2;
    b = file_hash(tiny_path(&s));
    OK(a.lo != b.lo);
}

static double *tiny_logits(const struct tiny_spec *s, const int32_t *ids, size_t n)
{
    double *logits;
    uint32_t n_vocab = 0;
    struct err e = {0};
    OK_CALL(oracle_file(&logits, &n_vocab, tiny_path(s), ids, n, &e), e);
    OK(n_vocab == s->n_vocab);
    CHECK(logits);
    return logits;
}

static void test_tiny_models_give_lively_logits(void)
{
    int32_t ids[20];
    for (int i = 0; i < 20; i++)
        ids[i] = i * 7;
    for (int i = 0; i < 12; i++) {
        struct tiny_spec s = spec_at(i);
        double *logits = tiny_logits(&s, ids, 20), squares = 0;
        size_t n = 20 * (size_t)s.n_vocab;
        for (size_t k = 0; k < n; k++)
            squares += logits[k] * logits[k] / (double)n;
        OK_MSG(squares > 0.5 && squares < 50, "spec %d: mean square %g", i, squares);
        mem_free(logits);
    }
}

static void test_a_position_sees_only_what_is_before_it(void)
{
    int32_t ids[12] = {5, 9, 100, 3, 77, 200, 41, 8, 19, 250, 33, 2};
    for (int i = 0; i < 3; i++) {
        struct tiny_spec s = spec_at(i);
        double *all = tiny_logits(&s, ids, 12), *some = tiny_logits(&s, ids, 7);
        OK(!memcmp(all, some, 7 * s.n_vocab * sizeof *all));
        ids[0] ^= 1;
        double *other = tiny_logits(&s, ids, 12);
        ids[0] ^= 1;
        for (size_t pos = 0; pos < 12; pos++)
            OK(all[pos * s.n_vocab] != other[pos * s.n_vocab]);
        mem_free(all);
        mem_free(some);
        mem_free(other);
    }
}

static void test_every_option_of_a_tiny_model_matters(void)
{
    const int32_t ids[6] = {5, 9, 100, 3, 77, 200};
    struct tiny_spec base;
    tiny_defaults(&base, "llama");
    double *plain = tiny_logits(&base, ids, 6);
    for (int i = 0; i < 6; i++) {
        struct tiny_spec s = base;
        s.rope_factors = i == 0;
        s.biases = i == 1;
        s.qk_norm = i == 2;
        s.rope_base = i == 3 ? 500 : s.rope_base;
        s.tied = i == 4;
        s.arch = i == 5 ? "qwen2" : s.arch; /* same weights, other pairs of the rotation */
        double *changed = tiny_logits(&s, ids, 6), worst = 0;
        for (size_t k = 0; k < 6 * (size_t)s.n_vocab; k++)
            worst = fmax(worst, fabs(plain[k] - changed[k]));
        OK_MSG(worst > 0.01, "option %d changes logits by %g only", i, worst);
        mem_free(changed);
    }
    mem_free(plain);
}

struct seen {
    char names[1024];
};

static void note(void *user, const char *name, int layer, const double *v, size_t rows,
                 size_t width)
{
    struct seen *s = user;
    size_t n = strlen(s->names);
    snprintf(s->names + n, sizeof s->names - n, "%d:%s:%zux%zu ", layer, name, rows, width);
}

static void test_every_intermediate_is_shown_in_order(void)
{
    static const char want[] =
        "-1:embedding:3x64 "
        "0:attn_norm:3x64 0:q:3x64 0:k:3x32 0:v:3x32 0:q_rope:3x64 0:k_rope:3x32 0:attention:3x64 "
        "0:attn_output:3x64 0:attn_residual:3x64 0:ffn_norm:3x64 0:ffn_gate:3x128 0:ffn_up:3x128 "
        "0:ffn_act:3x128 0:ffn_output:3x64 0:layer_output:3x64 "
        "-1:output_norm:3x64 -1:logits:3x384 ";
    struct tiny_spec s;
    struct gguf *g = NULL;
    struct oracle o;
    struct err e = {0};
    struct seen seen = {0};
    const int32_t ids[3] = {1, 2, 3};
    tiny_defaults(&s, "llama");
    s.n_layers = 1;
    OK_CALL(gguf_open(&g, tiny_path(&s), &e), e);
    OK_CALL(oracle_init(&o, g, &e), e);
    double *logits = mem_array(3 * (size_t)s.n_vocab, sizeof *logits);
    OK(oracle_run(logits, &o, ids, 3, note, &seen) == 0);
    OK_MSG(!strcmp(seen.names, want), "%s", seen.names);
    mem_free(logits);
    oracle_fini(&o);
    gguf_free(g);
}

static void test_bad_specs_are_errors(void)
{
    for (int i = 0; i < 5; i++) {
        struct tiny_spec s;
        struct err e = {0};
        tiny_defaults(&s, i == 0 ? "gpt2" : "llama");
        s.n_vocab = i == 1 ? 100 : s.n_vocab;
        s.n_kv_heads = i == 2 ? 3 : s.n_kv_heads;
        s.dtype = i == 3 ? 63 : s.dtype;
        s.n_layers = i == 4 ? 0 : s.n_layers;
        OK(tiny_write("/nonexistent/x", &s, &e) == -1 && e.code && e.code != ERR_IO);
    }
}

int main(int argc, char **argv)
{
#define T(name)                                                                                    \
    {                                                                                              \
#name, name                                                                                \
    }
    static const struct unit_test tests[] = {
        T(test_float_models_match_the_reference_logits),
        T(test_quantized_models_match_the_dequantized_reference),
        T(test_unknown_architectures_are_refused_by_name),
        T(test_tiny_files_pass_the_formats_check),
        T(test_k_quants_need_wider_models_and_then_work),
        T(test_the_same_seed_gives_the_same_file),
        T(test_tiny_models_give_lively_logits),
        T(test_a_position_sees_only_what_is_before_it),
        T(test_every_option_of_a_tiny_model_matters),
        T(test_every_intermediate_is_shown_in_order),
        T(test_bad_specs_are_errors),
    };
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
