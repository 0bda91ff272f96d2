"""The study with runs that are made up on the spot, so that what is asked of `train` and what follows is seen alone."""

import argparse
import json
import math

import pytest

from cpu3d.compare import command, resolutions
from cpu3d.compare.resolutions import (
    Trial,
    by_dice,
    costs_table,
    page_sections,
    rate_beyond,
    scores_table,
    search_table,
    start_rate,
    studies_markdown,
)
from cpu3d.compare.run import Costs, Point, RunDivergedError, RunResult
from cpu3d.errors import InputError
from cpu3d.training_options import add_training_options
from cpu3d.util.records import read_records
from memory_estimator.table import Bold

BEST_RATE = {0.5: 0.004, 1.0: 0.002}
"""By resolution, of the made-up network."""

SMALL = ["--filters", "2", "--depth", "2", "--dtype", "float32", "--policy", "speed"]


class MadeUpRuns:
    """In the place of `carry_out` and `read_run`: Dice falls with the distance of a rate from the best one."""

    def __init__(self, diverges_at=math.inf, best=BEST_RATE, full_diverges_at=math.inf):
        self.diverges_at, self.best, self.full_diverges_at = diverges_at, best, full_diverges_at
        self.diverged = []
        """Names of the run folders that were trained until they diverged."""
        self.done = {}
        """Name of a run's folder -> the options it was trained with."""
        self.scored = set()

    def carry_out(self, runs, store, out, evaluation=None, *, force=False):
        for run in runs:
            parser = argparse.ArgumentParser()
            add_training_options(parser)
            options = parser.parse_args(run.options)
            assert options.seed == run.seed
            bound = self.diverges_at if run.folder.name.startswith("search") else self.full_diverges_at
            if options.learning_rate >= bound:
                self.diverged.append(run.folder.name)
                error = RunDivergedError("train must end well: loss must be finite, got nan at step 1", 4, "diverged")
                error.run = run
                raise error
            self.done[run.folder.name] = options
            if evaluation:
                self.scored.add(run.folder.name)

    def read_run(self, variant, seed, folder, split, **more):
        options = self.done[folder.name]
        off = abs(math.log2(options.learning_rate / self.best[options.resolution]))
        dice = round(0.8 - 0.05 * off + 0.001 * seed, 6)
        scores = {
            name: {"dice": {"a": dice, "b": dice - 0.1}, "hd95_mm": {"a": 2.0, "b": 4.0}} for name in ("WT", "mean")
        }
        assert split is None or folder.name in self.scored
        costs = Costs(
            steps=options.steps, voxels=1, train_s=10.0, steps_s=8.0, step_s=0.5, validation_s=1.0, case_train_s=0.5,
            train_peak_bytes=2**30, allocator_peak_bytes=None, core_hours=None, case_predict_s=0.1,
            predict_peak_bytes=None,
        )  # fmt: skip
        curve = (Point(1, 1.0, dice - 0.2), Point(2, 2.0, dice), Point(3, 3.0, dice - 0.1))
        return RunResult(variant, seed, folder, None, scores if split else {}, curve, costs, {}, folder)

    @property
    def searched(self):
        return sorted(name for name in self.done if name.startswith("search"))


@pytest.fixture
def runs(monkeypatch):
    return install(monkeypatch, MadeUpRuns())


def install(monkeypatch, made_up):
    monkeypatch.setattr(resolutions, "carry_out", made_up.carry_out)
    monkeypatch.setattr(resolutions, "read_run", made_up.read_run)
    monkeypatch.setattr(resolutions, "page_sections", lambda results: [])  # its pictures take most of the time
    return made_up


