"""Draws a head with tumours in four MR channels, which a network can learn.

Shapes and contrasts imitate skull-stripped BraTS volumes. No channel shows the tumour by brightness
alone: fluid is bright in T2, vessels in T1 with contrast agent, spots and cortex in FLAIR.
Coordinates run from -1 to 1 across the head's box: u to the right, v to the front, w up."""

from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.phantoms.shapes import smooth_field, soft
from cpu3d.data.region import Array, Region, Shape3, xyz

VERSION = 1  # the same version, seed, shape and NumPy give the same volumes
# Names, spelling and codes are those of MSD Task01_BrainTumour.
CHANNELS = ("FLAIR", "T1w", "t1gd", "T2w")
LABELS = {0: "background", 1: "edema", 2: "non-enhancing tumor", 3: "enhancing tumour"}
EDEMA = 1
NON_ENHANCING = 2
ENHANCING = 3

# Size of an average head along each axis, as a share of the volume.
SHARES = (135 / 240, 174 / 240, 136 / 155)
# Sizes of heads, as a share of an average head.
SMALLEST = 0.96
LARGEST = 1.04
SUBSTANCES = ("fluid", "grey", "white", "vessel", "caps", "oedema", "core", "rim", "necrosis")
SIGNALS = {
    "FLAIR": (70, 275, 225, 190, 380, 360, 320, 340, 200),
    "T1w": (130, 320, 430, 300, 400, 290, 250, 310, 180),
    "t1gd": (130, 330, 430, 760, 400, 295, 265, 760, 175),
    "T2w": (640, 380, 285, 200, 330, 540, 500, 430, 600),
}
"""Channel -> brightness of each of `SUBSTANCES`, in the arbitrary units of BraTS volumes."""

# Least distance between the cores of two lesions apart, as a share of the head's length.
CLEARANCE = 0.42

Fields = Dict[str, Array]
"""Substance -> its share of each voxel of the head's box, 0 to 1; soft edges are partial volume."""


def phantom_case(
    shape: Shape3,
    seed: int,
    index: int,
    context: str = "none",
    holds: Optional[bool] = None,
) -> Tuple[Array, Array]:
    """Draw one case: image `(X, Y, Z, 4)` int16 and label `(X, Y, Z)` uint8, axes R A S, in the
    order of `CHANNELS`.

    Non-zero voxels are exactly the brain, the same in all channels. In the context "count" the
    lesion is the only one if `holds`, by default in every other case. From 40 voxels along each
    axis on, every case has all tumour codes."""
    rng = np.random.default_rng([VERSION, seed, index])
    # About 135x174x136 of 240x240x155, near the middle.
    sizes = np.array(SHARES) * rng.uniform(SMALLEST, LARGEST, 3)
    box = xyz(round(float(n * size)) for n, size in zip(shape, sizes))
    start = [int((n - size) * rng.uniform(0.4, 0.6)) for n, size in zip(shape, box)]
    inside = Region(xyz(start), box).slices(shape)
    head = Head(box, rng)
    tissue = tissues(head)
    roughness = [np.clip(head.field(cells), -1.6, 1.6) for cells in (8, 15)]
    rim = ENHANCING
    if context == "none":
        lesions = usual_lesions(head)
    else:
        if holds is None:
            holds = index % 2 == 0
        lesions = lesions_apart(head, np.random.default_rng([VERSION, seed, index, 3]))
        if holds:
            lesions = lesions[:1]
        else:
            rim = NON_ENHANCING
    code, tumour = tumours(head, tissue, lesions, roughness, rim)
    image = np.zeros((*shape, len(CHANNELS)), np.int16)
    label = np.zeros(shape, np.uint8)
    for number, name in enumerate(CHANNELS):
        image[(*inside, number)] = signal_of(name, head, {**tissue, **tumour})
    label[inside] = code
    return image, label


def blind_patch(shape: Shape3) -> int:
    """Voxels from front to back of the longest patch that never reaches two lesions apart: 70 of
    240."""
    return int(CLEARANCE * SMALLEST * SHARES[1] * shape[1])


class Head:
    """The grid of a head, its brain and the generator that it is drawn with."""

    def __init__(self, box: Shape3, rng: np.random.Generator):
        self.box = box
        self.rng = rng
        axes = [((np.arange(n) + 0.5) / n * 2 - 1).astype(np.float32) for n in box]
        self.u, self.v, self.w = np.ix_(*axes)
        """Right, front and up: each -1..1 along its own axis, length 1 along the others."""
        wobble = self.field(5)
        # Narrower in front and flatter below, as a brain is.
        narrow = 1 + 0.10 * self.v + 0.05 * self.v**2
        lower = np.where(self.w < 0, 1.0 + 0.10 * self.w, 1.0).astype(np.float32)
        distance = np.sqrt((self.u * narrow) ** 2 + self.v**2 + (self.w * lower) ** 2)
        self.radius = distance + 0.035 * wobble
        self.brain = self.radius < 0.97
        self.voxel = 2 / min(box)

    def field(self, cells: int) -> Array:
        """A `smooth_field` in the head's box."""
        return smooth_field(self.rng, self.box, cells)

    def ball(self, centre: Iterable[float], radii: Iterable[float]) -> Array:
        """Squared distance from `centre` in units of `radii`: below 1 within the ellipsoid."""
        u, v, w = (((x - c) / r) ** 2 for x, c, r in zip((self.u, self.v, self.w), centre, radii))
        return (u + v + w).astype(np.float32)


