"""One file is damaged, and every command that reads it answers, and changes nothing but what it is
there to write.

    CPU3D_DAMAGED_FILES=3000 CPU3D_DAMAGED_SEED=7 ./run.sh test --all tests/test_damaged_files.py

To answer is to end with a documented exit code, within two minutes and 2 GiB, and with a line that
says why where the code is not 0. Which file is damaged, how, and what reads it follow from the seed
and the name of the test."""

import contextlib
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
import traceback
import zipfile
from pathlib import Path

import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.data.nifti import read_volume, write_volume
from cpu3d.data.store import open_store, sealed
from cpu3d.errors import InputError
from cpu3d.experiments import runner
from memory_estimator import calibration
from memory_estimator.__main__ import main as estimate

pytestmark = pytest.mark.slow

FILES = int(os.environ.get("CPU3D_DAMAGED_FILES", "320"))
SEED = int(os.environ.get("CPU3D_DAMAGED_SEED", "0"))
CODES = (0, 1, 2, 3, 4)
"""What a command may end with; the other codes are of signals, lost workers and memory that runs
out on the way."""
MOST_S = 120
MOST_BYTES = 2 << 30

# --- Damage to the bytes of any file, and to what is in JSON, NIfTI, npy and zip files that stay
# well-formed ---


def flip_bits(content, rng):
    changed = bytearray(content)
    for _ in range(rng.choice([1, 8])):
        changed[rng.randrange(rng.choice([len(content), min(len(content), 400)]))] ^= (
            1 << rng.randrange(8)
        )
    return bytes(changed)


def cut(content, rng):
    return content[: rng.choice([0, rng.randrange(len(content)), len(content) - 1])]


def zero_block(content, rng):
    start = rng.randrange(len(content))
    length = rng.choice([1, 16, 512, 1 << 20])
    return content[:start] + bytes(len(content[start : start + length])) + content[start + length :]


def not_utf8(content, rng):
    place = rng.randrange(len(content))
    return content[:place] + rng.choice([b"\xff\xfe", b"\0", b"\xed\xa0\x80"]) + content[place:]


HUGE = "@a number of 5,000 digits@"
DEEP = "@100,000 brackets@"
INVALID = (
    None,
    True,
    -1,
    0,
    2.5,
    float("nan"),
    10**30,
    HUGE,
    DEEP,
    "",
    "..",
    "a\0b",
    "\ud800",
    [],
    {},
    [[1, 2], [3]],
)


def changed(value, rng):
    """`value` with one part of it replaced, left out or renamed."""
    if not (isinstance(value, (dict, list)) and value and rng.random() < 0.9):
        is_number = isinstance(value, (int, float)) and rng.random() < 0.4
        return rng.choice([-value, value * 1000, str(value)] if is_number else INVALID)
    place = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    how = rng.random()
    if how < 0.8:
        value[place] = changed(value[place], rng)
    elif how < 0.9 or isinstance(value, list):
        del value[place]
    else:
        value["../x"] = value.pop(place)
    return value


def written(value):
    text = (
        json.dumps(value)
        .replace(f'"{HUGE}"', "9" * 5000)
        .replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000)
    )
    return text.encode()


def change_json(content, rng):
    try:
        return written(changed(json.loads(content), rng))
    except ValueError:  # a value a line
        lines = content.splitlines(keepends=True)
        place = rng.randrange(len(lines))
        return b"".join(
            [
                *lines[:place],
                written(changed(json.loads(lines[place]), rng)),
                b"\n",
                *lines[place + 1 :],
            ]
        )


NIFTI1 = [("<i", 0), ("<i", 344), *[("<h", at) for at in (*range(40, 56, 2), 70, 72, 252, 254)]]
NIFTI1 += [("<f", at) for at in (*range(76, 124, 4), *range(256, 328, 4))]
"""Format and place of fields of the header: dim, datatype, pixdim, vox_offset, scaling, qform,
sform, magic."""


