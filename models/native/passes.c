/* What a network does besides 3 x 3 x 3 convolutions: pools, doubles the grid, and projects voxel by voxel, and their gradients.

   A thread has a piece of the rows; of a transposed convolution's filter gradient, of the channels
   as well. Each voxel is read before it is written, so a map may be written over one that it is
   made of. Sums are of float32 within a row, and of float64 over rows. */
#include "pieces.h"

enum { BLOCK = 8 }; /* voxels, or outputs of a filter gradient, whose sums are in registers at a time: whole vectors have as many */

/* Costs of pieces.h, of the filter gradient of a transposed convolution, about: products of a row,
   forming its four fine ones, and voxels whose products take as long as clearing and adding up. */
enum { PRODUCTS_COST = 16, FORM_FINE = 8, SUMS_VOXELS = 24 };

struct job {
    const struct operation *op;
    struct input raw, other;
    int from_raw, reads_other; /* whether products are of the raw map's values, or the other map's */
    int edge, taps;           /* of the filters */
    int width, other_width;   /* channels of the raw map and of the other one, rounded up to whole vectors */
    struct cut cut;
    size_t floats;            /* of a thread's lines */
    size_t filter_count;      /* of a gradient of the filters, its bias included */
    size_t sum_count;         /* [batch][2][width] */
    size_t packed_count;      /* of filters, where the operation takes some */
    float *filters;           /* packed: [tap][value that is multiplied][channel of the map] */
    double *filter_sums, *sums; /* of every position */
    int failed;
};

/* A thread at a row. */
struct worker {
    const struct job *job;
    struct input raw, of_other; /* the channels of the piece */
    int width, other_width;     /* of them, in whole vectors */
    float *line, *other; /* voxels of a row, formed; voxels of the other map */
    const float *norm;   /* coefficients of the sample; NULL where the raw map is read as it is */
    double *filter_sums; /* [tap][output][width], [other_width] of the job */
    double *sums;        /* [2][width] of the sample */
};

/* Where of the four fine rows over a coarse one, as lines of 2 z voxels, the voxels of a tap begin; they are two apart. */
static size_t fine_voxel(const struct operation *op, int tap) { return (size_t)(tap / 2) * 2 * op->z + tap % 2; }

/* --- Pools --- */

/* The larger one; a NaN is larger. */
ALWAYS_INLINE vec larger(vec best, vec value)
{
    return choose((best >= value) | (best != best), best, value);
}

/* The largest value of eight voxels; or its gradient, which goes to the first of the largest. */
ALWAYS_INLINE void pool_row(struct worker *w, int kind, int batch, int x, int y)
{
    const struct operation *op = w->job->op;
    int channels = op->channels[0], type = op->dtype;
    size_t under[4]; /* rows of the finer grid */
    for (int i = 0; i < 4; i++)
        under[i] = voxel_of(op, 2, batch, 2 * x + i / 2, 2 * y + i % 2);
    for (int c = 0; c < channels; c += LANES) {
        int n = least(LANES, channels - c);
        vec k[COEFFICIENTS], of_row[2] = {{0}};
        load_norm(k, w->norm, channels, c, n);
        for (int z = 0; z < op->z; z++) {
            size_t pooled = (voxel_of(op, 1, batch, x, y) + z) * channels + c, at[8];
            vec raw[8], value[8], best, left;
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                at[i] = (under[i / 2] + 2 * z + i % 2) * channels + c;
                raw[i] = load_values(op->maps[0], at[i], n, type);
                value[i] = normed(k, raw[i]);
                best = i ? larger(best, value[i]) : value[i];
            }
            if (kind == MAX_POOL) {
                store_values(op->map, pooled, best, n, type);
                continue;
            }
            left = load_values(op->others[0], pooled, n, type);
            for (int i = 0; i < 8; i++) {
                ivec is_best = value[i] == best;
                vec gradient = load_values(op->others[1], at[i], n, type) + keep_where(is_best, left);
                left = keep_where(~is_best, left);
                add_norm_sums(of_row, k, raw[i], store_values(op->map, at[i], gradient, n, type));
            }
        }
        if (kind == MAX_POOL_GRADIENT)
            add_row(w->sums + c, w->job->width, of_row);
    }
}

