"""Measure how long loading takes: the store against nibabel and the sources' own ways, with warm and with cold pages.

    ./run.sh bench data --workdir bench-data --record records/data.jsonl --picture docs/pictures/data.png
    ./run.sh bench data --workdir bench-data --rows s4 s0

Rows: s4 (a case), s0 (a patch of a CT), many (48,884 entries). All files are made up and lie in the work folder, 3 GB;
a later run finds them there. Every way takes its turn in every round; a line is the median over the rounds. "Cold"
means that the files' pages were dropped from memory before.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import json
import os
import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

import numpy as np

from cpu3d.bench.harness import Output, ProcessFailedError, draw_bars, host_of, in_fresh_process, write_bytes
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
from cpu3d.util.records import read_records, versions
from memory_estimator.host import read_host
from memory_estimator.schema import add_options, from_args, option
from memory_estimator.table import PALETTE, Table, new_console, new_figure, png

HELP = "measure how long loading takes: the store against nibabel, with warm and with cold pages"

Row = Dict[str, Any]
"""What one row found: "title", "lines", "targets"; older records have "notes" too."""

Shape3 = Tuple[int, int, int]

MIB = 2**20

WARM, COLD = "warm", "cold"
"""Whether the files' pages were in memory before the work began, or had been dropped from it."""

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
"""Row -> what it is about, in the order of the page; records also have rows that are no longer measured."""


@dataclass(frozen=True)
class Scale:
    """Sizes and counts of one benchmark."""

    case: Shape3 = (240, 240, 155)
    """Voxels of a brain, four channels each: BraTS."""
    ct: Shape3 = (512, 512, 300)
    patch: Shape3 = (96, 96, 96)
    cts: int = 3
    patches: int = 8
    """Of a round, where one alone would be over before the clock has moved."""
    entries: int = 48_884
    """Of the large store: S4's 484 cases and the 101 that it made of each."""
    samples: int = 8000
    """Streamed from the large store."""


SMOKE = Scale(case=(32, 40, 28), ct=(40, 36, 30), patch=(16, 16, 16), cts=2, patches=2, entries=12, samples=12)


@dataclass(frozen=True)
class Options:
    """What `bench data` measures."""

    workdir: Path = option(help="folder for the files that are read; kept")
    rows: Tuple[str, ...] = option((), help="default: all", choices=("s4", "s0", "many"))
    rounds: int = option(5, help="how often each thing is done", at_least=1, metavar="N")
    smoke: bool = option(False, help="tiny files: a trial of the benchmark")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, Options, Output)


def run(args: argparse.Namespace) -> int:
    options, output = from_args(Options, args), from_args(Output, args)
    scale = SMOKE if options.smoke else Scale()
    folder = writable_folder(options.workdir, "--workdir").resolve()
    facts = {"host": read_host().summary(), "versions": versions(), "file_system": file_system(folder)}
    facts.update(scale=dataclasses.asdict(scale), rounds=options.rounds, case="phantom")
    found, failures = [], []
    for name in options.rows or ROWS:
        try:
            row = {"row": name, **ROWS[name](folder, scale, options.rounds), **facts}
        except ProcessFailedError as error:  # takes no other row along
            failures.append(f"row {name}: {error}")
            continue
        found.append(row)
        dataclasses.replace(output, picture=None).publish("data", row, [row_table(row, f"{name}: {row['title']}")])
    if found and not output.json:
        new_console().print(targets_table(found))
    if output.picture:
        write_bytes(output.picture, draw(newest(read_records(output.record, "data") if output.record else found)))
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


# --- Records as tables and a picture ---


def newest(records: Sequence[Row]) -> List[Row]:
    """The last record of each row, in the order of `NAMES`."""
    last = {record["row"]: record for record in records}
    return [last[row] for row in NAMES if row in last]


def row_table(row: Row, title: str) -> Table:
    """A line for each way."""
    cells = []
    for line in row["lines"]:
        median, least, most = (amount(line[name], line["unit"]) for name in ("median", "min", "max"))
        cells.append((line["name"], line["state"], median, f"{least} to {most}", line["note"]))
    return Table(("", "pages", "median", "", ""), cells, title, names=2)


def targets_table(rows: Sequence[Row]) -> Table:
    """What was asked for and what was found, a line a target."""
    lines = []
    for name, target in ((row["row"], target) for row in rows for target in row["targets"]):
        found, bound = (f"{value:.3g} {target['unit']}" for value in (target["value"], target["bound"]))
        rule = "at least" if target["rule"] == ">=" else "at most"
        missed = "" if target["met"] else " (**missed**)"
        lines.append((NAMES[name], target["name"], found + missed, f"{rule} {bound}"))
    return Table(("", "", "found", "asked for"), lines, names=2)


