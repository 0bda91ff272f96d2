/* The matrix of orthogonal columns nearest to a kernel, roughly, for Muon's update: five rounds of
   Newton and Schulz' iteration on G = X'X, all in float32. cpu3d/training/optimizers.py has the
   polynomial and where it is from.

   Every matrix but X is symmetric, as a polynomial of G, so only the blocks on and below the
   diagonal are computed. Matrices lie in panels of 16 columns, [panel][row][16], so that a product
   reads memory in order. A number does not depend on how many threads take part. */
#include "vectors.h"

enum { PANEL = 16, VECS = PANEL / LANES };
enum { ROWS = LANES == 16 ? 8 : 4, PANELS = LANES == 16 ? 2 : 1 }; /* of a block in registers */
enum { COLUMNS = PANELS * PANEL };
enum { TERMS_AT_ONCE = 256 };    /* rows of X whose panels stay in the cache L2 */
enum { BLOCKS_OF_A_THREAD = 8 }; /* fewer are over before another thread is awake */
enum { ROUNDS = 5 };
static const float OF_X = 3.4445f, OF_X3 = -4.7750f, OF_X5 = 2.0315f;

/* A product of panels, [row of either][16]: sums over rows k of left[k][i] * right[k][j]. */
struct product {
    float *left, *right, *to;
    float *more; /* what is added, times `times`; NULL */
    float times, diagonal;
};

/* What the threads of an operation share. */
struct job {
    const float *matrix;
    float *result;
    int rows, columns;        /* of the kernel's matrix */
    int is_wide;              /* X is its transpose: the kernel has fewer rows than columns */
    int tall, side, width;    /* rows and columns of X; width: columns in whole blocks */
    size_t panel, tall_panel; /* floats */
    float *panels;            /* of X */
    float *gram, *factor, *root, *spare, *between;
    struct product products[2];
    int count;   /* of `products` */
    float scale; /* of X, that makes G's largest eigenvalue at most 1 */
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

/* A block from its place, or to it. */
static void copy_block(const struct job *j, float *matrix, int i0, int j0, float *block, int is_to)
{
    for (int row = 0; row < ROWS; row++)
        for (int c = 0; c < COLUMNS; c += PANEL) {
            float *place = element(j, matrix, i0 + row, j0 + c);
            float *values = block + row * COLUMNS + c;
            if (is_to)
                memcpy(place, values, PANEL * sizeof(float));
            else
                memcpy(values, place, PANEL * sizeof(float));
        }
}

/* Writes a block, and its mirror image where that is not computed. */
static void write_block(const struct job *j, const struct product *p, float *sums, int i0, int j0)
{
    if (p->more) {
        float more[ROWS * COLUMNS];
        copy_block(j, p->more, i0, j0, more, 0);
        for (int i = 0; i < ROWS * COLUMNS; i++)
            sums[i] += p->times * more[i];
    }
    for (int row = 0; row < ROWS && i0 + row - j0 < COLUMNS; row++)
        sums[row * COLUMNS + i0 + row - j0] += p->diagonal;
    copy_block(j, p->to, i0, j0, sums, 1);
    if (i0 < j0 + COLUMNS)
        return;
    for (int c = 0; c < COLUMNS; c++)
        for (int row = 0; row < ROWS; row++)
            *element(j, p->to, j0 + c, i0 + row) = sums[row * COLUMNS + c];
}

/* A thread takes every `threads`-th block of each product: ROWS rows from i0 on, COLUMNS columns
   from j0 on. */
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
                write_block(j, p, sums, i0, j0);
            }
}

/* --- X --- */

static float value_of(const struct job *j, int row, int column)
{
    if (j->is_wide)
        return j->matrix[(size_t)column * j->columns + row];
    return j->matrix[(size_t)row * j->columns + column];
}

/* X in panels; columns beyond its own are 0. A thread packs its share of rows. */
static void pack_rows(void *argument, int thread, int threads)
{
    const struct job *j = argument;
    int begin = (int)((long)j->tall * thread / threads);
    int end = (int)((long)j->tall * (thread + 1) / threads);
    for (int c = 0; c < j->width; c += PANEL)
        for (int row = begin; row < end; row++) {
            float *to = j->panels + c / PANEL * j->tall_panel + (size_t)row * PANEL;
            if (!j->is_wide && c + PANEL <= j->side) {
                memcpy(to, j->matrix + (size_t)row * j->columns + c, PANEL * sizeof(float));
                continue;
            }
            for (int i = 0; i < PANEL; i++)
                to[i] = c + i < j->side ? value_of(j, row, c + i) : 0;
        }
}

/* X'X, some rows of X at a time: a thread adds to the sums of its blocks, in the place where the
   blocks are written. */
static void multiply_gram(void *argument, int thread, int threads)
{
    const struct job *j = argument;
    struct product p = {.to = j->gram};
    for (int k = 0; k < j->tall; k += TERMS_AT_ONCE) {
        int terms = j->tall - k < TERMS_AT_ONCE ? j->tall - k : TERMS_AT_ONCE;
        int number = 0;
        for (int j0 = 0; j0 < j->width; j0 += COLUMNS)
            for (int i0 = j0; i0 < j->width; i0 += ROWS) {
                if (number++ % threads != thread)
                    continue;
                float sums[ROWS * COLUMNS] = {0};
                if (k)
                    copy_block(j, j->gram, i0, j0, sums, 0);
                const float *left = j->panels + i0 / PANEL * j->tall_panel + i0 % PANEL;
                const float *right = j->panels + j0 / PANEL * j->tall_panel;
                multiply(sums, left + (size_t)k * PANEL, PANEL, 1, right + (size_t)k * PANEL,
                         j->tall_panel, terms);
                if (k + terms == j->tall)
                    write_block(j, &p, sums, i0, j0);
                else
                    copy_block(j, j->gram, i0, j0, sums, 1);
            }
    }
}

