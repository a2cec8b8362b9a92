/* The chat of `ingot run`: reads lines, answers them, and the slash commands. An error of one
 * answer ends that answer, never the chat. Owns the line editor and what the last answer measured.
 */
#include "cli/cli_internal.h"
#include "cli/lineedit.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { MAX_SLASHES = 15 };

struct chat {
    struct session *s;
    struct store *store; /* for history, /save and /load; NULL when there is none */
    bool own_store;      /* opened here */
    struct lineedit *line;
    const char *words[MAX_SLASHES + 1]; /* the commands' names, for Tab */
    struct request_stats last;
    uint64_t last_read; /* tokens of its prompt that were computed */
    bool answered, stats, leave;
};

/* What a slash command gets: the text behind its name, blanks stripped. */
struct slash {
    const char *name, *args, *help;
    int (*run)(struct chat *c, char *arg, struct err *e);
};

/* A text of ours on standard output or error, broken between words where that is a terminal. It
 * goes on from where *w is. */
static void put_words(struct wrap *w, FILE *f, enum style st, const char *text)
{
    int fd = fileno(f);
    struct buf out = {0};
    if (isatty(fd) && !term_plain())
        wrap_put(w, &out, text, strlen(text));
    else
        buf_puts(&out, text);
    fprintf(f, "%s%s%s", style(fd, st), buf_str(&out), style(fd, STYLE_NONE));
    buf_fini(&out);
}

static void say(enum style st, const char *text)
{
    struct wrap w;
    fflush(stdout);
    wrap_begin(&w, term_columns(2));
    put_words(&w, stderr, st, text);
    fputc('\n', stderr);
}

static void note(const char *fmt, ...) PRINTF_LIKE(1, 2);
static void note(const char *fmt, ...)
{
    char text[600];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    say(STYLE_DIM, text);
}

/* ---- /set ---- */

static void print_setting(const struct option *o, const struct sampling_opts *s)
{
    struct buf v = {0}, help = {0};
    option_format(&v, o, s);
    put_clean(&help, o->help, strlen(o->help), (size_t)MAX(term_columns(1) - 32, 10));
    printf("  %-20s %-8s %s%s%s\n", o->name, buf_str(&v), style(1, STYLE_DIM), buf_str(&help),
           style(1, STYLE_NONE));
    buf_fini(&v);
    buf_fini(&help);
}

/* The lists keep pointers, so that the value must outlive the chat: argv does, a typed line not. */
static int set_option(struct chat *c, const struct option *o, const char *value, struct err *e)
{
    struct sampling_opts *s = &c->s->sampling;
    if (o->kind == OPTION_LIST)
        return err_set(e, ERR_USAGE, "%s can only be set by its flag, --%s", o->name, o->name);
    struct sampling_opts before = *s;
    if (option_assign(o, s, value, o->name, e))
        return -1;
    if (sample_check(&s->p, e)) {
        *s = before;
        return -1;
    }
    print_setting(o, s);
    return 0;
}

static int slash_set(struct chat *c, char *arg, struct err *e)
{
    if (!*arg) {
        for (const struct option *o = sampling_options; o->name; o++)
            print_setting(o, &c->s->sampling);
        return 0;
    }
    size_t n = strcspn(arg, " \t=");
    char *value = arg + n + strspn(arg + n, " \t=");
    char name[64];
    snprintf(name, sizeof name, "%.*s", (int)MIN(n, sizeof name - 1), arg);
    const struct option *o = option_find(sampling_options, name, strlen(name));
    if (!o && option_find(engine_options, name, strlen(name)))
        return err_set(e, ERR_USAGE, "%s is fixed once the model is loaded; start again with --%s",
                       name, option_find(engine_options, name, strlen(name))->name);
    if (!o) {
        const char *nearest = NULL;
        size_t best = SIZE_MAX;
        for (const struct option *k = sampling_options; k->name; k++)
            suggest(&nearest, &best, name, k->name);
        return err_set(e, ERR_USAGE, "no parameter '%s'%s%s%s; /set alone shows them all", name,
                       nearest ? " (did you mean " : "", nearest ? nearest : "",
                       nearest ? "?)" : "");
    }
    if (!*value) {
        print_setting(o, &c->s->sampling);
        return 0;
    }
    return set_option(c, o, value, e);
}

/* ---- the other commands ---- */

