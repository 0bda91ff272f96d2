/* Which instruction set this machine has, and the way in. */
#include <cpuid.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "native.h"

/* --- What the CPU has --- */

/* The flags of a CPU that instruction sets need: where cpuid has them, and the registers that the
   system must save. Not every compiler brings __builtin_cpu_supports. */
enum { EAX, EBX, ECX, EDX };
enum { YMM = 0x06, ZMM = 0xe6, TILES = 0x60000 };
static const struct flag {
    const char *name; /* as in /proc/cpuinfo */
    unsigned leaf, subleaf, reg, bit, saved;
} flags[] = {
    {"fma", 1, 0, ECX, 12, YMM},        {"avx2", 7, 0, EBX, 5, YMM},
    {"avx512f", 7, 0, EBX, 16, ZMM},    {"avx512dq", 7, 0, EBX, 17, ZMM},
    {"avx512bw", 7, 0, EBX, 30, ZMM},   {"avx512vl", 7, 0, EBX, 31, ZMM},
    {"avx512_bf16", 7, 1, EAX, 5, ZMM}, {"amx_bf16", 7, 0, EDX, 22, TILES},
    {"amx_tile", 7, 0, EDX, 24, TILES},
};
enum { FLAGS = sizeof flags / sizeof *flags };

/* The four registers that cpuid has for a leaf; 0 if there is no such leaf. */
static int read_cpuid(unsigned leaf, unsigned subleaf, unsigned *regs)
{
    return __get_cpuid_count(leaf, subleaf, &regs[EAX], &regs[EBX], &regs[ECX], &regs[EDX]);
}

/* Whether the system saves these registers when it switches threads. */
static int system_saves(unsigned registers)
{
    enum { OSXSAVE = 27 };
    unsigned regs[4], low, high;
    if (!read_cpuid(1, 0, regs) || !(regs[ECX] >> OSXSAVE & 1))
        return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & registers) == registers;
}

/* The system lets a process use tiles that asks for them. */
static int may_use_tiles(void)
{
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}

static int has(const struct flag *flag)
{
    unsigned regs[4];
    if (!system_saves(flag->saved))
        return 0;
    if (!read_cpuid(flag->leaf, 0, regs))
        return 0;
    if (flag->subleaf) {
        unsigned last_subleaf = regs[EAX];
        if (last_subleaf < flag->subleaf || !read_cpuid(flag->leaf, flag->subleaf, regs))
            return 0;
    }
    if (!(regs[flag->reg] >> flag->bit & 1))
        return 0;
    return flag->saved != TILES || may_use_tiles();
}

static int is_intel(void)
{
    unsigned regs[4];
    return read_cpuid(0, 0, regs) && regs[EBX] == signature_INTEL_ebx;
}

/* --- The instruction sets --- */

/* NULL if the compiler does not know the instruction set. The answers are the same sources for any
   machine: they are asked for scratch alone. */
#define DECLARE(set, ...) \
    extern const struct kernels kernels_##set __attribute__((weak)); \
    extern const struct kernels answers_##set __attribute__((weak));
EACH_INSTRUCTION_SET(DECLARE)

static const struct set {
    const char *name;
    const struct kernels *kernels, *answers;
    const char *needs; /* names of `flags` */
    int bfloat16_alone, slow_on_intel, by_name_alone;
} sets[] = {/* the fastest first */
#define ROW(set, ...) {#set, &kernels_##set, &answers_##set, __VA_ARGS__},
            EACH_INSTRUCTION_SET(ROW)};
enum { SETS = sizeof sets / sizeof *sets };

static const struct flag *flag_of(const char *word, size_t length)
{
    for (int i = 0; i < FLAGS; i++)
        if (strlen(flags[i].name) == length && !strncmp(flags[i].name, word, length))
            return &flags[i];
    return NULL;
}

