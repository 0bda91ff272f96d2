/* Filter gradients of 3x3x3 convolutions of bfloat16 maps in AMX's tiles: sums over positions, 32
   in a product. records/kernels.md draws the tiles; what is drawn there has the same names here.

   A thread takes a few planes of its piece at a time. Their rows follow each other as one line of
   positions with zeros between rows, so that steps of 32 positions need not end with a row, and a
   tap is a shift of the line. Tile sums are of float32, over these planes; they are added in
   float32 over a piece, and in float64 over pieces.

   Where it takes one plane at a time, what the next one needs is formed between the products. */
#include "positions.h"

/* What the threads of an operation share, and how it is cut. */
struct job {
    const struct operation *op;
    struct input values, gradient; /* of the tiles B and of the tiles A */
    struct cut cut;
    int inputs, outputs;     /* channels */
    int width, output_width; /* of a formed voxel: values 4, 8 or whole 16; outputs whole 16 */
    int groups, blocks;      /* of 16 values of a formed, of 16 outputs */
    int shifts;              /* along z, of tiles B that make the three taps: 1 to 3 */
    int copies;              /* of values: in pairs from uneven positions, and from even ones */
    int values_are_whole;    /* maps of whole 16 channels, whose rows are formed as pairs at once */
    int gradients_are_whole;
    int pitch;             /* positions from row to row; even */
    int y_rows, planes;    /* that are taken at a time */
    int gradient_planes;   /* of which gradients are kept: the next one as well, if planes is 1 */
    int steps;             /* of such a plane, of 32 positions each */
    size_t copy_bytes;     /* of a group of a plane */
    size_t values_bytes;   /* of a plane: [group][copy] */
    size_t block_bytes;    /* of gradients: 16 outputs of a plane */
    size_t gradient_bytes; /* of a plane */
    size_t row_values;     /* of a formed row with its zeros */
    size_t position_sums;  /* floats: [target][group][block][16 outputs][16 values] */
    size_t kept, passing;
    float *filter_sums; /* of every position */
};

static struct cut cut_for(const struct operation *op, const struct job *j)
{
    struct work work = {
        .planes = (long)op->batch * op->x,
        .rows = op->y,
        .inputs = j->groups,
        .outputs = j->blocks,
        .unit = 1,
        .border = 1,
        .products = DIRECT_PRODUCTS_COST,
        .load = DIRECT_PRODUCTS_COST * DIRECT_LOAD_POSITIONS / j->pitch,
        .form_outputs = 1,
        .sums = DIRECT_PRODUCTS_COST * DIRECT_SUMS_POSITIONS / j->pitch,
    };
    return cut_of(&work, op->threads);
}

/* What an operation reads and makes, and its lines of positions. */
static struct job job_of(const struct operation *op)
{
    struct job j = {.op = op, .outputs = op->outputs};
    j.inputs = op->channels[0] + op->channels[1];
    j.values.channels[0] = op->channels[0];
    j.values.channels[1] = op->channels[1];
    j.values.maps[0] = op->maps[0];
    j.values.maps[1] = op->maps[1];
    j.values.coefficients = op->coefficients;
    j.gradient.channels[0] = op->outputs;
    j.gradient.maps[0] = op->others[0];
    j.gradient.raw = op->others[1];
    j.gradient.coefficients = op->other_coefficients;
    j.values = all_of(j.values);
    j.gradient = all_of(j.gradient);
    j.width = width_of(j.inputs);
    j.output_width = round_up(j.outputs, 16);
    j.groups = ceil_div(j.width, 16);
    j.blocks = j.output_width / 16;
    j.shifts = j.width < 16 ? j.width / 4 : 3;
    j.copies = j.width < 16 ? 1 : 2;
    j.values_are_whole = op->channels[0] % 16 == 0 && op->channels[1] % 16 == 0;
    j.gradients_are_whole = j.outputs % 16 == 0;
    j.pitch = round_up(op->z + 1, 2);
    j.cut = cut_for(op, &j);
    return j;
}

