/* 3x3x3 convolutions of bfloat16 maps in AMX's tiles, and their input gradients: no transform, up to 32 values of K a product.
   docs/kernels.md draws the tiles; what is drawn there has the same names here.

   A thread goes through a slab as in operations.c: it forms the rows of the next plane into a ring in the cache L2, as bfloat16
   values with a voxel of zeros at each end, then multiplies and finishes the plane before. */
#include <unistd.h>
#include "direct.h"

enum { TILE_LINES = 16 };
enum { STREAMED_BYTES = 4 << 20 }; /* maps above it are written past the caches */

/* What the threads of an operation share, and how it is cut. */
struct job {
    const struct operation *op;
    struct input input;
    enum map_sums sums;
    int slabs;
    int inputs, outputs;         /* channels */
    int width;                   /* values of a voxel in a row of the ring: 4, 8 or whole 16 */
    int output_width, blocks;    /* outputs in whole blocks of 16; blocks */
    int voxels;                  /* that a line of a tile A makes: a pair where channels are few, else one */
    int steps, depth;            /* products along K for each tap (x, y); pairs of values of K in each */
    int tiles, lines;            /* of a row: tiles A along z, and lines in each */
    int passes, columns;         /* tiles B of a tap and step, up to two at a time: passes, and columns of the first one */
    int y_rows;                  /* of a part along y, without its borders */
    size_t row_bytes;            /* from a row of the ring to the next */
    size_t tap_bytes, block_bytes; /* of packed filters: of a tap (x, y), and of all taps of 16 outputs */
    size_t weight_bytes, thread_totals, thread_copies; /* totals are float64 numbers */
    size_t kept, passing;
    char *weights, *copies;
    double *totals; /* of every slab: [batch][2][output_width] */
    int failed;
};

/* memory_estimator/step/scratch.py has the bytes as a formula. */
static struct job job_of(const struct operation *op)
{
    struct job j = {.op = op, .inputs = op->channels[0] + op->channels[1], .outputs = op->outputs};
    j.input = (struct input){{op->channels[0], op->channels[1]}, {op->maps[0], op->maps[1]}, .coefficients = op->coefficients};
    if (op->kind == INPUT_GRADIENT)
        j.input.raw = op->others[1];
    j.sums = sums_of(op);
    j.slabs = slabs_of(op);
    j.output_width = round_up(j.outputs, 16);
    j.blocks = j.output_width / 16;

    j.width = width_of(j.inputs);
    j.voxels = j.width <= 16 ? 2 : 1;
    int terms = (j.voxels + 2) * j.width; /* values of K: of the voxels of a line and one on each side */
    j.depth = least(16, terms / 2);
    j.steps = parts_of(terms, 2 * j.depth);
    j.tap_bytes = (size_t)j.steps * j.depth * 64;
    j.block_bytes = 9 * j.tap_bytes + (j.voxels - 1) * j.width * 32;
    j.passes = j.voxels == 2 ? j.blocks : parts_of(j.blocks, 2);
    j.columns = j.voxels == 2 || j.blocks > 1 ? 2 : 1;

    int lines = parts_of(op->z, j.voxels);
    j.tiles = parts_of(lines, TILE_LINES);
    j.lines = parts_of(lines, j.tiles);
    /* Up to the last value that a tile reads, in an uneven number of cache lines: rows spread over the cache. */
    size_t values = (size_t)(j.tiles * j.lines - 1) * j.voxels * j.width + (size_t)j.steps * j.depth * 2;
    j.row_bytes = ((2 * values + 63) / 64 | 1) * 64;

    long cache = sysconf(_SC_LEVEL2_CACHE_SIZE);
    long rows = (cache > 0 ? cache : 1 << 20) * 2 / 5 / (long)(3 * j.row_bytes) - 2;
    int most = rows < 4 ? 4 : (int)least(rows, op->y);
    j.y_rows = round_up(parts_of(op->y, parts_of(op->y, most)), 4 / j.columns);
    j.y_rows = least(j.y_rows, op->y);
    j.kept = sizeof(float) * 4 * TILE_FLOATS + 3 * (j.y_rows + 2) * j.row_bytes;

