/* The table of architectures, and what a model says about itself: hyper-parameters from its keys,
 * every one checked before it is used as a size, and its tensors matched by name and exact shape.
 * Refuses what would change the numbers and is not implemented: silence there gives wrong answers.
 * Owns the tensor list of struct model; the gguf stays the caller's. */
#include "engine/engine_internal.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum {
    MAX_LAYERS = 4096,
    MAX_WIDTH = 1 << 24, /* of any activation; keeps every product of two below 2^48 */
    MAX_CTX_KEPT = 1 << 30,
};

#define BIAS_ROLES (ROLE_BIT(ROLE_Q_BIAS) | ROLE_BIT(ROLE_K_BIAS) | ROLE_BIT(ROLE_V_BIAS))
#define NORM_ROLES (ROLE_BIT(ROLE_Q_NORM) | ROLE_BIT(ROLE_K_NORM))
#define FREE_ROLES (ROLE_BIT(ROLE_OUTPUT) | ROLE_BIT(ROLE_ROPE_FREQS) | ROLE_BIT(ROLE_O_BIAS))

static const struct arch archs[] = {
    {.name = "llama", .rope_halves = false, .need = 0, .allowed = FREE_ROLES | BIAS_ROLES},
    {.name = "qwen2", .rope_halves = true, .need = BIAS_ROLES, .allowed = FREE_ROLES},
    {.name = "qwen3", .rope_halves = true, .need = NORM_ROLES, .allowed = FREE_ROLES | BIAS_ROLES},
};

const char *arch_name_at(size_t i)
{
    return i < ARRAY_LEN(archs) ? archs[i].name : NULL;
}

const struct arch *arch_find(const char *name, size_t n)
{
    for (size_t i = 0; i < ARRAY_LEN(archs); i++)
        if (strlen(archs[i].name) == n && !memcmp(archs[i].name, name, n))
            return &archs[i];
    return NULL;
}

/* ---- tensors: names and shapes ---- */

enum dim { DIM_NONE, DIM_EMBD, DIM_Q, DIM_KV, DIM_FF, DIM_VOCAB, DIM_HEAD, DIM_ROT_HALF };

struct role_row {
    const char *name;     /* of a layer's tensors: what follows "blk.N." */
    enum dim n_in, n_out; /* n_out DIM_NONE: a vector */
};

static const struct role_row roles[ROLE_END] = {
    [ROLE_TOKEN_EMBD] = {"token_embd.weight", DIM_EMBD, DIM_VOCAB},
    [ROLE_OUTPUT_NORM] = {"output_norm.weight", DIM_EMBD, DIM_NONE},
    [ROLE_OUTPUT] = {"output.weight", DIM_EMBD, DIM_VOCAB},
    [ROLE_ROPE_FREQS] = {"rope_freqs.weight", DIM_ROT_HALF, DIM_NONE},
    [ROLE_ATTN_NORM] = {"attn_norm.weight", DIM_EMBD, DIM_NONE},
    [ROLE_Q] = {"attn_q.weight", DIM_EMBD, DIM_Q},
    [ROLE_K] = {"attn_k.weight", DIM_EMBD, DIM_KV},
    [ROLE_V] = {"attn_v.weight", DIM_EMBD, DIM_KV},
    [ROLE_Q_BIAS] = {"attn_q.bias", DIM_Q, DIM_NONE},
    [ROLE_K_BIAS] = {"attn_k.bias", DIM_KV, DIM_NONE},
    [ROLE_V_BIAS] = {"attn_v.bias", DIM_KV, DIM_NONE},
    [ROLE_Q_NORM] = {"attn_q_norm.weight", DIM_HEAD, DIM_NONE},
    [ROLE_K_NORM] = {"attn_k_norm.weight", DIM_HEAD, DIM_NONE},
    [ROLE_O] = {"attn_output.weight", DIM_Q, DIM_EMBD},
    [ROLE_O_BIAS] = {"attn_output.bias", DIM_EMBD, DIM_NONE},
    [ROLE_FFN_NORM] = {"ffn_norm.weight", DIM_EMBD, DIM_NONE},
    [ROLE_GATE] = {"ffn_gate.weight", DIM_EMBD, DIM_FF},
    [ROLE_UP] = {"ffn_up.weight", DIM_EMBD, DIM_FF},
    [ROLE_DOWN] = {"ffn_down.weight", DIM_FF, DIM_EMBD},
};

