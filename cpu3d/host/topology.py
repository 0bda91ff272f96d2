"""A host in detail: which CPU is on which core, socket and NUMA node, and the memory of each node.

topology = read_topology()                                  this host, as this process may use it
topology = from_json(json.loads(text), "host.json")         another one, as `doctor --json` told of it

The estimator's `Host` is the sum of it, which most of the project needs; who lays workers on a host needs this.
"""

import dataclasses
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Tuple, Union

from cpu3d.errors import InputError
from memory_estimator import proc
from memory_estimator.host import ISA_FLAGS, Host, read_host

SCHEMA = 1
"""Version of the JSON. Another one is refused, never guessed at."""


@dataclass(frozen=True)
class Cpu:
    """A CPU as Linux counts them: a hyper-thread where a core has several."""

    number: int
    core: int
    """Equal for the hyper-threads of one core; no other core of the host has it."""
    socket: int
    node: int
    """NUMA node."""


@dataclass(frozen=True)
class Node:
    """A NUMA node whose memory this process may use."""

    number: int
    memory_bytes: int
    """0 for a node that has CPUs and no memory."""
    free_bytes: int
    """Unused, and page cache that the kernel can drop."""


@dataclass(frozen=True)
class Topology:
    """A host as one process sees it, before it is divided among workers."""

    host: Host
    """In sum: its counts are those of `cpus`."""
    cpus: Tuple[Cpu, ...]
    """Those that this process may run on."""
    nodes: Tuple[Node, ...]
    """Those whose memory it may use, some of them without CPUs perhaps."""
    machine_cpus: int
    """CPUs of the machine, whether this process may use them or not."""
    swap_bytes: int = 0
    huge_pages: str = ""
    """Transparent huge pages: "always", "madvise" or "never"; "" where it is not told."""

    def __post_init__(self):
        problems = [
            f"host.{name} must be what the CPUs add up to, {counted}, got {getattr(self.host, name)}; write both anew"
            for name, counted in _sums(self.cpus).items()
            if getattr(self.host, name) != counted
        ]
        numbers = [cpu.number for cpu in self.cpus]
        if not self.cpus or len(set(numbers)) != len(numbers):
            problems.append(f"cpus must be one or more, each once, got {numbers}; write them anew")
        places = {(cpu.core, cpu.socket, cpu.node) for cpu in self.cpus}
        if len({core for core, _, _ in places}) < len(places):
            problems.append("cpus must have each core on one socket and one node, got one on several; write them anew")
        if not self.nodes:
            problems.append("nodes must be one or more, got none; write them anew")
        if problems:
            raise InputError(*problems)

    @property
    def cores(self) -> Tuple[Tuple[Cpu, ...], ...]:
        """Each core's CPUs, in the order of sockets, then nodes, then CPUs: neighbours stand together."""
        found: Dict[int, List[Cpu]] = {}
        for cpu in sorted(self.cpus, key=lambda cpu: (cpu.socket, cpu.node, cpu.number)):
            found.setdefault(cpu.core, []).append(cpu)
        return tuple(map(tuple, found.values()))


def read_topology(root: Union[str, Path] = "/") -> Topology:
    """Describe the host whose /proc and /sys lie under `root`.

    Outside Linux, which tells of no places, every core is on one socket and one node.
    """
    host = read_host(root)
    root = Path(root)
    if not (root / "proc/meminfo").is_file():
        cpus = tuple(Cpu(number, number % host.cores, 0, 0) for number in range(host.logical_cpus))
        nodes = (Node(0, host.memory_bytes, host.available_bytes),)
        return Topology(host, cpus, nodes, machine_cpus=host.logical_cpus)
    return Topology(
        host=host,
        cpus=tuple(Cpu(*place) for place in proc.cpu_places(root)),
        nodes=tuple(Node(*node) for node in proc.node_memory(root)),
        machine_cpus=proc.online_cpus(root),
        swap_bytes=proc.meminfo(root).get("SwapTotal", 0),
        huge_pages=proc.huge_pages(root),
    )


def to_json(topology: Topology) -> Dict[str, Any]:
    """What `from_json` reads: a CPU is [number, core, socket, node], a node is [number, memory, free] in bytes."""
    return {
        "schema": SCHEMA,
        **{field.name: getattr(topology, field.name) for field in dataclasses.fields(topology)},
        "host": {**dataclasses.asdict(topology.host), "isa": list(topology.host.isa)},
        "cpus": [list(dataclasses.astuple(cpu)) for cpu in topology.cpus],
        "nodes": [list(dataclasses.astuple(node)) for node in topology.nodes],
    }


