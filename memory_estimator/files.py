"""Files: written whole or not at all, and read only where they are regular files.

The estimator stands alone, so `write_whole` is its own small `cpu3d.util.atomic`.
"""

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any, Union


class NotRegularError(OSError, ValueError):
    """A FIFO, device, socket or folder in place of a file: opening one may wait for ever, or do something."""

    def __str__(self) -> str:
        return f"{self.filename} must be a regular file, got {self.strerror}; put a file there, or name another"


def open_regular(path: Union[str, Path]) -> int:
    """A handle for reading a regular file, or a link to one; the caller closes it.

    Raises NotRegularError for anything else, which is not opened, and OSError as `os.open`.
    """
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


def write_whole(path: Path, content: bytes) -> None:
    """Write beside `path` and then rename. Raises OSError, as for a full disk, and leaves the file that was there."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_bytes(content)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
