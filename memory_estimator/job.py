"""The job to be estimated, one training step: the recipes, and the options of a command line."""

import argparse
import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    Any,
    Dict,
    Literal,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Union,
)

from memory_estimator.common.schema import check_values, given_options, option
from memory_estimator.common.units import by, counted
from memory_estimator.installed import ENGINES, installed_engine
from models.config import DTYPES, MOST_CHANNELS, NETWORKS, NORMS, POLICIES, UPS, UNetConfig
from models.optimizers import OPTIMIZERS
from models.strides import (
    LEAST_MM,
    MOST_MM,
    Strides,
    depth_for,
    divisors_text,
    shape3,
    strides_for,
    strides_reason,
    strides_text,
)
from models.weights import FREEZE

MOST = 2**31 - 1  # volumes of a batch, threads, cases

# a voxel and channel in a store, as int16; of a label it is one a voxel
STORED_BYTES = 2

AUTO = "auto"  # of an option that is decided later

CONTENT_BOX = (
    "what is left of a volume after `train` has cropped its background, of BraTS' 240 x 240 x 155 "
    "voxels about 144 x 192 x 144"
)


@dataclass(frozen=True)
class Job:
    """One training job: everything that its memory and time depend on, the host's speed aside."""

    # its compute dtype and memory policy included
    unet: UNetConfig = field(default_factory=UNetConfig)
    shape: Tuple[int, int, int] = (128, 128, 128)  # voxels X, Y, Z that the network sees
    batch: int = 1  # volumes a step, for one update
    # volumes computed at a time, a divisor of `batch`; 0 is by the rule of `micro_of`
    micro_batch: int = 0
    optimizer: str = "muon"
    # "itex": TensorFlow with Intel's extension; "stock": without it. Both with oneDNN
    engine: str = "itex"
    freeze: str = "none"  # layers that have no update: one of `models.weights.FREEZE`
    threads: int = 1  # threads inside one operation: some scratch is taken once a thread
    # whether a store feeds the step: one batch ahead and samples in preparation count too
    from_store: bool = False
    reworked: bool = False
    """Whether a store's samples are changed in ways that need them whole and in float32, such as
    gamma."""
    mixed: bool = False  # whether a store's samples take boxes of others (CutMix)
    # of a store, the largest case's files; 0 is unknown, and then they are as large as the grid
    case_bytes: int = 0
    cases: int = 0  # training cases, which make an epoch; 0 is unknown

    def __post_init__(self) -> None:
        self.unet.check_shape(self.shape, "--shape")
        for name, least in (("batch", 1), ("threads", 1), ("cases", 0)):
            number = getattr(self, name)
            if number < least:
                raise ValueError(f"--{name} must be at least {least}, got {number}; raise it")
            if number > MOST:
                got = f"{number!s:.40}"
                raise ValueError(f"--{name} must be at most {MOST}, got {got}; lower it")
        check_micro_batch(self.batch, self.micro_batch)
        choices = (("optimizer", tuple(OPTIMIZERS)), ("engine", ENGINES), ("freeze", FREEZE))
        for name, allowed in choices:
            value = getattr(self, name)
            if value not in allowed:
                rule = f"--{name} must be one of {', '.join(allowed)}"
                raise ValueError(f"{rule}, got {value!r}; pick one")

    @property
    def policy(self) -> str:
        """The time that a step gives for memory: one of `models.config.POLICIES`."""
        return self.unet.policy

    @property
    def micro(self) -> int:
        """Volumes computed at a time: the batch of all maps of a step, and of its inputs."""
        return micro_of(self.unet.norm, self.batch, self.micro_batch)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step. With more than one their gradients are summed before the
        update."""
        return self.batch // self.micro

    @property
    def voxels(self) -> int:
        """Voxels of a micro-batch, so of all that is computed at a time."""
        return self.micro * math.prod(self.shape)

    def with_unet(self, **changes: Any) -> "Job":
        """The same job with another network. Raises ValueError out of range."""
        return dataclasses.replace(self, unet=dataclasses.replace(self.unet, **changes))

    def describe(self) -> str:
        unet = self.unet
        words = [
            f"{by(self.shape, ' x ')} x {unet.channels} -> {unet.outputs}",
            f"{unet.network}, {unet.depth} levels, {unet.filters} filters, {unet.norm} norm",
        ]
        if unet.strides:
            words.append(f"strides {strides_text(unet.strides)}")
        if unet.averages:
            words.append(f"means of {by(unet.average, ' x ')} voxels")
        if unet.residual:
            words.append("residual")
        if unet.deep_supervision:
            words.append("deep supervision")
        words.append(f"batch {self.batch}")
        if self.micro_batches > 1:
            words.append(f"{self.micro} at a time")
        words.append(f"{unet.dtype}, {self.optimizer}, {self.engine}, policy {self.policy}")
        if self.freeze != "none":
            words.append(f"{self.freeze} frozen")
        words.append(counted(self.threads, "thread"))
        return ", ".join(words)

    def to_json(self) -> Dict[str, Any]:
        """JSON content, with the policy and the micro-batch that the rules give."""
        return {**self.fields(), "policy": self.policy, "micro_batch": self.micro}

    def fields(self) -> Dict[str, Any]:
        """JSON content, of which the job can be made again."""
        return {**dataclasses.asdict(self), "unet": self.unet.to_json()}


def micro_of(norm: str, batch: int, micro_batch: int) -> int:
    """Volumes computed at a time: `micro_batch`; if that is 0 the whole batch with batch norm,
    whose statistics are of the volumes computed together, else 1: the least memory, and the same
    gradients to rounding."""
    if micro_batch:
        return micro_batch
    return batch if norm == "batch" else 1


def check_micro_batch(batch: int, micro_batch: int) -> None:
    """Raise ValueError unless a batch can be computed so many volumes at a time; 0 is by rule,
    which always can be."""
    if micro_batch < 0 or (micro_batch and batch % micro_batch):
        rule = f"--micro-batch must divide the batch of {batch}"
        allowed = ", ".join(map(str, divisors(batch)))
        raise ValueError(f"{rule}, got {micro_batch}; give one of {allowed}")


def statistics_note(norm: str, batch: int, micro: int) -> str:
    """A sentence on batch norm's statistics in a batch computed `micro` volumes at a time; "" if
    they are the same."""
    if norm != "batch" or micro == batch:
        return ""
    volumes = f"{micro} of a batch's {batch} volumes at a time"
    return f"batch norm's statistics are of {volumes}, unlike on whole batches"


def divisors(number: int) -> Tuple[int, ...]:
    """The divisors from 1 to `number`: the micro-batches that a batch can be computed in."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


