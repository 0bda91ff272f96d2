import json
import os
from collections import Counter

import nibabel
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpu3d.__main__ import main
from cpu3d.data.datasets.names import channel_key
from cpu3d.data.store import open_store
from cpu3d.data.stores.folder import settings_of
from cpu3d.data.stores.prepare import StoreSettings, prepare
from cpu3d.data.stores.splits import deal_cases
from cpu3d.data.stores.upkeep import append, verify
from cpu3d.errors import InputError
from tests.cpu3d.data.made_datasets import (
    brats_case,
    content_of,
    decathlon,
    tiny_image,
    tiny_label,
    write_nifti,
)

SPLITS = ("train", "val", "test")
IDS = tuple(f"BRATS_00{number}" for number in range(6))


@pytest.fixture
def data(tmp_path):
    """Two data sets, `few` with the cases 0 to 2 and `many` with those and 3 to 5, and a store of
    the first."""
    decathlon(tmp_path / "few", 3)
    decathlon(tmp_path / "many", 6)
    for path in tmp_path.rglob("*.nii.gz"):
        os.utime(path, (0, 0))  # records tell a file's date: these may be compared
    return tmp_path


@pytest.fixture
def store(data):
    prepare(data / "few", data / "store", fractions=(1, 1, 1), workers=1)
    return data / "store"


@pytest.mark.parametrize("settings", [StoreSettings(), StoreSettings("b2nd", crop=True)])
def test_new_cases_are_made_as_the_stores_own_and_no_old_case_moves(data, settings):
    store = data / "store"
    prepare(data / "few", store, fractions=(1, 1, 1), workers=1, settings=settings)
    prepare(data / "many", data / "direct", fractions=(1, 1, 1), workers=1, settings=settings)
    old = open_store(store)
    before = content_of(store / "cases")
    done = append(store, data / "many", workers=1)
    assert (done.new, done.known, done.bad) == (IDS[3:], IDS[:3], ())
    new = open_store(store)
    assert new.manifest == done.manifest
    assert before.items() <= content_of(store / "cases").items()
    assert content_of(store / "cases") == content_of(data / "direct/cases")
    assert all(set(old.manifest.split[name]) < set(new.manifest.split[name]) for name in SPLITS)
    assert [len(new.manifest.split[name]) for name in SPLITS] == [2, 2, 2]
    assert new.manifest.split_hash != old.manifest.split_hash
    assert (settings_of(store), verify(store, workers=1)) == (settings, ())
    assert list(old.manifest.cases) == list(new.manifest.cases)[:3]  # open since before, still good


def test_ids_that_stand_for_other_files_are_refused(data, store):
    write_nifti(data / "many/labelsTr/BRATS_001.nii.gz", tiny_label(3, 2, 1))
    before = content_of(store)
    with pytest.raises(
        InputError,
        match=r"case BRATS_001 must be the one of store .*, got other files, BRATS_001\.nii\.gz",
    ):
        append(store, data / "many", workers=1)
    assert content_of(store) == before


@pytest.mark.parametrize(
    ("field", "content", "rule"),
    [
        (
            "labels",
            {"0": "background", "1": "edema", "2": "necrosis", "3": "enhancing tumour"},
            "labels of .*necrosis",
        ),
        (
            "modality",
            {"0": "FLAIR", "1": "T1w", "2": "T2w", "3": "ADC"},
            "channels of .*FLAIR, T1w, t1gd, T2w.* ADC",
        ),
    ],
)
def test_other_channels_or_labels_are_refused(data, store, field, content, rule):
    others = decathlon(data / "others", 1, **{field: content})
    with pytest.raises(InputError, match=rule):
        append(store, others, workers=1)


@pytest.mark.parametrize("names", ["T2w T1-Gd flair t1n", "ADC T2w t1ce FLAIR T1"])
def test_channels_in_another_order_are_taken_by_name(data, store, names):
    names = names.split()
    keys = [channel_key(name) for name in names]
    others = decathlon(data / "others", 2, modality={str(n): name for n, name in enumerate(names)})
    expected = {}
    for path in (others / "imagesTr").iterdir():
        voxels = [tiny_image(100 + number + len(expected)) for number in range(len(names))]
        new = write_nifti(path.with_name(f"new_{path.name}"), np.stack(voxels, -1))
        path.unlink()
        label = others / "labelsTr" / path.name
        label.rename(label.with_name(new.name))
        places = [keys.index(name) for name in ("FLAIR", "T1w", "T1gd", "T2w")]
        expected[new.name[:-7]] = np.stack([voxels[place] for place in places], -1)
    text = (others / "dataset.json").read_text().replace("/BRATS", "/new_BRATS")
    (others / "dataset.json").write_text(text)
    append(store, others, workers=1)
    for case_id, image in expected.items():
        np.testing.assert_array_equal(open_store(store).image(case_id), image)


