import errno
import os
import re
from unittest.mock import Mock

import nibabel
import numpy as np
import pytest

from cpu3d.data.store import open_store
from cpu3d.data.stores import convert as module
from cpu3d.data.stores.folder import read_quarantine
from cpu3d.data.stores.prepare import StoreSettings, prepare
from cpu3d.errors import InputError
from tests.cpu3d.data.made_datasets import (
    ALL,
    content_of,
    decathlon,
    nnunet,
    tiny_label,
    write_nifti,
)

THIRDS = {"fractions": (0.4, 0.3, 0.3), "workers": 1}


@pytest.fixture
def dataset(tmp_path):
    return decathlon(tmp_path / "data", 4)


@pytest.fixture
def store(tmp_path, dataset):
    """A finished store of the data set."""
    prepare(dataset, tmp_path / "store", **THIRDS)
    return tmp_path / "store"


@pytest.fixture
def counted(monkeypatch):
    """counted(): the ids of the cases that are converted, in order."""
    spy = Mock(side_effect=module.load_case)
    monkeypatch.setattr(module, "load_case", spy)
    return lambda: [call.args[0].case_id for call in spy.call_args_list]


def test_a_store_says_what_it_is_and_two_processes_write_what_one_does(tmp_path, dataset, capsys):
    manifest = prepare(dataset, tmp_path / "one", **THIRDS, seed=1)
    assert open_store(tmp_path / "one").manifest == manifest
    words = f"2 train, 1 val, 1 test, seed 1, hash {manifest.split_hash}"
    assert words in capsys.readouterr().out
    prepare(dataset, tmp_path / "two", **{**THIRDS, "workers": 2}, seed=1)
    assert content_of(tmp_path / "one") == content_of(tmp_path / "two")


@pytest.mark.parametrize(
    ("name", "damaged"),
    [
        ("x.npy", None),
        ("json", None),
        ("y.npy", lambda content: content[:-1] + b"\x07"),
    ],
)
def test_only_a_case_that_is_not_whole_is_done_when_a_store_is_continued(
    dataset, store, counted, name, damaged
):
    before = content_of(store)
    path = store / f"cases/BRATS_001.{name}"
    if damaged:
        path.write_bytes(damaged(path.read_bytes()))
    else:
        path.unlink()
        with pytest.raises(InputError, match=r"delete manifest\.json, then repeat `prepare`"):
            prepare(dataset, store, **THIRDS)
    (store / "manifest.json").unlink()
    (store / "cases/.BRATS_002.x.npy.xyz.cpu3d.partial").write_bytes(b"left by a killed process")
    prepare(dataset, store, **THIRDS)
    assert counted() == ["BRATS_001"]
    assert content_of(store) == before


def test_an_unfinished_store_takes_sources_and_patients_as_they_are_now(tmp_path, dataset, store):
    (store / "manifest.json").unlink()
    label = tiny_label(3)
    write_nifti(dataset / "labelsTr/BRATS_001.nii.gz", label)
    table = tmp_path / "table"
    table.write_text("".join(f"BRATS_00{number},p{number}\n" for number in range(4)))
    manifest = prepare(dataset, store, **THIRDS, patients=table)
    assert [case.patient_id for case in manifest.cases] == ["p0", "p1", "p2", "p3"]
    counts = manifest.cases[1].label_voxels
    assert counts == {code: (label == code).sum() for code in np.unique(label)}


@pytest.mark.parametrize("is_as_long", [True, False])
def test_a_source_that_changed_is_found_by_its_size_or_by_its_date_and_hash(
    dataset, store, capsys, is_as_long
):
    prepare(dataset, store, **THIRDS)
    assert "finished and unchanged" in capsys.readouterr().out
    path = dataset / "labelsTr/BRATS_000.nii.gz"
    content = path.read_bytes()
    then_ns = path.stat().st_mtime_ns
    if is_as_long:
        path.write_bytes(content[:4] + b"time" + content[8:])  # gzip's own time stamp
        then_ns -= 10**11
    else:
        path.write_bytes(content + b"\0")
    os.utime(path, ns=(then_ns, then_ns))
    with pytest.raises(InputError, match=r"BRATS_000 must be the one of store .* other files, BR"):
        prepare(dataset, store, **THIRDS)


def test_a_finished_store_refuses_another_split_other_cases_and_other_patients_and_stays(
    tmp_path, dataset, store
):
    before = content_of(store)
    table = tmp_path / "table"
    table.write_text("BRATS_000,p\nBRATS_001,p\nBRATS_002,q\nBRATS_003,r\n")
    for how, problem in (
        (ALL, "another split than 2 train, 1 val, 1 test"),
        ({**THIRDS, "seed": 5}, "seed 0"),
        ({**THIRDS, "patients": table}, "BRATS_000 must be of the patient .*, got p"),
    ):
        with pytest.raises(InputError, match=problem):
            prepare(dataset, store, **how)
    decathlon(dataset, 5)
    with pytest.raises(InputError, match="case BRATS_004 is new"):
        prepare(dataset, store, **THIRDS)
    assert content_of(store) == before


@pytest.mark.parametrize("finished", [True, False])
def test_a_store_is_not_continued_with_other_settings_or_another_data_set(
    tmp_path, dataset, store, finished
):
    if not finished:
        (store / "manifest.json").unlink()
    before = content_of(store)
    settings = StoreSettings("b2nd", crop=True, zero_nan=True)
    with pytest.raises(InputError, match=r"format .*\ncrop .*\nzero_nan .*must be False"):
        prepare(dataset, store, **THIRDS, settings=settings)
    labels = {"background": 0, "spleen": 1, "2": 2, "3": 3}
    channels = dict(zip("0123", "abcd"))
    other = nnunet(tmp_path / "other", 4, name="SPLEEN", labels=labels, channel_names=channels)
    rules = r"name of .* 'BRATS'.*, got 'SPLEEN'\nlayout .*\nchannels .*\nlabels of "
    with pytest.raises(InputError, match=rules):
        prepare(other, store, **THIRDS)
    assert content_of(store) == before


