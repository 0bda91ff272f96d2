"""S0 end to end: a training run on random patches of 32 CTs, fed in eight ways. The same network and the same patches.

Each run is a fresh process; all feeds take their turn in every round. "Held" keeps every CT in memory as NumPy arrays,
which is the fastest that loading can be; "no loading" repeats one batch and tells what the step alone takes. The
network is small, or on a host without a GPU every way to load would hide behind its step.
"""

from pathlib import Path
from typing import Any, Dict, List

from cpu3d.bench.data.files import Files
from cpu3d.bench.data.measuring import drop_pages, read_through
from cpu3d.bench.data.options import Options
from cpu3d.bench.data.patch_feeds import FEEDS, GZ, HELD, MMAP, OF_DISK, batches, files_read
from cpu3d.bench.data.results import COLD, WARM, Line, Outcome, find, times_slower
from cpu3d.bench.data.worker import in_fresh_process
from cpu3d.util.progress import bar
from memory_estimator.units import format_bytes


def measure(files: Files, options: Options) -> Outcome:
    scale = files.scale
    request: Dict[str, Any] = {
        "folders": {name: str(path) for name, path in files.cts().items()},
        **{name: getattr(scale, name) for name in ("patch", "batch", "filters", "depth", "warm_up", "train_steps")},
    }
    # Cold is the first pass over the data; one is enough to see what it costs.
    runs = [(WARM, feed) for _ in range(options.rounds) for feed in FEEDS] + [(COLD, feed) for feed in OF_DISK]
    found: Dict[Any, List[Dict[str, Any]]] = {}
    with bar("spleen", total=len(runs)) as advance:
        for state, feed in runs:
            result = in_fresh_process("patch_training", {**request, "feed": feed, "state": state})
            found.setdefault((state, feed), []).append(result)
            advance()
    lines = [
        Line(feed, state, tuple(one["step_s"] for one in results), note=_note(results))
        for (state, feed), results in found.items()
    ]
    ours = find(lines, MMAP, WARM)
    targets = (
        times_slower("no cache, .nii.gz, against the store's map", find(lines, GZ, WARM), ours, ">=", 3.2),
        times_slower("the store's map against all held in memory", ours, find(lines, HELD, WARM), "<=", 1.05),
    )
    patch = "x".join(map(str, scale.patch))
    title = f"A training step on {scale.batch} patches of {patch} from {scale.cts} CTs, {scale.filters} filters"
    return Outcome("spleen", title, tuple(lines), targets)


def work(request: Dict[str, Any], _bucket: Any = None) -> Dict[str, Any]:
    """In the worker: one run of one feed."""
    from cpu3d.bench.data.tensors import tensorflow

    tensorflow()
    from cpu3d.bench.data.training import best_dtype, learner, train

    folders = {name: Path(path) for name, path in request["folders"].items()}
    read = files_read(request["feed"], folders)
    kept = 0.0
    if request["state"] == COLD:
        kept = drop_pages(read)
    else:
        read_through(read)
    patch, batch, steps = tuple(request["patch"]), request["batch"], request["train_steps"]
    model = learner(patch, channels=1, outputs=1, filters=request["filters"], depth=request["depth"], batch=batch)
    count = request["warm_up"] + steps
    feed = batches(request["feed"], folders, patch, batch, count, best_dtype())
    return {**train(model, feed, request["warm_up"], steps), "kept": kept}


# --- Private helpers ---


def _note(results: List[Dict[str, Any]]) -> str:
    middle = sorted(results, key=lambda one: one["step_s"])[(len(results) - 1) // 2]
    memory = f"{format_bytes(middle['anonymous_bytes'])} anonymous, {format_bytes(middle['file_bytes'])} of files"
    kept = f", {middle['kept']:.0%} of the pages could not be dropped" if middle["kept"] > 0.01 else ""
    return f"waits {middle['wait_share']:.0%}; {memory}{kept}"