/* --- Value by value, and products of a voxel's channels with filters --- */

/* sums[voxel] += over `terms` values of each voxel, `step` floats apart: value times a row of filters, `width` apart. */
ALWAYS_INLINE void multiply_voxels(vec *sums, int n, const float *values, int step, int terms, const float *filters, int width)
{
    for (int i = 0; i < terms; i++, filters += width) {
        vec filter = load(filters);
        for (int v = 0; v < n; v++)
            sums[v] += filter * values[(size_t)v * step + i];
    }
}

/* What becomes of a product, or of nothing, at element `at` of the map. */
ALWAYS_INLINE vec finished(const struct operation *op, int kind, const vec *k, vec product, vec raw, size_t at, int n)
{
    const void *first = op->others[0], *second = op->others[1];
    switch (kind) {
    case RESIDUAL_SUM: return at_least(normed(k, raw) + load_values(first, at, n, op->dtype), (vec){0});
    case RESIDUAL_GRADIENT: return keep_where(load_values(first, at, n, op->dtype) > 0, load_values(second, at, n, op->dtype));
    case TO_RAW: return gradient_of_raw(k, raw, load_values(first, at, n, op->dtype));
    case PROJECT_TO_RAW: return gradient_of_raw(k, raw, product);
    case PROJECT: return first ? product + load_values(first, at, n, op->dtype) : product;
    case PROJECT_GRADIENT: return second ? product + load_values(second, at, n, op->dtype) : product;
    default: return product;
    }
}

/* A row of the map from element `to` on, of voxels `step` apart: over `taps` the products of a line with filters. */
ALWAYS_INLINE void make_row(struct worker *w, int kind, size_t to, int step, const float *filters, int taps)
{
    const struct job *job = w->job;
    const struct operation *op = w->job->op;
    const int from_raw = kind == PROJECT || kind == UP_CONVOLVE;
    const int sums_up = kind == RESIDUAL_GRADIENT || kind == PROJECT_GRADIENT || kind == PROJECT_SUMS || kind == UP_INPUT_GRADIENT;
    const float *values = from_raw ? w->line : w->other;
    int channels = from_raw ? op->outputs : op->channels[0], terms = from_raw ? op->channels[0] : op->outputs;
    int width = from_raw ? job->width : job->other_width, filter_width = from_raw ? job->other_width : job->width;
    size_t apart = taps == 8 ? 2 * width : width; /* voxels of one tap */
    for (int c = 0; c < channels; c += LANES) {
        int n = least(LANES, channels - c);
        vec k[COEFFICIENTS], of_row[2] = {{0}}, bias = kind == PROJECT ? load_some(op->bias + c, n) : (vec){0};
        load_norm(k, from_raw ? NULL : w->norm, channels, c, n);
        for (int z = 0; z < op->z; z += BLOCK) {
            int voxels = least(BLOCK, op->z - z);
            vec sums[BLOCK];
            for (int v = 0; v < BLOCK; v++)
                sums[v] = bias;
            for (int tap = 0; tap < taps; tap++) {
                const float *at = values + fine_voxel(op, tap) * width + z * apart;
                const float *filter = filters + (size_t)tap * terms * filter_width + c;
                if (voxels == BLOCK) /* unrolled */
                    multiply_voxels(sums, BLOCK, at, apart, terms, filter, filter_width);
                else
                    multiply_voxels(sums, voxels, at, apart, terms, filter, filter_width);
            }
            for (int v = 0; v < voxels; v++) {
                size_t at = to + (size_t)(z + v) * step + c;
                vec raw = from_raw ? sums[v] : load_values(op->maps[0], at, n, op->dtype);
                vec value = finished(op, kind, k, sums[v], raw, at, n);
                if (kind != PROJECT_SUMS)
                    value = store_values(op->map, at, value, n, op->dtype);
                if (sums_up)
                    add_norm_sums(of_row, k, raw, value);
            }
        }
        if (sums_up)
            add_row(w->sums + c, job->width, of_row);
    }
}