/* Rows and planes that are taken at a time, so many that they stay in the cache L2: there are two
   planes of values more than of gradients; and of values a row more on each side, and a line that
   the last shift reads. The gradients that are formed ahead come on top. */
static void set_memory(struct job *j)
{
    long arrays = j->cut.inputs * j->copies; /* of values, in a plane */
    long budget = l2_budget(j->op, POSITIONS_PERMILLE);
    long borders = 3 * arrays * 64 * (j->pitch + 1);
    long rows = (budget - borders) / (TILE_BYTES * (3 * arrays + j->cut.outputs)) * 32 / j->pitch;
    int most = rows < 1 ? 1 : least(rows, j->cut.rows);
    int bands = ceil_div(j->cut.rows, most);
    j->y_rows = ceil_div(j->cut.rows, bands); /* all are about equal */
    j->steps = ceil_div((long)j->y_rows * j->pitch, 32);
    j->copy_bytes = 64 * ((size_t)j->pitch + 16 * (size_t)j->steps + 1);
    j->values_bytes = arrays * j->copy_bytes;
    j->block_bytes = (size_t)TILE_BYTES * j->steps;
    j->gradient_bytes = j->cut.outputs * j->block_bytes;

    long plane_bytes = (long)(j->values_bytes + j->gradient_bytes);
    long planes = (budget - 2 * (long)j->values_bytes) / plane_bytes;
    int enough = least(ceil_div(ENOUGH_STEPS, j->steps), MOST_PLANES);
    j->planes = planes < 1 ? 1 : least(planes, least(j->cut.planes, enough));
    j->gradient_planes = j->planes == 1 ? 2 : j->planes;

    int width = j->width < 16 ? j->width : 16 * j->cut.inputs;
    int output_width = 16 * j->cut.outputs;
    int wide = width > output_width ? width : output_width;
    size_t voxels = j->pitch + 6; /* lines of few channels reach so far */
    j->row_values = (voxels * wide + 31) / 32 * 32;
    j->kept = sizeof(float) * MOST_TARGETS * TILE_FLOATS + sizeof(uint16_t) * j->row_values;
    j->kept += (j->planes + 2) * j->values_bytes + j->gradient_planes * j->gradient_bytes;
    j->position_sums = (size_t)9 * j->shifts * j->groups * j->blocks * TILE_FLOATS;
    j->passing = j->cut.positions * sizeof(float) * j->position_sums;
}

struct thread {
    const struct job *job;
    struct piece piece;
    struct input values_of, gradient_of; /* the channels of the piece */
    int width, output_width;             /* of a formed voxel of them */
    struct band band;
    float *sums;      /* of six tiles */
    uint16_t *formed; /* a row, formed */
    char *values;     /* a ring of planes: [group][copy][pair of positions][16 values][2] */
    char *gradients;  /* planes: [block][step][16 outputs][32 positions] */
    float *filter_sums;
    /* What is being formed, and how many groups and blocks of the band's planes are begun. */
    struct forming of_values, of_gradients;
    int values_begun, gradients_begun;
};

/* --- Forming --- */

static char *values_plane(const struct thread *t, int x)
{
    return t->values + (x + 1) % (t->job->planes + 2) * t->job->values_bytes;
}

static int is_outside(const struct operation *op, int x, int y)
{
    return x < 0 || x >= op->x || y < 0 || y >= op->y;
}

/* The first voxel of row (x, y) of a map, formed, after a voxel of zeros and followed by zeros.
   Channels that are there for the width alone have any values: they are multiplied into sums that
   are not read. */
static const uint16_t *formed_row(struct thread *t, const struct input *in, int width, int x, int y)
{
    const struct operation *op = t->job->op;
    uint16_t *formed = t->formed + width;
    size_t voxel = voxel_of(op, t->band.batch, x, y);
    size_t beyond = t->job->pitch + 4 - op->z;
    memset(t->formed, 0, sizeof(uint16_t) * width);
    form_bfloat16_row(formed, width, in, t->band.batch, voxel, op->z);
    memset(formed + (size_t)op->z * width, 0, sizeof(uint16_t) * beyond * width);
    return formed;
}

