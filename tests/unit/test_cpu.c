/* The CPU kernels: packing loses nothing, every ISA level agrees with the plain meaning of each
 * operation over odd shapes, and the same row gives the same bits in any tile. */
#include "backends/cpu/cpu_internal.h"
#include "backends/cpu/exec_internal.h"
#include "tests/unit/unit.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

static const uint32_t types[] = {GGUF_F32,  GGUF_F16,  GGUF_BF16, GGUF_Q4_0,   GGUF_Q4_1,
                                 GGUF_Q5_0, GGUF_Q5_1, GGUF_Q8_0, GGUF_Q2_K,   GGUF_Q3_K,
                                 GGUF_Q4_K, GGUF_Q5_K, GGUF_Q6_K, GGUF_IQ4_NL, GGUF_IQ4_XS};

/* A matrix of one type: source blocks, their float values, and the packed weight for one level. */
struct matrix {
    struct weight w;
    uint8_t *blocks;
    float *values; /* [n_out][n_in] */
    size_t row_bytes;
};

static void matrix_make(struct matrix *m, const struct kernels *k, uint32_t type, int n_in,
                        int n_out)
{
    const struct gguf_dtype_info *t = gguf_dtype_find(type);
    uint64_t rng = type * 1000u + (unsigned)n_in;
    size_t n = (size_t)n_in * (size_t)n_out;
    memset(m, 0, sizeof *m);
    m->row_bytes = (size_t)n_in / t->block_len * t->block_bytes;
    m->blocks = calloc((size_t)n_out, m->row_bytes);
    m->values = calloc(n, sizeof(float));
    for (size_t i = 0; i < n; i++)
        m->values[i] = unit_randn(&rng) * (1 + (float)(i / (size_t)n_in % 3));
    for (int r = 0; r < n_out; r++)
        t->from_f32(m->blocks + (size_t)r * m->row_bytes, m->values + (size_t)r * (size_t)n_in,
                    (size_t)n_in);
    t->to_f32(m->values, m->blocks, n);
    struct weight *w = &m->w;
    *w = (struct weight){
        .info = pack_info_find(type), .n_in = n_in, .n_out = n_out, .lanes = k->lanes};
    w->n_panels = (n_out + w->lanes - 1) / w->lanes;
    w->panel_bytes = pack_panel_bytes(w->info, n_in, w->lanes);
    w->n_bytes = w->panel_bytes * (size_t)w->n_panels;
    w->data = mem_pages(w->n_bytes);
    for (int p = 0; p < w->n_panels; p++)
        pack_panel(w, w->data + (size_t)p * w->panel_bytes,
                   m->blocks + (size_t)(p * w->lanes) * m->row_bytes, m->row_bytes,
                   MIN(w->lanes, n_out - p * w->lanes));
}

static void matrix_fini(struct matrix *m)
{
    mem_pages_free(m->w.data, m->w.n_bytes);
    free(m->blocks);
    free(m->values);
}

struct acts {
    struct act a;
    float *x;
    int rows, n_in;
};

static void acts_make(struct acts *s, const struct kernels *k, int rows, int n_in)
{
    uint64_t rng = 77;
    s->rows = rows;
    s->n_in = n_in;
    s->x = calloc((size_t)rows * (size_t)(n_in + 16), sizeof(float));
    int n_blocks = n_in / 32 + 1, q_stride = (n_in + 31) / 32 * 32 + 64;
    s->a = (struct act){s->x,
                        n_in + 16,
                        calloc((size_t)rows, (size_t)q_stride),
                        q_stride,
                        calloc((size_t)rows * (size_t)n_blocks, 4),
                        calloc((size_t)rows * (size_t)n_blocks, 4),
                        calloc((size_t)rows * (size_t)n_blocks, 4),
                        n_blocks};
    for (int r = 0; r < rows; r++) {
        for (int i = 0; i < n_in; i++)
            s->x[r * s->a.x_stride + i] = unit_randn(&rng) * (i % 32 == 5 ? 20.0f : 1.0f);
        if (r == 1)
            memset(s->x + r * s->a.x_stride, 0, sizeof(float) * MIN((size_t)n_in, (size_t)64));
        k->quantize(&s->a, s->x + r * s->a.x_stride, r, n_in);
    }
}

static void acts_fini(struct acts *s)
{
    free(s->x);
    free(s->a.q);
    free(s->a.d);
    free(s->a.s);
    free(s->a.sums);
}

static void each_level(void (*fn)(const struct kernels *k))
{
    bool here;
    const struct kernels *k;
    for (size_t i = 0; (k = kernels_at(i, &here)); i++) {
        if (here)
            fn(k);
        else
            printf("  %s: not on this CPU\n", k->name);
    }
}

