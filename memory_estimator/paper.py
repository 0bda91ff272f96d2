"""The paper's terabyte, worked out again: what must be assumed to arrive at it, and what the job takes today.

"Addressing the Memory Bottleneck in AI Model Training" (2020) reports "a little less than 1 TB" for a batch of 16
images of 240 x 240 x 144 voxels, FLAIR alone, in the wide network of Cicek et al., float32.
"""

import dataclasses
from typing import Callable, List, Tuple

from memory_estimator.calibration import shipped_constants
from memory_estimator.estimate import estimate
from memory_estimator.job import Job
from memory_estimator.planner import with_policy
from memory_estimator.recipes import JOBS
from memory_estimator.units import format_bytes
from models.config import POLICIES
from models.layer_plan import LayerOp, layer_plan

ISA = ("avx512_bf16",)
"""Whose shipped constants are used: the measured ones."""


def paper_lines() -> List[str]:
    """Two Markdown tables: counts on paper under growing assumptions, and the estimator's answers."""
    job = JOBS["paper-2020"]
    plan = layer_plan(job.unet, job.shape)
    everything = _maps(job, plan, lambda op: op.kind != "input")
    kept = _maps(job, plan, lambda op: op.kind in ("conv", "norm_act", "pool", "concat"))
    apart = everything + _maps(job, plan, lambda op: op.kind == "norm_act")
    lines = ["| float32 maps of the batch, counted on the layer plan | |", "|---|---|"]
    for what, size in (
        ("what some gradient reads", kept),
        ("every layer's output, norm and ReLU as one layer", everything),
        ("every layer's output, norm and ReLU as two", apart),
        ("every layer's output and a gradient of the same size, all at once", 2 * everything),
    ):
        lines.append(f"| {what} | {format_bytes(size)} ({size / 1e12:.2f} TB) |")
    lines += ["", "| the job today | policy | allocator peak | process peak | upper bound |", "|---|---|---|---|---|"]
    for what, variant in _today(job):
        for policy in POLICIES:
            said = estimate(with_policy(variant, policy), shipped_constants(ISA))
            peaks = (said.allocator_peak_bytes, said.process_peak_bytes, said.upper_bound_bytes)
            lines.append(f"| {what} | {policy} | {' | '.join(map(format_bytes, peaks))} |")
    return lines


# --- Private helpers ---


def _maps(job: Job, plan: Tuple[LayerOp, ...], counts: Callable[[LayerOp], bool]) -> int:
    return 4 * job.batch * sum(op.elements for op in plan if counts(op))


def _today(job: Job) -> List[Tuple[str, Job]]:
    singly = dataclasses.replace(job, threads=2)
    at_once = dataclasses.replace(singly, micro_batch=job.batch)
    bfloat16 = dataclasses.replace(job.unet, dtype="bfloat16")
    return [
        ("as in the paper: batch 16 at once, float32, 2 threads", at_once),
        ("the same on the paper's 80 cores", dataclasses.replace(at_once, threads=80)),
        ("at once in bfloat16, 2 threads", dataclasses.replace(at_once, unet=bfloat16)),
        ("batch 16, one image at a time, float32, 2 threads", singly),
        ("batch 16, one image at a time, bfloat16, 2 threads", dataclasses.replace(singly, unet=bfloat16)),
    ]


def main() -> None:
    """Print the tables."""
    print("\n".join(paper_lines()))


if __name__ == "__main__":
    main()