static char *gradients_plane(const struct thread *t, int x)
{
    const struct job *j = t->job;
    return t->gradients + (x - t->band.x0) % j->gradient_planes * j->gradient_bytes;
}

static size_t row_bytes_of(const struct job *j) { return (size_t)j->pitch / 2 * LINE_BYTES; }

/* Tiles of 32 positions that the rows of the band take. */
static int tiles_of(const struct thread *t)
{
    return ceil_div((t->band.y1 - t->band.y0) * t->job->pitch, 32);
}

/* Groups, or blocks, that are begun one by one: of maps of whole groups each for itself, of others
   all at once. */
static int groups_of(const struct thread *t)
{
    return t->job->values_are_whole ? t->piece.past_input - t->piece.input : 1;
}

static int blocks_of_piece(const struct thread *t)
{
    return t->job->gradients_are_whole ? t->piece.past_output - t->piece.output : 1;
}

/* Rows y0 - 1 ... y1 of plane x of values, all groups by way of formed rows. Pair p begins with
   position 2 p - 1, in a second copy with 2 p. */
static void form_values_rows(struct thread *t, int x)
{
    const struct job *j = t->job;
    int pairs = j->pitch / 2;
    if (!WITH_VECTORS)
        return;
    int arrays = (t->piece.past_input - t->piece.input) * j->copies;
    for (int y = t->band.y0 - 1; y <= t->band.y1; y++) {
        char *to = values_plane(t, x) + (y - t->band.y0 + 1) * row_bytes_of(j);
        const uint16_t *formed = NULL;
        if (!is_outside(j->op, x, y))
            formed = formed_row(t, &t->values_of, t->width, x, y);
        for (int i = 0; i < arrays; i++, to += j->copy_bytes) {
            int group = i / j->copies;
            int first = i % j->copies - 1; /* voxel of pair 0; 0 in the second copy */
            if (formed)
                store_pairs(to, formed + first * t->width + 16 * group, t->width, pairs);
            else
                memset(to, 0, row_bytes_of(j));
        }
    }
}

/* Begins to form the next group of a plane of values, straight into both copies; what is outside
   the map is 0 at once. */
static void begin_values(struct thread *t)
{
    const struct job *j = t->job;
    const struct operation *op = j->op;
    const struct band *band = &t->band;
    int x = band->x0 - 1 + t->values_begun / groups_of(t);
    int group = t->values_begun % groups_of(t);
    t->values_begun++;
    if (!j->values_are_whole) {
        form_values_rows(t, x);
        return;
    }
    char *to = values_plane(t, x) + 2 * group * j->copy_bytes;
    int inside = 0; /* rows */
    int first = 0;
    for (int y = band->y0 - 1; y <= band->y1; y++) {
        char *row = to + (y - band->y0 + 1) * row_bytes_of(j);
        if (is_outside(op, x, y)) {
            memset(row, 0, row_bytes_of(j));
            memset(row + j->copy_bytes, 0, row_bytes_of(j));
            continue;
        }
        if (!inside)
            first = y;
        inside++;
    }
    if (!inside)
        return;
    struct forming f = forming_of(&j->values, band->batch, voxel_of(op, band->batch, x, first),
                                  16 * (t->piece.input + group), op->z, inside);
    f.to = to + (first - band->y0 + 1) * row_bytes_of(j);
    f.step = LINE_BYTES;
    f.beside = j->copy_bytes;
    t->of_values = of_pairs(f, j->op->z, j->pitch);
}

/* Rows y0 ... y1 - 1 of plane x of gradients, all blocks by way of formed rows. */
static void form_gradients_rows(struct thread *t, int x)
{
    const struct job *j = t->job;
    char *plane = gradients_plane(t, x);
    int rows = t->band.y1 - t->band.y0;
    int blocks = t->piece.past_output - t->piece.output;
    size_t formed_bytes = rows * row_bytes_of(j);
    size_t past = (size_t)TILE_BYTES * tiles_of(t);
    if (!WITH_VECTORS)
        return;
    for (int row = 0; row < rows; row++) {
        const uint16_t *formed =
            formed_row(t, &t->gradient_of, t->output_width, x, t->band.y0 + row);
        for (int block = 0; block < blocks; block++)
            store_pairs(plane + block * j->block_bytes + row * row_bytes_of(j),
                        formed + 16 * block, t->output_width, j->pitch / 2);
    }
    for (int block = 0; block < blocks; block++) {
        char *of_block = plane + block * j->block_bytes;
        memset(of_block + formed_bytes, 0, past - formed_bytes);
        for (size_t tile = 0; tile < past; tile += TILE_BYTES)
            transpose_tile(of_block + tile);
    }
}

