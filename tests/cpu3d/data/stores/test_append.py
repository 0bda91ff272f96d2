import os
import shutil

import nibabel
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpu3d.__main__ import main
from cpu3d.data.store import open_store
from cpu3d.data.stores.folder import read_quarantine, settings_of
from cpu3d.data.stores.prepare import StoreSettings, prepare
from cpu3d.data.stores.splits import deal_cases
from cpu3d.data.stores.upkeep import append, verify
from cpu3d.errors import InputError
from cpu3d.util.lock import locked
from tests.cpu3d.data.made_datasets import (
    content_of,
    dataset_json,
    decathlon,
    tiny_image,
    tiny_label,
    write_nifti,
)

SPLITS = ("train", "val", "test")
IDS = tuple(f"BRATS_00{number}" for number in range(6))


HOW = {"fractions": (1, 1, 1), "workers": 1, "seed": 1}


@pytest.fixture
def data(tmp_path):
    """Two data sets, `few` with the cases 0 to 2 and `many` with those and 3 to 5."""
    decathlon(tmp_path / "few", 3)
    decathlon(tmp_path / "many", 6)
    for path in tmp_path.rglob("*.nii.gz"):
        os.utime(path, (0, 0))  # records tell a file's date: these may be compared
    return tmp_path


@pytest.fixture
def store(data):
    """A store of the few."""
    prepare(data / "few", data / "store", **HOW)
    return data / "store"


def bring_few(data, folder):
    """Put the files of the few in the place of those of their names in another data set."""
    for kind in ("imagesTr", "labelsTr"):
        shutil.copytree(data / "few" / kind, folder / kind, dirs_exist_ok=True)


@pytest.mark.parametrize("settings", [StoreSettings(), StoreSettings("b2nd", crop=True)])
def test_new_cases_are_made_as_the_stores_own_and_no_old_case_moves(data, settings):
    store = data / "store"
    prepare(data / "few", store, **HOW, settings=settings)
    prepare(data / "many", data / "direct", **HOW, settings=settings)
    before = content_of(store / "cases")
    done = append(store, data / "many", workers=1)
    assert (done.new, done.known, done.bad) == (IDS[3:], IDS[:3], ())
    new = open_store(store).manifest
    assert new == done.manifest
    assert before.items() <= content_of(data / "direct/cases").items()
    assert content_of(store / "cases") == content_of(data / "direct/cases")
    in_order = (1, 5, 2, 4, 0, 3)  # of each part one old case, and the new one that the seed gives
    assert sum(new.split.values(), ()) == tuple(IDS[number] for number in in_order)
    assert (settings_of(store), verify(store, workers=1)) == (settings, ())


def test_damaged_files_of_a_grown_store_come_back_by_the_same_commands_in_their_order(data, store):
    append(store, data / "many", workers=1)
    before = content_of(store)
    (store / "cases/BRATS_001.x.npy").unlink()
    (store / "cases/BRATS_004.json").unlink()
    with pytest.raises(InputError, match=r"BRATS_004\.json.*delete manifest\.json, then repeat"):
        append(store, data / "many", workers=1)
    (store / "manifest.json").unlink()
    prepare(data / "few", store, **HOW)
    append(store, data / "many", workers=1)
    assert content_of(store) == before


def test_a_store_is_written_by_one_process_at_a_time(data, store):
    with locked(store, "store"):
        with pytest.raises(InputError, match="one process"):
            append(store, data / "many")
        (store / "manifest.json").unlink()
        with pytest.raises(InputError, match="one process"):
            prepare(data / "few", store)


@pytest.mark.parametrize(
    ("field", "content"),
    [
        ("labels", {"0": "background", "1": "edema", "2": "necrosis", "3": "enhancing tumour"}),
        ("modality", {"0": "FLAIR", "1": "T1w", "2": "T2w", "3": "ADC"}),
    ],
)
def test_other_channels_or_labels_are_refused(data, store, field, content):
    others = decathlon(data / "others", 1, **{field: content})
    with pytest.raises(InputError, match=r"the labels of store.*necro|must have FLAIR, .* ADC"):
        append(store, others, workers=1)


