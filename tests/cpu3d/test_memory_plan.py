"""The plan of a run: the job it is, what is said of it, and what is proposed where it does not fit."""

import dataclasses
import math

import pytest

from cpu3d.config import RunConfig
from cpu3d.data.augment import AugmentConfig
from cpu3d.data.splits import with_fold
from cpu3d.errors import DoesNotFitError, InputError
from cpu3d.host.gpu import Gpu
from cpu3d.memory_plan import (
    Volumes,
    card_for_log,
    check_card,
    check_fits,
    describe,
    for_log,
    foresee,
    job_of,
    pick_policy,
    under,
    volumes_of,
)
from cpu3d.resolve import resolve
from memory_estimator.calibration import find_constants
from memory_estimator.estimate import estimate
from memory_estimator.gpu import CONTEXT_BYTES, gpu_bytes
from memory_estimator.host import Host, read_host
from memory_estimator.job import Job
from models.config import UNetConfig
from models.layer_plan import layer_plan

GIB = 2**30
HOST = Host("a CPU", 1, 2, 2, 1, 24 * GIB, 20 * GIB, None, 0, None, ("avx512_bf16",))
RUN = RunConfig(
    grid=(240, 240, 160), unet=UNetConfig(dtype="float32", policy="speed"), batch=4, micro_batch=4, ema=0.9,
    extent="full", engine="itex",
)  # fmt: skip
BRAIN = [("--extent brain", (144, 192, 144))]


def with_free(free_bytes):
    return dataclasses.replace(HOST, available_bytes=free_bytes)


def test_a_run_is_the_job_that_the_estimator_knows():
    assert job_of(RUN, threads=2, cases=9) == Job(
        RUN.unet, (240, 240, 160), batch=4, micro_batch=4, engine="itex", threads=2, averaged=True, from_store=True,
        cases=9,
    )  # fmt: skip
    turned = dataclasses.replace(RUN, augment=AugmentConfig(rotation_deg=10))
    assert job_of(turned, threads=2, cases=9).resampled


def priced(monkeypatch):
    """Estimates as they are, but for what the policies take: 12, 9 and 6 GiB for each volume computed at a time.

    In bfloat16 it is half of that, and on a smaller grid its share of the voxels.
    """
    taken = {"speed": (12, 1.0), "balanced": (9, 1.1), "lean": (6, 1.3)}

    def made(job, *more, **others):
        gib, step_s = taken[job.policy]
        voxel_bytes = gib * GIB / math.prod(RUN.grid) / (2 if job.unet.dtype == "bfloat16" else 1)
        said = estimate(job, *more, **others)
        return dataclasses.replace(said, upper_bound_bytes=round(voxel_bytes * job.voxels), step_s=step_s)

    monkeypatch.setattr("cpu3d.memory_plan.estimate", made)


SINGLY = dataclasses.replace(RUN, micro_batch=1)


@pytest.mark.parametrize(
    ("free", "policy", "why"),
    [
        (12, "speed", "policy speed: the fastest, and fits 12.00 GiB free"),
        (11, "balanced", "policy balanced: speed would take up to 12.00 GiB of 11.00 GiB free"),
        (5, "lean", "policy lean: none fits 5.00 GiB free, and this one takes least"),
    ],
)
def test_the_fastest_policy_that_fits_is_picked_and_why_is_said(free, policy, why, monkeypatch):
    priced(monkeypatch)
    assert pick_policy(SINGLY, with_free(free * GIB), 8) == (under(SINGLY, policy), why)
    assert under(SINGLY, policy).unet.policy == policy


def test_an_engine_without_estimates_gets_the_policy_speed():
    run = dataclasses.replace(under(RUN, "lean"), engine="stock-no-onednn")
    config, why = pick_policy(run, with_free(0), 8)
    assert config.unet.policy == "speed"
    assert "nothing is known" in why


