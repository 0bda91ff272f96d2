"""Can this be a record? What is wrong with one before any voxel is looked at, and before its names become paths."""

import itertools
import math
from operator import itemgetter
from typing import Any, Collection, Iterable, Mapping, Sequence, Tuple

from cpu3d.data.files.arrays import FORMATS
from cpu3d.data.region import Shape3


def check_record(content: Mapping[str, Any]) -> None:
    """Raise KeyError, TypeError, AttributeError or ValueError unless `content`, as of `to_json`, can be a record.

    Its names are bare, so that no file of it lies outside its store; its values have their types, and what contradicts
    itself without a look at the voxels is refused. For every record that is parsed, hence in few calls: a sum is an
    int only of ints, and finite only of finite numbers, and raises TypeError for what is none.
    """
    shape, label_voxels, centres = content["shape"], content["label_voxels"], content["centres"]
    if set(map(type, _TEXTS(content))) != {str}:
        raise TypeError(f"{', '.join(_TEXT_NAMES)} must be text")
    for name in ("case_id", "stem"):
        if not is_bare_name(content[name]):
            raise ValueError(f"{name} must be a name without a folder, got {content[name]!r}")
    if content["format"] not in FORMATS and content["format"] != "":
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {content['format']!r}")
    if content["image_dtype"] not in ("int16", "float16"):
        raise ValueError(f"image_dtype must be int16 or float16, got {content['image_dtype']!r}")
    if not _is_size(shape):
        raise ValueError(f"shape must be three positive integers, got {shape}")
    for a, n, b, m, limit in zip(*_corners(content["box"]), *_corners(content["stored"]), shape):
        if not 0 <= b <= a < a + n <= b + m <= limit:
            raise ValueError(
                f"box must lie in stored, and that in {shape}, got {content['box']} and {content['stored']}"
            )
    _check_numbers(content)
    if type(label_voxels) is not dict or not _is_counts(label_voxels.values(), least=1):
        raise ValueError("label_voxels must be positive integers by code")
    codes = list(map(int, (*label_voxels, *centres)))
    if codes and not 0 <= min(codes) <= max(codes) < 256:
        raise ValueError(f"label codes must be 0 to 255, got {sorted(set(codes))}")
    counts = image_bytes, label_bytes, _ = _COUNTS(content)
    fits = image_bytes and bool(label_bytes) == bool(label_voxels)
    if not _is_counts(counts) or (content["format"] and not fits):
        raise ValueError(f"{', '.join(_COUNT_NAMES)} must be integers that fit image and label, got {counts}")
    places = list(itertools.chain.from_iterable(centres.values()))
    if (places and set(map(len, places)) != {3}) or not all(map(_are_along, zip(*places), shape)):
        raise ValueError(f"centres must be voxels of {shape}")
    _check_origin(content)


def is_bare_name(name: Any) -> bool:
    """Whether a file of this name lies in the folder that it is looked for in."""
    return type(name) is str and name not in ("", ".", "..") and "/" not in name and "\0" not in name


# --- Private helpers ---


_TEXT_NAMES = (
    "case_id", "patient_id", "stem", "format", "image_dtype",
    "image_sha256", "image_voxels_sha256", "label_sha256", "label_voxels_sha256",
)  # fmt: skip
_COUNT_NAMES = ("image_bytes", "label_bytes", "zeroed_voxels")
_TEXTS, _COUNTS = itemgetter(*_TEXT_NAMES), itemgetter(*_COUNT_NAMES)
_CHANNELS = itemgetter("channel_mean", "channel_std", "channel_min", "channel_max", "channel_voxels")


def _check_numbers(content: Mapping[str, Any]) -> None:
    """The statistics and the spacing."""
    mean, std, low, high, voxels = channels = _CHANNELS(content)
    lengths = set(map(len, channels))
    if len(lengths) > 1 or 0 in lengths or not _is_counts(voxels):
        raise ValueError(f"channel_mean, _std, _min, _max and _voxels must be as many, got {lengths}")
    if not (_is_finite((*mean, *std, *low, *high)) and min(std) > 0):
        raise ValueError(f"channel_mean, _std, _min and _max must be finite and _std positive, got {mean} and {std}")
    spacing_mm, error = content["spacing_mm"], content["max_abs_error"]
    if len(spacing_mm) != 3 or not min(spacing_mm) > 0 or not _is_finite((error, *spacing_mm)) or error < 0:
        raise ValueError(f"spacing_mm and max_abs_error must be finite, got {spacing_mm} and {error}")


def _check_origin(content: Mapping[str, Any]) -> None:
    """The grid and the files that the case came from."""
    geometry = content["geometry"]
    if sorted(geometry["shape"]) != sorted(content["shape"]):
        raise ValueError(f"geometry must be of the grid {content['shape']}, turned, got {geometry['shape']}")
    affine = geometry["affine"]
    if not _is_size(geometry["shape"]) or type(geometry["axes"]) is not str or len(geometry["axes"]) != 3:
        raise ValueError(f"geometry must have three axes, got {geometry['shape']} along {geometry['axes']!r}")
    if list(map(len, affine)) != [4] * 4 or not _is_finite(itertools.chain.from_iterable(affine)):
        raise ValueError(f"affine must be 4x4 finite numbers, got {affine}")
    if not _is_counts((geometry["sform_code"], geometry["qform_code"])):
        raise ValueError("sform_code and qform_code must be integers")
    forms = geometry.get("forms", ())
    if len(forms) not in (0, 22) or not _is_finite(forms):
        raise ValueError(f"forms must be none or 22 finite numbers, got {forms}")
    for source in content["sources"]:
        if (
            type(source["path"]) is not str
            or type(source["sha256"]) is not str
            or not _is_counts([source["size_bytes"]])
            or type(source.get("mtime_ns")) not in (int, type(None))
        ):
            raise ValueError(f"sources must be path, size, hash and date, got {source}")


def _is_counts(values: Collection[Any], *, least: int = 0) -> bool:
    return not values or (type(sum(values)) is int and min(values) >= least)


def _are_along(places: Sequence[Any], limit: int) -> bool:
    different = set(places)
    return type(sum(places)) is int and min(different) >= 0 and max(different) < limit


def _is_finite(values: Iterable[Any]) -> bool:
    try:
        return math.isfinite(sum(values))
    except OverflowError:  # of an integer beyond every float
        return False


def _is_size(shape: Any) -> bool:
    return len(shape) == 3 and _is_counts(shape, least=1)


def _corners(region: Mapping[str, Any]) -> Tuple[Shape3, Shape3]:
    start, size = region["start"], region["size"]
    if len(start) != 3 or not _is_counts(start) or not _is_size(size):
        raise ValueError(f"a box must start at three integers and have three positive ones, got {region}")
    return start, size
