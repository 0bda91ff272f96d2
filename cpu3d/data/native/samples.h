/* What the files of this folder share: a sample, and what is done to its voxels. */
#ifndef SAMPLES_H
#define SAMPLES_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))

enum { X, Y, Z, AXES, HUGE_PAGE = 1 << 21 };
enum { IGNORED = 255 }; /* in a target: not learnt, as in models/native/shared.py */
enum kind { INT16, LABEL, WINDOWED }; /* as in samples.py */
enum { LOW, HIGH, ORIGIN, WINDOW }; /* of a window: what it reads, and what it takes away */

/* A box of voxels of a grid. Its values become float32: INT16 by scale and shift, WINDOWED, which
   is int16, by its window before them, LABEL by a table of the codes, 1 where a code belongs to the
   channel, which then is a region; a last channel may be of the code that is to be ignored. */
struct box {
    const void *values; /* of the box's first voxel */
    int kind;
    int64_t strides[AXES]; /* in values */
    int size[AXES];
    int start[AXES]; /* place of its first voxel in the grid */
    int channels;
    const int *picked; /* [channels]: the stored channel of each */
    const float *scale, *shift; /* [channels] */
    const float *window; /* [channels][WINDOW] */
    const uint8_t *table; /* [256][channels] */
};

/* Weights by which one axis becomes another: voxel i is the sum of `taps` from first[i] on. */
struct band {
    int taps, size; /* size: voxels of the axis that is made */
    const int *first; /* [size] */
    const float *weights; /* [taps][size] */
};

struct sample {
    struct box image, label;
    int grid[AXES]; /* voxels of the image and the target */
    const float *matrix; /* [AXES][AXES], voxels from the centre: made -> read; or NULL */
    int flips[AXES];
    const float *outside; /* [channels], is added to all voxels of the grid; NULL for none */
    const float *background; /* [channels], which intensity leaves alone; NaN for none */
    const float *limits; /* [channels][2], lowest and highest in the end; NULL as `outside` */
    const float *noise; /* [channels], standard deviations; NULL for none, as below */
    const uint32_t *noise_keys; /* [channels][2] */
    const struct band *smoothing; /* [channels][AXES], of 0 taps for a channel that stays */
    const float *contrast; /* [channels], 1 for a channel that stays, as below */
    const float *gamma;
    int is_negative; /* whether gamma is that of the negative image */
    int is_bfloat16; /* the image; else it is float32 */
    int has_ignored; /* whether the label's last channel is not a region: voxels not to be learnt */
    void *to_image;
    uint8_t *to_target; /* all 0 */
};

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

ALWAYS_INLINE float windowed(float value, const float window[WINDOW])
{
    value = value < window[LOW] ? window[LOW] : value;
    value = value > window[HIGH] ? window[HIGH] : value;
    return value - window[ORIGIN];
}

/* A stored value of the channel c of those picked, not yet scaled. */
ALWAYS_INLINE float value_at(const struct box *box, int kind, int64_t offset, int c)
{
    float value = ((const int16_t *)box->values)[offset];
    return kind == WINDOWED ? windowed(value, box->window + WINDOW * c) : value;
}

/* Without a branch, which would keep a loop from being computed in vectors. */
ALWAYS_INLINE float either(int condition, float one, float other)
{
    uint32_t mask = -(uint32_t)(condition != 0);
    return from_bits((bits_of(one) & mask) | (bits_of(other) & ~mask));
}

/* Rounded to nearest, ties to even. */
ALWAYS_INLINE uint16_t to_bfloat16(float value)
{
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

/* values[channels] for each of `voxels`: a loop over a row is then one over all of its values. */
static inline void repeat(float *row, const float *values, int voxels, int channels)
{
    for (int i = 0; i < voxels * channels; i++)
        row[i] = values[i % channels];
}

/* Memory for so many, for the caller to free; NULL if there is not enough. Large pages, for which
   NumPy asks too, come in a tenth of the time. */
static inline float *floats(size_t count)
{
    size_t bytes = (count + !count) * sizeof(float);
    if (bytes < HUGE_PAGE)
        return malloc(bytes);
    void *memory = aligned_alloc(HUGE_PAGE, (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    if (memory)
        madvise(memory, bytes, MADV_HUGEPAGE);
    return memory;
}

/* --- Steps; those that may run out of memory return 0, or -1 if they did --- */

/* What makes rows of a box: the box, and its scale and shift repeated along a row. */
struct rows {
    struct box box;
    float *scale, *shift, *spare; /* [size[Z] * channels] */
};

/* rows.c */
int begin_rows(struct rows *rows, const struct box *box);
void end_rows(struct rows *rows);
/* The box's row at x, y, as float32 [size[Z]][channels]. */
void stored_row(const struct rows *rows, int x, int y, float *restrict to);
/* The row at x, y of the sample's grid. Returns whether the box reaches it; else it is 0. */
int sample_row(const struct rows *rows, const struct sample *sample, int x, int y, float *to);

/* turn.c: the same of the grid before it is mirrored along X and Y, turned about its centre. */
int turned_row(const struct rows *rows, const struct sample *sample, int x, int y, float *to);

/* intensity.c: noise in the row at x, y, by the numbers [NOISE_NUMBERS][row] of `repeat_noise`; and
   what needs all of the image: smoothing, contrast, gamma. */
enum { NOISE_NUMBERS = 5 };
void repeat_noise(const struct sample *sample, float *numbers);
void add_noise(const struct sample *sample, int x, int y, const float *numbers, float *row);
int change_volume(const struct sample *sample, float *volume);

#endif
