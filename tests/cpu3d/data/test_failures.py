"""What goes wrong with medical data and disks, one section a kind: it is told exactly, and the rest stays whole.

Every case here is a real damaged file. A data set of four good cases loses one; the others must be kept, and become a
store that can be used once the bad one is left out.
"""

import dataclasses
import errno
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap

import nibabel
import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.data import write_cases
from cpu3d.data.files.array_file import ArrayFile
from cpu3d.data.files.arrays import voxels_sha256
from cpu3d.data.files.reader import Reader
from cpu3d.data.prepare import prepare
from cpu3d.data.records import array_path, remake
from cpu3d.data.store import open_store, write_store
from cpu3d.errors import InputError
from cpu3d.settings import RunConfig, save_config
from cpu3d.training import train as train_module

GOOD = ("BRATS_000", "BRATS_001", "BRATS_003")
BAD = "BRATS_002"
SETTINGS = {"npy": write_cases.Settings(), "b2nd": write_cases.Settings(format="b2nd")}


class Work:
    """A data set in the Decathlon layout whose third case a test spoils, and the store that is made of it."""

    def __init__(self, folder, decathlon, write_nifti, tiny_image, tiny_label, capsys):
        self.data, self.store = decathlon(folder / "data", 4), folder / "store"
        self.image, self.label = (self.data / f"{kind}Tr/{BAD}.nii.gz" for kind in ("images", "labels"))
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

    def refused(self, *rules):
        """The bad case must be refused for reasons that match `rules`, in order, and the good ones must be kept."""
        code, told = self.prepare()
        assert code == 2
        assert len(told) == len(rules) + 1
        for line, rule in zip(told, rules):
            assert re.search(rule, line), line
        assert "got 1 bad case; 3 good cases kept" in told[-1]
        self.check_good(self.prepare("--skip-bad"))
        (line,) = (self.store / "quarantine.jsonl").read_text().splitlines()
        assert json.loads(line) == {"case_id": BAD, "reasons": told[:-1]}

    def check_good(self, outcome):
        assert outcome == (0, [])
        store = open_store(self.store)
        store.check(store.cases("train"))
        assert [case.case_id for case in store.cases("train")] == list(GOOD)
        for case_id in GOOD:
            self.check_case(store, case_id)

    def check_case(self, store, case_id):
        assert np.array_equal(store.image(case_id), self.channels(int(case_id[-1])))
        assert np.array_equal(store.label(case_id), self.tiny_label(1, 2, 3))


@pytest.fixture
def work(tmp_path, decathlon, write_nifti, tiny_image, tiny_label, capsys):
    return Work(tmp_path, decathlon, write_nifti, tiny_image, tiny_label, capsys)


@pytest.fixture(params=["npy", "b2nd"])
def stored(work, request):
    """A finished store of the four good cases in each format."""
    prepare(work.data, work.store, fractions=(1, 0, 0), workers=1, settings=SETTINGS[request.param])
    return open_store(work.store)


# --- Truncated or corrupt .nii.gz. nibabel reads the second to fifth of these without an error ---