# holds the demo's brains, padded to 16; real ones fill about 135 x 174 x 136
BRAIN_BOX = (144, 192, 144)
USUAL_PATCH = (128, 128, 128)  # nnU-Net's for BraTS (Isensee et al. 2021)


@dataclass(frozen=True)
class Recipe:
    """A named run: `train --recipe NAME` starts from it, `estimate --recipe NAME` predicts its
    memory and time."""

    summary: str  # A line for the end of a help page
    # on the grid of a typical store: `train` takes a store's own, and the dtype from the host
    job: Job
    # of the trainer, by name
    settings: Mapping[str, Any] = field(default_factory=dict)


_CICEK = UNetConfig(channels=1, outputs=1, filters=32, depth=4, network="cicek2016", norm="batch")
_TODAY = UNetConfig(channels=1, outputs=1, norm="batch", dtype="bfloat16")
_PAPER = {"channels": ("FLAIR",), "regions": ("WT",), "extent": "full", "epochs": 25}

# "Predicted" is for 387 training cases, those of the Decathlon's 484 that a split of 8 1 1 leaves,
# with `--calibration avx512_bf16 --threads 2`, every step in full: the curriculum takes about a
# quarter of that in all. Validation comes on top. No score on real data was verified here.
RECIPES: Dict[str, Recipe] = {
    # Its Dice is of phantoms alone: records/learning.jsonl.
    "demo": Recipe(
        "A run short enough to watch, on the demo's phantoms.",
        Job(UNetConfig(dtype="bfloat16"), BRAIN_BOX, cases=7),
        {"epochs": 10, "validations": 2, "gain": 0.05, "offset": 0.05},
    ),
    # Predicted 2.8 GiB, 6.7 s a volume in bfloat16, 43 minutes an epoch, 18 h in all. The paper
    # (Ojika et al. 2020) reports Dice 0.82 to 0.83 after 25 epochs at batch 16 on the Decathlon's
    # 484 cases.
    "paper-flair": Recipe(
        "The paper's task with a network of today: the whole tumour from FLAIR alone, one sigmoid, "
        "the full grid.",
        Job(_TODAY, (240, 240, 160), cases=484),
        _PAPER,
    ),
    # As published, on a grid cropped to 144 slices, but one volume at a time; the paper took 16 at
    # once. Predicted 10.9 GiB under lean, 143 s a volume in float32, 15 h an epoch; the paper's
    # took 1 TB, 30 s.
    "paper-2020": Recipe(
        "The paper's job: Cicek's wide network, batch 16 computed one volume at a time, FLAIR, "
        "batch norm, 25 epochs.",
        Job(_CICEK, (240, 240, 144), 16, 1, "adam", cases=484),
        {**_PAPER, "curriculum": "off"},
    ),
    # Predicted 1.7 GiB, 3.0 s a volume in bfloat16, 19 minutes an epoch, 32 h in all. For context:
    # nnU-Net, on patches, has a mean Dice of 91.2 over the five folds of BraTS 2021
    # (MIC-DKFZ/nnUNet, documentation/resenc_presets.md).
    "brats-regions": Recipe(
        "The three regions from all four modalities, whole brains; the default.",
        Job(UNetConfig(dtype="bfloat16"), BRAIN_BOX),
        {"augment": "cutmix"},
    ),
    # Assumed 5.8 GiB of the card: the two patches are computed one after the other. Its time is not
    # predicted. For context: nnU-Net's, batch 2 of such patches, takes 7.7 GB and 9 h on an A100
    # (as above).
    "gpu-patch": Recipe(
        "Settings usual on a GPU: the regions, loss and schedule of brats-regions on patches, "
        "batch 2, 32 filters.",
        Job(UNetConfig(filters=32, dtype="bfloat16"), USUAL_PATCH, batch=2),
        {"mode": "patch", "device": "gpu:0"},
    ),
}

