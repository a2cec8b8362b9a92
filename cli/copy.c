/* ingot copy: another name for a model; its bytes stay where they are. */
#include "cli/cli_internal.h"

#include <stdio.h>

struct copy_opts {
    struct common_opts common;
};

static int copy_run(const struct command_args *a, struct err *e)
{
    const struct copy_opts *o = a->opts;
    struct store *s = NULL;
    if (open_store(&s, &o->common, e))
        return -1;
    int rc = store_copy(s, a->words[0], a->words[1], e);
    store_close(s);
    if (!rc && !o->common.quiet)
        printf("%s is now also called %s\n", a->words[0], a->words[1]);
    return rc;
}

const struct command command_copy = {
    .name = "copy",
    .alias = "cp",
    .summary = "give a model another name",
    .usage = "NAME NEW-NAME",
    .about = "Give a model a second name. The weights are kept once.",
    .examples = "  ingot copy smollm2 helper\n  ingot cp smollm2 smollm2:backup\n",
    .opts_bytes = sizeof(struct copy_opts),
    .groups = {COMMON_GROUP},
    .min_words = 2,
    .max_words = 2,
    .run = copy_run,
};
