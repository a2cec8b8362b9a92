/* ingot template: the prompt text that a chat would produce, from a model's template or a Jinja
 * file; one chat, or a stream of JSON lines. Never loads weights. */
#include "cli/cli_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct template_opts {
    struct common_opts common;
    const char *messages, *tools, *extra, *now, *bos, *eos;
    bool jsonl, no_generation;
};

#define AT(field) offsetof(struct template_opts, field)
static const struct option template_options[] = {
    {"messages", "file", 'm', false, OPTION_STR, "FILE", AT(messages), 0, 0,
     "The chat, as a JSON list of messages; - is standard input"},
    {"tools", NULL, 0, false, OPTION_STR, "FILE", AT(tools), 0, 0, "Tools, as a JSON list"},
    {"extra", "chat-template-kwargs", 0, false, OPTION_STR, "JSON", AT(extra), 0, 0,
     "Further variables, as a JSON object"},
    {"no-generation-prompt", NULL, 0, false, OPTION_FLAG, NULL, AT(no_generation), 0, 0,
     "Leave out the opening of the answer"},
    {"now", NULL, 0, false, OPTION_STR, "TIME", AT(now), 0, 0,
     "Fix the clock: 2026-01-15 or 2026-01-15T12:00:00 (UTC)"},
    {"bos", NULL, 0, false, OPTION_STR, "TEXT", AT(bos), 0, 0,
     "bos_token (default: the model's; none for a file)"},
    {"eos", NULL, 0, false, OPTION_STR, "TEXT", AT(eos), 0, 0,
     "eos_token (default: the model's; none for a file)"},
    {"jsonl", NULL, 0, false, OPTION_FLAG, NULL, AT(jsonl), 0, 0,
     "Lines of JSON in, {\"text\"} or {\"error\"} out"},
    {0},
};
#undef AT

enum { TEMPLATE_MAX_BYTES = 16 << 20 };

struct loaded { /* what the cases share */
    struct model_ref source;
    struct buf file; /* of a .jinja file */
    struct tokenizer *tokenizer;
    struct template *template;
    struct buf bos, eos;
    int64_t now;
};

static int parse_now(int64_t *out, const char *text, struct err *e)
{
    static const char *const formats[] = {"%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S", "%Y-%m-%d"};
    for (size_t i = 0; i < ARRAY_LEN(formats); i++) {
        struct tm tm = {0};
        const char *end = strptime(text, formats[i], &tm);
        if (end && (!*end || !strcmp(end, "Z"))) {
            *out = timegm(&tm);
            return 0;
        }
    }
    return usage_error(e, "--now: '%.40s' is not a time; write 2026-01-15 or 2026-01-15T12:00:00",
                       text);
}

static void put_token(struct buf *out, const struct tokenizer *t, int32_t id)
{
    size_t n = 0;
    const char *piece = id >= 0 ? tokenizer_piece(t, id, &n) : "";
    buf_put(out, piece, n);
}

static bool ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), m = strlen(end);
    return n >= m && !strcmp(s + n - m, end);
}

static int load_model_template(struct loaded *l, const char *ref, const struct template_opts *o,
                               struct err *e)
{
    struct gguf_str src;
    if (model_ref_open(&l->source, ref, &o->common, e) || model_ref_template(&src, &l->source, e))
        return -1;
    const char *name = model_file_name(l->source.file);
    if (!src.n)
        return err_set(e, ERR_NOT_FOUND, "%s has no chat template; give a .jinja file", name);
    /* Without a tokenizer that ingot knows the template still renders, if the tokens are given. */
    if (tokenizer_new(&l->tokenizer, model_file_gguf(l->source.file),
                      o->bos && o->eos ? NULL : e) &&
        !(o->bos && o->eos))
        return err_prefix(e, "%s", name);
    if (l->tokenizer && !o->bos)
        put_token(&l->bos, l->tokenizer, tokenizer_bos(l->tokenizer));
    if (l->tokenizer && !o->eos)
        put_token(&l->eos, l->tokenizer, tokenizer_eos(l->tokenizer));
    if (template_new(&l->template, src.p, src.n, e))
        return err_prefix(e, "%s: chat template", name);
    return 0;
}

static int load_template(struct loaded *l, const char *ref, const struct template_opts *o,
                         struct err *e)
{
    int rc = o->now ? parse_now(&l->now, o->now, e) : 0;
    if (rc)
        return rc;
    if (o->bos)
        buf_puts(&l->bos, o->bos);
    if (o->eos)
        buf_puts(&l->eos, o->eos);
    if (!ends_with(ref, ".jinja") && !ends_with(ref, ".j2") && !ends_with(ref, ".txt"))
        return load_model_template(l, ref, o, e);
    if (file_read_all(&l->file, ref, TEMPLATE_MAX_BYTES, e))
        return -1;
    if (template_new(&l->template, buf_str(&l->file), l->file.n, e))
        return err_prefix(e, "%s", ref);
    return 0;
}

static void loaded_fini(struct loaded *l)
{
    template_free(l->template);
    tokenizer_free(l->tokenizer);
    model_ref_close(&l->source);
    buf_fini(&l->file);
    buf_fini(&l->bos);
    buf_fini(&l->eos);
}

/* ---- one chat ---- */

