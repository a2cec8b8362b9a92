/* Methods of strings, as Python has them. Positions and widths count characters. The table at the
 * end has a row each; methods of containers are in template_methods_seq.c. */
#include "text/template_internal.h"

#include <utf8proc.h>

/* ---- trimming, case ---- */

static int trim(struct value *out, struct render *r, struct call *c, int ends)
{
    struct tstr *set = NULL;
    if (arg_given(c, 0) && arg_str(&set, r, c, 0))
        return -1;
    return str_trim(out, r, c->self, set, ends);
}

static int str_strip(struct value *out, struct render *r, struct call *c)
{
    return trim(out, r, c, TRIM_LEFT | TRIM_RIGHT);
}

static int str_lstrip(struct value *out, struct render *r, struct call *c)
{
    return trim(out, r, c, TRIM_LEFT);
}

static int str_rstrip(struct value *out, struct render *r, struct call *c)
{
    return trim(out, r, c, TRIM_RIGHT);
}

static int str_lower(struct value *out, struct render *r, struct call *c)
{
    return str_recase(out, r, c->self, CASE_LOWER);
}

static int str_upper(struct value *out, struct render *r, struct call *c)
{
    return str_recase(out, r, c->self, CASE_UPPER);
}

static int str_title(struct value *out, struct render *r, struct call *c)
{
    return str_recase(out, r, c->self, CASE_TITLE);
}

static int str_capitalize(struct value *out, struct render *r, struct call *c)
{
    return str_recase(out, r, c->self, CASE_CAPITAL);
}

static int str_swapcase(struct value *out, struct render *r, struct call *c)
{
    return str_recase(out, r, c->self, CASE_SWAP);
}

static int str_casefold(struct value *out, struct render *r, struct call *c)
{
    return str_recase(out, r, c->self, CASE_FOLD);
}

/* ---- splitting ---- */

static int put_piece(struct tlist *l, struct render *r, struct value s, size_t from, size_t to)
{
    struct value piece;
    return str_sub(&piece, r, s, from, to - from) || list_put(r, l, piece) ? -1 : 0;
}

static size_t skip_spaces(const struct tstr *s, size_t at, bool want)
{
    while (at < s->n) {
        uint32_t cp;
        size_t len = char_decode(&cp, s->p + at, s->n - at);
        if (char_is_space(cp) != want)
            break;
        at += len;
    }
    return at;
}

static int split_spaces(struct tlist *l, struct render *r, struct value s, int64_t max)
{
    size_t at = skip_spaces(s.s, 0, true);
    if (render_spend_chars(r, s.s->n))
        return -1;
    for (; at < s.s->n; max--) {
        if (max == 0) /* the rest, blanks at its end included */
            return put_piece(l, r, s, at, s.s->n);
        size_t end = skip_spaces(s.s, at, false);
        if (put_piece(l, r, s, at, end))
            return -1;
        at = skip_spaces(s.s, end, true);
    }
    return 0;
}

static int split_at(struct tlist *l, struct render *r, struct value s, const struct tstr *sep,
                    int64_t max)
{
    size_t at = 0;
    const char *hit;
    if (render_spend_bulk(r, s.s->n))
        return -1;
    while (max-- != 0 && (hit = mem_find(s.s->p + at, s.s->n - at, sep->p, sep->n))) {
        size_t to = (size_t)(hit - s.s->p);
        if (put_piece(l, r, s, at, to) || render_spend(r, 1))
            return -1;
        at = to + sep->n;
    }
    return put_piece(l, r, s, at, s.s->n);
}

/* The start of the last sep before `end`, or NULL. */
static const char *find_last(const struct tstr *s, size_t end, const struct tstr *sep)
{
    for (size_t at = end; at >= sep->n && sep->n; at--)
        if (s->p[at - sep->n] == sep->p[0] && !memcmp(s->p + at - sep->n, sep->p, sep->n))
            return s->p + at - sep->n;
    return sep->n ? NULL : s->p + end;
}

