"""A self-test of TensorFlow on this host, in a fresh process, in about a minute.

for check in self_test():
    print(check.name, check.state, check.result, check.advice)

As a program, `python -m cpu3d.host.self_test ENGINE` prints each result as a line of JSON when it
has it. Others may print among them, as oneDNN does with ONEDNN_VERBOSE=1."""

import contextlib
import dataclasses
import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

from cpu3d.host.apply import engine_name, installed, set_up
from cpu3d.util.child import ROOT, how_ended, last_words
from memory_estimator.common.units import format_bytes, format_seconds
from memory_estimator.host import Host, instruction_set, read_host
from memory_estimator.installed import how_to_install

PROGRAM = (sys.executable, "-m", "cpu3d.host.self_test")

LIMIT_S = 600.0  # for all tests: a slow machine takes a minute or two, one that hangs never ends
# Voxels and channels of the step that bfloat16 is measured by.
STEP_SHAPE = (64, 64, 64)
STEP_CHANNELS = 32
LIMIT_ELEMENTS = 2**31  # where 32 bits end, with which much software counts elements
# Y, Z, channels of the large tensor, which has one slice more than fits under LIMIT_ELEMENTS.
SLICE = (512, 512, 16)

SLOW_SHARE = 0.4  # of the limit; docs/kernels.md has 0.79 to 0.87 with 16 and 32 channels


@dataclass(frozen=True)
class Check:
    """A check of the doctor's."""

    name: str
    # "ok"; "note", worth knowing with nothing to set; "warn", with what to do; "fail"; "skipped"
    state: str
    result: str
    advice: str = ""  # what to do


def self_test(engine: Optional[str] = None) -> List[Check]:
    """Try an engine out in a fresh process, within LIMIT_S; the result of each test, in order.

    A failed test is the last, as those after it would show nothing. A process that dies, or is not
    done in time, fails the test that it was at."""
    checks: List[Check] = []
    with tempfile.NamedTemporaryFile() as words, tempfile.NamedTemporaryFile() as errors:
        end = f"not done after {LIMIT_S:.0f} s"
        todo = "try again when the host is quiet"
        command = [*PROGRAM]
        if engine:
            command.append(engine)
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                command, cwd=ROOT, stdout=words, stderr=errors, timeout=LIMIT_S, check=False
            )
            end = f"the process ended with {how_ended(done.returncode)}"
            todo = how_to_install()
            last = last_words(Path(errors.name), count=1).strip()
            if last:
                end += f": {last}"
        for line in Path(words.name).read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(TypeError, ValueError):
                checks.append(Check(**json.loads(line)))
                if checks[-1].state == "fail":
                    return checks
    if len(checks) < len(TESTS):
        name, _test = TESTS[len(checks)]
        checks.append(Check(name, "fail", end, todo))
    return checks


def main(engine: Optional[str]) -> None:
    """Do the tests in this process, one line of JSON each on stdout."""
    host, _, tf = set_up(engine)
    for _, test in TESTS:
        line = json.dumps(dataclasses.asdict(test(tf, host, engine)))
        # On a line of its own: libraries print in blocks, and a block may have ended within a line.
        print(f"\n{line}\n", end="", flush=True)


def engine_in_force(tf: Any, host: Host, engine: Optional[str]) -> Check:
    """Check oneDNN and, if it is installed or asked for, ITEX; by what is loaded and not by what
    was asked for."""
    name = engine_name(tf)
    if "no oneDNN" in name:
        todo = "`unset TF_ENABLE_ONEDNN_OPTS`: a step takes many times as long without"
        return Check("engine", "fail", name, todo)
    if engine in (None, "itex") and installed("itex") and "ITEX" not in name:
        todo = f"{how_to_install('itex')} again"
        return Check("engine", "fail", f"{name}, although ITEX is installed", todo)
    return Check("engine", "ok", name)


