"""Writes a job's step down operation by operation: maps, gradients on their way down, weights and their update.

Knows sizes and names, but no layer's rules: those are in `layers.py`, `blocks.py` and `slabs.py`. What is made again
has the same name, under which what was made last is read. Within a slab a map is that slab of it.
"""

import contextlib
import math
from collections import Counter
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

from memory_estimator.job import DTYPE_BYTES, OPTIMIZERS, Job, Optimizer
from memory_estimator.step.allocator import region_bytes
from memory_estimator.step.onednn import Kernels, Setting
from memory_estimator.step.program import Program, StepOp, Tensor, buffers_of, inputs_made, kernel_made
from memory_estimator.step.scratch import NONE, Buffers
from models.layer_plan import PIECES, LayerOp, layer_plan

SQUARES, SQUARE_PRODUCTS = 7, 19  # of Muon's iteration: square matrices at once, and products of two of them

GRAM_THREAD_BYTES, GRAM_BYTES = 1056, 768
"""What a thread copies of a transposed matrix for each of its columns, and beside them: read off the log with ITEX, two
threads, and 128 and 256 columns of 512 to 6912 rows."""

MOST_SAMPLES = 8  # normalised one by one; of more there are as many, each larger, which changes next to nothing

CONVOLUTIONS = ("conv", "head", "up_conv", "shortcut")  # kinds of layers that have a kernel