/* What finding all of them costs at worst: sep is compared at every place. */
static int spend_find_last(struct render *r, const struct tstr *s, const struct tstr *sep)
{
    size_t places = s->n >= sep->n ? s->n - sep->n + 1 : 0, cost;
    if (mul_over(places, sep->n / 8, &cost) || add_over(cost, s->n, &cost))
        cost = SIZE_MAX;
    return render_spend_chars(r, cost);
}

static void reverse_list(struct tlist *l)
{
    for (size_t i = 0; i < l->n / 2; i++) {
        struct value t = l->v[i];
        l->v[i] = l->v[l->n - 1 - i];
        l->v[l->n - 1 - i] = t;
    }
}

static int rsplit_at(struct tlist *l, struct render *r, struct value s, const struct tstr *sep,
                     int64_t max)
{
    size_t end = s.s->n;
    const char *hit;
    if (spend_find_last(r, s.s, sep))
        return -1;
    while (max-- != 0 && (hit = find_last(s.s, end, sep))) {
        size_t at = (size_t)(hit - s.s->p);
        if (put_piece(l, r, s, at + sep->n, end))
            return -1;
        end = at;
    }
    if (put_piece(l, r, s, 0, end))
        return -1;
    reverse_list(l);
    return 0;
}

static size_t back_over(const struct tstr *s, size_t at, bool space)
{
    while (at > 0) {
        size_t back = at - 1;
        while (back > 0 && ((uint8_t)s->p[back] & 0xc0) == 0x80)
            back--;
        uint32_t cp;
        char_decode(&cp, s->p + back, at - back);
        if (char_is_space(cp) != space)
            break;
        at = back;
    }
    return at;
}

static int rsplit_spaces(struct tlist *l, struct render *r, struct value s, int64_t max)
{
    size_t end = back_over(s.s, s.s->n, true);
    if (render_spend_chars(r, s.s->n))
        return -1;
    for (; end > 0; max--) {
        size_t from = max == 0 ? 0 : back_over(s.s, end, false);
        if (put_piece(l, r, s, from, end))
            return -1;
        if (max == 0)
            break;
        end = back_over(s.s, from, true);
    }
    reverse_list(l);
    return 0;
}

static int split(struct value *out, struct render *r, struct call *c, bool from_right)
{
    struct tlist *l;
    struct tstr *sep;
    int64_t max;
    if (arg_int(&max, r, c, 1, -1) || list_new(&l, r, 4))
        return -1;
    *out = VAL_LIST(l);
    if (!arg_given(c, 0))
        return from_right ? rsplit_spaces(l, r, c->self, max) : split_spaces(l, r, c->self, max);
    if (arg_str(&sep, r, c, 0))
        return -1;
    if (!sep->n)
        return render_fail(r, "%s() needs a separator that is not empty", c->row->name);
    return from_right ? rsplit_at(l, r, c->self, sep, max) : split_at(l, r, c->self, sep, max);
}

static int str_split(struct value *out, struct render *r, struct call *c)
{
    return split(out, r, c, false);
}

static int str_rsplit(struct value *out, struct render *r, struct call *c)
{
    return split(out, r, c, true);
}

static bool is_line_end(uint32_t cp)
{
    return (cp >= 10 && cp <= 13) || (cp >= 0x1c && cp <= 0x1e) || cp == 0x85 || cp == 0x2028 ||
           cp == 0x2029;
}

static int str_splitlines(struct value *out, struct render *r, struct call *c)
{
    struct tlist *l;
    const struct tstr *s = c->self.s;
    bool keep = val_truth(c->arg[0]);
    size_t from = 0;
    if (list_new(&l, r, 4) || render_spend_chars(r, s->n))
        return -1;
    for (size_t at = 0; at < s->n;) {
        uint32_t cp;
        size_t end = at;
        at += char_decode(&cp, s->p + at, s->n - at);
        if (!is_line_end(cp))
            continue;
        if (cp == '\r' && at < s->n && s->p[at] == '\n')
            at++;
        if (put_piece(l, r, c->self, from, keep ? at : end))
            return -1;
        from = at;
    }
    *out = VAL_LIST(l);
    return from < s->n ? put_piece(l, r, c->self, from, s->n) : 0;
}