def compare(store, out, *options):
    """`compare` with these options: 3 cases to train on, 1 to validate on, 2 to test on."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = ["--store", store.folder, "--out", out, "--epochs", 40, "--seeds", 0, 1, *SMALL, *options]
    return command.run(parser.parse_args(list(map(str, words))))


def results(out):
    return json.loads((out / "compare.json").read_text(encoding="utf-8"))["results"]


def test_every_arm_is_searched_and_then_trained_with_its_own_rate(tiny_store, tmp_path, runs):
    assert compare(tiny_store, tmp_path / "out", "--resolutions", "1", "0.5") == 0
    assert runs.searched == [
        *(f"search-r0.5-b1-lr{rate}" for rate in ("0.001", "0.002", "0.004", "0.008")),
        *(f"search-r1-b1-lr{rate}" for rate in ("0.001", "0.002", "0.004")),
    ]
    full = ["r0.5-b1-lr0.004-seed0", "r0.5-b1-lr0.004-seed1", "r1-b1-lr0.002-seed0", "r1-b1-lr0.002-seed1"]
    assert sorted(runs.scored) == full
    assert set(runs.done) == {*runs.searched, *full}
    arms = results(tmp_path / "out")["arms"]
    assert [(arm["resolution"], arm["rate"], [trial["rate"] for trial in arm["trials"]]) for arm in arms] == [
        (0.5, 0.004, [0.001, 0.002, 0.004, 0.008]),
        (1.0, 0.002, [0.001, 0.002, 0.004]),
    ]
    assert (runs.done["search-r1-b1-lr0.002"].steps, runs.done["r1-b1-lr0.002-seed0"].steps) == (30, 120)
    assert (runs.done["search-r1-b1-lr0.002"].warmup_steps, runs.done["r1-b1-lr0.002-seed0"].warmup_steps) == (3, 10)


def test_what_train_is_told(tiny_store, tmp_path, runs):
    compare(tiny_store, tmp_path / "out", "--resolutions", "0.5", "--learning-rates", "0.003", "--recipe", "demo")
    assert runs.searched == []
    told = runs.done["r0.5-b1-lr0.003-seed1"]
    assert (told.resolution, told.batch, told.learning_rate, told.seed, told.steps) == (0.5, 1, 0.003, 1, 120)
    assert (told.recipe, told.mode, told.policy, told.filters) == ("demo", "whole", "speed", 2)
    assert told.warmup_steps == 5  # the recipe's
    assert told.validations == 4
    assert not hasattr(told, "epochs")


@pytest.mark.parametrize(
    ("best", "tried"),
    [(0.1, ["0.001", "0.002", "0.004", "0.008", "0.016"]), (1e-9, ["0.00025", "0.0005", "0.001", "0.002", "0.004"])],
)
def test_a_search_goes_on_twice_at_most(best, tried, tiny_store, tmp_path, monkeypatch):
    runs = install(monkeypatch, MadeUpRuns(best={1.0: best}))
    compare(tiny_store, tmp_path / "out", "--resolutions", "1")
    assert runs.searched == [f"search-r1-b1-lr{rate}" for rate in tried]
    assert search_table(results(tmp_path / "out")).rows[0][-2] == "yes", "a better one may lie beyond"


def test_a_chosen_rate_that_diverges_in_full_length_makes_place_for_the_next_best(tiny_store, tmp_path, monkeypatch):
    runs = install(monkeypatch, MadeUpRuns(full_diverges_at=0.004))
    compare(tiny_store, tmp_path / "out", "--resolutions", "0.5", "1")
    half, whole = results(tmp_path / "out")["arms"]
    assert (half["rate"], half["diverged"], len(half["runs"])) == (0.002, [0.004], 2)
    assert (whole["rate"], whole["diverged"]) == (0.002, [])
    assert runs.diverged == ["r0.5-b1-lr0.004-seed0"]
    assert {"r0.5-b1-lr0.002-seed0", "r0.5-b1-lr0.002-seed1"} <= runs.scored


def test_a_study_whose_every_rate_diverges_in_full_length_fails(tiny_store, tmp_path, monkeypatch):
    runs = install(monkeypatch, MadeUpRuns(full_diverges_at=0))
    with pytest.raises(RunDivergedError):
        compare(tiny_store, tmp_path / "out", "--resolutions", "1")
    assert runs.diverged == [f"r1-b1-lr{rate}-seed0" for rate in ("0.002", "0.001", "0.004")], "from the best on"


def test_it_leaves_a_page_a_record_and_its_results(tiny_store, tmp_path, runs, monkeypatch, capsys):
    monkeypatch.setattr(resolutions, "page_sections", page_sections)
    out, record = tmp_path / "out", tmp_path / "records.jsonl"
    compare(tiny_store, out, "--resolutions", "0.5", "1", "--record", record, "--title", "Two of them", "--json")
    assert "<h1>Two of them</h1>" in (out / "report.html").read_text(encoding="utf-8")
    found = read_records(record, "resolutions")
    assert len(found) == 1
    assert str(tmp_path) not in json.dumps(found)
    assert studies_markdown(found)[0] == "### Two of them"
    assert json.loads(capsys.readouterr().out)["results"] == results(out)
    arm = found[0]["arms"][0]
    assert arm["runs"][1]["dice"] == {"WT": [0.801, 0.701]}
    assert arm["runs"][1]["val_dice"] == 0.801


def test_what_was_there_stays_and_is_reported_with_what_is_added(tiny_store, tmp_path, runs):
    """As compare does with seeds: a call that asks for others does not forget the first ones."""
    out = tmp_path / "out"
    compare(tiny_store, out, "--resolutions", "0.5")
    compare(tiny_store, out, "--resolutions", "1", "--seeds", "5")
    assert [(arm["resolution"], [run["seed"] for run in arm["runs"]]) for arm in results(out)["arms"]] == [
        (0.5, [0, 1, 5]),
        (1.0, [0, 1, 5]),
    ]
    assert {run.seed for name, run in runs.done.items() if name.startswith("search")} == {0}, (
        "the search keeps its seed"
    )
    kept = json.loads((out / "compare.json").read_text(encoding="utf-8"))
    assert (kept["seeds"], len(kept["plan"])) == ([0, 1, 5], 2)


def test_rates_that_are_asked_for_are_searched_besides_those_that_were(tiny_store, tmp_path, runs):
    out = tmp_path / "out"
    compare(tiny_store, out, "--resolutions", "0.5", "1")
    compare(tiny_store, out, "--resolutions", "1", "--learning-rates", "0.0015")
    half, whole = results(out)["arms"]
    assert [trial["rate"] for trial in half["trials"]] == [0.001, 0.002, 0.004, 0.008]
    assert [trial["rate"] for trial in whole["trials"]] == [0.001, 0.0015, 0.002, 0.004]
    compare(tiny_store, out, "--resolutions", "1")
    assert [trial["rate"] for trial in results(out)["arms"][1]["trials"]] == [0.001, 0.0015, 0.002, 0.004]


def test_a_study_from_before_arms_had_rates_goes_on(tiny_store, tmp_path, runs):
    out = tmp_path / "out"
    compare(tiny_store, out, "--resolutions", "0.5")
    content, before = json.loads((out / "compare.json").read_text(encoding="utf-8")), results(out)
    for arm in content["plan"]:
        del arm["rates"], arm["goes_beyond"]
    (out / "compare.json").write_text(json.dumps(content), encoding="utf-8")
    compare(tiny_store, out, "--resolutions", "0.5")
    assert results(out) == before


def test_options_of_a_study_do_nothing_without_resolutions_and_are_refused(tiny_store, tmp_path):
    options = ("--batches", "1", "--search-factors", "1", "2", "--search-share", "0.3")
    with pytest.raises(InputError) as error:
        compare(tiny_store, tmp_path / "out", *options)
    assert [problem.split()[0] for problem in error.value.problems] == [
        "--batches",
        "--search-factors",
        "--search-share",
    ]


def test_another_study_is_refused_in_the_same_folder(tiny_store, tmp_path, runs):
    out = tmp_path / "out"
    compare(tiny_store, out, "--resolutions", "0.5")
    before = (out / "compare.json").read_bytes()
    with pytest.raises(InputError) as error:
        compare(tiny_store, out, "--resolutions", "0.5", "--epochs", "41", "--search-share", "0.5", "--norm", "batch")
    told = " ".join(error.value.problems)
    assert len(error.value.problems) == 3
    assert "epochs must stay" in told
    assert "search_share must stay" in told
    assert "settings.norm must stay" in told
    assert (out / "compare.json").read_bytes() == before


def test_a_dry_run_says_the_plan_and_leaves_nothing(tiny_store, tmp_path, runs, capsys):
    compare(tiny_store, tmp_path / "out", "--resolutions", "0.5", "1", "--dry-run")
    assert not (tmp_path / "out").exists()
    assert runs.done == {}
    said = capsys.readouterr().err
    assert "2 arms x 2 seeds, 40 epochs each" in said
    assert "3 x 30 steps" in said


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--resolutions", "0", "1.5"), "resolutions must be above 0, got 0.0"),
        (("--resolutions", "1.5"), "resolutions must be at most 1, got 1.5"),
        (("--resolutions", "1", "--batches", "0"), "batches must be at least 1, got 0"),
        (("--resolutions", "1", "--learning-rates", "-1"), "learning_rates must be above 0, got -1"),
        (("--resolutions", "1", "--search-share", "0"), "search_share must be above 0, got 0"),
    ],
)
def test_values_out_of_range_are_refused(tiny_store, tmp_path, options, problem):
    with pytest.raises(InputError, match=problem):
        compare(tiny_store, tmp_path / "out", *options)


def test_options_that_do_not_suit_are_all_named_at_once(tiny_store, tmp_path):
    options = ("--resolution", "0.5", "--batch", "2", "--mode", "patch", "--minutes", "3", "--variant", "x", "")
    with pytest.raises(InputError) as error:
        compare(tiny_store, tmp_path / "out", "--resolutions", "1", *options)
    names = [problem.split()[0] for problem in error.value.problems]
    assert names == ["--resolution", "--batch", "--mode", "--variant", "--minutes"]


def trials(**dice):
    """trials(r2=0.5): rate 2 had Dice 0.5."""
    return [Trial(float(name[1:]), value) for name, value in dice.items()]


@pytest.mark.parametrize(
    ("optimizer", "batch", "base_batch", "expected"),
    [
        ("adam", 1, 1, 0.002),
        ("adam", 4, 1, 0.004),
        ("adam", 1, 16, 0.0005),
        ("sgd", 4, 1, 0.008),
        ("sgd", 2, 8, 0.0005),
    ],
)
def test_the_start_grows_with_the_batch_or_for_adam_with_its_root(optimizer, batch, base_batch, expected):
    assert start_rate(0.002, batch=batch, base_batch=base_batch, optimizer=optimizer) == expected


def test_the_highest_dice_wins_and_of_equals_the_lower_rate():
    assert by_dice(trials(r1=0.5, r2=0.7, r4=0.6))[0].rate == 2
    assert by_dice(trials(r1=0.5, r2=0.7, r4=0.7))[0].rate == 2
    assert by_dice(trials(r1=0.1, r2=None))[0].rate == 1


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (trials(r1=0.5, r2=0.7, r4=0.6), None),
        (trials(r1=0.5, r2=0.6, r4=0.7), 8),
        (trials(r4=0.7, r1=0.5, r2=0.6), 8),  # in any order
        (trials(r1=0.7, r2=0.6, r4=0.5), 0.5),
        (trials(r1=0.7, r4=0.6), 0.25),  # the ratio is the range's own
        (trials(r1=0.5, r2=0.6, r4=None), None),  # what lies beyond would diverge too
        (trials(r1=0.5, r2=None), 0.5),
        (trials(r1=None, r2=None), 0.5),
        (trials(r1=0.5), None),
    ],
)
def test_a_search_goes_on_where_its_best_is_at_an_end(found, expected):
    assert rate_beyond(found) == expected


# --- Tables, of made-up results ---


def seed_run(seed, dice, regions, **more):
    """`dice`: that of the first of four cases; the others follow at -0.01 each."""
    by_case = [dice - 0.01 * number for number in range(4)]
    costs = {"step_s": 1.0, "train_s": 700.0, "peak_bytes": 2**30, "predict_s": 0.1}
    scores = {"dice": dict.fromkeys(regions, by_case), "hd95_mm": dict.fromkeys(regions, [3.0] * 4)}
    return {"seed": seed, "val_dice": dice, **scores, **costs, **more}


def arm(resolution, seeds, *, batch=1, rate=0.002, trials=((0.001, 0.5), (0.002, 0.6), (0.004, 0.5)), regions=("WT",)):
    """`seeds`: Dice of each seed's first case."""
    return {
        "resolution": resolution, "batch": batch, "grid": [round(48 * resolution)] * 3, "steps": 240 // batch,
        "search_steps": 60 // batch, "start_rate": 0.002, "rate": rate,
        "trials": [{"rate": rate, "dice": dice} for rate, dice in trials],
        "runs": [seed_run(number, dice, regions) for number, dice in enumerate(seeds)],
    }  # fmt: skip