/* X times the last product, written as the kernel lies. A thread has its share of blocks of rows:
   all columns of a block are computed from X's panels, so the result may be over the kernel. */
static void multiply_last(void *argument, int thread, int threads)
{
    const struct job *j = argument;
    int blocks = (j->tall + ROWS - 1) / ROWS;
    for (int block = blocks * (long)thread / threads; block < blocks * (long)(thread + 1) / threads;
         block++) {
        /* The last block is moved up: some of its rows are then computed twice, alike. */
        int first = block * ROWS + ROWS <= j->tall ? block * ROWS : j->tall - ROWS;
        if (first < 0)
            first = 0;
        for (int j0 = 0; j0 < j->side; j0 += COLUMNS) {
            float sums[ROWS * COLUMNS] = {0};
            for (int c = 0; c < j->width; c += PANEL) {
                const float *left = j->panels + c / PANEL * j->tall_panel + (size_t)first * PANEL;
                multiply(sums, left, 1, PANEL, element(j, j->root, c, j0), j->panel, PANEL);
            }
            int wide = j->side - j0 < COLUMNS ? j->side - j0 : COLUMNS;
            for (int row = 0; row < ROWS && first + row < j->tall; row++)
                for (int c = 0; c < wide; c++) {
                    float value = j->scale * sums[row * COLUMNS + c];
                    size_t at = (size_t)(first + row) * j->columns + j0 + c;
                    if (j->is_wide)
                        at = (size_t)(j0 + c) * j->columns + first + row;
                    j->result[at] = value;
                }
        }
    }
}

/* --- The operation --- */

/* One product or two: of matrices in panels, plus `times` * more + `diagonal` on the diagonal. */
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
        float *factor = round ? j->factor : j->root;
        struct product of_factor = {j->gram, j->gram, factor, j->gram, of_g, OF_X};
        run_products(j, &of_factor, 1);
        struct product next[2] = {{.left = j->gram, .right = factor, .to = j->between},
                                  {.left = j->root, .right = factor, .to = j->spare}};
        int is_last = round == ROUNDS - 1;
        if (is_last)
            run_products(j, next + 1, 1);
        else
            run_products(j, next, round ? 2 : 1);
        if (round)
            swap(&j->root, &j->spare);
        /* F (G F), which rounding leaves symmetric: errors of (G F) F would grow from round to
           round. */
        struct product of_gram = {.left = factor, .right = j->between, .to = j->gram};
        if (!is_last)
            run_products(j, &of_gram, 1);
    }
}

/* Makes G of X'X: its trace is the sum of X's squares. */
static void scale_gram(struct job *j)
{
    double trace = 1e-30;
    for (int i = 0; i < j->side; i++)
        trace += *element(j, j->gram, i, i);
    float share = (float)(__builtin_sqrt(OF_X5) / trace);
    for (size_t i = 0; i < j->width / PANEL * j->panel; i++)
        j->gram[i] *= share;
    double longer = (double)j->rows / j->columns;
    j->scale = (float)__builtin_sqrt((longer > 1 ? longer : 1) / trace);
}

/* The name that build.py gives to that of an instruction set. memory_estimator/step/scratch.py has
   the bytes as a formula. */
int ORTHOGONALIZE(const struct operation *op)
{
    struct job j = {.matrix = op->maps[0], .result = op->map};
    j.rows = op->x;
    j.columns = op->outputs;
    j.is_wide = j.rows < j.columns;
    j.tall = j.is_wide ? j.columns : j.rows;
    j.side = j.is_wide ? j.rows : j.columns;
    j.width = (j.side + COLUMNS - 1) / COLUMNS * COLUMNS;
    j.panel = (size_t)j.width * PANEL;
    /* A block of rows may reach beyond the last one, where the values do not count. */
    j.tall_panel = (size_t)(j.tall > ROWS ? j.tall : ROWS) * PANEL;
    size_t square = (size_t)j.width * j.width;
    size_t packed = j.width / PANEL * j.tall_panel;
    size_t bytes = sizeof(float) * (packed + 5 * square);
    if (asks_for_scratch(op, 0, 0, bytes))
        return 0;
    j.panels = passing_memory(bytes);
    if (!j.panels)
        return -1;
    j.gram = j.panels + packed;
    j.factor = j.gram + square;
    j.root = j.factor + square;
    j.spare = j.root + square;
    j.between = j.spare + square;
    int across = j.width / COLUMNS;
    int blocks = COLUMNS / ROWS * across * (across + 1) / 2;
    j.threads = blocks / BLOCKS_OF_A_THREAD;
    if (j.threads > op->threads)
        j.threads = op->threads;
    if (j.threads < 1)
        j.threads = 1;
    run_on_threads(j.threads, pack_rows, &j);
    run_on_threads(j.threads, multiply_gram, &j);
    scale_gram(&j);
    iterate(&j);
    run_on_threads(j.threads, multiply_last, &j);
    return 0;
}
