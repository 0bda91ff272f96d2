"""Seconds of a step, on one host and on several: sums worked out by hand, and how they must grow."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from memory_estimator import scaling
from memory_estimator.__main__ import main
from memory_estimator.calibration import HostConstants
from memory_estimator.job import Job
from memory_estimator.scaling import largest_of, step_parts
from memory_estimator.step.program import Program, StepOp, Tensor
from memory_estimator.step.timing import op_seconds
from models.config import UNetConfig

MIB = 2**20

CONSTANTS = HostConstants(
    name="by hand",
    cpu="",
    origin="assumed",
    origins={},
    record="none",
    date="2026-01-01",
    threads=2,
    cache_bytes=MIB,
    saturating_threads=4,
    baseline_bytes={"stock": 1000},
    op_bytes={"stock": 10},
    costs={
        "stock": {
            "float32": {
                "conv": {"work": 1e-12, "work/out": 2e-12, "kernel": 1e-9},
                "join": {"cached": 1e-10, "traffic": 2e-10},
                "norm": {"cached": 1e-9, "traffic": 3e-9},
                "every_op": {"seconds": 1e-5},
            }
        }
    },
)

JOB = Job(UNetConfig(depth=2, policy="speed"), (32, 32, 32), engine="stock", threads=2)


def convolution(**changes):
    more = {"flops": 10**9, "traffic_bytes": 3 * MIB, "in_channels": 32, "out_channels": 32, **changes}
    return StepOp("a_conv", "conv", ("x", "a_conv/kernel"), (Tensor("y", MIB, "m"),), **more)


def program(*ops):
    return Program((Tensor("x", MIB, "m"), Tensor("a_conv/kernel", 5000, "weights")), ops)


def seconds(*ops, job=JOB, constants=CONSTANTS):
    return sum(op_seconds(program(*ops), constants, job))


def test_a_convolution_takes_its_work_its_kernel_and_the_overhead():
    # Two vectors are written: 1e9 * (1e-12 + 2e-12 / 2) + 5000 * 1e-9 + 1e-5.
    assert seconds(convolution()) == pytest.approx(2e-3 + 5e-6 + 1e-5)


def test_work_divides_by_the_threads_and_traffic_until_the_memory_is_busy():
    without = dataclasses.replace(
        CONSTANTS, costs={"stock": {"float32": {**CONSTANTS.speeds("stock", "float32"), "every_op": {"seconds": 0.0}}}}
    )
    at = lambda op, threads: seconds(op, job=dataclasses.replace(JOB, threads=threads), constants=without)
    work = StepOp("c", "conv", ("x",), (Tensor("y", 1, "m"),), flops=10**9, in_channels=32, out_channels=32)
    traffic = StepOp("n", "norm", ("x",), traffic_bytes=2 * MIB)
    assert at(work, 2) / at(work, 16) == pytest.approx(8)
    assert at(traffic, 2) / at(traffic, 4) == pytest.approx(2)
    assert at(traffic, 4) == at(traffic, 64)


# --- Several hosts ---

ROOT = Path(__file__).resolve().parents[2]
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
    parts = step_parts(6.0, 100)
    assert sum(parts.values()) == pytest.approx(6 * WAIT)
    assert step_parts(6.0, 0, hosts=8) == parts


def test_every_part_of_a_step_is_what_it_is_by_hand(monkeypatch):
    monkeypatch.setattr(scaling, "COSTS", COSTS)
    asked = (10.0, 80_000_000)
    one, two = (step_parts(*asked, hosts, 2, network_bytes_per_s=1e9) for hosts in (1, 2))
    assert one["compute_s"] == two["compute_s"] == pytest.approx(10.5)  # contention, as two share each host
    assert two["slowest_s"] == pytest.approx(1.05 * largest_of(4))
    assert two["packing_s"] == pytest.approx(0.16)
    # 80 MB are five pieces of 16 MiB, each a ring. Inside a host there is no network.
    assert one["exchange_s"] == pytest.approx(2 * (40e6 * 1e-9 + 5 * 1e-3) + 5 * 0.01)
    assert two["exchange_s"] == pytest.approx(6 * (20e6 * 2e-9 + 5 * 1.05e-3) + 5 * 0.01)
    alone = step_parts(*asked)
    assert (alone["slowest_s"], alone["packing_s"], alone["exchange_s"]) == (0, 0, 0)


def test_the_pieces_of_a_sum_are_those_of_the_trainer():
    source = (ROOT / "cpu3d" / "distributed" / "all_reduce.py").read_text(encoding="utf-8")
    millions = int(re.search(r"^PIECE = (\d+) \* 2\*\*20\b", source, re.MULTILINE)[1])  # float32; it imports TensorFlow
    assert 4 * millions * 2**20 == scaling.PIECE_BYTES


PARTS = ("compute", "slowest", "packing", "exchange", "data")
ASKED = "--shape 32 32 32 --filters 8 --depth 3 --threads 2 --calibration avx512_bf16"


def test_the_answer_has_a_row_for_each_number_of_hosts(monkeypatch, capsys):
    monkeypatch.setattr(scaling, "COSTS", COSTS)
    asked = f"{ASKED} --batch 2 --epochs 2 --link 8Gbit/s"
    assert main(f"{asked} --hosts 1 2 51 --cases 101 --json".split()) == 0
    content = json.loads(capsys.readouterr().out)
    one, two, many = content["rows"]
    assert [row["batch"] for row in content["rows"]] == [2, 4, 102]
    assert (one["compute_s"], one["efficiency"]) == (2 * content["volume_s"], pytest.approx(1))
    assert one["total_s"] == pytest.approx(2 * 50 * 2 * content["volume_s"] * WAIT)  # two epochs of whole batches
    assert many["epoch_s"] is many["total_s"] is None  # not one batch
    assert two["exchange_s"] == pytest.approx(content["gradient_bytes"] * (1e-9 + 1e-9) + 2 * 0.00105 + 0.01)
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

    # One of several adds its gradients up, as one does that has two micro-batches, and has copies of them for the sum.
    in_parts, several = asked("--hosts 1 --batch 2 --micro-batch 1"), asked("--hosts 2")
    copies = several["upper_bound_bytes"] - in_parts["upper_bound_bytes"]
    assert copies == pytest.approx(scaling.EXCHANGED_COPIES * several["gradient_bytes"], rel=0.01)
    assert asked("--hosts 1")["upper_bound_bytes"] < in_parts["upper_bound_bytes"]
    dealt, given = asked("--norm batch --hosts 2 4 --global-batch 8"), asked("--norm batch --hosts 2 4 --batch 4")
    assert dealt["upper_bound_bytes"] == given["upper_bound_bytes"]
