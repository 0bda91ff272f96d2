"""Choices over made-up prices whose answers are known, and the same choices made by trying everything."""

import dataclasses
import math
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memory_estimator.job import Job
from memory_estimator.planner import (
    advice,
    batches,
    extents,
    fastest_that_fits,
    largest,
    largest_number,
    nearest,
    plan,
    savings,
    widths,
    with_policy,
)
from models.config import POLICIES, UNetConfig

JOB = Job(UNetConfig(dtype="float32", policy="speed"), (240, 240, 160), batch=16, micro_batch=16)

KEPT = {"speed": 4, "balanced": 3, "lean": 2}
"""Policy -> quarters of the memory."""

SECONDS = {"speed": 1.0, "balanced": 1.1, "lean": 1.3}
"""Policy -> of a volume."""


@dataclass(frozen=True)
class Priced:
    """Stands in for an Estimate: under policy speed a byte a voxel, filter, volume at a time and byte of dtype, and a
    second a volume."""

    job: Job
    sums: int = 0

    @property
    def process_peak_bytes(self):
        job = self.job
        maps = job.voxels * job.unet.filters * (4 if job.unet.dtype == "float32" else 2)
        return self.sums + maps * KEPT[job.policy] // 4

    @property
    def upper_bound_bytes(self):
        return self.process_peak_bytes + 1000

    @property
    def volume_s(self):
        return SECONDS[self.job.policy]

    @property
    def step_s(self):
        return self.volume_s * self.job.batch


def cost(job):
    return Priced(job).upper_bound_bytes


@given(st.integers(0, 5000), st.integers(0, 10**9), st.floats(0.3, 4))
@example(522, 541313121, 0.5)  # a constant far above what grows: the power law through both ends points wrong
def test_the_largest_number_is_found_in_a_few_guesses_however_costs_grow(limit, fixed, power):
    cost = lambda number: int(fixed + 10**6 * number**power)
    tried = []
    assert largest_number(lambda n: tried.append(n) or cost(n), cost(limit) if limit else cost(1) - 1) == limit
    assert len(tried) <= 3 * math.log2(limit + 2) + 8


