"""What the layers of TensorFlow and of ITEX compute in on this host, where native operations do
not."""

import os
from pathlib import Path

from models.native.instruction_sets import INSTRUCTION_SETS
from models.native.library import InstructionSetError


def itex_is_loaded() -> bool:
    """Whether ITEX's library is mapped into this process. It exists for Linux alone, which has
    /proc."""
    maps = Path("/proc/self/maps")
    return maps.is_file() and "libitex_cpu" in maps.read_text(encoding="utf-8", errors="replace")


def is_held_below_avx512() -> bool:
    """Whether oneDNN's own variable keeps it from AVX-512, below which it has no bfloat16."""
    most = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "DEFAULT"
    return not most.upper().startswith(("AVX512_CORE", "AVX10", "DEFAULT", "ALL"))


def layers_have_bfloat16() -> bool:
    """Whether layers can compute in bfloat16 here: oneDNN does from AVX-512 on. Below, TensorFlow
    has slow kernels of its own, and ITEX ends the process."""
    if is_held_below_avx512():
        return False
    if not itex_is_loaded():
        return True
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split()
    return set(INSTRUCTION_SETS["avx512"].needs) <= set(cpu)


def check_layers(dtype: str) -> None:
    """Raise InstructionSetError if layers cannot compute in `dtype` here."""
    if dtype == "bfloat16" and not layers_have_bfloat16():
        rule = "dtype must be float32 where TensorFlow's layers compute on a CPU without AVX-512"
        todo = "install a C compiler and run python -m models.native.build, or train in float32"
        raise InstructionSetError(f"{rule}, got bfloat16; {todo}")
