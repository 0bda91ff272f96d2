"""How exact own convolutions are: errors against float64, for each instruction set of this host.

    ./run.sh bench kernels --exact
    ./run.sh bench kernels --exact --record records/exactness.jsonl

An error is the root mean square of the differences, over that of the result: a map, or the
gradient of the filters. Beside them stands a plain convolution of the same values: of float32 maps
NumPy's in float32; of bfloat16 maps that of values rounded to bfloat16, with exact products and
sums. All round a bfloat16 map once more as they write it.
"""

from dataclasses import dataclass
from typing import Any, Dict, Iterator

import numpy as np

from cpu3d.bench.harness import Result
from cpu3d.errors import InputError
from cpu3d.util.records import versions
from memory_estimator.common.table import Table
from memory_estimator.common.units import by
from memory_estimator.host import read_host
from models.native.calls import load, operation
from models.native.instruction_sets import INSTRUCTION_SETS
from models.native.library import DTYPE_CODES, own_operations

GRID = (24, 32, 60)
CHANNELS = 16  # of the map and of the outputs
THREADS = 2
PLAIN = "plain"


@dataclass(frozen=True)
class Case:
    """An operation on noise."""

    name: str
    kind: str
    dtype: str
    values_formed: bool = False  # the map: max(scale r + shift, 0)
    gradient_formed: bool = False  # the outputs' gradient: before the norm and ReLU after them


FORWARD = "convolve"
OF_FILTERS = "filter_gradient"
CASES = (
    Case("float32, forward, a raw map", FORWARD, "float32"),
    Case("float32, filter gradient, raw maps", OF_FILTERS, "float32"),
    Case("bfloat16, forward, a raw map", FORWARD, "bfloat16"),
    Case("bfloat16, forward, norm and ReLU formed on load", FORWARD, "bfloat16", True),
    Case("bfloat16, filter gradient, raw maps", OF_FILTERS, "bfloat16"),
    Case("bfloat16, filter gradient, norm and ReLU formed on load", OF_FILTERS, "bfloat16", True),
    Case("bfloat16, filter gradient, both maps formed", OF_FILTERS, "bfloat16", True, True),
)


def exactness_table(record: Result) -> Table:
    """A row for each case, a column for each instruction set."""
    rows = record["rows"]
    names = [name for name in INSTRUCTION_SETS if any(name in row["errors"] for row in rows)]
    names.append(PLAIN)
    lines = []
    for row in rows:
        errors = row["errors"]
        figures = [f"{errors[name]:.2g}" if name in errors else "" for name in names]
        lines.append((row["case"], *figures))
    title = f"Errors against float64: {by(record['grid'])} voxels, {record['channels']} channels, "
    title += record["host"]["cpu"]
    return Table(("", *names), lines, title=title)


# --- In the measuring process ---


def measure(request: Dict[str, Any]) -> Result:
    """The errors of all cases; raises InputError if no own operations load here."""
    own = own_operations()
    if own.kernels is None:
        rule = f"own operations must load here, got none: {own.why}"
        raise InputError(f"{rule}; install a C compiler and run python -m models.native.build")
    library = load(own.kernels)
    rows = [{"case": case.name, "errors": errors_of(library, case)} for case in CASES]
    facts = {"host": read_host().summary(), "versions": versions()}
    return {"grid": GRID, "channels": CHANNELS, "rows": rows, **facts}


def errors_of(library: Any, case: Case) -> Dict[str, float]:
    """Instruction set, or PLAIN -> error."""
    noise = Noise(case)
    truth = noise.plain(np.float64)
    errors = {}
    for name, each in INSTRUCTION_SETS.items():
        is_of_dtype = case.dtype == "bfloat16" or not each.bfloat16_alone
        if is_of_dtype and library.native_kernels(name.encode(), DTYPE_CODES[case.dtype]):
            errors[name] = _error(noise.own(library, name), truth)
    if case.dtype == "float32":
        errors[PLAIN] = _error(noise.plain(np.float32), truth)
    else:
        errors[PLAIN] = _error(noise.plain(np.float64, rounded=True), truth)
    return errors


