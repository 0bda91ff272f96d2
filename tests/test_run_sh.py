"""run.sh with made Pythons on a made PATH: which it takes, what it installs, what it says. No
network."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from cpu3d.__main__ import COMMANDS
from cpu3d.util import pythons

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = "cpu3d/util/environment.py"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="run.sh needs bash")

STUB = """#!/bin/bash
# A Python that says what its test wants: to the probe "{answer}", and it writes down everything
# else. What makes the environment is run by a real one.
case "$1 $2" in
  "-I "*) exec "${{STUB_REAL:-{real}}}" "$@" ;;
  "-c import sys; sys.exit"*) exit {unusable} ;;
  "-c import sys, rich"*) exit "${{STUB_WITHOUT_RICH:-0}}" ;;
  "-c "*) [ -z "$2" ] || echo "{answer}" ;;
  "-m venv") [ -z "${{STUB_VENV_FAILS:-}}" ] || exit 1
    mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo "made by {name}" >"$3/pyvenv.cfg" ;;
  "-m pip")
    [ "$3" = install ] || exit 0
    echo "pip ${{@: -1}}" >>"$JOURNAL"
    [ -z "${{STUB_PIP_WAITS:-}}" ] || for i in {{1..600}}; do
      [ ! -e "$STUB_PIP_WAITS" ] || break
      sleep 0.05
    done
    if [ -n "${{STUB_PIP_FAILS:-}}" ]; then echo "ERROR: no matching distribution"; exit 1; fi ;;
  *) echo "{name} $* [$PWD] [$PYTHONPATH]" >>"$JOURNAL"; exit "${{STUB_EXIT:-0}}" ;;
esac
"""


class Sandbox(NamedTuple):
    root: Path
    """A copy of run.sh and the requirements, in a folder with a space in its name."""
    bin: Path
    """The whole PATH."""
    journal: Path

    def python(self, name, version, tools="venv", platform="linux-x86_64", cpu="avx2"):
        stub = self.bin / name
        answer = f"{version} {tools} {platform} {cpu}"
        unusable = int(version in ("0.0", "3.8"))
        stub.write_text(
            STUB.format(name=name, answer=answer, unusable=unusable, real=sys.executable)
        )
        stub.chmod(0o755)

    def run(self, *arguments, cwd=None, script=None, user=None, **environment):
        """Run ./run.sh; its exit code, and all that it printed."""
        process = self.start(*arguments, cwd=cwd, script=script, user=user, **environment)
        printed = process.communicate(timeout=60)[0]
        return process.returncode, printed

    def start(self, *arguments, cwd=None, script=None, user=None, **environment):
        """`script` is what is called, by default ./run.sh; `user` the number of who calls it."""
        return subprocess.Popen(
            [str(script or self.root / "run.sh"), *arguments],
            user=user,
            cwd=cwd or self.root,
            env={
                "PATH": str(self.bin),
                "HOME": str(self.root),
                "JOURNAL": str(self.journal),
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def installing(self, *arguments, **environment):
        """Start ./run.sh; the process, once pip installs, which it does until there is a file "pip
        may end"."""
        process = self.start(
            *arguments, STUB_PIP_WAITS=str(self.bin / "pip may end"), **environment
        )
        while not (self.journal.exists() and self.journal.read_text()):
            time.sleep(0.05)
        return process

    def calls(self):
        """The calls of the Pythons since the last call of this."""
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        self.journal.write_text("")
        return lines

    def installed(self):
        """Such as "requirements.txt 3.11", by the environment's stamp."""
        return " ".join((self.root / ".venv/installed").read_text().split()[:2])


@pytest.fixture
def sandbox(tmp_path):
    root, bin_folder = tmp_path / "a checkout", tmp_path / "bin"
    root.mkdir()
    bin_folder.mkdir()
    (root / "cpu3d/util").mkdir(parents=True)
    modules = [ROOT / "cpu3d" / "__init__.py", *(ROOT / "cpu3d/util").glob("*.py")]
    for path in (ROOT / "run.sh", *modules, *ROOT.glob("requirements*.txt")):
        shutil.copy(path, root / path.relative_to(ROOT))
    tools = "bash env cat cp dirname mkdir readlink sleep"
    for tool in tools.split():
        (bin_folder / tool).symlink_to(shutil.which(tool))
    return Sandbox(root, bin_folder, tmp_path / "journal")


