"""One worker against several on this host: computing and exchanging timed apart, and what becomes of the gap.

    ./run.sh bench scaling --shape 240 240 160 --workers 1 2 --rounds 3 --record records/scaling.jsonl
    ./run.sh bench scaling --shape 128 128 128 --workers 2 4 --cores-per-worker 14 --picture scaling.png

Each worker is a process held to cores of its own and does the trainer's own step on made-up data. In turn, round by
round: one worker; one that adds its gradients up and updates its weights apart, as several have to; several that
exchange their gradients, each with as much to do; as many that do all but exchange, which shows what they take from
each other by being on one host; one worker with the cores of all. An efficiency of 1 would be as many times the volumes
a second. The estimator takes its constants for several hosts from the record.

`python -m cpu3d.bench.scaling '{"shape": [64, 64, 64], ..., "cpus": [0]}'` is one worker; it prints one JSON line.
"""

import argparse
import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from rich.console import Console

from cpu3d.bench.harness import ROOT, ProcessFailedError
from cpu3d.bench.step import add_step_options, made_up, step_request
from cpu3d.config import RunConfig
from cpu3d.distributed import strategy
from cpu3d.distributed.cluster import Cluster
from cpu3d.distributed.hosts import LOOPBACK, free_ports
from cpu3d.errors import InputError
from cpu3d.host.apply import engine_name, in_force, set_up
from cpu3d.host.memory import peak_rss_bytes
from cpu3d.host.thread_plan import thread_plans
from cpu3d.host.topology import Topology, read_topology
from cpu3d.util.atomic import atomic_write, writable_folder
from cpu3d.util.child import forward_signals, start
from cpu3d.util.progress import bar
from cpu3d.util.records import append_record, versions
from memory_estimator.figure import PALETTE, new_figure, plain, png
from memory_estimator.scaling.costs import ALONE, APART, IN_PARTS, TOGETHER, WIDE, row_of
from memory_estimator.scaling.model import predicted_errors
from memory_estimator.schema import add_options, check, from_args, option
from memory_estimator.table import Table
from memory_estimator.units import GIB
from models.config import UNetConfig

GRADIENT_BYTES = 4
"""Gradients are exchanged in float32."""

SUMS, CHAINED = 20, 9
"""Sums of a single number that are timed, and sums one after the other in one graph: what each of these takes more
there is of its messages, not of the call."""

LOOK_EVERY_S = 0.1

LOOPBACK_BYTES, PIECE_BYTES = 256 * 2**20, 2**20

THREADS = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")

NOT_PASSED_ON = ("TF_CONFIG", *THREADS, "KMP_AFFINITY")
"""Of the environment: the threads of a measuring process follow from the cores that it is given."""

COLOURS = {"one worker": PALETTE[5], "in parts": "#cccccc", "contention": PALETTE[0], "rest": "#999999",
           "packing": PALETTE[3], "all-reduce": PALETTE[1], "waiting": PALETTE[4]}  # fmt: skip

Way = Tuple[str, int, List[List[int]]]
"""Its name, its number of workers, and the CPUs of each process."""


