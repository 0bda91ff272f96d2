"""Predict whole volumes in a process of its own: what `bench windows` times, and whose memory it reads.

python -m cpu3d.bench.windows_work '{"run": ..., "store": ..., "cases": [...], ...}'     prints one JSON line
"""

import json
import sys
import time
from pathlib import Path
from typing import Any, Dict

import numpy as np

from cpu3d.bench.step import last_json_line
from cpu3d.data.store import open_store
from cpu3d.host.apply import engine_name, in_force, set_up
from cpu3d.host.gpu import memory_device
from cpu3d.host.memory import peak_rss_bytes
from cpu3d.inference.options import Inference
from cpu3d.inference.predictors import trained_predictor
from cpu3d.util.versions import versions


def in_fresh_process(request: Dict[str, Any]) -> Dict[str, Any]:
    """What `work(request)` returns in a new process. Raises ProcessFailedError where that dies."""
    return last_json_line([sys.executable, "-m", "cpu3d.bench.windows_work", json.dumps(request)], "bench windows")


def work(request: Dict[str, Any]) -> Dict[str, Any]:
    """Seconds of each case, from its image to its probabilities, what was seen of it, and the process's peaks.

    `request` has run, weights, store, cases, inference (an `Inference` as JSON), device ("cpu" or a card) and answers,
    a folder for the probabilities as <case_id>.npy, or None. The first case is predicted once more before the clock
    runs: compiling for a shape is of the run, not of a case.
    """
    device, asked = request["device"], request["inference"]
    host, plan, tf = set_up(device=device)
    window = asked["window"] and tuple(asked["window"])
    inference = Inference(**{**asked, "window": window, "device": device})
    predictor = trained_predictor(Path(request["run"]), request["weights"], inference)
    store = open_store(request["store"])

    def probabilities(case_id: str) -> np.ndarray:
        return predictor.probabilities(store.image(case_id), store.case(case_id))

    probabilities(request["cases"][0])
    cases = {}
    for case_id in request["cases"]:
        begin = time.perf_counter()
        answers = probabilities(case_id)
        seconds = time.perf_counter() - begin
        region = predictor.region(store.case(case_id))
        cases[case_id] = {"seconds": seconds, "start": region.start, "size": region.size}
        if request["answers"]:
            np.save(Path(request["answers"]) / f"{case_id}.npy", answers)
        del answers  # else it would lie beside the next one
    from cpu3d.training.learner import allocator_peak_bytes  # imports TensorFlow, so not before

    return {
        "cases": cases,
        "process_peak_bytes": peak_rss_bytes(),
        "allocator_peak_bytes": allocator_peak_bytes(memory_device(device)),
        "engine_name": engine_name(tf),
        "threads": in_force(plan),
        "host": host.summary(),
        "versions": versions(),
    }


if __name__ == "__main__":
    print(json.dumps(work(json.loads(sys.argv[1]))))
