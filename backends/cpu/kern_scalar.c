/* Scalar kernels: the readable statement of what each operation means, and the twin that every SIMD
 * level is compared with. Runs on any CPU. Works on memory of the caller. */
#include "backends/cpu/kv_layout.h"

#include <math.h>
#include <string.h>

enum { R = 8 }; /* lanes of a panel here, as on AVX2 */

static float half_at(const uint8_t *p, int i)
{
    uint16_t h;
    memcpy(&h, p + 2 * i, 2);
    return f16_to_f32(h);
}

/* One lane's sum over one sub-block of 32 inputs, in float. */
static float sub_dot(const struct pack_info *info, const uint8_t *sub, const float head[2],
                     int lane, const struct mm *m, int64_t at)
{
    size_t ns = info->scale_bytes, nm = info->min_bytes;
    const int8_t *sc = (const int8_t *)sub + ns * (size_t)lane;
    const int8_t *mn = (const int8_t *)sub + ns * R + nm * (size_t)lane;
    const uint8_t *low = sub + (ns + nm) * R;
    const int8_t *a = m->a->q + at / m->a->n_blocks * m->a->q_stride + at % m->a->n_blocks * 32;
    uint8_t q[ACT_BLOCK];
    pack_codes(q, info, low, low + (size_t)info->low_bytes * R, R, lane);
    int32_t dot[2] = {0, 0}, sum[2] = {0, 0};
    for (int i = 0; i < 32; i++) {
        int v = info->kind == PACK_SIGNED                                ? (int8_t)q[i]
                : info->kind == PACK_TABLE || info->kind == PACK_K_TABLE ? gguf_iq4nl_values[q[i]]
                                                                         : q[i] - info->zero;
        dot[i / 16] += v * a[i];
        sum[i / 16] += a[i];
    }
    int32_t total = ns == 2   ? dot[0] * sc[0] + dot[1] * sc[1]
                    : ns == 1 ? (dot[0] + dot[1]) * sc[0]
                              : dot[0] + dot[1];
    int32_t mins = nm == 2   ? sum[0] * mn[0] + sum[1] * mn[1]
                   : nm == 1 ? (sum[0] + sum[1]) * mn[0]
                             : 0;
    float y = (float)total * head[0];
    if (nm)
        y -= (float)mins * head[1];
    if (info->kind == PACK_MIN)
        y += (float)(sum[0] + sum[1]) * head[1];
    return y * m->a->d[at];
}

static float quant_dot(const struct mm *m, const uint8_t *panel, int lane, int32_t row)
{
    const struct pack_info *info = m->w->info;
    size_t sub_bytes =
        R * ((size_t)info->scale_bytes + info->min_bytes + info->low_bytes + info->high_bytes);
    int64_t n_units = m->w->n_in / (32 * info->n_sub), at = (int64_t)row * m->a->n_blocks;
    float y = 0;
    for (int64_t u = 0; u < n_units; u++) {
        float head[2] = {half_at(panel, lane), info->n_head > 1 ? half_at(panel, R + lane) : 0};
        panel += (size_t)info->n_head * 2 * R;
        for (int s = 0; s < info->n_sub; s++, panel += sub_bytes, at++)
            y += sub_dot(info, panel, head, lane, m, at);
    }
    return y;
}

static float float_dot(const struct mm *m, const uint8_t *panel, int lane, int32_t row)
{
    const float *x = m->a->x + (int64_t)row * m->a->x_stride;
    int64_t n = m->w->n_in;
    float y[2] = {0, 0}; /* two partial sums, as the SIMD levels keep */
    for (int64_t i = 0; i < n; i++) {
        float v;
        uint16_t h;
        if (m->w->info->type == GGUF_F32) {
            memcpy(&v, panel + (i * R + lane) * 4, 4);
        } else {
            memcpy(&h, panel + (i * R + lane) * 2, 2);
            v = m->w->info->type == GGUF_F16 ? f16_to_f32(h) : bf16_to_f32(h);
        }
        y[i & 1] += v * x[i];
    }
    return y[0] + y[1];
}

static void matmul(const struct mm *m)
{
    bool is_float = m->w->info->kind == PACK_FLOAT;
    for (int32_t p = m->panel; p < m->panel_end; p++) {
        const uint8_t *panel = m->w->data + (size_t)p * m->w->panel_bytes;
        for (int32_t row = m->row; row < m->row_end; row++)
            for (int lane = 0; lane < R; lane++) {
                int32_t o = p * R + lane;
                float y =
                    is_float ? float_dot(m, panel, lane, row) : quant_dot(m, panel, lane, row);
                if (m->bias)
                    y += m->bias[o];
                if (m->add)
                    y += m->add[(int64_t)row * m->add_stride + o];
                m->out[(int64_t)row * m->out_stride + o] = y;
            }
    }
}

