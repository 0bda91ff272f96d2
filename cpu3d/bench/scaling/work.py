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
from typing import Any, Dict, List

from cpu3d.bench.measure import made_up
from cpu3d.config import RunConfig
from cpu3d.distributed.cluster import Cluster
from cpu3d.distributed.strategy import Exchange, join
from cpu3d.host.apply import engine_name, in_force, set_up
from cpu3d.host.memory import peak_rss_bytes
from cpu3d.versions import versions
from models.config import UNetConfig

MESSAGES = 20
"""Sums of a single number, whose time is that of messages without content."""

LOOK_EVERY_S = 0.002
"""Between two looks for the others."""


class Timed(Exchange):
    """An exchange whose sums are each preceded by that of a single number: who waits there waits for the others."""

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


def work(request: Dict[str, Any]) -> Dict[str, Any]:
    """Seconds of every timed step, and of its parts where there is an exchange.

    `request` is that of `bench step` with `batch` of one worker, and: cpus, what the process is held to; addresses, of
    all workers, () without an exchange; rank; folder, where the processes of one measurement find each other; count,
    how many they are. None begins before all are ready, and without an exchange none ends before all are done.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, request["cpus"])  # so that the host is planned for as if it had these alone
    folder, rank, count = Path(request["folder"]), request["rank"], request["count"]
    _, threads, tf = set_up(request["engine"])
    exchange = Timed(tf, join(Cluster(tuple(request["addresses"]), rank if request["addresses"] else 0)))
    from cpu3d.learner import Learner, parameter_count

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
    exchange.wait_s.clear()
    exchange.sum_s.clear()
    step_s, exchange_s = [], []
    for _ in range(request["steps"]):
        begin = time.perf_counter()
        outcome = learner.step(parts, 1e-4)
        step_s.append(time.perf_counter() - begin)
        exchange_s.append(outcome.exchange_s)
    result: Dict[str, Any] = {"step_s": step_s, "wait_s": exchange.wait_s[:], "sum_s": exchange.sum_s[:]}
    # What the learner takes for its exchange and the exchange itself does not is packing and unpacking.
    timed = zip(exchange_s, result["wait_s"], result["sum_s"])
    result["packing_s"] = [both - wait - own for both, wait, own in timed]
    if exchange.count > 1:
        result["message_s"] = _message_s(tf, exchange)
        exchange.close()
    else:
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


def _message_s(tf: Any, exchange: Timed) -> float:
    """Seconds of one message: a sum of a single number takes 2 (n - 1) of them one after the other."""
    exchange.sum_s.clear()
    for _ in range(MESSAGES):
        exchange.sum(tf.zeros([1]))
    return statistics.median(exchange.sum_s) / (2 * (exchange.count - 1))


if __name__ == "__main__":
    print(json.dumps(work(json.loads(sys.argv[1]))))
