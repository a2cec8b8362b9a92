/* Streaming one answer: the engine's thread hands text over, this thread prints it, so that a slow
 * terminal never holds a step up. Ctrl-C ends the answer. The text is the caller's buffer. */
#include "cli/cli_internal.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct stream {
    pthread_mutex_t lock;
    struct buf fresh; /* text that was not printed yet */
    bool done;
    struct request_stats stats;
    int wake_fd; /* eventfd: text, the end, or Ctrl-C */
};

static void wake(struct stream *s)
{
    uint64_t one = 1;
    while (write(s->wake_fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

static void on_token(void *user, int32_t id, const char *text, size_t n)
{
    struct stream *s = user;
    if (!n)
        return;
    pthread_mutex_lock(&s->lock);
    buf_put(&s->fresh, text, n);
    wake(s);
    pthread_mutex_unlock(&s->lock);
}

static void on_done(void *user, const struct request_stats *stats)
{
    struct stream *s = user;
    pthread_mutex_lock(&s->lock);
    s->stats = *stats;
    s->done = true;
    wake(s); /* under the lock: the stream may be gone right after it */
    pthread_mutex_unlock(&s->lock);
}

/* While nothing has come yet, a person sees how much of the prompt has been read. */
struct waiting {
    bool terminal, shown;
    uint64_t start_ns;
    size_t n_prompt;
    struct engine *engine;
    struct engine_counters before;
};

static void waiting_show(struct waiting *w)
{
    double s = (double)(now_ns() - w->start_ns) / 1e9;
    struct engine_counters c;
    if (!w->terminal || s < 0.5)
        return;
    engine_counters(w->engine, &c);
    uint64_t read =
        c.n_prompt_rows - w->before.n_prompt_rows + c.n_reused_rows - w->before.n_reused_rows;
    fprintf(stderr, "\r%sreading ", style(2, STYLE_DIM));
    if (read)
        fprintf(stderr, "%llu of ", (unsigned long long)MIN(read, (uint64_t)w->n_prompt));
    fprintf(stderr, "%zu tokens, %.0f s%s\x1b[K", w->n_prompt, s, style(2, STYLE_NONE));
    w->shown = true;
}

static void waiting_hide(struct waiting *w)
{
    if (w->shown)
        fputs("\r\x1b[K", stderr);
    w->terminal = w->shown = false;
}

/* How text goes to standard output: as it is, or safe and wrapped for a terminal. */
struct printer {
    bool terminal, wrapped;
    struct wrap wrap;
    struct buf safe, out;
};

static void printer_begin(struct printer *p, bool no_wrap)
{
    *p = (struct printer){.terminal = isatty(1)};
    p->wrapped = p->terminal && !term_plain() && !no_wrap;
    wrap_begin(&p->wrap, term_columns(1));
}

static int print_text(struct answer *a, struct printer *p, struct buf *text, struct err *e)
{
    const struct buf *out = text;
    buf_put(&a->text, text->data, text->n);
    buf_clear(&p->safe);
    buf_clear(&p->out);
    if (p->terminal) {
        put_terminal(&p->safe, text->data, text->n);
        out = &p->safe;
    }
    if (p->wrapped) {
        wrap_put(&p->wrap, &p->out, p->safe.data, p->safe.n);
        out = &p->out;
    }
    if (text->failed || a->text.failed || p->safe.failed || p->out.failed)
        return err_set(e, ERR_MEMORY, "out of memory for the answer's text");
    if (fwrite(out->data, 1, out->n, stdout) != out->n || fflush(stdout))
        return err_errno(e, "cannot write to standard output");
    return 0;
}

/* Print until the request is done. An error cancels the request and is returned after its end. */
static int pump(struct answer *a, struct stream *s, struct engine *en, struct request *r,
                const struct engine_counters *before, struct err *e)
{
    struct buf text = {0};
    struct printer p;
    struct waiting w = {.terminal = isatty(1) && isatty(2) && !term_plain(),
                        .start_ns = now_ns(),
                        .n_prompt = r->n_ids,
                        .engine = en,
                        .before = *before};
    int rc = 0;
    printer_begin(&p, a->no_wrap);
    for (bool done = false; !done;) {
        struct pollfd fd = {.fd = s->wake_fd, .events = POLLIN};
        poll(&fd, 1, w.terminal ? 200 : -1);
        uint64_t count;
        if ((fd.revents & POLLIN) && read(s->wake_fd, &count, sizeof count) < 0 && errno != EINTR)
            rc = err_errno(e, "cannot read from the event queue");
        if (interrupt_seen() && !a->interrupted) {
            a->interrupted = true;
            engine_cancel(en, r);
        }
        pthread_mutex_lock(&s->lock);
        struct buf swap = text;
        text = s->fresh;
        s->fresh = swap;
        buf_clear(&s->fresh);
        done = s->done;
        pthread_mutex_unlock(&s->lock);
        if (text.n || done)
            waiting_hide(&w);
        else
            waiting_show(&w);
        if ((text.n || text.failed) && !rc) {
            rc = print_text(a, &p, &text, e);
            if (rc)
                engine_cancel(en, r);
        }
    }
    buf_fini(&text);
    buf_fini(&p.safe);
    buf_fini(&p.out);
    return rc;
}

int answer_stream(struct answer *a, struct engine *en, struct request *r, struct err *e)
{
    struct stream s = {.lock = PTHREAD_MUTEX_INITIALIZER};
    struct engine_counters before, after;
    int rc = -1;
    engine_counters(en, &before);
    s.wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (s.wake_fd < 0)
        return err_errno(e, "cannot create an event queue");
    r->on_token = on_token;
    r->on_done = on_done;
    r->user = &s;
    interrupt_begin(s.wake_fd);
    if (engine_submit(en, r, e))
        goto out;
    rc = pump(a, &s, en, r, &before, e);
    engine_counters(en, &after);
    a->stats = s.stats;
    a->n_read = after.n_prompt_rows - before.n_prompt_rows;
    if (!rc && s.stats.finish == FINISH_ERROR) {
        *e = s.stats.err;
        rc = e->code ? -1 : err_set(e, ERR_DEVICE, "the engine failed without saying why");
    }
out:
    interrupt_end();
    close(s.wake_fd);
    buf_fini(&s.fresh);
    pthread_mutex_destroy(&s.lock);
    return rc;
}

static void put_speed(struct buf *out, double n, uint64_t ns)
{
    if (n > 0 && ns > 0)
        buf_printf(out, " at %.*f tok/s", n * 1e9 / (double)ns < 100 ? 1 : 0, n * 1e9 / (double)ns);
}

void format_stats(struct buf *out, const struct request_stats *s, uint64_t n_read,
                  double load_seconds)
{
    buf_printf(out, "prompt %u", s->n_prompt);
    if (s->n_cached)
        buf_printf(out, " (%u known)", s->n_cached);
    if (!s->n_generated && s->finish == FINISH_CANCELLED) {
        buf_printf(out, ", stopped after %llu", (unsigned long long)(n_read + s->n_cached));
        put_speed(out, (double)n_read, s->prompt_ns);
        return;
    }
    put_speed(out, (double)s->n_prompt - s->n_cached, s->prompt_ns);
    buf_printf(out, "; answer %u", s->n_generated);
    put_speed(out, (double)s->n_generated - 1, s->decode_ns);
    buf_printf(out, "; first token %.2f s", (double)(s->queue_ns + s->prompt_ns) / 1e9);
    if (load_seconds > 0)
        buf_printf(out, "; load %.2f s", load_seconds);
    if (s->finish == FINISH_LENGTH)
        buf_puts(out, "; cut by --max-tokens");
}
