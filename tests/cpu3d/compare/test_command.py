import argparse
import json
import os
import shutil
import signal
import threading

import pytest

from cpu3d.compare import command, report
from cpu3d.compare.report import comparisons_markdown, summary_markdown
from cpu3d.compare.run import TIMED_FOLDER, read_run
from cpu3d.config import load_config
from cpu3d.errors import InputError
from cpu3d.util.records import read_records

SMALL = ["--filters", "2", "--depth", "3", "--dtype", "float32"]
VARIANTS = ["--variant", "whole", "--mode whole", "--variant", "patch", "--mode patch --patch 8 8 8"]


def compare(*options):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(list(map(str, options))))


def kept(out):
    return json.loads((out / "compare.json").read_text())


def done(*runs):
    return [f"{what} {name}" for name in runs for what in ("train", "evaluate")]


@pytest.fixture
def asked(stage, tiny_store, tmp_path):
    """Options of a comparison of whole volumes and patches that `stand_in.py` carries out."""
    return ["--store", tiny_store.folder, "--out", tmp_path / "out", *SMALL, *VARIANTS]


@pytest.fixture
def no_page(monkeypatch):
    """The pictures of a page take most of the time, and are seen in other tests."""
    monkeypatch.setattr(report, "page_sections", lambda *args, **more: [])


def test_a_comparison_is_carried_out_added_to_and_kept(stage, asked, tmp_path, capsys):
    asked, out = [*asked, "--epochs", 2], tmp_path / "out"
    record = tmp_path / "records" / "compare.jsonl"
    assert compare(*asked, "--seeds", 0, "--record", record) == 0
    assert stage.calls() == done("whole-seed0", "patch-seed0")
    assert "Differences to whole" in capsys.readouterr().out

    before = kept(out)
    assert compare(*asked, "--seeds", 0) == 0
    assert stage.calls() == [], "all is done"
    assert kept(out) == before
    assert compare(*asked, "--seeds", 1, "--json") == 0
    assert stage.calls() == done("whole-seed1", "patch-seed1")
    assert kept(out)["seeds"] == [0, 1]
    assert kept(out)["results"]["differences"]["patch"]["mean"]["dice"]["mean"] == 0
    assert (out / "report.html").is_file()
    runs = [load_config(out / "runs" / f"{name}-seed{seed}") for name in ("whole", "patch") for seed in (0, 1)]
    assert [run.validations for run in runs] == [4] * 4

    (line,) = read_records(record, "compare")
    assert line["budget"] == "the voxels of 2 epochs of whole each"
    assert str(tmp_path) not in json.dumps(line), "a record names no folder"
    assert any(row.startswith(f"| {line['title']} | patch, mean |") for row in summary_markdown([line]))
    assert any(row.startswith("| mean | patch | Dice | ") for row in comparisons_markdown([line, line]))
    assert comparisons_markdown([line, line]) == comparisons_markdown([line]), "the newest of a title counts"


def test_a_folder_from_before_validations_were_counted_is_accepted(no_page, stage, asked, tmp_path):
    """As an earlier version planned it: by epochs between validations, and with no word of the warm-up."""
    out = tmp_path / "out"
    asked = [*asked, "--epochs", 2, "--seeds", 0]
    compare(*asked)
    content = kept(out)
    for course in content["plan"]:
        del course["validations"], course["warmup_steps"]
        course["validate_every"] = 3
        path = out / "runs" / f"{course['name']}-seed0" / "config.json"
        config = {**json.loads(path.read_text()), "validate_every": 3, "warmup_steps": 10}
        del config["validations"]
        path.write_text(json.dumps(config))
    (out / "compare.json").write_text(json.dumps({**content, "results": None}))
    stage.calls()
    assert compare(*asked) == 0
    assert stage.calls() == []
    assert kept(out)["plan"] == content["plan"]
    assert kept(out)["results"] == content["results"]


def test_a_run_that_diverges_is_left_out_and_told(stage, asked, tmp_path, capsys):
    stage.tell("fail", "patch-seed0 4 error: loss must be finite, got nan at step 1")
    record = tmp_path / "compare.jsonl"
    assert compare(*asked, "--epochs", 2, "--seeds", 0, 1, "--record", record) == 1
    assert stage.calls() == [*done("whole-seed0"), "train patch-seed0", *done("whole-seed1", "patch-seed1")]
    words = "patch, seed 0, is left out: train diverged."
    assert "loss must be finite, got nan" in capsys.readouterr().err
    assert kept(tmp_path / "out")["results"]["failed"] == [words]
    assert read_records(record, "compare")[0]["failed"] == [words]
    assert words in (tmp_path / "out" / "report.html").read_text()
    assert kept(tmp_path / "out")["results"]["variants"]["patch"]["seeds"] == [1]
    assert compare(*asked, "--epochs", 2, "--seeds", 0, 1) == 1
    assert stage.calls() == [], "the verdict is kept"


