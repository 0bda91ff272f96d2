"""The NVIDIA cards of this host: what there is, which one a run takes, and the call that gives TensorFlow only that.

gpus = HostGpus()                               # asks the driver's nvidia-smi once it is looked at, no TensorFlow
device = pick_device("auto", "patch", gpus)     # "gpu:0", or "cpu"
use_device(tf, device)                          # after TensorFlow is imported, before it computes: set_up does it
"""

import contextlib
import dataclasses
import importlib.metadata
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Iterator, List, Optional, Sequence, Tuple

from cpu3d.errors import DoesNotFitError, InputError

AUTO, CPU = "auto", "cpu"

QUERY = ("index", "name", "memory.total", "memory.free", "compute_cap", "uuid", "mig.mode.current")
"""What nvidia-smi is asked for, in this order."""

TIMEOUT_S = 60.0
"""A driver that hangs is no driver. One without its daemon takes 1 to 3 seconds for each card to wake up, one after the
other, and hosts have up to 16."""

BFLOAT16_SINCE = (8, 0)
"""Compute capability of Ampere, the first with bfloat16 in its matrix units."""

SPLIT = " (MIG)"
"""What a split card's name ends in."""

CUDA_PACKAGE = "nvidia-cudnn-cu12"
"""What requirements-gpu.txt brings and the other requirements do not."""


LONGEST_REASON = 160
"""Characters of TensorFlow's own words on memory; names of operations follow, and their inputs."""


@dataclass(frozen=True)
class Gpu:
    """A card that this process may use."""

    index: int
    """As TensorFlow counts: by the slot it is in, among those that CUDA_VISIBLE_DEVICES leaves."""
    name: str
    memory_bytes: Optional[int]
    """All of it; None where the driver does not tell, or where MIG splits it and an instance has a part."""
    free_bytes: Optional[int]
    """Of it, what nobody has taken; None as for `memory_bytes`."""
    compute_capability: Tuple[int, int]
    """Of its instructions, (major, minor); (0, 0) where the driver does not tell."""

    @property
    def device(self) -> str:
        """Such as "gpu:0"."""
        return f"gpu:{self.index}"


class HostGpus(Sequence[Gpu]):
    """The cards of this host that CUDA_VISIBLE_DEVICES leaves; empty where there is none, or no driver that answers.

    The driver is asked when somebody first looks, and only once: a run on the CPU does not wait for it.
    """

    def __init__(self) -> None:
        self._found: Optional[Tuple[Gpu, ...]] = None
        self._is_silent = False

    def __getitem__(self, index: Any) -> Any:
        return self._asked()[index]

    def __len__(self) -> int:
        return len(self._asked())

    @property
    def is_silent(self) -> bool:
        """Whether there is a driver that has not answered in time: then nobody knows what cards there are."""
        self._asked()
        return self._is_silent

    def _asked(self) -> Tuple[Gpu, ...]:
        if self._found is None:
            self._found = ()
            try:
                self._found = parse_gpus(_answer(), os.environ.get("CUDA_VISIBLE_DEVICES"))
            except subprocess.TimeoutExpired:
                self._is_silent = True
            except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
                pass  # no driver, or one that fails
        return self._found


def parse_gpus(text: str, visible: Optional[str] = None) -> Tuple[Gpu, ...]:
    """The cards in what nvidia-smi answers to QUERY; `visible` is CUDA_VISIBLE_DEVICES, None where it is not set.

    Figures that the driver has none for, "[N/A]" and the like, become None; a line that is no card is left out.
    CUDA takes the named cards in the named order, by number or by the beginning of an id, up to the first that is not
    there; so does this. An instance of a card that MIG splits has an id of its own, "MIG-...", which this answer does
    not have: it is taken for there where some card is split, with memory that is not known.
    """
    found: List[Tuple[str, str, Gpu]] = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(QUERY) or not values[0].isdigit():
            continue
        number, name, total, free, capability, uuid, mig = values
        split = mig == "Enabled"
        gpu = Gpu(
            index=len(found),
            name=f"{name}{SPLIT}" if split else name,
            memory_bytes=None if split else _mebibytes(total),
            free_bytes=None if split else _mebibytes(free),
            compute_capability=_capability(capability),
        )
        found.append((number, uuid, gpu))
    if visible is None:
        return tuple(gpu for _, _, gpu in found)
    taken: List[Gpu] = []
    for word in map(str.strip, visible.split(",")):
        if word.startswith("MIG-"):
            # Of several split cards it may be any: the oldest promises the least.
            split = [gpu for _, _, gpu in found if gpu.name.endswith(SPLIT)]
            matching = sorted(split, key=lambda gpu: gpu.compute_capability)[:1]
        else:
            matching = [gpu for number, uuid, gpu in found if word == number or (word and uuid.startswith(word))]
        if len(matching) != 1:
            break
        taken.append(dataclasses.replace(matching[0], index=len(taken)))
    return tuple(taken)


def best_dtype(gpu: Gpu) -> str:
    """The compute dtype that training is fastest in on a card: "bfloat16" from Ampere on, else "float32".

    Never float16, which older cards are fast in: its gradients underflow without loss scaling, which this trainer does
    not do.
    """
    return "bfloat16" if gpu.compute_capability >= BFLOAT16_SINCE else "float32"


