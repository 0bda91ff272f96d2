"""One worker against several on this host: computing and exchanging timed apart, and what becomes of the gap.

    ./run.sh bench scaling --shape 240 240 160 --workers 1 2 --rounds 3 --record records/scaling.jsonl
    ./run.sh bench scaling --shape 128 128 128 --workers 2 4 --cores-per-worker 14

Each worker is a process held to cores of its own and does the trainer's own step on made-up data. In turn, round by
round: one worker; one that adds its gradients up and updates its weights apart, as several have to; several that
exchange their gradients, each with as much to do; as many that do all but exchange, which shows what they take from
each other by being on one host; one worker with the cores of all. An efficiency of 1 would be as many times the volumes
a second. The estimator takes its constants for several hosts from the record.
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

from cpu3d.bench.harness import Output, Result, command_of, facts_of, in_turn, middle, run_together, times
from cpu3d.bench.step import StepOptions, add_step_options, config_of, made_up, step_request
from cpu3d.distributed import all_reduce
from cpu3d.distributed.cluster import LOOPBACK, Cluster, free_ports
from cpu3d.errors import InputError
from cpu3d.host.apply import set_up
from cpu3d.host.thread_plan import thread_plans
from cpu3d.host.topology import Topology, read_topology
from memory_estimator.scaling.model import ALONE, APART, IN_PARTS, TOGETHER, WIDE, predicted_errors, row_of
from memory_estimator.schema import add_options, from_args, option
from memory_estimator.table import Table
from memory_estimator.units import GIB

HELP = "measure one worker against several on this host: computing and exchanging apart"

GRADIENT_BYTES = 4
"""Gradients are exchanged in float32."""

SUMS, CHAINED = 20, 9
"""Sums of a single number that are timed, and sums one after the other in one graph: what each of these takes more
there is of its messages, not of the call."""

THREADS = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")

NOT_PASSED_ON = ("TF_CONFIG", *THREADS, "KMP_AFFINITY")
"""Of the environment: the threads of a measuring process follow from the cores that it is given."""

PARTS = ("wait_s", "exchange_s", "packing_s")
"""Of a step, what is not computing."""

NAMES = {
    ALONE: "1 worker",
    IN_PARTS: "1 worker, its update apart",
    TOGETHER: "{} workers",
    APART: "{} side by side, no exchange",
    WIDE: "1 worker on the cores of {}",
}
"""Of the rows, by their number of workers."""

Way = Tuple[str, int, List[List[int]]]
"""Its name, its number of workers, and the CPUs of each process."""


@dataclass(frozen=True)
class Options:
    """What `bench scaling` has beside the options of a step."""

    workers: Tuple[int, ...] = option((1, 2), help="how many, 1 is always there (default: 1 2)", metavar="N")
    cores_per_worker: int = option(0, help="default: what the most workers leave each", metavar="K")
    rounds: int = option(3, help="how often, in turn", at_least=1, metavar="N")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_step_options(parser, StepOptions, Options)
    add_options(parser, Output, only=("json", "record"))


def run(args: argparse.Namespace) -> int:
    options, output = from_args(Options, args), from_args(Output, args)
    request = step_request(args, from_args(StepOptions, args))
    del request["matmul"], request["threads"]
    topology = read_topology()
    each = cores_each(topology, options.workers, options.cores_per_worker)
    result = compare_workers(request, ways(topology, options.workers, each), cores=each, rounds=options.rounds)
    result.update(cores_per_worker=each, host=topology.host.summary())
    output.publish("scaling", result, [scaling_table(result), gap_table(result)])
    return 0


def cores_each(topology: Topology, workers: Sequence[int], asked: int = 0) -> int:
    """Cores of a worker: as asked for, else what `thread_plans` gives the most workers, of the smallest part.

    Raises InputError for less than two workers at the most, and where the host has not the cores for them.
    """
    most = max(workers)
    if most < 2 or min(workers) < 1:
        raise InputError(f"--workers must have a number above 1, got {list(workers)}; write it like --workers 1 2")
    least = min(plan.intra_op for plan in thread_plans(topology, most))
    if not 0 <= asked <= least:
        raise InputError(f"--cores-per-worker must be at least 1 and at most {least} with {most} workers, got {asked}")
    return asked or least


def ways(topology: Topology, workers: Sequence[int], each: int) -> List[Way]:
    """All that is measured, in its order. Shares are parts of those of the most workers, as `train` would have them:
    whole cores with all their hyper-threads; empty under a quota, where nothing is bound."""
    counts = sorted({number for number in workers if number > 1})
    shares = []
    for plan in thread_plans(topology, counts[-1]):
        cores = [core for core in topology.cores if {cpu.number for cpu in core} <= set(plan.cpus)]
        shares.append([cpu.number for core in cores[:each] for cpu in core])
    found: List[Way] = [(ALONE, 1, shares[:1]), (IN_PARTS, 1, shares[:1])]
    for count in counts:
        joined = [list(itertools.chain.from_iterable(shares[:count]))]
        found += [(TOGETHER, count, shares[:count]), (APART, count, shares[:count]), (WIDE, count, joined)]
    return found


def compare_workers(request: Dict[str, Any], found: Sequence[Way], *, cores: int, rounds: int) -> Result:
    """Measure every way, `rounds` times in turn; the content of a record, but for the host and the `cores` of a worker.

    A row's figures are all of the round with its median step, so that a step's parts add up to it.
    """
    turns = {way[:2]: lambda _, way=way: _one_round(measure_together(request, *way, threads=cores)) for way in found}
    measured, _ = in_turn(turns, rounds, "scaling", keep_going=False)
    rows, threads_in_force = [], {}
    for name, count, cpus in found:
        per_round = measured[name, count]
        row = dict(middle(per_round))
        threads_in_force[name] = row.pop("threads")
        facts = {fact: row.pop(fact) for fact in ("parameters", "engine_name", "versions")}
        # Of one worker with all the cores: how many times as fast it is, over how many times the cores.
        shares = [
            base["step_s"] / one["step_s"] / (count if name == WIDE else 1)
            for base, one in zip(measured[ALONE, 1], per_round)
        ]
        row.update(
            process_peak_bytes=max(one["process_peak_bytes"] for one in per_round),
            step_s_min=min(one["step_s_min"] for one in per_round),
            step_s_max=max(one["step_s_max"] for one in per_round),
            efficiency=statistics.median(shares),
            efficiency_min=min(shares),
            efficiency_max=max(shares),
            rounds=[one["step_s"] for one in per_round],
        )
        rows.append(
            {"name": name, "workers": count, "processes": len(cpus), "cpus": [list(one) for one in cpus], **row}
        )
    about = {"engine_name": facts["engine_name"], "versions": facts["versions"], "threads": threads_in_force}
    return {**request, "gradient_bytes": GRADIENT_BYTES * facts["parameters"], "rows": rows, **about}


def measure_together(
    request: Dict[str, Any], name: str, count: int, cpus: Sequence[Sequence[int]], *, threads: int
) -> List[Result]:
    """What `work` returns in as many processes as `cpus` has shares, all at once; by rank.

    A share without CPUs is a process that is held to none, of so many threads, or of `count` times as many for WIDE.
    Raises ProcessFailedError where one of them fails, once all have been ended.
    """
    with tempfile.TemporaryDirectory(prefix="bench-scaling-") as folder:
        addresses = [f"{LOOPBACK}:{port}" for port in free_ports(len(cpus))] if name == TOGETHER else []
        shared = {**request, "addresses": addresses, "in_parts": name in (IN_PARTS, APART), "folder": folder}
        environ = {name: value for name, value in os.environ.items() if name not in NOT_PASSED_ON}
        if not all(cpus):
            environ.update(dict.fromkeys(THREADS, str(threads * (count if name == WIDE else 1))))
        own = ({"count": len(cpus), "rank": rank, "cpus": list(share)} for rank, share in enumerate(cpus))
        return run_together([command_of(work, {**shared, **one}) for one in own], "a worker", environ=environ)


# --- One worker ---


class AsOfTwo(all_reduce.Exchange):
    """A worker that does all that one of two has to do but the exchange: it takes its own sum for that of both."""

    count = 2

    def __init__(self, tf: Any):
        self._tf = tf
        self.wait_s: List[float] = []
        self.sum_s: List[float] = []

    def sum(self, vector: Any) -> Any:
        begin = time.perf_counter()
        # The last two numbers are the fingerprints of both workers' weights, which have to be the same.
        total = self._tf.concat([vector[:-1], vector[-2:-1]], 0)
        self.wait_s.append(time.perf_counter() - begin)
        self.sum_s.append(0.0)
        return total


class Timed(AsOfTwo):
    """An exchange whose sums are each preceded by that of a single number: who waits there waits for the others.

    What that one costs by itself, the trainer does not have: `fixed_costs` measures it, to be taken off.
    """

    def __init__(self, tf: Any, inner: all_reduce.Exchange):
        super().__init__(tf)
        self._inner, self.rank, self.count, self.close = inner, inner.rank, inner.count, inner.close

    def sum(self, vector: Any) -> Any:
        begin = time.perf_counter()
        self._inner.sum(self._tf.zeros([1])).numpy()
        met = time.perf_counter()
        total = self._inner.sum(vector)
        self._tf.reshape(total, [-1])[0].numpy()  # it is there
        self.wait_s.append(met - begin)
        self.sum_s.append(time.perf_counter() - met)
        return total

    def fixed_costs(self) -> Tuple[float, float]:
        """Seconds that a sum takes whatever its length, and those of a message, of which it has 2 (n - 1) in turn.

        A message by what CHAINED sums in one graph take more than one: what TensorFlow does for a sum inside the graph
        is in it, so it is an upper bound.
        """
        one = self._tf.zeros([1])

        @self._tf.function(input_signature=[self._tf.TensorSpec([1], self._tf.float32)])
        def chain(number):
            for _ in range(CHAINED):
                number = self._inner.sum(number)
            return number

        def seconds_of(function: Callable[[Any], Any]) -> float:
            function(one).numpy()  # traced, and met
            times = []
            for _ in range(SUMS):
                self._inner.sum(one).numpy()  # all begin at once
                begin = time.perf_counter()
                function(one).numpy()
                times.append(time.perf_counter() - begin)
            return statistics.median(times)

        whole_s, chain_s = seconds_of(self._inner.sum), seconds_of(chain)
        messages = 2 * (self.count - 1)
        message_s = min(max(chain_s - whole_s, 0.0) / (CHAINED - 1), whole_s) / messages
        return whole_s - messages * message_s, message_s


def work(request: Dict[str, Any]) -> Result:
    """Seconds of every timed step, and of its parts where there is an exchange.

    `request` is that of `bench step` with `batch` of one worker, and: cpus, what the process is held to; addresses, of
    all workers, () without an exchange; in_parts, whether gradients are added up and the weights updated after though
    there is no exchange; rank; folder, where the processes of one measurement find each other; count, how many they
    are. None begins before all are ready, and without an exchange none ends before all are done.
    """
    if request["cpus"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, request["cpus"])  # so that the host is planned for as if it had these alone
    folder, rank, count = Path(request["folder"]), request["rank"], request["count"]
    host, threads, tf = set_up(request["engine"])
    exchange: all_reduce.Exchange = all_reduce.ALONE
    if request["addresses"]:
        exchange = Timed(tf, all_reduce.join(Cluster(tuple(request["addresses"]), rank)))  # as between hosts
    elif request["in_parts"]:
        exchange = AsOfTwo(tf)
    from cpu3d.training.learner import Learner, parameter_count

    config, steps = config_of(request, exchange.count), request["steps"]
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
        outcome = learner.step(parts, 1e-4)
        step_s.append(time.perf_counter() - begin)
        both_s.append(outcome.exchange_s)
    result: Dict[str, Any] = {"step_s": step_s}
    if exchange.count > 1:
        wait_s, sum_s = exchange.wait_s[-steps:], exchange.sum_s[-steps:]
        own_s = wait_s  # what the trainer does not have: its place is taken by the exchange
        if isinstance(exchange, Timed):
            call_s, message_s = exchange.fixed_costs()
            result.update(call_s=call_s, message_s=message_s)
            own_s = [call_s + 2 * (count - 1) * message_s] * steps  # of the sum before the sum
        result["step_s"] = [all_s - own for all_s, own in zip(step_s, own_s)]
        result["wait_s"] = [wait - own for wait, own in zip(wait_s, own_s)]
        result["exchange_s"] = sum_s
        # What the learner takes for its exchange and the exchange itself does not is packing and unpacking.
        result["packing_s"] = [both - wait - own for both, wait, own in zip(both_s, wait_s, sum_s)]
    if not request["addresses"]:  # the others' last steps are not to run faster than the first
        wait_for_all("done", lambda: learner.step(parts, 1e-4))
    exchange.close()
    return {**result, "parameters": parameter_count(learner.model), **facts_of(tf, threads, host)}


# --- The record as tables ---


def gap(result: Mapping[str, Any], workers: int) -> Dict[str, float]:
    """Where the seconds go that a step of several takes more than one of one; they add up to that.

    "in parts": one worker that adds its gradients up and updates its weights apart. "contention": as many such workers
    side by side, without exchange, against one. "waiting": for the slower, at each step. "all-reduce": the exchange
    itself. "packing": gradients into one vector and out of it. "rest": what the rounds differ by.
    """
    alone, in_parts = row_of(result, ALONE, 1), row_of(result, IN_PARTS, 1)
    together, apart = row_of(result, TOGETHER, workers), row_of(result, APART, workers)
    return {
        "in parts": in_parts["compute_s"] - alone["step_s"],
        "contention": apart["compute_s"] - in_parts["compute_s"],
        "waiting": together["wait_s"],
        "all-reduce": together["exchange_s"],
        "packing": together["packing_s"],
        "rest": together["compute_s"] - apart["compute_s"],
    }


def scaling_table(result: Mapping[str, Any]) -> Table:
    """A row each way: seconds, volumes a second, efficiency, peak."""
    rows = []
    for row in result["rows"]:
        efficiency, low, high = (f"{row[f'efficiency{end}']:.1%}" for end in ("", "_min", "_max"))
        spread = f" ({low} to {high})" if row["efficiency_max"] > row["efficiency_min"] else ""
        cells = {
            "": NAMES[row["name"]].format(row["workers"]),
            "cores": str(row["workers"] * result["cores_per_worker"]),
            "s a step": f"{row['step_s']:.2f} ({row['step_s_min']:.2f} to {row['step_s_max']:.2f})",
            "volumes/s": f"{row['processes'] * result['batch'] / row['step_s']:.3f}",
            "efficiency": "-" if row["name"] == ALONE else efficiency + spread,
            "peak, GiB": f"{row['process_peak_bytes'] / GIB:.2f}",
        }
        rows.append(tuple(cells.values()))
    unet = result["unet"]
    title = (
        f"{times(result['shape'])} x {unet['channels']}, {unet['filters']} filters, batch {result['batch']} a worker, "
        f"{unet['dtype']}, policy {unet['policy']}, {result['engine_name']}, {result['host']['cpu']}"
    )
    return Table(tuple(cells), rows, title=title)


def gap_table(result: Mapping[str, Any]) -> Table:
    """A row for each number of workers: where the milliseconds go that its step takes more, and the rate on the way."""
    alone_s, columns, rows = row_of(result, ALONE, 1)["step_s"], [], []
    for row in (row for row in result["rows"] if row["name"] == TOGETHER):
        parts = gap(result, row["workers"])
        columns = list(parts)
        rate = 2 * (row["workers"] - 1) / row["workers"] * result["gradient_bytes"] / row["exchange_s"]
        more = (f"{1000 * s:+.0f} ({s / alone_s:+.1%})" for s in (row["step_s"] - alone_s, *parts.values()))
        of_socket = f" ({rate / result['loopback_bytes_per_s']:.0%})" if "loopback_bytes_per_s" in result else ""
        rows.append((f"{row['workers']} workers", *more, f"{rate / 1e9:.2f}{of_socket}"))
    return Table(("ms more a step than one", "all", *columns, "GB/s each way (of a plain socket)"), rows)


def scaling_lines(records: Sequence[Mapping[str, Any]]) -> List[str]:
    """Markdown of the records, one of each job: both tables each, and how far the estimator is off."""
    lines: List[str] = []
    for record in records:
        lines += [*scaling_table(record).markdown(), "", *gap_table(record).markdown(), ""]
    errors = ", ".join(f"{error:+.1%}" for error in predicted_errors(records))
    constants = "the other records" if len(records) > 1 else "the same record, which flatters"
    return [*lines, f"Errors of the estimator's steps of several workers, by constants of {constants}: {errors}."]


# --- Private helpers ---


def _one_round(results: Sequence[Result]) -> Result:
    """Means over all steps of all workers, which add up: step = compute + wait + exchange + packing."""
    step_s = list(itertools.chain.from_iterable(one["step_s"] for one in results))
    parts = {name: [value for one in results for value in one.get(name, ())] for name in PARTS}
    parts_s = {name: statistics.fmean(values) if values else 0.0 for name, values in parts.items()}
    return {
        "step_s": statistics.fmean(step_s),
        "step_s_min": min(step_s),
        "step_s_max": max(step_s),
        "compute_s": statistics.fmean(step_s) - sum(parts_s.values()),
        **parts_s,
        **{name: statistics.fmean(one.get(name, 0.0) for one in results) for name in ("call_s", "message_s")},
        "process_peak_bytes": max(one["process_peak_bytes"] for one in results),
        **{name: results[0][name] for name in ("threads", "parameters", "engine_name", "versions")},
    }
