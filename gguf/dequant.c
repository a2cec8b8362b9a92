/* Reference decoders: blocks to float, one value after the other, in the order of operations that
 * the format's own reference uses, so that results agree with it bit for bit. Formulas are in
 * blocks.h. Owns no memory. src is aligned to two bytes at least, n is a multiple of the block
 * length. */
#include "gguf/gguf_internal.h"
#include "gguf/blocks.h"

#include <string.h>

void f32_to_f32(float *dst, const void *src, size_t n)
{
    memcpy(dst, src, n * sizeof *dst);
}

void f16_to_f32s(float *dst, const void *src, size_t n)
{
    const uint16_t *h = src;
    for (size_t i = 0; i < n; i++)
        dst[i] = f16_to_f32(h[i]);
}

void bf16_to_f32s(float *dst, const void *src, size_t n)
{
    const uint16_t *h = src;
    for (size_t i = 0; i < n; i++)
        dst[i] = bf16_to_f32(h[i]);
}

void q4_0_to_f32(float *dst, const void *src, size_t n)
{
    const struct block_q4_0 *b = src;
    for (size_t k = 0; k < n / 32; k++, b++, dst += 32) {
        float d = f16_to_f32(b->d);
        for (int i = 0; i < 16; i++) {
            dst[i] = (float)((b->qs[i] & 15) - 8) * d;
            dst[i + 16] = (float)((b->qs[i] >> 4) - 8) * d;
        }
    }
}

void q4_1_to_f32(float *dst, const void *src, size_t n)
{
    const struct block_q4_1 *b = src;
    for (size_t k = 0; k < n / 32; k++, b++, dst += 32) {
        float d = f16_to_f32(b->d), m = f16_to_f32(b->m);
        for (int i = 0; i < 16; i++) {
            dst[i] = (float)(b->qs[i] & 15) * d + m;
            dst[i + 16] = (float)(b->qs[i] >> 4) * d + m;
        }
    }
}

/* Five bits of value i of 32, from nibbles and a bit mask. */
static inline int five_bits(const uint8_t *qs, const uint8_t *qh, int i)
{
    int low = i < 16 ? qs[i] & 15 : qs[i - 16] >> 4;
    return low | (qh[i / 8] >> (i % 8) & 1) << 4;
}

void q5_0_to_f32(float *dst, const void *src, size_t n)
{
    const struct block_q5_0 *b = src;
    for (size_t k = 0; k < n / 32; k++, b++, dst += 32) {
        float d = f16_to_f32(b->d);
        for (int i = 0; i < 32; i++)
            dst[i] = (float)(five_bits(b->qs, b->qh, i) - 16) * d;
    }
}

void q5_1_to_f32(float *dst, const void *src, size_t n)
{
    const struct block_q5_1 *b = src;
    for (size_t k = 0; k < n / 32; k++, b++, dst += 32) {
        float d = f16_to_f32(b->d), m = f16_to_f32(b->m);
        for (int i = 0; i < 32; i++)
            dst[i] = (float)five_bits(b->qs, b->qh, i) * d + m;
    }
}

void q8_0_to_f32(float *dst, const void *src, size_t n)
{
    const struct block_q8_0 *b = src;
    for (size_t k = 0; k < n / 32; k++, b++, dst += 32) {
        float d = f16_to_f32(b->d);
        for (int i = 0; i < 32; i++)
            dst[i] = (float)b->qs[i] * d;
    }
}

void q2_k_to_f32(float *dst, const void *src, size_t n)
{
    const struct block_q2_k *b = src;
    for (size_t k = 0; k < n / 256; k++, b++) {
        float d = f16_to_f32(b->d), dmin = f16_to_f32(b->dmin);
        for (int part = 0; part < 16; part++, dst += 16) {
            float scale = d * (float)(b->scales[part] & 15);
            float min = dmin * (float)(b->scales[part] >> 4);
            const uint8_t *q = b->qs + 32 * (part / 8) + 16 * (part % 2);
            int shift = 2 * (part / 2 % 4);
            for (int i = 0; i < 16; i++)
                dst[i] = scale * (float)(q[i] >> shift & 3) - min;
        }
    }
}

