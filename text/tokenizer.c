/* Tokenizers: from the `tokenizer.ggml.*` keys of a GGUF to an object that turns text into ids and
 * back. This file reads what all algorithms have in common, cuts text at special tokens and hands
 * the rest to bpe.c or spm.c. Refuses models it does not know and arrays that do not fit together,
 * by the name of the key. A tokenizer owns all its memory; nothing in it points into the file. */
#include "text/text_internal.h"

#include <string.h>

static const struct algorithm {
    const char *model; /* tokenizer.ggml.model */
    enum tokenizer_kind kind;
    int (*load)(struct tokenizer *t, const struct gguf *g, struct err *e);
    int (*segment)(struct encode *c, const char *p, size_t n);
} algorithms[] = {
    {"gpt2", TOKENIZER_BPE, bpe_load, bpe_segment},
    {"llama", TOKENIZER_SPM, spm_load, spm_segment},
};

static const struct algorithm *algorithm_find(const struct gguf *g, struct err *e)
{
    struct gguf_str model = {0};
    if (gguf_get_str(g, "tokenizer.ggml.model", &model, e))
        return NULL;
    if (!model.p) {
        err_set(e, ERR_CORRUPT, "tokenizer.ggml.model is missing: the file has no tokenizer");
        return NULL;
    }
    for (size_t i = 0; i < ARRAY_LEN(algorithms); i++)
        if (model.n == strlen(algorithms[i].model) &&
            !memcmp(model.p, algorithms[i].model, model.n))
            return &algorithms[i];
    err_set(e, ERR_UNSUPPORTED, "tokenizer.ggml.model: unknown tokenizer '%.*s'",
            (int)MIN(model.n, (size_t)60), model.p);
    return NULL;
}

/* ---- loading ---- */

static int tokens_load(struct tokenizer *t, const struct gguf *g, struct err *e)
{
    const char *key = "tokenizer.ggml.tokens";
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv)
        return err_set(e, ERR_CORRUPT, "%s is missing", key);
    if (kv->type != GGUF_ARRAY || kv->elem_type != GGUF_STRING)
        return err_set(e, ERR_CORRUPT, "%s is not an array of strings", key);
    if (!kv->n || kv->n > INT32_MAX / 2)
        return err_set(e, ERR_CORRUPT, "%s has %llu entries", key, (unsigned long long)kv->n);
    t->n_vocab = t->n_pieces = t->cap_pieces = (uint32_t)kv->n;
    t->pieces = mem_array(t->n_vocab, sizeof *t->pieces);
    t->whole = arena_alloc(&t->arena, t->n_vocab);
    if (!t->pieces || !t->whole || piece_map_init(&t->words, t->n_vocab))
        return err_set(e, ERR_MEMORY, "no memory for a vocabulary of %u tokens", t->n_vocab);
    size_t n_bytes = 0;
    for (uint32_t id = 0; id < t->n_vocab; id++) {
        if (kv->strings[id].n > UINT32_MAX || add_over(n_bytes, kv->strings[id].n, &n_bytes))
            return err_set(e, ERR_LIMIT, "%s: token %u is too long", key, id);
    }
    char *bytes = arena_alloc(&t->arena, n_bytes);
    if (!bytes)
        return err_set(e, ERR_MEMORY, "no memory for a vocabulary of %zu bytes", n_bytes);
    for (uint32_t id = 0; id < t->n_vocab; id++) {
        const struct gguf_str *s = &kv->strings[id];
        if (s->n)
            memcpy(bytes, s->p, s->n);
        t->pieces[id] = (struct piece){bytes, (uint32_t)s->n};
        bytes += s->n;
    }
    return 0;
}

static int types_load(struct tokenizer *t, const struct gguf *g, struct err *e)
{
    const char *key = "tokenizer.ggml.token_type";
    const struct gguf_kv *kv = gguf_find(g, key);
    t->types = arena_alloc(&t->arena, t->n_vocab);
    if (!t->types)
        return err_set(e, ERR_MEMORY, "no memory for a vocabulary of %u tokens", t->n_vocab);
    memset(t->types, TOKEN_NORMAL, t->n_vocab);
    if (!kv)
        return 0;
    if (kv->type != GGUF_ARRAY || (kv->elem_type != GGUF_I32 && kv->elem_type != GGUF_U32))
        return err_set(e, ERR_CORRUPT, "%s is not an array of int32", key);
    if (kv->n != t->n_vocab)
        return err_set(e, ERR_CORRUPT, "%s has %llu entries for %u tokens", key,
                       (unsigned long long)kv->n, t->n_vocab);
    for (uint32_t id = 0; id < t->n_vocab; id++) {
        int64_t v = gguf_kv_int(kv, id);
        if (v < 0 || v >= TOKEN_TYPE_END)
            return err_set(e, ERR_CORRUPT, "%s: token %u has the unknown type %lld", key, id,
                           (long long)v);
        t->types[id] = (uint8_t)v;
    }
    return 0;
}

