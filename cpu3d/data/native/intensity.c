/* Changes of intensity, which leave background alone: the value of a channel that has one. NaN is
   equal to no value, so where it is the background, all voxels change.

   Loops go over a whole row, [z][channels], by numbers that are repeated for each of its voxels:
   so they are computed in vectors whatever the number of channels is. */
#include "samples.h"

/* --- Noise --- */

/* Wellons 2018, "Prospecting for hash functions": lowbias32. */
ALWAYS_INLINE uint32_t mixed(uint32_t word)
{
    word = (word ^ word >> 16) * 0x7feb352d;
    word = (word ^ word >> 15) * 0x846ca68b;
    return word ^ word >> 16;
}

/* Fills what `add_noise` needs for each value of a row: the deviation, both keys, the number of the
   voxel in the row before it is mirrored, and the background. */
void repeat_noise(const struct sample *sample, float *numbers)
{
    int channels = sample->image.channels;
    int voxels = sample->grid[Z];
    int count = voxels * channels;
    uint32_t *keys = (uint32_t *)(numbers + count);
    repeat(numbers, sample->noise, voxels, channels);
    for (int i = 0; i < count; i++) {
        int z = i / channels;
        keys[i] = sample->noise_keys[2 * (i % channels)];
        keys[count + i] = sample->noise_keys[2 * (i % channels) + 1];
        keys[2 * count + i] = sample->flips[Z] ? voxels - 1 - z : z;
    }
    repeat(numbers + (NOISE_NUMBERS - 1) * count, sample->background, voxels, channels);
}

/* A voxel's noise is a function of the key and of its number alone: the sum of eight bytes, which
   is nearly normal. */
void add_noise(const struct sample *sample, int x, int y, const float *numbers, float *row)
{
    int count = sample->grid[Z] * sample->image.channels;
    const float *restrict deviation = numbers;
    const uint32_t *restrict key = (const uint32_t *)(numbers + count);
    const uint32_t *restrict other_key = key + count;
    const uint32_t *restrict place = key + 2 * count;
    const float *restrict background = numbers + (NOISE_NUMBERS - 1) * count;
    float *restrict values = row;
    size_t from_x = sample->flips[X] ? sample->grid[X] - 1 - x : x;
    size_t from_y = sample->flips[Y] ? sample->grid[Y] - 1 - y : y;
    uint32_t number = (uint32_t)((from_x * sample->grid[Y] + from_y) * sample->grid[Z]);
    for (int i = 0; i < count; i++) {
        uint32_t first = mixed(mixed((number + place[i]) ^ key[i]) + other_key[i]);
        uint32_t second = mixed(first + 0x9e3779b9);
        uint32_t pairs = (first & 0xff00ff) + (first >> 8 & 0xff00ff);
        pairs += (second & 0xff00ff) + (second >> 8 & 0xff00ff);
        int sum = (int)(pairs & 0xffff) + (int)(pairs >> 16) - 1020; /* of mean 0 */
        float noise = (float)sum * (1 / 209.0215f) * deviation[i];
        values[i] += values[i] == background[i] ? 0 : noise;
    }
}

/* --- Smoothing --- */

/* Row i of the band's axis from the rows [axis][voxels]. */
static void combine(const struct band *band, int i, const float *restrict from, int voxels,
                    float *restrict to)
{
    memset(to, 0, voxels * sizeof *to);
    for (int tap = 0; tap < band->taps; tap++) {
        float weight = band->weights[tap * band->size + i];
        const float *restrict row = from + (size_t)(band->first[i] + tap) * voxels;
        for (int z = 0; z < voxels; z++)
            to[z] += weight * row[z];
    }
}

/* Memory of `smooth`: one channel of the volume; a plane, [y][z] or [x][z]; a plane [z][y]; and a
   row. Rows of [z][y] are along Y, so that the sums along Z are of rows too. */
struct smoothing {
    float *values, *plane, *across, *row;
};

