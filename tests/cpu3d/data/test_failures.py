"""What goes wrong with medical data and disks, one section a kind: it is told exactly, and the rest stays whole.

Every case here is a real damaged file. A data set of four good cases loses one; the others must be kept, and become a
store that can be used once the bad one is left out.
"""

import gzip
import json
import os
import re
import signal

import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.data.store import open_store
from cpu3d.data.stores.prepare import prepare
from cpu3d.errors import InputError

GOOD = ("BRATS_000", "BRATS_001", "BRATS_003")
BAD = "BRATS_002"


class Work:
    """A data set in the Decathlon layout whose third case a test spoils, and the store that is made of it."""

    def __init__(self, folder, decathlon, write_nifti, tiny_image, tiny_label, capsys):
        self.data, self.store = decathlon(folder / "data", 4), folder / "store"
        self.image = self.data / f"imagesTr/{BAD}.nii.gz"
        self.write, self.tiny_image, self.tiny_label, self.capsys = write_nifti, tiny_image, tiny_label, capsys

    def channels(self, number=2, dtype=np.int16):
        """The image of a case as it was written."""
        return np.stack([self.tiny_image(10 * number + channel) for channel in range(4)], -1).astype(dtype)

    def prepare(self, *options):
        """Run the command line. Returns its exit code and the errors that it printed."""
        self.capsys.readouterr()
        where = ["--dataset", str(self.data), "--store", str(self.store)]
        code = main(["prepare", *where, "--split", "1", "0", "0", "--workers", "1", *options])
        self.printed = self.capsys.readouterr()
        lines = self.printed.err.splitlines()
        return code, [line[len("error: ") :] for line in lines if line.startswith("error: ")]

    def refused(self, rule):
        """The bad case must be refused for a reason that matches `rule`, and the good ones must be kept."""
        code, (reason, advice) = self.prepare()
        assert code == 2
        assert re.search(rule, reason), reason
        assert "got 1 bad case; 3 good cases kept" in advice
        assert self.prepare("--skip-bad") == (0, [])
        store = open_store(self.store)
        store.check(store.cases("train"))
        assert [case.case_id for case in store.cases("train")] == list(GOOD)
        self.check_good(store)
        (line,) = (self.store / "quarantine.jsonl").read_text().splitlines()
        assert json.loads(line) == {"case_id": BAD, "reasons": [reason]}

    def check_good(self, store):
        for case_id in GOOD:
            assert np.array_equal(store.image(case_id), self.channels(int(case_id[-1])))
            assert np.array_equal(store.label(case_id), self.tiny_label(1, 2, 3))


@pytest.fixture
def work(tmp_path, decathlon, write_nifti, tiny_image, tiny_label, capsys):
    return Work(tmp_path, decathlon, write_nifti, tiny_image, tiny_label, capsys)


@pytest.mark.parametrize(
    ("what", "at"), [("flip", 0.3), ("flip", 0.5), ("flip", -40), ("flip", -6), ("cut", -8), ("cut", -2000)]
)
def test_a_truncated_or_corrupt_nii_gz_is_refused(work, what, at):
    noise = np.random.default_rng(0).integers(1, 3000, (16, 16, 16, 4)).astype(np.int16)
    content = bytearray(work.write(work.image, noise).read_bytes())
    if what == "flip":
        content[int(at * len(content)) if at > 0 else at] ^= 0x10
    work.image.write_bytes(content[:at] if what == "cut" else content)
    work.refused(r"imagesTr/BRATS_002\.nii\.gz must be whole gzip data, got .*; it is damaged or cut, fetch it again")


def test_a_truncated_nii_is_refused(work):
    whole = gzip.decompress(work.image.read_bytes())
    work.image.write_bytes(whole[:-1])  # without gzip's frame, whatever the name says
    work.refused(r"BRATS_002\.nii\.gz must hold 1312 bytes for shape \(6, 5, 4, 4\), got 1311; fetch the file again")


