"""How long a run still takes, by its own log."""

import pytest

from cpu3d.run.summary import Pace

START = {"event": "start", "step": 20, "predicted": {"step_s": 5.0}}


def steps(first, *seconds):
    return [{"event": "step", "step": first + index, "step_s": s} for index, s in enumerate(seconds)]


@pytest.mark.parametrize(
    ("events", "step_s"),
    [
        ([], None),
        ([START], 5.0),  # as predicted, before there are steps
        ([START, *steps(21, 60.0)], 5.0),  # the first one compiles
        ([START, *steps(21, 60.0, 2.0, 3.0, 2.0)], 2.0),
        # 6 s beside 4 steps. An earlier attempt does not count.
        ([START, *steps(21, 60, 9, 9), START, *steps(21, 60, 2, 2, 2), {"event": "validation", "step": 24, "seconds": 6.0}], 3.5),
        ([{"event": "start", "step": 20, "predicted": {}}, *steps(21, 60.0)], None),
    ],
)
def test_what_is_left_is_at_the_pace_of_the_last_attempt(events, step_s):
    left = Pace(events).seconds_left(24, 124)
    assert left is None if step_s is None else left == pytest.approx(100 * step_s)
    assert Pace(events).seconds_left(24, None) is None
