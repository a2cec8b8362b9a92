/* ingot remove: drop names from the store; the bytes go with the last name. */
#include "cli/cli_internal.h"

#include <stdio.h>

struct remove_opts {
    struct common_opts common;
};

static int remove_run(const struct command_args *a, struct err *e)
{
    const struct remove_opts *o = a->opts;
    struct store *s = NULL;
    if (open_store(&s, &o->common, e))
        return -1;
    int rc = 0;
    for (size_t i = 0; i < a->n_words && !rc; i++) {
        rc = store_remove(s, a->words[i], e);
        if (!rc && !o->common.quiet)
            printf("removed %s\n", a->words[i]);
    }
    store_close(s);
    return rc;
}

const struct command command_remove = {
    .name = "remove",
    .alias = "rm",
    .summary = "remove models from the store",
    .usage = "NAME...",
    .about = "Remove names from the store. A model's bytes go with its last name; a linked file\n"
             "stays where it is.",
    .examples = "  ingot remove smollm2\n  ingot rm old-1 old-2\n",
    .opts_bytes = sizeof(struct remove_opts),
    .groups = {COMMON_GROUP},
    .min_words = 1,
    .max_words = SIZE_MAX,
    .run = remove_run,
};
