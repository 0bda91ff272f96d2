import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cpu3d.data.files.byte_runs import GAP_BYTES, byte_runs


@st.composite
def boxes(draw):
    """(shape, slices) of an array of 3 or 4 axes."""
    shape = draw(st.lists(st.integers(1, 40), min_size=3, max_size=4))
    starts = [draw(st.integers(0, n - 1)) for n in shape]
    return shape, [slice(a, draw(st.integers(a + 1, n))) for a, n in zip(starts, shape)]


@given(boxes(), st.sampled_from([1, 2, 256]))
def test_the_runs_hold_every_byte_of_the_box_and_no_gap_that_is_worth_a_read_of_its_own(box, itemsize):
    shape, slices = box
    runs = byte_runs(shape, itemsize, slices, 128)
    items = np.arange(np.prod(shape)).reshape(shape)[tuple(slices)].reshape(-1)
    held = np.zeros(np.prod(shape) + 1, bool)
    for start, length in runs:
        assert (start - 128) % itemsize == 0
        assert length % itemsize == 0
        held[(start - 128) // itemsize : (start - 128 + length) // itemsize] = True
    assert held[items].all()
    # Whatever is held and not of the box is a gap between two of its items that is shorter than the limit.
    for before, after in zip(items, items[1:]):
        gap = (after - before - 1) * itemsize
        assert held[before + 1 : after].all() if gap < GAP_BYTES else not held[before + 1 : after].any()
    assert runs[0][0] == 128 + items[0] * itemsize
    assert sum(runs[-1]) == 128 + (items[-1] + 1) * itemsize
    assert all(sum(run) < following[0] for run, following in zip(runs, runs[1:]))


def test_a_whole_array_is_one_run():
    assert byte_runs((5, 4, 3, 2), 2, [slice(0, n) for n in (5, 4, 3, 2)], 128) == [(128, 240)]


def test_a_patch_of_a_ct_is_a_run_for_each_plane():
    # 512x512x300 int16: rows of 192 bytes 408 apart are one, planes of 57,600 bytes 249,600 apart are not.
    runs = byte_runs((512, 512, 300), 2, (slice(10, 106), slice(20, 116), slice(30, 126)), 128)
    assert len(runs) == 96
    assert runs[1] == (128 + 2 * (11 * 512 * 300 + 20 * 300 + 30), 95 * 600 + 192)


def test_parts_are_read_apart_from_a_gap_of_16_kib_on():
    first = (slice(0, 2), slice(0, 1), slice(0, 1))
    assert byte_runs((2, 1, GAP_BYTES), 1, first, 0) == [(0, GAP_BYTES + 1)]
    assert byte_runs((2, 1, GAP_BYTES + 1), 1, first, 0) == [(0, 1), (GAP_BYTES + 1, 1)]
