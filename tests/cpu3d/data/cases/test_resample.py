"""Cases at one spacing, and answers back on the grid of their source."""

import numpy as np
import pytest

from cpu3d.data.cases.case import load_case
from cpu3d.data.cases.notes import case_notes
from cpu3d.data.cases.resample import (
    Keep,
    grid_of,
    parse_spacing,
    resample_image,
    resample_label,
    resampled_shape,
    target_spacing,
)
from cpu3d.data.datasets.dataset import CaseFiles
from cpu3d.data.nifti import (
    ras_spacing_mm,
    read_volume,
    write_volume,
)
from cpu3d.data.normalise import Kind, Normalisation
from cpu3d.errors import InputError
from tests.cpu3d.data.made_datasets import write_nifti
from tests.cpu3d.data.spaced import (
    CENTRES_MM,
    CHANNELS,
    CORNER_MM,
    LABELS,
    RADII_MM,
    write_drawn,
)

ISO = (1.0, 1.0, 1.0)


def loaded(image, label, target_mm):
    files = CaseFiles("a", "a", (image,), label)
    return load_case(files, channels=CHANNELS, labels=LABELS, target_spacing_mm=target_mm)


def load(folder, spacing_mm, target_mm, axes="RAS"):
    return loaded(*write_drawn(folder, "a", spacing_mm, axes), target_mm)


# --- The rule ---


@pytest.mark.parametrize(
    ("spacings", "shape", "expected"),
    [
        (((1, 1, 1), (1, 1, 1.1), (1.05, 1, 1)), (40, 40, 40), None),
        (((1, 1, 1), (1, 1, 1.11), (1, 1, 1.11)), (40, 40, 40), (1, 1, 1.11)),
        (((2, 1, 1), (1, 3, 1), (1.5, 1, 1)), (40, 40, 40), (1.5, 1, 1)),
        # Thick slices, and few of them: the 10th percentile of 4, 5 and 6 mm.
        (((1, 1, 4), (1, 1, 5), (1, 1, 6)), (200, 200, 20), (1, 1, 4.2)),
        # Many of them: the median, as for any other axis.
        (((1, 1, 4), (1, 1, 5), (1, 1, 6)), (200, 200, 90), (1, 1, 5)),
        # The fine ones are not finer than the voxels are wide.
        (((3, 2, 1), (3, 2, 1), *((3, 2, 9),) * 3), (200, 200, 20), (3, 2, 3)),
    ],
)
def test_the_spacing_is_that_of_nnunets_planner(spacings, shape, expected):
    shapes = [(999,) * 3, *[shape] * (len(spacings) - 1)]  # one that the median leaves out
    made = target_spacing(spacings, shapes)
    assert made == (expected and pytest.approx(expected))


def test_a_spacing_is_auto_off_or_three_sizes():
    spacings = {"auto": Keep.AUTO, "off": Keep.OFF, "0.01 1 100": (0.01, 1.0, 100.0)}
    assert {words: parse_spacing(words.split()) for words in spacings} == spacings


@pytest.mark.parametrize("words", ["1 1", "1 1 0"])
def test_other_spacings_are_refused(words):
    with pytest.raises(InputError, match=f"--spacing must be auto, off, .*got {words}"):
        parse_spacing(words.split())


@pytest.mark.parametrize(
    ("shape", "spacing_mm", "expected"),
    [
        ((5, 5, 1), (1.1, 1, 0.4), (6, 5, 1)),
        ((20, 20, 20), (2, 2, 2), (40, 40, 40)),
        ((20, 20, 20), (2, 2, 2.2), None),
        ((1300, 1300, 1300), ISO, None),  # above 2^31
    ],
)
def test_a_grid_has_the_box_of_the_source_and_at_most_8_times_its_voxels(
    shape, spacing_mm, expected
):
    if expected:
        assert resampled_shape("a", shape, spacing_mm, ISO) == expected
        return
    with pytest.raises(InputError, match=MOST):
        resampled_shape("a", shape, spacing_mm, ISO)


MOST = "case a .* at most (64000 voxels at 1 x 1 x 1 mm, got 40 x 40 x 44 f|2147483648 .* 1300 x )"


# --- Voxels ---


