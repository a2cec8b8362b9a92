/* Filters over sequences: joining, picking, mapping, sorting, grouping. What Python gives as a
 * generator is a V_ITER here: computed at once, consumed by walking it. The table at the end has a
 * row each; "*" rows read their arguments themselves, to hand them on to a filter or test. */
#include "text/template_internal.h"

static int make_iter(struct value *out, struct render *r, struct tlist *items, const char *name)
{
    struct iter *it = render_alloc(r, sizeof *it);
    if (!it)
        return -1;
    *it = (struct iter){.items = items, .name = name};
    *out = (struct value){.kind = V_ITER, .iter = it};
    return 0;
}

static int filter_length(struct value *out, struct render *r, struct call *c)
{
    *out = VAL_INT(0);
    return val_len(&out->i, r, c->self);
}

static int filter_list(struct value *out, struct render *r, struct call *c)
{
    struct tlist *l;
    if (val_to_list(&l, r, c->self))
        return -1;
    *out = VAL_LIST(l);
    return 0;
}

static int filter_items(struct value *out, struct render *r, struct call *c)
{
    struct tlist *l;
    if (c->self.kind == V_UNDEFINED) {
        if (list_new(&l, r, 0))
            return -1;
    } else if (c->self.kind != V_DICT) {
        return render_fail(r, "items needs a dict, not '%s'", val_type(c->self));
    } else if (dict_items(&l, r, c->self.d, 'i')) {
        return -1;
    }
    return make_iter(out, r, l, "items");
}

static int filter_first(struct value *out, struct render *r, struct call *c)
{
    struct walk w;
    if (walk_begin(&w, r, c->self))
        return -1;
    int rc = walk_next(out, &w, r);
    if (rc == 0)
        *out = VAL_UNDEF;
    return rc < 0 ? -1 : 0;
}

static int filter_last(struct value *out, struct render *r, struct call *c)
{
    struct tlist *l;
    if (c->self.kind == V_ITER)
        return render_fail(r, "last needs something that can be reversed, not a generator");
    if (c->self.kind == V_LIST || c->self.kind == V_TUPLE)
        l = c->self.l;
    else if (val_to_list(&l, r, c->self))
        return -1;
    *out = l->n ? l->v[l->n - 1] : VAL_UNDEF;
    return 0;
}

static int filter_reverse(struct value *out, struct render *r, struct call *c)
{
    struct tlist *l;
    if (c->self.kind == V_STR) {
        const struct value back[3] = {VAL_NONE, VAL_NONE, VAL_INT(-1)};
        return op_slice(out, r, c->self, back);
    }
    if (val_to_list(&l, r, c->self))
        return -1;
    for (size_t i = 0; i < l->n / 2; i++) {
        struct value t = l->v[i];
        l->v[i] = l->v[l->n - 1 - i];
        l->v[l->n - 1 - i] = t;
    }
    return make_iter(out, r, l, "reverse");
}

/* The value a filter with `attribute` looks at: the item itself, or what the path leads to. */
static int key_of(struct value *out, struct render *r, struct value item, struct value attribute)
{
    *out = item;
    if (attribute.kind == V_MISSING || attribute.kind == V_NONE)
        return 0;
    return get_path(out, r, item, attribute);
}

static int filter_join(struct value *out, struct render *r, struct call *c)
{
    struct walk w;
    struct value item, sep = c->arg[0];
    int rc;
    if (walk_begin(&w, r, c->self))
        return -1;
    if (sep.kind != V_MISSING && val_str(&sep, r, sep))
        return -1;
    size_t mark = render_mark(r);
    for (bool first = true; (rc = walk_next(&item, &w, r)) > 0; first = false) {
        if (!first && sep.kind == V_STR && render_put(r, sep.s->p, sep.s->n))
            return -1;
        if (key_of(&item, r, item, c->arg[1]) || put_str(r, item))
            return -1;
    }
    return rc ? -1 : render_take(out, r, mark);
}

