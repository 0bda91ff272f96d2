"""One case from its files to what the store holds: checked, on one grid in axes R A S, with its statistics."""

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data import nifti
from cpu3d.data.layouts import CaseFiles
from cpu3d.data.region import bounding_box
from cpu3d.data.store import CaseRecord, Geometry, SourceFile
from cpu3d.errors import InputError

AFFINE_TOLERANCE = 1e-3
"""Largest difference, in mm, between the affines of files that lie on one grid."""


@dataclass(frozen=True)
class LoadedCase:
    """A case in memory, ready to be stored or predicted."""

    image: np.ndarray
    """`(X, Y, Z, C)` int16 as in the source, or float16 after normalisation; C order, axes R A S."""
    label: Optional[np.ndarray]
    """`(X, Y, Z)` uint8 in the data set's own codes, or None."""
    record: CaseRecord


def load_case(
    files: CaseFiles,
    *,
    channels: Tuple[str, ...],
    labels: Optional[Dict[int, str]] = None,
    dataset_folder: Optional[Path] = None,
) -> LoadedCase:
    """Read, check and turn one case.

    The image is int16 where every voxel of every channel is integral and in range: exact. Otherwise it is float16 of
    (value - mean) / std over each channel's non-zero voxels, with the largest rounding error in the record. `labels`
    are the codes that may occur; None leaves the label unread. Sources are recorded relative to `dataset_folder`.

    Holds about two volumes: the channels as read, then the image. Raises InputError with every problem of the case:
    files that cannot be read or lie on different grids, NaN or infinite voxels, empty or constant channels, unknown
    label codes.
    """
    problems: List[str] = []
    volumes, geometry = _read_channels(files, channels, problems)
    label = None
    if labels is not None and files.label is not None:
        label, label_geometry = _read_label(files.label, labels, problems)
        if label is not None and geometry is not None:
            problems += _grid_problems(files.label, label_geometry, files.images[0], geometry)
    if problems:
        raise InputError(*problems)
    image, max_abs_error = _store_image([nifti.to_ras(volume, geometry) for volume in volumes])
    del volumes
    if label is not None:
        label = np.ascontiguousarray(nifti.to_ras(label, geometry))
    sources = tuple(
        _source(path, dataset_folder) for path in (*files.images, *([files.label] if label is not None else []))
    )
    return LoadedCase(image, label, _record(files, image, label, geometry, max_abs_error, sources))


def npy_parts(array: np.ndarray) -> Tuple[bytes, memoryview]:
    """The two parts of a .npy file of a C-ordered `array`: header, and the voxels without a copy."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    return header.getvalue(), memoryview(array).cast("B")


def source_name(path: Path, dataset_folder: Optional[Path]) -> str:
    """The path as a record tells it: relative to the data set's folder, or the bare name where it lies outside."""
    folder = Path(dataset_folder) if dataset_folder is not None else path.parent
    return path.relative_to(folder).as_posix() if folder in path.parents else path.name


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


# --- Private helpers: reading ---


def _read_channels(files: CaseFiles, channels: Sequence[str], problems: List[str]):
    """One 3D array per channel, int16 wherever that is exact, and the grid of the first file that could be read."""
    volumes, geometry, first = [], None, None
    expect_4d = len(files.images) == 1 and len(channels) > 1
    for number, path in enumerate(files.images):
        try:
            array, found = nifti.read_volume(path)
        except InputError as error:
            problems += error.problems
            continue
        if geometry is None:
            geometry, first = found, path
        problems += _grid_problems(path, found, first, geometry)
        count = array.shape[3] if array.ndim == 4 else 1
        wanted = len(channels) if expect_4d else 1
        if count != wanted:
            problems.append(f"{path} must hold {wanted} channel(s), got {count}; {_channel_advice(channels)}")
            continue
        names = channels if expect_4d else channels[number : number + 1]
        for index, name in enumerate(names):
            volume = array[..., index] if array.ndim == 4 else array
            problems += _channel_problems(path, name, volume)
            volumes.append(_compact(volume))
    if len(files.images) not in (1, len(channels)):
        problems.append(f"case {files.case_id} must have a file per channel, got {len(files.images)}")
    return volumes, geometry


def _channel_advice(channels: Sequence[str]) -> str:
    return f"give one 4D file or one 3D file for each of {', '.join(channels)}"


def _grid_problems(path: Path, found: Geometry, first: Path, expected: Geometry) -> List[str]:
    """How the grid of `path` differs from that of `first`; nothing where it is the same."""
    rule = f"{path} must lie on the grid of {first.name}"
    if found.shape != expected.shape:
        return [f"{rule}: shape {expected.shape}, got {found.shape}; resample it or leave the case out"]
    if found.axes != expected.axes:
        return [f"{rule}: axes {expected.axes}, got {found.axes}; mend its header or leave the case out"]
    difference = float(np.abs(np.subtract(found.affine, expected.affine)).max())
    if difference > AFFINE_TOLERANCE:
        return [
            f"{rule}: affines differ by {difference:g} mm, more than {AFFINE_TOLERANCE:g}; resample or leave it out"
        ]
    return []


