/* What changes logits before anything is cut: bias, the grammar's mask, the repetition penalties
 * and DRY, with the token history that they look at. Memory is the sampler's arena, taken once for
 * the windows in use; telling of a token and adjusting allocate nothing. */
#include "engine/sample_internal.h"

static const char *const default_breakers[] = {"\n", ":", "\"", "*"};

/* A look-back of n tokens (-1: all) in a context of max_tokens. */
static size_t window_tokens(int32_t n, uint32_t max_tokens)
{
    return n < 0 ? max_tokens : MIN((uint32_t)n, max_tokens);
}

static bool penalties_on(const struct sample_params *p)
{
    return p->repeat_penalty != 1 || p->presence_penalty != 0 || p->frequency_penalty != 0;
}

static int breakers_init(struct sampler *s, struct err *e)
{
    struct sample_params *p = &s->p;
    if (!p->dry_breakers) {
        p->dry_breakers = default_breakers;
        p->n_dry_breakers = ARRAY_LEN(default_breakers);
    }
    if (p->n_dry_breakers > 0 && !s->piece)
        return err_set(e, ERR_USAGE,
                       "dry_sequence_breakers need the tokens' texts; give a piece "
                       "look-up, or an empty list of breakers");
    for (size_t i = 0; i < p->n_dry_breakers; i++) {
        const char *b = p->dry_breakers[i];
        s->h.breaker_end[(unsigned char)b[strlen(b) - 1]] = true;
    }
    return 0;
}

/* How far the two look back. */
static void set_windows(struct history *h, const struct sample_params *p, uint32_t max_tokens)
{
    if (penalties_on(p))
        h->window = window_tokens(p->repeat_last_n, max_tokens);
    if (p->dry_multiplier > 0)
        h->dry_window = window_tokens(p->dry_last_n, max_tokens);
    h->keep = MAX(h->window, h->dry_window);
}

uint64_t history_bytes(const struct sample_params *p, uint32_t n_vocab, uint32_t max_tokens)
{
    struct history h = {0};
    set_windows(&h, p, max_tokens);
    uint64_t sum = h.keep * 2 * sizeof *h.v;
    if (h.window)
        sum += MIN(h.window, n_vocab) * sizeof *h.seen + n_vocab * sizeof *h.slot;
    if (h.dry_window)
        sum += h.dry_window * sizeof *h.match + n_vocab * sizeof *h.dry_length;
    return sum;
}

int history_init(struct sampler *s, uint32_t max_tokens, struct err *e)
{
    struct history *h = &s->h;
    set_windows(h, &s->p, max_tokens);
    size_t v_bytes, match_bytes;
    if (mul_over(h->keep, 2 * sizeof *h->v, &v_bytes) ||
        mul_over(h->dry_window, sizeof *h->match, &match_bytes))
        return err_set(e, ERR_MEMORY, "a history of %zu tokens is too long to count in bytes",
                       h->keep);
    bool ok = !h->keep || (h->v = arena_alloc(&s->arena, v_bytes));
    if (h->window)
        ok = ok &&
             (h->seen = arena_alloc(&s->arena, MIN(h->window, s->n_vocab) * sizeof *h->seen)) &&
             (h->slot = arena_alloc(&s->arena, s->n_vocab * sizeof *h->slot));
    if (h->dry_window)
        ok = ok && (h->match = arena_alloc(&s->arena, match_bytes)) &&
             (h->dry_length = arena_alloc(&s->arena, s->n_vocab * sizeof *h->dry_length));
    if (!ok)
        return err_set(e, ERR_MEMORY,
                       "no memory for a token history of %zu tokens; lower "
                       "repeat_last_n or dry_penalty_last_n",
                       h->keep);
    return h->dry_window ? breakers_init(s, e) : 0;
}

/* ---- the window of the repetition penalties: how often each token is in it ---- */

static void seen_add(struct history *h, int32_t id)
{
    uint32_t *slot = &h->slot[id];
    if (!*slot) {
        h->seen[h->n_seen] = (struct token_count){.id = id};
        *slot = (uint32_t)++h->n_seen;
    }
    h->seen[*slot - 1].n++;
}

static void seen_remove(struct history *h, int32_t id)
{
    struct token_count *c = &h->seen[h->slot[id] - 1];
    if (--c->n)
        return;
    *c = h->seen[--h->n_seen]; /* the last one moves into the hole, unless it is the hole */
    h->slot[c->id] = h->slot[id];
    h->slot[id] = 0;
}

/* ---- sequence breakers: they may lie inside one token's text or span several ---- */

static bool breaker_ends_at(const struct sampler *s, const char *text, size_t n)
{
    for (size_t i = 0; i < s->p.n_dry_breakers; i++) {
        size_t len = strlen(s->p.dry_breakers[i]);
        if (len <= n && !memcmp(text + n - len, s->p.dry_breakers[i], len))
            return true;
    }
    return false;
}

/* Does a breaker end inside this token's text, given the text before it? */
static bool token_breaks(struct sampler *s, int32_t id)
{
    struct history *h = &s->h;
    if (!s->p.n_dry_breakers)
        return false;
    size_t n = 0;
    const char *piece = s->piece(s->user, id, &n);
    bool breaks = false;
    while (piece && n > 0) { /* in parts, so that the joined text fits a small buffer */
        char text[2 * BREAKER_BYTES];
        size_t take = MIN(n, (size_t)BREAKER_BYTES), len = h->n_tail + take;
        memcpy(text, h->tail, h->n_tail);
        memcpy(text + h->n_tail, piece, take);
        for (size_t i = h->n_tail; i < len && !breaks; i++)
            breaks = h->breaker_end[(unsigned char)text[i]] && breaker_ends_at(s, text, i + 1);
        h->n_tail = MIN(len, (size_t)BREAKER_BYTES - 1);
        memcpy(h->tail, text + len - h->n_tail, h->n_tail);
        piece += take;
        n -= take;
    }
    return breaks;
}

