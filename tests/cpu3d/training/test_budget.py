"""How many steps fit a budget of minutes."""

import pytest

from cpu3d.settings import RunConfig
from cpu3d.training.budget import steps_within

HALF = RunConfig(curriculum="half").with_coarse_share(12)


@pytest.mark.parametrize(
    ("config", "step", "at_least", "left_s", "step_s", "fit"),
    [
        (RunConfig(), 0, 1, 5, [1], 5),
        (RunConfig(), 0, 1, 4.9, [1], 4),
        (RunConfig(), 3, 1, 5, [1], 8),
        (RunConfig(), 0, 1, 99, [1], 12),
        (RunConfig(), 0, 7, 5, [1], 7),
        # Five sixths of all steps, rounded down, take 1 s, the others 10 s.
        (HALF, 0, 1, 29, [1, 10], 11),
        (HALF, 4, 1, 11, [1, 10], 6),
        (HALF, 4, 1, 0, [1, 10], 5),
        (HALF, 10, 1, 10, [10], 11),
    ],
)
def test_the_longest_run_that_fits_is_taken(config, step, at_least, left_s, step_s, fit):
    options = {"step": step, "steps": 12, "at_least": at_least, "left_s": left_s}
    assert steps_within(config, **options, step_s=step_s) == fit
