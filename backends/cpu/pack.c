/* Source blocks into panels and back: the table of block types as the CPU sees them. Loss-free:
 * codes and scales are kept as they are, only their places change. Works on memory of the caller.
 */
#include "backends/cpu/cpu_internal.h"

#include "gguf/blocks.h"

#include <string.h>

/* ---- taking a source block apart, one function a type ---- */

static void nibbles(uint8_t *q, const uint8_t *qs)
{
    for (int i = 0; i < 16; i++) {
        q[i] = qs[i] & 15;
        q[i + 16] = qs[i] >> 4;
    }
}

static void fifth_bits(uint8_t *q, const uint8_t qh[4])
{
    for (int i = 0; i < 32; i++)
        q[i] |= (uint8_t)((qh[i / 8] >> (i % 8) & 1) << 4);
}

static void take_q4_0(struct canon *c, const void *p)
{
    const struct block_q4_0 *b = p;
    c->head[0] = b->d;
    nibbles(c->q, b->qs);
}

static void take_q4_1(struct canon *c, const void *p)
{
    const struct block_q4_1 *b = p;
    c->head[0] = b->d;
    c->head[1] = b->m;
    nibbles(c->q, b->qs);
}

static void take_q5_0(struct canon *c, const void *p)
{
    const struct block_q5_0 *b = p;
    c->head[0] = b->d;
    nibbles(c->q, b->qs);
    fifth_bits(c->q, b->qh);
}

static void take_q5_1(struct canon *c, const void *p)
{
    const struct block_q5_1 *b = p;
    c->head[0] = b->d;
    c->head[1] = b->m;
    nibbles(c->q, b->qs);
    fifth_bits(c->q, b->qh);
}

static void take_q8_0(struct canon *c, const void *p)
{
    const struct block_q8_0 *b = p;
    c->head[0] = b->d;
    memcpy(c->q, b->qs, 32);
}

static void take_iq4_nl(struct canon *c, const void *p)
{
    const struct block_iq4_nl *b = p;
    c->head[0] = b->d;
    nibbles(c->q, b->qs);
}

static void take_iq4_xs(struct canon *c, const void *p)
{
    const struct block_iq4_xs *b = p;
    c->head[0] = b->d;
    for (unsigned k = 0; k < 8; k++) {
        c->scale[k] = (int8_t)(block_iq4xs_scale(b, k) - 32);
        nibbles(c->q + 32 * k, b->qs + 16 * k);
    }
}

static void take_q4_k(struct canon *c, const void *p)
{
    const struct block_q4_k *b = p;
    c->head[0] = b->d;
    c->head[1] = b->dmin;
    for (unsigned k = 0; k < 8; k++)
        block_scale_min((uint8_t *)&c->scale[k], (uint8_t *)&c->min[k], b->scales, k);
    for (int i = 0; i < 128; i++) {
        int at = i / 32 * 64 + i % 32;
        c->q[at] = b->qs[i] & 15;
        c->q[at + 32] = b->qs[i] >> 4;
    }
}

static void take_q5_k(struct canon *c, const void *p)
{
    const struct block_q5_k *b = p;
    c->head[0] = b->d;
    c->head[1] = b->dmin;
    for (unsigned k = 0; k < 8; k++)
        block_scale_min((uint8_t *)&c->scale[k], (uint8_t *)&c->min[k], b->scales, k);
    for (int k = 0; k < 8; k++)
        for (int l = 0; l < 32; l++)
            c->q[32 * k + l] =
                (uint8_t)((b->qs[32 * (k / 2) + l] >> 4 * (k & 1) & 15) | (b->qh[l] >> k & 1) << 4);
}

static void take_q6_k(struct canon *c, const void *p)
{
    const struct block_q6_k *b = p;
    c->head[0] = b->d;
    memcpy(c->scale, b->scales, 16);
    for (int h = 0; h < 2; h++)
        for (int j = 0; j < 4; j++)
            for (int l = 0; l < 32; l++)
                c->q[128 * h + 32 * j + l] =
                    (uint8_t)((b->ql[64 * h + 32 * (j & 1) + l] >> (j < 2 ? 0 : 4) & 15) |
                              (b->qh[32 * h + l] >> 2 * j & 3) << 4);
}

