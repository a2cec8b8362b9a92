/* The oracle, see oracle.h. Reads keys and tensors itself and keeps every weight as doubles in its
 * arena; a run's intermediates live until the run ends. Refuses architectures it does not know. */
#include "tests/unit/oracle.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- reading ---- */

struct reading {
    struct oracle *o;
    const struct gguf *g;
    char arch[32];
    struct err *e;
};

/* A key of the architecture; absent ones keep *v. */
static int get_u32(struct reading *r, uint32_t *v, const char *name)
{
    char key[128];
    snprintf(key, sizeof key, "%s.%s", r->arch, name);
    return gguf_get_u32(r->g, key, v, r->e);
}

static int get_f32(struct reading *r, double *v, const char *name)
{
    char key[128];
    float f = (float)*v;
    snprintf(key, sizeof key, "%s.%s", r->arch, name);
    if (gguf_get_f32(r->g, key, &f, r->e))
        return -1;
    *v = (double)f;
    return 0;
}

/* All numbers of a tensor as doubles. An optional one that is absent leaves NULL. */
static int get_tensor(struct reading *r, double **out, const char *name, const uint64_t ne[2],
                      bool optional)
{
    const struct gguf_tensor *t = gguf_find_tensor(r->g, name);
    if (!t)
        return optional ? 0 : err_set(r->e, ERR_CORRUPT, "oracle: no tensor '%s'", name);
    if (t->ne[0] != ne[0] || t->ne[1] != ne[1] || t->ne[2] != 1 || t->ne[3] != 1)
        return err_set(r->e, ERR_CORRUPT, "oracle: tensor '%s' is %llu x %llu, not %llu x %llu",
                       name, (unsigned long long)t->ne[0], (unsigned long long)t->ne[1],
                       (unsigned long long)ne[0], (unsigned long long)ne[1]);
    const struct gguf_dtype_info *info = gguf_dtype_find(t->type);
    const char *src = gguf_tensor_data(r->g, t);
    CHECK(info && src);
    float *row = mem_array(ne[0], sizeof *row);
    *out = arena_alloc(&r->o->arena, ne[0] * ne[1] * sizeof **out);
    if (!row || !*out) {
        mem_free(row);
        return err_set(r->e, ERR_MEMORY, "oracle: no memory for tensor '%s'", name);
    }
    for (uint64_t i = 0; i < ne[1]; i++) {
        info->to_f32(row, src + i * (t->n_bytes / ne[1]), ne[0]);
        for (uint64_t j = 0; j < ne[0]; j++)
            (*out)[i * ne[0] + j] = (double)row[j];
    }
    mem_free(row);
    return 0;
}

static int get_layer(struct reading *r, uint32_t layer)
{
    struct oracle *o = r->o;
    struct oracle_layer *l = &o->layers[layer];
    uint64_t w = o->width, q = (uint64_t)o->n_heads * o->head_dim;
    uint64_t kv = (uint64_t)o->n_kv_heads * o->head_dim, f = o->n_ffn, d = o->head_dim;
    const struct {
        const char *name;
        double **out;
        uint64_t ne[2];
        bool optional;
    } t[] = {
        {"attn_norm.weight", &l->attn_norm, {w, 1}, false},
        {"attn_q.weight", &l->q, {w, q}, false},
        {"attn_k.weight", &l->k, {w, kv}, false},
        {"attn_v.weight", &l->v, {w, kv}, false},
        {"attn_q.bias", &l->q_bias, {q, 1}, true},
        {"attn_k.bias", &l->k_bias, {kv, 1}, true},
        {"attn_v.bias", &l->v_bias, {kv, 1}, true},
        {"attn_q_norm.weight", &l->q_norm, {d, 1}, true},
        {"attn_k_norm.weight", &l->k_norm, {d, 1}, true},
        {"attn_output.weight", &l->output, {q, w}, false},
        {"attn_output.bias", &l->output_bias, {w, 1}, true},
        {"ffn_norm.weight", &l->ffn_norm, {w, 1}, false},
        {"ffn_gate.weight", &l->gate, {w, f}, false},
        {"ffn_up.weight", &l->up, {w, f}, false},
        {"ffn_down.weight", &l->down, {f, w}, false},
    };
    for (size_t i = 0; i < ARRAY_LEN(t); i++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%u.%s", layer, t[i].name);
        if (get_tensor(r, t[i].out, name, t[i].ne, t[i].optional))
            return -1;
    }
    return 0;
}