/* Begins to form the next block of a plane of gradients: tiles go on from row to row, and are
   transposed as lines become full. */
static void begin_gradients(struct thread *t)
{
    const struct job *j = t->job;
    const struct band *band = &t->band;
    int x = band->x0 + t->gradients_begun / blocks_of_piece(t);
    int block = t->gradients_begun % blocks_of_piece(t);
    t->gradients_begun++;
    if (!j->gradients_are_whole) {
        form_gradients_rows(t, x);
        return;
    }
    size_t voxel = voxel_of(j->op, band->batch, x, band->y0);
    int channel = 16 * (t->piece.output + block);
    struct forming f = forming_of(&j->gradient, band->batch, voxel, channel, j->op->z,
                                  band->y1 - band->y0);
    f.to = gradients_plane(t, x) + block * j->block_bytes;
    f.step = LINE_BYTES;
    t->of_gradients = of_pairs(f, j->op->z, j->pitch);
}

static void end_values(struct thread *t)
{
    form_rest(&t->of_values, VALUE_PAIRS, form_of(&t->job->values));
}

/* What follows the last row is 0 up to the end of its tile. */
static void end_gradients(struct thread *t)
{
    struct forming *f = &t->of_gradients;
    form_rest(f, GRADIENT_PAIRS, form_of(&t->job->gradient));
    if (!f->number)
        return;
    for (; f->number < (unsigned)TILE_LINES * tiles_of(t); f->number++, f->to += LINE_BYTES) {
        memset(f->to, 0, LINE_BYTES);
        transpose_behind(f->to, f->number);
    }
    transpose_last(f->to);
    f->number = 0;
}

/* Forms what is not yet there of values up to plane `values`, and of gradients. */
static void form_planes(struct thread *t, int values, int gradients)
{
    int groups = (values - t->band.x0 + 2) * groups_of(t);
    int blocks = (gradients - t->band.x0 + 1) * blocks_of_piece(t);
    end_values(t);
    while (t->values_begun < groups) {
        begin_values(t);
        end_values(t);
    }
    end_gradients(t);
    while (t->gradients_begun < blocks) {
        begin_gradients(t);
        end_gradients(t);
    }
}

/* --- Products --- */

/* The tiles B of a target, a tap (x, y) and a shift along z, for the gradients of plane x. */
static const char *values_of(const struct thread *t, int target, int group, int x)
{
    const struct job *j = t->job;
    int tap = target / j->shifts;
    int shift = target % j->shifts;
    int copy = j->shifts == 3 && shift == 1;          /* the one from even positions */
    int further = j->shifts == 3 ? shift / 2 : shift; /* pairs further on */
    const char *plane = values_plane(t, x + tap / 3 - 1);
    size_t pair = (size_t)(tap % 3) * (j->pitch / 2) + further;
    return plane + (group * j->copies + copy) * j->copy_bytes + pair * 64;
}

/* The sums of a target, a group and a block of the piece. */
static float *panel_of(const struct thread *t, int target, int group, int block)
{
    size_t panel = (size_t)target * t->job->groups + t->piece.input + group;
    panel = panel * t->job->blocks + t->piece.output + block;
    return t->filter_sums + panel * TILE_FLOATS;
}

/* What is formed between the products of plane x, if anything is: gradients of the next plane, and
   then values of the one after it, over those of plane x - 1 once no product needs these. */
enum formed { NOTHING, OF_VALUES, OF_GRADIENTS };

