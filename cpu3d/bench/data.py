"""Measure how long loading takes: the store against nibabel and the sources' own ways, with warm and with cold pages.

    ./run.sh bench data --workdir bench-data --record records/data.jsonl
    ./run.sh bench data --workdir bench-data --rows s4 s0

Rows: s4 (a case), s0 (a patch of a CT), many (48,884 entries). All files are made up and lie in the work folder, 2 GB;
a later run finds them there. Every way takes its turn in every round; a line is the median over the rounds. "Cold"
means that the files' pages were dropped from memory before.
"""

import contextlib
import dataclasses
import functools
import io
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

import numpy as np

from cpu3d.bench.harness import Output, Result, host_of, in_fresh_process
from cpu3d.data.files.reader import Reader, file_system
from cpu3d.data.nifti import write_volume
from cpu3d.data.records import Geometry
from cpu3d.data.sampling import PatchSampling, patch_at
from cpu3d.data.store import KEPT, open_store
from cpu3d.data.stores.conversion import FORMAT_CHOICES, Settings
from cpu3d.data.stores.phantom import write_phantom
from cpu3d.data.stores.prepare import prepare
from cpu3d.data.stores.upkeep import repeat_entries
from cpu3d.errors import InputError
from cpu3d.host.apply import set_up
from cpu3d.host.memory import peak_rss_bytes, resident
from cpu3d.util.atomic import writable_folder, write_json
from cpu3d.util.records import by, versions
from memory_estimator.host import read_host
from memory_estimator.schema import option
from memory_estimator.table import Table

HELP = "measure how long loading takes: the store against nibabel, with warm and with cold pages"

MIB = 2**20

WARM, COLD = "warm", "cold"
"""Whether the files' pages were in memory before the work began, or had been dropped from it."""

STORE = "store, mmap"
"""The way that the others are measured against."""

NAMES = {
    "s4": "a case",
    "s0": "a patch",
    "spleen": "training on patches",
    "ladder": "S1's ladder",
    "volumes": "training on whole volumes",
    "many": "a large store",
    "augment": "augmentation",
    "monai": "MONAI",
}
"""Row -> what it is about, in the order of the page; older records have rows that are not measured any more."""

Shape3 = Tuple[int, int, int]

Ways = Mapping[str, Tuple[Path, Callable[[int], Any], int]]
"""Name of a way to load -> the file that it reads, loads what is at a position, positions of a round."""


@dataclass(frozen=True)
class Scale:
    """Sizes and counts of one benchmark."""

    case: Shape3 = (240, 240, 155)
    """Voxels of a brain, four channels each: BraTS."""
    ct: Shape3 = (512, 512, 300)
    patch: Shape3 = (96, 96, 96)
    patches: int = 8
    """Of a round, where one alone would be over before the clock has moved."""
    entries: int = 48_884
    """Of the large store: S4's 484 cases and the 101 that it made of each."""
    samples: int = 8000
    """Streamed from the large store."""


SMOKE = Scale(case=(32, 40, 28), ct=(40, 36, 30), patch=(16, 16, 16), patches=2, entries=12, samples=12)


@dataclass(frozen=True)
class Options:
    """What `bench data` measures."""

    workdir: Path = option(help="folder for the files that are read; kept")
    rows: Tuple[str, ...] = option((), help="default: all", choices=("s4", "s0", "many"))
    rounds: int = option(5, help="how often each thing is done", at_least=1, metavar="N")
    smoke: bool = option(False, help="tiny files: a trial of the benchmark")


OPTIONS = (Options, Output)


def run(options: Options, output: Output) -> int:
    scale, folder = SMOKE if options.smoke else Scale(), writable_folder(options.workdir, "--workdir").resolve()
    about = {"host": read_host().summary(), "versions": versions(), "file_system": file_system(folder)}
    about.update(scale=dataclasses.asdict(scale), rounds=options.rounds, case="phantom")
    for name in options.rows or ROWS:
        row = {"row": name, **ROWS[name](folder, scale, options.rounds), **about}
        output.publish("data", row, row_table(row, f"{name}: {row['title']}"), targets_table([row]))
    return 0


# --- Records as tables ---


def row_table(row: Result, title: str) -> Table:
    """A line for each way."""
    cells = []
    for line in row["lines"]:
        median, least, most = (amount(line[name], line["unit"]) for name in ("median", "min", "max"))
        cells.append((line["name"], line["state"], median, f"{least} to {most}", line["note"]))
    return Table(("", "pages", "median", "", ""), cells, title, names=2)