def test_a_run_that_has_begun_is_told_the_policy_that_fits(monkeypatch):
    priced(monkeypatch)
    host = with_free(8 * GIB)
    with pytest.raises(DoesNotFitError) as caught:
        check_fits(foresee(SINGLY, host, cases=8), host, BRAIN, continued=True)
    assert str(caught.value).endswith("what fits: --policy lean: up to 6.00 GiB, 0.325 s a volume; or --force")
    with pytest.raises(DoesNotFitError, match=r"what fits: --policy lean --micro-batch 1: up to 6.00 GiB"):
        check_fits(foresee(RUN, host, cases=8), host, BRAIN, continued=True)


def test_an_engine_without_estimates_is_said_and_never_refused():
    foreseen = foresee(dataclasses.replace(RUN, engine="stock-no-onednn"), HOST, cases=8)
    assert foreseen is None
    assert "nothing is known" in describe(foreseen, HOST)[0]
    assert for_log(foreseen) == {}
    check_fits(foreseen, with_free(0))


def test_the_plan_says_peaks_bound_seconds_and_what_is_free():
    foreseen = foresee(RUN, HOST, cases=9)
    text = " ".join(describe(foreseen, HOST))
    for word in ("allocator peak", "process peak", "of 20.00 GiB free", "a step", "a volume", "an epoch"):
        assert word in text
    assert foreseen.accuracy.error("process_peak") in text
    assert "measured on AMD EPYC, for a CPU assumed" in text
    assert foreseen.epoch_s == pytest.approx(2 * foreseen.step_s)  # 9 cases are two whole batches of 4


def test_what_is_proposed_fits_and_is_the_store_s_own(monkeypatch):
    priced(monkeypatch)
    host = with_free(21 * GIB)
    with pytest.raises(DoesNotFitError) as caught:
        check_fits(foresee(RUN, host, cases=8), host, BRAIN)
    # Of 48 GiB lean and bfloat16 leave half, two volumes at a time too, and the brain's box 43 %. A trainer's grid is
    # the store's: no other is proposed.
    assert str(caught.value).endswith(
        "up to 48.00 GiB, got 21.00 GiB free; what fits: --micro-batch 1: up to 12.00 GiB, 0.25 s a volume; "
        "--extent brain: up to 20.74 GiB, 0.25 s a volume; or --force"
    )
    assert caught.value.exit_code == 3


def test_what_is_proposed_by_the_estimator_itself_fits():
    foreseen = foresee(RUN, HOST, cases=8)
    assert foreseen.upper_bound_bytes > HOST.free_bytes
    with pytest.raises(DoesNotFitError, match=r"got 20\.00 GiB free; what fits: .*--micro-batch 1: up to"):
        check_fits(foreseen, HOST, BRAIN)
    check_fits(foresee(SINGLY, HOST, cases=8), HOST)


def test_a_run_that_fits_exactly_is_let_through_and_a_byte_less_is_not():
    foreseen = foresee(RUN, HOST, cases=8)
    check_fits(foreseen, with_free(foreseen.upper_bound_bytes))
    with pytest.raises(DoesNotFitError):
        check_fits(foreseen, with_free(foreseen.upper_bound_bytes - 1))


def test_a_continued_run_is_not_told_to_change_what_it_must_keep(monkeypatch):
    priced(monkeypatch)
    host = with_free(5 * GIB)
    with pytest.raises(DoesNotFitError) as caught:
        check_fits(foresee(RUN, host, cases=8), host, BRAIN, continued=True)
    assert str(caught.value).endswith(
        "free some, continue on a host with more, or --force; what fits, as a run in another folder: "
        "--policy lean --micro-batch 1 --dtype bfloat16: up to 3.00 GiB, 0.325 s a volume"
    )


