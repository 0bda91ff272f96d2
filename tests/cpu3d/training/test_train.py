"""Runs of `train`: they learn, continue to the bit, predict, and refuse settings that do not
suit."""

import dataclasses
import json
import re

import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.data.fold import with_fold
from cpu3d.data.store import Store, open_store
from cpu3d.data.stores.prepare import prepare
from cpu3d.distributed.cluster import Cluster
from cpu3d.errors import DoesNotFitError, InputError, WorkerLostError
from cpu3d.inference.evaluate import evaluate_split
from cpu3d.inference.predictor import load_predictor
from cpu3d.inference.runs import Inference
from cpu3d.run.checkpoint import newest
from cpu3d.run.heartbeat import read_heartbeats
from cpu3d.run.log import last_event
from cpu3d.training.train import train
from cpu3d.util.lock import locked
from memory_estimator.host import read_host
from tests.cpu3d.runs import (
    SMALL,
    assert_cut_and_continued_is_uninterrupted,
    start,
    steps_of,
    stored,
    weights,
)

PATCH = {"mode": "patch", "patch": [16, 16, 16]}
FEW = {name: value for name, value in SMALL.items() if name != "epochs"}
MORE = [(), ("--folds", "2"), ("--dry-run",)]  # to the words of `train`
LEARNT = {"steps": 10, "batch": 2, "validations": 1, **PATCH}


def words(store, run, *more):
    """A command that trains."""
    return ["train", "--store", str(store.folder), "--run", str(run), *more]


@pytest.fixture
def refused(phantom_store, tmp_path, capsys):
    """A call of `train` into tmp_path/run that ends with a code; returns what it printed."""

    def call(*more, store=phantom_store, code=2):
        assert main(words(store, tmp_path / "run", *more)) == code
        return capsys.readouterr().err

    return call


# --- With the real network ---


@pytest.fixture(scope="module")
def learnt(phantom_store, tmp_path_factory):
    """The folder of a run of 10 steps of two patches."""
    folder = tmp_path_factory.mktemp("learnt")
    start(phantom_store, folder, **LEARNT).run()
    return folder


def test_a_run_learns_and_its_best_weights_are_those_of_its_only_validation(learnt):
    losses = [step["loss"] for step in steps_of(learnt)]
    assert np.mean(losses[-4:]) < 0.95 * np.mean(losses[:4])
    last = weights(learnt)
    network = {name: last[name] for name in last if name.startswith("model/")}
    np.testing.assert_equal(dict(weights(learnt, "best")), network)


def test_a_patch_run_predicts_by_its_window_within_the_brain_as_it_was_validated(
    phantom_store, learnt
):
    predictor = load_predictor(learnt, inference=Inference(flips=False))
    scores = evaluate_split(predictor, phantom_store, "val", learnt)["summary"]
    scored = last_event(learnt, "validation")
    assert scored["cases"] == 1
    # In one pass of the whole volume WT differs by 0.25.
    dice = {name: of_region["dice"]["mean"] for name, of_region in scores.items()}
    assert scored["dice"] == pytest.approx(dice, abs=1e-3)
    (record,) = phantom_store.cases("val")
    answers = np.asarray(predictor.probabilities(phantom_store.image(record.case_id), record))
    inside = record.box.slices(record.shape)
    assert np.all(answers[inside] > 0)
    answers[inside] = 0
    assert not answers.any()


# --- Cut and continued ---


SETTINGS = {
    "batch norm": {
        "validations": 1, "batch": 4, "micro_batch": 2, "extent": "full", "norm": "batch",
        "dtype": "bfloat16", "optimizer": "adam", "augment": "nnunet",
    },
    "strides": {
        "strides": ((2, 2, 1), (1, 2, 2)), "depth": 3, "deep_supervision": True, "validations": 1,
    },
}  # fmt: skip


@pytest.mark.usefixtures("graphs_as_written")
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_run_that_is_cut_ends_with_the_same_weights(
    phantom_store, tmp_path, monkeypatch, settings
):
    assert_cut_and_continued_is_uninterrupted(
        phantom_store, tmp_path, monkeypatch, steps=3, done=2, **settings
    )


# --- What a run is given ---


@pytest.mark.usefixtures("without_network")
def test_a_fold_trains_on_its_own_cases(phantom_store, tmp_path):
    cases = with_fold(phantom_store, "2/2").manifest.split["train"]
    settings = {**SMALL, **PATCH, "steps": 1, "batch": len(cases), "fold": "2/2"}
    config = train(phantom_store.folder, tmp_path, settings=settings)
    assert (config.fold, config.split_hash) == ("2/2", phantom_store.manifest.split_hash)
    (step,) = steps_of(tmp_path)
    assert sorted(step["case_id"].split()) == sorted(cases), "an epoch in one step"


def test_settings_from_python_are_refused_as_those_of_a_command_line(phantom_store, tmp_path):
    with pytest.raises(InputError, match="got 'stepz'; see --help"):
        train(phantom_store.folder, tmp_path / "run", settings={"stepz": 3})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_network")
