"""The live curve of one training step: every call to TensorFlow's allocator, as its profiler saw it."""

import tempfile
from pathlib import Path
from typing import Any, Callable, Iterator, List, Tuple

Allocation = Tuple[float, str, int]
"""(seconds into the step, operation, bytes live after the call)."""


def record_allocations(tf: Any, step: Callable[[], Any]) -> List[Allocation]:
    """Run `step` under TensorFlow's profiler and return the allocator's calls in order.

    Raises RuntimeError where this TensorFlow's profile cannot be read or names no allocation, as without oneDNN.
    """
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        try:
            step()
        finally:
            tf.profiler.experimental.stop()
        found = sorted(_calls(Path(folder)))
    if not found:
        raise RuntimeError("the profile must name allocations, got none; take the engine itex or stock")
    begin = found[0][0]
    return [((time - begin) / 1e12, op, live) for time, op, live in found]


def profile_planes(folder: Path) -> Iterator[Any]:
    """Everything in the profiles under `folder`. Raises RuntimeError where this TensorFlow writes another format."""
    try:
        # Where TensorFlow keeps the profile's format, from 2.13 to 2.21 at least.
        from tensorflow.tsl.profiler.protobuf import xplane_pb2
    except ImportError as error:
        raise RuntimeError(f"the profile must be readable, got {error}; use TensorFlow 2.15 or 2.21") from None
    for path in folder.rglob("*.xplane.pb"):
        space = xplane_pb2.XSpace()
        space.ParseFromString(path.read_bytes())
        yield from space.planes


# --- Private helpers ---


def _calls(folder: Path) -> Iterator[Tuple[int, str, int]]:
    """(picoseconds, operation, bytes live) of every call in the profile, in no order."""
    for plane in profile_planes(folder):
        events, stats = plane.event_metadata, plane.stat_metadata
        for line in plane.lines:
            for event in line.events:
                if events[event.metadata_id].name in ("MemoryAllocation", "MemoryDeallocation"):
                    told = {stats[stat.metadata_id].name: _value(stat, stats) for stat in event.stats}
                    if "bytes_allocated" in told:
                        time = line.timestamp_ns * 1000 + event.offset_ps
                        yield time, str(told.get("tf_op", "")), int(told["bytes_allocated"])


def _value(stat: Any, stats: Any) -> Any:
    kind = stat.WhichOneof("value")
    return stats[stat.ref_value].name if kind == "ref_value" else getattr(stat, kind)
