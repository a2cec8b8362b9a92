/* Tokenizers against vectors of independent implementations (real vocabularies, read from the
 * shared data and skipped by name without it), against replayed reports, and against small
 * vocabularies made here: special tokens, the streaming decoder, hostile keys, failing allocations.
 */
#include "tests/unit/unit.h"
#include "text/text.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <utf8proc.h>

/* ---- helpers ---- */

static struct tokenizer *load(const char *rel)
{
    struct gguf *g = NULL;
    struct tokenizer *t = NULL;
    struct err e = {0};
    const char *path = unit_shared(rel);
    if (!path)
        return NULL;
    if (gguf_open(&g, path, &e)) {
        if (e.code == ERR_UNSUPPORTED)
            unit_skip("%s: %s", rel, e.msg);
        else
            OK_MSG(false, "%s", e.msg);
        return NULL;
    }
    OK_CALL(tokenizer_new(&t, g, &e), e);
    gguf_free(g);
    return t;
}

/* Each line of a JSONL file; the caller's function owns nothing. */
static bool each_line(const char *rel, void (*fn)(json_t *line, void *user), void *user)
{
    const char *path = unit_shared(rel);
    struct buf b = {0};
    struct err e = {0};
    if (!path)
        return false;
    if (!OK_CALL(file_read_all(&b, path, 64 << 20, &e), e))
        return false;
    char *save = NULL;
    for (char *l = strtok_r(b.data, "\n", &save); l; l = strtok_r(NULL, "\n", &save)) {
        json_t *j = json_loads(l, JSON_ALLOW_NUL, NULL);
        if (OK_MSG(j, "%s: not JSON: %.80s", rel, l))
            fn(j, user);
        json_decref(j);
    }
    buf_fini(&b);
    return true;
}

/* A text given as a string, as parts, or in hexadecimal. */
static void text_of(struct buf *out, const json_t *line, const char *key)
{
    const json_t *v = json_object_get(line, key), *part;
    size_t i;
    if (json_is_string(v))
        buf_put(out, json_string_value(v), json_string_length(v));
    json_array_foreach(v, i, part)
    {
        const json_t *r = json_object_get(part, "repeat");
        const json_t *s = r ? json_array_get(r, 0) : part;
        for (json_int_t k = r ? json_integer_value(json_array_get(r, 1)) : 1; k > 0; k--)
            buf_put(out, json_string_value(s), json_string_length(s));
    }
}

static void hex_of(struct buf *out, const json_t *hex)
{
    size_t n = json_string_length(hex);
    uint8_t *p = mem_alloc(n / 2 + 1);
    int k = hex_decode(p, n / 2, json_string_value(hex), n);
    OK(k >= 0);
    buf_put(out, p, (size_t)MAX(k, 0));
    mem_free(p);
}

static bool same_ids(const struct ids *got, const json_t *want)
{
    if (got->n != json_array_size(want))
        return false;
    for (size_t i = 0; i < got->n; i++)
        if (got->v[i] != json_integer_value(json_array_get(want, i)))
            return false;
    return true;
}

static void print_ids(const char *what, const struct ids *s)
{
    printf("    %s:", what);
    for (size_t i = 0; i < MIN(s->n, (size_t)24); i++)
        printf(" %d", s->v[i]);
    printf("%s\n", s->n > 24 ? " ..." : "");
}

static void ids_from(struct ids *s, const json_t *a)
{
    size_t i;
    const json_t *v;
    json_array_foreach(a, i, v) ids_put(s, (int32_t)json_integer_value(v));
}

static bool check_ids(const char *name, const struct buf *text, const struct ids *got,
                      const json_t *want)
{
    if (same_ids(got, want))
        return OK(true);
    struct ids w = {0};
    ids_from(&w, want);
    OK_MSG(false, "%s: wrong ids for \"%.*s\"", name, (int)MIN(text->n, (size_t)100), text->data);
    print_ids("got ", got);
    print_ids("want", &w);
    ids_fini(&w);
    return false;
}

/* Time the processor spent on us, so that a busy machine fails nobody. */
static double cpu_seconds(void)
{
    return (double)clock() / CLOCKS_PER_SEC;
}

/* ---- the vectors ---- */

struct tally {
    const char *name;
    const struct tokenizer *t;
    bool spm;
    int n_text, n_text_ok, n_bad, n_bad_ok, n_decode, n_decode_ok;
};

