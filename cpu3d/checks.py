"""Whether a planned run can be begun, or go on: whether it has something to learn, and whether it
fits the free memory, or which settings would.

check_length(plan, chosen)      # raises InputError if a run would be shorter than it is
check_run(plan, host, gpus)     # raises DoesNotFitError with the nearest settings that fit
"""

from typing import Sequence, Tuple

from cpu3d.chosen import Chosen
from cpu3d.data.cases.notes import absence_line, absent_regions
from cpu3d.errors import DoesNotFitError, InputError
from cpu3d.forecast import smaller_grids
from cpu3d.host.gpu import Gpu, card_of, check_card
from cpu3d.plan import Plan
from memory_estimator import planner
from memory_estimator.common.units import format_bytes
from memory_estimator.host import Host


def learnable(plan: Plan) -> Tuple[str, bool]:
    """The warning of regions that none of a run's training cases has, "" if they have all; and
    whether they have any."""
    config = plan.config
    if not config.region_codes:  # of a run without a store
        return "", True
    regions = config.codes_by_region
    absent = absent_regions(plan.store.cases("train"), regions)
    line = absence_line(absent, regions, f"store {plan.store.folder}")
    return line, len(absent) < len(regions)


def check_length(plan: Plan, chosen: Chosen) -> None:
    """Raise InputError for a chosen length that is less than what a run has: steps cannot be taken
    back."""
    done = plan.done.steps
    is_chosen = "steps" in chosen or "epochs" in chosen
    if not is_chosen or plan.config.has_open_length or plan.steps >= done:
        return
    rule = f"steps must be at least {done}, which the run has"
    raise InputError(f"{rule}, got {plan.steps}; --steps {done} ends it there")


def check_run(plan: Plan, host: Host, gpus: Sequence[Gpu] = ()) -> None:
    """Raise DoesNotFitError, with the nearest settings that fit, if the upper bound of a run is
    more than is free. A run that continues may change its policy and, but for batch norm, its
    micro-batch: else it is another run. Before that it raises InputError for a new run whose
    training cases have nothing to learn."""
    if plan.saved is None:
        warning, has_any = learnable(plan)
        if not has_any:
            problem = warning[len("warning: ") :]
            raise InputError(f"{problem}, or train all the same with --force")
    if plan.config.device != "cpu":
        smaller = "fewer --filters, a smaller --patch or --micro-batch"
        if plan.saved:
            smaller = "another --device"
        check_card(card_of(plan.config.device, gpus), plan.job, f"choose {smaller}, or --force")
        return
    free_bytes = host.free_bytes
    forecast = plan.forecast
    if forecast is None or forecast.upper_bound_bytes <= free_bytes:
        return
    full = forecast.full
    price = forecast.course.price(full.constants, full.accuracy, workers=plan.workers)
    options = []
    place = ""
    if plan.saved:
        options = planner.nearest(full.job, price, free_bytes, same_training=True)
        if not options:
            place = "as a run in another folder"
    if not options:
        grids = smaller_grids(plan.config, plan.store)
        options = planner.nearest(full.job, price, free_bytes, grids=grids)
    if options:
        fits = "what fits"
        if place:
            fits += f", {place}"
        listed = "; ".join(map(str, options))
        smaller = f"{fits}: {listed}"
    elif place:
        smaller = f"no smaller setting fits, even {place}"
    else:
        smaller = "no smaller setting fits"
    rule = f"memory must hold this training, up to {format_bytes(forecast.upper_bound_bytes)}"
    todo = "end other programs, use a host with more memory, or --force"
    raise DoesNotFitError(f"{rule}, got {format_bytes(free_bytes)} free; {smaller}; {todo}")
