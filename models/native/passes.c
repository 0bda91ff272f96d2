/* What a network does besides 3 x 3 x 3 convolutions: pools, doubles the grid, and projects voxel by voxel, and their gradients.

   A thread has a share of the planes along x. Each voxel is read before it is written, so a map may be written over one that it
   is made of. Sums are of float32 within a row, and of float64 over rows. */
#include <math.h>
#include <stdlib.h>
#include "vectors.h"

/* Passes of one instruction set have their name. */
#ifndef PASSES
#define PASSES passes_here
#endif

enum { BLOCK = 8 };       /* voxels whose sums are in registers at a time */
enum { MOST_SUMS = 8 };   /* outputs whose sums are in registers at a time, of a filter gradient */

struct job {
    const struct pass *pass;
    int width, other_width;   /* channels of the raw map and of the other one, rounded up to whole vectors */
    size_t floats;            /* of a thread's lines */
    float *filters;           /* packed */
    size_t filter_count;      /* of a gradient of the filters, its bias included */
    double *filter_sums;      /* of every thread */
    double *sums;             /* of every thread: [batch][2][width] */
    int failed;
};

/* A thread at a row: its coefficients, padded, and lines of formed values. */
struct worker {
    const struct job *job;
    const struct pass *pass;
    float *coefficients; /* [COEFFICIENTS][width] */
    float *line, *other; /* voxels of a row, formed; voxels of the other map */
    double *filter_sums;
    double *sums; /* [2][width] of the sample */
};

static int whole(int channels) { return (channels + LANES - 1) / LANES * LANES; }

static int least(int a, int b) { return a < b ? a : b; }

/* Element of the first channel of row (x, y) in a map of this grid. */
static size_t row_at(const struct pass *p, int times, int batch, int x, int y, int channels)
{
    return (((size_t)batch * p->x * times + x) * p->y * times + y) * p->z * times * channels;
}

ALWAYS_INLINE vec coefficient(const struct worker *w, int which, int c) { return load(w->coefficients + which * w->job->width + c); }

ALWAYS_INLINE vec formed(const struct worker *w, vec raw, int c)
{
    return at_least(raw * coefficient(w, SCALE, c) + coefficient(w, SHIFT, c), coefficient(w, FLOOR, c));
}

/* Of one channel vector of a row: adds to the sums that the gradient of the raw map's norm needs. */
struct row_sums { vec first, second; };

ALWAYS_INLINE void count(const struct worker *w, struct row_sums *sums, vec gradient, vec raw, int c)
{
    gradient = keep_where(raw * coefficient(w, SCALE, c) + coefficient(w, SHIFT, c) > coefficient(w, FLOOR, c), gradient);
    sums->first += gradient;
    sums->second += gradient * ((raw - coefficient(w, MEAN_OF_RAW, c)) * coefficient(w, RSTD_OF_RAW, c));
}

/* As an input of NORM_RELU_GRADIENT is formed. */
ALWAYS_INLINE vec gradient_of_raw(const struct worker *w, vec gradient, vec raw, int c)
{
    gradient = keep_where(raw * coefficient(w, SCALE, c) + coefficient(w, SHIFT, c) > coefficient(w, FLOOR, c), gradient);
    return coefficient(w, OF_GRADIENT, c) * gradient + (coefficient(w, OF_RAW, c) * raw + coefficient(w, CONSTANT, c));
}

ALWAYS_INLINE void keep_sums(struct worker *w, const struct row_sums *sums, int c)
{
    for (int i = 0; i < LANES; i++) {
        w->sums[c + i] += sums->first[i];
        w->sums[w->job->width + c + i] += sums->second[i];
    }
}

/* `voxels` voxels of a map as float32, each `width` wide, the rest 0; of the raw map formed. */
static void read_line(const struct worker *w, float *line, const void *map, size_t at, int voxels, int channels, int width, int forms)
{
    for (int c = 0; c < width; c += LANES) {
        int n = least(LANES, channels - c);
        for (int i = 0; i < voxels; i++) {
            vec value = load_values(map, at + (size_t)i * channels + c, n, w->pass->dtype);
            store(line + (size_t)i * width + c, forms ? formed(w, value, c) : value);
        }
    }
}

/* --- Pools --- */

/* The eight voxels under a pooled one, as elements of the map. */
static void voxels_under(const struct pass *p, int batch, int x, int y, int z, size_t *at)
{
    for (int i = 0; i < 8; i++)
        at[i] = row_at(p, 2, batch, 2 * x + i / 4, 2 * y + i / 2 % 2, p->channels) + (size_t)(2 * z + i % 2) * p->channels;
}

