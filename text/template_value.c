/* Values of the template engine: lists and insertion-ordered dicts, Python's truth, equality,
 * order, hashing, membership, iteration, str() and repr(), and the way in from JSON. All memory is
 * the rendering's arena. Walks over nested values stop at TEMPLATE_MAX_VALUE_NEST with an error,
 * so that lists which contain themselves end too. */
#include "text/template_internal.h"

#include <math.h>
#include <stdio.h>

/* ---- names and kinds ---- */

const char *val_type(struct value v)
{
    static const char *const names[N_VAL_KINDS] = {
        [V_MISSING] = "missing", [V_UNDEFINED] = "Undefined",
        [V_NONE] = "NoneType",   [V_BOOL] = "bool",
        [V_INT] = "int",         [V_FLOAT] = "float",
        [V_STR] = "str",         [V_LIST] = "list",
        [V_TUPLE] = "tuple",     [V_DICT] = "dict",
        [V_VIEW] = "dict view",  [V_RANGE] = "range",
        [V_ITER] = "generator",  [V_NAMESPACE] = "Namespace",
        [V_MACRO] = "Macro",     [V_FUNC] = "function",
        [V_METHOD] = "method",   [V_LOOP] = "LoopContext",
        [V_CYCLER] = "Cycler",   [V_JOINER] = "Joiner",
    };
    return names[v.kind];
}

bool val_is_number(struct value v)
{
    return v.kind == V_INT || v.kind == V_FLOAT || v.kind == V_BOOL;
}

double val_double(struct value v)
{
    return v.kind == V_FLOAT ? v.f : v.kind == V_INT ? (double)v.i : (double)v.b;
}

static int64_t int_of(struct value v) /* of int or bool */
{
    return v.kind == V_INT ? v.i : (int64_t)v.b;
}

bool val_truth(struct value v)
{
    switch ((enum val_kind)v.kind) {
    case V_MISSING:
    case V_UNDEFINED:
    case V_NONE:
        return false;
    case V_BOOL:
        return v.b;
    case V_INT:
        return v.i != 0;
    case V_FLOAT:
        return v.f != 0;
    case V_STR:
        return v.s->n > 0;
    case V_LIST:
    case V_TUPLE:
        return v.l->n > 0;
    case V_DICT:
        return v.d->n > 0;
    case V_VIEW:
        return v.view->items->n > 0;
    case V_RANGE:
        return v.range->n > 0;
    default:
        return true;
    }
}

/* ---- lists ---- */

int list_new(struct tlist **out, struct render *r, size_t cap)
{
    struct tlist *l = render_alloc(r, sizeof *l);
    if (!l || (cap && !(l->v = render_array(r, cap, sizeof *l->v))))
        return -1;
    l->cap = cap;
    *out = l;
    return 0;
}

int list_put(struct render *r, struct tlist *l, struct value v)
{
    if (l->n == l->cap) {
        size_t cap = l->cap ? l->cap * 2 : 4;
        struct value *grown = render_array(r, cap, sizeof *grown);
        if (!grown)
            return -1;
        if (l->n)
            memcpy(grown, l->v, l->n * sizeof *grown);
        l->v = grown;
        l->cap = cap;
    }
    l->v[l->n++] = v;
    return 0;
}

/* ---- hashing and equality ---- */

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static int hash_nested(uint64_t *h, struct render *r, struct value v, int nest);

static int hash_tuple(uint64_t *h, struct render *r, const struct tlist *l, int nest)
{
    if (nest >= TEMPLATE_MAX_VALUE_NEST)
        return render_over(r, "the nesting depth of a value");
    *h = 7;
    for (size_t i = 0; i < l->n; i++) {
        uint64_t one;
        if (render_spend(r, 1) || hash_nested(&one, r, l->v[i], nest + 1))
            return -1;
        *h = mix(*h * 31 + one);
    }
    return 0;
}

