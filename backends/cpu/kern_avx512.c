/* The kernels for AVX-512 (F, BW, DQ, VL, CD): 16 lanes. Built with that ISA's flags;
 * only called where the CPU has it (cpu.c). */
#if defined(__x86_64__)

#include "backends/cpu/simd_avx512.h"
#include "backends/cpu/kern_simd.h"

DEFINE_KERNELS(kernels_avx512, "avx512");
#endif