def test_added_seeds_drop_the_results_until_they_are_done(no_page, stage, asked, tmp_path):
    asked = [*asked, "--epochs", 2]
    compare(*asked, "--seeds", 0)
    stage.tell("cut")

    def interrupt():
        stage.waited("waits")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        compare(*asked, "--seeds", 0, 1)
    assert kept(tmp_path / "out")["seeds"] == [0, 1]
    assert kept(tmp_path / "out")["results"] is None


def test_minutes_become_steps_once_and_for_all(no_page, stage, asked, tmp_path):
    """A step on whole volumes is made up to take 2 s, one on patches 0.5 s."""
    out, asked = tmp_path / "out", [*asked, "--minutes", 0.2, "--seeds", 0]
    assert compare(*asked) == 0
    timed = ["whole-timed0", "patch-timed0", "patch-timed1", "whole-timed1"]
    assert stage.calls() == [*(f"train {name}" for name in timed), *done("whole-seed0", "patch-seed0")]
    assert [(course["steps"], course["step_s"]) for course in kept(out)["plan"]] == [(6, 2.0), (24, 0.5)]
    assert not (out / TIMED_FOLDER).exists()
    (out / TIMED_FOLDER / "whole-timed0").mkdir(parents=True)  # as a kill between keeping and removing leaves it
    (out / "warm-up").mkdir()  # a user's own
    assert compare(*asked) == 0
    assert stage.calls() == []
    assert not (out / TIMED_FOLDER).exists()
    assert (out / "warm-up").is_dir()


def test_other_settings_in_the_same_folder_are_refused_all_at_once(no_page, stage, asked):
    asked = [*asked, "--seeds", 0]
    compare(*asked, "--epochs", 2)
    stage.calls()
    with pytest.raises(InputError) as caught:
        compare(*asked, "--epochs", 3, "--learning-rate", 0.5)
    assert "budget.amount must stay as comparison" in caught.value.problems[0]
    assert "got 3 for 2" in caught.value.problems[0]
    assert "variants.whole.learning_rate" in caught.value.problems[1]
    assert stage.calls() == []


def test_a_dry_run_prints_the_plan_and_writes_nothing(stage, tiny_store, tmp_path, capsys):
    out = tmp_path / "out"
    assert compare("--store", tiny_store.folder, "--out", out, *SMALL, "--dry-run") == 0
    assert "patch-half" in capsys.readouterr().err
    assert not out.exists()
    assert stage.calls() == []


@pytest.mark.parametrize("study", [(), ("--resolutions", 0.5, 1)])
def test_a_damaged_file_of_a_case_to_score_is_told_before_anything_is_trained(study, stage, tiny_store, tmp_path):
    file = next((tiny_store.folder / "cases").glob("e.x.*"))
    os.truncate(file, 100)
    with pytest.raises(InputError, match=r"e\.x\.npy must be \d+ bytes long, got 100"):
        compare("--store", tiny_store.folder, "--out", tmp_path / "out", *SMALL, "--epochs", 2, *study)
    assert stage.calls() == []