static int hash_nested(uint64_t *h, struct render *r, struct value v, int nest)
{
    switch ((enum val_kind)v.kind) {
    case V_STR:
        if (!v.s->hash && render_spend_bulk(r, v.s->n))
            return -1;
        *h = str_hash(v.s);
        return 0;
    case V_BOOL:
    case V_INT:
        *h = mix((uint64_t)int_of(v));
        return 0;
    case V_FLOAT:
        /* Equal numbers are one key, whatever their type. */
        if (v.f == floor(v.f) && fabs(v.f) < 9e18)
            *h = mix((uint64_t)(int64_t)v.f);
        else
            memcpy(h, &v.f, sizeof *h);
        return 0;
    case V_TUPLE:
        return hash_tuple(h, r, v.l, nest);
    case V_LIST:
    case V_DICT:
    case V_VIEW:
        return render_fail(r, "unhashable type: '%s'", val_type(v));
    default:
        *h = mix((uint64_t)v.kind << 56 ^ (v.kind > V_NONE ? (uint64_t)(uintptr_t)v.l : 0));
        return 0;
    }
}

int val_hash(uint64_t *h, struct render *r, struct value v)
{
    return hash_nested(h, r, v, 0);
}

static int equal_nested(bool *eq, struct render *r, const struct value ab[2], int nest);

static int equal_lists(bool *eq, struct render *r, const struct tlist *const ab[2], int nest)
{
    *eq = ab[0]->n == ab[1]->n;
    for (size_t i = 0; *eq && i < ab[0]->n && i < ab[1]->n; i++) {
        struct value pair[2] = {ab[0]->v[i], ab[1]->v[i]};
        if (equal_nested(eq, r, pair, nest + 1))
            return -1;
    }
    return 0;
}

static int equal_dicts(bool *eq, struct render *r, struct tdict *const ab[2], int nest)
{
    *eq = ab[0]->n == ab[1]->n;
    for (uint32_t i = 0; *eq && i < ab[0]->n; i++) {
        struct value *other;
        if (dict_find(&other, r, ab[1], ab[0]->e[i].key))
            return -1;
        *eq = other != NULL;
        struct value pair[2] = {ab[0]->e[i].val};
        if (other)
            pair[1] = *other;
        if (other && equal_nested(eq, r, pair, nest + 1))
            return -1;
    }
    return 0;
}

static int equal_nested(bool *eq, struct render *r, const struct value ab[2], int nest)
{
    struct value a = ab[0], b = ab[1];
    if (nest >= TEMPLATE_MAX_VALUE_NEST)
        return render_over(r, "the nesting depth of a value");
    if (render_spend(r, 1))
        return -1;
    if (val_is_number(a) && val_is_number(b)) {
        *eq = a.kind == V_FLOAT || b.kind == V_FLOAT ? val_double(a) == val_double(b)
                                                     : int_of(a) == int_of(b);
        return 0;
    }
    *eq = false;
    if (a.kind != b.kind)
        return 0;
    switch ((enum val_kind)a.kind) {
    case V_UNDEFINED:
    case V_NONE:
    case V_MISSING:
        *eq = true;
        return 0;
    case V_STR:
        *eq = str_equal(a.s, b.s);
        return a.s->n == b.s->n ? render_spend_bulk(r, a.s->n) : 0;
    case V_LIST:
    case V_TUPLE:
        return equal_lists(eq, r, (const struct tlist *const[2]){a.l, b.l}, nest);
    case V_DICT:
        return equal_dicts(eq, r, (struct tdict *const[2]){a.d, b.d}, nest);
    case V_RANGE:
        *eq = a.range->n == b.range->n &&
              (!a.range->n || (a.range->start == b.range->start &&
                               (a.range->n == 1 || a.range->step == b.range->step)));
        return 0;
    default:
        *eq = a.l == b.l;
        return 0;
    }
}

int val_equal(bool *eq, struct render *r, struct value a, struct value b)
{
    return equal_nested(eq, r, (struct value[2]){a, b}, 0);
}

/* ---- order ---- */

static int order_nested(int *cmp, struct render *r, const struct value ab[2], int nest);

