import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cpu3d.data.region import Region, bounding_box, centred, crop, paste, whole

SHAPES = st.tuples(*[st.integers(1, 7)] * 3)


@given(SHAPES, st.tuples(*[st.integers(-6, 9)] * 3), SHAPES)
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


def test_an_odd_voxel_is_added_behind_and_left_out_in_front():
    inside = centred(Region((3, 3, 3), (4, 5, 6)), (5, 5, 5), (20, 20, 20))
    assert inside.start == (3, 3, 4)
    assert centred(Region((0, 3, 17), (2, 5, 3)), (6, 6, 6), (20, 20, 20)).start == (0, 3, 14)
    assert centred(whole((4, 5, 6)), (7, 7, 7), (4, 5, 6)).start == (-1, -1, 0)