static int get_keys(struct reading *r)
{
    struct oracle *o = r->o;
    struct gguf_str arch = {0}, scaling = {0};
    if (gguf_get_str(r->g, "general.architecture", &arch, r->e))
        return -1;
    snprintf(r->arch, sizeof r->arch, "%.*s", (int)MIN(arch.n, 31u), arch.p ? arch.p : "");
    bool llama = !strcmp(r->arch, "llama");
    if (!llama && strcmp(r->arch, "qwen2") && strcmp(r->arch, "qwen3"))
        return err_set(r->e, ERR_UNSUPPORTED, "oracle: architecture '%s' is not known", r->arch);
    uint32_t n_experts = 0;
    o->rope_halves = !llama;
    o->rope_base = 10000;
    if (get_u32(r, &o->n_layers, "block_count") || get_u32(r, &o->width, "embedding_length") ||
        get_u32(r, &o->n_heads, "attention.head_count") ||
        get_u32(r, &o->n_ffn, "feed_forward_length") || get_u32(r, &n_experts, "expert_count") ||
        get_f32(r, &o->rope_base, "rope.freq_base") ||
        get_u32(r, &o->window, "attention.sliding_window") ||
        get_f32(r, &o->epsilon, "attention.layer_norm_rms_epsilon"))
        return -1;
    o->n_kv_heads = o->n_heads;
    o->head_dim = o->n_heads ? o->width / o->n_heads : 0;
    if (get_u32(r, &o->n_kv_heads, "attention.head_count_kv") ||
        get_u32(r, &o->head_dim, "attention.key_length"))
        return -1;
    o->n_rot = o->head_dim;
    char key[64];
    snprintf(key, sizeof key, "%s.rope.scaling.type", r->arch);
    if (get_u32(r, &o->n_rot, "rope.dimension_count") || gguf_get_str(r->g, key, &scaling, r->e))
        return -1;
    if (n_experts || (scaling.p && !(scaling.n == 4 && !memcmp(scaling.p, "none", 4))))
        return err_set(r->e, ERR_UNSUPPORTED, "oracle: experts and rope scaling are not known");
    if (!o->n_layers || !o->width || !o->head_dim || !o->n_kv_heads || !o->n_ffn ||
        o->n_heads % o->n_kv_heads || o->n_rot > o->head_dim || o->n_rot % 2 || !(o->epsilon > 0))
        return err_set(r->e, ERR_CORRUPT, "oracle: the model's sizes do not fit each other");
    return 0;
}

int oracle_init(struct oracle *o, const struct gguf *g, struct err *e)
{
    struct reading r = {.o = o, .g = g, .e = e};
    *o = (struct oracle){0};
    const struct gguf_tensor *embedding = gguf_find_tensor(g, "token_embd.weight");
    if (get_keys(&r))
        goto bad;
    o->n_vocab = embedding ? (uint32_t)embedding->ne[1] : 0;
    const uint64_t rows[2] = {o->width, o->n_vocab}, vector[2] = {o->width, 1};
    const uint64_t pairs[2] = {o->n_rot / 2, 1};
    o->layers = arena_alloc(&o->arena, o->n_layers * sizeof *o->layers);
    if (!o->layers) {
        err_set(e, ERR_MEMORY, "oracle: no memory");
        goto bad;
    }
    if (get_tensor(&r, &o->embedding, "token_embd.weight", rows, false) ||
        get_tensor(&r, &o->output, "output.weight", rows, true) ||
        get_tensor(&r, &o->output_norm, "output_norm.weight", vector, false) ||
        get_tensor(&r, &o->rope_factors, "rope_freqs.weight", pairs, true))
        goto bad;
    if (!o->output)
        o->output = o->embedding;
    for (uint32_t i = 0; i < o->n_layers; i++)
        if (get_layer(&r, i))
            goto bad;
    return 0;
bad:
    oracle_fini(o);
    return -1;
}

void oracle_fini(struct oracle *o)
{
    arena_fini(&o->arena);
    *o = (struct oracle){0};
}

/* ---- operations: y[rows][out] from x[rows][in] ---- */

struct run {
    const struct oracle *o;
    size_t n; /* positions */
    int layer;
    oracle_see see;
    void *user;
};

static void show(const struct run *r, const char *name, const double *v, size_t width)
{
    if (r->see)
        r->see(r->user, name, r->layer, v, r->n, width);
}

static void matmul(double *y, const struct run *r, const double *x, const double *w, size_t in,
                   size_t out)
{
    for (size_t i = 0; i < r->n; i++)
        for (size_t j = 0; j < out; j++) {
            double sum = 0;
            for (size_t k = 0; k < in; k++)
                sum += x[i * in + k] * w[j * in + k];
            y[i * out + j] = sum;
        }
}

static void add_rows(double *y, const double *bias, size_t n, size_t width)
{
    for (size_t i = 0; bias && i < n * width; i++)
        y[i] += bias[i % width];
}

