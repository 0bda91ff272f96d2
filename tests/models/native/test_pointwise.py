"""Every pass in every instruction set of this machine against float64, through the C functions
alone."""

import itertools

import numpy as np
import pytest

from models.strides import EVERY_AXIS, STRIDES
from tests.models.native.reference import (
    DTYPES,
    KERNELS,
    KINDS,
    LOSSES,
    THREADS,
    operation,
    run,
)

SUMS = (
    "max_pool_gradient",
    "residual_gradient",
    "project_gradient",
    "project_sums",
    "up_input_gradient",
)
OVER = {
    "residual_sum": 1,
    "residual_gradient": 2,
    "max_pool_gradient": 2,
    "to_raw": 0,
    "project": 1,
}
OVER.update(project_gradient=2, project_to_raw=0)
"""Which of the raw map and the others a kind may be written over."""

SHAPES = (
    (1, 1, 1, 1),
    (2, 3, 5, 9),
    (1, 4, 2, 17),
    (3, 1, 3, 8),
)  # with a batch, of the coarser grid
CHANNELS = ((1, 3), (3, 1), (5, 20), (16, 3), (20, 5), (33, 16), (32, 16), (16, 48))
ERRORS = {"float32": 2e-6, "bfloat16": 2**-8}  # of a map; all else is summed of what is written
SUM_ERROR = 2e-6
TILES = ("amx", "amx_in_c", "amx_in_c_avx512")  # multiply formed values as bfloat16


class Case:
    """A pass on random maps, and what it makes by the definition of its kind."""

    def __init__(self, rng, kind, shape, channels, dtype, strides, plain=False, add=True):
        batch, *grid = shape
        self.kind, self.shape, self.channels, self.dtype = kind, shape, channels, dtype
        self.strides = strides
        self.fine = fine = [times * n for times, n in zip(strides, grid)]
        ups, pools = kind.startswith("up"), kind.startswith("max_pool")
        wide = channels[1] if ups or kind.startswith("project") else channels[0]

        def drawn(size, width):
            return rng.standard_normal((batch, *size, width)).astype(DTYPES[dtype][1])

        self.raw = drawn(fine if pools else grid, channels[0])
        more = [drawn(fine if ups else grid, wide), drawn(fine if pools else grid, channels[0])]
        if kind == "residual_gradient":
            more[0][rng.random(more[0].shape) < 0.5] = 0
        counts = {"max_pool": 0, "up_convolve": 0, "max_pool_gradient": 2, "residual_gradient": 2}
        counts.update(project=int(add), project_gradient=1 + add)
        self.others = more[: counts.get(kind, 1)]
        self.coefficients = rng.standard_normal((batch, 6, channels[0])).astype(np.float32)
        self.coefficients[:, 2] = rng.choice([0, 0.5, -np.inf], (batch, channels[0]))
        if plain and not kind.endswith("to_raw"):
            self.coefficients = None
        filters = (*strides, wide, channels[0]) if ups else (channels[0], wide)
        self.filters, self.bias = (
            rng.standard_normal(shape).astype(np.float32) for shape in (filters, wide)
        )

    def run(self, library, name, threads, in_place=False):
        """Map, sums, gradients of filters and bias; None where the kind does not make them."""
        kind, batch = self.kind, self.shape[0]
        maps = [np.array(array) for array in (self.raw, *self.others)]
        results, width = [None] * 4, self.bias.size
        if kind not in ("project_sums", "up_filter_gradient"):
            shape = [
                batch,
                *(self.fine if kind == "up_convolve" else self.raw.shape[1:4]),
            ]
            shape = self.shape if kind == "max_pool" else shape
            channels = width if kind in ("project", "up_convolve") else self.channels[0]
            results[0] = (
                maps[OVER[kind]] if in_place else np.full((*shape, channels), 7, self.raw.dtype)
            )
        if kind in SUMS:
            results[1] = np.full((batch, 2, self.channels[0]), np.nan, np.float32)
        if kind in ("project_gradient", "project_sums", "up_filter_gradient"):
            results[2] = np.full_like(self.filters, np.nan)
            results[3] = (
                np.full(width, np.nan, np.float32) if kind != "up_filter_gradient" else None
            )
        made = dict(zip(("map", "sums_to", "filter_gradient", "bias_gradient"), results))
        arguments = {"coefficients": self.coefficients, "filters": self.filters, **made}
        if kind == "project":
            arguments["bias"] = self.bias
        about = (kind, self.dtype, self.shape, threads, maps[:1], width, maps[1:])
        call = operation(*about, self.strides, **arguments)
        assert run(library, name, call) == 0
        return results

    def expected(self, written):
        """The same in float64; sums are of the map that was `written`, if there is one."""
        kind, raw = self.kind, self.raw.astype(np.float64)
        first, second = [array.astype(np.float64) for array in self.others] + [0.0] * (
            2 - len(self.others)
        )
        scale, shift, floor, *rest = (1.0, 0.0, -np.inf, 0.0, 1.0)
        if self.coefficients is not None:
            rows = np.moveaxis(self.coefficients.astype(np.float64), 1, 0)[
                :, :, None, None, None, :
            ]
            scale, shift, floor, *rest = rows
        value, active = np.maximum(scale * raw + shift, floor), scale * raw + shift > floor
        filters, made, of_filters, of_bias = self.filters.astype(np.float64), None, None, None
        taps = filters.reshape(-1, *filters.shape[3:])
        if kind == "max_pool":
            made = parts_of(value, self.strides).max(0)
        elif kind == "max_pool_gradient":
            parts = parts_of(value, self.strides)
            places = np.arange(len(parts))[:, None, None, None, None, None]
            made = whole((places == parts.argmax(0)) * first, self.strides) + second
        elif kind == "residual_sum":
            made = np.maximum(value + first, 0)
        elif kind == "residual_gradient":
            made = np.where(first > 0, second, 0)
        elif kind == "to_raw":
            made = rest[0] * np.where(active, first, 0) + rest[1] * raw + rest[2]
        elif kind == "project":
            made = value @ filters + self.bias.astype(np.float64) + first
        elif kind.startswith("project"):
            made = first @ filters.T + second
            of_filters, of_bias = (
                np.einsum("nxyzi,nxyzo->io", value, first),
                first.sum((0, 1, 2, 3)),
            )
            if kind == "project_to_raw":
                made = rest[0] * np.where(active, made, 0) + rest[1] * raw + rest[2]
        elif kind == "up_convolve":
            made = whole(np.stack([value @ tap.T for tap in taps]), self.strides)
        elif kind == "up_input_gradient":
            made = sum(part @ tap for part, tap in zip(parts_of(first, self.strides), taps))
        else:
            parts = parts_of(first, self.strides)
            of_filters = np.einsum("tnxyzo,nxyzi->toi", parts, value).reshape(filters.shape)
        if kind not in SUMS:
            return made, None, of_filters, of_bias
        gradient = np.where(active, made if written is None else written.astype(np.float64), 0)
        sums = np.stack([gradient, gradient * (raw - rest[0]) * rest[1]], 1).sum((2, 3, 4))
        return made, sums, of_filters, of_bias