static int slash_system(struct chat *c, char *arg, struct err *e)
{
    const char *now = session_system(c->s);
    if (c->s->raw)
        return err_set(e, ERR_USAGE,
                       "a system prompt needs a chat template, and none is used here");
    if (!*arg) {
        struct buf b = {0};
        struct wrap w;
        wrap_begin(&w, term_columns(1));
        put_terminal(&b, now ? now : "", now ? strlen(now) : 0);
        put_words(&w, stdout, STYLE_NONE,
                  now ? buf_str(&b) : "No system prompt. Set one: /system TEXT");
        putchar('\n');
        buf_fini(&b);
        return 0;
    }
    json_t *m = json_pack("{ss so}", "role", "system", "content", json_text(arg, strlen(arg)));
    if (!m || (now ? json_array_set_new(c->s->messages, 0, m)
                   : json_array_insert_new(c->s->messages, 0, m)))
        return err_set(e, ERR_MEMORY, "out of memory for the system prompt");
    note("System prompt set.");
    return 0;
}

static int need_store(const struct chat *c, struct err *e)
{
    return c->store ? 0
                    : err_set(e, ERR_NOT_FOUND,
                              "no store is open, so that chats cannot be kept; set INGOT_HOME to "
                              "a directory");
}

static int check_chat_name(const char *name, struct err *e)
{
    if (!*name)
        return err_set(e, ERR_USAGE, "which name? Write /save NAME");
    if (strchr(name, '/') || strchr(".~", *name))
        return err_set(e, ERR_USAGE,
                       "'%.60s' looks like a path; chats are kept in the store under a name: "
                       "/save trip",
                       name);
    for (const char *p = name; *p; p++)
        if (iscntrl((unsigned char)*p))
            return err_set(e, ERR_USAGE, "the name of a chat is one line");
    return 0;
}

static int slash_save(struct chat *c, char *arg, struct err *e)
{
    if (need_store(c, e) || check_chat_name(arg, e))
        return -1;
    char *text = json_dumps(c->s->messages, 0);
    int rc = text ? store_save_chat(c->store, arg, text, e)
                  : err_set(e, ERR_MEMORY, "out of memory for the chat");
    mem_free(text);
    if (!rc)
        note("Saved. Bring it back with /load %s", arg);
    return rc;
}

static int list_chats(const struct chat *c, struct err *e)
{
    struct store_chat *all;
    size_t n;
    if (store_list_chats(c->store, &all, &n, e))
        return -1;
    if (!n)
        note("No chat is saved yet; /save NAME keeps this one.");
    for (size_t i = 0; i < n; i++) {
        struct buf name = {0};
        char age[24];
        format_age(age, all[i].saved);
        put_clean(&name, all[i].name, strlen(all[i].name), (size_t)MAX(term_columns(1) - 30, 20));
        printf("  %-24s %s%s%s\n", buf_str(&name), style(1, STYLE_DIM), age, style(1, STYLE_NONE));
        buf_fini(&name);
    }
    mem_free(all);
    return 0;
}

static bool chat_is_sound(const json_t *messages)
{
    size_t i;
    json_t *m;
    if (!json_is_array(messages))
        return false;
    json_array_foreach(messages, i,
                       m) if (!json_is_string(json_object_get(m, "role")) ||
                              !json_is_string(json_object_get(m, "content"))) return false;
    return true;
}

static int slash_load(struct chat *c, char *arg, struct err *e)
{
    struct buf text = {0};
    json_t *messages = NULL;
    int rc = -1;
    if (need_store(c, e))
        return -1;
    if (!*arg)
        return list_chats(c, e);
    if (store_load_chat(c->store, &text, arg, e))
        goto out;
    messages = json_loadb(buf_str(&text), text.n, JSON_ALLOW_NUL, NULL);
    if (!chat_is_sound(messages)) {
        err_set(e, ERR_CORRUPT, "the saved chat '%s' is damaged; save it anew", arg);
        goto out;
    }
    json_decref(c->s->messages);
    c->s->messages = json_incref(messages);
    note("Loaded %zu messages.", json_array_size(messages));
    rc = 0;
out:
    json_decref(messages);
    buf_fini(&text);
    return rc;
}

static int slash_clear(struct chat *c, char *arg, struct err *e)
{
    const char *system = session_system(c->s);
    char *keep = system ? mem_strdup(system) : NULL;
    int rc = session_clear(c->s, keep, e);
    mem_free(keep);
    if (!rc)
        note(system ? "Cleared; the system prompt stays." : "Cleared.");
    return rc;
}

static int slash_show(struct chat *c, char *arg, struct err *e)
{
    const struct engine_info *i = engine_info(c->s->engine);
    char params[16], weights[16], kv[64];
    struct buf name = {0};
    put_clean(&name, i->name, strlen(i->name), 60);
    format_count(params, i->n_params);
    format_bytes(weights, i->placement.weight_bytes);
    format_kv(kv, &i->placement);
    printf("  model     %s\n"
           "  kind      %s, %s parameters, %u layers of width %u\n"
           "  device    %s\n"
           "  memory    %s weights, key/value cache %s\n"
           "  context   %u tokens (trained for %u)\n"
           "  template  %s\n"
           "  chat      %zu messages\n",
           buf_str(&name), i->arch, params, i->n_layers, i->n_embd, i->describe, weights, kv,
           i->n_ctx, i->n_ctx_train,
           c->s->raw ? "none: text is continued as it is" : "the model's own",
           json_array_size(c->s->messages));
    buf_fini(&name);
    return 0;
}

