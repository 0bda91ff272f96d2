/* Makes one sample of a training: from the stored voxels of a case to the network's image and
   target, on one thread.

   Stored voxels are normalised, turned and zoomed, changed in intensity, mirrored and rounded.
   plain.py has the same in NumPy, a step at a time; samples.py calls both. Volumes are
   [x][y][z][channels] in C order. Up to the turn, 0 is what surrounds the box, in every channel;
   `outside` then makes it the value of what surrounds a volume. In a channel with a background that
   is 0 too, and intensity leaves it alone. */
#include "samples.h"

/* A region's mean from which on a voxel is inside: resample.TIE below a half. */
static const float INSIDE = 0.5f - 1e-4f;
/* The share of ignored voxels in what a voxel is turned from, above which it is ignored too. */
static const float MOST_IGNORED = 0.5f + 1e-4f;

static void round_row(const float *restrict from, int count, uint16_t *restrict to)
{
    for (int i = 0; i < count; i++)
        to[i] = to_bfloat16(from[i]);
}

/* What is done to a whole row in the end: numbers that are repeated for each of its voxels. */
struct ends {
    float *outside, *lowest, *highest; /* [grid[Z]][channels] */
};

/* Without memory, and of no rows, if the sample needs no ends. */
static int begin_ends(struct ends *ends, const struct sample *sample)
{
    int channels = sample->image.channels;
    int count = sample->grid[Z] * channels;
    if (!sample->outside)
        return 0;
    ends->outside = floats(3 * (size_t)count);
    if (!ends->outside)
        return -1;
    ends->lowest = ends->outside + count;
    ends->highest = ends->lowest + count;
    for (int i = 0; i < count; i++) {
        ends->outside[i] = sample->outside[i % channels];
        ends->lowest[i] = sample->limits[2 * (i % channels)];
        ends->highest[i] = sample->limits[2 * (i % channels) + 1];
    }
    return 0;
}

static void add_outside(const struct ends *ends, int count, float *restrict row)
{
    for (int i = 0; i < count && ends->outside; i++)
        row[i] += ends->outside[i];
}

static void limit(const struct ends *ends, int count, float *restrict row)
{
    for (int i = 0; i < count && ends->outside; i++) {
        row[i] = row[i] < ends->lowest[i] ? ends->lowest[i] : row[i];
        row[i] = row[i] > ends->highest[i] ? ends->highest[i] : row[i];
    }
}

/* The image from its box. It is computed in its own memory, or as bfloat16 a row at a time, or as a
   whole if a change of intensity needs that. */
static int make_image(const struct sample *sample)
{
    size_t rows_of_all = (size_t)sample->grid[X] * sample->grid[Y];
    const struct box *box = &sample->image;
    int count = sample->grid[Z] * box->channels;
    int needs_all = sample->smoothing || sample->contrast || sample->gamma;
    int by_rows = sample->is_bfloat16 && !needs_all;
    float *made = NULL;
    if (sample->is_bfloat16)
        made = floats(by_rows ? (size_t)count : rows_of_all * count);
    float *volume = sample->is_bfloat16 ? made : sample->to_image;
    uint16_t *rounded = sample->to_image;
    float *noise = floats(NOISE_NUMBERS * (size_t)count);
    struct rows rows = {0};
    struct ends ends = {0};
    int failed = !volume || !noise || begin_rows(&rows, box) || begin_ends(&ends, sample);
    if (!failed && sample->noise)
        repeat_noise(sample, noise);
    for (size_t r = 0; r < rows_of_all && !failed; r++) {
        int x = (int)(r / sample->grid[Y]);
        int y = (int)(r % sample->grid[Y]);
        float *row = by_rows ? made : volume + r * count;
        sample_row(&rows, sample, x, y, row);
        add_outside(&ends, count, row);
        if (sample->noise)
            add_noise(sample, x, y, noise, row);
        if (!needs_all)
            limit(&ends, count, row);
        if (by_rows)
            round_row(row, count, rounded + r * count);
    }
    if (!failed && needs_all)
        failed = change_volume(sample, volume);
    for (size_t r = 0; r < rows_of_all && !failed && needs_all; r++) {
        limit(&ends, count, volume + r * count);
        if (sample->is_bfloat16)
            round_row(volume + r * count, count, rounded + r * count);
    }
    end_rows(&rows);
    free(ends.outside);
    free(noise);
    free(made);
    return failed ? -1 : 0;
}

/* Cut a label's box to the voxels of a region, or ignored; returns whether there are any. */
static int cut_to_regions(struct box *box)
{
    uint8_t is_of_region[256] = {0};
    for (int i = 0; i < 256 * box->channels; i++)
        is_of_region[i / box->channels] |= box->table[i];
    int low[AXES] = {box->size[X], box->size[Y], box->size[Z]};
    int high[AXES] = {0};
    const uint8_t *values = box->values;
    for (int x = 0; x < box->size[X]; x++)
        for (int y = 0; y < box->size[Y]; y++) {
            const uint8_t *row = values + x * box->strides[X] + y * box->strides[Y];
            int first = 0;
            int stop = box->size[Z];
            while (first < stop && !is_of_region[row[first * box->strides[Z]]])
                first++;
            while (stop > first && !is_of_region[row[(stop - 1) * box->strides[Z]]])
                stop--;
            if (first == stop)
                continue;
            const int from[AXES] = {x, y, first};
            const int to[AXES] = {x + 1, y + 1, stop};
            for (int axis = 0; axis < AXES; axis++) {
                low[axis] = from[axis] < low[axis] ? from[axis] : low[axis];
                high[axis] = to[axis] > high[axis] ? to[axis] : high[axis];
            }
        }
    if (high[X] == 0)
        return 0;
    for (int axis = 0; axis < AXES; axis++) {
        values += low[axis] * box->strides[axis];
        box->start[axis] += low[axis];
        box->size[axis] = high[axis] - low[axis];
    }
    box->values = values;
    return 1;
}

/* A row of the target, of means over each voxel of `regions` channels and of the ignored voxels. */
static void decide_row(const float *mean, int voxels, int regions, uint8_t *to)
{
    for (int z = 0; z < voxels; z++, mean += regions + 1, to += regions) {
        float ignored = mean[regions];
        for (int c = 0; c < regions; c++)
            to[c] = ignored > MOST_IGNORED ? IGNORED : mean[c] >= INSIDE * (1 - ignored);
    }
}

/* The target from the label's box. */
static int make_target(const struct sample *sample, const struct box *box)
{
    size_t rows_of_all = (size_t)sample->grid[X] * sample->grid[Y];
    int regions = box->channels - sample->has_ignored;
    int count = sample->grid[Z] * regions;
    float *row = floats((size_t)sample->grid[Z] * box->channels);
    struct rows rows = {0};
    int failed = !row || begin_rows(&rows, box);
    for (size_t r = 0; r < rows_of_all && !failed; r++) {
        int x = (int)(r / sample->grid[Y]);
        int y = (int)(r % sample->grid[Y]);
        uint8_t *to = sample->to_target + r * count;
        if (!sample_row(&rows, sample, x, y, row))
            continue;
        if (sample->has_ignored)
            decide_row(row, sample->grid[Z], regions, to);
        else
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
    struct box label = sample->label;
    if (make_image(sample))
        return -1;
    return cut_to_regions(&label) ? make_target(sample, &label) : 0;
}
