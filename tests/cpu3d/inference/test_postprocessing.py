"""Post-processing: what is removed and what it becomes, which rule is chosen, and what becomes of the decision."""

import dataclasses
import json

import numpy as np
import pytest
from scipy.ndimage import uniform_filter

from cpu3d.data.labels import label_from_regions, region_mask
from cpu3d.data.nifti import read_volume
from cpu3d.data.records import remake
from cpu3d.data.store import open_store, write_store
from cpu3d.errors import InputError
from cpu3d.inference import evaluate, predict
from cpu3d.inference.evaluate import scores_path
from cpu3d.inference.postprocessing import decision as postprocessing
from cpu3d.inference.postprocessing.choice import decide_from
from cpu3d.inference.postprocessing.decision import FILE, after, decide, postprocessing_of, read_decision
from cpu3d.inference.postprocessing.evidence import Means, gather
from cpu3d.inference.postprocessing.rules import PostProcessing, Rule, gentlest
from cpu3d.inference.scores import score_region
from cpu3d.run.config import load_config, save_config
from cpu3d.training.train import Options
from tests.cpu3d.conftest import LPS_2MM, REGIONS, make_store
from tests.cpu3d.runs import run_command

MM = (1.0, 1.0, 1.0)
SHAPE = (60, 40, 40)


def label_of(*parts, shape=SHAPE):
    """A label of boxes, each (code, corner, size along X, Y, Z)."""
    label = np.zeros(shape, np.uint8)
    for code, corner, size in parts:
        label[tuple(slice(at, at + n) for at, n in zip(corner, size))] = code
    return label


def choose(made, regions):
    """The choice on cases of (answers, truth, spacing)."""
    evidences = [gather(answers, truth, regions, spacing_mm) for answers, truth, spacing_mm in made]
    choice = decide_from(evidences, regions)
    return choice.chosen, choice.before, choice.after


def answers_of(label, regions=REGIONS):
    return np.stack([region_mask(label, codes) for codes in regions.values()], axis=-1) * np.float32(0.9)


BIG = (1, (2, 2, 2), (20, 20, 20))  # 8000 voxels
SMALL = (1, (40, 2, 2), (11, 37, 1))  # 407 voxels: a true lesion
ISLAND = (1, (40, 20, 20), (10, 10, 3))  # 300 voxels


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({}, (1, 2, 3, 3)),
        ({"WT": Rule(mm3=50)}, (0, 2, 3, 3)),
        ({"TC": Rule(mm3=50)}, (1, 1, 1, 3)),  # oedema, and the ET within it too
        ({"ET": Rule(mm3=50)}, (1, 2, 2, 3)),  # the rest of the core
        ({"ET": Rule(share=0.5)}, (1, 2, 2, 3)),
        ({"WT": Rule(share=0.9), "TC": Rule(mm3=8001), "ET": Rule()}, (0, 1, 1, 1)),
    ],
)
def test_a_part_that_is_removed_becomes_the_next_larger_region(rules, expected):
    label = label_of(
        BIG,
        (1, (40, 20, 20), (1, 1, 1)),
        (2, (4, 4, 4), (2, 2, 4)),
        (3, (4, 4, 4), (2, 2, 2)),
        (3, (10, 10, 10), (5, 5, 5)),
    )
    answers = answers_of(label)
    painted = PostProcessing({name: (rule,) for name, rule in rules.items()}).paint(answers, REGIONS, MM)
    assert tuple(painted[at] for at in ((40, 20, 20), (4, 4, 6), (4, 4, 4), (12, 12, 12))) == expected
    np.testing.assert_array_equal(answers, answers_of(label))


def test_a_bound_is_a_volume_and_parts_touch_at_corners():
    label = label_of(BIG, (1, (40, 20, 20), (2, 2, 1)), (1, (42, 22, 21), (2, 2, 1)))
    rule = PostProcessing({"WT": (Rule(mm3=50),)})
    for spacing_mm, kept in (((1, 1, 6), False), ((1, 1, 6.25), True), ((1, 1, 7), True)):  # 8 voxels: 48, 50, 56 mm3
        assert rule.paint(answers_of(label), REGIONS, spacing_mm)[40, 20, 20] == kept


