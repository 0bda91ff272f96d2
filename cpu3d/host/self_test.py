"""A self-test of TensorFlow and native operations on this host, in a fresh process.

for check in self_test():
    print(check.name, check.state, check.result, check.advice)

As a program, `python -m cpu3d.host.self_test FILE [ENGINE]` writes the results into a file, as
JSON."""

import dataclasses
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Optional, Tuple

from cpu3d.host.apply import engine_name, installed, set_up
from cpu3d.util.child import ROOT, how_ended
from memory_estimator.host import Host, instruction_set
from memory_estimator.installed import how_to_install

PROGRAM = (sys.executable, "-m", "cpu3d.host.self_test")

LIMIT_S = 600.0  # for all tests: a slow machine takes a minute, one that hangs never ends

MOST_ERROR = 0.02  # of answers, as a share of the norm of those of layers in float32
# The same of gradients. In float32 a value beside zero may be on the other side of its ReLU; in
# bfloat16 0.05 to 0.09 were measured, and 0.14 to 0.20 of TensorFlow's layers.
MOST_GRADIENT_ERROR = {"float32": 0.02, "bfloat16": 0.2}


@dataclass(frozen=True)
class Check:
    """A check of the doctor's."""

    name: str
    # "ok"; "note", worth knowing with nothing to set; "warn", with what to do; "fail"
    state: str
    result: str
    advice: str = ""  # what to do


def self_test(engine: Optional[str] = None) -> List[Check]:
    """Try an engine out in a fresh process, within LIMIT_S. A process that dies, or is not done in
    time, is a failed check."""
    with tempfile.NamedTemporaryFile() as results:
        command = [*PROGRAM, results.name]
        if engine:
            command.append(engine)
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            result = f"not done after {LIMIT_S:.0f} s"
            return [Check("self-test", "fail", result, "try again when the host is quiet")]
        if done.returncode:
            *_, last = done.stderr.decode(errors="replace").split("\n")[-2:-1] or [""]
            result = f"the process ended with {how_ended(done.returncode)}: {last}"
            return [Check("self-test", "fail", result, how_to_install())]
        return [Check(**content) for content in json.load(results)]


def main(path: str, engine: Optional[str]) -> None:
    """Do the tests in this process, and write their results into a file."""
    host, _, tf = set_up(engine)
    checks = [engine_in_force(tf, engine), native_operations(tf, host)]
    content = [dataclasses.asdict(check) for check in checks]
    Path(path).write_text(json.dumps(content), encoding="utf-8")


def engine_in_force(tf: Any, engine: Optional[str]) -> Check:
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


def native_operations(tf: Any, host: Host) -> Check:
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


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
