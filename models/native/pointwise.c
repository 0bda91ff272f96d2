/* What a network does besides 3 x 3 x 3 convolutions: pools, residual sums, transposed convolutions
   of 2 x 2 x 2, projections, and their gradients.

   A thread has a piece of the rows; of a transposed convolution's filter gradient, of the channels
   as well. Each voxel is read before it is written, so a map may be written over one that it is
   made of. Sums are of float32 within a row, and of float64 over rows. */
#include "pieces.h"

/* Voxels, or outputs of a filter gradient, whose sums are in registers at a time: whole vectors
   have as many. */
enum { AT_ONCE = 8 };

struct job {
    const struct operation *op;
    struct input raw, other;
    int from_raw;           /* whether products are of the raw map's values, */
    int reads_other;        /* or of the other map's */
    int finer[3], taps;     /* of the filters: edges, of an up_ kind as much finer as the grid */
    int width, other_width; /* channels of the raw and of the other map, in whole vectors */
    struct cut cut;
    size_t kept_floats;  /* of a thread's rows */
    size_t filter_count; /* of a gradient of the filters, its bias included */
    size_t sum_count;    /* [batch][2][width] */
    size_t passing;
    float *filters;      /* packed: [tap][value that is multiplied][channel of the map] */
    double *filter_sums; /* of every position */
    double *sums;        /* of every position */
};

/* A thread at a row. */
struct thread {
    const struct job *job;
    struct input raw, of_other; /* the channels of the piece */
    int width, other_width;     /* of them, in whole vectors */
    float *raw_row;             /* [z][width], formed */
    float *other_row;           /* [z][other_width]; or all fine rows over a coarse one */
    const float *norm;          /* of the sample; NULL where the raw map is read as it is */
    double *filter_sums;        /* [tap][output][width], [other_width] of the job */
    double *sums;               /* [2][width] of the sample */
};

/* Where of the fine rows over a coarse one, of `edge` z voxels each, the voxels of a tap begin;
   they are `edge` apart. */
ALWAYS_INLINE size_t fine_voxel(const struct operation *op, int edge, int tap)
{
    return (size_t)(tap / edge) * edge * op->z + tap % edge;
}

/* An operation's `finer` where all axes are halved: loops over these are unrolled. */
static const int HALVED[3] = {2, 2, 2};

static int halves_all(const int *finer) { return finer[0] * finer[1] * finer[2] == 8; }

/* --- Pools --- */

/* The larger one; a NaN is larger. */
ALWAYS_INLINE vec larger(vec best, vec value)
{
    return choose((best >= value) | (best != best), best, value);
}

/* The largest value of up to eight voxels; or its gradient, which goes to the first of the
   largest. */
ALWAYS_INLINE void pool_row(struct thread *t, int kind, const int *finer, int batch, int x, int y)
{
    const struct operation *op = t->job->op;
    int channels = op->channels[0];
    int type = op->dtype;
    int edge = finer[2];
    int voxels = finer[0] * finer[1] * edge;
    size_t under[4]; /* rows of the finer grid */
    for (int i = 0; i < finer[0] * finer[1]; i++)
        under[i] = finer_voxel(op, finer, batch, x, y, i);
    for (int c = 0; c < channels; c += LANES) {
        int n = least(LANES, channels - c);
        vec k[COEFFICIENTS];
        vec of_row[2] = {{0}};
        load_norm(k, t->norm, channels, c, n);
        for (int z = 0; z < op->z; z++) {
            size_t pooled = (voxel_of(op, batch, x, y) + z) * channels + c;
            size_t at[8];
            vec raw[8], value[8], best = {0}, left;
#pragma GCC unroll 8
            for (int i = 0; i < voxels; i++) {
                at[i] = (under[i / edge] + edge * z + i % edge) * channels + c;
                raw[i] = load_values(op->maps[0], at[i], n, type);
                value[i] = normed(k, raw[i]);
                best = i ? larger(best, value[i]) : value[i];
            }
            if (kind == MAX_POOL) {
                store_values(op->map, pooled, best, n, type);
                continue;
            }
            left = load_values(op->others[0], pooled, n, type);
            for (int i = 0; i < voxels; i++) {
                ivec is_best = value[i] == best;
                vec gradient =
                    load_values(op->others[1], at[i], n, type) + keep_where(is_best, left);
                left = keep_where(~is_best, left);
                add_norm_sums(of_row, k, raw[i], store_values(op->map, at[i], gradient, n, type));
            }
        }
        if (kind == MAX_POOL_GRADIENT)
            add_row(t->sums + c, t->job->width, of_row);
    }
}