static void max_pool_row(struct worker *w, int batch, int x, int y)
{
    const struct pass *p = w->pass;
    size_t pooled = row_at(p, 1, batch, x, y, p->channels), at[8];
    for (int z = 0; z < p->z; z++) {
        voxels_under(p, batch, x, y, z, at);
        for (int c = 0; c < p->channels; c += LANES) {
            int n = least(LANES, p->channels - c);
            vec best = formed(w, load_values(p->raw, at[0] + c, n, p->dtype), c);
            for (int i = 1; i < 8; i++) {
                vec value = formed(w, load_values(p->raw, at[i] + c, n, p->dtype), c);
                ivec kept = (best >= value) | (best != best);
                best = (vec)((kept & (ivec)best) | (~kept & (ivec)value));
            }
            store_values(p->map, pooled + (size_t)z * p->channels + c, best, n, p->dtype);
        }
    }
}

/* Each gradient goes to the first of the largest values. */
static void max_pool_gradient_row(struct worker *w, int batch, int x, int y)
{
    const struct pass *p = w->pass;
    size_t pooled = row_at(p, 1, batch, x, y, p->channels), at[8];
    for (int c = 0; c < p->channels; c += LANES) {
        int n = least(LANES, p->channels - c);
        struct row_sums sums = {{0}, {0}};
        for (int z = 0; z < p->z; z++) {
            voxels_under(p, batch, x, y, z, at);
            vec raw[8], value[8], best, left = load_values(p->others[0], pooled + (size_t)z * p->channels + c, n, p->dtype);
            for (int i = 0; i < 8; i++) {
                raw[i] = load_values(p->raw, at[i] + c, n, p->dtype);
                value[i] = formed(w, raw[i], c);
                best = i ? at_least(value[i], best) : value[i];
            }
            for (int i = 0; i < 8; i++) {
                ivec is_best = value[i] == best;
                vec gradient = load_values(p->others[1], at[i] + c, n, p->dtype) + keep_where(is_best, left);
                left = keep_where(~is_best, left);
                count(w, &sums, store_values(p->map, at[i] + c, gradient, n, p->dtype), raw[i], c);
            }
        }
        keep_sums(w, &sums, c);
    }
}

/* --- Value by value --- */

ALWAYS_INLINE void value_row(struct worker *w, size_t row, int kind)
{
    const struct pass *p = w->pass;
    for (int c = 0; c < p->channels; c += LANES) {
        size_t at = row + c;
        int n = least(LANES, p->channels - c);
        struct row_sums sums = {{0}, {0}};
        for (int z = 0; z < p->z; z++, at += p->channels) {
            vec raw = load_values(p->raw, at, n, p->dtype), value, first = load_values(p->others[0], at, n, p->dtype);
            if (kind == RESIDUAL_SUM)
                value = at_least(formed(w, raw, c) + first, (vec){0});
            else if (kind == RESIDUAL_GRADIENT)
                value = keep_where(first > 0, load_values(p->others[1], at, n, p->dtype));
            else
                value = gradient_of_raw(w, first, raw, c);
            value = store_values(p->map, at, value, n, p->dtype);
            if (kind == RESIDUAL_GRADIENT)
                count(w, &sums, value, raw, c);
        }
        if (kind == RESIDUAL_GRADIENT)
            keep_sums(w, &sums, c);
    }
}

static void value_by_value_row(struct worker *w, int batch, int x, int y)
{
    size_t row = row_at(w->pass, 1, batch, x, y, w->pass->channels);
    if (w->pass->kind == RESIDUAL_SUM) value_row(w, row, RESIDUAL_SUM);
    else if (w->pass->kind == RESIDUAL_GRADIENT) value_row(w, row, RESIDUAL_GRADIENT);
    else value_row(w, row, TO_RAW);
}

/* --- Products of a voxel's channels with filters --- */

/* sums[voxel] += over `terms` values of each voxel, `step` floats apart: value times a row of 16 or 8 filters, `width` apart. */
ALWAYS_INLINE void multiply_voxels(vec *sums, int n, const float *values, int step, int terms, const float *filters, int width)
{
    for (int i = 0; i < terms; i++, filters += width) {
        vec filter = load(filters);
        for (int v = 0; v < n; v++)
            sums[v] += filter * values[(size_t)v * step + i];
    }
}

/* The same for up to BLOCK voxels; a whole block is unrolled. */
ALWAYS_INLINE void multiply_block(vec *sums, int n, const float *values, int step, int terms, const float *filters, int width)
{
    if (n == BLOCK)
        multiply_voxels(sums, BLOCK, values, step, terms, filters, width);
    else
        multiply_voxels(sums, n, values, step, terms, filters, width);
}

