"""The published validation is what the record and the code as it stands give, and what is demanded of it is met."""

from pathlib import Path

import pytest

from cpu3d.bench.validate import VALIDATION, digest, targets, validation
from memory_estimator.estimate import load_accuracy

ROOT = Path(__file__).resolve().parents[1]
RECORD = f"records/{VALIDATION}"
REMAKE_ACCURACY = "run ./run.sh bench tables --records records --accuracy memory_estimator/accuracy.json"

EPYC, XEON = "avx512_core_bf16", "avx512_core_vnni"
NOT_MET = {
    (EPYC, "allocator peak, worst error"): 0.09,
    (EPYC, "process peak, worst error"): 0.11,
    (EPYC, "seconds a step, median error"): 0.06,
    (EPYC, "seconds a step, worst error"): 0.29,
    (EPYC, "upper bound above the peak, mean"): 0.09,
    (XEON, "allocator peak, worst error"): 0.06,
    (XEON, "process peak, worst error"): 0.14,
    (XEON, "seconds a step, median error"): 0.06,
    (XEON, "upper bound above the peak, mean"): 0.10,
}
"""Kernels of a host and name of each target that its records miss, and the most that it was found to be: rounded up to
a full per cent, so that a change for the worse fails. EPYC's records are of steps before: their loss put its maps
elsewhere in memory, and their bias gradients were slower, so that without a norm they took up to a quarter longer than
is predicted now. XEON's worst peaks are of "lean", most of them measured when its order differed between processes."""


@pytest.fixture(scope="module")
def validated():
    if not (ROOT / "records" / VALIDATION).is_dir():
        pytest.skip(f"needs records/{VALIDATION}, files that `./run.sh bench validate` makes in an hour each")
    return validation(ROOT / "records")


@pytest.fixture(scope="module")
def found(validated):
    """(oneDNN's kernels, which tell the hosts apart, name) -> target."""
    return {
        (isa, one.name): one
        for isa in {row.isa for row in validated[1]}
        for one in targets([row for row in validated[1] if row.isa == isa])
    }


def test_what_the_estimator_says_of_its_errors_is_what_was_measured(validated):
    assert load_accuracy() == digest(validated[1]), REMAKE_ACCURACY


def test_what_is_demanded_is_met_but_for_what_is_listed_here(found):
    assert {name for name, one in found.items() if not one.met} == set(NOT_MET)


def test_what_is_not_met_is_no_further_off_than_listed(found):
    for name, most in NOT_MET.items():
        assert found[name].found <= most, name


def test_no_peak_lies_above_its_bound(validated):
    assert all(row.slack >= 0 for row in validated[1])


def test_enough_was_measured_and_is_held_out(validated):
    assert sum(row.measured.held_out for row in validated[1]) >= 60
    assert sum(not row.measured.held_out for row in validated[1]) >= 10
