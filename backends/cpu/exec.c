/* Prepare a plan (slots, pages, regions) and run batches of it. Owns the scratch memory and the KV
 * pages; the weights belong to the device. */
#include "backends/cpu/exec_internal.h"

#include <math.h>
#include <string.h>

static size_t align64(size_t n)
{
    return (n + 63) & ~(size_t)63;
}

static size_t kv_head_bytes(const struct plan *p, enum kv_type t)
{
    return KV_PAGE_TOKENS * kv_row_bytes(t, p->head_dim);
}

static size_t kv_layer_bytes(const struct plan *p)
{
    return (size_t)p->n_kv_heads *
           (kv_head_bytes(p, p->kv_key_type) + kv_head_bytes(p, p->kv_value_type));
}

static bool runs_on_wanted(const struct op *op)
{
    return op->out_rows || op->kind == OP_ROWS;
}

/* Rows a slot must hold: all of a batch, unless only wanted rows are ever written to it. */
static int32_t slot_rows(const struct plan *p, int32_t slot)
{
    int32_t rows = 0;
    for (int32_t i = 0; i < p->n_ops; i++)
        if (p->ops[i].out == slot)
            rows = MAX(rows, runs_on_wanted(&p->ops[i]) ? p->max_out : p->max_batch);
    return rows;
}

static int32_t slot_stride(const struct plan *p, int32_t slot)
{
    return ((p->slots[slot].width + 15) & ~15) + 16; /* 16 more: rows must not alias in the cache */
}

static int32_t max_matmul_in(const struct plan *p)
{
    int32_t n = 0;
    for (int32_t i = 0; i < p->n_ops; i++)
        if (p->ops[i].kind == OP_MATMUL)
            n = MAX(n, p->slots[p->ops[i].in].width);
    return (n + 31) & ~31;
}

size_t attn_scratch_floats(int32_t head_dim, int32_t n_heads_group)
{
    size_t hp = ((size_t)head_dim + 15) & ~(size_t)15, rows = ATTN_ROWS * (size_t)n_heads_group;
    return 2 * KV_PAGE_TOKENS * hp + ATTN_QUERIES * KV_PAGE_TOKENS + rows * (hp + 2);
}

static int32_t max_heads_group(const struct plan *p)
{
    int32_t g = 1;
    for (int32_t i = 0; i < p->n_ops; i++)
        if (p->ops[i].kind == OP_ATTENTION)
            g = MAX(g, p->ops[i].attention.n_heads / p->ops[i].attention.n_kv_heads);
    return g;
}

/* The scratch layout: with base NULL only its size is computed, else x's pointers are set. */
static size_t layout_scratch(struct exec *x, const struct plan *p, uint8_t *base, int32_t n_threads)
{
    size_t at = 0, rows = (size_t)p->max_batch;
    for (int32_t i = 0; i < p->n_slots; i++) {
        int32_t stride = slot_stride(p, i), n = slot_rows(p, i);
        if (base)
            x->slots[i] = (struct slot_mem){(float *)(base + at), stride, n};
        at += align64((size_t)stride * (size_t)n * sizeof(float));
    }
    size_t n_in = (size_t)max_matmul_in(p), n_blocks = n_in / 32 + 1;
    size_t q_bytes = align64(rows * (n_in + 64)), f_bytes = align64(rows * n_blocks * 4);
    size_t attn_floats = align64(attn_scratch_floats(p->head_dim, max_heads_group(p)));
    if (base) {
        x->act.q = (int8_t *)(base + at);
        x->act.d = (float *)(base + at + q_bytes);
        x->act.s = (float *)(base + at + q_bytes + f_bytes);
        x->act.sums = (int32_t *)(base + at + q_bytes + 2 * f_bytes);
        x->attn_scratch = (float *)(base + at + q_bytes + 3 * f_bytes);
        x->attn_scratch_floats = attn_floats;
    }
    return at + q_bytes + 3 * f_bytes + attn_floats * 4 * (size_t)n_threads;
}

/* A size that does not fit the type is one that nothing has room for. */
static size_t mul_sizes(size_t a, size_t b)
{
    size_t r;
    return mul_over(a, b, &r) ? SIZE_MAX : r;
}

static size_t kv_bytes(const struct plan *p)
{
    return mul_sizes(mul_sizes(kv_layer_bytes(p), (size_t)p->n_kv_layers), (size_t)p->n_pages);
}

void exec_bytes(struct device *d, const struct plan *p, uint64_t *kv, uint64_t *scratch)
{
    *kv = kv_bytes(p);
    *scratch = layout_scratch(NULL, p, NULL, pool_threads(d->pool));
}

static bool same_rope(const struct op *a, const struct op *b)
{
    return a->rope.n_rot == b->rope.n_rot && a->rope.base == b->rope.base &&
           a->rope.freq_scale == b->rope.freq_scale && a->rope.mscale == b->rope.mscale &&
           a->rope.factors == b->rope.factors;
}

