/* Sums over positions in AMX's tiles, which make the gradients of filters: 32 positions a product.
   docs/kernels.md draws the tiles. */
#ifndef POSITIONS_H
#define POSITIONS_H

#include "direct.h"

/* Lines of 16 values of two voxels of a formed row, interleaved. */
static void store_pairs(char *to, const uint16_t *values, int width, int pairs)
{
    for (int pair = 0; pair < pairs; pair++, to += 64, values += 2 * width)
        for (int v = 0; v < VECS; v++) {
            halves first, second;
            memcpy(&first, values + v * LANES, sizeof first);
            memcpy(&second, values + width + v * LANES, sizeof second);
            uvec both = widened(first) | widened(second) << 16;
            memcpy(to + v * sizeof both, &both, sizeof both);
        }
}

/* The lines of a row, straight from 16 channels of a map from c on: pair p begins with voxel 2 p,
   and in `uneven`, where that is wanted, with 2 p - 1. What is not in the row is 0. */
ALWAYS_INLINE void form_pairs_as(char *even, char *uneven, int pairs, const struct input *in, int m,
                                 int batch, size_t voxel, int c, int z, int form)
{
    const void *map = in->maps[m], *raw = in->raw;
    int stride = in->channels[m];
    for (int v = 0; v < VECS; v++) {
        size_t at = voxel * stride + c + v * LANES;
        size_t unit = v * LANES;
        vec k[COEFFICIENTS];
        vec before = {0};
        load_norm_of(k, in, m, batch, c + v * LANES, LANES, form);
        for (int pair = 0; pair < pairs; pair++, at += 2 * stride, unit += 16) {
            int left = z - 2 * pair; /* voxels */
            vec first = {0};
            vec second = {0};
            if (__builtin_expect(left > 0, 1))
                first = formed_value(k, map, raw, at, LANES, BFLOAT16, form);
            if (__builtin_expect(left > 1, 1))
                second = formed_value(k, map, raw, at + stride, LANES, BFLOAT16, form);
            store_units((uint32_t *)even + unit, first, second);
            if (uneven)
                store_units((uint32_t *)uneven + unit, before, first);
            before = second;
        }
    }
}

static void form_pairs(char *even, char *uneven, int pairs, const struct input *in, int batch,
                       size_t voxel, int c, int z)
{
    int m = c >= in->channels[0];
    c -= m ? in->channels[0] : 0;
    if (in->raw)
        form_pairs_as(even, NULL, pairs, in, m, batch, voxel, c, z, NORM_GRADIENT);
    else if (!uneven)
        form_pairs_as(even, NULL, pairs, in, m, batch, voxel, c, z, RAW);
    else if (in->coefficients)
        form_pairs_as(even, uneven, pairs, in, m, batch, voxel, c, z, NORM);
    else
        form_pairs_as(even, uneven, pairs, in, m, batch, voxel, c, z, RAW);
}

/* 16 x 16 units, in place: a tile of 16 pairs of positions x 16 outputs becomes 16 outputs x 32
   positions. */
static void transpose_tile(char *tile)
{
#ifdef __AVX512F__
    __m512i *rows = (__m512i *)tile;
    __m512i halved[16];
    __m512i quartered[16];
    __m512i eighths[16];
    for (int i = 0; i < 16; i += 2) {
        halved[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        halved[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int k = 0; k < 2; k++) {
            quartered[i + 2 * k] = _mm512_unpacklo_epi64(halved[i + k], halved[i + k + 2]);
            quartered[i + 2 * k + 1] = _mm512_unpackhi_epi64(halved[i + k], halved[i + k + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int k = 0; k < 4; k++) {
            eighths[i + k] = _mm512_shuffle_i32x4(quartered[i + k], quartered[i + k + 4], 0x88);
            eighths[i + k + 4] = _mm512_shuffle_i32x4(quartered[i + k], quartered[i + k + 4], 0xdd);
        }
    for (int k = 0; k < 8; k++) {
        int to = k % 4 + k / 4 * 4;
        rows[to] = _mm512_shuffle_i32x4(eighths[k], eighths[k + 8], 0x88);
        rows[to + 8] = _mm512_shuffle_i32x4(eighths[k], eighths[k + 8], 0xdd);
    }
#else
    uint32_t copy[16][16];
    uint32_t *to = (uint32_t *)tile;
    memcpy(copy, tile, sizeof copy);
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++)
            to[16 * i + k] = copy[k][i];
#endif
}

/* The sums of `count` tiles B over `steps` steps of each of `planes` planes: each tile A is loaded
   once for all of them. */
ALWAYS_INLINE void correlate_as(int count, float *sums, int planes, int steps,
                                const char *const *left, const char *const (*right)[MOST_TARGETS])
{
#pragma GCC unroll 6
    for (int i = 0; i < count; i++)
        tile_zero(i);
    for (int plane = 0; plane < planes; plane++)
        for (size_t at = 0; at < (size_t)steps * TILE_BYTES; at += TILE_BYTES) {
            tile_load(6, left[plane] + at, 64);
#pragma GCC unroll 6
            for (int i = 0; i < count; i++) {
                tile_load(7, right[plane][i] + at, 64);
                tile_multiply_add(i, 6, 7);
            }
        }
#pragma GCC unroll 6
    for (int i = 0; i < count; i++)
        tile_store(i, sums + i * TILE_FLOATS, 64);
}

static void correlate(int count, float *sums, int planes, int steps, const char *const *left,
                      const char *const (*right)[MOST_TARGETS])
{
    switch (count) {
#define COUNT(n) \
    case n: \
        correlate_as(n, sums, planes, steps, left, right); \
        break;
        COUNT(1) COUNT(2) COUNT(3) COUNT(4) COUNT(5) COUNT(6)
    default:
        __builtin_trap();
    }
}

/* Adds a tile's sums to those of a piece. */
static void add_tile(float *to, const float *sums)
{
    for (int i = 0; i < TILE_FLOATS; i += LANES)
        store(to + i, load(to + i) + load(sums + i));
}

/* Adds the positions' sums of tile `number` in their order. */
static void add_positions(double *sums, const float *filter_sums, size_t position_sums,
                          int positions, long number)
{
    const float *from = filter_sums + number * TILE_FLOATS;
    memset(sums, 0, sizeof(double) * TILE_FLOATS);
    for (int each = 0; each < positions; each++, from += position_sums)
        for (int i = 0; i < TILE_FLOATS; i++)
            sums[i] += from[i];
}

#endif
