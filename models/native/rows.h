/* The one row format. A row of a map (all z at one x, y) is read, formed and transformed once, and
   kept in the cache L2.

   Winograd's short convolution along z (Lavin and Gray 2016, arXiv:1509.09308) makes TILE outputs
   of a 3-tap filter with TILE + 2 products in place of 3 * TILE: tile t of a row covers the values
   z = t * TILE - 1 ... t * TILE + TILE, from which STREAMS sums are formed; the filters are
   transformed likewise; products of equal stream are added over channels and over the nine (x, y)
   taps; and the outputs of a tile are sums of the streams' totals. float32 has four outputs a tile
   (points 0, +-1, +-1/2, infinity), bfloat16 two (0, +-1, infinity): four would have three times
   the error. records/kernels.md has the errors of both, beside those of a plain convolution.

   A row is stored as [stream][group of 16 channels][tile][16 channels]. A unit is what one product
   instruction spreads over all outputs: 4 bytes, one float32 or two neighbouring bfloat16 values.
   For the filter gradient, which sums over tiles, those two are of neighbouring tiles:
   [stream][group][pair of tiles][16 channels][2]. */
#ifndef ROWS_H
#define ROWS_H

#include <math.h>
#include "vectors.h"

#ifdef BFLOAT16_ROWS
typedef uint32_t unit;
enum { TILE = 2, STREAMS = 4, UNIT = 2 };
#else
typedef float unit;
enum { TILE = 4, STREAMS = 6, UNIT = 1 };
#endif
enum { GROUP_UNITS = GROUP / UNIT };

/* --- The transforms; those of row and gradient are each other's transposed --- */

/* The streams of the values d[0 .. TILE + 1]. */
ALWAYS_INLINE void transform_values(const vec *d, vec *streams)
{
#ifdef BFLOAT16_ROWS
    streams[0] = d[0] - d[2];
    streams[1] = d[1] + d[2];
    streams[2] = d[2] - d[1];
    streams[3] = d[3] - d[1];
#else
    vec even = d[4] - 0.25f * d[2];
    vec uneven = d[3] - 0.25f * d[1];
    vec even_far = d[4] - d[2];
    vec uneven_far = 0.5f * (d[3] - d[1]);
    streams[0] = d[0] - 5 * d[2] + 4 * d[4];
    streams[1] = even + uneven;
    streams[2] = even - uneven;
    streams[3] = even_far + uneven_far;
    streams[4] = even_far - uneven_far;
    streams[5] = d[5] - 1.25f * d[3] + 0.25f * d[1];
#endif
}

/* The outputs of a tile, of the streams' totals. */
ALWAYS_INLINE void outputs_of(const vec *m, vec *outputs)
{
    vec sum = m[1] + m[2];
    vec difference = m[1] - m[2];
#ifdef BFLOAT16_ROWS
    outputs[0] = m[0] + sum;
    outputs[1] = difference + m[3];
#else
    vec far_sum = m[3] + m[4];
    vec far_difference = m[3] - m[4];
    outputs[0] = m[0] + sum + far_sum;
    outputs[1] = difference + 0.5f * far_difference;
    outputs[2] = sum + 0.25f * far_sum;
    outputs[3] = difference + 0.125f * far_difference + m[5];
#endif
}

/* The streams of a tile's gradients y[0 .. TILE - 1]: `outputs_of` transposed. */
ALWAYS_INLINE void transform_gradients(const vec *y, vec *streams)
{
#ifdef BFLOAT16_ROWS
    streams[0] = y[0];
    streams[1] = y[0] + y[1];
    streams[2] = y[0] - y[1];
    streams[3] = y[1];
#else
    vec even = y[0] + y[2];
    vec uneven = y[1] + y[3];
    vec even_near = y[0] + 0.25f * y[2];
    vec uneven_near = 0.5f * y[1] + 0.125f * y[3];
    streams[0] = y[0];
    streams[1] = even + uneven;
    streams[2] = even - uneven;
    streams[3] = even_near + uneven_near;
    streams[4] = even_near - uneven_near;
    streams[5] = y[3];
#endif
}

/* Of each stream, the weights of the filter's three taps along z. */
#ifdef BFLOAT16_ROWS
static const float FILTER_TRANSFORM[STREAMS][3] = {
    {1, 0, 0}, {.5f, .5f, .5f}, {.5f, -.5f, .5f}, {0, 0, 1}};
#else
static const float FILTER_TRANSFORM[STREAMS][3] = {
    {1, 0, 0},
    {2 / 3.f, 2 / 3.f, 2 / 3.f},
    {2 / 3.f, -2 / 3.f, 2 / 3.f},
    {-8 / 3.f, -4 / 3.f, -2 / 3.f},
    {-8 / 3.f, 4 / 3.f, -2 / 3.f},
    {0, 0, 1},
};
#endif

/* The smaller of two, of which an int holds one at least: nothing is cut off before. */
static inline int least(long a, long b) { return (int)(a < b ? a : b); }
static inline long ceil_div(long number, long size) { return (number + size - 1) / size; }
static inline int round_up(int value, int to) { return (value + to - 1) / to * to; }

