import pytest

from cpu3d.distributed.patience import Patience
from tests.cpu3d.training.beats import beat

PATIENCE = Patience(settle_s=8, saving_s=300, hears_s=20, grace_s=100, unforeseen_s=3600)

STARTS, LEAVES = beat(phase="starting", longest_step_s=None), beat(phase="ended", longest_step_s=900.0)
FIRST, COMPUTES = beat(phase="computing", longest_step_s=None), beat(phase="computing", longest_step_s=900.0)
SAVES, VALIDATES = beat(phase="saving", longest_step_s=2.0), beat(phase="validating", longest_step_s=2.0)


@pytest.mark.parametrize(
    ("code", "others", "seconds"),
    [
        (1, [], 0),
        (2, [STARTS], 0),
        (3, [STARTS, LEAVES], 0),
        (2, [COMPUTES], 920),
        (3, [STARTS, COMPUTES], 920),
        (-9, [SAVES], 22),
        (4, [FIRST], 20),
        (6, [COMPUTES], 8),
        (5, [STARTS], 300),
        (143, [COMPUTES], 300),
    ],
)
def test_the_others_are_asked_to_end_when_they_have_heard_of_it(code, others, seconds):
    assert PATIENCE.before_stop_s(code, others) == seconds


@pytest.mark.parametrize(
    ("beats", "seconds"),
    [([], 100), ([STARTS], 100), ([LEAVES], 100), ([COMPUTES], 1900), ([FIRST], 3700), ([SAVES], 3700)],
)
def test_nobody_is_killed_in_what_is_in_flight(beats, seconds):
    assert PATIENCE.before_kill_s(beats) == seconds
    assert PATIENCE.before_kill_s([*beats, VALIDATES]) == 3700