@pytest.mark.parametrize(
    ("versions", "chosen"),
    [
        (["3.9", "3.10", "3.11", "3.12", "3.13"], "requirements.txt 3.11"),
        (["3.9", "3.12"], "requirements.txt 3.9"),
        (["3.13", "3.8"], "requirements-latest.txt 3.13"),
    ],
)
def test_the_python_with_the_fastest_engine_is_taken(sandbox, versions, chosen):
    for version in versions:
        sandbox.python(f"python{version}", version)
    code, printed = sandbox.run("setup")
    assert code == 0, printed
    assert sandbox.installed() == chosen
    assert sandbox.calls() == [f"pip {sandbox.root}/{chosen.split()[0]}"]
    assert ("1.3x as long" in printed) == ("latest" in chosen)
    assert ("install Python 3.11" in printed) == ("latest" in chosen)


@pytest.mark.parametrize(
    ("version", "platform", "cpu", "options", "code", "words"),
    [
        ("3.11", "linux-aarch64", "none", [], 0, "exists for Linux on x86-64 CPUs with AVX2"),
        ("3.11", "linux-x86_64", "avx", [], 0, "exists for Linux on x86-64 CPUs with AVX2"),
        ("3.9", "linux-aarch64", "avx2", [], 1, "CPython 3.10 to 3.13 must be installed"),
        ("3.11", "linux-x86_64", "none", [], 1, "must have AVX"),
        (
            "3.12",
            "linux-aarch64",
            "none",
            ["--gpu"],
            1,
            "must run on Linux x86-64, for which TensorFlow",
        ),
    ],
)
def test_without_a_wheel_the_second_engine_is_set_up_or_refused(
    sandbox, version, platform, cpu, options, code, words
):
    sandbox.python("python3", version, platform=platform, cpu=cpu)
    done, printed = sandbox.run("setup", *options)
    assert (done, words in printed) == (code, True), printed
    if code == 0:
        assert sandbox.installed() == f"requirements-latest.txt {version}"


def test_latest_and_gpu_make_another_environment_and_a_plain_setup_goes_back(sandbox):
    sandbox.python("python3.9", "3.9")
    sandbox.python("python3.12", "3.12")
    left_over = sandbox.root / ".venv/left-over"
    for words, chosen in (
        (["--latest"], "requirements-latest.txt 3.12"),
        ([], "requirements.txt 3.9"),
        (["--gpu"], "requirements-gpu.txt 3.12"),
    ):
        code, printed = sandbox.run("setup", *words)
        assert code == 0, printed
        assert sandbox.installed() == chosen
        assert not left_over.exists()
        left_over.touch()
    assert "TensorFlow 2.21 with CUDA" in printed


@pytest.mark.parametrize("changed", ["requirements-gpu.txt", "requirements-latest.txt"])
def test_a_change_of_an_included_file_counts_as_one(sandbox, changed):
    sandbox.python("python3.12", "3.12")
    assert sandbox.run("setup", "--gpu")[0] == 0
    sandbox.calls()
    with (sandbox.root / changed).open("a") as file:
        file.write("# changed\n")
    assert sandbox.run("train")[0] == 0
    assert sandbox.calls()[0] == f"pip {sandbox.root}/requirements-gpu.txt"


def test_a_python_that_will_not_do_counts_as_none_and_what_is_missing_is_named(sandbox):
    sandbox.python("python3", "3.8")
    sandbox.python("python3.11", "0.0")
    code, printed = sandbox.run()
    assert (code, "CPython 3.9 to 3.13 must be installed, got none" in printed) == (1, True)
    sandbox.python("python3.11", "3.11", tools="bare")
    code, printed = sandbox.run("setup")
    assert (code, "sudo apt install python3.11-venv" in printed) == (1, True)
    assert not (sandbox.root / ".venv").exists()
    sandbox.python("python3.12", "3.12")
    code, printed = sandbox.run("setup")
    assert (code, "not used, as it has no venv: Python 3.11" in printed) == (0, True)


