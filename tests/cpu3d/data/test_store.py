import json

import numpy as np
import pytest

from cpu3d.data.case import load_case
from cpu3d.data.layouts import CaseFiles
from cpu3d.data.store import (
    Manifest,
    case_from_json,
    image_path,
    label_path,
    manifest_from_json,
    open_store,
    to_json,
)
from cpu3d.errors import InputError


@pytest.fixture
def small_store(tmp_path, write_nifti, tiny_image, tiny_label):
    """A store of two cases, one without a label."""
    folder = tmp_path / "store"
    (folder / "cases").mkdir(parents=True)
    records = []
    for case_id in ("a", "b"):
        files = CaseFiles(
            case_id,
            case_id,
            (write_nifti(tmp_path / f"{case_id}.nii.gz", tiny_image(ord(case_id))),),
            write_nifti(tmp_path / "seg.nii.gz", tiny_label(1)) if case_id == "a" else None,
        )
        case = load_case(files, channels=("CT",), labels={0: "background", 1: "tumour"})
        np.save(image_path(folder, case_id), case.image)
        if case.label is not None:
            np.save(label_path(folder, case_id), case.label)
        records.append(case.record)
    manifest = Manifest(
        name="small",
        layout="decathlon",
        channels=("CT",),
        labels={0: "background", 1: "tumour"},
        regions={"tumour": (1,)},
        split={"train": ("a",), "val": ("b",), "test": ()},
        split_seed=3,
        cases=tuple(records),
        versions={"numpy": "1"},
    )
    (folder / "manifest.json").write_text(json.dumps(to_json(manifest)))
    return folder, manifest


def test_records_and_manifests_survive_json_unchanged(small_store):
    _, manifest = small_store
    through = json.loads(json.dumps(to_json(manifest)))
    assert manifest_from_json(through) == manifest
    assert case_from_json(json.loads(json.dumps(to_json(manifest.cases[0])))) == manifest.cases[0]


def test_an_open_store_maps_read_only_and_ready_for_zero_copy(small_store, tiny_image):
    folder, manifest = small_store
    store = open_store(folder)
    assert store.manifest == manifest
    assert [case.case_id for case in store.cases("train")] == ["a"]
    image = store.image("a")
    assert np.array_equal(image[..., 0], tiny_image(ord("a")))
    assert isinstance(image, np.memmap)
    assert not image.flags.writeable
    assert image.ctypes.data % 64 == 0
    assert store.label("a").dtype == np.uint8


def test_a_case_without_a_label_is_told(small_store):
    folder, _ = small_store
    assert not open_store(folder).case("b").has_label
    with pytest.raises(InputError, match="case b must have a label"):
        open_store(folder).label("b")


@pytest.mark.parametrize("change", [-1, 1])
def test_an_array_of_another_length_is_never_mapped(small_store, change):
    folder, _ = small_store
    path = image_path(folder, "a")
    content = path.read_bytes()
    path.write_bytes(content[:-1] if change < 0 else content + b"\0")
    with pytest.raises(InputError, match=r"a\.x\.npy must be \d+ bytes long"):
        open_store(folder).image("a")
    path.unlink()
    with pytest.raises(InputError, match="must exist"):
        open_store(folder).image("a")


def test_a_store_that_is_unfinished_damaged_or_of_another_version_is_refused(small_store):
    folder, manifest = small_store
    path = folder / "manifest.json"
    for content, rule in [
        (dict(to_json(manifest), schema=99), "schema 1, got 99"),
        ({"schema": 1}, "complete"),
        ([], "JSON with a schema"),
    ]:
        path.write_text(json.dumps(content))
        with pytest.raises(InputError, match=rule):
            open_store(folder)
    path.write_text('{"schema": 1')
    with pytest.raises(InputError, match="JSON with a schema"):
        open_store(folder)
    path.unlink()
    with pytest.raises(InputError, match="found none"):
        open_store(folder)


def test_the_split_hash_tells_a_moved_case_but_not_another_order(small_store):
    _, manifest = small_store
    content = to_json(manifest)
    content["split"] = {"train": ["b"], "val": ["a"], "test": []}
    moved = manifest_from_json(content)
    content["split"] = {"test": [], "val": ["b"], "train": ["a"]}
    same = manifest_from_json(content)
    assert moved.split_hash != manifest.split_hash
    assert same.split_hash == manifest.split_hash
    assert len(manifest.split_hash) == 12
