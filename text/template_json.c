/* JSON in and out of the template engine: values from jansson's tree (strings are shared with it,
 * so it must outlive the rendering), the filters tojson and from_json. Text is laid out exactly as
 * Python's json.dumps does it. Nesting beyond TEMPLATE_MAX_VALUE_NEST is an error. */
#include "text/template_internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- in ---- */

static int from_json(struct value *out, struct render *r, const json_t *j, int nest);

static int from_array(struct value *out, struct render *r, const json_t *j, int nest)
{
    struct tlist *l;
    size_t n = json_array_size(j);
    if (list_new(&l, r, n))
        return -1;
    for (; l->n < n; l->n++)
        if (from_json(&l->v[l->n], r, json_array_get(j, l->n), nest + 1))
            return -1;
    *out = VAL_LIST(l);
    return 0;
}

static int from_object(struct value *out, struct render *r, const json_t *j, int nest)
{
    struct tdict *d;
    if (dict_new(&d, r))
        return -1;
    for (void *it = json_object_iter((json_t *)j); it;
         it = json_object_iter_next((json_t *)j, it)) {
        struct value key, val;
        if (str_view(&key, r, json_object_iter_key(it), json_object_iter_key_len(it)) ||
            from_json(&val, r, json_object_iter_value(it), nest + 1) || dict_put(r, d, key, val))
            return -1;
    }
    *out = VAL_DICT(d);
    return 0;
}

static int from_json(struct value *out, struct render *r, const json_t *j, int nest)
{
    if (nest >= TEMPLATE_MAX_VALUE_NEST)
        return render_over(r, "the nesting depth of a value");
    switch (json_typeof(j)) {
    case JSON_OBJECT:
        return from_object(out, r, j, nest);
    case JSON_ARRAY:
        return from_array(out, r, j, nest);
    case JSON_STRING:
        return str_view(out, r, json_string_value(j), json_string_length(j));
    case JSON_INTEGER:
        *out = VAL_INT(json_integer_value(j));
        return 0;
    case JSON_REAL:
        *out = VAL_FLOAT(json_real_value(j));
        return 0;
    case JSON_TRUE:
    case JSON_FALSE:
        *out = VAL_BOOL(json_is_true(j));
        return 0;
    case JSON_NULL:
        break;
    }
    *out = VAL_NONE;
    return 0;
}

int val_from_json(struct value *out, struct render *r, const json_t *j)
{
    return from_json(out, r, j, 0);
}

int filter_from_json(struct value *out, struct render *r, struct call *c)
{
    json_error_t je;
    if (c->self.kind == V_UNDEFINED)
        return undefined_use(r, c->self);
    if (c->self.kind != V_STR)
        return render_fail(r, "from_json needs a string, not '%s'", val_type(c->self));
    const struct tstr *s = c->self.s;
    size_t worst; /* jansson spends up to some 40 bytes on one of text */
    if (mul_over(s->n, (size_t)40, &worst) || render_reserve(r, worst) ||
        render_spend_chars(r, s->n * 4))
        return render_over(r, "memory for values and output (its budget of bytes)");
    json_t *j = json_loadb(s->p, s->n, JSON_DECODE_ANY | JSON_ALLOW_NUL, &je);
    if (!j)
        return render_fail(r, "from_json: not valid JSON at byte %d: %s", je.position, je.text);
    if (!r->held)
        r->held = json_array();
    if (json_array_append_new(r->held, j))
        return err_set(r->e, ERR_MEMORY, "chat template: out of memory while rendering");
    r->n_bytes += worst;
    return val_from_json(out, r, j);
}

/* ---- out ---- */

