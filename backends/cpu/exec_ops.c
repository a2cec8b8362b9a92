/* What a region's task does: row-wise ops, matmul tiles, attention blocks; and how ops are grouped
 * into regions. Works on the exec's memory. */
#include "backends/cpu/exec_internal.h"

#include <string.h>

enum {
    ROWS_SERIAL = 4, /* this many rows or fewer: row-wise ops are not worth a barrier */
    ROWS_TASK = 8,   /* rows of one task otherwise */
    TILE_ROWS = 128, /* rows of a matmul tile: their int8 blocks stay in the L2 cache */
};

static float *slot_row(const struct exec *x, int32_t slot, int32_t row)
{
    return x->slots[slot].p + (int64_t)row * x->slots[slot].stride;
}

struct act exec_act(const struct exec *x, int32_t slot)
{
    struct act a = x->act;
    int32_t width = x->plan.slots[slot].width;
    a.x = x->slots[slot].p;
    a.x_stride = x->slots[slot].stride;
    a.q_stride = ((width + 31) & ~31) + 64; /* as slot_stride: no power of two */
    a.n_blocks = (width + 31) / 32 + 1;
    return a;
}

/* ---- row-wise ops ---- */

static void op_embed(struct exec *x, const struct op *op, int32_t row)
{
    float *out = slot_row(x, op->out, row);
    pack_row(out, op->w, x->batch->ids[row]);
    if (op->embed.scale != 0)
        for (int32_t i = 0; i < x->plan.slots[op->out].width; i++)
            out[i] *= op->embed.scale;
}

static void op_norm(struct exec *x, const struct op *op, int32_t row)
{
    int32_t width = x->plan.slots[op->out].width;
    int32_t group = op->norm.group ? op->norm.group : width;
    const float *in = slot_row(x, op->in, row), *w = (const float *)op->w->data;
    float *out = slot_row(x, op->out, row);
    for (int32_t g = 0; g < width; g += group)
        x->dev->k->norm(out + g, in + g, w, group, op->norm.eps);
}

static void op_rope(struct exec *x, const struct op *op, int32_t row)
{
    const struct rope_table *t = &x->ropes[x->op_rope[op - x->plan.ops]];
    int32_t half = op->rope.n_rot / 2;
    const float *cs = t->cos_sin + (int64_t)row * 2 * half;
    int32_t step = op->rope.halves ? 1 : 2, other = op->rope.halves ? half : 1;
    for (int32_t h = 0; h < op->rope.n_heads; h++) {
        float *v = slot_row(x, op->out, row) + h * op->rope.head_dim;
        for (int32_t i = 0; i < half; i++) {
            float a = v[i * step], b = v[i * step + other];
            v[i * step] = a * cs[2 * i] - b * cs[2 * i + 1];
            v[i * step + other] = a * cs[2 * i + 1] + b * cs[2 * i];
        }
    }
}

/* A layer's part of a page: K of each KV head, then V of each, as kv_layout.h draws them. */
static uint8_t *key_head(const struct exec *x, int32_t page, int32_t layer, int32_t head)
{
    return x->kv + (size_t)page * x->page_bytes + (size_t)layer * x->layer_bytes +
           (size_t)head * x->key_bytes;
}

static uint8_t *value_head(const struct exec *x, int32_t page, int32_t layer, int32_t head)
{
    return key_head(x, page, layer, x->plan.n_kv_heads) + (size_t)head * x->value_bytes;
}

static void op_kv_write(struct exec *x, const struct op *op, int32_t row)
{
    const struct batch_seq *s = &x->batch->seqs[x->row_seq[row]];
    int32_t pos = x->row_pos[row], page = s->pages[pos / KV_PAGE_TOKENS];
    int32_t at = pos % KV_PAGE_TOKENS, hd = x->plan.head_dim;
    for (int32_t h = 0; h < x->plan.n_kv_heads; h++) {
        x->dev->k->key_put(key_head(x, page, op->layer, h), slot_row(x, op->in, row) + h * hd, hd,
                           at, x->plan.kv_key_type);
        x->dev->k->value_put(value_head(x, page, op->layer, h), slot_row(x, op->in2, row) + h * hd,
                             hd, at, x->plan.kv_value_type);
    }
}

static void op_glu(struct exec *x, const struct op *op, int32_t row)
{
    x->dev->k->glu(slot_row(x, op->out, row), slot_row(x, op->in, row), slot_row(x, op->in2, row),
                   x->plan.slots[op->out].width);
}

static void op_rows(struct exec *x, const struct op *op, int32_t row)
{
    memcpy(slot_row(x, op->out, row), slot_row(x, op->in, x->batch->want[row]),
           sizeof(float) * (size_t)x->plan.slots[op->out].width);
}

static void (*const row_ops[OP_KIND_END])(struct exec *x, const struct op *op, int32_t row) = {
    [OP_EMBED] = op_embed,       [OP_NORM] = op_norm, [OP_ROPE] = op_rope,
    [OP_KV_WRITE] = op_kv_write, [OP_GLU] = op_glu,   [OP_ROWS] = op_rows,
};

