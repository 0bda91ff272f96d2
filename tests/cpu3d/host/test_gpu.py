"""Cards from what a driver might answer, the choice among them, and what a made-up TensorFlow is told."""

import importlib.metadata
import stat
import sys

import pytest

from cpu3d.errors import InputError
from cpu3d.host import gpu
from cpu3d.host.apply import set_up
from cpu3d.host.gpu import (
    Gpu,
    best_dtype,
    card_of,
    memory_device,
    parse_gpus,
    pick_device,
    read_gpus,
    use_device,
)

MIB = 2**20

TWO = """\
0, Tesla V100-SXM2-16GB, 16384, 16370, 7.0, GPU-aaaa1111, [N/A]
1, NVIDIA A100-SXM4-40GB, 40960, 40000, 8.0, GPU-bbbb2222, Disabled
"""

V100 = Gpu(0, "Tesla V100-SXM2-16GB", 16384 * MIB, 16370 * MIB, (7, 0))
A100 = Gpu(1, "NVIDIA A100-SXM4-40GB", 40960 * MIB, 40000 * MIB, (8, 0))


# --- What the driver answers ---


def test_every_line_is_a_card():
    assert parse_gpus(TWO) == (V100, A100)
    assert [one.device for one in parse_gpus(TWO)] == ["gpu:0", "gpu:1"]


def test_figures_that_the_driver_has_none_for_are_not_known():
    unified = "0, NVIDIA GB10, [N/A], [N/A], 12.1, GPU-cccc, [N/A]\n"
    old = "0, Quadro, 2048, [Insufficient Permissions], [N/A], GPU-dddd, [N/A]\n"
    assert parse_gpus(unified) == (Gpu(0, "NVIDIA GB10", None, None, (12, 1)),)
    assert parse_gpus(old) == (Gpu(0, "Quadro", 2048 * MIB, None, (0, 0)),)


def test_a_card_that_mig_splits_has_no_memory_of_its_own():
    split = "0, NVIDIA A100-SXM4-40GB, 40960, 40000, 8.0, GPU-bbbb2222, Enabled\n"
    assert parse_gpus(split) == (Gpu(0, "NVIDIA A100-SXM4-40GB (MIG)", None, None, (8, 0)),)


@pytest.mark.parametrize(
    "text", ["", "No devices were found\n", 'Field "compute_cap" is not a valid field to query.\n', "\n\n", "0, A100\n"]
)
def test_what_is_no_card_is_left_out(text):
    assert parse_gpus(text) == ()


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, "VA"),
        ("0,1", "VA"),
        ("1", "A"),
        (" 1 , 0 ", "AV"),
        ("GPU-bbbb", "A"),
        ("GPU-", ""),  # of both
        ("", ""),
        ("-1", ""),
        ("NoDevFiles", ""),
        ("1,7,0", "A"),
        ("MIG-1234", ""),
    ],
)
def test_cards_are_counted_as_cuda_does(visible, names):
    found = parse_gpus(TWO, visible)
    assert "".join({V100.name: "V", A100.name: "A"}[one.name] for one in found) == names
    assert [one.index for one in found] == list(range(len(found)))


