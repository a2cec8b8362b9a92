/* Operators of the template language with Python's meaning: arithmetic on 64-bit integers (overflow
 * is an error, where Python would go on) and doubles, strings and lists, comparison, slices, and
 * the look-up of attributes and items by Jinja2's rules. Memory: the rendering's arena. */
#include "text/template_internal.h"

#include <math.h>

static int overflow(struct render *r)
{
    return render_fail(r, "a whole number does not fit 64 bits");
}

static int bad_operands(struct render *r, const char *op, struct value a, struct value b)
{
    if (a.kind == V_UNDEFINED)
        return undefined_use(r, a);
    if (b.kind == V_UNDEFINED)
        return undefined_use(r, b);
    return render_fail(r, "cannot compute '%s' %s '%s'", val_type(a), op, val_type(b));
}

static bool is_whole(struct value v)
{
    return v.kind == V_INT || v.kind == V_BOOL;
}

static int64_t whole(struct value v)
{
    return v.kind == V_INT ? v.i : (int64_t)v.b;
}

/* ---- arithmetic ---- */

static int concat_lists(struct value *out, struct render *r, struct value a, struct value b)
{
    struct tlist *l;
    size_t n;
    if (add_over(a.l->n, b.l->n, &n) || list_new(&l, r, n) ||
        render_spend_bulk(r, n * sizeof *l->v))
        return -1;
    if (a.l->n)
        memcpy(l->v, a.l->v, a.l->n * sizeof *l->v);
    if (b.l->n)
        memcpy(l->v + a.l->n, b.l->v, b.l->n * sizeof *l->v);
    l->n = n;
    *out = a.kind == V_LIST ? VAL_LIST(l) : VAL_TUPLE(l);
    return 0;
}

static int op_add(struct value *out, struct render *r, struct value a, struct value b)
{
    if (a.kind == V_STR && b.kind == V_STR)
        return str_concat(out, r, a, b);
    if (is_whole(a) && is_whole(b)) {
        *out = VAL_INT(0);
        return add_over(whole(a), whole(b), &out->i) ? overflow(r) : 0;
    }
    if (val_is_number(a) && val_is_number(b)) {
        *out = VAL_FLOAT(val_double(a) + val_double(b));
        return 0;
    }
    if (a.kind == b.kind && (a.kind == V_LIST || a.kind == V_TUPLE))
        return concat_lists(out, r, a, b);
    if (a.kind == V_STR && b.kind != V_UNDEFINED)
        return render_fail(r, "can only join a string with a string, not with '%s'", val_type(b));
    return bad_operands(r, "+", a, b);
}

static int op_sub(struct value *out, struct render *r, struct value a, struct value b)
{
    if (is_whole(a) && is_whole(b)) {
        *out = VAL_INT(0);
        return __builtin_sub_overflow(whole(a), whole(b), &out->i) ? overflow(r) : 0;
    }
    if (!val_is_number(a) || !val_is_number(b))
        return bad_operands(r, "-", a, b);
    *out = VAL_FLOAT(val_double(a) - val_double(b));
    return 0;
}

static int repeat_str(struct value *out, struct render *r, struct value s, int64_t times)
{
    size_t mark = render_mark(r), n;
    times = times < 0 ? 0 : times;
    if (mul_over(s.s->n, (uint64_t)times, &n) || n > r->max_bytes)
        return render_over(r, "memory for values and output (its budget of bytes)");
    for (int64_t i = 0; n && i < times; i++)
        if (render_spend(r, 1) || render_put(r, s.s->p, s.s->n))
            return -1;
    if (render_take(out, r, mark))
        return -1;
    out->markup = s.markup;
    return 0;
}

static int repeat_list(struct value *out, struct render *r, struct value v, int64_t times)
{
    struct tlist *l;
    size_t n;
    times = times < 0 ? 0 : times;
    if (mul_over(v.l->n, (uint64_t)times, &n))
        n = SIZE_MAX;
    if (list_new(&l, r, n) || render_spend(r, n))
        return -1;
    for (; l->n < n; l->n++)
        l->v[l->n] = v.l->v[l->n % v.l->n];
    *out = v.kind == V_LIST ? VAL_LIST(l) : VAL_TUPLE(l);
    return 0;
}

