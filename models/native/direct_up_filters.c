/* Filter gradients of transposed convolutions of bfloat16 maps in AMX's tiles, of 2x2x2 or of 1
   along some axes: sums over coarse positions, 32 in a product.

   A thread takes some rows of its piece at a time, the positions of one after those of the other. A
   target is a tap and a block of 16 outputs; what it sums over are every other voxel of a fine row,
   or all if the taps have 1 along z. */
#include "positions.h"

struct job {
    const struct operation *op;
    struct input values, gradient; /* of the tiles A and of the tiles B */
    struct cut cut;                /* of coarse rows, groups and blocks */
    int groups, blocks;            /* of 16 channels, of 16 outputs */
    int taps;
    int pitch;                     /* positions from row to row; even */
    int rows;                      /* that are taken at a time */
    int steps;                     /* of them: of 32 positions */
    size_t array_bytes;            /* of a group of values, or of a target */
    size_t row_values;             /* of a formed row */
    size_t position_sums; /* floats of a position: [target][group][16 channels][16 outputs] */
    size_t kept, passing;
    float *filter_sums; /* of every position */
};

static struct cut cut_for(const struct operation *op, const struct job *j)
{
    struct work work = {
        .planes = rows_of_all(op),
        .rows = 1,
        .inputs = j->groups,
        .outputs = j->blocks,
        .unit = 1,
        .products = UP_DIRECT_PRODUCTS_COST,
        .form_outputs = UP_FORM_FINE,
        .sums = UP_DIRECT_PRODUCTS_COST * DIRECT_SUMS_POSITIONS / op->z,
    };
    return cut_of(&work, op->threads);
}

static struct job job_of(const struct operation *op)
{
    struct job j = {.op = op};
    j.values = all_of((struct input){.channels = {op->channels[0]}, .maps = {op->maps[0]}});
    j.values.coefficients = op->coefficients;
    j.gradient = all_of((struct input){.channels = {op->outputs}, .maps = {op->others[0]}});
    j.groups = ceil_div(op->channels[0], 16);
    j.blocks = ceil_div(op->outputs, 16);
    j.taps = op->finer[0] * op->finer[1] * op->finer[2];
    j.pitch = round_up(op->z, 2);
    j.cut = cut_for(op, &j);

    int arrays = j.cut.inputs + j.taps * j.cut.outputs;
    long row_bytes = (long)arrays * 32 * j.pitch;
    long fitting = l2_budget(op, POSITIONS_PERMILLE) / row_bytes;
    long rows = ceil_div(ENOUGH_STEPS * 32, j.pitch);
    rows = rows < j.cut.planes ? rows : j.cut.planes;
    rows = rows < fitting ? rows : fitting;
    j.rows = rows < 1 ? 1 : (int)rows;
    j.steps = ceil_div(j.rows * j.pitch, 32);
    j.array_bytes = (size_t)j.steps * TILE_BYTES;

    int fine = op->finer[2] * j.cut.outputs;
    int widest = j.cut.inputs > fine ? j.cut.inputs : fine;
    j.row_values = ((size_t)j.pitch * 16 * widest + 31) / 32 * 32;
    j.kept = sizeof(float) * MOST_TARGETS * TILE_FLOATS + sizeof(uint16_t) * j.row_values;
    j.kept += arrays * j.array_bytes;
    j.position_sums = (size_t)j.taps * j.blocks * j.groups * TILE_FLOATS;
    j.passing = j.cut.positions * sizeof(float) * j.position_sums;
    return j;
}

struct thread {
    const struct job *job;
    struct input values_of, gradient_of; /* the channels of the piece */
    int group, groups, block, blocks;    /* the first ones of the piece, and how many it has */
    float *sums;                         /* of six tiles */
    uint16_t *formed;                    /* a row, formed */
    char *values;                        /* [group][step][16 channels][32 positions] */
    char *gradients;                     /* [target][pair of positions][16 outputs][2] */
    float *filter_sums;
};

/* Forms `z` voxels from `voxel` on, followed by zeros up to `voxels`. */
static void form_row_of(struct thread *t, const struct input *in, int width, int batch,
                        size_t voxel, int z, int voxels)
{
    form_bfloat16_row(t->formed, width, in, batch, voxel, z);
    memset(t->formed + (size_t)z * width, 0, sizeof(uint16_t) * (voxels - z) * width);
}

/* Row `row` of those that are taken at a time: coarse row (x, y) and the fine ones over it. */
static void form_rows(struct thread *t, int row, int batch, int x, int y)
{
    const struct job *j = t->job;
    const struct operation *op = j->op;
    int pairs = j->pitch / 2;
    int width = 16 * t->groups;
    int output_width = 16 * t->blocks;
    int edge = op->finer[2];
    size_t at = (size_t)row * pairs * 64;
    if (!WITH_VECTORS)
        return;
    form_row_of(t, &t->values_of, width, batch, voxel_of(op, batch, x, y), op->z, j->pitch);
    for (int group = 0; group < t->groups; group++)
        store_pairs(t->values + group * j->array_bytes + at, t->formed + 16 * group, width, pairs);
    for (int tap = 0; tap < j->taps; tap++) {
        size_t voxel = finer_voxel(op, op->finer, batch, x, y, tap / edge);
        const uint16_t *formed = t->formed + tap % edge * output_width;
        if (tap % edge == 0)
            form_row_of(t, &t->gradient_of, output_width, batch, voxel, edge * op->z,
                        edge * j->pitch);
        for (int block = 0; block < t->blocks; block++) {
            char *target = t->gradients + (tap * t->blocks + block) * j->array_bytes;
            store_pairs(target + at, formed + 16 * block, edge * output_width, pairs);
        }
    }
}

