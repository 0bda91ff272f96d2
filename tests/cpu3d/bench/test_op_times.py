"""Which operation of the step a profiled event belongs to."""

import dataclasses
from types import SimpleNamespace

import pytest

from cpu3d.bench import op_times
from cpu3d.bench.op_times import Event, rows
from cpu3d.host.thread_plan import thread_plan
from memory_estimator.host import read_host
from memory_estimator.job import Job
from memory_estimator.timing import CONVOLUTIONS
from memory_estimator.training_step import training_step
from models.config import UNetConfig

CACHE = 2**25

UNET = UNetConfig(depth=2, filters=8, policy="speed")

PROGRAM = training_step(Job(UNET, (32, 32, 32), engine="stock", threads=2))

CONVS = [op for op in PROGRAM.ops if op.kind in CONVOLUTIONS]


def event(op, seconds):
    """As stock TensorFlow names it: gradients do not say whose they are."""
    if op.kind.endswith("filter_gradient"):
        return Event("Conv3DBackpropFilterV2_3", "_MklNativeConv3DBackpropFilterV2", seconds)
    return Event("Conv3D", "_MklNativeConv3D", seconds)


def test_convolutions_are_told_apart_by_their_order():
    found = rows(PROGRAM, [event(op, float(number)) for number, op in enumerate(CONVS)], CACHE)
    assert [row["seconds"] for row in found[: len(CONVS)]] == list(range(len(CONVS)))
    assert [row["group"] for row in found[:2]] == ["first_conv", "conv"]


def test_a_step_that_ran_others_is_refused():
    events = [event(op, 1.0) for op in CONVS]
    with pytest.raises(RuntimeError, match=rf"must run the {len(CONVS)} convolutions .* got {len(CONVS) - 1}"):
        rows(PROGRAM, events[1:], CACHE)
    swapped = [*events[:-2], events[-1], events[-2]]
    if events[-1].type != events[-2].type:
        with pytest.raises(RuntimeError, match="in place"):
            rows(PROGRAM, swapped, CACHE)


def test_everything_else_is_told_by_its_type_and_the_rest_is_loss():
    norms = [op for op in PROGRAM.ops if op.kind == "norm"]
    events = [
        *(event(op, 0.0) for op in CONVS),
        *(Event(f"act{i}/FusedBatchNormV3", "_MklNativeFusedBatchNormEx", 1.0 + i) for i in range(len(norms))),
        Event("gradient_tape/act/FusedBatchNormGradV3", "_MklNativeFusedBatchNormGradV3", 10.0),
        Event("Softplus", "Softplus", 20.0),
        Event("Adam/mul_3", "Mul", 30.0),
        Event("unet3d/encoder0_conv1/Conv3D/Cast", "Cast", 1.0),
        Event("Sum_2", "Sum", 2.0),
    ]
    found = rows(PROGRAM, events, CACHE)
    seconds = lambda group: [row["seconds"] for row in found if row["group"] == group]
    assert seconds("norm") == [1.0 + i for i in range(len(norms))]
    assert seconds("norm_gradient") == [10.0]
    assert seconds("loss") == [22.0]
    assert seconds("update") == [31.0]


def test_a_group_timed_as_a_whole_counts_all_its_operations():
    events = [*(event(op, 0.0) for op in CONVS), Event("a", "MaxPool3D", 1.0), Event("b", "MaxPool3D", 1.0)]
    (pool,) = [row for row in rows(PROGRAM, events, CACHE) if row["group"] == "pool"]
    assert pool["seconds"] == 2.0
    assert pool["features"] == {"cached": sum(op.traffic_bytes for op in PROGRAM.ops if op.kind == "pool")}


@pytest.fixture
def measure(monkeypatch):
    """`op_times.measure` of networks by their filters within so many seconds, where 8 filters take 1 s a step."""
    host, clock = read_host(), [0.0]
    threading = SimpleNamespace(get_intra_op_parallelism_threads=lambda: 2)
    tensorflow = SimpleNamespace(config=SimpleNamespace(threading=threading))

    def one(tf, job, program, steps, left_s, cache_bytes, with_peaks):
        step_s = op_times._flops(program) / op_times._flops(PROGRAM)
        clock[0] += (2 + steps) * step_s
        peaks = {"process_peak_bytes": 7} if with_peaks else {}
        return {"step_s": step_s if steps else None, "ops": len(program.ops), "rows": [], "peaks": peaks}

    monkeypatch.setattr(op_times, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(op_times, "set_up", lambda engine: (host, thread_plan(host), tensorflow))
    monkeypatch.setattr(op_times, "engine_name", lambda tf: "TensorFlow")
    monkeypatch.setattr(op_times, "_runtime", lambda program: {"bytes": 1, "ops": 1})
    monkeypatch.setattr(op_times, "_measure_network", one)

    def run(budget_s, *wanted):
        of = lambda filters: dataclasses.asdict(dataclasses.replace(UNET, filters=filters))
        networks = [{"unet": of(filters), "shape": (32, 32, 32), "steps": steps} for filters, steps in wanted]
        return op_times.measure({"engine": "stock", "networks": networks, "budget_s": budget_s, "cache_bytes": CACHE})

    return run


def test_networks_that_take_longer_than_is_left_are_left_out(measure):
    wanted = [(8, 0), (8, 3), (32, 3), (8, 2)]
    of = lambda networks: [network["unet"]["filters"] for network in networks]
    assert of(measure(1000, *wanted)["left_out"]) == []
    short = measure(12, *wanted)  # 2 + 5 s are spent, 32 filters would take 3 steps of 15 s, 8 another 4 s
    assert of(short["left_out"]) == [32]
    assert len(short["networks"]) == 3


def test_the_first_network_that_is_timed_is_measured_whatever_is_left(measure):
    found = measure(0, (8, 0), (8, 3), (8, 3))
    assert len(found["networks"]) == 2
    assert len(found["left_out"]) == 1


def test_peaks_are_checked_of_the_first_network_that_is_timed(measure):
    check = measure(1000, (8, 0), (16, 3), (8, 3))["check"]
    assert (check["unet"]["filters"], check["process_peak_bytes"]) == (16, 7)
