"""Which patch comes where: pure functions of seed and position, held against properties and small truths."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpu3d.data.region import Region, case_region
from cpu3d.data.sampling import PatchSampling, grid_starts, patch_at, patch_grid, wants_foreground
from cpu3d.errors import InputError

SHAPES = st.tuples(*[st.integers(1, 12)] * 3)
OVERLAPS = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 0.9])


def record(shape=(20, 18, 16), box=None, centres=None):
    """What of a case's record patches depend on."""
    box = box or Region((2, 3, 1), (15, 12, 13))
    return SimpleNamespace(shape=shape, box=box, centres=centres or {})


def draw(sampling, records, count=200):
    return [patch_at(position, sampling, records) for position in range(count)]


@st.composite
def cases(draw):
    """A case with a box in its grid, and centres of codes 1 and 2 in the box."""
    shape = draw(SHAPES)
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(draw(st.integers(1, n - a)) for a, n in zip(start, shape))
    voxel = st.tuples(*[st.integers(a, a + n - 1) for a, n in zip(start, size)])
    centres = {code: tuple(draw(st.lists(voxel, min_size=1, max_size=3))) for code in (1, 2)}
    return record(shape, Region(start, size), centres)


@pytest.mark.parametrize(("extent", "start"), [("brain", (7, 7, 6)), ("full", (8, 7, 7))])
def test_the_patch_in_the_centre_lies_around_the_middle_of_the_extent(extent, start):
    sampling = PatchSampling((5, 4, 3), "centre", extent=extent)
    assert sampling.per_case == 1
    assert {sample.region for sample in draw(sampling, [record()], 5)} == {Region(start, (5, 4, 3))}


@given(cases(), SHAPES, st.sampled_from(["random", "foreground"]), st.sampled_from(["brain", "full"]))
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
def test_a_foreground_patch_holds_a_voxel_that_was_asked_for(case, patch):
    sampling = PatchSampling(patch, "foreground", foreground=1.0, codes=((2,),))
    for sample in draw(sampling, [case], 20):
        assert any(holds(sample.region, centre) for centre in case.centres[2])


def holds(region, voxel):
    return all(a <= v < b for a, v, b in zip(region.start, voxel, region.stop))


@given(st.floats(0, 1), st.integers(0, 10**9), st.integers(1, 300))
def test_any_window_of_positions_has_its_share_of_foreground_to_one_patch(share, first, count):
    wanted = sum(wants_foreground(position, share) for position in range(first, first + count))
    assert abs(wanted - share * count) < 1 + 1e-6


@given(SHAPES, SHAPES, OVERLAPS)
def test_a_grid_covers_every_voxel_and_ends_flush_with_the_edges(size, patch, overlap):
    region = Region((3, -2, 5), size)
    covered = np.zeros(size, bool)
    patches = patch_grid(region, patch, overlap)
    assert len(set(patches)) == len(patches)
    for one in patches:
        assert one.size == patch
        inside = Region(tuple(a - b for a, b in zip(one.start, region.start)), patch)
        covered[inside.slices(size)] = True
    assert covered.all()
    for n, want, starts in zip(size, patch, grid_starts(size, patch, overlap)):
        if n >= want:
            assert (starts[0], starts[-1] + want) == (0, n)
        else:
            assert len(starts) == 1
        assert all(b - a <= max(want * (1 - overlap), 1) for a, b in zip(starts, starts[1:]))


def test_grid_starts_by_hand():
    assert grid_starts((10, 4, 3), (4, 4, 5), 0.5) == ((0, 2, 4, 6), (0,), (-1,))
    assert grid_starts((9, 9, 9), (4, 4, 4), 0.0) == ((0, 2, 5),) * 3


@given(cases(), cases(), SHAPES, SHAPES, OVERLAPS)
def test_positions_of_a_grid_run_through_every_patch_of_every_case(first, second, grid, patch, overlap):
    sampling = PatchSampling(patch, "grid", overlap=overlap, extent="full", grid=grid, shuffle=False)
    per_case = sampling.per_case
    for index, case in enumerate((first, second)):
        expected = patch_grid(case_region(case, grid, "full"), patch, overlap)
        assert len(expected) == per_case
        for place in {0, per_case // 2, per_case - 1}:
            sample = patch_at(2 * per_case + index * per_case + place, sampling, [first, second])
            assert (sample.epoch, sample.index, sample.region) == (1, index, expected[place])


def test_the_places_are_the_same_on_every_machine_and_version():
    # Golden: changing these would silently change every seeded patch run ever made.
    case = record(centres={1: ((4, 4, 4), (9, 9, 9)), 2: ((5, 10, 7),)})
    sampling = PatchSampling((6, 6, 6), "foreground", codes=((1, 2), (2,)), seed=1)
    samples = draw(sampling, [case] * 4, 6)
    assert [(s.index, s.region.start) for s in samples] == GOLDEN


def test_what_is_wrong_is_told_all_at_once():
    with pytest.raises(InputError) as caught:
        PatchSampling((4, 0, 4), "dense", foreground=2, overlap=1, extent="tile")
    assert [problem.split(" must ")[0] for problem in caught.value.problems] == [
        "sampling",
        "extent",
        "patch_shape",
        "foreground",
        "overlap",
    ]


GOLDEN = [(2, (10, 6, 7)), (0, (11, 3, 6)), (3, (3, 3, 2)), (1, (5, 5, 2)), (0, (9, 4, 3)), (1, (6, 7, 8))]
