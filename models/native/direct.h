/* What the direct products in AMX's tiles share. docs/kernels.md draws the tiles. */
#ifndef DIRECT_H
#define DIRECT_H

#include "amx.h"
#include "slabs.h"

enum { TILE_BYTES = 1024, TILE_FLOATS = 16 * 16, VECS = 16 / LANES };

static int parts_of(int number, int size) { return (number + size - 1) / size; }

/* Values of a voxel in a row: few channels are padded so that whole neighbours fit a line of a tile. */
static int width_of(int channels)
{
    if (channels <= 4)
        return 4;
    return channels <= 8 ? 8 : round_up(channels, 16);
}

#endif