void history_add(struct sampler *s, int32_t id)
{
    struct history *h = &s->h;
    if (!h->keep)
        return;
    if (h->n == 2 * h->keep) {
        memmove(h->v, h->v + h->keep, h->keep * sizeof *h->v);
        h->n = h->keep;
    }
    h->v[h->n++] = id;
    if (h->window) {
        if (h->n > h->window) /* first out, then in: seen has room for one window */
            seen_remove(h, h->v[h->n - 1 - h->window]);
        seen_add(h, id);
    }
    if (h->dry_window)
        h->since_break = token_breaks(s, id) ? 0 : h->since_break + 1;
}

/* ---- adjusting ---- */

static void copy_allowed(float *dst, const float *x, const uint32_t *allowed, size_t n)
{
    for (size_t at = 0; at < n; at += 32) {
        uint32_t bits = allowed[at / 32];
        size_t len = MIN(n - at, (size_t)32);
        if (bits == 0xffffffffu) {
            memcpy(dst + at, x + at, len * sizeof *dst);
            continue;
        }
        for (size_t i = 0; i < len; i++)
            dst[at + i] = bits >> i & 1 ? x[at + i] : -INFINITY;
    }
}

/* Repetition: Keskar et al. 2019, "CTRL", section 4.1 (divide a positive logit, multiply another).
 * Presence and frequency: subtracted once, and once per occurrence, as OpenAI's API has them. */
static void penalize_repeats(struct sampler *s)
{
    const struct sample_params *p = &s->p;
    for (size_t i = 0; i < s->h.n_seen; i++) {
        const struct token_count *c = &s->h.seen[i];
        float *x = &s->work[c->id];
        float v = *x > 0 ? *x / p->repeat_penalty : *x * p->repeat_penalty;
        v -= (float)c->n * p->frequency_penalty + p->presence_penalty;
        *x = *x > -INFINITY ? MAX(MIN(v, FLT_MAX), -FLT_MAX) : -INFINITY;
    }
}

/* z[i] (0 < i < n): how many tokens ending i before the last one equal the last ones. This is the
 * Z function of the reversed window (Gusfield 1997, "Algorithms on strings", section 1.4), in
 * linear time. last points at the last token. */
static void match_lengths(uint32_t *z, const int32_t *last, size_t n)
{
    size_t from = 0, to = 0; /* rev[from .. to) is the match that reaches furthest */
    for (size_t i = 1; i < n; i++) {
        size_t len = i < to ? MIN(to - i, (size_t)z[i - from]) : 0;
        while (i + len < n && last[-(ptrdiff_t)len] == last[-(ptrdiff_t)(i + len)])
            len++;
        z[i] = (uint32_t)len;
        if (i + len > to) {
            from = i;
            to = i + len;
        }
    }
}

/* DRY ("don't repeat yourself"; p-e-w, pull request 5677 of text-generation-webui, 2024): a token
 * that would lengthen a repetition of length n >= allowed_length loses
 * multiplier * base^(n - allowed_length). The repeated text ends at the end of the context, holds
 * no sequence breaker, and stood before inside the window with that token after it. */
static void penalize_sequences(struct sampler *s)
{
    struct history *h = &s->h;
    const struct sample_params *p = &s->p;
    size_t n = MIN(h->n, h->dry_window), limit = MIN(n, h->since_break);
    size_t allowed = (size_t)p->dry_allowed_length;
    if (limit < allowed || n < 2)
        return;
    const int32_t *last = h->v + h->n - 1;
    match_lengths(h->match, last, n);
    for (size_t i = 1; i < n; i++) {
        uint32_t len = (uint32_t)MIN((size_t)h->match[i], limit);
        uint32_t *longest = &h->dry_length[last[1 - (ptrdiff_t)i]];
        if (len >= allowed && len + 1 > *longest)
            *longest = len + 1;
    }
    for (size_t i = 1; i < n; i++) {
        int32_t id = last[1 - (ptrdiff_t)i];
        uint32_t len = h->dry_length[id];
        if (!len)
            continue;
        h->dry_length[id] = 0;
        double penalty = p->dry_multiplier * pow(p->dry_base, (double)(len - 1 - allowed));
        s->work[id] -= (float)MIN(penalty, 1e30); /* finite: the token stays possible */
    }
}

bool adjust_wanted(const struct sampler *s, const uint32_t *allowed)
{
    return allowed || s->p.n_bias || s->h.n_seen || (s->h.dry_window && s->h.n > 1);
}

void adjust_logits(struct sampler *s, const float *logits, const uint32_t *allowed)
{
    if (allowed)
        copy_allowed(s->work, logits, allowed, s->n_vocab);
    else
        memcpy(s->work, logits, s->n_vocab * sizeof *s->work);
    for (size_t i = 0; i < s->p.n_bias; i++)
        s->work[s->p.bias[i].id] += s->p.bias[i].bias;
    if (s->h.n_seen)
        penalize_repeats(s);
    if (s->h.dry_window)
        penalize_sequences(s);
}
