"""What Linux states in /proc and /sys of a host's CPUs and memory, and of the limits on them, read here alone.

What it states of single processes is read where it is asked for. Every reader takes the folder that the host's /proc
and /sys lie in, and none fails for a file that is missing, as many are in containers: it answers with the next best
source, and in the end with what a plain small machine would say.
"""

from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple


class CpuPlace(NamedTuple):
    """Where a CPU sits."""

    number: int
    core: int
    """Hyper-threads of one core have the same. Counted over the whole host in the order of the CPUs."""
    socket: int
    node: int
    """NUMA node."""


class NodeMemory(NamedTuple):
    """The memory of a NUMA node."""

    number: int
    memory_bytes: int
    """0 for a node that has CPUs and no memory."""
    free_bytes: int
    """Unused, and page cache that the kernel can drop."""


def cpu_fields(root: Path) -> Dict[str, str]:
    """What /proc/cpuinfo says of the first CPU, "model name" and "flags" among it."""
    return next(iter(_processors(root)), {})


def cpu_places(root: Path) -> List[CpuPlace]:
    """The CPUs that this process may run on, by number: its mask covers taskset, numactl and cpusets."""
    processors = _processors(root)
    node_of = {
        cpu: int(path.parent.name[4:])
        for path in (root / "sys/devices/system/node").glob("node[0-9]*/cpulist")
        for cpu in cpu_list(_read(path))
    }
    places, cores = [], {}
    for cpu in _usable_cpus(root, processors):
        socket, core = _socket_and_core(root, cpu, processors)
        places.append(CpuPlace(cpu, cores.setdefault(core, len(cores)), socket, node_of.get(cpu, 0)))
    return places


def online_cpus(root: Path) -> int:
    """CPUs of the machine, whether this process may use them or not."""
    return len(cpu_list(_read(root / "sys/devices/system/cpu/online"))) or max(1, len(_processors(root)))


def node_memory(root: Path) -> List[NodeMemory]:
    """The NUMA nodes whose memory this process may use, by number; else all of the machine as node 0."""
    allowed = cpu_list(_fields(_read(root / "proc/self/status")).get("Mems_allowed_list", ""))
    nodes = []
    for path in (root / "sys/devices/system/node").glob("node[0-9]*/meminfo"):
        number = int(path.parent.name[4:])
        # "Node 0 MemTotal:   24684092 kB"
        sizes = _sizes("\n".join(line.split(None, 2)[-1] for line in _read(path).splitlines()))
        if not allowed or number in allowed:
            dropped = sizes.get("Active(file)", 0) + sizes.get("Inactive(file)", 0)
            nodes.append(NodeMemory(number, sizes.get("MemTotal", 0), sizes.get("MemFree", 0) + dropped))
    if nodes:
        return sorted(nodes)
    memory = meminfo(root)
    return [NodeMemory(0, memory["MemTotal"], available_bytes(memory))]


def meminfo(root: Path) -> Dict[str, int]:
    """/proc/meminfo in bytes."""
    return _sizes(_read(root / "proc/meminfo"))


def available_bytes(memory: Dict[str, int]) -> int:
    """Of `meminfo`, what can be had without swapping."""
    return memory.get("MemAvailable", memory.get("MemFree", memory["MemTotal"]))


def huge_pages(root: Path) -> str:
    """Transparent huge pages: "always", "madvise" or "never"; "" where it is unknown."""
    chosen = _read(root / "sys/kernel/mm/transparent_hugepage/enabled").partition("[")[2]
    return chosen.partition("]")[0]


def memory_limit(root: Path, machine_bytes: int) -> Tuple[Optional[int], int]:
    """The limit that leaves least, and what is used of it; a limit of the machine's size or more is none."""
    return _tightest(root, machine_bytes, (VERSION_2, VERSION_1))


def memory_high(root: Path, machine_bytes: int) -> Tuple[Optional[int], int]:
    """As `memory_limit`, of version 2's memory.high: beyond it no process is killed, but allocations wait."""
    return _tightest(root, machine_bytes, (("memory.high", *VERSION_2[1:]),))