static void encode_line(json_t *line, void *user)
{
    struct tally *y = user;
    struct buf text = {0};
    struct ids got = {0}, again = {0};
    struct err e = {0};
    unsigned flags =
        (json_is_true(json_object_get(line, "add_special")) ? TOKENIZE_ADD_SPECIAL : 0) |
        (json_is_true(json_object_get(line, "parse_special")) ? TOKENIZE_PARSE_SPECIAL : 0);
    const json_t *hex = json_object_get(line, "bytes_hex");
    if (hex)
        hex_of(&text, hex);
    else
        text_of(&text, line, "text");
    OK_CALL(tokenizer_encode(&got, y->t, text.data, text.n, flags, &e), e);
    OK_CALL(tokenizer_encode(&again, y->t, text.data, text.n, flags, &e), e);
    OK_MSG(got.n == again.n && (!got.n || !memcmp(got.v, again.v, got.n * sizeof *got.v)),
           "%s: two runs differ", y->name);
    if (hex && y->spm) {
        /* Ours keeps the bytes where the reference has U+FFFD: they must come back. */
        struct buf back = {0};
        tokenizer_decode(&back, y->t, got.v, got.n);
        bool same = back.n == text.n + 1 && !memcmp(back.data + 1, text.data, text.n);
        y->n_bad++;
        y->n_bad_ok += OK_MSG(same, "%s: bad bytes do not come back", y->name);
        buf_fini(&back);
    } else if (hex) {
        y->n_bad++;
        y->n_bad_ok += check_ids(y->name, &text, &got, json_object_get(line, "ids"));
    } else {
        y->n_text++;
        y->n_text_ok += check_ids(y->name, &text, &got, json_object_get(line, "ids"));
    }
    buf_fini(&text);
    ids_fini(&got);
    ids_fini(&again);
}

static void stream_of(struct buf *out, const struct tokenizer *t, const struct ids *ids)
{
    struct decoder d = {0};
    for (size_t i = 0; i < ids->n; i++) {
        decoder_put(&d, out, t, ids->v[i]);
        OK_MSG(utf8_valid(out->data, out->n), "the stream is not whole characters");
    }
    decoder_end(&d, out);
}

static void repair(struct buf *out, const struct buf *in)
{
    for (size_t at = 0; at < in->n;) {
        uint32_t cp;
        int len = utf8_decode(&cp, in->data + at, in->n - at);
        if (len > 0)
            buf_put(out, in->data + at, (size_t)len);
        else
            buf_puts(out, "\xef\xbf\xbd");
        at += (size_t)abs(len);
    }
}

static bool same_buf(const struct buf *a, const struct buf *b)
{
    return a->n == b->n && (!a->n || !memcmp(a->data, b->data, a->n));
}

static void decode_line(json_t *line, void *user)
{
    struct tally *y = user;
    struct ids ids = {0};
    struct buf got = {0}, want = {0}, stream = {0}, fixed = {0};
    const json_t *piece, *pieces = json_object_get(line, "pieces_hex");
    size_t i;
    bool good = true;
    ids_from(&ids, json_object_get(line, "ids"));
    hex_of(&want, json_object_get(line, "bytes_hex"));
    tokenizer_decode(&got, y->t, ids.v, ids.n);
    good &= same_buf(&got, &want);
    json_array_foreach(pieces, i, piece)
    {
        struct buf one = {0};
        size_t n;
        const char *p = tokenizer_piece(y->t, ids.v[i], &n);
        hex_of(&one, piece);
        good &= one.n == n && (!n || !memcmp(one.data, p, n));
        buf_fini(&one);
    }
    stream_of(&stream, y->t, &ids);
    repair(&fixed, &want);
    good &= same_buf(&stream, &fixed);
    y->n_decode++;
    y->n_decode_ok += OK_MSG(good, "%s: decoding \"%.80s\" differs", y->name, buf_str(&want));
    ids_fini(&ids);
    buf_fini(&got);
    buf_fini(&want);
    buf_fini(&stream);
    buf_fini(&fixed);
}

static void test_every_vector_matches_its_reference(void)
{
    static const char *const spm[] = {"llama-spm", "phi-3", "mistral-v1"};
    static const char *const bpe[] = {"gpt-2",  "deepseek-llm", "deepseek-coder", "starcoder",
                                      "llama3", "qwen3",        "gpt-oss",        "tekken"};
    printf("  %-16s %12s %12s %12s %9s\n", "tokenizer", "text", "bad bytes", "decode", "load ms");
    for (size_t i = 0; i < ARRAY_LEN(spm) + ARRAY_LEN(bpe); i++) {
        struct tally y = {.spm = i < ARRAY_LEN(spm)};
        char rel[128];
        y.name = y.spm ? spm[i] : bpe[i - ARRAY_LEN(spm)];
        snprintf(rel, sizeof rel, "tokenizers/%s.gguf", y.name);
        double t0 = cpu_seconds();
        struct tokenizer *t = load(rel);
        double ms = (cpu_seconds() - t0) * 1e3;
        if (!(y.t = t))
            continue;
        snprintf(rel, sizeof rel, "tokenizers/%s.jsonl", y.name);
        each_line(rel, encode_line, &y);
        snprintf(rel, sizeof rel, "tokenizers/%s.decode.jsonl", y.name);
        each_line(rel, decode_line, &y);
        printf("  %-16s %5d of %-4d %5d of %-4d %5d of %-4d %7.1f\n", y.name, y.n_text_ok, y.n_text,
               y.n_bad_ok, y.n_bad, y.n_decode_ok, y.n_decode, ms);
        OK(y.n_text > 100 && y.n_decode > 100);
        tokenizer_free(t);
    }
}

