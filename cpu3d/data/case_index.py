"""The records of a store's cases, a line each in a file, parsed when they are asked for.

Half a million records would fill the memory that volumes need; their places in the file fill four megabytes.
"""

import contextlib
import functools
import json
import os
import re
import weakref
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Tuple, Union

import numpy as np

from cpu3d.data.records import CaseRecord, case_from_json, to_json
from cpu3d.errors import InputError
from memory_estimator.files import NotRegularError, open_regular, parse_json

KEPT = 2048
"""Parsed records that stay in memory: all of most data sets, some 20 MB at most."""

STEM = re.compile(rb'"stem":("(?:[^"\\]|\\.)*")')
"""In a line of `line_of`. A string cannot contain it, for in a string every quote follows a backslash."""

DAMAGE = (KeyError, TypeError, ValueError, AttributeError)
"""What a line that is JSON and no record can raise."""


class CaseIndex(Sequence[CaseRecord]):
    """The records in a file of JSON lines, in the order of `case_ids`. Raises InputError where the file is not that."""

    def __init__(self, path: Path, case_ids: Sequence[str], size_bytes: int):
        self._lines = _Lines(Path(path), tuple(case_ids), size_bytes)
        self._parsed = functools.lru_cache(KEPT)(self._lines.record)

    def __len__(self) -> int:
        return len(self._lines.case_ids)

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
        """A record's JSON content, unchecked but for its case: a third of the time of a record."""
        return self._lines.content(place)

    def split_entry(self, place: int) -> "SplitEntry":
        return self._lines.split_entry(place)

    def stem(self, place: int) -> str:
        """A record's stem, without parsing the record: a hundredth of the time."""
        return self._lines.stem(place)


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


def distinct(cases: Sequence[CaseRecord]) -> Iterator[CaseRecord]:
    """The first record of every stem; those that share its arrays are not parsed."""
    seen = set()
    for place in range(len(cases)):
        stem = _stem(cases, place)
        if stem not in seen:
            seen.add(stem)
            yield cases[place]


def line_of(record: CaseRecord) -> bytes:
    """The record as it stands in the file."""
    return json.dumps(to_json(record), separators=(",", ":"), allow_nan=False).encode() + b"\n"


# --- Private helpers ---


class _Lines:
    """The file of a `CaseIndex`, open as long as this lives.

    Of its own, because a cache of the index's own methods would be a cycle: the file would wait for the collector.
    """

    def __init__(self, path: Path, case_ids: Tuple[str, ...], size_bytes: int):
        self.path, self.case_ids = path, case_ids
        rule = f"store file {path} must be {size_bytes}"
        try:
            self.handle = open_regular(path)
        except FileNotFoundError:
            raise InputError(f"{rule} bytes long, got none; run `prepare` again") from None
        except NotRegularError as error:
            raise InputError(f"{rule} bytes long, got {error.strerror}; run `prepare` again") from None
        weakref.finalize(self, os.close, self.handle)
        found = os.fstat(self.handle).st_size
        if found != size_bytes:
            raise InputError(f"{rule} bytes long, got {found}; run `prepare` again")
        self.ends = _line_ends(self.handle)
        if len(self.ends) != len(case_ids):
            raise InputError(
                f"store file {path} must hold {len(case_ids)} cases, got {len(self.ends)}; run `prepare` again"
            )

    def line(self, place: int) -> bytes:
        start = int(self.ends[place - 1]) if place else 0
        return os.pread(self.handle, int(self.ends[place]) - start, start)

    def stem(self, place: int) -> str:
        found = STEM.search(self.line(place))
        with contextlib.suppress(ValueError):
            if found:
                return parse_json(found[1])
        return self.record(place).stem

    def content(self, place: int) -> Dict[str, Any]:
        line = self.line(place)
        try:
            content = parse_json(line)
            if content["case_id"] == self.case_ids[place]:
                return content
            reason = f"case {content['case_id']}"
        except (ValueError, KeyError, TypeError) as error:
            reason = repr(error)
        raise InputError(
            f"store file {self.path} must hold case {self.case_ids[place]} in line {place + 1}, got {reason};"
            " run `prepare` again"
        )

    def record(self, place: int) -> CaseRecord:
        try:
            return case_from_json(self.content(place))
        except DAMAGE as error:
            raise self._incomplete(place, error) from None

    def split_entry(self, place: int) -> "SplitEntry":
        content = self.content(place)
        try:
            entry = SplitEntry(*(content[name] for name in SplitEntry._fields))
            if set(map(type, entry)) != {str}:
                raise TypeError(f"{', '.join(SplitEntry._fields)} must be text")
            return entry
        except (KeyError, TypeError) as error:
            raise self._incomplete(place, error) from None

    def _incomplete(self, place: int, error: Exception) -> InputError:
        return InputError(
            f"store file {self.path} must be complete in line {place + 1}, got {error!r}; run `prepare` again"
        )


def _stem(cases: Sequence[CaseRecord], place: int) -> str:
    if isinstance(cases, Selection):
        return _stem(cases._cases, cases._places[place])
    return cases.stem(place) if isinstance(cases, CaseIndex) else cases[place].stem


def _line_ends(handle: int) -> np.ndarray:
    """Where each line ends, one past its newline, in bytes from the start."""
    ends, start = [], 0
    with open(handle, "rb", closefd=False) as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            ends.append(np.flatnonzero(np.frombuffer(piece, np.uint8) == ord("\n")) + start + 1)
            start += len(piece)
    return np.concatenate(ends) if ends else np.zeros(0, np.int64)
