"""Every pass in every instruction set of this machine against float64, through the C functions
alone."""

import itertools

import numpy as np
import pytest

from models.strides import EVERY_AXIS, STRIDES
from tests.models.native.reference import (
    THREADS,
    coefficients_of,
    first_of_largest,
    formed,
    norm_sums,
    parts_of,
    whole,
)

SHAPES = ((1, 1, 1, 1), (2, 3, 5, 9), (1, 4, 2, 17), (3, 1, 3, 8))
"""With a batch, of the coarser grid."""

CHANNELS = ((1, 3), (3, 1), (5, 20), (16, 3), (20, 5), (33, 16), (32, 16), (16, 48))
ERRORS = {"float32": 2e-6, "bfloat16": 2**-8}  # of a map; all else is summed of what is written
SUM_ERROR = 2e-6
TILES = ("amx", "amx_in_c", "amx_in_c_avx512")

MAP = ("map",)
WITH_SUMS = ("map", "sums_to")
OF_WEIGHTS = ("filter_gradient", "bias_gradient")
PASSES = {
    "max_pool": (0, None, MAP),
    "max_pool_gradient": (2, 2, WITH_SUMS),
    "residual_sum": (1, 1, MAP),
    "residual_gradient": (2, 2, WITH_SUMS),
    "to_raw": (1, 0, MAP),
    "project": (1, 1, MAP),
    "project_gradient": (2, 2, (*WITH_SUMS, *OF_WEIGHTS)),
    "project_sums": (1, None, ("sums_to", *OF_WEIGHTS)),
    "project_to_raw": (1, 0, MAP),
    "up_convolve": (0, None, MAP),
    "up_input_gradient": (1, None, WITH_SUMS),
    "up_filter_gradient": (1, None, OF_WEIGHTS[:1]),
}
"""Kind -> other maps, which of the raw map and the others it may be written over, what it makes."""