/* sums[value][channel], `width` apart, += over voxels: a vector of channels of `lines`, `next` apart,
   times each of `terms` values of the voxel, `apart` apart. */
static void add_products(double *sums, int width, const float *lines, int next,
                         const float *values, int apart, int terms, int voxels)
{
    for (int first = 0; first < terms; first += BLOCK) {
        vec sum[BLOCK] = {{0}};
        for (int v = 0; v < voxels; v++) {
            vec line = load(lines + (size_t)v * next);
            const float *value = values + (size_t)v * apart + first;
            for (int i = 0; i < BLOCK; i++) /* those beyond the last are 0 */
                sum[i] += line * value[i];
        }
        for (int i = 0; i < least(BLOCK, terms - first); i++)
            for (int lane = 0; lane < LANES; lane++)
                sums[(size_t)(first + i) * width + lane] += sum[i][lane];
    }
}

/* Where the sums of a tap begin, of the piece's first output and channel. */
static double *filter_sums_at(const struct worker *w, int tap)
{
    size_t output = (size_t)tap * w->job->op->outputs + w->of_other.first;
    return w->filter_sums + output * w->job->width + w->raw.first;
}

static double *bias_sums(const struct worker *w)
{
    return w->filter_sums + (size_t)w->job->taps * w->job->op->outputs * w->job->width;
}

/* Adds to the filters' sums, and to the bias's after them. */
static void make_filter_gradient(struct worker *w)
{
    const struct job *job = w->job;
    const struct operation *op = w->job->op;
    int outputs = w->of_other.past - w->of_other.first, other_width = w->other_width;
    for (int tap = 0; tap < job->taps; tap++) {
        const float *values = w->other + fine_voxel(op, tap) * other_width;
        for (int c = 0; c < w->width; c += LANES)
            add_products(filter_sums_at(w, tap) + c, job->width, w->line + c, w->width, values,
                         job->edge * other_width, outputs, op->z);
    }
    for (int o = 0; op->bias_gradient && o < outputs; o++) {
        float sum = 0;
        for (int z = 0; z < op->z; z++)
            sum += w->other[(size_t)z * other_width + o];
        bias_sums(w)[o] += sum;
    }
}

/* Clears what the piece adds to. */
static void clear_filter_sums(struct worker *w)
{
    const struct job *job = w->job;
    int outputs = w->of_other.past - w->of_other.first;
    for (int tap = 0; tap < job->taps; tap++)
        for (int o = 0; o < outputs; o++)
            memset(filter_sums_at(w, tap) + (size_t)o * job->width, 0, sizeof(double) * w->width);
    if (job->op->bias_gradient)
        memset(bias_sums(w), 0, sizeof(double) * job->other_width);
}

/* Lines are read before a map may be written over them. Of a transposed convolution the other map's are four, on the finer grid. */
static void row(struct worker *w, int batch, int x, int y)
{
    const struct job *job = w->job;
    const struct operation *op = w->job->op;
    int edge = job->edge, channels = op->channels[0], outputs = op->outputs;
    size_t voxel = voxel_of(op, 1, batch, x, y);
    if (job->from_raw || op->filter_gradient)
        form_row(w->line, w->width, &w->raw, batch, voxel, op->z, op->dtype);
    for (int i = 0; i < edge * edge && job->reads_other; i++) {
        float *line = w->other + (size_t)i * edge * op->z * w->other_width;
        size_t fine = voxel_of(op, edge, batch, edge * x + i / 2, edge * y + i % 2);
        form_row(line, w->other_width, &w->of_other, batch, fine, edge * op->z, op->dtype);
    }
    switch (op->kind) {
#define ROW(kind, taps) case kind: make_row(w, kind, voxel * channels, channels, job->filters, taps); break;
#define POOL(kind) case kind: pool_row(w, kind, batch, x, y); break;
    POOL(MAX_POOL) POOL(MAX_POOL_GRADIENT)
    ROW(RESIDUAL_SUM, 0) ROW(RESIDUAL_GRADIENT, 0) ROW(TO_RAW, 0)
    ROW(PROJECT_GRADIENT, 1) ROW(PROJECT_SUMS, 1) ROW(PROJECT_TO_RAW, 1) ROW(UP_INPUT_GRADIENT, 8)
    }
    for (int tap = 0; tap < job->taps && job->from_raw; tap++) {
        size_t to = voxel_of(op, edge, batch, edge * x + tap / 4, edge * y + tap / 2 % 2) + tap % 2;
        const float *filters = job->filters + (size_t)tap * channels * job->other_width;
        if (op->kind == PROJECT)
            make_row(w, PROJECT, to * outputs, outputs, filters, 1);
        else
            make_row(w, UP_CONVOLVE, to * outputs, 2 * outputs, filters, 1);
    }
    if (op->filter_gradient)
        make_filter_gradient(w);
}

