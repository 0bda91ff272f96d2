"""Runs of `train`: they learn, continue to the bit, predict, and refuse settings that do not
suit."""

import dataclasses
import json
import math
import re
import sys

import nibabel
import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.data.fold import with_fold
from cpu3d.data.labels import label_from_regions
from cpu3d.data.store import Store
from cpu3d.data.stores.prepare import prepare
from cpu3d.decisions import job_of
from cpu3d.errors import DoesNotFitError, InputError
from cpu3d.experiments.folds import train_folds
from cpu3d.host.speed import Observer
from cpu3d.inference.predictor import load_predictor
from cpu3d.inference.runs import Inference
from cpu3d.run.checkpoint import newest
from cpu3d.run.config_json import load_config
from cpu3d.run.heartbeat import read_heartbeats
from cpu3d.run.log import read_events
from cpu3d.training.fit import Fit
from cpu3d.training.learner import Learner
from cpu3d.training.train import train
from cpu3d.util.lock import locked
from memory_estimator.calibration import find_constants
from memory_estimator.host import read_host
from memory_estimator.installed import how_to_install
from tests.cpu3d.runs import (
    SMALL,
    assert_cut_and_continued_is_uninterrupted,
    assert_same_weights,
    of_voxels,
    start,
    steps_of,
    stored,
    weights,
)

PATCH = {"mode": "patch", "patch": [16, 16, 16]}
HALF_OF_FOUR = {"curriculum": "half", "steps": 4, "validations": 1}
LEARNT = {"steps": 10, "batch": 2, "validations": 1, **PATCH}


def test_training_without_tensorflow_is_bad_input(phantom_store, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(
        sys.modules, "tensorflow", None
    )  # as Python has it for what cannot be imported
    assert (
        main(["train", "--store", str(phantom_store.folder), "--run", str(tmp_path / "run")]) == 2
    )
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: tensorflow must be installed")
    assert how_to_install() in last


# --- With the real network ---


@pytest.fixture(scope="module")
def learnt(phantom_store, tmp_path_factory):
    """The folder of a run of 10 steps of two patches."""
    folder = tmp_path_factory.mktemp("learnt")
    start(phantom_store, folder, **LEARNT).run()
    return folder


@pytest.mark.usefixtures("needs_native")
def test_what_steps_show_of_the_host_is_kept_and_changes_no_bit(
    phantom_store, learnt, tmp_path, monkeypatch
):
    monkeypatch.setattr("cpu3d.host.speed.LEAST_VOXELS", 1)
    fit = start(phantom_store, tmp_path, **LEARNT)
    job = job_of(fit.config, fit.config.grid, threads=2, cases=0)
    fit.run(observer=Observer(job, read_host(), warm_up=2))
    assert_same_weights(tmp_path, learnt)
    assert find_constants().scale(job.unet.dtype).threads == 2


def test_a_run_learns_and_its_best_weights_are_those_of_its_only_validation(learnt):
    losses = [step["loss"] for step in steps_of(learnt)]
    assert np.mean(losses[-4:]) < 0.95 * np.mean(losses[:4])
    last = weights(learnt)
    best = weights(learnt, "best")
    assert set(best) == {name for name in last if name.startswith("model/")}
    for name in best:
        np.testing.assert_array_equal(best[name], last[name])


def test_a_patch_run_predicts_by_its_window_within_the_brain_as_it_was_validated(
    phantom_store, learnt
):
    predictor = load_predictor(learnt)
    record = phantom_store.cases("val")[0]
    assert predictor.window == (16, 16, 16)
    answers = predictor.probabilities(phantom_store.image(record.case_id), record)
    truth = np.asarray(phantom_store.label(record.case_id))
    scored = [event for event in read_events(learnt) if event["event"] == "validation"][-1]
    assert scored["cases"] == 1
    label = label_from_regions(answers, predictor.regions)
    for name, codes in phantom_store.manifest.regions.items():
        mask = np.isin(label, codes)
        true = np.isin(truth, codes)
        # Not to the bit: tiles begin at the case's own box there, at the box common to all cases in
        # a validation. In one pass of the whole volume WT differs by 0.25.
        assert scored["dice"][name] == pytest.approx(
            2 * (mask & true).sum() / (mask.sum() + true.sum()), abs=0.12
        )
    inside = record.box.slices(record.shape)
    assert np.all(answers[inside] > 0)
    answers[inside] = 0
    assert not answers.any()
    at_once = load_predictor(learnt, inference=Inference(one_pass=True))
    assert at_once.window is None
    assert at_once.probabilities(phantom_store.image(record.case_id), record).shape == (
        *record.shape,
        3,
    )


def test_what_coarse_steps_give_back_changes_no_weight_of_the_full_ones(
    phantom_store, tmp_path, monkeypatch
):
    released = []
    release = Learner.release

    def noted(learner):
        released.append(learner.config.is_coarse)
        release(learner)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "release", noted)
        start(phantom_store, tmp_path / "released", learner=Learner, **HALF_OF_FOUR).run()
    assert released == [True]
    start(phantom_store, tmp_path / "kept", **HALF_OF_FOUR).run()  # networks that are kept
    assert_same_weights(tmp_path / "released", tmp_path / "kept")
    grids = [event["voxels"] for event in steps_of(tmp_path / "released")]
    assert sorted(grids) == grids
    assert len(set(grids)) == 2


