/* A slab is a thread's share of the planes along x of all samples. What the slabs of a convolution
   have to do with each other: in place, one reads what another overwrites; and their sums are
   added up. */
#ifndef SLABS_H
#define SLABS_H

#include "rows.h"

/* The first plane of a thread's share. */
static long share(const struct operation *op, int thread, int threads)
{
    return (long)op->batch * op->x * thread / threads;
}

/* The part of a slab that a thread computes at a time: planes x0 ... x1 - 1 of a sample, rows
   y0 ... y1 - 1 of each. */
struct part { int batch, x0, x1, y0, y1; };

/* The planes of a share from `at` on that are of one sample. */
static void planes_from(struct part *part, const struct operation *op, long at, long end)
{
    part->batch = (int)(at / op->x);
    part->x0 = (int)(at % op->x);
    part->x1 = least(op->x, part->x0 + end - at);
}

/* --- In place: what is read after it may be overwritten is copied before, each slab's to memory of
   its own: both planes beside it, and of each of its planes the last row of the part before --- */

static size_t map_row_bytes(const struct operation *op)
{
    return (size_t)op->z * op->channels[0] * (op->dtype == FLOAT32 ? 4 : 2);
}

/* Bytes of a slab's copies; 0 where the output is elsewhere. */
static size_t copies_bytes(const struct operation *op, int slabs)
{
    size_t planes = ((size_t)op->batch * op->x + slabs - 1) / slabs; /* of the largest slab */
    if (op->map != op->maps[0])
        return 0;
    return ((2 * op->y + planes) * map_row_bytes(op) + 63) / 64 * 64;
}

static void copy_planes_beside(const struct operation *op, char *copies, int thread, int threads)
{
    long begin = share(op, thread, threads), end = share(op, thread + 1, threads);
    long beside[2] = {begin - 1, end};
    size_t plane = op->y * map_row_bytes(op);
    for (int i = 0; i < 2 && begin < end; i++)
        if ((i ? end : begin) % op->x)
            memcpy(copies + i * plane, (const char *)op->maps[0] + beside[i] * plane, plane);
}

/* Where the last row of the part before is, of plane x; NULL of a plane outside the slab. */
static char *last_row(const struct operation *op, char *copies, const struct part *part, int x)
{
    if (x < part->x0 || x == part->x1)
        return NULL;
    return copies + (2 * (size_t)op->y + x - part->x0) * map_row_bytes(op);
}

/* Bytes from the first map's beginning to row (x, y). */
static size_t row_at(const struct operation *op, const struct part *part, int x, int y)
{
    return voxel_of(op, 1, part->batch, x, y) * (map_row_bytes(op) / op->z);
}

/* The first map as row (x, y) is to be read from it: the copy where the map is overwritten by then,
   shifted so that the row is found at the voxel where the map would have it. */
static const void *map_in_place(const struct operation *op, char *copies, const struct part *part,
                                int x, int y)
{
    const char *copy = last_row(op, copies, part, x);
    if (!copy)
        copy = copies + ((size_t)(x == part->x1) * op->y + y) * map_row_bytes(op);
    else if (y >= part->y0)
        return op->maps[0];
    return (const void *)((uintptr_t)copy - row_at(op, part, x, y));
}

/* Once row (x, y) is formed: the next part reads it after this one has overwritten it. */
static void keep_last_row(const struct operation *op, char *copies, const struct part *part, int x,
                          int y)
{
    char *last = last_row(op, copies, part, x);
    if (last && y == part->y1 - 1)
        memcpy(last, (const char *)op->maps[0] + row_at(op, part, x, y), map_row_bytes(op));
}

/* --- Sums of a convolution's map --- */

enum map_sums { NO_SUMS, MOMENTS, NORM_SUMS };

static enum map_sums sums_of(const struct operation *op)
{
    if (op->sums_to && op->kind == CONVOLVE)
        return MOMENTS;
    /* Without a norm below they are 0. */
    return op->sums_to && op->other_coefficients ? NORM_SUMS : NO_SUMS;
}

/* Of the slabs' totals, [batch][2][width] each and `next` apart: of MOMENTS the values' sum and
   the sum of their squares. */
static void write_sums(const struct operation *op, enum map_sums sums, const double *totals,
                       size_t next, int channels, int width, int slabs)
{
    double voxels = (double)op->x * op->y * op->z;
    for (int i = 0; i < op->batch * channels; i++) {
        int batch = i / channels, c = i % channels;
        const double *at = totals + (size_t)batch * 2 * width + c;
        double first = total(at, next, slabs), second = total(at + width, next, slabs);
        if (sums == MOMENTS) {
            first /= voxels;
            second = second / voxels - first * first;
            second = second < 0 ? 0 : second; /* a rounding of float64 below it */
        }
        op->sums_to[(size_t)batch * 2 * channels + c] = (float)first;
        op->sums_to[((size_t)batch * 2 + 1) * channels + c] = (float)second;
    }
}

#endif
