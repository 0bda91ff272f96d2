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

from cpu3d.data.augment import AUGMENTS, AugmentConfig
from cpu3d.data.labels import label_from_regions
from cpu3d.data.manifest import remake
from cpu3d.data.region import Region, round_up
from cpu3d.data.store import Store, grid_size
from cpu3d.data.stores.store_decisions import median_extent
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
from memory_estimator.planner import check_patch, gpu_bytes, usual_patch
from memory_estimator.sources import read_run
from memory_estimator.training import ExtraMemory, Schedule
from models.config import UNetConfig
from tests.cpu3d import runs
from tests.cpu3d.data.stores.test_store_decisions import in_boxes
from tests.cpu3d.host.hosts import BFLOAT16
from tests.cpu3d.runs import of_voxels, stored

SMALL = {**runs.SMALL, "depth": 3}  # two halvings, which may differ

GIB = 2**30
HOST = Host("a CPU", 1, 2, 2, 1, 24 * GIB, 20 * GIB, None, 0, None, BFLOAT16)
PATCH = {"mode": "patch", "patch": [16, 16, 16]}


@pytest.fixture
def plan_with(phantom_store, tmp_path):
    """plan_with(steps=8): the plan of the run in `tmp_path`, new or continued, on the phantoms."""

    def make(*, store=phantom_store, host=HOST, workers=1, gpus=(), **settings):
        return make_plan(store, tmp_path, host, settings, workers=workers, gpus=gpus)

    return make


@pytest.fixture
def planned(plan_with):
    """planned(steps=8): the same with a small network."""
    return lambda **settings: plan_with(**{**SMALL, **settings})


def test_a_plan_is_saved_with_all_that_was_decided(planned, tmp_path):
    plan = planned(batch=3, steps=0, epochs=3, seed=7)  # of 4 cases
    assert plan.config.unet.seed == 7  # of the first weights
    save_plan(plan, tmp_path)
    content = json.loads((tmp_path / "plan.json").read_text())
    assert (content["steps_per_epoch"], content["steps"]) == (1, 3)
    full = plan.forecast.full
    assert content["predicted"]["upper_bound_bytes"] == full.upper_bound_bytes
    threads = full.job.threads
    assert dataclasses.replace(read_run(tmp_path).job, threads=threads) == full.job
    text = " ".join(plan_lines(plan, HOST))
    for figure in (
        "20.00 GiB free",
        format_bytes(plan.forecast.upper_bound_bytes),
        format_seconds(full.step_s),
        format_seconds(plan.forecast.all_s),
    ):
        assert figure in text


def test_a_run_keeps_its_stores_order_of_painting_for_the_regions_that_it_learns(
    planned, tiny_store, tmp_path
):
    paint = (("WT", 2), ("TC", 2), ("ET", 3))
    store = Store(tiny_store.folder, dataclasses.replace(tiny_store.manifest, paint=paint))
    save_config(planned(store=store, regions=("WT", "ET")).config, tmp_path)
    answers = np.array([0.9, 0.1], np.float32).reshape(1, 1, 1, 2)
    codes = load_config(tmp_path).codes_by_region
    assert label_from_regions(answers, codes) == 2  # and not 1
    with pytest.raises(InputError, match=r"code 1, edema, .* must be painted as WT, got 2"):
        planned(store=store)  # where TC has the code 2


def test_the_others_take_the_chief_s_plan_on_their_own_store_and_engine(phantom_store, planned):
    plan = planned(workers=2, batch=2, fold="1/2")
    assert plan.forecast.workers == 2
    content = json.loads(json.dumps({**plan.to_json(), "engine_name": "an engine"}))
    theirs = plan_of_chief(content, phantom_store, HOST, "an engine")
    assert (theirs.config, theirs.workers, theirs.forecast) == (plan.config, 2, plan.forecast)
    assert theirs.store.manifest.split == plan.store.manifest.split
    with pytest.raises(InputError, match="engine must be the chief's, an engine, got another"):
        plan_of_chief(content, phantom_store, HOST, "another")
    content["config"]["split_hash"] = "0"
    with pytest.raises(InputError, match="must be the chief's, got split"):
        plan_of_chief(content, phantom_store, HOST, "an engine")


