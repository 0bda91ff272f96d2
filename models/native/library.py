"""Which instruction set do native operations compute with here? The library answers by itself,
without TensorFlow.

    native = native_operations()
    native.bfloat16, native.float32  # such as "amx", "avx512"; "": TensorFlow's layers compute
    native.why  # why there are none

Plans, estimates, `doctor` and `calibrate` all ask here, so that what is predicted is what is
computed.
"""

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional

from models.native import build
from models.native.instruction_sets import INSTRUCTION_SETS


class InstructionSetError(ValueError):
    """CPU3D_INSTRUCTION_SET is no instruction set, or none of this CPU; or a dtype that nothing
    computes in here."""


VARIABLE = "CPU3D_INSTRUCTION_SET"
FLOAT32 = 0  # as in native.h
BFLOAT16 = 1
DTYPE_CODES = {"float32": FLOAT32, "bfloat16": BFLOAT16}


@dataclass(frozen=True)
class NativeOperations:
    """What native operations compute with, by the dtype of the maps."""

    float32: str = ""  # a name of INSTRUCTION_SETS; "" for none
    bfloat16: str = ""
    why: str = ""  # there are none
    kernels: Optional[Path] = None  # the libraries that answered, as `build.Libraries` has them
    tf_ops: Optional[Path] = None

    def of(self, dtype: str) -> str:
        """The instruction set for maps of a dtype, "" for none."""
        return {"float32": self.float32, "bfloat16": self.bfloat16}[dtype]


def native_operations() -> NativeOperations:
    """The answer of the library that is built of these sources.

    Raises InstructionSetError for a CPU3D_INSTRUCTION_SET that cannot be had here."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen and chosen not in INSTRUCTION_SETS:
        names = ", ".join(INSTRUCTION_SETS)
        rule = f"{VARIABLE} must be one of {names}, got {chosen!r}"
        raise InstructionSetError(f"{rule}; choose one, or unset it")
    if _refused_by_tensorflow:
        return NativeOperations(why=_refused_by_tensorflow[0])
    return _asked(chosen, build.BUILT)


def does_not_load(why: str) -> None:
    """From now on there are no native operations in this process: TensorFlow has refused the
    library."""
    _refused_by_tensorflow.append(why)


_refused_by_tensorflow: List[str] = []


@functools.cache
def _asked(chosen: str, folder: Path) -> NativeOperations:
    todo = "run python -m models.native.build"
    pair = build.existing(folder)
    if pair is None:
        return NativeOperations(why=f"none are built of these sources; {todo}")
    try:
        library = ctypes.CDLL(str(pair.kernels))
    except OSError as error:
        return NativeOperations(why=f"{error}; {todo}")
    library.native_instruction_set.restype = ctypes.c_char_p
    library.native_lacks.restype = ctypes.c_char_p
    name = chosen.encode() or None
    float32 = library.native_instruction_set(name, FLOAT32)
    bfloat16 = library.native_instruction_set(name, BFLOAT16)
    if float32 and bfloat16:
        return NativeOperations(float32.decode(), bfloat16.decode(), "", pair.kernels, pair.tf_ops)
    lacking = library.native_lacks((chosen or "avx2").encode()).decode()
    if not chosen:
        return NativeOperations(why=f"the CPU lacks {lacking}")
    if lacking:
        rule = f"{VARIABLE} must be an instruction set of this CPU, got {chosen}"
        rule += f", for which it lacks {lacking}"
    else:
        rule = f"{VARIABLE} must be one that the library was built with, got {chosen}; it has "
        rule += ", ".join(pair.instruction_sets)
    raise InstructionSetError(f"{rule}; choose another, or unset it")
