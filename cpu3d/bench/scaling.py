"""One worker against several on this host: computing and exchanging timed apart, and what becomes of the gap.

    ./run.sh bench scaling --shape 240 240 160 --workers 1 2 --rounds 3 --record records/scaling.jsonl

Each worker is a process held to cores of its own, as many as the most workers leave each, and does the trainer's own
step on made-up data. In turn: one worker; one that updates its weights apart, as several have to; several that exchange
their gradients; as many that do all but exchange, which shows what they take from each other on one host; one worker
with the cores of all. An efficiency of 1 would be as many times the volumes a second. The estimator takes its constants
for several hosts from the record.
"""

import itertools
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from cpu3d.bench import harness
from cpu3d.bench.harness import Output, Result, gib, host_of, title_of, with_range
from cpu3d.bench.step import MeasuredJob, StepOptions, config_of, made_up, step_request
from cpu3d.distributed import all_reduce
from cpu3d.distributed.cluster import LOOPBACK, Cluster, free_ports
from cpu3d.errors import InputError
from cpu3d.host.apply import set_up
from cpu3d.host.thread_plan import THREADS, thread_plans
from cpu3d.host.topology import Topology, read_topology
from memory_estimator.scaling import ALONE, APART, ASSUMED, IN_PARTS, TOGETHER, WIDE, predicted_errors
from memory_estimator.schema import option
from memory_estimator.table import Table

PARTS = ("wait_s", "exchange_s", "packing_s")  # of a step, what is not computing

NAMES = {
    ALONE: "1 worker", IN_PARTS: "1 worker, its update apart", TOGETHER: "{} workers",
    APART: "{} side by side, no exchange", WIDE: "1 worker on the cores of {}",
}  # fmt: skip
"""Of the rows, by their number of workers."""


@dataclass(frozen=True)
class Options:
    """What `bench scaling` has beside the options of a step."""

    workers: Tuple[int, ...] = option((1, 2), help="how many, 1 is always there", at_least=1, metavar="N")
    rounds: int = option(3, help="how often, in turn", at_least=1, metavar="N")


OPTIONS = ((MeasuredJob,), StepOptions, Options, Output)


def run(given: Dict[str, Any], steps: StepOptions, options: Options, output: Output) -> int:
    topology = read_topology()
    request, (cores, found) = step_request(given, steps), ways(topology, options.workers)
    result = {**compare_workers(request, cores, found, options.rounds), "host": topology.host.summary()}
    output.publish("scaling", result, scaling_table(result))
    return 0


def ways(topology: Topology, workers: Sequence[int]) -> Tuple[int, List[Tuple[str, int, Any]]]:
    """Cores of a worker, and all that is measured in its order: name, number of workers, CPUs of each process.

    Shares are parts of those of the most workers, as `train` would have them: whole cores with all their hyper-threads;
    empty under a quota, where nothing is bound. Raises InputError without a number above 1 and for too many.
    """
    counts = sorted({number for number in workers if number > 1})
    if not counts:
        raise InputError(f"--workers must have a number above 1, got {list(workers)}; write it like --workers 1 2")
    plans, shares = thread_plans(topology, counts[-1]), []
    each = min(plan.intra_op for plan in plans)
    for plan in plans:
        cores = [core for core in topology.cores if {cpu.number for cpu in core} <= set(plan.cpus)]
        shares.append([cpu.number for core in cores[:each] for cpu in core])
    found: List[Tuple[str, int, Any]] = [(ALONE, 1, shares[:1]), (IN_PARTS, 1, shares[:1])]
    for count in counts:
        joined = [list(itertools.chain.from_iterable(shares[:count]))]
        found += [(TOGETHER, count, shares[:count]), (APART, count, shares[:count]), (WIDE, count, joined)]
    return each, found


