"""Comparisons as they are called: what is carried out, continued and refused, and what they say."""

import json
import os
import re
import shutil

import pytest

from cpu3d.__main__ import main
from cpu3d.data.manifest import remake
from cpu3d.data.store import write_store
from cpu3d.errors import InputError
from cpu3d.experiments import compare as command
from cpu3d.experiments import runner
from cpu3d.report.status import set_status
from cpu3d.run.config_json import load_config
from cpu3d.run.log import append_event, last_end
from cpu3d.util.lock import locked
from records.files import read_records
from records.tables import comparisons_markdown
from tests.cpu3d.runs import run_command, shown_cases

SMALL = ["--filters", 2, "--depth", 2, "--dtype", "float32", "--curriculum", "off"]
WHOLE = ["--variant", "whole", "--mode whole"]
VARIANTS = [*WHOLE, "--variant", "patch", "--mode patch --patch 16 16 16"]


def compare(*options):
    return run_command(command, *options)


def results(out):
    return json.loads((out / "results.json").read_text())


def done(*runs):
    return [f"{what} {name}" for name in runs for what in ("train", "evaluate")]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def small(phantom_store, out):
    """Options of a comparison of small networks on the phantoms."""
    return ["--store", phantom_store.folder, "--out", out, *SMALL]


@pytest.fixture
def chosen(small):
    """Options of a comparison of whole volumes and patches."""
    return [*small, *VARIANTS, "--epochs", 2, "--seeds", 0, 1]


def test_a_comparison_is_carried_out_continued_and_recorded(
    without_pictures, commands, chosen, out, tmp_path
):
    record = tmp_path / "records" / "compare.jsonl"
    commands.cut_at = 6
    with pytest.raises(KeyboardInterrupt):
        compare(*chosen)
    cut = [*done("whole-seed0", "patch-seed0", "whole-seed1"), "train patch-seed1"]
    assert commands.seen() == cut
    commands.cut_at = -1
    states = [part.state for part in set_status(out).runs]
    assert states == [*["scored"] * 3, "interrupted"]
    assert main(["status", "--run", str(out)]) == 1
    assert not (out / "results.json").exists()
    run = out / "runs/patch-seed0"
    path = run / "evaluation/scores.json"
    scores = json.loads(path.read_text())
    scores["cases"][0]["regions"]["ET"]["dice"] -= 0.5
    scores["peak_rss_bytes"] = 2**50
    path.write_text(json.dumps(scores))
    most = dict.fromkeys(("seconds", "peak_rss_bytes", "allocator_peak_bytes"), 2**50)
    append_event(run, {**last_end(run), **most})
    assert compare(*chosen, "--record", record) == 0
    assert commands.seen() == done("patch-seed1")
    assert main(["status", "--run", str(out)]) == 0
    assert {load_config(run).validations for run in (out / "runs").iterdir()} == {4}
    patch = results(out)["variants"]["patch"]
    sd = patch["scores"]["mean"]["dice"]["sd"]
    assert sd == pytest.approx(0.5 / 3 / 2**0.5), "of two values that differ by 0.5 in a region"
    largest = [name for name, cost in patch["costs"].items() if cost == 2**50]
    assert largest == ["train_peak_bytes", "allocator_peak_bytes", "predict_peak_bytes"]
    assert patch["costs"]["train_s"] > 2**48, "of two the median is the mean"
    (line,) = read_records(record, "compare")
    assert str(tmp_path) not in json.dumps(line), "a record names no folder"
    page = comparisons_markdown([line, line])
    assert any(row.startswith("| ET | patch | HD95 (less is better) | **") for row in page)
    assert page == comparisons_markdown([line]), "the newest of a title counts"


@pytest.mark.parametrize("lacking", ["whole", "patch"])
def test_a_run_that_diverges_is_left_out_and_named(
    without_pictures, commands, chosen, out, capsys, lacking
):
    commands.diverges = f"{lacking}-seed0"
    seen = done("whole-seed0", "patch-seed0", "whole-seed1", "patch-seed1")
    seen.remove(f"evaluate {lacking}-seed0")
    for called in (seen, []):
        assert compare(*chosen) == 1
        assert commands.seen() == called, "it would end so again"
    (line,) = results(out)["failed"]
    assert line == f"{lacking}, seed 0, is left out: train diverged."
    assert line in capsys.readouterr().err
    assert line in (out / "report.html").read_text()
    assert results(out)["variants"][lacking]["seeds"] == [1]
    difference = results(out)["differences"]["patch"]["ET"]["dice"]
    assert difference["seeds"] == 1, "only a seed that both have is paired"


def test_a_dry_run_writes_nothing_and_a_damaged_case_is_named_before_anything_is_trained(
    commands, tiny_store, out, capsys
):
    words = ["--store", tiny_store.folder, "--out", out, *SMALL, *WHOLE]
    assert compare(*words, "--dry-run") == 0
    assert "1 variant x 3 seeds, each for " in capsys.readouterr().out
    os.truncate(next((tiny_store.folder / "cases").glob("e.x.*")), 100)
    with pytest.raises(InputError, match=r"e\.x\.npy must be \d+ bytes long, got 100"):
        compare(*words)
    split = {"train": tuple("abc"), "val": tuple("def"), "test": ()}
    write_store(tiny_store.folder, remake(tiny_store.manifest, split=split))
    with pytest.raises(InputError, match="--store must hold test cases, got none"):
        compare(*words)
    assert not out.exists()


