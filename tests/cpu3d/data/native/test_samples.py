"""A sample by hand: where its voxels come from, what they become; and in C as in NumPy."""

import dataclasses
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from ml_dtypes import bfloat16

from cpu3d.data.augment import AugmentConfig, AugmentParams, draw
from cpu3d.data.native import plain, samples
from cpu3d.data.native.samples import SOURCES, make_sample
from cpu3d.data.native.spec import SampleSpec, Stored
from cpu3d.data.normalise import Statistics, levels_of
from models.native.build import find_compiler
from models.native.shared import IGNORED

CODES = ((1, 2, 3), (2, 3), (3, 255))
GRID = (36, 32, 40)  # of a sample
SHAPE = (30, 28, 34)  # of the stored box
AT = (2, 1, 5)  # its place in the sample


def of_each(numbers):
    """A number for each of the stored channels."""
    return np.array(numbers.split(), np.float32)


SCALE = of_each("0.01 0.002 0.003 0.004 0.005")
SHIFT = of_each("-1 0.5 0.25 2 1")


def box_of(image, label=None, start=(0, 0, 0)):
    """A box of an image (X, Y, Z, C) and a label, by default of background."""
    if label is None:
        label = np.zeros(image.shape[:3])
    return Stored(image.astype(np.int16), label.astype(np.uint8), start)


def stored():
    """A box with a brain, background in and around it, and a label."""
    rng = np.random.default_rng(0)
    places = [(index - (n - 1) / 2) / (n / 2) for index, n in zip(np.indices(SHAPE), SHAPE)]
    brain = sum(place**2 for place in places) < 0.9
    image = rng.integers(-900, 900, (*SHAPE, 5)) * (brain & (rng.random(SHAPE) < 0.9))[..., None]
    tumour = sum((place - 0.2) ** 2 for place in places) < 0.2
    return box_of(image, np.where(tumour, rng.choice([1, 2, 3, 255], SHAPE), 0), AT)


def form(channels=(0, 1, 2, 3), dtype="float32", grid=GRID, codes=CODES, ignore=None):
    return SampleSpec(grid, channels, codes, dtype, ignore)


TURN = np.float32([[0.62, 0.4, -0.38], [-0.47, 0.69, -0.03], [0.3, 0.24, 0.74]])  # and a zoom
ZOOM = np.diag([0.5, 1, 1]).astype(np.float32)  # of 4 voxels along X: 0.75, 1.25, 1.75, 2.25
PLAIN = AugmentParams(SCALE, SHIFT, (False, False, False))
KEYS = np.random.default_rng(1).integers(0, 2**32, (5, 2), np.uint32)
GAMMA = of_each("0.67 1 1.5 1.1 0.8")
DRAWS = {
    "plain": {},
    "flips": {"flips": (True, False, True)},
    "turn": {"matrix": TURN, "flips": (False, True, True)},
    "noise": {
        "noise": of_each("0.1 0 0.2 0.05 0"),
        "noise_keys": KEYS,
        "flips": (True, True, True),
    },
    "blur": {"blur": of_each("0.7 0 1.4 0 1"), "flips": (True, False, False)},
    "low resolution": {"low_resolution": of_each("1 0.5 0.71 1 0.3")},
    "both": {
        "blur": np.float32([0.7] * 5),
        "low_resolution": np.float32([0.6] * 5),
        "flips": (False, True, True),
    },
    "contrast": {"contrast": of_each("0.75 1 1.25 1.1 0.9")},
    "gamma": {"gamma": GAMMA},
    "negative gamma": {"gamma": GAMMA, "negative": True},
}


def drawn(*names):
    numbers = {name: value for each in names for name, value in DRAWS[each].items()}
    return dataclasses.replace(PLAIN, **numbers)


def as_float32(image):
    """An image whose values may be bits of bfloat16."""
    if image.dtype != np.uint16:
        return image
    return (image.astype(np.uint32) << 16).view(np.float32)


OF_KINDS = {
    "window": np.float32([[-200, 300, -200], [-np.inf, np.inf, 0], [-np.inf, np.inf, 7]]),
    "outside": np.float32([-1.5, 0, 0.75]),
    "background": np.float32([np.nan, 0, np.nan]),
    "limits": np.float32([[-1.5, 2], [-np.inf, np.inf], [-np.inf, np.inf]]),
}
"""Of a CT, a channel with a background, and one without; and again of the first two."""


