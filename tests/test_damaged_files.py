"""One file is damaged, and every command that reads it answers, and changes nothing but what it is
there to write.

    CPU3D_DAMAGED_FILES=3000 ./run.sh test --all tests/test_damaged_files.py

To answer is to end with a documented exit code, within two minutes and 2 GiB, and with a line that
says why where the code is not 0. Which file is damaged, how, and what reads it follow from the
name of the test."""

import fnmatch
import gzip
import io
import json
import os
import random
import resource
import shutil
import signal
import traceback
import zipfile
from pathlib import Path

import pytest

from cpu3d.__main__ import main
from memory_estimator.__main__ import main as estimate
from tests.cpu3d.data.made_datasets import content_of

pytestmark = pytest.mark.slow

FILES = int(os.environ.get("CPU3D_DAMAGED_FILES", "320"))
CODES = range(5)
"""What a command may end with; the other codes are of signals, lost workers and memory that runs
out on the way."""
MOST_BYTES = 2 << 30

# --- Damage to the bytes of any file, and to what is in JSON, NIfTI, npy and zip files that stay
# well-formed ---


def flip_bit(content, rng):
    packed = content[:2] == b"\x1f\x8b"  # of gzip: what it holds is damaged
    changed = bytearray(gzip.decompress(content) if packed else content)
    index = rng.randrange(rng.choice([len(changed), min(len(changed), 400)]))
    changed[index] ^= 1 << rng.randrange(8)
    return gzip.compress(changed, 1) if packed else bytes(changed)


def cut(content, rng):
    return content[: rng.choice([0, rng.randrange(len(content)), len(content) - 1])]


INVALID = (-1, 0, 1000, float("nan"), 10**30, None, True, "", "..", "a\0b", "\ud800", [], {})


def changed(value, rng):
    """`value` with one part of it replaced or left out."""
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.1:
        return rng.choice(INVALID)
    key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if rng.random() < 0.8:
        value[key] = changed(value[key], rng)
    else:
        del value[key]
    return value


def change_json(content, rng):
    try:
        text = json.dumps(changed(json.loads(content), rng))
    except ValueError:  # a value a line
        lines = content.decode().splitlines()
        index = rng.randrange(len(lines))
        lines[index] = json.dumps(changed(json.loads(lines[index]), rng))
        text = "\n".join([*lines, ""])
    return text.encode()


def change_zip(content, rng):
    """A whole zip, with right sums, of other members."""
    with zipfile.ZipFile(io.BytesIO(content)) as old:
        members = {name: old.read(name) for name in old.namelist()}
    first, *names = members  # the first is the state of the run
    name = rng.choice([first, rng.choice(names)])
    damaged = rng.choice([flip_bit, cut])(members.pop(name), rng)
    if rng.random() < 0.7:
        members[name] = damaged
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as new:
        for member in members.items():
            new.writestr(*member)
    return file.getvalue()


OF_SUFFIX = {".json": change_json, ".jsonl": change_json, ".npz": change_zip}
INSTEAD = {
    "nothing": lambda path: None,
    "folder": Path.mkdir,
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
}
"""What may lie in a file's place."""


def damage(path, rng):
    """Damage `path` in one way; returns which."""
    way = rng.choice([flip_bit, cut, OF_SUFFIX.get(path.suffix, cut), *INSTEAD])
    if way in INSTEAD:
        path.unlink()
        INSTEAD[way](path)
        return way
    path.write_bytes(way(path.read_bytes(), rng))
    return way.__name__


# --- What reads them ---


