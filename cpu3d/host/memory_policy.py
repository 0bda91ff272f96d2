"""From which NUMA nodes the kernel takes this process's memory: asked and set by system call, without libnuma.

The policy is of the calling thread and of threads and processes that it starts from then on.
"""

import ctypes
import errno
import os
import platform
import sys
from typing import Dict, NamedTuple, Optional, Sequence, Tuple

MODES = ("default", "preferred", "bound", "interleaved", "local", "preferred", "interleaved")
"""By the kernel's number (linux/mempolicy.h): MPOL_DEFAULT, PREFERRED, BIND, INTERLEAVE, LOCAL, PREFERRED_MANY and
WEIGHTED_INTERLEAVE."""

_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
"""System call numbers of set_mempolicy and get_mempolicy by machine."""

_MOST_NODES = 1024
"""As many as the kernel can be built for."""

_MODE_FLAGS = 0b111 << 13
"""Bits beside the mode: MPOL_F_STATIC_NODES and its like."""

_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)
_Mask = ctypes.c_ulong * (_MOST_NODES // _WORD)


class MemoryPolicy(NamedTuple):
    """What is in force."""

    mode: str
    """One of MODES."""
    nodes: Tuple[int, ...] = ()


def memory_policy() -> Optional[MemoryPolicy]:
    """That of the calling thread; None where the kernel does not tell, as in some containers and outside Linux."""
    number, mask = ctypes.c_int(), _Mask()
    if _call(1, ctypes.byref(number), mask, ctypes.c_ulong(_MOST_NODES), None, ctypes.c_ulong(0)):
        return None
    mode = number.value & ~_MODE_FLAGS
    nodes = tuple(node for node in range(_MOST_NODES) if mask[node // _WORD] >> node % _WORD & 1)
    return MemoryPolicy(MODES[mode] if mode < len(MODES) else f"number {mode}", nodes)


def set_memory_policy(mode: str, nodes: Sequence[int] = ()) -> str:
    """Set that of the calling thread; "" when done, else why not, such as "Operation not permitted".

    `mode` is "default", "preferred" (one node, others when it is full) or "interleaved" (page by page in turns).
    """
    mask = _Mask()
    for node in nodes:
        mask[node // _WORD] |= 1 << node % _WORD
    # The kernel looks at one bit less than it is told.
    error = _call(0, ctypes.c_int(MODES.index(mode)), mask if nodes else None, ctypes.c_ulong(_MOST_NODES + 1))
    return os.strerror(error) if error else ""


# --- Private helpers ---


def _call(which: int, *arguments) -> int:
    """The error number of a system call, 0 for none."""
    numbers: Dict[str, Tuple[int, int]] = _CALLS if sys.platform == "linux" else {}
    if platform.machine() not in numbers:
        return errno.ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    number = ctypes.c_long(numbers[platform.machine()][which])
    return ctypes.get_errno() if libc.syscall(number, *arguments) else 0
