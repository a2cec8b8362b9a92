/* The template engine's front door: template_new, template_render, and the budget of a rendering.
 * Refuses sources that are no UTF-8 or over TEMPLATE_MAX_SRC. A rendering's values live in its own
 * arena, freed at the end; its text goes straight into the caller's buffer, which is cut back to
 * where it was when anything fails. */
#include "text/template_internal.h"

#include <stdio.h>
#include <time.h>

/* ---- budget ---- */

int render_fail(struct render *r, const char *fmt, ...)
{
    char what[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    return err_set(r->e, ERR_CORRUPT, "chat template line %u: %s", r->line, what);
}

int render_over(struct render *r, const char *what)
{
    return err_set(r->e, ERR_LIMIT, "chat template line %u: over the limit of %s", r->line, what);
}

int render_spend(struct render *r, uint64_t n)
{
    if (r->n_steps < n) {
        r->n_steps = 0;
        return render_over(r, "evaluation steps (its budget of work)");
    }
    r->n_steps -= n;
    return 0;
}

int render_spend_bulk(struct render *r, size_t n_bytes)
{
    return render_spend(r, n_bytes / 64);
}

int render_spend_chars(struct render *r, size_t n_bytes)
{
    return render_spend(r, n_bytes / 8);
}

int render_reserve(struct render *r, size_t more)
{
    /* A growing output is for a moment there twice. */
    size_t used = r->n_bytes + 2 * (r->out->n - r->out_base);
    if (more > r->max_bytes || used > r->max_bytes - more)
        return render_over(r, "memory for values and output (its budget of bytes)");
    return 0;
}

void *render_alloc(struct render *r, size_t n_bytes)
{
    size_t cost = n_bytes < 32768 ? n_bytes + 16 : n_bytes + 65536;
    if (n_bytes > SIZE_MAX / 2 || render_reserve(r, cost)) {
        if (n_bytes > SIZE_MAX / 2)
            render_over(r, "memory for values and output (its budget of bytes)");
        return NULL;
    }
    void *p = arena_alloc(&r->arena, n_bytes + (n_bytes == 0));
    if (!p)
        err_set(r->e, ERR_MEMORY, "chat template: out of memory while rendering");
    r->n_bytes += cost;
    return p;
}

void *render_array(struct render *r, size_t n, size_t item_bytes)
{
    size_t bytes;
    if (mul_over(n, item_bytes, &bytes))
        bytes = SIZE_MAX;
    return render_alloc(r, bytes);
}

/* ---- output ---- */

int render_put(struct render *r, const void *p, size_t n)
{
    if (render_reserve(r, 2 * n) || render_spend_bulk(r, n))
        return -1;
    buf_put(r->out, p, n);
    if (r->out->failed)
        return err_set(r->e, ERR_MEMORY, "chat template: out of memory for the text");
    return 0;
}

int render_puts(struct render *r, const char *s)
{
    return render_put(r, s, strlen(s));
}

int render_take(struct value *out, struct render *r, size_t mark)
{
    if (str_new(out, r, r->out->n > mark ? r->out->data + mark : "", r->out->n - mark))
        return -1;
    r->out->n = mark;
    return 0;
}

/* ---- templates ---- */

/* Jinja2 reads every kind of line end as \n and drops one at the end. */
static void normalize_newlines(struct template *t, const char *src, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        char c = src[i];
        if (c == '\r' && i + 1 < n && src[i + 1] == '\n')
            continue;
        t->src[t->n_src++] = c == '\r' ? '\n' : c;
    }
    if (t->n_src && t->src[t->n_src - 1] == '\n')
        t->n_src--;
    t->src[t->n_src] = 0;
}

