"""One case read from its files: checked, on one grid in axes R A S, with its statistics."""

from dataclasses import dataclass
from pathlib import Path
from typing import (
    Any,
    Dict,
    Iterable,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
)

import numpy as np

from cpu3d.data import nifti
from cpu3d.data.background import (
    border_value,
    surroundings,
    without_far_values,
    without_residue,
)
from cpu3d.data.cases.channels import (
    AS_IT_IS,
    INT16,
    Unit,
    content_box,
    facts_of_channel,
    image_in_steps,
)
from cpu3d.data.cases.kinds import AIR_SHARE, looks_like_ct, refuses_ct
from cpu3d.data.cases.resample import (
    resample_image,
    resample_label,
    resampled_shape,
    spacing_at,
)
from cpu3d.data.datasets.dataset import CaseFiles
from cpu3d.data.datasets.names import indices_of
from cpu3d.data.files.arrays import file_sha256, voxels_sha256
from cpu3d.data.manifest import CaseRecord, Geometry, SourceFile, SourceGrid
from cpu3d.data.normalise import Kind, Normalisation, if_any_differs, of_all
from cpu3d.data.region import Array, Shape3, bounding_box, whole, xyz
from cpu3d.errors import InputError, raise_if_any
from cpu3d.util.records import listed
from memory_estimator.common.units import counted
from models.strides import Spacing3

CODE_TOLERANCE = 1e-3  # how far a label's voxel may be from its code: a scaled header rounds it
CENTRES = 32  # most voxels of each label code in a record; patches are shifted around them

Units = Tuple[Unit, ...]  # as in a record; none if the source's values are stored


@dataclass(frozen=True)
class LoadedCase:
    """A case in memory, ready to be stored or predicted."""

    image: Array
    """`(X, Y, Z, C)` int16 as in the source or in steps; C order, axes R A S."""
    label: Optional[Array]  # `(X, Y, Z)` uint8 in the data set's own codes, or None
    source_label: Optional[Array]  # the same before the case was resampled; None if it was not
    record: CaseRecord  # without format, lengths and hashes of the store's files


def load_case(
    files: CaseFiles,
    *,
    channels: Tuple[str, ...],
    labels: Optional[Dict[int, str]] = None,
    ignore: Optional[int] = None,
    dataset_folder: Optional[Path] = None,
    zero_nan: bool = False,
    target_spacing_mm: Optional[Spacing3] = None,
    normalisation: Sequence[Normalisation] = (),
) -> LoadedCase:
    """Read and check a case, turn it to axes R A S, and resample it to `target_spacing_mm`, if
    given.

    `labels` are the codes that may occur; None leaves the label unread. `ignore` is the one of them
    that is not to be learnt; where 0 is background, it becomes background outside of the box of all
    else, but not in `source_label`. Sources are recorded relative to `dataset_folder`, by default
    that of the first image. Holds about two volumes, of a resampled case four of the larger grid.
    Raises InputError with every problem of the case."""
    kinds = of_all(normalisation, len(channels))
    volumes, label, geometry, notes, zeroed, far = _read(files, channels, labels, kinds, zero_nan)
    borders = [
        border_value(volume) if each.has_background else 0.0 for volume, each in zip(volumes, kinds)
    ]
    shape = xyz(volumes[0].shape)
    spacing_mm = nifti.ras_spacing_mm(geometry)
    source = None
    source_label = None
    if target_spacing_mm:
        made = resampled_shape(files.case_id, shape, spacing_mm, target_spacing_mm)
        if made != shape:
            source_label = label
            label, source = _resample(volumes, label, made, spacing_mm, kinds, ignore)
            spacing_mm = spacing_at(shape, spacing_mm, made)
    names = [f"channel {name} of {files.case_id}" for name in channels]
    image, error, units = image_in_steps(volumes, names, kinds)
    del volumes
    if label is not None and ignore is not None and not if_any_differs(kinds):
        label = ignored_in_box(label, image, ignore)
    facts = facts_of(image, label, kinds, units, ignore)
    if label is not None and ignore is not None:
        in_box = label[facts["box"].slices(xyz(label.shape))]
        check_annotated(in_box, ignore, f"label {files.label}")
    record = CaseRecord(
        case_id=files.case_id,
        patient_id=files.patient_id,
        spacing_mm=spacing_mm,
        **facts,
        units=units,
        max_abs_error=error,
        zeroed_voxels=zeroed,
        far_voxels=far,
        geometry=geometry,
        sources=_sources(files, dataset_folder, has_label=labels is not None),
        stored=whole(image.shape[:3]),
        background=tuple(borders) if any(borders) else (),
        resampled_from=source,
        contradictions=notes,
    )
    return LoadedCase(image, label, source_label, record)