def study(*arms):
    about = {
        "title": "Made up", "data": "<b>made up</b>", "split": "test", "epochs": 12, "search_share": 0.25,
        "cases": {"train": 20, "val": 4, "test": 4}, "network": "unet3d", "host": {"cpu": "made up", "cores": 2},
        "seeds": [run["seed"] for run in arms[0]["runs"]],
    }  # fmt: skip
    return {"about": about, "arms": list(arms)}


def column(table, name):
    return [row[list(table.columns).index(name)] for row in table.rows]


def test_the_tables_have_a_row_an_arm_by_batch_and_resolution():
    """Cases are 0.015 below their first on average."""
    regions = {"regions": ("WT", "ET")}
    found = study(
        arm(1.0, (0.50, 0.52), batch=4, **regions), arm(0.5, (0.60, 0.62), batch=4, **regions),
        arm(1.0, (0.80, 0.82), **regions), arm(0.5, (0.70, 0.72), **regions),
    )  # fmt: skip
    scores, costs = scores_table(found), costs_table(found)
    assert [row[:2] for row in scores.rows] == [("0.5", "1"), ("1", "1"), ("0.5", "4"), ("1", "4")]
    assert column(scores, "mean Dice")[0] == column(scores, "ET Dice")[0] == "0.695 ± 0.014"
    assert column(scores, "to the best of the batch") == [
        "-0.100 (-0.100 to -0.100)", "best", "best", "-0.100 (-0.100 to -0.100)"
    ]  # fmt: skip
    assert column(scores, "to the best of the resolution")[2:] == [
        "-0.100 (-0.100 to -0.100)", "-0.300 (-0.300 to -0.300)"
    ]  # fmt: skip
    assert dict(zip(costs.columns, costs.rows[1])) == {
        "resolution": "1", "batch": "1", "WT HD95": "3.0 ± 0.0", "ET HD95": "3.0 ± 0.0", "grid": "48 x 48 x 48",
        "steps": "240", "s a step": "1", "training": "0:11:40", "memory": "1.00 GiB", "s to predict a case": "0.1",
    }  # fmt: skip
    assert "<b>made up" not in "".join(table.html() for one in page_sections(found) for table in one.tables)


