"""Comparisons and resolution studies as they are called: what is carried out, continued, added to and refused."""

import json
import os
import shutil
import signal
import threading

import pytest

from cpu3d.compare import command, report
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


def done(*runs):
    return [f"{what} {name}" for name in runs for what in ("train", "evaluate")]


@pytest.fixture
def asked(tiny_store, tmp_path):
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
    assert (out / "report.html").is_file()

    before = kept(out)
    assert compare(*asked, "--seeds", 0) == 0
    assert stage.calls() == [], "all is done"
    assert kept(out) == before
    assert compare(*asked, "--seeds", 1) == 0
    assert stage.calls() == done("whole-seed1", "patch-seed1")
    assert kept(out)["seeds"] == [0, 1]
    assert kept(out)["results"]["differences"]["patch"]["mean"]["dice"]["mean"] == 0
    runs = [load_config(out / "runs" / f"{name}-seed{seed}") for name in ("whole", "patch") for seed in (0, 1)]
    assert [run.validations for run in runs] == [4] * 4

    (line,) = read_records(record, "compare")
    assert line["budget"] == "the voxels of 2 epochs of whole each"
    assert str(tmp_path) not in json.dumps(line), "a record names no folder"
    assert any(row.startswith("| mean | patch | Dice | ") for row in comparisons_markdown([line, line]))
    assert comparisons_markdown([line, line]) == comparisons_markdown([line]), "the newest of a title counts"


def test_a_folder_from_before_validations_were_counted_goes_on_as_it_was(no_page, stage, asked, tmp_path):
    """Planned by epochs between validations, and with no word of the warm-up."""
    out = tmp_path / "out"
    asked = [*asked, "--epochs", 2]
    compare(*asked, "--seeds", 0)
    content = kept(out)
    for course in content["plan"]:
        del course["validations"], course["warmup_steps"]
        course["validate_every"] = 3
    (out / "compare.json").write_text(json.dumps({**content, "results": None}))
    stage.calls()
    assert compare(*asked, "--seeds", 0) == 0
    assert stage.calls() == []
    assert (kept(out)["plan"], kept(out)["results"]) == (content["plan"], content["results"])
    assert compare(*asked, "--seeds", 1) == 0
    assert load_config(out / "runs" / "whole-seed1").validate_every == 3


def test_a_run_that_diverges_is_left_out_and_named(no_page, stage, asked, tmp_path, capsys):
    stage.tell("fail", "patch-seed0 4 error: loss must be finite, got nan at step 1")
    record = tmp_path / "compare.jsonl"
    assert compare(*asked, "--epochs", 2, "--seeds", 0, 1, "--record", record) == 1
    assert stage.calls() == [*done("whole-seed0"), "train patch-seed0", *done("whole-seed1", "patch-seed1")]
    line = "patch, seed 0, is left out: train diverged."
    assert line in capsys.readouterr().err
    assert kept(tmp_path / "out")["results"]["failed"] == [line] == read_records(record, "compare")[0]["failed"]
    assert kept(tmp_path / "out")["results"]["variants"]["patch"]["seeds"] == [1]
    assert compare(*asked, "--epochs", 2, "--seeds", 0, 1) == 1
    assert stage.calls() == [], "it is known"


def test_added_seeds_drop_the_results_until_they_are_done(no_page, processes, asked, tmp_path):
    asked = [*asked, "--epochs", 2]
    compare(*asked, "--seeds", 0)
    processes.tell("cut")

    def interrupt():
        processes.waited("waits")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        compare(*asked, "--seeds", 0, 1)
    assert kept(tmp_path / "out")["seeds"] == [0, 1]
    assert kept(tmp_path / "out")["results"] is None


