/* Turning and zooming: a voxel is the linear interpolation between the eight around the place that
   it comes from; outside of the box is 0. */
#include "samples.h"

enum { CORNERS = 8, SIDE_BY_SIDE = 4 };

/* A row of the sample: voxel z comes from the place start + z * step of the box. */
struct line {
    float start[AXES], step[AXES];
};

/* Where the voxels of a line go: `step` values from one to the next, negative if mirrored. */
struct output {
    float *to;
    int64_t step;
};

/* Narrow voxels `range`, from [0] up to [1], to those of places from low to high on an axis. */
static void narrow(const struct line *line, int axis, double low, double high, int range[2])
{
    double start = line->start[axis];
    double step = line->step[axis];
    if (low > high || fabs(step) < 1e-9) {
        if (low > high || start < low || start > high)
            range[1] = range[0];
        return;
    }
    double one = (low - start) / step;
    double other = (high - start) / step;
    double first = ceil(fmin(one, other));
    double stop = floor(fmax(one, other)) + 1;
    if (first > range[0])
        range[0] = first < range[1] ? (int)first : range[1];
    if (stop < range[1])
        range[1] = stop > range[0] ? (int)stop : range[0];
}

/* The place that a voxel comes from: the first of the eight voxels around it, and their weights. */
ALWAYS_INLINE void corners_of(const struct line *line, int z, int first[AXES], float weights[])
{
    float share[AXES][2];
    for (int axis = 0; axis < AXES; axis++) {
        float place = line->start[axis] + (float)z * line->step[axis];
        int below = (int)(place + 1) - 1; /* of a place above -1 the floor */
        first[axis] = below;
        share[axis][1] = place - (float)below;
        share[axis][0] = 1 - share[axis][1];
    }
    for (int i = 0; i < CORNERS; i++)
        weights[i] = share[X][i >> 2] * share[Y][i >> 1 & 1] * share[Z][i & 1];
}

ALWAYS_INLINE int64_t offset_of(const struct box *box, const int first[AXES], int corner)
{
    int64_t x = first[X] + (corner >> 2);
    int64_t y = first[Y] + (corner >> 1 & 1);
    int64_t z = first[Z] + (corner & 1);
    return x * box->strides[X] + y * box->strides[Y] + z * box->strides[Z];
}

ALWAYS_INLINE int is_in(const struct box *box, const int first[AXES], int corner)
{
    unsigned x = first[X] + (corner >> 2);
    unsigned y = first[Y] + (corner >> 1 & 1);
    unsigned z = first[Z] + (corner & 1);
    const int *size = box->size;
    return x < (unsigned)size[X] && y < (unsigned)size[Y] && z < (unsigned)size[Z];
}

/* --- Images. Kind, channels and `is_checked` are constants where these are inlined --- */

typedef float four __attribute__((vector_size(16)));
typedef int32_t four_bits __attribute__((vector_size(16)));
typedef int16_t four_shorts __attribute__((vector_size(8)));

/* The values of four stored channels from the first picked one on. */
ALWAYS_INLINE four four_at(const struct box *box, int kind, int64_t offset)
{
    four_shorts stored;
    memcpy(&stored, (const int16_t *)box->values + offset + box->picked[0], sizeof stored);
    four values = __builtin_convertvector(__builtin_convertvector(stored, four_bits), four);
    for (int c = 0; c < SIDE_BY_SIDE && kind == WINDOWED; c++)
        values[c] = windowed(values[c], box->window + WINDOW * c);
    return values;
}

ALWAYS_INLINE void turn_four(const struct box *box, int kind, int is_checked, const int first[AXES],
                             const float share[CORNERS], float *voxel)
{
    four values = {0};
    four weights = {0}; /* of the corners that are not background */
    for (int i = 0; i < CORNERS; i++) {
        if (is_checked && !is_in(box, first, i))
            continue;
        four stored = four_at(box, kind, offset_of(box, first, i));
        four weight = {share[i], share[i], share[i], share[i]};
        values += weight * stored;
        weights += (four)((four_bits)weight & (stored != 0));
    }
    four scale, shift;
    memcpy(&scale, box->scale, sizeof scale);
    memcpy(&shift, box->shift, sizeof shift);
    values = values * scale + weights * shift;
    memcpy(voxel, &values, sizeof values);
}

ALWAYS_INLINE void turn_one(const struct box *box, int kind, int is_checked, const int first[AXES],
                            const float share[CORNERS], float *voxel)
{
    float sum = 0;
    float weight = 0; /* of the corners that are not background */
    for (int i = 0; i < CORNERS; i++) {
        if (is_checked && !is_in(box, first, i))
            continue;
        float value = value_at(box, kind, offset_of(box, first, i) + box->picked[0], 0);
        sum += share[i] * value;
        weight += value == 0 ? 0 : share[i];
    }
    *voxel = sum * box->scale[0] + weight * box->shift[0];
}