/* What every architecture of this shape has to have. */
static const uint32_t roles_always =
    ROLE_BIT(ROLE_TOKEN_EMBD) | ROLE_BIT(ROLE_OUTPUT_NORM) | ROLE_BIT(ROLE_ATTN_NORM) |
    ROLE_BIT(ROLE_Q) | ROLE_BIT(ROLE_K) | ROLE_BIT(ROLE_V) | ROLE_BIT(ROLE_O) |
    ROLE_BIT(ROLE_FFN_NORM) | ROLE_BIT(ROLE_GATE) | ROLE_BIT(ROLE_UP) | ROLE_BIT(ROLE_DOWN);

static uint64_t dim_size(enum dim d, const struct hparams *hp)
{
    switch (d) {
    case DIM_EMBD:
        return hp->n_embd;
    case DIM_Q:
        return (uint64_t)hp->n_heads * hp->head_dim;
    case DIM_KV:
        return (uint64_t)hp->n_kv_heads * hp->head_dim;
    case DIM_FF:
        return hp->n_ff;
    case DIM_VOCAB:
        return hp->n_vocab;
    case DIM_HEAD:
        return hp->head_dim;
    case DIM_ROT_HALF:
        return hp->n_rot / 2;
    case DIM_NONE:
        break;
    }
    return 1;
}

size_t model_n_tensors(const struct model *m)
{
    return ROLE_LAYER + (size_t)m->hp.n_layers * (ROLE_END - ROLE_LAYER);
}

struct model_tensor *model_tensor_at(const struct model *m, enum role role, uint32_t layer)
{
    CHECK(role < ROLE_LAYER || layer < m->hp.n_layers);
    size_t at = role < ROLE_LAYER ? (size_t)role : role + (size_t)layer * (ROLE_END - ROLE_LAYER);
    return &m->tensors[at];
}

bool model_tensor_is_vector(size_t i)
{
    size_t role = i < ROLE_LAYER ? i : ROLE_LAYER + (i - ROLE_LAYER) % (ROLE_END - ROLE_LAYER);
    return roles[role].n_out == DIM_NONE;
}

struct model_tensor *model_output(const struct model *m)
{
    struct model_tensor *out = model_tensor_at(m, ROLE_OUTPUT, 0);
    return out->t ? out : model_tensor_at(m, ROLE_TOKEN_EMBD, 0);
}

static int check_shape(const struct gguf_tensor *t, uint64_t n_in, uint64_t n_out, struct err *e)
{
    if (t->ne[0] == n_in && t->ne[1] == n_out && t->ne[2] == 1 && t->ne[3] == 1)
        return 0;
    char is[96];
    int at = 0;
    for (uint32_t i = 0; i < t->n_dims && i < 4; i++)
        at += snprintf(is + at, sizeof is - at, "%s%" PRIu64, i ? " x " : "", t->ne[i]);
    if (n_out == 1)
        return err_set(e, ERR_CORRUPT, "tensor %s is %s, but the model's keys ask for %" PRIu64,
                       t->name, is, n_in);
    return err_set(e, ERR_CORRUPT,
                   "tensor %s is %s, but the model's keys ask for %" PRIu64 " x %" PRIu64, t->name,
                   is, n_in, n_out);
}

