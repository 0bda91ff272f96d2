"""The rows of `bench data` as one picture: a panel a row, seconds as bars on a logarithmic axis, targets as marks."""

from typing import Any, Dict, List, Sequence, Tuple

from cpu3d.bench.data.tables import amount
from memory_estimator.figure import PALETTE, new_figure, plain, png

OURS, THEIRS = (PALETTE[0], PALETTE[5]), ("#8f9aa6", "#cfd6dd")
"""Colours of a line's first state and of its second."""

TARGET = PALETTE[1]

PANELS = ("s4", "s0", "spleen", "ladder", "monai")
"""The rows that are drawn: those whose lines are seconds of loading."""

_Lines = List[Tuple[str, List[Dict[str, Any]]]]
"""Names with their lines, one a state."""


def draw(rows: Sequence[Dict[str, Any]], host: Dict[str, Any]) -> bytes:
    """Records' rows, as PNG. A mark across a bar says where it would have to end to meet its target."""
    shown = [(row, _by_name(row)) for row in rows if row["row"] in PANELS]
    heights = [0.95 + 0.15 * len(row["targets"]) + 0.2 * len(row["lines"]) + 0.05 * len(lines) for row, lines in shown]
    high = sum(heights) + 0.45
    figure = new_figure(9.4, high)
    if shown:
        panels = figure.subplots(len(shown), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
        for axes, (row, lines) in zip(panels, shown):
            _panel(axes, row, lines)
    title = f"Loading on {host['cpu']}, {host['cores']} cores: the store in blue; warm or fast dark, cold or slow light"
    figure.suptitle(title, fontsize=10.5, fontweight="bold", x=0.01, y=1 - 0.06 / high, ha="left")
    figure.tight_layout(pad=0.6, h_pad=1.2, rect=(0, 0, 1, 1 - 0.22 / high))
    return png(figure)


# --- Private helpers ---


def _by_name(row: Dict[str, Any]) -> _Lines:
    names: Dict[str, List[Dict[str, Any]]] = {}
    for line in row["lines"]:
        names.setdefault(line["name"], []).append(line)
    return list(names.items())


def _panel(axes: Any, row: Dict[str, Any], lines: _Lines) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    plain(axes, "\n".join([row["title"], *([""] * len(row["targets"]))]))
    for number, target in enumerate(reversed(row["targets"])):
        axes.annotate(
            _in_words(target), (0, 1), (0, 5 + 10 * number), xycoords="axes fraction", textcoords="offset points",
            fontsize=7.5, color=TARGET,
        )  # fmt: skip
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    marks = {tuple(target["mark"][:2]): target["mark"][2] for target in row["targets"] if target["mark"]}
    at, ticks = 0.0, []
    for name, states in lines:
        places = [at + 0.85 * number for number in range(len(states))]
        for place, line, colour in zip(places, states, OURS if _is_ours(name) else THEIRS):
            _bar(axes, place, line, colour, named=len(states) > 1)
            mark = marks.get((name, line["state"]))
            if mark:
                axes.plot([mark, mark], [place - 0.55, place + 0.55], color=TARGET, linewidth=1.8)
        ticks.append(sum(places) / len(places))
        at = places[-1] + 1.25
    medians = [line["median"] for line in row["lines"]]
    axes.set_xscale("log")
    axes.set_xlim(min(medians) / 2.5, max([line["max"] for line in row["lines"]] + list(marks.values())) * 6)
    axes.set_ylim(at - 0.5, -0.8)
    axes.set_yticks(ticks, [name for name, _ in lines], fontsize=8)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: amount(seconds, "s")))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _bar(axes: Any, place: float, line: Dict[str, Any], colour: str, named: bool) -> None:
    spread = [[line["median"] - line["min"]], [line["max"] - line["median"]]]
    whisker = {"elinewidth": 0.9, "capsize": 1.6, "ecolor": "#444444"}
    axes.barh(place, line["median"], 0.8, color=colour, xerr=spread, error_kw=whisker)
    state = f"  {line['state']}" if named else ""
    axes.text(line["max"] * 1.08, place, amount(line["median"], line["unit"]) + state, va="center", fontsize=7)


def _is_ours(name: str) -> bool:
    return "store" in name or ".npy instead" in name


def _in_words(target: Dict[str, Any]) -> str:
    rule, found = "at least" if target["rule"] == ">=" else "at most", f"{target['value']:.3g} {target['unit']}"
    return f"{target['name']}: {found} ({rule} {target['bound']:g}, {'met' if target['met'] else 'missed'})"
