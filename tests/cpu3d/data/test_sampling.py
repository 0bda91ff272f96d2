"""The case and patch at a position, and its worker: pure functions of seed and position."""

from itertools import islice
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpu3d.data import sampling as module
from cpu3d.data.region import Region
from cpu3d.data.sampling import (
    PatchSampling,
    Share,
    VolumeSampling,
    patch_at,
    volume_at,
)
from cpu3d.data.store import case_region
from cpu3d.errors import InputError

SHAPES = st.tuples(*[st.integers(1, 12)] * 3)

# Golden: changing these would silently change every seeded run ever made.
ORDER = (3, 0, 7, 4, 2, 5, 1, 6)
WORDS = [1321962074176129191, 15925659190040627001]
PLACES = "2 (10, 6, 7); 0 (11, 3, 6); 3 (3, 3, 2); 1 (5, 5, 2); 0 (9, 4, 3); 1 (6, 7, 8)"

# --- Cases ---


def test_the_order_and_the_places_are_the_same_on_every_machine_and_version():
    assert module.permutation(8, seed=0, epoch=0) == ORDER
    assert list(islice(module.random_words(1, 2, 3), 2)) == WORDS
    case = record(centres={1: ((4, 4, 4), (9, 9, 9)), 2: ((5, 10, 7),)})
    sampling = PatchSampling((6, 6, 6), "foreground", codes=((1, 2), (2,)), seed=1)
    drawn = draw(sampling, [case] * 4, 6)
    assert "; ".join(f"{each.case_index} {each.region.start}" for each in drawn) == PLACES
    voxels = PatchSampling((1, 1, 1), "foreground", 1, ((1, 2), (2,)))
    starts = [each.region.start for each in draw(voxels, [case], 2000)]
    assert starts.count((5, 10, 7)) == pytest.approx(1500, abs=50)  # a region, then its code


# --- Patches ---


def record(shape=(20, 18, 16), box=None, centres=None, label_box=None):
    """The fields of a case's record on which patches depend."""
    box = box or Region((2, 3, 1), (15, 12, 13))
    return SimpleNamespace(shape=shape, box=box, centres=centres or {}, label_box=label_box)


def draw(sampling, records, count):
    return [patch_at(position, sampling, records) for position in range(count)]


