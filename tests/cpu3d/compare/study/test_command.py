"""The study with runs that are made up on the spot, so that what is asked of `train` and what follows is seen alone."""

import argparse
import json
import math

import pytest

from cpu3d.compare import command
from cpu3d.compare.gather import Costs, Point, RunResult
from cpu3d.compare.planned import keep_verdict, verdict_of
from cpu3d.compare.process import RunDivergedError, RunFailedError
from cpu3d.compare.study import command as resolutions
from cpu3d.compare.study import page as study_page
from cpu3d.compare.study import runs as study_runs
from cpu3d.compare.study.markdown import study_lines
from cpu3d.errors import InputError
from cpu3d.training_options import add_training_options
from cpu3d.util.lock import locked
from cpu3d.util.records import read_records

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
            error = verdict_of(run)
            if options.learning_rate >= bound and not error:
                error = RunDivergedError("train must end well: loss must be finite, got nan at step 1", 4, "diverged")
                keep_verdict(run, error)
                self.diverged.append(run.folder.name)
            if error:
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
    monkeypatch.setattr(study_runs, "carry_out", made_up.carry_out)
    monkeypatch.setattr(study_runs, "read_run", made_up.read_run)
    monkeypatch.setattr(resolutions, "render_study", lambda study: "")  # its pictures take most of the time
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


def test_all_arms_see_the_cases_equally_often(tiny_store, tmp_path, runs):
    compare(tiny_store, tmp_path / "out", "--resolutions", "1", "--batches", "1", "2", "--search-share", "0.2")
    steps = {name: (run.batch, run.steps) for name, run in runs.done.items()}
    assert steps["r1-b1-lr0.002-seed0"] == (1, 120)
    assert steps["r1-b2-lr0.002828-seed1"] == (2, 60)
    assert steps["search-r1-b1-lr0.002"] == (1, 24)
    assert steps["search-r1-b2-lr0.002828"] == (2, 12)


def test_the_start_follows_the_batch_and_the_optimizer(tiny_store, tmp_path, runs):
    options = ("--resolutions", "1", "--batches", "2", "--learning-rate", "0.001", "--search-factors", "1")
    compare(tiny_store, tmp_path / "adam", *options)
    assert results(tmp_path / "adam")["arms"][0]["start_rate"] == pytest.approx(0.001414)
    compare(tiny_store, tmp_path / "sgd", *options, "--optimizer", "sgd")
    assert results(tmp_path / "sgd")["arms"][0]["start_rate"] == 0.002


def test_what_train_is_told(tiny_store, tmp_path, runs):
    compare(tiny_store, tmp_path / "out", "--resolutions", "0.5", "--learning-rates", "0.003", "--recipe", "demo")
    assert runs.searched == []
    told = runs.done["r0.5-b1-lr0.003-seed1"]
    assert (told.resolution, told.batch, told.learning_rate, told.seed, told.steps) == (0.5, 1, 0.003, 1, 120)
    assert (told.recipe, told.mode, told.policy, told.filters) == ("demo", "whole", "speed", 2)
    assert told.warmup_steps == 5  # the recipe's
    assert told.validate_every == 10  # 4 of 40 epochs
    assert not hasattr(told, "epochs")


def test_a_short_run_does_not_warm_up_all_the_way(tiny_store, tmp_path, runs):
    compare(tiny_store, tmp_path / "out", "--resolutions", "1")
    assert runs.done["search-r1-b1-lr0.002"].warmup_steps == 3  # of 30 steps
    assert runs.done["r1-b1-lr0.002-seed0"].warmup_steps == 10


@pytest.mark.parametrize(
    ("best", "tried"),
    [(0.1, ["0.001", "0.002", "0.004", "0.008", "0.016"]), (1e-9, ["0.00025", "0.0005", "0.001", "0.002", "0.004"])],
)
def test_a_search_goes_on_twice_at_most(best, tried, tiny_store, tmp_path, monkeypatch):
    runs = install(monkeypatch, MadeUpRuns(best={1.0: best}))
    compare(tiny_store, tmp_path / "out", "--resolutions", "1")
    assert runs.searched == [f"search-r1-b1-lr{rate}" for rate in tried]
    assert any("better one may lie beyond" in line for line in results(tmp_path / "out")["reading"]) == (
        len(tried) == 5
    )


