/* The SIMD kernels, written once over the vector words of simd_*.h and compiled once an ISA level.
 * The including file has chosen the words (and V_VNNI) and defines the table. See cpu_internal.h
 * for the layout of panels; lane l of every vector is row l of the panel. Works on the caller's
 * memory.
 *
 * Integer ranges: codes of b bits (unsigned) times int8 in -127..127, two products in an i16:
 * 2 * 15 * 127 = 3810, so 8 groups of 4-bit codes fit (30480); 5-bit 7874, 4 groups (31496);
 * 6-bit 16002, 2 groups (32004); 3-bit 1778 and 2-bit 762, 4 groups; signed 8-bit 32512, 1 group.
 */
#include "backends/cpu/kv_layout.h"

#include <math.h>
#include <string.h>

#ifndef UNROLL /* an emulation, whose words are long, says that it wants none */
#define UNROLL _Pragma("GCC unroll 8")
#endif

_Static_assert(8 * 2 * 15 * 127 <= 32767 && 4 * 2 * 31 * 127 <= 32767 && 2 * 2 * 63 * 127 <= 32767,
               "sums of maddubs fit 16 bits");

/* What is constant in one instance of the matmul: a row of pack.c's table. */
struct kind {
    enum pack_kind kind;
    int n_sub, n_head, scale_bytes, min_bytes, low_bytes, high_bytes, low_bits, zero;
};

/* ---- codes ---- */

/* Group g (inputs 4g..4g+3) of a sub-block's codes, as bytes 4l..4l+3 of lane l. */
FN vi group_codes(const struct kind k, const uint8_t *low, const uint8_t *high, int g)
{
    if (k.low_bits == 8)
        return vi_load(low + g * 4 * VL);
    vi v;
    if (k.low_bits == 4) {
        v = vi_load(low + (g & 3) * 4 * VL);
        v = vi_and(g < 4 ? v : vi_srl16(v, 4), vi_bytes(15));
    } else {
        v = vi_load(low + g / 4 * 4 * VL);
        v = vi_and(vi_srl16(v, 2 * (g & 3)), vi_bytes(3));
    }
    if (k.high_bytes == 4) { /* bit g to bit low_bits */
        vi h = vi_load(high);
        h = g >= k.low_bits ? vi_srl16(h, g - k.low_bits) : vi_sll16(h, k.low_bits - g);
        v = vi_or(v, vi_and(h, vi_bytes(1 << k.low_bits)));
    } else if (k.high_bytes == 8) { /* bits 2j, 2j+1 to bits 4, 5 */
        vi h = vi_load(high + g / 4 * 4 * VL);
        int j = g & 3;
        h = j > 2 ? vi_srl16(h, 2 * j - 4) : vi_sll16(h, 4 - 2 * j);
        v = vi_or(v, vi_and(h, vi_bytes(0x30)));
    }
    return v;
}

FN bool kind_signed(const struct kind k)
{
    return k.kind == PACK_SIGNED || k.kind == PACK_TABLE || k.kind == PACK_K_TABLE;
}

FN bool kind_16(const struct kind k)
{
    return k.kind == PACK_K16 || k.kind == PACK_K16_MIN;
}

/* ---- integer dot products of one sub-block: sum[t] += codes . q[t] for n_t tokens ---- */

#ifdef V_VNNI

static const uint8_t table_plus_128[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                           129, 141, 153, 166, 181, 197, 217, 241};

FN void sub_dots(vi *sum, const struct kind k, const uint8_t *low, const uint8_t *high,
                 const int8_t *const *q, const vi *scale, int n_t)
{
    vi half[MAX_ROWS];
    UNROLL for (int g = 0; g < 8; g++)
    {
        vi w = group_codes(k, low, high, g);
        if (k.kind == PACK_SIGNED)
            w = vi_xor(w, vi_bytes(0x80));
        else if (kind_signed(k))
            w = vi_lut(table_plus_128, w);
        UNROLL for (int t = 0; t < n_t; t++)
        {
            vi a = vi_word4(q[t] + 4 * g);
            if (!kind_16(k)) {
                sum[t] = vi_dot4(sum[t], w, a);
                continue;
            }
            half[t] = vi_dot4(g % 4 ? half[t] : vi_zero(), w, a);
            if (g % 4 == 3)
                sum[t] = vi_add32(sum[t], vi_mul32(half[t], scale[g / 4]));
        }
    }
}

#else

/* After how many groups the i16 sums must be widened. */
FN int flush_groups(const struct kind k)
{
    int bits = k.low_bits + (k.high_bytes == 4 ? 1 : k.high_bytes == 8 ? 2 : 0);
    return kind_signed(k) ? 1 : bits == 6 ? 2 : bits == 4 && !kind_16(k) ? 8 : 4;
}

