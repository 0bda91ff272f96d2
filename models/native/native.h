/* What every file of this folder shares: an operation, and the table of functions that an instruction set has.

   All maps are [batch][x][y][z][channels] in C order, the filters [3][3][3][in][out] in float32. */
#ifndef NATIVE_H
#define NATIVE_H

#include <stddef.h>

enum dtype { FLOAT32, BFLOAT16 };

/* How the values that are convolved follow from the map in memory. With one value r of the raw map, and g of the gradient: */
enum form {
    RAW,               /* r */
    NORM_RELU,         /* max(scale * r + shift, 0) */
    NORM_RELU_GRADIENT /* of_gradient * (g where scale * r + shift > 0, else 0) + of_raw * r + constant */
};

enum { SCALE, SHIFT, OF_GRADIENT, OF_RAW, CONSTANT, COEFFICIENTS };

struct input {
    int form;
    int channels[2];      /* of each map; the second is 0 where there is only one */
    const void *maps[2];  /* read as if concatenated */
    const void *raw;      /* NORM_RELU_GRADIENT: the map that was normalised; maps[0] is the gradient */
    const float *coefficients; /* [batch][COEFFICIENTS][channels]; not read for RAW */
};

/* What comes of a row besides the row: its mean and variance a channel, or the sums that the gradient of a norm needs. */
enum { NO_SUMS, MOMENTS, NORM_SUMS };
enum { MEAN_OF_RAW = 2, RSTD_OF_RAW, BELOW }; /* after SCALE and SHIFT */

struct output {
    int channels;
    void *map;
    const void *add;  /* a map that is added, or NULL; may be `map` itself */
    int sums;         /* which */
    float *sums_to;   /* [batch][2][channels]: mean, variance | sum of g, sum of g * (r - mean) * rstd, over r with g > 0 */
    const void *raw;  /* NORM_SUMS: the raw map r whose norm and ReLU come before this convolution */
    const float *below; /* NORM_SUMS: [batch][BELOW][channels]: scale, shift, mean, rstd */
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
    float *filter_gradient;   /* filter gradient only: [3][3][3][in][out] */
};

/* An instruction set: the same operations.c, compiled for it. Both return 0, or -1 where memory runs out. */
struct kernels {
    const char *name;
    int (*convolve)(const struct operation *);
    int (*filter_gradient)(const struct operation *);
};

/* pool.c: calls work(argument, thread, threads) once for every thread, the caller's among them; one call at a time. */
void run_on_threads(int threads, void (*work)(void *, int thread, int threads), void *argument);
/* Memory that a thread keeps from call to call, at least so large, aligned to 64 bytes; NULL where there is none. */
void *thread_memory(int thread, size_t bytes);
#define MOST_THREADS 256

#endif
