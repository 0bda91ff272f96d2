"""`bench learning`: small runs to their records; tables, differences and pictures of records."""

import dataclasses
import io
import json
import re

import numpy as np
import pytest
from matplotlib import colors, image

from cpu3d import processes
from cpu3d.__main__ import main
from cpu3d.bench.learning_results import (
    draw_learning,
    learning_table,
    merged,
    paired,
    regions_table,
)
from cpu3d.bench.study import points_of
from cpu3d.bench.tables import tables
from cpu3d.errors import DivergedError, InputError
from cpu3d.plan import make_plan
from cpu3d.processes import RunFailedError
from cpu3d.run.config_json import load_config
from cpu3d.util.records import append_record, read_records
from memory_estimator.common.table import PALETTE
from tests.cpu3d.data.made_datasets import brats_case
from tests.cpu3d.runs import HOST, written_weights

pytestmark = pytest.mark.usefixtures("graphs_as_written", "compiled_once")

NETWORK = ["--filters", "2", "--depth", "2", "--dtype", "float32", "--optimizer", "sgd"]


@pytest.fixture
def calls(monkeypatch):
    """The commands that were called, in this process: what becomes of processes is tested with
    comparisons."""
    done = []

    def here(command, *more, **about):
        done.append(command)
        return main(
            [*command, *(["--workers", "1"] if command[0] in ("phantom", "prepare") else [])]
        )

    for module in ("cpu3d.bench.learning", "cpu3d.bench.study", "cpu3d.processes"):
        monkeypatch.setattr(f"{module}.call", here)
    return done


def test_a_run_on_phantoms_is_recorded(tmp_path, capsys, calls):
    file = tmp_path / "learning.jsonl"
    line = ["bench", "learning", "--workdir", str(tmp_path / "work"), "--task", "context"]
    line += ["--shape", "32", "40", "32", "--cases", "2", "1", "--steps", "2", "--seeds", "0"]
    options = [*NETWORK, "--no-flip"]  # a validation is of one pass, so an answer is to be
    line += ["--record", str(file), "--", *options]
    assert main(line) == 0
    (record,) = read_records(file, "learning")
    assert (record["task"], record["options"]) == ("context", options)
    assert (record["shape"], record["cases"], record["folds"]) == ([32, 40, 32], [2, 1], None)
    (curve,) = record["curves"]
    first, last = curve["points"]
    assert (first["step"], last["step"], set(last["dice"])) == (1, 2, {"WT", "TC", "ET"})
    assert 0 < first["full_steps"] < last["full_steps"] - 0.9, "the last step is in full"
    assert 0 < first["seconds"] < last["seconds"]
    (case,) = curve["cases"]
    assert set(case["regions"]) == {"WT", "TC", "ET"}
    dice = {region: scores["dice"] for region, scores in case["regions"].items()}
    assert dice == pytest.approx(last["dice"], abs=1e-6), "the last weights, nothing removed"
    said = capsys.readouterr()
    assert "--filters 2" in said.out
    assert re.search("plan: 1 run of 2 steps: .*(scoring|time unknown)", said.err), said.err


def test_folds_are_measured_once_and_added_call_by_call(tmp_path, phantom_store, calls, capsys):
    file = tmp_path / "study.jsonl"
    work = tmp_path / "work"
    line = ["bench", "learning", "--store", str(phantom_store.folder), "--workdir", str(work)]
    line += ["--folds", "2", "--seeds", "0", "--name", "tiny", "--record", str(file)]
    options = ["--", *NETWORK, "--steps", "1"]
    assert main([*line, "--only", "2", *options]) == 0
    calls.clear()
    brats_case(tmp_path / "BraTS2021_00001", "brats2017")
    line += ["--also", str(tmp_path / "BraTS2021_00001")]
    assert main([*line, "--json", *options]) == 0
    done = [command[0] for command in calls]
    assert done == ["train", "evaluate", "predict", "predict"], "the other fold, the case by both"
    both = read_records(file, "learning")[-1]
    assert str(phantom_store.folder) not in file.read_text(encoding="utf-8"), "no folder of a host"
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["curves"] == both["curves"]
    assert [(curve["seed"], curve["fold"]) for curve in both["curves"]] == [(0, "1/2"), (0, "2/2")]
    scored = sorted(case["case_id"] for curve in both["curves"] for case in curve["cases"])
    split = phantom_store.manifest.split
    assert scored == sorted([*split["train"], *split["val"]]), "each once, and no test case"
    for curve in both["curves"]:
        (further,) = curve["further"]
        assert further["case_id"] == "BraTS2021_00001"
        assert further["regions"]["ET"]["empty"] in ("", "prediction"), "its code is 4"
    calls.clear()
    assert main([*line, *options]) == 0
    assert calls == []
    capsys.readouterr()
    turned = ["--", "--force", "--steps", "1", "--optimizer", "sgd", *NETWORK[:-2]]
    assert main([*line, "--only", "1", "--json", *turned]) == 0, "the same options in another order"
    assert json.loads(capsys.readouterr().out)["curves"] == both["curves"], "all that is there"
    assert calls == []
    assert len(read_records(file, "learning")) == 2, "no line of what is recorded already"
    (study,) = merged(read_records(file, "learning"))
    assert study["curves"] == both["curves"]
    assert main([*line, *options, "--optimizer", "adam"]) == 2
    said = capsys.readouterr().err
    assert "options of" in said
    assert f"got -- {' '.join(NETWORK)} --steps 1 --optimizer adam" in said
    assert "choose another --name" in said


