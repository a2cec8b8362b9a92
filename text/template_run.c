/* Runs statements: text and output, conditions, loops with their `loop` object, assignment and
 * scopes, macros and call blocks. Scopes and loop objects live in the rendering's arena; a loop's
 * scope is used again for its next round unless a macro defined in it remembers it. */
#include "text/template_internal.h"

/* ---- variables ---- */

int var_get(struct value *out, struct render *r, uint32_t sym)
{
    for (const struct scope *s = r->scope; s->up; s = s->up) {
        if (render_spend(r, s->n / 16))
            return -1;
        for (uint32_t i = 0; i < s->n; i++)
            if (s->vars[i].sym == sym) {
                *out = s->vars[i].v;
                return 0;
            }
    }
    if (r->root[sym].kind != V_MISSING) {
        *out = r->root[sym];
    } else if (r->t->globals[sym]) {
        *out = (struct value){.kind = V_FUNC, .func = r->t->globals[sym]};
    } else {
        *out = VAL_UNDEF;
        out->hint = r->t->syms[sym];
    }
    return 0;
}

static int var_set(struct render *r, uint32_t sym, struct value v)
{
    struct scope *s = r->scope;
    if (!s->up) {
        r->root[sym] = v;
        return 0;
    }
    if (render_spend(r, s->n / 16))
        return -1;
    for (uint32_t i = 0; i < s->n; i++)
        if (s->vars[i].sym == sym) {
            s->vars[i].v = v;
            return 0;
        }
    if (s->n == s->cap) {
        uint32_t cap = s->cap ? s->cap * 2 : 4;
        struct var *grown = render_array(r, cap, sizeof *grown);
        if (!grown)
            return -1;
        if (s->n)
            memcpy(grown, s->vars, s->n * sizeof *grown);
        s->vars = grown;
        s->cap = cap;
    }
    s->vars[s->n++] = (struct var){sym, v};
    return 0;
}

static struct scope *scope_new(struct render *r, struct scope *up)
{
    struct scope *s = render_alloc(r, sizeof *s);
    if (s)
        s->up = up;
    return s;
}

static int assign_tuple(struct render *r, const struct node *target, struct value v);

static int assign(struct render *r, const struct node *target, struct value v)
{
    if (target->kind == E_NAME)
        return var_set(r, target->sym, v);
    if (target->kind == E_TUPLE)
        return assign_tuple(r, target, v);
    CHECK(target->kind == E_NSREF);
    struct value ns;
    if (var_get(&ns, r, target->sym))
        return -1;
    if (ns.kind != V_NAMESPACE)
        return render_fail(r, "cannot assign attribute on something that is no namespace object");
    return dict_put(r, ns.d, target->v, v);
}

static int assign_tuple(struct render *r, const struct node *target, struct value v)
{
    struct tlist *l;
    if (v.kind == V_LIST || v.kind == V_TUPLE)
        l = v.l;
    else if (val_to_list(&l, r, v))
        return -1;
    if (l->n != target->n_items)
        return render_fail(r, "cannot unpack %zu values into %u names", l->n, target->n_items);
    for (uint32_t i = 0; i < target->n_items; i++)
        if (assign(r, target->items[i], l->v[i]))
            return -1;
    return 0;
}

/* ---- simple statements ---- */

static int exec_block(struct render *r, const struct node *n)
{
    for (uint32_t i = 0; i < n->n_items && r->flow == FLOW_ON; i++)
        if (exec(r, n->items[i]))
            return -1;
    return 0;
}

static int exec_text(struct render *r, const struct node *n)
{
    return render_put(r, n->v.s->p, n->v.s->n);
}

static int exec_output(struct render *r, const struct node *n)
{
    struct value v;
    return eval(&v, r, n->a) || put_str(r, v) ? -1 : 0;
}

static int exec_if(struct render *r, const struct node *n)
{
    for (uint32_t i = 0; i < n->n_items; i += 2) {
        struct value test;
        if (eval(&test, r, n->items[i]))
            return -1;
        if (val_truth(test))
            return exec(r, n->items[i + 1]);
    }
    return n->c ? exec(r, n->c) : 0;
}

