"""One array's file, open: its voxels mapped, read or unpacked, whole or a box of them."""

import contextlib
import functools
import hashlib
import itertools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator, Sequence, Tuple, Union

import numpy as np

from cpu3d.data.files import page_cache
from cpu3d.data.files.arrays import aligned_empty, decode_b2nd, npy_header, open_b2nd, unpack
from cpu3d.data.files.byte_runs import GAP_BYTES, byte_runs
from cpu3d.data.files.file_map import map_file
from cpu3d.data.records import CaseRecord
from cpu3d.errors import InputError


@dataclass(frozen=True)
class ArrayFile:
    """An open file and what its case's record says of it."""

    path: Path
    handle: int
    size_bytes: int
    offset: int
    """Where a .npy file's voxels begin; 0 in a .b2nd file."""
    shape: Tuple[int, ...]
    dtype: np.dtype
    sha256: str

    def check_header(self) -> None:
        """Raise InputError for a .npy file of another array: it would be read as nonsense, or past its end."""
        if not self.offset:
            return
        voxels_bytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        found = np.empty(min(self.offset, self.size_bytes), np.uint8)
        self._fill(found, 0)
        if found.tobytes() != _header(self.dtype, self.shape) or self.size_bytes != self.offset + voxels_bytes:
            raise self._damaged("another header")

    def check_content(self) -> int:
        """Raise InputError for a file of other bytes than were written; returns how many were read for it, all.

        For .b2nd files: one flipped bit makes wrong voxels more often than an error, or ends the process.
        """
        digest = hashlib.sha256()
        piece = np.empty(min(self.size_bytes, 1 << 20), np.uint8)
        for start in range(0, self.size_bytes, len(piece)):
            part = piece[: self.size_bytes - start]
            self._fill(part, start)
            digest.update(part)
        self._as_written(digest)
        return self.size_bytes

    def content(self, *, populate: bool = False) -> np.ndarray:
        """The file's bytes as a map, read from front to back at once if `populate`."""
        with self._named():
            return map_file(self.handle, self.size_bytes, populate=populate)

    def view(self, content: np.ndarray) -> np.ndarray:
        """The array in a .npy file's `content`."""
        return content[self.offset :].view(self.dtype).reshape(self.shape)

    def ask_for(self, slices: Sequence[slice]) -> None:
        """Have the kernel begin to read what is missing of a box of a .npy file, all of it at once. Raises OSError.

        Reads that wait one after another take longer: of a 96^3 patch of a CT, 5 times as long.
        """
        for start, length in byte_runs(self.shape, self.dtype.itemsize, slices, self.offset):
            page_cache.bring_in(self.handle, start, length)

    def read(self) -> np.ndarray:
        """The whole array of a .npy file, aligned."""
        array = aligned_empty(self.shape, self.dtype)
        self._fill(array, self.offset)
        return array

    def read_box(self, slices: Sequence[slice]) -> Tuple[np.ndarray, int]:
        """(box, bytes read) of a .npy file, in as few reads as have no gap of `GAP_BYTES` within a plane of X.

        Not through a map: one made for a box costs a page fault for every few pages of it, more than to copy the gaps.
        """
        (x, y, z), shape = slices[:3], self.shape
        out = aligned_empty([one.stop - one.start for one in slices], self.dtype)
        rows, voxels = out.shape[1:3]
        voxel_bytes = self.dtype.itemsize * math.prod(shape[3:])
        row_bytes = shape[2] * voxel_bytes
        plane_bytes = shape[1] * row_bytes
        corner = self.offset + x.start * plane_bytes + y.start * row_bytes + z.start * voxel_bytes
        planes = range(corner, corner + len(out) * plane_bytes, plane_bytes)
        fill = self._filler(slices)

        if out.shape[1:3] == shape[1:3]:
            return out, fill(_bytes(out), corner)
        if voxels == shape[2]:
            return out, sum(fill(_bytes(plane), place) for plane, place in zip(out, planes))
        if row_bytes - voxels * voxel_bytes >= GAP_BYTES:
            lines = ((line, place + j * row_bytes) for plane, place in zip(out, planes) for j, line in enumerate(plane))
            return out, sum(fill(_bytes(line), place) for line, place in lines)
        buffer = np.empty((rows, *shape[2:]), self.dtype)
        span, part = _bytes(buffer)[: (rows - 1) * row_bytes + voxels * voxel_bytes], buffer[:, :voxels]
        for plane, place in zip(out, planes):
            fill(span, place)
            plane[...] = part
        return out, len(out) * len(span)

    def unpack(self, *, check: bool) -> np.ndarray:
        """The whole array of a .b2nd file, aligned, its bytes compared with those written if `check`."""
        content = np.empty(self.size_bytes, np.uint8)
        self._fill(content, 0)
        if check:
            self._as_written(hashlib.sha256(content))
        try:
            return self._as_recorded(decode_b2nd(memoryview(content)))
        except ValueError as error:
            raise self._damaged(error) from None

    def unpack_box(self, slices: Sequence[slice]) -> Tuple[np.ndarray, int]:
        """(box, bytes of the chunks that it lies in) of a .b2nd file."""
        try:
            # The open file, and not whatever the path leads to by now.
            packed = self._as_recorded(open_b2nd(f"/dev/fd/{self.handle}"))
            return unpack(packed, tuple(slices)), _chunk_bytes(packed, slices)
        except (RuntimeError, ValueError) as error:
            raise self._damaged(error) from None

    # --- Private helpers ---

    def _filler(self, slices: Sequence[slice]) -> Callable[[memoryview, int], int]:
        """A function that does as `_fill`, and at the first byte that is not in memory asks for the whole box.

        To find out costs nothing where all is there; looking at a box's pages takes as long as copying them.
        """
        flags = getattr(os, "RWF_NOWAIT", 0)  # Linux: what is in memory, or an error; no waiting for a disk
        asked = False

        def fill(into: memoryview, place: int) -> int:
            nonlocal asked
            if not asked:
                with contextlib.suppress(OSError):
                    if flags and os.preadv(self.handle, [into], place, flags) == len(into):
                        return len(into)
                asked = True
                with contextlib.suppress(OSError):  # advice; what fails for good fails below
                    self.ask_for(slices)
            return self._fill(into, place)

        return fill

    def _fill(self, into: Union[np.ndarray, memoryview], offset: int) -> int:
        """Fill a C-ordered array from `offset` of the file on; returns its length in bytes."""
        view = _bytes(into) if isinstance(into, np.ndarray) else into
        done = 0
        with self._named():
            while done < len(view):  # one call reads 2 GiB at most, and a network may give less than was asked for
                count = os.preadv(self.handle, [view[done:]], offset + done)
                if count == 0:
                    raise InputError(
                        f"store file {self.path} must be {self.size_bytes} bytes long, it ended at byte"
                        f" {offset + done} while it was read; restore it, or delete it and run `prepare` again"
                    )
                done += count
        return done

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Put the file's name into an error of the system that knows only its handle."""
        try:
            yield
        except OSError as error:
            error.filename = error.filename or str(self.path)
            raise

    def _as_written(self, digest) -> None:
        if digest.hexdigest() != self.sha256:
            raise self._damaged("other bytes than were written")

    def _as_recorded(self, array):
        if tuple(array.shape) != self.shape or array.dtype != self.dtype:
            raise self._damaged(f"{array.dtype} {tuple(array.shape)}")
        return array

    def _damaged(self, got) -> InputError:
        return InputError(
            f"store file {self.path} must be a {self.path.suffix} array of {self.dtype} {self.shape}, got {got};"
            " delete it and run `prepare` again"
        )


