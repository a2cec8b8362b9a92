/* ingot show: what a model is, from its header alone. Every text of the file is made safe for a
 * terminal before it is printed. */
#include "cli/cli_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

struct show_opts {
    struct common_opts common;
    bool json, template, metadata;
};

#define AT(field) offsetof(struct show_opts, field)
static const struct option show_options[] = {
    {"template", NULL, 0, false, OPTION_FLAG, NULL, AT(template), 0, 0,
     "Print the chat template and nothing else"},
    {"metadata", NULL, 0, false, OPTION_FLAG, NULL, AT(metadata), 0, 0,
     "All keys of the header, long arrays cut"},
    {"json", NULL, 0, false, OPTION_FLAG, NULL, AT(json), 0, 0, "For programs"},
    {0},
};
#undef AT

enum { SHOW_ITEMS = 8 }; /* of an array that are printed */

struct summary {
    struct gguf_str arch, name, license; /* as the file spells them; never NULL */
    const char *quant;
    uint64_t n_params, n_bytes;
    uint32_t n_ctx, n_layers, n_embd;
    struct {
        uint64_t n, n_bytes;
    } types[GGUF_DTYPE_END];
    bool has_template;
};

static struct gguf_str get_text(const struct gguf *g, const char *key)
{
    struct gguf_str s = {"", 0};
    gguf_get_str(g, key, &s, NULL); /* of another type: as if absent */
    return s;
}

static uint32_t get_arch_u32(const struct gguf *g, struct gguf_str arch, const char *key)
{
    char full[128];
    uint32_t v = 0;
    snprintf(full, sizeof full, "%.*s.%s", (int)MIN(arch.n, (size_t)80), arch.p, key);
    return gguf_get_u32(g, full, &v, NULL) == 0 ? v : 0;
}

static void summarize(struct summary *m, const struct gguf *g)
{
    *m = (struct summary){
        .arch = get_text(g, "general.architecture"),
        .name = get_text(g, "general.name"),
        .license = get_text(g, "general.license"),
        .quant = "",
        .has_template = get_text(g, "tokenizer.chat_template").n > 0,
    };
    m->n_ctx = get_arch_u32(g, m->arch, "context_length");
    m->n_layers = get_arch_u32(g, m->arch, "block_count");
    m->n_embd = get_arch_u32(g, m->arch, "embedding_length");
    for (uint32_t i = 0; i < g->n_shards; i++)
        m->n_bytes += g->shards[i].file_bytes;
    for (uint64_t i = 0; i < g->n_tensors; i++) {
        const struct gguf_tensor *w = &g->tensors[i];
        m->n_params += w->ne[0] * w->ne[1] * w->ne[2] * w->ne[3];
        m->types[w->type].n++;
        m->types[w->type].n_bytes += w->n_bytes;
    }
    uint64_t most = 0;
    for (uint32_t i = 0; i < GGUF_DTYPE_END; i++) {
        if (m->types[i].n_bytes > most) {
            most = m->types[i].n_bytes;
            m->quant = gguf_dtype_find(i)->name;
        }
    }
}

static void row(const char *name, const char *fmt, ...) PRINTF_LIKE(2, 3);
static void row(const char *name, const char *fmt, ...)
{
    printf("%s%-14s%s ", style(1, STYLE_DIM), name, style(1, STYLE_NONE));
    va_list ap;
    va_start(ap, fmt);
    vprintf(fmt, ap);
    va_end(ap);
    putchar('\n');
}

/* A row of text from outside, cleaned. */
static void row_text(const char *name, const char *p, size_t n, const char *absent)
{
    struct buf b = {0};
    put_clean(&b, p, n, 200);
    row(name, "%s", n ? buf_str(&b) : absent);
    buf_fini(&b);
}

/* What it would take here with the defaults of `run`. A model that cannot be placed is shown all the
 * same. */
static int place_model(struct engine_placement *p, struct model_ref *s, struct err *e)
{
    struct engine_config c = {.quiet_load = true};
    *p = (struct engine_placement){0};
    return engine_place(p, s->file, &c, e);
}

static void show_memory(struct model_ref *s)
{
    struct engine_placement p;
    struct err why = {0};
    struct buf text = {0};
    if (place_model(&p, s, &why)) {
        row_text("memory:", why.msg, strlen(why.msg), "");
        return;
    }
    format_memory(&text, &p, 0);
    row("memory:", "%s with a context of %u", buf_str(&text), p.n_ctx);
    buf_fini(&text);
}

