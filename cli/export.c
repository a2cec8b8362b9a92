/* ingot export: give a model's GGUF back, byte for byte. */
#include "cli/cli_internal.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

struct export_opts {
    struct common_opts common;
    bool replace;
};

static const struct option export_options[] = {
    {"replace", "force", 0, false, OPTION_FLAG, NULL, offsetof(struct export_opts, replace), 0, 0,
     "Overwrite a file that is there"},
    {0},
};

/* Where the file goes: into a directory, under the model's name there. */
static int target_path(struct buf *out, struct store *s, const char *name, const char *to,
                       struct err *e)
{
    struct stat st;
    struct store_model m;
    buf_puts(out, to);
    if (stat(to, &st) == 0 && S_ISDIR(st.st_mode)) {
        if (store_find(s, &m, name, e))
            return -1;
        const char *slash = strrchr(m.name, '/');
        buf_puts(out, to[strlen(to) - 1] == '/' ? "" : "/");
        for (const char *p = slash ? slash + 1 : m.name; *p; p++)
            buf_putc(out, *p == ':' ? '-' : *p);
        buf_puts(out, ".gguf");
    }
    return out->failed ? err_set(e, ERR_MEMORY, "out of memory") : 0;
}

static int export_run(const struct command_args *a, struct err *e)
{
    const struct export_opts *o = a->opts;
    struct store *s = NULL;
    struct buf path = {0};
    struct progress p;
    int rc = -1;
    if (!strcmp(a->words[1], "-") || !*a->words[1])
        return usage_error(e, "export: '%s' is no place for a model; give a file name",
                           a->words[1]);
    if (open_store(&s, &o->common, e) || target_path(&path, s, a->words[0], a->words[1], e))
        goto out;
    progress_begin(&p, "exporting", 0, o->common.quiet);
    rc = store_export(s, a->words[0], buf_str(&path), o->replace, progress_tick, &p, e);
    progress_end(&p, rc ? NULL : "exported");
    if (!rc && !o->common.quiet)
        printf("%s: written to %s, every checksum right\n", a->words[0], buf_str(&path));
out:
    store_close(s);
    buf_fini(&path);
    return rc;
}

const struct command command_export = {
    .name = "export",
    .summary = "write a model's GGUF file back",
    .usage = "NAME FILE.gguf|DIRECTORY",
    .about =
        "Write the file that was imported, byte for byte, with every checksum verified; into a\n"
        "directory as NAME.gguf.",
    .examples = "  ingot export smollm2 /tmp/smollm2.gguf\n"
                "  ingot export smollm2 model.gguf --replace\n",
    .opts_bytes = sizeof(struct export_opts),
    .groups = {{"Export", export_options, 0}, COMMON_GROUP},
    .min_words = 2,
    .max_words = 2,
    .run = export_run,
};
