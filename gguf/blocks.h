/* The bytes of the quantized block types, as they lie in a file: little endian, packed, unaligned.
 * One block holds 32 or 256 consecutive values of a row. Halves (d, dmin, m) are IEEE binary16
 * bits. Read by the reference decoders here and by the backends when they repack weights.
 *
 * Source: the block layouts of the ggml project's GGUF types, as its format description gives them.
 */
#ifndef INGOT_GGUF_BLOCKS_H
#define INGOT_GGUF_BLOCKS_H

#include <stdint.h>

/* value i < 16 is the low nibble of qs[i], value i >= 16 the high nibble of qs[i - 16] */
struct block_q4_0 {
    uint16_t d; /* half: value = d * (q - 8) */
    uint8_t qs[16];
};
struct block_q4_1 {
    uint16_t d, m; /* halves: value = d * q + m */
    uint8_t qs[16];
};
struct block_q5_0 {
    uint16_t d;     /* half: value = d * (q - 16) */
    uint8_t qh[4];  /* bit i: fifth bit of value i */
    uint8_t qs[16]; /* low four bits as in q4_0 */
};
struct block_q5_1 {
    uint16_t d, m; /* halves: value = d * q + m */
    uint8_t qh[4];
    uint8_t qs[16];
};
struct block_q8_0 {
    uint16_t d; /* half: value = d * q */
    int8_t qs[32];
};
struct block_iq4_nl {
    uint16_t d;     /* half: value = d * gguf_iq4nl_values[q] */
    uint8_t qs[16]; /* as in q4_0 */
};

/* 256 values. "Part" k of 16 or 32 values has its own small scale. */

/* 16 parts of 16. Bits: byte 32 h + l of qs (h = 0, 1) holds values 128 h + l + 32 j, at bit 2 j.
 */
struct block_q2_k {
    uint8_t scales[16]; /* low nibble: scale, high nibble: minimum, of part k */
    uint8_t qs[64];
    uint16_t d, dmin; /* halves: value = d * scale * q - dmin * minimum */
};
/* 16 parts of 16. Low two bits as in q2_k; bit j of hmask[l] (j < 8) set: value l + 32 j has no -4.
 */
struct block_q3_k {
    uint8_t hmask[32];
    uint8_t qs[64];
    uint8_t scales[12]; /* 16 scales of 6 bits: low 4 in bytes 0..7, high 2 in bytes 8..11 */
    uint16_t d;         /* half: value = d * (scale - 32) * (q - (bit ? 0 : 4)) */
};
/* 8 parts of 32. qs byte 32 p + l: value 64 p + l in the low nibble, 64 p + 32 + l in the high. */
struct block_q4_k {
    uint16_t d, dmin;   /* halves: value = d * scale * q - dmin * minimum */
    uint8_t scales[12]; /* 8 scales and 8 minima of 6 bits; see block_scale_min */
    uint8_t qs[128];
};
/* As q4_k with a fifth bit: bit k of qh[l] belongs to value l of part k. */
struct block_q5_k {
    uint16_t d, dmin;
    uint8_t scales[12];
    uint8_t qh[32];
    uint8_t qs[128];
};
/* 16 parts of 16. In half h, value l + 32 j (l < 32, j < 4): low bits in ql[64 h + l + 32 (j & 1)],
 * low nibble for j < 2; high bits in qh[32 h + l], at bit 2 j. */
struct block_q6_k {
    uint8_t ql[128];
    uint8_t qh[64];
    int8_t scales[16];
    uint16_t d; /* half: value = d * scale * (q - 32) */
};
/* 8 parts of 32, each laid out as in iq4_nl. */
struct block_iq4_xs {
    uint16_t d;          /* half: value = d * (scale - 32) * gguf_iq4nl_values[q] */
    uint16_t scales_h;   /* bits 2 k, 2 k + 1: high bits of the scale of part k */
    uint8_t scales_l[4]; /* low four bits: even parts in low nibbles */
    uint8_t qs[128];
};

_Static_assert(sizeof(struct block_q4_0) == 18, "layout of Q4_0");
_Static_assert(sizeof(struct block_q4_1) == 20, "layout of Q4_1");
_Static_assert(sizeof(struct block_q5_0) == 22, "layout of Q5_0");
_Static_assert(sizeof(struct block_q5_1) == 24, "layout of Q5_1");
_Static_assert(sizeof(struct block_q8_0) == 34, "layout of Q8_0");
_Static_assert(sizeof(struct block_iq4_nl) == 18, "layout of IQ4_NL");
_Static_assert(sizeof(struct block_q2_k) == 84, "layout of Q2_K");
_Static_assert(sizeof(struct block_q3_k) == 110, "layout of Q3_K");
_Static_assert(sizeof(struct block_q4_k) == 144, "layout of Q4_K");
_Static_assert(sizeof(struct block_q5_k) == 176, "layout of Q5_K");
_Static_assert(sizeof(struct block_q6_k) == 210, "layout of Q6_K");
_Static_assert(sizeof(struct block_iq4_xs) == 136, "layout of IQ4_XS");

/* Scale and minimum of part k (0..7) of a Q4_K or Q5_K block, each 0..63. The first four parts lie
 * in the low six bits of bytes 0..3 and 4..7; of the others the low nibbles share bytes 8..11 and
 * the high two bits sit on top of the first eight bytes. */
static inline void block_scale_min(uint8_t *scale, uint8_t *min, const uint8_t *scales, unsigned k)
{
    if (k < 4) {
        *scale = scales[k] & 63;
        *min = scales[k + 4] & 63;
        return;
    }
    *scale = (uint8_t)((scales[k + 4] & 15) | (scales[k - 4] >> 6) << 4);
    *min = (uint8_t)((scales[k + 4] >> 4) | (scales[k] >> 6) << 4);
}

/* Scale of part k (0..15) of a Q3_K block, 0..63; the value uses it minus 32. */
static inline uint8_t block_q3_scale(const uint8_t *scales, unsigned k)
{
    unsigned low = k < 8 ? scales[k] & 15 : scales[k - 8] >> 4;
    return (uint8_t)(low | ((scales[8 + k % 4] >> 2 * (k / 4)) & 3) << 4);
}

/* Scale of part k (0..7) of an IQ4_XS block, 0..63; the value uses it minus 32. */
static inline uint8_t block_iq4xs_scale(const struct block_iq4_xs *b, unsigned k)
{
    unsigned low = b->scales_l[k / 2] >> 4 * (k % 2) & 15;
    return (uint8_t)(low | (b->scales_h >> 2 * k & 3) << 4);
}

#endif
