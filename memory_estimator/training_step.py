"""The closed form: the training step of `cpu3d.learner`, written down from the layer plan with its tensors' lifetimes.

Whatever the network, the step is the same five parts: targets cast, forward, loss, backward in reverse, update.
`models/ordered.py` fixes the order of the backward pass; which gradient reads what follows from the layer's kind.
Engines differ in what they fuse, in what they keep for a gradient beside the maps, and in what they write in place;
each such rule names the engine. All of it was read off the allocator's log and is held against it by tests.
"""

import math
from typing import Dict, List, Optional, Sequence, Tuple

from memory_estimator.job import Job
from memory_estimator.program import Program, StepOp, Tensor
from memory_estimator.scratch import (
    FilterGradient,
    filter_gradient_bytes,
    filter_gradient_touched,
    hidden_filter_gradient_bytes,
    hidden_up_convolution_bytes,
    up_convolution_bytes,
)
from models.layer_plan import LayerOp, layer_plan

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}

SLOTS = {"adam": 2, "sgd": 1}
"""Float32 copies of every trainable weight that the optimizer keeps: mean and variance, or momentum."""

MOST_PARTS = 8

CONVOLUTIONS = ("conv", "head", "up_conv", "shortcut")


def training_step(job: Job) -> Program:
    """The program of `job`. Raises ValueError for a shape that the network cannot take."""
    step = _Step(job)
    step.prepare()
    step.cast_targets()
    for op in step.plan:
        step.forward(op)
    step.loss()
    for op in reversed(step.plan):
        step.backward(op)
    step.update()
    return step.program()


# --- Private helpers ---


