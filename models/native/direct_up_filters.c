/* Filter gradients of transposed convolutions of 2x2x2 of bfloat16 maps in AMX's tiles: sums over
   coarse positions, 32 in a product.

   A thread takes some rows of its piece at a time, the positions of one after those of the other. A
   target is a tap and a block of 16 outputs; what it sums over are every other voxel of a fine
   row. */
#include <unistd.h>
#include "positions.h"

/* Costs of pieces.h, about: positions whose products take as long as clearing and adding up sums;
   and forming a block of the gradient's four fine rows. */
enum { PRODUCTS_COST = 4, SUMS_POSITIONS = 200, FORM_FINE = 8 };

struct job {
    const struct operation *op;
    struct input values, gradient; /* of the tiles A and of the tiles B */
    struct cut cut;                /* of coarse rows, groups and blocks */
    int groups, blocks;            /* of 16 channels, of 16 outputs */
    int pitch;                     /* positions from row to row; even */
    int rows;                      /* that are taken at a time */
    int position_blocks;           /* of them: of 32 positions */
    size_t array_bytes;            /* of a group of values, or of a target */
    size_t line_values;            /* of a formed row */
    size_t thread_sums; /* floats of a position: [target][group][16 channels][16 outputs] */
    size_t kept, passing;
    float *filter_sums;
    int failed;
};

static struct cut cut_for(const struct operation *op, const struct job *j)
{
    struct work work = {
        .planes = rows_of_all(op),
        .rows = 1,
        .inputs = j->groups,
        .outputs = j->blocks,
        .unit = 1,
        .products = PRODUCTS_COST,
        .form_outputs = FORM_FINE,
        .sums = PRODUCTS_COST * SUMS_POSITIONS / op->z,
    };
    return cut_of(&work, op->threads);
}

/* memory_estimator/step/scratch.py has the bytes as a formula. */
static struct job job_of(const struct operation *op)
{
    struct job j = {.op = op};
    j.values = all_of((struct input){.channels = {op->channels[0]}, .maps = {op->maps[0]}});
    j.values.coefficients = op->coefficients;
    j.gradient = all_of((struct input){.channels = {op->outputs}, .maps = {op->others[0]}});
    j.groups = parts_of(op->channels[0], 16);
    j.blocks = parts_of(op->outputs, 16);
    j.pitch = round_up(op->z, 2);
    j.cut = cut_for(op, &j);

    int arrays = j.cut.inputs + 8 * j.cut.outputs;
    long cache = sysconf(_SC_LEVEL2_CACHE_SIZE), row_bytes = (long)arrays * 32 * j.pitch;
    long fitting = (cache > 0 ? cache : 1 << 20) * 5 / 8 / row_bytes;
    long rows = parts_of(ENOUGH_BLOCKS * 32, j.pitch);
    rows = rows < j.cut.planes ? rows : j.cut.planes;
    rows = rows < fitting ? rows : fitting;
    j.rows = rows < 1 ? 1 : (int)rows;
    j.position_blocks = parts_of(j.rows * j.pitch, 32);
    j.array_bytes = (size_t)j.position_blocks * TILE_BYTES;

    int widest = j.cut.inputs > 2 * j.cut.outputs ? j.cut.inputs : 2 * j.cut.outputs;
    j.line_values = ((size_t)j.pitch * 16 * widest + 31) / 32 * 32;
    j.kept = sizeof(float) * MOST_SUMS * TILE_FLOATS + sizeof(uint16_t) * j.line_values;
    j.kept += arrays * j.array_bytes;
    j.thread_sums = (size_t)8 * j.blocks * j.groups * TILE_FLOATS;
    j.passing = j.cut.positions * sizeof(float) * j.thread_sums;
    return j;
}

struct thread {
    const struct job *job;
    struct input values_of, gradient_of; /* the channels of the piece */
    int group, groups, block, blocks;    /* the first ones of the piece, and how many it has */
    float *sums;         /* of six tiles */
    uint16_t *line;      /* a row, formed */
    char *values;        /* [group][block of 32 positions][16 channels][32 positions] */
    char *gradients;     /* [target][pair of positions][16 outputs][2] */
    float *filter_sums;
};

/* Forms `z` voxels from `voxel` on, followed by zeros up to `voxels`. */
static void form_line(struct thread *t, const struct input *in, int width, int batch, size_t voxel,
                      int z, int voxels)
{
    form_bfloat16_row(t->line, width, in, batch, voxel, z);
    memset(t->line + (size_t)z * width, 0, sizeof(uint16_t) * (voxels - z) * width);
}

