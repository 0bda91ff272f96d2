"""What goes wrong with medical data and disks: it is told exactly, and the rest stays whole.

Every case here is a real damaged file. A data set of four good cases loses one; the others must be kept, and become a
store that can be used once the bad one is left out.
"""

import gzip
import json
import re

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

    def check_good(self, store):
        for case_id in GOOD:
            assert np.array_equal(store.image(case_id), self.channels(int(case_id[-1])))
            assert np.array_equal(store.label(case_id), self.tiny_label(1, 2, 3))


@pytest.fixture
def work(tmp_path, decathlon, write_nifti, tiny_image, tiny_label, capsys):
    return Work(tmp_path, decathlon, write_nifti, tiny_image, tiny_label, capsys)


def flip(content, at):
    return content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]


GZIP = r"imagesTr/BRATS_002\.nii\.gz must be whole gzip data, got .*; it is damaged or cut, fetch it again"
RGB = [("R", "u1"), ("G", "u1"), ("B", "u1")]
THIRD = np.arange(4) == 2


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (lambda file, _: flip(file, len(file) // 2), GZIP),
        (lambda file, _: flip(file, len(file) - 6), GZIP),
        (lambda file, _: file[: len(file) // 2], GZIP),
        # Without gzip's frame, whatever the name says.
        (lambda file, _: gzip.decompress(file)[:-1], r"must hold 1312 bytes for shape \(6, 5, 4, 4\), got 1311; fetch"),
        (lambda _, image: image * ~THIRD, r"channel t1gd of .*2\.nii\.gz must not be empty, got zeros only; fetch"),
        (lambda _, image: np.where(THIRD & (image != 0), 7, image), "must vary over its non-zero .*, got 7 everywhere"),
        (lambda _, image: image[..., 0].astype(RGB), r"002\.nii\.gz must hold real numbers"),
        (lambda _, image: image[..., None], r"must have 3 axes, or 4 .*, got shape \(6, 5, 4, 4, 1"),
        (lambda _, image: image[..., :3], r"must hold 4 channel\(s\), got 3; give one 4D file or one 3D file for each"),
    ],
)
def test_a_bad_image_is_refused_for_its_reason_and_the_good_cases_are_kept(work, spoil, rule):
    bad = spoil(work.image.read_bytes(), work.channels())
    if isinstance(bad, bytes):
        work.image.write_bytes(bad)
    else:
        work.write(work.image, bad)
    code, (reason, advice) = work.prepare()
    assert code == 2
    assert re.search(rule, reason), reason
    assert "got 1 bad case; 3 good cases kept" in advice
    assert work.prepare("--skip-bad") == (0, [])
    store = open_store(work.store)
    assert [case.case_id for case in store.cases("train")] == list(GOOD)
    work.check_good(store)
    (line,) = (work.store / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(line) == {"case_id": BAD, "reasons": [reason]}


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


SHIFTED, LPS = np.eye(4), np.diag([-1.0, -1.0, 1.0, 1.0])
SHIFTED[0, 3] = 0.01


@pytest.mark.parametrize(
    ("suffix", "affine", "planes", "rule"),
    [
        ("seg", np.eye(4), 3, r"shape \(6, 5, 4\), got \(6, 5, 3\); resample it"),
        ("t1c", SHIFTED, 4, r"affines differ by 0\.01 mm, more than 0\.001; resample it"),
        ("seg", LPS, 4, r"axes RAS, got LPS; resample it, correct its header"),
    ],
)
def test_a_modality_or_label_on_another_grid_is_refused(
    tmp_path, brats_case, write_nifti, tiny_image, tiny_label, affine, planes, rule, suffix
):
    for case_id in ("a", "b"):
        files = brats_case(tmp_path / "data" / case_id)
    volume = tiny_label(1, 2, 3) if suffix == "seg" else tiny_image(5)
    write_nifti(files[suffix], volume[:, :, :planes], affine)
    with pytest.raises(
        InputError, match=rf"b-{suffix}\.nii\.gz must lie on the grid of b-t2f\.nii\.gz: {rule}"
    ) as error:
        prepare(tmp_path / "data", tmp_path / "store", fractions=(1, 0, 0), workers=1)
    assert "1 good case kept" in error.value.problems[1]
