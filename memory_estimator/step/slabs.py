"""Level 0 in slabs (models/finest_level.py), in place of its layers: sweeps over slabs, by the layers' rules.

A map `m` is the tensors "m/slab0", "m/slab1" ... A sweep is a body of operations, run slab by slab. What a body is
given, slabs of neighbours with it, lives until it is done; what it makes goes as it is read. Norms, and all else that
goes value by value, are passes over memory that take nothing but their result.
"""

import contextlib
import math
from dataclasses import dataclass, replace
from typing import Any, Callable, Iterator, List, Sequence, Tuple

from memory_estimator.step import blocks, layers
from memory_estimator.step.blocks import AGAIN, Block
from memory_estimator.step.onednn import Convolution
from memory_estimator.step.writer import Writer, filter_gradient_name
from models.layer_plan import LayerOp, slab_height

MOST_SAMPLES = 4
"""Whose slabs are written down; of more there are as many, each larger, which changes little."""

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
        self.readers = [op for op in (decoder.conv1, decoder.shortcut) if op]
        """What reads the skip maps and the up-sampled ones, each as the sum of one for either."""
        self.of_skip, self.of_fine = zip(*(decoder.parts(op) for op in self.readers))
        self.upstreams = [f"{op.name}/gradient" for op in self.readers]

    # --- Forward ---

    def encode(self) -> None:
        """To the pooled map, and the skip maps' shares in what reads them."""
        encoder = self.encoder
        for op in filter(None, (encoder.conv1, encoder.conv2, encoder.shortcut)):
            self.writer.cast_kernel(op)
        for op in self.readers:
            self.writer.cast_kernel(op)
            for part in self.decoder.parts(op):
                blocks.cut_kernel(self.writer, self.decoder, op, part)
        self.hidden("")

        def body(slab: "Slab") -> None:
            y = slab.output(encoder, encoder.conv2.name)
            slab.write(self.pool.name, "pool", [y], self.pool.shape[3], coarser=1)
            for op in self.of_skip:
                slab.convolve(op, y, op.name, self.writer.kept_at(op))

        self.sweep("encoder0/down", body, [encoder.conv2.name])
        self.join(self.pool.name, self.pool, self.pool.name, self.writer.kept_at(self.pool))

    def decode(self) -> None:
        """To the loss, or in inference to the logits."""
        writer, conv1, conv2 = self.writer, self.decoder.conv1, self.decoder.conv2
        for op in (*self.decoder.up[:1], conv2, self.head):
            writer.cast_kernel(op)
        of_skip, of_fine = self.of_skip[0], self.of_fine[0]

        def first(slab: "Slab") -> None:
            share, group = slab.convolve(of_fine, slab.up_sampled(), of_fine.name), writer.kept_at(conv1)
            reads = [share, slab.of(of_skip.name)]
            slab.statistics(conv1, slab.write(conv1.name, "pointwise", reads, conv1.shape[3], group, takes_over=share))

        self.sweep("decoder0/up", first, [of_skip.name], [self.below.name])
        self.second(self.decoder, "", writer.kept_at(conv2))

        def logits(slab: "Slab") -> None:
            found = slab.convolve(self.head, slab.output(self.decoder, conv2.name), f"{self.head.name}/{slab.sweep}")
            if self.learning:
                slab.loss(found)

        self.sweep("decoder0/logits", logits, [conv2.name], ["target"] if self.learning else [])
        if not self.learning:
            self.join(f"{self.head.name}/logits", self.head, self.head.name)

    def hidden(self, suffix: str) -> None:
        """What the encoder's convolutions put out."""
        conv1 = self.encoder.conv1

        def body(slab: "Slab") -> None:
            found = slab.convolve(conv1, slab.view("image"), conv1.name + suffix)
            if not suffix:
                slab.statistics(conv1, found)

        self.sweep(f"encoder0/first{suffix}", body)
        self.second(self.encoder, suffix)

    def second(self, block: Block, suffix: str, group: str = "transients") -> None:
        """What a block's second convolution puts out."""
        source, conv2 = block.conv1.name + suffix, block.conv2

        def body(slab: "Slab") -> None:
            found = slab.convolve(conv2, slab.normed(block.norm1, source), conv2.name + suffix, group)
            if not suffix:
                slab.statistics(conv2, found)

        self.sweep(f"{block.name}/second{suffix}", body, [source])

    # --- Backward ---

    def decode_back(self) -> None:
        """From the loss, slab by slab again: its sums for the norm first."""
        writer, block, hidden2 = self.writer, self.decoder, self.decoder.conv2.name

        def to_output(slab: "Slab") -> str:
            """The gradient of what the norm puts out."""
            y = slab.output(block, hidden2)
            at_logits = slab.slope(slab.convolve(self.head, y, f"{self.head.name}/{slab.sweep}"))
            if slab.sweep == "sums":
                slab.filter_gradient(self.head, y, at_logits)
            at_y = slab.input_gradient(self.head, at_logits, f"{block.norm2.name}/gradient/{slab.sweep}")
            return slab.behind_relu(at_y, y, self.upstreams[1] if slab.sweep == "back" else "") if block.act else at_y

        def sums(slab: "Slab") -> None:
            slab.statistics(block.conv2, to_output(slab), slab.of(hidden2))

        def back(slab: "Slab") -> None:
            slab.below_norm(block.norm2, to_output(slab), hidden2, f"{hidden2}/gradient")

        given = ["target", *([self.below.name] if block.act else [])]
        beside = [op.name for op in self.of_skip[1:]]
        self.sweep("decoder0/sums", sums, own=[hidden2, *beside], given=given)
        self.total(self.head)
        self.sweep("decoder0/back", back, own=[hidden2, *beside], given=given)
        self.through_second(block, "")
        self.through_norm(block.norm1, f"{block.norm1.name}/gradient", block.conv1.name, self.upstreams[0])

        def down(slab: "Slab") -> None:
            slab.up_gradients(slab.gradients(self.of_fine, slab.up_sampled()))

        self.sweep("decoder0/down", down, self.upstreams, [self.below.name])
        for op in (block.up[0], *self.of_fine):
            self.total(op)
        at_below = f"{block.up[0].name}/gradient_below"
        self.join(at_below, self.below, at_below)
        writer.receive(self.below.name, at_below)

    def encode_back(self) -> None:
        """With everything made again from the image."""
        writer, block, hidden2 = self.writer, self.encoder, self.encoder.conv2.name + AGAIN
        at_pooled = writer.arrived(self.pool)
        self.hidden(AGAIN)

        def to_output(slab: "Slab") -> None:
            y, channels = slab.output(block, hidden2), block.norm2.shape[3]
            at_y = slab.gradients(self.of_skip, y)
            pooled = slab.write(f"{self.pool.name}/again", "pool", [y], channels, coarser=1)
            reads = [y, pooled, slab.view(at_pooled)]
            of_pool = slab.write(f"{self.pool.name}/gradient_below", "pool_gradient", reads, channels)
            name = f"{block.norm2.name}/gradient"
            at_y = slab.write(name, "pointwise", [at_y, of_pool], channels, takes_over=at_y)
            if block.act:
                at_y = slab.behind_relu(at_y, y, f"{name}/relu")
                slab.filter_gradient(block.shortcut, slab.view("image"), at_y)
            slab.statistics(block.conv2, at_y, slab.of(hidden2))

        self.sweep("encoder0/output", to_output, [hidden2, *self.upstreams], [at_pooled])
        for op in filter(None, (*self.of_skip, block.shortcut)):
            self.total(op)
        for op in self.readers:
            parts = [filter_gradient_name(part) for part in self.decoder.parts(op)]
            writer.make(filter_gradient_name(op), "join", parts, writer.kernel_bytes(op), "gradients")
        upstream = f"{block.norm2.name}/gradient" + ("/relu" if block.act else "")
        self.through_norm(block.norm2, upstream, hidden2, f"{block.conv2.name}/gradient")
        self.through_second(block, AGAIN)

        def first(slab: "Slab") -> None:
            name, hidden1 = f"{block.conv1.name}/gradient", block.conv1.name + AGAIN
            at_hidden1 = slab.below_norm(block.norm1, slab.of(f"{block.norm1.name}/gradient"), hidden1, name)
            slab.filter_gradient(block.conv1, slab.view("image"), at_hidden1)

        self.sweep("encoder0/image", first, own=[f"{block.norm1.name}/gradient", block.conv1.name + AGAIN])
        self.total(block.conv1)

    def through_second(self, block: Block, suffix: str) -> None:
        """From the gradient of what the second convolution puts out to that of what the first norm does."""
        hidden1, at_hidden2 = block.conv1.name + suffix, f"{block.conv2.name}/gradient"

        def body(slab: "Slab") -> None:
            slab.filter_gradient(block.conv2, slab.normed(block.norm1, hidden1), slab.of(at_hidden2))
            at_y = slab.input_gradient(block.conv2, slab.of(at_hidden2), f"{block.norm1.name}/gradient")
            slab.statistics(block.conv1, at_y, slab.of(hidden1))

        self.sweep(f"{block.name}/second/back", body, [hidden1, at_hidden2])
        self.total(block.conv2)

    def through_norm(self, norm: LayerOp, upstream: str, hidden: str, result: str) -> None:
        """The gradient of a norm's input takes the place of two maps that go."""
        body = lambda slab: slab.below_norm(norm, slab.of(upstream), hidden, result)  # noqa: E731
        self.sweep(f"{norm.name}/back", body, own=[upstream, hidden])

    # --- Sweeps ---

    def sweep(
        self,
        name: str,
        body: Callable[["Slab"], Any],
        near: Sequence[str] = (),
        given: Sequence[str] = (),
        own: Sequence[str] = (),
    ) -> None:
        """`body` slab by slab, which is given its slabs of `own` maps, those and their neighbours' of maps in `near`,
        and views of whole tensors, `given`."""
        for index in range(len(self.pieces)):
            slab = Slab(self, name.partition("/")[2], index)
            with slab.alone():
                body(slab)
            reads = [slab.of(maps) for maps in own] + [f"{maps}/slab{each}" for maps in near for each in slab.around]
            self.writer.run(f"{name}/slab{index}", "fused", [*reads, *given])

    def join(self, maps: str, op: LayerOp, result: str, group: str = "transients") -> None:
        """The slabs of a map like that of `op` become one tensor."""
        parts = [f"{maps}/slab{index}" for index in range(len(self.pieces))]
        self.writer.make(result, "join", parts, self.writer.map_bytes(op), group)

    def total(self, op: LayerOp) -> None:
        """A kernel's gradient, from all slabs' shares."""
        name = filter_gradient_name(op)
        parts = [f"{name}/slab{index}" for index in range(len(self.pieces))]
        self.writer.make(name, "pointwise", parts, self.writer.kernel_bytes(op), "gradients")


