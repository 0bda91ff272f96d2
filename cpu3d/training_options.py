"""The command line of a training run: options that override a recipe's settings, and nothing that is not a setting."""

import argparse
import dataclasses
from typing import Any, Dict, List, Optional

from cpu3d.config import MODES, RunConfig
from cpu3d.data.augment import NO_AUGMENT, AugmentConfig
from cpu3d.data.files.reader import READ_MODES
from cpu3d.data.region import EXTENTS
from cpu3d.errors import InputError
from cpu3d.host.apply import ENGINES
from cpu3d.recipes import RECIPES, overview
from cpu3d.training.schedule import SCHEDULES
from memory_estimator.job import OPTIMIZERS
from models.config import DTYPES, NETWORKS, NORMS, POLICIES, UPS, UNetConfig

RUN_FIELDS = {field.name for field in dataclasses.fields(RunConfig)}
UNET_FIELDS = {field.name for field in dataclasses.fields(UNetConfig)} - {"channels", "outputs", "seed"}
SIZES_OF_PATCH = ("patch", "gpu_memory")
"""Settings that become the run's grid."""
OF_WORKERS = ("batch_per_worker", "rate_scaling")
"""Settings that become the run's batch and learning rate, by the number of workers."""
AUGMENT_FIELDS = {field.name for field in dataclasses.fields(AugmentConfig)}


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add every setting that a user may choose. What is left out comes from the recipe, or from the run continued."""
    parser.epilog = overview()
    parser.add_argument("--recipe", choices=sorted(RECIPES), help="settings to start from (default: brats-regions)")
    data = _group(parser, "data")
    data("--extent", choices=EXTENTS, help="the brain's box, or the full grid (default: brain; lossless either way)")
    data("--channels", nargs="+", metavar="NAME", help="image channels to use, such as FLAIR (default: all)")
    data("--regions", nargs="+", metavar="NAME", help="regions to learn, such as WT (default: all)")
    data(
        "--read-mode",
        choices=READ_MODES,
        help="how the store's files are read (default: auto, by the file system: pread from a network, else mmap)",
    )
    data("--fold", metavar="I/K", help="cross-validation: train on all but the I-th of K parts, such as 2/5")
    data(
        "--resolution",
        type=float,
        metavar="R",
        help="share of the store's resolution that the network sees (default: 1); scores are on the full grid",
    )
    patches = _group(parser, "patches")
    patches("--mode", choices=MODES, help="what a step sees: whole volumes, or patches of them (default: whole)")
    size = patches.group.add_mutually_exclusive_group()
    size.add_argument(
        "--patch", type=int, nargs=3, metavar=("X", "Y", "Z"), default=argparse.SUPPRESS,
        help="voxels of a patch (default: what the card trains; on a CPU 128 128 128, cut to the volume)",
    )  # fmt: skip
    size.add_argument(
        "--gpu-memory", metavar="SIZE", default=argparse.SUPPRESS,
        help="the largest patch that a card of this size trains, such as 16GiB",
    )  # fmt: skip
    patches("--foreground", type=float, metavar="F", help="share of patches around labels (default: 1/3)")
    patches(
        "--patches-per-case", type=int, metavar="N",
        help="patches of each case an epoch (default: as many as make up its voxels)",
    )  # fmt: skip
    patches("--device", metavar="D", help="cpu, or gpu:0 (default: with --mode patch a GPU where there is one)")
    network = _group(parser, "network")
    network("--network", choices=NETWORKS, help="the paper's, or the wider original (default: unet3d)")
    network("--filters", type=int, metavar="F", help="feature maps of the first convolution (default: 16)")
    network("--depth", type=int, metavar="L", help="levels of resolution (default: 5)")
    network("--norm", choices=NORMS, help="default: instance")
    network("--up", choices=UPS, help="how the decoder doubles the grid (default: transposed)")
    network("--residual", action="store_true", help="residual blocks")
    network("--deep-supervision", action="store_true", help="a loss at every decoder level")
    network("--dtype", choices=("auto", *DTYPES), help="compute dtype (default: bfloat16 where the CPU has it)")
    training = _group(parser, "training")
    length = training.group.add_mutually_exclusive_group()
    length.add_argument(
        "--epochs", type=int, metavar="N", default=argparse.SUPPRESS,
        help="passes over the training cases (default: 100); the decay spans them",
    )  # fmt: skip
    length.add_argument(
        "--steps", type=int, metavar="N", default=argparse.SUPPRESS, help="optimizer steps in all, instead of --epochs"
    )  # fmt: skip
    training(
        "--budget-minutes",
        type=float,
        metavar="M",
        help="take only as many of the epochs' steps as fit in M minutes, by the time of the first ones, but at least "
        "those up to the first validation; the decay spans them (default: 0, no limit)",
    )
    many = training.group.add_mutually_exclusive_group()
    many.add_argument(
        "--batch", type=int, metavar="N", default=argparse.SUPPRESS,
        help="volumes a step, of all workers together (default: 1)",
    )  # fmt: skip
    many.add_argument(
        "--batch-per-worker", type=int, metavar="N", default=argparse.SUPPRESS,
        help="volumes a step of each worker: the batch grows with them, and the learning rate by --rate-scaling",
    )  # fmt: skip
    training(
        "--micro-batch",
        type=int,
        metavar="M",
        help="volumes computed at a time, a divisor of the batch (default: the recipe's, else 1, or with batch norm "
        "the whole batch; a run that continues keeps its own, and with batch norm has to)",
    )
    training(
        "--policy",
        choices=("auto", *POLICIES),
        help="what a step trades for memory (default: auto, the fastest that fits what is free; a run that continues "
        "keeps its own)",
    )
    training("--optimizer", choices=OPTIMIZERS, help="default: adam")
    training("--learning-rate", type=float, metavar="R", help="after the warm-up (default: 0.002)")
    training(
        "--rate-scaling",
        choices=("none", "sqrt", "linear"),
        help="how the learning rate grows with the workers under --batch-per-worker (default: sqrt for adam, linear "
        "for sgd)",
    )
    training("--schedule", choices=SCHEDULES, help="decay of the learning rate (default: cosine)")
    training("--warmup-steps", type=int, metavar="N", help="default: 10")
    training("--ema", type=float, metavar="D", help="decay of averaged weights, such as 0.99 (default: 0, off)")
    often = training.group.add_mutually_exclusive_group()
    often.add_argument(
        "--validate-every", type=int, metavar="N", default=argparse.SUPPRESS,
        help="epochs between validations (default: 1)",
    )  # fmt: skip
    often.add_argument(
        "--validations", type=int, metavar="N", default=argparse.SUPPRESS,
        help="validations in all, evenly spread, instead of that",
    )  # fmt: skip
    training("--patience", type=int, metavar="N", help="stop after N validations without gain (default: 0, never)")
    training("--save-minutes", type=float, metavar="M", help="longest time between checkpoints (default: 10)")
    training("--keep", type=int, metavar="K", help="checkpoints to keep, besides the best weights (default: 3)")
    training(
        "--stall-minutes", type=float, metavar="M",
        help="a step that takes longer, and ten times longer than any before, counts as hanging (default: 15; 0: none "
        "does; what is done for the first time may take four times as long)",
    )  # fmt: skip
    training("--deterministic", action="store_true", help="refuse every operation that may give other bits next time")
    training("--seed", type=int, metavar="S", help="of weights, order and augmentation (default: 0)")
    training("--engine", choices=ENGINES, help="default: auto, ITEX where it is installed")
    augment = _group(parser, "augmentation")
    augment("--no-augment", action="store_true", help="none at all")
    augment("--no-flip", dest="flip", action="store_false", help="no mirroring: where left and right differ")
    augment("--rotation-deg", type=float, metavar="A", help="small rotations up to A degrees (default: 0; costs time)")
    augment("--scaling", type=float, metavar="S", help="zoom by up to 1 +- S (default: 0; costs time)")


def chosen_settings(args: argparse.Namespace) -> Dict[str, Any]:
    """The settings that were given on the command line, by the names of RunConfig, UNetConfig and AugmentConfig."""
    known = RUN_FIELDS | UNET_FIELDS | AUGMENT_FIELDS | {"no_augment", *SIZES_OF_PATCH, *OF_WORKERS}
    return {name: value for name, value in vars(args).items() if name in known and name not in ("run", "store")}


def with_settings(config: RunConfig, settings: Dict[str, Any]) -> RunConfig:
    """`config` with the chosen settings in their places, but for what is "auto", the size of a patch and what hangs on
    the number of workers, which are decided elsewhere. What is chosen in epochs takes the place of what `config` may
    have in steps and numbers, and either that of a budget of minutes, whose steps are not known yet. Raises ValueError
    or InputError for values out of range.
    """
    settings = dict(settings)
    augment = NO_AUGMENT if settings.pop("no_augment", False) else config.augment
    augment = dataclasses.replace(augment, **_among(settings, AUGMENT_FIELDS))
    unet = dataclasses.replace(config.unet, **{k: v for k, v in _among(settings, UNET_FIELDS).items() if v != "auto"})
    own = {k: tuple(v) if isinstance(v, list) else v for k, v in _among(settings, RUN_FIELDS - {"unet"}).items()}
    if own.get("device") == "auto":
        del own["device"]
    if own.get("steps") and own.get("budget_minutes"):
        raise InputError(f"--budget-minutes must come without --steps, got --steps {own['steps']}; leave one out")
    for name, undone in (
        ("epochs", {"steps": 0, "budget_minutes": 0.0}),
        ("steps", {"budget_minutes": 0.0}),
        ("budget_minutes", {"steps": 0}),
        ("validate_every", {"validations": 0}),
    ):
        if name in settings:
            own = {**undone, **own}
    return dataclasses.replace(config, **own, unet=unet, augment=augment)


def as_options(settings: Dict[str, Any]) -> List[str]:
    """The command line that `chosen_settings` makes these settings of."""
    options: List[str] = []
    for name, value in settings.items():
        option = "--" + name.replace("_", "-")
        if value is False:
            options.append("--no-" + name.replace("_", "-"))
        elif value is True:
            options.append(option)
        else:
            options += [option, *map(str, value if isinstance(value, (list, tuple)) else (value,))]
    return options


# --- Private helpers ---


def _group(parser: argparse.ArgumentParser, title: str):
    group = parser.add_argument_group(title)

    def add(*names: str, help: Optional[str] = None, **more: Any) -> None:  # noqa: A002
        group.add_argument(*names, default=argparse.SUPPRESS, help=help, **more)

    add.group = group
    return add


def _among(settings: Dict[str, Any], names: set) -> Dict[str, Any]:
    return {name: value for name, value in settings.items() if name in names}
