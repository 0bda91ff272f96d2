"""The real training step on made-up data, timed in this process. Started fresh by `bench step`, once a measurement.

python -m cpu3d.bench.measure '{"shape": [64, 64, 64], ...}'     prints one JSON line
"""

import contextlib
import itertools
import json
import statistics
import sys
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from cpu3d.bench.allocations import record_allocations
from cpu3d.config import RunConfig
from cpu3d.host.apply import engine_name, in_force, set_up
from cpu3d.host.memory import peak_rss_bytes, resident
from cpu3d.util.versions import versions
from models.config import UNetConfig
from models.layer_plan import training_flops

WARM_UP_STEPS = 2
"""The first step compiles, the second still fills optimizer slots and caches; peaks and times settle with the third."""

LONG_ENOUGH_S = 90
"""Once the steps have taken this long, no more are done than one to warm up and one to time: without oneDNN a step
takes minutes in bfloat16, next to which what settles during the first ones is nothing."""

MATMUL_SIDES = (1024, 2048, 4096)
"""Matrices tried for the peak; larger ones gain nothing on the hosts measured."""


def measure(request: Dict[str, Any]) -> Dict[str, Any]:
    """Do `steps` training steps in the dtype and on the engine of `request`: their time and their memory.

    `request["matmul"]` says when the host's matrix product is timed, "before" and "after" the steps. Both is fairest,
    as the best of all products counts: a share of it is then never flattered by a slow moment of the host. Where memory
    is the question it must not come before, because the matrices' pages would stay with the process.

    With `request["watched"]` the result also says when each part ran, and what lay in memory before the first volume;
    with `request["profile"]` it lists the allocator's calls of one step more. All peaks are read before that and
    before the products after the steps. With `request["plain"]` the step is the plain Keras graph's.
    """
    host, threads, tf = set_up(request["engine"])
    from cpu3d.bench.plain import PlainLearner
    from cpu3d.training.learner import Learner, allocator_peak_bytes, parameter_count

    unet, batch, grid = UNetConfig(**request["unet"]), request["batch"], tuple(request["shape"])
    config = RunConfig(
        grid=grid, unet=unet, batch=batch, micro_batch=request["micro_batch"], optimizer=request["optimizer"]
    )
    learner = (PlainLearner if request.get("plain") else Learner)(config)
    peaks = [_matmul_gflops(tf, unet.dtype)] if "before" in request["matmul"] else []
    moments = _Moments()
    before = resident()
    with moments.named("data"):
        # One micro-batch stands for all: as with a store, no other lies in memory beside it.
        parts = itertools.repeat(made_up(tf, unet, config.micro, grid))

    def step() -> float:
        with moments.named("step") as begin:
            learner.step(parts, 1e-4)
        return time.perf_counter() - begin

    first: List[float] = []
    while len(first) < request.get("warm_up", WARM_UP_STEPS) and sum(first) < LONG_ENOUGH_S:
        first.append(step())
    _forget_peak(tf)
    timed = [step()]
    while len(timed) < request["steps"] and sum(first + timed) < LONG_ENOUGH_S:
        timed.append(step())
    allocator_peak, process_peak, after = allocator_peak_bytes(), peak_rss_bytes(), resident()

    more: Dict[str, Any] = {}
    if request.get("watched"):
        more["baseline_bytes"] = before and before.total_bytes
        more["resident_bytes"] = after and after.total_bytes
        more["moments"] = moments.found
    if request.get("profile"):
        more["allocations"] = _allocations(tf, step)
    if "after" in request["matmul"]:
        peaks.append(_matmul_gflops(tf, unet.dtype))

    step_s = statistics.median(timed)
    gflops = training_flops(unet, grid, batch) / step_s / 1e9
    return {
        **request,
        "engine_name": engine_name(tf),
        "step_s": step_s,
        "step_s_min": min(timed),
        "step_s_max": max(timed),
        "first_step_s": first[0] if first else timed[0],
        "steps_timed": len(timed),
        "volume_s": step_s / batch,
        "gflops": gflops,
        "matmul_gflops": max(peaks, default=None),
        "matmul_peak_share": gflops / max(peaks) if peaks else None,
        "allocator_peak_bytes": allocator_peak,
        "process_peak_bytes": process_peak,
        **more,
        "parameters": parameter_count(learner.model),
        "threads": in_force(threads),
        "host": host.summary(),
        "versions": versions(),
    }


def made_up(tf: Any, unet: UNetConfig, batch: int, grid: Tuple[int, ...]) -> Tuple[Any, Any]:
    """Noise, and targets of a tenth of the voxels.

    Made by TensorFlow: whether it copies an array of numpy's depends on the address that this happens to have, and
    the allocator's peak on everything that was taken before it.
    """
    noise = tf.random.stateless_normal((batch, *grid, unet.channels), (0, 1))
    drawn = tf.random.stateless_uniform((batch, *grid, unet.outputs), (0, 2), 0, 10, tf.int32)
    return tf.cast(noise, unet.dtype), tf.cast(tf.equal(drawn, 9), tf.uint8)


# --- Private helpers ---


class _Moments:
    """When each part ran: (name, begin, end) of the clock of `time.time`, which a watching process shares."""

    def __init__(self):
        self.found: List[Tuple[str, float, float]] = []

    @contextlib.contextmanager
    def named(self, name: str) -> Iterator[float]:
        """Yields the begin on `time.perf_counter`, which alone is fit for short times."""
        begin = time.time()
        yield time.perf_counter()
        self.found.append((name, begin, time.time()))


def _allocations(tf: Any, step: Callable[[], Any]) -> Any:
    """What `record_allocations` returns, or the text of its complaint: what was measured before stands either way."""
    try:
        return record_allocations(tf, step)
    except RuntimeError as error:
        return str(error)


def _matmul_gflops(tf: Any, dtype: str) -> float:
    """The best rate of a square matrix product in `dtype`, over a few sizes; stops growing where a product is slow."""
    best = 0.0
    for side in MATMUL_SIDES:
        matrix = tf.cast(tf.random.stateless_normal((side, side), (1, 2)), dtype)
        product = tf.function(lambda m: tf.matmul(m, m))
        product(matrix)
        seconds = []
        for _ in range(6):
            begin = time.perf_counter()
            product(matrix)[0, 0].numpy()
            seconds.append(time.perf_counter() - begin)
            if sum(seconds) > 2:
                break
        best = max(best, 2 * side**3 / min(seconds) / 1e9)
        if min(seconds) > 0.5:
            break
    return best


def _forget_peak(tf: Any) -> None:
    # An engine without oneDNN keeps no statistics, and reports none.
    with contextlib.suppress(ValueError, tf.errors.OpError):
        tf.config.experimental.reset_memory_stats("CPU:0")


def main(text: Optional[str] = None) -> None:
    print(json.dumps(measure(json.loads(text or sys.argv[1]))))


if __name__ == "__main__":
    main()