/* ---- tiny vocabularies of the reference models ---- */

/* These references come from an implementation that leaves NFC out, where the models' own
 * tokenizers have it: for texts that it would change, the normalized text must come back instead.
 */
static bool is_normalized_away(const struct buf *text, const struct buf *back)
{
    utf8proc_uint8_t *nfc = NULL;
    utf8proc_ssize_t n =
        utf8proc_map((const utf8proc_uint8_t *)text->data, (utf8proc_ssize_t)text->n, &nfc,
                     UTF8PROC_COMPOSE | UTF8PROC_STABLE);
    bool yes = n >= 0 && (size_t)n != text->n && (size_t)n == back->n &&
               !memcmp(nfc, back->data, (size_t)n);
    free(nfc);
    return yes;
}

static void ref_case(const char *name, const struct tokenizer *t, bool spm, const json_t *c)
{
    struct buf text = {0}, detok = {0}, back = {0};
    struct ids ids = {0}, special = {0};
    struct err e = {0};
    text_of(&text, c, "text");
    text_of(&detok, c, "detok");
    OK_CALL(tokenizer_encode(&ids, t, text.data, text.n, 0, &e), e);
    OK_CALL(tokenizer_encode(&special, t, text.data, text.n,
                             TOKENIZE_ADD_SPECIAL | TOKENIZE_PARSE_SPECIAL, &e),
            e);
    tokenizer_decode(&back, t, ids.v, ids.n);
    if (is_normalized_away(&text, &back))
        goto out;
    check_ids(name, &text, &ids, json_object_get(c, "ids"));
    check_ids(name, &text, &special, json_object_get(c, "ids_special"));
    size_t skip = spm && back.n == detok.n + 1 && back.data[0] == ' ';
    OK_MSG(back.n - skip == detok.n && (!detok.n || !memcmp(back.data + skip, detok.data, detok.n)),
           "%s: decodes to \"%.80s\"", name, buf_str(&back));
out:
    buf_fini(&text);
    buf_fini(&detok);
    buf_fini(&back);
    ids_fini(&ids);
    ids_fini(&special);
}

static void test_reference_models_tokenize_alike(void)
{
    static const char *const names[] = {
        "command_r", "deepseek2_kvb", "deepseek2_mla", "deepseek2_v3", "gemma1",     "gemma2",
        "gemma3",    "gpt2",          "gptoss_f32",    "gptoss_mxfp4", "granite",    "llama",
        "llama_moe", "llama_rope3",   "llama_tied",    "mamba",        "phi3",       "qwen2",
        "qwen3",     "qwen35",        "qwen3moe",      "smollm3",      "starcoder2",
    };
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        char rel[128];
        struct buf b = {0};
        struct err e = {0};
        snprintf(rel, sizeof rel, "refs/%s.gguf", names[i]);
        struct tokenizer *t = load(rel);
        snprintf(rel, sizeof rel, "refs/%s.tok.json", names[i]);
        const char *path = t ? unit_shared(rel) : NULL;
        if (path && OK_CALL(file_read_all(&b, path, 1 << 20, &e), e)) {
            json_t *a = json_loads(buf_str(&b), JSON_ALLOW_NUL, NULL), *c;
            size_t k;
            OK(json_array_size(a) > 5);
            json_array_foreach(a, k, c)
                ref_case(names[i], t, tokenizer_find(t, "<unk>", 5) == 0, c);
            json_decref(a);
        }
        buf_fini(&b);
        tokenizer_free(t);
    }
}

/* ---- replayed reports ---- */

static void ids_digest(char hex[65], const struct ids *s)
{
    struct sha256 h;
    uint8_t out[32];
    sha256_init(&h);
    for (size_t i = 0; i < s->n; i++) {
        char num[16];
        sha256_add(&h, num, (size_t)snprintf(num, sizeof num, i ? " %d" : "%d", s->v[i]));
    }
    sha256_done(&h, out);
    hex_encode(hex, out, 32);
}

