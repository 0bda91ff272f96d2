/* Makes one sample of a training: from the stored voxels of a case to the network's image and target, on one thread.

   Stored voxels are normalised, averaged down to the network's grid, turned and zoomed, changed in
   intensity, mirrored and rounded. plain.py has the same in NumPy, a step at a time; samples.py calls
   both. Volumes are [x][y][z][channels] in C order. Values that are 0 in the store are background:
   they become 0, and intensity leaves them alone. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))

enum { X, Y, Z, AXES, HUGE_PAGE = 1 << 21 };
enum kind { INT16, FLOAT16, FLOAT32, LABEL }; /* as in samples.py */

/* A box of voxels of a grid. Its values become float32: INT16 and FLOAT16 by scale and shift, LABEL
   by a table of the codes, 1 where a code belongs to the channel, which then is a region. */
struct box {
    const void *values; /* of the box's first voxel */
    int kind;
    int64_t strides[AXES]; /* in values */
    int size[AXES];
    int at[AXES]; /* place of its first voxel in the grid */
    int channels;
    const int *picked; /* [channels]: the stored channel of each */
    const float *scale, *shift; /* [channels] */
    const uint8_t *table; /* [256][channels] */
};

/* Weights by which one axis becomes another: voxel i is the sum of `taps` voxels from first[i] on. */
struct band {
    int taps, size; /* size: voxels of the axis that is made */
    const int *first; /* [size] */
    const float *weights; /* [taps][size] */
};

struct sample {
    struct box image, label; /* in the grid of the store; without `shrinking` that is the network's */
    int grid[AXES]; /* the network's */
    const struct band *shrinking; /* [AXES], or NULL */
    const float *matrix; /* [AXES][AXES], voxels from the centre: made -> read; NULL without a turn */
    int flips[AXES];
    const float *noise; /* [channels], standard deviations; NULL for none, as below */
    const uint32_t *noise_keys; /* [channels][2] */
    const struct band *smoothing; /* [channels][AXES], of 0 taps for a channel that stays as it is */
    const float *contrast; /* [channels], 1 for a channel that stays, as below */
    const float *gamma;
    const int *inverted; /* [channels], whether gamma is that of the negative */
    int is_bfloat16; /* the image; else it is float32 */
    void *to_image;
    uint8_t *to_target; /* all 0 */
};

static const float INSIDE = 0.5f - 1e-4f; /* a region's mean from which on a voxel is inside: resolution.TIE */

/* --- Values --- */

ALWAYS_INLINE float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

ALWAYS_INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* By integers: TensorFlow's threads take subnormal numbers for 0. */
ALWAYS_INLINE float from_float16(uint16_t half)
{
    uint32_t size = half & 0x7fff;
    float subnormal = (float)(int)size * 0x1p-24f;
    float normal = from_bits((size << 13) + (112u << 23));
    uint32_t bits = bits_of(size < 0x400 ? subnormal : normal);
    return from_bits(bits | (uint32_t)(half & 0x8000) << 16);
}

/* A stored value, not yet scaled. */
ALWAYS_INLINE float value_at(const struct box *box, int kind, int64_t at)
{
    if (kind == INT16)
        return ((const int16_t *)box->values)[at];
    if (kind == FLOAT16)
        return from_float16(((const uint16_t *)box->values)[at]);
    return ((const float *)box->values)[at];
}

/* One value or another, without a branch, which would keep a loop from being computed in vectors. */
ALWAYS_INLINE float either(int condition, float one, float other)
{
    uint32_t mask = -(uint32_t)(condition != 0);
    return from_bits((bits_of(one) & mask) | (bits_of(other) & ~mask));
}

