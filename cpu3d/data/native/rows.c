/* Rows of a sample along Z: stored voxels as float32, in their place. */
#include "samples.h"

int begin_rows(struct rows *rows, const struct box *box)
{
    size_t count = (size_t)box->size[Z] * box->channels;
    rows->box = *box;
    rows->scale = floats(3 * count);
    if (!rows->scale)
        return -1;
    rows->shift = rows->scale + count;
    rows->spare = rows->shift + count;
    if (box->kind != LABEL) {
        repeat(rows->scale, box->scale, box->size[Z], box->channels);
        repeat(rows->shift, box->shift, box->size[Z], box->channels);
    }
    return 0;
}

void end_rows(struct rows *rows) { free(rows->scale); }

/* The values of a row of an image, not yet scaled. */
static void read_row(const struct box *box, int64_t start, float *restrict to)
{
    int channels = box->channels;
    int count = box->size[Z] * channels;
    int are_adjacent = box->strides[Z] == channels;
    for (int c = 0; c < channels; c++)
        are_adjacent &= box->picked[c] == c;
    if (are_adjacent && box->kind == INT16) {
        const int16_t *from = (const int16_t *)box->values + start;
        for (int i = 0; i < count; i++)
            to[i] = from[i];
    } else {
        for (int i = 0; i < count; i++) {
            int64_t voxel = start + i / channels * box->strides[Z];
            int c = i % channels;
            to[i] = value_at(box, box->kind, voxel + box->picked[c], c);
        }
    }
}

void stored_row(const struct rows *rows, int x, int y, float *restrict to)
{
    const struct box *box = &rows->box;
    const float *restrict scale = rows->scale;
    const float *restrict shift = rows->shift;
    int channels = box->channels;
    int count = box->size[Z] * channels;
    int64_t start = x * box->strides[X] + y * box->strides[Y];
    if (box->kind == LABEL) {
        const uint8_t *codes = (const uint8_t *)box->values + start;
        for (int z = 0; z < box->size[Z]; z++)
            for (int c = 0; c < channels; c++)
                to[z * channels + c] = box->table[codes[z * box->strides[Z]] * channels + c];
    } else {
        read_row(box, start, to);
        for (int i = 0; i < count; i++)
            to[i] = to[i] == 0 ? 0 : to[i] * scale[i] + shift[i];
    }
}

/* A row of the sample's grid: the box's where it lies, 0 around it. Returns as `sample_row`. */
static int plain_row(const struct rows *rows, const struct sample *sample, int x, int y, float *to)
{
    const struct box *box = &rows->box;
    int channels = box->channels;
    int voxels = sample->grid[Z];
    int from_x = x - box->start[X];
    int from_y = y - box->start[Y];
    memset(to, 0, (size_t)voxels * channels * sizeof(float));
    if (from_x < 0 || from_x >= box->size[X] || from_y < 0 || from_y >= box->size[Y])
        return 0;
    if (!sample->flips[Z]) {
        stored_row(rows, from_x, from_y, to + box->start[Z] * channels);
        return 1;
    }
    stored_row(rows, from_x, from_y, rows->spare);
    float *last = to + (voxels - 1 - box->start[Z]) * channels;
    for (int z = 0; z < box->size[Z]; z++)
        for (int c = 0; c < channels; c++)
            last[c - z * channels] = rows->spare[z * channels + c];
    return 1;
}

int sample_row(const struct rows *rows, const struct sample *sample, int x, int y, float *to)
{
    int from_x = sample->flips[X] ? sample->grid[X] - 1 - x : x;
    int from_y = sample->flips[Y] ? sample->grid[Y] - 1 - y : y;
    if (sample->matrix)
        return turned_row(rows, sample, from_x, from_y, to);
    return plain_row(rows, sample, from_x, from_y, to);
}
