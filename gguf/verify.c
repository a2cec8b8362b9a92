/* Checks behind `ingot verify`: that tensors tile the data section without overlap, gap or rest,
 * and (deep) that no weight or block scale is NaN or infinite. What keys must say is in
 * verify_keys.c. Reads no tensor data unless deep is set; allocates one list of positions. */
#include "gguf/gguf_internal.h"
#include "gguf/blocks.h"

#include <stdlib.h>
#include <string.h>

/* ---- layout ---- */

static int by_place(const void *a, const void *b)
{
    const struct gguf_tensor *x = *(const struct gguf_tensor *const *)a;
    const struct gguf_tensor *y = *(const struct gguf_tensor *const *)b;
    if (x->shard != y->shard)
        return x->shard < y->shard ? -1 : 1;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

static int check_rest(const struct gguf *g, uint32_t shard, uint64_t end, struct err *e)
{
    const struct gguf_shard *s = &g->shards[shard];
    uint64_t rest = s->file_bytes - s->header_bytes - end;
    if (rest < s->alignment)
        return 0;
    return err_set(e, ERR_CORRUPT,
                   "%llu bytes at the end of %s belong to no tensor (a tensor record is missing?)",
                   (unsigned long long)rest, g->n_shards > 1 ? "a shard" : "the file");
}

static int check_tiling(const struct gguf *g, const struct gguf_tensor *const *order, struct err *e)
{
    uint64_t at = 0;
    for (uint32_t shard = 0; shard < g->n_shards; shard++) {
        uint64_t end = 0, align = g->shards[shard].alignment;
        const struct gguf_tensor *last = NULL;
        for (; at < g->n_tensors && order[at]->shard == shard; at++) {
            const struct gguf_tensor *t = order[at];
            if (t->offset < end)
                return err_set(e, ERR_CORRUPT, "tensors '%s' and '%s' overlap", last->name,
                               t->name);
            if (t->offset - end >= align)
                return err_set(
                    e, ERR_CORRUPT,
                    "%llu bytes before tensor '%s' (data offset %llu) belong to no tensor",
                    (unsigned long long)(t->offset - end), t->name, (unsigned long long)t->offset);
            end = t->offset + t->n_bytes;
            last = t;
        }
        if (check_rest(g, shard, end, e))
            return -1;
    }
    return 0;
}

static int check_layout(const struct gguf *g, struct err *e)
{
    for (uint32_t i = 0; i < g->n_shards; i++)
        if (!g->shards[i].header_bytes)
            return err_set(e, ERR_NOT_FOUND, "shard %u of %u is missing", i + 1, g->n_shards);
    const struct gguf_tensor **order = mem_array((size_t)g->n_tensors, sizeof *order);
    if (!order)
        return err_set(e, ERR_MEMORY, "out of memory verifying tensors");
    for (uint64_t i = 0; i < g->n_tensors; i++)
        order[i] = &g->tensors[i];
    qsort(order, (size_t)g->n_tensors, sizeof *order, by_place);
    int rc = check_tiling(g, order, e);
    mem_free(order);
    return rc;
}

/* ---- weights ---- */

/* Where the halves of a block lie; both the same when there is one. */
static const struct half_places {
    uint8_t first, second;
} half_places[GGUF_DTYPE_END] = {
    [GGUF_Q4_1] = {0, offsetof(struct block_q4_1, m)},
    [GGUF_Q5_1] = {0, offsetof(struct block_q5_1, m)},
    [GGUF_Q2_K] = {offsetof(struct block_q2_k, d), offsetof(struct block_q2_k, dmin)},
    [GGUF_Q3_K] = {offsetof(struct block_q3_k, d), offsetof(struct block_q3_k, d)},
    [GGUF_Q4_K] = {0, offsetof(struct block_q4_k, dmin)},
    [GGUF_Q5_K] = {0, offsetof(struct block_q5_k, dmin)},
    [GGUF_Q6_K] = {offsetof(struct block_q6_k, d), offsetof(struct block_q6_k, d)},
    /* all other quantized types have one half, at 0 */
};

static bool half_is_wild(const uint8_t *p)
{
    return (p[1] & 0x7c) == 0x7c;
}

/* Floats: an exponent of all ones. Looked at in runs, so that the loop has no early exit. */
static bool floats_are_wild(const uint8_t *p, size_t n, uint32_t type)
{
    unsigned bad = 0;
    if (type == GGUF_F32)
        for (size_t i = 0; i < n; i++)
            bad |= (p[4 * i + 3] & 0x7f) == 0x7f && p[4 * i + 2] >= 0x80;
    else if (type == GGUF_F16)
        for (size_t i = 0; i < n; i++)
            bad |= half_is_wild(p + 2 * i);
    else
        for (size_t i = 0; i < n; i++)
            bad |= (p[2 * i + 1] & 0x7f) == 0x7f && p[2 * i] >= 0x80;
    return bad;
}

static bool blocks_are_wild(const uint8_t *p, size_t n, uint32_t type, size_t block_bytes)
{
    struct half_places at = half_places[type];
    unsigned bad = 0;
    for (size_t i = 0; i < n; i++, p += block_bytes)
        bad |= (unsigned)half_is_wild(p + at.first) | (unsigned)half_is_wild(p + at.second);
    return bad;
}

static int check_weights(const struct gguf *g, const struct gguf_tensor *t, struct err *e)
{
    enum { RUN = 1024 };
    const uint8_t *p = gguf_tensor_data(g, t);
    const struct gguf_dtype_info *info = gguf_dtype_find(t->type);
    if (!p)
        return err_set(e, ERR_USAGE, "tensor '%s': its data is not at hand for a deep check",
                       t->name);
    uint64_t n = t->n_bytes / info->block_bytes;
    for (uint64_t at = 0; at < n; at += RUN) {
        size_t run = (size_t)MIN(n - at, (uint64_t)RUN);
        bool wild = info->block_len == 1 ? floats_are_wild(p, run, t->type)
                                         : blocks_are_wild(p, run, t->type, info->block_bytes);
        if (wild)
            return err_set(e, ERR_CORRUPT,
                           "tensor '%s': a %s near value %llu is not finite (NaN or infinity)",
                           t->name, info->block_len == 1 ? "weight" : "block scale",
                           (unsigned long long)(at * info->block_len));
        p += run * info->block_bytes;
    }
    return 0;
}

int gguf_verify(const struct gguf *g, bool deep, struct err *e)
{
    if (check_layout(g, e) || gguf_verify_keys(g, e))
        return -1;
    for (uint64_t i = 0; deep && i < g->n_tensors; i++)
        if (check_weights(g, &g->tensors[i], e))
            return -1;
    return 0;
}