static bool rope_table_init(struct exec *x, struct rope_table *t, const struct op *op)
{
    int32_t half = op->rope.n_rot / 2;
    t->op = *op;
    t->inv_freq = arena_alloc(&x->arena, sizeof(double) * (size_t)half);
    t->cos_sin =
        arena_alloc(&x->arena, sizeof(float) * 2 * (size_t)half * (size_t)x->plan.max_batch);
    if (!t->inv_freq || !t->cos_sin)
        return false;
    for (int32_t i = 0; i < half; i++) {
        double f = pow((double)op->rope.base, -2.0 * i / op->rope.n_rot);
        t->inv_freq[i] = f * (double)op->rope.freq_scale /
                         (op->rope.factors ? (double)op->rope.factors[i] : 1.0);
    }
    return true;
}

static bool find_ropes(struct exec *x)
{
    for (int32_t i = 0; i < x->plan.n_ops; i++) {
        const struct op *op = &x->plan.ops[i];
        if (op->kind != OP_ROPE)
            continue;
        int32_t r = 0;
        while (r < x->n_ropes && !same_rope(&x->ropes[r].op, op))
            r++;
        x->op_rope[i] = r;
        if (r == x->n_ropes && !rope_table_init(x, &x->ropes[x->n_ropes++], op))
            return false;
    }
    return true;
}

static void *copy(struct arena *a, const void *p, size_t n)
{
    void *r = arena_alloc(a, n);
    return r ? memcpy(r, p, n) : NULL;
}

static int exec_alloc(struct exec *x, const struct plan *p)
{
    size_t n_ops = (size_t)p->n_ops, rows = (size_t)p->max_batch;
    x->plan.ops = copy(&x->arena, p->ops, sizeof *p->ops * n_ops);
    x->plan.slots = copy(&x->arena, p->slots, sizeof *p->slots * (size_t)p->n_slots);
    x->fused.v = arena_alloc(&x->arena, sizeof(struct region) * 2 * n_ops);
    x->plain.v = arena_alloc(&x->arena, sizeof(struct region) * 2 * n_ops);
    x->slots = arena_alloc(&x->arena, sizeof *x->slots * (size_t)p->n_slots);
    x->ropes = arena_alloc(&x->arena, sizeof *x->ropes * n_ops);
    x->op_rope = arena_alloc(&x->arena, sizeof *x->op_rope * n_ops);
    x->row_seq = arena_alloc(&x->arena, sizeof *x->row_seq * rows);
    x->row_pos = arena_alloc(&x->arena, sizeof *x->row_pos * rows);
    x->blocks = arena_alloc(&x->arena, sizeof *x->blocks * rows);
    if (!x->plan.ops || !x->plan.slots || !x->fused.v || !x->plain.v || !x->slots || !x->ropes ||
        !x->op_rope || !x->row_seq || !x->row_pos || !x->blocks)
        return -1;
    x->scratch = mem_pages(x->scratch_bytes);
    x->kv = mem_pages(x->kv_bytes);
    return x->scratch && x->kv && find_ropes(x) ? 0 : -1;
}

int exec_new(struct device *d, struct exec **out, const struct plan *p, struct err *e)
{
    struct exec *x = mem_zalloc(sizeof *x);
    if (!x)
        return err_set(e, ERR_MEMORY, "out of memory preparing the model");
    x->dev = d;
    x->plan = *p;
    CHECK(p->head_dim % kv_type_block(p->kv_key_type) == 0);
    CHECK(p->head_dim % kv_type_block(p->kv_value_type) == 0);
    x->key_bytes = kv_head_bytes(p, p->kv_key_type);
    x->value_bytes = kv_head_bytes(p, p->kv_value_type);
    x->layer_bytes = kv_layer_bytes(p);
    x->page_bytes = x->layer_bytes * (size_t)p->n_kv_layers;
    x->kv_bytes = kv_bytes(p);
    x->scratch_bytes = layout_scratch(x, p, NULL, pool_threads(d->pool));
    if (exec_alloc(x, p)) {
        err_set(e, ERR_MEMORY,
                "out of memory for %llu MiB of KV pages and %llu MiB of activations; "
                "use a smaller context, or fewer sequences",
                (unsigned long long)(x->kv_bytes >> 20),
                (unsigned long long)(x->scratch_bytes >> 20));
        exec_free(x);
        return -1;
    }
    layout_scratch(x, p, x->scratch, pool_threads(d->pool));
    regions_build(&x->fused, x, true);
    regions_build(&x->plain, x, false);
    *out = x;
    return 0;
}

void exec_free(struct exec *x)
{
    if (!x)
        return;
    mem_pages_free(x->scratch, x->scratch_bytes);
    mem_pages_free(x->kv, x->kv_bytes);
    arena_fini(&x->arena);
    mem_free(x);
}

