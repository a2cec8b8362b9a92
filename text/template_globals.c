/* The template language's global functions and its tests, a row each. */
#include "text/template_internal.h"

#include <math.h>

/* ---- globals ---- */

static int global_range(struct value *out, struct render *r, struct call *c)
{
    int64_t start = 0, stop, step;
    struct range *g;
    if (arg_int(&stop, r, c, 0, 0) || arg_int(&step, r, c, 2, 1))
        return -1;
    if (c->arg[1].kind != V_MISSING) {
        start = stop;
        if (arg_int(&stop, r, c, 1, 0))
            return -1;
    }
    if (step == 0)
        return render_fail(r, "range() needs a step that is not zero");
    __int128 gap = step > 0 ? (__int128)stop - start : (__int128)start - stop;
    __int128 width = step > 0 ? step : -(__int128)step;
    __int128 n = gap > 0 ? (gap + width - 1) / width : 0;
    if (n > TEMPLATE_MAX_RANGE)
        return err_set(r->e, ERR_LIMIT, "chat template line %u: range() over its limit of %d items",
                       r->line, TEMPLATE_MAX_RANGE);
    if (!(g = render_alloc(r, sizeof *g)))
        return -1;
    *g = (struct range){start, stop, step, (int64_t)n};
    *out = (struct value){.kind = V_RANGE, .range = g};
    return 0;
}

/* One optional dict or list of pairs, then keywords. */
static int fill_dict(struct tdict **out, struct render *r, struct call *c)
{
    if (dict_new(out, r))
        return -1;
    if (c->n_pos > 1)
        return render_fail(r, "%s() takes at most one plain argument", c->row->name);
    if (c->n_pos && c->pos[0].kind == V_DICT) {
        struct tdict *d = c->pos[0].d;
        for (uint32_t i = 0; i < d->n; i++)
            if (render_spend(r, 1) || dict_put(r, *out, d->e[i].key, d->e[i].val))
                return -1;
    } else if (c->n_pos) {
        struct walk w;
        struct value item;
        int rc;
        if (walk_begin(&w, r, c->pos[0]))
            return -1;
        while ((rc = walk_next(&item, &w, r)) > 0) {
            struct tlist *pair;
            if (val_to_list(&pair, r, item))
                return -1;
            if (pair->n != 2)
                return render_fail(r, "%s() needs pairs", c->row->name);
            if (dict_put(r, *out, pair->v[0], pair->v[1]))
                return -1;
        }
        if (rc)
            return -1;
    }
    for (uint32_t i = 0; i < c->n_kw; i++) {
        struct value key;
        if (str_view(&key, r, c->kw[i].name->p, c->kw[i].name->n) ||
            dict_put(r, *out, key, c->kw[i].v))
            return -1;
    }
    return 0;
}

static int global_dict(struct value *out, struct render *r, struct call *c)
{
    *out = (struct value){.kind = V_DICT};
    return fill_dict(&out->d, r, c);
}

static int global_namespace(struct value *out, struct render *r, struct call *c)
{
    *out = (struct value){.kind = V_NAMESPACE};
    return fill_dict(&out->d, r, c);
}

static int global_raise(struct value *out, struct render *r, struct call *c)
{
    if (val_str(out, r, c->arg[0]))
        return -1;
    return err_set(r->e, ERR_USAGE, "%.*s", (int)MIN(out->s->n, (size_t)499), out->s->p);
}

static int global_strftime_now(struct value *out, struct render *r, struct call *c)
{
    struct tstr *fmt;
    size_t mark = render_mark(r);
    return arg_str(&fmt, r, c, 0) || format_time(r, fmt) || render_take(out, r, mark) ? -1 : 0;
}

static int global_cycler(struct value *out, struct render *r, struct call *c)
{
    struct cycler *y = render_alloc(r, sizeof *y);
    if (!y || list_new(&y->items, r, c->n_pos))
        return -1;
    if (!c->n_pos || c->n_kw)
        return render_fail(r, "cycler() needs items, and takes no keywords");
    for (uint32_t i = 0; i < c->n_pos; i++)
        y->items->v[y->items->n++] = c->pos[i];
    *out = (struct value){.kind = V_CYCLER, .cycler = y};
    return 0;
}

static int global_joiner(struct value *out, struct render *r, struct call *c)
{
    struct joiner *j = render_alloc(r, sizeof *j);
    if (!j)
        return -1;
    j->sep = c->arg[0];
    if (j->sep.kind == V_MISSING && str_cstr(&j->sep, r, ", "))
        return -1;
    *out = (struct value){.kind = V_JOINER, .joiner = j};
    return 0;
}