static int filter_sum(struct value *out, struct render *r, struct call *c)
{
    struct walk w;
    struct value item, sum = c->arg[1].kind == V_MISSING ? VAL_INT(0) : c->arg[1];
    int rc;
    if (walk_begin(&w, r, c->self))
        return -1;
    while ((rc = walk_next(&item, &w, r)) > 0)
        if (key_of(&item, r, item, c->arg[0]) || op_binary(&sum, r, '+', sum, item))
            return -1;
    *out = sum;
    return rc;
}

static int filter_attr(struct value *out, struct render *r, struct call *c)
{
    struct tstr *name;
    if (arg_str(&name, r, c, 0))
        return -1;
    const struct attr_rows *rows = NULL;
    struct attr_rows found;
    for (int i = 0; i < N_METHOD_TABLES; i++)
        found.row[i] = method_find(i, name);
    rows = &found;
    int table = method_table_of(c->self);
    if (c->self.kind == V_DICT && !(table >= 0 && found.row[table])) {
        *out = VAL_UNDEF; /* attributes only, never items */
        return 0;
    }
    return get_attr(out, r, c->self, c->arg[0], rows);
}

/* ---- map, select, reject ---- */

static struct value keyword(const struct call *c, const char *name)
{
    for (uint32_t i = 0; i < c->n_kw; i++)
        if (str_is(c->kw[i].name, name))
            return c->kw[i].v;
    return (struct value){.kind = V_MISSING};
}

/* The call without its first `n` plain arguments, for one item. */
static struct call rest_of(const struct call *c, uint32_t n, struct value item)
{
    return (struct call){
        .self = item, .pos = c->pos + n, .n_pos = c->n_pos - n, .kw = c->kw, .n_kw = c->n_kw};
}

static int map_item(struct value *out, struct render *r, struct call *c, struct value item)
{
    struct value path = keyword(c, "attribute");
    if (!c->n_pos) {
        struct value fallback = keyword(c, "default");
        if (key_of(out, r, item, path))
            return -1;
        if (out->kind == V_UNDEFINED && fallback.kind != V_MISSING && fallback.kind != V_NONE)
            *out = fallback;
        return 0;
    }
    struct call one = rest_of(c, 1, item);
    return call_filter(out, r, c->pos[0].s, &one);
}

static int filter_map(struct value *out, struct render *r, struct call *c)
{
    struct walk w;
    struct tlist *l;
    struct value item;
    int rc = 0;
    if (!c->n_pos && keyword(c, "attribute").kind == V_MISSING)
        return render_fail(r, "map needs the name of a filter, or attribute=");
    if (c->n_pos && c->pos[0].kind != V_STR)
        return render_fail(r, "map needs the name of a filter");
    if (list_new(&l, r, 0) || walk_begin(&w, r, c->self))
        return -1;
    while ((rc = walk_next(&item, &w, r)) > 0) {
        struct value v;
        if (map_item(&v, r, c, item) || list_put(r, l, v))
            return -1;
    }
    return rc ? -1 : make_iter(out, r, l, "map");
}

/* Whether one item passes: by the test named behind the attribute (if any), else by its truth. */
static int passes(bool *yes, struct render *r, struct call *c, struct value item, bool by_attr)
{
    uint32_t at = by_attr;
    if (by_attr && get_path(&item, r, item, c->pos[0]))
        return -1;
    if (c->n_pos <= at) {
        *yes = val_truth(item);
        return 0;
    }
    if (c->pos[at].kind != V_STR)
        return render_fail(r, "%s needs the name of a test", c->row->name);
    struct call one = rest_of(c, at + 1, item);
    return call_test(yes, r, c->pos[at].s, &one);
}

