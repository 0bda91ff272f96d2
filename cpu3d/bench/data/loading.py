"""Rows of `bench data` on loading alone: a case, a patch, augmentation, MONAI's data sets.

Each row is a function that measures it, above the functions that do its work in fresh processes.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from cpu3d.bench.data.files import Files, array_files, ct_files, files_of
from cpu3d.bench.data.timing import (
    COLD,
    WARM,
    Effort,
    Line,
    Outcome,
    answer,
    by_x,
    in_fresh_process,
    in_turn,
    kept_note,
    read_through,
    resident_now,
    seconds,
    set_pages,
    times_slower,
    touch,
)
from cpu3d.bench.harness import last_json_line
from cpu3d.data.augment import NO_AUGMENT, AugmentConfig, AugmentParams, sample_params
from cpu3d.data.files.reader import Reader
from cpu3d.data.region import centred
from cpu3d.data.sampling import PatchSampling, patch_at
from cpu3d.data.store import open_store
from cpu3d.host.apply import set_up
from cpu3d.host.memory import peak_rss_bytes
from memory_estimator.units import format_bytes

WITH_TURNS = AugmentConfig(rotation_deg=15.0, scaling=0.1)
"""Flips, intensity, rotation and zoom: what S1's images undergo, give or take the shifts."""

IN_A_ROW = 4
"""Cases of a data set that are timed, after a first that starts it."""

WHOLE_GZ, WHOLE_NII, S0_NII, STORE_MMAP = (
    ".nii.gz, all of it",
    ".nii, all of it",
    ".nii, dataobj[roi] (S0)",
    "store, mmap",
)

SLOW = (WHOLE_GZ, WHOLE_NII, f"{WHOLE_GZ} as float32", f"{WHOLE_NII} as float32", ".nii.gz, dataobj[roi]")
"""Of these one patch a round is enough."""

PEER_KINDS = {"plain": "MONAI Dataset, .nii.gz", "cache": "MONAI CacheDataset", "persistent": "MONAI PersistentDataset"}


# --- S4: one BraTS case, from the disk to a C-ordered float32 tensor of which every page was touched ---


def s4(files: Files, effort: Effort) -> Outcome:
    """`.nii.gz` and `.nii` through nibabel against the store. What stays in Fortran order does less."""
    lines: List[Line] = []
    for state in (WARM, COLD):
        lines += lines_of(in_fresh_process(load_case, paths=files.one_case(), state=state, rounds=effort.rounds), state)
    store = ("store, int16 .npy", WARM)
    targets = (
        times_slower(".nii.gz against the store", lines, (".nii.gz float32", WARM), store, ">=", 12),
        times_slower(".nii against the store", lines, (".nii float32", WARM), store, ">=", 5),
    )
    return Outcome("s4", f"One case of {by_x(files.scale.case)}x4 to a float32 tensor", lines, targets)