/* Zhang and Sennrich 2019, "Root mean square layer normalization", eq. 4. y may be x. */
static void rms_norm(double *y, const double *x, const double *w, size_t n_rows, size_t width,
                     double epsilon)
{
    for (size_t i = 0; i < n_rows; i++, x += width, y += width) {
        double squares = 0;
        for (size_t j = 0; j < width; j++)
            squares += x[j] * x[j];
        double scale = 1 / sqrt(squares / (double)width + epsilon);
        for (size_t j = 0; j < width; j++)
            y[j] = x[j] * scale * w[j];
    }
}

/* Su et al. 2021, "RoFormer", section 3.2.2: pair i of each head turns by position *
 * base^(-2i/n_rot), the frequency divided by factor i where the model has factors. */
static void rope(double *v, const struct run *r, size_t n_heads)
{
    const struct oracle *o = r->o;
    size_t half = o->n_rot / 2;
    for (size_t pos = 0; pos < r->n; pos++)
        for (size_t h = 0; h < n_heads; h++, v += o->head_dim)
            for (size_t i = 0; i < half; i++) {
                double freq = pow(o->rope_base, -2.0 * (double)i / (double)o->n_rot);
                double angle = (double)pos * freq / (o->rope_factors ? o->rope_factors[i] : 1);
                double *a = o->rope_halves ? &v[i] : &v[2 * i];
                double *b = o->rope_halves ? &v[i + half] : &v[2 * i + 1];
                double x = *a, y = *b;
                *a = x * cos(angle) - y * sin(angle);
                *b = x * sin(angle) + y * cos(angle);
            }
}

/* Vaswani et al. 2017, eq. 1, causal; a group of query heads shares a key/value head (Ainslie et
 * al. 2023). p is scratch of n numbers. */
static void attention(double *y, const struct run *r, const double *q, const double *k,
                      const double *v, double *p)
{
    const struct oracle *o = r->o;
    size_t d = o->head_dim, group = o->n_heads / o->n_kv_heads;
    for (size_t i = 0; i < r->n; i++)
        for (size_t h = 0; h < o->n_heads; h++) {
            const double *query = q + (i * o->n_heads + h) * d;
            double max = -INFINITY, sum = 0, *out = y + (i * o->n_heads + h) * d;
            size_t first = o->window && i >= o->window ? i - o->window + 1 : 0;
            for (size_t t = first; t <= i; t++) {
                const double *key = k + (t * o->n_kv_heads + h / group) * d;
                p[t] = 0;
                for (size_t c = 0; c < d; c++)
                    p[t] += query[c] * key[c];
                p[t] /= sqrt((double)d);
                max = fmax(max, p[t]);
            }
            for (size_t t = first; t <= i; t++)
                sum += p[t] = exp(p[t] - max);
            for (size_t c = 0; c < d; c++) {
                out[c] = 0;
                for (size_t t = first; t <= i; t++)
                    out[c] += p[t] / sum * v[(t * o->n_kv_heads + h / group) * d + c];
            }
        }
}

/* ---- the pass ---- */

struct slots { /* [n] positions of each width; one allocation lifetime: the run */
    double *hidden, *norm, *branch; /* [width] */
    double *q, *attended;           /* [n_heads * head_dim] */
    double *k, *v;                  /* [n_kv_heads * head_dim] */
    double *gate, *up;              /* [n_ffn] */
    double *p;                      /* n numbers in all */
};

static bool slots_init(struct slots *s, struct arena *a, const struct oracle *o, size_t n)
{
    size_t q = (size_t)o->n_heads * o->head_dim, kv = (size_t)o->n_kv_heads * o->head_dim;
    const struct {
        double **slot;
        size_t width;
    } all[] = {
        {&s->hidden, o->width},
        {&s->norm, o->width},
        {&s->branch, o->width},
        {&s->q, q},
        {&s->attended, q},
        {&s->k, kv},
        {&s->v, kv},
        {&s->gate, o->n_ffn},
        {&s->up, o->n_ffn},
        {&s->p, 1},
    };
    for (size_t i = 0; i < ARRAY_LEN(all); i++)
        if (!(*all[i].slot = arena_alloc(a, n * all[i].width * sizeof(double))))
            return false;
    return true;
}