static int put_escape(struct render *r, uint32_t cp)
{
    static const char short_of[] = "\"\"\\\\\nn\rr\tt\bb\ff";
    char esc[16];
    for (size_t i = 0; short_of[i]; i += 2)
        if (cp == (uint8_t)short_of[i]) {
            snprintf(esc, sizeof esc, "\\%c", short_of[i + 1]);
            return render_puts(r, esc);
        }
    if (cp < 0x10000)
        snprintf(esc, sizeof esc, "\\u%04x", cp);
    else
        snprintf(esc, sizeof esc, "\\u%04x\\u%04x", 0xd800 + ((cp - 0x10000) >> 10),
                 0xdc00 + ((cp - 0x10000) & 0x3ff));
    return render_puts(r, esc);
}

static int put_json_str(struct render *r, const struct json_style *style, const struct tstr *s)
{
    size_t done = 0;
    if (render_spend_chars(r, s->n) || render_puts(r, "\""))
        return -1;
    for (size_t at = 0, len; at < s->n; at += len) {
        uint32_t cp = (uint8_t)s->p[at];
        len = 1;
        if (cp >= 0x80)
            len = char_decode(&cp, s->p + at, s->n - at);
        bool plain = cp >= 0x20 && cp != '"' && cp != '\\' && !(style->ascii && cp > 0x7e);
        if (plain)
            continue;
        if (render_put(r, s->p + done, at - done) || put_escape(r, cp))
            return -1;
        done = at + len;
    }
    return render_put(r, s->p + done, s->n - done) || render_puts(r, "\"") ? -1 : 0;
}

static int put_json_nested(struct render *r, const struct json_style *style, struct value v,
                           int nest);

static int put_break(struct render *r, const struct json_style *style, int nest)
{
    if (!style->indent)
        return 0;
    if (render_puts(r, "\n"))
        return -1;
    for (int i = 0; i < nest; i++)
        if (render_put(r, style->indent->p, style->indent->n))
            return -1;
    return 0;
}

static int put_json_list(struct render *r, const struct json_style *style, const struct tlist *l,
                         int nest)
{
    if (!l->n)
        return render_puts(r, "[]");
    if (render_puts(r, "["))
        return -1;
    for (size_t i = 0; i < l->n; i++)
        if ((i && render_put(r, style->item_sep->p, style->item_sep->n)) ||
            put_break(r, style, nest + 1) || put_json_nested(r, style, l->v[i], nest + 1))
            return -1;
    return put_break(r, style, nest) || render_puts(r, "]") ? -1 : 0;
}

static int put_json_key(struct render *r, const struct json_style *style, struct value key)
{
    if (key.kind == V_STR)
        return put_json_str(r, style, key.s);
    if (key.kind != V_NONE && !val_is_number(key))
        return render_fail(r, "JSON keys must be strings, numbers or none, not '%s'",
                           val_type(key));
    return render_puts(r, "\"") || put_json_nested(r, style, key, 0) || render_puts(r, "\"") ? -1
                                                                                             : 0;
}

static int compare_keys(const void *a, const void *b)
{
    const struct tstr *x = ((const struct dict_entry *)a)->key.s;
    const struct tstr *y = ((const struct dict_entry *)b)->key.s;
    size_t n = MIN(x->n, y->n);
    int c = n ? memcmp(x->p, y->p, n) : 0;
    return c ? c : x->n < y->n ? -1 : x->n > y->n;
}

/* The entries in the order of their keys, in place: d is a copy. */
static int sort_entries(struct render *r, struct tdict *d)
{
    struct dict_entry *e = render_array(r, d->n, sizeof *e);
    if (!e || render_spend(r, (uint64_t)d->n * 8))
        return -1;
    for (uint32_t i = 0; i < d->n; i++) {
        e[i] = d->e[i];
        if (e[i].key.kind != V_STR)
            return render_fail(r, "sort_keys works on string keys only");
    }
    qsort(e, d->n, sizeof *e, compare_keys);
    d->e = e;
    return 0;
}

