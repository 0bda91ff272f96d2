"""What the user of `bench data` may choose, beside which rows and which files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Optional


@dataclass(frozen=True)
class Options:
    """How the rows are measured."""

    rounds: int = 5
    """How often each variant is measured, in turn with the others."""
    cap_mb_s: int = 200
    """MB/s of the slow disk that the ladder is climbed on a second time."""
    steps: int = 1000
    """Training steps over which memory has to stay flat."""
    monai: Optional[Path] = None
    """A Python that has MONAI; None leaves its rows out."""
