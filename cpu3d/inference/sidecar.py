"""The record beside a prediction, <case_id>.json: whose the files are, and whether they are what
would be predicted again.

    before = read_sidecar(out / "a.json")
    if before and not changes(before, wanted, outputs, files.paths): ...      # it is kept
    check_replaceable(outputs, before, files.paths, overwrite=False)
    remove_stale(outputs, before, files.paths)
"""

import json
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set

from cpu3d.data.files.arrays import file_sha256
from cpu3d.data.manifest import SourceFile
from cpu3d.data.stores.convert import same_files
from cpu3d.errors import raise_if_any
from cpu3d.util.atomic import write_bytes
from memory_estimator.common.files import read_json

SCHEMA = 1  # version of the sidecar
WRITER = "cpu3d predict"  # in a sidecar: the label beside it was made here and may be replaced
LABEL_HASH = "label_sha256"  # in a sidecar: of the label as it was written
PAGE_SUFFIX = ".html"
FILES = "files"  # in a sidecar: the names of the files that are written with it

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
    if LABEL_HASH not in before:
        return ["an earlier version predicted it"]
    written = _written(before)
    if not all(path.is_file() and path.name in written for path in outputs.paths):
        return ["files are missing"]
    as_read = json.loads(json.dumps(wanted))  # tuples are lists there
    found = []
    for name, words in MADE_FROM.items():
        if name in before and before[name] != as_read.get(name):
            found.append(f"{words} changed")
    try:
        if not same_files(sources, [SourceFile(**source) for source in before["sources"]]):
            found.append("the image changed")
    except (KeyError, TypeError):  # of a damaged sidecar
        found.append("its record is damaged")
    return list(dict.fromkeys(found))


def runs_of(content: Mapping[str, Any]) -> List[str]:
    """The folders of the runs that an answer is of, by the content of its sidecar or by the
    `origin` that is written there; none if it names no run."""
    runs = content.get("runs")
    origins = runs if isinstance(runs, list) else [content]
    folders = [each.get("run") for each in origins if isinstance(each, dict)]
    return sorted(folder for folder in folders if isinstance(folder, str))


def is_of_other_runs(before: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    """Whether a run made an earlier prediction that would not make it now, alone or with others, as
    a fold that is trained since. Runs of the same weights are the same, though their folder was
    moved."""
    earlier = runs_of(before)
    weights = "weights_sha256"
    if set(earlier) <= set(runs_of(about)):
        return False
    return weights not in before or before[weights] != about.get(weights)


def keep_corrected(outputs: Outputs, before: Mapping[str, Any]) -> List[str]:
    """Copy a label that was changed since it was written to a file beside it, which nothing
    overwrites; returns a note with its name, none for a label that was not changed."""
    if not is_changed(outputs, before):
        return []
    content = outputs.label.read_bytes()
    case_id = outputs.sidecar.stem
    number = 1
    copy = outputs.label.with_name(f"{case_id}_corrected_{number}.nii.gz")
    while copy.exists() and copy.read_bytes() != content:
        number += 1
        copy = outputs.label.with_name(f"{case_id}_corrected_{number}.nii.gz")
    write_bytes(copy, content)
    return [f"its label was changed since predict wrote it, and was kept as {copy.name}"]


def check_replaceable(
    outputs: Outputs, before: Mapping[str, Any], sources: Sequence[Path], overwrite: bool
) -> None:
    """Raise InputError for an output that is a source, that exists and is not among the files
    written with the sidecar `before`, or for a label that somebody has changed since, unless these
    are to be overwritten."""
    images = {path.resolve() for path in sources}
    written = _written(before)
    other = "choose another --out"
    problems = []
    for path in outputs.paths:
        rule = f"{path} must not be overwritten"
        if path.resolve() in images:
            problems.append(f"{rule}, got a source image; {other}")
        elif path.exists() and not before:
            problems.append(f"{rule}, got a file that was not written by predict; {other}")
        elif path.exists() and path.name not in written:
            got = f"a file that {outputs.sidecar.name} does not list as written by predict"
            problems.append(f"{rule}, got {got}; move it, or {other}")
    if not overwrite and is_changed(outputs, before):
        rule = f"{outputs.label} must not be overwritten"
        got = "a label that was changed since predict wrote it"
        if not before.get("complete") and LABEL_HASH not in before:
            got = "a label of a prediction that was interrupted, or one that was changed since"
        problems.append(f"{rule}, got {got}; move it, {other}, or give --overwrite")
    raise_if_any(problems)


def remove_stale(outputs: Outputs, before: Mapping[str, Any], sources: Sequence[Path]) -> None:
    """Remove the files written with the sidecar `before` that will not be written again, as a page
    of the answer before: they would not be of the label beside them."""
    folder = outputs.sidecar.parent
    stay = {path.resolve() for path in (*outputs.paths, *sources)}
    for name in _written(before):
        path = folder / name
        # Somebody may have put a path into the sidecar.
        if path.name == name and path.resolve() not in stay and path.is_file():
            path.unlink()


def page_notes(outputs: Outputs, before: Mapping[str, Any]) -> List[str]:
    """A note if a page that is named as the case's stays beside its new answer, as `before`, the
    sidecar, does not list it: it may be of the answer before, by an earlier version."""
    page = outputs.sidecar.with_suffix(PAGE_SUFFIX)
    if outputs.page or page.name in _written(before) or not page.exists():
        return []
    rule = f"a {PAGE_SUFFIX} page of its name, which predict does not know as its own, stays there"
    return [f"{rule}: it may show another answer; remove it if so"]


def _written(before: Mapping[str, Any]) -> Set[str]:
    """The names of the files that were written with a sidecar, itself included. Those of earlier
    versions list no page, which may then be somebody else's."""
    if not before:
        return set()
    names = before.get(FILES)
    if not isinstance(names, list):
        case_id = before.get("case_id")
        probabilities = before.get("probabilities")
        names = [f"{case_id}.json", before.get("label")]
        if isinstance(probabilities, dict):
            names += probabilities.values()
    return {name for name in names if isinstance(name, str)}


def is_changed(outputs: Outputs, before: Mapping[str, Any]) -> bool:
    """Whether a label is there that is not as predict has written it. An interrupted prediction may
    not have replaced the label before, and the hash of earlier versions is not known: then one that
    is later than the sidecar counts as changed."""
    if not before or not outputs.label.is_file():
        return False
    digest = before.get(LABEL_HASH)
    if digest and file_sha256(outputs.label) == digest:
        return False
    if digest and before.get("complete"):
        return True
    return outputs.label.stat().st_mtime_ns > outputs.sidecar.stat().st_mtime_ns
