/* ingot cache: what the persistent prefix cache holds, and its upkeep. One action a row. */
#include "cli/cli_internal.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct cache_opts {
    struct common_opts common;
    bool json;
};

static const struct option cache_options[] = {
    {"json", NULL, 0, false, OPTION_FLAG, NULL, offsetof(struct cache_opts, json), 0, 0,
     "For programs (show)"},
    {0},
};

struct cache { /* what an action works on */
    const struct cache_opts *o;
    struct store *store;
    struct prefix_store *prefix;
    const char *word; /* the action's argument, or NULL */
};

/* ---- models: the cache knows them by the start of their digest ---- */

static uint64_t digest_tag(const char *digest)
{
    uint8_t b[8];
    uint64_t tag = 0;
    if (strlen(digest) < 16 || hex_decode(b, sizeof b, digest, 16) != 8)
        return 0;
    memcpy(&tag, b, sizeof tag);
    return tag;
}

/* The names that point at the weights, joined; "" when the store has none (a plain file's). */
static void names_of(struct buf *out, const struct store_model *m, size_t n, uint64_t tag)
{
    for (size_t i = 0; i < n; i++)
        if (digest_tag(m[i].digest) == tag)
            buf_printf(out, "%s%s", out->n ? ", " : "", m[i].name);
}

static json_t *show_json(const struct prefix_stats *s, const struct prefix_model *p, size_t n,
                         const struct store_model *m, size_t n_models)
{
    json_t *all = json_array();
    for (size_t i = 0; i < n; i++) {
        struct buf names = {0};
        names_of(&names, m, n_models, p[i].model_tag);
        json_array_append_new(
            all, json_pack("{so sI sI sI sI sI sI}", "names", json_text(buf_str(&names), names.n),
                           "pages", (json_int_t)p[i].pages, "tokens", (json_int_t)p[i].tokens,
                           "kv_bytes", (json_int_t)p[i].kv_bytes, "stored_bytes",
                           (json_int_t)p[i].stored_bytes, "hits", (json_int_t)p[i].hits,
                           "last_used", (json_int_t)p[i].last_used));
        buf_fini(&names);
    }
    return json_pack("{sI sI sI so}", "pages", (json_int_t)s->pages, "bytes", (json_int_t)s->bytes,
                     "max_bytes", (json_int_t)s->max_bytes, "models", all);
}

static void show_table(const struct prefix_stats *s, const struct prefix_model *p, size_t n,
                       const struct store_model *m, size_t n_models)
{
    char bytes[16], max[16], tokens[16], age[24];
    format_bytes(bytes, s->bytes);
    format_bytes(max, s->max_bytes);
    printf("%llu pages, %s of at most %s\n", (unsigned long long)s->pages, bytes, max);
    if (n)
        printf("%s%8s  %8s  %8s  %-16s  %s%s\n", style(1, STYLE_BOLD), "TOKENS", "SIZE", "HITS",
               "LAST USED", "MODEL", style(1, STYLE_NONE));
    for (size_t i = 0; i < n; i++) {
        struct buf names = {0};
        names_of(&names, m, n_models, p[i].model_tag);
        format_count(tokens, p[i].tokens);
        format_bytes(bytes, p[i].stored_bytes);
        format_age(age, p[i].last_used);
        printf("%8s  %8s  %8llu  %-16s  %s\n", tokens, bytes, (unsigned long long)p[i].hits, age,
               names.n ? buf_str(&names) : "(a file outside the store)");
        buf_fini(&names);
    }
}

static int cache_show(struct cache *c, struct err *e)
{
    struct prefix_stats s;
    struct prefix_model *p = NULL;
    struct store_model *m = NULL;
    size_t n = 0, n_models = 0;
    int rc = prefix_models(c->prefix, &p, &n, e);
    if (!rc)
        rc = store_list(c->store, &m, &n_models, e);
    prefix_stats(c->prefix, &s);
    if (!rc && c->o->json)
        rc = print_json(show_json(&s, p, n, m, n_models), e);
    else if (!rc)
        show_table(&s, p, n, m, n_models);
    mem_free(p);
    mem_free(m);
    return rc;
}

/* "500M", "2G", "1048576": bytes, with K, M, G, T for powers of 1000. */
static int parse_size(uint64_t *out, const char *text, struct err *e)
{
    static const char units[] = "KMGT";
    char *end;
    errno = 0;
    double v = strtod(text, &end);
    const char *unit = isalpha((unsigned char)*end) ? strchr(units, *end & ~32) : NULL;
    for (ptrdiff_t i = 0; unit && i <= unit - units; i++)
        v *= 1000;
    end += unit != NULL;
    end += unit && (*end == 'B' || *end == 'b');
    if (end == text || *end || errno || !(v >= 0) || v > 1e18) {
        err_set(e, ERR_USAGE, "'%.60s' is no size; write 500M or 2G", text);
        return COMMAND_USAGE;
    }
    *out = (uint64_t)v;
    return 0;
}

