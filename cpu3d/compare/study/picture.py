"""The resolution study as pictures: Dice over resolution as in S2's Fig. 2, and the search, Dice over learning rate."""

from typing import Any, Callable, List, Sequence

from cpu3d.compare.study.learning_rates import winner
from cpu3d.compare.study.result import Arm, Study
from memory_estimator.figure import PALETTE, new_figure, plain, png

Values = Callable[[Arm], List[float]]
"""An arm's values, one a seed."""


def draw_scores(study: Study) -> bytes:
    """Mean Dice and training time over resolution: a line through a batch's means, a dot for each seed. PNG."""
    figure = new_figure(9.4, 3.5)
    dice, time = figure.subplots(1, 2, gridspec_kw={"width_ratios": (3, 2)})
    of = f"of {study.regions[0]}" if len(study.regions) == 1 else "mean of all regions"
    _over_resolution(dice, study, Arm.over_seeds, f"Dice on the full grid, {of}", "Dice")
    _over_resolution(time, study, lambda arm: [run.train_s for run in arm.runs], "Training time", "s")
    time.set_ylim(bottom=0)
    if len(study.batches) > 1:
        dice.legend(frameon=False, fontsize=8, title="effective batch", title_fontsize=8, loc="best")
    figure.tight_layout(pad=0.6, w_pad=2)
    return png(figure)


def draw_regions(study: Study) -> bytes:
    """Dice of each region over resolution, a panel a region. PNG."""
    regions = study.regions
    figure = new_figure(9.4, 2.9)
    panels = figure.subplots(1, len(regions), sharey=True, squeeze=False)[0]
    for axes, region in zip(panels, regions):
        _over_resolution(axes, study, lambda arm, region=region: arm.over_seeds("dice", region), region, "")
        axes.tick_params(axis="y", labelleft=True)
    panels[0].set_ylabel("Dice", fontsize=9)
    if len(study.batches) > 1:
        panels[-1].legend(frameon=False, fontsize=8, title="effective batch", title_fontsize=8, loc="best")
    figure.tight_layout(pad=0.6, w_pad=1.6)
    return png(figure)


def draw_search(study: Study) -> bytes:
    """Validation Dice of the short runs over their learning rate: a panel a batch, a line a resolution.

    The rate of the full runs is ringed; one that diverged stands as a cross at the foot of its panel. PNG.
    """
    searched = [batch for batch in study.batches if any(arm.trials for arm in study.at_batch(batch))]
    figure = new_figure(max(4.7 * len(searched), 5.4), 3.3)
    panels = figure.subplots(1, len(searched), sharey=True, squeeze=False)[0]
    for axes, batch in zip(panels, searched):
        title = f"Search at batch {batch}" if len(study.batches) > 1 else "Search for the learning rate"
        plain(axes, title)
        for arm in study.at_batch(batch):
            if arm.trials:
                _search_line(axes, arm, PALETTE[study.resolutions.index(arm.resolution) % len(PALETTE)])
        _rate_axis(axes, sorted({trial.rate for arm in study.at_batch(batch) for trial in arm.trials}))
        axes.tick_params(axis="y", labelleft=True)
    panels[0].set_ylabel("best validation Dice", fontsize=9)
    panels[-1].legend(frameon=False, fontsize=8, title="resolution", title_fontsize=8, loc="best")
    figure.tight_layout(pad=0.6, w_pad=1.6)
    return png(figure)


# --- Private helpers ---

_MARKS = ("o", "s", "^", "D", "v", "P")
"""A shape for each batch or resolution beside its colour, for who cannot tell colours apart."""


def _over_resolution(axes: Any, study: Study, values: Values, title: str, label: str) -> None:
    plain(axes, title)
    gaps = [b - a for a, b in zip(study.resolutions, study.resolutions[1:])]
    # Batches stand a little apart, or their dots would hide each other.
    apart = 0.12 * min(gaps, default=0.1)
    for number, batch in enumerate(study.batches):
        shift = apart * (number - (len(study.batches) - 1) / 2)
        colour, mark = PALETTE[number % len(PALETTE)], _MARKS[number % len(_MARKS)]
        arms = study.at_batch(batch)
        x = [arm.resolution + shift for arm in arms]
        means = [sum(values(arm)) / len(values(arm)) for arm in arms]
        axes.plot(x, means, "-", marker=mark, color=colour, markersize=6, linewidth=1.7, label=str(batch))
        for at, arm in zip(x, arms):
            seeds = values(arm)
            if len(seeds) > 1:
                axes.plot([at] * len(seeds), seeds, "o", color=colour, alpha=0.45, markersize=3.6, markeredgewidth=0)
    axes.set_xticks(study.resolutions, [f"{value:g}" for value in study.resolutions])
    axes.set_xlabel("resolution (share of the store's)", fontsize=9)
    axes.set_ylabel(label, fontsize=9)


def _search_line(axes: Any, arm: Arm, colour: str) -> None:
    finished = [trial for trial in arm.trials if trial.dice is not None]
    chosen = next((trial for trial in finished if trial.rate == arm.rate), None) or winner(arm.trials)
    axes.plot(
        [trial.rate for trial in finished], [trial.dice for trial in finished], "o-", color=colour, markersize=4,
        linewidth=1.5, label=f"{arm.resolution:g}",
    )  # fmt: skip
    axes.plot(chosen.rate, chosen.dice, "o", markersize=11, markerfacecolor="none", markeredgecolor=colour)
    diverged = [trial.rate for trial in arm.trials if trial.dice is None]
    axes.plot(diverged, [0.03] * len(diverged), "x", color=colour, transform=axes.get_xaxis_transform())


def _rate_axis(axes: Any, rates: Sequence[float]) -> None:
    from matplotlib.ticker import NullFormatter, NullLocator

    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates], rotation=30 if len(rates) > 5 else 0)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("learning rate", fontsize=9)
