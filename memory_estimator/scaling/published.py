"""A published scale-out beside ours: 48,884 cases for ten epochs, as a table for the documentation.

"Scalable Medical Computer Vision Model Training" (Amazon Web Services) augments the 484 cases of the Decathlon's brain
tumours to 48,884 pairs of image and label and reports that data-parallel nodes bring 90 hours down to 4.
"""

import dataclasses
from typing import List, Tuple

from memory_estimator.calibration import HostConstants, named_constants, shipped_constants
from memory_estimator.estimate import estimate
from memory_estimator.job import Job
from memory_estimator.recipes import JOBS
from memory_estimator.scaling.costs import ASSUMED, PUBLISHED, pooled, read_scaling
from memory_estimator.scaling.model import Claim, Scaling, Training, Work
from memory_estimator.scaling.options import gradient_bytes

CASES, EPOCHS = 48884, 10
CLAIM = Claim(one_h=90.0, many_h=4.0)
HOSTS = (1, 2, 4, 8, 16, 32, 64)


def published_lines() -> List[str]:
    """One Markdown table: hours over hosts, for the batch that grows by one volume a worker, on two kinds of host."""
    costs = pooled(read_scaling(PUBLISHED), PUBLISHED.name) if PUBLISHED.is_file() else ASSUMED
    found = []
    for kind, job, constants in _kinds():
        volume_s = estimate(job, constants).volume_s
        work = Work(volume_s, gradient_bytes(job), in_parts=job.parts > 1)
        found.append((kind, volume_s, Scaling(work, costs, training=Training(CASES, EPOCHS))))
    lines = [
        f"| hosts | {' | '.join(f'{kind}, {volume_s:.2g} s a volume' for kind, volume_s, _ in found)} |",
        "|---|" + "---|" * len(found),
    ]
    for hosts in HOSTS:
        points = [scaling.point(hosts) for _, _, scaling in found]
        cells = [f"{point.total_s / 3600:,.3g} h ({point.efficiency:.0%})" for point in points]
        lines.append(f"| {hosts} | {' | '.join(cells)} |")
    for number, what in enumerate((f"{CLAIM.one_h:g} h", f"{CLAIM.many_h:g} h", f"{CLAIM.speedup:.3g} times as fast")):
        reached = [CLAIM.reached(scaling)[number] for _, _, scaling in found]
        lines.append(f"| {what} | {' | '.join(f'{point.hosts}' if point else '-' for point in reached)} |")
    return [*lines, "", f"Costs of the exchange: {costs.origin}."]


# --- Private helpers ---


def _kinds() -> List[Tuple[str, Job, HostConstants]]:
    job = JOBS["brats-regions"]
    return [
        ("2 cores as measured here", dataclasses.replace(job, threads=2), shipped_constants(("avx512_bf16",))),
        ("56 cores with AMX, assumed", dataclasses.replace(job, threads=56), named_constants("amx")),
    ]


def main() -> None:
    """Print the table."""
    print("\n".join(published_lines()))


if __name__ == "__main__":
    main()
