"""The one region that a lean step is given, by hand: a network of one filter on 64^3, whose map is 1 MiB in float32."""

import dataclasses

import pytest

from memory_estimator.region import MIB, region_bytes
from models.config import POLICIES, UNetConfig

SHAPE = (64, 64, 64)
UNET = UNetConfig(channels=1, outputs=1, filters=1, depth=2, norm="none", policy="balanced")
# The image 1 map, the encoder 4, the pool and the bottom's four (1 + 4 * 2) / 8, the decoder's up-sampled 1, join 2 and
# block 4, the head 1: 14.125 MiB, and a few KiB of weights.


def mib(shape=SHAPE, micro=1, host_bytes=None, **changes):
    size = region_bytes(dataclasses.replace(UNET, **changes), shape, micro, host_bytes)
    assert size % MIB == 0
    return size // MIB


def test_it_is_the_first_power_of_two_that_holds_the_share_of_all_maps():
    # 1.15 of 14.125; 0.9 of them is 12.7.
    assert mib() == 32
    assert mib(policy="lean") == 16
    assert mib(policy="lean", dtype="bfloat16") == 8
    assert mib(policy="lean", micro=2) == 32
    assert mib(policy="lean", micro=3) == 64


def test_a_step_for_speed_has_none():
    assert mib(policy="speed") == 0


def test_no_region_is_larger_than_the_host():
    assert mib(host_bytes=16 * MIB) == 16
    assert mib(host_bytes=16 * MIB - 1) == 8


def test_weights_are_counted_four_times():
    # Cicek's widths on a grid of two voxels a side: maps take a few KiB. By 64 channels, the encoder's second
    # convolution is 1 to 2, the bottom's are 2 to 2 and 2 to 4, the decoder's 4 to 4 (up), 2 + 4 to 2 and 2 to 2.
    weights = 27 * 64**2 * (1 * 2 + 2 * 2 + 2 * 4 + (2 + 4) * 2 + 2 * 2) + 8 * 64**2 * 16
    assert 32 < 4 * 4 * weights / MIB < 64
    assert mib((2, 2, 2), filters=64, network="cicek2016") == 64


@pytest.mark.parametrize("policy", POLICIES[1:])
@pytest.mark.parametrize("more", [{"filters": 4}, {"shape": (64, 64, 256)}, {"micro": 4}], ids=str)
def test_four_times_the_work_has_a_larger_one(policy, more):
    assert mib(policy=policy, **more) > mib(policy=policy)


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_a_shape_that_the_network_cannot_take_is_refused(policy):
    with pytest.raises(ValueError, match=r"\(64, 63, 64\) must be divisible by 2"):
        mib((64, 63, 64), policy=policy)
