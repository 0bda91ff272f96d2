"""A run's log: what is damaged in it is left out with a warning; what it costs, and how long it
still takes."""

import json
import re

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
    "rss_bytes": 9,
}
END = {"event": "end", "step": 3, "reason": "finished", "seconds": 20.0, "peak_rss_bytes": None}
SCORE = {
    "event": "validation",
    "step": 2,
    "mean_dice": 0.5,
    "dice": {"WT": 0.5},
    "best": True,
    "seconds": 3.0,
}


def without(event, name):
    return {key: value for key, value in event.items() if key != name}


DAMAGED = [
    *({**STEP, "loss": value} for value in ("0.5", float("nan"), 1e300)),
    {**STEP, "step": -1},
    {**STEP, "dice": {"WT": {}}},
    {**START, "predicted": {"coarse": {"step_s": {}}}},
    *(without(STEP, "step"), without(SCORE, "mean_dice"), without(END, "reason")),
    [],
]


@pytest.mark.parametrize("damaged", DAMAGED, ids=str)
def test_an_event_with_a_value_of_another_type_is_left_out_with_a_warning(
    tmp_path, capsys, damaged
):
    good = [START, STEP, {**SCORE, "added by a later version": [1]}, END]
    lines = [json.dumps(event) for event in (*good[:2], damaged, *good[2:])]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    assert read_events(tmp_path) == good
    warnings = capsys.readouterr().err.splitlines()
    assert all(str(tmp_path / "log.jsonl") in line and "line 3" in line for line in warnings)
    assert len(warnings) == 1


@pytest.mark.parametrize("torn", [b'{"event": "step", "st', b"\xff", b"{" * 100_000])
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


def write_log(run, events, torn=""):
    run.mkdir(exist_ok=True)
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (run / "log.jsonl").write_text(lines + torn, encoding="utf-8")


def steps_up_to(last, first=1):
    return [{**STEP, "step": step} for step in range(first, last + 1)]


def test_the_last_events_are_found_from_the_end_of_a_log(tmp_path):
    assert last_event(tmp_path) == last_end(tmp_path) == {}
    events = [START, *steps_up_to(3), SCORE, *steps_up_to(6, first=4), END]
    write_log(tmp_path, events, torn='{"event": "step", "step": 9')
    assert last_event(tmp_path) == last_end(tmp_path) == END
    assert last_event(tmp_path, "validation") == SCORE
    assert last_event(tmp_path, "step")["step"] == 6
    write_log(tmp_path, [*events, START])
    assert last_end(tmp_path) == {}, "another attempt has begun"


LOGGED = [{**START, "step": 0}, *steps_up_to(4), {**SCORE, "step": 4}, *steps_up_to(6, first=5)]


@pytest.mark.parametrize(
    ("lines", "step", "owes", "kept"),
    [
        (LOGGED, 6, False, LOGGED),
        (LOGGED, 4, False, LOGGED[:6]),
        (LOGGED, 4, True, LOGGED[:5]),
        ([*LOGGED, {"event": "diverged", "step": 6, "reason": "NaN"}], 6, False, LOGGED),
        ([*LOGGED[:2], {**STEP, "step": 9}, *LOGGED[2:]], 6, False, LOGGED),
        (LOGGED, 0, False, LOGGED[:1]),
    ],
)
@pytest.mark.parametrize("torn", ["", json.dumps({**STEP, "step": 7})])
def test_a_log_is_cut_back_to_a_checkpoint_s_step(tmp_path, lines, step, owes, kept, torn):
    write_log(tmp_path, lines, torn)
    forget_after(tmp_path, step, owes_validation=owes)
    assert (tmp_path / "log.jsonl").read_text() == "".join(
        json.dumps(event) + "\n" for event in kept
    )


def test_a_last_line_without_its_line_break_is_kept_and_gets_one(tmp_path):
    write_log(tmp_path, LOGGED[:2], torn=json.dumps(LOGGED[2]))
    forget_after(tmp_path, 6)
    append_event(tmp_path, LOGGED[3])
    assert read_events(tmp_path) == LOGGED[:4]


# --- What is shown, costs and pace ---


def test_the_speed_that_is_shown_is_that_of_steps_that_do_not_compile(tmp_path, capsys):
    seconds = (60.0, 3.0, 2.0, 4.0)
    with shown(tmp_path, steps=4, done=0, steps_per_epoch=1, batch=2) as show:
        for number, step_s in enumerate(seconds, start=1):
            show({**STEP, "step": number, "epoch": number - 1, "step_s": step_s})
    lines = capsys.readouterr().err.splitlines()
    speeds = [re.search(r"([\d.]+) s/volume", line) for line in lines]
    assert [found and found[1] for found in speeds] == [None, "1.50", "1.25", "1.50"]


def test_costs_are_of_coarse_steps_and_full_ones_apart():
    steps = [
        {**STEP, "step": n, "step_s": s, "wait_s": 0.5}
        for n, s in ((1, 9), (2, 1), (3, 8), (4, 4), (5, 6))
    ]
    saved = {"event": "checkpoint", "step": 5, "seconds": 1.5}
    first = {**START, "step": 0, "coarse_steps": 2}
    events = [first, *steps[:2], SCORE, *steps[2:], saved, END]
    costs = History(events).costs(coarse_steps=2)
    known = {
        "steps": 5,
        "voxels": 40,
        "step_s": 5,  # without those that compile, of 9 s and 8 s
        "coarse_step_s": 1,
        "steps_s": 28,
        "wait_s": 2.5,
    }
    other = {
        "validation_s": 3,
        "checkpoint_s": 1.5,
        "train_s": 20,
        "peak_rss_bytes": 9,
        "allocator_peak_bytes": None,
    }
    assert costs == Costs(**known, **other)
    assert History([START, *steps]).costs().train_s is None, "it has not ended"
    assert History([]).costs().step_s is None


def steps(first, *seconds):
    return [
        {"event": "step", "step": first + index, "step_s": s} for index, s in enumerate(seconds)
    ]


@pytest.mark.parametrize(
    ("events", "step_s"),
    [
        ([], None),
        ([START], 5.0),  # as predicted, before there are steps
        ([START, *steps(21, 60.0)], 5.0),  # the first one compiles
        ([START, *steps(21, 60.0, 2.0, 3.0)], 5.0),  # too few
        ([START, *steps(21, 60.0, 2.0, 3.0, 2.0)], 2.0),
        # 6 s beside 4 steps. An earlier attempt does not count.
        (
            [
                START,
                *steps(21, 60, 9, 9),
                START,
                *steps(21, 60, 2, 2, 2),
                {**SCORE, "step": 24, "seconds": 6.0},
            ],
            3.5,
        ),
        ([{"event": "start", "step": 20, "predicted": {}}, *steps(21, 60.0)], None),
    ],
)
def test_what_is_left_is_at_the_pace_of_the_last_attempt(events, step_s):
    left = Pace(events).seconds_left(24, 124)
    assert left == (None if step_s is None else pytest.approx(100 * step_s))
    assert Pace(events).seconds_left(24, None) is None
