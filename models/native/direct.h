/* What the direct products in AMX's tiles share: the products, and what becomes of their sums.
   records/kernels.md draws the tiles; what is drawn there has the same names here. */
#ifndef DIRECT_H
#define DIRECT_H

#include "forming.h"

enum { TILE_FLOATS = 16 * 16 };
enum { STREAMED_BYTES = 4 << 20 }; /* maps above it are written past the caches */

/* Values of a voxel in a row: few channels are padded so that whole neighbours fit a line. */
static int width_of(int channels)
{
    if (channels <= 4)
        return 4;
    return channels <= 8 ? 8 : round_up(channels, 16);
}

/* --- Products --- */

/* What is summed: over the steps of each tap, tiles A times tiles B. */
struct products {
    int taps, steps;
    int depth;         /* pairs of values of K in a step */
    size_t line_bytes; /* from a line of a tile A to the next */
    size_t row_bytes;  /* from a tile A to the next that is multiplied at the same time */
};

enum { MOST_TAPS = 9 };

/* The tiles that are multiplied at the same time: of each tap, A from `first[tap]` on. */
struct factors {
    const struct products *of;
    int rows, columns; /* tiles A and tiles B */
    const char *first[MOST_TAPS];
    const char *weights[2];
    const float *bias[2]; /* what the sums of 16 outputs begin with; NULL for 0 */
};

/* Adds the products of taps `tap` to `past` - 1; after each product comes a chore. */
ALWAYS_INLINE void multiply_taps_as(const struct factors *t, int rows, int columns, int tap,
                                    int past, chore *chore, void *work)
{
    const struct products p = *t->of;
    const char *weights[2] = {t->weights[0], t->weights[1]};
    size_t weight = (size_t)tap * p.steps * p.depth * 64;
    for (; tap < past; tap++) {
        const char *values = t->first[tap];
        for (int step = 0; step < p.steps; step++, values += 64, weight += (size_t)p.depth * 64) {
#pragma GCC unroll 2
            for (int column = 0; column < columns; column++)
                tile_load(6 + column, weights[column] + weight, 64);
#pragma GCC unroll 4
            for (int row = 0; row < rows; row++) {
                tile_load(4 + row % 2, values + row * p.row_bytes, p.line_bytes);
#pragma GCC unroll 2
                for (int column = 0; column < columns; column++) {
                    tile_multiply_add(row * columns + column, 4 + row % 2, 6 + column);
                    chore(work);
                }
            }
        }
    }
}

/* The same without chores. */
static void multiply_taps(const struct factors *t, int tap, int past)
{
    switch (10 * t->rows + t->columns) {
#define BLOCK(rows, columns) \
    case 10 * rows + columns: \
        multiply_taps_as(t, rows, columns, tap, past, no_chore, NULL); \
        break;
        BLOCK(1, 1) BLOCK(2, 1) BLOCK(3, 1) BLOCK(4, 1) BLOCK(1, 2) BLOCK(2, 2)
#undef BLOCK
    default:
        __builtin_trap();
    }
}

/* The sums begin with the bias. */
static void begin_tiles(const struct factors *t)
{
#pragma GCC unroll 4
    for (int i = 0; i < MOST_TILE_ROWS; i++) {
        const float *bias = t->bias[i & (t->columns - 1)]; /* one column or two */
        if (bias)
            tile_load(i, bias, 0); /* the same line again and again */
        else
            tile_zero(i);
    }
}

static void store_tiles(const struct factors *t, float *sums)
{
#pragma GCC unroll 4
    for (int i = 0; i < MOST_TILE_ROWS; i++)
        if (i < t->rows * t->columns)
            tile_store(i, sums + i * TILE_FLOATS, 64);
}

/* The sums over all taps. */
static void multiply(const struct factors *t, float *sums)
{
    begin_tiles(t);
    multiply_taps(t, 0, t->of->taps);
    store_tiles(t, sums);
}

/* --- Finishing: sums become values of a map --- */

/* The map that is made, of a sample. */
struct made {
    void *map;
    size_t bytes;
    int channels, width; /* width: in whole 16 */
    enum map_sums sums;
    double *totals;    /* [2][width] */
    const void *other; /* what is added, or with NORM_SUMS the raw map below; NULL */
    int adds;
    const float *norm; /* with NORM_SUMS: [COEFFICIENTS][channels] of the map below */
};

