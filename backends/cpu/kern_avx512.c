/* The kernels for AVX-512 (F, BW, DQ, VL, CD): 16 lanes. Built with that ISA's flags;
 * only called where the CPU has it (cpu.c). */
#if defined(__x86_64__)

#include "backends/cpu/simd_avx512.h"
#include "backends/cpu/kern_simd.h"

const struct kernels kernels_avx512 = {
    .name = "avx512",
    .lanes = VL,
    .matmul = matmul,
    .quantize = quantize,
    .norm = norm,
    .glu = glu,
    .attention = attention,
    .kv_put = kv_put,
    .int8_peak = int8_peak,
};
#endif
