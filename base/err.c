/* Errors, CHECK and the log. Owns no memory. */
#include "base/base.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum log_level log_threshold = LOG_WARN;

static void clean_line(char *s)
{
    for (; *s; s++)
        if ((unsigned char)*s < 0x20 || (unsigned char)*s == 0x7f)
            *s = '?';
}

/* Cut a message that filled its buffer so that it does not end inside a character. */
static void cut_whole(char *msg)
{
    size_t n = strlen(msg);
    msg[n - utf8_tail(msg, n)] = 0;
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
    cut_whole(e->msg);
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
    snprintf(e->msg, sizeof e->msg, "%.299s: %.198s", pre, old);
    clean_line(e->msg);
    cut_whole(e->msg);
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
