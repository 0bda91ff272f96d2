"""Silence against what came before, with the looks of the watching thread written down by hand."""

import pytest

from cpu3d.training.guard.heartbeat import PHASES, WAITING_PHASES
from cpu3d.training.guard.stall import ADVICE, StallClock, stall_message


def looked(times, signs=None, limit_s=60.0):
    clock = StallClock(limit_s)
    for now, sign in zip(times, signs or [1] * len(times)):
        clock.look(now, sign, 0.5)
    return clock


def every_half_second(until, begin=0.0):
    return [begin + 0.5 * count for count in range(int(2 * (until - begin)) + 1)]


def test_silence_is_counted_from_the_last_sign_of_life():
    times = every_half_second(30)
    assert looked(times).silent_s == 30.0
    assert looked(times, [1] * 40 + [2] * 21).silent_s == 10.0


@pytest.mark.parametrize("gap_s", [60, 3600, 10**6])
def test_a_gap_between_two_looks_is_no_silence(gap_s):
    """A process that was stopped and continued, a laptop that slept."""
    times = every_half_second(10) + every_half_second(gap_s + 10, gap_s)
    assert looked(times).silent_s < 24


def test_a_clock_that_goes_back_is_no_silence():
    assert looked([100.0, 50.0, 50.5]).silent_s == 0.5


@pytest.mark.parametrize(
    ("phase", "longest_step_s", "allowed_s"),
    [
        ("computing", 2.0, 60.0),
        ("computing", 20.0, 200.0),
        ("computing", None, 240.0),
        ("validating", 2.0, 240.0),
        ("waiting for data", 2.0, 300.0),
        # Half as much again as anything that another worker may be doing.
        ("exchanging", 2.0, 450.0),
        ("exchanging", None, 450.0),
        ("exchanging", 40.0, 600.0),
        ("waiting for the others' validation", 2.0, 450.0),
        ("waiting for the last checkpoint", 2.0, 450.0),
    ],
)
def test_what_takes_longer_than_ever_is_given_ten_times_that(phase, longest_step_s, allowed_s):
    clock = looked(every_half_second(100))
    clock.ended("computing", 1.0)
    clock.ended("waiting for data", 30.0)
    assert clock.allowed_s(phase, longest_step_s) == allowed_s


def test_who_hangs_is_found_before_those_who_wait_for_him():
    """Before anything was done, and after a step, a save and a wait for that save."""
    for longest_s in (None, 8.0):
        clock = StallClock(60.0)
        if longest_s:
            for phase in ("computing", "saving", "exchanging"):
                clock.ended(phase, 1.0)
        waits = [clock.allowed_s(phase, longest_s) for phase in WAITING_PHASES]
        works = [clock.allowed_s(phase, longest_s) for phase in PHASES if phase not in WAITING_PHASES]
        assert min(waits) >= 1.5 * max(works)


def test_a_wait_counts_only_as_far_as_this_process_lived_through_it():
    clock = looked(every_half_second(10))
    assert clock.ended("computing", 3600.0) == 15.0
    assert clock.longest_s["computing"] == 15.0
    assert clock.ended("computing", 0.04) == 0.04
    assert clock.longest_s["computing"] == 15.0


def test_a_stall_is_silence_beyond_that_and_none_without_a_limit():
    for limit_s, silent_s, stalled in ((60, 60, False), (60, 61, True), (0, 10**4, False)):
        clock = looked(every_half_second(silent_s), limit_s=limit_s)
        clock.ended("computing", 0.04)
        assert clock.is_stalled("computing", 0.1) is stalled


@pytest.mark.parametrize(("phase", "advice"), [*ADVICE.items(), ("else", "the stacks above say where")])
def test_the_message_names_the_phase_and_what_to_look_at(phase, advice):
    said = stall_message(phase, 1000, 900, 1, 4)
    assert said.startswith("worker 1 of 4 must give a sign of life within 15 min, got none for 16.7 min, " + phase)
    assert advice in said
    assert stall_message(phase, 1000, 900, 0, 1).startswith("the run must")
