/* ingot tokenize: text to token ids and back, with a model's own tokenizer; one text, or a stream
 * of JSON lines. Loads the header only, never the weights. */
#include "cli/cli_internal.h"

#include <stdio.h>
#include <string.h>

struct tokenize_opts {
    struct common_opts common;
    const char *decode;
    bool add_special, special, jsonl, json;
};

#define AT(field) offsetof(struct tokenize_opts, field)
static const struct option tokenize_options[] = {
    {"add-special", NULL, 0, false, OPTION_FLAG, NULL, AT(add_special), 0, 0,
     "Add the start and end tokens that the model asks for"},
    {"special", "parse-special", 0, false, OPTION_FLAG, NULL, AT(special), 0, 0,
     "Text that spells a special token gives that token"},
    {"decode", NULL, 'd', false, OPTION_STR, "IDS", AT(decode), 0, 0,
     "The other way: 1,2,3 to text"},
    {"jsonl", NULL, 0, false, OPTION_FLAG, NULL, AT(jsonl), 0, 0,
     "Lines of JSON on standard input, a line of JSON for each"},
    {"json", NULL, 0, false, OPTION_FLAG, NULL, AT(json), 0, 0, "For programs"},
    {0},
};
#undef AT

static void put_ids(struct buf *out, const struct ids *ids, const char *between)
{
    for (size_t i = 0; i < ids->n; i++)
        buf_printf(out, "%s%d", i ? between : "", ids->v[i]);
}

static void put_hex(struct buf *out, const char *p, size_t n)
{
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < n; i++) {
        buf_putc(out, digits[(unsigned char)p[i] >> 4]);
        buf_putc(out, digits[p[i] & 15]);
    }
}

/* ---- one JSON line ---- */

static int line_ids(struct ids *ids, const json_t *list, struct err *e)
{
    size_t i;
    json_t *v;
    if (!json_is_array(list))
        return err_set(e, ERR_USAGE, "\"ids\" is not a list");
    json_array_foreach(list, i, v)
    {
        json_int_t id = json_integer_value(v);
        if (!json_is_integer(v) || id < 0 || id > INT32_MAX)
            return err_set(e, ERR_USAGE, "\"ids\" holds something that is not a token id");
        ids_put(ids, (int32_t)id);
    }
    return ids->failed ? err_set(e, ERR_MEMORY, "out of memory for the ids") : 0;
}

static int line_text(struct buf *text, const json_t *in, struct err *e)
{
    const json_t *t = json_object_get(in, "text"), *hex = json_object_get(in, "bytes_hex");
    if (json_is_string(t)) {
        buf_put(text, json_string_value(t), json_string_length(t));
    } else if (json_is_string(hex)) {
        size_t n = json_string_length(hex);
        uint8_t *bytes = mem_alloc(n / 2 + 1);
        int got = bytes ? hex_decode(bytes, n / 2 + 1, json_string_value(hex), n) : 0;
        if (got > 0)
            buf_put(text, bytes, (size_t)got);
        mem_free(bytes);
        if (got < 0)
            return err_set(e, ERR_USAGE, "\"bytes_hex\" is not hexadecimal");
        text->failed |= !bytes;
    } else {
        return err_set(e, ERR_USAGE, "a line needs \"text\", \"bytes_hex\" or \"ids\"");
    }
    return text->failed ? err_set(e, ERR_MEMORY, "out of memory for the text") : 0;
}

/* Flags of the line, else those of the command. */
static unsigned line_flags(const struct tokenize_opts *o, const json_t *in)
{
    const json_t *add = json_object_get(in, "add_special"),
                 *parse = json_object_get(in, "parse_special");
    unsigned flags = 0;
    if (add ? json_is_true(add) : o->add_special)
        flags |= TOKENIZE_ADD_SPECIAL;
    if (parse ? json_is_true(parse) : o->special)
        flags |= TOKENIZE_PARSE_SPECIAL;
    return flags;
}

struct scratch {
    struct buf line, text, out;
    struct ids ids;
};

static int answer_line(struct scratch *s, const struct tokenize_opts *o, const struct tokenizer *t,
                       struct err *e)
{
    json_error_t je;
    json_t *in = json_loadb(buf_str(&s->line), s->line.n, JSON_ALLOW_NUL, &je);
    int rc = -1;
    if (!json_is_object(in)) {
        err_set(e, ERR_USAGE, "not a JSON object: %s", in ? "another kind of value" : je.text);
        goto out;
    }
    const json_t *list = json_object_get(in, "ids");
    bool decode = list && !json_object_get(in, "text") && !json_object_get(in, "bytes_hex");
    if (decode ? line_ids(&s->ids, list, e) : line_text(&s->text, in, e))
        goto out;
    if (decode) {
        tokenizer_decode(&s->text, t, s->ids.v, s->ids.n);
        buf_puts(&s->out, "{\"bytes_hex\": \"");
        put_hex(&s->out, s->text.data, s->text.n);
        buf_puts(&s->out, "\"}");
    } else {
        if (tokenizer_encode(&s->ids, t, buf_str(&s->text), s->text.n, line_flags(o, in), e))
            goto out;
        buf_putc(&s->out, '[');
        put_ids(&s->out, &s->ids, ", ");
        buf_putc(&s->out, ']');
    }
    if (s->out.failed || s->text.failed || s->ids.failed)
        err_set(e, ERR_MEMORY, "out of memory for the answer to a line");
    else
        rc = 0;
out:
    json_decref(in);
    return rc;
}

/* A bad line gives {"error"} in its place and exit status 1 at the end, so that lines stay paired.
 */
