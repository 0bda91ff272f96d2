"""The plan of a run: what is decided where a setting was left open, what it takes, and what is
proposed where it does not fit."""

import dataclasses
import json
import math
import re
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpu3d.bench import harness
from cpu3d.bench.step_costs import measure, request_for
from cpu3d.data.labels import label_from_regions
from cpu3d.data.manifest import remake
from cpu3d.data.region import Region
from cpu3d.data.store import Store, grid_size
from cpu3d.distributed.rendezvous import plan_of_chief
from cpu3d.errors import DoesNotFitError, InputError
from cpu3d.host.gpu import Gpu
from cpu3d.plan import make_plan, save_plan
from cpu3d.plan_text import check_run, plan_lines
from cpu3d.run.config_json import load_config, save_config
from cpu3d.run.log import append_event
from memory_estimator import __main__ as estimator
from memory_estimator.common.units import format_bytes, format_seconds
from memory_estimator.estimate import estimate
from memory_estimator.host import Host
from memory_estimator.job import Job
from memory_estimator.planner import check_patch, gpu_bytes, patch_shapes, usual_patch
from memory_estimator.sources import read_run
from memory_estimator.training import whole_volume_bytes
from models.config import UNetConfig
from models.layer_plan import layer_plan
from models.strides import network_grid
from tests.cpu3d import runs
from tests.cpu3d.conftest import make_store
from tests.cpu3d.host.hosts import BFLOAT16
from tests.cpu3d.runs import decided, of_voxels, stored

SMALL = {**runs.SMALL, "depth": 3}  # two halvings, which may differ

GIB = 2**30
HOST = Host("a CPU", 1, 2, 2, 1, 24 * GIB, 20 * GIB, None, 0, None, BFLOAT16)
PATCH = {"mode": "patch", "patch": [16, 16, 16]}


def with_free(free_bytes):
    return dataclasses.replace(HOST, available_bytes=round(free_bytes))


def planned(store, folder, workers=1, host=HOST, **settings):
    return make_plan(store, folder, host, {**SMALL, **settings}, workers=workers)


def test_a_plan_is_saved_with_all_that_was_decided(phantom_store, tmp_path):
    plan = planned(phantom_store, tmp_path, batch=2, steps=0, epochs=3)
    save_plan(plan, tmp_path)
    content = json.loads((tmp_path / "plan.json").read_text())
    assert (content["steps_per_epoch"], content["steps"], content["continues"]) == (2, 6, False)
    assert content["config"]["grid"] == list(plan.config.grid)
    full = plan.forecast.full
    assert content["predicted"]["upper_bound_bytes"] == full.upper_bound_bytes
    threads = full.job.threads
    assert dataclasses.replace(read_run(tmp_path).job, threads=threads) == full.job
    text = " ".join(plan_lines(plan, HOST))
    for figure in (
        "20.00 GiB free",
        format_bytes(plan.forecast.upper_bound_bytes),
        format_bytes(full.process_peak_bytes),
        format_seconds(full.step_s),
        format_seconds(plan.forecast.all_s),
    ):
        assert figure in text


def test_a_run_keeps_its_stores_order_of_painting_for_the_regions_that_it_learns(tmp_path):
    store = make_store(tmp_path / "store", tmp_path / "source")
    paint = (("WT", 2), ("TC", 2), ("ET", 3))
    store = Store(store.folder, dataclasses.replace(store.manifest, paint=paint))
    config = decided(store, tmp_path, regions=("WT", "ET"))
    save_config(config, tmp_path)
    assert load_config(tmp_path) == config
    assert list(config.codes_by_region) == ["WT", "ET"]
    answers = np.array([0.9, 0.1], np.float32).reshape(1, 1, 1, 2)
    assert label_from_regions(answers, config.codes_by_region) == 2  # and not 1
    with pytest.raises(InputError, match=r"code 1, edema, .* must be painted as WT, got 2"):
        decided(store, tmp_path / "all")  # where TC has the code 2


