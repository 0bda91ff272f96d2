"""The records of a store's cases, a line each in a file, parsed when they are asked for.

Half a million records would fill the memory that volumes need; their places in the file fill four megabytes.
"""

import functools
import json
import os
import weakref
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Union

import numpy as np

from cpu3d.data.records import CaseRecord, case_from_json, to_json
from cpu3d.errors import InputError

KEPT = 2048
"""Parsed records that stay in memory: all of most data sets, some 20 MB at most."""


class CaseIndex(Sequence[CaseRecord]):
    """The records in a file of JSON lines, in the order of `case_ids`. Raises InputError where the file is not that."""

    def __init__(self, path: Path, case_ids: Sequence[str], size_bytes: int):
        self._path, self._case_ids = Path(path), tuple(case_ids)
        try:
            found = self._path.stat().st_size
        except FileNotFoundError:
            found = None
        if found != size_bytes:
            got = "none" if found is None else f"{found}"
            raise InputError(f"store file {path} must be {size_bytes} bytes long, got {got}; run `prepare` again")
        self._ends = _line_ends(self._path)
        if len(self._ends) != len(self._case_ids):
            raise InputError(
                f"store file {path} must hold {len(self._case_ids)} cases, got {len(self._ends)}; run `prepare` again"
            )
        self._handle = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._handle)
        self._parsed = functools.lru_cache(KEPT)(self._parse)

    def __len__(self) -> int:
        return len(self._case_ids)

    def __getitem__(self, place: Union[int, slice]):
        if isinstance(place, slice):
            return tuple(self[index] for index in range(len(self))[place])
        return self._parsed(range(len(self))[place])

    def __iter__(self) -> Iterator[CaseRecord]:
        return (self[place] for place in range(len(self)))

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(a == b for a, b in zip(self, other))

    __hash__ = None

    def raw(self, place: int) -> Dict[str, Any]:
        """A record's JSON content, for looking at a field of every case: a third of the time of a record."""
        start = int(self._ends[place - 1]) if place else 0
        line = os.pread(self._handle, int(self._ends[place]) - start, start)
        try:
            content = json.loads(line)
            if content["case_id"] == self._case_ids[place]:
                return content
            reason = f"case {content['case_id']}"
        except (ValueError, KeyError, TypeError) as error:
            reason = repr(error)
        raise InputError(
            f"store file {self._path} must hold case {self._case_ids[place]} in line {place + 1}, got {reason};"
            " run `prepare` again"
        )

    def split_entry(self, place: int) -> "SplitEntry":
        content = self.raw(place)
        try:
            return SplitEntry(*(content[name] for name in SplitEntry._fields))
        except KeyError as error:
            raise self._incomplete(place, error) from None

    def _parse(self, place: int) -> CaseRecord:
        try:
            return case_from_json(self.raw(place))
        except (KeyError, TypeError, ValueError) as error:
            raise self._incomplete(place, error) from None

    def _incomplete(self, place: int, error: Exception) -> InputError:
        return InputError(
            f"store file {self._path} must be complete in line {place + 1}, got {error!r}; run `prepare` again"
        )


class SplitEntry(NamedTuple):
    """What of a record the split and its hash are made of."""

    case_id: str
    patient_id: str
    image_voxels_sha256: str
    label_voxels_sha256: str


def split_entries(cases: Sequence[CaseRecord]) -> List[SplitEntry]:
    """That of every case, without the time and memory of whole records where they lie in a file."""
    if not isinstance(cases, CaseIndex):
        return [SplitEntry(*(getattr(case, name) for name in SplitEntry._fields)) for case in cases]
    return [cases.split_entry(place) for place in range(len(cases))]


class Selection(Sequence[CaseRecord]):
    """Some of a sequence of records, by place, without making them."""

    def __init__(self, cases: Sequence[CaseRecord], places: Sequence[int]):
        self._cases, self._places = cases, tuple(places)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: Union[int, slice]):
        if isinstance(place, slice):
            return Selection(self._cases, self._places[place])
        return self._cases[self._places[place]]

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(a == b for a, b in zip(self, other))

    __hash__ = None


def line_of(record: CaseRecord) -> bytes:
    """The record as it stands in the file."""
    return json.dumps(to_json(record), separators=(",", ":"), allow_nan=False).encode() + b"\n"


# --- Private helpers ---


def _line_ends(path: Path) -> np.ndarray:
    """Where each line ends, one past its newline, in bytes from the start."""
    ends, start = [], 0
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            ends.append(np.flatnonzero(np.frombuffer(piece, np.uint8) == ord("\n")) + start + 1)
            start += len(piece)
    return np.concatenate(ends) if ends else np.zeros(0, np.int64)
