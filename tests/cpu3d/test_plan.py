"""The plan of a run: what is decided where a setting was left open, what it takes, and what is
proposed where it does not fit."""

import dataclasses
import hashlib
import json
import math
import os
import re
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpu3d.bench import harness
from cpu3d.bench.step_costs import measure, request_for
from cpu3d.checks import check_length, check_run
from cpu3d.data.labels import label_from_regions
from cpu3d.data.manifest import remake
from cpu3d.data.region import Region
from cpu3d.data.store import Store, grid_size
from cpu3d.decisions import job_of
from cpu3d.distributed.rendezvous import plan_of_chief
from cpu3d.errors import DoesNotFitError, InputError
from cpu3d.host.gpu import Gpu
from cpu3d.plan import Plan, make_plan, save_plan
from cpu3d.plan_text import plan_lines
from cpu3d.run.checkpoint import BEST, POSTPROCESSING, at_the_start, write_next
from cpu3d.run.config_json import load_config, save_config
from cpu3d.run.log import append_event, read_events
from cpu3d.run.summary import Pace
from cpu3d.settings import RunConfig
from cpu3d.util.atomic import write_json
from memory_estimator import __main__ as estimator
from memory_estimator.common.units import format_bytes, format_seconds
from memory_estimator.estimate import estimate
from memory_estimator.host import Host
from memory_estimator.job import Job
from memory_estimator.planner import check_patch, gpu_bytes, patch_shapes, usual_patch
from memory_estimator.sources import read_run
from memory_estimator.training import Done, OwnSteps, whole_volume_bytes
from models.config import POLICIES, UNetConfig
from models.layer_plan import layer_plan
from models.strides import network_grid, strides_text
from tests.cpu3d import runs
from tests.cpu3d.conftest import make_store
from tests.cpu3d.host.hosts import BFLOAT16
from tests.cpu3d.runs import decided, of_voxels, stored, with_absent_region

SMALL = {**runs.SMALL, "depth": 3}  # two halvings, which may differ

GIB = 2**30
HOST = Host("a CPU", 1, 2, 2, 1, 24 * GIB, 20 * GIB, None, 0, None, BFLOAT16)
RUN = RunConfig(
    grid=(240, 240, 160),
    unet=UNetConfig(dtype="float32", policy="speed"),
    batch=4,
    micro_batch=4,
    extent="full",
    engine="itex",
)
PATCH = {"mode": "patch", "patch": [16, 16, 16]}


def with_free(free_bytes):
    return dataclasses.replace(HOST, available_bytes=round(free_bytes))


def planned(store, folder, workers=1, host=HOST, **settings):
    return make_plan(store, folder, host, {**SMALL, "engine": "itex", **settings}, workers=workers)


def test_a_plan_is_saved_with_all_that_was_decided(phantom_store, tmp_path):
    plan = planned(phantom_store, tmp_path, batch=2, steps=0, epochs=3)
    save_plan(plan, tmp_path)
    content = json.loads((tmp_path / "plan.json").read_text())
    assert (content["steps_per_epoch"], content["steps"], content["continues"]) == (2, 6, False)
    assert content["config"]["grid"] == list(plan.config.grid)
    assert content["config"]["unet"]["dtype"] == SMALL["dtype"]
    assert content["predicted"]["upper_bound_bytes"] == plan.forecast.full.upper_bound_bytes
    threads = plan.forecast.full.job.threads
    assert dataclasses.replace(read_run(tmp_path).job, threads=threads) == plan.forecast.full.job
    assert content["reasons"]["policy"].startswith(
        f"policy {content['config']['unet']['policy']}: "
    )
    text = " ".join(plan_lines(plan, HOST))
    full = plan.forecast.full
    for figure in (
        "20.00 GiB free",
        format_bytes(plan.forecast.upper_bound_bytes),
        format_bytes(full.process_peak_bytes),
        format_seconds(full.step_s),
        format_seconds(full.epoch_s),
        format_seconds(plan.forecast.all_s),
    ):
        assert figure in text


@pytest.mark.parametrize(("flip", "times"), [(True, 1), (False, 0)])
def test_labels_that_pair_left_and_right_are_named_once(phantom_store, tmp_path, flip, times):
    names = dict(enumerate(("background", "Kidney_L", "Kidney_R", "liver")))
    manifest = dataclasses.replace(phantom_store.manifest, labels=names)
    store = Store(phantom_store.folder, manifest)
    lines = plan_lines(planned(store, tmp_path, flip=flip), HOST)
    assert sum("Kidney_L and Kidney_R" in line for line in lines) == times


def test_a_run_knows_the_voxels_of_its_training_cases_and_one_of_an_earlier_version_learns_them(
    tmp_path,
):
    split = {"train": ("a", "b", "c"), "val": ("d",), "test": ("e",)}
    store = make_store(tmp_path / "store", tmp_path / "source", split=split)
    sizes = {"a": (1.0, 1.0, 3.0), "b": (0.9, 1.0, 1.0), "c": (0.8, 1.2, 2.0), "d": (9.0, 9.0, 9.0)}
    cases = [
        dataclasses.replace(case, spacing_mm=sizes.get(case.case_id, case.spacing_mm))
        for case in store.manifest.cases
    ]
    store = Store(store.folder, dataclasses.replace(store.manifest, cases=cases))
    run = tmp_path / "run"
    run.mkdir()
    config = decided(store, run)
    assert (config.spacing_mm, config.oriented) == ((0.9, 1.0, 2.0), True)
    save_config(config, run)
    assert load_config(run) == config
    path = run / "config.json"
    content = json.loads(path.read_text())
    del content["spacing_mm"], content["oriented"]
    path.write_text(json.dumps(content))
    assert (load_config(run).spacing_mm, load_config(run).oriented) == (None, None)
    assert decided(store, run).spacing_mm == (0.9, 1.0, 2.0)


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
    with pytest.raises(InputError, match="got 2 for 1 edema, of WT"):
        decided(store, tmp_path / "all")  # where TC has the code 2
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    del content["paint"]  # as of an earlier version
    path.write_text(json.dumps(content))
    assert load_config(tmp_path) == dataclasses.replace(config, paint=())


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


def test_without_own_operations_layers_are_planned(phantom_store, tmp_path, monkeypatch):
    monkeypatch.setattr("models.native.build.BUILT", tmp_path)
    here = dataclasses.replace(HOST, is_here=True)
    plan = planned(phantom_store, tmp_path, host=here)
    own = planned(phantom_store, tmp_path)
    assert "not built" in plan.reasons["own operations"]
    assert "own operations" not in own.reasons
    assert plan.forecast.upper_bound_bytes > own.forecast.upper_bound_bytes
    assert plan.forecast.full.step_s > own.forecast.full.step_s


# --- What a saved run keeps ---


@pytest.mark.parametrize(
    ("settings", "other"), [({}, {"filters": 8}), (PATCH, {"patch": [8, 16, 16]})]
)
def test_a_run_continues_without_options_and_may_change_its_length(
    phantom_store, tmp_path, settings, other
):
    config = decided(phantom_store, tmp_path, **SMALL, **settings)
    save_config(config, tmp_path)
    assert decided(phantom_store, tmp_path) == config
    assert decided(phantom_store, tmp_path, epochs=9).epochs == 9
    with pytest.raises(InputError, match=r"must stay .*, got"):
        decided(phantom_store, tmp_path, **other)


@pytest.mark.parametrize("recipe", [{}, {"recipe": "paper-flair"}])
def test_the_same_command_continues_whatever_dtype_the_host_chose(phantom_store, tmp_path, recipe):
    slow = dataclasses.replace(HOST, isa=())
    config = decided(phantom_store, tmp_path, host=HOST, **recipe)
    assert config.unet.dtype == "bfloat16"
    save_config(config, tmp_path)
    assert decided(phantom_store, tmp_path, host=slow, **recipe) == config
    with pytest.raises(InputError, match="--dtype must stay bfloat16, got float32"):
        decided(phantom_store, tmp_path, host=HOST, **recipe, dtype="float32")


def test_a_run_is_computed_as_it_was_before_unless_a_setting_says_otherwise(
    phantom_store, tmp_path
):
    def way(**settings):
        config = decided(phantom_store, tmp_path, **{**SMALL, "batch": 4, **settings})
        return config.unet.policy, config.micro

    assert way() == way(policy="auto") == ("speed", 1)
    save_config(
        decided(phantom_store, tmp_path, **{**SMALL, "batch": 4}, policy="lean", micro_batch=2),
        tmp_path,
    )
    assert way() == way(recipe="brats-regions") == ("lean", 2)
    assert way(recipe="brats-regions", policy="speed", micro_batch=4) == ("speed", 4)
    with pytest.raises(InputError, match=r"^--batch must stay 4, got 3"):
        way(batch=3)


