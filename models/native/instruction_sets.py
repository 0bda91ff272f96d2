"""The instruction sets that native operations are compiled for: the one list, of Python and, by
shared.h, of select.c."""

from dataclasses import dataclass
from typing import Dict, Sequence, Tuple

_WITH_FLOAT32 = ("convolutions", "pointwise", "loss", "orthogonal")


@dataclass(frozen=True)
class InstructionSet:
    """One of them."""

    needs: Tuple[str, ...]  # flags of a CPU that runs it, as /proc/cpuinfo spells them
    options: Tuple[str, ...]  # of the compiler, for `sources`
    sources: Tuple[str, ...] = _WITH_FLOAT32  # C files that are compiled for it
    slow_on_intel: bool = False  # there it is taken by name alone
    emulated: bool = False  # in plain C, for tests: taken by name alone everywhere

    @property
    def bfloat16_alone(self) -> bool:
        """Whether it multiplies bfloat16 values, and has no kernels for float32 maps."""
        return "-DBFLOAT16_ROWS" in self.options

    @property
    def lanes(self) -> int:
        """Values of float32 in a vector."""
        return 16 if "-mavx512f" in self.options else 8


_AVX2 = ("avx2", "fma")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_BFLOAT16 = (*_AVX512, "avx512_bf16")
_FOR_AVX2 = ("-mavx2", "-mfma")
_FOR_AVX512 = (
    *_FOR_AVX2,
    *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
    "-mprefer-vector-width=512",
)
_OF_TILES = ("direct", "direct_filters", "direct_up", "direct_up_filters", "pointwise", "loss")
_FOR_BFLOAT16 = (*_FOR_AVX512, "-mavx512bf16", "-DBFLOAT16_ROWS")

INSTRUCTION_SETS: Dict[str, InstructionSet] = {
    "amx": InstructionSet(
        needs=(*_BFLOAT16, "amx_tile", "amx_bf16"),
        options=(*_FOR_BFLOAT16, "-mamx-tile", "-mamx-bf16"),
        sources=_OF_TILES,
    ),
    "avx512_bf16": InstructionSet(
        needs=_BFLOAT16,
        options=_FOR_BFLOAT16,
        sources=("convolutions", "pointwise", "loss"),
        slow_on_intel=True,
    ),
    "avx512": InstructionSet(needs=_AVX512, options=_FOR_AVX512),
    "avx2": InstructionSet(needs=_AVX2, options=_FOR_AVX2),
    "amx_in_c": InstructionSet(
        needs=_AVX2,
        options=(*_FOR_AVX2, "-DBFLOAT16_ROWS"),
        sources=_OF_TILES,
        emulated=True,
    ),
    "amx_in_c_avx512": InstructionSet(
        needs=_BFLOAT16,
        options=_FOR_BFLOAT16,
        sources=_OF_TILES,
        emulated=True,
    ),
}
"""By name, the fastest first."""

BFLOAT16_PRODUCTS = tuple(name for name, each in INSTRUCTION_SETS.items() if each.bfloat16_alone)
"""Those that multiply bfloat16 values. The others make them float32 first."""

DIRECT_PRODUCTS = tuple(name for name, each in INSTRUCTION_SETS.items() if "direct" in each.sources)
"""Those that multiply bfloat16 values in tiles, without a transform."""

BFLOAT16_FLAGS = ("avx512_bf16", "amx_tile", "amx_bf16")
"""Flags of a CPU that do nothing for float32 maps."""


def best_instruction_set(flags: Sequence[str], *, on_intel: bool) -> str:
    """The name of the fastest that a CPU with these flags runs; "" for none. The same rule as in
    select.c."""
    for name, each in INSTRUCTION_SETS.items():
        by_name_alone = each.emulated or (each.slow_on_intel and on_intel)
        if not by_name_alone and set(each.needs) <= set(flags):
            return name
    return ""
