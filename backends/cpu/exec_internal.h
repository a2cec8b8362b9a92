/* A prepared plan on the CPU: activation slots, KV pages, and the plan's ops grouped into regions.
 * A region is a run of ops that need no barrier between them: row-wise ops (each task takes some
 * rows through all of them), matmuls that share an input, or one attention. Private to exec*.c. */
#ifndef INGOT_EXEC_INTERNAL_H
#define INGOT_EXEC_INTERNAL_H

#include "backends/cpu/cpu_internal.h"


enum region_kind { REGION_ROWS, REGION_MATMUL, REGION_ATTENTION };

struct region {
    enum region_kind kind;
    int32_t first, n_ops; /* of x->ops */
    int32_t quant_slot;   /* REGION_ROWS: quantize this slot's rows at the end; -1: none */
    bool out_rows;        /* runs on the wanted rows */
};

struct region_list {
    struct region *v;
    int32_t n;
};

struct slot_mem {
    float *p; /* [rows][stride], in x->scratch */
    int32_t stride, rows;
};

struct rope_table {
    struct op op;     /* whose settings it serves */
    double *inv_freq; /* [n_rot / 2] */
    float *cos_sin;   /* [max_batch][n_rot / 2][2], filled at the start of each run */
};

struct attn_block { /* consecutive rows of one sequence that are attended in one task per head */
    int32_t seq, row, n_rows;
};

struct exec {
    struct device *dev;
    struct plan plan; /* ops and slots point to copies of ours */
    struct arena arena;
    struct region_list fused, plain;
    struct slot_mem *slots;
    uint8_t *scratch;
    size_t scratch_bytes;
    struct act act; /* q, d, s, sums: buffers; strides are set for each use */
    float *attn_scratch;
    size_t attn_scratch_floats; /* of one thread */
    struct rope_table *ropes;
    int32_t n_ropes;
    int32_t *op_rope; /* [n_ops]: the table of an OP_ROPE */
    uint8_t *kv;
    size_t kv_bytes, page_bytes, layer_bytes;
    size_t key_bytes, value_bytes; /* of one head in a page */

    /* of the running batch */
    const struct batch *batch;
    const struct region_list *run;
    int32_t *row_seq, *row_pos; /* [max_batch] */
    struct attn_block *blocks;  /* [max_batch] */
    int32_t n_blocks;
    int32_t at; /* region being run; changed only when all its tasks are done */
};

void regions_build(struct region_list *l, const struct exec *x, bool fuse); /* l->v has room */
int32_t region_tasks(const struct exec *x, const struct region *r);
void region_task(struct exec *x, const struct region *r, int32_t task, int32_t thread);
/* The act of a slot of width n_in: buffers shared, strides of its own. */
struct act exec_act(const struct exec *x, int32_t slot);

#endif
