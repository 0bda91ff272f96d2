"""Several runs as one: the mean of their probabilities, or of folds the one that has not seen a case.

    configs = load_configs(runs)  # and check that they may be put together
    predictor = joined([load_predictor(run) for run in runs])

Logits are averaged over windows and mirror images, probabilities over runs, as in nnU-Net.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.config import RunConfig, load_config
from cpu3d.data.records import CaseRecord
from cpu3d.data.splits import parse_fold
from cpu3d.errors import InputError

COMMON = ("store_channels", "label_names", "region_codes", "regions", "split_hash")
"""Settings that runs must share to be averaged. The split is one of them: with another, test cases of one run are
training cases of the other."""


class Ensemble:
    """Predictors as one, with the interface of each. Their networks are small and all stay in memory."""

    def __init__(self, predictors: Sequence[Any]):
        first = predictors[0]
        self.predictors = tuple(predictors)
        self.channels: Tuple[str, ...] = first.channels
        self.inputs: Tuple[str, ...] = tuple(
            name for name in first.channels if any(name in predictor.inputs for predictor in predictors)
        )
        """What any of the runs needs: they may have learnt from different channels."""
        self.labels: Dict[int, str] = first.labels
        self.regions: Dict[str, Tuple[int, ...]] = first.regions

    def probabilities(
        self, image: np.ndarray, record: CaseRecord, channels: Optional[Sequence[str]] = None
    ) -> np.ndarray:
        """The mean of the runs' probabilities, float32 (X, Y, Z, R), on the full grid; of equal ones it is each.

        Twice the memory of one run's answer, however many there are.
        """
        mean = self.predictors[0].probabilities(image, record, channels)
        for count, predictor in enumerate(self.predictors[1:], start=2):
            mean = mean + (predictor.probabilities(image, record, channels) - mean) / np.float32(count)
        return mean


class HeldOut(Ensemble):
    """Predictors of folds as one that answers for cross-validation: each case by the one that has not trained on it."""

    def __init__(self, predictors: Sequence[Any], held_out: Sequence[Sequence[str]]):
        """`held_out` are the case ids of each predictor's fold."""
        super().__init__(predictors)
        self._of: Mapping[str, Any] = {
            case_id: predictor for predictor, case_ids in zip(predictors, held_out) for case_id in case_ids
        }

    def probabilities(
        self, image: np.ndarray, record: CaseRecord, channels: Optional[Sequence[str]] = None
    ) -> np.ndarray:
        """As that predictor's; KeyError for a case that all of them have trained on."""
        return self._of[record.case_id].probabilities(image, record, channels)


def joined(predictors: Sequence[Any]) -> Any:
    """The mean of several, or the only one."""
    return predictors[0] if len(predictors) == 1 else Ensemble(predictors)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Which runs answer, and with which of their weights."""
    parser.add_argument(
        "--run", type=Path, required=True, nargs="+", metavar="DIR",
        help="run folder written by train; of several the mean, such as of all folds",
    )  # fmt: skip
    parser.add_argument("--some-folds", action="store_true", help="go on although folds are missing among the runs")
    parser.add_argument("--weights", choices=("best", "last"), default="best", help="checkpoint (default: best)")


def load_configs(runs: Sequence[Path], *, some_folds: bool = False) -> List[RunConfig]:
    """The settings of each run. Raises InputError, with all that is wrong, unless the runs can be one answer.

    They must differ, and share store, regions and split. Where they are folds they must be all folds of one K, each
    once, or with `some_folds` some of them. A single run always can.
    """
    configs, problems = [], []
    for run in runs:
        try:
            configs.append(load_config(run))
        except InputError as error:
            problems += error.problems
    if len(runs) > 1 and not problems:
        problems = [*_twice(runs), *_unlike(runs, configs), *_fold_problems(runs, configs, some_folds)]
    if problems:
        raise InputError(*problems)
    return configs


def describe(run: Path, config: RunConfig, predictor: Any) -> Dict[str, Any]:
    """What is written beside an answer of this run, as JSON: the folder, the fold, and how the network was applied."""
    window = predictor.window
    how = {**predictor.inference.to_json(), "window": window and list(window), "one_pass": not window}
    return {"run": str(Path(run).resolve()), "fold": config.fold, "inference": how}


# --- Private helpers ---


def _twice(runs: Sequence[Path]) -> List[str]:
    folders = [Path(run).resolve() for run in runs]
    return [
        f"runs must differ, got {folder} {folders.count(folder)} times; name it once"
        for folder in sorted({folder for folder in folders if folders.count(folder) > 1})
    ]


def _unlike(runs: Sequence[Path], configs: Sequence[RunConfig]) -> List[str]:
    return [
        f"{name} of run {run} must be {_shown(getattr(configs[0], name))}, as of run {runs[0]}, got "
        f"{_shown(getattr(config, name))}; put runs of one store and of the same regions together"
        for run, config in zip(runs[1:], configs[1:])
        for name in COMMON
        if getattr(config, name) != getattr(configs[0], name)
    ]


def _shown(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _fold_problems(runs: Sequence[Path], configs: Sequence[RunConfig], some_folds: bool) -> List[str]:
    runs_of = defaultdict(list)
    for run, config in zip(runs, configs):
        runs_of[config.fold].append(str(run))
    if set(runs_of) == {""}:
        return []
    if "" in runs_of:
        bare = " and ".join(runs_of[""])
        return [f"runs must all be of folds, or none of them, got no fold for {bare}; leave out one kind"]
    folds = sorted(map(parse_fold, runs_of))
    problems = [
        f"runs must be of different folds, got {fold} for {' and '.join(same)}; leave one out"
        for fold, same in runs_of.items()
        if len(same) > 1
    ]
    parts = folds[0][1]
    if any(other != parts for _, other in folds):
        problems.append(f"runs must be folds of one number of parts, got {_listed(folds)}; leave some out")
        return problems
    missing = [(part, parts) for part in range(1, parts + 1) if (part, parts) not in folds]
    if missing and not some_folds:
        problems.append(
            f"runs must be all folds of {parts}, got {_listed(folds)}, missing {', '.join(map(_word, missing))}; train "
            "those, or add --some-folds"
        )
    return problems


def _listed(folds: Sequence[Tuple[int, int]]) -> str:
    *others, last = map(_word, folds)
    return f"{', '.join(others)} and {last}" if others else last


def _word(fold: Tuple[int, int]) -> str:
    return f"{fold[0]}/{fold[1]}"