class Noise:
    """The inputs of a case, in float32; of bfloat16 maps with values that bfloat16 has."""

    def __init__(self, case: Case):
        self.case = case
        self._rng = np.random.default_rng(0)
        self.raw = self._map()
        self.gradient = self._map()
        self.raw_after = self._map()  # the map of the outputs, from which a norm is made
        filters = self._rng.standard_normal((3, 3, 3, CHANNELS, CHANNELS)) / 10
        self.filters = filters.astype(np.float32)
        self.norm = self._coefficients() if case.values_formed else None
        self.norm_after = self._coefficients() if case.gradient_formed else None

    def own(self, library: Any, name: str) -> np.ndarray:
        """What an instruction set makes."""
        case = self.case
        maps = [self._stored(self.raw)]
        if case.kind == FORWARD:
            made = np.zeros_like(maps[0])
            others = []
            arrays = {"filters": self.filters, "map": made}
        else:
            made = np.zeros_like(self.filters)
            others = [self._stored(self.gradient)]
            if case.gradient_formed:
                others.append(self._stored(self.raw_after))
            arrays = {"filter_gradient": made, "other_coefficients": self.norm_after}
        arrays["coefficients"] = self.norm
        shape = (1, *GRID)
        call = operation(case.kind, case.dtype, shape, THREADS, maps, CHANNELS, others, **arrays)
        if library.native_run(name.encode(), call):
            rule = f"memory must suffice for {case.kind}, got too little"
            raise InputError(f"{rule}; end other programs")
        if made.dtype == np.uint16:
            return (made.astype(np.uint32) << 16).view(np.float32)
        return made

    def plain(self, dtype: Any, rounded: bool = False) -> np.ndarray:
        """What the definition says, in a dtype; `rounded`: factors and maps made to bfloat16."""

        def factor(values: np.ndarray) -> np.ndarray:
            if rounded:
                values = _to_bfloat16(values)
            return values.astype(dtype)

        values = factor(self._values())
        if self.case.kind == FORWARD:
            filters = factor(self.filters).reshape(27, CHANNELS, CHANNELS)
            made = sum(part @ tap for part, tap in zip(_shifted(values), filters))
            return factor(made)
        gradient = factor(self._values_of_gradient()).reshape(-1, CHANNELS)
        taps = [part.reshape(-1, CHANNELS).T @ gradient for part in _shifted(values)]
        return np.stack(taps).reshape(self.filters.shape)

    def _values(self) -> np.ndarray:
        raw = self.raw.astype(np.float64)
        if self.norm is None:
            return raw
        scale, shift, floor, *_ = self.norm[0].astype(np.float64)
        return np.maximum(scale * raw + shift, floor)

    def _values_of_gradient(self) -> np.ndarray:
        gradient = self.gradient.astype(np.float64)
        if self.norm_after is None:
            return gradient
        raw = self.raw_after.astype(np.float64)
        scale, shift, floor, of_gradient, of_raw, constant = self.norm_after[0].astype(np.float64)
        passed = np.where(scale * raw + shift > floor, gradient, 0)
        return of_gradient * passed + of_raw * raw + constant

    def _map(self) -> np.ndarray:
        values = self._rng.standard_normal((1, *GRID, CHANNELS)).astype(np.float32)
        return _to_bfloat16(values) if self.case.dtype == "bfloat16" else values

    def _coefficients(self) -> np.ndarray:
        """Of a norm or its gradient, as native.h has them; the floor is a ReLU's."""
        coefficients = self._rng.uniform(0.5, 1.5, (1, 6, CHANNELS)).astype(np.float32)
        coefficients[:, 2] = 0
        return coefficients

    def _stored(self, values: np.ndarray) -> np.ndarray:
        """A map as an operation reads it: of bfloat16 the upper halves."""
        if self.case.dtype == "float32":
            return values
        return (values.view(np.uint32) >> 16).astype(np.uint16)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounded to nearest, ties to even; in float32."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return rounded.view(np.float32)


def _shifted(values: np.ndarray) -> Iterator[np.ndarray]:
    """The map at each tap of the filters, with zeros around it."""
    _, x, y, z, _ = values.shape
    padded = np.pad(values, ((0, 0), (1, 1), (1, 1), (1, 1), (0, 0)))
    for i, j, k in np.ndindex(3, 3, 3):
        yield padded[:, i : i + x, j : j + y, k : k + z]


def _error(result: np.ndarray, truth: np.ndarray) -> float:
    difference = result.astype(np.float64) - truth
    return float(np.sqrt(np.mean(difference**2) / np.mean(truth**2)))
