"""What this host has and what of it this process may use: cores, sockets, memory, instructions.

From /proc and /sys, because a container sees the whole machine in them but may use only what its
cgroup and CPU mask leave: sizing threads by the machine is what makes 64 threads fight over 7 cores.
"""

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Optional, Tuple, Union

from memory_estimator import proc

ISA_FLAGS = (
    "avx",
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
)
"""The instruction sets that oneDNN chooses its kernels by, in the spelling of /proc/cpuinfo."""


@dataclass(frozen=True)
class Host:
    """A host as one process sees it."""

    cpu_model: str
    sockets: int
    """Sockets that hold at least one CPU of this process."""
    cores: int
    """Physical cores that hold at least one CPU of this process; two hyper-threads are one core."""
    logical_cpus: int
    """CPUs this process may run on, hyper-threads counted."""
    numa_nodes: int
    """NUMA nodes that hold at least one CPU of this process."""
    memory_bytes: int
    """Memory of the machine."""
    available_bytes: int
    """Of it, what can be had without swapping: MemAvailable."""
    cgroup_limit_bytes: Optional[int]
    """The tightest memory limit above this process; None without one."""
    cgroup_used_bytes: int
    """What counts against that limit now, less the page cache the kernel can drop; 0 without a limit."""
    cpu_quota: Optional[float]
    """CPUs' worth of time a cgroup grants; None without a limit. One of all its CPUs' time or more limits nothing, as
    Kubernetes gives a pod that has CPUs of its own, so it becomes None too."""
    isa: Tuple[str, ...]
    """Those of ISA_FLAGS that the CPU has, in that order."""

    def __post_init__(self):
        if self.cpu_quota is not None and self.cpu_quota >= self.logical_cpus:
            object.__setattr__(self, "cpu_quota", None)  # the class is frozen

    @property
    def usable_cores(self) -> int:
        """Physical cores worth a thread each: `cores`, or the whole CPUs of a smaller quota; at least 1."""
        return self.cores if self.cpu_quota is None else max(1, min(self.cores, int(self.cpu_quota)))

    @property
    def free_bytes(self) -> int:
        """Memory one can fill before something is killed: the machine's, or less where a cgroup leaves less."""
        if self.cgroup_limit_bytes is None:
            return self.available_bytes
        return max(0, min(self.available_bytes, self.cgroup_limit_bytes - self.cgroup_used_bytes))

    @property
    def best_dtype(self) -> str:
        """The compute dtype that training is fastest in here: "bfloat16" or "float32"."""
        return "bfloat16" if self.fast_bfloat16 else "float32"

    def summary(self) -> Dict[str, Any]:
        """What a log or a record says of the host, as JSON content."""
        return {
            "cpu": self.cpu_model,
            "cores": self.usable_cores,
            "memory_bytes": self.memory_bytes,
            "isa": list(self.isa),
        }

    @property
    def fast_bfloat16(self) -> bool:
        """Whether bfloat16 runs faster than float32 here; without these instructions it is emulated and slower."""
        return "avx512_bf16" in self.isa or "amx_bf16" in self.isa


def read_host(root: Union[str, Path] = "/") -> Host:
    """Describe the host whose /proc and /sys lie under `root`; without a /proc (macOS, Windows), ask psutil.

    Never fails for a file that is missing, as many are in containers: it falls back to the next best
    source, and in the end to one core per CPU on one socket.
    """
    root = Path(root)
    if not (root / "proc/meminfo").is_file():
        return _host_from_psutil()
    first = proc.cpu_fields(root)
    places = proc.cpu_places(root)
    memory = proc.meminfo(root)
    limit, used = proc.memory_limit(root, memory["MemTotal"])
    return Host(
        cpu_model=first.get("model name", platform.machine()),
        sockets=len({place.socket for place in places}),
        cores=len({place.core for place in places}),
        logical_cpus=len(places),
        numa_nodes=len({place.node for place in places}),
        memory_bytes=memory["MemTotal"],
        available_bytes=proc.available_bytes(memory),
        cgroup_limit_bytes=limit,
        cgroup_used_bytes=used,
        cpu_quota=proc.cpu_quota(root),
        isa=tuple(flag for flag in ISA_FLAGS if flag in first.get("flags", "").split()),
    )


# --- Private helpers ---


def _host_from_psutil() -> Host:
    import psutil

    memory = psutil.virtual_memory()
    logical = psutil.cpu_count() or os.cpu_count() or 1
    return Host(
        cpu_model=platform.processor() or f"{platform.machine()} ({sys.platform})",
        sockets=1,
        cores=psutil.cpu_count(logical=False) or logical,
        logical_cpus=logical,
        numa_nodes=1,
        memory_bytes=memory.total,
        available_bytes=memory.available,
        cgroup_limit_bytes=None,
        cgroup_used_bytes=0,
        cpu_quota=None,
        isa=(),
    )
