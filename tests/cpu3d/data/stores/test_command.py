import re

import pytest

from cpu3d.__main__ import main
from cpu3d.data.store import open_store
from cpu3d.data.stores.prepare import prepare


@pytest.fixture
def store(tmp_path, decathlon):
    prepare(decathlon(tmp_path / "data"), tmp_path / "store", fractions=(1, 1, 1), workers=1)
    return tmp_path / "store"


@pytest.fixture
def printed(capsys):
    """printed(*arguments, code=0): what `store ...` prints on stdout and stderr when it ends with that code."""

    def call(*arguments, code=0):
        capsys.readouterr()
        assert main(["store", *map(str, arguments)]) == code
        return capsys.readouterr()

    return call


def test_info_adds_up_what_the_records_say(store, printed):
    out = printed("info", store).out
    # 6 x 5 x 4 voxels of four int16 channels and a label: 1,080 bytes a case; in files with 128 bytes of header each.
    assert f"{3 * (1080 + 2 * 128) / 1e6:,.1f} MB on disk" in out
    assert "3 of 3 patients, 0 unlabelled" in out
    assert "3 int16 .npy; exact" in out
    assert f"1 train, 1 val, 1 test, seed 0, hash {open_store(store).manifest.split_hash}" in out
    assert re.search(r"label 3 +enhancing tumour -> WT, TC, ET: 3 cases, 0.833% of the voxels", out)


def test_verify_ends_with_0_for_a_good_store_and_2_for_a_damaged_one(store, printed):
    assert "is whole: 3 cases" in printed("verify", store, "--workers", 1).out
    (store / "cases/BRATS_000.x.npy").unlink()
    (store / "cases/BRATS_001.x.npy").write_bytes(b"")
    err = printed("verify", store, "--workers", 1, code=2).err
    assert len(re.findall("^error: ", err, re.MULTILINE)) == 2
