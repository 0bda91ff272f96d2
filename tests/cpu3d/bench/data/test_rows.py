"""`bench data` on tiny files: every row with its lines and targets, the record, the page, the picture."""

import contextlib
import json
import sys

import pytest

from cpu3d.__main__ import main
from cpu3d.bench.data import command, training
from cpu3d.bench.data.command import amount, draw, page_lines, targets_table
from cpu3d.bench.data.loading import augment, monai, s0, s4
from cpu3d.bench.data.timing import COLD, WARM, Effort, Line, Outcome, times_slower
from cpu3d.bench.data.training import ladder, many, spleen, volumes
from cpu3d.bench.harness import ProcessFailedError
from cpu3d.util.records import read_records

EFFORT = Effort(rounds=1, steps=12)

PEER = f"""#!{sys.executable}
import json, sys
request = json.loads(sys.argv[3])
print(json.dumps({{"sample_s": [0.5, 0.25], "fill_s": 3.0, "anonymous_bytes": 2**30, "peak_bytes": 2**31,
                   "versions": {{"monai": request["kind"]}}}}))
"""


def measured(row, files, targets, effort=EFFORT):
    """The row's content, whose lines and targets are complete."""
    content = row(files, effort).to_json()
    assert json.loads(json.dumps(content))["row"] == row.__name__
    assert len(content["targets"]) == targets
    assert all(line["n"] >= 1 and line["min"] >= 0 for line in content["lines"])
    return content


def names(content, state):
    return [line["name"] for line in content["lines"] if line["state"] == state]


def test_a_case_and_a_patch_are_loaded_in_every_way_warm_and_cold(bench_files, in_this_process):
    case = measured(s4, bench_files, 2)
    assert [len(names(case, state)) for state in (WARM, COLD)] == [13, 11]
    medians = {(line["name"], line["state"]): line["median"] for line in case["lines"]}
    ratio = medians[".nii.gz float32", WARM] / medians["store, int16 .npy", WARM]
    assert case["targets"][0]["value"] == pytest.approx(ratio)
    patch = measured(s0, bench_files, 3)
    assert [len(names(patch, state)) for state in (WARM, COLD)] == [11, 10]
    assert "store, ram" not in names(patch, COLD)


def test_training_is_fed_in_every_way_and_the_ladder_climbed_on_both_disks(bench_files, in_this_process, monkeypatch):
    feeds, rungs = (training.GZ, training.MMAP, training.HELD), (training.FLOAT, training.GRAPH, training.OURS)
    for name, some in (("FEEDS", feeds), ("OF_DISK", (training.PREAD,)), ("RUNGS", rungs)):
        monkeypatch.setattr(training, name, some)  # the slow test has all
    found = measured(spleen, bench_files, 2)
    assert (names(found, WARM), names(found, COLD)) == ([*feeds], [training.PREAD])
    assert "waits" in found["lines"][0]["note"]
    monkeypatch.setattr(training, "slow_disk", lambda *_: contextlib.nullcontext("a group"))
    found = measured(ladder, bench_files, 1)
    for state in ("cold, disk as it is", "cold, disk at 200 MB/s"):
        assert names(found, state) == [*rungs]
    monkeypatch.setattr(training, "slow_disk", lambda *_: contextlib.nullcontext(""))
    assert "no slow disk" in measured(ladder, bench_files, 0)["notes"][1]


def test_whole_volumes_and_many_entries_have_waits_processor_time_and_memory(bench_files, in_this_process):
    found = measured(volumes, bench_files, 4)
    assert [line["unit"] for line in found["lines"]] == ["%", "core-s", "core-s", "core-s", "MiB", "MiB"]
    assert found["targets"][3]["met"]
    assert measured(many, bench_files, 3)["title"] == "A store of 15 entries"


def test_augmentation_and_a_peer_in_another_python_are_timed(bench_files, in_this_process, tmp_path):
    assert len(measured(augment, bench_files, 0)["lines"]) == 12
    python = tmp_path / "python"
    python.write_text(PEER)
    python.chmod(0o755)
    found = measured(monai, bench_files, 0, Effort(rounds=1, monai=python))
    cache = found["lines"][1]
    assert (cache["name"], cache["min"], cache["max"]) == ("MONAI CacheDataset", 0.25, 0.5)
    assert cache["note"] == "first pass 3.0 s; 1.00 GiB anonymous, peak 2.00 GiB"
    assert found["notes"] == ["monai persistent"]
    assert names(found, WARM)[3:] == ["store, mmap", "store, ram"]


def made_up(row):
    lines = (Line("a way", WARM, (2.0, 4.0)), Line("the store", WARM, (0.5, 1.0)), Line("the store", COLD, (1.0,)))
    target = times_slower("way against store", lines, ("a way", WARM), ("the store", WARM), ">=", 10)
    return Outcome(row, f"Title of {row}", lines, (target,), ("a note",))


