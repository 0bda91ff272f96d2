"""Which axes each level of a network halves, and the grids that follow. No TensorFlow.

    strides_for((0.8, 0.8, 5.0), (256, 256, 20), 5)  # (2, 2, 1), (2, 2, 1), (2, 2, 2), (2, 2, 2)
    coarse_grid((145, 182, 29), (2, 2, 1), (16, 16, 4)).grid  # (80, 96, 32)

A stride is the number of voxels along X, Y, Z that become one of the next coarser level: 2 along
the axes that are halved, else 1.
"""

import itertools
import math
import statistics
from typing import Any, Iterable, Iterator, NamedTuple, Sequence, Tuple

Shape3 = Tuple[int, int, int]
Spacing3 = Tuple[float, float, float]  # mm along X, Y, Z, which are R, A, S in a store
Strides = Tuple[Shape3, ...]  # of each halving, the finest first

EVERY_AXIS: Shape3 = (2, 2, 2)
NO_AXIS: Shape3 = (1, 1, 1)
STRIDES: Strides = tuple(itertools.product((2, 1), (2, 1), (2, 1)))[:-1]  # all but NO_AXIS

# Of a voxel's side. Others are in another unit than a file's header says: every rule for lesions is
# in mm, so nothing that is computed from such a file would be right.
LEAST_MM = 0.01
MOST_MM = 100.0

LEAST_SIDE = 4  # voxels that an axis keeps: nnU-Net's
THICK = 2.0  # an axis with voxels so many times as long as the shortest is not halved: likewise

LEAST_COARSE_VOXELS = 40**3
"""Of a coarse grid, for a curriculum that no setting asks for. On 32^3 what was learnt at half
resolution was lost at full resolution (records/log.md, "Short runs on real sets"). 48^3
was not tried long enough to leave it out."""


def shape3(sides: Iterable[int]) -> Shape3:
    """Sides X, Y, Z as a shape. Raises ValueError for another number of them."""
    x, y, z = sides
    return x, y, z


def checked_strides(strides: Any, depth: int) -> Strides:
    """The strides of a network of `depth` levels as tuples; () if all of them halve every axis, as
    () itself does. Raises ValueError unless each of the depth - 1 halvings halves some axis."""
    try:
        made = tuple(map(tuple, strides))
        got = strides_text(made)
    except TypeError:  # of something else than sequences of sequences
        made = ((),)
        got = str(strides)
    for each in made:
        if each not in STRIDES:
            rule = "--strides must be 2 or 1 along X, Y and Z, and 2 along one axis at least"
            raise ValueError(f"{rule}, got {got:.60}; write one as 2,2,1")
    if made and len(made) != depth - 1:
        rule = f"--strides must be {depth - 1}, one for each halving of {depth} levels"
        raise ValueError(f"{rule}, got {got:.60}; give as many, or another --depth")
    return () if set(made) == {EVERY_AXIS} else made


def checked_average(average: Any) -> Shape3:
    """The voxels that a network averages, as a tuple. Raises ValueError unless they are 2 or 1."""
    made = tuple(average)
    if made not in (*STRIDES, NO_AXIS):
        rule = "average must be 2 or 1 along X, Y and Z"
        raise ValueError(f"{rule}, got {average!s:.60}; give such a number for each")
    return shape3(made)


def strides_for(spacing_mm: Sequence[float], shape: Sequence[int], depth: int) -> Strides:
    """The strides that bring voxels of `spacing_mm` towards cubes, by nnU-Net's rule (Isensee et
    al. 2021): a level halves each axis that keeps LEAST_SIDE voxels and whose spacing is below
    THICK times the smallest of those. `shape` are the voxels X, Y, Z of the input. nnU-Net ends
    where no axis keeps as many (`depth_for`); each further level halves the axes of the level
    before it, or without one all axes."""
    made = list(itertools.islice(_halvings(spacing_mm, shape), depth - 1))
    further = made[-1] if made else EVERY_AXIS
    return tuple(made) + (further,) * (depth - 1 - len(made))


def depth_for(spacing_mm: Sequence[float], shape: Sequence[int], most: int) -> int:
    """The levels of a network by the same rule: as many as it halves, from 2 to `most`."""
    halvings = sum(1 for _ in itertools.islice(_halvings(spacing_mm, shape), most - 1))
    return max(halvings, 1) + 1