def test_steps_in_the_cost_do_not_mislead_the_search():
    for limit in range(1, 200):
        assert largest_number(lambda n, limit=limit: 10**12 if n > limit else 5 + n // 7, 1000) == limit


def test_a_search_ends_at_the_last_number():
    assert largest_number(lambda n: 1, 10, last=37) == 37
    assert largest_number(lambda n: n, 10, last=1) == 1


@given(st.integers(1, 10**12))
def test_what_a_plan_finds_fits_and_the_next_does_not(budget):
    found = plan(JOB, Priced, budget)
    for one, chain, number in (
        (found.batch, batches(JOB), lambda job: job.batch),
        (found.filters, widths(JOB), lambda job: job.unet.filters // 8),
    ):
        if one is None:
            assert cost(chain(1)) > budget
        else:
            assert cost(one.job) <= budget < cost(chain(number(one.job) + 1))


def test_the_plan_of_a_known_memory_is_the_one_by_hand():
    one_volume = 240 * 240 * 160 * 16 * 4
    found = plan(JOB, Priced, 5 * one_volume + 1000)
    assert found.policy == "speed"
    assert (found.batch.job.batch, found.batch.job.parts) == (5, 1)
    assert found.filters is None  # 8 filters at batch 16 are eight volumes
    # 5 / 16 of the voxels: 160 x 160 x 112 would be 0.311 of them, 176 x 176 x 112 are more than 0.3125.
    assert found.extent.job.shape == (160, 160, 112)
    lean = plan(with_policy(JOB, "lean"), Priced, 5 * one_volume + 1000)
    assert (lean.policy, lean.batch.job.batch, lean.filters.job.unet.filters) == ("lean", 10, 8)
    # One volume at a time of any batch is a job of one volume, but for the batch at once, which stays the same.
    singly = plan(dataclasses.replace(JOB, micro_batch=1), Priced, 5 * one_volume + 1000)
    assert (singly.batch, singly.filters.job.unet.filters) == (found.batch, 80)
    assert singly.filters.job.parts == 16


def test_no_batch_is_larger_than_the_cases():
    job = dataclasses.replace(JOB, batch=2, micro_batch=0)
    assert plan(dataclasses.replace(job, cases=8), Priced, 10**15).batch.job.batch == 8
    assert plan(job, Priced, 10**15).batch.job.batch > 8


def test_nothing_that_fits_is_said_as_nothing():
    assert largest(batches(JOB), Priced, 1000) is None
    found = plan(JOB, Priced, 1000)
    assert (found.batch, found.filters, found.extent) == (None, None, None)


@pytest.mark.parametrize("depth", [2, 5])
def test_extents_divide_and_grow(depth):
    job = dataclasses.replace(JOB, unet=dataclasses.replace(JOB.unet, depth=depth))
    shapes = [extents(job)(number).shape for number in range(1, 40)]
    assert all(side % job.unet.divisor == 0 for shape in shapes for side in shape)
    assert all(b >= a for one, two in zip(shapes, shapes[1:]) for a, b in zip(one, two))
    assert max(shapes[0]) == job.unet.divisor


def test_extents_reach_the_job_s_own_grid_and_keep_its_proportions():
    assert extents(JOB)(15).shape == (240, 240, 160)
    assert extents(JOB)(30).shape == (480, 480, 320)


def test_savings_are_the_single_changes_that_save_the_largest_first():
    found = savings(JOB, Priced)
    assert [option.change for option in found[:3]] == ["--micro-batch 1", "--shape 144 192 144", "--policy lean"]
    peaks = [option.estimate.process_peak_bytes for option in found]
    assert peaks == sorted(peaks)
    assert all(peak < Priced(JOB).process_peak_bytes for peak in peaks)
    changes = {option.change for option in found}
    assert {"--policy balanced", "--micro-batch 8", "--dtype bfloat16", "--filters 8"} < changes
    assert not {"--optimizer sgd", "--policy speed", "--batch 16"} & changes  # cost the same here


def test_a_smaller_batch_saves_the_sums_of_gradients_alone():
    summed = lambda job: dataclasses.replace(Priced(job), sums=1000 if job.parts > 1 else 0)
    found = savings(dataclasses.replace(JOB, micro_batch=4), summed)
    (batch,) = [option for option in found if option.change.startswith("--batch")]
    assert (batch.change, batch.estimate.job.parts) == ("--batch 4", 1)
    assert not [option for option in savings(JOB, summed) if option.change.startswith("--batch")]


def test_another_engine_is_a_saving_only_where_it_can_be_had():
    one = {"batch": 1, "micro_batch": 1}
    cheaper = lambda job: Priced(dataclasses.replace(job, **one) if job.engine == "stock" else job)
    assert "--engine stock" in [option.change for option in savings(JOB, cheaper)]
    assert "--engine stock" not in [option.change for option in savings(JOB, cheaper, ("itex",))]


def test_the_nearest_settings_are_each_enough_alone():
    half = Priced(JOB).process_peak_bytes // 2 + 1000
    found = nearest(JOB, Priced, half)
    assert [option.change for option in found] == [
        "--policy lean", "--micro-batch 8", "--dtype bfloat16", "--shape 176 176 112", "--filters 8",
    ]  # fmt: skip
    assert all(option.estimate.upper_bound_bytes <= half for option in found)


def test_the_mildest_policy_that_is_enough_is_proposed_and_none_that_takes_no_less():
    budget = Priced(JOB).process_peak_bytes * 4 // 5
    assert nearest(JOB, Priced, budget)[0].change == "--policy balanced"
    lean = with_policy(JOB, "lean")
    assert not [option for option in nearest(lean, Priced, cost(lean) - 1) if "--policy" in option.change]


def test_a_run_that_has_begun_is_proposed_only_what_it_may_change():
    whole = Priced(JOB).process_peak_bytes
    changes = lambda budget: [option.change for option in nearest(JOB, Priced, budget, same_training=True)]
    assert changes(whole // 2 + 1000) == ["--policy lean", "--micro-batch 8"]
    assert changes(whole // 16 + 1000) == ["--micro-batch 1"]
    assert changes(whole // 32 + 1000) == ["--policy lean --micro-batch 1"]
    assert changes(whole // 64) == []


def test_a_run_with_batch_norm_that_has_begun_is_proposed_the_policy_alone():
    job = dataclasses.replace(JOB, unet=dataclasses.replace(JOB.unet, norm="batch"))
    whole = Priced(job).process_peak_bytes
    changes = lambda budget: [option.change for option in nearest(job, Priced, budget, same_training=True)]
    assert changes(whole // 2 + 1000) == ["--policy lean"]
    assert changes(whole // 16 + 1000) == []
    assert "--micro-batch 1" in [option.change for option in nearest(job, Priced, whole // 16 + 1000)]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=3, max_size=3), st.integers(0, 10))
def test_the_policy_picked_is_the_fastest_that_fits_or_else_takes_least(figures, budget):
    prices = {policy: Made(with_policy(JOB, policy), *both) for policy, both in zip(POLICIES, figures)}
    choice = fastest_that_fits(with_policy(JOB, "lean"), lambda job: prices[job.policy], budget)
    fitting = [one for one in prices.values() if one.upper_bound_bytes <= budget]
    assert choice.fits == bool(fitting)
    assert choice.estimate in (fitting or prices.values())
    if fitting:
        assert choice.estimate.step_s == min(one.step_s for one in fitting)
    else:
        assert choice.estimate.upper_bound_bytes == min(one.upper_bound_bytes for one in prices.values())
    assert all(one.upper_bound_bytes > budget for one in choice.passed_over)


@dataclass(frozen=True)
class Made:
    job: Job
    upper_bound_bytes: int
    step_s: float


def test_among_equals_the_first_policy_is_picked():
    for budget in (1, 3):
        assert fastest_that_fits(JOB, lambda job: Made(job, 2, 2.0), budget).policy == "speed"


def test_a_choice_says_why():
    whole = Priced(JOB).process_peak_bytes
    reason = lambda budget: fastest_that_fits(JOB, Priced, budget).reason("SO MUCH free")
    assert reason(whole + 1000) == "the fastest, and fits SO MUCH free"
    assert reason(whole) == "speed would take up to 8.79 GiB of SO MUCH free"
    assert reason(whole // 2 + 1000) == (
        "speed would take up to 8.79 GiB and balanced would take up to 6.59 GiB of SO MUCH free"
    )
    assert reason(1) == "none fits SO MUCH free, and this one takes least"


def test_changes_are_put_together_where_none_is_enough_alone():
    small = dataclasses.replace(JOB, batch=2, micro_batch=2, unet=dataclasses.replace(JOB.unet, filters=2))
    budget = Priced(small).process_peak_bytes // 3 + 1000
    grids = [("--extent brain", (144, 192, 144))]
    (only,) = nearest(small, Priced, budget, grids=grids)
    assert only.change == "--policy lean --micro-batch 1"
    assert cost(only.estimate.job) <= budget


def test_only_the_grids_that_there_are_are_proposed():
    budget = Priced(JOB).process_peak_bytes // 2 + 1000
    found = nearest(JOB, Priced, budget, grids=[("--extent brain", (144, 192, 144))])
    assert "--extent brain" in [option.change for option in found]
    assert not [option for option in found if "--shape" in option.change]
    assert nearest(dataclasses.replace(JOB, micro_batch=1), Priced, 999, grids=[("--extent full", JOB.shape)]) == []


def test_advice_is_what_would_fit_or_that_nothing_does_and_none_for_what_fits():
    one_volume = 240 * 240 * 160 * 16 * 4
    assert advice(Priced(JOB), Priced, 20 * one_volume) == []
    found = advice(Priced(JOB), Priced, one_volume * 8 + 1000)
    assert found[0] == "fits with --policy lean: up to 4.39 GiB, 1.3 s a volume"
    assert advice(Priced(JOB), Priced, 5) == ["nothing smaller fits either; use another host"]