static int exec_set(struct render *r, const struct node *n)
{
    struct value v;
    return eval(&v, r, n->b) || assign(r, n->a, v) ? -1 : 0;
}

/* Run a body in a scope of its own. */
static int exec_inside(struct render *r, const struct node *body, struct scope *scope)
{
    struct scope *outer = r->scope;
    if (!scope)
        return -1;
    r->scope = scope;
    int rc = exec(r, body);
    r->scope = outer;
    return rc;
}

static int capture(struct value *out, struct render *r, const struct node *body)
{
    size_t mark = render_mark(r);
    if (exec_inside(r, body, scope_new(r, r->scope)))
        return -1;
    return render_take(out, r, mark);
}

static int exec_set_block(struct render *r, const struct node *n)
{
    struct value v;
    if (capture(&v, r, n->d) || (n->b && eval_filters(&v, r, n->b, v)))
        return -1;
    return assign(r, n->a, v);
}

static int exec_filter(struct render *r, const struct node *n)
{
    struct value v;
    return capture(&v, r, n->d) || eval_filters(&v, r, n->b, v) || put_str(r, v) ? -1 : 0;
}

static int exec_with(struct render *r, const struct node *n)
{
    struct scope *inner = scope_new(r, r->scope), *outer = r->scope;
    if (!inner)
        return -1;
    for (uint32_t i = 0; i < n->n_items; i += 2) {
        struct value v;
        if (eval(&v, r, n->items[i + 1])) /* sees the outer names only */
            return -1;
        r->scope = inner;
        int rc = assign(r, n->items[i], v);
        r->scope = outer;
        if (rc)
            return -1;
    }
    return exec_inside(r, n->d, inner);
}

static int exec_scope(struct render *r, const struct node *n)
{
    return exec_inside(r, n->d, scope_new(r, r->scope));
}

static int exec_do(struct render *r, const struct node *n)
{
    struct value v;
    return eval(&v, r, n->a);
}

static int exec_break(struct render *r, const struct node *n)
{
    r->flow = FLOW_BREAK;
    return 0;
}

static int exec_continue(struct render *r, const struct node *n)
{
    r->flow = FLOW_CONTINUE;
    return 0;
}

/* ---- loops ---- */

/* The next item that passes the loop's filter. */
static int loop_pull(struct value *out, struct render *r, struct loop *l)
{
    for (;;) {
        int rc = walk_next(out, &l->walk, r);
        if (rc <= 0 || !l->node->c || l->filtered)
            return rc;
        struct scope *outer = r->scope;
        struct value test;
        if (!l->test_scope && !(l->test_scope = scope_new(r, l->scope->up)))
            return -1;
        r->scope = l->test_scope;
        rc = assign(r, l->node->a, *out) || eval(&test, r, l->node->c) ? -1 : 0;
        r->scope = outer;
        if (rc || val_truth(test))
            return rc ? rc : 1;
    }
}

static int loop_peek(struct render *r, struct loop *l)
{
    if (l->after.kind != V_MISSING)
        return 0;
    int rc = loop_pull(&l->after, r, l);
    if (rc == 0)
        l->after.kind = V_MISSING;
    return rc < 0 ? -1 : 0;
}

/* Items in all: known for sized values, else the rest is taken in now. */
static int loop_length(struct render *r, struct loop *l)
{
    struct value src = l->walk.src;
    if (l->length >= 0)
        return 0;
    if (!l->node->c && src.kind != V_ITER)
        return val_len(&l->length, r, src);
    struct tlist *rest;
    struct value v;
    int rc;
    if (list_new(&rest, r, 0))
        return -1;
    while ((rc = loop_pull(&v, r, l)) > 0)
        if (list_put(r, rest, v))
            return -1;
    if (rc)
        return -1;
    l->length = (int64_t)rest->n + l->index0 + 1 + (l->after.kind != V_MISSING);
    /* What was pulled has passed the filter: walk it through an iterator that is its own. */
    struct iter *it = render_alloc(r, sizeof *it);
    if (!it)
        return -1;
    *it = (struct iter){.items = rest, .name = "loop"};
    l->walk = (struct walk){.src = {.kind = V_ITER, .iter = it}};
    l->filtered = true;
    return 0;
}

