/* Filters on single values: text, numbers, defaults, JSON. The table at the end has a row each,
 * with the parameters in the order of Jinja2's documentation (tojson: of the transformers
 * library). Filters over sequences are in template_filters_seq.c. */
#include "text/template_internal.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static int filter_default(struct value *out, struct render *r, struct call *c)
{
    bool use = c->self.kind == V_UNDEFINED || (val_truth(c->arg[1]) && !val_truth(c->self));
    *out = c->self;
    if (!use)
        return 0;
    *out = c->arg[0];
    return out->kind == V_MISSING ? str_cstr(out, r, "") : 0;
}

static int filter_string(struct value *out, struct render *r, struct call *c)
{
    return val_str(out, r, c->self);
}

static int filter_safe(struct value *out, struct render *r, struct call *c)
{
    if (val_str(out, r, c->self))
        return -1;
    out->markup = true;
    return 0;
}

static int filter_escape(struct value *out, struct render *r, struct call *c)
{
    if (val_str(out, r, c->self) || out->markup)
        return out->kind == V_STR && out->markup ? 0 : -1;
    return str_escape_html(out, r, *out);
}

static int filter_forceescape(struct value *out, struct render *r, struct call *c)
{
    return val_str(out, r, c->self) || str_escape_html(out, r, *out) ? -1 : 0;
}

/* ---- text ---- */

static int recase(struct value *out, struct render *r, struct call *c, enum str_case how)
{
    struct value s;
    return val_str(&s, r, c->self) || str_recase(out, r, s, how) ? -1 : 0;
}

static int filter_lower(struct value *out, struct render *r, struct call *c)
{
    return recase(out, r, c, CASE_LOWER);
}

static int filter_upper(struct value *out, struct render *r, struct call *c)
{
    return recase(out, r, c, CASE_UPPER);
}

static int filter_capitalize(struct value *out, struct render *r, struct call *c)
{
    return recase(out, r, c, CASE_CAPITAL);
}

/* Jinja2's own rule: a word starts after white space or one of -({[< . Its first letter becomes
 * upper case, not title case. */
static int put_title_word(struct render *r, struct value s, size_t from, size_t to)
{
    struct value part;
    if (from == to)
        return 0;
    size_t first = char_len(s.s->p + from, to - from);
    if (str_sub(&part, r, s, from, first) || str_recase(&part, r, part, CASE_UPPER) ||
        put_str(r, part))
        return -1;
    return str_sub(&part, r, s, from + first, to - from - first) ||
                   str_recase(&part, r, part, CASE_LOWER) || put_str(r, part)
               ? -1
               : 0;
}

static int filter_title(struct value *out, struct render *r, struct call *c)
{
    struct value s;
    if (val_str(&s, r, c->self))
        return -1;
    size_t mark = render_mark(r), start = 0;
    for (size_t at = 0, len; at < s.s->n; at += len) {
        uint32_t cp;
        len = char_decode(&cp, s.s->p + at, s.s->n - at);
        if (!char_is_space(cp) && !(cp && cp < 0x80 && strchr("-({[<", (int)cp)))
            continue;
        if (put_title_word(r, s, start, at) || render_put(r, s.s->p + at, len))
            return -1;
        start = at + len;
    }
    if (put_title_word(r, s, start, s.s->n) || render_take(out, r, mark))
        return -1;
    out->markup = s.markup;
    return 0;
}

static int filter_trim(struct value *out, struct render *r, struct call *c)
{
    struct value s;
    struct tstr *set = NULL;
    if (val_str(&s, r, c->self) || (arg_given(c, 0) && arg_str(&set, r, c, 0)))
        return -1;
    return str_trim(out, r, s, set, TRIM_LEFT | TRIM_RIGHT);
}

