"""What memory is left to this process, by every limit it has: read twice a second beside a training."""

import resource
from pathlib import Path
from typing import Dict, NamedTuple, Optional, Union

from cpu3d.host.memory import Resident
from memory_estimator import proc

MACHINE, CGROUP, ADDRESSES = "this machine", "the limit of this container or job", "the limit of addresses (ulimit -v)"
"""The limits, as messages name them."""


class Room(NamedTuple):
    """What one limit leaves."""

    free_bytes: int
    """What can still be filled. Pages of files count as free, a mapped store's among them: the kernel drops them."""
    total_bytes: int
    """The limit itself."""


def free_memory(process: Optional[Resident] = None, root: Union[str, Path] = "/") -> Dict[str, Room]:
    """What each limit leaves: that of the machine always, those of a cgroup and of `process`'s addresses where set.

    Swap counts as free memory of the machine, for the kernel kills nobody while there is some, and not of a cgroup,
    whose processes are swapped out at its limit though the machine has memory. Without a /proc psutil is asked.
    """
    root = Path(root)
    if (root / "proc/meminfo").is_file():
        memory = proc.meminfo(root)
        rooms = {MACHINE: Room(proc.available_bytes(memory) + memory.get("SwapFree", 0), memory["MemTotal"])}
        limit, used = proc.memory_limit(root, memory["MemTotal"])
        if limit is not None:
            rooms[CGROUP] = Room(max(0, limit - used), limit)
    else:
        rooms = {MACHINE: _machine_by_psutil()}
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    if process is not None and process.address_bytes and addresses != resource.RLIM_INFINITY:
        rooms[ADDRESSES] = Room(max(0, addresses - process.address_bytes), addresses)
    return rooms


def throttled_at(root: Union[str, Path] = "/") -> Optional[Room]:
    """What is left to where a cgroup makes its processes wait for memory (memory.high); None where that is not set."""
    root = Path(root)
    if not (root / "proc/meminfo").is_file():
        return None
    high, used = proc.memory_high(root, proc.meminfo(root)["MemTotal"])
    return None if high is None else Room(max(0, high - used), high)


def tightest(rooms: Dict[str, Room]) -> str:
    """The limit that leaves least."""
    return min(rooms, key=lambda name: rooms[name].free_bytes)


# --- Private helpers ---


def _machine_by_psutil() -> Room:
    import psutil

    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    return Room(memory.available + swap.free, memory.total)