static int order_lists(int *cmp, struct render *r, const struct tlist *const ab[2], int nest)
{
    if (nest >= TEMPLATE_MAX_VALUE_NEST)
        return render_over(r, "the nesting depth of a value");
    for (size_t i = 0; i < ab[0]->n && i < ab[1]->n; i++) {
        struct value pair[2] = {ab[0]->v[i], ab[1]->v[i]};
        bool eq;
        if (val_equal(&eq, r, pair[0], pair[1]))
            return -1;
        if (!eq)
            return order_nested(cmp, r, pair, nest + 1);
    }
    *cmp = ab[0]->n < ab[1]->n ? -1 : ab[0]->n > ab[1]->n;
    return 0;
}

static int order_nested(int *cmp, struct render *r, const struct value ab[2], int nest)
{
    struct value a = ab[0], b = ab[1];
    if (render_spend(r, 1))
        return -1;
    if (val_is_number(a) && val_is_number(b)) {
        if (a.kind == V_FLOAT || b.kind == V_FLOAT) {
            double x = val_double(a), y = val_double(b);
            *cmp = x < y ? -1 : x > y ? 1 : x == y ? 0 : 2; /* 2: not a number, no order holds */
        } else {
            *cmp = int_of(a) < int_of(b) ? -1 : int_of(a) > int_of(b);
        }
        return 0;
    }
    if (a.kind == V_STR && b.kind == V_STR) {
        /* Bytes of UTF-8 order as their characters do. */
        size_t n = MIN(a.s->n, b.s->n);
        int c = n ? memcmp(a.s->p, b.s->p, n) : 0;
        *cmp = c < 0 ? -1 : c > 0 ? 1 : a.s->n < b.s->n ? -1 : a.s->n > b.s->n;
        return render_spend_bulk(r, n);
    }
    if (a.kind == b.kind && (a.kind == V_LIST || a.kind == V_TUPLE))
        return order_lists(cmp, r, (const struct tlist *const[2]){a.l, b.l}, nest);
    if (a.kind == V_UNDEFINED || b.kind == V_UNDEFINED)
        return undefined_use(r, a.kind == V_UNDEFINED ? a : b);
    return render_fail(r, "'%s' and '%s' cannot be ordered", val_type(a), val_type(b));
}

int val_order(int *cmp, struct render *r, struct value a, struct value b)
{
    return order_nested(cmp, r, (struct value[2]){a, b}, 0);
}

/* ---- dicts ---- */

enum { DICT_SMALL = 8 }; /* entries found by looking at each */

int dict_new(struct tdict **out, struct render *r)
{
    return (*out = render_alloc(r, sizeof **out)) ? 0 : -1;
}

static int dict_reindex(struct render *r, struct tdict *d, uint32_t cap)
{
    if (cap != d->index_cap) {
        if (!(d->index = render_array(r, cap, sizeof *d->index)))
            return -1;
        d->index_cap = cap;
    } else {
        memset(d->index, 0, cap * sizeof *d->index);
    }
    if (render_spend_chars(r, d->n * 4))
        return -1;
    for (uint32_t i = 0; i < d->n; i++) {
        uint32_t at = (uint32_t)d->e[i].hash & (cap - 1);
        while (d->index[at])
            at = (at + 1) & (cap - 1);
        d->index[at] = i + 1;
    }
    return 0;
}

/* Position of the entry, or -1 for none; *rc tells of an error. */
static int64_t dict_at(int *rc, struct render *r, struct tdict *d, const struct dict_entry *want)
{
    uint32_t mask = d->index_cap - 1, slot = (uint32_t)want->hash & mask;
    for (uint32_t i = 0;; i++, slot = (slot + 1) & mask) {
        uint32_t at = i;
        if (d->index ? !d->index[slot] : i >= d->n)
            return -1;
        if (i % 16 == 15 && render_spend(r, 1)) /* keys chosen to collide cost what they take */
            return *rc = -1;
        if (d->index)
            at = d->index[slot] - 1;
        if (d->e[at].hash != want->hash)
            continue;
        bool eq;
        if (val_equal(&eq, r, d->e[at].key, want->key))
            return *rc = -1;
        if (eq)
            return at;
    }
}

