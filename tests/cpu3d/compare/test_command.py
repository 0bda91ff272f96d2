"""Comparisons as they are called: what is carried out, continued, added to and refused."""

import json
import os
import shutil

import pytest

from cpu3d.compare import command, report
from cpu3d.compare import run as compare_run
from cpu3d.compare.report import comparisons_markdown
from cpu3d.errors import InputError
from cpu3d.settings import load_config
from cpu3d.util.records import read_records
from tests.cpu3d.runs import run_command

SMALL = ["--filters", "2", "--depth", "3", "--dtype", "float32"]
VARIANTS = ["--variant", "whole", "--mode whole", "--variant", "patch", "--mode patch --patch 8 8 8"]


def compare(*options):
    return run_command(command, *options)


def kept(out):
    return json.loads((out / "compare.json").read_text())


def keep(out, content):
    (out / "compare.json").write_text(json.dumps(content))


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
    monkeypatch.setattr(report, "page_sections", lambda *args, **more: [])


def test_a_comparison_is_carried_out_added_to_and_kept(stage, chosen, out, tmp_path, capsys, monkeypatch):
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
    assert line["budget"] == "the voxels of 2 epochs of whole each"
    assert str(tmp_path) not in json.dumps(line), "a record names no folder"
    assert any(row.startswith("| mean | patch | Dice | +0.000 (") for row in comparisons_markdown([line, line]))
    assert comparisons_markdown([line, line]) == comparisons_markdown([line]), "the newest of a title counts"

    def interrupted(*_, **more):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(compare_run, "call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compare(*chosen, "--seeds", 1)
    assert (kept(out)["seeds"], kept(out)["results"]) == ([0, 1], None), "there is no result before all is done"
    assert compare(*chosen, "--seeds", 1) == 0
    assert stage.calls() == done("whole-seed1", "patch-seed1")
    assert kept(out)["seeds"] == [0, 1]
    assert kept(out)["results"]["differences"]["patch"]["mean"]["dice"]["mean"] == 0
    assert {load_config(run).validations for run in (out / "runs").iterdir()} == {4}


def test_a_run_that_diverges_is_left_out_and_named(no_page, stage, chosen, out, tmp_path, capsys):
    stage.tell("fail", "patch-seed0 4 error: loss must be finite, got nan at step 1")
    chosen, record = [*chosen, "--epochs", 2, "--seeds", 0, 1], tmp_path / "compare.jsonl"
    assert compare(*chosen, "--record", record) == 1
    assert stage.calls() == [*done("whole-seed0"), "train patch-seed0", *done("whole-seed1", "patch-seed1")]
    line = "patch, seed 0, is left out: train diverged."
    assert line in capsys.readouterr().err
    assert kept(out)["results"]["failed"] == [line] == read_records(record, "compare")[0]["failed"]
    assert kept(out)["results"]["variants"]["patch"]["seeds"] == [1]
    assert compare(*chosen) == 1
    assert stage.calls() == [], "it is known"


@pytest.mark.parametrize(("shares", "name"), [((), "patch-half"), (("--resolutions", 0.5, 1), "r0.5-b1")])
def test_a_dry_run_prints_the_plan_and_writes_nothing(stage, tiny_store, out, capsys, shares, name):
    assert compare("--store", tiny_store.folder, "--out", out, *SMALL, "--dry-run", *shares) == 0
    assert name in capsys.readouterr().err
    assert not out.exists()
    assert stage.calls() == []


def test_a_damaged_file_of_a_case_to_score_is_named_before_anything_is_trained(stage, chosen, tiny_store):
    os.truncate(next((tiny_store.folder / "cases").glob("e.x.*")), 100)
    with pytest.raises(InputError, match=r"e\.x\.npy must be \d+ bytes long, got 100"):
        compare(*chosen, "--epochs", 2)
    assert stage.calls() == []


def test_a_folder_of_other_files_is_refused_and_left_as_it_is(stage, chosen, make_run, out):
    mine = out / "report.html"
    out.mkdir()
    mine.write_text("mine")
    for words in ([*chosen, "--minutes", 0.2], ["--runs", make_run("whole"), "--out", out]):
        with pytest.raises(InputError, match=r"--out .*out must be empty or hold a compare\.json"):
            compare(*words)
    assert ([mine], mine.read_text()) == (list(out.iterdir()), "mine")


def test_a_damaged_plan_is_refused_by_name_and_nothing_is_trained(stage, chosen, out):
    chosen = [*chosen, "--epochs", 2, "--seeds", 0]
    stage.tell("fail", "* 1 no")
    with pytest.raises(InputError):
        compare(*chosen)
    stage.calls()
    whole = kept(out)
    for part, value, problem in (
        ("seeds", ["0"], r"seeds\[0\] must be int"),
        ("schema", 1, "use the version that made it"),
        ("steps", "4", r"plan\[0\].steps must be int"),
        ("grid", [8, 8], r"plan\[0\].grid must be"),
        ("name", "../whole", "plan of comparison .* must be of its variants, got ../whole, patch"),
    ):
        content = json.loads(json.dumps(whole))
        (content if part in content else content["plan"][0])[part] = value
        keep(out, content)
        with pytest.raises(InputError, match=problem):
            compare(*chosen)
    assert stage.calls() == []


def test_folders_that_are_there_are_compared_without_training_or_changing_them(
    no_page, stage, make_run, tiny_store, out, tmp_path
):
    folders = [make_run("whole", 0), make_run("patch", 0, scored=False, mode="patch", grid=(8, 8, 8))]
    other = make_run("other", 0, learning_rate=0.5)
    for calls in (["evaluate patch-seed0"], []):
        assert compare("--runs", *folders, "--out", out) == 0
        assert stage.calls() == calls, "what has scores keeps them"
        assert kept(out)["results"]["baseline"] == "whole"
    assert not (folders[1] / "evaluation").exists(), "a user's folder is left as it is"
    before = (other / "evaluation/scores.json").read_bytes()
    assert compare("--runs", folders[0], other, "--out", tmp_path / "more", "--tolerance", 2.5) == 0
    assert stage.calls() == ["evaluate whole-seed0", "evaluate other-seed0"]
    assert (other / "evaluation/scores.json").read_bytes() == before, "of another tolerance, and the user's"
    ours = tmp_path / "more/evaluations/other-seed0/evaluation/scores.json"
    assert json.loads(ours.read_text())["tolerance_mm"] == 2.5
    shutil.rmtree(tiny_store.folder)
    assert compare("--runs", folders[0], other, "--out", tmp_path / "gone") == 0, "nobody needs the store"
    for words in (folders, (folders[0], other, "--record", tmp_path / "record.jsonl")):
        with pytest.raises(InputError, match="must hold a finished manifest"):
            compare("--runs", *words, "--out", tmp_path / "new")


# --- Resolutions ---


@pytest.fixture
def resolutions(stage, no_page, tiny_store, out):
    """resolutions(0.5, 1): for 40 epochs of 3 cases, 2 seeds."""

    def call(*shares, seeds=(0, 1), more=()):
        words = ["--store", tiny_store.folder, "--out", out, "--epochs", 40, *SMALL, "--seeds", *seeds, *more]
        return compare(*words, "--resolutions", *shares), kept(out)

    return call


def test_resolutions_are_variants_to_which_others_are_added(resolutions, stage, out, tmp_path):
    record = tmp_path / "resolutions.jsonl"
    code, content = resolutions(0.5, 1, more=["--record", record])
    assert code == 0
    order = [f"{name}-seed{seed}" for seed in (0, 1) for name in ("r1-b1", "r0.5-b1")]
    assert stage.calls() == done(*order)
    assert content["results"]["baseline"] == "r1-b1"
    configs = [load_config(out / "runs" / name) for name in order[:2]]
    assert [(one.resolution, one.steps, one.validations, one.warmup_steps) for one in configs] == [
        (1, 120, 4, 10),
        (0.5, 120, 4, 10),
    ]
    (line,) = read_records(record, "compare")
    assert line["budget"] == "40 epochs each"
    assert "| learning rate | 0.1 | 0.1 |" in comparisons_markdown([line])
    _, content = resolutions(0.75, seeds=[5], more=["--batches", 2])
    seeds = {name: one["seeds"] for name, one in content["results"]["variants"].items()}
    assert seeds == {name: [0, 1, 5] for name in ("r1-b1", "r0.5-b1", "r0.75-b2")}
    assert len(stage.calls()) == 2 * (2 + 3)
    assert load_config(out / "runs/r0.75-b2-seed5").steps == 60
    resolutions(1)
    assert stage.calls() == []
    assert kept(out) == content


def test_added_variants_have_as_many_validations_or_are_refused(resolutions, stage, out):
    """2 epochs of 3 cases: 6 steps at batch 1, 2 at batch 3; a run is validated at most once a step."""

    def call(*batches):
        _, content = resolutions(1, seeds=[0], more=["--epochs", 2, "--batches", *batches])
        return {course["name"]: course["validations"] for course in content["plan"]}

    wanted = {"r1-b1": 2, "r1-b3": 2}
    assert call(1, 3) == wanted
    shutil.rmtree(out)
    call(3)
    assert call(1) == wanted
    assert {load_config(run).validations for run in (out / "runs").iterdir()} == {2}
    shutil.rmtree(out)
    assert call(1) == {"r1-b1": 4}
    stage.calls()
    with pytest.raises(InputError, match=r"variant r1-b3 must have 4 validations, .* got 2 steps"):
        call(3)
    assert stage.calls() == []


def test_what_was_asked_for_otherwise_or_in_another_version_is_refused(resolutions, stage, out):
    _, content = resolutions(0.5, seeds=[0])
    stage.calls()
    with pytest.raises(InputError) as caught:
        resolutions(1, more=["--epochs", 41, "--norm", "batch", "--learning-rate", 0.1])
    names = {problem.split()[0] for problem in caught.value.problems}
    assert names == {"budget.amount", "settings.norm", "settings.learning_rate"}
    keep(out, {**content, "schema": 1})
    with pytest.raises(InputError, match="must have schema 2, got 1; use the version that made it, or another --out"):
        resolutions(0.5)
    assert stage.calls() == []


# --- What is refused ---

STORE, SHARES = ["--store", "s"], ["--store", "s", "--resolutions", "1"]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ([], "--store"),
        ([*STORE, "--validations", "0"], "--validations"),
        ([*STORE, "--seeds", "1", "1"], "--seeds"),
        ([*STORE, *VARIANTS, *VARIANTS], "--variant"),
        ([*STORE, "--tolerance", "nan"], "tolerance"),
        ([*STORE, "--minutes", "inf"], "minutes"),
        ([*STORE, "--epochs", "3", "--minutes", "10"], "--epochs"),
        (["--runs", "a", "--epochs", "3", "--resolutions", "1", *VARIANTS], "--epochs --variant --resolutions"),
        ([*STORE, "--batches", "1"], "--batches"),
        ([*SHARES, "--resolution", "0.5", "--mode", "patch", "--minutes", "3"], "--mode --resolution --minutes"),
        ([*STORE, "--resolutions", "0"], "resolutions"),
    ],
)
def test_options_that_are_out_of_range_or_do_not_suit_are_named(out, options, names):
    with pytest.raises(InputError) as caught:
        compare("--out", out, *options)
    assert [problem.split()[0] for problem in caught.value.problems] == names.split()