def flipped(content, at):
    return content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: flipped(content, len(content) // 3), id="a bit a third in"),
        pytest.param(lambda content: flipped(content, len(content) // 2), id="a bit half way"),
        pytest.param(lambda content: flipped(content, len(content) - 40), id="a bit near the end"),
        pytest.param(lambda content: flipped(content, len(content) - 6), id="a bit of the CRC"),
        pytest.param(lambda content: content[:-8], id="the trailer cut off"),
        pytest.param(lambda content: content[:-2000], id="2000 bytes cut off"),
    ],
)
def test_a_truncated_or_corrupt_nii_gz_is_refused(work, damage):
    noise = np.random.default_rng(0).integers(1, 3000, (16, 16, 16, 4)).astype(np.int16)
    work.write(work.image, noise)
    work.image.write_bytes(damage(work.image.read_bytes()))
    work.refused(r"imagesTr/BRATS_002\.nii\.gz must be whole gzip data, got .*; it is damaged or cut, fetch it again")


# --- Truncated .nii, truncated store files ---


def test_a_truncated_nii_is_refused(work):
    whole = gzip.decompress(work.image.read_bytes())
    work.image.write_bytes(whole[:-1])  # without gzip's frame, whatever the name says
    work.refused(r"BRATS_002\.nii\.gz must hold 1312 bytes for shape \(6, 5, 4, 4\), got 1311; fetch the file again")


@pytest.mark.parametrize("mode", ["mmap", "pread", "ram"])
@pytest.mark.parametrize("part", ["x", "y"])
@pytest.mark.parametrize("longer_by", [-1, 1])
def test_a_truncated_store_file_is_refused_before_a_byte_of_it_is_used(work, stored, mode, part, longer_by):
    path = array_path(work.store, stored.case(BAD), part)
    content = path.read_bytes()
    path.write_bytes(content[:-1] if longer_by < 0 else content + b"\0")
    wrong = rf"{path.name} must be {len(content)} bytes long, got {len(content) + longer_by}"
    fresh = Reader(work.store, mode)
    for read in (
        lambda: fresh.array(stored.case(BAD), part),
        lambda: fresh.box(stored.case(BAD), part, (slice(0, 1),) * 3),
        lambda: open_store(work.store).check(stored.cases("train")),
    ):
        with pytest.raises(InputError, match=wrong) as error:
            read()
        assert len(error.value.problems) == 1
    for case_id in GOOD:
        work.check_case(stored, case_id)
        assert np.array_equal(fresh.array(stored.case(case_id), "x"), work.channels(int(case_id[-1])))
    assert work.prepare("--format", stored.case(BAD).format) == (0, [])  # mends that one
    work.check_case(open_store(work.store), BAD)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_a_packed_store_file_with_a_flipped_bit_is_refused_before_it_is_unpacked(work, share):
    # Unpacked, most of these give wrong voxels, and some bits of the header end the process.
    prepare(work.data, work.store, fractions=(1, 0, 0), workers=1, settings=SETTINGS["b2nd"])
    store = open_store(work.store)
    path = array_path(work.store, store.case(BAD), "x")
    content = path.read_bytes()
    path.write_bytes(flipped(content, int(share * (len(content) - 1))))
    fresh = Reader(work.store)
    for read in (fresh.array, lambda record, part: fresh.box(record, part, (slice(0, 1),) * 3)):
        with pytest.raises(InputError, match=r"BRATS_002\.x\.b2nd must be a \.b2nd array of int16 \(6, 5, 4, 4\), got"):
            read(store.case(BAD), "x")
    for case_id in GOOD:
        work.check_case(store, case_id)
    assert work.prepare("--format", "b2nd", "--verify") == (0, [])
    work.check_case(open_store(work.store), BAD)


# --- A file replaced or cut under a live map ---


@pytest.mark.parametrize("mode", ["mmap", "pread"])
def test_a_file_replaced_while_it_is_read_stops_the_reader_and_what_it_gave_out_stays(work, stored, mode):
    live = Reader(work.store, mode)
    before = live.array(stored.case(BAD), "x")
    path = array_path(work.store, stored.case(BAD), "x")
    other = path.with_name("other")
    other.write_bytes(
        array_path(work.store, stored.case("BRATS_000"), "x").read_bytes().ljust(path.stat().st_size, b"\0")
    )
    if other.stat().st_size != path.stat().st_size:  # packed arrays differ in length
        other.write_bytes(path.read_bytes())
    os.replace(other, path)
    for read in (live.array, lambda record, part: live.box(record, part, (slice(0, 1),) * 3)):
        with pytest.raises(InputError, match=r"store file .*BRATS_002\.x\.\w+ must stay as it was while it is read"):
            read(stored.case(BAD), "x")
    assert np.array_equal(before, work.channels())
    assert np.array_equal(live.array(stored.case("BRATS_003"), "x"), work.channels(3))


def test_a_file_cut_while_pread_reads_it_is_an_error(work, monkeypatch):
    prepare(work.data, work.store, fractions=(1, 0, 0), workers=1)
    store = open_store(work.store)
    live, path = Reader(work.store, "pread"), array_path(work.store, store.case(BAD), "x")
    real = os.preadv

    def cut_in_between(handle, buffers, offset):
        if offset >= 128:  # past the header: everything was in order when it was opened
            os.truncate(path, 500)
        return real(handle, buffers, offset)

    monkeypatch.setattr(os, "preadv", cut_in_between)
    with pytest.raises(InputError, match=r"BRATS_002\.x\.npy must be 1088 bytes long, it ended at byte 500"):
        live.array(store.case(BAD), "x")
    monkeypatch.undo()
    assert np.array_equal(live.array(store.case("BRATS_003"), "x"), work.channels(3))


# --- Disk full ---


FULL = """
    import errno, json, os, resource, subprocess, sys
    from pathlib import Path
    from cpu3d.__main__ import main
    from cpu3d.data.store import open_store
    from cpu3d.data.upkeep.verify import verify

    kind, claims, store, *command = sys.argv[1:]

    def mount(*options):
        if subprocess.run(["mount", "-t", "tmpfs", *options, store], capture_output=True).returncode:
            sys.exit(77)

    def unsupported(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    def files():
        return {path.name: path.stat().st_mtime_ns for path in Path(store).rglob("*") if path.is_file()}

    if claims == "no":
        os.posix_fallocate = unsupported
    if kind == "tmpfs":
        mount("-o", "size=64k", "tmpfs")
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))  # Python ignores SIGXFSZ
    codes, left = [main(command)], files()
    if kind == "tmpfs":
        mount("-o", "remount,size=4m")
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    codes.append(main(command))
    hashes = [case.image_voxels_sha256 for case in open_store(store).manifest.cases]
    found = {"codes": codes, "left": left, "files": files(), "hashes": hashes}
    print(json.dumps({**found, "problems": verify(store, workers=1).problems}))
"""


@pytest.mark.parametrize("claims", ["yes", "no"])
@pytest.mark.parametrize(
    ("kind", "told"), [("rlimit", errno.EFBIG), ("tmpfs", errno.ENOSPC)], ids=["largest file", "full tmpfs"]
)
def test_a_disk_that_takes_no_more_keeps_what_is_finished_and_the_same_command_continues(work, kind, told, claims):
    # A real limit: the third case does not fit. Where space can be claimed that fails, elsewhere the writing does.
    large = np.random.default_rng(0).integers(1, 999, (24, 24, 24, 4)).astype(np.int16)
    work.write(work.image, large)
    work.write(work.label, np.ones((24, 24, 24), np.uint8))
    work.store.mkdir()
    command = ["prepare", "--dataset", str(work.data), "--store", str(work.store), "--split", "1", "0", "0"]
    alone = ["unshare", "--map-root-user", "--mount"] if kind == "tmpfs" else []
    if alone and (not shutil.which("unshare") or subprocess.run([*alone, "true"], check=False).returncode):
        pytest.skip("a tmpfs cannot be mounted here")
    python = [*alone, sys.executable, "-c", textwrap.dedent(FULL), kind, claims, str(work.store)]
    done = subprocess.run([*python, *command, "--workers", "1"], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("a tmpfs cannot be mounted here")
    assert done.returncode == 0, done.stderr
    assert re.search(rf"{os.strerror(told)}; 2 finished cases kept, make room or mend access and run", done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["codes"] == [1, 0]
    finished = {f"BRATS_00{number}.{end}" for number in (0, 1) for end in ("x.npy", "y.npy", "json")}
    assert set(found["left"]) == finished | {"source.json"}  # nothing half written, no manifest
    assert {name: found["files"][name] for name in found["left"]} == found["left"]
    assert found["problems"] == []
    expected = [voxels_sha256(large if number == 2 else work.channels(number)) for number in range(4)]
    assert found["hashes"] == expected


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_space_that_is_refused_when_it_is_claimed_stops_the_work_at_once(work, monkeypatch, error):
    calls = []

    def full(*_):
        calls.append(1)
        if len(calls) > 5:  # two arrays a case: the third case's second one
            raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "posix_fallocate", full)
    code, (told,) = work.prepare()
    assert code == 1
    assert f"{os.strerror(error)}; 2 finished cases kept, make room or mend access and run the same command" in told
    assert not list(work.store.rglob("*.partial"))
    assert not (work.store / "manifest.json").exists()
    kept = (work.store / "cases/BRATS_001.x.npy").stat().st_mtime_ns
    monkeypatch.undo()
    assert work.prepare() == (0, [])
    assert (work.store / "cases/BRATS_001.x.npy").stat().st_mtime_ns == kept
    for case_id in (*GOOD, BAD):
        work.check_case(open_store(work.store), case_id)


# --- A crash in mid-conversion ---


def test_a_process_killed_in_mid_conversion_leaves_what_the_same_command_continues(work):
    script = """
        import os, pathlib, signal, sys
        from cpu3d.__main__ import main

        def killed_at(handle, real=os.fsync):  # as kill -9 does, while the third case's label is being written
            if "BRATS_002.y.npy" in os.readlink(f"/proc/self/fd/{handle}"):
                os.kill(os.getpid(), signal.SIGKILL)
            real(handle)

        os.fsync = killed_at
        main(sys.argv[1:])
    """
    options = ["--split", "1", "0", "0", "--workers", "1"]
    command = ["prepare", "--dataset", str(work.data), "--store", str(work.store), *options]
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(script), *command], capture_output=True, check=False)
    assert killed.returncode == -9, killed.stderr
    cases = work.store / "cases"
    assert [path.name[:17] for path in cases.glob(".*.partial")] == [".BRATS_002.y.npy."]
    with pytest.raises(InputError, match=r"must hold a finished manifest\.json, found none"):
        open_store(work.store)
    kept = {path.name: path.stat().st_mtime_ns for path in cases.glob("BRATS_00[01].*")}
    assert len(kept) == 6
    assert work.prepare() == (0, [])
    assert {path.name: path.stat().st_mtime_ns for path in cases.glob("BRATS_00[01].*")} == kept
    assert not list(work.store.rglob("*.partial"))
    for case_id in (*GOOD, BAD):
        work.check_case(open_store(work.store), case_id)