class Writer:
    """A program in the making."""

    def __init__(self, job: Job, kernels: Kernels):
        """Writes weights, slots and one input batch down. Raises ValueError for a shape the network cannot take."""
        self.job, self._optimizer = job, OPTIMIZERS[job.optimizer]
        self.plan = layer_plan(job.unet, job.shape)
        self.layers = {op.name: op for op in self.plan}
        self.itex = job.engine == "itex"
        self.setting = Setting(job.unet.dtype, self.itex, job.threads, kernels)
        self.mixed = job.unet.dtype == "bfloat16"
        self.compute_bytes = DTYPE_BYTES[job.unet.dtype]
        self.samples = job.micro  # that an operation works on at a time
        self._slab, self._planes, self._again, self._copies = "", 0, False, 1.0
        """Within a slab: what names end in, planes of the finest grid, and as of `StepOp.again` and `copies`."""
        few = min(job.micro, MOST_SAMPLES)
        self.normed_apart = few if job.unet.norm == "instance" else 1  # samples that are normalised each for itself
        self.pieces = 1 if job.policy == "speed" else PIECES * few  # that the loss is computed in, of all samples
        self.norm_reads_source = job.unet.norm != "none"  # those of a bias and a ReLU do not
        self.resident: List[Tensor] = []
        self._kernels = [op for op in self.plan if op.kind in CONVOLUTIONS]
        self._before: List[StepOp] = []
        self._ops: List[StepOp] = []
        self._bytes: Dict[str, int] = {}
        self._latest: Dict[str, str] = {}  # name -> what was made last under it, or for a view the whole
        self._tensors: Counter = Counter()
        self._names: Counter = Counter()  # how often a tensor, and an operation, of a name was written down
        self._arrived: Dict[str, List[str]] = {}  # Layer -> the tensors whose sum is the gradient of its output
        self._gradients: Dict[str, str] = {}  # Layer -> its kernel's gradient in float32, where it is there
        self._make_weights()
        image = self.tensor("image", self.compute_bytes * job.voxels * job.unet.channels, "input")
        target = self.tensor("target", job.voxels * job.unet.outputs, "input")
        self._before += inputs_made([(image, job.unet.dtype), (target, "uint8")])
        self.resident += [image, target]
        if self._optimizer.orthogonal:
            sides = {min(kernel_sides(op)) for op in self._kernels if is_orthogonal(op)}
            for side in sorted(sides):
                for name in (f"diagonal{side}", f"diagonal{side}/2"):
                    constant = self.tensor(name, 4 * side**2, "optimizer slots")
                    self._before.append(StepOp(constant.name, "update", writes=(constant,)))
                    self.resident.append(constant)

    def program(self) -> Program:
        """Everything written so far."""
        region = region_bytes(self.job.unet, self.job.shape, self.job.micro)
        return Program(tuple(self.resident), tuple(self._ops), tuple(self._before), region)

    def tensor(
        self, name: str, size_bytes: int, group: str = "transients", touched: Tuple[Tuple[int, int], ...] = ()
    ) -> Tensor:
        """Under a name that operations can read it by; without a group, of what no gradient reads."""
        name += self._slab
        self._bytes[name], self._latest[name] = size_bytes, _counted(name, self._tensors)
        return Tensor(self._latest[name], size_bytes, group, touched)

    def size_of(self, name: str) -> int:
        """Bytes of the tensor that an operation reads by this name."""
        return self._bytes[self._known(name)]

    def view(self, whole: str, parts: int) -> None:
        """This slab is from now on one of so many parts of a tensor, each of which keeps all of it when read."""
        if whole in self._latest:
            name = whole + self._slab
            self._latest[name], self._bytes[name] = self._latest[whole], self._bytes[whole] // parts

    @contextlib.contextmanager
    def slab(self, index: int, planes: int, again: bool, copies: float) -> Iterator[None]:
        """What is written down meanwhile is a slab's, of one sample and so many planes of the finest grid, which stands
        for so many of the graph's slabs."""
        samples, pieces, self.samples, self.pieces = self.samples, self.pieces, 1, 1
        self._slab, self._planes, self._again, self._copies = f"/slab{index}", planes, again, copies
        yield
        self.samples, self.pieces, self._slab, self._planes, self._again = samples, pieces, "", 0, False
        self._copies = 1.0

    @property
    def in_slab(self) -> bool:
        """Whether what is written down is a slab's."""
        return bool(self._slab)

    def kept_at(self, op: LayerOp) -> str:
        """The line of the bill for what a layer keeps for the backward pass."""
        return f"activations, level {op.level}"

    def grid(self, op: LayerOp) -> Tuple[int, int, int]:
        """Voxels X, Y, Z of a layer's output."""
        size_x, size_y, size_z, _ = op.shape
        return (self._planes >> op.level if self._planes else size_x, size_y, size_z)

    def elements(self, op: LayerOp) -> int:
        """Of a layer's output, for all volumes computed at a time."""
        return self.samples * math.prod(self.grid(op)) * op.shape[3]

    def map_bytes(self, op: LayerOp) -> int:
        """Of a layer's output."""
        return self.elements(op) * self.compute_bytes

    def flops(self, op: LayerOp) -> int:
        """Of a layer's forward pass, and of each of its gradients."""
        return op.flops // op.elements * self.elements(op)

    def run(
        self,
        name: str,
        kind: str,
        reads: Sequence[str],
        writes: Sequence[Tensor] = (),
        *,
        buffers: Buffers = NONE,
        takes_over: Optional[str] = None,
        flops: int = 0,
        layer: Optional[LayerOp] = None,
    ) -> None:
        """Add an operation; `layer` is the one whose channels it works on, where its speed hangs on them."""
        name, found = _counted(name + self._slab, self._names), [self._known(read) for read in reads]
        self._ops.append(
            StepOp(
                name,
                kind,
                tuple(self._latest[read] for read in found),
                tuple(writes),
                takes_over=takes_over and self._latest[self._known(takes_over)],
                flops=flops,
                traffic_bytes=sum(self._bytes[read] for read in found) + sum(tensor.bytes for tensor in writes),
                in_channels=layer.in_channels if layer else 0,
                out_channels=layer.shape[3] if layer else 0,
                copies=self._copies,
                **buffers_of(name, buffers, self._again),
            )
        )

    def make(self, name: str, kind: str, reads: Sequence[str], size_bytes: int, group: str = "transients", **more):
        """Add an operation that writes one tensor, which has its name, and return the name; `more` is as of `run`."""
        self.run(name, kind, reads, [self.tensor(name, size_bytes, group)], **more)
        return name

    def receive(self, name: str, *gradients: str) -> None:
        """A reader's share in the gradient of the output of layer `name`, which goes no further than the image. Shares
        of several readers are added as soon as they are there; of a reader that has `gradients` only then."""
        if self.layers[name].kind == "input":
            return
        several = name in self._arrived
        self._arrived[name] = [*self._arrived.get(name, ()), *gradients]
        if several:
            self._arrived[name] = [self.arrived(self.layers[name])]

    def arrived(self, op: LayerOp) -> str:
        """The gradient of a layer's output, all of it; the layer's own backward pass takes it away."""
        return self.sum_of(f"{op.name}/gradient", self._arrived.pop(op.name), self.map_bytes(op))

    def sum_of(self, name: str, maps: Sequence[str], size_bytes: int, over: str = "") -> str:
        """Of maps that nobody else reads: in the memory of `over`, else the second of two, the first of more (AddV2,
        AddN). ITEX adds three in new memory."""
        if len(maps) == 1:
            return maps[0]
        over = over or maps[1 if len(maps) == 2 else 0]
        return self.make(name, "pointwise", maps, size_bytes, takes_over=None if self.itex and len(maps) > 2 else over)

    def kernel_bytes(self, op: LayerOp) -> int:
        """Of a kernel in the compute dtype, and in the layout that oneDNN prefers."""
        return kernel_elements(op) * self.compute_bytes

    def kernel_read(self, op: LayerOp) -> str:
        """The name of the kernel that the convolution reads: the variable, or its bfloat16 copy."""
        return f"{op.name}/kernel_cast" if self.mixed else f"{op.name}/kernel"

    def cast_kernel(self, op: LayerOp) -> None:
        """The bfloat16 copy that the convolution reads, made when its maps are there and kept for the gradients."""
        if self.mixed:
            size = 2 * kernel_elements(op)
            self.make(self.kernel_read(op), "update", [f"{op.name}/kernel"], size, "weights, bfloat16 copies")

    def reset_sums(self) -> None:
        """What begins a step in micro-batches: zeros, into whose memory the sums of gradients move."""
        for op in self._kernels if self.job.parts > 1 else ():
            zeros = self.make(f"{op.name}/zeros", "update", [], 4 * kernel_elements(op))
            self._move(f"{op.name}/gradient_sum", "gradient sums", zeros)

    def gradient_done(self, op: LayerOp) -> None:
        """A kernel's gradient cast to float32, and what the optimizer makes of it before it has all of them. TensorFlow
        goes on with what became ready last: it does this at once where nothing else has waited for the gradient, as for
        the joined ones of blocks, and puts it off to the end of the step elsewhere."""
        name = filter_gradient_name(op)
        if self.mixed:
            name = self.make(f"{name}/float32", "update", [name], 4 * kernel_elements(op), "gradients")
        self._gradients[op.name] = name
        if self.job.parts == 1:
            self._prepare(op)

    def update(self) -> None:
        """What ends a step: the gradients that are not done yet, whether all are finite, then weight by weight. A
        micro-batch adds its gradients to their sums in place; once all are done, the update reads those."""
        optimizer, summed = self._optimizer, self.job.parts > 1
        written = {tensor.name: index for index, each in enumerate(self._ops) for tensor in each.writes}
        late = [op for op in self._kernels if op.name not in self._gradients]
        late.sort(key=lambda op: -written[filter_gradient_name(op)])
        # Without a cast in between, SGD's negation is put off until nothing else reads the gradient, and is in place.
        in_place = late if optimizer.prepared == "negated" and not (summed or self.mixed) else []
        for op in late:
            if in_place:
                self._gradients[op.name] = filter_gradient_name(op)
            else:
                self.gradient_done(op)
        self.run("gradients/finite", "reduce", list(self._gradients.values()))
        if summed:
            for op in self._kernels:
                total = f"{op.name}/gradient_sum"
                self.run(f"sums/{op.name}", "pointwise", [self._gradients[op.name], total])
                self._gradients[op.name] = total
            for op in self._kernels:
                self._prepare(op)
        if optimizer.prepared == "negated":
            self._descend(in_place)
            return
        for op in self._kernels:
            if optimizer.orthogonal:
                (self._orthogonalise if is_orthogonal(op) else self._adapt)(op)
                continue
            slots = [f"{op.name}/slot{slot}" for slot in range(slots_of(optimizer, op))]
            reads = [self._gradients[op.name], *slots, f"{op.name}/square", f"{op.name}/kernel"]
            self.make(f"{op.name}/update", "update", reads, 4 * kernel_elements(op))

    def _prepare(self, op: LayerOp, over: Optional[str] = None) -> None:
        """Adam squares a gradient, SGD negates it. Muon does nothing before a kernel's turn."""
        if not self._optimizer.prepared:
            return
        name = f"{op.name}/{self._optimizer.prepared}"
        self.make(name, "update", [self._gradients[op.name]], 4 * kernel_elements(op), takes_over=over)

    def _descend(self, in_place: Sequence[LayerOp]) -> None:
        """SGD with Nesterov's momentum: m = d m - r g, w += d m - r g. Each product is a tensor; a sum lies over its
        first term, and the momentum moves there. Where gradients are negated `in_place`, that comes after the rest."""

        def descend(op: LayerOp) -> None:
            size, negated, slot = 4 * kernel_elements(op), f"{op.name}/negated", f"{op.name}/slot0"
            scaled = self.make(f"{op.name}/scaled", "update", [negated], size)
            self._move(slot, "optimizer slots", scaled, f"{op.name}/decayed")
            again = self.make(f"{op.name}/decayed_again", "update", [slot], size)
            self.run(f"{op.name}/update", "update", [negated, again, f"{op.name}/kernel"])

        for op in reversed(self._kernels):
            self.make(f"{op.name}/decayed", "update", [f"{op.name}/slot0"], 4 * kernel_elements(op))
            if op not in in_place:
                descend(op)
        for op in in_place:
            self._prepare(op, over=self._gradients[op.name])
            descend(op)

    def _orthogonalise(self, op: LayerOp) -> None:
        """Muon of a kernel of more than one voxel: its momentum changes in place; what is looked ahead at lies over the
        gradient where that is the convolution's own. Then the matrices of its fewer side, and the last product."""
        size, slot, ahead = 4 * kernel_elements(op), f"{op.name}/slot0", self._gradients[op.name]
        change = self.make(f"{op.name}/change", "update", [slot], size)
        self.run(f"{op.name}/momentum", "update", [change, ahead, slot])
        decayed = self.make(f"{op.name}/decayed", "update", [slot], size)
        over = decayed if self.mixed or self.job.parts > 1 else ahead
        ahead = self.make(f"{op.name}/ahead", "update", [ahead, decayed], size, takes_over=over)
        columns, few = kernel_sides(op)[1], min(kernel_sides(op))
        copies = GRAM_THREAD_BYTES * columns + GRAM_BYTES if few == columns else 0
        packed = self.job.threads * copies if self.itex else 0
        gram = Buffers(scratch=(packed, *(SQUARES - 1) * (4 * few**2,)))
        multiplied = 2 * (kernel_elements(op) * few + SQUARE_PRODUCTS * few**3)
        product = self.make(f"{op.name}/product", "update", [ahead], 4 * few**2, buffers=gram, flops=multiplied)
        flops = 2 * kernel_elements(op) * few
        found = self.make(f"{op.name}/orthogonal", "update", [ahead, product], size, flops=flops)
        self.run(f"{op.name}/update", "update", [found, f"{op.name}/kernel"])

    def _adapt(self, op: LayerOp) -> None:
        """Adam as Muon has it, of a kernel of one voxel: mean and square change in place, one after the other."""
        size, slots = 4 * kernel_elements(op), [f"{op.name}/slot{slot}" for slot in range(2)]
        for slot in reversed(slots):
            change = self.make(f"{slot}/change", "update", [self._gradients[op.name], slot], size)
            self.run(f"{slot}/changed", "update", [change, slot])
        parts = [self.make(f"{slot}/scaled", "update", [slot], size) for slot in slots]
        self.run(f"{op.name}/update", "update", [*parts, f"{op.name}/kernel"])

    def _move(self, name: str, group: str, over: str, *reads: str) -> None:
        """A resident tensor is computed over another one, and is there from now on."""
        moved = Tensor(name, self._bytes[name], group)
        self.run(f"{name}/moved", "update", [over, *reads], [moved], takes_over=over)

    def _known(self, name: str) -> str:
        """As there is a tensor of: of this slab, else of all."""
        return name + self._slab if name + self._slab in self._latest else name

    def _make_weights(self) -> None:
        """Kernels, slots as zeros, averages as copies: in the order of `cpu3d.training.learner.Learner`."""
        kernels, optimizer = self._kernels, self._optimizer
        for op in kernels:
            kernel = self.tensor(f"{op.name}/kernel", 4 * kernel_elements(op), "weights")
            self._before += kernel_made(kernel)
            self.resident.append(kernel)
        in_kernels = sum(kernel_elements(op) for op in kernels)
        trained = sum(op.trainable for op in self.plan) - in_kernels
        small = trained + sum(op.frozen for op in self.plan)
        self.resident.append(self.tensor("norms and biases", 4 * small, "weights"))
        copies = [(op, f"slot{n}", "optimizer slots") for op in kernels for n in range(slots_of(optimizer, op))]
        if optimizer.orthogonal:  # Muon makes all its means first
            copies.sort(key=lambda copy: copy[1])
        if self.job.averaged:
            copies += [(op, "average", "averaged weights") for op in kernels]
        if self.job.parts > 1:
            copies += [(op, "gradient_sum", "gradient sums") for op in kernels]
        for op, suffix, group in copies:
            copy = self.tensor(f"{op.name}/{suffix}", 4 * kernel_elements(op), group)
            self._before.append(StepOp(copy.name, "update", writes=(copy,)))
            self.resident.append(copy)
        small_slots = 4 * optimizer.slots * trained
        self.resident.append(self.tensor("slots of norms and biases", small_slots, "optimizer slots"))
        if self.job.parts > 1:
            self.resident.append(self.tensor("sums of norms and biases", 4 * trained, "gradient sums"))


