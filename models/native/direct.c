/* 3x3x3 convolutions of bfloat16 maps in AMX's tiles, and their input gradients: no transform, up
   to 32 values of K a product.

   A thread goes through a piece as in convolutions.c: it forms rows into a ring in the cache L2, as
   bfloat16 values with a voxel of zeros at each end, then multiplies and finishes a plane. What was
   multiplied before is finished, and the plane after the next one is formed, between products. */
#include "direct.h"

enum { PLANES = 4 }; /* of the ring: three that are multiplied, and the one after them */

/* What the threads of an operation share, and how it is cut. */
struct job {
    const struct operation *op;
    struct input input;
    struct made made; /* without what belongs to a sample */
    struct products products;
    struct cut cut;
    int inputs, outputs;    /* channels */
    int width;              /* values of a voxel in a row: 4, 8 or whole 16 */
    int blocks;             /* of 16 outputs */
    int voxels;             /* that a line makes: a pair where channels are few, else one */
    int tiles, lines;       /* of a row: tiles A along z, and lines in each */
    int columns;            /* of the first pass */
    int y_rows;             /* of a band, without its borders */
    int is_whole;           /* maps of whole 16 channels: rows are formed between products */
    size_t tap_bytes;       /* of packed filters: of a tap (x, y), */
    size_t block_bytes;     /* of 16 outputs, */
    size_t weight_bytes;    /* and of all */
    size_t position_totals; /* float64 numbers */
    size_t kept, passing;
    char *weights;
    double *totals; /* of every position: [batch][2][width of the map that is made] */
};

static struct made made_of(const struct operation *op)
{
    struct made made = {
        .map = op->map,
        .bytes = (size_t)op->batch * op->x * op->y * op->z * op->outputs * 2,
        .channels = op->outputs,
        .width = round_up(op->outputs, 16),
        .sums = sums_of(op),
        .other = op->others[0],
        .adds = op->kind == CONVOLVE && op->others[0],
    };
    return made;
}

/* Two blocks of outputs make a pass, which writes whole lines: they stay together. In place all
   outputs do: a piece would overwrite what the others read. */
static struct cut cut_for(const struct operation *op, const struct job *j)
{
    struct work work = {
        .planes = (long)op->batch * op->x,
        .rows = op->y,
        .inputs = 1,
        .outputs = j->blocks,
        .unit = op->map == op->maps[0] ? j->blocks : 2,
        .border = 1,
        .products = DIRECT_PRODUCTS_COST,
        .together = MOST_TILE_ROWS / j->columns,
        .load = DIRECT_LOAD_COST,
    };
    return cut_of(&work, op->threads);
}

static struct job job_of(const struct operation *op)
{
    struct job j = {.op = op, .made = made_of(op)};
    j.inputs = op->channels[0] + op->channels[1];
    j.outputs = op->outputs;
    j.input.channels[0] = op->channels[0];
    j.input.channels[1] = op->channels[1];
    j.input.maps[0] = op->maps[0];
    j.input.maps[1] = op->maps[1];
    j.input.raw = op->kind == INPUT_GRADIENT ? op->others[1] : NULL;
    j.input.coefficients = op->coefficients;
    j.input = all_of(j.input);

    j.width = width_of(j.inputs);
    j.blocks = j.made.width / 16;
    j.voxels = j.width <= 16 ? 2 : 1;
    j.columns = j.voxels == 2 || j.blocks > 1 ? 2 : 1;
    int lines = ceil_div(op->z, j.voxels);
    j.tiles = ceil_div(lines, TILE_LINES);
    j.lines = ceil_div(lines, j.tiles);

