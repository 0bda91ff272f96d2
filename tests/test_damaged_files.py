"""One file is damaged, and every command that reads it answers, and changes nothing but what it is there to write.

    CPU3D_DAMAGED_FILES=3000 CPU3D_DAMAGED_SEED=7 ./run.sh test --all tests/test_damaged_files.py

To answer is to end with a documented exit code, within two minutes and 2 GiB, and with a line that says why where the
code is not 0. Which file is damaged, how, and what reads it follow from the seed and the name of the test.
"""

import contextlib
import faulthandler
import fnmatch
import gzip
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import stat
import struct
import sys
import traceback
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Tuple

import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.compare import run as compare_run
from cpu3d.data.nifti import read_volume, write_volume
from cpu3d.data.store import open_store, sealed
from cpu3d.errors import InputError
from cpu3d.run.checkpoint import load_checkpoint
from cpu3d.settings import load_config, save_config
from memory_estimator import calibration
from memory_estimator.__main__ import main as estimate
from memory_estimator.step.onednn import USUAL

pytestmark = pytest.mark.slow

FILES = int(os.environ.get("CPU3D_DAMAGED_FILES", "320"))
SEED = int(os.environ.get("CPU3D_DAMAGED_SEED", "0"))
CODES = (0, 1, 2, 3, 4)
"""What a command may end with; the other codes are of signals, lost workers and memory that runs out on the way."""
MOST_S, MOST_BYTES = 120, 2 << 30

# --- Damage to the bytes of any file ---