static void check_pack(const struct kernels *k)
{
    for (size_t t = 0; t < ARRAY_LEN(types); t++) {
        struct matrix m;
        matrix_make(&m, k, types[t], 512, 21);
        float row[512];
        for (int r = 0; r < 21; r++) {
            pack_row(row, &m.w, r);
            OK_MSG(!memcmp(row, m.values + r * 512, sizeof row), "%s %s row %d differs", k->name,
                   gguf_dtype_find(types[t])->name, r);
        }
        matrix_fini(&m);
    }
}

static void test_packing_loses_nothing(void)
{
    each_level(check_pack);
}

static double expected(const struct matrix *m, const struct acts *s, int row, int o, double *norm)
{
    double y = 0;
    *norm = 0;
    for (int i = 0; i < s->n_in; i++) {
        double x = m->w.info->kind == PACK_FLOAT ? (double)s->x[row * s->a.x_stride + i]
                                                 : (double)s->a.q[row * s->a.q_stride + i] *
                                                       (double)s->a.d[row * s->a.n_blocks + i / 32];
        double p = x * (double)m->values[o * s->n_in + i];
        y += p;
        *norm += fabs(p);
    }
    return y;
}

static void check_matmul_shape(const struct kernels *k, uint32_t type, int n_in, int n_out,
                               int rows)
{
    struct matrix m;
    struct acts s;
    matrix_make(&m, k, type, n_in, n_out);
    acts_make(&s, k, rows, n_in);
    int stride = (n_out + 15) / 16 * 16 + 16;
    float *out = calloc((size_t)rows * (size_t)stride, sizeof(float));
    float *add = calloc((size_t)rows * (size_t)stride, sizeof(float)),
          *bias = calloc((size_t)stride, 4);
    uint64_t rng = 5;
    for (int i = 0; i < rows * stride; i++)
        add[i] = unit_randn(&rng);
    for (int i = 0; i < stride; i++)
        bias[i] = unit_randn(&rng);
    struct mm mm = {&m.w, &s.a, out, add, bias, stride, stride, 0, (int32_t)m.w.n_panels, 0, rows};
    k->matmul(&mm);
    double worst = 0;
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < n_out; o++) {
            double norm,
                y = expected(&m, &s, r, o, &norm) + (double)add[r * stride + o] + (double)bias[o];
            worst = fmax(worst, fabs((double)out[r * stride + o] - y) / (norm + 1));
        }
    OK_MSG(worst < 2e-6, "%s %s %dx%d by %d rows: off by %g", k->name, gguf_dtype_find(type)->name,
           n_in, n_out, rows, worst);
    /* The same bits row by row and panel by panel. */
    float *again = calloc((size_t)rows * (size_t)stride, sizeof(float));
    mm.out = again;
    for (mm.row = 0; mm.row < rows; mm.row++)
        for (mm.panel = 0; mm.panel < m.w.n_panels; mm.panel++) {
            mm.row_end = mm.row + 1;
            mm.panel_end = mm.panel + 1;
            k->matmul(&mm);
        }
    for (int r = 0; r < rows; r++)
        OK_MSG(!memcmp(out + r * stride, again + r * stride, sizeof(float) * (size_t)n_out),
               "%s %s row %d: other bits alone than among %d", k->name, gguf_dtype_find(type)->name,
               r, rows);
    free(out);
    free(again);
    free(add);
    free(bias);
    acts_fini(&s);
    matrix_fini(&m);
}

static void check_matmul(const struct kernels *k)
{
    for (size_t t = 0; t < ARRAY_LEN(types); t++) {
        int block = (int)gguf_dtype_find(types[t])->block_len;
        check_matmul_shape(k, types[t], block == 1 ? 67 : 3 * block, 37, 13);
        check_matmul_shape(k, types[t], block == 1 ? 1 : block, 1, 1);
        check_matmul_shape(k, types[t], 1024, 64, 8);
    }
}

static void test_matmul_means_what_it_says_and_ignores_tiling(void)
{
    each_level(check_matmul);
}

/* All codes of a packed matrix become the same byte; its scales stay. */
static void set_codes(struct weight *w, int byte)
{
    const struct pack_info *f = w->info;
    size_t r = (size_t)w->lanes, n_units = (size_t)w->n_in / (32u * f->n_sub);
    size_t scales = r * ((size_t)f->scale_bytes + f->min_bytes);
    size_t codes = r * ((size_t)f->low_bytes + f->high_bytes);
    for (size_t panel = 0; panel < (size_t)w->n_panels; panel++) {
        uint8_t *p = w->data + panel * w->panel_bytes;
        for (size_t u = 0; u < n_units; u++) {
            p += 2 * r * f->n_head;
            for (int s = 0; s < f->n_sub; s++, p += scales + codes)
                memset(p + scales, byte, codes);
        }
    }
}

