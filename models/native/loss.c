/* The loss of a map of logits against a target: sums over the voxels of each region, and the
   gradient of the logits (native.h has both).

   A row of the map is all z at one x, y: a run of values in whole vectors, and a rest. With R
   regions the values of vector v belong to regions (v * LANES + lane) % R, the same ones again
   every R vectors. One of these R places of a vector is its phase.

       R = 3:   phase 0: 0 1 2 0 1 2 0 1   phase 1: 2 0 1 2 0 1 2 0   phase 2: 1 2 0 1 2 0 1 2

   Rows are computed in blocks that follow from the map's shape alone. Sums are of float32 within a
   row and of float64 over rows; those of the blocks are added in their order: their bits do not
   depend on the number of threads. */
#include "pieces.h"

struct job {
    const struct operation *op;
    int regions, row_values;
    int block_rows;     /* rows of a block */
    long sample_rows;   /* rows of a sample */
    long sample_blocks; /* blocks of a sample */
    struct cut cut;     /* of all blocks */
    size_t kept_bytes, passing;
    double *block_sums; /* [block][LOSS_TERMS][regions] */
};

/* What a thread keeps. */
struct kept {
    vec *phases;     /* [phase][LOSS_TERMS]: sums of a row; or [phase][FACTORS] */
    double *lanes;   /* [phase][LOSS_TERMS][LANES]: sums of a block */
    uint8_t *target; /* a row of a target on a finer grid, thinned */
};

/* --- One vector of logits --- */

/* c[0] + c[1] x + c[2] x^2 ... */
ALWAYS_INLINE vec polynomial(vec x, const float *c, int count)
{
    vec sum = c[count - 1] + (vec){0};
#pragma GCC unroll 16
    for (int i = count - 2; i >= 0; i--)
        sum = sum * x + c[i];
    return sum;
}

/* exp(-|z|), of at least exp(-87): 2^n exp(r) with |r| <= ln 2 / 2 (Cody and Waite 1980). A NaN
   stays one. */
ALWAYS_INLINE vec exp_of_minus_size(vec z)
{
    static const float of_r[] = {
        /* fitted at Chebyshev's points: 2.4e-8 relative */
        1, 1, 0.5f, 0.16666505f, 0.041666351f, 0.0083691506f, 0.0013941111f,
    };
    const float to_integer = 12582912; /* 1.5 * 2^23: a sum with it has integers in its last bits */
    const float ln2_high = 0.693359375f;
    const float ln2_low = -2.12194440e-4f;
    vec x = at_least(-(vec)((ivec)z & 0x7fffffff), (vec){0} - 87);
    vec shifted = x * 1.44269504f + to_integer;
    vec n = shifted - to_integer;
    vec r = x - n * ln2_high - n * ln2_low;
    uvec power = ((uvec)shifted - 0x4b400000 + 127) << 23; /* the bits of 2^n */
    return polynomial(r, of_r, 7) * (vec)power;
}

/* log(1 + e) of 0 <= e <= 1. */
ALWAYS_INLINE vec log_of_1_and(vec e)
{
    static const float over_e[] = {
        /* fitted at Chebyshev's points: 6.0e-8 relative */
        1,           -0.49999502f, 0.33319271f,   -0.24844369f,  0.19111431f,
        -0.1367477f, 0.078361668f, -0.029588507f, 0.0052534579f,
    };
    return e * polynomial(e, over_e, 9);
}

/* The sigmoid of a vector of logits, to full precision on both sides. */
struct sigmoid {
    vec p, rest; /* rest: 1 - p */
    vec slope;   /* p (1 - p) */
    vec e;       /* exp(-|z|) */
};

ALWAYS_INLINE struct sigmoid sigmoid_of(vec z)
{
    vec e = exp_of_minus_size(z);
    vec large = 1 / (1 + e);
    vec small = e * large;
    ivec is_negative = z < 0;
    return (struct sigmoid){
        .p = choose(is_negative, small, large),
        .rest = choose(is_negative, large, small),
        .slope = large * small,
        .e = e,
    };
}

/* What a vector of the target says of its lanes. */
struct truth {
    ivec counts; /* neither IGNORED nor beyond the row's end */
    ivec is_true; /* of those: not 0 */
};

/* Of the first n values of a target. */
ALWAYS_INLINE struct truth truth_of(const uint8_t *target, int n)
{
    typedef uint8_t bytes __attribute__((vector_size(LANES)));
    bytes some = {0};
    bytes none = some + IGNORED;
    if (n < LANES)
        some = none; /* so that lanes from n on do not count */
    memcpy(&some, target, n == LANES ? sizeof some : (size_t)n);
    ivec value = __builtin_convertvector(some, ivec);
    ivec counts = value != IGNORED;
    return (struct truth){.counts = counts, .is_true = counts & (value != 0)};
}