static void print_stats(const struct chat *c)
{
    struct buf line = {0};
    format_stats(&line, &c->last, c->last_read, 0);
    note("%s", buf_str(&line));
    buf_fini(&line);
}

static int slash_stats(struct chat *c, char *arg, struct err *e)
{
    c->stats = !c->stats;
    note("Speeds after every answer: %s.", c->stats ? "on" : "off");
    if (c->answered)
        print_stats(c);
    return 0;
}

static int slash_bye(struct chat *c, char *arg, struct err *e)
{
    c->leave = true;
    return 0;
}

static int slash_help(struct chat *c, char *arg, struct err *e);

static const struct slash slashes[] = {
    {"/help", "", "Show this", slash_help},
    {"/set", "[NAME [VALUE]]", "Show or change a parameter: /set temp 0.2", slash_set},
    {"/system", "[TEXT]", "Show or change the system prompt", slash_system},
    {"/clear", "", "Forget the chat", slash_clear},
    {"/save", "NAME", "Keep the chat under a name", slash_save},
    {"/load", "[NAME]", "Go on with a chat that was kept, or list them", slash_load},
    {"/show", "", "The model and where it runs", slash_show},
    {"/stats", "", "Speeds after every answer, on or off", slash_stats},
    {"/bye", "", "Leave (also Ctrl-D)", slash_bye},
};
_Static_assert(ARRAY_LEN(slashes) <= MAX_SLASHES, "room for their names in struct chat");

/* One row of the help; a long explanation goes on below itself. */
static void put_entry(const char *left, const char *text)
{
    enum { COLUMN = 25 };
    size_t room = (size_t)MAX(term_columns(1) - COLUMN - 1, 20);
    printf("  %-*s ", COLUMN - 3, left);
    for (;;) {
        size_t n = strlen(text), cut = n;
        if (n > room)
            for (cut = room; cut > 0 && text[cut] != ' ';)
                cut--;
        if (!cut)
            cut = n;
        printf("%.*s\n", (int)cut, text);
        if (cut == n)
            return;
        text += cut + 1;
        printf("%*s", COLUMN, "");
    }
}

static int slash_help(struct chat *c, char *arg, struct err *e)
{
    for (size_t i = 0; i < ARRAY_LEN(slashes); i++) {
        char left[48];
        snprintf(left, sizeof left, "%s %s", slashes[i].name, slashes[i].args);
        put_entry(left, slashes[i].help);
    }
    putchar('\n');
    put_entry("\"\"\" ... \"\"\"",
              "Several lines (also /system \"\"\"); or Alt-Enter, or \\ at the end of a line");
    put_entry("a blank before /", "Send a text that looks like a command");
    put_entry("Ctrl-C", "Stop the answer");
    put_entry("Up, Down, Ctrl-R", "What was typed before");
    return 0;
}

static int slash_run(struct chat *c, char *line, struct err *e)
{
    size_t n = strcspn(line, " \t\n");
    char *arg = line + n + strspn(line + n, " \t\n");
    for (size_t k = strlen(arg); k > 0 && isspace((unsigned char)arg[k - 1]); k--)
        arg[k - 1] = 0;
    line[n] = 0;
    const char *nearest = NULL;
    size_t best = SIZE_MAX;
    for (size_t i = 0; i < ARRAY_LEN(slashes); i++) {
        if (!strcmp(line, slashes[i].name))
            return slashes[i].run(c, arg, e);
        suggest(&nearest, &best, line, slashes[i].name);
    }
    if (!strcmp(line, "/?"))
        return slash_help(c, arg, e);
    if (!strcmp(line, "/exit") || !strcmp(line, "/quit"))
        nearest = "/bye";
    if (nearest)
        return err_set(e, ERR_USAGE, "no command %.40s; did you mean %s?", line, nearest);
    return err_set(e, ERR_USAGE,
                   "no command %.40s; /help lists them, and a blank before it sends it as text",
                   line);
}

/* ---- answers ---- */

static void note_full(const struct chat *c)
{
    uint32_t n_ctx = engine_info(c->s->engine)->n_ctx, more = session_more_ctx(c->s, n_ctx);
    char with[80] = "";
    if (more)
        snprintf(with, sizeof with, ", or start again with --ctx %u", more);
    note("The context of %u tokens is full, so the answer was cut: /clear starts over%s.", n_ctx,
         with);
}

