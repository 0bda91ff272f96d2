/* How an operation is cut into pieces, one for each thread that takes part: along x, along y, and
   by blocks of 16 channels. The cut is the one whose largest piece costs least. Further, what all
   operations in pieces do alike: memory, packing, pieces, sums (`run_pieces`); and what pieces of a
   convolution have to do with each other: in place, one reads what another overwrites; and their
   sums are added up. */
#ifndef PIECES_H
#define PIECES_H

#include <unistd.h>
#include "rows.h"

/* --- The cut --- */

/* What can be cut, and what it costs: the unit is what it takes to form a row of a block of 16
   channels. */
struct work {
    long planes; /* of all samples */
    int rows;    /* of a plane */
    int inputs;  /* blocks of input channels; 1 where all belong together */
    int outputs; /* blocks of outputs, cut in units of so many: */
    int unit;
    int border;       /* planes and rows on each side of a piece that are formed for it as well */
    int products;     /* cost of the products of a row, a block of inputs and one of outputs */
    int together;     /* rows whose products share a load of filters; 0: all of a piece's plane */
    int load;         /* cost of such a load, for a block of inputs and one of outputs */
    int form_outputs; /* cost of forming a row of a block of outputs: of a filter's gradient */
    int sums;         /* cost of clearing and adding up the sums of two such blocks */
};

/* Costs of a cut, about: in units of forming a row of a block of 16 channels. */
enum {
    ROW_PRODUCTS_COST = 8, /* of transformed rows; their loads take as long as products of */
    ROW_LOAD_TILES = 3,    /* so many tiles of Winograd's, or for a filter gradient */
    ROW_LOAD_UNITS = 3,    /* so many units; */
    ROW_SUMS_UNITS = 30,   /* and sums of a filter gradient, cleared and added up, as these */
    DIRECT_PRODUCTS_COST = 3,
    DIRECT_LOAD_COST = 1,
    DIRECT_LOAD_POSITIONS = 27,  /* whose products take as long as what comes with each plane, */
    DIRECT_SUMS_POSITIONS = 200, /* and as clearing and adding up the sums of a group and a block */
    UP_FORM_FINE = 8,            /* of forming a block of the gradient's four fine rows */
    UP_PRODUCTS_COST = 16,
    UP_SUMS_VOXELS = 24, /* whose products take as long as clearing and adding up */
    UP_DIRECT_PRODUCTS_COST = 4,
};

struct cut {
    struct work work;
    int x_count, y_count, input_count, output_count; /* pieces in each direction */
    int positions; /* x_count * y_count: each has sums of its own, which its pieces share */
    int pieces;
    /* Of the largest piece: */
    long planes;
    int rows, inputs, outputs;
};

/* A piece: planes of all samples, rows of each, blocks of inputs and of outputs; `past` ones are
   the first that are not in it. */
struct piece {
    long plane, past_plane;
    int y0, y1;
    int input, past_input;
    int output, past_output;
    int position; /* of cut.positions */
    int beside;   /* rows above and below that are other pieces': 1, or 0 */
    char *saved;  /* in place: the rows that are saved; or NULL */
};

static struct cut cut_into(const struct work *work, int x, int y, int inputs, int outputs)
{
    struct cut cut = {*work, x, y, inputs, outputs, .positions = x * y};
    cut.pieces = cut.positions * inputs * outputs;
    cut.planes = ceil_div(work->planes, x);
    cut.rows = (int)ceil_div(work->rows, y);
    cut.inputs = (int)ceil_div(work->inputs, inputs);
    int units = (int)ceil_div(work->outputs, work->unit);
    cut.outputs = least(work->outputs, work->unit * (int)ceil_div(units, outputs));
    return cut;
}

/* Loads of filters for `rows` rows: as many as are together, then half as many, and so on. */
static int loads_of(int rows, int together)
{
    return together ? rows / together + __builtin_popcount(rows % together) : 1;
}

/* What the largest piece costs. Borders count twice along y, where rows are computed in tiles of
   equal height: of two cuts that cost about the same, the one along x is taken. */
static long cost_of(const struct cut *cut, int threads)
{
    const struct work *w = &cut->work;
    long products = (long)cut->rows * w->products;
    products += (long)loads_of(cut->rows, w->together) * w->load;
    long formed = (cut->planes + 2 * w->border) * (cut->rows + 4 * w->border);
    long cost = cut->planes * products * cut->inputs * cut->outputs + formed * cut->inputs;
    cost += cut->planes * cut->rows * cut->outputs * w->form_outputs;
    return cost + w->sums * cut->positions * ceil_div((long)w->inputs * w->outputs, threads);
}