def test_without_native_operations_layers_are_planned(planned, tmp_path, monkeypatch):
    monkeypatch.setattr("models.native.build.BUILT", tmp_path)
    layers = planned(host=dataclasses.replace(HOST, is_here=True))
    own = planned()
    assert "built" in layers.reasons["native operations"]
    assert layers.forecast.upper_bound_bytes > own.forecast.upper_bound_bytes
    assert layers.forecast.full.step_s > own.forecast.full.step_s


# --- A run that continues ---


@pytest.fixture
def begun(plan_with, tmp_path):
    """begun(epochs=3): the plan of a run that now has a checkpoint of a step."""

    def make(step=6, **settings):
        plan = plan_with(**settings)
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / f"step-{step:08}.npz").touch()
        save_config(plan.config, tmp_path)
        save_plan(plan, tmp_path)
        return plan

    return make


@pytest.mark.parametrize("chosen", [PATCH, {"recipe": "paper-flair"}])
def test_the_same_command_and_a_shorter_one_continue_a_run_whatever_the_host_would_choose(
    begun, plan_with, chosen
):
    first = begun(depth=3, **chosen)
    slow = dataclasses.replace(HOST, isa=(), available_bytes=2 * GIB)
    for again in ({}, {"depth": 3, **chosen}, {"strides": "auto", "policy": "auto"}):
        plan = plan_with(host=slow, **again)
        assert (plan.config, plan.continues, plan.done) == (first.config, True, 6)


def test_a_run_may_change_its_length_its_rate_and_how_it_is_computed(begun, plan_with):
    first = begun(depth=3, batch=2, policy="speed").config
    config = plan_with(steps=12, policy="lean", micro_batch=2, learning_rate=0.005).config
    assert config == dataclasses.replace(
        first.with_policy("lean"), steps=12, micro_batch=2, learning_rate=0.005, validations=6
    )


def test_all_other_settings_would_be_another_run(begun, plan_with):
    begun(**SMALL, **PATCH)
    other = {"filters": 8, "batch": 4, "seed": 1, "optimizer": "adam"}
    with pytest.raises(InputError) as caught:
        plan_with(regions=["WT"], patch=[8, 16, 16], recipe="demo", fold="1/2", **other)
    for part in (
        "--filters 8 for 4",
        "--batch 4 for 1",
        "--regions WT for",
        "--patch must stay as the run was begun",
        "--recipe must stay as the run was begun",
        "--fold 1/2 for",
        "--seed 1 for",
        "--optimizer adam for",
    ):
        assert part in str(caught.value)
    with pytest.raises(InputError, match=r"steps must be at least 6, .* got 5; --steps 6"):
        plan_with(steps=5)


def test_another_split_is_another_run_and_one_without_a_checkpoint_is_planned_anew(
    phantom_store, begun, planned, tmp_path
):
    begun(**SMALL)
    first, *rest = phantom_store.manifest.cases
    other = (dataclasses.replace(first, image_voxels_sha256="0" * 64), *rest)
    changed = Store(phantom_store.folder, remake(phantom_store.manifest, cases=other))
    with pytest.raises(InputError, match=r"split_hash .*; take the store that the run was"):
        planned(store=changed)
    shutil.rmtree(tmp_path / "checkpoints")
    again = planned(store=changed, filters=8)
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
    begun, plan_with, first, before, again, validations
):
    assert begun(step=1, depth=3, **first).config.validations == before
    assert plan_with(**again).config.validations == validations


@pytest.mark.parametrize(("steps", "coarse"), [(7, 6), (8, 6), (16, 13), (32, 13)])
def test_a_run_made_longer_keeps_its_coarse_steps_and_one_made_shorter_has_fewer(
    begun, plan_with, steps, coarse
):
    first = begun(depth=3, curriculum="half", steps=16)
    assert plan_with(steps=steps).config.coarse_steps == coarse
    assert first.config.shortened(14, 30).coarse_steps == 13  # as of one that was longer
    with pytest.raises(InputError, match=r"steps must be above the 6 that .* at half resolution"):
        plan_with(steps=6)


def test_a_budget_that_has_become_steps_stays_so_until_it_is_changed(begun, plan_with, tmp_path):
    plan = begun(depth=3, epochs=9, budget_minutes=2.0)
    save_config(dataclasses.replace(plan.config, steps=7), tmp_path)
    for again, steps in (
        ({}, 7),
        ({"budget_minutes": 2.0}, 7),
        ({"budget_minutes": 3.0}, 0),
        ({"epochs": 9}, 0),
        ({"steps": 8}, 8),
    ):
        assert plan_with(**again).config.steps == steps


