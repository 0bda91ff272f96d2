"""A made-up brain tumour data set that is worth learning from, in the Decathlon layout.

Example: python -m cpu3d phantom --out phantom --cases 10 --shape 240 240 155 --seed 0

Nothing here is medicine: the shapes and contrasts are drawn by hand after the BraTS volumes that the trainer is for. A
skull-stripped head lies on zero background; grey and white matter fold, ventricles are filled, the field is uneven, the
noise Rician. Tumours are an oedema around a core around an enhancing rim around necrosis, with the contrasts of MRI:
oedema is bright in FLAIR and T2, the rim in T1 with contrast agent, the core dark in T1. No channel tells the tumour by
its brightness alone: fluid is bright in T2, vessels in T1 with contrast agent, spots and folds of cortex in FLAIR.
"""

import argparse
import contextlib
import json
from pathlib import Path
from typing import Dict, Optional, Sequence, Tuple, Union

import numpy as np

from cpu3d.atomic import writable_folder, write_json
from cpu3d.data.nifti import write_label, write_volume
from cpu3d.data.records import Geometry
from cpu3d.errors import InputError
from cpu3d.lock import locked
from cpu3d.progress import bar
from cpu3d.workers import KILLED, run_jobs, worker_count

VERSION = 1
"""Of what is drawn: the same version, seed, shape and NumPy give the same volumes."""

SMALLEST = 24
"""Voxels along an axis below which the enhancing rim no longer shows."""

