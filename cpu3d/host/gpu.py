"""The NVIDIA cards of this host, which one a run takes, and whether it holds the run; gives
TensorFlow only that one.

gpus = HostGpus()                               # asks nvidia-smi once it is read, no TensorFlow
device = pick_device(None, "patch", gpus)       # "gpu:0", or "cpu"
use_device(tf, device)                          # after TensorFlow is imported: set_up does it
"""

import contextlib
import functools
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Iterator, List, Optional, Sequence, Tuple

from cpu3d.errors import DoesNotFitError, InputError
from memory_estimator import planner
from memory_estimator.common.units import format_bytes
from memory_estimator.installed import how_to_install, versions_of
from memory_estimator.job import Job
from models.strides import Shape3

CPU = "cpu"

QUERY = ("name", "memory.total", "memory.free", "compute_cap")  # of nvidia-smi
# for its answer: without its daemon each of up to 16 cards takes 1 to 3 seconds to wake up
TIMEOUT_S = 60.0
CUDA_PACKAGE = "nvidia-cudnn-cu12"  # of requirements-gpu.txt, and of no other requirements


@dataclass(frozen=True)
class Gpu:
    """A card that this process may use."""

    index: int  # as TensorFlow counts: by the slot it is in, among those of CUDA_VISIBLE_DEVICES
    name: str
    memory_bytes: int
    free_bytes: int
    compute_capability: Tuple[int, int]  # of its instructions, (major, minor)

    @property
    def device(self) -> str:
        return f"gpu:{self.index}"


class HostGpus(Sequence[Gpu]):
    """The cards of this host that CUDA_VISIBLE_DEVICES leaves; empty if there is none, or no driver
    that answers.

    The driver is asked at the first use, and only once: a run on the CPU does not wait for it.
    """

    def __getitem__(self, index: Any) -> Any:
        return self._cards[index]

    def __len__(self) -> int:
        return len(self._cards)

    @functools.cached_property
    def _cards(self) -> Tuple[Gpu, ...]:
        command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            command.append(f"--id={visible}")
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
            )
        except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
            return ()
        return parse_gpus(done.stdout)


def parse_gpus(text: str) -> Tuple[Gpu, ...]:
    """The cards in the answer of nvidia-smi to QUERY. One whose driver has no figure, but "[N/A]"
    and the like, is left out."""
    cards: List[Gpu] = []
    for index, line in enumerate(text.splitlines()):
        match = re.fullmatch(r"(.+), (\d+), (\d+), (\d+)\.(\d+)", line)
        if match:
            total_mib, free_mib, major, minor = map(int, match.groups()[1:])
            cards.append(Gpu(index, match[1], total_mib * 2**20, free_mib * 2**20, (major, minor)))
    return tuple(cards)


def best_dtype(gpu: Gpu) -> str:
    """The compute dtype that training is fastest in on a card: "bfloat16" from Ampere (8.0) on,
    else "float32".

    Never float16: its gradients underflow without loss scaling, which this trainer does not do.
    """
    return "bfloat16" if gpu.compute_capability >= (8, 0) else "float32"


def pick_device(requested: Optional[str], mode: str, gpus: Sequence[Gpu]) -> str:
    """The device of a run: "cpu", or a card such as "gpu:0".

    If `requested` is None, patches get the card with most free memory if a TensorFlow for cards is
    installed, and whole volumes the CPU. Raises InputError for a card that is not there."""
    if requested is not None:
        return requested if requested == CPU else card_of(requested, gpus).device
    if mode != "patch" or not gpus or not cuda_is_installed():
        return CPU
    return max(gpus, key=lambda gpu: (gpu.free_bytes, -gpu.index)).device


def why_no_card(requested: Optional[str], mode: str, gpus: Sequence[Gpu]) -> List[str]:
    """A line to print if `pick_device` has chosen the CPU although there is a card; else
    nothing."""
    if requested is not None or mode != "patch" or not gpus or cuda_is_installed():
        return []
    device = gpus[0].device
    why = "this TensorFlow has no CUDA"
    give = f"give --device {device} if CUDA is installed in another way"
    return [f"{device} ({gpus[0].name}) is not used: {why}; {how_to_install('gpu')}, or {give}"]


def card_of(device: str, gpus: Sequence[Gpu]) -> Gpu:
    """The card that "gpu:0" and so on names. Raises InputError for a card that is not there, and
    for a name of none."""
    if not re.fullmatch(r"gpu:\d+", device):
        raise InputError(
            f"--device must be cpu, or a card such as gpu:0, got {device!r}; choose one of them"
        )
    for gpu in gpus:
        if gpu.device == device:
            return gpu
    here = ", ".join(f"{gpu.device} ({gpu.name})" for gpu in gpus) or "none"
    use = gpus[0].device if gpus else CPU
    rule = f"--device must be a GPU of this host, here {here}"
    raise InputError(f"{rule}, got {device}; use --device {use}, or see `nvidia-smi`")


def largest_patch(card: Gpu, job: Job) -> Shape3:
    """The largest patch of the job's grid that a card trains in its free memory. Raises
    DoesNotFitError if there is none."""
    try:
        return planner.patch_for(job, card.free_bytes, f"{card.device}, of which that is free,")
    except ValueError as error:
        raise DoesNotFitError(str(error)) from None


def check_card(card: Gpu, job: Job, todo: str) -> None:
    """Raise DoesNotFitError, with what to do, if a card has less memory free than a step of the job
    takes."""
    needed = planner.gpu_bytes(job)
    if needed > card.free_bytes:
        free = f"{format_bytes(card.free_bytes)} free of {format_bytes(card.memory_bytes)}"
        raise DoesNotFitError(
            f"{card.device} must hold a step of {format_bytes(needed)}, got {free}; {todo}"
        )


def cuda_is_installed() -> bool:
    """Whether requirements-gpu.txt was installed here; a CUDA from elsewhere is not noticed.
    Imports nothing."""
    return bool(versions_of([CUDA_PACKAGE]))


def use_device(tf: Any, device: str) -> None:
    """Leave TensorFlow the one card that `device` names, its memory taken as it is needed, or with
    "cpu" none.

    To be called after TensorFlow is imported and before it computes; again with the same device it
    changes nothing. Raises InputError if TensorFlow sees no such card; TensorFlow itself raises
    RuntimeError if the process computes on another device."""
    cards = tf.config.list_physical_devices("GPU")
    wanted = [] if device == CPU else cards[int(device.partition(":")[2]) :][:1]
    if device != CPU and not wanted:
        rule = f"--device must be one of the {len(cards)} GPUs that TensorFlow sees"
        todo = f"{how_to_install('gpu')}, name another, or use --device {CPU}"
        raise InputError(f"{rule}, got {device}; {todo}")
    if cards:
        tf.config.set_visible_devices(wanted, "GPU")
    for card in wanted:
        tf.config.experimental.set_memory_growth(card, True)


@contextlib.contextmanager
def fits_memory(work: str, advice: str) -> Iterator[None]:
    """Compute `work`, such as "a training step", in here: DoesNotFitError with `advice` if memory
    runs out.

    TensorFlow reports it of a card, and of a host whose limit makes a request fail; a process that
    the kernel kills leaves no message."""
    try:
        yield
    except Exception as error:
        tf = sys.modules.get("tensorflow")
        if tf is None or not isinstance(error, tf.errors.ResourceExhaustedError):
            raise
        # After its first line come the names of operations and their inputs.
        message, *_ = str(error.message).strip().splitlines() or ["nothing more"]
        raise DoesNotFitError(
            f"memory must hold {work}, got out of memory ({message[:160]}); {advice}"
        ) from None
