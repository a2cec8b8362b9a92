/* Byte-level BPE ("gpt2"): loading the vocabulary and merges, and tokenizing one segment of valid
 * UTF-8. In the file a byte is spelled by a printable character (GPT-2's table); here pieces are
 * the bytes themselves and merges are pairs of ids. A merge that goes through a string that is no
 * token gets an id beyond the vocabulary, which is taken apart into bytes if it remains at the end.
 * Refuses merges that are no pair. Memory is the tokenizer's. */
#include "text/text_internal.h"

#include <string.h>

enum { ALPHABET_END = 256 + 68 };

/* GPT-2's bytes_to_unicode: printable bytes stand for themselves, the other 68, in order, for
 * U+0100 and up. Byte of a code point, or -1. */
static void alphabet_fill(int16_t byte_of[ALPHABET_END])
{
    int next = 256;
    memset(byte_of, -1, ALPHABET_END * sizeof *byte_of);
    for (int b = 0; b < 256; b++) {
        bool printable = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
        byte_of[printable ? b : next++] = (int16_t)b;
    }
}

/* Spelling to bytes, into dst (room for n). False when a character is not in the alphabet; the
 * spelling itself is then the result. */
static bool spelling_decode(char *dst, size_t *n_dst, const int16_t *byte_of, const char *p,
                            size_t n)
{
    size_t k = 0;
    for (size_t i = 0; i < n;) {
        uint32_t cp = 0;
        int len = (unsigned char)p[i] < 0x80 ? 1 : utf8_decode(&cp, p + i, n - i);
        if (len == 1)
            cp = (unsigned char)p[i];
        if (len < 0 || cp >= ALPHABET_END || byte_of[cp] < 0) {
            memcpy(dst, p, n);
            *n_dst = n;
            return false;
        }
        dst[k++] = (char)byte_of[cp];
        i += (size_t)len;
    }
    *n_dst = k;
    return true;
}

/* Pieces hold the file's spellings; turn those of ordinary tokens into bytes and enter all that
 * text can become. User-defined and unused ones come last: where an ordinary token has the same
 * bytes, it is the one meant. */
static int pieces_load(struct tokenizer *t, const int16_t *byte_of, struct err *e)
{
    for (uint32_t id = 0; id < t->n_vocab; id++) {
        uint8_t type = t->types[id];
        if (type != TOKEN_NORMAL && type != TOKEN_UNDEFINED && type != TOKEN_BYTE)
            continue;
        size_t n;
        /* The arena's copy is ours to change. */
        char *dst = (char *)t->pieces[id].p;
        char spelling[64], *from = spelling;
        size_t n_from = t->pieces[id].n;
        if (n_from > sizeof spelling && !(from = mem_alloc(n_from)))
            return err_set(e, ERR_MEMORY, "no memory for the vocabulary");
        memcpy(from, dst, n_from);
        bool good = spelling_decode(dst, &n, byte_of, from, n_from);
        if (from != spelling)
            mem_free(from);
        t->pieces[id].n = (uint32_t)n;
        if (good && piece_put(t, (int32_t)id))
            return err_set(e, ERR_MEMORY, "no memory for the vocabulary");
    }
    for (uint32_t id = 0; id < t->n_vocab; id++)
        if ((t->types[id] == TOKEN_USER || t->types[id] == TOKEN_UNUSED) &&
            piece_put(t, (int32_t)id))
            return err_set(e, ERR_MEMORY, "no memory for the vocabulary");
    return 0;
}

static int32_t piece_intern(struct tokenizer *t, const char *p, size_t n)
{
    int32_t id = piece_find(t, p, n);
    return id >= 0 ? id : piece_add(t, p, n);
}

/* The list is long and every entry looks up three strings all over the memory. So entries are taken
 * in blocks, and what a block will touch is asked for before it is needed. */
enum { MERGE_BLOCK = 32 };

struct merge_block {
    const int16_t *byte_of;
    char *bytes; /* of all entries of the block, room for the longest block */
    uint32_t first, n;
    struct merge_entry {
        const char *p; /* left and right, one after the other */
        size_t n_left, n_right;
    } entries[MERGE_BLOCK];
    struct pair_slot pairs[MERGE_BLOCK];
};

