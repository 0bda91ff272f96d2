"""Run everything once: phantoms, a store, training on whole volumes, scores, a prediction, a
report.

    ./run.sh demo                  # whole 240 x 240 x 155 x 4 volumes, minutes on 2 cores; fewer
                                   # steps on slow ones
    ./run.sh demo --smoke          # the same steps on small volumes, in about a minute, to see that
                                   # they work
    ./run.sh demo --policy lean    # the same run with less memory, in its own folder

The demo prints the command of each step. The same command continues an interrupted demo.
"""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional

from cpu3d.util.progress import say
from memory_estimator.common.schema import option
from memory_estimator.installed import as_typed
from models.config import POLICIES

CASES = 12
SHAPE = (240, 240, 155)
SMOKE_SHAPE = (64, 72, 48)
BUDGET_MINUTES = 4
"""For the training's steps: a slow host takes fewer of them, so that it ends within 10 minutes."""


@dataclass(frozen=True)
class Options:
    """Command-line options of `demo`."""

    out: Path = option(Path("demo"), "folder to write", "DIR")
    smoke: bool = option(False, "small volumes and a small network")
    policy: Optional[str] = option(
        None, "memory policy of the run (default: as `train` decides)", choices=POLICIES
    )


OPTIONS = (Options,)


def run(options: Options) -> int:
    """Run each command in turn. A run under a chosen policy has folders of its own."""
    from cpu3d.__main__ import main

    # Left over, it would make the training wait for other workers.
    os.environ.pop("TF_CONFIG", None)
    for command in _commands(options):
        say("", f"$ {as_typed('./run.sh')} {shlex.join(command)}")
        code = main(command)
        if code:
            return code
    return 0


def _commands(options: Options) -> List[List[str]]:
    """The words of each command."""
    out = options.out
    shape = SHAPE
    length = ["--budget-minutes", str(BUDGET_MINUTES)]
    if options.smoke:
        out = out / "smoke"
        shape = SMOKE_SHAPE
        length = ["--filters", "4", "--depth", "3", "--epochs", "4"]
    own = ""
    if options.policy:
        own = f"-{options.policy}"
        length += ["--policy", options.policy]
    data = f"{out}/data"
    store = f"{out}/store"
    run_folder = f"{out}/run{own}"
    predictions = f"{out}/predictions{own}"
    new_case = f"{data}/imagesTr/BRATS_001.nii.gz"
    phantoms = ["--cases", str(CASES), "--shape", *map(str, shape), "--seed", "0"]
    return [
        ["phantom", "--out", data, *phantoms],
        ["prepare", "--dataset", data, "--store", store, "--split", "7", "3", "2"],
        ["train", "--store", store, "--run", run_folder, "--recipe", "demo", *length],
        ["evaluate", "--run", run_folder],
        ["predict", "--run", run_folder, "--image", new_case, "--out", predictions, "--overwrite"],
        ["report", "--run", run_folder],
    ]
