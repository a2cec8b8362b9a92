/* ingot export: give a model's GGUF back, byte for byte. */
#include "cli/cli_internal.h"

#include <stdio.h>

struct export_opts {
    struct common_opts common;
    bool replace;
};

static const struct option export_options[] = {
    {"replace", "force", 0, false, OPTION_FLAG, NULL, offsetof(struct export_opts, replace), 0, 0,
     "Overwrite a file that is there"},
    {0},
};

static int export_run(const struct command_args *a, struct err *e)
{
    const struct export_opts *o = a->opts;
    struct store *s = NULL;
    if (open_store(&s, &o->common, e))
        return -1;
    struct progress p;
    progress_begin(&p, "exporting", 0, o->common.quiet);
    int rc = store_export(s, a->words[0], a->words[1], o->replace, progress_tick, &p, e);
    progress_end(&p, rc ? NULL : "exported");
    store_close(s);
    if (!rc && !o->common.quiet)
        printf("%s: written to %s, every checksum right\n", a->words[0], a->words[1]);
    return rc;
}

const struct command command_export = {
    .name = "export",
    .summary = "write a model's GGUF file back",
    .usage = "NAME FILE.gguf",
    .about = "Write the file that was imported, byte for byte, with every checksum verified.",
    .examples = "  ingot export smollm2 /tmp/smollm2.gguf\n"
                "  ingot export smollm2 model.gguf --replace\n",
    .opts_bytes = sizeof(struct export_opts),
    .groups = {{"Export", export_options, 0}, COMMON_GROUP},
    .min_words = 2,
    .max_words = 2,
    .run = export_run,
};