def page_lines(records: Sequence[Row]) -> List[str]:
    """The targets of the newest records and every line of every row as Markdown, losing ones too."""
    lines = [*targets_table(newest(records)).markdown(), ""]
    for record in newest(records):
        how = f"{record['date']}, {host_of(record)}, {record['file_system']}, median of "
        how += f"{record['rounds']} rounds in turn (least to most); case: {record['case']}."
        notes = [*record["notes"], ""] if record.get("notes") else []
        lines += [f"### {record['title']}", "", *row_table(record, how).markdown(), "", *notes]
    return lines


def draw(rows: Sequence[Row]) -> bytes:
    """The rows whose lines are seconds of loading, a panel each, as PNG; the store in blue."""
    rows = [row for row in rows if row["lines"][0]["unit"] == "s"]
    heights = [0.95 + 0.22 * len(row["lines"]) for row in rows]
    figure = new_figure(9.4, sum(heights) + 0.2)
    panels = figure.subplots(len(rows), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, row in zip(panels, rows):
        lines = row["lines"]
        draw_bars(
            axes, [line["median"] for line in lines], "",
            names=[f"{line['name']}, {line['state']}" for line in lines],
            texts=[amount(line["median"], line["unit"]) for line in lines],
            colours=[PALETTE[0] if "store" in line["name"] else "#8f9aa6" for line in lines], is_log=True,
        )  # fmt: skip
        axes.set_title(row["title"], fontsize=10, loc="left")
    figure.tight_layout(pad=0.6, h_pad=1.2)
    return png(figure)


def amount(value: float, unit: str) -> str:
    """For reading: seconds below one as ms, or as us below one of these."""
    if unit != "s":
        return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
    for size, name in ((1, "s"), (1e-3, "ms")):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value * 1e6:.0f} us"


# --- What is read: made once into the work folder, found again by the next run ---


def made(folder: Path, identity: Any, make: Callable[[], None]) -> Path:
    """`folder`, with what `make` writes into it where an earlier run has not made the same.

    Raises InputError where other files lie in it.
    """
    marker, identity = folder / "made.json", json.loads(json.dumps(identity))
    if folder.exists() and not marker.is_file():
        raise InputError(f"folder {folder} must be made by bench data, got other files or half of them; remove it")
    if not marker.is_file() or json.loads(marker.read_text(encoding="utf-8")) != identity:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with contextlib.redirect_stdout(io.StringIO()):  # what the project's own commands print
            make()
        write_json(marker, identity)
    return folder


def one_case(folder: Path, scale: Scale) -> Dict[str, str]:
    """A phantom as "float32.nii.gz", "float32.nii" and the same of int16, and the stores "npy", "float16", "b2nd"."""
    folder, images = folder / "case", ("float32.nii.gz", "float32.nii", "int16.nii.gz", "int16.nii")

    def make() -> None:
        write_phantom(folder / "dataset", cases=1, shape=scale.case, seed=0, workers=1)
        for name in ("npy", "float16", "b2nd"):
            _store(folder / "dataset", folder / name, name)
        store = open_store(folder / "npy")
        image = store.image(store.cases("train")[0].case_id)
        for name in images:
            _nifti(folder / name, image.astype(name.partition(".")[0]))

    made(folder, scale.case, make)
    return {name: str(folder / name) for name in ("npy", "float16", "b2nd", *images)}


