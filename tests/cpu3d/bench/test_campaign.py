"""The list that the estimator is judged by: what the owner asked for is in it, and it can be done."""

import itertools
import math

import pytest

from cpu3d.bench.campaign import HELD_OUT, _job, configurations, describe
from models.config import POLICIES
from models.layer_plan import layer_plan, training_flops

JOBS = configurations(threads=2)
LARGE = [job for job in JOBS if math.prod(job.shape) >= 128**3]
SMALL = [job for job in JOBS if math.prod(job.shape) <= 96**3]

FACTORS = {
    "shape": lambda job: job.shape,
    "filters": lambda job: job.unet.filters,
    "depth": lambda job: job.unet.depth,
    "batch": lambda job: job.batch,
    "channels": lambda job: job.unet.channels,
    "outputs": lambda job: job.unet.outputs,
    "dtype": lambda job: job.unet.dtype,
    "engine": lambda job: job.engine,
    "norm": lambda job: job.unet.norm,
    "optimizer": lambda job: job.optimizer,
    "variant": lambda job: [word for word in describe(job).split()[10:] if word not in POLICIES],
}


def values(name, jobs):
    return {str(FACTORS[name](job)) for job in jobs}


def test_every_configuration_is_either_held_out_or_small_enough_to_fit_constants_to():
    assert len(LARGE) >= 66
    assert len(SMALL) >= 12
    assert len(LARGE) + len(SMALL) == len(JOBS) == len(set(JOBS))


def test_what_was_asked_for_is_among_the_held_out():
    assert {"(240, 240, 160)", "(240, 240, 144)", "(144, 176, 128)", "(160, 192, 128)"} <= values("shape", LARGE)
    assert {"8", "16", "32"} <= values("filters", LARGE)
    assert values("depth", LARGE) == {"3", "4", "5"}
    assert values("batch", LARGE) == {"1", "2", "3", "4"}
    assert values("channels", LARGE) == {"1", "4"}
    assert values("outputs", LARGE) == {"1", "3"}
    assert values("norm", LARGE) == {"instance", "batch", "none"}
    assert len(values("variant", LARGE)) == 5
    assert {job.policy for job in LARGE} == set(POLICIES)


def test_nearly_every_two_settings_meet_in_some_held_out_configuration():
    for one, other in itertools.combinations(FACTORS, 2):
        met = {(str(FACTORS[one](job)), str(FACTORS[other](job))) for job in LARGE}
        all_pairs = len(values(one, LARGE)) * len(values(other, LARGE))
        assert len(met) >= 0.6 * all_pairs, (one, other)
    for factor in FACTORS:
        for value in values(factor, LARGE):
            with_it = [job for job in LARGE if str(FACTORS[factor](job)) == value]
            for other in {"dtype", "engine"} - {factor}:
                assert len(values(other, with_it)) == 2, (factor, value, other)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_meets_every_norm_engine_dtype_and_way_of_changing_the_network(policy):
    with_it = [job for job in LARGE if job.policy == policy]
    for factor in ("norm", "engine", "dtype", "channels", "outputs"):
        assert values(factor, with_it) == values(factor, LARGE), factor
    assert len(values("variant", with_it)) == 5


def test_every_configuration_can_be_built():
    for job in JOBS:
        layer_plan(job.unet, job.shape)


def test_every_configuration_fits_a_host_of_24_gib_and_the_whole_takes_less_than_an_hour_on_two_cores():
    total_s = 0
    for job in JOBS:
        unit = math.prod(job.shape) * job.unet.filters * (2 if job.unet.dtype == "bfloat16" else 4) * job.batch
        wide = 2 if job.unet.network == "cicek2016" else 1
        assert 0.7e9 + 30 * unit * wide < 22 * 2**30, describe(job)
        rate = 640e9 if job.unet.dtype == "bfloat16" else 330e9
        step_s = training_flops(job.unet, job.shape, job.batch) / rate * (1.6 if job.unet.filters == 8 else 1)
        assert 8 + 7 * step_s < 75, describe(job)
        total_s += 8 + 7 * step_s
    assert total_s < 55 * 60


def test_cheap_ones_come_first():
    costs = [training_flops(job.unet, job.shape, job.batch) for job in LARGE]
    assert sum(costs[: len(costs) // 3]) < 0.7 * sum(costs[-(len(costs) // 3) :])


@pytest.mark.parametrize("line", HELD_OUT.strip().splitlines())
def test_a_job_is_described_as_its_line_in_the_list(line):
    job = JOBS[HELD_OUT.strip().splitlines().index(line)]
    assert describe(job) == " ".join(line.split())


@pytest.mark.parametrize("more", ["b4/1 lean", "b4/2 balanced", "b4 deep lean"])
def test_a_policy_and_a_batch_in_parts_have_their_words(more):
    batch, *words = more.split()
    line = " ".join([f"64x64x64 f8 d3 {batch} c1 k1 float32 itex none sgd", *words])
    assert describe(_job(line, threads=2)) == line
