"""Measure how long loading takes: the store against nibabel and the sources' own ways, with warm and with cold pages.

    ./run.sh bench data --workdir bench-data --record records/data.jsonl
    ./run.sh bench data --workdir bench-data --rows s4 s0

Rows: s4 (a case), s0 (a patch of a CT). All files are made up and lie in the work folder, 2 GB; a later run finds them
there. A line is the median of the rounds. "Cold" means that the files' pages were dropped from memory before.
"""

import contextlib
import functools
import io
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

import nibabel
import numpy as np

from cpu3d.bench.harness import Output, Result, host_of, in_fresh_process
from cpu3d.data.files.reader import Reader, file_system
from cpu3d.data.sampling import PatchSampling, patch_at
from cpu3d.data.store import open_store
from cpu3d.data.stores.conversion import FORMAT_CHOICES, Settings
from cpu3d.data.stores.phantom import write_phantom
from cpu3d.data.stores.prepare import prepare
from cpu3d.errors import InputError
from cpu3d.host.apply import set_up
from cpu3d.util.atomic import writable_folder, write_json
from cpu3d.util.records import by, versions
from memory_estimator.host import read_host
from memory_estimator.schema import option
from memory_estimator.table import Table

WARM, COLD = "warm", "cold"
"""Whether the files' pages were in memory before the work began, or had been dropped from it."""

NAMES = {
    "s4": "a case", "s0": "a patch", "spleen": "training on patches", "ladder": "S1's ladder",
    "volumes": "training on whole volumes", "many": "a large store", "augment": "augmentation", "monai": "MONAI",
}  # fmt: skip
"""Row -> what it is about, in the order of the page; older records have rows that are not measured any more."""

Ways = Dict[str, Tuple[Path, Callable[[int], Any], int]]
"""Name of a way to load -> the file that it reads, loads what is at a position, positions of a round."""

CASE, CT, PATCH, PATCHES = (240, 240, 155), (512, 512, 300), (96, 96, 96), 8
"""Voxels of a brain of four channels (BraTS), of a CT and of a patch of it; patches of a round, where one alone would
be over before the clock has moved."""


@dataclass(frozen=True)
class Options:
    """What `bench data` measures."""

    workdir: Path = option(help="folder for the files that are read; kept")
    rows: Tuple[str, ...] = option(("s4", "s0"), "what is loaded", choices=("s4", "s0"))
    rounds: int = option(5, help="how often each thing is done", at_least=1, metavar="N")


OPTIONS = (Options, Output)


def run(options: Options, output: Output) -> int:
    folder = writable_folder(options.workdir, "--workdir").resolve()
    about = {"host": read_host().summary(), "versions": versions(), "file_system": file_system(folder)}
    for name in options.rows:
        found = beside_nibabel(name, folder, options.rounds)
        row = {"row": name, **found, **about, "rounds": options.rounds, "case": "phantom"}
        output.publish("data", row, row_table(row, f"{name}: {row['title']}"))
    return 0


# --- Records as tables ---


def row_table(row: Result, title: str) -> Table:
    """A line for each way."""
    cells = []
    for line in row["lines"]:
        median, least, most = (amount(line[name], line["unit"]) for name in ("median", "min", "max"))
        cells.append((line["name"], line["state"], median, f"{least} to {most}", line["note"]))
    return Table(("", "pages", "median", "", ""), cells, title, names=2)


def page_lines(records: Sequence[Result]) -> List[str]:
    """The newest record of each row as Markdown; before them what was demanded of older records, and found."""
    last, targets, lines = {record["row"]: record for record in records}, [], []
    for record in (last[name] for name in NAMES if name in last):
        for target in record.get("targets", ()):
            found, bound = (f"{value:.3g} {target['unit']}" for value in (target["value"], target["bound"]))
            rule, missed = "at least" if target["rule"] == ">=" else "at most", "" if target["met"] else " (**missed**)"
            targets.append((NAMES[record["row"]], target["name"], found + missed, f"{rule} {bound}"))
        how = f"{record['date']}, {host_of(record)}, {record['file_system']}, median of "
        how += f"{record['rounds']} rounds in turn (least to most); case: {record['case']}."
        notes = [*record["notes"], ""] if record.get("notes") else []
        lines += [f"### {record['title']}", "", *row_table(record, how).markdown(), "", *notes]
    demanded = Table(("", "", "found", "asked for"), targets, names=2).markdown() if targets else []
    return [*demanded, "", *lines]


