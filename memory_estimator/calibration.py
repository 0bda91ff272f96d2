"""What the estimator knows of a host: what its runtime holds in memory, and what a unit of each kind of work costs.

Shipped files are in `hosts/`: some were measured by `calibrate`, the others state how they differ from one of these, as
assumed from published peak figures. A host's own file is in the user's data directory, one for each engine
(`cpu3d.host.speed` writes it), and comes first: the constants that `calibrate` has measured, and the scale that brings
predicted seconds to those of a training.
"""

import dataclasses
import hashlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Union

from memory_estimator.common.files import read_json, reason, typed
from memory_estimator.host import Host, cache_bytes, read_host
from memory_estimator.job import ENGINES, installed_versions
from memory_estimator.step.onednn import ISAS, USUAL, Kernels
from memory_estimator.step.program import Program
from models.config import DTYPES

SCHEMA = 2  # of the features that costs are of, too

SHIPPED = Path(__file__).with_name("hosts")

NAMED = {"amx": "xeon_amx.json", "avx512_bf16": "epyc_avx512_bf16.json", "avx512": "xeon_avx512.json"}
"""What shipped constants are called on the command line. The first whose instructions a host has is its own."""

GROUPS = (
    *("conv", "conv_filter_gradient", "conv_input_gradient", "first_conv", "first_conv_filter_gradient"),
    *("head_conv", "head_conv_filter_gradient", "head_conv_input_gradient"),
    *("up_conv", "up_conv_filter_gradient", "up_conv_input_gradient"),
    *("norm", "norm_gradient", "pool", "pool_gradient"),
    *("join", "slice", "pointwise", "loss", "update", "every_op"),
)
"""Groups of operations (`timing.group_of`) whose costs every calibration holds, for each engine and dtype."""

Costs = Dict[str, Dict[str, Dict[str, Dict[str, float]]]]
"""Engine -> dtype -> group of operations -> feature (`timing.features`) -> seconds a unit."""

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
    cache_bytes: int  # last-level cache
    saturating_threads: int  # from this many threads on, more do not move memory any faster
    baseline_bytes: Dict[str, int]  # engine -> resident memory besides tensors, in front of the first operation
    op_bytes: Dict[str, int]  # engine -> what each operation adds to it: graph nodes, compiled kernels, tiny tensors
    costs: Costs
    kernels: Kernels = USUAL  # of oneDNN
    measured_threads: int = 0  # that `costs` were worked out from by `for_threads`; 0 where they are as in the file
    own: bool = False  # whether `calibrate` or a training has measured this very host
    trained: Optional[Trained] = None  # what the costs were scaled by
    notes: Dict[str, str] = field(default_factory=dict)  # engine -> why the host's own file was not read
    others: Optional["HostConstants"] = None  # asked for the engines and dtypes that these do not know

    def of(self, engine: str, dtype: str) -> "HostConstants":
        """These constants, or else `others`, whichever know an engine in a dtype: figures are never mixed, so name,
        origin and record are those of what is used. Raises ValueError where neither does."""
        one: Optional[HostConstants] = self
        while one and dtype not in one.costs.get(engine, {}):
            one = one.others
        if one:
            notes = {name: note for name, note in self.notes.items() if name == engine}
            return dataclasses.replace(one, notes=notes)
        known = ", ".join(f"{one} in {each}" for one, by_dtype in self.costs.items() for each in by_dtype)
        raise ValueError(f"calibration {self.name} must know {engine} in {dtype}, got {known}; run `calibrate --all`")

    @property
    def identity(self) -> str:
        """Tells these costs from others, whatever they were scaled by."""
        return f"{self.name}, {self.date}"

    def basis(self, host: Optional[Host] = None) -> str:
        """Where the costs are from, and why they may be less exact for `host` (None: not this one), for printing."""
        if self.trained:
            words = f"scaled by {self.trained.scale:.2f} to a training here on {self.trained.date}, {self.trained.job}"
        elif self.origin != "measured":
            words = f"assumed from {self.name}"
        elif host and not self.own:
            words = f"assumed from measurements on {self.cpu}"
        else:
            words = f"measured {'here' if self.own else f'on {self.cpu}'} on {self.date}"
        return "; ".join((words, *self.caveats(host)))

    def caveats(self, host: Optional[Host] = None) -> List[str]:
        """Why the figures may be less exact than `basis` says, a phrase each."""
        caveats = list(self.notes.values())
        if self.trained and not self.trained.quiet:
            caveats.append("other programs kept its CPUs busy")
        if host and not self.own and not host.kernels.isa.startswith("avx512"):
            caveats.append("AVX512 assumed, which this CPU is not known to have: without it takes longer")
        if self.kernels.isa in ("sse41", "avx"):
            caveats.append("AVX2 assumed, which oneDNN may not use")
        if self.measured_threads:
            caveats.append(f"from {self.measured_threads} threads to {self.threads} by assumption")
        return caveats

    def runtime_bytes(self, engine: str, program: Program) -> int:
        """Resident memory of the process besides the tensors of `program` and oneDNN's scratch."""
        return self.baseline_bytes[engine] + self.op_bytes[engine] * runtime_ops(program)

    def speeds(self, engine: str, dtype: str) -> Mapping[str, Mapping[str, float]]:
        """Group -> feature -> seconds a unit. Raises ValueError where they are not known."""
        return self.of(engine, dtype).costs[engine][dtype]

    def for_threads(self, threads: int) -> "HostConstants":
        """These constants with another number of threads. Work divides evenly, which a socket full of cores comes close
        to; traffic does up to `saturating_threads`; what TensorFlow does between operations takes as long."""
        if threads == self.threads:
            return self
        moving = min(self.threads, self.saturating_threads) / min(threads, self.saturating_threads)
        slower = {"work": self.threads / threads, "traffic": moving, "overhead": 1.0}
        measured = self.measured_threads or self.threads
        return dataclasses.replace(
            self,
            threads=threads,
            costs=_of_each(self.costs, lambda dtype, groups: scaled(groups, slower)),
            measured_threads=0 if measured == threads else measured,
        )