def test_a_budget_of_minutes_is_each_run_s_own(no_page, stage, asked, tmp_path, capsys):
    out, asked = tmp_path / "out", [*asked, "--minutes", 0.2, "--seeds", 0]
    assert compare(*asked) == 0
    assert stage.calls() == done("whole-seed0", "patch-seed0")
    assert [course["steps"] for course in kept(out)["plan"]] == [None, None]
    config = load_config(out / "runs" / "patch-seed0")
    assert (config.budget_minutes, config.validations) == (0.2, 4)
    assert config.epochs >= 0.2 * 60 / 1e-3 / kept(out)["plan"][1]["steps_per_epoch"], "they are no limit"
    assert compare(*asked) == 0
    assert stage.calls() == []
    content = kept(out)  # an older folder timed the steps itself, and has them in its plan
    for course in content["plan"]:
        course["steps"] = 6
    (out / "compare.json").write_text(json.dumps(content))
    assert compare(*asked) == 0
    assert stage.calls() == []


def test_other_settings_in_the_same_folder_are_refused_all_at_once(no_page, stage, asked):
    asked = [*asked, "--seeds", 0]
    compare(*asked, "--epochs", 2)
    stage.calls()
    with pytest.raises(InputError) as caught:
        compare(*asked, "--epochs", 3, "--learning-rate", 0.5)
    names = [problem.split()[0] for problem in caught.value.problems]
    assert names == ["budget.amount", "variants.whole.learning_rate", "variants.patch.learning_rate"]
    assert stage.calls() == []


@pytest.mark.parametrize(("study", "name"), [((), "patch-half"), (("--resolutions", 0.5, 1), "r0.5-b1")])
def test_a_dry_run_prints_the_plan_and_writes_nothing(stage, tiny_store, tmp_path, capsys, study, name):
    out = tmp_path / "out"
    assert compare("--store", tiny_store.folder, "--out", out, *SMALL, "--dry-run", *study) == 0
    assert name in capsys.readouterr().err
    assert not out.exists()
    assert stage.calls() == []


def test_a_damaged_file_of_a_case_to_score_is_named_before_anything_is_trained(stage, asked, tiny_store):
    os.truncate(next((tiny_store.folder / "cases").glob("e.x.*")), 100)
    with pytest.raises(InputError, match=r"e\.x\.npy must be \d+ bytes long, got 100"):
        compare(*asked, "--epochs", 2)
    assert stage.calls() == []


def test_a_folder_of_other_files_is_refused_and_left_as_it_is(stage, asked, make_run, tmp_path):
    mine = tmp_path / "out" / "report.html"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    for words in ([*asked, "--minutes", 0.2], ["--runs", make_run("whole"), "--out", tmp_path / "out"]):
        with pytest.raises(InputError, match=r"--out .*out must be empty or hold a compare\.json"):
            compare(*words)
    assert list((tmp_path / "out").iterdir()) == [mine]
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    ("part", "value", "problem"),
    [
        ("seeds", ["0"], r"seeds\[0\] must be int"),
        ("seeds", [], "no seeds"),
        ("results", {"difference": float("nan")}, "Out of range float"),
        ("steps", "4", r"plan\[0\].steps must be int, got 4"),
        ("grid", [8, 8], r"plan\[0\].grid must be"),
        ("name", "../whole", "plan of comparison .* must be of its variants, got ../whole, patch"),
    ],
)
def test_a_damaged_plan_is_refused_by_name_and_nothing_is_trained(stage, asked, tmp_path, part, value, problem):
    asked, path = [*asked, "--epochs", 2, "--seeds", 0], tmp_path / "out" / "compare.json"
    stage.tell("fail", "* 1 no")
    with pytest.raises(InputError):
        compare(*asked)
    stage.calls()
    content = json.loads(path.read_text())
    (content if part in content else content["plan"][0])[part] = value
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=problem):
        compare(*asked)
    assert stage.calls() == []


# --- Run folders that are there already ---


def test_folders_that_are_there_are_compared_without_training(no_page, stage, make_run, tmp_path, capsys):
    folders = [make_run("whole", 0), make_run("patch", 0, scored=False, mode="patch", grid=(8, 8, 8))]
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
    ours = tmp_path / "out" / "evaluations" / "other-seed0" / "evaluation" / "scores.json"
    assert json.loads(ours.read_text())["tolerance_mm"] == 2.5


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


# --- The resolution study ---


