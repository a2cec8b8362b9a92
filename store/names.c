/* Names of models: what is allowed, what a model without one is called, which names come near a
 * wrong one; and the file names of a set of shards. Owns no memory. */
#define _GNU_SOURCE /* strcasestr */
#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "store/store_internal.h"

enum { NAME_CAP = 128 };

static bool name_char(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           (c && strchr("._:/-", c));
}

static bool starts_well(char c)
{
    return name_char(c) && !strchr(".:/-", c);
}

int name_check(const char *name, struct err *e)
{
    size_t n = strlen(name);
    if (!n)
        return err_set(e, ERR_USAGE, "a model's name is empty");
    if (n >= NAME_CAP)
        return err_set(e, ERR_USAGE, "the name '%.40s...' has %zu bytes; at most %d are allowed",
                       name, n, NAME_CAP - 1);
    for (const char *p = name; *p; p++)
        if (!name_char(*p))
            return err_set(e, ERR_USAGE,
                           "the name '%s' may have only letters, digits and . _ : / -", name);
    const char *slash = strrchr(name, '/'), *last = slash ? slash + 1 : name;
    const char *tag = strchr(last, ':');
    bool parts = starts_well(*name) && starts_well(*last) && !strstr(name, "//") &&
                 !strstr(name, "/.") && !strstr(name, "..");
    if (!parts || (tag && (!name_char(tag[1]) || strchr(tag + 1, ':'))))
        return err_set(e, ERR_USAGE,
                       "the name '%s' is not of the form [place/]name[:tag]; parts start with a "
                       "letter or digit",
                       name);
    if (n >= 5 && !strcasecmp(name + n - 5, ".gguf"))
        return err_set(e, ERR_USAGE, "the name '%s' would be taken for a file; leave out .gguf",
                       name);
    return 0;
}

/* Lower case, everything that a base name cannot have becomes '-', runs of '-' are one. */
static size_t slug(char *out, size_t cap, const char *p, size_t n)
{
    size_t used = 0;
    for (size_t i = 0; i < n && used + 1 < cap; i++) {
        char c = (char)tolower((unsigned char)p[i]);
        if (!name_char(c) || c == ':' || c == '/')
            c = '-';
        if ((c == '-' || c == '.') && (!used || out[used - 1] == '-' || out[used - 1] == '.'))
            continue;
        out[used++] = c;
    }
    while (used && (out[used - 1] == '-' || out[used - 1] == '.'))
        used--;
    out[used] = 0;
    return used;
}

/* Names of the mixes by `general.file_type` (GGUF specification, section "file_type" and the
 * enumeration it refers to). The number is only a claim: it counts when the weights bear it out. */
static const char *const mix_names[] = {
    [0] = "f32",     [1] = "f16",     [2] = "q4_0",    [3] = "q4_1",    [7] = "q8_0",
    [8] = "q5_0",    [9] = "q5_1",    [10] = "q2_k",   [11] = "q3_k_s", [12] = "q3_k_m",
    [13] = "q3_k_l", [14] = "q4_k_s", [15] = "q4_k_m", [16] = "q5_k_s", [17] = "q5_k_m",
    [18] = "q6_k",   [21] = "q2_k_s", [25] = "iq4_nl", [30] = "iq4_xs", [32] = "bf16",
};

static void tag_make(char out[32], const struct gguf *g, const char *quant)
{
    uint32_t mix = UINT32_MAX;
    struct err ignored = {0};
    snprintf(out, 32, "%s", quant);
    for (char *p = out; *p; p++)
        *p = (char)tolower((unsigned char)*p);
    gguf_get_u32(g, "general.file_type", &mix, &ignored);
    if (mix < ARRAY_LEN(mix_names) && mix_names[mix] && !strncmp(mix_names[mix], out, strlen(out)))
        snprintf(out, 32, "%s", mix_names[mix]);
}

/* The file's name without folder, .gguf and shard number. */
static size_t stem_of(const char **stem, const char *path)
{
    const char *slash = strrchr(path, '/');
    *stem = slash ? slash + 1 : path;
    size_t n = strlen(*stem);
    if (n > 5 && !strcasecmp(*stem + n - 5, ".gguf"))
        n -= 5;
    unsigned i, of;
    int used = 0;
    if (n > 15 && sscanf(*stem + n - 15, "-%5u-of-%5u%n", &i, &of, &used) == 2 && used == 15)
        n -= 15;
    return n;
}

