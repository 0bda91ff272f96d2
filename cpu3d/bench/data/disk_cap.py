"""A disk made slow for one process: by a cgroup of its own where one may be made, else by counting what it reads.

The cgroup holds for every read, those through maps and those that the kernel is advised to make included; where it
does not apply, what is read is counted, and a token bucket lets no more pass than the disk would.
"""

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any, Dict, Iterator, Optional

CGROUPS = Path("/sys/fs/cgroup")

BUCKET = "token bucket"


class TokenBucket:
    """Lets `bytes_s` bytes a second pass, over all threads together, and none saved up for later."""

    def __init__(self, bytes_s: float):
        self.bytes_s = bytes_s
        self._free_at = time.perf_counter()
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> None:
        """Return when the disk would have read this much more."""
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + size_bytes / self.bytes_s
            free_at = self._free_at
        time.sleep(max(0.0, free_at - time.perf_counter()))


@contextlib.contextmanager
def disk_cap(folder: Path, bytes_s: int) -> Iterator[Dict[str, Any]]:
    """What a worker needs to `join` to read the disk of `folder` at `bytes_s`; "how" says by what. Ends with the block.

    Only a group is made and removed; no setting of the system's own groups is touched.
    """
    group = _make_group(_disk(folder), bytes_s)
    try:
        yield {"how": BUCKET if group is None else _version(group), "group": str(group or ""), "bytes_s": bytes_s}
    finally:
        if group is not None:
            _remove(group)


def join(cap: Optional[Dict[str, Any]]) -> Optional[TokenBucket]:
    """Put this process under a cap; the bucket to take from where there is no group. Nothing for None."""
    if cap is None:
        return None
    if cap["group"]:
        (Path(cap["group"]) / "cgroup.procs").write_text(str(os.getpid()))
        return None
    return TokenBucket(cap["bytes_s"])


# --- Private helpers ---


def _disk(folder: Path) -> str:
    """ "major:minor" of the disk below a folder; of the whole disk where it lies on a partition."""
    device = os.stat(folder).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    node = Path("/sys/dev/block") / name
    if (node / "partition").exists():
        return (node.resolve().parent / "dev").read_text().strip()
    return name


def _make_group(disk: str, bytes_s: int) -> Optional[Path]:
    """A new cgroup that reads `disk` no faster; None where that may not be made, or the disk cannot be told."""
    for top, setting, limit in (
        (CGROUPS / "blkio", "blkio.throttle.read_bps_device", f"{disk} {bytes_s}"),
        (CGROUPS, "io.max", f"{disk} rbps={bytes_s}"),
    ):
        group = top / f"cpu3d-bench-{os.getpid()}"
        try:
            if not (top / "cgroup.procs").exists():
                continue
            group.mkdir()
        except OSError:
            continue
        try:
            if not (group / setting).exists():  # the controller is not on, and that is not ours to change
                raise FileNotFoundError(setting)
            (group / setting).write_text(limit)
            return group
        except OSError:
            _remove(group)
    return None


def _version(group: Path) -> str:
    return "cgroup v1" if group.parent.name == "blkio" else "cgroup v2"


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
