"""The blocks of models/lean.py, whose backward passes make again what they did not keep.

A block takes the place of its layers in the plan, and its rules are made of theirs. What it makes once more has the
layer's name and a suffix.
"""

import itertools
from dataclasses import dataclass, replace
from typing import List, Optional, Sequence, Tuple, Union

from memory_estimator.closed_form import convolutions, maps, norms
from memory_estimator.closed_form.weights import cast_kernel, filter_gradient_name, kernel_elements, kernel_read
from memory_estimator.closed_form.writer import Writer
from models.layer_plan import LayerOp
from models.policy import keeps_hidden

AGAIN, ONCE_MORE = "/again", "/once_more"
"""Of what a backward pass makes from the inputs, where the convolutions' outputs were not kept; and from them."""


@dataclass(frozen=True)
class Block:
    """One of the network's blocks: an encoder's, or a decoder's with the up-sampling in front of it."""

    name: str
    inputs: Tuple[LayerOp, ...]
    """The entry, or skip and below."""
    up: Tuple[LayerOp, ...]
    """From below to the block's grid: an up-convolution, or a convolution and nearest neighbours."""
    conv1: LayerOp
    norm1: LayerOp
    conv2: LayerOp
    norm2: LayerOp
    shortcut: Optional[LayerOp]
    act: Optional[LayerOp]
    """After the residual sum."""
    keeps_hidden: bool
    kind: str = "block"

    @property
    def output(self) -> LayerOp:
        return self.act or self.norm2

    @property
    def entries(self) -> Tuple[LayerOp, ...]:
        """The layers whose maps the first convolution and the shortcut meet."""
        return (self.inputs[0], self.up[-1]) if self.up else self.inputs

    def parts(self, op: LayerOp) -> List[LayerOp]:
        """The first convolution or the shortcut as one for each of `entries`: their sum is it."""
        if not self.up:
            return [op]
        return [
            replace(
                op,
                name=f"{op.name}/{entry.name}",
                inputs=(entry.name,),
                in_channels=entry.shape[3],
                trainable=op.trainable // op.in_channels * entry.shape[3],
            )
            for entry in self.entries
        ]


def in_blocks(writer: Writer) -> List[Union[LayerOp, Block]]:
    """The plan with a block in place of its layers."""
    found: List[Union[LayerOp, Block]] = []
    for name, layers in itertools.groupby(writer.plan, _block_name):
        group = list(layers)
        found += [_block(writer, name, group)] if len(group) > 1 else group
    return found


def forward(writer: Writer, block: Block) -> None:
    for op in (*block.up[:1], block.conv1, block.conv2, block.shortcut):
        if op:
            cast_kernel(writer, op)
    for op in (block.conv1, block.shortcut):
        if op and block.up:
            _cut_kernel(writer, block, op)
    _hidden1(writer, block, "")
    _output(writer, block, "")
    if block.shortcut:
        _shortcut(writer, block)
        maps.relu_forward(writer, block.act)


def backward(writer: Writer, block: Block) -> None:
    """In one fixed order, with no more maps alive at a time than must be."""
    upstream = writer.arrived(block.output)
    if block.act:
        upstream = maps.relu_gradient(writer, block.act, upstream, block.act.name)
    suffix = "" if block.keeps_hidden else AGAIN
    if not block.keeps_hidden:
        _hidden1(writer, block, AGAIN)
        if norms.gradient_reads(writer, block.norm2):
            _output(writer, block, AGAIN)
    hidden1, hidden2, y2 = (op.name + suffix for op in (block.conv1, block.conv2, block.norm2))
    at_hidden2 = norms.gradient(writer, block.norm2, upstream, hidden2, y2)

    y1 = block.norm1.name + ONCE_MORE
    norms.normalise(writer, block.norm1, hidden1, y1, "transients", alone=not norms.reads_source(writer))
    convolutions.filter_gradient_by_planes(writer, block.conv2, y1, at_hidden2)
    at_y1 = convolutions.input_gradient(writer, block.conv2, block.norm1, at_hidden2)
    at_hidden1 = norms.gradient(writer, block.norm1, at_y1, hidden1, y1)

    readers = [(block.conv1, at_hidden1)] + ([(block.shortcut, upstream)] if block.shortcut else [])
    for index in reversed(range(len(block.entries))):
        _entry_gradients(writer, block, index, readers)
    if block.up:
        for op, _ in readers:
            parts = [filter_gradient_name(part) for part in block.parts(op)]
            whole = writer.tensor(filter_gradient_name(op), kernel_elements(op) * writer.compute_bytes, "gradients")
            writer.run(whole.name, "join", parts, [whole])


# --- Private helpers ---


def _block_name(op: LayerOp) -> str:
    return op.name if op.kind in ("input", "pool", "head") else op.name.partition("_")[0]


