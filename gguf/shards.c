/* Models in several files: `NAME-00001-of-0000N.gguf`, whose first file has all keys and whose
 * others have split.* keys and their tensors. Opens a path with its siblings; refuses half a set
 * and a set whose names, numbers and counts disagree. Mappings belong to the struct gguf. Source:
 * the split.no, split.count and split.tensors.count keys of the GGUF specification. */
#include "gguf/gguf_internal.h"

#include <stdio.h>
#include <string.h>

int gguf_split_get(struct gguf_split *s, const struct gguf *g, struct err *e)
{
    *s = (struct gguf_split){.no = 0, .count = 1, .n_tensors = UINT32_MAX};
    if (gguf_get_u32(g, "split.no", &s->no, e) || gguf_get_u32(g, "split.count", &s->count, e) ||
        gguf_get_u32(g, "split.tensors.count", &s->n_tensors, e))
        return -1;
    if (s->count == 0) /* some writers say so for "not split" */
        s->count = 1;
    if (s->count > GGUF_MAX_SHARDS)
        return err_set(e, ERR_LIMIT, "key 'split.count' is %u; at most %d shards are supported",
                       s->count, GGUF_MAX_SHARDS);
    if (s->no >= s->count)
        return err_set(e, ERR_CORRUPT, "key 'split.no' is %u, but split.count is %u", s->no,
                       s->count);
    return 0;
}

static int check_total(const struct gguf *g, const struct gguf_split *s, struct err *e)
{
    if (s->n_tensors == UINT32_MAX || s->n_tensors == g->n_tensors)
        return 0;
    return err_set(e, ERR_CORRUPT, "%llu tensors found, but split.tensors.count is %u",
                   (unsigned long long)g->n_tensors, s->n_tensors);
}

int gguf_parse(struct gguf **out, const void *p, size_t n, uint64_t file_bytes, struct err *e)
{
    struct gguf *g;
    struct gguf_split s;
    *out = NULL;
    if (gguf_parse_one(&g, p, n, file_bytes, e))
        return -1;
    if (gguf_split_get(&s, g, e))
        goto fail;
    if (s.no != 0) {
        err_set(e, ERR_USAGE, "this is shard %u of %u (split.no %u); open the first one", s.no + 1,
                s.count, s.no);
        goto fail;
    }
    if (s.count == 1) {
        if (check_total(g, &s, e))
            goto fail;
        *out = g;
        return 0;
    }
    struct gguf_shard *shards = arena_alloc(&g->arena, s.count * sizeof *shards);
    if (!shards) {
        err_set(e, ERR_MEMORY, "out of memory for %u shards", s.count);
        goto fail;
    }
    shards[0] = g->shards[0];
    g->shards = shards;
    g->n_shards = s.count;
    *out = g;
    return 0;
fail:
    gguf_free(g);
    return -1;
}

/* Append the tensors of one parsed file. */
static int merge(struct gguf *g, const struct gguf *part, uint32_t shard, struct err *e)
{
    uint64_t old = g->n_tensors, total = old + part->n_tensors, dup = 0;
    if (total > GGUF_MAX_TENSORS)
        return err_set(e, ERR_LIMIT, "tensor count %llu is above the limit of %d",
                       (unsigned long long)total, GGUF_MAX_TENSORS);
    struct gguf_tensor *t = mem_realloc(g->tensors, (size_t)total * sizeof *t);
    if (!t)
        return err_set(e, ERR_MEMORY, "out of memory reading a GGUF header");
    g->tensors = t;
    for (uint64_t i = old; i < total; i++) {
        t[i] = part->tensors[i - old];
        t[i].shard = shard;
    }
    g->n_tensors = total;
    int rc = gguf_index_tensors(&dup, g, old);
    if (rc > 0)
        return err_set(e, ERR_CORRUPT, "duplicate tensor '%s': it is in an earlier shard too",
                       t[dup].name);
    return rc ? err_set(e, ERR_MEMORY, "out of memory reading a GGUF header") : 0;
}

int gguf_add_shard(struct gguf *g, uint32_t shard, const void *p, size_t n, uint64_t file_bytes,
                   struct err *e)
{
    struct gguf *part;
    struct gguf_split all, s;
    CHECK(shard > 0 && shard < g->n_shards && g->shards[shard - 1].header_bytes &&
          !g->shards[shard].header_bytes);
    if (gguf_split_get(&all, g, e) || gguf_parse_one(&part, p, n, file_bytes, e))
        return -1;
    int rc = gguf_split_get(&s, part, e);
    if (!rc && s.count != all.count)
        rc = err_set(e, ERR_CORRUPT, "split.count is %u here and %u in the first shard", s.count,
                     all.count);
    if (!rc && s.no != shard)
        rc = err_set(e, ERR_CORRUPT, "split.no is %u, but this is shard %u of %u (split.no %u)",
                     s.no, shard + 1, all.count, shard);
    if (!rc)
        rc = merge(g, part, shard, e);
    if (!rc) {
        g->shards[shard].header_bytes = part->shards[0].header_bytes;
        g->shards[shard].file_bytes = part->shards[0].file_bytes;
        g->shards[shard].alignment = part->shards[0].alignment;
        if (shard + 1 == g->n_shards)
            rc = check_total(g, &all, e);
    }
    gguf_free(part);
    return rc;
}

