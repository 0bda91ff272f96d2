"""An estimate for several hosts as a picture: the time over the hosts, with a fixed batch and with one that grows."""

from typing import Any, List, Optional, Tuple

from memory_estimator.figure import PALETTE, new_figure, plain, png
from memory_estimator.scaling.model import Point, Scaling, limits
from memory_estimator.scaling.options import ScaleRequest
from memory_estimator.scaling.report import rows_of


def draw_scaling(request: ScaleRequest) -> bytes:
    """Hours in all, or without cases the milliseconds of a volume, over hosts; both axes logarithmic. PNG.

    The dashed line is what one worker alone would take, divided by all workers. A fixed batch that cannot be dealt to
    some number of hosts has no point there.
    """
    figure = new_figure(9.6, 3.9)
    every = figure.subplots(1, 2, sharey=True)
    panels = (
        (f"the batch stays {request.fixed.batch}", request.fixed),
        (f"the batch grows, {request.growing.batch_per_worker} a worker", request.growing),
    )
    lines = {}
    for axes, (title, scaling) in zip(every, panels):
        _panel(axes, title, scaling, request)
        handles, names = axes.get_legend_handles_labels()
        lines.update(zip(names, handles))
    figure.legend(lines.values(), lines.keys(), frameon=False, fontsize=8, loc="lower center", ncols=3)
    has_cases = _is_whole(request)
    every[0].set_ylabel("hours in all" if has_cases else "milliseconds a volume")
    unet, training = request.job.unet, request.growing.training
    what = f", {training.cases:,} cases x {training.epochs}" if has_cases else ""
    shape = " x ".join(map(str, request.job.shape))
    title = f"Predicted time on several hosts: {shape}, {unet.filters} filters, {unet.dtype}{what}"
    figure.suptitle(title, fontsize=10.5, fontweight="bold", x=0.01, ha="left")
    figure.tight_layout(pad=0.6, w_pad=1.6, rect=(0, 0.06, 1, 0.98))
    return png(figure)


# --- Private helpers ---


def _is_whole(request: ScaleRequest) -> bool:
    """Whether all is known that hours need."""
    return request.growing.training.cases > 0


def _panel(axes: Any, title: str, scaling: Scaling, request: ScaleRequest) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    plain(axes, title)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    points: List[Tuple[int, float]] = [
        (point.hosts, value)
        for _, point, _ in rows_of(scaling, sorted(request.hosts))
        if point and (value := _value(point, request)) is not None
    ]
    if points:
        hosts, values = zip(*points)
        first = scaling.first(lambda point: True)
        # Of one worker that shares its host with none: what all others are held against.
        ideal = first and _value(first, request) * first.efficiency * first.hosts
        if ideal:
            axes.plot(hosts, [ideal / number for number in hosts], "--", color="#777777", linewidth=1.2, label="ideal")
        axes.plot(hosts, values, "o-", color=PALETTE[0], linewidth=1.6, markersize=4.5, label="predicted")
    limit = limits(scaling)[0.1]
    if limit and points and limit <= max(request.hosts):
        axes.axvline(limit, color=PALETTE[1], linewidth=1.1, linestyle=":", label="exchange above a tenth of a step")
    if request.claim:
        for hours, whose in ((request.claim.one_h, "one"), (request.claim.many_h, "several")):
            axes.axhline(hours, color="#333333", linewidth=0.9, linestyle="-.")
            axes.text(0.99, hours * 1.05, f"published, {whose}: {hours:g} h", fontsize=7.5, ha="right", va="bottom",
                      color="#333333", transform=axes.get_yaxis_transform())  # fmt: skip
    axes.set_xticks(sorted(request.hosts), [str(number) for number in sorted(request.hosts)])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()
    axes.set_xlabel(
        "hosts" if scaling.hosts.workers_per_host == 1 else f"hosts, {scaling.hosts.workers_per_host} workers each"
    )


def _value(point: Point, request: ScaleRequest) -> Optional[float]:
    if _is_whole(request):
        return None if point.total_s is None else point.total_s / 3600
    return 1000 / point.cases_per_s
