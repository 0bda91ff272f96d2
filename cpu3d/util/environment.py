"""The environment of a checkout, .venv: made once, completed after an interruption, then used.

    python cpu3d/util/environment.py train --store store

Called by run.sh with any Python from 3.9 on: it needs the standard library alone. It takes the
Python with the fastest engine, makes .venv with it, installs the packages of a requirements file,
builds what is in C, and runs the command in it. Several processes, also of several hosts, may call
it at once: one sets up, the others wait.
"""

import contextlib
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, NoReturn, Optional, Sequence, Tuple

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":  # run.sh starts this with an empty path of modules
    sys.path.insert(0, str(ROOT))

from cpu3d.util.pythons import (
    ENGINE_OF,
    GPU_FILE,
    LATEST_FILE,
    STANDARD_FILE,
    Choice,
    Engine,
    SetUpError,
    choose,
    light_python,
)

LOCK_S = 60.0  # a holder of the lock that writes nothing for so long is gone or stopped
BEAT_S = 5.0  # between two signs of the holder


def main(words: Sequence[str]) -> int:
    command, *rest = words or ["demo"]
    try:
        if command == "setup":
            return _set_up_command(rest)
        with_environment(command, rest)
    except SetUpError as error:
        for line in error.lines:
            print(f"run.sh: {line}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nrun.sh: interrupted; the same command continues", file=sys.stderr)
        return 130


def with_environment(command: str, words: Sequence[str]) -> NoReturn:
    """Run a command in the environment, in this one's place; make it first if it is not whole.
    Raises SetUpError."""
    place = Environment(ROOT)
    if not place.is_whole():
        if command == "estimate":  # a laptop that only plans needs no TensorFlow
            light = light_python()
            if light:
                _become(light, "memory_estimator", words)
        lost = place.lost_python()
        if lost and lost.closed:  # whole for others: it is not made again over their heads
            raise lost.error(place)
        with place.locked():
            if not place.is_whole():
                place.set_up(place.chosen_engine(), place.chosen_version())
    if command == "estimate":
        _become(str(place.python), "memory_estimator", words)
    if command == "test":
        os.chdir(ROOT)
        if words and words[0] == "--all":
            words = ["-m", "", *words[1:]]
        _become(str(place.python), "pytest", ["-n", "auto", "--maxprocesses", "4", *words])
    _become(str(place.python), "cpu3d", [command, *words])


def _set_up_command(words: Sequence[str]) -> int:
    options = {"--latest": Engine.LATEST, "--gpu": Engine.GPU}
    engine = Engine.FASTEST
    if words:
        if words[0] not in options:
            rule = "setup takes --latest, --gpu or nothing"
            print(f"run.sh: {rule}, got {words[0]}", file=sys.stderr)
            return 2
        engine = options[words[0]]
    place = Environment(ROOT)
    choice = choose(engine)
    if place.is_made(choice):
        place.finish(choice)
    else:
        with place.locked():
            place.set_up(engine)
    return 0


def _become(python: str, module: str, words: Sequence[str]) -> NoReturn:
    """Run a module of this checkout in this one's place, whatever the caller's folder holds
    (SAFEPATH: Python 3.11 on)."""
    path = [str(ROOT)]
    if os.environ.get("PYTHONPATH"):
        path.append(os.environ["PYTHONPATH"])
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    os.environ["PYTHONSAFEPATH"] = "1"
    sys.stdout.flush()
    os.execvp(python, [python, "-m", module, *words])


# --- The environment ---


def _stamp(requirements: str, version: str) -> str:
    """The content of the stamp of an environment that was made from this very file, and from the
    one that it includes, if any."""
    files = [requirements]
    if requirements == GPU_FILE:
        files.append(LATEST_FILE)
    content = b"".join((ROOT / name).read_bytes() for name in files)
    return f"{requirements} {version} {hashlib.sha256(content).hexdigest()}"


@dataclass(frozen=True)
class LostPython:
    """The Python of an environment, which this user cannot run."""

    path: Path
    closed: Optional[Path]  # folder on the way that this user may not enter; None if it is gone

    def error(self, place: "Environment") -> SetUpError:
        rule = f"the Python of {place.folder} must be one that this user can run, got {self.path}"
        if self.closed is None:
            return SetUpError(
                f"{rule}, which is gone;",
                f"  have the owner of {place.root} run ./run.sh setup, or use a copy of your own",
            )
        return SetUpError(
            f"{rule}, and {self.closed} is closed to this user;",
            "  have its owner open that folder (chmod o+x), or make .venv from a Python that all",
            "  can reach: PYTHON=/usr/bin/python3 ./run.sh setup",
        )


