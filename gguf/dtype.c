/* The table of block types: names, sizes, codecs; and the 16-bit float conversions. Owns no memory.
 * A number that is legal but not in the table has a name here and nothing else. */
#include "gguf/gguf_internal.h"
#include "gguf/blocks.h"

#include <string.h>
#include <strings.h>

#define QUANT(NAME, x, len)                                                                        \
    [GGUF_##NAME] = {#NAME, len, sizeof(struct block_##x), x##_to_f32, x##_from_f32}

static const struct gguf_dtype_info dtypes[GGUF_DTYPE_END] = {
    [GGUF_F32] = {"F32", 1, 4, f32_to_f32, f32_from_f32},
    [GGUF_F16] = {"F16", 1, 2, f16_to_f32s, f16_from_f32},
    [GGUF_BF16] = {"BF16", 1, 2, bf16_to_f32s, bf16_from_f32},
    QUANT(Q4_0, q4_0, 32),
    QUANT(Q4_1, q4_1, 32),
    QUANT(Q5_0, q5_0, 32),
    QUANT(Q5_1, q5_1, 32),
    QUANT(Q8_0, q8_0, 32),
    QUANT(Q2_K, q2_k, 256),
    QUANT(Q3_K, q3_k, 256),
    QUANT(Q4_K, q4_k, 256),
    QUANT(Q5_K, q5_k, 256),
    QUANT(Q6_K, q6_k, 256),
    QUANT(IQ4_NL, iq4_nl, 32),
    QUANT(IQ4_XS, iq4_xs, 256),
};

/* Every number the format has given out; withdrawn ones (4, 5, 31..33, 36..38) have none. */
static const char *const spec_names[GGUF_DTYPE_END] = {
    [0] = "F32",     [1] = "F16",      [2] = "Q4_0",   [3] = "Q4_1",    [6] = "Q5_0",
    [7] = "Q5_1",    [8] = "Q8_0",     [9] = "Q8_1",   [10] = "Q2_K",   [11] = "Q3_K",
    [12] = "Q4_K",   [13] = "Q5_K",    [14] = "Q6_K",  [15] = "Q8_K",   [16] = "IQ2_XXS",
    [17] = "IQ2_XS", [18] = "IQ3_XXS", [19] = "IQ1_S", [20] = "IQ4_NL", [21] = "IQ3_S",
    [22] = "IQ2_S",  [23] = "IQ4_XS",  [24] = "I8",    [25] = "I16",    [26] = "I32",
    [27] = "I64",    [28] = "F64",     [29] = "IQ1_M", [30] = "BF16",   [34] = "TQ1_0",
    [35] = "TQ2_0",  [39] = "MXFP4",   [40] = "NVFP4", [41] = "Q1_0",
};

const int8_t gguf_iq4nl_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                      1,    13,   25,  38,  53,  69,  89,  113};

const struct gguf_dtype_info *gguf_dtype_find(uint32_t type)
{
    return type < GGUF_DTYPE_END && dtypes[type].name ? &dtypes[type] : NULL;
}

int gguf_dtype_by_name(const char *name)
{
    for (int i = 0; i < GGUF_DTYPE_END; i++)
        if (dtypes[i].name && strcasecmp(dtypes[i].name, name) == 0)
            return i;
    return -1;
}

const char *gguf_dtype_spec_name(uint32_t type)
{
    return type < GGUF_DTYPE_END ? spec_names[type] : NULL;
}

int gguf_tensor_bytes(uint64_t *n_bytes, const struct gguf_dtype_info *info, const uint64_t ne[4])
{
    uint64_t n = ne[0] / info->block_len;
    for (int i = 1; i < 4; i++)
        if (mul_over(n, ne[i], &n))
            return -1;
    return mul_over(n, info->block_bytes, n_bytes) ? -1 : 0;
}

static float float_of(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static uint32_t bits_of(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

/* Exponents differ by 127 - 15 = 112; a subnormal half is its mantissa times 2^-24, a float. */
float f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00)
        return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest >= 0x400)
        return float_of(sign | ((rest << 13) + (112u << 23)));
    return float_of(sign | bits_of((float)rest * 0x1p-24f));
}

uint16_t f32_to_f16(float f)
{
    uint32_t bits = bits_of(f), rest = bits & 0x7fffffff;
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (rest > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (rest >> 13 & 0x3ff));
    if (rest >= 0x477ff000) /* 65520: the first that rounds to infinity */
        return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) /* below 2^-14: one half has steps of 2^-24, so the sum rounds for us */
        return (uint16_t)(sign | (bits_of(float_of(rest) + 0.5f) - bits_of(0.5f)));
    rest += 0xfff + (rest >> 13 & 1);
    return (uint16_t)(sign | (rest - (112u << 23)) >> 13);
}

float bf16_to_f32(uint16_t h)
{
    return float_of((uint32_t)h << 16);
}

uint16_t f32_to_bf16(float f)
{
    uint32_t bits = bits_of(f);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x40); /* keep it a NaN: its payload may lie below */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