# --- Cut and continued ---


WAYS = {
    "lean": {
        "policy": "lean", "batch": 2, "residual": True, "up": "upsampling",
        "validations": 1,
    },
    "patches": {
        "batch": 2, "micro_batch": 1, "augment": "nnunet", "optimizer": "sgd",
        "network": "cicek2016", "channels": ["T2w", "FLAIR"], "validations": 1, **PATCH,
    },
    "batch norm": {
        "validations": 1, "batch": 4, "micro_batch": 2, "extent": "full", "norm": "batch",
        "dtype": "bfloat16", "optimizer": "adam", "augment": "nnunet",
    },
    "strides": {
        "strides": ((2, 2, 1), (1, 2, 2)), "depth": 3, "deep_supervision": True, "validations": 1,
    },
}  # fmt: skip


@pytest.mark.usefixtures("graphs_as_written")
@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
def test_a_run_that_is_cut_ends_with_the_same_weights(
    phantom_store, tmp_path, monkeypatch, settings
):
    assert_cut_and_continued_is_uninterrupted(
        phantom_store, tmp_path, monkeypatch, steps=3, done=2, **settings
    )
    if "strides" not in settings:
        return
    image = phantom_store.folder.parent / "raw" / "imagesTr" / "BRATS_001.nii.gz"
    words = ["--run", tmp_path / "cut", "--image", image, "--out", tmp_path / "out", "--no-flips"]
    assert main(["predict", *map(str, words)]) == 0
    assert nibabel.load(tmp_path / "out" / image.name).shape == nibabel.load(image).shape[:3]


@pytest.mark.usefixtures("graphs_as_written")
@pytest.mark.parametrize("done", [1, 2])
def test_thick_slices_are_seen_at_their_thickness_first_and_in_full_then(
    phantom_store, tmp_path, monkeypatch, done
):
    """A run that is cut within its coarse steps, or after the last of them."""
    store = of_voxels(phantom_store, 1.0, 1.0, 4.0)
    turned = {"augment": "nnunet", "validations": 2}
    assert_cut_and_continued_is_uninterrupted(
        store, tmp_path, monkeypatch, steps=3, done=done, curriculum="half", **turned
    )
    config = load_config(tmp_path / "cut")
    assert config.unet.stride(0) == (2, 2, 1)
    assert config.coarse_grid[2] == config.grid[2]
    assert 2 * config.coarse_grid[1] == config.grid[1]
    coarse = math.prod(config.coarse_grid)
    full = math.prod(config.grid)
    assert [step["voxels"] for step in steps_of(tmp_path / "cut")] == [coarse, coarse, full]


