"""One phantom: a made-up head with a tumour, its four channels and its label, drawn from random numbers.

Nothing here is medicine: the shapes and contrasts are drawn by hand after BraTS volumes. A skull-stripped head lies on
zero background; grey and white matter fold, ventricles are filled, the field is uneven, the noise Rician. Tumours are
an oedema around a core around an enhancing rim around necrosis, with the contrasts of MRI. No channel tells the tumour
by its brightness alone: fluid is bright in T2, vessels in T1 with contrast agent, spots and folds of cortex in FLAIR.

With the context "count" all lesions look the same, and what their rim is *called* follows a rule about the rest of the
head (`RULE`): enhancing tumour is not to be had from a patch that ends within `CLEARANCE` of the core. A small kernel
in the necrosis is always enhancing, as a region without voxels has next to no gradient in a Dice. From a volume's mean
and spread alone a linear guess is right in 61% of the cases.

Coordinates run from -1 to 1 across the head's box, whatever its voxels: u to the right, v to the front, w up.
"""

from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.region import Shape3

VERSION = 1
"""Of what is drawn: the same version, seed, shape and NumPy give the same volumes."""

CHANNELS = ("FLAIR", "T1w", "t1gd", "T2w")
LABELS = {0: "background", 1: "edema", 2: "non-enhancing tumor", 3: "enhancing tumour"}
"""Names, spelling and codes of MSD Task01_BrainTumour."""
EDEMA, NON_ENHANCING, ENHANCING = 1, 2, 3

SHARES = (135 / 240, 174 / 240, 136 / 155)
"""Of a volume's voxels along each axis that a middling head takes."""

SMALLEST, LARGEST = 0.96, 1.04
"""Of a middling head along any axis."""

SUBSTANCES = ("fluid", "grey", "white", "vessel", "caps", "oedema", "core", "rim", "necrosis")
SIGNALS = {
    "FLAIR": (70, 275, 225, 190, 380, 360, 320, 340, 200),
    "T1w": (130, 320, 430, 300, 400, 290, 250, 310, 180),
    "t1gd": (130, 330, 430, 760, 400, 295, 265, 760, 175),
    "T2w": (640, 380, 285, 200, 330, 540, 500, 430, 600),
}
"""Channel -> brightness of each of `SUBSTANCES`, in the arbitrary units of BraTS volumes."""

CONTEXTS = ("none", "count")
RULE = "the lesion is the only one"
"""When a lesion's rim is enhancing tumour (code 3) and not non-enhancing (code 2), in the context "count"."""

CLEARANCE = 0.42
"""Share of the head's length, front to back, that is at least between a core and whatever tells its rule."""

Fields = Dict[str, np.ndarray]
"""Substance -> how much of each voxel of the head's box it is, 0 to 1; soft edges are partial volume."""


def phantom_case(
    shape: Shape3, seed: int, index: int, context: str = "none", holds: Optional[bool] = None
) -> Tuple[np.ndarray, np.ndarray]:
    """Draw one case: image `(X, Y, Z, 4)` int16 and label `(X, Y, Z)` uint8, axes R A S, in the order of `CHANNELS`.

    Non-zero voxels are exactly the brain, the same in all channels. The rule of `context` holds as given, or else in
    every other case, from the first one on. Every case has all three tumour codes from 40 voxels along each axis on.
    """
    rng = np.random.default_rng([VERSION, seed, index])
    # 135x174x136 of 240x240x155, give or take, and near the middle.
    box = tuple(round(float(n * s)) for n, s in zip(shape, np.array(SHARES) * rng.uniform(SMALLEST, LARGEST, 3)))
    inside = tuple(slice(a, a + n) for n, a in ((n, int((m - n) * rng.uniform(0.4, 0.6))) for m, n in zip(shape, box)))
    head = Head(box, rng)
    tissue = tissues(head)
    roughness = [np.clip(head.field(cells), -1.6, 1.6) for cells in (8, 15)]
    lesions, rim = usual_lesions(head) if context == "none" else [], ENHANCING
    if context == "count":
        holds = index % 2 == 0 if holds is None else holds
        lesions = lesions_apart(head, np.random.default_rng([VERSION, seed, index, 3]))[: 1 if holds else 2]
        rim = ENHANCING if holds else NON_ENHANCING
    found, tumour = tumours(head, tissue, lesions, roughness, rim)
    image, label = np.zeros((*shape, len(CHANNELS)), np.int16), np.zeros(shape, np.uint8)
    for number, name in enumerate(CHANNELS):
        image[(*inside, number)] = signal_of(name, head, {**tissue, **tumour})
    label[inside] = found
    return image, label


def blind_patch(context: str, shape: Shape3) -> Optional[int]:
    """Voxels from front to back of the longest patch that cannot tell the rule in any head of volumes of this shape.

    CLEARANCE of the shortest head: 70 of 240. None where there is nothing to tell.
    """
    return int(CLEARANCE * SMALLEST * SHARES[1] * shape[1]) if context == "count" else None


