/* Which instruction set this machine has, and the way in. */
#include <cpuid.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "native.h"

extern const struct kernels kernels_avx2, kernels_avx512, kernels_amx_in_c;
extern const struct kernels kernels_avx512_bf16 __attribute__((weak)), kernels_amx __attribute__((weak)); /* NULL if not compiled */

enum { AVX2 = 1, AVX512 = 2, AVX512_BF16 = 4, AMX = 8, INTEL = 16 };

static int has(unsigned reg, int bit) { return reg >> bit & 1; }

/* What the CPU has and the system saves: by cpuid and xgetbv, as not every compiler brings __builtin_cpu_supports. */
static int instruction_sets(void)
{
    unsigned a, b, c, d, b7, d7, a71 = 0, saved, high;
    int intel = __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx ? INTEL : 0;
    int known = __get_cpuid(1, &a, &b, &c, &d) && has(c, 27) && has(c, 12); /* OSXSAVE, FMA */
    if (!known || !__get_cpuid_count(7, 0, &a, &b7, &c, &d7))
        return 0;
    if (a >= 1)
        __get_cpuid_count(7, 1, &a71, &b, &c, &d);
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    int found = (saved & 0x06) == 0x06 && has(b7, 5) ? AVX2 | intel : 0;
    int avx512 = has(b7, 16) && has(b7, 17) && has(b7, 30) && has(b7, 31); /* F, DQ, BW, VL */
    if (found && avx512 && (saved & 0xe6) == 0xe6)
        found |= AVX512 | (has(a71, 5) ? AVX512_BF16 : 0);
    int amx = has(d7, 22) && has(d7, 24) && (saved & 0x60000) == 0x60000; /* BF16, TILE */
    if (found & AVX512_BF16 && amx && !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* the tiles' state */))
        found |= AMX;
    return found;
}

/* Kernels by name, for maps of a dtype; without one by CPU3D_INSTRUCTION_SET, else the best that the machine has. NULL where
   there are none. "avx512" multiplies bfloat16 maps in float32: on Intel's CPUs, whose bfloat16 products are half as fast, this is
   the best after AMX. float32 maps by the name of kernels for bfloat16 alone have the best ones there are. */
const struct kernels *native_kernels(const char *name, int dtype)
{
    static const struct { const struct kernels *kernels; int needs, bfloat16_alone, only_named_on; } all[] = {
        {&kernels_amx_in_c, AVX2, 1, AVX2}, {&kernels_amx, AMX, 1, 0}, {&kernels_avx512_bf16, AVX512_BF16, 1, INTEL},
        {&kernels_avx512, AVX512, 0, 0}, {&kernels_avx2, AVX2, 0, 0},
    };
    static _Atomic int known; /* 1 + sets: finding out takes microseconds */
    int sets = known - 1;
    if (sets < 0)
        known = 1 + (sets = instruction_sets());
    if (!name)
        name = getenv("CPU3D_INSTRUCTION_SET");
    if (name && !*name)
        name = NULL;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (!all[i].kernels || !(sets & all[i].needs) || (name ? strcmp(name, all[i].kernels->name) : sets & all[i].only_named_on))
            continue;
        if (dtype == BFLOAT16 || !all[i].bfloat16_alone)
            return all[i].kernels;
        name = NULL;
    }
    return NULL;
}

/* An operation by kernels of this name: 0; -1 if memory ran out; -2 if the machine has no such kernels. */
int native_run(const char *name, const struct operation *operation)
{
    const struct kernels *kernels = native_kernels(name, operation->dtype);
    return kernels ? kernels->run(operation) : -2;
}

/* `products` of native.h; 0 without kernels of this name. */
double native_products(const char *name, int dtype, int threads, long repeats)
{
    const struct kernels *kernels = native_kernels(name, dtype);
    return kernels ? kernels->products(threads, repeats) : 0;
}