NET = "--filters 2 --depth 2 --batch 1 --dtype float32 --policy speed --validations 2"
TRAIN = f"train --store store --run run --steps 3 {NET}"
INIT = f"train --store store --run new --init run --steps 1 {NET}"
PREDICT = "predict --run run --image data/imagesTr/BRATS_001.nii.gz --out out"
PREPARE = "prepare --workers 1 --dataset data --store"
OF_DATA = (f"{PREPARE} new", f"{PREPARE} new --skip-bad --zero-nan", f"{PREPARE} store")
OF_STORE = (
    "store verify --store {top} --workers 1",
    "store info --store {top}",
    "store append --store {top} --dataset data --workers 1",
    "evaluate --run run --store {top} --out out",
    PREPARE + " {top}",
)
OF_RUN = (
    "status --run run",
    "report --run run --out out/page.html",
    "estimate --run run",
    "evaluate --run run --out out",
    TRAIN,
    INIT,
    PREDICT,
)
OF_CHECKPOINT = (PREDICT, f"{PREDICT} --weights last", "status --run run", TRAIN, INIT)
TARGETS = {
    "data set": (("data/dataset.json", "data/*Tr/*"), OF_DATA),
    "image": (("data/imagesTr/*",), ("predict --run run --image {file} --out out",)),
    "store": (("store/*.json*", "store/cases/*"), (*OF_STORE, TRAIN)),
    "packed store": (("packed/*.json*", "packed/cases/*"), OF_STORE[:-1]),
    "store begun": (("begun/*", "begun/cases/*"), OF_STORE[-1:]),
    "run": (("run/*.json*", "run/heartbeats/*", "run/evaluation/scores.json"), OF_RUN),
    "checkpoint": (("run/checkpoints/*",), OF_CHECKPOINT),
}
"""Kind -> files of which one is damaged, and commands that read it: {file} is the damaged path,
{top} the folder at the top that holds it."""
WRITES = {
    **dict.fromkeys(("predict", "evaluate", "report"), ("out/*",)),
    "prepare": ("new/*", "begun/*", "store/*"),
    "store append": ("packed/*", "store/*"),
    "train": ("run/*", "new/*"),
}
"""Command -> what it may write. A store's arrays and records may only become what they were."""

# --- One of each, made once ---


def call(command):
    words = command.split()
    return estimate(words[1:]) if words[0] == "estimate" else main(words)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The folder of all files; "whole", beside it, is not changed."""
    root = tmp_path_factory.mktemp("damaged") / "root"
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert call("phantom --out data --cases 5 --shape 24 24 24 --workers 1") == 0
        assert call(f"{PREPARE} store --split 0.6 0.2 0.2") == 0
        assert call(f"{PREPARE} packed --split 0.6 0.2 0.2 --format b2nd") == 0
        shutil.copytree("store", "begun", ignore=shutil.ignore_patterns("manifest.json", "*.jsonl"))
        assert call(TRAIN.replace("--steps 3", "--steps 2")) == 0
        assert call("evaluate --run run") == 0
    shutil.copytree(root, root.with_name("whole"))
    return root


# --- The test ---


@pytest.fixture
def _limits():
    """A command that takes more memory gets a MemoryError; one that takes longer ends the suite."""
    memory = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    signal.alarm(120)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MOST_BYTES, memory[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, memory)
    signal.alarm(0)


@pytest.mark.usefixtures("_limits")
@pytest.mark.parametrize("number", range(FILES // len(TARGETS)))
@pytest.mark.parametrize("name", TARGETS)
def test_a_damaged_file_is_answered_and_nothing_else_is_changed(
    name, number, root, monkeypatch, capsys
):
    shutil.rmtree(root)
    shutil.copytree(root.with_name("whole"), root)
    monkeypatch.chdir(root)
    rng = random.Random(f"{name} {number}")
    files, commands = TARGETS[name]
    path = rng.choice(sorted(path for path in root.glob(rng.choice(files)) if path.is_file()))
    file = path.relative_to(root)
    command = rng.choice(commands).format(file=file, top=file.parts[0])
    way = damage(path, rng)
    before = content_of(root)
    capsys.readouterr()
    try:
        code = call(command)
    except BaseException:
        code = traceback.format_exc()[-3000:]
    printed = "".join(capsys.readouterr())
    after = content_of(root)
    about = f"{way} of {file}, then {command}: {code}\n{printed[-2000:]}"
    assert code in CODES, about
    assert "Traceback" not in printed, about
    assert "error: " in printed or code == 0 or command.startswith("status"), about
    first, second, *_ = command.split(" ")
    may = WRITES.get(f"{first} {second}", WRITES.get(first, ()))
    whole = content_of(root.with_name("whole"))
    for name, _ in {*before.items()} ^ {*after.items()}:
        assert any(fnmatch.fnmatch(name, pattern) for pattern in may), f"{name} is changed: {about}"
        if "/cases/" in name and name in before:
            assert after.get(name) == whole[name], f"{name} is changed: {about}"