    struct products *p = &j.products;
    int terms = (j.voxels + 2) * j.width; /* values of K: a line's voxels and one on each side */
    p->taps = 9;
    p->depth = least(16, terms / 2);
    p->steps = ceil_div(terms, 2 * p->depth);
    p->line_bytes = (size_t)j.voxels * j.width * 2;
    /* Up to the last value that a tile reads, in an uneven number of cache lines: so rows spread
       over the cache. */
    size_t row = (j.tiles * j.lines - 1) * p->line_bytes + (size_t)p->steps * p->depth * 4;
    p->row_bytes = ((row + 63) / 64 | 1) * 64;
    j.tap_bytes = (size_t)p->steps * p->depth * 64;
    /* Of pairs, a voxel of zeros ends the block. */
    j.block_bytes = 9 * j.tap_bytes + (j.voxels == 2 ? (size_t)j.width * 32 : 0);

    j.is_whole = op->channels[0] % 16 == 0 && op->channels[1] % 16 == 0;
    j.cut = cut_for(op, &j);
    /* Three planes of them; the one that is formed ahead comes on top. */
    long rows = l2_budget(op, DIRECT_RING_PERMILLE) / (long)(3 * p->row_bytes);
    rows -= 2; /* of a band, beside its two borders */
    int most = rows < MOST_TILE_ROWS ? MOST_TILE_ROWS : least(rows, j.cut.rows);
    int bands = ceil_div(j.cut.rows, most);
    int height = ceil_div(j.cut.rows, bands); /* all are about equal */
    j.y_rows = least(j.cut.rows, round_up(height, MOST_TILE_ROWS / j.columns));
    j.kept = sizeof(float) * 2 * MOST_TILE_ROWS * TILE_FLOATS;
    j.kept += PLANES * (j.y_rows + 2) * p->row_bytes;

    j.weight_bytes = j.blocks * j.block_bytes;
    /* A cache line between threads. */
    j.position_totals = (size_t)op->batch * 2 * j.made.width + 16;
    j.passing = j.weight_bytes + j.cut.positions * sizeof(double) * j.position_totals;
    return j;
}

struct thread {
    const struct job *job;
    struct piece piece;
    struct band band;
    struct made made;
    float *sums;    /* of twice up to four tiles */
    char *ring;     /* [PLANES][y_rows + 2 rows][row_bytes] */
    double *totals; /* of the piece's position: [batch][2][width of the map that is made] */
    /* What is being formed, and how many blocks of 16 channels of that plane are begun. */
    struct forming forming;
    int formed_plane, first_row, rows_inside; /* rows of it that are read in the map */
    int blocks_begun;
};

/* Row (x, y) in the ring. */
static char *ring_row(const struct thread *t, int x, int y)
{
    size_t row = (size_t)((x + 1) % PLANES) * (t->job->y_rows + 2) + (y - t->band.y0 + 1);
    return t->ring + row * t->job->products.row_bytes;
}

/* Forms row (x, y), after a voxel of zeros; outside the map all of it is zero. */
static void form_ring_row(struct thread *t, int x, int y)
{
    const struct job *j = t->job;
    const struct operation *op = j->op;
    struct input in = j->input;
    char *row = ring_row(t, x, y);
    if (!WITH_VECTORS)
        return;
    if (x < 0 || x >= op->x || y < 0 || y >= op->y) {
        memset(row, 0, j->products.row_bytes);
        return;
    }
    size_t voxel = voxel_of(op, t->band.batch, x, y);
    if (t->piece.saved)
        in.maps[0] = map_in_place(op, &t->piece, &t->band, x, y);
    form_bfloat16_row((uint16_t *)row + j->width, j->width, &in, t->band.batch, voxel, op->z);
    if (t->piece.saved)
        save_last_row(op, &t->piece, &t->band, x, y);
}

/* Whether row (x, y) is read where it is, in the map. */
static int is_read_in_map(const struct thread *t, int x, int y)
{
    const struct operation *op = t->job->op;
    if (x < 0 || x >= op->x || y < 0 || y >= op->y)
        return 0;
    return !t->piece.saved || map_in_place(op, &t->piece, &t->band, x, y) == op->maps[0];
}

/* Begins to form the rows of plane x: those that are read elsewhere than in the map, or cannot be
   formed by 16 channels, at once. */