static const struct builtin global_rows[] = {
    {"range", global_range, "start,stop,step", 1},
    {"dict", global_dict, "*", 0},
    {"namespace", global_namespace, "*", 0},
    {"raise_exception", global_raise, "message", 1},
    {"strftime_now", global_strftime_now, "format", 1},
    {"cycler", global_cycler, "*", 0},
    {"joiner", global_joiner, "sep", 0},
};
const struct builtin_table global_table = {global_rows, ARRAY_LEN(global_rows)};

/* ---- tests that only look at the kind of value ---- */

static int test_defined(struct value *out, struct render *r, struct call *c)
{
    *out = VAL_BOOL(c->self.kind != V_UNDEFINED);
    return 0;
}

static int test_undefined(struct value *out, struct render *r, struct call *c)
{
    *out = VAL_BOOL(c->self.kind == V_UNDEFINED);
    return 0;
}

static int test_none(struct value *out, struct render *r, struct call *c)
{
    *out = VAL_BOOL(c->self.kind == V_NONE);
    return 0;
}

static int test_boolean(struct value *out, struct render *r, struct call *c)
{
    *out = VAL_BOOL(c->self.kind == V_BOOL);
    return 0;
}

static int test_true(struct value *out, struct render *r, struct call *c)
{
    *out = VAL_BOOL(c->self.kind == V_BOOL && c->self.b);
    return 0;
}

static int test_false(struct value *out, struct render *r, struct call *c)
{
    *out = VAL_BOOL(c->self.kind == V_BOOL && !c->self.b);
    return 0;
}

static int test_integer(struct value *out, struct render *r, struct call *c)
{
    *out = VAL_BOOL(c->self.kind == V_INT);
    return 0;
}

static int test_float(struct value *out, struct render *r, struct call *c)
{
    *out = VAL_BOOL(c->self.kind == V_FLOAT);
    return 0;
}

static int test_number(struct value *out, struct render *r, struct call *c)
{
    *out = VAL_BOOL(val_is_number(c->self));
    return 0;
}

static int test_string(struct value *out, struct render *r, struct call *c)
{
    *out = VAL_BOOL(c->self.kind == V_STR);
    return 0;
}

static int test_mapping(struct value *out, struct render *r, struct call *c)
{
    *out = VAL_BOOL(c->self.kind == V_DICT);
    return 0;
}

static int test_sequence(struct value *out, struct render *r, struct call *c)
{
    int k = c->self.kind;
    *out = VAL_BOOL(k == V_STR || k == V_LIST || k == V_TUPLE || k == V_DICT || k == V_RANGE ||
                    k == V_UNDEFINED);
    return 0;
}

static int test_iterable(struct value *out, struct render *r, struct call *c)
{
    int k = c->self.kind;
    test_sequence(out, r, c);
    out->b |= k == V_VIEW || k == V_ITER || k == V_LOOP;
    return 0;
}

static int test_callable(struct value *out, struct render *r, struct call *c)
{
    int k = c->self.kind;
    *out = VAL_BOOL(k == V_MACRO || k == V_FUNC || k == V_METHOD || k == V_LOOP || k == V_CYCLER ||
                    k == V_JOINER || k == V_UNDEFINED);
    return 0;
}

static int test_escaped(struct value *out, struct render *r, struct call *c)
{
    *out = VAL_BOOL(c->self.kind == V_STR && c->self.markup);
    return 0;
}

/* ---- tests that compare ---- */

static int compare_with(struct value *out, struct render *r, struct call *c, int op)
{
    *out = VAL_BOOL(false);
    return op_compare(&out->b, r, op, c->self, c->arg[0]);
}

static int test_eq(struct value *out, struct render *r, struct call *c)
{
    return compare_with(out, r, c, OP_EQ);
}

static int test_ne(struct value *out, struct render *r, struct call *c)
{
    return compare_with(out, r, c, OP_NE);
}

static int test_lt(struct value *out, struct render *r, struct call *c)
{
    return compare_with(out, r, c, '<');
}

static int test_le(struct value *out, struct render *r, struct call *c)
{
    return compare_with(out, r, c, OP_LE);
}

static int test_gt(struct value *out, struct render *r, struct call *c)
{
    return compare_with(out, r, c, '>');
}

static int test_ge(struct value *out, struct render *r, struct call *c)
{
    return compare_with(out, r, c, OP_GE);
}

