"""How much memory a process holds, now and at most, and of which kind."""

import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Optional, Union


@dataclass(frozen=True)
class Resident:
    """What of a process lies in memory at one moment."""

    time_s: float
    """Of the clock of `time.time`."""
    anonymous_bytes: int
    """Heap, stacks and TensorFlow's pool: nobody can take it back without swap."""
    file_bytes: int
    """Pages of files: the libraries' code, a mapped store. The kernel may drop those that nobody wrote to."""
    swapped_bytes: int = 0
    """Of its own data, what lies in swap and so in no memory."""
    address_bytes: int = 0
    """All that is mapped, touched or not: what `ulimit -v` counts."""

    @property
    def total_bytes(self) -> int:
        return self.anonymous_bytes + self.file_bytes


def address_limit_bytes() -> Optional[int]:
    """What `ulimit -v` lets this process map; None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def peak_rss_bytes() -> int:
    """The process's largest resident set so far (VmHWM), mapped file pages included."""
    fields = _status("self")
    if "VmHWM" in fields:
        return fields["VmHWM"]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident(pid: Union[int, str] = "self") -> Optional[Resident]:
    """What a process holds now; None where there is no /proc, or no such process any more.

    Shared memory counts as anonymous: the kernel cannot drop it either.
    """
    fields = _status(pid)
    if "RssAnon" not in fields:
        return None
    return Resident(
        time_s=time.time(),
        anonymous_bytes=fields["RssAnon"] + fields.get("RssShmem", 0),
        file_bytes=fields["RssFile"],
        swapped_bytes=fields.get("VmSwap", 0),
        address_bytes=fields.get("VmSize", 0),
    )


# --- Private helpers ---


def _status(pid: Union[int, str]) -> Dict[str, int]:
    """The fields of /proc/PID/status that are sizes, in bytes; none of them for a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines() if line.endswith(" kB"))
    return {name: int(value.split()[0]) * 1024 for name, _, value in pairs}