static void begin_plane(struct thread *t, int x)
{
    const struct job *j = t->job;
    const struct band *band = &t->band;
    int inside = 0; /* rows */
    int first = 0;
    for (int y = band->y0 - 1; y <= band->y1; y++) {
        if (!j->is_whole || !is_read_in_map(t, x, y)) {
            form_ring_row(t, x, y);
            continue;
        }
        if (!inside)
            first = y;
        inside++;
    }
    t->formed_plane = x;
    t->first_row = first;
    t->rows_inside = inside;
    t->blocks_begun = 0;
    if (inside && t->piece.saved)
        for (int y = first; y < first + inside; y++)
            save_last_row(j->op, &t->piece, band, x, y);
}

/* Whether anything of the plane is left to be formed; begins its next block after one that is. */
static int is_forming(struct thread *t)
{
    const struct job *j = t->job;
    while (!t->forming.rows && t->rows_inside && t->blocks_begun < j->width / 16) {
        int block = t->blocks_begun++;
        size_t voxel = voxel_of(j->op, t->band.batch, t->formed_plane, t->first_row);
        size_t voxel_bytes = sizeof(uint16_t) * j->width;
        struct forming f =
            forming_of(&j->input, t->band.batch, voxel, 16 * block, j->op->z, t->rows_inside);
        f.to = ring_row(t, t->formed_plane, t->first_row) + voxel_bytes + block * 32;
        f.beside = voxel_bytes;
        f.step = 2 * voxel_bytes;
        f.gap = j->products.row_bytes - f.row_twos * f.step;
        t->forming = f;
    }
    return t->forming.rows > 0;
}

static void end_plane(struct thread *t)
{
    while (is_forming(t))
        form_rest(&t->forming, ROW, form_of(&t->job->input));
}

/* The tiles B of a column. The weights of a tap begin and end with zeros of a voxel: the first
   voxel of a pair skips those. */
static const char *weights_of(const struct job *j, struct column column)
{
    size_t zeros = j->voxels == 2 && column.voxel == 0 ? (size_t)j->width * 32 : 0;
    return j->weights + column.block * j->block_bytes + zeros;
}

/* --- Products with chores --- */

