"""Training on whole volumes: how long a step waits for data, what loading costs, and whether memory stays flat.

The wait is told for the trainer's own network. The loader's processor time is that of a process which does nothing but
load, all its threads counted. Anonymous memory is watched over many steps of a small network, and the page cache while
a store streams that is larger than the pages it is allowed.
"""

import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

from cpu3d.bench.data.files import Files, array_files
from cpu3d.bench.data.measuring import drop_pages, read_through, resident_bytes
from cpu3d.bench.data.options import Options
from cpu3d.bench.data.results import COLD, WARM, Line, Outcome, Target
from cpu3d.bench.data.worker import in_fresh_process
from cpu3d.util.progress import bar
from memory_estimator.units import format_bytes

MIB = 2**20

SMALL = {"filters": 2, "depth": 2}
"""Of the network whose many steps memory is watched over: a step that hardly hides the loading."""

SETTLED = 0.1
"""Part of the steps after which memory should no longer grow."""

BUDGET_CASES = 3
"""The page budget of the stream, in cases of the store."""

IN_FLIGHT = 2
"""Cases whose maps are in use beside those within the budget, and whose pages no advice can give back: the one being
prepared and the one before it, which TensorFlow lets go of a call later."""


def measure(files: Files, options: Options) -> Outcome:
    scale = files.scale
    paths = files.brains()
    request = {
        "store": str(paths["npy"]),
        "steps": scale.wait_steps,
        "filters": scale.wait_filters,
        "depth": scale.wait_depth,
        "volumes": scale.core_volumes,
        "rounds": options.rounds,
    }
    with bar("volumes", total=6) as advance:

        def part(name: str, **more: Any) -> Dict[str, Any]:
            result = in_fresh_process("whole_volumes", {**request, "part": name, **more})
            advance()
            return result

        wait = part("wait")
        full, brain = part("cores", extent="full"), part("cores", extent="brain")
        packed = part("cores", extent="full", store=str(paths["b2nd"]))
        memory = part("memory", steps=options.steps)
        pages = part("pages")
    lines = (
        Line("a step's wait for data, of the step", WARM, tuple(wait["shares"]), unit="%", note=wait["note"]),
        Line("loader, whole grid", WARM, tuple(full["core_s"]), unit="core-s", note=full["note"]),
        Line("loader, brain's box", WARM, tuple(brain["core_s"]), unit="core-s", note=brain["note"]),
        Line("loader, whole grid from .b2nd", WARM, tuple(packed["core_s"]), unit="core-s", note=packed["note"]),
        Line("anonymous memory over the steps", WARM, tuple(memory["MiB"]), unit="MiB", note=memory["note"]),
        Line("pages of the store while it streams", COLD, tuple(pages["MiB"]), unit="MiB", note=pages["note"]),
    )
    bound = pages["budget_bytes"] + IN_FLIGHT * pages["case_bytes"]
    targets = (
        Target("wait for data, of all steps", 100 * wait["share"], "<=", 1, "%"),
        Target("processor time of the loader a volume, whole grid", lines[1].median, "<=", 0.15, "core-s"),
        Target(f"growth of anonymous memory over {options.steps} steps", 100 * memory["growth"], "<=", 1, "%"),
        Target("pages of the store, budget and cases in use", max(pages["MiB"]), "<=", bound / MIB, "MiB"),
    )
    shape = "x".join(map(str, scale.case))
    return Outcome("volumes", f"Training on whole volumes of {shape}x4", lines, targets)


def work(request: Dict[str, Any], _bucket: Any = None) -> Dict[str, Any]:
    """In the worker: one of the parts."""
    from cpu3d.bench.data.tensors import tensorflow

    tensorflow()
    return {"wait": _wait, "cores": _cores, "memory": _memory, "pages": _pages}[request["part"]](request)


# --- Private helpers: the parts ---


def _wait(request: Dict[str, Any]) -> Dict[str, Any]:
    from cpu3d.bench.data.training import Waiting

    steps, warm_up = request["steps"], 2
    model, feed = _trained(request["store"], steps + warm_up, request["filters"], request["depth"], norm="instance")
    parts = Waiting(feed)
    shares, total_s, waited_s = [], 0.0, 0.0
    for step in range(steps + warm_up):
        parts.waited_s, begin = 0.0, time.perf_counter()
        model.step(parts, 1e-4)
        step_s = time.perf_counter() - begin
        if step >= warm_up:
            shares.append(100 * parts.waited_s / step_s)
            total_s, waited_s = total_s + step_s, waited_s + parts.waited_s
    note = f"{request['filters']} filters, {steps} steps of {total_s / steps:.2f} s"
    return {"shares": shares, "share": waited_s / total_s, "note": note}