def _resample(
    volumes: List[Array],
    label: Optional[Array],
    made: Shape3,
    spacing_mm: Spacing3,
    kinds: Sequence[Normalisation],
    ignore: Optional[int],
) -> Tuple[Optional[Array], SourceGrid]:
    """Resample the volumes, in place, to `made` voxels, and return the label there, and what it was
    on its source's grid."""
    shape = xyz(volumes[0].shape)
    for index, each in enumerate(kinds):  # one after the other: each volume is forgotten at once
        volumes[index] = resample_image(volumes[index], made, spacing_mm, each.has_background)
    if label is None:
        return None, SourceGrid(shape, {}, "")
    source = SourceGrid(shape, label_voxels_of(label), voxels_sha256(label))
    return resample_label(label, made, ignore), source


def _sources(files: CaseFiles, folder: Optional[Path], has_label: bool) -> Tuple[SourceFile, ...]:
    """Describe the files that a case was made from, relative to `folder`, by default that of the
    first image; those outside of it by their names alone."""
    if folder is None:
        folder = files.images[0].parent
    sources = []
    for path in files.paths if has_label else files.images:
        name = path.name
        if folder in path.parents:
            name = path.relative_to(folder).as_posix()
        status = path.stat()
        sha256 = file_sha256(path)
        sources.append(SourceFile(name, status.st_size, sha256, status.st_mtime_ns))
    return tuple(sources)


def _read(
    files: CaseFiles,
    channels: Tuple[str, ...],
    labels: Optional[Dict[int, str]],
    kinds: Sequence[Normalisation],
    zero_nan: bool,
) -> Tuple[List[Array], Optional[Array], Geometry, Tuple[str, ...], int, int]:
    """Return (volume of each channel, label, grid of the files, notes on those whose sform and
    qform contradict each other, voxels that were no numbers, voxels far from all others), with axes
    R A S."""
    if len(files.images) not in (1, len(channels)):
        names = ", ".join(channels)
        rule = f"case {files.case_id} must have a file for each of {names}, or one for all"
        raise InputError(f"{rule}, got {len(files.images)} files; add or leave out files")
    pairs = tuple(zip(channels, kinds))
    wanted = [pairs] if len(files.images) == 1 else [(pair,) for pair in pairs]
    volumes: List[Array] = []
    label = None
    grids: Dict[Path, Geometry] = {}  # the first is that of the others, too
    alike: Dict[str, List[str]] = {}  # note -> channels, "label"
    zeroed = 0
    far = 0
    problems: List[str] = []

    def read_on_grid(path: Path, names: Iterable[str]) -> Array:
        array, grids[path] = nifti.read_volume(path)
        alike.setdefault(nifti.contradiction(grids[path]), []).extend(names)
        first = next(iter(grids))
        return nifti.on_grid(array, path, grids[path], first, grids[first])

    for path, each in zip(files.images, wanted):
        try:
            array = read_on_grid(path, dict(each))
            if zero_nan:
                zeroed += int(np.count_nonzero(~np.isfinite(array)))
            of_file, far_of_file = _channels(path, array, each, files.names, zero_nan)
            volumes += of_file
            far += far_of_file
        except InputError as error:
            problems += error.problems
    if labels is not None and files.label is not None:
        try:
            label = _label(files.label, read_on_grid(files.label, ["label"]), labels)
        except InputError as error:
            problems += error.problems
    raise_if_any(problems)
    geometry = grids[files.images[0]]
    volumes = [nifti.to_ras(volume, geometry) for volume in volumes]
    if label is not None:
        label = np.ascontiguousarray(nifti.to_ras(label, geometry))
    notes = tuple(f"{listed(names)}: {note}" for note, names in alike.items() if note)
    return volumes, label, geometry, notes, zeroed, far


