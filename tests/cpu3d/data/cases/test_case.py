import nibabel
import numpy as np
import pytest
from nibabel import orientations

from cpu3d.data.cases.case import CENTRES, centres_of, facts_of, load_case
from cpu3d.data.cases.notes import case_notes, note_lines
from cpu3d.data.datasets.dataset import CaseFiles
from cpu3d.data.normalise import Kind, Normalisation, normalise
from cpu3d.data.region import Region, whole
from cpu3d.data.stores.convert import same_files
from cpu3d.errors import InputError
from tests.cpu3d.data.made_datasets import tiny_image, write_nifti

LABELS = {0: "background", 1: "core", 2: "oedema", 3: "enhancing"}
LPS = np.diag([-1.0, -1.0, 1.0, 1.0])
ONES = np.ones((6, 5, 4), np.uint8)


@pytest.fixture
def load(tmp_path):
    """load(*images, label=None, affines=..., ...): the case of these arrays, with the channels a, b
    and so on. The last affine is that of the label."""

    def make(*images, label=None, affines=(), codes=(1, 1), label_codes=(1, 1), **how):
        arrays = [*images] if label is None else [*images, label]
        paths = []
        for number, array in enumerate(arrays):
            path = tmp_path / f"c/{number}.nii.gz"
            affine = affines[number] if affines else None
            forms = codes if number < len(images) else label_codes
            paths.append(write_nifti(path, array, affine, forms))
        count = len(images)
        files = CaseFiles("c", "p", tuple(paths[:count]), paths[count] if paths[count:] else None)
        channels = how.pop("channels", tuple("abc"[:count]))
        return load_case(files, channels=channels, labels=LABELS, **how)

    return make


def test_an_integral_case_is_stored_exactly_in_ras_with_statistics_worked_out_by_hand(
    load, tmp_path
):
    first = np.zeros((3, 2, 2), np.float64)
    first[0, 0, 0] = 2
    first[1, 0, 0] = 4
    second = np.zeros((3, 2, 2), np.int16)
    second[1, 1, 0] = -5
    second[1, 0, 1] = 1
    second[1, 1, 1] = 1
    label = np.zeros((3, 2, 2), np.uint8)
    label[1, 0, 0] = 3
    case = load(first, second, label=label, affines=[LPS] * 3, dataset_folder=tmp_path)
    assert case.image.dtype == np.int16
    np.testing.assert_array_equal(case.image, np.stack([first, second], -1)[::-1, ::-1])
    np.testing.assert_array_equal(case.label, label[::-1, ::-1])
    record = case.record
    assert record.label_voxels_sha256.startswith("0bdf6589024a")  # of all stores that there are
    assert (record.units, record.max_abs_error) == ((), 0.0)
    assert record.channel_mean == (3.0, -1.0)
    assert record.channel_std == pytest.approx((1.0, np.sqrt(8)))
    assert (record.channel_min, record.channel_max) == ((2.0, -5.0), (4.0, 1.0))
    assert (record.channel_voxels, record.label_voxels) == ((2, 3), {0: 11, 3: 1})
    assert (record.box, record.geometry.axes) == (Region((1, 0, 0), (2, 2, 2)), "LPS")
    paths = [tmp_path / source.path for source in record.sources]
    assert [same_files(paths[:count], record.sources) for count in (2, 3)] == [False, True]
    assert [source.path for source in load(second).record.sources] == ["0.nii.gz"]


def test_what_int16_cannot_hold_is_stored_in_steps_with_the_largest_error(load):
    large = tiny_image(1).astype(np.int32)
    large[1, 1, 1] = -40_000
    sources = [tiny_image(0), large, tiny_image(2) / 2]
    case = load(*sources)
    steps, offsets = np.transpose(case.record.units)
    assert (steps[0], *offsets) == (1, 0, 0, 0)
    source = np.stack(sources, -1)
    apart = np.abs(case.image * steps - source).max((0, 1, 2))
    assert (apart <= steps / 2).all()
    assert case.record.max_abs_error == pytest.approx((apart / source.std((0, 1, 2))).max())


def test_65536_whole_numbers_are_stored_exactly_where_0_is_no_background(load):
    volume = np.random.default_rng(0).integers(1000, 66_536, (10, 10, 10), np.int32)
    volume[0, 0, :2] = 1000, 66_535
    case = load(volume, normalisation=[Normalisation(Kind.CT, 0, 9, 5, 2)])
    assert case.record.max_abs_error == 0
    ((step, offset),) = case.record.units
    np.testing.assert_array_equal(case.image[..., 0] * step + offset, volume)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_voxel_that_is_much_less_than_a_step_does_not_become_background(load, sign):
    volume = np.zeros((10, 10, 10), np.float32)
    volume[2:8, 2:8, 2:8] = -sign * np.random.default_rng(0).uniform(200, 900, (6, 6, 6))
    volume[5, 5, 5] = sign * 1e-3
    case = load(volume)
    np.testing.assert_array_equal(np.sign(case.image[..., 0]), np.sign(volume))