static void case_line(json_t *line, void *user)
{
    const char *id = json_string_value(json_object_get(line, "id"));
    const char *tok = json_string_value(json_object_get(line, "tokenizer"));
    const json_t *want = json_object_get(line, "expect"), *v;
    char rel[256];
    struct buf text = {0}, back = {0};
    struct ids got = {0};
    struct err e = {0};
    snprintf(rel, sizeof rel, tok ? "tokenizers/%s.gguf" : "cases/%s",
             tok ? tok : json_string_value(json_object_get(line, "model")));
    struct tokenizer *t = load(rel);
    if (!t)
        return;
    text_of(&text, line, "text");
    bool parse = json_is_true(json_object_get(line, "parse_special"));
    double t0 = cpu_seconds();
    OK_CALL(tokenizer_encode(&got, t, text.data, text.n, parse ? TOKENIZE_PARSE_SPECIAL : 0, &e),
            e);
    double s = cpu_seconds() - t0;
    if ((v = json_object_get(want, "ids")))
        check_ids(id, &text, &got, v);
    if ((v = json_object_get(want, "ids_sha256"))) {
        char hex[65];
        ids_digest(hex, &got);
        OK_MSG(!strcmp(hex, json_string_value(v)), "%s: digest of %zu ids", id, got.n);
    }
    if ((v = json_object_get(want, "n_ids")))
        OK_MSG((json_int_t)got.n == json_integer_value(v), "%s: %zu ids", id, got.n);
    if (json_is_true(json_object_get(want, "round_trip"))) {
        tokenizer_decode(&back, t, got.v, got.n);
        size_t skip = back.n == text.n + 1;
        OK_MSG(back.n - skip == text.n && !memcmp(back.data + skip, text.data, text.n),
               "%s: does not come back", id);
    }
    if ((v = json_object_get(want, "seconds_max")))
        OK_MSG(s < json_number_value(v), "%s: %.2f s", id, s);
    ++*(int *)user;
    buf_fini(&text);
    buf_fini(&back);
    ids_fini(&got);
    tokenizer_free(t);
}

static void test_replayed_reports_hold(void)
{
    int n = 0;
    if (each_line("cases/tokenizer/cases.jsonl", case_line, &n))
        OK_MSG(n >= 20, "only %d cases ran", n);
}

/* Vocabularies of the loader cases: refused by the name of the key, or loaded and usable. */
static void loader_line(json_t *line, void *user)
{
    const char *file = json_string_value(json_object_get(line, "file"));
    const char *expect = json_string_value(json_object_get(line, "expect"));
    const json_t *any = json_object_get(line, "message_has_any"), *word;
    char rel[256];
    struct gguf *g = NULL;
    struct tokenizer *t = NULL;
    struct err e = {0};
    /* Unigram, WordPiece and the embedding's size are other people's work. */
    if ((!strstr(file, "tok-") && !strstr(file, "token")) || strstr(file, "charsmap") ||
        strstr(file, "wordpiece") || strstr(file, "beyond-embd") || strstr(file, "missing-tensor"))
        return;
    snprintf(rel, sizeof rel, "cases/loader/%s", file);
    const char *path = unit_shared(rel);
    if (!path || gguf_open(&g, path, &e))
        return; /* refused before it comes to us */
    int rc = tokenizer_new(&t, g, &e);
    if (!strcmp(expect, "load"))
        OK_MSG(rc == 0, "%s: %s", file, e.msg);
    if (!strcmp(expect, "refuse"))
        OK_MSG(rc != 0, "%s: loads", file);
    bool named = rc == 0;
    size_t i;
    json_array_foreach(any, i, word) named |= strstr(e.msg, json_string_value(word)) != NULL;
    OK_MSG(named, "%s: %s", file, e.msg);
    struct ids ids = {0};
    if (!rc)
        OK_CALL(tokenizer_encode(&ids, t, "the hand", 8, 3, &e), e);
    ids_fini(&ids);
    ++*(int *)user;
    tokenizer_free(t);
    gguf_free(g);
}

static void test_hostile_vocabularies_are_refused_by_name(void)
{
    int n = 0;
    if (each_line("cases/loader/manifest.jsonl", loader_line, &n))
        OK_MSG(n >= 20, "only %d files ran", n);
}

/* ---- vocabularies made here ---- */

struct vocab {
    const char *model, *pre;
    const char *tokens[600];
    int32_t types[600];
    float scores[600];
    uint32_t n;
    const char *merges[64];
    uint32_t n_merges;
    void (*more)(struct gguf_writer *w);
};

static int32_t vocab_put(struct vocab *v, const char *token, int32_t type, float score)
{
    v->tokens[v->n] = token;
    v->types[v->n] = type;
    v->scores[v->n] = score;
    return (int32_t)v->n++;
}

static void strings_write(struct gguf_writer *w, const char *key, const char *const *s, uint32_t n)
{
    struct gguf_str items[600];
    for (uint32_t i = 0; i < n; i++)
        items[i] = (struct gguf_str){s[i], strlen(s[i])};
    gguf_writer_strings(w, key, n, items);
}

