"""Ways to feed a training run with the same random patches of CTs: NIfTI read by nibabel, the store, memory, nothing.

Each gives batches of image (B, X, Y, Z, 1) and target (B, X, Y, Z, 1) uint8, the image normalised by its CT's mean and
spread: the same numbers from every way but the last.
"""

from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import numpy as np

from cpu3d.bench.data.files import array_files, ct_files
from cpu3d.data.patches import PatchSampling, patch_at

GZ, NII, S0, MMAP, PREAD, RAM, HELD, NOTHING = (
    "no cache, .nii.gz", "no cache, .nii", "S0, dataobj[roi] of .nii", "store, mmap", "store, pread", "store, ram",
    "all held in memory", "no loading",
)  # fmt: skip

FEEDS = (GZ, NII, S0, MMAP, PREAD, RAM, HELD, NOTHING)

OF_DISK = (GZ, NII, S0, MMAP, PREAD)
"""Those that read files while they train, so that dropped pages matter to them."""

SEED = 0


def files_read(name: str, folders: Dict[str, Path]) -> List[Path]:
    """The files that a feed reads."""
    if name == NOTHING:
        return []
    if name in (GZ, NII, S0):
        pairs = ct_files(folders["gz" if name == GZ else "nii"], name == GZ)
        return [path for pair in pairs for path in pair]
    return array_files(folders["npy"])


def batches(
    name: str, folders: Dict[str, Path], patch: Tuple[int, int, int], batch: int, count: int, dtype: str
) -> Iterator[Any]:
    """`count` batches of a feed, from the first position on."""
    import tensorflow as tf

    from cpu3d.data.source import open_store, patch_dataset

    store = open_store(folders["npy"])
    if name in (MMAP, PREAD, RAM):
        mode = {MMAP: "mmap", PREAD: "pread", RAM: "ram"}[name]
        dataset = patch_dataset(
            store, patch, extent="full", seed=SEED, stop=count * batch, batch=batch, dtype=dtype, read_mode=mode
        )
        return iter(dataset)
    if name == NOTHING:
        image = tf.cast(tf.random.stateless_normal((batch, *patch, 1), (0, 1)), dtype)
        target = tf.cast(image > 1, tf.uint8)
        return iter([(image, target)] * count)
    records = list(store.cases("train"))
    sampling = PatchSampling(shape=tuple(patch), extent="full", seed=SEED)
    return iter(_mapped(_cut(name, folders, records), records, sampling, batch, count, dtype))


def all_voxels(proxy: Any) -> np.ndarray:
    """All of a NIfTI file in its own dtype: the quickest way to read it whole. `get_fdata` makes floats of them.

    Of a plain file nibabel gives a map, which is no reading yet.
    """
    voxels = np.asanyarray(proxy)
    return np.array(voxels, order="K") if isinstance(voxels, np.memmap) else voxels


# --- Private helpers ---

_Cut = Callable[[int, Tuple[slice, ...]], Tuple[np.ndarray, np.ndarray]]
"""From a CT's number and a place in it to the patch of image and label."""


def _cut(name: str, folders: Dict[str, Path], records: Sequence[Any]) -> _Cut:
    import nibabel

    if name == HELD:
        from cpu3d.data.store import open_store

        store = open_store(folders["npy"])
        held = [(np.array(store.image(r.case_id)[..., 0]), np.array(store.label(r.case_id))) for r in records]
        return lambda index, slices: tuple(np.ascontiguousarray(array[slices]) for array in held[index])

    pairs = ct_files(folders["gz" if name == GZ else "nii"], name == GZ)

    def cut(index: int, slices: Tuple[slice, ...]) -> Tuple[np.ndarray, np.ndarray]:
        proxies = [nibabel.load(path).dataobj for path in pairs[index]]
        parts = [proxy[slices] if name == S0 else all_voxels(proxy)[slices] for proxy in proxies]
        return tuple(np.ascontiguousarray(part) for part in parts)

    return cut


def _mapped(cut: _Cut, records: Sequence[Any], sampling: PatchSampling, batch: int, count: int, dtype: str) -> Any:
    """As the guides to tf.data have it: `map` in parallel, batch, prefetch, all sizes left to TensorFlow."""
    import tensorflow as tf

    def draw(position):
        drawn = patch_at(int(position), sampling, records)
        record = records[drawn.index]
        bits, label = cut(drawn.index, drawn.region.slices(record.shape))
        scale = 1 / np.array(record.channel_std)
        return bits, label, np.float32(scale), np.float32(-np.array(record.channel_mean) * scale)

    def load(position):
        outputs = tf.numpy_function(draw, [position], (tf.int16, tf.uint8, tf.float32, tf.float32), stateful=False)
        shapes = (sampling.shape, sampling.shape, (1,), (1,))
        bits, label, scale, shift = (tf.ensure_shape(one, shape) for one, shape in zip(outputs, shapes))
        value = tf.cast(bits, tf.float32)[..., None]
        image = tf.where(tf.equal(value, 0), 0.0, value * scale + shift)
        return tf.cast(image, dtype), label[..., None]

    dataset = tf.data.Dataset.range(count * batch).map(load, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.batch(batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
