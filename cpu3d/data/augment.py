"""Augmentation: its settings, and the numbers drawn for a sample, by which native/samples.py makes
it.

Gain and offset fold into the normalisation and cost nothing. Rotation and scaling are in
millimetres, so that a rotation does not shear on a grid of unequal spacing. The other changes of
intensity are those of nnU-Net; boxes of other cases are those of CutMix (Yun et al. 2019).
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Dict, Iterable, Iterator, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.cases.resample import thick_axis
from cpu3d.data.labels import mirror_pair
from cpu3d.data.normalise import Levels
from cpu3d.data.region import Array, xyz
from cpu3d.data.sampling import random_units, random_words
from memory_estimator.common.schema import option

# Keys of the random streams of a sample: its numbers, its box of another case, and its noise.
_KEY = 0x61756721
_BOX_KEY = 0x626F78
_NOISE_KEY = 0x6E6F697365

# The share of samples that have each change, and of their channels: nnU-Net's (Isensee et al. 2021;
# nnUNetTrainer and batchgeneratorsv2 of its version 2). There gamma comes in two transforms, of 0.1
# for the negative and of 0.3.
PROBABILITY = {"noise": 0.1, "blur": 0.2, "contrast": 0.15, "low_resolution": 0.25, "gamma": 0.4}
CHANNEL_PROBABILITY = {"blur": 0.5, "low_resolution": 0.5}  # the others change all channels
NEGATIVE_PROBABILITY = 0.25  # of a sample with gamma: that it is the negative's
BLUR_REACH = 4  # standard deviations of a Gaussian, beyond which it is 0


@dataclass(frozen=True)
class AugmentConfig:
    """The settings of augmentation. All zero (and no flips) turns it off."""

    flip: bool = option(
        True, "no mirroring, for data whose left and right differ", group="augmentation"
    )
    """Mirror along each of `mirrored_axes` with probability 1/2."""
    # --- Strengths; AUGMENTS has them by name ---
    gain: float = 0.1  # brightness: each channel, normalised, times up to 1 +- this
    offset: float = 0.1  # up to +- this many standard deviations added to each channel
    rotation_deg: float = 0.0  # about each of the three axes
    scaling: float = 0.0  # zoom by 1 / (1 + this) to 1 + this
    contrast: float = 0.0  # deviations from a channel's mean times up to 1 +- this
    gamma: float = 0.0  # an exponent of 1 / (1 + this) to 1 + this
    noise: float = 0.0  # of up to this many standard deviations
    blur: float = 0.0  # by this / 2 to this many voxels
    low_resolution: float = 0.0  # 1 - this to 1 of a channel's resolution
    cutmix: float = 0.0  # this share of samples take a box of another sample, labels with it

    def __post_init__(self) -> None:
        for name, strength in vars(self).items():
            limit = 1 if name in SHARES else math.inf
            if name != "flip" and not 0 <= strength < limit:
                rule = f"augment {name} must be in [0, {limit})"
                raise ValueError(f"{rule}, got {strength}; 0 turns it off")

    def mirrored_axes(self, label_names: Iterable[str]) -> Tuple[int, ...]:
        """List the axes of X, Y, Z, as 0, 1, 2, that images with labels of these names are
        mirrored along: not X if labels are left and right, none without flips."""
        if not self.flip:
            return ()
        return (1, 2) if mirror_pair(label_names) else (0, 1, 2)

    @property
    def needs_volume(self) -> bool:
        """Tell whether a change of intensity needs all of a volume at a time, in float32."""
        return any((self.contrast, self.gamma, self.blur, self.low_resolution))


# A share of 1 or more would turn values round, or leave no voxel.
SHARES = ("gain", "contrast", "low_resolution", "cutmix")

NO_AUGMENT = AugmentConfig(flip=False, gain=0.0, offset=0.0)

AUGMENTS = {
    "off": NO_AUGMENT,
    "light": AugmentConfig(),
    "nnunet": AugmentConfig(
        rotation_deg=30.0,
        scaling=0.4,
        contrast=0.25,
        gamma=0.5,
        noise=0.1,
        blur=1.0,
        low_resolution=0.5,
    ),
    "cutmix": AugmentConfig(cutmix=0.5),
}
"""--augment -> its strengths: flips, gain and offset alone, with nnU-Net's (Isensee et al. 2021)
too, or with boxes of other cases."""


@dataclass(frozen=True)
class AugmentParams:
    """The numbers of one sample. Those of intensity are (C,), one for each channel, or None for no
    change."""

    scale: Array  # normalisation with gain and offset in it: value * scale + shift, 0 where it is 0
    shift: Array
    flips: Tuple[bool, bool, bool]  # mirror X, Y, Z, last of all
    matrix: Optional[Array] = None
    """(3, 3), voxels from the centre: those of the sample -> where they come from."""
    noise: Optional[Array] = None  # standard deviation
    noise_keys: Optional[Array] = None  # (C, 2) uint32
    blur: Optional[Array] = None  # standard deviation, voxels; 0 for none
    low_resolution: Optional[Array] = None  # share of the voxels along each axis; 1 for all
    contrast: Optional[Array] = None  # factor; 1 for none
    gamma: Optional[Array] = None  # exponent; 1 for none
    negative: bool = False  # whether gamma is that of the negative image
    window: Optional[Array] = None
    """(C, 3): stored values are read from low to high, less the origin; None for as they are. The
    three below are None with it."""
    outside: Optional[Array] = None  # is added to all voxels before they change in intensity
    background: Optional[Array] = None  # the value that stays as it is; NaN for none
    limits: Optional[Array] = None  # (C, 2), lowest and highest after all changes

    def of_channels(self, picked: Sequence[int]) -> "AugmentParams":
        """Return the numbers of some channels."""
        numbers: Dict[str, Any] = {
            name: value[list(picked)]
            for name, value in vars(self).items()
            if isinstance(value, np.ndarray) and name != "matrix"
        }
        return replace(self, **numbers)


def draw(
    config: AugmentConfig,
    levels: Levels,
    spacing_mm: Sequence[float],
    *,
    seed: int,
    position: int,
    mirrored: Sequence[int] = (),
) -> AugmentParams:
    """Draw the numbers for the sample at `position`, the same on every machine.

    `levels` are those of the case's channels, `mirrored` is from `AugmentConfig.mirrored_axes`.
    """
    units = random_units(seed, position, _KEY)
    draws = _Draws(config, units, len(levels.scale))
    within = draws.within
    # Every number is always drawn, so that one option does not shift the others.
    flips = [next(units) < 0.5 and axis in mirrored for axis in range(3)]
    angles_deg = within(config.rotation_deg, 3)
    zoom = (1 + config.scaling) ** within(1, 1)[0]
    matrix = None
    if config.rotation_deg or config.scaling:
        matrix = _inverse(angles_deg, zoom, spacing_mm)
    gain = 1 + within(config.gain)
    offset = within(config.offset)
    noise = np.abs(within(config.noise)).astype(np.float32)
    contrast = (1 + within(config.contrast)).astype(np.float32)
    gamma = ((1 + config.gamma) ** within(1)).astype(np.float32)
    blur = config.blur * (0.75 + within(0.25))
    low_resolution = 1 - np.abs(within(config.low_resolution))
    words = random_words(seed, position, _NOISE_KEY)
    shift = np.where(levels.has_background, levels.shift * gain + offset, 0)
    beyond: Dict[str, Array] = {}  # of channels without a background of 0
    if levels.window is not None:
        beyond = {
            "window": levels.window,
            "outside": np.where(levels.has_background, 0, levels.outside * gain + offset),
            "background": np.where(levels.has_background, 0, np.nan),
            "limits": levels.limits,
        }
    return AugmentParams(
        scale=(levels.scale * gain).astype(np.float32),
        shift=shift.astype(np.float32),
        flips=xyz(flips),
        matrix=matrix,
        noise=noise if draws.happens("noise") else None,
        noise_keys=np.array(
            [divmod(next(words), 2**32) for _ in range(draws.channels)], np.uint32
        ),  # the halves of a word for each channel
        blur=draws.in_some_channels("blur", blur, 0),
        low_resolution=draws.in_some_channels("low_resolution", low_resolution, 1),
        contrast=contrast if draws.happens("contrast") else None,
        gamma=gamma if draws.happens("gamma") else None,
        negative=next(units) < NEGATIVE_PROBABILITY,
        **{name: value.astype(np.float32) for name, value in beyond.items()},
    )


def draw_box(
    share: float, grid: Sequence[int], cases: int, *, seed: int, position: int
) -> Optional[Tuple[int, Tuple[slice, ...]]]:
    """Draw the position of the sample that the one at `position` takes a box of, and that box of
    its `grid`; None for a sample, of 1 - `share` of them, that takes none. The box's share of the
    voxels is uniform.

    The other sample is of the same epoch of `cases` samples, so it is of another case; of a single
    case there is none, and it is the sample itself."""
    units = random_units(seed, position, _BOX_KEY)
    if next(units) >= share:
        return None
    epoch, index = divmod(position, cases)
    other = (index + 1 + int(next(units) * (cases - 1))) % cases
    edge = next(units) ** (1 / 3)
    box = []
    for voxels in grid:
        size = max(round(voxels * edge), 1)
        start = int(next(units) * (voxels - size + 1))
        box.append(slice(start, start + size))
    return epoch * cases + other, tuple(box)


@dataclass(frozen=True)
class _Draws:
    """Draws of a sample, each from the next units of its random numbers."""

    config: AugmentConfig
    units: Iterator[float]  # from 0 to 1
    channels: int

    def within(self, limit: float, count: Optional[int] = None) -> Array:
        """Draw numbers from -limit to limit, by default one of each channel."""
        if count is None:
            count = self.channels
        return np.array([(2 * next(self.units) - 1) * limit for _ in range(count)])

    def happens(self, name: str) -> bool:
        """Draw whether the sample changes in this way; it does not if the option is off."""
        return next(self.units) < PROBABILITY[name] and getattr(self.config, name) > 0

    def in_some_channels(self, name: str, values: Array, otherwise: float) -> Optional[Array]:
        """Draw the channels that change in this way and return their values; None if none does."""
        probability = CHANNEL_PROBABILITY[name]
        among = np.array([next(self.units) < probability for _ in range(self.channels)])
        if not self.happens(name) or not among.any():
            return None
        return np.where(among, values, otherwise).astype(np.float32)


def smoothing(voxels: int, blur: float, low_resolution: float) -> Array:
    """Return the matrix (voxels, voxels) float32 of a blur, and then of a lower resolution, along
    an axis. Rows sum to 1.

    A lower resolution takes the nearest of the voxels, and interpolates between those that it has
    taken.
    """
    made = np.eye(voxels)
    if blur:
        distance = np.abs(np.arange(voxels)[:, None] - np.arange(voxels)[None, :])
        made = np.exp(-0.5 * (distance / blur) ** 2)
        made[distance > math.ceil(BLUR_REACH * blur)] = 0
        made /= made.sum(1, keepdims=True)
    fewer = max(round(voxels * low_resolution), 1)
    if fewer < voxels:
        nearest = ((np.arange(fewer) + 0.5) * voxels / fewer).astype(int)
        made = _growing(voxels, fewer) @ made[nearest]
    return made.astype(np.float32)


def _growing(voxels: int, fewer: int) -> Array:
    """Return the weights (voxels, fewer) float32 of linear interpolation, or of the last centre,
    from fewer voxels along an axis."""
    position = (np.arange(voxels)[:, None] + 0.5) * (fewer / voxels) - 0.5
    position = np.clip(position, 0, fewer - 1)
    return np.maximum(1 - np.abs(position - np.arange(fewer)[None, :]), 0).astype(np.float32)


def _inverse(angles_deg: Array, zoom: float, spacing_mm: Sequence[float]) -> Array:
    """Return the matrix (3, 3) float32 from made voxels to those they come from: it undoes turns
    in mm about X, Y and Z, and a zoom. Of thick slices only what is in their plane: across them
    there is too little to interpolate between (nnU-Net's "dummy 2D", Isensee et al. 2021)."""
    zooms = np.full(3, zoom)
    across = thick_axis(spacing_mm)
    if across is not None:
        angles_deg = angles_deg * (np.arange(3) == across)
        zooms[across] = 1
    turn = np.eye(3)
    for axis, angle in enumerate(np.radians(angles_deg)):
        low, high = [k for k in range(3) if k != axis]
        about = np.eye(3)
        about[[low, high], [low, high]] = math.cos(angle)
        about[low, high] = -math.sin(angle)
        about[high, low] = math.sin(angle)
        turn = about @ turn
    sizes = np.array(spacing_mm)
    return (turn.T / zooms[:, None] * (sizes / sizes[:, None])).astype(np.float32)