static void take_q3_k(struct canon *c, const void *p)
{
    const struct block_q3_k *b = p;
    c->head[0] = b->d;
    for (unsigned k = 0; k < 16; k++)
        c->scale[k] = (int8_t)(block_q3_scale(b->scales, k) - 32);
    for (int i = 0; i < 8; i++)
        for (int l = 0; l < 32; l++)
            c->q[32 * i + l] = (uint8_t)((b->qs[32 * (i / 4) + l] >> 2 * (i % 4) & 3) |
                                         (b->hmask[l] >> i & 1) << 2);
}

static void take_q2_k(struct canon *c, const void *p)
{
    const struct block_q2_k *b = p;
    c->head[0] = b->d;
    c->head[1] = b->dmin;
    for (int k = 0; k < 16; k++) {
        c->scale[k] = (int8_t)(b->scales[k] & 15);
        c->min[k] = (int8_t)(b->scales[k] >> 4);
    }
    for (int i = 0; i < 8; i++)
        for (int l = 0; l < 32; l++)
            c->q[32 * i + l] = b->qs[32 * (i / 4) + l] >> 2 * (i % 4) & 3;
}

/*   type         kind          n_sub head sc mn low high bits zero */
static const struct pack_info infos[] = {
    {GGUF_F32, PACK_FLOAT, 0, 0, 0, 0, 0, 0, 0, 0, NULL},
    {GGUF_F16, PACK_FLOAT, 0, 0, 0, 0, 0, 0, 0, 0, NULL},
    {GGUF_BF16, PACK_FLOAT, 0, 0, 0, 0, 0, 0, 0, 0, NULL},
    {GGUF_Q4_0, PACK_SCALE, 1, 1, 0, 0, 16, 0, 4, 8, take_q4_0},
    {GGUF_Q4_1, PACK_MIN, 1, 2, 0, 0, 16, 0, 4, 0, take_q4_1},
    {GGUF_Q5_0, PACK_SCALE, 1, 1, 0, 0, 16, 4, 4, 16, take_q5_0},
    {GGUF_Q5_1, PACK_MIN, 1, 2, 0, 0, 16, 4, 4, 0, take_q5_1},
    {GGUF_Q8_0, PACK_SIGNED, 1, 1, 0, 0, 32, 0, 8, 0, take_q8_0},
    {GGUF_IQ4_NL, PACK_TABLE, 1, 1, 0, 0, 16, 0, 4, 0, take_iq4_nl},
    {GGUF_IQ4_XS, PACK_K_TABLE, 8, 1, 1, 0, 16, 0, 4, 0, take_iq4_xs},
    {GGUF_Q4_K, PACK_K_MIN, 8, 2, 1, 1, 16, 0, 4, 0, take_q4_k},
    {GGUF_Q5_K, PACK_K_MIN, 8, 2, 1, 1, 16, 4, 4, 0, take_q5_k},
    {GGUF_Q6_K, PACK_K16, 8, 1, 2, 0, 16, 8, 4, 32, take_q6_k},
    {GGUF_Q3_K, PACK_K16, 8, 1, 2, 0, 8, 4, 2, 4, take_q3_k},
    {GGUF_Q2_K, PACK_K16_MIN, 8, 2, 2, 2, 8, 0, 2, 0, take_q2_k},
};

const struct pack_info *pack_info_find(uint32_t type)
{
    for (size_t i = 0; i < ARRAY_LEN(infos); i++)
        if (infos[i].type == type)
            return &infos[i];
    return NULL;
}

static size_t sub_lane_bytes(const struct pack_info *info)
{
    return (size_t)info->scale_bytes + info->min_bytes + info->low_bytes + info->high_bytes;
}

static size_t unit_lane_bytes(const struct pack_info *info)
{
    return 2u * info->n_head + info->n_sub * sub_lane_bytes(info);
}

