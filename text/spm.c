/* SentencePiece BPE ("llama"): text with U+2581 for blanks, merged by score, characters that are no
 * piece falling back to byte tokens. Refuses vocabularies without scores and byte tokens that are
 * not "<0xHH>". Memory is the tokenizer's; a call's escaped text is the call's. */
#include "text/text_internal.h"

#include <math.h>
#include <string.h>

static const char blank[] = "\xe2\x96\x81"; /* U+2581 */
enum { BLANK_BYTES = 3 };

static bool is_blank(const char *p, size_t n)
{
    return n >= BLANK_BYTES && !memcmp(p, blank, BLANK_BYTES);
}

/* A score as an integer that sorts the other way round: the best score is the lowest rank. */
static uint32_t rank_of_score(float score)
{
    uint32_t bits;
    if (isnan(score))
        return UINT32_MAX - 1; /* last of all, but mergeable */
    score += 0.0f;             /* -0 and 0 are equal */
    memcpy(&bits, &score, sizeof bits);
    uint32_t ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
    return MIN(~ascending, UINT32_MAX - 1);
}

static int scores_load(struct tokenizer *t, const struct gguf *g, struct err *e)
{
    const char *key = "tokenizer.ggml.scores";
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv)
        return err_set(e, ERR_CORRUPT, "%s is missing: SentencePiece merges by score", key);
    if (kv->type != GGUF_ARRAY || (kv->elem_type != GGUF_FLOAT32 && kv->elem_type != GGUF_I32))
        return err_set(e, ERR_CORRUPT, "%s is not an array of float32", key);
    if (kv->n != t->n_vocab)
        return err_set(e, ERR_CORRUPT, "%s has %llu entries for %u tokens", key,
                       (unsigned long long)kv->n, t->n_vocab);
    t->ranks = arena_alloc(&t->arena, (size_t)t->n_vocab * sizeof *t->ranks);
    if (!t->ranks)
        return err_set(e, ERR_MEMORY, "no memory for the scores");
    for (uint32_t id = 0; id < t->n_vocab; id++)
        t->ranks[id] = rank_of_score((float)gguf_kv_number(kv, id));
    return 0;
}

/* "<0xHH>" becomes the byte it stands for. */
static int byte_load(struct tokenizer *t, uint32_t id, struct err *e)
{
    struct piece *q = &t->pieces[id];
    uint8_t b;
    if (q->n != 6 || memcmp(q->p, "<0x", 3) || q->p[5] != '>' ||
        hex_decode(&b, 1, q->p + 3, 2) != 1)
        return err_set(e, ERR_CORRUPT, "tokenizer.ggml.tokens: byte token %u is not spelled <0xHH>",
                       id);
    *(char *)q->p = (char)b; /* the arena's copy is ours to change */
    q->n = 1;
    if (t->byte_id[b] < 0)
        t->byte_id[b] = (int32_t)id;
    return 0;
}

/* Does the piece go on after the start of a word: any character, then a blank? */
static bool spans_words(const struct piece *q)
{
    bool inside = false;
    for (uint32_t i = 0; i < q->n;) {
        bool here = is_blank(q->p + i, q->n - i);
        if (inside && here)
            return true;
        inside |= !here;
        i += here ? BLANK_BYTES : 1;
    }
    return false;
}

/* The look-up is by the spelling in the file; the text of an ordinary token has blanks for U+2581.
 */
static int text_unescape(struct tokenizer *t, uint32_t id)
{
    struct piece q = t->pieces[id];
    char *dst = NULL;
    uint32_t n = 0;
    for (uint32_t i = 0; i < q.n;) {
        bool here = is_blank(q.p + i, q.n - i);
        if (here && !dst) {
            if (!(dst = arena_strdup(&t->arena, q.p, q.n)))
                return -1;
        }
        if (dst)
            dst[n] = here ? ' ' : q.p[i];
        n++;
        i += here ? BLANK_BYTES : 1;
    }
    t->texts[id] = (struct piece){dst ? dst : q.p, n};
    return 0;
}

static int texts_load(struct tokenizer *t)
{
    t->texts = arena_alloc(&t->arena, (size_t)t->n_vocab * sizeof *t->texts);
    if (!t->texts)
        return -1;
    for (uint32_t id = 0; id < t->n_vocab; id++) {
        uint8_t type = t->types[id];
        t->texts[id] = t->pieces[id];
        if ((type == TOKEN_NORMAL || type == TOKEN_UNDEFINED || type == TOKEN_UNUSED) &&
            text_unescape(t, id))
            return -1;
    }
    return 0;
}

int spm_load(struct tokenizer *t, const struct gguf *g, struct err *e)
{
    t->space_prefix = true;
    t->add_bos = true;
    t->word_bounded = true;
    memset(t->byte_id, -1, sizeof t->byte_id);
    if (gguf_get_bool(g, "tokenizer.ggml.add_space_prefix", &t->space_prefix, e) ||
        scores_load(t, g, e))
        return -1;
    for (uint32_t id = 0; id < t->n_vocab; id++) {
        uint8_t type = t->types[id];
        if (type == TOKEN_BYTE && byte_load(t, id, e))
            return -1;
        if (type == TOKEN_BYTE || type == TOKEN_CONTROL || type == TOKEN_UNKNOWN)
            continue;
        t->has_unused |= type == TOKEN_UNUSED;
        t->word_bounded &= !spans_words(&t->pieces[id]);
        if (piece_put(t, (int32_t)id))
            return err_set(e, ERR_MEMORY, "no memory for the vocabulary");
    }
    if (texts_load(t))
        return err_set(e, ERR_MEMORY, "no memory for the vocabulary");
    return 0;
}

