"""Seconds of a step, on one host and on several: sums worked out by hand, and how they must
grow."""

import dataclasses
import json

import pytest

from cpu3d.distributed import all_reduce
from memory_estimator import scaling
from memory_estimator.__main__ import main
from memory_estimator.calibration import HostConstants
from memory_estimator.job import Job
from memory_estimator.scaling import largest_of, step_costs
from memory_estimator.step.timeline import NativeOperation, Program, StepOp
from memory_estimator.step.timing import op_seconds
from models.config import UNetConfig

MIB = 2**20

CONSTANTS = HostConstants(
    name="by hand",
    instructions="",
    cpu="",
    origin="assumed",
    origins={},
    record="none",
    date="2026-01-01",
    threads=2,
    saturating_threads=4,
    baseline_bytes={"stock": 1000},
    op_bytes={"stock": 10},
    l2_bytes=2**20,
    costs={
        "float32": {
            "convolve": {"work": 1e-12, "work, values": 2e-9},
            "pass": {"traffic": 3e-9},
            "every_op": {"seconds": 1e-5},
        }
    },
)

JOB = Job(
    UNetConfig(depth=2, policy="speed", dtype="float32"), (32, 32, 32), engine="stock", threads=2
)


def seconds(*ops, threads=2, constants=CONSTANTS):
    return sum(op_seconds(Program((), ops), constants, dataclasses.replace(JOB, threads=threads)))


def convolution(inputs, outputs, voxels=1000):
    flops = 54 * voxels * inputs * outputs
    return StepOp(
        "c", "convolve", flops=flops, traffic_bytes=MIB, in_channels=inputs, out_channels=outputs
    )


def test_a_convolution_takes_its_work_in_whole_blocks_its_values_and_the_overhead():
    assert seconds(convolution(32, 16)) == pytest.approx(54e3 * 512 * 1e-12 + 48e3 * 2e-9 + 1e-5)
    # 3 channels are read as 4, and as many written as 16.
    assert seconds(convolution(3, 3)) == pytest.approx(54e3 * 64 * 1e-12 + 20e3 * 2e-9 + 1e-5)


def test_work_divides_by_the_threads_and_traffic_until_the_memory_is_busy():
    without = {"float32": {**CONSTANTS.costs["float32"], "every_op": {"seconds": 0.0}}}
    at = lambda op, threads: seconds(
        op, threads=threads, constants=dataclasses.replace(CONSTANTS, costs=without)
    )
    work = convolution(16, 16)
    traffic = StepOp("n", "pass", traffic_bytes=2 * MIB)
    assert at(work, 2) / at(work, 16) == pytest.approx(8)
    assert at(traffic, 2) / at(traffic, 4) == pytest.approx(2)
    assert at(traffic, 4) == at(traffic, 64)


def test_an_operation_takes_as_long_as_the_thread_with_most_of_its_rows():
    """Three rows: on two threads one has two of them, on eight each has one at most."""
    native = NativeOperation("project", 1, (1, 3, 8), 16, 3, 4)
    work = StepOp("p", "project", ("map",), native=native, flops=10**6)
    costs = {"project": {"work": 1e-9, "traffic": 0.0}, "every_op": {"seconds": 0.0}}
    by_own = dataclasses.replace(CONSTANTS, instructions="avx2", costs={"float32": costs})
    assert seconds(work, threads=2, constants=by_own) == pytest.approx(1e-3)
    assert seconds(work, threads=8, constants=by_own) == pytest.approx(0.5e-3)
    assert seconds(work, threads=1, constants=by_own) == pytest.approx(1.5e-3)


# --- Several hosts ---

WAIT = 1 + scaling.DATA_WAIT_SHARE


COSTS = {
    "endpoint_s_per_byte": 1e-9,
    "call_s": 0.01,
    "message_s": 1e-3,
    "packing_s_per_byte": 2e-9,
    "spread": 0.1,
    "contention": 0.05,
}


def test_workers_that_lose_nothing_take_as_long_as_one(monkeypatch):
    monkeypatch.setattr(scaling, "COSTS", dict.fromkeys(COSTS, 0.0))
    parts = step_costs(6.0, 100)
    assert sum(parts.values()) == pytest.approx(6 * WAIT)
    assert step_costs(6.0, 0, hosts=8) == parts


