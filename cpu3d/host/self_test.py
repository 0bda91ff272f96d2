"""What TensorFlow does on this host, tried out in a fresh process within a minute or so.

for check in self_test():
    print(check.name, check.state, check.found, check.advice)

As a program, `python -m cpu3d.host.self_test ENGINE` prints each result as a line of JSON when it has it. Others may
print among them, as oneDNN does with ONEDNN_VERBOSE=1.
"""

import dataclasses
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Tuple

from cpu3d.host.apply import engine_name, installed, set_up
from cpu3d.util.child import ROOT, how_ended, last_words
from memory_estimator.host import Host, read_host
from memory_estimator.units import format_bytes, format_seconds

PROGRAM = (sys.executable, "-m", "cpu3d.host.self_test")

LIMIT_S = 600.0
"""For all tests: a slow machine takes a minute or two, one that hangs takes for ever."""

STEP_SHAPE, STEP_CHANNELS = (64, 64, 64), 32
"""Voxels and channels of the step that bfloat16 is measured by."""

LIMIT_ELEMENTS = 2**31
"""Where 32 bits end, with which much software counts elements."""

SLICE = (512, 512, 16)
"""Of the large tensor: Y, Z, channels. It has one slice more than fits under LIMIT_ELEMENTS, or one less."""


@dataclass(frozen=True)
class Check:
    """One point of what the doctor looks at."""

    name: str
    state: str
    """ "ok"; "note", worth knowing with nothing to set; "warn", with what to do; "fail"; "skipped"."""
    found: str
    advice: str = ""
    """What to do; "" where there is nothing."""


def self_test(engine: Optional[str] = None) -> Iterator[Check]:
    """Try an engine out in a fresh process; yields each result when it is there.

    A failed check is the last, as what comes after it would not say anything. So is that of a process which dies or
    is not done after LIMIT_S. Closing the iterator ends the process.
    """
    with (
        tempfile.NamedTemporaryFile() as errors,
        subprocess.Popen(
            [*PROGRAM, *([engine] if engine else [])],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
        ) as process,
    ):
        timer = threading.Timer(LIMIT_S, process.kill)
        timer.start()
        try:
            checks = filter(None, map(_read_check, process.stdout))
            for name, _ in TESTS:
                check = next(checks, None) or _no_answer(name, process.wait(), timer, Path(errors.name))
                yield check
                if check.state == "fail":
                    return
        finally:
            timer.cancel()
            process.kill()


def main(engine: Optional[str]) -> None:
    """Do the tests in this process, one line of JSON each on stdout."""
    host, _, tf = set_up(engine)
    for _, test in TESTS:
        # On a line of its own: what others print comes in blocks, and one may have ended within a line.
        print(f"\n{json.dumps(dataclasses.asdict(test(tf, host, engine)))}\n", end="", flush=True)


def engine_in_force(tf: Any, host: Host, engine: Optional[str]) -> Check:
    """oneDNN and, where it is installed or asked for, ITEX; by what is loaded and not by what was asked for."""
    name = engine_name(tf)
    if "no oneDNN" in name:
        return Check("engine", "fail", name, "`unset TF_ENABLE_ONEDNN_OPTS`: a step takes many times as long without")
    if engine in (None, "itex") and installed("itex") and "ITEX" not in name:
        return Check("engine", "fail", f"{name}, although ITEX is installed", "run `./run.sh setup` again")
    return Check("engine", "ok", name)


def bfloat16_gain(tf: Any, host: Host, engine: Optional[str]) -> Check:
    """Seconds of a small training step, two convolutions and their gradients, in float32 and in bfloat16."""
    if not host.fast_bfloat16:
        return Check("bfloat16", "skipped", "this CPU has no instructions for it; float32 is used")
    steps = {dtype: _step(tf, dtype) for dtype in (tf.float32, tf.bfloat16)}
    answers = {dtype: step().numpy() for dtype, step in steps.items()}  # traces them too
    seconds = {dtype: float("inf") for dtype in steps}
    for _ in range(4):  # the fastest counts
        for dtype, step in steps.items():
            seconds[dtype] = min(seconds[dtype], _seconds(step)[0])
    exact, rounded = answers[tf.float32], answers[tf.bfloat16]
    error = abs(rounded - exact).max() / abs(exact).max()
    gain = seconds[tf.float32] / seconds[tf.bfloat16]
    found = (
        f"{gain:.2f} times as fast as float32: {format_seconds(seconds[tf.bfloat16])} against "
        f"{format_seconds(seconds[tf.float32])} a small step, filter gradients within {error:.1%}"
    )
    if not error < 0.1:
        return Check("bfloat16", "fail", found, "train with --dtype float32, and report it")
    if gain < 1.2:  # 1.4 to 1.8 on two cores with AVX512_BF16, other work beside it
        return Check("bfloat16", "warn", found, "try again when the host is quiet, or train with --dtype float32")
    return Check("bfloat16", "ok", found)


