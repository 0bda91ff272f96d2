import gc
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu3d.data.files.page_plan import PagePlan, PagePlans, Use
from cpu3d.data.sampling import sample_at


def plan_of(order, sizes=None, **settings):
    """A plan for a run that is over when `order`, a string of file names, is; every file is 1 byte unless told."""
    return PagePlan(
        lambda position: Use(order[position], (sizes or {}).get(order[position], 1)),
        **{"horizon": len(order), "stop": len(order), "ahead": 0, **settings},
    )


def follow(plan, positions, use_at):
    """Do what the plan says; returns, for each position, the files in memory and those that were read."""
    memory, seen = set(), []
    for position in positions:
        step = plan.at(position)
        assert set(step.give_back) <= memory | {use_at(place).file for place in step.ahead}
        read = [use_at(place).file for place in step.ahead]
        missed = set(read) - memory
        memory = (memory | set(read)) - set(step.give_back)
        seen.append((set(memory), missed))
    return seen


@pytest.mark.parametrize(
    ("order", "budget", "given"),
    [
        # Belady's own rule, by hand: what is needed furthest from now goes.
        ("abcab", 2, ["", "", "b", "", "a"]),
        ("abcabc", 2, ["", "", "b", "", "a", ""]),
        ("abab", 2, ["", "", "", ""]),
        ("aab", 1, ["", "", "a"]),
        ("abc", 3, ["", "", ""]),
    ],
)
def test_what_is_needed_furthest_from_now_is_given_back(order, budget, given):
    plan = plan_of(order, budget_bytes=budget)
    assert ["".join(plan.at(position).give_back) for position in range(len(order))] == given


def test_files_come_ahead_of_their_use_and_once_a_use():
    plan = plan_of("abcde", budget_bytes=9, ahead=2)
    assert [plan.at(position).ahead for position in range(5)] == [(0, 1, 2), (3,), (4,), (), ()]
    assert plan.at(5).ahead == ()


def test_a_plan_tells_what_is_needed_before_a_position():
    plan = plan_of("abcab", budget_bytes=9)
    plan.at(1)
    assert [plan.needs("a", before) for before in (1, 3, 4)] == [False, False, True]
    assert plan.needs("b", 2)
    plan.at(4)
    assert not plan.needs("a", 100)


def test_nothing_is_brought_in_that_would_push_out_what_is_needed_before_it():
    plan = plan_of("abcd", budget_bytes=2, ahead=3)
    assert [plan.at(position).ahead for position in range(4)] == [(0, 1), (2,), (3,), ()]


def test_a_file_larger_than_the_budget_is_brought_in_when_it_is_used_and_not_before():
    plan = plan_of("aBa", {"B": 9}, budget_bytes=3, ahead=1)
    assert [(step.ahead, step.give_back) for step in map(plan.at, range(3))] == [
        ((0,), ()),
        ((1,), ("a",)),
        ((2,), ("B",)),
    ]


def test_a_new_pass_remembers_what_is_in_memory():
    plan = plan_of("abcd", budget_bytes=2)
    for position in range(4):
        plan.at(position)
    assert plan.kept_bytes == 2
    assert plan.at(0).ahead == (0,)
    assert plan.kept_bytes == 2


def test_entries_that_share_a_file_share_its_place():
    plan = plan_of("aaaabbbb", budget_bytes=1, ahead=1)
    assert [step.give_back for step in map(plan.at, range(8))] == [()] * 4 + [("a",)] + [()] * 3
    assert plan.keeps("b")
    assert not plan.keeps("a")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.integers(1, 60),
    st.integers(0, 4),
    st.integers(1, 30),
    st.integers(0, 99),
)
def test_the_budget_holds_for_any_order_but_for_the_file_in_use(sizes, budget, ahead, horizon, seed):
    pick = random.Random(seed)
    order = [pick.randrange(len(sizes)) for _ in range(80)]
    use_at = lambda position: Use(order[position], sizes[order[position]])
    plan = PagePlan(use_at, budget_bytes=budget, horizon=horizon, ahead=ahead, stop=len(order))
    start = pick.randrange(40)
    for position, (memory, _) in enumerate(follow(plan, range(start, 80), use_at), start):
        held = sum(sizes[file] for file in memory)
        assert order[position] in memory
        assert held <= budget or memory == {order[position]}
    assert held == plan.kept_bytes


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 40), st.integers(1, 40), st.integers(0, 3), st.booleans(), st.integers(0, 9))
def test_an_epoch_finds_the_share_of_the_budget_in_memory(cases, budget, ahead, shuffle, seed):
    use_at = lambda position: Use(sample_at(position, cases=cases, seed=seed, shuffle=shuffle).index, 1)
    plan = PagePlan(use_at, budget_bytes=budget, horizon=2 * cases, ahead=ahead)
    steps = follow(plan, range(4 * cases), use_at)
    reads = sum(len(missed) for _, missed in steps[cases:])
    # The file in use and those ahead of it take their room from those that stay.
    share = min(1, max(0, budget - 1 - ahead) / cases)
    assert 3 * cases - reads >= 3 * cases * share - 3 * (1 + ahead)
    if budget >= cases:
        assert reads == 0


def test_without_a_horizon_over_an_epoch_most_of_the_budget_still_serves():
    cases, budget = 100, 50
    use_at = lambda position: Use(sample_at(position, cases=cases, seed=1).index, 1)
    for horizon, least in ((200, 0.5), (10, 0.4)):
        plan = PagePlan(use_at, budget_bytes=budget, horizon=horizon, ahead=2)
        reads = sum(len(missed) for _, missed in follow(plan, range(1000), use_at)[cases:])
        assert 1 - reads / 900 >= least


def test_memory_does_not_grow_with_the_run():
    plan = PagePlan(lambda position: Use(position, 1), budget_bytes=10, horizon=20, ahead=2)
    for position in range(1000):
        plan.at(position)
    assert len(plan._kept) <= 10
    assert len(plan._coming) + len(plan._uses) + len(plan._last_use) <= 60


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_step_costs_the_same_however_many_files_are_kept(monkeypatch, shuffle):
    looked, next_use = [], PagePlan._next_use
    monkeypatch.setattr(PagePlan, "_next_use", lambda *of: looked.append(1) or next_use(*of))
    for cases in (100, 3000):
        plan = PagePlan(
            lambda position, cases=cases: Use(sample_at(position, cases=cases, seed=2, shuffle=shuffle).index, 1),
            budget_bytes=cases // 2,
            horizon=200,
        )
        looked.clear()
        for position in range(3 * cases):
            plan.at(position)
        assert len(looked) < 15 * 3 * cases
        assert len(plan._needed) <= 2 * (cases // 2) + 64
        assert plan.kept_bytes == cases // 2


def test_a_file_is_kept_as_long_as_one_of_the_plans_keeps_it():
    plans, first, second = PagePlans(), plan_of("ab", budget_bytes=1), plan_of("a", budget_bytes=1)
    plans.add(first)
    plans.add(second)
    assert not plans.keep("a")
    first.at(0)
    second.at(0)
    assert first.at(1).give_back == ("a",)
    assert plans.keep("a")
    del second
    gc.collect()
    assert not plans.keep("a")
    assert plans.keep("b")