    j.weight_bytes = j.blocks * j.block_bytes;
    j.thread_totals = (size_t)op->batch * 2 * j.output_width + 16; /* a line between threads */
    j.thread_copies = copies_bytes(op, j.slabs);
    j.passing = j.weight_bytes + j.slabs * (sizeof(double) * j.thread_totals + j.thread_copies);
    return j;
}

struct thread {
    const struct job *job;
    struct part part;
    float *sums; /* of up to four tiles */
    char *ring;  /* three planes of y_rows + 2 rows */
    char *copies;
    double *totals;
};

/* Row (x, y) in the ring. */
static char *ring_row(const struct thread *t, int x, int y)
{
    size_t row = (size_t)((x + 1) % 3) * (t->job->y_rows + 2) + (y - t->part.y0 + 1);
    return t->ring + row * t->job->row_bytes;
}

/* Forms row (x, y), after a voxel of zeros; outside the map all of it is zero. */
static void form_ring_row(struct thread *t, int x, int y)
{
    const struct job *j = t->job;
    const struct operation *op = j->op;
    struct input in = j->input;
    char *row = ring_row(t, x, y);
    if (x < 0 || x >= op->x || y < 0 || y >= op->y) {
        memset(row, 0, j->row_bytes);
        return;
    }
    if (j->thread_copies)
        in.maps[0] = map_in_place(op, t->copies, &t->part, x, y);
    form_bfloat16_row((uint16_t *)row + j->width, j->width, &in, t->part.batch, voxel_of(op, 1, t->part.batch, x, y), op->z);
    if (j->thread_copies)
        keep_last_row(op, t->copies, &t->part, x, y);
}

/* --- Products --- */

/* A column of tiles B: 16 outputs, and of a pair of voxels those of the first or of the second. */
struct column { int block, voxel; };

/* Returns the number of columns of a pass. Of pairs, two blocks of one voxel where blocks are even: their outputs are side by
   side in memory. */
static int columns_of(struct column *columns, const struct job *j, int pass)
{
    if (j->voxels == 2 && j->blocks % 2) {
        columns[0] = (struct column){pass, 0};
        columns[1] = (struct column){pass, 1};
        return 2;
    }
    int voxel = j->voxels == 2 ? pass % 2 : 0, block = j->voxels == 2 ? pass / 2 * 2 : 2 * pass;
    columns[0] = (struct column){block, voxel};
    columns[1] = (struct column){block + 1, voxel};
    return least(2, j->blocks - block);
}

/* The tiles B of a column. The weights of a tap begin and end with zeros of a voxel: the first voxel of a pair skips those. */
static const char *weights_of(const struct job *j, struct column column)
{
    size_t zeros = j->voxels == 2 && column.voxel == 0 ? (size_t)j->width * 32 : 0;
    return j->weights + column.block * j->block_bytes + zeros;
}

/* The sums of `rows` neighbouring rows x `columns`: of each tap (x, y), tiles A from `first[tap]` on times the tiles B. */
ALWAYS_INLINE void multiply_as(const struct job *j, int rows, int columns, float *sums, const char *const *first,
                               const char *const *weights)
{
    size_t line_bytes = (size_t)j->voxels * j->width * 2, step_bytes = (size_t)j->depth * 64, weight = 0;
#pragma GCC unroll 4
    for (int i = 0; i < rows * columns; i++)
        tile_zero(i);
    for (int tap = 0; tap < 9; tap++)
        for (int step = 0; step < j->steps; step++, weight += step_bytes) {
            const char *values = first[tap] + 64 * step;
#pragma GCC unroll 2
            for (int column = 0; column < columns; column++)
                tile_load(6 + column, weights[column] + weight, 64);
#pragma GCC unroll 4
            for (int row = 0; row < rows; row++) {
                tile_load(4 + row % 2, values + row * j->row_bytes, line_bytes);
#pragma GCC unroll 2
                for (int column = 0; column < columns; column++)
                    tile_multiply_add(row * columns + column, 4 + row % 2, 6 + column);
            }
        }
#pragma GCC unroll 4
    for (int i = 0; i < rows * columns; i++)
        tile_store(i, sums + i * TILE_FLOATS, 64);
}