static int find_tensor(struct model *m, const struct gguf *g, enum role role, uint32_t layer,
                       struct err *e)
{
    uint32_t need = roles_always | m->arch->need;
    if (!((need | m->arch->allowed) & ROLE_BIT(role)))
        return 0;
    char name[128];
    if (role < ROLE_LAYER)
        snprintf(name, sizeof name, "%s", roles[role].name);
    else
        snprintf(name, sizeof name, "blk.%u.%s", layer, roles[role].name);
    const struct gguf_tensor *t = gguf_find_tensor(g, name);
    if (!t) {
        if (!(need & ROLE_BIT(role)))
            return 0;
        return err_set(e, ERR_CORRUPT, "tensor %s is missing: this %s model is incomplete", name,
                       m->arch->name);
    }
    if (check_shape(t, dim_size(roles[role].n_in, &m->hp), dim_size(roles[role].n_out, &m->hp), e))
        return -1;
    model_tensor_at(m, role, layer)->t = t;
    uint64_t n = t->ne[0] * t->ne[1];
    m->n_params += n;
    m->n_bytes += t->n_bytes;
    return 0;
}

/* A tensor of a layer that this architecture does not use would change the layer's sum: refused.
 * Others are left aside, with a line in the log that names the first. */
static int check_extras(const struct model *m, const struct gguf *g, const bool *used,
                        struct err *e)
{
    const struct gguf_tensor *first = NULL;
    uint64_t n = 0;
    for (uint64_t i = 0; i < g->n_tensors; i++) {
        const struct gguf_tensor *t = &g->tensors[i];
        if (used[i])
            continue;
        if (!strncmp(t->name, "blk.", 4))
            return err_set(
                e, ERR_UNSUPPORTED,
                "tensor %s is not one that a %s layer (0 to %u, by %s.block_count) uses; "
                "ignoring it would change the answers",
                t->name, m->arch->name, m->hp.n_layers - 1, m->arch->name);
        n++;
        first = first ? first : t;
    }
    if (n)
        log_line(LOG_WARN, "%" PRIu64 " tensor%s of the file not used, the first is %s", n,
                 n == 1 ? " is" : "s are", first->name);
    return 0;
}

static int find_tensors(struct model *m, const struct gguf *g, struct err *e)
{
    m->tensors = mem_array(model_n_tensors(m), sizeof *m->tensors);
    if (!m->tensors)
        return err_set(e, ERR_MEMORY, "out of memory for the list of tensors");
    for (int r = 0; r < ROLE_LAYER; r++)
        if (find_tensor(m, g, r, 0, e))
            return -1;
    for (uint32_t l = 0; l < m->hp.n_layers; l++)
        for (int r = ROLE_LAYER; r < ROLE_END; r++)
            if (find_tensor(m, g, r, l, e))
                return -1;
    bool *used = mem_array(g->n_tensors, sizeof *used);
    if (!used)
        return err_set(e, ERR_MEMORY, "out of memory for the list of tensors");
    for (size_t i = 0; i < model_n_tensors(m); i++)
        if (m->tensors[i].t)
            used[m->tensors[i].t - g->tensors] = true;
    int rc = check_extras(m, g, used, e);
    mem_free(used);
    return rc;
}

/* ---- keys ---- */

struct keys {
    const struct gguf *g;
    const char *arch;
    uint32_t n_layers; /* for per-layer lists; set once known */
    char key[96];      /* the last one asked for, for messages */
};

static const char *key_of(struct keys *k, const char *suffix)
{
    snprintf(k->key, sizeof k->key, "%s.%s", k->arch, suffix);
    return k->key;
}

