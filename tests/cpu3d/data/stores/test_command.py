import json
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
def told(capsys):
    """told(*arguments, code=0): what `store ...` prints on stdout and stderr when it ends with that code."""

    def call(*arguments, code=0):
        capsys.readouterr()
        assert main(["store", *map(str, arguments)]) == code
        return capsys.readouterr()

    return call


def test_info_adds_up_what_the_records_say(store, told):
    info = json.loads(told("info", store, "--json").out)
    # 6 x 5 x 4 voxels of four int16 channels and a label: 1,080 bytes a case; in files with 128 bytes of header each.
    assert info["bytes_unpacked"] == 3 * 1080
    assert info["bytes_on_disk"] == 3 * (1080 + 2 * 128)
    assert info["formats"] == {"int16 .npy": 3}
    assert info["shapes"] == {"6x5x4": 3}
    assert info["largest_box"] == [4, 3, 2]
    assert info["grid"] == {"brain": [16, 16, 16], "full": [16, 16, 16]}
    assert info["label_voxels"] == {"0": 3 * 117, "1": 3, "2": 3, "3": 3}
    assert info["label_cases"] == {"0": 3, "1": 3, "2": 3, "3": 3}
    assert info["split"] == {"train": 1, "val": 1, "test": 1}
    assert (info["cases"], info["patients"], info["arrays"], info["unlabelled"]) == (3, 3, 3, 0)
    assert (info["cropped_cases"], info["zeroed_voxels"], info["max_abs_error_std"]) == (0, 0, 0.0)
    assert info["split_hash"] == open_store(store).manifest.split_hash
    assert set(info["read"]) == {"volumes", "patches"}
    assert info["read"]["volumes"]["mode"] in ("mmap", "pread", "ram")


def test_info_tells_people_the_same_with_labels_and_regions(store, told, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    out = told("info", store).out
    assert "3 of 3 patients, 0 unlabelled" in out
    assert "3 int16 .npy; exact" in out
    assert "1 train, 1 val, 1 test, seed 0" in out
    assert "6x5x4 (3)" in out
    assert "brain's box 4x3x2" in out
    assert re.search(r"volumes +read with \w+ \(", out)
    assert re.search(r"3 enhancing tumour  +WT, TC, ET +3 +3 +0.833% +33.3%", out)


def test_info_of_one_case_is_its_record(store, told):
    content = json.loads(told("info", store, "--case", "BRATS_001", "--json").out)
    assert content["label_voxels"] == {"0": 117, "1": 1, "2": 1, "3": 1}
    assert content["centres"]["2"] == [[2, 2, 1]]
    out = told("info", store, "--case", "BRATS_001").out
    assert re.search(r"case_id +BRATS_001", out)
    assert "1 voxel" in out
    assert "--case must name a case" in told("info", store, "--case", "BRATS_9", code=2).err


def test_verify_ends_with_0_for_a_good_store_and_2_for_a_damaged_one(store, told):
    assert "is whole: 3 cases, 3 with arrays of their own" in told("verify", store, "--workers", 1).out
    good = json.loads(told("verify", store, "--workers", 1, "--json").out)
    assert (good["good"], good["problems"], good["cases"]) == (True, [], 3)
    (store / "stray").write_bytes(b"")
    said = told("verify", store, "--workers", 1)
    assert f"note: {store / 'stray'} belongs to no case" in said.err
    (store / "cases/BRATS_000.x.npy").unlink()
    (store / "cases/BRATS_001.x.npy").write_bytes(b"")
    err = told("verify", store, "--workers", 1, code=2).err
    assert len(re.findall("^error: ", err, re.MULTILINE)) == 2
    bad = json.loads(told("verify", store, "--workers", 1, "--json", code=2).out)
    assert not bad["good"]
    assert len(bad["problems"]) == 2
    assert bad["strays"] == ["stray"]


def test_convert_tells_the_size_before_and_after_and_who_can_go_on(tmp_path, store, told):
    old = open_store(store).manifest
    out = told("convert", store, tmp_path / "new", "--crop", "--workers", 1).out
    before, after = 3 * (1080 + 256), 3 * (4 * 3 * 2 * 9 + 256)
    assert f"now {after / 1e6:,.1f} MB: {after / before:.0%}" in out
    assert "runs trained on" in out
    assert "can go on" in out
    assert open_store(tmp_path / "new").manifest.split_hash == old.split_hash
    out = told("convert", tmp_path / "new", tmp_path / "third", "--no-crop", "--format", "float16", "--workers", 1).out
    manifest = open_store(tmp_path / "third").manifest
    assert f"hash {manifest.split_hash}: runs" in out
    assert "crop" not in out
    assert "must be empty" in told("convert", store, tmp_path / "new", "--format", "b2nd", code=2).err


def test_append_tells_what_came_what_was_there_and_why_old_runs_refuse(tmp_path, store, told, decathlon):
    decathlon(tmp_path / "more", 5)
    before = open_store(store).manifest
    (tmp_path / "more/labelsTr/BRATS_004.nii.gz").write_bytes(b"")
    assert "nothing was appended" in told("append", store, "--dataset", tmp_path / "more", "--workers", 1, code=2).err
    out = told("append", store, "--dataset", tmp_path / "more", "--workers", 1, "--skip-bad").out
    after = open_store(store).manifest
    assert "1 new case, 3 cases it had already, skipped" in out
    assert "left out 1 bad case" in out
    assert f"{before.split_hash} before, {after.split_hash} now: runs trained before refuse" in out
    assert "Train anew" in out
    (tmp_path / "more/labelsTr/BRATS_004.nii.gz").unlink()
    out = told("append", store, "--dataset", tmp_path / "more", "--workers", 1, "--skip-bad").out
    assert "0 new cases, 4 cases it had already" in out
    assert "hash" not in out
