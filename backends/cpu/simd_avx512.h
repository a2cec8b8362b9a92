/* The vector words of kern_simd.h in AVX-512 (F, BW, DQ, VL), with VNNI's dot product where the
 * including file says V_VNNI: 16 lanes. */
#include <immintrin.h>

enum { VL = 16, MAX_ROWS = 8 };
typedef __m512i vi;
typedef __m512 vf;

#define FN static inline __attribute__((always_inline))
FN vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
FN vi vi_zero(void) { return _mm512_setzero_si512(); }
FN vi vi_bytes(int c) { return _mm512_set1_epi8((char)c); }
FN vi vi_word4(const void *p) { int v; __builtin_memcpy(&v, p, 4); return _mm512_set1_epi32(v); }
FN vi vi_int(int v) { return _mm512_set1_epi32(v); }
FN vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
FN vi vi_or(vi a, vi b) { return _mm512_or_si512(a, b); }
FN vi vi_xor(vi a, vi b) { return _mm512_xor_si512(a, b); }
FN vi vi_srl16(vi a, int n) { return _mm512_srli_epi16(a, (unsigned)n); }
FN vi vi_sll16(vi a, int n) { return _mm512_slli_epi16(a, (unsigned)n); }
FN vi vi_srl32(vi a, int n) { return _mm512_srli_epi32(a, (unsigned)n); }
FN vi vi_sll32(vi a, int n) { return _mm512_slli_epi32(a, (unsigned)n); }
FN vi vi_add16(vi a, vi b) { return _mm512_add_epi16(a, b); }
FN vi vi_add32(vi a, vi b) { return _mm512_add_epi32(a, b); }
FN vi vi_sub32(vi a, vi b) { return _mm512_sub_epi32(a, b); }
FN vi vi_mul32(vi a, vi b) { return _mm512_mullo_epi32(a, b); }
/* u8 times s8, neighbouring products added to i16 */
FN vi vi_maddubs(vi u, vi s) { return _mm512_maddubs_epi16(u, s); }
FN vi vi_madd16(vi a, vi b) { return _mm512_madd_epi16(a, b); }
FN vi vi_ones16(void) { return _mm512_set1_epi16(1); }
FN vi vi_abs8(vi a) { return _mm512_abs_epi8(a); }
/* a with the sign of `sign`; where that is 0 its partner in the product is 0 too */
FN vi vi_sign8(vi a, vi sign)
{
    return _mm512_mask_sub_epi8(a, _mm512_movepi8_mask(sign), _mm512_setzero_si512(), a);
}
#ifdef V_VNNI
/* u8 times s8, four neighbouring products added to i32 (VPDPBUSD) */
FN vi vi_dot4(vi acc, vi u, vi s) { return _mm512_dpbusd_epi32(acc, u, s); }
#endif
/* 16-entry byte table look-up */
FN vi vi_lut(const void *table, vi i)
{
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table)), i);
}
/* VL int8 to i32 lanes; 2 VL int8 to i16 pairs */
FN vi vi_s8(const void *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(p)); }
FN vi vi_s8_pairs(const void *p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256(p)); }

/* The optimizer is to take it for any value (not where an emulation has no such register). */
FN void vi_opaque(vi *v)
{
#ifdef __AVX512F__
    __asm__ volatile("" : "+v"(*v));
#endif
}

FN vf vf_zero(void) { return _mm512_setzero_ps(); }
FN vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
FN void vf_store(float *p, vf v) { _mm512_storeu_ps(p, v); }
FN vf vf_set(float x) { return _mm512_set1_ps(x); }
FN vf vf_half(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }
FN void vf_store_half(void *p, vf v) { _mm256_storeu_si256(p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }
FN vf vf_bf16(const void *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
}
FN vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
FN vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
FN vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
FN vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
FN vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
FN vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
FN vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
FN vf vf_abs(vf a) { return _mm512_abs_ps(a); }
FN vf vf_from_i32(vi a) { return _mm512_cvtepi32_ps(a); }
FN vi vi_round(vf a) { return _mm512_cvtps_epi32(a); }
FN vf vf_from_bits(vi a) { return _mm512_castsi512_ps(a); }
/* VL i32 to int8 (they fit) */
FN void vi_store_s8(void *p, vi a) { _mm_storeu_si128(p, _mm512_cvtepi32_epi8(a)); }
FN float vf_sum(vf a) { return _mm512_reduce_add_ps(a); }
FN float vf_hmax(vf a) { return _mm512_reduce_max_ps(a); }
/* not _mm512_reduce_add_epi32: the compiler's header adds signed ints, and hostile weights wrap */
FN int vi_sum(vi a)
{
    __m256i b = _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    __m128i c = _mm_add_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
    c = _mm_add_epi32(c, _mm_shuffle_epi32(c, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(c, _mm_shuffle_epi32(c, 0xb1)));
}
