/* Tokens that are looked for in the text by their spelling (control and user-defined ones), the
 * special ids among the keys, and which tokens end a generation. Refuses ids outside the vocabulary
 * by the name of their key. Memory is the tokenizer's arena. */
#include "text/text_internal.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* Keeps the search linear in the text whatever the vocabulary says. */
enum { SPECIAL_MAX_BYTES = 1024 };

static int piece_cmp(const struct piece *a, const struct piece *b)
{
    int d = memcmp(a->p, b->p, MIN(a->n, b->n));
    return d ? d : (a->n > b->n) - (a->n < b->n);
}

static int special_cmp(const void *a, const void *b)
{
    const struct special *x = a, *y = b;
    int d = piece_cmp(&x->text, &y->text);
    return d ? d : (x->id > y->id) - (x->id < y->id);
}

static bool is_special(const struct tokenizer *t, uint32_t id)
{
    return t->types[id] == TOKEN_CONTROL || t->types[id] == TOKEN_USER ||
           t->types[id] == TOKEN_UNKNOWN;
}

static bool piece_is(const struct piece *q, const char *s)
{
    return q->n == strlen(s) && !memcmp(q->p, s, q->n);
}

/* Does the lower-cased value of the key contain one of the words? */
static bool key_mentions(const struct gguf *g, const char *key, const char *const words[2])
{
    struct gguf_str v = {0};
    char low[128];
    size_t n = 0;
    if (gguf_get_str(g, key, &v, NULL))
        return false;
    for (; n < v.n && n < sizeof low - 1; n++)
        low[n] = (char)tolower((unsigned char)v.p[n]);
    low[n] = 0;
    return strstr(low, words[0]) || strstr(low, words[1]);
}

/* A GGUF does not say which tokens swallow the white space beside them; these models' tokenizer
 * files do: Phi-3 (rstrip on all added tokens but three), Jina v2 and ModernBERT (lstrip on the
 * mask). */
static void strip_flags_set(struct tokenizer *t, const struct gguf *g)
{
    static const char *const phi[2] = {"phi-3", "phi3"};
    static const char *const jina[2] = {"jina-v2-de", "jina-v2-es"};
    static const char *const code[2] = {"jina-v2-code", "modern-bert"};
    bool is_phi = key_mentions(g, "general.name", phi);
    bool has_mask =
        key_mentions(g, "tokenizer.ggml.pre", jina) || key_mentions(g, "tokenizer.ggml.pre", code);
    for (uint32_t i = 0; i < t->specials.n; i++) {
        struct special *s = &t->specials.items[i];
        s->rstrip = is_phi && !piece_is(&s->text, "<unk>") && !piece_is(&s->text, "<s>") &&
                    !piece_is(&s->text, "<|endoftext|>");
        s->lstrip = has_mask && (piece_is(&s->text, "<mask>") || piece_is(&s->text, "[MASK]"));
    }
}

static int special_add(struct tokenizer *t, uint32_t id, struct err *e)
{
    if (t->pieces[id].n > SPECIAL_MAX_BYTES)
        return err_set(e, ERR_LIMIT,
                       "tokenizer.ggml.tokens: special token %u has %u bytes, at most %d are "
                       "supported",
                       id, t->pieces[id].n, SPECIAL_MAX_BYTES);
    t->specials.items[t->specials.n++] = (struct special){.text = t->pieces[id], .id = (int32_t)id};
    return 0;
}

static void special_set_index(struct tokenizer *t)
{
    struct special_set *set = &t->specials;
    qsort(set->items, set->n, sizeof *set->items, special_cmp);
    for (uint32_t i = 0; i < set->n; i++) {
        struct special *s = &set->items[i];
        unsigned char first = (unsigned char)s->text.p[0];
        s->control = t->types[s->id] != TOKEN_USER;
        set->starts[1][first] = true;
        set->starts[0][first] |= !s->control;
        set->first[first + 1] = i + 1;
    }
    for (unsigned b = 0; b < 256; b++)
        set->first[b + 1] = MAX(set->first[b + 1], set->first[b]);
}