def parts_of(fine, strides):
    """(voxels, batch, x, y, z, channels): those under each of the coarser grid, the last axis
    first."""
    batch, *sides, channels = fine.shape
    x, y, z = (side // times for side, times in zip(sides, strides))
    i, j, k = strides
    split = fine.reshape(batch, x, i, y, j, z, k, channels)
    return split.transpose(2, 4, 6, 0, 1, 3, 5, 7).reshape(-1, batch, x, y, z, channels)


def whole(parts, strides):
    """`parts_of` undone."""
    _, batch, x, y, z, channels = parts.shape
    i, j, k = strides
    split = parts.reshape(i, j, k, batch, x, y, z, channels).transpose(3, 4, 0, 5, 1, 6, 2, 7)
    return split.reshape(batch, i * x, j * y, k * z, channels)


OTHERS = ("convolve", "input_gradient", "filter_gradient", *LOSSES, "orthogonal")
PASSES = [kind for kind in KINDS if kind not in OTHERS]
BETWEEN_GRIDS = [kind for kind in PASSES if kind.startswith(("up_", "max_pool"))]


@pytest.mark.parametrize(("name", "dtype"), KERNELS)
@pytest.mark.parametrize(
    ("kind", "every_strides"),
    [
        *((kind, [EVERY_AXIS]) for kind in PASSES),
        *((kind, STRIDES) for kind in BETWEEN_GRIDS),
    ],
)
def test_a_pass_makes_what_its_definition_says(library, kind, every_strides, name, dtype):
    if not library.native_kernels(name.encode(), DTYPES[dtype][0]):
        pytest.skip(f"needs a CPU with {name}")
    rng, threads = np.random.default_rng(0), itertools.cycle(THREADS)
    for shape, channels, (plain, add), strides in zip(
        itertools.cycle(SHAPES),
        [row for row in CHANNELS for _ in SHAPES],
        itertools.cycle([(0, 1), (0, 0), (1, 1)]),
        itertools.cycle(every_strides),
    ):
        case = Case(rng, kind, shape, channels, dtype, strides, plain, add)
        count = next(threads)
        results = case.run(library, name, count)
        made, *rest = case.expected(results[0] if kind != "project_sums" else None)
        is_rounded = kind == "up_filter_gradient" and name in TILES and not plain
        of_filters = ERRORS[dtype] if is_rounded else SUM_ERROR
        bounds = (ERRORS[dtype], SUM_ERROR, of_filters, SUM_ERROR)
        for part, result, expected, bound in zip(
            ("map", "sums", "filters", "bias"), results, (made, *rest), bounds
        ):
            if result is not None:
                error = np.linalg.norm(result.astype(np.float64) - expected) / (
                    np.linalg.norm(expected) + 1e-30
                )
                assert error < bound, (part, shape, channels, strides, count, plain, add)
        again = case.run(
            library, name, count, in_place=kind in OVER and len(case.others) >= OVER[kind]
        )
        for result, other in zip(results, again):  # the same bits, also over an input
            assert result is None or result.tobytes() == other.tobytes()