def _cores(request: Dict[str, Any]) -> Dict[str, Any]:
    from cpu3d.bench.data.training import best_dtype
    from cpu3d.data.augment import AugmentConfig
    from cpu3d.data.source import open_store, volume_dataset

    count, warm_up = request["volumes"], 2
    store = open_store(request["store"])
    read_through(array_files(Path(request["store"])))
    core_s = []
    more = {"extent": request["extent"], "augment": AugmentConfig(), "dtype": best_dtype()}
    volumes = volume_dataset(store, stop=count + warm_up, **more)
    for _ in range(request["rounds"]):
        stream = iter(volumes)
        for _ in range(warm_up):
            next(stream)
        begin, begin_core = time.perf_counter(), time.process_time()
        for _image, _target in stream:
            pass
        core_s.append((time.process_time() - begin_core) / count)
        elapsed = (time.perf_counter() - begin) / count
    shape = "x".join(str(n) for n in volumes.element_spec[0].shape[1:])
    return {"core_s": core_s, "note": f"{shape} {best_dtype()}, flips and intensity; {elapsed:.3f} s a volume"}


def _memory(request: Dict[str, Any]) -> Dict[str, Any]:
    from cpu3d.bench.data.training import slope
    from cpu3d.host.memory import resident

    model, feed = _trained(request["store"], request["steps"], **SMALL)
    seen = []
    begin = time.perf_counter()
    for _ in range(request["steps"]):
        model.step(feed, 1e-4)
        now = resident()
        seen.append(now.anonymous_bytes if now else 0)
    step_s = (time.perf_counter() - begin) / request["steps"]
    late = seen[int(SETTLED * len(seen)) :]
    gained = slope(late)
    growth = gained * request["steps"] / max(late)
    apart = (max(late) - min(late)) / MIB
    note = f"{gained:+.0f} bytes a step, {apart:.1f} MiB between least and most, {step_s:.2f} s a step"
    return {"MiB": [one / MIB for one in _thinned(late)], "growth": growth, "note": note}


def _pages(request: Dict[str, Any]) -> Dict[str, Any]:
    """The store's pages and this process's, sampled at every volume of four epochs."""
    from cpu3d.data.source import open_store, volume_dataset
    from cpu3d.host.memory import resident

    store = open_store(request["store"])
    files = array_files(Path(request["store"]))
    drop_pages(files)
    case_bytes = max(record.image_bytes + record.label_bytes for record in store.cases("train"))
    budget_bytes = BUDGET_CASES * case_bytes
    total_bytes = sum(path.stat().st_size for path in files)
    stop = 4 * len(store.cases("train"))
    cached, own = [], []
    for _image, _target in volume_dataset(store, stop=stop, read_mode="mmap", page_budget_bytes=budget_bytes):
        cached.append(sum(map(resident_bytes, files)))
        now = resident()
        own.append(now.file_bytes if now else 0)
    note = (
        f"store of {format_bytes(total_bytes)}, budget {format_bytes(budget_bytes)}, {stop} volumes;"
        f" file pages of the process up to {format_bytes(max(own))}"
    )
    return {
        "MiB": [one / MIB for one in _thinned(cached)] + [max(cached) / MIB],
        "budget_bytes": budget_bytes,
        "case_bytes": case_bytes,
        "note": note,
    }


def _trained(store_folder: str, steps: int, filters: int, depth: int, norm: str = "none"):
    """A learner and its data, as `train` has them by default."""
    from cpu3d.bench.data.training import best_dtype, learner
    from cpu3d.data.augment import AugmentConfig
    from cpu3d.data.extent import grid_size
    from cpu3d.data.source import open_store, volume_dataset

    store = open_store(store_folder)
    read_through(array_files(Path(store_folder)))
    channels, outputs = len(store.manifest.channels), len(store.manifest.regions)
    grid = grid_size(store, extent="brain", multiple=16)
    model = learner(grid, channels=channels, outputs=outputs, filters=filters, depth=depth, batch=1, norm=norm)
    feed: Iterator[Any] = iter(volume_dataset(store, stop=steps, augment=AugmentConfig(), dtype=best_dtype()))
    return model, feed


def _thinned(values: List[int]) -> List[int]:
    """About a hundred of them, evenly spread: a record need not hold every step."""
    return values[:: max(1, len(values) // 100)]
