"""The base of all: files and JSON, options as dataclasses, tables and charts, amounts of memory and
time."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Literal, Optional, Tuple, Union

import pytest

from memory_estimator.common.files import (
    NotRegularError,
    read_record,
    read_regular,
    typed,
)
from memory_estimator.common.schema import (
    add_options,
    from_args,
    given_options,
    option,
    to_command_line,
)
from memory_estimator.common.table import Bold, Table
from memory_estimator.common.units import format_bytes, format_seconds, parse_bytes


def test_only_regular_files_and_links_to_them_are_opened(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "device").symlink_to("/dev/zero")
    assert read_regular(tmp_path / "link") == b"content"
    for name, kind in (("fifo", "a FIFO"), ("device", "a device"), ("", "a folder")):
        with pytest.raises(NotRegularError, match=f"{name} must be a regular file, got {kind}"):
            read_regular(tmp_path / name)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_json_is_read_with_and_without_a_byte_order_mark(tmp_path, encoding):
    (tmp_path / "a.json").write_bytes('{"schema": 1,\r\n"name": "№"}\r\n'.encode(encoding))
    assert read_record(tmp_path / "a.json", 1, dict, "restore it") == {"name": "№"}


@dataclass
class Part:
    name: str
    weight: float = 1.0


@dataclass
class Whole:
    parts: Tuple[Part, ...]
    size: Tuple[int, int]
    codes: Dict[int, str]
    note: Optional[str] = None


def test_json_becomes_records_of_the_kinds_that_their_fields_have():
    content = {"parts": [{"name": "a"}], "size": [3, 4], "codes": {"7": "x"}, "note": "n"}
    assert typed(content, Whole) == Whole((Part("a", 1.0),), (3, 4), {7: "x"}, "n")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "nothing, it is empty"),
        (b'{"a": 1,\n  "b" 2}', "line 2 column 7"),
        ('{"schema": 1}'.encode("utf-16"), "save it as UTF-8"),
        (b'"\\ud800"', "surrogates not allowed"),
        (b"[" * 10**5, "nested too deep"),
    ],
    ids=["empty", "colon", "encoding", "surrogate", "deep"],
)
def test_what_is_no_json_in_utf_8_is_refused_with_its_fault(tmp_path, content, fault):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"a.json must be complete JSON .*{fault}"):
        read_record(tmp_path / "a.json", 1, dict, "restore it")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": [{"name": 1}]}, r"content.parts\[0\].name must be str, got 1"),
        ({"parts": [{"name": "a", "weight": float("inf")}]}, "weight must be float, got Infinity"),
        ({"size": [3]}, "content.size must be array of length 2, got"),
        ({"size": [3, 2**63]}, r"content.size\[1\] must be int, got 9223372"),
        ({"codes": {"7": "y", "8": 9}}, "a value of content.codes must be str, got"),
        ({"more": 1}, "content must have its fields and no others, got unknown more"),
    ],
)
def test_json_of_another_kind_is_a_value_error_that_names_the_place(change, message):
    content = {"parts": [], "size": [3, 4], "codes": {}}
    with pytest.raises(ValueError, match=message):
        typed({**content, **change}, Whole)


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
    strides: Tuple[Tuple[int, int, int], ...] = option(())


@dataclass(frozen=True)
class LeftOpen:
    depth: Union[Literal["auto"], int] = option("auto")
    strides: Union[Literal["auto"], Tuple[Tuple[int, int, int], ...]] = option("auto")


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("--strides auto", LeftOpen()),
        ("--depth 4 --strides 2,2,1 2,2,2", LeftOpen(4, ((2, 2, 1), (2, 2, 2)))),
    ],
)
def test_a_word_stands_for_numbers_that_are_decided_later(line, settings):
    args = parsed(line, LeftOpen)
    assert from_args(LeftOpen, args) == settings
    assert to_command_line(LeftOpen, given_options(LeftOpen, args)) == line.split()


@dataclass(frozen=True)
class Unset:
    steps: int = option(0, "100 % updates", at_least=0, typed_at_least=1)


def test_a_value_that_stands_for_none_chosen_cannot_be_typed(capsys):
    with pytest.raises(ValueError, match=r"^--steps must be at least 1, got 0; leave it out"):
        from_args(Unset, parsed("--steps 0", Unset))
    assert from_args(Unset, parsed("", Unset)) == Unset()
    assert to_command_line(Unset, {"steps": 0}) == []
    with pytest.raises(SystemExit):
        parsed("--help", Unset)
    assert "default: 0" not in capsys.readouterr().out


def parsed(line, kind=Options):
    parser = argparse.ArgumentParser()
    add_options(parser, kind)
    return parser.parse_args(line.split())


def test_settings_come_from_a_command_line_and_go_back_to_it():
    line = "--store s --batch 9 --rate 0.25 --no-flip --no-quick --shape 1 2 3 "
    line += "--peer x --peer y --names a b --strides 2,2,1 2,2,2"
    args = parsed(line)
    strides = ((2, 2, 1), (2, 2, 2))
    assert from_args(Options, args) == Options(
        Path("s"), 9, 0.25, False, False, (1, 2, 3), ("x", "y"), "a", ("a", "b"), strides
    )
    assert to_command_line(Options, given_options(Options, args)) == line.split()
    for wrong, rule in (
        ("rate nan", "be a finite number"),
        ("rate 1", "below 1"),
        ("rate 0", "above 0"),
        ("batch 10", "at most 9"),
        ("batch 0", "at least 1"),
    ):
        with pytest.raises(ValueError, match=f"must .*{rule}, got"):
            from_args(Options, parsed(f"--store s --{wrong}"))
    with pytest.raises(SystemExit):  # the one or the other
        parsed("--store s --name a --names b")


def test_a_table_is_the_same_in_markdown_and_html():
    table = Table(
        ("policy", "<GiB>"), [("a|b", "5"), (Bold("<x>"), "2")], title="One", caption="Two"
    )
    rows = ["| policy | <GiB> |", "|---|---:|", r"| a\|b | 5 |", "| **<x>** | 2 |"]
    assert table.markdown() == ["One", "", *rows, "", "Two"]
    text = table.html()
    for part in (
        '"names1">',
        "One. Two</caption>",
        "<th>&lt;GiB",
        "<b>&lt;x&gt;</b></td><td>2</td>",
    ):
        assert part in text
    assert table.lines()[-2:] == [" <x>         2", "Two"]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1.5TiB", 3 * 2**39),
        ("0.1PB", 10**14),
        (" 2mib ", 2 * 2**20),
    ],
)
def test_an_amount_is_read_exactly(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("write", "amounts", "words"),
    [
        (
            format_bytes,
            (2**20 - 2**10, 2**30 - 2**20, 2**30, -3 * 2**29, 3 * 2**39),
            ["1023 KiB", "1023 MiB", "1.00 GiB", "-1.50 GiB", "1.50 TiB"],
        ),
        (
            format_seconds,
            (None, 0.0123, 119, 7140, 3600 * 71, 86400 * 3),
            ["-", "0.0123 s", "119 s", "119 min", "71 h", "3.0 days"],
        ),
    ],
)
def test_an_amount_is_written_in_the_unit_that_reads_best(write, amounts, words):
    assert [write(amount) for amount in amounts] == words


@pytest.mark.parametrize("text", ["GiB", "-1GiB", "64G", "0GiB", "9" * 400 + "GiB"])
def test_what_is_no_number_of_bytes_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=rf"memory must be.*, got '{text[:57]}(\.\.\.)?';"):
        parse_bytes(text)
