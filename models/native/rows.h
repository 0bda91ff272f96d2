/* The one row format. A row of a map (all z at one x, y) is read, formed and transformed once, and kept in the cache L2.

   Winograd's short convolution along z (Lavin and Gray 2016, arXiv:1509.09308) makes TILE outputs of a 3-tap filter with
   TILE + 2 products in place of 3 * TILE: tile t of a row covers the values z = t * TILE - 1 ... t * TILE + TILE, from which
   STREAMS sums are formed; the filters are transformed likewise; products of equal stream are added over channels and over the
   nine (x, y) taps; and the outputs of a tile are sums of the streams' totals. float32 has four outputs a tile (points 0, +-1,
   +-1/2, infinity: 5e-7 relative), bfloat16 two (0, +-1, infinity): of a norm and ReLU formed on load 0.0029 relative, where
   plain products of values rounded to bfloat16 have 0.0027; four outputs would have three times that.

   A row is stored as [stream][group of 16 channels][tile][16 channels]. A unit is what one product instruction spreads over
   all outputs: 4 bytes, one float32 or two neighbouring bfloat16 values. For the filter gradient, which sums over tiles,
   those two are of neighbouring tiles: [stream][group][pair of tiles][16 channels][2]. */
#ifndef ROWS_H
#define ROWS_H

#include "vectors.h"

#define GROUP 16 /* channels */
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
    vec even = d[4] - 0.25f * d[2], uneven = d[3] - 0.25f * d[1];
    vec even_far = d[4] - d[2], uneven_far = 0.5f * (d[3] - d[1]);
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
    vec sum = m[1] + m[2], difference = m[1] - m[2];
#ifdef BFLOAT16_ROWS
    outputs[0] = m[0] + sum;
    outputs[1] = difference + m[3];
#else
    vec far_sum = m[3] + m[4], far_difference = m[3] - m[4];
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
    vec even = y[0] + y[2], uneven = y[1] + y[3];
    vec even_near = y[0] + 0.25f * y[2], uneven_near = 0.5f * y[1] + 0.125f * y[3];
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
static const float FILTER_TRANSFORM[STREAMS][3] = {{1, 0, 0}, {.5f, .5f, .5f}, {.5f, -.5f, .5f}, {0, 0, 1}};
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

/* --- Forming --- */

/* Channels c .. c + n of all z of a row, formed, into line[z * width + c]. `at` is the row's first element. */
ALWAYS_INLINE void form_channels(float *line, int width, const void *map, size_t at, int stride, const struct input *in,
                                 const float *coefficients, int channels, int c, int z, int n, int dtype, int form)
{
    vec k[COEFFICIENTS];
    for (int i = 0; form != RAW && i < (form == NORM_RELU ? FLOOR + 1 : COEFFICIENTS); i++)
        k[i] = load_some(coefficients + i * channels + c, n);
    for (int i = 0; i < z; i++) {
        prefetch(map, at + (size_t)i * stride, dtype, 0);
        vec value = load_values(map, at + (size_t)i * stride, n, dtype);
        if (form == NORM_RELU) {
            value = value * k[SCALE] + k[SHIFT];
            value = at_least(value, k[FLOOR]);
        } else if (form == NORM_RELU_GRADIENT) {
            vec raw = load_values(in->raw, at + (size_t)i * stride, n, dtype);
            value = keep_where(raw * k[SCALE] + k[SHIFT] > k[FLOOR], value);
            value = k[OF_GRADIENT] * value + (k[OF_RAW] * raw + k[CONSTANT]);
        }
        store_values(line, (size_t)i * width + c, value, n, FLOAT32);
    }
}

#define FORM_CHANNELS(n, dtype, form) \
    form_channels(line, width, in->maps[m], at, stride, in, coefficients, channels, first + c, z, n, dtype, form)

ALWAYS_INLINE void form_row_as(float *line, int width, const struct input *in, int batch, size_t voxel, int z, int dtype, int form)
{
    int channels = in->channels[0] + in->channels[1], first = 0;
    const float *coefficients = in->coefficients + (size_t)batch * COEFFICIENTS * channels;
    for (int m = 0; m < 2; first += in->channels[m++]) {
        int stride = in->channels[m];
        for (int c = 0; c < stride; c += LANES) {
            size_t at = voxel * stride + c;
            if (stride - c >= LANES)
                FORM_CHANNELS(LANES, dtype, form);
            else
                FORM_CHANNELS(stride - c, dtype, form);
        }
    }
}

/* All channels of the row that begins at `voxel`, formed, in float32: line[z * width + channel]. */
static void form_row(float *line, int width, const struct input *in, int batch, size_t voxel, int z, int dtype)
{
    if (in->form == RAW && dtype == FLOAT32) form_row_as(line, width, in, batch, voxel, z, FLOAT32, RAW);
    else if (in->form == RAW) form_row_as(line, width, in, batch, voxel, z, BFLOAT16, RAW);
    else if (in->form == NORM_RELU && dtype == FLOAT32) form_row_as(line, width, in, batch, voxel, z, FLOAT32, NORM_RELU);
    else if (in->form == NORM_RELU) form_row_as(line, width, in, batch, voxel, z, BFLOAT16, NORM_RELU);
    else if (dtype == FLOAT32) form_row_as(line, width, in, batch, voxel, z, FLOAT32, NORM_RELU_GRADIENT);
    else form_row_as(line, width, in, batch, voxel, z, BFLOAT16, NORM_RELU_GRADIENT);
}

/* --- Storing as streams --- */

enum purpose { CHANNELS_SUMMED, TILES_SUMMED, GRADIENT_TILES_SUMMED };

/* A formed line as a row; line[-width] is the border before z = 0, and what follows the last z is 0 as well. */
ALWAYS_INLINE void store_row_as(unit *row, const float *line, int width, int tiles, int purpose)
{
    int step = purpose == CHANNELS_SUMMED ? 1 : UNIT;
    size_t stream_units = (size_t)tiles * width / UNIT;
    for (int c = 0; c < width; c += LANES)
        for (int t = 0; t < tiles; t += step) {
            vec streams[2][STREAMS];
            for (int i = 0; i < step; i++) {
                vec d[TILE + 2];
                for (int j = 0; j < TILE + 2; j++)
                    d[j] = load(line + ((long)(t + i) * TILE + j - 1) * width + c);
                if (purpose == GRADIENT_TILES_SUMMED)
                    transform_gradients(d + 1, streams[i]);
                else
                    transform_values(d, streams[i]);
            }
            unit *to = row + ((size_t)(c / GROUP * tiles + t) * GROUP + c % GROUP * step) / UNIT;
            for (int k = 0; k < STREAMS; k++, to += stream_units) {
#ifdef BFLOAT16_ROWS
                if (purpose == CHANNELS_SUMMED) {
                    halves some = to_bfloat16(streams[0][k]);
                    memcpy(to, &some, sizeof some);
                } else {
                    uvec pair = widened(to_bfloat16(streams[0][k])) | widened(to_bfloat16(streams[1][k])) << 16;
                    memcpy(to, &pair, sizeof pair);
                }
#else
                store(to, streams[0][k]);
#endif
            }
        }
}

static void store_row(unit *row, const float *line, int width, int tiles, int purpose)
{
    if (purpose == CHANNELS_SUMMED) store_row_as(row, line, width, tiles, CHANNELS_SUMMED);
    else if (purpose == TILES_SUMMED) store_row_as(row, line, width, tiles, TILES_SUMMED);
    else store_row_as(row, line, width, tiles, GRADIENT_TILES_SUMMED);
}

#endif
