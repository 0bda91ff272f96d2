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
    """Kept where a ReLU is in it, whose gradient looks at it; before a sum it is not."""
    group = writer.kept_at(op) if op.kind == "norm_act" else "transients"
    normalise(writer, op, op.inputs[0], op.name, group, alone=not reads_source(writer))


def backward(writer: Writer, op: LayerOp) -> None:
    writer.receive(op.inputs[0], gradient(writer, op, writer.arrived(op), op.inputs[0], op.name))


def normalise(writer: Writer, op: LayerOp, source: str, result: str, group: str, alone: bool) -> None:
    """`result` from the map `source`: one fused operation a sample (instance) or a batch; the last sample comes first.

    The ReLU's mask goes with it. Where it reads `source` `alone`, and last, ITEX writes over it. Network without norms:
    a bias and a ReLU, which any engine then writes over it.
    """
    size, samples = writer.map_bytes(op), normed_apart(writer)
    if not reads_source(writer):
        output = writer.tensor(result, size, group)
        writer.run(result, "pointwise", [source], [output], takes_over=source if alone else None)
        return
    over = source if alone and writer.itex and samples == 1 else None
    for sample in reversed(range(samples)):
        part = f"/sample{sample}" if samples > 1 else ""
        output = writer.tensor(result + part, size // samples, group)
        written = _with_mask(writer, op, output, f"{result}/mask{sample}", samples)
        writer.run(result + part, _kind(writer, op), [source], written, layer=op, takes_over=over)
    if samples > 1:
        parts = [f"{result}/sample{sample}" for sample in range(samples)]
        writer.run(result, "join", parts, [writer.tensor(result, size, group)])


def gradient(writer: Writer, op: LayerOp, upstream: str, source: str, result: str) -> str:
    """Of `source`, whose norm is `result`; returns its name.

    Sample by sample as the forward pass, each cut out of the gradient; the parts are joined at the end.
    """
    down, size, samples = f"{op.name}/gradient_below", writer.map_bytes(op), normed_apart(writer)
    if not reads_source(writer):
        down = relu_gradient(writer, op, upstream, result) if op.kind == "norm_act" else upstream
        writer.run(f"{op.name}/bias_gradient", "bias_gradient", [down], layer=op)
        return down
    if samples == 1:
        _gradient(writer, op, upstream, [source, result, f"{result}/mask0"], writer.transient(down, size))
        return down
    for sample in reversed(range(samples)):
        cut = writer.transient(f"{op.name}/slice{sample}", size // samples)
        writer.run(cut.name, "slice", [upstream], [cut])
        part = writer.transient(f"{down}/sample{sample}", size // samples)
        _gradient(writer, op, cut.name, [source, f"{result}/sample{sample}", f"{result}/mask{sample}"], part)
    parts = [f"{down}/sample{sample}" for sample in range(samples)]
    writer.run(down, "join", parts, [writer.transient(down, size)])
    return down


def reads_source(writer: Writer) -> bool:
    """Whether a norm's gradient reads what it normalised: those of a bias and a ReLU do not."""
    return writer.job.unet.norm != "none"


def gradient_reads(writer: Writer, op: LayerOp) -> bool:
    """Whether the gradient reads any map of the forward pass: a bias' alone does not."""
    return reads_source(writer) or op.kind == "norm_act"


def normed_apart(writer: Writer) -> int:
    """Samples that are normalised each for itself."""
    return min(writer.job.micro, MOST_SAMPLES) if writer.job.unet.norm == "instance" else 1


# --- Private helpers ---


def _gradient(writer: Writer, op: LayerOp, upstream: str, found: List[str], down: Tensor) -> None:
    """ITEX takes ReLU and norm at once; stock TensorFlow takes the ReLU first, in place.

    `found` are the forward pass's source, output and mask.
    """
    source, output, mask = found
    reads = [upstream, source]
    if op.kind == "norm_act" and writer.itex:
        reads = [upstream, source, output, mask]
    elif op.kind == "norm_act":
        passed = writer.transient(f"{down.name}/relu", down.bytes)
        writer.run(passed.name, "pointwise", [upstream, output], [passed], takes_over=upstream)
        reads = [passed.name, source, mask]
    writer.run(down.name, f"{_kind(writer, op)}_gradient", reads, [down], layer=op)


def _with_mask(writer: Writer, op: LayerOp, output: Tensor, name: str, samples: int) -> List[Tensor]:
    """What the operation writes. Stock TensorFlow takes memory for the mask first, and uses a quarter of it."""
    if op.kind != "norm_act":
        return [output]
    size = mask_bytes(writer.job.micro * op.elements, op.shape[3], op.dtype, writer.job.engine) // samples
    mask = writer.tensor(name, size, output.group, mask_touched(size, writer.job.engine))
    return [output, mask] if writer.itex else [mask, output]


def _kind(writer: Writer, op: LayerOp) -> str:
    return "narrow_norm" if is_narrow(op.shape[3], op.dtype) else "norm"
