"""Draws a head with tumours in four MR channels, which a network can learn.

Shapes and contrasts imitate skull-stripped BraTS volumes. No channel shows the tumour by brightness
alone: fluid is bright in T2, vessels in T1 with contrast agent, spots and cortex in FLAIR.
Coordinates run from -1 to 1 across the head's box: u to the right, v to the front, w up."""

from typing import Dict, Tuple

import numpy as np

from cpu3d.data.phantoms.shapes import Space, smooth_field, soft
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

Fields = Dict[str, Array]
"""Substance -> its share of each voxel of the head's box, 0 to 1; soft edges are partial volume."""


def phantom_case(shape: Shape3, seed: int, index: int) -> Tuple[Array, Array]:
    """Draw one case: image `(X, Y, Z, 4)` int16 and label `(X, Y, Z)` uint8, axes R A S, in the
    order of `CHANNELS`.

    Non-zero voxels are exactly the brain, the same in all channels. From 40 voxels along each axis
    on, every case has all tumour codes."""
    rng = np.random.default_rng([VERSION, seed, index])
    # About 135x174x136 of 240x240x155, near the middle.
    sizes = np.array(SHARES) * rng.uniform(SMALLEST, LARGEST, 3)
    box = xyz(round(float(n * size)) for n, size in zip(shape, sizes))
    start = [int((n - size) * rng.uniform(0.4, 0.6)) for n, size in zip(shape, box)]
    inside = Region(xyz(start), box).slices(shape)
    head = Head(box, rng)
    tissue = tissues(head)
    code, tumour = tumours(head, tissue)
    image = np.zeros((*shape, len(CHANNELS)), np.int16)
    label = np.zeros(shape, np.uint8)
    for number, name in enumerate(CHANNELS):
        image[(*inside, number)] = signal_of(name, head, {**tissue, **tumour})
    label[inside] = code
    return image, label


class Head(Space):
    """The grid of a head, its brain and the generator that it is drawn with."""

    def __init__(self, box: Shape3, rng: np.random.Generator):
        super().__init__(box)
        self.box = box
        self.rng = rng
        wobble = self.field(5)
        # Narrower in front and flatter below, as a brain is.
        narrow = 1 + 0.10 * self.v + 0.05 * self.v**2
        lower = np.where(self.w < 0, 1.0 + 0.10 * self.w, 1.0).astype(np.float32)
        distance = np.sqrt((self.u * narrow) ** 2 + self.v**2 + (self.w * lower) ** 2)
        self.radius = distance + 0.035 * wobble
        self.brain = self.radius < 0.97

    def field(self, cells: int) -> Array:
        """A `smooth_field` in the head's box."""
        return smooth_field(self.rng, self.box, cells)


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


def tumours(head: Head, tissue: Fields) -> Tuple[Array, Fields]:
    """Draw one tumour, in three cases of ten with a smaller one beside it: labels, and the fields
    oedema, core, necrosis and rim."""
    # A coarse and a fine field that the borders follow.
    rough, fine = [np.clip(head.field(cells), -1.6, 1.6) for cells in (8, 15)]
    reaches = [(0.34, 0.50)]  # least and most of each
    if head.rng.random() < 0.3:
        reaches.append((0.16, 0.24))
    share = {name: np.zeros(head.box, np.float32) for name in ("oedema", "core", "necrosis", "rim")}
    for least, most in reaches:
        for name, field in _tumour(head, tissue, rough, fine, least, most).items():
            share[name] = np.maximum(share[name], field)
    label = np.zeros(head.box, np.uint8)
    codes = {
        "oedema": EDEMA,
        "core": NON_ENHANCING,
        "rim": ENHANCING,
        "necrosis": NON_ENHANCING,
    }
    for name, code in codes.items():
        label[share[name] > 0.5] = code
    return label, share


def _tumour(
    head: Head, tissue: Fields, rough: Array, fine: Array, least: float, most: float
) -> Fields:
    """Draw an ellipsoid with rough borders, and three smaller ones in it, anywhere within the
    hemispheres, off the midline. Its middling radius is between `least` and `most`."""
    rng = head.rng
    reach = rng.uniform(least, most)
    u, v, w = 1.0, 1.0, 1.0
    while u * u + v * v + w * w >= 0.42:  # too close to the brain's surface
        u, v, w = rng.uniform((0.25, -0.6, -0.25), (0.62, 0.6, 0.55)).tolist()
    centre = (u * rng.choice((-1, 1)), v, w)
    radii = rng.uniform(0.85, 1.2, 3) * reach * (1.1, 0.85, 1.1)  # of the oedema
    core_edge = rng.uniform(0.55, 0.72)  # a share of them
    rim = max(rng.uniform(0.10, 0.16), 1.3 * head.voxel / reach)  # thickness: 1.3 voxels at least
    distance = np.sqrt(head.ball(centre, radii))
    outer = distance + 0.20 * rough + 0.10 * fine + 0.25 * tissue["grey"]
    inner = distance + 0.07 * rough + 0.05 * fine
    edge = head.voxel / reach * 0.5 + 0.02
    shell = core_edge - 0.06
    allowed = head.brain & (tissue["ventricle"] < 0.5)
    core = soft(core_edge, inner, edge) * allowed
    return {
        "oedema": np.maximum(soft(1, outer, edge * 1.5) * allowed, core),
        "core": core,
        "necrosis": soft(max(shell - rim, 0.12), inner, edge) * allowed,
        "rim": soft(shell, inner, edge) * allowed,
    }


def signal_of(name: str, head: Head, fields: Fields) -> Array:
    """One channel in the head's box, int16: tissues mixed, tumour over them, uneven field, Rician
    noise, no skull."""
    rng = head.rng
    brain = head.brain
    level = {}
    for substance, value in zip(SUBSTANCES, SIGNALS[name]):
        level[substance] = value * rng.uniform(0.94, 1.06)
    signal = fields["fluid"] * level["fluid"]
    signal = signal + fields["grey"] * level["grey"]
    signal = signal + fields["white"] * level["white"]
    for substance in SUBSTANCES[3:]:
        signal += fields[substance] * (level[substance] - signal)
    signal *= 1 + 0.06 * fields["texture"]
    signal *= np.exp(0.16 * head.field(3)) * rng.uniform(0.7, 1.4)
    sigma = np.float32(0.045 * level["white"])
    noise = rng.standard_normal((2, int(np.count_nonzero(brain))), dtype=np.float32) * sigma
    out = np.zeros(head.box, np.int16)
    out[brain] = np.clip(np.rint(np.hypot(signal[brain] + noise[0], noise[1])), 1, 32767)
    return out