class _Step:
    """Writes the program down, operation by operation."""

    def __init__(self, job: Job):
        self.job = job
        self.plan = layer_plan(job.unet, job.shape)
        self.by_name = {op.name: op for op in self.plan}
        self.itex = job.engine == "itex"
        self.mixed = job.unet.dtype == "bfloat16"
        self.compute = DTYPE_BYTES[job.unet.dtype]
        self.before: List[StepOp] = []
        self.ops: List[StepOp] = []
        self.resident: List[Tensor] = []
        self.tensors: Dict[str, Tensor] = {}
        self.upstream: Dict[str, str] = {}
        """Layer -> the tensor that holds the gradient of its output."""
        self.gradients: List[str] = []

    def program(self) -> Program:
        return Program(tuple(self.resident), tuple(self.ops), tuple(self.before))

    # --- The vocabulary of the parts below ---

    def tensor(self, name: str, size_bytes: int, group: str) -> Tensor:
        tensor = Tensor(name, size_bytes, group)
        self.tensors[name] = tensor
        return tensor

    def run(
        self,
        name: str,
        kind: str,
        reads: Sequence[str],
        writes: Sequence[Tensor] = (),
        *,
        scratch: Sequence[int] = (),
        touched: Tuple[Tuple[int, int], ...] = (),
        takes_over: Optional[str] = None,
        keeps: Sequence[Tensor] = (),
        hidden_bytes: int = 0,
        flops: int = 0,
        layer: Optional[LayerOp] = None,
    ) -> None:
        """Add an operation; its traffic is what it reads and writes, each once. `touched` is of the first scratch."""
        traffic = sum(self.tensors[read].bytes for read in reads) + sum(tensor.bytes for tensor in writes)
        self.ops.append(
            StepOp(
                name,
                kind,
                tuple(reads),
                tuple(writes),
                tuple(
                    Tensor(f"{name}/scratch{i}", size, "scratch", () if i else touched)
                    for i, size in enumerate(scratch)
                    if size
                ),
                takes_over,
                tuple(keeps),
                hidden_bytes,
                flops,
                traffic,
                layer.in_channels if layer else 0,
                layer.shape[3] if layer else 0,
            )
        )

    def map_bytes(self, op: LayerOp) -> int:
        return self.job.batch * op.elements * DTYPE_BYTES[op.dtype]

    def activation(self, op: LayerOp, suffix: str = "", parts: int = 1) -> Tensor:
        return self.tensor(op.name + suffix, self.map_bytes(op) // parts, f"activations, level {op.level}")

    def transient(self, name: str, size_bytes: int) -> Tensor:
        return self.tensor(name, size_bytes, "transients")

    def kernel(self, op: LayerOp) -> str:
        """The name of the kernel that the convolution reads: the variable, or its bfloat16 copy."""
        return f"{op.name}/kernel_cast" if self.mixed else f"{op.name}/kernel"

    def kernel_elements(self, op: LayerOp) -> int:
        """Without the bias."""
        return op.trainable - (op.shape[3] if op.kind == "head" else 0)

    def reordered(self, op: LayerOp) -> int:
        """Bytes of a kernel in the layout that oneDNN prefers."""
        return self.kernel_elements(op) * self.compute

    # --- Before the first step ---

    def prepare(self) -> None:
        """Weights by Glorot's three operations, slots as zeros, the batch: in the order that `Learner` makes them."""
        weights = [(op, self.kernel_elements(op)) for op in self.plan if op.kind in CONVOLUTIONS]
        for op, elements in weights:
            names = [f"{op.name}/{part}" for part in ("uniform", "scaled", "kernel")]
            uniform, scaled, kernel = (self.tensor(name, 4 * elements, "weights") for name in names)
            self.before.append(StepOp(uniform.name, "update", writes=(uniform,)))
            self.before.append(StepOp(scaled.name, "update", (uniform.name,), (scaled,)))
            self.before.append(StepOp(kernel.name, "update", (uniform.name, scaled.name), (kernel,)))
            self.resident.append(kernel)
        small = sum(op.trainable + op.frozen for op in self.plan) - sum(elements for _, elements in weights)
        self.resident.append(self.tensor("norms and biases", 4 * small, "weights"))
        copies = [("optimizer slots", f"slot{slot}") for slot in range(SLOTS[self.job.optimizer])]
        copies = [(group, suffix, op, n) for op, n in weights for group, suffix in copies]
        if self.job.averaged:
            copies += [("averaged weights", "average", op, n) for op, n in weights]
        for group, suffix, op, elements in copies:
            copy = self.tensor(f"{op.name}/{suffix}", 4 * elements, group)
            self.before.append(StepOp(copy.name, "update", writes=(copy,)))
            self.resident.append(copy)
        trained = sum(op.trainable for op in self.plan) - sum(elements for _, elements in weights)
        slots = SLOTS[self.job.optimizer]
        self.resident.append(self.tensor("slots of norms and biases", 4 * slots * trained, "optimizer slots"))
        unet, voxels = self.job.unet, self.job.voxels
        self._make_inputs()

    def _make_inputs(self) -> None:
        """As `bench memory` makes them. What `train` reads from a store comes another way, with less in between."""
        unet, voxels = self.job.unet, self.job.voxels
        image = self.tensor("image", self.compute * voxels * unet.channels, "input")
        target = self.tensor("target", voxels * unet.outputs, "input")
        noise, scaled = (Tensor(f"image/{part}", 4 * voxels * unet.channels, "input") for part in ("noise", "scaled"))
        shifted = Tensor("image/shifted", noise.bytes, "input") if self.mixed else image
        drawn, hits = Tensor("target/drawn", 4 * target.bytes, "input"), Tensor("target/hits", target.bytes, "input")
        made = [
            (noise,),
            (scaled, noise),
            (shifted, scaled, noise),
            (drawn,),
            *([(image,)] if self.mixed else []),
            (hits,),
            (target, hits),
            (None, shifted, drawn) if self.mixed else (None, drawn),
        ]
        for written, *read in made:
            name = written.name if written else "inputs made"
            names = tuple(tensor.name for tensor in read)
            self.before.append(StepOp(name, "pointwise", names, (written,) if written else ()))
        self.resident += [image, target]

    # --- The step's parts ---

    def cast_targets(self) -> None:
        """Each head's target in float32, which the loss keeps."""
        for op in self.plan:
            if op.kind == "head":
                elements, target = self.job.batch * op.elements, "target"
                if op.level:
                    target = f"{op.name}/target/uint8"
                    self.run(target, "slice", ["target"], [self.transient(target, elements)])
                copy = self.transient(f"{op.name}/target", 4 * elements)
                self.run(copy.name, "pointwise", [target], [copy])

    def forward(self, op: LayerOp) -> None:
        if self.mixed and op.kind in CONVOLUTIONS:
            cast = self.tensor(self.kernel(op), 2 * self.kernel_elements(op), "weights, bfloat16 copies")
            self.run(cast.name, "update", [f"{op.name}/kernel"], [cast])
        if op.kind != "input":
            getattr(self, f"_{op.kind}")(op)

    def backward(self, op: LayerOp) -> None:
        if op.kind != "input":
            getattr(self, f"_{op.kind}_backward")(op)

    def loss(self) -> None:
        """Soft Dice and cross-entropy as `cpu3d.losses` computes them: float32 maps of the regions."""
        for op in self.plan:
            if op.kind == "head":
                self._loss(op)

    def update(self) -> None:
        """All gradients cast and squared, then weight by weight: a temporary of the weight's size at a time."""
        weights = [op for op in self.plan if op.kind in CONVOLUTIONS]
        for op in weights:
            size = 4 * self.kernel_elements(op)
            gradient = f"{op.name}/filter_gradient"
            if self.mixed:
                cast = self.tensor(f"{gradient}/float32", size, "gradients")
                self.run(cast.name, "update", [gradient], [cast])
            if self.job.optimizer == "adam":
                square = self.tensor(f"{op.name}/square", size, "transients")
                self.run(square.name, "update", [self._final_gradient(op)], [square])
        for op in weights:
            reads = [self._final_gradient(op)] + [f"{op.name}/slot{slot}" for slot in range(SLOTS[self.job.optimizer])]
            reads += [f"{op.name}/square"] if self.job.optimizer == "adam" else []
            step = self.transient(f"{op.name}/update", 4 * self.kernel_elements(op))
            self.run(step.name, "update", [*reads, f"{op.name}/kernel"], [step])

    def _final_gradient(self, op: LayerOp) -> str:
        return f"{op.name}/filter_gradient" + ("/float32" if self.mixed else "")

    # --- Convolutions ---

    def _conv(self, op: LayerOp) -> None:
        self._convolve(op, op.inputs[0], self.activation(op))

    _head = _conv

    def _conv_backward(self, op: LayerOp) -> None:
        upstream = self.upstream.pop(op.name)
        if op.kind == "head":
            self.run(f"{op.name}/bias_gradient", "reduce", [upstream])
        self._convolution_gradients(op, op.inputs[0], upstream)

    _head_backward = _conv_backward

    def _convolve(self, op: LayerOp, source: str, output: Tensor) -> None:
        """ITEX keeps the reordered kernel."""
        kept = [self.tensor(f"{op.name}/reordered", self.reordered(op), "weights, reordered")] if self.itex else []
        flops = self.job.batch * op.flops
        self.run(output.name, "conv", [source, self.kernel(op)], [output], keeps=kept, flops=flops, layer=op)

    def _convolution_gradients(self, op: LayerOp, source: str, upstream: str) -> None:
        below, flops = self.by_name[source], self.job.batch * op.flops
        grid = op.shape[:3]
        seen = FilterGradient(self.job.batch, grid, grid, below.shape[3], op.shape[3], op.kernel, 1, False)
        self._filter_gradient(op, "conv_filter_gradient", source, upstream, seen, flops)
        if below.kind == "input":
            return
        down = self.transient(f"{op.name}/input_gradient", self.map_bytes(below))
        scratch = [self.reordered(op)] if self.itex else []
        reads = [upstream, self.kernel(op)]
        self.run(down.name, "conv_input_gradient", reads, [down], scratch=scratch, flops=flops, layer=op)
        self._receive(below, down.name)

    def _up_conv(self, op: LayerOp) -> None:
        scratch = [self.reordered(op)] if self.itex else []
        below = self.by_name[op.inputs[0]]
        buffers = up_convolution_bytes(below.elements * self.compute, self.job.threads)
        self.run(
            op.name,
            "up_conv",
            [*op.inputs, self.kernel(op)],
            [self.activation(op)],
            scratch=[buffers, *scratch] if self.itex else [],
            hidden_bytes=0 if self.itex else hidden_up_convolution_bytes(below.elements * self.compute),
            flops=self.job.batch * op.flops,
            layer=op,
        )

    def _up_conv_backward(self, op: LayerOp) -> None:
        below, upstream = self.by_name[op.inputs[0]], self.upstream.pop(op.name)
        flops = self.job.batch * op.flops
        seen = FilterGradient(self.job.batch, op.shape[:3], below.shape[:3], op.shape[3], below.shape[3], 2, 2, False)
        self._filter_gradient(op, "up_conv_filter_gradient", below.name, upstream, seen, flops)
        down = self.transient(f"{op.name}/input_gradient", self.map_bytes(below))
        kept = [self.tensor(f"{op.name}/reordered", self.reordered(op), "weights, reordered")] if self.itex else []
        reads = [upstream, self.kernel(op)]
        self.run(down.name, "up_conv_input_gradient", reads, [down], keeps=kept, flops=flops, layer=op)
        self._receive(below, down.name)

    def _filter_gradient(
        self, op: LayerOp, kind: str, below: str, upstream: str, seen: FilterGradient, flops: int
    ) -> None:
        """ITEX takes oneDNN's scratch from the allocator, stock TensorFlow leaves it to oneDNN."""
        gradient = self.tensor(f"{op.name}/filter_gradient", self.kernel_elements(op) * self.compute, "gradients")
        buffers = filter_gradient_bytes(seen, self.job.unet.dtype, self.job.threads)
        hidden = hidden_filter_gradient_bytes(seen, self.job.unet.dtype, self.job.threads)
        self.run(
            gradient.name,
            kind,
            [below, upstream],
            [gradient],
            scratch=[buffers, self.reordered(op)] if self.itex else [],
            touched=filter_gradient_touched(seen, self.job.unet.dtype, self.job.threads),
            hidden_bytes=0 if self.itex else hidden,
            flops=flops,
            layer=op,
        )
        self.gradients.append(gradient.name)

    def _receive(self, op: LayerOp, gradient: str) -> None:
        """Take a gradient for a layer's output; a second one is added to the later of the two, in place."""
        if op.kind == "input":
            return
        first = self.upstream.get(op.name)
        if first is not None:
            total = self.transient(f"{op.name}/gradient", self.map_bytes(op))
            self.run(total.name, "pointwise", [first, gradient], [total], takes_over=gradient)
            gradient = total.name
        self.upstream[op.name] = gradient

    # --- Norm and ReLU ---

    def _norm_act(self, op: LayerOp) -> None:
        """One fused operation a sample (instance) or batch; its mask of positive values is kept for the gradient."""
        source, samples, kept = op.inputs[0], self._samples(), f"activations, level {op.level}"
        if self.job.unet.norm == "none":
            return self.run(op.name, "pointwise", [source], [self._normed(op)], takes_over=source)
        for sample in reversed(range(samples)):
            part = f"/sample{sample}" if samples > 1 else ""
            writes = [self._normed(op, part, samples)]
            if op.kind == "norm_act":
                mask = self.tensor(f"{op.name}/mask{sample}", self._mask_bytes(op) // samples, kept)
                writes = [*writes, mask] if self.itex else [mask, *writes]
            self.run(f"{op.name}{part}", self._norm_kind(op), [source], writes)
        if samples > 1:
            parts = [f"{op.name}/sample{sample}" for sample in range(samples)]
            self.run(op.name, "join", parts, [self._normed(op)])

    _norm = _norm_act

    def _norm_act_backward(self, op: LayerOp) -> None:
        source, upstream = self.by_name[op.inputs[0]], self.upstream.pop(op.name)
        size, samples, down = self.map_bytes(op), self._samples(), f"{op.name}/gradient_below"
        if self.job.unet.norm == "none":
            if op.kind == "norm_act":
                over = None if self.itex else upstream
                self.run(down, "pointwise", [upstream, op.name], [self.transient(down, size)], takes_over=over)
                upstream = down
            return self._receive(source, upstream)
        if samples == 1:
            self._norm_gradient(op, "0", upstream, source.name, op.name, down, size)
            return self._receive(source, down)
        for sample in reversed(range(samples)):
            cut = self.transient(f"{op.name}/slice{sample}", size // samples)
            self.run(cut.name, "slice", [upstream], [cut])
            output, part = f"{op.name}/sample{sample}", f"{down}/sample{sample}"
            self._norm_gradient(op, str(sample), cut.name, source.name, output, part, size // samples)
        parts = [f"{down}/sample{sample}" for sample in range(samples)]
        self.run(down, "join", parts, [self.transient(down, size)])
        self._receive(source, down)

    _norm_backward = _norm_act_backward

    def _norm_gradient(
        self, op: LayerOp, sample: str, upstream: str, source: str, output: str, down: str, size: int
    ) -> None:
        """ITEX takes ReLU and norm at once; stock TensorFlow takes the ReLU first, in place."""
        reads = [upstream, source]
        if op.kind == "norm_act":
            mask = f"{op.name}/mask{sample}"
            if self.itex:
                reads += [output, mask]
            else:
                passed = self.transient(f"{down}/relu", size)
                self.run(passed.name, "pointwise", [upstream, output], [passed], takes_over=upstream)
                reads = [passed.name, source, mask]
        self.run(down, f"{self._norm_kind(op)}_gradient", reads, [self.transient(down, size)])

    def _normed(self, op: LayerOp, part: str = "", parts: int = 1) -> Tensor:
        """A norm's output is kept where a ReLU is in it; before a sum it is not."""
        if op.kind == "norm_act":
            return self.activation(op, part, parts)
        return self.transient(op.name + part, self.map_bytes(op) // parts)

    def _samples(self) -> int:
        """Instance norm takes a batch apart: one operation a sample. Beyond MOST_PARTS they are counted as larger ones,
        which changes next to nothing and keeps the program short."""
        return min(self.job.batch, MOST_PARTS) if self.job.unet.norm == "instance" else 1

    def _mask_bytes(self, op: LayerOp) -> int:
        """A bit a value where oneDNN's vector kernel runs, else a byte; stock TensorFlow reserves four times that."""
        elements = self.job.batch * op.elements
        return (elements if self._is_narrow(op) else elements // 8) * (1 if self.itex else 4)

    def _norm_kind(self, op: LayerOp) -> str:
        return "narrow_norm" if self._is_narrow(op) else "norm"

    def _is_narrow(self, op: LayerOp) -> bool:
        """Whether channels leave part of a vector empty: oneDNN then norms with a kernel ten times as slow."""
        return op.shape[3] % (16 if self.mixed else 8) != 0

    # --- The residual way ---

    def _shortcut(self, op: LayerOp) -> None:
        maps, entry = op.inputs
        added = self.transient(f"{op.name}/convolved", self.map_bytes(op))
        self._convolve(op, entry, added)
        total = self.transient(op.name, self.map_bytes(op))
        self.run(op.name, "pointwise", [maps, added.name], [total], takes_over=maps)

    def _shortcut_backward(self, op: LayerOp) -> None:
        """The short way first; the long way then reads the same gradient."""
        maps, entry = op.inputs
        upstream = self.upstream.pop(op.name)
        self._convolution_gradients(op, entry, upstream)
        self.upstream[maps] = upstream

    def _act(self, op: LayerOp) -> None:
        self.run(op.name, "pointwise", op.inputs, [self.activation(op)], takes_over=op.inputs[0])

    def _act_backward(self, op: LayerOp) -> None:
        upstream, down = self.upstream.pop(op.name), f"{op.name}/gradient_below"
        over = None if self.itex else upstream
        self.run(down, "pointwise", [upstream, op.name], [self.transient(down, self.map_bytes(op))], takes_over=over)
        self._receive(self.by_name[op.inputs[0]], down)

    # --- Everything else ---

    def _upsample(self, op: LayerOp) -> None:
        """Axis by axis: Keras cuts the map into planes and joins each plane twice."""
        self._resample(op, op.inputs[0], op.name, [1, 2, 4, 8])

    def _upsample_backward(self, op: LayerOp) -> None:
        down = f"{op.name}/gradient_below"
        self._resample(op, self.upstream.pop(op.name), down, [8, 4, 2, 1])
        self._receive(self.by_name[op.inputs[0]], down)

    def _resample(self, op: LayerOp, source: str, result: str, sizes: Sequence[int]) -> None:
        grows = sizes[0] == 1
        for axis, (now, then) in enumerate(zip(sizes, sizes[1:])):
            planes = self.job.shape[axis] // 2**op.level // (2 if grows else 1)
            pieces = [
                self.transient(f"{result}/axis{axis}/plane{plane}", self.map_bytes(op) * now // 8 // planes)
                for plane in range(planes)
            ]
            self.run(f"{result}/cut{axis}", "slice", [source], pieces)
            last = then == sizes[-1]
            size = self.map_bytes(op) * then // 8
            joined = self.activation(op) if last and grows else self.transient(result + (f"/{axis}" * (not last)), size)
            self.run(f"{result}/join{axis}", "join", [piece.name for piece in pieces], [joined])
            source = joined.name

    def _pool(self, op: LayerOp) -> None:
        winners = self.tensor(f"{op.name}/winners", self.job.batch * op.elements, f"activations, level {op.level}")
        self.run(op.name, "pool", op.inputs, [self.activation(op), winners])

    def _pool_backward(self, op: LayerOp) -> None:
        below, upstream = self.by_name[op.inputs[0]], self.upstream.pop(op.name)
        down = self.transient(f"{op.name}/gradient_below", self.map_bytes(below))
        self.run(down.name, "pool_gradient", [upstream, below.name, op.name, f"{op.name}/winners"], [down])
        self._receive(below, down.name)

    def _concat(self, op: LayerOp) -> None:
        self.run(op.name, "join", op.inputs, [self.activation(op)])

    def _concat_backward(self, op: LayerOp) -> None:
        upstream = self.upstream.pop(op.name)
        for name in op.inputs:
            part = self.transient(f"{op.name}/gradient_of_{name}", self.map_bytes(self.by_name[name]))
            self.run(part.name, "slice", [upstream], [part])
            self._receive(self.by_name[name], part.name)

    def _loss(self, head: LayerOp) -> None:
        size = 4 * self.job.batch * head.elements
        logits = head.name
        if self.mixed:
            logits = f"{head.name}/float32"
            self.run(logits, "pointwise", [head.name], [self.transient(logits, size)])
        target, loss = f"{head.name}/target", f"{head.name}/loss"
        names = (
            "products",
            "softplus",
            "probability",
            "weighted",
            "overlap",
            "rest",
            "slope",
            "scaled",
            "truth",
            "gradient",
        )
        products, softplus, probability, weighted, overlap, rest, slope, scaled, truth, gradient = (
            f"{loss}/{name}" for name in names
        )
        new = lambda name: [self.transient(name, size)]  # noqa: E731
        self.run(products, "pointwise", [logits, target], new(products))
        self.run(f"{products}/sum", "reduce", [products])
        self.run(softplus, "pointwise", [logits], new(softplus))
        self.run(f"{softplus}/sum", "reduce", [softplus])
        self.run(probability, "pointwise", [logits], new(probability), takes_over=logits)
        self.run(weighted, "pointwise", [target], new(weighted))
        self.run(overlap, "pointwise", [probability, target], new(overlap))
        self.run(f"{overlap}/sum", "reduce", [overlap])
        self.run(rest, "pointwise", [probability], new(rest))
        self.run(slope, "pointwise", [rest, weighted], new(slope), takes_over=weighted)
        self.run(scaled, "pointwise", [slope, probability], new(scaled), takes_over=probability)
        self.run(truth, "pointwise", [target], new(truth), takes_over=target)
        self.run(gradient, "pointwise", [scaled, truth], new(gradient), takes_over=scaled)
        if self.mixed:
            cast = self.transient(f"{gradient}/cast", size // 2)
            self.run(cast.name, "pointwise", [gradient], [cast])
            gradient = cast.name
        self.upstream[head.name] = gradient