def tissues(head: Head) -> Fields:
    """Fluid, grey and white matter, vessels and bright caps, with the ventricles and a texture."""
    u = head.u
    v = head.v
    w = head.w
    depth = np.clip(0.97 - head.radius, 0, None)
    # Sulci are the zero surfaces of a field: a line of fluid with a ribbon of cortex on both sides,
    # fading with depth.
    bend = head.field(15)
    cerebellum = soft(0.10, np.maximum(w + 0.42 + 0.25 * v, 0) + np.maximum(v + 0.15, 0), 0.03)
    bend = np.abs(bend * (1 - cerebellum) + head.field(26) * cerebellum)
    below = np.maximum(0.05 - np.maximum(w, 0.6 * v), 0)
    fissure = np.abs(u) + 0.02 * np.abs(head.field(6)) + 0.6 * below
    fluid = np.maximum(soft(0.17, bend + 0.7 * depth, 0.09), soft(0.022, fissure, 0.010))
    fluid = np.maximum(fluid, soft(0.02, depth, 0.012))
    grey = np.maximum(soft(0.80, bend + 1.9 * depth, 0.12), soft(0.07, depth, 0.02))
    grey = np.maximum(grey, soft(0.055, fissure, 0.02))
    for side in (-1, 1):  # two nuclei a side
        inner = head.ball((side * 0.17, -0.05, 0.02), (0.12, 0.16, 0.13))
        outer = head.ball((side * 0.34, 0.10, 0.04), (0.09, 0.22, 0.16))
        grey = np.maximum(grey, soft(1, inner, 0.15))
        grey = np.maximum(grey, soft(1, outer, 0.15))
    ventricle = _ventricles(head)
    inside = soft(1, ventricle, 0.25)
    caps = soft(1.9, ventricle, 0.35) * (1 - inside) * np.clip(0.45 + 0.5 * head.field(7), 0, 1)
    fluid = np.maximum(fluid, inside)
    grey = grey * (1 - fluid)
    vessel = soft(0.10, np.hypot(head.field(9), head.field(9)), 0.05) * (head.radius > 0.45)
    from_midline = (u / 0.035) ** 2 + ((head.radius - 0.93) / 0.05) ** 2
    sinus = soft(1, from_midline + 8 * np.maximum(0.1 - w, 0), 0.3)
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


def _ventricles(head: Head) -> Array:
    """The squared distance from the nearest ventricle, in units of its radii."""
    u = head.u
    v = head.v
    w = head.w
    warp = 0.25 * head.field(6)
    size = head.rng.uniform(0.85, 1.25)
    ventricle = np.full(head.box, 9.0, np.float32)
    for side in (-1, 1):
        lean = 0.10 + 0.05 * np.abs(v - 0.1) - 0.06 * (v > 0.2) * (v - 0.2)
        across = ((u - side * lean) / (0.075 * size)) ** 2
        along = ((v - 0.02) / 0.42) ** 2
        up = ((w - 0.22 + 0.25 * v**2) / (0.11 * size)) ** 2
        body = across + along + up
        horn = head.ball((side * 0.26, -0.36, 0.02), (0.065 * size, 0.16, 0.14))
        ventricle = np.minimum(ventricle, np.minimum(body, horn))
    third = head.ball((0, -0.02, -0.02), (0.025, 0.14, 0.16))
    return np.minimum(ventricle, third) + warp


@dataclass(frozen=True)
class Lesion:
    """One tumour: an ellipsoid with rough borders, and three smaller ones in it. In the head's
    coordinates."""

    centre: Sequence[float]
    radii: Array
    """(3,), of the oedema, along the axes; the radii below, except `reach`, are shares of them."""
    reach: float  # a middling radius, which the width of soft edges follows
    core_edge: float
    rim: float  # thickness
    kernel: float = 0.0
    """Radius of an always enhancing ball in the necrosis: a region without voxels has no gradient
    in a Dice."""


def usual_lesions(head: Head) -> List[Lesion]:
    """One tumour, in three cases of ten with a smaller one, anywhere within the hemispheres, off
    the midline."""
    rng = head.rng
    reaches = [(0.34, 0.50)]  # least and most of each
    if rng.random() < 0.3:
        reaches.append((0.16, 0.24))
    lesions = []
    for least, most in reaches:
        reach = rng.uniform(least, most)
        centre = None
        while centre is None:
            centre = _in_a_hemisphere(rng)
        radii = rng.uniform(0.85, 1.2, 3) * reach * (1.1, 0.85, 1.1)
        core_edge = rng.uniform(0.55, 0.72)
        lesions.append(Lesion(centre, radii, reach, core_edge, _rim_thickness(head, reach, rng)))
    return lesions


