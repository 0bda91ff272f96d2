"""`store info` and `store verify`."""

import json
import re

import pytest

from cpu3d.__main__ import main
from cpu3d.data.store import open_store
from cpu3d.data.stores.prepare import StoreSettings, prepare
from tests.cpu3d.data.made_datasets import decathlon, tiny_label, write_nifti


@pytest.fixture
def store_in(tmp_path):
    """store_in(**settings): a store of three cases, one a split, made with them."""

    def make(**settings):
        store = tmp_path / "store:x:"  # no symbol, wherever it is printed
        how = {"fractions": (1, 1, 1), "settings": StoreSettings(**settings)}
        data = decathlon(tmp_path / "data")
        write_nifti(data / "labelsTr/BRATS_000.nii.gz", tiny_label(1, 2))
        prepare(data, store, **how, workers=1)
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
    assert f"1 train, 1 val, 1 test, seed 0, hash {open_store(store).manifest.split_hash}" in out
    # 6 x 5 x 4 voxels of four int16 channels and a label: 1,080 bytes a case; in files with 128
    # bytes of header each.
    assert all(facts in out for facts in FACTS.split("..."))


FACTS = """
  images   3 int16 .npy; exact
  size     4 KiB on disk
  shapes   6x5x4 (3)
...
  label 0  background: 3 cases, 97.778% of the voxels
  label 1  edema: 3 cases, 0.833% of the voxels
  label 2  non-enhancing tumor: 3 cases, 0.833% of the voxels
  label 3  enhancing tumour: 2 cases, 0.556% of the voxels
"""
DECIDED = """
spacing: 1 x 1 x 1 mm, as the files have them; voxels of training cases have 1 x 1 x 1 mm
levels: 2; the median case has 4 x 3 x 2 voxels; \
one level more would keep fewer than 4 along each axis
strides: 2,2,2; 4 x 3 x 2 voxels of 1 x 1 x 1 mm; \
every level halves all axes, as no side is 8 or more
grids: 4 x 4 x 2; of each case its content box, in multiples of 2
half resolution: off; \
X, Y and Z halved, as by the first level: 2 x 2 x 2 has fewer than 40^3 voxels
region WT: 1 edema, 2 non-enhancing tumor, 3 enhancing tumour; by the labels' names
region TC: 2 non-enhancing tumor, 3 enhancing tumour; by the labels' names
region ET: 3 enhancing tumour; by the labels' names"""


def test_info_says_what_was_decided_for_the_data_set_and_why_also_as_json(store_in, printed):
    store = store_in()
    content = json.loads(printed("info", store, "--json").out)
    assert (content["store"], content["name"]) == (str(store), "BRATS")
    rows = ["\n{name}: {value}; {why}".format(**row) for row in content["decided"]]
    assert "zscore-foreground; 0 in 80% of the voxels" in rows[0]
    assert "".join(rows[4:]) == DECIDED
    assert re.search("levels +2 ", printed("info", store).out)


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
