"""How a store's files are read on this host: mapped, with pread, or kept in memory. Decided once, from what is there.

mmap   Pages of the file are the array: no copy, nothing read that is not touched. A file that is cut while it is mapped
       ends the process (SIGBUS), and so does a network that fails.
pread  Reads into memory: one copy more, and whatever fails is an error that names the file. Boxes are read so in
       mode mmap too.
ram    Every file is read once from front to back and stays mapped: while there is memory for it no read waits for a
       disk again, and all workers of a host share the pages. The kernel may take them back like those of any file, so
       no plan of a run's memory has to count them.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Union

from cpu3d.errors import InputError

READ_MODES = ("auto", "mmap", "pread", "ram")

NETWORK = ("9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "orangefs", "panfs", "wekafs")
"""Types of file systems whose reads can fail for reasons outside this host; nfs*, smb* and fuse* besides."""

MEMORY = ("tmpfs", "ramfs")
"""Types of file systems whose files are memory already."""


@dataclass(frozen=True)
class ReadPlan:
    """How to read a store's files."""

    mode: str
    """"mmap", "pread" or "ram"."""
    page_budget_bytes: int
    """Pages of the store's files to leave in memory at most."""
    reason: str
    """One line for people."""


def choose_read_mode(asked: str, *, file_system: str, needed_bytes: int, free_bytes: int, patches: bool) -> ReadPlan:
    """The way to read files of `needed_bytes` on a file system of this type; `asked` is one of `READ_MODES`.

    "auto": pread from a network, because a map turns its failures into the end of the process; ram for patches whose
    files fit a quarter of the free memory, because one read from front to back takes less than many small ones; else
    mmap. A budget is half of what is free: the other half is for whatever else the run will need.

    Raises InputError for an unknown mode, and for "ram" when the files do not fit the free memory.
    """
    if asked not in READ_MODES:
        raise InputError(f"read mode must be one of {', '.join(READ_MODES)}, got {asked!r}; use auto")
    if asked == "ram" and needed_bytes > free_bytes:
        raise InputError(
            f"read mode ram must hold {_gib(needed_bytes)} of files in memory, got {_gib(free_bytes)} free;"
            " use auto, or a smaller store (--crop, --format b2nd)"
        )
    mode, why = (asked, "as asked") if asked != "auto" else _automatic(file_system, needed_bytes, free_bytes, patches)
    budget = needed_bytes if mode == "ram" else free_bytes // 2
    kept = "all" if budget >= needed_bytes else f"{_gib(budget)} at most"
    return ReadPlan(mode, budget, f"{mode} ({why}); {_gib(needed_bytes)} of files, {kept} of it kept in memory")


def file_system(path: Union[str, Path], mounts: Union[str, Path] = "/proc/self/mountinfo") -> str:
    """The type of the file system that `path` lies on, such as "ext4" or "nfs4"; "" where `mounts` does not tell."""
    try:
        lines = Path(mounts).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    path = os.path.realpath(path)
    found, length = "", 0
    for line in lines:
        # "36 35 98:0 /root /mount/point rw,noatime shared:1 - ext4 /dev/sda rw": any number of fields before the dash.
        fields, _, rest = line.partition(" - ")
        point = _unescaped(fields.split(" ")[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= length:  # a later mount on the same point hides the earlier
            found, length = rest.split(" ")[0], len(point)
    return found


# --- Private helpers ---


def _automatic(file_system: str, needed_bytes: int, free_bytes: int, patches: bool):
    """(mode, why) for "auto"."""
    kind = file_system or "an unknown file system"
    if file_system in NETWORK or file_system.startswith(("nfs", "smb", "fuse")):
        return "pread", f"{kind} can fail while it is read"
    if file_system in MEMORY:
        return "mmap", f"{kind} is memory already"
    if patches and needed_bytes <= free_bytes // 4:
        return "ram", "patches of files that fit a quarter of the free memory"
    return "mmap", f"{kind} is local"


def _unescaped(field: str) -> str:
    """A path of mountinfo, which writes blanks, tabs, line ends and backslashes as octal numbers."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