static int filter_replace(struct value *out, struct render *r, struct call *c)
{
    struct value s, from_to[2];
    int64_t max;
    if (val_str(&s, r, c->self) || val_str(&from_to[0], r, c->arg[0]) ||
        val_str(&from_to[1], r, c->arg[1]))
        return -1;
    if (!arg_given(c, 2))
        c->arg[2] = VAL_INT(-1);
    s.markup = false;
    return arg_int(&max, r, c, 2, -1) || str_replace(out, r, s, from_to, max) ? -1 : 0;
}

static int filter_center(struct value *out, struct render *r, struct call *c)
{
    struct value s;
    int64_t width, n;
    if (val_str(&s, r, c->self) || arg_int(&width, r, c, 0, 80) || val_len(&n, r, s))
        return -1;
    if (width <= n) {
        *out = s;
        return 0;
    }
    /* str.center's rounding: the odd blank goes left when the width is odd. */
    int64_t pad = width - n, left = pad / 2 + (pad & width & 1);
    size_t mark = render_mark(r);
    for (int64_t i = 0; i < pad; i++)
        if (render_spend(r, 1) || (i == left && render_put(r, s.s->p, s.s->n)) ||
            render_puts(r, " "))
            return -1;
    if (left == pad && render_put(r, s.s->p, s.s->n))
        return -1;
    return render_take(out, r, mark);
}

static int indent_text(struct value *pad, struct render *r, struct call *c)
{
    int64_t width;
    if (c->arg[0].kind == V_STR) {
        *pad = c->arg[0];
        return 0;
    }
    if (arg_int(&width, r, c, 0, 4))
        return -1;
    size_t mark = render_mark(r);
    for (int64_t i = 0; i < width; i++)
        if (render_spend(r, 1) || render_puts(r, " "))
            return -1;
    return render_take(pad, r, mark);
}

static int filter_indent(struct value *out, struct render *r, struct call *c)
{
    struct value pad;
    bool first = val_truth(c->arg[1]), blank = val_truth(c->arg[2]);
    if (c->self.kind != V_STR)
        return c->self.kind == V_UNDEFINED ? undefined_use(r, c->self)
                                           : render_fail(r, "indent needs a string");
    if (indent_text(&pad, r, c))
        return -1;
    struct tlist *lines;
    struct call split = {.self = c->self};
    struct value v, name;
    if (str_cstr(&name, r, "splitlines") ||
        builtin_call(&v, r, method_find(METHODS_STR, name.s), &split))
        return -1;
    lines = v.l;
    /* Jinja2 splits the text with a newline added: one more, empty, line where it ended in one. */
    const struct tstr *s = c->self.s;
    bool ends_open = !s->n || s->p[s->n - 1] == '\n';
    if (ends_open && (str_cstr(&v, r, "") || list_put(r, lines, v)))
        return -1;
    size_t mark = render_mark(r);
    for (size_t i = 0; i < lines->n; i++) {
        const struct tstr *line = lines->v[i].s;
        bool padded = i == 0 ? first : line->n || blank;
        if ((i && render_puts(r, "\n")) || (padded && render_put(r, pad.s->p, pad.s->n)) ||
            render_put(r, line->p, line->n))
            return -1;
    }
    if (render_take(out, r, mark))
        return -1;
    out->markup = c->self.markup;
    return 0;
}

static int filter_truncate(struct value *out, struct render *r, struct call *c)
{
    int64_t length, leeway, n, n_end;
    struct value s, end = c->arg[2];
    if (val_len(&n, r, c->self) || arg_int(&length, r, c, 0, 255) || arg_int(&leeway, r, c, 3, 5))
        return -1;
    if (end.kind == V_MISSING && str_cstr(&end, r, "..."))
        return -1;
    if (val_str(&end, r, end) || val_len(&n_end, r, end))
        return -1;
    if (length < n_end || leeway < 0)
        return render_fail(r, "truncate: the length is below that of the end sign");
    *out = c->self;
    if (n - leeway <= length)
        return 0;
    if (c->self.kind != V_STR)
        return render_fail(r, "truncate needs a string, not '%s'", val_type(c->self));
    s = c->self;
    if (render_spend_chars(r, s.s->n))
        return -1;
    size_t bytes = str_byte_of(s.s, (size_t)(length - n_end));
    const char *blank = val_truth(c->arg[1]) ? NULL : memrchr(s.s->p, ' ', bytes);
    struct value head;
    if (str_sub(&head, r, s, 0, blank ? (size_t)(blank - s.s->p) : bytes))
        return -1;
    return str_concat(out, r, head, end);
}

