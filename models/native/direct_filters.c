/* Filter gradients of bfloat16 maps in AMX's tiles: sums over positions, 32 in a product. docs/kernels.md draws the tiles; what
   is drawn there has the same names here.

   A thread takes a few planes of a slab at a time. Their rows follow each other as one line of positions with zeros between
   rows, so that blocks of 32 positions need not end with a row, and a tap is a shift of the line. Tile sums are of float32, over
   these planes; they are added in float32 over a slab, and in float64 over slabs. */
#include <unistd.h>
#include "positions.h"

enum { MOST_PLANES = 8 };

/* What the threads of an operation share, and how it is cut. */
struct job {
    const struct operation *op;
    struct input values, gradient; /* of the tiles B and of the tiles A */
    int slabs;
    int inputs, outputs;          /* channels */
    int width, output_width;      /* of a voxel in a row: of values 4, 8 or whole 16; of outputs whole 16 */
    int groups, blocks;           /* of 16 values, of 16 outputs */
    int shifts;                   /* tiles B that make the three taps along z: where few channels fit twice or more, fewer */
    int copies;                   /* of the lines of values: pairs from uneven positions, and where three shifts are, even ones */
    int pitch;                    /* positions from row to row; even */
    int y_rows, planes;           /* that are taken at a time */
    int position_blocks;          /* of such a plane: of 32 positions */
    size_t copy_bytes, values_bytes, gradient_bytes; /* of a group's copy; of a plane of values, of one of gradients */
    size_t line_values;           /* of a formed row with its zeros */
    size_t thread_sums;           /* floats of a slab: [target][group][block][16 outputs][16 values] */
    size_t kept, passing;
    float *filter_sums;
    int failed;
};

/* memory_estimator/step/scratch.py has the bytes as a formula. */
static struct job job_of(const struct operation *op)
{
    struct job j = {.op = op, .inputs = op->channels[0] + op->channels[1], .outputs = op->outputs};
    j.values = (struct input){{op->channels[0], op->channels[1]}, {op->maps[0], op->maps[1]}, .coefficients = op->coefficients};
    j.gradient = (struct input){{op->outputs}, {op->others[0]}, op->others[1], op->other_coefficients};
    j.slabs = slabs_of(op);
    j.width = width_of(j.inputs);
    j.output_width = round_up(j.outputs, 16);
    j.groups = parts_of(j.width, 16);
    j.blocks = j.output_width / 16;
    j.shifts = j.width < 16 ? j.width / 4 : 3;
    j.copies = j.width < 16 ? 1 : 2;
    j.pitch = round_up(op->z + 1, 2);

    /* Two planes of values more than of gradients; of values a row more on each side, and a line that the last shift reads. */
    long cache = sysconf(_SC_LEVEL2_CACHE_SIZE);
    long budget = (cache > 0 ? cache : 1 << 20) * 5 / 8, arrays = j.groups * j.copies;
    long most_blocks = (budget - 3 * arrays * 64 * (j.pitch + 1)) / (TILE_BYTES * (3 * arrays + j.blocks));
    long rows = most_blocks * 32 / j.pitch;
    int most = rows < 1 ? 1 : rows < op->y ? (int)rows : op->y;
    j.y_rows = parts_of(op->y, parts_of(op->y, most));
    j.position_blocks = parts_of(j.y_rows * j.pitch, 32);
    j.copy_bytes = 64 * ((size_t)j.pitch + 16 * (size_t)j.position_blocks + 1);
    j.values_bytes = arrays * j.copy_bytes;
    j.gradient_bytes = (size_t)TILE_BYTES * j.blocks * j.position_blocks;
    long planes = (budget - 2 * (long)j.values_bytes) / (long)(j.values_bytes + j.gradient_bytes);
    int enough = least(MOST_PLANES, parts_of(ENOUGH_BLOCKS, j.position_blocks));
    enough = least(enough, parts_of(op->batch * op->x, j.slabs));
    j.planes = planes < 1 ? 1 : planes < enough ? (int)planes : enough;

    int wide = j.width > j.output_width ? j.width : j.output_width;
    j.line_values = round_up((j.pitch + 6) * wide, 32); /* 4 voxels of zeros or more follow a row: lines of few channels reach on */
    j.kept = sizeof(float) * MOST_SUMS * TILE_FLOATS + sizeof(uint16_t) * j.line_values;
    j.kept += (j.planes + 2) * j.values_bytes + j.planes * j.gradient_bytes;
    j.thread_sums = (size_t)9 * j.shifts * j.groups * j.blocks * TILE_FLOATS;
    j.passing = j.slabs * sizeof(float) * j.thread_sums;
    return j;
}

