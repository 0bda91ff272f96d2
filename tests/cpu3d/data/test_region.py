import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpu3d.data.region import Region, bounding_box, centred, crop, paste, whole
from cpu3d.data.resolution import (
    Resizing,
    field_of,
    growing,
    resizing_for,
    shrinking,
    turning_spacing,
)


@pytest.mark.parametrize(
    ("grid", "resolution", "divisors", "seen", "field"),
    [
        ((45, 47, 33), 0.5, 8, (24, 24, 24), (48, 48, 48)),
        ((45, 47, 9), 0.5, (8, 16, 2), (24, 32, 6), (48, 64, 12)),
        ((45, 47, 9), (0.5, 0.5, 1), (8, 16, 2), (24, 32, 10), (48, 64, 10)),
        ((10, 20, 31), 0.5, 1, (5, 10, 16), (10, 20, 32)),
    ],
)
def test_the_network_sees_all_of_an_extent_and_the_field_is_what_that_covers(
    grid, resolution, divisors, seen, field
):
    assert field_of(seen, resolution, grid) == field
    resizing = resizing_for(grid, resolution, divisors, at_least=(9, 1, 1))
    assert resizing.seen == (max(seen[0], 9), *seen[1:])


@pytest.mark.parametrize(("axis", "resolution"), [(2, (0.5, 0.5, 1)), (0, (1, 0.5, 0.5))])
def test_an_axis_of_full_resolution_keeps_its_voxels(axis, resolution):
    """What differs along this axis alone stays as it is, there and back."""
    resizing = Resizing((8, 6, 4), resolution)
    assert resizing.field[axis] == resizing.seen[axis]
    ramp = np.indices(resizing.field)[axis][None, ..., None].astype(np.float32)
    small = resizing.shrink(ramp).numpy()
    expected = np.indices(resizing.seen)[axis][None, ..., None]
    np.testing.assert_allclose(small, expected, atol=1e-5)
    np.testing.assert_allclose(resizing.grow(small), ramp, atol=1e-5)


@pytest.mark.parametrize(
    ("resolution", "sizes_mm"),
    [
        ((0.5, 0.5, 0.5), (0.9765625, 1.1, 5.0)),  # to the bit
        ((0.5, 0.5, 1), (2 * 0.9765625, 2.2, 5.0)),
    ],
)
def test_a_turn_sees_the_network_s_voxels(resolution, sizes_mm):
    assert turning_spacing((0.9765625, 1.1, 5.0), resolution) == sizes_mm


def test_growing_gives_a_ramp_back_between_the_outermost_centres():
    resolution = 0.5
    resizing = Resizing((8, 6, 4), resolution)
    for field, seen in zip(resizing.field, resizing.seen):
        for weights in (shrinking(seen, field, resolution), growing(field, seen, resolution)):
            np.testing.assert_allclose(weights.sum(1), 1, atol=1e-6)
            assert weights.min() >= 0
    x, y, z = np.indices(resizing.field)
    ramp = np.stack([x + 10 * y + 100 * z, -x - 10 * y - 100 * z], -1)[None].astype(np.float32)
    back = resizing.grow(resizing.shrink(ramp)).numpy()
    edge = int(np.ceil(0.5 / resolution))
    inside = (slice(None), *(slice(edge, -edge),) * 3)
    np.testing.assert_allclose(back[inside], ramp[inside], rtol=1e-4, atol=2e-3)
    assert back[0, 0, 0, 0, 0] == pytest.approx(
        111 * (0.5 / resolution - 0.5), abs=1e-3
    )  # the first centre's value


# --- Boxes ---

SHAPES = st.tuples(*[st.integers(1, 7)] * 3)
STARTS = st.tuples(*[st.integers(-6, 9)] * 3)


@given(SHAPES, STARTS, SHAPES)
def test_cropping_reads_every_voxel_where_it_is_and_pasting_is_the_way_back(shape, start, size):
    volume = np.arange(1, np.prod(shape) + 1).reshape(shape)
    region = Region(start, size)
    part = crop(volume, region)
    assert part.shape == size
    for index in np.ndindex(*size):
        at = tuple(a + i for a, i in zip(start, index))
        assert part[index] == (volume[at] if all(0 <= a < n for a, n in zip(at, shape)) else 0)
    kept = np.zeros(shape, bool)
    kept[region.slices(shape)] = True
    assert np.array_equal(paste(part, region, shape), np.where(kept, volume, 0))
    overlap = region.overlap(whole(shape))
    assert kept.any() == (overlap is not None)
    assert overlap is None or overlap == bounding_box(kept)


def test_an_empty_mask_is_bounded_by_the_whole_volume_and_an_empty_region_is_refused():
    assert bounding_box(np.zeros((2, 3, 4), bool)) == whole((2, 3, 4))
    with pytest.raises(ValueError, match="three positive numbers"):
        Region((0, 0, 0), (2, 0, 4))


@given(STARTS.filter(lambda s: min(s) >= 0), SHAPES, SHAPES, SHAPES)
def test_a_centred_region_stays_inside_where_it_fits_and_holds_the_volume_where_it_does_not(
    start, inner, size, extra
):
    shape = tuple(a + n + e for a, n, e in zip(start, inner, extra))
    region = centred(Region(start, inner), size, shape)
    assert region.size == size
    for a, b, n, want, inside_start, inside in zip(
        region.start, region.stop, shape, size, start, inner
    ):
        assert (a >= 0 and b <= n) if want < n else (a <= 0 and b >= n)
        if want >= inside:
            assert a <= inside_start
            assert b >= inside_start + inside