static void quantize(const struct act *a, const float *x, int32_t row, int32_t n_in)
{
    int8_t *q = a->q + (int64_t)row * a->q_stride;
    for (int32_t b = 0; b < n_in / 32; b++, x += 32, q += 32) {
        float max = 0, bad = 0;
        for (int i = 0; i < 32; i++) {
            max = fmaxf(max, fabsf(x[i]));
            bad += x[i] * 0; /* NaN once x is not finite */
        }
        float d = max / 127 + bad, inv = max > ACT_TINY ? 127 / max : 0;
        int sum[2] = {0, 0};
        for (int i = 0; i < 32; i++) {
            q[i] = (int8_t)lrintf(x[i] * inv);
            sum[i / 16] += q[i];
        }
        int64_t at = (int64_t)row * a->n_blocks + b;
        a->d[at] = d;
        a->s[at] = d * (float)(sum[0] + sum[1]);
        a->sums[at] = (int32_t)((uint32_t)(uint16_t)sum[0] | (uint32_t)(uint16_t)sum[1] << 16);
    }
}

static void norm(float *out, const float *in, const float *w, int32_t n, float eps)
{
    double sum = 0;
    for (int32_t i = 0; i < n; i++)
        sum += (double)in[i] * in[i];
    float scale = (float)(1 / sqrt(sum / n + (double)eps));
    for (int32_t i = 0; i < n; i++)
        out[i] = in[i] * scale * w[i];
}

