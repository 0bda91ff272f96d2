"""The slices of cases in a page: the volumes that `viewer.html.j2` shows and `viewer.js` decodes.

A volume is cropped to the box of voxels that are not zero and held as one byte a voxel: 0 outside
of the brain, from 1 on steps of equal width from the 0.1th to the 99.9th percentile of the brain;
values beyond are clipped. Where 0 is no background, all voxels have a step; those of a CT in
Hounsfield units are finer around soft tissue, and its box leaves out air. There are as many steps,
at most 255, as let all modalities of a case fit 3 MB. Stored is gzip, in base64, of each voxel's
difference to the mean of the three before it along X, Y and Z, modulo 256: a quarter less than gzip
of the voxels themselves."""

import base64
import itertools
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.labels import region_mask
from cpu3d.data.manifest import Geometry
from cpu3d.data.nifti import is_placed, ras_spacing_mm, ras_to_file
from cpu3d.data.normalise import Kind, Normalisation, of_all
from cpu3d.data.region import Region, bounding_box
from cpu3d.pages.page import render_page
from cpu3d.util.atomic import atomic_write

# Of the modalities and labels of a case in the page; more only if LEAST steps take more.
CASE_BYTES = 3_000_000
STEPS = 255  # most grey values
LEAST = 24  # fewest
# Percentiles of the brain: the ends of the steps, and black and white at first.
RANGE = (0.1, 99.9)
WINDOW = (0.5, 99.5)
# A CT in Hounsfield units: the share of its steps below each value, and windows as (black, white).
HU_STEPS = {-1024.0: 0.0, -200.0: 0.15, 300.0: 0.85, 3071.0: 1.0}
HU_WINDOWS = {
    "abdomen": (-150, 250),
    "brain": (0, 80),
    "bone": (-500, 1300),
    "lung": (-1350, 150),
}
AIR_BELOW = -500  # HU

# Oedema green, core red, enhancing yellow, as the field draws them, in the tones of Okabe and Ito,
# which colour-blind readers can tell apart; then those of other regions.
COLOURS = {"WT": "#009e73", "TC": "#d55e00", "ET": "#f0e442", "RC": "#cc79a7"}
MORE_COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#d55e00", "#f0e442", "#0072b2")


@dataclass(frozen=True)
class ViewedCase:
    """A case to show; its volumes have axes R A S and are on the grid of `geometry`."""

    name: str
    image: np.ndarray  # (X, Y, Z, C) of finite numbers, of which a channel at a time is read
    channels: Sequence[str]
    geometry: Geometry
    regions: Mapping[str, Sequence[int]] = field(default_factory=dict)
    labels: Mapping[int, str] = field(default_factory=dict)
    ignore: Optional[int] = None  # code of the truth's voxels that are not annotated
    truth: Optional[np.ndarray] = None  # (X, Y, Z) uint8 of label codes, as each of `predictions`
    predictions: Mapping[str, np.ndarray] = field(default_factory=dict)
    note: str = ""  # such as "best"
    scores: str = ""
    normalisation: Sequence[Normalisation] = ()
    """Of the channels, which tells whether 0 is background; it is without."""

    @property
    def ignored_share(self) -> float:
        """Share of the truth's voxels, in the page's box or not, that are not annotated."""
        if self.truth is None or self.ignore is None:
            return 0.0
        return float(np.mean(self.truth == self.ignore))


def viewer(cases: Iterable[ViewedCase]) -> Dict[str, Any]:
    """The `viewer` of `viewer.html.j2`: JSON about the cases, and their volumes as base64 by name.

    Takes one case after the other, so that a generator need not hold them all.
    """
    shown = []
    volumes = {}
    for number, case in enumerate(cases):
        about, packed = _case(case, f"case-{number}")
        shown.append(about)
        for name, content in packed.items():
            volumes[name] = base64.b64encode(content).decode("ascii")
    return {"cases": shown, "volumes": volumes}