# --- A modality or label missing ---


def test_every_missing_modality_and_label_is_told_at_once(tmp_path, brats_case, capsys):
    for case_id in ("a", "b", "c", "d"):
        files = brats_case(tmp_path / "data" / case_id)
        for suffix in {"b": ["t1c"], "d": ["t2w", "seg"]}.get(case_id, []):
            files[suffix].unlink()
    where = ["--dataset", str(tmp_path / "data"), "--store", str(tmp_path / "store"), "--split", "1", "0", "0"]
    assert main(["prepare", *where, "--workers", "1"]) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(told) == 4
    for line, what in zip(told, ("modality .*/b/*-t1c", "modality .*/d/*-t2w", "label .*/d/*-seg")):
        rule = re.escape(what).replace(r"\.\*/", ".*/") + r"\.nii\.gz must be there once, found none"
        assert re.search(rule, line), line
    assert "got 2 bad cases; 2 good cases kept" in told[3]
    assert main(["prepare", *where, "--workers", "1", "--skip-bad"]) == 0
    store = open_store(tmp_path / "store")
    assert [case.case_id for case in store.cases("train")] == ["a", "c"]
    store.check(store.cases("train"))


def test_a_missing_image_or_label_of_a_list_is_told(work):
    work.image.unlink()
    work.label.unlink()
    work.refused(
        r"image .*imagesTr/BRATS_002\.nii\.gz must exist, found none; fetch it again",
        r"label .*labelsTr/BRATS_002\.nii\.gz must exist, found none; fetch it again",
    )


