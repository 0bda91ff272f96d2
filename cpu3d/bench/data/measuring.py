"""Fair timing: variants in turn, round by round, and a page cache that is known to be full or empty."""

import mmap
import os
import time
from pathlib import Path
from typing import Callable, Dict, Iterable, List, Mapping, Sequence

import numpy as np

from cpu3d.data.files import page_cache
from cpu3d.data.files.file_map import map_file

Work = Callable[[int], float]
"""Does a thing once, the round's own way, and says how many seconds of it count."""


def in_turn(variants: Mapping[str, Work], rounds: int) -> Dict[str, List[float]]:
    """Seconds of each variant in each round: all of them, then all again, so that a slow moment hits no one alone.

    A round before the first is not counted: it opens libraries, traces graphs and fills the page cache.
    """
    for work in variants.values():
        work(0)
    found: Dict[str, List[float]] = {name: [] for name in variants}
    for number in range(rounds):
        for name, work in variants.items():
            found[name].append(work(number))
    return found


def seconds(work: Callable[[], object]) -> float:
    """How long a call takes, its result not kept."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def touch(array: np.ndarray) -> float:
    """Read one value of every 4 KiB of an array, so that no part of it was only promised."""
    flat = array.ravel(order="K")  # a view of either order
    return float(flat[:: max(1, 4096 // flat.itemsize)].astype(np.float64).sum())


def read_through(paths: Iterable[Path]) -> None:
    """Bring files into the page cache, front to back."""
    buffer = bytearray(1 << 22)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop_pages(paths: Sequence[Path]) -> float:
    """Have the kernel forget the pages of exactly these files; the share of their bytes that stayed all the same.

    Pages that are still to be written cannot be dropped, so they are written first; those of a live map stay.
    """
    for path in paths:
        with open(path, "rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    total = sum(path.stat().st_size for path in paths)
    return sum(resident_bytes(path) for path in paths) / total if total else 0.0


def resident_bytes(path: Path) -> int:
    """How much of a file lies in the page cache, whoever brought it there."""
    with open(path, "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if not size_bytes:
            return 0
        pages = page_cache.resident(map_file(file.fileno(), size_bytes))
    return min(size_bytes, int(pages.sum()) * mmap.PAGESIZE)
