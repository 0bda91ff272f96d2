/* 3x3x3 convolutions, their input and filter gradients: one loop, compiled once for every
   instruction set.

   A thread has a piece of the planes along x, of their rows, and of the outputs' blocks (pieces.h),
   cut into bands along y so low that three planes of a band's rows stay in the cache L2. It goes
   along x through each band: forms the rows of the next plane, then multiplies and finishes row
   after row. So each map is read from memory once, and once more what bands and pieces share.
   What is written in place of the map that is read has its own chapter in pieces.h. */
#include "pieces.h"

/* --- The micro-kernels: all the arithmetic that counts --- */

enum { VECS = 16 / LANES }; /* vectors of 16 outputs */
enum { MOST_ROWS = 8 };     /* neighbours that are multiplied at once */

/* sum + weights * (the unit, spread over all lanes) */
ALWAYS_INLINE vec multiply_add(vec sum, vec weights, unit spread)
{
#if defined BFLOAT16_ROWS && !defined __AVX512BF16__
    return sum; /* compiled for answers alone: build.py */
#elif defined BFLOAT16_ROWS
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights,
                                 (__m512bh)_mm512_set1_epi32((int)spread));
#else
    return sum + weights * spread;
#endif
}

#if LANES == 16
enum { MOST_SUMS = MOST_TILES_OF_16_LANES, CHANNELS_AT_ONCE = 16 };
#else
enum { MOST_SUMS = MOST_TILES_OF_8_LANES, CHANNELS_AT_ONCE = 4 };
#endif

/* sums[row][tile][16 outputs], rows `next_sums` floats apart, of `r` rows of `n` tiles: over nine
   rows each (rows[tap][row]) and `units` units a tile of each. A group's tiles follow each other;
   `next_group` units on is the next group. Weights are [tap][unit][16 outputs], each as large as a
   unit. */
ALWAYS_INLINE void multiply_n(int r, int n, float *sums, size_t next_sums, const unit *const *rows,
                              const unit *weights, int units, size_t next_group)
{
    vec sum[MOST_SUMS][VECS] = {{{0}}};
    for (int tap = 0; tap < 9; tap++, rows += r)
        for (int done = 0; done < units; done += GROUP_UNITS) {
            size_t group = done / GROUP_UNITS * next_group;
            int count = least(units - done, GROUP_UNITS);
            for (int u = 0; u < count; u++, weights += 16) {
                vec weight[VECS];
                for (int v = 0; v < VECS; v++)
                    weight[v] = load((const float *)weights + v * LANES);
#pragma GCC unroll 28
                for (int t = 0; t < r * n; t++)
                    for (int v = 0; v < VECS; v++)
                        sum[t][v] = multiply_add(sum[t][v], weight[v],
                                                 rows[t / n][group + t % n * GROUP_UNITS + u]);
            }
        }
#pragma GCC unroll 28
    for (int t = 0; t < r * n; t++)
        for (int v = 0; v < VECS; v++)
            store(sums + t / n * next_sums + t % n * 16 + v * LANES, sum[t][v]);
}

NEVER_INLINE void multiply(int r, int n, float *sums, size_t next_sums, const unit *const *rows,
                           const unit *weights, int units, size_t next_group)
{
    switch (r * 100 + n) {
#define CASE(r, n) \
    case r * 100 + n: \
        multiply_n(r, n, sums, next_sums, rows, weights, units, next_group); \
        break;
        /* clang-format off */
        CASE(1, 1) CASE(1, 2) CASE(1, 3) CASE(1, 4) CASE(1, 5) CASE(1, 6)
        CASE(2, 1) CASE(2, 2) CASE(2, 3)
        CASE(4, 1)
#ifdef __AVX512F__
        CASE(1, 7) CASE(1, 8) CASE(1, 10) CASE(1, 12) CASE(1, 14) CASE(1, 16)
        CASE(1, 18) CASE(1, 20) CASE(1, 22) CASE(1, 24) CASE(1, 26) CASE(1, 28)
        CASE(2, 4) CASE(2, 5) CASE(2, 6) CASE(2, 7) CASE(2, 8) CASE(2, 10) CASE(2, 12) CASE(2, 14)
        CASE(4, 2) CASE(4, 3) CASE(4, 4) CASE(4, 5) CASE(4, 6) CASE(4, 7)
        CASE(8, 1) CASE(8, 2) CASE(8, 3)
#endif
        /* clang-format on */
    default:
        __builtin_trap();
    }
}

