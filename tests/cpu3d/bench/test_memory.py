"""`bench memory` measures the trainer's own step from outside, beside predictions, under every policy."""

import dataclasses
import json
import warnings

import pytest

from cpu3d.__main__ import main
from cpu3d.bench import memory
from cpu3d.bench.harness import ProcessFailedError
from cpu3d.bench.memory import compare_policies, draw_policies, mprof_trace, policies_table
from cpu3d.errors import InputError
from cpu3d.host.memory import Resident
from cpu3d.settings import RunConfig, save_config
from cpu3d.util.records import read_records
from memory_estimator.host import read_host
from memory_estimator.job import RECIPES
from memory_estimator.validation import read_measured
from models.config import POLICIES, UNetConfig

MIB = 2**20
TINY = ["--shape", "32", "32", "32", "--filters", "8", "--depth", "3", "--steps", "2", "--dtype", "float32"]


def test_peaks_trace_and_prediction_of_a_step(tmp_path, capsys):
    files = {"record": "r/memory.jsonl", "trace": "t.mprof"}
    options = [word for name, file in files.items() for word in (f"--{name}", str(tmp_path / file))]
    assert main(["bench", "memory", *TINY, "--json", *options]) == 0
    result = json.loads(capsys.readouterr().out)
    peak, anonymous, pages = (result[f"{kind}_peak_bytes"] for kind in ("process", "anonymous", "file"))
    assert min(anonymous, pages) > 50 * MIB
    # The parts are looked at 50 times a second, and on a busy machine more rarely: they may miss the top of the peak.
    assert 0.8 * peak < anonymous + pages < peak + 16 * MIB
    # The kernel counts a process's pages to within some 64 a thread.
    assert result["baseline_bytes"] < result["resident_bytes"] <= peak + MIB
    for name in ("allocator_peak_bytes", "process_peak_bytes", "step_s"):
        assert result["errors"][name] == pytest.approx(result["predicted"][name] / result[name] - 1)
    lines = (tmp_path / "t.mprof").read_text().splitlines()
    assert sum(line.startswith("FUNC step ") for line in lines) == 4  # two to warm up, two timed
    (kept,) = read_records(tmp_path / files["record"], "memory")
    assert {**kept, "schema": 0, "kind": "", "date": ""} == {**result, "schema": 0, "kind": "", "date": ""}
    (one,) = read_measured(tmp_path / files["record"])
    assert one.job.shape == (32, 32, 32)


@pytest.fixture
def asked(monkeypatch):
    """What would have been measured."""
    found = []

    def measure_memory(request):
        found.append(request)
        raise InputError("nothing is measured")

    monkeypatch.setattr(memory, "measure_memory", measure_memory)
    monkeypatch.setattr(memory.harness, "in_fresh_process", lambda *_, **__: pytest.fail("something was measured"))
    return found