class Head:
    """The grid of a head, the random numbers that it is drawn from and smooth random fields of them."""

    def __init__(self, box: Shape3, rng: np.random.Generator):
        self.box, self.rng = box, rng
        axes = [((np.arange(n) + 0.5) / n * 2 - 1).astype(np.float32) for n in box]
        self.u, self.v, self.w = np.ix_(*axes)
        """Right, front and up: each -1..1 along its own axis, length 1 along the others."""
        wobble = self.field(5)
        # Narrower in front and flatter below, as a brain is.
        narrow = 1 + 0.10 * self.v + 0.05 * self.v**2
        lower = np.where(self.w < 0, 1.0 + 0.10 * self.w, 1.0).astype(np.float32)
        self.radius = np.sqrt((self.u * narrow) ** 2 + self.v**2 + (self.w * lower) ** 2) + 0.035 * wobble
        self.brain = self.radius < 0.97
        self.voxel = 2 / min(box)

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


def tissues(head: Head) -> Fields:
    """Fluid, grey and white matter, vessels and bright caps, with the ventricles and a texture."""
    u, v, w = head.u, head.v, head.w
    depth = np.clip(0.97 - head.radius, 0, None)
    # Sulci are the zero surfaces of a field: a line of fluid with a ribbon of cortex on both sides, fading with depth.
    bend = head.field(15)
    cerebellum = soft(0.10, np.maximum(w + 0.42 + 0.25 * v, 0) + np.maximum(v + 0.15, 0), 0.03)
    bend = np.abs(bend * (1 - cerebellum) + head.field(26) * cerebellum)
    fissure = np.abs(u) + 0.02 * np.abs(head.field(6)) + 0.6 * np.maximum(0.05 - np.maximum(w, 0.6 * v), 0)
    fluid = np.maximum(soft(0.17, bend + 0.7 * depth, 0.09), soft(0.022, fissure, 0.010))
    fluid = np.maximum(fluid, soft(0.02, depth, 0.012))
    grey = np.maximum(soft(0.80, bend + 1.9 * depth, 0.12), soft(0.07, depth, 0.02))
    grey = np.maximum(grey, soft(0.055, fissure, 0.02))
    for side in (-1, 1):  # two nuclei a side
        grey = np.maximum(grey, soft(1, head.ball((side * 0.17, -0.05, 0.02), (0.12, 0.16, 0.13)), 0.15))
        grey = np.maximum(grey, soft(1, head.ball((side * 0.34, 0.10, 0.04), (0.09, 0.22, 0.16)), 0.15))
    warp, size = 0.25 * head.field(6), head.rng.uniform(0.85, 1.25)
    ventricle = np.full(head.box, 9.0, np.float32)
    for side in (-1, 1):
        lean = 0.10 + 0.05 * np.abs(v - 0.1) - 0.06 * (v > 0.2) * (v - 0.2)
        across, along = ((u - side * lean) / (0.075 * size)) ** 2, ((v - 0.02) / 0.42) ** 2
        body = across + along + ((w - 0.22 + 0.25 * v**2) / (0.11 * size)) ** 2
        horn = head.ball((side * 0.26, -0.36, 0.02), (0.065 * size, 0.16, 0.14))
        ventricle = np.minimum(ventricle, np.minimum(body, horn))
    ventricle = np.minimum(ventricle, head.ball((0, -0.02, -0.02), (0.025, 0.14, 0.16))) + warp
    inside = soft(1, ventricle, 0.25)
    caps = soft(1.9, ventricle, 0.35) * (1 - inside) * np.clip(0.45 + 0.5 * head.field(7), 0, 1)
    fluid = np.maximum(fluid, inside)
    grey = grey * (1 - fluid)
    vessel = soft(0.10, np.hypot(head.field(9), head.field(9)), 0.05) * (head.radius > 0.45)
    sinus = soft(1, (u / 0.035) ** 2 + ((head.radius - 0.93) / 0.05) ** 2 + 8 * np.maximum(0.1 - w, 0), 0.3)
    spots = soft(-1.9, -head.field(12), 0.15) * (1 - fluid)
    return {
        "fluid": fluid,
        "grey": grey,
        "white": 1 - fluid - grey,
        "vessel": np.maximum(vessel, sinus),
        "caps": np.maximum(caps, 0.8 * spots),
        "ventricle": inside,
        "texture": 0.6 * head.field(18) + 0.4 * head.field(8),
    }


def soft(limit: float, values: np.ndarray, width: float) -> np.ndarray:
    """1 well below `limit`, 0 well above, a straight ramp over `width` on both sides: cheaper than a sigmoid."""
    return np.clip((limit - values) * np.float32(0.5 / width) + np.float32(0.5), 0, 1)


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


@dataclass(frozen=True)
class Lesion:
    """One tumour: an ellipsoid with rough borders, and three smaller ones in it. In the head's coordinates."""

    centre: Sequence[float]
    radii: Sequence[float]
    """Of the oedema, along the axes; what follows but `reach` are shares of them."""
    reach: float
    """A middling radius, which the width of soft edges follows."""
    core_edge: float
    rim: float
    """How thick it is."""
    kernel: float = 0.0
    """Radius of an enhancing kernel in the necrosis."""