/* The fewest pieces whose largest is smaller than that of `count`; more than `whole` if none is. */
static int next_count(long whole, long count)
{
    long largest = ceil_div(whole, count);
    return (int)(largest > 1 ? ceil_div(whole, largest - 1) : whole + 1);
}

/* The cut for at most so many threads; of equally good ones that of the fewest pieces. */
static struct cut cut_of(const struct work *w, int threads)
{
    struct cut best = cut_into(w, 1, 1, 1, 1);
    int most = least(threads, MOST_THREADS);
    int units = (int)ceil_div(w->outputs, w->unit);
    long cost = cost_of(&best, most);
    long products = w->planes * w->rows * w->products * w->inputs * w->outputs;
    /* clang-format off */
#define EACH(count, whole, taken) \
    for (int count = 1; count <= whole && (taken) * count <= most; count = next_count(whole, count))
    EACH(x, w->planes, 1)
        EACH(y, w->rows, x)
            EACH(inputs, w->inputs, x * y)
                EACH(outputs, units, x * y * inputs) {
                    if (products > cost * (x * y * inputs * outputs))
                        continue; /* no cost is so low: this saves time */
                    struct cut cut = cut_into(w, x, y, inputs, outputs);
                    long of_cut = cost_of(&cut, most);
                    if (of_cut < cost || (of_cut == cost && cut.pieces <= best.pieces)) {
                        best = cut;
                        cost = of_cut;
                    }
                }
#undef EACH
    /* clang-format on */
    return best;
}

/* The share of all threads' time in which they compute: the cost of all in one piece over that of
   the largest piece on every thread. */
static double busy_share(const struct cut *cut, int threads)
{
    struct cut whole = cut_into(&cut->work, 1, 1, 1, 1);
    return (double)cost_of(&whole, 1) / threads / cost_of(cut, least(threads, MOST_THREADS));
}

/* Where share `number` of `count` about equal ones begins. */
static long share(long whole, int number, int count) { return whole * number / count; }

static struct piece piece_of(const struct cut *cut, int number)
{
    const struct work *w = &cut->work;
    int units = (int)ceil_div(w->outputs, w->unit);
    int output = number % cut->output_count;
    int input = number / cut->output_count % cut->input_count;
    int position = number / (cut->output_count * cut->input_count);
    int y = position % cut->y_count;
    int x = position / cut->y_count;
    int past_unit = (int)share(units, output + 1, cut->output_count);
    return (struct piece){
        .plane = share(w->planes, x, cut->x_count),
        .past_plane = share(w->planes, x + 1, cut->x_count),
        .y0 = (int)share(w->rows, y, cut->y_count),
        .y1 = (int)share(w->rows, y + 1, cut->y_count),
        .input = (int)share(w->inputs, input, cut->input_count),
        .past_input = (int)share(w->inputs, input + 1, cut->input_count),
        .output = w->unit * (int)share(units, output, cut->output_count),
        .past_output = least(w->outputs, w->unit * past_unit),
        .position = position,
        .beside = cut->y_count > 1,
    };
}

/* The cut of rows that have nothing to do with each other: they are its planes. */
static struct cut cut_of_rows(long count, int threads)
{
    struct work work = {count, 1, 1, 1, .unit = 1, .products = 1};
    return cut_of(&work, threads);
}

static long rows_of_all(const struct operation *op) { return (long)op->batch * op->x * op->y; }

/* A row of the grid. */
struct row {
    int batch, x, y;
};

static struct row row_of(const struct operation *op, long number)
{
    long plane = number / op->y;
    return (struct row){(int)(plane / op->x), (int)(plane % op->x), (int)(number % op->y)};
}

/* Channels of blocks `first` to `past` of an input. */
static struct input blocks_of(const struct input *whole, int first, int past)
{
    struct input in = *whole;
    in.first = first * GROUP;
    in.past = least(past * GROUP, whole->past);
    return in;
}

/* The rows of a piece that a thread computes at a time: planes x0 ... x1 - 1 of a sample, rows
   y0 ... y1 - 1 of each. */
struct band {
    long plane; /* the first one, of all samples */
    int batch, x0, x1, y0, y1;
};

/* Goes on to the next band of a piece, of at most so many rows; 0 after the last one. Before the
   first one `band` is all zeros. */
static int next_band(struct band *band, const struct operation *op, const struct piece *piece,
                     int rows)
{
    int is_first = band->y1 == 0;
    if (is_first || band->y1 == piece->y1) {
        band->plane = is_first ? piece->plane : band->plane + band->x1 - band->x0;
        band->batch = (int)(band->plane / op->x);
        band->x0 = (int)(band->plane % op->x);
        band->x1 = least(op->x, band->x0 + piece->past_plane - band->plane);
        band->y1 = piece->y0;
    }
    band->y0 = band->y1;
    band->y1 = least(band->y0 + rows, piece->y1);
    return band->plane < piece->past_plane;
}

