"""The bill against live variables and sums done by hand."""

import json
import subprocess
import sys

import pytest
import tensorflow as tf

from memory_estimator.__main__ import main
from memory_estimator.components import activation_bytes, gradient_bytes, input_bytes, optimizer_bytes, weight_bytes
from models.config import UNetConfig
from models.layer_plan import layer_plan
from models.unet3d import build_unet3d


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("norm", ["instance", "batch", "none"])
def test_weights_gradients_and_slots_are_those_of_keras(norm, optimizer):
    config = UNetConfig(filters=4, depth=3, norm=norm, dtype="bfloat16")
    plan = layer_plan(config, (8, 8, 8))
    model = build_unet3d(config, (8, 8, 8), 1)
    keras = tf.keras.optimizers.Adam() if optimizer == "adam" else tf.keras.optimizers.SGD(momentum=0.9)
    keras.build(model.trainable_variables)
    slots = [v for v in keras.variables if v.shape.rank]
    size = lambda variables: sum(int(tf.size(v)) * v.dtype.size for v in variables)
    assert weight_bytes(plan).bytes == size(model.weights)
    assert gradient_bytes(plan).bytes == size(model.trainable_variables)
    assert optimizer_bytes(plan, optimizer).bytes == size(slots)


def test_kept_maps_of_a_two_level_net_are_those_counted_by_hand():
    # Level 0, 4x4x4, f=2: encoder conv, act, conv, act (2 each), concat 4, decoder conv, act, conv, act: 20 maps.
    # The up-sampled 2 go into the concat and no gradient reads them. Level 1, 2x2x2: pool 2, conv, act, conv, act of 4.
    plan = layer_plan(UNetConfig(filters=2, depth=2), (4, 4, 4))
    sizes = [line.bytes for line in activation_bytes(plan, batch=3)]
    assert sizes == [3 * 20 * 64 * 4, 3 * 18 * 8 * 4]


def test_without_a_norm_a_convolution_s_output_is_not_kept():
    plan = layer_plan(UNetConfig(filters=2, depth=2, norm="none"), (4, 4, 4))
    # Level 0: four ReLUs of 2 and the concat of 4. Level 1: pool 2 and two ReLUs of 4.
    assert [line.bytes for line in activation_bytes(plan, batch=1)] == [12 * 64 * 4, 10 * 8 * 4]


def test_input_is_two_batches_of_image_and_target():
    config = UNetConfig(channels=4, outputs=3, dtype="bfloat16")
    assert input_bytes(config, (16, 16, 16), batch=2).bytes == 2 * 2 * 4096 * (4 * 2 + 3)


def test_a_terabyte_job_is_billed_without_overflow(capsys):
    size = ["--shape", "240", "240", "144", "--batch", "16"]
    network = ["--network", "cicek2016", "--filters", "32", "--depth", "4", "--dtype", "float32"]
    code = main([*size, *network, "--json"])
    assert code == 0
    lines = {line["name"]: line["bytes"] for line in json.loads(capsys.readouterr().out)["components"]}
    # Level 0 keeps 32 + 32 + 64 + 64 in the encoder, 192 joined, 4 * 64 in the decoder: 640 float32 maps a volume.
    assert lines["activations, level 0"] == 16 * 240 * 240 * 144 * 640 * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--shape 240 240 155", "pad to (240, 240, 160)"),
        ("--shape 16 16 16 --batch 0", "batch must be at least 1, got 0"),
    ],
)
def test_bad_input_is_told_with_what_to_do(arguments, message, capsys):
    assert main(arguments.split()) == 2
    assert message in capsys.readouterr().err


def test_it_answers_without_tensorflow():
    code = "import sys, memory_estimator.__main__ as m; m.main(['--shape', '16', '16', '16']); "
    code += "sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode == 0