static void show_table(const struct summary *m, struct model_ref *s, const struct store_model *sm)
{
    char params[16], bytes[16], age[24];
    format_count(params, m->n_params);
    format_bytes(bytes, m->n_bytes);
    const char *ref = model_file_name(s->file);
    row_text("model", ref, strlen(ref), "");
    if (m->name.n)
        row_text("name", m->name.p, m->name.n, "");
    struct buf arch = {0};
    put_clean(&arch, m->arch.p, m->arch.n, 60);
    row("architecture", "%s, %u layers of width %u", m->arch.n ? buf_str(&arch) : "none stated",
        m->n_layers, m->n_embd);
    buf_fini(&arch);
    row("parameters", "%s", params);
    row("context", "%u tokens", m->n_ctx);
    row("quantization", "%s", m->quant);
    row("size", "%s", bytes);
    row("digest", "%s", model_file_digest(s->file));
    show_memory(s);
    row_text("license", m->license.p, m->license.n, "not stated");
    row("chat template", "%s", m->has_template ? "yes (--template prints it)" : "no");
    if (sm->link_path[0])
        row_text("linked to", sm->link_path, strlen(sm->link_path), "");
    if (sm->added) {
        format_age(age, sm->added);
        row("added", "%s", age);
    }
    const char *title = "tensors";
    for (uint32_t i = 0; i < GGUF_DTYPE_END; i++) {
        if (!m->types[i].n)
            continue;
        format_bytes(bytes, m->types[i].n_bytes);
        row(title, "%5" PRIu64 " %-7s %8s", m->types[i].n, gguf_dtype_find(i)->name, bytes);
        title = "";
    }
}

static json_t *scalar_json(const struct gguf_kv *kv, enum gguf_type type, uint64_t i)
{
    switch (type) {
    case GGUF_STRING:
        return json_text(kv->strings[i].p, kv->strings[i].n);
    case GGUF_BOOL:
        return json_boolean(gguf_kv_int(kv, i));
    case GGUF_FLOAT32:
    case GGUF_FLOAT64: {
        json_t *j = json_real(gguf_kv_number(kv, i)); /* NULL for NaN and infinities */
        return j ? j : json_null();
    }
    default:
        return json_integer(gguf_kv_int(kv, i));
    }
}

/* An array as its first items, with the whole length beside them. */
static json_t *metadata_json(const struct gguf *g)
{
    json_t *all = json_object();
    for (uint64_t i = 0; i < g->n_kv; i++) {
        const struct gguf_kv *kv = &g->kv[i];
        json_t *v;
        if (kv->type == GGUF_ARRAY) {
            json_t *items = json_array();
            for (uint64_t k = 0; k < MIN(kv->n, (uint64_t)SHOW_ITEMS); k++)
                json_array_append_new(items, scalar_json(kv, kv->elem_type, k));
            v = kv->n <= SHOW_ITEMS
                    ? items
                    : json_pack("{sI so}", "length", (json_int_t)kv->n, "first", items);
        } else {
            v = scalar_json(kv, kv->type, 0);
        }
        json_t *key = json_text(kv->key.p, kv->key.n);
        json_object_set_new_nocheck(all, key ? json_string_value(key) : "", v);
        json_decref(key);
    }
    return all;
}

static json_t *show_json(const struct summary *m, struct model_ref *s, const struct store_model *sm,
                         bool metadata)
{
    json_t *types = json_object();
    for (uint32_t i = 0; i < GGUF_DTYPE_END; i++)
        if (m->types[i].n)
            json_object_set_new(types, gguf_dtype_find(i)->name,
                                json_pack("{sI sI}", "tensors", (json_int_t)m->types[i].n, "bytes",
                                          (json_int_t)m->types[i].n_bytes));
    const char *ref = model_file_name(s->file);
    json_t *j = json_pack(
        "{so so so sI sI sI sI ss sI ss so sb so}", "model", json_text(ref, strlen(ref)), "name",
        json_text(m->name.p, m->name.n), "arch", json_text(m->arch.p, m->arch.n), "params",
        (json_int_t)m->n_params, "ctx", (json_int_t)m->n_ctx, "layers", (json_int_t)m->n_layers,
        "width", (json_int_t)m->n_embd, "quant", m->quant, "bytes", (json_int_t)m->n_bytes,
        "digest", model_file_digest(s->file), "license", json_text(m->license.p, m->license.n),
        "chat_template", m->has_template, "tensors", types);
    if (j && sm->added)
        json_object_set_new(j, "added", json_integer(sm->added));
    if (j && sm->link_path[0])
        json_object_set_new(j, "link", json_text(sm->link_path, strlen(sm->link_path)));
    struct engine_placement p;
    if (j && !place_model(&p, s, NULL))
        json_object_set_new(j, "memory", memory_json(&p, 0));
    if (j && metadata)
        json_object_set_new(j, "metadata", metadata_json(model_file_gguf(s->file)));
    return j;
}