/* First item in [lo, hi) whose byte `at` is >= b; all of them agree on the bytes before. */
static uint32_t lower_bound(const struct special_set *set, uint32_t lo, uint32_t hi, uint32_t at,
                            unsigned b)
{
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        const struct piece *q = &set->items[mid].text;
        if (q->n <= at || (unsigned char)q->p[at] < b)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* The longest one that starts at p: narrow the sorted list byte by byte. */
static const struct special *special_at(const struct special_set *set, const char *p, size_t n,
                                        bool parse_special)
{
    const struct special *found = NULL;
    uint32_t lo = set->first[(unsigned char)p[0]], hi = set->first[(unsigned char)p[0] + 1];
    for (uint32_t at = 1; lo < hi; at++) {
        for (; lo < hi && set->items[lo].text.n == at; lo++)
            if ((parse_special || !set->items[lo].control) && (!found || found->text.n < at))
                found = &set->items[lo];
        if (at >= n)
            break;
        unsigned b = (unsigned char)p[at];
        lo = lower_bound(set, lo, hi, at, b);
        hi = lower_bound(set, lo, hi, at, b + 1);
    }
    return found;
}

const struct special *special_next(size_t *pos, const struct tokenizer *t, const char *p, size_t n,
                                   bool parse_special)
{
    const struct special_set *set = &t->specials;
    const bool *starts = set->starts[parse_special];
    for (size_t i = *pos; i < n; i++) {
        if (!starts[(unsigned char)p[i]])
            continue;
        const struct special *s = special_at(set, p + i, n - i, parse_special);
        if (s) {
            *pos = i;
            return s;
        }
    }
    return NULL;
}

int32_t special_find(const struct tokenizer *t, const char *p, size_t n)
{
    const struct special *s = n ? special_at(&t->specials, p, n, true) : NULL;
    return s && s->text.n == n ? s->id : -1;
}

/* ---- special ids ---- */

/* An id key: absent (or -1 as some writers spell "none") leaves *id; outside the vocabulary is an
 * error. */
static int id_load(int32_t *id, const struct tokenizer *t, const struct gguf *g, const char *key,
                   struct err *e)
{
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv)
        return 0;
    if (kv->type == GGUF_ARRAY || kv->type == GGUF_STRING || kv->type == GGUF_FLOAT32 ||
        kv->type == GGUF_FLOAT64)
        return err_set(e, ERR_CORRUPT, "%s is not an integer", key);
    int64_t v = gguf_kv_int(kv, 0);
    if (v == -1 || v == UINT32_MAX) {
        *id = -1;
        return 0;
    }
    if (v < 0 || v >= t->n_vocab)
        return err_set(e, ERR_CORRUPT, "%s is %lld, outside the vocabulary of %u tokens", key,
                       (long long)v, t->n_vocab);
    *id = (int32_t)v;
    return 0;
}

static int flag_load(bool *flag, int32_t id, const struct gguf *g, const char *key, struct err *e)
{
    bool present = gguf_find(g, key);
    if (gguf_get_bool(g, key, flag, e))
        return -1;
    if (*flag && id < 0 && present)
        return err_set(e, ERR_CORRUPT, "%s is true but the file names no such token", key);
    *flag = *flag && id >= 0;
    return 0;
}

static int special_ids_load(struct tokenizer *t, const struct gguf *g, struct err *e)
{
    bool spm = t->kind == TOKENIZER_SPM;
    /* SentencePiece's own numbering where the file is silent. */
    t->unk = spm && t->types[0] == TOKEN_UNKNOWN ? 0 : -1;
    t->bos = spm && t->n_vocab > 1 && t->types[1] == TOKEN_CONTROL ? 1 : -1;
    t->eos = spm && t->n_vocab > 2 && t->types[2] == TOKEN_CONTROL ? 2 : -1;
    if (id_load(&t->bos, t, g, "tokenizer.ggml.bos_token_id", e) ||
        id_load(&t->eos, t, g, "tokenizer.ggml.eos_token_id", e) ||
        id_load(&t->unk, t, g, "tokenizer.ggml.unknown_token_id", e) ||
        flag_load(&t->add_bos, t->bos, g, "tokenizer.ggml.add_bos_token", e) ||
        flag_load(&t->add_eos, t->eos, g, "tokenizer.ggml.add_eos_token", e))
        return -1;
    return 0;
}

/* ---- ends of generation ---- */

static const char *const eog_keys[] = {
    "tokenizer.ggml.eos_token_id",     "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",     "tokenizer.ggml.fim_pad_token_id",
    "tokenizer.ggml.fim_rep_token_id", "tokenizer.ggml.fim_sep_token_id",
};

/* Spellings that models use to end a turn, an answer or a file. `sure`: no ordinary piece of text
 * looks like that, so a file that marks the token as normal is mistaken. */
