"""Constants from runs on a made-up host whose true costs are known."""

import dataclasses
import random
import statistics

import pytest

from cpu3d.host.fitting import Run, fitted, undisturbed
from memory_estimator.calibration import part_of, shipped_constants
from memory_estimator.job import Job
from memory_estimator.step.onednn import Kernels
from memory_estimator.step.timing import op_seconds, step_seconds
from memory_estimator.step.training_step import training_step
from models.config import UNetConfig

ASSUMED = shipped_constants(Kernels())
CACHE = ASSUMED.cache_bytes


def scaled(constants, factor_of):
    """Constants whose costs are `factor_of(group, feature)` times as high."""
    costs = {
        engine: {
            dtype: {
                group: {name: cost * factor_of(group, name) for name, cost in each.items()}
                for group, each in groups.items()
            }
            for dtype, groups in by_dtype.items()
        }
        for engine, by_dtype in constants.costs.items()
    }
    return dataclasses.replace(constants, costs=costs)


def other_host(seed):
    """A host whose work and traffic take 4 to 8 times as long as assumed or as short, its groups 30 % more or less."""
    chance = random.Random(seed)
    parts = {part: chance.uniform(4, 8) ** chance.choice((-1, 1)) for part in ("work", "traffic")}
    parts["overhead"] = 1.0
    groups = {group: chance.uniform(0.7, 1.3) for group in ASSUMED.speeds("stock", "float32")}
    return scaled(ASSUMED, lambda group, name: parts[part_of(name)] * groups.get(group, 1.0))


def job(**changes):
    unet = {name: changes.pop(name) for name in list(changes) if name in UNetConfig.__dataclass_fields__}
    return Job(UNetConfig(**{"filters": 16, **unet}), engine="stock", threads=2, **{"shape": (64, 64, 64), **changes})


def run_of(job, truth, seen=True):
    """What a run of the job shows on a host of these constants."""
    program = training_step(job)
    overhead = truth.speeds(job.engine, job.unet.dtype)["every_op"]["seconds"]
    seconds = {op.name: s - overhead for op, s in zip(program.ops, op_seconds(program, truth, job))}
    return Run(job, "train", "2026-01-02", step_seconds(program, truth, job), seconds if seen else {})


def error(constants, truth, job):
    program = training_step(job)
    return step_seconds(program, constants.of(job.engine, job.unet.dtype), job) / step_seconds(program, truth, job) - 1


OTHERS = [
    *(job(filters=filters, depth=4) for filters in (8, 24, 32)),
    *(job(policy="lean"), job(residual=True), job(norm="batch", batch=2), job(batch=2, micro_batch=1)),
    *(job(deep_supervision=True), job(shape=(96, 96, 96), channels=1), job(optimizer="sgd", shape=(48, 48, 48))),
]


@pytest.mark.parametrize("seed", range(4))
def test_one_run_on_a_host_that_is_4_to_8_times_off_tells_what_other_jobs_take_there(seed):
    truth = other_host(seed)
    (found, _) = fitted([run_of(job(), truth)], ASSUMED, "Some CPU", CACHE)
    assert abs(error(found, truth, job())) < 0.02
    errors = sorted(abs(error(found, truth, one)) for one in OTHERS)
    assert statistics.median(errors) < 0.05
    assert errors[-1] < 0.2
    assert max(abs(error(ASSUMED, truth, one)) for one in OTHERS) > 0.3


def test_of_a_run_whose_operations_were_not_seen_the_scale_is_taken():
    truth = scaled(ASSUMED, lambda group, name: 6.0)
    found, other = fitted([run_of(job(), truth, seen=False)], ASSUMED, "Some CPU", CACHE)
    for one in OTHERS:
        assert abs(error(found, truth, one)) < 0.01
    assert (found.origin, found.runs, found.name, found.date) == ("measured", 1, "Some CPU", "2026-01-02")
    assert other.origin == "assumed"
    assert abs(error(other, truth, job(dtype="bfloat16"))) < 0.01  # as much slower as float32 was


def test_runs_of_several_widths_tell_what_others_take_where_no_proportion_is_as_assumed():
    truth = scaled(ASSUMED, lambda group, name: 1 + (len(group) + len(name)) % 5)
    runs = [run_of(one, truth) for one in (job(), job(filters=8), job(filters=24, depth=4, shape=(48, 48, 48)))]
    (found, _) = fitted(runs, ASSUMED, "", CACHE)
    assert statistics.fmean(abs(error(found, truth, one)) for one in OTHERS) < 0.03
    assert statistics.fmean(abs(error(ASSUMED, truth, one)) for one in OTHERS) > 0.3


@pytest.mark.parametrize("unevenness", [0.3, 1.0])
def test_operations_that_took_unevenly_long_add_up_to_the_step(unevenness):
    chance, run = random.Random(5), run_of(job(), ASSUMED)
    uneven = {name: seconds * chance.lognormvariate(0, unevenness) for name, seconds in run.op_s.items()}
    run = dataclasses.replace(run, op_s=uneven, step_s=sum(uneven.values()))
    (found, _) = fitted([run], ASSUMED, "", CACHE)
    program = training_step(run.job)
    assert step_seconds(program, found.of("stock", "float32"), run.job) == pytest.approx(run.step_s, rel=0.03)


def test_runs_whose_operations_are_called_otherwise_tell_the_scale_alone():
    truth = scaled(ASSUMED, lambda group, name: 6.0)
    run = run_of(job(), truth)
    renamed = dataclasses.replace(run, op_s={f"{name}/of_old": seconds for name, seconds in run.op_s.items()})
    (found, _) = fitted([renamed], ASSUMED, "", CACHE)
    assert max(abs(error(found, truth, one)) for one in OTHERS) < 0.02


def test_what_the_runtime_holds_is_fitted_where_it_was_measured():
    run = run_of(job(), ASSUMED)
    (without, _) = fitted([run], ASSUMED, "", CACHE)
    assert without.baseline_bytes == {"stock": ASSUMED.baseline_bytes["stock"]}
    assert without.origins["baseline_bytes"] == ASSUMED.origins["baseline_bytes"]
    (held, _) = fitted([run, Run(job(), "calibrate", "2026-01-02", runtime_bytes=10**9)], ASSUMED, "", CACHE)
    program = training_step(job())
    assert held.runtime_bytes("stock", program) == pytest.approx(10**9, abs=1000)


@pytest.mark.parametrize(
    ("steps_s", "calm"),
    [
        ([1.0, 1.05, 1.09, 1.5], [1.0, 1.05, 1.09]),
        ([1.0, 1.3, 1.15, 1.6], []),  # too few
        ([], []),
    ],
)
def test_steps_that_took_longer_than_the_fastest_ones_were_disturbed(steps_s, calm):
    assert undisturbed(steps_s) == calm