/* Multiplies taps `tap` to `past` - 1; after each product a span of `f` is finished. */
#define BESIDE(name, rows, columns, kind) \
    ALWAYS_INLINE void name##_next(void *work) \
    { \
        finish_next(work, (struct how){kind, 0, 1}); \
    } \
    NEVER_INLINE void name(const struct factors *t, int tap, int past, const struct made *made, \
                           const struct finished *f) \
    { \
        struct finishing w = begin_finishing(made, f, (struct how){kind, 0, 1}); \
        multiply_taps_as(t, rows, columns, tap, past, name##_next, &w); \
        while (w.left) \
            name##_next(&w); \
        end_finishing(&w, (struct how){kind, 0, 1}); \
    }
BESIDE(finish_no_sums_2x2, 2, 2, NO_SUMS)
BESIDE(finish_moments_2x2, 2, 2, MOMENTS)
BESIDE(finish_norm_sums_2x2, 2, 2, NORM_SUMS)
BESIDE(finish_no_sums_4x1, 4, 1, NO_SUMS)
BESIDE(finish_moments_4x1, 4, 1, MOMENTS)
BESIDE(finish_norm_sums_4x1, 4, 1, NORM_SUMS)
#undef BESIDE

/* The same with two voxels formed after each product, as long as any are left. */
#define BESIDE(name, rows, columns, chore) \
    NEVER_INLINE void name(const struct factors *t, int tap, int past, struct forming *list) \
    { \
        struct forming f = *list; \
        multiply_taps_as(t, rows, columns, tap, past, chore, &f); \
        *list = f; \
    }
BESIDE(form_raw_2x2, 2, 2, row_raw)
BESIDE(form_norm_2x2, 2, 2, row_norm)
BESIDE(form_norm_gradient_2x2, 2, 2, row_norm_gradient)
BESIDE(form_raw_4x1, 4, 1, row_raw)
BESIDE(form_norm_4x1, 4, 1, row_norm)
BESIDE(form_norm_gradient_4x1, 4, 1, row_norm_gradient)
#undef BESIDE

/* Whether four tiles are multiplied at once: other turns, at a band's end, have no chores. */
static int has_chores(const struct factors *t) { return t->rows * t->columns == MOST_TILE_ROWS; }

/* Finishes `f`, between the products of as many taps as that takes; returns the tap after them. */
static int finish_beside(const struct factors *t, const struct made *made, const struct finished *f)
{
    int products = t->of->steps * MOST_TILE_ROWS; /* of a tap */
    int spans = f->rows * f->spans[0].count[1];
    int past = least(t->of->taps, ceil_div(spans, products));
    int is_regular = is_whole(f) && f->spans[0].count[0] == f->spans[0].count[1];
    if (!f->rows || !WITH_VECTORS)
        return 0;
    if (!has_chores(t) || !is_regular || !spans || made->adds) {
        finish(made, f);
        return 0;
    }
    switch (10 * made->sums + t->columns) {
#define BESIDE(kind, columns, finish_as) \
    case 10 * kind + columns: \
        finish_as(t, 0, past, made, f); \
        break;
        BESIDE(NO_SUMS, 2, finish_no_sums_2x2)
        BESIDE(MOMENTS, 2, finish_moments_2x2)
        BESIDE(NORM_SUMS, 2, finish_norm_sums_2x2)
        BESIDE(NO_SUMS, 1, finish_no_sums_4x1)
        BESIDE(MOMENTS, 1, finish_moments_4x1)
        BESIDE(NORM_SUMS, 1, finish_norm_sums_4x1)
#undef BESIDE
    default:
        __builtin_trap();
    }
    return past;
}

/* Multiplies the taps from `tap` on, and forms rows between their products. */
static void form_beside(const struct factors *t, int tap, struct forming *list, int form)
{
    int past = t->of->taps;
    switch (10 * form + t->columns) {
#define BESIDE(form, columns, form_as) \
    case 10 * form + columns: \
        form_as(t, tap, past, list); \
        break;
        BESIDE(RAW, 2, form_raw_2x2)
        BESIDE(NORM, 2, form_norm_2x2)
        BESIDE(NORM_GRADIENT, 2, form_norm_gradient_2x2)
        BESIDE(RAW, 1, form_raw_4x1)
        BESIDE(NORM, 1, form_norm_4x1)
        BESIDE(NORM_GRADIENT, 1, form_norm_gradient_4x1)
#undef BESIDE
    default:
        __builtin_trap();
    }
}

/* Makes the sums of a turn, finishes `f` and goes on forming. */
static void make_turn(struct thread *t, const struct factors *factors, float *sums,
                      const struct finished *f)
{
    begin_tiles(factors);
    int tap = finish_beside(factors, &t->made, f);
    if (has_chores(factors) && is_forming(t))
        form_beside(factors, tap, &t->forming, form_of(&t->job->input));
    else
        multiply_taps(factors, tap, factors->of->taps);
    store_tiles(factors, sums);
}

/* --- An operation --- */

/* Asks for voxels z0 ... z0 + count - 1 of rows y ... y + rows - 1 of the plane that is formed
   next: while products are made, memory would have nothing to do. */
static void ask_for_next(const struct thread *t, int x, int y, int rows, int z0, int count)
{
    const struct operation *op = t->job->op;
    const struct input *in = &t->job->input;
    const void *maps[] = {in->maps[0], in->maps[1], in->raw};
    int channels[] = {in->channels[0], in->channels[1], in->raw ? in->channels[0] : 0};
    if (x > t->band.x1 || x >= op->x)
        return;
    for (int row = 0; row < rows; row++)
        for (int m = 0; m < 3; m++) {
            size_t voxel = voxel_of(op, t->band.batch, x, y + row) + z0;
            const char *from = (const char *)maps[m] + voxel * channels[m] * 2;
            for (int at = 0; at < count * channels[m] * 2; at += 64)
                __builtin_prefetch(from + at, 0, 2);
        }
}

/* Rows are innermost: two neighbours share two thirds of what they read, still in the cache L1.
   What is multiplied in a turn is finished between the products of the next one: its own would
   have to be waited for. */
static void convolve_plane(struct thread *t, int x)
{
    const struct job *j = t->job;
    const struct band *band = &t->band;
    size_t tile_bytes = j->lines * j->products.line_bytes;
    struct finished turns[2] = {{0}};
    int now = 0;                                       /* of `turns`, and of the sums of both */
    int wide = t->piece.past_output - t->piece.output; /* in blocks of outputs */
    for (int pass = 0; pass < passes_of(j->voxels, wide); pass++) {
        struct column columns[2];
        int count = columns_of(columns, j->voxels, t->piece.output, wide, pass);
        int most = MOST_TILE_ROWS / count;
        struct factors factors = {.of = &j->products, .columns = count};
        factors.weights[0] = weights_of(j, columns[0]);
        factors.weights[1] = weights_of(j, columns[count - 1]);
        const struct finished empty = finished_of(columns, count, j->outputs);
        for (int tile = 0; tile < j->tiles; tile++) {
            int z0 = tile * j->lines * j->voxels;
            int left = least(j->op->z - z0, j->lines * j->voxels);
            size_t voxel = voxel_of(j->op, band->batch, x, band->y0) + z0;
            size_t row_values = (size_t)j->op->z * j->outputs;
            const struct spans top =
                spans_of(t->sums, columns, count, voxel, left, j->voxels, j->outputs);
            for (int tap = 0; tap < 9; tap++)
                factors.first[tap] =
                    ring_row(t, x + tap / 3 - 1, band->y0 + tap % 3 - 1) + tile * tile_bytes;
            for (int y = band->y0; y < band->y1; y += most, now = !now) {
                struct finished *f = &turns[now];
                float *sums = t->sums + now * MOST_TILE_ROWS * TILE_FLOATS;
                *f = empty;
                f->rows = least(most, band->y1 - y);
                f->ahead = f->rows * row_values;
                for (int row = 0; row < f->rows; row++)
                    f->spans[row] = moved(top, sums - t->sums + row * count * TILE_FLOATS,
                                          (y - band->y0 + row) * row_values);
                if (pass == 0 && !j->is_whole)
                    ask_for_next(t, x + 2, y, f->rows, z0, left);
                factors.rows = f->rows;
                make_turn(t, &factors, sums, &turns[!now]);
                for (int tap = 0; tap < 9; tap++)
                    factors.first[tap] += most * j->products.row_bytes;
            }
        }
    }
    finish(&t->made, &turns[!now]);
}

/* What belongs to a sample of the map that is made. */
static void begin_sample(struct thread *t, int batch)
{
    const struct operation *op = t->job->op;
    t->made.totals = t->totals + (size_t)batch * 2 * t->made.width;
    if (t->made.sums == NORM_SUMS)
        t->made.norm = op->other_coefficients + (size_t)batch * COEFFICIENTS * op->outputs;
}

static void convolve_piece(struct job *j, const struct piece *piece, char *memory)
{
    const struct operation *op = j->op;
    struct thread t = {.job = j, .piece = *piece, .made = j->made, .sums = (float *)memory};
    t.ring = (char *)(t.sums + 2 * MOST_TILE_ROWS * TILE_FLOATS);
    t.totals = j->totals + piece->position * j->position_totals;
    clear_totals(op, t.totals, t.made.width, piece);
    /* What follows a row's voxels stays 0. */
    memset(t.ring, 0, PLANES * (j->y_rows + 2) * j->products.row_bytes);
    tile_config(j->lines, j->products.depth);
    while (next_band(&t.band, op, piece, j->y_rows)) {
        const struct band *band = &t.band;
        begin_sample(&t, band->batch);
        for (int x = band->x0 - 1; x <= band->x0 + 1; x++) {
            begin_plane(&t, x);
            end_plane(&t);
        }
        for (int x = band->x0; x < band->x1; x++) {
            int is_ahead = x + 2 <= band->x1;
            if (is_ahead && j->is_whole)
                begin_plane(&t, x + 2);
            convolve_plane(&t, x);
            if (is_ahead && !j->is_whole)
                begin_plane(&t, x + 2);
            end_plane(&t);
        }
    }
    _mm_sfence(); /* after values that were written past the caches */
    tile_release();
}

/* The weights of a position of the filter and an input, for up to 16 outputs from `output` on;
   `to` keeps its zeros where there are none. */
static void weights_at(float *to, const struct job *j, int position, int input, int output)
{
    int n = least(16, j->outputs - output);
    const float *filters = j->op->filters;
    if (input >= j->inputs)
        return;
    if (j->op->kind == CONVOLVE) {
        filters += ((size_t)position * j->inputs + input) * j->outputs + output;
        memcpy(to, filters, sizeof(float) * n);
        return;
    }
    /* Flipped, and channels swapped. */
    filters += ((size_t)(26 - position) * j->outputs + output) * j->inputs + input;
    for (int o = 0; o < n; o++)
        to[o] = filters[(size_t)o * j->inputs];
}

/* [block][tap (x, y)][pair of values of K][16 outputs][2]. Of pairs of voxels, a tap is [zeros of
   a voxel][three taps along z], and zeros end the block. A thread packs every `threads`-th tap. */
static void pack_weights(void *argument, int thread, int threads)
{
    const struct job *j = argument;
    int zeros = j->voxels == 2 ? j->width : 0; /* values of K */
    for (int number = thread; number < 10 * j->blocks; number += threads) {
        int block = number / 10;
        int tap = number % 10;
        char *to = j->weights + block * j->block_bytes + tap * j->tap_bytes;
        int pairs = tap < 9 ? j->products.steps * j->products.depth : zeros / 2;
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

static void place(struct job *j, char *memory)
{
    j->weights = memory;
    j->totals = (double *)(memory + j->weight_bytes);
}

static void write_map_sums(struct job *j)
{
    if (j->op->sums_to)
        write_sums(j->op, j->made.sums, j->totals, j->position_totals, j->outputs, j->made.width,
                   j->cut.positions);
}

static int convolve(const struct operation *op)
{
    struct job j = job_of(op);
    struct steps steps = {
        .op = op,
        .cut = &j.cut,
        .kept = j.kept,
        .passing = j.passing,
        .reads_neighbours = 1,
        .place = place,
        .pack = pack_weights,
        .compute = convolve_piece,
        .write = write_map_sums,
    };
    return run_pieces(&j, &steps);
}

/* --- An instruction set with tiles --- */

int DIRECT_FILTERS(const struct operation *); /* build.py defines the names */
int DIRECT_UP(const struct operation *);
int DIRECT_UP_FILTERS(const struct operation *);
int POINTWISE(const struct operation *);
int LOSS(const struct operation *);

static int run_kind(const struct operation *op)
{
    switch (op->kind) {
    case CONVOLVE:
    case INPUT_GRADIENT:
        return convolve(op);
    case FILTER_GRADIENT:
        return DIRECT_FILTERS(op);
    case PROJECT:
    case UP_CONVOLVE:
    case UP_INPUT_GRADIENT:
        return DIRECT_UP(op);
    case UP_FILTER_GRADIENT:
        return DIRECT_UP_FILTERS(op);
    case LOSS_SUMS:
    case LOSS_SLOPE:
        return LOSS(op);
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
    enum { TAPS = 9 };
    static char values[2 * TILE_BYTES] __attribute__((aligned(64)));
    static char weights[2 * TAPS * TILE_BYTES] __attribute__((aligned(64)));
    static _Thread_local float sums[4 * TILE_FLOATS] __attribute__((aligned(64)));
    const struct products p = {TAPS, 1, 16, 64, TILE_BYTES};
    struct factors factors = {&p, 2, 2, .weights = {weights, weights + TAPS * TILE_BYTES}};
    for (int tap = 0; tap < TAPS; tap++)
        factors.first[tap] = values;
    tile_config(TILE_LINES, p.depth);
    for (long i = 0; i < *(long *)repeats; i++)
        multiply(&factors, sums);
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