FN void sub_dots(vi *sum, const struct kind k, const uint8_t *low, const uint8_t *high,
                 const int8_t *const *q, const vi *scale, int n_t)
{
    const int flush = flush_groups(k);
    vi acc[MAX_ROWS];
    UNROLL for (int g = 0; g < 8; g++)
    {
        vi w = group_codes(k, low, high, g), sign = w;
        if (kind_signed(k)) {
            if (k.kind != PACK_SIGNED)
                sign = vi_lut(gguf_iq4nl_values, w);
            w = vi_abs8(sign);
        }
        vi by = kind_16(k) ? scale[g / 4] : vi_ones16();
        UNROLL for (int t = 0; t < n_t; t++)
        {
            vi a = vi_word4(q[t] + 4 * g);
            if (kind_signed(k))
                a = vi_sign8(a, sign);
            vi p = vi_maddubs(w, a);
            acc[t] = g % flush ? vi_add16(acc[t], p) : p;
            vi_opaque(&acc[t]); /* else the compiler computes all products first and spills them */
            if (g % flush == flush - 1) {
                sum[t] = vi_add32(sum[t], vi_madd16(acc[t], by));
                vi_opaque(&sum[t]);
            }
        }
    }
}

#endif

/* ---- one panel by n_t rows ---- */

struct panel_args {
    const struct mm *m;
    int64_t panel;
    int32_t row;
};

FN void store_rows(const struct panel_args *p, const vf *y, int n_t)
{
    const struct mm *m = p->m;
    int64_t o = p->panel * VL;
    for (int t = 0; t < n_t; t++) {
        vf v = y[t];
        if (m->bias)
            v = vf_add(v, vf_load(m->bias + o));
        if (m->add)
            v = vf_add(v, vf_load(m->add + (int64_t)(p->row + t) * m->add_stride + o));
        vf_store(m->out + (int64_t)(p->row + t) * m->out_stride + o, v);
    }
}

/* Scales of two halves from their pairs: as factors for vi_madd16 (or, with VNNI, vi_mul32). */
FN void split_scales(vi *scale, vi pairs)
{
#ifdef V_VNNI
    scale[0] = vi_sub32(vi_and(vi_add32(pairs, vi_int(0x8000)), vi_int(0xffff)), vi_int(0x8000));
    scale[1] = vi_sub32(vi_srl32(vi_add32(pairs, vi_int((int)0x80000000u)), 16), vi_int(0x8000));
#else
    vi low = vi_and(pairs, vi_int(0xffff)), high = vi_srl32(pairs, 16);
    scale[0] = vi_or(low, vi_sll32(low, 16));
    scale[1] = vi_or(high, vi_sll32(high, 16));
#endif
}

/* What a sub-block's sum starts from: with VNNI signed codes are multiplied with 128 added, which
 * the sums of the activations (two int16 in `pair`) take off again, exactly. */
FN vi first_sum(const struct kind k, int32_t pair)
{
#ifdef V_VNNI
    if (kind_signed(k))
        return vi_int(-128 * ((int16_t)pair + (pair >> 16)));
#endif
    return vi_zero();
}

FN void panel_quant(const struct panel_args *p, const struct kind k, int n_t)
{
    const struct act *a = p->m->a;
    const uint8_t *w = p->m->w->data + (size_t)p->panel * p->m->w->panel_bytes;
    const int8_t *q[MAX_ROWS];
    const float *d[MAX_ROWS], *s[MAX_ROWS];
    const int32_t *sums[MAX_ROWS];
    vf y[MAX_ROWS];
    UNROLL for (int t = 0; t < n_t; t++)
    {
        int64_t row = p->row + t;
        q[t] = a->q + row * a->q_stride;
        d[t] = a->d + row * a->n_blocks;
        s[t] = a->s + row * a->n_blocks;
        sums[t] = a->sums + row * a->n_blocks;
        y[t] = vf_zero();
    }
    const int n_units = (int)(p->m->w->n_in / (32 * k.n_sub));
    int b = 0;
    for (int u = 0; u < n_units; u++) {
        vf d_head = vf_half(w), m_head = k.n_head > 1 ? vf_half(w + 2 * VL) : vf_zero();
        w += k.n_head * 2 * VL;
        for (int j = 0; j < k.n_sub; j++, b++) {
            const uint8_t *low = w + (k.scale_bytes + k.min_bytes) * VL;
            const uint8_t *high = low + k.low_bytes * VL;
            vf ws = d_head, wm = m_head;
            vi pairs = vi_zero(), scale[2] = {vi_zero(), vi_zero()};
            if (k.scale_bytes == 1)
                ws = vf_mul(d_head, vf_from_i32(vi_s8(w)));
            if (k.min_bytes == 1)
                wm = vf_sub(vf_zero(), vf_mul(m_head, vf_from_i32(vi_s8(w + VL))));
            if (kind_16(k)) {
                pairs = vi_s8_pairs(w);
                split_scales(scale, pairs);
            }
            if (k.zero && !kind_16(k))
                wm = vf_mul(ws, vf_set((float)-k.zero));
            vi sum[MAX_ROWS];
            UNROLL for (int t = 0; t < n_t; t++) sum[t] = first_sum(k, sums[t][b]);
            sub_dots(sum, k, low, high, q, scale, n_t);
            vi min_pairs = k.min_bytes == 2 ? vi_s8_pairs(w + 2 * VL) : vi_zero();
            UNROLL for (int t = 0; t < n_t; t++)
            {
                vf dt = vf_set(d[t][b]);
                if (k.kind == PACK_K16) {
                    vi off = vi_madd16(pairs, vi_int(sums[t][b]));
                    sum[t] = vi_sub32(sum[t], vi_sll32(off, k.zero == 32 ? 5 : 2));
                }
                y[t] = vf_fma(vf_from_i32(sum[t]), vf_mul(ws, dt), y[t]);
                if (k.kind == PACK_K16_MIN) {
                    vi off = vi_madd16(min_pairs, vi_int(sums[t][b]));
                    y[t] = vf_fma(vf_from_i32(off), vf_mul(wm, vf_sub(vf_zero(), dt)), y[t]);
                } else if (k.n_head > 1 || (k.zero && !kind_16(k))) {
                    y[t] = vf_fma(wm, vf_set(s[t][b]), y[t]);
                }
                q[t] += 32;
            }
            w = high + k.high_bytes * VL;
        }
    }
    store_rows(p, y, n_t);
}

