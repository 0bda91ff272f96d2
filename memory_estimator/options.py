"""The command line of a job: for the estimator, and for what measures its predictions."""

import argparse
import dataclasses
from pathlib import Path
from typing import Optional, Sequence

from memory_estimator.engines import installed_engine
from memory_estimator.job import ENGINES, OPTIMIZERS, Job
from memory_estimator.recipes import JOBS
from memory_estimator.saved_run import job_of_run
from models.config import DTYPES, NETWORKS, NORMS, POLICIES, UPS, UNetConfig

AUTO = "auto"
"""What an option says that is to be worked out."""

NETWORK_FIELDS = {
    "channels": "channels",
    "classes": "outputs",
    "filters": "filters",
    "depth": "depth",
    "network": "network",
    "norm": "norm",
    "up": "up",
    "residual": "residual",
    "deep_supervision": "deep_supervision",
    "dtype": "dtype",
    "policy": "policy",
}
"""Option -> field of UNetConfig."""


def add_network_options(parser: argparse.ArgumentParser) -> None:
    """Add every setting of the network that memory and time depend on, the batch and the input shape aside.

    Options that are not given leave no attribute, so that they can come from a recipe or a run instead.
    """
    add = _adder(parser)
    add("--channels", type=int, metavar="C", help="image channels (default: 4)")
    add("--classes", type=int, metavar="K", help="output regions (default: 3)")
    add("--filters", type=int, metavar="F", help="default: 16")
    add("--depth", type=int, metavar="L", help="default: 5")
    add("--network", choices=NETWORKS, help="default: unet3d")
    add("--norm", choices=NORMS, help="default: instance")
    add("--up", choices=UPS, help="default: transposed")
    add("--residual", action="store_true", help="residual blocks")
    add("--deep-supervision", action="store_true", help="a loss at every decoder level")


def add_job_options(
    parser: argparse.ArgumentParser,
    engines: Sequence[str] = ENGINES,
    dtypes: Sequence[str] = DTYPES,
    *,
    may_pick: bool = False,
) -> None:
    """Add what makes a `Job`: the network, and how it is trained. More engines and dtypes are for what measures.

    With `may_pick` the policy may be left open: `policy_is_open` tells, and `planner.fastest_that_fits` picks.
    """
    add = _adder(parser)
    add("--shape", type=int, nargs=3, metavar=("X", "Y", "Z"), help="voxels")
    add("--batch", type=int, metavar="B", help="volumes a step (default: 1)")
    add(
        "--micro-batch",
        type=int,
        metavar="M",
        help="volumes computed at a time, a divisor of the batch (default: the recipe's or the run's; else 1, or with "
        "batch norm the whole batch, whose statistics are of what is computed together)",
    )
    add_network_options(parser)
    add("--dtype", choices=dtypes, help="compute dtype (default: bfloat16)")
    add("--optimizer", choices=OPTIMIZERS, help="default: adam")
    if may_pick:
        picked = "memory policy (default: auto, the fastest that fits; with --run the run's own)"
        add("--policy", choices=(AUTO, *POLICIES), help=picked)
    else:
        add("--policy", choices=POLICIES, help="memory policy (default: speed; with --run the run's own)")
    add("--engine", choices=("auto", *engines), help="default: auto, ITEX unless only stock TensorFlow is installed")
    add("--threads", type=int, metavar="N", help="default: this host's physical cores")


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Add what a whole job can be taken from."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--recipe", choices=sorted(JOBS), help="a named run's job; options given besides win over it")
    source.add_argument("--run", type=Path, metavar="DIR", help="the job of a run folder that `train` has written")


def source_job(args: argparse.Namespace) -> Optional[Job]:
    """The job of --recipe or --run, None without them. Raises ValueError for a run that cannot be read."""
    if args.recipe:
        return dataclasses.replace(JOBS[args.recipe], engine=installed_engine())
    if args.run:
        engine = getattr(args, "engine", "auto")
        return job_of_run(args.run, installed_engine(), None if engine == "auto" else engine)
    return None


def network_from(
    args: argparse.Namespace, dtype: Optional[str] = None, base: Optional[UNetConfig] = None
) -> UNetConfig:
    """`base`, by default UNetConfig's defaults, with the options that were given. Raises ValueError out of range."""
    given = {field: getattr(args, name) for name, field in NETWORK_FIELDS.items() if getattr(args, name, AUTO) != AUTO}
    if dtype is not None:
        given["dtype"] = dtype
    return dataclasses.replace(base or UNetConfig(), **given)


def job_from(args: argparse.Namespace, base: Optional[Job] = None) -> Job:
    """The job of the options of `add_job_options`; what was not given is as in `base`.

    A policy that is left open is `base`'s for the time being. Raises ValueError for settings out of range.
    """
    if base is None and not hasattr(args, "shape"):
        raise ValueError("shape must be given, got none; add --shape X Y Z, --recipe or --run")
    base = base or Job(UNetConfig(dtype="bfloat16"), engine=installed_engine())
    names = ("batch", "micro_batch", "optimizer", "engine", "threads", "cases", "from_store")
    given = {name: getattr(args, name) for name in names if getattr(args, name, AUTO) != AUTO}
    if hasattr(args, "shape"):
        given["shape"] = tuple(args.shape)
    job = dataclasses.replace(base, unet=network_from(args, base=base.unet), **given)
    if 0 < job.cases < job.batch:
        raise ValueError(f"batch must be at most the {job.cases} training cases, got {job.batch}; lower it")
    return job


def policy_is_open(args: argparse.Namespace) -> bool:
    """Whether the policy is to be picked: where none was given, but for a run, which has its own."""
    return getattr(args, "policy", None if args.run else AUTO) == AUTO


# --- Private helpers ---


def _adder(parser: argparse.ArgumentParser):
    def add(*names: str, **more) -> None:
        parser.add_argument(*names, default=argparse.SUPPRESS, **more)

    return add
