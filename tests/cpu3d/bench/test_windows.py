"""One pass against windows: rows by made-up answers, a real network's seams, ways that die, bad input."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from cpu3d.__main__ import main
from cpu3d.bench import windows, windows_work
from cpu3d.bench.record import append_record, read_records
from cpu3d.bench.step import ProcessFailedError
from cpu3d.bench.tables import compare_page
from cpu3d.bench.windows import Way, compare_ways
from cpu3d.bench.windows_markdown import newest, windows_lines
from cpu3d.bench.windows_picture import draw_windows
from cpu3d.bench.windows_table import ONE_PASS, cells_of, title_of, windows_table
from cpu3d.config import load_config, save_config
from cpu3d.inference.options import Inference
from cpu3d.training.checkpoint import save_checkpoint
from models.config import UNetConfig

HOST = {"engine_name": "TensorFlow 2.15.1", "threads": {}, "host": {"cpu": "made up", "cores": 2}, "versions": {}}
MIB = 2**20

WAYS = [
    Way(ONE_PASS, Inference(one_pass=True)),
    Way("6 x 10 x 8, overlap 0", Inference(window=(6, 10, 8), overlap=0.0)),
    Way("12 x 10 x 8, overlap 0.5", Inference(window=(12, 10, 8))),
]


@pytest.fixture
def answered(tiny_store, tiny_run, monkeypatch):
    """Processes that answer as told: (seconds, peak MiB, probabilities by case) or an error, in turn for each way."""
    answers, asked = {}, []

    def answer(request):
        request = json.loads(json.dumps(request))
        inference = request["inference"]
        name = ONE_PASS if inference["one_pass"] else "x".join(map(str, inference["window"]))
        asked.append((name, request))
        said = answers[name].pop(0)
        if isinstance(said, Exception):
            raise said
        seconds, peak, probabilities = said
        for case_id in request["cases"]:
            if request["answers"]:
                np.save(Path(request["answers"]) / f"{case_id}.npy", probabilities(case_id))
        cases = {case_id: {"seconds": seconds, "start": [0, 0, 0], "size": [12, 10, 8]} for case_id in request["cases"]}
        return {"cases": cases, "process_peak_bytes": peak * MIB, "allocator_peak_bytes": None, **HOST}

    monkeypatch.setattr(windows, "in_fresh_process", answer)
    return answers, asked


@pytest.fixture
def truth(tiny_store):
    def probabilities(case_id):
        label = np.asarray(tiny_store.label(case_id))
        return np.stack([np.isin(label, codes) for codes in tiny_store.manifest.regions.values()], -1).astype(
            np.float32
        )

    return probabilities


def seam(probabilities, height):
    """The same answers, but on both sides of the plane before x = 6, where they are off by `height`."""

    def with_seam(case_id):
        answers = probabilities(case_id).copy()
        answers[5:7] = np.abs(answers[5:7] - np.float32(height))
        return answers

    return with_seam


def killed():
    return ProcessFailedError("dead", -9, "")


@pytest.fixture
def result(answered, truth, tiny_run, tiny_store):
    answers, _ = answered
    answers[ONE_PASS] = [(2.0, 900, truth), (4.0, 950, truth), (3.0, 900, truth)]
    answers["6x10x8"] = [(6.0, 300, seam(truth, 0.25)), (6.0, 310, None), (6.0, 300, None)]
    answers["12x10x8"] = [(2.0, 900, truth), killed()]
    return compare_ways(tiny_run, tiny_store, ["e", "f"], WAYS, rounds=3)


def test_times_are_compared_within_a_round_and_peaks_are_the_most(result, answered, tiny_run):
    one, tiled, _ = result["rows"]
    assert (one["seconds"], one["seconds_min"], one["seconds_max"], one["ratio"]) == (3, 2, 4, 1)
    # 6/2, 6/4 and 6/3.
    assert (tiled["seconds"], tiled["ratio"], tiled["process_peak_bytes"]) == (6, 2, 310 * MIB)
    assert (one["tiles"], tiled["tiles"], tiled["window"], tiled["overlap"]) == (None, 2, [6, 10, 8], 0)
    _, asked = answered
    assert [name for name, _ in asked] == [ONE_PASS, "6x10x8", "12x10x8"] * 2 + [ONE_PASS, "6x10x8"]
    assert [bool(request["answers"]) for _, request in asked] == [True] * 3 + [False] * 5
    assert not list(tiny_run.glob(".bench*"))


def test_dice_is_of_the_painted_labels_and_the_difference_is_where_the_seam_is(result, tiny_store):
    one, tiled, _ = result["rows"]
    assert one["dice"] == tiled["dice"] == {"WT": 1, "TC": 1, "ET": 1}  # 0.75 is still above the threshold
    assert one["difference"] is None
    difference = tiled["difference"]
    brains = [np.asarray(tiny_store.image(case_id)).any(-1) for case_id in "ef"]
    assert difference["voxels"] == sum(brain.sum() for brain in brains)
    by_distance = {one["distance"]: one for one in difference["by_distance"]}
    assert by_distance[0] == {
        "distance": 0, "voxels": sum(brain[5:7].sum() for brain in brains), "mean": 0.25, "p99": 0.25, "max": 0.25,
    }  # fmt: skip
    assert all(by_distance[distance]["max"] == 0 for distance in by_distance if distance > 0)
    assert difference["max"] == 0.25
    assert difference["mean"] == pytest.approx(0.25 * by_distance[0]["voxels"] / difference["voxels"])
    assert difference["changed_share"] == 0


def test_labels_that_change_are_counted_over_the_brain(answered, truth, tiny_run, tiny_store):
    answers, _ = answered
    answers[ONE_PASS] = [(1.0, 1, truth)]
    answers["6x10x8"] = [(1.0, 1, seam(truth, 1.0))]  # the seam turns every answer around
    row = compare_ways(tiny_run, tiny_store, ["e"], WAYS[:2], rounds=1)["rows"][1]
    brain = np.asarray(tiny_store.image("e")).any(-1)
    assert row["difference"]["changed_share"] == pytest.approx(brain[5:7].sum() / brain.sum())
    assert row["dice"]["WT"] < 1


def test_a_way_that_dies_keeps_what_it_had_and_is_not_tried_again(result):
    row = result["rows"][2]
    assert row["error"] == "killed, as the kernel does when memory runs out"
    assert row["rounds"] == [2.0, None, None]
    assert row["difference"]["max"] == 0
    # A window as large as the volume has no border: all is at the distance of none.
    assert [one["distance"] for one in row["difference"]["by_distance"]] == [12]


def test_without_one_pass_windows_are_measured_but_not_compared(answered, truth, tiny_run, tiny_store):
    answers, _ = answered
    answers[ONE_PASS] = [killed()]
    answers["6x10x8"] = [(6.0, 300, truth)]
    dead, tiled = compare_ways(tiny_run, tiny_store, ["e"], WAYS[:2], rounds=1)["rows"]
    assert (dead["seconds"], dead["dice"], dead["process_peak_bytes"]) == (None, None, None)
    assert (tiled["seconds"], tiled["ratio"], tiled["difference"]) == (6, None, None)
    assert tiled["dice"]["WT"] == 1
    assert cells_of(dead)[1] == "died"
    assert cells_of(tiled)[5:] == ["-", "-", "-"]


def test_where_everything_dies_there_is_no_result(answered, tiny_run, tiny_store):
    answers, _ = answered
    answers.update({ONE_PASS: [killed()], "6x10x8": [killed()]})
    with pytest.raises(ProcessFailedError):
        compare_ways(tiny_run, tiny_store, ["e"], WAYS[:2], rounds=1)
    assert not list(tiny_run.glob(".bench*"))


# --- What is shown ---


def test_the_table_fits_a_narrow_terminal_and_says_everything(result, capsys):
    Console(width=80, file=sys.stdout).print(windows_table(result))
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    for text in (
        "3.00 (2.00",
        "6 x 10 x 8 ",
        "overlap 0 ",
        " 0.25 ",
        "12 x 10 x 8, overlap 0.5: killed",
        "difference of the probabil",
    ):
        assert text in said
    assert "…" not in said


def test_the_markdown_has_a_line_a_way_and_a_line_a_distance(result):
    lines = windows_lines(result)
    assert any(
        line.startswith("| 6 x 10 x 8, overlap 0 | 2 | 6.00 | 2.00 | 0.30 | 1.000, 1.000, 1.000 |") for line in lines
    )
    assert any(line.startswith("| 0 | 0.25 (0.25) | - |") for line in lines)
    assert any(line.startswith("| 1 | 0 (0) | - |") for line in lines)
    assert "\n12 x 10 x 8, overlap 0.5: killed, as the kernel does when memory runs out." in lines


def test_the_newest_record_of_a_network_is_on_the_page(result, tmp_path):
    for rounds in (3, 7):
        append_record(tmp_path / "windows.jsonl", "windows", {**result, "rounds": rounds})
    more = compare_page(tmp_path)
    assert sum("of 7 rounds in turn" in line for line in more) == 1
    assert not any("of 3 rounds in turn" in line for line in more)
    assert len(newest([result, {**result, "cases": ["e"]}, {**result, "device": "gpu:0"}])) == 3
    old = {name: value for name, value in result.items() if name != "device"}  # from before there was a choice
    assert newest([old, result]) == [result]


def test_all_ways_are_measured_on_the_device_that_is_asked_for(answered, truth, tiny_run, tiny_store):
    answers, asked = answered
    answers.update({ONE_PASS: [(1.0, 1, truth)], "6x10x8": [(1.0, 1, truth)]})
    result = compare_ways(tiny_run, tiny_store, ["e"], WAYS[:2], rounds=1, device="gpu:1")
    assert [request["device"] for _, request in asked] == ["gpu:1", "gpu:1"]
    assert title_of(result).endswith(", on gpu:1")


def test_a_picture_is_a_png_whatever_died(result):
    whole = draw_windows(result, "Windows")
    for row in result["rows"]:
        row["difference"] = None
    bare = draw_windows(result, "Windows")
    for row in result["rows"]:
        row.update(seconds=None, process_peak_bytes=None)
    nothing = draw_windows(result, "Windows")
    assert all(one.startswith(b"\x89PNG") for one in (whole, bare, nothing))
    assert len({whole, bare, nothing}) == 3


# --- A real network ---


@pytest.fixture(scope="module")
def real_run(phantom_store, tmp_path_factory):
    """Weights as they begin: an untrained network has seams as well."""
    from tests.cpu3d.runs import start  # imports TensorFlow

    folder = tmp_path_factory.mktemp("windows") / "run"
    start(phantom_store, folder)._save_best()
    return folder


@pytest.fixture
def in_this_process(monkeypatch):
    """Workers are called instead of started; what goes in and comes out passes through JSON all the same."""
    call = lambda request: json.loads(json.dumps(windows_work.work(json.loads(json.dumps(request)))))
    monkeypatch.setattr(windows, "in_fresh_process", call)


def test_windows_of_a_real_network_differ_most_at_their_borders(real_run, in_this_process, tmp_path, capsys):
    record, picture = tmp_path / "windows.jsonl", tmp_path / "windows.png"
    asked = ["--window", "16", "16", "16", "--window", "48", "48", "48", "--rounds", "1"]
    command = ["bench", "windows", "--run", str(real_run), *asked, "--record", str(record), "--picture", str(picture)]
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["name"] for row in result["rows"]] == [
        ONE_PASS,
        *(f"{side} x {side} x {side}, overlap {share}" for side in (16, 48) for share in ("0", "0.5")),
    ]
    _, seams, blended, *large = result["rows"]
    border, *further = seams["difference"]["by_distance"]
    assert border["mean"] > further[-1]["mean"] > 0
    assert border["max"] > blended["difference"]["max"]
    assert blended["tiles"] > seams["tiles"] > 1
    assert [row["tiles"] for row in large] == [1, 1]
    assert all(0 <= row["dice"]["WT"] <= 1 and row["process_peak_bytes"] > 0 for row in result["rows"])
    assert read_records(record, "windows")[-1]["rows"] == result["rows"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_process_of_a_measurement_answers_in_json(real_run, phantom_store):
    request = {
        "run": str(real_run),
        "store": str(phantom_store.folder),
        "weights": "best",
        "cases": list(phantom_store.manifest.split["test"]),
        "inference": Inference(window=(16, 16, 16)).to_json(),
        "device": "cpu",
        "answers": None,
    }
    answer = windows_work.in_fresh_process(request)
    assert list(answer["cases"]) == request["cases"]
    assert all(one["seconds"] > 0 for one in answer["cases"].values())
    assert answer["process_peak_bytes"] > 100 * MIB
    assert answer["engine_name"].startswith("TensorFlow")


# --- Bad input ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "nobody"], "cases must be in split test of"),
        (["--case", "a"], "which has 2, got a"),
        (["--window", "20", "20", "20"], "--window (20, 20, 20) must be divisible by 16; pad to (32, 32, 32)"),
        (["--overlap", "1"], "--overlap must be in [0, 1), got 1.0"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--device", "gpu:9"], "device must be a GPU of this host, got gpu:9"),
        (["--device", "tpu"], "device must be auto, cpu, or a card such as gpu:0, got 'tpu'"),
        (["--weights", "last"], "must hold its last weights, found none; train it first"),
        (["--run", "/nowhere"], "run /nowhere must hold a config.json, found none"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(tiny_run, arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(windows, "in_fresh_process", lambda request: pytest.fail("something was measured"))
    (tiny_run / "checkpoints").mkdir()
    (tiny_run / "checkpoints" / "best.npz").touch()
    assert main(["bench", "windows", "--run", str(tiny_run), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_last_weights_are_a_checkpoint_of_any_step(tiny_run, capsys):
    (tiny_run / "checkpoints").mkdir()
    save_checkpoint(tiny_run / "checkpoints/step-00000040.npz", {"kernel": np.zeros(1)}, {})
    assert main(["bench", "windows", "--run", str(tiny_run), "--weights", "last", "--rounds", "0"]) == 2
    assert "weights" not in capsys.readouterr().err  # the rounds alone are wrong


def test_a_run_at_less_resolution_is_refused(tiny_run, capsys):
    config = load_config(tiny_run)
    save_config(dataclasses.replace(config, resolution=0.5, unet=UNetConfig(depth=3)), tiny_run)
    assert main(["bench", "windows", "--run", str(tiny_run)]) == 2
    assert "must be at full resolution, got 0.5" in capsys.readouterr().err
