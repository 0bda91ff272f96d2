"""Comparisons as they are called: what is carried out, continued, added to and refused."""

import json
import os

import pytest

from cpu3d import processes
from cpu3d.compare import command, results
from cpu3d.compare.results import comparisons_markdown
from cpu3d.errors import InputError
from cpu3d.run.config_json import load_config
from cpu3d.run.log import append_event
from cpu3d.util.records import read_records
from tests.cpu3d.runs import run_command

SMALL = ["--filters", "2", "--depth", "3", "--dtype", "float32"]
VARIANTS = [
    "--variant",
    "whole",
    "--mode whole",
    "--variant",
    "patch",
    "--mode patch --patch 8 8 8",
]


def compare(*options):
    return run_command(command, *options)


def kept(out):
    return json.loads((out / "compare.json").read_text())


def done(*runs):
    return [f"{what} {name}" for name in runs for what in ("train", "evaluate")]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def chosen(tiny_store, out):
    """Options of a comparison of whole volumes and patches that `stand_in.py` carries out."""
    return ["--store", tiny_store.folder, "--out", out, *SMALL, *VARIANTS]


@pytest.fixture
def no_page(monkeypatch):
    """The pictures of a page take most of the time, and are seen in other tests."""
    monkeypatch.setattr(results, "page_sections", lambda *args, **more: [])


def test_a_comparison_is_carried_out_added_to_and_kept(
    stage, chosen, out, tmp_path, capsys, monkeypatch
):
    chosen, record = [*chosen, "--epochs", 2], tmp_path / "records" / "compare.jsonl"
    assert compare(*chosen, "--seeds", 0, "--record", record) == 0
    assert stage.calls() == done("whole-seed0", "patch-seed0")
    assert "Differences to whole" in capsys.readouterr().out
    assert (out / "report.html").is_file()
    before = kept(out)
    assert compare(*chosen, "--seeds", 0) == 0
    assert stage.calls() == [], "all is done"
    assert kept(out) == before
    (line,) = read_records(record, "compare")
    assert "2 epochs of whole" in line["budget"]
    assert str(tmp_path) not in json.dumps(line), "a record names no folder"
    assert any(
        row.startswith("| mean | patch | Dice | +0.000 (")
        for row in comparisons_markdown([line, line])
    )
    assert comparisons_markdown([line, line]) == comparisons_markdown([line]), (
        "the newest of a title counts"
    )

    def interrupted(*_, **more):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(processes, "call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compare(*chosen, "--seeds", 1)
    assert (kept(out)["seeds"], kept(out)["results"]) == ([0, 1], None), (
        "there is no result before all is done"
    )
    assert compare(*chosen, "--seeds", 1) == 0
    assert stage.calls() == done("whole-seed1", "patch-seed1")
    assert kept(out)["seeds"] == [0, 1]
    assert kept(out)["results"]["differences"]["patch"]["mean"]["dice"]["mean"] == 0
    assert {load_config(run).validations for run in (out / "runs").iterdir()} == {4}


def test_a_run_that_diverges_is_left_out_and_named(no_page, stage, chosen, out, tmp_path, capsys):
    stage.tell("fail", "patch-seed0 4 error: loss must be finite, got nan at step 1")
    chosen, record = [*chosen, "--epochs", 2, "--seeds", 0, 1], tmp_path / "compare.jsonl"
    assert compare(*chosen, "--record", record) == 1
    assert stage.calls() == [
        *done("whole-seed0"),
        "train patch-seed0",
        *done("whole-seed1", "patch-seed1"),
    ]
    (line,) = kept(out)["results"]["failed"]
    assert ("patch, seed 0" in line, "diverged" in line, line in capsys.readouterr().err) == (
        True,
        True,
        True,
    )
    assert [line] == read_records(record, "compare")[0]["failed"]
    assert kept(out)["results"]["variants"]["patch"]["seeds"] == [1]
    assert compare(*chosen) == 1
    assert stage.calls() == [], "it is known"


def test_a_dry_run_prints_the_plan_and_writes_nothing(stage, tiny_store, out, capsys):
    assert compare("--store", tiny_store.folder, "--out", out, *SMALL, "--dry-run") == 0
    assert "patch-half" in capsys.readouterr().out
    assert not out.exists()
    assert stage.calls() == []


def test_a_damaged_file_of_a_case_to_score_is_named_before_anything_is_trained(
    stage, chosen, tiny_store
):
    os.truncate(next((tiny_store.folder / "cases").glob("e.x.*")), 100)
    with pytest.raises(InputError, match=r"e\.x\.npy must be \d+ bytes long, got 100"):
        compare(*chosen, "--epochs", 2)
    assert stage.calls() == []


def test_a_folder_of_other_files_is_refused_and_left_as_it_is(stage, chosen, make_run, out):
    mine = out / "report.html"
    out.mkdir()
    mine.write_text("mine")
    for words in ([*chosen, "--minutes", 0.2], ["--runs", make_run("whole"), "--out", out]):
        with pytest.raises(
            InputError, match=r"--out .*out must be empty or hold a compare\.json, got report"
        ):
            compare(*words)
    assert ([mine], mine.read_text()) == (list(out.iterdir()), "mine")


@pytest.mark.parametrize(
    ("name", "kind"), [("config.json", "a run"), ("folds.json", "a folder of folds")]
)
def test_a_folder_of_another_command_is_named_for_what_it_is(stage, chosen, out, name, kind):
    (out / "checkpoints").mkdir(parents=True)
    (out / name).write_text("{}")
    with pytest.raises(InputError, match=f"must be empty or hold a compare.json, got {kind};"):
        compare(*chosen, "--epochs", 2)


def test_a_damaged_plan_is_refused_by_name_and_nothing_is_trained(stage, chosen, out):
    chosen = [*chosen, "--epochs", 2, "--seeds", 0]
    stage.tell("fail", "* 1 no")
    with pytest.raises(InputError):
        compare(*chosen)
    stage.calls()
    whole = kept(out)
    for part, value, problem in (
        ("seeds", ["0"], r"seeds\[0\] must be int"),
        ("schema", 2, "schema 2 of another version"),
        ("steps", "4", r"plan\[0\].steps must be int"),
        ("grid", [8, 8], r"plan\[0\].grid must be"),
        ("name", "../whole", "a plan of ../whole, patch"),
    ):
        content = json.loads(json.dumps(whole))
        (content if part in content else content["plan"][0])[part] = value
        (out / "compare.json").write_text(json.dumps(content))
        with pytest.raises(InputError, match=problem):
            compare(*chosen)
    assert stage.calls() == []


def test_what_was_asked_for_otherwise_is_refused(stage, chosen, no_page, out):
    assert compare(*chosen, "--epochs", 2, "--seeds", 0) == 0
    stage.calls()
    with pytest.raises(InputError) as caught:
        compare(*chosen, "--epochs", 3, "--norm", "batch")
    names = {problem.split()[0] for problem in caught.value.problems}
    assert names == {"variants.whole.norm", "variants.patch.norm", "budget.amount"}
    assert stage.calls() == []


def test_scored_runs_are_compared_without_training_or_changing_them(no_page, stage, make_run, out):
    runs = [
        make_run("whole", 0),
        make_run("whole", 1),
        make_run("patch", 0, mode="patch", grid=(8, 8, 8)),
    ]
    assert compare("--runs", *runs, "--out", out) == 0
    results = kept(out)["results"]
    assert (results["baseline"], list(results["variants"])) == ("whole", ["whole", "patch"])
    assert results["differences"]["patch"]["WT"]["dice"]["seeds"] == 1
    unscored, cut, lost = (
        make_run("late", scored=False),
        make_run("cut", end="none"),
        make_run("lost", end="none"),
    )
    append_event(
        lost, {"event": "diverged", "step": 4, "reason": "weights must be finite, got NaN"}
    )
    with pytest.raises(InputError) as caught:
        compare("--runs", *runs, runs[0], unscored, cut, lost, "--out", out)
    expected = (
        "got whole, seed 0 for ",
        "current scores",
        "to its end, got end: none",
        "to its end, got diverged",
    )
    for problem, words in zip(caught.value.problems, expected):
        assert words in problem
    assert len(caught.value.problems) == len(expected)
    assert stage.calls() == []


# --- What is refused ---

STORE = ["--store", "s"]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ([], "--store"),
        ([*STORE, "--validations", "0"], "--validations"),
        ([*STORE, "--seeds", "1", "1"], "--seeds"),
        ([*STORE, *VARIANTS, *VARIANTS], "--variant"),
        ([*STORE, "--tolerance", "nan"], "--tolerance"),
        ([*STORE, "--minutes", "inf"], "--minutes"),
        ([*STORE, "--epochs", "3", "--minutes", "10"], "--epochs"),
        (["--runs", "a", "--epochs", "3", *VARIANTS], "--runs"),
    ],
)
def test_options_that_are_out_of_range_or_do_not_suit_are_named(out, options, names):
    with pytest.raises(InputError) as caught:
        compare("--out", out, *options)
    assert [problem.split()[0] for problem in caught.value.problems] == names.split()


