/* Block types: decoders against a second decoder written from the format's definition (any one
 * value by its position, in double), encoders against error bounds, halves against all values. */
#include "gguf/blocks.h"
#include "gguf/gguf.h"
#include "tests/unit/unit.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- the second decoder: value i of the block at p, in double ---- */

static double half_at(const uint8_t *p)
{
    unsigned h = p[0] | (unsigned)p[1] << 8, e = h >> 10 & 31, m = h & 1023;
    double v = e == 31 ? (m ? NAN : INFINITY) : e ? ldexp(1024 + m, (int)e - 25) : ldexp(m, -24);
    return h & 0x8000 ? -v : v;
}

static unsigned bits_at(const uint8_t *p, unsigned bit, unsigned n)
{
    return p[bit / 8] >> bit % 8 & ((1u << n) - 1);
}

/* Field of n bits for value i where `per` values share a byte and neighbours in i are neighbours in
 * bytes: a run of stride bytes holds stride * per values. */
static unsigned strided(const uint8_t *p, unsigned i, unsigned stride, unsigned n)
{
    unsigned per = 8 / n, run = stride * per;
    return bits_at(p + i / run * stride + i % stride, i % run / stride * n, n);
}

static double code(unsigned q)
{
    static const double book[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                    1,    13,   25,  38,  53,  69,  89,  113};
    return book[q];
}

static void k4_scale(double *scale, double *min, const uint8_t *s, unsigned part)
{
    if (part < 4) {
        *scale = bits_at(s + part, 0, 6);
        *min = bits_at(s + 4 + part, 0, 6);
    } else {
        *scale = bits_at(s + 4 + part, 0, 4) + 16 * bits_at(s + part - 4, 6, 2);
        *min = bits_at(s + 4 + part, 4, 4) + 16 * bits_at(s + part, 6, 2);
    }
}

static double value_of_32(uint32_t type, const uint8_t *p, unsigned i)
{
    double d = half_at(p), m = half_at(p + 2);
    switch (type) {
    case GGUF_Q4_0:
        return d * ((double)strided(p + 2, i, 16, 4) - 8);
    case GGUF_Q4_1:
        return d * strided(p + 4, i, 16, 4) + m;
    case GGUF_Q5_0:
        return d * ((double)strided(p + 6, i, 16, 4) + 16 * bits_at(p + 2, i, 1) - 16);
    case GGUF_Q5_1:
        return d * (strided(p + 8, i, 16, 4) + 16 * bits_at(p + 4, i, 1)) + m;
    case GGUF_Q8_0:
        return d * (int8_t)p[2 + i];
    case GGUF_IQ4_NL:
        return d * code(strided(p + 2, i, 16, 4));
    default:
        return NAN;
    }
}

static double value_of_256(uint32_t type, const uint8_t *p, unsigned i)
{
    double scale, min;
    unsigned part = i / 16;
    switch (type) {
    case GGUF_Q2_K:
        return half_at(p + 80) * (p[part] & 15) * strided(p + 16, i, 32, 2) -
               half_at(p + 82) * (p[part] >> 4);
    case GGUF_Q3_K:
        scale = (part < 8 ? p[96 + part] & 15 : p[88 + part] >> 4) +
                16 * bits_at(p + 104 + part % 4, 2 * (part / 4), 2);
        return half_at(p + 108) * (scale - 32) *
               ((double)strided(p + 32, i, 32, 2) + 4 * strided(p, i, 32, 1) - 4);
    case GGUF_Q4_K:
        k4_scale(&scale, &min, p + 4, i / 32);
        return half_at(p) * scale * strided(p + 16, i, 32, 4) - half_at(p + 2) * min;
    case GGUF_Q5_K:
        k4_scale(&scale, &min, p + 4, i / 32);
        return half_at(p) * scale * (strided(p + 48, i, 32, 4) + 16 * strided(p + 16, i, 32, 1)) -
               half_at(p + 2) * min;
    case GGUF_Q6_K:
        return half_at(p + 208) * (int8_t)p[192 + part] *
               ((double)strided(p, i, 64, 4) + 16 * strided(p + 128, i, 32, 2) - 32);
    case GGUF_IQ4_XS:
        part = i / 32;
        scale = bits_at(p + 4, 4 * part, 4) + 16 * bits_at(p + 2, 2 * part, 2);
        return half_at(p) * (scale - 32) * code(strided(p + 8 + 16 * part, i % 32, 16, 4));
    default:
        return NAN;
    }
}

