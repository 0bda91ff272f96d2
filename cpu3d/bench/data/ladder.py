"""S1's ladder: what each counter-measure against slow loading gains, on a fast disk and on one of 200 MB/s.

S1 trained on whole images of about 120 MB; so a sample here needs a whole BraTS case read (143 MB as float32), of which
the network sees the 96^3 voxels around the brain's middle. On all of a case a host without a GPU computes so long that
any loading hides behind it; on this much it is about as busy as S1's GPU was. Pages are dropped before every epoch, as
S1 did.
"""

from pathlib import Path
from typing import Any, Dict, List, Optional

from cpu3d.bench.data.disk_cap import disk_cap
from cpu3d.bench.data.files import Files
from cpu3d.bench.data.ladder_feeds import FLOAT, OURS, RUNGS, files_read, make_feed
from cpu3d.bench.data.measuring import drop_pages
from cpu3d.bench.data.options import Options
from cpu3d.bench.data.results import COLD, Line, Outcome, find, ratio, times_slower
from cpu3d.bench.data.worker import in_fresh_process
from cpu3d.util.progress import bar

UNCAPPED = f"{COLD}, disk as it is"


def measure(files: Files, options: Options) -> Outcome:
    scale = files.scale
    request: Dict[str, Any] = {
        "paths": {name: str(path) for name, path in files.brains().items()},
        "grid": scale.grid_of_ladder,
        "filters": scale.filters,
        "depth": scale.depth,
        "epochs": scale.ladder_epochs,
    }
    capped = f"{COLD}, disk at {options.cap_mb_s} MB/s"
    lines: List[Line] = []
    with disk_cap(files.folder, options.cap_mb_s * 1_000_000) as cap:
        for state, limit in ((UNCAPPED, None), (capped, cap)):
            lines += _climb(request, state, limit, options.rounds)
    first, last = ({state: find(lines, rung, state) for state in (UNCAPPED, capped)} for rung in (FLOAT, OURS))
    targets = (times_slower(f"from first to last, {capped}", first[capped], last[capped], ">=", 3.6),)
    gain = ratio(first[UNCAPPED], last[UNCAPPED])
    notes = (
        f"the slow disk: {cap['how']}",
        f"from first to last, {UNCAPPED}: {gain:.2f} x (S1, on a GPU: 2.41, at 1000 MB/s 3.56)",
    )
    grid = "x".join(map(str, scale.grid_of_ladder))
    title = f"A training step on {grid} of a whole case that is read, loaded as on S1's ladder"
    return Outcome("ladder", title, tuple(lines), targets, notes)


def work(request: Dict[str, Any], bucket: Any = None) -> Dict[str, Any]:
    """In the worker: seconds a sample of a rung in each epoch but the first, and what could not be dropped."""
    import time

    from cpu3d.bench.data.tensors import tensorflow

    tensorflow()
    from cpu3d.bench.data.training import Waiting, best_dtype, learner
    from cpu3d.data.store import open_store

    paths = {name: Path(path) for name, path in request["paths"].items()}
    store = open_store(paths["npy"])
    case_ids, outputs = store.manifest.split["train"], len(store.manifest.regions)
    sizes = {name: request[name] for name in ("filters", "depth")}
    model = learner(request["grid"], channels=len(store.manifest.channels), outputs=outputs, batch=1, **sizes)
    read = files_read(request["rung"], paths, case_ids)
    epochs_s, waits, kept = [], [], 0.0
    feed = make_feed(request["rung"], paths, tuple(request["grid"]), best_dtype(), bucket)
    # One stream over all epochs, as a run has: at the end of each, the first samples of the next are under way.
    parts = Waiting(feed(0, (request["epochs"] + 1) * len(case_ids)))
    for _ in range(request["epochs"] + 1):
        kept = max(kept, drop_pages(read))
        parts.waited_s, begin = 0.0, time.perf_counter()
        for _ in case_ids:
            model.step(parts, 1e-4)
        epochs_s.append(time.perf_counter() - begin)
        waits.append(parts.waited_s / epochs_s[-1])
    sample_s = [seconds / len(case_ids) for seconds in epochs_s[1:]]
    return {"sample_s": sample_s, "wait_share": sum(waits[1:]) / len(waits[1:]), "kept": kept}


# --- Private helpers ---


def _climb(request: Dict[str, Any], state: str, cap: Optional[Dict[str, Any]], rounds: int) -> List[Line]:
    """All rungs in turn, `rounds` times."""
    import statistics

    found: Dict[str, List[Dict[str, Any]]] = {rung: [] for rung in RUNGS}
    with bar(f"ladder, {state}", total=rounds * len(RUNGS)) as advance:
        for _ in range(rounds):
            for rung, results in found.items():
                results.append(in_fresh_process("ladder", {**request, "rung": rung}, cap))
                advance()
    lines = []
    for rung, results in found.items():
        values = tuple(statistics.median(one["sample_s"]) for one in results)
        note = f"waits {statistics.median(one['wait_share'] for one in results):.0%}"
        kept = max(one["kept"] for one in results)
        note += f", {kept:.0%} of the pages could not be dropped" if kept > 0.01 else ""
        lines.append(Line(rung, state, values, note=note))
    return lines
