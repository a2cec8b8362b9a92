/* Python's ways to format: "..." % args, "...".format(...), and strftime on a time in UTC. Sources:
 * Python 3 library reference, "printf-style String Formatting" and "Format Specification
 * Mini-Language"; C99 7.23.3.5 for strftime. */
#include "text/template_internal.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { MAX_PRECISION = 100, MAX_WIDTH = 1 << 20 };

struct spec {
    char fill[4];
    uint8_t n_fill;           /* bytes of fill; 0 = blank */
    char align;               /* < > = ^ or 0 */
    char sign;                /* + - blank or 0 */
    char group;               /* , _ or 0 */
    char type;                /* 0: by the value */
    bool alt, zero;           /* # and 0 */
    int64_t width, precision; /* precision -1: not given */
};

/* ---- laying out ---- */

static int put_padded(struct render *r, const struct spec *s, const char *text, size_t n,
                      int64_t chars)
{
    int64_t gap = s->width > chars ? s->width - chars : 0;
    int64_t left = s->align == '>' ? gap : s->align == '^' ? gap / 2 : 0;
    for (int64_t i = 0; i <= gap; i++) {
        if (i == left && render_put(r, text, n))
            return -1;
        if (i < gap && (render_spend(r, 1) ||
                        render_put(r, s->n_fill ? s->fill : " ", s->n_fill ? s->n_fill : 1)))
            return -1;
    }
    return 0;
}

static int put_text(struct render *r, const struct spec *s, struct value v)
{
    struct spec left = *s;
    if (!left.align)
        left.align = '<';
    size_t n = v.s->n;
    int64_t chars;
    if (val_len(&chars, r, v))
        return -1;
    if (s->precision >= 0 && s->precision < chars) {
        n = str_byte_of(v.s, (size_t)s->precision);
        chars = s->precision;
    }
    return put_padded(r, &left, v.s->p, n, chars);
}

/* Digits into groups of three (four for other bases than ten). */
static size_t group_digits(char *out, const char *digits, size_t n, char group, size_t size)
{
    size_t to = 0;
    for (size_t i = 0; i < n; i++) {
        if (group && i && (n - i) % size == 0)
            out[to++] = group;
        out[to++] = digits[i];
    }
    return to;
}

/* Zeros in front when they are to be grouped too: until the groups fill `room`. */
static size_t pad_zeros(char *out, const char *digits, size_t n, const struct spec *s, int64_t room)
{
    size_t zeros = 0, size = strchr("xXob", s->type) && s->type ? 4 : 3;
    while (s->zero && s->group && !s->align && n + zeros < 500 &&
           (int64_t)(n + zeros + (n + zeros - 1) / size) < room)
        zeros++;
    memset(out, '0', zeros);
    memcpy(out + zeros, digits, n);
    return n + zeros;
}

/* sign, prefix, digits with grouping, the rest (fraction, exponent, percent sign). */
static int put_number(struct render *r, const struct spec *s, bool minus, const char *prefix,
                      const char *digits)
{
    char text[1400], body[1000];
    size_t whole = strspn(digits, "0123456789abcdefABCDEF");
    if (render_spend(r, 20 + strlen(digits)))
        return -1;
    bool decimal = !strchr("xXob", s->type) || !s->type;
    if (decimal)
        whole = strspn(digits, "0123456789");
    char padded[600];
    int64_t fixed = (int64_t)(strlen(prefix) + strlen(digits + whole)) + (minus || s->sign);
    size_t n_digits = pad_zeros(padded, digits, whole, s, s->width - fixed);
    size_t n = group_digits(body, padded, n_digits, s->group, decimal ? 3 : 4);
    size_t rest = MIN(strlen(digits + whole), sizeof body - 1 - n);
    memcpy(body + n, digits + whole, rest);
    n += rest;
    body[n] = 0;
    char sign[2] = {minus ? '-' : s->sign == '+' || s->sign == ' ' ? s->sign : 0, 0};
    struct spec pad = *s;
    if (!pad.align)
        pad.align = s->zero ? '=' : '>';
    if (s->zero && !s->n_fill) {
        pad.fill[0] = '0';
        pad.n_fill = 1;
    }
    if (pad.align != '=') {
        int total = snprintf(text, sizeof text, "%s%s%s", sign, prefix, body);
        return put_padded(r, &pad, text, (size_t)total, total);
    }
    size_t head = strlen(sign) + strlen(prefix);
    pad.width -= (int64_t)head;
    pad.align = '>';
    return render_puts(r, sign) || render_puts(r, prefix) ||
                   put_padded(r, &pad, body, n, (int64_t)n)
               ? -1
               : 0;
}

