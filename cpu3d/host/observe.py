"""What training steps show of a host's speed, kept for the estimator: their seconds, and those of their operations.

`train`, `bench` and `calibrate` all record here. Nothing in it may fail the run that it looks at.
"""

import contextlib
import dataclasses
import datetime
import json
import math
import re
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, TypeVar

from cpu3d.errors import InputError
from cpu3d.host.fitting import FEWEST_STEPS, Run, fitted, undisturbed
from cpu3d.util.atomic import atomic_write, remove_partials, write_json
from cpu3d.util.lock import locked
from memory_estimator.calibration import SCHEMA, HostConstants, host_file, shipped_constants, to_json
from memory_estimator.common.files import RECORD_SCHEMA, parse_json, read_regular, typed
from memory_estimator.host import Host, cache_bytes
from memory_estimator.job import Job
from memory_estimator.step.program import Program, StepOp
from memory_estimator.step.timing import CONVOLUTIONS, FUSED, group_of
from memory_estimator.step.training_step import training_step

MOST_RUNS = 40
"""Kept of a host: the newest run of each job. Fitting them takes a second or two."""

ENOUGH = 2
"""Undisturbed steps that are profiled."""

NEAR_SHARE = 0.1
"""A step under the profiler that took longer or shorter than the others by more than this share tells nothing."""

KIND_BY_TYPE = (
    ("BatchNormGrad", "norm_gradient"), ("BatchNorm", "norm"), ("Concat", "join"),
    ("MaxPool3DGrad", "pool_gradient"), ("MaxPool3D", "pool"), ("Slice", "slice"), ("Split", "slice"),
)  # fmt: skip
"""Part of TensorFlow's name for a type of operation, and its group; the first that fits counts."""

AVERAGE = "average"
"""Scope of the operations that average the weights, which the estimator's step does not count."""

LOCK_WAIT_S = 2.0
"""For others that record at the same time."""

T = TypeVar("T")


class Event(NamedTuple):
    """One operation as the profiler saw it run."""

    name: str
    type: str
    seconds: float


class Observer:
    """Watches the steps of a run, and records what they show when that is enough."""

    def __init__(self, job: Job, by: str, host: Host, *, warm_up: int = 0, traced: Sequence[int] = ()):
        """`job` is what this process computes, `by` the command. Of its steps, counted from 0, the first `warm_up` say
        nothing: they compile. Those in `traced` are profiled, until ENOUGH of them were undisturbed."""
        self._job = dataclasses.replace(job, from_store=False, resampled=False, case_bytes=0, cases=0)
        self._by, self._host, self._warm_up, self._traced = by, host, warm_up, traced
        self._steps_s: List[float] = []
        self._events: Dict[int, List[Event]] = {}
        self._recorded = False

    def watch(self, step: Callable[[], T]) -> T:
        """What `step` returns, which is profiled where it is its turn. `note` has to follow."""
        number = len(self._steps_s)
        if number not in self._traced or len(self._calm_traces()) >= ENOUGH:
            return step()
        result, events = trace(step)
        if events is not None:
            self._events[number] = events
        return result

    def note(self, seconds: float) -> int:
        """What the step took by itself, without waiting for data or other workers; returns how many were noted."""
        self._steps_s.append(seconds)
        return len(self._steps_s)

    def run(self, *, anyway: bool = False) -> Optional[Run]:
        """What the steps have shown so far; None where too few of them took about as long, or convolved nothing. With
        `anyway` the fastest ones count, however far apart they are."""
        steps_s = self._steps_s[self._warm_up :]
        calm = undisturbed(steps_s) or (sorted(steps_s)[:FEWEST_STEPS] if anyway else [])
        if not calm or not all(any(map(_is_convolution, events)) for events in self._events.values()):
            return None
        step_s, program, seen = statistics.median(calm), training_step(self._job), []
        for number in self._calm_traces(step_s):
            with contextlib.suppress(ValueError):  # another TensorFlow, which does it otherwise
                seen.append(seconds_of(program, self._job.parts, self._events[number]))
        op_s, group_s = (_medians([one[index] for one in seen]) for index in (0, 1))
        today = datetime.date.today().isoformat()
        return Run(self._job, self._by, today, step_s, op_s, group_s)

    def _calm_traces(self, step_s: float = 0.0) -> List[int]:
        """Profiled steps that took about `step_s`, by default what the undisturbed ones took."""
        calm = undisturbed(self._steps_s[self._warm_up :])
        step_s = step_s or (statistics.median(calm) if calm else math.inf)
        return [number for number in self._events if abs(self._steps_s[number] / step_s - 1) <= NEAR_SHARE]

    def record(self) -> None:
        """Keep what the steps have shown of the host, once; a line on stderr says what is in the way of it."""
        try:
            run = None if self._recorded else self.run()
            if run:
                self._recorded = True
                record([run], self._host)
        except Exception as error:  # whatever it is, the run goes on
            print(f"warning: what steps took is not kept for the estimator: {error}", file=sys.stderr)


