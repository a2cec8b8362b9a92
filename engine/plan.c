/* Turns a model into a plan: a flat array of ops over the activation slots of engine_internal.h.
 * One shape serves every row of the architecture table: pre-norm blocks of grouped attention with
 * rotary positions and a gated feed-forward. After the last layer's attention only the rows whose
 * logits are wanted go on. Knows no batch; memory is the caller's arena. */
#include "engine/engine_internal.h"

#include <math.h>

enum { OPS_PER_LAYER = 20, OPS_AROUND = 5 };

struct builder {
    struct op *ops;
    int32_t n, cap;
    const struct model *m;
    uint32_t window;
    bool out_rows; /* set once OP_ROWS has been emitted */
};

static struct op *add_op(struct builder *b, enum op_kind kind, uint32_t layer, int in, int out)
{
    CHECK(b->n < b->cap);
    struct op *op = &b->ops[b->n++];
    *op = (struct op){.kind = kind,
                      .layer = (int16_t)layer,
                      .in = (int16_t)in,
                      .in2 = -1,
                      .out = (int16_t)out,
                      .add = -1,
                      .out_rows = b->out_rows};
    return op;
}

static struct weight *weight_at(const struct builder *b, enum role r, uint32_t layer)
{
    return model_tensor_at(b->m, r, layer)->w;
}

static void add_norm(struct builder *b, enum role r, uint32_t layer, int in, int out)
{
    struct op *op = add_op(b, OP_NORM, layer, in, out);
    op->w = weight_at(b, r, layer);
    op->norm.eps = b->m->hp.norm_eps;
    op->norm.group = r == ROLE_Q_NORM || r == ROLE_K_NORM ? (int32_t)b->m->hp.head_dim : 0;
}

static struct op *add_matmul(struct builder *b, enum role r, uint32_t layer, int in, int out)
{
    struct op *op = add_op(b, OP_MATMUL, layer, in, out);
    op->w = weight_at(b, r, layer);
    return op;
}

static void add_rope(struct builder *b, uint32_t layer, int slot, uint32_t n_heads)
{
    const struct hparams *hp = &b->m->hp;
    struct op *op = add_op(b, OP_ROPE, layer, slot, slot);
    op->rope.n_heads = (int32_t)n_heads;
    op->rope.head_dim = (int32_t)hp->head_dim;
    op->rope.n_rot = (int32_t)hp->n_rot;
    op->rope.halves = b->m->arch->rope_halves;
    op->rope.base = hp->rope_base;
    op->rope.freq_scale = hp->rope_freq_scale;
    op->rope.mscale = b->m->rope_mscale;
    op->rope.factors = b->m->rope_freqs;
}

/* x -> att. The three projections stay side by side, so that a backend may run them as one. */
static void add_attention(struct builder *b, uint32_t l)
{
    const struct hparams *hp = &b->m->hp;
    add_norm(b, ROLE_ATTN_NORM, l, SLOT_X, SLOT_H);
    add_matmul(b, ROLE_Q, l, SLOT_H, SLOT_Q)->bias = weight_at(b, ROLE_Q_BIAS, l);
    add_matmul(b, ROLE_K, l, SLOT_H, SLOT_K)->bias = weight_at(b, ROLE_K_BIAS, l);
    add_matmul(b, ROLE_V, l, SLOT_H, SLOT_V)->bias = weight_at(b, ROLE_V_BIAS, l);
    if (model_tensor_at(b->m, ROLE_Q_NORM, l)->t)
        add_norm(b, ROLE_Q_NORM, l, SLOT_Q, SLOT_Q);
    if (model_tensor_at(b->m, ROLE_K_NORM, l)->t)
        add_norm(b, ROLE_K_NORM, l, SLOT_K, SLOT_K);
    add_rope(b, l, SLOT_Q, hp->n_heads);
    add_rope(b, l, SLOT_K, hp->n_kv_heads);
    add_op(b, OP_KV_WRITE, l, SLOT_K, -1)->in2 = SLOT_V;
    struct op *op = add_op(b, OP_ATTENTION, l, SLOT_Q, SLOT_ATT);
    op->attention.n_heads = (int32_t)hp->n_heads;
    op->attention.n_kv_heads = (int32_t)hp->n_kv_heads;
    op->attention.head_dim = (int32_t)hp->head_dim;
    op->attention.window = (int32_t)b->window;
    op->attention.scale = 1.0f / sqrtf((float)hp->head_dim);
}

