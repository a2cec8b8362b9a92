/* NFC (Unicode Standard Annex 15) for the tokenizers whose models were trained on it. The tables
 * are utf8proc's; the canonical ordering is done here, because the library's is quadratic in a run
 * of marks. Memory: a temporary of 4 bytes a code point, freed before return. */
#include "text/text_internal.h"

#include <string.h>
#include <utf8proc.h>

bool nfc_is_trivial(const char *p, size_t n)
{
    /* Lead bytes from CC on start the characters from U+0300 up; all below are composed and
     * take part in nothing by themselves. */
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)p[i] >= 0xcc)
            return false;
    return true;
}

struct code_points {
    int32_t *v;
    size_t n, cap;
};

static int points_room(struct code_points *c, size_t more)
{
    if (c->cap - c->n >= more)
        return 0;
    size_t cap = c->cap * 2 + more, bytes;
    if (mul_over(cap, sizeof *c->v, &bytes))
        return -1;
    int32_t *v = mem_realloc(c->v, bytes);
    if (!v)
        return -1;
    c->v = v;
    c->cap = cap;
    return 0;
}

static int points_decompose(struct code_points *c, const char *p, size_t n)
{
    enum { LONGEST = 32 }; /* the longest canonical decomposition has 4 code points */
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        int last_class = 0;
        int len = utf8_decode(&cp, p + i, n - i);
        if (points_room(c, LONGEST))
            return -1;
        utf8proc_ssize_t k = utf8proc_decompose_char((utf8proc_int32_t)cp, c->v + c->n, LONGEST,
                                                     UTF8PROC_DECOMPOSE, &last_class);
        CHECK(len > 0 && k > 0 && k <= LONGEST);
        c->n += (size_t)k;
        i += (size_t)len;
    }
    return 0;
}

static inline uint8_t class_of(int32_t cp)
{
    return cp < 0x300 ? 0 : (uint8_t)utf8proc_get_property(cp)->combining_class;
}

/* Stable sort of one run of marks by combining class, by counting. */
static int run_sort(int32_t *v, size_t n)
{
    size_t start[257] = {0};
    int32_t *copy = mem_array(n, sizeof *copy);
    if (!copy)
        return -1;
    memcpy(copy, v, n * sizeof *v);
    for (size_t i = 0; i < n; i++)
        start[class_of(v[i]) + 1]++;
    for (size_t k = 0; k < 256; k++)
        start[k + 1] += start[k];
    for (size_t i = 0; i < n; i++)
        v[start[class_of(copy[i])]++] = copy[i];
    mem_free(copy);
    return 0;
}

static int points_order(struct code_points *c)
{
    for (size_t i = 0; i < c->n;) {
        if (!class_of(c->v[i])) {
            i++;
            continue;
        }
        size_t from = i;
        bool sorted = true;
        uint8_t last = 0;
        for (; i < c->n && class_of(c->v[i]); i++) {
            sorted &= class_of(c->v[i]) >= last;
            last = class_of(c->v[i]);
        }
        if (!sorted && run_sort(c->v + from, i - from))
            return -1;
    }
    return 0;
}

/* Normalize what starts at a boundary and ends at one. */
static int stretch_normalize(struct buf *out, struct code_points *c, const char *p, size_t n)
{
    c->n = 0;
    if (points_decompose(c, p, n) || points_order(c))
        return -1;
    utf8proc_ssize_t k =
        utf8proc_normalize_utf32(c->v, (utf8proc_ssize_t)c->n, UTF8PROC_COMPOSE | UTF8PROC_STABLE);
    CHECK(k >= 0);
    for (utf8proc_ssize_t i = 0; i < k; i++) {
        char s[4];
        buf_put(out, s, (size_t)utf8_encode(s, (uint32_t)c->v[i]));
    }
    return 0;
}

/* Between two ASCII characters nothing composes or is reordered. So only the stretches that are not
 * ASCII are worked on, each with the one ASCII character before it, which a mark may join. */
int nfc_normalize(struct buf *out, const char *p, size_t n, struct err *e)
{
    struct code_points c = {0};
    int rc = 0;
    buf_clear(out);
    for (size_t from = 0; from < n && !rc;) {
        size_t at = from, end;
        while (at < n && (unsigned char)p[at] < 0x80)
            at++;
        if (at > from && at < n)
            at--;
        buf_put(out, p + from, at - from);
        for (end = at + (at < n); end < n && (unsigned char)p[end] >= 0x80;)
            end++;
        if (nfc_is_trivial(p + at, end - at))
            buf_put(out, p + at, end - at);
        else
            rc = stretch_normalize(out, &c, p + at, end - at);
        from = end;
    }
    mem_free(c.v);
    return rc || out->failed ? err_set(e, ERR_MEMORY, "no memory to normalize %zu bytes", n) : 0;
}
