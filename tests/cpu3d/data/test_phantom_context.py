"""Phantoms that only a whole volume can tell: the rule is far away, and there is no trace of it near a lesion."""

import argparse
import json

import numpy as np
import pytest
from scipy.ndimage import label as components

from cpu3d.data import phantom as phantom_module
from cpu3d.data.layouts import read_dataset
from cpu3d.data.phantom import phantom_case, write_phantom
from cpu3d.data.phantom_context import CLEARANCE, FAR, NEAR, RULES, blind_patch
from cpu3d.errors import InputError

SMALL = (40, 48, 36)
SHAPE = (64, 80, 56)
CONTEXTS = [context for context in RULES if context != "none"]


@pytest.fixture(scope="module")
def twins():
    """Context -> pairs of cases of the same random numbers, with the rule and without: (image, label) each."""
    return {
        context: [
            [phantom_case(SHAPE, seed=1, index=index, context=context, holds=holds) for holds in (True, False)]
            for index in range(3)
        ]
        for context in ("landmark", "count")
    }


@pytest.mark.parametrize("context", ["landmark", "count"])
def test_nothing_within_a_patch_of_a_lesion_tells_the_rule(twins, context):
    for (image, label), (other, other_label) in twins[context]:
        length = np.ptp(along(1, image[..., 0] > 0)) + 1
        differ = along(1, (image != other).any(axis=-1))
        core = along(1, label > 1)
        gap = max(differ.min() - core.max(), core.min() - differ.max())
        assert gap > CLEARANCE * length
        assert gap >= blind_patch(context, SHAPE), "what a patch must span to hold both"
        beside = np.ones(SHAPE, bool)
        beside[:, differ.min() : differ.max() + 1] = False
        # There the lesion is the same voxel by voxel, but for what its rim is called.
        assert np.array_equal(label[beside] > 1, other_label[beside] > 1)
        assert set(zip(label[beside].tolist(), other_label[beside].tolist())) == {
            (0, 0),
            (1, 1),
            (2, 2),
            (3, 3),
            (3, 2),
        }


def test_a_blind_patch_is_as_long_as_the_gap_of_the_shortest_head():
    """Of 240 voxels the shortest head takes 0.96 of 174, and 0.42 of that is 70.2."""
    assert blind_patch("count", (240, 240, 155)) == 70
    assert blind_patch("side", (240, 240, 155)) is None, "a patch of any size may hold the midline"
    assert blind_patch("none", (240, 240, 155)) is None


def test_a_landmark_s_place_leaves_no_trace_in_what_a_volume_is_normalised_by():
    """The twins' statistics differ by far less than those of any two cases do."""
    pairs = [
        [
            summary(phantom_case(SMALL, seed=3, index=index, context="landmark", holds=holds)[0])
            for holds in (True, False)
        ]
        for index in range(12)
    ]
    between_cases = np.std([with_rule for with_rule, _ in pairs], axis=0)
    by_the_rule = np.abs(np.mean([with_rule - without for with_rule, without in pairs], axis=0))
    assert (by_the_rule < 0.5 * between_cases).all()


@pytest.mark.parametrize("context", CONTEXTS)
def test_only_the_rim_s_name_follows_the_rule(context):
    for index in range(4):
        image, label = phantom_case(SMALL, seed=2, index=index, context=context)
        rims = image[..., 2][label == 3].mean()
        assert (label == 3).sum() > (label == 2).sum() if index % 2 == 0 else (label == 3).sum() < (label == 2).sum()
        assert set(np.unique(label)) == {0, 1, 2, 3}
        assert rims > 1.4 * image[..., 2][(label == 0) & (image[..., 0] > 0)].mean()


def test_side_is_the_patient_s_left():
    for index in range(6):
        _, label = phantom_case(SMALL, seed=0, index=index, context="side")
        # Axes are R A S: the first one grows to the patient's right.
        assert (np.argwhere(label > 1)[:, 0].mean() < SMALL[0] / 2) == (index % 2 == 0)


def test_count_is_of_lesions_in_opposite_quarters():
    for index in range(4):
        image, label = phantom_case(SHAPE, seed=0, index=index, context="count")
        parts, count = components(label > 1)
        sizes = np.bincount(parts.ravel())[1:]
        assert (sizes > 0.2 * sizes.max()).sum() == 1 + index % 2
        if count == 2:
            centres = np.array([np.argwhere(parts == number).mean(axis=0) for number in (1, 2)])
            middle = np.array([along(axis, image[..., 0] > 0).mean() for axis in (0, 1)])
            assert (np.prod(centres[:, :2] - middle, axis=0) < 0).all()


def test_a_landmark_is_brighter_than_the_brain_and_at_one_of_two_distances(twins):
    for (image, label), (other, _) in twins["landmark"]:
        length = np.ptp(along(1, image[..., 0] > 0)) + 1
        lesion = np.argwhere(label > 1)[:, 1].mean()
        for one, instead, distance in ((image, other, NEAR), (other, image, FAR)):
            nodule = (one > 1.2 * instead.astype(float)).all(axis=-1)
            assert abs(np.argwhere(nodule)[:, 1].mean() - lesion) / length * 2 == pytest.approx(distance, abs=0.12)
            brain = (one[..., 0] > 0) & ~nodule
            assert np.median(one[nodule, 1]) > 1.3 * np.quantile(one[brain, 1], 0.9)


def test_a_data_set_states_its_rule_and_keeps_to_it(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    phantom_module.add_arguments(parser)
    line = ["--out", str(tmp_path / "p"), "--cases", "2", "--shape", *map(str, SMALL), "--context", "count"]
    assert phantom_module.run(parser.parse_args([*line, "--workers", "1"])) == 0
    told = json.loads((tmp_path / "p/dataset.json").read_text())["description"]
    assert "called enhancing tumour where the lesion is the only one, else non-enhancing tumor" in told
    blind = blind_patch("count", SMALL)
    assert f"a patch of up to {blind} voxels from front to back has nothing in it that tells which" in told
    assert f"patches of up to {blind} voxels from front to back cannot tell enhancing tumour" in capsys.readouterr().out
    assert json.loads((tmp_path / "p/phantom.json").read_text())["context"] == "count"
    assert len(read_dataset(tmp_path / "p").cases) == 2
    for other in ("none", "landmark"):
        with pytest.raises(InputError, match="same phantom"):
            write_phantom(tmp_path / "p", cases=2, shape=SMALL, workers=1, context=other)
    write_phantom(tmp_path / "p", cases=2, shape=SMALL, workers=1, context="count")
    with pytest.raises(SystemExit):
        parser.parse_args(["--out", "p", "--context", "size"])


def test_a_folder_from_before_there_was_a_context_is_continued(tmp_path):
    out = write_phantom(tmp_path / "p", cases=1, shape=SMALL, workers=1)
    identity = json.loads((out / "phantom.json").read_text())
    del identity["context"]
    (out / "phantom.json").write_text(json.dumps(identity))
    write_phantom(out, cases=1, shape=SMALL, workers=1)
    with pytest.raises(InputError, match="same phantom"):
        write_phantom(out, cases=1, shape=SMALL, workers=1, context="side")


def along(axis, mask):
    """Places along an axis where a mask has a voxel."""
    return np.flatnonzero(mask.any(axis=tuple({0, 1, 2} - {axis})))


def summary(image):
    """Mean over spread of each channel within the brain: what normalisation leaves in its voxels."""
    voxels = image[image[..., 0] > 0].astype(float)
    return voxels.mean(axis=0) / voxels.std(axis=0)