/* att and x -> x: output projection, then the gated feed-forward, both onto the residual stream. */
static void add_feed_forward(struct builder *b, uint32_t l, int att, int x)
{
    struct op *op = add_matmul(b, ROLE_O, l, att, x);
    op->bias = weight_at(b, ROLE_O_BIAS, l);
    op->add = (int16_t)x;
    add_norm(b, ROLE_FFN_NORM, l, x, SLOT_H);
    add_matmul(b, ROLE_GATE, l, SLOT_H, SLOT_G);
    add_matmul(b, ROLE_UP, l, SLOT_H, SLOT_U);
    add_op(b, OP_GLU, l, SLOT_G, SLOT_G)->in2 = SLOT_U;
    add_matmul(b, ROLE_DOWN, l, SLOT_G, x)->add = (int16_t)x;
}

static void add_model(struct builder *b)
{
    uint32_t last = b->m->hp.n_layers - 1;
    add_op(b, OP_EMBED, 0, -1, SLOT_X)->w = weight_at(b, ROLE_TOKEN_EMBD, 0);
    for (uint32_t l = 0; l < last; l++) {
        add_attention(b, l);
        add_feed_forward(b, l, SLOT_ATT, SLOT_X);
    }
    add_attention(b, last);
    b->out_rows = true;
    add_op(b, OP_ROWS, last, SLOT_ATT, SLOT_ATT_OUT);
    add_op(b, OP_ROWS, last, SLOT_X, SLOT_X_OUT);
    add_feed_forward(b, last, SLOT_ATT_OUT, SLOT_X_OUT);
    add_norm(b, ROLE_OUTPUT_NORM, last, SLOT_X_OUT, SLOT_H);
    add_op(b, OP_MATMUL, last, SLOT_H, SLOT_LOGITS)->w = model_output(b->m)->w;
}

static void set_slots(struct plan_slot *s, const struct hparams *hp)
{
    int32_t embd = (int32_t)hp->n_embd, ff = (int32_t)hp->n_ff;
    int32_t q = (int32_t)(hp->n_heads * hp->head_dim),
            kv = (int32_t)(hp->n_kv_heads * hp->head_dim);
    s[SLOT_X] = (struct plan_slot){"x", embd};
    s[SLOT_H] = (struct plan_slot){"h", embd};
    s[SLOT_Q] = (struct plan_slot){"q", q};
    s[SLOT_K] = (struct plan_slot){"k", kv};
    s[SLOT_V] = (struct plan_slot){"v", kv};
    s[SLOT_ATT] = (struct plan_slot){"att", q};
    s[SLOT_ATT_OUT] = (struct plan_slot){"att_out", q};
    s[SLOT_X_OUT] = (struct plan_slot){"x_out", embd};
    s[SLOT_G] = (struct plan_slot){"g", ff};
    s[SLOT_U] = (struct plan_slot){"u", ff};
    s[SLOT_LOGITS] = (struct plan_slot){"logits", (int32_t)hp->n_vocab};
}

int plan_build(struct plan *p, struct arena *a, const struct model *m, const struct limits *l,
               struct err *e)
{
    struct builder b = {
        .m = m, .window = l->window, .cap = (int32_t)(m->hp.n_layers * OPS_PER_LAYER + OPS_AROUND)};
    b.ops = arena_alloc(a, (size_t)b.cap * sizeof *b.ops);
    struct plan_slot *slots = arena_alloc(a, SLOT_END * sizeof *slots);
    if (!b.ops || !slots)
        return err_set(e, ERR_MEMORY, "out of memory for the plan");
    add_model(&b);
    set_slots(slots, &m->hp);
    *p = (struct plan){
        .ops = b.ops,
        .n_ops = b.n,
        .slots = slots,
        .n_slots = SLOT_END,
        .logits_slot = SLOT_LOGITS,
        .n_vocab = (int32_t)m->hp.n_vocab,
        .n_kv_layers = (int32_t)m->hp.n_layers,
        .n_kv_heads = (int32_t)m->hp.n_kv_heads,
        .head_dim = (int32_t)m->hp.head_dim,
        .max_batch = (int32_t)l->max_batch,
        .max_out = (int32_t)l->max_out,
        .n_ctx = (int32_t)l->n_ctx,
        .kv_key_type = l->kv_key_type,
        .kv_value_type = l->kv_value_type,
        .n_pages = (int32_t)l->n_pages,
    };
    return 0;
}