def cts(folder: Path, scale: Scale) -> Dict[str, str]:
    """Of a few CTs the stores "npy" and "b2nd", and their images below "nii" and "gz", in the store's order.

    Air lies outside an ellipse, without noise, as scanners give it; inside, tissue under noise that no packer shortens.
    """
    folder = folder / "ct"

    def make() -> None:
        for inner in ("dataset/imagesTr", "dataset/labelsTr", "gz"):
            (folder / inner).mkdir(parents=True)
        x, y, _ = np.ix_(*(np.linspace(-1, 1, n, dtype=np.float32) for n in scale.ct))
        body, cases = (x / 0.8) ** 2 + (y / 0.6) ** 2 < 1, []
        for number in range(scale.cts):
            rng, name = np.random.default_rng([1, number]), f"CT_{number}.nii"
            tissue = 40 + 70 * np.sin(5 * x) + 12 * rng.standard_normal(scale.ct, dtype=np.float32)
            image = np.where(body, np.rint(tissue), -1024).astype(np.int16)
            _nifti(folder / "dataset" / "imagesTr" / name, image)
            _nifti(folder / "dataset" / "labelsTr" / name, (image > 100).astype(np.uint8))
            _nifti(folder / "gz" / f"{name}.gz", image)
            cases.append({"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"})
        content = {"name": "CT phantom", "modality": {"0": "CT"}, "labels": {"0": "background", "1": "dense"}}
        write_json(folder / "dataset" / "dataset.json", {**content, "training": cases, "test": []})
        for name in ("npy", "b2nd"):
            _store(folder / "dataset", folder / name, name)

    made(folder, [scale.ct, scale.cts], make)
    paths = {"npy": "npy", "b2nd": "b2nd", "nii": "dataset/imagesTr", "gz": "gz"}
    return {name: str(folder / path) for name, path in paths.items()}


def _store(dataset: Path, store: Path, format_: str) -> None:
    prepare(dataset, store, fractions=(1, 0, 0), settings=Settings(**FORMAT_CHOICES[format_]))


def _nifti(path: Path, array: np.ndarray) -> None:
    affine = tuple(tuple(float(i == j) for j in range(4)) for i in range(4))
    grid = Geometry(shape=tuple(array.shape[:3]), affine=affine, axes="RAS", sform_code=1, qform_code=1)
    write_volume(path, array, grid, compression=1)  # the gzip level of nibabel


# --- Timing ---


def line_of(name: str, state: str, values: Sequence[float], unit: str = "s", note: str = "") -> Dict[str, Any]:
    """One way to do a thing, and what it took in each round."""
    spread = {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}
    return {"name": name, "state": state, "unit": unit, **spread, "note": note, "values": list(values)}


def target_of(name: str, value: float, rule: str, bound: float, unit: str = "x") -> Dict[str, Any]:
    """What a figure should come to: `rule` is ">=" or "<="."""
    met = value >= bound if rule == ">=" else value <= bound
    return {"name": name, "value": value, "rule": rule, "bound": bound, "unit": unit, "met": met}


def beside_the_store(
    work: Callable[[Row], Row], request: Dict[str, Any], title: str, store: str, bounds: Mapping[str, Tuple[str, float]]
) -> Row:
    """A row of work in fresh processes, with warm and with cold pages.

    `bounds` are targets: name -> (a way, how many times as long as the store it takes at least). What is found is the
    median of the rounds' ratios with warm pages: both saw the same moments of the host.
    """
    found = [in_fresh_process(work, {**request, "state": state})["lines"] for state in (WARM, COLD)]
    values = {line["name"]: line["values"] for line in found[0]}
    ratios = {way: [a / b for a, b in zip(values[way], values[store])] for way, _ in bounds.values()}
    targets = [target_of(name, statistics.median(ratios[way]), ">=", least) for name, (way, least) in bounds.items()]
    return {"title": title, "lines": [*found[0], *found[1]], "targets": targets}


def time_in_turn(ways: Mapping[str, Any], request: Dict[str, Any]) -> Row:
    """A line for each way: (the files that position k reads, loads what is at k, positions a round).

    All of them, then all again, so that a slow moment hits no one alone. A round before the first is not counted: it
    opens libraries, traces graphs and fills the page cache.
    """
    found: Dict[str, List[float]] = {name: [] for name in ways}
    for number in (0, *range(request["rounds"])):
        for name, (files, load, count) in ways.items():
            total_s = 0.0
            for position in range(number * count, (number + 1) * count):
                set_pages(files(position), request["state"])
                begin = time.perf_counter()
                touch(load(position))
                total_s += time.perf_counter() - begin
            found[name].append(total_s / count)
    return {"lines": [line_of(name, request["state"], values[1:]) for name, values in found.items()]}


