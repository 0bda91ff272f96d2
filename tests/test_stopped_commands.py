"""A command is stopped in the middle of writing: by a full disk, Ctrl-C or `kill -9`. What was
there before is whole, and the same command then does its work. Trainings, which continue to the
same bits, are stopped in tests/cpu3d/training/test_faults.py."""

import errno
import os
import re
import shutil
import signal
import stat

import nibabel
import pytest

from cpu3d.__main__ import main
from cpu3d.util.atomic import PARTIAL
from tests.cpu3d.data.made_datasets import content_of
from tests.test_imports import run_python

pytestmark = pytest.mark.slow

NET = "--filters 2 --depth 2 --dtype float32 --policy speed --validations 1"
IMAGE = "data/imagesTr/BRATS_001.nii.gz"
BEFORE = (
    "phantom --out data --cases 4 --shape 24 24 24 --workers 1",
    "prepare --dataset data --store store --split 0.5 0.25 0.25 --workers 1",
    f"train --store store --run run --steps 2 {NET}",
    "evaluate --run run",
    "report --run run",
    f"predict --run run --image {IMAGE} --out out",
    f"view --image {IMAGE} --out page.html",
)
COMMANDS = {
    "phantom": "phantom --out new --cases 2 --shape 24 24 24 --workers 1",
    "prepare": "prepare --dataset data --store new --split 0.5 0.25 0.25 --workers 1",
    "evaluate": "evaluate --run run",
    "report": "report --run run",
    "predict": f"predict --run run --image {IMAGE} --out out --overwrite",
    "view": f"view --image {IMAGE} --out page.html",
}
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
FAULTS = {"full disk": (FULL, 1), "Ctrl-C": (KeyboardInterrupt(), 130)}
"""What a file that is brought to the disk raises, and the exit code."""


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder in which each of BEFORE has been done. Read only."""
    folder = tmp_path_factory.mktemp("begun")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for command in BEFORE:
            assert main(command.split()) == 0, command
    return folder


@pytest.fixture
def here(begun, tmp_path, monkeypatch):
    """A copy of it, which is the working folder."""
    folder = tmp_path / "here"
    shutil.copytree(begun, folder)
    monkeypatch.chdir(folder)
    return folder


def at_sync(patch, number=0, error=None):
    """Have the `number`-th flush of a file to the disk raise an error; those of folders do not
    count. Returns the list that has an entry for each flush."""
    seen = []
    sync = os.fsync

    def counted(handle):
        if stat.S_ISREG(os.fstat(handle).st_mode):
            seen.append(handle)
            if len(seen) == number:
                raise error
        sync(handle)

    patch.setattr(os, "fsync", counted)
    return seen


def assert_whole(folder, before):
    """Every file that was there is what it was, or was written anew as a whole."""
    after = content_of(folder)
    assert before.keys() <= after.keys()
    for name in [name for name in before if after[name] != before[name]]:
        if name.endswith(".nii.gz"):
            nibabel.load(folder / name).get_fdata()
        else:
            assert after[name].rstrip().endswith((b"</html>", b"}", b"]")), name


def counted_and_undone(command, here, begun, monkeypatch):
    """How many files a command syncs, and what the folder held before it, which it holds again."""
    with monkeypatch.context() as patch:
        seen = at_sync(patch)
        assert main(command.split()) == 0
    shutil.rmtree(here)
    shutil.copytree(begun, here)
    monkeypatch.chdir(here)
    return len(seen), content_of(here)


@pytest.mark.parametrize("moment", [0.0, 1.0])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_fails_while_it_writes_leaves_whole_files(
    here, begun, monkeypatch, capsys, name, fault, moment
):
    error, code = FAULTS[fault]
    command = COMMANDS[name]
    count, before = counted_and_undone(command, here, begun, monkeypatch)
    with monkeypatch.context() as patch:
        at_sync(patch, 1 + round(moment * (count - 1)), error)
        assert main(command.split()) == code
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    if fault == "full disk":
        assert re.search("^error: .*must fit on its disk, got No sp", printed, re.MULTILINE)
    assert_whole(here, before)
    assert not [path for path in here.rglob(f"*{PARTIAL}") if path.is_file()]
    assert main(command.split()) == 0


KILLED = """
import os, signal, stat, sys
from cpu3d.__main__ import main
left = int(sys.argv[1])
sync = os.fsync

def counted(handle):
    global left
    left -= stat.S_ISREG(os.fstat(handle).st_mode)
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    sync(handle)

os.fsync = counted
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_killed_while_it_writes_leaves_whole_files(
    here, begun, monkeypatch, name
):
    command = COMMANDS[name]
    count, before = counted_and_undone(command, here, begun, monkeypatch)
    ended = run_python(KILLED, str((count + 1) // 2), *command.split())
    assert ended.returncode == -signal.SIGKILL
    assert_whole(here, before)
    assert main(command.split()) == 0