/* ---- paths ---- */

enum { SUFFIX_BYTES = sizeof "-00001-of-00003.gguf" - 1, PATH_BYTES = 4096 };

/* Numbers in `...-00002-of-00003.gguf`: false when the path does not end like that. */
static bool path_split(uint32_t *no, uint32_t *count, const char *path)
{
    size_t n = strlen(path);
    if (n < SUFFIX_BYTES)
        return false;
    const char *s = path + n - SUFFIX_BYTES, *pattern = "-ddddd-of-ddddd.gguf";
    uint32_t v[2] = {0, 0};
    for (int i = 0; i < SUFFIX_BYTES; i++) {
        if (pattern[i] != 'd') {
            if (s[i] != pattern[i])
                return false;
            continue;
        }
        if (s[i] < '0' || s[i] > '9')
            return false;
        uint32_t *x = &v[i > 6];
        *x = *x * 10 + (uint32_t)(s[i] - '0');
    }
    *no = v[0];
    *count = v[1];
    return true;
}

static void path_of_shard(char out[PATH_BYTES], const char *path, uint32_t no, uint32_t count)
{
    int keep = (int)(strlen(path) - SUFFIX_BYTES);
    snprintf(out, PATH_BYTES, "%.*s-%05u-of-%05u.gguf", keep, path, no, count);
}

static const char *path_last(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static int open_others(struct gguf *g, const char *path, struct err *e)
{
    uint32_t no, count;
    if (!path_split(&no, &count, path))
        return err_set(e, ERR_NOT_FOUND,
                       "this is the first of %u shards (split.count), but its name does not end in "
                       "-00001-of-%05u.gguf, so the others cannot be found; rename them",
                       g->n_shards, g->n_shards);
    if (no != 1 || count != g->n_shards)
        return err_set(e, ERR_CORRUPT,
                       "the name says shard %u of %u, the keys say 1 of %u (split.count)", no,
                       count, g->n_shards);
    for (uint32_t i = 1; i < g->n_shards; i++) {
        char other[PATH_BYTES];
        path_of_shard(other, path, i + 1, count);
        struct gguf_shard *s = &g->shards[i];
        struct err why = {0};
        if (file_map(&s->map, other, &why))
            return err_set(
                e, why.code, "shard %u of %u, '%.100s', %s", i + 1, count, path_last(other),
                why.code == ERR_NOT_FOUND ? "is missing; fetch it too" : "cannot be opened");
        if (gguf_add_shard(g, i, s->map.data, s->map.n, s->map.n, e))
            return err_prefix(e, "%.200s", path_last(other));
    }
    return 0;
}

/* A later shard was named: say which file to open instead. */
static int check_is_first(const char *path, const struct mapped *m, struct err *e)
{
    uint32_t no, count;
    char first[PATH_BYTES];
    struct gguf *g;
    struct gguf_split s;
    if (!path_split(&no, &count, path) || no < 2)
        return 0;
    if (gguf_parse_one(&g, m->data, m->n, m->n, e))
        return -1;
    int rc = gguf_split_get(&s, g, e);
    path_of_shard(first, path, 1, count);
    if (!rc && s.count > 1)
        rc = err_set(e, ERR_USAGE, "this is shard %u of %u; open the first one, '%.100s'", no,
                     count, path_last(first));
    gguf_free(g);
    return rc;
}

int gguf_open(struct gguf **out, const char *path, struct err *e)
{
    struct mapped m;
    struct gguf *g;
    *out = NULL;
    if (strlen(path) + 32 > PATH_BYTES)
        return err_set(e, ERR_LIMIT, "path too long: '%.100s...'", path);
    if (file_map(&m, path, e))
        return -1;
    if (check_is_first(path, &m, e) || gguf_parse(&g, m.data, m.n, m.n, e)) {
        file_unmap(&m);
        return err_prefix(e, "%.200s", path);
    }
    g->shards[0].map = m;
    if (g->n_shards > 1 && open_others(g, path, e)) {
        gguf_free(g);
        return err_prefix(e, "%.200s", path);
    }
    *out = g;
    return 0;
}
