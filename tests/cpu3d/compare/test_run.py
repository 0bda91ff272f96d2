"""Processes of a comparison, and what counts as done."""

import os
import signal
import threading

import pytest

from cpu3d.compare.run import Evaluation, PlannedRun, train_and_score
from cpu3d.inference.scores_file import outdated_scores
from cpu3d.processes import RunFailedError, is_trained
from cpu3d.run.checkpoint import POSTPROCESSING, save_checkpoint
from cpu3d.run.log import read_events

OPTIONS = ("--steps", "4", "--seed", "0")


def planned(out, *names, options=OPTIONS):
    return [PlannedRun(name, 0, out / "runs" / name, options) for name in names]


def carried_out(out, runs, tolerance_mm=1.0):
    return train_and_score(runs, out / "store", out, Evaluation(tolerance_mm=tolerance_mm))


def test_a_run_that_was_killed_continues(processes, tmp_path, monkeypatch):
    monkeypatch.setenv(
        "TF_CONFIG",
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}',
    )
    out = tmp_path / "out"
    runs = planned(out, "a")
    processes.tell("cut")
    killer = threading.Thread(
        target=lambda: os.kill(int(processes.waited("waits").split()[0]), signal.SIGKILL)
    )
    killer.start()
    with pytest.raises(RunFailedError, match="got SIGKILL"):
        carried_out(out, runs)
    killer.join()
    assert "TF_CONFIG" not in processes.waited("environ").split(), "it would wait for workers"
    (processes.folder / "cut").unlink()
    carried_out(out, runs)
    steps = [event["step"] for event in read_events(runs[0].folder) if event["event"] == "step"]
    assert steps == [1, 2, 3, 4]
    assert processes.calls() == ["train a", "train a", "evaluate a"]


def test_runs_are_trained_and_scored_once(stage, tmp_path):
    out = tmp_path / "out"
    runs = planned(out, "a", "b")
    carried_out(out, runs, 1 / 3)
    assert stage.calls() == ["train a", "evaluate a", "train b", "evaluate b"]
    carried_out(out, runs, 1 / 3)
    assert stage.calls() == [], "a third is passed on with all of its digits"
    (runs[0].folder / "checkpoints/best.npz").unlink()
    carried_out(out, runs, 1 / 3)
    assert stage.calls() == ["train a"], "which brings lost weights back, and they are scored"


def test_a_run_is_not_scored_until_its_post_processing_is_decided(stage, tmp_path):
    out = tmp_path / "out"
    runs = planned(out, "a", "b")
    stage.tell("undecided", "a")
    assert carried_out(out, runs) == [("a", 0, "post-processing was not decided")]
    assert stage.calls() == ["train a", "train b", "evaluate b"]
    (stage.folder / "undecided").unlink()
    assert carried_out(out, runs) == []
    assert stage.calls() == ["train a", "evaluate a"]
    # As a call leaves it that was killed before it had decided.
    (runs[0].folder / POSTPROCESSING).unlink()
    assert carried_out(out, runs) == []
    assert stage.calls() == ["train a"], "the scores are of these weights and rules"


@pytest.mark.parametrize(
    ("code", "words", "why"),
    [
        (1, "No space left on device", "train ended with exit code 1"),
        (4, "loss must be finite, got nan", "train diverged"),
    ],
)
def test_where_all_runs_fail_the_last_words_say_why(processes, tmp_path, code, words, why):
    processes.tell("fail", f"a {code} {words}")
    out = tmp_path / "out"
    with pytest.raises(RunFailedError, match=words) as caught:
        carried_out(out, planned(out, "a"))
    assert (caught.value.exit_code, caught.value.why) == (code, why)
    assert str(out / "logs" / "a-train.txt") in str(caught.value)
    assert processes.calls() == ["train a"]


def test_runs_that_diverge_are_returned_and_not_trained_again(stage, tmp_path):
    stage.tell("fail", "a 4 loss must be finite, got nan")
    out = tmp_path / "out"
    assert carried_out(out, planned(out, "a", "b")) == [("a", 0, "train diverged")]
    assert stage.calls() == ["train a", "train b", "evaluate b"]
    with pytest.raises(RunFailedError, match="diverged before") as caught:
        carried_out(out, planned(out, "a"))
    assert (caught.value.exit_code, caught.value.why) == (4, "train diverged")
    assert stage.calls() == [], "it would end so again"


def test_a_signal_is_passed_on_once_and_waited_for(processes, tmp_path):
    processes.tell("cut")

    def interrupt():
        processes.waited("waits")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt, match="the same command continues"):
        carried_out(tmp_path / "out", planned(tmp_path / "out", "a"))
    assert processes.waited("signals") == str(int(signal.SIGINT))
    assert int(processes.waited("waits").split()[1]) != os.getpgid(0), (
        "else a terminal's Ctrl-C would reach it twice"
    )


def test_a_run_is_trained_when_its_last_step_is_done(make_run):
    timed = ("--budget-minutes", "3")  # its own steps are 4
    for number, (end, options, done) in enumerate(
        (
            ({"reason": "finished", "step": 4}, OPTIONS, True),
            ({"reason": "finished", "step": 4}, timed, True),
            ({"reason": "finished", "step": 3}, OPTIONS, False),
            ({"reason": "early stop", "step": 2}, OPTIONS, True),
            ("none", OPTIONS, False),
        )
    ):
        folder = make_run(f"run{number}", scored=False, end=end)
        assert is_trained(folder, PlannedRun("a", 0, folder, options).steps) is done


def test_scores_that_are_older_of_another_kind_or_another_way_to_predict_do_not_count(make_run):
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
