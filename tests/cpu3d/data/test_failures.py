"""A damaged file in a data set of four cases is named with its reason, and the good cases are
kept."""

import gzip
import re

import numpy as np
import pytest

from cpu3d.data.stores.prepare import StoreSettings, prepare
from cpu3d.errors import InputError
from tests.cpu3d.data.made_datasets import (
    ALL,
    brats_case,
    decathlon,
    tiny_image,
    tiny_label,
    write_nifti,
)

BAD = "BRATS_002"
IMAGE = np.stack([tiny_image(20 + channel) for channel in range(4)], -1)
"""That of this case, as `decathlon` makes it."""


GZIP = r"imagesTr/BRATS_002\.nii\.gz must be whole gzip data, got "
THIRD = np.arange(4) == 2


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (lambda file: file[:-6] + bytes([file[-6] ^ 16]) + file[-5:], GZIP),
        # Without gzip's frame, whatever the name says.
        (
            lambda file: gzip.decompress(file)[:-1],
            r"must hold 1312 bytes for shape \(6, 5, 4, 4\), got 1311",
        ),
        (
            lambda _: IMAGE * ~THIRD,
            r"channel t1gd of .*2\.nii\.gz must not be empty, got zeros only",
        ),
        (
            lambda _: np.where(THIRD & (IMAGE != 0), 7, IMAGE),
            "must vary over its non-zero .*, got 7 everywhere",
        ),
        (
            lambda _: IMAGE[..., :3],
            r'must hold 4 channels, .*, got 3; correct "channel_names" or "mod',
        ),
    ],
)
def test_a_bad_image_is_refused_for_its_reason(tmp_path, spoil, rule):
    path = decathlon(tmp_path / "data", 4) / f"imagesTr/{BAD}.nii.gz"
    bad = spoil(path.read_bytes())
    if isinstance(bad, bytes):
        path.write_bytes(bad)
    else:
        write_nifti(path, bad)
    with pytest.raises(InputError) as error:
        prepare(tmp_path / "data", tmp_path / "store", **ALL)
    reason, advice = error.value.problems
    assert re.search(rule, reason), reason
    assert re.search("got 1 bad case.* --skip-bad", advice)


def test_nan_and_infinite_voxels_become_background_when_asked_and_are_counted(tmp_path, capsys):
    sick = IMAGE.astype(np.float32)
    sick[1, 1, 1] = np.nan
    sick[2, 2, 2] = -np.inf
    write_nifti(decathlon(tmp_path / "data", 4) / f"imagesTr/{BAD}.nii.gz", sick)
    prepare(tmp_path / "data", tmp_path / "store", **ALL, settings=StoreSettings(zero_nan=True))
    assert "note: BRATS_002: 8 NaN or infinite voxels" in capsys.readouterr().out


WIDER = np.diag([1.05, 1.0, 1.0, 1.0])
LPS = np.diag([-1.0, -1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("suffix", "volume", "affine", "rule"),
    [
        ("seg", tiny_label(1)[..., :3], np.eye(4), r"shape \(6, 5, 3\), not \(6, 5, 4\)"),
        ("seg", tiny_label(1), LPS, r"a corner 6\.4 voxels from its place"),
        ("t1c", tiny_image(), WIDER, r"a corner 0\.275 voxels from its place"),
    ],
)
def test_a_modality_or_label_on_another_grid_is_refused(tmp_path, suffix, volume, affine, rule):
    files = brats_case(tmp_path / "data/b")
    write_nifti(files[suffix], volume, affine)
    with pytest.raises(
        InputError, match=rf"b-{suffix}\.nii\.gz must have the grid of b-t2f\.nii\.gz, got {rule}"
    ) as error:
        prepare(tmp_path / "data", tmp_path / "store", **ALL)
    assert "nothing was converted" in error.value.problems[1]
