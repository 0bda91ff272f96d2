"""Products of tiles and the vectors beside them: `bench kernels --overlap`."""

import json

import pytest

from cpu3d.__main__ import main
from cpu3d.bench.overlap import beside, overlap_table
from models.native.instruction_sets import DIRECT_PRODUCTS
from models.native.library import own_operations

SMALL = "bench kernels --overlap --shape 32 32 32 --filters 16 --rounds 1"


@pytest.mark.parametrize(
    ("whole", "products", "vectors", "share"),
    [(5.0, 3.0, 2.0, 0), (3.0, 3.0, 2.0, 1), (4.0, 2.0, 3.0, 0.5)],
)
def test_what_goes_on_beside_is_a_share_of_the_shorter_part(whole, products, vectors, share):
    seconds = {"whole": whole, "products": products, "vectors": vectors}
    assert beside(seconds) == pytest.approx(share)


def test_the_table_has_every_operation_and_all_of_a_step():
    seconds = {"whole": 0.004, "products": 0.003, "vectors": 0.002}
    row = {"kind": "convolve", "grid": (2, 3, 4), "channels": 16, "outputs": 32}
    row.update(in_place=False, calls=3, seconds=seconds)
    record = {"rows": [row], "instructions": "amx", "threads": 2, "host": {"cpu": "some CPU"}}
    operation, every = overlap_table(record).rows
    figures = ["4.00", "3.00", "2.00", "5.00", "0.50"]
    assert operation == ["2x3x4", "convolve", "16, 32", "3", *figures]
    assert [str(cell) for cell in every][4:] == ["12.00", "9.00", "6.00", "15.00", "0.50"]


@pytest.mark.parametrize("more", ["--threads 2 8", "--dtype float32", "--exact"])
def test_options_that_it_has_no_use_for_are_refused(more, capsys):
    assert main(f"bench kernels --overlap {more}".split()) == 2
    assert more.split()[0] in capsys.readouterr().err


@pytest.mark.skipif(
    own_operations().bfloat16 in ("", *DIRECT_PRODUCTS), reason="needs a CPU without AMX"
)
def test_a_host_without_amx_is_told_what_it_lacks(capfd):
    assert main(SMALL.split()) != 0
    assert "amx" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(own_operations().kernels is None, reason="own operations are not built")
def test_every_operation_in_tiles_is_timed_whole_and_in_parts(monkeypatch, capsys):
    monkeypatch.setenv("CPU3D_INSTRUCTION_SET", "amx_in_c")
    assert main([*SMALL.split(), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    kinds = {"convolve", "input_gradient", "filter_gradient", "project"}
    kinds |= {"up_convolve", "up_input_gradient", "up_filter_gradient"}
    assert {row["kind"] for row in record["rows"]} == kinds
    for row in record["rows"]:
        assert min(row["seconds"].values()) > 0