/* The sums of a tile as spans: two halves of up to 16 values, side by side in the map where they
   can be. */
struct spans {
    const float *sums[2]; /* of the first span, of each half */
    int next_sums;        /* to those of the next span */
    int count[2];         /* spans whose first, or second half is of a voxel of the map */
    size_t at[2], next;   /* elements of the map; to those of the next span */
};

/* The same spans so many sums, and elements of the map, further on. */
ALWAYS_INLINE struct spans moved(struct spans spans, size_t sums, size_t elements)
{
    for (int i = 0; i < 2; i++) {
        spans.sums[i] += sums;
        spans.at[i] += elements;
    }
    return spans;
}

/* What is finished at once. */
struct finished {
    int rows; /* 0: nothing */
    struct spans spans[MOST_TILE_ROWS];
    int channel[2], wide[2]; /* first channel, and channels, up to 16 */
    size_t ahead;            /* elements to what is finished next */
};

/* Of two tiles: the first has `count` lines of voxels, `next` elements apart from `at` on, the
   second `count_beside` from `beside` on. */
static struct spans spans_of_two(const float *sums, size_t at, size_t beside, size_t next,
                                 int count, int count_beside)
{
    return (struct spans){
        .sums = {sums, sums + TILE_FLOATS},
        .next_sums = 16,
        .count = {count < 0 ? 0 : count, count_beside < 0 ? 0 : count_beside},
        .at = {at, beside},
        .next = next,
    };
}

/* Of one tile: two of its lines become a span. */
static struct spans spans_of_one(const float *sums, size_t at, size_t next, int count)
{
    return (struct spans){
        .sums = {sums, sums + 16},
        .next_sums = 32,
        .count = {(count + 1) / 2, count / 2},
        .at = {at, at + next},
        .next = 2 * next,
    };
}

/* --- Columns: tiles B of the outputs --- */

/* 16 outputs, and where a line makes a pair of voxels those of the first or of the second. */
struct column {
    int block, voxel;
};

static int passes_of(int voxels, int blocks) { return voxels == 2 ? blocks : ceil_div(blocks, 2); }

/* Returns the number of columns of a pass over `blocks` blocks from `first` on. Of pairs, two
   blocks of one voxel where blocks are even: their outputs are side by side in memory. */
static int columns_of(struct column *columns, int voxels, int first, int blocks, int pass)
{
    if (voxels == 2 && blocks % 2) {
        columns[0] = (struct column){first + pass, 0};
        columns[1] = (struct column){first + pass, 1};
        return 2;
    }
    int voxel = voxels == 2 ? pass % 2 : 0;
    int block = voxels == 2 ? pass / 2 * 2 : 2 * pass;
    columns[0] = (struct column){first + block, voxel};
    columns[1] = (struct column){first + block + 1, voxel};
    return least(2, blocks - block);
}

/* The sums of a tile A and its columns, from `voxel` of the map on, of which `left` voxels are. */
static struct spans spans_of(const float *sums, const struct column *columns, int count,
                             size_t voxel, int left, int voxels, int channels)
{
    size_t next = (size_t)voxels * channels;
    size_t at[2];
    int lines[2];
    if (count == 1)
        return spans_of_one(sums, voxel * channels + 16 * columns[0].block, next, left);
    for (int i = 0; i < 2; i++) {
        at[i] = (voxel + columns[i].voxel) * channels + 16 * columns[i].block;
        lines[i] = voxels == 2 ? (left - columns[i].voxel + 1) / 2 : left;
    }
    return spans_of_two(sums, at[0], at[1], next, lines[0], lines[1]);
}

/* Of a pass's columns, without spans. */
static struct finished finished_of(const struct column *columns, int count, int channels)
{
    struct finished f = {.channel = {16 * columns[0].block, 16 * columns[count - 1].block}};
    f.wide[0] = least(16, channels - f.channel[0]);
    f.wide[1] = least(16, channels - f.channel[1]);
    return f;
}

static int lanes_of(int wide, int v)
{
    int lanes = wide - v * LANES;
    return lanes < 0 ? 0 : least(lanes, LANES);
}