static struct gguf *vocab_gguf(const struct vocab *v)
{
    struct gguf_writer *w = gguf_writer_new(3, 32);
    struct gguf *g = NULL;
    struct err e = {0};
    char path[256];
    snprintf(path, sizeof path, "%s/v.gguf", unit_tmpdir());
    gguf_writer_str(w, "general.architecture", "llama", 5);
    gguf_writer_str(w, "tokenizer.ggml.model", v->model, strlen(v->model));
    if (v->pre)
        gguf_writer_str(w, "tokenizer.ggml.pre", v->pre, strlen(v->pre));
    strings_write(w, "tokenizer.ggml.tokens", v->tokens, v->n);
    gguf_writer_array(w, "tokenizer.ggml.token_type", GGUF_I32, v->n, v->types);
    if (!strcmp(v->model, "llama"))
        gguf_writer_array(w, "tokenizer.ggml.scores", GGUF_FLOAT32, v->n, v->scores);
    else
        strings_write(w, "tokenizer.ggml.merges", v->merges, v->n_merges);
    if (v->more)
        v->more(w);
    OK_CALL(gguf_writer_finish(w, path, &e), e);
    gguf_writer_free(w);
    OK_CALL(gguf_open(&g, path, &e), e);
    return g;
}

static struct tokenizer *vocab_tokenizer(const struct vocab *v)
{
    struct gguf *g = vocab_gguf(v);
    struct tokenizer *t = NULL;
    struct err e = {0};
    if (g)
        OK_CALL(tokenizer_new(&t, g, &e), e);
    gguf_free(g);
    return t;
}

/* The 256 bytes in byte order, so that a byte is its own id; then a few merges and specials. */
static void vocab_bytes(struct vocab *v, const char *pre)
{
    static char alphabet[256][4];
    static const char *const merges[] = {"t h",   "th e", "\xc4\xa0 the", "a a",
                                         "aa aa", "l l",  "o ll",         "x y"};
    int next = 256;
    *v = (struct vocab){.model = "gpt2", .pre = pre};
    for (int b = 0; b < 256; b++) {
        bool printable = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
        alphabet[b][utf8_encode(alphabet[b], (uint32_t)(printable ? b : next++))] = 0;
        vocab_put(v, alphabet[b], 1, 0);
    }
    for (size_t i = 0; i < ARRAY_LEN(merges); i++)
        v->merges[v->n_merges++] = merges[i];
    vocab_put(v, "th", 1, 0);           /* 256 */
    vocab_put(v, "the", 1, 0);          /* 257 */
    vocab_put(v, "\xc4\xa0the", 1, 0);  /* 258 */
    vocab_put(v, "aa", 1, 0);           /* 259 */
    vocab_put(v, "aaaa", 1, 0);         /* 260 */
    vocab_put(v, "oll", 1, 0);          /* 261: its merge goes through "ll", no token */
    vocab_put(v, "<|im_end|>", 3, 0);   /* 262 */
    vocab_put(v, "<tool>", 4, 0);       /* 263 */
    vocab_put(v, "<tool><tool>", 4, 0); /* 264 */
    vocab_put(v, "<|end|>", 3, 0);      /* 265 */
    vocab_put(v, "</s>", 1, 0);         /* 266 */
    vocab_put(v, "</s>!", 4, 0);        /* 267 */
}

static void expect_ids(const struct tokenizer *t, const char *text, unsigned flags,
                       const int32_t *want, size_t n)
{
    struct ids got = {0};
    struct err e = {0};
    if (!t)
        return;
    OK_CALL(tokenizer_encode(&got, t, text, strlen(text), flags, &e), e);
    if (!OK_MSG(got.n == n && !memcmp(got.v, want, n * sizeof *want), "\"%s\", flags %u", text,
                flags))
        print_ids("got", &got);
    ids_fini(&got);
}
#define EXPECT(t, text, flags, ...)                                                                \
    expect_ids(t, text, flags, (const int32_t[]){__VA_ARGS__},                                     \
               sizeof((const int32_t[]){__VA_ARGS__}) / sizeof(int32_t))

static void test_control_tokens_are_found_only_when_asked_for(void)
{
    struct vocab v;
    vocab_bytes(&v, "gpt-2");
    struct tokenizer *t = vocab_tokenizer(&v);
    EXPECT(t, "the<|im_end|>", TOKENIZE_PARSE_SPECIAL, 257, 262);
    EXPECT(t, "<|im_end|>", 0, '<', '|', 'i', 'm', '_', 'e', 'n', 'd', '|', '>');
    EXPECT(t, "a<tool>a", 0, 'a', 263, 'a');
    EXPECT(t, "<tool><tool><tool><too", 0, 264, 263, '<', 't', 'o', 'o');
    EXPECT(t, "</s></s>!", TOKENIZE_PARSE_SPECIAL, '<', '/', 's', '>', 267);
    tokenizer_free(t);
}