# --- What a run is given ---


@pytest.mark.usefixtures("without_network")
def test_a_fold_trains_on_its_cases_and_validates_on_its_own(phantom_store, tmp_path, monkeypatch):
    fold = "2/2"
    own = phantom_store.manifest.split["val"]
    trained = []
    split = with_fold(phantom_store, fold).manifest.split
    assert split["val"] != own
    begin = Fit.__init__
    monkeypatch.setattr(
        Fit, "__init__", lambda self, *args: begin(self, *args) or trained.append(self)
    )
    settings = {
        **SMALL,
        **PATCH,
        "steps": 1,
        "batch": len(split["train"]),
        "fold": fold,
    }
    config = train(phantom_store.folder, tmp_path, settings=settings)
    assert (config.fold, config.split_hash) == (fold, phantom_store.manifest.split_hash)
    (step,) = steps_of(tmp_path)
    assert sorted(step["case_id"].split()) == sorted(split["train"]), "an epoch in one step"
    targets = [float(target.numpy()[..., 0].sum()) for _, target in trained[0].feeds.validation()]
    assert targets == [
        np.isin(np.asarray(phantom_store.label(name)), (1, 2, 3)).sum() for name in split["val"]
    ]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"steps": "x"}, "--steps must be a number, got 'x'"),
        ({"stepz": 3}, "got 'stepz'; did you mean 'steps'"),
        ({"batch": -1}, "--batch must be at least 1, got -1"),
    ],
)
def test_settings_from_python_are_refused_as_those_of_a_command_line(
    phantom_store, tmp_path, settings, words
):
    with pytest.raises(InputError, match=words):
        train(phantom_store.folder, tmp_path / "run", settings=settings)
    with pytest.raises(InputError, match=words):
        train_folds(phantom_store.folder, tmp_path / "folds", 2, settings=settings)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_network")
def test_what_follows_a_training_has_its_lock_and_heartbeat_and_both_end_after_it(
    phantom_store, tmp_path
):
    followed = []

    def follow(run, store, pulse):
        with pytest.raises(InputError, match="one process at a time"), locked(run, "run"):
            pass
        followed.append((run, store, pulse.now.exit_code))
        pulse.phase("deciding")

    settings = {**SMALL, "steps": 1}
    del settings["epochs"]
    for then in (follow, None):  # from Python it may end here
        train(phantom_store.folder, tmp_path, settings=settings, on_finished=then)
        beat = read_heartbeats(tmp_path)[0]
        assert (beat.phase, beat.exit_code, beat.reason) == ("ended", 0, "finished")
    assert followed == [(tmp_path, phantom_store.folder, None)]


# --- Going on ---


@pytest.mark.usefixtures("without_network")
def test_a_finished_run_is_left_alone_extended_or_gets_its_lost_last_line(
    phantom_store, tmp_path, capsys
):
    def go(**settings):
        train(phantom_store.folder, tmp_path, settings={**small, **settings})
        return len(steps_of(tmp_path)), capsys.readouterr().err

    small = {key: value for key, value in SMALL.items() if key != "epochs"}
    assert go(steps=2)[0] == 2
    log = (tmp_path / "log.jsonl").read_bytes()
    last = newest(tmp_path).path.read_bytes()
    (tmp_path / "log.jsonl").write_bytes(b"".join(log.splitlines(keepends=True)[:-1]))
    assert "nothing to do after step 2: finished" in go()[1]
    again = [json.loads(line) for line in log.splitlines()]
    assert [(e["event"], e["step"], e.get("reason")) for e in read_events(tmp_path)] == [
        (e["event"], e["step"], e.get("reason")) for e in again
    ]
    assert newest(tmp_path).path.read_bytes() == last
    steps, words = go(epochs=1, policy="lean")
    assert (steps, "note: this run had policy speed before" in words) == (4, True)
    assert "nothing to do after step 4: finished" in go()[1]
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["continues"], plan["steps"]) == (True, 4)


