"""The training step on paper: the operations of `models/step.py` in their order, with what each reads and makes.

Forward, loss, backward, update. Of a batch in micro-batches the program is one of them, and the update. A validation is
the forward part alone, and its scores.
"""

import math
from dataclasses import replace
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from memory_estimator.job import Job
from memory_estimator.step.program import Program, StepOp
from memory_estimator.step.scratch import Shape, convolve_bytes, filter_gradient_bytes, pass_bytes
from memory_estimator.step.update import reset_sums, update
from memory_estimator.step.writer import Writer, kernel_elements
from models.layer_plan import PIECES, LayerOp

SCORE_MAPS = 5  # float32 maps of a slab that is scored: logits, target, three of the loss's


def training_step(job: Job) -> Program:
    """The program of `job`. Raises ValueError for a shape that the network cannot take."""
    writer = Writer(job)
    reset_sums(writer)
    one = Pass(writer)
    one.slice_filters()
    early = _target_piece(one, Map("head", 0, job.unet.outputs), "target")  # which waits for nothing
    slopes = _supervise(one, one.forward(), early)
    update(writer, one.backward(slopes))
    return writer.program()


def validation_pass(job: Job) -> Tuple[StepOp, ...]:
    """What `cpu3d.training.validation` does with a volume or a window: the network forward, and the scores. Beside what
    lives between steps, the held-out volume that comes next is ready."""
    writer = Writer(replace(job, unet=replace(job.unet, deep_supervision=False), batch=1, micro_batch=1))
    ready = [writer.tensor(f"validation/{tensor.name}", tensor.bytes, "input") for tensor in writer.resident[-2:]]
    writer.run("validation/next", "pass", [], ready)
    (logits,) = Pass(writer, "transients").forward()
    maps = SCORE_MAPS * 4 * writer.job.voxels * logits.channels // PIECES
    reads = [logits.name, "target", *(tensor.name for tensor in ready)]
    scored = writer.tensor("validation/slab", maps)
    writer.run("validation/score", "pass", reads, scratch=(scored,))
    return writer.program().ops


class Map(NamedTuple):
    """A map of a level's grid, by its tensor's name."""

    name: str
    level: int
    channels: int
    of_raw: bool = False  # a gradient of a raw map, not of its values


class Block(NamedTuple):
    """Of a level's block: what its convolutions read and make."""

    entry: List[Map]  # one map, or the skip's and the up-sampled one
    first: Map
    second: Map
    output: Map  # `second`, but with a residual's sum a map of its own


