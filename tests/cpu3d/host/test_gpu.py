"""Cards from what a driver might answer, the choice among them, and what a made-up TensorFlow is
given."""

import dataclasses
from unittest.mock import Mock

import pytest

from cpu3d.errors import InputError
from cpu3d.host import gpu
from cpu3d.host.gpu import Gpu, HostGpus, parse_gpus, pick_device, use_device, why_no_card

MIB = 2**20
V100 = Gpu(0, "Tesla V100-SXM2-16GB", 16384 * MIB, 16370 * MIB, (7, 0))
A100 = Gpu(1, "NVIDIA A100-SXM4-40GB", 40960 * MIB, 40000 * MIB, (8, 0))
LINES = ("Tesla V100-SXM2-16GB, 16384, 16370, 7.0", "NVIDIA A100-SXM4-40GB, 40960, 40000, 8.0")

DRIVER = """#!/bin/sh
echo asked >>{folder}/asked
case "$*" in *=name,memory.total,memory.free,compute_cap*) ;; *) exit 1 ;; esac
case "$*" in *--id=1) ;; *) echo "{lines[0]}" ;; esac
echo "{lines[1]}"
"""


def test_a_card_without_figures_is_left_out():
    assert parse_gpus(f"Quadro, 2048, [N/A], [N/A]\n{LINES[1]}\nNo devices") == (A100,)


def test_the_driver_is_asked_once_of_the_visible_cards_and_only_where_one_may_be_taken(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(gpu, "cuda_is_installed", lambda: True)
    assert tuple(HostGpus()) == ()  # no driver
    program = tmp_path / "nvidia-smi"
    program.write_text(DRIVER.format(folder=tmp_path, lines=LINES))
    program.chmod(0o755)
    gpus = HostGpus()
    assert pick_device("cpu", "patch", gpus) == pick_device(None, "whole", gpus) == "cpu"
    assert why_no_card("cpu", "patch", gpus) == why_no_card(None, "whole", gpus) == []
    assert not (tmp_path / "asked").exists()
    assert pick_device(None, "patch", gpus) == "gpu:1"
    assert tuple(gpus) == (V100, A100)
    assert (tmp_path / "asked").read_text() == "asked\n"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert tuple(HostGpus()) == (dataclasses.replace(A100, index=0),)


# --- The choice ---


def test_a_card_that_this_tensorflow_cannot_use_is_taken_only_if_asked_for(monkeypatch):
    monkeypatch.setattr(gpu, "cuda_is_installed", lambda: False)
    assert pick_device(None, "patch", [V100]) == "cpu"
    assert "gpu:0 (Tesla" in why_no_card(None, "patch", [V100])[0]
    assert pick_device("gpu:0", "patch", [V100, A100]) == "gpu:0"


@pytest.mark.parametrize(
    ("asked", "gpus", "message"),
    [
        ("gpu:2", (V100,), "device must be .*, got gpu:2.*--device gpu:0"),
        ("cuda", (V100,), "device must be cpu.*, got 'cuda'"),
    ],
)
def test_a_device_that_is_not_there_is_an_error(asked, gpus, message):
    with pytest.raises(InputError, match=message):
        pick_device(asked, "patch", gpus)


# --- TensorFlow ---


@pytest.mark.parametrize(("device", "visible"), [("cpu", []), ("gpu:0", ["a"]), ("gpu:1", ["b"])])
def test_tensorflow_gets_one_card_whose_memory_grows_or_none(device, visible):
    tf = Mock()
    tf.config.list_physical_devices.return_value = ["a", "b"]
    use_device(tf, device)
    tf.config.set_visible_devices.assert_called_with(visible, "GPU")
    grown = tf.config.experimental.set_memory_growth.mock_calls
    assert [call.args for call in grown] == [(card, True) for card in visible]
    with pytest.raises(InputError, match="one of the 2 GPUs that TensorFlow sees, got gpu:2"):
        use_device(tf, "gpu:2")