def targets_table(rows: Sequence[Result]) -> Table:
    """What was demanded and what was found, a line a target."""
    lines = []
    for name, target in ((row["row"], target) for row in rows for target in row["targets"]):
        found, bound = (f"{value:.3g} {target['unit']}" for value in (target["value"], target["bound"]))
        rule = "at least" if target["rule"] == ">=" else "at most"
        missed = "" if target["met"] else " (**missed**)"
        lines.append((NAMES[name], target["name"], found + missed, f"{rule} {bound}"))
    return Table(("", "", "found", "asked for"), lines, names=2)


def page_lines(records: Sequence[Result]) -> List[str]:
    """The targets of the newest record of each row, and all its lines, as Markdown; losing ones too."""
    last = {record["row"]: record for record in records}
    records = [last[name] for name in NAMES if name in last]
    lines = [*targets_table(records).markdown(), ""]
    for record in records:
        how = f"{record['date']}, {host_of(record)}, {record['file_system']}, median of "
        how += f"{record['rounds']} rounds in turn (least to most); case: {record['case']}."
        notes = [*record["notes"], ""] if record.get("notes") else []
        lines += [f"### {record['title']}", "", *row_table(record, how).markdown(), "", *notes]
    return lines


def amount(value: float, unit: str) -> str:
    """For reading: seconds below one as ms, or as us below one of these."""
    if unit != "s":
        return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


# --- What is read: made once into the work folder, found again by the next run ---