/* A number, or a list of one per layer that are all the same. */
static int key_number(uint32_t *v, struct keys *k, struct err *e)
{
    const struct gguf_kv *kv = gguf_find(k->g, k->key);
    if (!kv || kv->type != GGUF_ARRAY)
        return gguf_get_u32(k->g, k->key, v, e);
    if (kv->elem_type == GGUF_STRING || kv->elem_type == GGUF_FLOAT32 ||
        kv->elem_type == GGUF_FLOAT64)
        return err_set(e, ERR_CORRUPT, "%s is a list of something else than whole numbers", k->key);
    if (!k->n_layers || kv->n != k->n_layers)
        return err_set(e, ERR_CORRUPT, "%s lists %" PRIu64 " values, the model has %u layers",
                       k->key, kv->n, k->n_layers);
    int64_t first = gguf_kv_int(kv, 0);
    for (uint64_t i = 1; i < kv->n; i++)
        if (gguf_kv_int(kv, i) != first)
            return err_set(e, ERR_UNSUPPORTED,
                           "%s differs from layer to layer (%" PRId64 ", then %" PRId64
                           "); only models with equal layers are supported",
                           k->key, first, gguf_kv_int(kv, i));
    if (first < 0 || first > UINT32_MAX)
        return err_set(e, ERR_CORRUPT, "%s is out of range: %" PRId64, k->key, first);
    *v = (uint32_t)first;
    return 0;
}

/* *v keeps its value when the key is absent, which is an error when that value is 0. */
static int key_u32(uint32_t *v, struct keys *k, const char *suffix, uint32_t max, struct err *e)
{
    key_of(k, suffix);
    if (!gguf_find(k->g, k->key)) {
        if (*v)
            return 0;
        return err_set(e, ERR_CORRUPT, "key %s is missing", k->key);
    }
    uint32_t got = 0;
    if (key_number(&got, k, e))
        return -1;
    if (got < 1 || got > max)
        return err_set(e, ERR_CORRUPT, "%s is %u; it must be 1 to %u", k->key, got, max);
    *v = got;
    return 0;
}

static int key_f32(float *v, struct keys *k, const char *suffix, struct err *e)
{
    float got = *v;
    if (gguf_get_f32(k->g, key_of(k, suffix), &got, e))
        return -1;
    if (!isfinite(got) || got <= 0)
        return err_set(e, ERR_CORRUPT, "%s is %g; it must be a finite number above 0", k->key,
                       (double)got);
    *v = got;
    return 0;
}

/* Keys that change the arithmetic of a layer, with the value at which they do not. */
static const struct {
    const char *suffix, *what;
    float neutral;
} unsupported_keys[] = {
    {"expert_count", "mixture of experts", 0},
    {"expert_used_count", "mixture of experts", 0},
    {"attention.scale", "a scale of its own for attention", 0},
    {"attention.clamp_kqv", "clamped attention inputs", 0},
    {"attention.max_alibi_bias", "ALiBi positions", 0},
    {"attention.sliding_window_pattern", "a sliding window on some layers only", 0},
    {"attn_logit_softcapping", "soft caps", 0},
    {"final_logit_softcapping", "soft caps", 0},
    {"logit_scale", "a logit scale", 1},
    {"embedding_scale", "an embedding scale", 1},
    {"residual_scale", "a residual scale", 1},
};

static int check_unsupported(struct keys *k, struct err *e)
{
    for (size_t i = 0; i < ARRAY_LEN(unsupported_keys); i++) {
        const float neutral = unsupported_keys[i].neutral;
        float v = neutral;
        if (gguf_get_f32(k->g, key_of(k, unsupported_keys[i].suffix), &v, e))
            return -1;
        if (v != neutral && v != 0)
            return err_set(e, ERR_UNSUPPORTED, "%s is %g: %s is not supported for %s models",
                           k->key, (double)v, unsupported_keys[i].what, k->arch);
    }
    bool causal = true;
    if (gguf_get_bool(k->g, key_of(k, "attention.causal"), &causal, e))
        return -1;
    if (!causal)
        return err_set(e, ERR_UNSUPPORTED, "%s is false: only causal models are supported", k->key);
    return 0;
}