def test_named_rates_are_all_that_is_tried(tiny_store, tmp_path, runs):
    compare(tiny_store, tmp_path / "out", "--resolutions", "0.5", "--learning-rates", "0.001", "0.002")
    assert runs.searched == ["search-r0.5-b1-lr0.001", "search-r0.5-b1-lr0.002"]
    assert "at an end of what was tried" in " ".join(results(tmp_path / "out")["reading"])


def test_a_rate_that_diverges_is_an_answer(tiny_store, tmp_path, monkeypatch):
    runs = install(monkeypatch, MadeUpRuns(diverges_at=0.004))
    compare(tiny_store, tmp_path / "out", "--resolutions", "0.5")
    arm = results(tmp_path / "out")["arms"][0]
    assert [(trial["rate"], trial["dice"] is None) for trial in arm["trials"]] == [
        (0.001, False),
        (0.002, False),
        (0.004, True),
    ]
    assert arm["rate"] == 0.002
    assert runs.diverged == ["search-r0.5-b1-lr0.004"]
    compare(tiny_store, tmp_path / "out", "--resolutions", "0.5")
    assert runs.diverged == ["search-r0.5-b1-lr0.004"], "nobody trains it again to find out"


def test_a_chosen_rate_that_diverges_in_full_length_makes_place_for_the_next_best(tiny_store, tmp_path, monkeypatch):
    runs = install(monkeypatch, MadeUpRuns(full_diverges_at=0.004))
    compare(tiny_store, tmp_path / "out", "--resolutions", "0.5", "1")
    half, whole = results(tmp_path / "out")["arms"]
    assert (half["rate"], half["diverged"], len(half["runs"])) == (0.002, [0.004], 2)
    assert (whole["rate"], whole["diverged"]) == (0.002, [])
    assert runs.diverged == ["r0.5-b1-lr0.004-seed0"]
    assert {"r0.5-b1-lr0.002-seed0", "r0.5-b1-lr0.002-seed1"} <= runs.scored
    assert any("0.004 won the search but diverged in full" in line for line in results(tmp_path / "out")["reading"])


def test_a_study_whose_every_rate_diverges_in_full_length_fails(tiny_store, tmp_path, monkeypatch):
    runs = install(monkeypatch, MadeUpRuns(full_diverges_at=0))
    with pytest.raises(RunDivergedError):
        compare(tiny_store, tmp_path / "out", "--resolutions", "1")
    assert runs.diverged == [f"r1-b1-lr{rate}-seed0" for rate in ("0.002", "0.001", "0.004")], "from the best on"


def test_any_other_failure_ends_the_study(tiny_store, tmp_path, monkeypatch):
    def fail(*args, **more):
        raise RunFailedError("train must end well, got exit code 1: No space left on device", 1)

    monkeypatch.setattr(study_runs, "carry_out", fail)
    with pytest.raises(RunFailedError, match="No space left"):
        compare(tiny_store, tmp_path / "out", "--resolutions", "0.5")


def test_it_leaves_a_page_a_record_and_its_results(tiny_store, tmp_path, runs, monkeypatch, capsys):
    monkeypatch.setattr(resolutions, "render_study", study_page.render_study)
    out, record = tmp_path / "out", tmp_path / "records.jsonl"
    compare(tiny_store, out, "--resolutions", "0.5", "1", "--record", record, "--title", "Two of them", "--json")
    assert "<h1>Two of them</h1>" in (out / "report.html").read_text(encoding="utf-8")
    found = read_records(record, "resolutions")
    assert len(found) == 1
    assert str(tmp_path) not in json.dumps(found)
    assert study_lines(found[0])[0] == "### Two of them"
    assert f"- {found[0]['reading'][0]}" in study_lines(found[0])
    assert json.loads(capsys.readouterr().out)["results"] == results(out)
    arm = found[0]["arms"][0]
    assert arm["runs"][1]["dice"] == {"WT": [0.801, 0.701]}
    assert arm["runs"][1]["val_dice"] == 0.801


