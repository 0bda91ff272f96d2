"""One pass against windows: rows by made-up answers, a real network's windows, bad input."""

import json

import pytest

from cpu3d.__main__ import main
from cpu3d.bench import harness, windows
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
DICE = {"WT": 0.9, "TC": 0.8}
KILLED = ProcessFailedError("dead", -9, "")


@pytest.fixture
def compare(tiny_store, tiny_run, monkeypatch):
    """Compares ways that answer as listed, each round: (seconds, peak MiB) or an error."""

    def compare(*answers, rounds=1):
        left = dict(zip(WAYS, map(list, answers)))

        def predict(work, request):
            answer = left[next(name for name, way in WAYS.items() if way.to_json() == request["inference"])].pop(0)
            if isinstance(answer, Exception):
                raise answer
            places = {name: {"seconds": answer[0], "size": [12, 10, 8]} for name in request["cases"]}
            peaks = {"process_peak_bytes": answer[1] * MIB, "allocator_peak_bytes": None}
            return {"cases": places, **peaks, **({"dice": DICE} if request["is_scored"] else {}), **HOST}

        monkeypatch.setattr(harness, "in_fresh_process", predict)
        request = {"run": str(tiny_run), "weights": "best", "device": "cpu"}
        return compare_ways(request, tiny_store, ["e", "f"], {name: WAYS[name] for name in left}, rounds)

    return compare


def test_times_peaks_tiles_dice_and_deaths(compare):
    one_pass, tiles = [(2.0, 900), (4.0, 950), (3.0, 900)], [(6.0, 300), (6.0, 310), (6.0, 300)]
    result = compare(one_pass, tiles, [(2.0, 900), KILLED], rounds=3)
    one, tiled, dead = result["rows"]
    assert (one["seconds"], one["seconds_min"], one["seconds_max"], one["ratio"]) == (3, 2, 4, 1)
    # 6/2, 6/4 and 6/3.
    assert (tiled["seconds"], tiled["ratio"], tiled["process_peak_bytes"]) == (6, 2, 310 * MIB)
    assert (one["tiles"], tiled["tiles"], tiled["window"], tiled["overlap"]) == (None, 2, [6, 10, 8], 0)
    assert one["dice"] == tiled["dice"] == DICE
    assert (dead["error"], dead["rounds"]) == ("killed, as the kernel does when memory runs out", [2.0, None, None])
    rows = windows.windows_table(result).rows
    assert rows[1] == ["6 x 10 x 8, overlap 0", "2", "6.00", "2.00", "0.30", "0.900, 0.800"]
    assert rows[2][2:] == ["died", "-", "-", "-"]


def test_without_one_pass_windows_are_measured_but_not_compared(compare):
    dead, tiled = compare([KILLED], [(6.0, 300)])["rows"]
    assert (dead["seconds"], dead["dice"], dead["process_peak_bytes"]) == (None, None, None)
    assert (tiled["seconds"], tiled["ratio"], tiled["dice"]) == (6, None, DICE)
    with pytest.raises(ProcessFailedError):
        compare([KILLED], [KILLED])


def test_a_real_network_in_one_pass_and_by_windows(phantom_store, tmp_path, monkeypatch):
    from tests.cpu3d.runs import start  # imports TensorFlow

    start(phantom_store, tmp_path / "run")._save_best()
    # Workers are called instead of started; what goes in and comes out passes through JSON all the same.
    call = lambda work, request: json.loads(json.dumps(work(json.loads(json.dumps(request)))))
    monkeypatch.setattr(harness, "in_fresh_process", call)
    record = tmp_path / "windows.jsonl"
    words = ["--window", "16", "16", "16", "--window", "48", "48", "48", "--rounds", "1", "--record", str(record)]
    assert main(["bench", "windows", "--run", str(tmp_path / "run"), *words]) == 0
    (result,) = read_records(record, "windows")
    one, seams, blended, *large = result["rows"]
    assert (one["name"], seams["overlap"], blended["overlap"]) == (ONE_PASS, 0, 0.5)
    assert blended["tiles"] > seams["tiles"] > 1
    assert [row["tiles"] for row in large] == [1, 1]
    assert one["dice"] != seams["dice"]


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
    monkeypatch.setattr(harness, "in_fresh_process", lambda work, request: pytest.fail("something was measured"))
    (tiny_run / "checkpoints").mkdir()
    (tiny_run / "checkpoints" / "best.npz").touch()
    assert main(["bench", "windows", "--run", str(tiny_run), *arguments]) == 2
    assert message in capsys.readouterr().err
