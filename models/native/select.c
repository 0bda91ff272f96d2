/* Which instruction set this machine has, and the way in. */
#include <cpuid.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "native.h"

/* NULL if the compiler does not know the instruction set. */
#define WEAK __attribute__((weak))
extern const struct kernels kernels_avx2 WEAK, kernels_avx512 WEAK, kernels_avx512_bf16 WEAK;
extern const struct kernels kernels_amx WEAK, kernels_amx_in_c WEAK;
extern const struct kernels kernels_amx_in_c_avx512 WEAK;

/* The flags of a CPU that instruction sets need: where cpuid has them, and the registers that the system must save. Not every
   compiler brings __builtin_cpu_supports. */
enum { EAX, EBX, ECX, EDX };
enum { YMM = 0x06, ZMM = 0xe6, TILES = 0x60000 };
static const struct flag {
    const char *name; /* as in /proc/cpuinfo */
    unsigned leaf, subleaf, reg, bit, saved;
} flags[] = {
    {"fma", 1, 0, ECX, 12, YMM},
    {"avx2", 7, 0, EBX, 5, YMM},
    {"avx512f", 7, 0, EBX, 16, ZMM},
    {"avx512dq", 7, 0, EBX, 17, ZMM},
    {"avx512bw", 7, 0, EBX, 30, ZMM},
    {"avx512vl", 7, 0, EBX, 31, ZMM},
    {"avx512_bf16", 7, 1, EAX, 5, ZMM},
    {"amx_bf16", 7, 0, EDX, 22, TILES},
    {"amx_tile", 7, 0, EDX, 24, TILES},
};

static int has(const struct flag *flag)
{
    unsigned regs[4], saved, high;
    if (!__get_cpuid(1, &regs[EAX], &regs[EBX], &regs[ECX], &regs[EDX]) || !(regs[ECX] >> 27 & 1)) /* OSXSAVE */
        return 0;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if ((saved & flag->saved) != flag->saved)
        return 0;
    if (flag->subleaf && (!__get_cpuid_count(flag->leaf, 0, &regs[EAX], &regs[EBX], &regs[ECX], &regs[EDX])
                          || regs[EAX] < flag->subleaf))
        return 0;
    if (!__get_cpuid_count(flag->leaf, flag->subleaf, &regs[EAX], &regs[EBX], &regs[ECX], &regs[EDX]))
        return 0;
    if (!(regs[flag->reg] >> flag->bit & 1))
        return 0;
    /* ARCH_REQ_XCOMP_PERM: the system lets a process use the tiles that asks for it. */
    return flag->saved != TILES || !syscall(SYS_arch_prctl, 0x1023, 18);
}

static int is_intel(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx;
}

/* The instruction sets, the fastest first. What each needs, words of `flags`, comes from instruction_sets.py. */
static const struct set {
    const char *name;
    const struct kernels *kernels;
    const char *needs;
    int bfloat16_alone, by_name_alone, slow_on_intel;
} sets[] = {
    {"amx_in_c", &kernels_amx_in_c, NEEDS_amx_in_c, .bfloat16_alone = 1, .by_name_alone = 1},
    {"amx_in_c_avx512", &kernels_amx_in_c_avx512, NEEDS_amx_in_c_avx512, .bfloat16_alone = 1,
     .by_name_alone = 1},
    {"amx", &kernels_amx, NEEDS_amx, .bfloat16_alone = 1},
    {"avx512_bf16", &kernels_avx512_bf16, NEEDS_avx512_bf16, .bfloat16_alone = 1, .slow_on_intel = 1},
    {"avx512", &kernels_avx512, NEEDS_avx512, .bfloat16_alone = 0},
    {"avx2", &kernels_avx2, NEEDS_avx2, .bfloat16_alone = 0},
};
enum { SETS = sizeof sets / sizeof *sets };

/* The first flag that the machine lacks, "" if it has all. */
static const char *lacks(const struct set *set)
{
    for (const char *word = set->needs; *word;) {
        size_t length = strcspn(word, " ");
        const struct flag *flag = flags;
        while (strncmp(flag->name, word, length) || flag->name[length])
            if (++flag == flags + sizeof flags / sizeof *flags)
                return word; /* not in the table: nobody knows */
        if (!has(flag))
            return flag->name;
        word += length + (word[length] == ' ');
    }
    return "";
}

/* The first flag, as in /proc/cpuinfo, that the machine lacks for kernels of this name; "" if it lacks none, NULL if no
   kernels have the name. */
const char *native_lacks(const char *name)
{
    for (int i = 0; i < SETS; i++)
        if (!strcmp(name, sets[i].name))
            return lacks(&sets[i]);
    return NULL;
}

/* Kernels by name, for maps of a dtype; without one by CPU3D_INSTRUCTION_SET, else the best that the machine has. NULL where
   there are none. "avx512" multiplies bfloat16 maps in float32: on Intel's CPUs, whose bfloat16 products are half as fast, this is
   the best after AMX. float32 maps by the name of kernels for bfloat16 alone have the best ones there are. */
const struct kernels *native_kernels(const char *name, int dtype)
{
    static _Atomic unsigned known; /* bits of the sets that run here, and one more: finding out takes microseconds */
    enum { ON_INTEL = 1 << SETS, FOUND = 2 << SETS };
    unsigned found = known;
    if (!found) {
        found = FOUND | (is_intel() ? ON_INTEL : 0);
        for (int i = 0; i < SETS; i++)
            if (sets[i].kernels && !*lacks(&sets[i]))
                found |= 1u << i;
        known = found;
    }
    if (!name)
        name = getenv("CPU3D_INSTRUCTION_SET");
    if (name && !*name)
        name = NULL;
    for (int i = 0; i < SETS; i++) {
        if (!(found >> i & 1))
            continue;
        if (name ? strcmp(name, sets[i].name) : sets[i].by_name_alone || (sets[i].slow_on_intel && found & ON_INTEL))
            continue;
        if (dtype == BFLOAT16 || !sets[i].bfloat16_alone)
            return sets[i].kernels;
        name = NULL;
    }
    return NULL;
}

/* The name of these kernels; NULL where there are none. */
const char *native_instruction_set(const char *name, int dtype)
{
    const struct kernels *kernels = native_kernels(name, dtype);
    return kernels ? kernels->name : NULL;
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
