"""How large a patch is, the volume it is of, and how many make an epoch: what `--patch` and `--gpu-memory` come to."""

import math

from cpu3d.config import RunConfig
from cpu3d.data.region import Shape3, grid_size
from cpu3d.data.resolution import field_of
from cpu3d.data.store import Store
from cpu3d.data.words import by
from cpu3d.errors import DoesNotFitError, InputError
from cpu3d.host.gpu import Gpu
from memory_estimator.gpu import BOTTOM, least_patch, patch_for
from memory_estimator.job import Job
from memory_estimator.recipes import USUAL_PATCH
from memory_estimator.units import format_bytes, parse_bytes
from models.config import UNetConfig


def check_patch(patch: Shape3, grid: Shape3, unet: UNetConfig) -> None:
    """Raise InputError unless the network learns from a patch of this shape and a volume of `grid` holds it.

    `grid` is divisible by what the network divides by. A side of it that is shorter than the least patch is taken
    whole. The error names the nearest patch that meets all rules.
    """
    if len(patch) != 3 or min(patch) < 1:
        raise InputError(f"--patch must be three positive numbers, got {tuple(patch)}; give voxels X Y Z")
    divisor, least = unet.divisor, least_patch(grid, unet.divisor)
    outside = any(n > most for n, most in zip(patch, grid))
    uneven = any(n % divisor or n < low for n, low in zip(patch, least))
    rules = [f"lie within the volumes of {by(grid, ' ')}"] if outside else []
    if uneven:
        rules.append(f"be divisible by {divisor}, the {unet.depth} levels' stride, and at least {by(least, ' ')}")
    if rules:
        fitting = tuple(min(max(-(-n // divisor) * divisor, low), most) for n, low, most in zip(patch, least, grid))
        whole = ", or --mode whole for all of a volume" if outside else ""
        raise InputError(f"--patch {by(patch, ' ')} must {' and '.join(rules)}; give {by(fitting, ' ')}{whole}")


def volume_shape(store: Store, config: RunConfig) -> Shape3:
    """Voxels X, Y, Z of a volume as the run is validated on it, at the store's resolution: what holds every case, and
    what the network sees."""
    extent = grid_size(store, extent=config.extent, multiple=1)
    return field_of(config.grid, config.resolution, at_least=extent)


def usual_patch(grid: Shape3, divisor: int) -> Shape3:
    """USUAL_PATCH within a volume of `grid`, or the least that a network of this divisor learns from where it is more.

    `grid` is divisible already.
    """
    return tuple(min(max(n, BOTTOM * divisor), most) for n, most in zip(USUAL_PATCH, grid))


def patch_of_memory(job: Job, memory: str) -> Shape3:
    """The largest patch of the volumes of `job` that a card of `memory` trains: --gpu-memory, such as "16GiB".

    Raises DoesNotFitError where it trains none, InputError for what is no amount of memory.
    """
    try:
        memory_bytes = parse_bytes(memory)
    except ValueError as error:
        raise InputError(f"--gpu-{error}") from None
    return _patch_of(job, memory_bytes, "--gpu-memory")


def patch_of_card(job: Job, card: Gpu) -> Shape3:
    """The largest patch of the volumes of `job` that a card's free memory trains.

    Raises DoesNotFitError where it trains none, InputError for a card whose memory is not known.
    """
    if card.free_bytes is None:
        raise InputError(
            f"the free memory of {card.device} must be known, its driver is silent; give --gpu-memory or --patch"
        )
    return _patch_of(job, card.free_bytes, f"{card.device}, with {format_bytes(card.free_bytes)} free,")


def patches_per_case(grid: Shape3, patch: Shape3) -> int:
    """Patches with as many voxels as a volume of `grid`, to the nearest one, at least 1."""
    return max(round(math.prod(grid) / math.prod(patch)), 1)


# --- Private helpers ---


def _patch_of(job: Job, memory_bytes: int, name: str) -> Shape3:
    """`name` is what the error says must hold a patch."""
    try:
        return patch_for(job, memory_bytes, name)
    except ValueError as error:
        raise DoesNotFitError(str(error)) from None