static int partition(struct value *out, struct render *r, struct call *c, bool from_right)
{
    struct tlist *l;
    struct tstr *sep, *s = c->self.s;
    struct value empty;
    if (arg_str(&sep, r, c, 0) || list_new(&l, r, 3) || str_cstr(&empty, r, ""))
        return -1;
    if (!sep->n)
        return render_fail(r, "%s() needs a separator that is not empty", c->row->name);
    if (from_right ? spend_find_last(r, s, sep) : render_spend_chars(r, s->n))
        return -1;
    const char *hit = from_right ? find_last(s, s->n, sep) : mem_find(s->p, s->n, sep->p, sep->n);
    size_t at = hit ? (size_t)(hit - s->p) : 0;
    *out = VAL_TUPLE(l);
    if (hit)
        return put_piece(l, r, c->self, 0, at) || put_piece(l, r, c->self, at, at + sep->n) ||
                       put_piece(l, r, c->self, at + sep->n, s->n)
                   ? -1
                   : 0;
    l->v[0] = l->v[1] = l->v[2] = empty;
    l->v[from_right ? 2 : 0] = c->self;
    l->n = 3;
    return 0;
}

static int str_partition(struct value *out, struct render *r, struct call *c)
{
    return partition(out, r, c, false);
}

static int str_rpartition(struct value *out, struct render *r, struct call *c)
{
    return partition(out, r, c, true);
}

/* ---- looking for text ---- */

/* self[start:end] of arguments 1 and 2, and where it starts in characters. */
static int sub_range(struct value *sub, struct render *r, struct call *c, int64_t *start)
{
    const struct value part[3] = {arg_given(c, 1) ? c->arg[1] : VAL_NONE,
                                  arg_given(c, 2) ? c->arg[2] : VAL_NONE, VAL_NONE};
    int64_t len, from;
    if (part[0].kind == V_NONE && part[1].kind == V_NONE) {
        *start = 0;
        *sub = c->self;
        return 0;
    }
    if (val_len(&len, r, c->self) || arg_int(&from, r, c, 1, 0))
        return -1;
    *start = MAX(from < 0 ? from + len : from, 0);
    return op_slice(sub, r, c->self, part);
}

static bool has_affix(const struct tstr *s, const struct tstr *x, bool at_end)
{
    return s->n >= x->n && !memcmp(at_end ? s->p + s->n - x->n : s->p, x->p, x->n);
}

static int affix(struct value *out, struct render *r, struct call *c, bool at_end)
{
    struct value s, x = c->arg[0];
    int64_t start;
    if (sub_range(&s, r, c, &start))
        return -1;
    *out = VAL_BOOL(false);
    if (x.kind != V_TUPLE) {
        struct tstr *t;
        if (arg_str(&t, r, c, 0))
            return -1;
        out->b = has_affix(s.s, t, at_end);
        return render_spend_bulk(r, MIN(s.s->n, t->n));
    }
    for (size_t i = 0; i < x.l->n && !out->b; i++) {
        if (x.l->v[i].kind != V_STR)
            return render_fail(r, "%s() needs strings in its tuple", c->row->name);
        out->b = has_affix(s.s, x.l->v[i].s, at_end);
        if (render_spend(r, 1) || render_spend_bulk(r, MIN(s.s->n, x.l->v[i].s->n)))
            return -1;
    }
    return 0;
}

static int str_startswith(struct value *out, struct render *r, struct call *c)
{
    return affix(out, r, c, false);
}

static int str_endswith(struct value *out, struct render *r, struct call *c)
{
    return affix(out, r, c, true);
}

static int find_text(struct value *out, struct render *r, struct call *c, bool last)
{
    struct value s;
    struct tstr *x;
    int64_t start, len;
    if (sub_range(&s, r, c, &start) || arg_str(&x, r, c, 0) || val_len(&len, r, c->self) ||
        (last ? spend_find_last(r, s.s, x) : render_spend_chars(r, s.s->n)))
        return -1;
    const char *hit = last ? find_last(s.s, s.s->n, x) : mem_find(s.s->p, s.s->n, x->p, x->n);
    *out = VAL_INT(-1);
    if (!hit || start > len)
        return 0;
    struct tstr before = {.p = s.s->p, .n = (size_t)(hit - s.s->p), .n_chars = SIZE_MAX};
    *out = VAL_INT(start + (int64_t)str_chars(&before));
    return 0;
}

