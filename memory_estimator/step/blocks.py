"""The blocks of models/recomputed.py, whose backward passes make again what they did not keep: in place of their
layers in the plan, with rules made of theirs.
"""

import itertools
from dataclasses import dataclass, replace
from typing import List, Optional, Tuple, Union

from memory_estimator.step import layers
from memory_estimator.step.writer import Writer, filter_gradient_name
from models.layer_plan import LayerOp


@dataclass(frozen=True)
class Block:
    """One of the network's blocks: an encoder's, or a decoder's with the up-sampling in front of it."""

    name: str
    inputs: Tuple[LayerOp, ...]  # the entry, or skip and below
    up: Tuple[
        LayerOp, ...
    ]  # from below to the block's grid: an up-convolution, or a convolution and nearest neighbours
    conv1: LayerOp
    norm1: LayerOp
    conv2: LayerOp
    norm2: LayerOp
    shortcut: Optional[LayerOp]
    act: Optional[LayerOp]  # after the residual sum
    kind: str = "block"

    @property
    def entries(self) -> Tuple[LayerOp, ...]:
        """The layers whose maps the first convolution and the shortcut meet."""
        return (self.inputs[0], self.up[-1]) if self.up else self.inputs

    def parts(self, op: LayerOp) -> List[LayerOp]:
        """The first convolution or the shortcut as one for each of `entries`: their sum is it."""
        if not self.up:
            return [op]
        found, trainable = [], op.trainable // op.in_channels
        for entry in self.entries:
            own = {"in_channels": entry.shape[3], "trainable": trainable * entry.shape[3]}
            found.append(replace(op, name=f"{op.name}/{entry.name}", inputs=(entry.name,), **own))
        return found


def steps(writer: Writer) -> List[Union[LayerOp, Block]]:
    """The plan with a block in place of its layers."""
    found: List[Union[LayerOp, Block]] = []
    single = ("input", "pool", "head")
    groups = itertools.groupby(writer.plan, lambda op: op.name if op.kind in single else op.name.partition("_")[0])
    for name, group in groups:
        members = list(group)
        if members[0].kind in single:
            found += members
            continue
        named = {op.name.partition("_")[2]: op for op in members}
        up = tuple(named[part] for part in ("up_conv", "up") if part in named)
        first = (named["concat"].inputs[0], up[0].inputs[0]) if up else named["conv1"].inputs
        inputs, maps = tuple(writer.layers[source] for source in first), (named["conv1"], named["act1"], named["conv2"])
        # A residual block's second norm is alone, and its ReLU comes after the sum.
        ends = (named["norm2"], named["shortcut"], named["act2"]) if "norm2" in named else (named["act2"], None, None)
        found.append(Block(name, inputs, up, *maps, *ends))
    return found


def forward(writer: Writer, block: Block) -> None:
    """All kernels are cast first; of the maps, the block's output stays and, where it keeps them, the hidden ones."""
    for op in filter(None, (*block.up[:1], block.conv1, block.conv2, block.shortcut)):
        writer.cast_kernel(op)
    _hidden1(writer, block)
    _output(writer, block, again=False)
    if block.shortcut:
        convolved = []
        for entry, part in zip(block.entries, block.parts(block.shortcut)):
            cut_kernel(writer, block, block.shortcut, part)
            convolved.append(layers.convolve(writer, part, entry.name))
        # A norm's result is a view of what it wrote, over which nothing is written.
        over = convolved[0] if writer.norm_reads_source else block.norm2.name
        writer.sum_of(block.shortcut.name, [*convolved, block.norm2.name], writer.map_bytes(block.shortcut), over)
        layers.forward(writer, block.act)