static void multiply(const struct job *j, int rows, int columns, float *sums, const char *const *first, const char *const *weights)
{
    switch (10 * rows + columns) {
#define BLOCK(rows, columns) case 10 * rows + columns: multiply_as(j, rows, columns, sums, first, weights); break;
    BLOCK(1, 1) BLOCK(2, 1) BLOCK(3, 1) BLOCK(4, 1) BLOCK(1, 2) BLOCK(2, 2)
    }
}

/* --- Finishing: sums become values of the map --- */

/* The sums of a row's tiles as lines of two times up to 16 outputs: side by side in the map, where they can be. */
struct lines {
    const float *sums[2]; /* of the first line */
    int next_sums;        /* to those of the next line */
    int count[2];         /* lines of which the first, or the second, are of a voxel of the map */
    size_t at[2], next;   /* elements of the map; to those of the next line */
};

/* What is finished at once: up to four rows. */
struct finished {
    int rows;
    struct lines lines[4];
    int channel[2], wide[2]; /* first output, and outputs, up to 16 */
};

static int lanes_of(int wide, int v)
{
    int lanes = wide - v * LANES;
    return lanes < 0 ? 0 : least(lanes, LANES);
}

static struct lines lines_of(const struct job *j, const struct part *part, const struct column *columns, int count,
                             const float *sums, int x, int y, int tile)
{
    const struct operation *op = j->op;
    int z0 = tile * j->lines * j->voxels;
    size_t voxel = voxel_of(op, 1, part->batch, x, y) + z0;
    struct lines made = {.next_sums = 16, .next = (size_t)j->voxels * op->outputs};
    if (count == 1) { /* two lines of the tile */
        made.next_sums = 32;
        made.next = 2 * (size_t)op->outputs;
    }
    for (int i = 0; i < 2; i++) {
        int beside = count == 1 ? i : columns[i].voxel, block = columns[count == 1 ? 0 : i].block;
        int left = least(op->z - z0, j->lines * j->voxels) - beside;
        made.sums[i] = sums + i * (count == 1 ? 16 : TILE_FLOATS);
        made.count[i] = left < 1 ? 0 : parts_of(left, count == 1 ? 2 : j->voxels);
        made.at[i] = (voxel + beside) * op->outputs + block * 16;
    }
    return made;
}

/* Two vectors of 16 outputs to 32 elements side by side; they become what was written. */
ALWAYS_INLINE void store_line(void *map, size_t at, vec (*value)[VECS], int is_streamed)
{
#ifdef __AVX512BF16__
    __m512i pair = (__m512i)_mm512_cvtne2ps_pbh((__m512)value[1][0], (__m512)value[0][0]);
    if (is_streamed)
        _mm512_stream_si512((void *)((uint16_t *)map + at), pair);
    else
        _mm512_storeu_si512((uint16_t *)map + at, pair);
    value[0][0] = from_bfloat16((halves)_mm512_castsi512_si256(pair));
    value[1][0] = from_bfloat16((halves)_mm512_extracti64x4_epi64(pair, 1));
#else
    for (int v = 0; v < 2 * VECS; v++)
        value[v / VECS][v % VECS] = store_values(map, at + v * LANES, value[v / VECS][v % VECS], LANES, BFLOAT16);
#endif
}

