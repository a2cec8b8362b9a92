/* Methods of dicts, lists and tuples, as Python has them, those that change the container included:
 * a rendering's values are its own, so nothing outside sees the change. */
#include "text/template_internal.h"

/* ---- dicts ---- */

static int dict_get(struct value *out, struct render *r, struct call *c)
{
    struct value *v;
    if (dict_find(&v, r, c->self.d, c->arg[0]))
        return -1;
    *out = v ? *v : c->arg[1].kind == V_MISSING ? VAL_NONE : c->arg[1];
    return 0;
}

static int make_view(struct value *out, struct render *r, struct call *c, char which)
{
    struct view *v = render_alloc(r, sizeof *v);
    if (!v || dict_items(&v->items, r, c->self.d, which))
        return -1;
    v->which = which;
    *out = (struct value){.kind = V_VIEW, .view = v};
    return 0;
}

static int dict_items_method(struct value *out, struct render *r, struct call *c)
{
    return make_view(out, r, c, 'i');
}

static int dict_keys(struct value *out, struct render *r, struct call *c)
{
    return make_view(out, r, c, 'k');
}

static int dict_values(struct value *out, struct render *r, struct call *c)
{
    return make_view(out, r, c, 'v');
}

static int copy_into(struct render *r, struct tdict *to, const struct tdict *from)
{
    for (uint32_t i = 0; i < from->n; i++)
        if (render_spend(r, 1) || dict_put(r, to, from->e[i].key, from->e[i].val))
            return -1;
    return 0;
}

static int dict_copy(struct value *out, struct render *r, struct call *c)
{
    struct tdict *d;
    if (dict_new(&d, r) || copy_into(r, d, c->self.d))
        return -1;
    *out = VAL_DICT(d);
    return 0;
}

static int dict_update(struct value *out, struct render *r, struct call *c)
{
    struct value other;
    static const struct tstr name = {.p = "dict", .n = 4};
    struct call make = {.pos = c->pos, .n_pos = c->n_pos, .kw = c->kw, .n_kw = c->n_kw};
    if (builtin_call(&other, r, global_find(&name), &make) || copy_into(r, c->self.d, other.d))
        return -1;
    *out = VAL_NONE;
    return 0;
}

static int dict_pop(struct value *out, struct render *r, struct call *c)
{
    struct tdict *d = c->self.d;
    struct value *v;
    if (dict_find(&v, r, d, c->arg[0]))
        return -1;
    if (!v && c->arg[1].kind == V_MISSING)
        return render_fail(r, "pop(): the dict has no such key");
    *out = v ? *v : c->arg[1];
    if (!v)
        return 0;
    const struct dict_entry *e =
        (const struct dict_entry *)(const void *)((const char *)v -
                                                  offsetof(struct dict_entry, val));
    return dict_remove(r, d, (size_t)(e - d->e));
}

static int dict_popitem(struct value *out, struct render *r, struct call *c)
{
    struct tdict *d = c->self.d;
    struct tlist *pair;
    if (!d->n)
        return render_fail(r, "popitem(): the dict is empty");
    if (list_new(&pair, r, 2))
        return -1;
    pair->v[0] = d->e[d->n - 1].key;
    pair->v[1] = d->e[d->n - 1].val;
    pair->n = 2;
    *out = VAL_TUPLE(pair);
    return dict_remove(r, d, d->n - 1);
}

static int dict_setdefault(struct value *out, struct render *r, struct call *c)
{
    struct value *v;
    if (dict_find(&v, r, c->self.d, c->arg[0]))
        return -1;
    *out = v ? *v : c->arg[1].kind == V_MISSING ? VAL_NONE : c->arg[1];
    return v ? 0 : dict_put(r, c->self.d, c->arg[0], *out);
}

static int dict_clear(struct value *out, struct render *r, struct call *c)
{
    *c->self.d = (struct tdict){0};
    *out = VAL_NONE;
    return 0;
}

static const struct builtin dict_rows[] = {
    {"get", dict_get, "key,default", 1},
    {"items", dict_items_method, "", 0},
    {"keys", dict_keys, "", 0},
    {"values", dict_values, "", 0},
    {"copy", dict_copy, "", 0},
    {"update", dict_update, "*", 0},
    {"pop", dict_pop, "key,default", 1},
    {"popitem", dict_popitem, "", 0},
    {"setdefault", dict_setdefault, "key,default", 1},
    {"clear", dict_clear, "", 0},
};
const struct builtin_table dict_methods = {dict_rows, ARRAY_LEN(dict_rows)};

/* ---- lists and tuples ---- */

static int list_append(struct value *out, struct render *r, struct call *c)
{
    *out = VAL_NONE;
    return list_put(r, c->self.l, c->arg[0]);
}

static int list_extend(struct value *out, struct render *r, struct call *c)
{
    struct tlist *more; /* a copy first: the list may be extended by itself */
    if (val_to_list(&more, r, c->arg[0]))
        return -1;
    for (size_t i = 0; i < more->n; i++)
        if (list_put(r, c->self.l, more->v[i]))
            return -1;
    *out = VAL_NONE;
    return 0;
}

