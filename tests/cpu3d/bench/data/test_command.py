"""`bench data` from end to end on tiny files: every row with its lines and targets, the record, the picture."""

import ast
import json
import sys
from pathlib import Path

import pytest

from cpu3d.__main__ import main
from cpu3d.bench.data import (
    augment_cost,
    command,
    ladder,
    ladder_feeds,
    many_cases,
    one_case,
    one_patch,
    patch_feeds,
    patch_training,
    peers,
    picture,
    whole_volumes,
)
from cpu3d.bench.data.options import Options
from cpu3d.bench.data.results import COLD, WARM, Line, Outcome, find
from cpu3d.bench.harness import ProcessFailedError
from cpu3d.util.records import read_records

OPTIONS = Options(rounds=1, steps=12)

FOLDER = Path(command.__file__).parent

PEER = f"""#!{sys.executable}
import json, sys
request = json.loads(sys.argv[3])
print(json.dumps({{"sample_s": [0.5, 0.25], "fill_s": 3.0, "anonymous_bytes": 2**30, "peak_bytes": 2**31,
                   "versions": {{"monai": request["kind"]}}}}))
"""


def check(outcome, targets):
    assert len(outcome.targets) == targets
    for line in outcome.lines:
        assert line.values, line
        assert min(line.values) >= 0, line
    content = outcome.to_json()
    assert json.loads(json.dumps(content)) == {**content, "targets": json.loads(json.dumps(content["targets"]))}
    return outcome


def test_a_case_is_loaded_in_every_way_warm_and_cold(bench_files, in_this_process):
    outcome = check(one_case.measure(bench_files, OPTIONS), 2)
    assert {line.state for line in outcome.lines} == {WARM, COLD}
    target = outcome.targets[0]
    first, ours = (find(outcome.lines, name, WARM).median for name in (".nii.gz float32", one_case.STORE))
    assert target.value == pytest.approx(first / ours)


def test_a_patch_is_loaded_in_every_way(bench_files, in_this_process):
    outcome = check(one_patch.measure(bench_files, OPTIONS), 3)
    warm = [line.name for line in outcome.lines if line.state == WARM]
    assert len(warm) == 11
    assert "store, ram" not in [line.name for line in outcome.lines if line.state == COLD]


def test_training_on_patches_is_fed_in_every_way(bench_files, in_this_process, monkeypatch):
    warm, cold = (patch_feeds.GZ, patch_feeds.MMAP, patch_feeds.HELD), (patch_feeds.PREAD,)  # the slow test has all
    monkeypatch.setattr(patch_training, "FEEDS", warm)
    monkeypatch.setattr(patch_training, "OF_DISK", cold)
    outcome = check(patch_training.measure(bench_files, OPTIONS), 2)
    assert [line.name for line in outcome.lines if line.state == WARM] == list(warm)
    assert [line.name for line in outcome.lines if line.state == COLD] == list(cold)
    assert "waits" in outcome.lines[0].note


def test_the_ladder_has_its_rungs_on_both_disks(bench_files, in_this_process, monkeypatch):
    rungs = (ladder_feeds.FLOAT, ladder_feeds.GRAPH, ladder_feeds.OURS)  # the slow test has all
    monkeypatch.setattr(ladder, "RUNGS", rungs)
    outcome = check(ladder.measure(bench_files, OPTIONS), 1)
    assert [line.name for line in outcome.lines] == [*rungs, *rungs]
    assert {line.state for line in outcome.lines} == {"cold, disk as it is", "cold, disk at 200 MB/s"}
    assert outcome.notes[0].startswith("the slow disk: ")


def test_whole_volumes_tell_wait_processor_time_and_memory(bench_files, in_this_process):
    outcome = check(whole_volumes.measure(bench_files, OPTIONS), 4)
    assert [line.unit for line in outcome.lines] == ["%", "core-s", "core-s", "core-s", "MiB", "MiB"]
    assert outcome.targets[3].value <= outcome.targets[3].bound


def test_many_entries_are_opened_and_streamed(bench_files, in_this_process):
    outcome = check(many_cases.measure(bench_files, OPTIONS), 3)
    assert outcome.title == "A store of 15 entries"


def test_augmentation_is_timed_on_volumes_and_patches(bench_files, in_this_process):
    outcome = check(augment_cost.measure(bench_files, OPTIONS), 0)
    assert len(outcome.lines) == 12


def test_a_peer_in_another_python_is_asked_and_shown_beside_ours(bench_files, in_this_process, tmp_path):
    python = tmp_path / "python"
    python.write_text(PEER)
    python.chmod(0o755)
    outcome = check(peers.measure(bench_files, Options(rounds=1, monai=python)), 0)
    cache = find(outcome.lines, "MONAI CacheDataset", WARM)
    assert cache.values == (0.5, 0.25)
    assert cache.note == "first pass 3.0 s; 1.00 GiB anonymous, peak 2.00 GiB"
    assert outcome.notes == ("monai persistent",)
    assert find(outcome.lines, "store, mmap", WARM).median > 0


def made_up(row):
    lines = (Line("a way", WARM, (2.0, 4.0)), Line("the store", WARM, (0.5, 1.0)), Line("the store", COLD, (1.0,)))
    return Outcome(row, f"Title of {row}", lines, (command_target(lines),), ("a note",))


def command_target(lines):
    from cpu3d.bench.data.results import times_slower

    return times_slower("way against store", lines[0], lines[1], ">=", 10)