static int str_find(struct value *out, struct render *r, struct call *c)
{
    return find_text(out, r, c, false);
}

static int str_rfind(struct value *out, struct render *r, struct call *c)
{
    return find_text(out, r, c, true);
}

static int must_find(struct value *out, struct render *r, struct call *c, bool last)
{
    if (find_text(out, r, c, last))
        return -1;
    return out->i < 0 ? render_fail(r, "%s(): the text is not there", c->row->name) : 0;
}

static int str_index(struct value *out, struct render *r, struct call *c)
{
    return must_find(out, r, c, false);
}

static int str_rindex(struct value *out, struct render *r, struct call *c)
{
    return must_find(out, r, c, true);
}

static int str_count(struct value *out, struct render *r, struct call *c)
{
    struct value s;
    struct tstr *x;
    int64_t start;
    if (sub_range(&s, r, c, &start) || arg_str(&x, r, c, 0) || render_spend_chars(r, s.s->n))
        return -1;
    *out = VAL_INT(0);
    if (!x->n) {
        out->i = (int64_t)str_chars(s.s) + 1;
        return 0;
    }
    const char *p = s.s->p, *end = p + s.s->n, *hit;
    for (; (hit = mem_find(p, (size_t)(end - p), x->p, x->n)); p = hit + x->n)
        out->i++;
    return 0;
}

/* What meets markup is escaped first, unless it is markup itself. */
static int match_markup(struct value *v, struct render *r, bool markup)
{
    return markup && !v->markup ? str_escape_html(v, r, *v) : 0;
}

static int str_replace_method(struct value *out, struct render *r, struct call *c)
{
    struct tstr *from, *to;
    int64_t max;
    bool markup = c->self.markup;
    if (arg_str(&from, r, c, 0) || arg_str(&to, r, c, 1) || arg_int(&max, r, c, 2, -1) ||
        match_markup(&c->arg[0], r, markup) || match_markup(&c->arg[1], r, markup) ||
        str_replace(out, r, c->self, c->arg, max))
        return -1;
    out->markup = markup;
    return 0;
}

static int remove_affix(struct value *out, struct render *r, struct call *c, bool at_end)
{
    struct tstr *x;
    if (arg_str(&x, r, c, 0) || render_spend_bulk(r, MIN(c->self.s->n, x->n)))
        return -1;
    size_t n = has_affix(c->self.s, x, at_end) ? x->n : 0;
    return str_sub(out, r, c->self, at_end ? 0 : n, c->self.s->n - n);
}

static int str_removeprefix(struct value *out, struct render *r, struct call *c)
{
    return remove_affix(out, r, c, false);
}

static int str_removesuffix(struct value *out, struct render *r, struct call *c)
{
    return remove_affix(out, r, c, true);
}

/* ---- joining, padding, formatting ---- */

static int str_join(struct value *out, struct render *r, struct call *c)
{
    struct walk w;
    struct value item;
    int rc;
    if (walk_begin(&w, r, c->arg[0]))
        return -1;
    size_t mark = render_mark(r);
    for (size_t i = 0; (rc = walk_next(&item, &w, r)) > 0; i++) {
        if (item.kind != V_STR)
            return render_fail(r, "join() needs strings, item %zu is of type %s", i,
                               val_type(item));
        if ((i && render_put(r, c->self.s->p, c->self.s->n)) ||
            match_markup(&item, r, c->self.markup) || render_put(r, item.s->p, item.s->n))
            return -1;
    }
    bool markup = c->self.markup;
    if (rc || render_take(out, r, mark))
        return -1;
    out->markup = markup;
    return 0;
}

static int put_fill(struct render *r, const struct tstr *fill, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (render_spend(r, 1) || render_put(r, fill->p, fill->n))
            return -1;
    return 0;
}