# --- The driver's program ---


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Put a program in the place of nvidia-smi."""

    def put(script):
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!{sys.executable}\nimport sys, time\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return put


def test_the_driver_is_asked_for_what_is_parsed(driver, monkeypatch):
    driver(
        "assert sys.argv[1:] == ['--query-gpu=index,name,memory.total,memory.free,compute_cap,uuid,mig.mode.current', "
        f"'--format=csv,noheader,nounits'], sys.argv\nprint({TWO!r}, end='')"
    )
    assert read_gpus() == (V100, A100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [one.name for one in read_gpus()] == [A100.name]


@pytest.mark.parametrize(
    "script",
    [
        "print('NVIDIA-SMI has failed because it could not communicate with the driver'); sys.exit(9)",
        "time.sleep(30)",
        "sys.stdout.buffer.write(bytes([0xff, 0xfe, 0xff]))",
    ],
)
def test_a_driver_that_fails_or_hangs_is_none(driver, script, monkeypatch):
    monkeypatch.setattr(gpu, "TIMEOUT_S", 0.3)
    driver(script)
    assert read_gpus() == ()


def test_a_host_without_a_driver_has_no_card(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_gpus() == ()


# --- The choice ---


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [((7, 0), "float32"), ((7, 5), "float32"), ((8, 0), "bfloat16"), ((12, 1), "bfloat16"), ((0, 0), "float32")],
)
def test_the_dtype_is_bfloat16_from_ampere_on(capability, dtype):
    assert best_dtype(Gpu(0, "", None, None, capability)) == dtype


@pytest.mark.parametrize(
    ("asked", "mode", "gpus", "cuda", "device"),
    [
        ("auto", "whole", (V100, A100), True, "cpu"),
        ("auto", "patch", (), True, "cpu"),
        ("auto", "patch", (V100, A100), False, "cpu"),
        ("auto", "patch", (V100, A100), True, "gpu:1"),
        ("auto", "patch", (V100, Gpu(1, "split", None, None, (8, 0))), True, "gpu:0"),
        ("cpu", "patch", (V100,), True, "cpu"),
        ("gpu:0", "patch", (V100, A100), False, "gpu:0"),
        ("gpu:0", "whole", (V100,), True, "gpu:0"),
    ],
)
def test_a_card_is_taken_for_patches_where_there_is_one(asked, mode, gpus, cuda, device, monkeypatch):
    monkeypatch.setattr(gpu, "cuda_is_installed", lambda: cuda)
    assert pick_device(asked, mode, gpus) == device


def test_equal_cards_are_taken_from_the_first_on(monkeypatch):
    monkeypatch.setattr(gpu, "cuda_is_installed", lambda: True)
    assert pick_device("auto", "patch", (V100, Gpu(1, "again", *(16384 * MIB, 16370 * MIB), (7, 0)))) == "gpu:0"


def test_cuda_is_known_by_its_package(monkeypatch):
    def version(name):
        if name != "nvidia-cudnn-cu12":
            raise importlib.metadata.PackageNotFoundError
        return "9.3"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert gpu.cuda_is_installed()
    monkeypatch.setattr(gpu, "CUDA_PACKAGE", "another")
    assert not gpu.cuda_is_installed()


def test_a_card_is_found_by_its_device():
    assert card_of("gpu:1", (V100, A100)) == A100


@pytest.mark.parametrize(
    ("asked", "gpus", "message"),
    [
        (
            "gpu:0",
            (),
            "device must be a GPU of this host, got gpu:0 with none found; use --device cpu, or a host with an NVIDIA "
            "GPU and its driver",
        ),
        (
            "gpu:2",
            (V100, A100),
            "device must be a GPU of this host, got gpu:2 with gpu:0 (Tesla V100-SXM2-16GB), gpu:1 (NVIDIA "
            "A100-SXM4-40GB) found; use --device gpu:0",
        ),
        ("cuda", (V100,), "device must be auto, cpu, or a card such as gpu:0, got 'cuda'; choose one of them"),
        ("gpu:", (V100,), "device must be auto, cpu, or a card such as gpu:0, got 'gpu:'; choose one of them"),
    ],
)
def test_a_device_that_is_not_there_is_an_error(asked, gpus, message):
    with pytest.raises(InputError) as raised:
        pick_device(asked, "patch", gpus)
    assert str(raised.value) == message


# --- What TensorFlow is told ---


class FakeTensorFlow:
    """Its devices can be chosen until it computes, as in TensorFlow."""

    __version__ = "9.9.9"

    def __init__(self, cards=(), with_cuda=True):
        self.cards, self.visible, self.growing, self.computes = list(cards), list(cards), set(), False
        self.config = self.experimental = self.test = self
        self.is_built_with_cuda = lambda: with_cuda

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
        if self.computes and card not in self.growing:
            raise RuntimeError("Physical devices cannot be modified after being initialized")
        self.growing.add(card)


@pytest.mark.parametrize(
    ("device", "visible", "growing"), [("cpu", [], set()), ("gpu:0", ["a"], {"a"}), ("gpu:1", ["b"], {"b"})]
)
def test_tensorflow_gets_one_card_whose_memory_grows_or_none(device, visible, growing):
    tf = FakeTensorFlow("ab")
    use_device(tf, device)
    assert (tf.visible, tf.growing) == (visible, growing)
    tf.computes = True
    use_device(tf, device)  # as two commands in one process do
    assert (tf.visible, tf.growing) == (visible, growing)


def test_a_process_that_computes_elsewhere_already_is_told():
    tf = FakeTensorFlow("ab")
    tf.computes = True
    with pytest.raises(RuntimeError, match="device gpu:1 must be chosen before TensorFlow computes"):
        use_device(tf, "gpu:1")


def test_a_process_that_computes_on_the_one_card_there_is_goes_on():
    tf = FakeTensorFlow("a")
    tf.computes = True  # without growth: it has taken all of the memory, which is as well
    use_device(tf, "gpu:0")


@pytest.mark.parametrize(
    ("cards", "with_cuda", "message"),
    [
        ("", False, "got gpu:1 with TensorFlow 9.9.9, which is built without CUDA; run `./run.sh setup --gpu`, or"),
        ("", True, "got gpu:1 with TensorFlow 9.9.9, which found no CUDA libraries or no driver; run `./run.sh setup"),
        ("a", True, "got gpu:1 with 1 seen; use --device gpu:0, or unset CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_card_that_tensorflow_does_not_see_is_an_error(cards, with_cuda, message):
    with pytest.raises(InputError, match="device must be a GPU that TensorFlow sees") as raised:
        use_device(FakeTensorFlow(cards, with_cuda), "gpu:1")
    assert message in str(raised.value)


def test_without_cards_the_cpu_is_used_as_it_is():
    use_device(FakeTensorFlow(), "cpu")


def test_the_allocator_s_statistics_are_the_device_s():
    assert [memory_device(device) for device in ("cpu", "gpu:0", "gpu:3")] == ["CPU:0", "GPU:0", "GPU:0"]


@pytest.mark.skipif(bool(read_gpus()), reason="this host has a GPU")
def test_the_real_tensorflow_says_that_it_sees_no_card():
    tf = set_up()[2]
    use_device(tf, "cpu")
    tf.zeros(1)
    use_device(tf, "cpu")
    with pytest.raises(
        InputError, match=r"got gpu:0 with TensorFlow 2\.\d+\.\d+, which .*; run `./run.sh setup --gpu`"
    ):
        use_device(tf, "gpu:0")
