import nibabel
import numpy as np
import pytest
from nibabel import orientations

from cpu3d.data.cases.case import CENTRES, centres_of, load_case
from cpu3d.data.cases.notes import case_notes, note_lines
from cpu3d.data.datasets.dataset import CaseFiles
from cpu3d.data.normalise import Kind, Normalisation, normalise
from cpu3d.data.region import Region, whole
from cpu3d.errors import InputError
from tests.cpu3d.data.made_datasets import tiny_image, write_nifti

LABELS = {0: "background", 1: "core", 2: "oedema", 3: "enhancing"}
LPS = np.diag([-1.0, -1.0, 1.0, 1.0])


@pytest.fixture
def files(tmp_path):
    """files(*images, label=None, affines=..., label_affine=..., label_codes=...): a case of the
    given arrays."""

    def make(
        *images, label=None, affines=None, label_affine=None, codes=(1, 1), label_codes=(1, 1)
    ):
        affines = affines or [np.eye(4)] * len(images)
        paths = tuple(
            write_nifti(tmp_path / "c" / f"c_{number}.nii.gz", image, affine, codes)
            for number, (image, affine) in enumerate(zip(images, affines))
        )
        label_path = None
        if label is not None:
            label_path = write_nifti(
                tmp_path / "c" / "c_seg.nii.gz", label, label_affine, label_codes
            )
        return CaseFiles("c", "p", paths, label_path)

    return make


def test_an_integral_case_is_stored_exactly_in_ras_with_statistics_worked_out_by_hand(
    files, tmp_path
):
    first = np.zeros((3, 2, 2), np.float64)
    first[0, 0, 0] = 2
    first[1, 0, 0] = 4
    second = np.zeros((3, 2, 2), np.int16)
    second[1, 1, 0] = -5
    second[1, 0, 1] = 1
    second[0, 0, 0] = 1
    label = np.zeros((3, 2, 2), np.uint8)
    label[1, 0, 0] = 3
    case = load_case(
        files(first, second, label=label, affines=[LPS, LPS], label_affine=LPS),
        channels=("a", "b"),
        labels=LABELS,
        dataset_folder=tmp_path,
    )
    assert (case.image.dtype, case.image.shape) == (np.int16, (3, 2, 2, 2))
    assert (case.image[2, 1, 0, 0], case.image[1, 1, 0, 0], case.image[1, 0, 0, 1]) == (2, 4, -5)
    assert case.label[1, 1, 0] == 3
    record = case.record
    assert (record.units, record.max_abs_error) == ((), 0.0)
    assert record.channel_mean == (3.0, -1.0)
    assert record.channel_std == pytest.approx((1.0, np.sqrt(8)))
    assert (record.channel_min, record.channel_max) == ((2.0, -5.0), (4.0, 1.0))
    assert (record.channel_voxels, record.label_voxels) == ((2, 3), {0: 11, 3: 1})
    assert (record.box, record.geometry.axes) == (Region((1, 0, 0), (2, 2, 2)), "LPS")
    assert [source.path for source in record.sources] == [
        "c/c_0.nii.gz",
        "c/c_1.nii.gz",
        "c/c_seg.nii.gz",
    ]
    assert record.sources[0].size_bytes == (tmp_path / "c/c_0.nii.gz").stat().st_size


@pytest.mark.parametrize("value", [40000.0, 1.5])
def test_what_int16_cannot_hold_is_stored_in_steps_with_its_error(files, value):
    other = tiny_image(1).astype(np.float64)
    other[1, 1, 1] = value
    case = load_case(files(tiny_image(0), other), channels=("a", "b"))
    step, offset = case.record.units[1]
    assert case.image.dtype == np.int16
    assert (case.record.units[0], offset) == ((1, 0), 0)
    apart = np.abs(case.image[..., 1] * step - other).max()
    assert apart <= step / 2
    assert apart / other.std() == pytest.approx(case.record.max_abs_error)
    np.testing.assert_array_equal(case.image[..., 1] == 0, other == 0)


