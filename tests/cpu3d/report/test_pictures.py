"""Pictures: which way round they are, what colour is what, and that unusual input still gives one."""

import io

import matplotlib.colors
import numpy as np
import pytest
from matplotlib import image as png_image

from cpu3d.report import pictures
from cpu3d.report.pictures import PREDICTION_ONLY, TRUTH_ONLY, Line, chart, overlay, strips

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def pixels(png):
    assert png[:8] == SIGNATURE
    return png_image.imread(io.BytesIO(png))[..., :3]


def head(shape=(24, 30, 20)):
    image = np.zeros(shape, np.int16)
    image[2:-2, 2:-2, 2:-2] = np.random.default_rng(0).integers(50, 150, [n - 4 for n in shape])
    return image


def test_the_patients_right_and_anterior_are_on_the_left_and_anterior_and_superior_on_top():
    volume, at = np.zeros((4, 5, 6)), (1, 2, 3)
    volume[3, 2, 3], volume[1, 4, 3], volume[1, 2, 5] = 1, 2, 3  # right, anterior, superior
    planes = [pictures.plane_of(volume, view, at) for view in pictures.VIEWS]  # axial, coronal, sagittal
    assert [plane.shape for plane in planes] == [(5, 4), (6, 4), (6, 5)]
    assert [(plane[2, 0], plane[0, 2]) for plane in planes] == [(1, 2), (1, 3), (2, 3)]


def test_an_overlay_shows_red_left_of_blue_when_the_prediction_lies_to_the_patients_right():
    truth, prediction = np.zeros((24, 30, 20), bool), np.zeros((24, 30, 20), bool)
    truth[5:9, 10:20, 8:12], prediction[15:19, 10:20, 8:12] = True, True
    picture = pixels(overlay(head(), truth, prediction, (1, 1, 1)))
    axial = picture[: int(picture.shape[0] * 0.9), : picture.shape[1] // 3]  # without the legend
    colours = (matplotlib.colors.to_rgb(name) for name in (PREDICTION_ONLY, TRUTH_ONLY))
    red, blue = (np.argwhere(np.abs(axial - colour).max(-1) < 0.12)[:, 1].mean() for colour in colours)
    assert red < blue


@pytest.mark.parametrize(
    ("image", "truth", "prediction"),
    [
        (head(), None, head() > 130),
        (np.zeros_like(head()), np.zeros(head().shape, bool), np.zeros(head().shape, bool)),
        (np.full_like(head(), 7), np.ones(head().shape, bool), np.ones(head().shape, bool)),
    ],
    ids=["no truth", "all empty", "everything"],
)
def test_unusual_cases_still_give_a_picture_and_always_the_same(image, truth, prediction):
    first, again = (overlay(image, truth, prediction, (1, 1, 2), "case") for _ in range(2))
    assert pixels(first).max() > 0
    assert first == again


@pytest.mark.parametrize("count", [0, 1, 3, 500])
def test_curves_of_any_length_with_holes_in_them_can_be_drawn(count):
    y = np.linspace(1, 0, count)
    y[1:2] = np.nan
    lines = [Line("training", np.arange(count), y, "#0072b2", measured=False), Line("", [1], [float("inf")], "#000000")]
    pixels(chart(lines, title="loss", y_label="loss"))
    pixels(chart([], title="nothing", y_label="", y_range=(0, None)))
    pixels(strips({"WT": [0.9] * count, "TC": [0.5], "ET": []}, title="Dice", y_label="Dice", y_range=(0, 1)))