def from_json(content: Any, source: str) -> Topology:
    """The host that `to_json` told of. Raises InputError, with all that is wrong, naming `source`."""
    if not isinstance(content, dict) or "schema" not in content:
        raise InputError(f"host {source} must be what `doctor --json` writes, got something else; write it anew")
    if content["schema"] != SCHEMA:
        raise InputError(
            f"host {source} must have schema {SCHEMA}, got {content['schema']!r}; write it with this version's doctor"
        )
    problems = list(_wrong(content))
    if not problems:
        try:
            return Topology(
                host=Host(**{**content["host"], "isa": tuple(content["host"]["isa"])}),
                cpus=tuple(Cpu(*cpu) for cpu in content["cpus"]),
                nodes=tuple(Node(*node) for node in content["nodes"]),
                **{name: content[name] for name in ("machine_cpus", "swap_bytes", "huge_pages")},
            )
        except InputError as error:
            problems = list(error.problems)
    raise InputError(*(f"host {source}: {problem}" for problem in problems))


def cpu_ranges(numbers: Iterable[int]) -> str:
    """CPUs in Linux's own spelling: [0, 1, 2, 5] is "0-2,5"."""
    parts: List[List[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


# --- Private helpers ---


def _sums(cpus: Iterable[Cpu]) -> Dict[str, int]:
    """The counts of `Host` that follow from the CPUs."""
    cpus = tuple(cpus)
    return {
        "sockets": len({cpu.socket for cpu in cpus}),
        "cores": len({cpu.core for cpu in cpus}),
        "logical_cpus": len(cpus),
        "numa_nodes": len({cpu.node for cpu in cpus}),
    }


def _wrong(content: Dict[str, Any]) -> Iterator[str]:
    """What is missing from a host's JSON, or of the wrong kind."""
    host = content.get("host")
    if not isinstance(host, dict):
        yield "host must be an object, got none; write it anew"
        return  # all the rest would be missing too
    names = {field.name for field in dataclasses.fields(Host)}
    odd = sorted(names.symmetric_difference(host))
    if odd:
        yield f"host must have the fields {', '.join(sorted(names))}, got others in {', '.join(odd)}; write it anew"
    for name in ("memory_bytes", "available_bytes", "cgroup_used_bytes"):
        yield from _unless(_is_count(host.get(name)), f"host.{name}", "a whole number of bytes", host.get(name))
    limit, quota, isa = host.get("cgroup_limit_bytes"), host.get("cpu_quota"), host.get("isa")
    yield from _unless(limit is None or _is_count(limit), "host.cgroup_limit_bytes", "bytes or null", limit)
    is_quota = quota is None or (isinstance(quota, (int, float)) and not isinstance(quota, bool) and quota > 0)
    yield from _unless(is_quota, "host.cpu_quota", "a positive number of CPUs or null", quota)
    is_isa = isinstance(isa, list) and set(map(str, isa)) <= set(ISA_FLAGS)
    yield from _unless(is_isa, "host.isa", f"a list of some of {', '.join(ISA_FLAGS)}", isa)
    yield from _unless(isinstance(host.get("cpu_model"), str), "host.cpu_model", "a name", host.get("cpu_model"))
    for name, fields in (("cpus", "number, core, socket, node"), ("nodes", "number, memory, free")):
        rows = content.get(name)
        yield from _unless(_is_table(rows, fields.count(",") + 1), name, f"rows of [{fields}]", rows)
    for name in ("machine_cpus", "swap_bytes"):
        yield from _unless(_is_count(content.get(name)), name, "a whole number", content.get(name))
    yield from _unless(isinstance(content.get("huge_pages"), str), "huge_pages", "a word", content.get("huge_pages"))


def _unless(holds: bool, name: str, rule: str, value: Any) -> Iterator[str]:
    if not holds:
        yield f"{name} must be {rule}, got {textwrap.shorten(repr(value), 60)}; write it anew with `doctor --json`"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_table(value: Any, columns: int) -> bool:
    return isinstance(value, list) and all(
        isinstance(row, list) and len(row) == columns and all(map(_is_count, row)) for row in value
    )
