"""Where a run goes on: after its newest whole checkpoint, which the chief reads for all workers, or
at its start."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from cpu3d.distributed.all_reduce import Exchange, text_from_chief
from cpu3d.errors import InputError
from cpu3d.run.checkpoint import Checkpoint, Progress, at_the_start, lost_best, newest, progress_of


@dataclass(frozen=True)
class Restart:
    """Where a run goes on."""

    progress: Progress
    is_new: bool  # no checkpoint was found
    checkpoint: Optional[Checkpoint] = None  # the chief's alone
    lost: str = ""  # what is wrong with the best weights, if they are lost


def find_restart(run: Path, *, has_cases: bool, exchange: Exchange) -> Restart:
    """Where a run goes on; `has_cases` is whether cases are held out for its
    validations. Best weights that are lost are forgotten: those of the checkpoint are validated
    and take their place. Raises InputError for a checkpoint without a run's state."""
    checkpoint = newest(run) if exchange.is_chief else None
    lost = ""
    if checkpoint and checkpoint.state.get("step"):
        has_best = isinstance(checkpoint.state.get("best"), float)
        if has_best or not has_cases:
            lost = lost_best(run, checkpoint)
    if checkpoint and lost and has_cases:
        checkpoint.state.update(best=None, best_is_coarse=False, owes_validation=True)
    text = text_from_chief(exchange, json.dumps(checkpoint.state) if checkpoint else "")
    if not text:
        return Restart(at_the_start(), is_new=True)
    try:
        progress = progress_of(json.loads(text))
    except ValueError as error:
        name = str(checkpoint.path) if checkpoint else "of the chief"
        raise InputError(
            f"checkpoint {name} must hold a run's state, got {error}; delete it"
        ) from None
    return Restart(progress, is_new=False, checkpoint=checkpoint, lost=lost)