static int read_heads(struct hparams *hp, struct keys *k, struct err *e)
{
    if (key_u32(&hp->n_heads, k, "attention.head_count", 1 << 16, e))
        return -1;
    hp->n_kv_heads = hp->n_heads;
    if (key_u32(&hp->n_kv_heads, k, "attention.head_count_kv", 1 << 16, e))
        return -1;
    if (hp->n_heads % hp->n_kv_heads)
        return err_set(e, ERR_CORRUPT,
                       "%s is %u, which does not divide the %u heads of %s.attention.head_count",
                       k->key, hp->n_kv_heads, hp->n_heads, k->arch);
    if (!gguf_find(k->g, key_of(k, "attention.key_length"))) {
        if (hp->n_embd % hp->n_heads)
            return err_set(e, ERR_CORRUPT,
                           "%s.attention.head_count is %u, which does not divide "
                           "%s.embedding_length, %u",
                           k->arch, hp->n_heads, k->arch, hp->n_embd);
        hp->head_dim = hp->n_embd / hp->n_heads;
    }
    if (key_u32(&hp->head_dim, k, "attention.key_length", 1 << 14, e))
        return -1;
    uint32_t value_dim = hp->head_dim;
    if (key_u32(&value_dim, k, "attention.value_length", 1 << 14, e))
        return -1;
    if (value_dim != hp->head_dim)
        return err_set(e, ERR_UNSUPPORTED,
                       "%s is %u and the keys' length is %u: heads with two "
                       "sizes are not supported",
                       k->key, value_dim, hp->head_dim);
    if ((uint64_t)hp->n_heads * hp->head_dim > MAX_WIDTH)
        return err_set(e, ERR_CORRUPT, "%s.attention.head_count: %u heads of %u are too wide",
                       k->arch, hp->n_heads, hp->head_dim);
    return 0;
}

/* Linear scaling divides positions by the factor (Chen et al. 2023, "Extending context window of
 * large language models via position interpolation"); Llama 3's recipe comes as rope_freqs.weight.
 */
static int read_rope(struct model *m, struct keys *k, struct err *e)
{
    struct hparams *hp = &m->hp;
    hp->n_rot = hp->head_dim;
    if (key_u32(&hp->n_rot, k, "rope.dimension_count", MAX_WIDTH, e))
        return -1;
    if (hp->n_rot % 2 || hp->n_rot > hp->head_dim)
        return err_set(e, ERR_CORRUPT, "%s is %u; it must be even and at most the head size, %u",
                       key_of(k, "rope.dimension_count"), hp->n_rot, hp->head_dim);
    hp->rope_base = 10000;
    m->rope_mscale = 1;
    if (key_f32(&hp->rope_base, k, "rope.freq_base", e) ||
        key_f32(&m->rope_mscale, k, "rope.scaling.attn_factor", e))
        return -1;
    float factor = 1;
    if (key_f32(&factor, k, "rope.scale_linear", e) ||
        key_f32(&factor, k, "rope.scaling.factor", e))
        return -1;
    struct gguf_str type = {"linear", 6};
    if (gguf_get_str(k->g, key_of(k, "rope.scaling.type"), &type, e))
        return -1;
    if (type.n == 4 && !memcmp(type.p, "none", 4))
        factor = 1;
    else if (type.n != 6 || memcmp(type.p, "linear", 6))
        return err_set(e, ERR_UNSUPPORTED,
                       "%s is '%.*s'; supported are none, linear and a rope_freqs.weight tensor",
                       k->key, (int)MIN(type.n, 40u), type.p);
    hp->rope_freq_scale = 1 / factor;
    if (!isfinite(hp->rope_freq_scale) || hp->rope_freq_scale <= 0)
        return err_set(e, ERR_CORRUPT, "%s.rope.scaling.factor is %g, out of range", k->arch,
                       (double)factor);
    return 0;
}

