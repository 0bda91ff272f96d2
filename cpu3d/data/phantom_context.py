"""Phantoms whose labels depend on what is far away: a whole volume can tell, a patch shorter than the gap cannot.

Every lesion looks the same, an enhancing rim and a small enhancing kernel in its necrosis. What the rim is *called*
follows a rule about the rest of the head: enhancing tumour where the rule holds, non-enhancing where not. So whole
tumour and tumour core are to be had from a patch, in every case, and enhancing tumour is not. The kernel is always
called enhancing: a region without any voxel has next to no gradient in a Dice of single cases.

Nothing near a lesion tells the rule of `landmark` and `count`: with the same random numbers, a case where it holds and
one where it does not are the same but for the voxels of the landmark, or of the other lesion, and those are at least
`CLEARANCE` away: a patch no longer than `blind_patch` never holds a core together with what tells its rule. A network
sees no further than its own reach either: one of few levels is blind to the rule in a whole volume too. A volume is
normalised by its own mean and spread, and a second lesion moves those a little: from them alone a linear guess is right
in 61% of the cases of `count`, in 49% of those of `landmark`. The rule of `side` is the weak one: a patch that shows
the midline or the edge of the brain can tell it.
"""

from dataclasses import dataclass
from typing import List, Optional, Tuple

import numpy as np

from cpu3d.data.phantom_head import SHARES, SMALLEST, Head
from cpu3d.data.phantom_tumours import Lesion, rim_thickness
from cpu3d.data.region import Shape3

RULES = {
    "none": "",
    "side": "the lesion is on the patient's left",
    "landmark": "the bright nodule is near: 1.14 halves of the head's length from the lesion, front to back, not 1.50",
    "count": "the lesion is the only one",
}
"""Context -> when a lesion's rim is enhancing tumour (code 3) and not non-enhancing (code 2); "" is always."""

NEAR, FAR = 1.14, 1.50
"""From lesion to landmark along the head's length, in halves of it."""

CLEARANCE = 0.42
"""Share of the head's length, front to back, that is at least between a core and whatever tells its rule."""

LANDMARK_RADII = (0.26, 0.12, 0.20)
"""Of the nodule, in the head's coordinates: a ball in a head of the usual proportions."""


@dataclass(frozen=True)
class Scene:
    """What is put into a head."""

    lesions: List[Lesion]
    landmark: Optional[Tuple[float, float, float]]
    """Middle of the nodule, in the head's coordinates."""
    enhancing: bool
    """Whether the rims are called enhancing tumour."""


def drawn_scene(context: str, holds: bool, head: Head, rng: np.random.Generator) -> Scene:
    """A lesion near the front or the back, and far from it a landmark or another lesion, or neither.

    The same numbers are drawn whether the rule `holds` or not.
    """
    pole, side = rng.choice((-1.0, 1.0), 2)
    across, up = rng.uniform((-0.12, 0.0), (0.12, 0.2))
    if context == "side":
        side = -1.0 if holds else 1.0
    lesion, other = _lesion(side, pole, head, rng), _lesion(-side, -pole, head, rng)
    place = (across, lesion.centre[1] - pole * (NEAR if holds else FAR), up)
    return Scene(
        lesions=[lesion, other] if context == "count" and not holds else [lesion],
        landmark=place if context == "landmark" else None,
        enhancing=holds,
    )


def blind_patch(context: str, shape: Shape3) -> Optional[int]:
    """Voxels from front to back of the longest patch that cannot tell the rule in any head of volumes of this shape.

    CLEARANCE of the shortest head: 70 of 240. None where patches of any size may tell, or there is nothing to tell.
    """
    return int(CLEARANCE * SMALLEST * SHARES[1] * shape[1]) if context in ("landmark", "count") else None


# --- Private helpers ---


def _lesion(side: float, pole: float, head: Head, rng: np.random.Generator) -> Lesion:
    """Flat from front to back, so that as much as possible lies between it and the other end of the head."""
    u, v, w = rng.uniform((0.25, 0.63, -0.05), (0.42, 0.67, 0.25))
    reach = rng.uniform(0.28, 0.32)
    radii = rng.uniform(0.9, 1.1, 3) * reach * (1.45, 0.68, 1.35)
    core_edge, thick = rng.uniform(0.64, 0.72), rim_thickness(head, reach, rng)
    return Lesion((side * u, pole * v, w), radii, reach, core_edge, thick, kernel=0.27)