def change_nifti(content, rng):
    packed = content[:2] == b"\x1f\x8b"
    content = bytearray(gzip.decompress(content) if packed else content)
    kind, place = rng.choice(NIFTI1)
    value = rng.choice([0, 1, -1, 2, 3, 5, 16, 64, 256, 348, 512, 2304, 32767, -32768])
    if kind == "<f":
        value = rng.choice([value, float("nan"), float("inf"), 1e38, 1e-38, 0.5, 2.0**31])
    content[place : place + struct.calcsize(kind)] = struct.pack(kind, value)
    return gzip.compress(bytes(content), 1) if packed else bytes(content)


def change_npy(content, rng):
    """Another header of the same length."""
    end = 10 + struct.unpack("<H", content[8:10])[0]
    descr = rng.choice(
        ["'|O'", "'<f8'", "'>i2'", "'|V0'", "[('a', '<i2')]", "'x'", "'|u1'", "'<f4'"]
    )
    shape = rng.choice(
        [
            "(1000000, 1000000)",
            "(-1,)",
            "(0,)",
            "()",
            "'x'",
            "(2.5,)",
            f"({2**62}, 4)",
            "(24, 24, 24)",
        ]
    )
    order = rng.choice(["False", "True", "2"])
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"
    header = rng.choice([text, text, "(" * 100, "{}"]).encode()
    return content[:10] + header[: end - 11].ljust(end - 11) + b"\n" + content[end:]


def change_zip(content, rng):
    """A whole zip, with right sums, of other members."""
    with zipfile.ZipFile(io.BytesIO(content)) as old:
        members = [(name, old.read(name)) for name in old.namelist()]
    place = rng.choice([0, rng.randrange(len(members))])  # the first is the state of the run
    name, data = members[place]
    state = np.lib.format.read_array(io.BytesIO(members[0][1])).tobytes()
    made = io.BytesIO()
    np.lib.format.write_array(
        made, np.frombuffer(written(changed(json.loads(state), rng)), np.uint8)
    )
    other = made.getvalue()
    members[place : place + 1] = rng.choice(
        [
            [],
            [(name, change_npy(data, rng))],
            [(name, cut(data, rng))],
            [("../x.npy", data)],
            [(name, other)],
        ]
    )
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as new:
        for member in members:
            new.writestr(*member)
    return file.getvalue()


ANY = (flip_bits, cut, zero_block)
OF_SUFFIX = {
    ".json": (change_json, change_json, not_utf8),
    ".jsonl": (change_json, change_json, not_utf8),
    ".gz": (change_nifti,) * 3,
    ".nii": (change_nifti,) * 3,
    ".npy": (change_npy,),
    ".npz": (change_zip,) * 3,
}
INSTEAD = {
    "nothing": lambda path: None,
    "folder": Path.mkdir,
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
}
"""What may lie in a file's place."""


def reseal(path, rng):
    """A record of the store, or a field of its manifest, is changed, and all sums are made right
    again."""
    store = path.parent.parent if path.parent.name == "cases" else path.parent
    manifest = json.loads((store / "manifest.json").read_text())
    if rng.random() < 0.3:
        manifest = changed(manifest, rng)
    else:
        case_id = rng.choice(sorted(manifest["cases"]))
        record = store / f"cases/{case_id}.json"
        content = change_json(record.read_bytes(), rng)
        record.write_bytes(content)
        manifest["cases"][case_id] = hashlib.sha256(content).hexdigest()
    (store / "manifest.json").write_bytes(
        written(sealed(manifest) if isinstance(manifest, dict) else manifest)
    )


def damage(path, rng):
    """Damage `path` in one way; returns which."""
    resealed = (reseal,) * 3 if {"store", "packed"} & set(path.parts[-3:]) else ()
    way = rng.choice([*2 * (*ANY, *OF_SUFFIX.get(path.suffix, ()), *resealed), *INSTEAD])
    if way in INSTEAD:
        path.unlink()
        INSTEAD[way](path)
        return way
    if way is reseal:
        reseal(path, rng)
    else:
        path.write_bytes(way(path.read_bytes(), rng))
    return way.__name__


# --- What reads them ---


