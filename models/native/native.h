/* What every file of this folder shares: an operation, and the table of functions that an instruction set has.

   All maps are [batch][x][y][z][channels] in C order, the filters [3][3][3][in][out] in float32. */
#ifndef NATIVE_H
#define NATIVE_H

#include <stddef.h>

enum dtype { FLOAT32, BFLOAT16 };

/* How the values that are convolved follow from the map in memory. With one value r of the raw map, and g of the gradient: */
enum form {
    RAW,               /* r */
    NORM_RELU,         /* max(scale * r + shift, floor): a floor of 0 is a ReLU, of -infinity none */
    NORM_RELU_GRADIENT /* of_gradient * (g where scale * r + shift > floor, else 0) + of_raw * r + constant */
};

enum { SCALE, SHIFT, FLOOR, OF_GRADIENT, OF_RAW, CONSTANT, COEFFICIENTS };

struct input {
    int form;
    int channels[2];      /* of each map; the second is 0 where there is only one */
    const void *maps[2];  /* read as if concatenated */
    const void *raw;      /* NORM_RELU_GRADIENT: the map that was normalised; maps[0] is the gradient */
    const float *coefficients; /* [batch][COEFFICIENTS][channels]; not read for RAW */
};

/* What comes of a row besides the row: its mean and variance a channel, or the sums that the gradient of a norm needs. */
enum { NO_SUMS, MOMENTS, NORM_SUMS };
enum { MEAN_OF_RAW = 3, RSTD_OF_RAW, BELOW }; /* after SCALE, SHIFT and FLOOR */

struct output {
    int channels;
    void *map;        /* may be the memory of the input's first map, if that has as many channels */
    int adds;         /* to what the map holds, which is then not an input's */
    int sums;         /* which */
    float *sums_to;   /* [batch][2][channels]: mean, variance | sum of g, sum of g * (r - mean) * rstd, where scale * r + shift > floor */
    const void *raw;  /* NORM_SUMS: the raw map r whose norm and ReLU come before this convolution */
    const float *below; /* NORM_SUMS: [batch][BELOW][channels]: scale, shift, floor, mean, rstd */
};

struct operation {
    int dtype;   /* of all maps */
    int batch, x, y, z;
    int threads;
    struct input input;
    const float *filters;
    int transposed;           /* the filters are flipped, and their channels swapped: the gradient of the input */
    struct output output;
    struct input gradient;    /* filter gradient only: the gradient of the output */
    float *filter_gradient;   /* [3][3][3][in][out]; NULL where the operation is not a filter gradient */
};

/* The passes. From UP_CONVOLVE on, and for the pools, x, y and z are those of the coarser grid. */
enum pass_kind {
    MAX_POOL,           /* raw -> map */
    MAX_POOL_GRADIENT,  /* raw, others: gradient of the pooled map, gradient that is added -> map, sums */
    RESIDUAL_SUM,       /* raw, others: shortcut -> map: max(formed + shortcut, 0) */
    RESIDUAL_GRADIENT,  /* raw, others: the sum, its gradient -> map: the gradient where the sum is positive; sums */
    TO_RAW,             /* raw, others: gradient -> map: of the raw map's values; the coefficients are an input's */
    PROJECT,            /* raw, filters, bias, others: what is added, or none -> map */
    PROJECT_GRADIENT,   /* raw, filters, others: gradient, what is added, or none -> map, sums, filter and bias gradient */
    PROJECT_SUMS,       /* raw, filters, others: gradient -> sums, filter and bias gradient */
    PROJECT_TO_RAW,     /* raw, filters, others: gradient -> map, as of TO_RAW */
    UP_CONVOLVE,        /* raw, filters -> map */
    UP_INPUT_GRADIENT,  /* raw, filters, others: gradient -> map, sums */
    UP_FILTER_GRADIENT, /* raw, others: gradient -> filter gradient */
    PASS_KINDS
};

struct pass {
    int kind, dtype, threads;
    int batch, x, y, z;
    int channels, outputs;     /* of the raw map; of what the filters make */
    const void *raw, *others[2];
    const float *coefficients; /* of the raw map: [batch][BELOW, or COEFFICIENTS][channels]; NULL where it is read as it is */
    const float *filters, *bias; /* [channels][outputs], or [2][2][2][outputs][channels] */
    void *map;
    float *sums_to;            /* as of an output; NULL where they are not asked for, as below */
    float *filter_gradient, *bias_gradient;
};

/* An instruction set: the same sources, compiled for it. All return 0, or -1 where memory runs out. */
struct kernels {
    const char *name;
    int (*run)(const struct operation *);
    int (*pass)(const struct pass *);
    /* Bytes that each thread keeps, and that the operation takes besides until its end; it is not run. */
    void (*scratch)(const struct operation *, size_t *kept, size_t *passing);
    /* Products of values in the cache L1, a limit to measure against; returns multiplications and additions of all threads. */
    double (*products)(int threads, long repeats);
};

/* pool.c: calls work(argument, thread, threads) once for every thread, the caller's among them; one call at a time. */
void run_on_threads(int threads, void (*work)(void *, int thread, int threads), void *argument);
/* Memory that a thread keeps from call to call, at least so large, aligned to 64 bytes; NULL where there is none. */
void *thread_memory(int thread, size_t bytes);
#define MOST_THREADS 256

#endif
