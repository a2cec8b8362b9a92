/* Strings of the template engine: Unicode characters over bytes that may be no UTF-8 (each bad part
 * then counts as one character), trimming, case, concatenation, Python's forms of text and floats.
 * Strings share bytes where they can: trimming, slicing and splitting copy nothing. All memory is
 * the rendering's arena. Character classes: utf8proc; case of one letter to several: Unicode
 * SpecialCasing.txt, the unconditional part. */
#include "text/template_internal.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <utf8proc.h>

/* ---- characters ---- */

size_t char_decode(uint32_t *cp, const char *p, size_t n)
{
    if ((uint8_t)*p < 0x80) {
        *cp = (uint8_t)*p;
        return 1;
    }
    int len = utf8_decode(cp, p, n);
    if (len > 0)
        return (size_t)len;
    *cp = 0xfffd;
    return (size_t)-len;
}

size_t char_len(const char *p, size_t n)
{
    uint32_t cp;
    return char_decode(&cp, p, n);
}

bool char_is_space(uint32_t cp)
{
    if (cp < 0x80)
        return cp == ' ' || (cp >= 9 && cp <= 13) || (cp >= 0x1c && cp <= 0x1f);
    return cp == 0x85 || cp == 0xa0 || cp == 0x1680 || (cp >= 0x2000 && cp <= 0x200a) ||
           cp == 0x2028 || cp == 0x2029 || cp == 0x202f || cp == 0x205f || cp == 0x3000;
}

bool char_is_printable(uint32_t cp)
{
    if (cp < 0x7f)
        return cp >= 0x20;
    switch (utf8proc_category((utf8proc_int32_t)cp)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS:
        return false;
    default:
        return true;
    }
}

bool char_is_alpha(uint32_t cp)
{
    if (cp < 0x80)
        return (cp | 0x20) >= 'a' && (cp | 0x20) <= 'z';
    utf8proc_category_t c = utf8proc_category((utf8proc_int32_t)cp);
    return c >= UTF8PROC_CATEGORY_LU && c <= UTF8PROC_CATEGORY_LO;
}

bool char_is_numeric(uint32_t cp)
{
    if (cp < 0x80)
        return cp >= '0' && cp <= '9';
    utf8proc_category_t c = utf8proc_category((utf8proc_int32_t)cp);
    return c >= UTF8PROC_CATEGORY_ND && c <= UTF8PROC_CATEGORY_NO;
}

bool char_is_cased(uint32_t cp, bool *upper)
{
    utf8proc_category_t c = utf8proc_category((utf8proc_int32_t)cp);
    *upper = c == UTF8PROC_CATEGORY_LU;
    return c == UTF8PROC_CATEGORY_LU || c == UTF8PROC_CATEGORY_LL || c == UTF8PROC_CATEGORY_LT;
}

const char *mem_find(const char *p, size_t n, const char *what, size_t n_what)
{
    return n_what ? memmem(p, n, what, n_what) : p;
}

/* ---- making and measuring ---- */

static struct tstr *tstr_new(struct render *r, const char *p, size_t n)
{
    struct tstr *s = render_alloc(r, sizeof *s);
    if (s)
        *s = (struct tstr){.p = p, .n = n, .n_chars = SIZE_MAX};
    return s;
}

int str_view(struct value *out, struct render *r, const char *p, size_t n)
{
    struct tstr *s = tstr_new(r, p, n);
    if (!s)
        return -1;
    *out = (struct value){.kind = V_STR, .s = s};
    return 0;
}

int str_new(struct value *out, struct render *r, const char *p, size_t n)
{
    char *copy = render_alloc(r, n);
    if (!copy || render_spend_bulk(r, n))
        return -1;
    if (n)
        memcpy(copy, p, n);
    return str_view(out, r, copy, n);
}

int str_cstr(struct value *out, struct render *r, const char *s)
{
    return str_view(out, r, s, strlen(s));
}

int str_sub(struct value *out, struct render *r, struct value of, size_t at, size_t n)
{
    if (n == of.s->n) {
        *out = of;
        return 0;
    }
    bool markup = of.markup;
    if (str_view(out, r, of.s->p + at, n))
        return -1;
    if (of.s->n_chars == of.s->n)
        out->s->n_chars = n;
    out->markup = markup;
    return 0;
}

