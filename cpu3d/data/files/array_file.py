"""One array's file, open: its voxels mapped, read or unpacked, whole or a box of them."""

import contextlib
import functools
import hashlib
import itertools
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Sequence, Tuple

import numpy as np

from cpu3d.data.files import page_cache
from cpu3d.data.files.arrays import aligned_empty, decode_b2nd, npy_header, unpack
from cpu3d.data.files.byte_runs import GAP_BYTES, byte_runs
from cpu3d.data.files.file_map import map_file
from cpu3d.data.records import CaseRecord
from cpu3d.errors import InputError

PAGE = mmap.PAGESIZE


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

    def check_content(self) -> None:
        """Raise InputError for a file of other bytes than were written.

        For .b2nd files: one flipped bit makes wrong voxels more often than an error, or ends the process.
        """
        digest = hashlib.sha256()
        piece = np.empty(min(self.size_bytes, 1 << 20), np.uint8)
        for start in range(0, self.size_bytes, len(piece)):
            part = piece[: self.size_bytes - start]
            self._fill(part, start)
            digest.update(part)
        if digest.hexdigest() != self.sha256:
            raise self._damaged("other bytes than were written")

    def content(self, *, populate: bool = False) -> np.ndarray:
        """The file's bytes as a map, read from front to back at once if `populate`."""
        with self._named():
            return map_file(self.handle, self.size_bytes, populate=populate)

    def view(self, content: np.ndarray) -> np.ndarray:
        """The array in a .npy file's `content`."""
        return content[self.offset :].view(self.dtype).reshape(self.shape)

    def ask_for(self, slices: Sequence[slice]) -> None:
        """Have the kernel begin to read what is missing of a box of a .npy file, all of it at once. Raises OSError.

        A cold map that is touched without this reads piece after piece, and around each: of a 96^3 patch of a CT, 5
        times as long and 7 times the bytes.
        """
        content = self.content()
        strides = self.view(content).strides
        corner = self.offset + sum(one.start * stride for one, stride in zip(slices, strides))
        planes, rows = (one.stop - one.start - 1 for one in slices[:2])
        places = [corner + i * strides[0] + j * strides[1] for i in (0, planes // 2, planes) for j in (0, rows)]

        def there(start: int, stop: int) -> bool:
            return bool(page_cache.resident(content[start // PAGE * PAGE : stop]).all())

        known = page_cache.tells(self.handle)
        if known and all(there(place, place + 1) for place in places):
            return  # to look at every page of a box takes longer than to copy it
        for start, length in byte_runs(self.shape, self.dtype.itemsize, slices, self.offset):
            if not (known and there(start, start + length)):
                page_cache.bring_in(self.handle, start, length)

    def read(self) -> np.ndarray:
        """The whole array of a .npy file, aligned."""
        array = aligned_empty(self.shape, self.dtype)
        self._fill(array, self.offset)
        return array

    def read_box(self, slices: Sequence[slice]) -> Tuple[np.ndarray, int]:
        """(box, bytes read) of a .npy file, in as few reads as have no gap of `GAP_BYTES` within a plane of X."""
        (x, y, z), shape = slices[:3], self.shape
        out = aligned_empty([one.stop - one.start for one in slices], self.dtype)
        rows, voxels = out.shape[1:3]
        voxel_bytes = self.dtype.itemsize * int(np.prod(shape[3:], dtype=np.int64))
        row_bytes = shape[2] * voxel_bytes

        def place(i: int, j: int) -> int:
            return self.offset + (i * shape[1] + j) * row_bytes + z.start * voxel_bytes

        if out.shape[1:3] == shape[1:3]:
            return out, self._fill(out, place(x.start, 0))
        if voxels == shape[2]:
            return out, sum(self._fill(plane, place(i, y.start)) for i, plane in enumerate(out, x.start))
        if row_bytes - voxels * voxel_bytes >= GAP_BYTES:
            lines = itertools.product(range(len(out)), range(rows))
            return out, sum(self._fill(out[i, j], place(x.start + i, y.start + j)) for i, j in lines)
        plane = np.empty((rows, *shape[2:]), self.dtype)
        span = plane.reshape(-1).view(np.uint8)[: (rows - 1) * row_bytes + voxels * voxel_bytes]
        for i, target in enumerate(out, x.start):
            self._fill(span, place(i, y.start))
            target[...] = plane[:, :voxels]
        return out, len(out) * len(span)

    def unpack(self) -> np.ndarray:
        """The whole array of a .b2nd file, aligned."""
        content = np.empty(self.size_bytes, np.uint8)
        self._fill(content, 0)
        try:
            return self._as_recorded(decode_b2nd(memoryview(content)))
        except ValueError as error:
            raise self._damaged(error) from None

    def unpack_box(self, slices: Sequence[slice]) -> Tuple[np.ndarray, int]:
        """(box, bytes of the chunks that it lies in) of a .b2nd file."""
        import blosc2

        try:
            packed = self._as_recorded(blosc2.open(str(self.path), mode="r"))
            return unpack(packed, tuple(slices)), _chunk_bytes(packed, slices)
        except (RuntimeError, ValueError) as error:
            raise self._damaged(error) from None

    # --- Private helpers ---

    def _fill(self, into: np.ndarray, offset: int) -> int:
        """Fill a C-ordered array from `offset` of the file on; returns its length in bytes."""
        view = memoryview(into.reshape(-1).view(np.uint8))
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
