"""Comparisons and resolution studies as they are called: what is carried out, continued, added to and refused."""

import json
import os
import shutil

import pytest

from cpu3d.compare import command, report
from cpu3d.compare import run as compare_run
from cpu3d.compare.report import comparisons_markdown
from cpu3d.compare.run import RunFailedError
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


def test_a_folder_from_before_validations_were_counted_goes_on_as_it_was(no_page, stage, chosen, out):
    """Planned by epochs between validations, and with no word of the warm-up."""
    chosen = [*chosen, "--epochs", 2]
    compare(*chosen, "--seeds", 0)
    content = kept(out)
    for course in content["plan"]:
        del course["validations"], course["warmup_steps"]
        course["validate_every"] = 3
    keep(out, {**content, "results": None})
    stage.calls()
    assert compare(*chosen, "--seeds", 0) == 0
    assert stage.calls() == []
    assert (kept(out)["plan"], kept(out)["results"]) == (content["plan"], content["results"])
    assert compare(*chosen, "--seeds", 1) == 0
    assert load_config(out / "runs" / "whole-seed1").validate_every == 3


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


@pytest.mark.parametrize(("study", "name"), [((), "patch-half"), (("--resolutions", 0.5, 1), "r0.5-b1")])
def test_a_dry_run_prints_the_plan_and_writes_nothing(stage, tiny_store, out, capsys, study, name):
    assert compare("--store", tiny_store.folder, "--out", out, *SMALL, "--dry-run", *study) == 0
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
        ("seeds", [], "no seeds"),
        ("schema", 2, "another schema than 1"),
        ("results", {"difference": float("nan")}, "Out of range float"),
        ("steps", "4", r"plan\[0\].steps must be int, got 4"),
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


# --- The resolution study ---


@pytest.fixture
def study(stage, no_page, tiny_store, out):
    """study("--resolutions", "1"): 40 epochs of 3 cases, 2 seeds; the best rates are 0.004 at 0.5 and 0.002 at 1."""
    stage.tell("best", json.dumps({"0.5": 0.004, "1": 0.002}))

    def call(*options):
        common = ["--store", tiny_store.folder, "--out", out, "--epochs", 40, "--seeds", 0, 1, *SMALL]
        return compare(*common, *options), kept(out)

    return call


def rates(content):
    return {name: [trial["rate"] for trial in arm["trials"]] for name, arm in content["results"]["search"].items()}


SEARCHED = {"r1-b1": [0.001, 0.002, 0.004], "r0.5-b1": [0.001, 0.002, 0.004, 0.008]}


def test_every_arm_is_searched_and_then_trained_with_its_own_rate(study, stage, out, tmp_path):
    record = tmp_path / "resolutions.jsonl"
    code, content = study("--resolutions", "1", "0.5", "--record", record)
    assert code == 0
    assert rates(content) == SEARCHED
    full = [call[6:] for call in stage.calls() if call.startswith("train r")]
    assert full == [f"{arm}-seed{seed}" for arm in ("r1-b1-lr0.002", "r0.5-b1-lr0.004") for seed in (0, 1)]
    short, long = (load_config(out / "runs" / name) for name in ("search-r1-b1-lr0.002", full[0]))
    assert (short.steps, short.warmup_steps, short.validations) == (30, 3, 3)
    assert (long.steps, long.warmup_steps, long.validations, long.learning_rate) == (120, 10, 4, 0.002)
    assert load_config(out / "runs" / full[2]).resolution == 0.5
    assert content["results"]["baseline"] == "r1-b1"
    (line,) = read_records(record, "resolutions")
    assert str(tmp_path) not in json.dumps(line)
    assert "| r1-b1 | 0.002 | 30 | 0.7500 | **0.8000** | 0.7500 |  | no | - |" in comparisons_markdown([line])


def test_a_rate_that_diverges_in_full_length_makes_place_for_the_next_best_if_there_is_one(study, stage):
    stage.tell("fail", "r0.5-b1-lr0.004* 4 loss must be finite")
    _, content = study("--resolutions", "0.5")
    arm = content["results"]["search"]["r0.5-b1"]
    assert (arm["rate"], arm["diverged"]) == (0.002, [0.004])
    assert content["results"]["variants"]["r0.5-b1"]["seeds"] == [0, 1]
    stage.calls()
    stage.tell("fail", "r1* 4 loss must be finite")
    with pytest.raises(RunFailedError):
        study("--resolutions", "1")
    tried = [call for call in stage.calls() if call.startswith("train r1")]
    assert tried == [f"train r1-b1-lr{rate}-seed0" for rate in ("0.002", "0.001", "0.004")], "from the best on"


def test_what_was_there_stays_and_is_reported_with_what_is_added(study, stage, out):
    study("--resolutions", "0.5")
    _, content = study("--resolutions", "1", "--seeds", "5")
    seeds = [one["seeds"] for one in content["results"]["variants"].values()]
    assert seeds == [[0, 1, 5]] * 2
    assert rates(content) == SEARCHED, "the search keeps its seed"
    _, content = study("--resolutions", "1", "--learning-rates", "0.0015")
    assert rates(content) == {**SEARCHED, "r1-b1": [0.001, 0.0015, 0.002, 0.004]}
    stage.calls()
    study("--resolutions", "0.5", "--batches", "2", "--learning-rates", "0.003")
    assert not [call for call in stage.calls() if "search-r0.5-b2" in call], "one rate is no search"
    config = load_config(out / "runs/r0.5-b2-lr0.003-seed1")
    assert (config.resolution, config.batch, config.learning_rate, config.steps) == (0.5, 2, 0.003, 60)


def test_a_study_from_before_arms_were_variants_goes_on_and_another_one_is_refused(study, stage, out):
    _, content = study("--resolutions", "0.5")
    names = ("resolution", "batch", "grid", "options", "start_rate", "steps", "search_steps", "steps_per_epoch")
    names = (*names, "warmup_steps", "step_s", "peak_bytes")
    keep(out, {**content, "plan": [{name: arm[name] for name in names} for arm in content["plan"]], "results": {}})
    stage.calls()
    _, again = study("--resolutions", "0.5")
    assert stage.calls() == []
    assert again["results"] == content["results"]
    with pytest.raises(InputError) as caught:
        study("--resolutions", "0.5", "--epochs", "41", "--search-share", "0.5", "--norm", "batch")
    assert {problem.split()[0] for problem in caught.value.problems} == {"epochs", "search_share", "settings.norm"}
    assert kept(out) == again


# --- What is refused ---

STORE, STUDY = ["--store", "s"], ["--store", "s", "--resolutions", "1"]


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
        ([*STORE, "--batches", "1", "--search-share", "0.5"], "--batches --search-share"),
        ([*STUDY, "--resolution", "0.5", "--mode", "patch", "--minutes", "3"], "--resolution --minutes --mode"),
        ([*STUDY, "--search-share", "0"], "search_share"),
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