class Case:
    """A pass on random maps, and what it makes by the definition of its kind."""

    def __init__(self, rng, kind, shape, channels, kernel, strides):
        batch, *grid = shape
        narrow, wide = channels
        fine = [times * n for times, n in zip(strides, grid)]
        is_up = kind.startswith("up")
        if not is_up and not kind.startswith("project"):
            wide = narrow
        read = fine if kind.startswith("max_pool") else grid

        self.kind, self.shape, self.strides = kind, shape, strides
        self.raw, second = kernel.maps(rng, (batch, *read), narrow, narrow)
        others = [*kernel.maps(rng, (batch, *(fine if is_up else grid)), wide), second]
        if kind == "residual_gradient":
            others[0][rng.random(others[0].shape) < 0.5] = 0
        if kind in ("max_pool", "residual_sum"):  # no ReLU hides a NaN, nor a larger value
            self.raw[rng.random(self.raw.shape) < 0.1] = np.nan
        count, self.over, self.makes = PASSES[kind]
        if kind in ("project", "project_gradient"):  # with what is added, or without
            count -= rng.integers(2)
        self.others = others[:count]
        self.coefficients = None
        if kind.endswith("to_raw") or rng.integers(2):
            self.coefficients = coefficients_of(rng, shape, narrow)
        filters = (*strides, wide, narrow) if is_up else (narrow, wide)
        self.filters = rng.standard_normal(filters).astype(np.float32)
        self.bias = rng.standard_normal(wide).astype(np.float32)
        grids = {"max_pool": grid, "up_convolve": fine}
        width = wide if kind in ("project", "up_convolve") else narrow
        self.shapes = {
            "map": (batch, *grids.get(kind, read), width),
            "sums_to": (batch, 2, narrow),
            "filter_gradient": filters,
            "bias_gradient": (wide,),
        }

    def run(self, kernel, threads, in_place=False):
        """What it makes, by its name."""
        maps = [np.array(array) for array in (self.raw, *self.others)]
        made = {each: np.full(self.shapes[each], np.nan, np.float32) for each in self.makes}
        if "map" in made:
            made["map"] = maps[self.over] if in_place else made["map"].astype(self.raw.dtype)
        arrays = {"coefficients": self.coefficients, "filters": self.filters, **made}
        if self.kind == "project":
            arrays["bias"] = self.bias
        about = (self.kind, self.shape, threads, maps[:1], self.bias.size, maps[1:], self.strides)
        kernel.run(*about, **arrays)
        return made

    def expected(self, written):
        """The same in float64; sums are of the map that was `written`, if there is one."""
        kind = self.kind
        others = [array.astype(np.float64) for array in self.others]
        first, second = (*others, 0.0, 0.0)[:2]
        value = formed([self.raw], self.coefficients)
        filters = self.filters.astype(np.float64)
        taps = filters.reshape(-1, *filters.shape[3:])
        made = {}
        if kind == "max_pool":
            made["map"] = parts_of(value, self.strides).max(0)
        elif kind == "max_pool_gradient":
            made["map"] = first_of_largest(value, first, self.strides) + second
        elif kind == "residual_sum":
            made["map"] = np.maximum(value + first, 0)
        elif kind == "residual_gradient":
            made["map"] = np.where(first > 0, second, 0)
        elif kind == "to_raw":
            made["map"] = formed([first], self.coefficients, self.raw)
        elif kind == "project":
            made["map"] = value @ filters + self.bias.astype(np.float64) + first
        elif kind.startswith("project"):
            made["map"] = first @ filters.T + second
            made["filter_gradient"] = np.einsum("nxyzi,nxyzo->io", value, first)
            made["bias_gradient"] = first.sum((0, 1, 2, 3))
            if kind == "project_to_raw":
                made["map"] = formed([made["map"]], self.coefficients, self.raw)
        elif kind == "up_convolve":
            made["map"] = whole(np.stack([value @ tap.T for tap in taps]), self.strides)
        elif kind == "up_input_gradient":
            parts = parts_of(first, self.strides)
            made["map"] = sum(part @ tap for part, tap in zip(parts, taps))
        else:
            gradient = np.einsum("tnxyzo,nxyzi->toi", parts_of(first, self.strides), value)
            made["filter_gradient"] = gradient.reshape(filters.shape)
        if "sums_to" in self.makes:
            coefficients = self.coefficients
            if coefficients is None:  # its sums are of the gradient, and of that times the map
                coefficients = np.zeros((len(self.raw), 6, self.raw.shape[-1]))
                coefficients[:] = np.array([1, 0, -np.inf, 0, 1, 0])[:, None]
            made["sums_to"] = norm_sums(written.get("map", made["map"]), self.raw, coefficients)
        return made


EVERY_PASS = [(kind, [EVERY_AXIS]) for kind in PASSES]
EVERY_PASS += [(kind, STRIDES) for kind in PASSES if kind.startswith(("up_", "max_pool"))]


@pytest.mark.parametrize(("kind", "every_strides"), EVERY_PASS)
def test_a_pass_makes_what_its_definition_says(kernel, kind, every_strides):
    rng = np.random.default_rng(0)
    for (channels, shape), threads, strides in zip(
        itertools.product(CHANNELS, SHAPES),
        itertools.cycle(THREADS),
        itertools.cycle(every_strides),
    ):
        case = Case(rng, kind, shape, channels, kernel, strides)
        made = case.run(kernel, threads)
        bounds = {"map": ERRORS[kernel.dtype]}
        if kernel.name in TILES:  # multiply formed values and filters as bfloat16
            bounds["map"] *= 1.5
            if kind == "up_filter_gradient" and case.coefficients is not None:
                bounds["filter_gradient"] = ERRORS[kernel.dtype]
        expected = case.expected(made)
        for part, result in made.items():
            is_number = ~np.isnan(expected[part])
            np.testing.assert_array_equal(~np.isnan(result), is_number)
            known = expected[part][is_number]
            error = np.linalg.norm(result[is_number].astype(np.float64) - known)
            limit = bounds.get(part, SUM_ERROR) * (np.linalg.norm(known) + 1e-30)
            assert error <= limit, (part, shape, channels, strides, threads)
        in_place = case.over is not None and len(case.others) >= case.over
        again = case.run(kernel, threads, in_place)
        for part, result in made.items():  # the same bits, also over an input
            assert result.tobytes() == again[part].tobytes(), part