def compare_workers(request: Dict[str, Any], cores: int, found: Sequence[Tuple[str, int, Any]], rounds: int) -> Result:
    """Measure every way, `rounds` times in turn; the content of a record, but for the host.

    A row's figures are all of the round with its median step, so that a step's parts add up to it.
    """
    turns = {way[:2]: lambda _, way=way: _one_round(measure_together(request, *way, cores)) for way in found}
    measured, _ = harness.in_turn(turns, rounds, "scaling", keep_going=False)
    rows, threads = [], {}
    for name, count, cpus in found:
        each = measured[name, count]
        row = dict(harness.middle(each))
        threads[name] = row.pop("threads")
        facts = {fact: row.pop(fact) for fact in ("parameters", "engine_name", "versions")}
        # Of one worker with all the cores: how many times as fast it is, over how many times the cores.
        times = count if name == WIDE else 1
        shares = [alone["step_s"] / one["step_s"] / times for alone, one in zip(measured[ALONE, 1], each)]
        for key, most in (("process_peak_bytes", max), ("step_s_min", min), ("step_s_max", max)):
            row[key] = most(one[key] for one in each)
        row.update(efficiency=statistics.median(shares), efficiency_min=min(shares), efficiency_max=max(shares))
        row["rounds"] = [one["step_s"] for one in each]
        rows.append({"name": name, "workers": count, "processes": len(cpus), "cpus": cpus, **row})
    about = {name: value for name, value in request.items() if name not in ("matmul", "threads")}
    about["gradient_bytes"] = 4 * facts.pop("parameters")  # exchanged in float32
    return {**about, "rows": rows, **facts, "threads": threads, "cores_per_worker": cores}


def measure_together(request: Dict[str, Any], name: str, count: int, cpus: List[List[int]], cores: int) -> List[Result]:
    """What `work` returns in as many processes as `cpus` has shares, all at once; by rank.

    Each has so many threads, or `count` times as many for WIDE. Raises ProcessFailedError where one of them fails, once
    all have been ended.
    """
    environ = {one: value for one, value in os.environ.items() if one not in ("TF_CONFIG", "KMP_AFFINITY")}
    environ.update(dict.fromkeys((THREADS[0], THREADS[2]), str(cores * (count if name == WIDE else 1))))
    with tempfile.TemporaryDirectory(prefix="bench-scaling-") as folder:
        addresses = [f"{LOOPBACK}:{port}" for port in free_ports(len(cpus))] if name == TOGETHER else []
        shared = {**request, "addresses": addresses, "in_parts": name in (IN_PARTS, APART), "folder": folder}
        own = ({"count": len(cpus), "rank": rank, "cpus": share} for rank, share in enumerate(cpus))
        commands = [harness.command_of(work, {**shared, **one}) for one in own]
        return harness.run_together(commands, "a worker", environ=environ)


# --- One worker ---


class Timed(all_reduce.Exchange):
    """An exchange whose sums are each preceded by that of a single number: who waits there waits for the others.

    Without `inner` a worker does all that one of two has to do but exchange: it takes its own sum for that of both.
    """

    def __init__(self, tf: Any, inner: Optional[all_reduce.Exchange] = None):
        self._tf, self._inner = tf, inner
        self.rank, self.count = (inner.rank, inner.count) if inner else (0, 2)
        self.close = inner.close if inner else super().close
        self.wait_s: List[float] = []
        self.sum_s: List[float] = []

    def sum(self, vector: Any) -> Any:
        begin = time.perf_counter()
        if self._inner is None:
            # The last two numbers are the fingerprints of both workers' weights, which have to be the same.
            total, met = self._tf.concat([vector[:-1], vector[-2:-1]], 0), time.perf_counter()
        else:
            self.sum_of_one()
            met = time.perf_counter()
            total = self._inner.sum(vector)
            self._tf.reshape(total, [-1])[0].numpy()  # it is there
        self.wait_s.append(met - begin)
        self.sum_s.append(time.perf_counter() - met)
        return total

    def sum_of_one(self) -> float:
        """Seconds that the sum of a single number takes."""
        begin = time.perf_counter()
        self._inner.sum(self._tf.zeros([1])).numpy()
        return time.perf_counter() - begin