static int filter_wordcount(struct value *out, struct render *r, struct call *c)
{
    struct value s;
    bool inside = false;
    if (val_str(&s, r, c->self) || render_spend_chars(r, s.s->n))
        return -1;
    *out = VAL_INT(0);
    for (size_t at = 0; at < s.s->n;) {
        uint32_t cp;
        at += char_decode(&cp, s.s->p + at, s.s->n - at);
        bool word = cp == '_' || char_is_alpha(cp) || char_is_numeric(cp);
        out->i += word && !inside;
        inside = word;
    }
    return 0;
}

static int put_quoted(struct render *r, struct value v, const char *safe)
{
    struct value s;
    if (val_str(&s, r, v) || render_spend_chars(r, s.s->n))
        return -1;
    for (size_t i = 0; i < s.s->n; i++) {
        uint8_t b = (uint8_t)s.s->p[i];
        char hex[4];
        bool plain =
            char_is_alpha(b < 0x80 ? b : 0) || (b >= '0' && b <= '9') || (b && strchr(safe, b));
        snprintf(hex, sizeof hex, "%%%02X", b);
        if (b == ' ' && !strchr(safe, '/')) /* in a query */
            strcpy(hex, "+");
        if (plain ? render_put(r, &s.s->p[i], 1) : render_puts(r, hex))
            return -1;
    }
    return 0;
}

/* A dict or a list of pairs gives a query, anything else is quoted as text. */
static int filter_urlencode(struct value *out, struct render *r, struct call *c)
{
    struct tlist *pairs, *pair;
    size_t mark = render_mark(r);
    struct value v = c->self;
    bool query = v.kind == V_DICT || v.kind == V_LIST || v.kind == V_TUPLE || v.kind == V_ITER ||
                 v.kind == V_VIEW || v.kind == V_RANGE;
    if (!query)
        return put_quoted(r, v, "_.-~/") || render_take(out, r, mark) ? -1 : 0;
    if (v.kind == V_DICT ? dict_items(&pairs, r, v.d, 'i') : val_to_list(&pairs, r, v))
        return -1;
    for (size_t i = 0; i < pairs->n; i++) {
        if (val_to_list(&pair, r, pairs->v[i]))
            return -1;
        if (pair->n != 2)
            return render_fail(r, "urlencode needs pairs, not %zu values", pair->n);
        if ((i && render_puts(r, "&")) || put_quoted(r, pair->v[0], "_.-~") ||
            render_puts(r, "=") || put_quoted(r, pair->v[1], "_.-~"))
            return -1;
    }
    return render_take(out, r, mark);
}

static int filter_format(struct value *out, struct render *r, struct call *c)
{
    struct value s, args;
    struct tlist *l;
    struct tdict *d;
    if (val_str(&s, r, c->self) || list_new(&l, r, c->n_pos) || dict_new(&d, r))
        return -1;
    if (c->n_pos && c->n_kw)
        return render_fail(r, "format takes plain or keyword arguments, not both");
    for (uint32_t i = 0; i < c->n_pos; i++)
        l->v[l->n++] = c->pos[i];
    for (uint32_t i = 0; i < c->n_kw; i++) {
        struct value key;
        if (str_view(&key, r, c->kw[i].name->p, c->kw[i].name->n) ||
            dict_put(r, d, key, c->kw[i].v))
            return -1;
    }
    args = c->n_kw ? VAL_DICT(d) : VAL_TUPLE(l);
    return format_percent(out, r, s, args);
}

/* ---- numbers ---- */

