"""Building the libraries: by which compiler, when again, and what stays of other builds. The
compiler is a script."""

import ctypes
import fcntl
import os
import subprocess
import sys
import threading

import pytest

from models.native.build import build, build_library, kernels_library
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


def test_a_library_of_other_sources_does_not_count(monkeypatch, tmp_path):
    monkeypatch.setattr("models.native.build.BUILT", tmp_path)
    (tmp_path / "kernels-0123456789ab.so").touch()
    assert kernels_library() is None


def test_without_a_compiler_one_line_says_what_follows(tmp_path):
    script = (
        "import sys, models.native.build as b\n"
        "b.importlib.util.find_spec = lambda name: None\n"
        "b.BUILT = b.Path(sys.argv[1])\n"
        "sys.exit(b.main())\n"
    )
    environment = {**os.environ, "PATH": str(tmp_path), "CC": ""}
    command = [sys.executable, "-c", script, str(tmp_path / "built")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.count("\n") == 1
    assert "C compiler" in ended.stdout


def test_libraries_are_built_once_for_the_instruction_sets_that_the_compiler_knows(compiler, built):
    (built / "kernels-0123456789ab.so").touch()  # of other sources
    compiler.set("REFUSED", "pointwise.c")
    with pytest.raises(subprocess.CalledProcessError):
        build(folder=built)
    assert [path.name for path in built.iterdir()] == ["kernels-0123456789ab.so"]
    compiler.set("REFUSED", "nothing")
    libraries = build(folder=built)
    assert sorted(built.iterdir()) == sorted(libraries)
    calls = compiler.compiled()
    assert any("-DKERNELS=kernels_avx2 " in call for call in calls)
    assert not any("-DKERNELS=kernels_amx " in call for call in calls)
    assert build(folder=built) == libraries
    assert compiler.compiled() == calls


def test_a_compiler_that_knows_more_builds_again(compiler, built):
    before = build(folder=built)
    compiler.set("LACKED", "nothing")
    after = build(folder=built)
    assert not {*before} & {*after}
    assert {*built.iterdir()} == {*before, *after}, "another host may compute with those before"
    assert any("-DKERNELS=kernels_amx " in call for call in compiler.compiled())
    compiler.set("LACKED", "-mamx")  # one that knows less leaves them
    assert build(folder=built) == after


DAMAGES = [lambda data: data[:-1], lambda data: b"", lambda data: b"x" + data[1:]]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", [0, 1])
def test_a_damaged_library_is_built_again(compiler, built, damage, kind):
    library = build(folder=built)[kind]
    whole = library.read_bytes()
    library.write_bytes(damage(whole))
    assert build(folder=built)[kind].read_bytes() != damage(whole)


def test_a_library_for_another_platform_stays_beside(compiler, built, monkeypatch):
    theirs = build(folder=built)
    monkeypatch.setattr("platform.libc_ver", lambda *_: ("glibc", "9.99"))
    ours = build(folder=built)
    assert sorted(built.iterdir()) == sorted({*theirs, *ours})
    assert len({*theirs, *ours}) == 4
    assert build(folder=built) == ours


@pytest.mark.parametrize(
    ("words", "options"),
    [("{}", ""), ("'{}' -m64", "-m64"), ("env '{}' -m64 -pipe", "-m64 -pipe")],
)
def test_cc_is_a_path_with_blanks_or_a_command_with_options(compiler, built, words, options):
    compiler.set("CC", words.format(compiler.path))
    build(folder=built)
    assert all(line.startswith(options) for line in compiler.log.read_text().splitlines())


@pytest.mark.parametrize("named", ["no-such-compiler -m64", "'unclosed"])
def test_a_cc_that_is_no_compiler_is_refused_by_name(compiler, built, named):
    compiler.set("CC", named)
    with pytest.raises(OSError, match=r"CC must .*, got .*" + named.strip("'").split()[0]):
        build(folder=built)


def test_what_a_killed_build_left_is_removed_and_that_of_a_live_one_is_not(compiler, built):
    left = built / "tmpkilled"
    left.mkdir()
    (left / "pool.o").touch()
    live = os.open(built, os.O_RDONLY)  # as a process that builds holds it
    fcntl.flock(live, fcntl.LOCK_EX)
    done = []
    thread = threading.Thread(target=lambda: done.extend(build(folder=built)))
    thread.start()
    thread.join(1)
    assert left.is_dir()
    assert not done
    os.close(live)
    thread.join(60)
    assert sorted(built.iterdir()) == sorted(done)


SOURCE = "int answer(void) { return %d; }\n"


def damage(path, data):
    """Put other bytes in the place of a library, which stays whole where this process has it
    loaded."""
    path.unlink()
    path.write_bytes(data)


def test_a_library_of_other_sources_is_built_once_and_again_when_they_change_or_it_is_damaged(
    tmp_path,
):
    source = tmp_path / "answer.c"
    source.write_text(SOURCE % 41)
    try:
        first = build_library(tmp_path, "answers")
    except OSError as error:
        pytest.skip(str(error))
    assert ctypes.CDLL(str(first)).answer() == 41
    made_at = first.stat().st_mtime_ns
    assert build_library(tmp_path, "answers") == first
    assert first.stat().st_mtime_ns == made_at
    source.write_text(SOURCE % 42)
    second = build_library(tmp_path, "answers")
    assert ctypes.CDLL(str(second)).answer() == 42
    assert sorted(second.parent.iterdir()) == [second]
    damage(second, b"cut")
    source.write_text(SOURCE % 43)
    third = build_library(tmp_path, "answers")
    damage(third, third.read_bytes()[:-1])
    assert ctypes.CDLL(str(build_library(tmp_path, "answers"))).answer() == 43


def test_a_library_whose_sources_do_not_compile_leaves_nothing(compiler, tmp_path):
    (tmp_path / "answer.c").write_text(SOURCE % 41)
    compiler.set("REFUSED", "answer.c")
    with pytest.raises(subprocess.CalledProcessError):
        build_library(tmp_path, "answers")
    assert not list((tmp_path / "built").iterdir())


SHIM = """
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <string.h>
int sched_getaffinity(pid_t pid, size_t bytes, cpu_set_t *cpus)
{
    if (bytes < 4096 / 8) { errno = EINVAL; return -1; }
    memset(cpus, 0, bytes);
    for (int cpu = 2000; cpu < 2007; cpu++) CPU_SET_S(cpu, bytes, cpus);
    return 0;
}
"""


def test_seven_cpus_of_a_host_of_thousands_have_a_thread_each(library, tmp_path):
    """The system has no smaller set than one of 4096 CPUs."""
    (tmp_path / "shim.c").write_text(SHIM)
    shim = tmp_path / "shim.so"
    try:
        command = ["cc", "-shared", "-fPIC", str(tmp_path / "shim.c"), "-o", str(shim)]
        subprocess.run(command, check=True)
    except OSError:
        pytest.skip("needs a C compiler")
    environment = dict(os.environ)
    environment.pop("TF_NUM_INTRAOP_THREADS", None)
    script = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).thread_count())"
    done = subprocess.run(
        [sys.executable, "-c", script, library._name],
        env={**environment, "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) == 7


def test_every_instruction_set_needs_flags_and_options_of_its_own():
    """AVX512F alone is not what is compiled for: BW, DQ and VL are."""
    for name in ("avx512", "avx512_bf16", "amx"):
        assert {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= set(INSTRUCTION_SETS[name].needs)
    for each in INSTRUCTION_SETS.values():
        flags = {flag.replace("_", "") for flag in each.needs}
        options = {option.replace("-", "") for option in each.options if "=" not in option}
        assert flags == {option[1:] for option in options if option.startswith("m")}
