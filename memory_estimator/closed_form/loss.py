"""Soft Dice and cross-entropy as `cpu3d.losses` computes them: float32 maps of the regions, forward and back."""

from typing import Optional

from memory_estimator.closed_form.writer import Writer
from models.layer_plan import LayerOp


def cast_target(writer: Writer, head: LayerOp) -> None:
    """A head's target in float32, which the loss keeps; a coarse head's is cut out of the full one first."""
    elements, target = writer.job.batch * head.elements, "target"
    if head.level:
        target = f"{head.name}/target/uint8"
        writer.run(target, "slice", ["target"], [writer.transient(target, elements)])
    copy = writer.transient(_target(head), 4 * elements)
    writer.run(copy.name, "pointwise", [target], [copy])


def loss(writer: Writer, head: LayerOp) -> None:
    """From a head's output to its gradient. Both engines write a result over a map that nobody else will read."""
    size, name = 4 * writer.job.batch * head.elements, f"{head.name}/loss"

    def step(result: str, *reads: str, over: Optional[str] = None) -> str:
        writer.run(result, "pointwise", reads, [writer.transient(result, size)], takes_over=over)
        return result

    def total(of: str) -> None:
        writer.run(f"{of}/sum", "reduce", [of])

    logits, target = head.name, _target(head)
    if writer.mixed:
        logits = step(f"{head.name}/float32", logits)
    products = step(f"{name}/products", logits, target)
    total(products)
    total(step(f"{name}/softplus", logits))
    probability = step(f"{name}/probability", logits, over=logits)
    weighted = step(f"{name}/weighted", target)
    overlap = step(f"{name}/overlap", probability, target)
    total(overlap)
    rest = step(f"{name}/rest", probability)
    slope = step(f"{name}/slope", rest, weighted, over=weighted)
    scaled = step(f"{name}/scaled", slope, probability, over=probability)
    truth = step(f"{name}/truth", target, over=target)
    gradient = step(f"{name}/gradient", scaled, truth, over=scaled)
    if writer.mixed:
        cast = writer.transient(f"{gradient}/cast", size // 2)
        writer.run(cast.name, "pointwise", [gradient], [cast])
        gradient = cast.name
    writer.receive(head.name, gradient)


# --- Private helpers ---


def _target(head: LayerOp) -> str:
    return f"{head.name}/target"
