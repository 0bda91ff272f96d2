"""The orthogonal matrix nearest to a kernel, in every instruction set of this machine against
float64."""

import numpy as np
import pytest

from tests.models.native.reference import THREADS, orthogonal

SIZES = [(1, 1), (5, 3), (1, 4), (9, 40), (108, 16), (432, 17), (520, 96), (128, 128)]
"""Rows and columns: fewer rows than a block, wide ones, several blocks of rows and of columns."""


@pytest.fixture
def made_orthogonal(kernel):
    """matrix, threads, whether over the matrix -> what the C function makes of it."""
    if kernel.dtype != "float32":
        pytest.skip("is of float32")

    def run(matrix, threads=1, in_place=False):
        given = matrix.copy()
        made = given if in_place else np.full_like(given, np.nan)
        shape = (1, len(matrix), 1, 1)
        kernel.run("orthogonal", shape, threads, [given], matrix.shape[1], map=made)
        return made

    return run


def noise(size):
    return np.random.default_rng(0).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
def test_it_is_that_of_float64_with_the_same_bits_on_any_number_of_threads(made_orthogonal, size):
    matrix = noise(size)
    made = made_orthogonal(matrix)
    truth = orthogonal(matrix)
    assert np.linalg.norm(made - truth) <= 1e-4 * np.linalg.norm(truth)
    for threads in THREADS[1:]:
        assert made_orthogonal(matrix, threads, in_place=True).tobytes() == made.tobytes(), threads


@pytest.mark.parametrize("size", [1e-10, 1.0, 1e15])
def test_a_gradient_of_any_size_makes_the_same(made_orthogonal, size):
    matrix = noise((54, 32))
    made = made_orthogonal((matrix * size).astype(np.float32))
    np.testing.assert_allclose(made, made_orthogonal(matrix), atol=1e-4)


def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden(made_orthogonal):
    assert not made_orthogonal(np.zeros((20, 8), np.float32)).any()
    for value in (np.nan, np.inf):
        matrix = noise((20, 8))
        matrix[3, 2] = value
        assert np.isnan(made_orthogonal(matrix)).any()