struct thread {
    const struct job *job;
    struct part part;
    float *sums;         /* of six tiles */
    uint16_t *line;      /* a row, formed */
    char *values;        /* a ring of planes: [plane][group][copy][pair of positions][16 values][2] */
    char *gradients;     /* [plane][block][block of 32 positions][16 outputs][32 positions] */
    float *filter_sums;
};

/* --- Forming --- */

static char *values_plane(const struct thread *t, int x)
{
    return t->values + (x + 1) % (t->job->planes + 2) * t->job->values_bytes;
}

/* Row (x, y) of a map into t->line, after a voxel of zeros and followed by zeros; NULL outside the map. */
static const uint16_t *formed_line(struct thread *t, const struct input *in, int width, int x, int y)
{
    const struct operation *op = t->job->op;
    uint16_t *line = t->line + width;
    if (x < 0 || x >= op->x || y < 0 || y >= op->y)
        return NULL;
    memset(t->line, 0, sizeof(uint16_t) * width);
    form_bfloat16_row(line, width, in, t->part.batch, voxel_of(op, 1, t->part.batch, x, y), op->z);
    memset(line + (size_t)op->z * width, 0, sizeof(uint16_t) * (t->job->pitch + 4 - op->z) * width);
    return line;
}

/* Rows y0 - 1 ... y1 of a plane of values. A copy's pair p begins with position 2 p - 1, or 2 p in the second copy. */
static void form_values(struct thread *t, int x)
{
    const struct job *j = t->job;
    size_t row_bytes = (size_t)j->pitch / 2 * 64;
    for (int y = t->part.y0 - 1; y <= t->part.y1; y++) {
        const uint16_t *line = formed_line(t, &j->values, j->width, x, y);
        char *to = values_plane(t, x) + (y - t->part.y0 + 1) * row_bytes;
        for (int i = 0; i < j->groups * j->copies; i++, to += j->copy_bytes)
            if (line)
                store_pairs(to, line + i / j->copies * 16 + (i % j->copies - 1) * j->width, j->width, j->pitch / 2);
            else
                memset(to, 0, row_bytes);
    }
}

/* Rows y0 ... y1 - 1 of plane `number` of gradients. */
static void form_gradients(struct thread *t, int x, int number)
{
    const struct job *j = t->job;
    int rows = t->part.y1 - t->part.y0, tiles = parts_of(rows * j->pitch, 32);
    size_t row_bytes = (size_t)j->pitch / 2 * 64, block_bytes = (size_t)TILE_BYTES * j->position_blocks;
    char *plane = t->gradients + number * j->gradient_bytes;
    for (int row = 0; row < rows; row++) {
        const uint16_t *line = formed_line(t, &j->gradient, j->output_width, x, t->part.y0 + row);
        for (int block = 0; block < j->blocks; block++)
            store_pairs(plane + block * block_bytes + row * row_bytes, line + 16 * block, j->output_width, j->pitch / 2);
    }
    for (int block = 0; block < j->blocks; block++) {
        char *tile = plane + block * block_bytes;
        memset(tile + rows * row_bytes, 0, (size_t)TILE_BYTES * tiles - rows * row_bytes);
        for (int i = 0; i < tiles; i++)
            transpose_tile(tile + (size_t)i * TILE_BYTES);
    }
}

/* --- Products --- */

/* The tiles B of a target, a tap (x, y) and a shift along z, for the gradients of plane x. */
static const char *values_of(const struct thread *t, int target, int group, int x)
{
    const struct job *j = t->job;
    int tap = target / j->shifts, shift = target % j->shifts;
    int is_even = j->shifts == 3 && shift == 1, line = j->shifts == 3 ? shift / 2 : shift;
    const char *plane = values_plane(t, x + tap / 3 - 1) + (group * j->copies + is_even) * j->copy_bytes;
    return plane + ((size_t)(tap % 3) * j->pitch / 2 + line) * 64;
}

