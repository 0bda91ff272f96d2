"""Efficiency on paper: `bench kernels` for more threads than there are cores."""

import json

import pytest

from cpu3d.__main__ import main
from cpu3d.bench.cores import efficiency, efficiency_tables
from models.native.library import own_operations
from tests.models.native.reference import KINDS

PLAIN = {"convolve", "input_gradient", "filter_gradient", "max_pool", "max_pool_gradient"}
PLAIN |= {"project", "project_sums", "project_to_raw", "loss_sums", "loss_slope"}
PLAIN |= {"up_convolve", "up_input_gradient", "up_filter_gradient", "orthogonal"}


@pytest.mark.skipif(own_operations().kernels is None, reason="own operations are not built")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_own_operation_of_a_step_is_measured_for_each_number_of_threads(dtype, capsys):
    measured = "--threads 5 2 --shape 32 48 32 --filters 4 --rounds 1"
    assert main(f"bench kernels {measured} --dtype {dtype} --json".split()) == 0
    record = json.loads(capsys.readouterr().out)
    assert {row["kind"] for row in record["rows"]} == PLAIN
    assert {row["kind"] for row in record["rows"]} <= set(KINDS)
    for row in record["rows"]:
        assert set(row["seconds"]) == {"1", "2", "5"}
        assert min(row["seconds"].values()) > 0
    assert efficiency(record["rows"], 2) > 0
    assert record["scratch_bytes"]["5"] > record["scratch_bytes"]["1"] > 0
    table, memory = efficiency_tables(record)
    assert list(table.columns)[-2:] == ["T = 2", "T = 5"]
    assert [row[0] for row in memory.rows] == ["1", "2", "5"]


def test_efficiency_is_weighted_by_the_time_and_the_calls_of_each_operation():
    often = {"calls": 3, "seconds": {"1": 2.0, "4": 0.5}}
    once = {"calls": 1, "seconds": {"1": 2.0, "4": 2.5}}
    assert efficiency([often], 4) == pytest.approx(1)
    assert efficiency([once], 4) == pytest.approx(0.2)
    assert efficiency([often, once], 4) == pytest.approx(8 / 4 / 4)