/* The first flag that the machine lacks, "" if it has all. */
static const char *lacks(const struct set *set)
{
    const char *word = set->needs;
    while (*word) {
        size_t length = strcspn(word, " ");
        const struct flag *flag = flag_of(word, length);
        if (!flag)
            return word; /* not in the table: nobody knows */
        if (!has(flag))
            return flag->name;
        word += length;
        word += strspn(word, " ");
    }
    return "";
}

static const struct set *set_named(const char *name)
{
    for (int i = 0; i < SETS; i++)
        if (!strcmp(name, sets[i].name))
            return &sets[i];
    return NULL;
}

/* Whether kernels of this set are built, and this machine runs them; or takes them by itself. */
enum question { RUNS, IS_TAKEN, QUESTIONS };

static int answer(const struct set *set, enum question question)
{
    static _Atomic unsigned known; /* a bit of each question and set: asking takes microseconds */
    enum { FOUND = 1 << QUESTIONS * SETS };
    if (!known) {
        unsigned found = FOUND;
        int on_intel = is_intel();
        for (int i = 0; i < SETS; i++) {
            if (!sets[i].kernels || *lacks(&sets[i]))
                continue;
            found |= 1u << (QUESTIONS * i + RUNS);
            if (!sets[i].by_name_alone && !(sets[i].slow_on_intel && on_intel))
                found |= 1u << (QUESTIONS * i + IS_TAKEN);
        }
        known = found;
    }
    return known >> (QUESTIONS * (set - sets) + question) & 1;
}

/* The fastest set for maps of a dtype. "avx512" multiplies bfloat16 maps in float32: on Intel's
   CPUs, whose bfloat16 products are half as fast, this is the best after AMX. */
static const struct set *best_set(int dtype)
{
    for (int i = 0; i < SETS; i++) {
        int has_kernels = dtype == BFLOAT16 || !sets[i].bfloat16_alone;
        if (has_kernels && answer(&sets[i], IS_TAKEN))
            return &sets[i];
    }
    return NULL;
}

/* --- The way in --- */

/* The first flag, as in /proc/cpuinfo, that the machine lacks for kernels of this name; "" if it
   lacks none, NULL if no kernels have the name. */
const char *native_lacks(const char *name)
{
    const struct set *set = set_named(name);
    return set ? lacks(set) : NULL;
}

/* Kernels by name, for maps of a dtype; without one by CPU3D_INSTRUCTION_SET, else the best that
   the machine has. NULL where there are none. float32 maps by the name of kernels for bfloat16
   alone have the best ones there are. */
const struct kernels *native_kernels(const char *name, int dtype)
{
    if (!name)
        name = getenv("CPU3D_INSTRUCTION_SET");
    const struct set *set = NULL;
    if (name && *name) {
        set = set_named(name);
        if (!set || !answer(set, RUNS))
            return NULL;
        if (set->bfloat16_alone && dtype != BFLOAT16)
            set = NULL;
    }
    if (!set)
        set = best_set(dtype);
    return set ? set->kernels : NULL;
}

/* The name of these kernels; NULL where there are none. */
const char *native_instruction_set(const char *name, int dtype)
{
    const struct kernels *kernels = native_kernels(name, dtype);
    return kernels ? kernels->name : NULL;
}

/* An operation by kernels of this name: 0; -1 if memory ran out; -2 if the machine has no such
   kernels. */
int native_run(const char *name, const struct operation *operation)
{
    const struct kernels *kernels = native_kernels(name, operation->dtype);
    return kernels ? kernels->run(operation) : -2;
}

/* Asks an operation by kernels of this name for its scratch, on any machine: 0; -2 if the library
   has no such kernels. */
int native_scratch(const char *name, const struct operation *operation)
{
    const struct set *set = set_named(name);
    return set && set->answers ? set->answers->run(operation) : -2;
}

/* `products` of native.h; 0 without kernels of this name. */
double native_products(const char *name, int dtype, int threads, long repeats)
{
    const struct kernels *kernels = native_kernels(name, dtype);
    return kernels ? kernels->products(threads, repeats) : 0;
}
