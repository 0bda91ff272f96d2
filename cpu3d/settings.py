"""A training run as data: its settings, facts of its store, and what was decided of it. A setting's
one declaration makes its option, its check and its place in config.json.

What a user chose is `cpu3d.chosen.Chosen`, name -> value. `Settings` have a value for each setting,
and some may be open, such as "auto"; `StoreFacts` are what the store is. `cpu3d.plan` replaces what
is open in the settings, and decides what no setting gives, `Decided`. A `RunConfig` is these three
with nothing left open, as a run folder's config.json holds it. How far a run has got is in none of
them: `cpu3d.run.checkpoint.Progress` has that. No TensorFlow.
"""

import dataclasses
import fractions
import functools
import math
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

from cpu3d.data.augment import AugmentConfig
from cpu3d.data.files.reader import READ_MODES
from cpu3d.data.labels import PaintedRegions, all_names
from cpu3d.data.manifest import Code
from cpu3d.data.normalise import Normalisation
from cpu3d.data.region import EXTENTS
from cpu3d.errors import InputError
from memory_estimator.common.schema import check, option
from memory_estimator.installed import ENGINES
from memory_estimator.job import (
    AUTO,
    check_micro_batch,
    micro_of,
)
from models.config import UNetConfig
from models.losses import DEFAULT_LOSS, LOSSES
from models.optimizers import OPTIMIZERS
from models.strides import EVERY_AXIS, Resolution3, lowered
from models.weights import FREEZE

SCHEDULES: Dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "polynomial": lambda progress: (1 - progress) ** 0.9,  # nnU-Net's exponent
    "constant": lambda progress: 1.0,
}
"""How the learning rate decays: progress after the warm-up, 0 to 1 -> share of the peak."""

COARSE_SHARE = fractions.Fraction(5, 6)
"""The share of a run's steps that a curriculum takes at half resolution, with an eighth of a full
step's voxels if all axes are halved (docs/log.md)."""

FULL_RATE_SHARE = 0.3
"""The peak of the learning rate of the full steps after coarse ones, as a share of the coarse
steps' peak. By the whole of it the full steps would forget what the coarse ones have learnt
(docs/log.md)."""

VALIDATIONS = 20
"""Validations of a run, evenly spread, unless it has fewer epochs or a setting says how often. An
epoch of few cases is over in seconds, and the best of many scores of few cases is chance."""

LEAST_CASES = 2  # that must have a region before post-processing removes anything of it

_data = functools.partial(option, group="data")
_patches = functools.partial(option, group="patches")
_training = functools.partial(option, group="training")

_RATES = ", ".join(f"{name} {o.learning_rate:g}" for name, o in OPTIMIZERS.items())


@dataclass(frozen=True)
class StoreFacts:
    """What a run knows of its store."""

    store: str = ""  # its folder
    store_channels: Tuple[str, ...] = ()  # all of the store: an image to predict on must have them
    label_names: Dict[int, str] = field(default_factory=dict)  # by label code, of predictions too
    # region -> label codes of the store
    region_codes: Dict[str, Tuple[Code, ...]] = field(default_factory=dict)
    paint: Tuple[Tuple[str, Code], ...] = ()  # as of the store's manifest
    split_hash: str = ""  # of the store the run was started on: a run never moves to another split
    spacing_mm: Optional[Tuple[float, float, float]] = None
    """Along R, A, S: the median of the training cases on each axis. None in runs of earlier
    versions."""
    target_spacing_mm: Optional[Tuple[float, float, float]] = None
    """Along R, A, S: what the store's cases and images to predict on are resampled to; None if they
    are seen as they are."""
    oriented: Optional[bool] = None
    """Whether the training cases' files gave the patient's orientation; None if only some did, or
    as above."""
    normalisation: Tuple[Normalisation, ...] = ()
    """Of each channel of the store; empty if all are normalised over the foreground."""

    def normalisation_of(self, channels: Sequence[str]) -> Tuple[Normalisation, ...]:
        """That of some of the store's channels, by name."""
        if not self.normalisation:
            return ()
        own = dict(zip(self.store_channels, self.normalisation))
        return tuple(own[name] for name in channels)