static int loop_next(struct value *out, struct render *r, struct loop *l)
{
    int rc = 1;
    *out = l->after;
    if (l->after.kind == V_MISSING)
        rc = loop_pull(out, r, l);
    l->after.kind = V_MISSING;
    if (rc <= 0)
        return rc;
    l->index0++;
    l->before = l->current;
    l->current = *out;
    return 1;
}

/* All rounds of the loop over `over`; depth0 counts recursive loops around. */
static int run_loop(struct render *r, const struct node *n, struct value over, int64_t depth0)
{
    struct loop *l = render_alloc(r, sizeof *l);
    struct scope *outer = r->scope;
    struct value item;
    int rc;
    if (!l || !(l->scope = scope_new(r, outer)) || walk_begin(&l->walk, r, over))
        return -1;
    l->node = n;
    l->index0 = l->length = -1;
    l->depth0 = depth0;
    while ((rc = loop_next(&item, r, l)) > 0) {
        if (l->scope->kept && !(l->scope = scope_new(r, outer)))
            return -1;
        l->scope->n = 0;
        r->scope = l->scope;
        rc = var_set(r, r->t->sym_loop, (struct value){.kind = V_LOOP, .loop = l}) ||
                     assign(r, n->a, item) || exec(r, n->d)
                 ? -1
                 : 0;
        r->scope = outer;
        if (rc)
            return -1;
        bool leave = r->flow == FLOW_BREAK;
        r->flow = FLOW_ON;
        if (leave)
            return 0;
    }
    if (rc == 0 && l->index0 < 0 && n->rest)
        return exec_inside(r, n->rest, scope_new(r, outer));
    return rc;
}

static int exec_for(struct render *r, const struct node *n)
{
    struct value over;
    return eval(&over, r, n->b) ? -1 : run_loop(r, n, over, 0);
}

int loop_recurse(struct value *out, struct render *r, struct loop *l, struct call *c)
{
    if (!l->node->flag)
        return render_fail(r, "loop() needs a loop that is marked 'recursive'");
    if (c->n_pos != 1 || c->n_kw)
        return render_fail(r, "loop() takes what it shall go over, and nothing else");
    size_t mark = render_mark(r);
    struct scope *outer = r->scope;
    enum flow flow = r->flow;
    r->scope = l->scope->up;
    int rc = run_loop(r, l->node, c->pos[0], l->depth0 + 1);
    r->scope = outer;
    r->flow = flow;
    return rc ? -1 : render_take(out, r, mark);
}

static int loop_cycle(struct value *out, struct render *r, struct call *c)
{
    if (!c->n_pos)
        return render_fail(r, "loop.cycle() needs items");
    *out = c->pos[c->self.loop->index0 % c->n_pos];
    return 0;
}

static int loop_changed(struct value *out, struct render *r, struct call *c)
{
    struct loop *l = c->self.loop;
    struct tlist *now;
    bool same = false;
    if (list_new(&now, r, c->n_pos))
        return -1;
    for (uint32_t i = 0; i < c->n_pos; i++)
        now->v[now->n++] = c->pos[i];
    if (l->changed.kind == V_TUPLE && val_equal(&same, r, l->changed, VAL_TUPLE(now)))
        return -1;
    l->changed = VAL_TUPLE(now);
    *out = VAL_BOOL(!same);
    return 0;
}

static int loop_method(struct value *out, struct render *r, struct loop *l, struct value name)
{
    static const struct builtin rows[] = {{"cycle", loop_cycle, "*", 0},
                                          {"changed", loop_changed, "*", 0}};
    for (size_t i = 0; i < ARRAY_LEN(rows); i++)
        if (str_is(name.s, rows[i].name)) {
            struct method *m = render_alloc(r, sizeof *m);
            if (!m)
                return -1;
            *m = (struct method){&rows[i], {.kind = V_LOOP, .loop = l}};
            *out = (struct value){.kind = V_METHOD, .method = m};
            return 0;
        }
    *out = VAL_UNDEF;
    out->hint = name.s;
    return 0;
}

enum loop_need { NEED_NOTHING, NEED_PEEK, NEED_LENGTH };

