"""Jobs that fit: the fastest policy, the largest micro-batch, filters and extent, the mildest
change, a GPU's patch.

An `estimator` makes the estimate of a job: `estimate` with a host's constants in it, or a table in
a test.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from memory_estimator.common.units import by, format_bytes, format_seconds
from memory_estimator.estimate import Estimate
from memory_estimator.job import USUAL_PATCH, Job, divisors
from models.config import POLICIES
from models.layer_plan import layer_plan
from models.strides import Shape3, divisors_text, shape3

Estimator = Callable[[Job], Estimate]

# convolutions compute vectors of channels: numbers between cost as much as the next multiple
STEP_OF_FILTERS = 8
# numbers tried past the first that does not fit: with rounding a larger one may take less
BEYOND = 4
LARGEST = 2**20  # no search continues past this number: the memory would be without limit
CONTEXT_BYTES = 2**30  # of a GPU: CUDA's context, cuDNN's and cuBLAS's handles and kernels
# of the sum in `gpu_bytes`: on an H200 0.9 in float32, 1.35 in bfloat16 (records/log.md)
CARD_SHARE = 1.4
# TensorFlow's limit for one convolution of cuDNN (TF_CUDNN_WORKSPACE_LIMIT_IN_MB)
WORKSPACE_BYTES = 4 * 2**30
BOTTOM = 2  # least voxels of the deepest level along an axis: a norm makes a single voxel zero


@dataclass(frozen=True)
class Option:
    """A job changed, and its estimate then."""

    change: str  # as options of the command line, such as "--batch 2"
    job: Job
    estimate: Estimate

    def __str__(self) -> str:
        """Such as "--batch 2: up to 312.00 GiB, 41 s a volume"."""
        bound = format_bytes(self.estimate.upper_bound_bytes)
        return f"{self.change}: up to {bound}, {format_seconds(self.estimate.volume_s)} a volume"


@dataclass(frozen=True)
class Choice:
    """A policy picked, and why."""

    estimate: Estimate  # of the job under it
    fits: bool  # whether it does; if none does, the policy is the one that takes least
    passed_over: Tuple[Estimate, ...]  # of faster policies, which do not fit

    @property
    def policy(self) -> str:
        return self.estimate.job.policy

    def reason(self, memory: str) -> str:
        """Such as "speed would take up to 9.10 GiB of 7.00 GiB free"; `memory` is the limit, "7.00
        GiB free"."""
        if not self.fits:
            return f"no policy fits {memory}, and this one takes least"
        if not self.passed_over:
            return f"the fastest, and fits {memory}"
        taken = []
        for each in self.passed_over:
            bound = format_bytes(each.upper_bound_bytes)
            taken.append(f"{each.job.policy} would take up to {bound}")
        return f"{' and '.join(taken)} of {memory}"


def fastest_that_fits(job: Job, estimator: Estimator, budget_bytes: int) -> Choice:
    """The policy that takes the least time of those whose upper bound is within the budget,
    whatever `job` has now. If none is, the policy that takes the least memory. Of equals the first,
    as POLICIES has them."""
    estimates = [estimator(job.with_unet(policy=policy)) for policy in POLICIES]
    by_time = sorted(estimates, key=lambda each: each.step_s)
    for index, each in enumerate(by_time):
        if each.upper_bound_bytes <= budget_bytes:
            return Choice(each, fits=True, passed_over=tuple(by_time[:index]))
    least = min(by_time, key=lambda each: each.upper_bound_bytes)
    return Choice(least, fits=False, passed_over=())


def plan(job: Job, estimator: Estimator, budget_bytes: int) -> Dict[str, Optional[Estimate]]:
    """The largest "batch" at once, "filters" (multiples of 8) and "extent" (in the job's
    proportions) in the budget. All else is as asked for; None if not even the smallest fits. In
    micro-batches a larger batch takes no more than one of them and a set of gradients. No batch is
    larger than the training cases, if their number is known."""

    def largest(job_of: Callable[[int], Job], last: int) -> Optional[Estimate]:
        def bound(number: int) -> int:
            return estimator(job_of(number)).upper_bound_bytes

        number = largest_number(bound, budget_bytes, last)
        return estimator(job_of(number)) if number else None

    def of_batch(number: int) -> Job:
        return dataclasses.replace(job, batch=number, micro_batch=number)

    return {
        "batch": largest(of_batch, job.cases or LARGEST),
        "filters": largest(
            lambda number: _with_filters(job, number)[1],
            job.unet.most_filters // STEP_OF_FILTERS,
        ),
        "extent": largest(lambda number: extent(job, number), LARGEST),
    }


def extent(job: Job, number: int) -> Job:
    """The job on the `number`-th grid of about its proportions, every side a multiple of the
    network's divisor of that axis."""
    longest = max(job.shape)
    divisors = job.unet.divisors
    longest_now = number * _step_of(job)
    shape = []
    for side, divisor in zip(job.shape, divisors):
        units = (2 * longest_now * side + longest * divisor) // (2 * longest * divisor)
        shape.append(divisor * max(1, units))
    return dataclasses.replace(job, shape=shape3(shape))


