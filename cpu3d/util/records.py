"""Records of measurements: one JSON object a line, appended, each with its kind, date, host and versions."""

import json
from datetime import date
from pathlib import Path
from typing import Any, Callable, Dict, Hashable, List, Sequence

from cpu3d.errors import InputError
from memory_estimator.files import parse_json

SCHEMA = 1


def append_record(path: Path, kind: str, content: Dict[str, Any]) -> None:
    """Add a line to `path`; file and folder may be new."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"schema": SCHEMA, "kind": kind, "date": date.today().isoformat(), **content}) + "\n"
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(line)


def read_records(path: Path, kind: str) -> List[Dict[str, Any]]:
    """The records of one kind. Raises InputError for a file that is missing or has another schema."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"record file {path} must exist, found none; make it with `bench ... --record {path}`")
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = parse_json(line)
            schema = record["schema"]
        except (ValueError, KeyError, TypeError):
            raise InputError(f"record {path}:{number} must be JSON with a schema; remove the line") from None
        if schema != SCHEMA:
            raise InputError(f"record {path}:{number} must have schema {SCHEMA}, got {schema}; measure again")
        if record["kind"] == kind:
            records.append(record)
    return records


def newest(records: Sequence[Dict[str, Any]], key: Callable[[Dict[str, Any]], Hashable]) -> List[Dict[str, Any]]:
    """The last record of each key, in the place of the first."""
    return list({key(record): record for record in records}.values())
