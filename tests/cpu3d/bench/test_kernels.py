"""`bench kernels`: a row an operation, and the table of a record."""

import pytest

from cpu3d.bench.kernels import draw_roofline, kernels_table, timed_operations
from models.native import operations
from models.native.throughput import products_per_s

HOST = {"cores": 2, "cpu": "some CPU"}


@pytest.mark.skipif(not operations.available(), reason="own operations are not built")
def test_every_operation_is_timed_beside_the_engines():
    import tensorflow as tf

    rows = list(timed_operations(tf, "float32", 16, 4, 8, rounds=1))
    assert [row["operation"] for row in rows] == ["forward", "input gradient", "filter gradient"]
    assert all(row["engine_gflops"] > 0 and row["own_gflops"] > 0 for row in rows)
    assert products_per_s("float32", threads=1) > 1e8


def test_the_table_says_how_much_faster_and_the_roofline_is_drawn_of_it():
    row = {"dtype": "bfloat16", "edge": 64, "inputs": 16, "outputs": 32, "operation": "forward"}
    rows = [{**row, "engine_gflops": 200.0, "own_gflops": 288.0}]
    limits = {"products_gflops": {"bfloat16": 470.2}, "copy_gbytes": 31.4}
    record = {
        "rows": rows,
        "limits": limits,
        "host": HOST,
        "threads": {"TF_NUM_INTRAOP_THREADS": "2"},
    }
    table = kernels_table({**record, "engine_name": "ITEX"})
    # 2 * 27 * 16 * 32 FLOPs for 16 + 32 values of 2 bytes: 288 a byte.
    assert table.rows == [
        ("bfloat16", "64x64x64, 16 to 32", "forward", "200", "288", "1.44", "1.0")
    ]
    for words in (
        "2 cores of some CPU, 2 threads, ITEX",
        "bfloat16 470 GFLOP/s",
        "a copy: 31.4 GB/s",
    ):
        assert words in table.title
    assert draw_roofline(record).startswith(b"\x89PNG")
