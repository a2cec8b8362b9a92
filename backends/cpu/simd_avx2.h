/* The vector words of kern_simd.h in AVX2, FMA and F16C: 8 lanes. */
#include <immintrin.h>

enum { VL = 8, MAX_ROWS = 8 };
typedef __m256i vi;
typedef __m256 vf;

#define FN static inline __attribute__((always_inline))
FN vi vi_load(const void *p) { return _mm256_loadu_si256(p); }
FN vi vi_zero(void) { return _mm256_setzero_si256(); }
FN vi vi_bytes(int c) { return _mm256_set1_epi8((char)c); }
FN vi vi_word4(const void *p) { int v; __builtin_memcpy(&v, p, 4); return _mm256_set1_epi32(v); }
FN vi vi_int(int v) { return _mm256_set1_epi32(v); }
FN vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
FN vi vi_or(vi a, vi b) { return _mm256_or_si256(a, b); }
FN vi vi_srl16(vi a, int n) { return _mm256_srli_epi16(a, n); }
FN vi vi_sll16(vi a, int n) { return _mm256_slli_epi16(a, n); }
FN vi vi_srl32(vi a, int n) { return _mm256_srli_epi32(a, n); }
FN vi vi_sll32(vi a, int n) { return _mm256_slli_epi32(a, n); }
FN vi vi_add16(vi a, vi b) { return _mm256_add_epi16(a, b); }
FN vi vi_add32(vi a, vi b) { return _mm256_add_epi32(a, b); }
FN vi vi_sub32(vi a, vi b) { return _mm256_sub_epi32(a, b); }
FN vi vi_mul32(vi a, vi b) { return _mm256_mullo_epi32(a, b); }
/* u8 times s8, neighbouring products added to i16 */
FN vi vi_maddubs(vi u, vi s) { return _mm256_maddubs_epi16(u, s); }
FN vi vi_madd16(vi a, vi b) { return _mm256_madd_epi16(a, b); }
FN vi vi_ones16(void) { return _mm256_set1_epi16(1); }
FN vi vi_abs8(vi a) { return _mm256_abs_epi8(a); }
FN vi vi_sign8(vi a, vi sign) { return _mm256_sign_epi8(a, sign); }
/* 16-entry byte table look-up */
FN vi vi_lut(const void *table, vi i)
{
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(table)), i);
}
/* VL int8 to i32 lanes; 2 VL int8 to i16 pairs */
FN vi vi_s8(const void *p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64(p)); }
FN vi vi_s8_pairs(const void *p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128(p)); }

/* The optimizer is to take it for any value (not where an emulation has no such register). */
FN void vi_opaque(vi *v)
{
#ifdef __AVX2__
    __asm__ volatile("" : "+v"(*v));
#endif
}

FN vf vf_zero(void) { return _mm256_setzero_ps(); }
FN vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
FN void vf_store(float *p, vf v) { _mm256_storeu_ps(p, v); }
FN vf vf_set(float x) { return _mm256_set1_ps(x); }
FN vf vf_half(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }
FN void vf_store_half(void *p, vf v) { _mm_storeu_si128(p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }
FN vf vf_bf16(const void *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}
FN vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
FN vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
FN vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
FN vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
FN vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
FN vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
FN vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
FN vf vf_abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
FN vf vf_from_i32(vi a) { return _mm256_cvtepi32_ps(a); }
FN vi vi_round(vf a) { return _mm256_cvtps_epi32(a); }
FN vf vf_from_bits(vi a) { return _mm256_castsi256_ps(a); }
/* VL i32 to int8 (they fit) */
FN void vi_store_s8(void *p, vi a)
{
    __m128i w = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64(p, _mm_packs_epi16(w, w));
}
FN float vf_sum(vf a)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
FN float vf_hmax(vf a)
{
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
FN int vi_sum(vi a)
{
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
