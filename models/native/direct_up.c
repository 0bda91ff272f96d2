/* Transposed convolutions of bfloat16 maps in AMX's tiles, of 2x2x2 or of 1 along some axes, and
   their input gradients; and projections, which are of 1x1x1.

   Both go row by row of the coarse grid. UP_CONVOLVE: a line of a tile A is a formed voxel, and
   makes a pair of voxels of each of the four fine rows. UP_INPUT_GRADIENT: a line is a pair of
   voxels of a fine row, and the four fine rows are the taps that make one voxel. Along an axis of 1
   there are half as many rows, or one voxel in place of a pair.

   PROJECT has weights as in float32: each is the sum of three of bfloat16, which are three taps of
   the same voxel. Its sums begin with the bias. */
#include "direct.h"

struct job {
    const struct operation *op;
    struct input input; /* what lines are formed of */
    struct made made;   /* without what belongs to a sample */
    struct products products;
    struct cut cut;      /* of coarse rows */
    int is_projection;
    int finer[3];        /* voxels of the finer grid for one of the coarser */
    int rows, edge;      /* that are formed for a coarse row; voxels of them for one of it */
    int fine_rows;       /* over a coarse one */
    int weight_rows;     /* of packed filters: fine rows, or parts of the weights */
    int width;           /* values of a formed voxel */
    int voxels, blocks;  /* that a line makes; of 16 channels of the map that is made */
    int tiles, lines;    /* of a row: tiles A along z, and lines in each */
    size_t formed_bytes; /* of a formed row */
    size_t column_bytes; /* of packed filters: [weight row][step][pair of values of K][16][2] */
    size_t weight_bytes, bias_bytes, position_totals, kept, passing;
    char *weights;
    float *bias; /* [block][16]; of PROJECT */
    double *totals; /* of every position: [batch][2][width of the map that is made] */
};

static struct job job_of(const struct operation *op)
{
    struct job j = {.op = op, .cut = cut_of_rows(rows_of_all(op), op->threads)};
    struct products *p = &j.products;
    size_t coarse = (size_t)op->batch * op->x * op->y * op->z;
    j.is_projection = op->kind == PROJECT;
    for (int axis = 0; axis < 3; axis++)
        j.finer[axis] = j.is_projection ? 1 : op->finer[axis];
    int edge = j.finer[2];
    j.fine_rows = j.finer[0] * j.finer[1];
    j.weight_rows = j.is_projection ? WEIGHT_PARTS : j.fine_rows;
    j.made.map = op->map;
    if (op->kind != UP_INPUT_GRADIENT) {
        j.input = (struct input){.channels = {op->channels[0]}, .maps = {op->maps[0]}};
        j.input.coefficients = op->coefficients;
        j.rows = 1;
        j.edge = 1;
        j.width = round_up(op->channels[0], 32);
        j.voxels = edge;
        j.made.channels = op->outputs;
        j.made.bytes = coarse * j.fine_rows * edge * op->outputs * 2;
        j.made.adds = op->others[0] != NULL;
        j.made.other = op->others[0];
        p->taps = 1;
        p->steps = j.width / 32;
    } else {
        j.input = (struct input){.channels = {op->outputs}, .maps = {op->others[0]}};
        j.rows = j.fine_rows;
        j.edge = edge;
        j.width = round_up(op->outputs, 32 / edge);
        j.voxels = 1;
        j.made.channels = op->channels[0];
        j.made.bytes = coarse * op->channels[0] * 2;
        j.made.sums = op->sums_to ? NORM_SUMS : NO_SUMS;
        j.made.other = op->maps[0];
        p->taps = j.fine_rows;
        p->steps = edge * j.width / 32;
    }
    p->depth = 16;
    if (j.is_projection) {
        p->taps = WEIGHT_PARTS;
        if (op->channels[0] <= 16) {
            j.width = 16;
            p->depth = 8;
        }
    }
    j.input = all_of(j.input);
    j.made.width = round_up(j.made.channels, 16);
    j.blocks = j.made.width / 16;
    j.tiles = ceil_div(op->z, TILE_LINES);
    j.lines = ceil_div(op->z, j.tiles);
    p->line_bytes = (size_t)4 * p->depth * p->steps;
    p->row_bytes = j.lines * p->line_bytes;
    j.formed_bytes = j.tiles * p->row_bytes;
    j.column_bytes = (size_t)j.weight_rows * p->steps * p->depth * LINE_BYTES;
    j.kept = sizeof(float) * MOST_TILE_ROWS * TILE_FLOATS + j.rows * j.formed_bytes;
    j.weight_bytes = j.blocks * j.voxels * j.column_bytes;
    /* A cache line between threads. */
    j.position_totals = (size_t)op->batch * 2 * j.made.width + 16;
    j.bias_bytes = j.is_projection ? (size_t)j.blocks * LINE_BYTES : 0;
    j.passing = j.weight_bytes + j.bias_bytes + j.cut.pieces * sizeof(double) * j.position_totals;
    return j;
}

