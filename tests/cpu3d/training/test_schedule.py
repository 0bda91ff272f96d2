"""The learning rate as a table."""

import pytest

from cpu3d.training.schedule import learning_rate, steps_within


@pytest.mark.parametrize(
    ("step", "schedule", "rate"),
    [
        (0, "cosine", 0.25),  # first of four warm-up steps
        (3, "cosine", 1.0),  # the last one reaches the peak
        (4, "cosine", 1.0),
        (8, "cosine", 0.5),  # half way through the eight that decay
        (8, "polynomial", 0.5**0.9),
        (8, "constant", 1.0),
        (11, "polynomial", (1 / 8) ** 0.9),  # the last step still moves
    ],
)
def test_rate_of_a_twelve_step_run_with_four_to_warm_up(step, schedule, rate):
    assert learning_rate(step, peak=1.0, steps=12, warmup_steps=4, schedule=schedule) == pytest.approx(rate)


def test_minutes_are_filled_with_steps():
    assert steps_within(2, 0.5) == 240
    assert steps_within(0.001, 100) == 1


def test_a_run_shorter_than_its_warm_up_only_warms_up():
    rates = [learning_rate(s, peak=1.0, steps=3, warmup_steps=10, schedule="cosine") for s in range(3)]
    assert rates == pytest.approx([0.1, 0.2, 0.3])


def test_no_warm_up_starts_at_the_peak():
    assert learning_rate(0, peak=2.0, steps=5, warmup_steps=0, schedule="cosine") == 2.0