def _halvings(spacing_mm: Sequence[float], shape: Sequence[int]) -> Iterator[Shape3]:
    """The strides of nnU-Net's rule, to where no axis keeps LEAST_SIDE voxels."""
    spacing = list(spacing_mm)
    sides = list(shape)
    while True:
        long = [axis for axis in range(3) if sides[axis] >= 2 * LEAST_SIDE]
        if not long:
            return
        limit = THICK * min(spacing[axis] for axis in long)
        halved = [axis for axis in long if spacing[axis] < limit]
        stride = shape3(2 if axis in halved else 1 for axis in range(3))
        for axis in range(3):
            sides[axis] = -(-sides[axis] // stride[axis])
            spacing[axis] *= stride[axis]
        yield stride


def common_spacing(spacings_mm: Iterable[Sequence[float]]) -> Spacing3:
    """The median of the cases' spacings along each axis."""
    x, y, z = (float(statistics.median(lengths)) for lengths in zip(*spacings_mm))
    return x, y, z


def strides_reason(spacing_mm: Sequence[float], shape: Sequence[int], depth: int) -> str:
    """What strides of `strides_for` follow from, such as "128 x 128 x 64 voxels of 1 x 1 x 2 mm",
    and the rule; and how many levels have too few voxels for it."""
    lengths = " x ".join(f"{length:.4g}" for length in spacing_mm)
    voxels = f"{' x '.join(map(str, shape))} voxels of {lengths} mm"
    rule = f"sides of {2 * LEAST_SIDE} or more, of voxels below {THICK:g} times the shortest"
    reason = f"{voxels}; a level halves {rule}"
    by_rule = sum(1 for _ in itertools.islice(_halvings(spacing_mm, shape), depth - 1))
    further = depth - 1 - by_rule
    if not by_rule:
        return f"{voxels}; every level halves all axes, as no side is {2 * LEAST_SIDE} or more"
    if further:
        few = f"the last {further} of {depth - 1} have too few voxels for that"
        reason += f"; {few}, and halve the axes of the level before"
    return reason


def depth_reason(what: str, shape: Sequence[int], depth: int, most: int) -> str:
    """What a number of levels follows from: the `shape` of `what`, such as "the median case"."""
    voxels = f"{what} has {' x '.join(map(str, shape))} voxels"
    if depth == most:
        return f"{voxels}; {most} levels at most"
    return f"{voxels}; one level more would keep fewer than {LEAST_SIDE} along each axis"


def depth_line(depth: int, reason: str) -> str:
    """The number of levels and what it follows from."""
    return f"depth {depth}: {reason}"


def strides_text(strides: Strides) -> str:
    """As on the command line: "2,2,1 2,2,2"."""
    return " ".join(",".join(map(str, each)) for each in strides)


def strides_line(strides: Strides, reason: str) -> str:
    """The strides and what they follow from."""
    return f"strides {strides_text(strides)}: {reason}"


def divisors_text(divisors: Shape3) -> str:
    """Divisors by axis in words: "16", or "16, 16 and 4 along X, Y and Z"."""
    x, y, z = divisors
    if x == y == z:
        return str(x)
    return f"{x}, {y} and {z} along X, Y and Z"


# --- Grids ---


class CoarseGrid(NamedTuple):
    """The grid of a run's coarse steps."""

    grid: Shape3  # voxels X, Y, Z that the network sees
    is_possible: bool  # whether each axis that it halves keeps two voxels at the deepest level

    @property
    def is_taken(self) -> bool:
        """Whether a run has coarse steps if no setting says so."""
        return self.is_possible and math.prod(self.grid) >= LEAST_COARSE_VOXELS


def coarse_grid(extent: Shape3, stride: Shape3, divisors: Shape3) -> CoarseGrid:
    """The grid of coarse steps, for an extent of a volume: they halve the axes of `stride`, which
    is that of the network's first level."""
    half = shape3(-(-side // step) for side, step in zip(extent, stride))
    grid = shape3(-(-side // divisor) * divisor for side, divisor in zip(half, divisors))
    is_possible = all(
        step == 1 or side >= 2 * divisor for side, step, divisor in zip(grid, stride, divisors)
    )
    return CoarseGrid(grid, is_possible)


def axes_text(stride: Shape3) -> str:
    """The axes that a stride halves in words, such as "X and Y"."""
    axes = [name for name, step in zip("XYZ", stride) if step == 2]
    if len(axes) == 1:
        return axes[0]
    return f"{', '.join(axes[:-1])} and {axes[-1]}"
