"""A host's constants: the memory of its runtime, and the seconds that a unit of each kind of work
takes.

Shipped files are in `hosts/`, one for each instruction set of native operations, which is its name:
some were measured, the others state how they differ from one of these. A host's own file is in the
user's data directory (`calibrate` writes it) and comes first: shipped constants, with
seconds scaled to those of measured steps."""

import dataclasses
import hashlib
import itertools
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Union

from memory_estimator.common.files import read_json, read_record, typed
from memory_estimator.host import INSTRUCTION_SETS, Host, instruction_set, read_host
from memory_estimator.installed import ENGINES
from memory_estimator.job import Job
from memory_estimator.step.timeline import Program
from models.config import DTYPES

SCHEMA = 1

SHIPPED = Path(__file__).with_name("hosts")

FEATURES = {
    "convolve": ("work", "work, values"),
    "input_gradient": ("work", "work, values"),
    "filter_gradient": ("work", "work, values"),
    "up": ("work", "traffic"),
    "project": ("work", "traffic"),
    "pass": ("traffic",),
    "loss": ("traffic",),
    "update": ("work", "traffic"),
    "every_op": ("seconds",),
}
"""Kind of operations -> its features that have a cost; `timing.features` counts them."""
WORK = ("work", "work, values")  # features that threads share among them

LAYERS_SLOWER = 2.0
"""Seconds of TensorFlow's layers over those of native operations on the same CPU: assumed."""

FURTHEST = 8.0
"""Measured seconds are at most so many times the predicted ones, and at least that part of them:
beyond it something other than the host's speed was measured."""


@dataclass(frozen=True)
class Scale:
    """The seconds of measured steps beside those that were predicted for them."""

    scale: float  # measured / predicted, within FURTHEST
    threads: int
    date: str
    job: str  # for printing, such as "240 x 240 x 160 in bfloat16"

    def __post_init__(self) -> None:
        if not (1 / FURTHEST <= self.scale <= FURTHEST and self.threads >= 1):
            raise ValueError(f"scale {self.scale} of {self.threads} threads")


@dataclass(frozen=True)
class HostConstants:
    """One host's constants."""

    name: str  # such as "AMD EPYC with AVX512_BF16"
    instructions: str  # the set of native operations there; "" if TensorFlow's layers compute
    cpu: str  # the model's name in /proc/cpuinfo; "" for a class of hosts
    origin: str  # "measured" or "assumed", of the costs
    # field -> "measured: how" or "assumed: why", for every field of figures
    origins: Dict[str, str]
    record: str  # where the figures are from, for printing
    date: str
    threads: int  # that `costs` are of
    saturating_threads: int  # from this many threads on, more do not move memory faster
    # engine -> resident memory besides tensors, in front of the first operation
    baseline_bytes: Dict[str, int]
    # engine -> bytes that each operation adds to it: graph nodes, tiny tensors
    op_bytes: Dict[str, int]
    l2_bytes: int  # of a core's cache L2, which native operations fill with rows
    # dtype -> kind of operations -> feature -> seconds a unit
    costs: Dict[str, Dict[str, Dict[str, float]]]
    scales: Dict[str, Scale] = field(default_factory=dict)  # dtype -> factor of `costs`
    note: str = ""  # why the host's own file was not read

    @property
    def digest(self) -> str:
        """A short hash of the figures that predictions are made from."""
        return _digest(
            self.threads, self.saturating_threads, self.baseline_bytes, self.op_bytes, self.costs
        )

    def scale(self, dtype: str) -> Optional[Scale]:
        """The scale of steps in a dtype; None if none was measured."""
        return self.scales.get(dtype)

    def basis(self, job: Job, host: Optional[Host] = None) -> str:
        """The source of the costs, and why they may be less exact for a job on `host` (None: on
        theirs)."""
        scale = self.scale(job.unet.dtype)
        measured = self.threads
        words = [f"measured on {self.cpu} on {self.date}"]
        if scale:
            measured = scale.threads
            where = "here" if host else f"on {self.cpu}"
            steps = f"steps {where} on {scale.date}, {scale.job}"
            words = [f"scaled by {scale.scale:.2f} to {steps}"]
        elif self.origin != "measured":
            words = [f"assumed from {self.name}"]
        elif host:
            words = [f"assumed from measurements on {self.cpu}"]
        if self.note:
            words.append(self.note)
        if measured != job.threads:
            words.append(f"from {measured} threads to {job.threads} by assumption")
        return "; ".join(words)

    def runtime_bytes(self, engine: str, program: Program) -> int:
        """Resident memory of the process besides the tensors of `program` and its scratch."""
        graph_ops = sum(op.graph_ops for op in program.ops)
        return self.baseline_bytes[engine] + self.op_bytes[engine] * graph_ops

    def speeds(self, job: Job) -> Mapping[str, Mapping[str, float]]:
        """Kind -> feature -> seconds a unit with a job's threads. Work divides evenly, which a
        socket full of cores comes close to; traffic does up to `saturating_threads`; the time
        between operations stays the same."""
        measured = self.scale(job.unet.dtype)
        scale = measured.scale if measured else 1.0
        most = self.saturating_threads
        moving = min(self.threads, most) / min(job.threads, most)
        return scaled(
            self.costs[job.unet.dtype],
            work=scale * self.threads / job.threads,
            traffic=scale * moving,
            overhead=scale,
        )