size_t pack_panel_bytes(const struct pack_info *info, int64_t n_in, int32_t lanes)
{
    size_t lane_bytes = info->kind == PACK_FLOAT
                            ? (size_t)n_in * gguf_dtype_find(info->type)->block_bytes
                            : (size_t)n_in / (32u * info->n_sub) * unit_lane_bytes(info);
    return (lane_bytes * (size_t)lanes + 63) & ~(size_t)63;
}

/* ---- placing: 4 codes at a time in one 32-bit word (SWAR) ---- */

static uint32_t load32(const void *p)
{
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

static void store_word(uint8_t *part, int32_t lanes, int32_t lane, int word, uint32_t v)
{
    memcpy(part + ((size_t)word * (size_t)lanes + (size_t)lane) * 4, &v, 4);
}

static uint32_t load_word(const uint8_t *part, int32_t lanes, int32_t lane, int word)
{
    return load32(part + ((size_t)word * (size_t)lanes + (size_t)lane) * 4);
}

static void place_codes(uint8_t *part, const struct pack_info *info, const uint8_t *q,
                        int32_t lanes, int32_t lane)
{
    uint8_t *high = part + info->low_bytes * (size_t)lanes;
    uint32_t w[8];
    for (int g = 0; g < 8; g++)
        w[g] = load32(q + 4 * g);
    if (info->low_bits == 8)
        for (int g = 0; g < 8; g++)
            store_word(part, lanes, lane, g, w[g]);
    if (info->low_bits == 4)
        for (int g = 0; g < 4; g++)
            store_word(part, lanes, lane, g, (w[g] & 0x0f0f0f0fu) | (w[g + 4] & 0x0f0f0f0fu) << 4);
    if (info->low_bits == 2)
        for (int h = 0; h < 2; h++) {
            uint32_t v = 0;
            for (int g = 0; g < 4; g++)
                v |= (w[4 * h + g] & 0x03030303u) << 2 * g;
            store_word(part, lanes, lane, h, v);
        }
    if (info->high_bytes == 4) {
        uint32_t v = 0;
        for (int g = 0; g < 8; g++)
            v |= (w[g] >> info->low_bits & 0x01010101u) << g;
        store_word(high, lanes, lane, 0, v);
    }
    if (info->high_bytes == 8)
        for (int h = 0; h < 2; h++) {
            uint32_t v = 0;
            for (int g = 0; g < 4; g++)
                v |= (w[4 * h + g] >> info->low_bits & 0x03030303u) << 2 * g;
            store_word(high, lanes, lane, h, v);
        }
}

void pack_codes(uint8_t q[ACT_BLOCK], const struct pack_info *info, const uint8_t *low,
                const uint8_t *high, int32_t lanes, int32_t lane)
{
    for (int g = 0; g < 8; g++) {
        uint32_t v = 0;
        if (info->low_bits == 8)
            v = load_word(low, lanes, lane, g);
        else if (info->low_bits == 4)
            v = load_word(low, lanes, lane, g & 3) >> (g < 4 ? 0 : 4) & 0x0f0f0f0fu;
        else
            v = load_word(low, lanes, lane, g / 4) >> 2 * (g & 3) & 0x03030303u;
        if (info->high_bytes == 4)
            v |= (load_word(high, lanes, lane, 0) >> g & 0x01010101u) << info->low_bits;
        else if (info->high_bytes == 8)
            v |= (load_word(high, lanes, lane, g / 4) >> 2 * (g & 3) & 0x03030303u)
                 << info->low_bits;
        memcpy(q + 4 * g, &v, 4);
    }
}

static void place_unit(uint8_t *unit, const struct pack_info *info, const struct canon *c,
                       int32_t lanes, int32_t lane)
{
    size_t r = (size_t)lanes;
    for (int h = 0; h < info->n_head; h++)
        memcpy(unit + 2 * (r * (size_t)h + (size_t)lane), &c->head[h], 2);
    uint8_t *sub = unit + 2 * r * info->n_head;
    for (int s = 0; s < info->n_sub; s++, sub += r * sub_lane_bytes(info)) {
        size_t ns = info->scale_bytes, nm = info->min_bytes;
        memcpy(sub + ns * (size_t)lane, c->scale + ns * (size_t)s, ns);
        memcpy(sub + ns * r + nm * (size_t)lane, c->min + nm * (size_t)s, nm);
        place_codes(sub + (ns + nm) * r, info, c->q + 32 * s, lanes, lane);
    }
}

static void pack_float_panel(const struct weight *w, uint8_t *panel, const uint8_t *src,
                             size_t row_bytes, int32_t n_rows)
{
    size_t size = gguf_dtype_find(w->info->type)->block_bytes;
    for (int32_t r = 0; r < n_rows; r++)
        for (size_t i = 0; i < (size_t)w->n_in; i++)
            memcpy(panel + (i * (size_t)w->lanes + (size_t)r) * size,
                   src + (size_t)r * row_bytes + i * size, size);
}

void pack_panel(const struct weight *w, uint8_t *panel, const uint8_t *src, size_t row_bytes,
                int32_t n_rows)
{
    if (w->info->kind == PACK_FLOAT) {
        pack_float_panel(w, panel, src, row_bytes, n_rows);
        return;
    }
    size_t block = gguf_dtype_find(w->info->type)->block_bytes;
    size_t unit = unit_lane_bytes(w->info) * (size_t)w->lanes;
    size_t n_units = (size_t)w->n_in / (32u * w->info->n_sub);
    struct canon c;
    for (int32_t r = 0; r < n_rows; r++)
        for (size_t u = 0; u < n_units; u++) {
            w->info->take(&c, src + (size_t)r * row_bytes + u * block);
            place_unit(panel + u * unit, w->info, &c, w->lanes, r);
        }
}

/* ---- back to floats: the meaning of each kind, in one place ---- */

static uint16_t load16(const void *p)
{
    uint16_t v;
    memcpy(&v, p, 2);
    return v;
}

static void unit_floats(float *dst, const struct weight *w, const uint8_t *unit, int32_t lane)
{
    const struct pack_info *info = w->info;
    size_t r = (size_t)w->lanes, l = (size_t)lane;
    float d = f16_to_f32(load16(unit + 2 * l));
    float m = info->n_head > 1 ? f16_to_f32(load16(unit + 2 * (r + l))) : 0;
    const uint8_t *sub = unit + 2 * r * info->n_head;
    for (int s = 0; s < info->n_sub; s++, sub += r * sub_lane_bytes(info)) {
        size_t ns = info->scale_bytes, nm = info->min_bytes;
        const int8_t *sc = (const int8_t *)sub + ns * l,
                     *mn = (const int8_t *)sub + ns * r + nm * l;
        const uint8_t *low = sub + (ns + nm) * r;
        uint8_t q[ACT_BLOCK];
        pack_codes(q, info, low, low + info->low_bytes * r, w->lanes, lane);
        for (int i = 0; i < 32; i++) {
            float scale = ns ? d * (float)sc[ns == 2 ? i / 16 : 0] : d;
            float v = info->kind == PACK_SIGNED ? (int8_t)q[i]
                      : info->kind == PACK_TABLE || info->kind == PACK_K_TABLE
                          ? gguf_iq4nl_values[q[i]]
                          : (float)(q[i] - info->zero);
            float min = nm ? m * (float)mn[nm == 2 ? i / 16 : 0] : info->kind == PACK_MIN ? -m : 0;
            dst[32 * s + i] = scale * v - min;
        }
    }
}

void pack_row(float *dst, const struct weight *w, int64_t row)
{
    const uint8_t *panel = w->data + (size_t)(row / w->lanes) * w->panel_bytes;
    int32_t lane = (int32_t)(row % w->lanes);
    if (w->info->kind != PACK_FLOAT) {
        int64_t n = 32 * w->info->n_sub;
        size_t unit = unit_lane_bytes(w->info) * (size_t)w->lanes;
        for (int64_t u = 0; u < w->n_in / n; u++)
            unit_floats(dst + u * n, w, panel + (size_t)u * unit, lane);
        return;
    }
    const struct gguf_dtype_info *t = gguf_dtype_find(w->info->type);
    for (int64_t i = 0; i < w->n_in; i++)
        t->to_f32(dst + i, panel + (size_t)(i * w->lanes + lane) * t->block_bytes, 1);
}
