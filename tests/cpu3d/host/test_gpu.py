"""Cards from what a driver might answer, the choice among them, and what a made-up TensorFlow is
given."""

import sys
from types import SimpleNamespace

import pytest

from cpu3d.errors import DoesNotFitError, InputError
from cpu3d.host import gpu
from cpu3d.host.gpu import (
    Gpu,
    HostGpus,
    fits_memory,
    parse_gpus,
    pick_device,
    use_device,
    why_no_card,
)

MIB = 2**20

TWO = """\
0, Tesla V100-SXM2-16GB, 16384, 16370, 7.0, GPU-aaaa1111, [N/A]
1, NVIDIA A100-SXM4-40GB, 40960, 40000, 8.0, GPU-bbbb2222, Disabled
"""

V100 = Gpu(0, "Tesla V100-SXM2-16GB", 16384 * MIB, 16370 * MIB, (7, 0))
A100 = Gpu(1, "NVIDIA A100-SXM4-40GB", 40960 * MIB, 40000 * MIB, (8, 0))


# --- What the driver answers ---


def test_every_line_is_a_card_and_unknown_figures_are_none():
    assert parse_gpus(TWO) == (V100, A100)
    assert [gpu.device for gpu in parse_gpus(TWO)] == ["gpu:0", "gpu:1"]
    old = "0, Quadro, 2048, [Insufficient Permissions], [N/A], GPU-dddd, [N/A]\n"
    split = "0, NVIDIA A100-SXM4-40GB, 40960, 40000, 8.0, GPU-bbbb2222, Enabled\n"
    assert parse_gpus(old) == (Gpu(0, "Quadro", 2048 * MIB, None, (0, 0)),)
    assert parse_gpus(split) == (Gpu(0, "NVIDIA A100-SXM4-40GB", None, None, (8, 0)),)


@pytest.mark.parametrize(
    "text",
    ["", "No devices were found\n", "\n0, A100\n"],
)
def test_an_answer_without_cards_has_none(text):
    assert parse_gpus(text) == ()


@pytest.mark.parametrize(
    ("visible", "names"),
    [(None, "VA"), ("1", "A"), ("GPU-bbbb", "A"), ("GPU-", ""), ("", ""), ("1,7,0", "A")],
)
def test_cards_are_counted_as_cuda_does(visible, names):
    gpus = parse_gpus(TWO, visible)
    assert "".join({V100.name: "V", A100.name: "A"}[gpu.name] for gpu in gpus) == names
    assert [gpu.index for gpu in gpus] == list(range(len(gpus)))


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Put a program in the place of nvidia-smi."""

    def put(script):
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!{sys.executable}\nimport sys, time\n{script}\n")
        path.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu, "cuda_is_installed", lambda: True)
    return put


def test_the_driver_is_asked_once_and_only_where_a_card_may_be_taken(driver, tmp_path):
    assert tuple(HostGpus()) == ()  # no driver
    asked = tmp_path / "asked"
    query = "--query-gpu=index,name,memory.total,memory.free,compute_cap,uuid,mig.mode.current"
    driver(
        f"assert sys.argv[1:] == [{query!r}, '--format=csv,noheader,nounits']\n"
        f"open({str(asked)!r}, 'a').write('x')\nprint({TWO!r}, end='')"
    )
    gpus = HostGpus()
    assert pick_device("cpu", "patch", gpus) == pick_device(None, "whole", gpus) == "cpu"
    assert why_no_card("cpu", "patch", gpus) == why_no_card(None, "whole", gpus) == []
    assert not asked.exists()
    assert pick_device(None, "patch", gpus) == "gpu:1"
    assert pick_device("gpu:0", "whole", gpus) == "gpu:0"
    assert tuple(gpus) == (V100, A100)
    assert asked.read_text() == "x"


# --- The choice ---


@pytest.mark.parametrize(
    ("asked", "mode", "gpus", "cuda", "device", "is_explained"),
    [
        (None, "whole", (V100, A100), False, "cpu", False),
        (None, "patch", (V100, A100), False, "cpu", True),
        (None, "patch", (V100, A100), True, "gpu:1", False),
        ("gpu:0", "patch", (V100, A100), False, "gpu:0", False),
        ("gpu:0", "whole", (V100,), True, "gpu:0", False),
    ],
)
def test_a_card_is_taken_for_patches_where_there_is_one(
    asked, mode, gpus, cuda, device, is_explained, monkeypatch
):
    monkeypatch.setattr(gpu, "cuda_is_installed", lambda: cuda)
    assert pick_device(asked, mode, gpus) == device
    lines = why_no_card(asked, mode, gpus)
    assert len(lines) == is_explained
    assert all(
        "gpu:0 (Tesla V100-SXM2-16GB) is not used" in line and "setup --gpu" in line
        for line in lines
    )


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


# --- What TensorFlow is given ---


class FakeTensorFlow:
    """Its devices can be chosen until it computes, as in TensorFlow."""

    __version__ = "9.9.9"
    is_built_with_cuda = bool

    def __init__(self, cards=()):
        self.cards = list(cards)
        self.visible = list(cards)
        self.growing = set()
        self.computes = False
        self.config = self.experimental = self.test = self

    def list_physical_devices(self, kind):
        assert kind == "GPU"
        return self.cards

    def get_visible_devices(self, kind):
        return self.visible

    def set_visible_devices(self, cards, kind):
        if self.computes and cards != self.visible:
            raise RuntimeError("Visible devices cannot be modified after being initialized")
        self.visible = list(cards)

    def set_memory_growth(self, card, on):
        self.growing.add(card)


@pytest.mark.parametrize(
    ("device", "visible", "growing"),
    [("cpu", [], set()), ("gpu:0", ["a"], {"a"}), ("gpu:1", ["b"], {"b"})],
)
def test_tensorflow_gets_one_card_whose_memory_grows_or_none(device, visible, growing):
    tf = FakeTensorFlow("ab")
    use_device(tf, device)
    tf.computes = True
    use_device(tf, device)  # as two commands in one process do
    assert (tf.visible, tf.growing) == (visible, growing)
    other = "gpu:0" if device == "cpu" else "cpu"
    with pytest.raises(
        RuntimeError, match=f"device {other} must be chosen before TensorFlow computes"
    ):
        use_device(tf, other)
    with pytest.raises(InputError, match="a GPU that TensorFlow sees, got gpu:7"):
        use_device(FakeTensorFlow("ab"), "gpu:7")


# --- Memory that runs out ---


def test_memory_that_runs_out_is_an_error_with_what_to_do_and_other_errors_stay(monkeypatch):
    class OutOfMemoryError(Exception):
        message = "OOM when allocating tensor with shape[1,16,240,240,160] on GPU:0\nand much more"

    errors = SimpleNamespace(ResourceExhaustedError=OutOfMemoryError)
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(errors=errors))
    got = r"shape\[1,16,240,240,160\] on GPU:0"
    message = rf"^memory must hold a training step, got .*{got}\W+choose a smaller --patch$"
    with (
        pytest.raises(DoesNotFitError, match=message),
        fits_memory("a training step", "choose a smaller --patch"),
    ):
        raise OutOfMemoryError
    with pytest.raises(ValueError, match="another"), fits_memory("a training step", ""):
        raise ValueError("another")
