"""Building the libraries: by which compiler, when again, and what stays of other builds. The
compiler is a script."""

import subprocess

import pytest

from models.native.build import build, build_library, existing, main
from models.native.instruction_sets import INSTRUCTION_SETS

COMPILER = """#!/bin/sh
echo "$@" >> "$LOG"
case "$*" in *$LACKED*) exit 1 ;; *"$REFUSED"*) exit 2 ;; esac
while [ $# -gt 1 ]; do [ "$1" = -o ] && echo "$2" > "$2"; shift; done
"""


class Compiler:
    """A script in the place of the compiler."""

    def __init__(self, folder, monkeypatch):
        self.path = folder / "my tools" / "cc"
        self.log = folder / "log"
        self.path.parent.mkdir()
        self.path.write_text(COMPILER)
        self.path.chmod(0o755)
        self.set = monkeypatch.setenv
        self.set("CC", str(self.path))
        self.set("LOG", str(self.log))
        self.set("LACKED", "-mamx")
        self.set("REFUSED", "nothing")

    def compiled(self):
        """Its calls that compile."""
        return [line for line in self.log.read_text().splitlines() if "-c" in line.split()]


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    return Compiler(tmp_path, monkeypatch)


@pytest.fixture
def built(tmp_path):
    """A folder for libraries."""
    (tmp_path / "built").mkdir()
    return tmp_path / "built"


def test_without_a_compiler_one_line_says_what_follows(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    main()
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert "C compiler" in printed


def test_libraries_are_for_the_instruction_sets_that_the_compiler_knows_and_replace_others(
    compiler, built
):
    other = built / "kernels-0123456789ab.avx2.so"  # of other sources
    other.touch()
    assert existing(built) is None
    compiler.set("REFUSED", "pointwise.c")
    with pytest.raises(subprocess.CalledProcessError):
        build(folder=built)
    main()  # prints it
    assert list(built.iterdir()) == [other]
    compiler.set("REFUSED", "nothing")
    pair = build(folder=built)
    assert sorted(built.iterdir()) == sorted((pair.kernels, pair.tf_ops))
    assert existing(built) == pair
    calls = compiler.compiled()
    assert any("-DKERNELS=kernels_avx2 " in call for call in calls)
    assert not any("-DKERNELS=kernels_amx " in call for call in calls)
    compiler.set("LACKED", "nothing")
    after = build(folder=built)
    assert {*after.instruction_sets} > {*pair.instruction_sets}
    assert existing(built) == after
    assert len(list(built.iterdir())) == 2


def test_cc_is_a_path_with_blanks_or_a_command_with_options(compiler, built, tmp_path):
    build(folder=built)  # by "my tools/cc"
    (tmp_path / "cc").symlink_to(compiler.path)
    compiler.set("CC", f"env {tmp_path}/cc -m64")
    build(folder=built)
    assert any(call.startswith("-m64 ") for call in compiler.compiled())
    compiler.set("CC", "no-such-compiler -m64")
    with pytest.raises(OSError, match=r"CC must .*, got .*no-such-compiler"):
        build(folder=built)


SOURCE = """int answer(void) { return
#include "answer.h"
; }"""


def test_a_library_of_other_sources_is_built_again_when_they_change_or_it_does_not_load(tmp_path):
    (tmp_path / "answer.c").write_text(SOURCE)
    source = tmp_path / "answer.h"
    source.write_text("41")
    try:
        assert build_library(tmp_path, "answers").answer() == 41
    except OSError as error:
        pytest.skip(str(error))
    (first,) = (tmp_path / "built").iterdir()
    made_at = first.stat().st_mtime_ns
    build_library(tmp_path, "answers")
    assert first.stat().st_mtime_ns == made_at
    source.write_text("42")
    assert build_library(tmp_path, "answers").answer() == 42
    (second,) = (tmp_path / "built").iterdir()
    second.unlink()
    second.touch()  # loads nowhere, as one of a newer C library
    assert build_library(tmp_path, "answers").answer() == 42


def test_every_instruction_set_needs_flags_and_options_of_its_own():
    for each in INSTRUCTION_SETS.values():
        flags = {flag.replace("_", "") for flag in each.needs}
        options = {option.replace("-", "") for option in each.options if "=" not in option}
        assert flags == {option[1:] for option in options if option.startswith("m")}
