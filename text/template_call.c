/* Calls: the tables of filters, tests, globals and methods are searched here, arguments bound to a
 * row's parameters as Python binds them, and values that can be called are called. */
#include "text/template_internal.h"

static const struct builtin *find_row(const struct builtin_table *t, const struct tstr *name)
{
    for (size_t i = 0; i < t->n; i++)
        if (str_is(name, t->rows[i].name))
            return &t->rows[i];
    return NULL;
}

const struct builtin *filter_find(const struct tstr *name)
{
    const struct builtin *row = find_row(&filter_table, name);
    return row ? row : find_row(&filter_seq_table, name);
}

const struct builtin *test_find(const struct tstr *name)
{
    return find_row(&test_table, name);
}

const struct builtin *global_find(const struct tstr *name)
{
    return find_row(&global_table, name);
}

const struct builtin *method_find(int table, const struct tstr *name)
{
    static const struct builtin_table *const tables[N_METHOD_TABLES] = {
        [METHODS_STR] = &str_methods,
        [METHODS_DICT] = &dict_methods,
        [METHODS_LIST] = &list_methods,
        [METHODS_TUPLE] = &tuple_methods,
    };
    return find_row(tables[table], name);
}

int method_table_of(struct value v)
{
    return v.kind == V_STR     ? METHODS_STR
           : v.kind == V_DICT  ? METHODS_DICT
           : v.kind == V_LIST  ? METHODS_LIST
           : v.kind == V_TUPLE ? METHODS_TUPLE
                               : -1;
}

/* ---- binding ---- */

/* Length of the i-th name of "a,b,c", *name its start; 0 when there are fewer. */
static size_t param_name(const char **name, const char *params, int i)
{
    for (; i > 0; i--) {
        params = strchr(params, ',');
        if (!params)
            return 0;
        params++;
    }
    *name = params;
    return strcspn(params, ",");
}

static int n_params(const char *params)
{
    int n = *params != 0;
    for (; *params; params++)
        n += *params == ',';
    return n;
}

static int bind_keyword(struct render *r, struct call *c, const struct kwarg *kw, int n)
{
    for (int i = 0; i < n; i++) {
        const char *name = "";
        size_t len = param_name(&name, c->row->params, i);
        if (len != kw->name->n || memcmp(name, kw->name->p, len))
            continue;
        if (c->arg[i].kind != V_MISSING)
            return render_fail(r, "%s() got two values for %.*s", c->row->name, (int)len, name);
        c->arg[i] = kw->v;
        return 0;
    }
    return render_fail(r, "%s() takes no keyword argument '%.*s'", c->row->name,
                       (int)MIN(kw->name->n, (size_t)60), kw->name->p);
}

static int bind_args(struct render *r, struct call *c)
{
    memset(c->arg, 0, sizeof c->arg);
    if (c->row->params[0] == '*')
        return 0;
    int n = n_params(c->row->params);
    CHECK(n <= MAX_BOUND);
    if (c->n_pos > (uint32_t)n)
        return render_fail(r, "%s() takes at most %d argument%s, %u given", c->row->name, n,
                           n == 1 ? "" : "s", c->n_pos);
    for (uint32_t i = 0; i < c->n_pos; i++)
        c->arg[i] = c->pos[i];
    for (uint32_t i = 0; i < c->n_kw; i++)
        if (bind_keyword(r, c, &c->kw[i], n))
            return -1;
    for (int i = 0; i < c->row->n_required; i++) {
        const char *name = "";
        size_t len = param_name(&name, c->row->params, i);
        if (c->arg[i].kind == V_MISSING)
            return render_fail(r, "%s() is missing its argument '%.*s'", c->row->name, (int)len,
                               name);
    }
    return 0;
}

int builtin_call(struct value *out, struct render *r, const struct builtin *row, struct call *c)
{
    c->row = row;
    return bind_args(r, c) || row->fn(out, r, c) ? -1 : 0;
}

