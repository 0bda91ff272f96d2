"""What the estimator knows of a host: what its runtime holds in memory, and what a unit of each kind of work costs.

Shipped files are in `hosts/`: some were measured by `calibrate`, the others state how they differ from one of these. A
host's own file is in the user's data directory (`cpu3d.host.speed` writes it) and comes first: the constants that
`calibrate` has measured, and the scale that brings predicted seconds to those of a training.
"""

import dataclasses
import hashlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Union

from memory_estimator.common.files import read_json, reason, typed
from memory_estimator.host import Host, read_host
from memory_estimator.job import ENGINES
from memory_estimator.step.program import Program
from models.config import DTYPES

SCHEMA = 3

SHIPPED = Path(__file__).with_name("hosts")

NAMED = {
    "amx": "xeon_amx.json",
    "avx512_bf16": "epyc_avx512_bf16.json",
    "avx512": "xeon_avx512.json",
    "avx2": "avx2.json",
}
"""What shipped constants are called on the command line: the instruction set of own kernels."""

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
"""Kind of operations -> what is counted of it (`timing.features`) and has a cost."""

Costs = Dict[str, Dict[str, Dict[str, float]]]
"""Dtype -> kind of operations -> feature -> seconds a unit."""

PARTS = ("work", "traffic", "overhead")  # of a host: its arithmetic, its memory, TensorFlow's own code

FURTHEST = 8.0
"""Measured seconds are at most so many times the predicted ones, and at least that part of them: beyond it something
other than the host's speed was measured."""


@dataclass(frozen=True)
class Trained:
    """The seconds of a training's steps beside those that were predicted for them."""

    scale: float  # measured / predicted, within FURTHEST
    quiet: bool  # whether the CPUs had next to nothing else to do
    threads: int
    date: str
    job: str  # for printing, such as "240 x 240 x 160 in bfloat16"
    constants: str  # `HostConstants.identity` of those that predicted

    def __post_init__(self):
        if not (1 / FURTHEST <= self.scale <= FURTHEST and self.threads >= 1):
            raise ValueError(f"scale {self.scale} of {self.threads} threads")


