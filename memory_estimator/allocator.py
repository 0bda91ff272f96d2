"""TensorFlow's best-fit allocator on paper: what it counts and what becomes resident for a sequence of requests.

With oneDNN on, TensorFlow's CPU allocator hands requests of 256 KiB and more to a best-fit-with-coalescing allocator
(tsl/framework/bfc_allocator.cc), the same as on GPUs, and smaller ones to malloc. It grows by regions of 2 MiB, 4 MiB
and so on, gives nothing back to the system, and hands out a free chunk whole unless it is at least twice as large as
asked for or has 128 MiB to spare. So what it counts exceeds what was asked for, by an amount that depends on the order
of all requests since the process began; this module plays them through.
"""

import bisect
import itertools
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Set, Tuple

from memory_estimator.liveness import GRANULE_BYTES, Request, requests
from memory_estimator.program import Program

SMALL_BYTES = 256 * 1024
"""Requests below this go to malloc and are not counted (mkl_cpu_allocator.h)."""

FIRST_REGION_BYTES = 2 * 2**20

SPARE_BYTES = 128 * 2**20
"""A chunk with this much to spare is always split."""

HANDLE_BYTES = 8
"""A region's table has an entry of this size for every GRANULE_BYTES of it: 3 % of all regions, with malloc."""

BINS = 21
"""Bin b holds free chunks of 256 * 2**b bytes up to twice that; the last one all larger ones."""


@dataclass(frozen=True)
class Use:
    """What a program makes of the allocator."""

    peak_bytes: int
    """Most chunks handed out at once from the third step on: `get_memory_info("CPU:0")["peak"]`."""
    resident_bytes: int
    """Memory that a tensor has lain in once, and that the process therefore keeps."""
    small_bytes: int
    """Resident tensors too small for it: they lie with malloc."""
    reserved_bytes: int
    """All regions together: address space, of which `resident_bytes` are touched."""
    validated_bytes: int = 0
    """`resident_bytes` once a validation and a step have followed: no less, as nothing is given back to the system."""


class NoRegionError(MemoryError):
    """The regions that are left under the limit hold no chunk of the size asked for; TensorFlow ends with
    ResourceExhaustedError then."""


def use(program: Program) -> Use:
    """Play a program from the process's start through three steps, of which the third is like all that follow, and
    through what comes between two of them, with the next one."""
    allocator = Allocator()
    third, end = (sum(1 for _ in requests(program, steps)) for steps in (2, 3))
    calls = requests(program, 3, after=True)
    for index, request in enumerate(itertools.islice(calls, end)):
        if index == third:
            allocator.forget_peak()
        allocator.call(request)
    peak, resident = allocator.peak_bytes, allocator.resident_bytes
    for request in calls:
        allocator.call(request)
    small = sum(tensor.bytes for tensor in program.resident if tensor.bytes < SMALL_BYTES)
    return Use(peak, resident, small, allocator.reserved_bytes, allocator.resident_bytes if program.after else resident)


def fits_regions(program: Program, limit_bytes: int) -> bool:
    """Whether three steps get through with regions of at most `limit_bytes` together.

    With oneDNN on, the limit is the machine's memory (mkl_cpu_allocator.h): the last region is cut down to what is
    left, and a tensor never lies in two regions. So a job may fail whose tensors would fit one beside the other.
    """
    allocator = Allocator(limit_bytes)
    try:
        for request in requests(program, 3, after=True):
            allocator.call(request)
    except NoRegionError:
        return False
    return True


def counted_by_op(program: Program) -> Tuple[int, ...]:
    """The most that the allocator counts while each operation of the third step runs: a step's memory over time."""
    allocator = Allocator()
    third = sum(1 for _ in requests(program, 2))
    calls: Dict[str, List[Request]] = {}
    for index, request in enumerate(requests(program, 3)):
        if index < third:
            allocator.call(request)
        else:
            calls.setdefault(request.op, []).append(request)
    found: List[int] = []
    for op in program.ops:
        allocator.forget_peak()
        for request in calls.get(op.name, ()):
            allocator.call(request)
        found.append(allocator.peak_bytes)
    return tuple(found)


