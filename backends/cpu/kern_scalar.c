/* Scalar kernels: the readable statement of what each operation means, and the twin that every SIMD
 * level is compared with. Runs on any CPU. Works on memory of the caller. */
#include "backends/cpu/cpu_internal.h"

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

static void kv_put(void *dst, const float *src, int32_t n, int32_t step, enum kv_type type)
{
    for (int32_t i = 0; i < n; i++)
        if (type == KV_F32)
            ((float *)dst)[(int64_t)i * step] = src[i];
        else
            ((uint16_t *)dst)[(int64_t)i * step] = f32_to_f16(src[i]);
}

static float kv_at(const void *p, int64_t i, enum kv_type type)
{
    return type == KV_F32 ? ((const float *)p)[i] : f16_to_f32(((const uint16_t *)p)[i]);
}

/* One query over its pages with a running maximum and sum (Milakov & Gimelshein 2018; Dao et al.
 * 2022, algorithm 1): after each page, out = sum exp(s - max) v and l = sum exp(s - max). */
static void attend(const struct attn *a, float *out, const float *q, int32_t n_keys)
{
    float max = -INFINITY, l = 0, p[KV_PAGE_TOKENS];
    memset(out, 0, sizeof *out * (size_t)a->head_dim);
    for (int32_t first = 0; first < n_keys; first += KV_PAGE_TOKENS) {
        size_t off = (size_t)a->pages[first / KV_PAGE_TOKENS] * a->page_stride;
        const void *k = (const char *)a->k_base + off, *v = (const char *)a->v_base + off;
        int32_t n = MIN(n_keys - first, KV_PAGE_TOKENS);
        float new_max = max;
        for (int32_t t = 0; t < n; t++) {
            float s = 0;
            for (int32_t d = 0; d < a->head_dim; d++)
                s += q[d] * kv_at(k, d * KV_PAGE_TOKENS + t, a->type);
            p[t] = s * a->scale;
            new_max = fmaxf(new_max, p[t]);
        }
        float shrink = expf(max - new_max);
        max = new_max;
        l *= shrink;
        for (int32_t d = 0; d < a->head_dim; d++)
            out[d] *= shrink;
        for (int32_t t = 0; t < n; t++) {
            p[t] = expf(p[t] - max);
            l += p[t];
            for (int32_t d = 0; d < a->head_dim; d++)
                out[d] += p[t] * kv_at(v, t * a->head_dim + d, a->type);
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
                   a->q + (int64_t)row * a->q_stride + h * a->head_dim, a->pos + row + 1);
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
    .kv_put = kv_put,
    .int8_peak = int8_peak,
};
