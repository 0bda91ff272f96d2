"""S4's size: 484 cases and 101 entries of each, 48,884 in all. Open the store, stream from it, and watch the memory.

The entries of a case share its arrays, so that what is measured is what grows with the number of cases. Opening is done
by a process without TensorFlow, whose own libraries would hide what a store takes.
"""

import time
from typing import Any, Dict, List

from cpu3d.bench.data.files import Files
from cpu3d.bench.data.options import Options
from cpu3d.bench.data.results import WARM, Line, Outcome, Target
from cpu3d.bench.data.worker import in_fresh_process
from cpu3d.data.case_index import KEPT

MIB = 2**20


def measure(files: Files, options: Options) -> Outcome:
    request = {"store": str(files.many()), "samples": files.scale.large_samples}
    opened = [in_fresh_process("many_cases", {**request, "part": "open"}) for _ in range(options.rounds)]
    streamed = in_fresh_process("many_cases", {**request, "part": "stream"})
    entries = opened[0]["entries"]
    lines = (
        Line("open the store", WARM, tuple(one["open_s"] for one in opened)),
        Line("peak memory of the process that opens it", WARM, tuple(one["peak_bytes"] / MIB for one in opened), "MiB"),
        Line("first volume, with TensorFlow running", WARM, (streamed["first_s"],)),
        Line("anonymous memory while it streams", WARM, tuple(streamed["MiB"]), "MiB", note=streamed["note"]),
    )
    grown = f"growth of anonymous memory over {streamed['watched']:,} volumes"
    targets = (
        Target("open the store", lines[0].median, "<=", 2, "s"),
        Target("peak memory of the process that opens it", lines[1].median, "<=", 300, "MiB"),
        Target(grown, 100 * streamed["growth"], "<=", 1, "%"),
    )
    return Outcome("many", f"A store of {entries:,} entries", lines, targets)


def work(request: Dict[str, Any], _bucket: Any = None) -> Dict[str, Any]:
    """In the worker: open the store, or stream from it."""
    return _open(request) if request["part"] == "open" else _stream(request)


# --- Private helpers ---


def _open(request: Dict[str, Any]) -> Dict[str, Any]:
    from cpu3d.data.store import open_store
    from cpu3d.host.memory import peak_rss_bytes

    begin = time.perf_counter()
    store = open_store(request["store"])
    entries = len(store.cases("train"))
    return {"open_s": time.perf_counter() - begin, "peak_bytes": peak_rss_bytes(), "entries": entries}


def _stream(request: Dict[str, Any]) -> Dict[str, Any]:
    from cpu3d.bench.data.tensors import tensorflow

    tensorflow()
    from cpu3d.bench.data.training import slope
    from cpu3d.data.source import open_store, volume_dataset
    from cpu3d.host.memory import resident

    seen: List[int] = []
    begin = time.perf_counter()
    first_s = 0.0
    for _image, _target in volume_dataset(open_store(request["store"]), stop=request["samples"]):
        first_s = first_s or time.perf_counter() - begin
        now = resident()
        seen.append(now.anonymous_bytes if now else 0)
    # Records stay parsed until there are `KEPT` of them: what grows after that would grow for ever.
    late = seen[min(KEPT, len(seen) // 2) :]
    gained = slope(late)
    note = f"{gained:+.0f} bytes a volume, {(max(late) - min(late)) / MIB:.1f} MiB between least and most"
    thinned = late[:: max(1, len(late) // 100)]
    return {
        "first_s": first_s,
        "MiB": [one / MIB for one in thinned],
        "growth": gained * len(late) / max(late),
        "watched": len(late),
        "note": note,
    }
