"""`view` from the command line: what it takes and refuses, and its page in a browser, one for the
whole module."""

import dataclasses
import json
import re
import shutil
import zlib

import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.data.manifest import Geometry
from cpu3d.data.nifti import write_volume
from cpu3d.pages.viewer import in_steps, pack
from tests.cpu3d.runs import shown_cases

SHAPE = (14, 18, 10)
GEOMETRY = Geometry(
    shape=SHAPE,
    affine=((-1.0, 0, 0, 40), (0, -1.0, 0, 60), (0, 0, 3.0, -5), (0, 0, 0, 1)),
    axes="LPS",
    sform_code=1,
    qform_code=1,
)
"""Voxels of 1 x 1 x 3 mm, whose X and Y run against the R and A of the arrays."""

CASE_ID = "BraTS-GLI-00007-000<b>"
STEP = 10
"""Between two grey values of the case, so that the page's steps are exact."""


def made_case():
    """Two modalities, truth and prediction in axes R A S; a head of 255 values, off the middle of
    the grid."""
    rng = np.random.default_rng(3)
    image = np.zeros((*SHAPE, 2), np.int16)
    inside = (slice(2, 13), slice(3, 17), slice(1, 9))
    size = image[(*inside, 0)].shape
    for channel in range(2):
        image[(*inside, channel)] = STEP * rng.integers(1, 256, size)
    truth, prediction = np.zeros((2, *SHAPE), np.uint8)
    truth[4:10, 5:12, 3:7] = 2
    truth[6:9, 7:10, 4:6] = 3
    # most of the tumour is in the slices through (7, 8, 4), where a page begins
    truth[7, 12, 4] = 2
    truth[10, 8, 4] = 2
    prediction[5:11, 5:12, 3:7] = 2
    return image, truth, prediction


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("view") / CASE_ID
    folder.mkdir()
    image, truth, prediction = made_case()
    for channel, name in enumerate(("t1c", "t2f")):
        write_volume(folder / f"{CASE_ID}-{name}.nii.gz", image[..., channel], GEOMETRY)
    write_volume(folder / f"{CASE_ID}-seg.nii.gz", truth, GEOMETRY)
    write_volume(folder.parent / "ours.nii.gz", prediction, GEOMETRY)
    write_volume(folder.parent / "empty.nii.gz", np.zeros(SHAPE, np.uint8), GEOMETRY)
    return folder


def view(*words):
    return main(["view", *map(str, words)])


@pytest.fixture
def shown(tmp_path):
    """shown("--image", path): the case that the page tmp_path/page.html shows."""

    def make(*words):
        out = tmp_path / "page.html"
        assert view(*words, "--out", out) == 0
        (case,) = shown_cases(out)
        return case

    return make


# --- Without a browser ---


