"""This host's cores, sockets, memory and instructions, and the part of them that this process may
use.

From /proc and /sys: a container sees the whole machine but may use only the part that its cgroup
and CPU mask leave."""

import contextlib
import math
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from models.engine import is_held_below_avx512
from models.native import instruction_sets
from models.native.library import NativeOperations, native_operations
from models.native.shared import DEFAULT_L2_BYTES

ISA_FLAGS = (
    *("avx", "avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    *("avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_int8"),
)
"""The instruction sets that matter to native operations and oneDNN, in the spelling of
/proc/cpuinfo."""

_ALL = instruction_sets.INSTRUCTION_SETS
INSTRUCTION_SETS = tuple(name for name, each in _ALL.items() if not each.emulated)
"""Names of those that native operations are compiled for, the fastest first."""


_SC_LEVEL2_CACHE_SIZE = 191  # of glibc (bits/confname.h), which Python has no name for


def instruction_set(isa: Sequence[str], cpu_model: str) -> str:
    """The best for native operations on a CPU with these ISA_FLAGS; "" for none. It is what a
    described host is taken to compute with. On this host the library is asked
    (`Host.instructions`)."""
    return instruction_sets.best_instruction_set(isa, on_intel="Intel" in cpu_model)


@dataclass(frozen=True)
class Host:
    """A host as one process sees it."""

    cpu_model: str
    sockets: int  # sockets that hold at least one CPU of this process
    # physical cores that hold at least one CPU of this process; two hyper-threads are one core
    cores: int
    logical_cpus: int  # CPUs this process may run on, hyper-threads counted
    numa_nodes: int  # NUMA nodes that hold at least one CPU of this process
    memory_bytes: int  # memory of the machine
    # of it, free for this process without swapping: MemAvailable, of the nodes it may use
    available_bytes: int
    # the tightest memory limit above this process; None without any
    cgroup_limit_bytes: Optional[int]
    # of that limit, less the page cache that the kernel can drop; 0 without a limit
    cgroup_used_bytes: int
    # CPUs' worth of time a cgroup grants; None for no limit, or all CPUs
    cpu_quota: Optional[float]
    isa: Tuple[str, ...]  # those of ISA_FLAGS that the CPU has, in that order
    l2_bytes: int = 0  # of a core's cache L2; 0 if it is not known, as of another host
    is_here: bool = False  # whether this process runs on it; else it was made up, or described

    def __post_init__(self) -> None:
        if self.cpu_quota is not None and self.cpu_quota >= self.logical_cpus:
            object.__setattr__(self, "cpu_quota", None)  # the class is frozen

    @property
    def usable_cores(self) -> int:
        """Physical cores worth a thread each: `cores`, or the whole CPUs of a smaller quota; at
        least 1."""
        if self.cpu_quota is None:
            return self.cores
        return max(1, min(self.cores, int(self.cpu_quota)))

    @property
    def free_bytes(self) -> int:
        """Memory that can be filled before something is killed: the machine's, or less if a cgroup
        leaves less."""
        if self.cgroup_limit_bytes is None:
            return self.available_bytes
        return max(0, min(self.available_bytes, self.cgroup_limit_bytes - self.cgroup_used_bytes))

    @property
    def native(self) -> NativeOperations:
        """What native operations compute with: by their library's answer here, else what suits the
        CPU. Raises InstructionSetError for a CPU3D_INSTRUCTION_SET that cannot be had here."""
        if self.is_here:
            return native_operations()
        best = instruction_set(self.isa, self.cpu_model)
        flags = [flag for flag in self.isa if flag not in instruction_sets.BFLOAT16_FLAGS]
        why = "" if best else "the CPU lacks avx2"
        return NativeOperations(instruction_set(flags, self.cpu_model), best, why)

    @property
    def instructions(self) -> str:
        """The instruction set of native operations for bfloat16 maps, the best one; "" if
        TensorFlow's layers compute."""
        return self.native.bfloat16

    @property
    def fast_bfloat16(self) -> bool:
        """Whether the CPU multiplies bfloat16 values here; else they become float32 first, or
        plain C multiplies them. TensorFlow's layers multiply them if the CPU does."""
        computing = self.instructions
        if not computing and not (self.is_here and is_held_below_avx512()):
            computing = instruction_set(self.isa, self.cpu_model)
        return computing in INSTRUCTION_SETS and _ALL[computing].bfloat16_alone

    @property
    def best_dtype(self) -> str:
        """The compute dtype that training is fastest in here: "bfloat16" or "float32"."""
        return "bfloat16" if self.fast_bfloat16 else "float32"

    def summary(self) -> Dict[str, Any]:
        """The host's fields in a log or a record, as JSON content."""
        return {
            "cpu": self.cpu_model,
            "cores": self.usable_cores,
            "memory_bytes": self.memory_bytes,
            "isa": list(self.isa),
            "instructions": self.instructions,
        }


def read_host(root: Union[str, Path] = "/") -> Host:
    """Describe the host whose /proc and /sys are under `root`; without a /proc (macOS, Windows),
    ask psutil. Never fails for a file that is missing, as many are in containers."""
    root = Path(root)
    is_here = root == Path("/")
    if not (root / "proc/meminfo").is_file():
        import psutil

        memory = psutil.virtual_memory()
        logical = psutil.cpu_count() or 1
        return Host(
            cpu_model=platform.processor(),
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
            is_here=is_here,
        )
    first = fields(read_text(root / "proc/cpuinfo").partition("\n\n")[0])
    isa = tuple(flag for flag in ISA_FLAGS if flag in first.get("flags", "").split())
    cpus = usable_cpus(root)
    memory = meminfo(root)
    limit, used = memory_limit(root, memory["MemTotal"])
    return Host(
        cpu_model=first.get("model name", platform.machine()),
        sockets=len({cpu.socket for cpu in cpus}),
        cores=len({cpu.core for cpu in cpus}),
        logical_cpus=len(cpus),
        numa_nodes=len({cpu.node for cpu in cpus}),
        memory_bytes=memory["MemTotal"],
        available_bytes=available_bytes(root, memory),
        cgroup_limit_bytes=limit,
        cgroup_used_bytes=used,
        cpu_quota=cpu_quota(root),
        isa=isa,
        l2_bytes=_l2_bytes() if is_here else 0,
        is_here=is_here,
    )


def _l2_bytes() -> int:
    """As models/native/pieces.h has it."""
    try:
        return max(os.sysconf(_SC_LEVEL2_CACHE_SIZE), 0) or DEFAULT_L2_BYTES
    except (OSError, ValueError):
        return DEFAULT_L2_BYTES


class Cpu(NamedTuple):
    """A CPU as Linux counts them: a hyper-thread if a core has several."""

    number: int
    # hyper-threads of one core have the same. Counted over the whole host in the order of the CPUs
    core: int
    socket: int
    node: int  # NUMA node


def usable_cpus(root: Path) -> List[Cpu]:
    """The CPUs that this process may run on, by number: its mask covers taskset, numactl and
    cpusets. Where they are is from /sys, else from /proc/cpuinfo, as in a container that masks it,
    else each is a core of its own on socket 0."""
    listed: Dict[str, Dict[str, str]] = {}
    for text in read_text(root / "proc/cpuinfo").split("\n\n"):
        about = fields(text)
        listed[about.get("processor", "")] = about
    node_of: Dict[int, int] = {}
    for path in (root / "sys/devices/system/node").glob("node[0-9]*/cpulist"):
        for cpu in cpu_list(read_text(path)):
            node_of[cpu] = int(path.parent.name[4:])
    mask = cpu_list(fields(read_text(root / "proc/self/status")).get("Cpus_allowed_list", ""))
    cpus: List[Cpu] = []
    cores: Dict[str, int] = {}
    numbers = [int(number) for number in listed if number.isdigit()]
    online = cpu_list(read_text(root / "sys/devices/system/cpu/online")) or numbers
    usable = {*mask} & {*online}  # a mask may name CPUs that do not exist
    for cpu in sorted(usable) or sorted(online) or [0]:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = read_text(topology / "thread_siblings_list")
        socket = read_text(topology / "physical_package_id")
        if not siblings:
            named = listed.get(str(cpu), {})
            socket = named.get("physical id", "")
            siblings = f"{socket}/{named['core id']}" if "core id" in named else f"cpu{cpu}"
        core = cores.setdefault(siblings, len(cores))
        number = int(socket) if socket.isdigit() else 0  # it is -1 if the machine does not know
        cpus.append(Cpu(cpu, core, number, node_of.get(cpu, 0)))
    return cpus


def _free_of_nodes(root: Path) -> Dict[int, int]:
    """NUMA node of the machine -> its bytes that are unused, or page cache that the kernel can
    drop."""
    free_bytes = {}
    for path in (root / "sys/devices/system/node").glob("node[0-9]*/meminfo"):
        # "Node 0 MemTotal:   24684092 kB"
        lines = sizes("\n".join(line.split(None, 2)[-1] for line in read_text(path).splitlines()))
        dropped = lines.get("Active(file)", 0) + lines.get("Inactive(file)", 0)
        free_bytes[int(path.parent.name[4:])] = lines.get("MemFree", 0) + dropped
    return free_bytes


def _allowed_nodes(root: Path) -> Set[int]:
    """The nodes of this process's cpuset (Slurm) that it is bound to (`numactl --membind`); empty
    if unknown."""
    status = fields(read_text(root / "proc/self/status"))
    allowed = set(cpu_list(status.get("Mems_allowed_list", "")))
    policy = ""
    with (
        contextlib.suppress(OSError),
        open(root / "proc/self/numa_maps", "rb", buffering=0) as file,
    ):
        # Such as "561bbaff2000 bind:1 file=...". Without a buffer: the next lines take as long as
        # memory is large.
        policy = file.readline().decode()
    bound = re.match(r"\S+ bind\S*:(\S+)", policy)
    if not bound:
        return allowed
    nodes = set(cpu_list(bound[1]))
    return nodes & allowed or nodes


def meminfo(root: Path) -> Dict[str, int]:
    """/proc/meminfo in bytes."""
    return sizes(read_text(root / "proc/meminfo"))


def available_bytes(root: Path, memory: Dict[str, int]) -> int:
    """The part of `meminfo` that this process can have without swapping, of the NUMA nodes that it
    may use."""
    machine = memory.get("MemAvailable", memory.get("MemFree", memory["MemTotal"]))
    free_bytes = _free_of_nodes(root)
    usable = _allowed_nodes(root) & set(free_bytes)
    if not usable or len(usable) == len(free_bytes):
        return machine
    return min(machine, sum(free_bytes[node] for node in usable))


def cpu_quota(root: Path) -> Optional[float]:
    """The smallest quota / period on the way up, of either cgroup version."""
    quotas = []
    for folder in _cgroup_folders(root, "cpu"):
        old = f"{read_text(folder / 'cpu.cfs_quota_us')} {read_text(folder / 'cpu.cfs_period_us')}"
        quota, _, period = (read_text(folder / "cpu.max") or old).partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):  # "max" and -1 are no limit
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def cpu_list(text: str) -> List[int]:
    """Linux's own spelling of a set of CPUs: "0-2,5" is [0, 1, 2, 5]."""
    ends = [part.partition("-") for part in text.split(",") if part.strip()]
    return [cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1)]