NET = (
    "--filters 2 --depth 2 --batch 1 --dtype float32 --policy speed --save-minutes 0"
    " --validations 1"
)
TRAIN = f"train --store store --run run --steps 3 {NET}"
INIT = f"train --store store --run new --init run --steps 1 {NET}"
PREDICT = "predict --run run --image data/imagesTr/BRATS_001.nii.gz --out out"
COMPARE = f"compare --store store --out comparison --seeds 0 1 --epochs 1 {NET}"
PREPARE = "prepare --workers 1 --dataset data --store"
OF_DATA = (f"{PREPARE} new", f"{PREPARE} new --skip-bad --zero-nan", f"{PREPARE} store")
OF_CASE = "prepare --workers 1 --dataset brats --store new --split 1 0 0 --skip-bad"
OF_STORE = (
    "store verify --store {top} --workers 1",
    "store info --store {top}",
    "store append --store {top} --dataset data --workers 1",
)
OF_STORE += ("evaluate --run run --store {top} --out out", PREPARE + " {top}")
OF_RUN = (
    "status --run run",
    "report --run run --out out/page.html",
    "estimate --run run",
    TRAIN,
    INIT,
    PREDICT,
)
OF_RUN += ("evaluate --run run --out out", "compare --runs run other --out out")
TARGETS = {
    "data set": (16, ("data/dataset.json", "data/*Tr/*"), OF_DATA),
    "image": (6, ("data/imagesTr/*",), ("predict --run run --image {file} --out out",)),
    "case": (12, ("brats/*/*",), (OF_CASE, "predict --run run --image {parent} --out out")),
    "store": (16, ("store/*.json*", "store/cases/*"), (*OF_STORE, TRAIN)),
    "packed store": (8, ("packed/*.json*", "packed/cases/*"), OF_STORE[:-1]),
    "store begun": (8, ("begun/*", "begun/cases/*"), OF_STORE[-1:]),
    "run": (16, ("run/*.json*", "run/heartbeats/*", "run/evaluation/scores.json"), OF_RUN),
    "checkpoint": (
        12,
        ("run/checkpoints/*",),
        (PREDICT, f"{PREDICT} --weights last", "status --run run", TRAIN, INIT),
    ),
    "comparison": (3, ("comparison/compare.json",), (COMPARE,)),
    "calibration": (
        3,
        ("calibration.json",),
        ("estimate --calibration calibration.json --shape 64 64 64",),
    ),
}
"""Of a hundred damaged files so many are of a kind, which one of the commands reads: {file} is the
damaged path, {parent} its folder, {top} the folder at the top that holds it."""
WRITES = {
    **dict.fromkeys(("predict", "evaluate", "report"), ("out/*",)),
    "prepare": ("new/*", "begun/*", "packed/*", "store/*"),
    "store append": ("packed/*", "store/*"),
    "store": ("packed/*", "*/quarantine.jsonl"),
    "train": ("run/*", "new/*"),
    "compare": ("out/*", "comparison/*"),
}
"""Command -> what it may write. Of a store's arrays it may only make damaged ones as they were."""

# --- One of each, made once ---


def call(command):
    words = command.split()
    return estimate(words[1:]) if words[0] == "estimate" else main(words)


