"""A plan for reading, as `train` prints it before anything is computed, and whether it may begin:
whether it has something to learn, and fits the free memory, or which settings would.

    print(*plan_lines(plan, host), sep="\\n")
    check_run(plan, host, gpus)     # raises DoesNotFitError with the nearest settings that fit
"""

import math
from typing import List, Sequence, Tuple

from cpu3d.data.cases.notes import absence_line, absent_regions, left_out_of_mean
from cpu3d.data.labels import mirror_pair
from cpu3d.data.store import case_box
from cpu3d.data.stores.store_decisions import grids_text
from cpu3d.errors import DoesNotFitError, InputError
from cpu3d.host.gpu import Gpu, card_of, check_card
from cpu3d.plan import Plan, grids_of, smaller_grids
from cpu3d.run.transfer import SEEN, init_rows
from cpu3d.util.records import listed
from memory_estimator import planner
from memory_estimator.common.units import by, counted, format_bytes, format_seconds
from memory_estimator.forecast_text import steps_table, time_line, verdict
from memory_estimator.host import Host
from memory_estimator.job import statistics_note
from models.config import UNetConfig
from models.layer_plan import training_flops
from models.strides import strides_text


def plan_lines(plan: Plan, host: Host) -> List[str]:
    """Lines to print before a run starts."""
    lines = [*_input_lines(plan), _network_line(plan), _length_line(plan), *_start_lines(plan)]
    lines += [_named("note", note) for note in _notes(plan)]
    if plan.forecast:
        lines += _forecast_lines(plan, host)
    if plan.config.device != "cpu":
        needed = format_bytes(planner.gpu_bytes(plan.job))
        lines.append(_named("memory", f"a step takes about {needed} of the card"))
    return [*lines, *plan.reasons.values()]


def learnable(plan: Plan) -> Tuple[str, bool]:
    """The warning of regions that none of a run's training cases has, "" if they have all; and
    whether they have any."""
    config = plan.config
    regions = config.codes_by_region
    absent = absent_regions(plan.store.cases("train"), regions)
    line = absence_line(absent, regions, f"store {plan.store.folder}")
    return line, len(absent) < len(regions)


def check_run(plan: Plan, host: Host, gpus: Sequence[Gpu] = ()) -> None:
    """Raise DoesNotFitError, with the nearest settings that fit, if the upper bound of a run is
    more than is free. A run that continues may change its policy and, but for batch norm, its
    micro-batch: else it is another run. Before that it raises InputError for a new run whose
    training cases have nothing to learn."""
    if not plan.continues:
        warning, has_any = learnable(plan)
        if not has_any:
            problem = warning[len("warning: ") :]
            raise InputError(f"{problem}, or train all the same with --force")
    if plan.config.device != "cpu":
        smaller = "fewer --filters, a smaller --patch or --micro-batch"
        if plan.continues:
            smaller = "another --device"
        check_card(card_of(plan.config.device, gpus), plan.job, f"choose {smaller}, or --force")
        return
    free_bytes = host.free_bytes
    forecast = plan.forecast
    if forecast is None or forecast.upper_bound_bytes <= free_bytes:
        return
    full = forecast.full
    estimator = forecast.schedule.estimator(full.constants, full.accuracy, workers=plan.workers)
    options = []
    fits = "what fits"
    if plan.continues:
        options = planner.nearest(full.job, estimator, free_bytes, same_training=True)
        fits += "" if options else ", as a run in another folder"
    if not options:
        grids = smaller_grids(plan.config)
        options = planner.nearest(full.job, estimator, free_bytes, grids=grids)
    smaller = f"{fits}: {'; '.join(map(str, options)) or 'no smaller setting'}"
    rule = f"memory must hold this training, up to {format_bytes(forecast.upper_bound_bytes)}"
    todo = "end other programs, use a host with more memory, or --force"
    if not plan.config.is_patch:
        extent = plan.config.extent
        cases = plan.store.manifest.cases
        largest = max(cases, key=lambda case: math.prod(case_box(case, extent).size))
        other = "take --mode patch or a store of a larger --spacing"
        todo = f"leave out {largest.case_id}, the largest case, {other}, {todo}"
    raise DoesNotFitError(f"{rule}, got {format_bytes(free_bytes)} free; {smaller}; {todo}")


def network_words(unet: UNetConfig) -> str:
    """The network in words, such as "unet3d, 4 levels, 16 filters, instance norm"."""
    levels = f"{unet.depth} levels"
    if unet.strides:
        levels += f" of strides {strides_text(unet.strides)}"
    if unet.averages:
        levels += f" on means of {by(unet.average, ' x ')} voxels"
    return f"{unet.network}, {levels}, {unet.filters} filters, {unet.norm} norm"


