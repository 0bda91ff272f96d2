"""The training step on paper: the operations of `models/step.py` in the order of `models/order.py`,
with their tensors.

Forward, loss, backward, update. For a batch in micro-batches the program is one of them, and the
update. A validation is the forward part alone, and its scores."""

import math
from dataclasses import replace
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from memory_estimator.job import Job
from memory_estimator.step.program import OwnOperation, Program, StepOp
from memory_estimator.step.scratch import KINDS
from memory_estimator.step.update import reset_sums, update
from memory_estimator.step.writer import Writer, kernel_elements
from models.order import Block, Order, head_of

TAPS = {"pass": 0, "project": 1, "up": 8}  # of filters, by the kind of operation; others have 27
SCORED_SLABS = 8  # of X: so many parts of a held-out volume are painted, one after the other
SLAB_MAPS = 2  # of one, in float32: logits and probabilities


def training_step(job: Job) -> Program:
    """The program of `job`. Raises ValueError for a shape that the network cannot take."""
    writer = Writer(job)
    reset_sums(writer)
    paper = PaperPass(writer)
    logits = paper.logits()
    writer.phase = "loss"
    slopes = loss_slopes(paper, logits)
    writer.phase = "backward pass"
    gradients = paper.gradients(slopes)
    writer.phase = "update"
    update(writer, gradients)
    return writer.program()


def validation_pass(job: Job) -> Tuple[StepOp, ...]:
    """The operations of `cpu3d.training.validation` on a volume or window: the network forward, and
    the scores. Besides the resident tensors, the held-out volume that comes next is ready."""
    writer = Writer(
        replace(job, unet=replace(job.unet, deep_supervision=False), batch=1, micro_batch=1)
    )
    ready = [
        writer.tensor(f"validation/{tensor.name}", tensor.bytes, "input")
        for tensor in writer.resident[-2:]
    ]
    writer.run("validation/next", "pass", [], ready)
    paper = PaperPass(writer, keeps=False)
    (logits,) = paper.logits()
    slab = writer.tensor(
        "validation/slab", SLAB_MAPS * 4 * writer.job.voxels * logits.channels // SCORED_SLABS
    )
    reads = [logits.name, "target", *(tensor.name for tensor in ready)]
    writer.run("validation/paint", "pass", reads, scratch=(slab,))
    paper.loss_sums(logits)
    return writer.program().ops


class Map(NamedTuple):
    """A map of a level's grid, by its tensor's name."""

    name: str
    level: int
    channels: int
    of_raw: bool = False  # a gradient of a raw map, not of its values


