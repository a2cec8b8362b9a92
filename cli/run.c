/* ingot run: one answer to a prompt (and/or standard input), or a chat when both are a terminal.
 * A session holds the messages and the settings; chat.c talks to the person. */
#include "cli/cli_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define AT(field) offsetof(struct run_opts, field)
static const struct option run_options[] = {
    {"system", NULL, 0, true, OPTION_STR, "TEXT", AT(system), 0, 0, "The system prompt"},
    {"raw", NULL, 0, false, OPTION_FLAG, NULL, AT(raw), 0, 0,
     "Continue the text as it is, without the chat template"},
    {"no-wrap", "nowordwrap", 0, true, OPTION_FLAG, NULL, AT(no_wrap), 0, 0,
     "On a terminal: no line breaks between words"},
    {"no-prefix-cache", NULL, 0, true, OPTION_FLAG, NULL, AT(no_prefix_cache), 0, 0,
     "Do not keep what was computed of prompts for the next start"},
    {"stats", NULL, 0, true, OPTION_FLAG, NULL, AT(stats), 0, 0,
     "Speeds after the answer (default: on a terminal)"},
    {0},
};
#undef AT

enum { RUN_MAX_INPUT = 64 << 20 };

/* ---- sessions ---- */

const char *session_system(const struct session *s)
{
    const json_t *first = json_array_get(s->messages, 0);
    const char *role = json_string_value(json_object_get(first, "role"));
    return role && !strcmp(role, "system") ? json_string_value(json_object_get(first, "content"))
                                           : NULL;
}

static int add_message(json_t *messages, const char *role, const char *text, size_t n,
                       struct err *e)
{
    json_t *m = json_pack("{ss so}", "role", role, "content", json_text(text, n));
    if (!m || json_array_append_new(messages, m))
        return err_set(e, ERR_MEMORY, "out of memory for a message");
    return 0;
}

int session_clear(struct session *s, const char *system, struct err *e)
{
    json_t *fresh = json_array();
    if (!fresh)
        return err_set(e, ERR_MEMORY, "out of memory for the chat");
    if (system && *system && add_message(fresh, "system", system, strlen(system), e)) {
        json_decref(fresh);
        return -1;
    }
    json_decref(s->messages);
    s->messages = fresh;
    return 0;
}

static int prompt_ids(struct ids *ids, struct session *s, const char *text, size_t n, struct err *e)
{
    unsigned flags = TOKENIZE_ADD_SPECIAL | TOKENIZE_PARSE_SPECIAL;
    int rc = s->raw ? tokenizer_encode(ids, engine_tokenizer(s->engine), text, n, flags, e)
                    : engine_chat_ids(ids, s->engine, s->messages, NULL, NULL, e);
    if (!rc && ids->failed)
        rc = err_set(e, ERR_MEMORY, "out of memory for the prompt's tokens");
    if (!rc && !ids->n)
        rc = err_set(e, ERR_USAGE, "the prompt is empty; write something");
    return rc;
}

uint32_t session_more_ctx(const struct session *s, size_t need)
{
    const struct engine_info *i = engine_info(s->engine);
    uint64_t want = i->n_ctx;
    do
        want *= 2;
    while (want && want <= need);
    want = MIN(want, (uint64_t)i->n_ctx_train);
    return want > i->n_ctx && want > need ? (uint32_t)want : 0;
}

/* The engine would refuse it too, but does not know what the user can do here. */
static int refuse_long(const struct session *s, size_t n_ids, struct err *e)
{
    uint32_t more = session_more_ctx(s, n_ids), n_ctx = engine_info(s->engine)->n_ctx;
    bool full = s->chat && json_array_size(s->messages) > (session_system(s) ? 2 : 1);
    char with[80] = "";
    if (more)
        snprintf(with, sizeof with, s->chat ? ", or start again with --ctx %u" : " or use --ctx %u",
                 more);
    return err_set(e, ERR_LIMIT, "the %s has %zu tokens, the context holds %u; %s%s",
                   full ? "chat" : "prompt", n_ids, n_ctx,
                   full ? "/clear starts over" : "shorten it", with);
}