/* What went and what is left, when it has come off. */
static int say_removed(struct cache *c, int rc, const struct prefix_stats *before)
{
    struct prefix_stats now;
    char went[16], left[16];
    if (rc || c->o->common.quiet)
        return rc;
    prefix_stats(c->prefix, &now);
    format_bytes(went, before->bytes - MIN(before->bytes, now.bytes));
    format_bytes(left, now.bytes);
    printf("%" PRIu64 " pages removed (%s); %" PRIu64 " left (%s)\n",
           before->pages - MIN(before->pages, now.pages), went, now.pages, left);
    return 0;
}

static int cache_trim(struct cache *c, struct err *e)
{
    uint64_t bytes;
    struct prefix_stats before;
    int rc = parse_size(&bytes, c->word, e);
    if (rc)
        return rc;
    prefix_stats(c->prefix, &before);
    return say_removed(c, prefix_trim(c->prefix, bytes, e), &before);
}

static int cache_clear(struct cache *c, struct err *e)
{
    struct store_model m;
    struct prefix_stats before;
    uint64_t tag;
    if (c->word && store_find(c->store, &m, c->word, e))
        return -1;
    prefix_stats(c->prefix, &before);
    if (c->word)
        tag = digest_tag(m.digest);
    return say_removed(c, prefix_clear(c->prefix, c->word ? &tag : NULL, e), &before);
}

static int cache_move(struct cache *c, bool in, struct err *e)
{
    struct prefix_moved moved = {0};
    struct progress p;
    progress_begin(&p, in ? "importing" : "exporting", 0.3, c->o->common.quiet);
    p.unit = "pages";
    int rc = in ? prefix_import(c->prefix, &moved, c->word, progress_tick, &p, e)
                : prefix_export(c->prefix, &moved, c->word, progress_tick, &p, e);
    progress_end(&p, NULL);
    if (rc || c->o->common.quiet)
        return rc;
    printf("%llu pages %s", (unsigned long long)moved.pages, in ? "taken in" : "written");
    if (moved.known)
        printf(", %llu were there already", (unsigned long long)moved.known);
    if (moved.outvalued)
        printf(", %llu found no room", (unsigned long long)moved.outvalued);
    if (moved.corrupt)
        printf(", %llu damaged ones left out", (unsigned long long)moved.corrupt);
    printf("\n");
    return 0;
}

static int cache_export(struct cache *c, struct err *e)
{
    return cache_move(c, false, e);
}

static int cache_import(struct cache *c, struct err *e)
{
    return cache_move(c, true, e);
}

static const struct action {
    const char *name;
    int least, most; /* words after it */
    const char *wants;
    int (*run)(struct cache *c, struct err *e);
} actions[] = {
    {"show", 0, 0, "nothing more", cache_show},
    {"trim", 1, 1, "a size, such as 500M", cache_trim},
    {"clear", 0, 1, "a model's name or nothing", cache_clear},
    {"export", 1, 1, "a file to write", cache_export},
    {"import", 1, 1, "a file to read", cache_import},
};

static int cache_run(const struct command_args *a, struct err *e)
{
    const char *name = a->n_words ? a->words[0] : "show";
    const struct action *act = NULL;
    for (size_t i = 0; i < ARRAY_LEN(actions); i++)
        if (!strcmp(actions[i].name, name))
            act = &actions[i];
    int words = a->n_words ? (int)a->n_words - 1 : 0;
    struct cache c = {.o = a->opts, .word = words ? a->words[1] : NULL};
    if (!act)
        err_set(e, ERR_USAGE, "'%.60s' is no action; use show, trim, clear, export or import",
                name);
    else if (words < act->least || words > act->most)
        err_set(e, ERR_USAGE, "cache %s wants %s", name, act->wants);
    else if (c.o->json && act->run != cache_show)
        err_set(e, ERR_USAGE, "--json goes with show only");
    if (e->code)
        return COMMAND_USAGE;
    int rc = open_store(&c.store, &c.o->common, e);
    if (!rc)
        rc = prefix_open(&c.prefix, store_home(c.store), NULL, e);
    if (!rc)
        rc = act->run(&c, e);
    prefix_close(c.prefix);
    store_close(c.store);
    return rc;
}

const struct command command_cache = {
    .name = "cache",
    .summary = "the prefix cache on disk: show, trim, clear, move",
    .usage = "[show | trim SIZE | clear [MODEL] | export FILE | import FILE]",
    .about = "Prompts that were computed once are kept in prefix.db in the store's directory and\n"
             "found again by later runs. `export` writes the cache to one file that another\n"
             "machine with the same model can `import`; trust such a file as you trust a model.",
    .examples = "  ingot cache\n  ingot cache trim 2G\n  ingot cache clear smollm2\n"
                "  ingot cache export warm.db\n",
    .opts_bytes = sizeof(struct cache_opts),
    .groups = {{"Cache", cache_options, 0}, COMMON_GROUP},
    .max_words = 2,
    .run = cache_run,
};
