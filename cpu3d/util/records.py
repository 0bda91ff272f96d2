"""Records of measurements, one JSON object a line: their conditions, and their numbers as tables
print them."""

import datetime
import json
import platform
import re
from pathlib import Path
from typing import Any, Dict, Iterable, Optional, Sized, Union

from cpu3d.errors import FULL, NoRoomError
from memory_estimator.common.units import counted
from memory_estimator.installed import versions_of

VERSION = "0.1.0"  # of this project
SCHEMA = 1  # of records
LIBRARIES = (
    "tensorflow", "intel-extension-for-tensorflow", "tf_keras", "numpy", "nibabel", "blosc2",
    "scipy",
)  # fmt: skip


def versions() -> Dict[str, str]:
    """Name -> version of this project, Python and the libraries that are installed. Imports none of
    them."""
    return {"cpu3d": VERSION, "python": platform.python_version(), **versions_of(LIBRARIES)}


def append_record(path: Path, kind: str, content: Dict[str, Any]) -> None:
    """Add a line with its kind and today's date to `path`; file and folder may be new.
    Raises NoRoomError for a full disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"schema": SCHEMA, "kind": kind, "date": datetime.date.today().isoformat(), **content}
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        if error.errno in FULL:
            raise NoRoomError(error.errno, error.strerror, str(path)) from error
        raise


def listed(items: Iterable[Any]) -> str:
    """ "a, b and c"; one item alone as it is."""
    words = list(map(str, items))
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def without_passwords(text: str) -> str:
    """`text` with *** for the password of a URI in it."""
    return re.sub(r"(://[^:/@\s]*:)\S*@", r"\1***@", text)


def plus_minus(mean: float, sd: Optional[float], digits: int) -> str:
    """ "0.912 ± 0.004", or the mean alone if there is no deviation."""
    text = f"{mean:.{digits}f}"
    if sd is None:
        return text
    return f"{text} \u00b1 {sd:.{digits}f}"


def count(items: Union[int, Sized], noun: str) -> str:
    """A number of things, or of a collection's items, as "3 cases" or "1 case"."""
    return counted(items if isinstance(items, int) else len(items), noun)
