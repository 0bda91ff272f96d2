"""Several runs as one answer, and which may be put together."""

import dataclasses

import numpy as np
import pytest

from cpu3d.config import load_config, save_config
from cpu3d.errors import InputError
from cpu3d.inference.ensemble import Ensemble, HeldOut, joined, load_configs
from tests.cpu3d.conftest import LABELS, REGIONS, FakePredictor


def test_the_answer_is_the_mean_of_the_probabilities_and_of_equal_ones_each(tiny_store):
    record = tiny_store.case("a")
    image = tiny_store.image("a")

    def predictor(sure):
        return FakePredictor(tiny_store.folder, REGIONS, LABELS, sure=sure)

    inside = predictor(1).probabilities(image, record)
    three = Ensemble([predictor(sure) for sure in (0.2, 0.9, 0.7)])
    np.testing.assert_allclose(three.probabilities(image, record), 0.6 * inside, rtol=1e-6)
    same = Ensemble([predictor(0.7)] * 3).probabilities(image, record)
    np.testing.assert_array_equal(same, predictor(0.7).probabilities(image, record))
    assert same.dtype == np.float32
    assert joined([three]) is three


def test_the_answers_of_the_predictors_are_left_as_they_are(tiny_store):
    record = tiny_store.case("a")
    kept = np.full((2, 2, 2, 3), 0.25, np.float32)

    class Constant(FakePredictor):
        def probabilities(self, image, record, channels=None):
            return kept

    ensemble = Ensemble([Constant(tiny_store.folder, REGIONS, LABELS)] * 2)
    np.testing.assert_array_equal(ensemble.probabilities(kept, record), kept)
    assert np.all(kept == 0.25)


def test_an_image_needs_what_any_of_the_runs_needs_in_the_stores_order():
    def predictor(*inputs):
        return FakePredictor(None, REGIONS, LABELS, channels=("FLAIR", "T1w", "T1gd", "T2w"), inputs=inputs)

    ensemble = Ensemble([predictor("T1gd"), predictor("FLAIR"), predictor("T1gd", "FLAIR")])
    assert ensemble.inputs == ("FLAIR", "T1gd")
    assert ensemble.channels == ("FLAIR", "T1w", "T1gd", "T2w")
    assert (ensemble.labels, ensemble.regions) == (LABELS, REGIONS)


def test_runs_of_different_inputs_are_each_given_their_own(tiny_store):
    asked = []

    class Noted(FakePredictor):
        def probabilities(self, image, record, channels=None):
            asked.append((self.inputs, channels, image.shape[-1]))
            return super().probabilities(image, record, channels)

    one, two = (Noted(None, REGIONS, LABELS, inputs=inputs) for inputs in (("FLAIR",), ("T1gd",)))
    Ensemble([one, two]).probabilities(tiny_store.image("a"), tiny_store.case("a"), ("FLAIR", "T1gd"))
    assert asked == [(("FLAIR",), ("FLAIR", "T1gd"), 2), (("T1gd",), ("FLAIR", "T1gd"), 2)]


def test_a_case_held_out_is_answered_by_its_own_fold_alone(tiny_store):
    right, wrong = (FakePredictor(None, REGIONS, LABELS, sure=sure) for sure in (0.9, 0.1))
    both = HeldOut([right, wrong], [("a", "c"), ("b",)])
    for case_id, most in (("a", 0.9), ("b", 0.1), ("c", 0.9)):
        answer = both.probabilities(tiny_store.image(case_id), tiny_store.case(case_id))
        assert answer.max() == pytest.approx(most)
    with pytest.raises(KeyError, match="d"):
        both.probabilities(tiny_store.image("d"), tiny_store.case("d"))


def test_all_folds_in_any_order_and_runs_without_folds_can_be_put_together(fold_runs):
    assert [config.fold for config in load_configs(fold_runs("3/3", "1/3", "2/3"))] == ["3/3", "1/3", "2/3"]


def test_runs_without_folds_can_be_put_together(fold_runs):
    assert len(load_configs(fold_runs("", ""))) == 2


@pytest.mark.parametrize("fold", ["", "2/5"])
def test_a_single_run_is_no_ensemble_and_may_be_any_fold(fold_runs, fold):
    assert load_configs(fold_runs(fold))[0].fold == fold


@pytest.mark.parametrize(
    ("folds", "told"),
    [
        (("1/5", "2/5", "4/5"), "runs must be all folds of 5, got 1/5, 2/5 and 4/5, missing 3/5, 5/5; train those"),
        (("2/10", "10/10"), "runs must be all folds of 10, got 2/10 and 10/10, missing 1/10, 3/10"),
        (("1/2", "1/2", "2/2"), r"runs must be of different folds, got 1/2 for \S*run-1 and \S*run-2; leave one out"),
        (("1/2", "2/4"), "runs must be folds of one number of parts, got 1/2 and 2/4"),
        (("1/2", "", "2/2"), r"runs must all be of folds, or none of them, got no fold for \S*run-2"),
    ],
)
def test_folds_that_are_no_cross_validation_are_refused(fold_runs, folds, told):
    with pytest.raises(InputError, match=told):
        load_configs(fold_runs(*folds))


def test_some_folds_will_do_where_that_is_said_but_never_one_twice(fold_runs):
    runs = fold_runs("1/5", "4/5", "4/5")
    assert len(load_configs(runs[:2], some_folds=True)) == 2
    with pytest.raises(InputError, match="different folds, got 4/5"):
        load_configs(runs, some_folds=True)


def test_the_same_run_twice_is_refused(tiny_run):
    with pytest.raises(InputError, match=r"runs must differ, got \S*run 2 times; name it once"):
        load_configs([tiny_run, tiny_run.parent / "." / tiny_run.name])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("store_channels", ("T1gd", "FLAIR")),
        ("label_names", {0: "background", 1: "liver"}),
        ("region_codes", {**REGIONS, "ET": (2,)}),
        ("regions", ("WT", "ET", "TC")),
        ("split_hash", "another"),
    ],
)
def test_runs_of_another_store_or_split_or_of_other_regions_are_refused_with_both_values(fold_runs, name, value):
    first, second = fold_runs("", "")
    config = load_config(second)
    save_config(dataclasses.replace(config, **{name: value}), second)
    with pytest.raises(InputError) as caught:
        load_configs([first, second])
    (problem,) = caught.value.problems
    assert problem.startswith(f"{name} of run {second} must be ")
    for shown in (getattr(config, name), value):
        assert (", ".join(shown) if isinstance(shown, tuple) else str(shown)) in problem


def test_all_folders_that_are_no_runs_are_listed(tiny_run, tmp_path):
    with pytest.raises(InputError) as caught:
        load_configs([tiny_run, tmp_path / "none", tmp_path / "neither"])
    assert [str(tmp_path / name) in problem for name, problem in zip(("none", "neither"), caught.value.problems)] == [
        True
    ] * 2
