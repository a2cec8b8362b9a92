/* Evaluates expressions: one small function a kind of node, in a table. Every evaluation costs a
 * step and a level of depth, both bounded. Values come from the rendering's arena; the tree is only
 * read. */
#include "text/template_internal.h"

int undefined_use(struct render *r, struct value v)
{
    if (v.hint)
        return render_fail(r, "'%.*s' is undefined", (int)MIN(v.hint->n, (size_t)100), v.hint->p);
    return render_fail(r, "a value is undefined");
}

static int eval_const(struct value *out, struct render *r, const struct node *n)
{
    *out = n->v;
    return 0;
}

static int eval_name(struct value *out, struct render *r, const struct node *n)
{
    return var_get(out, r, n->sym);
}

static int eval_items(struct tlist **out, struct render *r, const struct node *n)
{
    if (list_new(out, r, n->n_items))
        return -1;
    for (uint32_t i = 0; i < n->n_items; i++) {
        struct value v;
        if (eval(&v, r, n->items[i]) || list_put(r, *out, v))
            return -1;
    }
    return 0;
}

static int eval_list(struct value *out, struct render *r, const struct node *n)
{
    struct tlist *l;
    if (eval_items(&l, r, n))
        return -1;
    *out = n->kind == E_LIST ? VAL_LIST(l) : VAL_TUPLE(l);
    return 0;
}

static int eval_dict(struct value *out, struct render *r, const struct node *n)
{
    struct tdict *d;
    if (dict_new(&d, r))
        return -1;
    for (uint32_t i = 0; i < n->n_items; i += 2) {
        struct value key, val;
        if (eval(&key, r, n->items[i]) || eval(&val, r, n->items[i + 1]) ||
            dict_put(r, d, key, val))
            return -1;
    }
    *out = VAL_DICT(d);
    return 0;
}

static int eval_attr(struct value *out, struct render *r, const struct node *n)
{
    struct value of;
    if (eval(&of, r, n->a))
        return -1;
    r->line = n->line;
    return get_attr(out, r, of, n->v, n->rows);
}

static int eval_item(struct value *out, struct render *r, const struct node *n)
{
    struct value of, key;
    if (eval(&of, r, n->a) || eval(&key, r, n->b))
        return -1;
    r->line = n->line;
    return get_item(out, r, of, key);
}

static int eval_slice(struct value *out, struct render *r, const struct node *n)
{
    struct value of, part[3] = {VAL_NONE, VAL_NONE, VAL_NONE};
    if (eval(&of, r, n->a))
        return -1;
    for (int i = 0; i < 3; i++)
        if (n->items[i] && eval(&part[i], r, n->items[i]))
            return -1;
    return op_slice(out, r, of, part);
}

/* ---- calls ---- */

static int add_pos(struct render *r, struct call *c, uint32_t *cap, struct value v)
{
    if (c->n_pos == *cap) {
        *cap = *cap ? *cap * 2 : 4;
        struct value *grown = render_array(r, *cap, sizeof *grown);
        if (!grown)
            return -1;
        if (c->n_pos)
            memcpy(grown, c->pos, c->n_pos * sizeof *grown);
        c->pos = grown;
    }
    c->pos[c->n_pos++] = v;
    return 0;
}

static int add_kw(struct render *r, struct call *c, uint32_t *cap, struct kwarg kw)
{
    for (uint32_t i = 0; i < c->n_kw; i++)
        if (str_equal(c->kw[i].name, kw.name))
            return render_fail(r, "the keyword argument '%.*s' is given twice",
                               (int)MIN(kw.name->n, (size_t)60), kw.name->p);
    if (render_spend(r, c->n_kw))
        return -1;
    if (c->n_kw == *cap) {
        *cap = *cap ? *cap * 2 : 4;
        struct kwarg *grown = render_array(r, *cap, sizeof *grown);
        if (!grown)
            return -1;
        if (c->n_kw)
            memcpy(grown, c->kw, c->n_kw * sizeof *grown);
        c->kw = grown;
    }
    c->kw[c->n_kw++] = kw;
    return 0;
}

static int spread_list(struct render *r, struct call *c, uint32_t *cap, struct value v)
{
    struct walk w;
    struct value item;
    int rc;
    if (walk_begin(&w, r, v))
        return -1;
    while ((rc = walk_next(&item, &w, r)) > 0)
        if (add_pos(r, c, cap, item))
            return -1;
    return rc;
}

static int spread_dict(struct render *r, struct call *c, uint32_t *cap, struct value v)
{
    if (v.kind != V_DICT)
        return render_fail(r, "** needs a dict, not '%s'", val_type(v));
    for (uint32_t i = 0; i < v.d->n; i++) {
        const struct dict_entry *e = &v.d->e[i];
        if (e->key.kind != V_STR)
            return render_fail(r, "keywords must be strings");
        if (add_kw(r, c, cap, (struct kwarg){e->key.s, e->val}))
            return -1;
    }
    return 0;
}

int eval_args(struct call *c, struct render *r, const struct node *n)
{
    uint32_t cap_pos = 0, cap_kw = 0;
    for (uint32_t i = 0; i < n->n_args; i++) {
        const struct arg *a = &n->args[i];
        struct value v;
        int rc = eval(&v, r, a->e);
        if (rc)
            return rc;
        if (a->kind == ARG_POS)
            rc = add_pos(r, c, &cap_pos, v);
        else if (a->kind == ARG_KEYWORD)
            rc = add_kw(r, c, &cap_kw, (struct kwarg){a->name, v});
        else if (a->kind == ARG_STAR)
            rc = spread_list(r, c, &cap_pos, v);
        else
            rc = spread_dict(r, c, &cap_kw, v);
        if (rc)
            return rc;
    }
    r->line = n->line;
    return 0;
}