static int filter_abs(struct value *out, struct render *r, struct call *c)
{
    if (c->self.kind == V_FLOAT) {
        *out = VAL_FLOAT(fabs(c->self.f));
        return 0;
    }
    return op_unary(out, r, (c->self.kind == V_INT) && c->self.i < 0, c->self);
}

/* A whole number in text as Python's int() reads it: blanks around, a sign, single underscores. */
static bool read_int(int64_t *out, const struct tstr *s, int64_t base)
{
    char digits[80];
    size_t n = 0, from = 0, to = s->n;
    while (from < to && char_is_space((uint8_t)s->p[from]))
        from++;
    while (to > from && char_is_space((uint8_t)s->p[to - 1]))
        to--;
    if (to - from >= sizeof digits) /* no 64 bits, or read as a float */
        return false;
    for (size_t i = from; i < to; i++) {
        bool joint = s->p[i] == '_' && i > from && i + 1 < to && s->p[i - 1] != '_';
        if (!joint)
            digits[n++] = s->p[i];
    }
    digits[n] = 0;
    const char *p = digits + (digits[0] == '-' || digits[0] == '+');
    char prefix = base == 16 ? 'x' : base == 8 ? 'o' : base == 2 ? 'b' : 0;
    bool prefixed = prefix && p[0] == '0' && (p[1] | 0x20) == prefix;
    if (prefixed)
        p += 2;
    char *end;
    errno = 0;
    if (!*p || *p == '-' || *p == '+' || char_is_space((uint8_t)*p))
        return false;
    uint64_t v = strtoull(p, &end, (int)base);
    bool minus = digits[0] == '-';
    if (*end || errno || v > (uint64_t)INT64_MAX + minus)
        return false;
    *out = minus ? (int64_t)(0 - v) : (int64_t)v;
    return true;
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool read_float(double *out, const struct tstr *s)
{
    char text[400], *end;
    size_t from = 0, to = s->n;
    while (from < to && char_is_space((uint8_t)s->p[from]))
        from++;
    while (to > from && char_is_space((uint8_t)s->p[to - 1]))
        to--;
    if (to == from || to - from >= sizeof text)
        return false;
    size_t n = 0;
    for (size_t i = from; i < to; i++) {
        bool joint = s->p[i] == '_' && i > from && i + 1 < to && is_digit(s->p[i - 1]) &&
                     is_digit(s->p[i + 1]);
        if (!joint)
            text[n++] = s->p[i];
    }
    text[n] = 0;
    /* C also reads hexadecimal and nan(...), which Python does not. */
    if (strlen(text) != n || strpbrk(text, "xX(_"))
        return false;
    *out = strtod(text, &end);
    return !*end;
}

static int int_of_float(struct value *out, struct render *r, double f, struct value fallback)
{
    *out = fallback;
    if (isinf(f))
        return render_fail(r, "an infinite number has no whole one");
    if (isnan(f))
        return 0;
    if (fabs(f) >= 9.2e18)
        return render_fail(r, "a whole number does not fit 64 bits");
    *out = VAL_INT((int64_t)f);
    return 0;
}

static int filter_int(struct value *out, struct render *r, struct call *c)
{
    struct value v = c->self, fallback = c->arg[0].kind == V_MISSING ? VAL_INT(0) : c->arg[0];
    int64_t base, i;
    double f;
    if (v.kind == V_UNDEFINED)
        return undefined_use(r, v);
    if (render_spend(r, 10) || arg_int(&base, r, c, 1, 10))
        return -1;
    if (base != 0 && (base < 2 || base > 36))
        return render_fail(r, "int: the base must be 2 to 36");
    *out = fallback;
    if (v.kind == V_FLOAT)
        return int_of_float(out, r, v.f, fallback);
    if (v.kind == V_INT || v.kind == V_BOOL)
        *out = VAL_INT(v.kind == V_INT ? v.i : (int64_t)v.b);
    else if (v.kind == V_STR && read_int(&i, v.s, base))
        *out = VAL_INT(i);
    else if (v.kind == V_STR && read_float(&f, v.s) && isfinite(f))
        return int_of_float(out, r, f, fallback);
    return 0;
}

static int filter_float(struct value *out, struct render *r, struct call *c)
{
    double f;
    if (c->self.kind == V_UNDEFINED)
        return undefined_use(r, c->self);
    if (render_spend(r, 10))
        return -1;
    *out = c->arg[0].kind == V_MISSING ? VAL_FLOAT(0.0) : c->arg[0];
    if (val_is_number(c->self))
        *out = VAL_FLOAT(val_double(c->self));
    else if (c->self.kind == V_STR && read_float(&f, c->self.s))
        *out = VAL_FLOAT(f);
    return 0;
}

/* Python's round(): exact halves go to even, on the decimal digits of the exact value. */
static double round_to(double f, int64_t places)
{
    char text[400];
    if (!isfinite(f) || places > 300)
        return f;
    if (places >= 0) {
        snprintf(text, sizeof text, "%.*f", (int)MIN(places, 60), f);
        return strtod(text, NULL);
    }
    double unit = pow(10, -(double)MAX(places, -400));
    return isinf(unit) ? 0 : nearbyint(f / unit) * unit;
}

static int filter_round(struct value *out, struct render *r, struct call *c)
{
    int64_t places;
    struct value v = c->self, method = c->arg[1];
    if (v.kind == V_UNDEFINED)
        return undefined_use(r, v);
    if (!val_is_number(v))
        return render_fail(r, "round needs a number, not '%s'", val_type(v));
    if (arg_int(&places, r, c, 0, 0))
        return -1;
    bool common = method.kind == V_MISSING || (method.kind == V_STR && str_is(method.s, "common"));
    bool up = method.kind == V_STR && str_is(method.s, "ceil");
    if (!common && !up && !(method.kind == V_STR && str_is(method.s, "floor")))
        return render_fail(r, "round: the method must be common, ceil or floor");
    if (common && v.kind != V_FLOAT && places >= 0) {
        *out = VAL_INT(v.kind == V_INT ? v.i : (int64_t)v.b);
        return 0;
    }
    double f = val_double(v), unit = pow(10, (double)places);
    if (common)
        f = round_to(f, places);
    else
        f = (up ? ceil(f * unit) : floor(f * unit)) / unit;
    *out = VAL_FLOAT(f);
    return common && v.kind != V_FLOAT ? int_of_float(out, r, f, *out) : 0;
}

/* ---- the table ---- */

static const struct builtin filter_rows[] = {
    {"default", filter_default, "default_value,boolean", 0},
    {"d", filter_default, "default_value,boolean", 0},
    {"trim", filter_trim, "chars", 0},
    {"tojson", filter_tojson, "ensure_ascii,indent,separators,sort_keys", 0},
    {"from_json", filter_from_json, "", 0},
    {"fromjson", filter_from_json, "", 0},
    {"string", filter_string, "", 0},
    {"upper", filter_upper, "", 0},
    {"lower", filter_lower, "", 0},
    {"title", filter_title, "", 0},
    {"capitalize", filter_capitalize, "", 0},
    {"replace", filter_replace, "old,new,count", 2},
    {"indent", filter_indent, "width,first,blank", 0},
    {"safe", filter_safe, "", 0},
    {"escape", filter_escape, "", 0},
    {"e", filter_escape, "", 0},
    {"forceescape", filter_forceescape, "", 0},
    {"center", filter_center, "width", 0},
    {"truncate", filter_truncate, "length,killwords,end,leeway", 0},
    {"wordcount", filter_wordcount, "", 0},
    {"urlencode", filter_urlencode, "", 0},
    {"format", filter_format, "*", 0},
    {"int", filter_int, "default,base", 0},
    {"float", filter_float, "default", 0},
    {"abs", filter_abs, "", 0},
    {"round", filter_round, "precision,method", 0},
};
const struct builtin_table filter_table = {filter_rows, ARRAY_LEN(filter_rows)};