def work(request: Dict[str, Any]) -> Result:
    """Seconds of every timed step, and of its parts where there is an exchange.

    `request` is that of `bench step` with `batch` of one worker, and: cpus, what the process is held to; addresses of
    all workers, () without an exchange; in_parts, whether weights are updated apart all the same; rank; count of
    processes; folder, where they meet. None begins before all are ready or, without an exchange, ends before all do.
    """
    if request["cpus"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, request["cpus"])  # so that the host is planned for as if it had these alone
    folder, rank, count, steps = Path(request["folder"]), request["rank"], request["count"], request["steps"]
    host, threads, tf = set_up(request["engine"])
    exchange: all_reduce.Exchange = all_reduce.ALONE
    if request["addresses"]:
        exchange = Timed(tf, all_reduce.join(Cluster(tuple(request["addresses"]), rank)))  # as between hosts
    elif request["in_parts"]:
        exchange = Timed(tf)
    from cpu3d.training.learner import Learner, parameter_count

    config = config_of(request, exchange.count)
    learner = Learner(config, exchange)
    parts = itertools.repeat(made_up(tf, config.unet, request["micro_batch"], config.grid))

    def wait_for_all(what: str, meanwhile: Callable[[], Any]) -> None:
        (folder / f"{what}-{rank}").touch()
        while len(list(folder.glob(f"{what}-*"))) < count:
            meanwhile()

    for _ in range(request["warm_up"]):
        learner.step(parts, 1e-4)
    wait_for_all("ready", lambda: time.sleep(0.002))
    step_s, both_s = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        both_s.append(learner.step(parts, 1e-4).exchange_s)
        step_s.append(time.perf_counter() - begin)
    result: Dict[str, Any] = {"step_s": step_s}
    if isinstance(exchange, Timed):
        wait_s, sum_s = exchange.wait_s[-steps:], exchange.sum_s[-steps:]
        own_s = wait_s  # what the trainer does not have: all that stands for an exchange, or the sum before the sum
        if request["addresses"]:
            whole_s, messages = statistics.median(exchange.sum_of_one() for _ in range(20)), 2 * (count - 1)
            message_s, own_s = min(ASSUMED.message_s, whole_s / messages), [whole_s] * steps
            result.update(call_s=whole_s - messages * message_s, message_s=message_s)
        # What the learner takes for its exchange and the exchange itself does not is packing and unpacking.
        packing_s = [both - wait - own for both, wait, own in zip(both_s, wait_s, sum_s)]
        step_s, wait_s = ([one - own for one, own in zip(each, own_s)] for each in (step_s, wait_s))
        result.update(step_s=step_s, wait_s=wait_s, exchange_s=sum_s, packing_s=packing_s)
    if not request["addresses"]:  # the others' last steps are not to run faster than the first
        wait_for_all("done", lambda: learner.step(parts, 1e-4))
    exchange.close()
    return {**result, "parameters": parameter_count(learner.model), **harness.facts_of(tf, threads, host)}


def _one_round(results: Sequence[Result]) -> Result:
    """Means over all steps of all workers, which add up: step = compute + wait + exchange + packing."""
    step_s = [seconds for one in results for seconds in one["step_s"]]
    values = {name: [seconds for one in results for seconds in one.get(name, ())] for name in PARTS}
    parts = {name: statistics.fmean(seconds or [0.0]) for name, seconds in values.items()}
    found = {"step_s": statistics.fmean(step_s), "step_s_min": min(step_s), "step_s_max": max(step_s), **parts}
    found["compute_s"] = found["step_s"] - sum(parts.values())
    found["process_peak_bytes"] = max(one["process_peak_bytes"] for one in results)
    found.update({name: statistics.fmean(one.get(name, 0.0) for one in results) for name in ("call_s", "message_s")})
    return {**found, **{name: results[0][name] for name in ("threads", "parameters", "engine_name", "versions")}}


# --- The record as tables ---


def scaling_table(record: Mapping[str, Any]) -> Table:
    """A row each way: its step and the parts of it, volumes a second, efficiency, peak."""
    rows = []
    for row in record["rows"]:
        cells = [NAMES[row["name"]].format(row["workers"]), str(row["workers"] * record["cores_per_worker"])]
        cells += [with_range(row, "step_s"), *(f"{1000 * row[part]:.0f}" for part in PARTS)]
        cells += [f"{row['processes'] * record['batch'] / row['step_s']:.3f}", with_range(row, "efficiency")]
        rows.append([*cells, gib(row["process_peak_bytes"])])
    about = f"policy {record['unet']['policy']}, {record['engine_name']}, {host_of(record)}"
    step = title_of(record, f"batch {record['batch']} a worker")
    title = (
        f"{step}, {about}. Of a step: waiting for the slower, all-reduce, packing gradients into a vector and out of it"
    )
    parts = ("waiting, ms", "all-reduce, ms", "packing, ms")
    return Table(("", "cores", "s a step", *parts, "volumes/s", "efficiency", "peak, GiB"), rows, title=title)


def scaling_lines(records: Sequence[Mapping[str, Any]]) -> List[str]:
    """Markdown of the records, one of each job, and how far the estimator is off."""
    lines = [line for record in records for line in (*scaling_table(record).markdown(), "")]
    errors = ", ".join(f"{error:+.1%}" for error in predicted_errors(records))
    constants = "the other records" if len(records) > 1 else "the same record, which flatters"
    return [*lines, f"Errors of the estimator's steps of several workers, by constants of {constants}: {errors}."]
