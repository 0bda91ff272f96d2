"""Reading the arrays of a store's cases, whole or a box of them: mapped, with pread, or from pages that stay in memory.

mmap   Pages of the file are the array: no copy, nothing read that is not touched. A file that is cut while it is mapped
       ends the process (SIGBUS), and so does a network that fails.
pread  Reads into memory: one copy more, and whatever fails is an error that names the file. So are boxes in any mode.
ram    As mmap, but the kernel is asked for all of a file when it is first opened: while there is memory no read waits
       for a disk again. It may take the pages back like any file's, so no plan of a run's memory has to count them.

A file's length is compared with its record before a byte of it is used, because a map that reaches past the end of its
file ends the process. Stores are written so that a new file takes the old one's place, never its content.
"""

import contextlib
import os
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Set, Tuple, Union

import numpy as np
import psutil

from cpu3d.data.files.arrays import ArrayFile, aligned_empty, array_file, bring_in, give_back
from cpu3d.data.records import CaseRecord, array_path
from cpu3d.errors import InputError
from memory_estimator.common.files import NotRegularError, open_regular
from memory_estimator.common.units import format_bytes

Slices = Tuple[slice, slice, slice]

READ_MODES = ("mmap", "pread", "ram")

NETWORK = ("9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "orangefs", "panfs", "wekafs")
"""Types of file systems whose reads can fail for reasons outside this host; nfs*, smb* and fuse* besides."""


class ReadPlan(NamedTuple):
    """How to read a store's files, how many of their pages to leave in memory at most, and why, in one line."""

    mode: str
    page_budget_bytes: int
    reason: str


def choose_read_mode(
    asked: Optional[str], *, file_system: str, needed_bytes: int, free_bytes: int, patches: bool
) -> ReadPlan:
    """The way to read files of `needed_bytes` on a file system of this type; `asked` is one of `READ_MODES`, or None.

    None: pread from a network, because a map turns its failures into the end of the process; ram for patches whose
    files fit a quarter of the free memory; else mmap. A budget is half of what is free. Raises InputError for an
    unknown mode, and for "ram" when the files do not fit the free memory.
    """
    needed, kind = format_bytes(needed_bytes), file_system or "an unknown file system"
    if asked not in (None, *READ_MODES):
        raise InputError(f"read mode must be one of {', '.join(READ_MODES)}, got {asked!r}; leave it out")
    if asked == "ram" and needed_bytes > free_bytes:
        rule = f"read mode ram must hold {needed} of files in memory, got {format_bytes(free_bytes)} free"
        raise InputError(f"{rule}; leave it out, or make a smaller store (--crop, --format b2nd)")
    if asked:
        mode, why = asked, "as asked"
    elif file_system in NETWORK or file_system.startswith(("nfs", "smb", "fuse")):
        mode, why = "pread", f"{kind} can fail while it is read"
    elif patches and needed_bytes <= free_bytes // 4:
        mode, why = "ram", "patches of files that fit a quarter of the free memory"
    else:
        mode, why = "mmap", f"{kind} is local"
    budget = needed_bytes if mode == "ram" else free_bytes // 2
    kept = "all" if budget >= needed_bytes else f"{format_bytes(budget)} at most"
    return ReadPlan(mode, budget, f"{mode} ({why}); {needed} of files, {kept} of it kept in memory")


def file_system(path: Union[str, Path]) -> str:
    """The type of the file system that `path` lies on, such as "ext4" or "nfs4"; "" where the host does not tell."""
    path, found, longest = os.path.realpath(path), "", 0
    with contextlib.suppress(OSError):
        for mount in psutil.disk_partitions(all=True):
            point = mount.mountpoint
            # A later mount on the same point hides the earlier.
            if len(point) >= longest and (path == point or path.startswith(point.rstrip("/") + "/")):
                found, longest = mount.fstype, len(point)
    return found


class Reader:
    """Reads the arrays of a store's cases in one of `READ_MODES`. Threads may share one; each process makes its own.

    Reading raises InputError for a file that is missing, too long or short, changed since it was first opened or
    damaged, and for a label of a case without one; OSError, with the file's name, where the disk fails; ValueError for
    a box, three slices, that reaches beyond its array.
    """

    def __init__(self, folder: Union[str, Path], mode: str = "mmap"):
        self.folder, self.mode = Path(folder), mode
        self._seen: Dict[Path, Tuple[int, int, int]] = {}
        self._whole: Set[Path] = set()  # packed files whose bytes were compared with their hash

    def array(self, record: CaseRecord, part: str) -> np.ndarray:
        """The whole stored image `(X, Y, Z, C)`, `part` "x", or label `(X, Y, Z)` uint8, "y". C order, aligned.

        A .npy file in mode "mmap" or "ram" is the read-only map itself: its voxels are read when they are touched.
        """
        with self._open(record, part) as file:
            if record.format == "b2nd":
                return self._unpacked(file)
            return file.read() if self.mode == "pread" else file.map()

    def box(self, record: CaseRecord, part: str, slices: Slices) -> np.ndarray:
        """A box of the stored array as a copy, C order, aligned; of the file little more than its bytes are read.

        Of a .b2nd file the box's chunks are read, and at a reader's first use all of it, to compare its hash.
        """
        with self._open(record, part) as file:
            slices = _within(file.shape, slices)
            if any(one.start == one.stop for one in slices):
                return aligned_empty([one.stop - one.start for one in slices], file.dtype)
            return self._unpacked(file, slices) if record.format == "b2nd" else file.read_box(slices)

    def advise(self, record: CaseRecord, slices: Slices) -> None:
        """Have a box of a case's files, of a .b2nd file all, on its way into memory; returns at once."""
        for part in parts_of(record):
            with self._open(record, part) as file:
                box = _within(file.shape, slices)
                if record.format == "b2nd":
                    bring_in(file.handle, 0, file.size_bytes)
                else:
                    file.ask_for(box)

    def give_back(self, record: CaseRecord) -> None:
        """Let the kernel take the pages of a case's files."""
        for part in parts_of(record):
            with self._open(record, part) as file:
                give_back(file.handle)

    def problems(self, record: CaseRecord) -> List[str]:
        """A line for each of a case's files that is missing, of another length, changed or of another kind.

        Reads no voxel: damage inside them is seen by `store verify`, that of a packed file when it is first read.
        """
        found: List[str] = []
        for part in parts_of(record):
            try:
                with self._open(record, part):
                    pass
            except InputError as error:
                found.extend(error.problems)
        return found

    @contextlib.contextmanager
    def _open(self, record: CaseRecord, part: str) -> Iterator[ArrayFile]:
        """A case's file, open, after everything about it that can be checked without its voxels."""
        if part == "y" and not record.has_label:
            raise InputError(f"case {record.case_id} must have a label, the store has none; choose a labelled case")
        path = array_path(self.folder, record, part)
        try:
            handle = open_regular(path)
        except (FileNotFoundError, NotRegularError) as error:
            rule = "exist, found none" if isinstance(error, FileNotFoundError) else f"be a file, got {error.strerror}"
            raise InputError(f"store file {path} must {rule}; run `prepare` again") from None
        try:
            file, status = array_file(record, part, path, handle), os.fstat(handle)
            if status.st_size != file.size_bytes:
                rule = f"store file {path} must be {file.size_bytes} bytes long, got {status.st_size}"
                raise InputError(f"{rule}; delete it and run `prepare` again")
            # Everybody who opens a file later compares with what the first saw; checking it twice does no harm.
            now = (status.st_ino, status.st_size, status.st_mtime_ns)
            if path not in self._seen:
                file.check_header()
                if self.mode == "ram":
                    bring_in(handle, 0, file.size_bytes)
            if self._seen.setdefault(path, now) != now:
                rule = f"store file {path} must stay as it was while it is read"
                raise InputError(f"{rule}, got a changed one; start this run again")
            yield file
        except OSError as error:  # of a handle, without a name
            error.filename = error.filename or str(path)
            raise
        finally:
            os.close(handle)

    def _unpacked(self, file: ArrayFile, slices: Optional[Tuple[slice, ...]] = None) -> np.ndarray:
        array = file.unpack(slices, check=file.path not in self._whole)
        self._whole.add(file.path)
        return array


def parts_of(record: CaseRecord) -> Tuple[str, ...]:
    """The arrays that a case has."""
    return ("x", "y") if record.has_label else ("x",)


def _within(shape: Tuple[int, ...], slices: Slices) -> Tuple[slice, ...]:
    """`slices` and all channels. Raises ValueError for those that reach beyond the array: NumPy would cut them."""
    fits = [None not in (one.start, one.stop) and 0 <= one.start <= one.stop <= n for one, n in zip(slices, shape)]
    if len(slices) != 3 or not all(fits) or any(one.step not in (None, 1) for one in slices):
        raise ValueError(f"a box must be three slices within {shape[:3]}, got {slices}; crop it to the array first")
    return (*slices, *(slice(0, n) for n in shape[3:]))