@pytest.fixture
def study(stage, no_page, tiny_store, tmp_path):
    """study("--resolutions", "1"): 40 epochs of 3 cases, 2 seeds; the best rates are 0.004 at 0.5 and 0.002 at 1."""
    stage.tell("best", json.dumps({"0.5": 0.004, "1": 0.002}))

    def call(*options):
        common = ["--store", tiny_store.folder, "--out", tmp_path / "out", "--epochs", 40, "--seeds", 0, 1, *SMALL]
        code = compare(*common, *options)
        return code, kept(tmp_path / "out")

    return call


def rates(content):
    return {name: [trial["rate"] for trial in arm["trials"]] for name, arm in content["results"]["search"].items()}


SEARCHED = {"r1-b1": [0.001, 0.002, 0.004], "r0.5-b1": [0.001, 0.002, 0.004, 0.008]}


def test_every_arm_is_searched_and_then_trained_with_its_own_rate(study, stage, tmp_path):
    record = tmp_path / "resolutions.jsonl"
    code, content = study("--resolutions", "1", "0.5", "--record", record)
    assert code == 0
    assert rates(content) == SEARCHED
    full = [call[6:] for call in stage.calls() if call.startswith("train r")]
    assert full == [f"{arm}-seed{seed}" for arm in ("r1-b1-lr0.002", "r0.5-b1-lr0.004") for seed in (0, 1)]
    short, long = (load_config(tmp_path / "out/runs" / name) for name in ("search-r1-b1-lr0.002", full[0]))
    assert (short.steps, short.warmup_steps, short.validations) == (30, 3, 3)
    assert (long.steps, long.warmup_steps, long.validations, long.learning_rate) == (120, 10, 4, 0.002)
    assert load_config(tmp_path / "out/runs" / full[2]).resolution == 0.5
    assert content["results"]["baseline"] == "r1-b1"
    (line,) = read_records(record, "resolutions")
    assert str(tmp_path) not in json.dumps(line)
    assert "| r1-b1 | 0.002 | 30 | 0.7500 | **0.8000** | 0.7500 |  | no | - |" in comparisons_markdown([line])


def test_a_chosen_rate_that_diverges_in_full_length_makes_place_for_the_next_best(study, stage):
    stage.tell("fail", "r0.5-b1-lr0.004* 4 loss must be finite")
    _, content = study("--resolutions", "0.5", "1")
    arm = content["results"]["search"]["r0.5-b1"]
    assert (arm["rate"], arm["diverged"]) == (0.002, [0.004])
    assert content["results"]["variants"]["r0.5-b1"]["seeds"] == [0, 1]


def test_a_study_whose_every_rate_diverges_in_full_length_fails(study, stage):
    stage.tell("fail", "r1* 4 loss must be finite")
    with pytest.raises(RunFailedError):
        study("--resolutions", "1")
    tried = [call for call in stage.calls() if call.startswith("train r")]
    assert tried == [f"train r1-b1-lr{rate}-seed0" for rate in ("0.002", "0.001", "0.004")], "from the best on"


def test_one_rate_is_no_search_and_train_gets_what_compare_was_given(study, stage, tmp_path):
    study("--resolutions", "0.5", "--learning-rates", "0.003", "--recipe", "demo", "--batches", "1", "2")
    assert not [call for call in stage.calls() if "search" in call]
    config = load_config(tmp_path / "out/runs/r0.5-b2-lr0.003-seed1")
    assert (config.resolution, config.batch, config.learning_rate, config.seed) == (0.5, 2, 0.003, 1)
    assert (config.steps, config.warmup_steps, config.mode, config.unet.filters) == (60, 5, "whole", 2)


def test_what_was_there_stays_and_is_reported_with_what_is_added(study, stage):
    study("--resolutions", "0.5")
    _, content = study("--resolutions", "1", "--seeds", "5")
    assert {name: one["seeds"] for name, one in content["results"]["variants"].items()} == {
        "r1-b1": [0, 1, 5],
        "r0.5-b1": [0, 1, 5],
    }
    assert rates(content) == SEARCHED, "the search keeps its seed"
    _, content = study("--resolutions", "1", "--learning-rates", "0.0015")
    assert rates(content) == {**SEARCHED, "r1-b1": [0.001, 0.0015, 0.002, 0.004]}


