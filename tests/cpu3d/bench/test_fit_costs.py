"""Costs from timed operations: exact ones are found again, and nothing comes out negative."""

import pytest

from cpu3d.bench.fit_costs import fit_costs, straight_line


def rows(group, costs, *counted):
    """Operations that take exactly what `costs` say."""
    return [
        {"group": group, "features": one, "seconds": sum(costs[name] * amount for name, amount in one.items())}
        for one in counted
    ]


def network(found, ops=100, between_s=0.0):
    return {"rows": found, "ops": ops, "step_s": sum(row["seconds"] for row in found) + ops * between_s}


def test_the_costs_that_the_times_were_made_with_are_found_again():
    conv = {"work": 2e-12, "kernel": 3e-10}
    norm = {"cached": 1e-11, "traffic": 4e-11}
    found = fit_costs(
        [
            network(
                rows("conv", conv, {"work": 1e10, "kernel": 1e4}, {"work": 1e9, "kernel": 1e7})
                + rows("norm", norm, {"traffic": 1e8}, {"cached": 1e7}),
                between_s=2e-5,
            )
        ]
    )
    assert found["conv"] == pytest.approx(conv)
    assert found["norm"] == pytest.approx(norm)
    assert found["every_op"]["seconds"] == pytest.approx(2e-5)


def test_no_cost_is_below_zero_and_the_cache_is_never_slower():
    slow_cache = rows("norm", {"cached": 4e-11, "traffic": 1e-11}, {"traffic": 1e8}, {"cached": 1e7})
    found = fit_costs([network(slow_cache)])["norm"]
    assert 0 < found["cached"] <= found["traffic"]


def test_where_only_large_maps_were_timed_small_ones_cost_as_much():
    found = fit_costs([network(rows("pool", {"traffic": 5e-11}, {"traffic": 1e8}))])
    assert found["pool"] == pytest.approx({"traffic": 5e-11, "cached": 5e-11})


def test_long_operations_weigh_more_than_short_ones():
    found = fit_costs(
        [network(rows("conv", {"work": 1e-12}, {"work": 1e11}) + rows("conv", {"work": 9e-12}, {"work": 1e8}))]
    )
    assert found["conv"]["work"] == pytest.approx(1e-12, rel=0.05)


def test_operations_that_together_take_longer_than_the_step_leave_nothing_between():
    overlapped = {**network(rows("conv", {"work": 1e-12}, {"work": 1e11})), "step_s": 0.05}
    assert fit_costs([overlapped])["every_op"] == {"seconds": 0.0}


def test_networks_that_were_not_timed_are_left_out_and_none_at_all_is_an_error():
    timed = network(rows("conv", {"work": 1e-12}, {"work": 1e11}))
    assert fit_costs([{"rows": [], "ops": 3, "step_s": None}, timed]) == fit_costs([timed])
    with pytest.raises(ValueError, match="must hold timed steps, got none"):
        fit_costs([{"rows": [], "ops": 3, "step_s": None}])


def test_the_runtimes_memory_is_a_line_over_operations():
    points = [{"bytes": 600, "ops": 50}, {"bytes": 700, "ops": 100}]
    assert straight_line(points) == {"bytes": 500, "op_bytes": 2}


def test_one_point_is_a_level_line_and_so_is_a_falling_one():
    assert straight_line([{"bytes": 600, "ops": 50}]) == {"bytes": 600, "op_bytes": 0}
    assert straight_line([{"bytes": 600, "ops": 50}, {"bytes": 500, "ops": 100}]) == {"bytes": 550, "op_bytes": 0}
