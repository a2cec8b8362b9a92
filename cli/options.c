/* Options: one parser for every command, driven by the tables. Long options `--name value` and
 * `--name=value`, short ones `-n 5` and `-n5`; `--` ends them. Settings that were not given come
 * from INGOT_<NAME>. Refuses what it does not know, with the nearest known name. Owns the word
 * list and the lists of OPTION_LIST; every string stays in argv or the environment. */
#include "cli/cli_internal.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

int usage_error(struct err *e, const char *fmt, ...)
{
    char msg[sizeof e->msg];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    err_set(e, ERR_USAGE, "%s", msg);
    return COMMAND_USAGE;
}

/* ---- values ---- */

static int strings_add(struct strings *s, const char *v)
{
    if (s->n == s->cap) {
        size_t cap = s->cap ? 2 * s->cap : 8;
        const char **p = mem_realloc((void *)s->v, cap * sizeof *p);
        if (!p)
            return -1;
        s->v = p;
        s->cap = cap;
    }
    s->v[s->n++] = v;
    return 0;
}

static int parse_bool(bool *out, const char *text)
{
    static const char *const yes[] = {"1", "on", "true", "yes"}, *const no[] = {"0", "off", "false",
                                                                                "no"};
    for (size_t i = 0; i < ARRAY_LEN(yes); i++) {
        if (!strcasecmp(text, yes[i]) || !strcasecmp(text, no[i])) {
            *out = !strcasecmp(text, yes[i]);
            return 0;
        }
    }
    return -1;
}

/* The place of text among "a|b|c", or -1. */
static int32_t choice_index(const char *words, const char *text)
{
    size_t n = strlen(text);
    for (int32_t i = 0;; i++) {
        const char *end = strchrnul(words, '|');
        if ((size_t)(end - words) == n && !strncasecmp(words, text, n))
            return i;
        if (!*end)
            return -1;
        words = end + 1;
    }
}

static int assign_number(const struct option *o, void *field, const char *text, const char *spelled,
                         struct err *e)
{
    char *end;
    errno = 0;
    if (o->kind == OPTION_SEED) {
        uint64_t v = strtoull(text, &end, 10);
        bool negative = strchr(text, '-');
        if (end == text || *end || errno || (negative && strcmp(text, "-1")))
            return usage_error(e, "%s: '%s' is not a seed; use a whole number (0 or -1: random)",
                               spelled, text);
        *(uint64_t *)field = negative ? 0 : v;
        return 0;
    }
    double v = strtod(text, &end);
    if (end == text || *end || !isfinite(v))
        return usage_error(e, "%s: '%s' is not a number", spelled, text);
    if (o->kind != OPTION_F32 && v != floor(v))
        return usage_error(e, "%s: '%s' is not a whole number", spelled, text);
    double lo = o->min, hi = o->max;
    if (lo == 0 && hi == 0) {
        lo = o->kind == OPTION_I32 ? INT32_MIN : o->kind == OPTION_U32 ? 0 : -1e30;
        hi = o->kind == OPTION_I32 ? INT32_MAX : o->kind == OPTION_U32 ? UINT32_MAX : 1e30;
    }
    if (v < lo || v > hi)
        return usage_error(e, "%s: %s is out of range (%.10g to %.10g)", spelled, text, lo, hi);
    if (o->kind == OPTION_F32)
        *(float *)field = (float)v;
    else if (o->kind == OPTION_I32)
        *(int32_t *)field = (int32_t)v;
    else
        *(uint32_t *)field = (uint32_t)v;
    return 0;
}

int option_assign(const struct option *o, void *base, const char *text, const char *spelled,
                  struct err *e)
{
    void *field = (char *)base + o->offset;
    switch (o->kind) {
    case OPTION_FLAG:
        if (parse_bool(field, text))
            return usage_error(e, "%s: '%s' is neither on nor off", spelled, text);
        return 0;
    case OPTION_STR:
        *(const char **)field = text;
        return 0;
    case OPTION_LIST:
        if (strings_add(field, text))
            return err_set(e, ERR_MEMORY, "%s: out of memory", spelled);
        return 0;
    case OPTION_CHOICE: {
        int32_t i = choice_index(o->value, text);
        if (i < 0)
            return usage_error(e, "%s: '%s' is not one of %s", spelled, text, o->value);
        *(int32_t *)field = i;
        return 0;
    }
    default:
        return assign_number(o, field, text, spelled, e);
    }
}

