"""What a labelled case says about post-processing: counts, scores of any rule, JSON."""

import dataclasses

import numpy as np
import pytest
from scipy.ndimage import uniform_filter

from cpu3d.data.labels import label_from_regions, region_mask
from cpu3d.inference.postprocessing.evidence import Means, gather, means_of
from cpu3d.inference.postprocessing.rules import PostProcessing, Rule
from cpu3d.inference.scores import score_region
from tests.cpu3d.conftest import REGIONS
from tests.cpu3d.inference.postprocessing.made import MM, label_of


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


SPACING_MM = (0.8, 1.0, 2.5)


@pytest.fixture(scope="module", params=["all", "every third slice"])
def gathered(request):
    """Two cases, which of their voxels are ignored, and the evidence of each."""
    rng = np.random.default_rng(0)
    cases = [made_up_case(rng) for _ in range(2)]
    ignored = None
    if request.param != "all":
        ignored = np.ones(cases[0][1].shape, bool)
        ignored[..., ::3] = False
    return cases, ignored, [gather(*case, REGIONS, SPACING_MM, ignored) for case in cases]


@pytest.mark.parametrize(
    "rule",
    [
        Rule(share=0.3),
        Rule(share=0.5, stays_from=0.99),
        Rule(share=0.3, region_mm3=300),
        Rule(region_mm3=400),
    ],
)
def test_scores_are_those_of_the_painted_labels(rule, gathered):
    """No rule is painted to be scored. It judges whole components, also where few of their voxels
    are annotated."""
    cases, ignored, evidences = gathered
    chosen = PostProcessing({"WT": rule, "ET": rule})
    means = means_of([evidence.scores(chosen, REGIONS) for evidence in evidences])
    labels = [(truth, chosen.paint(answers, REGIONS, SPACING_MM)) for answers, truth in cases]
    for name, codes in REGIONS.items():
        scores = []
        for truth, label in labels:
            masks = region_mask(truth, codes), region_mask(label, codes)
            scores.append(score_region(*masks, SPACING_MM, ignored=ignored))
        for metric, mean in dataclasses.asdict(means[name]).items():
            assert mean == pytest.approx(np.mean([case[metric] for case in scores]))


def test_a_case_without_anything_is_evidence_too():
    empty = label_of()
    evidence = gather(np.zeros((*empty.shape, 3), np.float32), empty, REGIONS, MM)
    scores = evidence.scores(PostProcessing({"ET": Rule(region_mm3=50)}), REGIONS)
    assert means_of([scores])["ET"] == Means(1, 0, 1)