static void check_extreme(const struct kernels *k, struct matrix *m, const struct acts *s, int byte)
{
    float out[9 * 32];
    set_codes(&m->w, byte);
    for (int o = 0; o < 16; o++)
        pack_row(m->values + o * s->n_in, &m->w, o);
    struct mm mm = {&m->w, &s->a, out, NULL, NULL, 32, 0, 0, (int32_t)m->w.n_panels, 0, 9};
    k->matmul(&mm);
    for (int r = 0; r < 9; r++)
        for (int o = 0; o < 16; o++) {
            double norm, y = expected(m, s, r, o, &norm);
            OK_MSG(norm == 0 || fabs((double)out[r * 32 + o] - y) < 2e-6 * norm,
                   "%s %s, codes %02x: %g, not %g", k->name, gguf_dtype_find(m->w.info->type)->name,
                   (unsigned)byte, (double)out[r * 32 + o], y);
        }
}

/* Every code and every activation at its limit: no sum may wrap. */
static void check_extremes(const struct kernels *k)
{
    static const int bytes[] = {0x00, 0x7f, 0x80, 0xff};
    for (size_t t = 3; t < ARRAY_LEN(types); t++) {
        struct matrix m;
        struct acts s;
        matrix_make(&m, k, types[t], 512, 16);
        acts_make(&s, k, 9, 512);
        for (int i = 0; i < 9 * 512; i++)
            s.x[i / 512 * s.a.x_stride + i % 512] = i % 512 < 256 ? 3.0f : -3.0f;
        for (int r = 0; r < 9; r++)
            k->quantize(&s.a, s.x + r * s.a.x_stride, r, 512);
        for (size_t b = 0; b < ARRAY_LEN(bytes); b++)
            check_extreme(k, &m, &s, bytes[b]);
        acts_fini(&s);
        matrix_fini(&m);
    }
}

static void test_matmul_does_not_wrap_at_the_limits(void)
{
    each_level(check_extremes);
}

static void check_quantize(const struct kernels *k)
{
    struct acts s;
    acts_make(&s, k, 3, 96);
    for (int r = 0; r < 3; r++)
        for (int b = 0; b < 3; b++) {
            const float *x = s.x + r * s.a.x_stride + 32 * b;
            const int8_t *q = s.a.q + r * s.a.q_stride + 32 * b;
            float max = 0, d = s.a.d[r * s.a.n_blocks + b];
            int sum[2] = {0, 0};
            for (int i = 0; i < 32; i++) {
                max = fmaxf(max, fabsf(x[i]));
                sum[i / 16] += q[i];
                OK(fabsf(x[i] - d * q[i]) <= d * 0.5001f);
            }
            OK(d == max / 127);
            int32_t pair = s.a.sums[r * s.a.n_blocks + b];
            OK((int16_t)pair == sum[0] && (int16_t)(pair >> 16) == sum[1]);
            OK(fabsf(s.a.s[r * s.a.n_blocks + b] - d * (float)(sum[0] + sum[1])) <= 1e-6f * max);
        }
    acts_fini(&s);
}

static void test_quantized_activations_are_within_half_a_step(void)
{
    each_level(check_quantize);
}

static void check_rowwise(const struct kernels *k)
{
    uint64_t rng = 9;
    for (int n = 1; n < 100; n += 7) {
        float x[100], w[100], y[100], z[100];
        double sum = 0;
        for (int i = 0; i < n; i++) {
            x[i] = unit_randn(&rng) * (n % 3 == 0 ? 40 : 1);
            w[i] = unit_randn(&rng);
            sum += (double)x[i] * (double)x[i];
        }
        k->norm(y, x, w, n, 1e-5f);
        k->glu(z, x, w, n);
        for (int i = 0; i < n; i++) {
            double e = (double)x[i] / sqrt(sum / n + 1e-5) * (double)w[i];
            double g = (double)x[i] / (1 + exp(-(double)x[i])) * (double)w[i];
            OK_MSG(fabs((double)y[i] - e) < 2e-6 * (fabs(e) + 1), "%s norm %g, not %g", k->name,
                   (double)y[i], e);
            OK_MSG(fabs((double)z[i] - g) < 2e-6 * (fabs(g) + 1), "%s glu(%g) %g, not %g", k->name,
                   (double)x[i], (double)z[i], g);
        }
    }
}

static void test_norm_and_gate_agree_with_double(void)
{
    each_level(check_rowwise);
}

