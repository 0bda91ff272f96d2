"""oneDNN as a step uses it: which of its kernels a host runs, and a convolution as these see it."""

import math
from dataclasses import dataclass
from typing import Optional, Sequence, Tuple

Grid = Tuple[int, int, int]

VECTOR = 16  # channels are worked on in blocks of as many float32 values as a register holds

ISAS = {
    "sse41": (),
    "avx": ("avx",),
    "avx2": ("avx", "avx2"),
    "avx2_vnni": ("avx", "avx2", "avx_vnni"),
    "avx2_vnni_2": ("avx", "avx2", "avx_vnni", "avx_vnni_int8", "avx_ne_convert"),
    "avx512_core": ("avx", "avx2", "avx512f"),
    "avx512_core_vnni": ("avx", "avx2", "avx512f", "avx512_vnni"),
    "avx512_core_bf16": ("avx", "avx2", "avx512f", "avx512_vnni", "avx512_bf16"),
    "avx512_core_fp16": ("avx", "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    "avx512_core_amx": (
        *("avx", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
        *("amx_tile", "amx_int8", "amx_bf16"),
    ),
}
"""What oneDNN 3 calls its instruction sets, in ONEDNN_VERBOSE and, in capitals, in ONEDNN_MAX_CPU_ISA, and the flags of
/proc/cpuinfo that each needs, from the lowest to the highest (src/cpu/x64/cpu_isa_traits.hpp)."""


@dataclass(frozen=True)
class Kernels:
    """Which of oneDNN's kernels a host runs, and what sizes their buffers."""

    isa: str = "avx512_core_bf16"  # of ISAS, the highest instruction set that oneDNN may use
    l1_bytes: int = 48 * 1024  # data cache of a core
    l2_bytes: int = 2 * 2**20  # of a core
    cores: int = 2  # physical cores of a socket


USUAL = Kernels()


@dataclass(frozen=True)
class Convolution:
    """A convolution, or the one whose gradients are computed. An up-convolution is an input gradient to oneDNN."""

    batch: int
    source: Grid  # voxels of the map that the filter slides over; the up-convolution's is its output
    target: Grid  # voxels of the other map
    in_channels: int
    out_channels: int
    kernel: Grid = (3, 3, 3)  # in two dimensions it has one plane, (1, k, k), as the maps have
    stride: int = 1
    bias: bool = False  # whether the filter gradient gives the bias' too

    @property
    def taps(self) -> int:
        """Voxels of the kernel."""
        return math.prod(self.kernel)

    @property
    def weights(self) -> int:
        """Values of the kernel."""
        return self.taps * self.in_channels * self.out_channels

    @property
    def padding(self) -> Grid:
        """Voxels that are added along an axis, both ends together."""
        return tuple(size - 1 if self.stride == 1 else 0 for size in self.kernel)

    @property
    def blocks(self) -> Tuple[int, int]:
        """Of input and output channels."""
        return up(self.in_channels, VECTOR), up(self.out_channels, VECTOR)


@dataclass(frozen=True)
class Setting:
    """What oneDNN is called with in all of a step."""

    dtype: str = "bfloat16"
    itex: bool = True  # else by stock TensorFlow
    threads: int = 2
    kernels: Kernels = USUAL

    @property
    def value_bytes(self) -> int:
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def emulated(self) -> bool:
        """Whether bfloat16 is computed by AVX-512 without instructions for it."""
        return self.dtype == "bfloat16" and self.kernels.isa in ("avx512_core", "avx512_core_vnni")

    @property
    def amx(self) -> bool:
        """Whether AMX's tiles multiply: of bfloat16 alone."""
        return self.dtype == "bfloat16" and self.kernels.isa == "avx512_core_amx"


def highest_isa(flags: Sequence[str], most: Optional[str] = None) -> str:
    """What oneDNN uses of ISAS on a CPU of these flags; an unknown `most` (ONEDNN_MAX_CPU_ISA) is no limit."""
    allowed = set(flags) & set(ISAS.get((most or "").lower(), flags))
    return [isa for isa, needed in ISAS.items() if allowed.issuperset(needed)][-1]


def up(number: int, block: int) -> int:
    """How many blocks hold a number."""
    return -(-number // block)


def padded(number: int, block: int) -> int:
    """A number of whole blocks."""
    return up(number, block) * block
