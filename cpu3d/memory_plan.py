"""What a training run will take of this host, before anything is allocated; a run that does not fit is refused.

config, why = pick_policy(config, host, 8)  the fastest memory policy that fits what is free, and a line that says why
foreseen = foresee(config, host, cases=8)   an Estimate, or None where the engine is not known to the estimator
check_fits(foreseen, host, others)          raises DoesNotFitError with the nearest settings that fit
"""

import dataclasses
import math
from typing import Dict, List, Optional, Sequence, Tuple, Union

from cpu3d.config import RunConfig
from cpu3d.errors import DoesNotFitError, InputError
from cpu3d.host.gpu import Gpu, card_of
from cpu3d.host.thread_plan import thread_plan
from memory_estimator import gpu
from memory_estimator.calibration import find_constants
from memory_estimator.closed_form.writer import DTYPE_BYTES
from memory_estimator.engines import installed_engine
from memory_estimator.estimate import STORE_NOTE, Estimate, estimate
from memory_estimator.host import Host
from memory_estimator.job import ENGINES, Job
from memory_estimator.planner import Price, fastest_that_fits, nearest
from memory_estimator.units import format_bytes, format_seconds
from models.config import UNetConfig

Shape3 = Tuple[int, int, int]

LOSS_MAPS = 8
"""float32 maps as large as the logits that a validation holds at a time: counted in the loss's code, not measured."""


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


def pick_policy(config: RunConfig, host: Host, cases: int) -> Tuple[RunConfig, str]:
    """`config` under the fastest policy that fits what is free, and why it is that one.

    Where none fits it is the one that takes least; speed for an engine that the estimator knows nothing of. Raises
    InputError where the host's calibration cannot be read.
    """
    job = job_of(config, thread_plan(host).intra_op, cases)
    if job is None:
        return under(config, "speed"), "policy speed: nothing is known of this engine's memory"
    try:
        choice = fastest_that_fits(job, _price(job, host), host.free_bytes)
    except ValueError as error:
        raise InputError(str(error)) from None
    reason = choice.reason(f"{format_bytes(host.free_bytes)} free")
    return under(config, choice.policy), f"policy {choice.policy}: {reason}"


def under(config: RunConfig, policy: str) -> RunConfig:
    """The run under another memory policy."""
    return dataclasses.replace(config, unet=dataclasses.replace(config.unet, policy=policy))


def foresee(config: RunConfig, host: Host, cases: int, volume: Optional[Shape3] = None) -> Optional[Estimate]:
    """Memory and time of a step of this run on this host; None for an engine that the estimator knows nothing of.

    `volume` is the shape that a run on patches validates on: it may be far larger than what its steps see, so what it
    takes is added to the upper bound. Raises InputError where the host's calibration cannot be read.
    """
    job = job_of(config, thread_plan(host).intra_op, cases)
    try:
        foreseen = job and _price(job, host)(job)
    except ValueError as error:
        raise InputError(str(error)) from None
    if foreseen is None or volume is None:
        return foreseen
    bound = foreseen.upper_bound_bytes + _validation_bytes(config.unet, volume)
    return dataclasses.replace(foreseen, upper_bound_bytes=bound)


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


def check_card(config: RunConfig, cards: Sequence[Gpu]) -> None:
    """Raise DoesNotFitError where the run's card may not hold a step; nothing for a run on the CPU."""
    if config.device == "cpu":
        return
    needed, card = _card_bytes(config), card_of(config.device, cards)
    if card.free_bytes is not None and needed > card.free_bytes:
        raise DoesNotFitError(
            f"{config.device} must hold a step of {format_bytes(needed)}, got {format_bytes(card.free_bytes)} free of "
            f"{format_bytes(card.memory_bytes)}; choose a smaller --patch, --batch or --filters, or --force"
        )


def check_fits(
    foreseen: Optional[Estimate], host: Host, grids: Sequence[Tuple[str, Shape3]] = (), *, continued: bool = False
) -> None:
    """Raise DoesNotFitError where a run may take more than is free; the error names the nearest settings that do fit.

    `grids` are the grids that the store offers besides, each with its option. A run that is `continued` may change its
    policy and, but for batch norm, its micro-batch; it has to keep its other settings: else it is another run. Between
    the predicted peak and the upper bound it is a matter of luck whether a run is killed: luck is not for long runs.
    """
    if foreseen is None or foreseen.upper_bound_bytes <= host.free_bytes:
        return
    price: Price = lambda job: estimate(job, foreseen.constants, foreseen.accuracy, host.memory_bytes)  # noqa: E731
    same = nearest(foreseen.job, price, host.free_bytes, same_training=True) if continued else []
    options = same or nearest(foreseen.job, price, host.free_bytes, grids=grids)
    fits = "; ".join(map(str, options)) or "nothing smaller does"
    advice = f"what fits: {fits}; or --force"
    if continued and not same:
        advice = f"free some, continue on a host with more, or --force; what fits, as a run in another folder: {fits}"
    what = "the allocator's regions, which double in size," if foreseen.regions_short else "this training,"
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


# --- Private helpers ---


def _validation_bytes(unet: UNetConfig, volume: Shape3) -> int:
    """A volume in use, one ahead and one in preparation; blended logits and their weights; the loss's float32 maps."""
    value_bytes = DTYPE_BYTES[unet.dtype]
    return math.prod(volume) * (3 * (unet.channels * value_bytes + unet.outputs) + 4 + LOSS_MAPS * 4 * unet.outputs)


def _card_bytes(config: RunConfig) -> int:
    return gpu.gpu_bytes(job_of(dataclasses.replace(config, engine="stock"), threads=1, cases=0))


def _price(job: Job, host: Host) -> Price:
    """What jobs of these threads take on this host. Raises ValueError where its calibration cannot be read."""
    constants = find_constants(job.threads, host)
    return lambda one: estimate(one, constants, host_bytes=host.memory_bytes)