ALWAYS_INLINE void correlate_unit(int n, vec (*sum)[VECS], const unit *value, const unit *gradient)
{
    vec g[VECS];
    for (int v = 0; v < VECS; v++)
        g[v] = load((const float *)gradient + v * LANES);
#pragma GCC unroll 16
    for (int c = 0; c < n; c++)
        for (int v = 0; v < VECS; v++)
            sum[c][v] = multiply_add(sum[c][v], g[v], value[c]);
}

/* sums[channel][16 outputs] += over `rows` rows and `units` units along z: `n` channels of values
   times the gradients. Few channels take every other unit, or every fourth, in sums of their own:
   so many products that none waits for its sum. */
ALWAYS_INLINE void correlate_n(int n, float *sums, int rows, const unit *const *values,
                               const unit *const *gradients, size_t at, size_t gradients_at,
                               int units)
{
    const int sets = CHANNELS_AT_ONCE / n;
    vec sum[CHANNELS_AT_ONCE][VECS] = {{{0}}};
    for (int r = 0; r < rows; r++) {
        const unit *value = values[r] + at;
        const unit *gradient = gradients[r] + gradients_at;
        int u = 0;
        for (; u + sets <= units; u += sets)
#pragma GCC unroll 4
            for (int set = 0; set < sets; set++, value += GROUP, gradient += GROUP)
                correlate_unit(n, sum + set * n, value, gradient);
        for (; u < units; u++, value += GROUP, gradient += GROUP)
            correlate_unit(n, sum, value, gradient);
    }
#pragma GCC unroll 16
    for (int c = 0; c < n; c++)
        for (int v = 0; v < VECS; v++) {
            for (int set = 1; set < sets; set++)
                sum[c][v] += sum[set * n + c][v];
            store(sums + c * 16 + v * LANES, load(sums + c * 16 + v * LANES) + sum[c][v]);
        }
}

NEVER_INLINE void correlate(int channels, float *sums, int rows, const unit *const *values,
                            const unit *const *gradients, size_t at, size_t gradients_at, int units)
{
    for (int c = 0; c < channels;
         c += CHANNELS_AT_ONCE, at += CHANNELS_AT_ONCE, sums += CHANNELS_AT_ONCE * 16) {
        int n = least(channels - c, CHANNELS_AT_ONCE);
        switch (n) {
#define CHANNELS(n) \
    case n: \
        correlate_n(n, sums, rows, values, gradients, at, gradients_at, units); \
        break;
            CHANNELS(4)
#ifdef __AVX512F__
            CHANNELS(8) CHANNELS(12) CHANNELS(16)
#endif
        default:
            __builtin_trap();
        }
    }
}

/* --- How an operation is cut --- */

static int units_of(int channels) { return round_up(channels, UNIT) / UNIT; }

/* Rows that begin at equal addresses modulo 4096 would share sets of the cache L1: they begin 17
   cache lines further on. */
static size_t units_of_row(int width, int tiles)
{
    size_t cache_lines = ((size_t)STREAMS * width * tiles / UNIT + 15) / 16;
    return (cache_lines + (49 - cache_lines % 32) % 32) * 16;
}

/* What the threads of an operation share, and how it is cut. */
struct job {
    const struct operation *op;
    struct input input, gradient; /* of the output, for a filter gradient */
    enum map_sums sums;
    struct cut cut;
    int inputs, outputs;     /* channels */
    int width, output_width; /* the same, rounded up to whole groups */
    int ring_width;          /* channels of a row of the ring: of the largest piece's inputs */
    int gradient_width;      /* of a row of the output's gradient; else one group of outputs */
    int tiles, step;         /* of a row; a row is padded to whole steps of tiles */
    int most;                /* tiles of one call of `multiply`, of all its rows together */
    int y_rows;              /* of a band, without its borders */
    size_t row_units;        /* from one row of the ring to the next */
    size_t gradient_units;   /* from one row of the output's gradient to the next */