int template_new(struct template **out, const char *src, size_t n, struct err *e)
{
    *out = NULL;
    if (n > TEMPLATE_MAX_SRC)
        return err_set(e, ERR_LIMIT, "chat template: %zu bytes of source, at most %d are taken", n,
                       TEMPLATE_MAX_SRC);
    if (!utf8_valid(src, n))
        return err_set(e, ERR_CORRUPT, "chat template: its source is not valid UTF-8");
    struct template *t = mem_zalloc(sizeof *t);
    if (!t)
        return err_set(e, ERR_MEMORY, "chat template: out of memory");
    int rc = -1;
    t->src = arena_alloc(&t->arena, n + 1);
    if (!t->src) {
        err_set(e, ERR_MEMORY, "chat template: out of memory");
        goto out;
    }
    normalize_newlines(t, src, n);
    rc = parse_program(t, e);
out:
    if (rc)
        template_free(t);
    else
        *out = t;
    return rc;
}

void template_free(struct template *t)
{
    if (!t)
        return;
    arena_fini(&t->arena);
    mem_free(t);
}

uint64_t template_bytes(const struct template *t)
{
    return sizeof *t + t->arena.used_bytes;
}

/* ---- rendering ---- */

/* Give the top-level variable a value, if the template mentions it at all. */
static struct value *find_variable(struct render *r, const char *name, size_t n)
{
    const struct template *t = r->t;
    for (uint32_t i = 0; i < t->n_syms; i++)
        if (t->syms[i]->n == n && !memcmp(t->syms[i]->p, name, n))
            return &r->root[i];
    return NULL;
}

static int set_json(struct render *r, const char *name, const json_t *j)
{
    struct value *v = find_variable(r, name, strlen(name));
    if (!v || (!j && v->kind != V_MISSING))
        return 0;
    if (j)
        return val_from_json(v, r, j);
    *v = VAL_NONE;
    return 0;
}

static int set_text(struct render *r, const char *name, const char *text)
{
    struct value *v = find_variable(r, name, strlen(name));
    if (!v || (!text && v->kind != V_MISSING))
        return 0;
    return str_cstr(v, r, text ? text : "");
}

static int set_variables(struct render *r, const struct template_args *a)
{
    void *it = a->extra ? json_object_iter((json_t *)a->extra) : NULL;
    for (; it; it = json_object_iter_next((json_t *)a->extra, it)) {
        if (render_spend(r, 1 + r->t->n_syms / 16))
            return -1;
        struct value *v = find_variable(r, json_object_iter_key(it), json_object_iter_key_len(it));
        if (v && val_from_json(v, r, json_object_iter_value(it)))
            return -1;
    }
    struct value *gen = find_variable(r, "add_generation_prompt", strlen("add_generation_prompt"));
    if (gen)
        *gen = VAL_BOOL(a->add_generation_prompt);
    if (set_json(r, "messages", a->messages) || set_json(r, "tools", a->tools) ||
        set_json(r, "documents", NULL))
        return -1;
    return set_text(r, "bos_token", a->bos_token) || set_text(r, "eos_token", a->eos_token) ? -1
                                                                                            : 0;
}

int template_render(struct buf *out, const struct template *t, const struct template_args *a,
                    struct err *e)
{
    struct err own = {0};
    struct render r = {.t = t,
                       .e = e ? e : &own,
                       .out = out,
                       .out_base = out->n,
                       .max_bytes = a->max_bytes ? a->max_bytes : (size_t)64 << 20,
                       .n_steps = a->max_steps ? a->max_steps : 10000000,
                       .line = 1,
                       .now = a->now ? a->now : (int64_t)time(NULL)};
    int rc = -1;
    r.scope = &r.top;
    r.root = render_array(&r, t->n_syms + 1, sizeof *r.root);
    if (!r.root || set_variables(&r, a))
        goto out;
    rc = exec(&r, t->root);
out:
    if (rc) {
        out->n = r.out_base;
        out->failed = false;
    }
    if (out->data)
        out->data[out->n] = 0;
    json_decref(r.held);
    arena_fini(&r.arena);
    return rc;
}
