/* The history of the chat's line editor: one entry a line in a file that only its owner can read,
 * newlines written as \n and backslashes as \\. Owns its entries. */
#include "cli/lineedit.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <string.h>
#include <unistd.h>

enum { HISTORY_MAX_BYTES = 4 << 20, HISTORY_ENTRY_BYTES = 64 << 10 };

static int keep(struct linehist *h, char *entry)
{
    if (h->n == HISTORY_MAX) {
        mem_free(h->v[0]);
        memmove(h->v, h->v + 1, (h->n - 1) * sizeof *h->v);
        h->n--;
    }
    if (h->n == h->cap) {
        size_t cap = h->cap ? 2 * h->cap : 64;
        char **v = mem_realloc(h->v, cap * sizeof *v);
        if (!v)
            return -1;
        h->v = v;
        h->cap = cap;
    }
    h->v[h->n++] = entry;
    return 0;
}

static void escape(struct buf *out, const char *text)
{
    for (; *text; text++) {
        if (*text == '\n')
            buf_puts(out, "\\n");
        else if (*text == '\\')
            buf_puts(out, "\\\\");
        else
            buf_putc(out, *text);
    }
    buf_putc(out, '\n');
}

static char *unescape(const char *p, size_t n)
{
    char *out = mem_alloc(n + 1), *w = out;
    for (size_t i = 0; out && i < n; i++) {
        if (p[i] == '\\' && i + 1 < n)
            *w++ = p[++i] == 'n' ? '\n' : p[i];
        else if (p[i])
            *w++ = p[i];
    }
    if (out)
        *w = 0;
    return out;
}

/* Rewrite the file with what is kept, so that it does not grow for ever. */
static int compact(const struct linehist *h, struct err *e)
{
    struct buf b = {0};
    for (size_t i = 0; i < h->n; i++)
        escape(&b, h->v[i]);
    mode_t old = umask(077);
    int rc = b.failed ? -1 : file_write_all(h->path, b.data, b.n, e);
    umask(old);
    buf_fini(&b);
    return rc;
}

/* The file, or of one that grew too large its newest part, which starts inside a line. */
static int read_tail(struct buf *out, bool *cut, const char *path, struct err *e)
{
    struct mapped m;
    if (file_map(&m, path, e))
        return -1;
    *cut = m.n > HISTORY_MAX_BYTES;
    size_t n = MIN(m.n, (size_t)HISTORY_MAX_BYTES);
    buf_put(out, m.data + (m.n - n), n);
    file_unmap(&m);
    return out->failed ? err_set(e, ERR_MEMORY, "out of memory for the history") : 0;
}

int linehist_open(struct linehist *h, const char *path, struct err *e)
{
    *h = (struct linehist){0};
    struct buf b = {0};
    struct err fe = {0};
    size_t n_lines = 0;
    int rc = 0;
    if (!path)
        return 0;
    h->path = mem_strdup(path);
    if (!h->path)
        return err_set(e, ERR_MEMORY, "out of memory for the history");
    bool cut = false;
    if (read_tail(&b, &cut, path, &fe) && fe.code != ERR_NOT_FOUND) {
        *e = fe;
        rc = -1;
    }
    const char *whole = cut ? memchr(b.data, '\n', b.n) : b.data;
    for (size_t i = whole ? (size_t)(whole - b.data) : b.n; !rc && i < b.n;) {
        const char *end = memchr(b.data + i, '\n', b.n - i);
        size_t n = end ? (size_t)(end - (b.data + i)) : b.n - i;
        if (n && utf8_valid(b.data + i, n)) {
            char *entry = unescape(b.data + i, n);
            if (!entry || keep(h, entry)) {
                mem_free(entry);
                rc = err_set(e, ERR_MEMORY, "out of memory for the history");
            }
        }
        n_lines++;
        i += n + 1;
    }
    if (!rc && (cut || n_lines > 2 * HISTORY_MAX))
        rc = compact(h, e);
    buf_fini(&b);
    return rc;
}

static int append(const char *path, const char *text, struct err *e)
{
    struct buf b = {0};
    escape(&b, text);
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    int rc = -1;
    if (fd < 0)
        err_errno(e, "cannot write %s", path);
    else if (b.failed)
        err_set(e, ERR_MEMORY, "out of memory for the history");
    else /* with O_APPEND the offset is not looked at */
        rc = file_pwrite(fd, b.data, b.n, 0, path, e);
    if (fd >= 0)
        close(fd);
    buf_fini(&b);
    return rc;
}

int linehist_add(struct linehist *h, const char *text, struct err *e)
{
    size_t n = strlen(text);
    if (!n || n > HISTORY_ENTRY_BYTES || (h->n && !strcmp(h->v[h->n - 1], text)))
        return 0;
    char *entry = mem_strdup(text);
    if (!entry || keep(h, entry)) {
        mem_free(entry);
        return err_set(e, ERR_MEMORY, "out of memory for the history");
    }
    return h->path ? append(h->path, text, e) : 0;
}

void linehist_fini(struct linehist *h)
{
    for (size_t i = 0; i < h->n; i++)
        mem_free(h->v[i]);
    mem_free(h->v);
    mem_free(h->path);
    *h = (struct linehist){0};
}