def part_of(feature: str) -> str:
    """What of the host a feature (`timing.features`) keeps busy: "work", "traffic" or "overhead"."""
    if feature.startswith("work"):
        return "work"
    return "overhead" if feature == "seconds" else "traffic"


def scaled(groups: Mapping[str, Mapping[str, float]], slower: Mapping[str, float]) -> Dict[str, Dict[str, float]]:
    """Costs of groups of operations in one dtype, times `slower[part_of(feature)]`."""
    return {group: {name: cost * slower[part_of(name)] for name, cost in one.items()} for group, one in groups.items()}


RUN_AGAIN = 0.28
"""Of what a convolution adds to the process, what one adds that runs another slab of a map in the same function: 0.23
to 0.32 in five steps under "lean", of 96^3 to 128^3 voxels, of both engines and dtypes, one of a batch of 2."""


ORTHOGONAL = 1.9
"""Of what a convolution adds to the process, what a kernel that Muon makes orthogonal adds, with its twenty products of
matrices: the median of 24 steps of 64^3 to 128^3 voxels, which held 0.8 to 2.8 more than was counted without it. Beside
the same four steps with Adam it was 1.3 to 1.7; the rest every step holds beyond `baseline_bytes` since that was
measured."""


def runtime_ops(program: Program) -> int:
    """The operations that `op_bytes` counts: convolutions, whose kernels are compiled, and kernels made orthogonal."""
    first, found = ("", "sample0/plane0"), 0.0
    for op in program.ops:
        if "conv" in op.kind and "shortcut" not in op.name and op.name.partition("/filter_gradient/")[2] in first:
            found += (RUN_AGAIN if op.again else 1) + RUN_AGAIN * (op.copies - 1)
        elif op.kind == "update" and op.name.endswith("/orthogonal"):
            found += ORTHOGONAL
    return round(found)


def load_constants(path: Union[str, Path]) -> HostConstants:
    """Constants from a file. Raises ValueError for one that is missing, damaged or of another schema."""
    return _load(Path(path))


def _load(path: Path, engine: str = "", others: Optional[HostConstants] = None) -> HostConstants:
    """Constants from a file, before `others`. With `engine` it is the file of this host for that engine, which may have
    the scale of a training."""
    try:
        content = read_json(path)
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']}")
        each = [_constants(one, path) for one in content.get("constants", [content])]
        for one in reversed(each):
            others = dataclasses.replace(one, own=bool(engine), others=others)
        if others is None:
            raise ValueError("no constants")
        return _scaled_to(typed(content.get("trained", {}), Dict[str, Trained]), others, engine) if engine else others
    except FileNotFoundError:
        raise ValueError(f"calibration {path} must exist, got none; write it with `calibrate --out {path}`") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"calibration {path} must be complete JSON of schema {SCHEMA}, got {reason(error)}; run `calibrate` again, "
            "or delete it"
        ) from None


def named_constants(name: str) -> HostConstants:
    """Constants from a file, or shipped ones by their name in NAMED."""
    return load_constants(SHIPPED / NAMED[name] if name in NAMED else name)


def find_constants(host: Optional[Host] = None) -> HostConstants:
    """What was measured on this host, else the shipped constants. A damaged file is left out, with a note."""
    host, notes = host or read_host(), {}
    constants = shipped_constants(host.kernels)
    for engine in ENGINES:
        path = host_file(host, engine)
        try:
            if path and path.exists():
                constants = _load(path, engine, constants)
        except (OSError, ValueError) as error:
            notes[engine] = str(error)
    return dataclasses.replace(constants, notes=notes)


