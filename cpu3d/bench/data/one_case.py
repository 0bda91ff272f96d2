"""S4: one BraTS case, from the disk to float32 in memory. `.nii.gz` and `.nii` through nibabel against the store.

Every way ends at the same thing: a C-ordered float32 tensor of which every page was touched. The lines that stop at
nibabel's own Fortran-ordered array, which nothing but NumPy can use, are told too: they do less.
"""

from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

from cpu3d.bench.data.files import Files, files_of
from cpu3d.bench.data.measuring import drop_pages, in_turn, read_through, seconds, touch
from cpu3d.bench.data.options import Options
from cpu3d.bench.data.results import COLD, WARM, Line, Outcome, find, times_slower
from cpu3d.bench.data.worker import in_fresh_process

STORE = "store, int16 .npy"

IN_A_ROW = 4
"""Cases of a data set that are timed, after a first that starts it."""


def measure(files: Files, options: Options) -> Outcome:
    paths = files.one_case()
    lines: List[Line] = []
    for state in (WARM, COLD):
        request = {"paths": {name: str(path) for name, path in paths.items()}, "state": state, "rounds": options.rounds}
        found = in_fresh_process("one_case", request)
        for name, values in found["seconds"].items():
            kept = found["kept"].get(name, 0)
            note = f"{kept:.0%} of the pages could not be dropped" if kept > 0.01 else ""
            lines.append(Line(name, state, tuple(values), note=note))
    ours = find(lines, STORE, WARM)
    targets = (
        times_slower(".nii.gz against the store", find(lines, ".nii.gz float32", WARM), ours, ">=", 12),
        times_slower(".nii against the store", find(lines, ".nii float32", WARM), ours, ">=", 5),
    )
    shape = "x".join(map(str, files.scale.case))
    return Outcome("s4", f"One case of {shape}x4 to a float32 tensor", tuple(lines), targets)


def work(request: Dict[str, Any], _bucket: Any = None) -> Dict[str, Any]:
    """In the worker: seconds of every way, and the shares of pages that could not be dropped."""
    kept: Dict[str, float] = {}

    def variant(name: str, path: Path, load: Callable[[], float]) -> Callable[[int], float]:
        def once(_number: int) -> float:
            if request["state"] == COLD:
                kept[name] = max(kept.get(name, 0.0), drop_pages(files_of(path)))
            else:
                read_through(files_of(path))
            return load()

        return once

    paths = {name: Path(path) for name, path in request["paths"].items()}
    ways = _ways(paths)
    if request["state"] == WARM:  # a stream of one case, read again and again, is cold but once
        ways.update(_streams(paths["npy"]))
    variants = {name: variant(name, *way) for name, way in ways.items()}
    return {"seconds": in_turn(variants, request["rounds"]), "kept": kept}


# --- Private helpers ---

_Way = Tuple[Path, Callable[[], float]]
"""What is read, and a function that loads it and says how many seconds a case takes."""


def _ways(paths: Dict[str, Path]) -> Dict[str, _Way]:
    from cpu3d.bench.data.tensors import tensorflow

    tf = tensorflow()
    ways: Dict[str, _Way] = {}
    for name in ("float32.nii.gz", "float32.nii", "int16.nii.gz", "int16.nii"):
        dtype, _, ending = name.partition(".")
        ways[f".{ending} {dtype}"] = (paths[name], _nibabel(tf, paths[name]))
        ways[f".{ending} {dtype}, left in Fortran order"] = (paths[name], _nibabel_bare(paths[name]))
    for name, told in (("npy", STORE), ("float16", "store, float16 .npy"), ("b2nd", "store, int16 .b2nd")):
        ways[told] = (paths[name], _reader(tf, paths[name]))
    return ways


def _streams(store_folder: Path) -> Dict[str, _Way]:
    import tensorflow as tf

    from cpu3d.bench.data.tensors import touched
    from cpu3d.data.source import open_store, stored_volumes, volume_dataset

    stored = stored_volumes(open_store(store_folder), split="train").repeat(IN_A_ROW + 1)
    finished = volume_dataset(open_store(store_folder), extent="full", multiple=1, stop=IN_A_ROW + 1)
    streams = {
        "store, stored_volumes and a cast": lambda: (touched(tf.cast(bits, tf.float32)) for bits, _, _ in stored),
        "store, volume_dataset: normalised, with target": lambda: (touched(image) for image, _ in finished),
    }

    def after_the_first(start: Callable[[], Iterator[Any]]) -> float:
        stream = start()
        next(stream)
        return seconds(lambda: list(stream)) / IN_A_ROW

    return {name: (store_folder, partial(after_the_first, start)) for name, start in streams.items()}


def _nibabel(tf: Any, path: Path) -> Callable[[], float]:
    import nibabel
    import numpy as np

    from cpu3d.bench.data.tensors import touched

    def load():
        array = nibabel.load(path).get_fdata(caching="unchanged", dtype=np.float32)
        return touched(tf.convert_to_tensor(np.ascontiguousarray(array)))

    return partial(seconds, load)


def _nibabel_bare(path: Path) -> Callable[[], float]:
    import nibabel
    import numpy as np

    return lambda: seconds(lambda: touch(nibabel.load(path).get_fdata(caching="unchanged", dtype=np.float32)))


def _reader(tf: Any, store_folder: Path) -> Callable[[], float]:
    """The store's file opened anew every time, as nibabel's are."""
    from cpu3d.bench.data.tensors import to_float32, touched
    from cpu3d.data.files.reader import Reader
    from cpu3d.data.store import open_store

    record = open_store(store_folder).cases("train")[0]
    load = to_float32(tf, lambda _: Reader(store_folder).array(record, "x"), half=record.image_dtype == "float16")
    return lambda: seconds(lambda: touched(load(0)))
