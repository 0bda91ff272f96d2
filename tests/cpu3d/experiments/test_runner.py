"""Processes that train and score runs, and what counts as done."""

import dataclasses
import errno
import os
import signal
import sys
import threading
import time

import pytest

from cpu3d.experiments import runner
from cpu3d.experiments.runner import PlannedRun, RunFailedError, call, carry_out
from cpu3d.inference.scores import TOLERANCE_MM
from cpu3d.inference.scores_file import has_current_scores, scores_path
from cpu3d.run.checkpoint import POSTPROCESSING, save_checkpoint
from cpu3d.run.config_json import load_config, save_config
from cpu3d.run.log import append_event
from cpu3d.settings import as_options
from tests.cpu3d.experiments.conftest import SETTINGS

# --- A process ---


@pytest.fixture
def program(monkeypatch):
    """program("print(1)"): Python that is called instead of this project."""

    def replace(code):
        monkeypatch.setattr(runner, "PROGRAM", (sys.executable, "-c", code))
        monkeypatch.setattr(runner, "POLL_S", 0.05)

    return replace


@pytest.mark.parametrize(
    ("code", "words", "why"),
    [(4, "loss must be finite, got nan", "train diverged"), (-9, "SIGKILL", "train ended with")],
)
def test_the_last_words_of_a_process_that_fails_say_why(
    program, tmp_path, capsys, code, words, why
):
    end = f"sys.exit({code})" if code > 0 else "os.kill(os.getpid(), 9)"
    program(f"import os, sys; print('epoch 1'); print({words!r}, file=sys.stderr); {end}")
    log = tmp_path / "log.txt"
    with pytest.raises(RunFailedError, match=words) as caught:
        call(["train", "--mlflow", "http://a:s3cret@b"], log, "a: train")
    assert "s3cret" not in log.read_text()
    assert caught.value.exit_code == max(code, 1)
    assert why in caught.value.why
    assert str(log) in str(caught.value)
    program("")
    call(["train"], log, "a: train", steps=3)
    shown = capsys.readouterr().err
    assert [part in shown for part in ("0/1", "3/3")] == [True, True], "steps of each"


WAITS = """
import os, signal, sys, time
from pathlib import Path
got = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: got.append(number))
assert "TF_CONFIG" not in os.environ  # it would wait for workers
Path("OUT/waits").write_text(str(os.getpgid(0)))
end = time.monotonic() + 60
while not got and time.monotonic() < end:
    time.sleep(0.02)
time.sleep(0.2)
Path("OUT/signals").write_text(" ".join(str(int(number)) for number in got))
"""


def test_a_signal_is_passed_on_once_and_waited_for(program, tmp_path, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{}")
    program(WAITS.replace("OUT", str(tmp_path)))

    def interrupt():
        end = time.monotonic() + 60
        while not (tmp_path / "waits").exists() and time.monotonic() < end:
            time.sleep(0.02)
        signal.raise_signal(signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt, match="the same command continues"):
        call(["train"], tmp_path / "log.txt", "a: train")
    assert (tmp_path / "signals").read_text() == str(int(signal.SIGINT))
    assert int((tmp_path / "waits").read_text()) != os.getpgid(0), (
        "else a terminal's Ctrl-C would reach it twice"
    )


# --- Runs ---


def carried_out(store, out, *names):
    """The words on runs of 4 steps that failed, by name."""
    words = tuple(as_options(SETTINGS))
    runs = [PlannedRun(name, out / name, words, steps=4) for name in names]
    return {name: error.why for name, error in carry_out(runs, store.folder, out).items()}


@pytest.mark.parametrize(
    ("lost", "again"),
    [
        ("checkpoints/best.npz", ["train a", "evaluate a"]),
        (POSTPROCESSING, ["train a"]),
        ("evaluation/scores.json", ["evaluate a"]),
    ],
)
def test_what_is_whole_in_a_folder_is_not_done_again(
    commands, phantom_store, tmp_path, lost, again
):
    for seen in (["train a", "evaluate a", "train b", "evaluate b"], []):
        assert carried_out(phantom_store, tmp_path, "a", "b") == {}
        assert commands.seen() == seen
    (tmp_path / "a" / lost).unlink()
    assert carried_out(phantom_store, tmp_path, "a", "b") == {}
    assert commands.seen() == again


def test_a_run_is_not_scored_until_its_post_processing_is_decided(
    commands, phantom_store, tmp_path, monkeypatch
):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("cpu3d.inference.postprocessing.run_rules.write_json", full)
        with pytest.raises(RunFailedError, match="post-processing must be decided") as caught:
            carried_out(phantom_store, tmp_path, "a")
    assert caught.value.why == "post-processing was not decided"
    assert commands.seen() == ["train a"]
    assert carried_out(phantom_store, tmp_path, "a") == {}
    assert commands.seen() == ["train a", "evaluate a"]


@pytest.mark.parametrize(
    ("events", "steps", "done"),
    [
        ([{"event": "end", "reason": "finished", "step": 8}], 8, True),
        ([{"event": "end", "reason": "finished", "step": 8}], 0, True),  # by time; its own are 8
        ([{"event": "end", "reason": "finished", "step": 7}], 8, False),
    ],
)
def test_a_run_is_trained_when_its_last_step_is_done(
    commands, phantom_store, tmp_path, events, steps, done
):
    carried_out(phantom_store, tmp_path, "a")
    run = tmp_path / "a"
    save_config(dataclasses.replace(load_config(run), steps=8), run)
    (run / "log.jsonl").unlink()
    for event in events:
        append_event(run, event)
    assert PlannedRun("a", run, (), steps=steps).is_trained is done


def test_scores_of_other_weights_of_another_kind_or_another_way_to_predict_do_not_count(
    commands, phantom_store, tmp_path
):
    carried_out(phantom_store, tmp_path, "a")
    folder = tmp_path / "a"
    assert has_current_scores(folder, "test", TOLERANCE_MM)
    assert not has_current_scores(folder, "test", 2.0)
    assert not has_current_scores(folder, "test", TOLERANCE_MM, "last")
    path = scores_path(folder)
    scores = path.read_text()
    for part, other in (
        ('flips": true', 'flips": false'),
        ("off: ", ""),
        ('hash": "', 'hash": "0'),
    ):
        path.write_text(scores.replace(part, other))
        assert not PlannedRun("a", folder, ()).is_scored
    path.write_text(scores)
    save_checkpoint(folder / "checkpoints" / "best.npz", {}, {"step": 5})
    assert not has_current_scores(folder, "test", TOLERANCE_MM)
    assert not PlannedRun("a", folder, ()).has_rules
