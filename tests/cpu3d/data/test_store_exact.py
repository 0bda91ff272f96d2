"""Whatever comes in, of whatever shape, orientation and dtype, comes out of a store as it was, in every format."""

import dataclasses
import itertools
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Tuple

import nibabel
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu3d.data.files.arrays import voxels_sha256
from cpu3d.data.files.reader import Reader
from cpu3d.data.layouts import CaseFiles
from cpu3d.data.nifti import from_ras
from cpu3d.data.records import make_manifest
from cpu3d.data.region import Region, whole
from cpu3d.data.store import open_store, write_store
from cpu3d.data.write_cases import FORMAT_CHOICES, Job, Settings, convert

AXES = [
    "".join(axis[side] for axis, side in zip(order, sides))
    for order in itertools.permutations(("RL", "AP", "SI"))
    for sides in itertools.product((0, 1), repeat=3)
]
BOX = Region((1, 0, 2), (3, 3, 2))
LABELS = {0: "background", 1: "a", 2: "b", 255: "c"}

SOURCES = {
    "uint8": ("u1", 1, 255, 1, 0),
    "int16": ("<i2", -32768, 32767, 1, 0),
    "big-endian int16": (">i2", -32768, 32767, 1, 0),
    "uint16 that fits": ("<u2", 1, 32767, 1, 0),
    "uint16 that does not": ("<u2", 1, 65535, 1, 0),
    "integral float32": ("<f4", -3000, 3000, 1, 0),
    "integral big-endian float64": (">f8", -3000, 3000, 1, 0),
    "real float32": ("<f4", -3000.0, 3000.0, 1, 0),
    "scaled to integers": ("<i2", -3000, 3000, 3, 0),
    "scaled and shifted": ("<u1", 1, 255, 2, -7),
    "scaled to fractions": ("<i2", -3000, 3000, 0.37, 0),
}
"""Name -> dtype in the file, lowest and highest value there, slope, intercept."""


@dataclass(frozen=True)
class Case:
    """A case to be written as NIfTI and read back from a store."""

    shape: Tuple[int, int, int] = (5, 4, 6)
    box: Region = BOX
    """The voxels of the file that are not 0, along its own axes."""
    axes: str = "RAS"
    channels: int = 2
    source: str = "int16"
    format: str = "npy"
    crop: bool = False
    end: str = ".nii"
    seed: int = 0
    part: Tuple[float, ...] = (0, 1, 0.2, 0.8, 0.5, 1)
    """Where a box that is read begins and ends along each axis, as shares of what is stored."""


@pytest.fixture(scope="module", autouse=True)
def nothing_need_survive_the_machine():
    """No fsync: hundreds of stores are written here, and a busy disk takes its time over each file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@st.composite
def cases(draw):
    shape = tuple(draw(st.integers(2, 9)) for _ in range(3))
    size = tuple(draw(st.integers(2, n)) for n in shape)
    start = tuple(draw(st.integers(0, n - m)) for n, m in zip(shape, size))
    return Case(
        shape,
        Region(start, size),
        draw(st.sampled_from(AXES)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from(list(SOURCES))),
        draw(st.sampled_from(list(FORMAT_CHOICES))),
        draw(st.booleans()),
        draw(st.sampled_from([".nii", ".nii.gz"])),
        draw(st.integers(0, 2**16)),
        tuple(x for _ in range(3) for x in sorted(draw(st.tuples(st.floats(0, 1), st.floats(0, 1))))),
    )


@settings(max_examples=150)
@given(cases())
def test_what_went_into_a_store_comes_out_as_it_was(case):
    check(case)


@pytest.mark.parametrize("axes", AXES)
def test_every_orientation_comes_out_as_it_was(axes):
    for format_, crop in itertools.product(FORMAT_CHOICES, (False, True)):
        check(Case(axes=axes, format=format_, crop=crop))


@pytest.mark.parametrize("source", SOURCES)
def test_every_dtype_comes_out_as_it_was_in_every_format(source):
    for format_, crop in itertools.product(FORMAT_CHOICES, (False, True)):
        check(Case(source=source, axes="LSP", format=format_, crop=crop))


def check(case: Case) -> None:
    """Write the case, store it, and compare every way of reading it with what nibabel reads."""
    with tempfile.TemporaryDirectory() as folder:
        image, label = write_source(Path(folder), case)
        store, record = write_and_open(Path(folder), case)
        expected, error = as_stored(image, case)
        assert record.max_abs_error == error
        assert record.stored == (record.box if case.crop else whole(record.shape))
        for part, truth, whole_array, sha256 in [
            ("x", expected, store.image("c"), record.image_voxels_sha256),
            ("y", label, store.label("c"), record.label_voxels_sha256),
        ]:
            assert whole_array.dtype == truth.dtype
            assert np.array_equal(whole_array, truth)
            assert sha256 == voxels_sha256(np.ascontiguousarray(truth))
            check_parts(store.folder, record, part, truth, case)
            check_way_back(whole_array, record, part, case, Path(folder))


def check_parts(folder: Path, record, part: str, truth: np.ndarray, case: Case) -> None:
    """A box that is read alone is that of the whole; what is not stored is 0."""
    stored = truth[record.stored.slices(record.shape)]
    begin, end = case.part[0::2], case.part[1::2]
    box = tuple(slice(int(a * (n - 1)), int(b * (n - 1)) + 1) for a, b, n in zip(begin, end, stored.shape))
    for mode in ("mmap", "pread"):
        reader = Reader(folder, mode)
        assert np.array_equal(reader.array(record, part), stored)
        assert np.array_equal(reader.box(record, part, box), stored[box])
    outside = truth.copy()
    outside[record.stored.slices(record.shape)] = 0
    assert not outside.any()


def check_way_back(array: np.ndarray, record, part: str, case: Case, folder: Path) -> None:
    """On the source's own grid it is what the file holds, value by value; float16, its z-scores but for rounding."""
    source = np.asanyarray(nibabel.load(folder / f"{part}{case.end}").dataobj)
    back = from_ras(array, record.geometry)
    if part == "x":
        source = source.reshape(*source.shape[:3], -1)
    if back.dtype == np.float16:
        # Sums in the file's order and in the store's differ in their last bits.
        assert np.abs(back - z_scores(source)).max() <= record.max_abs_error + 1e-9
    else:
        assert np.array_equal(back, source)