FN vf float_weight(const uint8_t *w, int64_t i, uint32_t type)
{
    return type == GGUF_F32   ? vf_load((const float *)w + i * VL)
           : type == GGUF_F16 ? vf_half((const uint16_t *)w + i * VL)
                              : vf_bf16((const uint16_t *)w + i * VL);
}

/* Two partial sums a row (even and odd inputs), to hide the latency of the addition. */
FN void panel_float(const struct panel_args *p, uint32_t type, int n_t)
{
    const struct act *a = p->m->a;
    const uint8_t *w = p->m->w->data + (size_t)p->panel * p->m->w->panel_bytes;
    const int64_t n = p->m->w->n_in;
    const float *x[MAX_ROWS];
    vf even[MAX_ROWS], odd[MAX_ROWS];
    UNROLL for (int t = 0; t < n_t; t++)
    {
        x[t] = a->x + (int64_t)(p->row + t) * a->x_stride;
        even[t] = odd[t] = vf_zero();
    }
    int64_t i = 0;
    for (; i + 1 < n; i += 2) {
        vf w0 = float_weight(w, i, type), w1 = float_weight(w, i + 1, type);
        UNROLL for (int t = 0; t < n_t; t++)
        {
            even[t] = vf_fma(w0, vf_set(x[t][i]), even[t]);
            odd[t] = vf_fma(w1, vf_set(x[t][i + 1]), odd[t]);
        }
    }
    UNROLL for (int t = 0; t < n_t; t++)
    {
        if (i < n)
            even[t] = vf_fma(float_weight(w, i, type), vf_set(x[t][i]), even[t]);
        even[t] = vf_add(even[t], odd[t]);
    }
    store_rows(p, even, n_t);
}

/* ---- instances: for each type, 1, 4 and 8 rows at a time ---- */

#define KIND(...) ((const struct kind){__VA_ARGS__})
#define EACH_QUANT(X)                                                                              \
    X(Q4_0, PACK_SCALE, 1, 1, 0, 0, 16, 0, 4, 8)                                                   \
    X(Q4_1, PACK_MIN, 1, 2, 0, 0, 16, 0, 4, 0)                                                     \
    X(Q5_0, PACK_SCALE, 1, 1, 0, 0, 16, 4, 4, 16)                                                  \
    X(Q5_1, PACK_MIN, 1, 2, 0, 0, 16, 4, 4, 0)                                                     \
    X(Q8_0, PACK_SIGNED, 1, 1, 0, 0, 32, 0, 8, 0)                                                  \
    X(IQ4_NL, PACK_TABLE, 1, 1, 0, 0, 16, 0, 4, 0)                                                 \
    X(IQ4_XS, PACK_K_TABLE, 8, 1, 1, 0, 16, 0, 4, 0)                                               \
    X(Q4_K, PACK_K_MIN, 8, 2, 1, 1, 16, 0, 4, 0)                                                   \
    X(Q5_K, PACK_K_MIN, 8, 2, 1, 1, 16, 4, 4, 0)                                                   \
    X(Q6_K, PACK_K16, 8, 1, 2, 0, 16, 8, 4, 32)                                                    \
    X(Q3_K, PACK_K16, 8, 1, 2, 0, 8, 4, 2, 4)                                                      \
    X(Q2_K, PACK_K16_MIN, 8, 2, 2, 2, 8, 0, 2, 0)
#define EACH_FLOAT(X) X(F32) X(F16) X(BF16)

#define DEFINE_PANEL(name, call)                                                                   \
    static void name(const struct panel_args *p)                                                   \
    {                                                                                              \
        call;                                                                                      \
    }