static int choose(struct value *out, struct render *r, struct call *c, bool by_attr, bool keep)
{
    struct walk w;
    struct tlist *l;
    struct value item;
    int rc = 0;
    if (list_new(&l, r, 0))
        return -1;
    if (!val_truth(c->self)) /* nothing to go over, not even none */
        return make_iter(out, r, l, c->row->name);
    if (by_attr && !c->n_pos)
        return render_fail(r, "%s needs the name of an attribute", c->row->name);
    if (walk_begin(&w, r, c->self))
        return -1;
    while ((rc = walk_next(&item, &w, r)) > 0) {
        bool yes;
        if (passes(&yes, r, c, item, by_attr) || (yes == keep && list_put(r, l, item)))
            return -1;
    }
    return rc ? -1 : make_iter(out, r, l, c->row->name);
}

static int filter_select(struct value *out, struct render *r, struct call *c)
{
    return choose(out, r, c, false, true);
}

static int filter_reject(struct value *out, struct render *r, struct call *c)
{
    return choose(out, r, c, false, false);
}

static int filter_selectattr(struct value *out, struct render *r, struct call *c)
{
    return choose(out, r, c, true, true);
}

static int filter_rejectattr(struct value *out, struct render *r, struct call *c)
{
    return choose(out, r, c, true, false);
}

/* ---- sorting ---- */

struct sort_item {
    struct value key, v;
};

static int fold_key(struct value *key, struct render *r, bool case_sensitive)
{
    return key->kind == V_STR && !case_sensitive ? str_recase(key, r, *key, CASE_LOWER) : 0;
}

/* Keys of a comma list of paths are a tuple of each. */
static int sort_key(struct value *key, struct render *r, struct value item, struct value attribute,
                    bool case_sensitive)
{
    if (attribute.kind != V_STR || !memchr(attribute.s->p, ',', attribute.s->n))
        return key_of(key, r, item, attribute) || fold_key(key, r, case_sensitive) ? -1 : 0;
    struct tlist *l;
    if (list_new(&l, r, 2))
        return -1;
    for (size_t at = 0; at <= attribute.s->n;) {
        const char *p = attribute.s->p + at, *comma = memchr(p, ',', attribute.s->n - at);
        size_t n = comma ? (size_t)(comma - p) : attribute.s->n - at;
        struct value path, v;
        if (str_view(&path, r, p, n) || get_path(&v, r, item, path) ||
            fold_key(&v, r, case_sensitive) || list_put(r, l, v))
            return -1;
        at += n + 1;
    }
    *key = VAL_TUPLE(l);
    return 0;
}

static int merge(struct sort_item *to, struct render *r, const struct sort_item *from,
                 size_t n_mid[2], bool reverse)
{
    size_t n = n_mid[0], mid = n_mid[1], a = 0, b = mid;
    for (size_t i = 0; i < n; i++) {
        bool take_b = a >= mid;
        if (a < mid && b < n) {
            bool less;
            const struct sort_item *x = reverse ? &from[a] : &from[b];
            const struct sort_item *y = reverse ? &from[b] : &from[a];
            if (op_compare(&less, r, '<', x->key, y->key))
                return -1;
            take_b = less;
        }
        to[i] = take_b ? from[b++] : from[a++];
    }
    return 0;
}

/* Stable merge sort, bottom up. The result is in items. */
static int sort_items(struct sort_item *items, struct render *r, size_t n, bool reverse)
{
    struct sort_item *other = render_array(r, n, sizeof *other);
    struct sort_item *from = items, *to = other;
    if (!other)
        return -1;
    for (size_t width = 1; width < n; width *= 2) {
        for (size_t at = 0; at < n; at += 2 * width) {
            size_t n_mid[2] = {MIN(2 * width, n - at), MIN(width, n - at)};
            if (merge(to + at, r, from + at, n_mid, reverse))
                return -1;
        }
        struct sort_item *t = from;
        from = to;
        to = t;
    }
    if (from != items && n)
        memcpy(items, from, n * sizeof *items);
    return 0;
}