def test_the_volume_of_a_part_on_a_sheared_grid_is_that_of_its_slanted_voxels():
    label = label_of((1, (2, 2, 2), (10, 10, 10)), (1, (20, 2, 2), (11, 10, 1)))
    upright, leaning = np.eye(3), np.array([[1, 0, 0], [0, 1, 0.5], [0, 0, 0.87]])
    rule = PostProcessing({"WT": (Rule(mm3=100),)})
    assert (rule.paint(answers_of(label), REGIONS, upright) > 0).sum() == 1110
    assert (rule.paint(answers_of(label), REGIONS, leaning) > 0).sum() == 1000  # 110 voxels are 96 mm3


def test_nested_answers_are_cut_to_the_larger_regions():
    answers = np.zeros((4, 1, 1, 3), np.float32)  # WT, TC, ET
    answers[:, 0, 0] = (0.9, 0.9, 0.9), (0.9, 0.1, 0.9), (0.1, 0.9, 0.9), (0.9, 0.9, 0.1)
    assert PostProcessing().paint(answers, REGIONS, MM).ravel().tolist() == [3, 3, 3, 2]
    assert PostProcessing(nested=True).paint(answers, REGIONS, MM).ravel().tolist() == [3, 1, 0, 2]


def test_several_runs_remove_what_each_of_them_would():
    first = PostProcessing({"WT": (Rule(mm3=100),), "TC": (Rule(share=0.1),)}, nested=True)
    both = gentlest([first, PostProcessing({"WT": (Rule(share=0.01),)})])
    assert (set(both.rules), both.nested, both.off) == ({"WT"}, False, "")
    label = label_of(BIG, (1, (40, 20, 20), (3, 3, 10)), (1, (50, 5, 5), (3, 3, 3)))  # 90 voxels: over 1 % of 8000
    painted = both.paint(answers_of(label), REGIONS, MM)
    assert (painted[40, 20, 20], painted[50, 5, 5]) == (1, 0)
    off = PostProcessing(off="why")
    assert (gentlest([first, off]), gentlest([first])) == (off, first)


def cases(*pairs, spacing_mm=MM, regions=REGIONS):
    """Cases of (predicted parts, true parts)."""
    return [(answers_of(label_of(*predicted), regions), label_of(*true), spacing_mm) for predicted, true in pairs]


WITH_ISLAND = ((BIG, SMALL, ISLAND), (BIG, SMALL))


def test_islands_go_and_a_true_lesion_of_407_voxels_stays():
    # 1 % of 8000 leaves the island of 300, 10 % takes the lesion of 407, and so does 600 flat; 400 mm3 is between.
    chosen, before, after_ = choose(cases(*[WITH_ISLAND] * 3), REGIONS)
    assert (chosen.rules, chosen.nested, chosen.off) == ({"WT": (Rule(mm3=400),)}, False, "")
    assert set(chosen.without) == {"TC", "ET"}  # no case has them
    # Two lesions found and a false positive, then two lesions; 2 * 8407 / (8407 + 8707) and 1.
    assert before["WT"] == Means(pytest.approx(2 / 3), 1, pytest.approx(2 * 8407 / (8407 + 8707)))
    assert after_["WT"] == Means(1, 0, 1)
    assert before["ET"] == after_["ET"] == Means(1, 0, 1)  # in no case


def test_no_rule_takes_a_lesion_that_is_found_in_one_case_for_the_mean_of_the_others():
    large = (1, (40, 20, 20), (10, 10, 5))  # an island of 500 voxels, in all but the last
    only = ((BIG, SMALL), (BIG, SMALL))
    chosen, before, after_ = choose(cases(*[((BIG, large), (BIG,))] * 3, only), REGIONS)
    assert chosen.rules == {}
    assert "WT (each that gains takes a true lesion" in chosen.off
    assert before == after_
    chosen, before, after_ = choose(cases(*[((BIG, large), (BIG,))] * 3), REGIONS)
    # 500 voxels are 6.25 % of 8000: 10 % and 800 mm3 remove them alike, and the share never removes all of a region.
    assert chosen.rules == {"WT": (Rule(share=0.1),)}
    assert (before["WT"].lesion_dice, after_["WT"].lesion_dice) == (0.5, 1)
    tiny = (1, (40, 20, 20), (2, 1, 1))  # every rule removes it: the middle one of the shares is taken
    chosen, _, _ = choose(cases(*[((BIG, tiny), (BIG,))] * 3), REGIONS)
    assert chosen.rules == {"WT": (Rule(share=0.01),)}