def test_the_python_variable_wins(sandbox):
    sandbox.python("python3.11", "3.11")
    sandbox.python("mine", "3.12")
    code, printed = sandbox.run("setup", PYTHON="/nowhere/python")
    assert (code, "got /nowhere/python" in printed) == (1, True)
    assert sandbox.run("setup", PYTHON=str(sandbox.bin / "mine"))[0] == 0
    assert sandbox.installed() == "requirements-latest.txt 3.12"


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        ([], "-m cpu3d demo"),
        (
            ["prepare", "--dataset", "a b", "--store", "s"],
            "-m cpu3d prepare --dataset a b --store s",
        ),
        (["test", "--all", "-x"], "-m pytest -n auto --maxprocesses 4 -m  -x"),
    ],
)
def test_words_go_where_they_belong_after_a_set_up(sandbox, arguments, call):
    sandbox.python("python3.11", "3.11")
    code, printed = sandbox.run(*arguments)
    assert code == 0, printed
    assert [line.split(" [")[0] for line in sandbox.calls()] == [
        f"pip {sandbox.root}/requirements.txt",
        f"python3.11 {call}",
    ]


@pytest.mark.parametrize("command", ["train --store store", "test"])
def test_it_works_from_another_folder_and_leaves_relative_paths_to_the_caller(
    sandbox, tmp_path, command
):
    sandbox.python("python3.11", "3.11")
    assert sandbox.run(*command.split(), cwd=tmp_path)[0] == 0
    folder = sandbox.root if command == "test" else tmp_path
    assert sandbox.calls()[-1].endswith(f"[{folder}] [{sandbox.root}]")


LINKS = ["absolute", "relative", "of a link", "of the folder", "by its name"]


@pytest.mark.parametrize("link", LINKS)
def test_through_a_link_it_is_the_checkout_that_is_used(sandbox, tmp_path, link):
    sandbox.python("python3.11", "3.11")
    calls = tmp_path / "calls"
    calls.mkdir()
    (calls / "absolute").symlink_to(sandbox.root / "run.sh")
    (calls / "relative").symlink_to(Path("..") / sandbox.root.name / "run.sh")
    (calls / "of a link").symlink_to("relative")
    (calls / "checkout").symlink_to(sandbox.root)
    path = {"PATH": str(sandbox.bin), "CDPATH": str(tmp_path)}
    script = calls / link
    if link == "of the folder":
        script = Path("calls/checkout/run.sh")
    if link == "by its name":
        (sandbox.bin / "cpu3d").symlink_to(sandbox.root / "run.sh")
        script = "cpu3d"
    before = {item.name for item in calls.iterdir()}
    code, printed = sandbox.run("train", cwd=tmp_path, script=script, **path)
    assert code == 0, printed
    assert sandbox.installed() == "requirements.txt 3.11"
    assert sandbox.calls()[-1] == f"python3.11 -m cpu3d train [{tmp_path}] [{sandbox.root}]"
    assert {item.name for item in calls.iterdir()} == before


@pytest.fixture
def shared(sandbox):
    """A sandbox that other users can reach. The environment's Python is a link into a home."""
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        top.chmod(0o755)
        root = top / "checkout"
        shutil.copytree(sandbox.root, root)
        shutil.copytree(sandbox.bin, top / "bin", symlinks=True)
        shared = Sandbox(root, top / "bin", top / "journal")
        shared.python("python3.11", "3.11")
        assert shared.run("setup")[0] == 0
        home = top / "home"
        (home / "bin").mkdir(parents=True)
        python = root / ".venv/bin/python"
        python.rename(home / "bin/python3.11")
        (python.parent / "python3").symlink_to(home / "bin/python3.11")
        python.symlink_to("python3")
        shared.calls()
        (top / "journal").chmod(0o666)
        yield shared, home
        home.chmod(0o755)