def test_a_continued_run_with_batch_norm_is_told_of_the_policy_alone(monkeypatch):
    priced(monkeypatch)
    run = dataclasses.replace(RUN, unet=dataclasses.replace(RUN.unet, norm="batch"))

    def told(free_gib):
        host = with_free(free_gib * GIB)
        with pytest.raises(DoesNotFitError) as caught:
            check_fits(foresee(run, host, cases=8), host, BRAIN, continued=True)
        return str(caught.value)

    assert told(30).endswith("; what fits: --policy lean: up to 24.00 GiB, 0.325 s a volume; or --force")
    assert "as a run in another folder: --micro-batch 1: up to 12.00 GiB" in told(12)


def test_regions_that_the_host_does_not_hold_are_named():
    foreseen = dataclasses.replace(foresee(RUN, HOST, cases=8), regions_short=True)
    with pytest.raises(DoesNotFitError, match="the allocator's regions, which double in size, up to"):
        check_fits(foreseen, HOST)


@pytest.mark.parametrize("content", ["{", '{"schema": 7}', '{"schema": 1}'])
def test_a_calibration_that_cannot_be_read_is_bad_input(content, tmp_path, monkeypatch):
    own = tmp_path / "calibration.json"
    own.write_text(content)
    monkeypatch.setattr("cpu3d.memory_plan.find_constants", lambda threads, host: find_constants(threads, host, own))
    with pytest.raises(InputError, match=r"calibration .*calibration\.json must"):
        foresee(RUN, HOST, cases=8)


# --- Runs whose steps see less than whole volumes ---

PATCHES = dataclasses.replace(RUN, mode="patch", grid=(64, 64, 64), batch=1, micro_batch=1)
WHOLE = Volumes((240, 240, 155))


def test_what_whole_volumes_take_is_counted_by_hand():
    voxels, job = 240 * 240 * 155, job_of(PATCHES, threads=2, cases=8)
    # Three volumes of 4 float32 channels and 3 masks, weights, 2 float32 maps of 3 regions.
    assert WHOLE.bytes(job) == voxels * (3 * (4 * 4 + 3) + 4 + 2 * 4 * 3)
    # At half the resolution of two at a time: five volumes, two float32 copies and their half, what is rotated.
    job = dataclasses.replace(job, batch=4, micro_batch=2, resampled=True)
    shrinking = 2 * 4 * 4 * 1.5 + 13 * 4
    assert Volumes(WHOLE.shape, 0.5).bytes(job) == voxels * (5 * (4 * 4 + 3) + 4 + 2 * 4 * 3 + shrinking)


@pytest.mark.parametrize(
    "settings", [{}, {"mode": "patch", "patch": [16, 16, 16]}, {"resolution": 0.5}, {"resolution": 0.75}]
)
def test_the_volumes_of_a_run_are_those_that_it_is_validated_on(phantom_store, tmp_path, settings):
    config = resolve(phantom_store, tmp_path, read_host(), {"filters": 4, "depth": 3, **settings}, None)
    volumes = volumes_of(config, phantom_store)
    if not settings:
        assert volumes is None
        return
    covered = (math.ceil(n / config.resolution) for n in config.grid)
    assert volumes == Volumes(tuple(map(max, phantom_store.manifest.largest_box, covered)), config.resolution)
    store = with_fold(phantom_store, "1/2")
    store.manifest = dataclasses.replace(store.manifest, split=dict(store.manifest.split, val=()))
    assert (volumes_of(config, store) is None) == config.is_patch, "patches without a validation see no volume"


def test_whole_volumes_are_in_the_bound_that_policies_are_picked_and_runs_refused_by(monkeypatch):
    priced(monkeypatch)
    alone, beside = foresee(PATCHES, HOST, 8), WHOLE.bytes(job_of(PATCHES, threads=2, cases=8))
    bound = alone.upper_bound_bytes + beside
    assert foresee(PATCHES, HOST, 8, WHOLE) == dataclasses.replace(alone, upper_bound_bytes=bound)
    assert foresee(PATCHES, HOST, 8, Volumes(WHOLE.shape, 0.5)).upper_bound_bytes > bound
    host = with_free(bound - 1)
    assert pick_policy(PATCHES, host, 8)[0].unet.policy == "speed"
    assert pick_policy(PATCHES, host, 8, WHOLE)[0].unet.policy == "balanced"
    check_fits(foresee(PATCHES, host, 8), host)
    with pytest.raises(DoesNotFitError, match=r"most of it validation on whole volumes, up to .*: --policy"):
        check_fits(foresee(PATCHES, host, 8, WHOLE), host, volumes=WHOLE)
    host = with_free(beside // 2)
    with pytest.raises(DoesNotFitError, match="; what fits: nothing smaller does; or --force"):
        check_fits(foresee(PATCHES, host, 8, WHOLE), host, volumes=WHOLE)


def test_of_smaller_patches_the_largest_that_fits_is_proposed(monkeypatch):
    priced(monkeypatch)
    foreseen = foresee(PATCHES, HOST, 8)
    grids = [("--patch 64 64 48", (64, 64, 48)), ("--patch 64 48 48", (64, 48, 48)), ("--patch 48 48 48", (48,) * 3)]
    host = with_free(round(0.6 * foreseen.upper_bound_bytes))  # of which 64 x 48 x 48 takes 9/16
    with pytest.raises(DoesNotFitError, match=r"; --patch 64 48 48: up to [^;]*; ") as caught:
        check_fits(foreseen, host, grids)
    assert str(caught.value).count("--patch") == 1
    host = with_free(round(0.12 * foreseen.upper_bound_bytes))  # none alone: a half, a half, and 27/64 of it
    with pytest.raises(DoesNotFitError, match="what fits: --policy lean --dtype bfloat16 --patch 48 48 48: up to"):
        check_fits(foreseen, host, grids)


# --- Runs on a card ---

CARD = Gpu(index=0, name="made up", memory_bytes=16 * GIB, free_bytes=GIB, compute_capability=(8, 0))
ON_CARD = dataclasses.replace(PATCHES, device="gpu:0", batch=2, micro_batch=2, engine="auto")


def test_what_a_card_does_not_hold_is_told_with_what_may_be_changed():
    def told(config, **how):
        with pytest.raises(DoesNotFitError, match=r"^gpu:0 must hold a step of .*, got 1.00 GiB free of 16") as caught:
            check_card(config, [CARD], **how)
        return str(caught.value).partition("16.00 GiB; ")[2]

    assert told(ON_CARD) == "choose a smaller --patch, a smaller --micro-batch, fewer --filters, or --force"
    keeps = "free some of it, or take another --device, "
    assert told(ON_CARD, continued=True) == keeps + "a smaller --micro-batch, or --force"
    single = dataclasses.replace(ON_CARD, micro_batch=1)
    assert told(single, continued=True) == keeps + "or --force"
    batch_norm = dataclasses.replace(ON_CARD, unet=dataclasses.replace(RUN.unet, norm="batch"))
    assert told(batch_norm, continued=True) == keeps + "or --force", "its micro-batch has to stay"
    check_card(ON_CARD, [dataclasses.replace(CARD, free_bytes=None)])
    check_card(PATCHES, [])


def test_the_log_of_a_run_on_a_card_says_what_was_predicted_of_it():
    needed = gpu_bytes(job_of(dataclasses.replace(ON_CARD, engine="stock"), 1, 0))
    told = card_for_log(ON_CARD)
    assert (told["card_bytes"], told["allocator_peak_bytes"]) == (needed, needed - CONTEXT_BYTES)
    assert "not verified" in told["constants"]


def test_steps_that_are_timed_before_the_run_hold_its_variables_twice():
    config = RunConfig(unet=UNetConfig(dtype="bfloat16"), grid=(64, 64, 64), engine="itex")
    timed = dataclasses.replace(config, budget_minutes=4.0)
    parameters = sum(op.trainable + op.frozen for op in layer_plan(config.unet, config.grid))
    more = foresee(timed, HOST, 8).upper_bound_bytes - foresee(config, HOST, 8).upper_bound_bytes
    assert more == pytest.approx(12 * parameters, rel=0.01), "weights and Adam's two slots"