int dict_find(struct value **val, struct render *r, struct tdict *d, struct value key)
{
    struct dict_entry want = {.key = key};
    int rc = 0;
    *val = NULL;
    if (val_hash(&want.hash, r, key))
        return -1;
    int64_t at = dict_at(&rc, r, d, &want);
    if (at >= 0)
        *val = &d->e[at].val;
    return rc;
}

struct value *dict_find_str(struct tdict *d, struct tstr *key)
{
    struct dict_entry want = {.key = {.kind = V_STR, .s = key}, .hash = str_hash(key)};
    uint32_t mask = d->index_cap - 1, slot = (uint32_t)want.hash & mask;
    for (uint32_t i = 0;; i++, slot = (slot + 1) & mask) {
        if (d->index ? !d->index[slot] : i >= d->n)
            return NULL;
        struct dict_entry *e = &d->e[d->index ? d->index[slot] - 1 : i];
        if (e->hash == want.hash && e->key.kind == V_STR && str_equal(e->key.s, key))
            return &e->val;
    }
}

static int dict_grow(struct render *r, struct tdict *d)
{
    uint32_t cap = d->cap ? d->cap * 2 : 4;
    if (d->cap > UINT32_MAX / 8)
        return render_over(r, "the size of a dict");
    struct dict_entry *e = render_array(r, cap, sizeof *e);
    if (!e)
        return -1;
    if (d->n)
        memcpy(e, d->e, d->n * sizeof *e);
    d->e = e;
    d->cap = cap;
    return 0;
}

int dict_put(struct render *r, struct tdict *d, struct value key, struct value val)
{
    struct dict_entry new = {.key = key, .val = val};
    int rc = 0;
    if (val_hash(&new.hash, r, key))
        return -1;
    int64_t at = dict_at(&rc, r, d, &new);
    if (rc)
        return -1;
    if (at >= 0) {
        d->e[at].val = val;
        return 0;
    }
    if (d->n == d->cap && dict_grow(r, d))
        return -1;
    d->e[d->n++] = new;
    if (d->n <= DICT_SMALL)
        return 0;
    if (!d->index || d->n * 2 > d->index_cap)
        return dict_reindex(r, d, d->index_cap ? d->index_cap * 2 : 32);
    uint32_t slot = (uint32_t) new.hash &(d->index_cap - 1);
    while (d->index[slot])
        slot = (slot + 1) & (d->index_cap - 1);
    d->index[slot] = d->n;
    return 0;
}

int dict_put_cstr(struct render *r, struct tdict *d, const char *key, struct value val)
{
    struct value k;
    return str_cstr(&k, r, key) || dict_put(r, d, k, val) ? -1 : 0;
}

int dict_remove(struct render *r, struct tdict *d, size_t at)
{
    memmove(d->e + at, d->e + at + 1, (d->n - at - 1) * sizeof *d->e);
    d->n--;
    if (render_spend_bulk(r, d->n * sizeof *d->e))
        return -1;
    return d->index ? dict_reindex(r, d, d->index_cap) : 0;
}

int dict_items(struct tlist **out, struct render *r, struct tdict *d, char which)
{
    if (list_new(out, r, d->n) || render_spend(r, d->n))
        return -1;
    for (uint32_t i = 0; i < d->n; i++) {
        struct value v = which == 'k' ? d->e[i].key : d->e[i].val;
        if (which == 'i') {
            struct tlist *pair;
            if (list_new(&pair, r, 2))
                return -1;
            pair->v[0] = d->e[i].key;
            pair->v[1] = d->e[i].val;
            pair->n = 2;
            v = VAL_TUPLE(pair);
        }
        if (list_put(r, *out, v))
            return -1;
    }
    return 0;
}

/* ---- iteration ---- */