size_t str_chars(struct tstr *s)
{
    if (s->n_chars != SIZE_MAX)
        return s->n_chars;
    size_t n = 0;
    for (size_t at = 0; at < s->n; n++)
        at += char_len(s->p + at, s->n - at);
    return s->n_chars = n;
}

uint64_t str_hash(struct tstr *s)
{
    if (!s->hash) {
        s->hash = hash_xxh3(s->p, s->n, 0).lo;
        s->hash += s->hash == 0;
    }
    return s->hash;
}

bool str_equal(const struct tstr *a, const struct tstr *b)
{
    return a == b || (a->n == b->n && !memcmp(a->p, b->p, a->n));
}

bool str_is(const struct tstr *s, const char *lit)
{
    return s->n == strlen(lit) && !memcmp(s->p, lit, s->n);
}

size_t str_byte_of(struct tstr *s, size_t index)
{
    size_t n = str_chars(s);
    if (index >= n)
        return s->n;
    if (n == s->n)
        return index;
    size_t at = 0;
    while (index--)
        at += char_len(s->p + at, s->n - at);
    return at;
}

/* ---- concatenation ---- */

static int concat_fresh(struct value *out, struct render *r, const struct tstr *a,
                        const struct tstr *b)
{
    size_t n, cap;
    if (add_over(a->n, b->n, &n))
        return render_over(r, "a string's size");
    /* Only what already grew by concatenation is likely to grow again. */
    if (add_over(n, a->b ? n : 16, &cap) || add_over(cap, sizeof(struct strbuf), &cap))
        return render_over(r, "a string's size");
    struct strbuf *box = render_alloc(r, cap);
    if (!box || render_spend_bulk(r, n))
        return -1;
    box->cap = cap - sizeof *box;
    box->used = n;
    if (a->n)
        memcpy(box->data, a->p, a->n);
    if (b->n)
        memcpy(box->data + a->n, b->p, b->n);
    if (str_view(out, r, box->data, n))
        return -1;
    out->s->b = box;
    return 0;
}

static int concat_plain(struct value *out, struct render *r, struct tstr *a, struct tstr *b)
{
    struct strbuf *box = a->b;
    bool at_end = box && a->p + a->n == box->data + box->used && box->cap - box->used >= b->n;
    if (!at_end) {
        if (concat_fresh(out, r, a, b))
            return -1;
    } else {
        if (render_spend_bulk(r, b->n))
            return -1;
        if (b->n)
            memmove(box->data + box->used, b->p, b->n);
        box->used += b->n;
        if (str_view(out, r, a->p, a->n + b->n))
            return -1;
        out->s->b = box;
    }
    if (a->n_chars != SIZE_MAX && b->n_chars != SIZE_MAX && utf8_tail(a->p, a->n) == 0)
        out->s->n_chars = a->n_chars + b->n_chars;
    return 0;
}

int str_concat(struct value *out, struct render *r, struct value a, struct value b)
{
    bool markup = a.markup || b.markup;
    if (markup &&
        ((!a.markup && str_escape_html(&a, r, a)) || (!b.markup && str_escape_html(&b, r, b))))
        return -1;
    if (concat_plain(out, r, a.s, b.s))
        return -1;
    out->markup = markup;
    return 0;
}

/* ---- trimming ---- */

/* To be trimmed? 1 or 0, or -1 when the budget is used up: a long set is searched every time. */
static int in_set(struct render *r, const struct tstr *set, const char *p, size_t len, uint32_t cp)
{
    if (!set)
        return char_is_space(cp);
    return render_spend_bulk(r, set->n) ? -1 : mem_find(set->p, set->n, p, len) != NULL;
}

