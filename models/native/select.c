/* Which instruction set this machine has, and the way in. */
#include <cpuid.h>
#include <stdlib.h>
#include <string.h>
#include "native.h"

extern const struct kernels kernels_avx2, kernels_avx512, kernels_avx512_bf16;

enum { AVX2 = 1, AVX512 = 2, AVX512_BF16 = 4 };

static int has(unsigned reg, int bit) { return reg >> bit & 1; }

/* What the CPU has and the system saves: by cpuid and xgetbv, as not every compiler brings __builtin_cpu_supports. */
static int instruction_sets(void)
{
    unsigned a, b, c, d, b7, a71 = 0, saved, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, 27) || !has(c, 12)) /* OSXSAVE, FMA */
        return 0;
    if (!__get_cpuid_count(7, 0, &a, &b7, &c, &d))
        return 0;
    if (a >= 1)
        __get_cpuid_count(7, 1, &a71, &b, &c, &d);
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    int found = (saved & 0x06) == 0x06 && has(b7, 5) ? AVX2 : 0;
    int avx512 = has(b7, 16) && has(b7, 17) && has(b7, 30) && has(b7, 31); /* F, DQ, BW, VL */
    if (found && avx512 && (saved & 0xe6) == 0xe6)
        found |= AVX512 | (has(a71, 5) ? AVX512_BF16 : 0);
    return found;
}

/* Kernels by name, for maps of a dtype; without one by CPU3D_INSTRUCTION_SET, else the best that the machine has. NULL where
   there are none. "avx512" for bfloat16 maps, which have better ones, multiplies in float32. */
const struct kernels *native_kernels(const char *name, int dtype)
{
    if (!name)
        name = getenv("CPU3D_INSTRUCTION_SET");
    if (name && !*name)
        name = NULL;
    int sets = instruction_sets();
    const struct kernels *found[] = {
        sets & AVX512_BF16 && dtype == BFLOAT16 ? &kernels_avx512_bf16 : NULL,
        sets & AVX512 ? &kernels_avx512 : NULL,
        sets & AVX2 ? &kernels_avx2 : NULL,
    };
    for (int i = 0; i < 3; i++)
        if (found[i] && (!name || !strcmp(name, found[i]->name)))
            return found[i];
    return NULL;
}

/* 0; -1 where memory ran out; -2 where the machine has no such kernels. `name` as in `native_kernels`. */
int native_convolve(const char *name, const struct operation *operation)
{
    const struct kernels *kernels = native_kernels(name, operation->dtype);
    return kernels ? kernels->convolve(operation) : -2;
}

int native_scratch(const char *name, const struct operation *operation, size_t *kept, size_t *passing)
{
    const struct kernels *kernels = native_kernels(name, operation->dtype);
    if (!kernels)
        return -2;
    kernels->scratch(operation, kept, passing);
    return 0;
}

int native_pass(const char *name, const struct pass *pass)
{
    const struct kernels *kernels = native_kernels(name, pass->dtype);
    return kernels ? kernels->pass(pass) : -2;
}

int native_filter_gradient(const char *name, const struct operation *operation)
{
    const struct kernels *kernels = native_kernels(name, operation->dtype);
    return kernels ? kernels->filter_gradient(operation) : -2;
}
