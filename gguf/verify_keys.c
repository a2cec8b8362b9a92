/* Checks of keys that hold for every architecture: the tokenizer's arrays fit each other and the
 * embedding, special ids are inside the vocabulary, hyper-parameters are in their range. What an
 * architecture needs beyond that is its loader's to check. Owns no memory. */
#include "gguf/gguf_internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { BYTE_TOKEN = 6, LAST_TOKEN_TYPE = 6, MAX_ARCH_BYTES = 64 };

static int key_error(const struct gguf_kv *kv, const char *what, struct err *e)
{
    return err_set(e, ERR_CORRUPT, "key '%.*s' %s", SHOW(kv->key), what);
}

/* ---- tokenizer ---- */

/* Any of the types in the mask, as an array; absent is fine and gives NULL. */
static int find_array(const struct gguf_kv **out, const struct gguf *g, const char *key,
                      unsigned types, struct err *e)
{
    const struct gguf_kv *kv = gguf_find(g, key);
    *out = kv;
    if (!kv)
        return 0;
    if (kv->type == GGUF_ARRAY && (types >> kv->elem_type & 1))
        return 0;
    return err_set(e, ERR_CORRUPT, "key '%s' is %s%s, which it may not be", key,
                   kv->type == GGUF_ARRAY ? "an array of " : "one value of type ",
                   gguf_type_name(kv->elem_type));
}

static int check_length(const struct gguf_kv *kv, uint64_t n_vocab, struct err *e)
{
    if (!kv || kv->n == n_vocab)
        return 0;
    return err_set(e, ERR_CORRUPT, "key '%.*s' has %llu entries for %llu tokens", SHOW(kv->key),
                   (unsigned long long)kv->n, (unsigned long long)n_vocab);
}

