"""What a training run will take of this host, before anything is allocated; a run that does not fit is refused.

volumes = volumes_of(config, store)                  what patches are of, or what is seen at a lower resolution
config, why = pick_policy(config, host, 8, volumes)  the fastest memory policy that fits what is free, and why
foreseen = foresee(config, host, 8, volumes)         an Estimate, or None for an engine that the estimator does not know
check_fits(foreseen, host, others, volumes)          raises DoesNotFitError with the nearest settings that fit
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple, Union

from cpu3d.config import RunConfig
from cpu3d.data.region import Shape3
from cpu3d.data.store import Store
from cpu3d.errors import DoesNotFitError, InputError
from cpu3d.host.gpu import Gpu, card_of
from cpu3d.host.thread_plan import thread_plan
from cpu3d.patch_plan import volume_shape
from memory_estimator import planner as gpu
from memory_estimator.calibration import HostConstants, find_constants
from memory_estimator.estimate import RESAMPLED_BYTES, STORE_NOTE, Accuracy, Estimate, estimate
from memory_estimator.host import Host
from memory_estimator.job import DTYPE_BYTES, ENGINES, Job, installed_engine
from memory_estimator.planner import Price, fastest_that_fits, nearest
from memory_estimator.scaling.model import of_one
from memory_estimator.step.training_step import training_step
from memory_estimator.units import format_bytes, format_seconds

LOGITS_MAPS = 2
"""float32 maps as large as the logits that a validation of whole volumes holds at a time: what the windows have given,
or the axis before, and the whole as a tensor. The scores, which come after, take a slab of it at a time."""


VARIABLES = ("weights", "optimizer slots", "averaged weights")
"""Groups of the estimator's tensors that a checkpoint holds."""


@dataclass(frozen=True)
class Volumes:
    """The volumes of a run whose steps see less: patches of them, or all of them at a share of their resolution."""

    shape: Shape3
    """Voxels X, Y, Z at the store's resolution."""
    resolution: float = 1.0
    """Share of it that the network sees; 1 is patches."""

    def bytes(self, job: Job) -> int:
        """What they take beside what `job` tells of its steps: counted, not measured.

        Patches: a validation alone reads whole volumes; its logits and their weights come with them. At a lower
        resolution the steps are fed by whole volumes too, a micro-batch of them at a time; they are rotated before they
        are averaged down, and that is done in float32, along one axis after another.
        """
        unet, volumes, shrinking = job.unet, 3, 0.0
        if self.resolution < 1:
            volumes = 2 * job.micro + 1
            shrinking = job.micro * 4 * unet.channels * (1 + self.resolution)
            shrinking += RESAMPLED_BYTES * unet.channels if job.resampled else 0
        volume = unet.channels * DTYPE_BYTES[unet.dtype] + unet.outputs  # in use, ahead, and one in preparation
        validation = 4 + LOGITS_MAPS * 4 * unet.outputs
        return round(math.prod(self.shape) * (volumes * volume + validation + shrinking))


def volumes_of(config: RunConfig, store: Store) -> Optional[Volumes]:
    """Those of a run, of its fold's view of a store. None where they are what its steps see, and for patches that no
    validation follows."""
    if config.resolution == 1 and not (config.is_patch and store.manifest.split["val"]):
        return None
    return Volumes(volume_shape(store, config), config.resolution)


def job_of(config: RunConfig, threads: int, cases: int) -> Optional[Job]:
    """The run as a job of the estimator; None for an engine that it knows nothing of.

    `cases` are volumes an epoch, or patches.
    """
    engine = installed_engine() if config.engine == "auto" else config.engine
    if engine not in ENGINES:
        return None
    return Job(
        unet=config.unet,
        shape=config.grid,
        batch=config.batch,
        micro_batch=config.micro_batch,
        optimizer=config.optimizer,
        engine=engine,
        threads=threads,
        averaged=config.ema > 0,
        from_store=True,
        resampled=config.augment.resamples,
        cases=cases,
    )