def test_a_region_has_a_rule_of_its_own_where_that_gains():
    core, small_core = (2, (4, 4, 4), (14, 14, 14)), (2, (40, 4, 4), (5, 4, 3))  # 60 voxels of 2744, a true lesion
    around, island = (1, (38, 2, 2), (9, 9, 8)), (1, (40, 20, 20), (6, 6, 6))  # 216 voxels of 8000, which is false
    false_core = (2, (20, 20, 20), (2, 2, 2))  # 8 voxels
    true = BIG, core, around, small_core
    pair = (*true, island, false_core), true
    chosen, _, after_ = choose(cases(*[pair] * 3), REGIONS)
    assert chosen.rules["WT"] == (Rule(share=0.03),)
    assert chosen.rules["TC"] == (Rule(share=0.003),)  # 3 % would take the small core
    assert after_["WT"] == after_["TC"] == Means(1, 0, 1)


def test_what_lies_in_a_removed_part_goes_with_it_and_needs_no_rule_of_its_own():
    tumour = BIG, (2, (4, 4, 4), (9, 9, 9)), SMALL
    island, within = (1, (26, 25, 20), (10, 10, 3)), (2, (28, 27, 20), (5, 5, 2))  # between the two that are true
    chosen, before, after_ = choose(cases(*[((*tumour, island, within), tumour)] * 3), REGIONS)
    assert chosen.rules == {"WT": (Rule(mm3=400),)}
    assert "none gains" in chosen.without["TC"]
    assert (before["TC"].false_positives, after_["TC"]) == (1, Means(1, 0, 1))


# --- A rule needs evidence of its own ---

CORE = (2, (4, 4, 4), (12, 12, 12))
ENHANCING = (3, (5, 5, 5), (6, 6, 6))  # 216 voxels in the core
FALSE_ET = (3, (12, 12, 12), (3, 3, 3))  # 27 voxels of ET in a core without any


@pytest.mark.parametrize("with_it", range(4))
def test_a_region_has_a_rule_only_if_three_validation_cases_have_it(with_it):
    """Where no case has it every part is an island, and a rule takes true lesions of other
    cases."""
    true = BIG, CORE, ENHANCING
    has, lacks = ((*true, FALSE_ET), true), ((BIG, CORE, FALSE_ET), (BIG, CORE))
    chosen, before, _ = choose(cases(*[has] * with_it, *[lacks] * (3 - with_it)), REGIONS)
    assert before["ET"].lesion_dice < 1
    if with_it == 3:
        assert set(chosen.rules) == {"ET"}
        return
    assert f"in {with_it} validation case" in chosen.without["ET"]
    lesion = label_of(BIG, CORE, (3, (8, 8, 8), (4, 4, 4)))  # of another case, 64 voxels
    np.testing.assert_array_equal(chosen.paint(answers_of(lesion), REGIONS, MM), lesion)


def test_a_region_that_gains_nothing_by_itself_has_no_rule_because_another_gains():
    cores = BIG, CORE, (2, (17, 17, 17), (2, 2, 2))  # 8 voxels of 1728: below 1 % of the largest
    chosen, _, _ = choose(cases(*[((BIG, CORE, ISLAND), (BIG, CORE))] * 3), REGIONS)
    assert set(chosen.rules) == {"WT"}
    assert "none gains" in chosen.without["TC"]
    painted = chosen.paint(answers_of(label_of(*cores)), REGIONS, MM)
    np.testing.assert_array_equal(painted, label_of(*cores))