def facts_of(
    image: Array,
    label: Optional[Array],
    normalisation: Sequence[Normalisation] = (),
    units: Units = (),
    ignore: Optional[int] = None,
) -> Dict[str, Any]:
    """Return the fields of a record that follow from the voxels of an image `(X, Y, Z, C)` and its
    label, both on the whole grid; code `ignore` is not learnt."""
    kinds = of_all(normalisation, image.shape[-1])
    is_learnt = None
    facts: Dict[str, Any] = {"label_voxels": {}, "centres": {}, "label_voxels_sha256": ""}
    if label is not None:
        is_learnt = label > 0
        if ignore is not None:
            is_learnt &= label != ignore
        facts = {
            "label_voxels": label_voxels_of(label),
            "centres": centres_of(label),
            "label_box": bounding_box(is_learnt),
            "label_voxels_sha256": voxels_sha256(label),
        }
    channels = []
    for index, each in enumerate(kinds):
        unit = units[index] if units else AS_IT_IS
        channels.append(facts_of_channel(image[..., index], each, unit, is_learnt))
    mean, std, low, high, voxels, around, foreground = zip(*channels)
    if not if_any_differs(kinds):
        around = ()
    return {
        **facts,
        "shape": tuple(image.shape[:3]),
        "box": content_box(image, label, kinds, units, around, ignore),
        "channel_mean": mean,
        "channel_std": std,
        "channel_min": low,
        "channel_max": high,
        "channel_voxels": voxels,
        "image_voxels_sha256": voxels_sha256(image),
        "around": around,
        "foreground": foreground if any(foreground) else (),
    }


def check_annotated(in_box: Array, ignore: int, name: str) -> None:
    """Raise InputError for the label in a content box if all of it is to be ignored."""
    if (in_box == ignore).all():
        rule = f"{name} must have annotated voxels"
        todo = "annotate some there, leave the case out, or resample it less with --spacing"
        raise InputError(f"{rule}, got {ignore}, to be ignored, in all of the content box; {todo}")


def ignored_in_box(label: Array, image: Array, ignore: int) -> Array:
    """Make ignored voxels background outside of the box around annotated voxels and voxels that
    are not zero in some channel."""
    mask = image.any(axis=-1) | ((label != ignore) & (label > 0))
    box = bounding_box(mask).slices(xyz(label.shape))
    inside = np.zeros_like(label)
    inside[box] = label[box]
    return inside


def label_voxels_of(label: Array) -> Dict[int, int]:
    """Count the voxels of each code that occurs in a label map (X, Y, Z)."""
    voxels = np.bincount(label.reshape(-1)).tolist()
    return {code: n for code, n in enumerate(voxels) if n}


