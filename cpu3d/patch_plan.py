"""How large a patch is, and how many of them make an epoch: what `--patch` and `--gpu-memory` come to."""

import math

from cpu3d.data.region import Shape3
from cpu3d.errors import DoesNotFitError, InputError
from memory_estimator.gpu import BOTTOM, patch_for
from memory_estimator.job import Job
from memory_estimator.units import parse_bytes
from models.config import UNetConfig

USUAL_PATCH = (128, 128, 128)
"""Where nothing is said and no card sets a limit: nnU-Net's patch for BraTS (Isensee et al. 2021)."""


def check_patch(patch: Shape3, grid: Shape3, unet: UNetConfig) -> None:
    """Raise InputError unless the network learns from a patch of this shape and a volume of `grid` holds it."""
    problems = []
    least = BOTTOM * unet.divisor
    if len(patch) != 3 or min(patch) < 1:
        raise InputError(f"--patch must be three positive numbers, got {tuple(patch)}; give voxels X Y Z")
    if any(n > most for n, most in zip(patch, grid)):
        fitting = tuple(min(pair) for pair in zip(patch, grid))
        problems.append(
            f"--patch {_words(patch)} must lie within the volumes of {_words(grid)}; {_words(fitting)} does, and "
            "--mode whole takes all of them"
        )
    if any(n % unet.divisor or n < least for n in patch):
        up = tuple(max(-(-n // unet.divisor) * unet.divisor, least) for n in patch)
        problems.append(
            f"--patch {_words(patch)} must be divisible by {unet.divisor}, the {unet.depth} levels' stride, and at "
            f"least {least} along each axis; {_words(up)} is"
        )
    if problems:
        raise InputError(*problems)


def usual_patch(grid: Shape3) -> Shape3:
    """USUAL_PATCH, cut to a volume of `grid`, which is divisible already."""
    return tuple(min(pair) for pair in zip(USUAL_PATCH, grid))


def patch_of_card(job: Job, memory: str) -> Shape3:
    """The largest patch of the volumes of `job` that a card of `memory`, such as "16GiB", trains.

    Raises DoesNotFitError where it trains none, InputError for what is no amount of memory.
    """
    try:
        memory_bytes = parse_bytes(memory)
    except ValueError as error:
        raise InputError(f"--gpu-{error}") from None
    try:
        return patch_for(job, memory_bytes)
    except ValueError as error:
        raise DoesNotFitError(str(error)) from None


def patches_per_case(grid: Shape3, patch: Shape3) -> int:
    """Patches with as many voxels as a volume of `grid`, to the nearest one, at least 1."""
    return max(round(math.prod(grid) / math.prod(patch)), 1)


# --- Private helpers ---


def _words(shape: Shape3) -> str:
    return " ".join(map(str, shape))