static int sort_list(struct tlist *l, struct render *r, struct value attribute, bool case_sensitive,
                     bool reverse)
{
    struct sort_item *items = render_array(r, l->n, sizeof *items);
    if (!items)
        return -1;
    for (size_t i = 0; i < l->n; i++) {
        items[i].v = l->v[i];
        if (sort_key(&items[i].key, r, l->v[i], attribute, case_sensitive))
            return -1;
    }
    if (sort_items(items, r, l->n, reverse))
        return -1;
    for (size_t i = 0; i < l->n; i++)
        l->v[i] = items[i].v;
    return 0;
}

static int filter_sort(struct value *out, struct render *r, struct call *c)
{
    struct tlist *l;
    if (val_to_list(&l, r, c->self) ||
        sort_list(l, r, c->arg[2], val_truth(c->arg[1]), val_truth(c->arg[0])))
        return -1;
    *out = VAL_LIST(l);
    return 0;
}

static int filter_dictsort(struct value *out, struct render *r, struct call *c)
{
    struct tlist *l;
    struct value by = c->arg[1];
    if (c->self.kind != V_DICT)
        return c->self.kind == V_UNDEFINED
                   ? undefined_use(r, c->self)
                   : render_fail(r, "dictsort needs a dict, not '%s'", val_type(c->self));
    bool by_value = by.kind == V_STR && str_is(by.s, "value");
    if (by.kind != V_MISSING && !by_value && !(by.kind == V_STR && str_is(by.s, "key")))
        return render_fail(r, "dictsort: by must be \"key\" or \"value\"");
    if (dict_items(&l, r, c->self.d, 'i') ||
        sort_list(l, r, VAL_INT(by_value), val_truth(c->arg[0]), val_truth(c->arg[2])))
        return -1;
    *out = VAL_LIST(l);
    return 0;
}

static int extreme(struct value *out, struct render *r, struct call *c, int op)
{
    struct walk w;
    struct value item, key, best;
    int rc;
    bool any = false, better;
    *out = VAL_UNDEF;
    if (walk_begin(&w, r, c->self))
        return -1;
    while ((rc = walk_next(&item, &w, r)) > 0) {
        if (key_of(&key, r, item, c->arg[1]) || fold_key(&key, r, val_truth(c->arg[0])))
            return -1;
        better = !any;
        if (any && op_compare(&better, r, op, key, best))
            return -1;
        if (better) {
            best = key;
            *out = item;
        }
        any = true;
    }
    return rc;
}

static int filter_min(struct value *out, struct render *r, struct call *c)
{
    return extreme(out, r, c, '<');
}

static int filter_max(struct value *out, struct render *r, struct call *c)
{
    return extreme(out, r, c, '>');
}

static int filter_unique(struct value *out, struct render *r, struct call *c)
{
    struct walk w;
    struct tlist *l;
    struct tdict *seen;
    struct value item, key, *old;
    int rc;
    if (walk_begin(&w, r, c->self) || list_new(&l, r, 0) || dict_new(&seen, r))
        return -1;
    while ((rc = walk_next(&item, &w, r)) > 0) {
        if (key_of(&key, r, item, c->arg[1]) || fold_key(&key, r, val_truth(c->arg[0])) ||
            dict_find(&old, r, seen, key))
            return -1;
        if (!old && (dict_put(r, seen, key, VAL_NONE) || list_put(r, l, item)))
            return -1;
    }
    return rc ? -1 : make_iter(out, r, l, "unique");
}

/* ---- grouping ---- */

static int add_group(struct tlist **members, struct render *r, struct tlist *groups,
                     struct value key)
{
    struct tlist *pair;
    if (list_new(&pair, r, 2) || list_new(members, r, 0))
        return -1;
    pair->v[0] = key;
    pair->v[1] = VAL_LIST(*members);
    pair->n = 2;
    return list_put(r, groups, VAL_TUPLE(pair));
}