/* Voxels `range` of a line. Unless `is_checked` all of their corners are in the box. */
ALWAYS_INLINE void turn_voxels(const struct box *box, int kind, int channels, int is_checked,
                               const struct line *line, const int range[2],
                               const struct output *output)
{
    for (int z = range[0]; z < range[1]; z++) {
        int first[AXES];
        float share[CORNERS];
        float *voxel = output->to + z * output->step;
        corners_of(line, z, first, share);
        if (channels == SIDE_BY_SIDE)
            turn_four(box, kind, is_checked, first, share, voxel);
        else
            turn_one(box, kind, is_checked, first, share, voxel);
    }
}

ALWAYS_INLINE void turn_kind(const struct box *box, int kind, int is_checked,
                             const struct line *line, const int range[2],
                             const struct output *output)
{
    int are_adjacent = box->channels == SIDE_BY_SIDE;
    for (int c = 1; c < box->channels; c++)
        are_adjacent &= box->picked[c] == box->picked[0] + c;
    if (are_adjacent) {
        turn_voxels(box, kind, SIDE_BY_SIDE, is_checked, line, range, output);
        return;
    }
    for (int c = 0; c < box->channels; c++) { /* one after the other */
        struct box one = *box;
        struct output to = *output;
        one.channels = 1;
        one.picked += c;
        one.scale += c;
        one.shift += c;
        if (kind == WINDOWED)
            one.window += WINDOW * c;
        to.to += c;
        turn_voxels(&one, kind, 1, is_checked, line, range, &to);
    }
}

/* --- Labels --- */

/* Each region's mean. Most voxels are between eight of the same code. */
static void turn_labels(const struct box *box, const struct line *line, const int range[2],
                        const struct output *output)
{
    const uint8_t *codes = box->values;
    int regions = box->channels;
    for (int z = range[0]; z < range[1]; z++) {
        int first[AXES], code[CORNERS];
        int are_same = 1;
        float share[CORNERS];
        float *voxel = output->to + z * output->step;
        corners_of(line, z, first, share);
        for (int i = 0; i < CORNERS; i++) {
            code[i] = is_in(box, first, i) ? codes[offset_of(box, first, i)] : 0;
            are_same &= code[i] == code[0];
        }
        for (int c = 0; c < regions; c++) {
            voxel[c] = are_same ? box->table[code[0] * regions + c] : 0;
            for (int i = 0; i < CORNERS && !are_same; i++)
                voxel[c] += share[i] * box->table[code[i] * regions + c];
        }
    }
}

/* --- Rows --- */

static void turn_range(const struct box *box, int is_checked, const struct line *line,
                       const int range[2], const struct output *output)
{
    if (box->kind == LABEL)
        turn_labels(box, line, range, output);
    else if (box->kind == INT16 && is_checked)
        turn_kind(box, INT16, 1, line, range, output);
    else if (box->kind == INT16)
        turn_kind(box, INT16, 0, line, range, output);
    else if (is_checked)
        turn_kind(box, WINDOWED, 1, line, range, output);
    else
        turn_kind(box, WINDOWED, 0, line, range, output);
}

/* The line of the row at x, y, about the centre of the grid. */
static struct line line_of(const struct sample *sample, const struct box *box, int x, int y)
{
    struct line line;
    double centre[AXES];
    for (int axis = 0; axis < AXES; axis++)
        centre[axis] = (sample->grid[axis] - 1) * 0.5;
    for (int axis = 0; axis < AXES; axis++) {
        const float *m = sample->matrix + AXES * axis;
        double start = centre[axis] - box->start[axis];
        start += m[X] * (x - centre[X]) + m[Y] * (y - centre[Y]) - m[Z] * centre[Z];
        line.start[axis] = (float)start;
        line.step[axis] = m[Z];
    }
    return line;
}

int turned_row(const struct rows *rows, const struct sample *sample, int x, int y, float *to)
{
    const struct box *box = &rows->box;
    int voxels = sample->grid[Z];
    struct line line = line_of(sample, box, x, y);
    int touched[2] = {0, voxels}; /* voxels that come partly from the box */
    for (int axis = 0; axis < AXES; axis++)
        narrow(&line, axis, -1 + 1e-6, box->size[axis] - 1e-6, touched);
    int inner[2] = {touched[0], touched[1]}; /* wholly, with room for the rounding of a place */
    for (int axis = 0; axis < AXES; axis++)
        narrow(&line, axis, 1e-3, box->size[axis] - 1 - 1e-3, inner);
    memset(to, 0, (size_t)voxels * box->channels * sizeof(float));
    if (touched[0] >= touched[1])
        return 0;
    struct output output = {.to = to, .step = box->channels};
    if (sample->flips[Z]) {
        output.to += (voxels - 1) * output.step;
        output.step = -output.step;
    }
    if (inner[0] >= inner[1]) { /* none */
        inner[0] = touched[1];
        inner[1] = touched[1];
    }
    const int before[2] = {touched[0], inner[0]};
    const int after[2] = {inner[1], touched[1]};
    turn_range(box, 1, &line, before, &output);
    turn_range(box, 0, &line, inner, &output);
    turn_range(box, 1, &line, after, &output);
    return 1;
}
