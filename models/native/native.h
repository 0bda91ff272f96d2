/* What every file of this folder shares: an operation, and the table of functions that an
   instruction set has.

   All maps are [batch][x][y][z][channels] in C order; filters, coefficients and sums are
   float32. */
#ifndef NATIVE_H
#define NATIVE_H

#include <stddef.h>
#include "shared.h" /* kinds, constants and instruction sets: shared.py */

enum dtype { FLOAT32, BFLOAT16 };

/* Coefficients are [batch][COEFFICIENTS][channels]. With one value r of a raw map, and g of a
   gradient:
     a norm and ReLU   max(scale * r + shift, floor): a floor of 0 is a ReLU, of -infinity none
     its gradient      of_gradient * (g where scale * r + shift > floor, else 0)
                       + of_raw * r + constant
     its sums          of g where scale * r + shift > floor, and of that times (r - mean) * rstd
   A norm has scale, shift, floor, mean and rstd; a gradient scale, shift, floor, of_gradient,
   of_raw and constant. */
enum { SCALE, SHIFT, FLOOR, MEAN, RSTD, COEFFICIENTS = 6, OF_GRADIENT = 3, OF_RAW, CONSTANT };

/* Of a loss: a channel is a region, p the sigmoid of a logit, t 1 where a byte of the target is not
   0. The terms are sums over a sample's voxels: of cross-entropies, of p where t, of p, and of t.
   The loss is a function of them; its derivatives by the first three are the factors,
   [batch][FACTORS][channels], and with those the gradient of a logit is
     factor[CROSS_ENTROPY] * (p - t) + p * (1 - p) * (factor[OVERLAP] * t + factor[PREDICTED])
   Where a byte is IGNORED the logit is in no sum, whatever it is, and its gradient is 0. */
enum { CROSS_ENTROPY, OVERLAP, PREDICTED, TRUE, FACTORS = TRUE };

/* What an operation answers when it is asked for its scratch, the memory besides its maps: the
   threads that keep some, the bytes that each of them keeps, the bytes that pass to the next
   operation; and the millionths of all threads' time in which they compute and do not wait for the
   largest piece. The question has the bytes of a core's cache L2 in the first place. */
enum { KEEPING_THREADS, KEPT_BYTES, PASSING_BYTES, BUSY_MILLIONTHS, SCRATCH, L2_BYTES = 0 };

struct operation {
    int kind; /* of shared.py, which says what each takes and makes */
    int dtype, threads;
    int batch, x, y, z;
    int channels[2]; /* of the maps; the second 0 if there is one map */
    int outputs;     /* channels of the gradient, or of the filters' output */
    const void *maps[2], *others[2];
    const float *coefficients;       /* of maps; NULL without a norm */
    const float *other_coefficients; /* of the map below, or of the gradient; NULL without a norm */
    const float *filters, *bias;
    void *map;      /* may be the first map or what is added; from MAX_POOL on any map */
    float *sums_to; /* NULL if they are not wanted, as below */
    float *filter_gradient, *bias_gradient;
    size_t *scratch; /* not NULL: nothing is computed; SCRATCH numbers are written here */
    /* Voxels of the finer grid along x, y, z for one of the coarser: of a pool or an up_ kind 1 or
       2; of a loss those of the target for one of the map, of which the first counts. */
    int finer[3];
};

/* Whether an operation is asked for its scratch alone, which is then written. */
static inline int asks_for_scratch(const struct operation *op, size_t threads, size_t kept_bytes,
                                   size_t passing_bytes, double busy)
{
    if (!op->scratch)
        return 0;
    op->scratch[KEEPING_THREADS] = threads;
    op->scratch[KEPT_BYTES] = kept_bytes;
    op->scratch[PASSING_BYTES] = passing_bytes;
    op->scratch[BUSY_MILLIONTHS] = (size_t)(busy * 1e6);
    return 1;
}

/* An instruction set: the same sources, compiled for it. */
struct kernels {
    const char *name;
    int (*run)(const struct operation *); /* returns 0, or -1 if memory runs out */
    /* Products of values in the cache L1, a limit to measure against; returns multiplications and
       additions of all threads. */
    double (*products)(int threads, long repeats);
};

/* pool.c: what follows is for one operation at a time, which waits for the one before it. */
void begin_operation(void);
void end_operation(void);
/* Calls work(argument, thread, threads) once for every thread, at most MOST_THREADS, the caller's
   among them. */
void run_on_threads(int threads, void (*work)(void *, int thread, int threads), void *argument);
/* Memory that each thread keeps from operation to operation, and memory that passes from one
   operation to the next: at least so large, aligned to 64 bytes, with whatever was left in it;
   NULL if there is not enough. */
void *thread_memory(int thread, size_t bytes);
void *passing_memory(size_t bytes);
/* Asks for pages of 2 MiB for memory that is as large: the CPU then finds more of it without a look
   into the page table. Nothing changes where the system has none. */
void use_huge_pages(void *memory, size_t bytes);
/* Threads of an operation: TF_NUM_INTRAOP_THREADS, by default one for each CPU that the process may
   use. */
int thread_count(void);
#endif