/* Bytes of a core's cache L2 that a thread's rows may take. */
static long l2_budget(const struct operation *op, int permille)
{
    long bytes = op->scratch ? (long)op->scratch[L2_BYTES] : sysconf(_SC_LEVEL2_CACHE_SIZE);
    return (bytes > 0 ? bytes : DEFAULT_L2_BYTES) * permille / 1000;
}

/* --- In place: what is read after it may be overwritten is saved before, each piece's to memory of
   its own. Saved are rows: of the two planes beside the piece those that it reads; then of each of
   its planes the row above, whose place the last row of each band takes for the next one, and the
   row below. Pieces of whole planes have none above and below. --- */

static size_t map_row_bytes(const struct operation *op)
{
    return (size_t)op->z * op->channels[0] * (op->dtype == FLOAT32 ? 4 : 2);
}

/* Bytes of a piece's saved rows; 0 where the output is elsewhere. */
static size_t saved_bytes(const struct operation *op, const struct cut *cut)
{
    size_t beside = cut->y_count > 1;
    if (op->map != op->maps[0])
        return 0;
    size_t rows = 2 * (cut->rows + 2 * beside) + cut->planes * (1 + beside);
    return (rows * map_row_bytes(op) + 63) / 64 * 64;
}

/* Where row y is saved, of the plane before a piece or of the one after it. */
static char *saved_outside(const struct operation *op, const struct piece *piece, int is_after,
                           int y)
{
    long height = piece->y1 - piece->y0 + 2 * piece->beside;
    long row = is_after * height + y - piece->y0 + piece->beside;
    return piece->saved + row * map_row_bytes(op);
}

/* Where the row above or below is saved, of a plane of the piece. */
static char *saved_inside(const struct operation *op, const struct piece *piece, long plane,
                          int is_below)
{
    long outside = 2 * (piece->y1 - piece->y0 + 2 * piece->beside);
    long row = outside + (plane - piece->plane) * (1 + piece->beside) + is_below;
    return piece->saved + row * map_row_bytes(op);
}

/* Copies rows y0 ... y1 - 1 of a plane, as far as the map has them. */
static void save_rows(const struct operation *op, char *to, long plane, int y0, int y1)
{
    size_t row_bytes = map_row_bytes(op);
    int first = y0 < 0 ? 0 : y0;
    int past = least(y1, op->y);
    const char *from = (const char *)op->maps[0] + (plane * op->y + first) * row_bytes;
    if (first < past)
        memcpy(to + (first - y0) * row_bytes, from, (past - first) * row_bytes);
}

/* What a piece reads of its neighbours. */
static void save_beside(const struct operation *op, const struct piece *piece)
{
    int y0 = piece->y0 - piece->beside;
    int y1 = piece->y1 + piece->beside;
    if (piece->plane % op->x) /* not the first plane of a sample */
        save_rows(op, saved_outside(op, piece, 0, y0), piece->plane - 1, y0, y1);
    if (piece->past_plane % op->x)
        save_rows(op, saved_outside(op, piece, 1, y0), piece->past_plane, y0, y1);
    if (!piece->beside)
        return;
    for (long plane = piece->plane; plane < piece->past_plane; plane++) {
        save_rows(op, saved_inside(op, piece, plane, 0), plane, y0, piece->y0);
        save_rows(op, saved_inside(op, piece, plane, 1), plane, piece->y1, y1);
    }
}

/* The first map as row (x, y) is to be read from it: what was saved where the map is overwritten by
   then, shifted so that the row is found at the voxel where the map would have it. */
static const void *map_in_place(const struct operation *op, const struct piece *piece,
                                const struct band *band, int x, int y)
{
    long plane = (long)band->batch * op->x + x;
    const char *saved;
    if (plane < piece->plane || plane == piece->past_plane)
        saved = saved_outside(op, piece, plane == piece->past_plane, y);
    else if (y < band->y0)
        saved = saved_inside(op, piece, plane, 0);
    else if (y >= piece->y1)
        saved = saved_inside(op, piece, plane, 1);
    else
        return op->maps[0];
    return (const void *)((uintptr_t)saved - (plane * op->y + y) * map_row_bytes(op));
}

/* Once row (x, y) is formed: the next band reads it after this one has overwritten it. */
static void save_last_row(const struct operation *op, const struct piece *piece,
                          const struct band *band, int x, int y)
{
    long plane = (long)band->batch * op->x + x;
    if (y == band->y1 - 1 && plane >= piece->plane && plane < piece->past_plane)
        save_rows(op, saved_inside(op, piece, plane, 0), plane, y, y + 1);
}

/* --- An operation in pieces --- */

