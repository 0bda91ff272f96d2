"""What an estimate looks like on a terminal: the bill, the predictions with their errors, the verdict and the plan."""

from typing import Any, List, Optional, Sequence

from memory_estimator.estimate import STORE_NOTE, Estimate
from memory_estimator.gpu import ASSUMPTIONS, Patch
from memory_estimator.job import Job, statistics_note
from memory_estimator.planner import Option, Plan
from memory_estimator.units import format_bytes, format_seconds

WIDTH = 120
"""Columns where the output is no terminal, as in a log."""


def describe(job: Job) -> str:
    """The job in one line."""
    unet = job.unet
    extras = [
        name for name, there in (("residual", unet.residual), ("deep supervision", unet.deep_supervision)) if there
    ]
    return ", ".join(
        (
            f"{_grid(job.shape)} x {unet.channels} -> {unet.outputs}",
            f"{unet.network}, {unet.depth} levels, {unet.filters} filters, {unet.norm} norm",
            *extras,
            f"batch {job.batch}{f', {job.micro} at a time' if job.parts > 1 else ''}, {unet.dtype}, {job.optimizer}",
            f"{job.engine}, policy {job.policy}, {count_of(job.threads, 'thread')}",
        )
    )


def print_estimate(
    estimate: Estimate,
    *,
    memory_bytes: int,
    whose: str,
    advice: Sequence[str],
    caveats: Sequence[str] = (),
    picked: str = "",
    notes: Sequence[str] = (),
) -> None:
    """The whole answer for one job; `whose` says what `memory_bytes` is, such as "free on this host", `caveats` why
    speed and baseline may be less than measured, `picked` why it has its policy where that was left open, and `notes`
    what else is to be known of it."""
    console = new_console()
    say = lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)  # noqa: E731
    say(describe(estimate.job))
    if picked:
        say(f"policy {estimate.job.policy} picked: {picked}")
    say("")
    console.print(_bill(estimate))
    console.print(_predictions(estimate))
    console.print(_largest(estimate))
    constants = estimate.constants
    say(f"errors: {estimate.accuracy.basis}")
    say(f"speed and baseline: {'; '.join((f'{constants.origin}, {constants.name}', *caveats))} ({constants.record})")
    if estimate.job.from_store:
        say(f"note: {STORE_NOTE}")
    job = estimate.job
    statistics = statistics_note(job.unet.norm, job.batch, job.micro)
    for note in (*notes, *([statistics] if statistics else [])):
        say(f"note: {note}")
    say(verdict(estimate, memory_bytes, whose))
    for line in advice:
        say(f"  {line}")


def verdict(estimate: Estimate, memory_bytes: int, whose: str) -> str:
    """Whether it fits, in one sentence."""
    if estimate.regions_short:
        return (
            f"does not fit: TensorFlow's allocator takes memory in regions that double in size, here "
            f"{format_bytes(estimate.upper_bound_bytes)} in all; cut down to the host's memory they have no place for "
            "the largest tensors"
        )
    fits = estimate.upper_bound_bytes <= memory_bytes
    left = format_bytes(abs(memory_bytes - estimate.upper_bound_bytes))
    return (
        f"{'fits' if fits else 'does not fit'}: needs up to {format_bytes(estimate.upper_bound_bytes)}, "
        f"{format_bytes(memory_bytes)} {whose}, {left} {'to spare' if fits else 'short'}"
    )