static int answer_lines(const struct tokenize_opts *o, const struct tokenizer *t, struct err *e)
{
    struct scratch s = {0};
    size_t n_bad = 0;
    say_reading();
    while (read_line(&s.line, stdin)) {
        struct err le = {0};
        s.ids.n = 0;
        buf_clear(&s.text);
        buf_clear(&s.out);
        if (s.line.failed)
            break;
        if (answer_line(&s, o, t, &le)) {
            json_t *j = json_pack("{so}", "error", json_text(le.msg, strlen(le.msg)));
            json_dumpf(j, stdout, 0);
            json_decref(j);
            n_bad++;
        } else {
            fwrite(s.out.data, 1, s.out.n, stdout);
        }
        putchar('\n');
    }
    bool failed = s.line.failed;
    buf_fini(&s.line);
    buf_fini(&s.text);
    buf_fini(&s.out);
    ids_fini(&s.ids);
    if (failed)
        return err_set(e, ERR_MEMORY, "out of memory for a line of standard input");
    if (n_bad)
        return err_set(e, ERR_USAGE, "%zu of the lines could not be answered; see their \"error\"",
                       n_bad);
    return 0;
}

/* ---- one text ---- */

static int decode_ids(const struct tokenize_opts *o, const struct tokenizer *t, struct err *e)
{
    struct ids ids = {0};
    struct buf text = {0}, hex = {0};
    int rc = parse_ids(&ids, o->decode, "--decode", e);
    if (rc)
        goto out;
    for (size_t i = 0; i < ids.n && !rc; i++)
        if ((uint32_t)ids.v[i] >= tokenizer_n_vocab(t))
            rc = usage_error(e, "--decode: token %d is outside the vocabulary (0 to %u)", ids.v[i],
                             tokenizer_n_vocab(t) - 1);
    if (rc)
        goto out;
    tokenizer_decode(&text, t, ids.v, ids.n);
    if (text.failed) {
        rc = err_set(e, ERR_MEMORY, "out of memory for the text");
    } else if (o->json) {
        put_hex(&hex, text.data, text.n);
        rc = print_json(json_pack("{so ss}", "text", json_text(buf_str(&text), text.n), "bytes_hex",
                                  buf_str(&hex)),
                        e);
    } else {
        fwrite(text.data, 1, text.n, stdout);
        putchar('\n');
    }
out:
    ids_fini(&ids);
    buf_fini(&text);
    buf_fini(&hex);
    return rc;
}

static int encode_text(const struct command_args *a, const struct tokenizer *t, struct err *e)
{
    const struct tokenize_opts *o = a->opts;
    struct ids ids = {0};
    struct buf text = {0}, line = {0};
    int rc = -1;
    for (size_t i = 1; i < a->n_words; i++)
        buf_printf(&text, "%s%s", i > 1 ? " " : "", a->words[i]);
    if (a->n_words < 2 && read_input(&text, "-", (size_t)1 << 31, e))
        goto out;
    if (tokenizer_encode(&ids, t, buf_str(&text), text.n, line_flags(o, NULL), e))
        goto out;
    if (o->json)
        buf_puts(&line, "{\"ids\": [");
    put_ids(&line, &ids, o->json ? ", " : " ");
    if (o->json)
        buf_printf(&line, "], \"n\": %zu}", ids.n);
    if (text.failed || line.failed || ids.failed) {
        err_set(e, ERR_MEMORY, "out of memory for the text");
        goto out;
    }
    puts(buf_str(&line));
    rc = 0;
out:
    ids_fini(&ids);
    buf_fini(&text);
    buf_fini(&line);
    return rc;
}

static int tokenize_run(const struct command_args *a, struct err *e)
{
    const struct tokenize_opts *o = a->opts;
    struct model_ref s = {0};
    struct tokenizer *t = NULL;
    int rc = -1;
    if ((o->jsonl || o->decode) && a->n_words > 1)
        return usage_error(e, "tokenize: TEXT does not go with %s",
                           o->jsonl ? "--jsonl" : "--decode");
    if (o->jsonl && (o->decode || o->json))
        return usage_error(e, "tokenize: --jsonl does not go with --decode or --json");
    if (o->decode && (o->add_special || o->special))
        return usage_error(e, "tokenize: --add-special and --special do not go with --decode");
    if (model_ref_open(&s, a->words[0], &o->common, e))
        goto out;
    if (tokenizer_new(&t, model_file_gguf(s.file), e)) {
        err_prefix(e, "%s", model_file_name(s.file));
        goto out;
    }
    rc = o->jsonl ? answer_lines(o, t, e) : o->decode ? decode_ids(o, t, e) : encode_text(a, t, e);
out:
    tokenizer_free(t);
    model_ref_close(&s);
    return rc;
}

const struct command command_tokenize = {
    .name = "tokenize",
    .summary = "text to token ids, and back",
    .usage = "MODEL [TEXT...] [--decode IDS] [--jsonl]",
    .about = "Print the token ids of TEXT, or of standard input, on one line. With --jsonl every\n"
             "line in, {\"text\" or \"bytes_hex\", \"add_special\", \"parse_special\"} or "
             "{\"ids\"}, gives a\n"
             "line out: [ids] or {\"bytes_hex\"}.",
    .examples = "  ingot tokenize smollm2 \"Hello, world\"\n"
                "  ingot tokenize smollm2 --decode 19556,28,905\n"
                "  ingot tokenize smollm2 --jsonl < texts.jsonl\n",
    .opts_bytes = sizeof(struct tokenize_opts),
    .groups = {{"Tokenize", tokenize_options, 0}, COMMON_GROUP},
    .min_words = 1,
    .max_words = SIZE_MAX,
    .run = tokenize_run,
};
