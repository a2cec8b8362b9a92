/* Linked with the emulated AVX-512 kernels: tells the CPU backend that it may use them. */
#include "backends/cpu/cpu_internal.h"

#include <string.h>

bool cpu_emulates(const char *needs)
{
    return !strncmp(needs, "avx512", 6);
}