    /* A thread's memory: */
    size_t ring_units;    /* of all rows */
    size_t row_floats;    /* of a formed row with its borders */
    size_t output_floats; /* of a row of the output or of its gradient */
    size_t sums_floats;   /* of the streams' sums of a row */
    size_t kept;          /* bytes of all that */

    /* What passes on: */
    size_t weight_bytes;    /* 0 for a filter gradient */
    size_t position_totals; /* float64 numbers; 0 for a filter gradient */
    size_t position_sums;   /* floats, of a filter gradient */
    size_t passing;         /* bytes of all that */
    unit *weights;          /* [16 outputs][stream][tap][unit][16] */
    double *totals;         /* of every position: [batch][2][output_width] */
    float *filter_sums; /* of every position: [tap][stream][group][16 outputs][16 channels][16] */
};

/* How an operation on rows of so many tiles is cut. In place outputs are not: a piece would
   overwrite what the others read. */
static struct cut cut_for(const struct operation *op, const struct job *j)
{
    int units = j->tiles / UNIT;
    int blocks = j->output_width / GROUP;
    struct work work = {
        .planes = (long)op->batch * op->x,
        .rows = op->y,
        .inputs = 1,
        .outputs = blocks,
        .unit = op->map == op->maps[0] ? blocks : 1,
        .border = 1,
        .products = ROW_PRODUCTS_COST,
        .together = 1,
        .load = ROW_PRODUCTS_COST * ROW_LOAD_TILES / j->tiles,
    };
    while (work.together < MOST_ROWS && 2 * work.together * j->tiles <= j->most)
        work.together *= 2;
    if (op->kind == FILTER_GRADIENT) {
        work.inputs = j->width / GROUP;
        work.unit = 1;
        work.together = 0;
        work.load = ROW_PRODUCTS_COST * ROW_LOAD_UNITS / units;
        work.form_outputs = 1;
        work.sums = ROW_PRODUCTS_COST * ROW_SUMS_UNITS / units;
    }
    return cut_of(&work, op->threads);
}

/* What an operation reads and makes, and its rows. */
static struct job job_of(const struct operation *op)
{
    int tiles = (int)ceil_div(op->z, TILE);
    struct job j = {
        .op = op,
        .inputs = op->channels[0] + op->channels[1],
        .outputs = op->outputs,
        .sums = sums_of(op),
    };
    j.input = all_of((struct input){
        .channels = {op->channels[0], op->channels[1]},
        .maps = {op->maps[0], op->maps[1]},
        .raw = op->kind == INPUT_GRADIENT ? op->others[1] : NULL,
        .coefficients = op->coefficients,
    });
    j.gradient = all_of((struct input){
        .channels = {op->outputs},
        .maps = {op->others[0]},
        .raw = op->others[1],
        .coefficients = op->other_coefficients,
    });

    /* The sizes for which there is a `multiply`. */
    j.step = tiles < 8 ? UNIT : 2;
    j.most = MOST_SUMS;
    j.tiles = round_up(tiles, j.step);
    j.width = round_up(j.inputs, GROUP);
    j.output_width = round_up(j.outputs, GROUP);
    j.cut = cut_for(op, &j);
    return j;
}

/* A thread keeps a ring of rows, two formed rows, and sums of the streams of a row, or of as many
   as are multiplied at once: at most 64 tiles. What else an operation takes passes on. */
