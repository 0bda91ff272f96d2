"""Fair timing of ways to do a thing: in turn, warm or cold, in fresh processes, on a slow disk; and the results."""

import contextlib
import json
import mmap
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.bench.harness import last_json_line
from cpu3d.data.files import pages as page_cache
from cpu3d.data.files.pages import map_file
from cpu3d.host.memory import resident

WARM, COLD = "warm", "cold"
"""Whether the files' pages were in memory before the work began, or had been dropped from it."""

CGROUPS = Path("/sys/fs/cgroup")

Work = Callable[[int], float]
"""Does a thing once, the round's own way, and returns how many seconds of it count."""


@dataclass(frozen=True)
class Line:
    """One way to do a thing, and what it took."""

    name: str
    state: str
    """WARM or COLD, and more where a row has more."""
    values: Tuple[float, ...]
    """One a round."""
    unit: str = "s"
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def to_json(self) -> Dict[str, Any]:
        spread = {"median": self.median, "min": min(self.values), "max": max(self.values), "n": len(self.values)}
        return {"name": self.name, "state": self.state, "unit": self.unit, **spread, "note": self.note}


@dataclass(frozen=True)
class Target:
    """What a figure should come to."""

    name: str
    value: float
    rule: str
    """ ">=" or "<="."""
    bound: float
    unit: str = "x"
    mark: Optional[Tuple[str, str, float]] = None
    """Name and state of a line and the figure at which it would just meet the target; None where it is no line's."""

    def to_json(self) -> Dict[str, Any]:
        met = self.value >= self.bound if self.rule == ">=" else self.value <= self.bound
        return {**vars(self), "met": met}


@dataclass(frozen=True)
class Outcome:
    """One row of the benchmark."""

    row: str
    title: str
    lines: Sequence[Line]
    targets: Sequence[Target] = ()
    notes: Sequence[str] = ()

    def to_json(self) -> Dict[str, Any]:
        lines, targets = ([one.to_json() for one in many] for many in (self.lines, self.targets))
        return {"row": self.row, "title": self.title, "lines": lines, "targets": targets, "notes": list(self.notes)}


@dataclass(frozen=True)
class Effort:
    """How the rows are measured."""

    rounds: int = 5
    """How often each variant is measured, in turn with the others."""
    cap_mb_s: int = 200
    """MB/s of the slow disk that the ladder is climbed on a second time."""
    steps: int = 1000
    """Training steps over which memory has to stay flat."""
    monai: Optional[Path] = None
    """A Python that has MONAI."""


def times_slower(
    name: str, lines: Sequence[Line], slow: Tuple[str, str], fast: Tuple[str, str], rule: str, bound: float
) -> Target:
    """The target that one line takes at least, or at most, `bound` times as long as another: each a name and a state.

    The median of the rounds' ratios where both have as many: they saw the same moments of the host.
    """
    by_key = {(line.name, line.state): line for line in lines}
    one, other = by_key[slow], by_key[fast]
    ratio = one.median / other.median
    if len(one.values) == len(other.values):
        ratio = statistics.median(a / b for a, b in zip(one.values, other.values))
    return Target(name, ratio, rule, bound, mark=(*slow, bound * other.median))


def in_turn(variants: Mapping[str, Work], rounds: int) -> Dict[str, List[float]]:
    """Seconds of each variant in each round: all of them, then all again, so that a slow moment hits no one alone.

    A round before the first is not counted: it opens libraries, traces graphs and fills the page cache.
    """
    for work in variants.values():
        work(0)
    found: Dict[str, List[float]] = {name: [] for name in variants}
    for number in range(rounds):
        for name, work in variants.items():
            found[name].append(work(number))
    return found


