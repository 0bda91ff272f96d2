"""S0: one 96^3 patch of a CT to float32. Loading all of it, S0's own way and the store's, warm and cold.

S0 reads `nibabel.load(path).dataobj[roi]`, which seeks and reads once a row of voxels. "Mapped" is what nibabel gives
who asks for all of a plain file and slices it: the best that NIfTI can do, and seldom done. "All of it" is the file's
own integers, which is less than most users ask for; "as float32" is `get_fdata`.
"""

from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

from cpu3d.bench.data.files import Files, array_files, ct_files
from cpu3d.bench.data.measuring import drop_pages, in_turn, read_through, seconds
from cpu3d.bench.data.options import Options
from cpu3d.bench.data.patch_feeds import all_voxels
from cpu3d.bench.data.results import COLD, WARM, Line, Outcome, find, times_slower
from cpu3d.bench.data.worker import in_fresh_process

WHOLE_GZ, WHOLE_NII, S0_NII, STORE = ".nii.gz, all of it", ".nii, all of it", ".nii, dataobj[roi] (S0)", "store, mmap"

FLOAT_GZ, FLOAT_NII = ".nii.gz, all of it as float32", ".nii, all of it as float32"

SLOW = (WHOLE_GZ, WHOLE_NII, FLOAT_GZ, FLOAT_NII, ".nii.gz, dataobj[roi]")
"""Of these one patch a round is enough."""

VOLUMES = 3
"""CTs that patches are taken from in turn."""


def measure(files: Files, options: Options) -> Outcome:
    folders = {name: str(path) for name, path in files.cts().items()}
    lines: List[Line] = []
    for state in (WARM, COLD):
        request = {
            "folders": folders,
            "patch": files.scale.patch,
            "patches": files.scale.patches,
            "state": state,
            "rounds": options.rounds,
        }
        found = in_fresh_process("one_patch", request)
        for name, values in found["seconds"].items():
            kept = found["kept"].get(name, 0)
            note = f"{kept:.0%} of the pages could not be dropped" if kept > 0.01 else ""
            lines.append(Line(name, state, tuple(values), note=note))
    ours = find(lines, STORE, WARM)
    targets = (
        times_slower("all of the .nii.gz against the store's map", find(lines, WHOLE_GZ, WARM), ours, ">=", 100),
        times_slower("all of the .nii against the store's map", find(lines, WHOLE_NII, WARM), ours, ">=", 20),
        times_slower("S0's way against the store's map", find(lines, S0_NII, WARM), ours, ">=", 10),
    )
    patch, shape = ("x".join(map(str, sides)) for sides in (files.scale.patch, files.scale.ct))
    return Outcome("s0", f"One patch of {patch} from a CT of {shape} to a float32 tensor", tuple(lines), targets)


def work(request: Dict[str, Any], _bucket: Any = None) -> Dict[str, Any]:
    """In the worker: seconds a patch of every way, and the shares of pages that could not be dropped."""
    folders = {name: Path(path) for name, path in request["folders"].items()}
    places = _places(folders["npy"], tuple(request["patch"]))
    cold = request["state"] == COLD
    kept: Dict[str, float] = {}

    def variant(name: str, load: Callable[[int], Any], read: List[Path]) -> Callable[[int], float]:
        count = 1 if name in SLOW else request["patches"]

        def once(number: int) -> float:
            total = 0.0
            for position in range(number * count, (number + 1) * count):
                file = read[places(position)[0]]
                if cold:
                    kept[name] = max(kept.get(name, 0.0), drop_pages([file]))
                else:
                    read_through([file])
                total += seconds(lambda position=position: load(position))
            return total / count

        return once

    variants = {name: variant(name, *way) for name, way in _ways(folders, places, cold).items()}
    return {"seconds": in_turn(variants, request["rounds"]), "kept": kept}


# --- Private helpers ---


def _places(store_folder: Path, patch: Tuple[int, int, int]) -> Callable[[int], Tuple[int, Tuple[slice, ...]]]:
    """A function from a position to (which CT, where in it): those that a patch data set would take."""
    from cpu3d.data.patches import PatchSampling, patch_at
    from cpu3d.data.store import open_store

    records = list(open_store(store_folder).cases("train"))[:VOLUMES]
    sampling = PatchSampling(shape=patch, extent="full", seed=1)

    def place(position: int) -> Tuple[int, Tuple[slice, ...]]:
        drawn = patch_at(position, sampling, records)
        return drawn.index, drawn.region.slices(records[drawn.index].shape)

    return place


def _ways(folders: Dict[str, Path], places: Any, cold: bool) -> Dict[str, Tuple[Callable[[int], Any], List[Path]]]:
    """By name: a function that loads the patch at a position, and the files it reads, one a CT."""
    import nibabel
    import numpy as np

    from cpu3d.bench.data.tensors import tensorflow, touched
    from cpu3d.data.files.reader import Reader
    from cpu3d.data.store import open_store

    tf = tensorflow()
    plain, packed = ([image for image, _ in ct_files(folders[name], name == "gz")] for name in ("nii", "gz"))

    def by_nibabel(paths: List[Path], cut: Callable[[Any, Any], Any]) -> Tuple[Callable[[int], Any], List[Path]]:
        def load(position: int) -> float:
            index, slices = places(position)
            patch = cut(nibabel.load(paths[index]), slices)
            return touched(tf.convert_to_tensor(np.ascontiguousarray(patch, np.float32)))

        return load, paths

    def by_reader(store_folder: Path, mode: str) -> Tuple[Callable[[int], Any], List[Path]]:
        """One reader for all patches, as a data set has; cold it is a new one each time, as none has read before."""
        records = open_store(store_folder).cases("train")
        kept = Reader(store_folder, mode)

        def read(position: int) -> np.ndarray:
            index, slices = places(position)
            reader = Reader(store_folder, mode) if cold else kept
            return reader.box(records[index], "x", slices)

        images = [path for path in array_files(store_folder) if ".x." in path.name]
        return lambda position: touched(tf.cast(read(position), tf.float32)), images

    whole = lambda image, slices: all_voxels(image.dataobj)[slices]  # noqa: E731
    as_float = lambda image, slices: image.get_fdata(caching="unchanged", dtype=np.float32)[slices]  # noqa: E731
    mapped = lambda image, slices: np.asanyarray(image.dataobj)[slices]  # noqa: E731
    sliced = lambda image, slices: image.dataobj[slices]  # noqa: E731
    ways = {
        WHOLE_GZ: by_nibabel(packed, whole),
        WHOLE_NII: by_nibabel(plain, whole),
        FLOAT_GZ: by_nibabel(packed, as_float),
        FLOAT_NII: by_nibabel(plain, as_float),
        ".nii.gz, dataobj[roi]": by_nibabel(packed, sliced),
        S0_NII: by_nibabel(plain, sliced),
        ".nii, mapped and sliced": by_nibabel(plain, mapped),
        STORE: by_reader(folders["npy"], "mmap"),
        "store, pread": by_reader(folders["npy"], "pread"),
        "store, .b2nd": by_reader(folders["b2nd"], "mmap"),
    }
    if not cold:  # what is in memory has no pages to drop
        ways["store, ram"] = by_reader(folders["npy"], "ram")
    return ways
