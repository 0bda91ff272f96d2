"""What was decided for a data set, and why."""

import dataclasses

import pytest

from cpu3d.data.cases.resample import Keep
from cpu3d.data.store import Store, open_store
from cpu3d.data.stores.prepare import prepare
from cpu3d.data.stores.store_decisions import (
    decisions_of,
    depth_of_store,
    strides_of_store,
)
from models.strides import strides_text
from tests.cpu3d.data.spaced import spaced_set

THIN = (1.0, 1.0, 1.0)
SPLIT = {"train": ("a", "b"), "val": ("c",), "test": ("d",)}


def prepared(tmp_path, spacings, **how):
    """A store of two cases to train on, one to validate, one to test, of these spacings."""
    cases = dict(zip("abcd", spacings))
    data = spaced_set(tmp_path / "data", cases)
    prepare(data, tmp_path / "store", workers=1, fractions=(2, 1, 1), **how)
    store = open_store(tmp_path / "store")
    return store.with_split(SPLIT)


def with_boxes(store, boxes):
    """The store, with these boxes of what is there."""
    records = []
    for record, box in zip(store.manifest.cases, boxes):
        region = dataclasses.replace(record.box, size=box)
        records.append(dataclasses.replace(record, box=region, shape=box))
    manifest = dataclasses.replace(store.manifest, cases=tuple(records))
    return Store(store.folder, manifest)


@pytest.mark.parametrize(
    ("boxes", "patch", "seen", "depth"),
    [
        # the hippocampus' median: 36 50 35, 18 25 18, 9 13 9, 5 7 5
        ([(31, 40, 24), (36, 50, 35), (43, 59, 47)], None, "36 x 50 x 35", 4),
        # of the test split, which decides nothing, it would be five
        ([(36, 50, 35)] * 3 + [(160, 192, 160)], None, "36 x 50 x 35", 4),
        ([(138, 177, 144)] * 4, None, "138 x 177 x 144", 5),
        # the median of each axis: 40 40 40
        ([(40, 8, 40), (8, 40, 40), (40, 40, 8)], None, "40 x 40 x 40", 4),
        ([(138, 177, 144)] * 4, (40, 40, 40), "40 x 40 x 40", 4),
        ([(3, 3, 3)] * 4, None, "3 x 3 x 3", 2),
    ],
)
def test_levels_end_where_no_axis_of_the_median_case_keeps_four_voxels(
    tmp_path, boxes, patch, seen, depth
):
    store = with_boxes(prepared(tmp_path, [THIN] * 4), boxes + boxes[:1] * (4 - len(boxes)))
    made, why = depth_of_store(store, "brain", 5, patch)
    assert made == depth
    assert f"the median case has {seen} voxels" in why


def test_strides_are_by_the_voxels_of_training_and_validation(tmp_path):
    store = prepared(tmp_path, [(1.0, 1.0, 4.0)] * 3 + [THIN], spacing=Keep.OFF)
    assert (store.manifest.largest_shape, store.manifest.largest_box[2]) == ((48, 40, 32), 30)
    strides, why = strides_of_store(store, (48, 40, 32), 4)
    # 1 1 4, 2 2 4, 4 4 4 mm; 48 40 32 voxels become 12 10 32 and then 6 5 16
    assert strides_text(strides) == "2,2,1 2,2,1 2,2,2"
    assert "48 x 40 x 32" in why
    assert "1 x 1 x 4 mm" in why
    decided = {row.name: row.value for row in decisions_of(store)}
    # the median brain has 44 36 8, then 22 18 8, 11 9 8, 6 5 4
    assert (decided["levels"], decided["strides"]) == ("4", "2,2,1 2,2,1 2,2,2")
    assert store.manifest.largest_box == (44, 36, 30)
    assert decided["padded grid"] == "48 x 40 x 30"


@pytest.mark.parametrize(("ignore", "value"), [(None, "none"), (2, "2 core")])
def test_regions_have_their_labels_and_the_ignored_one_is_named(tmp_path, ignore, value):
    store = prepared(tmp_path, [THIN] * 4)
    manifest = dataclasses.replace(store.manifest, ignore=ignore)
    decided = {row.name: row.value for row in decisions_of(Store(store.folder, manifest))}
    assert (decided["region edema"], decided["ignored label"]) == ("1 edema", value)
