"""A run's log: what is damaged in it is left out with a warning; what it costs, and how long it
still takes."""

import json

import pytest

from cpu3d.run.log import (
    append_event,
    forget_after,
    last_end,
    last_event,
    read_events,
    shown,
)
from cpu3d.run.summary import Costs, History, Pace

START = {
    "event": "start",
    "step": 20,
    "predicted": {"step_s": 5.0, "constants": "a host", "coarse": {"step_s": 1.0}},
    "coarse_steps": 2,
}
STEP = {
    "event": "step",
    "step": 1,
    "loss": 0.5,
    "dice": {"WT": 0.5},
    "voxels": 8,
    "step_s": 2,
    "wait_s": 0.5,
    "rss_bytes": 9 * 2**10,
}
END = {"event": "end", "step": 3, "reason": "finished", "seconds": 20.0, "peak_rss_bytes": None}
SCORE = {"event": "validation", "step": 2, "mean_dice": 0.5, "seconds": 3.0}


def as_lines(events):
    return "".join(json.dumps(event) + "\n" for event in events)


def write_log(run, events, torn=""):
    (run / "log.jsonl").write_text(as_lines(events) + torn)


def without(event, name):
    return {key: value for key, value in event.items() if key != name}


@pytest.mark.parametrize(
    "damaged",
    [
        {**STEP, "loss": "0.5"},
        {**STEP, "loss": 1e300},
        {**STEP, "step": -1},
        {**STEP, "dice": {"WT": {}}},
        {**START, "predicted": {"coarse": {"step_s": {}}}},
        *(without(STEP, "step"), without(SCORE, "mean_dice"), without(END, "reason")),
        [],
    ],
    ids=str,
)
def test_an_event_with_a_value_of_another_type_is_left_out_with_a_warning(
    tmp_path, capsys, damaged
):
    write_log(tmp_path, [STEP, damaged, {**SCORE, "added by a later version": [1]}])
    assert read_events(tmp_path) == [STEP, {**SCORE, "added by a later version": [1]}]
    (warning,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "log.jsonl") in warning
    assert "line 2" in warning


@pytest.mark.parametrize("torn", [b"\xff", b"{" * 100_000])
def test_a_last_line_that_was_cut_off_is_left_out_in_silence_and_another_one_is_not(
    tmp_path, capsys, torn
):
    path = tmp_path / "log.jsonl"
    path.write_bytes(json.dumps(STEP).encode() + b"\n" + torn)
    assert read_events(tmp_path) == [STEP]
    assert not capsys.readouterr().err
    path.write_bytes(torn + b"\n" + json.dumps(STEP).encode())
    assert read_events(tmp_path) == [STEP]
    assert "line 1" in capsys.readouterr().err


# --- Long logs ---


def test_the_last_events_are_found_from_the_end_of_a_log(tmp_path):
    assert last_event(tmp_path) == last_end(tmp_path) == {}
    events = [START, STEP, SCORE, END]
    write_log(tmp_path, events, torn='{"event": "step", "step": 9')
    assert last_event(tmp_path) == last_end(tmp_path) == END
    assert last_event(tmp_path, "step", "validation") == SCORE
    write_log(tmp_path, [*events, START])
    assert last_end(tmp_path) == {}, "another attempt has begun"


LOGGED = [{**STEP, "step": 1}, {**STEP, "step": 2}, SCORE, {**STEP, "step": 3}]


@pytest.mark.parametrize(
    ("lines", "step", "owes", "kept"),
    [
        (LOGGED, 2, False, LOGGED[:3]),
        (LOGGED, 2, True, LOGGED[:2]),
        ([*LOGGED, {"event": "diverged", "step": 3, "reason": "NaN"}], 3, False, LOGGED),
        ([{**STEP, "step": 9}, *LOGGED], 3, False, LOGGED),
    ],
)
def test_a_log_is_cut_back_to_a_checkpoint_s_step(tmp_path, lines, step, owes, kept):
    write_log(tmp_path, lines, torn='{"event": "st')
    forget_after(tmp_path, step, owes_validation=owes)
    assert (tmp_path / "log.jsonl").read_text() == as_lines(kept)


