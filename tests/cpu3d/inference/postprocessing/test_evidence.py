"""What a labelled case says about post-processing: counts, scores of any rule, JSON."""

import dataclasses
import functools
import json

import numpy as np
import pytest
from scipy.ndimage import uniform_filter

from cpu3d.data.labels import label_from_regions, region_mask
from cpu3d.inference.postprocessing.evidence import Evidence, Means, gather, means_of
from cpu3d.inference.postprocessing.rules import PostProcessing, Rule
from cpu3d.inference.scores import score_region
from memory_estimator.common.files import typed
from tests.cpu3d.conftest import REGIONS
from tests.cpu3d.inference.postprocessing.made import BIG, MM, evidences_of, label_of, unsure

ISLAND = (1, (40, 20, 20), (10, 10, 3))  # 300 voxels
WITHIN = (2, (42, 22, 20), (5, 5, 2))  # 50 voxels of core in it


def test_what_is_kept_of_a_case():
    (evidence,) = evidences_of(((BIG, unsure(ISLAND), WITHIN), (BIG,)))
    whole = evidence.components["WT"]
    assert whole.voxels == (8000, 300)
    assert whole.probability == pytest.approx((0.99, 0.99))  # the core in the island is sure
    assert (whole.truth.truth_voxels, whole.truth.pairs) == ((8000,), ((0, 0, 8000),))
    assert evidence.components["TC"].inside == {"WT": (1,)}
    assert evidence.components["ET"].voxels == ()


def test_what_lies_in_a_removed_part_goes_with_it():
    (evidence,) = evidences_of(((BIG, ISLAND, WITHIN), (BIG,)))
    before = means_of([evidence.scores(PostProcessing(), REGIONS)])
    assert before["WT"] == Means(0.5, 1, pytest.approx(2 * 8000 / (8000 + 8300)))
    assert before["TC"] == Means(0, 1, 0)
    after = means_of([evidence.scores(PostProcessing({"WT": Rule(share=0.1)}), REGIONS)])
    assert after["WT"] == after["TC"] == Means(1, 0, 1)


def blobs(rng, share):
    noise = uniform_filter(rng.random((36, 36, 36)), 5)
    return noise > np.quantile(noise, 1 - share)


def made_up_case(rng):
    """Probabilities of blobs of all sizes beside a truth, some outside of the larger regions."""
    truth = label_from_regions(np.stack([blobs(rng, n) for n in (0.02, 0.01, 0.005)], -1), REGIONS)
    true = np.stack([region_mask(truth, codes) for codes in REGIONS.values()], -1)
    false = np.stack([blobs(rng, n) for n in (0.03, 0.03, 0.02)], -1)
    answers = np.where(true | false, 0.5 + 0.5 * rng.random(true.shape), 0.2)
    return answers.astype(np.float32), truth


def every_third_slice_annotated(shape):
    ignored = np.ones(shape, bool)
    ignored[..., ::3] = False
    return ignored


SPACING_MM = (0.8, 1.0, 2.5)


@functools.cache
def made_up_cases():
    """Two cases."""
    rng = np.random.default_rng(0)
    return [made_up_case(rng) for _ in range(2)]


@functools.cache
def evidence_of(annotated):
    """Which voxels of those cases are ignored, and the evidence of each."""
    cases = made_up_cases()
    ignored = None
    if annotated != "all":
        ignored = every_third_slice_annotated(cases[0][1].shape)
    return ignored, [gather(*case, REGIONS, SPACING_MM, ignored) for case in cases]


@pytest.mark.parametrize("annotated", ["all", "every third slice"])
@pytest.mark.parametrize(
    "rule",
    [
        Rule(),
        Rule(share=0.3),
        Rule(share=0.5, stays_from=0.99),
        Rule(share=0.3, region_mm3=300),
        Rule(region_mm3=400),
    ],
)
def test_scores_are_those_of_the_painted_labels(rule, annotated):
    """No rule is painted to be scored. It judges whole components, also where few of their voxels
    are annotated."""
    ignored, evidences = evidence_of(annotated)
    chosen = PostProcessing({"WT": rule, "ET": rule})
    means = means_of([evidence.scores(chosen, REGIONS) for evidence in evidences])
    labels = [
        (truth, chosen.paint(answers, REGIONS, SPACING_MM)) for answers, truth in made_up_cases()
    ]
    for name, codes in REGIONS.items():
        scores = []
        for truth, label in labels:
            masks = region_mask(truth, codes), region_mask(label, codes)
            scores.append(score_region(*masks, SPACING_MM, ignored=ignored))
        for metric, mean in dataclasses.asdict(means[name]).items():
            assert mean == pytest.approx(np.mean([case[metric] for case in scores]))


def test_evidence_is_read_from_json_as_it_was_written():
    for evidence in evidence_of("every third slice")[1]:
        written = json.loads(json.dumps(dataclasses.asdict(evidence)))
        assert typed(written, Evidence) == evidence


def test_a_case_without_anything_is_evidence_too():
    empty = label_of()
    evidence = gather(np.zeros((*empty.shape, 3), np.float32), empty, REGIONS, MM)
    scores = evidence.scores(PostProcessing({"ET": Rule(region_mm3=50)}), REGIONS)
    assert means_of([scores])["ET"] == Means(1, 0, 1)
