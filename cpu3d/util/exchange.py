"""Several files of a folder replaced by new ones together, or not at all, whatever happens in between."""

import contextlib
import shutil
from pathlib import Path
from typing import Iterator, Sequence

from cpu3d.util.atomic import PARTIAL

NEW, OLD = f".new{PARTIAL}", f".old{PARTIAL}"


@contextlib.contextmanager
def exchanged(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    """Yield an empty folder; on success `names` in it replace those in `folder`, else those stay.

    `names` are files and folders, all of which must be there at the end. The last of them leaves first and arrives
    last: where it lies, the others beside it are its own, at any moment. What a killed process left in between is
    brought back by the next call.
    """
    new, old = folder / NEW, folder / OLD
    shutil.rmtree(new, ignore_errors=True)
    _bring_back(old, folder, names)
    new.mkdir(parents=True)
    try:
        yield new
        old.mkdir()
        for name in reversed(names):
            if (folder / name).exists():
                (folder / name).rename(old / name)
        for name in names:
            (new / name).rename(folder / name)
    finally:
        _bring_back(old, folder, names)
        shutil.rmtree(new, ignore_errors=True)


# --- Private helpers ---


def _bring_back(old: Path, folder: Path, names: Sequence[str]) -> None:
    """Undo an exchange that was cut off, told by the last name's absence; then `old` goes."""
    if not (folder / names[-1]).exists():
        for name in names:
            if (old / name).exists():
                shutil.rmtree(folder / name, ignore_errors=True)
                (old / name).rename(folder / name)
    shutil.rmtree(old, ignore_errors=True)