def host_file(host: Host, engine: str) -> Optional[Path]:
    """The file of a host's own speed, by its fingerprint: CPU, instruction sets, caches, cores, the engine and its
    versions. In $XDG_DATA_HOME, else ~/.local/share; None where there is no such folder, or no engine. Earlier versions
    have theirs in another folder, cpu3d/hosts, and keep it."""
    base = Path(os.environ.get("XDG_DATA_HOME", ""))
    if not base.is_absolute():  # the XDG specification: ignore it then
        base = Path(os.path.expanduser("~")) / ".local" / "share"
    version = installed_versions().get(engine)
    if version is None or not base.is_absolute():
        return None
    what = repr((host.cpu_model, host.isa, host.kernels, cache_bytes(), host.usable_cores)).encode()
    cpu, software = (re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-") for name in (host.cpu_model, version))
    place = f"{cpu}.cores-{host.usable_cores}.{hashlib.sha256(what).hexdigest()[:8]}"
    return base / "cpu3d" / "speed" / f"{place}.{engine}.{software}.json"


def shipped_constants(kernels: Kernels) -> HostConstants:
    """The shipped constants for hosts with these kernels of oneDNN."""
    isa = kernels.isa
    name = "amx" if isa.endswith("amx") else "avx512_bf16" if isa.endswith(("bf16", "fp16")) else "avx512"
    return dataclasses.replace(named_constants(name), kernels=kernels)


def to_json(constants: HostConstants) -> Dict[str, Any]:
    """What a calibration file holds."""
    figures = {name: getattr(constants, name) for name in FIELDS}
    return {"schema": SCHEMA, **figures, "kernels": dataclasses.asdict(constants.kernels)}


BECOMES = ("measured_threads", "own", "trained", "notes", "others")
"""Fields that are set after a file is read; it holds all the others."""

FIELDS = tuple(field.name for field in dataclasses.fields(HostConstants) if field.name not in BECOMES)


def _constants(content: Mapping[str, Any], path: Path) -> HostConstants:
    """From the JSON of a file `path`. It may name another one beside it as "like", and hold what differs, and in
    "faster" by how much work and traffic go faster."""
    if "like" in content:
        base, faster = read_json(path.with_name(str(content["like"]))), content.get("faster", {})
        slower = {part: 1 / faster.get(part, 1.0) for part in ("traffic", "overhead")}
        of_dtype = lambda dtype, groups: scaled(groups, {**slower, "work": 1 / faster.get(dtype, 1.0)})  # noqa: E731
        content = {**base, "costs": _of_each(base["costs"], of_dtype), **content}
    constants = typed({name: content[name] for name in FIELDS if name in content}, HostConstants, "calibration")
    wrong = next(_wrong(constants), "")
    if wrong:
        raise ValueError(wrong)
    return constants


def _scaled_to(trained: Mapping[str, Trained], constants: HostConstants, engine: str) -> HostConstants:
    """Constants in each dtype scaled to a training in it, else to one in the other dtype. Trainings whose seconds were
    predicted by other constants are left out."""
    base = {dtype: constants.of(engine, dtype) for dtype in DTYPES}
    known = {dtype: one for dtype, one in trained.items() if dtype in base and one.constants == base[dtype].identity}
    for dtype in DTYPES if known else ():
        one = known.get(dtype) or next(iter(known.values()))
        here = base[dtype].for_threads(one.threads)
        costs = scaled(here.speeds(engine, dtype), dict.fromkeys(PARTS, one.scale))
        costs, about = {engine: {dtype: costs}}, {"measured_threads": 0, "own": True, "trained": one}
        constants = dataclasses.replace(here, costs=costs, others=constants, **about)
    return constants


def _wrong(constants: HostConstants) -> Iterator[str]:
    """The figures that cannot be, and those that are missing."""
    for name in ("threads", "cache_bytes", "saturating_threads"):
        if getattr(constants, name) < 1:
            yield f"{name} {getattr(constants, name)}"
    kernels = constants.kernels
    if kernels.isa not in ISAS or min(kernels.l1_bytes, kernels.l2_bytes, kernels.cores) < 1:
        yield f"kernels {kernels}"
    if not any(constants.costs.values()):
        yield "no costs"
    for engine, by_dtype in constants.costs.items():
        for name in ("baseline_bytes", "op_bytes"):
            if getattr(constants, name).get(engine, -1) < 0:
                yield f"{name} of {engine} {getattr(constants, name).get(engine, 'missing')}"
        for dtype, groups in by_dtype.items():
            costs = {f"{group} {name}": cost for group, found in groups.items() for name, cost in found.items()}
            # Every program looks these up; other features of a group may be left out and then cost nothing.
            needed = {*costs, "join traffic", "join cached", "every_op seconds"}
            missing = [group for group in GROUPS if group not in groups] + sorted(needed - set(costs))
            yield from (f"{engine} {dtype}: {name} {cost}" for name, cost in costs.items() if not 0 <= cost < 1)
            yield from (f"{engine} {dtype}: no {name}" for name in missing)


def _of_each(costs: Costs, groups_of: Callable[[str, Any], Any]) -> Costs:
    """`groups_of(dtype, groups)` in the place of the groups of each engine and dtype."""
    return {
        engine: {dtype: groups_of(dtype, groups) for dtype, groups in by_dtype.items()}
        for engine, by_dtype in costs.items()
    }
