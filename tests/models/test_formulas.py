"""Numbers of the optimizers and the network, as papers and records have them."""

import math

import pytest

from models.config import UNetConfig
from models.layers import PRIOR_LOGIT
from models.optimizers import OPTIMIZERS


def test_muon_forgets_as_its_paper_says_and_descent_more_slowly():
    one, more = (OPTIMIZERS["muon"].rule_of((side, 1, 1, 8, 4)).slots for side in (1, 2))
    assert (one, more) == (("mean", "square"), ("mean",))
    assert (OPTIMIZERS["muon"].momentum, OPTIMIZERS["sgd"].momentum) == (0.95, 0.99)


def test_a_region_is_expected_in_one_voxel_of_twenty():
    assert 1 / (1 + math.exp(-PRIOR_LOGIT)) == pytest.approx(0.05, rel=1e-3)


def test_lean_samples_no_more_channels_up_at_a_time_than_the_skip_has():
    config = UNetConfig(network="cicek2016", policy="lean")
    assert config.up_parts(0) == [(0, 32), (32, 64)]