def test_a_store_with_the_same_names_and_other_volumes_is_another_split(phantom_store, tmp_path):
    save_config(decided(phantom_store, tmp_path, **SMALL), tmp_path)
    cases = phantom_store.manifest.cases
    first, *rest = cases
    other = (dataclasses.replace(first, image_voxels_sha256="0" * 64), *rest)
    changed = Store(phantom_store.folder, remake(phantom_store.manifest, cases=other))
    with pytest.raises(InputError, match="split_hash must stay "):
        decided(changed, tmp_path)


def test_a_store_without_the_run_s_channels_is_another_one(phantom_store, tmp_path):
    config = decided(phantom_store, tmp_path, **SMALL)
    save_config(dataclasses.replace(config, channels=("CT",), store_channels=("CT",)), tmp_path)
    with pytest.raises(InputError, match=r"--store must have the channels of this run, CT, got"):
        planned(phantom_store, tmp_path)


def as_of_an_earlier_version(run, **augment):
    """The config.json of a run from before contrast and the settings below it."""
    content = json.loads((run / "config.json").read_text())
    kept = ("flip", "gain", "offset", "rotation_deg", "scaling")
    content["augment"] = {**{name: content["augment"][name] for name in kept}, **augment}
    (run / "config.json").write_text(json.dumps(content))


def test_a_run_of_an_earlier_version_continues_without_the_changes_of_intensity_that_came_later(
    phantom_store, tmp_path
):
    save_config(decided(phantom_store, tmp_path, **SMALL), tmp_path)
    as_of_an_earlier_version(tmp_path, gain=0.3)
    augment = decided(phantom_store, tmp_path).augment
    assert (augment.gain, augment.flip) == (0.3, True)
    assert not any(
        getattr(augment, name) for name in ("contrast", "gamma", "noise", "blur", "low_resolution")
    )
    with pytest.raises(InputError, match=r"--gamma must stay 0\.0, got 0\.5"):
        decided(phantom_store, tmp_path, gamma=0.5)


@pytest.mark.parametrize("turned", [{"rotation_deg": 15.0}, {"scaling": 0.2}])
def test_a_run_of_an_earlier_version_that_turned_otherwise_is_read_and_not_continued(
    phantom_store, tmp_path, turned
):
    save_config(decided(phantom_store, tmp_path, **SMALL), tmp_path)
    as_of_an_earlier_version(tmp_path, **turned)
    ((name, value),) = turned.items()
    assert getattr(load_config(tmp_path).augment, name) == value
    with pytest.raises(
        InputError, match=r"^rotation and scaling must be .*, got .*; continue it with .*$"
    ):
        decided(phantom_store, tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"channels": ["PET"]}, "channels must be among"),
        (
            {"batch": 4, "micro_batch": 3},
            "--micro-batch must divide the batch of 4, got 3.* 1, 2, 4",
        ),
        ({"batch": 9}, "^--batch must be at most the 4 training cases, got 9"),
        ({"rotation_deg": 90.0}, "augment rotation_deg must be in"),
        ({"low_resolution": 1.0}, r"augment low_resolution must be in \[0, 1\), got 1.0"),
        ({"budget_minutes": -1.0}, "--budget-minutes must be at least 0, got -1.0"),
        ({"budget_minutes": 1.0, "steps": 3}, "--budget-minutes must .*, got --steps 3"),
        ({"patch": [16, 16, 16]}, "--patch must come with --mode patch, got mode whole"),
        (
            {"depth": 5, "curriculum": "half"},
            "--curriculum must be off if half of .* is below .*32 along Y.*, got half",
        ),
        ({"workers": 3, "batch": 4}, "^--batch must be a multiple of the 3 workers, got 4"),
        (
            {"workers": 2, "batch": 4, "micro_batch": 4},
            "^--micro-batch must divide the 2 volumes of a worker, got 4",
        ),
        (
            {"workers": 8, "batch_per_worker": 2},
            "batch .* at most the 4 training cases, got 16; .* --batch-per-worker",
        ),
        (
            {"workers": 8, "batch_per_worker": 1},
            "batch .* at most the 4 training cases, got 8; take fewer workers",
        ),
        (
            {**PATCH, "patch": [16, 16, 64]},
            "--patch 16 16 64 must fit into .* of 24 36 32; give 16 16 32,",
        ),
        (
            {**PATCH, "patch": [16, 18, 16]},
            r"^--patch 16 18 16 must be divisible by 4, .*; give 16 20 16$",
        ),
        (
            {**PATCH, "patch": [10, 10, 90]},
            r"must fit into .* and be divisible by 2, 2 and 4 .*; give 10 10 32, [^\n]*$",
        ),
        (
            {**PATCH, "patch": [16, 0, 16]},
            r"--patch must be three positive numbers, got \(16, 0, 16\)",
        ),
        ({"mode": "patch", "resolution": 0.5}, "^--resolution must be 1 with --mode patch"),
        (
            {"mode": "patch", "device": "gpu:0"},
            "^--device must be a GPU of this host, here none, got gpu:0",
        ),
    ],
)
def test_settings_that_do_not_suit_are_refused(phantom_store, tmp_path, settings, message):
    with pytest.raises(InputError, match=message):
        decided(phantom_store, tmp_path / "run", **{**SMALL, **settings})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("resolution", [0.55, 0.65, 0.8])