/* Voxel (x, y, 0). */
static size_t voxel_of(const struct operation *op, int batch, int x, int y)
{
    return (((size_t)batch * op->x + x) * op->y + y) * op->z;
}

/* Of the grid that is `finer` along each axis the first voxel of a row: of those over row (x, y)
   the one with this number. */
ALWAYS_INLINE size_t finer_voxel(const struct operation *op, const int *finer, int batch, int x,
                                 int y, int number)
{
    size_t plane = (size_t)batch * op->x * finer[0] + (x * finer[0] + number / finer[1]);
    size_t row = plane * op->y * finer[1] + (y * finer[1] + number % finer[1]);
    return row * op->z * finer[2];
}

/* --- Norms and sums: see native.h --- */

/* Coefficients of `n` of a sample's channels, from c on; NULL is a norm that changes nothing. */
ALWAYS_INLINE void load_norm(vec *k, const float *coefficients, int channels, int c, int n)
{
    static const float none[COEFFICIENTS] = {[SCALE] = 1, [FLOOR] = -INFINITY, [RSTD] = 1};
    for (int i = 0; i < COEFFICIENTS; i++)
        k[i] = coefficients ? load_some(coefficients + i * channels + c, n) : none[i] - (vec){0};
}

ALWAYS_INLINE vec normed(const vec *k, vec raw)
{
    return at_least(raw * k[SCALE] + k[SHIFT], k[FLOOR]);
}

ALWAYS_INLINE vec where_positive(const vec *k, vec raw, vec gradient)
{
    return keep_where(raw * k[SCALE] + k[SHIFT] > k[FLOOR], gradient);
}

ALWAYS_INLINE vec gradient_of_raw(const vec *k, vec raw, vec gradient)
{
    return k[OF_GRADIENT] * where_positive(k, raw, gradient) + (k[OF_RAW] * raw + k[CONSTANT]);
}

/* Adds one vector of a row to its two sums: `gradient` is that of the norm's values. */
ALWAYS_INLINE void add_norm_sums(vec *of_row, const vec *k, vec raw, vec gradient)
{
    gradient = where_positive(k, raw, gradient);
    of_row[0] += gradient;
    of_row[1] += gradient * ((raw - k[MEAN]) * k[RSTD]);
}

ALWAYS_INLINE void add_doubles(double *to, const dvec *values)
{
    dvec sum;
    memcpy(&sum, to, sizeof sum);
    sum += *values;
    memcpy(to, &sum, sizeof sum);
}

/* Adds a row's two sums to those of all rows, `width` apart. */
ALWAYS_INLINE void add_row(double *sums, int width, const vec *of_row)
{
    for (int i = 0; i < 2; i++) {
        dvec of_one = __builtin_convertvector(of_row[i], dvec);
        add_doubles(sums + i * width, &of_one);
    }
}

/* `count` sums, `next` apart, added in their order. */
static double total(const double *sums, size_t next, int count)
{
    double sum = 0;
    for (int i = 0; i < count; i++)
        sum += sums[i * next];
    return sum;
}

/* --- Forming --- */

/* What a row is formed of. */
struct input {
    int channels[2];     /* of each map; the second is 0 where there is only one */
    const void *maps[2]; /* read as if concatenated */
    const void *raw;     /* the map that was normalised, where maps[0] is its norm's gradient */
    const float *coefficients;
    int first, past; /* channels that are formed, of those of both maps */
};

/* All channels of one map or two. */
static struct input all_of(struct input in)
{
    in.first = 0;
    in.past = in.channels[0] + in.channels[1];
    return in;
}

enum form { RAW, NORM, NORM_GRADIENT };

/* A value of a map as it is read, or formed: n of its channels. */
ALWAYS_INLINE vec formed_value(const vec *k, const void *map, const void *raw, size_t at, int n,
                               int dtype, int form)
{
    prefetch(map, at, dtype, 0);
    vec value = load_values(map, at, n, dtype);
    if (form == RAW)
        return value;
    if (form == NORM)
        return normed(k, value);
    prefetch(raw, at, dtype, 0);
    return gradient_of_raw(k, load_values(raw, at, n, dtype), value);
}

/* The coefficients of n channels from c on of map m, of a sample. */
ALWAYS_INLINE void load_norm_of(vec *k, const struct input *in, int m, int batch, int c, int n,
                                int form)
{
    int channels = in->channels[0] + in->channels[1];
    const float *norms = NULL;
    if (form != RAW)
        norms = in->coefficients + (size_t)batch * COEFFICIENTS * channels;
    load_norm(k, norms, channels, m ? in->channels[0] + c : c, n);
}