/* Rounds, writes and sums. Moments are of the differences from the first value, in float32, and in float64 over all calls. */
ALWAYS_INLINE void finish_as(const struct thread *t, const struct finished *f, int kind, int adds, int is_whole)
{
    const struct operation *op = t->job->op;
    int batch = t->part.batch, width = t->job->output_width, counted[2] = {0, 0};
    size_t ahead = (size_t)f->rows * op->z * op->outputs; /* the same voxels of the rows that are finished next */
    size_t map_bytes = (size_t)op->batch * op->x * op->y * op->z * op->outputs * 2;
    vec below[2][VECS][COEFFICIENTS], of_lines[2][VECS][2] = {{{{0}}}}, pivot[2][VECS] = {{{0}}};
    for (int i = 0; i < 2 * VECS; i++) {
        int half = i / VECS, v = i % VECS;
        const float *norm = kind == NORM_SUMS ? op->other_coefficients + (size_t)batch * COEFFICIENTS * op->outputs : NULL;
        load_norm(below[half][v], norm, op->outputs, f->channel[half] + v * LANES, lanes_of(f->wide[half], v));
    }
    for (int row = 0; row < f->rows; row++) {
        const struct lines *l = &f->lines[row];
        int is_streamed = map_bytes > STREAMED_BYTES && ((uintptr_t)op->map + 2 * l->at[0]) % 64 == 0 && l->next % 32 == 0;
        for (int i = 0; i < l->count[0]; i++) {
            vec value[2][VECS], other[2][VECS] = {{{0}}};
            int halves_here = i < l->count[1] ? 2 : 1;
            for (int half = 0; half < halves_here; half++)
                for (int v = 0; v < VECS; v++) {
                    size_t at = l->at[half] + i * l->next + v * LANES;
                    int n = is_whole ? LANES : lanes_of(f->wide[half], v);
                    value[half][v] = load(l->sums[half] + i * l->next_sums + v * LANES);
                    if (adds || kind == NORM_SUMS) {
                        __builtin_prefetch((const uint16_t *)op->others[0] + at + ahead);
                        other[half][v] = load_values(op->others[0], at, n, BFLOAT16);
                    }
                    if (adds)
                        value[half][v] += other[half][v];
                    if (!is_whole || halves_here == 1)
                        value[half][v] = store_values(op->map, at, value[half][v], n, BFLOAT16);
                }
            if (is_whole && halves_here == 2)
                store_line(op->map, l->at[0] + i * l->next, value, is_streamed);
            for (int half = 0; half < halves_here; half++) {
                for (int v = 0; v < VECS; v++) {
                    vec *sums = of_lines[half][v];
                    if (kind == NORM_SUMS)
                        add_norm_sums(sums, below[half][v], other[half][v], value[half][v]);
                    if (kind != MOMENTS)
                        continue;
                    if (!counted[half])
                        pivot[half][v] = value[half][v];
                    vec beyond = value[half][v] - pivot[half][v];
                    sums[0] += beyond;
                    sums[1] += beyond * beyond;
                }
                counted[half]++;
            }
        }
    }
    for (int i = 0; i < 2 * VECS && kind != NO_SUMS; i++) {
        int half = i / VECS, v = i % VECS;
        double *totals = t->totals + (size_t)batch * 2 * width + f->channel[half] + v * LANES, n = counted[half];
        const vec *sums = of_lines[half][v];
        if (kind == NORM_SUMS)
            add_row(totals, width, sums);
        for (int lane = 0; lane < LANES && kind == MOMENTS; lane++) {
            double from = pivot[half][v][lane], first = sums[0][lane], second = sums[1][lane];
            totals[lane] += n * from + first;
            totals[width + lane] += second + from * (2 * first + n * from);
        }
    }
}

static void finish(const struct thread *t, const struct finished *f)
{
    int adds = t->job->op->kind == CONVOLVE && t->job->op->others[0];
    int is_whole = f->wide[0] == 16 && f->wide[1] == 16 && f->lines[0].at[1] - f->lines[0].at[0] == 16;
    switch (t->job->sums * 4 + adds * 2 + is_whole) {
#define FINISH(kind, adds, whole) case kind * 4 + adds * 2 + whole: finish_as(t, f, kind, adds, whole); break;
    FINISH(NO_SUMS, 0, 0) FINISH(NO_SUMS, 0, 1) FINISH(NO_SUMS, 1, 0) FINISH(NO_SUMS, 1, 1)
    FINISH(MOMENTS, 0, 0) FINISH(MOMENTS, 0, 1) FINISH(MOMENTS, 1, 0) FINISH(MOMENTS, 1, 1)
    FINISH(NORM_SUMS, 0, 0) FINISH(NORM_SUMS, 0, 1)
    }
}

