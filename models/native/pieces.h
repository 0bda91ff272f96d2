/* How an operation is cut into pieces, one for each thread that takes part: along x, along y, and
   by blocks of 16 channels. The cut is the one whose largest piece costs least. Further, what the
   pieces of a convolution have to do with each other: in place, one reads what another overwrites;
   and their sums are added up. */
#ifndef PIECES_H
#define PIECES_H

#include "rows.h"

/* --- The cut --- */

static long parts_of(long number, long size) { return (number + size - 1) / size; }

/* What can be cut, and what it costs: the unit is what it takes to form a row of a block of 16
   channels. memory_estimator/step/cut.py has the same. */
struct work {
    long planes;      /* of all samples */
    int rows;         /* of a plane */
    int inputs;       /* blocks of input channels; 1 where all belong together */
    int outputs;      /* blocks of outputs, cut in units of so many: */
    int unit;
    int border;       /* planes and rows on each side of a piece that are formed for it as well */
    int products;     /* cost of the products of a row, a block of inputs and one of outputs */
    int together;     /* rows whose products share a load of filters; 0: all of a piece's plane */
    int load;         /* cost of such a load, for a block of inputs and one of outputs */
    int form_outputs; /* cost of forming a row of a block of outputs: of a filter's gradient */
    int sums;         /* cost of clearing and adding up the sums of two such blocks */
};

struct cut {
    struct work work;
    int x_parts, y_parts, input_parts, output_parts;
    int positions; /* parts along x and y: each has sums of its own, which its pieces share */
    int pieces;
    long planes;   /* of the largest piece, as what follows */
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
};

static struct cut cut_into(const struct work *work, int x, int y, int inputs, int outputs)
{
    struct cut cut = {*work, x, y, inputs, outputs, .positions = x * y};
    cut.pieces = cut.positions * inputs * outputs;
    cut.planes = parts_of(work->planes, x);
    cut.rows = (int)parts_of(work->rows, y);
    cut.inputs = (int)parts_of(work->inputs, inputs);
    int units = (int)parts_of(work->outputs, work->unit);
    cut.outputs = least(work->outputs, work->unit * (int)parts_of(units, outputs));
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
    return cost + w->sums * cut->positions * parts_of((long)w->inputs * w->outputs, threads);
}

/* The fewest parts whose largest is smaller than that of `parts`; more than `whole` if none is. */
static int next_parts(long whole, long parts)
{
    long largest = parts_of(whole, parts);
    return (int)(largest > 1 ? parts_of(whole, largest - 1) : whole + 1);
}

/* The cut for at most so many threads; of equally good ones that of the fewest pieces. */
static struct cut cut_of(const struct work *w, int threads)
{
    struct cut best = cut_into(w, 1, 1, 1, 1);
    int most = least(threads, MOST_THREADS), units = (int)parts_of(w->outputs, w->unit);
    long cost = cost_of(&best, most);
    long products = w->planes * w->rows * w->products * w->inputs * w->outputs;
#define EACH(parts, of, taken) \
    for (int parts = 1; parts <= of && (taken) * parts <= most; parts = next_parts(of, parts))
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
    return best;
}

/* The first of part `part` of `parts` about equal ones. */
static long share(long whole, int part, int parts) { return whole * part / parts; }

static struct piece piece_of(const struct cut *cut, int number)
{
    const struct work *w = &cut->work;
    int units = (int)parts_of(w->outputs, w->unit);
    int output = number % cut->output_parts;
    int input = number / cut->output_parts % cut->input_parts;
    int position = number / (cut->output_parts * cut->input_parts);
    int y = position % cut->y_parts, x = position / cut->y_parts;
    return (struct piece){
        .plane = share(w->planes, x, cut->x_parts),
        .past_plane = share(w->planes, x + 1, cut->x_parts),
        .y0 = (int)share(w->rows, y, cut->y_parts),
        .y1 = (int)share(w->rows, y + 1, cut->y_parts),
        .input = (int)share(w->inputs, input, cut->input_parts),
        .past_input = (int)share(w->inputs, input + 1, cut->input_parts),
        .output = w->unit * (int)share(units, output, cut->output_parts),
        .past_output =
            least(w->outputs, w->unit * (int)share(units, output + 1, cut->output_parts)),
        .position = position,
    };
}

/* The cut of rows that have nothing to do with each other: they are its planes. */
static struct cut cut_of_rows(long count, int threads)
{
    struct work work = {count, 1, 1, 1, .unit = 1, .products = 1};
    return cut_of(&work, threads);
}

static long rows_of_all(const struct operation *op) { return (long)op->batch * op->x * op->y; }

/* Channels of blocks `first` to `past` of an input. */
static struct input blocks_of(const struct input *whole, int first, int past)
{
    struct input in = *whole;
    in.first = first * GROUP;
    in.past = least(past * GROUP, whole->past);
    return in;
}

/* The part of a piece that a thread computes at a time: planes x0 ... x1 - 1 of a sample, rows
   y0 ... y1 - 1 of each. */
struct part { int batch, x0, x1, y0, y1; };

