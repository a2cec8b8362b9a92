/* Streaming decoder: tokens' bytes in, whole characters out. A character that is not complete yet
 * is held back (at most three bytes, in the caller's struct); bytes that can never become one come
 * out as U+FFFD, one for each maximal bad part. Uses no memory but the caller's buffer. */
#include "text/text_internal.h"

#include <string.h>

static const char replacement[] = "\xef\xbf\xbd";

/* Bytes that start well but end too early are kept; true when all n of them are such a start. */
static bool is_unfinished(const char *p, size_t n)
{
    return n < 4 && utf8_tail(p, n) == n;
}

static void hold_drop(struct decoder *d, size_t n)
{
    d->n_held = (uint8_t)(d->n_held - n);
    memmove(d->held, d->held + n, d->n_held);
}

/* Add one byte to what is held and let go of all that is decided by it. */
static void hold_put(struct decoder *d, struct buf *out, char c)
{
    d->held[d->n_held++] = c;
    while (d->n_held && !is_unfinished(d->held, d->n_held)) {
        uint32_t cp;
        int len = utf8_decode(&cp, d->held, d->n_held);
        if (len > 0)
            buf_put(out, d->held, (size_t)len);
        else
            buf_puts(out, replacement);
        hold_drop(d, (size_t)(len > 0 ? len : -len));
    }
}

void decoder_put(struct decoder *d, struct buf *out, const struct tokenizer *t, int32_t id)
{
    size_t n, at = 0, good = 0;
    const char *p = tokenizer_piece(t, id, &n);
    if (d->skip_control && tokenizer_is_control(t, id))
        return;
    while (at < n && d->n_held)
        hold_put(d, out, p[at++]);
    for (good = at; at < n;) {
        uint32_t cp;
        int len = utf8_decode(&cp, p + at, n - at);
        if (len > 0) {
            at += (size_t)len;
            continue;
        }
        buf_put(out, p + good, at - good);
        if (is_unfinished(p + at, n - at)) {
            d->n_held = (uint8_t)(n - at);
            memcpy(d->held, p + at, d->n_held);
            return;
        }
        buf_puts(out, replacement);
        at += (size_t)-len;
        good = at;
    }
    buf_put(out, p + good, n - good);
}

void decoder_end(struct decoder *d, struct buf *out)
{
    if (d->n_held)
        buf_puts(out, replacement);
    d->n_held = 0;
}