/* Entries are "left right" in the file's spelling. */
static int block_read(struct merge_block *b, const struct gguf_str *strings, struct err *e)
{
    char *at = b->bytes;
    for (uint32_t i = 0; i < b->n; i++) {
        const struct gguf_str *s = &strings[b->first + i];
        struct merge_entry *m = &b->entries[i];
        const char *gap = s->n > 2 ? memchr(s->p + 1, ' ', s->n - 2) : NULL;
        if (!gap)
            return err_set(e, ERR_CORRUPT, "tokenizer.ggml.merges: entry %u is not two pieces",
                           b->first + i);
        m->p = at;
        spelling_decode(at, &m->n_left, b->byte_of, s->p, (size_t)(gap - s->p));
        at += m->n_left;
        spelling_decode(at, &m->n_right, b->byte_of, gap + 1, s->n - (size_t)(gap + 1 - s->p));
        at += m->n_right;
    }
    return 0;
}

static void block_warm(const struct tokenizer *t, const struct merge_block *b)
{
    struct piece_warm warm[MERGE_BLOCK * 3];
    for (uint32_t i = 0; i < b->n; i++) {
        const struct merge_entry *m = &b->entries[i];
        warm[3 * i] = piece_warm_slot(t, m->p, m->n_left);
        warm[3 * i + 1] = piece_warm_slot(t, m->p + m->n_left, m->n_right);
        warm[3 * i + 2] = piece_warm_slot(t, m->p, m->n_left + m->n_right);
    }
    for (uint32_t i = 0; i < 3 * b->n; i++)
        piece_warm_entry(t, &warm[i]);
    for (uint32_t i = 0; i < 3 * b->n; i++)
        piece_warm_bytes(t, &warm[i]);
}

static int block_load(struct tokenizer *t, struct merge_block *b, struct err *e)
{
    block_warm(t, b);
    for (uint32_t i = 0; i < b->n; i++) {
        const struct merge_entry *m = &b->entries[i];
        int32_t left = piece_intern(t, m->p, m->n_left);
        int32_t right = left < 0 ? -1 : piece_intern(t, m->p + m->n_left, m->n_right);
        int32_t to = right < 0 ? -1 : piece_intern(t, m->p, m->n_left + m->n_right);
        if (to < 0)
            return err_set(e, ERR_MEMORY, "no memory for the merges");
        b->pairs[i] = (struct pair_slot){left + 1, right, b->first + i, to};
        pair_warm(t, left, right);
    }
    for (uint32_t i = 0; i < b->n; i++)
        pair_put(t, &b->pairs[i]);
    return 0;
}

static size_t longest_block(const struct gguf_kv *kv)
{
    size_t longest = 0;
    for (uint64_t i = 0; i < kv->n; i += MERGE_BLOCK) {
        size_t n_bytes = 0; /* cannot overflow: the strings lie in one file, apart */
        for (uint64_t k = i; k < MIN(i + MERGE_BLOCK, kv->n); k++)
            n_bytes += kv->strings[k].n;
        longest = MAX(longest, n_bytes);
    }
    return longest;
}

static int merges_load(struct tokenizer *t, const int16_t *byte_of, const struct gguf *g,
                       struct err *e)
{
    const char *key = "tokenizer.ggml.merges";
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv)
        return err_set(e, ERR_CORRUPT, "%s is missing: byte-level BPE needs its merges", key);
    if (kv->type != GGUF_ARRAY || kv->elem_type != GGUF_STRING)
        return err_set(e, ERR_CORRUPT, "%s is not an array of strings", key);
    if (kv->n > INT32_MAX)
        return err_set(e, ERR_LIMIT, "%s has %llu entries, at most %d are supported", key,
                       (unsigned long long)kv->n, INT32_MAX);
    struct merge_block b = {.byte_of = byte_of, .bytes = mem_alloc(longest_block(kv))};
    int rc = 0;
    if (!b.bytes || pair_map_init(t, kv->n))
        rc = err_set(e, ERR_MEMORY, "no memory for the merges");
    for (uint64_t i = 0; !rc && i < kv->n; i += MERGE_BLOCK) {
        b.first = (uint32_t)i;
        b.n = (uint32_t)MIN(kv->n - i, (uint64_t)MERGE_BLOCK);
        rc = block_read(&b, kv->strings, e) || block_load(t, &b, e) ? -1 : 0;
    }
    mem_free(b.bytes);
    return rc;
}