def large_tensor(tf: Any, host: Host, engine: Optional[str]) -> Check:
    """A convolution of more than 2^31 elements, its answers at the far end and its duration against one of less."""
    dtype = tf.as_dtype(host.best_dtype)
    elements = math.prod(SLICE)
    slices = LIMIT_ELEMENTS // elements
    needed, free = int(1.3 * slices * elements * dtype.size) + 2**30, read_host().free_bytes
    if free < needed:
        return Check("large tensor", "skipped", f"needs {format_bytes(needed)}, {format_bytes(free)} are free")
    # The larger one first: the smaller one then fits into the memory that TensorFlow's allocator keeps of it, where the
    # other way round it would ask the system for as much again.
    above_s, is_right_above = _convolve(tf, slices + 1, dtype)
    below_s, is_right = _convolve(tf, slices - 1, dtype)
    found = (
        f"{(slices + 1) * elements / LIMIT_ELEMENTS:.3f} x 2^31 elements convolved in {format_seconds(above_s)}, "
        f"just below 2^31 in {format_seconds(below_s)}"
    )
    if not (is_right and is_right_above):
        advice = "keep every tensor below 2^31 elements: a smaller --micro-batch, --mode patch or fewer --filters"
        return Check("large tensor", "fail", f"{found}: wrong at its far end", advice)
    if above_s > 4 * below_s + 1:
        advice = "use ITEX, whose oneDNN has a fast kernel for it, or keep tensors below by a smaller --micro-batch"
        return Check("large tensor", "warn", f"{found}: right, but slow", advice)
    return Check("large tensor", "ok", f"{found}: right to its far end")


TESTS: Tuple[Tuple[str, Callable[[Any, Host, str], Check]], ...] = (
    ("engine", engine_in_force),
    ("bfloat16", bfloat16_gain),
    ("large tensor", large_tensor),
)
"""In this order; the first also says whether TensorFlow can be imported at all."""


# --- Private helpers ---


def _no_answer(name: str, returncode: int, timer: threading.Timer, errors: Path) -> Check:
    if not timer.is_alive():
        return Check(name, "fail", f"not done after {LIMIT_S:.0f} s", "try again when the host is quiet")
    ended = ": ".join(filter(None, (how_ended(returncode), last_words(errors, count=1).strip())))
    return Check(name, "fail", f"the process ended with {ended}", "run `./run.sh setup`")


def _read_check(line: str) -> Optional[Check]:
    """The result that a line holds, None where it is something else."""
    try:
        return Check(**json.loads(line))
    except (TypeError, ValueError):
        return None


def _step(tf: Any, dtype: Any) -> Callable[[], Any]:
    """A function that computes the filter gradients of two convolutions, in float32 numbers whatever the dtype."""
    image = tf.cast(tf.random.stateless_uniform((1, *STEP_SHAPE, STEP_CHANNELS), (1, 2), -1.0, 1.0), dtype)
    shape = (3, 3, 3, STEP_CHANNELS, STEP_CHANNELS)
    filters = [tf.cast(tf.random.stateless_uniform(shape, (3, n), -0.1, 0.1), dtype) for n in range(2)]

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            tape.watch(filters)
            hidden = tf.nn.relu(tf.nn.conv3d(image, filters[0], [1] * 5, "SAME"))
            loss = tf.reduce_mean(tf.cast(tf.nn.conv3d(hidden, filters[1], [1] * 5, "SAME"), tf.float32) ** 2)
        return tf.concat([tf.cast(one, tf.float32) for one in tape.gradient(loss, filters)], 0)

    return step


def _convolve(tf: Any, slices: int, dtype: Any) -> Tuple[float, bool]:
    """Seconds of a 1 x 1 x 1 convolution over so many SLICEs, and whether its answers in the last ones are right.

    Slice n holds n modulo 7 throughout, so its answer is that times the channels: small whole numbers, exact in any
    dtype.
    """
    values = tf.cast(tf.range(slices) % 7, dtype)
    image = tf.broadcast_to(tf.reshape(values, (1, slices, 1, 1, 1)), (1, slices, *SLICE))
    filters = tf.ones((1, 1, 1, SLICE[-1], 1), dtype)
    seconds, answer = _seconds(lambda: tf.nn.conv3d(image, filters, [1] * 5, "SAME"))
    right = [bool(tf.reduce_all(answer[0, n] == SLICE[-1] * values[n])) for n in (0, slices // 2, -2, -1)]
    return seconds, all(right)


def _seconds(work: Callable[[], Any]) -> Tuple[float, Any]:
    begin = time.perf_counter()
    answer = work()
    answer[..., :1].numpy()  # until it is there
    return time.perf_counter() - begin, answer


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
