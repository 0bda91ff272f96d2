"""Phantoms that only a whole volume can tell: the rule is far away, and there is no trace of it near a lesion."""

import json

import numpy as np
import pytest

from cpu3d.data.stores import phantom as phantom_module
from cpu3d.data.stores.layouts import read_dataset
from cpu3d.data.stores.phantom import phantom_case, write_phantom
from cpu3d.data.stores.phantom_case import CLEARANCE, blind_patch
from cpu3d.errors import InputError
from tests.cpu3d.runs import run_command

SMALL = (40, 48, 36)
SHAPE = (64, 80, 56)


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


def test_a_data_set_states_its_rule_and_keeps_to_it(tmp_path, capsys):
    line = ["--out", str(tmp_path / "p"), "--cases", "2", "--shape", *map(str, SMALL), "--context", "count"]
    assert run_command(phantom_module, *line, "--workers", "1") == 0
    told = json.loads((tmp_path / "p/dataset.json").read_text())["description"]
    assert "called enhancing tumour where the lesion is the only one, else non-enhancing tumor" in told
    blind = blind_patch("count", SMALL)
    assert f"a patch of up to {blind} voxels from front to back has nothing in it that tells which" in told
    assert f"patches of up to {blind} voxels from front to back cannot tell enhancing tumour" in capsys.readouterr().out
    assert json.loads((tmp_path / "p/phantom.json").read_text())["context"] == "count"
    assert len(read_dataset(tmp_path / "p").cases) == 2
    for other in ("none", "landmark"):
        with pytest.raises(InputError, match="must be empty or this very one"):
            write_phantom(tmp_path / "p", cases=2, shape=SMALL, workers=1, context=other)
    write_phantom(tmp_path / "p", cases=2, shape=SMALL, workers=1, context="count")
    with pytest.raises(SystemExit):
        run_command(phantom_module, "--out", "p", "--context", "size")


def along(axis, mask):
    """Places along an axis where a mask has a voxel."""
    return np.flatnonzero(mask.any(axis=tuple({0, 1, 2} - {axis})))