def no_process(*arguments, **more):
    raise InputError(
        "a run must be trained and scored already, got one that is not; no process is started here"
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The folder of all files; "whole", beside it, is not changed."""
    root = tmp_path_factory.mktemp("damaged") / "root"
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr(runner, "call", no_process)
        make_all()
    shutil.copytree(root, root.with_name("whole"))
    return root


def make_all():
    assert call("phantom --out data --cases 5 --shape 24 24 24 --workers 1") == 0
    for number in (1, 2):
        image, geometry = read_volume(f"data/imagesTr/BRATS_00{number}.nii.gz")
        label, _ = read_volume(f"data/labelsTr/BRATS_00{number}.nii.gz")
        case = Path(f"brats/BraTS-GLI-0000{number}-000")
        case.mkdir(parents=True)
        for name, volume in zip(
            ("t2f", "t1n", "t1c", "t2w", "seg"), (*np.moveaxis(image, -1, 0), label)
        ):
            write_volume(case / f"{case.name}-{name}.nii.gz", volume, geometry)
    assert call(f"{PREPARE} store --split 0.6 0.2 0.2") == 0
    assert call(f"{PREPARE} packed --split 0.6 0.2 0.2 --format b2nd") == 0
    shutil.copytree("store", "begun", ignore=shutil.ignore_patterns("manifest.json", "*.jsonl"))
    assert call(TRAIN.replace("--steps 3", "--steps 2")) == 0
    assert call("evaluate --run run") == 0
    shutil.copytree("run", "other")
    assert call(COMPARE) == 2  # with its plan kept
    shutil.copy(calibration.SHIPPED / "avx512.json", "calibration.json")


# --- The test ---


class TooLongError(BaseException):
    """Nothing in the product catches it."""


@contextlib.contextmanager
def limits():
    def ring(*_):
        raise TooLongError(f"{MOST_S} s")

    handler = signal.signal(signal.SIGALRM, ring)
    memory = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    signal.setitimer(signal.ITIMER_REAL, MOST_S)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MOST_BYTES, memory[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, memory)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def content_of(root):
    """Path -> what lies there; only regular files are opened."""
    content = {}
    for path in root.rglob("*"):
        mode = path.lstat().st_mode
        name = path.relative_to(root).as_posix()
        if stat.S_ISREG(mode):
            content[name] = path.read_bytes()
        elif not stat.S_ISDIR(mode):
            content[name] = stat.S_IFMT(mode)
    return content


@pytest.mark.parametrize(
    ("name", "number"),
    [(name, i) for name, (share, *_) in TARGETS.items() for i in range(-(-FILES * share // 100))],
)
def test_a_damaged_file_is_answered_and_nothing_else_is_changed(
    name, number, root, monkeypatch, capsys
):
    shutil.rmtree(root)
    shutil.copytree(root.with_name("whole"), root)
    monkeypatch.chdir(root)
    monkeypatch.setattr(runner, "call", no_process)
    rng = random.Random(f"{SEED} {name} {number}")
    _, files, commands = TARGETS[name]
    path = rng.choice(sorted(path for path in root.glob(rng.choice(files)) if path.is_file()))
    file = path.relative_to(root)
    command = rng.choice(commands).format(file=file, parent=file.parent, top=file.parts[0])
    way = damage(path, rng)
    before = content_of(root)
    capsys.readouterr()
    try:
        with limits():
            code = call(command)
    except BaseException:
        pytest.fail(
            f"{way} of {file}, then {command}:\n{traceback.format_exc()[-3000:]}", pytrace=False
        )
    printed = "".join(capsys.readouterr())
    after = content_of(root)
    about = f"{way} of {file}, then {command}: {code}\n{printed[-2000:]}"
    assert code in CODES, about
    assert "Traceback" not in printed, about
    assert len(printed) < 30_000, about
    assert "error: " in printed or code == 0 or command.startswith("status"), about
    first, second, *_ = command.split(" ")
    may = WRITES.get(f"{first} {second}", WRITES.get(first, ()))
    whole = content_of(root.with_name("whole"))
    for name in {name for name in {**before, **after} if before.get(name) != after.get(name)}:
        assert any(fnmatch.fnmatch(name, pattern) for pattern in may), f"{name} is changed: {about}"
        if fnmatch.fnmatch(name, "*/cases/*") and name in before:
            assert after.get(name) == whole[name], f"{name} is changed: {about}"
    if (
        code == 0 and command.startswith(PREPARE) and way != "reseal"
    ):  # the other cases are what they were
        new = open_store(command.split()[6])
        old = open_store(root.with_name("whole") / "store")
        assert (
            "Nothing to do" in printed
            or call(f"store verify --store {new.folder} --workers 1") == 0
        ), about
        for record in new.manifest.cases:
            same = record.image_voxels_sha256 == old.case(record.case_id).image_voxels_sha256
            assert same or path.name.startswith(record.case_id), about