class Slab:
    """A slab in a sweep. Its methods write operations down and return the name of what the last one made."""

    def __init__(self, level: FinestLevel, sweep: str, index: int):
        self.level, self.writer, self.sweep, self.index = level, level.writer, sweep, index
        sample, self.planes = level.pieces[index]
        near = range(max(0, index - 1), min(len(level.pieces), index + 2))
        self.around = [other for other in near if level.pieces[other][0] == sample]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """What is written down meanwhile is of one sample; slabs between two others run the same functions again."""
        samples, self.writer.samples = self.writer.samples, 1
        self.writer.again = self.index > 1 and self.index < len(self.level.pieces) - 1
        yield
        self.writer.samples, self.writer.again = samples, False

    def of(self, maps: str) -> str:
        """This slab of a map."""
        return f"{maps}/slab{self.index}"

    def view(self, whole: str) -> str:
        """This slab of a map that is one tensor."""
        return self.writer.view(self.of(whole), whole, len(self.level.pieces))

    def op(self, op: LayerOp) -> LayerOp:
        """A layer on this slab."""
        return replace(op, shape=(self.planes >> op.level, *op.shape[1:]))

    def write(
        self, maps: str, kind: str, reads: Sequence[str], channels: int, group: str = "transients", **more
    ) -> str:
        """This slab of a map, of the finest grid or of one `coarser`, in one pass over memory; else as `Writer.run`."""
        coarser, value_bytes = more.pop("coarser", 0), more.pop("value_bytes", self.writer.compute_bytes)
        voxels = math.prod(n >> coarser for n in (self.planes, *self.level.head.shape[1:3]))
        return self.writer.make(self.of(maps), kind, reads, voxels * channels * value_bytes, group, **more)

    # --- Norms ---

    def normed(self, norm: LayerOp, source: str) -> str:
        """Norm and ReLU, made anew for each sweep that reads them."""
        return self.write(f"{norm.name}/{self.sweep}", "pointwise", [self.of(source)], norm.shape[3])

    def statistics(self, op: LayerOp, *maps: str) -> None:
        """What a norm behind `op` needs of what that put out; its gradient needs it of the gradient behind it too."""
        parts = ("sums", "squares") if self.writer.norm_reads_source else ("sums",)[: len(maps) - 1]
        for part in parts:
            layers.channel_sums(self.writer, self.op(op), f"{maps[0]}/{part}/{self.sweep}", *maps)

    def below_norm(self, norm: LayerOp, upstream: str, hidden: str, result: str) -> str:
        """The gradient of a norm's input, from that behind the ReLU."""
        return self.write(result, "pointwise", [upstream, self.of(hidden)], norm.shape[3])

    def output(self, block: Block, source: str) -> str:
        """Of a block, from what its second convolution put out."""
        y, level = self.normed(block.norm2, source), self.level
        if not block.act:
            return y
        if block.up:
            op, entry, reads = level.of_fine[1], self.up_sampled(), [self.of(level.of_skip[1].name)]
        else:
            op, entry, reads = block.shortcut, self.view("image"), []
        beside = self.convolve(op, entry, f"{op.name}/{self.sweep}")
        name = f"{block.act.name}/{self.sweep}"
        return self.write(name, "pointwise", [y, beside, *reads], op.shape[3], takes_over=y)

    def behind_relu(self, upstream: str, output: str, result: str = "") -> str:
        """Where a ReLU comes after a sum."""
        over, name = None if self.writer.itex else upstream, result or f"{output.partition('/')[0]}/relu/{self.sweep}"
        return self.write(name, "pointwise", [upstream, output], self.level.head.in_channels, takes_over=over)

    # --- Convolutions ---

    def convolve(self, op: LayerOp, source: str, result: str, group: str = "transients") -> str:
        layers.convolve(self.writer, self.op(op), source, self.of(result), group)
        return self.of(result)

    def input_gradient(self, op: LayerOp, upstream: str, result: str) -> str:
        below = replace(self.op(op), shape=(*self.op(op).shape[:3], op.in_channels))
        return layers.input_gradient(self.writer, self.op(op), below, upstream, self.of(result))

    def filter_gradient(self, op: LayerOp, source: str, upstream: str) -> None:
        """A slab's share in it: a two-dimensional one a plane of the kernel, as one."""
        flat = (1, *self.level.head.shape[1:3])
        seen = Convolution(self.planes, flat, flat, op.in_channels, op.shape[3], (1, op.kernel, op.kernel))
        layers.filter_gradient(self.writer, self.op(op), source, upstream, seen, self.of(filter_gradient_name(op)))

    def gradients(self, readers: Sequence[LayerOp], source: str) -> str:
        """Of the kernels that read a map, and of the map."""
        upstreams, total = [self.of(maps) for maps in self.level.upstreams], ""
        for op, upstream in zip(readers, upstreams):
            self.filter_gradient(op, source, upstream)
        for op, upstream in zip(readers, upstreams):
            one, name = self.input_gradient(op, upstream, f"{op.name}/gradient"), f"{op.name}/gradient/sum"
            total = self.write(name, "pointwise", [total, one], op.in_channels, takes_over=total) if total else one
        return total

    def up_sampled(self) -> str:
        """The coarser map on this grid."""
        (up, *nearest), below = self.level.decoder.up, self.view(self.level.below.name)
        name, own = f"{up.name}/{self.sweep}", replace(self.op(up), inputs=(below,))
        if not nearest:
            layers.up_convolve(self.writer, own, self.of(name))
            return self.of(name)
        source, size = self.convolve(up, below, name), self.writer.map_bytes(own)
        for axis in range(3):  # one after the other, each twice as large
            source = self.writer.make(self.of(f"{name}/axis{axis}"), "join", [source], size * 2 ** (axis + 1))
        return source

    def up_gradients(self, upstream: str) -> None:
        """Of the coarser map, and of the kernel it meets."""
        (up, *nearest), below = self.level.decoder.up, self.level.below
        if nearest:
            upstream = self.write(f"{up.name}/mean", "pool", [upstream], up.shape[3], coarser=1)
        share = self.of(filter_gradient_name(up))
        layers.filter_gradient(self.writer, self.op(up), self.view(below.name), upstream, name=share)
        result = self.of(f"{up.name}/gradient_below")
        layers.input_gradient(self.writer, self.op(up), self.op(below), upstream, result)

    # --- The loss ---

    def loss(self, logits: str) -> None:
        """Its sums, in float32."""
        name = f"{self.level.head.name}/loss"

        def make(result: str, *reads: str, over: str = "") -> str:
            more = {"value_bytes": 4, "takes_over": over or None}
            return self.write(f"{name}/{result}", "pointwise", reads, self.level.head.shape[3], **more)

        target = make("target", self.view("target"))
        wide = make("float32", logits) if self.writer.mixed else logits
        for each in (make("products", wide, target), make("softplus", wide)):
            self.writer.run(f"{each}/sum", "reduce", [each])
        probability = make("probability", wide, over=wide)
        overlap = make("overlap", probability, target, over=probability)
        self.writer.run(f"{overlap}/sum", "reduce", [overlap])

    def slope(self, logits: str) -> str:
        """The gradient of the logits, in one pass."""
        head = self.level.head
        return self.write(f"{head.name}/slope/{self.sweep}", "pointwise", [logits, self.view("target")], head.shape[3])


def _pieces(planes: int, samples: int) -> List[Tuple[int, int]]:
    """(sample, planes) of each slab, of MOST_SAMPLES at most, which are then as much larger."""
    height, few = slab_height(planes), min(samples, MOST_SAMPLES)
    firsts = range(0, planes, height)
    return [(n, min(height, planes - first) * samples // few) for n in range(few) for first in firsts]
