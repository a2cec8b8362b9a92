/* The line editor on a terminal: its modes and back, reading, drawing, window size changes,
 * suspend. At the prompt the process sleeps in read(). Plain line reading where the terminal cannot
 * move its cursor. Owns the editor, the history and the terminal's saved settings. */
#include "cli/cli_internal.h"
#include "cli/lineedit.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

struct lineedit {
    struct editor ed;
    struct linehist history;
    bool plain;
    struct termios saved;
    unsigned char in[4096]; /* read and not yet taken: keys typed ahead */
    size_t n_in, at_in;
    int n_cooked; /* bytes typed before the modes were ours: Enter is a newline in them */
};

static const char MODES_ON[] = "\x1b[?2004h"; /* bracketed paste */
static const char MODES_OFF[] = "\x1b[?2004l";

/* One terminal a process: what a signal handler needs to put it right. */
static struct termios restore_to;
static volatile sig_atomic_t is_raw, resized;

static void write_all(const char *p, size_t n)
{
    while (n) {
        ssize_t put = write(1, p, n);
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            return; /* the terminal is gone; the next read says so */
        p += put;
        n -= (size_t)put;
    }
}

static void on_resize(int sig)
{
    resized = 1;
}

static void on_end(int sig)
{
    if (is_raw) {
        tcsetattr(0, TCSADRAIN, &restore_to);
        write_all(MODES_OFF, sizeof MODES_OFF - 1);
    }
    signal(sig, SIG_DFL);
    raise(sig);
}

/* While a text is edited every key is ours. Between two reads Ctrl-C sends its signal and Ctrl-S
 * holds the output; all else waits as it was typed, Enter told from a newline and a paste from
 * keys. */
static void raw_on(struct lineedit *l, bool editing)
{
    struct termios t = l->saved;
    t.c_iflag &= ~(tcflag_t)(BRKINT | ICRNL | INPCK | ISTRIP | (editing ? IXON : 0));
    t.c_lflag &= ~(tcflag_t)(ECHO | ICANON | IEXTEN | (editing ? ISIG : 0));
    t.c_cc[VMIN] = 1;
    t.c_cc[VTIME] = 0;
    restore_to = l->saved;
    bool first = !is_raw;
    is_raw = 1;
    tcsetattr(0, TCSADRAIN, &t);
    if (first)
        write_all(MODES_ON, sizeof MODES_ON - 1);
}

static void raw_off(struct lineedit *l)
{
    if (!is_raw)
        return;
    write_all(MODES_OFF, sizeof MODES_OFF - 1);
    tcsetattr(0, TCSADRAIN, &l->saved);
    is_raw = 0;
}

static void watch_signals(void)
{
    static const int ends[] = {SIGTERM, SIGHUP, SIGQUIT};
    struct sigaction resize = {.sa_handler = on_resize}, end = {.sa_handler = on_end};
    sigaction(SIGWINCH, &resize, NULL); /* no SA_RESTART: it wakes the read */
    /* At the prompt Ctrl-C is a key, and while an answer runs interrupt.c stops that. Between the
     * two, and pressed again before the answer has stopped, it ends nothing. */
    signal(SIGINT, SIG_IGN);
    for (size_t i = 0; i < ARRAY_LEN(ends); i++)
        sigaction(ends[i], &end, NULL);
}

static void take_size(struct lineedit *l)
{
    struct winsize w = {0};
    ioctl(1, TIOCGWINSZ, &w);
    editor_resize(&l->ed, w.ws_col ? w.ws_col : 80, w.ws_row ? w.ws_row : 24);
}

static void draw(struct lineedit *l, const char *before, bool final)
{
    struct buf b = {0};
    buf_puts(&b, before);
    editor_draw(&b, &l->ed, final);
    write_all(buf_str(&b), b.n);
    buf_fini(&b);
}

/* The next byte; -1 at the end of input, -2 when the window changed or an Escape stayed alone.
 * Draws before it sleeps. */
static int next_byte(struct lineedit *l)
{
    if (l->at_in == l->n_in) {
        struct pollfd in = {.fd = 0, .events = POLLIN};
        draw(l, "", false);
        if (editor_waits(&l->ed) && poll(&in, 1, EDITOR_ESCAPE_MS) == 0) {
            editor_idle(&l->ed);
            return -2;
        }
        ssize_t n = read(0, l->in, sizeof l->in);
        if (n < 0 && errno == EINTR)
            return -2;
        if (n <= 0)
            return -1;
        l->n_in = (size_t)n;
        l->at_in = 0;
    }
    int c = l->in[l->at_in++];
    bool enter = c == '\n' && l->n_cooked > 0;
    l->n_cooked -= l->n_cooked > 0;
    return enter ? '\r' : c;
}