class Pass:
    """One pass over the network, as `models.step.Pass`."""

    def __init__(self, writer: Writer, group: str = ""):
        """`group` is that of its maps; else they are kept for the backward pass."""
        self.writer, self.job, self.unet = writer, writer.job, writer.job.unet
        self._again, self._group = self.unet.policy == "lean", group
        self._parts: Dict[Tuple[str, int], str] = {}
        self._gradients: Dict[str, str] = {}
        self._halves: Dict[str, List[str]] = {}  # gradients of a kernel in parts
        self._encoders: List[Block] = []
        self._decoders: Dict[int, Block] = {}

    def forward(self) -> List[Map]:
        """Logits of each head, the finest first."""
        entry = Map("image", 0, self.unet.channels)
        for level in range(self.unet.depth):
            if level:
                skip = self._encoders[-1].output
                entry = self._map(f"encoder{level}_pool", "pass", [skip], level, skip.channels)
            self._encoders.append(self._block(f"encoder{level}", [entry]))
        below = self._encoders[-1].output
        for level in reversed(range(self.unet.depth - 1)):
            self._decoders[level] = self._decoder(level, below)
            below = self._decoders[level].output
        return [self._project(_head(level), self._decoders[level].output, self.unet.outputs) for level in self._heads()]

    def backward(self, slopes: Sequence[Map]) -> Dict[str, str]:
        """The gradients of the kernels, by their layers, from those of the logits of each head."""
        by_level, depth = dict(zip(self._heads(), slopes)), self.unet.depth
        at_skips: Dict[int, Map] = {}
        at_output: Optional[Map] = None
        for level in range(depth - 1):
            if level in by_level:
                source = self._decoders[level].output
                if at_output or self.unet.residual:
                    at_output = self._project_gradient(_head(level), source, by_level[level], at_output)
                else:
                    at_output = self._project_to_raw(_head(level), source, by_level[level])
            at_skips[level], at_output = self._through_decoder(level, at_output)
        for level in reversed(range(depth)):
            name, block = f"encoder{level}", self._encoders[level]
            if level < depth - 1:
                block = self._block_again(level)
                source, add = block.output, at_skips.pop(level)
                reads = [source, at_output, add]
                at_output = self._map(f"{name}_pool/gradient", "pass", reads, level, source.channels, over=[add])
            at_first, at_sum = self._through_block(name, block, at_output)
            self._kernel_gradient(f"{name}_conv1", block.entry, at_first)
            if level:
                at_output = self._at_entry(name, block.entry, 0, at_first, at_sum)
            elif at_sum:
                self._project_gradient(f"{name}_shortcut", block.entry[0], at_sum)
        for name, halves in reversed(list(self._halves.items())):  # TensorFlow puts this off
            self._whole_gradient(name, "pass", halves)
        return self._gradients

    def slice_filters(self) -> None:
        """Copies of kernels that are made at the step's very beginning: parts that meet a part of what a decoder reads,
        and of up-samplings a 1x1x1 one for all of its taps."""
        for op in sorted(self.writer.kernels, key=lambda op: op.level):
            if not op.name.startswith("decoder"):
                continue
            ups = [past - first for first, past in self.unet.up_parts(op.level - op.name.endswith("_up_conv"))]
            if op.name.endswith(("_conv1", "_shortcut")):
                self._slice(op, [self.unet.encoder_widths(op.level)[1], *ups])
            elif op.name.endswith("_up_conv"):
                self._slice(op, ups, taps=8)
            elif op.name.endswith("_up") and len(ups) > 1:
                self._slice(op, ups)

    def _slice(self, op: LayerOp, widths: Sequence[int], taps: int = 1) -> None:
        for part, width in reversed(list(enumerate(widths))):
            size, name = 4 * taps * kernel_elements(op) * width // sum(widths), f"{op.name}/kernel"
            self._parts[op.name, part] = self.writer.make(f"{name}{part}", "update", [name], size, "weights, parts")

    # --- Forward ---

    def _heads(self) -> List[int]:
        """Levels that have one, as the network's outputs are ordered."""
        return [0, *range(self.unet.depth - 2, 0, -1)] if self.unet.deep_supervision else [0]

    def _decoder(self, level: int, below: Map) -> Block:
        name, first, ups = f"decoder{level}", None, len(self.unet.up_parts(level))
        entry = [self._encoders[level].output]
        if ups == 1:
            return self._block(name, [*entry, self._up_sampled(level, below)])
        for part in range(1 + ups):
            if part:
                entry.append(self._up_sampled(level, below, part - 1))
            first = self._convolved(f"{name}_conv1", entry[part:], part, first)
        return self._block(name, entry, first=first)

    def _block(self, name: str, entry: List[Map], again: bool = False, first: Optional[Map] = None) -> Block:
        more = {"group": "transients" if again else None}
        first = first or self._convolved(f"{name}_conv1", entry, **more)
        second = self._convolved(f"{name}_conv2", [first], **more)
        if not self.unet.residual:
            return Block(entry, first, second, second)
        total = None
        for part, source in enumerate(entry):
            total = self._project(f"{name}_shortcut", source, second.channels, total, part)
        output = self._map(f"{name}_act2", "pass", [second, total], second.level, second.channels, over=[total], **more)
        return Block(entry, first, second, output)

    def _block_again(self, level: int) -> Block:
        """An encoder's block whose sums a gradient reads."""
        block, name = self._encoders[level], f"encoder{level}"
        if not self._again:
            return block
        if not level:
            return self._block(name, block.entry, True)
        return block._replace(first=self._convolved(f"{name}_conv1", block.entry, group="transients"))

    def _skip(self, level: int) -> Map:
        """The encoder's output as the decoder's gradient reads it."""
        return self._encoders[level].output if level else self._block_again(level).output

    def _convolved(
        self, name: str, entry: List[Map], part: Optional[int] = None, add: Optional[Map] = None, **more
    ) -> Map:
        """Of all that a layer reads, or of a part of it; over what it adds to, or else the first map."""
        op, filters = self.writer.layers[name], f"{name}/kernel" if part is None else self._filters(name, part)
        reads = [filters, *([add.name] if add else [])]
        return self._map(name, "convolve", entry, op.level, op.shape[3], reads, [add or entry[0]], **more)

    def _up_sampled(self, level: int, below: Map, part: int = 0, group: Optional[str] = None) -> Map:
        name, (first, past) = self._up_layer(level), self.unet.up_parts(level)[part]
        return self._map(name, "up", [below], level, past - first, [self._filters(name, part)], group=group)

    def _up_layer(self, level: int) -> str:
        return f"decoder{level}_up" + "_conv" * (self.unet.up != "transposed")

    def _project(self, name: str, source: Map, width: int, add: Optional[Map] = None, part: int = 0) -> Map:
        filters, maps = self._filters(name, part), [source, *([add] if add else [])]
        return self._map(name, "project", maps, source.level, width, [filters], maps[1:], "transients")

    def _filters(self, name: str, part: int) -> str:
        """A layer's kernel, or the part of it that meets one of two joined maps."""
        return self._parts.get((name, part), f"{name}/kernel")

    # --- Backward: each takes the gradient of what a block puts out ---

    def _through_decoder(self, level: int, at_output: Map) -> Tuple[Map, Map]:
        """Gradients of the skip's values and of what the level below puts out."""
        name, block = f"decoder{level}", self._decoders[level]
        below = self._decoders[level + 1].output if level + 1 in self._decoders else self._encoders[-1].output
        at_first, at_sum = self._through_block(name, block, at_output)
        if self._again:
            made = self._gradient_map(f"{name}_conv1/to_raw", "pass", at_first, block.first, over=[block.first])
            return self._through_parts(level, below, made._replace(of_raw=True), at_sum)
        self._kernel_gradient(f"{name}_conv1", block.entry, at_first)
        at_up = self._at_entry(name, block.entry, 1, at_first, at_sum)
        at_skip = self._at_entry(name, block.entry, 0, at_first, at_sum)
        return at_skip, self._through_up(level, 0, below, at_up)[1]

    def _through_parts(self, level: int, below: Map, at_first: Map, at_sum: Optional[Map]) -> Tuple[Map, Map]:
        """The same where all that the block reads is made again, a part of the up-sampled map at a time."""
        name, up_name, at_below, of_ups = f"decoder{level}", self._up_layer(level), None, []
        entry = [self._skip(level)]
        of_parts = [self._kernel_gradient(f"{name}_conv1", entry, [at_first], part="/skip")]
        for part in range(len(self.unet.up_parts(level))):
            entry.append(self._up_sampled(level, below, part, "transients"))
            of_parts.append(self._kernel_gradient(f"{name}_conv1", entry[-1:], [at_first], part=f"/up{part}"))
            at_up = self._at_entry(name, entry, part + 1, [at_first], at_sum)
            of_taps, found = self._through_up(level, part, below, at_up)
            of_ups.append(of_taps)
            reads = [found, *([at_below] if at_below else [])]
            at_below = self._gradient_map(f"{name}/below", "pass", reads, below, over=reads) if at_below else found
        self._halves[f"{name}_conv1"] = of_parts
        if len(of_ups) > 1:
            self._halves[up_name] = of_ups
        return self._at_entry(name, entry, 0, [at_first], at_sum), at_below

    def _through_up(self, level: int, part: int, below: Map, at_up: Map) -> Tuple[str, Map]:
        """Gradients of the taps and of what is up-sampled."""
        name = self._up_layer(level)
        of_taps = self._kernel_gradient(name, [below], [at_up], "up")
        return of_taps, self._gradient_map(f"{name}/gradient", "up", [at_up, below], below, [self._filters(name, part)])

    def _through_block(self, name: str, block: Block, at_output: Map) -> Tuple[List[Map], Optional[Map]]:
        """Maps that make the gradient of the first convolution's sum, and the gradient of the residual's sum."""
        at_sum = None
        if self.unet.residual:
            reads = [block.second, block.output, at_output]
            at_sum = at_output = self._gradient_map(f"{name}_act2/gradient", "pass", reads, at_output, over=[at_output])
        at_second = [at_output, block.second][: 1 if at_output.of_raw else 2]
        self._kernel_gradient(f"{name}_conv2", [block.first], at_second)
        at_values = self._input_gradient(f"{name}_conv2", [*at_second, block.first], block.first)
        return [at_values, block.first], at_sum

    def _at_entry(self, name: str, entry: List[Map], part: int, at_first: List[Map], at_sum: Optional[Map]) -> Map:
        """The gradient of the values of a part of what a block reads."""
        at_values = self._input_gradient(f"{name}_conv1", at_first, entry[part], part)
        if not at_sum:
            return at_values
        return self._project_gradient(f"{name}_shortcut", entry[part], at_sum, at_values, part)

    def _input_gradient(self, name: str, reads: List[Map], like: Map, part: int = 0) -> Map:
        """Over the gradient, the first of what it reads; `like` is what the gradient is of."""
        filters = [self._filters(name, part)]
        return self._gradient_map(f"{name}/gradient", "input_gradient", reads, like, filters, reads[:1])

    def _project_gradient(self, name: str, source: Map, gradient: Map, add: Optional[Map] = None, part: int = 0) -> Map:
        """Of the source's values, and of the filters; those of two parts are padded and added up."""
        adds, filters = [add] if add else [], [self._filters(name, part)]
        found = self._gradient_map(f"{name}/gradient", "project", [source, gradient, *adds], source, filters, adds)
        self._whole_gradient(name, "pass", [])
        return found

    def _project_to_raw(self, name: str, source: Map, gradient: Map) -> Map:
        """The gradient of the source's raw map, over that; first the sums that its norm needs."""
        self._whole_gradient(name, "project", [source.name, gradient.name])
        maps, filters = [source, gradient], [f"{name}/kernel"]
        return self._gradient_map(f"{name}/gradient", "project", maps, source, filters, [source])._replace(of_raw=True)

    # --- Writing ---

    def _whole_gradient(self, name: str, kind: str, reads: Sequence[str]) -> None:
        """Where no multiply-adds are counted: they are of the operation beside it, or there are none."""
        size = 4 * kernel_elements(self.writer.layers[name])
        self._gradients[name] = self.writer.make(f"{name}/filter_gradient", kind, reads, size, "gradients")

    def _gradient_map(self, name: str, kind: str, maps: Sequence[Map], like: Map, filters=(), over=()) -> Map:
        return self._map(name, kind, maps, like.level, like.channels, filters, over, "transients")

    def _map(
        self,
        name: str,
        kind: str,
        maps: Sequence[Map],
        level: int,
        channels: int,
        filters: Sequence[str] = (),
        over: Sequence[Map] = (),
        group: Optional[str] = None,
    ) -> Map:
        """An operation that makes a map, from maps and filters."""
        group = group or self._group or f"activations, level {level}"
        # Of two joined maps both are counted; other maps go with the first.
        inputs = sum(one.channels for one in maps) if kind == "convolve" else maps[0].channels
        made = self.writer.make(
            name,
            kind,
            [*(one.name for one in maps), *filters],
            self._voxels(level) * channels * self.writer.value_bytes,
            group,
            over=[one.name for one in over],
            **self._costs(kind, maps[0].level, level, inputs, channels, bool(filters), bool(over)),
        )
        return Map(made, level, channels)

    def _kernel_gradient(
        self, name: str, sources: List[Map], gradient: List[Map], kind: str = "filter_gradient", part: str = ""
    ) -> str:
        """An operation that makes a kernel's gradient, or that of the part of it that meets `sources`."""
        op, maps, inputs = self.writer.layers[name], [*sources, *gradient], sum(one.channels for one in sources)
        self._gradients[name] = self.writer.make(
            f"{name}/filter_gradient{part}",
            kind,
            [one.name for one in maps],
            4 * kernel_elements(op) * inputs * gradient[0].channels // (op.in_channels * op.shape[3]),
            "gradients",
            **self._costs(kind, sources[0].level, gradient[0].level, inputs, gradient[0].channels),
        )
        return self._gradients[name]

    def _voxels(self, level: int) -> int:
        return self.job.micro * math.prod(self._grid(level))

    def _grid(self, level: int) -> Tuple[int, int, int]:
        return tuple(side >> level for side in self.job.shape)

    def _costs(
        self,
        kind: str,
        read_level: int,
        made_level: int,
        inputs: int,
        outputs: int,
        multiplies: bool = True,
        in_place: bool = False,
    ) -> Dict[str, int]:
        """What `StepOp` counts besides tensors: scratch on the finer grid, multiply-adds, as 2, on the coarser one. A
        projection's gradient is two."""
        taps, grid = {"pass": 0, "project": 1, "up": 8}.get(kind, 27), self._grid(min(read_level, made_level))
        shape = Shape(self.job.micro, grid, inputs, outputs, self.writer.value_bytes, self.job.threads)
        if kind == "filter_gradient":
            hidden = filter_gradient_bytes(shape)
        else:
            hidden = convolve_bytes(shape, in_place) if taps == 27 else pass_bytes(shape, taps)
        flops = 2 * taps * self._voxels(max(read_level, made_level)) * inputs * outputs * multiplies
        return {"hidden_bytes": hidden, "flops": flops, "in_channels": inputs, "out_channels": outputs}