static void set_memory(struct job *j)
{
    int is_gradient = j->op->kind == FILTER_GRADIENT;
    j->ring_width = is_gradient ? j->cut.inputs * GROUP : j->width;
    j->gradient_width = is_gradient ? j->cut.outputs * GROUP : GROUP;
    j->row_units = units_of_row(j->ring_width, j->tiles);
    j->gradient_units = is_gradient ? units_of_row(j->gradient_width, j->tiles) : 0;

    long y_bytes = (long)(sizeof(unit) * (3 * j->row_units + j->gradient_units));
    long rows = l2_budget(j->op, RING_PERMILLE) / y_bytes - 2; /* of a band, without its borders */
    int most = rows < 1 ? 1 : least(rows, j->cut.rows);
    long bands = ceil_div(j->cut.rows, most);
    j->y_rows = (int)ceil_div(j->cut.rows, bands); /* all are about equal */

    size_t ring_rows = (size_t)3 * (j->y_rows + 2) + 1; /* and the row of zeros */
    size_t padded = (size_t)j->tiles * TILE + 2;        /* voxels of a formed row */
    j->ring_units = ring_rows * j->row_units + j->y_rows * j->gradient_units;
    j->row_floats = padded * j->ring_width;
    j->output_floats = padded * j->gradient_width;
    j->sums_floats = (size_t)STREAMS * 16 * (j->tiles > 64 ? j->tiles : 64);
    j->kept = j->ring_units * sizeof(unit);
    j->kept += (j->row_floats + j->output_floats + j->sums_floats) * sizeof(float);
    j->kept += sizeof(void *) * 2 * j->y_rows; /* pointers to rows, of both maps */

    if (is_gradient) {
        j->position_sums = (size_t)9 * STREAMS * j->width * j->output_width;
    } else {
        j->weight_bytes = sizeof(unit) * j->output_width * STREAMS * 9 * units_of(j->inputs);
        /* A cache line between threads. */
        j->position_totals = (size_t)j->op->batch * 2 * j->output_width + 16;
    }
    size_t position_bytes = sizeof(double) * j->position_totals + sizeof(float) * j->position_sums;
    j->passing = j->weight_bytes + j->cut.positions * position_bytes;
}

/* A thread's memory, and where it is in its ring of rows. */
struct thread {
    const struct job *job;
    struct piece piece;
    struct band band;
    struct input input, gradient; /* what rows are formed of: for filters the piece's channels */
    int width, gradient_width;    /* of these rows, in whole groups */
    unit *rows, *zero_row, *gradient_rows;
    float *formed_row; /* in float32, with a border of zeros */
    float *output_row; /* of the output, or of its gradient with a border of zeros */
    float *sums;
    const unit **pointers;
    double *totals;
    float *filter_sums;
};

/* Where the sums of a stream of a tap (tap * STREAMS + stream) and a group of inputs begin, of the
   piece's outputs. */
static float *panel_of(const struct thread *t, int stream, int group)
{
    size_t groups = t->job->width / GROUP;
    size_t blocks = t->job->output_width / GROUP;
    return t->filter_sums + ((stream * groups + group) * blocks + t->piece.output) * GROUP * GROUP;
}

static void clear_filter_sums(struct thread *t)
{
    const struct piece *piece = &t->piece;
    size_t bytes = sizeof(float) * GROUP * GROUP * (piece->past_output - piece->output);
    for (int stream = 0; stream < 9 * STREAMS; stream++)
        for (int group = piece->input; group < piece->past_input; group++)
            memset(panel_of(t, stream, group), 0, bytes);
}

static struct thread thread_of(const struct job *j, const struct piece *piece, char *memory)
{
    struct thread t = {.job = j, .piece = *piece, .rows = (unit *)memory};
    t.input = j->input;
    t.gradient = j->gradient;
    t.width = j->ring_width;
    t.zero_row = t.rows + 3 * (j->y_rows + 2) * j->row_units;
    t.gradient_rows = t.zero_row + j->row_units;
    t.formed_row = (float *)(t.rows + j->ring_units);
    t.output_row = t.formed_row + j->row_floats;
    t.sums = t.output_row + j->output_floats;
    t.pointers = (const unit **)(t.sums + j->sums_floats);
    memset(t.zero_row, 0, j->row_units * sizeof(unit));
    /* The borders stay 0. */
    memset(t.formed_row, 0, (j->row_floats + j->output_floats) * sizeof(float));
    t.totals = j->totals + piece->position * j->position_totals;
    t.filter_sums = j->filter_sums + piece->position * j->position_sums;
    if (j->op->kind == FILTER_GRADIENT) {
        t.input = blocks_of(&j->input, piece->input, piece->past_input);
        t.gradient = blocks_of(&j->gradient, piece->output, piece->past_output);
        t.width = (piece->past_input - piece->input) * GROUP;
        t.gradient_width = (piece->past_output - piece->output) * GROUP;
        clear_filter_sums(&t);
    } else {
        clear_totals(j->op, t.totals, j->output_width, piece);
    }
    return t;
}