int32_t spm_find(const struct tokenizer *t, const char *p, size_t n)
{
    struct buf spelling = {0};
    for (size_t i = 0; i < n; i++) {
        if (p[i] == ' ')
            buf_put(&spelling, blank, BLANK_BYTES);
        else
            buf_putc(&spelling, p[i]);
    }
    int32_t id = spelling.failed ? -1 : piece_find(t, buf_str(&spelling), spelling.n);
    if (id < 0 && n == 1)
        id = t->byte_id[(unsigned char)p[0]];
    buf_fini(&spelling);
    return id;
}

/* ---- one segment ---- */

static int span_push(struct encode *c, uint32_t *n, struct span span)
{
    struct merge_work *w = &c->work;
    if (*n == w->cap_spans) {
        size_t cap = (size_t)w->cap_spans * 2 + 64;
        struct span *v = mem_realloc(w->spans, cap * sizeof *v);
        if (!v)
            return err_set(c->e, ERR_MEMORY, "no memory to tokenize");
        w->spans = v;
        w->cap_spans = (uint32_t)cap;
    }
    w->spans[(*n)++] = span;
    return 0;
}

/* One symbol's ids. An unused piece only served to be merged further: where it remains it goes back
 * into the two that made it, and so on (as the reference library does). */
static int symbol_emit(struct encode *c, const char *p, struct span span)
{
    const struct tokenizer *t = c->t;
    uint32_t n_spans = 0;
    for (;;) {
        int32_t id = piece_find(t, p + span.off, span.n);
        uint32_t left = id >= 0 && t->types[id] == TOKEN_UNUSED && c->work.left_bytes
                            ? c->work.left_bytes[id]
                            : 0;
        if (left) {
            if (span_push(c, &n_spans, (struct span){span.off + left, span.n - left}))
                return -1;
            span.n = left;
            continue;
        }
        if (id >= 0 && t->types[id] != TOKEN_UNUSED)
            ids_put(c->out, id);
        else if (emit_bytes(c, p + span.off, span.n))
            return -1;
        if (!n_spans)
            return 0;
        span = c->work.spans[--n_spans];
    }
}

static int spm_symbols(struct encode *c, const char *p, uint32_t n)
{
    /* A byte is at most a symbol. */
    if (merge_begin(c, n))
        return -1;
    uint32_t k = 0;
    for (uint32_t i = 0; i < n; k++) {
        uint32_t cp;
        int len = utf8_decode(&cp, p + i, n - i);
        c->work.syms[k] = (struct symbol){.off = i, .id = -1};
        i += len > 0 ? (uint32_t)len : 1; /* bad bytes stand alone */
    }
    c->work.n = k;
    return merge_run(c, p, n);
}

static int spm_word(struct encode *c, const char *p, uint32_t n)
{
    const struct tokenizer *t = c->t;
    int32_t id = piece_find(t, p, n);
    bool is_token = id >= 0 && t->types[id] == TOKEN_NORMAL;
    uint8_t whole = is_token ? atomic_load_explicit(&t->whole[id], memory_order_relaxed) : WHOLE_NO;
    if (whole == WHOLE_YES) {
        ids_put(c->out, id);
        return 0;
    }
    if (spm_symbols(c, p, n))
        return -1;
    if (is_token && whole == WHOLE_UNKNOWN)
        atomic_store_explicit(&t->whole[id], c->work.n == 1 ? WHOLE_YES : WHOLE_NO,
                              memory_order_relaxed);
    for (uint32_t i = 0; i < c->work.n; i++) {
        const struct symbol *s = &c->work.syms[i];
        uint32_t end = i + 1 < c->work.n ? s[1].off : n;
        if (s->id >= 0 && t->types[s->id] != TOKEN_UNUSED)
            ids_put(c->out, s->id);
        else if (symbol_emit(c, p, (struct span){s->off, end - s->off}))
            return -1;
    }
    return 0;
}

static int text_escape(struct encode *c, const char *p, size_t n)
{
    buf_clear(&c->text);
    if (c->t->space_prefix)
        buf_put(&c->text, blank, BLANK_BYTES);
    for (size_t from = 0; from < n;) {
        const char *gap = memchr(p + from, ' ', n - from);
        size_t to = gap ? (size_t)(gap - p) : n;
        buf_put(&c->text, p + from, to - from);
        if (gap)
            buf_put(&c->text, blank, BLANK_BYTES);
        from = to + 1;
    }
    return c->text.failed ? err_set(c->e, ERR_MEMORY, "no memory to tokenize %zu bytes", n) : 0;
}

int spm_segment(struct encode *c, const char *p, size_t n)
{
    if (text_escape(c, p, n))
        return -1;
    const char *s = c->text.data;
    size_t from = 0;
    bool inside = false; /* past the blanks that start a word */
    n = c->text.n;
    for (size_t i = 0; c->t->word_bounded && i < n;) {
        bool here = is_blank(s + i, n - i);
        if (here && inside) {
            if (spm_word(c, s + from, (uint32_t)(i - from)))
                return -1;
            from = i;
        }
        inside = !here;
        i += here ? BLANK_BYTES : 1;
    }
    return from < n ? spm_word(c, s + from, (uint32_t)(n - from)) : 0;
}