def own_operations(tf: Any, host: Host, engine: Optional[str]) -> Check:
    """Check all of models/native/ in each dtype that a training here may have, and so with its
    instruction set: a small network's answers and gradients against those of its Keras layers in
    float32."""
    from models.native.operations import available

    if not available():
        result = f"{host.own.why}: TensorFlow's layers compute, in about twice the time and memory"
        todo = "install a C compiler, then python -m models.native.build"
        return Check("own operations", "warn", result, todo)
    cpu = instruction_set(host.isa, host.cpu_model) or "no AVX2"
    results = []
    is_right = True
    for dtype in dict.fromkeys(("float32", host.best_dtype)):
        errors = [_own_errors(tf, dtype, residual) for residual in (False, True)]
        is_right &= all(error.is_small for error in errors)
        answers = max(error.answers for error in errors)
        gradients = max(error.gradients for error in errors)
        name = getattr(host.own, dtype)
        within = f"answers within {answers:.1e}, gradients within {gradients:.1e}"
        results.append(f"{name} in {dtype}, {within}")
    result = f"{'; '.join(results)} of TensorFlow's layers; the CPU has {cpu}"
    if not is_right:
        todo = "set CPU3D_INSTRUCTION_SET=avx2, and report it"
        return Check("own operations", "fail", result, todo)
    return Check("own operations", "ok", result)


def own_speed(tf: Any, host: Host, engine: Optional[str]) -> Check:
    """Compare a convolution by own operations with the most that products alone reach here."""
    from models.native.operations import available
    from models.native.throughput import speed

    name = "own speed"
    if not available():
        return Check(name, "skipped", "there are no own operations here")
    results = []
    shares = []
    for dtype in dict.fromkeys(("float32", host.best_dtype)):
        measured = speed(dtype)
        shares.append(measured.share)
        of_set = f"{getattr(host.own, dtype)} in {dtype}"
        limit = f"{measured.limit / 1e9:.0f} GFLOP/s"
        results.append(f"{of_set}, {measured.share:.0%} of this host's limit of {limit}")
    result = f"a convolution by {'; by '.join(results)}"
    if min(shares) < SLOW_SHARE:
        return Check(name, "warn", result, "try again when the host is quiet")
    return Check(name, "ok", result)


class OwnErrors(NamedTuple):
    """Errors of a network by own operations, as shares of the norms of what its layers give in
    float32."""

    answers: float
    gradients: float
    """In float32 the largest of a weight's; in bfloat16, where single ones are noise, of all
    together."""
    of_layers: float  # of the gradients by layers in the same dtype

    @property
    def is_small(self) -> bool:
        """Whether rounding explains them. In float32 a value beside zero may be on the other side
        of its ReLU."""
        return self.answers < 0.02 and self.gradients < 0.02 + self.of_layers


def _own_errors(tf: Any, dtype: str, residual: bool) -> OwnErrors:
    from models.config import UNetConfig
    from models.unet3d import build_unet3d

    unet = UNetConfig(filters=8, depth=3, residual=residual, dtype=dtype)
    model = build_unet3d(unet, (16, 16, 16), 1)
    image = tf.random.stateless_uniform((1, 16, 16, 16, 4), (1, 2))

    def computed(network: Any) -> List[Any]:
        with tf.GradientTape() as tape:
            logits = tf.cast(network(image, training=True), tf.float32)
            loss = tf.reduce_mean(tf.sigmoid(logits) ** 2)
        return [logits, *tape.gradient(loss, network.trainable_variables)]

    def error(values: Any, other: Any) -> float:
        return float(tf.norm(values - other) / tf.norm(other))

    def joined(gradients: Sequence[Any]) -> Any:
        return tf.concat([tf.reshape(gradient, [-1]) for gradient in gradients], 0)

    own = computed(model)
    of_layers = computed(tf.keras.Model(model.inputs, model.outputs))
    if dtype == "float32":
        gradients = max(map(error, own[1:], of_layers[1:]))
        return OwnErrors(error(own[0], of_layers[0]), gradients, 0.0)
    exact_model = build_unet3d(dataclasses.replace(unet, dtype="float32"), (16, 16, 16), 1)
    exact_model.set_weights(model.get_weights())
    exact = computed(tf.keras.Model(exact_model.inputs, exact_model.outputs))
    truth = joined(exact[1:])
    errors = [error(joined(each[1:]), truth) for each in (own, of_layers)]
    return OwnErrors(error(own[0], exact[0]), *errors)