def _head(level: int) -> str:
    return f"head{level}" if level else "head"


# --- The loss, as models/supervision.py and cpu3d.training.losses.DiceCrossEntropy have it ---


def _supervise(one: Pass, logits: List[Map], early: str) -> List[Map]:
    """Gradients of each head's logits. Sums of all heads come first, then the slopes. `early` is the first piece of the
    target in float32."""
    targets = []
    for head in logits:
        size = one._voxels(head.level) * head.channels
        name = f"{_head(head.level)}/target"
        targets.append(one.writer.make(name, "loss", ["target"], size) if head.level else "target")
        for piece in range(PIECES):
            _sums(one, head, targets[-1], "" if head.level or piece else early)
    return [_slope(one, head, target) for head, target in zip(logits, targets)]


def _sums(one: Pass, head: Map, target: str, t: str) -> None:
    """Of a piece, whose target `t` is made when it is its turn. Sums that no map is made for take next to no time."""
    z = _logits_piece(one, head)
    one.writer.run(f"{head.name}/softplus/sum", "pass", [_loss_map(one, head, "softplus", [z])])
    t = t or _target_piece(one, head, target)
    one.writer.run(f"{head.name}/product/sum", "pass", [_loss_map(one, head, "product", [z, t])])
    p = _loss_map(one, head, "probability", [z], over=[z])
    one.writer.run(f"{head.name}/overlap/sum", "pass", [_loss_map(one, head, "overlap", [p, t], over=[t])])


