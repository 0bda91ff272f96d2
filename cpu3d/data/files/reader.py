"""Reading the arrays of a store's cases, whole or a box of them: mapped, with pread, or kept in memory.

mmap   Pages of the file are the array: no copy, nothing read that is not touched. A file that is cut while it is mapped
       ends the process (SIGBUS), and so does a network that fails.
pread  Reads into memory: one copy more, and whatever fails is an error that names the file. Boxes are read so in
       mode mmap too.
ram    Every file is read once from front to back and stays mapped: while there is memory for it no read waits for a
       disk again, and all workers of a host share the pages. The kernel may take them back like those of any file, so
       no plan of a run's memory has to count them.

A file's length is compared with its record before a byte of it is used, because a map that reaches past the end of its
file ends the process. Stores are written so that a new file takes the old one's place, never its content.
"""

import contextlib
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Set, Tuple, Union

import numpy as np

from cpu3d.data.files import pages
from cpu3d.data.files.arrays import ALIGNMENT_BYTES, ArrayFile, aligned_empty, array_file
from cpu3d.data.records import CaseRecord, array_path
from cpu3d.errors import InputError
from memory_estimator.files import NotRegularError, open_regular

Slices = Tuple[slice, slice, slice]

READ_MODES = ("mmap", "pread", "ram")

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