def another_user():
    """Root may enter every folder, so it calls as somebody else, with a Python of the system."""
    if os.geteuid() != 0:
        return {}
    real = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if real is None:
        pytest.skip("needs a Python that every user can run")
    return {"user": 65534, "STUB_REAL": real}


@pytest.mark.parametrize("writable", [True, False])
def test_a_python_in_a_closed_home_is_named_and_the_environment_left_alone(shared, writable):
    sandbox, home = shared
    stamp = (sandbox.root / ".venv/installed").read_text()
    assert sandbox.run("train", **another_user()) == (0, "")
    home.chmod(0)
    for folder in (sandbox.root, sandbox.root / ".venv"):
        folder.chmod(0o777 if writable else 0o555)
    code, printed = sandbox.run("train", **another_user())
    assert code == 1
    for part in (f"got {home}/bin/python3.11", f"{home} is closed", "chmod o+x", "PYTHON="):
        assert part in printed
    sandbox.root.chmod(0o755)
    (sandbox.root / ".venv").chmod(0o755)
    assert (sandbox.root / ".venv/installed").read_text() == stamp


def test_a_python_that_is_gone_is_named_to_who_cannot_make_the_environment_again(shared):
    sandbox, home = shared
    shutil.rmtree(home / "bin")
    sandbox.root.chmod(0o555)
    code, printed = sandbox.run("train", **another_user())
    assert code == 1
    assert f"got {home}/bin/python3.11, which is gone" in printed
    assert "./run.sh setup" in printed
    sandbox.root.chmod(0o755)
    assert sandbox.run("train")[0] == 0  # its owner can
    assert sandbox.installed() == "requirements.txt 3.11"


def test_an_estimate_needs_no_environment_where_a_python_has_what_it_takes(sandbox, tmp_path):
    sandbox.python("python3", "3.11")
    assert sandbox.run("estimate", "--shape", "8", "8", "8", cwd=tmp_path) == (0, "")
    assert sandbox.calls() == [
        f"python3 -m memory_estimator --shape 8 8 8 [{tmp_path}] [{sandbox.root}]"
    ]
    assert sandbox.run("estimate", STUB_EXIT="3")[0] == 3  # the exit code is the subcommand's
    assert not (sandbox.root / ".venv").exists()
    assert sandbox.run("estimate", STUB_WITHOUT_RICH="1")[0] == 0
    assert sandbox.installed() == "requirements.txt 3.11"


def test_a_second_run_installs_nothing_until_the_requirements_change(sandbox):
    sandbox.python("python3.11", "3.11")
    sandbox.run("setup")
    sandbox.calls()
    assert sandbox.run("setup") == (0, "Ready: .venv has Python 3.11 and requirements.txt.\n")
    (sandbox.bin / "python3.11").rename(
        sandbox.bin / "away"
    )  # a finished environment needs no other Python
    assert sandbox.run("train") == (0, "")
    assert not [line for line in sandbox.calls() if line.startswith("pip")]
    (sandbox.bin / "away").rename(sandbox.bin / "python3.11")
    with (sandbox.root / "requirements.txt").open("a") as file:
        file.write("# changed\n")
    assert sandbox.run("train")[0] == 0
    assert [line.split()[0] for line in sandbox.calls()] == ["pip", "python3.11"]


def test_a_failed_installation_shows_why_and_is_not_taken_for_whole(sandbox):
    sandbox.python("python3.11", "3.11")
    code, printed = sandbox.run("train", STUB_PIP_FAILS="1")
    assert code == 1
    assert "ERROR: no matching distribution" in printed
    assert "installing requirements.txt failed" in printed
    assert not (sandbox.root / ".venv/installed").exists()
    assert not [line for line in sandbox.calls() if "cpu3d" in line]
    assert sandbox.run("train")[0] == 0


