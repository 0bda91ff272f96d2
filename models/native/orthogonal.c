/* The matrix of orthogonal columns nearest to a kernel, roughly, for Muon's update: five rounds of
   Newton and Schulz' iteration on G = X'X, all in float32. cpu3d/training/optimizers.py has the
   polynomial and where it is from.

   X is the kernel [rows][columns], or its transpose where that is taller: G is as small as it can
   be. Every matrix but X is symmetric, as a polynomial of G, so only the blocks on and below the
   diagonal are computed. Matrices lie in panels of 16 columns, [panel][row][16], so that a product
   reads memory in order. A number does not depend on how many threads take part. */
#include "pieces.h"

enum { PANEL = 16, VECS = PANEL / LANES };
enum { ROWS = LANES == 16 ? 8 : 4, PANELS = LANES == 16 ? 2 : 1 }; /* of a block in registers */
enum { COLUMNS = PANELS * PANEL };
enum { TERMS_AT_ONCE = 256 }; /* rows of X whose panels stay in the cache L2 */
enum { ROUNDS = 5 };
static const float OF_X = 3.4445f, OF_X3 = -4.7750f, OF_X5 = 2.0315f;

/* A product of symmetric matrices, to = left right + times * more + diagonal * I. */
struct product {
    float *left, *right, *to;
    float *more; /* what is added; NULL */
    float times, diagonal;
};

/* What the threads of an operation share. */
struct job {
    const float *matrix; /* the kernel */
    float *result;
    int rows, columns; /* of the kernel's matrix */
    int is_wide;       /* the kernel has fewer rows than columns: X is its transpose */
    int tall, side;    /* rows and columns of X */
    int width;         /* columns in whole blocks */
    size_t panel;      /* floats from a panel to the next, of a symmetric matrix */
    size_t tall_panel; /* the same of X */
    float *panels;     /* of X */
    float *gram;       /* G of a round */
    float *factor;     /* of a round, a + b G + c G^2 */
    float *root;       /* the product of the factors so far: X times it is the result */
    float *spare;      /* where the next root is made */
    float *between;    /* G times the factor */
    struct product products[2]; /* that are made at once, */
    int count;                  /* so many of them */
    float scale;                /* of X, that makes G's largest eigenvalue at most 1 */
    int threads;
};

/* --- The micro-kernel --- */

/* sums[row][COLUMNS] += over `terms` k: left[k * next + row * apart] times row k of right's panels,
   `panel` floats apart. */
ALWAYS_INLINE void multiply(float *sums, const float *left, size_t next, size_t apart,
                            const float *right, size_t panel, int terms)
{
    vec sum[ROWS][PANELS * VECS];
    for (int row = 0; row < ROWS; row++)
        for (int v = 0; v < PANELS * VECS; v++)
            sum[row][v] = load(sums + row * COLUMNS + v * LANES);
    for (int k = 0; k < terms; k++, left += next, right += PANEL) {
        vec values[PANELS * VECS];
#pragma GCC unroll 4
        for (int v = 0; v < PANELS * VECS; v++)
            values[v] = load(right + v / VECS * panel + v % VECS * LANES);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
            for (int v = 0; v < PANELS * VECS; v++)
                sum[row][v] += values[v] * left[row * apart];
    }
    for (int row = 0; row < ROWS; row++)
        for (int v = 0; v < PANELS * VECS; v++)
            store(sums + row * COLUMNS + v * LANES, sum[row][v]);
}

/* --- Symmetric matrices --- */

static float *element(const struct job *j, float *matrix, int row, int column)
{
    return matrix + column / PANEL * j->panel + (size_t)row * PANEL + column % PANEL;
}

static void read_block(const struct job *j, float *block, float *matrix, int i0, int j0)
{
    for (int row = 0; row < ROWS; row++)
        for (int c = 0; c < COLUMNS; c += PANEL)
            memcpy(block + row * COLUMNS + c, element(j, matrix, i0 + row, j0 + c),
                   PANEL * sizeof(float));
}

static void write_block(const struct job *j, float *matrix, const float *block, int i0, int j0)
{
    for (int row = 0; row < ROWS; row++)
        for (int c = 0; c < COLUMNS; c += PANEL)
            memcpy(element(j, matrix, i0 + row, j0 + c), block + row * COLUMNS + c,
                   PANEL * sizeof(float));
}