/* Fill up to a width: behind the text (where < 0), before it (> 0), or on both sides. */
static int pad(struct value *out, struct render *r, struct call *c, int where)
{
    static struct tstr blank = {.p = " ", .n = 1, .n_chars = 1, .hash = 1};
    struct tstr *fill = &blank;
    int64_t width, n;
    if (arg_int(&width, r, c, 0, 0) || val_len(&n, r, c->self) ||
        (arg_given(c, 1) && arg_str(&fill, r, c, 1)))
        return -1;
    if (str_chars(fill) != 1)
        return render_fail(r, "%s() fills with one character", c->row->name);
    *out = c->self;
    if (width <= n)
        return 0;
    int64_t gap = width - n;
    int64_t left = where < 0 ? 0 : where > 0 ? gap : gap / 2 + (gap & width & 1);
    size_t mark = render_mark(r);
    if (put_fill(r, fill, left) || render_put(r, c->self.s->p, c->self.s->n) ||
        put_fill(r, fill, gap - left))
        return -1;
    return render_take(out, r, mark);
}

static int str_ljust(struct value *out, struct render *r, struct call *c)
{
    return pad(out, r, c, -1);
}

static int str_rjust(struct value *out, struct render *r, struct call *c)
{
    return pad(out, r, c, 1);
}

static int str_center(struct value *out, struct render *r, struct call *c)
{
    return pad(out, r, c, 0);
}

static int str_zfill(struct value *out, struct render *r, struct call *c)
{
    static const struct tstr zero = {.p = "0", .n = 1, .n_chars = 1, .hash = 1};
    int64_t width, n;
    const struct tstr *s = c->self.s;
    if (arg_int(&width, r, c, 0, 0) || val_len(&n, r, c->self))
        return -1;
    size_t mark = render_mark(r), sign = s->n && (s->p[0] == '-' || s->p[0] == '+');
    if (render_put(r, s->p, sign) || put_fill(r, &zero, width > n ? width - n : 0) ||
        render_put(r, s->p + sign, s->n - sign))
        return -1;
    return render_take(out, r, mark);
}

static int str_expandtabs(struct value *out, struct render *r, struct call *c)
{
    static const struct tstr blank = {.p = " ", .n = 1, .n_chars = 1, .hash = 1};
    int64_t size, column = 0;
    const struct tstr *s = c->self.s;
    size_t mark = render_mark(r);
    if (arg_int(&size, r, c, 0, 8) || render_spend_chars(r, s->n))
        return -1;
    for (size_t at = 0, len; at < s->n; at += len) {
        len = char_len(s->p + at, s->n - at);
        if (s->p[at] == '\t') {
            int64_t gap = size > 0 ? size - column % size : 0;
            if (put_fill(r, &blank, gap))
                return -1;
            column += gap;
            continue;
        }
        column = s->p[at] == '\n' || s->p[at] == '\r' ? 0 : column + 1;
        if (render_put(r, s->p + at, len))
            return -1;
    }
    return render_take(out, r, mark);
}

static int str_format(struct value *out, struct render *r, struct call *c)
{
    return format_braces(out, r, c->self, c);
}

/* ---- questions ---- */

static bool is_decimal(uint32_t cp)
{
    return utf8proc_category((utf8proc_int32_t)cp) == UTF8PROC_CATEGORY_ND;
}

/* Digits that are no decimals: superscripts and subscripts. */
static bool is_digit(uint32_t cp)
{
    return is_decimal(cp) || cp == 0xb2 || cp == 0xb3 || cp == 0xb9 || cp == 0x2070 ||
           (cp >= 0x2074 && cp <= 0x2079) || (cp >= 0x2080 && cp <= 0x2089);
}

static bool is_alnum(uint32_t cp)
{
    return char_is_alpha(cp) || char_is_numeric(cp);
}

static int every_char(struct value *out, struct render *r, struct call *c, bool (*is)(uint32_t))
{
    const struct tstr *s = c->self.s;
    bool all = s->n > 0;
    if (render_spend_chars(r, s->n))
        return -1;
    for (size_t at = 0; all && at < s->n;) {
        uint32_t cp;
        at += char_decode(&cp, s->p + at, s->n - at);
        all = is(cp);
    }
    *out = VAL_BOOL(all);
    return 0;
}

