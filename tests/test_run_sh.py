"""run.sh with made Pythons on a made PATH: which it takes, what it installs, what it says. No
network."""

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the made hosts are of Linux")

STUB = """#!/bin/bash
# A Python of version {version}: it makes environments of itself, and writes down everything else.
case "$1 $2" in
  "-c import ensurepip"*) echo "{version}" ;;
  "-c import rich"*) exit "${{STUB_WITHOUT_RICH:-0}}" ;;
  "-V "*) echo "Python {version}" ;;
  "-m venv")
    folder="${{@: -1}}"
    [ "$3" != --clear ] || rm -rf "$folder"
    mkdir -p "$folder/bin"
    cp "$0" "$folder/bin/python" ;;
  "-m pip")
    echo "pip ${{@: -1}}" >>"$JOURNAL"
    [ -z "${{STUB_PIP_WAITS:-}}" ] || for i in {{1..600}}; do
      [ ! -e "$STUB_PIP_WAITS" ] || break
      sleep 0.05
    done
    if [ -n "${{STUB_PIP_FAILS:-}}" ]; then echo "ERROR: no matching distribution"; exit 1; fi ;;
  "-m models.native.build") echo "built" >"$JOURNAL.built" ;;
  "-m cpu3d.data.native.samples")
    echo "building"
    cat "$JOURNAL.built" >>"$JOURNAL" && rm "$JOURNAL.built" ;;
  *)
    more="${{PYTHONSAFEPATH:-}}${{PYTHONHOME:-}}${{PYTHONOPTIMIZE:-}}"
    more="$more${{PYTHONSTARTUP:-}}${{PYTHONINSPECT:-}}${{PYTHONWARNINGS:-}}"
    echo "{name} $* [$PWD] [$PYTHONPATH$more]" >>"$JOURNAL"
    exit "${{STUB_EXIT:-0}}" ;;
esac
"""
UNAME = '#!/bin/bash\necho "{system}"\n'
GREP = "#!/bin/bash\nexit {code}\n"  # for avx2 in /proc/cpuinfo


class Sandbox(NamedTuple):
    root: Path
    """A copy of run.sh and the requirements, in a folder with a space in its name."""
    bin: Path
    """The whole PATH."""
    journal: Path

    def tool(self, name, script):
        (self.bin / name).write_text(script)
        (self.bin / name).chmod(0o755)

    def python(self, name, version):
        self.tool(name, STUB.format(name=name, version=version))

    def start(self, *words, cwd=None, script=None, **environment):
        """`script` is what is called, by default ./run.sh."""
        environ = {"PATH": str(self.bin), "HOME": str(self.root), "JOURNAL": str(self.journal)}
        return subprocess.Popen(
            [str(script or self.root / "run.sh"), *words],
            cwd=cwd or self.root,
            env={**environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words, **more):
        """Its exit code, and all that it printed."""
        process = self.start(*words, **more)
        printed = process.communicate(timeout=60)
        return process.returncode, "".join(printed)

    def calls(self):
        """The calls of the Pythons since the last call of this."""
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        self.journal.write_text("")
        return lines


@pytest.fixture
def sandbox(tmp_path):
    sandbox = Sandbox(tmp_path / "a checkout", tmp_path / "bin", tmp_path / "journal")
    sandbox.root.mkdir()
    sandbox.bin.mkdir()
    for path in (ROOT / "run.sh", *ROOT.glob("requirements*.txt")):
        shutil.copy(path, sandbox.root)
    tools = "bash cat cksum cp dirname flock mkdir readlink rm sleep"
    for tool in tools.split():
        (sandbox.bin / tool).symlink_to(shutil.which(tool))
    sandbox.tool("uname", UNAME.format(system="Linux x86_64"))
    sandbox.tool("grep", GREP.format(code=0))
    return sandbox


@pytest.fixture
def ready(sandbox):
    """A sandbox that is set up with Python 3.11."""
    sandbox.python("python3.11", "3.11")
    assert sandbox.run("setup")[0] == 0
    sandbox.calls()
    return sandbox


@pytest.mark.parametrize(
    ("versions", "system", "without_avx2", "file", "python"),
    [
        (["3.9", "3.10", "3.11", "3.12"], "Linux x86_64", 0, "requirements.txt", "3.11"),
        (["3.9", "3.12"], "Linux x86_64", 0, "requirements.txt", "3.9"),
        (["3.13", "3.12", "3.8"], "Linux x86_64", 0, "requirements-latest.txt", "3.12"),
        (["3.11"], "Linux x86_64", 1, "requirements-latest.txt", "3.11"),
        (["3.11"], "Darwin arm64", 0, "requirements-latest.txt", "3.11"),
    ],
)
def test_the_fastest_engine_of_the_host_is_installed(
    sandbox, versions, system, without_avx2, file, python
):
    sandbox.tool("uname", UNAME.format(system=system))
    sandbox.tool("grep", GREP.format(code=without_avx2))
    for version in versions:
        sandbox.python(f"python{version}", version)
    assert f"Python {python} and {file}" in sandbox.run("setup")[1]
    assert sandbox.calls() == [f"pip {sandbox.root}/{file}", "built"]


@pytest.mark.parametrize("version", ["3.8", ""])  # one without venv prints no version
def test_without_a_python_that_will_do_it_is_said_what_to_install(sandbox, version):
    sandbox.python("python3", version)
    code, printed = sandbox.run()
    assert code == 1
    assert "sudo apt install python3.11-venv" in printed
    assert not (sandbox.root / ".venv").exists()


def test_latest_and_gpu_make_another_environment_and_a_plain_setup_goes_back(ready):
    ready.python("python3.12", "3.12")
    left_over = ready.root / ".venv/left-over"
    for words, engine, is_kept in (
        (["--latest"], "requirements-latest.txt", False),
        ([], "requirements.txt", False),
        (["--gpu"], "requirements-gpu.txt", False),
        (["--gpu"], "requirements-gpu.txt", True),
    ):
        left_over.touch()
        ready.run("setup", *words)
        assert (ready.root / ".venv/engine").read_text() == f"{engine}\n"
        assert left_over.exists() == is_kept
    (ready.root / ".venv/complete").unlink()
    ready.run("train")  # is of the engine that was begun
    made = [call.split("requirements")[1] for call in ready.calls() if "pip" in call]
    assert made == ["-latest.txt", ".txt", "-gpu.txt", "-gpu.txt"]


def test_the_python_variable_wins(ready):
    ready.python("mine", "3.10")
    assert "Python 3.10" in ready.run("setup", PYTHON=str(ready.bin / "mine"))[1]
    assert ready.run("setup", PYTHON="/nowhere/python")[0] == 1
    assert (ready.root / ".venv/complete").is_file()


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ([], "-m cpu3d demo"),
        (["prepare", "--dataset", "a b"], "-m cpu3d prepare --dataset a b"),
        (["test", "--all", "-x"], "-m pytest -n auto --maxprocesses 4 -m  -x"),
        (["estimate", "--shape", "8"], "-m memory_estimator --shape 8"),
    ],
)
def test_words_go_where_they_belong_after_a_set_up(sandbox, tmp_path, words, call):
    sandbox.python("python3.11", "3.11")
    switches = ("PATH", "HOME", "OPTIMIZE", "STARTUP", "INSPECT", "WARNINGS")
    others = {f"PYTHON{name}": "2" for name in switches}
    others.update(STUB_EXIT="3", STUB_WITHOUT_RICH="1")
    process = sandbox.start(*words, cwd=tmp_path, **others)
    assert process.communicate()[0] == ""  # it is the command's own
    assert process.returncode == 3
    folder = sandbox.root if words[:1] == ["test"] else tmp_path
    assert sandbox.calls() == [
        f"pip {sandbox.root}/requirements.txt",
        "built",
        f"python3.11 {call} [{folder}] [{sandbox.root}1]",
    ]