static int op_mul(struct value *out, struct render *r, struct value a, struct value b)
{
    if (is_whole(a) && is_whole(b)) {
        *out = VAL_INT(0);
        return mul_over(whole(a), whole(b), &out->i) ? overflow(r) : 0;
    }
    if (val_is_number(a) && val_is_number(b)) {
        *out = VAL_FLOAT(val_double(a) * val_double(b));
        return 0;
    }
    if (is_whole(a)) { /* the number first: swap */
        struct value t = a;
        a = b;
        b = t;
    }
    if (is_whole(b) && a.kind == V_STR)
        return repeat_str(out, r, a, whole(b));
    if (is_whole(b) && (a.kind == V_LIST || a.kind == V_TUPLE))
        return repeat_list(out, r, a, whole(b));
    return bad_operands(r, "*", a, b);
}

static int check_divisor(struct render *r, const char *op, struct value a, struct value b)
{
    if (!val_is_number(a) || !val_is_number(b))
        return bad_operands(r, op, a, b);
    return val_double(b) == 0 ? render_fail(r, "division by zero") : 0;
}

static int op_div(struct value *out, struct render *r, struct value a, struct value b)
{
    if (check_divisor(r, "/", a, b))
        return -1;
    *out = VAL_FLOAT(val_double(a) / val_double(b));
    return 0;
}

/* Floor division and its remainder, whose sign is the divisor's. */
static int op_floordiv(struct value *out, struct render *r, struct value a, struct value b)
{
    if (check_divisor(r, "//", a, b))
        return -1;
    if (!is_whole(a) || !is_whole(b)) {
        double x = val_double(a), y = val_double(b), m = fmod(x, y);
        double q = (x - m) / y;
        if (m != 0 && (m < 0) != (y < 0))
            q -= 1;
        double f = floor(q);
        *out = VAL_FLOAT(q - f > 0.5 ? f + 1 : f);
        return 0;
    }
    int64_t x = whole(a), y = whole(b);
    if (x == INT64_MIN && y == -1)
        return overflow(r);
    *out = VAL_INT(x / y - (x % y != 0 && (x < 0) != (y < 0)));
    return 0;
}

static int op_mod(struct value *out, struct render *r, struct value a, struct value b)
{
    if (a.kind == V_STR)
        return format_percent(out, r, a, b);
    if (check_divisor(r, "%", a, b))
        return -1;
    if (!is_whole(a) || !is_whole(b)) {
        double y = val_double(b), m = fmod(val_double(a), y);
        if (m != 0 && (m < 0) != (y < 0))
            m += y;
        *out = VAL_FLOAT(m == 0 ? copysign(0, y) : m);
        return 0;
    }
    int64_t x = whole(a), y = whole(b), m = y == -1 ? 0 : x % y;
    *out = VAL_INT(m != 0 && (m < 0) != (y < 0) ? m + y : m);
    return 0;
}

static int op_pow(struct value *out, struct render *r, struct value a, struct value b)
{
    if (!val_is_number(a) || !val_is_number(b))
        return bad_operands(r, "**", a, b);
    if (!is_whole(a) || !is_whole(b) || whole(b) < 0) {
        double x = val_double(a), y = val_double(b);
        if (x == 0 && y < 0)
            return render_fail(r, "0 cannot be raised to a negative power");
        double p = pow(x, y);
        if (isnan(p) && !isnan(x) && !isnan(y))
            return render_fail(r, "a negative number has no such power");
        *out = VAL_FLOAT(p);
        return 0;
    }
    int64_t base = whole(a), result = 1;
    for (int64_t e = whole(b); e > 0; e >>= 1) {
        if ((e & 1) && mul_over(result, base, &result))
            return overflow(r);
        if (e > 1 && mul_over(base, base, &base))
            return overflow(r);
    }
    *out = VAL_INT(result);
    return 0;
}