def of_kinds(*names):
    kinds = {name: value[[0, 1, 2, 0, 1]] for name, value in OF_KINDS.items()}
    shift = np.where(np.isnan(kinds["background"]), 0, SHIFT).astype(np.float32)
    return dataclasses.replace(drawn(*names), shift=shift, **kinds)


# Each of these settings is met with the first of all others, and then with any of them.
CHOICES = {
    "names": [
        *((name,) for name in DRAWS),
        ("noise", "both", "contrast", "negative gamma"),
    ],
    "channels": [(1, 2, 3, 4), (2,), (1, 3, 0, 2), (0, 1, 2), tuple(range(5))],
    "of_kinds": [False, True],
    "codes": [CODES, ((2, 3), (3,)), ((2, 3),)],
    "ignore": [None, 1, 9],
    "dtype": ["float32", "bfloat16"],
    "is_part": [False, True],  # of an array of other strides
    "has_holes": [False, True],  # background within the brain
}


def some_choices():
    first = {name: values[0] for name, values in CHOICES.items()}
    for name, values in CHOICES.items():
        for value in values:
            yield {**first, name: value}
    rng = np.random.default_rng(0)
    for _ in range(100):
        yield {name: values[rng.integers(len(values))] for name, values in CHOICES.items()}


@pytest.mark.parametrize("chosen", some_choices(), ids=lambda chosen: str(tuple(chosen.values())))
def test_c_computes_what_numpy_does(chosen):
    box = stored()
    image = box.image
    label = box.label
    if chosen["has_holes"]:
        image[np.random.default_rng(2).random(SHAPE) < 0.5] = 0
    if chosen["is_part"]:
        image = np.concatenate([image, image + 1], 2)[:, :, : SHAPE[2]]
        label = np.stack([label, np.full(SHAPE, 7, np.uint8)], -1)[..., 0]
    box = Stored(image, label, AT)
    numbers = of_kinds(*chosen["names"]) if chosen["of_kinds"] else drawn(*chosen["names"])
    of_form = ("channels", "dtype", "codes", "ignore")
    wanted = form(**{name: chosen[name] for name in of_form})
    image, target = make_sample(box, numbers, wanted)
    simple, simple_target = plain.make_sample(box, numbers.of_channels(wanted.channels), wanted)
    assert (image.shape, image.dtype) == (simple.shape, simple.dtype)
    rtol = 0.01 * (wanted.dtype != "float32")
    np.testing.assert_allclose(as_float32(image), as_float32(simple), rtol=rtol, atol=1e-3)
    np.testing.assert_array_equal(target, simple_target)


def test_bfloat16_is_float32_rounded_to_nearest_ties_to_even():
    numbers = dataclasses.replace(PLAIN, scale=np.ones(5, np.float32))
    exact, _ = make_sample(stored(), numbers, form())
    rounded, _ = make_sample(stored(), numbers, form(dtype="bfloat16"))
    np.testing.assert_array_equal(rounded, exact.astype(bfloat16).view(np.uint16))


def test_beside_a_box_is_what_surrounds_its_volume():
    empty = box_of(np.empty((0, 0, 0, 5)))
    wanted = form(range(5))
    for function in (make_sample, plain.make_sample):
        every = function(empty, of_kinds("turn", "noise", "both", "gamma"), wanted)
        assert np.isfinite(every[0]).all()
        image, target = function(empty, of_kinds("turn"), wanted)
        assert np.array_equal(np.unique(image.reshape(-1, 5), axis=0), [[-1.5, 0, 0.75, -1.5, 0]])
        assert not target.any()


def test_no_change_leaves_the_window_of_a_ct_and_0_stays_0_only_where_it_is_background():
    numbers = of_kinds("turn", "noise", "both", "contrast", "gamma")
    numbers = dataclasses.replace(
        numbers,
        scale=numbers.scale * 3,
        outside=numbers.outside - of_each("1 0 1 1 0"),
        noise=of_each("3 3 3 3 3"),
    )
    image, _ = make_sample(stored(), numbers, form())
    assert image[..., [0, 3]].min() == -1.5
    assert image[..., [0, 3]].max() == 2
    corner = image[:2, :2, :2]  # outside of the box, before it is mirrored too
    assert not corner[..., 1].any()
    assert len(np.unique(corner[..., 2])) == 8


