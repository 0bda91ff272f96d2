"""Measure the training step under every memory policy, in turn, beside peers and predictions.

    python -m records.policies --shape 128 128 128 --rounds 2 \\
        --peer "python other.py" --record records/policies.jsonl

A peer is any command whose last line of output is JSON with "step_s", and "peak_rss_bytes" if it
knows its peak. If one of our processes dies, its row shows that. The bytes in use over a step are
those of one more step, in which TensorFlow's profiler records every request to the allocator;
`python -m records.tables --picture` draws them."""

import itertools
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import numpy as np

from cpu3d.bench import harness
from cpu3d.bench.harness import Output, ProcessFailedError, Result, run_command, valid
from cpu3d.bench.step_costs import (
    MeasuredJob,
    StepOptions,
    measured_step,
    record_of,
    requested,
    row_of,
    step_table,
    with_predictions,
)
from cpu3d.errors import InputError
from memory_estimator.calibration import find_constants
from memory_estimator.common.schema import option
from models.config import POLICIES
from records.command import main

# Equal lengths of time that a step is cut into, each with the most bytes that are live in it: a
# picture shows no more.
SPANS = 300


@dataclass(frozen=True)
class PolicyOptions:
    """Which measurements are taken in turn."""

    peer: Tuple[str, ...] = option(
        (), 'command whose last line is JSON with "step_s"; repeatable', "CMD", repeat=True
    )
    rounds: int = option(1, "repeat all measurements N times, in turn", at_least=1, metavar="N")


OPTIONS = ((MeasuredJob,), StepOptions, PolicyOptions, Output)


def run(chosen: Dict[str, Any], steps: StepOptions, options: PolicyOptions, output: Output) -> int:
    policies = (chosen["policy"],) if "policy" in chosen else POLICIES
    request = requested(chosen, steps)
    record = compare_policies(request, policies, options.peer, options.rounds)
    record = with_predictions(record, find_constants())
    output.publish("policies", record, step_table(record))
    return 0


def compare_policies(
    request: Dict[str, Any], policies: Sequence[str], peers: Sequence[str], rounds: int
) -> Result:
    """Measure the step of `request` under each policy, and the peers, in turn; the content of a
    record, with "rows".

    Seconds are medians, peaks the highest; the bytes live over a step are of the first round, and
    only if several are compared. A policy whose process died is not tried again, and its row has
    the "error". Raises ProcessFailedError for a peer that fails, and if no policy could be
    measured."""
    from cpu3d.util.progress import bar  # not into the memory of a measuring process

    done: Dict[str, List[Result]] = {name: [] for name in (*policies, *peers)}
    errors: Dict[str, ProcessFailedError] = {}
    with bar("bench step", total=rounds * len(done)) as advance:
        # Peers first: a wrong command fails before our own measurements take their time.
        for number, name in itertools.product(range(rounds), (*peers, *policies)):
            if name in peers:
                done[name].append(run_peer(name))
            elif name not in errors:
                ours = dict(request)
                ours["unet"] = {**request["unet"], "policy": name}
                ours["live"] = number == 0 and len(done) > 1
                try:
                    done[name].append(harness.in_fresh_process(measure, ours))
                except ProcessFailedError as error:
                    errors[name] = error
            advance()
    measured = [done[name][0] for name in policies if done[name]]
    if not measured:
        raise errors[policies[0]]
    rows = []
    for name, results in done.items():
        if name in peers:
            row = row_of(_peer_name(name, results[0]), "peer", results)
        else:
            row = row_of(name, "policy", results)
        if name in errors:
            row["error"] = str(errors[name])
        rows.append(row)
    return {**record_of(request, rows, measured[0]), "rounds": rounds}


def _peer_name(command: str, result: Result) -> str:
    """What a peer calls itself, and its arguments, without paths, which are of one machine."""
    words = [word for word in shlex.split(command)[1:] if "/" not in word]
    return " ".join([result.get("peer", ""), *words]).strip()


def run_peer(command: str) -> Result:
    """The JSON and the peak of a peer. Raises InputError without step_s, and as `run_command`."""
    result = run_command(valid(shlex.split, command), f"peer {command!r}", cwd=None)
    if not isinstance(result.get("step_s"), (int, float)):
        rule = f"peer {command!r} must print JSON with step_s, got {sorted(result)}"
        raise InputError(f"{rule}; have it print step_s")
    return {**result, "process_peak_bytes": result.get("peak_rss_bytes")}


# --- In the measuring process ---


def measure(request: Dict[str, Any]) -> Result:
    """As `step_costs.measure`. With `request["live"]` one more step, after the peaks, is profiled
    for the bytes that are live over it."""
    result, step = measured_step(request)
    if request["live"]:
        result["live_bytes"] = _live_bytes(step, SPANS)
    return result


def _live_bytes(work: Callable[[], Any], spans: int) -> List[int]:
    """The most bytes in use in TensorFlow's allocator in each of so many equal spans of the time
    between its first and its last request in `work`; empty without requests."""
    import tensorflow as tf

    # The profile's format is here in TensorFlow 2.13 to 2.21 at least.
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    profiler = tf.profiler.experimental
    options = profiler.ProfilerOptions(host_tracer_level=2, python_tracer_level=0)
    requests: List[Tuple[float, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        with profiler.Profile(folder, options):
            work()
        for path in Path(folder).rglob("*.xplane.pb"):
            for plane in xplane_pb2.XSpace.FromString(path.read_bytes()).planes:
                requests += _requests_in(plane)
    return most_in_each_span(sorted(requests), spans) if requests else []


def _requests_in(plane: Any) -> Iterator[Tuple[float, int]]:
    """The requests to the allocator in a plane of a profile: seconds, and the bytes in use then."""
    for line in plane.lines:
        for event in line.events:
            name = plane.event_metadata[event.metadata_id].name
            if name not in ("MemoryAllocation", "MemoryDeallocation"):
                continue
            seconds = line.timestamp_ns / 1e9 + event.offset_ps / 1e12
            for stat in event.stats:
                if plane.stat_metadata[stat.metadata_id].name == "bytes_allocated":
                    yield seconds, stat.int64_value


def most_in_each_span(requests: Sequence[Tuple[float, int]], spans: int) -> List[int]:
    """The most bytes in each of equal spans of the time, from requests as (seconds, bytes held from
    then on)."""
    seconds, sizes = np.array(requests).T
    begins = np.linspace(seconds[0], seconds[-1], spans, endpoint=False)
    # A span begins with the bytes held after the last request before it.
    return (
        np.maximum.reduceat(sizes, np.searchsorted(seconds, begins, side="right") - 1)
        .astype(int)
        .tolist()
    )


if __name__ == "__main__":
    main("records.policies")
