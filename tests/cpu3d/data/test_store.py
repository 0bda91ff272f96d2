import json
import re

import pytest

from cpu3d.data.cases.case import load_case
from cpu3d.data.datasets.dataset import CaseFiles
from cpu3d.data.manifest import remake
from cpu3d.data.store import open_store, sealed, write_store
from cpu3d.data.stores.convert import write_arrays
from cpu3d.errors import InputError
from tests.cpu3d.data.made_datasets import (
    manifest_of,
    tiny_image,
    tiny_label,
    write_nifti,
)

ALONE = {"train": ["a"], "val": [], "test": []}


@pytest.fixture
def small_store(tmp_path):
    """A store of two cases, "b" without a label: its folder and manifest."""
    folder = tmp_path / "store"
    records = []
    (folder / "cases").mkdir(parents=True)
    for case_id in ("a", "b"):
        image = write_nifti(tmp_path / f"{case_id}.nii.gz", tiny_image(ord(case_id)))
        label = None
        if case_id == "a":
            label = write_nifti(tmp_path / "seg.nii.gz", tiny_label(1))
        files = CaseFiles(case_id, case_id, (image,), label)
        case = load_case(files, channels=("CT",), labels={0: "no", 1: "yes"})
        arrays = (case.image, case.label)
        records.append(write_arrays(folder, case.record, *arrays, format_="npy", cropped=True))
    manifest = manifest_of(records, {"train": ("a",), "val": ("b",)})
    write_store(folder, manifest)
    return folder, manifest


def test_a_check_names_every_damaged_file_at_once_and_reads_no_voxel(small_store):
    folder, manifest = small_store
    assert not open_store(folder).label("a").flags.writeable
    with pytest.raises(InputError, match="case b must have a label"):
        open_store(folder).label("b")
    open_store(folder).check(manifest.cases)
    (folder / "cases/a.x.npy").unlink()
    (folder / "cases/a.y.npy").write_bytes(b"")
    (folder / "cases/b.x.npy").write_bytes(b"0" * manifest.cases[1].files["x"].size_bytes)
    with pytest.raises(InputError) as caught:
        open_store(folder).check(manifest.cases)
    for name, problem in zip(("a.x.npy", "a.y.npy", "b.x.npy"), caught.value.problems):
        assert name in problem


def change_manifest(folder, change):
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(sealed(change(content) or content)))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda content: content.update(schema=1), "of schema 2, got schema 1"),
        (lambda content: {"schema": 2}, "complete JSON of schema 2, got no 'cases'"),
        (lambda content: content.update(split=["a", "b"]), "complete"),
        (lambda content: content.pop("labels") and None, "complete"),
        (lambda content: content.update(name="\x1b[2J"), r"control characters, got '\\x1b\[2J'"),
        (lambda content: content["regions"].update({"\x1b": [1]}), r"control .*, got '\\x1b'"),
        (lambda content: content.update(split_seed="x"), r"manifest.split_seed must be int, got x"),
        (lambda content: content["split"]["val"].append("a"), "got a split of other cases"),
        (lambda content: content["cases"].update(a="0"), r"a\.json must .*, got other bytes"),
        (lambda content: content["cases"].update({"../c": "0"}), "complete JSON"),
    ],
)
def test_a_manifest_that_is_damaged_or_of_another_version_is_refused(small_store, change, rule):
    folder, _ = small_store
    change_manifest(folder, change)
    with pytest.raises(InputError, match=rule):
        open_store(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"split_hash": "0"},
        {"regions": {"none": [0], "all": [1]}},  # in another order
        {"sha256": ""},
        {"split_seed": float("nan")},
    ],
)
def test_a_manifest_that_is_edited_is_refused(small_store, change):
    folder, manifest = small_store
    write_store(folder, remake(manifest, regions={"all": (1,), "none": (0,)}))
    open_store(folder)
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(InputError, match=r"must be complete JSON .*, got an edited manifest"):
        open_store(folder)


def test_a_folder_without_a_manifest_is_refused(small_store):
    folder, _ = small_store
    (folder / "manifest.json").unlink()
    with pytest.raises(InputError, match="found none"):
        open_store(folder)


def test_a_data_set_in_place_of_a_store_is_named_with_the_command_that_makes_a_store(tmp_path):
    (tmp_path / "dataset.json").write_text("{}")
    with pytest.raises(InputError, match=f"prepare --dataset {re.escape(str(tmp_path))}"):
        open_store(tmp_path)