static double value_at(uint32_t type, const uint8_t *p, uint64_t i)
{
    const struct gguf_dtype_info *info = gguf_dtype_find(type);
    const uint8_t *b = p + i / info->block_len * info->block_bytes;
    unsigned at = (unsigned)(i % info->block_len);
    float f;
    uint32_t bits;
    if (info->block_len == 256)
        return value_of_256(type, b, at);
    if (info->block_len == 32)
        return value_of_32(type, b, at);
    if (type == GGUF_F16)
        return half_at(b);
    bits = type == GGUF_BF16
               ? (uint32_t)b[0] << 16 | (uint32_t)b[1] << 24
               : b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
    memcpy(&f, &bits, 4);
    return (double)f;
}

/* Products have at most 24 significant bits, so one rounding at the end is what both must do. */
static uint64_t count_wrong(uint32_t type, const uint8_t *p, const float *got, uint64_t n)
{
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < n; i++) {
        float want = (float)value_at(type, p, i);
        wrong += want != got[i] && !(isnan(want) && isnan(got[i]));
    }
    return wrong;
}

static uint32_t known_types[32];

static size_t list_types(void)
{
    size_t n = 0;
    for (uint32_t t = 0; t < GGUF_DTYPE_END; t++)
        if (gguf_dtype_find(t))
            known_types[n++] = t;
    return n;
}

/* ---- tests ---- */

static void test_every_type_has_a_whole_row_in_the_table(void)
{
    OK(list_types() == 15);
    for (size_t k = 0; k < list_types(); k++) {
        uint32_t t = known_types[k];
        const struct gguf_dtype_info *info = gguf_dtype_find(t);
        OK_MSG(info->block_bytes && info->to_f32 && info->from_f32, "%s", info->name);
        OK_MSG(info->block_len == 1 || info->block_len == 32 || info->block_len == 256, "%s",
               info->name);
        OK(gguf_dtype_by_name(info->name) == (int)t);
        OK(strcmp(gguf_dtype_spec_name(t), info->name) == 0);
    }
    OK(gguf_dtype_by_name("q4_k") == GGUF_Q4_K);
    OK(gguf_dtype_by_name("Q4_9") == -1);
    OK(!gguf_dtype_find(GGUF_DTYPE_END) && !gguf_dtype_find(UINT32_MAX));
    OK(!gguf_dtype_spec_name(4) && strcmp(gguf_dtype_spec_name(39), "MXFP4") == 0);
}

static void test_every_half_survives_and_midpoints_round_to_even(void)
{
    unsigned bad = 0;
    for (unsigned h = 0; h < 0x10000; h++) {
        uint8_t bytes[2] = {(uint8_t)h, (uint8_t)(h >> 8)};
        float f = f16_to_f32((uint16_t)h);
        double want = half_at(bytes);
        if (isnan(want)) {
            bad += !isnan(f) || !isnan(f16_to_f32(f32_to_f16(f)));
            continue;
        }
        bad += (double)f != want || f32_to_f16(f) != h;
        if ((h & 0x7fff) >= 0x7bff)
            continue;
        float next = f16_to_f32((uint16_t)(h + 1)), mid = (f + next) / 2;
        bad += f32_to_f16(mid) != (h & 1 ? h + 1 : h);
        bad += f32_to_f16(nextafterf(mid, next)) != h + 1;
        bad += f32_to_f16(nextafterf(mid, f)) != h;
    }
    OK_MSG(bad == 0, "%u wrong conversions", bad);
    OK(f32_to_f16(65519.99f) == 0x7bff && f32_to_f16(65520.0f) == 0x7c00);
    OK(f32_to_f16(-1e30f) == 0xfc00 && f32_to_f16(0x1p-25f) == 0 && f32_to_f16(-0.0f) == 0x8000);
}

static void test_every_bf16_survives_and_midpoints_round_to_even(void)
{
    unsigned bad = 0;
    for (unsigned h = 0; h < 0x10000; h++) {
        float f = bf16_to_f32((uint16_t)h);
        if (isnan(f)) {
            bad += !isnan(bf16_to_f32(f32_to_bf16(f)));
            continue;
        }
        bad += f32_to_bf16(f) != h;
        if ((h & 0x7fff) >= 0x7f7f)
            continue;
        uint32_t bits = h << 16 | 0x8000;
        float mid;
        memcpy(&mid, &bits, 4);
        bad += f32_to_bf16(mid) != (h & 1 ? h + 1 : h);
    }
    OK_MSG(bad == 0, "%u wrong conversions", bad);
    uint32_t bits = 0x7f800001; /* a NaN whose payload lies in the lower half */
    float low;
    memcpy(&low, &bits, 4);
    OK(isnan(bf16_to_f32(f32_to_bf16(low))) && isnan(f16_to_f32(f32_to_f16(low))));
}