static int put_json_dict(struct render *r, const struct json_style *style, const struct tdict *dict,
                         int nest)
{
    struct tdict d = *dict;
    if (!d.n)
        return render_puts(r, "{}");
    if ((style->sort_keys && sort_entries(r, &d)) || render_puts(r, "{"))
        return -1;
    for (uint32_t i = 0; i < d.n; i++)
        if ((i && render_put(r, style->item_sep->p, style->item_sep->n)) ||
            put_break(r, style, nest + 1) || put_json_key(r, style, d.e[i].key) ||
            render_put(r, style->key_sep->p, style->key_sep->n) ||
            put_json_nested(r, style, d.e[i].val, nest + 1))
            return -1;
    return put_break(r, style, nest) || render_puts(r, "}") ? -1 : 0;
}

static int put_json_float(struct render *r, double f)
{
    char text[32];
    if (isnan(f) || isinf(f))
        return render_puts(r, isnan(f) ? "NaN" : f < 0 ? "-Infinity" : "Infinity");
    float_repr(text, f);
    return render_spend(r, 25) || render_puts(r, text) ? -1 : 0;
}

static int put_json_nested(struct render *r, const struct json_style *style, struct value v,
                           int nest)
{
    struct tlist *l;
    if (nest >= TEMPLATE_MAX_VALUE_NEST)
        return render_over(r, "the nesting depth of a value");
    if (render_spend(r, 1))
        return -1;
    switch ((enum val_kind)v.kind) {
    case V_NONE:
        return render_puts(r, "null");
    case V_BOOL:
        return render_puts(r, v.b ? "true" : "false");
    case V_INT:
        return put_repr(r, v);
    case V_FLOAT:
        return put_json_float(r, v.f);
    case V_STR:
        return put_json_str(r, style, v.s);
    case V_LIST:
    case V_TUPLE:
        return put_json_list(r, style, v.l, nest);
    case V_DICT:
        return put_json_dict(r, style, v.d, nest);
    case V_ITER: /* as a list: templates pass what `map` and `select` give */
        return val_to_list(&l, r, v) || put_json_list(r, style, l, nest) ? -1 : 0;
    default:
        return render_fail(r, "a value of type %s cannot be written as JSON", val_type(v));
    }
}

int put_json(struct render *r, const struct json_style *style, struct value v)
{
    return put_json_nested(r, style, v, 0);
}

static int json_indent(struct json_style *style, struct render *r, struct call *c)
{
    struct value v = c->arg[1];
    int64_t n;
    if (!arg_given(c, 1))
        return 0;
    if (v.kind == V_STR) {
        style->indent = v.s;
        return 0;
    }
    if (arg_int(&n, r, c, 1, 0))
        return -1;
    size_t mark = render_mark(r);
    for (int64_t i = 0; i < n; i++)
        if (render_spend(r, 1) || render_puts(r, " "))
            return -1;
    if (render_take(&v, r, mark))
        return -1;
    style->indent = v.s;
    return 0;
}

int filter_tojson(struct value *out, struct render *r, struct call *c)
{
    static const struct tstr comma = {.p = ", ", .n = 2}, tight = {.p = ",", .n = 1},
                             colon = {.p = ": ", .n = 2};
    struct json_style style = {.ascii = val_truth(c->arg[0]), .sort_keys = val_truth(c->arg[3])};
    if (json_indent(&style, r, c))
        return -1;
    style.item_sep = style.indent ? &tight : &comma;
    style.key_sep = &colon;
    if (arg_given(c, 2)) {
        struct value v = c->arg[2];
        bool pair = (v.kind == V_LIST || v.kind == V_TUPLE) && v.l->n == 2 &&
                    v.l->v[0].kind == V_STR && v.l->v[1].kind == V_STR;
        if (!pair)
            return render_fail(r, "tojson: separators must be two strings");
        style.item_sep = v.l->v[0].s;
        style.key_sep = v.l->v[1].s;
    }
    size_t mark = render_mark(r);
    return put_json(r, &style, c->self) || render_take(out, r, mark) ? -1 : 0;
}
