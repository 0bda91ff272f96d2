"""The digest of the validation record: read whole or refused, and the bound that is made of it."""

import dataclasses
import json

import pytest

from memory_estimator.accuracy import SHIPPED, Accuracy, Bound, load_accuracy

KNOWN = Accuracy("r.jsonl", 70, Bound(0.004, 0.021), Bound(0.012, 0.04), Bound(0.05, 0.15), 0.03, 50_000_000)


def test_the_upper_bound_is_the_margin_above_the_peak_in_whole_bytes():
    assert KNOWN.upper_bound(1_000_000_000) == 1_080_000_000
    assert KNOWN.upper_bound(0) == 50_000_000
    assert isinstance(KNOWN.upper_bound(10**17), int)


def test_an_error_reads_as_median_and_worst():
    assert str(KNOWN.allocator_peak) == "± 0.4%, worst 2.1%"


def test_the_margin_says_how_it_has_held_as_far_as_anybody_looked():
    rule = "3.0% and 48 MiB above the process peak"
    assert KNOWN.margin == rule
    assert dataclasses.replace(KNOWN, exceeded=0).margin == f"{rule}; exceeded by none of 70"
    assert dataclasses.replace(KNOWN, exceeded=2).margin == f"{rule}; exceeded by 2 of 70"


def test_without_measurements_no_error_is_claimed():
    nobody = dataclasses.replace(KNOWN, configurations=0)
    assert nobody.error("step_s") == "error not measured"
    assert nobody.basis == "not measured"
    assert nobody.margin.endswith("; chosen, not measured")
    assert KNOWN.error("step_s") == "± 5.0%, worst 15.0%"
    assert KNOWN.basis.startswith("r.jsonl, 70 configurations")


def test_the_shipped_digest_is_whole():
    shipped = load_accuracy()
    for bound in (shipped.allocator_peak, shipped.process_peak, shipped.step_s):
        assert 0 <= bound.median <= bound.worst < 1
    assert 0 < shipped.margin_share < 0.06


def changed(**changes):
    return lambda content: json.dumps({**content, **changes})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: json.dumps(content)[:-20], "must be JSON with a schema"),
        (lambda content: "[]", "must be JSON with a schema"),
        (lambda content: "{}", "must be JSON with a schema, got KeyError"),
        (changed(schema=7), "must have schema 1, got 7"),
        (changed(step_s={"median": 0.1}), "must be complete"),
        (changed(margin={}), "must be complete"),
    ],
)
def test_a_damaged_digest_is_refused_by_its_file(damage, message, tmp_path):
    path = tmp_path / "accuracy.json"
    path.write_text(damage(json.loads(SHIPPED.read_text())))
    with pytest.raises(ValueError, match=rf"accuracy .*accuracy\.json {message}"):
        load_accuracy(path)