static void test_decoders_agree_with_the_definition_on_random_blocks(void)
{
    static _Alignas(16) uint8_t src[256 * 1024];
    static float got[64 * 1024];
    uint64_t seed = 7;
    for (size_t k = 0; k < list_types(); k++) {
        const struct gguf_dtype_info *info = gguf_dtype_find(known_types[k]);
        size_t n = ARRAY_LEN(got) / info->block_len * info->block_len;
        for (size_t i = 0; i < sizeof src; i++)
            src[i] = (uint8_t)unit_rand(&seed);
        info->to_f32(got, src, n);
        uint64_t wrong = count_wrong(known_types[k], src, got, n);
        OK_MSG(wrong == 0, "%s: %llu of %zu values differ", info->name, (unsigned long long)wrong,
               n);
    }
}

/* Relative rms error of an encoder for normal numbers with rows of differing size. Bounds are about
 * 1.06 times what fitted scales reach; plain absmax and minmax scales miss those of four bits. */
static const struct {
    uint32_t type;
    double bound;
} bounds[] = {
    {GGUF_F32, 0},        {GGUF_F16, 2.2e-4},   {GGUF_BF16, 1.8e-3}, {GGUF_Q8_0, 5.6e-3},
    {GGUF_Q5_0, 0.042},   {GGUF_Q5_1, 0.0355},  {GGUF_Q4_0, 0.084},  {GGUF_Q4_1, 0.0735},
    {GGUF_IQ4_NL, 0.077}, {GGUF_IQ4_XS, 0.078}, {GGUF_Q6_K, 0.0184}, {GGUF_Q5_K, 0.0375},
    {GGUF_Q4_K, 0.0745},  {GGUF_Q3_K, 0.15},    {GGUF_Q2_K, 0.285},
};

static double relative_rms(const float *a, const float *b, uint64_t n)
{
    double err = 0, sum = 0;
    for (uint64_t i = 0; i < n; i++) {
        double d = (double)a[i] - (double)b[i];
        err += d * d;
        sum += (double)a[i] * (double)a[i];
    }
    return sqrt(err / sum);
}

static void test_encoders_stay_within_their_error_bounds(void)
{
    enum { N = 32 * 1024 };
    static float x[N], y[N];
    static _Alignas(16) uint8_t enc[4 * N];
    uint64_t seed = 3;
    for (size_t i = 0; i < N; i++)
        x[i] = unit_randn(&seed) * (i / 1024 % 2 ? 0.02f : 0.05f);
    OK(ARRAY_LEN(bounds) == list_types());
    for (size_t k = 0; k < ARRAY_LEN(bounds); k++) {
        const struct gguf_dtype_info *info = gguf_dtype_find(bounds[k].type);
        info->from_f32(enc, x, N);
        info->to_f32(y, enc, N);
        double rms = relative_rms(x, y, N);
        OK_MSG(rms <= bounds[k].bound, "%s: %.5f above %.5f", info->name, rms, bounds[k].bound);
        OK_MSG(rms >= bounds[k].bound * 0.8, "%s: %.5f is too good to be true", info->name, rms);
    }
}

static void test_encoders_keep_zeros_and_constants(void)
{
    static _Alignas(16) uint8_t enc[4 * 256];
    float x[256] = {0}, y[256];
    for (size_t k = 0; k < list_types(); k++) {
        const struct gguf_dtype_info *info = gguf_dtype_find(known_types[k]);
        unsigned bad = 0;
        memset(x, 0, sizeof x);
        info->from_f32(enc, x, 256);
        info->to_f32(y, enc, 256);
        for (int i = 0; i < 256; i++)
            bad += y[i] != 0;
        for (int sign = -1; sign <= 1; sign += 2) {
            for (int i = 0; i < 256; i++)
                x[i] = 0.75f * (float)sign;
            info->from_f32(enc, x, 256);
            info->to_f32(y, enc, 256);
            for (int i = 0; i < 256; i++)
                bad += fabsf(y[i] - x[i]) > 0.02f;
        }
        OK_MSG(bad == 0, "%s: %u values off", info->name, bad);
    }
}