@pytest.mark.usefixtures("without_network")
@pytest.mark.parametrize(
    ("command", "advice", "more"),
    [
        ({"steps": 2}, "--steps above 2", {"steps": 3}),
        (
            {"epochs": 2, "budget_minutes": 1e-6},
            "--budget-minutes 0 takes all",
            {"budget_minutes": 0.0},
        ),
        ({"epochs": 1, "budget_minutes": 9.0}, "--epochs above 1", {"epochs": 2}),
    ],
)
def test_what_a_run_that_is_over_names_can_be_added_to_its_command_and_continues_it(
    phantom_store, tmp_path, capsys, command, advice, more
):
    small = {name: value for name, value in SMALL.items() if name != "epochs"}
    for _ in range(2):
        train(phantom_store.folder, tmp_path, settings={**small, **command})
    assert advice in capsys.readouterr().err
    done = len(steps_of(tmp_path))
    train(phantom_store.folder, tmp_path, settings={**small, **command, **more})
    assert len(steps_of(tmp_path)) > done


@pytest.mark.parametrize(
    "name", ["log.jsonl", "checkpoints/best.npz", "checkpoints/step-00000120.npz"]
)
def test_a_log_or_checkpoint_of_another_program_is_refused_and_left_as_it_is(
    phantom_store, tmp_path, capsys, name
):
    mine = tmp_path / "run" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine\n")
    assert (
        main(
            [
                "train",
                "--store",
                str(phantom_store.folder),
                "--run",
                str(tmp_path / "run"),
                "--force",
            ]
        )
        == 2
    )
    assert f"must hold a config.json beside {name}, found none" in capsys.readouterr().err
    assert mine.read_text() == "mine\n"


@pytest.mark.parametrize("name", ["dataset.json", "imagesTr", "manifest.json"])
@pytest.mark.parametrize("more", [(), ("--folds", "2"), ("--dry-run",)])
def test_a_run_is_not_written_among_data(phantom_store, tmp_path, capsys, name, more):
    (tmp_path / name).mkdir()
    place = ["--store", str(phantom_store.folder), "--run", str(tmp_path)]
    assert main(["train", *place, "--filters", "2", *more]) == 2
    assert f"got one with {name} in it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("place", ["run", "run/checkpoints"])
