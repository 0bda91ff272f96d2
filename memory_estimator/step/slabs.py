"""Level 0 in slabs (models/finest_level.py), in place of its layers: sweeps over slabs, by the layers' rules.

A map `m` is the tensors "m/slab0", "m/slab1" ... A sweep is a body of operations, run slab by slab. What a body is
given, slabs of neighbours with it, lives until it is done; what it makes goes as it is read. Norms, and all else that
goes value by value, are passes over memory that take nothing but their result.

A convolution reads a plane of each neighbour and makes another of it. Planes are small, but shape what the allocator
counts: slabs lie in the gaps between them.
"""

from dataclasses import dataclass
from typing import Any, Callable, List, Sequence, Tuple

from memory_estimator.step import blocks, layers
from memory_estimator.step.blocks import Block
from memory_estimator.step.scratch import Buffers
from memory_estimator.step.writer import Writer, filter_gradient_name
from models.layer_plan import LayerOp, slab_height

MOST_SAMPLES = 4
"""Whose slabs are written down; of more there are as many, each larger, and each stands for several: the tensors live
then are nearly the same, but every slab of the graph takes memory of its own (`calibration.runtime_ops`)."""

SIDES = ("encoder0", "decoder0")


def steps(writer: Writer, learning: bool = True) -> List[Any]:
    """The plan with level 0 in slabs and blocks, or in inference single layers, in place of all others."""
    named = {op.name: op for op in blocks.steps(writer)}
    level = FinestLevel(writer, named["encoder0"], named["decoder0"], named["head"], learning)
    others = named.values() if learning else writer.plan
    rest = [op for op in others if op.name not in ("head", level.pool.name) and not op.name.startswith(SIDES)]
    return [Side("encoder0", level), *rest, Side("decoder0", level)]


@dataclass(frozen=True)
class Side:
    """The finest encoder block with the pooling, or the finest decoder block with head and loss."""

    name: str  # of SIDES
    level: "FinestLevel"
    kind: str = "slabs"


def forward(writer: Writer, side: Side) -> None:
    """From the image, or from what lies below."""
    side.level.encode() if side.name == "encoder0" else side.level.decode()


def backward(writer: Writer, side: Side) -> None:
    """Down to what lies below, or to the image."""
    side.level.encode_back() if side.name == "encoder0" else side.level.decode_back()