def cpu_quota(root: Path) -> Optional[float]:
    """The smallest quota / period on the way up, of either cgroup version."""
    quotas = []
    for folder in _cgroup_folders(root, "cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):  # "max" and -1 are no limit
            quotas.append(int(quota) / int(period))
    return min(quotas) if quotas else None


def cache_bytes(root: Path = Path("/")) -> Optional[int]:
    """The largest cache of the first CPU, the last level's; None where it is unknown, as outside Linux."""
    sizes = []
    for path in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = _read(path)
        if text[:-1].isdigit() and text[-1] in "KM":
            sizes.append(int(text[:-1]) * (1024 if text[-1] == "K" else 1024**2))
    return max(sizes, default=None)


def cpu_list(text: str) -> List[int]:
    """Linux's own spelling of a set of CPUs: "0-2,5" is [0, 1, 2, 5]."""
    cpus = []
    for part in text.split(","):
        if part.strip():
            first, _, last = part.partition("-")
            cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


# --- Private helpers ---

VERSION_2 = ("memory.max", "memory.current", ("active_file", "inactive_file"))
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
"""Of a cgroup: the file of its limit, of what it uses, and what of that are pages of files."""


def _tightest(root: Path, machine_bytes: int, kinds: Sequence[Tuple]) -> Tuple[Optional[int], int]:
    """The limit that leaves least, on the way up, and what is used of it without pages of files; (None, 0) for none."""
    tightest: Optional[Tuple[int, int]] = None
    for folder in _cgroup_folders(root, "memory"):
        for limit_name, used_name, file_names in kinds:
            limit = _read(folder / limit_name)
            if not limit.isdigit() or int(limit) >= machine_bytes:  # "max", or version 1's 2**63
                continue
            stat = dict(line.split()[:2] for line in _read(folder / "memory.stat").splitlines())
            cache = sum(int(stat.get(name, 0)) for name in file_names)  # active ones too: a mapped store's are
            used = max(0, int(_read(folder / used_name) or 0) - cache)
            if tightest is None or int(limit) - used < tightest[0] - tightest[1]:
                tightest = int(limit), used
    return (None, 0) if tightest is None else tightest


def _read(path: Path) -> str:
    """The stripped text of a file, "" where it is missing or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _fields(text: str) -> Dict[str, str]:
    """Lines of "name : value"."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def _processors(root: Path) -> List[Dict[str, str]]:
    """/proc/cpuinfo, one dictionary a CPU."""
    blocks = _read(root / "proc/cpuinfo").split("\n\n")
    return [fields for fields in map(_fields, blocks) if "processor" in fields]


def _usable_cpus(root: Path, processors: List[Dict[str, str]]) -> List[int]:
    """The CPUs in this process's mask, which covers taskset, numactl and cpusets; else all that are online."""
    mask = _fields(_read(root / "proc/self/status")).get("Cpus_allowed_list", "")
    online = _read(root / "sys/devices/system/cpu/online")
    cpus = set(cpu_list(mask))
    if online:  # a mask may name CPUs that are not there
        cpus = cpus & set(cpu_list(online)) or set(cpu_list(online))
    return sorted(cpus) or [int(fields["processor"]) for fields in processors] or [0]


def _socket_and_core(root: Path, cpu: int, processors: List[Dict[str, str]]) -> Tuple[int, str]:
    """From /sys, else from /proc/cpuinfo, else a core of its own; the core by a name that its hyper-threads share."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    siblings = _read(topology / "thread_siblings_list")
    if siblings:
        return _number(_read(topology / "physical_package_id")), siblings
    fields = next((fields for fields in processors if fields["processor"] == str(cpu)), {})
    socket = fields.get("physical id", "0")
    return _number(socket), f"{socket}/{fields['core id']}" if "core id" in fields else f"cpu{cpu}"


def _number(text: str) -> int:
    """0 for what is none, and for the -1 of a machine that does not know."""
    return int(text) if text.isdigit() else 0


def _sizes(text: str) -> Dict[str, int]:
    """The fields that are sizes, in bytes."""
    return {name: int(value.split()[0]) * 1024 for name, value in _fields(text).items() if value.endswith(" kB")}


def _cgroup_folders(root: Path, controller: str) -> List[Path]:
    """The folders, from this process's cgroup up to the root of the mount, whose files may limit it.

    Version 2 has one tree, version 1 one a controller, and a machine may have both. A container often names
    a path of the host's in /proc/self/cgroup that it cannot see; what it can see is the top, so go all the way.
    """
    folders: List[Path] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts = ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            mounts = [f"sys/fs/cgroup/{controllers}", f"sys/fs/cgroup/{controller}"]
        else:
            continue
        inside = Path(path.lstrip("/"))
        folders.extend(root / mount / part for mount in mounts for part in (inside, *inside.parents))
    return list(dict.fromkeys(folder for folder in folders if folder.is_dir()))
