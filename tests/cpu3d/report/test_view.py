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
from cpu3d.data.nifti import from_ras, write_volume
from cpu3d.data.phantoms.ct import ct_case
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
    truth, prediction = np.zeros(SHAPE, np.uint8), np.zeros(SHAPE, np.uint8)
    truth[4:10, 5:12, 3:7], truth[6:9, 7:10, 4:6] = 2, 3
    truth[7, 12, 4] = truth[10, 8, 4] = (
        2  # most of the tumour is in the slices through (7, 8, 4), where a page begins
    )
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


# --- Without a browser ---


def test_a_packed_volume_is_smaller_and_comes_back_by_adding_the_mean_of_the_three_before():
    voxels = np.cumsum(np.random.default_rng(0).integers(0, 3, (9, 8, 30)), axis=2).astype(np.uint8)
    raw = np.frombuffer(zlib.decompress(pack(voxels), 31), np.uint8).reshape(voxels.shape).copy()
    for x, y, z in np.ndindex(*voxels.shape):
        before = [
            raw[x - 1, y, z] if x else 0,
            raw[x, y - 1, z] if y else 0,
            raw[x, y, z - 1] if z else 0,
        ]
        raw[x, y, z] = (int(raw[x, y, z]) + sum(map(int, before)) // 3) % 256
    np.testing.assert_array_equal(raw, voxels)


def test_noise_is_held_in_fewer_steps_so_that_a_case_fits_three_megabytes(tmp_path):
    noise = np.random.default_rng(0).normal(1000, 200, (160, 160, 150)).astype(np.int16)
    path = tmp_path / "noise.nii.gz"
    write_volume(
        path,
        noise,
        Geometry(noise.shape, tuple(map(tuple, np.eye(4).tolist())), "RAS", 1, 1),
        compression=1,
    )
    assert view("--image", path, "--out", tmp_path / "page.html") == 0
    assert 2_000_000 < (tmp_path / "page.html").stat().st_size < 3_100_000
    assert 24 <= shown_cases(tmp_path / "page.html")[0]["modalities"][0]["levels"] < 255


@pytest.mark.parametrize(
    ("added", "name", "is_in_hu"),
    [(0, "scan", True), (1024, "ct", False)],
)
def test_a_ct_has_windows_by_name_and_0_hu_is_a_value(tmp_path, added, name, is_in_hu):
    volume, _ = ct_case((40, 36, 30), seed=0, index=0)
    geometry = dataclasses.replace(GEOMETRY, shape=volume.shape)
    path = tmp_path / f"{name}.nii.gz"
    write_volume(path, from_ras(volume + np.int16(added), geometry), geometry)
    assert view("--image", path, "--out", tmp_path / "page.html") == 0
    (shown,) = shown_cases(tmp_path / "page.html")
    (modality,) = shown["modalities"]
    assert ("windows" in modality, modality["unit"] == "HU") == (is_in_hu, is_in_hu)
    assert (shown["shape"] != [40, 36, 30]) == is_in_hu  # without air around the body and the table
    if is_in_hu:
        values = np.array(modality["values"])
        assert (len(values), values[0], values[-1]) == (modality["levels"], -1024, 3071)
        soft = (values > -100) & (values < 300)
        assert np.diff(values)[soft[1:]].max() < 4 < 30 < np.diff(values)[-1]
    pixels = in_steps(np.array([-1.0, 0, 1]), -1, 1, 3, np.nan)
    assert pixels.tolist() == [1, 2, 3]


def test_a_page_shows_the_case_by_the_names_of_its_files_and_names_no_folder(case, tmp_path):
    out = tmp_path / "new" / "page.html"
    assert view("--image", case, "--prediction", case.parent / "ours.nii.gz", "--out", out) == 0
    text = out.read_text()
    assert str(case.parent) not in text
    assert CASE_ID not in text, "a name from outside is escaped"
    assert not re.search(r"https?://", text)
    (shown,) = shown_cases(out)
    for key, names in (
        ("modalities", ["T1gd", "FLAIR"]),
        ("regions", ["WT", "TC", "ET"]),
        ("predictions", ["ours"]),
    ):
        assert [part["name"] for part in shown[key]] == names
    assert (shown["shape"], shown["spacing"]) == ([11, 14, 8], [1, 1, 3])


def test_voxels_to_be_ignored_are_told_by_the_list_of_their_data_set(tmp_path):
    """Every second slice is annotated; the others do not make the page's box larger."""
    image, truth, _ = made_case()
    truth[truth == 3] = 2
    truth[..., ::2] = 200
    images = tmp_path / "data/imagesTr"
    images.mkdir(parents=True)
    write_volume(images / "a.nii.gz", image[..., 0], GEOMETRY)
    write_volume(tmp_path / "truth.nii.gz", truth, GEOMETRY)
    labels = {"0": "background", "2": "organ", "200": "void"}
    about = {"modality": {"0": "MRI"}, "labels": labels}
    (tmp_path / "data/dataset.json").write_text(json.dumps(about))
    words = ("--image", images / "a.nii.gz", "--label", tmp_path / "truth.nii.gz")
    assert view(*words, "--out", tmp_path / "page.html") == 0
    (shown,) = shown_cases(tmp_path / "page.html")
    assert (shown["ignore"], shown["labels"]["200"]) == (200, "void")
    assert [region["name"] for region in shown["regions"]] == ["organ"]
    assert shown["shape"] == [11, 14, 8]


def test_a_code_to_be_ignored_may_be_named_and_is_counted(case, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert view("--image", case, "--out", out, "--ignore", 2) == 0
    (shown,) = shown_cases(out)
    assert shown["ignore"] == 2
    assert all(2 not in region["codes"] for region in shown["regions"])
    share = np.mean(made_case()[1] == 2)
    assert f"{share:.1%} of the voxels, code 2" in capsys.readouterr().out
    assert shown["ignored_share"] == pytest.approx(share)


def test_predictions_of_one_name_are_called_by_their_folders_and_unknown_labels_by_their_numbers(
    case, tmp_path
):
    label, out = case / f"{CASE_ID}-seg.nii.gz", tmp_path / "page.html"
    paths = [tmp_path / where / "same.nii.gz" for where in ("first", "second")]
    for path in paths:
        path.parent.mkdir(parents=True)
        shutil.copy(label, path)
    scan = shutil.copy(case / f"{CASE_ID}-t1c.nii.gz", tmp_path / "scan.nii.gz")
    assert view("--image", scan, "--prediction", *paths, "--out", out) == 0
    (shown,) = shown_cases(out)
    assert shown["truth"] is None
    assert [label["name"] for label in shown["predictions"]] == ["first", "second"]
    assert [region["name"] for region in shown["regions"]] == ["label 2", "label 3"]


def test_bad_input_is_one_line_and_leaves_what_is_there(case, tmp_path, capsys):
    def written(name, array, geometry=GEOMETRY):
        write_volume(tmp_path / name, array, geometry)
        return tmp_path / name

    page = tmp_path / "page.html"
    page.write_text("before")
    small = dataclasses.replace(GEOMETRY, shape=(4, 4, 4))
    other = written("other.nii.gz", np.zeros((4, 4, 4), np.uint8), small)
    series = written("series.nii.gz", np.ones((*SHAPE, 40), np.uint8))
    halves = written("halves.nii.gz", np.full(SHAPE, 0.5, np.float32))
    for words, problem in (
        (("--image", tmp_path / "gone"), "must exist"),
        (("--image", series), "at most 16 channels, got 40"),
        (("--image", case, "--label", other), "must have the grid of"),
        (("--image", case, "--label", halves), "0..255, got 0.5"),
        (("--image", halves, "--ignore", 2), "--ignore must come with a label, got 2"),
        (("--image", case, "--prediction", other, other), "files of other names"),
        (("--image", halves, "--out", halves), "must end in .html"),
    ):
        assert view(*words, *(() if "--out" in words else ("--out", page))) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert problem in line
    assert page.read_text() == "before"


@pytest.mark.parametrize(("value", "code", "notes"), [(1, 1, 0), (0, 1, 1), (np.nan, 0, 2)])
def test_an_empty_image_and_one_of_unknown_orientation_are_named(
    tmp_path, capsys, value, code, notes
):
    geometry = dataclasses.replace(GEOMETRY, sform_code=code, qform_code=code)
    write_volume(tmp_path / "a.nii.gz", np.full(SHAPE, value, np.float32), geometry)
    assert view("--image", tmp_path / "a.nii.gz", "--out", tmp_path / "page.html") == 0
    assert len(capsys.readouterr().err.splitlines()) == notes
    assert shown_cases(tmp_path / "page.html")[0]["placed"] is bool(code)


# --- In a browser ---


@pytest.fixture(scope="module")
def driver():
    """A headless Chromium, in which Chrome's own driver clicks and types."""
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="needs selenium: see CONTRIBUTING.md"
    )
    from selenium.webdriver.chrome.service import Service

    binary = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
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


class Page:
    """What a reader does with a page, and sees."""

    def __init__(self, driver, path):
        self.driver = driver
        driver.get(path.as_uri())
        self.wait(
            lambda: self.run("return document.querySelector('.viewer').dataset.firstPictureMs")
        )

    def run(self, script, *values):
        return self.driver.execute_script(script, *values)

    def wait(self, holds):
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, 20, 0.02).until(lambda _: holds())

    def settle(self):
        """Until what was chosen is decoded and drawn."""
        frame = "requestAnimationFrame(() => setTimeout(done, 0))"
        self.driver.execute_async_script(
            f"const done = arguments[0]; setTimeout(() => {frame}, 60)"
        )

    def find(self, name):
        return self.driver.find_element("css selector", f'[data-is="{name}"]')

    def press(self, keys, on="axial"):
        self.find(on).send_keys(keys)
        self.settle()

    def at(self):
        """The crosshair's voxel in the box that the page holds."""
        return tuple(
            map(int, self.run("return document.querySelector('.viewer').dataset.at").split())
        )

    def pixels(self):
        """What is drawn at the crosshair's voxel in each plane, as (red, green, blue)."""
        return [
            tuple(
                self.run(
                    "const c = document.querySelector(`[data-is=${arguments[0]}]`);"
                    "const [x, y] = [arguments[1][0] * c.width, arguments[1][1] * c.height];"
                    "return [...c.getContext('2d').getImageData(x, y, 1, 1).data].slice(0, 3)",
                    name,
                    [1 - (self.at()[axis] + 0.5) / self.shape()[axis] for axis in axes],
                )
            )
            for name, axes in (("axial", (0, 1)), ("coronal", (0, 2)), ("sagittal", (1, 2)))
        ]

    def shape(self):
        """Of the box."""
        sliders = (self.find(f"{name}-slice") for name in ("sagittal", "coronal", "axial"))
        return [int(slider.get_attribute("max")) + 1 for slider in sliders]

    def facts(self):
        return self.find("facts").text.replace("\n", " ")

    def errors(self):
        return [line for line in self.driver.get_log("browser") if line["level"] == "SEVERE"]


