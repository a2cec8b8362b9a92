/* Stands in for the compiler's header so that the AVX-512 kernels run on any machine: SIMDe's
 * portable meaning of each intrinsic (Debian package libsimde-dev), and below the few that it lacks,
 * written out from their definition. For tests only, far from fast. */
#ifndef INGOT_TEST_IMMINTRIN_H
#define INGOT_TEST_IMMINTRIN_H

#define SIMDE_NO_NATIVE
#define SIMDE_ENABLE_NATIVE_ALIASES
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wshadow"
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>
#pragma GCC diagnostic pop

#include <math.h>
#include <stdint.h>
#include <string.h>

uint16_t f32_to_f16(float f);
float f16_to_f32(uint16_t h);

#define EMU static inline
#define _cvtss_sh(x, rounding) f32_to_f16(x)
#define _cvtsh_ss(h)           f16_to_f32(h)

/* out[i] = expression of x[i] over the lanes of a source vector */
#define EMU_MAP(name, out_type, out_elem, in_type, in_elem, n, expr)                               \
    EMU out_type name(in_type a)                                                                   \
    {                                                                                              \
        in_elem x[n];                                                                              \
        out_elem y[n];                                                                             \
        out_type r;                                                                                \
        memcpy(x, &a, sizeof x);                                                                   \
        for (int i = 0; i < n; i++)                                                                \
            y[i] = expr;                                                                           \
        memcpy(&r, y, sizeof y);                                                                   \
        return r;                                                                                  \
    }

#undef _mm512_cvtepi8_epi32
#undef _mm512_cvtepi8_epi16
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepi32_epi8
#undef _mm512_cvtps_epi32
#undef _mm512_cvtph_ps
#undef _mm512_cvtepi32_ps
#undef _mm512_madd_epi16
EMU_MAP(_mm512_cvtepi8_epi32, __m512i, int32_t, __m128i, int8_t, 16, x[i])
EMU_MAP(_mm512_cvtepi8_epi16, __m512i, int16_t, __m256i, int8_t, 32, x[i])
EMU_MAP(_mm512_cvtepu16_epi32, __m512i, uint32_t, __m256i, uint16_t, 16, x[i])
EMU_MAP(_mm512_cvtepi32_epi8, __m128i, int8_t, __m512i, int32_t, 16, (int8_t)x[i])
EMU_MAP(_mm512_cvtps_epi32, __m512i, int32_t, __m512, float, 16, (int32_t)lrintf(x[i]))
EMU_MAP(_mm512_cvtepi32_ps, __m512, float, __m512i, int32_t, 16, (float)x[i])
EMU_MAP(_mm512_cvtph_ps, __m512, float, __m256i, uint16_t, 16, f16_to_f32(x[i]))
EMU_MAP(emu_cvtps_ph, __m256i, uint16_t, __m512, float, 16, f32_to_f16(x[i]))
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(a, rounding) emu_cvtps_ph(a)

EMU __m512i _mm512_madd_epi16(__m512i a, __m512i b)
{
    int16_t x[32], y[32];
    int32_t z[16];
    memcpy(x, &a, sizeof x);
    memcpy(y, &b, sizeof y);
    for (int i = 0; i < 16; i++)
        z[i] = x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1];
    memcpy(&a, z, sizeof z);
    return a;
}

#define EMU_REDUCE(name, vec, elem, n, step)                                                       \
    EMU elem name(vec a)                                                                           \
    {                                                                                              \
        elem x[n];                                                                                 \
        memcpy(x, &a, sizeof x);                                                                   \
        for (int half = n / 2; half; half /= 2) /* the order of the compiler's reduction */       \
            for (int i = 0; i < half; i++)                                                         \
                x[i] = step;                                                                       \
        return x[0];                                                                               \
    }
#undef _mm512_reduce_add_ps
#undef _mm512_reduce_max_ps
#undef _mm512_reduce_add_epi32
EMU_REDUCE(_mm512_reduce_add_ps, __m512, float, 16, x[i] + x[i + half])
EMU_REDUCE(_mm512_reduce_max_ps, __m512, float, 16, x[i] > x[i + half] ? x[i] : x[i + half])
EMU_REDUCE(_mm512_reduce_add_epi32, __m512i, int32_t, 16, x[i] + x[i + half])

#endif