CHANNELS = ("FLAIR", "T1w", "t1gd", "T2w")
LABELS = {0: "background", 1: "edema", 2: "non-enhancing tumor", 3: "enhancing tumour"}
"""Names, spelling and codes of MSD Task01_BrainTumour."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, required=True, help="folder to write; made if absent, continued if unfinished"
    )
    parser.add_argument("--cases", type=int, default=10, help="how many (default: 10)")
    parser.add_argument(
        "--shape",
        type=int,
        nargs=3,
        default=(240, 240, 155),
        metavar=("X", "Y", "Z"),
        help="voxels (default: 240 240 155)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything that is random (default: 0)")
    parser.add_argument("--workers", type=int, help="processes (default: one per usable core)")


def run(args: argparse.Namespace) -> int:
    write_phantom(args.out, cases=args.cases, shape=tuple(args.shape), seed=args.seed, workers=args.workers)
    return 0


def write_phantom(
    out: Union[str, Path], *, cases: int, shape: Tuple[int, int, int], seed: int = 0, workers: Optional[int] = None
) -> Path:
    """Write `cases` phantom cases below `out` and return that folder.

    Case n depends on (seed, n, shape) alone, so more cases can be added later and workers do not matter. dataset.json
    comes last. Raises InputError for a shape or count that is too small, a shape that is too large for the memory, and
    a folder that holds anything else or that another process writes.
    """
    workers = worker_count(workers)
    _check(cases, shape, seed)
    out = writable_folder(out, "phantom folder")
    with locked(out, "phantom folder"):
        _claim(out, {"phantom": VERSION, "seed": seed, "shape": list(shape)})
        _write_cases([(out, index, shape, seed) for index in range(cases)], workers)
        write_json(out / "dataset.json", _dataset_json(cases))
    print(f"{cases} phantom cases of {'x'.join(map(str, shape))}x{len(CHANNELS)} in {out}")
    return out


def phantom_case(shape: Tuple[int, int, int], seed: int, index: int) -> Tuple[np.ndarray, np.ndarray]:
    """Draw one case: image `(X, Y, Z, 4)` int16 and label `(X, Y, Z)` uint8, axes R A S, in the order of `CHANNELS`.

    Every case has all three tumour codes; non-zero voxels are exactly the brain, the same in all channels.
    """
    rng = np.random.default_rng([VERSION, seed, index])
    box, start = _head_box(shape, rng)
    head = _Head(box, rng)
    tissue = _tissues(head, rng)
    label, tumour = _tumours(head, tissue, rng)
    image = np.zeros((*shape, len(CHANNELS)), np.int16)
    full_label = np.zeros(shape, np.uint8)
    inside = tuple(slice(a, a + n) for a, n in zip(start, box))
    for number, name in enumerate(CHANNELS):
        image[(*inside, number)] = _signal(name, head, tissue, tumour, rng)
    full_label[inside] = label
    return image, full_label


# --- Private helpers: anatomy. Coordinates run from -1 to 1 across the head's box, whatever its voxels ---


class _Head:
    """The grid of a head and its smooth random fields."""

    def __init__(self, box: Tuple[int, int, int], rng: np.random.Generator):
        self.box = box
        self.rng = rng
        axes = [((np.arange(n) + 0.5) / n * 2 - 1).astype(np.float32) for n in box]
        self.u, self.v, self.w = np.ix_(*axes)
        """Right, front and up: each -1..1 along its own axis, length 1 along the others."""
        wobble = self.field(5)
        # Narrower in front and flatter below, as a brain is.
        narrow = 1 + 0.10 * self.v + 0.05 * self.v**2
        lower = np.where(self.w < 0, 1.0 + 0.10 * self.w, 1.0).astype(np.float32)
        self.radius = np.sqrt((self.u * narrow) ** 2 + self.v**2 + (self.w * lower) ** 2) + 0.035 * wobble
        self.brain = self.radius < 0.97

    def field(self, cells: int) -> np.ndarray:
        """A smooth random field of about unit spread, with `cells` cubic B-spline cells along every axis."""
        values = self.rng.standard_normal((cells + 3,) * 3, dtype=np.float32)
        for axis in (2, 1, 0):  # the last step is the large one, and along the first axis it moves whole planes
            values = _interpolate(values, axis, self.box[axis], cells)
        return values * np.float32(2.6)  # a spline averages: 2.6 brings the spread back to one

    def ball(self, centre: Sequence[float], radii: Sequence[float]) -> np.ndarray:
        """Squared distance from `centre` in units of `radii`: below 1 within the ellipsoid."""
        u, v, w = (((x - c) / r) ** 2 for x, c, r in zip((self.u, self.v, self.w), centre, radii))
        return (u + v + w).astype(np.float32)


def _interpolate(values: np.ndarray, axis: int, size: int, cells: int) -> np.ndarray:
    """Bring `cells + 3` uniform cubic B-spline coefficients along `axis` to `size` voxels, sampled at their middles.

    Four multiplications and additions, because a matrix product's rounding changes with its library's threads.
    """
    position = (np.arange(size) + 0.5) / size * cells
    cell = np.minimum(position.astype(int), cells - 1)
    t = position - cell
    weights = ((1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, -3 * t**3 + 3 * t**2 + 3 * t + 1, t**3)
    along = [1, 1, 1]
    along[axis] = size
    result = np.float32(0)
    for offset, weight in enumerate(weights):
        part = values.take(cell + offset, axis)
        part *= (weight / 6).astype(np.float32).reshape(along)
        part += result
        result = part
    return result


def _head_box(shape: Tuple[int, int, int], rng: np.random.Generator):
    """Size and first voxel of the head: 135x174x136 of 240x240x155, give or take, and near the middle."""
    share = np.array([135 / 240, 174 / 240, 136 / 155]) * rng.uniform(0.96, 1.04, 3)
    box = tuple(round(float(n * s)) for n, s in zip(shape, share))
    start = tuple(int((n - size) * rng.uniform(0.4, 0.6)) for n, size in zip(shape, box))
    return box, start


def _tissues(head: _Head, rng: np.random.Generator) -> Dict[str, np.ndarray]:
    """How much of each voxel is fluid, grey or white matter, vessel or bright cap; soft edges are partial volume."""
    u, v, w = head.u, head.v, head.w
    depth = np.clip(0.97 - head.radius, 0, None)
    # Sulci are the zero surfaces of a field: a line of fluid with a ribbon of cortex on both sides, fading with depth.
    bend = head.field(15)
    cerebellum = _soft(0.10, np.maximum(w + 0.42 + 0.25 * v, 0) + np.maximum(v + 0.15, 0), 0.03)
    bend = np.abs(bend * (1 - cerebellum) + head.field(26) * cerebellum)
    fissure = np.abs(u) + 0.02 * np.abs(head.field(6)) + 0.6 * np.maximum(0.05 - np.maximum(w, 0.6 * v), 0)
    fluid = np.maximum(_soft(0.17, bend + 0.7 * depth, 0.09), _soft(0.022, fissure, 0.010))
    fluid = np.maximum(fluid, _soft(0.02, depth, 0.012))
    grey = np.maximum(_soft(0.80, bend + 1.9 * depth, 0.12), _soft(0.07, depth, 0.02))
    grey = np.maximum(grey, _soft(0.055, fissure, 0.02))
    for side in (-1, 1):
        grey = np.maximum(grey, _soft(1, head.ball((side * 0.17, -0.05, 0.02), (0.12, 0.16, 0.13)), 0.15))
        grey = np.maximum(grey, _soft(1, head.ball((side * 0.34, 0.10, 0.04), (0.09, 0.22, 0.16)), 0.15))
    warp = 0.25 * head.field(6)
    size = rng.uniform(0.85, 1.25)
    ventricle = np.full(head.box, 9.0, np.float32)
    for side in (-1, 1):
        lean = 0.10 + 0.05 * np.abs(v - 0.1) - 0.06 * (v > 0.2) * (v - 0.2)
        body = (
            ((u - side * lean) / (0.075 * size)) ** 2
            + ((v - 0.02) / 0.42) ** 2
            + ((w - 0.22 + 0.25 * v**2) / (0.11 * size)) ** 2
        )
        horn = head.ball((side * 0.26, -0.36, 0.02), (0.065 * size, 0.16, 0.14))
        ventricle = np.minimum(ventricle, np.minimum(body, horn))
    ventricle = np.minimum(ventricle, head.ball((0, -0.02, -0.02), (0.025, 0.14, 0.16)))
    ventricle = ventricle + warp
    inside = _soft(1, ventricle, 0.25)
    caps = _soft(1.9, ventricle, 0.35) * (1 - inside) * np.clip(0.45 + 0.5 * head.field(7), 0, 1)
    fluid = np.maximum(fluid, inside)
    grey = grey * (1 - fluid)
    vessel = _soft(0.10, np.hypot(head.field(9), head.field(9)), 0.05) * (head.radius > 0.45)
    sinus = _soft(1, (u / 0.035) ** 2 + ((head.radius - 0.93) / 0.05) ** 2 + 8 * np.maximum(0.1 - w, 0), 0.3)
    spots = _soft(-1.9, -head.field(12), 0.15) * (1 - fluid)
    return {
        "fluid": fluid,
        "grey": grey,
        "white": 1 - fluid - grey,
        "vessel": np.maximum(vessel, sinus),
        "caps": np.maximum(caps, 0.8 * spots),
        "ventricle": inside,
        "texture": 0.6 * head.field(18) + 0.4 * head.field(8),
    }


def _soft(limit: float, values: np.ndarray, width: float) -> np.ndarray:
    """1 well below `limit`, 0 well above, a straight ramp over `width` on both sides: cheaper than a sigmoid."""
    return np.clip((limit - values) * np.float32(0.5 / width) + np.float32(0.5), 0, 1)


# --- Private helpers: tumours ---


def _tumours(head: _Head, tissue: Dict[str, np.ndarray], rng: np.random.Generator):
    """Labels, and the shares of oedema, core, necrosis and rim that the signal is mixed from."""
    rough, fine = (np.clip(head.field(cells), -1.6, 1.6) for cells in (8, 15))
    share = {name: np.zeros(head.box, np.float32) for name in ("oedema", "core", "necrosis", "rim")}
    allowed = head.brain & (tissue["ventricle"] < 0.5)
    label = np.zeros(head.box, np.uint8)
    for lesion in range(1 + (rng.random() < 0.3)):
        reach = rng.uniform(0.34, 0.50) if lesion == 0 else rng.uniform(0.16, 0.24)
        centre = _place(rng)
        voxel = 2 / min(head.box)
        stretch = rng.uniform(0.85, 1.2, 3) * reach
        distance = np.sqrt(head.ball(centre, stretch * (1.1, 0.85, 1.1)))
        outer = distance + 0.20 * rough + 0.10 * fine + 0.25 * tissue["grey"]
        inner = distance + 0.07 * rough + 0.05 * fine
        core_edge = rng.uniform(0.55, 0.72)
        thick = max(rng.uniform(0.10, 0.16), 1.3 * voxel / reach)
        edge = voxel / reach * 0.5 + 0.02
        whole = _soft(1, outer, edge * 1.5) * allowed
        core = _soft(core_edge, inner, edge) * allowed
        shell = _soft(core_edge - 0.06, inner, edge) * allowed
        dead = _soft(max(core_edge - 0.06 - thick, 0.12), inner, edge) * allowed
        whole = np.maximum(whole, core)
        share["oedema"] = np.maximum(share["oedema"], whole)
        share["core"] = np.maximum(share["core"], core)
        share["rim"] = np.maximum(share["rim"], shell)
        share["necrosis"] = np.maximum(share["necrosis"], dead)
    label[share["oedema"] > 0.5] = 1
    label[share["core"] > 0.5] = 2
    label[share["rim"] > 0.5] = 3
    label[share["necrosis"] > 0.5] = 2
    return label, share


def _place(rng: np.random.Generator) -> Tuple[float, float, float]:
    """A place within a hemisphere, off the midline and inside the brain."""
    while True:
        u, v, w = rng.uniform((0.25, -0.6, -0.25), (0.62, 0.6, 0.55))
        if u * u + v * v + w * w < 0.42:
            return (float(u) * rng.choice((-1, 1)), float(v), float(w))


# --- Private helpers: signal ---

_SUBSTANCES = ("fluid", "grey", "white", "vessel", "caps", "oedema", "core", "rim", "necrosis")
_SIGNALS = {
    "FLAIR": (70, 275, 225, 190, 380, 360, 320, 340, 200),
    "T1w": (130, 320, 430, 300, 400, 290, 250, 310, 180),
    "t1gd": (130, 330, 430, 760, 400, 295, 265, 760, 175),
    "T2w": (640, 380, 285, 200, 330, 540, 500, 430, 600),
}
"""Channel -> brightness of each of `_SUBSTANCES`, in the arbitrary units of BraTS volumes."""


def _signal(name: str, head: _Head, tissue: Dict[str, np.ndarray], tumour: Dict[str, np.ndarray], rng) -> np.ndarray:
    """One channel in the head's box, int16: tissues mixed, tumour over them, uneven field, Rician noise, no skull."""
    level = {what: value * rng.uniform(0.94, 1.06) for what, value in zip(_SUBSTANCES, _SIGNALS[name])}
    signal = tissue["fluid"] * level["fluid"] + tissue["grey"] * level["grey"] + tissue["white"] * level["white"]
    for what in ("vessel", "caps"):
        signal += tissue[what] * (level[what] - signal)
    for what in ("oedema", "core", "rim", "necrosis"):
        signal += tumour[what] * (level[what] - signal)
    signal *= 1 + 0.06 * tissue["texture"]
    signal *= np.exp(0.16 * head.field(3)) * rng.uniform(0.7, 1.4)
    brain = head.brain
    sigma = 0.045 * level["white"]
    noise = rng.standard_normal((2, int(np.count_nonzero(brain))), dtype=np.float32) * np.float32(sigma)
    out = np.zeros(head.box, np.int16)
    out[brain] = np.clip(np.rint(np.hypot(signal[brain] + noise[0], noise[1])), 1, 32767)
    return out