def test_a_study_from_before_arms_were_variants_goes_on(study, stage, tmp_path):
    _, content = study("--resolutions", "0.5")
    names = ("resolution", "batch", "grid", "options", "start_rate", "steps", "search_steps", "steps_per_epoch")
    names = (*names, "warmup_steps", "step_s", "peak_bytes")
    old = [{name: arm[name] for name in names} for arm in content["plan"]]
    (tmp_path / "out/compare.json").write_text(json.dumps({**content, "plan": old, "results": {"arms": []}}))
    stage.calls()
    _, again = study("--resolutions", "0.5")
    assert stage.calls() == []
    assert again["results"] == content["results"]


def test_another_study_is_refused_in_the_same_folder(study, tmp_path):
    study("--resolutions", "0.5")
    before = (tmp_path / "out/compare.json").read_bytes()
    with pytest.raises(InputError) as caught:
        study("--resolutions", "0.5", "--epochs", "41", "--search-share", "0.5", "--norm", "batch")
    assert {problem.split()[0] for problem in caught.value.problems} == {"epochs", "search_share", "settings.norm"}
    assert (tmp_path / "out/compare.json").read_bytes() == before


# --- What is refused ---

STORE = ["--store", "s"]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ([], ["--store"]),
        ([*STORE, "--validations", "0"], ["--validations"]),
        ([*STORE, "--seeds", "1", "1"], ["--seeds"]),
        ([*STORE, *VARIANTS, *VARIANTS], ["--variant"]),
        ([*STORE, "--tolerance", "nan"], ["tolerance"]),
        ([*STORE, "--voxels", "0"], ["voxels"]),
        ([*STORE, "--minutes", "inf"], ["minutes"]),
        ([*STORE, "--epochs", "3", "--minutes", "10"], ["--epochs"]),
        (["--runs", "a", "--epochs", "3", "--resolutions", "1", *VARIANTS], ["--epochs", "--variant", "--resolutions"]),
        ([*STORE, "--batches", "1", "--search-share", "0.5"], ["--batches", "--search-share"]),
        (
            [*STORE, "--resolutions", "1", "--resolution", "0.5", "--mode", "patch", "--minutes", "3"],
            ["--resolution", "--minutes", "--mode"],
        ),
        ([*STORE, "--resolutions", "1.5"], ["resolutions"]),
        ([*STORE, "--resolutions", "1", "--batches", "0"], ["batches"]),
        ([*STORE, "--resolutions", "1", "--search-share", "0"], ["search_share"]),
    ],
)
def test_options_that_are_out_of_range_or_do_not_suit_are_named(tmp_path, options, names):
    with pytest.raises(InputError) as caught:
        compare("--out", tmp_path / "out", *options)
    assert [problem.split()[0] for problem in caught.value.problems] == names


def test_bad_variants_are_named_all_at_once(tiny_store, tmp_path):
    variants = ["--variant", "a", "--mode patch --patch 99 99 99", "--variant", "b", "--mode patch --patch 10 8 8"]
    with pytest.raises(InputError) as caught:
        compare("--store", tiny_store.folder, "--out", tmp_path / "out", *SMALL, *variants)
    assert {problem.split(":")[0] for problem in caught.value.problems} == {"variant a", "variant b"}


def test_a_variant_is_really_trained_and_scored(phantom_store, tmp_path):
    asked = ["--store", phantom_store.folder, "--out", tmp_path, *SMALL, "--minutes", 0.02, "--validations", 1]
    assert compare(*asked, "--seeds", 3, "--policy", "speed", "--variant", "p", "--mode patch --patch 16 16 16") == 0
    (run,) = kept(tmp_path)["results"]["runs"]
    assert (run["variant"], run["seed"]) == ("p", 3)
    assert run["steps"] >= 1
    assert run["train_peak_bytes"] > run["allocator_peak_bytes"] > 0
    assert run["predict_peak_bytes"] > 0
    assert (tmp_path / "report.html").stat().st_size > 50_000