@pytest.fixture
def quick(monkeypatch):
    """Rows that are there at once; s0 fails, as its process would."""

    def measure(row):
        def made(files, options):
            if row == "s0":
                raise ProcessFailedError("bench data one_patch must end with a line of JSON, exited with -9")
            return made_up(row)

        return made

    for row, module in (("s4", one_case), ("s0", one_patch), ("ladder", ladder)):
        monkeypatch.setattr(module, "measure", measure(row))


def test_rows_are_printed_recorded_and_drawn(tmp_path, capsys, monkeypatch, quick):
    monkeypatch.setenv("COLUMNS", "160")
    record, drawn = tmp_path / "r" / "data.jsonl", tmp_path / "p" / "data.png"
    more = ["--record", str(record), "--picture", str(drawn), "--workdir", str(tmp_path / "work"), "--smoke"]
    assert main(["bench", "data", "--rows", "s4", "ladder", *more]) == 0
    printed = capsys.readouterr().out
    assert "s4: Title of s4" in printed
    assert "MISSED" in printed
    assert "at least 10 x" in printed
    first, second = read_records(record, "data")
    assert (first["row"], second["row"]) == ("s4", "ladder")
    assert first["lines"][0] == {
        "name": "a way", "state": "warm", "unit": "s", "median": 3.0, "min": 2.0, "max": 4.0, "n": 2, "note": "",
    }  # fmt: skip
    assert first["targets"][0]["met"] is False
    assert first["host"]["cores"] >= 1
    assert first["versions"]["numpy"]
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_a_row_that_fails_takes_no_other_along(tmp_path, capsys, quick):
    record = tmp_path / "data.jsonl"
    arguments = ["--rows", "s0", "s4", "--record", str(record), "--workdir", str(tmp_path / "work"), "--smoke"]
    assert main(["bench", "data", *arguments]) == 1
    assert "error: row s0: bench data one_patch must end with a line of JSON" in capsys.readouterr().err
    assert [one["row"] for one in read_records(record, "data")] == ["s4"]


def test_a_picture_holds_the_record_s_other_rows_of_the_same_sizes(tmp_path, monkeypatch, quick):
    seen = []
    monkeypatch.setattr(picture, "draw", lambda rows, host: seen.append([row["row"] for row in rows]) or b"png")
    more = [
        "--record",
        str(tmp_path / "r.jsonl"),
        "--picture",
        str(tmp_path / "p.png"),
        "--workdir",
        str(tmp_path / "w"),
    ]
    main(["bench", "data", "--rows", "ladder", "--smoke", *more])
    main(["bench", "data", "--rows", "s4", "--smoke", *more])
    main(["bench", "data", "--rows", "s4", *more])
    assert seen == [["ladder"], ["s4", "ladder"], ["s4"]]


def test_the_picture_marks_where_a_bar_would_have_to_end():
    rows = [made_up("s4").to_json(), made_up("volumes").to_json()]
    host = {"cpu": "made up", "cores": 2}
    with_mark = picture.draw(rows, host)
    rows[0]["targets"][0]["mark"] = None
    assert with_mark.startswith(b"\x89PNG")
    assert picture.draw(rows, host) != with_mark
    assert picture.draw([], host).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (
            ["--rounds", "0", "--steps", "-1"],
            ["--rounds must be at least 1, got 0", "--steps must be at least 1, got -1"],
        ),
        (["--volumes", "0"], ["--volumes must be at least 1, got 0"]),
        (["--rows", "monai"], ["--rows monai must come with --monai, got none"]),
        (["--monai", "/no/python"], ["--monai must name a Python, found none at /no/python"]),
        (["--case", "/no/case"], ["--case must name the folder of a BraTS case, found none at /no/case"]),
    ],
)
def test_bad_settings_are_refused_before_anything_is_made(tmp_path, capsys, arguments, messages):
    assert main(["bench", "data", "--workdir", str(tmp_path / "work"), *arguments]) == 2
    told = capsys.readouterr().err
    for message in messages:
        assert message in told
    assert not (tmp_path / "work").exists()


def test_cleaning_ends_without_measuring(tmp_path, capsys):
    (tmp_path / "work").mkdir()
    assert main(["bench", "data", "--workdir", str(tmp_path / "work"), "--clean"]) == 0
    assert not (tmp_path / "work").exists()
    assert capsys.readouterr().out == ""


def test_the_peer_s_script_and_the_project_know_nothing_of_each_other():
    def imported(path):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (name.name for name in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield f"{node.module}.{node.names[0].name}"

    names = set(imported(FOLDER / "monai_peer.py"))
    assert not [name for name in names if name.split(".")[0] in ("cpu3d", "models", "memory_estimator")]
    for path in FOLDER.glob("*.py"):
        assert not [name for name in imported(path) if "monai" in name and path.name != "monai_peer.py"], path


@pytest.mark.slow
def test_all_rows_run_in_processes_of_their_own(tmp_path):
    record = tmp_path / "data.jsonl"
    more = ["--smoke", "--rounds", "1", "--steps", "12", "--record", str(record), "--picture", str(tmp_path / "p.png")]
    assert main(["bench", "data", "--workdir", str(tmp_path / "work"), *more]) == 0
    assert [one["row"] for one in read_records(record, "data")] == [row for row in command.ROWS if row != "monai"]