/* Two vectors of 16 values to 32 elements side by side; they become what was written. */
ALWAYS_INLINE void store_span(void *map, size_t at, vec (*value)[VECS], int is_streamed)
{
#ifdef __AVX512BF16__
    __m512i pair = (__m512i)_mm512_cvtne2ps_pbh((__m512)value[1][0], (__m512)value[0][0]);
    if (is_streamed)
        _mm512_stream_si512((void *)((uint16_t *)map + at), pair);
    else
        _mm512_storeu_si512((uint16_t *)map + at, pair);
    value[0][0] = from_bfloat16((halves)_mm512_castsi512_si256(pair));
    value[1][0] = from_bfloat16((halves)_mm512_extracti64x4_epi64(pair, 1));
#else
    for (int i = 0; i < 2 * VECS; i++) {
        vec *each = &value[i / VECS][i % VECS];
        *each = store_values(map, at + i * LANES, *each, LANES, BFLOAT16);
    }
#endif
}

/* How the spans of a call are finished: constants of the functions below. */
struct how {
    enum map_sums kind;
    int adds;     /* the other map is added */
    int is_whole; /* both halves have 16 channels, and lie side by side in the map */
};

/* What is summed over the spans of a call, of both halves. Moments are of the differences
   from a pivot, in float32, and in float64 over all calls. */
struct span_sums {
    vec below[2][VECS][COEFFICIENTS]; /* norm of the map below */
    vec pivot[2][VECS];
    vec sums[2][VECS][2];
};

/* What is written of a span: the products' sum, and what is added. */
ALWAYS_INLINE vec value_of(const struct made *made, const struct spans *l, int half, int v,
                           int wide, struct how how)
{
    size_t at = l->at[half] + v * LANES;
    vec value = load(l->sums[half] + v * LANES);
    if (how.adds)
        value += load_values(made->other, at, wide, BFLOAT16);
    return value;
}

/* Rounds, writes and sums the first span, of one voxel or of two. */
ALWAYS_INLINE void finish_span(const struct made *made, const struct finished *f,
                               const struct spans *l, int voxels, int is_streamed, struct how how,
                               struct span_sums *s)
{
    int reads = how.adds || how.kind == NORM_SUMS;
    int is_pair = how.is_whole && voxels == 2;
    vec value[2][VECS];
#pragma GCC unroll 4
    for (int n = 0; n < voxels * VECS; n++) {
        int half = n / VECS;
        int v = n % VECS;
        int wide = how.is_whole ? LANES : lanes_of(f->wide[half], v);
        size_t at = l->at[half] + v * LANES;
        if (reads)
            __builtin_prefetch((const uint16_t *)made->other + at + f->ahead);
        value[half][v] = value_of(made, l, half, v, wide, how);
        if (!is_pair)
            value[half][v] = store_values(made->map, at, value[half][v], wide, BFLOAT16);
    }
    if (is_pair)
        store_span(made->map, l->at[0], value, is_streamed);
#pragma GCC unroll 4
    for (int n = 0; n < voxels * VECS; n++) {
        int half = n / VECS;
        int v = n % VECS;
        int wide = how.is_whole ? LANES : lanes_of(f->wide[half], v);
        size_t at = l->at[half] + v * LANES;
        vec written = value[half][v];
        vec *to = s->sums[half][v];
        if (how.kind == NORM_SUMS)
            add_norm_sums(to, s->below[half][v], load_values(made->other, at, wide, BFLOAT16),
                          written);
        if (how.kind == MOMENTS) {
            vec difference = written - s->pivot[half][v];
            to[0] += difference;
            to[1] += difference * difference;
        }
    }
}

/* Adds what was summed over `count` spans to the totals. */
ALWAYS_INLINE void add_sums(const struct made *made, int channel, struct how how, const vec *sums,
                            vec pivot, int count)
{
    double *totals = made->totals + channel;
    if (how.kind == NORM_SUMS) {
        add_row(totals, made->width, sums);
        return;
    }
    dvec from = __builtin_convertvector(pivot, dvec);
    dvec first = __builtin_convertvector(sums[0], dvec);
    dvec second = __builtin_convertvector(sums[1], dvec);
    dvec squares = second + from * (2 * first + count * from);
    first += count * from;
    add_doubles(totals, &first);
    add_doubles(totals + made->width, &squares);
}

/* Spans that are finished one after the other. */
struct finishing {
    const struct made *made;
    const struct finished *of;
    int row, left;   /* the row whose spans are next, and how many of two voxels it has left */
    struct spans l;  /* the next one, and those that follow it */
    int is_streamed; /* past the caches */
    struct span_sums s;
};