static int rule_load(struct tokenizer *t, const struct gguf *g, struct err *e)
{
    struct gguf_str name = {"default", 7};
    if (gguf_get_str(g, "tokenizer.ggml.pre", &name, e))
        return -1;
    if (!gguf_find(g, "tokenizer.ggml.pre"))
        log_line(LOG_WARN, "the file has no tokenizer.ggml.pre: text is split by the default "
                           "rule, which may not be the model's");
    const struct pre_rule *rule = pre_find(name.p, name.n);
    if (!rule)
        return err_set(e, ERR_UNSUPPORTED, "tokenizer.ggml.pre: unknown split rule '%.*s'",
                       (int)MIN(name.n, (size_t)60), name.p);
    t->whole_first = rule->flags & PRE_WHOLE_FIRST;
    t->nfc = rule->flags & PRE_NFC;
    t->add_bos = rule->flags & PRE_ADD_BOS;
    return pre_new(&t->pre, rule, e);
}

int bpe_load(struct tokenizer *t, const struct gguf *g, struct err *e)
{
    int16_t byte_of[ALPHABET_END];
    alphabet_fill(byte_of);
    if (rule_load(t, g, e) || pieces_load(t, byte_of, e))
        return -1;
    for (int b = 0; b < 256; b++) {
        char c = (char)b;
        t->byte_id[b] = piece_intern(t, &c, 1);
        if (t->byte_id[b] < 0)
            return err_set(e, ERR_MEMORY, "no memory for the vocabulary");
    }
    return merges_load(t, byte_of, g, e);
}

/* ---- one segment ---- */

static int bpe_emit(struct encode *c, int32_t id)
{
    const struct piece *q = &c->t->pieces[id];
    if ((uint32_t)id < c->t->n_vocab) {
        ids_put(c->out, id);
        return 0;
    }
    for (uint32_t i = 0; i < q->n; i++)
        if (emit_bytes(c, q->p + i, 1))
            return -1;
    return 0;
}

static int bpe_word(void *user, const char *p, size_t n)
{
    struct encode *c = user;
    const struct tokenizer *t = c->t;
    int32_t id = piece_find(t, p, n);
    bool is_token = id >= 0 && (uint32_t)id < t->n_vocab && t->types[id] == TOKEN_NORMAL;
    uint8_t whole = !is_token        ? WHOLE_NO
                    : t->whole_first ? WHOLE_YES
                                     : atomic_load_explicit(&t->whole[id], memory_order_relaxed);
    if (whole == WHOLE_YES)
        return bpe_emit(c, id);
    if (merge_begin(c, (uint32_t)n))
        return -1;
    for (uint32_t i = 0; i < n; i++) {
        c->work.syms[i].off = i;
        c->work.syms[i].id = t->byte_id[(unsigned char)p[i]];
    }
    if (merge_run(c, p, (uint32_t)n))
        return -1;
    if (is_token && whole == WHOLE_UNKNOWN)
        atomic_store_explicit(&t->whole[id],
                              c->work.n == 1 && c->work.syms[0].id == id ? WHOLE_YES : WHOLE_NO,
                              memory_order_relaxed);
    for (uint32_t i = 0; i < c->work.n; i++)
        if (bpe_emit(c, c->work.syms[i].id))
            return -1;
    return 0;
}

int bpe_segment(struct encode *c, const char *p, size_t n)
{
    if (!c->run && pre_run_new(&c->run, c->t->pre, bpe_word, c, c->e))
        return -1;
    if (c->t->nfc && !nfc_is_trivial(p, n)) {
        if (nfc_normalize(&c->text, p, n, c->e))
            return -1;
        p = c->text.data;
        n = c->text.n;
    }
    return pre_run_split(c->run, p, n);
}