static int render_one(struct loaded *l, const struct template_opts *o, struct err *e)
{
    json_t *messages = NULL, *tools = NULL, *extra = NULL;
    struct buf out = {0};
    json_error_t je;
    int rc = -1;
    messages = read_json(o->messages ? o->messages : "-", e);
    if (!messages || (o->tools && !(tools = read_json(o->tools, e))))
        goto out;
    if (o->extra && !json_is_object(extra = json_loads(o->extra, JSON_ALLOW_NUL, &je))) {
        rc = usage_error(e, "--extra: not a JSON object");
        goto out;
    }
    const json_t *list =
        json_is_object(messages) ? json_object_get(messages, "messages") : messages;
    if (!json_is_array(list)) {
        err_set(e, ERR_USAGE,
                "%s holds no list of messages; write [{\"role\": \"user\", \"content\": "
                "\"Hi\"}]",
                o->messages ? o->messages : "standard input");
        goto out;
    }
    struct template_args args = {
        .messages = list,
        .tools = tools                      ? tools
                 : json_is_object(messages) ? json_object_get(messages, "tools")
                                            : NULL,
        .extra = extra,
        .add_generation_prompt = !o->no_generation,
        .bos_token = buf_str(&l->bos),
        .eos_token = buf_str(&l->eos),
        .now = l->now,
    };
    if (json_is_null(args.tools))
        args.tools = NULL;
    rc = template_render(&out, l->template, &args, e);
    if (!rc)
        fwrite(out.data, 1, out.n, stdout);
out:
    json_decref(messages);
    json_decref(tools);
    json_decref(extra);
    buf_fini(&out);
    return rc;
}

/* ---- lines ---- */

static int render_line(struct buf *out, struct loaded *l, const struct template_opts *o,
                       const json_t *in, struct err *e)
{
    const json_t *generate = json_object_get(in, "add_generation_prompt");
    const json_t *tools = json_object_get(in, "tools"), *extra = json_object_get(in, "extra");
    const char *bos = json_string_value(json_object_get(in, "bos_token"));
    const char *eos = json_string_value(json_object_get(in, "eos_token"));
    struct template_args args = {
        .messages = json_object_get(in, "messages"),
        .tools = json_is_array(tools) ? tools : NULL,
        .extra = json_is_object(extra) ? extra : NULL,
        .add_generation_prompt = generate ? json_is_true(generate) : !o->no_generation,
        .bos_token = bos ? bos : buf_str(&l->bos),
        .eos_token = eos ? eos : buf_str(&l->eos),
        .now = l->now,
    };
    if (!json_is_array(args.messages))
        return err_set(e, ERR_USAGE, "\"messages\" is not a list");
    return template_render(out, l->template, &args, e);
}

static int print_line(struct loaded *l, const struct template_opts *o, const struct buf *line,
                      size_t *n_memory)
{
    struct err le = {0};
    struct buf text = {0};
    json_error_t je;
    json_t *in = json_loadb(line->data ? line->data : "", line->n, JSON_ALLOW_NUL, &je), *out;
    int rc;
    if (json_is_object(in))
        rc = render_line(&text, l, o, in, &le);
    else
        rc = err_set(&le, ERR_USAGE, "not a JSON object: %s",
                     in ? "another kind of value" : je.text);
    out = rc ? json_pack("{so}", "error", json_text(le.msg, strlen(le.msg)))
             : json_pack("{so}", "text", json_text(buf_str(&text), text.n));
    if (!out || json_dumpf(out, stdout, 0))
        ++*n_memory;
    putchar('\n');
    json_decref(out);
    json_decref(in);
    buf_fini(&text);
    return rc;
}

/* A line whose template raises is a result like any other: the exit status stays 0. */
static int render_lines(struct loaded *l, const struct template_opts *o, struct err *e)
{
    bool from_file = o->messages && strcmp(o->messages, "-");
    FILE *f = from_file ? fopen(o->messages, "re") : stdin;
    struct buf line = {0};
    size_t n_memory = 0;
    if (!f)
        return err_errno(e, "cannot open %s", o->messages);
    if (!from_file)
        say_reading();
    while (read_line(&line, f) && !line.failed)
        print_line(l, o, &line, &n_memory);
    if (line.failed || n_memory)
        err_set(e, ERR_MEMORY, "out of memory for a line of the input");
    buf_fini(&line);
    if (from_file)
        fclose(f);
    return e->code ? -1 : 0;
}

static int template_run(const struct command_args *a, struct err *e)
{
    const struct template_opts *o = a->opts;
    struct loaded l = {0};
    if (o->jsonl && (o->tools || o->extra))
        return usage_error(e, "template: with --jsonl every line has its own \"tools\" and "
                              "\"extra\"; leave out --tools and --extra");
    int rc = load_template(&l, a->words[0], o, e);
    if (!rc)
        rc = o->jsonl ? render_lines(&l, o, e) : render_one(&l, o, e);
    loaded_fini(&l);
    return rc;
}

const struct command command_template = {
    .name = "template",
    .summary = "the prompt text that a chat produces",
    .usage = "MODEL|FILE.jinja --messages FILE.json",
    .about = "Render a chat with a model's template, or with a Jinja file (.jinja, .j2, .txt).\n"
             "Messages are a JSON list, or an object with \"messages\" and \"tools\".",
    .examples =
        "  ingot template smollm2 --messages chat.json\n"
        "  echo '[{\"role\":\"user\",\"content\":\"Hi\"}]' | ingot template smollm2 --messages -\n"
        "  ingot template chat.jinja --jsonl --now 2026-01-15 < cases.jsonl\n",
    .opts_bytes = sizeof(struct template_opts),
    .groups = {{"Template", template_options, 0}, COMMON_GROUP},
    .min_words = 1,
    .max_words = 1,
    .run = template_run,
};
