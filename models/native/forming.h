/* Rows that are formed two voxels at a time: a chore, a few vector instructions that are done after
   a product of tiles and take no time of their own there. records/kernels.md says which chores come
   after which products. */
#ifndef FORMING_H
#define FORMING_H

#include "amx.h"
#include "pieces.h"

enum { TILE_LINES = 16, LINE_BYTES = 64, TILE_BYTES = TILE_LINES * LINE_BYTES };
enum { VECS = 16 / LANES };

/* What is done after each product; inlined, with its work in registers. */
typedef void chore(void *work);

ALWAYS_INLINE void no_chore(void *work) {}

/* --- Transposing tiles of lines that are formed one after the other --- */

/* 16 x 16 units of a tile, 16 lines of pairs of positions x 16 outputs, become 16 outputs x 32
   positions, in place and in eight steps: four lines that follow each other, four times; then
   every fourth line from `line` on, for `line` 0 to 3. */
ALWAYS_INLINE void transpose_four(char *lines)
{
#ifdef __AVX512F__
    __m512i *rows = (__m512i *)lines;
    __m512i low = _mm512_unpacklo_epi32(rows[0], rows[1]);
    __m512i high = _mm512_unpackhi_epi32(rows[0], rows[1]);
    __m512i next_low = _mm512_unpacklo_epi32(rows[2], rows[3]);
    __m512i next_high = _mm512_unpackhi_epi32(rows[2], rows[3]);
    rows[0] = _mm512_unpacklo_epi64(low, next_low);
    rows[1] = _mm512_unpackhi_epi64(low, next_low);
    rows[2] = _mm512_unpacklo_epi64(high, next_high);
    rows[3] = _mm512_unpackhi_epi64(high, next_high);
#endif
}

ALWAYS_INLINE void transpose_across(char *tile, int line)
{
#ifdef __AVX512F__
    enum { EVEN = 0x88, UNEVEN = 0xdd };
    __m512i *rows = (__m512i *)tile + line;
    __m512i even = _mm512_shuffle_i32x4(rows[0], rows[4], EVEN);
    __m512i uneven = _mm512_shuffle_i32x4(rows[0], rows[4], UNEVEN);
    __m512i next_even = _mm512_shuffle_i32x4(rows[8], rows[12], EVEN);
    __m512i next_uneven = _mm512_shuffle_i32x4(rows[8], rows[12], UNEVEN);
    rows[0] = _mm512_shuffle_i32x4(even, next_even, EVEN);
    rows[4] = _mm512_shuffle_i32x4(uneven, next_uneven, EVEN);
    rows[8] = _mm512_shuffle_i32x4(even, next_even, UNEVEN);
    rows[12] = _mm512_shuffle_i32x4(uneven, next_uneven, UNEVEN);
#else /* all of it in the last step */
    uint32_t copy[16][16];
    uint32_t *to = (uint32_t *)tile;
    if (line < 3)
        return;
    memcpy(copy, tile, sizeof copy);
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++)
            to[16 * i + k] = copy[k][i];
#endif
}

static void transpose_tile(char *tile)
{
    for (int line = 0; line < TILE_LINES; line += 4)
        transpose_four(tile + line * LINE_BYTES);
    for (int line = 0; line < 4; line++)
        transpose_across(tile, line);
}

/* What is due once line `number` of a plane of tiles is at `to`: a step of its own tile after every
   fourth line, and one of the tile before. */
ALWAYS_INLINE void transpose_behind(char *to, unsigned number)
{
    unsigned line = number % TILE_LINES;
    if (line % 4 < 3)
        return;
    transpose_four(to - 3 * LINE_BYTES);
    if (number >= TILE_LINES)
        transpose_across(to - line * LINE_BYTES - TILE_BYTES, line / 4);
}

/* After the last line of a plane, which ends a tile at `past`. */
static void transpose_last(char *past)
{
    for (int line = 0; line < 4; line++)
        transpose_across(past - TILE_BYTES, line);
}

/* --- Forming --- */

/* What two voxels become: 16 values each, as they lie in a row of the ring; or a line of pairs,
   after a tap's shift by one once more (`VALUE_PAIRS`), or in a tile that is transposed. */
enum layout { ROW, VALUE_PAIRS, GRADIENT_PAIRS };

/* 16 channels of rows that lie one after the other in a map, and what is left of them. */
struct forming {
    const void *map, *raw;
    vec k[VECS][COEFFICIENTS];
    vec before[VECS]; /* of pairs: the voxel before */
    size_t at;        /* element of the map: the next voxel's; */
    size_t stride;    /* from it to the one after it */
    char *to;         /* where the next two voxels go, */
    size_t step;      /* from there to those after them, and */
    size_t gap;       /* so much further behind the last ones of a row */
    size_t beside;    /* to where the second voxel goes; of VALUE_PAIRS the second copy */
    int twos;         /* of voxels: left of the row, and */
    int row_twos;     /* in all of it; */
    int last;         /* voxels of its last two: 0 to 2, what is not in the map is 0 */
    int rows;         /* left, this one included; 0: all is done */
    unsigned number;  /* of lines so far */
};

static int form_of(const struct input *in)
{
    if (!in->coefficients)
        return RAW;
    return in->raw ? NORM_GRADIENT : NORM;
}

