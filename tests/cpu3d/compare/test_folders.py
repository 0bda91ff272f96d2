import pytest

from cpu3d.compare.folders import grouped
from cpu3d.errors import InputError
from cpu3d.util.lock import locked


def test_runs_that_differ_in_their_seed_alone_are_one_variant(make_run):
    folders = [make_run("whole", 0), make_run("whole", 1), make_run("patch", 0, mode="patch", grid=(8, 8, 8))]
    assert [(variant, seed) for variant, seed, _ in grouped(folders)] == [("whole", 0), ("whole", 1), ("patch", 0)]


def test_variants_of_one_name_are_told_apart(make_run, tmp_path):
    (tmp_path / "again").mkdir()
    other = make_run("whole", 0, learning_rate=0.5).rename(tmp_path / "again" / "whole-seed0")
    assert [variant for variant, _, _ in grouped([make_run("whole", 0), other])] == ["whole", "whole-2"]


@pytest.mark.parametrize(
    "settings",
    [
        {"store": "/elsewhere"},
        {"policy": "lean"},
        {"micro_batch": 1},
        {"validate_every": 7, "validations": 2, "patience": 3},
        {"device": "gpu:0", "read_mode": "ram", "save_minutes": 1.0},
    ],
)
def test_where_and_how_a_run_was_computed_makes_no_variant(make_run, settings):
    folders = [make_run("whole", 0), make_run("whole", 1, **settings)]
    assert [(variant, seed) for variant, seed, _ in grouped(folders)] == [("whole", 0), ("whole", 1)]


def test_what_batch_norm_sees_at_a_time_makes_one(make_run):
    folders = [make_run(f"by-{n}", 0, norm="batch", batch=4, micro_batch=n) for n in (1, 2)]
    assert [variant for variant, _, _ in grouped(folders)] == ["by-1", "by-2"]


def test_a_run_that_was_cut_off_is_refused_with_its_steps(make_run):
    folders = [make_run("whole"), make_run("half", steps=8, learning_rate=0.5, end="none")]
    with pytest.raises(InputError, match="half-seed0 must have been trained to its end, got 4 of 8 steps"):
        grouped(folders)
    assert len(grouped(folders, force=True)) == 2


@pytest.mark.parametrize(
    ("end", "is_over"),
    [
        ({"reason": "finished"}, True),
        ({"reason": "early stop", "step": 2}, True),
        ({"reason": "memory", "step": 3}, False),
        ({"reason": "interrupted", "step": 3}, False),
        ("none", False),
    ],
)
def test_only_a_run_that_finished_or_stopped_early_was_trained_to_its_end(make_run, end, is_over):
    folders = [make_run("whole"), make_run("other", learning_rate=0.5, end=end)]
    if is_over:
        assert len(grouped(folders)) == 2
    else:
        with pytest.raises(InputError, match="other-seed0 must have been trained to its end"):
            grouped(folders)


def test_a_run_that_is_being_trained_is_refused(make_run):
    folders = [make_run("whole"), make_run("other", learning_rate=0.5)]
    with locked(folders[1], "run"), pytest.raises(InputError, match=r"other-seed0 must be written by one process"):
        grouped(folders)


def test_a_variant_without_a_seed_of_the_baseline_is_refused(make_run):
    with pytest.raises(InputError, match=r"variant other must share a seed with whole, got \[1\] and \[0\]"):
        grouped([make_run("whole", 0), make_run("other", 1, learning_rate=0.5)])


def test_unequal_budgets_are_refused_unless_time_was_equal(make_run):
    """Steps of 1.5 s and a first one of 9 s."""
    whole, long = make_run("whole", step_s=1.5), make_run("long", learning_rate=0.5, step_s=3.0, batch=2)
    with pytest.raises(InputError, match=r"must have had one budget, got 0\.03277 million voxels in 18 s in .*long"):
        grouped([whole, long])
    assert len(grouped([whole, long], force=True)) == 2
    same_time = make_run("other", learning_rate=0.1, batch=2)
    assert len(grouped([whole, same_time])) == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"split_hash": "0123456789ab"}, "share their split_hash, got {own} in .*first.* and 0123456789ab in .*other"),
        ({"fold": "1/2"}, "share their fold, got none in .* and 1/2 in"),
        ({"regions": ("WT",)}, "share their regions, got WT, TC, ET in .* and WT in"),
    ],
)
def test_runs_of_other_cases_are_refused_with_both_values(make_run, tiny_store, settings, words):
    folders = [make_run("first"), make_run("other", scored=False, **settings)]
    with pytest.raises(InputError, match=words.format(own=tiny_store.manifest.split_hash)):
        grouped(folders)


def test_all_folders_that_are_no_trained_runs_are_named(make_run, tmp_path):
    with pytest.raises(InputError) as caught:
        grouped([tmp_path / "nothing", make_run("half", trained=False, scored=False)])
    assert "nothing must hold a config.json" in caught.value.problems[0]
    assert "half-seed0 must have been trained" in caught.value.problems[1]


def test_two_runs_alike_are_refused(make_run):
    with pytest.raises(InputError, match="alike with seed 0"):
        grouped([make_run("one"), make_run("two")])