def choose_read_mode(
    asked: Optional[str], *, file_system: str, needed_bytes: int, free_bytes: int, patches: bool
) -> ReadPlan:
    """The way to read files of `needed_bytes` on a file system of this type; `asked` is one of `READ_MODES`, or None.

    None: pread from a network, because a map turns its failures into the end of the process; ram for patches whose
    files fit a quarter of the free memory; else mmap. A budget is half of what is free. Raises InputError for an
    unknown mode, and for "ram" when the files do not fit the free memory.
    """
    if asked not in (None, *READ_MODES):
        raise InputError(f"read mode must be one of {', '.join(READ_MODES)}, got {asked!r}; leave it out")
    if asked == "ram" and needed_bytes > free_bytes:
        rule = f"read mode ram must hold {_gib(needed_bytes)} of files in memory, got {_gib(free_bytes)} free"
        raise InputError(f"{rule}; leave it out, or make a smaller store (--crop, --format b2nd)")
    mode, why = (asked, "as asked") if asked is not None else _automatic(file_system, needed_bytes, free_bytes, patches)
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
        # Blanks, tabs, line ends and backslashes of a path are written as octal numbers.
        point = re.sub(r"\\(040|011|012|134)", lambda match: chr(int(match[1], 8)), fields.split(" ")[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= length:  # a later mount on the same point hides the earlier
            found, length = rest.split(" ")[0], len(point)
    return found


@dataclass(frozen=True)
class Reads:
    """What a reader has done so far."""

    arrays: int = 0
    """Arrays given out, boxes included."""
    zero_copy: int = 0
    """Of them, maps: their voxels are the kernel's own pages."""
    bytes_read: int = 0
    """Bytes of files that were read for them, to compare hashes too; of a map, those it gave out."""

    @property
    def zero_copy_ratio(self) -> float:
        """Of the arrays given out, the part that was not copied; 0 before the first."""
        return self.zero_copy / self.arrays if self.arrays else 0.0


class Reader:
    """Reads the arrays of a store's cases. Threads may share one; each process makes its own.

    mode: "mmap", "pread" or "ram" (see above). Files in format "b2nd" are read and unpacked in every mode.
    """

    def __init__(self, folder: Union[str, Path], mode: str = "mmap"):
        if mode not in READ_MODES:
            raise ValueError(f"mode must be one of {', '.join(READ_MODES)}, got {mode!r}")
        self.folder, self.mode = Path(folder), mode
        self._seen: Dict[str, Tuple[int, int, int]] = {}
        self._held: Dict[str, np.ndarray] = {}
        self._whole: Set[str] = set()  # packed files whose bytes were compared with their hash
        self.reads = Reads()
        self._lock = threading.Lock()

    def array(self, record: CaseRecord, part: str) -> np.ndarray:
        """The whole stored image `(X, Y, Z, C)`, `part` "x", or label `(X, Y, Z)` uint8, "y". C order, aligned.

        A .npy file in mode "mmap" or "ram" is the read-only map itself: its voxels are read when they are touched.
        Raises InputError for a file that is missing, too long or short, changed since it was first opened or damaged,
        and for a label of a case without one; OSError, with the file's name, where the disk fails.
        """
        with self._open(record, part) as file:
            if record.format == "b2nd":
                array = file.unpack(check=str(file.path) not in self._whole)
                self._whole.add(str(file.path))
                return self._count(array, file.size_bytes)
            if self.mode != "pread":
                array = file.view(self._hold(file) if self.mode == "ram" else file.content())
                usable = array.ctypes.data % ALIGNMENT_BYTES == 0 and array.dtype.isnative
                return self._count(array if usable else _aligned(array), array.nbytes, zero_copy=usable)
            array = file.read()
            return self._count(array, array.nbytes)

    def box(self, record: CaseRecord, part: str, slices: Slices) -> np.ndarray:
        """A box of the stored array as a copy, C order, aligned; of the file little more than its bytes are read.

        `slices`: three of a start and a stop, within the stored array; an empty one gives an empty array. A .npy file's
        box is read, not mapped, but in mode "ram": a map made for one patch costs more page faults than it saves
        copies. Of a .b2nd file the box's chunks are read, and at a reader's first use all of it once more, to compare
        its hash. Raises ValueError for slices that reach beyond the array, else as `array`.
        """
        with self._open(record, part) as file:
            slices = _within(file.shape, slices)
            shape = tuple(one.stop - one.start for one in slices)
            if min(shape) == 0:
                return self._count(aligned_empty(shape, file.dtype), 0)
            if record.format == "b2nd":
                checked = 0 if str(file.path) in self._whole else file.check_content()
                self._whole.add(str(file.path))
                array, size_bytes = file.unpack_box(slices)
                return self._count(array, checked + size_bytes)
            if self.mode == "ram":
                array = _aligned(file.view(self._hold(file))[slices])
                return self._count(array, array.nbytes)
            return self._count(*file.read_box(slices))

    def advise(self, record: CaseRecord, slices: Optional[Slices] = None) -> None:
        """Have a case's files, or a box of each, on their way into memory before they are read; returns at once.

        Mode "ram" reads the files whole, as their first use would. A .b2nd file comes whole. Raises as `box`.
        """
        for part in parts_of(record):
            with self._open(record, part) as file:
                box = None if slices is None else _within(file.shape, slices)
                if self.mode == "ram":
                    self._hold(file)
                elif box is None or record.format == "b2nd":
                    pages.bring_in(file.handle, 0, file.size_bytes)
                elif all(one.stop > one.start for one in box):
                    file.ask_for(box)

    def problems(self, record: CaseRecord) -> List[str]:
        """A line for each of a case's files that is missing, of another length, changed or of another kind.

        Reads no voxel, so damage inside them stays unseen here; a packed file's is seen when it is first read.
        """
        found: List[str] = []
        for part in parts_of(record):
            try:
                with self._open(record, part):
                    pass
            except InputError as error:
                found.extend(error.problems)
        return found

    # --- Private helpers ---

    @contextlib.contextmanager
    def _open(self, record: CaseRecord, part: str) -> Iterator[ArrayFile]:
        """A case's file, open, after everything about it that can be checked without its voxels."""
        if part == "y" and not record.has_label:
            raise InputError(f"case {record.case_id} must have a label, the store has none; choose a labelled case")
        path = array_path(self.folder, record, part)
        try:
            handle = open_regular(path)
        except FileNotFoundError:
            raise InputError(f"store file {path} must exist, found none; run `prepare` again") from None
        except NotRegularError as error:
            raise InputError(f"store file {path} must be a file, got {error.strerror}; run `prepare` again") from None
        try:
            file = array_file(record, part, path, handle)
            status = os.fstat(handle)
            if status.st_size != file.size_bytes:
                rule = f"store file {path} must be {file.size_bytes} bytes long, got {status.st_size}"
                raise InputError(f"{rule}; delete it and run `prepare` again")
            # Everybody who opens a file later compares with what the first saw; checking it twice does no harm.
            now = (status.st_ino, status.st_size, status.st_mtime_ns)
            if str(path) not in self._seen:
                file.check_header()
            if self._seen.setdefault(str(path), now) != now:
                rule = f"store file {path} must stay as it was while it is read"
                raise InputError(f"{rule}, got a changed one; start this run again")
            yield file
        finally:
            os.close(handle)

    def _hold(self, file: ArrayFile) -> np.ndarray:
        """A file's bytes as a map that stays. It is not locked: where a step needs the memory, its pages have to go."""
        name = str(file.path)
        if name not in self._held:
            content = file.content(populate=True)
            with self._lock:
                self._held.setdefault(name, content)
        return self._held[name]

    def _count(self, array: np.ndarray, bytes_read: int, zero_copy: bool = False) -> np.ndarray:
        with self._lock:
            done = self.reads
            self.reads = Reads(done.arrays + 1, done.zero_copy + zero_copy, done.bytes_read + bytes_read)
        return array


def parts_of(record: CaseRecord) -> Tuple[str, ...]:
    """The arrays that a case has."""
    return ("x", "y") if record.has_label else ("x",)


# --- Private helpers ---


def _within(shape: Tuple[int, ...], slices: Slices) -> Tuple[slice, ...]:
    """`slices` and all channels. Raises ValueError for those that reach beyond the array: NumPy would cut them."""
    bad = [
        f"{one.start}:{one.stop}{'' if one.step in (None, 1) else f':{one.step}'} of {n}"
        for one, n in zip(slices, shape)
        if one.start is None or one.stop is None or not 0 <= one.start <= one.stop <= n or one.step not in (None, 1)
    ]
    if len(slices) != 3 or bad:
        found = ", ".join(bad) or f"{len(slices)} slices"
        raise ValueError(f"a box must be three slices within the stored array, got {found}; crop it to the array first")
    return (*slices, *(slice(0, n) for n in shape[3:]))


def _aligned(array: np.ndarray) -> np.ndarray:
    """A native, C-ordered and aligned copy."""
    out = aligned_empty(array.shape, array.dtype.newbyteorder("="))
    np.copyto(out, array)
    return out


def _automatic(file_system: str, needed_bytes: int, free_bytes: int, patches: bool) -> Tuple[str, str]:
    """(mode, why) where nothing is asked for."""
    kind = file_system or "an unknown file system"
    if file_system in NETWORK or file_system.startswith(("nfs", "smb", "fuse")):
        return "pread", f"{kind} can fail while it is read"
    if patches and needed_bytes <= free_bytes // 4 and file_system not in MEMORY:
        return "ram", "patches of files that fit a quarter of the free memory"
    return "mmap", f"{kind} is {'memory already' if file_system in MEMORY else 'local'}"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