@dataclass(frozen=True)
class HostConstants:
    """One host's constants."""

    name: str  # such as "AMD EPYC with AVX512_BF16"
    cpu: str  # the model's name in /proc/cpuinfo; "" for a class of hosts
    origin: str  # "measured" or "assumed", of the costs
    origins: Dict[str, str]  # field -> "measured: how" or "assumed: why", for every field of figures
    record: str  # what the figures rest on, for printing
    date: str
    threads: int  # the costs are those with this many threads
    saturating_threads: int  # from this many threads on, more do not move memory any faster
    baseline_bytes: Dict[str, int]  # engine -> resident memory besides tensors, in front of the first operation
    op_bytes: Dict[str, int]  # engine -> what each operation adds to it: graph nodes, tiny tensors
    costs: Costs
    measured_threads: int = 0  # that `costs` were worked out from by `for_threads`; 0 where they are as in the file
    own: bool = False  # whether `calibrate` or a training has measured this very host
    trained: Dict[str, Trained] = field(default_factory=dict)  # dtype -> what its costs are scaled by
    note: str = ""  # why the host's own file was not read

    @property
    def identity(self) -> str:
        """Tells these costs from others, whatever they are scaled by."""
        return f"{self.name}, {self.date}"

    def training(self, dtype: str) -> Optional[Trained]:
        """What scales the costs in a dtype: a training in it, else one in the other."""
        return self.trained.get(dtype) or next(iter(self.trained.values()), None)

    def basis(self, dtype: str, host: Optional[Host] = None) -> str:
        """Where the costs are from, and why they may be less exact for `host` (None: not this one), for printing."""
        trained = self.training(dtype)
        if trained:
            words = f"scaled by {trained.scale:.2f} to a training here on {trained.date}, {trained.job}"
        elif self.origin != "measured":
            words = f"assumed from {self.name}"
        elif host and not self.own:
            words = f"assumed from measurements on {self.cpu}"
        else:
            words = f"measured {'here' if self.own else f'on {self.cpu}'} on {self.date}"
        return "; ".join((words, *self.caveats(dtype)))

    def caveats(self, dtype: str) -> List[str]:
        """Why the figures may be less exact than `basis` says, a phrase each."""
        caveats, trained = [self.note] if self.note else [], self.training(dtype)
        if trained and not trained.quiet:
            caveats.append("other programs kept its CPUs busy")
        measured = trained.threads if trained else self.measured_threads or self.threads
        if measured != self.threads:
            caveats.append(f"from {measured} threads to {self.threads} by assumption")
        return caveats

    def runtime_bytes(self, engine: str, program: Program) -> int:
        """Resident memory of the process besides the tensors of `program` and its scratch."""
        return self.baseline_bytes[engine] + self.op_bytes[engine] * runtime_ops(program)

    def speeds(self, dtype: str) -> Mapping[str, Mapping[str, float]]:
        """Kind -> feature -> seconds a unit."""
        trained = self.training(dtype)
        return scaled(self.costs[dtype], dict.fromkeys(PARTS, trained.scale if trained else 1.0))

    def for_threads(self, threads: int) -> "HostConstants":
        """These constants with another number of threads. Work divides evenly, which a socket full of cores comes close
        to; traffic does up to `saturating_threads`; what TensorFlow does between operations takes as long."""
        if threads == self.threads:
            return self
        moving = min(self.threads, self.saturating_threads) / min(threads, self.saturating_threads)
        slower = {"work": self.threads / threads, "traffic": moving, "overhead": 1.0}
        costs = {dtype: scaled(kinds, slower) for dtype, kinds in self.costs.items()}
        measured = self.measured_threads or self.threads
        return dataclasses.replace(self, threads=threads, costs=costs, measured_threads=measured)


def part_of(feature: str) -> str:
    """What of the host a feature (`timing.features`) keeps busy: "work", "traffic" or "overhead"."""
    if feature.startswith("work"):
        return "work"
    return "overhead" if feature == "seconds" else "traffic"


def scaled(kinds: Mapping[str, Mapping[str, float]], slower: Mapping[str, float]) -> Dict[str, Dict[str, float]]:
    """Costs of kinds of operations in one dtype, times `slower[part_of(feature)]`."""
    return {kind: {name: cost * slower[part_of(name)] for name, cost in one.items()} for kind, one in kinds.items()}


ORTHOGONAL = 11
"""Operations that a kernel which Muon makes orthogonal counts as, with its twenty products of matrices: 20 of 21 steps
of 64^3 and 96^3 voxels lie within 35 MiB of a line through their operations."""


def runtime_ops(program: Program) -> int:
    """What `op_bytes` counts: operations, as far as a program tells TensorFlow's own."""
    orthogonal = sum(op.name.endswith("/orthogonal") for op in program.ops)
    return len(program.ops) + ORTHOGONAL * orthogonal


def load_constants(path: Union[str, Path]) -> HostConstants:
    """Constants from a file. Raises ValueError for one that is missing, damaged or of another schema."""
    return _load(Path(path), _constants)


def named_constants(name: str) -> HostConstants:
    """Constants from a file, or shipped ones by their name in NAMED."""
    return load_constants(SHIPPED / NAMED[name] if name in NAMED else name)


def find_constants(host: Optional[Host] = None) -> HostConstants:
    """What was measured on this host, else the shipped constants. A damaged file is left out, with a note."""
    host = host or read_host()
    shipped, path = shipped_constants(host.instructions), host_file(host)
    try:
        return _load(path, lambda content, _: _own(content, path, shipped)) if path and path.exists() else shipped
    except (OSError, ValueError) as error:
        return dataclasses.replace(shipped, note=str(error))