static int suppress_load(struct tokenizer *t, const struct gguf *g, struct err *e)
{
    const char *key = "tokenizer.ggml.suppress_tokens";
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv)
        return 0;
    if (kv->type != GGUF_ARRAY || (kv->elem_type != GGUF_I32 && kv->elem_type != GGUF_U32))
        return err_set(e, ERR_CORRUPT, "%s is not an array of int32", key);
    int32_t *ids = arena_alloc(&t->arena, (size_t)kv->n * sizeof *ids);
    if (!ids)
        return err_set(e, ERR_MEMORY, "no memory for %s", key);
    for (uint64_t i = 0; i < kv->n; i++) {
        int64_t v = gguf_kv_int(kv, i);
        if (v < 0 || v >= t->n_vocab)
            return err_set(e, ERR_CORRUPT, "%s names %lld, outside the vocabulary of %u tokens",
                           key, (long long)v, t->n_vocab);
        ids[i] = (int32_t)v;
    }
    t->suppress = ids;
    t->n_suppress = (size_t)kv->n;
    return 0;
}

int tokenizer_new(struct tokenizer **out, const struct gguf *g, struct err *e)
{
    int rc = -1;
    struct tokenizer *t = NULL;
    const struct algorithm *a = algorithm_find(g, e);
    if (!a)
        return -1;
    if (!(t = mem_zalloc(sizeof *t)))
        return err_set(e, ERR_MEMORY, "no memory for a tokenizer");
    t->kind = a->kind;
    t->seed = now_ns() ^ (uint64_t)(uintptr_t)t;
    if (tokens_load(t, g, e) || types_load(t, g, e) || a->load(t, g, e) || specials_load(t, g, e) ||
        suppress_load(t, g, e))
        goto out;
    *out = t;
    t = NULL;
    rc = 0;
out:
    tokenizer_free(t);
    return rc;
}

void tokenizer_free(struct tokenizer *t)
{
    if (!t)
        return;
    pre_free(t->pre);
    mem_free(t->words.slots);
    mem_free(t->pairs.slots);
    mem_free(t->pieces);
    arena_fini(&t->arena);
    mem_free(t);
}

uint64_t tokenizer_bytes(const struct tokenizer *t)
{
    uint64_t n = sizeof *t + t->arena.used_bytes + t->cap_pieces * sizeof *t->pieces;
    n += ((uint64_t)t->words.mask + 1) * sizeof *t->words.slots;
    if (t->pairs.slots)
        n += (t->pairs.mask + 1) * sizeof *t->pairs.slots;
    return n + (t->pre ? pre_bytes(t->pre) : 0);
}

/* An array's items, when it is one of strings or numbers; *n_bytes: of all its strings. */
static uint64_t count_items(uint64_t *n_bytes, const struct gguf *g, const char *key)
{
    const struct gguf_kv *kv = gguf_find(g, key);
    *n_bytes = 0;
    if (!kv || kv->type != GGUF_ARRAY || kv->elem_type != GGUF_STRING)
        return 0;
    *n_bytes = kv->n_bytes - 8 * kv->n; /* each has its length in front */
    return kv->n;
}

uint64_t tokenizer_bytes_of(const struct gguf *g)
{
    uint64_t text_bytes, unused;
    uint64_t n = count_items(&text_bytes, g, "tokenizer.ggml.tokens");
    uint64_t n_merges = count_items(&unused, g, "tokenizer.ggml.merges");
    if (!n)
        return 0;
    uint64_t sum = sizeof(struct tokenizer) + text_bytes;
    sum += n * (sizeof(struct piece) + 3); /* types, ends of generation, memo */
    sum += piece_map_slots(n) * sizeof(struct piece_slot);
    if (n_merges)
        return sum + pair_map_slots(n_merges) * sizeof(struct pair_slot);
    /* SentencePiece: ranks, and texts apart from the spellings. Those of words that begin with a
     * blank, half of all as a rule, have bytes of their own. */
    return sum + n * (sizeof(uint32_t) + sizeof(struct piece)) + n / 2 * 16;
}

/* ---- encoding ---- */

int emit_bytes(struct encode *c, const char *p, size_t n)
{
    const struct tokenizer *t = c->t;
    for (size_t i = 0; i < n; i++) {
        int32_t id = t->byte_id[(unsigned char)p[i]];
        if (id >= 0 && (uint32_t)id < t->n_vocab)
            continue;
        if (t->unk < 0)
            return err_set(c->e, ERR_UNSUPPORTED,
                           "the vocabulary has no token for the byte 0x%02x, and none for the "
                           "unknown",
                           (unsigned char)p[i]);
        ids_put(c->out, t->unk);
        return 0;
    }
    for (size_t i = 0; i < n; i++)
        ids_put(c->out, t->byte_id[(unsigned char)p[i]]);
    return 0;
}

static size_t space_before(const char *p, size_t n)
{
    size_t end = n;
    while (end) {
        size_t from = end - 1;
        uint32_t cp;
        while (from && end - from < 4 && ((unsigned char)p[from] & 0xc0) == 0x80)
            from--;
        if (utf8_decode(&cp, p + from, end - from) != (int)(end - from) || !unicode_is_space(cp))
            break;
        end = from;
    }
    return n - end;
}