# --- NaN and infinity ---


def test_nan_and_infinite_voxels_are_refused(work):
    sick = work.channels(dtype=np.float32)
    sick[1, 1, 1, 0], sick[2, 2, 2, 0], sick[0, 0, 0, 3] = np.nan, np.inf, -np.inf
    work.write(work.image, sick)
    work.refused(
        r"channel FLAIR of .*BRATS_002\.nii\.gz must be finite, got 2 NaN or infinite voxels; mend it.*--zero-nan",
        r"channel T2w of .*BRATS_002\.nii\.gz must be finite, got 1 NaN or infinite voxels",
    )


def test_nan_and_infinite_voxels_become_background_when_asked_and_are_counted(work):
    sick = work.channels(dtype=np.float32)
    sick[1, 1, 1, 0], sick[2, 2, 2, 0], sick[0, 0, 0, 3] = np.nan, np.inf, -np.inf
    work.write(work.image, sick)
    assert work.prepare("--zero-nan") == (0, [])
    assert "zeroed   3 NaN or infinite voxels in 1 case made background" in work.printed.out
    store = open_store(work.store)
    assert [case.zeroed_voxels for case in store.cases("train")] == [0, 0, 3, 0]
    assert np.array_equal(store.image(BAD), np.where(np.isfinite(sick), sick, 0))
    for case_id in GOOD:
        work.check_case(store, case_id)
    sick[..., 2] = np.nan
    work.write(work.image, sick)
    (work.store / "manifest.json").unlink()
    code, told = work.prepare("--zero-nan")
    assert (code, len(told)) == (2, 2)
    assert "channel t1gd of" in told[0]
    assert "must not be empty, got zeros only" in told[0]


