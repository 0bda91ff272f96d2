"""The decisions on memory, by tables of samples that are written down by hand."""

import dataclasses

import pytest

from cpu3d.training.guard.free_memory import ADDRESSES, CGROUP, MACHINE, Room
from cpu3d.training.guard.judge import SAMPLE_EVERY_S, SAMPLE_SOONEST_S, Limits, floor_bytes, judge, next_look_s, span_s
from cpu3d.training.guard.samples import Sample, thinned

MIB, GIB = 2**20, 2**30

STEP = Limits(bound_bytes=6 * GIB, save_bytes=100 * MIB, step_s=10.0, save_s=1.0)
"""Reserve: 100 MiB and the floor of 64 MiB. Looks 12 s ahead."""


def course(own_gib, free_gib, every_s=0.5, limit=MACHINE, total_gib=16.0, **more):
    """Samples of two functions of the time, GiB each, from 0 to 40 s."""
    return [
        sample(t * every_s, own_gib(t * every_s), free_gib(t * every_s), limit, total_gib, **more)
        for t in range(int(40 / every_s) + 1)
    ]


def sample(time_s, own_gib, free_gib, limit=MACHINE, total_gib=16.0, file_gib=0.25, swapped_gib=0.0):
    sizes = [int(size * GIB) for size in (own_gib, file_gib, swapped_gib)]
    return Sample(time_s, *sizes, {limit: Room(int(free_gib * GIB), int(total_gib * GIB))})


def saw(period_s, high, low=0.0):
    """Rises from `low` to `high` within every period."""
    return lambda t: low + (high - low) * (t % period_s) / period_s


@pytest.mark.parametrize(
    ("what", "own", "free", "limits", "action"),
    [
        ("nothing happens", lambda t: 5, lambda t: 8, STEP, ""),
        ("little is free, but steadily", lambda t: 5, lambda t: 0.2, STEP, ""),
        ("others leave less than a save needs", lambda t: 5, lambda t: 0.15 + (t < 5), STEP, "stop"),
        ("enough for nothing", lambda t: 5, lambda t: 0.15 + (t < 5), dataclasses.replace(STEP, save_bytes=0), ""),
        ("less than a save needs, as from the beginning", lambda t: 5, lambda t: 0.15, STEP, ""),
        ("the same without a plan", lambda t: 5, lambda t: 0.15, dataclasses.replace(STEP, bound_bytes=None), "stop"),
        ("next to nothing, as from the beginning", lambda t: 5, lambda t: 0.06, STEP, "stop"),
        ("steps go up and down, little is free at their tops", saw(10, 5), lambda t: 5.25 - saw(10, 5)(t), STEP, ""),
        ("slow steps, too", saw(20, 5), lambda t: 5.25 - saw(20, 5)(t), dataclasses.replace(STEP, step_s=20.0), ""),
        # 0.02 GiB a second: 0.45 GiB are left after 40 s, 0.2 GiB after the next 12 s, of which a save needs 0.16.
        ("another program takes memory slowly", lambda t: 5, lambda t: 1.25 - 0.02 * t, STEP, ""),
        ("the same, with less to begin with", lambda t: 5, lambda t: 1.1 - 0.02 * t, STEP, "stop"),
        ("the same before the first step is done", lambda t: 5, lambda t: 1.1 - 0.02 * t, Limits(save_bytes=MIB), ""),
        ("the same within a span", lambda t: 5, lambda t: 1.1 - 0.08 * max(0, t - 30), STEP, ""),
        ("the same, long ago", lambda t: 5, lambda t: max(1.1 - 0.2 * t, 0.3), STEP, ""),
        # Own growth of 0.1 GiB a second: 1.2 GiB more until the end of the step.
        ("growth beyond the plan", lambda t: 5 + 0.1 * t, lambda t: 5.3 - 0.1 * t, STEP, "stop"),
        ("growth beyond the plan with room", lambda t: 5 + 0.1 * t, lambda t: 5.5 - 0.1 * t, STEP, ""),
        ("growth within the plan", lambda t: 1 + 0.1 * t, lambda t: 5.3 - 0.1 * t, STEP, ""),
        ("growth without a plan", lambda t: 1 + 0.1 * t, lambda t: 5.1 - 0.1 * t, Limits(step_s=10.0), "stop"),
        # The process is small between the tops of its steps; what others take is missing at the next top.
        ("others take what a step needs", saw(10, 5), lambda t: 5.4 - saw(10, 5)(t) - 0.7 * (t > 30), STEP, "stop"),
        ("a step takes its known peak at once", lambda t: 4 * (t % 10 < 5), lambda t: 5 - 4 * (t % 10 < 5), STEP, ""),
        ("a step takes what it never took", lambda t: 4 * (t >= 40), lambda t: 5 - 4 * (t >= 40), STEP, "end"),
        ("nothing is as fast as this", lambda t: 1, lambda t: 10 - 9.99 * (t >= 40), STEP, "end"),
        ("the last falls, slowly", lambda t: 5, lambda t: 0.02 - 0.0001 * t, STEP, "end"),
        ("the last is steady", lambda t: 5, lambda t: 0.02, STEP, "stop"),
        # 2 GiB a second with 0.4 GiB left: gone before the next look.
        ("what is left will not last", lambda t: 8, lambda t: 0.4 + 2 * (40 - t), STEP, "end"),
        ("it will, as the plan says", lambda t: 5.3 - 2 * (40 - t), lambda t: 0.5 + 2 * (40 - t), Limits(6 * GIB), ""),
    ],
)  # fmt: skip
def test_the_run_goes_on_stops_or_ends(what, own, free, limits, action):
    samples = course(own, free)
    assert judge(samples, limits).action == action
    assert judge(thinned(samples, span_s(limits)), limits).action == action, "thinned"


