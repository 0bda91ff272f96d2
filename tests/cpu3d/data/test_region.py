import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpu3d.data.region import Region, bounding_box, centred, crop, paste, whole
from cpu3d.data.resolution import Resizing, field_of


@pytest.mark.parametrize(
    ("resolution", "field"), [(0.5, (48, 64, 20)), ((0.5, 0.5, 1), (48, 64, 10))]
)
def test_a_field_is_what_the_network_covers(resolution, field):
    assert field_of((24, 32, 10), resolution) == field


@pytest.mark.parametrize(
    ("resolution", "first"), [(0.5, 55.5), ((0.5, 0.5, 1), 5.5), ((1, 0.5, 0.5), 55)]
)
def test_growing_gives_a_ramp_back_between_the_outermost_centres(resolution, first):
    """The first voxel has the value of the first centre."""
    resizing = Resizing((8, 6, 4), resolution)
    x, y, z = np.indices(field_of((8, 6, 4), resolution))
    ramp = np.stack([x + 10 * y + 100 * z, -x - 10 * y - 100 * z], -1)[None].astype(np.float32)
    back = resizing.grow(resizing.shrink(ramp)).numpy()
    inside = (slice(None), *(slice(1, -1),) * 3)
    np.testing.assert_allclose(back[inside], ramp[inside], rtol=1e-4, atol=2e-3)
    assert back[0, 0, 0, 0, 0] == pytest.approx(first)


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


def test_an_empty_mask_is_bounded_by_the_whole_volume():
    assert bounding_box(np.zeros((2, 3, 4), bool)) == whole((2, 3, 4))


def test_an_odd_voxel_is_added_behind_and_left_out_in_front():
    inside = centred(Region((3, 3, 3), (4, 5, 6)), (5, 5, 5), (20, 20, 20))
    assert inside.start == (3, 3, 4)
    assert centred(whole((4, 5, 6)), (7, 7, 7), (4, 5, 6)).start == (-1, -1, 0)


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