/* Channels c ... c + 15 of `rows` rows from the one that begins at `voxel`: without where they
   go. */
static struct forming forming_of(const struct input *in, int batch, size_t voxel, int c, int z,
                                 int rows)
{
    int form = form_of(in);
    int m = c >= in->channels[0];
    int of_map = m ? c - in->channels[0] : c;
    struct forming f = {.map = in->maps[m], .raw = in->raw, .stride = in->channels[m]};
    f.at = voxel * f.stride + of_map;
    f.rows = WITH_VECTORS ? rows : 0;
    f.row_twos = ceil_div(z, 2);
    f.last = 2 - z % 2;
    f.twos = f.row_twos;
    for (int v = 0; v < VECS; v++)
        load_norm_of(f.k[v], in, m, batch, of_map + v * LANES, LANES, form);
    return f;
}

/* The same rows as lines of pairs, `pitch` positions a row. */
static struct forming of_pairs(struct forming f, int z, int pitch)
{
    f.row_twos = pitch / 2;
    f.twos = f.row_twos;
    f.last = z % 2;
    return f;
}

/* Vector v of two voxels, of which `count` are there. */
ALWAYS_INLINE void form_vector(struct forming *f, int v, int count, enum layout layout, int form)
{
    size_t at = f->at + v * LANES;
    vec first = {0};
    vec second = {0};
    if (layout == ROW && form == RAW) { /* unchanged, whatever the values */
        halves values = {0};
        prefetch(f->map, at, BFLOAT16, 0);
        memcpy(&values, (const uint16_t *)f->map + at, sizeof values);
        memcpy(f->to + v * sizeof values, &values, sizeof values);
        if (count > 1) {
            memcpy(&values, (const uint16_t *)f->map + at + f->stride, sizeof values);
            memcpy(f->to + f->beside + v * sizeof values, &values, sizeof values);
        }
        return;
    }
    if (count > 0)
        first = formed_value(f->k[v], f->map, f->raw, at, LANES, BFLOAT16, form);
    if (count > 1)
        second = formed_value(f->k[v], f->map, f->raw, at + f->stride, LANES, BFLOAT16, form);
    if (layout == ROW) {
        store_values(f->to, v * LANES, first, LANES, BFLOAT16);
        if (count > 1)
            store_values(f->to + f->beside, v * LANES, second, LANES, BFLOAT16);
        return;
    }
    if (layout == VALUE_PAIRS)
        store_units((uint32_t *)f->to + v * LANES, f->before[v], first);
    store_units((uint32_t *)(f->to + f->beside) + v * LANES, first, second);
    f->before[v] = second;
}

/* The chore: two voxels of what is left. */
ALWAYS_INLINE void form_two(struct forming *f, enum layout layout, int form)
{
    if (!f->rows)
        return;
    f->twos--;
    if (__builtin_expect(f->twos > 0, 1)) {
        for (int v = 0; v < VECS; v++)
            form_vector(f, v, 2, layout, form);
    } else {
        for (int v = 0; v < VECS; v++)
            form_vector(f, v, f->last, layout, form);
        f->at -= (2 - f->last) * f->stride;
    }
    if (layout == GRADIENT_PAIRS)
        transpose_behind(f->to, f->number);
    f->number++;
    f->at += 2 * f->stride;
    f->to += f->step;
    if (__builtin_expect(!f->twos, 0)) {
        f->twos = f->row_twos;
        f->to += f->gap;
        f->rows--;
        for (int v = 0; v < VECS; v++)
            f->before[v] = (vec){0};
    }
}

/* Of values, which make fewer instructions, four. */
#define FORM_CHORE(name, layout, form, count) \
    ALWAYS_INLINE void name(void *work) \
    { \
        for (int i = 0; i < count; i++) \
            form_two(work, layout, form); \
    }
FORM_CHORE(row_raw, ROW, RAW, 1)
FORM_CHORE(row_norm, ROW, NORM, 1)
FORM_CHORE(row_norm_gradient, ROW, NORM_GRADIENT, 1)
FORM_CHORE(values_raw, VALUE_PAIRS, RAW, 2)
FORM_CHORE(values_norm, VALUE_PAIRS, NORM, 2)
FORM_CHORE(gradient_raw, GRADIENT_PAIRS, RAW, 1)
FORM_CHORE(gradient_norm, GRADIENT_PAIRS, NORM_GRADIENT, 1)
#undef FORM_CHORE

/* All that is left, without products. */
static void form_rest(struct forming *list, enum layout layout, int form)
{
    struct forming f = *list;
    switch (3 * layout + form) {
#define REST(layout, form, chore) \
    case 3 * layout + form: \
        while (f.rows) \
            chore(&f); \
        break;
        REST(ROW, RAW, row_raw)
        REST(ROW, NORM, row_norm)
        REST(ROW, NORM_GRADIENT, row_norm_gradient)
        REST(VALUE_PAIRS, RAW, values_raw)
        REST(VALUE_PAIRS, NORM, values_norm)
        REST(GRADIENT_PAIRS, RAW, gradient_raw)
        REST(GRADIENT_PAIRS, NORM_GRADIENT, gradient_norm)
#undef REST
    default:
        __builtin_trap();
    }
    *list = f;
}

#endif
