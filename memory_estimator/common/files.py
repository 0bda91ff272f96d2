"""Files that are read only where they are regular ones, and JSON that is read as typed records."""

import dataclasses
import json
import math
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

RECORD_SCHEMA = 2  # of benchmark records, as `cpu3d.util.records` writes them


class NotRegularError(OSError, ValueError):
    """A FIFO, device, socket or folder in place of a file: opening one may wait for ever, or do something."""

    def __str__(self) -> str:
        return f"{self.filename} must be a regular file, got {self.strerror}; put a file there, or name another"


def open_regular(path: Union[str, Path]) -> int:
    """A handle for reading a regular file, or a link to one; the caller closes it. Raises NotRegularError for anything
    else, which is not opened, and OSError as `os.open`."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
        raise NotRegularError(0, kinds.get(stat.S_IFMT(mode), "a device"), str(path))
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def read_regular(path: Union[str, Path]) -> bytes:
    """All of a regular file. Raises as `open_regular`."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def read_json(path: Union[str, Path]) -> Any:
    """The content of a file of JSON. Raises ValueError where it is none, and as `open_regular`."""
    return parse_json(read_regular(path))


def parse_json(text: Union[str, bytes]) -> Any:
    """What `json.loads` makes of text in UTF-8. Raises ValueError where that is none, too deep or no Unicode."""
    try:
        text = text if isinstance(text, str) else text.decode()
        content = json.loads(text)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(content, ensure_ascii=False).encode()  # fails for half a surrogate pair, which no file can hold
        return content
    except UnicodeDecodeError as error:
        raise ValueError(str(error)) from None  # its repr holds all of the text
    except RecursionError:
        raise ValueError("brackets that are nested too deep") from None


def reason(error: Exception) -> str:
    """What is wrong with content that was read, for a message that names its file, in no words of Python's."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, KeyError):
        return f"no {error.args[0]!r}"
    if isinstance(error, (TypeError, AttributeError, IndexError, ArithmeticError)):
        return "a value of another kind"
    return str(error)


def read_records(path: Path, kind: str, use: Callable[[Dict[str, Any]], Optional[T]]) -> List[T]:
    """What `use` makes of each record of a kind in a file of JSON lines, None left out. Raises ValueError for a missing
    file, and for a line that is damaged, of another schema or refused by `use`."""
    path, found = Path(path), []
    if not path.is_file():
        raise ValueError(f"record file {path} must exist, found none; make it with `bench` and --record {path}")
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = parse_json(line)
            if record["schema"] != RECORD_SCHEMA:
                raise ValueError(f"schema {record['schema']}")
            found.append(use(record) if record["kind"] == kind else None)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError) as error:
            raise ValueError(
                f"record {path}:{number} must be JSON of schema {RECORD_SCHEMA} as `bench` writes it, got "
                f"{reason(error)}; remove the line, or measure again"
            ) from None
    return [one for one in found if one is not None]


def typed(content: Any, kind: Any, name: str = "content") -> Any:
    """Parsed JSON as `kind`: a dataclass or TypedDict, a Tuple, Sequence, List, Dict or Optional of them, a plain type.

    Lists become tuples where `kind` has tuples, text becomes int where keys are int, and an int is a float too. Fields
    with defaults may be missing, and a TypedDict may have more fields. Raises ValueError, with the dotted name, where a
    value is none of its kind: of another type, no finite number, an integer beyond 64 bits, a field missing or unknown.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any or (origin is Union and content is None):
        return content
    if origin is Union:  # Optional
        return typed(content, inner[0], name)
    if dataclasses.is_dataclass(kind) or hasattr(kind, "__required_keys__"):
        return _typed_record(content, kind, name)
    if origin in (tuple, Sequence, list) and isinstance(content, list):
        made, is_open = list if origin is list else tuple, origin is not tuple or inner[-1] is ...
        if is_open and inner[0] is str and set(map(type, content)) <= {str}:
            return made(content)  # in no time, as there may be half a million ids of cases
        kinds = inner[:1] * len(content) if is_open else inner
        if len(kinds) == len(content):
            return made(typed(one, of, f"{name}[{i}]") for i, (one, of) in enumerate(zip(content, kinds)))
    elif origin is dict and isinstance(content, dict):
        if inner[0] is not int or all(key.isdecimal() and key.isascii() and len(key) < 19 for key in content):
            return {inner[0](key): typed(value, inner[1], f"{name}.{key}") for key, value in content.items()}
    elif origin is None and isinstance(content, (int, float) if kind is float else kind):
        if kind is bool or not isinstance(content, (bool, int, float)):
            return content
        if not isinstance(content, bool) and abs(content) < (2**63 if isinstance(content, int) else math.inf):
            return content
    words = str(kind).replace("typing.", "") if origin else kind.__name__
    raise ValueError(f"{name} must be {words}, got {_short(content)}")


def _typed_record(content: Any, kind: Any, name: str) -> Any:
    if not isinstance(content, dict):
        raise ValueError(f"{name} must be an object, got {_short(content)}")
    hints = get_type_hints(kind)
    needed, known = getattr(kind, "__required_keys__", ()), set(content)
    if dataclasses.is_dataclass(kind):
        fields = dataclasses.fields(kind)
        needed, known = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING], set(hints)
    missing, unknown = (", ".join(sorted(names)) for names in ({*needed} - set(content), set(content) - known))
    if missing or unknown:
        found = " and ".join([f"no {missing}"] * bool(missing) + [f"unknown {unknown}"] * bool(unknown))
        raise ValueError(f"{name} must have its fields and no others, got {_short(found)}")
    return kind(**{field: typed(value, hints.get(field, Any), f"{name}.{field}") for field, value in content.items()})


def _short(content: Any) -> str:
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
