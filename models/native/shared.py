"""What both C and Python need, written once: build.py makes the header shared.h of it."""

from models.native.instruction_sets import INSTRUCTION_SETS

# What each kind takes -> what it makes. Two maps are read as if concatenated. The grid is the
# map's, but for up_ kinds and pools the coarser one. Sums are [batch][2][channels]: those of
# native.h, or of `convolve` the mean and variance of its map. A gradient comes with its raw map
# where its coefficients are.
KINDS = (
    # one raw map or two, filters [3][3][3][channels][outputs], others: what is added, or none
    # -> map, sums
    "convolve",
    # gradient, filters [3][3][3][outputs][channels], others: raw map below -> map; sums with a map
    # below
    "input_gradient",
    "filter_gradient",  # one raw map or two, others: gradient -> filter gradient
    "max_pool",  # raw -> map
    # raw, others: gradient of the pooled map, gradient that is added -> map, sums
    "max_pool_gradient",
    "residual_sum",  # raw, others: shortcut -> map: max(formed + shortcut, 0)
    # raw, others: the sum, its gradient -> map: the gradient where the sum is positive; sums
    "residual_gradient",
    # raw, others: gradient -> map: of the raw map's values; the coefficients are a gradient's
    "to_raw",
    # raw, filters [channels][outputs], bias, others: what is added, or none -> map
    "project",
    # raw, filters, others: gradient, what is added, or none -> map, sums, filter and bias gradient
    "project_gradient",
    "project_sums",  # raw, filters, others: gradient -> sums, filter and bias gradient
    "project_to_raw",  # raw, filters, others: gradient -> map, as of to_raw
    "up_convolve",  # raw, filters [x][y][z][outputs][channels] as finer the grid -> map
    "up_input_gradient",  # raw, filters, others: gradient -> map, sums
    "up_filter_gradient",  # raw, others: gradient -> filter gradient
    "loss_sums",  # logits, others: target -> sums, [batch][LOSS_TERMS][channels]
    # logits, others: target; coefficients: factors -> map, that of the logits' gradient
    "loss_slope",
    # a matrix of float32, x rows of `outputs` values -> map: orthogonal columns, times the root of
    # its rows over its columns if that is more than 1
    "orthogonal",
)
KIND_CODES = {kind: code for code, kind in enumerate(KINDS)}

WITH_SUMS = (
    "convolve",
    "input_gradient",
    "max_pool_gradient",
    "residual_gradient",
    "project_gradient",
    "project_sums",
    "up_input_gradient",
)
"""Kinds whose map has two sums."""

# Constants. The C files say what each is of.

MOST_THREADS = 256  # that compute an operation
DEFAULT_L2_BYTES = 1 << 20  # a core's cache L2, where the system does not tell

# Thousandths of a core's cache L2. Of direct products 330 to 800 were tried on a Xeon with AMX:
# within 5 %, 400 the fastest. The others were chosen and never measured against other values.
RING_PERMILLE = 625  # of transformed rows, in a ring
DIRECT_RING_PERMILLE = 400  # of rows of direct products, in a ring
POSITIONS_PERMILLE = 625  # of positions, whose filter gradients are sums in tiles

GROUP = 16  # channels that are stored together
MOST_TILES_OF_16_LANES = 28  # of transformed rows, whose sums are in 32 registers at once
MOST_TILES_OF_8_LANES = 6  # in 16 registers
MOST_TILE_ROWS = 4  # tiles A of direct products that are multiplied at once
MOST_PLANES = 8  # of positions that are multiplied at once
ENOUGH_STEPS = 64  # of 32 positions: adding up the sums of more costs next to nothing
MOST_TARGETS = 6  # tiles B whose sums are in registers at once
WEIGHT_PARTS = 3  # of bfloat16, whose sum is a projection's weight of float32
IGNORED = 255  # value of a target's voxel that is not learnt; of the others 0 is outside a region
LOSS_TERMS = 4  # sums of each region of a loss: native.h
LOSS_BLOCK_VALUES = 8192  # of logits in a block of rows, about: some microseconds of work
ORTHOGONAL_BLOCKS = 8  # of a symmetric matrix; fewer are over before another thread is awake

CONSTANTS = {name: value for name, value in globals().items() if isinstance(value, int)}


def header() -> str:
    """The text of shared.h."""
    lines = ["/* build.py makes this of shared.py and instruction_sets.py. */"]
    lines += ["enum kind {", *(f"    {kind.upper()}," for kind in KINDS), "    KINDS", "};"]
    lines += ["enum {", *(f"    {name} = {value}," for name, value in CONSTANTS.items()), "};"]
    # Name, flags of a CPU that it needs, and whether it computes bfloat16 maps alone, is slow on
    # Intel's CPUs, is taken by name alone; the fastest first.
    lines.append("#define EACH_INSTRUCTION_SET(SET) \\")
    sets = []
    for name, each in INSTRUCTION_SETS.items():
        needs = " ".join(each.needs)
        flags = (each.bfloat16_alone, each.slow_on_intel, each.emulated)
        words = ", ".join(str(int(flag)) for flag in flags)
        sets.append(f'    SET({name}, "{needs}", {words})')
    lines.append(" \\\n".join(sets))
    return "\n".join(lines) + "\n"
