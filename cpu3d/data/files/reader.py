"""Reading the arrays of a store's cases, whole or a box of them: mapped, or with pread.

mmap   Pages of the file are the array: no copy, and only touched pages are read. A file that is cut
       while it is mapped ends the process (SIGBUS), and so does a network that fails.
pread  Reads into memory: one copy more, but every failure is an error that names the file. Boxes
       are always read so.

A file's length is compared with its record before it is mapped, because a map past the end of its
file ends the process. Stores replace files and never change them in place."""

import contextlib
import hashlib
import math
import mmap
import os
from pathlib import Path
from typing import Any, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import psutil

from cpu3d.data.files.arrays import aligned_empty, bring_in, decode_b2nd, file_sha256, npy_header
from cpu3d.data.manifest import RESTORE, CaseRecord, array_path
from cpu3d.data.region import Array
from cpu3d.errors import InputError
from memory_estimator.common.files import NotRegularError, open_regular

Slices = Tuple[slice, slice, slice]

# Types of file systems whose reads can fail for reasons outside this host; so are nfs*, smb* and
# fuse*.
NETWORK = (
    "9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "orangefs", "panfs",
    "wekafs",
)  # fmt: skip


def choose_read_mode(file_system: str) -> str:
    """Choose the mode for a file system of this type: pread from a network, because a failing map
    ends the process."""
    if file_system in NETWORK or file_system.startswith(("nfs", "smb", "fuse")):
        return "pread"
    return "mmap"


def file_system(folder: Path) -> str:
    """Return the type of the file system of `folder`, such as "ext4" or "nfs4"; "" if it is not
    known."""
    path = os.path.realpath(folder)
    kind = ""
    longest = 0
    with contextlib.suppress(OSError):
        for mount in psutil.disk_partitions(all=True):
            point = mount.mountpoint
            is_above = path == point or path.startswith(point.rstrip("/") + "/")
            if is_above and len(point) >= longest:  # a later one on the same point hides an earlier
                kind = mount.fstype
                longest = len(point)
    return kind


class Reader:
    """Reads the arrays of a store's cases by "mmap" or "pread". Threads may share a reader; a
    process makes its own.

    Reading raises InputError for a file that is missing, too long or short, of another header or
    damaged, and for a label of a case without one; OSError, with the file's name, if the disk
    fails."""

    def __init__(self, folder: Path, mode: str = "mmap"):
        self.folder = folder
        self.mode = mode

    def array(self, record: CaseRecord, kind: str, slices: Optional[Slices] = None) -> Array:
        """Read the stored image `(X, Y, Z, C)`, `kind` "x", label `(X, Y, Z)` uint8, "y", or
        source's label, "t", or a box; C order, aligned.

        A whole .npy file in mode "mmap" is the read-only map itself: its voxels are read when they
        are touched. For a box of one only the box's rows are read."""
        with self._open(record, kind) as file:
            box = None
            if slices:
                box = (*slices, *(slice(0, n) for n in file.shape[3:]))
            if record.format == "b2nd":
                return file.unpack(box)
            if box:
                return file.read_box(box)
            return file.map() if self.mode == "mmap" else file.read()

    def problems(self, record: CaseRecord, contents: bool = False) -> List[str]:
        """Name each of a case's files that is missing, changed or of another length or header;
        with `contents` also of other bytes."""
        problems: List[str] = []
        for kind in record.kinds:
            try:
                with self._open(record, kind) as file:
                    if contents and file_sha256(file.path) != file.sha256:
                        raise file.damaged("other bytes than were written")
            except InputError as error:
                problems += error.problems
        return problems

    @contextlib.contextmanager
    def _open(self, record: CaseRecord, kind: str) -> Iterator["_ArrayFile"]:
        """A case's file, open, after every check that needs no voxels."""
        if kind != "x" and not record.has_label:
            rule = f"case {record.case_id} must have a label"
            raise InputError(f"{rule}, got none in the store; choose a labelled case")
        path = array_path(self.folder, record, kind)
        try:
            handle = open_regular(path)
        except FileNotFoundError:
            raise InputError(f"store file {path} must exist, found none; {RESTORE}") from None
        except NotRegularError as error:
            rule = f"store file {path} must be a file"
            raise InputError(f"{rule}, got {error.strerror}; {RESTORE}") from None
        try:
            file = _ArrayFile(record, kind, path, handle)
            size_bytes = os.fstat(handle).st_size
            if size_bytes != file.size_bytes:
                rule = f"store file {path} must be {file.size_bytes} bytes long, got {size_bytes}"
                raise InputError(f"{rule}; {RESTORE}")
            file.check_header()
            yield file
        except OSError as error:  # an operation on a handle does not know the file's name
            error.filename = error.filename or str(path)
            raise
        finally:
            os.close(handle)


