/* The operations: one loop, compiled once for every instruction set.

   A thread has a piece of the planes along x, of their rows, and of the outputs' blocks (pieces.h),
   cut into tiles along y so low that three planes of a tile's rows stay in the cache L2. It goes
   along x through each tile: forms the rows of the next plane, then multiplies and finishes row
   after row. So each map is read from memory once, and once more what tiles and pieces share.

   In place, the output is written over the one map that is read. Rows that are read later are
   copied first: those beside each piece before any thread writes, and in each plane of a piece the
   last row of the tile before. */
#include <unistd.h>
#include "pieces.h"

/* --- The micro-kernels: all the arithmetic that counts --- */

enum { VECS = 16 / LANES }; /* vectors of 16 outputs */

/* sum + weights * (the unit, spread over all lanes) */
ALWAYS_INLINE vec multiply_add(vec sum, vec weights, unit spread)
{
#ifdef BFLOAT16_ROWS
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32((int)spread));
#else
    return sum + weights * spread;
#endif
}

#ifdef __AVX512F__
enum { MOST_SUMS = 28, CHANNELS_AT_ONCE = 16 }; /* sums in registers, of 32 */
#else
enum { MOST_SUMS = 6, CHANNELS_AT_ONCE = 4 }; /* of 16 */
#endif

/* sums[row][tile][16 outputs] of `r` rows of `n` tiles: over nine rows each (rows[tap][row]) and `units` units a tile of
   each. A group's tiles follow each other; `next_group` units on is the next group. Weights are [tap][unit][16 outputs],
   each as large as a unit. */
ALWAYS_INLINE void multiply_n(int r, int n, float *sums, size_t next_sums, const unit *const *rows, const unit *weights, int units,
                              size_t next_group)
{
    vec sum[MOST_SUMS][VECS] = {{{0}}};
    for (int tap = 0; tap < 9; tap++, rows += r)
        for (int done = 0; done < units; done += GROUP_UNITS) {
            size_t group = done / GROUP_UNITS * next_group;
            int count = units - done < GROUP_UNITS ? units - done : GROUP_UNITS;
            for (int u = 0; u < count; u++, weights += 16) {
                vec weight[VECS];
                for (int v = 0; v < VECS; v++)
                    weight[v] = load((const float *)weights + v * LANES);
#pragma GCC unroll 28
                for (int t = 0; t < r * n; t++)
                    for (int v = 0; v < VECS; v++)
                        sum[t][v] = multiply_add(sum[t][v], weight[v], rows[t / n][group + t % n * GROUP_UNITS + u]);
            }
        }
#pragma GCC unroll 28
    for (int t = 0; t < r * n; t++)
        for (int v = 0; v < VECS; v++)
            store(sums + t / n * next_sums + t % n * 16 + v * LANES, sum[t][v]);
}