void q3_k_to_f32(float *dst, const void *src, size_t n)
{
    const struct block_q3_k *b = src;
    for (size_t k = 0; k < n / 256; k++, b++) {
        float d = f16_to_f32(b->d);
        for (int part = 0; part < 16; part++, dst += 16) {
            float scale = d * (float)(block_q3_scale(b->scales, (unsigned)part) - 32);
            const uint8_t *q = b->qs + 32 * (part / 8) + 16 * (part % 2);
            const uint8_t *h = b->hmask + 16 * (part % 2);
            int shift = 2 * (part / 2 % 4), bit = part / 2;
            for (int i = 0; i < 16; i++)
                dst[i] = scale * (float)((q[i] >> shift & 3) - ((h[i] >> bit & 1) ? 0 : 4));
        }
    }
}

void q4_k_to_f32(float *dst, const void *src, size_t n)
{
    const struct block_q4_k *b = src;
    for (size_t k = 0; k < n / 256; k++, b++) {
        float d = f16_to_f32(b->d), dmin = f16_to_f32(b->dmin);
        for (unsigned part = 0; part < 8; part++, dst += 32) {
            uint8_t sc, mn;
            block_scale_min(&sc, &mn, b->scales, part);
            float scale = d * (float)sc, min = dmin * (float)mn;
            const uint8_t *q = b->qs + 32 * (part / 2);
            int shift = 4 * (part % 2);
            for (int i = 0; i < 32; i++)
                dst[i] = scale * (float)(q[i] >> shift & 15) - min;
        }
    }
}

void q5_k_to_f32(float *dst, const void *src, size_t n)
{
    const struct block_q5_k *b = src;
    for (size_t k = 0; k < n / 256; k++, b++) {
        float d = f16_to_f32(b->d), dmin = f16_to_f32(b->dmin);
        for (unsigned part = 0; part < 8; part++, dst += 32) {
            uint8_t sc, mn;
            block_scale_min(&sc, &mn, b->scales, part);
            float scale = d * (float)sc, min = dmin * (float)mn;
            const uint8_t *q = b->qs + 32 * (part / 2);
            int shift = 4 * (part % 2);
            for (int i = 0; i < 32; i++)
                dst[i] = scale * (float)((q[i] >> shift & 15) | (b->qh[i] >> part & 1) << 4) - min;
        }
    }
}

void q6_k_to_f32(float *dst, const void *src, size_t n)
{
    const struct block_q6_k *b = src;
    for (size_t k = 0; k < n / 256; k++, b++) {
        float d = f16_to_f32(b->d);
        for (int part = 0; part < 16; part++, dst += 16) {
            float scale = d * (float)b->scales[part];
            int half = part / 8, j = part / 2 % 4, first = 16 * (part % 2);
            const uint8_t *l = b->ql + 64 * half + 32 * (j & 1) + first;
            const uint8_t *h = b->qh + 32 * half + first;
            int shift = 4 * (j >> 1);
            for (int i = 0; i < 16; i++)
                dst[i] = scale * (float)(((l[i] >> shift & 15) | (h[i] >> 2 * j & 3) << 4) - 32);
        }
    }
}

void iq4_nl_to_f32(float *dst, const void *src, size_t n)
{
    const struct block_iq4_nl *b = src;
    for (size_t k = 0; k < n / 32; k++, b++, dst += 32) {
        float d = f16_to_f32(b->d);
        for (int i = 0; i < 16; i++) {
            dst[i] = d * (float)gguf_iq4nl_values[b->qs[i] & 15];
            dst[i + 16] = d * (float)gguf_iq4nl_values[b->qs[i] >> 4];
        }
    }
}

void iq4_xs_to_f32(float *dst, const void *src, size_t n)
{
    const struct block_iq4_xs *b = src;
    for (size_t k = 0; k < n / 256; k++, b++) {
        float d = f16_to_f32(b->d);
        for (unsigned part = 0; part < 8; part++, dst += 32) {
            float scale = d * (float)(block_iq4xs_scale(b, part) - 32);
            const uint8_t *q = b->qs + 16 * part;
            for (int i = 0; i < 16; i++) {
                dst[i] = scale * (float)gguf_iq4nl_values[q[i] & 15];
                dst[i + 16] = scale * (float)gguf_iq4nl_values[q[i] >> 4];
            }
        }
    }
}