static int str_isalpha(struct value *out, struct render *r, struct call *c)
{
    return every_char(out, r, c, char_is_alpha);
}

static int str_isdigit(struct value *out, struct render *r, struct call *c)
{
    return every_char(out, r, c, is_digit);
}

static int str_isdecimal(struct value *out, struct render *r, struct call *c)
{
    return every_char(out, r, c, is_decimal);
}

static int str_isnumeric(struct value *out, struct render *r, struct call *c)
{
    return every_char(out, r, c, char_is_numeric);
}

static int str_isalnum(struct value *out, struct render *r, struct call *c)
{
    return every_char(out, r, c, is_alnum);
}

static int str_isspace(struct value *out, struct render *r, struct call *c)
{
    return every_char(out, r, c, char_is_space);
}

static int ask_test(struct value *out, struct render *r, struct call *c, const char *name)
{
    struct value n;
    struct call one = {.self = c->self};
    return str_cstr(&n, r, name) || builtin_call(out, r, test_find(n.s), &one) ? -1 : 0;
}

static int str_islower(struct value *out, struct render *r, struct call *c)
{
    return ask_test(out, r, c, "lower");
}

static int str_isupper(struct value *out, struct render *r, struct call *c)
{
    return ask_test(out, r, c, "upper");
}

static int str_istitle(struct value *out, struct render *r, struct call *c)
{
    const struct tstr *s = c->self.s;
    bool any = false, ok = true, inside = false;
    if (render_spend_chars(r, s->n))
        return -1;
    for (size_t at = 0; ok && at < s->n;) {
        uint32_t cp;
        bool upper;
        at += char_decode(&cp, s->p + at, s->n - at);
        bool cased = char_is_cased(cp, &upper);
        ok = !cased || upper != inside;
        any |= cased;
        inside = cased;
    }
    *out = VAL_BOOL(any && ok);
    return 0;
}

static const struct builtin str_rows[] = {
    {"strip", str_strip, "chars", 0},
    {"lstrip", str_lstrip, "chars", 0},
    {"rstrip", str_rstrip, "chars", 0},
    {"split", str_split, "sep,maxsplit", 0},
    {"rsplit", str_rsplit, "sep,maxsplit", 0},
    {"splitlines", str_splitlines, "keepends", 0},
    {"partition", str_partition, "sep", 1},
    {"rpartition", str_rpartition, "sep", 1},
    {"startswith", str_startswith, "prefix,start,end", 1},
    {"endswith", str_endswith, "suffix,start,end", 1},
    {"replace", str_replace_method, "old,new,count", 2},
    {"removeprefix", str_removeprefix, "prefix", 1},
    {"removesuffix", str_removesuffix, "suffix", 1},
    {"find", str_find, "sub,start,end", 1},
    {"rfind", str_rfind, "sub,start,end", 1},
    {"index", str_index, "sub,start,end", 1},
    {"rindex", str_rindex, "sub,start,end", 1},
    {"count", str_count, "sub,start,end", 1},
    {"join", str_join, "iterable", 1},
    {"format", str_format, "*", 0},
    {"lower", str_lower, "", 0},
    {"upper", str_upper, "", 0},
    {"title", str_title, "", 0},
    {"capitalize", str_capitalize, "", 0},
    {"swapcase", str_swapcase, "", 0},
    {"casefold", str_casefold, "", 0},
    {"ljust", str_ljust, "width,fillchar", 1},
    {"rjust", str_rjust, "width,fillchar", 1},
    {"center", str_center, "width,fillchar", 1},
    {"zfill", str_zfill, "width", 1},
    {"expandtabs", str_expandtabs, "tabsize", 0},
    {"isalpha", str_isalpha, "", 0},
    {"isdigit", str_isdigit, "", 0},
    {"isdecimal", str_isdecimal, "", 0},
    {"isnumeric", str_isnumeric, "", 0},
    {"isalnum", str_isalnum, "", 0},
    {"isspace", str_isspace, "", 0},
    {"islower", str_islower, "", 0},
    {"isupper", str_isupper, "", 0},
    {"istitle", str_istitle, "", 0},
};
const struct builtin_table str_methods = {str_rows, ARRAY_LEN(str_rows)};