static const struct eog_word {
    const char *text;
    bool sure;
} eog_words[] = {
    {"<|eot_id|>", true},
    {"<|im_end|>", true},
    {"<|end|>", true},
    {"<|return|>", true},
    {"<|call|>", true},
    {"<|calls|>", true},
    {"<|flush|>", true},
    {"<|eom_id|>", true},
    {"<|endoftext|>", true},
    {"<|end_of_text|>", true},
    {"<|EOT|>", true},
    {"<|END_OF_TURN_TOKEN|>", true},
    {"<|fim_pad|>", true},
    {"<|repo_name|>", true},
    {"<|file_sep|>", true},
    {"<|tool_response>", true},
    {"<end_of_turn>", true},
    {"<end_of_utterance>", true},
    {"<turn|>", true},
    {"<\xef\xbd\x9c"
     "end\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c>",
     true},
    {"</s>", false},
    {"<eos>", false},
    {"<EOT>", false},
    {"_<EOT>", false},
    {"[EOT]", false},
    {"[EOS]", false},
    {"[e~[", false},
};

/* While the set is being built it is not sorted yet. */
static int32_t special_by_name(const struct tokenizer *t, const char *s)
{
    for (uint32_t i = 0; i < t->specials.n; i++)
        if (piece_is(&t->specials.items[i].text, s))
            return t->specials.items[i].id;
    return -1;
}

/* In the harmony format and its kin <|end|> only closes one message of several. */
static void eog_message_end_clear(struct tokenizer *t)
{
    int32_t end = special_by_name(t, "<|end|>");
    bool has_call = special_by_name(t, "<|call|>") >= 0 || special_by_name(t, "<|calls|>") >= 0;
    bool has_return = special_by_name(t, "<|return|>") >= 0 || special_by_name(t, "<|flush|>") >= 0;
    bool harmony = special_by_name(t, "<|start|>") >= 0 && special_by_name(t, "<|channel|>") >= 0;
    if (end >= 0 && end != t->eos && has_return && (has_call || harmony))
        t->eog[end] = false;
    /* Gemma 4 ends by its own words; </s> is an HTML tag there. */
    int32_t s = special_by_name(t, "</s>");
    if (s >= 0 && s != t->eos && special_by_name(t, "<|tool_response>") >= 0)
        t->eog[s] = false;
}

/* Mark the spelled ends; one that the file calls user-defined or normal becomes a control token, so
 * that a user's text cannot end a turn. */
static int eog_words_mark(struct tokenizer *t, struct err *e)
{
    for (size_t w = 0; w < ARRAY_LEN(eog_words); w++) {
        const char *s = eog_words[w].text;
        int32_t id = special_by_name(t, s);
        if (id < 0 && eog_words[w].sure) {
            id = piece_find(t, s, strlen(s));
            if (id < 0 || t->types[id] != TOKEN_NORMAL)
                continue;
            if (special_add(t, (uint32_t)id, e))
                return -1;
        }
        if (id < 0)
            continue;
        t->eog[id] = true;
        t->types[id] = TOKEN_CONTROL;
    }
    return 0;
}

static int eog_keys_mark(struct tokenizer *t, const struct gguf *g, struct err *e)
{
    for (size_t k = 0; k < ARRAY_LEN(eog_keys); k++) {
        int32_t id = -1;
        if (id_load(&id, t, g, eog_keys[k], e))
            return -1;
        if (id >= 0)
            t->eog[id] = true;
    }
    if (t->eos >= 0)
        t->eog[t->eos] = true;
    return 0;
}

int specials_load(struct tokenizer *t, const struct gguf *g, struct err *e)
{
    struct special_set *set = &t->specials;
    size_t n = ARRAY_LEN(eog_words);
    for (uint32_t id = 0; id < t->n_vocab; id++)
        n += is_special(t, id);
    set->items = arena_alloc(&t->arena, n * sizeof *set->items);
    t->eog = arena_alloc(&t->arena, t->n_vocab);
    if (!set->items || !t->eog)
        return err_set(e, ERR_MEMORY, "no memory for %zu special tokens", n);
    for (uint32_t id = 0; id < t->n_vocab; id++)
        if (is_special(t, id) && t->pieces[id].n && special_add(t, id, e))
            return -1;
    if (special_ids_load(t, g, e) || eog_words_mark(t, e))
        return -1;
    eog_message_end_clear(t);
    if (eog_keys_mark(t, g, e))
        return -1;
    special_set_index(t);
    strip_flags_set(t, g);
    return 0;
}