def print_plan(plans: Sequence[Plan], options: Sequence[Option], asked: Estimate, *, memory_bytes: int) -> None:
    """What fits a memory under each policy, and what would save what. `asked` may have a policy that was picked."""
    console = new_console()
    table = new_table(f"The largest that fits {format_bytes(memory_bytes)}, all else as asked for")
    for name in ("policy", "", "largest", "upper bound", "a volume"):
        table.add_column(name, justify="left" if name in ("policy", "") else "right")
    for one in plans:
        for name, found, value in (
            ("batch at once", one.batch, lambda job: str(job.batch)),
            ("filters", one.filters, lambda job: str(job.unet.filters)),
            ("extent", one.extent, lambda job: _grid(job.shape)),
        ):
            cells = ("none", "", "") if found is None else _taken(found, value(found.job))
            table.add_row(one.policy, name, *cells)
        table.add_section()
    console.print(table)
    note = "batch at once: in parts, by --micro-batch, any larger one takes what one part does and a set of gradients"
    console.print(note, highlight=False, soft_wrap=True)
    console.print()
    table = new_table("What would save what, each for itself")
    for name in ("", "process peak", "saved", "a volume"):
        table.add_column(name, justify="right" if name else "left")
    first = (f"as asked for, policy {asked.job.policy}", asked)
    for label, taken in (first, *((option.change, option.estimate) for option in options)):
        saved = asked.process_peak_bytes - taken.process_peak_bytes
        table.add_row(
            label,
            format_bytes(taken.process_peak_bytes),
            format_bytes(saved) if saved else "",
            format_seconds(taken.volume_s),
        )
    console.print(table)


def print_patch(patch: Optional[Patch], *, memory_bytes: int) -> None:
    """The largest patch that a GPU of `memory_bytes` trains, and what that assumes."""
    console = new_console()
    if patch is None:
        text = f"a GPU of {format_bytes(memory_bytes)} trains no patch of this network, not even the smallest"
    else:
        share = "a whole volume fits" if patch.holds_volume else f"{patch.share_of_volume:.0%} of the volume's voxels"
        text = (
            f"a GPU of {format_bytes(memory_bytes)} trains patches of up to {_grid(patch.job.shape)}, "
            f"{'one' if patch.job.micro == 1 else patch.job.micro} at a time: "
            f"{format_bytes(patch.bytes)}; {share}"
        )
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    console.print(f"  {ASSUMPTIONS}", highlight=False, markup=False, soft_wrap=True)


def new_console() -> Any:
    """As wide as the terminal, or as WIDTH."""
    from rich.console import Console  # a tenth of a second, and not needed for --json

    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def new_table(title: str) -> Any:
    """In the look of all the estimator's tables."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)


def count_of(number: int, noun: str) -> str:
    """Such as "1 thread", "2 threads"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# --- Private helpers ---


def _bill(estimate: Estimate) -> Any:
    table = new_table(f"Held at the peak, while {estimate.peak_op} runs")
    table.add_column("")
    table.add_column("bytes", justify="right")
    table.add_column("how it is known")
    for line in estimate.components:
        table.add_row(line.name, format_bytes(line.bytes), line.source)
    return table


def _predictions(estimate: Estimate) -> Any:
    table = new_table("Predicted")
    table.add_column("")
    table.add_column("", justify="right")
    bound = estimate.accuracy
    table.add_column("error over the measured configurations: median, worst" if bound.is_measured else "error")
    time = bound.error("step_s")
    rows: List[Sequence[str]] = [
        ("allocator peak", format_bytes(estimate.allocator_peak_bytes), bound.error("allocator_peak")),
        ("process peak", format_bytes(estimate.process_peak_bytes), bound.error("process_peak")),
        ("upper bound", format_bytes(estimate.upper_bound_bytes), bound.margin),
        ("step", format_seconds(estimate.step_s), time),
        ("volume", format_seconds(estimate.volume_s), time),
    ]
    if estimate.epoch_s is None:
        rows.append(("epoch", "-", "add --cases N"))
    else:
        counted = f"{estimate.job.cases} cases, validation not counted"
        rows.append(("epoch", format_seconds(estimate.epoch_s), f"{time}; {counted}"))
    for row in rows:
        table.add_row(*row)
    return table


def _largest(estimate: Estimate) -> Any:
    table = new_table("The largest tensors at the peak")
    table.add_column("")
    table.add_column("bytes", justify="right")
    table.add_column("counted under")
    for tensor in estimate.largest:
        table.add_row(tensor.name, format_bytes(tensor.bytes), tensor.group)
    return table


def _taken(found: Estimate, value: str) -> Sequence[str]:
    return value, format_bytes(found.upper_bound_bytes), format_seconds(found.volume_s)


def _grid(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