def test_a_last_line_without_its_line_break_is_kept_and_gets_one(tmp_path):
    write_log(tmp_path, LOGGED[:2], torn=json.dumps(LOGGED[2]))
    forget_after(tmp_path, 6)
    append_event(tmp_path, LOGGED[3])
    assert read_events(tmp_path) == LOGGED


# --- What is shown, costs and pace ---


def test_events_are_shown_with_the_speed_of_steps_that_do_not_compile(tmp_path, capsys):
    seconds = (60.0, 3.0, 2.0, 4.0)
    with shown(tmp_path, steps=4, done=0, steps_per_epoch=2, batch=2) as show:
        for number, step_s in enumerate(seconds, start=1):
            show({**STEP, "step": number, "epoch": number // 3, "step_s": step_s})
        show({**SCORE, "dice": STEP["dice"], "cases": 3, "best": True})
        show({**END, "peak_rss_bytes": 2**30})
    state = "loss 0.500  WT 0.500  "
    assert capsys.readouterr().err.splitlines() == [
        f"epoch 1, step 2: {state}1.50 s/volume  9 KiB  6 s left",
        f"epoch 2, step 4: {state}1.50 s/volume  9 KiB",
        "validation after step 2: Dice WT 0.500 on 3 whole volumes, 3.0 s, best so far",
        "finished after step 3: 20 s of steps, validations and saves, peak 1.00 GiB",
    ]


def test_costs_are_of_coarse_steps_and_full_ones_apart():
    first = {**START, "step": 0}
    saved = {"event": "checkpoint", "step": 5, "seconds": 1.5}
    before = {**END, "peak_rss_bytes": 2**20, "allocator_peak_bytes": 7}
    over = {**END, "allocator_peak_bytes": 6}
    events = [before, first, SCORE, *steps(1, 9, 1, 8, 4, 6), saved, over]
    assert History(events).costs(coarse_steps=2) == Costs(
        steps=5,
        voxels=40,
        step_s=5,  # without those that compile, of 9 s and 8 s
        steps_s=28,
        wait_s=2.5,
        validation_s=3,
        checkpoint_s=1.5,
        train_s=20,
        peak_rss_bytes=2**20,
        allocator_peak_bytes=7,
    )
    assert History(events).mean_step_s(2, coarse=True) == 1
    assert History([*events, START]).costs().train_s is None, "it has not ended"
    assert History([]).costs().step_s is None


def steps(first, *seconds):
    return [{**STEP, "step": step, "step_s": s} for step, s in enumerate(seconds, first)]


@pytest.mark.parametrize(
    ("events", "step_s"),
    [
        ([], None),
        ([START], 5.0),  # as predicted, before there are steps
        ([START, *steps(21, 60.0, 1e8, 1e8, 1e8)], None),  # decades are not known
        ([START, *steps(21, 60.0, 2.0, 3.0)], 5.0),  # too few
        ([START, *steps(21, 60.0, 1.0, 3.5, 1.5)], 2.0),
        # 3 s beside 4 steps. An earlier attempt does not count.
        ([START, *steps(21, 60, 9, 9), START, *steps(21, 60, 2, 2, 2), SCORE], 2.75),
        ([{"event": "start", "step": 20}, *steps(21, 60.0, 2.0)], 2.0),
    ],
)
def test_what_is_left_is_at_the_pace_of_the_last_attempt(events, step_s):
    left = Pace(events).seconds_left(24, 124)
    assert left == (None if step_s is None else pytest.approx(100 * step_s))
    for unknown in (None, 23):
        assert Pace(events).seconds_left(24, unknown) is None
    # coarse ones as was predicted of them
    assert Pace([START]).seconds_left(1, 10) == 1 + 8 * 5
    # the second coarse step is none of the full ones
    assert Pace([{**START, "step": 0}, *steps(1, 9, 1, 9, 5)]).step_s(4) == 5