static void answer(struct chat *c, const char *text, size_t n, struct err *e)
{
    struct answer a = {0};
    int rc = session_answer(&a, c->s, text, n, e);
    if (a.text.n && a.text.data[a.text.n - 1] != '\n')
        putchar('\n');
    if (!rc) {
        c->last = a.stats;
        c->last_read = a.n_read;
        c->answered = true;
        if (a.interrupted)
            note("(stopped)");
        else if (a.stats.finish == FINISH_CONTEXT)
            note_full(c);
        if (c->stats)
            print_stats(c);
    }
    if (a.interrupted) /* what was typed ahead was meant for an answer that is not there */
        lineedit_flush(c->line);
    putchar('\n');
    fflush(stdout);
    buf_fini(&a.text);
}

/* ---- the loop ---- */

static void greet(const struct chat *c)
{
    const struct engine_info *i = engine_info(c->s->engine);
    const char *ref = model_file_name(c->s->source->file);
    char params[16];
    struct buf name = {0}, rest = {0};
    struct wrap w;
    if (c->s->opts->common.quiet)
        return;
    put_clean(&name, ref, strlen(ref), 60);
    format_count(params, i->n_params);
    buf_puts(&rest, "  ");
    if (i->name[0] && strcmp(i->name, ref)) {
        put_clean(&rest, i->name, strlen(i->name), 60);
        buf_puts(&rest, ", ");
    }
    buf_printf(&rest, "%s parameters, context %u, %s\n/help lists the commands, /bye leaves.\n\n",
               params, i->n_ctx, i->describe);
    wrap_begin(&w, term_columns(1));
    put_words(&w, stdout, STYLE_BOLD, buf_str(&name));
    put_words(&w, stdout, STYLE_DIM, buf_str(&rest));
    buf_fini(&name);
    buf_fini(&rest);
}

/* A chat works without a store: then nothing is kept, and it says so where it matters. */
static int chat_open(struct chat *c, struct err *e)
{
    struct err se = {0};
    char path[4200];
    c->store = c->s->source->store;
    if (!c->store && open_store(&c->store, &c->s->opts->common, &se) == 0)
        c->own_store = true;
    if (se.code)
        log_line(LOG_INFO, "no history: %s", se.msg);
    if (c->store)
        snprintf(path, sizeof path, "%s/history", store_home(c->store));
    struct err he = {0};
    for (size_t i = 0; i < ARRAY_LEN(slashes); i++)
        c->words[i] = slashes[i].name;
    if (lineedit_new(&c->line, c->store ? path : NULL, c->words, &he) == 0)
        return 0;
    log_line(LOG_WARN, "no history: %s", he.msg);
    return lineedit_new(&c->line, NULL, c->words, e);
}

/* "/etc/hosts says" is text; so is everything that begins with a blank. */
static bool is_slash(const char *line)
{
    size_t n = strcspn(line, " \t\n");
    return line[0] == '/' && (isalpha((unsigned char)line[1]) || !strncmp(line, "/?", n)) &&
           n > 1 && !memchr(line + 1, '/', n - 1);
}

static void take_line(struct chat *c, struct buf *line)
{
    struct err e = {0};
    size_t blank = strspn(buf_str(line), " \t\n");
    if (blank == line->n)
        return;
    if (is_slash(line->data))
        slash_run(c, line->data, &e);
    else if (!utf8_valid(line->data, line->n))
        err_set(&e, ERR_USAGE, "that is not valid UTF-8; is the terminal set to it?");
    else if (is_slash(line->data + blank)) /* the blank only says that it is none */
        answer(c, line->data + blank, line->n - blank, &e);
    else
        answer(c, line->data, line->n, &e);
    if (e.code)
        say(STYLE_NONE, e.msg);
}

int chat_run(struct session *s, struct err *e)
{
    struct chat c = {.s = s, .stats = !s->opts->common.quiet};
    struct buf line = {0};
    int rc = chat_open(&c, e);
    if (rc)
        goto out;
    greet(&c);
    while (!c.leave) {
        struct err le = {0};
        enum line_result r = lineedit_read(&line, c.line, ">>> ", "... ", &le);
        if (le.code)
            log_line(LOG_WARN, "%s", le.msg);
        if (r == LINE_EOF)
            break;
        if (r == LINE_INTERRUPT)
            note("/bye or Ctrl-D leaves.");
        else if (r == LINE_OK)
            take_line(&c, &line);
        if (ferror(stdout)) {
            rc = err_errno(e, "cannot write to standard output");
            break;
        }
    }
out:
    lineedit_free(c.line);
    if (c.own_store)
        store_close(c.store);
    buf_fini(&line);
    return rc;
}