@pytest.mark.parametrize("size", [2, 3])  # 8 and 27 voxels: too small to count as a lesion by BraTS
def test_no_rule_takes_a_true_part_that_was_found_however_small_it_is(size):
    tiny = (1, (40, 2, 2), (size, size, size))
    made = cases(((BIG, tiny, ISLAND), (BIG, tiny)), *[((BIG, ISLAND), (BIG,))] * 3)
    chosen, _, _ = choose(made, REGIONS)
    assert "WT" not in chosen.rules
    assert "true lesion" in chosen.without["WT"]
    made = cases(((BIG, ISLAND), (BIG, tiny)), *[((BIG, ISLAND), (BIG,))] * 3)  # not found: nothing is lost
    assert set(choose(made, REGIONS)[0].rules) == {"WT"}


def test_of_two_true_parts_of_one_lesion_neither_is_lost():
    """By BraTS parts that are 2 mm apart are one lesion, which the larger one detects alone."""
    near = (1, (24, 2, 2), (3, 3, 3))
    chosen, _, _ = choose(cases(*[((BIG, near, ISLAND), (BIG, near))] * 3), REGIONS)
    assert chosen.rules == {}


def test_small_parts_of_a_region_become_the_next_larger_and_leave_every_other_alone():
    small = (2, (17, 17, 17), (3, 3, 3))
    chosen, _, after_ = choose(cases(*[((BIG, CORE, ENHANCING, small), (BIG, CORE, ENHANCING))] * 3), REGIONS)
    assert set(chosen.rules) == {"TC"}
    assert after_["TC"] == after_["WT"] == after_["ET"] == Means(1, 0, 1)
    # Regions that share some of their voxels: removing one would take voxels from the other, or paint into it.
    crossing = {"all": (1, 2, 3), "a": (1, 2), "b": (2, 3)}
    made = cases(*[((BIG, CORE, small), (BIG, CORE))] * 3, regions=crossing)
    chosen, _, _ = choose(made, crossing)
    assert set(chosen.without) >= {"a", "b"}
    assert set(chosen.rules) <= {"all"}


def nested_case(*outside):
    """A tumour, and beside it answers of the regions at these positions outside of WT."""
    label = label_of(BIG, CORE, ENHANCING)
    answers = answers_of(label)
    for position in outside:
        answers[30 + 8 * position : 36 + 8 * position, :10, :10, position] = 0.9
    return answers, label, MM


def test_nesting_is_chosen_where_each_region_that_it_cuts_gains():
    chosen, before, after_ = choose([nested_case(1, 2)] * 3, REGIONS)
    assert (chosen.nested, chosen.rules) == (True, {})
    assert before["TC"].lesion_dice < after_["TC"].lesion_dice == 1
    assert before["ET"].lesion_dice < after_["ET"].lesion_dice == 1
    assert not choose([nested_case(1)] * 3, REGIONS)[0].nested  # ET gains nothing
    assert not choose([nested_case(1, 2)] * 2, REGIONS)[0].nested  # two cases


def test_organs_and_a_single_region_are_decided_too():
    for regions in ({"WT": (1,)}, {"a": (1,), "b": (2,)}):
        chosen, _, after_ = choose(cases(*[WITH_ISLAND] * 3, regions=regions), regions)
        assert chosen.rules == {next(iter(regions)): (Rule(mm3=400),)}
        assert len(after_) == len(regions)


def test_the_means_are_those_of_the_painted_labels():
    """The choice never paints a candidate: it adds up what it keeps of each case."""
    rng, spacing_mm = np.random.default_rng(0), (0.8, 1.0, 2.5)

    def blobs(share):
        noise = uniform_filter(rng.random((36, 36, 36)), 5)
        return noise > np.quantile(noise, 1 - share)

    made = []
    for _ in range(3):
        truth = label_from_regions(np.stack([blobs(0.02), blobs(0.01), blobs(0.005)], -1), REGIONS)
        made.append((answers_of(truth) + np.stack([blobs(0.03), blobs(0.03), blobs(0.02)], -1), truth, spacing_mm))
    chosen, before, after_ = choose(made, REGIONS)
    assert chosen.rules or chosen.nested
    for tried, means in ((PostProcessing(), before), (chosen, after_)):
        labels = [(truth, tried.paint(answers, REGIONS, spacing_mm)) for answers, truth, _ in made]
        for name, codes in REGIONS.items():
            scores = [score_region(*(region_mask(label, codes) for label in pair), spacing_mm) for pair in labels]
            for metric, mean in dataclasses.asdict(means[name]).items():
                assert mean == pytest.approx(np.mean([case[metric] for case in scores]))