/* Of a block's sums what a product makes, and its mirror image where that is not computed. */
static void finish_block(const struct job *j, const struct product *p, float *sums, int i0, int j0)
{
    if (p->more) {
        float more[ROWS * COLUMNS];
        read_block(j, more, p->more, i0, j0);
        for (int i = 0; i < ROWS * COLUMNS; i++)
            sums[i] += p->times * more[i];
    }
    for (int row = 0; row < ROWS && i0 + row - j0 < COLUMNS; row++)
        sums[row * COLUMNS + i0 + row - j0] += p->diagonal;
    write_block(j, p->to, sums, i0, j0);
    if (i0 < j0 + COLUMNS) /* on the diagonal, whose blocks are computed on both sides of it */
        return;
    for (int c = 0; c < COLUMNS; c++)
        for (int row = 0; row < ROWS; row++)
            *element(j, p->to, j0 + c, i0 + row) = sums[row * COLUMNS + c];
}

/* A thread takes every `threads`-th block of each product: ROWS rows from i0 on, COLUMNS columns
   from j0 on. A column of a symmetric matrix is read as a row of it. */
static void multiply_symmetric(void *argument, int thread, int threads)
{
    const struct job *j = argument;
    int number = 0;
    for (int n = 0; n < j->count; n++)
        for (int j0 = 0; j0 < j->width; j0 += COLUMNS)
            for (int i0 = j0; i0 < j->width; i0 += ROWS) {
                if (number++ % threads != thread)
                    continue;
                const struct product *p = &j->products[n];
                float sums[ROWS * COLUMNS] = {0};
                multiply(sums, element(j, p->left, 0, i0), PANEL, 1, element(j, p->right, 0, j0),
                         j->panel, j->width);
                finish_block(j, p, sums, i0, j0);
            }
}

/* --- X --- */

/* Where element (row, column) of X is in the kernel, and in the result. */
static size_t kernel_at(const struct job *j, int row, int column)
{
    if (j->is_wide)
        return (size_t)column * j->columns + row;
    return (size_t)row * j->columns + column;
}

/* X in panels; columns beyond its own are 0. A thread packs its share of rows. */
static void pack_rows(void *argument, int thread, int threads)
{
    const struct job *j = argument;
    int first = (int)share(j->tall, thread, threads);
    int past = (int)share(j->tall, thread + 1, threads);
    for (int c = 0; c < j->width; c += PANEL)
        for (int row = first; row < past; row++) {
            float *to = j->panels + c / PANEL * j->tall_panel + (size_t)row * PANEL;
            if (!j->is_wide && c + PANEL <= j->side) {
                memcpy(to, j->matrix + kernel_at(j, row, c), PANEL * sizeof(float));
                continue;
            }
            for (int i = 0; i < PANEL; i++)
                to[i] = c + i < j->side ? j->matrix[kernel_at(j, row, c + i)] : 0;
        }
}

/* X'X, some rows of X at a time: a thread adds to the sums of its blocks, in the place where the
   blocks are written. */
static void multiply_gram(void *argument, int thread, int threads)
{
    const struct job *j = argument;
    struct product p = {.to = j->gram};
    for (int k = 0; k < j->tall; k += TERMS_AT_ONCE) {
        int terms = least(j->tall - k, TERMS_AT_ONCE);
        int number = 0;
        for (int j0 = 0; j0 < j->width; j0 += COLUMNS)
            for (int i0 = j0; i0 < j->width; i0 += ROWS) {
                if (number++ % threads != thread)
                    continue;
                float sums[ROWS * COLUMNS] = {0};
                if (k)
                    read_block(j, sums, j->gram, i0, j0);
                const float *left = j->panels + i0 / PANEL * j->tall_panel + i0 % PANEL;
                const float *right = j->panels + j0 / PANEL * j->tall_panel;
                multiply(sums, left + (size_t)k * PANEL, PANEL, 1, right + (size_t)k * PANEL,
                         j->tall_panel, terms);
                if (k + terms == j->tall)
                    finish_block(j, &p, sums, i0, j0);
                else
                    write_block(j, j->gram, sums, i0, j0);
            }
    }
}

/* ROWS rows of X, from `first` on, times the root: written as the kernel lies. */
static void multiply_rows(const struct job *j, int first)
{
    for (int j0 = 0; j0 < j->side; j0 += COLUMNS) {
        float sums[ROWS * COLUMNS] = {0};
        for (int c = 0; c < j->width; c += PANEL) {
            const float *left = j->panels + c / PANEL * j->tall_panel + (size_t)first * PANEL;
            multiply(sums, left, 1, PANEL, element(j, j->root, c, j0), j->panel, PANEL);
        }
        int wide = least(j->side - j0, COLUMNS);
        for (int row = 0; row < ROWS && first + row < j->tall; row++)
            for (int c = 0; c < wide; c++)
                j->result[kernel_at(j, first + row, j0 + c)] = j->scale * sums[row * COLUMNS + c];
    }
}

/* X times the root. A thread has its share of blocks of rows: all columns of a block are computed
   from X's panels, so the result may be over the kernel. */