static void run_attention(const struct run *r, struct slots *s, const struct oracle_layer *l)
{
    const struct oracle *o = r->o;
    size_t n = r->n, w = o->width, d = o->head_dim, q = o->n_heads * d, kv = o->n_kv_heads * d;
    rms_norm(s->norm, s->hidden, l->attn_norm, n, w, o->epsilon);
    show(r, "attn_norm", s->norm, w);
    matmul(s->q, r, s->norm, l->q, w, q);
    matmul(s->k, r, s->norm, l->k, w, kv);
    matmul(s->v, r, s->norm, l->v, w, kv);
    add_rows(s->q, l->q_bias, n, q);
    add_rows(s->k, l->k_bias, n, kv);
    add_rows(s->v, l->v_bias, n, kv);
    show(r, "q", s->q, q);
    show(r, "k", s->k, kv);
    show(r, "v", s->v, kv);
    if (l->q_norm)
        rms_norm(s->q, s->q, l->q_norm, n * o->n_heads, d, o->epsilon);
    if (l->k_norm)
        rms_norm(s->k, s->k, l->k_norm, n * o->n_kv_heads, d, o->epsilon);
    rope(s->q, r, o->n_heads);
    rope(s->k, r, o->n_kv_heads);
    show(r, "q_rope", s->q, q);
    show(r, "k_rope", s->k, kv);
    attention(s->attended, r, s->q, s->k, s->v, s->p);
    show(r, "attention", s->attended, q);
    matmul(s->branch, r, s->attended, l->output, q, w);
    add_rows(s->branch, l->output_bias, n, w);
    show(r, "attn_output", s->branch, w);
    for (size_t i = 0; i < n * w; i++)
        s->hidden[i] += s->branch[i];
    show(r, "attn_residual", s->hidden, w);
}

/* Shazeer 2020, "GLU variants improve transformer", eq. 6 (SwiGLU). */
static void run_ffn(const struct run *r, struct slots *s, const struct oracle_layer *l)
{
    const struct oracle *o = r->o;
    size_t n = r->n, w = o->width, f = o->n_ffn;
    rms_norm(s->norm, s->hidden, l->ffn_norm, n, w, o->epsilon);
    show(r, "ffn_norm", s->norm, w);
    matmul(s->gate, r, s->norm, l->gate, w, f);
    matmul(s->up, r, s->norm, l->up, w, f);
    show(r, "ffn_gate", s->gate, f);
    show(r, "ffn_up", s->up, f);
    for (size_t i = 0; i < n * f; i++)
        s->gate[i] = s->gate[i] / (1 + exp(-s->gate[i])) * s->up[i];
    show(r, "ffn_act", s->gate, f);
    matmul(s->branch, r, s->gate, l->down, f, w);
    show(r, "ffn_output", s->branch, w);
    for (size_t i = 0; i < n * w; i++)
        s->hidden[i] += s->branch[i];
    show(r, "layer_output", s->hidden, w);
}

int oracle_run(double *logits, const struct oracle *o, const int32_t *ids, size_t n, oracle_see see,
               void *user)
{
    struct run r = {.o = o, .n = n, .layer = -1, .see = see, .user = user};
    struct slots s = {0};
    struct arena arena = {0};
    if (!slots_init(&s, &arena, o, n)) {
        arena_fini(&arena);
        return -1;
    }
    for (size_t i = 0; i < n; i++) {
        CHECK(ids[i] >= 0 && (uint32_t)ids[i] < o->n_vocab);
        memcpy(s.hidden + i * o->width, o->embedding + (size_t)ids[i] * o->width,
               o->width * sizeof *s.hidden);
    }
    show(&r, "embedding", s.hidden, o->width);
    for (r.layer = 0; r.layer < (int)o->n_layers; r.layer++) {
        run_attention(&r, &s, &o->layers[r.layer]);
        run_ffn(&r, &s, &o->layers[r.layer]);
    }
    r.layer = -1;
    rms_norm(s.norm, s.hidden, o->output_norm, n, o->width, o->epsilon);
    show(&r, "output_norm", s.norm, o->width);
    matmul(logits, &r, s.norm, o->output, o->width, o->n_vocab);
    show(&r, "logits", logits, o->n_vocab);
    arena_fini(&arena);
    return 0;
}

int oracle_file(double **logits, uint32_t *n_vocab, const char *path, const int32_t *ids, size_t n,
                struct err *e)
{
    struct gguf *g = NULL;
    struct oracle o = {0};
    int rc = -1;
    *logits = NULL;
    if (gguf_open(&g, path, e) || oracle_init(&o, g, e))
        goto out;
    *n_vocab = o.n_vocab;
    *logits = mem_array(n * o.n_vocab, sizeof **logits);
    if (!*logits || oracle_run(*logits, &o, ids, n, NULL, NULL)) {
        mem_free(*logits);
        *logits = NULL;
        err_set(e, ERR_MEMORY, "oracle: no memory for %zu positions", n);
        goto out;
    }
    rc = 0;
out:
    oracle_fini(&o);
    gguf_free(g);
    return rc;
}
