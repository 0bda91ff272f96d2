"""The one region that a lean step is given, by hand: a network of one filter on 64^3, whose map is 1 MiB in float32."""

import dataclasses

import pytest

from memory_estimator.region import MIB, region_bytes
from models.config import POLICIES, UNetConfig

SHAPE = (64, 64, 64)
UNET = UNetConfig(channels=1, outputs=1, filters=1, depth=2, norm="none", policy="balanced")
# The image 1 map, the encoder 4, the pool and the bottom's four (1 + 4 * 2) / 8, the decoder's up-sampled 1, join 2 and
# block 4, the head 1: 14.125 MiB, and a few KiB of weights.


def mib(shape=SHAPE, micro=1, **changes):
    size = region_bytes(dataclasses.replace(UNET, **changes), shape, micro)
    assert size % MIB == 0
    return size // MIB


def test_it_is_the_share_of_all_maps_in_whole_mib():
    assert mib() == 15
    assert mib(policy="lean") == 12  # 0.8 of them is 11.3


def test_a_step_for_speed_has_none():
    assert mib(policy="speed") == 0


def test_maps_of_half_the_bytes_need_half_and_those_of_two_volumes_twice():
    assert mib(dtype="bfloat16") == 8
    assert mib(micro=2) == 29


def test_weights_are_counted_four_times():
    # Cicek's widths on a grid of two voxels a side: maps take a few KiB. By 64 channels, the encoder's second
    # convolution is 1 to 2, the bottom's are 2 to 2 and 2 to 4, the decoder's 4 to 4 (up), 2 + 4 to 2 and 2 to 2.
    weights = 27 * 64**2 * (1 * 2 + 2 * 2 + 2 * 4 + (2 + 4) * 2 + 2 * 2) + 8 * 64**2 * 16
    assert mib((2, 2, 2), filters=64, network="cicek2016") == pytest.approx(4 * 4 * weights / MIB, abs=2)


@pytest.mark.parametrize("policy", POLICIES[1:])
@pytest.mark.parametrize("more", [{"filters": 2}, {"shape": (64, 64, 96)}, {"micro": 2}, {"residual": True}], ids=str)
def test_it_grows_with_the_work(policy, more):
    assert mib(policy=policy, **more) > mib(policy=policy)


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_a_shape_that_the_network_cannot_take_is_refused(policy):
    with pytest.raises(ValueError, match=r"\(64, 63, 64\) must be divisible by 2"):
        mib((64, 63, 64), policy=policy)