@pytest.fixture
def predictor(fake_predictor, monkeypatch):
    """The fake predictor with a false part of 2 voxels of WT, far from the tumour."""
    answer = fake_predictor.probabilities
    fake_predictor.error = None

    def with_island(*case):
        if fake_predictor.error:
            raise fake_predictor.error
        answers = answer(*case)
        place = 2 if answers[15:].any() else 26
        answers[place : place + 2, 5, 4, 0] = 0.9
        return answers

    monkeypatch.setattr(fake_predictor, "probabilities", with_island)
    for command in (evaluate, postprocessing, predict):
        monkeypatch.setattr(command, "trained_predictors", lambda runs, *_: [fake_predictor] * len(runs))
    return fake_predictor


@pytest.fixture
def run(tiny_run, tmp_path, predictor):
    """A trained run with three validation cases, whose network answers right but for an island."""
    split = {"train": ("a",), "val": ("b", "c", "d"), "test": ("e", "f")}
    geometry = dataclasses.replace(LPS_2MM, shape=(30, 10, 8))
    store = make_store(tmp_path / "long", tmp_path / "long source", split=split, geometry=geometry)
    config = load_config(tiny_run)
    save_config(dataclasses.replace(config, store=str(store.folder), split_hash=store.manifest.split_hash), tiny_run)
    (tiny_run / "checkpoints").mkdir()
    (tiny_run / "checkpoints/best.npz").write_bytes(b"weights")
    return tiny_run


def of(run, weights="best"):
    return postprocessing_of(run, load_config(run), weights)


def test_a_run_decides_once_and_again_when_its_weights_are_others(run, predictor):
    assert "not decided" in of(run).off
    decision = decide(run)
    # A tumour of 125 voxels and an island of 2, which is 1.6 % of it.
    assert decision.chosen.rules == {"WT": (Rule(share=0.03),)}
    assert set(decision.chosen.without) == {"TC", "ET"}
    assert decision.cases == 3
    assert decision.cases_with == {"WT": 3, "TC": 3, "ET": 3}
    assert decision.before["WT"] == Means(0.5, 1, pytest.approx(250 / 252))
    assert decision.after["WT"] == Means(1, 0, 1)
    predictor.error = AssertionError("no network is asked again")
    assert decide(run) == decision == read_decision(run, load_config(run))
    assert of(run) == decision.chosen
    assert "best weights" in of(run, "last").off
    (run / "checkpoints/best.npz").write_bytes(b"others")
    assert "other weights" in of(run).off
    predictor.error = None
    again = decide(run)
    assert decision != again == dataclasses.replace(decision, weights_sha256=again.weights_sha256)


def test_below_three_validation_cases_no_network_is_asked(tiny_run, predictor):
    (tiny_run / "checkpoints").mkdir()
    (tiny_run / "checkpoints/best.npz").write_bytes(b"weights")
    predictor.error = AssertionError("asked")
    assert decide(tiny_run).cases == 1
    assert "1 validation case" in of(tiny_run).off


def test_a_damaged_decision_is_refused_and_made_again(run):
    decision = decide(run)
    for spoil, got in (
        (lambda content: content.update(schema=2), "schema 2"),
        (lambda content: content["cases_with"].update(NCR=3), "other regions"),
        (lambda content: content.pop("chosen"), "chosen"),
        (lambda content: content["before"].pop("ET"), "other regions than WT, TC, ET"),
        (lambda content: content["chosen"]["rules"].update(NCR=[{"mm3": 1}]), "other regions"),
    ):
        content = json.loads((run / FILE).read_text())
        spoil(content)
        (run / FILE).write_text(json.dumps(content))
        with pytest.raises(InputError, match=rf"{FILE} must be .* got .*{got}.*`train`"):
            of(run)
        assert decide(run) == decision