int walk_begin(struct walk *w, struct render *r, struct value v)
{
    *w = (struct walk){.src = v};
    switch ((enum val_kind)v.kind) {
    case V_UNDEFINED:
    case V_STR:
    case V_LIST:
    case V_TUPLE:
    case V_DICT:
    case V_RANGE:
    case V_ITER:
        return 0;
    case V_VIEW:
        w->src = VAL_LIST(v.view->items);
        return 0;
    default:
        return render_fail(r, "'%s' object is not iterable", val_type(v));
    }
}

int walk_next(struct value *out, struct walk *w, struct render *r)
{
    struct value s = w->src;
    if (render_spend(r, 1))
        return -1;
    if (s.kind == V_LIST || s.kind == V_TUPLE) {
        if (w->at >= s.l->n)
            return 0;
        *out = s.l->v[w->at++];
    } else if (s.kind == V_DICT) {
        if (w->at >= s.d->n)
            return 0;
        *out = s.d->e[w->at++].key;
    } else if (s.kind == V_RANGE) {
        if (w->at >= (size_t)s.range->n)
            return 0;
        *out = VAL_INT(s.range->start + (int64_t)w->at++ * s.range->step);
    } else if (s.kind == V_ITER) {
        if (s.iter->at >= s.iter->items->n)
            return 0;
        *out = s.iter->items->v[s.iter->at++];
    } else if (s.kind == V_STR) {
        if (w->at >= s.s->n)
            return 0;
        size_t len = char_len(s.s->p + w->at, s.s->n - w->at);
        if (str_sub(out, r, s, w->at, len))
            return -1;
        out->markup = false;
        w->at += len;
    } else {
        return 0; /* undefined: nothing */
    }
    return 1;
}

int val_to_list(struct tlist **out, struct render *r, struct value v)
{
    struct walk w;
    struct value item;
    int rc;
    if (walk_begin(&w, r, v) ||
        list_new(out, r, v.kind == V_LIST || v.kind == V_TUPLE ? v.l->n : 0))
        return -1;
    while ((rc = walk_next(&item, &w, r)) > 0)
        if (list_put(r, *out, item))
            return -1;
    return rc;
}

int val_len(int64_t *n, struct render *r, struct value v)
{
    switch ((enum val_kind)v.kind) {
    case V_UNDEFINED:
        *n = 0;
        return 0;
    case V_STR:
        if (v.s->n_chars == SIZE_MAX && render_spend_chars(r, v.s->n))
            return -1;
        *n = (int64_t)str_chars(v.s);
        return 0;
    case V_LIST:
    case V_TUPLE:
        *n = (int64_t)v.l->n;
        return 0;
    case V_DICT:
        *n = v.d->n;
        return 0;
    case V_VIEW:
        *n = (int64_t)v.view->items->n;
        return 0;
    case V_RANGE:
        *n = v.range->n;
        return 0;
    default:
        return render_fail(r, "object of type '%s' has no len()", val_type(v));
    }
}

int val_contains(bool *in, struct render *r, struct value item, struct value box)
{
    *in = false;
    if (box.kind == V_STR) {
        if (item.kind == V_UNDEFINED)
            return undefined_use(r, item);
        if (item.kind != V_STR)
            return render_fail(r, "'in <string>' needs a string on the left, not '%s'",
                               val_type(item));
        *in = mem_find(box.s->p, box.s->n, item.s->p, item.s->n) != NULL;
        return render_spend_bulk(r, box.s->n);
    }
    if (box.kind == V_DICT) {
        struct value *found;
        if (dict_find(&found, r, box.d, item))
            return -1;
        *in = found != NULL;
        return 0;
    }
    struct walk w;
    struct value one;
    int rc = 0;
    if (walk_begin(&w, r, box))
        return -1;
    while (!*in && (rc = walk_next(&one, &w, r)) > 0)
        if (val_equal(in, r, one, item))
            return -1;
    return rc < 0 ? -1 : 0;
}

/* ---- str() and repr() ---- */

static int put_repr_nested(struct render *r, struct value v, int nest);