class FinestLevel:
    """Both blocks of level 0, and the sweeps over them."""

    def __init__(self, writer: Writer, encoder: Block, decoder: Block, head: LayerOp, learning: bool):
        self.writer, self.encoder, self.decoder, self.head, self.learning = writer, encoder, decoder, head, learning
        self.pool = next(op for op in writer.plan if op.kind == "pool")
        self.below = decoder.inputs[1]
        self.pieces = _pieces(head.shape[0], writer.job.micro)
        self.readers = [op for op in (decoder.conv1, decoder.shortcut) if op]  # of both maps, as a sum
        self.of_skip, self.of_fine = zip(*(decoder.parts(op) for op in self.readers))
        self.upstreams = [f"{op.name}/gradient_below" for op in (decoder.norm1, decoder.act) if op]
        self.sides: List[int] = []  # of the slab that is written, which neighbours it has: -1, 1
        self.planes = 0  # of the finest grid that it has
        self.shares: List[str] = []  # the shares of the skip maps in what reads them

    # --- Forward ---

    def encode(self) -> None:
        """To the pooled map, and the skip maps' shares in what reads them."""
        writer, block, pool = self.writer, self.encoder, self.pool
        for op in filter(None, (block.conv1, block.conv2, block.shortcut)):
            writer.cast_kernel(op)
        for op in self.readers:
            writer.cast_kernel(op)
            for part in self.decoder.parts(op):
                blocks.cut_kernel(writer, self.decoder, op, part)
        self.hidden()

        def body() -> None:
            y, halo = self.output(block), self.halo(block.norm2)
            self.write(pool.name, [y], pool, kind="pool")
            self.shares = [layers.convolve(writer, op, y, writer.kept_at(op)) for op in self.of_skip]
            self.edges(self.shares[0], self.of_skip[0], halo)

        self.sweep("encoder0/down", body, [block.conv2.name], ["image"])
        self.join(pool.name, pool, writer.kept_at(pool))

    def decode(self) -> None:
        """To the loss, or in inference to the logits."""
        writer, conv1, conv2 = self.writer, self.decoder.conv1, self.decoder.conv2
        for op in (*self.decoder.up[:1], conv2, self.head):
            writer.cast_kernel(op)

        def first() -> None:
            fine, halo = self.up_sampled(), self.halo(self.decoder.up[0], planes=2)
            share = layers.convolve(writer, self.of_fine[0], fine)
            self.edges(share, self.of_fine[0], halo)
            self.write(conv1.name, [share, self.shares[0]], conv1, writer.kept_at(conv1), takes_over=share)
            self.statistics(conv1, conv1.name)

        self.sweep("decoder0/up", first, given=[*self.shares[:1], self.below.name])
        self.second(self.decoder, writer.kept_at(conv2))

        def logits() -> None:
            y, target = self.output(self.decoder), self.learning and layers.cast_target(writer, self.head)
            layers.convolve(writer, self.head, y)
            if target:
                layers.loss_sums(writer, self.head, layers.logits(writer, self.head), target)

        self.sweep("decoder0/logits", logits, [conv2.name], ["target"] * self.learning + self.beside)
        if not self.learning:
            self.join(self.head.name, self.head)

    def hidden(self, again: bool = False) -> None:
        """What the encoder's convolutions put out."""
        conv1 = self.encoder.conv1

        def body() -> None:
            found = layers.convolve(self.writer, conv1, "image")
            self.edges(found, conv1)
            if not again:
                self.statistics(conv1, found)

        self.sweep("encoder0/first", body, given=["image"])
        self.second(self.encoder, again=again)

    def second(self, block: Block, group: str = "transients", again: bool = False) -> None:
        """What a block's second convolution puts out."""

        def body() -> None:
            y, halo = self.normed(block.norm1, block.conv1.name), self.halo(block.norm1)
            found = layers.convolve(self.writer, block.conv2, y, group)
            self.edges(found, block.conv2, halo)
            if not again:
                self.statistics(block.conv2, found)

        self.sweep(f"{block.name}/second", body, [block.conv1.name])

    # --- Backward ---

    def decode_back(self) -> None:
        """From the loss, slab by slab again: its sums for the norm first."""
        writer, block, hidden2 = self.writer, self.decoder, self.decoder.conv2.name

        def to_output(first: bool) -> str:
            """The gradient of what the norm puts out."""
            y = self.output(block)
            reads = [layers.convolve(writer, self.head, y), "target"]
            at_logits = self.write(f"{self.head.name}/slope", reads, self.head)
            if first:
                self.filter_gradient(self.head, y, at_logits)
            at_y = layers.input_gradient(writer, self.head, at_logits)
            return layers.relu_gradient(writer, block.act, at_y) if block.act else at_y

        def sums() -> None:
            self.statistics(block.conv2, to_output(first=True), hidden2)

        def back() -> None:
            self.below_norm(block.norm2, to_output(first=False), hidden2)

        given = [hidden2, "target", *self.beside]
        self.sweep("decoder0/sums", sums, given=given)
        self.total(self.head)
        self.sweep("decoder0/back", back, given=given)
        self.through_second(block)
        self.through_norm(block.norm1, f"{block.conv2.name}/input_gradient", block.conv1.name)

        def down() -> None:
            fine, halo = self.up_sampled(), self.halo(self.decoder.up[0], planes=2)
            self.up_gradients(self.gradients(self.of_fine, fine, self.decoder.up[-1], halo))

        self.sweep("decoder0/down", down, self.upstreams, [self.below.name])
        for op in (block.up[0], *self.of_fine):
            self.total(op)
        at_below = f"{block.up[0].name}/input_gradient"
        self.join(at_below, self.below)
        writer.receive(self.below.name, at_below)

    def encode_back(self) -> None:
        """With everything made again from the image."""
        writer, block, pool, hidden2 = self.writer, self.encoder, self.pool, self.encoder.conv2.name
        at_pooled = writer.arrived(pool)
        upstream = f"{block.norm2.name}/gradient"
        self.hidden(again=True)

        def to_output() -> None:
            y = self.output(block)
            at_y = self.gradients(self.of_skip, y, block.norm2, self.halo(block.norm2))
            reads = [y, self.write(pool.name, [y], pool, kind="pool"), at_pooled]
            of_pool = self.write(f"{pool.name}/gradient_below", reads, block.norm2, kind="pool_gradient")
            at_y = self.write(upstream, [at_y, of_pool], block.norm2, takes_over=at_y)
            if block.act:
                at_y = layers.relu_gradient(writer, block.act, at_y)
                self.filter_gradient(block.shortcut, "image", at_y)
            self.statistics(block.conv2, at_y, hidden2)

        self.sweep("encoder0/output", to_output, [hidden2, *self.upstreams], [at_pooled, "image"])
        for op in filter(None, (*self.of_skip, block.shortcut)):
            self.total(op)
        for op in self.readers:
            blocks.join_gradients(writer, self.decoder, op)
        self.through_norm(block.norm2, f"{block.act.name}/gradient_below" if block.act else upstream, hidden2)
        self.through_second(block)
        at_y1 = f"{block.conv2.name}/input_gradient"

        def first() -> None:
            self.filter_gradient(block.conv1, "image", self.below_norm(block.norm1, at_y1, block.conv1.name))

        self.sweep("encoder0/image", first, given=[at_y1, block.conv1.name, "image"])
        self.total(block.conv1)

    def through_second(self, block: Block) -> None:
        """From the gradient of what the second convolution puts out to that of what the first norm does."""
        hidden1, at_hidden2 = block.conv1.name, f"{block.norm2.name}/gradient_below"

        def body() -> None:
            y = self.normed(block.norm1, hidden1)
            at_y = self.gradients([block.conv2], y, block.norm1, self.halo(block.norm1), [at_hidden2])
            self.statistics(block.conv1, at_y, hidden1)

        self.sweep(f"{block.name}/second/back", body, [hidden1, at_hidden2])
        self.total(block.conv2)

    def through_norm(self, norm: LayerOp, upstream: str, hidden: str) -> None:
        """The gradient of a norm's input takes the place of two maps that go."""
        self.sweep(f"{norm.name}/back", lambda: self.below_norm(norm, upstream, hidden), given=[upstream, hidden])

    # --- Sweeps ---

    def sweep(self, name: str, body: Callable[[], Any], near: Sequence[str] = (), given: Sequence[str] = ()) -> None:
        """`body` slab by slab, which is given its slabs of maps, those and their neighbours' of maps in `near`."""
        last, micro = len(self.pieces) - 1, self.writer.job.micro
        copies = micro / min(micro, MOST_SAMPLES)
        for index, (sample, planes) in enumerate(self.pieces):
            around = range(max(0, index - 1), min(last, index + 1) + 1)
            neighbours = [one for one in around if self.pieces[one][0] == sample]
            self.sides, self.planes = [one - index for one in neighbours if one != index], planes
            # Slabs between two others run the same functions again.
            with self.writer.slab(index, planes, 1 < index < last, copies):
                for whole in given:
                    self.writer.view(whole, len(self.pieces))
                body()
                self.writer.run(name, "fused", [*given, *(f"{maps}/slab{one}" for maps in near for one in neighbours)])

    def join(self, maps: str, op: LayerOp, group: str = "transients") -> None:
        """The slabs of a map like that of `op` become one tensor."""
        parts = [f"{maps}/slab{index}" for index in range(len(self.pieces))]
        self.writer.make(maps, "join", parts, self.writer.map_bytes(op), group)

    def total(self, op: LayerOp) -> None:
        """A kernel's gradient, from all slabs' shares."""
        name = filter_gradient_name(op)
        parts = [f"{name}/slab{index}" for index in range(len(self.pieces))]
        self.writer.make(name, "pointwise", parts, self.writer.kernel_bytes(op), "gradients")

    # --- Of one slab; what returns a name returns that of the map it makes ---

    def write(self, name: str, reads: Sequence[str], like: LayerOp, group: str = "transients", **more) -> str:
        """A map like that of a layer, in one pass over memory or of another `kind`; else as `Writer.run`."""
        return self.writer.make(name, more.pop("kind", "pointwise"), reads, self.writer.map_bytes(like), group, **more)

    def normed(self, norm: LayerOp, source: str) -> str:
        """Norm and ReLU, made again for each sweep that reads them."""
        return self.write(norm.name, [source], norm)

    def statistics(self, op: LayerOp, *maps: str) -> None:
        """What a norm behind `op` needs of what that put out; its gradient needs it of the gradient behind it too."""
        parts = ("sums", "squares") if self.writer.norm_reads_source else ("sums",)[: len(maps) - 1]
        for part in parts:
            layers.channel_sums(self.writer, op, f"{maps[0]}/{part}", *maps)

    def halo(self, like: LayerOp, planes: int = 1) -> List[str]:
        """So many planes of each neighbour, of a map like that of a layer which is made again: value by value in
        float32, operation by operation."""
        size = planes * self.writer.map_bytes(like) // self.planes
        wide = self.writer.mixed and like.kind != "up_conv"
        buffers = Buffers(scratch=(2 * size * wide,), comes_first=True)
        names = [f"{like.name}/plane{side:+}" for side in self.sides]
        return [self.writer.make(name, "fused", [], size, buffers=buffers) for name in names]

    def edges(self, found: str, op: LayerOp, halo: Sequence[str] = ()) -> None:
        """What a convolution, or its input gradient, makes of the neighbours' planes, added to what it has `found`."""
        size = self.writer.size_of(found) // self.planes
        for index, side in enumerate(self.sides if op.kernel > 1 else ()):
            plane = self.writer.make(f"{found}/plane{side:+}", "fused", halo[index : index + 1], size)
            self.writer.run(f"{plane}/added", "fused", [found, plane])

    def below_norm(self, norm: LayerOp, upstream: str, hidden: str) -> str:
        """The gradient of a norm's input, from that behind the ReLU."""
        return self.write(f"{norm.name}/gradient_below", [upstream, hidden], norm)

    @property
    def beside(self) -> List[str]:
        """What a residual decoder's output is made of beside its second convolution's."""
        return [*self.shares[1:], self.below.name] if self.decoder.act else []

    def output(self, block: Block) -> str:
        """Of a block, from what its second convolution put out."""
        y = self.normed(block.norm2, block.conv2.name)
        if not block.act:
            return y
        if block.up:
            beside = [layers.convolve(self.writer, self.of_fine[1], self.up_sampled()), self.shares[1]]
        else:
            beside = [layers.convolve(self.writer, block.shortcut, "image")]
        return self.write(block.act.name, [y, *beside], block.act, takes_over=y)

    def filter_gradient(self, op: LayerOp, source: str, upstream: str) -> None:
        """A slab's share in it: a two-dimensional one a plane of the kernel, as one."""
        layers.filter_gradient(self.writer, op, source, upstream, layers.in_planes(self.writer, op))

    def gradients(
        self, readers: Sequence[LayerOp], source: str, entry: LayerOp, halo: Sequence[str], upstreams: Sequence = ()
    ) -> str:
        """Of the kernels that read a map like that of `entry`, and of the map."""
        downs = []
        for op, upstream in zip(readers, upstreams or self.upstreams):
            self.filter_gradient(op, source, upstream)
            if not downs:
                self.writer.run(f"{source}/met", "fused", halo)
            downs.append(layers.input_gradient(self.writer, op, upstream))
            self.edges(downs[-1], op)
        return self.writer.sum_of(f"{entry.name}/gradient_sum", downs, self.writer.map_bytes(entry), over=downs[0])

    def up_sampled(self) -> str:
        """The coarser map on this grid."""
        (up, *nearest), below = self.decoder.up, self.below.name
        if not nearest:
            return layers.up_convolve(self.writer, up, below)
        source, size = layers.convolve(self.writer, up, below), self.writer.map_bytes(up)
        for axis in range(3):  # one after the other, each twice as large
            source = self.writer.make(f"{up.name}/axis{axis}", "join", [source], size * 2 ** (axis + 1))
        return source

    def up_gradients(self, upstream: str) -> None:
        """Of the coarser map, and of the kernel it meets."""
        up, *nearest = self.decoder.up
        if nearest:
            upstream = self.write(f"{up.name}/mean", [upstream], up, kind="pool")
        layers.up_gradients(self.writer, up, self.below.name, upstream)


def _pieces(planes: int, samples: int) -> List[Tuple[int, int]]:
    """(sample, planes) of each slab, of MOST_SAMPLES at most, which are then as much larger."""
    height, few = slab_height(planes), min(samples, MOST_SAMPLES)
    firsts = range(0, planes, height)
    return [(n, min(height, planes - first) * samples // few) for n in range(few) for first in firsts]
