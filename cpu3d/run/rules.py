"""Whether the post-processing that a run has is of the weights that it has now.

has_rules(run, config.split_hash)
"""

from pathlib import Path
from typing import Sequence, Tuple

from cpu3d.data.files.arrays import file_sha256
from cpu3d.errors import InputError
from cpu3d.run.checkpoint import POSTPROCESSING, weights_file
from memory_estimator.common.files import read_json

SCHEMA = 1  # of postprocessing.json


def weights_hashes(runs: Sequence[Path], weights: str = "best") -> Tuple[str, ...]:
    """The hashes of the "best" or "last" weights of runs, sorted; () if some cannot be read."""
    try:
        return tuple(sorted(file_sha256(weights_file(run, weights)) for run in runs))
    except (InputError, OSError):
        return ()


def has_rules(run: Path, split_hash: str) -> bool:
    """Whether a run has rules of its best weights on this split, which `train` keeps."""
    try:
        content = read_json(Path(run) / POSTPROCESSING)
        found = (content["schema"], content["split_hash"], tuple(content["weights_sha256"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return found == (SCHEMA, split_hash, weights_hashes([run]))