def load_case(paths: Dict[str, str], state: str, rounds: int) -> Dict[str, Any]:
    """Seconds of every way to load the case, and the shares of pages that could not be dropped."""
    tf = set_up()[2]
    import nibabel

    from cpu3d.data.source import stored_volumes, volume_dataset

    def by_nibabel(path: str, finish: Callable[[np.ndarray], Any]) -> Callable[[], float]:
        load = lambda: finish(nibabel.load(path).get_fdata(caching="unchanged", dtype=np.float32))  # noqa: E731
        return lambda: seconds(lambda: touch(load()))

    def by_reader(folder: str) -> Callable[[], float]:
        """The store's file opened anew every time, as nibabel's are; TensorFlow takes the array without a copy."""
        record = open_store(folder).cases("train")[0]

        @tf.function(input_signature=[tf.TensorSpec((), tf.int64)])
        def load(number):
            read = lambda _: Reader(Path(folder)).array(record, "x").view(np.int16)  # noqa: E731
            tensor = tf.numpy_function(read, [number], tf.int16, stateful=False)
            return tf.cast(tf.bitcast(tensor, tf.float16) if record.image_dtype == "float16" else tensor, tf.float32)

        return lambda: seconds(lambda: touch(load(tf.constant(0, tf.int64))))

    def by_stream(stream: Callable[[], Iterator[Any]]) -> Callable[[], float]:
        def after_the_first() -> float:
            images = stream()
            touch(next(images))
            return seconds(lambda: [touch(image) for image in images]) / IN_A_ROW

        return after_the_first

    ways: Dict[str, Tuple[str, Callable[[], float]]] = {}
    for name in ("float32.nii.gz", "float32.nii", "int16.nii.gz", "int16.nii"):
        dtype, _, ending = name.partition(".")
        to_tensor = by_nibabel(paths[name], lambda array: tf.convert_to_tensor(np.ascontiguousarray(array)))
        ways[f".{ending} {dtype}"] = (paths[name], to_tensor)
        ways[f".{ending} {dtype}, left in Fortran order"] = (paths[name], by_nibabel(paths[name], np.asarray))
    for name, kind in (("npy", "int16 .npy"), ("float16", "float16 .npy"), ("b2nd", "int16 .b2nd")):
        ways[f"store, {kind}"] = (paths[name], by_reader(paths[name]))
    if state == WARM:  # a stream of one case, read again and again, is cold but once
        stored = stored_volumes(open_store(paths["npy"]), split="train").repeat(IN_A_ROW + 1)
        finished = volume_dataset(open_store(paths["npy"]), extent="full", multiple=1, stop=IN_A_ROW + 1)
        for name, stream in (
            ("stored_volumes and a cast", lambda: (tf.cast(bits, tf.float32) for bits, _, _ in stored)),
            ("volume_dataset: normalised, with target", lambda: (image for image, _ in finished)),
        ):
            ways[f"store, {name}"] = (paths["npy"], by_stream(stream))
    kept = dict.fromkeys(ways, 0.0)

    def variant(name: str, path: str, load: Callable[[], float]) -> Callable[[int], float]:
        def once(_number: int) -> float:
            kept[name] = max(kept[name], set_pages(files_of(Path(path)), state))
            return load()

        return once

    return {"seconds": in_turn({name: variant(name, *way) for name, way in ways.items()}, rounds), "kept": kept}


# --- S0: one 96^3 patch of a CT to float32 ---


def s0(files: Files, effort: Effort) -> Outcome:
    """Loading all of it, S0's own way (a seek and a read for each row of voxels) and the store's."""
    scale = files.scale
    request = {"folders": files.cts(), "patch": scale.patch, "patches": scale.patches, "rounds": effort.rounds}
    lines: List[Line] = []
    for state in (WARM, COLD):
        lines += lines_of(in_fresh_process(load_patch, state=state, **request), state)
    targets = [
        times_slower(f"{name} against the store's map", lines, (slow, WARM), (STORE_MMAP, WARM), ">=", bound)
        for name, slow, bound in (
            ("all of the .nii.gz", WHOLE_GZ, 100),
            ("all of the .nii", WHOLE_NII, 20),
            ("S0's way", S0_NII, 10),
        )
    ]
    title = f"One patch of {by_x(scale.patch)} from a CT of {by_x(scale.ct)} to a float32 tensor"
    return Outcome("s0", title, lines, targets)


