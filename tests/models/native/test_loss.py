"""Both operations of the loss in every instruction set of this machine against float64, through
the C functions alone."""

import numpy as np
import pytest

from models.native.shared import IGNORED
from tests.models.native.reference import THREADS

ERRORS = {"float32": 1e-6, "bfloat16": 2**-8}  # of a gradient as it is written
SUM_ERROR = 3e-7


class Case:
    """Random logits, a target whose last region is empty and of which a share is ignored, and
    factors; and by float64 what is made of them."""

    def __init__(self, shape, regions, finer, dtype, ignored=0.0):
        rng = np.random.default_rng(0)
        self.shape, self.finer = shape, finer
        self.logits = (6 * rng.standard_normal((*shape, regions))).astype(dtype)
        sides = [side * times for side, times in zip(shape[1:], finer)]
        drawn = rng.random((shape[0], *sides, regions)) < np.linspace(0.5, 0, regions)
        self.target = drawn * rng.integers(1, IGNORED, drawn.shape).astype(np.uint8)  # not 0
        self.factors = rng.standard_normal((shape[0], 3, regions)).astype(np.float32)
        self.target[rng.random(drawn.shape) < ignored] = IGNORED

    def run(self, kernel, threads, kind, in_place=False):
        logits = self.logits.copy()
        made = np.full((self.shape[0], 4, logits.shape[-1]), np.nan, np.float32)
        arrays = {"sums_to": made}
        if kind == "loss_slope":
            made = logits if in_place else np.full_like(logits, np.nan)
            arrays = {"map": made, "coefficients": self.factors}
        about = (kind, self.shape, threads, [logits], logits.shape[-1], [self.target], self.finer)
        kernel.run(*about, **arrays)
        return made

    def expected(self):
        """Sums, and the gradient."""
        z = self.logits.astype(np.float64)
        x, y, z_step = self.finer
        thinned = self.target[:, ::x, ::y, ::z_step]
        counts = thinned != IGNORED
        t = counts & (thinned != 0)
        p, rest = 1 / (1 + np.exp(-z)), 1 / (1 + np.exp(z))
        cross_entropy = np.logaddexp(0, np.where(t, -z, z))
        terms = (cross_entropy, p * t, p, 1.0 * t)
        sums = np.stack([(counts * each).sum((1, 2, 3)) for each in terms], 1)
        rows = self.factors.astype(np.float64)[:, :, None, None, None]
        slope = rows[:, 0] * np.where(t, -rest, p) + p * rest * (rows[:, 1] * t + rows[:, 2])
        return sums, counts * slope


@pytest.mark.parametrize("ignored", [0, 0.3])
@pytest.mark.parametrize(
    ("shape", "regions", "finer"),
    [
        # Map with a batch, regions, and how much finer the target is along each axis.
        ((1, 1, 1, 1), 1, (1, 1, 1)),
        ((1, 40, 30, 32), 3, (1, 1, 1)),  # several blocks of rows
        ((2, 3, 4, 5), 2, (4, 2, 1)),
        ((1, 2, 3, 50), 5, (1, 1, 2)),
        ((2, 2, 2, 9), 20, (1, 1, 1)),  # more regions than a vector has lanes
        ((1, 2, 3, 700), 17, (1, 1, 1)),  # a row is more than a block
    ],
)
def test_sums_and_gradient_are_those_of_float64_with_the_same_bits_on_any_number_of_threads(
    kernel, shape, regions, finer, ignored
):
    case = Case(shape, regions, finer, kernel.numpy, ignored)
    sums, slope = case.expected()
    on_one = {kind: case.run(kernel, 1, kind) for kind in ("loss_sums", "loss_slope")}
    np.testing.assert_allclose(on_one["loss_sums"], sums, rtol=SUM_ERROR, atol=1e-30)
    error = np.abs(on_one["loss_slope"].astype(np.float64) - slope)
    assert (error <= ERRORS[kernel.dtype] * np.abs(slope) + 1e-6 * np.abs(case.factors).max()).all()
    for threads in THREADS:
        for kind, made in on_one.items():
            again = case.run(kernel, threads, kind, in_place=threads > 1)
            assert again.tobytes() == made.tobytes(), (kind, threads)


@pytest.mark.parametrize("value", [3, np.nan, -np.inf])
@pytest.mark.parametrize("voxel", [0, 40])
def test_a_logit_that_is_not_finite_counts_unless_its_voxel_is_ignored(kernel, value, voxel):
    """In a whole vector, and in the rest of a row."""
    case = Case((1, 2, 2, 14), 3, (1, 1, 1), kernel.numpy)
    first = case.logits.copy()
    case.logits.reshape(-1)[voxel] = value
    finite = np.isfinite(case.run(kernel, 1, "loss_sums")[0, 0])
    assert np.delete(finite, voxel % 3).all()
    assert finite[voxel % 3] == np.isfinite(value)
    if np.isnan(value):
        slope = case.run(kernel, 1, "loss_slope")
        assert np.flatnonzero(~np.isfinite(slope.astype(np.float32))).tolist() == [voxel]

    case.target.reshape(-1)[voxel] = IGNORED
    made = [case.run(kernel, 1, kind).tobytes() for kind in ("loss_sums", "loss_slope")]
    case.logits = first
    expected = [case.run(kernel, 1, kind).tobytes() for kind in ("loss_sums", "loss_slope")]
    assert made == expected


def test_a_certain_voxel_keeps_its_small_error(kernel):
    """Near 0 and 1 the loss is a difference of large numbers by its formula."""
    case = Case((1, 1, 1, 6), 1, (1, 1, 1), kernel.numpy)
    case.logits.flat = [12, -12, 40, -40, 80, -80]
    case.target.flat = [1, 0, 1, 0, 1, 0]
    case.factors.flat = [1, 0, 0]
    slope = case.run(kernel, 1, "loss_slope").astype(np.float64)
    np.testing.assert_allclose(slope, case.expected()[1], rtol=ERRORS[kernel.dtype])
    cross_entropy = case.run(kernel, 1, "loss_sums")[0, 0, 0]
    assert cross_entropy == pytest.approx(2 * np.exp(-12), rel=1e-5)