uint64_t exec_page_bytes(struct exec *x)
{
    return x->page_bytes;
}

uint8_t *exec_page(struct exec *x, int32_t page)
{
    CHECK(page >= 0 && page < x->plan.n_pages);
    return x->kv + (size_t)page * x->page_bytes;
}

/* ---- running ---- */

static void fill_rope_row(const struct rope_table *t, int32_t row, int32_t pos)
{
    int32_t half = t->op.rope.n_rot / 2;
    float *cs = t->cos_sin + (int64_t)row * 2 * half;
    for (int32_t i = 0; i < half; i++) {
        double theta = pos * t->inv_freq[i];
        cs[2 * i] = (float)cos(theta) * t->op.rope.mscale;
        cs[2 * i + 1] = (float)sin(theta) * t->op.rope.mscale;
    }
}

static int index_batch(struct exec *x, const struct batch *b, struct err *e)
{
    if (b->n_rows < 1 || b->n_rows > x->plan.max_batch || b->n_want > x->plan.max_out)
        return err_set(e, ERR_LIMIT, "batch of %d rows, %d wanted; the plan allows %d and %d",
                       b->n_rows, b->n_want, x->plan.max_batch, x->plan.max_out);
    int32_t n_rows = 0;
    x->n_blocks = 0;
    for (int32_t s = 0; s < b->n_seqs; s++) {
        const struct batch_seq *q = &b->seqs[s];
        n_rows += q->n_rows;
        CHECK(q->n_rows > 0 && n_rows <= b->n_rows);
        CHECK(q->first_row >= 0 && q->first_row <= b->n_rows - q->n_rows);
        CHECK(q->pos >= 0 && q->pos + q->n_rows <= x->plan.n_ctx);
        for (int32_t i = 0; i < q->n_rows; i++) {
            x->row_seq[q->first_row + i] = s;
            x->row_pos[q->first_row + i] = q->pos + i;
            if (i % ATTN_ROWS == 0)
                x->blocks[x->n_blocks++] =
                    (struct attn_block){s, q->first_row + i, MIN(ATTN_ROWS, q->n_rows - i)};
        }
    }
    CHECK(n_rows == b->n_rows);
    for (int32_t i = 0; i < b->n_want; i++)
        CHECK(b->want[i] >= 0 && b->want[i] < b->n_rows);
    return 0;
}

/* How many tasks the region at x->at has; regions with a single one are done on the spot. */
static int32_t start_region(struct exec *x)
{
    for (; x->at < x->run->n; x->at++) {
        const struct region *r = &x->run->v[x->at];
        int32_t n = region_tasks(x, r);
        if (n > 1)
            return n;
        if (n)
            region_task(x, r, 0, 0);
    }
    return 0;
}

static int32_t next_region(void *ctx)
{
    struct exec *x = ctx;
    x->at++;
    return start_region(x);
}

static void do_region_task(void *ctx, int32_t task, int32_t thread)
{
    struct exec *x = ctx;
    region_task(x, &x->run->v[x->at], task, thread);
}

/* With a tap every op runs alone, its tasks in order on this thread. */
static void run_tapped(struct exec *x)
{
    for (x->at = 0; x->at < x->run->n; x->at++) {
        const struct region *r = &x->run->v[x->at];
        for (int32_t t = 0, n = region_tasks(x, r); t < n; t++)
            region_task(x, r, t, 0);
        if (!r->n_ops)
            continue;
        const struct op *op = &x->plan.ops[r->first];
        int32_t slot = op->kind == OP_KV_WRITE ? op->in : op->out;
        x->batch->tap(x->batch->tap_user, op, x->slots[slot].p,
                      r->out_rows ? x->batch->n_want : x->batch->n_rows, x->plan.slots[slot].width,
                      x->slots[slot].stride);
    }
}

int exec_run(struct exec *x, const struct batch *b, struct err *e)
{
    if (index_batch(x, b, e))
        return -1;
    x->batch = b;
    for (int32_t r = 0; r < x->n_ropes; r++)
        for (int32_t i = 0; i < b->n_rows; i++)
            fill_rope_row(&x->ropes[r], i, x->row_pos[i]);
    x->run = b->tap ? &x->plain : &x->fused;
    x->at = 0;
    if (b->tap) {
        run_tapped(x);
    } else {
        struct pool_work w = {do_region_task, next_region, x, start_region(x)};
        pool_run(x->dev->pool, &w);
    }
    const struct slot_mem *s = &x->slots[x->plan.logits_slot];
    for (int32_t i = 0; i < b->n_want; i++)
        memcpy(b->logits + (int64_t)i * x->plan.n_vocab, s->p + (int64_t)i * s->stride,
               sizeof(float) * (size_t)x->plan.n_vocab);
    return 0;
}
