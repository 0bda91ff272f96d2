"""Regular files, which alone are read, and JSON as typed records."""

import dataclasses
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any, Callable, TypeVar, Union

import msgspec

from memory_estimator.common.units import shortened

AnyPath = Union[str, Path]
T = TypeVar("T")


class NotRegularError(OSError, ValueError):
    """A FIFO, device, socket or folder in place of a file: opening one may wait without end, or do
    something."""

    def __str__(self) -> str:
        todo = "put a file there, or name another"
        return f"{self.filename} must be a regular file, got {self.strerror}; {todo}"


def open_regular(path: AnyPath) -> int:
    """A handle for reading a regular file; the caller closes it. Raises NotRegularError for others,
    unopened."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
        raise NotRegularError(0, kinds.get(stat.S_IFMT(mode), "a device"), str(path))
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def read_regular(path: AnyPath) -> bytes:
    """The content of a regular file. Raises as `open_regular`."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def read_text(path: AnyPath) -> str:
    """The text of a regular file. Raises ValueError as `decoded`, and as `open_regular`."""
    return decoded(read_regular(path))


def decoded(content: bytes) -> str:
    """Text in UTF-8, without the byte order mark that editors on Windows put before it.

    Raises ValueError for other text."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:  # its repr holds all of the text
        raise ValueError(f"{error}: save it as UTF-8") from None


def read_json(path: AnyPath) -> Any:
    """The content of a file of JSON. Raises ValueError as `parse_json`, and as `open_regular`."""
    return parse_json(read_regular(path))


def read_record(
    path: AnyPath, schema: int, make: Callable[[Any], T], todo: str, error: Any = ValueError
) -> T:
    """The result of `make` for the object in a file of JSON, less its "schema", the version of its
    format. Raises FileNotFoundError or NotADirectoryError for a missing file; `error`, whose
    message ends with `todo`, for one that is damaged or of another version, and if `make` raises
    ValueError, KeyError or TypeError."""
    try:
        content = read_json(path)
        version = content.pop("schema")
        if version != schema:
            todo = f"use the version that wrote it, or {todo}"
            raise ValueError(f"schema {version}")
        return make(content)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        rule = f"{path} must be complete JSON of schema {schema}"
        raise error(f"{rule}, got {reason(problem)}; {todo}") from None


def parse_json(text: Union[str, bytes]) -> Any:
    """The content of JSON, of bytes as `decoded`. Raises ValueError if the text is not JSON, with
    the line and column of the fault, nested too deep or not Unicode."""
    if isinstance(text, bytes):
        text = decoded(text)
    if not text.strip():
        raise ValueError("nothing, it is empty")
    try:
        content = json.loads(text)
        if "\\ud" in text or "\\uD" in text:
            # Fails for half a surrogate pair, which no file can hold.
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except RecursionError:
        raise ValueError("brackets that are nested too deep") from None


def reason(error: Exception) -> str:
    """The fault of content that was read, without Python's own words, for a message that names its
    file."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, KeyError):
        return f"no {error.args[0]!r}"
    if isinstance(error, (TypeError, AttributeError, IndexError, ArithmeticError)):
        return "a value of another kind"
    return str(error)


def typed(content: Any, kind: Any, name: str = "content") -> Any:
    """Parsed JSON as `kind`: a dataclass or TypedDict, a tuple, list, dict or Optional of them, a
    plain type. Lists become tuples and text becomes int where `kind` has tuples and int keys, and
    an int is a float too. Fields with defaults may be missing, and a TypedDict may have more
    fields. Raises ValueError, with the dotted name, if a value is not of its kind: another type,
    not finite, an integer beyond 64 bits, a field missing or unknown."""
    try:
        record = msgspec.convert(content, kind, str_keys=True)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ValueError):  # of a dataclass's own check
            raise error.__cause__ from None
        raise ValueError(_message(str(error), content, name)) from None
    _check_rest(record, content, name)
    return record


def _check_rest(record: Any, content: Any, name: str) -> None:
    """Raise ValueError for unknown fields of a dataclass and numbers that are too large: msgspec
    lets them pass."""
    if dataclasses.is_dataclass(record):
        fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
        unknown = ", ".join(sorted(set(content) - set(fields)))
        if unknown:
            raise ValueError(f"{name} must have its fields and no others, got unknown {unknown}")
        vars(record).update(fields)  # msgspec leaves plain defaults to the class
        record = fields
    if isinstance(record, dict):
        for key in record:
            if str(key) in content:
                _check_rest(record[key], content[str(key)], f"{name}.{key}")
    elif isinstance(record, (list, tuple)):
        for index, (part, value) in enumerate(zip(record, content)):
            _check_rest(part, value, f"{name}[{index}]")
    elif type(record) in (int, float):
        limit = 2**63 if type(record) is int else math.inf
        if not abs(record) < limit:
            raise ValueError(f"{name} must be {type(record).__name__}, got {_short(record)}")


def _message(error: str, content: Any, name: str) -> str:
    """msgspec's message about content, with the name of the faulty part and its value."""
    rule, _, path = error.partition(" - at ")
    where = name
    value = content
    for key, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", path):
        if index == "...":  # one of a dict's, which msgspec does not name
            where = f"a value of {where}"
            break
        where += f".{key}" if key else f"[{index}]"
        value = value[key or int(index)]
    missing = re.match(r"Object missing required field `(.+)`", rule)
    if missing:
        return f"{where} must have its fields and no others, got no {missing[1]}"
    expected = re.sub(r"Expected (.+?)(, got .*)?$", r"must be \1", rule).replace("`", "")
    return f"{where} {expected}, got {_short(value)}"


def _short(content: Any) -> str:
    text = content
    if not isinstance(content, str):
        text = json.dumps(content, ensure_ascii=False, default=str)
    return shortened(text)
