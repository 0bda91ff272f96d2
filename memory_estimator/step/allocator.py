"""TensorFlow's best-fit allocator, replayed: bytes that it counts and that become resident for a
sequence of requests.

With oneDNN on, TensorFlow hands requests of 256 KiB and more to a best-fit-with-coalescing
allocator (tsl/framework/bfc_allocator.cc), the same as on GPUs, and smaller ones to malloc. It
grows by regions of 2 MiB, 4 MiB and so on, gives nothing back to the system, and hands out a free
chunk whole unless it is at least twice as large as asked for or has 128 MiB to spare: its count
depends on the order of all requests since the process began."""

import bisect
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Set, Tuple

from memory_estimator.step.timeline import GRANULE_BYTES, Program, Turn, rounded, timeline, walk

MIB = 2**20
# requests below this go to malloc and are not counted (mkl_cpu_allocator.h)
SMALL_BYTES = 256 * 1024
SPARE_BYTES = 128 * MIB  # a chunk with this much to spare is always split
# of a region's table for every GRANULE_BYTES of it: 3 % of all regions, with malloc
HANDLE_BYTES = 8


@dataclass(frozen=True)
class Use:
    """A program's use of the allocator."""

    # most chunks handed out at once from the third step on: `get_memory_info("CPU:0")["peak"]`
    peak_bytes: int
    resident_bytes: int  # memory that has held a tensor once, and that the process therefore keeps
    validated_bytes: int  # the same after a validation and one more step, if there is a validation


def use(program: Program) -> Use:
    """Three steps, of which the third is like all later ones, then the ones between two steps, and
    a step more."""
    allocator = Allocator()
    stays = {tensor.name for tensor in program.resident}
    step = walk(program.ops, stays)
    allocator.reserve(region_bytes(program))
    allocator.begin(program)
    for _ in range(2):
        allocator.run(step)
    allocator.peak_bytes = allocator.counted_bytes  # as `reset_memory_stats` does
    allocator.run(step)
    peak = allocator.peak_bytes
    resident = allocator.resident_bytes
    if program.after:
        allocator.run(walk(program.after, stays))
        allocator.run(step)
    return Use(peak, resident, allocator.resident_bytes)


def use_of_run(programs: Sequence[Program]) -> "Allocator":
    """The allocator after a run of steps of one program after those of another, each with its
    validation: it counts what TensorFlow does from the piece on that `train` reserves. What one
    program holds between its steps is given back once the next has its own."""
    allocator = Allocator()
    allocator.reserve(region_bytes(programs[-1]))
    for program in programs:
        aside = allocator.set_aside()
        allocator.begin(program)
        for chunk in aside:
            allocator.give_back_chunk(chunk)
        stays = {tensor.name for tensor in program.resident}
        step = walk(program.ops, stays)
        for turns in (step, step, walk(program.after, stays), step):
            allocator.run(turns)
    return allocator


def region_bytes(program: Program) -> int:
    """Bytes of the region that `cpu3d.host.memory.reserve` requests: the peak of live memory, and
    1/16 for gaps."""
    return timeline(program).peak_bytes * 17 // 16


@dataclass(eq=False)
class Chunk:
    """A piece of a region, between its neighbours there."""

    start: int
    size: int
    before: "Optional[Chunk]" = None
    after: "Optional[Chunk]" = None
    free: bool = True


