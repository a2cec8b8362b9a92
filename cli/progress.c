/* A progress bar on standard error: bytes, rate and time left, as wide as the terminal. No bar
 * where standard error is no terminal; then one line at the end says how it went. Owns nothing. */
#include "cli/cli_internal.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const uint64_t REDRAW_NS = 80 * 1000000ull;

void progress_begin(struct progress *p, const char *verb, double after_s, bool quiet)
{
    *p = (struct progress){
        .verb = verb,
        .start_ns = now_ns(),
        .after_ns = (uint64_t)(after_s * 1e9),
        .terminal = isatty(2) && !term_plain() && !quiet,
        .quiet = quiet,
    };
    interrupt_begin(-1);
}

static void format_amount(char out[24], const struct progress *p, uint64_t n)
{
    if (!p->unit)
        format_bytes(out, n);
    else
        snprintf(out + format_count(out, n), 8, "%s", p->unit);
}

static void put_bar(struct buf *b, int width, double part)
{
    bool utf8 = locale_is_utf8();
    int full = (int)(part * width + 0.5);
    for (int i = 0; i < width; i++)
        buf_puts(b, i < full ? (utf8 ? "\u2588" : "#") : (utf8 ? "\u2591" : "."));
}

static void draw(struct progress *p, uint64_t now)
{
    char done[24], total[24], rate[24], tail[128];
    double s = (double)(now - p->start_ns) / 1e9, units_s = (double)p->done / s;
    double part = p->total ? MIN(1.0, (double)p->done / (double)p->total) : 0;
    uint64_t left =
        units_s > 0 ? (uint64_t)((double)(p->total - MIN(p->done, p->total)) / units_s) : 0;
    format_amount(done, p, p->done);
    format_amount(total, p, p->total);
    format_amount(rate, p, (uint64_t)units_s);
    int n =
        snprintf(tail, sizeof tail, " %3.0f %%  %8s of %s  %8s/s  %2llu:%02llu left", 100 * part,
                 done, total, rate, (unsigned long long)left / 60, (unsigned long long)left % 60);
    struct buf b = {0};
    int columns = term_columns(2), width = columns - n - (int)strlen(p->verb) - 2;
    buf_printf(&b, "\r%s ", p->verb);
    if (width >= 5)
        put_bar(&b, MIN(width, 40), part);
    if (columns > n + (int)strlen(p->verb) + 1)
        buf_puts(&b, tail);
    else
        buf_printf(&b, "%.0f %%", 100 * part);
    buf_puts(&b, "\x1b[K");
    fputs(buf_str(&b), stderr);
    buf_fini(&b);
    p->shown = true;
    p->last_ns = now;
}

int progress_tick(void *user, uint64_t done, uint64_t total)
{
    struct progress *p = user;
    p->done = done;
    p->total = total;
    uint64_t now = now_ns();
    if (p->terminal && now - p->start_ns > p->after_ns && now - p->last_ns > REDRAW_NS)
        draw(p, now);
    return interrupt_seen();
}

void progress_end(struct progress *p, const char *past)
{
    interrupt_end();
    if (p->shown)
        fputs("\r\x1b[K", stderr);
    if (!past || p->terminal || p->quiet)
        return;
    char bytes[16], rate[16];
    double s = MAX((double)(now_ns() - p->start_ns) / 1e9, 1e-3);
    format_bytes(bytes, p->total);
    format_bytes(rate, (uint64_t)((double)p->total / s));
    fprintf(stderr, "%s %s in %.2f s (%s/s)\n", past, bytes, s, rate);
}
