import numpy as np

from cpu3d.compare.error_maps import in_regions, label_colours
from cpu3d.config import RunConfig

REGIONS = {"WT": (1, 2, 3), "TC": (2, 3), "ET": (3,)}
NAMES = {0: "background", 1: "edema", 2: "core", 3: "rim"}


def config(*regions):
    return RunConfig(regions=regions, region_codes=REGIONS, label_names=NAMES)


def test_what_no_region_tells_apart_is_equal():
    """The truth of a network that learnt WT alone has its core and rim in WT: they are no errors."""
    label = np.array([0, 1, 2, 3], np.uint8).reshape(4, 1, 1)
    assert in_regions(label, {"WT": REGIONS["WT"]}).ravel().tolist() == [0, 1, 1, 1]
    assert in_regions(label, {"TC": REGIONS["TC"], "ET": REGIONS["ET"]}).ravel().tolist() == [0, 0, 2, 3]
    assert in_regions(label, REGIONS).ravel().tolist() == [0, 1, 2, 3]


def test_colours_are_of_the_regions_that_were_learnt():
    assert [name for _, name in label_colours(config("WT")).values()] == ["WT (edema, core, rim)"]
    every = label_colours(config("WT", "TC", "ET"))
    assert {code: name for code, (_, name) in every.items()} == {1: "edema", 2: "core", 3: "rim"}
    assert len({colour for colour, _ in every.values()}) == 3
