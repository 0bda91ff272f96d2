/* Which instruction set this machine has, and the way in. */
#include <stdlib.h>
#include <string.h>
#include "native.h"

extern const struct kernels kernels_avx2, kernels_avx512, kernels_avx512_bf16;

/* Kernels by name, for maps of a dtype; without one by CPU3D_INSTRUCTION_SET, else the best that the machine has. NULL where
   there are none. "avx512" for bfloat16 maps, which have better ones, multiplies in float32. */
const struct kernels *native_kernels(const char *name, int dtype)
{
    if (!name)
        name = getenv("CPU3D_INSTRUCTION_SET");
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    int bf16 = avx512 && dtype == BFLOAT16 && __builtin_cpu_supports("avx512bf16");
    const struct kernels *found[] = {bf16 ? &kernels_avx512_bf16 : NULL, avx512 ? &kernels_avx512 : NULL, avx2 ? &kernels_avx2 : NULL};
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

int native_filter_gradient(const char *name, const struct operation *operation)
{
    const struct kernels *kernels = native_kernels(name, operation->dtype);
    return kernels ? kernels->filter_gradient(operation) : -2;
}