static int put_int(struct render *r, const struct spec *s, int64_t i)
{
    char digits[80];
    uint64_t u = i < 0 ? 0 - (uint64_t)i : (uint64_t)i;
    char type = s->type ? s->type : 'd';
    unsigned base = (type | 0x20) == 'x' ? 16 : type == 'o' ? 8 : type == 'b' ? 2 : 10;
    size_t at = sizeof digits - 1;
    digits[at] = 0;
    do {
        digits[--at] = (type == 'X' ? "0123456789ABCDEF" : "0123456789abcdef")[u % base];
        u /= base;
    } while (u);
    int64_t least = MIN(s->precision, (int64_t)60);
    while ((int64_t)(sizeof digits - 1 - at) < least)
        digits[--at] = '0';
    char prefix[3] = {'0', type, 0};
    return put_number(r, s, i < 0, s->alt && base != 10 ? prefix : "", digits + at);
}

static int put_float(struct render *r, const struct spec *s, double f)
{
    char digits[500];
    if (s->precision > MAX_PRECISION)
        return render_fail(r, "a number's precision may be at most %d", MAX_PRECISION);
    int precision = s->precision < 0 ? 6 : (int)s->precision;
    double a = fabs(f);
    switch (s->type) {
    case 'e':
    case 'E':
        snprintf(digits, sizeof digits, s->type == 'e' ? "%.*e" : "%.*E", precision, a);
        break;
    case 'g':
    case 'G':
        snprintf(digits, sizeof digits, s->type == 'g' ? "%.*g" : "%.*G", precision, a);
        break;
    case '%':
        snprintf(digits, sizeof digits, "%.*f%%", precision, a * 100);
        break;
    case 0:
        if (s->precision < 0) {
            float_repr(digits, a);
            break;
        }
        snprintf(digits, sizeof digits, "%.*g", precision, a);
        if (isfinite(a) && !strpbrk(digits, ".e"))
            strcat(digits, ".0");
        break;
    default:
        snprintf(digits, sizeof digits, "%.*f", precision, a);
    }
    return put_number(r, s, signbit(f) && !isnan(f), "", digits);
}

static int put_formatted(struct render *r, const struct spec *s, struct value v)
{
    bool whole = v.kind == V_INT || v.kind == V_BOOL, typed = s->type && s->type != 's';
    if (v.kind == V_UNDEFINED && typed)
        return undefined_use(r, v);
    if (v.kind == V_BOOL && !s->type)
        whole = false;
    if (whole && (!s->type || strchr("dxXobn", s->type)))
        return put_int(r, s, v.kind == V_INT ? v.i : (int64_t)v.b);
    if (val_is_number(v) && (v.kind == V_FLOAT ? !s->type : false))
        return put_float(r, s, v.f);
    if (val_is_number(v) && s->type && strchr("eEfFgG%", s->type))
        return put_float(r, s, val_double(v));
    if (typed)
        return render_fail(r, "format '%c' does not take a value of type %s", s->type, val_type(v));
    struct value text;
    return val_str(&text, r, v) || put_text(r, s, text) ? -1 : 0;
}

/* ---- "..." % args ---- */

struct percent {
    const char *p, *end;
    struct value args;
    size_t next; /* of a tuple */
};

static int next_arg(struct value *out, struct render *r, struct percent *f)
{
    size_t have = f->args.kind == V_TUPLE ? f->args.l->n : 1;
    if (f->next >= have)
        return render_fail(r, "not enough arguments for the format string");
    *out = f->args.kind == V_TUPLE ? f->args.l->v[f->next] : f->args;
    f->next++;
    return 0;
}

