"""Regions to codes and back: by hand, one voxel a question."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpu3d.data.labels import code_meanings, label_from_regions, own_codes, region_mask

DECATHLON = {"WT": (1, 2, 3), "TC": (2, 3), "ET": (3,)}
BRATS_2021 = {"WT": (1, 2, 4), "TC": (1, 4), "ET": (4,)}
ORGANS = {"liver": (1,), "spleen": (2,)}
NAMES = {0: "background", 1: "edema", 2: "non-enhancing tumor", 3: "enhancing tumour"}


def painted(regions, *answers):
    """The code painted for one voxel with these probabilities."""
    return int(label_from_regions(np.array(answers, np.float32).reshape(1, 1, 1, -1), regions)[0, 0, 0])


@pytest.mark.parametrize(
    ("regions", "oedema", "core", "enhancing"), [(DECATHLON, 1, 2, 3), (BRATS_2021, 2, 1, 4)], ids=["msd", "2021"]
)
def test_nested_regions_are_painted_in_the_data_sets_own_codes(regions, oedema, core, enhancing):
    assert painted(regions, 0.4, 0.3, 0.2) == 0
    assert painted(regions, 0.9, 0.3, 0.2) == oedema
    assert painted(regions, 0.9, 0.9, 0.2) == core
    assert painted(regions, 0.9, 0.9, 0.9) == enhancing


def test_the_most_specific_region_is_believed_one_half_is_inside_and_nan_is_outside():
    assert painted(DECATHLON, 0.1, 0.1, 0.9) == 3
    assert painted(DECATHLON, 0.5, 0.0, 0.0) == 1
    assert painted(DECATHLON, np.nan, np.nan, np.nan) == 0


@pytest.mark.parametrize("regions", [{"WT": (1,)}, {"WT": (1,), "ET": (256,)}])
def test_answers_that_do_not_match_the_regions_or_uint8_are_refused(regions):
    with pytest.raises(ValueError, match=r"codes lie in 0\.\.255"):
        label_from_regions(np.zeros((1, 1, 1, 2)), regions)


def test_regions_of_equal_size_compete_by_probability_and_the_first_wins_a_tie():
    assert painted(ORGANS, 0.6, 0.8) == 2
    assert painted(ORGANS, 0.8, 0.6) == 1
    assert painted(ORGANS, 0.7, 0.7) == 1
    assert painted(ORGANS, 0.2, 0.6) == 2


def test_a_network_that_only_knows_the_whole_tumour_writes_its_first_code_and_says_what_it_means():
    regions = {"WT": (1, 2, 3)}
    assert painted(regions, 0.9) == 1
    assert code_meanings(regions, NAMES) == {0: "background", 1: "WT (edema, non-enhancing tumor, enhancing tumour)"}


def test_a_region_that_smaller_ones_make_up_paints_nothing():
    regions = {"both": (1, 2), "one": (1,), "two": (2,)}
    assert own_codes(regions) == {"both": (), "one": (1,), "two": (2,)}
    assert painted(regions, 0.9, 0.1, 0.1) == 0
    assert painted(regions, 0.9, 0.1, 0.8) == 2


@given(st.sampled_from([DECATHLON, BRATS_2021, ORGANS]), st.integers(0, 2**32 - 1))
def test_painting_the_masks_of_a_label_gives_that_label(regions, seed):
    codes = sorted({0}.union(*regions.values()))
    label = np.random.default_rng(seed).choice(np.array(codes, np.uint8), (3, 4, 2))
    masks = np.stack([region_mask(label, own) for own in regions.values()], axis=-1)
    np.testing.assert_array_equal(label_from_regions(masks, regions), label)