def test_the_others_take_the_chief_s_plan_on_their_own_store_and_engine(phantom_store, tmp_path):
    plan = planned(phantom_store, tmp_path, workers=2, batch=2)
    content = json.loads(json.dumps({**plan.to_json(), "engine_name": "an engine"}))
    theirs = plan_of_chief(content, phantom_store, HOST, "an engine")
    assert (theirs.config, theirs.workers, theirs.forecast) == (plan.config, 2, plan.forecast)
    with pytest.raises(InputError, match="engine must be the chief's, an engine, got another"):
        plan_of_chief(content, phantom_store, HOST, "another")
    content["config"] = {**content["config"], "split_hash": "0"}
    with pytest.raises(InputError, match="must be the chief's, got split"):
        plan_of_chief(content, phantom_store, HOST, "an engine")


def test_without_native_operations_layers_are_planned(phantom_store, tmp_path, monkeypatch):
    monkeypatch.setattr("models.native.build.BUILT", tmp_path)
    here = dataclasses.replace(HOST, is_here=True)
    plan = planned(phantom_store, tmp_path, host=here)
    own = planned(phantom_store, tmp_path)
    assert "built" in plan.reasons["native operations"]
    assert "native operations" not in own.reasons
    assert plan.forecast.upper_bound_bytes > own.forecast.upper_bound_bytes
    assert plan.forecast.full.step_s > own.forecast.full.step_s


# --- A run that continues ---


def begun(store, run, step=6, host=HOST, workers=1, **settings):
    """The plan of a run that has a checkpoint of a step."""
    plan = make_plan(store, run, host, settings, workers=workers)
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / f"step-{step:08}.npz").touch()
    save_config(plan.config, run)
    save_plan(plan, run)
    return plan


@pytest.mark.parametrize("chosen", [PATCH, {"recipe": "paper-flair"}])
def test_the_same_command_and_a_shorter_one_continue_a_run_whatever_the_host_would_choose(
    phantom_store, tmp_path, chosen
):
    first = begun(phantom_store, tmp_path, depth=3, **chosen)
    slow = dataclasses.replace(HOST, isa=(), available_bytes=2 * GIB)
    for again in ({}, {"depth": 3, **chosen}, {"strides": "auto", "policy": "auto"}):
        plan = make_plan(phantom_store, tmp_path, slow, again)
        assert (plan.config, plan.continues, plan.done) == (first.config, True, 6)


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 12},
        {"epochs": 9},
        {"policy": "lean"},
        {"micro_batch": 2},
        {"learning_rate": 0.005},
    ],
)
def test_a_run_may_change_its_length_its_rate_and_how_it_is_computed(
    phantom_store, tmp_path, changes
):
    first = begun(phantom_store, tmp_path, depth=3, batch=2, policy="speed").config
    config = make_plan(phantom_store, tmp_path, HOST, changes).config
    (name, value) = next(iter(changes.items()))
    assert getattr(config.unet if name == "policy" else config, name) == value
    changed = {each for each, value in vars(config).items() if value != getattr(first, each)}
    assert changed - {"validations"} == {"unet" if name == "policy" else name}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"filters": 8}, "--filters 8 for 4"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16 for float32"),
        ({"batch": 4}, "--batch 4 for 1"),
        ({"regions": ["WT"]}, "--regions WT for"),
        ({"mode": "whole"}, "--mode whole for patch"),
        ({"patch": [8, 16, 16]}, "--patch must stay as the run was begun"),
        ({"recipe": "demo"}, "--recipe must stay as the run was begun"),
        ({"fold": "1/2"}, "--fold 1/2 for"),
        ({"steps": 5}, "steps must be at least 6, .* got 5; --steps 6"),
    ],
)
def test_all_other_settings_would_be_another_run(phantom_store, tmp_path, changes, message):
    begun(phantom_store, tmp_path, **SMALL, **PATCH)
    with pytest.raises(InputError, match=message):
        make_plan(phantom_store, tmp_path, HOST, changes)


