"""Files and JSON: what is read, and what is refused."""

import os
import socket
from dataclasses import dataclass
from typing import Dict, Optional, Tuple

import pytest

from memory_estimator.__main__ import main
from memory_estimator.common.files import NotRegularError, read_regular, typed


def test_only_regular_files_and_links_to_them_are_opened(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "device").symlink_to("/dev/zero")
    monkeypatch.chdir(tmp_path)  # the address of a socket is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        assert read_regular(tmp_path / "link") == b"content"
        for name, found in (("fifo", "a FIFO"), ("device", "a device"), ("socket", "a socket"), (".", "a folder")):
            with pytest.raises(NotRegularError, match=f"{name} must be a regular file, got {found}"):
                read_regular(name)
    with pytest.raises(FileNotFoundError):
        read_regular("nothing")


@pytest.mark.parametrize("options", [("--run", "."), ("--shape", "16", "16", "16", "--calibration", "plan.json")])
def test_what_the_estimator_is_given_in_place_of_a_file_is_bad_input(tmp_path, monkeypatch, capsys, options):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("plan.json")
    assert main(list(options)) == 2
    assert "FIFO" in capsys.readouterr().err
    os.remove("plan.json")
    (tmp_path / "plan.json").write_text("[" * 100_000)
    assert main(list(options)) == 2
    assert "plan.json" in capsys.readouterr().err


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
    content = {"parts": [{"name": "a", "weight": 2}], "size": [3, 4], "codes": {"7": "x"}, "note": "n"}
    assert typed(content, Whole) == Whole((Part("a", 2),), (3, 4), {7: "x"}, "n")
    assert vars(typed({"name": "a"}, Part)) == {"name": "a", "weight": 1.0}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"parts": [{"name": 1}]}, r"content.parts\[0\].name must be str, got 1"),
        ({"parts": [{}]}, r"content.parts\[0\] must have its fields and no others, got no name"),
        ({"parts": [{"name": "a", "weight": float("inf")}]}, "weight must be float, got Infinity"),
        ({"size": [3, True]}, r"content.size\[1\] must be int, got true"),
        ({"size": [3]}, "content.size must be array of length 2, got"),
        ({"size": [3, 10**30]}, r"content.size\[1\] must be int, got 10000"),
        ({"codes": {"7": "y", "8": 9}}, "content.codes.8 must be str, got 9"),
        ({"codes": {"x": "y"}}, "content.codes must be"),
        ({"more": 1}, "content must have its fields and no others, got unknown more"),
    ],
)
def test_json_of_another_kind_is_a_value_error_that_names_the_place(change, told):
    content = {"parts": [], "size": [3, 4], "codes": {}}
    with pytest.raises(ValueError, match=told):
        typed({**content, **change}, Whole)