/* --- All passes --- */

static void pass_thread(void *argument, int thread, int threads)
{
    struct job *job = argument;
    const struct operation *op = job->op;
    float *memory = thread_memory(thread, job->floats * sizeof(float));
    if (!memory) {
        job->failed = 1;
        return;
    }
    memset(memory, 0, job->floats * sizeof(float)); /* channels that are not there stay 0 */
    struct piece piece = piece_of(&job->cut, thread);
    struct worker w = {.job = job, .raw = job->raw, .of_other = job->other};
    if (op->kind == UP_FILTER_GRADIENT) {
        w.raw = blocks_of(&job->raw, piece.input, piece.past_input);
        w.of_other = blocks_of(&job->other, piece.output, piece.past_output);
    }
    w.width = round_up(w.raw.past - w.raw.first, LANES);
    w.other_width = round_up(w.of_other.past - w.of_other.first, LANES);
    w.line = memory;
    w.other = memory + (size_t)op->z * w.width;
    w.filter_sums = job->filter_sums + piece.position * job->filter_count;
    if (op->filter_gradient)
        clear_filter_sums(&w);
    double *sums = job->sums + piece.position * job->sum_count;
    if (op->sums_to)
        memset(sums, 0, job->sum_count * sizeof(double));
    for (long at = piece.plane; at < piece.past_plane; at++) {
        int y = (int)(at % op->y), x = (int)(at / op->y % op->x), batch = (int)(at / op->y / op->x);
        w.norm = op->coefficients ? op->coefficients + (size_t)batch * COEFFICIENTS * op->channels[0] : NULL;
        w.sums = sums + (size_t)batch * 2 * job->width;
        row(&w, batch, x, y);
    }
}

/* Where the filter of a tap, a channel and an output is in what TensorFlow has. */
static size_t filter_at(const struct operation *op, int tap, int channel, int output)
{
    size_t of_up = ((size_t)tap * op->outputs + output) * op->channels[0] + channel;
    return op->kind < UP_CONVOLVE ? (size_t)channel * op->outputs + output : of_up;
}

/* A row has the weights of a value for all channels of the map. A thread packs its share of them. */
static void pack_filters(void *argument, int thread, int threads)
{
    const struct job *job = argument;
    const struct operation *op = job->op;
    int values = job->from_raw ? op->channels[0] : op->outputs;
    int made = job->from_raw ? op->outputs : op->channels[0];
    int width = job->from_raw ? job->other_width : job->width;
    long all = (long)job->taps * values;
    for (long row = share(all, thread, threads); row < share(all, thread + 1, threads); row++) {
        float *to = job->filters + (size_t)row * width;
        int tap = (int)(row / values), value = (int)(row % values);
        memset(to, 0, width * sizeof(float)); /* channels that are not there */
        for (int i = 0; i < made; i++) {
            int channel = job->from_raw ? value : i, output = job->from_raw ? i : value;
            to[i] = op->filters[filter_at(op, tap, channel, output)];
        }
    }
}