# --- Turning ---


@pytest.mark.parametrize("position", range(3))
def test_a_ball_in_mm_that_is_turned_zoomed_and_mirrored_is_one_on_a_grid_of_1_x_1_x_2_mm(position):
    """It is at the place by hand."""
    shape = (120, 120, 60)
    spacing_mm = np.array([1, 1, 2])
    centre_mm = np.array([8.0, 12, -9])
    config = AugmentConfig(gain=0, offset=0, rotation_deg=44, scaling=0.2)
    levels = levels_of([Statistics(0, 1, 0, 1)], ())
    numbers, in_mm = (
        draw(config, levels, size, seed=1, position=position, mirrored=(0, 2))
        for size in (spacing_mm, (1, 1, 1))
    )

    def ball(around_mm, radius_mm):
        places = [
            (index - (n - 1) / 2) * size
            for index, n, size in zip(np.indices(shape), shape, spacing_mm)
        ]
        return sum((place - c) ** 2 for place, c in zip(places, around_mm)) <= radius_mm**2

    before = ball(centre_mm, 25)
    matrix = in_mm.matrix.astype(float)
    side = 1 - 2 * np.array(numbers.flips)
    zoom = 1 / np.cbrt(np.linalg.det(matrix))
    expected = ball(np.linalg.solve(matrix, centre_mm) * side, 25 * zoom)
    wanted = form((0,), grid=shape, codes=((1,),))
    image, target = make_sample(box_of(before[..., None], before), numbers, wanted)
    for inside in (image[..., 0] > 0.5, target[..., 0] > 0):
        assert 2 * (inside & expected).sum() / (inside.sum() + expected.sum()) > 0.96


def target_of(label, codes, matrix):
    """The target of one region, with 255 not to be learnt."""
    label = np.asarray(label)
    numbers = dataclasses.replace(PLAIN, matrix=matrix)
    wanted = form(grid=label.shape, codes=(codes,), ignore=255)
    return make_sample(box_of(np.ones((*label.shape, 4)), label), numbers, wanted)[1][..., 0]


@pytest.mark.parametrize(
    ("label", "codes", "expected"),
    [
        ([0, 0, 2, 3], (2, 3), [0, 0, 1, 1]),
        ([0, 0, 2, 3], (3,), [0, 0, 0, 0]),  # a quarter at most
        ([0, 1, 255, 255], (1,), [1, 1, IGNORED, IGNORED]),
    ],
)
def test_a_turned_voxel_is_what_at_least_half_of_it_comes_from(label, codes, expected):
    """Zoomed along X alone, a voxel is between two by 1/4 and 3/4."""
    label = np.tile(np.reshape(label, (4, 1, 1)), (1, 2, 2))
    np.testing.assert_array_equal(target_of(label, codes, ZOOM)[:, 0, 0], expected)


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ([[1, 0], [255, 255]], 1),  # half of the annotated ones
        ([[1, 0], [0, 255]], 0),
        ([[1, 255], [255, 255]], IGNORED),
    ],
)
def test_the_annotated_ones_of_four_voxels_decide_alone(label, expected):
    """Voxel 1 of 4 along X and Y is between 0 and 1, at equal distances."""
    label = np.pad(label, (0, 2))[..., None].repeat(2, 2)
    matrix = np.diag([2, 2, 1]).astype(np.float32)
    assert target_of(label, (1,), matrix)[1, 1, 0] == expected


# --- Intensity ---


def changed(values, scale=1, **numbers):
    """What becomes of the values (X, Y, Z) of one channel, which are scaled alone."""
    drawn = AugmentParams(np.float32([scale]), np.float32([0]), PLAIN.flips, **numbers)
    return make_sample(box_of(values[..., None]), drawn, form((0,), grid=values.shape))[0][..., 0]


def test_gamma_keeps_mean_and_deviation_also_if_that_is_small_and_stretches_the_upper_end():
    values = 10_000 + np.round(5 * np.random.default_rng(0).exponential(size=(20, 20, 20)))
    made = changed(values, 0.001, gamma=np.float32([1.5]))
    assert made.std(dtype=float) == pytest.approx(0.001 * values.std(), rel=1e-3)
    assert made.mean(dtype=float) == pytest.approx(0.001 * values.mean(), rel=1e-5)
    assert made.max() > 0.001 * values.max()


