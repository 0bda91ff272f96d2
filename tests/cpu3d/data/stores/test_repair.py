"""Lost and damaged files of a finished store come back from their sources, whichever command finds
them."""

import os
import shutil

import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.data.store import open_store
from cpu3d.data.stores.prepare import StoreSettings, prepare
from cpu3d.data.stores.upkeep import append, verify
from cpu3d.errors import InputError
from tests.cpu3d.data.made_datasets import (
    content_of,
    decathlon,
    tiny_image,
    tiny_label,
    write_nifti,
)

FLOAT = 0.37  # makes an image of whole numbers one that only steps can hold


def second_set(folder, **changes):
    """A data set with the cases 3 to 5 alone."""
    decathlon(folder, 6, **changes)
    training = [
        {"image": f"imagesTr/BRATS_00{n}.nii.gz", "label": f"labelsTr/BRATS_00{n}.nii.gz"}
        for n in (3, 4, 5)
    ]
    return decathlon(folder, 6, training=training, **changes)


@pytest.fixture
def grown(tmp_path):
    """grown(**settings): a store of three cases that has grown by three of a data set with another
    name."""

    def make(**settings):
        decathlon(tmp_path / "first", 3)
        second_set(tmp_path / "second", name="SECOND")
        for number in (1, 4):  # one case of each with voxels that are no whole numbers
            image = (
                np.stack([tiny_image(90 + number + channel) for channel in range(4)], -1) * FLOAT
            )
            folder = tmp_path / ("first" if number == 1 else "second")
            write_nifti(folder / f"imagesTr/BRATS_00{number}.nii.gz", image.astype(np.float32))
        how = {"fractions": (1, 1, 1), "workers": 1, "settings": StoreSettings(**settings)}
        prepare(tmp_path / "first", tmp_path / "store", **how)
        append(tmp_path / "store", tmp_path / "second", workers=1)
        return tmp_path / "store"

    return make


def lose(store, way, number):
    """Lose or damage files of case `number`, as its store's owner might find them."""
    case_id = f"BRATS_00{number}"
    (image,) = store.glob(f"cases/{case_id}.x.*")
    (label,) = store.glob(f"cases/{case_id}.y.*")
    if way == "image":
        image.unlink()
    elif way == "label":
        label.unlink()
    elif way == "cut":
        image.write_bytes(image.read_bytes()[:-1])
    elif way == "record":
        (store / f"cases/{case_id}.json").unlink()
    elif way == "all of it":
        for path in (image, label, store / f"cases/{case_id}.json"):
            path.unlink()
    elif way == "flipped, then deleted as `verify` says":
        content = image.read_bytes()
        image.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        (problem,) = verify(store, workers=1)
        assert str(image) in problem
        assert "delete it and run `prepare` again" in problem
        image.unlink()


WAYS = ("image", "label", "cut", "record", "all of it", "flipped, then deleted as `verify` says")
PREPARE = ("prepare", "--store", "store", "--split", "1", "1", "1", "--workers", "1", "--dataset")
APPEND = ("store", "append", "--store", "store", "--workers", "1", "--dataset")


@pytest.mark.parametrize("command", [PREPARE, APPEND])
@pytest.mark.parametrize("way", WAYS)
def test_a_grown_store_gets_the_lost_files_of_each_of_its_data_sets_back(
    grown, tmp_path, monkeypatch, way, command
):
    store = grown()
    monkeypatch.chdir(tmp_path)
    before = content_of(store)
    lose(store, way, 1)
    assert main([*command, "first"]) == 0
    assert content_of(store) == before
    lose(store, way, 4)
    assert main([*APPEND, "second"]) == 0
    assert content_of(store) == before


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"format": "b2nd", "crop": True}, ["--format", "b2nd", "--crop"]),
    ],
)
def test_packed_and_cropped_files_come_back_to_the_byte(
    grown, tmp_path, monkeypatch, settings, options
):
    store = grown(**settings)
    monkeypatch.chdir(tmp_path)
    before = content_of(store)
    for command, number in (([*PREPARE, "first", *options], 1), ([*APPEND, "second"], 4)):
        lose(store, "all of it", number)
        assert main(command) == 0
        assert content_of(store) == before


def test_a_lost_record_does_not_come_back_with_other_voxels(grown, tmp_path):
    store = grown()
    before = (store / "manifest.json").read_bytes()
    lose(store, "record", 1)
    write_nifti(tmp_path / "first/labelsTr/BRATS_001.nii.gz", tiny_label(3, 2, 1))
    with pytest.raises(InputError, match="BRATS_001 must get back the voxels of store"):
        append(store, tmp_path / "first", workers=1)
    assert (store / "manifest.json").read_bytes() == before
    with pytest.raises(InputError, match=r"BRATS_001\.json must .*, got other bytes"):
        open_store(store)


