/* ingot list: the models of the store, as a table or as JSON. */
#include "cli/cli_internal.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct list_opts {
    struct common_opts common;
    bool json;
};

static const struct option list_options[] = {
    {"json", NULL, 0, false, OPTION_FLAG, NULL, offsetof(struct list_opts, json), 0, 0,
     "For programs"},
    {0},
};

static bool link_gone(const struct store_model *m)
{
    return m->link_path[0] && access(m->link_path, F_OK);
}

static json_t *list_json(const struct store_model *m, size_t n)
{
    json_t *all = json_array();
    for (size_t i = 0; i < n; i++, m++) {
        /* A path may be any bytes. */
        json_t *one =
            json_pack("{ss ss ss ss sI sI sI sI sI so}", "name", m->name, "digest", m->digest,
                      "arch", m->arch, "quant", m->quant, "bytes", (json_int_t)m->n_bytes, "params",
                      (json_int_t)m->n_params, "ctx", (json_int_t)m->n_ctx, "added",
                      (json_int_t)m->added, "shards", (json_int_t)m->n_shards, "link",
                      json_text(m->link_path, strlen(m->link_path)));
        if (one && m->link_path[0])
            json_object_set_new(one, "link_gone", json_boolean(link_gone(m)));
        if (json_array_append_new(all, one)) {
            json_decref(all);
            return NULL;
        }
    }
    return all;
}

static void list_table(const struct store_model *m, size_t n)
{
    int name = 4, quant = 5;
    for (size_t i = 0; i < n; i++) {
        name = MAX(name, (int)strlen(m[i].name));
        quant = MAX(quant, (int)strlen(m[i].quant));
    }
    printf("%s%-*s  %8s  %-*s  %7s  %s%s\n", style(1, STYLE_BOLD), name, "NAME", "SIZE", quant,
           "QUANT", "PARAMS", "ADDED", style(1, STYLE_NONE));
    for (size_t i = 0; i < n; i++) {
        char bytes[16], params[16], age[24];
        format_bytes(bytes, m[i].n_bytes);
        format_count(params, m[i].n_params);
        format_age(age, m[i].added);
        printf("%-*s  %8s  %-*s  %7s  %s%s\n", name, m[i].name, bytes, quant, m[i].quant, params,
               age,
               link_gone(&m[i])    ? " (linked, but the file is gone)"
               : m[i].link_path[0] ? " (linked)"
                                   : "");
    }
}

static int list_run(const struct command_args *a, struct err *e)
{
    const struct list_opts *o = a->opts;
    struct store *s = NULL;
    struct store_model *m = NULL;
    size_t n = 0;
    int rc = -1;
    if (open_store(&s, &o->common, e) || store_list(s, &m, &n, e))
        goto out;
    rc = 0;
    if (o->json)
        rc = print_json(list_json(m, n), e);
    else if (n)
        list_table(m, n);
    else if (!o->common.quiet)
        fprintf(stderr,
                "No models yet. Bring one in: %s import model.gguf (or use a file as it is: %s run "
                "./model.gguf)\n",
                program_name(), program_name());
out:
    mem_free(m);
    store_close(s);
    return rc;
}

const struct command command_list = {
    .name = "list",
    .alias = "ls",
    .summary = "the models in the store",
    .usage = "[--json]",
    .about = "List the models in the store, by name.",
    .examples = "  ingot list\n  ingot ls --json\n",
    .opts_bytes = sizeof(struct list_opts),
    .groups = {{"List", list_options, 0}, COMMON_GROUP},
    .run = list_run,
};