@dataclass(frozen=True)
class Options:
    """What `bench scaling` has beside the options of a step."""

    workers: Tuple[int, ...] = option((1, 2), help="how many, 1 is always there (default: 1 2)", metavar="N")
    cores_per_worker: int = option(0, help="default: what the most workers leave each", metavar="K")
    rounds: int = option(3, help="how often, in turn", at_least=1, metavar="N")
    json: bool = option(False, help="print one JSON object")
    record: Optional[Path] = option(None, help="append the result to a .jsonl file", metavar="FILE")
    picture: Optional[Path] = option(None, help="draw where the seconds of a step go, as PNG", metavar="FILE")

    def __post_init__(self):
        check(self, InputError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_step_options(parser)
    add_options(parser, Options)


def run(args: argparse.Namespace) -> int:
    options = from_args(Options, args)
    for path in (options.record, options.picture):
        if path:
            writable_folder(path.parent, "folder")
    request = step_request(args)
    del request["matmul"]
    topology = read_topology()
    each = cores_each(topology, options.workers, options.cores_per_worker)
    result = compare_workers(request, ways(topology, options.workers, each), cores=each, rounds=options.rounds)
    result.update(cores_per_worker=each, host=topology.host.summary())
    if options.json:
        print(json.dumps(result))
    else:
        for table in (scaling_table(result), gap_table(result)):
            Console().print(table.rich())
    if options.record:
        append_record(options.record, "scaling", result)
    if options.picture:
        with atomic_write(options.picture) as file:
            file.write(draw_scaling(result))
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


def compare_workers(request: Dict[str, Any], found: Sequence[Way], *, cores: int, rounds: int) -> Dict[str, Any]:
    """Measure every way, `rounds` times in turn; the content of a record, but for the host and the `cores` of a worker.

    A row's figures are all of the round with its median step, so that a step's parts add up to it.
    """
    measured: List[List[Dict[str, Any]]] = [[] for _ in found]
    results: List[Dict[str, Any]] = []
    loopback: List[float] = []
    with bar("bench scaling", total=rounds * len(found)) as advance:
        for _ in range(rounds):
            loopback.append(loopback_bytes_per_s())
            for (name, count, cpus), rows in zip(found, measured):
                results = measure_together(
                    request,
                    cpus,
                    threads=cores * (count if name == WIDE else 1),
                    exchanging=name == TOGETHER,
                    in_parts=name in (IN_PARTS, APART),
                )
                rows.append(_one_round(results))
                advance()
    alone = [one["step_s"] for one in measured[0]]
    rows = []
    for (name, count, cpus), per_round in zip(found, measured):
        steps = [one["step_s"] for one in per_round]
        # Of one worker with all the cores: how many times as fast it is, over how many times the cores.
        shares = [base / step / (count if name == WIDE else 1) for base, step in zip(alone, steps)]
        rows.append(
            {
                "name": name,
                "workers": count,
                "processes": len(cpus),
                "cpus": [list(share) for share in cpus],
                **sorted(per_round, key=lambda one: one["step_s"])[(len(per_round) - 1) // 2],
                "process_peak_bytes": max(one["process_peak_bytes"] for one in per_round),
                "step_s_min": min(one["step_s_min"] for one in per_round),
                "step_s_max": max(one["step_s_max"] for one in per_round),
                "rounds": steps,
                "efficiency": statistics.median(shares),
                "efficiency_min": min(shares),
                "efficiency_max": max(shares),
            }
        )
    return {
        **request,
        "gradient_bytes": GRADIENT_BYTES * results[0]["parameters"],
        "loopback_bytes_per_s": statistics.median(loopback),
        "rows": rows,
        **{name: results[0][name] for name in ("engine_name", "versions")},
        "threads": {row["name"]: row.pop("threads") for row in rows},
    }


# --- Several processes at a time ---


def loopback_bytes_per_s(total_bytes: int = LOOPBACK_BYTES) -> float:
    """The rate of one TCP connection of this host with itself, one way: what an exchange over gRPC is held against."""

    def send(address: Any) -> None:
        with socket.create_connection(address) as connection:
            for begin in range(0, total_bytes, PIECE_BYTES):
                connection.sendall(bytes(min(PIECE_BYTES, total_bytes - begin)))

    with socket.create_server((LOOPBACK, 0)) as server:
        begin = time.perf_counter()
        sender = threading.Thread(target=send, args=(server.getsockname(),), daemon=True)
        sender.start()
        connection, _ = server.accept()
        piece = bytearray(PIECE_BYTES)
        with connection:
            while connection.recv_into(piece):
                pass
        seconds = time.perf_counter() - begin
        sender.join()
    return total_bytes / seconds


def measure_together(
    request: Dict[str, Any], cpus: Sequence[Sequence[int]], *, threads: int, exchanging: bool, in_parts: bool
) -> List[Dict[str, Any]]:
    """What `work` returns in as many processes as `cpus` has shares, all at once; by rank.

    A share without CPUs is a process that is held to none, of so many threads.

    Raises ProcessFailedError where one of them fails, once all have been ended, and KeyboardInterrupt for our signals.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-scaling-")))
        addresses = [f"{LOOPBACK}:{port}" for port in free_ports(len(cpus))] if exchanging else []
        shared = {**request, "addresses": addresses, "in_parts": in_parts, "folder": str(folder), "count": len(cpus)}
        environ = {name: value for name, value in os.environ.items() if name not in NOT_PASSED_ON}
        if not all(cpus):
            environ.update(dict.fromkeys(THREADS, str(threads)))
        processes: List[subprocess.Popen] = []
        signals = stack.enter_context(forward_signals(processes, lambda number: number))
        stack.callback(_end, processes)
        for rank, share in enumerate(cpus):
            content = json.dumps({**shared, "rank": rank, "cpus": list(share)})
            log = stack.enter_context((folder / f"log-{rank}").open("wb"))
            processes.append(start([sys.executable, "-m", "cpu3d.bench.scaling", content], log, environ, ROOT))
        while any(process.poll() is None for process in processes):
            if signals or any(process.poll() for process in processes):
                break
            time.sleep(LOOK_EVERY_S)
        if signals:
            raise KeyboardInterrupt
        # One that has failed comes before those that fail without it.
        in_order = sorted(range(len(processes)), key=lambda rank: not processes[rank].poll())
        return [_answer(processes[rank], folder / f"log-{rank}", rank) for rank in in_order]


# --- One worker ---


class Timed(strategy.Exchange):
    """An exchange whose sums are each preceded by that of a single number: who waits there waits for the others.

    What that one costs by itself, the trainer does not have: `fixed_costs` measures it, to be taken off.
    """

    def __init__(self, tf: Any, inner: strategy.Exchange):
        self._tf, self._inner = tf, inner
        self.rank, self.count = inner.rank, inner.count
        self.wait_s: List[float] = []
        self.sum_s: List[float] = []

    def sum(self, vector: Any) -> Any:
        begin = time.perf_counter()
        self._inner.sum(self._tf.zeros([1])).numpy()
        met = time.perf_counter()
        total = self._inner.sum(vector)
        self._tf.reshape(total, [-1])[0].numpy()  # it is there
        self.wait_s.append(met - begin)
        self.sum_s.append(time.perf_counter() - met)
        return total

    def close(self) -> None:
        self._inner.close()

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


class AsOfTwo(strategy.Exchange):
    """A worker that does all that one of two has to do but the exchange: it takes its own sum for that of both."""

    count = 2

    def __init__(self, tf: Any):
        self._tf = tf
        self.sum_s: List[float] = []

    def sum(self, vector: Any) -> Any:
        begin = time.perf_counter()
        # The last two numbers are the fingerprints of both workers' weights, which have to be the same.
        total = self._tf.concat([vector[:-1], vector[-2:-1]], 0)
        self.sum_s.append(time.perf_counter() - begin)
        return total


def work(request: Dict[str, Any]) -> Dict[str, Any]:
    """Seconds of every timed step, and of its parts where there is an exchange.

    `request` is that of `bench step` with `batch` of one worker, and: cpus, what the process is held to; addresses, of
    all workers, () without an exchange; in_parts, whether gradients are added up and the weights updated after though
    there is no exchange; rank; folder, where the processes of one measurement find each other; count, how many they
    are. None begins before all are ready, and without an exchange none ends before all are done.
    """
    if request["cpus"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, request["cpus"])  # so that the host is planned for as if it had these alone
    folder, rank, count = Path(request["folder"]), request["rank"], request["count"]
    _, threads, tf = set_up(request["engine"])
    exchange: strategy.Exchange = strategy.ALONE
    if request["addresses"]:
        exchange = Timed(tf, strategy.join(Cluster(tuple(request["addresses"]), rank)))  # as between hosts
    elif request["in_parts"]:
        exchange = AsOfTwo(tf)
    from cpu3d.training.learner import Learner, parameter_count

    unet, grid, micro = UNetConfig(**request["unet"]), tuple(request["shape"]), request["micro_batch"]
    batch = request["batch"] * exchange.count
    config = RunConfig(grid=grid, unet=unet, batch=batch, micro_batch=micro, optimizer=request["optimizer"])
    learner = Learner(config, exchange)
    parts = itertools.repeat(made_up(tf, unet, micro, grid))
    for _ in range(request["warm_up"]):
        learner.step(parts, 1e-4)
    (folder / f"ready-{rank}").touch()
    while len(list(folder.glob("ready-*"))) < count:
        time.sleep(0.002)
    step_s, exchange_s = [], []
    for _ in range(request["steps"]):
        begin = time.perf_counter()
        outcome = learner.step(parts, 1e-4)
        step_s.append(time.perf_counter() - begin)
        exchange_s.append(outcome.exchange_s)
    # What the learner takes for its exchange and the exchange itself does not is packing and unpacking.
    last = slice(-request["steps"], None)
    result: Dict[str, Any] = {"step_s": step_s, "wait_s": [], "sum_s": [], "packing_s": []}
    if isinstance(exchange, Timed):
        wait_s, sum_s = exchange.wait_s[last], exchange.sum_s[last]
        call_s, message_s = exchange.fixed_costs()
        meeting_s = call_s + 2 * (count - 1) * message_s  # of the sum before the sum
        result = {
            "step_s": [seconds - meeting_s for seconds in step_s],
            "wait_s": [seconds - meeting_s for seconds in wait_s],
            "sum_s": sum_s,
            "packing_s": [both - wait - own for both, wait, own in zip(exchange_s, wait_s, sum_s)],
            "call_s": call_s,
            "message_s": message_s,
        }
        exchange.close()
    else:
        if isinstance(exchange, AsOfTwo):
            sum_s = exchange.sum_s[last]
            result["step_s"] = [seconds - own for seconds, own in zip(step_s, sum_s)]
            result["packing_s"] = [seconds - own for seconds, own in zip(exchange_s, sum_s)]
        (folder / f"done-{rank}").touch()
        while len(list(folder.glob("done-*"))) < count:  # the others' last steps are not to run faster than the first
            learner.step(parts, 1e-4)
    return {
        **result,
        "parameters": parameter_count(learner.model),
        "process_peak_bytes": peak_rss_bytes(),
        "engine_name": engine_name(tf),
        "threads": in_force(threads),
        "versions": versions(),
    }


# --- The record as tables and a picture ---


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
        efficiency = f"{row['efficiency']:.1%}"
        if row["efficiency_max"] > row["efficiency_min"]:
            efficiency += f" ({row['efficiency_min']:.1%} to {row['efficiency_max']:.1%})"
        rows.append(
            (
                _name(row),
                str(row["workers"] * result["cores_per_worker"]),
                f"{row['step_s']:.2f} ({row['step_s_min']:.2f} to {row['step_s_max']:.2f})",
                f"{row['processes'] * result['batch'] / row['step_s']:.3f}",
                "-" if row["name"] == ALONE else efficiency,
                f"{row['process_peak_bytes'] / GIB:.2f}",
            )
        )
    return Table(("", "cores", "s a step", "volumes/s", "efficiency", "peak, GiB"), rows, title=_title(result))


def gap_table(result: Mapping[str, Any]) -> Table:
    """A row for each number of workers: where the milliseconds go that its step takes more, and the rate on the way."""
    alone_s, columns, rows = row_of(result, ALONE, 1)["step_s"], [], []
    for row in (row for row in result["rows"] if row["name"] == TOGETHER):
        parts = gap(result, row["workers"])
        columns = list(parts)
        passed_bytes = 2 * (row["workers"] - 1) / row["workers"] * result["gradient_bytes"]
        rate = passed_bytes / row["exchange_s"]
        rows.append(
            (
                f"{row['workers']} workers",
                *(f"{1000 * s:+.0f} ({s / alone_s:+.1%})" for s in (row["step_s"] - alone_s, *parts.values())),
                f"{rate / 1e9:.2f} ({rate / result['loopback_bytes_per_s']:.0%})",
            )
        )
    return Table(("ms more a step than one", "all", *columns, "GB/s each way (of a plain socket)"), rows)


def scaling_lines(records: Sequence[Mapping[str, Any]]) -> List[str]:
    """Markdown of the records, one of each job: both tables each, and how far the estimator is off."""
    lines: List[str] = []
    for record in records:
        lines += [*scaling_table(record).markdown(), "", *gap_table(record).markdown(), ""]
    errors = ", ".join(f"{error:+.1%}" for error in predicted_errors(records))
    constants = "the other records" if len(records) > 1 else "the same record, which flatters"
    return [*lines, f"Errors of the estimator's steps of several workers, by constants of {constants}: {errors}."]


def draw_scaling(result: Mapping[str, Any]) -> bytes:
    """A bar each way, seconds of a step; those of several workers in their parts. PNG. A part below zero is noise."""
    rows = result["rows"]
    figure = new_figure(9.6, 0.45 * len(rows) + 1.6)
    axes = figure.add_subplot()
    plain(axes, "")
    axes.grid(False, axis="y")
    named = set()
    alone_s = row_of(result, ALONE, 1)["step_s"]
    for place, row in enumerate(rows):
        parts = {"one worker": row["step_s"]}
        if row["name"] == TOGETHER:
            parts = {"one worker": alone_s, **gap(result, row["workers"])}
        left = 0.0
        for name in (name for name in COLOURS if parts.get(name, 0) > 0):
            label = None if name in named else name
            axes.barh(place, parts[name], 0.62, left=left, color=COLOURS[name], label=label)
            named.add(name)
            left += parts[name]
        axes.plot([row["step_s_min"], row["step_s_max"]], [place, place], color="#333333", linewidth=1.0)
        text = f"{row['step_s']:.2f} s" + ("" if row["name"] == ALONE else f", efficiency {row['efficiency']:.0%}")
        axes.text(max(left, row["step_s_max"]), place, f" {text}", fontsize=8, va="center")
    axes.set_yticks(range(len(rows)), [_name(row) for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.28 * max(row["step_s_max"] for row in rows))
    axes.set_xlabel("seconds of a step (line: shortest to longest step)", fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(-0.02, 0.98), ncols=7)
    figure.suptitle(_title(result), fontsize=9, fontweight="bold", x=0.01, ha="left")
    figure.tight_layout(pad=0.6, rect=(0, 0, 1, 0.98))
    return png(figure)


# --- Private helpers ---


def _title(result: Mapping[str, Any]) -> str:
    unet, shape = result["unet"], " x ".join(map(str, result["shape"]))
    return (
        f"{shape} x {unet['channels']}, {unet['filters']} filters, batch {result['batch']} a worker, "
        f"{unet['dtype']}, policy {unet['policy']}, {result['engine_name']}, {result['host']['cpu']}"
    )


def _name(row: Mapping[str, Any]) -> str:
    count = row["workers"]
    return {
        ALONE: "1 worker",
        IN_PARTS: "1 worker, its update apart",
        TOGETHER: f"{count} workers",
        APART: f"{count} side by side, no exchange",
        WIDE: f"1 worker on the cores of {count}",
    }[row["name"]]


def _one_round(results: Sequence[Dict[str, Any]]) -> Dict[str, Any]:
    """Means over all steps of all workers, which add up: step = compute + wait + exchange + packing."""
    every = {
        name: list(itertools.chain.from_iterable(one[name] for one in results))
        for name in ("step_s", "wait_s", "sum_s", "packing_s")
    }
    step_s, wait_s, exchange_s, packing_s = (statistics.fmean(one) if one else 0.0 for one in every.values())
    return {
        "step_s": step_s,
        "step_s_min": min(every["step_s"]),
        "step_s_max": max(every["step_s"]),
        "compute_s": step_s - wait_s - exchange_s - packing_s,
        "wait_s": wait_s,
        "exchange_s": exchange_s,
        "packing_s": packing_s,
        **{name: statistics.fmean(one.get(name, 0.0) for one in results) for name in ("call_s", "message_s")},
        "process_peak_bytes": max(one["process_peak_bytes"] for one in results),
        "threads": results[0]["threads"],
    }


def _answer(process: subprocess.Popen, log: Path, rank: int) -> Dict[str, Any]:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing"]
    try:
        return json.loads(lines[-1])
    except ValueError:
        raise ProcessFailedError(
            f"worker {rank} must end with a line of JSON, exited with {process.poll()} saying: {lines[-1]}",
            process.poll() or 1,
            lines[-1],
        ) from None


def _end(processes: Sequence[subprocess.Popen]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


if __name__ == "__main__":
    print(json.dumps(work(json.loads(sys.argv[1]))))