def test_channels_in_another_order_are_taken_by_name(data, store):
    names = ("T2w", "T1-Gd", "flair", "t1n")
    others = decathlon(data / "others", 4, modality=dict(zip("0123", names)))
    voxels = np.stack([tiny_image(number) for number in range(100, 104)], -1)
    write_nifti(others / "imagesTr/BRATS_003.nii.gz", voxels)
    bring_few(data, others)
    append(store, others, workers=1)
    image = open_store(store).image("BRATS_003")
    np.testing.assert_array_equal(image, voxels[..., [2, 3, 1, 0]])


def test_bad_cases_are_named_and_nothing_is_appended_unless_they_may_be_left_out(
    data, store, capsys
):
    before = open_store(store).manifest
    with dataset_json(data / "many") as content:
        content["validation"] = [{}]
    bad = data / "many/imagesTr/BRATS_003.nii.gz"
    good = bad.read_bytes()
    bad.write_bytes(b"no volume")
    for number in (1, 4):  # of which the store has the first
        (data / f"many/labelsTr/BRATS_00{number}.nii.gz").unlink()
    with pytest.raises(InputError, match="without bad cases, got 2 bad cases; nothing was conv"):
        append(store, data / "many", workers=1)
    assert open_store(store).manifest == before
    command = f"store append --store {store} --workers 1 --skip-bad --dataset {data / 'many'}"
    assert main(command.split()) == 0
    after = open_store(store).manifest
    printed = "".join(capsys.readouterr())
    assert [record.case_id for record in after.cases] == [*IDS[:3], "BRATS_005"]
    words = ("1 new case, 2 cases it", "2 bad cases", after.split_hash, '1 case under "valid')
    assert all(word in printed for word in words)
    assert append(store, data / "few", workers=1).manifest == after
    assert list(read_quarantine(store)) == ["BRATS_003", "BRATS_004"]
    write_nifti(data / "many/labelsTr/BRATS_004.nii.gz", tiny_label(1))
    append(store, data / "many", workers=1, skip_bad=True)
    assert [*read_quarantine(store)] == ["BRATS_003"]
    bad.write_bytes(good)
    append(store, data / "many", workers=1)
    assert not read_quarantine(store)


@given(
    have=st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any),
    new=st.integers(0, 30),
    cases_each=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_nothing_moves_no_patient_straddles_and_shares_are_kept_within_a_patient(
    have, new, cases_each, seed
):
    split = {name: tuple(f"{name}{n}" for n in range(count)) for name, count in zip(SPLITS, have)}
    old = {case_id: case_id for ids in split.values() for case_id in ids}
    more = {f"new{n}-{number}": f"new{n}" for n in range(new) for number in range(cases_each)}
    dealt = deal_cases(split, old, more, seed=seed)
    patients = {**old, **more}
    assert sorted(sum(dealt.values(), ())) == sorted(patients)
    parts = [{patients[case_id] for case_id in dealt[name]} for name in SPLITS]
    total = sum(have) + new
    assert sum(map(len, parts)) == total
    for name, part, count in zip(SPLITS, parts, have):
        assert set(split[name]) <= set(dealt[name])
        assert abs(len(part) - count / sum(have) * total) < 1


def test_the_store_and_not_the_number_of_new_cases_says_whether_orientation_is_given(data, capsys):
    for path in [*(data / "few").rglob("*.nii.gz"), *(data / "many").rglob("BRATS_003*")]:
        write_nifti(path, np.asarray(nibabel.load(path).dataobj), codes=(0, 0))
    prepare(data / "few", data / "store", **HOW)
    bring_few(data, data / "many")
    capsys.readouterr()
    command = "store append --store {0}/store --dataset {0}/many --workers 1 --skip-bad"
    assert main(command.format(data).split()) == 0
    printed = capsys.readouterr().out
    assert "note: BRATS_003: no orientation" in printed  # and not the old cases again
    assert "left out 2 bad cases" in printed