static void put_value(struct buf *b, const struct gguf_kv *kv, uint64_t i, enum gguf_type type)
{
    if (type == GGUF_STRING) {
        buf_putc(b, '"');
        put_clean(b, kv->strings[i].p, kv->strings[i].n, kv->type == GGUF_ARRAY ? 24 : 400);
        buf_putc(b, '"');
    } else if (type == GGUF_BOOL) {
        buf_puts(b, gguf_kv_int(kv, i) ? "true" : "false");
    } else if (type == GGUF_FLOAT32 || type == GGUF_FLOAT64) {
        buf_printf(b, "%.9g", gguf_kv_number(kv, i));
    } else {
        buf_printf(b, "%" PRId64, gguf_kv_int(kv, i));
    }
}

static int show_metadata(const struct gguf *g, struct err *e)
{
    struct buf b = {0};
    for (uint64_t i = 0; i < g->n_kv; i++) {
        const struct gguf_kv *kv = &g->kv[i];
        put_clean(&b, kv->key.p, kv->key.n, 200);
        buf_puts(&b, " = ");
        if (kv->type != GGUF_ARRAY) {
            put_value(&b, kv, 0, kv->type);
        } else {
            buf_putc(&b, '[');
            for (uint64_t k = 0; k < MIN(kv->n, (uint64_t)SHOW_ITEMS); k++) {
                buf_puts(&b, k ? ", " : "");
                put_value(&b, kv, k, kv->elem_type);
            }
            if (kv->n > SHOW_ITEMS)
                buf_printf(&b, ", ... %" PRIu64 " in all", kv->n);
            buf_putc(&b, ']');
        }
        buf_putc(&b, '\n');
    }
    if (b.failed)
        err_set(e, ERR_MEMORY, "out of memory for the list of keys");
    fwrite(b.data, 1, b.n, stdout);
    int rc = b.failed ? -1 : 0;
    buf_fini(&b);
    return rc;
}

static int show_template(const struct model_ref *s, struct err *e)
{
    struct gguf_str t;
    if (model_ref_template(&t, s, e))
        return -1;
    if (!t.n)
        return err_set(e, ERR_NOT_FOUND, "%s has no chat template", model_file_name(s->file));
    fwrite(t.p, 1, t.n, stdout);
    if (t.p[t.n - 1] != '\n')
        putchar('\n');
    return 0;
}

static int show_run(const struct command_args *a, struct err *e)
{
    const struct show_opts *o = a->opts;
    struct model_ref s = {0};
    struct store_model sm = {0};
    struct summary m;
    int rc = -1;
    if (o->template && (o->json || o->metadata))
        return usage_error(e, "show: --template prints nothing else, so that --json and --metadata "
                              "do not go with it");
    if (model_ref_open(&s, a->words[0], &o->common, e) ||
        (s.store && store_find(s.store, &sm, a->words[0], e)))
        goto out;
    if (o->template) {
        rc = show_template(&s, e);
        goto out;
    }
    summarize(&m, model_file_gguf(s.file));
    if (o->json) {
        rc = print_json(show_json(&m, &s, &sm, o->metadata), e);
        goto out;
    }
    rc = 0;
    if (o->metadata)
        rc = show_metadata(model_file_gguf(s.file), e);
    else
        show_table(&m, &s, &sm);
out:
    model_ref_close(&s);
    return rc;
}

const struct command command_show = {
    .name = "show",
    .summary = "what a model is",
    .usage = "MODEL [--template | --metadata] [--json]",
    .about = "Show a model's architecture, size, quantization, digest, license and tensors.\n"
             "MODEL is a name in the store or a path to a .gguf file.",
    .examples = "  ingot show smollm2\n"
                "  ingot show ./model.gguf --metadata\n"
                "  ingot show smollm2 --template > template.jinja\n",
    .opts_bytes = sizeof(struct show_opts),
    .groups = {{"Show", show_options, 0}, COMMON_GROUP},
    .min_words = 1,
    .max_words = 1,
    .run = show_run,
};
