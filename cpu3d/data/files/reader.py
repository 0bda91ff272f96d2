"""The arrays of a store's cases, whole or a box of them, read as they lie: mapped, with pread, or unpacked.

A file's length is compared with its record before a byte of it is used, because a map that reaches past the end of its
file ends the process when it is touched (SIGBUS). So does a file that is cut while it is mapped, and nothing in Python
can catch that; mode "pread" turns it into an error, and `faulthandler` tells at least where it happened.
Stores are written so that it cannot happen by themselves: a new file takes the old one's place, never its content.
"""

import contextlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Set, Tuple, Union

import numpy as np

from cpu3d.data.files import page_cache
from cpu3d.data.files.array_file import ArrayFile, array_file
from cpu3d.data.files.arrays import ALIGNMENT_BYTES, aligned_empty
from cpu3d.data.files.page_plan import PagePlans
from cpu3d.data.records import CaseRecord, array_path
from cpu3d.errors import InputError
from memory_estimator.files import NotRegularError, open_regular

Slices = Tuple[slice, slice, slice]


@dataclass(frozen=True)
class Reads:
    """What a reader has done so far."""

    arrays: int
    """Arrays given out, boxes included."""
    zero_copy: int
    """Of them, maps: their voxels are the kernel's own pages."""
    bytes_read: int
    """Bytes of files that were read for them, to compare hashes too; of a map, those it gave out."""

    @property
    def zero_copy_ratio(self) -> float:
        """Of the arrays given out, the part that was not copied; 0 before the first."""
        return self.zero_copy / self.arrays if self.arrays else 0.0


class Reader:
    """Reads the arrays of a store's cases. Threads may share one; each process makes its own.

    mode: "mmap", "pread" or "ram" (see `read_mode`). Files in format "b2nd" are read and unpacked in every mode.
    """

    def __init__(self, folder: Union[str, Path], mode: str = "mmap"):
        if mode not in ("mmap", "pread", "ram"):
            raise ValueError(f"mode must be mmap, pread or ram, got {mode!r}")
        self.folder, self.mode = Path(folder), mode
        self.plans = PagePlans()
        """Of those who bring its files into memory and give them back."""
        self._seen: Dict[str, Tuple[int, int, int]] = {}
        self._held: Dict[str, np.ndarray] = {}
        self._whole: Set[str] = set()
        self._arrays = self._zero_copy = self._bytes_read = 0
        self._lock = threading.Lock()

    @property
    def reads(self) -> Reads:
        with self._lock:
            return Reads(self._arrays, self._zero_copy, self._bytes_read)

    def array(self, record: CaseRecord, part: str) -> np.ndarray:
        """The whole stored image `(X, Y, Z, C)`, `part` "x", or label `(X, Y, Z)` uint8, "y". C order, aligned.

        A .npy file in mode "mmap" or "ram" is the read-only map itself: its voxels are read when they are touched.
        Raises InputError for a file that is missing, too long or short, changed since it was first opened or damaged,
        and for a label of a case without one; OSError, with the file's name, where the disk fails.
        """
        with self._open(record, part) as file:
            if record.format == "b2nd":
                array = file.unpack(check=self._is_new(file))
                self._whole.add(str(file.path))
                return self._count(array, file.size_bytes)
            if self.mode != "pread":
                array = file.view(self._content(file))
                usable = array.ctypes.data % ALIGNMENT_BYTES == 0 and array.dtype.isnative
                return self._count(array if usable else _aligned(array), array.nbytes, zero_copy=usable)
            array = file.read()
            return self._count(array, array.nbytes)

    def box(self, record: CaseRecord, part: str, slices: Slices) -> np.ndarray:
        """A box of the stored array as a copy, C order, aligned; of the file little more than its bytes are read.

        `slices`: three of a start and a stop, within the stored array; an empty one gives an empty array. Modes "mmap"
        and "pread" both read a .npy file's box: a map that is made for one patch costs more page faults than it saves
        copies, and one that stays holds the file in memory.
        Of a file in format "b2nd" the box's chunks are read, and at a reader's first use of it all of the file once
        more, to compare its hash: of a packed CT of 33 MB, 18 ms. Raises ValueError for slices that reach beyond the
        array, else as `array`.
        """
        with self._open(record, part) as file:
            slices = _within(file.shape, slices)
            shape = tuple(one.stop - one.start for one in slices)
            if min(shape) == 0:
                return self._count(aligned_empty(shape, file.dtype), 0)
            if record.format == "b2nd":
                checked = file.check_content() if self._is_new(file) else 0
                self._whole.add(str(file.path))
                array, size_bytes = file.unpack_box(slices)
                return self._count(array, checked + size_bytes)
            if self.mode == "ram":
                array = _aligned(file.view(self._hold(file))[slices])
                return self._count(array, array.nbytes)
            return self._count(*file.read_box(slices))

    def load(self, record: CaseRecord) -> None:
        """Mode "ram": have a case's files in memory, as their first use would. Raises as `array`."""
        for part in parts_of(record):
            with self._open(record, part) as file:
                self._hold(file)

    def advise(self, record: CaseRecord, slices: Optional[Slices] = None) -> None:
        """Have a case's files, or a box of each, on their way into memory before they are read; returns at once.

        Mode "ram" does as `load`. A .b2nd file comes whole. Raises as `box`.
        """
        if self.mode == "ram":
            return self.load(record)
        for part in parts_of(record):
            with self._open(record, part) as file:
                box = None if slices is None else _within(file.shape, slices)
                if box is None or record.format == "b2nd":
                    page_cache.bring_in(file.handle, 0, file.size_bytes)
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
            self._check(file)
            yield file
        finally:
            os.close(handle)

    def _check(self, file: ArrayFile) -> None:
        status = os.fstat(file.handle)
        if status.st_size != file.size_bytes:
            raise InputError(
                f"store file {file.path} must be {file.size_bytes} bytes long, got {status.st_size};"
                " delete it and run `prepare` again"
            )
        # Everybody who opens a file later compares with what the first of them saw; checking it twice does no harm.
        now = (status.st_ino, status.st_size, status.st_mtime_ns)
        name = str(file.path)
        first = self._seen.get(name)
        if first is None:
            file.check_header()
            self._seen[name] = now
        elif now != first:
            raise InputError(
                f"store file {file.path} must stay as it was while it is read, got a changed one; start this run again"
            )

    def _is_new(self, file: ArrayFile) -> bool:
        """Whether a packed file's bytes are yet to be compared with its hash. After that it stays as it was."""
        return str(file.path) not in self._whole

    def _content(self, file: ArrayFile) -> np.ndarray:
        return self._hold(file) if self.mode == "ram" else file.content()

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
            self._arrays += 1
            self._zero_copy += zero_copy
            self._bytes_read += bytes_read
        return array


def parts_of(record: CaseRecord) -> Tuple[str, ...]:
    """The arrays that a case has."""
    return ("x", "y") if record.has_label else ("x",)


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