/* ---- attention over pages in odd order, some rows at a time ---- */

enum { N_POS = 109, N_PAGES = 5, N_LINES = 4 };
static const int32_t page_line[N_LINES] = {3, 0, 4, 1};

struct attn_case {
    int hd, group, window;
    enum kv_type kt, vt;
    size_t k_bytes, page_bytes;
    uint8_t *kv;      /* [N_PAGES] of K, then V */
    float *q, *k, *v; /* [N_POS][group * hd], [N_POS][hd] twice: as they are kept */
};

static uint8_t *case_page(const struct attn_case *c, int pos)
{
    return c->kv + (size_t)page_line[pos / 32] * c->page_bytes;
}

static void run_attention(float *out, const struct kernels *k, const struct attn_case *c, int first,
                          int n)
{
    float *scratch = calloc(attn_scratch_floats(c->hd, c->group), sizeof(float));
    for (int at = first; at < first + n; at += ATTN_ROWS) {
        int32_t pages[N_LINES];
        for (int i = 0; i < N_LINES; i++) /* what left the window is not there */
            pages[i] = c->window && 32 * (i + 1) <= at - c->window + 1 ? -1 : page_line[i];
        struct attn a = {.k_base = c->kv,
                         .v_base = c->kv + c->k_bytes,
                         .page_stride = c->page_bytes,
                         .pages = pages,
                         .key_type = c->kt,
                         .value_type = c->vt,
                         .head_dim = c->hd,
                         .n_heads_group = c->group,
                         .window = c->window,
                         .scale = 0.3f,
                         .q = c->q + at * c->group * c->hd,
                         .out = out + at * c->group * c->hd,
                         .q_stride = c->group * c->hd,
                         .out_stride = c->group * c->hd,
                         .n_rows = MIN(ATTN_ROWS, first + n - at),
                         .pos = at,
                         .scratch = scratch};
        k->attention(&a);
    }
    free(scratch);
}

static double attention_at(const struct attn_case *c, int pos, int head, int d)
{
    double p[N_POS], max = -1e30, sum = 0, y = 0;
    int first = c->window ? MAX(0, pos - c->window + 1) : 0;
    for (int t = first; t <= pos; t++) {
        p[t] = 0;
        for (int i = 0; i < c->hd; i++)
            p[t] += (double)c->q[(pos * c->group + head) * c->hd + i] * (double)c->k[t * c->hd + i];
        p[t] *= (double)0.3f;
        max = fmax(max, p[t]);
    }
    for (int t = first; t <= pos; t++) {
        p[t] = exp(p[t] - max);
        sum += p[t];
        y += p[t] * (double)c->v[t * c->hd + d];
    }
    return y / sum;
}

/* What a head's K or V keeps of a row, read as the layout's drawing says and decoded by gguf/. */
static void kept_row(float *out, const uint8_t *head, int hd, int at, enum kv_type t, bool key)
{
    static const uint32_t dtypes[KV_TYPE_END] = {[KV_F16] = GGUF_F16,
                                                 [KV_BF16] = GGUF_BF16,
                                                 [KV_F32] = GGUF_F32,
                                                 [KV_Q8_0] = GGUF_Q8_0,
                                                 [KV_Q4_0] = GGUF_Q4_0};
    const struct gguf_dtype_info *info = gguf_dtype_find(dtypes[t]);
    size_t row_bytes = (size_t)hd / info->block_len * info->block_bytes;
    uint8_t row[512];
    if (!key) {
        memcpy(row, head + (size_t)at * row_bytes, row_bytes);
    } else if (info->block_len == 1) {
        for (int d = 0; d < hd; d++)
            memcpy(row + (size_t)d * info->block_bytes,
                   head + (size_t)(d * 32 + at) * info->block_bytes, info->block_bytes);
    } else {
        for (size_t b = 0; b < (size_t)hd / 32; b++) {
            const uint8_t *block = head + b * 32 * info->block_bytes;
            memcpy(row + b * info->block_bytes, block + 2 * at, 2);
            for (size_t i = 2; i < info->block_bytes; i++)
                row[b * info->block_bytes + i] = block[64 + (i - 2) * 32 + (size_t)at];
        }
    }
    info->to_f32(out, row, (size_t)hd);
}

/* How far from x its type may keep it: half a unit in the last place; of blocks half a step, and in
 * q4_0, whose steps reach 8 to one side and 7 to the other, a whole one at that end. The scale is a
 * half itself (2^-11 of it, times the code). */