def test_another_split_is_another_run_and_one_without_a_checkpoint_is_planned_anew(
    phantom_store, tmp_path
):
    begun(phantom_store, tmp_path, **SMALL)
    first, *rest = phantom_store.manifest.cases
    other = (dataclasses.replace(first, image_voxels_sha256="0" * 64), *rest)
    changed = Store(phantom_store.folder, remake(phantom_store.manifest, cases=other))
    with pytest.raises(InputError, match="split_hash"):
        make_plan(changed, tmp_path, HOST, {})
    shutil.rmtree(tmp_path / "checkpoints")
    again = make_plan(changed, tmp_path, HOST, {**SMALL, "filters": 8})
    assert (again.config.unet.filters, again.continues) == (8, False)


@pytest.mark.parametrize(
    ("first", "before", "again", "validations"),
    [
        ({"epochs": 3}, 3, {"epochs": 30}, 20),
        ({"epochs": 30, "validations": 2}, 2, {"epochs": 60}, 2),
        ({"steps": 1}, 1, {}, 1),
    ],
)
def test_a_run_has_a_validation_an_epoch_at_most_twenty_unless_they_are_chosen(
    phantom_store, tmp_path, first, before, again, validations
):
    plan = begun(phantom_store, tmp_path, step=1, depth=3, **first)
    assert plan.config.validations == before
    assert make_plan(phantom_store, tmp_path, HOST, again).config.validations == validations


@pytest.mark.parametrize(("steps", "coarse"), [(8, 6), (16, 13), (32, 13)])
def test_a_run_made_longer_keeps_its_coarse_steps_and_one_made_shorter_has_fewer(
    phantom_store, tmp_path, steps, coarse
):
    begun(phantom_store, tmp_path, step=6, depth=3, curriculum="half", steps=16)
    plan = make_plan(phantom_store, tmp_path, HOST, {"steps": steps})
    assert plan.config.coarse_steps == coarse
    with pytest.raises(InputError, match=r"steps must be above the 6 that .* at half resolution"):
        make_plan(phantom_store, tmp_path, HOST, {"steps": 6})


def test_a_budget_that_has_become_steps_stays_so_until_it_is_changed(phantom_store, tmp_path):
    plan = begun(phantom_store, tmp_path, depth=3, epochs=9, budget_minutes=2.0)
    save_config(dataclasses.replace(plan.config, steps=7), tmp_path)
    for again, steps in (
        ({}, 7),
        ({"budget_minutes": 2.0}, 7),
        ({"budget_minutes": 3.0}, 0),
        ({"epochs": 9}, 0),
        ({"steps": 8}, 8),
    ):
        assert make_plan(phantom_store, tmp_path, HOST, again).config.steps == steps


def test_batch_norm_sees_what_a_worker_computes_and_that_stays_as_it_was(phantom_store, tmp_path):
    settings = {**SMALL, "batch": 4, "norm": "batch"}
    config = begun(phantom_store, tmp_path, step=1, workers=2, **settings).config
    assert (config.micro, config.micro_batches) == (2, 2)
    assert make_plan(phantom_store, tmp_path, HOST, {}).config.micro == 2
    with pytest.raises(InputError, match="--micro-batch must divide the 1 volumes of a worker"):
        make_plan(phantom_store, tmp_path, HOST, {}, workers=4)
    with pytest.raises(InputError, match="micro 4 for 2"):
        make_plan(phantom_store, tmp_path, HOST, {"micro_batch": 4})