def test_another_comparison_a_second_process_or_a_damaged_plan_is_refused(
    commands, chosen, without_pictures, out
):
    out.mkdir()
    (out / "notes.txt").write_text("{}")
    with pytest.raises(InputError, match=r"must be empty or hold a compare.json, got notes.txt"):
        compare(*chosen)
    (out / "notes.txt").unlink()
    with locked(out, "comparison"), pytest.raises(InputError, match="one process at a time"):
        compare(*chosen)
    assert compare(*chosen) == 0
    commands.seen()
    path = out / "compare.json"
    path.write_text(path.read_text().replace('split_hash": "', 'split_hash": "0'))
    with pytest.raises(InputError, match="variants, split_hash, folds, validations and budget;"):
        compare(*chosen, "--epochs", 3, "--norm", "batch", "--folds", 2, "--validations", 2)
    path.write_text(re.sub('"steps": [0-9]+', '"steps": "4"', path.read_text()))
    with pytest.raises(InputError, match=r"plan\[0\].steps must be"):
        compare(*chosen)
    assert commands.seen() == []


def test_the_results_are_those_of_the_runs(commands, chosen, out, capsys):
    assert compare(*chosen) == 0
    assert "0 / 1 / 0" in capsys.readouterr().out, "better, worse and equal cases"
    content = results(out)
    assert (content["baseline"], list(content["variants"])) == ("whole", ["whole", "patch"])
    difference = content["differences"]["patch"]["ET"]
    assert difference["dice"]["seeds"] == 2
    assert difference["dice"]["mean"] < 0, "it is a voxel off"
    assert difference["dice"]["worse"] == difference["hd95_mm"]["worse"] == content["cases"]
    page = re.sub(r">\s+<", "><", (out / "report.html").read_text())
    assert "<td>mode</td><td>whole</td><td>patch</td>" in page
    assert re.search(r"voxels seen</td>(<td[^>]*>0\.2 M</td>){2}", page)
    assert "Differences to whole" in page
    for title in ("every case, mean", "over voxels", "over seconds"):
        assert re.search(f'<img src="data:image/png;base64,[^"]+" alt="[^"]*{title}', page), title
    assert str(out) not in page, "it names no folder of the machine"
    (case,) = shown_cases(out / "report.html")
    names = [prediction["name"] for prediction in case["predictions"]]
    assert names == ["whole, seed 0", "patch, seed 0"]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--seeds", "1", "1"], "--seeds"),
        (WHOLE, "--variant"),
        (["--epochs", "3", "--minutes", "10"], "--epochs"),
    ],
)
def test_options_that_are_out_of_range_or_do_not_suit_are_named(out, options, name):
    with pytest.raises(InputError, match=f"^{name} "):
        compare("--out", out, "--store", "s", *WHOLE, *options)


def test_bad_variants_are_named_all_at_once(small):
    variants = ["--variant", "a", "--mode patch --patch 99 99 99"]
    variants += ["--variant", "b", "--mode patch --patch 15 8 8"]
    with pytest.raises(InputError) as caught:
        compare(*small, *variants)
    named = {problem.split(":")[0] for problem in caught.value.problems}
    assert named == {"variant a", "variant b"}


def test_a_variant_is_really_trained_and_scored(small, out, monkeypatch, without_pictures):
    monkeypatch.setattr(runner, "call", lambda command, *more, **about: main(command))
    words = ["--policy", "speed", "--minutes", 0.005, "--validations", 1, "--seeds", 3]
    assert compare(*small, *words, "--variant", "p", "--mode patch --patch 16 16 16") == 0
    (run,) = results(out)["runs"]
    config = load_config(out / "runs/p-seed3")
    assert (config.budget_minutes, config.validations, config.seed) == (0.005, 1, 3)
    assert run["train_peak_bytes"] > run["allocator_peak_bytes"] > 0


def test_folds_score_each_case_once_by_the_fold_that_held_it_out(
    commands, phantom_store, small, out, capsys, without_pictures
):
    words = [*small, "--epochs", 1, "--seeds", 0, "--folds", 2]
    words += [*WHOLE, "--variant", "slow", "--learning-rate 1e-6"]
    assert compare(*words) == 0
    assert commands.seen() == done("fold-1", "fold-2") * 2
    split = phantom_store.manifest.split
    content = results(out)
    assert content["cases"] == len(split["train"] + split["val"]), "each once, and no test case"
    assert [run["fold"] for run in content["runs"]] == ["1/2", "2/2"] * 2
    assert content["differences"]["slow"]["WT"]["dice"]["cases"] == content["cases"]
    assert "by the fold that held it out" in capsys.readouterr().out
    scores = [case["scores"] for case in shown_cases(out / "report.html")]
    assert scores == sorted(scores, reverse=True), "the best case first"
    assert compare(*words) == 0
    assert commands.seen() == []
    status = set_status(out)
    assert [part.state for part in status.runs] == ["scored"] * 4
    assert "predict" not in status.advice
    for name in ("status", "report", "evaluate"):  # the folds answer together
        assert main([name, "--run", str(out / "runs" / "whole-seed0")]) == 0
    shutil.rmtree(out / "runs/slow-seed0/fold-2")
    commands.diverges = "fold-2"
    assert compare(*words) == 1, "but without a variant"
