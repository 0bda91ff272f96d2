"""Folders of several runs: of folds, as `train --folds K` makes them, and of a comparison.

folds = read_folds(folder)                  # None for any other folder
runs = trained_folds(folder)                # {"1/5": folder/fold-1, ...}, those that are done
path = fold_folder(folder, "2/5")           # folder/fold-2
several = read_run_set(folder)              # of folds or of a comparison
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
    fold_s: Optional[float] = None  # predicted, until a fold is trained and scored

    @property
    def names(self) -> List[str]:
        """The folds, as "1/5"."""
        return fold_names(self.count)

    def runs(self, folder: Path) -> Dict[str, Path]:
        """Fold -> its run in their folder."""
        return {fold: fold_folder(folder, fold) for fold in self.names}


def fold_names(count: int) -> List[str]:
    """All folds of so many, as "1/5"."""
    return [f"{number}/{count}" for number in range(1, count + 1)]


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


def trained_folds(folder: Path) -> Dict[str, Path]:
    """Fold -> its run, of those that are trained to their end. Raises InputError for a folder that
    is none of folds."""
    folds = read_folds(folder)
    if folds is None:
        raise InputError(f"folder {folder} must hold a {FILE}; name one of `train --folds`")
    return {fold: run for fold, run in folds.runs(folder).items() if is_over(run)}


@dataclass(frozen=True)
class RunSet:
    """The runs that one command trains: the folds of a store, or those of a comparison."""

    kind: str  # "folds" or "comparison"
    runs: Dict[str, Path]  # by their names
    is_out_of_fold: bool  # whether each is scored on the cases that it holds out, not on test cases
    run_s: Optional[float] = None  # predicted, until one is trained and scored


def read_run_set(folder: Path) -> Optional[RunSet]:
    """The runs in the folder of folds, or of a comparison; None for any other folder. Raises
    InputError for a damaged one."""
    folds = read_folds(folder)
    if folds is not None:
        return RunSet("folds", folds.runs(folder), True, folds.fold_s)
    path = Path(folder) / COMPARISON
    if not path.is_file():
        return None

    def checked(content: Dict[str, Any]) -> RunSet:
        places = typed(content["runs"], Dict[str, str])
        if not places:
            raise ValueError("no runs")
        runs = {name: Path(folder) / place for name, place in places.items()}
        return RunSet("comparison", runs, bool(content["asked"]["folds"]))

    return read_record(path, SCHEMA, checked, "choose another --out", InputError)


def refuse_folds(folder: Path) -> None:
    """Raise InputError for a folder of several runs, of folds or of a comparison, where one run
    must be named."""
    several = None
    if not (Path(folder) / CONFIG).is_file():
        several = read_run_set(folder)
    if several:
        first, *_ = several.runs.values()
        raise InputError(
            f"run {folder} must be one run, got a folder of {several.kind} with "
            f"{len(several.runs)} runs; name one of them, such as {first}, or give a command that "
            "takes them together"
        )
