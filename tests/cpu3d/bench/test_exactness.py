"""Errors against float64: `bench kernels --exact`."""

import json

import pytest

from cpu3d.__main__ import main
from cpu3d.bench.exactness import exactness_table
from models.native.library import own_operations


@pytest.mark.skipif(own_operations().kernels is None, reason="own operations are not built")
def test_errors_are_those_of_rounding_for_every_instruction_set_of_the_host(capsys):
    assert main(["bench", "kernels", "--exact", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    for row in record["rows"]:
        is_float32 = row["case"].startswith("float32")
        limit = 2e-6 if is_float32 else 0.005  # 2^-24 and 2^-9 are half a last place
        assert "plain" in row["errors"]
        assert "avx2" in row["errors"]
        assert max(row["errors"].values()) < limit, row["case"]
    errors = {row["case"]: row["errors"] for row in record["rows"]}
    raw = errors["bfloat16, filter gradient, raw maps"]
    assert raw["plain"] == 0  # products and sums are exact
    assert raw["amx_in_c"] < 2e-6


def test_the_table_leaves_out_what_an_instruction_set_has_not():
    rows = [
        {"case": "float32, forward", "errors": {"avx2": 6.51e-7, "plain": 2.7e-7}},
        {"case": "bfloat16, forward", "errors": {"amx": 0.00241, "avx2": 0.0017, "plain": 0.0024}},
    ]
    record = {"grid": (2, 3, 4), "channels": 16, "rows": rows, "host": {"cpu": "some CPU"}}
    table = exactness_table(record)
    assert list(table.columns) == ["", "amx", "avx2", "plain"]
    assert table.rows == [
        ("float32, forward", "", "6.5e-07", "2.7e-07"),
        ("bfloat16, forward", "0.0024", "0.0017", "0.0024"),
    ]
