/* The kernels for AVX2 with FMA and F16C: 8 lanes. Built with that ISA's flags;
 * only called where the CPU has it (cpu.c). */
#if defined(__x86_64__)

#include "backends/cpu/simd_avx2.h"
#include "backends/cpu/kern_simd.h"

DEFINE_KERNELS(kernels_avx2, "avx2");
#endif