/* --- An operation --- */

/* Rows are innermost: two neighbours share two thirds of what they read, which is still in the cache L1. */
static void convolve_plane(struct thread *t, int x)
{
    const struct job *j = t->job;
    const struct part *part = &t->part;
    size_t tile_bytes = (size_t)j->lines * j->voxels * j->width * 2;
    for (int pass = 0; pass < j->passes; pass++) {
        struct column columns[2];
        int count = columns_of(columns, j, pass), last = count - 1;
        const char *weights[2] = {weights_of(j, columns[0]), weights_of(j, columns[last])};
        struct finished f = {.channel = {16 * columns[0].block, 16 * columns[last].block}};
        for (int i = 0; i < 2; i++)
            f.wide[i] = least(16, j->outputs - f.channel[i]);
        for (int tile = 0; tile < j->tiles; tile++)
            for (int y = part->y0; y < part->y1; y += f.rows) {
                const char *first[9];
                f.rows = least(4 / count, part->y1 - y);
                for (int tap = 0; tap < 9; tap++)
                    first[tap] = ring_row(t, x + tap / 3 - 1, y + tap % 3 - 1) + tile * tile_bytes;
                multiply(j, f.rows, count, t->sums, first, weights);
                for (int row = 0; row < f.rows; row++) {
                    const float *sums = t->sums + row * count * TILE_FLOATS;
                    f.lines[row] = lines_of(j, part, columns, count, sums, x, y + row, tile);
                }
                finish(t, &f);
            }
    }
}

static void convolve_slab(void *argument, int thread, int threads)
{
    struct job *j = argument;
    const struct operation *op = j->op;
    char *memory = thread_memory(thread, j->kept);
    if (!memory) {
        j->failed = 1;
        return;
    }
    struct thread t = {.job = j, .sums = (float *)memory, .ring = memory + sizeof(float) * 4 * TILE_FLOATS};
    t.copies = j->copies + thread * j->thread_copies;
    t.totals = j->totals + thread * j->thread_totals;
    memset(t.totals, 0, j->thread_totals * sizeof(double));
    memset(t.ring, 0, 3 * (j->y_rows + 2) * j->row_bytes); /* what follows a row's voxels stays 0 */
    tile_config(j->lines, j->depth);
    struct part *part = &t.part;
    long at = share(op, thread, threads), end = share(op, thread + 1, threads);
    for (; at < end; at += part->x1 - part->x0) {
        planes_from(part, op, at, end);
        for (part->y0 = 0; part->y0 < op->y; part->y0 = part->y1) {
            part->y1 = least(part->y0 + j->y_rows, op->y);
            for (int x = part->x0 - 1; x <= part->x1; x++) {
                for (int y = part->y0 - 1; y <= part->y1; y++)
                    form_ring_row(&t, x, y);
                if (x > part->x0)
                    convolve_plane(&t, x - 1);
            }
        }
    }
    _mm_sfence(); /* after values that were written past the caches */
    tile_release();
}

static void copy_beside(void *argument, int thread, int threads)
{
    const struct job *j = argument;
    copy_planes_beside(j->op, j->copies + thread * j->thread_copies, thread, threads);
}

/* The weight of a position of the filter, an input and 16 outputs from `output` on; those that are not there are 0. */
static void weights_at(float *to, const struct job *j, int position, int input, int output)
{
    int outputs = j->outputs;
    size_t at = ((size_t)position * j->inputs + input) * outputs + output, next = 1;
    if (j->op->kind == INPUT_GRADIENT) { /* flipped, and channels swapped */
        at = ((size_t)(26 - position) * outputs + output) * j->inputs + input;
        next = j->inputs;
    }
    for (int o = 0; o < 16; o++)
        to[o] = input < j->inputs && output + o < outputs ? j->op->filters[at + o * next] : 0;
}

