/* cli: the commands. Each is one file with one `struct command`: its words, its option tables, and
 * the function that does it. Parsing, help, suggestions, exit statuses and the one error line on
 * standard error live in cli_main; a command returns an error and never exits. */
#ifndef INGOT_CLI_H
#define INGOT_CLI_H

#include "base/base.h"

/* ---- options: one table serves the parser, the environment, the help and chat's /set ---- */

enum option_kind {
    OPTION_FLAG,   /* bool; no value */
    OPTION_STR,    /* const char * into argv or the environment */
    OPTION_LIST,   /* struct strings; may be given more than once */
    OPTION_I32,    /* int32_t */
    OPTION_U32,    /* uint32_t */
    OPTION_F32,    /* float */
    OPTION_SEED,   /* uint64_t; -1 means 0, a random one */
    OPTION_CHOICE, /* int32_t: the place among the words of `value`, "f16|f32" */
};

struct option {
    const char *name;    /* long name without the dashes; '_' is taken for '-' when looked up */
    const char *aliases; /* further long names, blank-separated, or NULL */
    char letter;         /* short name, or 0 */
    bool setting;        /* may also come from INGOT_<NAME> */
    enum option_kind kind;
    const char *value; /* its placeholder in the help; NULL for flags */
    size_t offset;     /* of the field, from the group's base */
    double min, max;   /* numbers: the range; both 0: any */
    const char *help;  /* one line */
};

struct option_group {
    const char *title;
    const struct option *options; /* ends with a NULL name; at most 64 */
    size_t base;                  /* of the group's struct within the command's */
};

struct strings {
    const char **v; /* owned; the strings are not */
    size_t n, cap;
};

/* ---- commands ---- */

enum { COMMAND_GROUPS = 5 };

struct command_args {
    const struct command *command;
    const void *opts; /* the command's struct, filled */
    char **words;     /* what is not an option, in order; words[n_words] is NULL */
    size_t n_words;
    uint64_t given[COMMAND_GROUPS]; /* bit i: the group's i-th option was given */
    const struct command *const *all;
};

enum { COMMAND_USAGE = 2 }; /* what a command returns (beside 0 and -1) for wrong words: exit 2 */

struct command {
    const char *name, *alias; /* one word, or two: "bench serve"; alias NULL: there is none */
    const char *summary;      /* a few words, for the list of commands */
    const char *usage;        /* what follows the name: "MODEL [PROMPT...]" */
    const char *about;        /* a paragraph for --help */
    const char *examples;     /* indented lines */
    size_t opts_bytes; /* of the struct that the groups fill; starts with struct common_opts */
    struct option_group groups[COMMAND_GROUPS];
    size_t min_words, max_words;
    void (*defaults)(void *opts); /* NULL: all zero */
    int (*run)(const struct command_args *a, struct err *e);
};

extern const struct command command_cache, command_run, command_import, command_export,
    command_list, command_show, command_copy, command_remove, command_verify, command_devices,
    command_bench, command_bench_serve, command_eval, command_tokenize, command_template,
    command_version, command_help;

/* The whole program: returns the exit status. `commands` ends with NULL. */
int cli_main(int argc, char **argv, const struct command *const *commands);

#endif
