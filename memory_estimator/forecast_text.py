"""The forecast of a training for reading, as `train` and `estimate` print it: its steps in a table,
its memory and its time each in a line.

    steps_table(forecast).lines()
    time_line(forecast)          # "about 3.4 h in all: 3.1 h of steps, 12 min of validation"
"""

from typing import List, Sequence, Union

from memory_estimator.common.table import Table
from memory_estimator.common.units import by, format_bytes, format_seconds
from memory_estimator.estimate import Estimate
from memory_estimator.training import Forecast


def basis_of(forecast: Forecast) -> str:
    """What the seconds of a forecast are: predicted as they were for steps like these, whose error
    is known; scaled to other steps on this host; or as for another host."""
    if forecast.full.bound("step_s"):
        return "predicted"
    scale = forecast.full.constants.scale(forecast.full.job.unet.dtype)
    return "calibrated" if scale else "uncalibrated"


def steps_table(forecast: Forecast) -> Table:
    """The steps of a training, coarse and full, each on its largest grid, with the mean of their
    seconds, and what these are, and memory; a full step on the smallest and the median grid; and
    the memory of the whole run, with its validations."""
    columns = (
        "",
        "steps",
        "grid",
        f"a step, {basis_of(forecast)}",
        "allocator peak",
        "process peak",
    )
    schedule = forecast.schedule
    coarse_steps = min(schedule.coarse_steps, schedule.steps)
    rows: List[Sequence[str]] = []
    if forecast.coarse:
        rows.append(_row("coarse steps", coarse_steps, forecast.coarse, forecast.coarse_step_s))
    name = "full steps" if forecast.coarse else "steps"
    full = forecast.full
    rows.append(_row(name, schedule.steps - coarse_steps, full, forecast.full_step_s))
    for name, step in forecast.by_case:
        rows.append(_row(f"  {name}", "", step, step.step_s))
    if forecast.by_case:
        rows.append(_row("  largest case", "", full, full.step_s))
    peaks = (forecast.allocator_peak_bytes, forecast.process_peak_bytes)
    rows.append(("the whole run", str(schedule.steps), "", "", *map(_peak, peaks)))
    return Table(columns, rows)


def verdict(needed_bytes: int, memory_bytes: int, label: str) -> str:
    """Whether it fits, in one sentence; `label` describes `memory_bytes`, such as "free on this
    host"."""
    spare_bytes = memory_bytes - needed_bytes
    needed = f"needs up to {format_bytes(needed_bytes)}"
    memory = f"{format_bytes(memory_bytes)} {label}"
    difference = format_bytes(abs(spare_bytes))
    if spare_bytes < 0:
        return f"does not fit: {needed}, {memory}, {difference} short"
    return f"fits: {needed}, {memory}, {difference} to spare"


def time_line(forecast: Forecast) -> str:
    """The time of a training, such as "about 5.2 h in all: 4.8 h of steps, 20 min of validation, 4
    min of post-processing"; if the error of its steps is known within which hours, as "5.2 h in all
    (4.9 to 5.5 h): ..."."""
    named = (
        ("steps", forecast.steps_s),
        ("validation", forecast.validation_s),
        ("post-processing", forecast.postprocessing_s),
    )
    parts = [f"{format_seconds(seconds)} of {name}" for name, seconds in named if seconds]
    whole = f"{format_seconds(forecast.all_s)} in all"
    bound = forecast.full.bound("step_s")
    low_s = high_s = forecast.steps_s
    if bound:
        low_s = forecast.within_budget_s(forecast.training_s * (1 - bound.worst))
        high_s = forecast.within_budget_s(forecast.training_s * (1 + bound.worst))
    if low_s < high_s:
        other_s = forecast.all_s - forecast.steps_s
        whole += f" ({format_seconds(other_s + low_s)} to {format_seconds(other_s + high_s)})"
    else:
        whole = f"about {whole}"
    return f"{whole}: {', '.join(parts)}" if parts else whole


# --- Private helpers ---


def _row(name: str, count: Union[int, str], step: Estimate, step_s: float) -> Sequence[str]:
    grid = by(step.job.shape, " x ")
    peaks = (step.allocator_peak_bytes, step.process_peak_bytes)
    return (name, str(count), grid, format_seconds(step_s), *map(_peak, peaks))


def _peak(size_bytes: int) -> str:
    """Bytes for a cell; "-" for none: TensorFlow counts no tensors below 256 KiB."""
    return format_bytes(size_bytes or None)
