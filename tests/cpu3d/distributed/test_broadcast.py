"""What the chief knows reaches all workers to the bit."""

from types import SimpleNamespace

import numpy as np
import pytest

from cpu3d.distributed.broadcast import array_from_chief, text_from_chief
from cpu3d.distributed.strategy import ALONE
from tests.cpu3d.distributed.threads import together

ARRAYS = {
    "odd values": np.array([-0.0, np.nan, np.inf, 1e-45, 3.4e38, -1.5], np.float32),
    "a large count": np.array(2**53 + 1, np.int64),
    "an odd number of bytes": np.arange(255, dtype=np.uint8).reshape(5, 51),
    "nothing": np.zeros((0, 3), np.float32),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_an_array_is_the_chief_s_to_the_bit_whatever_the_others_hold(array):
    for found in together(
        3, lambda exchange: array_from_chief(exchange, array if exchange.is_chief else np.zeros_like(array))
    ):
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_a_large_array_travels_in_small_pieces():
    array, sent = np.arange(5 * 2**20, dtype=np.float32), []

    def travels(vector):
        sent.append(vector.nbytes)
        return vector

    chief = SimpleNamespace(count=2, rank=0, sum=travels)
    np.testing.assert_array_equal(array_from_chief(chief, array), array)
    assert max(sent) <= 16 * 2**20


@pytest.mark.parametrize("text", ["", '{"name": "Müller"}', "x" * 100001])
def test_a_text_is_the_chief_s_whatever_its_length(text):
    assert together(2, lambda exchange: text_from_chief(exchange, text if exchange.rank == 0 else "")) == [text] * 2


def test_alone_nothing_is_sent():
    array = np.arange(3)
    assert array_from_chief(ALONE, array) is array
    assert text_from_chief(ALONE, "so") == "so"