/* On an error the messages are what they were before. */
int session_answer(struct answer *a, struct session *s, const char *text, size_t n, struct err *e)
{
    struct ids ids = {0};
    size_t n_before = json_array_size(s->messages);
    int rc = s->raw ? 0 : add_message(s->messages, "user", text, n, e);
    if (rc || (rc = prompt_ids(&ids, s, text, n, e)))
        goto out;
    if (ids.n >= engine_info(s->engine)->n_ctx && (rc = refuse_long(s, ids.n, e)))
        goto out;
    struct request r = {
        .ids = ids.v,
        .n_ids = ids.n,
        .max_tokens = s->sampling.max_tokens,
        .sample = s->sampling.p,
        .stop = (const char *const *)s->sampling.stops,
        .n_stop = s->sampling.stop.n,
    };
    a->no_wrap = s->opts->no_wrap;
    rc = answer_stream(a, s->engine, &r, e);
    if (!rc && !s->raw)
        rc = add_message(s->messages, "assistant", buf_str(&a->text), a->text.n, e);
out:
    while (rc && json_array_size(s->messages) > n_before)
        json_array_remove(s->messages, json_array_size(s->messages) - 1);
    ids_fini(&ids);
    return rc;
}

/* ---- one answer ---- */

static int read_prompt(struct buf *out, const struct command_args *a, bool piped, struct err *e)
{
    struct buf in = {0};
    for (size_t i = 1; i < a->n_words; i++)
        buf_printf(out, "%s%s", i > 1 ? " " : "", a->words[i]);
    int rc = piped ? read_stream(&in, 0, "standard input", RUN_MAX_INPUT, e) : 0;
    while (in.n && (in.data[in.n - 1] == '\n' || in.data[in.n - 1] == '\r'))
        in.n--;
    if (!rc && in.n) {
        buf_puts(out, out->n ? "\n\n" : "");
        buf_put(out, in.data, in.n);
    }
    buf_fini(&in);
    if (!rc && out->failed)
        rc = err_set(e, ERR_MEMORY, "out of memory for the prompt");
    if (!rc && !out->n)
        rc = usage_error(e, a->n_words > 1
                                ? "run: the prompt is empty; write something, or leave it out to "
                                  "chat at a terminal"
                                : "run: standard input is empty; give a PROMPT, or a terminal to "
                                  "chat");
    if (!rc && !utf8_valid(out->data, out->n))
        rc = err_set(e, ERR_USAGE, "the prompt is not valid UTF-8; convert it first");
    return rc;
}

static int refuse_full(const struct session *s, struct err *e)
{
    uint32_t n_ctx = engine_info(s->engine)->n_ctx, more = session_more_ctx(s, n_ctx);
    char with[40] = "";
    if (more)
        snprintf(with, sizeof with, " or use --ctx %u", more);
    return err_set(e, ERR_LIMIT,
                   "the answer was cut: the context of %u tokens is full; shorten the prompt%s",
                   n_ctx, with);
}

static int run_once(struct session *s, const struct buf *prompt, struct err *e)
{
    struct answer a = {0};
    int rc = session_answer(&a, s, prompt->data, prompt->n, e);
    if (a.text.n && a.text.data[a.text.n - 1] != '\n')
        putchar('\n');
    fflush(stdout);
    if (!rc && !s->opts->common.quiet && (s->opts->stats || (isatty(1) && isatty(2)))) {
        struct buf line = {0};
        format_stats(&line, &a.stats, a.n_read, engine_info(s->engine)->load_seconds);
        fprintf(stderr, "%s%s%s\n", style(2, STYLE_DIM), buf_str(&line), style(2, STYLE_NONE));
        buf_fini(&line);
    }
    if (!rc && a.interrupted)
        rc = err_set(e, ERR_CANCELLED, "the answer was interrupted");
    else if (!rc && a.stats.finish == FINISH_CONTEXT)
        rc = refuse_full(s, e);
    buf_fini(&a.text);
    return rc;
}