DEFAULT_RECIPE = "brats-regions"


@dataclass(frozen=True)
class Architecture:
    """Options of the network between its input and its output, for the estimator and the
    trainer."""

    network: str = option(
        "unet3d",
        ", or ".join(f"{name}, {widths.summary}" for name, widths in NETWORKS.items()),
        choices=tuple(NETWORKS),
        group="network",
    )
    filters: int = option(16, "feature maps of the first convolution", "F", group="network")
    depth: Union[Literal["auto"], int] = option(
        AUTO,
        "levels of resolution; auto: one more than --strides has, else the recipe's, and fewer "
        "where no axis of the median case would keep 4 voxels",
        "L",
        group="network",
    )
    norm: str = option(
        "instance", "normalisation after each convolution", choices=NORMS, group="network"
    )
    up: str = option("transposed", "how the decoder doubles the grid", choices=UPS, group="network")
    strides: Union[Literal["auto"], Strides] = option(
        "auto",
        "voxels along X, Y, Z that become one, for each of the L - 1 halvings, the finest first: 2 "
        "or 1 by axis, such as 2,2,1 2,2,2 2,2,2 2,2,2; auto: by spacing and shape",
        "X,Y,Z",
        group="network",
    )
    residual: bool = option(False, "residual blocks", group="network")
    deep_supervision: bool = option(False, "a loss at every decoder level", group="network")


@dataclass(frozen=True)
class JobOptions(Architecture):
    """The options of a `Job`: its source, the network, and how it is trained."""

    channels: int = option(4, "image channels", "C", at_least=1, at_most=MOST_CHANNELS)
    classes: int = option(3, "output regions", "K", at_least=1, at_most=MOST_CHANNELS)
    recipe: Optional[str] = option(
        None,
        "the job of a recipe, or with --store the run that `train` plans with it; other options "
        "override it",
        choices=sorted(RECIPES),
    )
    run: Optional[Path] = option(
        None, "the whole run of a folder that `train` has written", "DIR", one_of="source"
    )
    store: Optional[Path] = option(
        None,
        "the run that `train` plans by itself on a store that `prepare` has written, with the "
        "options of network, batch, dtype, optimizer, policy and engine that are given",
        "DIR",
        one_of="source",
    )
    shape: Optional[Tuple[int, int, int]] = option(
        None,
        f"voxels of the content box, {CONTENT_BOX}; padded to what the network's levels halve",
        ("X", "Y", "Z"),
    )
    spacing: Optional[Tuple[float, float, float]] = option(
        None,
        "mm of a voxel of --shape: the strides are then those that `train` takes, unless --strides "
        "gives others (default: each level halves all axes)",
        ("X", "Y", "Z"),
        at_least=LEAST_MM,
        at_most=MOST_MM,
    )
    batch: int = option(1, "volumes a step", "B")
    micro_batch: int = option(
        0,
        "volumes computed at once, a divisor of --batch (default: 1; with batch norm the whole "
        "batch)",
        "M",
        typed_at_least=1,
    )
    dtype: str = option(
        "bfloat16",
        "compute dtype (default: a recipe's or run's, else the one that `train` takes on the host)",
        choices=DTYPES,
    )
    optimizer: str = option("muon", "rule that updates the weights", choices=tuple(OPTIMIZERS))
    freeze: str = option("none", "layers that stay as they are, as of `train`", choices=FREEZE)
    policy: str = option(
        AUTO,
        "memory policy (default: auto, the fastest that fits; with --run the run's)",
        choices=(AUTO, *POLICIES),
    )
    engine: str = option(
        AUTO,
        "itex (TensorFlow with Intel's extension) or stock (default: auto, itex unless only stock "
        "is installed)",
        choices=(AUTO, *ENGINES),
    )
    threads: Optional[int] = option(
        None, "threads of each operation (default: this host's physical cores)", "N"
    )