def test_bad_variants_are_named_all_at_once(tiny_store, out):
    variants = ["--variant", "a", "--mode patch --patch 99 99 99", "--variant", "b", "--mode patch --patch 10 8 8"]
    with pytest.raises(InputError) as caught:
        compare("--store", tiny_store.folder, "--out", out, *SMALL, *variants)
    assert {problem.split(":")[0] for problem in caught.value.problems} == {"variant a", "variant b"}


def test_a_variant_is_really_trained_and_scored(phantom_store, out):
    words = ["--store", phantom_store.folder, "--out", out, *SMALL, "--minutes", 0.02, "--validations", 1]
    assert compare(*words, "--seeds", 3, "--policy", "speed", "--variant", "p", "--mode patch --patch 16 16 16") == 0
    (run,), (course,) = kept(out)["results"]["runs"], kept(out)["plan"]
    config = load_config(out / "runs/p-seed3")
    assert (course["steps"], config.budget_minutes, config.validations) == (None, 0.02, 1)
    assert config.epochs >= 0.02 * 60 / 1e-3 / course["steps_per_epoch"], "they are no limit"
    assert (run["variant"], run["seed"]) == ("p", 3)
    assert run["steps"] >= 1
    assert run["train_peak_bytes"] > run["allocator_peak_bytes"] > 0
    assert run["predict_peak_bytes"] > 0
    assert (out / "report.html").stat().st_size > 50_000