static int filter_groupby(struct value *out, struct render *r, struct call *c)
{
    struct tlist *l, *groups, *members = NULL;
    struct value last = VAL_NONE;
    bool same, exact = val_truth(c->arg[2]);
    if (val_to_list(&l, r, c->self) || sort_list(l, r, c->arg[0], exact, false) ||
        list_new(&groups, r, 0))
        return -1;
    for (size_t i = 0; i < l->n; i++) {
        struct value key, shown;
        if (key_of(&key, r, l->v[i], c->arg[0]))
            return -1;
        if (key.kind == V_UNDEFINED && c->arg[1].kind != V_MISSING)
            key = c->arg[1];
        shown = key;
        if (fold_key(&key, r, exact) || val_equal(&same, r, key, last))
            return -1;
        if ((!members || !same) && add_group(&members, r, groups, shown))
            return -1;
        last = key;
        if (list_put(r, members, l->v[i]))
            return -1;
    }
    *out = VAL_LIST(groups);
    return 0;
}

static int filter_batch(struct value *out, struct render *r, struct call *c)
{
    struct tlist *all, *rows, *row = NULL;
    int64_t size;
    if (val_to_list(&all, r, c->self) || list_new(&rows, r, 0) || arg_int(&size, r, c, 0, 1))
        return -1;
    if (size < 1)
        return render_fail(r, "batch needs a size above zero");
    for (size_t i = 0; i < all->n; i++) {
        if (i % (size_t)size == 0 && (list_new(&row, r, 0) || list_put(r, rows, VAL_LIST(row))))
            return -1;
        if (list_put(r, row, all->v[i]))
            return -1;
    }
    while (row && arg_given(c, 1) && row->n < (size_t)size)
        if (render_spend(r, 1) || list_put(r, row, c->arg[1]))
            return -1;
    return make_iter(out, r, rows, "batch");
}

static int filter_slice(struct value *out, struct render *r, struct call *c)
{
    struct tlist *all, *rows;
    int64_t n;
    if (val_to_list(&all, r, c->self) || list_new(&rows, r, 0) || arg_int(&n, r, c, 0, 1))
        return -1;
    if (n < 1)
        return render_fail(r, "slice needs a count above zero");
    size_t each = all->n / (size_t)n, more = all->n % (size_t)n, at = 0;
    for (size_t i = 0; i < (size_t)n; i++) {
        struct tlist *row;
        size_t take = each + (i < more);
        if (list_new(&row, r, 0) || render_spend(r, 1))
            return -1;
        for (size_t k = 0; k < take; k++)
            if (list_put(r, row, all->v[at++]))
                return -1;
        if (arg_given(c, 1) && i >= more && list_put(r, row, c->arg[1]))
            return -1;
        if (list_put(r, rows, VAL_LIST(row)))
            return -1;
    }
    return make_iter(out, r, rows, "slice");
}

static const struct builtin filter_rows[] = {
    {"length", filter_length, "", 0},
    {"count", filter_length, "", 0},
    {"list", filter_list, "", 0},
    {"items", filter_items, "", 0},
    {"first", filter_first, "", 0},
    {"last", filter_last, "", 0},
    {"reverse", filter_reverse, "", 0},
    {"join", filter_join, "d,attribute", 0},
    {"sum", filter_sum, "attribute,start", 0},
    {"attr", filter_attr, "name", 1},
    {"map", filter_map, "*", 0},
    {"select", filter_select, "*", 0},
    {"reject", filter_reject, "*", 0},
    {"selectattr", filter_selectattr, "*", 0},
    {"rejectattr", filter_rejectattr, "*", 0},
    {"sort", filter_sort, "reverse,case_sensitive,attribute", 0},
    {"dictsort", filter_dictsort, "case_sensitive,by,reverse", 0},
    {"min", filter_min, "case_sensitive,attribute", 0},
    {"max", filter_max, "case_sensitive,attribute", 0},
    {"unique", filter_unique, "case_sensitive,attribute", 0},
    {"groupby", filter_groupby, "attribute,default,case_sensitive", 1},
    {"batch", filter_batch, "linecount,fill_with", 1},
    {"slice", filter_slice, "slices,fill_with", 1},
};
const struct builtin_table filter_seq_table = {filter_rows, ARRAY_LEN(filter_rows)};
