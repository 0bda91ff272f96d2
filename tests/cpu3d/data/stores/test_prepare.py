import json
import os
import re

import nibabel
import numpy as np
import pytest

from cpu3d.data.store import open_store
from cpu3d.data.stores import convert as module
from cpu3d.data.stores.folder import read_quarantine
from cpu3d.data.stores.prepare import StoreSettings, prepare
from cpu3d.errors import InputError
from tests.cpu3d.data.made_datasets import (
    content_of,
    decathlon,
    tiny_image,
    tiny_label,
    write_nifti,
)

THIRDS = {"fractions": (0.4, 0.3, 0.3), "workers": 1}
ALL = {"fractions": (1, 0, 0), "workers": 1}


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
    """The ids of the cases that are converted, in order."""
    done = []
    real = module.load_case
    monkeypatch.setattr(
        module, "load_case", lambda files, **more: done.append(files.case_id) or real(files, **more)
    )
    return done


def test_a_store_says_what_it_is_and_two_processes_write_what_one_does(tmp_path, dataset, capsys):
    manifest = prepare(dataset, tmp_path / "one", **THIRDS, seed=1)
    assert open_store(tmp_path / "one").manifest == manifest
    assert sorted(sum(manifest.split.values(), ())) == [f"BRATS_00{number}" for number in range(4)]
    printed = capsys.readouterr().out
    assert "layout decathlon, channels FLAIR, T1w, t1gd, T2w" in printed
    assert f"2 train, 1 val, 1 test, seed 1, hash {manifest.split_hash}" in printed
    prepare(dataset, tmp_path / "two", **{**THIRDS, "workers": 2}, seed=1)
    assert content_of(tmp_path / "one") == content_of(tmp_path / "two")


def test_what_was_cut_is_continued_and_ends_as_if_it_had_not_been(
    tmp_path, dataset, store, counted, monkeypatch
):
    partial = tmp_path / "cut/cases/.BRATS_002.x.npy.xyz.cpu3d.partial"
    real = module.run_jobs

    def cut(*arguments):
        results = real(*arguments)
        try:
            yield from (next(results), next(results))
            raise KeyboardInterrupt
        finally:
            partial.write_bytes(b"left by a killed worker")

    monkeypatch.setattr(module, "run_jobs", cut)
    with pytest.raises(
        KeyboardInterrupt, match=r"2 finished cases kept .* run the same command again"
    ):
        prepare(dataset, tmp_path / "cut", **THIRDS)
    assert not (tmp_path / "cut/manifest.json").exists()
    assert not list((tmp_path / "cut").rglob("*.partial"))
    monkeypatch.setattr(module, "run_jobs", real)
    counted.clear()
    partial.write_bytes(b"left by a killed process")
    prepare(dataset, tmp_path / "cut", **THIRDS)
    assert counted == ["BRATS_002", "BRATS_003"]
    assert content_of(tmp_path / "cut") == content_of(store)


@pytest.mark.parametrize(
    ("damage", "finished"),
    [
        (lambda path: path.unlink(), True),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), True),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x07"), False),
    ],
)
def test_only_the_case_whose_array_is_damaged_is_done_again(
    dataset, store, counted, damage, finished
):
    before = content_of(store)
    if not finished:
        (store / "manifest.json").unlink()
    damage(store / "cases/BRATS_001.y.npy")
    prepare(dataset, store, **THIRDS)
    assert counted == ["BRATS_001"]
    assert content_of(store) == before


def test_what_is_made_again_in_a_finished_store_moves_no_case_and_takes_none_that_was_left_out(
    tmp_path, dataset
):
    image = dataset / "imagesTr/BRATS_002.nii.gz"
    store = tmp_path / "own"
    good = image.read_bytes()
    image.write_bytes(good[:100])
    old = prepare(dataset, store, **THIRDS, skip_bad=True)
    before = content_of(store)
    image.write_bytes(good)
    (store / f"cases/{old.cases[0].case_id}.x.npy").unlink()
    assert prepare(dataset, store, **THIRDS, skip_bad=True).split == old.split
    assert content_of(store) == before


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
    with pytest.raises(InputError, match="case BRATS_000 must be the one of store"):
        prepare(dataset, store, **THIRDS)