/* Adds the positions' sums in their order: a thread those of every `threads`-th value, or row. */
static void write_results(void *argument, int thread, int threads)
{
    const struct job *job = argument;
    const struct operation *op = job->op;
    int channels = op->channels[0], outputs = op->outputs, width = job->width;
    int positions = job->cut.positions;
    for (int i = thread; op->sums_to && i < 2 * op->batch * channels; i += threads) {
        const double *sums = job->sums + (size_t)(i / channels) * width + i % channels;
        op->sums_to[i] = (float)total(sums, job->sum_count, positions);
    }
    for (int row = thread; op->filter_gradient && row < job->taps * outputs; row += threads)
        for (int c = 0; c < channels; c++) {
            const double *sums = job->filter_sums + (size_t)row * width + c;
            size_t to = filter_at(op, row / outputs, c, row % outputs);
            op->filter_gradient[to] = (float)total(sums, job->filter_count, positions);
        }
    const double *of_bias = job->filter_sums + (size_t)job->taps * outputs * width;
    for (int o = thread; op->bias_gradient && o < outputs; o += threads)
        op->bias_gradient[o] = (float)total(of_bias + o, job->filter_count, positions);
}

static struct cut cut_for(const struct operation *op)
{
    struct work work = {
        .planes = rows_of_all(op),
        .rows = 1,
        .inputs = (int)parts_of(op->channels[0], GROUP),
        .outputs = (int)parts_of(op->outputs, GROUP),
        .unit = 1,
        .products = PRODUCTS_COST,
        .form_outputs = FORM_FINE,
        .sums = PRODUCTS_COST * SUMS_VOXELS / op->z,
    };
    if (op->kind == UP_FILTER_GRADIENT)
        return cut_of(&work, op->threads);
    return cut_of_rows(work.planes, op->threads);
}

/* The name that build.py gives to those of an instruction set. */
int PASSES(const struct operation *op)
{
    int edge = op->kind >= UP_CONVOLVE ? 2 : 1;
    struct job job = {.op = op, .edge = edge, .taps = edge * edge * edge, .cut = cut_for(op)};
    job.raw = all_of((struct input){
        .channels = {op->channels[0]}, .maps = {op->maps[0]}, .coefficients = op->coefficients});
    job.other = all_of((struct input){.channels = {op->outputs}, .maps = {op->others[0]}});
    job.from_raw = op->kind == PROJECT || op->kind == UP_CONVOLVE;
    job.reads_other = op->kind > PROJECT && !job.from_raw;
    job.width = round_up(op->channels[0], LANES);
    job.other_width = round_up(op->outputs, LANES);
    int width = job.width, other_width = job.other_width; /* of the largest piece */
    if (op->kind == UP_FILTER_GRADIENT) {
        width = least(width, job.cut.inputs * GROUP);
        other_width = least(other_width, job.cut.outputs * GROUP);
    }
    job.floats = (size_t)op->z * (width + other_width * job.taps);
    job.sum_count = (size_t)op->batch * 2 * job.width;
    size_t filters = (size_t)job.taps * job.width * job.other_width;
    job.packed_count = op->filters ? filters : 0;
    job.filter_count = op->filter_gradient ? filters + job.other_width : 0;
    size_t bytes = (job.sum_count + job.filter_count) * job.cut.positions * sizeof(double);
    bytes += job.packed_count * sizeof(float);
    if (asks_for_scratch(op, job.cut.pieces, job.floats * sizeof(float), bytes))
        return 0;
    job.sums = passing_memory(bytes);
    if (!job.sums)
        return -1;
    job.filter_sums = job.sums + job.sum_count * job.cut.positions;
    job.filters = (float *)(job.filter_sums + job.filter_count * job.cut.positions);
    if (op->filters)
        run_on_threads(op->threads, pack_filters, &job);
    run_on_threads(job.cut.pieces, pass_thread, &job);
    if (job.failed)
        return -1;
    if (op->sums_to || op->filter_gradient)
        run_on_threads(op->threads, write_results, &job);
    return 0;
}