@pytest.mark.parametrize("least", [1e-3, -1e-3])
def test_a_voxel_that_is_much_less_than_a_step_does_not_become_background(files, least):
    volume = np.zeros((10, 10, 10), np.float32)
    volume[2:8, 2:8, 2:8] = np.random.default_rng(0).uniform(200, 900, (6, 6, 6))
    volume[5, 5, 5] = least
    case = load_case(files(volume), channels=("a",))
    np.testing.assert_array_equal(np.sign(case.image[..., 0]), np.sign(volume))


@pytest.mark.parametrize(
    ("channels", "depth", "rule"),
    [("abc", 1, r"a file for each of .*, got 2"), ("ab", 2, "must be 3D, got shape")],
)
def test_a_case_has_a_file_for_each_channel_and_one_label_map(files, channels, depth, rule):
    case = files(*map(tiny_image, range(2)), label=np.ones((6, 5, 4, depth), np.uint8))
    with pytest.raises(InputError, match=rule):
        load_case(case, channels=tuple(channels), labels=LABELS)


def test_centres_are_the_middles_of_even_steps_through_a_codes_voxels():
    label = np.zeros((4, 4, 8), np.uint8)
    label[:2] = 1  # flat voxels 0..63: two a step, the second of each is kept
    label[3, 3] = 7  # eight voxels: all of them
    centres = centres_of(label)
    assert list(centres) == [1, 7]
    assert centres[1][:5] == ((0, 0, 1), (0, 0, 3), (0, 0, 5), (0, 0, 7), (0, 1, 1))
    assert (centres[1][-1], len(centres[1])) == ((1, 3, 7), CENTRES)
    assert centres[7] == tuple((3, 3, z) for z in range(8))
    assert all(type(n) is int for place in centres[1] for n in place)


@pytest.mark.parametrize("shape", [(6, 5, 4), (6, 5, 4, 1), (6, 5, 4, 1, 1)])
def test_a_label_is_its_nearest_codes_if_rounding_explains_the_difference(files, shape):
    codes = np.where(tiny_image() > 500, 3, 1)
    label = (
        (codes + np.resize([1e-7, -1e-7, 9e-4, -9e-4], codes.shape))
        .astype(np.float32)
        .reshape(shape)
    )
    case = load_case(files(tiny_image(), label=label), channels=("a",), labels=LABELS)
    assert np.array_equal(case.label, codes)


@pytest.mark.parametrize("value", [1.0011, 0.5, np.nan, -1, 256])
def test_other_label_values_are_refused_with_the_digits_that_differ(files, value):
    label = np.zeros((6, 5, 4), np.float32)
    label[1, 1, 1:3] = value
    with pytest.raises(InputError) as caught:
        load_case(files(tiny_image(), label=label), channels=("a",), labels=LABELS)
    (problem,) = caught.value.problems
    assert f"got {np.float32(value)!s} (2 voxels)" in problem


def test_what_splines_leave_around_a_head_is_background_in_each_channel(files):
    rng = np.random.default_rng(0)
    clean = [np.where(tiny_image(seed) > 0, tiny_image(seed) + 0.25, 0) for seed in range(2)]
    dirty = [np.where(volume == 0, rng.normal(0, 1e-6, volume.shape), volume) for volume in clean]
    case, expected = (load_case(files(*volumes), channels=("a", "b")) for volumes in (dirty, clean))
    assert np.array_equal(case.image, expected.image)
    assert case.record.box == expected.record.box
    assert case_notes(case.record, ("a", "b")) == []


def test_another_background_is_named_with_its_channel_and_value(files):
    other = np.where(tiny_image(1) == 0, -1, tiny_image(1)).astype(np.int16)
    record = load_case(files(tiny_image(0), other), channels=("a", "b")).record
    (note,) = case_notes(record, ("a", "b"))
    assert "border of b is" in note
    assert "about -1" in note