def test_a_packed_volume_is_smaller_and_comes_back_by_adding_the_mean_of_the_three_before():
    voxels = np.cumsum(np.random.default_rng(0).integers(0, 3, (9, 8, 30)), axis=2).astype(np.uint8)
    raw = np.frombuffer(zlib.decompress(pack(voxels), 31), np.uint8).reshape(voxels.shape)
    whole = np.zeros(np.add(voxels.shape, 1), int)  # with a border of 0 before each axis
    for x, y, z in np.ndindex(*voxels.shape):
        before = whole[x, y + 1, z + 1] + whole[x + 1, y, z + 1] + whole[x + 1, y + 1, z]
        whole[x + 1, y + 1, z + 1] = (raw[x, y, z] + before // 3) % 256
    np.testing.assert_array_equal(whole[1:, 1:, 1:], voxels)


def test_noise_is_held_in_fewer_steps_so_that_a_case_fits_three_megabytes(tmp_path, shown):
    noise = np.random.default_rng(0).normal(1000, 200, (160, 160, 150)).astype(np.int16)
    path = tmp_path / "noise.nii.gz"
    write_volume(path, noise, dataclasses.replace(GEOMETRY, shape=noise.shape), compression=1)
    assert 24 <= shown("--image", path)["modalities"][0]["levels"] < 255
    assert 2_000_000 < (tmp_path / "page.html").stat().st_size < 3_100_000


@pytest.mark.parametrize(("added", "name"), [(0, "scan"), (1024, "ct"), (700, "ct")])
def test_a_ct_has_windows_by_name_and_0_hu_is_a_value(tmp_path, shown, added, name):
    volume = np.full(SHAPE, -1000 + added, np.int16)
    volume[2:-2, 3:-3, 1:-1] = 50 + added
    volume[7, 9, 5] = -1000 + added  # air in it
    path = tmp_path / f"{name}.nii.gz"
    write_volume(path, volume, GEOMETRY)
    case = shown("--image", path)
    (modality,) = case["modalities"]
    is_in_hu = not added
    assert ("windows" in modality) == is_in_hu
    assert case["start"] == [n // 2 for n in case["shape"]]
    assert (case["shape"] == [10, 12, 8]) == is_in_hu  # without the air around the body
    if is_in_hu:
        assert (modality["window"], modality["windows"]["brain"]) == ([-150, 250], [0, 80])
        values = np.array(modality["values"])
        assert (len(values), values[0], values[-1]) == (modality["levels"], -1024, 3071)
        soft = (values > -100) & (values < 300)
        assert np.diff(values)[soft[1:]].max() < 4 < 30 < np.diff(values)[-1]
    assert in_steps(np.array([-1.0, 0, 1]), -1, 1, 4, np.nan).tolist() == [1, 3, 4]


def test_a_page_shows_the_case_by_the_names_of_its_files_and_names_no_folder(case, tmp_path):
    out = tmp_path / "new" / "page.HTML"
    assert view("--image", case, "--prediction", case.parent / "ours.nii.gz", "--out", out) == 0
    text = out.read_text()
    assert str(case.parent) not in text
    assert CASE_ID not in text, "a name from outside is escaped"
    assert not re.search(r"https?://", text)
    (shown,) = shown_cases(out)
    names = [
        [part["name"] for part in shown[key]] for key in ("modalities", "regions", "predictions")
    ]
    assert names == [["T1gd", "FLAIR"], ["WT", "TC", "ET"], ["ours"]]
    assert (shown["shape"], shown["spacing"]) == ([11, 14, 8], [1, 1, 3])
    start = shown["start"]
    assert start == [7 - 2, 8 - 3, 4 - 1]
    voxel = (13 - 7, 17 - 8, 4)  # the file's X and Y run against R and A
    assert np.dot(shown["to_voxel"], [*start, 1]).tolist() == list(voxel)
    assert np.dot(shown["to_mm"], [*start, 1]).tolist() == [40 - 6, 60 - 9, 3 * 4 - 5]
    colours = [region["colour"] for region in shown["regions"]]
    assert colours == ["#009e73", "#d55e00", "#f0e442"]
    grey = made_case()[0][..., 0]
    grey = np.percentile(grey[grey > 0], (0.1, 99.9, 0.5, 99.5))
    first = shown["modalities"][0]
    assert [first["low"], first["high"], *first["window"]] == pytest.approx(grey)


def test_voxels_to_be_ignored_are_told_by_the_list_of_their_data_set_or_named_and_counted(
    tmp_path, shown, capsys
):
    """Four of ten slices are not annotated; they do not make the page's box larger."""
    image, truth, _ = made_case()
    truth[truth == 3] = 2
    truth[..., ::3] = 255
    path = tmp_path / "data/imagesTr/a.nii.gz"
    path.parent.mkdir(parents=True)
    write_volume(path, image[..., 0], GEOMETRY)
    write_volume(tmp_path / "truth.nii.gz", truth, GEOMETRY)
    labels = {"0": "background", "2": "organ", "255": "void"}
    about = {"modality": {"0": "MRI"}, "labels": labels}
    (tmp_path / "data/dataset.json").write_text(json.dumps(about))
    words = ("--image", path, "--label", tmp_path / "truth.nii.gz")
    case = shown(*words)
    assert (case["ignore"], case["ignored_share"], case["labels"]["255"]) == (255, 0.4, "void")
    assert [region["name"] for region in case["regions"]] == ["organ"]
    assert case["shape"] == [11, 14, 8]
    assert "40.0% of the voxels, code 255" in capsys.readouterr().out
    other = shown(*words, "--ignore", 2)
    assert (other["ignore"], other["regions"]) == (2, [])


def test_predictions_of_one_name_are_called_by_their_folders_and_unknown_labels_by_their_numbers(
    case, tmp_path, shown
):
    paths = [tmp_path / where / "same.nii.gz" for where in ("first", "second")]
    for path in paths:
        path.parent.mkdir()
        shutil.copy(case / f"{CASE_ID}-seg.nii.gz", path)
    scan = shutil.copy(case / f"{CASE_ID}-t1c.nii.gz", tmp_path / "scan.nii.gz")
    seen = shown("--image", scan, "--prediction", *paths)
    assert seen["truth"] is None
    assert [label["name"] for label in seen["predictions"]] == ["first", "second"]
    regions = [(region["name"], region["colour"]) for region in seen["regions"]]
    assert regions == [("label 2", "#e69f00"), ("label 3", "#56b4e9")]


def test_what_a_prediction_finds_outside_of_the_image_is_shown(case, tmp_path, shown):
    path = tmp_path / "all.nii.gz"
    write_volume(path, np.ones(SHAPE, np.uint8), GEOMETRY)
    assert shown("--image", case, "--prediction", path)["shape"] == list(SHAPE)


def test_bad_input_is_one_line_and_leaves_what_is_there(case, tmp_path, capsys):
    def written(name, array):
        path = tmp_path / name
        write_volume(path, array, dataclasses.replace(GEOMETRY, shape=array.shape[:3]))
        return path

    page = tmp_path / "page.html"
    page.write_text("before")
    other = written("other.nii.gz", np.zeros((4, 4, 4), np.uint8))
    series = written("series.nii.gz", np.ones((*SHAPE, 17), np.uint8))
    copy = shutil.copy(case / f"{CASE_ID}-seg.nii.gz", tmp_path)
    halves = written("halves.nii.gz", np.full(SHAPE, 0.5, np.float32))
    for words, problem in (
        (("--image", tmp_path / "gone"), "must exist"),
        (("--image", series), "at most 16 channels, got 17"),
        (("--image", tmp_path), "must be one case"),
        (("--image", *case.iterdir(), copy), "must have one segmentation"),
        (("--image", case, "--label", other), "must have the grid of"),
        (("--image", case, "--label", halves), "0..255, got 0.5"),
        (("--image", halves, "--ignore", 2), "--ignore must come with a label, got 2"),
        (("--image", case, "--prediction", other, other), "files of other names"),
        (("--image", halves, "--out", halves), "must end in .html"),
    ):
        assert view("--out", page, *words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert problem in line
    assert page.read_text() == "before"


@pytest.mark.parametrize(
    ("value", "code", "notes"), [(3e38, 1, 0), (0, 1, 1), (np.nan, 0, 2), (np.inf, 1, 1)]
)
def test_an_empty_image_and_one_of_unknown_orientation_are_named(
    tmp_path, shown, capsys, value, code, notes
):
    geometry = dataclasses.replace(GEOMETRY, sform_code=code, qform_code=code)
    write_volume(tmp_path / "a.nii.gz", np.full(SHAPE, value, np.float32), geometry)
    assert shown("--image", tmp_path / "a.nii.gz")["placed"] is bool(code)
    assert len(capsys.readouterr().err.splitlines()) == notes


# --- In a browser ---


@pytest.fixture(scope="module")
def driver():
    """A headless Chromium, in which Chrome's own driver clicks and types."""
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="needs selenium: see CONTRIBUTING.md"
    )
    from selenium.webdriver.chrome.service import Service

    names = ("chromium", "chromium-browser", "google-chrome")
    binary = next(filter(None, map(shutil.which, names)), None)
    chromedriver = shutil.which("chromedriver")
    if not (binary and chromedriver):
        pytest.skip("needs chromium and chromedriver: see CONTRIBUTING.md")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--window-size=1400,1000",
        "--force-device-scale-factor=1",
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(chromedriver))
    yield browser
    browser.quit()


CORNER = (2, 3, 1)  # of the box in the arrays that the page shows
BOX = (11, 14, 8)


class Page:
    """What a reader does with a page, and sees."""

    def __init__(self, driver, path):
        from selenium.webdriver.support.ui import WebDriverWait

        self.driver = driver
        driver.get(path.as_uri())
        WebDriverWait(driver, 20, 0.02).until(lambda _: self.data("firstPictureMs"))

    def data(self, name):
        script = "return document.querySelector('.viewer').dataset[arguments[0]]"
        return self.driver.execute_script(script, name)

    def settle(self):
        """Until what was chosen is decoded and drawn."""
        self.driver.execute_async_script(
            "const done = arguments[0];"
            "setTimeout(() => requestAnimationFrame(() => setTimeout(done, 0)), 60)"
        )

    def find(self, name):
        return self.driver.find_element("css selector", f'[data-is="{name}"]')

    def press(self, keys, on="axial"):
        self.find(on).send_keys(keys)
        self.settle()

    def at(self):
        """The crosshair's voxel, of the arrays."""
        in_box = [int(number) for number in self.data("at").split()]
        return tuple(np.add(in_box, CORNER))

    def pixels(self):
        """What is drawn at the crosshair's voxel in each plane, as (red, green, blue)."""
        across = 1 - (np.subtract(self.at(), CORNER) + 0.5) / BOX
        return [
            self.driver.execute_script(
                "const c = document.querySelector(`[data-is=${arguments[0]}]`);"
                "const [x, y] = [arguments[1][0] * c.width, arguments[1][1] * c.height];"
                "return [...c.getContext('2d').getImageData(x, y, 1, 1).data].slice(0, 3)",
                name,
                across[axes].tolist(),
            )
            for name, axes in (("axial", [0, 1]), ("coronal", [0, 2]), ("sagittal", [1, 2]))
        ]


@pytest.fixture
def page(driver, case):
    answers = [case.parent / "ours.nii.gz", case.parent / "empty.nii.gz"]
    out = case.parent / "page.html"
    assert view("--image", case, "--prediction", *answers, "--out", out) == 0
    page = Page(driver, out)
    yield page
    assert [line for line in driver.get_log("browser") if line["level"] == "SEVERE"] == []


def grey(page, channel):
    """What the volume's value at the crosshair must look like in a page's first window."""
    image = made_case()[0][..., channel]
    low, high = np.percentile(image[image != 0], (0.5, 99.5))
    value = image[page.at()]
    return round(float(np.clip((value - low) / (high - low), 0, 1)) * 255)


def test_the_pixels_under_the_crosshair_are_the_volumes_in_each_plane_and_modality(page):
    page.press("o")  # overlays off
    for keys, channel in (("\ue012\ue012\ue015", 0), ("\ue00e", 0), ("m", 1)):
        page.press(keys)
        # half a step of 254 and rounding
        assert page.pixels() == [pytest.approx([grey(page, channel)] * 3, abs=2)] * 3
    size = page.find("sagittal").size
    assert size["width"] / size["height"] == pytest.approx(14 / (8 * 3), rel=0.05), "mm, not voxels"


def test_a_click_puts_the_crosshair_there_in_all_planes_and_says_voxel_mm_and_label(page):
    from selenium.webdriver import ActionChains

    canvas = page.find("axial")
    size = canvas.size
    # In the box voxel (5, 6): 11 - 5 - 0.5 of 11 columns from the left, as R is there, and 14 - 6 -
    # 0.5 of 14 rows.
    right, down = (5.5 / 11 - 0.5) * size["width"], (7.5 / 14 - 0.5) * size["height"]
    ActionChains(page.driver).move_to_element_with_offset(
        canvas, round(right), round(down)
    ).click().perform()
    page.settle()
    assert page.at() == (7, 9, 4)
    facts = page.find("facts").text.replace("\n", " ")
    for words in (
        "voxel 6, 8, 4 mm R 34.0, A 52.0, S 7.0",
        "truth enhancing tumour (WT, TC, ET)",
        "prediction oedema (WT)",
    ):
        assert words in facts


def test_overlays_and_regions_toggle_and_predictions_switch(page):
    for key, colour in (
        ("p", "#f0e442"),  # no prediction: the truth is filled, enhancing
        ("t", None),
        ("p", "#009e73"),  # the prediction says oedema
        ("e", "#2a66ff"),  # missed: a region further in
        ("r", "#c388ff"),  # WT: both
        ("n", "#2a66ff"),  # the empty prediction
        ("o", None),
        ("o", "#2a66ff"),
    ):
        page.press(key)
        seen = [int(colour[at : at + 2], 16) for at in (1, 3, 5)] if colour else [grey(page, 0)] * 3
        mixed = [(grey(page, 0) + value) / 2 for value in seen]
        assert page.pixels() == [pytest.approx(mixed, abs=3)] * 3, key
    assert "missed" in page.find("legend").text