def test_a_blur_spreads_a_voxel_as_a_gaussian():
    values = np.ones((31, 29, 33))
    values[15, 14, 16] = 1001
    spread = changed(values, blur=np.float32([1.3])) - 1
    assert spread.sum() == pytest.approx(1000, rel=1e-3)
    for index, centre in zip(np.indices(values.shape), (15, 14, 16)):
        deviation = np.sqrt((spread * (index - centre) ** 2).sum() / spread.sum())
        assert deviation == pytest.approx(1.3, abs=0.01)


@pytest.mark.parametrize("changes", [(), ("turn", "noise", "both")])
@pytest.mark.parametrize("name", ["gamma", "negative gamma"])
@pytest.mark.parametrize("value", [0, 700])
def test_every_value_is_a_number_where_a_channel_is_constant(name, value, changes):
    image = np.full((*SHAPE, 4), value)
    made, _ = make_sample(box_of(image, start=AT), drawn(*changes, "contrast", name), form())
    assert np.isfinite(made).all()
    assert value or not made.any()


WITHOUT_COMPILER = """
import sys, numpy as np
from pathlib import Path
import models.native.build as build
build.importlib.util.find_spec = lambda name: None
from cpu3d.data.native import samples
samples.SOURCES = Path(sys.argv[1])
from tests.cpu3d.data.native.test_samples import drawn, form, stored
for _ in range(2):
    image, target = samples.make_sample(stored(), drawn("turn"), form())
np.savez(sys.argv[1] + "/made", image=image, target=target)
"""


def run_script(script, word, **variables):
    """Run a script with one argument in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), **variables}
    words = [sys.executable, "-c", script, str(word)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


def test_without_a_compiler_numpy_makes_the_sample_and_a_note_says_so(tmp_path):
    done = run_script(WITHOUT_COMPILER, tmp_path, PATH=str(tmp_path), CC="")
    assert done.stderr.count("note: NumPy makes samples") == 1
    made = np.load(tmp_path / "made.npz")
    image, target = make_sample(stored(), drawn("turn"), form())
    np.testing.assert_allclose(made["image"], image, atol=1e-4)
    np.testing.assert_array_equal(made["target"], target)


def test_a_cpu_without_avx2_is_not_given_what_needs_it(monkeypatch):
    monkeypatch.setattr(samples, "read_host", lambda: SimpleNamespace(isa=()))
    assert samples.function_in_c.__wrapped__() is None


def test_a_sample_that_c_finds_no_memory_for_is_an_error(monkeypatch):
    monkeypatch.setattr(samples, "function_in_c", lambda: lambda sample: -1)
    with pytest.raises(MemoryError):
        make_sample(stored(), PLAIN, form())


CHECKED = """
import ctypes, sys
from cpu3d.data.native import samples
library = ctypes.CDLL(sys.argv[1])
samples.function_in_c = lambda: library.make_sample
from tests.cpu3d.data.native.test_samples import some_choices, test_c_computes_what_numpy_does
for chosen in some_choices():
    test_c_computes_what_numpy_does(chosen)
print("done")
"""


def test_c_reads_and_writes_nothing_outside_of_its_arrays(tmp_path, needs_native):
    library = tmp_path / "checked.so"
    compiler = find_compiler()
    words = [*compiler, "-print-file-name=libasan.so"]
    runtime = subprocess.check_output(words, text=True).strip()
    if not os.path.isabs(runtime):
        pytest.skip("needs a compiler with an address sanitizer")
    options = "-O1 -std=gnu11 -fPIC -shared -mavx2 -mfma -fsanitize=address,undefined"
    undefined = "-fno-sanitize-recover=undefined -static-libubsan -lm -o"
    words = [*options.split(), *map(str, SOURCES.glob("*.c")), *undefined.split(), str(library)]
    subprocess.run([*compiler, *words], check=True)
    done = run_script(CHECKED, library, LD_PRELOAD=runtime, ASAN_OPTIONS="detect_leaks=0")
    assert done.stdout.strip() == "done", done.stderr[-2000:]