class Allocator:
    """Takes and gives back by name; knows what is in use now and was at most since the last `forget_peak`."""

    def __init__(self, limit_bytes: Optional[int] = None):
        """`limit_bytes` is the most that all regions may take together; None is without end."""
        self._limit_bytes = limit_bytes
        self._regions: List[_Region] = []
        self._touched: Set[Tuple[int, int]] = set()
        self._bins: List[List[Tuple[int, int]]] = [[] for _ in range(BINS)]
        self._chunks: Dict[int, _Chunk] = {}
        self._by_name: Dict[str, Optional[_Chunk]] = {}
        self._next_region_bytes = FIRST_REGION_BYTES
        self.counted_bytes = 0
        self.peak_bytes = 0

    def take(self, name: str, size_bytes: int, touched: Sequence[Tuple[int, int]] = ()) -> None:
        """Allocate; `touched` is where bytes will be written, () everywhere. Below SMALL_BYTES it is somebody else's.

        Raises NoRegionError where the limit leaves no region large enough.
        """
        if size_bytes < SMALL_BYTES:
            self._by_name[name] = None
            return
        size = -(-size_bytes // GRANULE_BYTES) * GRANULE_BYTES
        chunk = self._find(size) or self._extend_and_find(size)
        for first, last in touched or ((0, size),):
            self._touched.add((chunk.start + first, chunk.start + last))
        self._by_name[name] = chunk
        self.counted_bytes += chunk.size
        self.peak_bytes = max(self.peak_bytes, self.counted_bytes)

    def give_back(self, name: str) -> None:
        """Free. Raises KeyError for a name that holds nothing."""
        chunk = self._by_name.pop(name)
        if chunk is None:
            return
        self.counted_bytes -= chunk.size
        chunk.free = True
        for neighbour in (chunk.after, chunk.before):
            if neighbour is not None and neighbour.free:
                self._remove_free(neighbour)
                first, second = (chunk, neighbour) if neighbour is chunk.after else (neighbour, chunk)
                chunk = self._merge(first, second)
        self._add_free(chunk)

    def call(self, request: Request) -> None:
        """Take or give back, as the request's sign says."""
        if request.bytes >= 0:
            self.take(request.name, request.bytes, request.touched)
        else:
            self.give_back(request.name)

    def forget_peak(self) -> None:
        """Count the peak anew from what is in use now, as `reset_memory_stats` does."""
        self.peak_bytes = self.counted_bytes

    @property
    def resident_bytes(self) -> int:
        """Memory touched so far: wherever a tensor has lain, each byte once, and the regions' tables of chunks.

        A chunk's spare end stays untouched. The tables are filled when a region is made.
        """
        total, end = self.reserved_bytes * HANDLE_BYTES // GRANULE_BYTES, 0
        for first, last in sorted(self._touched):
            total += max(0, last - max(first, end))
            end = max(end, last)
        return total

    @property
    def reserved_bytes(self) -> int:
        """All regions together."""
        return sum(region.size for region in self._regions)

    # --- Private helpers ---

    def _find(self, size: int) -> "Optional[_Chunk]":
        """The smallest free chunk that is large enough; of equals the one at the lowest address."""
        for free in self._bins[_bin(size) :]:
            index = bisect.bisect_left(free, (size, -1))
            if index < len(free):
                chunk = self._chunks[free[index][1]]
                self._remove_free(chunk)
                if chunk.size >= 2 * size or chunk.size - size >= SPARE_BYTES:
                    self._add_free(self._split(chunk, size))
                chunk.free = False
                return chunk
        return None

    def _extend_and_find(self, size: int) -> "_Chunk":
        doubled = False
        while size > self._next_region_bytes:
            self._next_region_bytes *= 2
            doubled = True
        region_bytes = self._next_region_bytes
        if self._limit_bytes is not None:
            left = self._limit_bytes - self.reserved_bytes
            region_bytes = min(region_bytes, left // GRANULE_BYTES * GRANULE_BYTES)
        if size > region_bytes:
            raise NoRegionError(f"regions must leave {size} bytes under the limit, got {region_bytes}")
        # The system hands out mappings downwards: a later region lies below an earlier one.
        start = (self._regions[-1].start if self._regions else 2**62) - region_bytes
        region = _Region(start, region_bytes)
        self._regions.append(region)
        if not doubled:
            self._next_region_bytes *= 2
        chunk = _Chunk(region, start, region.size)
        self._chunks[start] = chunk
        self._add_free(chunk)
        found = self._find(size)
        assert found is not None
        return found

    def _split(self, chunk: "_Chunk", size: int) -> "_Chunk":
        """Cut `chunk` down to `size`; returns the rest."""
        rest = _Chunk(chunk.region, chunk.start + size, chunk.size - size, before=chunk, after=chunk.after)
        if chunk.after is not None:
            chunk.after.before = rest
        chunk.after, chunk.size = rest, size
        self._chunks[rest.start] = rest
        return rest

    def _merge(self, first: "_Chunk", second: "_Chunk") -> "_Chunk":
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        first.free = True
        del self._chunks[second.start]
        return first

    def _add_free(self, chunk: "_Chunk") -> None:
        chunk.free = True
        bisect.insort(self._bins[_bin(chunk.size)], (chunk.size, chunk.start))

    def _remove_free(self, chunk: "_Chunk") -> None:
        free = self._bins[_bin(chunk.size)]
        del free[bisect.bisect_left(free, (chunk.size, chunk.start))]


class _Region:
    def __init__(self, start: int, size: int):
        self.start = start
        self.size = size


class _Chunk:
    def __init__(self, region, start, size, before=None, after=None):
        self.region, self.start, self.size = region, start, size
        self.before, self.after = before, after
        self.free = True


def _bin(size: int) -> int:
    return min(BINS - 1, (size // GRANULE_BYTES).bit_length() - 1)