def record(runs: Sequence[Run], host: Host) -> Path:
    """Add runs, all on one engine and of equally many threads, to what is kept of this host, fit its constants to all
    of them, and return the file that holds these. Raises OSError and InputError where it cannot be written."""
    job = runs[0].job
    path = host_file(host, job.engine, job.threads)
    if path is None:
        raise InputError("$XDG_DATA_HOME or a home folder must be there for a host's constants, got neither; set one")
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent, "folder", LOCK_WAIT_S):
        remove_partials(path.parent)
        kept = _merged(read_runs(path), runs)
        constants = constants_of(kept, host)  # a run that cannot be fitted is not kept
        with atomic_write(_runs_file(path), "w") as file:
            lines = ({"schema": RECORD_SCHEMA, **dataclasses.asdict(run)} for run in kept)
            file.writelines(json.dumps(line) + "\n" for line in lines)
        write_constants(path, constants)
    return path


def constants_of(runs: Sequence[Run], host: Host) -> List[HostConstants]:
    """What `runs`, all on one engine and of equally many threads, say of this host."""
    shipped = shipped_constants(host.kernels)
    return fitted(runs, shipped, host.cpu_model, cache_bytes() or shipped.cache_bytes)


def write_constants(path: Path, found: Sequence[HostConstants]) -> None:
    """Write constants as `memory_estimator.calibration.load_constants` reads them."""
    write_json(path, {"schema": SCHEMA, "constants": [to_json(one) for one in found]})


def read_runs(path: Path) -> List[Run]:
    """The runs that a host's constants in `path` are fitted to, the oldest first. Damaged lines are left out."""
    runs, lines = [], []
    with contextlib.suppress(OSError):
        lines = read_regular(_runs_file(path)).splitlines()
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            record = parse_json(line)
            if record.pop("schema") == RECORD_SCHEMA:
                runs.append(typed(record, Run, "run"))
    return runs


def trace(step: Callable[[], T], read: Optional[Callable[[Path], List]] = None) -> Tuple[T, Optional[List]]:
    """What `step` returns, and what `read` finds in its profile: by default its operations in the order they began,
    each an Event. None where the profiler fails: with no space, where somebody else profiles, or in another TensorFlow.
    It raises what `step` raises and nothing else."""
    import tensorflow as tf

    profiler, folder, started, found = tf.profiler.experimental, None, False, None
    options = profiler.ProfilerOptions(host_tracer_level=2, python_tracer_level=0)
    with contextlib.suppress(Exception):
        folder = Path(tempfile.mkdtemp())
        profiler.start(str(folder), options)
        started = True
    try:
        result = step()
    finally:
        with contextlib.suppress(Exception):
            if started:
                profiler.stop()
                found = (read or _events)(folder)
        shutil.rmtree(folder or "", ignore_errors=True)
    return result, found


def live_bytes(folder: Path) -> List[Tuple[float, int]]:
    """Of a profile: seconds, and the bytes that TensorFlow's allocator has handed out then, at each of its requests."""
    found = []
    for plane, line in _lines(folder):
        events, stats = plane.event_metadata, plane.stat_metadata
        for event in line.events:
            if events[event.metadata_id].name in ("MemoryAllocation", "MemoryDeallocation"):
                held = next(one for one in event.stats if stats[one.metadata_id].name == "bytes_allocated")
                found.append((line.timestamp_ns / 1e9 + event.offset_ps / 1e12, held.int64_value))
    return sorted(found)