static double rounding(const float *row, int i, enum kv_type t)
{
    double x = fabs((double)row[i]), max = 0, far = 0;
    if (t == KV_F32)
        return 0;
    if (t == KV_F16 || t == KV_BF16)
        return ldexp(x, t == KV_F16 ? -11 : -8) + ldexp(1, -25);
    for (int k = i / 32 * 32; k < i / 32 * 32 + 32; k++) {
        max = fmax(max, fabs((double)row[k]));
        far = fabs((double)row[k]) > fabs(far) ? (double)row[k] : far;
    }
    double d = max / (t == KV_Q8_0 ? 127 : 8);
    bool short_end = t == KV_Q4_0 && (double)row[i] * far < 0 && x > 7 * d;
    return (short_end ? 1 : 0.5) * d + ldexp(max, -11) + ldexp(1, -18);
}

static void put_row(const struct kernels *k, struct attn_case *c, int t, bool key, uint64_t *rng)
{
    static const float spreads[] = {1, 1e-3f, 1e-6f};
    float x[128], *kept = (key ? c->k : c->v) + t * c->hd;
    enum kv_type type = key ? c->kt : c->vt;
    uint8_t *head = case_page(c, t) + (key ? 0 : c->k_bytes);
    uint8_t other[2 * 128 * 32 * 4];
    size_t n = 32 * kv_row_bytes(type, c->hd);
    for (int i = 0; i < c->hd; i++)
        x[i] = unit_randn(rng) * spreads[t % 7 < 5 ? 0 : t % 7 - 4];
    memcpy(other, head, n);
    (key ? k->key_put : k->value_put)(head, x, c->hd, t % 32, type);
    (key ? kernels_scalar.key_put : kernels_scalar.value_put)(other, x, c->hd, t % 32, type);
    OK_MSG(!memcmp(other, head, n), "%s keeps other bytes of %s", k->name, kv_type_name(type));
    kept_row(kept, head, c->hd, t % 32, type, key);
    for (int i = 0; i < c->hd; i++) {
        double off = fabs((double)kept[i] - (double)x[i]);
        OK_MSG(off <= rounding(x, i, type), "%s %s keeps %g as %g", k->name, kv_type_name(type),
               (double)x[i], (double)kept[i]);
    }
}

static void case_init(struct attn_case *c)
{
    c->k_bytes = 32 * kv_row_bytes(c->kt, c->hd);
    c->page_bytes = c->k_bytes + 32 * kv_row_bytes(c->vt, c->hd);
    c->kv = malloc(N_PAGES * c->page_bytes);
    memset(c->kv, 0xff, N_PAGES * c->page_bytes); /* NaN: what was not written must not matter */
    c->q = calloc((size_t)(N_POS * c->group * c->hd), sizeof *c->q);
    c->k = calloc((size_t)(N_POS * c->hd), sizeof *c->k);
    c->v = calloc((size_t)(N_POS * c->hd), sizeof *c->v);
}

static void case_fini(struct attn_case *c)
{
    free(c->kv);
    free(c->q);
    free(c->k);
    free(c->v);
}

static void check_attention_case(const struct kernels *k, struct attn_case c)
{
    uint64_t rng = 31;
    char what[96];
    snprintf(what, sizeof what, "%s %s %s head %d group %d window %d", k->name, kv_type_name(c.kt),
             kv_type_name(c.vt), c.hd, c.group, c.window);
    case_init(&c);
    for (int i = 0; i < N_POS * c.group * c.hd; i++)
        c.q[i] = unit_randn(&rng);
    for (int t = 0; t < N_POS; t++) {
        put_row(k, &c, t, true, &rng);
        put_row(k, &c, t, false, &rng);
    }
    size_t n = (size_t)(N_POS * c.group * c.hd);
    float *all = calloc(n, 4), *single = calloc(n, 4);
    run_attention(all, k, &c, 0, N_POS);
    for (int p = 0; p < N_POS; p++)
        run_attention(single, k, &c, p, 1);
    OK_MSG(!memcmp(all, single, n * 4), "%s: other bits alone", what);
    double worst = 0;
    for (int p = 0; p < N_POS; p += 5)
        for (int h = 0; h < c.group; h++)
            for (int d = 0; d < c.hd; d++)
                worst = fmax(worst, fabs(attention_at(&c, p, h, d) -
                                         (double)all[(p * c.group + h) * c.hd + d]));
    OK_MSG(worst < 1e-5, "%s: off by %g", what, worst);
    free(all);
    free(single);
    case_fini(&c);
}