/* sums[value][channel] += over voxels: a channel vector of `lines` times each of `terms` values of the voxel. */
static void add_products(double *sums, int sums_width, const float *lines, int step, const float *values, int value_step, int terms, int voxels)
{
    for (int first = 0; first < terms; first += MOST_SUMS) {
        int n = least(MOST_SUMS, terms - first);
        vec sum[MOST_SUMS] = {{0}};
        for (int v = 0; v < voxels; v++) {
            vec line = load(lines + (size_t)v * step);
            const float *value = values + (size_t)v * value_step + first;
            if (n == MOST_SUMS)
                for (int i = 0; i < MOST_SUMS; i++)
                    sum[i] += line * value[i];
            else
                for (int i = 0; i < n; i++)
                    sum[i] += line * value[i];
        }
        for (int i = 0; i < n; i++) {
            double *to = sums + (size_t)(first + i) * sums_width;
            for (int lane = 0; lane < LANES; lane++)
                to[lane] += sum[i][lane];
        }
    }
}

/* Where of the four fine rows over a coarse one, as lines of 2 z voxels, the voxels of a tap begin; they are two apart. */
static size_t fine_voxel(const struct pass *p, int tap) { return (size_t)(tap / 2) * 2 * p->z + tap % 2; }

static void read_coarse(const struct worker *w, int batch, int x, int y)
{
    const struct pass *p = w->pass;
    read_line(w, w->line, p->raw, row_at(p, 1, batch, x, y, p->channels), p->z, p->channels, w->job->width, 1);
}

/* The row of the other map, or the four rows of the finer grid. */
static void read_other(const struct worker *w, int batch, int x, int y, int times)
{
    const struct pass *p = w->pass;
    int width = w->job->other_width, voxels = times * p->z;
    for (int i = 0; i < times * times; i++)
        read_line(w, w->other + (size_t)i * voxels * width, p->others[0],
                  row_at(p, times, batch, times * x + i / 2, times * y + i % 2, p->outputs), voxels, p->outputs, width, 0);
}

/* Outputs of a row, from element `to` on and `step` apart: products of the formed line with filters[channel][output], a bias
   (or NULL) and a map (or NULL). */
static void make_outputs(struct worker *w, size_t to, int step, const float *filters, const float *bias, const void *add)
{
    const struct pass *p = w->pass;
    int width = w->job->width;
    for (int o = 0; o < p->outputs; o += LANES) {
        int n = least(LANES, p->outputs - o);
        vec first = bias ? load_some(bias + o, n) : (vec){0};
        for (int z = 0; z < p->z; z += BLOCK) {
            int voxels = least(BLOCK, p->z - z);
            vec sums[BLOCK];
            for (int v = 0; v < BLOCK; v++)
                sums[v] = first;
            multiply_block(sums, voxels, w->line + (size_t)z * width, width, p->channels, filters + o, w->job->other_width);
            for (int v = 0; v < voxels; v++) {
                size_t at = to + (size_t)(z + v) * step + o;
                if (add)
                    sums[v] += load_values(add, at, n, p->dtype);
                store_values(p->map, at, sums[v], n, p->dtype);
            }
        }
    }
}

/* The gradient of a row: products of the other map's line (of `taps` voxels of the finer grid) with filters[tap][output][channel],
   and a map (or NULL). Its sums are kept, but for PROJECT_TO_RAW. */
static void make_gradient(struct worker *w, size_t from, int taps, const void *add)
{
    const struct pass *p = w->pass;
    int width = w->job->width, other_width = w->job->other_width, step = taps == 1 ? 1 : 2;
    for (int c = 0; c < p->channels; c += LANES) {
        int n = least(LANES, p->channels - c);
        struct row_sums row = {{0}, {0}};
        for (int z = 0; z < p->z; z += BLOCK) {
            int voxels = least(BLOCK, p->z - z);
            vec sums[BLOCK] = {{0}};
            for (int tap = 0; tap < taps; tap++)
                multiply_block(sums, voxels, w->other + (fine_voxel(p, tap) + step * z) * other_width, step * other_width, p->outputs,
                               w->job->filters + (size_t)tap * p->outputs * width + c, width);
            for (int v = 0; v < voxels; v++) {
                size_t at = from + (size_t)(z + v) * p->channels + c;
                vec raw = load_values(p->raw, at, n, p->dtype);
                if (p->kind == PROJECT_TO_RAW)
                    sums[v] = gradient_of_raw(w, sums[v], raw, c);
                else if (add)
                    sums[v] += load_values(add, at, n, p->dtype);
                if (p->map)
                    sums[v] = store_values(p->map, at, sums[v], n, p->dtype);
                if (p->kind != PROJECT_TO_RAW)
                    count(w, &row, sums[v], raw, c);
            }
        }
        if (p->kind != PROJECT_TO_RAW)
            keep_sums(w, &row, c);
    }
}