def centres_of(label: Array) -> Dict[int, Tuple[Shape3, ...]]:
    """Pick up to `CENTRES` voxels of each code but 0 of a label map (X, Y, Z), at even steps in C
    order."""
    flat = label.reshape(-1)
    centres = {}
    inside = np.flatnonzero(flat)
    codes = flat[inside]
    for code in np.unique(codes):
        voxels = inside[codes == code]
        steps = min(CENTRES, len(voxels))
        picked = voxels[(2 * np.arange(steps) + 1) * len(voxels) // (2 * steps)]
        indices = np.stack(np.unravel_index(picked, label.shape), -1)
        centres[int(code)] = tuple(map(xyz, indices.tolist()))
    return centres


def _channels(
    path: Path,
    array: Array,
    wanted: Sequence[Tuple[str, Normalisation]],
    present: Sequence[str],
    zero_nan: bool,
) -> Tuple[List[Array], int]:
    """Return the channels `wanted` of a file, by name and normalisation, in int16 if exact, and
    how many voxels were far from all others. `present` are the file's own channels, if known.

    A background is exactly 0 if it was that but for what an interpolation left. Raises InputError
    for channels without contrast, for CT in the place of others, for NaN and infinity unless they
    are to be background, and for another number of channels.
    """
    if array.ndim == 3:
        array = array[..., None]
    indices = channel_indices(path, array.shape[3], [name for name, _ in wanted], present)
    volumes = []
    problems = []
    far = 0
    for index, (name, each) in zip(indices, wanted):
        volume = array[..., index]
        rule = f"channel {name} of {path} must"
        advice = "fetch it again or leave the case out"
        is_finite = np.isfinite(volume)
        bad = volume.size - int(np.count_nonzero(is_finite))
        if bad and not zero_nan:
            advice = "repair it, leave it out, or make them background with --zero-nan"
            problems.append(f"{rule} be finite, got {bad} NaN or infinite voxels; {advice}")
            continue
        if bad:
            nothing = surroundings(volume, each.kind is Kind.CT)
            volume = np.where(is_finite, volume, 0 if each.has_background else nothing)
        volume, far_here = without_far_values(volume, each.has_background)
        far += far_here
        if each.has_background:
            volume = without_residue(volume)
        inside = volume[volume != 0] if each.has_background else volume
        if inside.size == 0:
            problems.append(f"{rule} not be empty, got zeros only; {advice}")
        elif refuses_ct(name, each) and looks_like_ct(volume):
            got = f"{AIR_SHARE:.0%} of its voxels or more at -1000 or -1024, as air in HU"
            todo = "prepare a store of its own with --normalise CHANNEL=ct, or leave it out"
            problems.append(f"{rule} not be CT, got {got}; {todo}")
        elif inside.min() == inside.max():
            got = f"{inside.min():g} everywhere"
            over = " over its non-zero voxels" if each.has_background else ""
            problems.append(f"{rule} vary{over}, got {got}; {advice}")
        else:
            volumes.append(_as_int16(volume))
    raise_if_any(problems)
    return volumes, far


def channel_indices(
    path: Path, count: int, names: Sequence[str], present: Sequence[str]
) -> Sequence[int]:
    """Return the indices of channels among the `count` of a file. Raises InputError for another
    number."""
    indices: Sequence[int] = range(len(names))
    expected = names
    if present:
        indices = indices_of(names, present, str(path))
        expected = present
    if count != len(expected):
        rule = f"{path} must hold {counted(len(expected), 'channel')}, {', '.join(expected)}"
        advice = 'correct "channel_names" or "modality" in the data set\'s dataset.json'
        if not present:
            advice += ", or give one 4D file or one 3D file for each channel"
        raise InputError(f"{rule}, got {count}; {advice}")
    return indices


def _as_int16(volume: Array) -> Array:
    """Return a volume as int16 if that is exact, else as it is."""
    is_whole = volume.dtype.kind != "f" or np.array_equal(np.rint(volume), volume)
    if is_whole and INT16.min <= volume.min() and volume.max() <= INT16.max:
        return volume.astype(np.int16)
    return volume


def _label(path: Path, label: Array, labels: Mapping[int, str]) -> Array:
    """Return the label as uint8. Raises InputError for other codes than `labels`."""
    codes = label_codes(path, label)
    values, counts = np.unique(codes, return_counts=True)
    unknown = [f"{code} ({n} voxels)" for code, n in zip(values, counts) if code not in labels]
    if unknown:
        known = ", ".join(f"{code} {name}" for code, name in sorted(labels.items()))
        rule = f"label {path} must hold only the codes {known}"
        todo = 'change these voxels, or name the code in "labels" of the data set\'s dataset.json'
        raise InputError(f"{rule}, got {', '.join(unknown[:8])}; {todo}")
    return codes


def label_codes(path: Path, label: Array) -> Array:
    """Return a label map as uint8 `(X, Y, Z)`; 0.9999999 is 1. Raises InputError for more than
    three axes, and for other values than integers 0..255."""
    if label.ndim != 3:
        raise InputError(f"label {path} must be 3D, got shape {label.shape}; give one label map")
    if label.dtype == np.uint8:
        return label
    with np.errstate(invalid="ignore"):  # NaN is no code
        codes = np.rint(label).astype(np.uint8)
        wrong = label[~(np.abs(label - codes.astype(np.float64)) <= CODE_TOLERANCE)]
    if wrong.size:
        values, counts = np.unique(wrong, return_counts=True)
        got = ", ".join(f"{value!s} ({n} voxels)" for value, n in zip(values[:8], counts))
        todo = "write it with such, resampled by nearest neighbours if it was"
        raise InputError(f"label {path} must hold integer codes 0..255, got {got}; {todo}")
    return codes
