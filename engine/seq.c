/* One request's life: its text on the way out, its stop strings and limits, its end. All memory it
 * uses is taken in seq_new (the submitting thread) and seq_prepare (at admission); the token loop
 * only fills it. The prompt and the stop strings stay the caller's until on_done. */
#define _GNU_SOURCE /* memmem */
#include "engine/engine_internal.h"

#include <string.h>

enum { MAX_STOPS = 64, MAX_STOP_BYTES = 4096 };

const char *finish_name(enum finish f)
{
    static const char *const names[] = {
        [FINISH_STOP] = "stop",           [FINISH_STOP_STRING] = "stop-string",
        [FINISH_LENGTH] = "length",       [FINISH_CONTEXT] = "context",
        [FINISH_CANCELLED] = "cancelled", [FINISH_DEADLINE] = "deadline",
        [FINISH_ERROR] = "error",
    };
    return (size_t)f < ARRAY_LEN(names) ? names[f] : "unknown";
}

static int check_stops(struct seq *s, struct err *e)
{
    const struct request *r = s->req;
    if (r->n_stop > MAX_STOPS)
        return err_set(e, ERR_USAGE, "%zu stop strings are too many, at most %d", r->n_stop,
                       MAX_STOPS);
    s->stop_len = mem_array(r->n_stop, sizeof *s->stop_len);
    if (!s->stop_len)
        return err_set(e, ERR_MEMORY, "out of memory for a request");
    for (size_t i = 0; i < r->n_stop; i++) {
        size_t n = s->stop_len[i] = strlen(r->stop[i]);
        if (!n || n > MAX_STOP_BYTES || !utf8_valid(r->stop[i], n))
            return err_set(e, ERR_USAGE, "stop string %zu is %s; give 1 to %d bytes of valid text",
                           i + 1,
                           !n                   ? "empty"
                           : n > MAX_STOP_BYTES ? "too long"
                                                : "not valid UTF-8",
                           MAX_STOP_BYTES);
    }
    return 0;
}

int seq_new(struct seq **out, struct request *r, struct err *e)
{
    struct seq *s = mem_zalloc(sizeof *s);
    if (!s)
        return err_set(e, ERR_MEMORY, "out of memory for a request");
    s->req = r;
    s->dec.skip_control = !r->special_text;
    s->stats.n_prompt = (uint32_t)r->n_ids;
    if (check_stops(s, e)) {
        seq_free(s);
        return -1;
    }
    *out = s;
    return 0;
}

void seq_free(struct seq *s)
{
    if (!s)
        return;
    sampler_free(s->sampler);
    buf_fini(&s->text);
    mem_free(s->stop_len);
    mem_free(s);
}

static const char *piece_of(const void *user, int32_t id, size_t *n)
{
    return tokenizer_piece(user, id, n);
}

int seq_prepare(struct seq *s, const struct engine *en, struct err *e)
{
    const struct request *r = s->req;
    size_t longest_stop = 0;
    for (size_t i = 0; i < r->n_stop; i++)
        longest_stop = MAX(longest_stop, s->stop_len[i]);
    /* one token's text, each bad byte of which may become a U+FFFD of three bytes, behind what was
     * held back; and a terminating NUL */
    size_t room = longest_stop + 3 * (en->max_piece + sizeof s->dec.held) + 1;
    char *data = mem_alloc(room);
    if (!data)
        return err_set(e, ERR_MEMORY, "out of memory for a request's text");
    data[0] = 0;
    s->text = (struct buf){.data = data, .cap = room};
    const struct hparams *hp = &en->ld.model.hp;
    if (sampler_new(&s->sampler, &r->sample, hp->n_vocab, en->ld.lim.n_ctx, piece_of, en->tok, e))
        return -1;
    for (size_t i = 0; i < r->n_ids; i++)
        sampler_accept(s->sampler, r->ids[i]);
    return 0;
}

void seq_end(struct seq *s, enum finish f, const struct err *why)
{
    if (s->ended)
        return;
    s->ended = true;
    s->stats.finish = f;
    if (f == FINISH_ERROR && why)
        s->stats.err = *why;
}

ptrdiff_t stop_find(size_t *n_hold, const char *p, size_t n, const char *const *stop,
                    const size_t *stop_len, size_t n_stop)
{
    size_t first = n;
    *n_hold = 0;
    for (size_t i = 0; i < n_stop; i++) {
        const char *at = n ? memmem(p, n, stop[i], stop_len[i]) : NULL;
        if (at)
            first = MIN(first, (size_t)(at - p));
    }
    if (first < n)
        return (ptrdiff_t)first;
    for (size_t i = 0; i < n_stop; i++) {
        size_t k = MIN(stop_len[i] - 1, n);
        while (k > *n_hold && memcmp(p + n - k, stop[i], k))
            k--;
        *n_hold = MAX(*n_hold, k);
    }
    return -1;
}

/* Take n bytes off the front of the held text, after they have been given out. */
static void drop_front(struct buf *b, size_t n)
{
    if (!n)
        return;
    memmove(b->data, b->data + n, b->n - n);
    b->n -= n;
    b->data[b->n] = 0;
}

static void give_out(struct seq *s, int32_t id, size_t n)
{
    const struct request *r = s->req;
    if (r->on_token)
        r->on_token(r->user, id, n ? s->text.data : "", n);
    drop_front(&s->text, n);
}

/* An end-of-generation token has no text of its own; what was held back for a stop string that did
 * not come is given out with it. */
static void end_of_generation(struct seq *s, const struct engine *en, int32_t id)
{
    decoder_end(&s->dec, &s->text);
    size_t hold, n = s->text.n;
    ptrdiff_t stop = stop_find(&hold, s->text.data, n, s->req->stop, s->stop_len, s->req->n_stop);
    if (stop >= 0)
        n = (size_t)stop;
    if (n)
        give_out(s, id, n);
    seq_end(s, FINISH_STOP, NULL);
}

void seq_take_token(struct seq *s, const struct engine *en, int32_t id)
{
    const struct request *r = s->req;
    uint32_t n_generated = ++s->stats.n_generated;
    if (!r->ignore_eog && tokenizer_is_eog(en->tok, id)) {
        end_of_generation(s, en, id);
        return;
    }
    decoder_put(&s->dec, &s->text, en->tok, id);
    bool length = r->max_tokens && n_generated >= r->max_tokens;
    bool full = s->stats.n_prompt + n_generated >= en->ld.lim.n_ctx;
    if (length || full)
        decoder_end(&s->dec, &s->text);
    size_t hold, n = s->text.n;
    ptrdiff_t stop = stop_find(&hold, s->text.data, n, r->stop, s->stop_len, r->n_stop);
    if (stop >= 0) {
        n = (size_t)stop;
        seq_end(s, FINISH_STOP_STRING, NULL);
    } else if (length || full) {
        seq_end(s, length ? FINISH_LENGTH : FINISH_CONTEXT, NULL);
    } else {
        n -= hold;
        s->next = id;
    }
    if (s->text.failed) {
        struct err why = {0};
        err_set(&why, ERR_MEMORY, "out of memory for a request's text");
        s->ended = false;
        seq_end(s, FINISH_ERROR, &why);
        return;
    }
    give_out(s, id, n);
}
