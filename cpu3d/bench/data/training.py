"""Rows of `bench data` on training: patches fed in eight ways, S1's ladder, whole volumes, a store of many entries.

Each row is a function that measures it, above the functions that do its work in fresh processes.
"""

import collections
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import numpy as np

from cpu3d.bench.data.files import Files, array_files, ct_files, ladder_array
from cpu3d.bench.data.loading import (
    STORE_MMAP,
    WITH_TURNS,
    all_voxels,
    augmented,
    codes_of,
    normalisation,
    normalised,
    raw_sample,
    target_table,
)
from cpu3d.bench.data.timing import (
    COLD,
    WARM,
    Effort,
    Line,
    Outcome,
    Target,
    answer,
    by_x,
    drop_pages,
    in_fresh_process,
    kept_note,
    read_through,
    resident_bytes,
    resident_now,
    seconds,
    set_pages,
    slow_disk,
    times_slower,
)
from cpu3d.data.augment import AugmentConfig, sample_params
from cpu3d.data.files.arrays import decode_b2nd
from cpu3d.data.region import case_region, crop, grid_size
from cpu3d.data.sampling import PatchSampling, patch_at, sample_at
from cpu3d.data.store import KEPT, open_store
from cpu3d.host.apply import set_up
from cpu3d.host.memory import peak_rss_bytes
from cpu3d.util.progress import bar
from memory_estimator.host import read_host
from memory_estimator.units import format_bytes

MIB = 2**20

GZ, NII, S0, MMAP, PREAD, RAM, HELD, NOTHING = FEEDS = (
    "no cache, .nii.gz", "no cache, .nii", "S0, dataobj[roi] of .nii", STORE_MMAP, "store, pread", "store, ram",
    "all held in memory", "no loading",
)  # fmt: skip

OF_DISK = (GZ, NII, S0, MMAP, PREAD)
"""Feeds that read files while they train, so that dropped pages matter to them."""

FLOAT, PACKED, HALF, GRAPH, OURS, OURS_NPY = RUNGS = (
    "float32 .npy", "+ blosc2", "+ 16 bit", "+ augmentation in the graph", "+ zero-copy and look-ahead (the store)",
    "the same with .npy instead of .b2nd",
)  # fmt: skip

RUNG_IMAGE = {FLOAT: "float32.npy", PACKED: "float32.b2nd", HALF: "int16.b2nd", GRAPH: "int16.b2nd"}

AHEAD = 3
"""Samples that the thread of a loader without tf.data has under way."""


class Waiting:
    """An iterator that counts the seconds its user waits for it."""

    def __init__(self, parts: Iterator[Any]):
        self._parts = parts
        self.waited_s = 0.0

    def __iter__(self) -> "Waiting":
        return self

    def __next__(self) -> Any:
        begin = time.perf_counter()
        try:
            return next(self._parts)
        finally:
            self.waited_s += time.perf_counter() - begin


# --- S0 end to end: a training run on random patches of 32 CTs, fed in eight ways ---