def test_rules_of_an_earlier_version_are_not_applied_and_are_decided_again(run):
    decision = decide(run)
    content = json.loads((run / FILE).read_text())
    del content["cases_with"], content["chosen"]["without"]  # as it was written then
    (run / FILE).write_text(json.dumps(content))
    assert "earlier version" in of(run).off
    assert "`train`" in of(run).off
    assert read_decision(run, load_config(run)).chosen.rules == decision.chosen.rules
    assert decide(run) == decision
    assert of(run) == decision.chosen


def test_a_region_that_three_cases_lack_has_no_rule_and_where_none_has_three_no_network_is_asked(
    run, predictor, capsys
):
    config = load_config(run)
    store = open_store(config.store)

    def without(*case_ids):
        return [
            dataclasses.replace(case, label_voxels={0: 1}) if case.case_id in case_ids else case
            for case in store.manifest.cases
        ]

    write_store(store.folder, remake(store.manifest, cases=without("b", "c")))
    predictor.error = AssertionError("asked")
    after(Options(store=store.folder, run=run), {})
    assert "in 1 validation case" in capsys.readouterr().err
    assert decide(run).cases_with == {"WT": 1, "TC": 1, "ET": 1}
    assert "WT" in of(run).off


def test_after_a_training_a_failure_is_printed_and_ctrl_c_leaves_the_run_as_it_was(run, predictor, monkeypatch, capsys):
    options = Options(store=load_config(run).store, run=run)
    before = sorted(path.name for path in run.iterdir())
    for error, word in ((OSError("disk full"), "disk full"), (MemoryError(), "MemoryError")):
        monkeypatch.setattr(predictor, "error", error)
        after(options, {})
        assert word in capsys.readouterr().err
    monkeypatch.setattr(predictor, "error", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt, match="the same command"):
        after(options, {})
    assert sorted(path.name for path in run.iterdir()) == before


def test_of_several_workers_the_chief_decides_alone(run, monkeypatch):
    cluster = {"worker": ["127.0.0.1:4001", "127.0.0.1:4002"]}
    for index in (1, 0):
        assert not (run / FILE).exists()
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}))
        after(Options(store=load_config(run).store, run=run), {})
    assert (run / FILE).exists()


def test_scores_are_of_what_is_left_and_raw_ones_of_the_answer(run):
    def scores(*words):
        assert run_command(evaluate, "--run", run, *words) == 0
        return json.loads(scores_path(run).read_text())

    assert scores()["summary"]["WT"]["false_positives"]["mean"] == 1  # nothing is decided yet
    decide(run)
    decided, raw = scores(), scores("--raw")
    assert (decided["summary"]["WT"]["false_positives"]["mean"], decided["mean_dice"]) == (0, 1)
    assert raw["summary"]["WT"]["lesion_dice"]["mean"] == 0.5
    assert {case["postprocessing"] for case in decided["cases"]} == {of(run).words}
    assert "3 %" in of(run).words
    assert "--raw" in raw["cases"][0]["postprocessing"]


def test_predictions_lack_what_is_removed_and_probabilities_keep_it(run, tmp_path, capsys):
    def predicted(*words):
        image = tmp_path / "long source/e.nii.gz"
        assert run_command(predict, "--run", run, "--image", image, "--out", tmp_path / "out", *words) == 0
        return json.loads((tmp_path / "out/e.json").read_text())

    decide(run)
    content, printed = predicted("--probabilities"), capsys.readouterr().out
    assert content["volumes_ml"]["WT"] == pytest.approx(0.25)
    assert of(run).words == content["postprocessing"]
    assert of(run).words in " ".join(printed.split())
    probability = read_volume(tmp_path / "out" / content["probabilities"]["WT"])[0]
    assert np.count_nonzero(probability >= 0.5) == 127
    assert predicted("--raw")["volumes_ml"]["WT"] == pytest.approx(0.254)