@pytest.mark.parametrize("name", ["warm-up/notes.txt", "report.html"])
def test_a_folder_of_other_files_is_refused_and_left_as_it_is(stage, asked, make_run, tmp_path, name):
    mine = tmp_path / "out" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    for words in ([*asked, "--minutes", 0.2], ["--runs", make_run("whole"), "--out", tmp_path / "out"]):
        with pytest.raises(InputError, match=r"--out .*out must be empty or hold a compare\.json"):
            compare(*words)
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == [mine]
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    ("part", "value", "told"),
    [
        ("seeds", ["0"], r"seeds\[0\] must be int"),
        ("seeds", [], "no seeds"),
        ("results", 3, "results must be"),
        ("results", {"difference": float("nan")}, "Out of range float"),
        ("steps", "4", r"plan\[0\].steps must be int, got 4"),
        ("grid", [8, 8], r"plan\[0\].grid must be"),
        ("name", "../whole", "plan of comparison .* must be of its variants, got ../whole, patch"),
    ],
)
def test_a_damaged_plan_is_refused_by_name_and_nothing_is_trained(no_page, stage, asked, tmp_path, part, value, told):
    asked = [*asked, "--epochs", 2, "--seeds", 0]
    compare(*asked)
    stage.calls()
    content = kept(tmp_path / "out")
    (content if part in content else content["plan"][0])[part] = value
    (tmp_path / "out" / "compare.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=told):
        compare(*asked)
    assert stage.calls() == []


def test_folders_that_are_there_are_compared_without_training(no_page, stage, make_run, tmp_path, capsys):
    folders = [make_run("whole", 0), make_run("patch", 0, scored=False, mode="patch", grid=(8, 8, 8))]
    with pytest.raises(InputError, match=r"--runs must come without --epochs, --variant"):
        compare("--runs", *folders, "--out", tmp_path / "out", "--epochs", 3, *VARIANTS)
    for called in (["evaluate patch-seed0"], []):
        assert compare("--runs", *folders, "--out", tmp_path / "out") == 0
        assert stage.calls() == called, "what has scores keeps them"
        assert kept(tmp_path / "out")["results"]["baseline"] == "whole"
    assert "patch" in capsys.readouterr().out
    assert not (folders[1] / "evaluation").exists(), "a user's folder is left as it is"


def test_a_user_s_own_scores_are_neither_taken_for_others_nor_replaced(no_page, stage, make_run, tmp_path):
    folders = [make_run("whole", 0), make_run("other", 0, learning_rate=0.5)]
    before = [(folder / "evaluation" / "scores.json").read_bytes() for folder in folders]
    assert compare("--runs", *folders, "--out", tmp_path / "out", "--tolerance", 2.5) == 0
    assert stage.calls() == ["evaluate whole-seed0", "evaluate other-seed0"]
    assert [(folder / "evaluation" / "scores.json").read_bytes() for folder in folders] == before
    ours = tmp_path / "out" / "evaluations" / "other-seed0"
    assert json.loads((ours / "evaluation" / "scores.json").read_text())["tolerance_mm"] == 2.5
    assert read_run("other", 0, folders[1], "test", scored=ours).evaluation == ours / "evaluation"


def test_scored_folders_are_compared_when_their_store_is_gone(stage, make_run, tiny_store, tmp_path):
    folders = [make_run("whole", 0), make_run("other", 0, learning_rate=0.5, shift=1)]
    bare = make_run("bare", 0, learning_rate=0.1, scored=False)
    shutil.rmtree(tiny_store.folder)
    assert compare("--runs", *folders, "--out", tmp_path / "out") == 0
    assert stage.calls() == []
    with pytest.raises(InputError, match="must hold a finished manifest"):
        compare("--runs", *folders, bare, "--out", tmp_path / "more")
    with pytest.raises(InputError, match="must hold a finished manifest"):
        compare("--runs", *folders, "--out", tmp_path / "out", "--record", tmp_path / "record.jsonl")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--store must name a store"),
        (["--store", "s", "--validations", "0"], "--validations must be at least 1"),
        (["--store", "s", "--seeds", "1", "1"], "--seeds must be different"),
        (["--store", "s", *VARIANTS, *VARIANTS], "got patch twice"),
        (["--store", "s"], "store s must hold a finished manifest"),
    ],
)
def test_bad_options_are_told(tmp_path, options, words):
    with pytest.raises(InputError, match=words):
        compare("--out", tmp_path / "out", *options)


def test_bad_variants_are_told_all_at_once(tiny_store, tmp_path):
    variants = ["--variant", "a", "--mode patch --patch 99 99 99", "--variant", "b", "--mode patch --patch 10 8 8"]
    with pytest.raises(InputError) as caught:
        compare("--store", tiny_store.folder, "--out", tmp_path / "out", *SMALL, *variants)
    assert {problem.split(":")[0] for problem in caught.value.problems} == {"variant a", "variant b"}


REAL = ["--epochs", 1, "--validations", 1, "--seeds", 3, "--policy", "speed"]


def test_a_variant_is_really_trained_and_scored(phantom_store, tmp_path):
    asked = ["--store", phantom_store.folder, "--out", tmp_path, *SMALL, *REAL]
    assert compare(*asked, "--variant", "patch", "--mode patch --patch 16 16 16") == 0
    found = kept(tmp_path)
    (run,) = found["results"]["runs"]
    assert (run["variant"], run["seed"], run["steps"]) == ("patch", 3, found["plan"][0]["steps"])
    assert run["train_peak_bytes"] > run["allocator_peak_bytes"] > 0
    assert run["predict_peak_bytes"] > 0
    assert (tmp_path / "report.html").stat().st_size > 50_000