def backward(writer: Writer, block: Block) -> None:
    """Makes again what was not kept, then goes from layer to layer as `layers.backward` does."""
    upstream = writer.arrived(block.act or block.norm2)
    if block.act:
        upstream = layers.relu_gradient(writer, block.act, upstream)
    if not block.up:
        _hidden1(writer, block)
        if writer.norm_reads_source or block.norm2.kind == "norm_act":  # a bias' gradient alone reads no map
            _output(writer, block, again=True)
    conv1, norm1, conv2 = block.conv1, block.norm1, block.conv2
    at_hidden2 = layers.norm_gradient(writer, block.norm2, upstream, conv2.name)

    layers.normalise(writer, norm1, conv1.name, "transients", alone=not writer.norm_reads_source)
    layers.filter_gradient_by_planes(writer, conv2, norm1.name, at_hidden2)
    at_y1 = layers.input_gradient(writer, conv2, at_hidden2)
    at_hidden1 = layers.norm_gradient(writer, norm1, at_y1, conv1.name)

    readers = [(conv1, at_hidden1)] + ([(block.shortcut, upstream)] if block.shortcut else [])
    # Of the kernels that meet an entry, and of the entry: the up-sampled one's goes on to the coarser grid at once.
    for index, entry in reversed(list(enumerate(block.entries))):
        up_sampled = bool(block.up) and index == 1
        source = _up_sampled(writer, block) if up_sampled else entry.name
        meets = [(block.parts(op)[index], at_op) for op, at_op in readers]
        for part, at_op in meets:
            layers.filter_gradient_by_planes(writer, part, source, at_op)
        if entry.kind == "input":
            continue
        downs = [layers.input_gradient(writer, part, at_op) for part, at_op in meets]
        if up_sampled:
            _up_gradients(writer, block, writer.sum_of(f"{entry.name}/gradient", downs, writer.map_bytes(entry)))
        else:
            writer.receive(entry.name, *downs)
    for op, _ in reversed(readers) if block.up else ():
        join_gradients(writer, block, op)
        writer.gradient_done(op)


def join_gradients(writer: Writer, block: Block, op: LayerOp) -> None:
    """A kernel's gradient, of those of its parts."""
    parts = [filter_gradient_name(part) for part in block.parts(op)]
    writer.make(filter_gradient_name(op), "join", parts, writer.kernel_bytes(op), "gradients")


def _hidden1(writer: Writer, block: Block) -> None:
    """The first convolution's output: one for each entry, summed; the up-sampled one is made when its turn comes."""
    op, group = block.conv1, writer.kept_at(block.conv1) if block.up else "transients"
    shares = []
    for entry, part in zip(block.entries, block.parts(op)):
        cut_kernel(writer, block, op, part)
        source = _up_sampled(writer, block) if block.up and entry is block.up[-1] else entry.name
        shares.append(layers.convolve(writer, part, source, group))
    if len(shares) > 1:
        writer.make(op.name, "pointwise", shares, writer.map_bytes(op), group, takes_over=shares[0])


def cut_kernel(writer: Writer, block: Block, op: LayerOp, part: LayerOp) -> None:
    """A decoder's kernel is copied for each of the two maps that it meets, once the map before has been convolved."""
    if block.up:
        reads, size = [writer.kernel_read(op)], writer.kernel_bytes(part)
        writer.make(writer.kernel_read(part), "update", reads, size, "weights, parts")


def _output(writer: Writer, block: Block, again: bool) -> None:
    """From there to the second norm's output: what lies between is not kept. Norms that read alone work in place."""
    group = writer.kept_at(block.conv2) if block.up else "transients"
    kept = "transients" if again or block.shortcut else writer.kept_at(block.norm2)
    alone = not again and not block.up
    layers.normalise(writer, block.norm1, block.conv1.name, "transients", alone)
    layers.convolve(writer, block.conv2, block.norm1.name, group)
    layers.normalise(writer, block.norm2, block.conv2.name, kept, alone or not writer.norm_reads_source)


def _up_sampled(writer: Writer, block: Block) -> str:
    """From below to the block's grid; returns its name."""
    *convolved, last = block.up
    below = block.inputs[1].name
    if convolved:
        return layers.resample(writer, last, layers.convolve(writer, convolved[0], below))
    return layers.up_convolve(writer, last, below)


def _up_gradients(writer: Writer, block: Block, down: str) -> None:
    """From the up-sampled map's gradient to that of what lies below."""
    *convolved, last = block.up
    op, below = block.up[0], block.inputs[1].name
    if convolved:
        down = layers.resample(writer, last, down, back=True)
    writer.receive(below, layers.up_gradients(writer, op, below, down))