def amount(value: float, unit: str) -> str:
    """For reading: seconds below one as ms, or as us below one of these."""
    if unit != "s":
        return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


# --- What is read: made once into the work folder, found again by the next run ---


def made(folder: Path, row: str, shape: Tuple[int, int, int]) -> Path:
    """`folder` with one case: a store of it in each format, image.nii and image.nii.gz.

    Raises InputError where it is half made, or holds other files.
    """
    marker, dataset = folder / "made.json", folder / "dataset"
    if folder.exists() and not marker.is_file():
        raise InputError(f"folder {folder} must be made by bench data, got other files or half of them; remove it")
    if not folder.exists():
        folder.mkdir()
        with contextlib.redirect_stdout(io.StringIO()):  # what the project's own commands print
            if row == "s4":
                write_phantom(dataset, cases=1, shape=shape, seed=0, workers=1)
            else:
                write_ct(dataset, shape)
            for name, settings in FORMAT_CHOICES.items():
                prepare(dataset, folder / name, fractions=(1, 0, 0), settings=Settings(**settings))
        store = open_store(folder / "npy")
        image = store.image(store.cases("train")[0].case_id).astype("float32" if row == "s4" else "int16")
        for ending in ("nii", "nii.gz"):
            nibabel.save(nibabel.Nifti1Image(image, np.eye(4)), folder / f"image.{ending}")
        write_json(marker, {})
    return folder


def write_ct(dataset: Path, shape: Tuple[int, int, int]) -> None:
    """A CT in the Decathlon layout: air without noise outside an ellipse, else what no packer shortens."""
    x, y, _ = np.ix_(*(np.linspace(-1, 1, n, dtype=np.float32) for n in shape))
    tissue = 40 + 70 * np.sin(5 * x) + 12 * np.random.default_rng(1).standard_normal(shape, dtype=np.float32)
    image = np.where((x / 0.8) ** 2 + (y / 0.6) ** 2 < 1, np.rint(tissue), -1024).astype(np.int16)
    for inner, voxels in (("imagesTr", image), ("labelsTr", (image > 100).astype(np.uint8))):
        (dataset / inner).mkdir(parents=True)
        nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), dataset / inner / "CT.nii")
    content = {"name": "CT phantom", "modality": {"0": "CT"}, "labels": {"0": "background", "1": "dense"}}
    cases = [{"image": "./imagesTr/CT.nii", "label": "./labelsTr/CT.nii"}]
    write_json(dataset / "dataset.json", {**content, "training": cases, "test": []})


# --- Ways to load, in turn ---


def beside_nibabel(row: str, workdir: Path, rounds: int) -> Result:
    """Title and lines of a case ("s4"), or of a patch of a CT ("s0"), from the disk to a C-ordered float32 tensor."""
    shape, request = CASE if row == "s4" else CT, {"rounds": rounds, "patch": None, "patches": 1}
    title = f"One case of {by(shape)}x4"
    if row == "s0":
        title = f"One patch of {by(PATCH)} from a CT of {by(shape)}"
        request.update(patch=PATCH, patches=PATCHES)
    request["folder"] = str(made(workdir / f"{row}-{by(shape)}", row, shape))
    found = [in_fresh_process(load, {**request, "state": state})["lines"] for state in (WARM, COLD)]
    return {"title": f"{title} to a float32 tensor", "lines": [line for lines in found for line in lines]}


