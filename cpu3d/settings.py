"""A training run as data: what a user chose, what its store is, and what the plan decided.

    add_options(parser, SETTINGS)                                 # that a user may choose
    chosen, = arguments([SETTINGS], parser.parse_args())          # those that were given
    settings = with_settings(recipe_settings(chosen), chosen)     # in their places

A setting's one declaration makes its option, its check and its place in config.json. `Chosen` is
what a user gave, name -> value. `Settings` have a value for each setting, some still open, such as
"auto"; `StoreFacts` are what the store is; `Decided` is what no setting gives. A `RunConfig` is
these three with nothing left open, as `cpu3d.plan` makes it and config.json holds it. How far a run
has got is in none of them: `cpu3d.run.checkpoint.Progress` has that. No TensorFlow.
"""

import dataclasses
import fractions
import functools
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, TypeVar

from cpu3d.data.augment import AUGMENTS, AugmentConfig
from cpu3d.data.labels import PaintedRegions
from cpu3d.data.region import EXTENTS, NO_GRID, round_up
from cpu3d.errors import InputError
from cpu3d.store_facts import StoreFacts
from memory_estimator.common.schema import check, option, to_command_line
from memory_estimator.job import (
    AUTO,
    DEFAULT_RECIPE,
    RECIPES,
    Architecture,
    check_micro_batch,
    micro_of,
)
from models.config import DTYPES, POLICIES, UNetConfig
from models.optimizers import OPTIMIZERS
from models.strides import shape3
from models.weights import FREEZE

COARSE_SHARE = fractions.Fraction(5, 6)
"""The share of a run's steps that a curriculum takes at half resolution, with an eighth of a full
step's voxels if all axes are halved (records/log.md)."""

FULL_RATE_SHARE = 0.3
"""The peak of the learning rate of the full steps after coarse ones, as a share of the coarse
steps' peak. By the whole of it the full steps would forget what the coarse ones have learnt
(records/log.md)."""
COARSE_RATE = 0.01  # of Muon where no full step follows: hearts gain 0.01 (records/log.md)

WARMUP_STEPS = 10
"""First steps, over which the learning rate rises linearly; of a short run a twentieth (of 72 steps
3 were better than 5, records/log.md)."""

VALIDATIONS = 20
"""Validations of a run, evenly spread, unless it has fewer epochs or a setting says how often. An
epoch of few cases is over in seconds, and the best of many scores of few cases is chance."""

LEAST_CASES = 2  # that must have a region before post-processing removes anything of it

_data = functools.partial(option, group="data")
_patches = functools.partial(option, group="patches")
_training = functools.partial(option, group="training")