def _channel_problems(path: Path, name: str, volume: np.ndarray) -> List[str]:
    """NaN, infinity and channels without contrast, which no normalisation can mend."""
    if volume.dtype.kind == "f":
        bad = volume.size - int(np.count_nonzero(np.isfinite(volume)))
        if bad:
            return [
                f"channel {name} of {path} must be finite, got {bad} NaN or infinite voxels; mend it or leave it out"
            ]
    inside = volume[volume != 0]
    if inside.size == 0:
        return [f"channel {name} of {path} must not be empty, got zeros only; fetch it again or leave the case out"]
    if inside.min() == inside.max():
        return [
            f"channel {name} of {path} must vary over its non-zero voxels, got {inside[0]:g} everywhere;"
            f" fetch it again or leave the case out"
        ]
    return []


def _compact(volume: np.ndarray) -> np.ndarray:
    """The volume as int16 where that is exact, else as it is."""
    limits = np.iinfo(np.int16)
    if volume.dtype.kind == "f" and not (np.isfinite(volume).all() and np.array_equal(np.rint(volume), volume)):
        return volume
    if volume.min() < limits.min or volume.max() > limits.max:
        return volume
    return volume.astype(np.int16)


def _read_label(path: Path, labels: Dict[int, str], problems: List[str]):
    try:
        label, geometry = nifti.read_volume(path)
    except InputError as error:
        problems += error.problems
        return None, None
    if label.ndim == 4 and label.shape[3] == 1:
        label = label[..., 0]
    if label.ndim != 3:
        problems.append(f"label {path} must be 3D, got shape {label.shape}; give one label map")
        return None, None
    values, counts = np.unique(label, return_counts=True)
    unknown = [f"{value:g} ({count} voxels)" for value, count in zip(values, counts) if value not in labels]
    if unknown:
        known = ", ".join(f"{code} {name}" for code, name in sorted(labels.items()))
        problems.append(f"label {path} must hold only the codes {known}; got {', '.join(unknown[:8])}; mend it")
        return None, None
    return label.astype(np.uint8), geometry


# --- Private helpers: storing ---


def _store_image(volumes: List[np.ndarray]) -> Tuple[np.ndarray, float]:
    """Channels stacked last as int16 if all of them are, else as float16 of their z-scores; and the largest error."""
    lossless = all(volume.dtype == np.int16 for volume in volumes)
    image = np.empty((*volumes[0].shape, len(volumes)), "<i2" if lossless else "<f2")
    error = 0.0
    for index, volume in enumerate(volumes):
        if lossless:
            image[..., index] = volume
            continue
        inside = volume != 0
        values = volume[inside].astype(np.float64)
        scores = (values - values.mean()) / values.std()
        rounded = scores.astype(np.float16)
        error = max(error, float(np.abs(rounded.astype(np.float64) - scores).max()))
        channel = np.zeros(volume.shape, np.float16)
        channel[inside] = rounded
        image[..., index] = channel
    return image, error


def _record(
    files: CaseFiles,
    image: np.ndarray,
    label: Optional[np.ndarray],
    geometry: Geometry,
    max_abs_error: float,
    sources: Tuple[SourceFile, ...],
) -> CaseRecord:
    mask = np.zeros(image.shape[:3], bool) if label is None else label > 0
    statistics = []
    for index in range(image.shape[3]):
        channel = image[..., index]
        inside = channel != 0
        mask |= inside
        values = channel[inside].astype(np.float64)
        statistics.append((values.mean(), values.std(), values.min(), values.max(), values.size))
    mean, std, low, high, voxels = zip(*statistics)
    counts = np.bincount(label.reshape(-1)) if label is not None else ()
    image_bytes, image_sha256 = _npy_identity(image)
    label_bytes, label_sha256 = _npy_identity(label) if label is not None else (0, "")
    return CaseRecord(
        case_id=files.case_id,
        patient_id=files.patient_id,
        shape=tuple(image.shape[:3]),
        spacing_mm=nifti.ras_spacing_mm(geometry),
        box=bounding_box(mask),
        image_dtype=image.dtype.name,
        max_abs_error=max_abs_error,
        channel_mean=tuple(map(float, mean)),
        channel_std=tuple(map(float, std)),
        channel_min=tuple(map(float, low)),
        channel_max=tuple(map(float, high)),
        channel_voxels=tuple(map(int, voxels)),
        label_voxels={code: int(count) for code, count in enumerate(counts) if count},
        geometry=geometry,
        sources=sources,
        image_bytes=image_bytes,
        image_sha256=image_sha256,
        label_bytes=label_bytes,
        label_sha256=label_sha256,
    )


def _npy_identity(array: np.ndarray) -> Tuple[int, str]:
    """Length in bytes and SHA-256 of the .npy file that `array` makes."""
    header, voxels = npy_parts(array)
    digest = hashlib.sha256(header)
    digest.update(voxels)
    return len(header) + voxels.nbytes, digest.hexdigest()


def _source(path: Path, dataset_folder: Optional[Path]) -> SourceFile:
    return SourceFile(source_name(path, dataset_folder), path.stat().st_size, file_sha256(path))