int loop_attr(struct value *out, struct render *r, struct loop *l, struct value name)
{
    static const struct {
        const char *name;
        enum loop_need need;
    } attrs[] = {{"index", 0},
                 {"index0", 0},
                 {"first", 0},
                 {"last", NEED_PEEK},
                 {"depth", 0},
                 {"depth0", 0},
                 {"previtem", 0},
                 {"nextitem", NEED_PEEK},
                 {"length", NEED_LENGTH},
                 {"revindex", NEED_LENGTH},
                 {"revindex0", NEED_LENGTH}};
    size_t i = 0;
    while (i < ARRAY_LEN(attrs) && !str_is(name.s, attrs[i].name))
        i++;
    if (i == ARRAY_LEN(attrs))
        return loop_method(out, r, l, name);
    if ((attrs[i].need == NEED_PEEK && loop_peek(r, l)) ||
        (attrs[i].need == NEED_LENGTH && loop_length(r, l)))
        return -1;
    struct value nothing = VAL_UNDEF;
    nothing.hint = name.s;
    const struct value values[ARRAY_LEN(attrs)] = {
        VAL_INT(l->index0 + 1),
        VAL_INT(l->index0),
        VAL_BOOL(l->index0 == 0),
        VAL_BOOL(l->after.kind == V_MISSING),
        VAL_INT(l->depth0 + 1),
        VAL_INT(l->depth0),
        l->before.kind == V_MISSING ? nothing : l->before,
        l->after.kind == V_MISSING ? nothing : l->after,
        VAL_INT(l->length),
        VAL_INT(l->length - l->index0),
        VAL_INT(l->length - l->index0 - 1),
    };
    *out = values[i];
    return 0;
}

/* ---- macros ---- */

static int make_macro(struct value *out, struct render *r, const struct node *n)
{
    struct macro *m = render_alloc(r, sizeof *m);
    if (!m)
        return -1;
    *m = (struct macro){.node = n, .scope = r->scope};
    if (n->kind == S_MACRO)
        m->name = r->t->syms[n->sym];
    for (struct scope *s = r->scope; s; s = s->up)
        s->kept = true;
    *out = (struct value){.kind = V_MACRO, .macro = m};
    return 0;
}

static int exec_macro(struct render *r, const struct node *n)
{
    struct value v;
    return make_macro(&v, r, n) || var_set(r, n->sym, v) ? -1 : 0;
}

static int exec_call(struct render *r, const struct node *n)
{
    static const struct tstr caller_name = {.p = "caller", .n = 6, .n_chars = 6};
    struct call c = {0};
    struct value f, result;
    if (eval(&f, r, n->a->a) || eval_args(&c, r, n->a))
        return -1;
    struct kwarg *kw = render_array(r, c.n_kw + 1, sizeof *kw);
    if (!kw)
        return -1;
    if (c.n_kw)
        memcpy(kw, c.kw, c.n_kw * sizeof *kw);
    kw[c.n_kw].name = &caller_name;
    if (make_macro(&kw[c.n_kw].v, r, n))
        return -1;
    c.kw = kw;
    c.n_kw++;
    return val_call(&result, r, f, &c) || put_str(r, result) ? -1 : 0;
}

static const char *macro_name(const struct macro *m, int *n)
{
    *n = m->name ? (int)MIN(m->name->n, (size_t)60) : 6;
    return m->name ? m->name->p : "caller";
}