def load_patch(folders: Dict[str, str], patch: Sequence[int], patches: int, rounds: int, state: str) -> Dict[str, Any]:
    """Seconds a patch of every way, and the shares of pages that could not be dropped."""
    tf = set_up()[2]
    import nibabel

    records = list(open_store(folders["npy"]).cases("train"))[:3]
    sampling = PatchSampling(shape=tuple(patch), extent="full", seed=1)

    def place(position: int) -> Tuple[int, Tuple[slice, ...]]:
        """Which CT, and where in it."""
        drawn = patch_at(position, sampling, records)
        return drawn.index, drawn.region.slices(records[drawn.index].shape)

    def by_nibabel(name: str, cut: Callable[[Any, Any], Any]) -> Tuple[Callable[[int], Any], List[Path]]:
        paths = [image for image, _ in ct_files(Path(folders[name]), name == "gz")]

        def load(position: int) -> float:
            index, slices = place(position)
            array = cut(nibabel.load(paths[index]), slices)
            return touch(tf.convert_to_tensor(np.ascontiguousarray(array, np.float32)))

        return load, paths

    def by_reader(name: str, mode: str) -> Tuple[Callable[[int], Any], List[Path]]:
        """One reader for all patches, as a data set has; cold it is a new one each time, as none has read before."""
        folder = Path(folders[name])
        of_store, kept_reader = open_store(folder).cases("train"), Reader(folder, mode)

        def load(position: int) -> float:
            index, slices = place(position)
            reader = Reader(folder, mode) if state == COLD else kept_reader
            return touch(tf.cast(reader.box(of_store[index], "x", slices), tf.float32))

        return load, [path for path in array_files(folder) if ".x." in path.name]

    whole = lambda image, slices: all_voxels(image.dataobj)[slices]  # noqa: E731
    as_float = lambda image, slices: image.get_fdata(caching="unchanged", dtype=np.float32)[slices]  # noqa: E731
    mapped = lambda image, slices: np.asanyarray(image.dataobj)[slices]  # noqa: E731
    sliced = lambda image, slices: image.dataobj[slices]  # noqa: E731
    ways = {
        WHOLE_GZ: by_nibabel("gz", whole),
        WHOLE_NII: by_nibabel("nii", whole),
        f"{WHOLE_GZ} as float32": by_nibabel("gz", as_float),
        f"{WHOLE_NII} as float32": by_nibabel("nii", as_float),
        ".nii.gz, dataobj[roi]": by_nibabel("gz", sliced),
        S0_NII: by_nibabel("nii", sliced),
        ".nii, mapped and sliced": by_nibabel("nii", mapped),
        STORE_MMAP: by_reader("npy", "mmap"),
        "store, pread": by_reader("npy", "pread"),
        "store, .b2nd": by_reader("b2nd", "mmap"),
    }
    if state == WARM:  # what is in memory has no pages to drop
        ways["store, ram"] = by_reader("npy", "ram")
    kept = dict.fromkeys(ways, 0.0)

    def variant(name: str, load: Callable[[int], Any], read: List[Path]) -> Callable[[int], float]:
        count = 1 if name in SLOW else patches

        def once(number: int) -> float:
            total = 0.0
            for position in range(number * count, (number + 1) * count):
                kept[name] = max(kept[name], set_pages([read[place(position)[0]]], state))
                total += seconds(lambda position=position: load(position))
            return total / count

        return once

    return {"seconds": in_turn({name: variant(name, *way) for name, way in ways.items()}, rounds), "kept": kept}


# --- What augmentation costs: NumPy and SciPy in the loader against the graph ---


def augment(files: Files, effort: Effort) -> Outcome:
    """From stored integers and label codes to the normalised image and the target, of a whole brain and of a patch."""
    request = {"store": files.one_case()["npy"], "patch": files.scale.patch, "rounds": effort.rounds}
    found = in_fresh_process(augment_case, **request)
    title = f"Augmentation of a brain of {found['brain']}x4 and of a patch"
    return Outcome("augment", title, lines_of(found, WARM))


