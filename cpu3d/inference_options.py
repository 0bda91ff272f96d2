"""How a trained network is applied to a volume: in one pass, or by a sliding window, with or without mirror images."""

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any, Dict, Optional

from cpu3d.data.region import Shape3
from cpu3d.errors import InputError


@dataclass(frozen=True)
class Inference:
    """The default is the way the run was trained: whole volumes in one pass, patches by a window of their size."""

    window: Optional[Shape3] = None
    """Voxels X, Y, Z of a window to slide, whatever the run was trained on."""
    one_pass: bool = False
    """The whole extent at once, whatever the run was trained on."""
    overlap: float = 0.5
    """Least share of a window that the next one along an axis covers again, 0 or more and below 1."""
    flips: bool = False
    """Mean of the logits over the eight mirror images: eight times the time."""

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
        return dataclasses.asdict(self)


def add_inference_options(parser: argparse.ArgumentParser) -> None:
    """Add what an `Inference` is made of. Nothing given is the run's own way."""
    group = parser.add_argument_group("inference (default: as the run was trained)")
    size = group.add_mutually_exclusive_group()
    size.add_argument("--one-pass", action="store_true", help="the whole volume at once, also for a run on patches")
    size.add_argument(
        "--window", type=int, nargs=3, metavar=("X", "Y", "Z"), help="slide a window, also for a run on whole volumes"
    )
    group.add_argument("--overlap", type=float, default=0.5, metavar="S", help="of windows, a share (default: 0.5)")
    group.add_argument(
        "--flips", action="store_true", help="mean over eight mirror images, in eight times the time"
    )


def inference_from(args: argparse.Namespace) -> Inference:
    """What the options ask for. Raises InputError for values out of range."""
    return Inference(
        window=tuple(args.window) if args.window else None,
        one_pass=args.one_pass,
        overlap=args.overlap,
        flips=args.flips,
    )