@pytest.mark.parametrize("axes", ["RAS", "LPS"])
@pytest.mark.parametrize(
    ("spacing_mm", "target_mm"),
    [
        ((2.0, 2.0, 2.0), ISO),
        ((0.8, 0.8, 4.0), ISO),
        (ISO, (2.0, 2.0, 2.0)),
        (ISO, (1.0, 1.3, 3.2)),
        ((1.6, 1.0, 0.8), (1.0, 1.0, 1.1)),
    ],
)
def test_what_is_drawn_stays_in_its_place_and_keeps_its_volume(
    tmp_path, spacing_mm, target_mm, axes
):
    case = load(tmp_path, spacing_mm, target_mm, axes)
    record = case.record
    grid = grid_of(record)
    assert ras_spacing_mm(grid) == pytest.approx(record.spacing_mm)
    assert record.spacing_mm == pytest.approx(target_mm, rel=0.04)
    affine = np.asarray(grid.affine)
    for code, centre in CENTRES_MM.items():
        inside = np.isin(case.label, range(code, 3))
        voxel = np.argwhere(inside).mean(0)
        expected = np.add(CORNER_MM, centre)
        assert np.abs((affine[:3, :3] @ voxel + affine[:3, 3]) - expected).max() < 0.5
        ml = inside.sum() * np.prod(record.spacing_mm)
        assert ml == pytest.approx(4 / 3 * np.pi * np.prod(RADII_MM[code]), rel=0.06)


def test_background_stays_0_and_no_intensity_is_beyond_the_source_s():
    volume = np.zeros((20, 20, 20), np.int16)
    volume[5:15, 5:15, 5:15] = 700
    volume[5, 5, 5] = 900
    made = resample_image(volume, (31, 27, 40), ISO)
    assert made.min() == 0
    assert made.max() <= 900
    assert np.mean(made != 0) == pytest.approx(1 / 8, rel=0.1)


def test_where_0_is_an_intensity_nothing_is_cut_out(tmp_path):
    volume = np.linspace(-50, 50, 21)[:, None, None] * np.ones((1, 4, 4))
    path = write_nifti(tmp_path / "a.nii.gz", volume.astype(np.int16))
    case = load_case(
        CaseFiles("a", "a", (path,), None),
        channels=("CT",),
        target_spacing_mm=(0.5, 1.0, 1.0),
        normalisation=[Normalisation(Kind.CT)],
    )
    made = case.image[:, 0, 0, 0] * case.record.units[0][0]
    assert len(made) == 42
    assert np.abs(np.diff(made[2:-2])).max() < 3


def test_thick_slices_are_linear_between_and_cubic_within():
    volume = np.zeros((9, 9, 4), np.float32)
    volume[..., 2] = 1
    made = resample_image(volume, (9, 9, 8), (1, 1, 4), has_background=False)
    np.testing.assert_allclose(made[4, 4], [0, 0, 0, 0.25, 0.75, 0.75, 0.25, 0], atol=1e-6)
    finer = resample_image(volume, (9, 9, 8), (1, 1, 2), has_background=False)
    near = 0.8671875  # Catmull and Rom's weights at 1/4 and 3/4 of a voxel
    far = 0.2265625
    np.testing.assert_allclose(finer[4, 4], [0, 0, 0, far, near, near, far, 0], atol=1e-6)
    # A made slice of 4 voxels is as thick: a line reaches 4 to either side of its middle, 1.5.
    thicker = resample_image(volume, (9, 9, 1), (1, 1, 1), has_background=False)
    np.testing.assert_allclose(thicker[4, 4], 0.875 / 4, atol=1e-6)


@pytest.mark.parametrize(
    ("codes", "made"),
    [
        ([3, 3, 1, 1], [3, 3, 3, 3, 1, 1, 1, 1]),
        ([3, 3, 1, 1], [3, 3, 1, 1, 1]),  # the third is half of 3 and half of 1
        # A new voxel is 3/8 of each of two, and 1/8 of each of their neighbours.
        ([9, 9, 9, 1, 2, 2, 2, 2], [9, 1, 2, 2]),  # of the second 1/2 is ignored, 3/8 are of 1
        ([9, 9, 9, 9, 1, 2, 2, 2], [9, 9, 2, 2]),  # 7/8, and 1/8 of 1
        ([9, 0, 2, 9, 1, 9, 9, 9], [0, 2, 9, 9]),  # 5/8 of the third
    ],
)
def test_a_label_is_ignored_where_more_than_half_is_else_that_of_most_and_the_lower_of_equal_ones(
    codes, made
):
    label = np.array(codes, np.uint8)[:, None, None]
    resampled = resample_label(label, (len(made), 1, 1), ignore=9)
    np.testing.assert_array_equal(resampled[:, 0, 0], made)


def test_a_label_that_vanishes_is_said(tmp_path):
    image, label = write_drawn(tmp_path, "a", ISO)
    voxels, geometry = read_volume(label)
    voxels = np.minimum(voxels, 1)
    voxels[3, 3, 3] = 2
    write_volume(label, voxels, geometry)
    record = loaded(image, label, (2.0, 2.0, 2.0)).record
    assert 2 not in record.label_voxels
    (note,) = case_notes(record, CHANNELS)
    assert "label 2 (1 voxel)" in note
    assert not case_notes(record, CHANNELS, ignore=2)