static void multiply(int r, int n, float *sums, size_t next_sums, const unit *const *rows, const unit *weights, int units,
                     size_t next_group)
{
    switch (r * 100 + n) {
#define CASE(r, n) case r * 100 + n: multiply_n(r, n, sums, next_sums, rows, weights, units, next_group); break;
    CASE(1, 1) CASE(1, 2) CASE(1, 3) CASE(1, 4) CASE(1, 5) CASE(1, 6) CASE(2, 1) CASE(2, 2) CASE(2, 3) CASE(4, 1)
#ifdef __AVX512F__
    CASE(1, 7) CASE(2, 5) CASE(2, 7) CASE(4, 3) CASE(4, 5) CASE(4, 7) CASE(8, 1) CASE(8, 3)
    CASE(1, 8) CASE(1, 10) CASE(1, 12) CASE(1, 14) CASE(1, 16) CASE(1, 18) CASE(1, 20) CASE(1, 22) CASE(1, 24) CASE(1, 26)
    CASE(1, 28) CASE(2, 4) CASE(2, 6) CASE(2, 8) CASE(2, 10) CASE(2, 12) CASE(2, 14) CASE(4, 2) CASE(4, 4) CASE(4, 6) CASE(8, 2)
#endif
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

/* sums[channel][16 outputs] += over `rows` rows and `units` units along z: `n` channels of values times the gradients. Few
   channels take every other unit, or every fourth, in sums of their own: so many products that none waits for its sum. */
ALWAYS_INLINE void correlate_n(int n, float *sums, int rows, const unit *const *values, const unit *const *gradients, size_t at,
                               size_t gradients_at, int units)
{
    const int sets = CHANNELS_AT_ONCE / n;
    vec sum[CHANNELS_AT_ONCE][VECS] = {{{0}}};
    for (int r = 0; r < rows; r++) {
        const unit *value = values[r] + at, *gradient = gradients[r] + gradients_at;
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

static void correlate(int channels, float *sums, int rows, const unit *const *values, const unit *const *gradients, size_t at,
                      size_t gradients_at, int units)
{
    for (int c = 0; c < channels; c += CHANNELS_AT_ONCE, at += CHANNELS_AT_ONCE, sums += CHANNELS_AT_ONCE * 16) {
        int n = channels - c < CHANNELS_AT_ONCE ? channels - c : CHANNELS_AT_ONCE;
        switch (n) {
#define CHANNELS(n) case n: correlate_n(n, sums, rows, values, gradients, at, gradients_at, units); break;
        CHANNELS(4)
#ifdef __AVX512F__
        CHANNELS(8) CHANNELS(12) CHANNELS(16)
#endif
        }
    }
}

/* --- How an operation is cut --- */

static int units_of(int channels) { return round_up(channels, UNIT) / UNIT; }

/* Rows that begin at equal addresses modulo 4096 would share sets of the cache L1: they begin 17 lines further on. */
static size_t row_units(int width, int tiles)
{
    size_t lines = ((size_t)STREAMS * width * tiles / UNIT + 15) / 16;
    return (lines + (49 - lines % 32) % 32) * 16;
}

/* Costs of pieces.h, about: a load of filters, and one of the sums of a filter gradient, takes as
   long as products of so many tiles or units; so do these sums, cleared and added up. */
enum { PRODUCTS_COST = 8, LOAD_TILES = 3, LOAD_UNITS = 3, SUMS_UNITS = 30 };

/* What the threads of an operation share, and how it is cut. */
struct job {
    const struct operation *op;
    struct input input, gradient; /* of the output, for a filter gradient */
    enum map_sums sums;
    struct cut cut;
    int inputs, outputs;      /* channels */
    int width, output_width;  /* the same, rounded up to whole groups */
    int ring_width, gradient_width; /* of the largest piece; for outputs one group */
    int tiles, step;          /* of a row; a row is padded to whole steps */
    int most;                 /* tiles of one call of `multiply` */
    int y_rows;               /* of a tile along y, without its borders */
    size_t row, gradient_row; /* units from one row to the next */
    size_t ring, line, output_line, row_sums, bytes; /* of a thread's memory: units of all rows; floats; all in bytes */
    size_t weight_bytes, thread_totals, thread_copies, thread_sums; /* sizes of what is below, of copies in bytes; or 0 */
    size_t passing;           /* the bytes of all that */
    unit *weights;            /* [16 outputs][stream][tap][unit][16] */
    double *totals;           /* of every position: [batch][2][output_width] */
    char *copies;             /* of every piece, in place */
    /* Of every position: [tap][stream][group][16 outputs][16 channels][16]. */
    float *filter_sums;
    int failed;
};

/* How an operation on rows of so many tiles is cut. In place outputs are not: a piece would
   overwrite what the others read. */
static struct cut cut_for(const struct operation *op, const struct job *j)
{
    int units = j->tiles / UNIT, blocks = j->output_width / GROUP;
    struct work work = {
        .planes = (long)op->batch * op->x,
        .rows = op->y,
        .inputs = 1,
        .outputs = blocks,
        .unit = op->map == op->maps[0] ? blocks : 1,
        .border = 1,
        .products = PRODUCTS_COST,
        .together = 1,
        .load = PRODUCTS_COST * LOAD_TILES / j->tiles,
    };
    while (work.together < 8 && 2 * work.together * j->tiles <= j->most)
        work.together *= 2;
    if (op->kind == FILTER_GRADIENT) {
        work.inputs = j->width / GROUP;
        work.unit = 1;
        work.together = 0;
        work.load = PRODUCTS_COST * LOAD_UNITS / units;
        work.form_outputs = 1;
        work.sums = PRODUCTS_COST * SUMS_UNITS / units;
    }
    return cut_of(&work, op->threads);
}

/* A thread keeps `bytes`, the most of all operations so far: a ring of rows, two lines, and sums of the streams of a row, or of
   as many as are multiplied at once: at most 64 tiles. What else an operation takes passes on.
   memory_estimator/step/scratch.py has all as a formula. */
static struct job job_of(const struct operation *op)
{
    int gradient = op->kind == FILTER_GRADIENT, tiles = (op->z + TILE - 1) / TILE;
    struct job j = {.op = op, .inputs = op->channels[0] + op->channels[1], .outputs = op->outputs};
    j.input = all_of((struct input){.channels = {op->channels[0], op->channels[1]},
                                    .maps = {op->maps[0], op->maps[1]},
                                    .coefficients = op->coefficients});
    j.gradient = all_of((struct input){.channels = {op->outputs},
                                       .maps = {op->others[0]},
                                       .raw = op->others[1],
                                       .coefficients = op->other_coefficients});
    if (op->kind == INPUT_GRADIENT)
        j.input.raw = op->others[1];
    j.sums = sums_of(op);

    j.step = tiles < 8 ? UNIT : 2, j.most = MOST_SUMS; /* the sizes for which there is a `multiply` */
    j.tiles = round_up(tiles, j.step);
    j.width = round_up(j.inputs, GROUP), j.output_width = round_up(j.outputs, GROUP);
    j.cut = cut_for(op, &j);
    j.ring_width = gradient ? j.cut.inputs * GROUP : j.width;
    j.gradient_width = gradient ? j.cut.outputs * GROUP : GROUP;
    j.row = row_units(j.ring_width, j.tiles);
    j.gradient_row = gradient ? row_units(j.gradient_width, j.tiles) : 0;

    long cache = sysconf(_SC_LEVEL2_CACHE_SIZE);
    long rows = (cache > 0 ? cache : 1 << 20) * 5 / 8 / (long)(sizeof(unit) * (3 * j.row + j.gradient_row));
    int most = rows - 2 < 1 ? 1 : (int)rows - 2;
    j.y_rows = (int)parts_of(j.cut.rows, parts_of(j.cut.rows, most)); /* tiles of equal height */
    j.ring = (3 * (j.y_rows + 2) + 1) * j.row + j.y_rows * j.gradient_row;
    j.line = (size_t)(j.tiles * TILE + 2) * j.ring_width;
    j.output_line = (size_t)(j.tiles * TILE + 2) * j.gradient_width;
    j.row_sums = (size_t)STREAMS * 16 * (j.tiles > 64 ? j.tiles : 64);
    j.bytes = j.ring * sizeof(unit) + (j.line + j.output_line + j.row_sums) * sizeof(float) + 2 * j.y_rows * sizeof(void *);
    if (gradient) {
        j.thread_sums = (size_t)9 * STREAMS * j.width * j.output_width;
    } else {
        j.weight_bytes = sizeof(unit) * j.output_width * STREAMS * 9 * units_of(j.inputs);
        j.thread_totals = (size_t)op->batch * 2 * j.output_width + 16; /* a line between threads */
        j.thread_copies = copies_bytes(op, &j.cut);
    }
    size_t totals = sizeof(double) * j.thread_totals, sums = sizeof(float) * j.thread_sums;
    j.passing = j.weight_bytes + j.cut.positions * (totals + sums);
    j.passing += j.cut.pieces * j.thread_copies;
    return j;
}

/* A thread's memory, and where it is in its ring of rows. */
struct thread {
    const struct job *job;
    struct piece piece;
    struct input input, gradient; /* what rows are formed of: for filters the piece's channels */
    int width, gradient_width;    /* of these rows, in whole groups */
    unit *rows, *zero_row, *gradient_rows;
    float *line, *output_line; /* a row in float32: formed, with a border of zeros; and of the output or its gradient */
    float *sums;
    const unit **pointers;
    struct copies copies; /* in place */
    double *totals;
    float *filter_sums;
};

/* Where the sums of a tap's stream and a group of inputs begin, of the piece's outputs. */
static float *panel_of(const struct thread *t, int stream, int group)
{
    size_t groups = t->job->width / GROUP, blocks = t->job->output_width / GROUP;
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

static int open_thread(struct thread *t, const struct job *j, int number)
{
    char *memory = thread_memory(number, j->bytes);
    if (!memory)
        return -1;
    *t = (struct thread){.job = j, .piece = piece_of(&j->cut, number), .rows = (unit *)memory};
    t->input = j->input;
    t->gradient = j->gradient;
    t->width = j->ring_width;
    t->zero_row = t->rows + 3 * (j->y_rows + 2) * j->row;
    t->gradient_rows = t->zero_row + j->row;
    t->line = (float *)(t->rows + j->ring);
    t->output_line = t->line + j->line;
    t->sums = t->output_line + j->output_line;
    t->pointers = (const unit **)(t->sums + j->row_sums);
    memset(t->zero_row, 0, j->row * sizeof(unit));
    memset(t->line, 0, (j->line + j->output_line) * sizeof(float)); /* the borders stay 0 */
    t->copies = copies_of(j->op, &j->cut, number, j->copies + number * j->thread_copies);
    t->totals = j->totals + t->piece.position * j->thread_totals;
    t->filter_sums = j->filter_sums + t->piece.position * j->thread_sums;
    if (j->op->kind == FILTER_GRADIENT) {
        const struct piece *piece = &t->piece;
        t->input = blocks_of(&j->input, piece->input, piece->past_input);
        t->gradient = blocks_of(&j->gradient, piece->output, piece->past_output);
        t->width = (piece->past_input - piece->input) * GROUP;
        t->gradient_width = (piece->past_output - piece->output) * GROUP;
        clear_filter_sums(t);
    } else {
        clear_totals(j->op, t->totals, j->output_width, &t->piece);
    }
    return 0;
}

/* Where row (x, y) of the ring is; a row outside the map is zero. */
static unit *ring_row(const struct thread *t, int x, int y, int y0)
{
    if (x < 0 || x >= t->job->op->x || y < 0 || y >= t->job->op->y)
        return t->zero_row;
    return t->rows + ((size_t)((x + 1) % 3) * (t->job->y_rows + 2) + (y - y0 + 1)) * t->job->row;
}

ALWAYS_INLINE void fill_row(struct thread *t, unit *row, const struct input *in, int width, int batch, int x, int y, int purpose)
{
    const struct job *j = t->job;
    float *line = (purpose == GRADIENT_TILES_SUMMED ? t->output_line : t->line) + width;
    form_row(line, width, in, batch, voxel_of(t->job->op, 1, batch, x, y), t->job->op->z, t->job->op->dtype);
    store_row(row, line, width, j->tiles, purpose);
}

/* The same in place. */
static void fill_row_in_place(struct thread *t, unit *row, const struct part *part, int x, int y)
{
    struct input in = t->input;
    in.maps[0] = map_in_place(&t->copies, part, x, y);
    fill_row(t, row, &in, t->width, part->batch, x, y, CHANNELS_SUMMED);
    keep_last_row(&t->copies, part, x, y);
}

/* --- Convolution and input gradient --- */

/* Makes outputs of the streams' totals, of channels c .. c + n of a row: rounds, writes and sums them. */
ALWAYS_INLINE void finish_channels(struct thread *t, const float *sums, int c, int batch, size_t voxel, int n, int dtype)
{
    const struct operation *op = t->job->op;
    int z = op->z, kind = t->job->sums, width = t->job->output_width, norm = batch * COEFFICIENTS * op->outputs;
    float *line = t->output_line; /* the row as it was written, for the second pass */
    vec of_row[2] = {{0}}, below[COEFFICIENTS];
    load_norm(below, kind == NORM_SUMS ? op->other_coefficients + norm : NULL, op->outputs, c, n);
    for (int tile = 0; tile * TILE < z; tile++, sums += 16) {
        vec streams[STREAMS], outputs[TILE], tile_sum = {0};
        for (int k = 0; k < STREAMS; k++)
            streams[k] = load(sums + (size_t)k * t->job->tiles * 16);
        outputs_of(streams, outputs);
        for (int j = 0; j < TILE && tile * TILE + j < z; j++) {
            size_t at = (voxel + tile * TILE + j) * op->outputs + c;
            prefetch(op->map, at, dtype, 1);
            vec value = op->kind == CONVOLVE && op->others[0] ? outputs[j] + load_values(op->others[0], at, n, dtype) : outputs[j];
            value = store_values(op->map, at, value, n, dtype);
            if (kind == NORM_SUMS)
                add_norm_sums(of_row, below, load_values(op->others[0], at, n, dtype), value);
            else
                tile_sum += value;
            store(line + (tile * TILE + j) * LANES, value);
        }
        of_row[0] += tile_sum;
    }
    double *totals = t->totals + (size_t)batch * 2 * width + c;
    if (kind == MOMENTS) {
        vec mean = of_row[0] / (float)z, more = {0};
        store(line + z * LANES, mean); /* pairs are whole */
        for (int i = 0; i < z; i += 2) {
            vec a = load(line + i * LANES) - mean, b = load(line + (i + 1) * LANES) - mean;
            of_row[1] += a * a, more += b * b;
        }
        of_row[1] += more;
        for (int i = 0; i < LANES; i++) {
            totals[i] += (double)z * mean[i];
            totals[width + i] += of_row[1][i] + (double)z * mean[i] * mean[i];
        }
    } else if (kind == NORM_SUMS) {
        add_row(totals, width, of_row);
    }
}

static void finish(struct thread *t, const float *row_sums, int block, int batch, size_t voxel)
{
    for (int v = 0; v < VECS; v++) {
        int c = block * 16 + v * LANES, n = t->job->outputs - c;
        if (n >= LANES && t->job->op->dtype == FLOAT32)
            finish_channels(t, row_sums + v * LANES, c, batch, voxel, LANES, FLOAT32);
        else if (n >= LANES)
            finish_channels(t, row_sums + v * LANES, c, batch, voxel, LANES, BFLOAT16);
        else if (n > 0)
            finish_channels(t, row_sums + v * LANES, c, batch, voxel, n, t->job->op->dtype);
    }
}

/* Where rows are short several neighbours are multiplied at once: they share the weights, and keep more sums in flight. */
static void convolve_plane(struct thread *t, int batch, int x, int y0, int y1)
{
    const struct job *j = t->job;
    int units = units_of(j->inputs), chunks = (j->tiles + j->most - 1) / j->most;
    size_t next_group = (size_t)j->tiles * GROUP_UNITS, stream = next_group * (j->width / GROUP);
    size_t next_sums = (size_t)STREAMS * j->tiles * 16;
    const unit *first_weights = j->weights + (size_t)t->piece.output * STREAMS * 9 * units * 16;
    for (int r, y = y0; y < y1; y += r) {
        const unit *weights = first_weights, *around[9 * 8], *rows[9 * 8];
        r = 8;
        while (r > 1 && (r > y1 - y || r * j->tiles > j->most))
            r /= 2;
        for (int i = 0; i < 9 * r; i++)
            around[i] = ring_row(t, x + i / r / 3 - 1, y + i % r + i / r % 3 - 1, y0);
        for (int block = t->piece.output; block < t->piece.past_output; block++) {
            for (int k = 0; k < STREAMS; k++, weights += 9 * units * 16)
                for (int done = 0, i = 0; i < chunks; i++) {
                    int n = round_up((j->tiles - done + chunks - i - 1) / (chunks - i), j->step);
                    for (int row = 0; row < 9 * r; row++)
                        rows[row] = around[row] + k * stream + (size_t)done * GROUP_UNITS;
                    float *sums = t->sums + ((size_t)k * j->tiles + done) * 16;
                    multiply(r, n, sums, next_sums, rows, weights, units, next_group);
                    done += n;
                }
            for (int row = 0; row < r; row++)
                finish(t, t->sums + row * next_sums, block, batch, voxel_of(t->job->op, 1, batch, x, y + row));
        }
    }
}

static void copy_for_piece(void *argument, int thread, int threads)
{
    const struct job *j = argument;
    struct copies copies = copies_of(j->op, &j->cut, thread, j->copies + thread * j->thread_copies);
    copy_beside(&copies);
}

/* The streams of a unit's three filters along z, for a tap and all outputs of a block at once; outputs
   and inputs that are not there are 0. */
static void pack_unit(const struct job *j, int block, int tap, int u)
{
    int inputs = j->inputs, outputs = j->outputs, units = units_of(inputs);
    int n = least(outputs - block * 16, 16);
    float taps[2][3][16] = {{{0}}};
    for (int i = u * UNIT; i < least(inputs, (u + 1) * UNIT); i++)
        for (int z = 0; z < 3; z++) {
            long position = tap * 3 + z, next = 1;
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
    long units = units_of(j->inputs), blocks = j->output_width / 16, all = 9 * units * blocks;
    for (long at = share(all, thread, threads); at < share(all, thread + 1, threads); at++)
        if (j->op->kind == INPUT_GRADIENT)
            pack_unit(j, at / units / 9, at / units % 9, at % units);
        else
            pack_unit(j, at % blocks, at / blocks / units, at / blocks % units);
}

/* --- Filter gradient --- */

static void correlate_plane(struct thread *t, int batch, int x, int y0, int y1)
{
    const struct job *j = t->job;
    const struct piece *piece = &t->piece;
    int groups = t->width / GROUP, blocks = t->gradient_width / GROUP, units = j->tiles / UNIT;
    const unit **values = t->pointers, **gradients = t->pointers + j->y_rows;
    size_t group_units = (size_t)units * GROUP;
    for (int y = y0; y < y1; y++)
        fill_row(t, t->gradient_rows + (y - y0) * j->gradient_row, &t->gradient, t->gradient_width,
                 batch, x, y, GRADIENT_TILES_SUMMED);
    for (int tap = 0; tap < 9; tap++) {
        int rows = 0;
        for (int y = y0; y < y1; y++) {
            const unit *row = ring_row(t, x + tap / 3 - 1, y + tap % 3 - 1, y0);
            if (row != t->zero_row)
                values[rows] = row, gradients[rows++] = t->gradient_rows + (y - y0) * j->gradient_row;
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
    int outputs = j->outputs, groups = j->width / GROUP, blocks = j->output_width / GROUP;
    double taps[3][16] = {{0}};
    for (int k = 0; k < STREAMS; k++) {
        size_t panel = ((size_t)(tap * STREAMS + k) * groups + input / GROUP) * blocks + block;
        const float *from = j->filter_sums + (panel * GROUP + input % GROUP) * 16;
        double sum[16] = {0};
        for (int each = 0; each < j->cut.positions; each++, from += j->thread_sums)
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
    long inputs = j->inputs, blocks = j->output_width / GROUP, all = 9 * inputs * blocks;
    for (long at = share(all, thread, threads); at < share(all, thread + 1, threads); at++)
        write_taps(j, at / blocks / inputs, at / blocks % inputs, at % blocks);
}

/* --- An operation --- */

/* Forms the rows of a thread's piece plane by plane, tile by tile along y, each plane's after those
   of the one before; and takes each plane once the two beside it are formed. */
static void operation_thread(void *argument, int thread, int threads)
{
    struct job *j = argument;
    const struct operation *op = j->op;
    int filters = op->kind == FILTER_GRADIENT;
    struct thread t;
    if (open_thread(&t, j, thread)) {
        j->failed = 1;
        return;
    }
    struct part part;
    for (long at = t.piece.plane; at < t.piece.past_plane; at += part.x1 - part.x0) {
        planes_from(&part, op, at, t.piece.past_plane);
        for (part.y0 = t.piece.y0; part.y0 < t.piece.y1; part.y0 = part.y1) {
            part.y1 = least(part.y0 + j->y_rows, t.piece.y1);
            for (int x = part.x0 - 1; x <= part.x1; x++) {
                for (int y = part.y0 - 1; y <= part.y1; y++) {
                    unit *row = ring_row(&t, x, y, part.y0);
                    if (row != t.zero_row && j->thread_copies)
                        fill_row_in_place(&t, row, &part, x, y);
                    else if (row != t.zero_row && filters)
                        fill_row(&t, row, &t.input, t.width, part.batch, x, y, TILES_SUMMED);
                    else if (row != t.zero_row)
                        fill_row(&t, row, &t.input, t.width, part.batch, x, y, CHANNELS_SUMMED);
                }
                if (x > part.x0 && filters)
                    correlate_plane(&t, part.batch, x - 1, part.y0, part.y1);
                else if (x > part.x0)
                    convolve_plane(&t, part.batch, x - 1, part.y0, part.y1);
            }
        }
    }
}

int PASSES(const struct operation *), LOSS(const struct operation *); /* build.py defines the names */
#ifndef BFLOAT16_ROWS
int MAKE_ORTHOGONAL(const struct operation *);
#endif

static int convolve(const struct operation *op)
{
    struct job j = job_of(op);
    if (asks_for_scratch(op, j.cut.pieces, j.bytes, j.passing))
        return 0;
    char *memory = passing_memory(j.passing);
    if (!memory)
        return -1;
    j.weights = (unit *)memory;
    j.totals = (double *)(memory + j.weight_bytes);
    j.copies = (char *)(j.totals + j.cut.positions * j.thread_totals);
    j.filter_sums = (float *)(j.copies + j.cut.pieces * j.thread_copies);
    if (j.weight_bytes)
        run_on_threads(op->threads, pack_weights, &j);
    if (j.thread_copies)
        run_on_threads(j.cut.pieces, copy_for_piece, &j);
    run_on_threads(j.cut.pieces, operation_thread, &j);
    if (j.failed)
        return -1;
    if (j.thread_sums)
        run_on_threads(op->threads, write_filter_gradient, &j);
    else if (op->sums_to)
        write_sums(op, j.sums, j.totals, j.thread_totals, j.outputs, j.output_width,
                   j.cut.positions);
    return 0;
}

static int run(const struct operation *op)
{
    begin_operation();
    int failed;
#ifndef BFLOAT16_ROWS
    if (op->kind == ORTHOGONAL)
        failed = MAKE_ORTHOGONAL(op);
    else
#endif
    if (op->kind >= LOSS_SUMS)
        failed = LOSS(op);
    else if (op->kind >= MAX_POOL)
        failed = PASSES(op);
    else
        failed = convolve(op);
    end_operation();
    return failed;
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