def _block(writer: Writer, name: str, layers: Sequence[LayerOp]) -> Block:
    named = {op.name.partition("_")[2]: op for op in layers}
    up = tuple(named[part] for part in ("up_conv", "up") if part in named)
    first = (named["concat"].inputs[0], up[0].inputs[0]) if up else named["conv1"].inputs
    return Block(
        name=name,
        inputs=tuple(writer.layers[source] for source in first),
        up=up,
        conv1=named["conv1"],
        norm1=named["act1"],
        conv2=named["conv2"],
        norm2=named["norm2" if "norm2" in named else "act2"],
        shortcut=named.get("shortcut"),
        act=named["act2"] if "norm2" in named else None,
        keeps_hidden=keeps_hidden(writer.job.unet, bool(up)),
    )


def _cut_kernel(writer: Writer, block: Block, op: LayerOp) -> None:
    """A copy for each of the two maps it meets."""
    for part in block.parts(op):
        copy = writer.tensor(kernel_read(writer, part), kernel_elements(part) * writer.compute_bytes, "weights, parts")
        writer.run(copy.name, "update", [kernel_read(writer, op)], [copy])


def _hidden1(writer: Writer, block: Block, suffix: str) -> None:
    """The first convolution's output."""
    group = writer.kept_at(block.conv1) if block.keeps_hidden else "transients"
    _convolve_entries(writer, block, block.conv1, group, suffix)


def _output(writer: Writer, block: Block, suffix: str) -> None:
    """From there to the second norm's output: what lies between is not kept. Norms that read alone work in place."""
    forward = not suffix
    group = writer.kept_at(block.conv2) if block.keeps_hidden else "transients"
    kept = "transients" if suffix or block.shortcut else writer.kept_at(block.output)
    hidden1, y1, hidden2, y2 = (op.name + suffix for op in (block.conv1, block.norm1, block.conv2, block.norm2))
    norms.normalise(writer, block.norm1, hidden1, y1, "transients", alone=forward and not block.keeps_hidden)
    convolutions.convolve(writer, block.conv2, y1, writer.tensor(hidden2, writer.map_bytes(block.conv2), group))
    alone = (forward and not block.keeps_hidden) or not norms.reads_source(writer)
    norms.normalise(writer, block.norm2, hidden2, y2, kept, alone)


def _convolve_entries(writer: Writer, block: Block, op: LayerOp, group: str, suffix: str) -> None:
    """A convolution for each entry, summed; the up-sampled one is made when its turn comes."""
    parts, size, result = block.parts(op), writer.map_bytes(op), op.name + suffix
    for entry, part in zip(block.entries, parts):
        source = entry.name
        if block.up and entry is block.up[-1]:
            source = _up_sampled(writer, block, suffix)
        output = writer.tensor(result if len(parts) == 1 else part.name + suffix, size, group)
        convolutions.convolve(writer, part, source, output)
    if len(parts) > 1:
        reads = [part.name + suffix for part in parts]
        writer.run(result, "pointwise", reads, [writer.tensor(result, size, group)], takes_over=reads[0])


def _up_sampled(writer: Writer, block: Block, suffix: str) -> str:
    """From below to the block's grid; returns its name."""
    *convolved, last = block.up
    output = writer.transient(last.name + suffix, writer.map_bytes(last))
    if not convolved:
        convolutions.up_convolve(writer, last, output)
        return output.name
    coarse = writer.transient(convolved[0].name + suffix, writer.map_bytes(convolved[0]))
    convolutions.convolve(writer, convolved[0], convolved[0].inputs[0], coarse)
    maps.upsample(writer, last, coarse.name, output)
    return output.name


def _shortcut(writer: Writer, block: Block) -> None:
    """The entries convolved, and added to the block's maps: one sum of all."""
    parts, size = block.parts(block.shortcut), writer.map_bytes(block.shortcut)
    convolved = []
    for entry, part in zip(block.entries, parts):
        output = writer.transient(f"{part.name}/convolved", size)
        convolutions.convolve(writer, part, entry.name, output)
        convolved.append(output.name)
    writer.sum_of(block.shortcut.name, [*convolved, block.norm2.name], size)


def _entry_gradients(writer: Writer, block: Block, index: int, readers: Sequence[Tuple[LayerOp, str]]) -> None:
    """Of the kernels that meet an entry, and of the entry: the up-sampled one's goes on to the coarser grid at once."""
    entry = block.entries[index]
    up_sampled = bool(block.up) and index == 1
    source = _up_sampled(writer, block, ONCE_MORE) if up_sampled else entry.name
    meets = [(block.parts(op)[index], upstream) for op, upstream in readers]
    for part, upstream in meets:
        convolutions.filter_gradient_by_planes(writer, part, source, upstream)
    if entry.kind == "input":
        return
    downs = [convolutions.input_gradient(writer, part, entry, upstream) for part, upstream in meets]
    if not up_sampled:
        writer.receive(entry.name, *downs)
        return
    down = writer.sum_of(f"{entry.name}/gradient", downs, writer.map_bytes(entry))
    *convolved, last = block.up
    if not convolved:
        down = convolutions.up_gradients(writer, last, down)
    else:
        coarse = maps.upsample_gradient(writer, last, down)
        convolutions.filter_gradient(writer, convolved[0], block.inputs[1].name, coarse)
        down = convolutions.input_gradient(writer, convolved[0], block.inputs[1], coarse)
    writer.receive(block.inputs[1].name, down)