/* [block][tap (x, y)][pair of values of K][16 outputs][2]. Of pairs of voxels, a tap is [zeros of a voxel][three taps along z],
   and zeros end the block. A thread packs every `threads`-th tap of a block. */
static void pack_weights(void *argument, int thread, int threads)
{
    const struct job *j = argument;
    int zeros = j->voxels == 2 ? j->width : 0; /* values of K */
    for (int part = thread; part < 10 * j->blocks; part += threads) {
        int block = part / 10, tap = part % 10;
        char *to = j->weights + block * j->block_bytes + tap * j->tap_bytes;
        int pairs = tap < 9 ? j->steps * j->depth : zeros / 2;
        for (int pair = 0; pair < pairs; pair++, to += 64) {
            float both[2][16] = {{0}};
            for (int i = 0; i < 2; i++) {
                int k = 2 * pair + i - zeros; /* of the three taps along z */
                if (tap < 9 && k >= 0 && k < 3 * j->width)
                    weights_at(both[i], j, 3 * tap + k / j->width, k % j->width, 16 * block);
            }
            for (int o = 0; o < 16; o += LANES)
                store_units((unit *)to + o, load(both[0] + o), load(both[1] + o));
        }
    }
}

static int convolve(const struct operation *op)
{
    struct job j = job_of(op);
    if (op->scratch) {
        op->scratch[KEEPING_THREADS] = j.slabs;
        op->scratch[KEPT_BYTES] = j.kept;
        op->scratch[PASSING_BYTES] = j.passing;
        return 0;
    }
    j.weights = passing_memory(j.passing);
    if (!j.weights)
        return -1;
    j.totals = (double *)(j.weights + j.weight_bytes);
    j.copies = (char *)(j.totals + j.slabs * j.thread_totals);
    run_on_threads(op->threads, pack_weights, &j);
    if (j.thread_copies)
        run_on_threads(j.slabs, copy_beside, &j);
    run_on_threads(j.slabs, convolve_slab, &j);
    if (j.failed)
        return -1;
    if (op->sums_to)
        write_sums(op, j.sums, j.totals, j.thread_totals, j.output_width, j.slabs);
    return 0;
}

/* --- An instruction set with tiles --- */

int DIRECT_FILTERS(const struct operation *); /* build.py defines the names */
int PASSES(const struct operation *);

static int run(const struct operation *op)
{
    int failed;
    begin_operation();
    if (op->kind >= MAX_POOL)
        failed = PASSES(op);
    else if (op->kind == FILTER_GRADIENT)
        failed = DIRECT_FILTERS(op);
    else
        failed = convolve(op);
    end_operation();
    return failed;
}

static void multiply_in_cache(void *repeats, int thread, int threads)
{
    static char values[2 * TILE_BYTES] __attribute__((aligned(64))), weights[2 * 9 * TILE_BYTES] __attribute__((aligned(64)));
    static _Thread_local float sums[4 * TILE_FLOATS] __attribute__((aligned(64)));
    const struct job j = {.width = 32, .voxels = 1, .steps = 1, .depth = 16, .row_bytes = TILE_BYTES};
    const char *first[9] = {values, values, values, values, values, values, values, values, values};
    const char *of_columns[2] = {weights, weights + 9 * TILE_BYTES};
    tile_config(TILE_LINES, j.depth);
    for (long i = 0; i < *(long *)repeats; i++)
        multiply(&j, 2, 2, sums, first, of_columns);
    tile_release();
}

static double products(int threads, long repeats)
{
    begin_operation();
    run_on_threads(threads, multiply_in_cache, &repeats);
    end_operation();
    return 2.0 * repeats * threads * 9 * 4 * TILE_FLOATS * 32;
}

const struct kernels KERNELS = {KERNELS_NAME, run, products};
