/* AMX's tile instructions as functions, in registers of 16 rows of 64 bytes: 0 to 3 hold sums, 4
   and 5 the left factors, 6 and 7 the right ones; or, of whole registers, 0 to 5 sums, 6 the left
   factor, 7 the right one. Without -mamx-bf16 they are plain C with the order of sums that Intel
   documents, but for denormals, which the hardware takes for 0. A Xeon with AMX gave the same bits
   as the plain C (records/kernels.md). With -DTILES_LEFT_OUT they do nothing, to time what is done
   beside them; with -DVECTORS_LEFT_OUT nothing is formed and finished, to time them alone: the
   results are then meaningless. */
#ifndef AMX_H
#define AMX_H

#include "vectors.h"

#ifdef VECTORS_LEFT_OUT
enum { WITH_VECTORS = 0 };
#else
enum { WITH_VECTORS = 1 };
#endif

#ifdef TILES_LEFT_OUT

static void tile_config(int rows, int depth) {}
static void tile_release(void) {}
ALWAYS_INLINE void tile_zero(int tile) {}
ALWAYS_INLINE void tile_load(int tile, const void *from, size_t stride) {}
ALWAYS_INLINE void tile_store(int tile, void *to, size_t stride)
{
    __asm__ volatile("" ::: "memory"); /* or what follows would be known beforehand */
}
ALWAYS_INLINE void tile_multiply_add(int sum, int left, int right) {}

#elif defined __AMX_BF16__

/* Left factors of `rows` x 2 * `depth` values, right ones of 2 * depth x 16. */
static void tile_config(int rows, int depth)
{
    struct {
        uint8_t palette, start, zero[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.bytes[i] = (uint16_t)(i == 4 || i == 5 ? 4 * depth : 64);
        config.rows[i] = (uint8_t)(i < 6 ? rows : depth);
    }
    __asm__ volatile("" ::"r"(&config) : "memory"); /* GCC takes the instruction to read 8 bytes */
    _tile_loadconfig(&config);
}

static void tile_release(void) { _tile_release(); }

/* The instructions have their registers' numbers in them: all below must be inlined with
   constants. */
/* clang-format off */
#define EACH_TILE(CASE) CASE(0) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
#define EACH_SUM(CASE, l, r) CASE(0, l, r) CASE(1, l, r) CASE(2, l, r) CASE(3, l, r)
#define EACH_PRODUCT(CASE) \
    EACH_SUM(CASE, 4, 6) \
    EACH_SUM(CASE, 5, 6) \
    EACH_SUM(CASE, 4, 7) \
    EACH_SUM(CASE, 5, 7) \
    EACH_SUM(CASE, 6, 7) \
    CASE(4, 6, 7) \
    CASE(5, 6, 7)
/* clang-format on */

ALWAYS_INLINE void tile_zero(int tile)
{
#define ZERO(i) \
    if (tile == i) \
        _tile_zero(i);
    EACH_TILE(ZERO)
}

ALWAYS_INLINE void tile_load(int tile, const void *from, size_t stride)
{
    __asm__ volatile("" ::: "memory"); /* and this one none */
#define LOAD(i) \
    if (tile == i) \
        _tile_loadd(i, from, stride);
    EACH_TILE(LOAD)
}

ALWAYS_INLINE void tile_store(int tile, void *to, size_t stride)
{
#define STORE(i) \
    if (tile == i) \
        _tile_stored(i, to, stride);
    EACH_TILE(STORE)
}

/* sum[row][16] += left[row][depth] * right[depth][16], of pairs of bfloat16 values. */
ALWAYS_INLINE void tile_multiply_add(int sum, int left, int right)
{
#define MULTIPLY(s, l, r) \
    if (sum == s && left == l && right == r) \
        _tile_dpbf16ps(s, l, r);
    EACH_PRODUCT(MULTIPLY)
}

#else

static _Thread_local struct {
    int rows, depth;
    uint32_t tile[8][16][16];
} tiles_in_c;

static void tile_config(int rows, int depth)
{
    memset(&tiles_in_c, 0, sizeof tiles_in_c);
    tiles_in_c.rows = rows;
    tiles_in_c.depth = depth;
}

static void tile_release(void) { memset(&tiles_in_c, 0xff, sizeof tiles_in_c); }

static int tile_rows(int tile) { return tile < 6 ? tiles_in_c.rows : tiles_in_c.depth; }
static size_t tile_row_bytes(int tile)
{
    return tile == 4 || tile == 5 ? 4 * tiles_in_c.depth : 64;
}

static void tile_zero(int tile) { memset(tiles_in_c.tile[tile], 0, sizeof tiles_in_c.tile[tile]); }

static void tile_load(int tile, const void *from, size_t stride)
{
    for (int row = 0; row < tile_rows(tile); row++)
        memcpy(tiles_in_c.tile[tile][row], (const char *)from + row * stride, tile_row_bytes(tile));
}

static void tile_store(int tile, void *to, size_t stride)
{
    for (int row = 0; row < tile_rows(tile); row++)
        memcpy((char *)to + row * stride, tiles_in_c.tile[tile][row], tile_row_bytes(tile));
}

static void tile_multiply_add(int sum, int left, int right)
{
    for (int row = 0; row < tiles_in_c.rows; row++)
        for (int c = 0; c < 16; c += LANES) {
            /* of the first and of the second of each pair */
            vec even = {0};
            vec uneven = {0};
            for (int k = 0; k < tiles_in_c.depth; k++) {
                uint32_t pair = tiles_in_c.tile[left][row][k];
                uvec other;
                uvec first = (uvec){} + (pair << 16);
                uvec second = (uvec){} + (pair & 0xffff0000);
                memcpy(&other, &tiles_in_c.tile[right][k][c], sizeof other);
                even += (vec)first * (vec)(other << 16);
                uneven += (vec)second * (vec)(other & 0xffff0000);
            }
            float *to = (float *)&tiles_in_c.tile[sum][row][c];
            store(to, load(to) + (even + uneven));
        }
}

#endif
#endif