int op_binary(struct value *out, struct render *r, int op, struct value a, struct value b)
{
    switch (op) {
    case '+':
        return op_add(out, r, a, b);
    case '-':
        return op_sub(out, r, a, b);
    case '*':
        return op_mul(out, r, a, b);
    case '/':
        return op_div(out, r, a, b);
    case OP_FLOORDIV:
        return op_floordiv(out, r, a, b);
    case '%':
        return op_mod(out, r, a, b);
    default:
        CHECK(op == OP_POW);
        return op_pow(out, r, a, b);
    }
}

int op_unary(struct value *out, struct render *r, bool negate, struct value a)
{
    if (a.kind == V_UNDEFINED)
        return undefined_use(r, a);
    if (!val_is_number(a))
        return render_fail(r, "a sign needs a number, not '%s'", val_type(a));
    if (a.kind == V_FLOAT) {
        *out = VAL_FLOAT(negate ? -a.f : a.f);
        return 0;
    }
    if (negate && whole(a) == INT64_MIN)
        return overflow(r);
    *out = VAL_INT(negate ? -whole(a) : whole(a));
    return 0;
}

/* ---- comparison ---- */

int op_compare(bool *out, struct render *r, int op, struct value a, struct value b)
{
    int cmp;
    if (op == OP_EQ || op == OP_NE) {
        if (val_equal(out, r, a, b))
            return -1;
        *out = *out == (op == OP_EQ);
        return 0;
    }
    if (op == OP_IN || op == OP_NOT_IN) {
        if (val_contains(out, r, a, b))
            return -1;
        *out = *out == (op == OP_IN);
        return 0;
    }
    if (val_order(&cmp, r, a, b))
        return -1;
    *out = cmp != 2 && (op == '<'     ? cmp < 0
                        : op == '>'   ? cmp > 0
                        : op == OP_LE ? cmp <= 0
                                      : cmp >= 0);
    return 0;
}

/* ---- slices: Python 3 library reference, "Common sequence operations", notes 4 and 5 ---- */

struct span {
    int64_t start, step, n;
};

static int slice_bound(int64_t *at, struct render *r, struct value v, int64_t len)
{
    if (v.kind == V_UNDEFINED)
        return undefined_use(r, v);
    if (!is_whole(v))
        return render_fail(r, "slice indices must be whole numbers or none, not '%s'", val_type(v));
    int64_t i = whole(v);
    *at = i < 0 ? (i < -len ? -1 : i + len) : i; /* -1: before the first */
    if (i < 0 && i >= -len)
        return 0;
    *at = MIN(*at, len);
    return 0;
}

static int resolve_slice(struct span *s, struct render *r, const struct value part[3], int64_t len)
{
    int64_t stop;
    s->step = 1;
    if (part[2].kind != V_NONE) {
        if (!is_whole(part[2]))
            return part[2].kind == V_UNDEFINED
                       ? undefined_use(r, part[2])
                       : render_fail(r, "a slice step must be a whole number or none");
        s->step = whole(part[2]);
        if (s->step == 0)
            return render_fail(r, "a slice step cannot be zero");
        s->step = MAX(s->step, -INT64_MAX);
    }
    bool back = s->step < 0;
    s->start = back ? len - 1 : 0;
    stop = back ? -1 : len;
    if (part[0].kind != V_NONE) {
        if (slice_bound(&s->start, r, part[0], len))
            return -1;
        s->start = back ? MIN(s->start, len - 1) : MAX(s->start, 0);
    }
    if (part[1].kind != V_NONE) {
        if (slice_bound(&stop, r, part[1], len))
            return -1;
        stop = back ? MIN(stop, len - 1) : MAX(stop, 0);
    }
    int64_t gap = back ? s->start - stop : stop - s->start, width = back ? -s->step : s->step;
    s->n = gap > 0 ? (gap - 1) / width + 1 : 0;
    return 0;
}