def seconds_of(program: Program, parts: int, events: Sequence[Event]) -> Tuple[Dict[str, float], Dict[str, float]]:
    """Operation of the program -> its seconds, and group -> seconds of all of its operations where they are not told
    apart: both each time they run, of the `parts` times that a step in micro-batches runs all but its update.

    Operations are told apart by their order, which is the program's: names of gradients do not say whose they are.
    Raises ValueError where the step ran other convolutions than the program says, and for deep supervision, whose
    coarse heads' gradients TensorFlow runs before or after those of their decoder.
    """
    convolutions = [op for op in program.ops if op.kind in CONVOLUTIONS]
    ran = [event for event in events if _is_convolution(event)]
    if any(re.match(r"head\d+/.*gradient", op.name) for op in convolutions):
        raise ValueError("the order of a step must be known, got deep supervision; its step as a whole is timed")
    same = [
        op.kind.endswith("filter_gradient") == ("BackpropFilter" in event.type)
        for op, event in zip(convolutions * parts, ran)
    ]
    if len(ran) != parts * len(convolutions) or not all(same):
        raise ValueError(
            f"a step must run the {parts * len(convolutions)} convolutions of the closed form, got {len(ran)}, "
            f"{sum(same)} of them in place; this TensorFlow does it otherwise"
        )
    of_group: Dict[str, List[float]] = defaultdict(list)
    for event in events:
        if not (_is_convolution(event) or event.name.startswith(f"{AVERAGE}/")):
            of_group[_group_of(event)].append(event.seconds)
    ops_of: Dict[str, List[StepOp]] = defaultdict(list)
    for op in program.ops:
        if op.kind not in (*CONVOLUTIONS, FUSED):
            ops_of[group_of(op)].append(op)
    each = [(convolutions, [event.seconds for event in ran], parts)]
    together: Dict[str, float] = {}
    for group, ops in ops_of.items():
        times = 1 if group == "update" else parts
        if len(of_group[group]) == times * len(ops):
            each.append((ops, of_group[group], times))
        else:
            together[group] = sum(of_group[group]) / times
    found = {
        op.name: sum(seconds[index :: len(ops)]) / times for ops, seconds, times in each for index, op in enumerate(ops)
    }
    return found, together


# --- Private helpers ---


def _lines(folder: Path) -> List[Tuple[Any, Any]]:
    """Of a profile: each thread's line of events, with the plane that has their names."""
    # Where TensorFlow keeps the profile's format, from 2.13 to 2.21 at least.
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    spaces = [xplane_pb2.XSpace.FromString(path.read_bytes()) for path in folder.rglob("*.xplane.pb")]
    return [(plane, line) for space in spaces for plane in space.planes for line in plane.lines]


def _events(folder: Path) -> List[Event]:
    found = []
    for plane, line in _lines(folder):
        # Not those of the input pipeline, whose threads are called tf_data.
        for event in line.events if line.name.startswith("tf_") and "data" not in line.name else ():
            name, _, kind = plane.event_metadata[event.metadata_id].name.rpartition(":")
            if name and not name.endswith(":"):
                begin = line.timestamp_ns * 1000 + event.offset_ps
                found.append((begin, Event(name, kind, event.duration_ps / 1e12)))
    return [event for _, event in sorted(found)]


def _is_convolution(event: Event) -> bool:
    return "Conv3D" in event.type or "Conv2D" in event.type  # filter gradients plane by plane


def _group_of(event: Event) -> str:
    """Of an operation that is no convolution. The loss' have names without a path, as sums of gradients do too."""
    if event.name.split("/")[0] in ("Adam", "Muon", "SGD") or event.name.endswith("/Cast"):
        return "update"
    of_layer = "/" in event.name or event.name.startswith("AddN") or "Relu" in event.type
    known = (group for part, group in KIND_BY_TYPE if part in event.type)
    return next(known, "pointwise" if of_layer else "loss")


def _medians(found: Sequence[Dict[str, float]]) -> Dict[str, float]:
    return {name: statistics.median(one[name] for one in found) for name in (found[0] if found else ())}


def _merged(old: Sequence[Run], new: Sequence[Run]) -> List[Run]:
    """The newest run of each job, at most MOST_RUNS. One whose operations were seen gives way to its like alone."""
    by_job: Dict[Tuple[Job, bool], Run] = {}
    for run in (*old, *new):
        key = (run.job, run.step_s is None)
        if key in by_job and by_job[key].op_s and not run.op_s:
            continue
        by_job.pop(key, None)  # to its new place
        by_job[key] = run
    kept = list(by_job.values())
    # Those that say what the runtime holds come from `calibrate` alone, and no others replace them.
    timed = [run for run in kept if run.runtime_bytes is None]
    return [run for run in kept if run.runtime_bytes is not None] + timed[-MOST_RUNS:]


def _runs_file(path: Path) -> Path:
    return path.with_suffix(".runs.jsonl")