def test_who_comes_while_another_sets_up_waits_and_finds_it_ready(sandbox):
    sandbox.python("python3.11", "3.11")
    first, second = sandbox.installing("setup"), sandbox.start("train")
    assert f"process {first.pid} on {os.uname().nodename}" in second.stdout.readline()
    (sandbox.bin / "pip may end").touch()
    for process in (first, second):
        printed = process.communicate(timeout=60)[0]
        assert process.returncode == 0, printed
    calls = [line.split()[0] for line in sandbox.calls()]
    assert calls == ["pip", "python3.11"]
    assert [path.name for path in sandbox.root.glob(".venv*")] == [".venv"]


def test_a_lock_that_does_not_change_is_named_with_the_way_out(sandbox):
    sandbox.python("python3.11", "3.11")
    script = sandbox.root / ENVIRONMENT
    script.write_text(script.read_text().replace("LOCK_S = 60.0", "LOCK_S = 0.2"))
    lock = sandbox.root / ".venv.lock"
    lock.mkdir()
    (lock / "holder").write_text("process 7 on node-3 (40 s so far)\n")
    code, printed = sandbox.run("setup")
    assert code == 1, printed
    assert "process 7 on node-3" in printed
    assert f"rm -r '{lock}'" in printed
    assert not (sandbox.root / ".venv").exists()
    shutil.rmtree(lock)
    assert sandbox.run("setup")[0] == 0


@pytest.mark.parametrize(
    ("words", "python", "chosen"),
    [(["--gpu"], "python3.12", "requirements-gpu.txt 3.12"), ([], "mine", "requirements.txt 3.10")],
)
def test_any_command_completes_a_setup_that_was_cut_with_its_engine_and_its_python(
    sandbox, words, python, chosen
):
    sandbox.python("python3.11", "3.11")
    sandbox.run("setup")  # an environment of another engine was there before
    sandbox.calls()
    sandbox.python(python, chosen.split()[1])
    process = sandbox.installing("setup", *words, PYTHON=str(sandbox.bin / python))
    os.killpg(process.pid, signal.SIGINT)
    printed = process.communicate(timeout=120)[0]
    assert (process.returncode, "interrupted" in printed) == (130, True)
    (sandbox.bin / python).rename(sandbox.bin / f"python{chosen.split()[1]}")
    (sandbox.root / ".venv/downloaded").touch()
    assert sandbox.run("train")[0] == 0
    assert sandbox.installed() == chosen
    assert (sandbox.root / ".venv/downloaded").exists()


def test_an_environment_of_unknown_making_or_without_its_python_is_made_again(sandbox):
    sandbox.python("python3.11", "3.11")
    (sandbox.root / ".venv/lib").mkdir(parents=True)
    (sandbox.root / ".venv/lib/half").touch()
    assert sandbox.run("setup")[0] == 0
    assert not (sandbox.root / ".venv/lib/half").exists()
    (sandbox.root / ".venv/bin/python").unlink()
    assert sandbox.run("train")[0] == 0
    assert (sandbox.root / ".venv/bin/python").exists()


def test_help_needs_nothing_and_setup_refuses_what_it_does_not_know(sandbox):
    code, printed = sandbox.run("--help")
    assert code == 0
    assert "./run.sh prepare --dataset" in printed
    assert "./run.sh SUBCOMMAND --help" in printed
    _, _, below = printed.partition("Subcommands:\n")
    listed = [line.split(maxsplit=1) for line in below.split("\n\n")[0].splitlines()]
    assert listed == [[name, line] for name, (_, line) in COMMANDS.items()]
    sandbox.python("python3.11", "3.11")
    code, printed = sandbox.run("setup", "--fast")
    assert code == 2
    assert "got --fast" in printed
    assert not (sandbox.root / ".venv").exists()


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="a Python that run.sh does not take")
def test_a_real_python_is_found(monkeypatch):
    monkeypatch.setenv("PYTHON", sys.executable)
    with contextlib.suppress(pythons.SetUpError):  # one without venv
        python = pythons.choose(pythons.Engine.LATEST).python
        assert python.version == f"{sys.version_info[0]}.{sys.version_info[1]}"