class PaperPass(Order):
    """One pass over the network. A map is a `Map`, the gradient of a raw sum a list of the maps
    that form it."""

    def __init__(self, writer: Writer, keeps: bool = True):
        """Whether it `keeps` maps for a backward pass."""
        super().__init__(writer.job.unet)
        self.writer, self.job, self._keeps = writer, writer.job, keeps
        self._parts: Dict[Tuple[str, int], str] = {}
        self._gradients: Dict[str, str] = {}

    def logits(self) -> List[Map]:
        """Logits of each head, the finest first."""
        return self.forward(Map("image", 0, self.unet.channels))

    def gradients(self, slopes: Sequence[Map]) -> Dict[str, str]:
        """Gradients of the kernels, by their layers, from those of the logits of each head."""
        self.backward(slopes)
        return self._gradients

    # --- Forward ---

    def max_pool(self, level: int, source: Map) -> Map:
        return self._map(Map(f"encoder{level}_pool", level, source.channels), "max_pool", [source])

    def convolve(self, name: str, entry: List[Map], again: bool) -> Map:
        op = self.writer.layers[name]
        made = Map(name, op.level, op.shape[3])
        return self._map(made, "convolve", entry, [f"{name}/kernel"], entry[:1], kept=not again)

    def convolve_part(
        self, name: str, entry: List[Map], part: int, add: Optional[Map], last: bool
    ) -> Map:
        made, filters = (
            Map(name, entry[0].level, self.writer.layers[name].shape[3]),
            [self._rows(name, entry, part)],
        )
        reads = [*filters, *([add.name] if add else [])]
        return self._map(made, "convolve", entry[part:], reads, [add or entry[part]])

    def up(self, level: int, below: Map, part: int, again: bool) -> Map:
        first, past = self.unet.up_parts(level)[part]
        made = Map(self._up_layer(level), level, past - first)
        filters = [self._up_filters(level, part)]
        return self._map(made, "up_convolve", [below], filters, kept=not again)

    def project(self, name: str, entry: List[Map], part: int, add: Optional[Map]) -> Map:
        source, over = entry[part], [add] if add else []
        made = Map(name, source.level, self.writer.layers[name].shape[3])
        return self._map(
            made, "project", [source, *over], [self._rows(name, entry, part)], over, kept=False
        )

    def residual_sum(self, name: str, second: Map, total: Map, again: bool) -> Map:
        made = second._replace(name=f"{name}_act2")
        return self._map(made, "residual_sum", [second, total], over=[total], kept=not again)

    # --- Backward ---

    def max_pool_gradient(self, level: int, source: Map, at: Map, add: Map) -> Map:
        made = source._replace(name=f"encoder{level}_pool/gradient")
        return self._map(made, "max_pool_gradient", [source, at, add], over=[add])

    def up_gradients(self, level: int, below: Map, part: int, at: Map) -> Tuple[str, Map]:
        name = self._up_layer(level)
        of_up = self._kernel_gradient(name, [below], [at], "up_filter_gradient")
        filters = [self._up_filters(level, part)]
        return of_up, self._gradient(name, "up_input_gradient", [at, below], below, filters)

    def join_up_gradients(self, level: int, parts: List[str]) -> None:
        if len(parts) > 1:
            self._whole_gradient(self._up_layer(level), "pass", parts)

    def add_gradients(self, at: Map, add: Map) -> Map:
        return self._gradient(f"{at.name}/sum", "add", [at, add], at, over=[at, add])

    def project_gradient(
        self, name: str, entry: List[Map], part: int, at: Map, add: Optional[Map]
    ) -> Map:
        source, over = entry[part], [add] if add else []
        maps, filters = [source, at, *over], [self._rows(name, entry, part)]
        gradient = self._gradient(name, "project_gradient", maps, source, filters, over)
        self._whole_gradient(name, "pass", [])  # those of two parts are padded and added up
        return gradient

    def project_to_raw(self, source: Map, at: Map) -> Map:
        """First come the sums that the norm needs."""
        sums = self._own("project_sums", source.level, source.channels, at.channels)
        self._whole_gradient("head", "project", [source.name, at.name], own=sums)
        maps, filters = [source, at], ["head/kernel"]
        gradient = self._gradient("head", "project_to_raw", maps, source, filters, [source])
        return gradient._replace(of_raw=True)

    def residual_gradient(self, name: str, block: Block, at: Map) -> Map:
        maps = [block.second, block.output, at]
        return self._gradient(f"{name}_act2", "residual_gradient", maps, at, over=[at])

    def of_raw(self, name: str, source: Map, at: Map) -> List[Map]:
        return [at] if at.of_raw else [at, source]

    def to_raw(self, name: str, source: Map, at: List[Map]) -> List[Map]:
        made = Map(f"{name}/to_raw", source.level, source.channels, of_raw=True)
        return [self._map(made, "to_raw", at, over=[source], kept=False)]

    def input_gradient(
        self, name: str, at: List[Map], entry: List[Map], part: int, sums: bool = False
    ) -> Map:
        like, filters = entry[part], [self._rows(name, entry, part)]
        return self._gradient(
            name, "input_gradient", [*at, like] if sums else at, like, filters, at[:1]
        )

    def filter_gradient(self, name: str, entry: List[Map], at: List[Map], part: str = "") -> str:
        return self._kernel_gradient(name, entry, at, "filter_gradient", part)

    def split_kernel(self, name: str, entry: List[Map]) -> None:
        for part in range(len(entry)):
            self._rows(name, entry, part)

    def join_gradients(self, name: str, parts: List[str]) -> None:
        self._whole_gradient(name, "pass", parts)

    # --- The loss ---

    def loss_sums(self, head: Map) -> None:
        """Sums over a head's logits, which are a few numbers."""
        own, moved = self._own("loss_sums", head.level, head.channels, 0), self._read_by_loss(head)
        reads = [head.name, "target"]
        self.writer.run(
            f"{head_of(head.level)}/loss_sums",
            KINDS["loss_sums"],
            reads,
            own=own,
            traffic_bytes=moved,
        )

    def loss_slope(self, head: Map) -> Map:
        """The gradient of a head's logits, written over them."""
        size = self.map_bytes(head)
        name = self.writer.make(
            f"{head_of(head.level)}/slope",
            KINDS["loss_slope"],
            [head.name, "target"],
            size,
            over=[head.name],
            own=self._own("loss_slope", head.level, head.channels, 0),
            traffic_bytes=self._read_by_loss(head) + size,
        )
        return head._replace(name=name)

    def _read_by_loss(self, head: Map) -> int:
        """Bytes of the logits, and of the target's rows along Z that count for them."""
        return self.map_bytes(head) + (self.map_bytes(head, 1) << head.level)

    # --- Kernels ---

    def _rows(self, name: str, entry: List[Map], part: int) -> str:
        """A layer's kernel, or the rows for a part of its block's input: a copy, made when it is
        first read."""
        return self._part_of(name, part, entry[part].channels, self.writer.layers[name].in_channels)

    def _up_filters(self, level: int, part: int) -> str:
        """The filters of a part's channels; a 1x1x1 kernel is copied for each of its eight taps."""
        (first, past), name = self.unet.up_parts(level)[part], self._up_layer(level)
        taps = 1 if self.unet.up == "transposed" else 8
        return self._part_of(name, part, taps * (past - first), self.writer.layers[name].shape[3])

    def _part_of(self, name: str, part: int, width: int, whole: int) -> str:
        kernel = f"{name}/kernel"
        if width == whole:
            return kernel
        if (name, part) not in self._parts:
            size = 4 * kernel_elements(self.writer.layers[name]) * width // whole
            self._parts[name, part] = self.writer.make(
                f"{kernel}{part}", "update", [kernel], size, "weights, parts"
            )
        return self._parts[name, part]

    def _up_layer(self, level: int) -> str:
        return f"decoder{level}_up" + "_conv" * (self.unet.up != "transposed")

    # --- Writing ---

    def _gradient(
        self, name: str, kind: str, maps: Sequence[Map], like: Map, filters=(), over=()
    ) -> Map:
        return self._map(
            Map(f"{name}/gradient", like.level, like.channels),
            kind,
            maps,
            filters,
            over,
            kept=False,
        )

    def _map(
        self, made: Map, kind: str, maps: Sequence[Map], filters=(), over=(), kept: bool = True
    ) -> Map:
        """An operation that makes a map, from maps and filters, under the name that it gets.
        `kind` is of own ones, or "add", TensorFlow's."""
        # Both of two joined maps are counted; other maps go with the first.
        inputs = sum(read.channels for read in maps) if kind == "convolve" else maps[0].channels
        name = self.writer.make(
            made.name,
            KINDS.get(kind, "pass"),
            [*(read.name for read in maps), *filters],
            self.map_bytes(made),
            f"activations, level {made.level}" if kept and self._keeps else "transients",
            over=[read.name for read in over],
            own=self._own_of(kind, maps, made, inputs),
            **self._counted(kind, maps[0], made, inputs, bool(filters)),
        )
        return made._replace(name=name)

    def _kernel_gradient(
        self, name: str, sources: List[Map], at: List[Map], kind: str, part: str = ""
    ) -> str:
        """An operation that makes a kernel's gradient, or that of the part that `sources` are
        multiplied by."""
        op, inputs = self.writer.layers[name], sum(source.channels for source in sources)
        self._gradients[name] = self.writer.make(
            f"{name}/filter_gradient{part}",
            KINDS[kind],
            [read.name for read in (*sources, *at)],
            4 * kernel_elements(op) * inputs * at[0].channels // (op.in_channels * op.shape[3]),
            "gradients",
            own=self._own(kind, sources[0].level, inputs, at[0].channels),
            **self._counted(kind, sources[0], at[0], inputs),
        )
        return self._gradients[name]

    def _whole_gradient(
        self,
        name: str,
        kind: str,
        reads: Sequence[str],
        own: Optional[OwnOperation] = None,
    ) -> None:
        """A kernel's gradient without multiply-adds: the operation beside it has them, or there
        are none."""
        size, made = 4 * kernel_elements(self.writer.layers[name]), f"{name}/filter_gradient"
        self._gradients[name] = self.writer.make(made, kind, reads, size, "gradients", own=own)

    def map_bytes(self, made: Map, value_bytes: int = 0) -> int:
        voxels = self.job.micro * math.prod(self._grid(made.level))
        return voxels * made.channels * (value_bytes or self.writer.value_bytes)

    def _grid(self, level: int) -> Tuple[int, int, int]:
        return tuple(side >> level for side in self.job.shape)

    def _counted(
        self,
        kind: str,
        read: Map,
        made: Map,
        inputs: int,
        multiplies: bool = True,
    ) -> Dict[str, int]:
        """Counts of a `StepOp` besides tensors: multiply-adds, as 2, on the coarser grid. A
        projection's gradient is two."""
        coarse = self._grid(max(read.level, made.level))
        taps = TAPS.get(KINDS.get(kind, "pass"), 27)
        products = taps * self.job.micro * math.prod(coarse) * inputs * made.channels
        channels = {"in_channels": inputs, "out_channels": made.channels}
        return {"flops": 2 * products * multiplies, **channels}

    def _own_of(
        self,
        kind: str,
        maps: Sequence[Map],
        made: Map,
        inputs: int,
    ) -> Optional[OwnOperation]:
        """The own operation that makes a map from maps; None if it is TensorFlow's."""
        if kind not in KINDS:
            return None
        coarse = max(maps[0].level, made.level)
        if kind == "up_input_gradient":
            return self._own(kind, coarse, made.channels, maps[0].channels)
        if kind in ("project_gradient", "project_to_raw"):
            return self._own(kind, coarse, made.channels, maps[1].channels)
        return self._own(kind, coarse, inputs, made.channels)

    def _own(self, kind: str, level: int, channels: int, outputs: int) -> OwnOperation:
        batch, value_bytes = self.job.micro, self.writer.value_bytes
        return OwnOperation(kind, batch, self._grid(level), channels, outputs, value_bytes)


# --- The loss, as models/supervision.py has it ---


def loss_slopes(paper: PaperPass, logits: List[Map]) -> List[Map]:
    """Gradients of each head's logits. All heads' sums come first, then slopes."""
    for head in logits:
        paper.loss_sums(head)
    return [paper.loss_slope(head) for head in logits]