/* Where row (x, y) of the ring is; a row outside the map is zero. */
static unit *ring_row(const struct thread *t, int x, int y)
{
    const struct job *j = t->job;
    if (x < 0 || x >= j->op->x || y < 0 || y >= j->op->y)
        return t->zero_row;
    size_t row = (size_t)((x + 1) % 3) * (j->y_rows + 2) + (y - t->band.y0 + 1);
    return t->rows + row * j->row_units;
}

ALWAYS_INLINE void fill_row(struct thread *t, unit *row, const struct input *in, int width, int x,
                            int y, int purpose)
{
    const struct job *j = t->job;
    const struct operation *op = j->op;
    int batch = t->band.batch;
    float *formed = purpose == GRADIENT_TILES_SUMMED ? t->output_row : t->formed_row;
    formed += width;
    form_row(formed, width, in, batch, voxel_of(op, batch, x, y), op->z, op->dtype);
    store_row(row, formed, width, j->tiles, purpose);
}

/* Row (x, y) in the ring, unless it is outside the map. */
static void fill_ring_row(struct thread *t, int x, int y)
{
    const struct operation *op = t->job->op;
    unit *row = ring_row(t, x, y);
    if (row == t->zero_row)
        return;
    if (t->piece.saved) {
        struct input in = t->input;
        in.maps[0] = map_in_place(op, &t->piece, &t->band, x, y);
        fill_row(t, row, &in, t->width, x, y, CHANNELS_SUMMED);
        save_last_row(op, &t->piece, &t->band, x, y);
    } else if (op->kind == FILTER_GRADIENT) {
        fill_row(t, row, &t->input, t->width, x, y, TILES_SUMMED);
    } else {
        fill_row(t, row, &t->input, t->width, x, y, CHANNELS_SUMMED);
    }
}

/* --- Convolution and input gradient --- */

/* Adds the values of a row, written[z][LANES], to the sums of values and of squares: squares of
   what is left without the row's mean, or they would lose the digits that all values share. */
ALWAYS_INLINE void add_moments(double *totals, int width, float *written, int z, vec row_sum)
{
    vec mean = row_sum / (float)z;
    vec squares[2] = {{0}}; /* of even and of uneven voxels: two sums in flight */
    store(written + (size_t)z * LANES, mean); /* pairs are whole */
    for (int i = 0; i < z; i += 2)
        for (int k = 0; k < 2; k++) {
            vec difference = load(written + (size_t)(i + k) * LANES) - mean;
            squares[k] += difference * difference;
        }
    squares[0] += squares[1];
    for (int i = 0; i < LANES; i++) {
        totals[i] += (double)z * mean[i];
        totals[width + i] += squares[0][i] + (double)z * mean[i] * mean[i];
    }
}

/* Makes outputs of the streams' totals, of channels c .. c + n of a row: rounds, writes and sums
   them. */
ALWAYS_INLINE void finish_channels(struct thread *t, const float *sums, int c, size_t voxel, int n,
                                   int dtype)
{
    const struct operation *op = t->job->op;
    int z = op->z;
    int kind = t->job->sums;
    int width = t->job->output_width;
    int batch = t->band.batch;
    const float *norm = NULL;
    if (kind == NORM_SUMS)
        norm = op->other_coefficients + (size_t)batch * COEFFICIENTS * op->outputs;
    float *written = t->output_row; /* for the second time, after the mean is known */
    vec of_row[2] = {{0}};
    vec below[COEFFICIENTS];
    load_norm(below, norm, op->outputs, c, n);
    for (int tile = 0; tile * TILE < z; tile++, sums += 16) {
        vec streams[STREAMS];
        vec outputs[TILE];
        vec tile_sum = {0};
        for (int k = 0; k < STREAMS; k++)
            streams[k] = load(sums + (size_t)k * t->job->tiles * 16);
        outputs_of(streams, outputs);
        for (int j = 0; j < TILE && tile * TILE + j < z; j++) {
            size_t at = (voxel + tile * TILE + j) * op->outputs + c;
            prefetch(op->map, at, dtype, 1);
            vec value = outputs[j];
            if (op->kind == CONVOLVE && op->others[0])
                value += load_values(op->others[0], at, n, dtype);
            value = store_values(op->map, at, value, n, dtype);
            if (kind == NORM_SUMS)
                add_norm_sums(of_row, below, load_values(op->others[0], at, n, dtype), value);
            else
                tile_sum += value;
            store(written + (size_t)(tile * TILE + j) * LANES, value);
        }
        of_row[0] += tile_sum;
    }
    double *totals = t->totals + (size_t)batch * 2 * width + c;
    if (kind == MOMENTS)
        add_moments(totals, width, written, z, of_row[0]);
    else if (kind == NORM_SUMS)
        add_row(totals, width, of_row);
}

