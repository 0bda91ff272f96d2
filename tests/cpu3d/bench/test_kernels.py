"""`bench kernels`: a row an operation, and the table of a record."""

import pytest

from cpu3d.bench.kernels import kernels_table, timed_operations
from models.native.build import build

HOST = {"cores": 2, "cpu": "some CPU"}


def test_every_operation_is_timed_beside_the_engines():
    try:
        build()
    except OSError as error:
        pytest.skip(str(error))
    import tensorflow as tf

    from models.native.operations import available

    if not available():
        pytest.skip("needs a CPU with AVX2")
    rows = list(timed_operations(tf, "float32", 16, 4, 8, rounds=1))
    assert [row["operation"] for row in rows] == ["forward", "input gradient", "filter gradient"]
    assert all(row["engine_gflops"] > 0 and row["own_gflops"] > 0 for row in rows)


def test_the_table_says_how_much_faster():
    row = {"dtype": "bfloat16", "edge": 64, "inputs": 16, "outputs": 32, "operation": "forward"}
    rows = [{**row, "engine_gflops": 200.0, "own_gflops": 300.0}]
    threads = {"TF_NUM_INTRAOP_THREADS": "2"}
    table = kernels_table({"rows": rows, "host": HOST, "threads": threads, "engine_name": "ITEX"})
    assert table.rows == [("bfloat16", "64x64x64, 16 to 32", "forward", "200", "300", "1.50")]
    assert table.title == "GFLOP/s on 2 cores of some CPU, 2 threads, ITEX"