static void check_attention(const struct kernels *k)
{
    static const int dims[] = {8, 16, 20, 32, 64, 80, 96, 128}, windows[] = {0, 1, 20, 45};
    int n = 0;
    for (size_t i = 0; i < ARRAY_LEN(dims); i++)
        for (enum kv_type kt = 0; kt < KV_TYPE_END; kt++)
            for (enum kv_type vt = 0; vt < KV_TYPE_END; vt++) {
                if (dims[i] % kv_type_block(kt) || dims[i] % kv_type_block(vt))
                    continue;
                struct attn_case c = {.hd = dims[i], .group = 1 + n % 3 * 2, .kt = kt, .vt = vt};
                c.window = windows[n++ / 3 % 4];
                check_attention_case(k, c);
            }
}

static void test_attention_agrees_with_double_and_ignores_blocking(void)
{
    each_level(check_attention);
}

/* ---- infinities and NaN: a broken model must show, not answer ---- */

static bool row_finite(const float *x, int n)
{
    for (int i = 0; i < n; i++)
        if (!isfinite(x[i]))
            return false;
    return true;
}

static void check_bad_input(const struct kernels *k, uint32_t type, float bad, int at)
{
    struct matrix m;
    struct acts s;
    float out[3 * 32];
    matrix_make(&m, k, type, 512, 16);
    acts_make(&s, k, 3, 512);
    s.x[s.a.x_stride + at] = bad;
    k->quantize(&s.a, s.x + s.a.x_stride, 1, 512);
    struct mm mm = {&m.w, &s.a, out, NULL, NULL, 32, 0, 0, (int32_t)m.w.n_panels, 0, 3};
    k->matmul(&mm);
    OK(row_finite(out, 16) && row_finite(out + 64, 16));
    for (int o = 0; o < 16; o++)
        OK_MSG(!isfinite(out[32 + o]), "%s %s: %g at %d became %g", k->name,
               gguf_dtype_find(type)->name, (double)bad, at, (double)out[32 + o]);
    acts_fini(&s);
    matrix_fini(&m);
}

/* What is not finite among the keys, or else the values, of one token. */
static void check_bad_cache(const struct kernels *k, enum kv_type t, bool key, float bad)
{
    enum { GROUP = 7, HD = 32, AT = 40, ROW = GROUP * HD };
    float one[HD], big[HD];
    static float out[N_POS * ROW];
    struct attn_case c = {.hd = HD, .group = GROUP, .kt = t, .vt = t};
    case_init(&c);
    for (int i = 0; i < N_POS * ROW; i++)
        c.q[i] = 1;
    for (int i = 0; i < HD; i++)
        one[i] = big[i] = 1;
    big[17] = bad;
    for (int p = 0; p < N_POS; p++) {
        k->key_put(case_page(&c, p), key && p == AT ? big : one, HD, p % 32, t);
        k->value_put(case_page(&c, p) + c.k_bytes, !key && p == AT ? big : one, HD, p % 32, t);
    }
    run_attention(out, k, &c, 0, N_POS);
    for (int i = 0; i < N_POS * GROUP; i++)
        OK_MSG(row_finite(out + i * HD, HD) == (i < AT * GROUP), "%s %s %g: position %d gives %g",
               k->name, kv_type_name(t), (double)bad, i / GROUP, (double)out[i * HD + 17]);
    case_fini(&c);
}

static void check_not_finite(const struct kernels *k)
{
    for (size_t t = 0; t < ARRAY_LEN(types); t++)
        for (int at = 64; at < 96; at += 13) {
            check_bad_input(k, types[t], NAN, at);
            check_bad_input(k, types[t], -INFINITY, at);
        }
    for (enum kv_type t = 0; t < KV_TYPE_END; t++)
        for (int key = 0; key < 2; key++) {
            check_bad_cache(k, t, key, t == KV_F16 ? 1e6f : INFINITY); /* too much for a half */
            check_bad_cache(k, t, key, NAN);
            check_bad_cache(k, t, key, -NAN);
            /* a score of -inf is a weight of 0: nothing to hide, but where the scale shows it */
            if (!key)
                check_bad_cache(k, t, key, -INFINITY);
        }
}

static void test_what_is_not_finite_is_not_hidden(void)
{
    each_level(check_not_finite);
}

/* ---- loading ---- */

struct source {
    const uint8_t *bytes;
    atomic_int fail_in; /* the n-th read from now fails; 0: none */
};

static int read_source(void *user, void *dst, uint64_t offset, size_t n, struct err *e)
{
    struct source *s = user;
    if (atomic_load(&s->fail_in) && atomic_fetch_sub(&s->fail_in, 1) == 1)
        return err_set(e, ERR_CORRUPT, "chunk %d is bad", 7);
    memcpy(dst, s->bytes + offset, n);
    return 0;
}

