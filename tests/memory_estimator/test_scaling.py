"""Several hosts: truths worked out by hand, the record that constants come from, the command line."""

import json
import re
from pathlib import Path

import pytest

from memory_estimator import scaling
from memory_estimator.__main__ import main
from memory_estimator.scaling import ExchangeCosts, largest_of, read_scaling, step_parts

ROOT = Path(__file__).resolve().parents[2]
WAIT = 1 + scaling.DATA_WAIT_SHARE


def record(**changes):
    """One of `bench scaling`: of two workers, 20 MB pass in 26 ms, in two rings of which each takes 2 ms for the call
    and 0.5 ms for each of its two messages."""
    rows = [
        {"name": "alone", "workers": 1, "step_s": 2.0},
        {"name": "in parts", "workers": 1, "step_s": 2.1, "compute_s": 2.06},
        {
            "name": "together", "workers": 2, "step_s": 2.4, "compute_s": 2.2, "wait_s": 0.1, "exchange_s": 0.026,
            "packing_s": 0.03, "call_s": 0.002, "message_s": 0.0005,
        },
        {"name": "apart", "workers": 2, "step_s": 2.2, "compute_s": 2.06 * 1.05},
        {"name": "wide", "workers": 1, "step_s": 1.1},
    ]  # fmt: skip
    return {
        "schema": 1, "kind": "scaling", "date": "2026-11-21", "rows": rows, "gradient_bytes": 20_000_000,
        "shape": [32, 32, 32], "batch": 1, "micro_batch": 1, "unet": {}, "optimizer": "adam",
        "cores_per_worker": 1, "engine_name": "made up", "host": {"cpu": "made up"},
        **changes,
    }  # fmt: skip


def packing(seconds):
    """The record of another shape, whose workers pack so long."""
    found = record(shape=[64, 64, 64])
    found["rows"][2]["packing_s"] = seconds
    return found


@pytest.fixture
def file_of(tmp_path):
    def written(*records):
        lines = (one if isinstance(one, str) else json.dumps(one) for one in records)
        (tmp_path / "scaling.jsonl").write_text("\n".join(lines))
        return tmp_path / "scaling.jsonl"

    return written


def test_workers_that_lose_nothing_take_as_long_as_one():
    free = ExchangeCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, "free")
    parts = step_parts(6.0, 100, free)
    assert sum(parts.values()) == pytest.approx(6 * WAIT)
    assert step_parts(6.0, 0, free, hosts=8) == parts


def test_every_part_of_a_step_is_what_it_is_by_hand():
    costs = ExchangeCosts(
        endpoint_s_per_byte=1e-9, call_s=0.01, message_s=1e-3, packing_s_per_byte=2e-9, in_parts_s_per_byte=3e-9,
        spread=0.1, contention=0.05, origin="",
    )  # fmt: skip
    asked = (10.0, 80_000_000, costs)
    one, two = (step_parts(*asked, hosts, 2, network_bytes_per_s=1e9) for hosts in (1, 2))
    assert one["compute_s"] == two["compute_s"] == pytest.approx(10.5)  # contention, as two share each host
    assert two["slowest_s"] == pytest.approx(1.05 * largest_of(4))
    assert (two["packing_s"], two["in_parts_s"]) == (pytest.approx(0.16), pytest.approx(0.24))
    # 80 MB are five pieces of 16 MiB, each a ring. Inside a host there is no network.
    assert one["exchange_s"] == pytest.approx(2 * (40e6 * 1e-9 + 5 * 1e-3) + 5 * 0.01)
    assert two["exchange_s"] == pytest.approx(6 * (20e6 * 2e-9 + 5 * 1.05e-3) + 5 * 0.01)
    alone = step_parts(*asked)
    assert (alone["slowest_s"], alone["in_parts_s"], alone["packing_s"], alone["exchange_s"]) == (0, 0, 0, 0)
    # In several micro-batches, its own step adds gradients up already.
    assert step_parts(*asked, 2, in_parts=True)["in_parts_s"] == 0


def test_the_pieces_of_a_sum_are_those_of_the_trainer():
    source = (ROOT / "cpu3d" / "distributed" / "all_reduce.py").read_text(encoding="utf-8")
    millions = int(re.search(r"^PIECE = (\d+) \* 2\*\*20$", source, re.MULTILINE)[1])  # float32; it imports TensorFlow
    assert 4 * millions * 2**20 == scaling.PIECE_BYTES


def test_a_record_gives_its_constants():
    found = scaling.costs_of(record())
    assert found.endpoint_s_per_byte == pytest.approx(0.020 / 20e6)
    assert (found.call_s, found.message_s) == (0.002, 0.0005)
    assert found.in_parts_s_per_byte == pytest.approx(0.06 / 20e6)
    assert found.packing_s_per_byte == pytest.approx(0.03 / 20e6)
    assert found.contention == pytest.approx(0.05)
    assert found.spread == pytest.approx(0.1 / 2.2 / largest_of(2))
    assert "2026-11-21" in found.origin


