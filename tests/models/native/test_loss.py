"""Both operations of the loss in every instruction set of this machine against float64, through
the C functions alone."""

import numpy as np
import pytest

from models.native.shared import IGNORED
from tests.models.native.reference import DTYPES, KERNELS, THREADS, operation, run

SHAPES = [
    # Map with a batch, regions, and how much finer the target is along each axis.
    ((1, 1, 1, 1), 1, (1, 1, 1)),
    ((2, 3, 5, 7), 3, (1, 1, 1)),
    ((1, 40, 30, 32), 3, (1, 1, 1)),  # several blocks of rows
    ((3, 2, 9, 16), 1, (2, 2, 2)),
    ((2, 3, 4, 5), 2, (4, 2, 1)),
    ((1, 2, 3, 50), 5, (1, 1, 2)),
    ((2, 2, 2, 9), 20, (1, 1, 1)),  # more regions than a vector has lanes
    ((1, 2, 3, 700), 17, (1, 1, 1)),  # a row is more than a block
]
ERRORS = {"float32": 1e-6, "bfloat16": 2**-8}  # of a gradient as it is written
SUM_ERROR = 3e-7


class Case:
    """Random logits, a target whose last region is empty and of which a share is ignored, and
    factors; and by float64 what is made of them."""

    def __init__(self, shape, regions, finer, dtype, ignored=0.0, scale=6.0, seed=0):
        rng = np.random.default_rng(seed)
        self.shape, self.finer, self.dtype = shape, finer, dtype
        self.logits = (scale * rng.standard_normal((*shape, regions))).astype(DTYPES[dtype][1])
        sides = [side * times for side, times in zip(shape[1:], finer)]
        share = np.linspace(0.5, 0, regions) if regions > 1 else 0.4
        drawn = rng.random((shape[0], *sides, regions)) < share
        self.target = drawn * rng.integers(1, IGNORED, drawn.shape).astype(np.uint8)  # not 0
        self.factors = rng.standard_normal((shape[0], 3, regions)).astype(np.float32)
        self.target[rng.random(drawn.shape) < ignored] = IGNORED

    def run(self, library, name, threads, kind, in_place=False):
        logits = self.logits.copy()
        made = np.full((self.shape[0], 4, logits.shape[-1]), np.nan, np.float32)
        arrays = {"sums_to": made}
        if kind == "loss_slope":
            made = logits if in_place else np.full_like(logits, np.nan)
            arrays = {"map": made, "coefficients": self.factors}
        about = (kind, self.dtype, self.shape, threads, [logits], logits.shape[-1], [self.target])
        call = operation(*about, **arrays)
        call.finer[:] = self.finer
        assert run(library, name, call) == 0
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


@pytest.fixture
def kernels(request, library):
    """The library, and the name and dtype of kernels that run here."""
    name, dtype = request.param
    if not library.native_kernels(name.encode(), DTYPES[dtype][0]):
        pytest.skip(f"needs a CPU with {name}")
    return library, name, dtype


in_every_set = pytest.mark.parametrize("kernels", KERNELS, indirect=True, ids="-".join)


@in_every_set
@pytest.mark.parametrize("ignored", [0, 0.3])
@pytest.mark.parametrize(("shape", "regions", "finer"), SHAPES)
def test_sums_and_gradient_are_those_of_float64_with_the_same_bits_on_any_number_of_threads(
    kernels, shape, regions, finer, ignored
):
    library, name, dtype = kernels
    case = Case(shape, regions, finer, dtype, ignored)
    sums, slope = case.expected()
    on_one = {kind: case.run(library, name, 1, kind) for kind in ("loss_sums", "loss_slope")}
    np.testing.assert_allclose(on_one["loss_sums"], sums, rtol=SUM_ERROR, atol=1e-30)
    error = np.abs(on_one["loss_slope"].astype(np.float64) - slope)
    assert (error <= ERRORS[dtype] * np.abs(slope) + 1e-6 * np.abs(case.factors).max()).all()
    for threads in THREADS:
        for kind, made in on_one.items():
            again = case.run(library, name, threads, kind, in_place=threads > 1)
            assert again.tobytes() == made.tobytes(), (kind, threads)


@in_every_set
@pytest.mark.parametrize("value", [3, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 40])
def test_an_ignored_voxel_is_in_no_sum_and_has_no_gradient_whatever_its_logit(
    kernels, value, place
):
    """In a whole vector, and in the rest of a row."""
    library, name, dtype = kernels
    case = Case((1, 2, 2, 14), 3, (1, 1, 1), dtype)
    case.target.reshape(-1)[place] = IGNORED
    sums = case.run(library, name, 1, "loss_sums")
    case.logits.reshape(-1)[place] = value
    assert case.run(library, name, 1, "loss_sums").tobytes() == sums.tobytes()
    slope = case.run(library, name, 1, "loss_slope").astype(np.float32)
    assert np.flatnonzero(slope == 0).tolist() == [place]
    assert np.isfinite(slope).all()


@in_every_set
def test_a_certain_voxel_keeps_its_small_error(kernels):
    """Near 0 and 1 the loss is a difference of large numbers by its formula."""
    library, name, dtype = kernels
    case = Case((1, 1, 1, 6), 1, (1, 1, 1), dtype)
    case.logits[...] = np.reshape([12, -12, 40, -40, 80, -80], case.logits.shape)
    case.target[...] = np.reshape([1, 0, 1, 0, 1, 0], case.target.shape)
    case.factors[...] = np.reshape([1, 0, 0], (1, 3, 1))
    slope = case.run(library, name, 1, "loss_slope").astype(np.float64)
    np.testing.assert_allclose(slope, case.expected()[1], rtol=ERRORS[dtype])
    cross_entropy = case.run(library, name, 1, "loss_sums")[0, 0, 0]
    assert cross_entropy == pytest.approx(2 * np.exp(-12), rel=1e-5)


@in_every_set
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 40])
def test_a_logit_that_is_not_finite_makes_the_sum_of_its_region_not_finite(kernels, value, place):
    """In a whole vector, and in the rest of a row."""
    library, name, dtype = kernels
    case = Case((1, 2, 2, 14), 3, (1, 1, 1), dtype)
    case.logits.reshape(-1)[place] = value
    sums = case.run(library, name, 1, "loss_sums")
    finite = np.isfinite(sums[0, 0])
    assert not finite[place % 3]
    assert finite.sum() == 2
    if np.isnan(value):
        slope = case.run(library, name, 1, "loss_slope")
        assert np.flatnonzero(~np.isfinite(slope.astype(np.float32))).tolist() == [place]