def test_bad_variants_are_named_all_at_once(tiny_store, out):
    variants = [
        "--variant",
        "a",
        "--mode patch --patch 99 99 99",
        "--variant",
        "b",
        "--mode patch --patch 10 8 8",
    ]
    with pytest.raises(InputError) as caught:
        compare("--store", tiny_store.folder, "--out", out, *SMALL, *variants)
    assert {problem.split(":")[0] for problem in caught.value.problems} == {
        "variant a",
        "variant b",
    }


def test_a_variant_is_really_trained_and_scored(phantom_store, out):
    words = [
        "--store",
        phantom_store.folder,
        "--out",
        out,
        "--filters",
        2,
        "--depth",
        2,
        "--dtype",
        "float32",
    ]
    words += [
        "--minutes",
        0.02,
        "--validations",
        1,
        "--seeds",
        3,
        "--policy",
        "speed",
        "--curriculum",
        "off",
    ]
    assert compare(*words, "--variant", "p", "--mode patch --patch 16 16 16") == 0
    (run,), (course,) = kept(out)["results"]["runs"], kept(out)["plan"]
    config = load_config(out / "runs/p-seed3")
    assert (course["steps"], config.budget_minutes, config.validations) == (None, 0.02, 1)
    least_steps = config.epochs * len(
        phantom_store.manifest.split["train"]
    )  # at least a patch a case
    assert least_steps > run["steps"], "the epochs must be no limit"
    assert (run["variant"], run["seed"]) == ("p", 3)
    assert run["steps"] >= 1
    assert run["train_peak_bytes"] > run["allocator_peak_bytes"] > 0
    assert run["predict_peak_bytes"] > 0
    assert (out / "report.html").stat().st_size > 50_000
