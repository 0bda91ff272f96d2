import argparse
import json
import sys
from pathlib import Path

import pytest

from cpu3d.bench.record import read_records
from cpu3d.compare import command, runner
from cpu3d.compare.markdown import page_lines, summary_lines
from cpu3d.errors import InputError
from cpu3d.lock import locked

SMALL = ["--filters", "2", "--depth", "3", "--dtype", "float32"]
VARIANTS = ["--variant", "whole", "--mode whole", "--variant", "patch", "--mode patch --patch 8 8 8"]


def compare(*options):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(list(map(str, options))))


@pytest.fixture
def stage(make_run, monkeypatch):
    """Runs are copies of one that is there, and `calls.txt` says which were asked for."""
    template = make_run("template", shift=1)
    stand_in = Path(__file__).with_name("stand_in.py")
    monkeypatch.setattr(runner, "PROGRAM", (sys.executable, str(stand_in), str(template)))
    monkeypatch.setattr(runner, "POLL_S", 0.05)
    return template.parent


def calls(stage):
    path = stage / "calls.txt"
    found = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return found


def test_a_comparison_is_carried_out_added_to_and_kept(stage, tiny_store, tmp_path, capsys):
    asked = ["--store", tiny_store.folder, "--out", tmp_path / "out", "--epochs", 2, *SMALL, *VARIANTS]
    record = tmp_path / "records" / "compare.jsonl"
    assert compare(*asked, "--seeds", 0, "--record", record) == 0
    assert calls(stage) == [f"{what} {name}-seed0" for name in ("whole", "patch") for what in ("train", "evaluate")]
    assert "Paired differences to whole" in capsys.readouterr().out

    assert compare(*asked, "--seeds", 0) == 0
    assert calls(stage) == [], "all is done"
    assert compare(*asked, "--seeds", 1, "--json") == 0
    assert calls(stage) == [f"{what} {name}-seed1" for name in ("whole", "patch") for what in ("train", "evaluate")]
    kept = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert kept["seeds"] == [0, 1]
    assert kept["results"]["differences"]["patch"]["mean"]["dice"]["mean"] == 0
    assert (tmp_path / "out" / "report.html").is_file()

    (line,) = read_records(record, "compare")
    assert line["reading"][0] == "patch: no difference to whole in any score."
    assert str(tmp_path) not in json.dumps(line), "a record names no folder"
    assert len(summary_lines([line])) == (2 + 4) + 1 + (2 + 2), "four regions, two variants"
    assert any(row.startswith("| mean | patch |") for row in page_lines([line, line]))
    assert page_lines([line, line]) == page_lines([line]), "the newest of a title counts"


def test_other_settings_in_the_same_folder_are_refused_all_at_once(stage, tiny_store, tmp_path):
    asked = ["--store", tiny_store.folder, "--out", tmp_path / "out", *SMALL, *VARIANTS, "--seeds", 0]
    compare(*asked, "--epochs", 2)
    calls(stage)
    with pytest.raises(InputError) as caught:
        compare(*asked, "--epochs", 3, "--learning-rate", 0.5)
    assert "budget.amount must stay as comparison" in caught.value.problems[0]
    assert "got 3 for 2" in caught.value.problems[0]
    assert "variants.whole.learning_rate" in caught.value.problems[1]
    assert calls(stage) == []


def test_a_dry_run_prints_the_plan_and_writes_nothing(stage, tiny_store, tmp_path, capsys):
    out = tmp_path / "out"
    assert compare("--store", tiny_store.folder, "--out", out, *SMALL, "--dry-run") == 0
    assert "patch-half" in capsys.readouterr().err
    assert not out.exists()
    assert calls(stage) == []


def test_two_processes_do_not_write_one_comparison(stage, tiny_store, tmp_path):
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out", "test"), pytest.raises(InputError, match="one process at a time"):
        compare("--store", tiny_store.folder, "--out", tmp_path / "out", *SMALL, *VARIANTS)
    assert calls(stage) == []


def test_folders_that_are_there_are_compared_without_training(stage, make_run, tmp_path, capsys):
    folders = [make_run("whole", 0), make_run("patch", 0, scored=False, mode="patch", grid=(8, 8, 8))]
    with pytest.raises(InputError, match=r"--runs must come without --epochs, --variant"):
        compare("--runs", *folders, "--out", tmp_path / "out", "--epochs", 3, *VARIANTS)
    assert compare("--runs", *folders, "--out", tmp_path / "out") == 0
    assert calls(stage) == ["evaluate patch-seed0"], "what has scores keeps them"
    assert "patch" in capsys.readouterr().out
    kept = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert kept["results"]["baseline"] == "whole"


def test_runs_of_another_split_are_refused(make_run, tmp_path):
    folders = [make_run("whole", 0), make_run("other", 0, split_hash="0123456789ab", scored=False)]
    with pytest.raises(InputError, match=r"share their split_hash, got .* and 0123456789ab"):
        compare("--runs", *folders, "--out", tmp_path / "out")


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
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["variant a", "variant a", "variant b"]


REAL = ["--epochs", 1, "--validations", 1, "--seeds", 3, "--policy", "speed"]


def test_a_variant_is_really_trained_and_scored(phantom_store, tmp_path):
    asked = ["--store", phantom_store.folder, "--out", tmp_path, *SMALL, *REAL]
    assert compare(*asked, "--variant", "patch", "--mode patch --patch 16 16 16") == 0
    kept = json.loads((tmp_path / "compare.json").read_text())
    (run,) = kept["results"]["runs"]
    assert (run["variant"], run["seed"], run["steps"]) == ("patch", 3, kept["plan"][0]["steps"])
    assert run["train_peak_bytes"] > run["allocator_peak_bytes"] > 0
    assert run["predict_peak_bytes"] > 0
    assert (tmp_path / "report.html").stat().st_size > 50_000


@pytest.mark.slow
def test_whole_volumes_and_patches_really_see_as_much(phantom_store, tmp_path):
    asked = ["--store", phantom_store.folder, "--out", tmp_path, *SMALL, *REAL]
    assert compare(*asked) == 0
    kept = json.loads((tmp_path / "compare.json").read_text())
    whole, patch = kept["results"]["runs"]
    assert [run["variant"] for run in (whole, patch)] == ["whole", "patch-half"]
    assert abs(whole["voxels"] - patch["voxels"]) <= kept["plan"][1]["step_voxels"]
    assert kept["results"]["differences"]["patch-half"]["WT"]["dice"]["cases"] == 1