/* Adds the values of a vector to the sums of its phase. */
ALWAYS_INLINE void add_terms(vec *sums, vec z, struct truth truth)
{
    struct sigmoid of_z = sigmoid_of(z);
    vec larger = at_least(choose(truth.is_true, -z, z), (vec){0});
    /* 0 * z: of an infinite logit a NaN, so that the loss shows it. */
    vec cross_entropy = larger + log_of_1_and(of_z.e) + 0 * z;
    sums[CROSS_ENTROPY] += keep_where(truth.counts, cross_entropy);
    sums[OVERLAP] += keep_where(truth.is_true, of_z.p);
    sums[PREDICTED] += keep_where(truth.counts, of_z.p);
    sums[TRUE] += keep_where(truth.is_true, (vec){0} + 1);
}

ALWAYS_INLINE vec slope_of(const vec *factors, vec z, struct truth truth)
{
    struct sigmoid of_z = sigmoid_of(z);
    vec of_p = keep_where(truth.is_true, factors[OVERLAP]) + factors[PREDICTED];
    vec error = choose(truth.is_true, -of_z.rest, of_z.p); /* p - t */
    vec slope = factors[CROSS_ENTROPY] * error + of_z.slope * of_p;
    return keep_where(truth.counts, slope);
}

/* --- Rows --- */

/* The n values of the map from element `at` on, against those of the target. */
ALWAYS_INLINE void compute_vector(const struct operation *op, vec *phases, int phase, size_t at,
                                  const uint8_t *target, int n, int kind, int dtype)
{
    prefetch(op->maps[0], at, dtype, 0);
    vec z = load_values(op->maps[0], at, n, dtype);
    struct truth truth = truth_of(target, n);
    if (kind == LOSS_SUMS) {
        add_terms(phases + phase * LOSS_TERMS, z, truth);
    } else {
        vec slope = slope_of(phases + phase * FACTORS, z, truth);
        store_values(op->map, at, slope, n, dtype);
    }
}

/* A row of the map, from element `at` on. */
ALWAYS_INLINE void compute_row(const struct job *j, vec *phases, size_t at, const uint8_t *target,
                               int kind, int dtype)
{
    int left = j->row_values;
    int phase = 0;
    for (; left >= LANES; left -= LANES) {
        compute_vector(j->op, phases, phase, at, target, LANES, kind, dtype);
        at += LANES;
        target += LANES;
        phase++;
        if (phase == j->regions)
            phase = 0;
    }
    if (left)
        compute_vector(j->op, phases, phase, at, target, left, kind, dtype);
}

static void compute_row_as(const struct job *j, vec *phases, size_t at, const uint8_t *target)
{
#define ROW(kind, dtype) compute_row(j, phases, at, target, kind, dtype)
    if (j->op->kind == LOSS_SUMS)
        j->op->dtype == FLOAT32 ? ROW(LOSS_SUMS, FLOAT32) : ROW(LOSS_SUMS, BFLOAT16);
    else
        j->op->dtype == FLOAT32 ? ROW(LOSS_SLOPE, FLOAT32) : ROW(LOSS_SLOPE, BFLOAT16);
}

/* A row of the target on the map's grid. */
static const uint8_t *target_row(const struct job *j, struct kept *kept, int batch, long row)
{
    const struct operation *op = j->op;
    const int *finer = op->finer;
    size_t x = (size_t)(row / op->y) * finer[0] + (size_t)batch * op->x * finer[0];
    size_t y = (size_t)(row % op->y) * finer[1] + x * op->y * finer[1];
    const uint8_t *from = (const uint8_t *)op->others[0] + y * j->row_values * finer[2];
    if (finer[2] == 1)
        return from;
    size_t voxel = j->regions;
    for (int z = 0; z < op->z; z++)
        memcpy(kept->target + z * voxel, from + z * voxel * finer[2], voxel);
    return kept->target;
}

/* Adds the sums of a row to those of its block, and clears them. */
static void add_row_to_block(const struct job *j, struct kept *kept)
{
    int count = j->regions * LOSS_TERMS;
    for (int i = 0; i < count; i++) {
        for (int lane = 0; lane < LANES; lane++)
            kept->lanes[(size_t)i * LANES + lane] += kept->phases[i][lane];
        kept->phases[i] = (vec){0};
    }
}

