"""The tumours of a phantom: where they lie, and what of each voxel is oedema, core, enhancing rim and necrosis."""

from dataclasses import dataclass
from typing import Dict, List, Sequence, Tuple

import numpy as np

from cpu3d.data.phantom_head import Head, soft

EDEMA, NON_ENHANCING, ENHANCING = 1, 2, 3
"""Label codes, those of MSD Task01_BrainTumour."""


@dataclass(frozen=True)
class Lesion:
    """One tumour: an ellipsoid with rough borders, and three smaller ones in it."""

    centre: Sequence[float]
    """In the head's coordinates."""
    radii: Sequence[float]
    """Of the oedema, along the axes, in the head's coordinates."""
    reach: float
    """A middling radius: what the width of a soft edge is told by."""
    core_edge: float
    """Radius of the core, as a share of `radii`."""
    thick: float
    """Of the enhancing rim, as a share of `radii`."""
    kernel: float = 0.0
    """Radius of an enhancing kernel in the necrosis, as a share of `radii`."""


def drawn_lesions(head: Head, rng: np.random.Generator) -> List[Lesion]:
    """One tumour, in three cases of ten with a smaller one, anywhere within the hemispheres."""
    lesions = []
    for number in range(1 + (rng.random() < 0.3)):
        reach = rng.uniform(0.34, 0.50) if number == 0 else rng.uniform(0.16, 0.24)
        centre = _place(rng)
        radii = rng.uniform(0.85, 1.2, 3) * reach * (1.1, 0.85, 1.1)
        core_edge = rng.uniform(0.55, 0.72)
        lesions.append(Lesion(centre, radii, reach, core_edge, rim_thickness(head, reach, rng)))
    return lesions


def rim_thickness(head: Head, reach: float, rng: np.random.Generator) -> float:
    """Of a rim that shows at any size: at least 1.3 voxels."""
    return max(rng.uniform(0.10, 0.16), 1.3 * head.voxel / reach)


def tumours(
    head: Head, tissue: Dict[str, np.ndarray], lesions: Sequence[Lesion], roughness: Sequence[np.ndarray], rim: int
) -> Tuple[np.ndarray, Dict[str, np.ndarray]]:
    """Labels, with code `rim` for the rims, and how much of each voxel is oedema, core, necrosis, rim or kernel.

    `roughness` is a coarse and a fine field that the borders follow.
    """
    rough, fine = roughness
    share = {name: np.zeros(head.box, np.float32) for name in ("oedema", "core", "necrosis", "rim")}
    allowed = head.brain & (tissue["ventricle"] < 0.5)
    kernel = np.zeros(head.box, np.float32)
    for lesion in lesions:
        core_edge = lesion.core_edge
        distance = np.sqrt(head.ball(lesion.centre, lesion.radii))
        outer = distance + 0.20 * rough + 0.10 * fine + 0.25 * tissue["grey"]
        inner = distance + 0.07 * rough + 0.05 * fine
        edge = head.voxel / lesion.reach * 0.5 + 0.02
        whole = soft(1, outer, edge * 1.5) * allowed
        core = soft(core_edge, inner, edge) * allowed
        shell = soft(core_edge - 0.06, inner, edge) * allowed
        dead = soft(max(core_edge - 0.06 - lesion.thick, 0.12), inner, edge) * allowed
        whole = np.maximum(whole, core)
        share["oedema"] = np.maximum(share["oedema"], whole)
        share["core"] = np.maximum(share["core"], core)
        share["rim"] = np.maximum(share["rim"], shell)
        share["necrosis"] = np.maximum(share["necrosis"], dead)
        if lesion.kernel:
            kernel = np.maximum(kernel, soft(lesion.kernel, distance, edge) * allowed)
    label = np.zeros(head.box, np.uint8)
    label[share["oedema"] > 0.5] = EDEMA
    label[share["core"] > 0.5] = NON_ENHANCING
    label[share["rim"] > 0.5] = rim
    label[share["necrosis"] > 0.5] = NON_ENHANCING
    if kernel.any():
        share["kernel"] = kernel
        label[kernel > 0.5] = ENHANCING
    return label, share


# --- Private helpers ---


def _place(rng: np.random.Generator) -> Tuple[float, float, float]:
    """A place within a hemisphere, off the midline and inside the brain."""
    while True:
        u, v, w = rng.uniform((0.25, -0.6, -0.25), (0.62, 0.6, 0.55))
        if u * u + v * v + w * w < 0.42:
            return (float(u) * rng.choice((-1, 1)), float(v), float(w))