void name_make(char out[NAME_CAP], const struct gguf *g, const char *path, const char *quant)
{
    char tag[32], base[NAME_CAP - 32];
    struct gguf_str title = {0};
    struct err ignored = {0};
    tag_make(tag, g, quant);
    size_t n = 0;
    if (!gguf_get_str(g, "general.name", &title, &ignored))
        n = slug(base, sizeof base, title.p, title.n);
    if (!n) {
        const char *stem;
        size_t len = stem_of(&stem, path);
        n = slug(base, sizeof base, stem, len);
    }
    /* "tiny-q8_0" with the tag q8_0 would say it twice. */
    size_t nt = strlen(tag);
    if (nt && n > nt + 1 && !strcmp(base + n - nt, tag) && strchr("-._", base[n - nt - 1]))
        base[n - nt - 1] = 0;
    snprintf(out, NAME_CAP, "%s%s%s", *base ? base : "model", *tag ? ":" : "", tag);
}

/* Edit distance (Levenshtein) without regard to case; names are below NAME_CAP bytes. */
static unsigned distance(const char *a, const char *b)
{
    unsigned row[NAME_CAP];
    size_t n = strlen(b);
    for (size_t j = 0; j <= n; j++)
        row[j] = (unsigned)j;
    for (size_t i = 0; a[i]; i++) {
        unsigned diagonal = row[0];
        row[0] = (unsigned)i + 1;
        for (size_t j = 0; j < n; j++) {
            bool same = tolower((unsigned char)a[i]) == tolower((unsigned char)b[j]);
            unsigned replace = diagonal + !same;
            diagonal = row[j + 1];
            row[j + 1] = MIN(replace, MIN(row[j], diagonal) + 1);
        }
    }
    return row[n];
}

/* How far `name` is from what was wanted: without its tag if none was asked for, and near at once
 * when one contains the other. */
static unsigned how_far(const char *wanted, const char *name)
{
    char base[NAME_CAP];
    snprintf(base, sizeof base, "%s", name);
    char *tag = strrchr(base, ':');
    if (tag && !strchr(wanted, ':'))
        *tag = 0;
    if (strlen(wanted) >= 3 && (strcasestr(base, wanted) || strcasestr(wanted, base)))
        return 1;
    return distance(wanted, base);
}

void name_suggest(struct err *e, const char *wanted, const struct store_model *models, size_t n)
{
    enum { MOST = 3 };
    const char *best[MOST] = {0};
    unsigned far[MOST], limit = (unsigned)MAX(strlen(wanted) / 3, (size_t)2);
    for (size_t i = 0; i < n && strlen(wanted) < NAME_CAP; i++) {
        const char *name = models[i].name;
        unsigned d = how_far(wanted, name);
        for (int k = 0; k < MOST && d <= limit; k++) {
            if (best[k] && far[k] <= d)
                continue;
            const char *out = best[k];
            unsigned out_far = far[k];
            best[k] = name;
            far[k] = d;
            if (!(name = out))
                break;
            d = out_far;
        }
    }
    for (int k = 0; e && k < MOST && best[k]; k++) {
        size_t used = strlen(e->msg);
        snprintf(e->msg + used, sizeof e->msg - used, "%s%s%s", k ? ", " : "; did you mean ",
                 best[k], k + 1 == MOST || !best[k + 1] ? "?" : "");
    }
}

int shard_path(char *out, size_t cap, const char *path, uint32_t i, uint32_t n)
{
    if (n == 1)
        return snprintf(out, cap, "%s", path) < (int)cap ? 0 : -1;
    const char *stem;
    size_t len = stem_of(&stem, path), dir = (size_t)(stem - path);
    if (dir + len > cap)
        return -1;
    return snprintf(out, cap, "%.*s-%05u-of-%05u.gguf", (int)(dir + len), path, i + 1, n) < (int)cap
               ? 0
               : -1;
}