def test_batch_norm_sees_what_a_worker_computes_and_that_stays_as_it_was(begun, plan_with):
    config = begun(step=1, workers=2, **{**SMALL, "batch": 4, "norm": "batch"}).config
    assert (config.micro, config.micro_batches) == (2, 2)
    assert plan_with().config.micro == 2
    with pytest.raises(InputError, match="--micro-batch must divide the 1 volumes of a worker"):
        plan_with(workers=4)
    with pytest.raises(InputError, match="micro 4 for 2"):
        plan_with(micro_batch=4)


@pytest.mark.parametrize(
    ("changes", "own"), [({}, True), ({"policy": "lean"}, False), ({"workers": 2}, False)]
)
def test_what_is_left_is_at_the_pace_of_the_last_attempt_if_it_was_computed_alike(
    begun, plan_with, tmp_path, changes, own
):
    plan = begun(**SMALL, steps=16, policy="speed")
    start = {"step": 0, "policy": "speed", "workers": 1, "device": "cpu", "host": HOST.summary()}
    append_event(tmp_path, {"event": "start", **start, **changes})
    for step in range(1, 7):
        append_event(tmp_path, {"event": "step", "step": step, "step_s": 77.0})
    step_s = 77.0 if own else plan.forecast.full_step_s
    again = plan_with()
    assert again.left_s == pytest.approx(10 * step_s)
    left = f"about {format_seconds(again.left_s)} after step 6"
    assert left in "".join(plan_lines(again, HOST))


def test_a_continued_run_keeps_the_reasons_of_what_was_decided_at_its_begin(begun, plan_with):
    reasons = begun(**SMALL).reasons
    assert {"strides", "policy"} <= set(reasons)
    assert plan_with().reasons == reasons
    del reasons["policy"]
    assert plan_with(policy="speed").reasons == reasons


def test_a_continued_run_is_told_only_of_what_it_may_change(planned, priced):
    plan = planned(policy="speed", batch=4, micro_batch=4)
    several = dataclasses.replace(plan, continues=True)
    assert "--policy lean --micro-batch 1: up to 6.00 GiB" in refusal(several, 8 * GIB)
    assert re.search("another folder.* up to ", refusal(several, 5 * GIB))


# --- What does not suit ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"channels": ["PET"]}, "channels must be among"),
        ({"regions": ["NC"]}, "regions must be among"),
        ({"batch": 9}, "^--batch must be at most the 4 training cases, got 9"),
        ({**PATCH, "batch": 29}, "^--batch must be at most the 28 patches .*, got 29"),
        ({"budget_minutes": 1.0, "steps": 3}, "--budget-minutes must .*, got --steps 3"),
        ({"patch": [16, 16, 16]}, "--patch must come with --mode patch, got mode whole"),
        (
            {"depth": 2, "curriculum": "all"},
            "--curriculum must be half or off .* 2 levels, got all",
        ),
        ({"workers": 3, "batch": 4}, "^--batch must be a multiple of the 3 workers, got 4"),
        (
            {"workers": 2, "batch": 4, "micro_batch": 4},
            "^--micro-batch must divide the 2 volumes of a worker, got 4",
        ),
        ({**PATCH, "curriculum": "all"}, "--curriculum must be half or off"),
        ({**PATCH, "patch": [16, 18, 16]}, "^--patch 16 18 16 must .* 4, .*; give 16 20 16$"),
    ],
)
def test_settings_that_do_not_suit_are_refused(planned, settings, message):
    with pytest.raises(InputError, match=message):
        planned(**settings)


# --- The strides ---


THICK = (1.0, 1.0, 5.0)


@pytest.mark.parametrize(
    ("spacing_mm", "settings", "strides"),
    [
        (THICK, {"strides": "auto"}, ((2, 2, 1), (2, 2, 1))),
        (THICK, {"strides": ((2, 1, 2), (2, 2, 2))}, ((2, 1, 2), (2, 2, 2))),
        # of a patch it is the patch that counts: 8 voxels become 4 and no less
        ((1.0, 1.0, 1.0), {"mode": "patch", "patch": (16, 16, 8)}, ((2, 2, 2), (2, 2, 1))),
    ],
)
def test_strides_follow_from_the_voxels_unless_they_are_chosen(
    phantom_store, planned, spacing_mm, settings, strides
):
    config = planned(store=of_voxels(phantom_store, *spacing_mm), **settings).config
    assert config.unet.strides == strides


