"""A plan for reading, as `train` prints it before anything is computed: what the network sees and
how long, its steps in a table, memory, time, and why things were decided so.

    print(*plan_lines(plan, host), sep="\\n")"""

from typing import List

from cpu3d.data.cases.notes import left_out_of_mean
from cpu3d.data.labels import all_names, mirror_pair
from cpu3d.decisions import volume_shape
from cpu3d.plan import Plan
from cpu3d.run.transfer import SEEN, freeze_words, init_rows
from cpu3d.util.records import listed
from memory_estimator import planner
from memory_estimator.common.units import by, counted, format_bytes, format_seconds
from memory_estimator.forecast_text import left_line, pace_line, steps_table, time_line, verdict
from memory_estimator.host import Host
from memory_estimator.job import statistics_note
from memory_estimator.training import Forecast
from models.layer_plan import training_flops
from models.strides import strides_text


def plan_lines(plan: Plan, host: Host) -> List[str]:
    """Lines to print before a run starts."""
    lines = [*_input_lines(plan), _network_line(plan), _length_line(plan), *_start_lines(plan)]
    lines += [_named("note", note) for note in _notes(plan)]
    if plan.forecast:
        lines += _forecast_lines(plan, plan.forecast, host)
    if plan.config.device != "cpu":
        needed = format_bytes(planner.gpu_bytes(plan.job))
        lines.append(_named("memory", f"a step takes about {needed} of the card"))
    return [*lines, *plan.reasons.values()]


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
    volume = by(volume_shape(plan.store, config), " x ")
    sees = f"{config.mode}, {by(config.grid, ' x ')} of {volume} ({config.extent})"
    if config.is_patch:
        sees += f", {config.patches_per_case} of a case an epoch"
        sees += f", {config.foreground:.0%} around labels"
    names = f"{', '.join(config.channels)} -> {', '.join(config.regions)}"
    place = f"{plan.store.folder}, {counted(len(manifest.cases), 'case')}"
    return [_named("store", f"{place}, {split}: {cases}"), _named("input", f"{sees}, {names}")]


def _network_line(plan: Plan) -> str:
    config = plan.config
    unet = config.unet
    gigaflops = training_flops(unet, config.grid, config.batch) / 1e9
    levels = f"{unet.depth} levels"
    if unet.strides and "strides" not in plan.reasons:
        levels += f" of strides {strides_text(unet.strides)}"
    words = f"{unet.network}, {levels}, {unet.filters} filters, {unet.norm} norm"
    words += f", {unet.dtype}, policy {unet.policy}, {gigaflops:,.0f} GFLOP a full step"
    return _named("network", words)


def _length_line(plan: Plan) -> str:
    """The steps of the run, and what is computed in each of them."""
    config = plan.config
    length = f"{plan.steps} steps, {plan.steps_per_epoch} an epoch"
    if config.has_open_length:
        length += f", cut to {config.budget_minutes:g} minutes"
    elif config.coarse_steps:
        length += f", {config.coarse_steps} of them on {by(config.coarse_grid, ' x ')}"
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
        words = f"{freeze_words(config)}; a step takes less than is predicted"
        lines.append(_named("freeze", words))
    return lines


def _forecast_lines(plan: Plan, forecast: Forecast, host: Host) -> List[str]:
    """Steps, memory and time."""
    done = plan.done
    full = forecast.full
    lines = ["", *steps_table(forecast, done).lines(), ""]
    fits = verdict(forecast.upper_bound_bytes, host.free_bytes, "free")
    lines.append(_named("memory", f"{fits} ({full.margin})"))
    epoch_s = forecast.at_pace_of(done).full.epoch_s
    epoch = f"an epoch of full steps {format_seconds(epoch_s)}"
    lines.append(_named("time", f"{time_line(forecast, done)}; {epoch}"))
    if done.steps:
        lines.append(_named("left", left_line(forecast, done)))
    basis = pace_line(forecast, done) or full.constants.basis(full.job, host)
    lines.append(_named("seconds", basis))
    return lines


def _notes(plan: Plan) -> List[str]:
    """What may be unexpected of a run like this."""
    config = plan.config
    manifest = plan.store.manifest
    notes = []
    of_batch_norm = statistics_note(config.unet.norm, config.batch, config.micro)
    if of_batch_norm:
        notes.append(of_batch_norm)
    pair = mirror_pair(all_names(manifest.labels, manifest.regions))
    if pair and config.augment.flip and "X" in config.augment.flip_axes:
        sides = " and ".join(pair)
        notes.append(f"no mirroring along X, as the labels {sides} are left and right")
    if not manifest.split["val"]:
        notes.append("no validation cases in this split: the last weights count as the best")
        return notes
    left_out = left_out_of_mean(plan.store.cases("val"), config.codes_by_region)
    if left_out and not plan.done.steps:
        rule = f"no validation case has {listed(left_out)}"
        notes.append(f"{rule}, so the mean Dice that chooses the best weights is of the others")
    return notes