static enum formed formed_beside(struct thread *t, int x, int is_free)
{
    const struct job *j = t->job;
    int ahead = x + 1 - t->band.x0; /* planes of gradients before the next one */
    if (j->planes > 1 || x + 1 == t->band.x1)
        return NOTHING;
    while (j->gradients_are_whole && !t->of_gradients.rows &&
           t->gradients_begun < (ahead + 1) * blocks_of_piece(t)) {
        end_gradients(t);
        begin_gradients(t);
    }
    if (t->of_gradients.rows)
        return OF_GRADIENTS;
    while (is_free && j->values_are_whole && !t->of_values.rows &&
           t->values_begun < (ahead + 3) * groups_of(t))
        begin_values(t);
    return t->of_values.rows ? OF_VALUES : NOTHING;
}

/* `correlate` with chores, which go on with what is being formed. */
#define BESIDE(name, count, chore) \
    NEVER_INLINE void name(struct forming *list, float *sums, int planes, int steps, \
                           const char *const *left, const char *const (*right)[MOST_TARGETS]) \
    { \
        struct forming f = *list; \
        correlate_as(count, sums, planes, steps, left, right, chore, &f); \
        *list = f; \
    }
BESIDE(beside_values_raw, 6, values_raw)
BESIDE(beside_values_norm, 6, values_norm)
BESIDE(beside_gradient_raw, 6, gradient_raw)
BESIDE(beside_gradient_norm, 6, gradient_norm)
BESIDE(beside_values_raw_of_3, 3, values_raw)
BESIDE(beside_values_norm_of_3, 3, values_norm)
BESIDE(beside_gradient_raw_of_3, 3, gradient_raw)
BESIDE(beside_gradient_norm_of_3, 3, gradient_norm)
#undef BESIDE

static void correlate_beside(struct thread *t, int count, int planes, int steps,
                             const char *const *left, const char *const (*right)[MOST_TARGETS],
                             enum formed formed)
{
    int form = form_of(formed == OF_VALUES ? &t->job->values : &t->job->gradient);
    int is_raw = form == RAW;
    switch (100 * formed + 10 * is_raw + count) {
#define BESIDE(formed, is_raw, count, beside, list) \
    case 100 * formed + 10 * is_raw + count: \
        beside(&t->list, t->sums, planes, steps, left, right); \
        break;
        BESIDE(OF_VALUES, 0, 6, beside_values_norm, of_values)
        BESIDE(OF_VALUES, 0, 3, beside_values_norm_of_3, of_values)
        BESIDE(OF_VALUES, 1, 6, beside_values_raw, of_values)
        BESIDE(OF_VALUES, 1, 3, beside_values_raw_of_3, of_values)
        BESIDE(OF_GRADIENTS, 0, 6, beside_gradient_norm, of_gradients)
        BESIDE(OF_GRADIENTS, 0, 3, beside_gradient_norm_of_3, of_gradients)
        BESIDE(OF_GRADIENTS, 1, 6, beside_gradient_raw, of_gradients)
        BESIDE(OF_GRADIENTS, 1, 3, beside_gradient_raw_of_3, of_gradients)
#undef BESIDE
    default:
        correlate(count, t->sums, planes, steps, left, right);
    }
}

/* Adds the products of planes x ... x + planes - 1, a group, a block and `count` targets to the
   piece's sums. */
static void correlate_targets(struct thread *t, int x, int planes, int group, int block, int target,
                              int count, enum formed formed)
{
    const struct job *j = t->job;
    const char *left[MOST_PLANES];
    const char *right[MOST_PLANES][MOST_TARGETS] = {{0}};
    for (int plane = 0; plane < planes; plane++) {
        left[plane] = gradients_plane(t, x + plane) + block * j->block_bytes;
        for (int i = 0; i < count; i++)
            right[plane][i] = values_of(t, target + i, group, x + plane);
    }
    correlate_beside(t, count, planes, tiles_of(t), left,
                     (const char *const(*)[MOST_TARGETS])right, formed);
    for (int i = 0; i < count; i++)
        add_tile(panel_of(t, target + i, group, block), t->sums + i * TILE_FLOATS);
}

/* --- An operation --- */