def spleen(files: Files, effort: Effort) -> Outcome:
    """The same small network and patches from every feed; `HELD` is the fastest that loading can be, `NOTHING` none."""
    scale = files.scale
    sizes = {name: getattr(scale, name) for name in ("patch", "batch", "filters", "depth", "warm_up", "train_steps")}
    # Cold is the first pass over the data; one is enough to see what it costs.
    runs = [(WARM, feed) for _ in range(effort.rounds) for feed in FEEDS] + [(COLD, feed) for feed in OF_DISK]
    found: Dict[Any, List[Dict[str, Any]]] = {}
    with bar("spleen", total=len(runs)) as advance:
        for state, feed in runs:
            result = in_fresh_process(train_on_patches, folders=files.cts(), feed=feed, state=state, **sizes)
            found.setdefault((feed, state), []).append(result)
            advance()
    lines = []
    for (feed, state), results in found.items():
        middle = sorted(results, key=lambda one: one["step_s"])[(len(results) - 1) // 2]
        memory = f"{format_bytes(middle['anonymous_bytes'])} anonymous, {format_bytes(middle['file_bytes'])} of files"
        note = ", ".join(filter(None, (f"waits {middle['wait_share']:.0%}; {memory}", kept_note(middle["kept"]))))
        lines.append(Line(feed, state, tuple(one["step_s"] for one in results), note=note))
    ours = (MMAP, WARM)
    targets = (
        times_slower("no cache, .nii.gz, against the store's map", lines, (GZ, WARM), ours, ">=", 3.2),
        times_slower("the store's map against all held in memory", lines, ours, (HELD, WARM), "<=", 1.05),
    )
    patches = f"{scale.batch} patches of {by_x(scale.patch)} from {scale.cts} CTs"
    return Outcome("spleen", f"A training step on {patches}, {scale.filters} filters", lines, targets)


def train_on_patches(
    folders: Dict[str, str],
    feed: str,
    state: str,
    patch: Sequence[int],
    batch: int,
    filters: int,
    depth: int,
    warm_up: int,
    train_steps: int,
) -> Dict[str, Any]:
    """One run of one feed: seconds a step, and the share of them spent waiting for data."""
    set_up()
    is_nifti = feed in (GZ, NII, S0)
    pairs = ct_files(Path(folders["gz" if feed == GZ else "nii"]), feed == GZ) if is_nifti else []
    read = [path for pair in pairs for path in pair] if is_nifti else array_files(Path(folders["npy"]))
    kept = set_pages([] if feed == NOTHING else read, state)
    model = learner(patch, channels=1, outputs=1, filters=filters, depth=depth, batch=batch)
    parts = Waiting(patch_batches(feed, folders, tuple(patch), batch, warm_up + train_steps, read_host().best_dtype))
    for _ in range(warm_up):
        model.step(parts, 1e-4)
    parts.waited_s = 0.0
    total_s = seconds(lambda: [model.step(parts, 1e-4) for _ in range(train_steps)])
    waited = {"step_s": total_s / train_steps, "wait_share": parts.waited_s / total_s, "kept": kept}
    return {**waited, "anonymous_bytes": resident_now("anonymous_bytes"), "file_bytes": resident_now("file_bytes")}


def patch_batches(
    feed: str, folders: Dict[str, Any], patch: Tuple[int, int, int], batch: int, count: int, dtype: str
) -> Iterator[Any]:
    """`count` batches of a feed: image (B, X, Y, Z, 1) normalised by its CT's mean and spread, target (B, X, Y, Z, 1).

    The same numbers from every feed but `NOTHING`, which gives one batch again and again.
    """
    import nibabel
    import tensorflow as tf

    from cpu3d.data.source import patch_dataset

    store = open_store(folders["npy"])
    if feed in (MMAP, PREAD, RAM):
        more = {"extent": "full", "stop": count * batch, "batch": batch, "dtype": dtype}
        return iter(patch_dataset(store, patch, read_mode=feed.rpartition(" ")[2], **more))
    if feed == NOTHING:
        image = tf.cast(tf.random.stateless_normal((batch, *patch, 1), (0, 1)), dtype)
        return iter([(image, tf.cast(image > 1, tf.uint8))] * count)
    records = list(store.cases("train"))
    sampling = PatchSampling(shape=patch, extent="full", seed=0)
    if feed == HELD:
        held = [(np.array(store.image(one.case_id)[..., 0]), np.array(store.label(one.case_id))) for one in records]
    else:
        pairs = ct_files(Path(folders["gz" if feed == GZ else "nii"]), feed == GZ)

    def draw(position):
        drawn = patch_at(int(position), sampling, records)
        record = records[drawn.index]
        slices = drawn.region.slices(record.shape)
        if feed == HELD:
            parts = [array[slices] for array in held[drawn.index]]
        else:
            proxies = [nibabel.load(path).dataobj for path in pairs[drawn.index]]
            parts = [proxy[slices] if feed == S0 else all_voxels(proxy)[slices] for proxy in proxies]
        return (*map(np.ascontiguousarray, parts), *map(np.float32, normalisation(record)))

    def load(position):
        outputs = tf.numpy_function(draw, [position], (tf.int16, tf.uint8, tf.float32, tf.float32), stateful=False)
        shapes = (patch, patch, (1,), (1,))
        bits, label, scale, shift = (tf.ensure_shape(one, shape) for one, shape in zip(outputs, shapes))
        value = tf.cast(bits, tf.float32)[..., None]
        return tf.cast(tf.where(tf.equal(value, 0), 0.0, value * scale + shift), dtype), label[..., None]

    # As the guides to tf.data have it: `map` in parallel, batch, prefetch, all sizes left to TensorFlow.
    dataset = tf.data.Dataset.range(count * batch).map(load, num_parallel_calls=tf.data.AUTOTUNE)
    return iter(dataset.batch(batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE))


# --- S1's ladder: what each counter-measure against slow loading gains, on a fast disk and on a slow one ---


def ladder(files: Files, effort: Effort) -> Outcome:
    """Whole BraTS cases are read, of which the network sees the 96^3 voxels around the brain's middle.

    On all of a case a host without a GPU computes so long that any loading hides behind it; on this much it is about as
    busy as S1's GPU was. Pages are dropped before every epoch, as S1 did.
    """
    scale = files.scale
    request = {"paths": files.brains(), "grid": scale.grid_of_ladder, "epochs": scale.ladder_epochs}
    request.update(filters=scale.filters, depth=scale.depth)
    lines: List[Line] = []
    with slow_disk(files.folder, effort.cap_mb_s * 1_000_000) as group:
        states = {f"{COLD}, disk as it is": ""}
        if group:
            states[f"{COLD}, disk at {effort.cap_mb_s} MB/s"] = group
        for state, cgroup in states.items():
            found: Dict[str, List[Dict[str, Any]]] = {rung: [] for rung in RUNGS}
            with bar(f"ladder, {state}", total=effort.rounds * len(found)) as advance:
                for _ in range(effort.rounds):
                    for rung, results in found.items():
                        results.append(in_fresh_process(climb, cgroup, rung=rung, **request))
                        advance()
            for rung, results in found.items():
                waits = f"waits {statistics.median(one['wait_share'] for one in results):.0%}"
                note = ", ".join(filter(None, (waits, kept_note(max(one["kept"] for one in results)))))
                lines.append(Line(rung, state, tuple(statistics.median(r["sample_s"]) for r in results), note=note))
    gains = [times_slower(f"from first to last, {s}", lines, (FLOAT, s), (OURS, s), ">=", 3.6) for s in states]
    notes = [f"{gains[0].name}: {gains[0].value:.2f} x (S1, on a GPU: 2.41, at 1000 MB/s 3.56)"]
    if not group:
        notes.append("no slow disk: no cgroup may be made here that holds a disk to a speed")
    title = f"A training step on {by_x(scale.grid_of_ladder)} of a whole case that is read, loaded as on S1's ladder"
    return Outcome("ladder", title, lines, gains[1:], notes)


def climb(
    rung: str, paths: Dict[str, str], grid: Sequence[int], epochs: int, filters: int, depth: int
) -> Dict[str, Any]:
    """Seconds a sample of a rung in each epoch but the first, and what could not be dropped."""
    set_up()
    store = open_store(paths["npy"])
    case_ids, channels = store.manifest.split["train"], len(store.manifest.channels)
    outputs = len(store.manifest.regions)
    model = learner(grid, channels=channels, outputs=outputs, filters=filters, depth=depth, batch=1)
    if rung in (OURS, OURS_NPY):
        read = array_files(Path(paths["b2nd" if rung == OURS else "npy"]))
    else:
        names = (RUNG_IMAGE[rung], "label.npy")
        read = [ladder_array(Path(paths["ladder"]), case_id, name) for case_id in case_ids for name in names]
    # One stream over all epochs, as a run has: at the end of each, the first samples of the next are under way.
    count = (epochs + 1) * len(case_ids)
    parts = Waiting(ladder_batches(rung, paths, tuple(grid), count, read_host().best_dtype))
    epochs_s, waits, kept = [], [], 0.0
    for _ in range(epochs + 1):
        kept, parts.waited_s = max(kept, drop_pages(read)), 0.0
        epochs_s.append(seconds(lambda: [model.step(parts, 1e-4) for _ in case_ids]))
        waits.append(parts.waited_s / epochs_s[-1])
    sample_s = [epoch_s / len(case_ids) for epoch_s in epochs_s[1:]]
    return {"sample_s": sample_s, "wait_share": statistics.fmean(waits[1:]), "kept": kept}


def ladder_batches(
    rung: str, paths: Dict[str, Any], grid: Tuple[int, int, int], count: int, dtype: str
) -> Iterator[Any]:
    """`count` batches of one of a rung, (image, target): the same samples, each rung's way better than the last."""
    import tensorflow as tf

    from cpu3d.data.finish import Finish
    from cpu3d.data.source import patch_dataset

    store = open_store(paths["b2nd" if rung == OURS else "npy"])
    if rung in (OURS, OURS_NPY):
        more = {"sampling": "centre", "augment": WITH_TURNS, "stop": count, "dtype": dtype}
        return iter(patch_dataset(store, grid, **more))
    records, codes = list(store.cases("train")), codes_of(store)

    def read(case_id: str, name: str) -> np.ndarray:
        path = ladder_array(Path(paths["ladder"]), case_id, name)
        return decode_b2nd(path.read_bytes()) if path.suffix == ".b2nd" else np.load(path, allow_pickle=False)

    def load(position: int) -> Any:
        record = records[sample_at(position, cases=len(records), seed=0).index]
        region = case_region(record, grid, "brain")
        image, label = (crop(read(record.case_id, name), region) for name in (RUNG_IMAGE[rung], "label.npy"))
        params = sample_params(WITH_TURNS, seed=0, position=position, channels=record.channels)
        if rung == GRAPH:
            return raw_sample(image, label, record, params)
        if rung == HALF:
            image = normalised(image, record)
        image, label = augmented(image, label, params, params.planes(record.spacing_mm))
        return image, target_table(codes)[label]

    finish = Finish(codes=codes, dtype=dtype, resamples=True)
    graph = tf.function(lambda raw: tuple(part[None] for part in finish(raw)), reduce_retracing=True)

    def to_tensors(loaded: Any) -> Any:
        if rung == GRAPH:
            return graph({name: tf.convert_to_tensor(part) for name, part in loaded.items()})
        return tf.cast(tf.convert_to_tensor(loaded[0][None]), dtype), tf.convert_to_tensor(loaded[1][None])

    return map(to_tensors, in_thread(load, count))


def in_thread(load: Callable[[int], Any], count: int) -> Iterator[Any]:
    """`load(position)` of the first `count` positions in order, by a thread that has `AHEAD` of them under way."""
    with ThreadPoolExecutor(1) as pool:
        ahead = collections.deque(pool.submit(load, position) for position in range(min(AHEAD, count)))
        for position in range(AHEAD, count + AHEAD):
            if position < count:
                ahead.append(pool.submit(load, position))
            if ahead:
                yield ahead.popleft().result()


# --- Training on whole volumes: the wait for data, what loading costs, whether memory stays flat ---


def volumes(files: Files, effort: Effort) -> Outcome:
    """The wait is that of the trainer's own network; the loader's processor time is of a process that only loads."""
    scale, paths = files.scale, files.brains()
    with bar("volumes", total=6) as advance:

        def part(work: Callable[..., Any], store: str = "npy", **request: Any) -> Dict[str, Any]:
            result = in_fresh_process(work, store=paths[store], **request)
            advance()
            return result

        wait = part(volume_wait, steps=scale.wait_steps, filters=scale.wait_filters, depth=scale.wait_depth)
        cores = {"count": scale.core_volumes, "rounds": effort.rounds}
        lines = [
            Line("a step's wait for data, of the step", WARM, tuple(wait["shares"]), "%", wait["note"]),
            *(
                Line(f"loader, {name}", WARM, tuple(one["core_s"]), "core-s", one["note"])
                for name, one in (
                    ("whole grid", part(volume_cores, extent="full", **cores)),
                    ("brain's box", part(volume_cores, extent="brain", **cores)),
                    ("whole grid from .b2nd", part(volume_cores, "b2nd", extent="full", **cores)),
                )
            ),
        ]
        memory, pages = part(volume_memory, steps=effort.steps), part(volume_pages)
    lines.append(Line("anonymous memory over the steps", WARM, tuple(memory["MiB"]), "MiB", memory["note"]))
    lines.append(Line("pages of the store while it streams", COLD, tuple(pages["MiB"]), "MiB", pages["note"]))
    most = max(pages["MiB"])
    targets = (
        Target("wait for data, of all steps", 100 * wait["share"], "<=", 1, "%"),
        Target("processor time of the loader a volume, whole grid", lines[1].median, "<=", 0.15, "core-s"),
        Target(f"growth of anonymous memory over {effort.steps} steps", 100 * memory["growth"], "<=", 1, "%"),
        Target("pages of the store, budget and cases in use", most, "<=", pages["bound_bytes"] / MIB, "MiB"),
    )
    return Outcome("volumes", f"Training on whole volumes of {by_x(scale.case)}x4", lines, targets)


def volume_wait(store: str, steps: int, filters: int, depth: int) -> Dict[str, Any]:
    """The share of each step, in per cent, and of all, that the trainer's own network waits for data."""
    model, feed = _as_trained(store, steps + 2, filters, depth, norm="instance")
    parts, spent = Waiting(feed), []
    for _ in range(steps + 2):
        parts.waited_s = 0.0
        step_s = seconds(lambda: model.step(parts, 1e-4))
        spent.append((parts.waited_s, step_s))
    waited_s, total_s = map(sum, zip(*spent[2:]))
    note = f"{filters} filters, {steps} steps of {total_s / steps:.2f} s"
    return {"shares": [100 * wait / step for wait, step in spent[2:]], "share": waited_s / total_s, "note": note}


def volume_cores(store: str, extent: str, count: int, rounds: int) -> Dict[str, Any]:
    """Processor time a volume of a process which does nothing but load, all its threads counted."""
    set_up()
    from cpu3d.data.source import volume_dataset

    read_through(array_files(Path(store)))
    dtype, warm_up, core_s, elapsed_s = read_host().best_dtype, 2, [], 0.0
    more = {"extent": extent, "augment": AugmentConfig(), "dtype": dtype}
    dataset = volume_dataset(open_store(store), stop=count + warm_up, **more)
    for _ in range(rounds):
        stream = iter(dataset)
        for _ in range(warm_up):
            next(stream)
        begin_core = time.process_time()
        elapsed_s = seconds(lambda stream=stream: collections.deque(stream, 0)) / count
        core_s.append((time.process_time() - begin_core) / count)
    shape = by_x(dataset.element_spec[0].shape[1:])
    return {"core_s": core_s, "note": f"{shape} {dtype}, flips and intensity; {elapsed_s:.3f} s a volume"}


def volume_memory(store: str, steps: int) -> Dict[str, Any]:
    """Anonymous memory over many steps of a small network, which hardly hides the loading."""
    model, feed = _as_trained(store, steps, filters=2, depth=2)
    seen: List[int] = []

    def step() -> None:
        model.step(feed, 1e-4)
        seen.append(resident_now("anonymous_bytes"))

    step_s = seconds(lambda: [step() for _ in range(steps)]) / steps
    found = _growth(seen[steps // 10 :], "step")  # the first steps fill caches
    return {
        **found,
        "growth": found["slope"] * steps / found["most"],
        "note": f"{found['note']}, {step_s:.2f} s a step",
    }


def volume_pages(store: str) -> Dict[str, Any]:
    """The store's pages in memory at every volume of four epochs, with a budget of three cases."""
    set_up()
    from cpu3d.data.source import volume_dataset

    opened, files = open_store(store), array_files(Path(store))
    drop_pages(files)
    records = opened.cases("train")
    case_bytes = max(record.image_bytes + record.label_bytes for record in records)
    budget_bytes, stop = 3 * case_bytes, 4 * len(records)
    cached, own = [], []
    for _ in volume_dataset(opened, stop=stop, read_mode="mmap", page_budget_bytes=budget_bytes):
        cached.append(sum(map(resident_bytes, files)))
        own.append(resident_now("file_bytes"))
    total = format_bytes(sum(path.stat().st_size for path in files))
    note = f"store of {total}, budget {format_bytes(budget_bytes)}, {stop} volumes; "
    note += f"file pages of the process up to {format_bytes(max(own))}"
    # Two more are in use, whose pages no advice can give back: the one being prepared and the one before it, which
    # TensorFlow lets go of a call later.
    bound_bytes = budget_bytes + 2 * case_bytes
    return {"MiB": [*_thinned(cached), max(cached) / MIB], "bound_bytes": bound_bytes, "note": note}


# --- S4's size: 484 cases and 101 entries of each, 48,884 in all, over the arrays of a few ---


def many(files: Files, effort: Effort) -> Outcome:
    """Open the store, by a process without TensorFlow, whose own libraries would hide what a store takes; stream."""
    store = files.many()
    opened = [in_fresh_process(open_many, store=store) for _ in range(effort.rounds)]
    streamed = in_fresh_process(stream_many, store=store, samples=files.scale.large_samples)
    peak = "peak memory of the process that opens it"
    lines = (
        Line("open the store", WARM, tuple(one["open_s"] for one in opened)),
        Line(peak, WARM, tuple(one["peak_bytes"] / MIB for one in opened), "MiB"),
        Line("first volume, with TensorFlow running", WARM, (streamed["first_s"],)),
        Line("anonymous memory while it streams", WARM, tuple(streamed["MiB"]), "MiB", streamed["note"]),
    )
    grown = f"growth of anonymous memory over {streamed['watched']:,} volumes"
    targets = (
        Target("open the store", lines[0].median, "<=", 2, "s"),
        Target(peak, lines[1].median, "<=", 300, "MiB"),
        Target(grown, 100 * streamed["slope"] * streamed["watched"] / streamed["most"], "<=", 1, "%"),
    )
    return Outcome("many", f"A store of {opened[0]['entries']:,} entries", lines, targets)


def open_many(store: str) -> Dict[str, Any]:
    """Seconds to open the store, and the process's peak."""
    begin = time.perf_counter()
    entries = len(open_store(store).cases("train"))
    return {"open_s": time.perf_counter() - begin, "peak_bytes": peak_rss_bytes(), "entries": entries}


def stream_many(store: str, samples: int) -> Dict[str, Any]:
    """Anonymous memory while volumes stream, once as many records stay parsed as ever do."""
    set_up()
    from cpu3d.data.source import volume_dataset

    begin, first_s, seen = time.perf_counter(), 0.0, []
    for _ in volume_dataset(open_store(store), stop=samples):
        first_s = first_s or time.perf_counter() - begin
        seen.append(resident_now("anonymous_bytes"))
    late = seen[min(KEPT, len(seen) // 2) :]
    return {"first_s": first_s, "watched": len(late), **_growth(late, "volume")}


# --- Private helpers ---


def learner(
    grid: Sequence[int], *, channels: int, outputs: int, filters: int, depth: int, batch: int, norm: str = "none"
) -> Any:
    """The trainer's learner in the host's best dtype; a batch is computed at once.

    Without norm unless one is asked for: with few filters norms take most of a step, and it is to be short.
    """
    from cpu3d.config import RunConfig
    from cpu3d.training.learner import Learner
    from models.config import UNetConfig

    sizes = {"channels": channels, "outputs": outputs, "filters": filters, "depth": depth}
    unet = UNetConfig(**sizes, norm=norm, dtype=read_host().best_dtype)
    return Learner(RunConfig(grid=tuple(grid), unet=unet, batch=batch, micro_batch=batch))


def _as_trained(store: str, steps: int, filters: int, depth: int, norm: str = "none") -> Tuple[Any, Iterator[Any]]:
    """A learner and its data, as `train` has them by default."""
    set_up()
    from cpu3d.data.source import volume_dataset

    opened = open_store(store)
    read_through(array_files(Path(store)))
    channels, outputs = len(opened.manifest.channels), len(opened.manifest.regions)
    grid = grid_size(opened, extent="brain", multiple=16)
    model = learner(grid, channels=channels, outputs=outputs, filters=filters, depth=depth, batch=1, norm=norm)
    augment_, dtype = AugmentConfig(), read_host().best_dtype
    return model, iter(volume_dataset(opened, stop=steps, augment=augment_, dtype=dtype))


def _growth(seen: Sequence[int], what: str) -> Dict[str, Any]:
    """A series of bytes: its slope by least squares, its most, and a note of both."""
    slope = float(np.polyfit(np.arange(len(seen)), seen, 1)[0]) if len(seen) > 1 else 0.0
    note = f"{slope:+.0f} bytes a {what}, {(max(seen) - min(seen)) / MIB:.1f} MiB between least and most"
    return {"MiB": _thinned(seen), "slope": slope, "most": max(seen), "note": note}


def _thinned(values: Sequence[int]) -> List[float]:
    """About a hundred of them in MiB, evenly spread: a record need not hold every step."""
    return [one / MIB for one in values[:: max(1, len(values) // 100)]]


if __name__ == "__main__":
    answer(
        (train_on_patches, climb, volume_wait, volume_cores, volume_memory, volume_pages, open_many, stream_many),
        sys.argv[1:],
    )