def _step_of(job: Job) -> int:
    """Voxels by which the longest side grows from grid to grid."""
    return job.unet.divisors[job.shape.index(max(job.shape))]


def largest_number(cost: Callable[[int], float], budget: float, last: int = LARGEST) -> int:
    """The largest number from 1 to `last` whose cost is within the budget; 0 for none. Costs grow
    with the number but for the allocator's rounding: the guesses double, then halve the remaining
    range, then try BEYOND more numbers."""
    low = 0  # fits
    high = 1  # does not, or is past the last
    while high <= last and cost(high) <= budget:
        low = high
        high = 2 * high
    high = min(high, last + 1)
    while high - low > 1:
        guess = (low + high) // 2
        if cost(guess) <= budget:
            low = guess
        else:
            high = guess
    return next((n for n in range(min(low + BEYOND, last), low, -1) if cost(n) <= budget), low)


def nearest(
    job: Job,
    estimator: Estimator,
    budget_bytes: int,
    grids: Optional[Sequence[Tuple[str, Shape3]]] = None,
    *,
    same_training: bool = False,
) -> List[Option]:
    """The mildest change of each kind after which the job fits; if none is enough alone, one that
    takes them together. `grids` are the only grids that may
    be chosen, each with its option, the smallest first; None is any of the job's proportions.
    `same_training` leaves the changes that cost a run which has begun nothing but time: of the
    policy, and of the micro-batch but for batch norm, whose statistics follow it."""
    kinds = ["policy", "micro-batch", "dtype", "shape", "filters"]
    if same_training:
        kinds = ["policy"] if job.unet.norm == "batch" else ["policy", "micro-batch"]

    def mildest(job: Job, kind: str) -> Optional[Option]:
        """The mildest change that fits; if none does, the strongest; None without any."""
        count, change = _smaller(job, kind, grids)
        if not count:
            return None

        def bound(number: int) -> int:
            return estimator(change(number)[1]).upper_bound_bytes

        words, smaller = change(max(1, largest_number(bound, budget_bytes, count)))
        return Option(words, smaller, estimator(smaller))

    options = [option for option in (mildest(job, kind) for kind in kinds) if option]
    alone = [option for option in options if option.estimate.upper_bound_bytes <= budget_bytes]
    if alone:
        return alone
    words = []
    smaller = job
    for kind in kinds:
        option = mildest(smaller, kind)
        if option:
            smaller = option.job
            words.append(option.change)
            if option.estimate.upper_bound_bytes <= budget_bytes:
                return [Option(" ".join(words), smaller, option.estimate)]
    return []


Change = Callable[[int], Tuple[str, Job]]
"""Makes a numbered change: its option, and the job with it, which grows with the number."""


def _smaller(
    job: Job, kind: str, grids: Optional[Sequence[Tuple[str, Shape3]]]
) -> Tuple[int, Change]:
    """How many changes of a kind make a job smaller, numbered from 1, and what makes them: a shape
    may have a thousand million."""
    unet = job.unet
    changes: List[Tuple[str, Job]] = []
    if kind == "filters":
        return (unet.filters - 1) // STEP_OF_FILTERS, lambda number: _with_filters(job, number)
    if kind == "shape" and grids is None:
        return max(job.shape) // _step_of(job) - 1, lambda number: _with_extent(job, number)
    if kind == "policy" and job.policy != POLICIES[-1]:
        changes = [(f"--policy {POLICIES[-1]}", job.with_unet(policy=POLICIES[-1]))]
    elif kind == "micro-batch":
        numbers = [n for n in divisors(job.batch) if n < job.micro]
        changes = [(f"--micro-batch {n}", dataclasses.replace(job, micro_batch=n)) for n in numbers]
    elif kind == "dtype" and unet.dtype != "bfloat16":
        changes = [("--dtype bfloat16", job.with_unet(dtype="bfloat16"))]
    elif kind == "shape" and grids:
        others = [(name, shape) for name, shape in grids if shape != job.shape]
        changes = [(name, dataclasses.replace(job, shape=shape)) for name, shape in others]
    return len(changes), lambda number: changes[number - 1]


def _with_filters(job: Job, number: int) -> Tuple[str, Job]:
    filters = STEP_OF_FILTERS * number
    return f"--filters {filters}", job.with_unet(filters=filters)


def _with_extent(job: Job, number: int) -> Tuple[str, Job]:
    smaller = extent(job, number)
    return f"--shape {by(smaller.shape, ' ')}", smaller