def test_nan_and_infinite_voxels_become_background_when_asked_and_are_counted(work):
    sick = work.channels(dtype=np.float32)
    sick[1, 1, 1, 0], sick[2, 2, 2, 0], sick[0, 0, 0, 3] = np.nan, np.inf, -np.inf
    work.write(work.image, sick)
    assert work.prepare("--zero-nan") == (0, [])
    assert "zeroed   3 NaN or infinite voxels made background" in work.printed.out
    store = open_store(work.store)
    assert [case.zeroed_voxels for case in store.cases("train")] == [0, 0, 3, 0]
    assert np.array_equal(store.image(BAD), np.where(np.isfinite(sick), sick, 0))
    work.check_good(store)
    sick[..., 2] = np.nan
    work.write(work.image, sick)
    (work.store / "manifest.json").unlink()
    code, told = work.prepare("--zero-nan")
    assert (code, len(told)) == (2, 2)
    assert "channel t1gd of" in told[0]
    assert "must not be empty, got zeros only" in told[0]


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (0, r"channel t1gd of .*BRATS_002\.nii\.gz must not be empty, got zeros only; fetch it again"),
        (7, r"channel t1gd of .*BRATS_002\.nii\.gz must vary over its non-zero voxels, got 7 everywhere"),
    ],
)
def test_a_constant_or_empty_channel_is_refused(work, value, rule):
    image = work.channels()
    image[..., 2] = np.where(image[..., 2] != 0, value, 0)
    work.write(work.image, image)
    work.refused(rule)


SHIFTED, LPS = np.eye(4), np.diag([-1.0, -1.0, 1.0, 1.0])
SHIFTED[0, 3] = 0.01


@pytest.mark.parametrize(
    ("affine", "planes", "rule"),
    [
        pytest.param(np.eye(4), 3, r"shape \(6, 5, 4\), got \(6, 5, 3\); resample it", id="shape"),
        pytest.param(SHIFTED, 4, r"affines differ by 0\.01 mm, more than 0\.001; resample it", id="affine"),
        pytest.param(LPS, 4, r"axes RAS, got LPS; resample it, mend its header", id="axes"),
    ],
)
@pytest.mark.parametrize("suffix", ["t1c", "seg"])
def test_a_shape_or_affine_mismatch_between_modalities_or_label_is_refused(
    tmp_path, brats_case, write_nifti, tiny_image, tiny_label, affine, planes, rule, suffix
):
    for case_id in ("a", "b"):
        files = brats_case(tmp_path / "data" / case_id)
    volume = tiny_label(1, 2, 3) if suffix == "seg" else tiny_image(5)
    write_nifti(files[suffix], volume[:, :, :planes], affine)
    with pytest.raises(InputError) as error:
        prepare(tmp_path / "data", tmp_path / "store", fractions=(1, 0, 0), workers=1)
    told, advice = error.value.problems
    assert re.search(rf"b-{suffix}\.nii\.gz must lie on the grid of b-t2f\.nii\.gz: {rule}", told), told
    assert "1 good case kept" in advice
    manifest = prepare(tmp_path / "data", tmp_path / "store", fractions=(1, 0, 0), workers=1, skip_bad=True)
    assert [case.case_id for case in manifest.cases] == ["a"]
    assert open_store(tmp_path / "store").image("a").shape == (6, 5, 4, 4)


@pytest.mark.parametrize(
    ("array", "rule"),
    [
        (np.zeros((6, 5, 4), [("R", "u1"), ("G", "u1"), ("B", "u1")]), "must hold real numbers"),
        (np.zeros((6, 5, 4), np.complex64), "must hold real numbers, got complex64; convert it to int16 or float32"),
        (
            np.zeros((6, 5, 4, 1, 3), np.float32),
            r"must have 3 axes, or 4 with the channels last, got shape \(6, 5, 4, 1",
        ),
        (np.zeros((6, 5), np.int16), r"must have 3 axes, or 4 with the channels last, got shape \(6, 5\)"),
        (np.ones((6, 5, 4, 3), np.int16), r"must hold 4 channel\(s\), got 3; give one 4D file or one 3D file for each"),
    ],
)
def test_an_rgb_complex_or_5d_file_is_refused(work, array, rule):
    work.write(work.image, array)
    work.refused(rf"BRATS_002\.nii\.gz {rule}")


@pytest.fixture
def in_time():
    """Fail after a while instead of waiting for ever: nobody writes into a FIFO."""

    def late(*_):
        raise AssertionError("waits for a FIFO")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


RECORDS = "cases-*.jsonl"
STORE_FILES = ("manifest.json", RECORDS, "cases/BRATS_000.x.npy", "cases/BRATS_000.y.npy", "cases/BRATS_000.json")


@pytest.mark.parametrize("name", STORE_FILES)
def test_a_fifo_in_place_of_a_store_file_is_named_and_never_opened(work, in_time, name):
    assert work.prepare()[0] == 0
    (path,) = work.store.glob(name)
    path.unlink()
    os.mkfifo(path)
    assert main(["store", "verify", str(work.store), "--workers", "1"]) == 2
    assert path.name in work.capsys.readouterr().err