def test_every_part_of_a_step_is_what_it_is_by_hand(monkeypatch):
    monkeypatch.setattr(scaling, "COSTS", COSTS)
    asked = (10.0, 80_000_000)
    single, two = (step_costs(*asked, hosts, 2, network_bytes_per_s=1e9) for hosts in (1, 2))
    assert (
        single["compute_s"] == two["compute_s"] == pytest.approx(10.5)
    )  # contention, as two share each host
    assert two["slowest_s"] == pytest.approx(1.05 * largest_of(4))
    assert two["packing_s"] == pytest.approx(0.16)
    # 80 MB are five pieces of 16 MiB, each a ring. Inside a host there is no network.
    assert single["exchange_s"] == pytest.approx(2 * (40e6 * 1e-9 + 5 * 1e-3) + 5 * 0.01)
    assert two["exchange_s"] == pytest.approx(6 * (20e6 * 2e-9 + 5 * 1.05e-3) + 5 * 0.01)
    alone = step_costs(*asked)
    assert (alone["slowest_s"], alone["packing_s"], alone["exchange_s"]) == (0, 0, 0)


def test_the_pieces_of_a_sum_are_those_of_the_trainer():
    assert 4 * all_reduce.PIECE == scaling.RING_BYTES  # of float32


PARTS = ("compute", "slowest", "packing", "exchange", "data")
ASKED = "--shape 32 32 32 --filters 8 --depth 3 --threads 2 --calibration avx512_bf16"


def test_the_answer_has_a_row_for_each_number_of_hosts(monkeypatch, capsys):
    monkeypatch.setattr(scaling, "COSTS", COSTS)
    asked = f"{ASKED} --batch 2 --epochs 2 --link 8Gbit/s"
    assert main(f"{asked} --hosts 1 2 51 --cases 101 --json".split()) == 0
    content = json.loads(capsys.readouterr().out)
    single, two, many = content["rows"]
    assert [row["batch"] for row in content["rows"]] == [2, 4, 102]
    assert (single["compute_s"], single["efficiency"]) == (
        2 * content["volume_s"],
        pytest.approx(1),
    )
    assert single["total_s"] == pytest.approx(
        2 * 50 * 2 * content["volume_s"] * WAIT
    )  # two epochs of whole batches
    assert many["epoch_s"] is many["total_s"] is None  # not one batch
    assert two["exchange_s"] == pytest.approx(
        content["gradient_bytes"] * (1e-9 + 1e-9) + 2 * 0.00105 + 0.01
    )
    assert two["step_s"] == pytest.approx(sum(two[f"{part}_s"] for part in PARTS))
    assert content["costs"] == COSTS
    assert main(f"{asked} --hosts 1 2 --global-batch 8 --json".split()) == 0
    whole, half = (row["compute_s"] for row in json.loads(capsys.readouterr().out)["rows"])
    assert whole == pytest.approx(2 * half, rel=0.02)
    assert main(f"{asked} --hosts 3 --global-batch 8".split()) == 2
    assert "--global-batch must be a multiple of the 3 workers, got 8" in capsys.readouterr().err
    assert main(f"{asked} --hosts 1 2".split()) == 0
    assert "efficiency" in capsys.readouterr().out


def test_memory_is_that_of_one_of_several_as_train_counts_it(capsys):
    def asked(options):
        assert main(f"{ASKED} {options} --json".split()) == 0
        return json.loads(capsys.readouterr().out)

    # One of several adds its gradients up, as one does that has two micro-batches, and has copies
    # of them for the sum.
    in_parts = asked("--hosts 1 --batch 2 --micro-batch 1")
    several = asked("--hosts 2")
    copies = several["upper_bound_bytes"] - in_parts["upper_bound_bytes"]
    assert copies == pytest.approx(scaling.SENT_COPIES * several["gradient_bytes"], rel=0.01)
    assert asked("--hosts 1")["upper_bound_bytes"] < in_parts["upper_bound_bytes"]
    dealt = asked("--norm batch --hosts 2 4 --global-batch 8")
    each = asked("--norm batch --hosts 2 4 --batch 4")
    assert dealt["upper_bound_bytes"] == each["upper_bound_bytes"]