def array_file(record: CaseRecord, part: str, path: Path, handle: int) -> ArrayFile:
    """The open file of a case's image, `part` "x", or label, "y"."""
    shape, dtype = tuple(record.stored.size), np.dtype("u1")
    size_bytes, sha256 = record.label_bytes, record.label_sha256
    if part == "x":
        shape, dtype = (*shape, record.channels), np.dtype(record.image_dtype).newbyteorder("<")
        size_bytes, sha256 = record.image_bytes, record.image_sha256
    offset = len(_header(dtype, shape)) if record.format == "npy" else 0
    return ArrayFile(path, handle, size_bytes, offset, shape, dtype, sha256)


def _bytes(array: np.ndarray) -> memoryview:
    """The memory of a C-ordered array."""
    return memoryview(array.reshape(-1).view(np.uint8))


@functools.lru_cache(256)
def _header(dtype: np.dtype, shape: Tuple[int, ...]) -> bytes:
    return npy_header(dtype, shape)


def _chunk_bytes(packed, slices: Sequence[slice]) -> int:
    """Packed size of the chunks that hold a box."""
    spans = [range(s.start // n, (s.stop - 1) // n + 1) for s, n in zip(slices, packed.chunks)]
    counts = [-(-n // chunk) for n, chunk in zip(packed.shape, packed.chunks)]
    total = 0
    for place in itertools.product(*spans):
        header = packed.schunk.get_lazychunk(int(np.ravel_multi_index(place, counts)))
        total += int.from_bytes(header[12:16], "little")  # cbytes, of the chunk header in C-Blosc2's format
    return total