def load(request: Result) -> Result:
    """Seconds of every way to load the case in "folder", or a "patch" of it, "patches" of them a round."""
    tf = set_up()[2]
    folder, is_cold, patch = Path(request["folder"]), request["state"] == COLD, request["patch"]
    records = {name: open_store(folder / name).cases("train")[0] for name in FORMAT_CHOICES}
    sampling = PatchSampling(shape=tuple(patch), extent="full", seed=1) if patch else None

    def box_of(position: int) -> Tuple[slice, ...]:
        record = records["npy"]
        return patch_at(position, sampling, [record]).region.slices(record.shape) if sampling else (slice(None),) * 3

    def by_nibabel(path: Path, is_whole: bool, position: int) -> Any:
        voxels, box = nibabel.load(path).dataobj, box_of(position)
        array = np.array(voxels)[box] if is_whole else voxels[box]
        return tf.convert_to_tensor(np.ascontiguousarray(array, np.float32))

    def by_store(name: str, mode: str) -> Callable[[int], Any]:
        record, kept = records[name], Reader(folder / name, mode)

        def read(position: int) -> np.ndarray:
            reader = Reader(folder / name, mode) if is_cold else kept  # opened each time, as nibabel's files are
            array = reader.box(record, "x", box_of(int(position))) if patch else reader.array(record, "x")
            return array.view(np.int16)

        @tf.function(input_signature=[tf.TensorSpec((), tf.int64)])
        def load(position):  # TensorFlow takes the array without a copy
            tensor = tf.numpy_function(read, [position], tf.int16, stateful=False)
            return tf.cast(tf.bitcast(tensor, tf.float16) if record.image_dtype == "float16" else tensor, tf.float32)

        return lambda position: load(tf.constant(position, tf.int64))

    ways: Ways = {}
    for ending in ("nii.gz", "nii"):  # one patch a round is enough where all of a file is read
        path = folder / f"image.{ending}"
        ways[f".{ending}, all of it"] = (path, functools.partial(by_nibabel, path, True), 1)
    if patch:
        ways[".nii, dataobj[roi] (S0)"] = (path, functools.partial(by_nibabel, path, False), request["patches"])
    for way, name, mode in (
        ("store, mmap", "npy", "mmap"), ("store, float16", "float16", "mmap"), ("store, .b2nd", "b2nd", "mmap"),
        *([] if is_cold else [("store, ram", "npy", "ram")]),  # which has no pages to drop
    ):  # fmt: skip
        path = next(path for path in (folder / name).rglob("*.x.*") if path.suffix in (".npy", ".b2nd"))
        ways[way] = (path, by_store(name, mode), request["patches"])
    return time_in_turn(ways, request)


def time_in_turn(ways: Ways, request: Result) -> Result:
    """A line for each way, in turn; a first round is not counted: it opens libraries and traces graphs."""
    found: Dict[str, List[float]] = {name: [] for name in ways}
    for number in (0, *range(request["rounds"])):
        for name, (path, load, count) in ways.items():
            total_s = 0.0
            for position in range(number * count, (number + 1) * count):
                set_pages(path, request["state"])
                begin = time.perf_counter()
                flat = np.asarray(load(position)).ravel(order="K")  # a view of either order
                flat[:: max(1, 4096 // flat.itemsize)].sum()  # every page of it, so that no part was only promised
                total_s += time.perf_counter() - begin
            found[name].append(total_s / count)
    lines = []
    for name, values in ((name, each[1:]) for name, each in found.items()):
        spread = {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}
        lines.append({"name": name, "state": request["state"], "unit": "s", **spread, "note": "", "values": values})
    return {"lines": lines}


def set_pages(path: Path, state: str) -> None:
    """Bring a file into the page cache, or drop exactly this one, but for a live map, where `state` is COLD."""
    with open(path, "rb", buffering=0) as file:
        if state == COLD:
            os.fdatasync(file.fileno())  # what is still to be written cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while state == WARM and file.read(1 << 22):
            pass
