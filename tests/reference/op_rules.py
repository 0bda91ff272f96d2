"""What each type of TensorFlow's operations does on a CPU: views, results in place, hidden outputs, buffers.

Read from the kernels' sources and held against the profiler's list of allocations.
"""

import math
from typing import Optional, Sequence, Tuple

from memory_estimator.step.onednn import Convolution, Kernels, Setting
from memory_estimator.step.scratch import (
    NONE,
    Buffers,
    filter_gradient_buffers,
    forward_buffers,
    input_gradient_buffers,
    mask_bytes,
    mask_touched,
)
from tests.reference.graph import Node, Output, plain

STAYS = {"_Arg": "input", "Const": "constants"}
"""What lives before and after the step, and the line of the bill it counts under."""

VIEWS = frozenset(
    (
        *("Reshape", "ExpandDims", "Squeeze", "Bitcast", "EnsureShape"),
        *("Identity", "IdentityN", "StopGradient", "PreventGradient", "Snapshot", "CheckNumerics"),
        *("ReadVariableOp", "_Retval"),
        "InplaceAdd",
    )
)
"""The output is the input under another shape or name, or with other values in it; of a variable, its own memory."""

SLICES = {"Slice": 0, "StridedSlice": 0, "Split": 1, "SplitV": 0}
"""Views too where they cut along the first axis only, or take all of the input given; ITEX's own kernels copy."""

ALIGNMENT_BYTES = 64

CROSS_ENTROPIES = ("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits")

LAST_FIRST = frozenset(("_MklNativeFusedBatchNormEx", *CROSS_ENTROPIES))
"""Kernels that take memory for their last output first: a norm's mask; the gradient, in place of the logits."""

IN_PLACE = frozenset(
    (
        *("Add", "AddV2", "AddN", "Sub", "Mul", "MulNoNan", "RealDiv", "DivNoNan", "Maximum", "Minimum", "Pow"),
        *("SquaredDifference", "Xdivy", "Xlogy"),
        *("Abs", "Exp", "Expm1", "Inv", "Reciprocal", "Log", "Log1p", "Neg", "Round", "Rsqrt", "Sigmoid", "Sign"),
        *("Sqrt", "Square", "Tanh", "Erf", "Floor", "Ceil", "Relu", "Relu6", "LeakyRelu", "Elu", "Selu", "Softplus"),
        *("Softsign", "BiasAdd", "Softmax", "LogSoftmax", "LogicalAnd", "LogicalOr", "LogicalNot", "Select"),
        *CROSS_ENTROPIES,
        *("ReluGrad", "Relu6Grad", "LeakyReluGrad", "EluGrad", "SeluGrad", "SoftplusGrad", "SoftsignGrad"),
        *("SigmoidGrad", "TanhGrad", "SqrtGrad", "RsqrtGrad", "InvGrad", "ReciprocalGrad"),
    )
)
"""Kernels that write over an input of the output's type and size when nobody else will read it."""

FORWARD = ("Conv2D", "Conv3D", "FusedConv2D", "FusedConv3D")


def views(node: Node, inputs: Sequence[Output]) -> Optional[Tuple[int, ...]]:
    """For each output the input whose memory it lies in; None where the outputs have memory of their own."""
    if node.op in VIEWS:
        # Of an IdentityN, the passes may have taken those away that nobody reads.
        return tuple(range(min(len(node.outputs), len(inputs))))
    if node.op in SLICES:
        whole = inputs[SLICES[node.op]]
        row = whole.bytes // max(whole.shape[0], 1) if whole.shape else 1
        if node.op == "StridedSlice" and node.outputs[0].bytes == whole.bytes:
            return (0,)
        # Samples of a batch; Eigen asks for rows that begin at multiples of 64 bytes.
        if node.outputs[0].shape[1:] == whole.shape[1:] and row % ALIGNMENT_BYTES == 0:
            return (SLICES[node.op],) * len(node.outputs)
    return None


def outputs(node: Node, inputs: Sequence[Output]) -> Tuple[Output, ...]:
    """All outputs of `node`, with those that no shape function knows."""
    name = plain(node.op)
    if name == "FusedBatchNormEx":
        # With its ReLU fused it keeps where that was open.
        x, engine = inputs[0], "itex" if node.op.startswith("_ITEX") else "stock"
        size = mask_bytes(math.prod(x.shape), x.shape[-1], x.dtype, engine)
        return (*node.outputs[:5], Output((size,), "uint8", size, mask_touched(size, engine)))
    if name.startswith("FusedBatchNorm") and "Grad" not in name:
        return (*node.outputs[:5], Output((0,), "uint8", 0))
    if name in ("MaxPool", "MaxPool3D") and name != node.op:
        # Which element of its window was the largest: a byte each.
        size = math.prod(node.outputs[0].shape)
        return (node.outputs[0], Output((size,), "uint8", size))
    if name.endswith("BackpropFilterWithBias"):
        return (node.outputs[0], Output(inputs[2].shape[-1:], inputs[2].dtype, 4 * inputs[2].shape[-1]))
    return node.outputs


def buffers(node: Node, inputs: Sequence[Output], threads: int, kernels: Kernels) -> Buffers:
    """What a convolution holds beside its inputs and outputs."""
    name = plain(node.op)
    if name not in FORWARD and not name.startswith(("Conv2DBackprop", "Conv3DBackprop")):
        return NONE
    on = Setting(node.outputs[0].dtype, node.op.startswith("_ITEX"), threads, kernels)
    if name in FORWARD:
        return forward_buffers(_seen(node, inputs[0], inputs[1], node.outputs[0]), on)
    if "BackpropFilter" in name:
        return filter_gradient_buffers(_seen(node, inputs[0], node.outputs[0], inputs[2]), on)
    return input_gradient_buffers(_seen(node, node.outputs[0], inputs[1], inputs[2]), on)


def _seen(node: Node, source: Output, kernel: Output, target: Output) -> Convolution:
    """A convolution, or that of a gradient, as oneDNN sees it: in two dimensions the maps are one voxel deep."""
    source_grid, target_grid = ((1, *output.shape[1:-1])[-3:] for output in (source, target))
    channels, planes = kernel.shape[-2:], (1, *kernel.shape[:-2])[-3:]
    stride, bias = max(node.attributes["strides"].list.i), node.op.endswith("WithBias")
    return Convolution(source.shape[0], source_grid, target_grid, *channels, planes, stride, bias)