@pytest.mark.parametrize("limit", [MACHINE, CGROUP])
def test_the_limit_that_leaves_least_is_named(limit):
    samples = course(lambda t: 5, lambda t: 0.1 + (t < 5), limit=limit)
    roomy = [dataclasses.replace(one, rooms={"roomy": Room(9 * GIB, 16 * GIB), **one.rooms}) for one in samples]
    assert f"must keep 164 MiB free for a save, got 102 MiB free of {limit}" in judge(roomy, STEP).why


@pytest.mark.parametrize(
    ("own", "free", "said"),
    [
        (lambda t: 5, lambda t: 5 - 0.125 * t, "others have taken 5.00 GiB since it began; end them"),
        (lambda t: 7 + t / 80, lambda t: 0.6 - t / 80, "holds 7.50 GiB, 1.75 GiB above the plan; go on with --policy"),
        (lambda t: 5 + t / 80, lambda t: 0.6 - t / 80, "holds 5.50 GiB, 5.00 GiB when it began; go on with --policy"),
    ],
)
def test_the_reason_says_who_took_the_memory(own, free, said):
    assert said in judge(course(own, free), STEP).why


HOST_24 = Limits(bound_bytes=9 * GIB, save_bytes=50 * MIB, step_s=2.0, save_s=10.0)


@pytest.mark.parametrize("over_s", [0.5, 3, 5])
@pytest.mark.parametrize("since_s", [0.5, 2, 4, 6, 9, 12, 20])
@pytest.mark.parametrize("bound", [9 * GIB, None])
def test_what_others_take_once_is_not_counted_again(over_s, since_s, bound):
    """A neighbour's start, another worker's first validation: 3 GiB of 6, and 3 are left."""
    taken = lambda t: 3 * min(1, max(0, t - 40 + since_s) / over_s)
    samples = course(lambda t: 8, lambda t: 6 - taken(t), total_gib=24)
    assert judge(samples, dataclasses.replace(HOST_24, bound_bytes=bound)).action == ""
    samples = course(lambda t: 5.5 + taken(t), lambda t: 6 - taken(t), total_gib=24)
    assert judge(samples, dataclasses.replace(HOST_24, bound_bytes=bound)).action == "", "its own, within the plan"