static int slice_str(struct value *out, struct render *r, struct value of, const struct span *s)
{
    if (s->step == 1) {
        if (str_chars(of.s) != of.s->n && render_spend_chars(r, of.s->n))
            return -1;
        size_t from = str_byte_of(of.s, (size_t)s->start);
        size_t to = str_byte_of(of.s, (size_t)(s->start + s->n));
        return str_sub(out, r, of, from, to - from);
    }
    /* Positions of all characters, then pick. */
    size_t n = str_chars(of.s), at = 0, mark = render_mark(r);
    uint32_t *where = render_array(r, n + 1, sizeof *where);
    if (!where || render_spend_chars(r, of.s->n * 2))
        return -1;
    for (size_t i = 0; i < n; i++) {
        where[i] = (uint32_t)at;
        at += char_len(of.s->p + at, of.s->n - at);
    }
    where[n] = (uint32_t)at;
    for (int64_t i = 0; i < s->n; i++) {
        int64_t c = s->start + i * s->step;
        if (render_put(r, of.s->p + where[c], where[c + 1] - where[c]))
            return -1;
    }
    if (render_take(out, r, mark))
        return -1;
    out->markup = of.markup;
    return 0;
}

static int slice_list(struct value *out, struct render *r, struct value of, const struct span *s)
{
    struct tlist *l;
    if (list_new(&l, r, (size_t)s->n) || render_spend(r, (uint64_t)s->n / 4))
        return -1;
    for (int64_t i = 0; i < s->n; i++)
        l->v[l->n++] = of.l->v[s->start + i * s->step];
    *out = of.kind == V_LIST ? VAL_LIST(l) : VAL_TUPLE(l);
    return 0;
}

static int slice_range(struct value *out, struct render *r, struct value of, const struct span *s)
{
    struct range *g = render_alloc(r, sizeof *g);
    if (!g)
        return -1;
    *g = (struct range){.n = s->n};
    if (mul_over(s->start, of.range->step, &g->start) ||
        add_over(g->start, of.range->start, &g->start) ||
        mul_over(of.range->step, s->step, &g->step) || mul_over(g->n, g->step, &g->stop) ||
        add_over(g->stop, g->start, &g->stop))
        return overflow(r);
    *out = (struct value){.kind = V_RANGE, .range = g};
    return 0;
}

int op_slice(struct value *out, struct render *r, struct value of, const struct value part[3])
{
    struct span s;
    int64_t len;
    if (of.kind == V_UNDEFINED)
        return undefined_use(r, of);
    bool ok = of.kind == V_STR || of.kind == V_LIST || of.kind == V_TUPLE || of.kind == V_RANGE;
    if (!ok)
        return render_fail(r, "'%s' object cannot be sliced", val_type(of));
    if (val_len(&len, r, of) || resolve_slice(&s, r, part, len))
        return -1;
    if (of.kind == V_STR)
        return slice_str(out, r, of, &s);
    return of.kind == V_RANGE ? slice_range(out, r, of, &s) : slice_list(out, r, of, &s);
}

/* ---- attributes and items ---- */

static int bind_method(struct value *out, struct render *r, const struct builtin *row,
                       struct value self)
{
    struct method *m = render_alloc(r, sizeof *m);
    if (!m)
        return -1;
    *m = (struct method){row, self};
    *out = (struct value){.kind = V_METHOD, .method = m};
    return 0;
}

static int undefined_of(struct value *out, struct value name)
{
    *out = VAL_UNDEF;
    if (name.kind == V_STR)
        out->hint = name.s;
    return 0;
}

static const struct builtin *find_method(struct value of, struct value name,
                                         const struct attr_rows *rows)
{
    int table = method_table_of(of);
    if (table < 0)
        return NULL;
    return rows ? rows->row[table] : method_find(table, name.s);
}