static int test_in(struct value *out, struct render *r, struct call *c)
{
    return compare_with(out, r, c, OP_IN);
}

static int test_sameas(struct value *out, struct render *r, struct call *c)
{
    struct value a = c->self, b = c->arg[0];
    *out = VAL_BOOL(a.kind == b.kind);
    if (!out->b || a.kind == V_NONE || a.kind == V_UNDEFINED)
        return 0;
    if (a.kind == V_BOOL || a.kind == V_INT || a.kind == V_FLOAT || a.kind == V_STR)
        return val_equal(&out->b, r, a, b);
    out->b = a.l == b.l;
    return 0;
}

static int remainder_is(struct value *out, struct render *r, struct call *c, int64_t by, int64_t is)
{
    struct value rest;
    if (op_binary(&rest, r, '%', c->self, VAL_INT(by)))
        return -1;
    *out = VAL_BOOL(false);
    return val_equal(&out->b, r, rest, VAL_INT(is));
}

static int test_odd(struct value *out, struct render *r, struct call *c)
{
    return remainder_is(out, r, c, 2, 1);
}

static int test_even(struct value *out, struct render *r, struct call *c)
{
    return remainder_is(out, r, c, 2, 0);
}

static int test_divisibleby(struct value *out, struct render *r, struct call *c)
{
    int64_t by;
    return arg_int(&by, r, c, 0, 1) || remainder_is(out, r, c, by, 0) ? -1 : 0;
}

static int test_case(struct value *out, struct render *r, struct call *c, bool want_upper)
{
    struct value s;
    bool any = false, all = true;
    if (val_str(&s, r, c->self) || render_spend_chars(r, s.s->n))
        return -1;
    for (size_t at = 0; all && at < s.s->n;) {
        uint32_t cp;
        bool upper;
        at += char_decode(&cp, s.s->p + at, s.s->n - at);
        if (!char_is_cased(cp, &upper))
            continue;
        any = true;
        all = upper == want_upper;
    }
    *out = VAL_BOOL(any && all);
    return 0;
}

static int test_lower(struct value *out, struct render *r, struct call *c)
{
    return test_case(out, r, c, false);
}

static int test_upper(struct value *out, struct render *r, struct call *c)
{
    return test_case(out, r, c, true);
}

static int test_filter(struct value *out, struct render *r, struct call *c)
{
    *out = VAL_BOOL(c->self.kind == V_STR && filter_find(c->self.s));
    return 0;
}

static int test_test(struct value *out, struct render *r, struct call *c)
{
    *out = VAL_BOOL(c->self.kind == V_STR && test_find(c->self.s));
    return 0;
}

static const struct builtin test_rows[] = {
    {"defined", test_defined, "", 0},
    {"undefined", test_undefined, "", 0},
    {"none", test_none, "", 0},
    {"boolean", test_boolean, "", 0},
    {"true", test_true, "", 0},
    {"false", test_false, "", 0},
    {"integer", test_integer, "", 0},
    {"float", test_float, "", 0},
    {"number", test_number, "", 0},
    {"string", test_string, "", 0},
    {"mapping", test_mapping, "", 0},
    {"sequence", test_sequence, "", 0},
    {"iterable", test_iterable, "", 0},
    {"callable", test_callable, "", 0},
    {"escaped", test_escaped, "", 0},
    {"eq", test_eq, "other", 1},
    {"equalto", test_eq, "other", 1},
    {"==", test_eq, "other", 1},
    {"ne", test_ne, "other", 1},
    {"!=", test_ne, "other", 1},
    {"lt", test_lt, "other", 1},
    {"lessthan", test_lt, "other", 1},
    {"<", test_lt, "other", 1},
    {"le", test_le, "other", 1},
    {"<=", test_le, "other", 1},
    {"gt", test_gt, "other", 1},
    {"greaterthan", test_gt, "other", 1},
    {">", test_gt, "other", 1},
    {"ge", test_ge, "other", 1},
    {">=", test_ge, "other", 1},
    {"in", test_in, "seq", 1},
    {"sameas", test_sameas, "other", 1},
    {"odd", test_odd, "", 0},
    {"even", test_even, "", 0},
    {"divisibleby", test_divisibleby, "num", 1},
    {"lower", test_lower, "", 0},
    {"upper", test_upper, "", 0},
    {"filter", test_filter, "", 0},
    {"test", test_test, "", 0},
};
const struct builtin_table test_table = {test_rows, ARRAY_LEN(test_rows)};