def test_what_follows_a_training_has_its_lock_and_heartbeat_and_both_end_after_it(
    phantom_store, tmp_path
):
    followed = []

    def follow(run, store, heartbeat):
        with pytest.raises(InputError, match="one process at a time"), locked(run, "run"):
            pass
        followed.append((run, store, heartbeat.now.exit_code))
        heartbeat.phase("deciding")

    train(phantom_store.folder, tmp_path, settings={**FEW, "steps": 1}, on_finished=follow)
    beat = read_heartbeats(tmp_path)[0]
    assert (beat.phase, beat.exit_code, beat.reason) == ("ended", 0, "finished")
    assert followed == [(tmp_path, phantom_store.folder, None)]


# --- Going on ---


@pytest.mark.usefixtures("without_network")
def test_a_finished_run_is_left_alone_extended_or_gets_its_lost_last_line(
    phantom_store, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")

    def go(**settings):
        train(phantom_store.folder, tmp_path, settings={**FEW, **settings})
        return len(steps_of(tmp_path)), capsys.readouterr().err

    assert go(steps=2)[0] == 2
    log = tmp_path / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    last = newest(tmp_path).path.read_bytes()
    log.write_text("".join(lines[:-1]))
    partial = tmp_path / "checkpoints/.best.npz.1.cpu3d.partial"
    partial.touch()  # by a process that was killed
    assert "nothing to do after step 2: finished" in go()[1]
    assert log.read_text().splitlines()[:-1] == "".join(lines[:-1]).splitlines()
    assert last_event(tmp_path)["event"] == "end"
    assert not partial.exists()
    assert newest(tmp_path).path.read_bytes() == last
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    steps, printed = go(epochs=1, policy="lean")
    note = "note: this run had policy speed, OMP_NUM_THREADS 3 before"
    assert (steps, note in printed) == (4, True)


@pytest.mark.usefixtures("without_network")
def test_the_chief_alone_ends_a_finished_run_that_the_others_have_left(
    phantom_store, tmp_path, monkeypatch
):
    def go(steps):
        train(phantom_store.folder, tmp_path, settings={**FEW, "steps": steps, "batch": 2})

    go(1)
    monkeypatch.setenv("TF_CONFIG", Cluster(("127.0.0.1:20000", "b:1")).as_tf_config())
    monkeypatch.setattr("cpu3d.training.call.join.__kwdefaults__", {"meeting_s": 0.1})
    go(1)
    with pytest.raises(WorkerLostError):
        go(2)


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("name", ["dataset.json", "log.jsonl", "checkpoints/step-00000120.npz"])
def test_a_folder_of_data_or_of_another_program_is_refused_and_left_as_it_is(
    refused, tmp_path, name, more
):
    mine = tmp_path / "run" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine\n")
    assert f"must be a run or a new folder, got one with {name}" in refused(*more)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]