def test_at_a_lower_resolution_the_network_sees_no_more_than_the_extent_takes(
    phantom_store, tmp_path, resolution
):
    extent = phantom_store.manifest.largest_box
    seen = decided(phantom_store, tmp_path, **SMALL, resolution=resolution).grid
    assert seen == tuple(-(-math.ceil(n * resolution - 1e-9) // 4) * 4 for n in extent)


def test_a_side_of_the_grid_is_a_multiple_of_what_its_own_axis_is_halved_by(
    phantom_store, tmp_path
):
    extent = phantom_store.manifest.largest_box
    strides = ((2, 2, 1), (2, 1, 1))
    seen = decided(phantom_store, tmp_path, **SMALL, strides=strides).grid
    assert seen == tuple(-(-n // divisor) * divisor for n, divisor in zip(extent, (4, 2, 1)))


@pytest.mark.parametrize(("slices", "grid"), [(8, 6), (6, 6), (2, 2)])
def test_a_patch_is_cut_to_volumes_that_other_strides_would_pad(tiny_store, tmp_path, slices, grid):
    """The volumes have 12 x 8 x 6 voxels, of which all axes halved twice would make 12 x 8 x 8."""
    options = {"mode": "patch", "strides": ((2, 2, 1), (2, 2, 1))}
    plan = planned(tiny_store, tmp_path, patch=(8, 8, slices), **options)
    assert plan.config.grid == (8, 8, grid)
    assert ("patch" in plan.reasons) == (slices > grid)
    for patch in ((8, 8, 12), (16, 8, 6)):
        with pytest.raises(InputError, match="must fit into the volumes of 12 8 6"):
            planned(tiny_store, tmp_path, patch=patch, **options)


# --- The strides ---


THICK = (1.0, 1.0, 5.0)


@pytest.mark.parametrize(
    ("spacing_mm", "settings", "strides"),
    [
        ((1.0, 1.0, 1.0), {}, ()),
        ((1.0, 1.0, 1.9), {}, ()),
        (THICK, {}, ((2, 2, 1), (2, 2, 1))),
        (THICK, {"strides": "auto"}, ((2, 2, 1), (2, 2, 1))),
        (THICK, {"resolution": 0.5}, ((2, 2, 1), (2, 2, 1))),
        ((1.0, 1.0, 2.0), {}, ((2, 2, 1), (2, 2, 2))),
        (THICK, {"strides": ((2, 2, 2), (2, 2, 2))}, ()),
        (THICK, {"strides": ((2, 1, 2), (2, 2, 2))}, ((2, 1, 2), (2, 2, 2))),
        # of a patch it is the patch that counts: 8 voxels become 4 and no less
        (THICK, {"mode": "patch", "patch": (16, 16, 16)}, ((2, 2, 1), (2, 2, 1))),
        ((1.0, 1.0, 1.0), {"mode": "patch", "patch": (16, 16, 16)}, ()),
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
    if is_open:
        words = plan.reasons["strides"]
        assert strides_text(unet.every_stride) in words
        assert " x ".join(f"{length:g}" for length in spacing_mm) in words
    assert all(n % divisor == 0 for n, divisor in zip(plan.config.grid, unet.divisors))


@pytest.mark.parametrize("first", [(2, 2, 1), (1, 2, 2), (2, 2, 2)])
@pytest.mark.parametrize("settings", [{}, {"mode": "patch", "patch": (24, 24, 16)}])
def test_coarse_steps_halve_the_axes_of_the_first_level(phantom_store, tmp_path, first, settings):
    strides = (first, (2, 2, 1))
    plan = planned(phantom_store, tmp_path, strides=strides, curriculum="half", **settings)
    config = plan.config
    seen = grid_size(phantom_store, extent="brain", multiple=1)
    if settings:
        seen = config.grid
    halved = [-(-side // step) for side, step in zip(seen, first)]
    assert config.coarse_grid == network_grid(halved, (1, 1, 1), config.unet.divisors)
    assert plan.config.at(0).unet.every_stride == plan.config.unet.every_stride
    assert plan.forecast.coarse.job.shape == config.coarse_grid
    share = math.prod(config.coarse_grid) / math.prod(config.grid)  # of a full step's cost
    cost = plan.steps - config.coarse_steps * (1 - share)
    assert config.full_steps(plan.steps) == pytest.approx(cost)


@pytest.mark.parametrize("resolution", [0.5, 0.75])
def test_a_resolution_is_that_of_the_axes_of_the_first_level(phantom_store, tmp_path, resolution):
    store = of_voxels(phantom_store, *THICK)
    config = planned(store, tmp_path, resolution=resolution, curriculum="half").config
    extent = grid_size(store, extent="brain", multiple=1)
    assert config.resolution_by_axis == (resolution, resolution, 1)
    assert config.at(0).resolution_by_axis == (resolution / 2, resolution / 2, 1)
    assert config.grid[2] == config.coarse_grid[2] == extent[2]
    seen = [math.ceil(side * resolution / 2 / 4) * 4 for side in extent[:2]]
    assert list(config.coarse_grid[:2]) == seen


def test_coarse_steps_that_a_version_before_began_on_all_axes_go_on_so(phantom_store, tmp_path):
    store = of_voxels(phantom_store, *THICK)
    settings = {"curriculum": "half", "resolution": 0.5}
    new = planned(store, tmp_path, **settings)
    assert new.config.coarse_stride == (2, 2, 1)
    extent = grid_size(store, extent="brain", multiple=1)
    grids = [network_grid(extent, (half,) * 3, new.config.unet.divisors) for half in (0.5, 0.25)]
    before = dataclasses.replace(
        new.config, coarse_stride=(2, 2, 2), grid=grids[0], coarse_grid=grids[1]
    )
    assert "coarse_stride" not in before.to_json()
    assert "coarse_stride" in new.config.to_json()
    save_config(before, tmp_path)
    save_plan(new, tmp_path)
    with_checkpoint(tmp_path)
    assert load_config(tmp_path) == before
    went_on = make_plan(store, tmp_path, HOST, settings).config
    assert went_on == before
    with pytest.raises(InputError, match=r"^--coarse-stride must stay 2 2 2, got 2 2 1; leave it"):
        make_plan(store, tmp_path, HOST, {**settings, "coarse_stride": (2, 2, 1)})
    beside = planned(store, tmp_path / "new", **settings, coarse_stride=(2, 2, 2))
    assert beside.config == before


@pytest.mark.parametrize("length", [{"steps": 5}, {"epochs": 1}])
def test_a_run_cannot_be_made_shorter_than_it_is(phantom_store, tmp_path, length):
    begun = decided(phantom_store, tmp_path, **{**SMALL, "steps": 9})
    save_config(begun, tmp_path)
    with_checkpoint(tmp_path, step=6)
    with pytest.raises(InputError, match=r"steps must be at least 6, .* got \d; --steps 6"):
        check_length(make_plan(phantom_store, tmp_path, HOST, length), length)
    for chosen, steps in (({}, 9), ({"steps": 6}, 6), ({"steps": 12}, 12)):
        plan = make_plan(phantom_store, tmp_path, HOST, chosen)
        check_length(plan, chosen)
        assert plan.steps == steps


@pytest.mark.parametrize("stride", [(1, 1, 1), (2, 2, 4), (2, 0, 2)])
def test_a_coarse_stride_that_halves_nothing_or_more_is_refused(phantom_store, tmp_path, stride):
    with pytest.raises(InputError, match=r"--coarse-stride must be 2"):
        planned(phantom_store, tmp_path, curriculum="half", coarse_stride=stride)


def test_another_patch_than_the_run_was_begun_on_is_named_and_not_its_coarse_steps(
    phantom_store, tmp_path
):
    begun = decided(phantom_store, tmp_path, **{**SMALL, **PATCH, "curriculum": "half"})
    save_config(begun, tmp_path)
    with_checkpoint(tmp_path)
    with pytest.raises(InputError) as error:
        decided(phantom_store, tmp_path, patch=(16, 16, 8))
    (problem,) = error.value.problems
    assert problem.startswith("--patch must stay 16 16 16, got 16 16 8; leave")


def test_a_switch_that_must_stay_given_is_to_be_added(phantom_store, tmp_path):
    save_config(decided(phantom_store, tmp_path, **SMALL, flip=False), tmp_path)
    with_checkpoint(tmp_path)
    with pytest.raises(InputError, match=r"--no-flip must stay given, got left out; add it"):
        decided(phantom_store, tmp_path, recipe="brats-regions", **SMALL)


@pytest.mark.parametrize(("spacing_mm", "curriculum"), [((1, 1, 1), "half"), (THICK, "off")])
def test_where_all_axes_are_seen_alike_config_json_is_as_it_was(
    phantom_store, tmp_path, spacing_mm, curriculum
):
    store = of_voxels(phantom_store, *map(float, spacing_mm))
    config = planned(store, tmp_path, curriculum=curriculum).config
    assert config.coarse_stride == (2, 2, 2)
    assert "coarse_stride" not in config.to_json()


@pytest.mark.parametrize(
    ("settings", "depth"),
    [
        # its brains: 34 42 33 voxels at most, then 17 21 17, 9 11 9, 5 6 5
        ({}, 4),
        ({"depth": "auto"}, 4),
        ({"depth": 5}, 5),
        ({"strides": ((2, 2, 2), (2, 2, 1))}, 3),
        ({"recipe": "paper-2020", "filters": 2, "batch": 2}, 4),  # which has no more
        ({"mode": "patch", "patch": (16, 16, 16)}, 3),
    ],
)
def test_levels_follow_from_the_voxels_unless_they_are_chosen(
    phantom_store, tmp_path, settings, depth
):
    plan = make_plan(phantom_store, tmp_path, HOST, settings)
    unet = plan.config.unet
    assert unet.depth == depth
    is_fewer = depth < 5 and settings.get("depth", "auto") == "auto"
    assert ("depth" in plan.reasons) == (is_fewer and not {"recipe", "strides"} & set(settings))


@pytest.mark.parametrize("again", [{}, {"depth": "auto"}, {"recipe": "brats-regions"}])
def test_a_run_of_a_version_before_goes_on_with_its_levels(phantom_store, tmp_path, again):
    before = make_plan(phantom_store, tmp_path, HOST, {"depth": 5}).config
    save_config(before, tmp_path)
    assert make_plan(phantom_store, tmp_path, HOST, again).config.unet == before.unet
    with pytest.raises(InputError, match=r"^--depth must stay 5, got 4"):
        make_plan(phantom_store, tmp_path, HOST, {"depth": 4})


def test_all_folds_have_the_strides_of_training_and_validation_together(phantom_store, tmp_path):
    split = phantom_store.manifest.split
    thin = [*split["train"][:2], *split["test"]]
    store = of_voxels(phantom_store, *THICK, but=thin)  # 2 of 5 that decide
    for fold in ("", *(f"{part}/5" for part in range(1, 6))):
        config = planned(store, tmp_path, fold=fold).config
        assert config.unet.strides == ((2, 2, 1), (2, 2, 1))


@pytest.mark.parametrize("again", [{}, {"strides": "auto"}, {"recipe": "brats-regions"}])
def test_a_run_that_continues_keeps_its_strides_also_one_of_a_version_before(
    phantom_store, tmp_path, again
):
    store = of_voxels(phantom_store, *THICK)
    before = planned(store, tmp_path, strides=((2, 2, 2), (2, 2, 2)))
    save_config(before.config, tmp_path)
    assert "strides" not in json.loads((tmp_path / "config.json").read_text())["unet"]
    plan = planned(store, tmp_path, **again)
    assert plan.saved is not None
    assert plan.config.unet.strides == ()
    rule = "--strides must stay 2,2,2 2,2,2, got 2,2,1 2,2,1"
    with pytest.raises(InputError, match=rule):
        planned(store, tmp_path, strides=((2, 2, 1), (2, 2, 1)))
    with pytest.raises(InputError, match=r"^--depth must stay 3, got 4"):
        planned(store, tmp_path, depth=4)


def test_another_depth_is_named_without_the_strides_that_follow_from_it(phantom_store, tmp_path):
    store = of_voxels(phantom_store, *THICK)
    save_config(planned(store, tmp_path).config, tmp_path)
    with pytest.raises(InputError) as raised:
        planned(store, tmp_path, depth=4)
    assert ["depth" in problem for problem in raised.value.problems] == [True]


def test_strides_of_another_depth_are_not_kept_for_a_run_that_has_not_begun(
    phantom_store, tmp_path
):
    strides = ((2, 2, 1), (2, 2, 2))
    before = planned(phantom_store, tmp_path, strides=strides)
    save_config(before.config, tmp_path)
    save_plan(before, tmp_path)
    assert planned(phantom_store, tmp_path).config.unet.strides == strides
    assert planned(phantom_store, tmp_path, depth=2).config.unet.depth == 2
    longer = ((2, 2, 2), (2, 2, 2), (2, 2, 1))
    again = make_plan(phantom_store, tmp_path, HOST, {"strides": longer})  # not the depth of 3
    assert again.config.unet.strides == longer


@pytest.mark.parametrize("host", [HOST, dataclasses.replace(HOST, isa=("avx2",))])
@pytest.mark.parametrize("side", [48, 96])  # half of the larger has coarse steps
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
    chosen = {"filters": 8}
    plan = make_plan(store, tmp_path / "run", host, chosen)
    assert plan.config.unet.strides
    assert bool(plan.config.coarse_steps) == (side == 96)
    of_store = estimated("--store", store.folder, "--filters", 8)
    job = dataclasses.replace(plan.job, threads=plan.forecast.full.job.threads)
    assert of_store["job"] == json.loads(json.dumps(job.to_json()))
    assert of_store["upper_bound_bytes"] == plan.forecast.upper_bound_bytes
    assert of_store["run"] == json.loads(json.dumps(plan.to_json()["run"]))
    assert of_store["run"]["all_s"] > plan.training_s
    assert plan.reasons["strides"].endswith(of_store["strides"]["reason"])
    words = strides_text(plan.config.unet.every_stride)
    assert strides_text(of_store["strides"]["strides"]) == words
    depth = plan.config.unet.depth
    if depth < 5:
        assert plan.reasons["depth"] in of_store["notes"]
    box = store.manifest.largest_box
    of_shape = estimated("--shape", *box, "--spacing", *THICK, "--depth", depth)
    assert of_shape["strides"] == of_store["strides"]
    assert of_shape["job"]["shape"] == list(plan.config.grid)


def test_an_estimate_of_a_store_with_a_recipe_is_of_the_run_that_train_plans_with_it(
    phantom_store, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("memory_estimator.planned_host.read_host", lambda: HOST)
    options = ["--store", str(phantom_store.folder), "--recipe", "demo", "--json"]
    assert estimator.main(options) == 0
    content = json.loads(capsys.readouterr().out)
    plan = make_plan(phantom_store, tmp_path, HOST, {"recipe": "demo"})
    assert content["run"] == json.loads(json.dumps(plan.to_json()["run"]))
    assert content["job"]["unet"]["filters"] == plan.config.unet.filters


def test_an_estimate_of_a_recipe_for_a_card_is_of_a_cpu(phantom_store, capsys):
    options = ["--store", str(phantom_store.folder), "--recipe", "gpu-patch"]
    assert estimator.main([*options, "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert "the recipe is for gpu:0: a CPU is estimated" in notes


@pytest.mark.parametrize("options", ["", "--hosts 1 2", "--filters 4 --depth 3 --batch 2"])
def test_an_estimate_of_a_store_says_what_its_strides_follow_from(phantom_store, capsys, options):
    ask = f"--store {phantom_store.folder} --threads 2 --host-memory 8GiB {options}"
    assert estimator.main([*ask.split(), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert estimator.main(ask.split()) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for words in (*content["notes"], content["strides"]["reason"], "2,2,2"):
        assert words in printed


@pytest.mark.parametrize(
    ("calibration", "options", "dtype"),
    [
        ("amx", "", "bfloat16"),
        ("avx2", "", "float32"),
        ("avx2", "--dtype bfloat16", "bfloat16"),
    ],
)
def test_the_dtype_of_a_store_s_job_is_what_train_takes_on_that_host(
    phantom_store, capsys, calibration, options, dtype
):
    ask = f"--store {phantom_store.folder} --threads 2 --host-memory 8GiB --json {options}"
    assert estimator.main([*ask.split(), "--calibration", calibration]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["unet"]["dtype"] == dtype


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--spacing 1 1 5", "--spacing must come without --store"),
        ("--shape 64 64 64", "--shape must come without --store"),
        ("--filters 4 --batch 99", "batch must be at most"),
    ],
)
def test_an_estimate_of_a_store_refuses_what_the_store_has_or_does_not_allow(
    phantom_store, capsys, options, message
):
    ask = f"--store {phantom_store.folder} {options}"
    assert estimator.main(ask.split()) == 2
    assert message in capsys.readouterr().err


def test_an_estimate_of_no_store_is_refused(tmp_path, capsys):
    assert estimator.main(["--store", str(tmp_path)]) == 2
    assert "must hold a finished manifest.json" in capsys.readouterr().err


@pytest.mark.slow  # a process of its own
@pytest.mark.parametrize(("policy", "step"), [*((name, -1) for name in POLICIES), ("speed", 0)])
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


# --- Several workers ---


@pytest.mark.parametrize(
    ("settings", "rate"),
    [
        ({}, 0.02),  # Muon and Adam: the square root
        ({"optimizer": "adam"}, 0.02),
        ({"optimizer": "sgd"}, 0.04),
        ({"learning_rate": 0.01}, 0.02),
    ],
)
def test_the_batch_grows_with_the_workers_and_the_rates_with_it_and_once_alone(
    phantom_store, tmp_path, settings, rate
):
    for _ in range(3):
        config = planned(phantom_store, tmp_path, 4, batch_per_worker=1, **settings).config
        assert (config.batch, config.micro, config.micro_batches) == (4, 1, 4)
        assert config.learning_rate == pytest.approx(rate)
        if "optimizer" not in settings:
            assert config.adam_rate == pytest.approx(0.06)
        save_config(config, tmp_path)


def test_a_micro_batch_divides_the_batch_of_all_workers(phantom_store, tmp_path):
    config = planned(phantom_store, tmp_path, 2, batch_per_worker=2, micro_batch=2).config
    assert (config.batch, config.micro) == (4, 2)


def test_a_learning_rate_left_open_is_the_optimizer_s_and_a_run_that_continues_may_change_it(
    phantom_store, tmp_path
):
    def again(**settings):
        return make_plan(phantom_store, tmp_path, HOST, {"depth": 3, **settings}).config

    assert again().learning_rate == 0.02
    save_config(again(learning_rate=0.04), tmp_path)
    assert (again().learning_rate, again(epochs=200).learning_rate) == (0.04, 0.04)
    assert again(learning_rate=0.02, adam_rate=0.01).adam_rate == 0.01


@pytest.mark.parametrize(
    ("settings", "validations"),
    [
        ({"epochs": 100}, 20),
        ({"epochs": 3}, 3),
        ({"epochs": 100, "validate_every": 1}, 0),
        ({"epochs": 100, "validations": 7}, 7),
        ({"steps": 1}, 1),
    ],
)
def test_a_long_run_has_twenty_validations_and_a_short_one_as_many_as_epochs(
    phantom_store, tmp_path, settings, validations
):
    plan = make_plan(phantom_store, tmp_path, HOST, {"depth": 3, **settings})
    assert plan.config.validations == validations


def test_a_run_made_longer_has_the_validations_of_its_new_length(phantom_store, tmp_path):
    def again(**settings):
        return make_plan(phantom_store, tmp_path, HOST, {"depth": 3, **settings})

    first = again(epochs=3)
    save_config(first.config, tmp_path)
    save_plan(first, tmp_path)
    assert again(epochs=30).config.validations == 20
    assert again(epochs=30, validate_every=2).config.validations == 0


# --- The curriculum ---


@pytest.mark.parametrize(
    ("settings", "coarse", "steps"),
    [
        ({}, "half", 6),
        ({"curriculum": "off"}, "off", 0),
        ({"curriculum": "auto"}, "off", 0),  # half of so small a grid does not pay
        (
            {"depth": 5, "curriculum": "auto"},
            "off",
            0,
        ),  # half of it would be one voxel at the deepest of five levels
        # so it would not along Z, which is halved once
        ({"depth": 5, "strides": ((2, 2, 1), (2, 2, 1), (2, 1, 1), (1, 2, 2))}, "half", 6),
        ({"steps": 1}, "half", 0),  # which is in full
        ({"mode": "patch", "patch": (16, 16, 16)}, "half", 6),
    ],
)
def test_most_steps_are_coarse_where_the_grid_allows(
    phantom_store, tmp_path, settings, coarse, steps
):
    plan = planned(
        phantom_store, tmp_path, 1, **{"curriculum": "half", "depth": 3, "steps": 8, **settings}
    )
    assert (plan.config.curriculum, plan.config.coarse_steps) == (coarse, steps)
    assert plan.to_json()["config"]["coarse_steps"] == steps
    if steps:
        assert plan.config.at(0).grid == plan.config.coarse_grid
        assert plan.config.at(7).grid == plan.config.grid
        wanted = steps * plan.forecast.coarse.step_s + (8 - steps) * plan.forecast.full.step_s
        assert plan.training_s == pytest.approx(wanted)
        assert plan.forecast.coarse.process_peak_bytes < plan.forecast.full.process_peak_bytes


def test_a_run_made_longer_keeps_its_coarse_steps_and_one_made_shorter_has_fewer(
    phantom_store, tmp_path
):
    def config(**settings):
        return make_plan(
            phantom_store, tmp_path, HOST, {"depth": 3, "curriculum": "half", **settings}
        ).config

    with_checkpoint(tmp_path)
    save_config(
        dataclasses.replace(config(steps=16), coarse_steps=14), tmp_path
    )  # as by another share
    assert [config(steps=steps).coarse_steps for steps in (8, 16, 32)] == [6, 14, 14]


def test_the_plan_of_a_run_that_goes_on_has_what_is_left_and_the_whole(phantom_store, tmp_path):
    def plan():
        settings = {"depth": 3, "curriculum": "half", "steps": 16, "policy": "auto"}
        return make_plan(phantom_store, tmp_path, HOST, settings)

    first = plan()
    assert first.left_s == first.forecast.all_s
    save_config(first.config, tmp_path)
    with_checkpoint(tmp_path, step=12)
    again = plan()
    forecast = again.forecast
    assert forecast.all_s == pytest.approx(first.forecast.all_s)
    # 1 of the 13 coarse steps, 3 in full, and the validations in these
    steps_s = forecast.coarse.step_s + 3 * forecast.full.step_s
    share = steps_s / (13 * forecast.coarse.step_s + 3 * forecast.full.step_s)
    left_s = steps_s + share * forecast.validation_s + forecast.postprocessing_s
    assert again.left_s == pytest.approx(left_s)
    assert (again.to_json()["done"], again.to_json()["left_s"]) == (12, again.left_s)
    printed = " ".join(plan_lines(again, HOST))
    assert f"{format_seconds(left_s)} after step 12" in printed
    assert f"{format_seconds(first.forecast.all_s)} in all" in printed
    (tmp_path / "checkpoints/step-00000016.npz").touch()
    assert plan().left_s == pytest.approx(forecast.postprocessing_s)
    write_decision(tmp_path, again.config)
    assert plan().left_s == 0


def write_decision(run, config, **changes):
    """Note a decision of the post-processing with the present best weights of a run."""
    best = run / "checkpoints" / BEST
    best.write_bytes(b"weights")
    content = {
        "schema": 1,
        "weights_sha256": [hashlib.sha256(b"weights").hexdigest()],
        "split_hash": config.split_hash,
    }
    write_json(run / POSTPROCESSING, {**content, **changes})


@pytest.mark.parametrize(
    ("changes", "weights", "is_left"),
    [
        ({}, b"weights", False),
        ({}, b"another", True),  # whatever is newer
        ({"split_hash": "another"}, b"weights", True),
        ({"schema": 2}, b"weights", True),
        ({"weights_sha256": 5}, b"weights", True),
        ({}, None, True),
    ],
)
def test_post_processing_is_left_unless_it_is_decided_with_the_present_weights(
    phantom_store, tmp_path, changes, weights, is_left
):
    settings = {"depth": 3, "steps": 16}
    config = make_plan(phantom_store, tmp_path, HOST, settings).config
    save_config(config, tmp_path)
    with_checkpoint(tmp_path, step=16)
    write_decision(tmp_path, config, **changes)
    best = tmp_path / "checkpoints" / BEST
    if weights is None:
        best.unlink()
    elif weights != best.read_bytes():
        best.write_bytes(weights)
        os.utime(tmp_path / POSTPROCESSING)
    plan = make_plan(phantom_store, tmp_path, HOST, settings)
    assert plan.done.is_decided != is_left


@pytest.mark.parametrize(
    ("stale", "patience", "is_over"),
    [
        (2, {}, True),
        (1, {}, False),
        (2, {"patience": 3}, False),  # made longer by more patience
    ],
)
def test_no_step_is_left_of_a_run_whose_patience_has_run_out(
    phantom_store, tmp_path, stale, patience, is_over
):
    settings = {"depth": 3, "curriculum": "off", "steps": 16, "patience": 2}
    save_config(make_plan(phantom_store, tmp_path, HOST, settings).config, tmp_path)
    progress = dataclasses.replace(at_the_start(), step=12, stale_validations=stale)
    (tmp_path / "checkpoints").mkdir()
    write_next(tmp_path, 12, {}, dataclasses.asdict(progress), keep=3)
    plan = make_plan(phantom_store, tmp_path, HOST, patience)
    forecast = plan.forecast
    left_s = 4 * forecast.full.step_s + forecast.validation_s / 4
    if is_over:
        left_s = 0
    assert plan.left_s == pytest.approx(left_s + forecast.postprocessing_s)


@pytest.mark.parametrize(("spent_s", "left_s"), [(0.0, 60.0), (45.0, 15.0), (90.0, 0.0)])
def test_of_a_budget_what_is_not_spent_is_left(phantom_store, tmp_path, spent_s, left_s):
    plan = make_plan(phantom_store, tmp_path, HOST, {"steps": 16})
    course = dataclasses.replace(plan.forecast.course, budget_s=60.0, steps=10**9, validations=0)
    forecast = dataclasses.replace(plan.forecast, course=course)
    done = Done(steps=12, steps_s=spent_s, is_decided=True)
    assert forecast.left(done).all_s == pytest.approx(left_s)


@pytest.mark.parametrize(
    ("done", "left_s"),
    [
        (Done(12), 1 * 1.0 + 3 * 4.0),
        # each coarse step takes twice what is predicted, so that each full one would too
        (Done(12, coarse=OwnSteps(11, 2.0)), 1 * 2.0 + 3 * 8.0),
        (Done(14, full=OwnSteps(3, 5.0), coarse=OwnSteps(12, 2.0)), 2 * 5.0),
    ],
)
def test_steps_that_are_left_take_what_those_before_them_took(
    phantom_store, tmp_path, done, left_s
):
    settings = {"depth": 3, "curriculum": "half", "steps": 16}
    forecast = make_plan(phantom_store, tmp_path, HOST, settings).forecast
    made = dataclasses.replace(
        forecast,
        course=dataclasses.replace(forecast.course, coarse_steps=13, validations=0, decided=0),
        full=dataclasses.replace(forecast.full, step_s=4.0),
        coarse=dataclasses.replace(forecast.coarse, step_s=1.0),
    )
    assert made.left(done).all_s == pytest.approx(left_s)


@pytest.mark.parametrize(
    ("done", "all_s", "left_s"),
    [
        # predicted: 8 validations of 3 cases, each a third of a step; 6.5 of them are coarse
        (Done(12), 24 * (13 * 1 + 3 * 4) / 16 / 3, 24 * (1 * 1 + 3 * 4) / 16 / 3),
        # with no validation yet: a third of a step of this pace
        (Done(12, coarse=OwnSteps(11, 2.0)), 24 * 50 / 16 / 3, 24 * 26 / 16 / 3),
        # a coarse case takes 3 times what is predicted, so that each full one would too
        (Done(12, coarse=OwnSteps(11, 2.0, 1.0)), 24 * (13 + 3 * 4) / 16, 24 * (1 + 3 * 4) / 16),
        (
            Done(14, full=OwnSteps(3, 5.0, 6.0), coarse=OwnSteps(12, 2.0, 1.0)),
            24 * (13 + 3 * 6) / 16,
            24 * 2 * 6 / 16,
        ),
    ],
)
def test_validations_that_are_left_take_what_those_before_them_took(
    phantom_store, tmp_path, done, all_s, left_s
):
    settings = {"depth": 3, "curriculum": "half", "steps": 16}
    forecast = make_plan(phantom_store, tmp_path, HOST, settings).forecast
    course = dataclasses.replace(forecast.course, coarse_steps=13, validations=8, held_out=3)
    made = dataclasses.replace(
        forecast,
        course=course,
        full=dataclasses.replace(forecast.full, step_s=4.0),
        coarse=dataclasses.replace(forecast.coarse, step_s=1.0),
    )
    assert made.at_pace_of(done).validation_s == pytest.approx(all_s)
    assert made.left(done).validation_s == pytest.approx(left_s)


@pytest.mark.parametrize(
    ("changes", "last", "takes_own"),
    [
        ({}, 12, True),
        ({}, 3, False),  # of these the first one compiles
        ({"policy": "lean"}, 12, False),
        ({"workers": 2}, 12, False),
        ({"host": {**HOST.summary(), "cpu": "another CPU"}}, 12, False),
        ({"host": None}, 12, False),  # not logged
    ],
)
def test_a_run_that_goes_on_is_planned_at_its_own_pace_if_it_goes_on_alike(
    phantom_store, tmp_path, changes, last, takes_own
):
    def plan():
        settings = {"depth": 3, "curriculum": "half", "steps": 16, "policy": "speed"}
        return make_plan(phantom_store, tmp_path, HOST, settings)

    config = plan().config
    save_config(config, tmp_path)
    with_checkpoint(tmp_path, step=12)
    predicted_s = plan().left_s
    start = start_of(plan())
    logged = {name: value for name, value in {**start, **changes}.items() if value is not None}
    append_event(tmp_path, logged)
    for step in range(1, last + 1):
        append_event(tmp_path, {"event": "step", "step": step, "step_s": 77.0})
    again = plan()
    printed = " ".join(plan_lines(again, HOST))
    assert ("its own last 11 coarse steps" in printed) == takes_own
    if not takes_own:
        assert again.left_s == pytest.approx(predicted_s)
        return
    # 1 of the 13 coarse steps, 3 in full
    off = 77.0 / again.forecast.coarse.step_s
    steps_s = 77.0 + 3 * off * again.forecast.full.step_s
    assert again.forecast.left(again.done).steps_s == pytest.approx(steps_s)
    assert again.left_s > steps_s
    # what the bar and `status` have at the start of the next attempt
    pace = Pace([*read_events(tmp_path), {**start, "step": 12}])
    assert pace.seconds_left(12, 16) == pytest.approx(steps_s)


def start_of(plan):
    """The event with which an attempt by a plan begins, on HOST."""
    config = plan.config
    return {
        "event": "start",
        "step": 0,
        "steps": plan.steps,
        "coarse_steps": config.coarse_steps,
        "workers": 1,
        "device": "cpu",
        "precision": config.unet.dtype,
        "policy": config.unet.policy,
        "micro_batch": config.micro,
        "grid": list(config.grid),
        "host": HOST.summary(),
        "predicted": plan.predicted,
    }


def log_pace(plan, run, step_s=77.0, **changes):
    """Log a start, and so many coarse steps that this is their pace."""
    run.mkdir(exist_ok=True)
    save_config(plan.config, run)
    append_event(run, {**start_of(plan), **changes})
    for step in range(1, 6):
        append_event(run, {"event": "step", "step": step, "step_s": step_s})


def test_validations_are_planned_by_their_seconds_in_the_log(phantom_store, tmp_path):
    settings = {"depth": 3, "curriculum": "half", "steps": 16, "policy": "speed"}
    plan = make_plan(phantom_store, tmp_path, HOST, settings)
    log_pace(plan, tmp_path)
    scores = {"mean_dice": 0.5, "cases": 2}
    for seconds, case_s in ((900.0, 450), (600.0, 300)):  # the first one compiles
        append_event(tmp_path, {"event": "validation", "step": 5, "seconds": seconds, **scores})
        again = make_plan(phantom_store, tmp_path, HOST, settings)
        assert again.done.coarse.case_s == case_s
    assert "validations of 5 min a case" in " ".join(plan_lines(again, HOST))
    assert again.paced.validation_s > 300 * 13 / 16 * again.validations


@pytest.mark.parametrize(
    ("settings", "place", "changes", "takes"),
    [
        ({"fold": "2/2"}, "fold-2", {}, True),
        ({"fold": "2/2"}, "another", {}, False),  # that is no fold of this folder
        ({"fold": "2/2"}, "fold-2", {"policy": "lean"}, False),
        ({"fold": "2/2"}, "fold-2", {"host": {**HOST.summary(), "cpu": "another CPU"}}, False),
        ({"fold": "2/2", "filters": 8}, "fold-2", {}, False),
        ({"fold": "2/2", "batch": 2}, "fold-2", {}, False),
        ({}, "fold-2", {}, False),
    ],
)
def test_a_fold_that_has_not_begun_is_planned_at_the_pace_of_one_beside_it(
    phantom_store, tmp_path, settings, place, changes, takes
):
    def plan(place, **settings):
        alike = {"depth": 3, "curriculum": "half", "steps": 16, "policy": "speed"}
        return make_plan(phantom_store, tmp_path / place, HOST, {**alike, **settings})

    first = plan("fold-1", fold="1/2")
    log_pace(first, tmp_path / "fold-1", **changes)
    planned = plan(place, **settings)
    assert ("by fold 1/2's last 4 coarse steps" in " ".join(plan_lines(planned, HOST))) == takes
    # 13 of the 16 steps are coarse
    assert (planned.left_s > 13 * 77) == takes


def test_a_fold_with_a_pace_of_its_own_is_planned_by_that(phantom_store, tmp_path):
    settings = {"depth": 3, "curriculum": "half", "steps": 16, "policy": "speed"}
    for part, step_s in ((1, 77.0), (2, 55.0)):
        run = tmp_path / f"fold-{part}"
        plan = make_plan(phantom_store, run, HOST, {**settings, "fold": f"{part}/2"})
        log_pace(plan, run, step_s)
    again = make_plan(phantom_store, run, HOST, {**settings, "fold": "2/2"})
    assert (again.done.whose, again.done.coarse.step_s) == ("its own", 55.0)


@pytest.mark.parametrize("steps", [16, 17, 40])
def test_nothing_is_left_of_a_run_that_is_made_shorter_than_it_is(phantom_store, tmp_path, steps):
    forecast = make_plan(phantom_store, tmp_path, HOST, {"steps": 16}).forecast
    done = Done(steps=steps, steps_s=9.0, is_decided=True)
    assert forecast.left(done).all_s == pytest.approx(0)


def test_regions_that_no_validation_case_has_are_noted_before_a_run_begins(phantom_store, tmp_path):
    note = "no validation case has NC,"
    assert note not in " ".join(plan_lines(planned(phantom_store, tmp_path), HOST))
    plan = planned(with_absent_region(phantom_store), tmp_path)
    assert note in " ".join(plan_lines(plan, HOST))
    save_config(plan.config, tmp_path)
    with_checkpoint(tmp_path)  # it may be of an earlier version, which counted them
    again = planned(with_absent_region(phantom_store), tmp_path)
    assert note not in " ".join(plan_lines(again, HOST))


def test_a_run_that_goes_on_keeps_its_strides_and_its_policy_and_says_so(phantom_store, tmp_path):
    store = of_voxels(phantom_store, *THICK)
    save_config(planned(store, tmp_path).config, tmp_path)
    with_checkpoint(tmp_path)
    reasons = planned(store, tmp_path).reasons
    assert reasons["strides"] == "strides 2,2,1 2,2,1: as the run was begun"
    assert re.fullmatch(r"policy \w+: as the run was begun", reasons["policy"])


def test_peaks_of_the_run_are_printed_beside_those_of_a_step(phantom_store, tmp_path):
    plan = planned(phantom_store, tmp_path, steps=8, filters=32)
    forecast = plan.forecast
    step = forecast.full
    beside = sum(line.bytes for line in step.beside if line.name != "post-processing")
    assert beside > 0
    assert forecast.process_peak_bytes == step.process_peak_bytes + beside
    assert forecast.allocator_peak_bytes >= step.allocator_peak_bytes
    predicted = plan.predicted
    assert predicted["run_process_peak_bytes"] == forecast.process_peak_bytes
    assert predicted["run_allocator_peak_bytes"] == forecast.allocator_peak_bytes
    lines = plan_lines(plan, HOST)
    for peaks in (step, forecast):
        figures = [peaks.allocator_peak_bytes, peaks.process_peak_bytes]
        assert any(all(format_bytes(figure) in line for figure in figures) for line in lines)


def test_a_longer_run_that_keeps_its_coarse_steps_says_so(phantom_store, tmp_path):
    def plan(**settings):
        return make_plan(
            phantom_store, tmp_path, HOST, {"depth": 3, "curriculum": "half", **settings}
        )

    save_config(plan(steps=6).config, tmp_path)
    with_checkpoint(tmp_path)
    printed = " ".join(plan_lines(plan(steps=8400), HOST))
    assert re.search(r"coarse steps: 5, .* 8400 steps would have 7000", printed)
    assert "coarse steps: 5" not in " ".join(plan_lines(plan(steps=6), HOST))
    of_minutes = " ".join(plan_lines(plan(budget_minutes=30.0), HOST))
    assert "coarse steps: 5" in of_minutes
    assert "would have" not in of_minutes, "how many steps fit is not known yet"


# --- Before the first checkpoint ---


def with_checkpoint(run, step=1):
    """A run of which a step is done: it has a checkpoint."""
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / f"step-{step:08}.npz").touch()


def cut_short(store, run, host=HOST, **settings):
    """A run that was ended before its first checkpoint."""
    plan = make_plan(store, run, host, {"depth": 3, "curriculum": "half", **settings})
    save_config(plan.config, run)
    save_plan(plan, run)


OF_LENGTH = [
    ({"steps": 6}, {"steps": 8400}, 7000),
    ({"steps": 8400}, {"steps": 6}, 5),
    ({"steps": 6}, {"epochs": 3}, 10),
    ({"epochs": 3}, {"steps": 6}, 5),
    ({"steps": 6}, {}, 5),
]


@pytest.mark.parametrize(
    ("before", "now", "coarse_steps", "plan_is_there"),
    [
        *((*lengths, True) for lengths in OF_LENGTH),
        *((*lengths, False) for lengths in OF_LENGTH),  # as of an earlier version
        ({"steps": 6}, {"curriculum": "off", "steps": 12}, 0, True),
        ({"steps": 6, "curriculum": "off"}, {"curriculum": "half", "steps": 12}, 10, True),
    ],
)
def test_a_run_without_a_checkpoint_gets_the_curriculum_of_its_length(
    phantom_store, tmp_path, before, now, coarse_steps, plan_is_there
):
    cut_short(phantom_store, tmp_path, **before)
    if not plan_is_there:
        (tmp_path / "plan.json").unlink()
    config = make_plan(phantom_store, tmp_path, HOST, now).config
    assert config.coarse_steps == coarse_steps
    assert config.unet.depth == 3, "what was chosen is kept"


def test_a_budget_of_minutes_is_timed_again_if_no_step_was_kept(phantom_store, tmp_path):
    budget = {"budget_minutes": 30.0, "epochs": 50}
    cut_short(phantom_store, tmp_path, **budget)
    timed = dataclasses.replace(make_plan(phantom_store, tmp_path, HOST, budget).config, steps=9)
    save_config(timed, tmp_path)
    assert make_plan(phantom_store, tmp_path, HOST, budget).config.steps == 0
    with_checkpoint(tmp_path)
    for settings in (budget, {}):
        assert make_plan(phantom_store, tmp_path, HOST, settings).config.steps == 9
    longer = make_plan(phantom_store, tmp_path, HOST, {**budget, "epochs": 60}).config
    assert (longer.steps, longer.budget_minutes) == (0, 30), "more epochs may fit"
    whole = make_plan(phantom_store, tmp_path, HOST, {**budget, "budget_minutes": 0.0})
    assert whole.steps == 50 * whole.steps_per_epoch


@pytest.mark.parametrize(
    ("chosen", "kept"),
    [
        ({}, ("bfloat16", "speed", 1)),
        (
            {"dtype": "float32", "policy": "lean", "batch": 2, "micro_batch": 2},
            ("float32", "lean", 2),
        ),
    ],
)
def test_what_a_host_decided_is_decided_again_and_what_was_chosen_is_kept(
    phantom_store, tmp_path, chosen, kept
):
    slow = dataclasses.replace(HOST, isa=())
    cut_short(phantom_store, tmp_path, host=slow, **chosen)
    cut_short(phantom_store, tmp_path, host=slow, steps=7)
    config = make_plan(phantom_store, tmp_path, HOST, {}).config
    assert (config.unet.dtype, config.unet.policy, config.micro) == kept
    assert config.steps == 7
    with_checkpoint(tmp_path)
    slower = make_plan(phantom_store, tmp_path, HOST, {}).config
    assert slower.unet.dtype == "float32", "weights are there"


def test_before_the_first_checkpoint_other_settings_are_another_run_in_the_same_folder(
    phantom_store, tmp_path
):
    cut_short(phantom_store, tmp_path, **PATCH, batch_per_worker=2)
    config = make_plan(
        phantom_store, tmp_path, HOST, {"mode": "whole", "batch": 1, "filters": 8}
    ).config
    assert (config.mode, config.batch, config.unet.filters) == ("whole", 1, 8)
    with_checkpoint(tmp_path)
    with pytest.raises(InputError, match="--mode must stay patch, got whole"):
        make_plan(phantom_store, tmp_path, HOST, {"mode": "whole"})


def test_a_run_that_lost_its_checkpoints_is_still_the_one_that_was_chosen(phantom_store, tmp_path):
    """Though it was continued by a shorter command meanwhile."""
    cut_short(phantom_store, tmp_path, filters=8, steps=6)
    with_checkpoint(tmp_path)
    again = make_plan(phantom_store, tmp_path, HOST, {"steps": 12})
    save_plan(again, tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    config = make_plan(phantom_store, tmp_path, HOST, {}).config
    assert (config.unet.depth, config.unet.filters, config.steps) == (3, 8, 12)


def test_a_run_of_an_earlier_version_that_lost_its_checkpoints_keeps_its_settings(
    phantom_store, tmp_path
):
    cut_short(phantom_store, tmp_path, filters=8)
    (tmp_path / "plan.json").unlink()  # that version's has no chosen settings
    with_checkpoint(tmp_path)
    save_plan(make_plan(phantom_store, tmp_path, HOST, {}), tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    assert make_plan(phantom_store, tmp_path, HOST, {}).config.unet.filters == 8


# --- What keeps a run from being continued ---


@pytest.mark.parametrize(
    ("before", "now"), [("auto", "stock"), ("itex", "stock"), ("stock", "auto")]
)
def test_a_run_that_was_begun_with_any_engine_continues_with_another(
    phantom_store, tmp_path, before, now
):
    save_config(decided(phantom_store, tmp_path, **SMALL, engine=before), tmp_path)
    assert decided(phantom_store, tmp_path, engine=now).engine == now


def test_what_only_follows_from_a_setting_or_the_store_is_not_to_be_left_out(
    phantom_store, tmp_path
):
    save_config(decided(phantom_store, tmp_path, **SMALL), tmp_path)
    with pytest.raises(InputError) as error:
        decided(phantom_store, tmp_path, extent="full")
    assert [problem.split()[0] for problem in error.value.problems] == ["--extent"]
    other = remake(phantom_store.manifest, labels={**phantom_store.manifest.labels, 9: "other"})
    with pytest.raises(InputError, match=r"must stay .*; take the store"):
        decided(Store(phantom_store.folder, other), tmp_path)


@pytest.mark.parametrize("recipe", [{}, {"recipe": "demo"}])
def test_a_run_that_continues_keeps_its_grown_rate_its_batch_and_its_policy(
    phantom_store, tmp_path, recipe
):
    def again(workers=2, **settings):
        return make_plan(
            phantom_store, tmp_path, HOST, {**recipe, **settings}, workers=workers
        ).config

    settings = {"batch_per_worker": 1, "depth": 3, "dtype": "float32"}
    config = again(**settings, policy="lean")
    save_config(config, tmp_path)
    assert again(**settings) == again(**settings) == config
    if not recipe:
        assert again(1) == config
        with pytest.raises(InputError, match="--batch must stay 2, got 4"):
            again(4, batch_per_worker=1)


def test_batch_norm_sees_what_a_worker_computes_and_that_stays_as_it_was(phantom_store, tmp_path):
    config = planned(phantom_store, tmp_path, 2, batch=4, norm="batch").config
    assert (config.micro, config.micro_batches) == (2, 2)
    save_config(config, tmp_path)
    assert make_plan(phantom_store, tmp_path, HOST, {}).config.micro == 2
    with pytest.raises(
        InputError, match="micro-batch must divide the 1 volumes of a worker, got 2"
    ):
        make_plan(phantom_store, tmp_path, HOST, {}, workers=4)


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


@pytest.mark.parametrize(("free_gib", "policy"), [(12, "speed"), (11, "lean"), (5, "lean")])
def test_the_fastest_policy_that_fits_is_picked_with_a_reason(
    phantom_store, tmp_path, priced, free_gib, policy
):
    plan = planned(phantom_store, tmp_path, host=with_free(free_gib * GIB))
    assert plan.config.unet.policy == policy
    assert f"{free_gib}.00 GiB free" in plan.reasons["policy"]
    asked = planned(phantom_store, tmp_path, host=with_free(free_gib * GIB), policy="lean")
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


def test_the_nearest_settings_that_fit_are_proposed(phantom_store, tmp_path, priced):
    plan = planned(phantom_store, tmp_path, policy="speed", extent="full", batch=4, micro_batch=4)
    message = refusal(plan, 1.01 * plan.forecast.full.upper_bound_bytes / 4)
    assert "--micro-batch 1: up to " in message


def test_a_continued_run_is_told_only_of_what_it_may_change(phantom_store, tmp_path, priced):
    def continued(**settings):
        plan = planned(phantom_store, tmp_path, policy="speed", **settings)
        return dataclasses.replace(plan, saved=plan.config)

    once = refusal(continued(), 8 * GIB)
    assert "--policy lean: up to 6.00 GiB, 1.3 s a volume" in once
    assert "another folder" not in once
    several = continued(batch=4, micro_batch=4)
    assert "--policy lean --micro-batch 1: up to 6.00 GiB" in refusal(several, 8 * GIB)
    assert re.search("another folder.* up to ", refusal(several, 5 * GIB))
    batch_norm = continued(batch=4, micro_batch=4, norm="batch")
    assert "--policy lean: up to 24.00 GiB" in refusal(batch_norm, 30 * GIB)
    assert re.search(
        "another folder.* --micro-batch 1: up to 12.00 GiB", refusal(batch_norm, 12 * GIB)
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

PATCHES = dataclasses.replace(RUN, mode="patch", grid=(64, 64, 64), batch=1, micro_batch=1)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        PATCH,
        {"resolution": 0.5},
        {"resolution": 0.75},
        {"resolution": 0.5, "channels": ["FLAIR"]},
        {"resolution": 0.5, "strides": ((1, 2, 2), (2, 2, 2))},
    ],
)
def test_whole_volumes_are_in_the_bound_where_steps_see_less_than_these(
    phantom_store, tmp_path, settings
):
    plan = planned(phantom_store, tmp_path, policy="speed", **settings)
    full = plan.forecast.full
    resolution = plan.config.resolution_by_axis
    covered = (math.ceil(n / share) for n, share in zip(plan.config.grid, resolution))
    volume = tuple(map(max, phantom_store.manifest.largest_box, covered))
    beside = whole_volume_bytes(full.job, volume, resolution) if settings else 0
    averaged = 0
    if min(resolution) < 1:  # a sample's image in float32, and then its target
        averaged = (
            4 * math.prod(plan.config.grid) * max(full.job.unet.channels, full.job.unet.outputs)
        )
    alone = estimate(full.job, full.constants, full.accuracy)
    assert full.upper_bound_bytes == alone.upper_bound_bytes + beside + averaged
    split = {**phantom_store.manifest.split, "val": ()}
    store = Store(phantom_store.folder, dataclasses.replace(phantom_store.manifest, split=split))
    without = planned(store, tmp_path, policy="speed", **settings).forecast.full.upper_bound_bytes
    assert without == full.upper_bound_bytes - beside, "no validation, no volume"


def test_what_a_large_store_keeps_of_each_case_is_in_the_bound(phantom_store, tmp_path):
    case = phantom_store.manifest.cases[0]

    def bound(count):
        cases = [dataclasses.replace(case, case_id=f"{n:05d}") for n in range(count)]
        split = {"train": [case.case_id for case in cases], "val": (), "test": ()}
        manifest = remake(phantom_store.manifest, cases=cases, split=split)
        store = Store(phantom_store.folder, manifest)
        return planned(store, tmp_path, policy="speed").forecast.upper_bound_bytes

    assert bound(2000) - bound(1) == pytest.approx(2000 * 1200, rel=0.2)


@pytest.mark.parametrize(
    ("resolution", "averaged"),
    [
        ((1, 1, 1), 0),
        # a float32 copy, and what it becomes along the first axis that has half the resolution
        ((0.5, 0.5, 0.5), 4 * 4 * 1.5),
        ((0.5, 0.5, 1), 4 * 4 * 1.5),
        ((1, 0.5, 0.5), 4 * 4 * 1.5),
    ],
)
def test_what_whole_volumes_take_is_counted_by_hand(resolution, averaged):
    job = job_of(PATCHES, PATCHES.grid, threads=2, cases=8)
    shape = (240, 240, 155)
    voxels = 240 * 240 * 155
    # Three volumes of 4 float32 channels and 3 masks, weights, 2 float32 maps of 3 regions.
    counted = voxels * (3 * (4 * 4 + 3) + 4 + 2 * 4 * 3 + averaged)
    assert whole_volume_bytes(job, shape, resolution) == counted


def test_of_smaller_patches_the_largest_that_fits_is_proposed(phantom_store, tmp_path, priced):
    plan = planned(phantom_store, tmp_path, policy="lean", mode="patch", patch=[24, 32, 32])
    beside = whole_volume_bytes(
        plan.forecast.full.job, phantom_store.manifest.largest_box, (1, 1, 1)
    )
    message = refusal(plan, beside + 0.6 * (plan.forecast.full.upper_bound_bytes - beside))
    (proposed,) = re.findall(r"--patch (\d+) (\d+) (\d+)", message)
    assert 0.3 < math.prod(map(int, proposed)) / math.prod(plan.config.grid) <= 0.6


# --- Patches ---


def test_whole_and_patch_runs_share_everything_else(phantom_store, tmp_path):
    whole, patch = (decided(phantom_store, tmp_path, **SMALL, **more) for more in ({}, PATCH))
    changed = {name for name, value in vars(whole).items() if value != getattr(patch, name)}
    assert changed == {"mode", "grid", "patches_per_case"}
    grid = grid_size(phantom_store, extent="brain", multiple=4)
    assert patch.patches_per_case == round(math.prod(grid) / 16**3), "an epoch sees as much"


def test_without_a_size_a_patch_is_the_usual_one_within_the_volume(phantom_store, tmp_path):
    config = decided(phantom_store, tmp_path, **SMALL, mode="patch")
    assert config.grid == grid_size(phantom_store, extent="brain", multiple=4)
    assert usual_patch((240, 240, 160), (16, 16, 16)) == (128, 128, 128)
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


def test_a_batch_is_at_most_an_epoch_s_patches(phantom_store, tmp_path):
    assert decided(phantom_store, tmp_path, **SMALL, **PATCH, batch=28).patches_per_case == 7
    with pytest.raises(
        InputError, match="batch must be at most the 28 patches of an epoch, got 29"
    ):
        decided(phantom_store, tmp_path, **SMALL, **PATCH, batch=29)
    assert (
        decided(phantom_store, tmp_path, **SMALL, **PATCH, batch=29, patches_per_case=8).batch == 29
    )


# --- Runs on a card ---

CARD = Gpu(
    index=0, name="made up", memory_bytes=16 * GIB, free_bytes=GIB, compute_capability=(8, 0)
)
ON_CARD = dataclasses.replace(PATCHES, device="gpu:0", batch=2, micro_batch=2, engine="auto")


@pytest.mark.parametrize(
    ("saved", "smaller"),
    [
        (None, "a smaller --patch or --micro-batch, or --force"),
        (ON_CARD, "another --device"),
    ],
)
def test_what_a_card_does_not_hold_is_refused_with_what_may_be_changed(
    phantom_store, saved, smaller
):
    with pytest.raises(
        DoesNotFitError, match=r"^gpu:0 must hold a step of .*, got 1.00 GiB free of 16"
    ) as caught:
        check_run(Plan(ON_CARD, phantom_store, saved), HOST, [CARD])
    assert smaller in str(caught.value)


def test_a_card_whose_free_memory_is_unknown_is_taken(phantom_store):
    check_run(Plan(ON_CARD, phantom_store), HOST, [dataclasses.replace(CARD, free_bytes=None)])
    assert "of the card" in " ".join(plan_lines(Plan(ON_CARD, phantom_store), HOST))


def test_a_card_sets_device_dtype_and_patch(phantom_store, tmp_path):
    card = dataclasses.replace(CARD, free_bytes=2**34)
    settings = {**SMALL, "mode": "patch", "dtype": "auto", "device": "gpu:0"}
    config = decided(phantom_store, tmp_path, gpus=(card,), **settings)
    assert (config.device, config.unet.dtype) == ("gpu:0", "bfloat16")
    assert config.grid == grid_size(
        phantom_store, extent="brain", multiple=4
    )  # a small volume fits a large card
    older = dataclasses.replace(card, compute_capability=(7, 5))
    assert decided(phantom_store, tmp_path, gpus=(older,), **settings).unet.dtype == "float32"
    with pytest.raises(InputError, match="engine must be auto or stock on gpu:0, got itex"):
        decided(phantom_store, tmp_path, gpus=(card,), **settings, engine="itex")


def test_the_patch_of_a_card_is_the_largest_that_fits_it_or_refused_with_what_the_least_takes(
    phantom_store, tmp_path
):
    card = dataclasses.replace(CARD, free_bytes=round(1.02 * 2**30))
    config = decided(phantom_store, tmp_path, gpus=(card,), **SMALL, mode="patch", device="gpu:0")
    grid = grid_size(phantom_store, extent="brain", multiple=4)
    assert all(n <= most and n % 4 == 0 for n, most in zip(config.grid, grid))
    assert gpu_bytes(Job(config.unet, config.grid, engine="stock")) <= card.free_bytes
    full, silent = (dataclasses.replace(CARD, free_bytes=free) for free in (2**20, None))
    settings = {**SMALL, "mode": "patch", "device": "gpu:0"}
    with pytest.raises(
        DoesNotFitError, match=r"^gpu:0, .*, must hold a patch of at least 8 x 8 x 8, .* got 1 MiB"
    ):
        decided(phantom_store, tmp_path, gpus=(full,), **settings)
    with pytest.raises(
        InputError, match=r"the free memory of gpu:0 must be known, .* give --patch"
    ):
        decided(phantom_store, tmp_path, gpus=(silent,), **settings)


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
    # Of two cards the one with more memory free, but for the recipe that names one.
    assert config.device == ("gpu:0" if recipe else "gpu:1")
    save_config(config, tmp_path)
    assert decided(phantom_store, tmp_path, **settings) == config
    moved = decided(phantom_store, tmp_path, **settings, device="cpu")
    assert moved == dataclasses.replace(config, device="cpu")
    save_config(moved, tmp_path)
    assert decided(phantom_store, tmp_path, **settings) == moved