/* SiLU gate: Elfwing et al. 2018, x * sigmoid(x); as gated unit: Shazeer 2020 (SwiGLU). */
static void glu(float *out, const float *gate, const float *up, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        out[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
}

/* ---- KV: what a value becomes when it is kept, and what it is when it is read ---- */

/* Scales as the GGUF types have them, max|x| / 127 and (the value of largest magnitude) / -8; codes
 * are rounded against the scale as it is kept. A block with an infinity or a NaN has a scale of
 * NaN. */
static void kv_quantize(struct kv_block *b, const float *x, enum kv_type type)
{
    float max = 0, min = 0, bad = 0, lo = type == KV_Q8_0 ? -127 : -8;
    float hi = type == KV_Q8_0 ? 127 : 7;
    for (int i = 0; i < KV_BLOCK; i++) {
        max = fmaxf(max, x[i]);
        min = fminf(min, x[i]);
        bad += x[i] * 0;
    }
    float d = type == KV_Q8_0 ? fmaxf(max, -min) / 127 : (-min >= max ? min : max) / -8;
    b->scale = f32_to_f16(d + bad);
    d = f16_to_f32(b->scale);
    float inv = d != 0 && isfinite(d) ? 1 / d : 0;
    for (int i = 0; i < KV_BLOCK; i++) {
        float v = x[i] * inv;
        v = v > lo ? v : lo; /* NaN too */
        b->q[i] = (int8_t)lrintf(v < hi ? v : hi);
    }
}

static void plain_put(void *dst, int64_t i, float x, enum kv_type type)
{
    if (type == KV_F32)
        ((float *)dst)[i] = x;
    else
        ((uint16_t *)dst)[i] = type == KV_F16 ? f32_to_f16(x) : f32_to_bf16(x);
}

static void key_put(void *k, const float *src, int32_t head_dim, int32_t at, enum kv_type type)
{
    struct kv_block b;
    for (int32_t d = 0; !kv_is_blocks(type) && d < head_dim; d++)
        plain_put(k, (int64_t)d * KV_PAGE_TOKENS + at, src[d], type);
    for (int32_t d = 0; kv_is_blocks(type) && d < head_dim; d += KV_BLOCK) {
        kv_quantize(&b, src + d, type);
        kv_block_put(k, kv_key_place(d / KV_BLOCK, at, type), &b, type);
    }
}

static void value_put(void *v, const float *src, int32_t head_dim, int32_t at, enum kv_type type)
{
    struct kv_block b;
    for (int32_t d = 0; !kv_is_blocks(type) && d < head_dim; d++)
        plain_put(v, (int64_t)at * head_dim + d, src[d], type);
    for (int32_t d = 0; kv_is_blocks(type) && d < head_dim; d += KV_BLOCK) {
        kv_quantize(&b, src + d, type);
        kv_block_put(v, kv_value_place(d / KV_BLOCK, at, head_dim, type), &b, type);
    }
}

static float plain_at(const void *p, int64_t i, enum kv_type type)
{
    if (type == KV_F32)
        return ((const float *)p)[i];
    uint16_t h = ((const uint16_t *)p)[i];
    return type == KV_F16 ? f16_to_f32(h) : bf16_to_f32(h);
}

/* Value i of the block at p. */
static float block_at(const uint8_t *head, struct kv_place p, int i, enum kv_type type)
{
    float scale = half_at(head + p.scale, 0);
    if (type == KV_Q8_0)
        return (float)(int8_t)head[p.codes + (size_t)i * p.step] * scale;
    uint8_t q = head[p.codes + (size_t)(i % 16) * p.step];
    return (float)((i < 16 ? q & 15 : q >> 4) - 8) * scale;
}

static float key_at(const void *k, int32_t d, int32_t at, enum kv_type type)
{
    return kv_is_blocks(type)
               ? block_at(k, kv_key_place(d / KV_BLOCK, at, type), d % KV_BLOCK, type)
               : plain_at(k, (int64_t)d * KV_PAGE_TOKENS + at, type);
}

static float value_at(const void *v, int32_t d, int32_t at, int32_t head_dim, enum kv_type type)
{
    return kv_is_blocks(type)
               ? block_at(v, kv_value_place(d / KV_BLOCK, at, head_dim, type), d % KV_BLOCK, type)
               : plain_at(v, (int64_t)at * head_dim + d, type);
}

/* One query over its pages with a running maximum and sum (Milakov & Gimelshein 2018; Dao et al.
 * 2022, algorithm 1): after each page, out = sum exp(s - max) v and l = sum exp(s - max). */
static void attend(const struct attn *a, float *out, const float *q, int32_t pos)
{
    float max = -INFINITY, l = 0, p[KV_PAGE_TOKENS];
    memset(out, 0, sizeof *out * (size_t)a->head_dim);
    int32_t start = window_start(pos, a->window);
    for (int32_t page = start / KV_PAGE_TOKENS; page <= pos / KV_PAGE_TOKENS; page++) {
        size_t off = (size_t)a->pages[page] * a->page_stride;
        const void *k = (const char *)a->k_base + off, *v = (const char *)a->v_base + off;
        int32_t first = page * KV_PAGE_TOKENS, t0 = MAX(start - first, 0);
        int32_t n = MIN(pos + 1 - first, KV_PAGE_TOKENS);
        float new_max = max;
        for (int32_t t = t0; t < n; t++) {
            float s = 0;
            for (int32_t d = 0; d < a->head_dim; d++)
                s += q[d] * key_at(k, d, t, a->key_type);
            p[t] = s * a->scale;
            new_max = fmaxf(new_max, p[t]);
        }
        float shrink = expf(max - new_max);
        max = new_max;
        l *= shrink;
        for (int32_t d = 0; d < a->head_dim; d++)
            out[d] *= shrink;
        for (int32_t t = t0; t < n; t++) {
            p[t] = expf(p[t] - max);
            l += p[t];
            for (int32_t d = 0; d < a->head_dim; d++)
                out[d] += p[t] * value_at(v, d, t, a->head_dim, a->value_type);
        }
    }
    for (int32_t d = 0; d < a->head_dim; d++)
        out[d] /= l;
}

static void attention(const struct attn *a)
{
    for (int32_t row = 0; row < a->n_rows; row++)
        for (int32_t h = 0; h < a->n_heads_group; h++)
            attend(a, a->out + (int64_t)row * a->out_stride + h * a->head_dim,
                   a->q + (int64_t)row * a->q_stride + h * a->head_dim, a->pos + row);
}

static double int8_peak(int64_t rounds)
{
    int8_t w[32], a[32];
    int32_t sum = 0;
    memset(w, 3, sizeof w);
    memset(a, 1, sizeof a);
    for (int64_t r = 0; r < rounds; r++) {
        __asm__ volatile("" ::"r"(w), "r"(a) : "memory");
        for (int i = 0; i < 32; i++)
            sum += w[i] * a[i];
    }
    __asm__ volatile("" ::"r"(sum));
    return (double)rounds * 32;
}

const struct kernels kernels_scalar = {
    .name = "scalar",
    .lanes = R,
    .matmul = matmul,
    .quantize = quantize,
    .norm = norm,
    .glu = glu,
    .attention = attention,
    .key_put = key_put,
    .value_put = value_put,
    .int8_peak = int8_peak,
};