struct thread {
    const struct job *job;
    struct made made;
    float *sums;  /* of up to four tiles */
    char *formed; /* rows */
};

static const char *weights_of(const struct job *j, struct column column, int row)
{
    size_t of_row = (size_t)j->products.steps * j->products.depth * LINE_BYTES;
    return j->weights + (column.block * j->voxels + column.voxel) * j->column_bytes + row * of_row;
}

/* From the formed rows the row of the map that begins at `voxel`; of UP_CONVOLVE, fine row
   `row`. */
static void make_row(struct thread *t, size_t voxel, int row)
{
    const struct job *j = t->job;
    for (int pass = 0; pass < passes_of(j->voxels, j->blocks); pass++) {
        struct column columns[2];
        int count = columns_of(columns, j->voxels, 0, j->blocks, pass);
        struct factors factors = {.of = &j->products, .columns = count};
        factors.weights[0] = weights_of(j, columns[0], row);
        factors.weights[1] = weights_of(j, columns[count - 1], row);
        if (j->is_projection)
            for (int i = 0; i < count; i++)
                factors.bias[i] = j->bias + 16 * columns[i].block;
        struct finished f = finished_of(columns, count, j->made.channels);
        for (int tile = 0; tile < j->tiles; tile += f.rows) {
            f.rows = least(MOST_TILE_ROWS / count, j->tiles - tile);
            factors.rows = f.rows;
            f.ahead = (size_t)f.rows * j->lines * j->voxels * j->made.channels;
            for (int tap = 0; tap < j->products.taps; tap++) {
                size_t row = j->is_projection ? 0 : tap;
                factors.first[tap] =
                    t->formed + row * j->formed_bytes + tile * j->products.row_bytes;
            }
            multiply(&factors, t->sums);
            for (int i = 0; i < f.rows; i++) {
                const float *sums = t->sums + i * count * TILE_FLOATS;
                int z0 = (tile + i) * j->lines;
                int left = least(j->op->z - z0, j->lines);
                f.spans[i] = spans_of(sums, columns, count, voxel + z0 * j->voxels,
                                      left * j->voxels, j->voxels, j->made.channels);
            }
            finish(&t->made, &f);
        }
    }
}

/* What is made of coarse row (x, y). */
static void make_rows(struct thread *t, int batch, int x, int y)
{
    const struct job *j = t->job;
    const struct operation *op = j->op;
    size_t coarse = voxel_of(op, batch, x, y);
    int is_up = op->kind != UP_INPUT_GRADIENT;
    for (int i = 0; i < j->rows && WITH_VECTORS; i++) {
        size_t voxel = is_up ? coarse : finer_voxel(op, j->finer, batch, x, y, i);
        uint16_t *to = (uint16_t *)(t->formed + i * j->formed_bytes);
        form_bfloat16_row(to, j->width, &j->input, batch, voxel, j->edge * op->z);
    }
    if (!is_up) {
        make_row(t, coarse, 0);
        return;
    }
    for (int i = 0; i < j->fine_rows; i++)
        make_row(t, finer_voxel(op, j->finer, batch, x, y, i), i);
}