struct job; /* what its threads share: every file has its own */

/* What it takes and does, in this order. */
struct steps {
    const struct operation *op;
    const struct cut *cut;
    size_t kept;          /* bytes of each thread that has a piece */
    size_t passing;       /* bytes of all threads together */
    int reads_neighbours; /* a piece reads rows of others: in place they are saved */

    /* What is NULL is left out. */
    void (*place)(struct job *, char *memory); /* tells the job where its `passing` bytes are */
    void (*pack)(void *job, int thread, int threads);                  /* on all threads: filters */
    void (*compute)(struct job *, const struct piece *, char *memory); /* a piece */
    void (*add_up)(void *job, int thread, int threads); /* on all threads: sums of positions */
    void (*write)(struct job *); /* the same on the caller's thread, where it takes no time */
};

struct run {
    struct job *job;
    const struct steps *steps;
    char *saved;        /* rows of all pieces, in place */
    size_t piece_saved; /* bytes of one piece's; 0 if the output is elsewhere */
    _Atomic int failed; /* a thread got no memory */
};

static struct piece piece_of_run(const struct run *run, int number)
{
    struct piece piece = piece_of(run->steps->cut, number);
    if (run->piece_saved)
        piece.saved = run->saved + number * run->piece_saved;
    return piece;
}

static void save_for_piece(void *argument, int thread, int threads)
{
    const struct run *run = argument;
    struct piece piece = piece_of_run(run, thread);
    save_beside(run->steps->op, &piece);
}

static void run_piece(void *argument, int thread, int threads)
{
    struct run *run = argument;
    char *memory = thread_memory(thread, run->steps->kept);
    if (!memory) {
        run->failed = 1;
        return;
    }
    struct piece piece = piece_of_run(run, thread);
    run->steps->compute(run->job, &piece, memory);
}

/* Returns 0; -1 if memory runs out. */
static int run_pieces(struct job *job, const struct steps *steps)
{
    const struct operation *op = steps->op;
    int pieces = steps->cut->pieces;
    struct run run = {.job = job, .steps = steps};
    if (steps->reads_neighbours)
        run.piece_saved = saved_bytes(op, steps->cut);
    size_t passing = steps->passing + pieces * run.piece_saved;
    if (asks_for_scratch(op, pieces, steps->kept, passing, busy_share(steps->cut, op->threads)))
        return 0;
    if (passing) {
        char *memory = passing_memory(passing);
        if (!memory)
            return -1;
        steps->place(job, memory);
        run.saved = memory + steps->passing;
    }
    if (steps->pack)
        run_on_threads(op->threads, steps->pack, job);
    if (run.piece_saved)
        run_on_threads(pieces, save_for_piece, &run);
    run_on_threads(pieces, run_piece, &run);
    if (run.failed)
        return -1;
    if (steps->add_up)
        run_on_threads(op->threads, steps->add_up, job);
    if (steps->write)
        steps->write(job);
    return 0;
}

/* --- Sums of a convolution's map --- */

enum map_sums { NO_SUMS, MOMENTS, NORM_SUMS };

static enum map_sums sums_of(const struct operation *op)
{
    if (op->sums_to && op->kind == CONVOLVE)
        return MOMENTS;
    /* Without a norm below they are 0. */
    return op->sums_to && op->other_coefficients ? NORM_SUMS : NO_SUMS;
}

/* Clears what a piece adds up in its position's totals, [batch][2][width]. */
static void clear_totals(const struct operation *op, double *totals, int width,
                         const struct piece *piece)
{
    size_t bytes = sizeof(double) * GROUP * (piece->past_output - piece->output);
    for (int i = 0; i < 2 * op->batch; i++)
        memset(totals + (size_t)i * width + GROUP * piece->output, 0, bytes);
}

/* Of the positions' totals, [batch][2][width] each and `next` apart, added in their order: of
   MOMENTS the values' sum and the sum of their squares. */
static void write_sums(const struct operation *op, enum map_sums sums, const double *totals,
                       size_t next, int channels, int width, int positions)
{
    double voxels = (double)op->x * op->y * op->z;
    for (long i = 0; i < (long)op->batch * channels; i++) {
        int batch = (int)(i / channels);
        int c = (int)(i % channels);
        const double *at = totals + (size_t)batch * 2 * width + c;
        double first = total(at, next, positions);
        double second = total(at + width, next, positions);
        if (sums == MOMENTS) {
            first /= voxels;
            second = second / voxels - first * first;
            second = second < 0 ? 0 : second; /* a rounding of float64 below it */
        }
        op->sums_to[(size_t)batch * 2 * channels + c] = (float)first;
        op->sums_to[((size_t)batch * 2 + 1) * channels + c] = (float)second;
    }
}

#endif
