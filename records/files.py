"""Reads files of records, as `bench` and `compare` write them."""

from pathlib import Path
from typing import Any, Callable, Dict, Hashable, List, Sequence, TypeVar

from cpu3d.errors import InputError
from cpu3d.util.records import SCHEMA
from memory_estimator.common.files import parse_json, read_text, reason

T = TypeVar("T")


def read_records(path: Path, kind: str, use: Callable[[Dict[str, Any]], Any] = dict) -> List[Any]:
    """The results of `use` for the records of a kind, None left out. Raises InputError for a
    missing file, and for a line that is damaged, of another schema or refused by `use`."""
    path = Path(path)
    if not path.is_file():
        rule = f"record file {path} must exist"
        raise InputError(f"{rule}, found none; make it with `bench` and --record {path}")
    try:
        lines = read_text(path).splitlines()
    except ValueError as error:
        rule = f"record file {path} must be text in UTF-8"
        raise InputError(f"{rule}, got {error}; restore it") from None
    results = []
    for row, line in enumerate(lines, 1):
        try:
            record = parse_json(line)
            if record["schema"] != SCHEMA:
                raise ValueError(f"schema {record['schema']}")
            if record["kind"] == kind:
                results.append(use(record))
        except (ValueError, TypeError, AttributeError, ArithmeticError, LookupError) as error:
            rule = f"record {path}:{row} must be JSON of schema {SCHEMA} as `bench` writes it"
            todo = "remove the line, or measure again"
            raise InputError(f"{rule}, got {reason(error)}; {todo}") from None
    return [result for result in results if result is not None]


def newest(records: Sequence[T], key: Callable[[T], Hashable]) -> List[T]:
    """The last record of each key, in the place of the first."""
    return list({key(record): record for record in records}.values())