static int read_count(int64_t *out, struct render *r, struct percent *f)
{
    if (f->p < f->end && *f->p == '*') {
        struct value v = VAL_NONE;
        f->p++;
        if (next_arg(&v, r, f))
            return -1;
        if (v.kind != V_INT || v.i < 0 || v.i > MAX_WIDTH)
            return render_fail(r, "* in a format needs a whole number up to %d", MAX_WIDTH);
        *out = v.i;
        return 0;
    }
    for (*out = 0; f->p < f->end && isdigit((uint8_t)*f->p); f->p++)
        if ((*out = *out * 10 + (*f->p - '0')) > MAX_WIDTH)
            return render_fail(r, "a width in a format is over %d", MAX_WIDTH);
    return 0;
}

/* %(name): the named item of a dict. */
static int read_name(struct value *out, struct render *r, struct percent *f)
{
    const char *close = memchr(f->p, ')', (size_t)(f->end - f->p));
    struct value key, *v;
    if (!close)
        return render_fail(r, "a format has %%( without )");
    if (f->args.kind != V_DICT)
        return render_fail(r, "a format with names needs a dict");
    if (str_view(&key, r, f->p + 1, (size_t)(close - f->p - 1)) || dict_find(&v, r, f->args.d, key))
        return -1;
    if (!v)
        return render_fail(r, "a format names '%.*s', which is not there",
                           (int)MIN(key.s->n, (size_t)60), key.s->p);
    *out = *v;
    f->p = close + 1;
    return 0;
}

static void read_flags(struct spec *s, struct percent *f)
{
    for (; f->p < f->end && *f->p && strchr("-+ #0", *f->p); f->p++) {
        if (*f->p == '-')
            s->align = '<';
        else if (*f->p == '#')
            s->alt = true;
        else if (*f->p == '0')
            s->zero = true;
        else if (s->sign != '+')
            s->sign = *f->p;
    }
}

static int put_conversion(struct render *r, struct spec *s, char type, struct value v)
{
    struct value text;
    size_t mark = render_mark(r);
    if (!s->align)
        s->align = s->zero && !strchr("srca", type) ? 0 : '>';
    if (s->align == '<')
        s->zero = false;
    if (strchr("diu", type)) {
        s->type = 'd';
        if (v.kind == V_FLOAT && isfinite(v.f) && fabs(v.f) < 9.2e18)
            v = VAL_INT((int64_t)v.f);
        return put_formatted(r, s, v);
    }
    if (strchr("xXoeEfFgG", type)) {
        s->type = type;
        return put_formatted(r, s, v);
    }
    if (type == 'r' || type == 'a') {
        if (put_repr(r, v) || render_take(&text, r, mark))
            return -1;
        return put_text(r, s, text);
    }
    if (type == 'c' && v.kind == V_INT) {
        char bytes[4];
        int n = utf8_encode(bytes, (uint32_t)MIN((uint64_t)v.i, (uint64_t)0x110000));
        return str_new(&text, r, bytes, (size_t)n) || put_text(r, s, text) ? -1 : 0;
    }
    if (type != 's' && type != 'c')
        return render_fail(r, "a format has no conversion '%c'", type > 0x20 ? type : '?');
    return val_str(&text, r, v) || put_text(r, s, text) ? -1 : 0;
}

static int percent_one(struct render *r, struct percent *f) /* behind the % */
{
    struct spec s = {.precision = -1};
    struct value v = {.kind = V_MISSING};
    if (f->p < f->end && *f->p == '(' && read_name(&v, r, f))
        return -1;
    read_flags(&s, f);
    if (read_count(&s.width, r, f))
        return -1;
    if (f->p < f->end && *f->p == '.') {
        f->p++;
        if (read_count(&s.precision, r, f))
            return -1;
    }
    while (f->p < f->end && *f->p && strchr("hlL", *f->p))
        f->p++;
    if (f->p >= f->end || !*f->p)
        return render_fail(r, "a format ends behind its %%");
    char type = *f->p++;
    if (type == '%')
        return render_puts(r, "%");
    if (v.kind == V_MISSING && next_arg(&v, r, f))
        return -1;
    return put_conversion(r, &s, type, v);
}