/* Filters that are handed on to filters (map of map of ...) nest as evaluations do. */
static int call_nested(struct value *out, struct render *r, const struct builtin *row,
                       struct call *c)
{
    if (r->depth >= TEMPLATE_MAX_EVAL)
        return render_over(r, "nesting depth of filters");
    r->depth++;
    int rc = builtin_call(out, r, row, c);
    r->depth--;
    return rc;
}

int call_filter(struct value *out, struct render *r, const struct tstr *name, struct call *c)
{
    const struct builtin *row = filter_find(name);
    if (!row)
        return render_fail(r, "no filter is named '%.*s'", (int)MIN(name->n, (size_t)60), name->p);
    return call_nested(out, r, row, c);
}

int call_test(bool *out, struct render *r, const struct tstr *name, struct call *c)
{
    const struct builtin *row = test_find(name);
    struct value v;
    if (!row)
        return render_fail(r, "no test is named '%.*s'", (int)MIN(name->n, (size_t)60), name->p);
    if (call_nested(&v, r, row, c))
        return -1;
    *out = val_truth(v);
    return 0;
}

/* ---- typed arguments ---- */

static const char *arg_name(size_t *len, const struct call *c, int i)
{
    const char *name = "";
    *len = param_name(&name, c->row->params, i);
    return name;
}

int arg_int(int64_t *out, struct render *r, const struct call *c, int i, int64_t fallback)
{
    size_t len;
    struct value v = c->arg[i];
    if (v.kind == V_MISSING) {
        *out = fallback;
        return 0;
    }
    if (v.kind == V_UNDEFINED)
        return undefined_use(r, v);
    if (v.kind != V_INT && v.kind != V_BOOL) {
        const char *name = arg_name(&len, c, i);
        return render_fail(r, "%s() needs a whole number as '%.*s', not %s", c->row->name, (int)len,
                           name, val_type(v));
    }
    *out = v.kind == V_INT ? v.i : (int64_t)v.b;
    return 0;
}

int arg_str(struct tstr **out, struct render *r, const struct call *c, int i)
{
    size_t len;
    struct value v = c->arg[i];
    if (v.kind == V_UNDEFINED)
        return undefined_use(r, v);
    if (v.kind != V_STR) {
        const char *name = arg_name(&len, c, i);
        return render_fail(r, "%s() needs a string as '%.*s', not %s", c->row->name, (int)len, name,
                           v.kind == V_MISSING ? "nothing" : val_type(v));
    }
    *out = v.s;
    return 0;
}

/* ---- calling a value ---- */

static int cycler_next(struct value *out, struct cycler *c)
{
    *out = c->items->v[c->at];
    c->at = (c->at + 1) % c->items->n;
    return 0;
}

static int joiner_next(struct value *out, struct render *r, struct joiner *j)
{
    if (j->used) {
        *out = j->sep;
        return 0;
    }
    j->used = true;
    return str_cstr(out, r, "");
}

int val_call(struct value *out, struct render *r, struct value f, struct call *c)
{
    switch ((enum val_kind)f.kind) {
    case V_FUNC:
        return builtin_call(out, r, f.func, c);
    case V_METHOD:
        c->self = f.method->self;
        return builtin_call(out, r, f.method->row, c);
    case V_MACRO:
        return macro_call(out, r, f.macro, c);
    case V_LOOP:
        return loop_recurse(out, r, f.loop, c);
    case V_CYCLER:
    case V_JOINER:
        if (c->n_pos || c->n_kw)
            return render_fail(r, "a %s takes no arguments", val_type(f));
        return f.kind == V_CYCLER ? cycler_next(out, f.cycler) : joiner_next(out, r, f.joiner);
    case V_UNDEFINED:
        return undefined_use(r, f);
    default:
        return render_fail(r, "'%s' object is not callable", val_type(f));
    }
}
