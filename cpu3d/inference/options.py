"""How a trained network is applied to a volume: in one pass, or by a sliding window, with or without mirror images."""

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any, Dict, Optional

from cpu3d.config import RunConfig
from cpu3d.data.region import Shape3
from cpu3d.data.sampling import OVERLAP
from cpu3d.errors import InputError
from cpu3d.host.gpu import AUTO


@dataclass(frozen=True)
class Inference:
    """The default is the way the run was trained: whole volumes in one pass, patches by a window of their size."""

    window: Optional[Shape3] = None
    """Voxels X, Y, Z of a window to slide, whatever the run was trained on."""
    one_pass: bool = False
    """The whole extent at once, whatever the run was trained on."""
    overlap: float = OVERLAP
    """Least share of a window that the next one along an axis covers again, 0 or more and below 1."""
    flips: bool = False
    """Mean of the logits over the eight mirror images: eight times the time."""
    device: str = AUTO
    """ "cpu", or a card such as "gpu:0"; "auto" is a card where there is one and a window slides."""

    def __post_init__(self):
        problems = []
        if self.window and self.one_pass:
            problems.append("--window and --one-pass must not be given together; choose one")
        if self.window and (len(self.window) != 3 or min(self.window) < 1):
            problems.append(f"--window must be three positive numbers, got {self.window}; give voxels X Y Z")
        if not 0 <= self.overlap < 1:
            problems.append(f"--overlap must be in [0, 1), got {self.overlap}; it is a share of a window")
        if problems:
            raise InputError(*problems)

    def to_json(self) -> Dict[str, Any]:
        """What decides the answer: the device changes its last bits alone, so scores do not depend on it."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "device"}


def window_of(config: RunConfig, inference: Inference) -> Optional[Shape3]:
    """Voxels X, Y, Z of the window that slides over this run's volumes; None for one pass."""
    if inference.window:
        return tuple(inference.window)
    return tuple(config.grid) if config.is_patch and not inference.one_pass else None


def check_inference(config: RunConfig, inference: Inference) -> None:
    """Raise InputError, all problems together, where the run's network cannot be applied so."""
    problems = []
    window = window_of(config, inference)
    if window and config.resolution < 1:
        problems.append(f"--window must come with a run at full resolution, got {config.resolution:g}; leave it out")
    elif window:
        try:
            config.unet.check_shape(window, "--window")
        except ValueError as error:
            problems.append(str(error))
    if inference.flips and not config.augment.flip:
        problems.append(
            "--flips must come with a run that was trained on mirror images, got one without (--no-flip or "
            "--no-augment); leave it out"
        )
    if problems:
        raise InputError(*problems)


def add_inference_options(parser: argparse.ArgumentParser) -> None:
    """Add what an `Inference` is made of. Nothing given is the run's own way."""
    group = parser.add_argument_group("inference (default: as the run was trained)")
    size = group.add_mutually_exclusive_group()
    size.add_argument("--one-pass", action="store_true", help="the whole volume at once, also for a run on patches")
    size.add_argument(
        "--window", type=int, nargs=3, metavar=("X", "Y", "Z"), help="slide a window, also for a run on whole volumes"
    )
    group.add_argument(
        "--overlap", type=float, default=OVERLAP, metavar="S",
        help=f"of windows, a share (default: {OVERLAP:g}); in one pass there are none and it is ignored",
    )  # fmt: skip
    group.add_argument("--flips", action="store_true", help="mean over eight mirror images, in eight times the time")
    group.add_argument(
        "--device", default=AUTO, metavar="D",
        help="auto, cpu, or gpu:0 (default: auto, a GPU where there is one and every run slides a window)",
    )  # fmt: skip


def inference_from(args: argparse.Namespace) -> Inference:
    """What the options ask for. Raises InputError for values out of range."""
    return Inference(
        window=tuple(args.window) if args.window else None,
        one_pass=args.one_pass,
        overlap=args.overlap,
        flips=args.flips,
        device=args.device,
    )