def touch(array: Any) -> float:
    """Read one value of every 4 KiB of an array or tensor, so that no part of it was only promised."""
    flat = np.asarray(array).ravel(order="K")  # a view of either order
    return float(flat[:: max(1, 4096 // flat.itemsize)].astype(np.float64).sum())


def set_pages(paths: Sequence[Path], state: str) -> None:
    """Bring files into the page cache, or drop exactly these from it where `state` is COLD.

    Those of a live map stay. Pages that are still to be written cannot be dropped, so they are written first.
    """
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            if state == COLD:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(1 << 22):
                    pass


# --- S4: one BraTS case, from the disk to a C-ordered float32 tensor of which every page was touched ---


def s4(folder: Path, scale: Scale, rounds: int) -> Row:
    """`.nii.gz` and `.nii` through nibabel against the store. What stays in Fortran order does less."""
    bounds = {
        ".nii.gz against the store": (".nii.gz float32", 12),
        ".nii against the store": (".nii float32", 5),
    }
    request = {"paths": one_case(folder, scale), "rounds": rounds}
    title = f"One case of {_by_x(scale.case)}x4 to a float32 tensor"
    return beside_the_store(load_case, request, title, "store, int16 .npy", bounds)


def load_case(request: Dict[str, Any]) -> Row:
    """Seconds of every way to load the case. The store's file is opened anew every time, as nibabel's are."""
    tf = set_up()[2]
    import nibabel

    ways: Dict[str, Any] = {}

    def by_nibabel(path: str, is_c_order: bool, _: int) -> Any:
        array = nibabel.load(path).get_fdata(caching="unchanged", dtype=np.float32)
        return tf.convert_to_tensor(np.ascontiguousarray(array)) if is_c_order else array

    def by_reader(folder: str) -> Callable[[int], Any]:
        record = open_store(folder).cases("train")[0]

        @tf.function(input_signature=[tf.TensorSpec((), tf.int64)])
        def load(number):  # TensorFlow takes the array without a copy
            read = lambda _: Reader(Path(folder)).array(record, "x").view(np.int16)  # noqa: E731
            tensor = tf.numpy_function(read, [number], tf.int16, stateful=False)
            return tf.cast(tf.bitcast(tensor, tf.float16) if record.image_dtype == "float16" else tensor, tf.float32)

        return lambda position: load(tf.constant(0, tf.int64))

    for name, path in request["paths"].items():
        dtype, _, ending = name.partition(".")
        if ending:
            for words, is_c_order in (("", True), (", left in Fortran order", False)):
                load = functools.partial(by_nibabel, path, is_c_order)
                ways[f".{ending} {dtype}{words}"] = (lambda _, path=path: [Path(path)], load, 1)
        else:
            kind = {"npy": "int16 .npy", "float16": "float16 .npy", "b2nd": "int16 .b2nd"}[name]
            ways[f"store, {kind}"] = (lambda _, path=path: _images(path)[:1], by_reader(path), 1)
    return time_in_turn(ways, request)


# --- S0: one 96^3 patch of a CT to float32 ---


def s0(folder: Path, scale: Scale, rounds: int) -> Row:
    """Loading all of it, S0's own way (a seek and a read for each row of voxels) and the store's."""
    bounds = {
        "all of the .nii.gz against the store's map": (".nii.gz, all of it", 100),
        "all of the .nii against the store's map": (".nii, all of it", 20),
        "S0's way against the store's map": (".nii, dataobj[roi] (S0)", 10),
    }
    request = {"folders": cts(folder, scale), "patch": scale.patch, "patches": scale.patches, "rounds": rounds}
    title = f"One patch of {_by_x(scale.patch)} from a CT of {_by_x(scale.ct)} to a float32 tensor"
    return beside_the_store(load_patch, request, title, "store, mmap", bounds)


def load_patch(request: Dict[str, Any]) -> Row:
    """Seconds a patch of every way. A store's reader serves all patches; cold it is a new one each time."""
    tf = set_up()[2]
    import nibabel

    folders, state, patches = request["folders"], request["state"], request["patches"]
    records = open_store(folders["npy"]).cases("train")
    sampling = PatchSampling(shape=tuple(request["patch"]), extent="full", seed=1)
    ways: Dict[str, Any] = {}

    def add(name: str, paths: Sequence[Path], load: Callable[[int, Any], Any], count: int = patches) -> None:
        def at(position: int) -> Tuple[int, Any]:
            drawn = patch_at(position, sampling, records)
            return drawn.index, drawn.region.slices(records[drawn.index].shape)

        ways[name] = (lambda position: [paths[at(position)[0]]], lambda position: load(*at(position)), count)

    def by_nibabel(paths: Sequence[Path], cut: Any, index: int, box: Any) -> Any:
        return tf.convert_to_tensor(np.ascontiguousarray(cut(nibabel.load(paths[index]), box), np.float32))

    def by_reader(folder: Path, mode: str, kept: Any, of_store: Any, index: int, box: Any) -> Any:
        return tf.cast((kept or Reader(folder, mode)).box(of_store[index], "x", box), tf.float32)

    for name, ending, cut, count in (  # one patch a round is enough where all of a file is read
        (".nii.gz, all of it", "gz", lambda image, box: np.array(image.dataobj)[box], 1),
        (".nii, all of it", "nii", lambda image, box: np.array(image.dataobj)[box], 1),
        (".nii.gz, dataobj[roi]", "gz", lambda image, box: image.dataobj[box], 1),
        (".nii, dataobj[roi] (S0)", "nii", lambda image, box: image.dataobj[box], patches),
        (".nii, mapped and sliced", "nii", lambda image, box: np.asanyarray(image.dataobj)[box], patches),
    ):
        paths = sorted(Path(folders[ending]).iterdir())
        add(name, paths, functools.partial(by_nibabel, paths, cut), count)
    for name, store, mode in (
        ("mmap", "npy", "mmap"), ("pread", "npy", "pread"), (".b2nd", "b2nd", "mmap"),
        *([("ram", "npy", "ram")] if state == WARM else []),  # what is in memory has no pages to drop
    ):  # fmt: skip
        folder, of_store = Path(folders[store]), open_store(folders[store]).cases("train")
        kept = None if state == COLD else Reader(folder, mode)
        add(f"store, {name}", _images(folder), functools.partial(by_reader, folder, mode, kept, of_store))
    return time_in_turn(ways, request)


# --- S4's size: 484 cases and 101 entries of each, 48,884 in all, over the arrays of a few ---


def many(folder: Path, scale: Scale, rounds: int) -> Row:
    """Open the store, by a process without TensorFlow, whose own libraries would hide what a store takes; stream."""
    base = folder / "many"

    def make() -> None:
        write_phantom(base / "dataset", cases=4, shape=(64, 64, 48), seed=2, workers=1)
        _store(base / "dataset", base / "npy", "npy")
        repeat_entries(base / "npy", scale.entries // 4)

    made(base, scale.entries, make)
    request = {"store": str(base / "npy"), "samples": scale.samples}
    opened = [in_fresh_process(open_many, request) for _ in range(rounds)]
    streamed = in_fresh_process(stream_many, request)
    peak, watched = "peak memory of the process that opens it", streamed["watched"]
    lines = [
        line_of("open the store", WARM, [one["open_s"] for one in opened]),
        line_of(peak, WARM, [one["peak_bytes"] / MIB for one in opened], "MiB"),
        line_of("anonymous memory while it streams", WARM, streamed["MiB"], "MiB", streamed["note"]),
    ]
    targets = [
        target_of("open the store", lines[0]["median"], "<=", 2, "s"),
        target_of(peak, lines[1]["median"], "<=", 300, "MiB"),
        target_of(f"growth of anonymous memory over {watched:,} volumes", streamed["growth"], "<=", 1, "%"),
    ]
    return {"title": f"A store of {opened[0]['entries']:,} entries", "lines": lines, "targets": targets}


def open_many(request: Dict[str, Any]) -> Row:
    """Seconds to open the store, and the process's peak."""
    begin = time.perf_counter()
    entries = len(open_store(request["store"]).cases("train"))
    return {"open_s": time.perf_counter() - begin, "peak_bytes": peak_rss_bytes(), "entries": entries}


def stream_many(request: Dict[str, Any]) -> Row:
    """Anonymous memory while volumes stream, once as many records stay parsed as ever do."""
    set_up()
    from cpu3d.data.source import volume_dataset

    seen = []
    for _ in volume_dataset(open_store(request["store"]), stop=request["samples"]):
        now = resident()
        seen.append(now.anonymous_bytes / MIB if now else 0.0)
    late = seen[min(KEPT, len(seen) // 2) :]
    slope = float(np.polyfit(np.arange(len(late)), late, 1)[0])
    growth = 100 * slope * len(late) / max(late) if max(late) else 0.0
    note = f"{slope * MIB:+.0f} bytes a volume, {max(late) - min(late):.1f} MiB between least and most"
    # A record need not hold every step.
    return {"watched": len(late), "growth": growth, "MiB": late[:: max(1, len(late) // 100)], "note": note}


def _images(store: str) -> List[Path]:
    """The image files of a store's cases, in its order."""
    return sorted(path for path in Path(store).rglob("*.x.*") if path.suffix in (".npy", ".b2nd"))


def _by_x(shape: Sequence[Any]) -> str:
    return "x".join(map(str, shape))


ROWS: Dict[str, Callable[[Path, Scale, int], Row]] = {"s4": s4, "s0": s0, "many": many}
"""In the order they are measured."""