@pytest.mark.parametrize(("codes", "label_codes"), [((0, 0), (1, 1)), ((1, 1), (0, 0))])
def test_a_label_with_and_an_image_without_orientation_are_refused_unless_their_grids_agree(
    files, codes, label_codes
):
    label = np.ones((6, 5, 4), np.uint8)
    differ = files(tiny_image(), label=label, codes=codes, label_codes=label_codes)
    with pytest.raises(InputError, match="sform and qform codes are 0"):
        load_case(differ, channels=("a",), labels=LABELS)
    guess = np.diag([-1.0, 1, 1, 1])
    guess[:3, 3] = 2.5, -2, -1.5
    same = {"affines": [guess], "label_affine": guess, "codes": codes, "label_codes": label_codes}
    record = load_case(
        files(tiny_image(), label=label, **same), channels=("a",), labels=LABELS
    ).record
    assert bool(case_notes(record, ("a",))) is (codes == (0, 0))


def test_notes_of_many_cases_are_one_line_each_with_the_first_cases():
    lines = note_lines({"a": ["x"], "b": ["x", "y"], "c": [], "d": ["x"], "e": ["x"]})
    assert [line.split(": ") for line in lines] == [
        ["note", "a, b, d and 1 more", "x"],
        ["note", "b", "y"],
    ]
    few = {"a": ["T1 is 1", "T2 is 1"], "b": ["T1 is 0.5"], "c": ["T1 is -3e-05"]}
    assert len(note_lines(few)) == 4
    assert len(note_lines({**few, "d": ["T1 is 7"]})) == 2


# --- The same place in space ---

OBLIQUE = nibabel.affines.from_matvec(
    nibabel.eulerangles.euler2mat(0.2, -0.3, 0.78) @ np.diag([-1.1, 0.9, 2.5]), (30, -12.5, 7)
)


def in_axes(array, affine, axes):
    """The voxels and the affine of the same volume with other axes."""
    turn = orientations.ornt_transform(
        orientations.io_orientation(affine), orientations.axcodes2ornt(axes)
    )
    turned = orientations.apply_orientation(array, turn)
    return turned, affine @ orientations.inv_ornt_aff(turn, array.shape)


@pytest.mark.parametrize("axes", ["LPS", "SPR"])
def test_channels_and_labels_in_other_axes_are_turned_by_their_own_affines(files, axes):
    images = [tiny_image(0), tiny_image(1)]
    label = np.where(images[0] > 500, 3, 0).astype(np.uint8)
    expected = load_case(
        files(*images, label=label, affines=[OBLIQUE] * 2, label_affine=OBLIQUE),
        channels=("a", "b"),
        labels=LABELS,
    )
    image, image_affine = in_axes(images[1], OBLIQUE, axes)
    turned, label_affine = in_axes(label, OBLIQUE, axes)
    image_affine[:3, 3] += 0.05  # mm, as much as headers round
    made = load_case(
        files(
            images[0],
            image,
            label=turned,
            affines=[OBLIQUE, image_affine],
            label_affine=label_affine,
        ),
        channels=("a", "b"),
        labels=LABELS,
    )
    assert np.array_equal(made.image, expected.image)
    assert np.array_equal(made.label, expected.label)


@pytest.mark.parametrize(
    ("change", "voxels"), [(np.diag([1, 1, 1.2, 1]), 0.7), (np.diag([-1.0, 1, 1, 1]), 5)]
)
def test_a_label_of_another_place_is_refused_with_the_distance_of_its_corners(
    files, change, voxels
):
    label = np.ones((6, 5, 4), np.uint8)
    case = files(tiny_image(), label=label, affines=[np.eye(4)], label_affine=change)
    with pytest.raises(InputError, match=rf"got a corner {voxels:g}\d* voxels from") as caught:
        load_case(case, channels=("a",), labels=LABELS)
    assert "header" not in str(caught.value)


def write_forms(path, array, sform, qform):
    """A NIfTI file whose forms are written as they are."""
    image = nibabel.Nifti1Image(array, None)
    image.header.set_qform(qform, 1)
    image.header.set_sform(sform, 1)
    path.parent.mkdir(exist_ok=True)
    nibabel.save(image, path)
    return path