static int put_items(struct render *r, const struct tlist *l, const char ends[2], int nest)
{
    if (render_put(r, &ends[0], 1))
        return -1;
    for (size_t i = 0; i < l->n; i++)
        if ((i && render_puts(r, ", ")) || put_repr_nested(r, l->v[i], nest + 1))
            return -1;
    if (ends[0] == '(' && l->n == 1 && render_puts(r, ","))
        return -1;
    return render_put(r, &ends[1], 1);
}

static int put_dict(struct render *r, const struct tdict *d, int nest)
{
    if (render_puts(r, "{"))
        return -1;
    for (uint32_t i = 0; i < d->n; i++)
        if ((i && render_puts(r, ", ")) || put_repr_nested(r, d->e[i].key, nest + 1) ||
            render_puts(r, ": ") || put_repr_nested(r, d->e[i].val, nest + 1))
            return -1;
    return render_puts(r, "}");
}

static int put_range(struct render *r, const struct range *g)
{
    char text[100];
    if (g->step == 1)
        snprintf(text, sizeof text, "range(%lld, %lld)", (long long)g->start, (long long)g->stop);
    else
        snprintf(text, sizeof text, "range(%lld, %lld, %lld)", (long long)g->start,
                 (long long)g->stop, (long long)g->step);
    return render_puts(r, text);
}

static int put_view(struct render *r, const struct view *v, int nest)
{
    const char *name = v->which == 'i'   ? "dict_items("
                       : v->which == 'k' ? "dict_keys("
                                         : "dict_values(";
    return render_puts(r, name) || put_items(r, v->items, "[]", nest) || render_puts(r, ")") ? -1
                                                                                             : 0;
}

static int put_object(struct render *r, struct value v)
{
    if (render_puts(r, "<") || render_puts(r, val_type(v)))
        return -1;
    const struct tstr *name = v.kind == V_MACRO ? v.macro->name : NULL;
    if (name && (render_puts(r, " ") || put_str_repr(r, name)))
        return -1;
    return render_puts(r, ">");
}

static int put_repr_nested(struct render *r, struct value v, int nest)
{
    char text[32];
    if (nest >= TEMPLATE_MAX_VALUE_NEST)
        return render_over(r, "the nesting depth of a value");
    if (render_spend(r, 1))
        return -1;
    switch ((enum val_kind)v.kind) {
    case V_UNDEFINED:
    case V_MISSING:
        return render_puts(r, "Undefined");
    case V_NONE:
        return render_puts(r, "None");
    case V_BOOL:
        return render_puts(r, v.b ? "True" : "False");
    case V_INT:
        snprintf(text, sizeof text, "%lld", (long long)v.i);
        return render_puts(r, text);
    case V_FLOAT:
        float_repr(text, v.f);
        return render_spend(r, 25) || render_puts(r, text) ? -1 : 0;
    case V_STR:
        if (!v.markup)
            return put_str_repr(r, v.s);
        return render_puts(r, "Markup(") || put_str_repr(r, v.s) || render_puts(r, ")") ? -1 : 0;
    case V_LIST:
        return put_items(r, v.l, "[]", nest);
    case V_TUPLE:
        return put_items(r, v.l, "()", nest);
    case V_DICT:
        return put_dict(r, v.d, nest);
    case V_NAMESPACE:
        return render_puts(r, "<Namespace ") || put_dict(r, v.d, nest) || render_puts(r, ">") ? -1
                                                                                              : 0;
    case V_VIEW:
        return put_view(r, v.view, nest);
    case V_RANGE:
        return put_range(r, v.range);
    default:
        return put_object(r, v);
    }
}

int put_repr(struct render *r, struct value v)
{
    return put_repr_nested(r, v, 0);
}

int put_str(struct render *r, struct value v)
{
    if (v.kind == V_STR)
        return render_put(r, v.s->p, v.s->n);
    return v.kind == V_UNDEFINED ? 0 : put_repr(r, v);
}

int val_str(struct value *out, struct render *r, struct value v)
{
    if (v.kind == V_STR) {
        *out = v;
        return 0;
    }
    size_t mark = render_mark(r);
    return put_str(r, v) || render_take(out, r, mark) ? -1 : 0;
}