/* The planes from `at` on that are of one sample. */
static void planes_from(struct part *part, const struct operation *op, long at, long past)
{
    part->batch = (int)(at / op->x);
    part->x0 = (int)(at % op->x);
    part->x1 = least(op->x, part->x0 + past - at);
}

/* --- In place: what is read after it may be overwritten is copied before, each piece's to memory
   of its own. Copies are rows: of the two planes beside the piece those that it reads; then of each
   of its planes the row above, whose place the last row of each part takes for the next one, and
   the row below. Pieces of whole planes have none above and below. --- */

struct copies {
    const struct operation *op;
    struct piece piece;
    int beside; /* rows of other pieces above and below: 1, or 0 */
    char *rows; /* NULL where the output is elsewhere */
};

static size_t map_row_bytes(const struct operation *op)
{
    return (size_t)op->z * op->channels[0] * (op->dtype == FLOAT32 ? 4 : 2);
}

/* Bytes of a piece's copies; 0 where the output is elsewhere. */
static size_t copies_bytes(const struct operation *op, const struct cut *cut)
{
    size_t beside = cut->y_parts > 1;
    if (op->map != op->maps[0])
        return 0;
    size_t rows = 2 * (cut->rows + 2 * beside) + cut->planes * (1 + beside);
    return (rows * map_row_bytes(op) + 63) / 64 * 64;
}

static struct copies copies_of(const struct operation *op, const struct cut *cut, int number,
                               char *memory)
{
    return (struct copies){op, piece_of(cut, number), cut->y_parts > 1, memory};
}

/* The copy of row y of the plane before a piece, or of the one after it. */
static char *copy_outside(const struct copies *c, int is_after, int y)
{
    const struct piece *piece = &c->piece;
    long height = piece->y1 - piece->y0 + 2 * c->beside;
    return c->rows + (is_after * height + y - piece->y0 + c->beside) * map_row_bytes(c->op);
}

/* The copy of the row above or below, of a plane of the piece. */
static char *copy_inside(const struct copies *c, long plane, int is_below)
{
    const struct piece *piece = &c->piece;
    long rows = 2 * (piece->y1 - piece->y0 + 2 * c->beside);
    rows += (plane - piece->plane) * (1 + c->beside) + is_below;
    return c->rows + rows * map_row_bytes(c->op);
}

/* Copies rows y0 ... y1 - 1 of a plane, as far as the map has them. */
static void copy_rows(const struct copies *c, char *to, long plane, int y0, int y1)
{
    size_t row = map_row_bytes(c->op);
    int first = y0 < 0 ? 0 : y0, past = least(y1, c->op->y);
    const char *from = (const char *)c->op->maps[0] + (plane * c->op->y + first) * row;
    if (first < past)
        memcpy(to + (first - y0) * row, from, (past - first) * row);
}

/* What a piece reads of its neighbours. */
static void copy_beside(const struct copies *c)
{
    const struct piece *piece = &c->piece;
    int y0 = piece->y0 - c->beside, y1 = piece->y1 + c->beside;
    if (piece->plane % c->op->x) /* not the first plane of a sample */
        copy_rows(c, copy_outside(c, 0, y0), piece->plane - 1, y0, y1);
    if (piece->past_plane % c->op->x)
        copy_rows(c, copy_outside(c, 1, y0), piece->past_plane, y0, y1);
    for (long plane = piece->plane; c->beside && plane < piece->past_plane; plane++) {
        copy_rows(c, copy_inside(c, plane, 0), plane, y0, piece->y0);
        copy_rows(c, copy_inside(c, plane, 1), plane, piece->y1, y1);
    }
}

/* The first map as row (x, y) is to be read from it: the copy where the map is overwritten by then,
   shifted so that the row is found at the voxel where the map would have it. */
static const void *map_in_place(const struct copies *c, const struct part *part, int x, int y)
{
    const struct piece *piece = &c->piece;
    long plane = (long)part->batch * c->op->x + x;
    const char *copy;
    if (plane < piece->plane || plane == piece->past_plane)
        copy = copy_outside(c, plane == piece->past_plane, y);
    else if (y < part->y0)
        copy = copy_inside(c, plane, 0);
    else if (y >= piece->y1)
        copy = copy_inside(c, plane, 1);
    else
        return c->op->maps[0];
    return (const void *)((uintptr_t)copy - (plane * c->op->y + y) * map_row_bytes(c->op));
}

/* Once row (x, y) is formed: the next part reads it after this one has overwritten it. */
static void keep_last_row(const struct copies *c, const struct part *part, int x, int y)
{
    const struct piece *piece = &c->piece;
    long plane = (long)part->batch * c->op->x + x;
    if (y == part->y1 - 1 && plane >= piece->plane && plane < piece->past_plane)
        copy_rows(c, copy_inside(c, plane, 0), plane, y, y + 1);
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
    for (int i = 0; i < op->batch * channels; i++) {
        int batch = i / channels, c = i % channels;
        const double *at = totals + (size_t)batch * 2 * width + c;
        double first = total(at, next, positions), second = total(at + width, next, positions);
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