def usual_lesions(head: Head) -> List[Lesion]:
    """One tumour, in three cases of ten with a smaller one, anywhere within the hemispheres, off the midline."""
    lesions, rng = [], head.rng
    for number in range(1 + (rng.random() < 0.3)):
        reach, centre = rng.uniform(0.34, 0.50) if number == 0 else rng.uniform(0.16, 0.24), None
        while centre is None:
            u, v, w = rng.uniform((0.25, -0.6, -0.25), (0.62, 0.6, 0.55))
            if u * u + v * v + w * w < 0.42:
                centre = (float(u) * rng.choice((-1, 1)), float(v), float(w))
        radii = rng.uniform(0.85, 1.2, 3) * reach * (1.1, 0.85, 1.1)
        lesions.append(Lesion(centre, radii, reach, rng.uniform(0.55, 0.72), _rim_thickness(head, reach, rng)))
    return lesions


def lesions_apart(head: Head, rng: np.random.Generator) -> List[Lesion]:
    """One lesion near the front or the back, and another at the other end.

    They are flat from front to back, so that as much as possible lies between them.
    """
    lesions, (pole, side), _ = [], rng.choice((-1.0, 1.0), 2), rng.random(2)  # two numbers that nothing needs any more
    for sign in (1, -1):
        u, v, w = rng.uniform((0.25, 0.63, -0.05), (0.42, 0.67, 0.25))
        reach = rng.uniform(0.28, 0.32)
        radii = rng.uniform(0.9, 1.1, 3) * reach * (1.45, 0.68, 1.35)
        core_edge, thick = rng.uniform(0.64, 0.72), _rim_thickness(head, reach, rng)
        lesions.append(Lesion((sign * side * u, sign * pole * v, w), radii, reach, core_edge, thick, kernel=0.27))
    return lesions


def tumours(
    head: Head, tissue: Fields, lesions: Sequence[Lesion], roughness: Sequence[np.ndarray], rim: int
) -> Tuple[np.ndarray, Fields]:
    """Labels, with code `rim` for the rims, and oedema, core, necrosis, rim and kernel.

    `roughness` is a coarse and a fine field that the borders follow.
    """
    rough, fine = roughness
    share = {name: np.zeros(head.box, np.float32) for name in ("oedema", "core", "necrosis", "rim", "kernel")}
    allowed = head.brain & (tissue["ventricle"] < 0.5)
    for lesion in lesions:
        distance = np.sqrt(head.ball(lesion.centre, lesion.radii))
        outer = distance + 0.20 * rough + 0.10 * fine + 0.25 * tissue["grey"]
        inner = distance + 0.07 * rough + 0.05 * fine
        edge, shell = head.voxel / lesion.reach * 0.5 + 0.02, lesion.core_edge - 0.06
        core = soft(lesion.core_edge, inner, edge) * allowed
        parts = {
            "oedema": np.maximum(soft(1, outer, edge * 1.5) * allowed, core),
            "core": core,
            "necrosis": soft(max(shell - lesion.rim, 0.12), inner, edge) * allowed,
            "rim": soft(shell, inner, edge) * allowed,
        }
        if lesion.kernel:
            parts["kernel"] = soft(lesion.kernel, distance, edge) * allowed
        for name, part in parts.items():
            share[name] = np.maximum(share[name], part)
    label = np.zeros(head.box, np.uint8)
    codes = {"oedema": EDEMA, "core": NON_ENHANCING, "rim": rim, "necrosis": NON_ENHANCING, "kernel": ENHANCING}
    for name, code in codes.items():
        label[share[name] > 0.5] = code
    return label, share


def _rim_thickness(head: Head, reach: float, rng: np.random.Generator) -> float:
    """Of a rim that shows at any size: at least 1.3 voxels."""
    return max(rng.uniform(0.10, 0.16), 1.3 * head.voxel / reach)


def signal_of(name: str, head: Head, parts: Fields) -> np.ndarray:
    """One channel in the head's box, int16: tissues mixed, tumour over them, uneven field, Rician noise, no skull."""
    rng = head.rng
    level = {what: value * rng.uniform(0.94, 1.06) for what, value in zip(SUBSTANCES, SIGNALS[name])}
    level["kernel"] = level["rim"]
    signal = parts["fluid"] * level["fluid"] + parts["grey"] * level["grey"] + parts["white"] * level["white"]
    for what in (*SUBSTANCES[3:], "kernel"):
        signal += parts[what] * (level[what] - signal)
    signal *= 1 + 0.06 * parts["texture"]
    signal *= np.exp(0.16 * head.field(3)) * rng.uniform(0.7, 1.4)
    brain, sigma = head.brain, np.float32(0.045 * level["white"])
    noise = rng.standard_normal((2, int(np.count_nonzero(brain))), dtype=np.float32) * sigma
    out = np.zeros(head.box, np.int16)
    out[brain] = np.clip(np.rint(np.hypot(signal[brain] + noise[0], noise[1])), 1, 32767)
    return out
