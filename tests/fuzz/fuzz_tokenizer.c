/* Fuzz target: bytes to ids and back on small vocabularies of both kinds, and the streaming
 * decoder. On the byte-level one without special tokens, text that is valid UTF-8 comes back
 * exactly. The first byte chooses vocabulary and flags; odd inputs are fed to the decoder as ids
 * besides. */
#include "text/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static const char *const rules[] = {"gpt-2",       "llama-bpe", "gpt-4o",   "deepseek-llm",
                                    "deepseek-v3", "tiny_aya",  "superbpe", "exaone-moe"};
enum { N_BPE = ARRAY_LEN(rules), N_ALL = N_BPE + 1 };
static struct tokenizer *tokenizers[N_ALL];

struct vocab {
    struct gguf_str tokens[640];
    int32_t types[640];
    float scores[640];
    char bytes[640][8];
    uint32_t n;
};

static void put(struct vocab *v, const char *s, int32_t type, float score)
{
    size_t n = strlen(s);
    CHECK(n < sizeof v->bytes[0]);
    memcpy(v->bytes[v->n], s, n + 1);
    v->tokens[v->n] = (struct gguf_str){v->bytes[v->n], n};
    v->types[v->n] = type;
    v->scores[v->n++] = score;
}

static void put_bytes(struct vocab *v, bool bpe)
{
    int next = 256;
    for (int b = 0; b < 256; b++) {
        char s[8] = {0};
        bool printable = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
        if (bpe)
            s[utf8_encode(s, (uint32_t)(printable ? b : next++))] = 0;
        else
            snprintf(s, sizeof s, "<0x%02X>", b);
        put(v, s, bpe ? 1 : 6, 0);
    }
}

static struct tokenizer *build(const struct vocab *v, const char *model, const char *pre)
{
    static const struct gguf_str merges[] = {
        {"a a", 3},        {"aa aa", 5}, {"aa a", 4}, {"b b", 3},
        {"\xc4\xa0 a", 4}, {"a b", 3},   {"1 1", 3},  {"\xc3\xa3 \xc4\xa2", 5}};
    struct gguf_writer *w = gguf_writer_new(3, 32);
    struct gguf *g = NULL;
    struct tokenizer *t = NULL;
    struct err e = {0};
    char path[] = "/tmp/ingot-fuzz-XXXXXX";
    int fd = mkstemp(path);
    CHECK(fd >= 0);
    close(fd);
    gguf_writer_str(w, "tokenizer.ggml.model", model, strlen(model));
    gguf_writer_str(w, "tokenizer.ggml.pre", pre, strlen(pre));
    gguf_writer_strings(w, "tokenizer.ggml.tokens", v->n, v->tokens);
    gguf_writer_array(w, "tokenizer.ggml.token_type", GGUF_I32, v->n, v->types);
    gguf_writer_array(w, "tokenizer.ggml.scores", GGUF_FLOAT32, v->n, v->scores);
    gguf_writer_strings(w, "tokenizer.ggml.merges", ARRAY_LEN(merges), merges);
    CHECK(gguf_writer_finish(w, path, &e) == 0);
    gguf_writer_free(w);
    CHECK(gguf_open(&g, path, &e) == 0);
    CHECK(tokenizer_new(&t, g, &e) == 0);
    gguf_free(g);
    unlink(path);
    return t;
}

static void setup(void)
{
    for (size_t i = 0; i < N_BPE; i++) {
        struct vocab v = {0};
        put_bytes(&v, true);
        put(&v, "aa", 1, 0);
        put(&v, "aaa", 1, 0);
        put(&v, "bb", 1, 0);
        put(&v,
            "\xc4\xa0"
            "a",
            1, 0);
        tokenizers[i] = build(&v, "gpt2", rules[i]);
    }
    struct vocab v = {0};
    put(&v, "<unk>", 2, 0);
    put(&v, "<s>", 3, 0);
    put(&v, "</s>", 3, 0);
    put_bytes(&v, false);
    put(&v, "a", 1, -1);
    put(&v, "aa", 5, -2);
    put(&v, "aaa", 1, -3);
    put(&v,
        "\xe2\x96\x81"
        "a",
        1, -2);
    put(&v, "a\xe2\x96\x81", 1, -2);
    put(&v, "b", 1, -9);
    put(&v, "ab", 5, -1);
    put(&v, "abab", 5, -1);
    put(&v, "<x>", 4, 0);
    tokenizers[N_BPE] = build(&v, "llama", "default");
}

static void decode_stream(const struct tokenizer *t, const int32_t *ids, size_t n, bool skip)
{
    struct decoder d = {.skip_control = skip};
    struct buf out = {0};
    for (size_t i = 0; i < n; i++)
        decoder_put(&d, &out, t, ids[i]);
    decoder_end(&d, &out);
    CHECK(utf8_valid(out.data, out.n));
    buf_fini(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (!tokenizers[0])
        setup();
    if (!n)
        return 0;
    size_t which = data[0] % N_ALL;
    unsigned flags = data[0] / N_ALL % 4;
    const struct tokenizer *t = tokenizers[which];
    const char *p = (const char *)data + 1;
    struct ids ids = {0};
    struct buf back = {0};
    struct err e = {0};
    n--;
    CHECK(tokenizer_encode(&ids, t, p, n, flags, &e) == 0);
    tokenizer_decode(&back, t, ids.v, ids.n);
    if (which < N_BPE && utf8_valid(p, n))
        CHECK(back.n == n && (!n || !memcmp(back.data, p, n)));
    decode_stream(t, ids.v, ids.n, flags & 1);
    int32_t raw[64];
    size_t n_raw = MIN(n / sizeof *raw, ARRAY_LEN(raw));
    if (n_raw)
        memcpy(raw, p, n_raw * sizeof *raw);
    for (size_t i = 0; i < n_raw; i++)
        raw[i] %= 1024;
    decode_stream(t, raw, n_raw, flags & 1);
    ids_fini(&ids);
    buf_fini(&back);
    return 0;
}
