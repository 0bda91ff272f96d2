"""What a training run is, as frozen records that are saved with it. No TensorFlow."""

import dataclasses
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Tuple

from cpu3d.data.augment import AugmentConfig
from cpu3d.data.files.reader import READ_MODES
from cpu3d.data.region import EXTENTS
from cpu3d.data.splits import parse_fold
from cpu3d.errors import InputError
from cpu3d.training.schedule import SCHEDULES
from cpu3d.util.atomic import write_json
from memory_estimator.files import read_json, typed
from memory_estimator.job import OPTIMIZERS, check_micro_batch, micro_of
from models.config import UNetConfig

SCHEMA = 1
"""Version of the run folder's layout. A run of another version is refused, never guessed at."""

FREE = (
    *("store", "epochs", "steps", "budget_minutes", "patience", "validate_every", "validations", "read_mode"),
    *("save_minutes", "keep", "stall_minutes", "deterministic", "device", "micro_batch", "unet.policy"),
)
"""Settings that may change when a run is continued; all others would make it another run. The last three are how a step
is computed: the run then goes on alike, but not to the bit. With batch norm the micro-batch is none of them, as its
statistics are of what is computed together."""

MODES = ("whole", "patch")
"""What a step sees of a case: all of its extent, or a patch of it."""


@dataclass(frozen=True)
class RunConfig:
    """A training run, all of it. Two runs of equal configs on equal hosts are equal."""

    store: str = ""
    """Folder of the store."""
    store_channels: Tuple[str, ...] = ()
    """All image channels of the store: what an image to predict on must have."""
    label_names: Dict[int, str] = field(default_factory=dict)
    """Label code -> name of the store: what predictions are written in."""
    region_codes: Dict[str, Tuple[int, ...]] = field(default_factory=dict)
    """Region -> label codes of the store."""
    split_hash: str = ""
    """Of the store the run was started on: a run never moves to another split."""
    channels: Tuple[str, ...] = ()
    """Image channels used, by name; () means all of the store's."""
    regions: Tuple[str, ...] = ()
    """Regions learnt, by name, one output each; () means all of the store's."""
    extent: str = "brain"
    """ "brain": the box around the brain, the same size for all cases. "full": the whole grid, padded."""
    mode: str = "whole"
    """One of MODES."""
    grid: Tuple[int, int, int] = (0, 0, 0)
    """Voxels X, Y, Z that the network sees: the patch, or in mode whole what follows from store, extent and
    resolution."""
    foreground: float = 1 / 3
    """Share of the patches that are drawn around labelled voxels, as `cpu3d.data.sampling` says."""
    patches_per_case: int = 1
    """Patches of each case in an epoch. By default as many as make up the extent's voxels, so that an epoch sees as
    much in either mode."""
    resolution: float = 1.0
    """Share of the store's resolution along each axis that the network sees, up to 1; mode whole only. Predictions and
    scores are on the full grid all the same."""
    fold: str = ""
    """ "2/5": validate on the second of five parts of the training and validation cases, train on the others; "" is the
    store's own split. Test cases are untouched either way."""
    unet: UNetConfig = field(default_factory=UNetConfig)
    """The network; its channels, outputs and dtype follow from the store and the host."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    batch: int = 1
    """Volumes a step, of all workers together. An epoch is as many whole batches as the cases fill, so it may leave
    some to the next."""
    micro_batch: int = 0
    """Volumes computed at a time, whose gradients are then summed; it divides `batch`. 0 is by rule, as
    `memory_estimator.job.micro_of` says."""
    epochs: int = 100
    """Passes over the training cases."""
    steps: int = 0
    """Optimizer steps in all; 0 is by epochs."""
    budget_minutes: float = 0.0
    """Wall time that the steps may take; 0 is no limit. While `steps` is 0 they are to be timed, which sets it."""
    optimizer: str = "adam"
    learning_rate: float = 2e-3
    """At the end of the warm-up. One real glioma was learnt alike with 1e-3 to 5e-3."""
    warmup_steps: int = 10
    schedule: str = "cosine"
    ema: float = 0.0
    """Decay of an exponential moving average of the weights, used for validation and prediction; 0 is off."""
    validate_every: int = 1
    """Epochs between validations on the whole held-out volumes."""
    validations: int = 0
    """Validations in all, evenly spread over the steps; 0 is by `validate_every`."""
    patience: int = 0
    """Stop after this many validations without a better mean Dice; 0 never stops."""
    save_minutes: float = 10.0
    """Longest time between checkpoints; there is one after every validation as well."""
    keep: int = 3
    """Checkpoints that are kept, besides the best weights: of the last steps that were saved."""
    stall_minutes: float = 15.0
    """A step, a validation or a wait that takes longer, and ten times longer than any before, counts as hanging: the
    process says where and ends. 0 never looks."""
    deterministic: bool = False
    """Have TensorFlow refuse what may differ from one time to the next. On a CPU the bits are the same without."""
    seed: int = 0
    """Of the initial weights, the order and the augmentation. The split has the store's own."""
    device: str = "cpu"
    """ "cpu", or a card such as "gpu:0"."""
    engine: str = "auto"
    """ "itex", "stock", "stock-no-onednn", or "auto": ITEX where it is installed."""
    read_mode: str = "auto"
    """How the store's files are read, one of READ_MODES; the volumes are the same to the bit."""

    def __post_init__(self):
        for name in ("batch", "epochs", "validate_every", "patches_per_case", "keep"):
            _require(getattr(self, name) >= 1, name, "be at least 1", getattr(self, name))
        for name in ("steps", "validations", "patience", "warmup_steps", "save_minutes", "stall_minutes"):
            _require(getattr(self, name) >= 0, name, "be at least 0", getattr(self, name))
        _require(0 <= self.budget_minutes < math.inf, "budget_minutes", "be a number from 0 on", self.budget_minutes)
        try:
            check_micro_batch(self.batch, self.micro_batch)
        except ValueError as error:
            raise InputError(str(error)) from None
        _require(self.learning_rate > 0, "learning_rate", "be positive", self.learning_rate)
        _require(0 <= self.ema < 1, "ema", "be in [0, 1)", self.ema)
        _require(0 <= self.foreground <= 1, "foreground", "be in [0, 1]", self.foreground)
        _require(0 < self.resolution <= 1, "resolution", "be above 0 and at most 1", self.resolution)
        _require(self.mode == "whole" or self.resolution == 1, "resolution", "be 1 with --mode patch", self.resolution)
        if self.fold:
            parse_fold(self.fold)
        _require(bool(re.fullmatch(r"cpu|gpu:\d+", self.device)), "device", "be cpu, or gpu:0 and so on", self.device)
        for name, allowed in (
            ("mode", MODES),
            ("extent", EXTENTS),
            ("optimizer", OPTIMIZERS),
            ("schedule", SCHEDULES),
            ("read_mode", READ_MODES),
        ):
            _require(getattr(self, name) in allowed, name, f"be one of {', '.join(allowed)}", getattr(self, name))

    @property
    def micro(self) -> int:
        """Volumes computed at a time."""
        return micro_of(self.unet.norm, self.batch, self.micro_batch)

    @property
    def is_patch(self) -> bool:
        """Whether the network sees patches."""
        return self.mode == "patch"

    @property
    def parts(self) -> int:
        """Micro-batches a step."""
        return self.batch // self.micro


