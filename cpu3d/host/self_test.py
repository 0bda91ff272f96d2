"""A self-test of TensorFlow and native operations on this host, in a fresh process.

for check in self_test():
    print(check.name, check.state, check.result, check.advice)

As a program, `python -m cpu3d.host.self_test ENGINE` prints each result as a line of JSON when it
has it. Others may print among them, as oneDNN does with ONEDNN_VERBOSE=1."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

from cpu3d.host.apply import engine_name, installed, set_up
from cpu3d.util.child import ROOT, how_ended, last_words
from memory_estimator.host import Host, instruction_set
from memory_estimator.installed import how_to_install

PROGRAM = (sys.executable, "-m", "cpu3d.host.self_test")

LIMIT_S = 600.0  # for all tests: a slow machine takes a minute, one that hangs never ends

MOST_ERROR = 0.02  # of answers, as a share of the norm of those of layers in float32
# The same of gradients. In float32 a value beside zero may be on the other side of its ReLU; in
# bfloat16 0.05 to 0.09 were measured, and 0.14 to 0.20 of TensorFlow's layers.
MOST_GRADIENT_ERROR = {"float32": 0.02, "bfloat16": 0.2}

SLOW_SHARE = 0.4  # of the limit; records/kernels.md has 0.79 to 0.87 with 16 and 32 channels
FAST_SHARE = 1.1  # above it the limit was measured while other programs computed


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
        checks.append(Check(list(TESTS)[len(checks)], "fail", end, todo))
    return checks


def main(engine: Optional[str]) -> None:
    """Do the tests in this process, one line of JSON each on stdout."""
    host, _, tf = set_up(engine)
    for test in TESTS.values():
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


def native_operations(tf: Any, host: Host, engine: Optional[str]) -> Check:
    """Check all of models/native/ in each dtype that a training here may have, and so with its
    instruction set: a small network's answers and gradients against those of its Keras layers in
    float32."""
    from models.native.operations import available

    if not available():
        result = (
            f"{host.native.why}: TensorFlow's layers compute, in about twice the time and memory"
        )
        todo = "install a C compiler, then python -m models.native.build"
        return Check("native operations", "warn", result, todo)
    results = []
    is_right = True
    for dtype in dict.fromkeys(("float32", host.best_dtype)):
        errors = [_native_errors(tf, dtype, residual) for residual in (False, True)]
        answers, gradients = (max(each) for each in zip(*errors))
        is_right &= answers < MOST_ERROR and gradients < MOST_GRADIENT_ERROR[dtype]
        within = f"answers within {answers:.1e}, gradients within {gradients:.1e}"
        results.append(f"{host.native.of(dtype)} in {dtype}, {within}")
    cpu = instruction_set(host.isa, host.cpu_model) or "no AVX2"
    result = f"{'; '.join(results)} of TensorFlow's layers; the CPU has {cpu}"
    if not is_right:
        todo = "set CPU3D_INSTRUCTION_SET=avx2, and report it"
        return Check("native operations", "fail", result, todo)
    return Check("native operations", "ok", result)


def native_speed(tf: Any, host: Host, engine: Optional[str]) -> Check:
    """Compare a convolution by native operations with the most that products alone reach here."""
    from models.native.operations import available
    from models.native.throughput import speed

    name = "own speed"
    if not available():
        return Check(name, "skipped", "there are no native operations here")
    results = []
    shares = []
    for dtype in dict.fromkeys(("float32", host.best_dtype)):
        measured = speed(dtype)
        shares.append(measured.share)
        limit = f"{measured.limit / 1e9:.0f} GFLOP/s"
        name = host.native.of(dtype)
        results.append(f"{name} in {dtype}, {measured.share:.0%} of this host's limit of {limit}")
    result = f"a convolution by {'; by '.join(results)}"
    if min(shares) < SLOW_SHARE or max(shares) > FAST_SHARE:
        return Check(name, "warn", result, "try again when the host is quiet")
    return Check(name, "ok", result)


def _native_errors(tf: Any, dtype: str, residual: bool) -> Tuple[float, float]:
    """The errors of a network's answers and of its gradients by native operations, as shares of the
    norms of what its layers give in float32. In float32 the largest of a weight's gradient; in
    bfloat16, where single ones are noise, of all together."""
    from models.config import UNetConfig
    from models.unet3d import build_unet3d

    unet = UNetConfig(filters=8, depth=3, residual=residual)
    exact = build_unet3d(unet, (16, 16, 16), 1)
    own = build_unet3d(dataclasses.replace(unet, dtype=dtype), (16, 16, 16), 1)
    own.set_weights(exact.get_weights())
    image = tf.random.stateless_uniform((1, 16, 16, 16, 4), (1, 2))

    def computed(network: Any) -> List[Any]:
        with tf.GradientTape() as tape:
            logits = tf.cast(network(image, training=True), tf.float32)
            loss = tf.reduce_mean(tf.sigmoid(logits) ** 2)
        gradients = tape.gradient(loss, network.trainable_variables)
        if dtype != "float32":
            gradients = [tf.concat([tf.reshape(gradient, [-1]) for gradient in gradients], 0)]
        return [logits, *gradients]

    layers = tf.keras.Model(exact.inputs, exact.outputs)
    answers, *gradients = [
        float(tf.norm(value - truth) / tf.norm(truth))
        for value, truth in zip(computed(own), computed(layers))
    ]
    return answers, max(gradients)


TESTS: Dict[str, Callable[[Any, Host, Optional[str]], Check]] = {
    "engine": engine_in_force,
    "native operations": native_operations,
    "own speed": native_speed,
}
"""In this order; the first also shows whether TensorFlow can be imported at all."""


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