/* Row `row` of those that are taken at a time: coarse row (x, y) and the four fine ones. */
static void form_rows(struct thread *t, int row, int batch, int x, int y)
{
    const struct job *j = t->job;
    const struct operation *op = j->op;
    int pairs = j->pitch / 2, width = 16 * t->groups, output_width = 16 * t->blocks;
    size_t at = (size_t)row * pairs * 64;
    form_line(t, &t->values_of, width, batch, voxel_of(op, 1, batch, x, y), op->z, j->pitch);
    for (int group = 0; group < t->groups; group++)
        store_pairs(t->values + group * j->array_bytes + at, t->line + 16 * group, width, pairs);
    for (int tap = 0; tap < 8; tap++) {
        size_t voxel = voxel_of(op, 2, batch, 2 * x + tap / 4, 2 * y + tap / 2 % 2);
        const uint16_t *line = t->line + tap % 2 * output_width;
        if (tap % 2 == 0)
            form_line(t, &t->gradient_of, output_width, batch, voxel, 2 * op->z, 2 * j->pitch);
        for (int block = 0; block < t->blocks; block++) {
            char *target = t->gradients + (tap * t->blocks + block) * j->array_bytes;
            store_pairs(target + at, line + 16 * block, 2 * output_width, pairs);
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
    int tiles = parts_of(rows * j->pitch, 32), targets = 8 * t->blocks;
    size_t formed = (size_t)rows * j->pitch * 32;
    for (int group = 0; group < t->groups; group++) {
        char *values = t->values + group * j->array_bytes;
        memset(values + formed, 0, (size_t)tiles * TILE_BYTES - formed);
        for (int tile = 0; tile < tiles; tile++)
            transpose_tile(values + (size_t)tile * TILE_BYTES);
        for (int target = 0; target < targets; target += MOST_SUMS) {
            int count = least(MOST_SUMS, targets - target);
            const char *left[1] = {values}, *right[1][MOST_SUMS] = {{0}};
            for (int i = 0; i < count; i++)
                right[0][i] = t->gradients + (target + i) * j->array_bytes;
            correlate(count, t->sums, 1, tiles, left, (const char *const (*)[MOST_SUMS])right);
            for (int i = 0; i < count; i++)
                add_tile(panel_of(t, target + i, group), t->sums + i * TILE_FLOATS);
        }
    }
}

static void correlate_piece(void *argument, int thread, int threads)
{
    struct job *j = argument;
    const struct operation *op = j->op;
    char *memory = thread_memory(thread, j->kept);
    if (!memory) {
        j->failed = 1;
        return;
    }
    struct thread t = {.job = j, .sums = (float *)memory};
    t.line = (uint16_t *)(t.sums + MOST_SUMS * TILE_FLOATS);
    t.values = (char *)(t.line + j->line_values);
    struct piece piece = piece_of(&j->cut, thread);
    t.values_of = blocks_of(&j->values, piece.input, piece.past_input);
    t.gradient_of = blocks_of(&j->gradient, piece.output, piece.past_output);
    t.group = piece.input;
    t.groups = piece.past_input - piece.input;
    t.block = piece.output;
    t.blocks = piece.past_output - piece.output;
    t.gradients = t.values + t.groups * j->array_bytes;
    t.filter_sums = j->filter_sums + piece.position * j->thread_sums;
    for (int target = 0; target < 8 * t.blocks; target++)
        memset(panel_of(&t, target, 0), 0, sizeof(float) * TILE_FLOATS * t.groups);
    /* What follows the rows is multiplied by zeros. */
    memset(t.gradients, 0, 8 * t.blocks * j->array_bytes);
    tile_config(16, 16);
    long row = piece.plane;
    while (row < piece.past_plane) {
        int rows = least(j->rows, piece.past_plane - row);
        for (int i = 0; i < rows; i++, row++) {
            long plane = row / op->y;
            form_rows(&t, i, (int)(plane / op->x), (int)(plane % op->x), (int)(row % op->y));
        }
        correlate_rows(&t, rows);
    }
    tile_release();
}

/* Adds the positions' sums in their order: a thread those of its share of targets and groups. */
static void write_filter_gradient(void *argument, int thread, int threads)
{
    const struct job *j = argument;
    const struct operation *op = j->op;
    long all = 8L * j->blocks * j->groups, past = share(all, thread + 1, threads);
    for (long panel = share(all, thread, threads); panel < past; panel++) {
        int target = (int)(panel / j->groups), group = (int)(panel % j->groups);
        const float *from = j->filter_sums + panel * TILE_FLOATS;
        double sums[TILE_FLOATS] = {0};
        for (int each = 0; each < j->cut.positions; each++, from += j->thread_sums)
            for (int i = 0; i < TILE_FLOATS; i++)
                sums[i] += from[i];
        int tap = target / j->blocks, first = target % j->blocks * 16;
        for (int o = 0; o < least(16, op->outputs - first); o++) {
            size_t at = ((size_t)tap * op->outputs + first + o) * op->channels[0] + 16 * group;
            for (int c = 0; c < least(16, op->channels[0] - 16 * group); c++)
                op->filter_gradient[at + c] = (float)sums[16 * c + o];
        }
    }
}

int DIRECT_UP_FILTERS(const struct operation *op)
{
    struct job j = job_of(op);
    if (asks_for_scratch(op, j.cut.pieces, j.kept, j.passing))
        return 0;
    j.filter_sums = passing_memory(j.passing);
    if (!j.filter_sums)
        return -1;
    run_on_threads(j.cut.pieces, correlate_piece, &j);
    if (j.failed)
        return -1;
    run_on_threads(op->threads, write_filter_gradient, &j);
    return 0;
}