static int eval_call(struct value *out, struct render *r, const struct node *n)
{
    struct value f;
    struct call c = {0};
    if (eval(&f, r, n->a) || eval_args(&c, r, n))
        return -1;
    return val_call(out, r, f, &c);
}

static int run_filter(struct value *out, struct render *r, const struct node *n, struct value input)
{
    struct call c = {.self = input};
    if (eval_args(&c, r, n))
        return -1;
    if (!n->row)
        return call_filter(out, r, n->v.s, &c); /* gives the error */
    return builtin_call(out, r, n->row, &c);
}

static int eval_filter(struct value *out, struct render *r, const struct node *n)
{
    struct value input;
    return eval(&input, r, n->a) || run_filter(out, r, n, input) ? -1 : 0;
}

int eval_filters(struct value *out, struct render *r, const struct node *n, struct value input)
{
    struct value v = input;
    if (n->a && eval_filters(&v, r, n->a, input))
        return -1;
    return run_filter(out, r, n, v);
}

static int eval_test(struct value *out, struct render *r, const struct node *n)
{
    struct call c = {0};
    bool yes;
    if (eval(&c.self, r, n->a) || eval_args(&c, r, n))
        return -1;
    if (n->row)
        return builtin_call(out, r, n->row, &c);
    if (call_test(&yes, r, n->v.s, &c))
        return -1;
    *out = VAL_BOOL(yes);
    return 0;
}

/* ---- operators ---- */

static int eval_not(struct value *out, struct render *r, const struct node *n)
{
    struct value v;
    if (eval(&v, r, n->a))
        return -1;
    *out = VAL_BOOL(!val_truth(v));
    return 0;
}

static int eval_sign(struct value *out, struct render *r, const struct node *n)
{
    struct value v;
    return eval(&v, r, n->a) || op_unary(out, r, n->kind == E_NEG, v) ? -1 : 0;
}

static int eval_and_or(struct value *out, struct render *r, const struct node *n)
{
    if (eval(out, r, n->a))
        return -1;
    return val_truth(*out) == (n->kind == E_AND) ? eval(out, r, n->b) : 0;
}

static int eval_binary(struct value *out, struct render *r, const struct node *n)
{
    struct value a, b;
    if (eval(&a, r, n->a) || eval(&b, r, n->b))
        return -1;
    r->line = n->line;
    return op_binary(out, r, n->op, a, b);
}

static int eval_concat(struct value *out, struct render *r, const struct node *n)
{
    struct value sum, v;
    if (eval(&v, r, n->items[0]) || val_str(&sum, r, v))
        return -1;
    sum.markup = false; /* ~ joins plain text when autoescape is off */
    for (uint32_t i = 1; i < n->n_items; i++) {
        if (eval(&v, r, n->items[i]) || val_str(&v, r, v))
            return -1;
        v.markup = false;
        if (str_concat(&sum, r, sum, v))
            return -1;
    }
    *out = sum;
    return 0;
}

static int eval_compare(struct value *out, struct render *r, const struct node *n)
{
    struct value a, b;
    bool yes = true;
    if (eval(&a, r, n->a))
        return -1;
    for (uint32_t i = 0; yes && i < n->n_items; i++, a = b) {
        if (eval(&b, r, n->items[i]))
            return -1;
        r->line = n->line;
        if (op_compare(&yes, r, n->ops[i], a, b))
            return -1;
    }
    *out = VAL_BOOL(yes);
    return 0;
}

static int eval_cond(struct value *out, struct render *r, const struct node *n)
{
    struct value test;
    if (eval(&test, r, n->a))
        return -1;
    if (val_truth(test))
        return eval(out, r, n->b);
    if (n->c)
        return eval(out, r, n->c);
    *out = VAL_UNDEF;
    return 0;
}

int eval(struct value *out, struct render *r, const struct node *n)
{
    static int (*const table[N_EXPR_KINDS])(struct value *, struct render *,
                                            const struct node *) = {
        [E_CONST] = eval_const,     [E_NAME] = eval_name,     [E_LIST] = eval_list,
        [E_TUPLE] = eval_list,      [E_DICT] = eval_dict,     [E_ATTR] = eval_attr,
        [E_ITEM] = eval_item,       [E_SLICE] = eval_slice,   [E_CALL] = eval_call,
        [E_FILTER] = eval_filter,   [E_TEST] = eval_test,     [E_NOT] = eval_not,
        [E_NEG] = eval_sign,        [E_POS] = eval_sign,      [E_AND] = eval_and_or,
        [E_OR] = eval_and_or,       [E_BINARY] = eval_binary, [E_CONCAT] = eval_concat,
        [E_COMPARE] = eval_compare, [E_COND] = eval_cond,
    };
    r->line = n->line;
    if (r->n_steps == 0 || r->depth >= TEMPLATE_MAX_EVAL) {
        if (r->n_steps == 0)
            return render_spend(r, 1);
        return render_over(r, "nesting depth (a macro that calls itself without end?)");
    }
    r->n_steps--;
    r->depth++;
    CHECK(table[n->kind]);
    int rc = table[n->kind](out, r, n);
    r->depth--;
    return rc;
}
