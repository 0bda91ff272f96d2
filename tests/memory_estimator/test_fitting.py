"""Fitting: costs that times were made with are found again."""

import pytest

from memory_estimator.fitting import fit_costs


def network(rows, ops=10, between_s=1e-4):
    """Rows of (group, features, costs): operations that take exactly what the costs of their features say."""
    found = [
        {"group": group, "features": counted, "seconds": sum(costs[name] * n for name, n in counted.items())}
        for group, counted, costs in rows
    ]
    return {"rows": found, "ops": ops, "step_s": sum(row["seconds"] for row in found) + ops * between_s}


def test_the_costs_that_the_times_were_made_with_are_found_again():
    conv, norm, pool = {"work": 2e-12, "kernel": 3e-10}, {"cached": 1e-11, "traffic": 4e-11}, {"traffic": 5e-11}
    rows = [("conv", {"work": 1e10, "kernel": 1e4}, conv), ("conv", {"work": 1e9, "kernel": 1e7}, conv)]
    rows += [("norm", {"traffic": 1e8}, norm), ("norm", {"cached": 1e7}, norm), ("pool", {"traffic": 1e8}, pool)]
    found = fit_costs([network(rows, between_s=2e-5)])
    assert found["conv"] == pytest.approx(conv)
    assert found["norm"] == pytest.approx(norm)
    assert found["pool"] == pytest.approx({"traffic": 5e-11, "cached": 5e-11})  # small maps cost as much
    assert found["every_op"]["seconds"] == pytest.approx(2e-5)