static void write_block_sums(const struct job *j, struct kept *kept, long block)
{
    int regions = j->regions;
    double *sums = j->block_sums + (size_t)block * LOSS_TERMS * regions;
    memset(sums, 0, sizeof(double) * LOSS_TERMS * regions);
    for (int phase = 0, region = 0; phase < regions; phase++)
        for (int lane = 0; lane < LANES; lane++) {
            for (int term = 0; term < LOSS_TERMS; term++) {
                double *sum = kept->lanes + ((size_t)phase * LOSS_TERMS + term) * LANES + lane;
                sums[(size_t)term * regions + region] += *sum;
                *sum = 0;
            }
            region++;
            if (region == regions)
                region = 0;
        }
}

/* The factors of a sample at the lanes of each phase. */
static void spread_factors(const struct job *j, struct kept *kept, int batch)
{
    int regions = j->regions;
    const float *factors = j->op->coefficients + (size_t)batch * FACTORS * regions;
    for (int phase = 0, region = 0; phase < regions; phase++)
        for (int lane = 0; lane < LANES; lane++) {
            vec *to = kept->phases + phase * FACTORS;
            for (int term = 0; term < FACTORS; term++)
                to[term][lane] = factors[(size_t)term * regions + region];
            region++;
            if (region == regions)
                region = 0;
        }
}

/* --- The operation --- */

static void compute_block(struct job *j, struct kept *kept, long block)
{
    const struct operation *op = j->op;
    int batch = (int)(block / j->sample_blocks);
    long row = block % j->sample_blocks * j->block_rows;
    long past = row + j->block_rows;
    if (past > j->sample_rows)
        past = j->sample_rows;
    for (; row < past; row++) {
        const uint8_t *target = target_row(j, kept, batch, row);
        size_t at = ((size_t)batch * j->sample_rows + row) * j->row_values;
        compute_row_as(j, kept->phases, at, target);
        if (op->kind == LOSS_SUMS)
            add_row_to_block(j, kept);
    }
    if (op->kind == LOSS_SUMS)
        write_block_sums(j, kept, block);
}

static void compute_piece(struct job *j, const struct piece *piece, char *memory)
{
    memset(memory, 0, j->kept_bytes);
    size_t count = (size_t)j->regions * LOSS_TERMS * LANES;
    struct kept kept = {.phases = (vec *)memory};
    kept.lanes = (double *)(memory + count * sizeof(float));
    kept.target = (uint8_t *)(kept.lanes + count);
    int spread = -1; /* the sample whose factors are there */
    for (long block = piece->plane; block < piece->past_plane; block++) {
        int batch = (int)(block / j->sample_blocks);
        if (j->op->kind == LOSS_SLOPE && spread != batch) {
            spread_factors(j, &kept, batch);
            spread = batch;
        }
        compute_block(j, &kept, block);
    }
}

static void write_loss_sums(struct job *j)
{
    const struct operation *op = j->op;
    size_t count = (size_t)LOSS_TERMS * j->regions;
    for (int batch = 0; batch < op->batch; batch++) {
        const double *blocks = j->block_sums + batch * j->sample_blocks * count;
        for (size_t i = 0; i < count; i++) {
            double sum = 0;
            for (long block = 0; block < j->sample_blocks; block++)
                sum += blocks[block * count + i];
            op->sums_to[batch * count + i] = (float)sum;
        }
    }
}

static struct job job_of(const struct operation *op)
{
    struct job j = {.op = op, .regions = op->channels[0]};
    j.row_values = op->z * j.regions;
    j.sample_rows = (long)op->x * op->y;
    j.block_rows = j.row_values < LOSS_BLOCK_VALUES ? LOSS_BLOCK_VALUES / j.row_values : 1;
    j.sample_blocks = ceil_div(j.sample_rows, j.block_rows);
    size_t count = (size_t)j.regions * LOSS_TERMS * LANES;
    j.kept_bytes = count * (sizeof(float) + sizeof(double)) + j.row_values;
    long blocks = op->batch * j.sample_blocks;
    j.cut = cut_of_rows(blocks, op->threads);
    if (op->kind == LOSS_SUMS)
        j.passing = sizeof(double) * LOSS_TERMS * j.regions * blocks;
    return j;
}

static void place(struct job *j, char *memory) { j->block_sums = (double *)memory; }

int LOSS(const struct operation *op)
{
    struct job j = job_of(op);
    struct steps steps = {
        .op = op,
        .cut = &j.cut,
        .kept = j.kept_bytes,
        .passing = j.passing,
        .place = place,
        .compute = compute_piece,
        .write = op->kind == LOSS_SUMS ? write_loss_sums : NULL,
    };
    return run_pieces(&j, &steps);
}