def host_file(host: Host) -> Optional[Path]:
    """The file of a host's own speed, by its CPU, instruction sets and cores. In $XDG_DATA_HOME, else ~/.local/share;
    None where there is no such folder."""
    base = Path(os.environ.get("XDG_DATA_HOME", ""))
    if not base.is_absolute():  # the XDG specification: ignore it then
        base = Path(os.path.expanduser("~")) / ".local" / "share"
    if not base.is_absolute():
        return None
    what = hashlib.sha256(repr((host.cpu_model, host.isa, host.usable_cores)).encode()).hexdigest()[:8]
    cpu = re.sub(r"[^a-z0-9.]+", "-", host.cpu_model.lower()).strip("-")
    return base / "cpu3d" / "speed" / f"{cpu}.cores-{host.usable_cores}.{what}.json"


def shipped_constants(instructions: str) -> HostConstants:
    """The shipped constants for hosts where own kernels are those for an instruction set; "" is none, as avx2."""
    return named_constants(instructions or "avx2")


def to_json(constants: HostConstants) -> Dict[str, Any]:
    """What a calibration file holds."""
    return {"schema": SCHEMA, **{name: getattr(constants, name) for name in FIELDS}}


BECOMES = ("measured_threads", "own", "trained", "note")
"""Fields that are set after a file is read; it holds all the others."""

FIELDS = tuple(field.name for field in dataclasses.fields(HostConstants) if field.name not in BECOMES)


def _load(path: Path, constants_of: Any) -> HostConstants:
    """`constants_of(content, path)` of a JSON file. Raises ValueError as `load_constants`."""
    try:
        content = read_json(path)
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']}")
        return constants_of(content, path)
    except FileNotFoundError:
        raise ValueError(f"calibration {path} must exist, got none; write it with `calibrate --out {path}`") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"calibration {path} must be complete JSON of schema {SCHEMA}, got {reason(error)}; run `calibrate` again, "
            "or delete it"
        ) from None


def _constants(content: Mapping[str, Any], path: Path) -> HostConstants:
    """From the JSON of a file `path`. It may name another one beside it as "like", and hold what differs, and in
    "faster" by how much work and traffic go faster."""
    if "like" in content:
        base, faster = read_json(path.with_name(str(content["like"]))), content.get("faster", {})
        slower = {part: 1 / faster.get(part, 1.0) for part in ("traffic", "overhead")}
        costs = {
            dtype: scaled(kinds, {**slower, "work": 1 / faster.get(dtype, 1.0)})
            for dtype, kinds in base["costs"].items()
        }
        content = {**base, "costs": costs, **content}
    constants = typed({name: content[name] for name in FIELDS if name in content}, HostConstants, "calibration")
    wrong = next(_wrong(constants), "")
    if wrong:
        raise ValueError(wrong)
    return constants


def _own(content: Mapping[str, Any], path: Path, shipped: HostConstants) -> HostConstants:
    """From a host's own file. Trainings whose seconds were predicted by other constants are left out."""
    base = _constants(content["constants"], path) if content.get("constants") else shipped
    trained = typed(content.get("trained", {}), Dict[str, Trained])
    trained = {dtype: one for dtype, one in trained.items() if dtype in DTYPES and one.constants == base.identity}
    return dataclasses.replace(base, own=bool(content.get("constants") or trained), trained=trained)


def _wrong(constants: HostConstants) -> Iterator[str]:
    """The figures that cannot be, and those that are missing."""
    for name in ("threads", "saturating_threads"):
        if getattr(constants, name) < 1:
            yield f"{name} {getattr(constants, name)}"
    for engine in ENGINES:
        for name in ("baseline_bytes", "op_bytes"):
            if getattr(constants, name).get(engine, -1) < 0:
                yield f"{name} of {engine} {getattr(constants, name).get(engine, 'missing')}"
    for dtype in DTYPES:
        for kind, features in FEATURES.items():
            for feature in features:
                cost = constants.costs.get(dtype, {}).get(kind, {}).get(feature, "missing")
                if cost == "missing" or not 0 <= cost < 1:
                    yield f"{dtype}: {kind} {feature} {cost}"
