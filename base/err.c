/* Errors, CHECK and the log. Owns no memory. */
#include "base/base.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum log_level log_threshold = LOG_WARN;

/* Messages quote names out of files, and go to terminals and into JSON: not ending inside a
 * character (the buffer may have been full), and '?' for controls (of Latin-1 too: a terminal obeys
 * them) and for bytes that are no UTF-8. */
static void clean_line(char *s)
{
    size_t n = strlen(s);
    n -= utf8_tail(s, n);
    s[n] = 0;
    while (n) {
        uint32_t cp = 0;
        int len = utf8_decode(&cp, s, n);
        size_t used = (size_t)(len < 0 ? -len : len);
        if (len < 0 || cp < 0x20 || (cp >= 0x7f && cp < 0xa0))
            memset(s, '?', used);
        s += used;
        n -= used;
    }
}

int err_set(struct err *e, enum err_code code, const char *fmt, ...)
{
    if (!e || e->code)
        return -1;
    e->code = code;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(e->msg, sizeof e->msg, fmt, ap);
    va_end(ap);
    clean_line(e->msg);
    return -1;
}

int err_prefix(struct err *e, const char *fmt, ...)
{
    if (!e)
        return -1;
    char old[sizeof e->msg], pre[300];
    memcpy(old, e->msg, sizeof old);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(pre, sizeof pre, fmt, ap);
    va_end(ap);
    snprintf(e->msg, sizeof e->msg, "%s: %.*s", pre, (int)(sizeof e->msg - 3 - strlen(pre)), old);
    clean_line(e->msg);
    return -1;
}

int err_errno(struct err *e, const char *fmt, ...)
{
    int no = errno;
    if (!e || e->code)
        return -1;
    char what[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    enum err_code code = no == ENOSPC   ? ERR_FULL
                         : no == ENOENT ? ERR_NOT_FOUND
                         : no == ENOMEM ? ERR_MEMORY
                                        : ERR_IO;
    return err_set(e, code, "%s: %s", what, strerror(no));
}

void check_failed(const char *cond, const char *file, int line)
{
    fprintf(stderr, "ingot: internal error at %s:%d: %s\n", file, line, cond);
    abort();
}

void log_line(enum log_level level, const char *fmt, ...)
{
    static const char *const names[] = {"error", "warning", "info", "debug"};
    if (level > log_threshold)
        return;
    char line[1000];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    clean_line(line);
    fprintf(stderr, "ingot: %s: %s\n", names[level], line);
}
