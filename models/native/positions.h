/* Sums over positions in AMX's tiles, which make the gradients of filters: 32 positions a product.
   records/kernels.md draws the tiles. */
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

/* The sums of `count` tiles B over `steps` steps of each of `planes` planes: each tile A is loaded
   once for all of them. After each product comes a chore. */
ALWAYS_INLINE void correlate_as(int count, float *sums, int planes, int steps,
                                const char *const *left, const char *const (*right)[MOST_TARGETS],
                                chore *chore, void *work)
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
                chore(work);
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
        correlate_as(n, sums, planes, steps, left, right, no_chore, NULL); \
        break;
        COUNT(1) COUNT(2) COUNT(3) COUNT(4) COUNT(5) COUNT(6)
#undef COUNT
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