void option_format(struct buf *out, const struct option *o, const void *base)
{
    const void *field = (const char *)base + o->offset;
    const struct strings *list = field;
    const char *word = o->value;
    switch (o->kind) {
    case OPTION_FLAG:
        buf_puts(out, *(const bool *)field ? "on" : "off");
        break;
    case OPTION_STR:
        buf_puts(out, *(const char *const *)field ? *(const char *const *)field : "");
        break;
    case OPTION_LIST:
        for (size_t i = 0; i < list->n; i++) {
            buf_puts(out, i ? ", \"" : "\"");
            put_clean(out, list->v[i], strlen(list->v[i]), 40);
            buf_putc(out, '"');
        }
        break;
    case OPTION_CHOICE:
        for (int32_t i = *(const int32_t *)field; i > 0; i--)
            word = strchr(word, '|') + 1;
        buf_put(out, word, strcspn(word, "|"));
        break;
    case OPTION_I32:
        buf_printf(out, "%d", *(const int32_t *)field);
        break;
    case OPTION_U32:
        buf_printf(out, "%u", *(const uint32_t *)field);
        break;
    case OPTION_F32:
        buf_printf(out, "%g", (double)*(const float *)field);
        break;
    case OPTION_SEED:
        buf_printf(out, "%llu", (unsigned long long)*(const uint64_t *)field);
        break;
    }
}

static size_t field_bytes(enum option_kind kind)
{
    static const size_t sizes[] = {
        [OPTION_FLAG] = sizeof(bool),
        [OPTION_STR] = sizeof(char *),
        [OPTION_LIST] = sizeof(struct strings),
        [OPTION_I32] = 4,
        [OPTION_U32] = 4,
        [OPTION_F32] = sizeof(float),
        [OPTION_SEED] = 8,
        [OPTION_CHOICE] = 4,
    };
    return sizes[kind];
}

void options_copy(void *to, const void *from, const struct option *table, uint64_t given)
{
    for (size_t i = 0; table[i].name; i++)
        if (given >> i & 1)
            memcpy((char *)to + table[i].offset, (const char *)from + table[i].offset,
                   field_bytes(table[i].kind));
}

int parse_ids(struct ids *out, const char *text, const char *what, struct err *e)
{
    const char *p = text;
    for (;;) {
        p += strspn(p, ", \t\r\n");
        if (!*p)
            break;
        char *end;
        errno = 0;
        long v = strtol(p, &end, 10);
        if (end == p || errno || v < 0 || v > INT32_MAX || !(*end == 0 || strchr(", \t\r\n", *end)))
            return usage_error(e, "%s: '%.20s' is not a token id; write 1,2,3", what, p);
        ids_put(out, (int32_t)v);
        p = end;
    }
    if (out->failed)
        return err_set(e, ERR_MEMORY, "%s: out of memory for the token ids", what);
    if (!out->n)
        return usage_error(e, "%s: no token ids; write 1,2,3", what);
    return 0;
}

/* ---- names ---- */

static bool name_equal(const char *a, const char *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (a[i] != (b[i] == '_' ? '-' : b[i]))
            return false;
    return true;
}

static bool option_is(const struct option *o, const char *name, size_t n)
{
    if (strlen(o->name) == n && name_equal(o->name, name, n))
        return true;
    for (const char *a = o->aliases; a && *a;) {
        size_t len = strcspn(a, " ");
        if (len == n && name_equal(a, name, n))
            return true;
        a += len + (a[len] == ' ');
    }
    return n == 1 && o->letter == *name;
}

