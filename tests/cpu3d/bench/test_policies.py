"""`bench memory --policies` measures every way to do a step, in turn, and sets them beside each other."""

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from cpu3d.__main__ import main
from cpu3d.bench import policies
from cpu3d.bench.policies import compare_policies, lines_of, policies_table
from cpu3d.bench.policies_picture import draw_policies
from cpu3d.bench.record import append_record, read_records
from cpu3d.bench.step import ProcessFailedError
from cpu3d.bench.tables import policies_table as markdown
from cpu3d.bench.tables import tables
from cpu3d.errors import InputError
from models.config import POLICIES, UNetConfig

MIB = 2**20
TINY = ["--shape", "32", "32", "32", "--filters", "8", "--depth", "3", "--steps", "1", "--dtype", "float32"]
OURS = ["plain Keras", *POLICIES]


def command(python: str) -> str:
    """A peer that runs this code."""
    return f"{sys.executable} -c {json.dumps(python)}"


PEER = command('print(\'{"step_s": 1000, "peer": "slow one", "peak_rss_bytes": 7}\')')


def test_every_policy_stands_beside_the_plain_graph_and_a_peer(tmp_path, capsys):
    files = ["--record", str(tmp_path / "r" / "policies.jsonl"), "--picture", str(tmp_path / "p.png")]
    assert main(["bench", "memory", "--policies", *TINY, "--json", "--peer", PEER, *files]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == [*OURS, "slow one"]
    assert result["unit_bytes"] == 32**3 * 8 * 4
    for name in OURS:
        row = rows[name]
        assert row["error"] is None
        assert row["process_peak_bytes"] > 100e6
        assert row["units"] == row["allocator_peak_bytes"] / result["unit_bytes"] > 5
        assert row["ratio"] == pytest.approx(row["step_s"] / rows["speed"]["step_s"])
    assert len({rows[name]["allocator_peak_bytes"] for name in OURS}) > 2  # they are different graphs
    assert rows["speed"]["predicted"]["allocator_peak_bytes"] > 0
    assert rows["plain Keras"]["predicted"] is None
    assert (rows["slow one"]["step_s"], rows["slow one"]["process_peak_bytes"]) == (1000, 7)
    assert rows["slow one"]["allocator_peak_bytes"] is None
    assert result["versions"]["tensorflow"]
    assert result["host"]["cores"] >= 1
    (kept,) = read_records(tmp_path / "r" / "policies.jsonl", "policies")
    assert kept["rows"] == result["rows"]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


# --- With made-up measurements ---

REQUEST = {
    "shape": [16, 16, 16],
    "batch": 4,
    "micro_batch": 1,
    "unet": vars(UNetConfig(filters=8, depth=3, dtype="bfloat16")),
    "optimizer": "adam",
    "steps": 3,
    "engine": "auto",
}
UNIT = 16**3 * 8 * 2
HOST = {
    "engine_name": "TensorFlow 2.15.1, oneDNN, ITEX 2.15.0.0",
    "threads": {"TF_NUM_INTRAOP_THREADS": "2"},
    "host": {"cpu": "made up", "cores": 2, "memory_bytes": 2**34, "isa": ["avx512f", "avx512_bf16"]},
    "versions": {"tensorflow": "2.15.1"},
}
PREDICTED = {"allocator_peak_bytes": 40 * UNIT, "process_peak_bytes": 900 * MIB, "step_s": 2.5, "upper_bound_bytes": 1}


@pytest.fixture
def measured(monkeypatch):
    """What was started, as (name, request), in order; name -> what its rounds answer in turn, to be filled in."""
    started, answers = [], {}

    def answer(name):
        told = answers[name].pop(0)
        if isinstance(told, Exception):
            raise told
        return told

    def ours(request, threads=None):
        name = "plain Keras" if request.get("plain") else request["unet"]["policy"]
        started.append((name, request))
        seconds, units, process = answer(name)
        figures = {"step_s": seconds, "step_s_min": seconds - 0.5, "step_s_max": seconds + 0.5}
        return {**HOST, **figures, "allocator_peak_bytes": units * UNIT, "process_peak_bytes": process * MIB}

    def peer(line):
        started.append((line, None))
        return answer(line)

    monkeypatch.setattr(policies, "measure_in_fresh_process", ours)
    monkeypatch.setattr(policies, "run_peer", peer)
    return started, answers


def compare(peers=(), rounds=1):
    return compare_policies(REQUEST, peers, rounds, lambda job: {**PREDICTED, "policy": job["unet"]["policy"]})


def killed(returncode=-9, told="nothing"):
    return ProcessFailedError(f"must end with JSON, exited with {returncode}", returncode, told)


def test_times_are_compared_within_a_round_and_peaks_are_the_most_of_all(measured):
    started, answers = measured
    answers.update({
        "plain Keras": [(3, 50, 900), (6, 50, 900), (9, 50, 900)],
        "speed": [(2, 30, 700), (4, 31, 720), (3, 30, 710)],
        "balanced": [(3, 20, 600), (4, 20, 600), (6, 20, 600)],
        "lean": [(4, 10, 500), (4, 10, 500), (12, 10, 500)],
        "peer": [{"step_s": 8}, {"step_s": 4}, {"step_s": 9, "peer": "torch", "peak_rss_bytes": 5 * MIB}],
    })  # fmt: skip
    result = compare(["peer"], rounds=3)
    assert [name for name, _ in started] == ["peer", *OURS] * 3
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == [*OURS, "torch"]
    # Seconds relative to speed: 3/2, 4/4, 6/3 and 4/2, 4/4, 12/3 and 8/2, 4/4, 9/3.
    of = lambda name: [
        rows[name][key] for key in ("step_s", "step_s_min", "step_s_max", "ratio", "ratio_min", "ratio_max")
    ]
    assert of("speed") == [3, 2, 4, 1, 1, 1]
    assert of("balanced") == [4, 3, 6, 1.5, 1, 2]
    assert of("lean") == [4, 4, 12, 2, 1, 4]
    assert of("torch") == [8, 4, 9, 3, 1, 4]
    assert (rows["speed"]["units"], rows["speed"]["process_peak_bytes"]) == (31, 720 * MIB)
    assert rows["speed"]["rounds"][1]["step_s_max"] == 4.5
    assert [rows[policy]["predicted"]["policy"] for policy in POLICIES] == list(POLICIES)
    assert (result["unit_bytes"], result["rounds"]) == (UNIT, 3)
    assert result["engine_name"] == HOST["engine_name"]
    assert "policy" not in result["unet"]


def test_the_plain_graph_computes_the_whole_batch_and_a_policy_its_parts(measured):
    started, answers = measured
    answers.update({name: [(1, 1, 1)] for name in OURS})
    compare()
    assert [(name, request["micro_batch"], request["batch"]) for name, request in started] == [
        ("plain Keras", 4, 4),
        *((policy, 1, 4) for policy in POLICIES),
    ]


def test_what_dies_becomes_a_row_and_is_not_tried_again(measured):
    started, answers = measured
    answers.update({name: [(2, 10, 500), (3, 10, 500)] for name in ("balanced", "lean")})
    answers.update({"plain Keras": [killed()], "speed": [(1, 30, 700), killed()]})
    answers["python /x/peer.py --fast"] = [killed(1, "ModuleNotFoundError: No module named 'torch'")]
    result = compare(["python /x/peer.py --fast"], rounds=2)
    rows = {row["name"]: row for row in result["rows"]}
    assert [name for name, _ in started].count("plain Keras") == 1
    assert rows["plain Keras"]["error"] == "killed, as the kernel does when memory runs out"
    assert rows["speed"]["error"] == rows["plain Keras"]["error"]
    assert rows["peer.py"]["error"] == "exited with 1 saying: ModuleNotFoundError: No module named 'torch'"
    assert rows["peer.py"]["options"] == "python --fast"
    assert rows["lean"]["error"] is None
    assert (rows["lean"]["step_s"], rows["lean"]["ratio"]) == (2.5, 2)  # of the one round that the baseline has
    assert lines_of(rows["speed"], UNIT) == [
        ["speed", "-", "-", "-", "died", "-"],
        ["predicted", f"{40 * UNIT / 2**30:.2f}", "40.0", "0.88", "2.50", ""],
    ]


def test_without_any_measurement_of_ours_there_is_no_result(measured):
    _, answers = measured
    answers.update({name: [killed(1, "engine must be installed")] for name in OURS})
    with pytest.raises(ProcessFailedError, match="exited with 1"):
        compare()


def test_a_peer_that_ends_well_but_says_nothing_is_an_error_before_ours_run(measured):
    started, answers = measured
    answers["peer"] = [killed(0)]
    with pytest.raises(InputError, match="must end with JSON"):
        compare(["peer"])
    assert [name for name, _ in started] == ["peer"]


def test_peers_of_one_name_are_told_apart_by_what_their_commands_differ_in(measured):
    _, answers = measured
    answers.update({name: [(1, 1, 1)] for name in OURS})
    lines = ["python /x/step.py --bf16", "python /x/step.py --bf16 --compile", "other"]
    answers.update({line: [{"step_s": 1, "peer": "torch" if "step" in line else "other"}] for line in lines})
    assert [row["name"] for row in compare(lines)["rows"]][4:] == ["torch", "torch --compile", "other"]


@pytest.fixture
def record(measured):
    _, answers = measured
    answers.update({
        "plain Keras": [(3, 50, 2048), (3, 50, 2048)],
        "speed": [(2, 30, 1024), (2, 30, 1024)],
        "balanced": [(3, 20, 768), (2.5, 20, 768)],
        "lean": [killed()],
        "peer": [{"step_s": 8, "peer": "torch"}, {"step_s": 4, "peer": "torch"}],
    })  # fmt: skip
    return compare(["peer"], rounds=2)


def test_the_table_fits_a_narrow_terminal_and_says_everything(record, capsys):
    console = Console(width=80, file=sys.stdout)
    console.print(policies_table(record, "One step"))
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    for text in (
        "plain Keras",
        "lean: killed, as the kernel",
        "1.38 (1.25",
        "a unit is 8 channels of one volume, 64 KiB",
    ):
        assert text in said
    assert "…" not in said


def test_the_markdown_table_has_a_line_a_row_and_the_estimator_s_word_of_now(record):
    lines = markdown(record)
    assert lines[0].startswith("16 x 16 x 16 x 4, 8 filters, batch 4 (1 at a time, plain Keras and peers all at once)")
    assert "| plain Keras | 0.00 | 50.0 | 2.00 | 3.00 | 1.50 |" in lines
    assert "| balanced | 0.00 | 20.0 | 0.75 | 2.75 (2.50 to 3.00) | 1.38 (1.25 to 1.50) |" in lines
    assert "| lean | - | - | - | died | - |" in lines
    assert "lean: killed, as the kernel does when memory runs out." in lines
    assert "| torch | - | - | - | 6.00 (4.00 to 8.00) | 3.00 (2.00 to 4.00) |" in lines
    predicted = [line for line in lines if line.startswith("| predicted |")]
    assert len(predicted) == 3
    assert not any("| 40.0 |" in line for line in predicted)  # not the recorded word, which may be older
    assert [
        line for line in markdown({**record, "engine_name": "TensorFlow 2.15.1, no oneDNN"}) if "predicted" in line
    ] == []


def test_the_tables_show_the_newest_record_of_every_step(record, tmp_path):
    records = Path(__file__).parents[3] / "records"
    for name in ("step.jsonl", "engines.jsonl"):
        (tmp_path / name).write_bytes((records / name).read_bytes())
    without = tables(tmp_path)
    for batch, seconds in ((1, 7.0), (2, 8.0), (1, 9.0)):
        row = {**record["rows"][0], "step_s": seconds, "step_s_min": seconds, "step_s_max": seconds}
        append_record(tmp_path / "policies.jsonl", "policies", {**record, "batch": batch, "rows": [row]})
    more = [line for line in tables(tmp_path) if line not in without]
    assert [line.split(" | ")[4] for line in more if line.startswith("| plain Keras")] == ["9.00", "8.00"]


def test_a_picture_is_a_png_whatever_died(record):
    whole = draw_policies(record, "One step")
    for row in record["rows"]:
        row.update(ratio=None, ratio_min=None, ratio_max=None)
    without_baseline = draw_policies(record, "One step")
    for row in record["rows"]:
        row["error"] = "killed"
    nothing = draw_policies(record, "One step")
    assert all(one.startswith(b"\x89PNG") for one in (whole, without_baseline, nothing))
    assert len({whole, without_baseline, nothing}) == 3


# --- Bad input ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "--rounds", "0"], "rounds must be at least 1, got 0"),
        (
            ["--policies", "--shape", "16", "16", "17", "--depth", "3"],
            "input_shape (16, 16, 17) must be divisible by 4",
        ),
        (["--policies", "--policy", "lean"], "policy must be left out with --policies"),
        (["--policies", "--trace", "t"], "trace must be left out with --policies"),
        (["--policies", "--peer", "no-such-program --x"], "peer must begin with a program that is there"),
        (["--policies", "--peer", "echo 'x"], 'peer must be a command, got "echo \'x": No closing quotation'),
        (["--policies", "--peer", ""], "peer must begin with a program that is there, got ''"),
        (["--peer", "echo"], "peer must come with --policies"),
        (["--rounds", "2"], "rounds must come with --policies"),
        (["--policies", "--peer", "echo hello"], "peer 'echo hello' must end with a line of JSON, exited with 0"),
        (["--policies", "--peer", "echo 3"], "peer must print JSON with step_s, got 3"),
        (["--policies", "--peer", command("print('{\"seconds\": 1}')")], "with step_s, got ['seconds']"),
        (["--policies", "--peer", command("print('{\"step_s\": null}')")], "with step_s, got ['step_s']"),
    ],
)
def test_bad_settings_and_peers_are_refused_before_ours_are_measured(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(policies, "measure_in_fresh_process", lambda *_, **__: pytest.fail("something was measured"))
    assert main(["bench", "memory", *arguments]) == 2
    assert message in capsys.readouterr().err
