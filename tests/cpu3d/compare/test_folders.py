import pytest

from cpu3d.compare.folders import grouped
from cpu3d.errors import InputError


def test_runs_that_differ_in_their_seed_alone_are_one_variant(make_run):
    folders = [make_run("whole", 0), make_run("whole", 1), make_run("patch", 0, mode="patch", grid=(8, 8, 8))]
    assert [(variant, seed) for variant, seed, _ in grouped(folders)] == [("whole", 0), ("whole", 1), ("patch", 0)]


def test_variants_of_one_name_are_told_apart(make_run, tmp_path):
    first, second = make_run("whole", 0), make_run("whole", 1, learning_rate=0.5)
    assert [variant for variant, _, _ in grouped([first, second])] == ["whole", "whole-2"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"split_hash": "0123456789ab"}, "share their split_hash, got {own} in .*first.* and 0123456789ab in .*other"),
        ({"fold": "1/2"}, "share their fold, got none in .* and 1/2 in"),
        ({"regions": ("WT",)}, "share their regions, got WT, TC, ET in .* and WT in"),
        ({"store": "/elsewhere"}, "share their store"),
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