def pick_device(asked: str, mode: str, gpus: Sequence[Gpu]) -> str:
    """The device of a run: "cpu", or a card such as "gpu:0". `asked` may be "auto" too.

    "auto" is a card for mode "patch" alone, since whole volumes are what this trainer has a CPU for: of several the one
    with most free memory, and only where a TensorFlow for cards is installed. Raises InputError for a card that is not
    there.
    """
    if asked == AUTO:
        if mode != "patch" or not gpus or not cuda_is_installed():
            return CPU
        return max(gpus, key=lambda gpu: (gpu.free_bytes or 0, -gpu.index)).device
    if asked != CPU:
        card_of(asked, gpus)
    return asked


def card_of(device: str, gpus: Sequence[Gpu]) -> Gpu:
    """The card that "gpu:0" and so on names. Raises InputError for one that is not there, and for what is no card."""
    if not re.fullmatch(r"gpu:\d+", device):
        raise InputError(f"device must be auto, cpu, or a card such as gpu:0, got {device!r}; choose one of them")
    for gpu in gpus:
        if gpu.device == device:
            return gpu
    if _is_silent(gpus):
        raise InputError(
            f"device must be a GPU of this host, got {device} with a driver that has not answered within "
            f"{TIMEOUT_S:g} s; see what `nvidia-smi` says, or use --device {CPU}"
        )
    found = ", ".join(f"{gpu.device} ({gpu.name})" for gpu in gpus) or "none"
    way_out = "" if gpus else ", or a host with an NVIDIA GPU and its driver"
    raise InputError(
        f"device must be a GPU of this host, got {device} with {found} found; use --device "
        f"{gpus[0].device if gpus else CPU}{way_out}"
    )


def why_no_card(asked: str, mode: str, gpus: Sequence[Gpu]) -> List[str]:
    """A line to print where `pick_device` has chosen the CPU although "auto" might have had a card; else nothing."""
    if asked != AUTO or mode != "patch":
        return []
    if gpus and not cuda_is_installed():
        first = gpus[0]
        return [
            f"{first.device} ({first.name}) is not used: this TensorFlow is without CUDA; `./run.sh setup --gpu`, or "
            f"--device {first.device} where CUDA is there in another way"
        ]
    if _is_silent(gpus):
        return [f"the NVIDIA driver has not answered within {TIMEOUT_S:g} s: no GPU is used"]
    return []


def cuda_is_installed() -> bool:
    """Whether requirements-gpu.txt was installed here. Imports nothing.

    A TensorFlow with a CUDA from elsewhere is not noticed: there a card has to be asked for.
    """
    try:
        importlib.metadata.version(CUDA_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def use_device(tf: Any, device: str) -> None:
    """Leave TensorFlow the one card that `device` names, its memory taken as it is needed, or with "cpu" none.

    `host.apply.set_up` calls it for every command. To be called after TensorFlow is imported and before it computes;
    again with the same device it changes nothing. Raises InputError where TensorFlow sees no such card, and
    RuntimeError where the process computes on another device.
    """
    cards = tf.config.list_physical_devices("GPU")
    number = None if device == CPU else int(device.partition(":")[2])
    if number is not None and number >= len(cards):
        raise InputError(_unseen(tf, device, len(cards)))
    wanted = [] if number is None else [cards[number]]
    if not cards:
        return
    try:
        tf.config.set_visible_devices(wanted, "GPU")
        for card in wanted:
            tf.config.experimental.set_memory_growth(card, True)
    except RuntimeError:  # the devices are in use already; that may be as they should
        if tf.config.get_visible_devices("GPU") != wanted:
            raise RuntimeError(
                f"device {device} must be chosen before TensorFlow computes; use a new process"
            ) from None


def memory_device(device: str) -> str:
    """The name by which TensorFlow's allocator statistics know a device: only one card is ever visible."""
    return "CPU:0" if device == CPU else "GPU:0"


@contextlib.contextmanager
def fits_memory(what: str, advice: str) -> Iterator[None]:
    """Compute in here: where TensorFlow finds no memory, DoesNotFitError says so with `advice`.

    `what` is what asked for it, such as "a training step". TensorFlow tells of a card, and of a host whose limit makes
    a request fail; a process that the kernel kills says nothing.
    """
    try:
        yield
    except Exception as error:
        tf = sys.modules.get("tensorflow")
        if tf is None or not isinstance(error, tf.errors.ResourceExhaustedError):
            raise
        told = (str(error.message).strip().splitlines() or ["nothing more"])[0][:LONGEST_REASON]
        raise DoesNotFitError(f"memory must hold {what}, got out of memory ({told}); {advice}") from None


# --- Private helpers ---


def _answer() -> str:
    """Of the driver. Raises OSError, SubprocessError or UnicodeDecodeError where there is none to be had."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout


def _is_silent(gpus: Sequence[Gpu]) -> bool:
    return isinstance(gpus, HostGpus) and gpus.is_silent


def _mebibytes(text: str) -> Optional[int]:
    """nvidia-smi counts in MiB."""
    return int(text) * 2**20 if text.isdigit() else None


def _capability(text: str) -> Tuple[int, int]:
    found = re.fullmatch(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _unseen(tf: Any, device: str, count: int) -> str:
    """Why TensorFlow does not see a card, and what to do."""
    if count:
        return (
            f"device must be a GPU that TensorFlow sees, got {device} with {count} seen; use --device gpu:{count - 1}, "
            "or unset CUDA_VISIBLE_DEVICES"
        )
    why = (
        "which found no CUDA libraries or no driver" if tf.test.is_built_with_cuda() else "which is built without CUDA"
    )
    return (
        f"device must be a GPU that TensorFlow sees, got {device} with TensorFlow {tf.__version__}, {why}; run "
        "`./run.sh setup --gpu`, or use --device cpu"
    )