static void test_a_merge_may_go_through_what_is_no_token(void)
{
    struct vocab v;
    vocab_bytes(&v, "gpt-2");
    struct tokenizer *t = vocab_tokenizer(&v);
    EXPECT(t, "oll", 0, 261);
    EXPECT(t, "ll", 0, 'l', 'l');
    EXPECT(t, "xy", 0, 'x', 'y');
    EXPECT(t, "aaaaaaa", 0, 260, 259, 'a');
    EXPECT(t, "\xff", 0, 0xef, 0xbf, 0xbd);
    OK(tokenizer_find(t, "ll", 2) == -1 && tokenizer_find(t, " the", 4) == 258);
    OK(tokenizer_find(t, "<|im_end|>", 10) == 262 && tokenizer_find(t, "", 0) == -1);
    tokenizer_free(t);
}

static void unk_write(struct gguf_writer *w)
{
    gguf_writer_u32(w, "tokenizer.ggml.unknown_token_id", 0);
}

static void test_a_byte_without_a_token_is_never_dropped(void)
{
    struct vocab v;
    struct ids ids = {0};
    struct err e = {0};
    vocab_bytes(&v, "gpt-2");
    v.tokens['Q'] = "QQQ";
    struct tokenizer *t = vocab_tokenizer(&v);
    EXPECT(t, "the", 0, 257);
    OK(tokenizer_encode(&ids, t, "the Q", 5, 0, &e) && strstr(e.msg, "0x51") && ids.n == 0);
    tokenizer_free(t);
    v.more = unk_write;
    t = vocab_tokenizer(&v);
    EXPECT(t, "the Q", 0, 257, ' ', 0);
    tokenizer_free(t);
    ids_fini(&ids);
}

static void test_white_space_is_that_of_unicode(void)
{
    struct vocab v;
    vocab_bytes(&v, "gpt-2");
    v.merges[v.n_merges++] = "\xc4\xa2 !"; /* byte 80 and "!" */
    v.merges[v.n_merges++] = "\xc4\xb0 !"; /* byte 8e and "!" */
    int32_t space = vocab_put(&v, "\xc4\xa2!", 1, 0), mark = vocab_put(&v, "\xc4\xb0!", 1, 0);
    struct tokenizer *t = vocab_tokenizer(&v);
    EXPECT(t, "\xe3\x80\x80!", 0, 0xe3, 0x80, 0x80, '!'); /* U+3000 is a word of its own */
    EXPECT(t, "\xe1\xa0\x8e!", 0, 0xe1, 0xa0, mark);      /* U+180E is no white space */
    EXPECT(t, "\xe2\x80\x80!", 0, 0xe2, 0x80, 0x80, '!');
    EXPECT(t, "\xe2\x82\x80\xef\xbc\x80!", 0, 0xe2, 0x82, 0x80, 0xef, 0xbc, space);
    tokenizer_free(t);
}

static void ends_write(struct gguf_writer *w)
{
    gguf_writer_u32(w, "tokenizer.ggml.eot_token_id", 257);
    gguf_writer_u32(w, "tokenizer.ggml.eos_token_id", 256);
    gguf_writer_u32(w, "tokenizer.ggml.bos_token_id", 'a');
    gguf_writer_bool(w, "tokenizer.ggml.add_bos_token", true);
    gguf_writer_bool(w, "tokenizer.ggml.add_eos_token", true);
}

static void test_ends_of_generation_are_known(void)
{
    struct vocab v;
    vocab_bytes(&v, "gpt-2");
    v.more = ends_write;
    struct tokenizer *t = vocab_tokenizer(&v);
    OK(tokenizer_is_eog(t, 256) && tokenizer_is_eog(t, 257) && tokenizer_is_eog(t, 262));
    OK(tokenizer_is_eog(t, 265) && !tokenizer_is_eog(t, 266) && !tokenizer_is_eog(t, 'a'));
    OK(!tokenizer_is_eog(t, -1) && !tokenizer_is_eog(t, INT32_MAX));
    OK(tokenizer_bos(t) == 'a' && tokenizer_eos(t) == 256 && tokenizer_n_vocab(t) == v.n);
    EXPECT(t, "the", TOKENIZE_ADD_SPECIAL, 'a', 257, 256);
    tokenizer_free(t);
    /* In a vocabulary with the harmony words <|end|> closes a message, not the answer. */
    vocab_put(&v, "<|return|>", 3, 0);
    vocab_put(&v, "<|call|>", 3, 0);
    t = vocab_tokenizer(&v);
    OK(!tokenizer_is_eog(t, 265) && tokenizer_is_eog(t, 268) && tokenizer_is_eog(t, 269));
    tokenizer_free(t);
}