def made(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, with what `make` writes into it. Raises InputError where it is half made, or holds other files."""
    marker = folder / "made.json"
    if folder.exists() and not marker.is_file():
        raise InputError(f"folder {folder} must be made by bench data, got other files or half of them; remove it")
    if not folder.exists():
        folder.mkdir()
        with contextlib.redirect_stdout(io.StringIO()):  # what the project's own commands print
            make(folder)
        write_json(marker, {})
    return folder


def write_ct(dataset: Path, shape: Shape3) -> None:
    """A CT in the Decathlon layout: air without noise outside an ellipse, else what no packer shortens."""
    x, y, _ = np.ix_(*(np.linspace(-1, 1, n, dtype=np.float32) for n in shape))
    tissue = 40 + 70 * np.sin(5 * x) + 12 * np.random.default_rng(1).standard_normal(shape, dtype=np.float32)
    image = np.where((x / 0.8) ** 2 + (y / 0.6) ** 2 < 1, np.rint(tissue), -1024).astype(np.int16)
    for inner, voxels in (("imagesTr", image), ("labelsTr", (image > 100).astype(np.uint8))):
        (dataset / inner).mkdir(parents=True)
        write_nifti(dataset / inner / "CT.nii", voxels)
    content = {"name": "CT phantom", "modality": {"0": "CT"}, "labels": {"0": "background", "1": "dense"}}
    cases = [{"image": "./imagesTr/CT.nii", "label": "./labelsTr/CT.nii"}]
    write_json(dataset / "dataset.json", {**content, "training": cases, "test": []})


def convert(folder: Path, dtype: str) -> None:
    """Of the one case in folder/dataset: a store in each format, image.nii and image.nii.gz."""
    for name, settings in FORMAT_CHOICES.items():
        prepare(folder / "dataset", folder / name, fractions=(1, 0, 0), settings=Settings(**settings))
    store = open_store(folder / "npy")
    for ending in ("nii", "nii.gz"):
        write_nifti(folder / f"image.{ending}", store.image(store.cases("train")[0].case_id).astype(dtype))


def write_nifti(path: Path, array: np.ndarray) -> None:
    affine = tuple(tuple(float(i == j) for j in range(4)) for i in range(4))
    grid = Geometry(shape=tuple(array.shape[:3]), affine=affine, axes="RAS", sform_code=1, qform_code=1)
    write_volume(path, array, grid, compression=1)  # the gzip level of nibabel


# --- Timing ---


def line_of(name: str, state: str, values: Sequence[float], unit: str = "s", note: str = "") -> Result:
    """One way to do a thing, and what it took in each round."""
    spread = {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}
    return {"name": name, "state": state, "unit": unit, **spread, "note": note, "values": list(values)}


def target_of(name: str, value: float, rule: str, bound: float, unit: str = "x") -> Result:
    """What a figure should come to: `rule` is ">=" or "<="."""
    met = value >= bound if rule == ">=" else value <= bound
    return {"name": name, "value": value, "rule": rule, "bound": bound, "unit": unit, "met": met}


def time_in_turn(ways: Ways, request: Result) -> Result:
    """A line for each way: all of them, then all again, so that a slow moment hits no one alone.

    A round before the first is not counted: it opens libraries, traces graphs and fills the page cache.
    """
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
    return {"lines": [line_of(name, request["state"], values[1:]) for name, values in found.items()]}


def set_pages(path: Path, state: str) -> None:
    """Bring a file into the page cache, or drop exactly this one from it where `state` is COLD.

    Pages of a live map stay. What is still to be written cannot be dropped, so it is written first.
    """
    with open(path, "rb", buffering=0) as file:
        if state == COLD:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            while file.read(1 << 22):
                pass


def s4(folder: Path, scale: Scale, rounds: int) -> Result:
    """One BraTS case, from the disk to a C-ordered float32 tensor of which every page was touched."""

    def make(folder: Path) -> None:
        write_phantom(folder / "dataset", cases=1, shape=scale.case, seed=0, workers=1)
        convert(folder, "float32")

    request = {"folder": str(made(folder / f"case-{by(scale.case)}", make)), "rounds": rounds, "patch": None}
    bounds = {".nii.gz, all of it": 12, ".nii, all of it": 5}
    return beside_the_store(request, f"One case of {by(scale.case)}x4 to a float32 tensor", bounds)


def s0(folder: Path, scale: Scale, rounds: int) -> Result:
    """One patch of a CT: all of the file, S0's own way (a seek and a read for each row of voxels) and the store's."""

    def make(folder: Path) -> None:
        write_ct(folder / "dataset", scale.ct)
        convert(folder, "int16")

    request = {"folder": str(made(folder / f"ct-{by(scale.ct)}", make)), "rounds": rounds}
    title = f"One patch of {by(scale.patch)} from a CT of {by(scale.ct)} to a float32 tensor"
    bounds = {".nii.gz, all of it": 100, ".nii, all of it": 20, ".nii, dataobj[roi] (S0)": 10}
    return beside_the_store({**request, "patch": scale.patch, "patches": scale.patches}, title, bounds)


def beside_the_store(request: Result, title: str, bounds: Mapping[str, float]) -> Result:
    """A row of `load` in fresh processes, with warm and with cold pages.

    `bounds` say how many times as long as the store a way has to take, which is a target. What is found is the median
    of the rounds' ratios with warm pages: both saw the same moments of the host.
    """
    lines = [line for state in (WARM, COLD) for line in in_fresh_process(load, {**request, "state": state})["lines"]]
    values = {line["name"]: line["values"] for line in lines if line["state"] == WARM}
    targets = []
    for way, bound in bounds.items():
        ratio = statistics.median(other / own for other, own in zip(values[way], values[STORE]))
        targets.append(target_of(f"{way} against the store", ratio, ">=", bound))
    return {"title": title, "lines": lines, "targets": targets}


def load(request: Result) -> Result:
    """Seconds of every way to load a case, or a patch of it: "folder", "patch" or None, "patches" of a round.

    A store's reader serves all positions; cold it is a new one each time, as nibabel's files are opened each time.
    """
    tf = set_up()[2]
    import nibabel

    folder, is_cold, ways = Path(request["folder"]), request["state"] == COLD, {}
    patch, many = request["patch"], request.get("patches", 1)
    records = {name: open_store(folder / name).cases("train")[0] for name in FORMAT_CHOICES}
    sampling = PatchSampling(shape=tuple(patch), extent="full", seed=1) if patch else None

    def box_of(position: int) -> Tuple[slice, ...]:
        if sampling is None:
            return (slice(None),) * 3
        return patch_at(position, sampling, [records["npy"]]).region.slices(records["npy"].shape)

    def by_nibabel(path: Path, is_whole: bool, position: int) -> Any:
        voxels, box = nibabel.load(path).dataobj, box_of(position)
        array = np.array(voxels)[box] if is_whole else voxels[box]
        return tf.convert_to_tensor(np.ascontiguousarray(array, np.float32))

    def by_store(name: str, mode: str) -> Callable[[int], Any]:
        record, kept = records[name], Reader(folder / name, mode)

        def read(position: int) -> np.ndarray:
            reader = Reader(folder / name, mode) if is_cold else kept
            array = reader.box(record, "x", box_of(int(position))) if patch else reader.array(record, "x")
            return array.view(np.int16)

        @tf.function(input_signature=[tf.TensorSpec((), tf.int64)])
        def load(position):  # TensorFlow takes the array without a copy
            tensor = tf.numpy_function(read, [position], tf.int16, stateful=False)
            return tf.cast(tf.bitcast(tensor, tf.float16) if record.image_dtype == "float16" else tensor, tf.float32)

        return lambda position: load(tf.constant(position, tf.int64))

    for ending in ("nii.gz", "nii"):  # one patch a round is enough where all of a file is read
        path = folder / f"image.{ending}"
        ways[f".{ending}, all of it"] = (path, functools.partial(by_nibabel, path, True), 1)
    if patch:
        ways[".nii, dataobj[roi] (S0)"] = (path, functools.partial(by_nibabel, path, False), many)
    for way, name, mode in ((STORE, "npy", "mmap"), ("store, float16", "float16", "mmap"),
                            ("store, .b2nd", "b2nd", "mmap"), ("store, ram", "npy", "ram")):  # fmt: skip
        if not (is_cold and mode == "ram"):  # which has no pages to drop
            path = next(path for path in (folder / name).rglob("*.x.*") if path.suffix in (".npy", ".b2nd"))
            ways[way] = (path, by_store(name, mode), many)
    return time_in_turn(ways, request)


# --- S4's size: 484 cases and 101 entries of each, 48,884 in all, over the arrays of a few ---


def many(folder: Path, scale: Scale, rounds: int) -> Result:
    """Open the store, by a process without TensorFlow, whose own libraries would hide what a store takes; stream."""

    def make(base: Path) -> None:
        write_phantom(base / "dataset", cases=4, shape=(64, 64, 48), seed=2, workers=1)
        prepare(base / "dataset", base / "npy", fractions=(1, 0, 0), settings=Settings(**FORMAT_CHOICES["npy"]))
        repeat_entries(base / "npy", scale.entries // 4)

    request = {"store": str(made(folder / f"many-{scale.entries}", make) / "npy"), "samples": scale.samples}
    opened = [in_fresh_process(open_many, request) for _ in range(rounds)]
    streamed, growth = in_fresh_process(stream_many, request), "growth of anonymous memory"
    lines = [
        line_of("open the store", WARM, [one["open_s"] for one in opened]),
        line_of("peak memory of the process that opens it", WARM, [one["peak_mib"] for one in opened], "MiB"),
        line_of("anonymous memory while it streams", WARM, streamed["MiB"], "MiB"),
    ]
    limits = ((2, "s"), (300, "MiB"))
    targets = [target_of(one["name"], one["median"], "<=", *limit) for one, limit in zip(lines, limits)]
    targets.append(target_of(f"{growth} over {streamed['watched']:,} volumes", streamed["growth"], "<=", 1, "%"))
    return {"title": f"A store of {opened[0]['entries']:,} entries", "lines": lines, "targets": targets}


def open_many(request: Result) -> Result:
    """Seconds to open the store, and the process's peak."""
    begin = time.perf_counter()
    entries = len(open_store(request["store"]).cases("train"))
    return {"open_s": time.perf_counter() - begin, "peak_mib": peak_rss_bytes() / MIB, "entries": entries}


def stream_many(request: Result) -> Result:
    """Anonymous memory while volumes stream, once as many records stay parsed as ever do, and its growth in per cent."""
    set_up()
    from cpu3d.data.source import volume_dataset

    seen = []
    for _ in volume_dataset(open_store(request["store"]), stop=request["samples"]):
        now = resident()
        seen.append(now.anonymous_bytes / MIB if now else 0.0)
    late = seen[min(KEPT, len(seen) // 2) :]
    growth = 100 * float(np.polyfit(np.arange(len(late)), late, 1)[0]) * len(late) / max(*late, 1.0)
    # A record need not hold every step.
    return {"watched": len(late), "growth": growth, "MiB": late[:: max(1, len(late) // 100)]}


ROWS: Dict[str, Callable[[Path, Scale, int], Result]] = {"s4": s4, "s0": s0, "many": many}
"""In the order they are measured."""
