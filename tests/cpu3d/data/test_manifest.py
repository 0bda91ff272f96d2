import json

import pytest

from cpu3d.data.manifest import ArrayFile, case_from_json, record_bytes, remake
from cpu3d.data.region import Region, whole
from tests.cpu3d.data.made_datasets import make_record, manifest_of


def read(record, **changes):
    """What a record is once it was written as JSON, with some fields changed there."""
    return case_from_json(json.dumps({**json.loads(record_bytes(record)), **changes}).encode())


@pytest.mark.parametrize(
    "changes",
    [
        {"case_id": "../a"},
        {"box": {"start": [0, 0, 0], "size": [9, 1, 1]}},
        {"stored": {"start": [0, 0, 0], "size": [9, 4, 4]}},
        {"stored": {"start": [-1, 0, 0], "size": [5, 4, 4]}},
        {"files": {"x": {"size_bytes": 1, "sha256": ""}}},
        {"stored": {"start": [0, 2, 0], "size": [4, 2, 4]}},
        {"box": {"start": [2, 2, 2], "size": [0, 1, 1]}},
        {"channel_std": [0.0]},
        {"label_voxels": {}},
        {"label_voxels": {"256": 1}},
    ],
)
def test_a_record_whose_files_would_be_elsewhere_or_that_contradicts_itself_is_none(changes):
    with pytest.raises(ValueError, match=r"(must|Expected|Invalid)"):
        read(make_record(), **changes)


def on_grid(case_id, shape, box, **changes):
    return make_record(case_id, shape=shape, stored=whole(shape), box=box, **changes)


def test_a_manifest_works_out_what_follows_from_its_cases():
    small = on_grid("b", (9, 4, 4), Region((0, 0, 0), (9, 1, 1)))
    large = on_grid("a", (4, 8, 5), Region((0, 3, 0), (2, 5, 5)), label_voxels={}, centres={})
    manifest = manifest_of([small, large])
    assert (manifest.split["train"], manifest.unlabelled) == (("a", "b"), ("a",))
    assert manifest.largest_shape == (9, 8, 5)


def test_the_split_hash_tells_moved_cases_and_other_voxels_and_nothing_else():
    cases = [make_record("a"), make_record("b")]
    manifest = manifest_of(cases, {"train": ["a"], "val": ["b"]})
    same = manifest_of(cases[::-1], {"val": ["b"], "train": ["a"]})
    # Runs refuse a store of another.
    assert same.split_hash == manifest.split_hash == "4e16801da7b0"
    files = {"x": ArrayFile(9, "0")}
    repacked = make_record("a", format="b2nd", files=files, stored=cases[0].box)
    assert remake(manifest, cases=[repacked, cases[1]]).split_hash == manifest.split_hash
    for changes in (
        {"split": {"train": ["b"], "val": ["a"], "test": []}},
        {"cases": [make_record("a", image_voxels_sha256="0"), cases[1]]},
        {"cases": [make_record("a", label_voxels_sha256="0"), cases[1]]},
    ):
        assert remake(manifest, **changes).split_hash != manifest.split_hash