static void test_unused_pieces_come_apart_again(void)
{
    struct vocab v = {.model = "llama"};
    vocab_put(&v, "<unk>", 2, 0);
    vocab_put(&v, "<s>", 3, 0);
    vocab_put(&v, "</s>", 3, 0);
    vocab_put(&v, "a", 1, -9);            /* 3 */
    vocab_put(&v, "b", 1, -9);            /* 4 */
    vocab_put(&v, "ab", 5, -1);           /* 5, unused */
    vocab_put(&v, "abab", 5, -2);         /* 6, unused */
    vocab_put(&v, "abb", 1, -3);          /* 7 */
    vocab_put(&v, "\xe2\x96\x81", 1, -4); /* 8 */
    vocab_put(&v,
              "b\xe2\x96\x81"
              "b",
              1, -1);                      /* 9: goes on after a blank */
    vocab_put(&v, "b\xe2\x96\x81", 1, -1); /* 10 */
    struct tokenizer *t = vocab_tokenizer(&v);
    EXPECT(t, "ab", 0, 8, 3, 4);
    EXPECT(t, "abab", 0, 8, 3, 4, 3, 4);
    EXPECT(t, "abb", TOKENIZE_ADD_SPECIAL, 1, 8, 7);
    EXPECT(t, "b b", 0, 8, 9);
    EXPECT(t, "a\xc3\xa9", 0, 8, 3, 0);
    EXPECT(t, "<s>a", TOKENIZE_PARSE_SPECIAL, 1, 8, 3);
    OK(tokenizer_find(t, "b b", 3) == 9);
    tokenizer_free(t);
}

static void decoder_case(const struct tokenizer *t, const char *in, size_t n, const char *want)
{
    struct decoder d = {0};
    struct buf out = {0};
    for (size_t i = 0; i < n; i++)
        decoder_put(&d, &out, t, (unsigned char)in[i]);
    decoder_end(&d, &out);
    OK_MSG(!strcmp(buf_str(&out), want), "got \"%s\", want \"%s\"", buf_str(&out), want);
    buf_fini(&out);
}
#define FFFD "\xef\xbf\xbd"

static void test_the_stream_has_whole_characters_only(void)
{
    struct vocab v;
    vocab_bytes(&v, "gpt-2");
    struct tokenizer *t = vocab_tokenizer(&v);
    decoder_case(t, "a\xc3\xa9z", 4, "a\xc3\xa9z");
    decoder_case(t, "\xf0\x9f\x98\x80!", 5, "\xf0\x9f\x98\x80!");
    decoder_case(t, "\xf0\x9f\x98", 3, FFFD);
    decoder_case(t,
                 "\xf0\x9f"
                 "a",
                 3, FFFD "a");
    decoder_case(t, "\xf0\x9f\xc3\xa9", 4, FFFD "\xc3\xa9");
    decoder_case(t, "\xff\xfe", 2, FFFD FFFD);
    decoder_case(t, "\xed\xa0\x80", 3, FFFD FFFD FFFD);
    decoder_case(t, "\xe4\xf0\x9f\x98", 4, FFFD FFFD);
    struct decoder d = {.skip_control = true};
    struct buf out = {0};
    decoder_put(&d, &out, t, 0xc3);
    OK(out.n == 0 && d.n_held == 1);
    decoder_put(&d, &out, t, 262);
    decoder_put(&d, &out, t, -5);
    decoder_put(&d, &out, t, 100000);
    decoder_put(&d, &out, t, 0xa9);
    OK(!strcmp(buf_str(&out), "\xc3\xa9"));
    buf_fini(&out);
    tokenizer_free(t);
}

/* ---- time ---- */

static void repeat(struct buf *b, const char *s, size_t n_bytes)
{
    buf_clear(b);
    while (b->n < n_bytes)
        buf_puts(b, s);
}

static void test_every_split_rule_is_linear_and_loses_nothing(void)
{
    static const char *const names[] = {
        "default",     "gpt-2",      "smollm",         "llama-bpe",    "qwen2",      "qwen35",
        "gpt-4o",      "tekken",     "falcon",         "deepseek-llm", "bloom",      "viking",
        "deepseek-v3", "jais-2",     "deepseek-coder", "kimi-k2",      "superbpe",   "tiny_aya",
        "bailingmoe",  "seed-coder", "youtu",          "minicpm5",     "exaone-moe", "chameleon",
    };
    static const char *const texts[] = {
        "a",
        " ",
        "1",
        "\n",
        "!",
        "\xe6\xbc\xa2",
        " a",
        "A",
        "a\xcc\x81",
        "\xcc\x81\xcc\xa7",
        "\t \n",
        "aA",
        "'s",
        "12a",
        "\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x92\xbb",
        "the quick, brown",
    };
    struct buf text = {0}, back = {0};
    struct vocab v;
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        vocab_bytes(&v, names[i]);
        struct tokenizer *t = vocab_tokenizer(&v);
        for (size_t k = 0; t && k < ARRAY_LEN(texts); k++) {
            struct ids ids = {0};
            struct err e = {0};
            repeat(&text, texts[k], 131000);
            buf_putc(&text, 'x');
            double t0 = cpu_seconds();
            OK_CALL(tokenizer_encode(&ids, t, text.data, text.n, 0, &e), e);
            double s = cpu_seconds() - t0;
            OK_MSG(s < 1, "%s: 131000 bytes of \"%s\" take %.2f s", names[i], texts[k], s);
            buf_clear(&back);
            tokenizer_decode(&back, t, ids.v, ids.n);
            /* NFC composes and reorders marks. */
            if (!strstr(texts[k], "\xcc") || !strstr(names[i], "qwen"))
                OK_MSG(same_buf(&back, &text), "%s: \"%s\" does not come back", names[i], texts[k]);
            ids_fini(&ids);
        }
        tokenizer_free(t);
    }
    buf_fini(&text);
    buf_fini(&back);
}