def seconds(work: Callable[[], object]) -> float:
    """How long a call takes, its result not kept."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def touch(array: np.ndarray) -> float:
    """Read one value of every 4 KiB of an array or tensor, so that no part of it was only promised."""
    flat = np.asarray(array).ravel(order="K")  # a view of either order
    return float(flat[:: max(1, 4096 // flat.itemsize)].astype(np.float64).sum())


def set_pages(paths: Sequence[Path], state: str) -> float:
    """Bring files into the page cache, or drop them from it where `state` begins as COLD; what share stayed all the
    same."""
    if state.startswith(COLD):
        return drop_pages(paths)
    read_through(paths)
    return 0.0


def read_through(paths: Iterable[Path]) -> None:
    """Bring files into the page cache, front to back."""
    buffer = bytearray(1 << 22)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop_pages(paths: Sequence[Path]) -> float:
    """Have the kernel forget the pages of exactly these files; the share of their bytes that stayed all the same.

    Pages that are still to be written cannot be dropped, so they are written first; those of a live map stay.
    """
    for path in paths:
        with open(path, "rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    total = sum(path.stat().st_size for path in paths)
    return sum(resident_bytes(path) for path in paths) / total if total else 0.0


def resident_bytes(path: Path) -> int:
    """How much of a file lies in the page cache, whoever brought it there."""
    with open(path, "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        pages = page_cache.resident(map_file(file.fileno(), size_bytes)) if size_bytes else np.zeros(0)
    return min(size_bytes, int(pages.sum()) * mmap.PAGESIZE)


def kept_note(kept: float) -> str:
    """What is noted of a line whose pages stayed in part."""
    return f"{kept:.0%} of the pages could not be dropped" if kept > 0.01 else ""


def in_fresh_process(work: Callable[..., Any], cgroup: str = "", **request: Any) -> Any:
    """What `work(**request)` returns in a new process, in a cgroup if any. Its module has to call `answer`."""
    content = json.dumps({"cgroup": cgroup, "request": request}, default=str)
    command = [sys.executable, "-m", work.__module__, work.__name__, content]
    return last_json_line(command, f"bench data, {work.__name__}")


def answer(works: Sequence[Callable[..., Any]], arguments: Sequence[str]) -> None:
    """Be that process: print what the named one of `works` returns as a line of JSON."""
    by_name = {work.__name__: work for work in works}
    content = json.loads(arguments[1])
    if content["cgroup"]:
        (Path(content["cgroup"]) / "cgroup.procs").write_text(str(os.getpid()))
    print(json.dumps(by_name[arguments[0]](**content["request"])))


@contextlib.contextmanager
def slow_disk(folder: Path, bytes_s: int) -> Iterator[str]:
    """A cgroup whose processes read the disk of `folder` no faster; "" where none may be made. Ends with the block.

    It holds for every read, those through maps and those that the kernel is advised to make included. Only a group is
    made and removed; no setting of the system's own groups is touched.
    """
    device = os.stat(folder).st_dev
    disk = f"{os.major(device)}:{os.minor(device)}"
    node = Path("/sys/dev/block") / disk
    if (node / "partition").exists():
        disk = (node.resolve().parent / "dev").read_text().strip()
    made = None
    for top, setting, limit in (
        (CGROUPS / "blkio", "blkio.throttle.read_bps_device", f"{disk} {bytes_s}"),
        (CGROUPS, "io.max", f"{disk} rbps={bytes_s}"),
    ):
        group = top / f"cpu3d-bench-{os.getpid()}"
        with contextlib.suppress(OSError):
            if (top / "cgroup.procs").exists():
                group.mkdir()
                made = group
                if (group / setting).exists():  # else the controller is not on, and that is not ours to change
                    (group / setting).write_text(limit)
                    break
        if made:
            _remove(made)
            made = None
    try:
        yield str(made or "")
    finally:
        if made:
            _remove(made)


def resident_now(name: str) -> int:
    """A field of this process's resident memory, in bytes; 0 where the kernel does not count it."""
    now = resident()
    return getattr(now, name) if now else 0


def by_x(shape: Sequence[Any]) -> str:
    """A shape for a title, such as "96x96x96"."""
    return "x".join(map(str, shape))


# --- Private helpers ---


def _remove(group: Path) -> None:
    """Remove a group. A process that has just ended may still be counted in it for a moment."""
    for _ in range(50):
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.1)