def test_more_seeds_resolutions_and_batches_are_added(tiny_store, tmp_path, runs):
    out = tmp_path / "out"
    compare(tiny_store, out, "--resolutions", "0.5")
    compare(tiny_store, out, "--resolutions", "0.5", "1", "--batches", "1", "2", "--seeds", "0", "1", "2")
    assert [(arm["batch"], arm["resolution"], len(arm["runs"])) for arm in results(out)["arms"]] == [
        (1, 0.5, 3),
        (1, 1.0, 3),
        (2, 0.5, 3),
        (2, 1.0, 3),
    ]


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


def test_nothing_is_written_while_another_process_writes_it(tiny_store, tmp_path, runs):
    out = tmp_path / "out"
    compare(tiny_store, out, "--resolutions", "0.5")
    before = (out / "compare.json").read_bytes()
    with locked(out, "test"), pytest.raises(InputError, match="one process at a time"):
        compare(tiny_store, out, "--resolutions", "1")
    assert (out / "compare.json").read_bytes() == before


def test_what_the_host_decided_is_kept(tiny_store, tmp_path, runs):
    out = tmp_path / "out"
    compare(tiny_store, out, "--resolutions", "0.5")
    path = out / "compare.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["plan"][0]["options"][content["plan"][0]["options"].index("--policy") + 1] = "lean"
    path.write_text(json.dumps(content), encoding="utf-8")
    compare(tiny_store, out, "--resolutions", "0.5", "1")
    assert {run.policy for name, run in runs.done.items() if "r0.5" in name} == {"lean"}
    assert {run.policy for name, run in runs.done.items() if "r1" in name} == {"speed"}


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
    assert "3 x 30" in said


def test_options_that_do_not_suit_are_all_told_at_once(tiny_store, tmp_path, runs):
    with pytest.raises(InputError) as error:
        compare(
            tiny_store, tmp_path / "out", "--resolutions", "0", "1.5", "--batches", "0", "--learning-rates", "-1",
            "--search-share", "0", "--resolution", "0.5", "--batch", "2", "--mode", "patch", "--minutes", "3",
            "--variant", "x", "",
        )  # fmt: skip
    names = [problem.split()[0] for problem in error.value.problems]
    assert names == [
        *("--resolutions", "--batches", "--learning-rates", "--search-share", "--resolution", "--batch", "--mode"),
        *("--variant", "--minutes"),
    ]


def test_an_arm_that_train_would_refuse_is_named(tiny_store, tmp_path, runs):
    with pytest.raises(InputError, match=r"resolution 0\.5 at batch 9: batch must be at most the 3 training cases"):
        compare(tiny_store, tmp_path / "out", "--resolutions", "0.5", "--batches", "9")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_real_runs_are_trained_scored_and_not_trained_again(tiny_store, tmp_path):
    out = tmp_path / "out"
    options = ("--resolutions", "0.5", "1", "--epochs", "2", "--learning-rates", "0.001", "0.01", "--seeds", "0")
    assert compare(tiny_store, out, *options) == 0
    before = results(out)
    assert [arm["grid"] for arm in before["arms"]] == [[6, 4, 4], [10, 8, 6]]
    assert all(0 <= value <= 1 for arm in before["arms"] for run in arm["runs"] for value in run["dice"]["WT"])
    logs = {path: path.stat().st_size for path in (out / "logs").iterdir()}
    assert len(logs) == 2 * (2 + 1 + 1)
    assert compare(tiny_store, out, *options) == 0
    assert results(out) == before
    assert {path: path.stat().st_size for path in (out / "logs").iterdir()} == logs
