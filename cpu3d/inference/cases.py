"""The cases to predict: their images with the channels that a run needs, and the label codes that
they are written in.

found = cases_to_predict([Path("Task01/imagesTs")], predictor)    # its cases, problems and notes
"""

import contextlib
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.datasets.dataset import CaseFiles
from cpu3d.data.datasets.find import find_cases
from cpu3d.data.datasets.layouts import LABEL_CODES, LabelCodes, label_codes_of
from cpu3d.data.datasets.names import indices_of
from cpu3d.data.labels import PaintedRegions, painted_codes
from cpu3d.data.nifti import read_grid
from cpu3d.errors import InputError, raise_if_any
from cpu3d.settings import AUTO
from cpu3d.util.records import listed

STORE = "the run's store"  # the origin of label codes if a case has none of its own


@dataclass(frozen=True)
class Case:
    """A case to predict, and the label codes that it is written in."""

    files: CaseFiles
    channels: Tuple[str, ...]  # of its image: those of the run's store, or just the run's own
    codes_of: str  # origin of the codes: STORE, a layout, or the path of a dataset.json
    labels: Mapping[int, str]  # code -> name
    regions: PaintedRegions  # the run's regions and painting, in these codes
    written: Mapping[int, int]  # code that the run paints -> code that is written; {} if the same

    def translated(self, label: np.ndarray) -> np.ndarray:
        """A label that the run has painted, in the codes of the case."""
        table = np.arange(256, dtype=np.uint8)
        for code, own in self.written.items():
            table[code] = own
        return table[label]


class Cases(NamedTuple):
    """The cases in some paths."""

    cases: List[Case]
    problems: List[str]  # of paths that are none
    notes: List[str]  # lines on what was assumed, and on files that were not read


def check_exist(name: str, paths: Sequence[Path]) -> None:
    """Raise InputError for each of the `paths` of an option that does not exist."""
    raise_if_any(
        f"{name} {path} must exist, found none; check the path"
        for path in paths
        if not path.exists()
    )


def cases_to_predict(
    paths: Sequence[Path],
    predictor: Any,
    codes: str = AUTO,
    out: Optional[Path] = None,
) -> Cases:
    """The cases in `paths`, as `find_cases`, with each of the channels of the run's store, or else
    of the run's own. Where nothing tells the channels, they are in that order."""
    store = tuple(predictor.channels)
    inputs = tuple(predictor.inputs)
    alone = inputs[0] if len(inputs) == 1 else ""
    found = find_cases(paths, store, alone=alone, out=out)
    problems = found.problems
    cases = []
    assumed: Dict[Tuple[str, ...], List[str]] = defaultdict(list)
    ids = [files.case_id for files in found.cases]
    for files in found.cases:
        try:
            if ids.count(files.case_id) > 1:
                raise InputError(
                    f"case ids must differ, got {files.case_id} for several cases; predict them "
                    "into separate folders"
                )
            taken, channels = _with_channels(files, store, inputs)
            cases.append(Case(taken, channels, *codes_for(predictor, files, codes)))
        except InputError as error:
            problems += error.problems
            continue
        is_told = files.names and files.case_id not in found.numbered
        if not is_told and len(channels) > 1:
            assumed[store if files.names else channels].append(files.case_id)
    notes = [f"not read: {path}" for path in found.unread]
    for order, unnamed in assumed.items():
        notes.append(
            f"note: {listed(unnamed)}: no dataset.json or name tells the order of the channels, "
            f"which is taken to be {', '.join(order)}"
        )
    return Cases(cases, list(dict.fromkeys(problems)), notes)


def _with_channels(
    files: CaseFiles, store: Tuple[str, ...], inputs: Tuple[str, ...]
) -> Tuple[CaseFiles, Tuple[str, ...]]:
    """A case with the images of all of the store's channels, or of the run's alone; and these
    channels. Raises InputError if it lacks them."""
    names = files.names
    if not names:
        count = len(files.images)
        if count == 1:
            with contextlib.suppress(InputError):  # a damaged file is named when it is loaded
                count = read_grid(files.images[0])[1]
        channels = inputs if count == len(inputs) else store
        if len(files.images) not in (1, len(channels)):
            got = ", ".join(path.name for path in files.images)
            raise InputError(
                f"--image must name one 4D file or one for each of {', '.join(channels)}, got "
                f"{len(files.images)} files, {got}; name them all"
            )
        return files, channels
    where = f"case {files.case_id} in {files.images[0].parent}"
    channels = store
    try:
        indices = indices_of(store, names, where)
    except InputError:
        channels = inputs
        indices = indices_of(inputs, names, where)
    if len(files.images) > 1:
        images = tuple(files.images[index] for index in indices)
        files = replace(files, images=images, names=())
    return files, channels


def codes_for(
    predictor: Any, files: CaseFiles, choice: str = AUTO
) -> Tuple[str, Mapping[int, str], PaintedRegions, Mapping[int, int]]:
    """The last fields of a `Case`: the codes of --codes, or of the case's own data set, or the
    store's if that is not known. Raises InputError if codes that were chosen, or that a
    dataset.json names, lack a label of the run's regions."""
    labels = predictor.labels
    regions = predictor.regions
    painted = painted_codes(regions)
    own = None
    if choice == AUTO:
        own = label_codes_of(files)
    elif choice in LABEL_CODES:
        own = LabelCodes.of_layout(choice)
    translated = own.translated(labels, regions) if own else {}
    if own and not translated and (choice != AUTO or own.of not in LABEL_CODES):
        own_labels = ", ".join(f"{code} {name}" for code, name in own.labels.items() if code)
        codes = sorted({code for codes in regions.values() for code in codes})
        wanted = ", ".join(f"{code} {labels.get(code, 'without a name')}" for code in codes)
        raise InputError(
            f"label codes of {own.of} for case {files.case_id} must name the run's labels, "
            f"{wanted}, got {own_labels}; give --codes store, or others"
        )
    if not translated:
        return STORE, labels, PaintedRegions(regions, painted.items()), {}
    codes_of = {
        name: tuple(sorted({translated[code] for code in codes})) for name, codes in regions.items()
    }
    paint = [(name, translated[code]) for name, code in painted.items()]
    return own.of, own.labels, PaintedRegions(codes_of, paint), translated
