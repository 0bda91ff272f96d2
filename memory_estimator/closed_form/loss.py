"""Soft Dice and cross-entropy as `cpu3d.training.losses` computes them: float32 maps of regions, forward and back."""

from typing import List, Optional

from memory_estimator.closed_form.norms import MOST_SAMPLES
from memory_estimator.closed_form.writer import Writer
from models.layer_plan import LayerOp

SLABS = 8
"""`cpu3d.training.losses.SLABS`, which a test holds equal: pieces of X that the loss is computed in."""


def cut_target(writer: Writer, head: LayerOp) -> None:
    """A coarse head's: every 2nd, 4th ... voxel of the full one."""
    if head.level:
        cut = writer.transient(_target(head), writer.job.micro * head.elements)
        writer.run(cut.name, "slice", ["target"], [cut])


def cast_target(writer: Writer, head: LayerOp) -> None:
    """A head's target in float32, which the loss keeps: all of it, or the first slab, which waits for nothing."""
    size = 4 * writer.job.micro * head.elements // _slabs(writer)
    writer.run(_truth(head), "pointwise", [_target(head)], [writer.transient(_truth(head), size)])


def loss(writer: Writer, head: LayerOp) -> None:
    """From a head's output to its gradient."""
    if writer.job.policy == "speed":
        writer.receive(head.name, _at_once(writer, head))
    else:
        writer.receive(head.name, _by_slabs(writer, head))


# --- Private helpers ---


def _at_once(writer: Writer, head: LayerOp) -> str:
    maps = _Maps(writer, head, f"{head.name}/loss", 4 * writer.job.micro * head.elements)
    target = _truth(head)
    logits = maps.widened(f"{head.name}/float32")
    maps.cross_entropy(logits, target)
    probability = maps.map("probability", logits, over=logits)
    weighted = maps.map("weighted", target)
    maps.total(maps.map("overlap", probability, target))
    return maps.gradient(probability, target, weighted)


def _by_slabs(writer: Writer, head: LayerOp) -> str:
    """Sums first, then the gradient, for which all maps are made again; its pieces are joined."""
    slabs, elements = _slabs(writer), writer.job.micro * head.elements
    pieces: List[str] = []
    for turn in ("sums", "gradient"):
        for slab in range(slabs):
            maps = _Maps(writer, head, f"{head.name}/loss/{turn}{slab}", 4 * elements // slabs)
            logits = maps.widened(f"{maps.name}/float32")
            early = turn == "sums" and slab == 0
            truth = _truth(head) if early else maps.map("target", _target(head))
            if turn == "sums":
                maps.cross_entropy(logits, truth)
            probability = maps.map("probability", logits, over=logits if writer.mixed else None)
            if turn == "sums":
                maps.total(maps.map("overlap", probability, truth, over=probability))
            else:
                pieces.append(maps.gradient(probability, truth, maps.map("weighted", truth)))
    joined = writer.transient(f"{head.name}/loss/gradient", writer.compute_bytes * elements)
    writer.run(joined.name, "pointwise", pieces, [joined])
    return joined.name


class _Maps:
    """The float32 maps of a head's loss, or of a slab of it. Results lie over maps that nobody else will read."""

    def __init__(self, writer: Writer, head: LayerOp, name: str, size_bytes: int):
        self.writer, self.head, self.name, self.size = writer, head, name, size_bytes

    def map(self, result: str, *reads: str, over: Optional[str] = None) -> str:
        return self._named(f"{self.name}/{result}", *reads, over=over)

    def total(self, of: str) -> None:
        self.writer.run(f"{of}/sum", "reduce", [of])

    def widened(self, name: str) -> str:
        """The head's output in float32."""
        return self._named(name, self.head.name) if self.writer.mixed else self.head.name

    def cross_entropy(self, logits: str, target: str) -> None:
        self.total(self.map("products", logits, target))
        self.total(self.map("softplus", logits))

    def gradient(self, probability: str, target: str, weighted: str) -> str:
        """In the compute dtype."""
        rest = self.map("rest", probability)
        slope = self.map("slope", rest, weighted, over=weighted)
        scaled = self.map("scaled", slope, probability, over=probability)
        truth = self.map("truth", target, over=target)
        gradient = self.map("gradient", scaled, truth, over=scaled)
        if self.writer.mixed:
            cast = self.writer.transient(f"{gradient}/cast", self.size // 2)
            self.writer.run(cast.name, "pointwise", [gradient], [cast])
            gradient = cast.name
        return gradient

    def _named(self, name: str, *reads: str, over: Optional[str] = None) -> str:
        self.writer.run(name, "pointwise", reads, [self.writer.transient(name, self.size)], takes_over=over)
        return name


def _slabs(writer: Writer) -> int:
    """Of all samples; more than MOST_SAMPLES are counted as that many larger ones."""
    return 1 if writer.job.policy == "speed" else SLABS * min(writer.job.micro, MOST_SAMPLES)


def _target(head: LayerOp) -> str:
    """What the head is compared with, in one byte."""
    return f"{head.name}/target/uint8" if head.level else "target"


def _truth(head: LayerOp) -> str:
    """The same in float32."""
    return f"{head.name}/target"