/* What the parameters did not take: caller, kwargs and varargs, if the body asks for them. */
static int bind_rest(struct render *r, const struct macro *m, const struct call *c,
                     const bool *kw_used, uint8_t uses)
{
    int len;
    const char *name = macro_name(m, &len);
    const struct node *n = m->node;
    struct tdict *rest;
    struct tlist *more;
    struct value caller = VAL_UNDEF;
    if (dict_new(&rest, r) || list_new(&more, r, 0))
        return -1;
    for (uint32_t i = 0; i < c->n_kw; i++) {
        if (kw_used[i])
            continue;
        struct value key = {.kind = V_STR};
        if ((uses & MACRO_CALLER) && str_is(c->kw[i].name, "caller")) {
            caller = c->kw[i].v;
            continue;
        }
        if (!(uses & MACRO_KWARGS))
            return render_fail(r, "macro '%.*s' takes no keyword argument '%.*s'", len, name,
                               (int)MIN(c->kw[i].name->n, (size_t)60), c->kw[i].name->p);
        if (str_view(&key, r, c->kw[i].name->p, c->kw[i].name->n) ||
            dict_put(r, rest, key, c->kw[i].v))
            return -1;
    }
    if (c->n_pos > n->n_args && !(uses & MACRO_VARARGS))
        return render_fail(r, "macro '%.*s' takes not more than %u arguments", len, name,
                           n->n_args);
    for (uint32_t i = n->n_args; i < c->n_pos; i++)
        if (list_put(r, more, c->pos[i]))
            return -1;
    const struct value values[3] = {caller, VAL_DICT(rest), VAL_TUPLE(more)};
    for (unsigned i = 0; i < 3; i++)
        if ((uses & (1u << i)) && var_set(r, r->t->sym_macro[i], values[i]))
            return -1;
    return 0;
}

static int bind_param(struct render *r, const struct param *m, const struct call *c, uint32_t i,
                      bool *kw_used)
{
    const struct tstr *name = r->t->syms[m->sym];
    struct value v = {.kind = V_MISSING};
    if (i < c->n_pos)
        v = c->pos[i];
    else if (render_spend(r, c->n_kw / 8))
        return -1;
    for (uint32_t k = 0; v.kind == V_MISSING && k < c->n_kw; k++)
        if (str_equal(c->kw[k].name, name)) {
            kw_used[k] = true;
            v = c->kw[k].v;
        }
    if (v.kind == V_MISSING && m->fallback && eval(&v, r, m->fallback))
        return -1;
    if (v.kind == V_MISSING) {
        v = VAL_UNDEF;
        v.hint = name;
    }
    return var_set(r, m->sym, v);
}

static int run_macro(struct render *r, const struct macro *m, const struct call *c)
{
    bool *kw_used = render_array(r, c->n_kw + 1, sizeof *kw_used);
    if (!kw_used)
        return -1;
    bool explicit_caller = false;
    for (uint32_t i = 0; i < m->node->n_args; i++) {
        if (bind_param(r, &m->node->params[i], c, i, kw_used))
            return -1;
        explicit_caller |= str_is(r->t->syms[m->node->params[i].sym], "caller");
    }
    uint8_t uses = m->node->uses;
    if (explicit_caller) /* the parameter has it already */
        uses &= (uint8_t)~MACRO_CALLER;
    return bind_rest(r, m, c, kw_used, uses) || exec(r, m->node->d) ? -1 : 0;
}

int macro_call(struct value *out, struct render *r, const struct macro *m, struct call *c)
{
    size_t mark = render_mark(r);
    struct scope *outer = r->scope;
    enum flow flow = r->flow;
    if (!(r->scope = scope_new(r, m->scope))) {
        r->scope = outer;
        return -1;
    }
    int rc = run_macro(r, m, c);
    r->scope = outer;
    r->flow = flow;
    return rc ? -1 : render_take(out, r, mark);
}

/* ---- the table ---- */

int exec(struct render *r, const struct node *n)
{
    static int (*const table[N_NODE_KINDS])(struct render *, const struct node *) = {
        [S_BLOCK] = exec_block,
        [S_TEXT] = exec_text,
        [S_OUTPUT] = exec_output,
        [S_IF] = exec_if,
        [S_FOR] = exec_for,
        [S_SET] = exec_set,
        [S_MACRO] = exec_macro,
        [S_SET_BLOCK] = exec_set_block,
        [S_CALL] = exec_call,
        [S_FILTER] = exec_filter,
        [S_WITH] = exec_with,
        [S_SCOPE] = exec_scope,
        [S_DO] = exec_do,
        [S_BREAK] = exec_break,
        [S_CONTINUE] = exec_continue,
    };
    r->line = n->line;
    if (render_spend(r, 1))
        return -1;
    if (r->depth >= TEMPLATE_MAX_EVAL)
        return render_over(r, "nesting depth (a macro that calls itself without end?)");
    r->depth++;
    CHECK(table[n->kind]);
    int rc = table[n->kind](r, n);
    r->depth--;
    return rc;
}