@st.composite
def cases(draw):
    """A case with a box in its grid, and centres of codes 1 and 2 in the box."""
    ends = [
        sorted(draw(st.lists(st.integers(0, 12), min_size=2, max_size=2, unique=True)))
        for _ in range(3)
    ]
    box = Region(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
    voxel = st.tuples(*[st.integers(a, b - 1) for a, b in ends])
    centres = {code: tuple(draw(st.lists(voxel, min_size=1, max_size=3))) for code in (1, 2)}
    voxels = [voxel for own in centres.values() for voxel in own]
    start = tuple(map(min, zip(*voxels)))
    labels = Region(start, tuple(max(side) + 1 - a for a, side in zip(start, zip(*voxels))))
    return record(tuple(b + draw(st.integers(0, 3)) for _, b in ends), box, centres, labels)


@given(
    cases(), SHAPES, st.sampled_from(["random", "foreground"]), st.sampled_from(["brain", "full"])
)
def test_a_patch_stays_in_the_extent_along_every_axis_where_it_fits(case, patch, kind, extent):
    sampling = PatchSampling(patch, kind, foreground=0.5, codes=((1,), (2,)), extent=extent)
    inside = case.box if extent == "brain" else Region((0, 0, 0), case.shape)
    for sample in draw(sampling, [case], 20):
        assert sample.region.size == patch
        for a, n, first, size in zip(sample.region.start, patch, inside.start, inside.size):
            if n <= size:
                assert first <= a <= first + size - n
            else:
                assert a <= first
                assert a + n >= first + size


@given(cases(), SHAPES)
def test_a_foreground_patch_holds_a_voxel_that_was_asked_for_or_is_random_where_there_is_none(
    case, patch
):
    for sample in draw(
        PatchSampling(patch, "foreground", foreground=1.0, codes=((2,),)), [case], 20
    ):
        start = sample.region.start
        stop = sample.region.stop
        assert any(
            all(a <= v < b for a, v, b in zip(start, voxel, stop)) for voxel in case.centres[2]
        )
    other = PatchSampling(patch, "foreground", foreground=1.0, codes=((3,),))
    assert draw(other, [case], 5) == draw(PatchSampling(patch), [case], 5)


# --- Crops around the labels ---


@given(cases(), SHAPES, st.integers(1, 3), st.sampled_from(["brain", "full"]))
def test_a_crop_holds_the_labels_with_a_margin_wherever_it_is_in_the_extent(
    case, multiple, every, extent
):
    sampling = VolumeSampling(extent, multiple=multiple, whole_every=every, batch=2)
    inside = case.box if extent == "brain" else Region((0, 0, 0), case.shape)
    labels = case.label_box
    for position in range(12):
        region = volume_at(position, sampling, [case]).region
        if position // 2 % every == every - 1:  # the last step of so many is on the whole case
            assert region == case_region(case, sampling.grid_of(case), extent)
            continue
        for axis, (first, stop) in enumerate(zip(region.start, region.stop)):
            low = max(labels.start[axis] - 4, inside.start[axis])
            high = min(labels.stop[axis] + 4, inside.stop[axis])
            assert first <= low < high <= stop
            assert stop - first == -(-(high - low) // multiple[axis]) * multiple[axis]
            is_inside = inside.start[axis] <= first < stop <= inside.stop[axis]
            assert is_inside or stop - first > inside.size[axis]


def test_crops_are_at_all_places_around_the_labels():
    labels = Region((30, 30, 30), (1, 1, 1))
    case = record((64, 64, 64), Region((4, 0, 0), (60, 64, 64)), label_box=labels)
    crops = VolumeSampling(multiple=(16, 32, 64), is_crop=True)
    starts = [volume_at(position, crops, [case]).region.start for position in range(200)]
    assert [sorted(set(axis)) for axis in zip(*starts)] == [
        list(range(19, 27)),
        list(range(3, 27)),
        [0],
    ]


# --- Shares of several workers ---


def shares(workers, batch):
    return [Share(rank, workers, batch) for rank in range(workers)]


def test_samples_are_dealt_to_workers_by_hand():
    first, second = shares(2, 6)
    assert first.positions(0, 12) == (0, 1, 2, 6, 7, 8)
    assert second.positions(6, 12) == (9, 10, 11)
    assert (first.positions(1, 11), second.positions(4, 10)) == ((1, 2, 6, 7, 8), (4, 5, 9))
    assert (second.indices(6, 12), second.per_step) == (range(3, 6), 3)
    dealt = [share.singly().positions(0, 8) for share in shares(3, 6)]  # without steps
    assert dealt == [(0, 3, 6), (1, 4, 7), (2, 5)]
    assert Share(2, 3).positions(0, 2) == ()


@pytest.mark.parametrize(
    ("make", "rules"),
    [
        (
            lambda: PatchSampling((4, 0, 4), "dense", foreground=2, extent="tile"),
            "sampling must be one of random, foreground, got 'dense'; "
            "extent must be one of brain, full, got 'tile'; "
            "patch_shape must be three positive integers, voxels X, Y, Z, got (4, 0, 4); "
            "foreground must be in [0, 1], a share of the patches, got 2; ",
        ),
        (lambda: PatchSampling((4, 4)), "patch_shape must be three positive integers, "),
        (lambda: Share(rank=-1), "rank must be at least 0 and below the 1 workers, got -1; "),
        (lambda: Share(workers=0, batch=0), "workers must be at least 1, got 0; "),
        (lambda: Share(2, 2), "rank must be at least 0 and below the 2 workers, got 2; "),
        (lambda: Share(0, 3, 4), "batch must be a multiple of the 3 workers, got 4; "),
    ],
)
def test_values_out_of_range_are_named(make, rules):
    with pytest.raises(InputError) as caught:
        make()
    assert "".join(caught.value.problems).replace("give another", "").startswith(rules)