# --- Private helpers: files ---

_Job = Tuple[Path, int, Tuple[int, int, int], int]
"""Folder, number of the case, shape, seed."""


def _check(cases: int, shape: Sequence[int], seed: int) -> None:
    problems = []
    if cases < 1:
        problems.append(f"--cases must be at least 1, got {cases}; ask for some")
    if len(shape) != 3 or min(shape) < SMALLEST or max(shape) > 32767:
        problems.append(f"--shape must be three numbers from {SMALLEST} to 32767, got {tuple(shape)}; try 64 64 48")
    if seed < 0:
        problems.append(f"--seed must not be negative, got {seed}; choose another")
    if problems:
        raise InputError(*problems)


def _claim(out: Path, identity: dict) -> None:
    """Take an empty folder, or take up an earlier one of the same phantom; phantom.json says which it is."""
    path = out / "phantom.json"
    rule = f"phantom folder {out} must be empty, or the same phantom to be continued"
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            found = None
        if found != identity:
            raise InputError(f"{rule} ({identity}), got {found}; choose another folder")
    elif any(out.iterdir()):
        raise InputError(f"{rule}, got other content; choose another folder")
    for name in ("imagesTr", "labelsTr"):
        (out / name).mkdir(exist_ok=True)
        for partial in (out / name).glob(".*.partial"):
            partial.unlink(missing_ok=True)
    if not path.is_file():
        write_json(path, identity)