def test_a_finished_store_refuses_another_split_other_cases_and_other_patients_and_stays(
    tmp_path, dataset, store
):
    before = content_of(store)
    with pytest.raises(InputError, match="another split than 2 train, 1 val, 1 test"):
        prepare(dataset, store, **ALL)
    with pytest.raises(InputError, match="seed 0"):
        prepare(dataset, store, **THIRDS, seed=5)
    (tmp_path / "table").write_text("BRATS_000,p\nBRATS_001,p\nBRATS_002,q\nBRATS_003,r\n")
    with pytest.raises(InputError, match=r"BRATS_000 must be of the patient .*, BRATS_000, got p"):
        prepare(dataset, store, **THIRDS, patients=tmp_path / "table")
    decathlon(dataset, 5)
    with pytest.raises(InputError, match="case BRATS_004 is new"):
        prepare(dataset, store, **THIRDS)
    assert content_of(store) == before


def test_the_store_of_another_data_set_version_or_owner_is_refused_untouched(
    tmp_path, dataset, store
):
    before = content_of(store)
    other = decathlon(tmp_path / "other", 4, name="SPLEEN")
    with pytest.raises(InputError, match=r"name of .* must be 'BRATS'.*, got 'SPLEEN'"):
        prepare(other, store, **THIRDS)
    (store / "manifest.json").unlink()  # an unfinished one
    with pytest.raises(InputError, match=r"name of .* must be 'BRATS'.*, got 'SPLEEN'"):
        prepare(other, store, **THIRDS)
    (store / "manifest.json").write_text(json.dumps({"schema": 7}))
    with pytest.raises(InputError, match="schema 2, got schema 7"):
        prepare(dataset, store, **THIRDS)
    (store / "manifest.json").write_bytes(before["manifest.json"])
    assert content_of(store) == before
    (tmp_path / "home").mkdir()
    (tmp_path / "home/letter.txt").write_text("dear")
    for folder in (tmp_path / "home", dataset, tmp_path / "home/letter.txt"):
        with pytest.raises(InputError, match=f"store {folder} must be"):
            prepare(dataset, folder, **THIRDS)
    assert os.listdir(tmp_path / "home") == ["letter.txt"]
    (store / "source.json").write_text("[]")
    (store / "manifest.json").unlink()  # a finished store gets its source.json back
    with pytest.raises(InputError, match=r"source\.json must be complete JSON"):
        prepare(dataset, store, **THIRDS)


@pytest.mark.parametrize("finished", [True, False])
def test_a_store_is_not_continued_with_other_settings(dataset, store, finished):
    if not finished:
        (store / "manifest.json").unlink()
    before = content_of(store)
    with pytest.raises(InputError) as error:
        prepare(dataset, store, **THIRDS, settings=StoreSettings("b2nd", crop=True, zero_nan=True))
    assert [problem.split()[0] for problem in error.value.problems[:-1]] == [
        "format",
        "crop",
        "zero_nan",
    ]
    assert content_of(store) == before


@pytest.mark.parametrize("workers", [1, 2])
def test_all_bad_cases_are_named_and_the_good_are_kept(tmp_path, dataset, workers, capsys):
    label = dataset / "labelsTr/BRATS_000.nii.gz"
    label.rename(tmp_path / "lost")
    cut = dataset / "imagesTr/BRATS_001.nii.gz"
    cut.write_bytes(cut.read_bytes()[:-5])
    sick = np.stack([tiny_image(channel) for channel in range(4)], -1).astype(np.float32)
    sick[1, 1, 1, 2] = np.nan
    write_nifti(dataset / "imagesTr/BRATS_002.nii.gz", sick)
    write_nifti(dataset / "labelsTr/BRATS_002.nii.gz", np.full((6, 5, 4), 8, np.uint8))
    with pytest.raises(InputError, match=r"label of case BRATS_000.*\n.*nothing was converted"):
        prepare(dataset, tmp_path / "store", fractions=(1, 0, 0), workers=workers)
    assert not (tmp_path / "store").exists()
    write_nifti(label, np.full((6, 5, 4), 7, np.uint8))
    with pytest.raises(InputError, match="--skip-bad") as error:
        prepare(dataset, tmp_path / "store", fractions=(1, 0, 0), workers=workers)
    *reasons, advice = error.value.problems
    assert [reason.split("BRATS_00")[1][0] for reason in reasons] == ["0", "1", "2", "2"]
    assert ("got 3 bad" in advice, "1 good" in advice) == (True, True)
    names = {path.name for path in tmp_path.glob("store/**/*.json")}
    assert names == {"source.json", "BRATS_003.json"}
    with pytest.raises(InputError, match="must have at least 2 patients with labels, got 1"):
        prepare(dataset, tmp_path / "store", **{**THIRDS, "fractions": (1, 1, 0)}, skip_bad=True)
    manifest = prepare(dataset, tmp_path / "store", **ALL, skip_bad=True)
    assert [case.case_id for case in manifest.cases] == ["BRATS_003"]
    left_out = read_quarantine(tmp_path / "store")
    assert [len(left_out[f"BRATS_00{number}"]) for number in range(3)] == [1, 1, 2]
    assert "left out 3 bad cases" in capsys.readouterr().out
    assert prepare(dataset, tmp_path / "store", **ALL, skip_bad=True) == manifest
    assert "Nothing to do" in capsys.readouterr().out