/* The sums of a target and a group of the piece. */
static float *panel_of(const struct thread *t, int target, int group)
{
    size_t of_all = (size_t)target / t->blocks * t->job->blocks + t->block + target % t->blocks;
    return t->filter_sums + (of_all * t->job->groups + t->group + group) * TILE_FLOATS;
}

/* Adds the products of `rows` formed rows to the piece's sums. */
static void correlate_rows(struct thread *t, int rows)
{
    const struct job *j = t->job;
    int tiles = ceil_div(rows * j->pitch, 32);
    int targets = j->taps * t->blocks;
    size_t formed = (size_t)rows * j->pitch * 32;
    for (int group = 0; group < t->groups; group++) {
        char *values = t->values + group * j->array_bytes;
        memset(values + formed, 0, (size_t)tiles * TILE_BYTES - formed);
        for (int tile = 0; tile < tiles && WITH_VECTORS; tile++)
            transpose_tile(values + (size_t)tile * TILE_BYTES);
        for (int target = 0; target < targets; target += MOST_TARGETS) {
            int count = least(MOST_TARGETS, targets - target);
            const char *left[1] = {values};
            const char *right[1][MOST_TARGETS] = {{0}};
            for (int i = 0; i < count; i++)
                right[0][i] = t->gradients + (target + i) * j->array_bytes;
            correlate(count, t->sums, 1, tiles, left, (const char *const(*)[MOST_TARGETS])right);
            for (int i = 0; i < count; i++)
                add_tile(panel_of(t, target + i, group), t->sums + i * TILE_FLOATS);
        }
    }
}

static void correlate_piece(struct job *j, const struct piece *piece, char *memory)
{
    const struct operation *op = j->op;
    struct thread t = {.job = j, .sums = (float *)memory};
    t.formed = (uint16_t *)(t.sums + MOST_TARGETS * TILE_FLOATS);
    t.values = (char *)(t.formed + j->row_values);
    t.values_of = blocks_of(&j->values, piece->input, piece->past_input);
    t.gradient_of = blocks_of(&j->gradient, piece->output, piece->past_output);
    t.group = piece->input;
    t.groups = piece->past_input - piece->input;
    t.block = piece->output;
    t.blocks = piece->past_output - piece->output;
    t.gradients = t.values + t.groups * j->array_bytes;
    t.filter_sums = j->filter_sums + piece->position * j->position_sums;
    for (int target = 0; target < j->taps * t.blocks; target++)
        memset(panel_of(&t, target, 0), 0, sizeof(float) * TILE_FLOATS * t.groups);
    /* What follows the rows is multiplied by zeros. */
    memset(t.gradients, 0, j->taps * t.blocks * j->array_bytes);
    tile_config(16, 16);
    long number = piece->plane;
    while (number < piece->past_plane) {
        int rows = least(j->rows, piece->past_plane - number);
        for (int i = 0; i < rows; i++, number++) {
            struct row row = row_of(op, number);
            form_rows(&t, i, row.batch, row.x, row.y);
        }
        correlate_rows(&t, rows);
    }
    tile_release();
}

/* Writes the sums [16 channels][16 outputs] of a tap, a block and a group. */
static void write_tile(const struct job *j, const double *sums, int tap, int block, int group)
{
    const struct operation *op = j->op;
    int outputs = least(16, op->outputs - 16 * block);
    int channels = least(16, op->channels[0] - 16 * group);
    for (int o = 0; o < outputs; o++) {
        size_t output = (size_t)tap * op->outputs + 16 * block + o;
        float *to = op->filter_gradient + output * op->channels[0] + 16 * group;
        for (int c = 0; c < channels; c++)
            to[c] = (float)sums[16 * c + o];
    }
}

/* Adds up what the positions have: a thread its share of all tiles. */
static void write_filter_gradient(void *argument, int thread, int threads)
{
    const struct job *j = argument;
    long all = (long)j->taps * j->blocks * j->groups;
    for (long tile = share(all, thread, threads); tile < share(all, thread + 1, threads); tile++) {
        double sums[TILE_FLOATS];
        add_positions(sums, j->filter_sums, j->position_sums, j->cut.positions, tile);
        int group = (int)(tile % j->groups);
        int block = (int)(tile / j->groups % j->blocks);
        int tap = (int)(tile / j->groups / j->blocks);
        write_tile(j, sums, tap, block, group);
    }
}

static void place(struct job *j, char *memory) { j->filter_sums = (float *)memory; }

int DIRECT_UP_FILTERS(const struct operation *op)
{
    struct job j = job_of(op);
    struct steps steps = {
        .op = op,
        .cut = &j.cut,
        .kept = j.kept,
        .passing = j.passing,
        .place = place,
        .compute = correlate_piece,
        .add_up = write_filter_gradient,
    };
    return run_pieces(&j, &steps);
}