/* Smooths a channel of a plane of X along Z and Y, into `values`. */
static void smooth_plane(const struct sample *sample, const struct band *bands,
                         const struct smoothing *memory, const float *from, float *values)
{
    int size_y = sample->grid[Y];
    int size_z = sample->grid[Z];
    int channels = sample->image.channels;
    for (int z = 0; z < size_z; z++)
        for (int y = 0; y < size_y; y++)
            memory->across[z * size_y + y] = from[((size_t)y * size_z + z) * channels];
    for (int z = 0; z < size_z; z++) {
        combine(&bands[Z], z, memory->across, size_y, memory->row);
        for (int y = 0; y < size_y; y++)
            memory->plane[y * size_z + z] = memory->row[y];
    }
    for (int y = 0; y < size_y; y++)
        combine(&bands[Y], y, memory->plane, size_z, values + (size_t)y * size_z);
}

/* Smooths a channel of the volume by its bands. */
static void smooth(const struct sample *sample, const struct band *bands,
                   const struct smoothing *memory, int channel, float *volume)
{
    int size_x = sample->grid[X];
    int size_y = sample->grid[Y];
    int size_z = sample->grid[Z];
    int channels = sample->image.channels;
    float background = sample->background[channel];
    size_t plane = (size_t)size_y * size_z;
    for (int x = 0; x < size_x; x++) {
        const float *from = volume + x * plane * channels + channel;
        smooth_plane(sample, bands, memory, from, memory->values + x * plane);
    }
    for (int y = 0; y < size_y; y++) {
        for (int x = 0; x < size_x; x++) {
            const float *from = memory->values + x * plane + (size_t)y * size_z;
            memcpy(memory->plane + (size_t)x * size_z, from, size_z * sizeof *from);
        }
        for (int x = 0; x < size_x; x++) {
            combine(&bands[X], x, memory->plane, size_z, memory->row);
            float *to = volume + (x * plane + (size_t)y * size_z) * channels + channel;
            for (int z = 0; z < size_z; z++)
                to[z * channels] = either(to[z * channels] != background, memory->row[z], 0);
        }
    }
}

/* Smooths the channels that have bands. */
static int smooth_channels(const struct sample *sample, float *volume)
{
    const int *grid = sample->grid;
    size_t longest = grid[X] > grid[Y] ? grid[X] : grid[Y];
    size_t all = (size_t)grid[X] * grid[Y] * grid[Z];
    size_t plane = longest * grid[Z];
    longest = (size_t)grid[Z] > longest ? (size_t)grid[Z] : longest;
    struct smoothing memory = {.values = floats(all + 2 * plane + longest)};
    if (!memory.values)
        return -1;
    memory.plane = memory.values + all;
    memory.across = memory.plane + plane;
    memory.row = memory.across + plane;
    for (int c = 0; c < sample->image.channels; c++) {
        const struct band *bands = sample->smoothing + AXES * c;
        if (bands[X].taps)
            smooth(sample, bands, &memory, c, volume);
    }
    free(memory.values);
    return 0;
}

/* --- Contrast and gamma --- */

/* A volume as rows, and numbers that are repeated for each voxel of a row. */
enum { CENTRE, FACTOR, LEAST, MOST, EXPONENT, NUMBERS };
struct volume {
    float *values; /* [rows][row] */
    size_t rows;
    int row; /* values of a row: [voxels][channels] */
    int voxels, channels;
    float *numbers; /* [NUMBERS][row] */
    float *background; /* [row] */
};

/* Of a channel's voxels that are not background. */
struct statistics {
    double count, sum, squares;
    float low, high;
};

/* Statistics of each channel, from those of each place in a row. */
static int measure(const struct volume *volume, struct statistics *of)
{
    int row = volume->row;
    double *restrict counts = calloc(3 * (size_t)row, sizeof *counts);
    float *restrict lows = floats(2 * (size_t)row);
    if (!counts || !lows) {
        free(counts);
        free(lows);
        return -1;
    }
    double *restrict sums = counts + row;
    double *restrict squares = sums + row;
    float *restrict highs = lows + row;
    const float *restrict background = volume->background;
    for (int i = 0; i < row; i++) {
        lows[i] = INFINITY;
        highs[i] = -INFINITY;
    }
    for (size_t r = 0; r < volume->rows; r++) {
        const float *restrict values = volume->values + r * row;
        for (int i = 0; i < row; i++) {
            double value = values[i];
            int is_background = values[i] == background[i];
            float low = is_background ? INFINITY : values[i];
            float high = is_background ? -INFINITY : values[i];
            counts[i] += is_background ? 0 : 1;
            sums[i] += value;
            squares[i] += value * value;
            lows[i] = low < lows[i] ? low : lows[i];
            highs[i] = high > highs[i] ? high : highs[i];
        }
    }
    for (int c = 0; c < volume->channels; c++)
        of[c] = (struct statistics){.low = INFINITY, .high = -INFINITY};
    for (int i = 0; i < row; i++) {
        struct statistics *channel = &of[i % volume->channels];
        channel->count += counts[i];
        channel->sum += sums[i];
        channel->squares += squares[i];
        channel->low = fminf(channel->low, lows[i]);
        channel->high = fmaxf(channel->high, highs[i]);
    }
    free(counts);
    free(lows);
    return 0;
}

