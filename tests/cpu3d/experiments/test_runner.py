"""Processes that train and score runs, and what counts as done."""

import os
import signal
import threading

import pytest

from cpu3d.experiments.runner import PlannedRun, RunFailedError, carry_out
from cpu3d.inference.scores_file import outdated_scores
from cpu3d.run.checkpoint import POSTPROCESSING, save_checkpoint
from cpu3d.run.log import read_events

OPTIONS = ("--steps", "4", "--seed", "0")


def carried_out(out, *names, tolerance_mm=1.0):
    """The words on runs that failed, by name."""
    runs = [
        PlannedRun(name, out / "runs" / name, OPTIONS, steps=4, tolerance_mm=tolerance_mm)
        for name in names
    ]
    out.mkdir(exist_ok=True)
    failed = carry_out(runs, out / "store", out)
    return {name: error.why for name, error in failed.items()}


def test_a_run_that_was_killed_continues(processes, tmp_path, monkeypatch):
    cluster = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
    monkeypatch.setenv("TF_CONFIG", cluster)
    out = tmp_path / "out"
    processes.tell("cut")
    killer = threading.Thread(
        target=lambda: os.kill(int(processes.waited("waits").split()[0]), signal.SIGKILL)
    )
    killer.start()
    with pytest.raises(RunFailedError, match="got SIGKILL"):
        carried_out(out, "a")
    killer.join()
    assert "TF_CONFIG" not in processes.waited("environ").split(), "it would wait for workers"
    (processes.folder / "cut").unlink()
    carried_out(out, "a")
    events = read_events(out / "runs" / "a")
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3, 4]
    assert processes.calls() == ["train a", "train a", "evaluate a"]


@pytest.mark.parametrize(
    ("lost", "again"),
    [
        ("", []),
        ("checkpoints/best.npz", ["train a"]),
        (POSTPROCESSING, ["train a"]),
        ("evaluation/scores.json", ["evaluate a"]),
    ],
)
def test_what_is_whole_in_a_folder_is_not_done_again(stage, tmp_path, lost, again):
    out = tmp_path / "out"
    assert carried_out(out, "a", "b", tolerance_mm=1 / 3) == {}
    assert stage.calls() == ["train a", "evaluate a", "train b", "evaluate b"]
    if lost:
        (out / "runs" / "a" / lost).unlink()
    assert carried_out(out, "a", "b", tolerance_mm=1 / 3) == {}
    assert stage.calls() == again, "a third is passed on with all of its digits"


def test_a_run_is_not_scored_until_its_post_processing_is_decided(stage, tmp_path):
    out = tmp_path / "out"
    stage.tell("undecided", "a")
    assert carried_out(out, "a", "b") == {"a": "post-processing was not decided"}
    assert stage.calls() == ["train a", "train b", "evaluate b"]
    (stage.folder / "undecided").unlink()
    assert carried_out(out, "a", "b") == {}
    assert stage.calls() == ["train a", "evaluate a"]


@pytest.mark.parametrize(
    ("code", "words", "why"),
    [
        (1, "No space left on device", "train ended with exit code 1"),
        (4, "loss must be finite, got nan", "train diverged"),
    ],
)
def test_where_all_runs_fail_the_last_words_say_why(processes, tmp_path, code, words, why):
    processes.tell("fail", f"a {code} {words}")
    with pytest.raises(RunFailedError, match=words) as caught:
        carried_out(tmp_path, "a")
    assert (caught.value.exit_code, caught.value.why) == (code, why)
    assert str(tmp_path / "logs" / "runs-a-train.txt") in str(caught.value)
    assert processes.calls() == ["train a"]


def test_runs_that_diverge_are_returned_and_not_trained_again(stage, tmp_path):
    stage.tell("fail", "a 4 loss must be finite, got nan")
    assert carried_out(tmp_path, "a", "b") == {"a": "train diverged"}
    assert stage.calls() == ["train a", "train b", "evaluate b"]
    with pytest.raises(RunFailedError, match="diverged before") as caught:
        carried_out(tmp_path, "a")
    assert (caught.value.exit_code, caught.value.why) == (4, "train diverged")
    assert stage.calls() == [], "it would end so again"


def test_a_signal_is_passed_on_once_and_waited_for(processes, tmp_path):
    processes.tell("cut")

    def interrupt():
        processes.waited("waits")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt, match="the same command continues"):
        carried_out(tmp_path, "a")
    assert processes.waited("signals") == str(int(signal.SIGINT))
    assert int(processes.waited("waits").split()[1]) != os.getpgid(0), (
        "else a terminal's Ctrl-C would reach it twice"
    )


@pytest.mark.parametrize(
    ("end", "steps", "done"),
    [
        ({"reason": "finished", "step": 4}, 4, True),
        ({"reason": "finished", "step": 4}, 0, True),  # by time; its own are 4
        ({"reason": "finished", "step": 3}, 4, False),
        ({"reason": "early stop", "step": 2}, 4, True),
        ("none", 4, False),
    ],
)
def test_a_run_is_trained_when_its_last_step_is_done(make_run, end, steps, done):
    folder = make_run("run", scored=False, end=end)
    assert PlannedRun("a", folder, (), steps=steps).is_trained is done


def test_scores_of_other_weights_of_another_kind_or_another_way_to_predict_do_not_count(make_run):
    folder = make_run("a")
    assert outdated_scores(folder, "test", 1.0) == ""
    assert outdated_scores(folder, "test", 2.0) == "tolerance_mm 1.0"
    assert outdated_scores(folder, "val", 1.0)
    path = folder / "evaluation" / "scores.json"
    scores = path.read_text()
    path.write_text(scores.replace('"flips": true', '"flips": false'))
    assert "'flips': False" in outdated_scores(folder, "test", 1.0)
    path.write_text(scores)
    save_checkpoint(folder / "checkpoints" / "best.npz", {}, {"step": 5})
    assert "scores of earlier weights" in outdated_scores(folder, "test", 1.0)
