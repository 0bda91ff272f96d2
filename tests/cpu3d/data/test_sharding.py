"""Every sample is one worker's, and the order of all of them is the batch's alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpu3d.data.sampling import Share
from cpu3d.errors import InputError

WORKERS = st.integers(1, 6)


def shares(workers, batch):
    return [Share(rank, workers, batch) for rank in range(workers)]


def test_two_workers_take_half_of_every_step_by_hand():
    first, second = shares(2, 6)
    assert first.positions(0, 12) == (0, 1, 2, 6, 7, 8)
    assert second.positions(0, 12) == (3, 4, 5, 9, 10, 11)
    assert second.positions(6, 12) == (9, 10, 11)
    assert second.indices(6, 12) == range(3, 6)
    assert second.part == 3


def test_without_steps_samples_are_dealt_one_at_a_time_and_none_is_left_out():
    dealt = [Share(rank, 3, 6).singly().positions(0, 8) for rank in range(3)]
    assert dealt == [(0, 3, 6), (1, 4, 7), (2, 5)]
    assert Share(2, 3).positions(0, 2) == ()


@given(WORKERS, st.integers(1, 5), st.integers(0, 7), st.integers(0, 4))
def test_the_shares_of_a_step_in_the_order_of_the_ranks_are_the_step(workers, part, first, steps):
    batch = workers * part
    for step in range(first, first + steps):
        dealt = [share.positions(step * batch, (step + 1) * batch) for share in shares(workers, batch)]
        assert [len(one) for one in dealt] == [part] * workers
        assert [position for one in dealt for position in one] == list(range(step * batch, (step + 1) * batch))


@given(WORKERS, st.integers(0, 4), st.integers(0, 60), st.integers(0, 60))
def test_any_span_is_dealt_once_to_each_in_its_own_order(workers, part, start, length):
    dealt = [share.positions(start, start + length) for share in shares(workers, workers * part)]
    assert sorted(position for one in dealt for position in one) == list(range(start, start + length))
    assert all(list(one) == sorted(one) for one in dealt)


@given(WORKERS, st.integers(0, 4), st.integers(0, 100))
def test_every_position_is_the_sample_that_its_index_says(workers, part, index):
    for share in shares(workers, workers * part):
        position = share.position(index)
        assert share.indices(position, position + 1) == range(index, index + 1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank": -1}, "rank must be an integer of at least 0, got -1"),
        ({"workers": 0}, "workers must be an integer of at least 1, got 0"),
        ({"batch": 1.5}, "batch must be an integer of at least 0, got 1.5"),
        ({"rank": 2, "workers": 2}, "rank must be below the 2 workers, got 2"),
        ({"workers": 3, "batch": 4}, "batch must be a multiple of the 3 workers, got 4; give 6, or another"),
        ({"workers": 3, "batch": 2}, "batch must be a multiple of the 3 workers, got 2; give 3, or another"),
    ],
)
def test_what_is_no_share_is_refused_by_name(wrong, message):
    with pytest.raises(InputError, match=message):
        Share(**wrong)


def test_a_stream_of_parts_of_steps_is_refused():
    share = Share(1, 2, 8)
    assert share.problems(start=8, stop=16, batch=2) == []
    assert share.problems(start=8, stop=None, batch=4) == []
    found = share.problems(start=3, stop=12, batch=3)
    assert found[0] == "start must be a multiple of the 8 samples of a step, got 3; give 0, where the step begins"
    assert found[1].startswith("stop must be a multiple of the 8 samples of a step, got 12; give 8,")
    assert found[2].startswith("batch must divide a worker's 4 samples of a step, got 3;")
    assert share.singly().problems(start=3, stop=12, batch=1) == []