_RATES = ", ".join(f"{name} {o.learning_rate:g}" for name, o in OPTIMIZERS.items())


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
    fold: str = _data("", "cross-validation: hold out the I-th of K parts, such as 2/5", "I/K")
    """The parts are of the training and validation cases; test cases are untouched. "" is the
    store's own split."""
    mode: str = _patches(
        "whole", "train on whole volumes, or on patches of them", choices=("whole", "patch")
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
    """By the time of the first steps; at least an epoch, or a step if --validations was chosen."""
    curriculum: str = _training(
        AUTO,
        f"half: the first {COARSE_SHARE} of the steps at half resolution, or on patches of half "
        "the edge, along the axes that the network's first level halves, the others at full "
        "resolution; all: all steps at half resolution, most on crops around the labels, with "
        "answers interpolated to full; auto: all for thick slices, else half, and off below 40^3 "
        "voxels at half",
        choices=(AUTO, "off", "half", "all"),
    )
    batch: int = _training(1, "volumes a step, of all workers together", "N", at_least=1)
    """An epoch is as many whole batches as the cases fill, so it may leave some to the next."""
    micro_batch: int = _training(
        0,
        "volumes computed at once, a divisor of --batch (default: the recipe's, else 1; with batch "
        "norm the whole batch). A continued run keeps its value; with batch norm it must",
        metavar="M",
        typed_at_least=1,
    )
    """Their gradients are summed. 0 is by rule, as `memory_estimator.job.micro_of` says."""
    optimizer: str = _training("muon", "rule that updates the weights", choices=tuple(OPTIMIZERS))
    learning_rate: Optional[float] = _training(
        None,
        f"learning rate after the warm-up (default: {_RATES}; muon {COARSE_RATE:g} with "
        "--curriculum all)",
        "R",
        above=0,
    )
    validations: int = _training(
        0,
        f"validations in all, evenly spread (default: one an epoch, at most {VALIDATIONS})",
        "N",
        at_least=0,
        typed_at_least=1,
    )
    seed: int = _training(0, "seed of weights, order and augmentation", "S")
    """The split has the store's own."""

    def __post_init__(self) -> None:
        check(self, InputError)
        try:
            check_micro_batch(self.batch, self.micro_batch)
        except ValueError as error:
            raise InputError(str(error)) from None
        if self.freeze != "none" and not self.init:
            raise InputError(
                f"--freeze {self.freeze} must come with --init, got none: its weights would stay "
                "random; add --init"
            )

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
    seen: Optional[bool]
    """Whether those weights were trained on patients that this run holds out; None if that is not
    known."""
    warnings: Tuple[str, ...] = ()
    """What of this run's images is not as those weights know it."""


@dataclass(frozen=True)
class Decided:
    """What a plan decides of a run that no setting gives."""

    grid: Tuple[int, int, int] = NO_GRID
    """Voxels X, Y, Z of a patch, or of the largest case, whose step takes most memory. A step on
    whole volumes has the grid of its own cases."""
    coarse_grid: Tuple[int, int, int] = NO_GRID
    """The same in the first `coarse_steps` steps: a patch of half the edge along the axes that the
    network's first level halves, or a whole volume, of which the network averages pairs of voxels
    along them."""
    samples_per_case: int = 1
    """In an epoch: as many patches, or crops and whole volumes, as have a whole one's voxels."""
    coarse_steps: int = 0  # steps that a curriculum takes first; 0 without one
    whole_every: int = 1  # steps of which one is on whole volumes, the others on crops
    crop_share: float = 1.0  # of a whole volume's voxels, that crops have
    init_record: Optional[InitRecord] = None  # of a run that started from `init`


@dataclass(frozen=True)
class RunConfig(Decided, Settings, StoreFacts):
    """A training run, all of it: nothing is left open. Two runs of equal configs on equal hosts are
    equal."""

    @property
    def codes_by_region(self) -> PaintedRegions:
        """Region -> its label codes, of the regions that are learnt, in the order of the network's
        outputs."""
        codes = {name: self.region_codes[name] for name in self.regions}
        return PaintedRegions(codes, self.paint)

    @property
    def mirrored_axes(self) -> Tuple[int, ...]:
        """The axes of X, Y, Z that it is trained on mirror images along."""
        return self.augment.mirrored_axes((*self.label_names.values(), *self.region_codes))

    def to_json(self) -> Dict[str, Any]:
        """JSON content, of which the run can be made again."""
        content = {**dataclasses.asdict(self), "unet": self.unet.to_json()}
        content["normalisation"] = [each.to_json() for each in self.normalisation]
        return content

    def grid_of(self, extent: Sequence[int]) -> Tuple[int, int, int]:
        """Voxels X, Y, Z of the image for a whole volume of this extent."""
        return round_up(shape3(extent), self.unet.divisors)

    @property
    def coarse_seen_grid(self) -> Tuple[int, int, int]:
        """Voxels X, Y, Z of the network's finest level in the coarse steps of the largest case."""
        coarse = self.at(0)
        return coarse.unet.grid(coarse.grid, 0)

    def rate_at(self, step: int, steps: int) -> float:
        """The learning rate of step `step` (0 is the first) of `steps`: linear warm-up, then half a
        cosine, under a curriculum over the coarse steps and again, from FULL_RATE_SHARE of the
        peak, over the full ones. A run that is made longer decays over its new length, so its rate
        rises again at the join."""
        peak = self.peak_rate
        warmup = min(WARMUP_STEPS, steps // 20)
        begin = warmup
        end = steps
        if step < self.coarse_steps:
            end = self.coarse_steps
        elif self.coarse_steps:
            peak *= FULL_RATE_SHARE
            begin = max(begin, self.coarse_steps)
        if step < warmup:
            return peak * (step + 1) / warmup
        return peak * 0.5 * (1 + math.cos(math.pi * (step - begin) / (end - begin)))

    def full_steps(self, steps: int) -> float:
        """The number of full steps with the voxels of the run's first `steps`: its cost on any
        host."""
        coarse = min(steps, self.coarse_steps)
        of_coarse = math.prod(self.coarse_seen_grid) / self.seen_voxels
        return (steps - coarse) * self.step_share + coarse * of_coarse

    @property
    def step_share(self) -> float:
        """The voxels of the mean full step as a share of those of one on whole volumes."""
        return self.crop_share + (1 - self.crop_share) / self.whole_every

    @property
    def seen_voxels(self) -> int:
        """Voxels of the network's finest level in a full step of the largest case."""
        return math.prod(self.unet.grid(self.grid, 0))

    def at(self, step: int) -> "RunConfig":
        """The run as step `step` (0 is the first) is computed: without its curriculum, by one
        network.

        That of coarse steps averages whole volumes; its policy is "speed"."""
        if step >= self.coarse_steps:
            return dataclasses.replace(self, coarse_steps=0)
        average = self.unet.average if self.is_patch else self.unet.stride(0)
        unet = dataclasses.replace(self.unet, policy="speed", average=average)
        return dataclasses.replace(self, unet=unet, grid=self.coarse_grid, coarse_steps=0)

    def validates_after(self, step: int, steps: int) -> bool:
        """Whether a validation is due after `step` of so many steps, or would be if cases were held
        out for it: the i-th as soon as that share of the steps is done."""
        return step * self.validations // steps > (step - 1) * self.validations // steps

    def after(self, step: int) -> "RunConfig":
        """The run as the last of its first `step` steps is computed: how the weights predict that
        are then there. The step after the last coarse one is a full one, but the weights before it
        are coarse."""
        return self.at(max(step - 1, 0))

    @property
    def is_coarse(self) -> bool:
        """Whether this is the run as coarse steps are computed."""
        is_grid = self.grid == self.coarse_grid != NO_GRID
        return is_grid and (self.is_patch or self.unet.averages)

    def with_coarse_share(self, steps: int) -> "RunConfig":
        """The same run with COARSE_SHARE of `steps` coarse, rounded down, if it has a
        curriculum."""
        coarse_steps = int(COARSE_SHARE * steps) if self.curriculum == "half" else 0
        return dataclasses.replace(self, coarse_steps=coarse_steps)

    def shortened(self, step: int, steps: int) -> "RunConfig":
        """The same run, of which `step` steps are done, with the coarse steps of `steps` in all; no
        full step becomes coarse."""
        coarse = min(self.with_coarse_share(steps).coarse_steps, self.coarse_steps)
        return dataclasses.replace(self, coarse_steps=max(coarse, min(step, self.coarse_steps)))

    def with_policy(self, policy: str) -> "RunConfig":
        """The same run under another memory policy."""
        return dataclasses.replace(self, unet=dataclasses.replace(self.unet, policy=policy))


# --- What a user chooses ---

_network = functools.partial(option, group="network")

_SUMMARIES = " ".join(f"{name}: {recipe.summary}" for name, recipe in RECIPES.items())


@dataclass(frozen=True)
class Network(Architecture):
    """Fields of UNetConfig that a user may choose."""

    dtype: str = _network(AUTO, "auto: bfloat16 if it is fast here", choices=(AUTO, *DTYPES))
    policy: str = _network(
        AUTO,
        "memory policy; auto: the fastest that fits the free memory, or the policy of the run that "
        "continues",
        choices=(AUTO, *POLICIES),
    )


@dataclass(frozen=True)
class Shorthand:
    """Options that become other settings: the recipe's, the grid, the augmentation."""

    recipe: Optional[str] = option(
        None,
        f"settings to start from (default: {DEFAULT_RECIPE}). {_SUMMARIES}",
        choices=sorted(RECIPES),
        group="data",
    )
    patch: Optional[Tuple[int, int, int]] = option(
        None,
        "voxels of a patch (default: the largest that fits the card; on a CPU 128 128 128, cut to "
        "the volume)",
        metavar=("X", "Y", "Z"),
        group="patches",
    )
    augment: Optional[str] = option(
        None,
        "light: flips, brightness and offset; nnunet: rotation, scaling, contrast, gamma, noise, "
        "blur and low resolution too, as nnU-Net has them; cutmix: light, and boxes of other cases "
        f"(default: that of the recipe, cutmix of {DEFAULT_RECIPE}, light of others)",
        choices=tuple(AUGMENTS),
        group="augmentation",
    )


SETTINGS = (Settings, Shorthand, Network, AugmentConfig)
"""The declarations of all settings that a user may choose; others come from the recipe, or the
continued run."""

Chosen = Mapping[str, Any]
"""What a user chose: field name of one of SETTINGS -> value."""


@dataclass(frozen=True)
class TrainOptions:
    """Options of `train` besides the settings of a run."""

    store: Path = option(help="store that `prepare` has written", metavar="DIR")
    run: Path = option(help="folder for the run; continued if it exists", metavar="DIR")
    folds: Optional[int] = option(
        None,
        "train all K folds in turn, into RUN/fold-1 to RUN/fold-K, and score each case by the fold "
        "that held it out",
        "K",
        at_least=2,
    )
    dry_run: bool = option(
        False, "print the plan, its memory and its hours, and end: nothing is written"
    )
    json: bool = option(False, "with --dry-run: print the plan as one JSON object")
    force: bool = option(
        False, "train even if the job may not fit the free memory, or no training case is labelled"
    )
    mlflow: str = option(
        "", "also track the run here, such as sqlite:///mlflow.db or http://localhost:5000", "URI"
    )
    """No setting of the run: it may hold a password, which is never written to a file."""


TRAIN_OPTIONS = (TrainOptions, SETTINGS)  # "OPTIONS" of `train`, which `launch` reads too

LENGTH = ("epochs", "steps", "budget_minutes")  # of which a later call replaces all
S = TypeVar("S", bound=Settings)


def located(chosen: Chosen) -> Dict[str, Any]:
    """The chosen settings with absolute paths: a process that starts in another folder reads them
    too."""
    if not chosen.get("init"):
        return dict(chosen)
    return {**chosen, "init": os.path.abspath(chosen["init"])}


def as_options(chosen: Chosen) -> List[str]:
    """The command line of these settings."""
    words = []
    for cls in SETTINGS:
        words += to_command_line(cls, chosen)
    return words


def recipe_settings(chosen: Chosen) -> Settings:
    """The settings of the chosen "recipe", or of DEFAULT_RECIPE. dtype and grid follow from host
    and store."""
    recipe = RECIPES[chosen.get("recipe") or DEFAULT_RECIPE]
    job = recipe.job
    job_settings = Settings(
        unet=job.unet, batch=job.batch, micro_batch=job.micro_batch, optimizer=job.optimizer
    )
    return with_settings(job_settings, recipe.settings)


def chosen_again(before: Chosen, now: Chosen) -> Dict[str, Any]:
    """The settings chosen in two calls: those of the later one, and of the earlier one those that
    they do not replace."""
    replaced = set(now)
    if replaced.intersection(LENGTH):
        replaced.update(LENGTH)
    return {**{name: value for name, value in before.items() if name not in replaced}, **now}


def with_settings(settings: S, chosen: Chosen) -> S:
    """`settings` with the chosen ones in their places, but for values of "auto", the recipe and the
    patch, which the plan decides. A chosen length replaces the one that `settings` have. Raises
    ValueError or InputError for values out of range."""
    if chosen.get("steps") and chosen.get("budget_minutes"):
        raise InputError(
            f"--budget-minutes must come without --steps, got --steps {chosen['steps']}; leave one "
            "out"
        )
    chosen = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in chosen.items()
        if value != AUTO
    }
    augment = settings.augment
    if chosen.get("augment"):
        augment = AUGMENTS[chosen["augment"]]
    augment = dataclasses.replace(augment, **_fields_of(AugmentConfig, chosen))
    network_settings = _fields_of(Network, chosen)
    if network_settings.get("strides"):
        network_settings.setdefault("depth", len(network_settings["strides"]) + 1)
    if network_settings.get("depth", settings.unet.depth) != settings.unet.depth:
        network_settings.setdefault("strides", ())  # those that there are are of another depth
    unet = dataclasses.replace(settings.unet, **network_settings)
    own = _fields_of(Settings, chosen)
    if any(name in own for name in LENGTH):
        own = {"steps": 0, "budget_minutes": 0.0, **own}
    return dataclasses.replace(settings, **{**own, "unet": unet, "augment": augment})


def _fields_of(cls: type, chosen: Chosen) -> Dict[str, Any]:
    """The chosen settings that are fields of `cls`."""
    names = {each.name for each in dataclasses.fields(cls)} - {"unet", "augment"}
    return {name: value for name, value in chosen.items() if name in names}