static void test_weight_read_in_parts_is_the_one_mapped(void)
{
    enum { N_IN = 1024, N_OUT = 8197 }; /* some MiB: many parts, the last one odd */
    struct device *d;
    struct device_config c = {.n_threads = 3};
    struct err e = {0}, why = {0};
    size_t bytes = (size_t)N_IN / 32 * 34 * N_OUT;
    uint8_t *blocks = malloc(bytes);
    uint64_t seed = 3;
    for (size_t i = 0; i < bytes; i++)
        blocks[i] = (uint8_t)unit_rand(&seed);
    struct source s = {.bytes = blocks};
    struct weight_src src = {"m", GGUF_Q8_0, N_IN, N_OUT, blocks, NULL, NULL};
    struct weight *mapped, *read, *none = NULL;
    if (OK_CALL(backend_cpu.open(&d, 0, &c, &e), e)) {
        OK_CALL(backend_cpu.load(d, &mapped, &src, &e), e);
        src = (struct weight_src){"m", GGUF_Q8_0, N_IN, N_OUT, NULL, read_source, &s};
        OK_CALL(backend_cpu.load(d, &read, &src, &e), e);
        OK(mapped->n_bytes == read->n_bytes && backend_cpu.weight_bytes(d, &src) == read->n_bytes);
        OK(!memcmp(mapped->data, read->data, read->n_bytes));
        s.fail_in = 3;
        OK(backend_cpu.load(d, &none, &src, &why) && !none && why.code == ERR_CORRUPT);
        OK_MSG(!strcmp(why.msg, "chunk 7 is bad"), "%s", why.msg);
        backend_cpu.close(d);
    }
    free(blocks);
}

/* ---- plans ---- */

static void test_size_that_overflows_fits_nowhere(void)
{
    struct device *d;
    struct err e = {0}, why = {0};
    struct exec *x = NULL;
    struct op op = {.kind = OP_NORM};
    struct plan_slot slot = {"x", 16};
    struct plan p = {.ops = &op,
                     .n_ops = 1,
                     .slots = &slot,
                     .n_slots = 1,
                     .max_batch = 1,
                     .max_out = 1,
                     .n_kv_layers = 4096,
                     .n_kv_heads = 1 << 10,
                     .head_dim = 1 << 14,
                     .n_pages = INT32_MAX};
    struct device_config c = {.n_threads = 1};
    uint64_t kv, scratch;
    if (!OK_CALL(backend_cpu.open(&d, 0, &c, &e), e))
        return;
    backend_cpu.plan_bytes(d, &p, &kv, &scratch);
    OK(kv == UINT64_MAX && scratch < 1u << 30);
    OK(backend_cpu.prepare(d, &x, &p, &why) && why.code == ERR_MEMORY);
    backend_cpu.close(d);
}

static struct op mul(int16_t in, int16_t out, int16_t add)
{
    static struct weight w;
    w.info = pack_info_find(GGUF_F32);
    return (struct op){.kind = OP_MATMUL, .in = in, .out = out, .add = add, .w = &w};
}

static struct op gather(int16_t in, int16_t out)
{
    return (struct op){.kind = OP_ROWS, .in = in, .out = out, .add = -1, .out_rows = true};
}

static struct op norm(int16_t in, int16_t out)
{
    return (struct op){.kind = OP_NORM, .in = in, .out = out, .add = -1, .out_rows = true};
}

/* How many regions the ops make. */
static int32_t count_regions(const struct op *ops, int32_t n)
{
    struct region v[8];
    struct region_list l = {v, 0};
    struct exec x = {.plan = {.ops = ops, .n_ops = n}};
    regions_build(&l, &x, true);
    return l.n;
}

static void test_ops_join_only_when_no_task_needs_another(void)
{
    enum { A, B, C, D };
    const struct {
        const char *what;
        int32_t n;
        struct op ops[2];
    } cases[] = {
        {"same input", 1, {mul(A, B, -1), mul(A, C, C)}},
        {"other input", 2, {mul(A, B, -1), mul(C, D, -1)}},
        {"adds what the first wrote", 2, {mul(A, B, -1), mul(A, C, B)}},
        {"writes where the first wrote", 2, {mul(A, B, -1), mul(A, B, -1)}},
        {"writes what the first adds", 2, {mul(A, B, C), mul(A, C, -1)}},
        {"writes what both read", 2, {mul(A, B, -1), mul(A, A, -1)}},
        {"gathers side by side", 1, {gather(A, B), gather(C, D)}},
        {"row-wise after a gather", 1, {gather(A, B), norm(B, C)}},
        {"gathers what the first wrote", 2, {norm(A, B), gather(B, C)}},
        {"writes what the first gathers", 2, {gather(A, B), norm(C, A)}},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        int32_t n = count_regions(cases[i].ops, 2);
        OK_MSG(n == cases[i].n, "%s: %d regions", cases[i].what, n);
    }
}

