/* What commands print: styles, sizes, ages, text made safe for a terminal, JSON; and reading the
 * inputs that commands take. Buffers are the caller's. */
#include "cli/cli_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

/* ---- the terminal ---- */

bool term_plain(void)
{
    const char *term = getenv("TERM");
    return !term || !*term || !strcmp(term, "dumb");
}

const char *style(int fd, enum style s)
{
    static const char *const codes[STYLE_END] = {
        [STYLE_NONE] = "\x1b[0m",
        [STYLE_DIM] = "\x1b[2m",
        [STYLE_BOLD] = "\x1b[1m",
        [STYLE_PROMPT] = "\x1b[1;36m",
    };
    static int cached[3] = {-1, -1, -1};
    if (cached[fd] < 0) {
        const char *no = getenv("NO_COLOR"); /* no-color.org: set and not empty */
        cached[fd] = isatty(fd) && !term_plain() && !(no && *no);
    }
    return cached[fd] ? codes[s] : "";
}

int term_columns(int fd)
{
    struct winsize w;
    if (ioctl(fd, TIOCGWINSZ, &w) == 0 && w.ws_col > 0)
        return w.ws_col;
    return 80;
}

bool locale_is_utf8(void)
{
    static const char *const names[] = {"LC_ALL", "LC_CTYPE", "LANG"};
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        const char *v = getenv(names[i]);
        if (v && *v)
            return strcasestr(v, "utf-8") || strcasestr(v, "utf8");
    }
    return false;
}

/* ---- numbers ---- */

static int format_scaled(char out[16], uint64_t n, const char *const units[6])
{
    double v = (double)n;
    int u = 0;
    while (v >= 999.5 && u < 5) {
        v /= 1000;
        u++;
    }
    int digits = u == 0 ? 0 : v < 99.95 ? 1 : 0;
    return snprintf(out, 16, "%.*f%s", digits, v, units[u]);
}

int format_bytes(char out[16], uint64_t n)
{
    static const char *const units[] = {" B", " kB", " MB", " GB", " TB", " PB"};
    return format_scaled(out, n, units);
}

int format_count(char out[16], uint64_t n)
{
    static const char *const units[] = {"", " k", " M", " B", " T", " Q"};
    return format_scaled(out, n, units);
}

int format_age(char out[24], int64_t then)
{
    static const struct {
        int64_t seconds;
        const char *unit;
    } steps[] = {{365 * 86400, "year"}, {30 * 86400, "month"}, {7 * 86400, "week"},
                 {86400, "day"},        {3600, "hour"},        {60, "minute"}};
    int64_t s = (int64_t)time(NULL) - then;
    for (size_t i = 0; i < ARRAY_LEN(steps); i++) {
        if (s >= steps[i].seconds) {
            int n = (int)MIN(s / steps[i].seconds, 9999);
            return snprintf(out, 24, "%d %s%s ago", n, steps[i].unit, n == 1 ? "" : "s");
        }
    }
    return snprintf(out, 24, "just now");
}

/* ---- text ---- */

static void put_char(struct buf *out, const char *p, size_t n, uint32_t cp, bool multi_line)
{
    if (multi_line && (cp == '\n' || cp == '\t'))
        buf_putc(out, (char)cp);
    else if (cp < 0x20 || (cp >= 0x7f && cp < 0xa0))
        buf_putc(out, '?');
    else
        buf_put(out, p, n);
}

void put_clean(struct buf *out, const char *p, size_t n, size_t max_columns)
{
    size_t columns = 0, fits = out->n; /* where "..." would still fit */
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        int len = utf8_decode(&cp, p + i, n - i);
        size_t w = len > 0 && cp >= 0xa0 ? (size_t)utf8_width(cp) : 1;
        if (columns + w > max_columns) {
            out->n = fits;
            buf_puts(out, "...");
            return;
        }
        if (len > 0)
            put_char(out, p + i, (size_t)len, cp, false);
        else
            buf_putc(out, '?');
        columns += w;
        if (columns + 3 <= max_columns)
            fits = out->n;
        i += (size_t)abs(len);
    }
}

void put_terminal(struct buf *out, const char *p, size_t n)
{
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        int len = utf8_decode(&cp, p + i, n - i);
        if (len > 0)
            put_char(out, p + i, (size_t)len, cp, true);
        else
            buf_putc(out, '?');
        i += (size_t)abs(len);
    }
}

/* ---- JSON ---- */

json_t *json_text(const char *p, size_t n)
{
    if (utf8_valid(p, n))
        return json_stringn_nocheck(p, n);
    struct buf b = {0};
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        int len = utf8_decode(&cp, p + i, n - i);
        if (len > 0)
            buf_put(&b, p + i, (size_t)len);
        else
            buf_puts(&b, "\xef\xbf\xbd");
        i += (size_t)abs(len);
    }
    json_t *j = b.failed ? NULL : json_stringn_nocheck(b.data, b.n);
    buf_fini(&b);
    return j;
}

int print_json(json_t *j, struct err *e)
{
    if (!j)
        return err_set(e, ERR_MEMORY, "out of memory for the JSON output");
    int rc = json_dumpf(j, stdout, JSON_INDENT(2) | JSON_ENCODE_ANY | JSON_REAL_PRECISION(9));
    json_decref(j);
    if (rc)
        return err_errno(e, "cannot write to standard output");
    putchar('\n');
    return 0;
}

/* ---- input ---- */

void say_reading(void)
{
    if (isatty(0) && isatty(2) && log_threshold > LOG_ERROR)
        fprintf(stderr, "%sreading standard input, Ctrl-D ends%s\n", style(2, STYLE_DIM),
                style(2, STYLE_NONE));
}

int read_stream(struct buf *out, int fd, const char *name, size_t max_bytes, struct err *e)
{
    char chunk[16384];
    for (;;) {
        ssize_t n = read(fd, chunk, sizeof chunk);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return err_errno(e, "cannot read %s", name);
        if (n == 0)
            break;
        if (out->n + (size_t)n > max_bytes)
            return err_set(e, ERR_LIMIT, "%s is longer than %zu bytes; give less", name, max_bytes);
        buf_put(out, chunk, (size_t)n);
    }
    if (out->failed)
        return err_set(e, ERR_MEMORY, "out of memory for %s", name);
    return 0;
}

/* Unlike file_read_all this takes pipes too: `--text <(zcat book.gz)`. */
int read_input(struct buf *out, const char *path, size_t max_bytes, struct err *e)
{
    if (!strcmp(path, "-")) {
        say_reading();
        return read_stream(out, 0, "standard input", max_bytes, e);
    }
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return err_errno(e, "cannot open '%s'", path);
    int rc = read_stream(out, fd, path, max_bytes, e);
    close(fd);
    return rc;
}

json_t *read_json(const char *path, struct err *e)
{
    struct buf b = {0};
    json_t *j = NULL;
    json_error_t je;
    if (read_input(&b, path, 64 << 20, e))
        goto out;
    j = json_loadb(buf_str(&b), b.n, JSON_ALLOW_NUL, &je);
    if (!j)
        err_set(e, ERR_USAGE, "%s is not JSON: line %d: %s",
                strcmp(path, "-") ? path : "standard input", je.line, je.text);
out:
    buf_fini(&b);
    return j;
}

bool read_line(struct buf *out, void *file)
{
    buf_clear(out);
    for (int c; (c = getc_unlocked(file)) != EOF;) {
        if (c == '\n')
            return true;
        buf_putc(out, (char)c);
    }
    return out->n > 0;
}