static double mean_of(const struct statistics *of)
{
    return of->count > 0 ? of->sum / of->count : 0;
}

static float deviation_of(const struct statistics *of)
{
    double mean = mean_of(of);
    double variance = of->count > 0 ? of->squares / of->count - mean * mean : 0;
    return variance > 0 ? (float)sqrt(variance) : 0;
}

/* x to the power of an exponent, to a millionth, for results from 2^-126 up to 1. */
ALWAYS_INLINE float power(float x, float exponent)
{
    uint32_t bits = bits_of(x);
    int scale = (int)(bits - 0x3f3504f3) >> 23; /* leaves a mantissa from sqrt(1/2) to sqrt(2) */
    float mantissa = from_bits(bits - ((uint32_t)scale << 23));
    float t = (mantissa - 1) / (mantissa + 1);
    float square = t * t;
    float series = 1 / 7.0f + square * (1 / 9.0f);
    series = 1 + square * (1 / 3.0f + square * (1 / 5.0f + square * series));
    float wanted = ((float)scale + 2.885390082f * t * series) * exponent; /* 2 / log(2) */
    int whole = (int)(wanted - 0.5f);
    float rest = (wanted - (float)whole) * 0.69314718f;
    float e = 1 + rest * (1 / 5.0f) * (1 + rest * (1 / 6.0f) * (1 + rest * (1 / 7.0f)));
    e = 1 + rest * (1 + rest * 0.5f * (1 + rest * (1 / 3.0f) * (1 + rest * 0.25f * e)));
    return e * from_bits((uint32_t)(whole + 127) << 23);
}

/* Repeats numbers [NUMBERS][channels] for each voxel of a row. */
static void repeat_numbers(const struct volume *volume, int channels, float numbers[][channels])
{
    for (int i = 0; i < NUMBERS; i++)
        repeat(volume->numbers + i * volume->row, numbers[i], volume->voxels, channels);
}

/* Deviations from the centre times a factor, from low to high. */
static void stretch(const struct volume *volume)
{
    int row = volume->row;
    const float *restrict centre = volume->numbers + CENTRE * row;
    const float *restrict factor = volume->numbers + FACTOR * row;
    const float *restrict low = volume->numbers + LEAST * row;
    const float *restrict high = volume->numbers + MOST * row;
    const float *restrict background = volume->background;
    for (size_t r = 0; r < volume->rows; r++) {
        float *restrict values = volume->values + r * row;
        for (int i = 0; i < row; i++) {
            float made = centre[i] + factor[i] * (values[i] - centre[i]);
            made = made < low[i] ? low[i] : made;
            made = made > high[i] ? high[i] : made;
            int changes = (factor[i] != 1) & (values[i] != background[i]);
            values[i] = either(changes, made, values[i]);
        }
    }
}

/* The share of the range from the centre on, to a power. The factor is the range, of the negative
   image with a minus, and `high` is 1 / factor. */
static void raise_to_power(const struct volume *volume)
{
    int row = volume->row;
    const float *restrict centre = volume->numbers + CENTRE * row;
    const float *restrict factor = volume->numbers + FACTOR * row;
    const float *restrict high = volume->numbers + MOST * row;
    const float *restrict exponent = volume->numbers + EXPONENT * row;
    const float *restrict background = volume->background;
    for (size_t r = 0; r < volume->rows; r++) {
        float *restrict values = volume->values + r * row;
        for (int i = 0; i < row; i++) {
            float share = (values[i] - centre[i]) * high[i];
            share = share < 1e-6f ? 1e-6f : share;
            share = share > 1 ? 1 : share;
            float made = centre[i] + factor[i] * power(share, exponent[i]);
            int changes = (exponent[i] != 1) & (values[i] != background[i]);
            values[i] = either(changes, made, values[i]);
        }
    }
}

