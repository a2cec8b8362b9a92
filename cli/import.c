/* ingot import: bring a GGUF file into the store, by copy or by reference. */
#include "cli/cli_internal.h"

#include <stdio.h>
#include <unistd.h>

struct import_opts {
    struct common_opts common;
    const char *name, *sha256;
    bool link, replace;
};

#define AT(field) offsetof(struct import_opts, field)
static const struct option import_options[] = {
    {"name", NULL, 0, false, OPTION_STR, "NAME", AT(name), 0, 0,
     "Name in the store (default: the model's own)"},
    {"link", NULL, 0, false, OPTION_FLAG, NULL, AT(link), 0, 0,
     "Register the file where it is, without a copy"},
    {"replace", "force", 0, false, OPTION_FLAG, NULL, AT(replace), 0, 0,
     "Let an existing name point at this model"},
    {"sha256", NULL, 0, false, OPTION_STR, "HEX", AT(sha256), 0, 0,
     "Refuse a file with another SHA-256 digest"},
    {0},
};
#undef AT

static int import_run(const struct command_args *a, struct err *e)
{
    const struct import_opts *o = a->opts;
    struct store *s = NULL;
    struct store_model m;
    if (open_store(&s, &o->common, e))
        return -1;
    struct progress p;
    progress_begin(&p, o->link ? "checking" : "importing", 0, o->common.quiet);
    struct store_import in = {
        .path = a->words[0],
        .name = o->name,
        .link = o->link,
        .replace = o->replace,
        .expect_sha256 = o->sha256,
        .progress = progress_tick,
        .user = &p,
    };
    int rc = store_import(s, &m, &in, e);
    progress_end(&p, rc ? NULL : o->link ? "checked" : "imported");
    store_close(s);
    if (rc && e->code == ERR_CANCELLED) {
        *e = (struct err){0};
        return err_set(e, ERR_CANCELLED, "import of %s stopped; the same command goes on from here",
                       a->words[0]);
    }
    if (rc)
        return rc;
    char bytes[16], params[16];
    format_bytes(bytes, m.n_bytes);
    format_count(params, m.n_params);
    if (o->common.quiet)
        printf("%s\n", m.name);
    else
        printf("%s: %s, %s, %s parameters, %s%s\n", m.name, m.arch, m.quant, params, bytes,
               m.link_path[0] ? ", linked" : "");
    if (isatty(1) && !o->common.quiet)
        fprintf(stderr, "%sTry it: %s run %s%s\n", style(2, STYLE_DIM), program_name(), m.name,
                style(2, STYLE_NONE));
    return 0;
}

const struct command command_import = {
    .name = "import",
    .summary = "bring a GGUF file into the store",
    .usage = "FILE.gguf [--name NAME] [--link]",
    .about = "Copy a GGUF file into the store, checked while it is read. An import that was\n"
             "interrupted goes on where it stopped. Of a set of shards, name the first.",
    .examples = "  ingot import model.gguf\n"
                "  ingot import big-00001-of-00003.gguf --name big\n"
                "  ingot import /data/model.gguf --link     use the file where it is\n",
    .opts_bytes = sizeof(struct import_opts),
    .groups = {{"Import", import_options, 0}, COMMON_GROUP},
    .min_words = 1,
    .max_words = 1,
    .run = import_run,
};