@pytest.mark.parametrize(
    ("best", "other", "counts"),
    [
        ((0.70, 0.80), (0.65, 0.75), True),
        ((0.60, 0.80), (0.55, 0.65), False),  # better by 0.05 and 0.15; Student's t is 0.635
        ((0.80,), (0.60,), False),  # one seed
    ],
)
def test_what_seeds_alone_may_make_does_not_count(best, other, counts):
    cell = column(scores_table(study(arm(0.5, other), arm(1.0, best))), "to the best of the batch")[0]
    assert isinstance(cell, Bold) == counts


def test_one_arm_of_one_region_has_nothing_to_be_compared_with():
    found = study(arm(1.0, (0.8,), trials=()))
    assert scores_table(found).rows == [("1", "1", "0.002", "0.785")]
    assert len(page_sections(found)) == 2, "no search"


def test_the_search_names_every_trial_and_its_winner():
    found = study(arm(1.0, (0.8,), trials=((0.002, 0.3), (0.004, None))))
    assert search_table(found).rows == [("1", "1", "60", "0.3000", "diverged", "yes", "-")]
    assert [isinstance(cell, Bold) for cell in search_table(found).rows[0]][3:5] == [True, False]
    assert "| 1 | 1 | 60 | **0.3000** | diverged | yes | - |" in studies_markdown([found])