static void finish(struct thread *t, const float *row_sums, int block, size_t voxel)
{
    for (int v = 0; v < VECS; v++) {
        int c = block * 16 + v * LANES;
        int n = t->job->outputs - c;
        if (n >= LANES && t->job->op->dtype == FLOAT32)
            finish_channels(t, row_sums + v * LANES, c, voxel, LANES, FLOAT32);
        else if (n >= LANES)
            finish_channels(t, row_sums + v * LANES, c, voxel, LANES, BFLOAT16);
        else if (n > 0)
            finish_channels(t, row_sums + v * LANES, c, voxel, n, t->job->op->dtype);
    }
}

/* Rows that are multiplied at once, of `left` ones of a band. Where rows are short these are
   several neighbours: they share the weights, and keep more sums in flight. */
static int rows_at_once(const struct job *j, int left)
{
    int rows = MOST_ROWS;
    while (rows > 1 && (rows > left || rows * j->tiles > j->most))
        rows /= 2;
    return rows;
}

static void convolve_plane(struct thread *t, int x)
{
    const struct job *j = t->job;
    const struct band *band = &t->band;
    int units = units_of(j->inputs);
    int chunks = ceil_div(j->tiles, j->most);
    size_t next_group = (size_t)j->tiles * GROUP_UNITS;
    size_t stream = next_group * (j->width / GROUP);
    size_t next_sums = (size_t)STREAMS * j->tiles * 16;
    const unit *first_weights = j->weights + (size_t)t->piece.output * STREAMS * 9 * units * 16;
    for (int y = band->y0, r; y < band->y1; y += r) {
        const unit *weights = first_weights;
        const unit *around[9 * MOST_ROWS]; /* [tap][row] */
        const unit *rows[9 * MOST_ROWS];   /* the same, at a stream and a tile */
        r = rows_at_once(j, band->y1 - y);
        for (int i = 0; i < 9 * r; i++) {
            int tap = i / r;
            around[i] = ring_row(t, x + tap / 3 - 1, y + i % r + tap % 3 - 1);
        }
        for (int block = t->piece.output; block < t->piece.past_output; block++) {
            for (int k = 0; k < STREAMS; k++, weights += 9 * units * 16) {
                int done = 0; /* tiles */
                for (int left = chunks; left > 0; left--) {
                    int n = round_up((j->tiles - done + left - 1) / left, j->step);
                    for (int row = 0; row < 9 * r; row++)
                        rows[row] = around[row] + k * stream + (size_t)done * GROUP_UNITS;
                    float *sums = t->sums + ((size_t)k * j->tiles + done) * 16;
                    multiply(r, n, sums, next_sums, rows, weights, units, next_group);
                    done += n;
                }
            }
            for (int row = 0; row < r; row++) {
                size_t voxel = voxel_of(j->op, band->batch, x, y + row);
                finish(t, t->sums + row * next_sums, block, voxel);
            }
        }
    }
}

/* The streams of a unit's three filters along z, for a tap and all outputs of a block at once;
   outputs and inputs that are not there are 0. */