class Allocator:
    """Takes and gives back by name; counts the bytes in use, now and at most."""

    def __init__(self) -> None:
        self.counted_bytes = 0
        self.peak_bytes = 0  # most chunks handed out at once
        self.reserved_bytes = 0  # all regions together
        self._next_region_bytes = 2 * MIB
        self._lowest = 2**62  # start of the last region. The system hands out mappings downwards.
        self._touched: Set[Tuple[int, int]] = set()
        self._free: List[Tuple[int, int]] = []  # (size, start) of free chunks, sorted
        self._chunks: Dict[int, Chunk] = {}
        self._by_name: Dict[str, Optional[Chunk]] = {}

    def reserve(self, size_bytes: int) -> None:
        """Take a region before all else, as `cpu3d.host.memory.reserve`."""
        self._extend(rounded(size_bytes))

    def begin(self, program: Program) -> None:
        """Take what is there before the first step of a program."""
        made = {tensor.name for op in program.before for tensor in op.writes}
        made |= {tensor.name for tensor in program.outside}
        for tensor in program.resident:
            if tensor.name not in made:
                self.take(tensor.name, tensor.bytes)
        self.run(walk(program.before, {tensor.name for tensor in program.resident}))

    def set_aside(self) -> "List[Optional[Chunk]]":
        """All that is held, of which the names are free from now on: another program has the
        same."""
        held = list(self._by_name.values())
        self._by_name = {}
        return held

    def run(self, turns: Sequence[Turn]) -> None:
        """Take and give back as operations do, in order."""
        for op, freed in turns:
            for tensor in op.taken:
                self.take(tensor.name, tensor.bytes)
            if op.takes_over:
                self._by_name[op.writes[0].name] = self._by_name.pop(op.takes_over)
            for name in freed:
                self.give_back(name)

    def take(self, name: str, size_bytes: int) -> None:
        if size_bytes < SMALL_BYTES:
            self._by_name[name] = None
            return
        size = rounded(size_bytes)
        chunk = self._find(size)
        while chunk is None:
            self._extend(size)
            chunk = self._find(size)
        self._touched.add((chunk.start, chunk.start + size))
        self._by_name[name] = chunk
        self.counted_bytes += chunk.size
        self.peak_bytes = max(self.peak_bytes, self.counted_bytes)

    def give_back(self, name: str) -> None:
        """Free, together with free neighbours. Raises KeyError for a name that holds nothing."""
        self.give_back_chunk(self._by_name.pop(name))

    def give_back_chunk(self, chunk: Optional[Chunk]) -> None:
        if chunk is None:
            return
        self.counted_bytes -= chunk.size
        if chunk.after is not None and chunk.after.free:
            self._remove_free(chunk.after)
            self._join(chunk, chunk.after)
        if chunk.before is not None and chunk.before.free:
            self._remove_free(chunk.before)
            self._join(chunk.before, chunk)
            chunk = chunk.before
        self._add_free(chunk)

    @property
    def resident_bytes(self) -> int:
        """Memory touched so far: each byte that has held a tensor, once, and the regions' tables of
        chunks."""
        total = self.reserved_bytes * HANDLE_BYTES // GRANULE_BYTES
        end = 0  # of what is counted; no chunk starts below
        for first, last in sorted(self._touched):
            total += max(0, last - max(first, end))
            end = max(end, last)
        return total

    def _find(self, size: int) -> Optional[Chunk]:
        """The smallest free chunk that is large enough; of equals the one at the lowest address."""
        index = bisect.bisect_left(self._free, (size,))
        if index == len(self._free):
            return None
        chunk = self._chunks[self._free[index][1]]
        self._remove_free(chunk)
        chunk.free = False
        if chunk.size >= 2 * size or chunk.size - size >= SPARE_BYTES:
            rest = Chunk(chunk.start + size, chunk.size - size, before=chunk, after=chunk.after)
            if chunk.after is not None:
                chunk.after.before = rest
            chunk.after = rest
            chunk.size = size
            self._add_free(rest)
        return chunk

    def _join(self, first: Chunk, second: Chunk) -> None:
        """The first of two neighbours becomes both."""
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        del self._chunks[second.start]

    def _extend(self, size: int) -> None:
        """Add a region, in which a chunk of this size fits."""
        doubled = False
        while size > self._next_region_bytes:
            self._next_region_bytes *= 2
            doubled = True
        region_bytes = self._next_region_bytes
        self._lowest -= region_bytes
        self.reserved_bytes += region_bytes
        if not doubled:
            self._next_region_bytes *= 2
        self._add_free(Chunk(self._lowest, region_bytes))

    def _add_free(self, chunk: Chunk) -> None:
        chunk.free = True
        self._chunks[chunk.start] = chunk
        bisect.insort(self._free, (chunk.size, chunk.start))

    def _remove_free(self, chunk: Chunk) -> None:
        del self._free[bisect.bisect_left(self._free, (chunk.size, chunk.start))]