def scaled(
    kinds: Mapping[str, Mapping[str, float]],
    work: float,
    traffic: float = 1.0,
    overhead: float = 1.0,
) -> Dict[str, Dict[str, float]]:
    """Costs of kinds of operations in a dtype, times factors of arithmetic, of memory traffic, of
    TensorFlow's code."""

    factors = {**dict.fromkeys(WORK, work), "seconds": overhead}
    return {
        kind: {name: cost * factors.get(name, traffic) for name, cost in costs.items()}
        for kind, costs in kinds.items()
    }


def load_constants(name: Union[str, Path]) -> HostConstants:
    """Constants from a file, or shipped ones by their name. Raises ValueError for a file that is
    missing, damaged or of another schema, and for one whose steps were predicted by other constants
    than those that are shipped now."""
    try:
        return read_record(_path(name), SCHEMA, _constants, "run `calibrate` again, or delete it")
    except (FileNotFoundError, NotADirectoryError):
        todo = f"write it with `calibrate --out {name}`"
        raise ValueError(f"calibration {name} must exist, got none; {todo}") from None


def find_constants(host: Optional[Host] = None) -> HostConstants:
    """This host's own constants, else the shipped ones, with its cache. A damaged file is left out,
    with a note. Raises InstructionSetError as `Host.native`."""
    if host is None:
        host = read_host()
    shipped = constants_of(host)
    if host.instructions not in INSTRUCTION_SETS:  # of such steps no seconds are kept
        return shipped
    try:
        path = host_file(host)
        constants = load_constants(path) if path.exists() else shipped
    except (OSError, ValueError) as error:
        constants = dataclasses.replace(shipped, note=str(error))
    return dataclasses.replace(constants, l2_bytes=host.l2_bytes or constants.l2_bytes)


def constants_of(host: Host) -> HostConstants:
    """The shipped constants of what computes on a host: native operations of an instruction set, or
    TensorFlow's layers, which take LAYERS_SLOWER times as long."""
    if host.instructions in INSTRUCTION_SETS:
        return shipped_constants(host.instructions)
    base = shipped_constants(instruction_set(host.isa, host.cpu_model))
    if host.instructions:
        return dataclasses.replace(base, instructions=host.instructions, origin="assumed")
    each = LAYERS_SLOWER
    costs = {dtype: scaled(kinds, each, each, each) for dtype, kinds in base.costs.items()}
    name = f"{LAYERS_SLOWER:g} times the seconds of native operations on a {base.name}"
    return dataclasses.replace(base, name=name, instructions="", origin="assumed", costs=costs)


def host_file(host: Host) -> Path:
    """The file of a host's own speed, by its CPU, instruction sets and cores, and by the shipped
    constants that it scales: versions leave each other's alone. It is in $XDG_DATA_HOME, else
    ~/.local/share. Raises ValueError if there is no such folder."""
    base = Path(os.environ.get("XDG_DATA_HOME", ""))
    if not base.is_absolute():  # the XDG specification: ignore it then
        base = Path(os.path.expanduser("~/.local/share"))
    if not base.is_absolute():
        rule = "$XDG_DATA_HOME or a home folder must be set to keep a host's speed"
        raise ValueError(f"{rule}, got neither; set one")
    digest = _digest(host.cpu_model, host.isa, host.usable_cores, constants_of(host).digest)
    cpu = re.sub(r"[^a-z0-9.]+", "-", host.cpu_model.lower()).strip("-")
    return base / "cpu3d" / "speed" / f"{cpu}.cores-{host.usable_cores}.{digest}.json"


def shipped_constants(instructions: str) -> HostConstants:
    """The shipped constants for hosts whose native operations use an instruction set; "" is none,
    as avx2."""
    return load_constants(instructions or "avx2")


def like_shipped(host: Host) -> Dict[str, Any]:
    """The JSON of a host's own file that scales nothing yet: it has the shipped constants."""
    about = {"like": host.instructions, "shipped": constants_of(host).digest}
    cache = {"l2_bytes": host.l2_bytes} if host.l2_bytes else {}
    return {"schema": SCHEMA, "cpu": host.cpu_model, **about, **cache, "scales": {}}


def _digest(*figures: Any) -> str:
    return hashlib.sha256(repr(figures).encode()).hexdigest()[:8]


def _path(name: Union[str, Path]) -> Union[str, Path]:
    """The file of constants, or of shipped ones by their name."""
    return SHIPPED / f"{name}.json" if name in INSTRUCTION_SETS else name


def _constants(content: Mapping[str, Any]) -> HostConstants:
    """The constants in the content of a file."""
    content = _completed(content)
    names = {field.name for field in dataclasses.fields(HostConstants)} & set(content)
    constants = typed({name: content[name] for name in names}, HostConstants, "calibration")
    _check(constants)
    if "shipped" in content and content["shipped"] != shipped_constants(content["like"]).digest:
        raise ValueError("scales of other constants than are shipped now")
    return constants


def _completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content, with fields of the shipped file that it is "like"."""
    if "like" not in content:
        return content
    if content["like"] not in INSTRUCTION_SETS:
        raise ValueError(f"like {content['like']}")
    return {**_completed(read_json(_path(content["like"]))), **content}


def _check(constants: HostConstants) -> None:
    """Raise ValueError for a figure that is impossible, KeyError for one that is missing."""
    if min(constants.threads, constants.saturating_threads, constants.l2_bytes) < 1:
        raise ValueError("threads or l2_bytes below 1")
    figures: List[float] = []
    for engine in ENGINES:
        figures += [constants.baseline_bytes[engine], constants.op_bytes[engine]]
    for dtype, (kind, features) in itertools.product(DTYPES, FEATURES.items()):
        figures += [constants.costs[dtype][kind][feature] for feature in features]
    if min(figures) < 0:
        raise ValueError(f"a figure below 0, {min(figures):g}")