static int list_insert(struct value *out, struct render *r, struct call *c)
{
    struct tlist *l = c->self.l;
    int64_t at, n = (int64_t)l->n;
    if (arg_int(&at, r, c, 0, 0) || list_put(r, l, c->arg[1]) ||
        render_spend_bulk(r, l->n * sizeof *l->v))
        return -1;
    at = at < 0 ? MAX(at + n, 0) : MIN(at, n);
    memmove(l->v + at + 1, l->v + at, (size_t)(n - at) * sizeof *l->v);
    l->v[at] = c->arg[1];
    *out = VAL_NONE;
    return 0;
}

static int remove_at(struct render *r, struct tlist *l, size_t at)
{
    memmove(l->v + at, l->v + at + 1, (l->n - at - 1) * sizeof *l->v);
    l->n--;
    return render_spend_bulk(r, (l->n - at) * sizeof *l->v);
}

static int list_pop(struct value *out, struct render *r, struct call *c)
{
    struct tlist *l = c->self.l;
    int64_t at;
    if (arg_int(&at, r, c, 0, -1))
        return -1;
    at += at < 0 ? (int64_t)l->n : 0;
    if (at < 0 || at >= (int64_t)l->n)
        return render_fail(r, "pop(): the list has no such place");
    *out = l->v[at];
    return remove_at(r, l, (size_t)at);
}

/* The place of the first item equal to argument 0, or -1. */
static int place_of(int64_t *at, struct render *r, struct call *c)
{
    struct tlist *l = c->self.l;
    *at = -1;
    for (size_t i = 0; i < l->n; i++) {
        bool eq;
        if (val_equal(&eq, r, l->v[i], c->arg[0]))
            return -1;
        if (eq) {
            *at = (int64_t)i;
            return 0;
        }
    }
    return 0;
}

static int list_remove(struct value *out, struct render *r, struct call *c)
{
    int64_t at;
    if (place_of(&at, r, c))
        return -1;
    *out = VAL_NONE;
    return at < 0 ? render_fail(r, "remove(): the list has no such item")
                  : remove_at(r, c->self.l, (size_t)at);
}

static int list_index(struct value *out, struct render *r, struct call *c)
{
    *out = VAL_INT(0);
    if (place_of(&out->i, r, c))
        return -1;
    return out->i < 0 ? render_fail(r, "index(): there is no such item") : 0;
}

static int list_count(struct value *out, struct render *r, struct call *c)
{
    *out = VAL_INT(0);
    for (size_t i = 0; i < c->self.l->n; i++) {
        bool eq;
        if (val_equal(&eq, r, c->self.l->v[i], c->arg[0]))
            return -1;
        out->i += eq;
    }
    return 0;
}

static int list_reverse(struct value *out, struct render *r, struct call *c)
{
    struct tlist *l = c->self.l;
    for (size_t i = 0; i < l->n / 2; i++) {
        struct value t = l->v[i];
        l->v[i] = l->v[l->n - 1 - i];
        l->v[l->n - 1 - i] = t;
    }
    *out = VAL_NONE;
    return render_spend_bulk(r, l->n * sizeof *l->v);
}

static int list_sort(struct value *out, struct render *r, struct call *c)
{
    static const struct tstr name = {.p = "sort", .n = 4};
    struct value args[2] = {VAL_BOOL(val_truth(c->arg[0])), VAL_BOOL(true)};
    struct call sort = {.self = c->self, .pos = args, .n_pos = 2};
    struct value sorted;
    if (call_filter(&sorted, r, &name, &sort))
        return -1;
    *c->self.l = *sorted.l;
    *out = VAL_NONE;
    return 0;
}

static int list_copy(struct value *out, struct render *r, struct call *c)
{
    struct tlist *l;
    if (val_to_list(&l, r, c->self))
        return -1;
    *out = VAL_LIST(l);
    return 0;
}

static int list_clear(struct value *out, struct render *r, struct call *c)
{
    *c->self.l = (struct tlist){0};
    *out = VAL_NONE;
    return 0;
}

static const struct builtin list_rows[] = {
    {"append", list_append, "object", 1},   {"pop", list_pop, "index", 0},
    {"extend", list_extend, "iterable", 1}, {"insert", list_insert, "index,object", 2},
    {"remove", list_remove, "value", 1},    {"index", list_index, "value", 1},
    {"count", list_count, "value", 1},      {"reverse", list_reverse, "", 0},
    {"sort", list_sort, "reverse", 0},      {"copy", list_copy, "", 0},
    {"clear", list_clear, "", 0},
};
const struct builtin_table list_methods = {list_rows, ARRAY_LEN(list_rows)};

static const struct builtin tuple_rows[] = {
    {"index", list_index, "value", 1},
    {"count", list_count, "value", 1},
};
const struct builtin_table tuple_methods = {tuple_rows, ARRAY_LEN(tuple_rows)};