/* Adds the products of planes x ... x + planes - 1 to the slab's sums. */
static void correlate_planes(struct thread *t, int x, int planes)
{
    const struct job *j = t->job;
    int tiles = parts_of((t->part.y1 - t->part.y0) * j->pitch, 32), targets = 9 * j->shifts;
    for (int group = 0; group < j->groups; group++)
        for (int block = 0; block < j->blocks; block++)
            for (int target = 0; target < targets; target += MOST_SUMS) {
                const char *gradients[MOST_PLANES], *values[MOST_PLANES][MOST_SUMS] = {{0}};
                int count = least(MOST_SUMS, targets - target);
                for (int plane = 0; plane < planes; plane++) {
                    gradients[plane] = t->gradients + plane * j->gradient_bytes + (size_t)block * j->position_blocks * TILE_BYTES;
                    for (int i = 0; i < count; i++)
                        values[plane][i] = values_of(t, target + i, group, x + plane);
                }
                correlate(count, t->sums, planes, tiles, gradients, (const char *const (*)[MOST_SUMS])values);
                for (int i = 0; i < count; i++) {
                    size_t panel = ((size_t)target + i) * j->groups + group;
                    float *to = t->filter_sums + (panel * j->blocks + block) * TILE_FLOATS;
                    add_tile(to, t->sums + i * TILE_FLOATS);
                }
            }
}

/* --- An operation --- */

static void correlate_slab(void *argument, int thread, int threads)
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
    t.gradients = t.values + (j->planes + 2) * j->values_bytes;
    t.filter_sums = j->filter_sums + thread * j->thread_sums;
    memset(t.filter_sums, 0, j->thread_sums * sizeof(float));
    memset(t.values, 0, (j->planes + 2) * j->values_bytes); /* what follows the rows is multiplied by zeros */
    tile_config(16, 16);
    struct part *part = &t.part;
    long at = share(op, thread, threads), end = share(op, thread + 1, threads);
    for (; at < end; at += part->x1 - part->x0) {
        planes_from(part, op, at, end);
        for (part->y0 = 0; part->y0 < op->y; part->y0 = part->y1) {
            part->y1 = least(part->y0 + j->y_rows, op->y);
            int next = part->x0 - 1; /* plane of values */
            for (int x = part->x0, planes; x < part->x1; x += planes) {
                planes = least(j->planes, part->x1 - x);
                for (; next <= x + planes; next++)
                    form_values(&t, next);
                for (int i = 0; i < planes; i++)
                    form_gradients(&t, x + i, i);
                correlate_planes(&t, x, planes);
            }
        }
    }
    tile_release();
}

/* Adds the slabs' sums in their order: a thread those of every `threads`-th target and group. */
static void write_filter_gradient(void *argument, int thread, int threads)
{
    const struct job *j = argument;
    int z_taps = j->width < 16 ? 16 / j->width : 1; /* of a tile */
    for (int part = thread; part < 9 * j->shifts * j->groups; part += threads) {
        int target = part / j->groups, group = part % j->groups, tap = target / j->shifts, shift = target % j->shifts;
        for (int block = 0; block < j->blocks; block++) {
            const float *from = j->filter_sums + ((size_t)part * j->blocks + block) * TILE_FLOATS;
            double sums[TILE_FLOATS] = {0};
            for (int slab = 0; slab < j->slabs; slab++, from += j->thread_sums)
                for (int i = 0; i < TILE_FLOATS; i++)
                    sums[i] += from[i];
            for (int value = 0; value < 16; value++) {
                int z = shift * z_taps + value / least(j->width, 16), input = 16 * group + value % least(j->width, 16);
                if (z > 2 || input >= j->inputs)
                    continue;
                float *to = j->op->filter_gradient + ((size_t)(3 * tap + z) * j->inputs + input) * j->outputs + 16 * block;
                for (int o = 0; o < least(16, j->outputs - 16 * block); o++)
                    to[o] = (float)sums[16 * o + value];
            }
        }
    }
}

int DIRECT_FILTERS(const struct operation *op)
{
    struct job j = job_of(op);
    if (op->scratch) {
        op->scratch[KEEPING_THREADS] = j.slabs;
        op->scratch[KEPT_BYTES] = j.kept;
        op->scratch[PASSING_BYTES] = j.passing;
        return 0;
    }
    j.filter_sums = passing_memory(j.passing);
    if (!j.filter_sums)
        return -1;
    run_on_threads(j.slabs, correlate_slab, &j);
    if (j.failed)
        return -1;
    run_on_threads(op->threads, write_filter_gradient, &j);
    return 0;
}