@dataclass(frozen=True)
class Settings:
    """The settings of a run, by a user, a recipe or the run that is continued. Some may be open:
    "auto", None, no names, or 0. The plan decides those, and its settings have no open ones."""

    unet: UNetConfig = field(default_factory=UNetConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    extent: str = _data(
        "brain",
        "the box of what is there (docs/data.md), or the full grid; lossless either way",
        choices=EXTENTS,
    )
    channels: Tuple[str, ...] = _data(
        (), "image channels to use, such as FLAIR; default: all", "NAME"
    )
    regions: Tuple[str, ...] = _data((), "regions to learn, such as WT; default: all", "NAME")
    read_mode: str = _data(
        AUTO, "auto: pread if files are on a network, else mmap", choices=(AUTO, *READ_MODES)
    )
    fold: str = _data("", "cross-validation: hold out the I-th of K parts, such as 2/5", "I/K")
    """The parts are of the training and validation cases; test cases are untouched. "" is the
    store's own split."""
    resolution: float = _data(
        1.0,
        "the network's resolution along the axes that its first level halves, as a share of the "
        "store's; scores are on the full grid",
        "R",
        above=0,
        at_most=1,
    )

    mode: str = _patches(
        "whole", "train on whole volumes, or on patches of them", choices=("whole", "patch")
    )
    foreground: float = _patches(
        1 / 3, "share of patches around labels (default: 1/3)", "F", at_least=0, at_most=1
    )
    patches_per_case: int = _patches(
        1,
        "patches of a case in an epoch (default: as many as together have its number of voxels)",
        "N",
        at_least=1,
    )
    device: str = _patches(
        "cpu", "cpu, or gpu:0 (default: for patches a GPU if there is one, else cpu)", "D"
    )

    init: str = _training(
        "",
        "start from the weights of a run, its best ones, or from a weights file of a run; channels "
        "and regions are matched by name",
        "RUN",
    )
    """An absolute path, which is read once: a run that continues has its own weights."""
    freeze: str = _training(
        "none",
        "with --init: layers that stay as they are; encoder: all but the decoder and the heads",
        choices=FREEZE,
    )
    epochs: int = _training(
        100, "passes over the cases, at either resolution", "N", at_least=1, one_of="length"
    )
    steps: int = _training(
        0,
        "updates in all, at either resolution, instead of --epochs",
        "N",
        at_least=0,
        typed_at_least=1,
        one_of="length",
    )
    budget_minutes: float = _training(
        0.0,
        "take only as many of the epochs' steps as fit these minutes; 0: no limit",
        "M",
        at_least=0,
    )
    """By the time of the first steps; at least an epoch, the epochs of --validate-every, or a step
    if --validations was chosen."""
    curriculum: str = _training(
        AUTO,
        f"half: the first {COARSE_SHARE} of the steps at half resolution, or on patches of half "
        "the edge, along the axes that the network's first level halves, the others at full "
        "resolution; auto: half if the grid of those first steps has 40^3 voxels or more, else off",
        choices=(AUTO, "off", "half"),
    )
    batch: int = _training(
        1, "volumes a step, of all workers together", "N", at_least=1, one_of="batch"
    )
    """An epoch is as many whole batches as the cases fill, so it may leave some to the next."""
    micro_batch: int = _training(
        0,
        "volumes computed at once, a divisor of --batch (default: the recipe's, else 1; with batch "
        "norm the whole batch). A continued run keeps its value; with batch norm it must",
        metavar="M",
        typed_at_least=1,
    )
    """Their gradients are summed. 0 is by rule, as `memory_estimator.job.micro_of` says."""
    loss: str = _training(DEFAULT_LOSS, "what is minimised", choices=tuple(LOSSES))
    optimizer: str = _training("muon", "rule that updates the weights", choices=tuple(OPTIMIZERS))
    learning_rate: Optional[float] = _training(
        None,
        f"learning rate after the warm-up (default: {_RATES})",
        "R",
        above=0,
    )
    adam_rate: float = _training(
        0.03,
        "with muon: Adam's rate, for norms, biases and the 1x1x1 head",
        "R",
        above=0,
    )
    weight_decay: float = _training(
        0.0,
        "share of a kernel that a step takes away, times the learning rate; such as 0.1",
        "W",
        at_least=0,
    )
    schedule: str = _training("cosine", "decay of the learning rate", choices=tuple(SCHEDULES))
    warmup_steps: int = _training(
        10, "first steps, over which the learning rate rises linearly", "N", at_least=0
    )
    validate_every: int = _training(
        0,
        f"epochs between validations (default: one, or as many as make {VALIDATIONS} validations "
        "in all)",
        "N",
        at_least=0,
        typed_at_least=1,
        one_of="often",
    )
    validations: int = _training(
        0,
        "validations in all, evenly spread, instead of --validate-every",
        "N",
        at_least=0,
        typed_at_least=1,
        one_of="often",
    )
    patience: int = _training(0, "stop after N validations without gain; 0: never", "N", at_least=0)
    save_minutes: float = _training(
        10.0, "longest time between checkpoints; 0: one after each step", "M", at_least=0
    )
    """There is one after every validation as well."""
    keep: int = _training(3, "checkpoints to keep, besides the best weights", "K", at_least=1)
    stall_minutes: float = _training(
        15.0, "a step that takes longer counts as hanging; 0: no limit", "M", at_least=0
    )
    """And ten times longer than any before. A phase that is done for the first time may take four
    times as long."""
    seed: int = _training(0, "seed of weights, order and augmentation", "S")
    """The split has the store's own."""
    engine: str = _training(
        AUTO,
        "itex (TensorFlow with Intel's extension) or stock; auto: itex if installed",
        choices=(AUTO, *ENGINES),
    )

    def __post_init__(self) -> None:
        check(self, InputError)
        try:
            check_micro_batch(self.batch, self.micro_batch)
        except ValueError as error:
            raise InputError(str(error)) from None
        if self.is_patch and self.resolution != 1:
            rule = "--resolution must be 1 with --mode patch"
            raise InputError(f"{rule}, got {self.resolution}; see `train --help`")
        if self.freeze != "none" and not self.init:
            rule = f"--freeze {self.freeze} must come with --init"
            raise InputError(f"{rule}, got none: its weights would stay random; add --init")

    @property
    def micro(self) -> int:
        """Volumes computed at a time."""
        return micro_of(self.unet.norm, self.batch, self.micro_batch)

    @property
    def peak_rate(self) -> float:
        """The learning rate after the warm-up."""
        return self.learning_rate or OPTIMIZERS[self.optimizer].learning_rate

    @property
    def has_open_length(self) -> bool:
        """Whether a budget of minutes is still to become steps."""
        return bool(self.budget_minutes) and not self.steps

    @property
    def is_patch(self) -> bool:
        """Whether the network sees patches."""
        return self.mode == "patch"

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.batch // self.micro


@dataclass(frozen=True)
class InitRecord:
    """The weights that a run has started from, and what of them it took."""

    file: str  # its absolute path
    sha256: str  # of the file
    step: int  # steps after which these weights were saved
    split_hash: str  # of their run
    layers: int  # of the network that have weights
    fresh_layers: Tuple[str, ...]  # of them, those of which nothing was taken
    channels: Tuple[str, ...]  # of this run, whose kernels were taken
    new_channels: Tuple[str, ...]
    regions: Tuple[str, ...]  # of this run, whose heads were taken
    new_regions: Tuple[str, ...]
    are_named: bool  # whether the names are known; else channels and regions were taken in order
    seen: Optional[Tuple[str, ...]]
    """Held-out cases of this run whose patients those weights were trained on. None if that is not
    known."""
    warnings: Tuple[str, ...] = ()
    """What of this run's images is not as those weights know it."""


@dataclass(frozen=True)
class Decided:
    """What a plan decides of a run that no setting gives."""

    grid: Tuple[int, int, int] = (0, 0, 0)
    """Voxels X, Y, Z that the network sees: a patch, or all of the extent."""
    coarse_grid: Tuple[int, int, int] = (0, 0, 0)
    """The same in the first `coarse_steps` steps: half resolution, or a patch of half the edge,
    along the axes of `coarse_stride`."""
    coarse_stride: Tuple[int, int, int] = EVERY_AXIS
    """2 for the axes X, Y, Z that coarse steps halve, and that have `resolution`; 1 for those that
    stay as they are. It is the stride of the network's first level; all axes in runs of earlier
    versions, and without coarse steps at full resolution."""
    coarse_steps: int = 0  # steps that a curriculum takes first; 0 without one
    init_record: Optional[InitRecord] = None  # of a run that started from `init`


@dataclass(frozen=True)
class RunConfig(Decided, Settings, StoreFacts):
    """A training run, all of it: nothing is left open. Two runs of equal configs on equal hosts are
    equal."""

    @property
    def settings(self) -> Settings:
        """Its settings alone."""
        names = [setting.name for setting in dataclasses.fields(Settings)]
        return Settings(**{name: getattr(self, name) for name in names})

    @property
    def codes_by_region(self) -> PaintedRegions:
        """Region -> its label codes, of the regions that are learnt, in the order of the network's
        outputs."""
        codes = {name: self.region_codes[name] for name in self.regions}
        return PaintedRegions(codes, self.paint)

    @property
    def mirrored_axes(self) -> Tuple[int, ...]:
        """The axes of X, Y, Z that it is trained on mirror images along."""
        return self.augment.mirrored_axes(all_names(self.label_names, self.region_codes))

    def to_json(self) -> Dict[str, Any]:
        """JSON content, of which the run can be made again."""
        content = {**dataclasses.asdict(self), "unet": self.unet.to_json()}
        content["normalisation"] = [each.to_json() for each in self.normalisation]
        if not self.normalisation:  # as before there was another than over the foreground
            del content["normalisation"]
        if self.coarse_stride == EVERY_AXIS:  # as before there was another
            del content["coarse_stride"]
        return content

    @property
    def resolution_by_axis(self) -> Resolution3:
        """The share of the store's voxels along X, Y, Z that volumes are averaged down to."""
        return lowered(self.resolution, self.coarse_stride)

    def rate_at(self, step: int, steps: int) -> float:
        """The learning rate of step `step` (0 is the first) of `steps`: linear warm-up, then the
        decay, under a curriculum over the coarse steps and again, from FULL_RATE_SHARE of the peak,
        over the full ones. A run that is made longer decays over its new length, so its rate rises
        again at the join."""
        peak = self.peak_rate
        begin = self.warmup_steps
        end = steps
        if step < self.coarse_steps:
            end = self.coarse_steps
        elif self.coarse_steps:
            peak *= FULL_RATE_SHARE
            begin = max(begin, self.coarse_steps)
        if step < self.warmup_steps:
            return peak * (step + 1) / self.warmup_steps
        return peak * SCHEDULES[self.schedule]((step - begin) / (end - begin))

    def full_steps(self, steps: int) -> float:
        """The number of full steps with the voxels of the run's first `steps`: its cost on any
        host."""
        coarse = min(steps, self.coarse_steps)
        if not coarse:
            return steps
        return steps - coarse + coarse * (math.prod(self.coarse_grid) / math.prod(self.grid))

    def at(self, step: int) -> "RunConfig":
        """The run as step `step` (0 is the first) is computed: without its curriculum, on one
        grid.

        At half of it the policy is "speed"."""
        if step >= self.coarse_steps:
            return dataclasses.replace(self, coarse_steps=0)
        resolution = self.resolution if self.is_patch else self.resolution / 2
        return dataclasses.replace(
            self.with_policy("speed"), grid=self.coarse_grid, resolution=resolution, coarse_steps=0
        )

    def validates_after(self, step: int, steps: int, steps_per_epoch: int) -> bool:
        """Whether a validation is due after `step` of so many steps, or would be if cases were held
        out for it."""
        if self.validations:  # the i-th of them as soon as that share of the steps is done
            return step * self.validations // steps > (step - 1) * self.validations // steps
        return step % (steps_per_epoch * self.validate_every) == 0

    def after(self, step: int) -> "RunConfig":
        """The run as the last of its first `step` steps is computed: how the weights predict that
        are then there. The step after the last coarse one is a full one, but the weights before it
        are coarse."""
        return self.at(max(step - 1, 0))

    @property
    def is_coarse(self) -> bool:
        """Whether this is the run as coarse steps are computed."""
        return self.grid == self.coarse_grid

    def with_coarse_share(self, steps: int) -> "RunConfig":
        """The same run with COARSE_SHARE of `steps` coarse, rounded down, if it has a
        curriculum."""
        has_curriculum = self.curriculum == "half"
        coarse_steps = int(COARSE_SHARE * steps) if has_curriculum else 0
        return dataclasses.replace(self, coarse_steps=coarse_steps)

    def with_policy(self, policy: str) -> "RunConfig":
        """The same run under another memory policy."""
        return dataclasses.replace(self, unet=dataclasses.replace(self.unet, policy=policy))


def left_open(value: Optional[str]) -> Optional[str]:
    """`value`, or None if it is AUTO."""
    return None if value == AUTO else value
