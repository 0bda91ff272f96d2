"""The rungs of S1's ladder, each a way to feed the same samples of whole images, and each one better than the last.

A sample is the grid around a brain's middle, normalised and augmented, cut from a file that is read whole as S1 reads
its images. Up to the fourth rung a thread loads two samples ahead, as a loader without tf.data does.
"""

import queue
import threading
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from cpu3d.bench.data.disk_cap import TokenBucket
from cpu3d.bench.data.files import array_files, ladder_array
from cpu3d.bench.data.numpy_augment import WITH_TURNS, augmented
from cpu3d.data.augment import sample_params
from cpu3d.data.extent import case_region
from cpu3d.data.files.arrays import decode_b2nd
from cpu3d.data.region import crop
from cpu3d.data.sampling import sample_at
from memory_estimator.host import read_host

FLOAT, PACKED, HALF, GRAPH, OURS, OURS_NPY = (
    "float32 .npy", "+ blosc2", "+ 16 bit", "+ augmentation in the graph", "+ zero-copy and look-ahead (the store)",
    "the same with .npy instead of .b2nd",
)  # fmt: skip

RUNGS = (FLOAT, PACKED, HALF, GRAPH, OURS, OURS_NPY)

AHEAD = 2
"""Samples that the loader's thread keeps ready."""

SEED = 0


def files_read(rung: str, paths: Dict[str, Path], case_ids: Sequence[str]) -> List[Path]:
    """The files that a rung reads in an epoch."""
    if rung in (OURS, OURS_NPY):
        return array_files(paths["b2nd" if rung == OURS else "npy"])
    return [
        ladder_array(paths["ladder"], case_id, name) for case_id in case_ids for name in (_IMAGE[rung], "label.npy")
    ]


def make_feed(
    rung: str, paths: Dict[str, Path], grid: Tuple[int, int, int], dtype: str, bucket: Optional[TokenBucket]
) -> Callable[[int, int], Iterator[Any]]:
    """A function from first and last position to batches of one, (image, target); set up, so that time can begin."""
    import tensorflow as tf

    from cpu3d.data.source import open_reading, open_store, patch_dataset

    store = open_store(paths["b2nd" if rung == OURS else "npy"])
    if rung in (OURS, OURS_NPY):
        reading = open_reading(store, free_bytes=read_host().free_bytes, read_mode="pread" if bucket else "auto")
        more = {"sampling": "centre", "augment": WITH_TURNS, "seed": SEED, "dtype": dtype, "read_mode": reading}
        return lambda start, stop: _counted(patch_dataset(store, grid, start=start, stop=stop, **more), reading, bucket)
    records = list(store.cases("train"))
    codes = tuple(tuple(members) for members in store.manifest.regions.values())
    load = _loader(rung, paths["ladder"], records, tuple(grid), codes, bucket)
    if rung != GRAPH:

        def to_tensors(image: np.ndarray, target: np.ndarray) -> Tuple[Any, Any]:
            return tf.cast(tf.convert_to_tensor(image[None]), dtype), tf.convert_to_tensor(target[None])

        return lambda start, stop: (to_tensors(*pair) for pair in in_thread(load, range(start, stop)))
    finish = _finisher(codes, dtype)
    return lambda start, stop: (finish(raw) for raw in in_thread(load, range(start, stop)))


def in_thread(load: Callable[[int], Any], positions: Sequence[int]) -> Iterator[Any]:
    """`load(position)` of all positions in order, done by a thread that keeps `AHEAD` of them ready."""
    ready: queue.Queue = queue.Queue(AHEAD)

    def fill():
        for position in positions:
            try:
                ready.put((load(position), None))
            except BaseException as error:  # raised where it is waited for
                ready.put((None, error))
                return

    threading.Thread(target=fill, daemon=True).start()
    for _ in positions:
        loaded, error = ready.get()
        if error is not None:
            raise error
        yield loaded


# --- Private helpers ---

_IMAGE = {FLOAT: "float32.npy", PACKED: "float32.b2nd", HALF: "int16.b2nd", GRAPH: "int16.b2nd"}

_PIECE = 1 << 20


def _counted(batches: Iterable[Any], reading: Any, bucket: Optional[TokenBucket]) -> Iterator[Any]:
    """The batches of a data set; the bucket, where there is one, is asked for what was read for them."""
    read = reading.reader.reads.bytes_read
    for batch in batches:
        if bucket:
            now = reading.reader.reads.bytes_read
            bucket.take(now - read)
            read = now
        yield batch


def _loader(rung: str, folder: Path, records, grid, codes, bucket: Optional[TokenBucket]) -> Callable[[int], Any]:
    """From a position to (image, target) as NumPy arrays, or to the raw sample that `Finish` takes."""
    table = np.zeros((256, len(codes)), np.uint8)
    for column, members in enumerate(codes):
        table[list(members), column] = 1

    def load(position: int) -> Any:
        record = records[sample_at(position, cases=len(records), seed=SEED).index]
        region = case_region(record, grid, "brain")
        image = crop(_read(ladder_array(folder, record.case_id, _IMAGE[rung]), bucket), region)
        label = crop(_read(ladder_array(folder, record.case_id, "label.npy"), bucket), region)
        params = sample_params(WITH_TURNS, seed=SEED, position=position, channels=record.channels)
        scale = 1 / np.array(record.channel_std)
        shift = -np.array(record.channel_mean) * scale
        if rung == GRAPH:
            return {
                "bits": np.ascontiguousarray(image),
                "label": np.ascontiguousarray(label),
                "is_half": np.bool_(False),
                "scale": np.float32(scale * params.gain),
                "shift": np.float32(shift * params.gain + params.offset),
                "flips": np.array(params.flips),
                "planes": params.planes(record.spacing_mm),
            }
        if rung == HALF:
            image = np.where(image == 0, np.float32(0), image * np.float32(scale) + np.float32(shift))
        image, label = augmented(image, label, params, params.planes(record.spacing_mm))
        return image, table[label]

    return load


def _read(path: Path, bucket: Optional[TokenBucket]) -> np.ndarray:
    """A whole array from its file, read front to back."""
    if path.suffix == ".npy" and bucket is None:
        return np.load(path, allow_pickle=False)
    content = bytearray(path.stat().st_size)
    with open(path, "rb", buffering=0) as file:
        at, view = 0, memoryview(content)
        while at < len(content):
            size = file.readinto(view[at : at + _PIECE]) or 0
            if not size:
                raise OSError(f"{path} ended early")
            if bucket:
                bucket.take(size)
            at += size
    return decode_b2nd(content) if path.suffix == ".b2nd" else _npy(content)


def _npy(content: bytearray) -> np.ndarray:
    """The array of a .npy file's bytes, without a copy."""
    import io

    head = io.BytesIO(bytes(content[:1024]))
    np.lib.format.read_magic(head)
    shape, _, dtype = np.lib.format.read_array_header_1_0(head)
    return np.frombuffer(content, dtype, offset=head.tell()).reshape(shape)


def _finisher(codes, dtype: str) -> Callable[[Dict[str, np.ndarray]], Any]:
    """The graph that normalises, augments and makes the target, on whatever device TensorFlow trains on."""
    import tensorflow as tf

    from cpu3d.data.finish import Finish

    finish = Finish(codes=codes, dtype=dtype, resamples=True)

    @tf.function(reduce_retracing=True)
    def graph(raw):
        image, target = finish(raw)
        return image[None], target[None]

    return lambda raw: graph({name: tf.convert_to_tensor(part) for name, part in raw.items()})