def write_source(folder: Path, case: Case) -> Tuple[np.ndarray, np.ndarray]:
    """Write image and label as NIfTI; return them as nibabel reads them, in axes R A S."""
    dtype, low, high, slope, inter = SOURCES[case.source]
    rng = np.random.default_rng(case.seed)
    size = (*case.box.size, case.channels)
    values = rng.uniform(low, high, size) if isinstance(low, float) else rng.integers(low, high, size, endpoint=True)
    values = values.astype(np.dtype(dtype))
    values[0, 0, 0], values[-1, -1, -1] = low + 1, high  # so that no channel is constant, and wide ones are
    image = np.zeros((*case.shape, case.channels), dtype)
    image[case.box.slices(case.shape)] = values
    label = np.zeros(case.shape, np.uint8)
    label[case.box.slices(case.shape)] = rng.choice(list(LABELS), case.box.size)
    affine = np.eye(4)
    affine[:3, :3] = 0
    for column, letter in enumerate(case.axes):
        affine["RLAPSI".index(letter) // 2, column] = 1.5 if letter in "RAS" else -1.5
    affine[:3, 3] = -7, 11, 3
    read = []
    for name, array in (("x", image if case.channels > 1 else image[..., 0]), ("y", label)):
        header = nibabel.Nifti1Header(endianness=">" if array.dtype.str[0] == ">" else "<")
        header.set_data_dtype(array.dtype)
        one = nibabel.Nifti1Image(array, affine, header)
        if name == "x" and (slope, inter) != (1, 0):
            header.set_slope_inter(slope, inter)
            one = nibabel.Nifti1Image(array.astype(np.float64) * slope + inter, affine, header)
            one.header.set_slope_inter(slope, inter)
        path = folder / f"{name}{case.end}"
        nibabel.save(one, path)
        if name == "x":
            assert nibabel.load(path).dataobj.slope == np.float32(slope)
        read.append(np.asanyarray(nibabel.as_closest_canonical(nibabel.load(path)).dataobj))
    return read[0].reshape(*read[0].shape[:3], -1), read[1]


def write_and_open(folder: Path, case: Case):
    """Convert the one case there is into a store. Returns it and the case's record."""
    files = CaseFiles("c", "c", (folder / f"x{case.end}",), folder / f"y{case.end}")
    names = tuple(f"channel {number}" for number in range(case.channels))
    (folder / "store/cases").mkdir(parents=True)
    how = Settings(**FORMAT_CHOICES[case.format], crop=case.crop)
    record = convert(Job(files, names, LABELS, folder, folder / "store", how))
    assert dataclasses.is_dataclass(record), record
    manifest = make_manifest(
        name="exact", layout="decathlon", channels=names, labels=LABELS, regions={"a": (1,)}, split_seed=0,
        split={"train": ("c",), "val": (), "test": ()}, cases=(record,), versions={},
    )  # fmt: skip
    write_store(folder / "store", manifest)
    store = open_store(folder / "store")
    return store, store.case("c")


def as_stored(image: np.ndarray, case: Case) -> Tuple[np.ndarray, float]:
    """What the store must hold of an image, and its largest rounding error: int16, or each channel's z-scores."""
    integral = np.array_equal(np.rint(image), image) and image.min() >= -32768 and image.max() <= 32767
    if integral and case.format != "float16":
        return image.astype(np.int16), 0.0
    scores = z_scores(image)
    rounded = scores.astype(np.float16)
    rounded[(rounded == 0) & (image != 0)] = 2**-24  # 0 is background
    return rounded, float(np.abs(rounded - scores).max())


def z_scores(image: np.ndarray) -> np.ndarray:
    """(value - mean) / std over each channel's non-zero voxels in C order, float64; 0 where the image is."""
    scores = np.zeros(image.shape)
    for index in range(image.shape[3]):
        inside = image[..., index] != 0
        values = image[..., index][inside].astype(np.float64)
        scores[..., index][inside] = (values - values.mean()) / values.std()
    return scores