@pytest.mark.parametrize(
    ("changes", "own"), [({}, True), ({"policy": "lean"}, False), ({"workers": 2}, False)]
)
def test_what_is_left_is_at_the_pace_of_the_last_attempt_if_it_was_computed_alike(
    phantom_store, tmp_path, changes, own
):
    plan = begun(phantom_store, tmp_path, **SMALL, steps=16, policy="speed")
    start = {"step": 0, "policy": "speed", "workers": 1, "device": "cpu", "host": HOST.summary()}
    append_event(tmp_path, {"event": "start", **start, **changes})
    for step in range(1, 7):
        append_event(tmp_path, {"event": "step", "step": step, "step_s": 77.0})
    again = make_plan(phantom_store, tmp_path, HOST, {})
    step_s = 77.0 if own else plan.forecast.full.step_s
    assert again.left_s == pytest.approx(10 * step_s)


def test_a_continued_run_is_told_only_of_what_it_may_change(phantom_store, tmp_path, priced):
    plan = planned(phantom_store, tmp_path, policy="speed", batch=4, micro_batch=4)
    several = dataclasses.replace(plan, continues=True)
    assert "--policy lean --micro-batch 1: up to 6.00 GiB" in refusal(several, 8 * GIB)
    assert re.search("another folder.* up to ", refusal(several, 5 * GIB))


# --- What does not suit ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"channels": ["PET"]}, "channels must be among"),
        ({"batch": 4, "micro_batch": 3}, "--micro-batch must divide the batch of 4, got 3"),
        ({"batch": 9}, "^--batch must be at most the 4 training cases, got 9"),
        ({**PATCH, "batch": 29}, "^--batch must be at most the 28 patches .*, got 29"),
        ({"budget_minutes": 1.0, "steps": 3}, "--budget-minutes must .*, got --steps 3"),
        ({"patch": [16, 16, 16]}, "--patch must come with --mode patch, got mode whole"),
        ({"depth": 5, "curriculum": "half"}, "--curriculum must be off .*32 along Y.*, got half"),
        ({"workers": 3, "batch": 4}, "^--batch must be a multiple of the 3 workers, got 4"),
        (
            {"workers": 2, "batch": 4, "micro_batch": 4},
            "^--micro-batch must divide the 2 volumes of a worker, got 4",
        ),
        ({**PATCH, "patch": [16, 18, 16]}, "^--patch 16 18 16 must .* 4, .*; give 16 20 16$"),
        ({"mode": "patch", "device": "gpu:0"}, "^--device must be a GPU .*, got gpu:0"),
    ],
)
def test_settings_that_do_not_suit_are_refused(phantom_store, tmp_path, settings, message):
    with pytest.raises(InputError, match=message):
        decided(phantom_store, tmp_path / "run", **{**SMALL, **settings})
    assert not (tmp_path / "run").exists()


# --- The strides ---


THICK = (1.0, 1.0, 5.0)


@pytest.mark.parametrize(
    ("spacing_mm", "settings", "strides"),
    [
        ((1.0, 1.0, 1.9), {}, ()),
        (THICK, {"strides": "auto"}, ((2, 2, 1), (2, 2, 1))),
        (THICK, {"strides": ((2, 1, 2), (2, 2, 2))}, ((2, 1, 2), (2, 2, 2))),
        # of a patch it is the patch that counts: 8 voxels become 4 and no less
        ((1.0, 1.0, 1.0), {"mode": "patch", "patch": (16, 16, 8)}, ((2, 2, 2), (2, 2, 1))),
    ],
)
def test_strides_follow_from_the_voxels_unless_they_are_chosen(
    phantom_store, tmp_path, spacing_mm, settings, strides
):
    plan = planned(of_voxels(phantom_store, *spacing_mm), tmp_path, **settings)
    unet = plan.config.unet
    assert unet.strides == strides
    is_open = settings.get("strides", "auto") == "auto"
    assert ("strides" in plan.reasons) == is_open
    assert all(n % divisor == 0 for n, divisor in zip(plan.config.grid, unet.divisors))


