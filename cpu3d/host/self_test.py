"""A self-test of TensorFlow and native operations on this host, in a fresh process.

for check in self_test():
    print(check.name, check.state, check.result, check.advice)
"""

import dataclasses
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, List, Optional, Tuple

from cpu3d.host.apply import engine_name, installed, set_up
from memory_estimator.host import Host
from memory_estimator.installed import how_to_install

BUILD = "install a C compiler, then python -m models.native.build"

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
    """Try an engine out in a fresh process. One that dies is a failed check."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(checks_here, engine).result()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            return [Check("self-test", "fail", problem, how_to_install())]


def checks_here(engine: Optional[str]) -> List[Check]:
    """The checks, in this process."""
    host, _, tf = set_up(engine)
    return [engine_in_force(tf, engine), native_operations(tf, host)]


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
        result = f"{host.native.why}: TensorFlow's layers compute, in twice the time and memory"
        return Check("native operations", "warn", result, BUILD)
    results = []
    is_right = True
    for dtype in dict.fromkeys(("float32", host.best_dtype)):
        errors = [_native_errors(tf, dtype, residual) for residual in (False, True)]
        answers, gradients = (max(each) for each in zip(*errors))
        is_right &= answers < MOST_ERROR and gradients < MOST_GRADIENT_ERROR[dtype]
        within = f"answers within {answers:.1e}, gradients within {gradients:.1e}"
        results.append(f"{host.native.of(dtype)} in {dtype}, {within}")
    result = f"{'; '.join(results)} of TensorFlow's layers"
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