@pytest.fixture(scope="module")
def page_file(case):
    answers = [case.parent / "ours.nii.gz", case.parent / "empty.nii.gz"]
    assert view("--image", case, "--prediction", *answers, "--out", case.parent / "page.html") == 0
    return case.parent / "page.html"


@pytest.fixture
def page(driver, page_file):
    page = Page(driver, page_file)
    yield page
    assert page.errors() == []


def voxel_of(at):
    """Of the arrays, from the page's box."""
    return tuple(np.add(at, (2, 3, 1)))


def grey(page, channel):
    """What the volume's value at the crosshair must look like in a page's first window."""
    image = made_case()[0][..., channel]
    low, high = np.percentile(image[image != 0], (0.5, 99.5))
    value = image[voxel_of(page.at())]
    return round(float(np.clip((value - low) / (high - low), 0, 1)) * 255)


def test_the_pixels_under_the_crosshair_are_the_volumes_in_each_plane_and_modality(page):
    page.press("o")  # overlays off
    for keys, channel in (("\ue012\ue012\ue015", 0), ("\ue00e", 0), ("m", 1)):
        page.press(keys)
        for pixel in page.pixels():
            assert np.ptp(pixel) == 0
            # half a step of 254 and rounding
            assert pixel[0] == pytest.approx(grey(page, channel), abs=2)
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
    x, y, z = voxel_of(page.at())
    assert (x, y) == (7, 9)
    facts = page.facts()
    source = np.argwhere(
        from_ras(np.arange(np.prod(SHAPE)).reshape(SHAPE), GEOMETRY) == (x * 18 + y) * 10 + z
    )[0]
    assert f"voxel {', '.join(map(str, source))}" in facts
    world = np.asarray(GEOMETRY.affine)[:3] @ (*source, 1)
    for number, (plus, minus) in zip(world, ("RL", "AP", "SI")):
        assert f"{plus if number >= 0 else minus} {abs(number):.1f}" in facts
    truth, prediction = (volume[x, y, z] for volume in made_case()[1:])
    assert (truth, prediction) == (3, 2)
    assert "truth enhancing tumour (WT, TC, ET)" in facts
    assert "prediction oedema (WT)" in facts


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
        for pixel in page.pixels():
            assert pixel == pytest.approx([(grey(page, 0) + value) / 2 for value in seen], abs=3), (
                key
            )
    assert "missed" in page.find("legend").text
