/* The kernels for AVX-512 with VNNI: 16 lanes, 8-bit dot products in one instruction. Built with
 * that ISA's flags; only called where the CPU has it (cpu.c). */
#if defined(__x86_64__)
#define V_VNNI 1
#include "backends/cpu/simd_avx512.h"
#include "backends/cpu/kern_simd.h"

DEFINE_KERNELS(kernels_avx512vnni, "avx512vnni");
#endif
