/* ingot devices: what hardware was found, what would be used, and why the rest would not. */
#include "cli/cli_internal.h"

#include <stdio.h>
#include <string.h>

struct devices_opts {
    struct common_opts common;
    const char *backend;
    bool json;
};

#define AT(field) offsetof(struct devices_opts, field)
static const struct option devices_options[] = {
    {"backend", "device", 0, true, OPTION_STR, "NAME", AT(backend), 0, 0,
     "What would be chosen with this one (default: auto)"},
    {"json", NULL, 0, false, OPTION_FLAG, NULL, AT(json), 0, 0, "For programs"},
    {0},
};
#undef AT

enum { MAX_DEVICES = 64 };

static json_t *device_json(const struct backend *b, const struct device_info *d, bool chosen)
{
    return json_pack("{ss ss ss sI sI sb ss sb}", "backend", b->name, "name", d->name, "detail",
                     d->detail, "free_bytes", (json_int_t)d->free_bytes, "total_bytes",
                     (json_int_t)d->total_bytes, "usable", d->usable, "why_not", d->why_not,
                     "chosen", chosen);
}

static void device_print(const struct device_info *d, bool chosen)
{
    char free_mem[16], total[16];
    format_bytes(free_mem, d->free_bytes);
    format_bytes(total, d->total_bytes);
    printf("%s%s %s%s\n", style(1, chosen ? STYLE_BOLD : STYLE_NONE), chosen ? "*" : "-", d->name,
           style(1, STYLE_NONE));
    if (d->detail[0])
        printf("    %s\n", d->detail);
    printf("    memory: %s free of %s\n", free_mem, total);
    if (!d->usable)
        printf("    not usable: %s\n", d->why_not);
}

static int devices_run(const struct command_args *a, struct err *e)
{
    const struct devices_opts *o = a->opts;
    const struct backend *chosen = NULL;
    struct device_info *info = mem_array(MAX_DEVICES, sizeof *info);
    json_t *all = json_array();
    int rc = -1;
    if (!info || !all) {
        err_set(e, ERR_MEMORY, "out of memory");
        goto out;
    }
    /* A choice that fails is still shown after what was found. */
    rc = backend_choose(&chosen, o->backend, e) ? (e->code == ERR_USAGE ? COMMAND_USAGE : -1) : 0;
    if (rc == COMMAND_USAGE)
        goto out;
    for (int b = 0; backends[b]; b++) {
        int n = backends[b]->probe(info, MAX_DEVICES);
        bool first = true;
        for (int i = 0; i < MIN(n, MAX_DEVICES); i++) {
            bool take = backends[b] == chosen && info[i].usable && first;
            first = first && !take;
            if (o->json)
                json_array_append_new(all, device_json(backends[b], &info[i], take));
            else
                device_print(&info[i], take);
        }
        if (!n && !o->json)
            printf("- %s: no device found\n", backends[b]->name);
    }
    if (o->json) {
        if (print_json(
                json_pack("{sO ss?}", "devices", all, "backend", chosen ? chosen->name : NULL), e))
            rc = -1;
    } else if (chosen) {
        printf("\n--backend %s takes the one marked *.\n", o->backend ? o->backend : "auto");
    }
out:
    json_decref(all);
    mem_free(info);
    return rc;
}

const struct command command_devices = {
    .name = "devices",
    .summary = "what hardware was found and what would be used",
    .usage = "[--backend NAME] [--json]",
    .about = "List the devices of every backend, with their memory and instruction sets, and mark\n"
             "the one that would be used.",
    .examples = "  ingot devices\n  ingot devices --json\n  INGOT_ISA=avx2 ingot devices\n",
    .opts_bytes = sizeof(struct devices_opts),
    .groups = {{"Devices", devices_options, 0}, COMMON_GROUP},
    .run = devices_run,
};