def test_a_folder_of_something_else_is_refused_untouched(tmp_path, dataset):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/letter.txt").write_text("dear")
    for folder, rule in (
        (tmp_path / "home", "empty or hold source.json, got letter.txt"),
        (dataset, "another folder than the data set"),
        (tmp_path / "home/letter.txt", ""),
    ):
        with pytest.raises(InputError, match=f"store {folder} must be {rule}"):
            prepare(dataset, folder, **THIRDS)
    assert os.listdir(tmp_path / "home") == ["letter.txt"]


def test_all_bad_cases_are_named_and_the_good_are_kept(tmp_path, dataset, capsys):
    label = dataset / "labelsTr/BRATS_000.nii.gz"
    label.unlink()
    cut = dataset / "imagesTr/BRATS_001.nii.gz"
    cut.write_bytes(cut.read_bytes()[:-5])
    store = tmp_path / "store"
    two = {**ALL, "workers": 2}
    with pytest.raises(InputError, match=r"label of case BRATS_000.*\n.*nothing was converted"):
        prepare(dataset, store, **two)
    assert not store.exists()
    write_nifti(label, np.full((6, 5, 4), 7, np.uint8))
    only = r"(?s)000.* only the codes 0 background, 1 edema, .*, 3 enhancing tumour, got 7 \(120 v"
    with pytest.raises(InputError, match=f"{only}.*_001.*got 2 bad cases; 2 good cases kept"):
        prepare(dataset, store, **two)
    assert not (store / "manifest.json").exists()
    manifest = prepare(dataset, store, **two, skip_bad=True)
    assert [case.case_id for case in manifest.cases] == ["BRATS_002", "BRATS_003"]
    assert sorted(read_quarantine(store)) == ["BRATS_000", "BRATS_001"]
    assert "left out 2 bad cases" in capsys.readouterr().out
    assert prepare(dataset, store, **two, skip_bad=True) == manifest
    assert "Nothing to do" in capsys.readouterr().out
    (store / "quarantine.jsonl").write_text("{}")
    with pytest.raises(InputError, match="must be JSON lines of a case_id and its reasons, got"):
        read_quarantine(store)


def test_whatever_fails_in_a_case_leaves_the_others(tmp_path, monkeypatch):
    errors = [RuntimeError("a bug"), MemoryError()]
    monkeypatch.setattr(module, "load_case", Mock(side_effect=errors))
    with pytest.raises(InputError, match=r"(?s)got RuntimeError: a bug.*got MemoryError"):
        prepare(decathlon(tmp_path / "two", 2), tmp_path / "store", **ALL)


def test_a_disk_that_gives_back_other_bytes_is_an_error_and_leaves_no_such_file(
    tmp_path, dataset, monkeypatch
):
    real = module.give_back

    def failing(handle):
        real(handle)
        with open(os.readlink(f"/proc/self/fd/{handle}"), "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x07")

    monkeypatch.setattr(module, "give_back", failing)
    with pytest.raises(OSError, match=r"read back.*; 0 finished cases kept in .*; run"):
        prepare(dataset, tmp_path / "store", **THIRDS)
    assert not list((tmp_path / "store/cases").iterdir())
    monkeypatch.setattr(module, "give_back", Mock(side_effect=OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match=r"full; 0 .*; free disk space, then run"):
        prepare(dataset, tmp_path / "store", **THIRDS)


@pytest.mark.parametrize(
    ("without", "refused", "rule"),
    [
        ((0, 2, 3), [1], "must not give .*, as 3 other.* above 0;"),
        ((0, 2), [0, 2], "must give .*, as 2.* of 0;"),
    ],
)
def test_cases_with_and_without_orientation_are_not_mixed_in_a_store(
    tmp_path, dataset, without, refused, rule
):
    for number in without:
        for kind in ("imagesTr", "labelsTr"):
            path = dataset / f"{kind}/BRATS_00{number}.nii.gz"
            write_nifti(path, np.asarray(nibabel.load(path).dataobj), codes=(0, 0))
    manifest = prepare(dataset, tmp_path / "store", skip_bad=True, **ALL)
    bad = read_quarantine(tmp_path / "store")
    assert sorted(bad) == [f"BRATS_00{number}" for number in refused]
    assert all(re.search(rule, reason) for (reason,) in bad.values())
    assert len(manifest.cases) == 4 - len(refused)


@pytest.mark.parametrize(
    ("codes", "warning"),
    [
        ((1, 2), "every region to learn it, got none of ET (label 3);"),
        ((3,), ""),  # of which WT and TC are too
        ((), "must have labelled voxels, got none of any region"),
    ],
)
def test_regions_that_no_training_case_has_are_one_line_of_warning(
    tmp_path, capsys, codes, warning
):
    folder = decathlon(tmp_path / "data", 3)
    for number in (1, 2):  # the others validate
        write_nifti(folder / f"labelsTr/BRATS_{number:03d}.nii.gz", tiny_label(*codes))
    prepare(folder, tmp_path / "store", fractions=(2, 1, 0), workers=1)
    lines = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(lines) == bool(warning)
    assert all(warning in line for line in lines)