class Environment:
    """The folder .venv of a checkout."""

    def __init__(self, root: Path):
        self.root = root
        self.folder = root / ".venv"
        self.python = self.folder / "bin/python"
        self.stamp = self.folder / "installed"  # written last
        self.partial = self.folder / "installed.partial"  # what was chosen, before it is installed
        self.log = self.folder / "install.log"
        # A folder: mkdir succeeds for one process alone on every file system, also between hosts.
        self.lock = root / ".venv.lock"

    def chosen(self) -> Tuple[str, str]:
        """Requirements file and Python's version that were chosen, also by a set-up that was cut;
        empty for none."""
        for path in (self.stamp, self.partial):
            with contextlib.suppress(OSError, ValueError):
                requirements, version, _ = path.read_text().split(maxsplit=2)
                return requirements, version
        return "", ""

    def chosen_engine(self) -> Engine:
        requirements, _ = self.chosen()
        return ENGINE_OF.get(requirements, Engine.FASTEST)

    def chosen_version(self) -> str:
        _, version = self.chosen()
        return version

    def is_whole(self) -> bool:
        """Whether it was made to the end, of requirements that have not changed since."""
        requirements, version = self.chosen()
        if not (requirements and self.stamp.is_file() and (self.root / requirements).is_file()):
            return False
        stamp = self.stamp.read_text().strip()
        return self._runs() and stamp == _stamp(requirements, version)

    def is_made(self, choice: Choice) -> bool:
        """Whether it is whole, and of this choice."""
        return self.is_whole() and self.chosen() == choice.names

    def _runs(self) -> bool:
        with contextlib.suppress(OSError):
            return subprocess.run([self.python, "-c", ""], capture_output=True).returncode == 0
        return False

    def lost_python(self) -> Optional[LostPython]:
        """The Python of an environment that was whole, if this user cannot run it."""
        if not (self.stamp.is_file() and self.python.is_symlink()):
            return None
        if os.access(self.python, os.X_OK):
            return None
        lost = Path(os.path.realpath(self.python))
        there = lost
        while not os.path.exists(there):
            there = there.parent
        if there != lost and os.access(there, os.X_OK):
            return LostPython(lost, None)
        return LostPython(lost, there)

    def set_up(self, engine: Engine, kept_version: str = "") -> None:
        """Make it, or complete one that was cut short. The lock is held. Raises SetUpError."""
        choice = choose(engine, kept_version)
        if self.is_made(choice):
            self.finish(choice)
            return
        python = choice.python
        print(f"Using {python.command} (Python {python.version}) and {choice.requirements}.")
        if choice.requirements != STANDARD_FILE:
            _print_cost_of_latest(engine, choice)
        # One for the same engine and Python that was cut short, or whose requirements changed, is
        # completed. Any other is made again: pip would leave the packages of the other engine.
        is_alike = self.chosen() == choice.names
        with contextlib.suppress(FileNotFoundError):
            self.stamp.replace(self.partial)
        if not is_alike or not self._has_pip():
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(exist_ok=True)
        # Before anything is made, so that what was chosen outlives a set-up that is cut.
        self.partial.write_text(_stamp(*choice.names) + "\n")
        if not os.access(self.python, os.X_OK):
            done = subprocess.run([python.command, "-m", "venv", self.folder])
            if done.returncode:
                rule = f"{python.command} could not make {self.folder}"
                raise SetUpError(f"{rule}; the lines above say why")
        size = "700 MB of downloads on the first call, 2.5 GB on disk"
        if choice.requirements == GPU_FILE:
            size = "3.5 GB of downloads on the first call, more on disk"
        print(f"Installing into .venv, about {size}; details in .venv/install.log", flush=True)
        self._install(choice.requirements)
        self.partial.replace(self.stamp)
        self.finish(choice)

    def finish(self, choice: Choice) -> None:
        """Build own operations and the maker of samples, unless they are built from these sources;
        prints a line for each that cannot be built."""
        sys.stdout.flush()
        for module in ("models.native.build", "cpu3d.data.native.samples"):
            if (self.root / module.replace(".", "/")).with_suffix(".py").is_file():
                subprocess.run([self.python, "-m", module], cwd=self.root)
        print(f"Ready: .venv has Python {choice.python.version} and {choice.requirements}.")

    def _has_pip(self) -> bool:
        with contextlib.suppress(OSError):
            command = [str(self.python), "-m", "pip", "--version"]
            return subprocess.run(command, capture_output=True).returncode == 0
        return False

    def _install(self, requirements: str) -> None:
        """Install the packages of a requirements file. Raises SetUpError."""
        command = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check"]
        command += ["--no-input", "-r", str(self.root / requirements)]
        begin = time.monotonic()
        with self.log.open("wb") as log:
            pip = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            try:
                while pip.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        pip.wait(1.0)
                    if sys.stdout.isatty():
                        packages = len(re.findall(rb"(?m)^Collecting", self.log.read_bytes()))
                        seconds = time.monotonic() - begin
                        print(f"\r  {packages:3d} packages, {seconds:4.0f} s ", end="", flush=True)
            except BaseException:
                pip.terminate()
                pip.wait()
                raise
        if sys.stdout.isatty():
            print()
        if pip.returncode:
            last = self.log.read_text(errors="replace").splitlines()[-15:]
            print("\n".join(last), file=sys.stderr)
            proxy = "https://pip.pypa.io/en/stable/user_guide/#using-a-proxy-server"
            raise SetUpError(
                f"installing {requirements} failed; the lines above are the end of {self.log}",
                f"without a network or behind a proxy, see {proxy}; the same command tries again",
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock, once its holder (another terminal, host or task of srun) has released it.

        A holder writes into it every few seconds; if nothing changes for a minute, the holder is
        gone or stopped. Neither clocks nor process numbers are compared, as hosts and containers
        have their own. Raises SetUpError then, and if this user may not set up."""
        self._take_lock()
        ended = threading.Event()
        beats = threading.Thread(target=self._beat, args=(ended,), daemon=True)
        beats.start()
        try:
            yield
        finally:
            ended.set()
            beats.join()
            shutil.rmtree(self.lock, ignore_errors=True)
            if self.lock.exists():  # NFS keeps a file while a waiting process reads it
                time.sleep(1)
                shutil.rmtree(self.lock, ignore_errors=True)

    def _take_lock(self) -> None:
        seen = ""
        last_change = time.monotonic()
        while True:
            with contextlib.suppress(FileExistsError, PermissionError):
                self.lock.mkdir()
                return
            if not os.access(self.root, os.W_OK):
                lost = self.lost_python()
                if lost:
                    raise lost.error(self)
                rule = f"{self.root} must be writable to set up .venv, got a folder that is not"
                raise SetUpError(f"{rule}; have its owner set up, or use a copy of your own")
            holder = ""
            with contextlib.suppress(OSError):
                holder = (self.lock / "holder").read_text().strip()
            if holder and holder != seen:
                if not seen:
                    print(f"Waiting for another set-up of .venv: {holder}", flush=True)
                seen = holder
                last_change = time.monotonic()
            if time.monotonic() - last_change > LOCK_S:
                got = f"got no change by {seen or 'an unknown process'}"
                raise SetUpError(
                    f"the set-up of .venv must renew its lock within a minute, {got};",
                    "  resume or end that process; if it is gone, remove its lock and run this "
                    f"again: rm -r '{self.lock}'",
                )
            time.sleep(min(1.0, LOCK_S / 10))

    def _beat(self, ended: threading.Event) -> None:
        begin = time.monotonic()
        while True:
            seconds = time.monotonic() - begin
            words = f"process {os.getpid()} on {platform.node()} ({seconds:.0f} s so far)"
            with contextlib.suppress(OSError):
                (self.lock / "holder").write_text(words + "\n")
            if ended.wait(BEAT_S):
                return


def _print_cost_of_latest(engine: Engine, choice: Choice) -> None:
    name = Engine.GPU.value if engine is Engine.GPU else Engine.LATEST.value
    print(
        f"Engine: {name}. On the CPU a training step takes as long as with TensorFlow 2.15 + ITEX, "
        "and 1.3x as long if own operations cannot be built."
    )
    if engine is not Engine.FASTEST:
        print("For the faster engine: ./run.sh setup")
    elif choice.python.has_fastest_engine:
        todo = "install Python 3.11 with venv (Debian, Ubuntu: sudo apt install python3.11-venv)"
        print(f"For the faster engine: {todo}, then ./run.sh setup")
        if choice.without_venv:
            versions = " ".join(choice.without_venv)
            print(f"(not used, as it has no venv: Python {versions})")
    else:
        print("The faster engine exists for Linux on x86-64 CPUs with AVX2.")


def _interrupt(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _interrupt)
    sys.exit(main(sys.argv[1:]))