static int32_t region_rows(const struct exec *x, const struct region *r)
{
    return r->out_rows ? x->batch->n_want : x->batch->n_rows;
}

static void rows_task(struct exec *x, const struct region *r, int32_t task)
{
    int32_t rows = region_rows(x, r);
    int32_t first = rows <= ROWS_SERIAL ? 0 : task * ROWS_TASK;
    int32_t end = rows <= ROWS_SERIAL ? rows : MIN(first + ROWS_TASK, rows);
    struct act a = {0};
    if (r->quant_slot >= 0)
        a = exec_act(x, r->quant_slot);
    for (int32_t row = first; row < end; row++) {
        for (int32_t i = r->first; i < r->first + r->n_ops; i++)
            row_ops[x->plan.ops[i].kind](x, &x->plan.ops[i], row);
        if (r->quant_slot >= 0)
            x->dev->k->quantize(&a, slot_row(x, r->quant_slot, row), row,
                                x->plan.slots[r->quant_slot].width);
    }
}

/* ---- matmul tiles ---- */

struct tiling {
    int32_t panels; /* of one tile */
    int32_t rows;
    int32_t n_row_tiles;
};

/* Tiles of about 1/8 of a thread's share, so that a thread that was held up costs little; panels of
 * a tile between 16 KiB and 256 KiB. */
static struct tiling tile(const struct exec *x, const struct region *r)
{
    size_t bytes = 0, panel_bytes = 0;
    for (int32_t i = r->first; i < r->first + r->n_ops; i++) {
        const struct weight *w = x->plan.ops[i].w;
        bytes += w->n_bytes;
        panel_bytes = MAX(panel_bytes, w->panel_bytes);
    }
    size_t share = bytes / (8 * (size_t)pool_threads(x->dev->pool));
    share = MIN(MAX(share, (size_t)16 << 10), (size_t)256 << 10);
    int32_t rows = region_rows(x, r);
    struct tiling t = {.panels = (int32_t)MAX(share / panel_bytes, (size_t)1)};
    t.rows = MIN(rows, TILE_ROWS);
    t.n_row_tiles = rows ? (rows + t.rows - 1) / t.rows : 0;
    return t;
}

static int32_t op_tiles(const struct op *op, struct tiling t)
{
    return (int32_t)((op->w->n_panels + t.panels - 1) / t.panels) * t.n_row_tiles;
}

static void matmul_task(struct exec *x, const struct region *r, int32_t task)
{
    struct tiling t = tile(x, r);
    const struct op *op = &x->plan.ops[r->first];
    for (; task >= op_tiles(op, t); op++)
        task -= op_tiles(op, t);
    struct act a = exec_act(x, op->in);
    struct mm m = {
        .w = op->w,
        .a = &a,
        .out = x->slots[op->out].p,
        .out_stride = x->slots[op->out].stride,
        .bias = op->bias ? (const float *)op->bias->data : NULL,
        .panel = task / t.n_row_tiles * t.panels,
        .row = task % t.n_row_tiles * t.rows,
    };
    if (op->add >= 0) {
        m.add = x->slots[op->add].p;
        m.add_stride = x->slots[op->add].stride;
    }
    m.panel_end = (int32_t)MIN((int64_t)m.panel + t.panels, op->w->n_panels);
    m.row_end = MIN(m.row + t.rows, region_rows(x, r));
    x->dev->k->matmul(&m);
}

/* ---- attention ---- */

static void attention_task(struct exec *x, const struct region *r, int32_t task, int32_t thread)
{
    const struct op *op = &x->plan.ops[r->first];
    int32_t n_kv = op->attention.n_kv_heads, head = task % n_kv;
    const struct attn_block *b = &x->blocks[task / n_kv];
    int32_t group = op->attention.n_heads / n_kv, hd = op->attention.head_dim;
    struct attn a = {
        .k_base = key_head(x, 0, op->layer, head),
        .v_base = value_head(x, 0, op->layer, head),
        .page_stride = x->page_bytes,
        .pages = x->batch->seqs[b->seq].pages,
        .key_type = x->plan.kv_key_type,
        .value_type = x->plan.kv_value_type,
        .head_dim = hd,
        .window = op->attention.window,
        .n_heads_group = group,
        .scale = op->attention.scale,
        .q = slot_row(x, op->in, b->row) + head * group * hd,
        .out = slot_row(x, op->out, b->row) + head * group * hd,
        .q_stride = x->slots[op->in].stride,
        .out_stride = x->slots[op->out].stride,
        .n_rows = b->n_rows,
        .pos = x->row_pos[b->row],
        .scratch = x->attn_scratch + (size_t)thread * x->attn_scratch_floats,
    };
    int32_t first = window_start(a.pos, a.window) / KV_PAGE_TOKENS;
    for (int32_t p = first; p <= (a.pos + a.n_rows - 1) / KV_PAGE_TOKENS; p++)
        CHECK(a.pages[p] >= 0);
    x->dev->k->attention(&a);
}

