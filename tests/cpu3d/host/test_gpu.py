"""Cards from what a driver might answer, the choice among them, and what a made-up TensorFlow is
given."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest

from cpu3d.errors import DoesNotFitError, InputError
from cpu3d.host import gpu
from cpu3d.host.gpu import (
    Gpu,
    HostGpus,
    check_card,
    fits_memory,
    parse_gpus,
    pick_device,
    use_device,
    why_no_card,
)
from memory_estimator.job import Job
from memory_estimator.planner import gpu_bytes
from models.config import UNetConfig

MIB = 2**20

TWO = """\
Tesla V100-SXM2-16GB, 16384, 16370, 7.0
NVIDIA A100-SXM4-40GB, 40960, 40000, 8.0
"""

V100 = Gpu(0, "Tesla V100-SXM2-16GB", 16384 * MIB, 16370 * MIB, (7, 0))
A100 = Gpu(1, "NVIDIA A100-SXM4-40GB", 40960 * MIB, 40000 * MIB, (8, 0))


# --- What the driver answers ---


def test_every_line_is_a_card_and_unknown_figures_are_none():
    old = "No devices were found\nQuadro, 2048, [Insufficient Permissions], [N/A]\n"
    assert parse_gpus(old) == (Gpu(0, "Quadro", 2048 * MIB, None, (0, 0)),)
    assert parse_gpus("") == ()


@pytest.mark.parametrize("visible", [None, "1"])
def test_the_driver_is_asked_once_and_only_where_a_card_may_be_taken(
    tmp_path, monkeypatch, visible
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu, "cuda_is_installed", lambda: True)
    assert tuple(HostGpus()) == ()  # no driver
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    asked = tmp_path / "asked"
    script = f"open({str(asked)!r}, 'a').write(' '.join(sys.argv[2:]))\nprint({TWO!r}, end='')"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!{sys.executable}\nimport sys\n{script}\n")
    program.chmod(0o755)
    gpus = HostGpus()
    assert pick_device("cpu", "patch", gpus) == pick_device(None, "whole", gpus) == "cpu"
    assert why_no_card("cpu", "patch", gpus) == why_no_card(None, "whole", gpus) == []
    assert not asked.exists()
    assert pick_device(None, "patch", gpus) == "gpu:1"
    assert tuple(gpus) == (V100, A100)
    assert asked.read_text() == "--format=csv,noheader,nounits" + " --id=1" * bool(visible)


# --- The choice ---


@pytest.mark.parametrize(
    ("asked", "cuda", "device", "is_explained"),
    [(None, False, "cpu", True), (None, True, "gpu:1", False), ("gpu:0", False, "gpu:0", False)],
)
def test_a_card_is_taken_for_patches_where_there_is_one(
    asked, cuda, device, is_explained, monkeypatch
):
    monkeypatch.setattr(gpu, "cuda_is_installed", lambda: cuda)
    assert pick_device(asked, "patch", (V100, A100)) == device
    assert len(why_no_card(asked, "patch", (V100, A100))) == is_explained


@pytest.mark.parametrize(
    ("asked", "gpus", "message"),
    [
        ("gpu:0", (), "device must be a GPU .* none, got gpu:0.*--device cpu"),
        ("gpu:2", (V100,), "device must be .*, got gpu:2.*--device gpu:0"),
        ("cuda", (V100,), "device must be cpu.*, got 'cuda'"),
    ],
)
def test_a_device_that_is_not_there_is_an_error(asked, gpus, message):
    with pytest.raises(InputError, match=message):
        pick_device(asked, "patch", gpus)


def test_a_step_must_fit_into_the_free_memory_of_a_card():
    job = Job(UNetConfig(depth=2, filters=8), (32, 32, 32), engine="stock")
    needed = gpu_bytes(job)
    check_card(dataclasses.replace(A100, free_bytes=needed), job, "")
    with pytest.raises(DoesNotFitError, match=r"gpu:1 must hold a step of .*; do this$"):
        check_card(dataclasses.replace(A100, free_bytes=needed - 1), job, "do this")


# --- What TensorFlow is given ---


class FakeTensorFlow:
    """Its devices can be chosen until it computes, as in TensorFlow."""

    __version__ = "9.9.9"
    is_built_with_cuda = bool

    def __init__(self):
        self.visible = ["a", "b"]
        self.growing = []
        self.computes = False
        self.config = self.experimental = self.test = self

    def list_physical_devices(self, kind):
        return ["a", "b"]

    def get_visible_devices(self, kind):
        return self.visible

    def set_visible_devices(self, cards, kind):
        if self.computes and cards != self.visible:
            raise RuntimeError("Visible devices cannot be modified after being initialized")
        self.visible = list(cards)

    def set_memory_growth(self, card, on):
        self.growing += [card] * on


@pytest.mark.parametrize(("device", "visible"), [("cpu", []), ("gpu:0", ["a"]), ("gpu:1", ["b"])])
def test_tensorflow_gets_one_card_whose_memory_grows_or_none(device, visible):
    tf = FakeTensorFlow()
    use_device(tf, device)
    assert (tf.visible, tf.growing) == (visible, visible)
    tf.computes = True
    use_device(tf, device)  # as two commands in one process do
    other = "gpu:0" if device == "cpu" else "cpu"
    with pytest.raises(RuntimeError, match=f"device {other} must be chosen before"):
        use_device(tf, other)
    with pytest.raises(InputError, match="a GPU that TensorFlow sees, got gpu:7"):
        use_device(FakeTensorFlow(), "gpu:7")


# --- Memory that runs out ---


def test_memory_that_runs_out_is_an_error_with_what_to_do_and_other_errors_stay(monkeypatch):
    class OutOfMemoryError(Exception):
        message = "OOM when allocating tensor with shape[1,16] on GPU:0\nand much more"

    errors = SimpleNamespace(ResourceExhaustedError=OutOfMemoryError)
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(errors=errors))
    message = r"must hold a step, got .*shape\[1,16\] on GPU:0\W+do this$"
    with pytest.raises(DoesNotFitError, match=message), fits_memory("a step", "do this"):
        raise OutOfMemoryError
    with pytest.raises(ValueError, match="another"), fits_memory("a step", ""):
        raise ValueError("another")
