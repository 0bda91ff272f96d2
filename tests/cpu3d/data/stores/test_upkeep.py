"""`store info` and `store verify`."""

import json
import re

import pytest

from cpu3d.__main__ import main
from cpu3d.data.store import open_store
from cpu3d.data.stores.prepare import StoreSettings, prepare
from tests.cpu3d.data.made_datasets import decathlon


@pytest.fixture
def store_in(tmp_path):
    """store_in(**settings): a store of three cases, one a split, made with them."""

    def make(**settings):
        store = tmp_path / "store:x:"  # no symbol, wherever it is printed
        how = {"fractions": (1, 1, 1), "settings": StoreSettings(**settings)}
        prepare(decathlon(tmp_path / "data"), store, **how, workers=1)
        return store

    return make


@pytest.fixture
def printed(capsys):
    """printed(action, store, *more, code=0): what `store ...` prints on stdout and stderr when it
    ends with that code."""

    def call(action, store, *more, code=0):
        capsys.readouterr()
        assert main(["store", action, "--store", str(store), *more]) == code
        return capsys.readouterr()

    return call


def test_info_adds_up_what_the_records_say(store_in, printed):
    store = store_in()
    out = printed("info", store).out
    # 6 x 5 x 4 voxels of four int16 channels and a label: 1,080 bytes a case; in files with 128
    # bytes of header each.
    assert "4 KiB on disk" in out
    assert "3 of 3 patients, 0 unlabelled" in out
    assert f"1 train, 1 val, 1 test, seed 0, hash {open_store(store).manifest.split_hash}" in out
    assert re.search(r"label 3 +enhancing tumour: 3 cases, 0.833% of the voxels", out)


def test_info_says_what_was_decided_for_the_data_set_and_why_also_as_json(store_in, printed):
    store = store_in()
    content = json.loads(printed("info", store, "--json").out)
    decided = {row["name"]: row["value"] for row in content["decided"]}
    assert "0 in 80% of the voxels" in content["decided"][0]["why"]
    assert all(row["why"] for row in content["decided"])
    assert (decided["channel FLAIR"], decided["grids"]) == ("zscore-foreground", "4 x 4 x 2")
    assert decided["region TC"] == "2 non-enhancing tumor, 3 enhancing tumour"
    assert re.search(f"levels +{decided['levels']} ", printed("info", store).out)


@pytest.mark.parametrize(("format_", "part"), [("npy", "x"), ("b2nd", "y")])
def test_verify_names_all_damaged_files_and_ends_with_2(store_in, printed, format_, part):
    store = store_in(format=format_)
    assert "is whole: 3 cases" in printed("verify", store, "--workers", "1").out
    files = [store / f"cases/BRATS_00{number}.{part}.{format_}" for number in range(3)]
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-1])
    content = bytearray(files[2].read_bytes())
    content[-1] ^= 1
    files[2].write_bytes(content)
    err = printed("verify", store, "--workers", "1", code=2).err
    problems = re.findall("^error: (.*delete manifest.json.*)", err, re.MULTILINE)
    rules = ("must exist", "bytes long", "got other bytes")
    assert len(problems) == 3
    for path, problem, rule in zip(files, problems, rules):
        assert re.search(f"{path}.* {rule}", problem)
