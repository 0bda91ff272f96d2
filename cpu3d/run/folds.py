"""A folder of folds, as `train --folds K` makes it: a run for each fold, and what is common.

folds = read_folds(folder)                  # None for any other folder
runs = trained_folds(folder)                # {"1/5": folder/fold-1, ...}, those that are done
path = fold_folder(folder, "2/5")           # folder/fold-2
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional

from cpu3d.errors import InputError
from cpu3d.run.checkpoint import is_over
from cpu3d.util.atomic import write_json
from memory_estimator.common.files import read_record, typed

FILE = "folds.json"
CONFIG = "config.json"  # of a run
COMPARISON = "compare.json"  # of a folder that `compare` has written, with its runs in runs/
SCHEMA = 1
WEIGHTS = "last"
"""The weights of the folds. The best ones are chosen by the cases that a fold has held out, which
could then not be scored with them."""
START_S = 15.0  # of the processes that train and score a fold, until they compute


@dataclass(frozen=True)
class Folds:
    """What all folds of a folder have in common."""

    count: int
    store: str
    chosen: Dict[str, Any]  # the settings that were given in all calls, by name
    training_s: Optional[float] = None  # predicted, of the steps of a fold
    # Predicted, of its validations, of its post-processing and of scoring it.
    beside_s: Optional[float] = None

    @property
    def names(self) -> List[str]:
        """The folds, as "1/5"."""
        return [f"{number}/{self.count}" for number in range(1, self.count + 1)]


def save_folds(folder: Path, folds: Folds) -> None:
    """Write `folder`/folds.json, atomically."""
    write_json(Path(folder) / FILE, {"schema": SCHEMA, **asdict(folds)})


def read_folds(folder: Path) -> Optional[Folds]:
    """What `save_folds` wrote; None for a folder without it. Raises InputError if it is damaged or
    of another version."""
    path = Path(folder) / FILE
    if not path.is_file():
        return None

    def checked(content: Dict[str, Any]) -> Folds:
        folds = typed(content, Folds)
        if folds.count < 2:
            raise ValueError(f"{folds.count} folds")
        return folds

    todo = "delete it and repeat `train --folds` with all its options"
    return read_record(path, SCHEMA, checked, todo, InputError)


def fold_folder(folder: Path, fold: str) -> Path:
    """The run of a fold such as "2/5"."""
    return Path(folder) / f"fold-{fold.partition('/')[0]}"


def runs_beside(run: Path, fold: str) -> Dict[str, Path]:
    """Fold -> its run, of the other folds in the folder of a fold's run; {} if it is not there, or
    is no fold's."""
    run = Path(run)
    if not fold or run != fold_folder(run.parent, fold):
        return {}
    count = int(fold.partition("/")[2])
    names = [f"{number}/{count}" for number in range(1, count + 1)]
    return {name: fold_folder(run.parent, name) for name in names if name != fold}


def trained_folds(folder: Path) -> Dict[str, Path]:
    """Fold -> its run, of those that are trained to their end. Raises InputError for a folder that
    is none of folds."""
    folds = read_folds(folder)
    if folds is None:
        rule = f"folder {folder} must hold a {FILE}"
        raise InputError(f"{rule}, found none; name one of `train --folds`")
    runs = {fold: fold_folder(folder, fold) for fold in folds.names}
    return {fold: run for fold, run in runs.items() if is_over(run)}


def refuse_folds(folder: Path) -> None:
    """Raise InputError for a folder of several runs, of folds or of a comparison, where one run
    must be named."""
    folds = read_folds(folder)
    if folds is not None:
        got = f"a folder of {folds.count} folds"
        together = (
            "`train --folds`, `status`, `evaluate`, `predict` and `report` take them together"
        )
        runs = [fold_folder(folder, fold) for fold in folds.names]
    elif (Path(folder) / COMPARISON).is_file() and not (Path(folder) / CONFIG).is_file():
        got = "the folder of a comparison"
        together = "`compare --out` takes them together"
        runs = [path.parent for path in sorted(Path(folder).glob(f"runs/*/{CONFIG}"))]
    else:
        return
    todo = "it has none yet: repeat its `compare`"
    if runs:
        todo = f"name one of them, {runs[0]} to {runs[-1]}"
    raise InputError(f"run {folder} must be one run, got {got}; {todo}; {together}")
