/* Averaging a box down to the network's grid. */
#include "samples.h"

/* The voxels that a band makes, from reach[0] up to reach[1], of those `start` up to
   `start + size`. */
static void reached(const struct band *band, int start, int size, int reach[2])
{
    reach[0] = band->size;
    reach[1] = 0;
    for (int i = 0; i < band->size; i++)
        if (band->first[i] < start + size && band->first[i] + band->taps > start) {
            reach[0] = i < reach[0] ? i : reach[0];
            reach[1] = i + 1;
        }
    if (reach[1] < reach[0])
        reach[0] = reach[1];
}

/* Voxels `reach` of a band's axis from the row [box.size[Z]][channels]. */
static void shrink_row(const struct box *box, const struct band *band, const int reach[2],
                       const float *row, float *to)
{
    int channels = box->channels;
    for (int i = reach[0]; i < reach[1]; i++) {
        float *voxel = to + (size_t)(i - reach[0]) * channels;
        memset(voxel, 0, channels * sizeof *voxel);
        for (int tap = 0; tap < band->taps; tap++) {
            int from = band->first[i] + tap - box->start[Z];
            float weight = band->weights[tap * band->size + i];
            if (weight == 0 || from < 0 || from >= box->size[Z])
                continue;
            for (int c = 0; c < channels; c++)
                voxel[c] += weight * row[from * channels + c];
        }
    }
}

/* The weighted sum of the box's rows that make up the row at x, y; `row` is to read one in. */
static void weigh_rows(const struct rows *rows, const struct band *bands, int x, int y, float *row,
                       float *sum)
{
    const struct box *box = &rows->box;
    const struct band *along_x = &bands[X];
    const struct band *along_y = &bands[Y];
    int count = box->size[Z] * box->channels;
    memset(sum, 0, count * sizeof *sum);
    for (int tap = 0; tap < along_x->taps * along_y->taps; tap++) {
        int tap_x = tap / along_y->taps;
        int tap_y = tap % along_y->taps;
        int from_x = along_x->first[x] + tap_x - box->start[X];
        int from_y = along_y->first[y] + tap_y - box->start[Y];
        float weight = along_x->weights[tap_x * along_x->size + x];
        weight *= along_y->weights[tap_y * along_y->size + y];
        if (weight == 0 || from_x < 0 || from_x >= box->size[X])
            continue;
        if (from_y < 0 || from_y >= box->size[Y])
            continue;
        stored_row(rows, from_x, from_y, row);
        for (int i = 0; i < count; i++)
            sum[i] += weight * row[i];
    }
}

int shrink(const struct box *box, const struct band *bands, struct box *to)
{
    int reach[AXES][2];
    *to = *box;
    to->kind = FLOAT32;
    for (int axis = 0; axis < AXES; axis++) {
        reached(&bands[axis], box->start[axis], box->size[axis], reach[axis]);
        to->start[axis] = reach[axis][0];
        to->size[axis] = reach[axis][1] - reach[axis][0];
    }
    to->strides[Z] = box->channels;
    to->strides[Y] = to->size[Z] * to->strides[Z];
    to->strides[X] = to->size[Y] * to->strides[Y];
    size_t count = (size_t)box->size[Z] * box->channels;
    float *values = floats(to->size[X] * to->strides[X]);
    float *row = floats(2 * count);
    struct rows rows = {0};
    int failed = !values || !row || begin_rows(&rows, box);
    for (int x = 0; x < to->size[X] && !failed; x++)
        for (int y = 0; y < to->size[Y]; y++) {
            float *made = values + x * to->strides[X] + y * to->strides[Y];
            weigh_rows(&rows, bands, x + to->start[X], y + to->start[Y], row, row + count);
            shrink_row(box, &bands[Z], reach[Z], row + count, made);
        }
    end_rows(&rows);
    free(row);
    if (failed) {
        free(values);
        values = NULL;
    }
    to->values = values;
    return failed ? -1 : 0;
}