ALWAYS_INLINE void begin_row(struct finishing *w)
{
    const struct made *made = w->made;
    w->l = w->of->spans[w->row];
    w->left = w->l.count[1];
    int is_aligned = ((uintptr_t)made->map + 2 * w->l.at[0]) % 64 == 0 && w->l.next % 32 == 0;
    w->is_streamed = is_aligned && made->bytes > STREAMED_BYTES;
}

ALWAYS_INLINE struct finishing begin_finishing(const struct made *made, const struct finished *f,
                                               struct how how)
{
    struct finishing w = {.made = made, .of = f};
#pragma GCC unroll 4
    for (int n = 0; n < 2 * VECS; n++) {
        int half = n / VECS;
        int v = n % VECS;
        int wide = lanes_of(f->wide[half], v);
        const float *norm = how.kind == NORM_SUMS ? made->norm : NULL;
        int channel = f->channel[half] + v * LANES;
        load_norm(w.s.below[half][v], norm, made->channels, channel, wide);
        if (how.kind == MOMENTS && f->spans[0].count[half])
            w.s.pivot[half][v] = value_of(made, &f->spans[0], half, v, wide, how);
    }
    begin_row(&w);
    return w;
}

ALWAYS_INLINE void next_span(struct finishing *w, int voxels, int is_streamed, struct how how)
{
    finish_span(w->made, w->of, &w->l, voxels, is_streamed, how, &w->s);
    w->l = moved(w->l, w->l.next_sums, w->l.next);
}

/* The chore, of rows that all have spans of two voxels alone: finishes one. */
ALWAYS_INLINE void finish_next(struct finishing *w, struct how how)
{
    if (!w->left)
        return;
    next_span(w, 2, w->is_streamed, how);
    if (--w->left)
        return;
    if (++w->row < w->of->rows)
        begin_row(w);
}

ALWAYS_INLINE void end_finishing(const struct finishing *w, struct how how)
{
    const struct finished *f = w->of;
    int counted[2] = {0, 0};
    if (how.kind == NO_SUMS)
        return;
    for (int row = 0; row < f->rows; row++)
        for (int half = 0; half < 2; half++)
            counted[half] += f->spans[row].count[half];
#pragma GCC unroll 4
    for (int n = 0; n < 2 * VECS; n++) {
        int half = n / VECS;
        int v = n % VECS;
        int channel = f->channel[half] + v * LANES;
        add_sums(w->made, channel, how, w->s.sums[half][v], w->s.pivot[half][v], counted[half]);
    }
}

ALWAYS_INLINE void finish_as(const struct made *made, const struct finished *f, struct how how)
{
    struct finishing w = begin_finishing(made, f, how);
    for (; w.row < f->rows; w.row++) {
        begin_row(&w);
        for (int i = 0; i < w.l.count[1]; i++)
            next_span(&w, 2, w.is_streamed, how);
        for (int i = w.l.count[1]; i < w.l.count[0]; i++) /* the last of an uneven number */
            next_span(&w, 1, 0, how);
    }
    end_finishing(&w, how);
}

static int is_whole(const struct finished *f)
{
    int is_beside = f->spans[0].at[1] - f->spans[0].at[0] == 16;
    return f->wide[0] == 16 && f->wide[1] == 16 && is_beside;
}

static void finish(const struct made *made, const struct finished *f)
{
    if (!f->rows || !WITH_VECTORS)
        return;
    switch (made->sums * 4 + made->adds * 2 + is_whole(f)) {
#define FINISH(kind, adds, whole) \
    case kind * 4 + adds * 2 + whole: \
        finish_as(made, f, (struct how){kind, adds, whole}); \
        break;
        /* clang-format off */
        FINISH(NO_SUMS, 0, 0) FINISH(NO_SUMS, 0, 1) FINISH(NO_SUMS, 1, 0) FINISH(NO_SUMS, 1, 1)
        FINISH(MOMENTS, 0, 0) FINISH(MOMENTS, 0, 1) FINISH(MOMENTS, 1, 0) FINISH(MOMENTS, 1, 1)
        FINISH(NORM_SUMS, 0, 0) FINISH(NORM_SUMS, 0, 1)
        /* clang-format on */
#undef FINISH
    default:
        __builtin_trap();
    }
}

#endif