def test_several_records_give_their_medians_and_errors_of_steps_that_gave_no_constant(file_of):
    records = read_scaling(file_of(record(), packing(0.07), {"schema": 1, "kind": "step"}, packing(0.05)))
    assert len(records) == 2  # the newest of a job counts
    assert scaling.pooled(records).packing_s_per_byte == pytest.approx(0.04 / 20e6)
    others = [record(batch=2), record(batch=2, micro_batch=2), record(optimizer="sgd")]
    assert len(read_scaling(file_of(record(), *others))) == 4
    by_hand = 2.0 * 1.05 * (1 + 0.1 / 2.2) + 0.06 + 0.03 + 0.026
    assert scaling.predicted_errors([record()]) == pytest.approx([by_hand / 2.4 - 1], abs=1e-4)
    errors = [(by_hand + 0.2) / 2.4 - 1, by_hand / 2.4 - 1]
    assert scaling.predicted_errors([record(), packing(0.23)]) == pytest.approx(errors, abs=1e-4)


PARTS = ("compute", "slowest", "in_parts", "packing", "exchange", "data")
SMALL = "--shape 32 32 32 --filters 8 --depth 3 --threads 2 --calibration avx512_bf16"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "must be JSON of schema 2"),
        ({"schema": 3, "kind": "scaling"}, "schema 3"),
        (record(rows=[]), "must be JSON of schema 2"),
        (record(rows=record()["rows"][:3]), "row apart of 2"),
        (record(gradient_bytes=0), "must be JSON of schema 2"),
    ],
)
def test_a_damaged_record_is_refused_by_its_line(line, problem, file_of, capsys):
    path = file_of(record(), line)
    assert main(f"{SMALL} --hosts 1 2 --record {path}".split()) == 2
    printed = capsys.readouterr().err
    assert problem in printed
    assert f"{path}:2" in printed


def test_the_answer_has_a_row_for_each_number_of_hosts(file_of, capsys):
    asked = f"{SMALL} --step-s 2 --batch 2 --epochs 2 --link 8Gbit/s --record {file_of(record())}"
    assert main(f"{asked} --hosts 1 2 51 --cases 101 --json".split()) == 0
    content = json.loads(capsys.readouterr().out)
    one, two, many = content["rows"]
    assert [row["batch"] for row in content["rows"]] == [2, 4, 102]
    assert (one["compute_s"], one["efficiency"]) == (2, pytest.approx(1))
    assert one["total_s"] == pytest.approx(2 * 50 * 2 * WAIT)  # two epochs of whole batches
    assert many["epoch_s"] is many["total_s"] is None  # not one batch
    assert two["exchange_s"] == pytest.approx(content["gradient_bytes"] * (1e-9 + 1e-9) + 2 * 0.00055 + 0.002)
    assert two["in_parts_s"] == 0  # two micro-batches each
    assert two["step_s"] == pytest.approx(sum(two[f"{part}_s"] for part in PARTS))
    assert len(content["errors"]) == 1
    assert main(f"{asked} --hosts 1 2 --global-batch 8 --json".split()) == 0
    assert [row["compute_s"] for row in json.loads(capsys.readouterr().out)["rows"]] == [8, 4]
    assert main(f"{asked} --hosts 3 --global-batch 8".split()) == 2
    assert "--global-batch must be a multiple of the 3 workers, got 8" in capsys.readouterr().err
    assert main(f"{asked} --hosts 1 2".split()) == 0
    assert "efficiency" in capsys.readouterr().out


def test_memory_is_that_of_one_of_several_as_train_counts_it(capsys):
    def asked(options):
        assert main(f"{SMALL} {options} --json".split()) == 0
        return json.loads(capsys.readouterr().out)

    # One of several adds its gradients up, as one does that has two micro-batches, and has copies of them for the sum.
    in_parts, several = asked("--hosts 1 --batch 2 --micro-batch 1"), asked("--hosts 2")
    copies = several["upper_bound_bytes"] - in_parts["upper_bound_bytes"]
    assert copies == pytest.approx(scaling.EXCHANGED_COPIES * several["gradient_bytes"], rel=0.01)
    assert asked("--hosts 1")["upper_bound_bytes"] < in_parts["upper_bound_bytes"]
    dealt, given = asked("--norm batch --hosts 2 4 --global-batch 8"), asked("--norm batch --hosts 2 4 --batch 4")
    assert dealt["upper_bound_bytes"] == given["upper_bound_bytes"]


@pytest.mark.parametrize(("column", "threads", "kind"), [(0, 2, "avx512_bf16"), (1, 56, "amx")])
def test_the_published_scale_out_stands_in_the_docs(column, threads, kind, capsys):
    ask = f"--recipe brats-regions --engine itex --policy speed --threads {threads} --calibration {kind}"
    hosts = "1 2 4 8 16 24 32 64 88"
    assert main(f"{ask} --host-memory 1TiB --hosts {hosts} --cases 48884 --epochs 10 --json".split()) == 0
    page = (ROOT / "docs" / "estimator.md").read_text(encoding="utf-8")
    for row in json.loads(capsys.readouterr().out)["rows"]:
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {row['hosts']} |")]
        assert line.split("|")[2 + column].strip() == f"{row['total_s'] / 3600:,.3g} h ({row['efficiency']:.0%})"