static size_t space_after(const char *p, size_t n)
{
    size_t at = 0;
    while (at < n) {
        uint32_t cp;
        int len = utf8_decode(&cp, p + at, n - at);
        if (len < 0 || !unicode_is_space(cp))
            break;
        at += (size_t)len;
    }
    return at;
}

/* Text and special tokens in turn. */
static int encode_text(struct encode *c, const char *p, size_t n, bool parse_special)
{
    int (*segment)(struct encode *, const char *, size_t) =
        c->t->kind == TOKENIZER_BPE ? bpe_segment : spm_segment;
    for (size_t from = 0; from < n;) {
        size_t pos = from;
        const struct special *s = special_next(&pos, c->t, p, n, parse_special);
        size_t end = s ? pos : n;
        if (s && s->lstrip)
            end -= space_before(p + from, pos - from);
        if (end > from && segment(c, p + from, end - from))
            return -1;
        if (!s)
            return 0;
        ids_put(c->out, s->id);
        from = pos + s->text.n;
        if (s->rstrip)
            from += space_after(p + from, n - from);
    }
    return 0;
}

/* Every maximal bad part becomes U+FFFD. */
static int text_repair(struct buf *out, const char *p, size_t n, struct err *e)
{
    for (size_t at = 0, good = 0; at < n;) {
        uint32_t cp;
        int len = utf8_decode(&cp, p + at, n - at);
        if (len < 0) {
            buf_put(out, p + good, at - good);
            buf_puts(out, "\xef\xbf\xbd");
            good = at + (size_t)-len;
        }
        at += (size_t)(len < 0 ? -len : len);
        if (at == n)
            buf_put(out, p + good, n - good);
    }
    return out->failed ? err_set(e, ERR_MEMORY, "no memory to tokenize %zu bytes", n) : 0;
}

/* Offsets are 32 bits wide, and text can treble when escaped. */
enum { ENCODE_MAX_BYTES = 1 << 30 };

int tokenizer_encode(struct ids *out, const struct tokenizer *t, const char *p, size_t n,
                     unsigned flags, struct err *e)
{
    size_t before = out->n;
    struct buf repaired = {0};
    struct encode c = {.t = t, .out = out, .e = e};
    int rc = -1;
    if (n > ENCODE_MAX_BYTES)
        return err_set(e, ERR_LIMIT, "a text of %zu bytes is over the limit of 1 GiB", n);
    if (t->kind == TOKENIZER_BPE && !utf8_valid(p, n)) {
        if (text_repair(&repaired, p, n, e))
            goto out;
        p = repaired.data;
        n = repaired.n;
    }
    if ((flags & TOKENIZE_ADD_SPECIAL) && t->add_bos)
        ids_put(out, t->bos);
    if (encode_text(&c, p, n, flags & TOKENIZE_PARSE_SPECIAL))
        goto out;
    if ((flags & TOKENIZE_ADD_SPECIAL) && t->add_eos)
        ids_put(out, t->eos);
    rc = out->failed ? err_set(e, ERR_MEMORY, "no memory for the token ids") : 0;
out:
    if (rc)
        out->n = before;
    buf_fini(&repaired);
    buf_fini(&c.text);
    pre_run_free(c.run);
    merge_fini(&c.work);
    return rc;
}

/* ---- questions ---- */

uint32_t tokenizer_n_vocab(const struct tokenizer *t)
{
    return t->n_vocab;
}

static bool in_vocab(const struct tokenizer *t, int32_t id)
{
    return id >= 0 && (uint32_t)id < t->n_vocab;
}

const char *tokenizer_piece(const struct tokenizer *t, int32_t id, size_t *n)
{
    const struct piece *texts = t->texts ? t->texts : t->pieces;
    if (!in_vocab(t, id)) {
        *n = 0;
        return "";
    }
    *n = texts[id].n;
    return texts[id].p;
}

bool tokenizer_is_control(const struct tokenizer *t, int32_t id)
{
    return in_vocab(t, id) && t->types[id] == TOKEN_CONTROL;
}

bool tokenizer_is_eog(const struct tokenizer *t, int32_t id)
{
    return in_vocab(t, id) && t->eog[id];
}

int32_t tokenizer_bos(const struct tokenizer *t)
{
    return t->bos;
}

int32_t tokenizer_eos(const struct tokenizer *t)
{
    return t->eos;
}

const int32_t *tokenizer_suppressed(const struct tokenizer *t, size_t *n)
{
    *n = t->n_suppress;
    return t->suppress;
}

int32_t tokenizer_find(const struct tokenizer *t, const char *piece, size_t n)
{
    int32_t id = special_find(t, piece, n);
    if (id < 0)
        id = t->kind == TOKENIZER_SPM ? spm_find(t, piece, n) : piece_find(t, piece, n);
    return in_vocab(t, id) ? id : -1;
}

void tokenizer_decode(struct buf *out, const struct tokenizer *t, const int32_t *ids, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        size_t len;
        const char *p = tokenizer_piece(t, ids[i], &len);
        buf_put(out, p, len);
    }
}