def flip_bits(content, rng):
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 8])):
        changed[rng.randrange(rng.choice([len(content), min(len(content), 400)]))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(content, rng):
    return content[: rng.choice([0, rng.randrange(len(content)), len(content) - 1])]


def zero_block(content, rng):
    start, length = rng.randrange(len(content)), rng.choice([1, 16, 512, 1 << 20])
    return content[:start] + bytes(len(content[start : start + length])) + content[start + length :]


def double_block(content, rng):
    start = rng.randrange(len(content))
    return content[:start] + content[start : start + rng.choice([1, 16, 512, 1 << 20])] + content[start:]


def not_utf8(content, rng):
    place = rng.randrange(len(content))
    return content[:place] + rng.choice([b"\xff\xfe", b"\xc3", b"\0", b"\xed\xa0\x80"]) + content[place:]


# --- Damage that leaves JSON, NIfTI, npy and zip well-formed around it ---

HUGE, DEEP = "@a number of 5,000 digits@", "@100,000 brackets@"
ODD = (
    *(None, True, -1, 0, 1, 3, 2.5, 1e308, float("nan"), float("inf"), 10**30, 2**63, HUGE, DEEP),
    *("", "x", "..", "/", "a\0b", "\ud800", "nan", "é" * 300),
    *([], {}, [[]], [None], {"": None}, [1, 2, 3], {"0": 1}, ["FLAIR"], [[1, 2], [3]]),
)
"""What nobody has written in its place, and JSON can hold all the same."""


def spoilt(value, rng):
    """`value` with one part of it replaced, left out, renamed or doubled."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.9:
        place = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        how = rng.random()
        if how < 0.8:
            value[place] = spoilt(value[place], rng)
        elif how < 0.9:
            del value[place]
        elif isinstance(value, dict):
            value[rng.choice(["x", "../x", place.upper(), "1"])] = value.pop(place)
        else:
            value.append(value[place])
        return value
    if isinstance(value, (int, float)) and rng.random() < 0.4:
        return rng.choice([-value, value + 1, value * 1000, float(value), str(value)])
    return rng.choice(ODD)


def written(value):
    text = json.dumps(value).replace(f'"{HUGE}"', "9" * 5000).replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000)
    return text.encode()


def spoil_json(content, rng):
    try:
        return written(spoilt(json.loads(content), rng))
    except ValueError:  # a value a line
        lines = content.splitlines(keepends=True)
        place = rng.randrange(len(lines))
        return b"".join([*lines[:place], written(spoilt(json.loads(lines[place]), rng)), b"\n", *lines[place + 1 :]])


NIFTI1 = [
    *[("<i", at) for at in (0, 344)],
    *[("<h", at) for at in (*range(40, 56, 2), 70, 72, 252, 254)],
    *[("<f", at) for at in (*range(76, 124, 4), *range(256, 328, 4))],
]
"""Format and place of fields of the header: dim, datatype, pixdim, vox_offset, scaling, qform, sform, magic."""


def spoil_nifti(content, rng):
    packed = content[:2] == b"\x1f\x8b"
    content = bytearray(gzip.decompress(content) if packed else content)
    for kind, place in rng.sample(NIFTI1, rng.choice([1, 1, 2])):
        value = rng.choice([0, 1, -1, 2, 3, 4, 5, 16, 24, 25, 64, 128, 256, 348, 512, 1024, 2304, 32767, -32768])
        if kind == "<f":
            value = rng.choice([value, float("nan"), float("inf"), -float("inf"), 1e38, 1e-38, 0.5, 352.0, 2.0**31])
        content[place : place + struct.calcsize(kind)] = struct.pack(kind, value)
    return gzip.compress(bytes(content), 1) if packed else bytes(content)


def spoil_npy(content, rng):
    """Another header of the same length."""
    end = 10 + struct.unpack("<H", content[8:10])[0]
    descr = rng.choice(["'|O'", "'<f8'", "'>i2'", "'<U9'", "'|V0'", "[('a', '<i2')]", "'x'", "'<i2'", "'|u1'", "'<f4'"])
    shape = rng.choice(["(1000000, 1000000)", "(-1,)", "(0,)", "()", "'x'", "(2.5,)", f"({2**62}, 4)", "(24, 24, 24)"])
    text = f"{{'descr': {descr}, 'fortran_order': {rng.choice(['False', 'True', '2'])}, 'shape': {shape}, }}"
    header = rng.choice([text, text, "import os", "(" * 100, "{}"]).encode()
    return content[:10] + header[: end - 11].ljust(end - 11) + b"\n" + content[end:]


def spoil_zip(content, rng):
    """A whole zip, with right sums, of other members."""
    with zipfile.ZipFile(io.BytesIO(content)) as old:
        members = [(name, old.read(name)) for name in old.namelist()]
    place = rng.choice([0, rng.randrange(len(members))])  # the first is the state of the run
    name, data = members[place]
    array = np.lib.format.read_array(io.BytesIO(data))
    if place == 0 and rng.random() < 0.7:
        array = np.frombuffer(written(spoilt(json.loads(array.tobytes()), rng)), np.uint8)
    others = [np.zeros((*array.shape, 2), array.dtype), np.flip(array), array, array, array * np.array(2, array.dtype)]
    members[place : place + 1] = rng.choice(
        [[], [(name, spoil_npy(data, rng))], [(name, cut(data, rng))], [(name, data), (f"{name}x.npy", data)]]
        + [[(new, data)] for new in ("../x.npy", "x", "state.json.npy")]
        + [[(name, npy(other))] for other in others]
    )
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as new:
        for member in dict(members).items():  # no name twice: zipfile warns of it
            new.writestr(*member)
    return file.getvalue()


def npy(array):
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asanyarray(array))
    return file.getvalue()


ANY = (flip_bits, cut, zero_block, double_block)
OF_SUFFIX = {
    ".json": (spoil_json,) * 4 + (not_utf8,),
    ".jsonl": (spoil_json,) * 3 + (not_utf8,),
    ".gz": (spoil_nifti,) * 4,
    ".nii": (spoil_nifti,) * 4,
    ".npy": (spoil_npy,),
    ".npz": (spoil_zip,) * 4,
    ".txt": (not_utf8,),
}

# --- Damage to more than the content of a file ---


def reseal(path, rng):
    """A record of the store, or a field of its manifest, is changed, and all sums are made right again."""
    store = path.parent.parent if path.parent.name == "cases" else path.parent
    manifest = json.loads((store / "manifest.json").read_text())
    records = store / manifest["records"]["file"]
    if rng.random() < 0.3:
        manifest = spoilt(manifest, rng)
    else:
        content = spoil_json(records.read_bytes(), rng)
        records.write_bytes(content)
        manifest["records"].update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    (store / "manifest.json").write_bytes(written(sealed(manifest) if isinstance(manifest, dict) else manifest))


def neighbour(path, rng):
    content = rng.choice(sorted(other for other in path.parent.iterdir() if other.is_file())).read_bytes()
    path.write_bytes(content)


INSTEAD = {
    "nothing": lambda path: None,
    "folder": Path.mkdir,
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
}
"""What may lie in a file's place."""


def damage(path, rng, more):
    """Damage `path` in one way; returns which."""
    ways = [*ANY, *OF_SUFFIX.get(path.suffix, ()), *more]
    way = rng.choice([*ways, *ways, neighbour, *INSTEAD])
    if way in INSTEAD:
        path.unlink()
        INSTEAD[way](path)
        return way
    if way in (reseal, neighbour):
        way(path, rng)
    else:
        path.write_bytes(way(path.read_bytes(), rng))
    return way.__name__


# --- What reads them ---


@dataclass(frozen=True)
class Target:
    """Files of one kind, and what reads them."""

    files: Tuple[str, ...]
    share: int
    """Of a hundred damaged files."""
    readers: Tuple[Any, ...]
    """Command lines, or functions of the damaged path: it is {file}, and {top} the folder at the top that holds it."""
    more: Tuple[Callable, ...] = ()
    """Damage of this kind alone."""


def loads(path):
    """A checkpoint, whose every byte is summed."""
    try:
        load_checkpoint(path)
        return 0
    except InputError as error:
        print(f"error: {error}")
        return 2


NET = "--filters 2 --depth 2 --batch 1 --dtype float32 --policy speed --keep 2 --save-minutes 0 --validations 1"
TRAIN = f"train --store store --run run --steps 3 {NET}"
PREDICT = "predict --run run --image data/imagesTr/BRATS_001.nii.gz --out out"
COMPARE = f"compare --store store --out comparison --seeds 0 1 --epochs 1 {NET}"
LAUNCH = "launch --dry-run {} train --store store --run {} --batch-per-worker 1"
STORE = (
    *("store verify {top} --workers 1",) * 3,
    *("store info {top}", "store append {top} --dataset data --workers 1"),
    "evaluate --run run --store {top} --out out",
)
PREPARE = "prepare --workers 1 --dataset data --store"
TARGETS = {
    "data set": Target(
        ("data/dataset.json", "data/dataset.json", "data/imagesTr/*", "data/labelsTr/*"),
        16,
        (
            *(f"{PREPARE} new", f"{PREPARE} new --skip-bad --zero-nan", f"{PREPARE} store"),
            "store append store --dataset data --workers 1 --skip-bad",
        ),
    ),
    "folders": Target(("brats/*/*",), 8, ("prepare --workers 1 --dataset brats --store new --split 1 0 0 --skip-bad",)),
    "image": Target(("data/imagesTr/*",), 6, ("predict --run run --image {file} --out out",)),
    "case": Target(("brats/*/*",), 4, ("predict --run run --image {file.parent} --out out",)),
    "store": Target(
        ("store/*.json*", "store/cases/*"), 16, (*STORE, f"{PREPARE} store --verify", TRAIN), (reseal, reseal, reseal)
    ),
    "packed store": Target(
        ("packed/*.json*", "packed/cases/*"),
        8,
        (*STORE, f"{PREPARE} packed --verify --format b2nd"),
        (reseal, reseal),
    ),
    "store begun": Target(("begun/*", "begun/cases/*"), 8, (f"{PREPARE} begun --verify",)),
    "run": Target(
        (
            *("run/*.json*", "run/config.json", "run/plan.json", "run/log.jsonl", "run/heartbeats/*"),
            *("run/evaluation/scores.json", "run/evaluation/predictions/*"),
        ),
        16,
        (
            *("status --run run", "status --run run --json", "report --run run --out out/page.html"),
            *("estimate --run run", LAUNCH.format("", "run"), "evaluate --run run --out out", TRAIN, PREDICT),
            *("compare --runs run other --out out --force", "compare --runs other run --out out"),
        ),
    ),
    "checkpoint": Target(
        ("run/checkpoints/*",), 12, (*(loads,) * 6, PREDICT, f"{PREDICT} --weights last", "status --run run", TRAIN)
    ),
    "comparison": Target(("comparison/compare.json",), 3, (COMPARE,)),
    "calibration": Target(("calibration.json",), 3, ("estimate --calibration calibration.json --shape 64 64 64",)),
    "phantom": Target(("made/*",), 2, ("phantom --out made --cases 2 --shape 24 24 24 --workers 1",)),
}
WRITES = {
    "prepare": ("new/*", "begun/*", "packed/*", "store/*"),
    "store": ("new/*", "packed/*", "*/quarantine.jsonl"),
    "predict": ("out/*",),
    "evaluate": ("out/*",),
    "report": ("out/*",),
    "train": ("run/*",),
    "compare": ("out/*", "comparison/*"),
    "phantom": ("made/*",),
}
"""Command -> what it may write. Of a store's arrays it may only make damaged ones as they were."""

# --- One of each, made once ---


def call(command):
    """Exit code of a command line."""
    words = command.split()
    return estimate(words[1:]) if words[0] == "estimate" else main(words)


def no_process(*given, **more):
    raise InputError("a run must be trained and scored already, got one that is not; no process is started here")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The folder that all is in; "whole", beside it, stays as it is."""
    root = tmp_path_factory.mktemp("damaged") / "root"
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr(compare_run, "call", no_process)
        make_all()
    shutil.copytree(root, root.with_name("whole"))
    return root


def make_all():
    for folder, cases in (("data", 5), ("made", 2)):
        assert call(f"phantom --out {folder} --cases {cases} --shape 24 24 24 --workers 1") == 0
    plain, listed = Path("data/imagesTr/BRATS_005.nii"), Path("data/dataset.json")
    plain.write_bytes(gzip.decompress(Path(f"{plain}.gz").read_bytes()))
    Path(f"{plain}.gz").unlink()
    listed.write_text(listed.read_text().replace("imagesTr/BRATS_005.nii.gz", "imagesTr/BRATS_005.nii"))
    for number in (1, 2):
        image, geometry = read_volume(f"data/imagesTr/BRATS_00{number}.nii.gz")
        label, _ = read_volume(f"data/labelsTr/BRATS_00{number}.nii.gz")
        case = Path(f"brats/BraTS-GLI-0000{number}-000")
        case.mkdir(parents=True)
        for name, volume in zip(("t2f", "t1n", "t1c", "t2w", "seg"), (*np.moveaxis(image, -1, 0), label)):
            write_volume(case / f"{case.name}-{name}.nii.gz", volume, geometry)
    assert call(f"{PREPARE} store --split 0.6 0.2 0.2") == 0
    assert call(f"{PREPARE} packed --split 0.6 0.2 0.2 --format b2nd") == 0
    shutil.copytree("store", "begun", ignore=shutil.ignore_patterns("manifest.json", "*.jsonl"))
    assert call(TRAIN.replace("--steps 3", "--steps 2")) == 0
    assert call("evaluate --run run") == 0
    shutil.copytree("run", "other")
    config = load_config(Path("other"))
    save_config(replace(config, seed=1, unet=replace(config.unet, seed=1)), Path("other"))
    assert call(COMPARE) == 2  # with its plan kept
    Path("calibration.json").write_text(json.dumps(calibration.to_json(calibration.shipped_constants(USUAL))))


# --- The test ---


class TooLongError(BaseException):
    """Nothing in the product catches it."""


@contextlib.contextmanager
def limits():
    def ring(*_):
        raise TooLongError(f"{MOST_S} s")

    handler, memory = signal.signal(signal.SIGALRM, ring), resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    faulthandler.dump_traceback_later(5 * MOST_S, exit=True, file=sys.__stderr__)  # of what no signal interrupts
    signal.setitimer(signal.ITIMER_REAL, MOST_S)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MOST_BYTES, memory[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, memory)
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, handler)


def content_of(root):
    """Path -> what lies there; only regular files are opened."""
    modes = {path: path.lstat().st_mode for path in root.rglob("*")}
    return {
        path.relative_to(root).as_posix(): path.read_bytes() if stat.S_ISREG(mode) else stat.S_IFMT(mode)
        for path, mode in modes.items()
        if not stat.S_ISDIR(mode)
    }


@pytest.mark.parametrize(
    ("name", "number"), [(name, i) for name, target in TARGETS.items() for i in range(-(-FILES * target.share // 100))]
)
def test_a_damaged_file_is_answered_and_nothing_else_is_changed(name, number, root, monkeypatch, capsys):
    shutil.rmtree(root)
    shutil.copytree(root.with_name("whole"), root)
    monkeypatch.chdir(root)
    monkeypatch.setattr(compare_run, "call", no_process)
    rng, target = random.Random(f"{SEED} {name} {number}"), TARGETS[name]
    path = rng.choice(sorted(one for one in root.glob(rng.choice(target.files)) if one.is_file()))
    file, reader = path.relative_to(root), rng.choice(target.readers)
    way, before = damage(path, rng, target.more), content_of(root)
    command = reader.format(file=file, top=file.parts[0]) if isinstance(reader, str) else ""
    told = f"{way} of {file}, then {command or reader.__name__}"
    capsys.readouterr()
    try:
        with limits():
            code = call(command) if command else reader(path)
    except BaseException:
        pytest.fail(f"{told}:\n{traceback.format_exc()[-3000:]}", pytrace=False)
    said, after = "".join(capsys.readouterr()), content_of(root)
    told = f"{told}: {code}\n{said[-2000:]}"
    assert code in CODES, told
    assert "Traceback" not in said, told
    assert len(said) < 30_000, told
    assert "error: " in said or code == 0 or command.startswith("status"), told
    may, whole = WRITES.get(command.partition(" ")[0], ()), content_of(root.with_name("whole"))
    for one in {name for name in {**before, **after} if before.get(name) != after.get(name)}:
        assert any(fnmatch.fnmatch(one, pattern) for pattern in may), f"{one} is changed: {told}"
        if fnmatch.fnmatch(one, "*/cases/*") and one in before:
            assert after.get(one) == whole[one], f"{one} is changed: {told}"
    if code == 0:
        check_what_was_found_good(reader, way, path, root, told)


def check_what_was_found_good(reader, way, path, root, told):
    """That no damage passed where sums would have shown it, and that other cases are what they were."""
    whole = root.with_name("whole") / path.relative_to(root)
    if reader is loads and way not in ("spoil_zip", "neighbour"):
        found, expected = load_checkpoint(path), load_checkpoint(whole)
        assert found[1] == expected[1], told
        assert all(np.array_equal(found[0][name], array) for name, array in expected[0].items()), told
    elif reader == STORE[0] and way != "reseal" and path.name.startswith(("cases-", "BRATS")):
        read = json.loads if path.suffix == ".json" else bytes  # of a case's own record blanks are of no account
        assert read(path.read_bytes()) == read(whole.read_bytes()), told
    elif str(reader).startswith(PREPARE) and way != "reseal":
        new, old = open_store(reader.split()[6]), open_store(root.with_name("whole") / "store")
        assert call(f"store verify {new.folder} --workers 1") == 0, told
        for record in new.manifest.cases:
            same = record.image_voxels_sha256 == old.case(record.case_id).image_voxels_sha256
            assert same or path.name.startswith(record.case_id), told