def test_networks_of_a_study_have_the_coarse_steps_of_those_before(tmp_path, phantom_store, calls):
    line = ["bench", "learning", "--store", str(phantom_store.folder), "--workdir", str(tmp_path)]
    line += ["--folds", "2", "--seeds", "0", "--name", "tiny", "--only"]
    options = ["--", *NETWORK, "--steps", "1"]
    assert main([*line, "2", *options]) == 0
    before = tmp_path / "tiny" / "seed0-fold2of2" / "config.json"
    content = json.loads(before.read_text())
    assert content["curriculum"] == "off", "half of so small a grid does not pay"
    before.write_text(json.dumps({**content, "curriculum": "half", "coarse_stride": [1, 2, 2]}))
    assert main([*line, "1", *options]) == 0
    after = load_config(tmp_path / "tiny" / "seed0-fold1of2")
    assert (after.curriculum, after.coarse_stride) == ("half", (1, 2, 2))


def test_what_fails_is_named_and_left_out(tmp_path, phantom_store, calls, monkeypatch, capsys):
    file = tmp_path / "study.jsonl"
    here = processes.call

    def diverging(command, *more, **about):
        if command[0] == "train" and "1/2" in command:
            raise RunFailedError("it must succeed", DivergedError.exit_code, "train diverged")
        return here(command)

    monkeypatch.setattr(processes, "call", diverging)
    line = ["bench", "learning", "--store", str(phantom_store.folder), "--folds", "2"]
    line += ["--seeds", "0", "--workdir", str(tmp_path / "work"), "--record", str(file)]
    options = ["--", *NETWORK, "--steps", "1"]
    assert main([*line, *options]) == DivergedError.exit_code
    (record,) = read_records(file, "learning")
    assert [curve["fold"] for curve in record["curves"]] == ["2/2"]
    assert "fold 1/2 is left out: train diverged" in capsys.readouterr().out
    assert main([*line, "--only", "1", *options]) == DivergedError.exit_code
    assert len(read_records(file, "learning")) == 1, "no record of nothing"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--folds", "2"], "--workdir must name a folder"),
        (["--workdir", "W", "--folds", "2", "--", "--fold", "1/2"], "without --fold, got 1/2"),
        (["--workdir", "W", "--folds", "2", "--", "--patience", "3"], "without --patience, got 3"),
        (["--workdir", "W", "--folds", "2", "--", "--colour"], "options of train, got .*colour"),
        (["--workdir", "W", "--folds", "2", "--only", "3"], "--only .* some of the 2 folds, got 3"),
        (["--workdir", "W", "--folds", "2", "--only", "1", "3"], "2 folds, got 1 and 3"),
        (["--workdir", "W", "--folds", "2", "--only", "1", "1"], "--only must differ"),
        (["--workdir", "W", "--only", "1"], "--only must come with --folds, got 1"),
        (["--workdir", "W", "--folds", "9"], "at most as many .*, got 1/9"),
        (["--workdir", "W", "--also", "W"], "--also .* a labelled case .*, got no case"),
        (["--workdir", "W", "--seeds", "1", "1"], "--seeds must differ, got 1 and 1"),
        (["--workdir", "W", "--name", "a", "--name", "b"], "--name .* once, got a and b"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, phantom_store, calls, capsys, words, message):
    words = [str(tmp_path) if word == "W" else word for word in words]
    assert main(["bench", "learning", "--store", str(phantom_store.folder), *words]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert calls == []


def test_a_point_has_the_full_steps_and_the_seconds_of_training_until_then(tiny_run):
    config = dataclasses.replace(load_config(tiny_run), coarse_grid=(8, 8, 8), coarse_steps=1)
    held = {"event": "validation", "step": 2, "seconds": 50.0, "dice": {"WT": 0.5, "ET": 1.0}}
    steps = [{"event": "step", "step": step, "step_s": 2.0} for step in (1, 2)]
    events = [
        {"event": "start", "step": 0},
        *steps,
        held,
        {"event": "end", "step": 2, "seconds": 99},
    ]
    # One step of 8^3 voxels and one of 16^3.
    wanted = {"step": 2, "full_steps": 1.125, "seconds": 4.0, "dice": {"WT": 0.5, "ET": 1.0}}
    assert points_of(events, config) == [wanted]


# --- Records ---

ABOUT = {
    "task": "small",
    "shape": [40, 48, 36],
    "cases": [8, 4],
    "steps": 16,
    "options": ["--epochs", "2"],
    "host": {"cpu": "made up", "cores": 2},
}


def point(step, *dice):
    costs = {"full_steps": step / 4, "seconds": step / 2}
    return {"step": step, **costs, "dice": dict(zip(("WT", "ET"), dice))}


def record(name, *curves, **changes):
    return {**ABOUT, "name": name, "curves": list(curves), **changes}


OLD = [
    {"seed": 0, "points": [point(8, 0.5, 0.1), point(16, 0.8, 0.6)], "lesions": {}},
    {"seed": 1, "points": [point(8, 0.7, 0.3), point(16, 0.4, 0.4)], "lesions": {}},
]


def scored(seed, fold, **cases):
    """A network's curve; `cases`: case id -> Dice of WT and of ET, whose truth is empty if that is
    None or 1."""
    listed = []
    for case_id, (wt, et) in cases.items():
        regions = {}
        for region, dice in (("WT", wt), ("ET", et)):
            of = {"dice": dice or 0, "lesion_dice": dice or 0, "lesion_sensitivity": 1.0}
            empty = {None: "truth", 1: "both"}.get(dice, "")
            regions[region] = {**of, "false_positives": 2.0 - seed, "empty": empty}
        listed.append({"case_id": case_id, "regions": regions})
    means = [sum(of[index] or 0 for of in cases.values()) / len(cases) for index in (0, 1)]
    end = point(16, *means)
    return {"seed": seed, "fold": fold, "points": [point(8, 0.1, 0.1), end], "cases": listed}


def test_records_become_a_table_and_a_picture(tmp_path):
    (row,) = learning_table([record("before", *OLD)]).rows
    costs = ["4.0", "8.0", "-", "-"]
    assert list(row) == ["small", "before", "2", *costs, "0.550", "0.400 to 0.700", "-"]
    for name, own in (("before", OLD), ("after", OLD), ("after", OLD[:1])):
        append_record(tmp_path / "learning.jsonl", "learning", record(name, *own))
    rows = [line for line in tables(tmp_path) if line.startswith("| small ")]
    assert [row.split(" | ")[1] for row in rows] == ["before", "after"]
    command = ["bench", "tables", "--records", str(tmp_path), "--learning", str(tmp_path / "a.png")]
    assert main([*command, "--learning-seconds", str(tmp_path / "b.png")]) == 0
    sizes = [(tmp_path / name).stat().st_size for name in ("a.png", "b.png")]
    assert min(sizes) > 5000


def test_tables_take_a_folder_with_several_files_of_studies_or_the_files_by_name(tmp_path, capsys):
    for name in ("phantoms", "brats"):
        changes = {"task": name, "options": ["--epochs", "2"]}
        append_record(tmp_path / f"{name}.jsonl", "learning", record("before", *OLD, **changes))
    append_record(tmp_path / "pairs.jsonl", "differences", {})
    assert main(["bench", "tables", "--records", str(tmp_path)]) == 0
    page = capsys.readouterr().out
    assert [line for line in page.splitlines() if line.startswith("###")] == [
        "### brats",
        "### phantoms",
    ]
    picture = tmp_path / "a.png"
    line = [
        "bench",
        "tables",
        "--studies",
        str(tmp_path / "brats.jsonl"),
        "--learning",
        str(picture),
    ]
    assert main(line) == 0
    page = capsys.readouterr().out
    assert "| brats " in page
    assert "| phantoms " not in page
    assert picture.stat().st_size > 5000
    assert main(["bench", "tables"]) == 2
    assert "--records must name a folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    line = ["bench", "tables", "--records", str(tmp_path / "empty"), "--learning", str(picture)]
    assert main(line) == 2
    assert "--records must have a file of `bench learning`, got none" in capsys.readouterr().err


def test_options_in_another_order_are_the_same_study():
    words = ["--epochs", "2", "--rotation-deg", "15"]
    first = record("a", OLD[0], options=words)
    (study,) = merged([first, record("a", OLD[1], options=[*words[2:], *words[:2]])])
    assert len(study["curves"]) == 2


def test_small_scores_fill_the_picture():
    """The rows of pixels that a curve of small scores takes are most of the picture's height."""
    curve = {"seed": 0, "points": [point(8, 0.001, 0.001), point(16, 0.02, 0.02)]}
    pixels = image.imread(io.BytesIO(draw_learning([record("a", curve)])))[..., :3]
    coloured = np.abs(pixels - colors.to_rgb(PALETTE[0])).max(-1) < 0.02
    rows = np.flatnonzero(coloured.any(1))
    assert np.ptp(rows) > 0.5 * len(pixels)
    below_legend = coloured[len(pixels) // 2 :]
    first_column = np.flatnonzero(below_legend.any(0)).min()
    assert first_column > 0.3 * pixels.shape[1], "the axis starts at 0, the curve at half its end"


def test_records_of_one_setting_are_one_study_of_the_newest_networks():
    first = record("a", scored(0, "1/2", p=(0.5, 0.5)), scored(0, "2/2", q=(0.5, 0.5)))
    later = record("a", scored(1, "1/2", p=(0.7, 0.7)), scored(0, "1/2", p=(0.9, 0.9)))
    (study,) = merged([first, later])
    networks = [(curve["seed"], curve["fold"]) for curve in study["curves"]]
    assert networks == [(0, "1/2"), (0, "2/2"), (1, "1/2")]
    assert study["curves"][0] == later["curves"][1]
    (row,) = learning_table([study]).rows
    assert list(row)[-3:] == ["0.700", "0.700 to 0.700", "0.500 to 0.800"], "seeds, then folds"
    (study,) = merged([first, {**later, "options": ["--epochs", "9"]}])
    assert len(study["curves"]) == 2, "a name with other options starts anew"
    assert len(merged([first, {**later, "host": {"cpu": "other", "cores": 2}}])) == 2
    assert len(merged([first, {**later, "split_hash": "other"}])) == 2


def test_regions_that_a_case_lacks_count_as_in_brats_and_are_told_apart():
    study = record("a", scored(0, "1/2", p=(0.5, 0.6), q=(0.7, None)), scored(0, "2/2", r=(0.9, 1)))
    wt, et, mean = (list(row) for row in regions_table([study]).rows)
    assert wt[1:6] == ["WT", "0.700", "0.700", "0.700", "3 of 3"]
    assert et[1:6] == ["ET", "0.533", "0.600", "0.600", "1 of 3"]
    assert mean[1:3] == ["mean", "0.617"]


def test_two_settings_are_compared_on_the_same_cases_seeds_and_folds():
    baseline = record(
        "a",
        scored(0, "1/2", p=(0.5, 0.6), q=(0.7, None)),
        scored(0, "2/2", r=(0.9, 1)),
        scored(1, "1/2", p=(0.5, 0.5), q=(0.5, 0.5)),
    )
    other = record(
        "b",
        scored(0, "1/2", p=(0.6, 0.6), q=(0.7, 1)),
        scored(0, "2/2", r=(0.8, 1)),
        scored(1, "1/2", p=(0.9, 0.9), q=(0.9, 0.9)),
        scored(2, "1/2", p=(0.9, 0.9), q=(0.9, 0.9)),
    )
    pair = paired(baseline, other)
    assert (pair.seeds, pair.cases, pair.left_out) == ([0], ["p", "q", "r"], [1])
    wt = pair.difference("WT", "dice")
    assert wt["mean"] == pytest.approx(0)
    assert (wt["better"], wt["worse"], wt["equal"]) == (1, 1, 1)
    result = pair.to_json()
    assert result["further"] == {"b": {}}
    for study, dice in ((baseline, 0.4), (other, 0.9)):
        for curve in study["curves"]:
            curve["further"] = scored(0, "", z=(dice, 0.5))["cases"]
    further = paired(baseline, other).further
    assert further["WT"]["dice"]["mean"] == pytest.approx(0.5)
    assert further["WT"]["dice"]["seeds"] == 3, "the networks of both"
    assert further["ET"]["dice"]["mean"] == 0
    et = result["differences"]["b"]["ET"]["dice"]
    assert et["mean"] == pytest.approx(1 / 3), "nothing is predicted any more where nothing is"
    assert result["where_present"]["b"]["ET"]["dice"]["mean"] == 0
    assert "WT" not in result["where_present"]["b"], "all cases have it"
    assert result["of_folds"]["WT"] == pytest.approx({"1/2": 0.05, "2/2": -0.1})
    assert result["of_folds"]["mean"] == pytest.approx({"1/2": 0.275, "2/2": -0.05})
    with pytest.raises(InputError, match="folds of b must be that of a, 2, got 5"):
        paired({**baseline, "folds": 2}, {**other, "folds": 5})
    with pytest.raises(InputError, match="must share a seed and an untouched case"):
        paired(baseline, record("b", scored(3, "1/2", p=(0.6, 0.6))))


def test_settings_are_chosen_from_one_or_two_files_and_their_differences_recorded(tmp_path, capsys):
    networks = [scored(seed, "", p=(0.5, 0.6), q=(0.7, 0.8)) for seed in (0, 1)]
    better = [scored(seed, "", p=(0.6, 0.6), q=(0.8, 0.8)) for seed in (0, 1)]
    one, two, pairs = (tmp_path / name for name in ("one.jsonl", "learning.jsonl", "pairs.jsonl"))
    append_record(one, "learning", record("a", *networks))
    for name, curves in (("a", better), ("b", networks), ("c", better)):
        append_record(two, "learning", record(name, *curves))
    line = ["bench", "learning", "--compare"]
    chosen = ["--name", "b", "--name", "c", "--record", str(pairs), "--json"]
    assert main([*line, str(two), *chosen]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["baseline"] == "b"
    assert result["differences"]["c"]["WT"]["dice"]["mean"] == pytest.approx(0.1)
    (kept,) = read_records(pairs, "differences")
    assert kept["differences"] == result["differences"]
    assert main([*line, str(one), str(two), "--name", "a"]) == 0
    assert "learning: a against one: a" in capsys.readouterr().out
    for words, message in (
        ([str(two)], "--name must choose two of the settings .*, a, b and c"),
        ([str(two), "--name", "b", "--name", "x"], "must hold one study x"),
        ([str(one), str(two)], "must hold one study, got a on small, b on small"),
        ([str(one), str(one), str(two)], "one or two files, got 3"),
        ([str(two), "--", "--epochs", "2"], "without options of train"),
    ):
        assert main([*line, *words]) == 2
        said = capsys.readouterr().err
        assert re.search(message, said), said
    picture = tmp_path / "pair.png"
    command = ["bench", "tables", "--records", str(tmp_path), "--differences", str(picture)]
    assert main(command) == 0
    assert picture.stat().st_size > 5000
    assert "c against a" in capsys.readouterr().out


def test_a_start_from_other_weights_is_measured_unless_they_have_seen_what_is_scored(
    tmp_path, phantom_store, calls, monkeypatch, capsys
):
    small = {"filters": 2, "depth": 2, "dtype": "float32", "optimizer": "sgd", "steps": 1}
    config = make_plan(phantom_store, tmp_path / "nowhere", HOST, small).config
    written_weights(config, tmp_path / "seen")
    elsewhere = dataclasses.replace(config, store="/nowhere", split_hash="0" * 12)
    written_weights(elsewhere, tmp_path / "source")
    monkeypatch.chdir(tmp_path)
    line = ["bench", "learning", "--store", str(phantom_store.folder), "--workdir", "work"]
    line += ["--folds", "2", "--only", "2", "--seeds", "0", "--name"]
    options = ["--", *NETWORK, "--steps", "1", "--init"]
    assert main([*line, "seen", *options, "seen"]) == 2
    assert "held-out patients" in capsys.readouterr().err
    assert calls == []
    assert main([*line, "tiny", *options, "source"]) == 0
    record = load_config(tmp_path / "work/tiny/seed0-fold2of2").init_record
    assert record.file == str(tmp_path / "source/checkpoints/best.npz")
    (command,) = [command for command in calls if command[0] == "train"]
    assert command[-command[::-1].index("--init")] == str(tmp_path / "source")