/* ---- the command ---- */

static void run_defaults(void *opts)
{
    struct run_opts *o = opts;
    sample_defaults(&o->sampling.p);
}

/* What the flags say over what the model recommends. */
static int merge_sampling(struct session *s, const struct command_args *a, struct err *e)
{
    s->sampling = (struct sampling_opts){0};
    engine_sample_defaults(&s->sampling.p, s->engine);
    options_copy(&s->sampling, &s->opts->sampling, sampling_options,
                 options_given(a, sampling_options));
    return sampling_resolve(&s->sampling, e);
}

/* Before a model is loaded for seconds: are the sampling flags right at all? */
static int check_flags(const struct run_opts *o, struct err *e)
{
    struct sampling_opts copy = o->sampling;
    int rc = sampling_resolve(&copy, e);
    sampling_fini(&copy);
    return rc;
}

static int run_session(struct session *s, const struct command_args *a, const struct buf *prompt,
                       struct err *e)
{
    const struct run_opts *o = s->opts;
    int rc = load_engine(&s->engine, s->source, &o->engine, &o->common, e);
    if (rc)
        return rc;
    s->chat = !prompt;
    s->raw = o->raw || !engine_template(s->engine);
    if (s->raw && o->system)
        return usage_error(e, "run: --system needs a chat template, and %s",
                           o->raw ? "--raw leaves it out" : "this model has none");
    if (s->raw && !o->raw && !o->common.quiet)
        fprintf(stderr, "This model has no chat template: it continues your text.\n");
    rc = merge_sampling(s, a, e);
    if (!rc)
        rc = session_clear(s, o->system, e);
    if (!rc)
        rc = prompt ? run_once(s, prompt, e) : chat_run(s, e);
    return rc;
}

static int run_run(const struct command_args *a, struct err *e)
{
    const struct run_opts *o = a->opts;
    struct model_ref source = {0};
    struct session s = {.source = &source, .opts = o};
    struct buf prompt = {0};
    bool piped = !isatty(0), once = piped || a->n_words > 1;
    int rc = check_flags(o, e);
    if (rc)
        goto out;
    rc = model_ref_open(&source, a->words[0], &o->common, e);
    if (!rc && once)
        rc = read_prompt(&prompt, a, piped, e);
    if (!rc && !o->no_prefix_cache)
        model_ref_open_prefix(&source, &o->common);
    if (!rc)
        rc = run_session(&s, a, once ? &prompt : NULL, e);
out:
    sampling_fini(&s.sampling);
    json_decref(s.messages);
    engine_close(s.engine);
    model_ref_close(&source);
    buf_fini(&prompt);
    return rc;
}

const struct command command_run = {
    .name = "run",
    .summary = "chat with a model, or ask it one thing",
    .usage = "MODEL [PROMPT...]",
    .about =
        "Chat in the terminal; with PROMPT, or standard input, answer and exit (with both, the\n"
        "input follows the prompt). MODEL is a name in the store or a path to a .gguf file.",
    .examples = "  ingot run smollm2\n"
                "  ingot run ./model.gguf \"Why is the sky blue?\" --temp 0\n"
                "  git diff | ingot run smollm2 \"Describe this change:\" > message.txt\n",
    .opts_bytes = sizeof(struct run_opts),
    .groups = {{"Run", run_options, 0},
               ENGINE_GROUP(struct run_opts),
               SAMPLING_GROUP(struct run_opts),
               COMMON_GROUP},
    .min_words = 1,
    .max_words = SIZE_MAX,
    .defaults = run_defaults,
    .run = run_run,
};
