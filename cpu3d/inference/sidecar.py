"""The record beside a prediction, <case_id>.json: what the answer is made from, and which files
were written with it.

    before = read_sidecar(out / "a.json")
    if before and not changes(before, wanted, files.paths): ...               # it is kept
    check_replaceable(outputs, before)
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
# In a sidecar: of the label as it was written; while it is written, also of the one before.
LABEL_HASHES = "label_sha256"
FILES = "files"  # in a sidecar: the names of the files that are written with it


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
    """Read a sidecar by `predict`; {} if there is none, or it is somebody else's."""
    try:
        content = read_json(path)
        is_ours = content["written_by"] == WRITER and content["schema"] == SCHEMA
        return content if is_ours else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def changes(
    before: Mapping[str, Any], wanted: Mapping[str, Any], sources: Sequence[Path]
) -> List[str]:
    """Compare an earlier answer with what it would be made of now: the names of what differs.
    `wanted` is all that an answer is made from but its `sources`, as its sidecar has it."""
    wanted = json.loads(json.dumps(wanted))  # tuples are lists there
    found = [name for name, value in wanted.items() if before.get(name) != value]
    if not same_files(sources, [SourceFile(**source) for source in before["sources"]]):
        found.append("the image")
    return found


def is_changed(outputs: Outputs, before: Mapping[str, Any]) -> bool:
    """Whether the label is not the one that predict has written with the sidecar `before`."""
    return outputs.label.is_file() and file_sha256(outputs.label) not in before[LABEL_HASHES]


def check_replaceable(outputs: Outputs, before: Mapping[str, Any]) -> None:
    """Raise InputError for an output that is there and that predict has not written: a file that
    the sidecar `before` does not list, or a label that was changed since."""
    problems = []
    for path in outputs.paths:
        got = ""
        if path.exists() and path.name not in before.get(FILES, ()):
            got = f"a file that {outputs.sidecar.name} does not list as written by predict"
        elif before and path == outputs.label and is_changed(outputs, before):
            got = "a label that was changed since predict wrote it"
        if got:
            problems.append(
                f"{path} must not be overwritten, got {got}; move it, or choose another --out"
            )
    raise_if_any(problems)


def remove_stale(outputs: Outputs, before: Mapping[str, Any]) -> None:
    """Remove the files written with the sidecar `before` that are not written again, as a page of
    the answer before: they would not be of the label beside them. Only files beside the sidecar,
    whatever paths may have been put there."""
    for path in outputs.sidecar.parent.iterdir():
        if path.name in before.get(FILES, ()) and path not in outputs.paths:
            path.unlink()