/* Channels c .. c + n of map m, of all z of a row, into a row of dtype `made`. */
ALWAYS_INLINE void form_channels(void *row, int made, int width, const struct input *in, int m,
                                 int batch, size_t voxel, int c, int z, int n, int dtype, int form)
{
    const void *map = in->maps[m];
    const void *raw = in->raw;
    int stride = in->channels[m];
    size_t at = voxel * stride + c; /* in the map, */
    size_t to = (m ? in->channels[0] + c : c) - in->first; /* and in the row */
    vec k[COEFFICIENTS];
    load_norm_of(k, in, m, batch, c, n, form);
    for (int i = 0; i < z; i++, at += stride, to += width)
        if (form == RAW && dtype == BFLOAT16 && made == BFLOAT16) {
            memcpy((uint16_t *)row + to, (const uint16_t *)map + at, sizeof(uint16_t) * n);
        } else {
            vec value = formed_value(k, map, raw, at, n, dtype, form);
            store_values(row, to, value, n, made);
        }
}

ALWAYS_INLINE void form_row_as(void *row, int made, int width, const struct input *in, int batch,
                               size_t voxel, int z, int dtype, int form)
{
    for (int m = 0; m < 2; m++) {
        int before = m ? in->channels[0] : 0; /* channels of the maps before */
        int past = least(in->past - before, in->channels[m]);
        int first = in->first > before ? in->first - before : 0;
        for (int c = first; c < past; c += LANES)
            if (past - c >= LANES)
                form_channels(row, made, width, in, m, batch, voxel, c, z, LANES, dtype, form);
            else
                form_channels(row, made, width, in, m, batch, voxel, c, z, past - c, dtype, form);
    }
}

/* The row that begins at `voxel`, formed, in float32: row[z * width + channel - first]. */
static void form_row(float *row, int width, const struct input *in, int batch, size_t voxel, int z,
                     int dtype)
{
#define FORM(dtype, form) form_row_as(row, FLOAT32, width, in, batch, voxel, z, dtype, form)
    if (!in->coefficients)
        dtype == FLOAT32 ? FORM(FLOAT32, RAW) : FORM(BFLOAT16, RAW);
    else if (!in->raw)
        dtype == FLOAT32 ? FORM(FLOAT32, NORM) : FORM(BFLOAT16, NORM);
    else
        dtype == FLOAT32 ? FORM(FLOAT32, NORM_GRADIENT) : FORM(BFLOAT16, NORM_GRADIENT);
}

/* The same of bfloat16 maps, rounded to bfloat16. */
static void form_bfloat16_row(uint16_t *row, int width, const struct input *in, int batch,
                              size_t voxel, int z)
{
    int is_whole_map = !in->first && in->past == in->channels[0] && width == in->past;
    if (!in->coefficients && is_whole_map)
        memcpy(row, (const uint16_t *)in->maps[0] + voxel * width, sizeof *row * z * width);
    else if (!in->coefficients)
        form_row_as(row, BFLOAT16, width, in, batch, voxel, z, BFLOAT16, RAW);
    else if (!in->raw)
        form_row_as(row, BFLOAT16, width, in, batch, voxel, z, BFLOAT16, NORM);
    else
        form_row_as(row, BFLOAT16, width, in, batch, voxel, z, BFLOAT16, NORM_GRADIENT);
}

/* --- Storing as streams --- */

enum purpose { CHANNELS_SUMMED, TILES_SUMMED, GRADIENT_TILES_SUMMED };

/* A unit of each lane: `first` itself, or the pair of both. */
ALWAYS_INLINE void store_units(unit *to, vec first, vec second)
{
#ifdef __AVX512BF16__
    static const uint16_t ORDER[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                       21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                       11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_loadu_si512(ORDER), both));
#elif defined BFLOAT16_ROWS
    uvec pair = widened(to_bfloat16(first)) | widened(to_bfloat16(second)) << 16;
    memcpy(to, &pair, sizeof pair);
#else
    store(to, first);
#endif
}

/* A formed row as streams; formed[-width] is the border before z = 0, and what follows the last z
   is 0 as well. */
ALWAYS_INLINE void store_row(unit *row, const float *formed, int width, int tiles, int purpose)
{
    int step = purpose == CHANNELS_SUMMED ? 1 : UNIT;
    size_t stream_units = (size_t)tiles * width / UNIT;
    for (int c = 0; c < width; c += LANES)
        for (int t = 0; t < tiles; t += step) {
            vec streams[2][STREAMS] = {{{0}}};
            for (int i = 0; i < step; i++) {
                vec d[TILE + 2];
                for (int j = 0; j < TILE + 2; j++)
                    d[j] = load(formed + ((long)(t + i) * TILE + j - 1) * width + c);
                if (purpose == GRADIENT_TILES_SUMMED)
                    transform_gradients(d + 1, streams[i]);
                else
                    transform_values(d, streams[i]);
            }
            size_t of_group = (size_t)(c / GROUP) * tiles + t;
            unit *to = row + (of_group * GROUP + c % GROUP * step) / UNIT;
            for (int k = 0; k < STREAMS; k++, to += stream_units)
                if (step == UNIT)
                    store_units(to, streams[0][k], streams[1][k]);
                else
                    store_values(to, 0, streams[0][k], LANES, BFLOAT16);
        }
}

#endif