int32_t region_tasks(const struct exec *x, const struct region *r)
{
    int32_t rows = region_rows(x, r), n = 0;
    if (r->kind == REGION_ROWS)
        return rows <= ROWS_SERIAL ? rows > 0 : (rows + ROWS_TASK - 1) / ROWS_TASK;
    if (r->kind == REGION_ATTENTION)
        return x->n_blocks * x->plan.ops[r->first].attention.n_kv_heads;
    struct tiling t = tile(x, r);
    for (int32_t i = r->first; i < r->first + r->n_ops; i++)
        n += op_tiles(&x->plan.ops[i], t);
    return n;
}

void region_task(struct exec *x, const struct region *r, int32_t task, int32_t thread)
{
    if (r->kind == REGION_ROWS)
        rows_task(x, r, task);
    else if (r->kind == REGION_MATMUL)
        matmul_task(x, r, task);
    else
        attention_task(x, r, task, thread);
}

/* ---- grouping ---- */

static enum region_kind kind_of(const struct op *op)
{
    return op->kind == OP_MATMUL      ? REGION_MATMUL
           : op->kind == OP_ATTENTION ? REGION_ATTENTION
                                      : REGION_ROWS;
}

static bool writes_slot(const struct exec *x, const struct region *r, int32_t slot)
{
    for (int32_t i = r->first; i < r->first + r->n_ops; i++)
        if (x->plan.ops[i].out == slot)
            return true;
    return false;
}

static bool reads_slot(const struct exec *x, const struct region *r, int32_t slot)
{
    for (int32_t i = r->first; i < r->first + r->n_ops; i++)
        if (x->plan.ops[i].in == slot || x->plan.ops[i].add == slot)
            return true;
    return false;
}

/* Does a task of the region read rows of the slot that are another task's? */
static bool gathers_slot(const struct exec *x, const struct region *r, int32_t slot)
{
    for (int32_t i = r->first; i < r->first + r->n_ops; i++)
        if (x->plan.ops[i].kind == OP_ROWS && x->plan.ops[i].in == slot)
            return true;
    return false;
}

/* May op join the region without a barrier? Row-wise ops may, as long as they stay on their row
 * (OP_ROWS reads other rows: the region must not write what it reads, before or after it); matmuls
 * may if they read the same input, nothing that the region writes, and write nothing that it reads.
 */
static bool may_join(const struct exec *x, const struct region *r, const struct op *op,
                     bool out_rows)
{
    if (kind_of(op) != r->kind || r->out_rows != out_rows || r->kind == REGION_ATTENTION)
        return false;
    if (r->kind == REGION_ROWS)
        return !(op->kind == OP_ROWS && writes_slot(x, r, op->in)) && !gathers_slot(x, r, op->out);
    return x->plan.ops[r->first].in == op->in && !writes_slot(x, r, op->in) &&
           !writes_slot(x, r, op->out) && (op->add < 0 || !writes_slot(x, r, op->add)) &&
           !reads_slot(x, r, op->out);
}

static void add_region(struct region_list *l, enum region_kind kind, int32_t first, int32_t n_ops,
                       bool out_rows)
{
    l->v[l->n++] = (struct region){kind, first, n_ops, -1, out_rows};
}

/* A matmul with quantized weights wants its input quantized: at the end of the row-wise region
 * before it, or in one of its own. */
static void want_quant(struct region_list *l, const struct op *op, bool out_rows, bool fuse)
{
    struct region *before = l->n ? &l->v[l->n - 1] : NULL;
    if (!fuse || !before || before->kind != REGION_ROWS || before->out_rows != out_rows ||
        before->quant_slot >= 0) {
        add_region(l, REGION_ROWS, 0, 0, out_rows);
        before = &l->v[l->n - 1];
    }
    before->quant_slot = op->in;
}

static bool region_quantized(const struct exec *x, const struct region *r)
{
    for (int32_t i = r->first; i < r->first + r->n_ops; i++)
        if (x->plan.ops[i].w->info->kind != PACK_FLOAT)
            return true;
    return false;
}

void regions_build(struct region_list *l, const struct exec *x, bool fuse)
{
    for (int32_t i = 0; i < x->plan.n_ops;) {
        const struct op *op = &x->plan.ops[i];
        bool out_rows = op->out_rows || op->kind == OP_ROWS;
        struct region r = {kind_of(op), i, 1, -1, out_rows};
        for (i++; fuse && i < x->plan.n_ops; i++, r.n_ops++) {
            const struct op *n = &x->plan.ops[i];
            if (!may_join(x, &r, n, n->out_rows || n->kind == OP_ROWS))
                break;
        }
        if (r.kind == REGION_MATMUL && region_quantized(x, &r))
            want_quant(l, op, out_rows, fuse);
        l->v[l->n++] = r;
    }
}