def test_through_links_it_is_the_checkout_that_is_used(ready, tmp_path):
    (tmp_path / "link").symlink_to(Path(ready.root.name) / "run.sh")
    (ready.bin / "cpu3d").symlink_to(tmp_path / "link")  # which is found on the PATH
    assert ready.run("train", cwd=tmp_path, script="cpu3d", CDPATH=str(tmp_path)) == (0, "")
    assert ready.calls() == [f"python3.11 -m cpu3d train [{tmp_path}] [{ready.root}1]"]


@pytest.mark.parametrize(("name", "chosen"), [("python3", ""), ("mine", "mine")])
def test_an_estimate_needs_no_environment_where_a_python_has_what_it_takes(
    sandbox, tmp_path, name, chosen
):
    sandbox.python(name, "3.11")
    assert sandbox.run("estimate", "--shape", "8", cwd=tmp_path, PYTHON=chosen) == (0, "")
    assert sandbox.calls() == [
        f"{name} -m memory_estimator --shape 8 [{tmp_path}] [{sandbox.root}]"
    ]


def test_a_second_run_installs_nothing_until_the_requirements_change(ready):
    ready.run("-h")
    assert "-m cpu3d --help" in ready.calls()[0]
    (ready.bin / "python3.11").rename(ready.bin / "away")  # what is whole needs no other Python
    for called in (["python3.11"], ["pip", "built", "python3.11"]):
        assert ready.run("train")[0] == 0
        assert [line.split()[0] for line in ready.calls()] == called
        with (ready.root / "requirements-gpu.txt").open("a") as file:
            file.write("# changed\n")


def test_a_failed_installation_shows_why_and_is_not_taken_for_whole(sandbox):
    sandbox.python("python3.11", "3.11")
    code, printed = sandbox.run("train", STUB_PIP_FAILS="1")
    assert code == 1
    assert "ERROR: no matching distribution" in printed
    assert "requirements.txt must be installed" in printed
    assert len(sandbox.calls()) == 1
    assert sandbox.run("train")[0] == 0


def test_who_comes_while_another_sets_up_waits_and_finds_it_ready(sandbox):
    sandbox.python("python3.11", "3.11")
    first = sandbox.start("setup", STUB_PIP_WAITS=str(sandbox.bin / "pip may end"))
    while not sandbox.journal.exists():
        time.sleep(0.05)
    second = sandbox.start("train")
    time.sleep(0.3)
    assert second.poll() is None
    (sandbox.bin / "pip may end").touch()
    for process in (first, second):
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert sum("pip" in line for line in sandbox.calls()) == 1


def test_a_python_that_is_gone_is_named_and_setup_makes_the_environment_again(ready):
    (ready.root / ".venv/bin/python").unlink()
    assert "must run, got one that is gone" in ready.run("train")[1]
    assert ready.run("setup")[0] == 0
    assert ready.run("train")[0] == 0


def test_help_needs_nothing_and_setup_refuses_what_it_does_not_know(sandbox):
    assert "./run.sh prepare --dataset" in sandbox.run("--help")[1]
    code, printed = sandbox.run("setup", "--fast")
    assert (code, "got --fast" in printed) == (2, True)
