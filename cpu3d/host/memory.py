"""The memory of a process, now and at most, and TensorFlow's allocator's part of it."""

import contextlib
import resource
from pathlib import Path
from typing import Dict, Optional

from memory_estimator.host import read_text, sizes
from memory_estimator.job import Job
from memory_estimator.step.allocator import region_bytes
from memory_estimator.step.layer_step import step_of
from models.native.library import native_operations

COUNTED_ROWS = 16
"""Of a reserved piece from which on the count of the most begins after it. To begin it again makes
all tensors below 256 KiB that are there count as none, and as less than none once they are freed:
nearly all that a network of a few filters has."""

ROW_BYTES = 2**20  # of the reserved piece, as sides of a tensor's shape are 32-bit numbers


def peak_rss_bytes() -> int:
    """The process's largest resident set so far (VmHWM), mapped file pages included."""
    return status_sizes().get("VmHWM", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def status_sizes() -> Dict[str, int]:
    """The fields of /proc/self/status that are sizes, in bytes; {} if there is no /proc."""
    return sizes(read_text(Path("/proc/self/status")))


# --- TensorFlow's allocator ---


def reserve(job: Job) -> None:
    """Have TensorFlow's allocator take the memory of a step of `job` in one piece, of which nothing
    is touched as yet. What it counts at most begins after a piece of COUNTED_ROWS.

    By itself it takes one region after another, each twice as large, and what is free at the end of
    one is of no use to a map that needs more: a process holds up to an eighth more. If the system
    does not give as much, nothing changes."""
    import tensorflow as tf

    program = step_of(job, native_operations().bfloat16)
    rows = -(-region_bytes(program) // ROW_BYTES)
    with contextlib.suppress(tf.errors.ResourceExhaustedError), tf.device("CPU:0"):
        tf.raw_ops.Empty(shape=[rows, ROW_BYTES], dtype=tf.uint8, init=False)
    if rows < COUNTED_ROWS:
        return
    # an allocator that keeps no count (oneDNN off) has none to reset
    with contextlib.suppress(ValueError, tf.errors.OpError):
        tf.config.experimental.reset_memory_stats("CPU:0")


def allocator_peak_bytes(device: str = "CPU:0") -> Optional[int]:
    """TensorFlow's own count of its largest heap, in bytes; None if the allocator keeps none
    (oneDNN off), or has counted nothing: all tensors are below 256 KiB."""
    import tensorflow as tf

    try:
        peak_bytes = int(tf.config.experimental.get_memory_info(device)["peak"])
    except (ValueError, KeyError, tf.errors.OpError):
        return None
    return peak_bytes if peak_bytes > 0 else None