/* --- Value by value, and products of a voxel's channels with filters --- */

/* sums[voxel] += over `terms` values of each voxel, `step` floats apart: value times a row of
   filters, `width` apart. */
ALWAYS_INLINE void multiply_voxels(vec *sums, int n, const float *values, int step, int terms,
                                   const float *filters, int width)
{
    for (int i = 0; i < terms; i++, filters += width) {
        vec filter = load(filters);
        for (int v = 0; v < n; v++)
            sums[v] += filter * values[(size_t)v * step + i];
    }
}

/* What becomes of a product, or of nothing, at element `at` of the map. */
ALWAYS_INLINE vec finished(const struct operation *op, int kind, const vec *k, vec product, vec raw,
                           size_t at, int n)
{
    const void *first = op->others[0];
    const void *second = op->others[1];
    switch (kind) {
    case RESIDUAL_SUM:
        return at_least(normed(k, raw) + load_values(first, at, n, op->dtype), (vec){0});
    case RESIDUAL_GRADIENT:
        return keep_where(load_values(first, at, n, op->dtype) > 0,
                          load_values(second, at, n, op->dtype));
    case TO_RAW:
        return gradient_of_raw(k, raw, load_values(first, at, n, op->dtype));
    case PROJECT_TO_RAW:
        return gradient_of_raw(k, raw, product);
    case PROJECT:
        return first ? product + load_values(first, at, n, op->dtype) : product;
    case PROJECT_GRADIENT:
        return second ? product + load_values(second, at, n, op->dtype) : product;
    default:
        return product;
    }
}

/* A row of the map from element `to` on, of voxels `step` apart: over `taps` the products of a row
   with filters. Without taps nothing is multiplied: value by value. */