def pick_policy(
    config: RunConfig, host: Host, cases: int, volumes: Optional[Volumes] = None, workers: int = 1
) -> Tuple[RunConfig, str]:
    """`config` under the fastest policy that fits what is free, and why it is that one.

    Where none fits it is the one that takes least; speed for an engine that the estimator knows nothing of. Raises
    InputError where the host's calibration cannot be read.
    """
    job = job_of(config, thread_plan(host).intra_op, cases)
    if job is None:
        return under(config, "speed"), "policy speed: nothing is known of this engine's memory"
    try:
        price = _priced(host, volumes, find_constants(job.threads, host), workers=workers, timed=_is_timed(config))
        choice = fastest_that_fits(job, price, host.free_bytes)
    except ValueError as error:
        raise InputError(str(error)) from None
    reason = choice.reason(f"{format_bytes(host.free_bytes)} free")
    return under(config, choice.policy), f"policy {choice.policy}: {reason}"


def under(config: RunConfig, policy: str) -> RunConfig:
    """The run under another memory policy."""
    return dataclasses.replace(config, unet=dataclasses.replace(config.unet, policy=policy))


def foresee(
    config: RunConfig, host: Host, cases: int, volumes: Optional[Volumes] = None, workers: int = 1
) -> Optional[Estimate]:
    """Memory and time of a step of this run on this host; None for an engine that the estimator knows nothing of.

    Of several workers it is the memory of one, of which `host` is the share, and the time of all of them together,
    their exchange aside.

    What `volumes` take is in the upper bound. Raises InputError where the host's calibration cannot be read.
    """
    job = job_of(config, thread_plan(host).intra_op, cases)
    try:
        constants = job and find_constants(job.threads, host)
        return job and _priced(host, volumes, constants, workers=workers, timed=_is_timed(config))(job)
    except ValueError as error:
        raise InputError(str(error)) from None


def describe(foreseen: Optional[Estimate], host: Host) -> List[str]:
    """The plan of memory and time, a line each, to print before the work starts."""
    if foreseen is None:
        return ["plan: nothing is known of this engine's memory and time"]
    bound, constants = foreseen.accuracy, foreseen.constants
    return [
        f"plan: allocator peak {format_bytes(foreseen.allocator_peak_bytes)} ({bound.error('allocator_peak')}), "
        f"process peak {format_bytes(foreseen.process_peak_bytes)} ({bound.error('process_peak')}), up to "
        f"{format_bytes(foreseen.upper_bound_bytes)} of {format_bytes(host.free_bytes)} free",
        f"plan: {format_seconds(foreseen.step_s)} a step, {format_seconds(foreseen.volume_s)} a volume, "
        f"{format_seconds(foreseen.epoch_s)} an epoch ({bound.error('step_s')}), validation aside",
        f"plan: speed {'; '.join((f'{constants.origin}, {constants.name}', *constants.caveats(host)))}",
        f"plan: {STORE_NOTE}",
    ]


def describe_card(config: RunConfig) -> List[str]:
    """The plan of a run on a card, a line each."""
    return [
        f"plan: a step takes {format_bytes(_card_bytes(config))} of the card's memory; {gpu.ASSUMPTIONS}",
        "plan: nothing is known of this card's speed",
    ]


def check_card(config: RunConfig, cards: Sequence[Gpu], *, continued: bool = False) -> None:
    """Raise DoesNotFitError where the run's card may not hold a step; nothing for a run on the CPU.

    A run that is `continued` has to keep its patch and its network.
    """
    if config.device == "cpu":
        return
    needed, card = _card_bytes(config), card_of(config.device, cards)
    if card.free_bytes is None or needed <= card.free_bytes:
        return
    parts = "a smaller --micro-batch, " if config.micro > 1 else ""
    if continued:
        parts = "" if config.unet.norm == "batch" else parts
        advice = f"free some of it, or take another --device, {parts}or --force"
    else:
        size = "a smaller --patch" if config.is_patch else "--mode patch"
        advice = f"choose {size}, {parts}fewer --filters, or --force"
    raise DoesNotFitError(
        f"{config.device} must hold a step of {format_bytes(needed)}, got {format_bytes(card.free_bytes)} free of "
        f"{format_bytes(card.memory_bytes)}; {advice}"
    )