static void suspend(struct lineedit *l)
{
    draw(l, "", true);
    raw_off(l);
    raise(SIGTSTP);
    raw_on(l, true);
    take_size(l);
    l->ed.top = l->ed.cursor_row = 0;
}

static enum line_result edit_loop(struct lineedit *l)
{
    for (;;) {
        int c = next_byte(l);
        if (resized) {
            resized = 0;
            take_size(l);
        }
        if (c == -2)
            continue;
        if (c == -1)
            return LINE_EOF;
        switch (editor_byte(&l->ed, (unsigned char)c)) {
        case EDIT_NONE:
            break;
        case EDIT_DONE:
            return LINE_OK;
        case EDIT_EOF:
            return LINE_EOF;
        case EDIT_INTERRUPT:
            return LINE_INTERRUPT;
        case EDIT_SUSPEND:
            suspend(l);
            break;
        case EDIT_CLEAR:
            l->ed.cursor_row = 0;
            draw(l, "\x1b[H\x1b[2J", false);
            break;
        }
    }
}

/* ---- without cursor movement ---- */

static enum line_result plain_read(struct buf *out, const char *prompt, const char *more)
{
    struct buf line = {0};
    enum line_result r = LINE_OK;
    buf_clear(out);
    for (const char *p = prompt;; p = more) {
        fputs(p, stdout);
        fflush(stdout);
        if (!read_line(&line, stdin)) {
            r = out->n ? LINE_OK : LINE_EOF;
            break;
        }
        if (out->n)
            buf_putc(out, '\n');
        buf_put(out, line.data, line.n);
        if (!lineedit_wants_more(buf_str(out), out->n))
            break;
    }
    buf_fini(&line);
    return r;
}

/* ---- the public face ---- */

int lineedit_new(struct lineedit **out, const char *history_path, const char *const *words,
                 struct err *e)
{
    struct lineedit *l = mem_zalloc(sizeof *l);
    if (!l)
        return err_set(e, ERR_MEMORY, "out of memory for the line editor");
    if (linehist_open(&l->history, history_path, e)) {
        lineedit_free(l);
        return -1;
    }
    l->plain = term_plain() || !isatty(0) || !isatty(1) || tcgetattr(0, &l->saved);
    l->ed.history = &l->history;
    l->ed.words = words;
    if (!l->plain) {
        watch_signals();
        raw_on(l, false);
        if (ioctl(0, FIONREAD, &l->n_cooked))
            l->n_cooked = 0;
    }
    *out = l;
    return 0;
}

void lineedit_free(struct lineedit *l)
{
    if (!l)
        return;
    raw_off(l);
    linehist_fini(&l->history);
    editor_fini(&l->ed);
    mem_free(l);
}

enum line_result lineedit_read(struct buf *out, struct lineedit *l, const char *prompt,
                               const char *more, struct err *e)
{
    enum line_result r;
    if (l->plain) {
        r = plain_read(out, prompt, more);
    } else {
        l->ed.prompt = prompt;
        l->ed.more = more;
        l->ed.style_on = style(1, STYLE_PROMPT);
        l->ed.style_off = style(1, STYLE_NONE);
        fflush(stdout);
        raw_on(l, true);
        editor_start(&l->ed);
        take_size(l);
        r = edit_loop(l);
        draw(l, "", true);
        raw_on(l, false);
        buf_clear(out);
        buf_put(out, l->ed.text.data, l->ed.text.n);
    }
    if (r == LINE_OK && (out->failed || l->ed.text.failed)) {
        err_set(e, ERR_MEMORY, "out of memory for the line");
        return LINE_FAILED;
    }
    if (r == LINE_OK)
        linehist_add(&l->history, buf_str(out), e);
    lineedit_unquote(out);
    return r;
}

void lineedit_flush(struct lineedit *l)
{
    l->at_in = l->n_in = 0;
    l->n_cooked = 0;
    if (!l->plain)
        tcflush(0, TCIFLUSH);
}