int format_percent(struct value *out, struct render *r, struct value fmt, struct value args)
{
    struct percent f = {.p = fmt.s->p, .end = fmt.s->p + fmt.s->n, .args = args};
    size_t mark = render_mark(r);
    while (f.p < f.end) {
        const char *hit = memchr(f.p, '%', (size_t)(f.end - f.p)), *stop = hit ? hit : f.end;
        if (render_put(r, f.p, (size_t)(stop - f.p)) || render_spend(r, 1))
            return -1;
        f.p = stop + (hit != NULL);
        if (hit && percent_one(r, &f))
            return -1;
    }
    /* Containers may be there only to be looked into, so that they are never left over. */
    bool box = args.kind == V_DICT || args.kind == V_LIST || args.kind == V_RANGE ||
               args.kind == V_UNDEFINED;
    bool spare = args.kind == V_TUPLE ? f.next < args.l->n : f.next == 0 && !box;
    if (spare)
        return render_fail(r, "not all arguments are used by the format string");
    return render_take(out, r, mark);
}

/* ---- "...".format() ---- */

struct braces {
    const struct call *c;
    size_t next; /* automatic number */
};

static int parse_spec(struct spec *s, struct render *r, const char *p, size_t n)
{
    *s = (struct spec){.precision = -1};
    const char *end = p + n;
    size_t first = n ? char_len(p, n) : 0;
    if (first < n && strchr("<>=^", p[first]) && p[first]) {
        memcpy(s->fill, p, first);
        s->n_fill = (uint8_t)first;
        s->align = p[first];
        p += first + 1;
    } else if (n && *p && strchr("<>=^", *p)) {
        s->align = *p++;
    }
    if (p < end && *p && strchr("+- ", *p))
        s->sign = *p++;
    if (p < end && *p == '#')
        s->alt = *p++;
    if (p < end && *p == '0')
        s->zero = *p++;
    for (; p < end && isdigit((uint8_t)*p) && s->width < MAX_WIDTH; p++)
        s->width = s->width * 10 + (*p - '0');
    if (p < end && *p && strchr(",_", *p))
        s->group = *p++;
    if (p < end && *p == '.')
        for (s->precision = 0, p++; p < end && isdigit((uint8_t)*p) && s->precision < MAX_WIDTH;
             p++)
            s->precision = s->precision * 10 + (*p - '0');
    if (p < end && *p && strchr("bcdeEfFgGnosxX%", *p))
        s->type = *p++;
    return p == end ? 0 : render_fail(r, "a format specification is not understood");
}

static int field_base(struct value *out, struct render *r, struct braces *b, const char *p,
                      size_t n)
{
    size_t at = 0;
    bool number = n == 0;
    if (n == 0) {
        at = b->next++;
    } else if (isdigit((uint8_t)p[0])) {
        number = true;
        for (size_t i = 0; i < n && at < MAX_WIDTH; i++)
            at = at * 10 + (size_t)(p[i] - '0');
    }
    if (number && at < b->c->n_pos) {
        *out = b->c->pos[at];
        return 0;
    }
    for (uint32_t i = 0; !number && i < b->c->n_kw; i++)
        if (b->c->kw[i].name->n == n && !memcmp(b->c->kw[i].name->p, p, n)) {
            *out = b->c->kw[i].v;
            return 0;
        }
    return render_fail(r, "format() has no argument for '{%.*s}'", (int)MIN(n, (size_t)60), p);
}

/* All of it digits, and a number that fits: an index, else a key. */
static bool read_index(int64_t *out, const char *p, size_t n)
{
    *out = 0;
    for (size_t i = 0; i < n; i++)
        if (!isdigit((uint8_t)p[i]) || mul_over(*out, (int64_t)10, out) ||
            add_over(*out, (int64_t)(p[i] - '0'), out))
            return false;
    return n > 0;
}