static void test_normalization_composes_and_orders(void)
{
    struct vocab v;
    vocab_bytes(&v, "qwen2");
    struct tokenizer *t = vocab_tokenizer(&v);
    EXPECT(t, "a\xcc\x81", 0, 0xc3, 0xa1);
    EXPECT(t, "\xe1\x84\x80\xe1\x85\xa1\xe1\x86\xa8", 0, 0xea, 0xb0, 0x81); /* jamo to a syllable */
    EXPECT(t, "q\xcc\x81\xcc\xa7", 0, 'q', 0xcc, 0xa7, 0xcc, 0x81);
    EXPECT(t, "\xe2\x84\xab z", 0, 0xc3, 0x85, ' ', 'z'); /* Angstrom sign */
    EXPECT(t, "\xcc\x81", 0, 0xcc, 0x81);
    tokenizer_free(t);
}

/* ---- faults ---- */

static void bad_bos(struct gguf_writer *w)
{
    gguf_writer_u32(w, "tokenizer.ggml.bos_token_id", 9999);
}

static void bad_flag(struct gguf_writer *w)
{
    gguf_writer_bool(w, "tokenizer.ggml.add_eos_token", true);
}

static void test_errors_name_the_key(void)
{
    static const struct {
        const char *model, *pre, *merge, *word;
        void (*more)(struct gguf_writer *w);
    } cases[] = {
        {"gpt2", "qwen2000", NULL, "qwen2000", NULL},
        {"gpt2", "gpt-2", "ab", "tokenizer.ggml.merges", NULL},
        {"gpt2", "gpt-2", "a ", "tokenizer.ggml.merges", NULL},
        {"t5000", "gpt-2", NULL, "t5000", NULL},
        {"gpt2", "gpt-2", NULL, "tokenizer.ggml.bos_token_id", bad_bos},
        {"gpt2", "gpt-2", NULL, "tokenizer.ggml.add_eos_token", bad_flag},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct vocab v;
        struct tokenizer *t = NULL;
        struct err e = {0};
        vocab_bytes(&v, cases[i].pre);
        v.model = cases[i].model;
        v.more = cases[i].more;
        if (cases[i].merge)
            v.merges[v.n_merges++] = cases[i].merge;
        struct gguf *g = vocab_gguf(&v);
        OK_MSG(tokenizer_new(&t, g, &e) && strstr(e.msg, cases[i].word), "case %zu: %s", i, e.msg);
        gguf_free(g);
    }
}

static void test_no_allocation_failure_crashes_or_leaks(void)
{
    struct vocab v;
    struct buf text = {0};
    vocab_bytes(&v, "qwen2");
    struct gguf *g = vocab_gguf(&v);
    repeat(&text,
           "a\xcc\x81 the aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\xff",
           900);
    for (uint64_t n = 1;; n++) {
        struct tokenizer *t = NULL;
        struct ids ids = {0};
        struct err e = {0};
        uint64_t before = mem_alloc_count();
        mem_fail_at(n);
        int rc = tokenizer_new(&t, g, &e) || tokenizer_encode(&ids, t, text.data, text.n, 0, &e);
        mem_fail_at(0);
        OK_MSG(!rc || e.code == ERR_MEMORY, "failure %llu: %s", (unsigned long long)n, e.msg);
        tokenizer_free(t);
        ids_fini(&ids);
        if (mem_alloc_count() - before < n) { /* the n-th never came: all have been tried */
            OK(!rc && n > 15);
            break;
        }
    }
    buf_fini(&text);
    gguf_free(g);
}

int main(int argc, char **argv)
{
    static const struct unit_test tests[] = {
#define T(name) {#name, test_##name}
        T(every_vector_matches_its_reference),
        T(reference_models_tokenize_alike),
        T(replayed_reports_hold),
        T(hostile_vocabularies_are_refused_by_name),
        T(control_tokens_are_found_only_when_asked_for),
        T(a_merge_may_go_through_what_is_no_token),
        T(a_byte_without_a_token_is_never_dropped),
        T(white_space_is_that_of_unicode),
        T(ends_of_generation_are_known),
        T(unused_pieces_come_apart_again),
        T(the_stream_has_whole_characters_only),
        T(every_split_rule_is_linear_and_loses_nothing),
        T(normalization_composes_and_orders),
        T(errors_name_the_key),
        T(no_allocation_failure_crashes_or_leaks),
#undef T
    };
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