/* Adds to the filters' sums, [tap][output][channel]. */
static void make_filter_gradient(struct worker *w, int taps)
{
    const struct pass *p = w->pass;
    int width = w->job->width, other_width = w->job->other_width;
    for (int tap = 0; tap < taps; tap++)
        for (int c = 0; c < p->channels; c += LANES)
            add_products(w->filter_sums + (size_t)tap * p->outputs * width + c, width, w->line + c, width,
                         w->other + fine_voxel(p, tap) * other_width, (taps == 1 ? 1 : 2) * other_width, p->outputs, p->z);
}

static void project_row(struct worker *w, int batch, int x, int y)
{
    const struct pass *p = w->pass;
    read_coarse(w, batch, x, y);
    make_outputs(w, row_at(p, 1, batch, x, y, p->outputs), p->outputs, w->job->filters, p->bias, p->others[0]);
}

static void project_gradient_row(struct worker *w, int batch, int x, int y)
{
    const struct pass *p = w->pass;
    if (p->kind != PROJECT_TO_RAW)
        read_coarse(w, batch, x, y); /* before it may be written over */
    read_other(w, batch, x, y, 1);
    make_gradient(w, row_at(p, 1, batch, x, y, p->channels), 1, p->others[1]);
    if (p->kind == PROJECT_TO_RAW)
        return;
    make_filter_gradient(w, 1);
    double *bias = w->filter_sums + (size_t)p->outputs * w->job->width;
    for (int o = 0; o < p->outputs; o++) {
        float sum = 0;
        for (int z = 0; z < p->z; z++)
            sum += w->other[(size_t)z * w->job->other_width + o];
        bias[o] += sum;
    }
}

/* --- Transposed convolutions of 2 x 2 x 2, stride 2; x, y, z are the coarse grid's --- */

static void up_convolve_row(struct worker *w, int batch, int x, int y)
{
    const struct pass *p = w->pass;
    read_coarse(w, batch, x, y);
    for (int tap = 0; tap < 8; tap++)
        make_outputs(w, row_at(p, 2, batch, 2 * x + tap / 4, 2 * y + tap / 2 % 2, p->outputs) + (size_t)(tap % 2) * p->outputs,
                     2 * p->outputs, w->job->filters + (size_t)tap * p->channels * w->job->other_width, NULL, NULL);
}

static void up_input_gradient_row(struct worker *w, int batch, int x, int y)
{
    read_other(w, batch, x, y, 2);
    make_gradient(w, row_at(w->pass, 1, batch, x, y, w->pass->channels), 8, NULL);
}

static void up_filter_gradient_row(struct worker *w, int batch, int x, int y)
{
    read_coarse(w, batch, x, y);
    read_other(w, batch, x, y, 2);
    make_filter_gradient(w, 8);
}

/* --- All passes --- */

static void (*const ROWS[PASS_KINDS])(struct worker *, int batch, int x, int y) = {
    [MAX_POOL] = max_pool_row, [MAX_POOL_GRADIENT] = max_pool_gradient_row,
    [RESIDUAL_SUM] = value_by_value_row, [RESIDUAL_GRADIENT] = value_by_value_row, [TO_RAW] = value_by_value_row, [PROJECT] = project_row,
    [PROJECT_GRADIENT] = project_gradient_row, [PROJECT_SUMS] = project_gradient_row, [PROJECT_TO_RAW] = project_gradient_row,
    [UP_CONVOLVE] = up_convolve_row, [UP_INPUT_GRADIENT] = up_input_gradient_row, [UP_FILTER_GRADIENT] = up_filter_gradient_row,
};

static void take_coefficients(struct worker *w, int batch)
{
    const struct pass *p = w->pass;
    static const float none[COEFFICIENTS] = {[SCALE] = 1, [FLOOR] = -INFINITY, [RSTD_OF_RAW] = 1};
    int rows = p->kind == TO_RAW || p->kind == PROJECT_TO_RAW ? COEFFICIENTS : BELOW;
    for (int i = 0; i < rows; i++)
        for (int c = 0; c < w->job->width; c++)
            w->coefficients[i * w->job->width + c] =
                c < p->channels && p->coefficients ? p->coefficients[((size_t)batch * rows + i) * p->channels + c] : none[i];
}