def augment_case(store: str, patch: Sequence[int], rounds: int) -> Dict[str, Any]:
    """Seconds of every way. The graph's are those of this host's processors; on a GPU it runs there."""
    tf = set_up()[2]
    from cpu3d.data.finish import Finish

    opened = open_store(store)
    record, codes = opened.cases("train")[0], codes_of(opened)
    middle = centred(record.box, tuple(min(n, want) for n, want in zip(record.shape, patch)), record.shape)
    variants: Dict[str, Callable[[int], float]] = {}
    for what, region in (("brain", record.box), ("patch", middle)):
        part = region.slices(record.shape)
        image, label = (np.ascontiguousarray(one(record.case_id)[part]) for one in (opened.image, opened.label))
        for name, config in (
            ("none", NO_AUGMENT),
            ("flips, intensity", AugmentConfig()),
            ("and turns, zoom", WITH_TURNS),
        ):

            def by_numpy(number: int, image=image, label=label, config=config) -> float:
                params = sample_params(config, seed=1, position=number, channels=record.channels)

                def load() -> Any:
                    if config == NO_AUGMENT:
                        return normalised(image, record), target_table(codes)[label]
                    planes = params.planes(record.spacing_mm) if config.resamples else None
                    new_image, new_label = augmented(normalised(image, record), label, params, planes)
                    return new_image, target_table(codes)[new_label]

                return seconds(load)

            graph = tf.function(Finish(codes=codes, resamples=config.resamples).__call__)

            def by_graph(number: int, image=image, label=label, config=config, graph=graph) -> float:
                params = sample_params(config, seed=1, position=number, channels=record.channels)
                raw = raw_sample(image, label, record, params)
                to_tensors = lambda: {key: tf.convert_to_tensor(one) for key, one in raw.items()}  # noqa: E731
                return seconds(lambda: [touch(one) for one in graph(to_tensors())])

            variants[f"{what}, {name}: NumPy, SciPy"] = by_numpy
            variants[f"{what}, {name}: graph"] = by_graph
    return {"seconds": in_turn(variants, rounds), "brain": by_x(record.box.size)}


def augmented(
    image: np.ndarray, label: np.ndarray, params: AugmentParams, planes: Optional[np.ndarray]
) -> Tuple[np.ndarray, np.ndarray]:
    """Image (X, Y, Z, C) float32 and label (X, Y, Z) after what was drawn, as a loader without a graph does it.

    Rotation and zoom by `planes`, if given: one interpolation through the volume a channel, where the graph takes two
    through planes. The results differ by the rounding of these, the work is the usual one. Voxels that are 0 stay 0.
    """
    from scipy.ndimage import affine_transform

    image = np.where(image == 0, np.float32(0), image * np.float32(params.gain) + np.float32(params.offset))
    if planes is not None:
        xy, yz = np.eye(3), np.eye(3)
        xy[:2, :2], yz[1:, 1:] = planes.reshape(2, 2, 2)
        matrix, centre = xy @ yz, (np.array(label.shape) - 1) / 2
        more = {"matrix": matrix, "offset": centre - matrix @ centre}
        image = np.stack([affine_transform(one, order=1, **more) for one in np.moveaxis(image, 3, 0)], 3)
        label = affine_transform(label, order=0, **more)
    axes = tuple(axis for axis, mirrored in enumerate(params.flips) if mirrored)
    return np.ascontiguousarray(np.flip(image, axes)), np.ascontiguousarray(np.flip(label, axes))


# --- MONAI's data sets beside the store's patches, on the same CTs ---


def monai(files: Files, effort: Effort) -> Outcome:
    """Seconds a sample (image and label patch) and memory. MONAI runs in a Python of its own, with its own folders."""
    scale, folders, scratch = files.scale, files.cts(), files.scratch("monai")
    pairs = ct_files(folders["gz"], True)[: scale.peer_volumes]
    request = {"patch": scale.patch, "epochs": max(effort.rounds, scale.peer_epochs)}
    words = [[str(path) for path in pair] for pair in pairs]
    environment = {
        **os.environ,
        **dict.fromkeys(("HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR", "TORCH_HOME"), str(scratch)),
    }
    peer = [str(effort.monai), "-B", str(Path(__file__).with_name("monai_peer.py"))]
    read_through(path for pair in pairs for path in pair)
    found: Dict[str, Dict[str, Any]] = {}
    for kind, name in PEER_KINDS.items():
        content = json.dumps({**request, "pairs": words, "cache_dir": str(scratch / "cache"), "kind": kind})
        found[name] = last_json_line([*peer, content], f"MONAI in {peer[0]}", cwd=scratch, environment=environment)
    peer_versions = ", ".join(f"{name} {version}" for name, version in found[name]["versions"].items())
    for mode in ("mmap", "ram"):
        more = {"store": folders["npy"], "mode": mode, "samples": 4 * len(pairs)}
        found[f"store, {mode}"] = in_fresh_process(stream_patches, **more, **request)
    lines = []
    for name, one in found.items():
        memory = f"{format_bytes(one['anonymous_bytes'])} anonymous, peak {format_bytes(one['peak_bytes'])}"
        note = f"first pass {one['fill_s']:.1f} s; {memory}"
        lines.append(Line(name, WARM, tuple(one["sample_s"]), note=note))
    title = f"A random patch of {by_x(scale.patch)} of one of {len(pairs)} CTs, image and label"
    return Outcome("monai", title, lines, notes=(peer_versions,))