int str_trim(struct value *out, struct render *r, struct value s, const struct tstr *set, int ends)
{
    const char *p = s.s->p;
    size_t from = 0, to = s.s->n;
    int rc = 0;
    while ((ends & TRIM_LEFT) && from < to) {
        uint32_t cp;
        size_t len = char_decode(&cp, p + from, to - from);
        if ((rc = in_set(r, set, p + from, len, cp)) <= 0)
            break;
        from += len;
    }
    while (rc >= 0 && (ends & TRIM_RIGHT) && to > from) {
        uint32_t cp;
        size_t at = to - 1;
        while (at > from && ((uint8_t)p[at] & 0xc0) == 0x80)
            at--;
        size_t len = char_decode(&cp, p + at, to - at);
        if (at + len != to || (rc = in_set(r, set, p + at, len, cp)) <= 0)
            break;
        to = at;
    }
    if (rc < 0 || render_spend_chars(r, s.s->n - (to - from)))
        return -1;
    return str_sub(out, r, s, from, to - from);
}

/* ---- case ---- */

static const struct special_case {
    uint32_t cp;
    const char *upper, *title; /* title NULL: as upper */
} special_cases[] = {
    {0xdf, "SS", "Ss"},
    {0x149, "\xca\xbcN", NULL},
    {0x1f0, "J\xcc\x8c", NULL},
    {0x390, "\xce\x99\xcc\x88\xcc\x81", NULL},
    {0x3b0, "\xce\xa5\xcc\x88\xcc\x81", NULL},
    {0x587, "\xd4\xb5\xd5\x92", "\xd4\xb5\xd6\x82"},
    {0x1e96, "H\xcc\xb1", NULL},
    {0x1e97, "T\xcc\x88", NULL},
    {0x1e98, "W\xcc\x8a", NULL},
    {0x1e99, "Y\xcc\x8a", NULL},
    {0x1e9a, "A\xca\xbe", NULL},
    {0xfb00, "FF", "Ff"},
    {0xfb01, "FI", "Fi"},
    {0xfb02, "FL", "Fl"},
    {0xfb03, "FFI", "Ffi"},
    {0xfb04, "FFL", "Ffl"},
    {0xfb05, "ST", "St"},
    {0xfb06, "ST", "St"},
};

static int put_char(struct render *r, uint32_t cp)
{
    char bytes[4];
    return render_put(r, bytes, (size_t)utf8_encode(bytes, cp));
}

static int put_upper(struct render *r, uint32_t cp, bool title)
{
    for (size_t i = 0; cp >= 0xdf && i < ARRAY_LEN(special_cases); i++) {
        const struct special_case *s = &special_cases[i];
        if (s->cp == cp)
            return render_puts(r, title && s->title ? s->title : s->upper);
    }
    utf8proc_int32_t c = (utf8proc_int32_t)cp;
    return put_char(r, (uint32_t)(title ? utf8proc_totitle(c) : utf8proc_toupper(c)));
}

/* A capital sigma that ends a word (SpecialCasing.txt, Final_Sigma) has its own small form. */
static bool is_final_sigma(const struct tstr *s, size_t at, size_t len, bool after_cased)
{
    uint32_t cp;
    bool upper;
    if (!after_cased)
        return false;
    if (at + len >= s->n)
        return true;
    char_decode(&cp, s->p + at + len, s->n - at - len);
    return !char_is_cased(cp, &upper);
}

static int put_lower(struct render *r, const struct tstr *s, size_t at, size_t len,
                     bool after_cased)
{
    uint32_t cp;
    char_decode(&cp, s->p + at, len);
    if (cp == 0x130)
        return render_puts(r, "i\xcc\x87");
    if (cp == 0x3a3)
        return put_char(r, is_final_sigma(s, at, len, after_cased) ? 0x3c2 : 0x3c3);
    return put_char(r, (uint32_t)utf8proc_tolower((utf8proc_int32_t)cp));
}

static int put_folded(struct render *r, uint32_t cp)
{
    utf8proc_int32_t to[8];
    int boundary = 0;
    utf8proc_ssize_t n = utf8proc_decompose_char((utf8proc_int32_t)cp, to, ARRAY_LEN(to),
                                                 UTF8PROC_CASEFOLD, &boundary);
    if (n < 1 || n > (utf8proc_ssize_t)ARRAY_LEN(to))
        return put_char(r, cp);
    for (utf8proc_ssize_t i = 0; i < n; i++)
        if (put_char(r, (uint32_t)to[i]))
            return -1;
    return 0;
}