def _write_cases(jobs: Sequence[_Job], workers: int) -> None:
    """Write all cases, in `workers` processes."""
    out, _, shape, _ = jobs[0]
    try:
        results = run_jobs(_write_case, jobs, workers)
        with contextlib.closing(results), bar("phantom", total=len(jobs)) as advance:
            for _, result in results:
                if result is KILLED:
                    raise MemoryError
                advance()
    except MemoryError:
        told = "x".join(map(str, shape))
        raise InputError(
            f"--shape must fit into memory, got {told}; choose a smaller one or run again with fewer --workers"
        ) from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"what is in {out} is kept; run the same command again to continue") from None


def _write_case(job: _Job) -> None:
    """Write a case's two files unless both are there; each appears whole or not at all."""
    out, index, shape, seed = job
    image_path, label_path = (out / folder / f"{_case_id(index)}.nii.gz" for folder in ("imagesTr", "labelsTr"))
    if image_path.is_file() and label_path.is_file():
        return
    image, label = phantom_case(shape, seed, index)
    affine = np.diag([1.0, 1.0, 1.0, 1.0])
    geometry = Geometry(
        shape=tuple(shape), affine=tuple(map(tuple, affine.tolist())), axes="RAS", sform_code=1, qform_code=1
    )
    write_volume(image_path, image, geometry, compression=1)
    write_label(label_path, label, geometry)


def _case_id(index: int) -> str:
    return f"BRATS_{index + 1:03d}"


def _dataset_json(cases: int) -> dict:
    """A dataset.json like that of MSD Task01_BrainTumour."""
    ids = [_case_id(index) for index in range(cases)]
    return {
        "name": "BRATS phantom",
        "description": "Made-up gliomas in made-up brains, for trials of the software; no patient's data",
        "tensorImageSize": "4D",
        "modality": {str(index): name for index, name in enumerate(CHANNELS)},
        "labels": {str(code): name for code, name in LABELS.items()},
        "numTraining": cases,
        "numTest": 0,
        "training": [{"image": f"./imagesTr/{i}.nii.gz", "label": f"./labelsTr/{i}.nii.gz"} for i in ids],
        "test": [],
    }
