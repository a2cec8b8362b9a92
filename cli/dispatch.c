/* From argv to an exit status: finds the command, parses its options, runs it, prints the one line
 * of an error. Also the two commands about ingot itself, version and help. Owns nothing for long.
 */
#include "cli/cli_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_INTERRUPTED = 130 };

static const char *typed_name = "ingot";

const char *program_name(void)
{
    return typed_name;
}

static const struct command *command_find(const struct command *const *all, const char *name)
{
    for (size_t i = 0; all[i]; i++)
        if (!strcmp(all[i]->name, name) || (all[i]->alias && !strcmp(all[i]->alias, name)))
            return all[i];
    return NULL;
}

/* The command of two words ("bench serve") where there is one, else of the first; *n_words is how
 * many its name has. */
static const struct command *command_find_words(size_t *n_words, const struct command *const *all,
                                                const char *first, const char *second)
{
    char two[64];
    *n_words = 2;
    if (second && snprintf(two, sizeof two, "%s %s", first, second) < (int)sizeof two) {
        const struct command *c = command_find(all, two);
        if (c)
            return c;
    }
    *n_words = 1;
    return command_find(all, first);
}

/* Words that people bring from other programs, until there is a command of that name. */
static const struct {
    const char *word, *advice;
} foreign_words[] = {
    {"pull", "comes later; bring a file in with `ingot import FILE.gguf`"},
    {"serve", "comes later; `ingot run MODEL` answers in the terminal"},
    {"ps", "comes with `ingot serve`, later; nothing runs in the background yet"},
    {"stop", "comes with `ingot serve`, later; nothing runs in the background yet"},
    {"quantize", "comes later; `ingot import FILE.gguf` takes files that are quantized already"},
    {"chat", "is `ingot run MODEL`"},
    {"generate", "is `ingot run MODEL PROMPT`"},
    {"delete", "is `ingot remove NAME`"},
    {"inspect", "is `ingot show MODEL`"},
    {"perplexity", "is `ingot eval MODEL --text FILE`"},
};

static int command_unknown(const struct command *const *all, const char *name, struct err *e)
{
    const char *nearest = NULL, *word = name + strspn(name, "-");
    size_t best = SIZE_MAX;
    for (size_t i = 0; i < ARRAY_LEN(foreign_words); i++)
        if (!strcmp(name, foreign_words[i].word))
            return usage_error(e, "`ingot %s` %s", name, foreign_words[i].advice);
    for (size_t i = 0; all[i]; i++) {
        suggest(&nearest, &best, word, all[i]->name);
        if (all[i]->alias)
            suggest(&nearest, &best, word, all[i]->alias);
    }
    if (nearest)
        return usage_error(e, "unknown command '%.100s'; did you mean `ingot %s`?", name, nearest);
    return usage_error(e, "unknown command '%.100s'; `ingot help` lists the commands", name);
}

static int command_start(const struct command *c, const struct command *const *all, int argc,
                         char **argv, struct err *e)
{
    struct command_args a = {.all = all};
    int rc = -1;
    void *opts = mem_zalloc(c->opts_bytes);
    if (!opts) {
        err_set(e, ERR_MEMORY, "out of memory");
        goto out;
    }
    if (c->defaults)
        c->defaults(opts);
    rc = options_parse(&a, opts, c, argc, argv, e);
    if (rc)
        goto out;
    const struct common_opts *common = opts;
    if (common->help) {
        help_command(c);
        goto out;
    }
    if (common->verbose)
        log_threshold = LOG_INFO;
    else if (common->quiet)
        log_threshold = LOG_ERROR;
    rc = c->run(&a, e);
out:
    options_free(&a, opts);
    mem_free(opts);
    return rc;
}