static bool is_ascii(const struct tstr *s)
{
    for (size_t i = 0; i < s->n; i++)
        if ((uint8_t)s->p[i] >= 0x80)
            return false;
    return true;
}

static int recase_ascii(struct value *out, struct render *r, struct value s, enum str_case how)
{
    char *to = render_alloc(r, s.s->n);
    bool inside = false;
    if (!to)
        return -1;
    for (size_t i = 0; i < s.s->n; i++) {
        char c = s.s->p[i];
        bool lower = c >= 'a' && c <= 'z', upper = c >= 'A' && c <= 'Z';
        bool up = how == CASE_UPPER || (how == CASE_TITLE && !inside) ||
                  (how == CASE_CAPITAL && i == 0) || (how == CASE_SWAP && lower);
        to[i] = up && lower ? (char)(c - 32) : !up && upper ? (char)(c + 32) : c;
        inside = lower || upper;
    }
    return str_view(out, r, to, s.s->n);
}

int str_recase(struct value *out, struct render *r, struct value s, enum str_case how)
{
    size_t mark = render_mark(r);
    bool inside = false; /* the character before was cased */
    if (render_spend_chars(r, s.s->n))
        return -1;
    if (is_ascii(s.s)) {
        bool plain = !s.markup;
        if (recase_ascii(out, r, s, how))
            return -1;
        out->markup = !plain;
        return 0;
    }
    if (render_spend(r, s.s->n))
        return -1;
    for (size_t at = 0, len; at < s.s->n; at += len) {
        uint32_t cp;
        bool upper, cased;
        len = char_decode(&cp, s.s->p + at, s.s->n - at);
        cased = char_is_cased(cp, &upper);
        bool first = how == CASE_TITLE ? !inside : at == 0;
        int rc;
        if (how == CASE_FOLD)
            rc = put_folded(r, cp);
        else if (how == CASE_UPPER || (how == CASE_SWAP && cased && !upper))
            rc = put_upper(r, cp, false);
        else if ((how == CASE_TITLE || how == CASE_CAPITAL) && first)
            rc = put_upper(r, cp, true);
        else if (how == CASE_SWAP && !cased)
            rc = put_char(r, cp);
        else
            rc = put_lower(r, s.s, at, len, inside);
        if (rc)
            return -1;
        inside = cased;
    }
    bool markup = s.markup;
    if (render_take(out, r, mark))
        return -1;
    out->markup = markup;
    return 0;
}

/* ---- replacing, escaping ---- */

/* Python puts the replacement around every character when it looks for nothing. */
static int replace_nothing(struct render *r, const struct tstr *s, const struct tstr *to,
                           int64_t max)
{
    for (size_t at = 0;; max--) {
        if (max == 0)
            return render_put(r, s->p + at, s->n - at);
        if (render_put(r, to->p, to->n))
            return -1;
        if (at >= s->n)
            return 0;
        size_t len = char_len(s->p + at, s->n - at);
        if (render_put(r, s->p + at, len))
            return -1;
        at += len;
    }
}

int str_replace(struct value *out, struct render *r, struct value s, const struct value from_to[2],
                int64_t max)
{
    const struct tstr *from = from_to[0].s, *to = from_to[1].s;
    size_t mark = render_mark(r), at = 0;
    if (render_spend_bulk(r, s.s->n))
        return -1;
    if (!from->n) {
        if (render_spend_chars(r, s.s->n) || replace_nothing(r, s.s, to, max))
            return -1;
        return render_take(out, r, mark);
    }
    const char *hit;
    if (max == 0 || !mem_find(s.s->p, s.s->n, from->p, from->n)) {
        *out = s;
        return 0;
    }
    while (max-- != 0 && (hit = mem_find(s.s->p + at, s.s->n - at, from->p, from->n))) {
        size_t to_hit = (size_t)(hit - s.s->p);
        if (render_put(r, s.s->p + at, to_hit - at) || render_put(r, to->p, to->n) ||
            render_spend(r, 1))
            return -1;
        at = to_hit + from->n;
    }
    if (render_put(r, s.s->p + at, s.s->n - at))
        return -1;
    return render_take(out, r, mark);
}

