"""The record beside a prediction, <case_id>.json: what the answer is made from, and which files
were written with it.

    before = read_sidecar(out / "a.json")
    if before and not changes(before, wanted, outputs, files.paths): ...      # it is kept
    check_replaceable(outputs, before, files.paths, overwrite=False)
    remove_stale(outputs, before, files.paths)
"""

import itertools
import json
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

from cpu3d.data.files.arrays import file_sha256
from cpu3d.data.manifest import SourceFile
from cpu3d.data.stores.convert import same_files
from cpu3d.errors import raise_if_any
from cpu3d.util.atomic import write_bytes
from memory_estimator.common.files import read_json

SCHEMA = 1  # version of the sidecar
WRITER = "cpu3d predict"  # in a sidecar: the label beside it was made here and may be replaced
LABEL_HASH = "label_sha256"  # in a sidecar: of the label as it was written
REPLACED_HASH = "replaced_label_sha256"  # while it is written: of the label before
FILES = "files"  # in a sidecar: the names of the files that are written with it

# Fields that an answer is made from -> words for them, where their names are not plain.
WORDS = {
    "fold": "the fold",
    "run": "the run",
    "runs": "the runs",
    "weights": "--weights",
    "weights_sha256": "the weights",
    "inference": "how the network is applied",
    "postprocessing": "post-processing",
    "zero_nan": "--zero-nan",
    "label_codes": "the label codes",
    "images": "the files",
    "channels": "the order of the channels",
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
        is_ours = content["written_by"] == WRITER and content["schema"] == SCHEMA
        return content if is_ours and all(map(str, content[FILES])) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def changes(
    before: Mapping[str, Any], wanted: Mapping[str, Any], outputs: Outputs, sources: Sequence[Path]
) -> List[str]:
    """What of an earlier answer is not as it would be made of `sources` now, in words; none if it
    can be kept. `wanted` is all that an answer is made from, as its sidecar has it."""
    if not before.get("complete"):
        return ["it was interrupted"]
    if not all(path.is_file() and path.name in before[FILES] for path in outputs.paths):
        return ["files are missing"]
    found = []
    for name, value in json.loads(json.dumps(wanted)).items():  # tuples are lists there
        if before.get(name) != value:
            found.append(f"{WORDS.get(name, 'the ' + name)} changed")
    try:
        if not same_files(sources, [SourceFile(**source) for source in before["sources"]]):
            found.append("the image changed")
    except (KeyError, TypeError):  # of a damaged sidecar
        found.append("its record is damaged")
    return list(dict.fromkeys(found))


def origins_of(content: Mapping[str, Any]) -> List[Mapping[str, Any]]:
    """The runs of an answer, with their weights, by the content of its sidecar or of its scores."""
    runs = content.get("runs", [content])
    return [each for each in runs if isinstance(each.get("run"), str)]


def runs_of(content: Mapping[str, Any]) -> List[str]:
    """The folders of these runs."""
    return sorted(origin["run"] for origin in origins_of(content))


def weights_of(content: Mapping[str, Any]) -> List[str]:
    """The hashes of their weights."""
    return sorted(str(origin.get("weights_sha256")) for origin in origins_of(content))


def is_of_other_runs(before: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    """Whether a run made an earlier answer that would not make it now, alone or with others, as a
    fold that is trained since. Runs of the same weights are the same, though their folder was
    moved."""
    if set(runs_of(before)) <= set(runs_of(about)):
        return False
    return weights_of(before) != weights_of(about)


def is_changed(outputs: Outputs, before: Mapping[str, Any]) -> bool:
    """Whether a label is there that predict has not written, in the answer `before` or, if that was
    interrupted, in the one that it replaces."""
    if not before or not outputs.label.is_file():
        return False
    written = (before.get(LABEL_HASH), before.get(REPLACED_HASH))
    return file_sha256(outputs.label) not in written


def keep_corrected(outputs: Outputs, before: Mapping[str, Any]) -> List[str]:
    """Copy a label that was changed since it was written to a file beside it, which nothing
    overwrites; returns a note with its name, none for a label that was not changed."""
    if not is_changed(outputs, before):
        return []
    content = outputs.label.read_bytes()
    for number in itertools.count(1):
        copy = outputs.label.with_name(f"{outputs.sidecar.stem}_corrected_{number}.nii.gz")
        if not copy.exists() or copy.read_bytes() == content:
            break
    write_bytes(copy, content)
    return [f"its label was changed since predict wrote it, and was kept as {copy.name}"]


def check_replaceable(
    outputs: Outputs, before: Mapping[str, Any], sources: Sequence[Path], overwrite: bool
) -> None:
    """Raise InputError for an output that is there and that predict has not written: a source, a
    file that the sidecar `before` does not list, or a label that was changed since. The last one
    alone may be overwritten if that is asked for."""
    images = {path.resolve() for path in sources}
    other = "choose another --out"
    problems = []
    for path in outputs.paths:
        rule = f"{path} must not be overwritten"
        if path.resolve() in images:
            problems.append(f"{rule}, got a source image; {other}")
        elif path.exists() and path.name not in before.get(FILES, ()):
            got = f"a file that {outputs.sidecar.name} does not list as written by predict"
            problems.append(f"{rule}, got {got}; move it, or {other}")
    if not overwrite and is_changed(outputs, before):
        rule = f"{outputs.label} must not be overwritten"
        got = "a label that was changed since predict wrote it"
        problems.append(f"{rule}, got {got}; move it, {other}, or give --overwrite")
    raise_if_any(problems)


def remove_stale(outputs: Outputs, before: Mapping[str, Any], sources: Sequence[Path]) -> None:
    """Remove the files written with the sidecar `before` that will not be written again, as a page
    of the answer before: they would not be of the label beside them."""
    folder = outputs.sidecar.parent
    stay = {path.resolve() for path in (*outputs.paths, *sources)}
    for name in before.get(FILES, ()):
        path = folder / name
        # Somebody may have put a path into the sidecar.
        if path.name == name and path.resolve() not in stay and path.is_file():
            path.unlink()