static void test_choice_without_a_device_says_why(void)
{
    static const char *const names[] = {NULL, "auto", "cpu"};
    const struct backend *be = NULL;
    setenv("INGOT_ISA", "nonsense", 1);
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        struct err e = {0};
        OK(backend_choose(&be, names[i], &e) && e.code == ERR_DEVICE);
        OK_MSG(strstr(e.msg, "INGOT_ISA=nonsense is not known"), "%s", e.msg);
    }
    unsetenv("INGOT_ISA");
    struct err e = {0};
    OK(backend_choose(&be, "abacus", &e) && e.code == ERR_USAGE && strstr(e.msg, "abacus"));
    OK(!be && !backend_choose(&be, NULL, NULL) && be == &backend_cpu);
}

/* ---- pool ---- */

enum { PHASES = 50, TASKS = 7 };

struct pool_job {
    struct pool *p;
    atomic_int n, seen[TASKS], phase, bad;
};

static void pool_task(void *ctx, int32_t task, int32_t thread)
{
    struct pool_job *j = ctx;
    int phase = atomic_load(&j->phase);
    if (atomic_exchange(&j->seen[task], phase + 1) != phase || thread < 0 ||
        thread >= pool_threads(j->p))
        atomic_fetch_add(&j->bad, 1); /* done twice, or before the phase's time */
    if (task == phase % TASKS && phase % 5 == 0)
        usleep(200); /* a straggler: nobody may go on without it */
    if (atomic_load(&j->phase) != phase)
        atomic_fetch_add(&j->bad, 1);
    atomic_fetch_add(&j->n, 1);
}

static int32_t pool_next(void *ctx)
{
    struct pool_job *j = ctx;
    if (atomic_load(&j->n) % TASKS)
        atomic_fetch_add(&j->bad, 1);
    return (atomic_fetch_add(&j->phase, 1) + 1) % PHASES ? TASKS : 0;
}

static void pool_job_run(struct pool_job *j)
{
    struct pool_work w = {pool_task, pool_next, j, TASKS};
    pool_run(j->p, &w);
}

static void test_pool_does_each_task_once_and_phases_in_order(void)
{
    for (int n = 1; n <= 5; n += 2) {
        struct pool_job j = {0};
        struct err e = {0};
        if (!OK_CALL(pool_new(&j.p, n, &e), e))
            return;
        for (int i = 1; i <= 20; i++) {
            pool_job_run(&j);
            OK(j.n == i * PHASES * TASKS && j.phase == i * PHASES);
        }
        OK(!j.bad);
        pool_free(j.p);
    }
}

static double cpu_seconds(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

static void test_idle_pool_takes_no_cpu(void)
{
    struct pool_job j = {0};
    struct err e = {0};
    if (!OK_CALL(pool_new(&j.p, 3, &e), e))
        return;
    pool_job_run(&j);
    usleep(50000);
    double before = cpu_seconds();
    usleep(300000);
    OK_MSG(cpu_seconds() - before < 0.01, "%g s", cpu_seconds() - before);
    pool_job_run(&j); /* and it wakes */
    OK(j.n == 2 * PHASES * TASKS && !j.bad);
    pool_free(j.p);
}

static const struct unit_test tests[] = {
    {"packing_loses_nothing", test_packing_loses_nothing},
    {"matmul_means_what_it_says_and_ignores_tiling",
     test_matmul_means_what_it_says_and_ignores_tiling},
    {"matmul_does_not_wrap_at_the_limits", test_matmul_does_not_wrap_at_the_limits},
    {"quantized_activations_are_within_half_a_step",
     test_quantized_activations_are_within_half_a_step},
    {"norm_and_gate_agree_with_double", test_norm_and_gate_agree_with_double},
    {"attention_agrees_with_double_and_ignores_blocking",
     test_attention_agrees_with_double_and_ignores_blocking},
    {"what_is_not_finite_is_not_hidden", test_what_is_not_finite_is_not_hidden},
    {"weight_read_in_parts_is_the_one_mapped", test_weight_read_in_parts_is_the_one_mapped},
    {"size_that_overflows_fits_nowhere", test_size_that_overflows_fits_nowhere},
    {"ops_join_only_when_no_task_needs_another", test_ops_join_only_when_no_task_needs_another},
    {"choice_without_a_device_says_why", test_choice_without_a_device_says_why},
    {"pool_does_each_task_once_and_phases_in_order",
     test_pool_does_each_task_once_and_phases_in_order},
    {"idle_pool_takes_no_cpu", test_idle_pool_takes_no_cpu},
};

int main(int argc, char **argv)
{
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