int str_escape_html(struct value *out, struct render *r, struct value s)
{
    size_t mark = render_mark(r), done = 0;
    if (render_spend_chars(r, s.s->n))
        return -1;
    for (size_t i = 0; i < s.s->n; i++) {
        char c = s.s->p[i];
        const char *to = c == '&'    ? "&amp;"
                         : c == '<'  ? "&lt;"
                         : c == '>'  ? "&gt;"
                         : c == '"'  ? "&#34;"
                         : c == '\'' ? "&#39;"
                                     : NULL;
        if (!to)
            continue;
        if (render_put(r, s.s->p + done, i - done) || render_puts(r, to))
            return -1;
        done = i + 1;
    }
    if (render_put(r, s.s->p + done, s.s->n - done) || render_take(out, r, mark))
        return -1;
    out->markup = true;
    return 0;
}

/* ---- Python's forms ---- */

/* The fewest digits that read back as f, as "d.ddde+xx"; returns how many. */
static int shortest_digits(char sci[40], double f)
{
    /* Up to 15 digits survive the way to a double and back, so zeros at the end of 15 are padding;
     * subnormal numbers hold fewer, and each count is tried. */
    int from = fabs(f) < DBL_MIN ? 1 : 15, digits = from;
    for (; digits < 17; digits++) {
        snprintf(sci, 40, "%.*e", digits - 1, f);
        if (strtod(sci, NULL) == f)
            break;
    }
    if (digits == 17)
        snprintf(sci, 40, "%.16e", f);
    if (digits != 15 || from == 1)
        return digits;
    char *e = strchr(sci, 'e'), *end = e;
    while (end[-1] == '0')
        end--;
    end -= end[-1] == '.';
    memmove(end, e, strlen(e) + 1);
    int n = 0;
    for (const char *p = sci; p < end; p++)
        n += *p >= '0' && *p <= '9';
    return n;
}

/* Laid out as Python's repr does it: plain for exponents -4 to 15, else scientific. */
void float_repr(char out[32], double f)
{
    if (isnan(f) || isinf(f)) {
        strcpy(out, isnan(f) ? "nan" : f < 0 ? "-inf" : "inf");
        return;
    }
    char sci[40];
    int digits = shortest_digits(sci, f);
    int exp10 = atoi(strchr(sci, 'e') + 1);
    if (exp10 >= -4 && exp10 < 16) {
        int places = MAX(digits - 1 - exp10, 1);
        snprintf(out, 32, "%.*f", places, f);
        return;
    }
    *strchr(sci, 'e') = 0;
    snprintf(out, 32, "%.24se%c%02u", sci, exp10 < 0 ? '-' : '+', (unsigned)abs(exp10) % 1000);
}

static int put_escaped(struct render *r, uint32_t cp, char quote)
{
    char esc[16];
    if (cp == (uint8_t)quote || cp == '\\')
        snprintf(esc, sizeof esc, "\\%c", (char)cp);
    else if (cp == '\n' || cp == '\r' || cp == '\t')
        snprintf(esc, sizeof esc, "\\%c", cp == '\n' ? 'n' : cp == '\r' ? 'r' : 't');
    else
        snprintf(esc, sizeof esc,
                 cp < 0x100     ? "\\x%02x"
                 : cp < 0x10000 ? "\\u%04x"
                                : "\\U%08x",
                 cp);
    return render_puts(r, esc);
}

int put_str_repr(struct render *r, const struct tstr *s)
{
    bool single = memchr(s->p, '\'', s->n) != NULL, twice = memchr(s->p, '"', s->n) != NULL;
    char quote = single && !twice ? '"' : '\'';
    if (render_spend_chars(r, s->n) || render_put(r, &quote, 1))
        return -1;
    size_t done = 0;
    for (size_t at = 0, len; at < s->n; at += len) {
        uint32_t cp;
        len = char_decode(&cp, s->p + at, s->n - at);
        if (cp != (uint8_t)quote && cp != '\\' && char_is_printable(cp))
            continue;
        if (render_put(r, s->p + done, at - done) || put_escaped(r, cp, quote))
            return -1;
        done = at + len;
    }
    return render_put(r, s->p + done, s->n - done) || render_put(r, &quote, 1) ? -1 : 0;
}
