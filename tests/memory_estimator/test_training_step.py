"""The step on paper: consistent for every job, near the measured peaks, its operations by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_estimator.job import Job
from memory_estimator.step.allocator import Allocator, use
from memory_estimator.step.timeline import timeline, walk
from memory_estimator.step.training_step import training_step
from models.config import DTYPES, NETWORKS, NORMS, POLICIES, UPS, UNetConfig
from models.optimizers import OPTIMIZERS

BOTH = (False, True)
UNETS = {
    "channels": (1, 4),
    "outputs": (1, 3),
    "filters": (4, 8, 16, 24),
    "depth": (3,),
    "strides": ((), ((2, 2, 1), (2, 2, 2)), ((1, 2, 2), (2, 1, 1))),
    "network": tuple(NETWORKS),
    "norm": tuple(NORMS),
    "up": UPS,
    "residual": BOTH,
    "deep_supervision": BOTH,
    "dtype": tuple(DTYPES),
    "policy": POLICIES,
}
MORE = {
    "optimizer": tuple(OPTIMIZERS),
    "engine": ("itex", "stock"),
    "threads": (1, 2, 8),
}


def one_of_each(choices):
    return st.fixed_dictionaries({name: st.sampled_from(each) for name, each in choices.items()})


JOBS = st.builds(
    lambda unet, shape, batch, at_once, more: Job(
        UNetConfig(**unet), shape, batch, micro_batch=batch if at_once else 1, **more
    ),
    unet=one_of_each(UNETS),
    shape=st.tuples(*(st.sampled_from((16, 32, 48)),) * 3),
    batch=st.integers(1, 4),
    at_once=st.booleans(),
    more=one_of_each(MORE),
)


@given(JOBS)
@settings(max_examples=80)
def test_every_program_is_consistent(job):
    program = training_step(job)
    assert len({op.name for op in program.ops}) == len(program.ops)
    phases = dict.fromkeys(op.phase for op in program.ops)
    assert [*phases] == ["forward pass", "loss", "backward pass", "update"]
    # Raises if an operation reads a tensor that does not live.
    line = timeline(program)
    assert line.peak_bytes >= sum(tensor.bytes for tensor in program.resident)
    # What a step takes it gives back.
    allocator = Allocator()
    allocator.begin(program)
    stays = {tensor.name for tensor in program.resident}
    for _ in range(2):
        allocator.run(walk(program.ops, stays))
    for name in stays:
        allocator.give_back(name)
    assert allocator.counted_bytes == 0


THICK = ((2, 2, 1), (2, 2, 1), (2, 2, 2), (2, 2, 2))  # of slices some times as thick as wide


@pytest.mark.parametrize(
    ("unet", "shape", "more", "measured"),
    [
        ({"strides": THICK, "dtype": "bfloat16"}, (64, 64, 20), {}, 83_017_728),
        (
            {
                "policy": "lean",
                "deep_supervision": True,
                "up": "upsampling",
                "norm": "batch",
                "dtype": "bfloat16",
            },
            (96, 96, 96),
            {},
            159_875_072,
        ),
        (
            {"policy": "lean", "depth": 4, "filters": 8, "norm": "batch"},
            (64, 64, 48),
            {"batch": 2, "optimizer": "adam", "freeze": "encoder"},
            53_231_616,
        ),
        (
            {"policy": "lean", "channels": 6, "outputs": 1, "filters": 7, "norm": "none"},
            (48, 48, 48),
            {"batch": 2, "optimizer": "sgd"},
            31_570_688,
        ),
    ],
)
def test_the_allocators_peak_is_the_measured_one(unet, shape, more, measured):
    """get_memory_info("CPU:0")["peak"] from the third step on: TensorFlow 2.15.1, ITEX 2.15.0.0,
    two threads."""
    job = Job(UNetConfig(**unet), shape, threads=2, **more)
    assert use(training_step(job)).peak_bytes == pytest.approx(measured, rel=0.01)


def test_norms_and_biases_have_slots_and_sums_if_they_are_trained():
    """16 channels with two numbers each, and a bias; of the decoder, which is not frozen, 4."""
    unet = UNetConfig(channels=1, outputs=1, filters=2, depth=2)
    program = training_step(Job(unet, (4, 4, 4), batch=2, freeze="encoder"))
    sizes = {tensor.name: tensor.bytes for tensor in program.resident}
    made = [sizes[f"{what}norms and biases"] for what in ("", "slots of ", "sums of ")]
    assert made == [4 * 33, 2 * 4 * 9, 4 * 9]


def test_a_copy_of_a_kernel_does_not_take_the_place_of_the_next_map():
    """The paper's network: each gradient of an up-sampled map lies where that map was."""
    unet = UNetConfig(
        network="cicek2016",
        channels=1,
        outputs=1,
        filters=32,
        depth=4,
        norm="batch",
        dtype="bfloat16",
    )
    taken = use(training_step(Job(unet, (240, 240, 144), 16, micro_batch=1, optimizer="adam")))
    assert taken.resident_bytes < 1.1 * taken.peak_bytes  # 1.32 with the copy in the free place


FINE = 16**3
COARSE = 8**3


@pytest.mark.parametrize(
    ("name", "kind", "flops", "traffic_bytes"),
    [
        ("encoder0_conv1", "convolve", 54 * FINE * 2 * 4, 4 * (FINE * (2 + 4) + 27 * 2 * 4)),
        # A gradient is formed on reading, from that of its norm and the map: four channels each.
        (
            "decoder0_conv1/filter_gradient",
            "filter_gradient",
            54 * FINE * 8 * 4,
            4 * (FINE * (8 + 4 + 4) + 27 * 8 * 4),
        ),
        ("decoder0_up", "up", 2 * FINE * 8 * 4, 4 * (COARSE * 8 + FINE * 4 + 8 * 8 * 4)),
        ("head", "project", 2 * FINE * 4 * 3, 4 * (FINE * (4 + 3) + 4 * 3)),
        ("encoder1_pool", "pass", 0, 4 * 4 * (FINE + COARSE)),
        # Of the target a byte for each region; for a coarser head those of every second row.
        ("head/slope", "loss", 0, 3 * FINE * (4 + 4 + 1)),
        ("head1/loss_sums", "loss", 0, 3 * COARSE * (4 + 2)),
        ("encoder1_conv2/orthogonal", "update", 3 * 27 * 8**3 + 17 * 8**3, 2 * 4 * 27 * 8**2),
    ],
)
def test_work_and_traffic_of_an_operation_are_those_by_hand(name, kind, flops, traffic_bytes):
    unet = UNetConfig(channels=2, filters=4, depth=3, deep_supervision=True)
    (op,) = (op for op in training_step(Job(unet, (16, 16, 16))).ops if op.name == name)
    assert (op.kind, op.flops, op.traffic_bytes) == (kind, flops, traffic_bytes)