@pytest.mark.parametrize("settings", [{}, {"mode": "patch", "patch": (20, 24, 16)}])
def test_coarse_steps_halve_the_axes_of_the_first_level(phantom_store, tmp_path, settings):
    strides = ((1, 2, 2), (2, 2, 1))
    plan = planned(phantom_store, tmp_path, strides=strides, curriculum="half", **settings)
    config = plan.config
    seen = grid_size(phantom_store, extent="brain", multiple=1)
    if settings:
        seen = config.grid
    halved = [-(-side // step) for side, step in zip(seen, strides[0])]
    assert config.coarse_grid == network_grid(halved, (1, 1, 1), config.unet.divisors)
    assert plan.forecast.coarse.job.shape == config.coarse_grid
    share = math.prod(config.coarse_grid) / math.prod(config.grid)  # of a full step's cost
    cost = plan.steps - config.coarse_steps * (1 - share)
    assert config.full_steps(plan.steps) == pytest.approx(cost)


@pytest.mark.parametrize(
    ("settings", "depth"),
    [
        # its brains: 34 42 33 voxels at most, then 17 21 17, 9 11 9, 5 6 5
        ({"depth": "auto"}, 4),
        ({"depth": 5}, 5),
        ({"strides": ((2, 2, 2), (2, 2, 1))}, 3),
        ({"mode": "patch", "patch": (16, 16, 16)}, 3),
    ],
)
def test_levels_follow_from_the_voxels_unless_they_are_chosen(
    phantom_store, tmp_path, settings, depth
):
    plan = make_plan(phantom_store, tmp_path, HOST, settings)
    assert plan.config.unet.depth == depth
    assert ("depth" in plan.reasons) == (depth < 5 and "strides" not in settings)


def test_all_folds_have_the_strides_of_training_and_validation_together(phantom_store, tmp_path):
    split = phantom_store.manifest.split
    thin = [*split["train"][:2], *split["test"]]
    store = of_voxels(phantom_store, *THICK, but=thin)  # 2 of 5 that decide
    for fold in ("", *(f"{part}/5" for part in range(1, 6))):
        config = planned(store, tmp_path, fold=fold).config
        assert config.unet.strides == ((2, 2, 1), (2, 2, 1))


@pytest.mark.parametrize(
    ("host", "side"),
    # half of the larger has coarse steps
    [(HOST, 96), (dataclasses.replace(HOST, isa=("avx2",)), 48)],
)
def test_an_estimate_of_a_store_is_of_the_run_that_train_plans(
    phantom_store, tmp_path, capsys, monkeypatch, host, side
):
    monkeypatch.setattr("memory_estimator.planned_host.read_host", lambda: host)

    def estimated(*options):
        options = ["--json", *map(str, options)]
        assert estimator.main(options) == 0
        return json.loads(capsys.readouterr().out)

    thick = of_voxels(phantom_store, *THICK).manifest
    first, *others = thick.cases
    box = Region((0, 0, 0), (side, side, side))
    first = dataclasses.replace(
        first,
        **dict.fromkeys(("box", "stored"), box),
        shape=box.size,
        geometry=dataclasses.replace(first.geometry, shape=box.size),
    )
    larger = dataclasses.replace(thick, cases=(first, *others))
    store = stored(Store(phantom_store.folder, larger), tmp_path / "store")
    plan = make_plan(store, tmp_path / "run", host, {"filters": 8})
    assert bool(plan.config.coarse_steps) == (side == 96)
    of_store = estimated("--store", store.folder, "--filters", 8)
    job = dataclasses.replace(plan.job, threads=plan.forecast.full.job.threads)
    assert of_store["job"] == json.loads(json.dumps(job.to_json()))
    assert of_store["upper_bound_bytes"] == plan.forecast.upper_bound_bytes
    assert of_store["run"] == json.loads(json.dumps(plan.to_json()["run"]))
    assert plan.reasons["strides"].endswith(of_store["strides"]["reason"])
    box = store.manifest.largest_box
    depth = plan.config.unet.depth
    of_shape = estimated("--shape", *box, "--spacing", *THICK, "--depth", depth)
    assert of_shape["strides"] == of_store["strides"]
    assert of_shape["job"]["shape"] == list(plan.config.grid)


@pytest.mark.slow  # a process of its own
@pytest.mark.parametrize(("policy", "step"), [("lean", -1), ("speed", 0)])
def test_the_memory_of_thick_slices_is_what_is_predicted(phantom_store, tmp_path, policy, step):
    """Of a full step, and of the first one, which is coarse."""
    store = of_voxels(phantom_store, *THICK)
    settings = {"policy": policy, "filters": 16, "depth": 4, "dtype": "float32"}
    plan = make_plan(store, tmp_path, HOST, {**settings, "curriculum": "half"})
    assert plan.config.unet.divisors[2] < plan.config.unet.divisors[1]
    of_step = plan.forecast.full if step else plan.forecast.coarse
    job = dataclasses.replace(of_step.job, from_store=False)
    measured = harness.in_fresh_process(measure, request_for(job, steps=1))
    predicted = estimate(job, plan.forecast.full.constants)
    assert measured["allocator_peak_bytes"] == pytest.approx(
        predicted.allocator_peak_bytes, rel=0.05
    )


# --- The curriculum ---


@pytest.mark.parametrize(
    ("settings", "coarse", "steps"),
    [
        ({}, "half", 6),
        ({"curriculum": "auto"}, "off", 0),  # half of so small a grid does not pay
        # half of it along Z, which is halved once in five levels, is not one voxel
        ({"depth": 5, "strides": ((2, 2, 1), (2, 2, 1), (2, 1, 1), (1, 2, 2))}, "half", 6),
        ({"steps": 1}, "half", 0),  # which is in full
    ],
)
def test_most_steps_are_coarse_where_the_grid_allows(
    phantom_store, tmp_path, settings, coarse, steps
):
    plan = planned(
        phantom_store, tmp_path, 1, **{"curriculum": "half", "depth": 3, "steps": 8, **settings}
    )
    assert (plan.config.curriculum, plan.config.coarse_steps) == (coarse, steps)
    if steps:
        assert plan.config.at(5).grid == plan.config.coarse_grid
        assert plan.config.at(6).grid == plan.config.grid
        wanted = steps * plan.forecast.coarse.step_s + (8 - steps) * plan.forecast.full.step_s
        assert plan.training_s == pytest.approx(wanted)
        assert plan.forecast.coarse.process_peak_bytes < plan.forecast.full.process_peak_bytes


# --- Memory ---


@pytest.fixture
def priced(monkeypatch, phantom_store):
    """Estimates as they are, but for what the policies take: 12 and 6 GiB for each whole volume of
    the phantoms that is computed at a time, half of it in bfloat16."""
    taken = {"speed": (12, 1.0), "lean": (6, 1.3)}
    whole = math.prod(planned(phantom_store, phantom_store.folder).config.grid)

    def made(job, *more, **options):
        gib, step_s = taken[job.policy]
        bound = gib * GIB * job.voxels / whole / (2 if job.unet.dtype == "bfloat16" else 1)
        return dataclasses.replace(
            estimate(job, *more, **options), upper_bound_bytes=round(bound), step_s=step_s
        )

    monkeypatch.setattr("memory_estimator.training.estimate", made)


@pytest.mark.parametrize(("free_gib", "policy"), [(12, "speed"), (11, "lean")])
def test_the_fastest_policy_that_fits_is_picked_with_a_reason(
    phantom_store, tmp_path, priced, free_gib, policy
):
    host = with_free(free_gib * GIB)
    plan = planned(phantom_store, tmp_path, host=host)
    assert plan.config.unet.policy == policy
    assert f"{free_gib}.00 GiB free" in plan.reasons["policy"]
    asked = planned(phantom_store, tmp_path, host=host, policy="lean")
    assert asked.config.unet.policy == "lean"
    assert "policy" not in asked.reasons


def refusal(plan, free_bytes):
    with pytest.raises(DoesNotFitError) as caught:
        check_run(plan, with_free(free_bytes))
    assert caught.value.exit_code == 3
    return str(caught.value)


def test_a_run_that_fits_exactly_is_let_through_and_a_byte_less_is_not(phantom_store, tmp_path):
    plan = planned(phantom_store, tmp_path)
    check_run(plan, with_free(plan.forecast.full.upper_bound_bytes))
    assert "memory must hold this training, up to" in refusal(
        plan, plan.forecast.full.upper_bound_bytes - 1
    )


def test_steps_that_are_timed_before_the_run_hold_its_variables_twice(phantom_store, tmp_path):
    plan, timed = (
        planned(phantom_store, tmp_path, policy="speed", steps=0, **more)
        for more in ({}, {"budget_minutes": 4.0})
    )
    parameters = sum(
        op.trainable + op.frozen for op in layer_plan(plan.config.unet, plan.config.grid)
    )
    more = timed.forecast.full.upper_bound_bytes - plan.forecast.full.upper_bound_bytes
    assert more == pytest.approx(8 * parameters, rel=0.05), "weights and Muon's slot"


# --- Runs whose steps see less than whole volumes ---


@pytest.mark.parametrize("settings", [{}, PATCH])
def test_whole_volumes_are_in_the_bound_where_steps_see_less_than_these(
    phantom_store, tmp_path, settings
):
    plan = planned(phantom_store, tmp_path, policy="speed", **settings)
    full = plan.forecast.full
    extra = 0
    if settings:
        extra = whole_volume_bytes(full.job, phantom_store.manifest.largest_box, (1, 1, 1))
    alone = estimate(full.job, full.constants, full.accuracy)
    assert full.upper_bound_bytes == alone.upper_bound_bytes + extra
    split = {**phantom_store.manifest.split, "val": ()}
    store = Store(phantom_store.folder, dataclasses.replace(phantom_store.manifest, split=split))
    without = planned(store, tmp_path, policy="speed", **settings).forecast.full.upper_bound_bytes
    assert without == full.upper_bound_bytes - extra, "no validation, no volume"


def test_what_a_large_store_keeps_of_each_case_is_in_the_bound(phantom_store, tmp_path):
    case = phantom_store.manifest.cases[0]

    def bound(count):
        cases = [dataclasses.replace(case, case_id=f"{n:05d}") for n in range(count)]
        split = {"train": [case.case_id for case in cases], "val": (), "test": ()}
        manifest = remake(phantom_store.manifest, cases=cases, split=split)
        store = Store(phantom_store.folder, manifest)
        return planned(store, tmp_path, policy="speed").forecast.upper_bound_bytes

    assert bound(2000) - bound(1) == pytest.approx(2000 * 1200, rel=0.2)


# --- Patches ---


def test_whole_and_patch_runs_share_everything_else(phantom_store, tmp_path):
    patches = {"mode": "patch", "patch": [16, 16, 32]}
    whole, patch = (decided(phantom_store, tmp_path, **SMALL, **more) for more in ({}, patches))
    changed = {name for name, value in vars(whole).items() if value != getattr(patch, name)}
    assert changed == {"mode", "grid", "patches_per_case"}
    grid = grid_size(phantom_store, extent="brain", multiple=4)
    assert patch.patches_per_case == round(math.prod(grid) / (16 * 16 * 32)) == 3, (
        "an epoch sees as much"
    )


def test_without_a_size_a_patch_is_the_usual_one_within_the_volume(phantom_store, tmp_path):
    config = decided(phantom_store, tmp_path, **SMALL, mode="patch")
    assert config.grid == grid_size(phantom_store, extent="brain", multiple=4)
    assert usual_patch((240, 240, 20), (16, 16, 4)) == (128, 128, 20)
    # two voxels at the bottom of 8 levels
    assert usual_patch((512, 512, 128), (128, 128, 128)) == (256, 256, 128)


@given(
    sides=st.tuples(*[st.integers(1, 12)] * 3),
    depth=st.integers(2, 8),
    patch=st.tuples(*[st.integers(1, 800)] * 3),
)
def test_what_is_offered_instead_of_a_patch_is_one_that_is_taken(sides, depth, patch):
    divisors = UNetConfig(depth=depth).divisors
    grid = tuple(divisor * n for divisor, n in zip(divisors, sides))
    for shape in (*patch_shapes(grid, divisors), usual_patch(grid, divisors)):
        # What a card is given, thin volumes whole, is what may be asked for.
        check_patch(shape, grid, divisors)
    try:
        check_patch(patch, grid, divisors)
    except ValueError as error:
        offered = str(error).rpartition("; give ")[2].partition(",")[0]
        check_patch(tuple(map(int, offered.split())), grid, divisors)


# --- Runs on a card ---

CARD = Gpu(
    index=0, name="made up", memory_bytes=16 * GIB, free_bytes=16 * GIB, compute_capability=(8, 0)
)


def test_a_card_sets_device_dtype_and_patch(phantom_store, tmp_path):
    settings = {**SMALL, "mode": "patch", "dtype": "auto", "device": "gpu:0"}

    def plan(card, **more):
        return make_plan(phantom_store, tmp_path, HOST, {**settings, **more}, gpus=(card,))

    config = plan(CARD).config
    assert (config.device, config.unet.dtype) == ("gpu:0", "bfloat16")
    # a small volume fits a large card
    assert config.grid == grid_size(phantom_store, extent="brain", multiple=4)
    older = dataclasses.replace(CARD, compute_capability=(7, 5))
    assert plan(older).config.unet.dtype == "float32"
    with pytest.raises(InputError, match="--device must be cpu for several workers, got gpu:0"):
        make_plan(phantom_store, tmp_path, HOST, {**settings, "batch": 2}, gpus=(CARD,), workers=2)
    small, full, silent = (
        dataclasses.replace(CARD, free_bytes=free) for free in (round(1.02 * GIB), 2**20, None)
    )
    of_small = plan(small, dtype="float32").config
    assert gpu_bytes(Job(of_small.unet, of_small.grid, engine="stock")) <= small.free_bytes
    with pytest.raises(DoesNotFitError, match=r"must hold a patch of at least 8 x 8 x 8, .* 1 MiB"):
        plan(full)
    with pytest.raises(InputError, match="the free memory of gpu:0 must be known"):
        plan(silent)
    chosen = plan(full, patch=[24, 32, 32])
    for continues in (False, True):
        with pytest.raises(DoesNotFitError, match=r"^gpu:0 must hold a step of .*, got 1 MiB free"):
            check_run(dataclasses.replace(chosen, continues=continues), HOST, [full])
    check_run(chosen, HOST, [silent])


@pytest.mark.parametrize("recipe", [{}, {"recipe": "gpu-patch"}])
def test_the_same_command_continues_on_the_device_that_was_picked(
    phantom_store, tmp_path, monkeypatch, recipe
):
    monkeypatch.setattr("cpu3d.host.gpu.cuda_is_installed", lambda: True)
    cards = tuple(
        dataclasses.replace(CARD, index=index, free_bytes=2 ** (33 + index)) for index in range(2)
    )
    settings = {**recipe, "gpus": cards, "mode": "patch", "depth": 3}
    config = decided(phantom_store, tmp_path, **settings)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000001.npz").touch()
    # Of two cards the one with more memory free, but for the recipe that names one.
    assert config.device == ("gpu:0" if recipe else "gpu:1")
    save_config(config, tmp_path)
    moved = decided(phantom_store, tmp_path, **settings, device="cpu")
    assert moved == dataclasses.replace(config, device="cpu")
    save_config(moved, tmp_path)
    assert decided(phantom_store, tmp_path, **settings) == moved