static void pass_thread(void *argument, int thread, int threads)
{
    struct job *job = argument;
    const struct pass *p = job->pass;
    float *memory = thread_memory(thread, job->floats * sizeof(float));
    if (!memory) {
        job->failed = 1;
        return;
    }
    double *sums = job->sums + (size_t)thread * p->batch * 2 * job->width;
    struct worker w = {job, p, memory, memory + COEFFICIENTS * job->width, NULL, job->filter_sums + thread * job->filter_count, sums};
    w.other = w.line + (size_t)p->z * job->width;
    long planes = (long)p->batch * p->x;
    int batch = -1;
    for (long plane = planes * thread / threads; plane < planes * (thread + 1) / threads; plane++) {
        if (plane / p->x != batch) {
            batch = (int)(plane / p->x);
            take_coefficients(&w, batch);
            w.sums = sums + (size_t)batch * 2 * job->width;
        }
        for (int y = 0; y < p->y; y++)
            ROWS[p->kind](&w, batch, (int)(plane % p->x), y);
    }
}

/* Where the filter of a tap, a channel and an output is in what TensorFlow has. */
static size_t filter_at(const struct pass *p, int tap, int channel, int output)
{
    if (p->kind < UP_CONVOLVE)
        return (size_t)channel * p->outputs + output;
    return ((size_t)tap * p->outputs + output) * p->channels + channel;
}

static void pack_filters(struct job *job, int taps)
{
    const struct pass *p = job->pass;
    int by_output = p->kind == PROJECT || p->kind == UP_CONVOLVE; /* vectors of outputs, else of channels */
    for (int tap = 0; tap < taps; tap++)
        for (int c = 0; c < p->channels; c++)
            for (int o = 0; o < p->outputs; o++) {
                size_t at = by_output ? ((size_t)tap * p->channels + c) * job->other_width + o
                                      : ((size_t)tap * p->outputs + o) * job->width + c;
                job->filters[at] = p->filters[filter_at(p, tap, c, o)];
            }
}

/* The threads' sums, `next` apart, added in their order. */
static float total(const struct job *job, const double *sums, size_t next)
{
    double sum = 0;
    for (int thread = 0; thread < job->pass->threads; thread++)
        sum += sums[thread * next];
    return (float)sum;
}

static void write_results(const struct job *job, int taps)
{
    const struct pass *p = job->pass;
    int rows = 2 * p->batch;
    for (int row = 0; p->sums_to && row < rows; row++)
        for (int c = 0; c < p->channels; c++)
            p->sums_to[row * p->channels + c] = total(job, job->sums + (size_t)row * job->width + c, (size_t)rows * job->width);
    for (int row = 0; p->filter_gradient && row < taps * p->outputs; row++)
        for (int c = 0; c < p->channels; c++)
            p->filter_gradient[filter_at(p, row / p->outputs, c, row % p->outputs)] =
                total(job, job->filter_sums + (size_t)row * job->width + c, job->filter_count);
    for (int o = 0; p->bias_gradient && o < p->outputs; o++)
        p->bias_gradient[o] = total(job, job->filter_sums + (size_t)p->outputs * job->width + o, job->filter_count);
}

int PASSES(const struct pass *p)
{
    struct job job = {.pass = p, .width = whole(p->channels), .other_width = whole(p->outputs)};
    int is_up = p->kind >= UP_CONVOLVE, taps = is_up ? 8 : 1;
    job.floats = (size_t)COEFFICIENTS * job.width + (size_t)p->z * job.width + (size_t)p->z * job.other_width * (is_up ? 8 : 1);
    size_t filters = (size_t)taps * job.width * job.other_width;
    job.filter_count = p->filter_gradient ? filters + job.other_width : 0;
    job.filters = aligned_alloc(64, (filters * sizeof(float) + 63) / 64 * 64);
    job.filter_sums = calloc(job.filter_count * p->threads + 1, sizeof(double));
    job.sums = calloc((size_t)p->threads * p->batch * 2 * job.width, sizeof(double));
    job.failed = !job.filters || !job.filter_sums || !job.sums;
    if (!job.failed) {
        memset(job.filters, 0, filters * sizeof(float));
        if (p->filters)
            pack_filters(&job, taps);
        run_on_threads(p->threads, pass_thread, &job);
        write_results(&job, taps);
    }
    free(job.filters);
    free(job.filter_sums);
    free(job.sums);
    return job.failed ? -1 : 0;
}