static void pack_unit(const struct job *j, int block, int tap, int u)
{
    int inputs = j->inputs;
    int outputs = j->outputs;
    int units = units_of(inputs);
    int n = least(outputs - block * 16, 16);
    float taps[2][3][16] = {{{0}}};
    for (int i = u * UNIT; i < least(inputs, (u + 1) * UNIT); i++)
        for (int z = 0; z < 3; z++) {
            long position = tap * 3 + z;
            long next = 1;
            long at = (position * inputs + i) * outputs + block * 16;
            if (j->op->kind == INPUT_GRADIENT) { /* flipped, and their channels swapped */
                at = ((26 - position) * outputs + block * 16) * inputs + i;
                next = inputs;
            }
            for (int o = 0; o < n; o++)
                taps[i % UNIT][z][o] = j->op->filters[at + o * next];
        }
    unit *to = j->weights + (((size_t)block * STREAMS * 9 + tap) * units + u) * 16;
    for (int k = 0; k < STREAMS; k++, to += 9 * units * 16)
        for (int o = 0; o < 16; o += LANES) {
            vec sums[2] = {{0}};
            for (int i = 0; i < UNIT; i++)
                for (int z = 0; z < 3; z++)
                    sums[i] += FILTER_TRANSFORM[k][z] * load(taps[i][z] + o);
            store_units(to + o, sums[0], sums[1]);
        }
}

/* Packs a thread's share of all units in the order in which `multiply` reads them. It goes through
   them in the order in which the filters are in memory. */
static void pack_weights(void *argument, int thread, int threads)
{
    const struct job *j = argument;
    long units = units_of(j->inputs);
    long blocks = j->output_width / 16;
    long all = 9 * units * blocks;
    for (long at = share(all, thread, threads); at < share(all, thread + 1, threads); at++)
        if (j->op->kind == INPUT_GRADIENT)
            pack_unit(j, at / units / 9, at / units % 9, at % units);
        else
            pack_unit(j, at % blocks, at / blocks / units, at / blocks % units);
}

/* --- Filter gradient --- */

static void correlate_plane(struct thread *t, int x)
{
    const struct job *j = t->job;
    const struct band *band = &t->band;
    const struct piece *piece = &t->piece;
    int groups = t->width / GROUP;
    int blocks = t->gradient_width / GROUP;
    int units = j->tiles / UNIT;
    const unit **values = t->pointers;
    const unit **gradients = t->pointers + j->y_rows;
    size_t group_units = (size_t)units * GROUP;
    for (int y = band->y0; y < band->y1; y++)
        fill_row(t, t->gradient_rows + (y - band->y0) * j->gradient_units, &t->gradient,
                 t->gradient_width, x, y, GRADIENT_TILES_SUMMED);
    for (int tap = 0; tap < 9; tap++) {
        int rows = 0;
        for (int y = band->y0; y < band->y1; y++) {
            const unit *row = ring_row(t, x + tap / 3 - 1, y + tap % 3 - 1);
            if (row == t->zero_row)
                continue;
            values[rows] = row;
            gradients[rows] = t->gradient_rows + (y - band->y0) * j->gradient_units;
            rows++;
        }
        for (int k = 0; k < STREAMS; k++)
            for (int group = 0; group < groups; group++) {
                float *sums = panel_of(t, tap * STREAMS + k, piece->input + group);
                int left = j->inputs - (piece->input + group) * GROUP;
                size_t at = ((size_t)k * groups + group) * group_units;
                for (int block = 0; block < blocks; block++, sums += GROUP * GROUP) {
                    size_t gradients_at = ((size_t)k * blocks + block) * group_units;
                    correlate(least(round_up(left, 4), GROUP), sums, rows, values, gradients, at,
                              gradients_at, units);
                }
            }
    }
}

/* Of an input and a block of outputs: adds the positions' sums in their order, and makes the three
   taps along z of the streams. */
static void write_taps(const struct job *j, int tap, int input, int block)
{
    int outputs = j->outputs;
    int groups = j->width / GROUP;
    int blocks = j->output_width / GROUP;
    double taps[3][16] = {{0}};
    for (int k = 0; k < STREAMS; k++) {
        size_t panel = ((size_t)(tap * STREAMS + k) * groups + input / GROUP) * blocks + block;
        const float *from = j->filter_sums + (panel * GROUP + input % GROUP) * 16;
        double sum[16] = {0};
        for (int each = 0; each < j->cut.positions; each++, from += j->position_sums)
            for (int o = 0; o < 16; o++)
                sum[o] += from[o];
        for (int z = 0; z < 3; z++)
            for (int o = 0; o < 16; o++)
                taps[z][o] += FILTER_TRANSFORM[k][z] * sum[o];
    }
    for (int z = 0; z < 3; z++) {
        size_t at = ((size_t)(tap * 3 + z) * j->inputs + input) * outputs + block * 16;
        for (int o = 0; o < least(outputs - block * 16, 16); o++)
            j->op->filter_gradient[at + o] = (float)taps[z][o];
    }
}