@pytest.mark.parametrize("settings", [{}, {"mode": "patch", "patch": (20, 24, 16)}])
def test_coarse_steps_halve_the_axes_of_the_first_level(phantom_store, planned, settings):
    strides = ((1, 2, 2), (2, 2, 1))
    plan = planned(strides=strides, curriculum="half", **settings)
    config = plan.config
    seen = grid_size(phantom_store, extent="brain", multiple=1)
    if settings:
        seen = config.grid
    halved = [-(-side // step) for side, step in zip(seen, strides[0])]
    coarse = round_up(tuple(halved), config.unet.divisors)
    assert config.coarse_seen_grid == coarse
    assert plan.forecast.coarse.job.shape == config.coarse_grid
    share = math.prod(coarse) / math.prod(config.grid)  # of a full step's cost
    cost = plan.steps - config.coarse_steps * (1 - share)
    assert config.full_steps(plan.steps) == pytest.approx(cost)


@pytest.mark.parametrize(
    ("settings", "depth"),
    [
        # its brains: 34 42 33 voxels at most, then 17 21 17, 9 11 9, 5 6 5
        ({"depth": "auto"}, 4),
        ({"depth": 5}, 5),
        ({"strides": ((2, 2, 2), (2, 2, 1))}, 3),
        (PATCH, 3),
    ],
)
def test_levels_follow_from_the_voxels_unless_they_are_chosen(plan_with, settings, depth):
    plan = plan_with(**settings)
    assert plan.config.unet.depth == depth
    assert ("depth" in plan.reasons) == (depth < 5 and "strides" not in settings)


def test_all_folds_have_the_strides_of_training_and_validation_together(phantom_store, planned):
    split = phantom_store.manifest.split
    thin = [*split["train"][:2], *split["test"]]
    store = of_voxels(phantom_store, *THICK, but=thin)  # 2 of 5 that decide
    for fold in ("", *(f"{part}/5" for part in range(1, 6))):
        assert planned(store=store, fold=fold).config.unet.strides == ((2, 2, 1), (2, 2, 1))


def test_an_estimate_of_a_store_is_of_the_run_that_train_plans(
    phantom_store, tmp_path, capsys, monkeypatch, plan_with
):
    monkeypatch.setattr("memory_estimator.planned_host.read_host", lambda: HOST)

    def estimated(*options):
        assert estimator.main(["--json", *map(str, options)]) == 0
        return json.loads(capsys.readouterr().out)

    store = stored(of_voxels(phantom_store, *THICK), tmp_path / "store")
    plan = plan_with(store=store, filters=8)
    of_store = estimated("--store", store.folder, "--filters", 8)
    job = dataclasses.replace(plan.job, threads=plan.forecast.full.job.threads)
    assert of_store["job"] == json.loads(json.dumps(job.to_json()))
    assert of_store["upper_bound_bytes"] == plan.forecast.upper_bound_bytes
    assert of_store["run"] == json.loads(json.dumps(plan.to_json()["run"]))
    assert plan.reasons["strides"].endswith(of_store["strides"]["reason"])
    depth = plan.config.unet.depth
    median = median_extent(store, "brain")
    of_card = estimated("--store", store.folder, "--recipe", "gpu-patch")
    assert "a CPU is estimated" in of_card["notes"][0]
    of_shape = estimated("--shape", *median, "--spacing", *THICK, "--depth", depth)
    assert of_shape["strides"]["strides"] == of_store["strides"]["strides"]


@pytest.mark.parametrize(
    ("settings", "augment"),
    [
        ({}, AUGMENTS["cutmix"]),
        ({"flip": False}, AugmentConfig(flip=False, cutmix=0.5)),
        ({"augment": "nnunet"}, AUGMENTS["nnunet"]),
        ({"recipe": "demo"}, AugmentConfig(gain=0.05, offset=0.05)),
    ],
)
def test_cases_are_mixed_unless_the_augmentation_is_chosen(planned, settings, augment):
    plan = planned(**settings)
    assert plan.config.augment == augment
    assert plan.job.mixed == (augment.cutmix > 0)
    assert plan.job.reworked == augment.needs_volume


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
def test_most_steps_are_coarse_where_the_grid_allows(planned, settings, coarse, steps):
    plan = planned(**{"curriculum": "half", "steps": 8, **settings})
    assert (plan.config.curriculum, plan.config.coarse_steps) == (coarse, steps)
    if steps:
        assert plan.config.at(5).grid == plan.config.coarse_grid
        assert plan.config.at(6).grid == plan.config.grid
        wanted = steps * plan.forecast.coarse_step_s + (8 - steps) * plan.forecast.full_step_s
        assert plan.training_s == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("spacing_mm", "curriculum", "network", "rate"),
    [
        (THICK, "all", [(2, 2, 1), 2], 0.01),  # the mean is the finest of three levels
        ((1.0, 1.0, 2.0), "half", [(1, 1, 1), 3], 0.02),
    ],
)
def test_thick_slices_are_learnt_at_half_resolution_throughout(
    plan_with, spacing_mm, curriculum, network, rate
):
    store = of_voxels(in_boxes(*[(158, 144, 14)] * 4), *spacing_mm)
    plan = plan_with(store=store, depth=3, steps=6)
    unet = plan.config.unet
    assert (plan.config.curriculum, [unet.average, unet.depth]) == (curriculum, network)
    typed = plan_with(store=store, depth=3, steps=6, learning_rate=0.03)
    of_sgd = plan_with(store=store, depth=3, steps=6, optimizer="sgd")
    made = [each.config.learning_rate for each in (plan, of_sgd, typed)]
    assert made == [rate, 0.1, 0.03]
    assert plan.config.grid == plan.forecast.full.job.shape == (160, 144, 14)
    assert f"curriculum {curriculum}: " in plan.reasons["curriculum"]


def test_most_steps_are_on_crops_in_thick_slices(plan_with):
    boxes = in_boxes(*[(158, 144, 14)] * 4)

    def planned(*corner, **settings):
        labelled = Region((4, 4, 4), tuple(side - 3 for side in corner))
        cases = [dataclasses.replace(case, label_box=labelled) for case in boxes.manifest.cases]
        store = Store(boxes.folder, dataclasses.replace(boxes.manifest, cases=cases))
        return plan_with(store=of_voxels(store, *THICK), depth=3, steps=6, **settings)

    plan = planned(56, 56, 9)  # crops of 64 x 64 x 14
    forecast = plan.forecast
    (name, crop), *_ = forecast.by_case
    assert (name, crop.job.shape) == ("median crop", (64, 64, 14))
    assert forecast.full_step_s * 20 == pytest.approx(crop.step_s * 19 + forecast.whole_step_s)
    seen = 6 * (1 + (64 * 64) / (160 * 144) * 19) / 20  # in whole steps
    assert plan.config.full_steps(6) == pytest.approx(seen)
    assert plan.steps_per_epoch == len(boxes.manifest.split["train"]) * round(6 / seen)
    of_whole = planned(158, 144, 14)
    assert forecast.upper_bound_bytes == of_whole.forecast.upper_bound_bytes


# --- Memory ---


@pytest.fixture
def priced(monkeypatch, planned):
    """Estimates as they are, but for what the policies take: 12 and 6 GiB for each whole volume of
    the phantoms that is computed at a time, half of it in bfloat16."""
    taken = {"speed": (12, 1.0), "lean": (6, 1.3)}
    whole = math.prod(planned().config.grid)

    def made(job, *more, **options):
        gib, step_s = taken[job.policy]
        bound = gib * GIB * job.voxels / whole / (2 if job.unet.dtype == "bfloat16" else 1)
        return dataclasses.replace(
            estimate(job, *more, **options), upper_bound_bytes=round(bound), step_s=step_s
        )

    monkeypatch.setattr("memory_estimator.training.estimate", made)


def with_free(free_bytes):
    return dataclasses.replace(HOST, available_bytes=free_bytes)


@pytest.mark.parametrize(("free_gib", "policy"), [(12, "speed"), (11, "lean")])
def test_the_fastest_policy_that_fits_is_picked_with_a_reason(planned, priced, free_gib, policy):
    host = with_free(free_gib * GIB)
    plan = planned(host=host)
    assert plan.config.unet.policy == policy
    assert f"{free_gib}.00 GiB free" in plan.reasons["policy"]
    asked = planned(host=host, policy="lean")
    assert asked.config.unet.policy == "lean"
    assert "policy" not in asked.reasons


def refusal(plan, free_bytes):
    with pytest.raises(DoesNotFitError) as caught:
        check_run(plan, with_free(free_bytes))
    return str(caught.value)


def test_a_run_that_fits_exactly_is_let_through_and_a_byte_less_is_not(planned):
    plan = planned()
    bound = plan.forecast.full.upper_bound_bytes
    check_run(plan, with_free(bound))
    message = refusal(plan, bound - 1)
    assert "memory must hold this training, up to" in message
    cases = plan.store.manifest.cases
    largest = max(cases, key=lambda case: math.prod(case.box.size)).case_id
    assert f"leave out {largest}, the largest case" in message


# --- Cases of several sizes ---


def test_the_largest_case_decides_memory_the_median_the_network_and_all_the_time(planned):
    store = in_boxes((16, 16, 7), (96, 96, 96), (16, 16, 8), (4, 4, 4))
    plan = planned(store=store, strides="auto", curriculum="auto")
    # 8 voxels become 4 and no less; half of the median grid is too small for coarse steps
    assert (plan.config.unet.strides, plan.config.curriculum) == (((2, 2, 2), (2, 2, 1)), "off")
    assert planned(store=store, curriculum="half").config.coarse_seen_grid == (48, 48, 48)
    with pytest.raises(InputError, match="--curriculum must be off if half of 16x16x8 has "):
        planned(store=store, curriculum="half", depth=5, strides=((2, 2, 2),) * 4)
    full = plan.forecast.full
    assert full.job.shape == (96, 96, 96)
    job = dataclasses.replace(full.job, shape=(16, 16, 8))
    small_s = estimate(job, full.constants, full.accuracy).step_s
    assert plan.forecast.full_step_s == pytest.approx((small_s + full.step_s) / 2)


@pytest.mark.parametrize(("micro_batch", "grid"), [(1, (16, 32, 32)), (2, (48, 32, 32))])
def test_cases_of_a_micro_batch_have_the_largest_of_each_side(planned, micro_batch, grid):
    store = in_boxes((48, 16, 16), (16, 32, 32), *[(16, 16, 16)] * 2)
    assert planned(store=store, batch=2, micro_batch=micro_batch).config.grid == grid


def test_a_patch_may_be_as_large_as_the_cases_along_each_axis(planned):
    """The case of the most voxels is thin."""
    store = in_boxes((96, 96, 8), (32, 32, 32), *[(16, 16, 16)] * 2)
    assert planned(store=store, **{**PATCH, "patch": [32, 32, 32]}).config.grid == (32, 32, 32)


def test_what_a_run_does_besides_its_full_steps_follows_from_its_cases(planned):
    """Variables are held twice where steps are timed, and where there are coarse steps."""
    boxes = ((32, 32, 32), (48, 32, 32), (64, 48, 32), (40, 40, 40), *[(24, 24, 24)] * 2)
    split = {"train": tuple("abc"), "val": tuple("def"), "test": ()}
    store = in_boxes(*boxes)
    *cases, last = store.manifest.cases
    cases.append(dataclasses.replace(last, label_voxels={}))
    store = Store(store.folder, remake(store.manifest, cases=cases, split=split))
    extra = ExtraMemory(copies=2, judged_shape=(40, 40, 40), cases=6)
    plan = planned(store=store, curriculum="half", steps=0, budget_minutes=4.0)
    assert plan.schedule == Schedule(
        steps=9,
        coarse_steps=7,
        coarse_shape=(64, 48, 32),
        coarse_average=(2, 2, 2),
        grids=boxes[:3],
        coarse_grids=boxes[:3],
        extra=extra,
        coarse_extra=dataclasses.replace(extra, copies=1),
        budget_s=240,
        validations=3,
        held_out=3,
        decided=2,  # those with a label
        flips=8,
        scored_voxels=40**3,
    )
    patches = planned(store=store, **PATCH).schedule
    assert patches.windows == 5 * 3 * 3  # of the median case
    assert patches.extra.volume_shape == (64, 48, 40)
    labels = {**store.manifest.labels, 8: "left ear", 9: "right ear"}
    split["val"] = ()
    unseen = dataclasses.replace(store.manifest, split=split, labels=labels)
    plan = planned(store=Store(store.folder, unseen), budget_minutes=4.0, **PATCH)
    assert plan.schedule.extra.volume_shape is None
    words = "cut to 4 minutes.*left ear and right ear.*the last weights count as the best"
    assert re.search(words, "".join(plan_lines(plan, HOST)))


# --- Patches ---


def test_whole_and_patch_runs_share_everything_else(planned):
    whole = planned().config
    patch = planned(mode="patch", patch=[16, 16, 32]).config
    # 3 patches have the voxels of a volume of 36 x 44 x 36: an epoch sees as much
    assert patch == dataclasses.replace(
        whole, mode="patch", grid=(16, 16, 32), samples_per_case=round(math.prod(whole.grid) / 8192)
    )
    plan = planned(**PATCH, curriculum="half", batch=2)
    assert plan_lines(plan, HOST)[1:4] == [
        "input:   patch, 16 x 16 x 16 of 24 x 32 x 32 to 24 x 36 x 32, 24 x 36 x 32 in the median "
        "(brain), 7 of a case an epoch, FLAIR, T1w, t1gd, T2w -> WT, TC, ET",
        "network: unet3d, 3 levels, 4 filters, instance norm, float32, policy speed, 0 GFLOP a "
        "full step",
        "run:     42 steps, 14 an epoch, 35 of them on 8 x 8 x 8; batch 2, 1 at a time, 1 worker "
        "on cpu",
    ]


def test_without_a_size_a_patch_is_the_usual_one_within_the_volume(phantom_store, planned):
    assert planned(mode="patch").config.grid == grid_size(phantom_store, extent="brain", multiple=4)
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
    # What a CPU is given, thin volumes whole, is what may be asked for.
    check_patch(usual_patch(grid, divisors), grid, divisors)
    try:
        check_patch(patch, grid, divisors)
    except ValueError as error:
        offered = str(error).rpartition("; give ")[2].partition(",")[0]
        check_patch(tuple(map(int, offered.split())), grid, divisors)


# --- Runs on a card ---

CARD = Gpu(
    index=0, name="made up", memory_bytes=16 * GIB, free_bytes=16 * GIB, compute_capability=(8, 0)
)


def test_a_card_sets_device_dtype_and_patch(phantom_store, planned):
    def plan(card, **more):
        settings = {"mode": "patch", "dtype": "auto", "device": "gpu:0", **more}
        return planned(gpus=(card,), **settings)

    config = plan(CARD).config
    assert (config.device, config.unet.dtype) == ("gpu:0", "bfloat16")
    # a small volume fits a large card
    assert config.grid == grid_size(phantom_store, extent="brain", multiple=4)
    older = dataclasses.replace(CARD, compute_capability=(7, 5))
    assert plan(older).config.unet.dtype == "float32"
    with pytest.raises(InputError, match="--device must be cpu for several workers, got gpu:0"):
        plan(CARD, batch=2, workers=2)
    small, full = (
        dataclasses.replace(CARD, free_bytes=free) for free in (round(1.02 * GIB), 2**20)
    )
    of_small = plan(small, dtype="float32").config
    assert gpu_bytes(Job(of_small.unet, of_small.grid, engine="stock")) <= small.free_bytes
    with pytest.raises(DoesNotFitError, match=r"must hold a patch of at least 8 x 8 x 8, .* 1 MiB"):
        plan(full)
    chosen = plan(full, patch=[24, 32, 32])
    with pytest.raises(DoesNotFitError, match=r"^gpu:0 must hold a step of .*, got 1 MiB free"):
        check_run(chosen, HOST, [full])


@pytest.mark.parametrize("recipe", [{}, {"recipe": "gpu-patch"}])
def test_the_same_command_continues_on_the_device_that_was_picked(
    begun, plan_with, tmp_path, monkeypatch, recipe
):
    monkeypatch.setattr("cpu3d.host.gpu.cuda_is_installed", lambda: True)
    cards = tuple(
        dataclasses.replace(CARD, index=index, free_bytes=2 ** (33 + index)) for index in range(2)
    )
    settings = {**recipe, "gpus": cards, "mode": "patch", "depth": 3}
    config = begun(step=1, **settings).config
    # Of two cards the one with more memory free, but for the recipe that names one.
    assert config.device == ("gpu:0" if recipe else "gpu:1")
    moved = plan_with(**settings, device="cpu").config
    assert moved == dataclasses.replace(config, device="cpu")
    save_config(moved, tmp_path)
    assert plan_with(**settings).config == moved