/* Rounded to nearest, ties to even. */
ALWAYS_INLINE uint16_t to_bfloat16(float value)
{
    uint32_t bits = bits_of(value);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* values[channels] once for each of `voxels`: a loop over a row is then one over all of its values. */
static void repeat(float *row, const float *values, int voxels, int channels)
{
    for (int i = 0; i < voxels * channels; i++)
        row[i] = values[i % channels];
}

/* Memory for so many, for the caller to free; NULL without. Large pages, as NumPy asks for, come in a tenth of the time. */
static float *floats(size_t count)
{
    size_t bytes = (count + !count) * sizeof(float);
    if (bytes < HUGE_PAGE)
        return malloc(bytes);
    void *memory = aligned_alloc(HUGE_PAGE, (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    if (memory)
        madvise(memory, bytes, MADV_HUGEPAGE);
    return memory;
}

/* --- Rows along Z --- */

/* What makes rows of a box: the box, and its scale and shift repeated along a row. */
struct rows {
    struct box box;
    float *scale, *shift, *spare; /* [size[Z] * channels] */
};

static int begin_rows(struct rows *rows, const struct box *box)
{
    size_t count = (size_t)box->size[Z] * box->channels;
    rows->box = *box;
    rows->scale = floats(3 * count);
    if (!rows->scale)
        return -1;
    rows->shift = rows->scale + count;
    rows->spare = rows->shift + count;
    if (box->kind == INT16 || box->kind == FLOAT16) {
        repeat(rows->scale, box->scale, box->size[Z], box->channels);
        repeat(rows->shift, box->shift, box->size[Z], box->channels);
    }
    return 0;
}

static void end_rows(struct rows *rows) { free(rows->scale); }

/* The box's row at x, y, as float32 [size[Z]][channels]. */
static void stored_row(const struct rows *rows, int x, int y, float *restrict to)
{
    const struct box *box = &rows->box;
    const float *restrict scale = rows->scale, *restrict shift = rows->shift;
    int channels = box->channels, voxels = box->size[Z], count = voxels * channels;
    int64_t start = x * box->strides[X] + y * box->strides[Y];
    if (box->kind == LABEL) {
        const uint8_t *codes = (const uint8_t *)box->values + start;
        for (int z = 0; z < voxels; z++)
            for (int c = 0; c < channels; c++)
                to[z * channels + c] = box->table[codes[z * box->strides[Z]] * channels + c];
        return;
    }
    if (box->kind == FLOAT32) { /* always of this file's making */
        memcpy(to, (const float *)box->values + start, count * sizeof(float));
        return;
    }
    int are_adjacent = box->strides[Z] == channels;
    for (int c = 0; c < channels; c++)
        are_adjacent &= box->picked[c] == c;
    if (are_adjacent && box->kind == INT16) {
        const int16_t *from = (const int16_t *)box->values + start;
        for (int i = 0; i < count; i++)
            to[i] = from[i];
    } else if (are_adjacent) {
        const uint16_t *from = (const uint16_t *)box->values + start;
        for (int i = 0; i < count; i++)
            to[i] = from_float16(from[i]);
    } else {
        for (int z = 0; z < voxels; z++)
            for (int c = 0; c < channels; c++)
                to[z * channels + c] = value_at(box, box->kind, start + z * box->strides[Z] + box->picked[c]);
    }
    for (int i = 0; i < count; i++)
        to[i] = to[i] == 0 ? 0 : to[i] * scale[i] + shift[i];
}

/* A row of the network's grid: the box's where it lies, 0 around it. */
static void plain_row(const struct rows *rows, int x, int y, int voxels, int is_flipped, float *to)
{
    const struct box *box = &rows->box;
    int channels = box->channels;
    int from_x = x - box->at[X], from_y = y - box->at[Y];
    memset(to, 0, (size_t)voxels * channels * sizeof(float));
    if (from_x < 0 || from_x >= box->size[X] || from_y < 0 || from_y >= box->size[Y])
        return;
    if (!is_flipped) {
        stored_row(rows, from_x, from_y, to + box->at[Z] * channels);
        return;
    }
    stored_row(rows, from_x, from_y, rows->spare);
    float *last = to + (voxels - 1 - box->at[Z]) * channels;
    for (int z = 0; z < box->size[Z]; z++)
        for (int c = 0; c < channels; c++)
            last[c - z * channels] = rows->spare[z * channels + c];
}

/* --- Turning: each voxel is the linear interpolation between the eight around where it comes from --- */

enum { CORNERS = 8 };

/* What the lines of a row have in common: the place in the box of voxel z is start + z * step. */
struct line {
    float start[AXES], step[AXES];
};

ALWAYS_INLINE float place(const struct line *line, int axis, int z) { return line->start[axis] + (float)z * line->step[axis]; }

/* Narrow `range`, voxels of a line from [0] up to [1], to those placed between low and high along an axis. */
static void narrow(const struct line *line, int axis, double low, double high, int range[2])
{
    double start = line->start[axis], step = line->step[axis];
    if (low > high || fabs(step) < 1e-9) {
        if (low > high || start < low || start > high)
            range[1] = range[0];
        return;
    }
    double one = (low - start) / step, other = (high - start) / step;
    double first = ceil(fmin(one, other)), last = floor(fmax(one, other));
    if (first > range[0])
        range[0] = first < range[1] ? (int)first : range[1];
    if (last + 1 < range[1])
        range[1] = last + 1 > range[0] ? (int)last + 1 : range[0];
}

/* Adds the weighted value of each channel of a corner: the values, and the weights of those that are not 0. */
ALWAYS_INLINE void add_corner(
    const struct box *box, int kind, int channels, int64_t at, float weight, float *values, float *weights)
{
    for (int c = 0; c < channels; c++) {
        float value = value_at(box, kind, at + (kind == FLOAT32 ? c : box->picked[c]));
        values[c] += weight * value;
        weights[c] += value == 0 ? 0 : weight;
    }
}

typedef float four __attribute__((vector_size(16)));
typedef int32_t four_bits __attribute__((vector_size(16)));
typedef int16_t four_shorts __attribute__((vector_size(8)));

/* Four values in a row, the channels from the first picked one on. */
ALWAYS_INLINE four four_at(const struct box *box, int kind, int64_t at)
{
    if (kind == FLOAT32) {
        four values;
        memcpy(&values, (const float *)box->values + at, sizeof values);
        return values;
    }
    four_shorts stored;
    memcpy(&stored, (const int16_t *)box->values + at + box->picked[0], sizeof stored);
    if (kind == INT16)
        return __builtin_convertvector(__builtin_convertvector(stored, four_bits), four);
    four values;
    for (int c = 0; c < 4; c++)
        values[c] = from_float16((uint16_t)stored[c]);
    return values;
}

/* A voxel's place in the box, as the first of the eight voxels around it and their weights. */
ALWAYS_INLINE void corners_of(const struct line *line, int z, int first[AXES], float weights[CORNERS])
{
    float share[AXES][2];
    for (int axis = 0; axis < AXES; axis++) {
        float at = place(line, axis, z);
        int below = (int)(at + 1) - 1; /* of a place above -1 the floor */
        first[axis] = below;
        share[axis][1] = at - (float)below;
        share[axis][0] = 1 - share[axis][1];
    }
    for (int i = 0; i < CORNERS; i++)
        weights[i] = share[X][i >> 2] * share[Y][i >> 1 & 1] * share[Z][i & 1];
}

ALWAYS_INLINE int64_t offset_of(const struct box *box, const int first[AXES], int corner)
{
    return (first[X] + (corner >> 2)) * box->strides[X] + (first[Y] + (corner >> 1 & 1)) * box->strides[Y]
           + (first[Z] + (corner & 1)) * box->strides[Z];
}

ALWAYS_INLINE int is_in(const struct box *box, const int first[AXES], int corner)
{
    const int at[AXES] = {first[X] + (corner >> 2), first[Y] + (corner >> 1 & 1), first[Z] + (corner & 1)};
    for (int axis = 0; axis < AXES; axis++)
        if (at[axis] < 0 || at[axis] >= box->size[axis])
            return 0;
    return 1;
}

/* Voxels `range` of a line. Unless `is_checked`, all corners are in the box. Channels and kind are constants where it is inlined. */
ALWAYS_INLINE void turned_voxels(const struct box *box, int kind, int channels, int is_checked, const struct line *line,
                                 const int range[2], float *to, int64_t step, float *sums)
{
    for (int z = range[0]; z < range[1]; z++) {
        int first[AXES];
        float share[CORNERS];
        corners_of(line, z, first, share);
        float *voxel = to + z * step;
        if (channels == 4) {
            four values = {0}, weights = {0};
            for (int i = 0; i < CORNERS; i++) {
                if (is_checked && !is_in(box, first, i))
                    continue;
                four stored = four_at(box, kind, offset_of(box, first, i));
                four weight = {share[i], share[i], share[i], share[i]};
                values += weight * stored;
                if (kind != FLOAT32)
                    weights += (four)((four_bits)weight & (stored != 0));
            }
            if (kind != FLOAT32) {
                four scale, shift;
                memcpy(&scale, box->scale, sizeof scale);
                memcpy(&shift, box->shift, sizeof shift);
                values = values * scale + weights * shift;
            }
            memcpy(voxel, &values, sizeof values);
            continue;
        }
        float *values = sums, *weights = sums + channels;
        memset(sums, 0, 2 * channels * sizeof *sums);
        for (int i = 0; i < CORNERS; i++)
            if (!is_checked || is_in(box, first, i))
                add_corner(box, kind, channels, offset_of(box, first, i), share[i], values, weights);
        for (int c = 0; c < channels; c++)
            voxel[c] = kind == FLOAT32 ? values[c] : values[c] * box->scale[c] + weights[c] * box->shift[c];
    }
}

/* As `turned_voxels`, of a label: most are between eight of the same code. */
static void turned_labels(
    const struct box *box, const struct line *line, const int range[2], float *to, int64_t step)
{
    const uint8_t *codes = box->values;
    for (int z = range[0]; z < range[1]; z++) {
        int first[AXES], code[CORNERS], are_same = 1;
        float share[CORNERS];
        corners_of(line, z, first, share);
        for (int i = 0; i < CORNERS; i++) {
            code[i] = is_in(box, first, i) ? codes[offset_of(box, first, i)] : 0;
            are_same &= code[i] == code[0];
        }
        for (int c = 0; c < box->channels; c++) {
            float value = 0;
            if (are_same)
                value = box->table[code[0] * box->channels + c];
            else
                for (int i = 0; i < CORNERS; i++)
                    value += share[i] * box->table[code[i] * box->channels + c];
            to[z * step + c] = value;
        }
    }
}

/* The voxels of one kind and number of channels, each a constant. */
ALWAYS_INLINE void turned_kind(const struct box *box, int kind, int is_checked, const struct line *line,
                               const int range[2], float *to, int64_t step, float *sums)
{
    int are_adjacent = box->channels == 4;
    for (int c = 1; c < box->channels && kind != FLOAT32; c++)
        are_adjacent &= box->picked[c] == box->picked[0] + c;
    if (are_adjacent)
        turned_voxels(box, kind, 4, is_checked, line, range, to, step, sums);
    else if (box->channels == 1)
        turned_voxels(box, kind, 1, is_checked, line, range, to, step, sums);
    else if (box->channels == 4)
        for (int c = 0; c < 4; c++) {
            struct box one = *box;
            one.channels = 1;
            one.picked += c;
            one.scale += c;
            one.shift += c;
            turned_voxels(&one, kind, 1, is_checked, line, range, to + c, step, sums);
        }
    else
        turned_voxels(box, kind, box->channels, is_checked, line, range, to, step, sums);
}

static void turned_range(const struct box *box, int is_checked, const struct line *line, const int range[2], float *to,
                         int64_t step, float *sums)
{
    if (box->kind == LABEL)
        turned_labels(box, line, range, to, step);
    else if (box->kind == INT16 && is_checked)
        turned_kind(box, INT16, 1, line, range, to, step, sums);
    else if (box->kind == INT16)
        turned_kind(box, INT16, 0, line, range, to, step, sums);
    else if (box->kind == FLOAT16 && is_checked)
        turned_kind(box, FLOAT16, 1, line, range, to, step, sums);
    else if (box->kind == FLOAT16)
        turned_kind(box, FLOAT16, 0, line, range, to, step, sums);
    else if (is_checked)
        turned_kind(box, FLOAT32, 1, line, range, to, step, sums);
    else
        turned_kind(box, FLOAT32, 0, line, range, to, step, sums);
}

/* A row of the network's grid, turned about the grid's centre. Returns whether any voxel comes from the box. */
static int turned_row(const struct rows *rows, const struct sample *sample, int x, int y, float *to)
{
    const struct box *box = &rows->box;
    const int *grid = sample->grid;
    const float *matrix = sample->matrix;
    struct line line;
    for (int axis = 0; axis < AXES; axis++) {
        const float *m = matrix + AXES * axis;
        double start = (grid[axis] - 1) * 0.5 - box->at[axis];
        start += m[X] * (x - (grid[X] - 1) * 0.5) + m[Y] * (y - (grid[Y] - 1) * 0.5) - m[Z] * (grid[Z] - 1) * 0.5;
        line.start[axis] = (float)start;
        line.step[axis] = m[Z];
    }
    int touched[2] = {0, grid[Z]};
    for (int axis = 0; axis < AXES; axis++)
        narrow(&line, axis, -1 + 1e-6, box->size[axis] - 1e-6, touched);
    int inner[2] = {touched[0], touched[1]};
    for (int axis = 0; axis < AXES; axis++) /* with room for the rounding of a place */
        narrow(&line, axis, 1e-3, box->size[axis] - 1 - 1e-3, inner);
    memset(to, 0, (size_t)grid[Z] * box->channels * sizeof(float));
    if (touched[0] >= touched[1])
        return 0;
    if (inner[0] >= inner[1])
        inner[0] = inner[1] = touched[1];
    int64_t step = box->channels;
    if (sample->flips[Z]) {
        to += (grid[Z] - 1) * step;
        step = -step;
    }
    const int before[2] = {touched[0], inner[0]}, after[2] = {inner[1], touched[1]};
    float sums[2 * box->channels];
    turned_range(box, 1, &line, before, to, step, sums);
    turned_range(box, 0, &line, inner, to, step, sums);
    turned_range(box, 1, &line, after, to, step, sums);
    return 1;
}

/* The row at x, y of the sample's grid, in its final place along Z. */
static void sample_row(const struct rows *rows, const struct sample *sample, int x, int y, float *to)
{
    int from_x = sample->flips[X] ? sample->grid[X] - 1 - x : x;
    int from_y = sample->flips[Y] ? sample->grid[Y] - 1 - y : y;
    if (sample->matrix)
        turned_row(rows, sample, from_x, from_y, to);
    else
        plain_row(rows, from_x, from_y, sample->grid[Z], sample->flips[Z], to);
}

/* --- Averaging down to the network's grid --- */

/* The voxels from reach[0] up to reach[1] of a band's axis that voxels `at` up to `at + size` have a weight in. */
static void reached(const struct band *band, int at, int size, int reach[2])
{
    reach[0] = band->size;
    reach[1] = 0;
    for (int i = 0; i < band->size; i++)
        if (band->first[i] < at + size && band->first[i] + band->taps > at) {
            reach[0] = i < reach[0] ? i : reach[0];
            reach[1] = i + 1;
        }
}

/* A row of voxels made from one, [size][channels], whose first voxel is `at`. */
static void shrink_row(const struct band *band, const int reach[2], const float *row, int at, int size, int channels, float *to)
{
    for (int i = reach[0]; i < reach[1]; i++) {
        float *voxel = to + (size_t)(i - reach[0]) * channels;
        memset(voxel, 0, channels * sizeof *voxel);
        for (int tap = 0; tap < band->taps; tap++) {
            int from = band->first[i] + tap - at;
            float weight = band->weights[tap * band->size + i];
            if (weight == 0 || from < 0 || from >= size)
                continue;
            for (int c = 0; c < channels; c++)
                voxel[c] += weight * row[from * channels + c];
        }
    }
}

/* Adds the weighted rows of the box that make up the row at x, y. */
static void weigh_rows(const struct rows *rows, const struct band *bands, int x, int y, float *row, float *sum)
{
    const struct box *box = &rows->box;
    int count = box->size[Z] * box->channels;
    memset(sum, 0, count * sizeof *sum);
    for (int tap_x = 0; tap_x < bands[X].taps; tap_x++)
        for (int tap_y = 0; tap_y < bands[Y].taps; tap_y++) {
            int from_x = bands[X].first[x] + tap_x - box->at[X], from_y = bands[Y].first[y] + tap_y - box->at[Y];
            float weight = bands[X].weights[tap_x * bands[X].size + x] * bands[Y].weights[tap_y * bands[Y].size + y];
            if (weight == 0 || from_x < 0 || from_x >= box->size[X] || from_y < 0 || from_y >= box->size[Y])
                continue;
            stored_row(rows, from_x, from_y, row);
            for (int i = 0; i < count; i++)
                sum[i] += weight * row[i];
        }
}

/* The box on the network's grid, where it reaches; its values are for the caller to free. */
static int shrink(const struct box *box, const struct band *bands, struct box *to)
{
    int reach[AXES][2];
    *to = *box;
    to->kind = FLOAT32;
    for (int axis = 0; axis < AXES; axis++) {
        reached(&bands[axis], box->at[axis], box->size[axis], reach[axis]);
        to->at[axis] = reach[axis][0];
        to->size[axis] = reach[axis][1] > reach[axis][0] ? reach[axis][1] - reach[axis][0] : 0;
    }
    to->strides[Z] = box->channels;
    to->strides[Y] = (int64_t)to->size[Z] * to->strides[Z];
    to->strides[X] = to->size[Y] * to->strides[Y];
    int count = box->size[Z] * box->channels;
    float *values = floats(to->size[X] * to->strides[X]), *row = floats(2 * (size_t)count);
    struct rows rows = {0};
    int failed = !values || !row || begin_rows(&rows, box);
    for (int x = 0; x < to->size[X] && !failed; x++)
        for (int y = 0; y < to->size[Y]; y++) {
            weigh_rows(&rows, bands, x + to->at[X], y + to->at[Y], row, row + count);
            float *made = values + x * to->strides[X] + y * to->strides[Y];
            shrink_row(&bands[Z], reach[Z], row + count, box->at[Z], box->size[Z], box->channels, made);
        }
    end_rows(&rows);
    free(row);
    if (failed)
        free(values);
    to->values = values;
    return failed ? -1 : 0;
}

/* --- Intensity --- */

/* Wellons 2018, "Prospecting for hash functions": lowbias32. */
ALWAYS_INLINE uint32_t mixed(uint32_t word)
{
    word = (word ^ word >> 16) * 0x7feb352d;
    word = (word ^ word >> 15) * 0x846ca68b;
    return word ^ word >> 16;
}

/* Adds noise to what is not background. A voxel's is a function of the key and of its number alone: the sum of eight
   bytes, which is nearly normal. */
static void add_noise(const struct sample *sample, float *restrict row, uint32_t number, const float *restrict deviation,
                      const uint32_t *restrict keys)
{
    int channels = sample->image.channels, voxels = sample->grid[Z], count = voxels * channels;
    const uint32_t *restrict one = keys, *restrict other = keys + count, *restrict along = keys + 2 * count;
    for (int i = 0; i < count; i++) {
        uint32_t first = mixed(mixed((number + along[i]) ^ one[i]) + other[i]);
        uint32_t second = mixed(first + 0x9e3779b9);
        uint32_t pairs = (first & 0xff00ff) + (first >> 8 & 0xff00ff) + (second & 0xff00ff) + (second >> 8 & 0xff00ff);
        int sum = (int)(pairs & 0xffff) + (int)(pairs >> 16) - 1020; /* of mean 0 */
        float noise = (float)sum * (1 / 209.0215f) * deviation[i];
        row[i] += row[i] == 0 ? 0 : noise;
    }
}

/* Fills what `add_noise` needs for every value of a row: deviation, and both keys and the voxel's number within the row. */
static void repeat_noise(const struct sample *sample, float *deviation, uint32_t *keys)
{
    int channels = sample->image.channels, voxels = sample->grid[Z], count = voxels * channels;
    repeat(deviation, sample->noise, voxels, channels);
    for (int i = 0; i < count; i++) {
        int z = i / channels;
        keys[i] = sample->noise_keys[2 * (i % channels)];
        keys[count + i] = sample->noise_keys[2 * (i % channels) + 1];
        keys[2 * count + i] = sample->flips[Z] ? voxels - 1 - z : z;
    }
}

/* The rows `from` [axis][voxels] combined into row i of the band's axis. */
static void combine(const struct band *band, int i, const float *restrict from, int voxels, float *restrict to)
{
    memset(to, 0, voxels * sizeof *to);
    for (int tap = 0; tap < band->taps; tap++) {
        float weight = band->weights[tap * band->size + i];
        const float *restrict row = from + (size_t)(band->first[i] + tap) * voxels;
        for (int z = 0; z < voxels; z++)
            to[z] += weight * row[z];
    }
}

/* Smooths one channel of the volume by its bands; background stays. `scratch` is of [grid] and three planes more. */
static void smooth(const struct sample *sample, const struct band *bands, int channel, float *volume, float *scratch)
{
    const int *grid = sample->grid;
    int channels = sample->image.channels;
    size_t plane = (size_t)grid[Y] * grid[Z], longest = grid[X] > grid[Y] ? grid[X] : grid[Y];
    float *values = scratch, *slab = values + grid[X] * plane, *across = slab + longest * grid[Z], *row = across + plane;
    for (int x = 0; x < grid[X]; x++) {
        const float *from = volume + x * plane * channels + channel;
        for (int z = 0; z < grid[Z]; z++) /* [z][y], so that rows along Y are combined in vectors */
            for (int y = 0; y < grid[Y]; y++)
                across[z * grid[Y] + y] = from[(y * (size_t)grid[Z] + z) * channels];
        for (int z = 0; z < grid[Z]; z++) {
            combine(&bands[Z], z, across, grid[Y], row);
            for (int y = 0; y < grid[Y]; y++)
                slab[y * grid[Z] + z] = row[y];
        }
        for (int y = 0; y < grid[Y]; y++)
            combine(&bands[Y], y, slab, grid[Z], values + x * plane + (size_t)y * grid[Z]);
    }
    for (int y = 0; y < grid[Y]; y++) {
        for (int x = 0; x < grid[X]; x++)
            memcpy(slab + (size_t)x * grid[Z], values + x * plane + (size_t)y * grid[Z], grid[Z] * sizeof *slab);
        for (int x = 0; x < grid[X]; x++) {
            combine(&bands[X], x, slab, grid[Z], row);
            float *to = volume + (x * plane + (size_t)y * grid[Z]) * channels + channel;
            for (int z = 0; z < grid[Z]; z++)
                to[z * channels] = either(to[z * channels] != 0, row[z], 0);
        }
    }
}

/* Smooths the channels that have bands. */
static int smooth_channels(const struct sample *sample, float *volume)
{
    const int *grid = sample->grid;
    size_t longest = grid[X] > grid[Y] ? grid[X] : grid[Y];
    longest = (size_t)grid[Z] > longest ? (size_t)grid[Z] : longest;
    float *scratch = floats((size_t)grid[X] * grid[Y] * grid[Z] + 3 * longest * longest);
    if (!scratch)
        return -1;
    for (int c = 0; c < sample->image.channels; c++)
        if (sample->smoothing[AXES * c].taps)
            smooth(sample, sample->smoothing + AXES * c, c, volume, scratch);
    free(scratch);
    return 0;
}

/* Of a channel's voxels that are not background. */
struct statistics {
    double count, sum, squares;
    float low, high;
};

/* Statistics of each channel of rows [count][row], from sums over the rows for each place in a row. */
static int measure(const float *volume, size_t rows, int row, int channels, struct statistics *of)
{
    double *sums = malloc(3 * (size_t)row * sizeof *sums);
    float *ends = floats(2 * (size_t)row);
    if (!sums || !ends) {
        free(sums);
        free(ends);
        return -1;
    }
    double *restrict counts = sums, *restrict totals = sums + row, *restrict squares = sums + 2 * row;
    float *restrict lows = ends, *restrict highs = ends + row;
    memset(sums, 0, 3 * (size_t)row * sizeof *sums);
    for (int i = 0; i < row; i++) {
        lows[i] = INFINITY;
        highs[i] = -INFINITY;
    }
    for (size_t r = 0; r < rows; r++) {
        const float *restrict values = volume + r * row;
        for (int i = 0; i < row; i++) {
            float value = values[i];
            double wide = value;
            counts[i] += value == 0 ? 0 : 1;
            totals[i] += wide;
            squares[i] += wide * wide;
            float low = value == 0 ? INFINITY : value, high = value == 0 ? -INFINITY : value;
            lows[i] = low < lows[i] ? low : lows[i];
            highs[i] = high > highs[i] ? high : highs[i];
        }
    }
    for (int c = 0; c < channels; c++)
        of[c] = (struct statistics){0, 0, 0, INFINITY, -INFINITY};
    for (int i = 0; i < row; i++) {
        struct statistics *channel = &of[i % channels];
        channel->count += counts[i];
        channel->sum += totals[i];
        channel->squares += squares[i];
        channel->low = fminf(channel->low, lows[i]);
        channel->high = fmaxf(channel->high, highs[i]);
    }
    free(sums);
    free(ends);
    return 0;
}

static float mean_of(const struct statistics *of) { return of->count > 0 ? (float)(of->sum / of->count) : 0; }

static float deviation_of(const struct statistics *of)
{
    if (of->count < 1)
        return 0;
    double mean = of->sum / of->count, variance = of->squares / of->count - mean * mean;
    return variance > 0 ? (float)sqrt(variance) : 0;
}

/* x to the power of an exponent, to a millionth, for results from 2^-126 up to 1. */
ALWAYS_INLINE float power(float x, float exponent)
{
    uint32_t bits = bits_of(x);
    int scale = (int)(bits - 0x3f3504f3) >> 23; /* the mantissa is between the roots of 1/2 and of 2 */
    float t = from_bits(bits - ((uint32_t)scale << 23));
    t = (t - 1) / (t + 1);
    float square = t * t;
    float series = 1 + square * (1 / 3.0f + square * (1 / 5.0f + square * (1 / 7.0f + square * (1 / 9.0f))));
    float log2 = (float)scale + 2.885390082f * t * series;
    float wanted = log2 * exponent;
    int whole = (int)(wanted - 0.5f);
    float rest = (wanted - (float)whole) * 0.69314718f;
    float e = 1 + rest * (1 / 5.0f) * (1 + rest * (1 / 6.0f) * (1 + rest * (1 / 7.0f)));
    e = 1 + rest * (1 + rest * (1 / 2.0f) * (1 + rest * (1 / 3.0f) * (1 + rest * (1 / 4.0f) * e)));
    return e * from_bits((uint32_t)(whole + 127) << 23);
}

/* Rows of numbers that a change of intensity repeats for every value of a row. */
enum { CENTRE, FACTOR, LOW, HIGH, NUMBERS };

/* Deviations from the mean times a factor, within the range that there was. */
static void change_contrast(const float *numbers, float *volume, size_t rows, int row)
{
    const float *restrict centre = numbers + CENTRE * row, *restrict factor = numbers + FACTOR * row;
    const float *restrict low = numbers + LOW * row, *restrict high = numbers + HIGH * row;
    for (size_t r = 0; r < rows; r++) {
        float *restrict values = volume + r * row;
        for (int i = 0; i < row; i++) {
            float made = centre[i] + factor[i] * (values[i] - centre[i]);
            made = made < low[i] ? low[i] : made;
            made = made > high[i] ? high[i] : made;
            values[i] = either((factor[i] != 1) & (values[i] != 0), made, values[i]);
        }
    }
}

/* The share of the range from CENTRE on, to a power; FACTOR is the range, negative for the negative image. */
static void change_gamma(const float *numbers, const float *restrict exponent, float *volume, size_t rows, int row)
{
    const float *restrict centre = numbers + CENTRE * row, *restrict range = numbers + FACTOR * row;
    const float *restrict share = numbers + HIGH * row;
    for (size_t r = 0; r < rows; r++) {
        float *restrict values = volume + r * row;
        for (int i = 0; i < row; i++) {
            float x = (values[i] - centre[i]) * share[i];
            x = x < 1e-6f ? 1e-6f : x;
            x = x > 1 ? 1 : x;
            float made = centre[i] + range[i] * power(x, exponent[i]);
            values[i] = either((exponent[i] != 1) & (values[i] != 0), made, values[i]);
        }
    }
}

static int apply_contrast(const struct sample *sample, float *volume, size_t rows, int row, float *numbers)
{
    int channels = sample->image.channels;
    struct statistics of[channels];
    float values[NUMBERS][channels];
    if (measure(volume, rows, row, channels, of))
        return -1;
    for (int c = 0; c < channels; c++) {
        values[CENTRE][c] = mean_of(&of[c]);
        values[FACTOR][c] = sample->contrast[c];
        values[LOW][c] = of[c].low;
        values[HIGH][c] = of[c].high;
    }
    for (int i = 0; i < NUMBERS; i++)
        repeat(numbers + i * row, values[i], sample->grid[Z], channels);
    change_contrast(numbers, volume, rows, row);
    return 0;
}

/* Gamma, after which a channel has its mean and deviation again. */
static int apply_gamma(const struct sample *sample, float *volume, size_t rows, int row, float *numbers)
{
    int channels = sample->image.channels;
    struct statistics before[channels], after[channels];
    float values[NUMBERS][channels];
    if (measure(volume, rows, row, channels, before))
        return -1;
    for (int c = 0; c < channels; c++) {
        float range = before[c].count > 0 ? before[c].high - before[c].low : 0;
        values[CENTRE][c] = sample->inverted[c] ? before[c].high : before[c].low;
        values[FACTOR][c] = sample->inverted[c] ? -range : range;
        values[LOW][c] = range > 0 ? sample->gamma[c] : 1;
        values[HIGH][c] = range > 0 ? 1 / values[FACTOR][c] : 0;
        if (!(before[c].count > 0))
            values[CENTRE][c] = 0;
    }
    for (int i = 0; i < NUMBERS; i++)
        repeat(numbers + i * row, values[i], sample->grid[Z], channels);
    change_gamma(numbers, numbers + LOW * row, volume, rows, row);
    if (measure(volume, rows, row, channels, after))
        return -1;
    for (int c = 0; c < channels; c++) {
        int is_changed = values[LOW][c] != 1 && deviation_of(&after[c]) > 0;
        float factor = is_changed ? deviation_of(&before[c]) / deviation_of(&after[c]) : 1;
        values[CENTRE][c] = is_changed ? mean_of(&after[c]) : 0;
        values[FACTOR][c] = factor;
        values[LOW][c] = is_changed ? mean_of(&before[c]) : 0;
    }
    for (int i = 0; i < HIGH; i++)
        repeat(numbers + i * row, values[i], sample->grid[Z], channels);
    const float *restrict from = numbers + CENTRE * row, *restrict factor = numbers + FACTOR * row;
    const float *restrict onto = numbers + LOW * row;
    for (size_t r = 0; r < rows; r++) {
        float *restrict value = volume + r * row;
        for (int i = 0; i < row; i++)
            value[i] = either((factor[i] != 1) & (value[i] != 0), onto[i] + factor[i] * (value[i] - from[i]), value[i]);
    }
    return 0;
}

/* The changes that need all of the volume: smoothing, contrast, gamma. */
static int change_volume(const struct sample *sample, float *volume)
{
    int row = sample->grid[Z] * sample->image.channels;
    int failed = sample->smoothing && smooth_channels(sample, volume);
    size_t rows = (size_t)sample->grid[X] * sample->grid[Y];
    float *numbers = floats(NUMBERS * (size_t)row);
    failed = failed || !numbers;
    if (!failed && sample->contrast)
        failed = apply_contrast(sample, volume, rows, row, numbers);
    if (!failed && sample->gamma)
        failed = apply_gamma(sample, volume, rows, row, numbers);
    free(numbers);
    return failed ? -1 : 0;
}

/* --- The sample --- */

static void round_row(const float *restrict from, int count, uint16_t *restrict to)
{
    for (int i = 0; i < count; i++)
        to[i] = to_bfloat16(from[i]);
}

/* The image from the box on the network's grid. */
static int make_image(const struct sample *sample, const struct box *box)
{
    const int *grid = sample->grid;
    int channels = box->channels, count = grid[Z] * channels;
    int needs_all = sample->smoothing || sample->contrast || sample->gamma;
    size_t all = (size_t)grid[X] * grid[Y] * count;
    float *made = NULL; /* all of the volume, or a row of it */
    if (sample->is_bfloat16)
        made = floats(needs_all ? all : (size_t)count);
    float *volume = sample->is_bfloat16 ? made : sample->to_image;
    float *noise = floats(4 * (size_t)count);
    struct rows rows = {0};
    int failed = !volume || !noise || begin_rows(&rows, box);
    if (!failed && sample->noise)
        repeat_noise(sample, noise, (uint32_t *)(noise + count));
    for (int x = 0; x < grid[X] && !failed; x++)
        for (int y = 0; y < grid[Y]; y++) {
            size_t number = (size_t)x * grid[Y] + y;
            float *row = sample->is_bfloat16 && !needs_all ? made : volume + number * count;
            sample_row(&rows, sample, x, y, row);
            if (sample->noise) {
                size_t from_x = sample->flips[X] ? grid[X] - 1 - x : x;
                size_t from_y = sample->flips[Y] ? grid[Y] - 1 - y : y;
                uint32_t first = (uint32_t)((from_x * grid[Y] + from_y) * grid[Z]);
                add_noise(sample, row, first, noise, (uint32_t *)(noise + count));
            }
            if (row == made && !needs_all)
                round_row(row, count, (uint16_t *)sample->to_image + number * count);
        }
    if (!failed && needs_all)
        failed = change_volume(sample, volume);
    if (!failed && needs_all && sample->is_bfloat16)
        for (size_t r = 0; r < (size_t)grid[X] * grid[Y]; r++)
            round_row(volume + r * count, count, (uint16_t *)sample->to_image + r * count);
    end_rows(&rows);
    free(noise);
    free(made);
    return failed ? -1 : 0;
}

/* Cut a label's box to the voxels of a region; returns whether there are any. */
static int cut_to_regions(struct box *box)
{
    uint8_t is_of_region[256];
    for (int code = 0; code < 256; code++) {
        is_of_region[code] = 0;
        for (int c = 0; c < box->channels; c++)
            is_of_region[code] |= box->table[code * box->channels + c];
    }
    int low[AXES] = {box->size[X], box->size[Y], box->size[Z]}, high[AXES] = {0};
    for (int x = 0; x < box->size[X]; x++)
        for (int y = 0; y < box->size[Y]; y++) {
            const uint8_t *row = (const uint8_t *)box->values + x * box->strides[X] + y * box->strides[Y];
            int first = 0, stop = box->size[Z];
            while (first < stop && !is_of_region[row[first]])
                first++;
            while (stop > first && !is_of_region[row[stop - 1]])
                stop--;
            if (first == stop)
                continue;
            const int from[AXES] = {x, y, first}, to[AXES] = {x + 1, y + 1, stop};
            for (int axis = 0; axis < AXES; axis++) {
                low[axis] = from[axis] < low[axis] ? from[axis] : low[axis];
                high[axis] = to[axis] > high[axis] ? to[axis] : high[axis];
            }
        }
    if (high[X] == 0)
        return 0;
    const uint8_t *values = box->values;
    for (int axis = 0; axis < AXES; axis++) {
        values += low[axis] * box->strides[axis];
        box->at[axis] += low[axis];
        box->size[axis] = high[axis] - low[axis];
    }
    box->values = values;
    return 1;
}

/* The target from the label's box on the network's grid: inside where a region's mean is at least 1/2. */
static int make_target(const struct sample *sample, const struct box *box)
{
    const int *grid = sample->grid;
    int count = grid[Z] * box->channels;
    float *row = floats(count);
    struct rows rows = {0};
    int failed = !row || begin_rows(&rows, box);
    for (int x = 0; x < grid[X] && !failed; x++)
        for (int y = 0; y < grid[Y]; y++) {
            int from_x = sample->flips[X] ? grid[X] - 1 - x : x;
            int from_y = sample->flips[Y] ? grid[Y] - 1 - y : y;
            if (sample->matrix) {
                if (!turned_row(&rows, sample, from_x, from_y, row))
                    continue;
            } else {
                int at_x = from_x - box->at[X], at_y = from_y - box->at[Y];
                if (at_x < 0 || at_x >= box->size[X] || at_y < 0 || at_y >= box->size[Y])
                    continue;
                plain_row(&rows, from_x, from_y, grid[Z], sample->flips[Z], row);
            }
            uint8_t *to = sample->to_target + ((size_t)x * grid[Y] + y) * count;
            for (int i = 0; i < count; i++)
                to[i] = row[i] >= INSIDE;
        }
    end_rows(&rows);
    free(row);
    return failed ? -1 : 0;
}

/* Makes a sample: 0, or -1 if memory ran out. */
int make_sample(const struct sample *sample)
{
    struct box image = sample->image, label = sample->label, averaged = {0};
    if (sample->shrinking) {
        if (shrink(&image, sample->shrinking, &averaged))
            return -1;
        image = averaged;
    }
    int failed = make_image(sample, &image);
    free((void *)averaged.values);
    if (failed || !cut_to_regions(&label))
        return failed;
    averaged.values = NULL;
    if (sample->shrinking) {
        if (shrink(&label, sample->shrinking, &averaged))
            return -1;
        label = averaged;
    }
    failed = make_target(sample, &label);
    free((void *)averaged.values);
    return failed;
}
