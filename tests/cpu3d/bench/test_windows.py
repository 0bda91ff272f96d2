"""One pass against windows: rows by made-up answers, a real network's windows, bad input."""

import json
from pathlib import Path

import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.bench import windows
from cpu3d.bench.harness import ProcessFailedError
from cpu3d.bench.windows import ONE_PASS, compare_ways
from cpu3d.inference.runs import Inference
from cpu3d.util.records import read_records

MIB = 2**20
HOST = {"engine_name": "TensorFlow", "threads": {}, "host": {"cpu": "made up", "cores": 2}, "versions": {}}
WAYS = {
    ONE_PASS: Inference(one_pass=True),
    "6 x 10 x 8, overlap 0": Inference(window=(6, 10, 8), overlap=0.0),
    "12 x 10 x 8, overlap 0.5": Inference(window=(12, 10, 8)),
}


@pytest.fixture
def truth(tiny_store):
    def probabilities(case_id):
        label = np.asarray(tiny_store.label(case_id))
        return np.stack([np.isin(label, codes) for codes in tiny_store.manifest.regions.values()], -1).astype("f4")

    return probabilities


def seam(probabilities, height):
    """The same answers, but on both sides of the plane before x = 6, where they are off by `height`."""

    def with_seam(case_id):
        answers = probabilities(case_id).copy()
        answers[5:7] = np.abs(answers[5:7] - np.float32(height))
        return answers

    return with_seam


@pytest.fixture
def compare(tiny_store, tiny_run, monkeypatch):
    """Compares ways that answer as listed, each round: (seconds, peak MiB, probabilities by case) or an error."""

    def compare(answers, cases, rounds=1, **more):
        def predict(work, request):
            assert request["device"] == more.get("device", "cpu")
            inference = request["inference"]
            answer = answers[ONE_PASS if inference["one_pass"] else "x".join(map(str, inference["window"]))].pop(0)
            if isinstance(answer, Exception):
                raise answer
            seconds, peak, probabilities = answer
            for case_id in request["cases"] if request["answers"] else ():
                np.save(Path(request["answers"]) / f"{case_id}.npy", probabilities(case_id))
            places = {name: {"seconds": seconds, "start": [0, 0, 0], "size": [12, 10, 8]} for name in request["cases"]}
            return {"cases": places, "process_peak_bytes": peak * MIB, "allocator_peak_bytes": None, **HOST}

        monkeypatch.setattr(windows, "in_fresh_process", predict)
        request, ways = {"run": str(tiny_run), "weights": "best", "device": "cpu", **more}, list(WAYS)[: len(answers)]
        result = compare_ways(request, tiny_store, cases, {name: WAYS[name] for name in ways}, rounds=rounds)
        assert not list(tiny_run.glob(".bench*"))
        return result

    return compare


def killed():
    return ProcessFailedError("dead", -9, "")


def test_times_peaks_dice_seams_and_deaths(compare, truth, tiny_store):
    result = compare(
        {
            ONE_PASS: [(2.0, 900, truth), (4.0, 950, truth), (3.0, 900, truth)],
            "6x10x8": [(6.0, 300, seam(truth, 0.25)), (6.0, 310, None), (6.0, 300, None)],
            "12x10x8": [(2.0, 900, truth), killed()],
        },
        ["e", "f"],
        rounds=3,
    )
    one, tiled, dead = result["rows"]
    assert (one["seconds"], one["seconds_min"], one["seconds_max"], one["ratio"]) == (3, 2, 4, 1)
    # 6/2, 6/4 and 6/3.
    assert (tiled["seconds"], tiled["ratio"], tiled["process_peak_bytes"]) == (6, 2, 310 * MIB)
    assert (one["tiles"], tiled["tiles"], tiled["window"], tiled["overlap"]) == (None, 2, [6, 10, 8], 0)
    assert one["dice"] == tiled["dice"] == {"WT": 1, "TC": 1, "ET": 1}  # 0.75 is still above the threshold
    brains = [np.asarray(tiny_store.image(case_id)).any(-1) for case_id in "ef"]
    difference, at_seam = tiled["difference"], sum(brain[5:7].sum() for brain in brains)
    assert (one["difference"], difference["max"], difference["changed_share"]) == (None, 0.25, 0)
    assert difference["mean"] == pytest.approx(0.25 * at_seam / sum(brain.sum() for brain in brains))
    assert (dead["error"], dead["rounds"]) == ("killed, as the kernel does when memory runs out", [2.0, None, None])
    assert dead["difference"]["max"] == 0  # a window as large as the volume
    rows = windows.windows_table(result).rows
    assert rows[1][:6] == ["6 x 10 x 8, overlap 0", "2", "6.00", "2.00", "0.30", "1.000, 1.000, 1.000"]
    assert rows[2][2:7] == ["died", *["-"] * 3, "0 (0)"]


def test_without_one_pass_windows_are_measured_but_not_compared(compare, truth):
    dead, tiled = compare({ONE_PASS: [killed()], "6x10x8": [(6.0, 300, truth)]}, ["e"])["rows"]
    assert (dead["seconds"], dead["dice"], dead["process_peak_bytes"]) == (None, None, None)
    assert (tiled["seconds"], tiled["ratio"], tiled["difference"], tiled["dice"]["WT"]) == (6, None, None, 1)
    with pytest.raises(ProcessFailedError):
        compare({ONE_PASS: [killed()], "6x10x8": [killed()]}, ["e"])


# --- A real network ---


def test_windows_of_a_real_network_differ_from_one_pass(phantom_store, tmp_path, capsys, monkeypatch):
    from tests.cpu3d.runs import start  # imports TensorFlow

    start(phantom_store, tmp_path / "run")._save_best()  # an untrained network has seams as well
    # Workers are called instead of started; what goes in and comes out passes through JSON all the same.
    call = lambda work, request: json.loads(json.dumps(work(json.loads(json.dumps(request)))))
    monkeypatch.setattr(windows, "in_fresh_process", call)
    record = tmp_path / "windows.jsonl"
    asked = ["--window", "16", "16", "16", "--window", "48", "48", "48", "--rounds", "1", "--record", str(record)]
    assert main(["bench", "windows", "--run", str(tmp_path / "run"), *asked, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    one, seams, blended, *large = result["rows"]
    assert (one["name"], seams["overlap"], blended["overlap"]) == (ONE_PASS, 0, 0.5)
    assert seams["difference"]["max"] > blended["difference"]["max"] > 0
    assert blended["tiles"] > seams["tiles"] > 1
    assert [row["tiles"] for row in large] == [1, 1]
    assert all(0 <= row["dice"]["WT"] <= 1 and row["process_peak_bytes"] > 0 for row in result["rows"])
    assert read_records(record, "windows")[-1]["rows"] == result["rows"]


# --- Bad input ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "nobody"], "cases must be in split test of"),
        (["--window", "20", "20", "20"], "--window (20, 20, 20) must be divisible by 16; pad to (32, 32, 32)"),
        (["--device", "gpu:9"], "device must be a GPU of this host, got gpu:9"),
        (["--weights", "last"], "must hold its last weights, found none; train it first"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(tiny_run, arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(windows, "in_fresh_process", lambda work, request: pytest.fail("something was measured"))
    (tiny_run / "checkpoints").mkdir()
    (tiny_run / "checkpoints" / "best.npz").touch()
    assert main(["bench", "windows", "--run", str(tiny_run), *arguments]) == 2
    assert message in capsys.readouterr().err