static void test_encoders_make_finite_blocks_of_anything(void)
{
    static const float wild[] = {NAN, INFINITY, -INFINITY, 3e38f, -3e38f, 1e-40f, -1e-45f, 0, 1};
    static _Alignas(16) uint8_t enc[4 * 256];
    float x[256], y[256];
    uint64_t seed = 11;
    for (size_t k = 0; k < list_types(); k++) {
        const struct gguf_dtype_info *info = gguf_dtype_find(known_types[k]);
        unsigned bad = 0;
        for (int round = 0; round < 200; round++) {
            uint64_t pick = unit_rand(&seed) % ARRAY_LEN(wild);
            for (int i = 0; i < 256; i++)
                x[i] = round % 2 ? wild[unit_rand(&seed) % ARRAY_LEN(wild)] : wild[pick];
            info->from_f32(enc, x, 256);
            info->to_f32(y, enc, 256);
            for (int i = 0; i < 256; i++)
                bad += !isfinite(y[i]);
        }
        OK_MSG(bad == 0 || info->block_len == 1, "%s: %u values not finite", info->name, bad);
    }
}

/* ---- the reference models ---- */

static void compare_with_float(const struct gguf *q, const struct gguf *f, uint32_t type,
                               double bound)
{
    unsigned n_checked = 0;
    for (uint64_t k = 0; k < q->n_tensors; k++) {
        const struct gguf_tensor *t = &q->tensors[k], *u = gguf_find_tensor(f, t->name);
        if (t->type != type || !OK_MSG(u && u->type == GGUF_F32, "%s", t->name))
            continue;
        uint64_t n = t->ne[0] * t->ne[1];
        float *y = mem_array(n, sizeof *y);
        CHECK(y);
        gguf_dtype_find(type)->to_f32(y, gguf_tensor_data(q, t), n);
        uint64_t wrong = count_wrong(type, gguf_tensor_data(q, t), y, n);
        OK_MSG(wrong == 0, "%s: %llu values differ", t->name, (unsigned long long)wrong);
        double rms = relative_rms(gguf_tensor_data(f, u), y, n);
        OK_MSG(rms < bound * 1.5 && rms >= bound * 0.4, "%s as %s: relative error %.4f", t->name,
               gguf_dtype_find(type)->name, rms);
        mem_free(y);
        n_checked++;
    }
    OK_MSG(n_checked, "no tensor of type %u", type);
}

static void test_reference_models_decode_to_their_float_weights(void)
{
    const char *base = unit_shared("refs/llama.gguf");
    struct gguf *f, *q;
    struct err e = {0};
    if (!base || !OK_CALL(gguf_open(&f, base, &e), e))
        return;
    for (size_t k = 0; k < ARRAY_LEN(bounds); k++) {
        char rel[64];
        const char *name = gguf_dtype_find(bounds[k].type)->name;
        if (bounds[k].type == GGUF_F32 || bounds[k].type == GGUF_Q5_1)
            continue; /* the first is the base, the second is not among the references */
        snprintf(rel, sizeof rel, "refs/llama-%s.gguf", name);
        const char *path = unit_shared(rel);
        if (!path || !OK_CALL(gguf_open(&q, path, &e), e))
            continue;
        compare_with_float(q, f, bounds[k].type, bounds[k].bound);
        gguf_free(q);
    }
    gguf_free(f);
}

static const struct unit_test tests[] = {
    {"every_type_has_a_whole_row_in_the_table", test_every_type_has_a_whole_row_in_the_table},
    {"every_half_survives_and_midpoints_round_to_even",
     test_every_half_survives_and_midpoints_round_to_even},
    {"every_bf16_survives_and_midpoints_round_to_even",
     test_every_bf16_survives_and_midpoints_round_to_even},
    {"decoders_agree_with_the_definition_on_random_blocks",
     test_decoders_agree_with_the_definition_on_random_blocks},
    {"encoders_stay_within_their_error_bounds", test_encoders_stay_within_their_error_bounds},
    {"encoders_keep_zeros_and_constants", test_encoders_keep_zeros_and_constants},
    {"encoders_make_finite_blocks_of_anything", test_encoders_make_finite_blocks_of_anything},
    {"reference_models_decode_to_their_float_weights",
     test_reference_models_decode_to_their_float_weights},
};

int main(int argc, char **argv)
{
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
