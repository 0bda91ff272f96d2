"""What a process has in memory, and what the limits on it leave, at one moment."""

from pathlib import Path
from typing import Dict, NamedTuple

from cpu3d.host.memory import status_sizes
from memory_estimator.host import available_bytes, meminfo, memory_limit

# The limits, as messages name them.
MACHINE = "this machine"
CGROUP = "the limit of this container or job"

# Kept free on the smallest and on the largest host, where other programs vary by more, beside the
# memory of a save.
FLOOR_BYTES = 64 * 2**20
HIGHEST_FLOOR_BYTES = 2**30


class Room(NamedTuple):
    """The room that a limit leaves. Pages of files, of a mapped store too, count as free: the
    kernel drops them."""

    free_bytes: int
    total_bytes: int

    @property
    def floor_bytes(self) -> int:
        """Memory to keep free."""
        return min(max(FLOOR_BYTES, self.total_bytes // 500), HIGHEST_FLOOR_BYTES)


class Sample(NamedTuple):
    """A process's memory and what its limits leave, at one moment."""

    rooms: Dict[str, Room]  # by limit: that of the machine always, that of a cgroup if set
    own_bytes: int = 0
    """The process's own data, in memory or swapped out: heap, stacks, shared memory, TensorFlow's
    pool."""
    file_bytes: int = 0  # mapped pages of files: libraries, a store
    swapped_bytes: int = 0


def take_sample(root: Path = Path("/")) -> Sample:
    """This process's memory now, by /proc and /sys in `root`. Free swap counts for the machine, as
    the kernel kills no process while it has some; not for a cgroup."""
    memory = meminfo(root)
    process = status_sizes()
    if "RssAnon" not in process:
        raise OSError("/proc must tell a process's memory, got nothing; train on Linux")
    total = memory["MemTotal"]
    rooms = {MACHINE: Room(available_bytes(root, memory) + memory.get("SwapFree", 0), total)}
    limit, used = memory_limit(root, total)
    if limit is not None:
        rooms[CGROUP] = Room(max(0, limit - used), limit)
    swapped = process.get("VmSwap", 0)
    own = process["RssAnon"] + process.get("RssShmem", 0) + swapped
    return Sample(rooms, own, process["RssFile"], swapped)