/* Options that every command has may stand before the command: they change places with its name. */
static int move_globals(int argc, char **argv, const struct command *const *all, struct err *e)
{
    int at = 1;
    while (at < argc && argv[at][0] == '-' && argv[at][1]) {
        const char *w = argv[at];
        bool longer = w[1] == '-';
        size_t n = longer ? strcspn(w + 2, "=") : 1;
        const struct option *o =
            longer && n < 2 ? NULL : option_find(common_options, w + 1 + longer, n);
        if (!o || !strcmp(o->name, "help"))
            break;
        bool inside = longer ? w[2 + n] != 0 : w[2] != 0;
        at += o->kind == OPTION_FLAG || inside ? 1 : 2;
    }
    if (at >= argc)
        return usage_error(e, "a command is missing after '%.100s'; `ingot help` lists them",
                           argv[argc - 1]);
    if (at == 1)
        return 0;
    char *name[2] = {argv[at], argv[at + 1]};
    size_t n_words;
    command_find_words(&n_words, all, name[0], name[1]);
    memmove(argv + 1 + n_words, argv + 1, (size_t)(at - 1) * sizeof *argv);
    memcpy(argv + 1, name, n_words * sizeof *argv);
    return 0;
}

static int start(int argc, char **argv, const struct command *const *all, struct err *e)
{
    if (argc < 2) {
        help_overview(all);
        return 0;
    }
    int rc = move_globals(argc, argv, all, e);
    if (rc)
        return rc;
    const char *name = argv[1];
    if (!strcmp(name, "--help") || !strcmp(name, "-h"))
        name = "help";
    else if (!strcmp(name, "--version") || !strcmp(name, "-V"))
        name = "version";
    size_t n_words;
    const struct command *c = command_find_words(&n_words, all, name, argv[2]);
    if (!c)
        return command_unknown(all, name, e);
    return command_start(c, all, argc - 1 - (int)n_words, argv + 1 + n_words, e);
}

/* A closed standard stream would give its number to the next file that is opened. */
static void fill_streams(void)
{
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF && open("/dev/null", O_RDWR) < 0)
            return; /* no /dev: nothing better to do */
}

int cli_main(int argc, char **argv, const struct command *const *commands)
{
    struct err e = {0};
    if (argc > 0 && *argv[0])
        typed_name = argv[0];
    fill_streams();
    signal(SIGXFSZ, SIG_IGN); /* a file that may not grow is an error of writing, with its name */
    json_set_alloc_funcs(mem_alloc, mem_free);
    int rc = start(argc, argv, commands, &e);
    if (rc == 0 && (fflush(stdout) || ferror(stdout)))
        rc = err_errno(&e, "cannot write to standard output");
    if (e.code)
        fprintf(stderr, "ingot: %s\n", e.msg);
    if (e.code == ERR_CANCELLED)
        return EXIT_INTERRUPTED;
    return rc == 0 ? EXIT_DONE : rc == COMMAND_USAGE ? EXIT_USAGE : EXIT_FAILED;
}

struct about_opts {
    struct common_opts common;
};

static int version_run(const struct command_args *a, struct err *e)
{
    printf("ingot %s\n", INGOT_VERSION);
    return 0;
}

const struct command command_version = {
    .name = "version",
    .summary = "print the version",
    .usage = "",
    .about = "Print the version of this file.",
    .examples = "  ingot version\n  ingot --version\n",
    .opts_bytes = sizeof(struct about_opts),
    .groups = {COMMON_GROUP},
    .run = version_run,
};

static int help_run(const struct command_args *a, struct err *e)
{
    if (!a->n_words) {
        help_overview(a->all);
        return 0;
    }
    size_t n_words;
    const struct command *c = command_find_words(&n_words, a->all, a->words[0], a->words[1]);
    if (!c)
        return command_unknown(a->all, a->words[0], e);
    if (n_words < a->n_words)
        return usage_error(e, "help: unexpected '%.100s'; `ingot help` lists the commands",
                           a->words[n_words]);
    help_command(c);
    return 0;
}

const struct command command_help = {
    .name = "help",
    .summary = "explain a command",
    .usage = "[COMMAND]",
    .about = "List the commands, or explain one: usage, options and examples.",
    .examples = "  ingot help\n  ingot help run\n  ingot help bench serve\n",
    .opts_bytes = sizeof(struct about_opts),
    .groups = {COMMON_GROUP},
    .max_words = 2,
    .run = help_run,
};