def _slope(one: Pass, head: Map, target: str) -> Map:
    """The gradient of a head's logits, piece by piece."""
    found = []
    for _ in range(PIECES):
        z = _logits_piece(one, head)
        p = _loss_map(one, head, "probability", [z], over=[z])
        t = _target_piece(one, head, target)
        slope = _loss_map(one, head, "weighted", [t])
        rest = _loss_map(one, head, "rest", [p])
        slope = _loss_map(one, head, "slope", [rest, slope], over=[rest])
        slope = _loss_map(one, head, "slope", [p, slope], over=[p])
        truth = _loss_map(one, head, "truth", [t], over=[t])
        slope = _loss_map(one, head, "slope", [slope, truth], over=[slope])
        if one.writer.value_bytes == 2:
            slope = _loss_map(one, head, "slope/cast", [slope], value_bytes=2)
        found.append(slope)
    size = one._voxels(head.level) * head.channels * one.writer.value_bytes
    return head._replace(name=one.writer.make(f"{_head(head.level)}/slope", "loss", found, size))


def _target_piece(one: Pass, head: Map, target: str) -> str:
    """In float32, of a copy."""
    return _loss_map(one, head, "target", [_loss_map(one, head, "target/piece", [target], value_bytes=1)])


def _logits_piece(one: Pass, head: Map) -> str:
    """In float32: a copy, or what is made of one."""
    cut = _loss_map(one, head, "logits/piece", [head.name], value_bytes=one.writer.value_bytes)
    return cut if one.writer.value_bytes == 4 else _loss_map(one, head, "logits", [cut])


def _loss_map(one: Pass, head: Map, name: str, reads: List[str], over: Sequence[str] = (), value_bytes: int = 4) -> str:
    """A map of a piece; returns its name."""
    size = value_bytes * one._voxels(head.level) * head.channels // PIECES
    moved = size * (1 + len(reads))  # of whole maps a piece
    return one.writer.make(f"{_head(head.level)}/loss/{name}", "loss", reads, size, over=over, traffic_bytes=moved)