#define DEFINE_QUANT(type, ...)                                                                    \
    DEFINE_PANEL(panel1_##type, panel_quant(p, KIND(__VA_ARGS__), 1))                              \
    DEFINE_PANEL(panel4_##type, panel_quant(p, KIND(__VA_ARGS__), 4))                              \
    DEFINE_PANEL(panel8_##type, panel_quant(p, KIND(__VA_ARGS__), 8))
#define DEFINE_FLOAT(type)                                                                         \
    DEFINE_PANEL(panel1_##type, panel_float(p, GGUF_##type, 1))                                    \
    DEFINE_PANEL(panel4_##type, panel_float(p, GGUF_##type, 4))
EACH_QUANT(DEFINE_QUANT)
EACH_FLOAT(DEFINE_FLOAT)

static const struct panel_fns {
    void (*one)(const struct panel_args *p);
    void (*four)(const struct panel_args *p);
    void (*eight)(const struct panel_args *p); /* NULL: four serves */
} panel_fns[GGUF_DTYPE_END] = {
#define QUANT_ENTRY(type, ...) [GGUF_##type] = {panel1_##type, panel4_##type, panel8_##type},
#define FLOAT_ENTRY(type)      [GGUF_##type] = {panel1_##type, panel4_##type, NULL},
    EACH_QUANT(QUANT_ENTRY) EACH_FLOAT(FLOAT_ENTRY)};

static void matmul(const struct mm *m)
{
    const struct panel_fns f = panel_fns[m->w->info->type];
    for (int32_t panel = m->panel; panel < m->panel_end; panel++) {
        struct panel_args p = {m, panel, m->row};
        for (; f.eight && p.row + 8 <= m->row_end; p.row += 8)
            f.eight(&p);
        for (; p.row + 4 <= m->row_end; p.row += 4)
            f.four(&p);
        for (; p.row < m->row_end; p.row++)
            f.one(&p);
    }
}

/* The dot product of 4-bit codes without its loads: what sub_dots could reach. */
static double int8_peak(int64_t rounds)
{
    enum { N = 8 };
    vi acc[N], w = vi_bytes(3), a = vi_bytes(1);
    for (int i = 0; i < N; i++)
        acc[i] = vi_zero();
    for (int64_t r = 0; r < rounds; r++) {
        UNROLL for (int i = 0; i < N; i++)
        {
            vi_opaque(&w); /* each product is to be computed anew */
#ifdef V_VNNI
            acc[i] = vi_dot4(acc[i], w, a);
#else
            acc[i] = vi_add16(acc[i], vi_maddubs(w, a));
#endif
        }
    }
    UNROLL for (int i = 0; i < N; i++) vi_opaque(&acc[i]);
    return (double)rounds * N * 4 * VL;
}

/* ---- quantization of activations: d = max|x| / 127, q = round(x / d) ---- */

static void quantize(const struct act *a, const float *x, int32_t row, int32_t n_in)
{
    int8_t *q = a->q + (int64_t)row * a->q_stride;
    int64_t at = (int64_t)row * a->n_blocks;
    for (int32_t b = 0; b < n_in / 32; b++, x += 32, q += 32, at++) {
        vf max = vf_zero(), bad = vf_zero();
        UNROLL for (int i = 0; i < 32; i += VL)
        {
            vf v = vf_load(x + i);
            max = vf_max(max, vf_abs(v));
            bad = vf_fma(v, vf_zero(), bad); /* NaN once v is not finite */
        }
        float m = vf_hmax(max);
        vf inv = vf_set(m > ACT_TINY ? 127 / m : 0);
        vi sum[2] = {vi_zero(), vi_zero()};
        UNROLL for (int i = 0; i < 32; i += VL)
        {
            vi v = vi_round(vf_mul(vf_load(x + i), inv));
            vi_store_s8(q + i, v);
            sum[i / 16] = vi_add32(sum[i / 16], v);
        }
        int s0 = vi_sum(sum[0]), s1 = vi_sum(sum[1]);
        float d = m / 127 + vf_sum(bad);
        a->d[at] = d;
        a->s[at] = d * ((float)s0 + (float)s1);
        a->sums[at] = (int32_t)((uint32_t)(uint16_t)s0 | (uint32_t)(uint16_t)s1 << 16);
    }
}

/* ---- norm, gate ---- */

static void norm(float *out, const float *in, const float *w, int32_t n, float eps)
{
    vf acc[2] = {vf_zero(), vf_zero()};
    int32_t i = 0;
    for (; i + 2 * VL <= n; i += 2 * VL) {
        vf a = vf_load(in + i), b = vf_load(in + i + VL);
        acc[0] = vf_fma(a, a, acc[0]);
        acc[1] = vf_fma(b, b, acc[1]);
    }
    float sum = vf_sum(vf_add(acc[0], acc[1]));
    for (; i < n; i++)
        sum += in[i] * in[i];
    float scale = 1 / sqrtf(sum / (float)n + eps);
    for (i = 0; i + VL <= n; i += VL)
        vf_store(out + i, vf_mul(vf_mul(vf_load(in + i), vf_set(scale)), vf_load(w + i)));
    for (; i < n; i++)
        out[i] = in[i] * scale * w[i];
}

/* e^x for x clamped to -87..88: 2^n times a polynomial of the rest, |r| <= ln(2)/2, by Taylor's
 * series to degree 6 (remainder below 2e-7 of the value). NaN stays NaN: of a NaN and a number the
 * instructions take the second operand. */
FN vf vf_exp(vf x)
{
    x = vf_min(vf_set(88.0f), vf_max(vf_set(-87.0f), x));
    vi n = vi_round(vf_mul(x, vf_set(1.44269504f)));
    vf nf = vf_from_i32(n);
    vf r = vf_fma(nf, vf_set(-0.693359375f), x); /* ln 2 in two parts: the first has few bits */
    r = vf_fma(nf, vf_set(2.12194440e-4f), r);
    vf p = vf_set(1.0f / 720);
    p = vf_fma(p, r, vf_set(1.0f / 120));
    p = vf_fma(p, r, vf_set(1.0f / 24));
    p = vf_fma(p, r, vf_set(1.0f / 6));
    p = vf_fma(p, r, vf_set(0.5f));
    p = vf_fma(p, r, vf_set(1.0f));
    p = vf_fma(p, r, vf_set(1.0f));
    return vf_mul(p, vf_from_bits(vi_sll32(vi_add32(n, vi_int(127)), 23)));
}

FN float exp_one(float x)
{
    float v[VL];
    vf_store(v, vf_exp(vf_set(x)));
    return v[0];
}

static void glu(float *out, const float *gate, const float *up, int32_t n)
{
    int32_t i = 0;
    for (; i + VL <= n; i += VL) {
        vf g = vf_load(gate + i);
        vf e = vf_add(vf_set(1), vf_exp(vf_sub(vf_zero(), g)));
        vf_store(out + i, vf_mul(vf_div(g, e), vf_load(up + i)));
    }
    for (; i < n; i++)
        out[i] = gate[i] / (1 + exp_one(-gate[i])) * up[i];
}

/* ---- KV and attention ---- */

/* As the scalar twin's, to the bit. */
static void kv_quantize(struct kv_block *b, const float *x, enum kv_type type)
{
    float lo = type == KV_Q8_0 ? -127 : -8, hi = type == KV_Q8_0 ? 127 : 7;
    vf max = vf_zero(), min = vf_zero(), bad = vf_zero();
    UNROLL for (int i = 0; i < KV_BLOCK; i += VL)
    {
        vf v = vf_load(x + i);
        max = vf_max(v, max);
        min = vf_min(v, min);
        bad = vf_fma(v, vf_zero(), bad); /* NaN once v is not finite */
    }
    float most = vf_hmax(max), least = -vf_hmax(vf_sub(vf_zero(), min));
    float d = type == KV_Q8_0 ? MAX(most, -least) / 127 : (-least >= most ? least : most) / -8;
    b->scale = (uint16_t)_cvtss_sh(d + vf_sum(bad), _MM_FROUND_TO_NEAREST_INT);
    d = _cvtsh_ss(b->scale);
    float inv = d != 0 && isfinite(d) ? 1 / d : 0;
    UNROLL for (int i = 0; i < KV_BLOCK; i += VL)
    {
        vf v = vf_max(vf_mul(vf_load(x + i), vf_set(inv)), vf_set(lo)); /* NaN too */
        vi_store_s8(b->q + i, vi_round(vf_min(v, vf_set(hi))));
    }
}

static void plain_put(void *dst, const float *src, int32_t n, int32_t step, enum kv_type type)
{
    if (type == KV_F32) {
        for (int32_t i = 0; i < n; i++)
            ((float *)dst)[(int64_t)i * step] = src[i];
        return;
    }
    uint16_t *h = dst;
    for (int32_t i = 0; i < n; i++)
        h[(int64_t)i * step] = type == KV_F16
                                   ? (uint16_t)_cvtss_sh(src[i], _MM_FROUND_TO_NEAREST_INT)
                                   : f32_to_bf16(src[i]);
}

static void key_put(void *k, const float *src, int32_t head_dim, int32_t at, enum kv_type type)
{
    if (!kv_is_blocks(type)) {
        plain_put((char *)k + (size_t)at * kv_row_bytes(type, 1), src, head_dim, KV_PAGE_TOKENS,
                  type);
        return;
    }
    struct kv_block b;
    for (int32_t i = 0; i < head_dim / KV_BLOCK; i++) {
        kv_quantize(&b, src + i * KV_BLOCK, type);
        kv_block_put(k, kv_key_place(i, at, type), &b, type);
    }
}

static void value_put(void *v, const float *src, int32_t head_dim, int32_t at, enum kv_type type)
{
    if (!kv_is_blocks(type)) {
        plain_put((char *)v + (size_t)at * kv_row_bytes(type, head_dim), src, head_dim, 1, type);
        return;
    }
    struct kv_block b;
    for (int32_t i = 0; i < head_dim / KV_BLOCK; i++) {
        kv_quantize(&b, src + i * KV_BLOCK, type);
        kv_block_put(v, kv_value_place(i, at, head_dim, type), &b, type);
    }
}

/* Queries at a time: their sums, [queries][4 vectors] at most, stay in registers. */
enum { KEYS = KV_PAGE_TOKENS, N_KV = KEYS / VL, MAX_Q = VL == 16 ? 4 : 2 };

static void plain_floats(float *dst, const void *src, int32_t n, enum kv_type type)
{
    int32_t i = 0;
    const uint16_t *h = src;
    if (type == KV_F32) {
        memcpy(dst, src, sizeof(float) * (size_t)n);
    } else if (type == KV_F16) {
        for (; i + VL <= n; i += VL)
            vf_store(dst + i, vf_half(h + i));
        for (; i < n; i++)
            dst[i] = _cvtsh_ss(h[i]);
    } else {
        for (; i + VL <= n; i += VL)
            vf_store(dst + i, vf_bf16(h + i));
        for (; i < n; i++)
            dst[i] = bf16_to_f32(h[i]);
    }
}

/* Codes of VL bytes as floats: q8_0, or one nibble (the lower first) of q4_0. */
FN vf codes_floats(const void *codes, enum kv_type type, int nibble)
{
    vi q = vi_s8(codes);
    if (type == KV_Q4_0)
        q = vi_sub32(vi_and(nibble ? vi_srl16(q, 4) : q, vi_int(15)), vi_int(8));
    return vf_from_i32(q);
}

/* Blocks of K, [head_dim][32] floats from there on. */
FN void key_blocks(float *dst, const uint8_t *k, int32_t n_blocks, enum kv_type type)
{
    const int n_codes = (int)kv_block_bytes(type) - 2;
    for (int32_t b = 0; b < n_blocks; b++, dst += KV_BLOCK * KEYS) {
        vf scale[N_KV];
        UNROLL for (int j = 0; j < N_KV; j++) scale[j] = vf_half(k + 2 * j * VL);
        k += 2 * KEYS;
        for (int i = 0; i < n_codes; i++, k += KEYS)
            UNROLL for (int j = 0; j < N_KV; j++)
            {
                float *to = dst + i * KEYS + j * VL;
                vf_store(to, vf_mul(codes_floats(k + j * VL, type, 0), scale[j]));
                if (type == KV_Q4_0)
                    vf_store(to + KV_BLOCK / 2 * KEYS,
                             vf_mul(codes_floats(k + j * VL, type, 1), scale[j]));
            }
    }
}

/* Blocks of V, of whole tokens one after the other. */
FN void value_blocks(float *dst, const uint8_t *v, int32_t n_blocks, enum kv_type type)
{
    const int n_codes = (int)kv_block_bytes(type) - 2;
    for (int32_t b = 0; b < n_blocks; b++, dst += KV_BLOCK, v += n_codes) {
        uint16_t half;
        memcpy(&half, v, 2);
        vf scale = vf_set(_cvtsh_ss(half));
        v += 2;
        UNROLL for (int i = 0; i < n_codes; i += VL)
        {
            vf_store(dst + i, vf_mul(codes_floats(v + i, type, 0), scale));
            if (type == KV_Q4_0)
                vf_store(dst + KV_BLOCK / 2 + i, vf_mul(codes_floats(v + i, type, 1), scale));
        }
    }
}

/* A page's K as [head_dim][32] floats. */
static void key_floats(float *dst, const void *k, const struct attn *a)
{
    if (a->key_type == KV_Q8_0)
        key_blocks(dst, k, a->head_dim / KV_BLOCK, KV_Q8_0);
    else if (a->key_type == KV_Q4_0)
        key_blocks(dst, k, a->head_dim / KV_BLOCK, KV_Q4_0);
    else
        plain_floats(dst, k, KEYS * a->head_dim, a->key_type);
}

/* A page's V as [32][stride] floats. Heads of whole blocks have no padding. */
static void value_floats(float *dst, int32_t stride, const void *v, const struct attn *a)
{
    size_t row = (size_t)a->head_dim * (a->value_type == KV_F32 ? 4 : 2); /* of a plain type */
    if (a->value_type == KV_Q8_0)
        value_blocks(dst, v, KEYS * a->head_dim / KV_BLOCK, KV_Q8_0);
    else if (a->value_type == KV_Q4_0)
        value_blocks(dst, v, KEYS * a->head_dim / KV_BLOCK, KV_Q4_0);
    else
        for (int32_t t = 0; t < KEYS; t++)
            plain_floats(dst + (int64_t)t * stride, (const char *)v + (size_t)t * row, a->head_dim,
                         a->value_type);
}

/* The page that is read next, or NULL. A head's pages lie far apart, where the machine's own
 * prefetching does not find them; asked for all at once they would be waited for. */
struct ahead {
    const char *k, *v;
    size_t k_step, v_step; /* bytes of a dimension's keys, of a token's values */
};

/* Scores of n_q queries against a page's 32 keys; k is [head_dim][32]. */
FN void page_scores(float *s, const float *const *q, const float *k, const struct attn *a, int n_q,
                    const struct ahead *next)
{
    vf acc[MAX_Q][N_KV];
    UNROLL for (int i = 0; i < n_q; i++) UNROLL for (int j = 0; j < N_KV; j++) acc[i][j] =
        vf_zero();
    for (int32_t d = 0; d < a->head_dim; d++, k += KEYS) {
        if (next)
            _mm_prefetch(next->k + (size_t)d * next->k_step, _MM_HINT_T0);
        UNROLL for (int i = 0; i < n_q; i++)
        {
            vf x = vf_set(q[i][d]);
            UNROLL for (int j = 0; j < N_KV; j++) acc[i][j] =
                vf_fma(x, vf_load(k + j * VL), acc[i][j]);
        }
    }
    UNROLL for (int i = 0; i < n_q; i++) UNROLL for (int j = 0; j < N_KV; j++)
        vf_store(s + i * KEYS + j * VL, vf_mul(acc[i][j], vf_set(a->scale)));
}

struct span { /* the tokens of a page that a row sees: t0 .. n-1 */
    int32_t t0, n;
};

/* Most pages are seen whole: what is rare stays out of the way. */
static void fill_unseen(float *s, struct span sees, float x)
{
    for (int32_t t = 0; t < sees.t0; t++)
        s[t] = x;
    for (int32_t t = sees.n; t < KEYS; t++)
        s[t] = x;
}

/* One step of the running softmax over some of a query's 32 scores, which become weights. Returns
 * the factor for what was summed before: 1, as exp_one would give, where the maximum stays. */
FN float page_softmax(float *s, float *max, float *l, struct span sees)
{
    bool whole = sees.n - sees.t0 == KEYS;
    if (!whole)
        fill_unseen(s, sees, -INFINITY);
    vf m = vf_set(*max);
    UNROLL for (int j = 0; j < N_KV; j++) m = vf_max(m, vf_load(s + j * VL));
    float new_max = vf_hmax(m);
    float shrink = new_max == *max ? 1 : exp_one(*max - new_max);
    vf sum = vf_zero();
    UNROLL for (int j = 0; j < N_KV; j++)
        vf_store(s + j * VL, vf_exp(vf_sub(vf_load(s + j * VL), vf_set(new_max))));
    if (!whole)
        fill_unseen(s, sees, 0);
    UNROLL for (int j = 0; j < N_KV; j++) sum = vf_add(sum, vf_load(s + j * VL));
    *l = *l * shrink + vf_sum(sum);
    *max = new_max;
    return shrink;
}

/* out = out * shrink + weights . v for n tokens and n_v vectors of the head from v (rows `stride`
 * apart). */
FN void page_values(float *const *out, const float *shrink, const float *s, const float *v,
                    int32_t stride, int32_t n, int n_q, int n_v, const struct ahead *next)
{
    vf acc[MAX_Q][4];
    UNROLL for (int i = 0; i < n_q; i++) UNROLL for (int j = 0; j < n_v; j++) acc[i][j] =
        vf_mul(vf_load(out[i] + j * VL), vf_set(shrink[i]));
    for (int32_t t = 0; t < n; t++, v += stride) {
        for (size_t i = 0; next && i < next->v_step; i += 64)
            _mm_prefetch(next->v + (size_t)t * next->v_step + i, _MM_HINT_T0);
        UNROLL for (int i = 0; i < n_q; i++)
        {
            vf p = vf_set(s[i * KEYS + t]);
            UNROLL for (int j = 0; j < n_v; j++) acc[i][j] =
                vf_fma(p, vf_load(v + j * VL), acc[i][j]);
        }
    }
    UNROLL for (int i = 0; i < n_q; i++) UNROLL for (int j = 0; j < n_v; j++)
        vf_store(out[i] + j * VL, acc[i][j]);
}

struct attn_state { /* in the task's scratch; hp: head_dim rounded up to 16 */
    float *k, *v;   /* [head_dim][32], [32][hp] */
    float *s;       /* [MAX_Q][32] */
    float *out;     /* [rows * group][hp] */
    float *max, *l; /* [rows * group] */
    int32_t hp;
};

FN void attend_page(const struct attn *a, const struct attn_state *st, int32_t row, int32_t head,
                    struct span sees, int n_q, const struct ahead *next)
{
    const float *q[MAX_Q];
    float *out[MAX_Q], shrink[MAX_Q];
    int32_t at = row * a->n_heads_group + head;
    for (int i = 0; i < n_q; i++) {
        q[i] = a->q + (int64_t)row * a->q_stride + (head + i) * a->head_dim;
        out[i] = st->out + (int64_t)(at + i) * st->hp;
    }
    page_scores(st->s, q, st->k, a, n_q, next);
    for (int i = 0; i < n_q; i++)
        shrink[i] = page_softmax(st->s + i * KEYS, &st->max[at + i], &st->l[at + i], sees);
    const float *s = st->s + sees.t0, *v = st->v + (int64_t)sees.t0 * st->hp;
    int32_t d = 0, n = sees.n - sees.t0;
    for (; d + 4 * VL <= st->hp; d += 4 * VL) {
        page_values(out, shrink, s, v + d, st->hp, n, n_q, 4, d ? NULL : next);
        for (int i = 0; i < n_q; i++)
            out[i] += 4 * VL;
    }
    for (; d < st->hp; d += VL) {
        page_values(out, shrink, s, v + d, st->hp, n, n_q, 1, NULL);
        for (int i = 0; i < n_q; i++)
            out[i] += VL;
    }
}

/* The group's heads of one row from `head` on, of which as many as fit are taken together. */
FN void attend_row(const struct attn *a, const struct attn_state *st, int32_t row, int32_t head,
                   struct span sees)
{
    for (; MAX_Q > 2 && head + MAX_Q <= a->n_heads_group; head += MAX_Q)
        attend_page(a, st, row, head, sees, MAX_Q, NULL);
    for (; head + 2 <= a->n_heads_group; head += 2)
        attend_page(a, st, row, head, sees, 2, NULL);
    if (head < a->n_heads_group)
        attend_page(a, st, row, head, sees, 1, NULL);
}

/* The first row, with which the next page is asked for. Returns how many heads it took. */
FN int32_t attend_first(const struct attn *a, const struct attn_state *st, struct span sees,
                        const struct ahead *next)
{
    int32_t n = a->n_heads_group >= MAX_Q ? MAX_Q : a->n_heads_group >= 2 ? 2 : 1;
    if (n == MAX_Q)
        attend_page(a, st, 0, 0, sees, MAX_Q, next);
    else if (n == 2)
        attend_page(a, st, 0, 0, sees, 2, next);
    else
        attend_page(a, st, 0, 0, sees, 1, next);
    return n;
}

static struct ahead ahead_of(const struct attn *a, int32_t page)
{
    size_t at = (size_t)page * a->page_stride;
    return (struct ahead){.k = (const char *)a->k_base + at,
                          .v = (const char *)a->v_base + at,
                          .k_step = KEYS * kv_row_bytes(a->key_type, a->head_dim) /
                                    (size_t)a->head_dim,
                          .v_step = kv_row_bytes(a->value_type, a->head_dim)};
}

static void attention(const struct attn *a)
{
    int32_t n_rows = a->n_rows * a->n_heads_group, hd = a->head_dim;
    struct attn_state st = {.hp = (hd + 15) & ~15};
    st.k = a->scratch;
    st.v = st.k + (int64_t)KEYS * hd;
    st.s = st.v + (int64_t)KEYS * st.hp;
    st.out = st.s + ATTN_QUERIES * KEYS;
    st.max = st.out + (int64_t)n_rows * st.hp;
    st.l = st.max + n_rows;
    memset(st.out, 0, sizeof(float) * (size_t)n_rows * (size_t)st.hp);
    for (int32_t i = 0; i < n_rows; i++) {
        st.max[i] = -INFINITY;
        st.l[i] = 0;
    }
    int32_t first = window_start(a->pos, a->window) / KEYS * KEYS;
    for (; first < a->pos + a->n_rows; first += KEYS) {
        size_t off = (size_t)a->pages[first / KEYS] * a->page_stride;
        key_floats(st.k, (const char *)a->k_base + off, a);
        value_floats(st.v, st.hp, (const char *)a->v_base + off, a);
        bool last = first + KEYS >= a->pos + a->n_rows;
        struct ahead next = ahead_of(a, a->pages[first / KEYS + !last]);
        for (int32_t row = 0; row < a->n_rows; row++) {
            int32_t pos = a->pos + row, head = 0;
            struct span sees = {MAX(window_start(pos, a->window) - first, 0),
                                MIN(pos + 1 - first, KEYS)};
            if (sees.t0 >= sees.n)
                continue;
            if (!row)
                head = attend_first(a, &st, sees, &next);
            attend_row(a, &st, row, head, sees);
        }
    }
    for (int32_t row = 0; row < a->n_rows; row++)
        for (int32_t h = 0; h < a->n_heads_group; h++) {
            int32_t at = row * a->n_heads_group + h;
            float *out = a->out + (int64_t)row * a->out_stride + h * hd, inv = 1 / st.l[at];
            for (int32_t d = 0; d < hd; d++)
                out[d] = st.out[(int64_t)at * st.hp + d] * inv;
        }
}

/* The level's table, under its own name. */
#define DEFINE_KERNELS(symbol, isa_name)                                                           \
    const struct kernels symbol = {                                                                \
        .name = isa_name,                                                                          \
        .lanes = VL,                                                                               \
        .matmul = matmul,                                                                          \
        .quantize = quantize,                                                                      \
        .norm = norm,                                                                              \
        .glu = glu,                                                                                \
        .attention = attention,                                                                    \
        .key_put = key_put,                                                                        \
        .value_put = value_put,                                                                    \
        .int8_peak = int8_peak,                                                                    \
    }