def kernel_elements(op: LayerOp) -> int:
    """Weights of a layer without its bias, which only the head has."""
    return op.trainable - (op.shape[3] if op.kind == "head" else 0)


def slots_of(optimizer: Optimizer, op: LayerOp) -> int:
    """Float32 copies that the optimizer keeps of a layer's kernel."""
    return optimizer.kernel_slots if is_orthogonal(op) else optimizer.slots


def is_orthogonal(op: LayerOp) -> bool:
    """Whether Muon updates a layer's kernel; it leaves norms, biases and 1x1x1 kernels to Adam."""
    return op.kind in ("conv", "up_conv") and op.kernel > 1


def kernel_sides(op: LayerOp) -> Tuple[int, int]:
    """A kernel as Muon's matrix: rows, columns. An up-convolution's last axis is of what it reads."""
    columns = op.in_channels if op.kind == "up_conv" else op.shape[3]
    return kernel_elements(op) // columns, columns


def filter_gradient_name(op: LayerOp) -> str:
    """In the compute dtype, as the convolution's gradient writes it."""
    return f"{op.name}/filter_gradient"


def _counted(name: str, times: Counter) -> str:
    """A name of its own: the second of its kind ends in /2."""
    times[name] += 1
    return name if times[name] == 1 else f"{name}/{times[name]}"
