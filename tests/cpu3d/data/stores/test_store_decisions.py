"""What was decided for a data set, and why."""

from pathlib import Path

import pytest

from cpu3d.data.cases.resample import Keep
from cpu3d.data.region import whole
from cpu3d.data.store import Store, open_store
from cpu3d.data.stores.prepare import prepare
from cpu3d.data.stores.store_decisions import (
    decisions_of,
    depth_of_store,
    median_extent,
    strides_of_store,
)
from models.strides import strides_text
from tests.cpu3d.data.made_datasets import make_record, manifest_of
from tests.cpu3d.data.spaced import spaced_set

SPLIT = {"train": ("a", "b"), "val": ("c",), "test": ("d",)}


def in_boxes(*boxes, **fields):
    """A store of cases, two to train on, one to validate, one to test, others in no part, that have
    these boxes."""
    records = []
    for case_id, shape in zip("abcdef", boxes):
        box = whole(shape)
        records.append(make_record(case_id, shape=shape, stored=box, box=box))
    return Store(Path("store"), manifest_of(records, SPLIT, **fields))


def decided(store):
    return {row.name: row.value for row in decisions_of(store)}


@pytest.mark.parametrize(
    ("boxes", "seen", "depth"),
    [
        # the hippocampus' median: 36 50 35, 18 25 18, 9 13 9, 5 7 5
        ([(31, 40, 24), (36, 50, 35), (43, 59, 47)], "36 x 50 x 35", 4),
        # of the test split, which decides nothing, it would be five
        ([(36, 50, 35)] * 3 + [(160, 192, 160)], "36 x 50 x 35", 4),
        ([(138, 177, 144)] * 3, "138 x 177 x 144", 5),
        # the median of each axis: 40 40 40
        ([(40, 8, 40), (8, 40, 40), (40, 40, 8)], "40 x 40 x 40", 4),
        ([(3, 3, 3)] * 3, "3 x 3 x 3", 2),
    ],
)
def test_levels_end_where_no_axis_of_the_median_case_keeps_four_voxels(boxes, seen, depth):
    store = in_boxes(*boxes, boxes[0])
    made, why = depth_of_store(store, median_extent(store, "brain"), 5)
    assert made == depth
    assert f"the median case has {seen} voxels" in why


def test_strides_are_by_the_voxels_of_training_and_validation(tmp_path):
    thick = (1.0, 1.0, 4.0)
    data = spaced_set(tmp_path / "data", dict(zip("abcd", [thick] * 3 + [(1.0, 1.0, 1.0)])))
    prepare(data, tmp_path / "store", workers=1, spacing=Keep.OFF)
    store = open_store(tmp_path / "store").with_split(SPLIT)
    strides, why = strides_of_store(store, (48, 40, 32), 4)
    # 1 1 4, 2 2 4, 4 4 4 mm; 48 40 32 voxels become 12 10 32 and then 6 5 16
    assert strides_text(strides) == "2,2,1 2,2,1 2,2,2"
    assert "48 x 40 x 32" in why
    assert "1 x 1 x 4 mm" in why
    made = decided(store)
    # the median brain has 44 36 8, then 22 18 8, 11 9 8, 6 5 4
    assert (made["levels"], made["strides"]) == ("4", "2,2,1 2,2,1 2,2,2")
    assert made["grids"] == "48 x 40 x 8 to 48 x 40 x 30, 48 x 40 x 8 in the median"


def test_regions_have_their_labels_and_the_ignored_one_is_named():
    labels = {0: "background", 1: "edema", 2: "core"}
    boxes = [(side, 40, 40) for side in (30, 40, 50, 60)]
    store = in_boxes(*boxes, labels=labels, regions={"all": (1,)}, ignore=2)
    made = decided(store)
    assert made["grids"] == "32 x 40 x 40 to 64 x 40 x 40, 56 x 40 x 40 in the median"
    assert (made["region all"], made["ignored label"]) == ("1 edema", "2 core")