@pytest.fixture
def quick(monkeypatch):
    """Rows that are there at once; s0 fails, as its process would."""

    def measure(row):
        def made(files, effort):
            if row == "s0":
                raise ProcessFailedError("bench data must end with a line of JSON, exited with -9")
            return made_up(row)

        return made

    for row in ("s4", "s0", "ladder"):
        monkeypatch.setitem(command.ROWS, row, measure(row))


def test_rows_are_printed_recorded_and_drawn_and_one_that_fails_takes_no_other_along(tmp_path, capsys, quick):
    record, drawn = tmp_path / "r" / "data.jsonl", tmp_path / "p" / "data.png"
    more = ["--record", str(record), "--picture", str(drawn), "--workdir", str(tmp_path / "work"), "--smoke"]
    assert main(["bench", "data", "--rows", "s4", "s0", "ladder", *more]) == 1
    printed = capsys.readouterr()
    assert "s4: Title of s4" in printed.out
    assert "error: row s0: bench data must end with a line of JSON" in printed.err
    first, second = read_records(record, "data")
    assert (first["row"], second["row"]) == ("s4", "ladder")
    assert first["lines"][0] == {
        "name": "a way", "state": "warm", "unit": "s", "median": 3.0, "min": 2.0, "max": 4.0, "n": 2, "note": "",
    }  # fmt: skip
    assert (first["targets"][0]["met"], first["targets"][0]["mark"]) == (False, ["a way", "warm", 7.5])
    assert first["host"]["cores"] >= 1
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert "| a way | warm | 3 s | 2 s to 4 s |  |" in page_lines([first, {**first, "row": "unknown"}])
    assert list(targets_table([first]).rows[0]) == ["a case", "way against store", "4 x (**missed**)", "at least 10 x"]


def test_a_picture_holds_the_record_s_other_rows_of_the_same_sizes(tmp_path, monkeypatch, quick):
    seen = []
    monkeypatch.setattr(command, "draw", lambda rows, host: seen.append([row["row"] for row in rows]) or b"png")
    more = ["--record", str(tmp_path / "r"), "--picture", str(tmp_path / "p.png"), "--workdir", str(tmp_path / "w")]
    for row, smoke in (("ladder", ["--smoke"]), ("s4", ["--smoke"]), ("s4", [])):
        main(["bench", "data", "--rows", row, *smoke, *more])
    assert seen == [["ladder"], ["s4", "ladder"], ["s4"]]


def test_the_picture_marks_where_a_bar_would_have_to_end():
    rows = [made_up("s4").to_json(), made_up("volumes").to_json()]
    host = {"cpu": "made up", "cores": 2}
    with_mark = draw(rows, host)
    rows[0]["targets"][0]["mark"] = None
    assert with_mark.startswith(b"\x89PNG")
    assert draw(rows, host) != with_mark
    assert draw([], host).startswith(b"\x89PNG")


def test_a_ratio_is_taken_round_by_round_and_met_at_its_bound():
    # The second round was slow for both: medians alone would say 10 / 2.
    lines = Line("slow", WARM, (10.0, 40.0, 10.0)), Line("fast", WARM, (1.0, 2.0, 5.0)), Line("once", WARM, (4.0,))
    for name, value in (("fast", 10), ("once", 2.5)):
        for rule in (">=", "<="):
            target = times_slower("t", lines, ("slow", WARM), (name, WARM), rule, value)
            assert (target.value, target.to_json()["met"]) == (value, True)
    assert [amount(value, "s") for value in (1.5, 0.0123, 4.2e-5)] == ["1.5 s", "12.3 ms", "42 us"]
    assert amount(1234.5, "MiB") == "1234 MiB"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "rounds must be at least 1, got 0"),
        (["--volumes", "0"], "volumes must be at least 1, got 0"),
        (["--rows", "monai"], "--rows monai must come with --monai, got none"),
        (["--monai", "/no/python"], "--monai must name a Python, found none at /no/python"),
        (["--case", "/no/case"], "--case must name the folder of a BraTS case, found none at /no/case"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_made(tmp_path, capsys, arguments, message):
    assert main(["bench", "data", "--workdir", str(tmp_path / "work"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_cleaning_ends_without_measuring(tmp_path, capsys):
    (tmp_path / "work").mkdir()
    assert main(["bench", "data", "--workdir", str(tmp_path / "work"), "--clean"]) == 0
    assert not (tmp_path / "work").exists()
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_all_rows_run_in_processes_of_their_own(tmp_path):
    record = tmp_path / "data.jsonl"
    more = ["--smoke", "--rounds", "1", "--steps", "12", "--record", str(record), "--picture", str(tmp_path / "p.png")]
    assert main(["bench", "data", "--workdir", str(tmp_path / "work"), *more]) == 0
    assert [one["row"] for one in read_records(record, "data")] == [row for row in command.ROWS if row != "monai"]