def test_an_edited_record_is_refused_and_made_again(grown, tmp_path):
    store = grown()
    before = content_of(store)
    path = store / "cases/BRATS_001.json"
    path.write_text(path.read_text().replace('"zeroed_voxels":0', '"zeroed_voxels":1'))
    with pytest.raises(InputError, match=r"BRATS_001\.json must .*, got other bytes than were"):
        open_store(store)
    assert append(store, tmp_path / "first", workers=1).repaired == ("BRATS_001",)
    assert content_of(store) == before


@pytest.mark.parametrize("command", [PREPARE, APPEND])
def test_a_lost_case_of_another_data_set_is_named(grown, tmp_path, monkeypatch, capsys, command):
    store = grown()
    monkeypatch.chdir(tmp_path)
    lose(store, "image", 4)
    assert main([*command, "first"]) == 0
    assert "BRATS_004 are lost or damaged, and first does not have them" in capsys.readouterr().err
    assert main([*APPEND, "second"]) == 0
    assert "are lost" not in capsys.readouterr().err


@pytest.mark.parametrize("command", [PREPARE, APPEND])
def test_a_lost_case_whose_source_has_changed_or_gone_is_named_and_the_others_come_back(
    grown, tmp_path, monkeypatch, capsys, command
):
    store = grown()
    monkeypatch.chdir(tmp_path)
    before = content_of(store)
    for number in range(3):
        lose(store, "image", number)
    write_nifti(tmp_path / "first/labelsTr/BRATS_000.nii.gz", tiny_label(3, 2, 1))
    (tmp_path / "first/imagesTr/BRATS_002.nii.gz").unlink()
    capsys.readouterr()
    assert main([*command, "first"]) == 2
    printed = capsys.readouterr().err
    assert "case BRATS_000 must be the one of store store, got other files" in printed
    assert "case BRATS_002 of store store must be made again" in printed
    assert "imagesTr/BRATS_002.nii.gz" in printed
    assert "BRATS_001 " not in printed
    back = content_of(store)
    assert {name: back[name] for name in before if "BRATS_001" in name} == {
        name: content for name, content in before.items() if "BRATS_001" in name
    }
    assert back["manifest.json"] == before["manifest.json"]


def test_a_repair_that_was_killed_is_continued(grown, tmp_path, monkeypatch):
    store = grown()
    before = content_of(store)
    shutil.rmtree(store / "cases")
    real = os.replace
    written = []

    def killed(self, target):
        if len(written) == 4:  # the first case is whole, of the second only the image
            raise KeyboardInterrupt
        written.append(target)
        return real(self, target)

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            append(store, tmp_path / "first", workers=1)
    with pytest.raises(InputError, match="2 lost cases made again"):
        append(store, tmp_path / "first", workers=1)
    append(store, tmp_path / "second", workers=1)
    assert content_of(store) == before


def test_a_store_with_patients_from_a_table_needs_the_table_for_new_cases_only(tmp_path):
    (tmp_path / "table").write_text("".join(f"BRATS_00{n},p{n % 4}\n" for n in range(6)))
    store = tmp_path / "store"
    table = tmp_path / "table"
    prepare(decathlon(tmp_path / "first", 4), store, fractions=(1, 1, 1), workers=1, patients=table)
    before = content_of(store)
    lose(store, "image", 2)
    assert append(store, tmp_path / "first", workers=1).repaired == ("BRATS_002",)
    assert content_of(store) == before
    lose(store, "all of it", 3)
    with pytest.raises(InputError, match="--patients must be given"):
        append(store, tmp_path / "first", workers=1)
    append(store, tmp_path / "first", workers=1, patients=table)
    assert content_of(store) == before
    with pytest.raises(InputError, match="--patients must be given"):
        append(store, decathlon(tmp_path / "more", 6), workers=1)
    assert content_of(store) == before


def test_the_manifest_of_a_grown_store_comes_back_by_the_same_commands_in_their_order(
    grown, tmp_path
):
    store = grown()
    hash_ = open_store(store).manifest.split_hash
    before = content_of(store)
    (store / "manifest.json").unlink()
    prepare(tmp_path / "first", store, fractions=(1, 1, 1), workers=1)
    append(store, tmp_path / "second", workers=1)
    assert open_store(store).manifest.split_hash == hash_
    assert content_of(store) == before
