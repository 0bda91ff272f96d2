"""One worker against several: what is measured on which cores, how rounds become rows, a real exchange."""

import dataclasses

import pytest

from cpu3d.__main__ import main
from cpu3d.bench import scaling
from cpu3d.bench.scaling import compare_workers, scaling_lines, ways
from cpu3d.errors import InputError
from cpu3d.host.topology import read_topology, topology_of
from cpu3d.util.records import append_record
from memory_estimator.scaling import read_scaling, row_of


def answer(step_s, wait_s=(), exchange_s=(), packing_s=(), **more):
    parts = {"step_s": step_s, "wait_s": wait_s, "exchange_s": exchange_s, "packing_s": packing_s}
    facts = {"engine_name": "TensorFlow 2.15.1", "threads": {}, "versions": {}}
    return {**parts, **facts, "parameters": 5_000_000, "process_peak_bytes": 2**30, **more}


@pytest.fixture
def result_of(monkeypatch):
    """A record of so many rounds of processes that answer as worked out by hand; later rounds are slower by 1 s."""
    asked = []

    def measure(request, name, count, cpus, cores):
        later = asked.count(name)
        asked.append(name)
        if name == "together":
            # Two workers, of which the second waits for the first: 2.3 s a step, 0.1 s of it exchanging but for waits.
            parts = ([0.0, 0.0], [0.04, 0.04], [0.06, 0.06]), ([0.2, 0.0], [0.04, 0.04], [0.06, 0.06])
            return [answer([2.3 + later, 2.3 + later], *part, call_s=0.002, message_s=0.001) for part in parts]
        step_s = {"alone": 2.0, "in parts": 2.07, "apart": 2.17, "wide": 1.25}[name]
        packing_s = [0.05, 0.05] if name in ("in parts", "apart") else []
        return [answer([step_s + later] * 2, packing_s=packing_s) for _ in cpus]

    def result_of(rounds=1):
        _, found = ways(topology_of("paper-4x20"), [2])
        unet = {"channels": 4, "filters": 8, "dtype": "float32", "norm": "instance", "policy": "speed"}
        request = {"shape": [32, 32, 32], "batch": 1, "micro_batch": 1, "optimizer": "adam", "unet": unet}
        result = compare_workers(request, 3, found, rounds)
        return {**result, "host": {"cpu": "made up", "cores": 2}, "date": "2026-11-21"}

    monkeypatch.setattr(scaling, "measure_together", measure)
    return result_of


def test_a_worker_has_whole_cores_with_all_their_threads():
    paper = topology_of("paper-4x20")
    each, found = ways(paper, [4, 2, 1, 2])
    assert each == 20
    found = {(name, count): cpus for name, count, cpus in found}
    assert [name for name, _ in found] == ["alone", "in parts", *(2 * ["together", "apart", "wide"])]
    assert [len(share) for share in found["together", 4]] == [40] * 4
    assert found["alone", 1] == found["together", 4][:1] == found["together", 2][:1]
    assert found["wide", 2] == [found["together", 2][0] + found["together", 2][1]]
    sockets = {cpu.number: cpu.socket for cpu in paper.cpus}
    assert [{sockets[number] for number in share} for share in found["together", 4]] == [{0}, {1}, {2}, {3}]


def test_under_a_quota_nothing_is_bound_and_workers_that_cannot_be_laid_are_refused():
    paper = topology_of("paper-4x20")
    each, found = ways(dataclasses.replace(paper, host=dataclasses.replace(paper.host, cpu_quota=8.0)), [2])
    assert (each, [cpus for _, _, cpus in found]) == (4, [[[]], [[]], [[], []], [[], []], [[]]])
    with pytest.raises(InputError, match="got 81 on 80 cores"):
        ways(paper, [81])


def test_a_step_is_the_sum_of_its_parts_and_the_estimator_reads_the_record(result_of, tmp_path):
    result = result_of()
    together = row_of(result, "together", 2)
    assert together["wait_s"] == pytest.approx(0.05)  # of four steps one has waited 0.2 s
    assert together["compute_s"] == pytest.approx(2.15)
    parts = ("compute_s", "wait_s", "exchange_s", "packing_s")
    assert sum(together[part] for part in parts) == pytest.approx(together["step_s"]) == pytest.approx(2.3)
    assert together["efficiency"] == pytest.approx(2.0 / 2.3)
    assert row_of(result, "wide", 2)["efficiency"] == pytest.approx(2.0 / 1.25 / 2)
    for one in ({**result, "gradient_bytes": 7}, result):  # the newest counts
        append_record(tmp_path / "scaling.jsonl", "scaling", one)
    records = read_scaling(tmp_path / "scaling.jsonl")
    assert [one["gradient_bytes"] for one in records] == [20_000_000]
    lines = scaling_lines(records)
    assert "| 2 workers | 6 | 2.30 | 50 | 40 | 60 | 0.870 | 0.87 | 1.00 |" in lines


def test_a_row_is_its_middle_round_and_efficiency_is_taken_within_rounds(result_of):
    together = row_of(result_of(rounds=3), "together", 2)
    assert together["rounds"] == pytest.approx([2.3, 3.3, 4.3])
    assert [together[name] for name in ("step_s", "step_s_min", "step_s_max")] == pytest.approx([3.3, 2.3, 4.3])
    shares = [together[f"efficiency{end}"] for end in ("_min", "", "_max")]
    assert shares == pytest.approx([2.0 / 2.3, 3.0 / 3.3, 4.0 / 4.3])


@pytest.mark.slow
@pytest.mark.skipif(read_topology().host.usable_cores < 2, reason="needs two cores")
def test_two_real_workers_exchange(tmp_path):
    record = tmp_path / "scaling.jsonl"
    options = "--shape 16 16 16 --filters 8 --depth 2 --rounds 1 --steps 2 --dtype float32"
    assert main(f"bench scaling {options} --record {record} --json".split()) == 0
    (result,) = read_scaling(record)
    together = row_of(result, "together", 2)
    assert min(together[name] for name in ("compute_s", "exchange_s", "packing_s", "call_s")) > 0
    # Held to one core each, planned for one thread each.
    threads = [result["threads"][name]["TF_NUM_INTRAOP_THREADS"] for name in ("together", "wide")]
    assert threads == ["1", "2"]