@pytest.mark.parametrize(
    ("channels", "depth", "rule"),
    [("abc", 1, r"a file for each of .*, got 2"), ("ab", 2, "must be 3D, got shape")],
)
def test_a_case_has_a_file_for_each_channel_and_one_label_map(load, channels, depth, rule):
    label = np.ones((6, 5, 4, depth), np.uint8)
    with pytest.raises(InputError, match=rule):
        load(tiny_image(0), tiny_image(1), label=label, channels=tuple(channels))


def test_centres_are_the_middles_of_even_steps_through_a_codes_voxels():
    label = np.zeros((4, 4, 8), np.uint8)
    label[:2] = 1  # flat voxels 0..63: two a step, the second of each is kept
    label[3, 3] = 7  # eight voxels: all of them
    centres = centres_of(label)
    assert list(centres) == [1, 7]
    assert centres[1][:5] == ((0, 0, 1), (0, 0, 3), (0, 0, 5), (0, 0, 7), (0, 1, 1))
    assert (centres[1][-1], len(centres[1])) == ((1, 3, 7), CENTRES)
    assert centres[7] == tuple((3, 3, z) for z in range(8))


def test_a_record_has_1000_labelled_values_of_a_ct_at_even_steps_of_their_order():
    image = np.arange(4000, dtype=np.int16)[::-1].reshape(20, 20, 10, 1)
    label = np.where(image[..., 0] < 2000, 1, 9)
    facts = facts_of(image, label, [Normalisation(Kind.CT)], [(0.5, 10.0)], ignore=9)
    assert facts["foreground"] == (tuple(np.arange(1, 2000, 2) / 2 + 10),)
    assert facts["label_box"] == Region((10, 0, 0), (10, 20, 10))


def test_a_label_is_its_nearest_codes_if_rounding_explains_the_difference(load):
    codes = np.where(tiny_image() > 500, 3, 1)
    label = codes + np.resize([1e-7, -1e-7, 9e-4, -9e-4], codes.shape)
    np.testing.assert_array_equal(load(tiny_image(), label=np.float32(label)).label, codes)


@pytest.mark.parametrize("value", [1.0011, np.nan, -1, 256])
def test_other_label_values_are_refused_with_the_digits_that_differ(load, value):
    label = np.zeros((6, 5, 4), np.float32)
    label[1, 1, 1:3] = value
    with pytest.raises(InputError) as caught:
        load(tiny_image(), label=label)
    (problem,) = caught.value.problems
    assert f"must hold integer codes 0..255, got {np.float32(value)!s} (2 voxels)" in problem


def test_what_splines_leave_around_a_head_is_background_in_each_channel(load):
    rng = np.random.default_rng(0)
    clean = [np.where(tiny_image(seed) > 0, tiny_image(seed) + 0.25, 0) for seed in range(2)]
    dirty = [np.where(volume == 0, rng.normal(0, 1e-6, volume.shape), volume) for volume in clean]
    np.testing.assert_array_equal(load(*dirty).image, load(*clean).image)


def test_another_background_is_named_with_its_channel_and_value(load):
    other = np.where(tiny_image(1) == 0, -1, tiny_image(1)).astype(np.int16)
    (note,) = case_notes(load(tiny_image(0), other).record, ("a", "b"))
    assert "border of b is about -1" in note


@pytest.mark.parametrize("codes", [(0, 0), (1, 1)])
def test_a_label_with_and_an_image_without_orientation_are_refused_unless_their_grids_agree(
    load, codes
):
    forms = {"label": ONES, "codes": codes, "label_codes": (1 - codes[0],) * 2}
    with pytest.raises(InputError, match=rf"in {codes[0]}\.nii\.gz, whose sform and qform codes"):
        load(tiny_image(), **forms)
    guess = np.diag([-1.0, 1, 1, 1])
    guess[:3, 3] = 2.5, -2, -1.5
    record = load(tiny_image(), affines=[guess] * 2, **forms).record
    assert bool(case_notes(record, ("a",))) is (codes == (0, 0))


def test_notes_of_many_cases_are_one_line_each_with_the_first_cases():
    lines = note_lines({"a": ["x"], "b": ["x", "y"], "c": [], "d": ["x"], "e": ["x"]})
    assert lines == ["note: a, b, d and 1 more: x", "note: b: y"]
    few = {"a": ["T1 is 1", "T2 is 1"], "b": ["T1 is 0.5"], "c": ["T1 is -3e-05"]}
    assert len(note_lines(few)) == 4
    assert len(note_lines({**few, "d": ["T1 is 7"]})) == 2


# --- The same place in space ---

OBLIQUE = nibabel.affines.from_matvec(
    nibabel.eulerangles.euler2mat(0.2, -0.3, 0.78) @ np.diag([-1.1, 0.9, 2.5]), (30, -12.5, 7)
)