def bfloat16_gain(tf: Any, host: Host, engine: Optional[str]) -> Check:
    """Compare a small training step, two convolutions and their filters' gradients, in float32 and
    in bfloat16."""
    if not host.fast_bfloat16:
        return Check("bfloat16", "skipped", "this CPU has no instructions for it; float32 is used")

    def step_in(dtype: Any) -> Callable[[], Any]:
        """A function that computes the gradients, as float32 numbers in either dtype."""
        uniform = tf.random.stateless_uniform
        shape = (3, 3, 3, STEP_CHANNELS, STEP_CHANNELS)
        image = tf.cast(uniform((1, *STEP_SHAPE, STEP_CHANNELS), (1, 2), -1.0, 1.0), dtype)
        filters = [tf.cast(uniform(shape, (3, n), -0.1, 0.1), dtype) for n in range(2)]

        @tf.function
        def step() -> Any:
            with tf.GradientTape() as tape:
                tape.watch(filters)
                hidden = tf.nn.relu(tf.nn.conv3d(image, filters[0], [1] * 5, "SAME"))
                answer = tf.nn.conv3d(hidden, filters[1], [1] * 5, "SAME")
                loss = tf.reduce_mean(tf.cast(answer, tf.float32) ** 2)
            gradients = tape.gradient(loss, filters)
            return tf.concat([tf.cast(gradient, tf.float32) for gradient in gradients], 0)

        return step

    steps = [step_in(dtype) for dtype in (tf.float32, tf.bfloat16)]
    exact, rounded = (step().numpy() for step in steps)  # traces them too
    times = [[seconds_of(step)[0] for step in steps] for _ in range(4)]
    slow_s, fast_s = map(min, zip(*times))  # the fastest counts
    gain = slow_s / fast_s
    error = abs(rounded - exact).max() / abs(exact).max()
    seconds = f"{format_seconds(fast_s)} against {format_seconds(slow_s)} a small step"
    within = f"filter gradients within {error:.1%}"
    result = f"{gain:.2f} times as fast as float32: {seconds}, {within}"
    if not error < 0.1:
        return Check("bfloat16", "fail", result, "train with --dtype float32, and report it")
    if gain < 1.2:  # 1.4 to 1.8 on two cores with AVX512_BF16, other work beside it
        todo = "try again when the host is quiet, or train with --dtype float32"
        return Check("bfloat16", "warn", result, todo)
    return Check("bfloat16", "ok", result)


def large_tensor(tf: Any, host: Host, engine: Optional[str]) -> Check:
    """Check a 1 x 1 x 1 convolution of more than 2^31 elements: its answers to the far end, and its
    duration.

    Slice n holds n modulo 7 throughout, so its answer is that times the channels: small whole
    numbers, exact in any dtype."""
    dtype = tf.as_dtype(host.best_dtype)
    slices = LIMIT_ELEMENTS // math.prod(SLICE) + 1
    elements = slices * math.prod(SLICE)
    needed_bytes = int(1.3 * elements * dtype.size) + 2**30
    free_bytes = read_host().free_bytes
    if free_bytes < needed_bytes:
        result = f"needs {format_bytes(needed_bytes)}, {format_bytes(free_bytes)} are free"
        return Check("large tensor", "skipped", result)
    values = tf.cast(tf.range(slices) % 7, dtype)
    image = tf.broadcast_to(tf.reshape(values, (1, slices, 1, 1, 1)), (1, slices, *SLICE))
    filters = tf.ones((1, 1, 1, SLICE[-1], 1), dtype)
    seconds, answer = seconds_of(lambda: tf.nn.conv3d(image, filters, [1] * 5, "SAME"))
    share = elements / LIMIT_ELEMENTS
    result = f"{share:.3f} x 2^31 elements convolved in {format_seconds(seconds)}"
    places = (0, slices // 2, -2, -1)
    if all(tf.reduce_all(answer[0, n] == SLICE[-1] * values[n]) for n in places):
        return Check("large tensor", "ok", f"{result}: right to its far end")
    advice = "keep every tensor below 2^31 elements: --policy lean, --mode patch or fewer --filters"
    return Check("large tensor", "fail", f"{result}: wrong at its far end", advice)


TESTS: Tuple[Tuple[str, Callable[[Any, Host, Optional[str]], Check]], ...] = (
    ("engine", engine_in_force),
    ("bfloat16", bfloat16_gain),
    ("large tensor", large_tensor),
    ("own operations", own_operations),
    ("own speed", own_speed),
)
"""In this order; the first also shows whether TensorFlow can be imported at all."""


def seconds_of(work: Callable[[], Any]) -> Tuple[float, Any]:
    """Seconds until the answer of `work` is there, and the answer."""
    begin = time.perf_counter()
    answer = work()
    answer[..., :1].numpy()  # until it is there
    return time.perf_counter() - begin, answer


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