static void correlate_band(struct thread *t)
{
    const struct job *j = t->job;
    const struct band *band = &t->band;
    int targets = 9 * j->shifts;
    t->values_begun = 0;
    t->gradients_begun = 0;
    for (int x = band->x0; x < band->x1; x += j->planes) {
        int planes = least(j->planes, band->x1 - x);
        form_planes(t, x + planes, x + planes - 1);
        for (int target = 0; target < targets; target += MOST_TARGETS) {
            int count = least(MOST_TARGETS, targets - target);
            int is_free = target >= targets / 3; /* those of plane x - 1 are done */
            for (int group = 0; group < t->piece.past_input - t->piece.input; group++)
                for (int block = 0; block < t->piece.past_output - t->piece.output; block++) {
                    enum formed formed = formed_beside(t, x, is_free);
                    correlate_targets(t, x, planes, group, block, target, count, formed);
                }
        }
    }
}

static void clear_filter_sums(struct thread *t)
{
    const struct piece *piece = &t->piece;
    size_t bytes = sizeof(float) * TILE_FLOATS * (piece->past_output - piece->output);
    for (int target = 0; target < 9 * t->job->shifts; target++)
        for (int group = 0; group < piece->past_input - piece->input; group++)
            memset(panel_of(t, target, group, 0), 0, bytes);
}

static void correlate_piece(struct job *j, const struct piece *piece, char *memory)
{
    struct thread t = {.job = j, .piece = *piece, .sums = (float *)memory};
    t.values_of = blocks_of(&j->values, piece->input, piece->past_input);
    t.gradient_of = blocks_of(&j->gradient, piece->output, piece->past_output);
    t.width = j->width < 16 ? j->width : 16 * (piece->past_input - piece->input);
    t.output_width = 16 * (piece->past_output - piece->output);
    t.formed = (uint16_t *)(t.sums + MOST_TARGETS * TILE_FLOATS);
    t.values = (char *)(t.formed + j->row_values);
    t.gradients = t.values + (j->planes + 2) * j->values_bytes;
    t.filter_sums = j->filter_sums + piece->position * j->position_sums;
    clear_filter_sums(&t);
    /* What follows the rows is multiplied by zeros. */
    memset(t.values, 0, (j->planes + 2) * j->values_bytes);
    tile_config(16, 16);
    while (next_band(&t.band, j->op, piece, j->y_rows))
        correlate_band(&t);
    tile_release();
}

/* Writes the sums [16 outputs][16 values] of a target, a group and a block. */
static void write_tile(const struct job *j, const double *sums, int target, int group, int block)
{
    int tap = target / j->shifts;
    int shift = target % j->shifts;
    int first = 16 * block;
    int width = least(j->width, 16); /* values of a voxel in a line, */
    int z_taps = 16 / width;         /* and voxels, each of its own tap along z */
    for (int value = 0; value < 16; value++) {
        int z = shift * z_taps + value / width;
        int input = 16 * group + value % width;
        if (z > 2 || input >= j->inputs)
            continue;
        size_t at = ((size_t)(3 * tap + z) * j->inputs + input) * j->outputs + first;
        for (int o = 0; o < least(16, j->outputs - first); o++)
            j->op->filter_gradient[at + o] = (float)sums[16 * o + value];
    }
}

/* Adds up what the positions have: a thread its share of all tiles. */
static void write_filter_gradient(void *argument, int thread, int threads)
{
    const struct job *j = argument;
    long all = 9L * j->shifts * j->groups * j->blocks;
    for (long tile = share(all, thread, threads); tile < share(all, thread + 1, threads); tile++) {
        double sums[TILE_FLOATS];
        add_positions(sums, j->filter_sums, j->position_sums, j->cut.positions, tile);
        int block = (int)(tile % j->blocks);
        int group = (int)(tile / j->blocks % j->groups);
        int target = (int)(tile / j->blocks / j->groups);
        write_tile(j, sums, target, group, block);
    }
}

static void place(struct job *j, char *memory) { j->filter_sums = (float *)memory; }

int DIRECT_FILTERS(const struct operation *op)
{
    struct job j = job_of(op);
    set_memory(&j);
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