def check_fits(
    foreseen: Optional[Estimate],
    host: Host,
    grids: Sequence[Tuple[str, Shape3]] = (),
    volumes: Optional[Volumes] = None,
    *,
    continued: bool = False,
    workers: int = 1,
) -> None:
    """Raise DoesNotFitError where a run may take more than is free; the error names the nearest settings that do fit.

    `grids` are the grids that may be had besides, each with its option, the largest first. A run that is `continued`
    may change its policy and, but for batch norm, its micro-batch; it has to keep its other settings: else it is
    another run. Between the predicted peak and the upper bound it is a matter of luck whether a run is killed: luck is
    not for long runs.
    """
    if foreseen is None or foreseen.upper_bound_bytes <= host.free_bytes:
        return
    price = _priced(host, volumes, foreseen.constants, foreseen.accuracy, workers)
    same = nearest(foreseen.job, price, host.free_bytes, same_training=True) if continued else []
    grids = _mildest(grids, foreseen.job, price, host.free_bytes)
    options = same or nearest(foreseen.job, price, host.free_bytes, grids=grids)
    fits = "; ".join(map(str, options)) or "nothing smaller does"
    advice = f"what fits: {fits}; or --force"
    if continued and not same:
        advice = f"free some, continue on a host with more, or --force; what fits, as a run in another folder: {fits}"
    what = "this training,"
    if foreseen.regions_short:
        what = "the allocator's regions, which double in size,"
    elif volumes and 2 * volumes.bytes(foreseen.job) > foreseen.upper_bound_bytes:
        what = "this training, most of it validation on whole volumes,"
    raise DoesNotFitError(
        f"memory must hold {what} up to {format_bytes(foreseen.upper_bound_bytes)}, got "
        f"{format_bytes(host.free_bytes)} free; {advice}"
    )


def for_log(foreseen: Optional[Estimate]) -> Dict[str, Union[int, float, str]]:
    """What the run's log keeps of the plan, for the report to hold against what was measured."""
    if foreseen is None:
        return {}
    return {
        "allocator_peak_bytes": foreseen.allocator_peak_bytes,
        "process_peak_bytes": foreseen.process_peak_bytes,
        "upper_bound_bytes": foreseen.upper_bound_bytes,
        "step_s": foreseen.step_s,
        "constants": foreseen.constants.name,
    }


def card_for_log(config: RunConfig) -> Dict[str, Union[int, str]]:
    """What the run's log keeps of the plan of a run on a card, whose allocator holds all but the context."""
    card_bytes = _card_bytes(config)
    return {
        "allocator_peak_bytes": card_bytes - gpu.CONTEXT_BYTES,
        "card_bytes": card_bytes,
        "constants": "assumed, not verified on a GPU",
    }


# --- Private helpers ---


def _is_timed(config: RunConfig) -> bool:
    """Whether steps are timed before the run, to fit it into a budget of minutes."""
    return bool(config.budget_minutes) and not config.steps


def _card_bytes(config: RunConfig) -> int:
    return gpu.gpu_bytes(job_of(dataclasses.replace(config, engine="stock"), threads=1, cases=0))


def _priced(
    host: Host,
    volumes: Optional[Volumes],
    constants: HostConstants,
    accuracy: Optional[Accuracy] = None,
    workers: int = 1,
    timed: bool = False,
) -> Price:
    """What jobs take on this host, the run's volumes and the workers' exchange in their upper bound.

    Where steps are `timed` before the run, its variables are held as they were, beside those that the steps change.
    """

    def price(job: Job) -> Estimate:
        said = of_one(estimate(job, constants, accuracy, host.memory_bytes), workers)
        beside = volumes.bytes(job) if volumes else 0
        if timed:
            beside += sum(one.bytes for one in training_step(job).resident if one.group in VARIABLES)
        return dataclasses.replace(said, upper_bound_bytes=said.upper_bound_bytes + beside)

    return price


def _mildest(
    grids: Sequence[Tuple[str, Shape3]], job: Job, price: Price, budget_bytes: int
) -> Sequence[Tuple[str, Shape3]]:
    """Of grids, largest first, the first one that fits; the last where none does."""
    for option, shape in grids:
        if price(dataclasses.replace(job, shape=shape)).upper_bound_bytes <= budget_bytes:
            return [(option, shape)]
    return grids[-1:]