static void up_piece(struct job *j, const struct piece *piece, char *memory)
{
    const struct operation *op = j->op;
    struct thread t = {.job = j, .made = j->made, .sums = (float *)memory};
    t.formed = (char *)(t.sums + MOST_TILE_ROWS * TILE_FLOATS);
    double *totals = j->totals + piece->position * j->position_totals;
    memset(totals, 0, j->position_totals * sizeof(double));
    memset(t.formed, 0, j->rows * j->formed_bytes); /* voxels and channels that are not there */
    tile_config(j->lines, j->products.depth);
    for (long at = piece->plane; at < piece->past_plane; at++) {
        struct row row = row_of(op, at);
        t.made.totals = totals + (size_t)row.batch * 2 * t.made.width;
        if (op->coefficients)
            t.made.norm = op->coefficients + (size_t)row.batch * COEFFICIENTS * op->channels[0];
        make_rows(&t, row.batch, row.x, row.y);
    }
    _mm_sfence(); /* after values that were written past the caches */
    tile_release();
}

/* Part `part` of a weight: what the parts before it, in bfloat16, leave of it. */
static float part_of(float weight, int part)
{
    for (int i = 0; i < part; i++)
        weight -= from_bfloat16(to_bfloat16(weight + (vec){0}))[0];
    return weight;
}

/* Of a projection's value k, for n outputs from `first` on. Filters are [channels][outputs]. */
static void weights_of_part(float *to, const struct operation *op, int part, int k, int first,
                            int n)
{
    const float *filters = op->filters + (size_t)k * op->outputs + first;
    for (int o = 0; o < n && k < op->channels[0]; o++)
        to[o] = part_of(filters[o], part);
}

/* The weights of value k of a line for up to 16 channels of the map from `first` on, of a fine row
   and, of UP_CONVOLVE, a voxel of it; `to` keeps its zeros where there are none. Filters are
   [fine row][voxel][outputs][channels]. */
static void weights_at(float *to, const struct job *j, int row, int voxel, int k, int first)
{
    int outputs = j->op->outputs;
    int channels = j->op->channels[0];
    int n = least(16, j->made.channels - first);
    int edge = j->finer[2];
    const float *filters = j->op->filters;
    if (j->is_projection) {
        weights_of_part(to, j->op, row, k, first, n);
        return;
    }
    if (j->op->kind == UP_CONVOLVE) {
        size_t at = ((size_t)(edge * row + voxel) * outputs + first) * channels + k;
        for (int o = 0; o < n && k < channels; o++)
            to[o] = filters[at + (size_t)o * channels];
        return;
    }
    int output = k % j->width;
    size_t at = ((size_t)(edge * row + k / j->width) * outputs + output) * channels + first;
    if (output < outputs)
        memcpy(to, filters + at, sizeof(float) * n);
}

/* [block][voxel][weight row][pair of values of K][16][2]: a thread packs its share of the pairs. */
static void pack_weights(void *argument, int thread, int threads)
{
    const struct job *j = argument;
    int pairs = j->products.depth * j->products.steps;
    int rows = j->weight_rows;
    long all = (long)rows * j->blocks * j->voxels * pairs;
    for (long at = share(all, thread, threads); at < share(all, thread + 1, threads); at++) {
        int pair = (int)(at % pairs);
        int row = (int)(at / pairs % rows);
        int column = (int)(at / pairs / rows);
        int block = column / j->voxels;
        unit *to = (unit *)(j->weights + at * 64);
        float both[2][16] = {{0}};
        for (int i = 0; i < 2; i++)
            weights_at(both[i], j, row, column % j->voxels, 2 * pair + i, 16 * block);
        for (int n = 0; n < 16; n += LANES)
            store_units(to + n, load(both[0] + n), load(both[1] + n));
    }
}

static void place(struct job *j, char *memory)
{
    j->weights = memory;
    j->bias = (float *)(memory + j->weight_bytes);
    j->totals = (double *)(memory + j->weight_bytes + j->bias_bytes);
    if (!j->is_projection)
        return;
    memset(j->bias, 0, j->bias_bytes);
    memcpy(j->bias, j->op->bias, sizeof(float) * j->op->outputs);
}

static void write_map_sums(struct job *j)
{
    if (j->op->sums_to)
        write_sums(j->op, NORM_SUMS, j->totals, j->position_totals, j->made.channels, j->made.width,
                   j->cut.positions);
}

int DIRECT_UP(const struct operation *op)
{
    struct job j = job_of(op);
    struct steps steps = {
        .op = op,
        .cut = &j.cut,
        .kept = j.kept,
        .passing = j.passing,
        .place = place,
        .pack = pack_weights,
        .compute = up_piece,
        .write = write_map_sums,
    };
    return run_pieces(&j, &steps);
}