/* Attributes of values that are no Python containers. False: there is none of that name. */
static bool object_attr(int *rc, struct value *out, struct render *r, struct value of_name[2])
{
    struct value of = of_name[0], name = of_name[1];
    if (of.kind == V_LOOP) {
        *rc = loop_attr(out, r, of.loop, name);
        return true;
    }
    if (of.kind == V_NAMESPACE) {
        struct value *v = dict_find_str(of.d, name.s);
        if (v)
            *out = *v;
        return v != NULL;
    }
    if (of.kind == V_MACRO && str_is(name.s, "name")) {
        *out = VAL_NONE;
        *rc = of.macro->name ? str_view(out, r, of.macro->name->p, of.macro->name->n) : 0;
        return true;
    }
    if ((of.kind == V_CYCLER) && (str_is(name.s, "current") || str_is(name.s, "next"))) {
        *out = str_is(name.s, "next") ? of : of.cycler->items->v[of.cycler->at];
        return true;
    }
    return false;
}

static const struct attr_rows no_methods;

int get_attr(struct value *out, struct render *r, struct value of, struct value name,
             const struct attr_rows *rows)
{
    int rc = 0;
    if (of.kind == V_UNDEFINED)
        return undefined_use(r, of);
    const struct builtin *row = find_method(of, name, rows ? rows : &no_methods);
    if (row)
        return bind_method(out, r, row, of);
    if (of.kind == V_DICT) {
        struct value *v = dict_find_str(of.d, name.s);
        if (!v)
            return undefined_of(out, name);
        *out = *v;
        return 0;
    }
    if (object_attr(&rc, out, r, (struct value[2]){of, name}))
        return rc;
    return undefined_of(out, name);
}

static int item_at(struct value *out, struct render *r, struct value of, int64_t i)
{
    int64_t len;
    if (val_len(&len, r, of))
        return -1;
    i = i < 0 ? i + len : i;
    *out = VAL_UNDEF;
    if (i < 0 || i >= len)
        return 0;
    if (of.kind == V_RANGE) {
        *out = VAL_INT(of.range->start + i * of.range->step);
        return 0;
    }
    if (of.kind != V_STR) {
        *out = of.l->v[i];
        return 0;
    }
    if (str_chars(of.s) != of.s->n && render_spend_chars(r, of.s->n))
        return -1;
    size_t at = str_byte_of(of.s, (size_t)i);
    return str_sub(out, r, of, at, char_len(of.s->p + at, of.s->n - at));
}

int get_item(struct value *out, struct render *r, struct value of, struct value key)
{
    if (of.kind == V_UNDEFINED)
        return undefined_use(r, of);
    bool sequence =
        of.kind == V_STR || of.kind == V_LIST || of.kind == V_TUPLE || of.kind == V_RANGE;
    if (sequence && is_whole(key))
        return item_at(out, r, of, whole(key));
    if (of.kind == V_DICT && key.kind != V_LIST && key.kind != V_DICT) {
        struct value *v;
        if (dict_find(&v, r, of.d, key))
            return -1;
        if (v) {
            *out = *v;
            return 0;
        }
    }
    if (key.kind != V_STR)
        return undefined_of(out, key);
    /* A string that is no item may name an attribute. */
    int rc = 0;
    const struct builtin *row = find_method(of, key, NULL);
    if (row)
        return bind_method(out, r, row, of);
    if (object_attr(&rc, out, r, (struct value[2]){of, key}))
        return rc;
    return undefined_of(out, key);
}

int get_path(struct value *out, struct render *r, struct value of, struct value path)
{
    *out = of;
    if (path.kind != V_STR)
        return get_item(out, r, of, path);
    const char *p = path.s->p, *end = p + path.s->n;
    for (;;) {
        const char *dot = memchr(p, '.', (size_t)(end - p)), *stop = dot ? dot : end;
        struct value key;
        int64_t number = 0;
        bool digits = stop > p && stop - p < 18;
        for (const char *c = p; digits && c < stop; c++) {
            digits = *c >= '0' && *c <= '9';
            number = number * 10 + (*c - '0');
        }
        if (digits)
            key = VAL_INT(number);
        else if (str_view(&key, r, p, (size_t)(stop - p)))
            return -1;
        if (get_item(out, r, *out, key))
            return -1;
        if (!dot)
            return 0;
        p = dot + 1;
    }
}
