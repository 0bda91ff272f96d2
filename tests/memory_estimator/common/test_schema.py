"""Options as dataclasses, and tables and charts, which every command has."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Tuple

import pytest

from memory_estimator.common.schema import add_options, from_args, given, option, to_command_line
from memory_estimator.common.table import PALETTE, Bold, Table, new_figure, plain, png


@dataclass(frozen=True)
class Options:
    store: Path = option(help="a folder", metavar="DIR")
    batch: int = option(1, "volumes", "N", at_least=1, at_most=9)
    rate: float = option(0.5, above=0, below=1)
    flip: bool = option(True, "no mirroring")
    quick: Optional[bool] = option(None, "either way")
    shape: Optional[Tuple[int, int, int]] = option(None, metavar=("X", "Y", "Z"), group="grid")
    peer: Tuple[str, ...] = option((), repeat=True)
    name: str = option("a", choices=("a", "b"), one_of="who")
    names: Tuple[str, ...] = option((), one_of="who")


@dataclass(frozen=True)
class Rest:
    words: Tuple[str, ...] = option(rest=True)


def parsed(*words, kinds=(Options,)):
    parser = argparse.ArgumentParser()
    add_options(parser, *kinds)
    return parser.parse_args(words)


def test_settings_come_from_a_command_line_and_go_back_to_it():
    line = "--store s --batch 2 --rate 0.25 --no-flip --no-quick --shape 1 2 3 --peer x --peer y --names a b"
    words = line.split()
    args = parsed(*words)
    assert from_args(Options, args) == Options(Path("s"), 2, 0.25, False, False, (1, 2, 3), ("x", "y"), "a", ("a", "b"))
    assert to_command_line(Options, given(Options, args)) == words
    with pytest.raises(ValueError, match="rate must be below 1, got 1"):
        from_args(Options, parsed("--store", "s", "--rate", "1"))
    assert from_args(Rest, parsed("train", "--steps", "3", kinds=(Rest,))).words == ("train", "--steps", "3")


def test_a_table_is_the_same_in_markdown_and_html_and_a_chart_is_a_png():
    table = Table(("policy", "GiB"), [("a|b", "5"), (Bold("<x>"), "2")], title="One", caption="Two")
    assert table.markdown() == [
        *("One", "", "| policy | GiB |", "|---|---:|", r"| a\|b | 5 |", "| **<x>** | 2 |", "", "Two")
    ]
    assert "<td><b>&lt;x&gt;</b></td><td>2</td>" in table.html()
    assert "<caption>One Two</caption>" in table.html()
    figure = new_figure(2, 1)
    axes = figure.add_subplot()
    plain(axes, "title")
    axes.plot([0, 1], color=PALETTE[0])
    assert png(figure)[:4] == b"\x89PNG"