def job_from(args: argparse.Namespace, base: Optional[Job] = None) -> Job:
    """The job of `JobOptions`; options that were not given are as in `base`. A policy that is left
    open is `base`'s for the time being. Raises ValueError for settings out of range."""
    chosen = {name: value for name, value in vars(args).items() if value != AUTO}
    given = given_options(JobOptions, args)
    check_values(JobOptions, {name: given[name] for name in given if name in chosen})
    if base is None and "shape" not in chosen:
        todo = "add --shape X Y Z, --store, --recipe or --run"
        raise ValueError(f"--shape must be given, got none; {todo}")
    if "shape" in chosen:
        chosen["shape"] = tuple(chosen["shape"])
    if "classes" in chosen:
        chosen["outputs"] = chosen.pop("classes")
    if base is None:
        base = Job(UNetConfig(dtype="bfloat16"), engine=installed_engine())
    if chosen.get("strides"):
        chosen.setdefault("depth", len(chosen["strides"]) + 1)
    shape = chosen.get("shape", base.shape)
    if "spacing" in chosen:
        depth = chosen.setdefault("depth", depth_for(chosen["spacing"], shape, base.unet.depth))
        chosen.setdefault("strides", strides_for(chosen["spacing"], shape, depth))

    def of(kind: Any) -> Dict[str, Any]:
        names = [field.name for field in dataclasses.fields(kind)]
        return {name: chosen[name] for name in names if name in chosen}

    unet = dataclasses.replace(base.unet, **of(UNetConfig))
    if len(shape) == 3 and min(shape) > 0:  # else refused by its name
        padded = (-(-side // divisor) * divisor for side, divisor in zip(shape, unet.divisors))
        chosen["shape"] = shape3(padded)
    job = dataclasses.replace(base, unet=unet, **of(Job))
    if 0 < job.cases < job.batch:
        rule = f"--batch must be at most the {job.cases} training cases"
        raise ValueError(f"{rule}, got {job.batch}; lower it")
    return job


def padding_note(args: argparse.Namespace, job: Job, base: Optional[Job]) -> str:
    """A sentence on the grid of a job that its shape was padded to; "" if it was not."""
    shape = tuple(getattr(args, "shape", base.shape if base else job.shape))
    if shape == job.shape:
        return ""
    divisors = divisors_text(job.unet.divisors)
    padded = f"{by(shape, ' x ')} voxels are padded to {by(job.shape, ' x ')}"
    return f"{padded}: sides must be divisible by {divisors} for {job.unet.depth} levels"


def why_strides(args: argparse.Namespace, job: Job) -> str:
    """What the strides of a job follow from; "" if they were given, or no spacing is known."""
    spacing_mm = getattr(args, "spacing", None)
    if spacing_mm is None or getattr(args, "strides", AUTO) != AUTO:
        return ""
    shape = getattr(args, "shape", job.shape)
    return strides_reason(spacing_mm, shape, job.unet.depth)


def policy_is_open(args: argparse.Namespace) -> bool:
    """Whether the policy is to be picked: if none was given, but for a run, which has its own."""
    return getattr(args, "policy", "" if hasattr(args, "run") else AUTO) == AUTO


def stored_bytes(shape: Sequence[int], channels: int) -> int:
    """Bytes of a case's files in a store at most: image and label (X, Y, Z), as `prepare` writes
    them unpacked."""
    return math.prod(shape) * (channels * STORED_BYTES + 1)