# --- Channels without contrast ---


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


# --- Files that do not lie on one grid ---

SHIFTED, LPS = np.eye(4), np.diag([-1.0, -1.0, 1.0, 1.0])
SHIFTED[0, 3] = 0.01


@pytest.mark.parametrize(
    ("affine", "planes", "rule"),
    [
        pytest.param(np.eye(4), 3, r"shape \(6, 5, 4\), got \(6, 5, 3\); resample it or leave", id="shape"),
        pytest.param(SHIFTED, 4, r"affines differ by 0\.01 mm, more than 0\.001; resample or", id="affine"),
        pytest.param(LPS, 4, r"axes RAS, got LPS; mend its header or leave the case out", id="axes"),
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


# --- Label codes ---


@pytest.mark.parametrize("value", [4, np.nan, 1.5, -1, 256])
def test_labels_outside_the_set_and_between_integers_are_refused(work, value):
    label = work.tiny_label(1, 2, 3).astype(np.float32)
    label[4, 4, 3] = value
    work.write(work.label, label)
    known = "0 background, 1 edema, 2 non-enhancing tumor, 3 enhancing tumour"
    work.refused(
        rf"label .*labelsTr/BRATS_002\.nii\.gz must hold only the codes {known};"
        rf" got {re.escape(f'{value:g}')} \(1 voxels\); mend it, or say what they are with --label-map"
    )


def test_codes_of_another_release_are_read_with_a_label_map_and_the_others_stay_an_error(work):
    work.write(work.label, work.tiny_label(1, 2, 4).astype(np.float64))
    assert work.prepare("--label-map", "4=3") == (0, [])
    assert "4 in the files is read as 3 enhancing tumour" in work.printed.out
    for case_id in (*GOOD, BAD):
        work.check_case(open_store(work.store), case_id)
    work.write(work.label, work.tiny_label(1, 5, 4))
    (work.store / "manifest.json").unlink()
    code, told = work.prepare("--label-map", "4=3")
    assert (code, len(told)) == (2, 2)
    assert "BRATS_002.nii.gz must hold only the codes" in told[0]
    assert "got 5 (1 voxels)" in told[0]


# --- What float16 cannot hold ---


def test_values_beyond_float16_are_stored_with_their_error_and_beyond_float64s_sums_are_refused(work):
    wide = work.channels(dtype=np.float64)
    wide[1, 1, 1, 1] = 1e6  # int16 and float16 end before it, its z-score does not
    work.write(work.image, wide)
    assert work.prepare() == (0, [])
    assert "1 float16; rounded by up to" in work.printed.out
    store = open_store(work.store)
    record, scores = store.case(BAD), store.image(BAD)[..., 1]
    inside = wide[..., 1] != 0
    exact = (wide[inside, 1] - wide[inside, 1].mean()) / wide[inside, 1].std()
    assert 0 < np.abs(scores[inside] - exact).max() <= record.max_abs_error < 2e-3
    (work.store / "manifest.json").unlink()
    wide[1, 1, 1, 1] = 1e300  # its square is no number
    work.write(work.image, wide)
    work.refused(
        r"channel T1w of BRATS_002 must have z-scores that float16 can hold, up to 65504, got .* standard deviation of"
        r" inf; rescale it or leave the case out"
    )


# --- Big-endian, scaled, RGB, 5-D ---


@pytest.mark.parametrize("dtype", [">i2", ">f4", ">f8", "<f8", "<u2", "<i4"])
def test_a_big_endian_or_wide_file_is_stored_as_its_values(work, dtype):
    header = nibabel.Nifti1Header(endianness=">" if dtype[0] == ">" else "<")
    header.set_data_dtype(np.dtype(dtype))
    nibabel.save(nibabel.Nifti1Image(work.channels(dtype=dtype), np.eye(4), header), work.image)
    assert gzip.decompress(work.image.read_bytes())[:2] == (b"\0\0" if dtype[0] == ">" else b"\x5c\1")
    assert work.prepare() == (0, [])
    work.check_case(open_store(work.store), BAD)


def test_a_scaled_file_is_stored_as_the_values_that_its_scaling_gives(work):
    content = bytearray(gzip.decompress(work.image.read_bytes()))
    content[112:120] = np.array([2, -3], "<f4").tobytes()  # scl_slope, scl_inter
    work.image.write_bytes(gzip.compress(bytes(content)))
    assert work.prepare() == (0, [])
    assert np.array_equal(open_store(work.store).image(BAD), work.channels() * 2 - 3)


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


# --- A patient in two splits ---


@pytest.fixture
def two_visits(tmp_path, brats_case):
    """A finished store in which patient BraTS-GLI-00001 has two cases."""
    for case_id in ("BraTS-GLI-00001-000", "BraTS-GLI-00001-001", "BraTS-GLI-00002-000", "BraTS-GLI-00003-000"):
        brats_case(tmp_path / "data" / case_id)
    prepare(tmp_path / "data", tmp_path / "store", workers=1)
    return open_store(tmp_path / "store")


def moved(split, case_id, to):
    """The split with a case taken out of where it is and put into another part."""
    rest = {name: tuple(one for one in ids if one != case_id) for name, ids in split.items()}
    return {**rest, to: tuple(sorted((*rest[to], case_id)))}


def test_a_patient_in_two_splits_is_refused_when_a_manifest_is_made_and_when_one_was_edited(two_visits):
    manifest, visit = two_visits.manifest, "BraTS-GLI-00001-001"
    here = next(name for name, ids in manifest.split.items() if visit in ids)
    there = next(name for name in manifest.split if name != here)
    two_visits.check_split()
    split = moved(manifest.split, visit, there)
    rule = f"patient BraTS-GLI-00001 must be in one split, got {' and '.join(sorted((here, there)))}; keep its cases"
    with pytest.raises(InputError, match=rule):
        remake(manifest, split=split)
    write_store(two_visits.folder, dataclasses.replace(manifest, split=split))
    with pytest.raises(InputError, match=rule):
        open_store(two_visits.folder).check_split()
    write_store(two_visits.folder, manifest)
    open_store(two_visits.folder).check_split()


def test_an_edited_split_is_refused_also_where_no_patient_is_parted(two_visits):
    manifest, case_id = two_visits.manifest, "BraTS-GLI-00002-000"
    here = next(name for name, ids in manifest.split.items() if case_id in ids)
    there = next(name for name in manifest.split if name != here)
    write_store(two_visits.folder, dataclasses.replace(manifest, split=moved(manifest.split, case_id, there)))
    with pytest.raises(InputError, match=rf"split of store .* must have hash {manifest.split_hash}, as it was made"):
        open_store(two_visits.folder).check_split()
    twice = {**manifest.split, there: tuple(sorted((*manifest.split[there], case_id)))}
    write_store(two_visits.folder, dataclasses.replace(manifest, split=twice))
    with pytest.raises(InputError, match=rf"case {case_id} of store .* must be in one split, got two"):
        open_store(two_visits.folder)


@pytest.mark.parametrize(
    ("case_id", "rule"),
    [
        ("BraTS-GLI-00001-001", "patient BraTS-GLI-00001 must be in one split, got"),
        ("BraTS-GLI-00002-000", "split of store .* must have hash .*, as it was made, got another"),
    ],
)
def test_train_refuses_a_parted_patient_and_an_edited_split_before_it_sets_anything_up(
    two_visits, monkeypatch, case_id, rule
):
    manifest, run = two_visits.manifest, two_visits.folder.parent / "run"
    here = next(name for name, ids in manifest.split.items() if case_id in ids)
    there = next(name for name in manifest.split if name != here)
    write_store(two_visits.folder, dataclasses.replace(manifest, split=moved(manifest.split, case_id, there)))
    monkeypatch.setattr(train_module, "set_up", lambda *_: pytest.fail("TensorFlow was set up"))
    with pytest.raises(InputError, match=rule):
        train_module.train(two_visits.folder, run, force=True)
    assert main(["train", "--store", str(two_visits.folder), "--run", str(run), "--force"]) == 2
    assert not run.exists()


# --- Arrays that are not what the record says, or not where TensorFlow can take them ---


@pytest.mark.parametrize(
    "drift",
    [
        pytest.param(lambda image: image.astype(np.float16), id="dtype"),
        pytest.param(lambda image: image.astype(">i2"), id="byte order"),
        pytest.param(lambda image: np.asfortranarray(image), id="memory order"),
        pytest.param(lambda image: np.ascontiguousarray(image.swapaxes(0, 1)), id="shape"),
    ],
)
@pytest.mark.parametrize("mode", ["mmap", "pread", "ram"])
def test_an_array_that_drifted_from_its_record_is_refused(work, drift, mode):
    prepare(work.data, work.store, fractions=(1, 0, 0), workers=1)
    store = open_store(work.store)
    path = array_path(work.store, store.case(BAD), "x")
    np.save(path, drift(work.channels()))
    assert path.stat().st_size == store.case(BAD).image_bytes  # its length gives nothing away
    wrong = r"BRATS_002\.x\.npy must be a \.npy array of int16 \(6, 5, 4, 4\), got another header; delete it and run"
    with pytest.raises(InputError, match=wrong):
        Reader(work.store, mode).array(store.case(BAD), "x")
    with pytest.raises(InputError, match=wrong):
        open_store(work.store).check(store.cases("train"))
    path.unlink()
    assert work.prepare() == (0, [])
    work.check_case(open_store(work.store), BAD)


def test_an_array_that_is_not_aligned_is_copied_and_counted(work, monkeypatch):
    prepare(work.data, work.store, fractions=(1, 0, 0), workers=1)
    store = open_store(work.store)
    aligned = Reader(work.store)
    aligned.array(store.case(BAD), "x")
    assert (aligned.reads.arrays, aligned.reads.zero_copy) == (1, 1)
    real = ArrayFile.content

    def shifted(file, **options):
        content = np.empty(file.size_bytes + 1, np.uint8)[1:]
        content[:] = real(file, **options)
        return content

    monkeypatch.setattr(ArrayFile, "content", shifted)
    copying = Reader(work.store)
    array = copying.array(store.case(BAD), "x")
    assert np.array_equal(array, work.channels())
    assert array.ctypes.data % 64 == 0
    assert (copying.reads.arrays, copying.reads.zero_copy, copying.reads.zero_copy_ratio) == (1, 0, 0.0)


# --- What is no file, or no JSON ---


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


@pytest.mark.parametrize("name", ["config.json", "log.jsonl"])
def test_a_fifo_in_a_run_folder_is_named_and_never_opened(tmp_path, in_time, capsys, name):
    save_config(RunConfig(), tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    assert main(["report", "--run", str(tmp_path)]) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize("name", ["data/dataset.json", "store/manifest.json", "store/source.json", f"store/{RECORDS}"])
def test_json_that_is_nested_too_deep_is_bad_input_with_the_name_of_its_file(work, name):
    assert work.prepare()[0] == 0
    (path,) = work.data.parent.glob(name)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[0] = b"[" * (len(lines[0]) - 1 if name.endswith(RECORDS) else 100_000) + b"\n"
    path.write_bytes(b"".join(lines))
    code, told = work.prepare("--verify")
    assert code == 2
    assert path.name in told[0]
