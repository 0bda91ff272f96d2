"""One worker of `bench scaling`: the trainer's own step on made-up data, the exchange with the others timed in parts.

python -m cpu3d.bench.scaling.work '{"shape": [64, 64, 64], ..., "cpus": [0]}'     prints one JSON line
"""

import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

from cpu3d.bench.step import made_up
from cpu3d.config import RunConfig
from cpu3d.distributed.cluster import Cluster
from cpu3d.distributed.strategy import ALONE, Exchange, join
from cpu3d.host.apply import engine_name, in_force, set_up
from cpu3d.host.memory import peak_rss_bytes
from cpu3d.util.versions import versions
from models.config import UNetConfig

SUMS = 20
"""Of a single number, timed for what a sum costs besides its bytes."""

CHAINED = 9
"""Sums one after the other in one graph: what each takes more there is of its messages, not of the call."""

LOOK_EVERY_S = 0.002
"""Between two looks for the others."""


class Timed(Exchange):
    """An exchange whose sums are each preceded by that of a single number: who waits there waits for the others.

    What that one costs by itself, the trainer does not have: `fixed_costs` tells it, to be taken off.
    """

    def __init__(self, tf: Any, inner: Exchange):
        self._tf, self._inner = tf, inner
        self.rank, self.count = inner.rank, inner.count
        self.wait_s: List[float] = []
        self.sum_s: List[float] = []

    def sum(self, vector: Any) -> Any:
        begin = time.perf_counter()
        self._inner.sum(self._tf.zeros([1])).numpy()
        met = time.perf_counter()
        total = self._inner.sum(vector)
        self._tf.reshape(total, [-1])[0].numpy()  # it is there
        self.wait_s.append(met - begin)
        self.sum_s.append(time.perf_counter() - met)
        return total

    def close(self) -> None:
        self._inner.close()

    def fixed_costs(self) -> Tuple[float, float]:
        """Seconds that a sum takes whatever its length, and those of a message, of which it has 2 (n - 1) in turn.

        A message by what CHAINED sums in one graph take more than one: what TensorFlow does for a sum inside the graph
        is in it, so it is an upper bound.
        """
        one = self._tf.zeros([1])

        @self._tf.function(input_signature=[self._tf.TensorSpec([1], self._tf.float32)])
        def chain(number):
            for _ in range(CHAINED):
                number = self._inner.sum(number)
            return number

        def seconds_of(function: Callable[[Any], Any]) -> float:
            function(one).numpy()  # traced, and met
            times = []
            for _ in range(SUMS):
                self._inner.sum(one).numpy()  # all begin at once
                begin = time.perf_counter()
                function(one).numpy()
                times.append(time.perf_counter() - begin)
            return statistics.median(times)

        whole_s, chain_s = seconds_of(self._inner.sum), seconds_of(chain)
        messages = 2 * (self.count - 1)
        message_s = min(max(chain_s - whole_s, 0.0) / (CHAINED - 1), whole_s) / messages
        return whole_s - messages * message_s, message_s


class AsOfTwo(Exchange):
    """A worker that does all that one of two has to do but the exchange: it takes its own sum for that of both."""

    count = 2

    def __init__(self, tf: Any):
        self._tf = tf
        self.sum_s: List[float] = []

    def sum(self, vector: Any) -> Any:
        begin = time.perf_counter()
        # The last two numbers are the fingerprints of both workers' weights, which have to be the same.
        total = self._tf.concat([vector[:-1], vector[-2:-1]], 0)
        self.sum_s.append(time.perf_counter() - begin)
        return total


def work(request: Dict[str, Any]) -> Dict[str, Any]:
    """Seconds of every timed step, and of its parts where there is an exchange.

    `request` is that of `bench step` with `batch` of one worker, and: cpus, what the process is held to; addresses, of
    all workers, () without an exchange; in_parts, whether gradients are added up and the weights updated after though
    there is no exchange; rank; folder, where the processes of one measurement find each other; count, how many they
    are. None begins before all are ready, and without an exchange none ends before all are done.
    """
    if request["cpus"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, request["cpus"])  # so that the host is planned for as if it had these alone
    folder, rank, count = Path(request["folder"]), request["rank"], request["count"]
    _, threads, tf = set_up(request["engine"])
    exchange: Exchange = ALONE
    if request["addresses"]:
        exchange = Timed(tf, join(Cluster(tuple(request["addresses"]), rank)))  # by TensorFlow, as between hosts
    elif request["in_parts"]:
        exchange = AsOfTwo(tf)
    from cpu3d.training.learner import Learner, parameter_count

    unet, grid, micro = UNetConfig(**request["unet"]), tuple(request["shape"]), request["micro_batch"]
    config = RunConfig(
        grid=grid,
        unet=unet,
        batch=request["batch"] * exchange.count,
        micro_batch=micro,
        optimizer=request["optimizer"],
    )
    learner = Learner(config, exchange)
    parts = itertools.repeat(made_up(tf, unet, micro, grid))
    for _ in range(request["warm_up"]):
        learner.step(parts, 1e-4)
    _meet(folder, "ready", rank, count)
    step_s, exchange_s = [], []
    for _ in range(request["steps"]):
        begin = time.perf_counter()
        outcome = learner.step(parts, 1e-4)
        step_s.append(time.perf_counter() - begin)
        exchange_s.append(outcome.exchange_s)
    # What the learner takes for its exchange and the exchange itself does not is packing and unpacking.
    last = slice(-request["steps"], None)
    result: Dict[str, Any] = {"step_s": step_s, "wait_s": [], "sum_s": [], "packing_s": []}
    if isinstance(exchange, Timed):
        wait_s, sum_s = exchange.wait_s[last], exchange.sum_s[last]
        call_s, message_s = exchange.fixed_costs()
        meeting_s = call_s + 2 * (count - 1) * message_s  # of the sum before the sum
        result = {
            "step_s": [seconds - meeting_s for seconds in step_s],
            "wait_s": [seconds - meeting_s for seconds in wait_s],
            "sum_s": sum_s,
            "packing_s": [both - wait - own for both, wait, own in zip(exchange_s, wait_s, sum_s)],
            "call_s": call_s,
            "message_s": message_s,
        }
        exchange.close()
    else:
        if isinstance(exchange, AsOfTwo):
            sum_s = exchange.sum_s[last]
            result["step_s"] = [seconds - own for seconds, own in zip(step_s, sum_s)]
            result["packing_s"] = [seconds - own for seconds, own in zip(exchange_s, sum_s)]
        (folder / f"done-{rank}").touch()
        while len(list(folder.glob("done-*"))) < count:  # the others' last steps are not to run faster than the first
            learner.step(parts, 1e-4)
    return {
        **result,
        "parameters": parameter_count(learner.model),
        "process_peak_bytes": peak_rss_bytes(),
        "engine_name": engine_name(tf),
        "threads": in_force(threads),
        "versions": versions(),
    }


# --- Private helpers ---


def _meet(folder: Path, name: str, rank: int, count: int) -> None:
    """Return when all processes of the measurement are here."""
    (folder / f"{name}-{rank}").touch()
    while len(list(folder.glob(f"{name}-*"))) < count:
        time.sleep(LOOK_EVERY_S)


if __name__ == "__main__":
    print(json.dumps(work(json.loads(sys.argv[1]))))