const struct option *option_find(const struct option *table, const char *name, size_t n)
{
    for (const struct option *o = table; o->name; o++)
        if (option_is(o, name, n))
            return o;
    return NULL;
}

enum { SUGGEST_MAX = 40 };

/* Damerau-Levenshtein distance, restricted form (optimal string alignment). */
static size_t edit_distance(const char *a, const char *b)
{
    size_t na = strlen(a), nb = strlen(b);
    if (na > SUGGEST_MAX || nb > SUGGEST_MAX)
        return SIZE_MAX;
    size_t d[SUGGEST_MAX + 1][SUGGEST_MAX + 1];
    for (size_t i = 0; i <= na; i++)
        d[i][0] = i;
    for (size_t j = 0; j <= nb; j++)
        d[0][j] = j;
    for (size_t i = 1; i <= na; i++) {
        for (size_t j = 1; j <= nb; j++) {
            size_t best = d[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
            best = MIN(best, MIN(d[i - 1][j], d[i][j - 1]) + 1);
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                best = MIN(best, d[i - 2][j - 2] + 1);
            d[i][j] = best;
        }
    }
    return d[na][nb];
}

void suggest(const char **nearest, size_t *best, const char *word, const char *candidate)
{
    size_t d = edit_distance(word, candidate), n = strlen(word);
    if (n >= 3 && !strncmp(word, candidate, n))
        d = 1;
    if (d < *best && d <= 1 + n / 4 && d < n) {
        *best = d;
        *nearest = candidate;
    }
}

/* By the name or an alias; the name is what is suggested. */
static void suggest_option(const char **nearest, size_t *best, const char *word,
                           const struct option *o)
{
    const char *found = NULL;
    suggest(&found, best, word, o->name);
    for (const char *a = o->aliases; a && *a;) {
        char alias[SUGGEST_MAX + 1];
        size_t n = strcspn(a, " ");
        snprintf(alias, sizeof alias, "%.*s", (int)n, a);
        suggest(&found, best, word, alias);
        a += n + (a[n] == ' ');
    }
    if (found)
        *nearest = o->name;
}

static int unknown_option(const struct command *c, const char *spelled, struct err *e)
{
    const char *nearest = NULL, *name = spelled + strspn(spelled, "-");
    char word[SUGGEST_MAX + 1];
    snprintf(word, sizeof word, "%.*s", (int)strcspn(name, "="), name);
    size_t best = SIZE_MAX;
    for (size_t g = 0; g < COMMAND_GROUPS; g++)
        for (const struct option *o = c->groups[g].options; o && o->name; o++)
            suggest_option(&nearest, &best, word, o);
    int n = (int)strcspn(spelled, "=");
    if (nearest)
        return usage_error(e, "%s: unknown option '%.*s'; did you mean --%s?", c->name, n, spelled,
                           nearest);
    return usage_error(e, "%s: unknown option '%.*s'; `ingot %s --help` lists them%s", c->name, n,
                       spelled, c->name,
                       c->max_words > 1 ? ", and -- goes before text that starts with -" : "");
}

/* ---- parsing ---- */

struct parse {
    struct command_args *a;
    char *opts;
    int argc, at;
    char **argv;
};

static const struct option *find_in_groups(size_t *group, const struct command *c, const char *name,
                                           size_t n)
{
    for (size_t g = 0; g < COMMAND_GROUPS; g++) {
        const struct option *o =
            c->groups[g].options ? option_find(c->groups[g].options, name, n) : NULL;
        if (o) {
            *group = g;
            return o;
        }
    }
    return NULL;
}

/* One option at p->at; moves past it and its value. */
static int parse_option(struct parse *p, struct err *e)
{
    const struct command *c = p->a->command;
    char *word = p->argv[p->at++], *name = word + 1, *value = NULL;
    size_t n = 1, g = 0;
    if (*name == '-') {
        name++;
        n = strcspn(name, "=");
        value = name[n] ? name + n + 1 : NULL;
        /* One letter after two dashes is no short option. */
        if (n < 2)
            return unknown_option(c, word, e);
    } else if (name[1]) {
        value = name + 1 + (name[1] == '=');
    }
    const struct option *o = find_in_groups(&g, c, name, n);
    if (!o)
        return unknown_option(c, word, e);
    char spelled[64];
    snprintf(spelled, sizeof spelled, "%.*s", (int)(name - word + (ptrdiff_t)n), word);
    if (o->kind == OPTION_FLAG && !value) {
        value = "on";
    } else if (!value) {
        if (p->at == p->argc)
            return usage_error(e, "%s: %s needs a value: %s %s", c->name, spelled, spelled,
                               o->value);
        value = p->argv[p->at++];
    }
    p->a->given[g] |= UINT64_C(1) << (o - c->groups[g].options);
    return option_assign(o, p->opts + c->groups[g].base, value, spelled, e);
}

static int parse_environment(struct parse *p, struct err *e)
{
    const struct command *c = p->a->command;
    for (size_t g = 0; g < COMMAND_GROUPS; g++) {
        for (const struct option *o = c->groups[g].options; o && o->name; o++) {
            uint64_t bit = UINT64_C(1) << (o - c->groups[g].options);
            if (!o->setting || (p->a->given[g] & bit))
                continue;
            char name[64] = "INGOT_";
            for (size_t i = 0; o->name[i] && i < sizeof name - 8; i++)
                name[6 + i] = o->name[i] == '-' ? '_' : (char)toupper((unsigned char)o->name[i]);
            const char *value = getenv(name);
            if (!value || !*value)
                continue;
            p->a->given[g] |= bit;
            int rc = option_assign(o, p->opts + c->groups[g].base, value, name, e);
            if (rc)
                return rc;
        }
    }
    return 0;
}

static int check_words(const struct command_args *a, struct err *e)
{
    const struct command *c = a->command;
    bool named = !strncmp(c->usage, "MODEL", 5) || !strncmp(c->usage, "NAME", 4);
    if (a->n_words < c->min_words)
        return usage_error(e, "%s: %s missing; usage: ingot %s %s%s", c->name,
                           c->min_words == 1 ? "an argument is" : "arguments are", c->name,
                           c->usage, named ? " (`ingot list` shows the names)" : "");
    if (a->n_words > c->max_words)
        return usage_error(e, "%s: unexpected '%.100s'; usage: ingot %s %s", c->name,
                           a->words[c->max_words], c->name, c->usage);
    return 0;
}

int options_parse(struct command_args *a, void *opts, const struct command *c, int argc,
                  char **argv, struct err *e)
{
    struct parse p = {a, opts, argc, 0, argv};
    a->command = c;
    a->opts = opts;
    a->words = mem_array((size_t)argc + 1, sizeof *a->words);
    if (!a->words)
        return err_set(e, ERR_MEMORY, "out of memory");
    bool only_words = false;
    while (p.at < argc) {
        char *w = argv[p.at];
        if (only_words || w[0] != '-' || !w[1]) {
            a->words[a->n_words++] = w;
            p.at++;
        } else if (!strcmp(w, "--")) {
            only_words = true;
            p.at++;
        } else {
            int rc = parse_option(&p, e);
            if (rc)
                return rc;
        }
    }
    const struct common_opts *common = opts;
    if (common->help)
        return 0;
    int rc = parse_environment(&p, e);
    return rc ? rc : check_words(a, e);
}

void options_free(struct command_args *a, void *opts)
{
    const struct command *c = a->command;
    for (size_t g = 0; c && opts && g < COMMAND_GROUPS; g++)
        for (const struct option *o = c->groups[g].options; o && o->name; o++)
            if (o->kind == OPTION_LIST) {
                struct strings *s = (void *)((char *)opts + c->groups[g].base + o->offset);
                mem_free((void *)s->v);
            }
    mem_free(a->words);
}

uint64_t options_given(const struct command_args *a, const struct option *table)
{
    for (size_t g = 0; g < COMMAND_GROUPS; g++)
        if (a->command->groups[g].options == table)
            return a->given[g];
    return 0;
}