def test_whatever_fails_in_a_case_leaves_the_others(tmp_path, monkeypatch):
    errors = [MemoryError(), RuntimeError("a bug")]
    monkeypatch.setattr(module, "load_case", lambda *_, **__: (_ for _ in ()).throw(errors.pop()))
    with pytest.raises(InputError, match="got 2 bad cases") as error:
        prepare(decathlon(tmp_path / "two", 2), tmp_path / "store", **ALL)
    for got, problem in zip(("RuntimeError: a bug", "MemoryError: "), error.value.problems):
        assert f"must be readable in memory, got {got}" in problem


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
    with pytest.raises(OSError, match="read back"):
        prepare(dataset, tmp_path / "store", **THIRDS)
    assert not list((tmp_path / "store/cases").iterdir())


def turn_off_orientation(folder, numbers):
    """Give the cases with these numbers, image and label, sform and qform codes of 0."""
    for number in numbers:
        for part in ("imagesTr", "labelsTr"):
            path = folder / part / f"BRATS_{number:03d}.nii.gz"
            write_nifti(path, np.asarray(nibabel.load(path).dataobj), codes=(0, 0))


@pytest.mark.parametrize(
    ("without", "refused"), [((1,), (1,)), ((0, 2, 3), (1,)), ((0, 2), (0, 2))]
)
def test_cases_with_and_without_orientation_are_not_mixed_in_a_store(tmp_path, without, refused):
    folder = decathlon(tmp_path / "data", 4)
    turn_off_orientation(folder, without)
    with pytest.raises(InputError) as caught:
        prepare(folder, tmp_path / "store", **ALL)
    *problems, _ = caught.value.problems
    assert [problem.split()[1] for problem in problems] == [
        f"BRATS_{number:03d}" for number in refused
    ]
    assert all("sform" in problem and "left and right" in problem for problem in problems)
    assert not (tmp_path / "store/manifest.json").exists()
    manifest = prepare(folder, tmp_path / "store", skip_bad=True, **ALL)
    assert {case.case_id for case in manifest.cases} == {
        f"BRATS_{number:03d}" for number in range(4) if number not in refused
    }
    assert sorted(read_quarantine(tmp_path / "store")) == [
        f"BRATS_{number:03d}" for number in refused
    ]


@pytest.mark.parametrize(
    ("codes", "warning"),
    [
        ((1, 2, 3), ""),
        ((1, 2), "every region to learn it, got none of ET (label 3);"),
        ((3,), ""),  # of which WT and TC are too
        ((), "must have labelled voxels, got none of any region"),
    ],
)
def test_regions_that_no_training_case_has_are_one_line_of_warning(
    tmp_path, capsys, codes, warning
):
    folder = decathlon(tmp_path / "data", 3)
    for number in range(3):
        write_nifti(folder / f"labelsTr/BRATS_{number:03d}.nii.gz", tiny_label(*codes))
    prepare(folder, tmp_path / "store", **ALL)
    lines = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(lines) == bool(warning)
    assert all(warning in line for line in lines)


def test_a_store_without_orientation_or_with_another_background_says_so(tmp_path, capsys):
    folder = decathlon(tmp_path / "data", 5)
    prepare(folder, tmp_path / "good", workers=1)
    assert "note" not in capsys.readouterr().out
    turn_off_orientation(folder, range(5))
    path = folder / "imagesTr/BRATS_002.nii.gz"
    image = np.asarray(nibabel.load(path).dataobj)
    write_nifti(path, np.where(image == 0, -7, image).astype(np.int16), codes=(0, 0))
    prepare(folder, tmp_path / "store", workers=1)
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    assert len(notes) == 2
    assert re.search(
        "BRATS_000, BRATS_001, BRATS_002 and 2 more: .*sform and qform codes are 0", notes[0]
    )
    assert re.search("BRATS_002: .* FLAIR, T1w, t1gd and T2w is about -7", notes[1])