def write_case_page(out: Path, case: ViewedCase, made_by: str) -> None:
    """Write the page of one case, atomically."""
    template = Path(__file__).with_name("view.html.j2")
    page = render_page(template, title=case.name, made_by=made_by, viewer=viewer([case]))
    with atomic_write(out, "w") as file:
        file.write(page)


def pack(voxels: np.ndarray) -> bytes:
    """uint8 `(X, Y, Z)` as the page holds it, before base64."""
    before = np.zeros(voxels.shape, np.uint16)
    before[1:] += voxels[:-1]
    before[:, 1:] += voxels[:, :-1]
    before[:, :, 1:] += voxels[:, :, :-1]
    differences = (voxels - before // 3).astype(np.uint8)
    # 31: gzip framing, with a zero time stamp. Noise does not repeat: a search for more than runs
    # takes five times as long, and the result is larger.
    packer = zlib.compressobj(6, zlib.DEFLATED, 31, 9, zlib.Z_RLE)
    return packer.compress(differences.tobytes()) + packer.flush()


def in_steps(
    volume: np.ndarray, low: float, high: float, steps: int, background: float = 0
) -> np.ndarray:
    """uint8: 0 for the background in `volume`, else 1 for `low` and less up to `steps` for `high`
    and more."""
    scaled = np.clip((volume - low) / (high - low), 0, 1) * (steps - 1)
    return np.where(volume != background, 1 + np.rint(scaled), 0).astype(np.uint8)


# --- Private helpers ---


def _case(case: ViewedCase, name: str) -> Tuple[Dict[str, Any], Dict[str, bytes]]:
    """The page's JSON about a case, and its volumes, packed."""
    box = _box(case)
    inside = box.slices(case.image.shape[:3])
    truth_key = None
    predictions = []
    shown = []  # labels, the truth first
    packed = {}
    if case.truth is not None:
        truth_key = f"{name}-truth"
        shown.append(np.ascontiguousarray(case.truth[inside]))
        packed[truth_key] = pack(shown[-1])
    for number, (answer, label) in enumerate(case.predictions.items()):
        key = f"{name}-prediction-{number}"
        shown.append(np.ascontiguousarray(label[inside]))
        packed[key] = pack(shown[-1])
        predictions.append({"name": answer, "id": key})
    start = _start(shown[0] if shown else None, case.regions, box.size)
    spare = CASE_BYTES * 3 / 4 - sum(map(len, packed.values()))  # base64 makes four bytes of three
    modalities = []
    own = spare / len(case.channels)
    kinds = of_all(case.normalisation, len(case.channels))
    for number, (channel, each) in enumerate(zip(case.channels, kinds)):
        key = f"{name}-image-{number}"
        about, packed[key] = _modality(case.image[(*inside, number)], own, each)
        modalities.append({"name": channel, "id": key, "unit": "", **about})
    to_voxel = ras_to_file(case.geometry)
    to_voxel[:3, 3] += to_voxel[:3, :3] @ box.start
    to_mm = np.asarray(case.geometry.affine) @ to_voxel
    return {
        "name": case.name,
        "note": case.note,
        "scores": case.scores,
        "shape": box.size,
        "spacing": ras_spacing_mm(case.geometry),
        "to_voxel": to_voxel[:3].tolist(),
        "to_mm": to_mm[:3].tolist(),
        "start": start,
        "placed": is_placed(case.geometry),
        "modalities": modalities,
        "labels": {int(code): label for code, label in case.labels.items()},
        "regions": _coloured(case.regions),
        "ignore": case.ignore,
        "ignored_share": case.ignored_share,
        "truth": truth_key,
        "predictions": predictions,
    }, packed


def _coloured(regions: Mapping[str, Sequence[int]]) -> List[Dict[str, Any]]:
    """The page's JSON about regions."""
    more_colours = itertools.cycle(MORE_COLOURS)
    coloured = []
    for region, codes in regions.items():
        colour = COLOURS[region] if region in COLOURS else next(more_colours)
        coloured.append({"name": region, "codes": [int(code) for code in codes], "colour": colour})
    return coloured


def _box(case: ViewedCase) -> Region:
    """The box around all voxels that are not background in any modality or label."""
    mask = np.zeros(case.image.shape[:3], bool)
    for number, each in enumerate(of_all(case.normalisation, len(case.channels))):
        volume = case.image[..., number]
        if each.has_background:
            mask |= volume != 0
        elif _is_in_hu(volume, each):
            mask |= volume > AIR_BELOW
        else:
            mask[...] = True
    if case.truth is not None:
        mask |= (case.truth != 0) & (case.truth != case.ignore)
    for prediction in case.predictions.values():
        mask |= prediction != 0
    return bounding_box(mask)


def _start(
    label: Optional[np.ndarray], regions: Mapping[str, Sequence[int]], size: Sequence[int]
) -> List[int]:
    """The slice of each axis with most voxels of all regions; the middle one without any."""
    middle = [n // 2 for n in size]
    if label is None:
        return middle
    codes = sorted({code for region in regions.values() for code in region})
    mask = region_mask(label, codes)
    if not mask.any():
        return middle
    return [int(mask.sum(axis=tuple({0, 1, 2} - {axis})).argmax()) for axis in range(3)]


def _is_in_hu(volume: np.ndarray, each: Normalisation) -> bool:
    """Whether a CT has air in Hounsfield units, and not, for example, 1024 added."""
    return each.kind is Kind.CT and float(volume.min()) < AIR_BELOW


def _modality(
    volume: np.ndarray, most_bytes: float, each: Normalisation
) -> Tuple[Dict[str, Any], bytes]:
    """The page's JSON about a modality, and its voxels, packed into `most_bytes` if LEAST steps
    fit."""
    # So that the window and its steps do not overflow.
    volume = np.clip(volume, -1e30, 1e30).astype(np.float32)
    if _is_in_hu(volume, each):
        return _hounsfield(volume, most_bytes, each)
    background = 0 if each.has_background else np.nan
    brain = volume[volume != background]
    low = 0
    high = 1
    black = 0
    white = 1
    if brain.size:
        low, high, black, white = np.percentile(brain, (*RANGE, *WINDOW)).tolist()
    if not low < high:
        high = low + max(1.0, abs(low))
    if not black < white:
        black = low
        white = high
    steps, packed = _packed(volume, (low, high), background, most_bytes)
    return {"low": low, "high": high, "levels": steps, "window": [black, white]}, packed


def _hounsfield(
    volume: np.ndarray, most_bytes: float, each: Normalisation
) -> Tuple[Dict[str, Any], bytes]:
    """The same of a CT, with the value of each step, and windows by name."""
    values = list(HU_STEPS)
    shares = list(HU_STEPS.values())
    steps, packed = _packed(np.interp(volume, values, shares), (0, 1), np.nan, most_bytes)
    step_values = np.interp(np.linspace(0, 1, steps), shares, values)
    window = list(HU_WINDOWS["abdomen"])
    if each.low is not None:
        window = [each.low, each.high]
    about = {"low": values[0], "high": values[-1], "levels": steps, "window": window, "unit": "HU"}
    more = {"values": np.round(step_values, 1).tolist(), "windows": HU_WINDOWS}
    return {**about, **more}, packed


def _packed(
    volume: np.ndarray, ends: Tuple[float, float], background: float, most_bytes: float
) -> Tuple[int, bytes]:
    """The number of steps, and a volume in them, packed into `most_bytes` if LEAST steps fit."""
    low, high = ends
    shown = np.count_nonzero(volume != background)
    steps = STEPS
    packed = pack(in_steps(volume, low, high, STEPS, background))
    while len(packed) > most_bytes and steps > LEAST:
        # Half as many steps spare about a bit a voxel that is shown.
        fewer = 2 ** (-8 * (len(packed) - most_bytes) / max(shown, 1))
        steps = max(LEAST, int(steps * min(0.95, fewer)))
        packed = pack(in_steps(volume, low, high, steps, background))
    return steps, packed
