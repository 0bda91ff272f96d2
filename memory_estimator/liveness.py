"""Memory over the time of one step: a tensor lives from the operation that writes it to the last one that reads it."""

from dataclasses import dataclass
from typing import Dict, Iterator, List, Sequence, Set, Tuple

from memory_estimator.program import Program, StepOp, Tensor

GRANULE_BYTES = 256
"""TensorFlow's allocator rounds every request up to this."""


@dataclass(frozen=True)
class Moment:
    """What is held while one operation runs."""

    op: str
    live_bytes: int
    """At its most: outputs and scratch taken, nothing given back yet."""
    hidden_bytes: int
    """Scratch outside the allocator at that time."""


@dataclass(frozen=True)
class Timeline:
    """A step's memory, an entry an operation."""

    moments: Tuple[Moment, ...]
    peak: int
    """Index of the moment with the most live bytes; the first of equals."""
    peak_tensors: Tuple[Tensor, ...]
    """Everything live then, the largest first."""

    @property
    def peak_bytes(self) -> int:
        return self.moments[self.peak].live_bytes


@dataclass(frozen=True)
class Request:
    """One call to the allocator."""

    name: str
    """Of the tensor: memory is given back under the name it was taken under."""
    bytes: int
    """Positive takes, negative gives back; not rounded."""
    op: str = ""
    """The operation that makes the call; "" for a resident tensor that no operation made."""
    touched: Tuple[Tuple[int, int], ...] = ()
    """As of `Tensor`."""


def rounded(size_bytes: int) -> int:
    """What the allocator counts for a request of this many bytes, where it finds a chunk that fits."""
    return -(-size_bytes // GRANULE_BYTES) * GRANULE_BYTES


def timeline(program: Program) -> Timeline:
    """A step on paper, from the second on. Raises ValueError where an operation reads what is not there."""
    moments: List[Moment] = []
    best, peak, peak_tensors = -1, 0, ()
    kept = tuple(tensor for op in program.ops for tensor in op.keeps)
    live = {tensor.name: tensor for tensor in program.resident + kept}
    held = sum(rounded(tensor.bytes) for tensor in live.values())
    for op, taken, given in _walk(program.ops, _names(program.resident)):
        missing = [name for name in op.reads if name not in live]
        if missing:
            raise ValueError(f"{op.name} must read tensors that are live, got {missing[0]}; mend the program")
        if op.takes_over:
            held -= rounded(live.pop(op.takes_over).bytes)
        for tensor in (op.writes[:1] if op.takes_over else ()) + taken:
            live[tensor.name] = tensor
            held += rounded(tensor.bytes)
        if held > best:
            best, peak = held, len(moments)
            peak_tensors = tuple(sorted(live.values(), key=lambda tensor: -tensor.bytes))
        moments.append(Moment(op.name, held, op.hidden_bytes))
        for name in given:
            held -= rounded(live.pop(name).bytes)
    return Timeline(tuple(moments), peak, peak_tensors)


def requests(program: Program, steps: int, after: bool = False) -> Iterator[Request]:
    """The allocator's calls in order: the region, what ran before, then the first `steps` steps.

    With `after`, what follows them and one step more, which meets what that has kept.
    """
    if program.region_bytes:
        yield Request("region", program.region_bytes, touched=((0, 0),))
        yield Request("region", -program.region_bytes)
    stays = _names(program.resident)
    made = {tensor.name for op in program.before for tensor in op.writes}
    sizes = {tensor.name: tensor.bytes for tensor in program.resident if tensor.name not in made}
    yield from (Request(name, size) for name, size in sizes.items())
    holder: Dict[str, str] = {}
    passes = [(program.before, True)] + [(program.ops, step == 0) for step in range(steps)]
    for ops, first in passes + ([(program.after, True), (program.ops, False)] if after and program.after else []):
        for op, taken, given in _walk(ops, stays):
            if op.takes_over:
                holder[op.writes[0].name] = holder.pop(op.takes_over, op.takes_over)
            for tensor in taken + (op.keeps if first else ()):
                sizes[tensor.name] = tensor.bytes
                yield Request(tensor.name, tensor.bytes, op.name, tensor.touched)
            for name in given:
                owner = holder.pop(name, name)
                yield Request(owner, -sizes.pop(owner), op.name)


# --- Private helpers ---


def _names(tensors: Sequence[Tensor]) -> Set[str]:
    return {tensor.name for tensor in tensors}


def _walk(ops: Sequence[StepOp], stays: Set[str]) -> Iterator[Tuple[StepOp, Tuple[Tensor, ...], List[str]]]:
    """(operation, tensors it takes, names given back after it) in order."""
    last: Dict[str, int] = {}
    for index, op in enumerate(ops):
        for name in (*op.reads, *(tensor.name for tensor in op.writes)):
            last[name] = index
    gone: Dict[int, List[str]] = {}
    for name, index in last.items():
        if name not in stays:
            gone.setdefault(index, []).append(name)
    for index, op in enumerate(ops):
        taken = (op.writes[1:] if op.takes_over else op.writes) + op.scratch
        given = [tensor.name for tensor in reversed(op.scratch)]
        yield op, taken, given + [name for name in gone.get(index, ()) if name != op.takes_over]