/* Deviations from the centre times a factor, from `low` on. */
static void shift(const struct volume *volume)
{
    int row = volume->row;
    const float *restrict centre = volume->numbers + CENTRE * row;
    const float *restrict factor = volume->numbers + FACTOR * row;
    const float *restrict low = volume->numbers + LEAST * row;
    const float *restrict background = volume->background;
    for (size_t r = 0; r < volume->rows; r++) {
        float *restrict values = volume->values + r * row;
        for (int i = 0; i < row; i++) {
            float made = low[i] + factor[i] * (values[i] - centre[i]);
            values[i] = values[i] == background[i] ? 0 : made;
        }
    }
}

/* Contrast: deviations from the mean times a factor, within the range that there was. */
static int change_contrast(const struct sample *sample, const struct volume *volume)
{
    int channels = volume->channels;
    struct statistics of[channels];
    float numbers[NUMBERS][channels];
    memset(numbers, 0, sizeof numbers);
    if (measure(volume, of))
        return -1;
    for (int c = 0; c < channels; c++) {
        numbers[CENTRE][c] = (float)mean_of(&of[c]);
        numbers[FACTOR][c] = sample->contrast[c];
        numbers[LEAST][c] = of[c].low;
        numbers[MOST][c] = of[c].high;
    }
    repeat_numbers(volume, channels, numbers);
    stretch(volume);
    return 0;
}

/* Gamma, after which a channel has its mean and deviation again. */
static int change_gamma(const struct sample *sample, const struct volume *volume)
{
    int channels = volume->channels;
    struct statistics before[channels], after[channels];
    float numbers[NUMBERS][channels];
    memset(numbers, 0, sizeof numbers);
    if (measure(volume, before))
        return -1;
    for (int c = 0; c < channels; c++) {
        float range = before[c].high - before[c].low;
        float centre = before[c].low;
        numbers[EXPONENT][c] = 1; /* leaves a channel as it is, one of a single value too */
        if (!(before[c].count > 0 && range > 0))
            continue;
        if (sample->is_negative) {
            range = -range;
            centre = before[c].high;
        }
        numbers[EXPONENT][c] = sample->gamma[c];
        numbers[CENTRE][c] = centre;
        numbers[FACTOR][c] = range;
        numbers[MOST][c] = 1 / range;
    }
    repeat_numbers(volume, channels, numbers);
    raise_to_power(volume);
    if (measure(volume, after))
        return -1;
    for (int c = 0; c < channels; c++) {
        float deviation = deviation_of(&after[c]);
        numbers[CENTRE][c] = 0; /* these three leave a channel as it is */
        numbers[FACTOR][c] = 1;
        numbers[LEAST][c] = 0;
        if (numbers[EXPONENT][c] == 1 || deviation <= 0)
            continue;
        numbers[CENTRE][c] = (float)mean_of(&after[c]);
        numbers[FACTOR][c] = deviation_of(&before[c]) / deviation;
        numbers[LEAST][c] = (float)mean_of(&before[c]);
    }
    repeat_numbers(volume, channels, numbers);
    shift(volume);
    return 0;
}

int change_volume(const struct sample *sample, float *values)
{
    struct volume volume = {
        .values = values,
        .rows = (size_t)sample->grid[X] * sample->grid[Y],
        .row = sample->grid[Z] * sample->image.channels,
        .voxels = sample->grid[Z],
        .channels = sample->image.channels,
    };
    volume.numbers = floats((NUMBERS + 1) * (size_t)volume.row);
    int failed = !volume.numbers;
    if (!failed) {
        volume.background = volume.numbers + NUMBERS * volume.row;
        repeat(volume.background, sample->background, volume.voxels, volume.channels);
    }
    if (!failed && sample->smoothing)
        failed = smooth_channels(sample, values);
    if (!failed && sample->contrast)
        failed = change_contrast(sample, &volume);
    if (!failed && sample->gamma)
        failed = change_gamma(sample, &volume);
    free(volume.numbers);
    return failed ? -1 : 0;
}