def save_config(config: RunConfig, run: Path) -> None:
    """Write `run`/config.json, atomically."""
    write_json(Path(run) / "config.json", {"schema": SCHEMA, **config_to_json(config)})


def load_config(run: Path) -> RunConfig:
    """Read `run`/config.json. Raises InputError when there is none, or it is damaged, or of another version."""
    path = Path(run) / "config.json"
    if not path.is_file():
        raise InputError(f"run {run} must hold a config.json, found none; name a folder that `train` has written")
    try:
        content = read_json(path)
        schema = content.pop("schema")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"run config {path} must be JSON with a schema, got {error!r}; restore it") from None
    if schema != SCHEMA:
        raise InputError(f"run {run} must have schema {SCHEMA}, got {schema}; use the version that made it, or retrain")
    try:
        return config_from_json(content)
    except (InputError, KeyError, ValueError) as error:
        raise InputError(f"run config {path} must be complete, got {error}; restore it") from None


def config_to_json(config: RunConfig) -> Dict[str, Any]:
    return dataclasses.asdict(config)


def config_from_json(content: Dict[str, Any]) -> RunConfig:
    """Raises ValueError and InputError for content that is none, and KeyError for what no run is without."""
    needed = {name: content[name] for name in _NEEDED}
    # A run from before there was a choice goes on as it was.
    config = typed({"micro_batch": needed["batch"], **content}, RunConfig, "config")
    if config.store_channels:  # what follows from a store is known
        for name, there in (("channels", config.store_channels), ("regions", config.region_codes)):
            chosen = getattr(config, name)
            _require(bool(chosen) and set(chosen) <= set(there), name, f"be some of {', '.join(there)}", chosen)
        _require(min(config.grid) >= 1, "grid", "be positive", config.grid)
    return config


def differences(old: RunConfig, new: RunConfig) -> List[str]:
    """Settings that keep a run of `old` from being continued as `new`, each with both values.

    Of another mode nothing else is told, as other settings follow from it. A micro-batch that batch norm has to keep is
    compared as it is computed, however it is spelled; one of another batch is not, as it follows the batch.
    """
    left, right = _flat(dataclasses.asdict(old)), _flat(dataclasses.asdict(new))
    free = set(FREE)
    if old.unet.norm == new.unet.norm == "batch" and old.batch == new.batch:
        free.remove("micro_batch")
        left["micro_batch"], right["micro_batch"] = old.micro, new.micro
    return [
        f"{name} must stay as the run was started, got {right.get(name)!r} for {left.get(name)!r}; "
        "leave it out, or train into another folder"
        for name in ({**left, **right} if old.mode == new.mode else ("mode",))
        if name not in free and left.get(name) != right.get(name)
    ]


# --- Private helpers ---

_NEEDED = (
    *("store_channels", "label_names", "region_codes", "split_hash"),
    *("channels", "regions", "grid", "batch", "unet"),
)
"""What no saved run is without."""


def _require(holds: bool, name: str, rule: str, value: Any) -> None:
    if not holds:
        raise InputError(f"{name} must {rule}, got {value}; see `train --help`")


def _flat(content: Dict[str, Any], prefix: str = "") -> Dict[str, Any]:
    flat = {}
    for name, value in content.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat
