"""The plan of a run: the job it is, what is said of it, and what is proposed where it does not fit."""

import dataclasses

import pytest

from cpu3d.config import RunConfig
from cpu3d.errors import DoesNotFitError
from cpu3d.memory_plan import check_fits, describe, for_log, foresee, job_of
from memory_estimator.host import Host
from memory_estimator.job import Job
from models.config import UNetConfig

GIB = 2**30
HOST = Host("a CPU", 1, 2, 2, 1, 24 * GIB, 20 * GIB, None, 0, None, ("avx512_bf16",))
RUN = RunConfig(
    grid=(240, 240, 160), unet=UNetConfig(dtype="float32"), batch=4, ema=0.9, extent="full", engine="itex",
)  # fmt: skip
BRAIN = [("--extent brain", (144, 192, 144))]


def test_a_run_is_the_job_that_the_estimator_knows():
    assert job_of(RUN, threads=2, cases=9) == Job(
        RUN.unet, (240, 240, 160), batch=4, engine="itex", threads=2, averaged=True, from_store=True, cases=9,
    )  # fmt: skip


def test_an_engine_without_estimates_is_said_and_never_refused():
    foreseen = foresee(dataclasses.replace(RUN, engine="stock-no-onednn"), HOST, cases=8)
    assert foreseen is None
    assert "nothing is known" in describe(foreseen, GIB)[0]
    assert for_log(foreseen) == {}
    check_fits(foreseen, 0)


def test_the_plan_says_peaks_bound_seconds_and_what_is_free():
    foreseen = foresee(RUN, HOST, cases=9)
    text = " ".join(describe(foreseen, HOST.free_bytes))
    for word in ("allocator peak", "process peak", "of 20.00 GiB free", "a step", "a volume", "an epoch", "worst"):
        assert word in text
    assert foreseen.epoch_s == pytest.approx(2 * foreseen.step_s)  # 9 cases are two whole batches of 4


def test_what_is_proposed_fits_and_is_the_store_s_own():
    foreseen = foresee(RUN, HOST, cases=8)
    assert foreseen.upper_bound_bytes > HOST.free_bytes
    with pytest.raises(DoesNotFitError) as caught:
        check_fits(foreseen, HOST.free_bytes, BRAIN)
    text = str(caught.value)
    assert "got 20.00 GiB free" in text
    assert "--batch 1: up to" in text
    assert "--shape" not in text  # a trainer's grid is the store's
    assert text.endswith("or --force")
    assert caught.value.exit_code == 3


def test_a_run_that_fits_exactly_is_let_through_and_a_byte_less_is_not():
    foreseen = foresee(RUN, HOST, cases=8)
    check_fits(foreseen, foreseen.upper_bound_bytes)
    with pytest.raises(DoesNotFitError):
        check_fits(foreseen, foreseen.upper_bound_bytes - 1)