static int read_hparams(struct model *m, struct keys *k, struct err *e)
{
    struct hparams *hp = &m->hp;
    if (key_u32(&hp->n_layers, k, "block_count", UINT32_MAX, e))
        return -1;
    if (hp->n_layers > MAX_LAYERS || hp->n_layers > k->g->n_tensors)
        return err_set(e, ERR_CORRUPT, "%s is %u, but the file has %" PRIu64 " tensors in all%s",
                       k->key, hp->n_layers, k->g->n_tensors,
                       hp->n_layers > MAX_LAYERS ? " and at most 4096 layers are supported" : "");
    k->n_layers = hp->n_layers;
    if (key_u32(&hp->n_ctx_train, k, "context_length", UINT32_MAX, e) ||
        key_u32(&hp->n_embd, k, "embedding_length", MAX_WIDTH, e) ||
        key_u32(&hp->n_ff, k, "feed_forward_length", MAX_WIDTH, e) || read_heads(hp, k, e))
        return -1;
    hp->n_ctx_train = MIN(hp->n_ctx_train, (uint32_t)MAX_CTX_KEPT);
    if (!gguf_find(k->g, key_of(k, "attention.layer_norm_rms_epsilon")))
        return err_set(e, ERR_CORRUPT, "key %s is missing", k->key);
    hp->norm_eps = 1;
    if (key_f32(&hp->norm_eps, k, "attention.layer_norm_rms_epsilon", e) || read_rope(m, k, e))
        return -1;
    if (gguf_get_u32(k->g, key_of(k, "attention.sliding_window"), &m->window, e))
        return -1;
    return check_unsupported(k, e);
}

/* The vocabulary is as long as the embedding has rows; the tokenizer must agree with that. */
static int read_vocab(struct model *m, const struct gguf *g, struct err *e)
{
    const struct gguf_tensor *t = gguf_find_tensor(g, "token_embd.weight");
    if (!t)
        return err_set(e, ERR_CORRUPT,
                       "tensor token_embd.weight is missing: this %s model is "
                       "incomplete",
                       m->arch->name);
    if (t->ne[1] < 1 || t->ne[1] > MAX_WIDTH)
        return err_set(e, ERR_CORRUPT,
                       "tensor token_embd.weight has %" PRIu64 " rows, a vocabulary "
                       "of 1 to %d is supported",
                       t->ne[1], MAX_WIDTH);
    m->hp.n_vocab = (uint32_t)t->ne[1];
    const struct gguf_kv *kv = gguf_find(g, "tokenizer.ggml.tokens");
    if (kv && kv->type == GGUF_ARRAY && kv->n != m->hp.n_vocab)
        return err_set(e, ERR_CORRUPT,
                       "tensor token_embd.weight has %u rows, but "
                       "tokenizer.ggml.tokens lists %" PRIu64 " tokens",
                       m->hp.n_vocab, kv->n);
    return 0;
}

static int read_arch(struct model *m, const struct gguf *g, struct err *e)
{
    struct gguf_str name = {0};
    if (gguf_get_str(g, "general.architecture", &name, e))
        return -1;
    if (!name.n)
        return err_set(e, ERR_CORRUPT, "key general.architecture is missing or empty");
    m->arch = arch_find(name.p, name.n);
    if (m->arch)
        return 0;
    struct buf known = {0};
    for (size_t i = 0; i < ARRAY_LEN(archs); i++)
        buf_printf(&known, "%s%s", i ? ", " : "", archs[i].name);
    err_set(e, ERR_UNSUPPORTED,
            "general.architecture is '%.*s'%s, an unknown architecture; known: %s",
            (int)MIN(name.n, 40u), name.p, name.n > 40 ? "..." : "", buf_str(&known));
    buf_fini(&known);
    return -1;
}

int model_describe(struct model *m, const struct gguf *g, struct err *e)
{
    if (read_arch(m, g, e))
        return -1;
    struct keys k = {.g = g, .arch = m->arch->name};
    if (read_hparams(m, &k, e) || read_vocab(m, g, e))
        return -1;
    return find_tensors(m, g, e) || gguf_verify(g, false, e) ? -1 : 0;
}

void model_fini(struct model *m)
{
    mem_free(m->tensors);
    mem_free(m->rope_freqs);
    *m = (struct model){0};
}
