"""Writes a job's program down, operation by operation, and the making of weights, slots and inputs
before it."""

import dataclasses
import math
from typing import Any, Dict, List, Optional, Sequence, Tuple

from memory_estimator.job import Job
from memory_estimator.step.timeline import Group, Program, StepOp, Tensor, inputs_made, kernel_made
from models.layer_plan import LayerOp, layer_plan
from models.optimizers import OPTIMIZERS, Optimizer
from models.program import UniqueNames
from models.weights import is_frozen


class Writer:
    """A program in the making."""

    def __init__(self, job: Job, native: bool = True):
        """Writes weights, slots and one input batch down, of a step by native operations or by
        TensorFlow's. Raises ValueError for a shape the network cannot take."""
        self.job = job
        self.native = native
        self.phase = "forward pass"  # of the operations that are added next
        self.plan = layer_plan(job.unet, job.shape)
        self.layers = {op.name: op for op in self.plan}
        self.trained = [op for op in self.plan if not is_frozen(op.name, job.freeze)]
        self.trained_kernels = [op for op in self.trained if op.kernel]
        self.value_bytes = job.unet.value_bytes
        self.resident: List[Tensor] = []
        self._before: List[StepOp] = []
        self._ops: List[Tuple[StepOp, Sequence[str]]] = []
        self._bytes: Dict[str, int] = {}
        self._tensor_names = UniqueNames()
        self._op_names = UniqueNames()
        self._make_weights(OPTIMIZERS[job.optimizer])
        values = job.voxels * job.unet.channels
        image = self.tensor("image", self.value_bytes * values, Group.INPUT)
        target = self.tensor("target", job.voxels * job.unet.outputs, Group.INPUT)
        self._before += inputs_made(image, target, values)
        self.resident += [image, target]

    def program(self) -> Program:
        """The program so far. An operation writes over the first of the tensors it may, that no
        later one reads."""
        last = {name: index for index, (op, _) in enumerate(self._ops) for name in op.reads}
        stays = {tensor.name for tensor in self.resident}
        ops = []
        for index, (op, over) in enumerate(self._ops):
            free = [name for name in over if last[name] == index and name not in stays]
            fits = [name for name in free if self._bytes[name] == op.writes[0].bytes]
            if fits:
                op = dataclasses.replace(op, takes_over=fits[0])
            ops.append(op)
        return Program(tuple(self.resident), tuple(ops), tuple(self._before))

    def tensor(
        self,
        name: str,
        size_bytes: int,
        group: Group = Group.TRANSIENTS,
        level: Optional[int] = None,
    ) -> Tensor:
        """A tensor under a name of its own."""
        name = self._tensor_names.unique(name)
        self._bytes[name] = size_bytes
        return Tensor(name, size_bytes, group, level)

    def run(
        self,
        name: str,
        kind: str,
        reads: Sequence[str],
        writes: Sequence[Tensor] = (),
        over: Sequence[str] = (),
        **more: Any,
    ) -> None:
        """Add an operation, which may write its first output `over` one of its inputs; `more` is as
        of `StepOp`."""
        moved = sum(self._bytes[read] for read in reads) + sum(tensor.bytes for tensor in writes)
        more.setdefault("traffic_bytes", moved)
        name = self._op_names.unique(name)
        op = StepOp(name, kind, tuple(reads), tuple(writes), phase=self.phase, **more)
        self._ops.append((op, over))

    def make(
        self,
        name: str,
        kind: str,
        reads: Sequence[str],
        size_bytes: int,
        group: Group = Group.TRANSIENTS,
        level: Optional[int] = None,
        **more: Any,
    ) -> str:
        """Add an operation that writes one tensor, and return its name; `more` is as of `run`."""
        made = self.tensor(name, size_bytes, group, level)
        self.run(name, kind, reads, [made], **more)
        return made.name

    def _make_weights(self, optimizer: Optimizer) -> None:
        """Kernels, and slots as zeros: in the order of
        `cpu3d.training.learner.Learner`."""
        for op in self.plan:
            if not op.kernel:
                continue
            kernel = self.tensor(f"{op.name}/kernel", 4 * op.kernel_elements, Group.WEIGHTS)
            self._before += kernel_made(kernel)
            self.resident.append(kernel)
        small = sum(op.trainable - op.kernel_elements + op.frozen for op in self.plan)
        trained = sum(op.trainable - op.kernel_elements for op in self.trained)
        self._add_resident("norms and biases", 4 * small, Group.WEIGHTS)
        copies = []
        for op in self.trained_kernels:
            slots = optimizer.rule_of(op.kernel_shape).slots
            copies += [(op, f"slot{number}", Group.SLOTS) for number in range(len(slots))]
        if optimizer.slots_in_turn:
            copies.sort(key=lambda copy: copy[1])
        if self.job.micro_batches > 1:
            copies += [(op, "gradient_sum", Group.GRADIENT_SUMS) for op in self.trained_kernels]
        for op, suffix, group in copies:
            made = self._add_resident(f"{op.name}/{suffix}", 4 * op.kernel_elements, group)
            self._before.append(StepOp(made.name, "update", writes=(made,)))
        slots_bytes = 4 * len(optimizer.others.slots) * trained
        self._add_resident("slots of norms and biases", slots_bytes, Group.SLOTS)
        if self.job.micro_batches > 1:
            self._add_resident("sums of norms and biases", 4 * trained, Group.GRADIENT_SUMS)

    def _add_resident(self, name: str, size_bytes: int, group: Group) -> Tensor:
        made = self.tensor(name, size_bytes, group)
        self.resident.append(made)
        return made


def matrix_shape(op: LayerOp) -> Tuple[int, int]:
    """A kernel as Muon's matrix: rows, columns. The last axis of an up-convolution is its
    inputs."""
    *rows, columns = op.kernel_shape
    return math.prod(rows), columns