def test_bad_cases_are_named_and_nothing_is_appended_unless_they_may_be_left_out(
    data, store, capsys
):
    before = open_store(store).manifest
    (data / "many/imagesTr/BRATS_003.nii.gz").write_bytes(b"no volume")
    (data / "many/labelsTr/BRATS_004.nii.gz").unlink()
    with pytest.raises(InputError, match="got 2 bad cases") as caught:
        append(store, data / "many", workers=1)
    assert ["BRATS_003" in problem for problem in caught.value.problems] == [True, False, False]
    assert open_store(store).manifest == before
    command = [
        "store",
        "append",
        "--store",
        str(store),
        "--workers",
        "1",
        "--skip-bad",
        "--dataset",
    ]
    assert main([*command, str(data / "many")]) == 0
    after = open_store(store).manifest
    printed = capsys.readouterr().out
    assert [record.case_id for record in after.cases] == [*IDS[:3], "BRATS_005"]
    for words in (
        "1 new case, 3 cases",
        "2 bad cases",
        f"{before.split_hash} before, {after.split_hash} now",
    ):
        assert words in printed
    assert main([*command, str(data / "few")]) == 0
    printed = capsys.readouterr().out
    assert "0 new cases, 3 cases" in printed
    assert "left out" not in printed
    assert "before" not in printed, "the split is what it was"
    assert open_store(store).manifest == after
    listed = [
        json.loads(line)["case_id"]
        for line in (store / "quarantine.jsonl").read_text().splitlines()
    ]
    assert listed == ["BRATS_003", "BRATS_004"]


@given(
    have=st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any),
    new=st.integers(0, 30),
    cases_each=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_nothing_moves_no_patient_straddles_and_shares_are_kept_within_a_patient(
    have, new, cases_each, seed
):
    old = {}
    split = {}
    for name, count in zip(SPLITS, have):
        split[name] = tuple(f"{name}{number}" for number in range(count))
        old.update({case_id: case_id for case_id in split[name]})
    more = {
        f"new{patient}-{number}": f"new{patient}"
        for patient in range(new)
        for number in range(cases_each)
    }
    dealt = deal_cases(split, old, more, seed=seed)
    assert all(set(split[name]) <= set(dealt[name]) for name in SPLITS)
    assert sorted(sum(dealt.values(), ())) == sorted([*old, *more])
    patients = {**old, **more}
    assert (
        max(Counter(p for name in SPLITS for p in {patients[c] for c in dealt[name]}).values()) == 1
    )
    total = sum(have) + new
    for name, count in zip(SPLITS, have):
        now = len({patients[case_id] for case_id in dealt[name]})
        assert abs(now - count / sum(have) * total) < 1


def test_a_case_with_a_resection_cavity_does_not_join_a_store_without_that_region(tmp_path):
    for name in ("few/BraTS-GLI-00005-100", "more/BraTS-GLI-00006-100", "more/BraTS-GLI-00007-100"):
        files = brats_case(tmp_path / name)
    write_nifti(files["seg"], tiny_label(1, 2, 3, 4))
    prepare(tmp_path / "few", tmp_path / "store", fractions=(1, 0, 0), workers=1)
    with pytest.raises(
        InputError, match=r"BraTS-GLI-00007-100.* must hold only the codes .*, got 4 \(1 voxels\)"
    ):
        append(tmp_path / "store", tmp_path / "more", workers=1)
    done = append(tmp_path / "store", tmp_path / "more", workers=1, skip_bad=True)
    assert (done.new, done.bad) == (("BraTS-GLI-00006-100",), ("BraTS-GLI-00007-100",))
    assert verify(tmp_path / "store", workers=1) == ()
    assert "RC" not in done.manifest.regions
    prepare(tmp_path / "more", tmp_path / "rc", fractions=(1, 0, 0), workers=1)
    assert append(tmp_path / "rc", tmp_path / "few", workers=1).manifest.regions["RC"] == (4,)


def test_the_store_and_not_the_number_of_new_cases_says_whether_orientation_is_given(data):
    for path in sorted((data / "few").rglob("*.nii.gz")):
        write_nifti(path, np.asarray(nibabel.load(path).dataobj), codes=(0, 0))
    prepare(data / "few", data / "store", fractions=(1, 1, 1), workers=1)
    names = [f"BRATS_{number:03d}.nii.gz" for number in range(3, 6)]
    training = [{"image": f"imagesTr/{name}", "label": f"labelsTr/{name}"} for name in names]
    new = decathlon(data / "new", 6, training=training)
    with pytest.raises(InputError) as caught:
        append(data / "store", new, workers=1)
    refused = [
        problem.split()[1] for problem in caught.value.problems if "must not give" in problem
    ]
    assert refused == ["BRATS_003", "BRATS_004", "BRATS_005"]
