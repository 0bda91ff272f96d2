"""MONAI's data sets beside the store's patches, on the same CTs: seconds a sample, and the memory that they hold.

MONAI runs in a Python of its own, named with --monai. A sample is an image patch and its label patch; loading is all
that is done. CacheDataset keeps every decoded volume in memory, PersistentDataset writes them to the disk as pickles,
Dataset reads the `.nii.gz` anew every time.
"""

import json
import os
import time
from pathlib import Path
from typing import Any, Dict, List

from cpu3d.bench.data.files import Files, ct_files
from cpu3d.bench.data.measuring import read_through
from cpu3d.bench.data.options import Options
from cpu3d.bench.data.results import WARM, Line, Outcome
from cpu3d.bench.data.worker import in_fresh_process
from cpu3d.bench.harness import last_json_line
from cpu3d.util.progress import bar
from memory_estimator.units import format_bytes

KINDS = {"plain": "MONAI Dataset, .nii.gz", "cache": "MONAI CacheDataset", "persistent": "MONAI PersistentDataset"}

MODES = {"mmap": "store, mmap", "ram": "store, ram"}


def measure(files: Files, options: Options) -> Outcome:
    scale = files.scale
    folders = files.cts()
    pairs = ct_files(folders["gz"], True)[: scale.peer_volumes]
    scratch = files.scratch("monai")
    request = {
        "pairs": [[str(path) for path in pair] for pair in pairs],
        "patch": scale.patch,
        "epochs": max(options.rounds, scale.peer_epochs),
        "cache_dir": str(scratch / "cache"),
        "store": str(folders["npy"]),
        "volumes": len(pairs),
    }
    read_through(path for pair in pairs for path in pair)
    lines: List[Line] = []
    peer_versions: Dict[str, str] = {}
    with bar("monai", total=len(KINDS) + len(MODES)) as advance:
        for kind, told in KINDS.items():
            result = _run_peer(options.monai, {**request, "kind": kind}, scratch)
            lines.append(_line(told, result))
            peer_versions = result["versions"]
            advance()
        for mode, told in MODES.items():
            lines.append(_line(told, in_fresh_process("peers", {**request, "mode": mode})))
            advance()
    notes = (", ".join(f"{name} {version}" for name, version in peer_versions.items()),)
    patch = "x".join(map(str, scale.patch))
    return Outcome(
        "monai", f"A random patch of {patch} of one of {len(pairs)} CTs, image and label", tuple(lines), (), notes
    )


def work(request: Dict[str, Any], _bucket: Any = None) -> Dict[str, Any]:
    """In the worker: the store's patches, one after another, epoch by epoch."""
    from cpu3d.bench.data.tensors import tensorflow, touched

    tensorflow()
    from cpu3d.data.source import open_store, patch_dataset
    from cpu3d.host.memory import peak_rss_bytes, resident

    begin = time.perf_counter()
    store = open_store(request["store"])
    count = request["volumes"] * 4
    more = {"extent": "full", "read_mode": request["mode"], "stop": count * (request["epochs"] + 1)}
    patches = iter(patch_dataset(store, tuple(request["patch"]), **more))

    def epoch() -> float:
        start = time.perf_counter()
        for _ in range(count):
            image, target = next(patches)
            touched(image), touched(target)
        return (time.perf_counter() - start) / count

    epoch()
    fill_s = time.perf_counter() - begin
    sample_s = [epoch() for _ in range(request["epochs"])]
    now = resident()
    return {
        "sample_s": sample_s,
        "fill_s": fill_s,
        "anonymous_bytes": now.anonymous_bytes if now else 0,
        "peak_bytes": peak_rss_bytes(),
    }


# --- Private helpers ---


def _run_peer(python: Any, request: Dict[str, Any], scratch: Path) -> Dict[str, Any]:
    """MONAI's answer. What its libraries want to keep goes to the scratch folder."""
    command = [str(python), "-B", str(Path(__file__).with_name("monai_peer.py")), json.dumps(request)]
    own = {name: str(scratch) for name in ("HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR", "TORCH_HOME")}
    return last_json_line(command, f"MONAI in {python}", cwd=scratch, environment={**os.environ, **own})


def _line(name: str, result: Dict[str, Any]) -> Line:
    memory = f"{format_bytes(result['anonymous_bytes'])} anonymous, peak {format_bytes(result['peak_bytes'])}"
    return Line(name, WARM, tuple(result["sample_s"]), note=f"first pass {result['fill_s']:.1f} s; {memory}")
