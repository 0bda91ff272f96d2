"""The record beside a prediction, <case_id>.json: whose the files are, and whether they are what
would be predicted again.

    before = read_sidecar(out / "a.json")
    if before and not changes(before, wanted, outputs, files.paths): ...      # it is kept
    check_replaceable(outputs, before, files.paths, overwrite=False)
"""

import json
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

from cpu3d.data.files.arrays import file_sha256
from cpu3d.data.manifest import SourceFile
from cpu3d.data.stores.convert import same_files
from cpu3d.errors import raise_if_any
from memory_estimator.common.files import read_json

SCHEMA = 1  # version of the sidecar
WRITER = "cpu3d predict"  # in a sidecar: the label beside it was made here and may be replaced
LABEL_HASH = "label_sha256"  # in a sidecar: of the label as it was written

# Fields that a prediction follows from, beside its image -> words for them.
MADE_FROM = {
    "run": "the run",
    "fold": "the fold",
    "runs": "the runs",
    "weights": "--weights",
    "weights_sha256": "the weights",
    "inference": "how the network is applied",
    "postprocessing": "post-processing",
    "threshold": "the threshold",
    "zero_nan": "--zero-nan",
    "codes_of": "the label codes",
    "label_codes": "the label codes",
    "regions": "the regions",
}


class Outputs(NamedTuple):
    """The files that are written of a case."""

    sidecar: Path
    label: Path
    page: Optional[Path]  # None without one
    probabilities: Dict[str, Path]  # by region; none if they are not written

    @property
    def paths(self) -> List[Path]:
        paths = [self.sidecar, self.label, *self.probabilities.values()]
        return [*paths, self.page] if self.page else paths


def read_sidecar(path: Path) -> Dict[str, Any]:
    """The content of a sidecar by `predict`; {} if there is none, or it is somebody else's."""
    try:
        content = read_json(path)
        return content if content.get("written_by") == WRITER else {}
    except (OSError, ValueError, AttributeError):
        return {}


def changes(
    before: Mapping[str, Any], wanted: Mapping[str, Any], outputs: Outputs, sources: Sequence[Path]
) -> List[str]:
    """What of an earlier prediction is not as it would be made of `sources` now, in words; none if
    it can be kept. `before` and `wanted` are the contents of its sidecar, then and now."""
    if not before.get("complete"):
        return ["it was interrupted"]
    if not all(path.is_file() for path in outputs.paths):
        return ["files are missing"]
    as_read = json.loads(json.dumps(wanted))  # tuples are lists there
    found = []
    for name, words in MADE_FROM.items():
        if before.get(name) != as_read.get(name):
            found.append(f"{words} changed")
    try:
        if not same_files(sources, [SourceFile(**source) for source in before["sources"]]):
            found.append("the image changed")
    except (KeyError, TypeError):  # of a damaged sidecar
        found.append("its record is damaged")
    return list(dict.fromkeys(found))


def check_replaceable(
    outputs: Outputs, before: Mapping[str, Any], sources: Sequence[Path], overwrite: bool
) -> None:
    """Raise InputError for an output that is a source, that exists without a sidecar by `predict`,
    or that somebody has changed since, unless these are to be overwritten."""
    images = {path.resolve() for path in sources}
    other = "choose another --out"
    problems = []
    for path in outputs.paths:
        rule = f"{path} must not be overwritten"
        if path.resolve() in images:
            problems.append(f"{rule}, got a source image; {other}")
        elif path.exists() and not before:
            problems.append(f"{rule}, got a file that was not written by predict; {other}")
    if not overwrite and _is_changed(outputs.label, before):
        rule = f"{outputs.label} must not be overwritten"
        got = "a label that was changed since predict wrote it"
        problems.append(f"{rule}, got {got}; {other}, or give --overwrite")
    raise_if_any(problems)


def _is_changed(label: Path, before: Mapping[str, Any]) -> bool:
    """Whether a label is there that is not as its sidecar has it; those of earlier versions do not
    tell."""
    digest = before.get(LABEL_HASH)
    return bool(digest) and label.is_file() and file_sha256(label) != digest