static int hex_value(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

static bool is_byte_text(struct gguf_str s)
{
    return s.n == 6 && memcmp(s.p, "<0x", 3) == 0 && hex_value(s.p[3]) >= 0 &&
           hex_value(s.p[4]) >= 0 && s.p[5] == '>';
}

static int check_types(const struct gguf_kv *types, const struct gguf_kv *tokens, struct err *e)
{
    for (uint64_t i = 0; types && i < types->n; i++) {
        int64_t type = gguf_kv_int(types, i);
        if (type < 0 || type > LAST_TOKEN_TYPE)
            return err_set(e, ERR_CORRUPT,
                           "tokenizer.ggml.token_type %lld of token %llu is unknown",
                           (long long)type, (unsigned long long)i);
        if (type == BYTE_TOKEN && !is_byte_text(tokens->strings[i]))
            return err_set(e, ERR_CORRUPT,
                           "token %llu ('%.*s') is marked as a byte, but is not <0x00> to <0xFF>",
                           (unsigned long long)i, SHOW(tokens->strings[i]));
    }
    return 0;
}

static int check_scores(const struct gguf_kv *scores, struct err *e)
{
    for (uint64_t i = 0; scores && i < scores->n; i++)
        if (isnan(gguf_kv_number(scores, i)))
            return key_error(scores, "has a score that is NaN", e);
    return 0;
}

/* Every key tokenizer.ggml.*_token_id, and the lists of ids. */
static int check_ids(const struct gguf *g, uint64_t n_vocab, struct err *e)
{
    static const char start[] = "tokenizer.ggml.", end[] = "_token_id";
    for (uint64_t k = 0; k < g->n_kv; k++) {
        const struct gguf_kv *kv = &g->kv[k];
        bool list = kv->key.n == 30 && memcmp(kv->key.p, "tokenizer.ggml.suppress_tokens", 30) == 0;
        bool id = kv->key.n >= sizeof start + sizeof end - 2 &&
                  memcmp(kv->key.p, start, sizeof start - 1) == 0 &&
                  memcmp(kv->key.p + kv->key.n - (sizeof end - 1), end, sizeof end - 1) == 0;
        if (!list && !id)
            continue;
        bool wide = kv->elem_type == GGUF_U32 || kv->elem_type == GGUF_I32 ||
                    kv->elem_type == GGUF_U64 || kv->elem_type == GGUF_I64;
        if (!wide || (kv->type == GGUF_ARRAY) != list)
            return key_error(kv, list ? "is no list of 32-bit ids" : "is no token id", e);
        for (uint64_t i = 0; i < kv->n; i++) {
            int64_t v = gguf_kv_int(kv, i);
            if (v < 0 || (uint64_t)v >= n_vocab)
                return err_set(e, ERR_CORRUPT, "key '%.*s': id %lld is outside the %llu tokens",
                               SHOW(kv->key), (long long)v, (unsigned long long)n_vocab);
        }
    }
    return 0;
}

/* SentencePiece's normalizer: u32 size of the trie, the trie (u32 units), replacement texts. */
static int check_charsmap(const struct gguf *g, struct err *e)
{
    const struct gguf_kv *kv;
    if (find_array(&kv, g, "tokenizer.ggml.precompiled_charsmap", 1u << GGUF_U8 | 1u << GGUF_I8, e))
        return -1;
    if (!kv || kv->n == 0)
        return 0;
    if (kv->n < 4)
        return key_error(kv, "is too short for a character map", e);
    uint64_t trie = (uint64_t)kv->data[0] | (uint64_t)kv->data[1] << 8 |
                    (uint64_t)kv->data[2] << 16 | (uint64_t)kv->data[3] << 24;
    if (trie > kv->n - 4 || trie % 4)
        return key_error(kv, "says its table is larger than it is", e);
    return 0;
}

static bool is_no_tokenizer(struct gguf_str model)
{
    return (model.n == 4 && memcmp(model.p, "none", 4) == 0) ||
           (model.n == 8 && memcmp(model.p, "no_vocab", 8) == 0);
}

static int check_tokenizer(const struct gguf *g, struct err *e)
{
    const struct gguf_kv *tokens, *scores, *types, *merges;
    struct gguf_str model = {0}, text = {0};
    if (gguf_get_str(g, "tokenizer.ggml.model", &model, e) ||
        gguf_get_str(g, "tokenizer.ggml.pre", &text, e) ||
        gguf_get_str(g, "tokenizer.chat_template", &text, e) ||
        find_array(&tokens, g, "tokenizer.ggml.tokens", 1u << GGUF_STRING, e) ||
        find_array(&scores, g, "tokenizer.ggml.scores", 1u << GGUF_FLOAT32, e) ||
        find_array(&types, g, "tokenizer.ggml.token_type", 1u << GGUF_I32 | 1u << GGUF_U32, e) ||
        find_array(&merges, g, "tokenizer.ggml.merges", 1u << GGUF_STRING, e) ||
        check_charsmap(g, e))
        return -1;
    if (is_no_tokenizer(model) || (!model.p && !tokens))
        return 0;
    if (!model.p)
        return err_set(e, ERR_CORRUPT, "key 'tokenizer.ggml.model' is missing");
    if (!tokens || tokens->n == 0)
        return err_set(e, ERR_CORRUPT, "key 'tokenizer.ggml.tokens' is %s",
                       tokens ? "empty" : "missing");
    if (check_length(scores, tokens->n, e) || check_length(types, tokens->n, e) ||
        check_scores(scores, e) || check_types(types, tokens, e) || check_ids(g, tokens->n, e))
        return -1;
    const struct gguf_tensor *embd = gguf_find_tensor(g, "token_embd.weight");
    if (embd && embd->ne[1] < tokens->n)
        return err_set(e, ERR_CORRUPT,
                       "tensor 'token_embd.weight' has %llu rows for %llu tokens in the vocabulary",
                       (unsigned long long)embd->ne[1], (unsigned long long)tokens->n);
    return 0;
}

/* ---- hyper-parameters ---- */

/* Integers that are at least 1, and numbers that are finite and not negative. */
static const struct {
    const char *name;
    bool real;
    bool positive;
} hyper[] = {
    {"block_count", false, true},
    {"context_length", false, true},
    {"embedding_length", false, true},
    {"attention.layer_norm_rms_epsilon", true, false},
    {"attention.layer_norm_epsilon", true, false},
    {"attention.group_norm_epsilon", true, false},
    {"rope.freq_base", true, true},
    {"rope.freq_base_swa", true, true},
};

static int check_hyper(const struct gguf *g, struct gguf_str arch, struct err *e)
{
    for (size_t i = 0; i < ARRAY_LEN(hyper); i++) {
        char key[MAX_ARCH_BYTES + 64];
        uint32_t v = 1;
        float f = 1;
        snprintf(key, sizeof key, "%.*s.%s", (int)arch.n, arch.p, hyper[i].name);
        if (hyper[i].real ? gguf_get_f32(g, key, &f, e) : gguf_get_u32(g, key, &v, e))
            return -1;
        if (v == 0 || !isfinite(f) || f < 0 || (f == 0 && hyper[i].positive))
            return err_set(e, ERR_CORRUPT, "key '%s' is %g; it must be %s", key,
                           hyper[i].real ? (double)f : (double)v,
                           hyper[i].positive ? "above zero" : "zero or more, and finite");
        if (i == 0 && v > g->n_tensors && g->n_tensors)
            return err_set(e, ERR_CORRUPT, "key '%s' is %u, but there are only %llu tensors", key,
                           v, (unsigned long long)g->n_tensors);
    }
    return 0;
}

int gguf_verify_keys(const struct gguf *g, struct err *e)
{
    struct gguf_str arch = {0};
    if (gguf_get_str(g, "general.architecture", &arch, e))
        return -1;
    if (!arch.n)
        return err_set(e, ERR_CORRUPT, "key 'general.architecture' is missing or empty");
    if (arch.n > MAX_ARCH_BYTES || memchr(arch.p, 0, arch.n))
        return err_set(e, ERR_CORRUPT, "key 'general.architecture' is no name: '%.*s'", SHOW(arch));
    return check_hyper(g, arch, e) || check_tokenizer(g, e) ? -1 : 0;
}