# --- Private helpers ---


def _named(name: str, text: str) -> str:
    """A line whose text stands below that of the others."""
    return f"{name + ':':<8} {text}"


def _input_lines(plan: Plan) -> List[str]:
    """The store, and what the network sees of it."""
    config = plan.config
    manifest = plan.store.manifest
    split = f"split {config.split_hash}"
    if config.fold:
        split += f", fold {config.fold}"
    cases = ", ".join(f"{len(ids)} {name}" for name, ids in manifest.split.items())
    grids = grids_text(grids_of(config, plan.store))
    sees = f"whole, {grids} ({config.extent})"
    if config.whole_every > 1:
        sees += f" in 1 step of {config.whole_every}, else crops around the labels, "
        sees += f"{config.crop_share:.0%} of the voxels"
    if config.is_patch:
        sees = f"patch, {by(config.grid, ' x ')} of {grids} ({config.extent})"
    if config.samples_per_case > 1:
        sees += f", {config.samples_per_case} of a case an epoch"
    names = f"{', '.join(config.channels)} -> {', '.join(config.regions)}"
    place = f"{plan.store.folder}, {counted(len(manifest.cases), 'case')}"
    return [_named("store", f"{place}, {split}: {cases}"), _named("input", f"{sees}, {names}")]


def _network_line(plan: Plan) -> str:
    config = plan.config
    gigaflops = training_flops(config.unet, config.grid, config.batch) / 1e9
    return _named(
        "network",
        f"{network_words(config.unet)}, {config.unet.dtype}, policy {config.unet.policy}, "
        f"{gigaflops:,.0f} GFLOP a full step",
    )


def _length_line(plan: Plan) -> str:
    """The steps of the run, and what is computed in each of them."""
    config = plan.config
    length = f"{plan.steps} steps, {plan.steps_per_epoch} an epoch"
    if config.has_open_length:
        length += f", cut to {config.budget_minutes:g} minutes"
    elif config.coarse_steps:
        length += f", {config.coarse_steps} of them on {by(config.coarse_seen_grid, ' x ')}"
    batch = f"batch {config.batch}, {config.micro} at a time"
    place = f"{counted(plan.workers, 'worker')} on {config.device}"
    return _named("run", f"{length}; {batch}, {place}")


def _start_lines(plan: Plan) -> List[str]:
    """The weights that the run starts from, and what of them stays."""
    config = plan.config
    lines = []
    if config.init_record:
        for name, text in init_rows(config.init_record):
            line = _named("init", f"{name}: {text}")
            if name == SEEN and config.init_record.seen:
                line = f"warning: {line}"
            lines.append(line)
    if config.freeze != "none":
        words = f"{config.freeze}; a step takes less than is predicted"
        lines.append(_named("freeze", words))
    return lines


def _forecast_lines(plan: Plan, host: Host) -> List[str]:
    """Steps, memory and time."""
    forecast = plan.forecast
    full = forecast.full
    lines = ["", *steps_table(forecast).lines(), ""]
    fits = verdict(forecast.upper_bound_bytes, host.free_bytes, "free")
    lines.append(_named("memory", f"{fits} ({full.margin})"))
    epoch = f"an epoch of full steps {format_seconds(forecast.epoch_s)}"
    lines.append(_named("time", f"{time_line(forecast)}; {epoch}"))
    if plan.done:
        left = f"about {format_seconds(plan.left_s)} after step {plan.done}"
        lines.append(_named("left", left))
    lines.append(_named("seconds", full.constants.basis(full.job, host)))
    return lines


def _notes(plan: Plan) -> List[str]:
    """What may be unexpected of a run like this."""
    config = plan.config
    manifest = plan.store.manifest
    notes = []
    batch_norm_note = statistics_note(config.unet.norm, config.batch, config.micro)
    if batch_norm_note:
        notes.append(batch_norm_note)
    pair = mirror_pair((*manifest.labels.values(), *manifest.regions))
    if pair and config.augment.flip:
        sides = " and ".join(pair)
        notes.append(f"no mirroring along X, as the labels {sides} are left and right")
    if not manifest.split["val"]:
        notes.append("no validation cases in this split: the last weights count as the best")
        return notes
    left_out = left_out_of_mean(plan.store.cases("val"), config.codes_by_region)
    if left_out and not plan.done:
        notes.append(
            f"no validation case has {listed(left_out)}, so the mean Dice that chooses the best "
            "weights is of the others"
        )
    return notes