/* name, then .attribute and [item] as often as wanted. */
static int field_value(struct value *out, struct render *r, struct braces *b, const char *p,
                       size_t n)
{
    size_t at = 0;
    while (at < n && p[at] != '.' && p[at] != '[')
        at++;
    if (field_base(out, r, b, p, at))
        return -1;
    while (at < n) {
        bool item = p[at] == '[';
        size_t from = ++at;
        while (at < n && (item ? p[at] != ']' : p[at] != '.' && p[at] != '['))
            at++;
        struct value key;
        int64_t i;
        if (item && read_index(&i, p + from, at - from))
            key = VAL_INT(i);
        else if (str_new(&key, r, p + from, at - from))
            return -1;
        if (item ? get_item(out, r, *out, key) : get_attr(out, r, *out, key, NULL))
            return -1;
        at += item;
    }
    return 0;
}

static int put_field(struct render *r, struct braces *b, const char *p, size_t n)
{
    const char *colon = memchr(p, ':', n), *bang = memchr(p, '!', colon ? (size_t)(colon - p) : n);
    size_t name = bang ? (size_t)(bang - p) : colon ? (size_t)(colon - p) : n;
    struct value v;
    struct spec s;
    if (field_value(&v, r, b, p, name) ||
        parse_spec(&s, r, colon ? colon + 1 : p, colon ? n - (size_t)(colon + 1 - p) : 0))
        return -1;
    if (bang && bang + 1 < p + n) {
        size_t mark = render_mark(r);
        if ((bang[1] == 's' ? put_str(r, v) : put_repr(r, v)) || render_take(&v, r, mark))
            return -1;
    }
    return put_formatted(r, &s, v);
}

int format_braces(struct value *out, struct render *r, struct value fmt, const struct call *c)
{
    struct braces b = {.c = c};
    const char *p = fmt.s->p, *end = p + fmt.s->n;
    size_t mark = render_mark(r);
    while (p < end) {
        const char *from = p;
        while (p < end && *p != '{' && *p != '}')
            p++;
        if (render_put(r, from, (size_t)(p - from)) || render_spend(r, 1))
            return -1;
        if (p >= end)
            break;
        if (p + 1 < end && p[1] == p[0]) {
            if (render_put(r, p, 1))
                return -1;
            p += 2;
            continue;
        }
        const char *close = *p == '{' ? memchr(p, '}', (size_t)(end - p)) : NULL;
        if (!close)
            return render_fail(r, "a format string has a single '%c'", *p);
        if (put_field(r, &b, p + 1, (size_t)(close - p - 1)))
            return -1;
        p = close + 1;
    }
    bool markup = fmt.markup;
    if (render_take(out, r, mark))
        return -1;
    out->markup = markup;
    return 0;
}

/* ---- strftime ---- */

/* One conversion at a time, so that an empty result is no doubt about the buffer's size. */
static int put_time(struct render *r, const struct tm *tm, const char *conversion)
{
    char text[200];
    size_t n = strftime(text, sizeof text, conversion, tm);
    return render_spend(r, 10) || render_put(r, text, n) ? -1 : 0;
}

int format_time(struct render *r, const struct tstr *fmt)
{
    time_t now = (time_t)r->now;
    struct tm tm;
    if (!gmtime_r(&now, &tm))
        return render_fail(r, "strftime_now: the time is out of range");
    for (size_t i = 0; i < fmt->n;) {
        if (fmt->p[i] != '%' || i + 1 >= fmt->n) {
            if (render_put(r, &fmt->p[i++], 1))
                return -1;
            continue;
        }
        char conversion[4] = {'%', fmt->p[i + 1], 0, 0};
        i += 2;
        if (strchr("-_0^#", conversion[1]) && conversion[1] && i < fmt->n)
            conversion[2] = fmt->p[i++];
        char letter = conversion[2] ? conversion[2] : conversion[1];
        if (letter == 'f') {
            if (render_puts(r, "000000"))
                return -1;
        } else if (letter == 'Z' || letter == 'z') {
            continue; /* a time without zone has no text for them, as in Python */
        } else if (strchr("aAbBcCdDeFgGhHIjklmMnpPrRsStTuUVwWxXyY%", letter) && letter) {
            if (put_time(r, &tm, conversion))
                return -1;
        } else if (render_put(r, conversion, strlen(conversion))) {
            return -1;
        }
    }
    return 0;
}
