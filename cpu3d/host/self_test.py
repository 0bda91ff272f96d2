"""What TensorFlow does on this host, tried out in a fresh process within a minute or so.

for check in self_test():
    print(check.name, check.state, check.found, check.advice)

As a program, `python -m cpu3d.host.self_test ENGINE` prints each result as a line of JSON when it has it. Others may
print among them, as oneDNN does with ONEDNN_VERBOSE=1.
"""

import contextlib
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
from typing import Any, Callable, Iterable, Iterator, Optional, Tuple

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
"""Of the large tensor: Y, Z, channels. It has one slice more than fits under LIMIT_ELEMENTS."""


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
    command, pipe = [*PROGRAM, *([engine] if engine else [])], subprocess.PIPE
    with (
        tempfile.NamedTemporaryFile() as errors,
        subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=errors, text=True, errors="replace") as process,
    ):
        timer = threading.Timer(LIMIT_S, process.kill)
        timer.start()
        try:
            for name, _ in TESTS:
                check = _next_check(process.stdout)
                if check is None:
                    words = [how_ended(process.wait()), last_words(Path(errors.name), count=1).strip()]
                    found, todo = f"the process ended with {': '.join(filter(None, words))}", "run `./run.sh setup`"
                    if not timer.is_alive():
                        found, todo = f"not done after {LIMIT_S:.0f} s", "try again when the host is quiet"
                    check = Check(name, "fail", found, todo)
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
    slow = gain < 1.2  # 1.4 to 1.8 on two cores with AVX512_BF16, other work beside it
    advice = "try again when the host is quiet, or train with --dtype float32" if slow else ""
    return Check("bfloat16", "warn" if slow else "ok", found, advice)


def large_tensor(tf: Any, host: Host, engine: Optional[str]) -> Check:
    """A 1 x 1 x 1 convolution of more than 2^31 elements, its answers to the far end and its duration.

    Slice n holds n modulo 7 throughout, so its answer is that times the channels: small whole numbers, exact in any
    dtype.
    """
    dtype, elements = tf.as_dtype(host.best_dtype), math.prod(SLICE)
    slices = LIMIT_ELEMENTS // elements + 1
    needed, free = int(1.3 * slices * elements * dtype.size) + 2**30, read_host().free_bytes
    if free < needed:
        return Check("large tensor", "skipped", f"needs {format_bytes(needed)}, {format_bytes(free)} are free")
    values = tf.cast(tf.range(slices) % 7, dtype)
    image = tf.broadcast_to(tf.reshape(values, (1, slices, 1, 1, 1)), (1, slices, *SLICE))
    filters = tf.ones((1, 1, 1, SLICE[-1], 1), dtype)
    seconds, answer = _seconds(lambda: tf.nn.conv3d(image, filters, [1] * 5, "SAME"))
    found = f"{slices * elements / LIMIT_ELEMENTS:.3f} x 2^31 elements convolved in {format_seconds(seconds)}"
    if all(bool(tf.reduce_all(answer[0, n] == SLICE[-1] * values[n])) for n in (0, slices // 2, -2, -1)):
        return Check("large tensor", "ok", f"{found}: right to its far end")
    advice = "keep every tensor below 2^31 elements: a smaller --micro-batch, --mode patch or fewer --filters"
    return Check("large tensor", "fail", f"{found}: wrong at its far end", advice)


TESTS: Tuple[Tuple[str, Callable[[Any, Host, str], Check]], ...] = (
    ("engine", engine_in_force),
    ("bfloat16", bfloat16_gain),
    ("large tensor", large_tensor),
)
"""In this order; the first also says whether TensorFlow can be imported at all."""


# --- Private helpers ---


def _next_check(lines: Iterable[str]) -> Optional[Check]:
    """The first of `lines` that holds a result; None where none does."""
    for line in lines:
        with contextlib.suppress(TypeError, ValueError):
            return Check(**json.loads(line))
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


def _seconds(work: Callable[[], Any]) -> Tuple[float, Any]:
    begin = time.perf_counter()
    answer = work()
    answer[..., :1].numpy()  # until it is there
    return time.perf_counter() - begin, answer


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