/* A thread's share of all, in the order in which the gradient is in memory. */
static void write_filter_gradient(void *argument, int thread, int threads)
{
    const struct job *j = argument;
    long inputs = j->inputs;
    long blocks = j->output_width / GROUP;
    long all = 9 * inputs * blocks;
    for (long at = share(all, thread, threads); at < share(all, thread + 1, threads); at++)
        write_taps(j, at / blocks / inputs, at / blocks % inputs, at % blocks);
}

/* --- An operation --- */

/* Forms the rows of a piece plane by plane, band by band along y, each plane's after those of the
   one before; and takes each plane once the two beside it are formed. */
static void compute_piece(struct job *j, const struct piece *piece, char *memory)
{
    struct thread t = thread_of(j, piece, memory);
    while (next_band(&t.band, j->op, piece, j->y_rows)) {
        const struct band *band = &t.band;
        for (int x = band->x0 - 1; x <= band->x1; x++) {
            for (int y = band->y0 - 1; y <= band->y1; y++)
                fill_ring_row(&t, x, y);
            if (x == band->x0 - 1 || x == band->x0)
                continue;
            if (j->op->kind == FILTER_GRADIENT)
                correlate_plane(&t, x - 1);
            else
                convolve_plane(&t, x - 1);
        }
    }
}

static void place(struct job *j, char *memory)
{
    j->weights = (unit *)memory;
    j->totals = (double *)(memory + j->weight_bytes);
    j->filter_sums = (float *)(j->totals + j->cut.positions * j->position_totals);
}

static void write_map_sums(struct job *j)
{
    if (j->op->sums_to)
        write_sums(j->op, j->sums, j->totals, j->position_totals, j->outputs, j->output_width,
                   j->cut.positions);
}

static int convolve(const struct operation *op)
{
    struct job j = job_of(op);
    set_memory(&j);
    struct steps steps = {
        .op = op,
        .cut = &j.cut,
        .kept = j.kept,
        .passing = j.passing,
        .place = place,
        .compute = compute_piece,
    };
    if (op->kind == FILTER_GRADIENT) {
        steps.add_up = write_filter_gradient;
    } else {
        steps.reads_neighbours = 1;
        steps.pack = pack_weights;
        steps.write = write_map_sums;
    }
    return run_pieces(&j, &steps);
}

/* --- The instruction set --- */

int POINTWISE(const struct operation *); /* build.py defines the names */
int LOSS(const struct operation *);
#ifndef BFLOAT16_ROWS
int ORTHOGONALIZE(const struct operation *);
#endif

static int run_kind(const struct operation *op)
{
    switch (op->kind) {
    case CONVOLVE:
    case INPUT_GRADIENT:
    case FILTER_GRADIENT:
        return convolve(op);
    case LOSS_SUMS:
    case LOSS_SLOPE:
        return LOSS(op);
#ifndef BFLOAT16_ROWS
    case ORTHOGONAL:
        return ORTHOGONALIZE(op);
#endif
    default: /* it knows all others */
        return POINTWISE(op);
    }
}

static int run(const struct operation *op)
{
    begin_operation();
    int code = run_kind(op);
    end_operation();
    return code;
}

static void multiply_in_cache(void *repeats, int thread, int threads)
{
    static unit row[MOST_SUMS * GROUP_UNITS] __attribute__((aligned(64)));
    static unit weights[9 * GROUP_UNITS * 16] __attribute__((aligned(64)));
    static _Thread_local float sums[MOST_SUMS * 16] __attribute__((aligned(64)));
    const unit *rows[9] = {row, row, row, row, row, row, row, row, row};
    for (long i = 0; i < *(long *)repeats; i++)
        multiply(1, MOST_SUMS, sums, 0, rows, weights, GROUP_UNITS, 0);
}

static double products(int threads, long repeats)
{
    begin_operation();
    run_on_threads(threads, multiply_in_cache, &repeats);
    end_operation();
    return 2.0 * repeats * threads * 9 * GROUP * 16 * MOST_SUMS;
}

const struct kernels KERNELS = {KERNELS_NAME, run, products};