class _ArrayFile:
    """The open file of a case's array, with the facts in its record."""

    def __init__(self, record: CaseRecord, kind: str, path: Path, handle: int):
        self.path = path
        self.handle = handle
        self.shape: Tuple[int, ...] = record.stored.size
        self.dtype: np.dtype[Any] = np.dtype("u1")
        if kind == "x":
            self.shape += (record.channels,)
            self.dtype = np.dtype("<i2")
        elif kind == "t" and record.resampled_from:
            self.shape = record.resampled_from.shape
        written = record.files[kind]
        self.size_bytes = written.size_bytes
        self.sha256 = written.sha256
        self.header = npy_header(self.dtype, self.shape) if record.format == "npy" else b""

    def check_header(self) -> None:
        """Refuse a .npy file of another array: its voxels would be wrong, or read past its end."""
        start = np.empty(min(len(self.header), self.size_bytes), np.uint8)
        self._fill(start, 0)
        size_bytes = len(self.header) + math.prod(self.shape) * self.dtype.itemsize
        if self.header and (start.tobytes(), self.size_bytes) != (self.header, size_bytes):
            raise self.damaged("another header")

    def map(self) -> Array:
        """Map the array of a .npy file read-only; the map is closed with the last of its views."""
        pages = mmap.mmap(self.handle, self.size_bytes, access=mmap.ACCESS_READ)
        return np.frombuffer(pages, self.dtype, offset=len(self.header)).reshape(self.shape)

    def read(self) -> Array:
        """Read the array of a .npy file, aligned."""
        array = aligned_empty(self.shape, self.dtype)
        self._fill(array, len(self.header))
        return array

    def read_box(self, slices: Sequence[slice]) -> Array:
        """Read a box of a .npy file, aligned, a plane of X at a time: a map would take longer, for
        its page faults."""
        x, y, z = slices[:3]
        out = aligned_empty([cut.stop - cut.start for cut in slices], self.dtype)
        rows = np.empty((out.shape[1], *self.shape[2:]), self.dtype)  # of a plane
        voxel_bytes = self.dtype.itemsize * math.prod(self.shape[3:])
        row_bytes = self.shape[2] * voxel_bytes
        plane_bytes = self.shape[1] * row_bytes
        corner = len(self.header) + y.start * row_bytes + z.start * voxel_bytes
        starts = range(corner + x.start * plane_bytes, corner + x.stop * plane_bytes, plane_bytes)
        # From the box's first voxel of a plane to its last.
        length = (y.stop - y.start - 1) * row_bytes + (z.stop - z.start) * voxel_bytes
        for start in starts:  # else a 96^3 patch of a CT takes 5 times as long
            bring_in(self.handle, start, length)
        for plane, start in zip(out, starts):
            self._fill(rows, start, length)
            plane[...] = rows[:, : out.shape[2]]
        return out

    def unpack(self, slices: Optional[Sequence[slice]] = None) -> Array:
        """Unpack a .b2nd file's array, or a box of it, aligned. Its bytes are compared with their
        hash: a flipped bit gives wrong voxels more often than an error."""
        content = np.empty(self.size_bytes, np.uint8)
        self._fill(content, 0)
        if hashlib.sha256(content.data).hexdigest() != self.sha256:
            raise self.damaged("other bytes than were written")
        try:
            return decode_b2nd(content.tobytes(), slices, (self.shape, self.dtype))
        except ValueError as error:
            raise self.damaged(error) from None

    def _fill(self, array: Array, offset: int, length: Optional[int] = None) -> None:
        """Fill an array, or its first `length` bytes, from `offset` of the file on."""
        into = array.reshape(-1).view(np.uint8).data[:length]
        done = 0
        # One call reads 2 GiB at most, and a network may give less than was asked for.
        while done < len(into):
            count = os.preadv(self.handle, [into[done:]], offset + done)
            if count == 0:
                rule = f"store file {self.path} must be {self.size_bytes} bytes long"
                got = f"its end at byte {offset + done} while it was read"
                raise InputError(f"{rule}, got {got}; {RESTORE}")
            done += count

    def damaged(self, got: Any) -> InputError:
        """The error of a file that does not hold the array of its record."""
        rule = f"a {self.path.suffix} array of {self.dtype} {self.shape}"
        return InputError(f"store file {self.path} must be {rule}, got {got}; {RESTORE}")