def stream_patches(store: str, mode: str, patch: Sequence[int], samples: int, epochs: int) -> Dict[str, Any]:
    """The store's patches, one after another, epoch by epoch."""
    set_up()
    from cpu3d.data.source import patch_dataset

    begin = time.perf_counter()
    more = {"extent": "full", "read_mode": mode, "stop": samples * (epochs + 1)}
    patches = iter(patch_dataset(open_store(store), tuple(patch), **more))

    def epoch_s() -> float:
        return seconds(lambda: [touch(part) for _ in range(samples) for part in next(patches)]) / samples

    epoch_s()
    fill_s = time.perf_counter() - begin
    found = {"sample_s": [epoch_s() for _ in range(epochs)], "fill_s": fill_s}
    return {**found, "anonymous_bytes": resident_now("anonymous_bytes"), "peak_bytes": peak_rss_bytes()}


# --- What rows have in common ---


def all_voxels(proxy: Any) -> np.ndarray:
    """All of a NIfTI file in its own dtype: the quickest way to read it whole. `get_fdata` makes floats of them.

    Of a plain file nibabel gives a map, which is no reading yet.
    """
    voxels = np.asanyarray(proxy)
    return np.array(voxels, order="K") if isinstance(voxels, np.memmap) else voxels


def codes_of(store: Any) -> Tuple[Tuple[int, ...], ...]:
    return tuple(tuple(members) for members in store.manifest.regions.values())


def target_table(codes: Sequence[Sequence[int]]) -> np.ndarray:
    """From a label code to the target's channels."""
    table = np.zeros((256, len(codes)), np.uint8)
    for column, members in enumerate(codes):
        table[list(members), column] = 1
    return table


def normalisation(record: Any) -> Tuple[np.ndarray, np.ndarray]:
    scale = 1 / np.array(record.channel_std)
    return scale, -np.array(record.channel_mean) * scale


def normalised(image: np.ndarray, record: Any) -> np.ndarray:
    scale, shift = map(np.float32, normalisation(record))
    return np.where(image == 0, np.float32(0), image * scale + shift)


def raw_sample(image: np.ndarray, label: np.ndarray, record: Any, params: AugmentParams) -> Dict[str, np.ndarray]:
    """A sample as `Finish` takes it."""
    scale, shift = normalisation(record)
    return {
        "bits": np.ascontiguousarray(image),
        "label": np.ascontiguousarray(label),
        "is_half": np.bool_(False),
        "scale": np.float32(scale * params.gain),
        "shift": np.float32(shift * params.gain + params.offset),
        "flips": np.array(params.flips),
        "planes": params.planes(record.spacing_mm),
    }


# --- Private helpers ---


def lines_of(found: Dict[str, Any], state: str) -> List[Line]:
    kept = found.get("kept", {})
    return [
        Line(name, state, tuple(values), note=kept_note(kept.get(name, 0))) for name, values in found["seconds"].items()
    ]


if __name__ == "__main__":
    answer((load_case, load_patch, augment_case, stream_patches), sys.argv[1:])