ALWAYS_INLINE void make_row(struct thread *t, int kind, size_t to, int step, const float *filters,
                            int taps, int edge)
{
    const struct job *j = t->job;
    const struct operation *op = t->job->op;
    const int from_raw = kind == PROJECT || kind == UP_CONVOLVE;
    const int sums_up = kind == RESIDUAL_GRADIENT || kind == PROJECT_GRADIENT ||
        kind == PROJECT_SUMS || kind == UP_INPUT_GRADIENT;
    const float *values = from_raw ? t->raw_row : t->other_row;
    int channels = from_raw ? op->outputs : op->channels[0];
    int terms = from_raw ? op->channels[0] : op->outputs;
    int width = from_raw ? j->width : j->other_width;
    int filter_width = from_raw ? j->other_width : j->width;
    size_t apart = (size_t)edge * width; /* voxels of one tap */
    for (int c = 0; c < channels; c += LANES) {
        int n = least(LANES, channels - c);
        vec k[COEFFICIENTS];
        vec of_row[2] = {{0}};
        vec bias = kind == PROJECT ? load_some(op->bias + c, n) : (vec){0};
        load_norm(k, from_raw ? NULL : t->norm, channels, c, n);
        for (int z = 0; z < op->z; z += AT_ONCE) {
            int voxels = least(AT_ONCE, op->z - z);
            vec sums[AT_ONCE];
            for (int v = 0; v < AT_ONCE; v++)
                sums[v] = bias;
            for (int tap = 0; tap < taps; tap++) {
                const float *at = values + fine_voxel(op, edge, tap) * width + z * apart;
                const float *filter = filters + (size_t)tap * terms * filter_width + c;
                if (voxels == AT_ONCE) /* unrolled */
                    multiply_voxels(sums, AT_ONCE, at, apart, terms, filter, filter_width);
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
            add_row(t->sums + c, j->width, of_row);
    }
}

/* sums[value][channel], `width` apart, += over voxels: a vector of channels of `row`, `next`
   apart, times each of `terms` values of the voxel, `apart` apart. */
static void add_products(double *sums, int width, const float *row, int next, const float *values,
                         int apart, int terms, int voxels)
{
    for (int first = 0; first < terms; first += AT_ONCE) {
        vec sum[AT_ONCE] = {{0}};
        for (int v = 0; v < voxels; v++) {
            vec channels = load(row + (size_t)v * next);
            const float *value = values + (size_t)v * apart + first;
            for (int i = 0; i < AT_ONCE; i++) /* those beyond the last are 0 */
                sum[i] += channels * value[i];
        }
        for (int i = 0; i < least(AT_ONCE, terms - first); i++)
            for (int lane = 0; lane < LANES; lane++)
                sums[(size_t)(first + i) * width + lane] += sum[i][lane];
    }
}

/* Where the sums of a tap begin, of the piece's first output and channel. */
static double *filter_sums_at(const struct thread *t, int tap)
{
    size_t output = (size_t)tap * t->job->op->outputs + t->of_other.first;
    return t->filter_sums + output * t->job->width + t->raw.first;
}

static double *bias_sums(const struct thread *t)
{
    return t->filter_sums + (size_t)t->job->taps * t->job->op->outputs * t->job->width;
}

/* Adds to the filters' sums, and to the bias's after them. */
static void make_filter_gradient(struct thread *t)
{
    const struct job *j = t->job;
    const struct operation *op = t->job->op;
    int outputs = t->of_other.past - t->of_other.first;
    int other_width = t->other_width;
    int edge = j->finer[2];
    for (int tap = 0; tap < j->taps; tap++) {
        const float *values = t->other_row + fine_voxel(op, edge, tap) * other_width;
        for (int c = 0; c < t->width; c += LANES)
            add_products(filter_sums_at(t, tap) + c, j->width, t->raw_row + c, t->width, values,
                         edge * other_width, outputs, op->z);
    }
    for (int o = 0; op->bias_gradient && o < outputs; o++) {
        float sum = 0;
        for (int z = 0; z < op->z; z++)
            sum += t->other_row[(size_t)z * other_width + o];
        bias_sums(t)[o] += sum;
    }
}

/* Clears what the piece adds to. */
static void clear_filter_sums(struct thread *t)
{
    const struct job *j = t->job;
    int outputs = t->of_other.past - t->of_other.first;
    for (int tap = 0; tap < j->taps; tap++)
        for (int o = 0; o < outputs; o++)
            memset(filter_sums_at(t, tap) + (size_t)o * j->width, 0, sizeof(double) * t->width);
    if (j->op->bias_gradient)
        memset(bias_sums(t), 0, sizeof(double) * j->other_width);
}

/* The largest of a row's voxels, or its gradient. */
ALWAYS_INLINE void pool(struct thread *t, int kind, int batch, int x, int y)
{
    const struct operation *op = t->job->op;
    if (halves_all(op->finer))
        pool_row(t, kind, HALVED, batch, x, y);
    else
        pool_row(t, kind, op->finer, batch, x, y);
}

/* Lines are read before a map may be written over them. Of a transposed convolution the other map's
   are all on the finer grid over the row. */
static void compute_row(struct thread *t, int batch, int x, int y)
{
    const struct job *j = t->job;
    const struct operation *op = t->job->op;
    int rows = j->finer[0] * j->finer[1];
    int edge = j->finer[2];
    int channels = op->channels[0];
    int outputs = op->outputs;
    size_t voxel = voxel_of(op, batch, x, y);
    if (j->from_raw || op->filter_gradient)
        form_row(t->raw_row, t->width, &t->raw, batch, voxel, op->z, op->dtype);
    for (int i = 0; i < rows && j->reads_other; i++) {
        float *row = t->other_row + (size_t)i * edge * op->z * t->other_width;
        size_t fine = finer_voxel(op, j->finer, batch, x, y, i);
        form_row(row, t->other_width, &t->of_other, batch, fine, edge * op->z, op->dtype);
    }
    switch (op->kind) {
#define ROW(kind, taps) \
    case kind: \
        make_row(t, kind, voxel *channels, channels, j->filters, taps, 1); \
        break;
#define POOL(kind) \
    case kind: \
        pool(t, kind, batch, x, y); \
        break;
        /* clang-format off */
        POOL(MAX_POOL) POOL(MAX_POOL_GRADIENT)
        ROW(RESIDUAL_SUM, 0) ROW(RESIDUAL_GRADIENT, 0) ROW(TO_RAW, 0)
        ROW(PROJECT_GRADIENT, 1) ROW(PROJECT_SUMS, 1) ROW(PROJECT_TO_RAW, 1)
        /* clang-format on */
    case UP_INPUT_GRADIENT:
        if (halves_all(j->finer))
            make_row(t, UP_INPUT_GRADIENT, voxel * channels, channels, j->filters, 8, 2);
        else
            make_row(t, UP_INPUT_GRADIENT, voxel * channels, channels, j->filters, j->taps, edge);
        break;
    case PROJECT:
    case UP_CONVOLVE: /* from the raw map, below */
    case UP_FILTER_GRADIENT:
        break;
    default:
        __builtin_trap();
    }
    for (int tap = 0; tap < j->taps && j->from_raw; tap++) {
        size_t to = finer_voxel(op, j->finer, batch, x, y, tap / edge) + tap % edge;
        const float *filters = j->filters + (size_t)tap * channels * j->other_width;
        if (op->kind == PROJECT)
            make_row(t, PROJECT, to * outputs, outputs, filters, 1, 1);
        else
            make_row(t, UP_CONVOLVE, to * outputs, edge * outputs, filters, 1, 1);
    }
    if (op->filter_gradient)
        make_filter_gradient(t);
}

/* --- The operation --- */

static void compute_piece(struct job *j, const struct piece *piece, char *memory)
{
    const struct operation *op = j->op;
    struct thread t = {.job = j, .raw = j->raw, .of_other = j->other};
    memset(memory, 0, j->kept_floats * sizeof(float)); /* channels that are not there stay 0 */
    if (op->kind == UP_FILTER_GRADIENT) {
        t.raw = blocks_of(&j->raw, piece->input, piece->past_input);
        t.of_other = blocks_of(&j->other, piece->output, piece->past_output);
    }
    t.width = round_up(t.raw.past - t.raw.first, LANES);
    t.other_width = round_up(t.of_other.past - t.of_other.first, LANES);
    t.raw_row = (float *)memory;
    t.other_row = t.raw_row + (size_t)op->z * t.width;
    t.filter_sums = j->filter_sums + piece->position * j->filter_count;
    if (op->filter_gradient)
        clear_filter_sums(&t);
    double *sums = j->sums + piece->position * j->sum_count;
    if (op->sums_to)
        memset(sums, 0, j->sum_count * sizeof(double));
    for (long at = piece->plane; at < piece->past_plane; at++) {
        struct row row = row_of(op, at);
        if (op->coefficients)
            t.norm = op->coefficients + (size_t)row.batch * COEFFICIENTS * op->channels[0];
        t.sums = sums + (size_t)row.batch * 2 * j->width;
        compute_row(&t, row.batch, row.x, row.y);
    }
}

/* Where the filter of a tap, a channel and an output is in what TensorFlow has. */
static size_t filter_at(const struct operation *op, int tap, int channel, int output)
{
    size_t of_up = ((size_t)tap * op->outputs + output) * op->channels[0] + channel;
    return op->kind < UP_CONVOLVE ? (size_t)channel * op->outputs + output : of_up;
}

/* A row has the weights of a value for all channels of the map. A thread packs its share of
   them. */
static void pack_filters(void *argument, int thread, int threads)
{
    const struct job *j = argument;
    const struct operation *op = j->op;
    int values = j->from_raw ? op->channels[0] : op->outputs;
    int made = j->from_raw ? op->outputs : op->channels[0];
    int width = j->from_raw ? j->other_width : j->width;
    long all = (long)j->taps * values;
    for (long row = share(all, thread, threads); row < share(all, thread + 1, threads); row++) {
        float *to = j->filters + (size_t)row * width;
        int tap = (int)(row / values);
        int value = (int)(row % values);
        memset(to, 0, width * sizeof(float)); /* channels that are not there */
        for (int i = 0; i < made; i++) {
            int channel = j->from_raw ? value : i;
            int output = j->from_raw ? i : value;
            to[i] = op->filters[filter_at(op, tap, channel, output)];
        }
    }
}

/* Adds the positions' sums in their order: a thread those of every `threads`-th value, or row. */
static void write_results(void *argument, int thread, int threads)
{
    const struct job *j = argument;
    const struct operation *op = j->op;
    int channels = op->channels[0];
    int outputs = op->outputs;
    int width = j->width;
    int positions = j->cut.positions;
    long sums_count = op->sums_to ? 2L * op->batch * channels : 0;
    for (long i = thread; i < sums_count; i += threads) {
        const double *sums = j->sums + i / channels * width + i % channels;
        op->sums_to[i] = (float)total(sums, j->sum_count, positions);
    }
    for (int row = thread; op->filter_gradient && row < j->taps * outputs; row += threads)
        for (int c = 0; c < channels; c++) {
            const double *sums = j->filter_sums + (size_t)row * width + c;
            size_t to = filter_at(op, row / outputs, c, row % outputs);
            op->filter_gradient[to] = (float)total(sums, j->filter_count, positions);
        }
    const double *of_bias = j->filter_sums + (size_t)j->taps * outputs * width;
    for (int o = thread; op->bias_gradient && o < outputs; o += threads)
        op->bias_gradient[o] = (float)total(of_bias + o, j->filter_count, positions);
}

static struct cut cut_for(const struct operation *op)
{
    struct work work = {
        .planes = rows_of_all(op),
        .rows = 1,
        .inputs = (int)ceil_div(op->channels[0], GROUP),
        .outputs = (int)ceil_div(op->outputs, GROUP),
        .unit = 1,
        .products = UP_PRODUCTS_COST,
        .form_outputs = UP_FORM_FINE,
        .sums = UP_PRODUCTS_COST * UP_SUMS_VOXELS / op->z,
    };
    if (op->kind == UP_FILTER_GRADIENT)
        return cut_of(&work, op->threads);
    return cut_of_rows(work.planes, op->threads);
}

static struct job job_of(const struct operation *op)
{
    struct job j = {.op = op, .cut = cut_for(op)};
    for (int axis = 0; axis < 3; axis++)
        j.finer[axis] = op->kind >= UP_CONVOLVE ? op->finer[axis] : 1;
    j.taps = j.finer[0] * j.finer[1] * j.finer[2];
    j.raw = all_of((struct input){
        .channels = {op->channels[0]},
        .maps = {op->maps[0]},
        .coefficients = op->coefficients,
    });
    j.other = all_of((struct input){.channels = {op->outputs}, .maps = {op->others[0]}});
    j.from_raw = op->kind == PROJECT || op->kind == UP_CONVOLVE;
    j.reads_other = op->kind > PROJECT && !j.from_raw;
    j.width = round_up(op->channels[0], LANES);
    j.other_width = round_up(op->outputs, LANES);
    int width = j.width; /* of the largest piece */
    int other_width = j.other_width;
    if (op->kind == UP_FILTER_GRADIENT) {
        width = least(width, j.cut.inputs * GROUP);
        other_width = least(other_width, j.cut.outputs * GROUP);
    }
    j.kept_floats = (size_t)op->z * (width + other_width * j.taps);
    j.sum_count = (size_t)op->batch * 2 * j.width;
    size_t filters = (size_t)j.taps * j.width * j.other_width;
    j.filter_count = op->filter_gradient ? filters + j.other_width : 0;
    j.passing = (j.sum_count + j.filter_count) * j.cut.positions * sizeof(double);
    if (op->filters)
        j.passing += filters * sizeof(float);
    return j;
}

static void place(struct job *j, char *memory)
{
    j->sums = (double *)memory;
    j->filter_sums = j->sums + j->sum_count * j->cut.positions;
    j->filters = (float *)(j->filter_sums + j->filter_count * j->cut.positions);
}

int POINTWISE(const struct operation *op)
{
    struct job j = job_of(op);
    struct steps steps = {
        .op = op,
        .cut = &j.cut,
        .kept = j.kept_floats * sizeof(float),
        .passing = j.passing,
        .place = place,
        .pack = op->filters ? pack_filters : NULL,
        .compute = compute_piece,
        .add_up = op->sums_to || op->filter_gradient ? write_results : NULL,
    };
    return run_pieces(&j, &steps);
}