def test_a_run_that_cannot_be_written_is_refused_before_anything_is_planned(
    phantom_store, tmp_path, capsys, place
):
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("a file")
    words = ["--store", str(phantom_store.folder), "--run", str(tmp_path / "run")]
    assert main(["train", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path / place} must be a folder to write to, got a file" in line


@pytest.mark.parametrize("more", [(), ("--folds", "2")])
def test_a_dry_run_prints_the_plan_and_writes_nothing(phantom_store, tmp_path, capsys, more):
    place = ["--store", str(phantom_store.folder), "--run", str(tmp_path / "run")]
    options = ["--filters", "4", "--depth", "3", "--steps", "4", *more, "--dry-run"]
    words = ["train", *place, *options]
    assert main(words) == 0
    printed = capsys.readouterr().out
    whole = re.search(r"([\d.]+ \w+) in all", printed)[1]
    if more:  # the plan that is printed is that of the first fold
        assert re.search(rf" 1/2 .* {whole} ", printed), "two times for one fold"
    assert "4 filters" in printed
    assert main([*words, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    plans = content if more else [content]
    for plan in plans:
        assert (plan["steps"], plan["config"]["unet"]["filters"]) == (4, 4)
        assert plan["run"]["all_s"] > plan["training_s"] > 0
        assert plan["run"]["upper_bound_bytes"] > plan["predicted"]["process_peak_bytes"]
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_of_what_does_not_fit_says_so(phantom_store, tmp_path, capsys, monkeypatch):
    with_free(monkeypatch, 50 * 2**20)
    words = ["train", "--store", str(phantom_store.folder), "--run", str(tmp_path / "run")]
    assert main([*words, "--dry-run"]) == 3
    printed = capsys.readouterr()
    assert "in all" in printed.out
    assert "memory must hold this training" in printed.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("more", [(), ("--folds", "2")])
@pytest.mark.parametrize("lacks", ["a folder", "its configuration", "mlflow"])
def test_a_dry_run_refuses_what_train_refuses(
    phantom_store, tmp_path, capsys, monkeypatch, lacks, more
):
    run = tmp_path / "run"
    if lacks == "a folder":
        run.write_text("a file")
    elif lacks == "its configuration":
        run.mkdir()
        (run / "log.jsonl").write_text("mine")
    else:
        more += ("--mlflow", "somewhere")
        monkeypatch.setattr("importlib.util.find_spec", lambda *name: None)
    words = ["train", "--store", str(phantom_store.folder), "--run", str(run), *more]
    assert main([*words, "--dry-run"]) == 2
    of_dry_run = capsys.readouterr()
    assert of_dry_run.out == ""
    assert main(words) == 2
    assert capsys.readouterr().err.splitlines()[-1] == of_dry_run.err.splitlines()[-1]


@pytest.mark.usefixtures("without_network")
def test_a_dry_run_of_a_finished_run_needs_no_memory(phantom_store, tmp_path, monkeypatch):
    settings = {key: value for key, value in SMALL.items() if key != "epochs"}
    train(phantom_store.folder, tmp_path, settings={**settings, "steps": 2})
    with_free(monkeypatch, 10 * 2**20)
    words = ["train", "--store", str(phantom_store.folder), "--run", str(tmp_path), "--dry-run"]
    assert main(words) == 0
    assert main([*words, "--steps", "4"]) == 3


@pytest.mark.parametrize("words", [("--json",), ("--json", "--folds", "2")])
def test_a_plan_in_json_is_of_a_dry_run(phantom_store, tmp_path, capsys, words):
    place = ["--store", str(phantom_store.folder), "--run", str(tmp_path / "run")]
    assert main(["train", *place, *words]) == 2
    assert "--json must come with --dry-run" in capsys.readouterr().err


def test_two_trainings_in_one_folder_are_refused(phantom_store, tmp_path):
    with (
        locked(tmp_path, "run"),
        pytest.raises(InputError, match=r"must be written by one .* at a time"),
    ):
        train(phantom_store.folder, tmp_path, settings={**SMALL, "epochs": 1})


@pytest.mark.usefixtures("without_network")
def test_the_saved_plan_has_the_steps_that_a_budget_of_minutes_leaves(phantom_store, tmp_path):
    settings = {**SMALL, "epochs": 50, "budget_minutes": 1e-6}
    config = train(phantom_store.folder, tmp_path, settings=settings)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["steps"] == plan["config"]["steps"] == config.steps == 4
    assert (plan["run"]["steps"], plan["schedule"]["steps"]) == (4, 4)
    steps_s = 4 * plan["predicted"]["step_s"]
    assert plan["training_s"] == pytest.approx(steps_s)
    assert plan["run"]["steps_s"] == pytest.approx(steps_s)
    assert plan["left_s"] == pytest.approx(plan["run"]["all_s"])


# --- Memory ---


def with_free(monkeypatch, free_bytes):
    """Have `train` find a host that has this much free."""
    host = dataclasses.replace(read_host(), available_bytes=free_bytes, cgroup_limit_bytes=None)
    monkeypatch.setattr("cpu3d.training.train.read_host", lambda: host)


def test_a_run_that_may_not_fit_is_refused_before_anything_is_written(
    phantom_store, tmp_path, monkeypatch, capsys
):
    with_free(monkeypatch, 10 * 2**20)
    assert (
        main(["train", "--store", str(phantom_store.folder), "--run", str(tmp_path / "run")]) == 3
    )
    errors = capsys.readouterr().err
    for part in ("does not fit: needs up to", "got 10 MiB free", "--force"):
        assert part in errors
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("without_network")
def test_a_forced_run_logs_its_plan_and_continues_if_it_fits(
    phantom_store, tmp_path, monkeypatch, capsys
):
    def go(epochs, **options):
        settings = {**SMALL, "epochs": epochs, "batch": 2, "extent": "full"}
        train(phantom_store.folder, tmp_path, settings=settings, **options)

    with_free(monkeypatch, 200 * 2**20)
    go(1, force=True)
    first, *_, last = read_events(tmp_path)
    predicted = first["predicted"]
    assert (
        0
        < predicted["allocator_peak_bytes"]
        < predicted["process_peak_bytes"]
        < predicted["upper_bound_bytes"]
    )
    assert last["reason"] == "finished"
    go(1)
    assert "nothing to do after step" in capsys.readouterr().err, (
        "a run that is over needs no memory"
    )
    kept = {path: path.read_bytes() for path in (tmp_path / "config.json", tmp_path / "log.jsonl")}
    with pytest.raises(DoesNotFitError, match="as a run in another folder"):
        go(2)
    assert {path: path.read_bytes() for path in kept} == kept


def without_codes(store, folder, *codes):
    """A store whose labels lack these codes, by its records."""
    cases = []
    for case in store.manifest.cases:
        others = {code: n for code, n in case.label_voxels.items() if code not in codes}
        cases.append(dataclasses.replace(case, label_voxels=others))
    view = Store(store.folder, dataclasses.replace(store.manifest, cases=cases))
    return stored(view, folder).folder


@pytest.mark.usefixtures("without_network")
def test_a_region_that_no_training_case_has_is_a_line_of_warning(phantom_store, tmp_path, capsys):
    store = without_codes(phantom_store, tmp_path / "store", 3)
    for regions, lines in ((("WT", "TC", "ET"), 1), (("WT", "TC"), 0)):
        run = tmp_path / f"of {len(regions)}"
        train(store, run, settings={**SMALL, "epochs": 1, "regions": regions})
        printed = capsys.readouterr().err
        assert printed.count("to learn it, got none of ET (label 3)") == lines
    ask = ["train", "--store", str(store), "--run", str(tmp_path / "new"), "--dry-run"]
    assert main(ask) == 0
    assert capsys.readouterr().out.count("to learn it, got none of ET (label 3)") == 1


@pytest.mark.usefixtures("without_network")
def test_a_store_without_a_labelled_voxel_is_trained_on_if_that_is_forced_or_was_begun(
    phantom_store, tmp_path, capsys
):
    store = without_codes(phantom_store, tmp_path / "store", 1, 2, 3)
    run = tmp_path / "run"
    for more in ([], ["--dry-run"]):
        assert main(["train", "--store", str(store), "--run", str(run), *more]) == 2
        printed = capsys.readouterr().err
        assert re.search("error: .* must have labelled voxels, got none .*--force", printed)
        assert not run.exists()
    small = {key: value for key, value in SMALL.items() if key != "epochs"}
    train(store, run, settings={**small, "steps": 2}, force=True)
    train(store, run, settings={**small, "steps": 3})
    assert len(steps_of(run)) == 3


def dice_of(run):
    """Mean Dice of the cases that it was trained on."""
    assert main(["evaluate", "--run", str(run), "--split", "train"]) == 0
    scores = json.loads((run / "evaluation" / "train" / "scores.json").read_text())
    return {name: row["dice"]["mean"] for name, row in scores["summary"].items()}


@pytest.mark.slow
def test_one_real_case_is_learnt_in_120_steps(real_cases, tmp_path):
    prepare(real_cases / "brats-gli-real", tmp_path / "store", fractions=(1, 0, 0), workers=1)
    train(tmp_path / "store", tmp_path / "run", settings={"epochs": 120, "augment": "off"})
    dice = dice_of(tmp_path / "run")
    assert dice["WT"] >= 0.95
    assert dice["TC"] >= 0.90
    assert dice["ET"] >= 0.80