static void multiply_last(void *argument, int thread, int threads)
{
    const struct job *j = argument;
    long blocks = ceil_div(j->tall, ROWS);
    int last = j->tall > ROWS ? j->tall - ROWS : 0; /* row where the last whole block begins */
    /* A block that is not whole is moved up: some of its rows are then computed twice, alike. */
    for (long block = share(blocks, thread, threads); block < share(blocks, thread + 1, threads);
         block++)
        multiply_rows(j, least(block * ROWS, last));
}

/* --- The operation --- */

/* One product or two, which do not need each other. */
static void run_products(struct job *j, const struct product *products, int count)
{
    memcpy(j->products, products, count * sizeof *products);
    j->count = count;
    run_on_threads(j->threads, multiply_symmetric, j);
}

static void swap(float **one, float **other)
{
    float *first = *one;
    *one = *other;
    *other = first;
}

/* X (a + b G + c G^2) five times: `root` becomes the product of the factors. G is scaled by the
   root of c, which saves a multiplication. */
static void iterate(struct job *j)
{
    float of_g = OF_X3 / __builtin_sqrtf(OF_X5);
    for (int round = 0; round < ROUNDS; round++) {
        float *factor = round ? j->factor : j->root; /* the first one is the product so far */
        struct product of_factor = {j->gram, j->gram, factor, j->gram, of_g, OF_X};
        run_products(j, &of_factor, 1);
        struct product of_between = {.left = j->gram, .right = factor, .to = j->between};
        struct product of_root = {.left = j->root, .right = factor, .to = j->spare};
        struct product next[2];
        int count = 0;
        if (round < ROUNDS - 1)
            next[count++] = of_between;
        if (round)
            next[count++] = of_root;
        run_products(j, next, count);
        if (round)
            swap(&j->root, &j->spare);
        /* F (G F), which rounding leaves symmetric: errors of (G F) F would grow from round to
           round. */
        struct product of_gram = {.left = factor, .right = j->between, .to = j->gram};
        if (round < ROUNDS - 1)
            run_products(j, &of_gram, 1);
    }
}

/* Makes G of X'X: its trace is the sum of X's squares. */
static void scale_gram(struct job *j)
{
    double trace = 1e-30;
    for (int i = 0; i < j->side; i++)
        trace += *element(j, j->gram, i, i);
    float by = (float)(__builtin_sqrt(OF_X5) / trace);
    for (size_t i = 0; i < j->width / PANEL * j->panel; i++)
        j->gram[i] *= by;
    double longer = (double)j->rows / j->columns;
    j->scale = (float)__builtin_sqrt((longer > 1 ? longer : 1) / trace);
}

/* Blocks of a symmetric matrix. */
static int symmetric_blocks(const struct job *j)
{
    int across = j->width / COLUMNS;
    return COLUMNS / ROWS * across * (across + 1) / 2;
}

/* How many threads have enough to do. */
static int threads_for(const struct job *j, int most)
{
    int threads = least(symmetric_blocks(j) / ORTHOGONAL_BLOCKS, most);
    return threads < 1 ? 1 : threads;
}

/* The name that build.py gives to that of an instruction set. */
int ORTHOGONALIZE(const struct operation *op)
{
    struct job j = {.matrix = op->maps[0], .result = op->map};
    j.rows = op->x;
    j.columns = op->outputs;
    j.is_wide = j.rows < j.columns;
    j.tall = j.is_wide ? j.columns : j.rows;
    j.side = j.is_wide ? j.rows : j.columns;
    j.width = round_up(j.side, COLUMNS);
    j.panel = (size_t)j.width * PANEL;
    /* A block of rows may reach beyond the last one, where the values do not count. */
    j.tall_panel = (size_t)(j.tall > ROWS ? j.tall : ROWS) * PANEL;
    j.threads = threads_for(&j, op->threads);
    size_t square = (size_t)j.width * j.width; /* floats */
    size_t packed = j.width / PANEL * j.tall_panel;
    size_t bytes = sizeof(float) * (packed + 5 * square);
    double largest = ceil_div(symmetric_blocks(&j), j.threads); /* blocks of a thread, at most */
    if (asks_for_scratch(op, 0, 0, bytes, symmetric_blocks(&j) / largest / op->threads))
        return 0;
    j.panels = passing_memory(bytes);
    if (!j.panels)
        return -1;
    j.gram = j.panels + packed;
    j.factor = j.gram + square;
    j.root = j.factor + square;
    j.spare = j.root + square;
    j.between = j.spare + square;
    run_on_threads(j.threads, pack_rows, &j);
    run_on_threads(j.threads, multiply_gram, &j);
    scale_gram(&j);
    iterate(&j);
    run_on_threads(j.threads, multiply_last, &j);
    return 0;
}