@pytest.mark.parametrize("spare", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("total", [24.0, 1536.0])
@pytest.mark.parametrize("step_s", [None, 2.0])
@pytest.mark.parametrize("here", [1, 4])
def test_a_run_that_was_let_in_and_is_within_its_plan_goes_on(spare, total, step_s, here):
    """Four workers fill 5 GiB a second each, others than this one somewhat faster; all fits by their plans, barely."""
    own = lambda t: min(5.5, 0.5 + max(0, t - 20) * 5)
    peers = lambda t: (here - 1) * min(5.5, 0.5 + max(0, t - 20) * 6)
    beside = 5.75 * here + spare
    samples = course(own, lambda t: beside - own(t) - peers(t), total_gib=total, every_s=0.05)
    limits = Limits(bound_bytes=6 * GIB, save_bytes=2 * GIB, here=here, step_s=step_s)
    for count in (1, *range(398, 430), 500, len(samples)):
        kept = thinned(samples[:count], span_s(limits))
        assert judge(kept, limits).action == "", (count, judge(kept, limits).why)


def test_workers_that_take_more_than_their_plans_are_ended_before_the_kernel_does_it():
    own = lambda t: min(5.5, 0.5 + max(0, t - 38) * 3)
    samples = course(own, lambda t: max(0.3, 23 - own(t) - 12 * max(0, t - 38)), every_s=0.05)
    verdicts = [judge(samples[:count], Limits(bound_bytes=6 * GIB, here=4)).action for count in range(1, len(samples))]
    ended = verdicts.index("end")
    assert set(verdicts[:ended]) == {""}
    assert samples[ended].own_bytes > 4 * GIB, "they are let go on as long as it is as planned"
    assert samples[ended].rooms[MACHINE].free_bytes > GIB


def test_a_cgroup_that_slows_its_processes_down_is_said():
    slow = dataclasses.replace(sample(0, 5, 8), throttle=Room(0, 6 * GIB))
    assert "memory must stay below 6.00 GiB, the memory.high" in dict(judge([slow], STEP).warnings)["throttled"]
    assert judge([slow], STEP).action == ""
    assert not judge([dataclasses.replace(slow, throttle=Room(GIB, 6 * GIB))], STEP).warnings


def test_a_limit_of_addresses_never_ends_a_process_at_once():
    samples = course(lambda t: 1, lambda t: 10 - 9.99 * (t >= 40), limit=ADDRESSES)
    verdict = judge(samples, STEP)
    assert verdict.action == "stop"
    assert "raise `ulimit -v`" in verdict.why


def test_a_limit_that_appears_later_is_judged_from_then_on():
    before = course(lambda t: 5, lambda t: 8)
    after = [Sample(40.5 + t, 5 * GIB, 0, 0, {**before[0].rooms, CGROUP: Room(GIB, 6 * GIB)}) for t in range(20)]
    assert judge(before + after, STEP).action == ""


def test_no_samples_are_no_verdict():
    assert judge([], STEP).action == ""
    assert judge([sample(0, 5, 8)], STEP).action == ""


@pytest.mark.parametrize(
    ("own", "mapped", "swapped", "told"),
    [
        (5.7, 0.25, 0, {}),
        (6.0, 0.25, 0, {"anonymous": "256 MiB more, of the process's own data"}),
        (5.0, 2.25, 0, {"mapped": "1.25 GiB above the plan's upper bound of 6.00 GiB lie in memory, all of it mapped"}),
        (6.0, 2.25, 0, {"anonymous": "256 MiB more"}),
        (5.0, 0.25, 0.5, {"swapped": "512 MiB of this process are swapped out"}),
        (5.0, 0.25, 0.03, {}),
    ],
)
def test_what_is_beyond_the_plan_is_said_by_its_kind(own, mapped, swapped, told):
    samples = [sample(0, 1, 20), sample(1, own, 20, file_gib=mapped, swapped_gib=swapped)]
    warnings = dict(judge(samples, STEP).warnings)
    assert warnings.keys() == told.keys()
    assert all(words in warnings[kind] for kind, words in told.items())
    assert "mapped" not in dict(judge(samples, Limits()).warnings), "without a plan"


def test_a_limit_of_addresses_below_the_plan_is_said():
    warnings = dict(judge([sample(0, 1, 3, limit=ADDRESSES, total_gib=4)], STEP).warnings)
    assert "`ulimit -v` must leave the plan's 6.00 GiB, got 4.00 GiB" in warnings["addresses"]


def test_larger_hosts_keep_more_free():
    assert [floor_bytes(total) for total in (GIB, 24 * GIB, 250 * GIB, 1536 * GIB)] == [
        64 * MIB,
        64 * MIB,
        GIB // 2,
        GIB,
    ]


def test_samples_come_faster_when_memory_is_about_to_run_out():
    steady, falling = course(lambda t: 5, lambda t: 8), course(lambda t: 5, lambda t: 8.2 - 0.2 * t)
    waits = [next_look_s(falling[:count]) for count in (2, 60, 76, 80, 81)]
    assert next_look_s(steady) == next_look_s([]) == SAMPLE_EVERY_S
    assert waits[0] == SAMPLE_EVERY_S
    assert waits == sorted(waits, reverse=True)
    assert SAMPLE_SOONEST_S <= waits[-1] < 0.25


@pytest.mark.parametrize("own", [saw(600, 5), lambda t: 5 - saw(600, 5)(t)])
def test_thinned_samples_are_few_whatever_the_time_of_a_step(own):
    samples = [sample(t * 0.5, own(t * 0.5), 1 - t % 7 / 10) for t in range(7200)]
    kept = thinned(samples, 600)
    assert len(kept) < 130
    assert kept[0] is samples[0]
    assert kept[-1] is samples[-1]
    within, around = samples[-4800:], samples[-4850:]
    most = lambda some: max(one.own_bytes for one in some)
    least = lambda some: min(one.rooms[MACHINE].free_bytes + one.own_bytes for one in some)
    assert most(within) <= most(kept[1:]) <= most(around)
    assert least(around) <= least(kept[1:]) <= least(within)