@pytest.mark.policy_left_open
def test_the_job_is_that_of_the_options_the_recipe_or_the_run(asked, tmp_path):
    config = RunConfig(grid=(32, 32, 32), unet=UNetConfig(filters=4, depth=3), optimizer="sgd", engine="stock")
    save_config(config, tmp_path)
    recipe = ["--recipe", "paper-2020", "--batch", "1", "--threads", "2", "--steps", "3"]
    own = ["--batch", "4", "--micro-batch", "2", "--policy", "balanced", "--dtype", "auto"]
    run = ["--run", str(tmp_path), "--engine", "stock-no-onednn", "--dtype", "bfloat16"]
    for arguments in (recipe, own, run, run[:2], []):
        assert main(["bench", "memory", *arguments]) == 2
    paper, second, third, fourth, default = asked
    assert (paper["shape"], paper["steps"], paper["threads"]) == ([240, 240, 144], 3, 2)
    assert paper["unet"] == dataclasses.asdict(RECIPES["paper-2020"].job.unet)
    assert (second["unet"]["policy"], second["batch"], second["micro_batch"]) == ("balanced", 4, 2)
    assert (third["engine"], third["unet"]["dtype"]) == ("stock-no-onednn", "bfloat16")
    assert (fourth["shape"], fourth["optimizer"], fourth["engine"]) == ([32, 32, 32], "sgd", "stock")
    assert (default["shape"], default["engine"], default["unet"]["policy"]) == ([128, 128, 128], None, "speed")
    assert default["unet"]["dtype"] == second["unet"]["dtype"] == read_host().best_dtype


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "16", "16", "17", "--depth", "3"], "input_shape (16, 16, 17) must be divisible by 4"),
        (["--trace", "/proc/none/t"], "folder /proc/none must be a folder to write to"),
        (["--policies", "--policy", "lean"], "policy must be left out with --policies"),
        (["--policies", "--peer", "no-such-program --x"], "peer must begin with an installed program"),
        (["--policies", "--peer", "echo hello"], "peer 'echo hello' must end with a line of JSON, exited with 0"),
        (["--peer", "echo"], "peer must come with --policies"),
    ],
)
def test_bad_settings_are_refused_before_ours_are_measured(arguments, message, asked, capsys):
    assert main(["bench", "memory", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not asked


# --- Policies, with made-up measurements ---

UNIT = 16**3 * 8 * 2
REQUEST = {
    "shape": [16, 16, 16],
    "batch": 4,
    "micro_batch": 1,
    "optimizer": "adam",
    "steps": 3,
    "engine": None,
    "unet": vars(UNetConfig(filters=8, depth=3, dtype="bfloat16")),
}
HOST = {"engine_name": "TensorFlow", "threads": {}, "host": {"cpu": "made up", "cores": 2}, "versions": {}}
PREDICTED = {"allocator_peak_bytes": 40 * UNIT, "process_peak_bytes": 900 * MIB, "step_s": 2.5, "upper_bound_bytes": 1}


@pytest.fixture
def compare(monkeypatch):
    """Compares policies that answer so: (seconds, units, MiB) or an error each round; peers answer with JSON."""

    def compare(answers, peers=(), rounds=1):
        def take(name):
            answer = answers[name].pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        def ours(work, request):
            seconds, units, process = take(request["unet"]["policy"])
            peaks = {"allocator_peak_bytes": units * UNIT, "process_peak_bytes": process * MIB}
            return {**HOST, "step_s": seconds, **peaks}

        monkeypatch.setattr(memory.harness, "in_fresh_process", ours)
        monkeypatch.setattr(memory.harness, "run_peer", take)
        monkeypatch.setattr(memory, "predict", lambda result: {**PREDICTED, "policy": result["unet"]["policy"]})
        return compare_policies(REQUEST, peers, rounds)

    return compare


def test_policies_are_compared_within_rounds_and_the_dead_are_rows(compare):
    dead = ProcessFailedError("dead", -9, "")
    answers = {
        "speed": [(2, 30, 1024), (4, 31, 2048)],
        "balanced": [(3, 20, 600), (4, 20, 600)],
        "lean": [(4, 10, 500), dead],
        "python /x/peer.py": [{"step_s": 8, "peer": "torch"}, {"step_s": 4, "peer": "torch"}],
        "python /x/peer.py --fast": [{"step_s": 8, "peer": "torch", "process_peak_bytes": 5}, {"step_s": 4}],
    }
    result = compare(answers, peers=list(answers)[3:], rounds=2)
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == [*POLICIES, "torch", "torch python --fast"]
    # Relative to speed: 3/2, 4/4; 4/2; 8/2, 4/4.
    assert [rows[name]["ratio"] for name in ("speed", "balanced", "lean", "torch")] == [1, 1.25, 2, 2.5]
    assert (rows["speed"]["units"], rows["speed"]["process_peak_bytes"]) == (31, 2048 * MIB)
    assert (rows["torch"]["units"], rows["torch python --fast"]["process_peak_bytes"]) == (None, 5)
    assert rows["torch python --fast"]["options"] == "python --fast"
    assert [rows[policy]["predicted"]["policy"] for policy in POLICIES] == list(POLICIES)
    assert (result["unit_bytes"], result["rounds"], result["engine_name"]) == (UNIT, 2, "TensorFlow")
    table = policies_table(result)
    assert ["speed", "0.00", "31.0", "2.00", "3.00 (2.00 to 4.00)", "1.00"] in table.rows
    assert ["lean", "-", "-", "-", "died", "-"] in table.rows
    assert "lean: killed" in table.caption
    assert draw_policies(result).startswith(b"\x89PNG")


# --- A process over time ---

SEEN = [Resident(100.0 + t, (50 + 10 * t) * MIB, 20 * MIB) for t in range(6)]
MOMENTS = [("data", 100.5, 101.5), ("step", 102.0, 104.0), ("step", 104.0, 105.0)]


def test_mprof_reads_the_trace_as_its_own(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mprof = pytest.importorskip("mprof")
    path = tmp_path / "t.mprof"
    path.write_bytes(mprof_trace(SEEN, MOMENTS, "python -m cpu3d bench memory"))
    read = mprof.read_mprofile_file(str(path))
    assert read["mem_usage"] == [70, 80, 90, 100, 110, 120]
    # begin, end, MiB at the begin, MiB at the end, depth of the call
    assert read["func_timestamp"]["step"] == [[102, 104, 90, 110, 0], [104, 105, 110, 120, 0]]
