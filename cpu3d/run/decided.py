"""With which weights a run's post-processing was decided, and whether the run still has them.

decided_with.is_of(run, config.split_hash)      # of a decision that was read
is_decided(run, config.split_hash)              # by the run's file alone
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from cpu3d.data.files.arrays import file_sha256
from cpu3d.errors import InputError
from cpu3d.run.checkpoint import POSTPROCESSING, weights_file
from memory_estimator.common.files import read_json, typed

SCHEMA = 1  # of postprocessing.json


@dataclass(frozen=True)
class DecidedWith:
    """The part of postprocessing.json that names the best weights and the split."""

    weights_sha256: str
    split_hash: str
    weights_size_bytes: Optional[int] = None
    weights_mtime_ns: Optional[int] = None
    """While size and date of the file are the same, it need not be read. None in a file of an
    earlier version."""

    def is_of(self, run: Path, split_hash: str) -> bool:
        """Whether a run with this split has these best weights. Raises InputError if it has none,
        and OSError if they cannot be read."""
        weights = weights_file(run, "best")
        if self.split_hash != split_hash:
            return False
        status = weights.stat()
        noted = (self.weights_size_bytes, self.weights_mtime_ns)
        if noted == (status.st_size, status.st_mtime_ns):
            return True
        return self.weights_sha256 == file_sha256(weights)


def is_decided(run: Path, split_hash: str) -> bool:
    """Whether `train` keeps what is decided for a run: by the rules of this version, with its
    present best weights, on this split. Not so if the decision or the weights cannot be read."""
    names = [field.name for field in dataclasses.fields(DecidedWith)]
    try:
        content = read_json(Path(run) / POSTPROCESSING)
        # An earlier version did not note in how many cases a region is.
        if content["schema"] != SCHEMA or content.get("cases_with") is None:
            return False
        noted = {name: content[name] for name in names if name in content}
        decided_with: DecidedWith = typed(noted, DecidedWith)
        return decided_with.is_of(run, split_hash)
    except (InputError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