MEMORY_FILES = (
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)
"""Of each version of cgroups: the files of the limit on memory and of what is used, and the fields
of memory.stat that are pages of files."""


def memory_limit(root: Path, machine_bytes: int) -> Tuple[Optional[int], int]:
    """The limit that leaves least, on the way up, and its used part without pages of files; (None,
    0) for none. A limit of the machine's size or more is none."""
    tightest: Tuple[Optional[int], int] = (None, 0)
    least = math.inf
    for folder in _cgroup_folders(root, "memory"):
        for limit_file, used_file, of_files in MEMORY_FILES:
            limit = read_text(folder / limit_file)
            if not limit.isdigit() or int(limit) >= machine_bytes:  # "max", or version 1's 2**63
                continue
            stat = dict(line.split()[:2] for line in read_text(folder / "memory.stat").splitlines())
            # Active ones too: a mapped store's are.
            cache = sum(int(stat.get(name, 0)) for name in of_files)
            used = max(0, int(read_text(folder / used_file) or 0) - cache)
            if int(limit) - used < least:
                tightest = (int(limit), used)
                least = int(limit) - used
    return tightest


def read_text(path: Path) -> str:
    """The stripped text of a file, "" if it is missing or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def fields(text: str) -> Dict[str, str]:
    """Lines of "name : value"."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def sizes(text: str) -> Dict[str, int]:
    """The fields that are sizes, in bytes."""
    return {
        name: int(value.split()[0]) * 1024
        for name, value in fields(text).items()
        if value.endswith(" kB")
    }


def _cgroup_folders(root: Path, controller: str) -> List[Path]:
    """The folders, from this process's cgroup up to the root of the mount, whose files may limit
    it. Version 2 has one tree, version 1 one a controller, and a machine may have both. A container
    often names a path of the host's in /proc/self/cgroup that it cannot see; it can see the top, so
    go all the way."""
    folders: List[Path] = []
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts = ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            mounts = [f"sys/fs/cgroup/{controllers}", f"sys/fs/cgroup/{controller}"]
        else:
            continue
        inside = Path(path.lstrip("/"))
        folders.extend(
            root / mount / part for mount in mounts for part in (inside, *inside.parents)
        )
    return list(dict.fromkeys(folder for folder in folders if folder.is_dir()))
