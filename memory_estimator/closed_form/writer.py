"""What the rules of the closed form write with: tensors, operations, and the gradients on their way down."""

from typing import Dict, List, Optional, Sequence, Tuple

from memory_estimator.job import Job
from memory_estimator.program import Program, StepOp, Tensor
from memory_estimator.region import region_bytes
from models.layer_plan import LayerOp, layer_plan

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


class Writer:
    """Writes a job's program down, operation by operation. Knows sizes and names, but no rule of any layer."""

    def __init__(self, job: Job):
        """Raises ValueError for a shape that the network cannot take."""
        self.job = job
        self.plan = layer_plan(job.unet, job.shape)
        self.layers = {op.name: op for op in self.plan}
        self.itex = job.engine == "itex"
        self.mixed = job.unet.dtype == "bfloat16"
        self.compute_bytes = DTYPE_BYTES[job.unet.dtype]
        self.resident: List[Tensor] = []
        self.before: List[StepOp] = []
        self._ops: List[StepOp] = []
        self._bytes: Dict[str, int] = {}
        self._arrived: Dict[str, List[str]] = {}
        """Layer -> the tensors whose sum is the gradient of its output."""

    def program(self) -> Program:
        """Everything written so far."""
        region = region_bytes(self.job.unet, self.job.shape, self.job.micro)
        return Program(tuple(self.resident), tuple(self._ops), tuple(self.before), region)

    # --- Tensors ---

    def tensor(self, name: str, size_bytes: int, group: str, touched: Tuple[Tuple[int, int], ...] = ()) -> Tensor:
        """Under a name that operations can read it by."""
        self._bytes[name] = size_bytes
        return Tensor(name, size_bytes, group, touched)

    def transient(self, name: str, size_bytes: int) -> Tensor:
        """A map that goes before the step is over, and that no gradient reads."""
        return self.tensor(name, size_bytes, "transients")

    def activation(self, op: LayerOp, suffix: str = "", parts: int = 1) -> Tensor:
        """A layer's output, or one of so many equal parts of it, for its gradient to read."""
        return self.tensor(op.name + suffix, self.map_bytes(op) // parts, self.kept_at(op))

    def kept_at(self, op: LayerOp) -> str:
        """The line of the bill for what a layer keeps for the backward pass."""
        return f"activations, level {op.level}"

    def map_bytes(self, op: LayerOp) -> int:
        """Of a layer's output, for all volumes computed at a time."""
        return self.job.micro * op.elements * DTYPE_BYTES[op.dtype]

    # --- Operations ---

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
        """Add an operation; its traffic is what it reads and writes, each once. `touched` is of the first scratch.

        `layer` is the one whose channels it works on, where its speed hangs on them.
        """
        beside = enumerate(scratch)
        self._ops.append(
            StepOp(
                name=name,
                kind=kind,
                reads=tuple(reads),
                writes=tuple(writes),
                scratch=tuple(
                    Tensor(f"{name}/scratch{i}", size, "scratch", () if i else touched) for i, size in beside if size
                ),
                takes_over=takes_over,
                keeps=tuple(keeps),
                hidden_bytes=hidden_bytes,
                flops=flops,
                traffic_bytes=sum(self._bytes[read] for read in reads) + sum(tensor.bytes for tensor in writes),
                in_channels=layer.in_channels if layer else 0,
                out_channels=layer.shape[3] if layer else 0,
            )
        )

    # --- Gradients ---

    def receive(self, name: str, *gradients: str) -> None:
        """A reader's share in the gradient of the output of layer `name`, which goes no further than the image.

        Shares of several readers are added as soon as they are there; of a reader that has `gradients` only then.
        """
        if self.layers[name].kind == "input":
            return
        several = name in self._arrived
        self._arrived[name] = [*self._arrived.get(name, ()), *gradients]
        if several:
            self._arrived[name] = [self.arrived(self.layers[name])]

    def arrived(self, op: LayerOp) -> str:
        """The gradient of a layer's output, all of it; the layer's own backward pass takes it away."""
        return self.sum_of(f"{op.name}/gradient", self._arrived.pop(op.name), self.map_bytes(op))

    def sum_of(self, name: str, maps: Sequence[str], size_bytes: int) -> str:
        """Of maps that nobody else reads: of two in the memory of the second, which has just been written.

        ITEX adds three in new memory.
        """
        if len(maps) == 1:
            return maps[0]
        over = maps[-1] if len(maps) == 2 or not self.itex else None
        self.run(name, "pointwise", maps, [self.transient(name, size_bytes)], takes_over=over)
        return name