def test_forms_that_contradict_each_other_are_named_with_the_one_that_is_taken(tmp_path):
    middle = np.eye(4)
    middle[:3, 3] = -2.5, 0, 0  # the first axis is centred: its mirror image is at the same place
    mirrored = np.diag([-1.0, 1, 1, 1]) @ middle
    image = write_forms(tmp_path / "c/a.nii.gz", tiny_image(), mirrored, middle)
    label = np.zeros((6, 5, 4), np.uint8)
    label[1, 2, 3] = 1
    path = write_nifti(tmp_path / "c/seg.nii.gz", label, mirrored)
    case = CaseFiles("c", "p", (image,), path)
    loaded = load_case(case, channels=("a",), labels=LABELS)
    (note,) = case_notes(loaded.record, "a")
    assert "the sform (axes LAS) and the qform (axes RAS) contradict each other" in note
    assert "the sform is taken" in note
    assert loaded.label[4, 2, 3] == 1
    write_nifti(path, label, middle)
    with pytest.raises(InputError, match=r"the grid of .*, in which the sform"):
        load_case(case, channels=("a",), labels=LABELS)


# --- Values far out of range ---


def scan(kind, dtype):
    """A volume as MR, or in Hounsfield units, of 13,824 voxels."""
    rng = np.random.default_rng(3)
    distance = np.linalg.norm(np.indices((24, 24, 24)) - 11.5, axis=0)
    values = rng.normal(60, 20, (24, 24, 24)) + (0.25 if dtype == "float32" else 0)
    around = -1000 if kind is Kind.CT else 0
    return np.where(distance < 11.5, values, around).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "int16", "int32"])
@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("value", [3e4, 1e8, -3e38])
def test_a_voxel_far_out_of_range_changes_no_other(files, kind, dtype, value):
    clean = scan(kind, dtype)
    if dtype != "float32":
        value = np.clip(value, -(2**15), 2**15 - 1 if dtype == "int16" else 10**8)
    dirty = clean.copy()
    dirty[12, 12, 12] = value
    kinds = [Normalisation(kind)]
    if kind is Kind.CT:
        kinds = [Normalisation(kind, -20, 140, 60, 20)]
    made = []
    for volume in (clean, dirty):
        case = load_case(files(volume), channels=("a",), normalisation=kinds)
        record = case.record
        made.append(normalise(case.image, record, whole(volume.shape), kinds)[..., 0])
        assert record.max_abs_error < 0.05
    assert record.far_voxels == 1
    assert any("1 voxel far out" in note for note in case_notes(record, ("a",)))
    others = np.ones(clean.shape, bool)
    others[12, 12, 12] = False
    atol = 0.02 * made[0].std()
    np.testing.assert_allclose(made[1][others], made[0][others], atol=atol)


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("value", [1e6, 1e7])
def test_a_cluster_far_out_of_range_takes_no_precision_from_the_others(files, kind, value):
    clean = scan(kind, "float32")
    dirty = clean.copy()
    dirty[10:14, 10:14, 10:13] = value
    kinds = [Normalisation(kind)]
    if kind is Kind.CT:
        kinds = [Normalisation(kind, -20, 140, 60, 20)]
    record = load_case(files(dirty), channels=("a",), normalisation=kinds).record
    assert record.far_voxels == 48
    least = load_case(files(clean), channels=("a",), normalisation=kinds).record
    assert record.channel_max[0] == pytest.approx(least.channel_max[0], rel=0.01)
    assert record.max_abs_error < 0.01


def test_values_that_steps_cannot_hold_are_named(files):
    volume = scan(Kind.CT, "float32")
    volume[0] = 1e7  # a plane: too much to be a dead pixel
    kinds = [Normalisation(Kind.CT, -20, 140, 60, 20)]
    record = load_case(files(volume), channels=("a",), normalisation=kinds).record
    assert record.max_abs_error > 0.05
    assert any("rounded by up to" in note for note in case_notes(record, ("a",)))