def test_a_dry_run_prints_the_plan_and_writes_nothing(phantom_store, tmp_path, capsys):
    options = ["--filters", "4", "--depth", "3", "--steps", "4", "--dry-run"]
    command = words(phantom_store, tmp_path / "run", *options)
    assert main(command) == 0
    assert "4 filters" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["steps"], plan["config"]["unet"]["filters"]) == (4, 4)
    assert plan["run"]["all_s"] > plan["training_s"] > 0
    assert plan["run"]["upper_bound_bytes"] > plan["predicted"]["process_peak_bytes"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("more", MORE)
def test_tracking_without_mlflow_is_refused(refused, monkeypatch, more):
    monkeypatch.setattr("importlib.util.find_spec", lambda *name: None)
    assert "mlflow must be installed" in refused("--mlflow", "somewhere", *more)


@pytest.mark.usefixtures("without_network")
def test_a_dry_run_of_a_finished_run_needs_no_memory(phantom_store, tmp_path, monkeypatch):
    train(phantom_store.folder, tmp_path, settings={**FEW, "steps": 2})
    with_free(monkeypatch, 10 * 2**20)
    assert main(words(phantom_store, tmp_path, "--dry-run")) == 0
    assert main(words(phantom_store, tmp_path, "--dry-run", "--steps", "4")) == 3


@pytest.mark.usefixtures("without_network")
def test_the_saved_plan_has_the_steps_that_a_budget_of_minutes_leaves(phantom_store, tmp_path):
    settings = {**SMALL, "epochs": 50, "budget_minutes": 1e-6}
    config = train(phantom_store.folder, tmp_path, settings=settings)
    plan = json.loads((tmp_path / "plan.json").read_text())
    parts = (plan, plan["config"], plan["run"], plan["schedule"])
    assert [part["steps"] for part in parts] == 4 * [config.steps] == 4 * [4]
    start = last_event(tmp_path, "start")
    computed = {"workers": 1, "micro_batch": 1, "device": "cpu", "precision": "float32"}
    assert start == {**start, **computed, "steps": 4, "coarse_steps": 0}
    beat = read_heartbeats(tmp_path)[0]
    longest_s = max(step["step_s"] for step in steps_of(tmp_path))
    assert (beat.steps, beat.longest_step_s) == (4, longest_s)
    assert beat.bound_bytes == pytest.approx(plan["run"]["upper_bound_bytes"], rel=1e-3)
    steps_s = 4 * plan["predicted"]["step_s"]
    assert plan["training_s"] == pytest.approx(steps_s)
    assert plan["run"]["steps_s"] == pytest.approx(steps_s)
    assert plan["left_s"] == pytest.approx(plan["run"]["all_s"])
    train(phantom_store.folder, tmp_path, settings={"epochs": 2, "budget_minutes": 0.0})
    assert len(steps_of(tmp_path)) == 8
    settings["validations"] = 1  # no epoch is needed for it
    assert train(phantom_store.folder, tmp_path / "one", settings=settings).steps == 1


# --- Memory ---


def with_free(monkeypatch, free_bytes):
    """Have `train` find a host that has this much free."""
    host = dataclasses.replace(read_host(), available_bytes=free_bytes, cgroup_limit_bytes=None)
    monkeypatch.setattr("cpu3d.training.call.read_host", lambda: host)


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_a_run_that_may_not_fit_is_refused_before_anything_is_written(
    refused, tmp_path, monkeypatch, more
):
    """A worker has its part of what is free."""
    with_free(monkeypatch, 20 * 2**20)
    monkeypatch.setenv("TF_CONFIG", Cluster(("a:1", "a:2")).as_tf_config())
    assert "got 10 MiB free" in refused("--batch", "2", *more, code=3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_network")
def test_a_forced_run_logs_its_plan_and_continues_if_it_fits(
    phantom_store, tmp_path, monkeypatch, capsys
):
    def go(epochs, **options):
        settings = {**SMALL, "epochs": epochs, "batch": 2, "extent": "full"}
        train(phantom_store.folder, tmp_path, settings=settings, **options)

    with_free(monkeypatch, 200 * 2**20)
    go(1, force=True)
    go(1)
    assert "nothing to do after step" in capsys.readouterr().err, "it needs no memory"
    kept = [path.read_bytes() for path in tmp_path.glob("*.json*")]
    with pytest.raises(DoesNotFitError, match="as a run in another folder"):
        go(2)
    assert [path.read_bytes() for path in tmp_path.glob("*.json*")] == kept


def without_codes(store, folder, *codes):
    """A store whose labels lack these codes, by its records."""
    cases = []
    for case in store.manifest.cases:
        others = {code: n for code, n in case.label_voxels.items() if code not in codes}
        cases.append(dataclasses.replace(case, label_voxels=others))
    view = Store(store.folder, dataclasses.replace(store.manifest, cases=cases))
    return stored(view, folder)


@pytest.mark.usefixtures("without_network")
def test_a_region_that_no_training_case_has_is_a_line_of_warning(phantom_store, tmp_path, capsys):
    store = without_codes(phantom_store, tmp_path / "store", 3)
    warning = "to learn it, got none of ET (label 3)"
    for regions, lines in ((("WT", "TC", "ET"), 1), (("WT", "TC"), 0)):
        run = tmp_path / f"of {len(regions)}"
        train(store.folder, run, settings={**FEW, "steps": 1, "regions": regions})
        assert capsys.readouterr().err.count(warning) == lines
    for run, lines in (("new", 1), ("of 3", 0)):
        assert main(words(store, tmp_path / run, "--dry-run")) == 0
        assert capsys.readouterr().out.count(warning) == lines


@pytest.mark.usefixtures("without_network")
def test_a_store_without_a_labelled_voxel_is_trained_on_if_that_is_forced_or_was_begun(
    refused, phantom_store, tmp_path
):
    store = without_codes(phantom_store, tmp_path / "store", 1, 2, 3)
    run = tmp_path / "run"
    for more in ([], ["--dry-run"]):
        printed = refused(*more, store=store)
        assert re.search("error: .* must have labelled voxels, got none .*--force", printed)
        assert not run.exists()
    train(store.folder, run, settings={**FEW, "steps": 2}, force=True)
    train(store.folder, run, settings={"steps": 3})
    assert len(steps_of(run)) == 3


@pytest.mark.slow
def test_one_real_case_is_learnt_in_120_steps(real_cases, tmp_path):
    prepare(real_cases / "brats-gli-real", tmp_path / "store", fractions=(1, 0, 0), workers=1)
    train(tmp_path / "store", tmp_path / "run", settings={"epochs": 120, "augment": "off"})
    predictor = load_predictor(tmp_path / "run")
    scores = evaluate_split(predictor, open_store(tmp_path / "store"), "train", tmp_path / "run")[
        "summary"
    ]
    for name, least in {"WT": 0.95, "TC": 0.90, "ET": 0.80}.items():
        assert scores[name]["dice"]["mean"] >= least
