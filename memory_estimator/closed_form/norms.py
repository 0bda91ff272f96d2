"""Norm and ReLU, or a norm alone (before a residual sum). Only the maps' sizes are counted, not the statistics."""

from typing import List

from memory_estimator.closed_form.maps import relu_gradient
from memory_estimator.closed_form.writer import Writer
from memory_estimator.norm_mask import is_narrow, mask_bytes, mask_touched
from memory_estimator.program import Tensor
from models.layer_plan import LayerOp

MOST_SAMPLES = 8
"""Instance norm takes a batch apart, one operation a sample. Beyond this many samples they are counted as that many
larger ones: it changes next to nothing and keeps the program short."""


def forward(writer: Writer, op: LayerOp) -> None:
    """One fused operation a sample (instance) or a batch; the last sample comes first. The ReLU's mask is kept.

    Network without norms: a bias and a ReLU, in the convolution's own output.
    """
    source, samples = op.inputs[0], _samples(writer)
    if writer.job.unet.norm == "none":
        writer.run(op.name, "pointwise", [source], [_output(writer, op)], takes_over=source)
        return
    for sample in reversed(range(samples)):
        part = f"/sample{sample}" if samples > 1 else ""
        output = _output(writer, op, part, samples)
        written = _with_mask(writer, op, output, sample, samples)
        writer.run(f"{op.name}{part}", _kind(writer, op), [source], written, layer=op)
    if samples > 1:
        parts = [f"{op.name}/sample{sample}" for sample in range(samples)]
        writer.run(op.name, "join", parts, [_output(writer, op)])


def backward(writer: Writer, op: LayerOp) -> None:
    """Sample by sample as the forward pass, each cut out of the gradient; the parts are joined at the end."""
    upstream, samples = writer.arrived(op), _samples(writer)
    down, size = f"{op.name}/gradient_below", writer.map_bytes(op)
    if writer.job.unet.norm == "none":
        down = relu_gradient(writer, op, upstream) if op.kind == "norm_act" else upstream
        writer.run(f"{op.name}/bias_gradient", "bias_gradient", [down], layer=op)
    elif samples == 1:
        _gradient(writer, op, 0, upstream, op.name, writer.transient(down, size))
    else:
        for sample in reversed(range(samples)):
            cut = writer.transient(f"{op.name}/slice{sample}", size // samples)
            writer.run(cut.name, "slice", [upstream], [cut])
            part = writer.transient(f"{down}/sample{sample}", size // samples)
            _gradient(writer, op, sample, cut.name, f"{op.name}/sample{sample}", part)
        parts = [f"{down}/sample{sample}" for sample in range(samples)]
        writer.run(down, "join", parts, [writer.transient(down, size)])
    writer.receive(op.inputs[0], down)


# --- Private helpers ---


def _gradient(writer: Writer, op: LayerOp, sample: int, upstream: str, output: str, down: Tensor) -> None:
    """ITEX takes ReLU and norm at once; stock TensorFlow takes the ReLU first, in place."""
    source, mask = op.inputs[0], f"{op.name}/mask{sample}"
    reads = [upstream, source]
    if op.kind == "norm_act" and writer.itex:
        reads = [upstream, source, output, mask]
    elif op.kind == "norm_act":
        passed = writer.transient(f"{down.name}/relu", down.bytes)
        writer.run(passed.name, "pointwise", [upstream, output], [passed], takes_over=upstream)
        reads = [passed.name, source, mask]
    writer.run(down.name, f"{_kind(writer, op)}_gradient", reads, [down], layer=op)


def _output(writer: Writer, op: LayerOp, part: str = "", parts: int = 1) -> Tensor:
    """Kept where a ReLU is in it, whose gradient looks at it; before a sum it is not."""
    if op.kind == "norm_act":
        return writer.activation(op, part, parts)
    return writer.transient(op.name + part, writer.map_bytes(op) // parts)


def _with_mask(writer: Writer, op: LayerOp, output: Tensor, sample: int, samples: int) -> List[Tensor]:
    """What the operation writes. Stock TensorFlow takes memory for the mask first, and uses a quarter of it."""
    if op.kind != "norm_act":
        return [output]
    size = mask_bytes(writer.job.batch * op.elements, op.shape[3], op.dtype, writer.job.engine) // samples
    touched = mask_touched(size, writer.job.engine)
    mask = writer.tensor(f"{op.name}/mask{sample}", size, writer.kept_at(op), touched)
    return [output, mask] if writer.itex else [mask, output]


def _samples(writer: Writer) -> int:
    return min(writer.job.batch, MOST_SAMPLES) if writer.job.unet.norm == "instance" else 1


def _kind(writer: Writer, op: LayerOp) -> str:
    return "narrow_norm" if is_narrow(op.shape[3], op.dtype) else "norm"