def in_axes(array, axes):
    """The voxels and the affine of a volume of the oblique grid with other axes."""
    turn = orientations.ornt_transform(
        orientations.io_orientation(OBLIQUE), orientations.axcodes2ornt(axes)
    )
    turned = orientations.apply_orientation(array, turn)
    return turned, OBLIQUE @ orientations.inv_ornt_aff(turn, array.shape)


@pytest.mark.parametrize("axes", ["LPS", "SPR"])
def test_channels_and_labels_in_other_axes_are_turned_by_their_own_affines(load, axes):
    images = [tiny_image(0), tiny_image(1)]
    label = np.where(images[0] > 500, 3, 0).astype(np.uint8)
    expected = load(*images, label=label, affines=[OBLIQUE] * 3)
    image, image_affine = in_axes(images[1], axes)
    label, label_affine = in_axes(label, axes)
    image_affine[:3, 3] += 0.05  # mm, as much as headers round
    affines = [OBLIQUE, image_affine, label_affine]
    made = load(images[0], image, label=label, affines=affines)
    np.testing.assert_array_equal(made.image, expected.image)
    np.testing.assert_array_equal(made.label, expected.label)


def test_forms_that_contradict_each_other_are_named_with_the_one_that_is_taken(tmp_path):
    middle = np.eye(4)
    middle[:3, 3] = -2.5, 0, 0  # the first axis is centred: its mirror image is at the same place
    mirrored = np.diag([-1.0, 1, 1, 1]) @ middle
    image = write_nifti(tmp_path / "a.nii.gz", tiny_image(), mirrored, qform=middle)
    label = np.zeros((6, 5, 4), np.uint8)
    label[1, 2, 3] = 1
    path = write_nifti(tmp_path / "seg.nii.gz", label, mirrored)
    case = CaseFiles("c", "p", (image,), path)
    loaded = load_case(case, channels=("a",), labels=LABELS)
    (note,) = case_notes(loaded.record, "a")
    assert "the sform (axes LAS) and the qform (axes RAS) contradict each other" in note
    assert "the sform is taken" in note
    assert loaded.label[4, 2, 3] == 1
    for own, other, name in ((mirrored, middle, "a"), (middle, mirrored, "seg")):
        write_nifti(image, tiny_image(), own, qform=middle)
        write_nifti(path, label, other, qform=middle)
        with pytest.raises(InputError, match=rf"got {name}\.nii\.gz, in which the sform"):
            load_case(case, channels=("a",), labels=LABELS)


# --- Values far out of range ---

OF_KINDS = [Normalisation(kind) for kind in Kind if kind is not Kind.CT]
OF_KINDS.append(Normalisation(Kind.CT, -20, 140, 60, 20))


def scan(kind, dtype="float32"):
    """A volume as MR, or in Hounsfield units, of 13,824 voxels."""
    rng = np.random.default_rng(3)
    distance = np.linalg.norm(np.indices((24, 24, 24)) - 11.5, axis=0)
    values = rng.normal(60, 20, (24, 24, 24)) + (0.25 if dtype == "float32" else 0)
    around = -1000 if kind is Kind.CT else 0
    return np.where(distance < 11.5, values, around).astype(dtype)


@pytest.mark.parametrize("kind", OF_KINDS, ids=lambda kind: kind.kind.value)
@pytest.mark.parametrize(
    ("dtype", "value", "size"),
    [
        ("float32", 3e4, 1),
        ("float32", -3e38, 1),
        ("int16", -(2**15), 1),
        ("int32", 10**8, 1),
        ("float32", 1.5e5, 3),
    ],
)
def test_voxels_far_out_of_range_change_no_other(load, kind, dtype, value, size):
    clean = scan(kind.kind, dtype)
    dirty = clean.copy()
    is_far = np.zeros(clean.shape, bool)
    is_far[(slice(10, 10 + size),) * 3] = True
    dirty[is_far] = value
    made = []
    for volume in (clean, dirty):
        channels = np.stack([volume, volume], -1)
        case = load(channels, channels=("a", "b"), normalisation=[kind] * 2)
        record = case.record
        made.append(normalise(case.image, record, whole(volume.shape), [kind] * 2))
        assert record.max_abs_error < 0.01
    assert record.far_voxels == 2 * size**3
    (note,) = case_notes(record, ("a", "b"))
    assert "far out of the range" in note
    atol = 0.02 * made[0].std()
    np.testing.assert_allclose(made[1][~is_far], made[0][~is_far], atol=atol)


def test_values_that_steps_cannot_hold_are_named(load):
    volume = scan(Kind.CT)
    volume[0] = 3e5  # a plane: too much to be a dead pixel
    record = load(volume, normalisation=OF_KINDS[-1:]).record
    assert record.max_abs_error == pytest.approx(3e5 / 65534 / 2 / 20, rel=0.01)
    assert any("rounded by up to" in note for note in case_notes(record, ("a",)))
