import pytest

from cpu3d.compare.study.learning_rates import Trial, candidates, is_at_an_end, rate_beyond, rounded, start_rate, winner
from cpu3d.errors import InputError


def trials(**dice):
    """trials(r2=0.5): rate 2 had Dice 0.5."""
    return [Trial(float(name[1:]), value) for name, value in dice.items()]


@pytest.mark.parametrize(
    ("optimizer", "batch", "base_batch", "expected"),
    [
        ("adam", 1, 1, 0.002),
        ("adam", 4, 1, 0.004),
        ("adam", 1, 16, 0.0005),
        ("sgd", 4, 1, 0.008),
        ("sgd", 2, 8, 0.0005),
    ],
)
def test_the_start_grows_with_the_batch_or_for_adam_with_its_root(optimizer, batch, base_batch, expected):
    assert start_rate(0.002, batch=batch, base_batch=base_batch, optimizer=optimizer) == expected


def test_candidates_ascend_and_none_comes_twice():
    assert candidates(0.002, (2, 1, 0.5, 1)) == (0.001, 0.002, 0.004)


def test_a_rate_reads_the_same_in_a_name_and_on_a_command_line():
    rate = rounded(0.002 * 2**0.5)
    assert rate == 0.002828
    assert float(f"{rate:g}") == rate


def test_the_highest_dice_wins_and_of_equals_the_lower_rate():
    assert winner(trials(r1=0.5, r2=0.7, r4=0.6)).rate == 2
    assert winner(trials(r1=0.5, r2=0.7, r4=0.7)).rate == 2
    assert winner(trials(r1=0.1, r2=None)).rate == 1


def test_nothing_wins_where_all_diverged():
    with pytest.raises(InputError, match=r"none of 1, 2 did"):
        winner(trials(r1=None, r2=None))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (trials(r1=0.5, r2=0.7, r4=0.6), None),
        (trials(r1=0.5, r2=0.6, r4=0.7), 8),
        (trials(r4=0.7, r1=0.5, r2=0.6), 8),  # in any order
        (trials(r1=0.7, r2=0.6, r4=0.5), 0.5),
        (trials(r1=0.7, r4=0.6), 0.25),  # the ratio is the range's own
        (trials(r1=0.5, r2=0.6, r4=None), None),  # what lies beyond would diverge too
        (trials(r1=0.5, r2=None), 0.5),
        (trials(r1=None, r2=None), 0.5),
        (trials(r1=0.5), None),
    ],
)
def test_a_search_goes_on_where_its_best_is_at_an_end(found, expected):
    assert rate_beyond(found) == expected
    assert is_at_an_end(found) == (expected is not None)