def _in_a_hemisphere(rng: np.random.Generator) -> Optional[Tuple[float, float, float]]:
    """A place off the midline, or None for one too close to the brain's surface."""
    u, v, w = rng.uniform((0.25, -0.6, -0.25), (0.62, 0.6, 0.55))
    if u * u + v * v + w * w >= 0.42:
        return None
    return float(u) * rng.choice((-1, 1)), float(v), float(w)


def lesions_apart(head: Head, rng: np.random.Generator) -> List[Lesion]:
    """One lesion near the front or the back, and another at the other end, both flat from front to
    back."""
    pole, side = rng.choice((-1.0, 1.0), 2)
    rng.random(2)  # no longer used; without them VERSION 1 would give other volumes
    lesions = []
    for sign in (1, -1):
        u, v, w = rng.uniform((0.25, 0.63, -0.05), (0.42, 0.67, 0.25))
        centre = (sign * side * u, sign * pole * v, w)
        reach = rng.uniform(0.28, 0.32)
        radii = rng.uniform(0.9, 1.1, 3) * reach * (1.45, 0.68, 1.35)
        core_edge = rng.uniform(0.64, 0.72)
        rim = _rim_thickness(head, reach, rng)
        lesions.append(Lesion(centre, radii, reach, core_edge, rim, kernel=0.27))
    return lesions


def tumours(
    head: Head, tissue: Fields, lesions: Sequence[Lesion], roughness: Sequence[Array], rim: int
) -> Tuple[Array, Fields]:
    """Labels, with code `rim` for the rims, and the fields oedema, core, necrosis, rim and kernel.
    `roughness` is a coarse and a fine field that the borders follow."""
    rough, fine = roughness
    names = ("oedema", "core", "necrosis", "rim", "kernel")
    share = {name: np.zeros(head.box, np.float32) for name in names}
    allowed = head.brain & (tissue["ventricle"] < 0.5)
    for lesion in lesions:
        distance = np.sqrt(head.ball(lesion.centre, lesion.radii))
        outer = distance + 0.20 * rough + 0.10 * fine + 0.25 * tissue["grey"]
        inner = distance + 0.07 * rough + 0.05 * fine
        edge = head.voxel / lesion.reach * 0.5 + 0.02
        shell = lesion.core_edge - 0.06
        core = soft(lesion.core_edge, inner, edge) * allowed
        own = {
            "oedema": np.maximum(soft(1, outer, edge * 1.5) * allowed, core),
            "core": core,
            "necrosis": soft(max(shell - lesion.rim, 0.12), inner, edge) * allowed,
            "rim": soft(shell, inner, edge) * allowed,
        }
        if lesion.kernel:
            own["kernel"] = soft(lesion.kernel, distance, edge) * allowed
        for name, field in own.items():
            share[name] = np.maximum(share[name], field)
    label = np.zeros(head.box, np.uint8)
    codes = {
        "oedema": EDEMA,
        "core": NON_ENHANCING,
        "rim": rim,
        "necrosis": NON_ENHANCING,
        "kernel": ENHANCING,
    }
    for name, code in codes.items():
        label[share[name] > 0.5] = code
    return label, share


def _rim_thickness(head: Head, reach: float, rng: np.random.Generator) -> float:
    """A rim's thickness, at least 1.3 voxels."""
    return max(rng.uniform(0.10, 0.16), 1.3 * head.voxel / reach)


def signal_of(name: str, head: Head, fields: Fields) -> Array:
    """One channel in the head's box, int16: tissues mixed, tumour over them, uneven field, Rician
    noise, no skull."""
    rng = head.rng
    brain = head.brain
    level = {}
    for substance, value in zip(SUBSTANCES, SIGNALS[name]):
        level[substance] = value * rng.uniform(0.94, 1.06)
    level["kernel"] = level["rim"]
    signal = fields["fluid"] * level["fluid"]
    signal = signal + fields["grey"] * level["grey"]
    signal = signal + fields["white"] * level["white"]
    for substance in (*SUBSTANCES[3:], "kernel"):
        signal += fields[substance] * (level[substance] - signal)
    signal *= 1 + 0.06 * fields["texture"]
    signal *= np.exp(0.16 * head.field(3)) * rng.uniform(0.7, 1.4)
    sigma = np.float32(0.045 * level["white"])
    noise = rng.standard_normal((2, int(np.count_nonzero(brain))), dtype=np.float32) * sigma
    out = np.zeros(head.box, np.int16)
    out[brain] = np.clip(np.rint(np.hypot(signal[brain] + noise[0], noise[1])), 1, 32767)
    return out