def patch_for(job: Job, memory_bytes: int, name: str) -> Shape3:
    """The largest of `patch_shapes` that a GPU trains, `job.micro` at a time. Raises ValueError,
    with the bytes of the smallest and memory `name`, if it trains none."""
    shapes = patch_shapes(job.shape, job.unet.divisors)
    jobs = [dataclasses.replace(job, shape=shape) for shape in shapes]
    number = largest_number(lambda number: gpu_bytes(jobs[number - 1]), memory_bytes, len(jobs))
    if number:
        return jobs[number - 1].shape
    at_once = ""
    lower = "--filters"
    if job.micro > 1:
        at_once = f", {job.micro} at a time"
        lower = "--filters or --micro-batch"
    rule = f"{name} must hold a patch of at least {by(shapes[0], ' x ')}{at_once}"
    taken = format_bytes(gpu_bytes(jobs[0]))
    todo = f"lower {lower}, or use a larger card"
    raise ValueError(f"{rule}, which takes {taken}, got {format_bytes(memory_bytes)}; {todo}")


def least_patch(volume: Shape3, divisors: Shape3) -> Shape3:
    """The smallest patch to learn from: BOTTOM voxels along each axis at the deepest level, or all
    of the volume's."""
    return shape3(min(BOTTOM * divisor, side) for divisor, side in zip(divisors, volume))


def check_patch(patch: Sequence[int], volume: Shape3, divisors: Shape3) -> None:
    """Raise ValueError unless a network of these divisors learns from a patch of this shape, and a
    volume, whose sides are multiples of them, holds it. A side of the volume that is shorter than
    the least patch is taken whole. The error names the nearest patch that meets all rules."""
    if len(patch) != 3 or min(patch) < 1:
        rule = "--patch must be three positive numbers"
        raise ValueError(f"{rule}, got {tuple(patch)}; give voxels X Y Z")
    least = least_patch(volume, divisors)
    rules = []
    instead = ""
    if any(n > most for n, most in zip(patch, volume)):
        rules.append(f"fit into the volumes of {by(volume, ' ')}")
        instead = ", or --mode whole for all of a volume"
    if any(n % divisor or n < low for n, divisor, low in zip(patch, divisors, least)):
        multiples = f"{divisors_text(divisors)}, the levels' stride"
        rules.append(f"be divisible by {multiples}, and at least {by(least, ' ')}")
    if rules:
        fitting = []
        for n, divisor, low, most in zip(patch, divisors, least, volume):
            fitting.append(min(max(-(-n // divisor) * divisor, low), most))
        todo = f"give {by(fitting, ' ')}{instead}"
        raise ValueError(f"--patch {by(patch, ' ')} must {' and '.join(rules)}; {todo}")


def usual_patch(volume: Shape3, divisors: Shape3) -> Shape3:
    """USUAL_PATCH within a volume, or the least patch that a network of these divisors learns from
    if that is larger."""
    wanted = (max(n, BOTTOM * divisor) for n, divisor in zip(USUAL_PATCH, divisors))
    return shape3(map(min, wanted, volume))


def patch_shapes(volume: Shape3, divisors: Shape3) -> Tuple[Shape3, ...]:
    """The patches to choose from, each one divisor longer along one axis than the one before; the
    last is `volume`. Cubes and near-cubes as far as the volume allows: the axis that grows is the
    shortest one that is not yet as long as the volume, of equals the first. The first is
    `least_patch`. All axes are divisible, as the volume's are."""
    shape = list(least_patch(volume, divisors))
    shapes = [shape3(shape)]
    while shapes[-1] != shape3(volume):
        shorter = [axis for axis in range(3) if shape[axis] < volume[axis]]
        axis = min(shorter, key=lambda axis: shape[axis])
        shape[axis] += divisors[axis]
        shapes.append(shape3(shape))
    return tuple(shapes)


def gpu_bytes(job: Job) -> int:
    """Memory of a card that a training step takes, in plain layers: CONTEXT_BYTES, and CARD_SHARE
    times every layer's output, three of the largest for gradients, four sets of weights, and for
    cuDNN a workspace as large as a convolution's input and output, WORKSPACE_BYTES at most. Rough:
    two steps were measured."""
    layers = layer_plan(job.unet, job.shape)
    value_bytes = job.micro * job.unet.value_bytes
    sizes = [op.elements * value_bytes for op in layers]
    weights = sum(op.trainable for op in layers)
    held = 4 * 4 * weights + sum(sizes) + 3 * max(sizes) + min(2 * max(sizes), WORKSPACE_BYTES)
    return CONTEXT_BYTES + int(CARD_SHARE * held)


def gpu_forecast(job: Job) -> Dict[str, Any]:
    """A step's memory on a card, in fields of `training.Forecast.to_json`: the allocator holds all
    but the context."""
    card_bytes = gpu_bytes(job)
    sizes = {"allocator_peak_bytes": card_bytes - CONTEXT_BYTES, "card_bytes": card_bytes}
    return {**sizes, "constants": "rough: from two steps on an NVIDIA H200"}
