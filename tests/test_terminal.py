"""Both command lines on a terminal that is not UTF-8, with names in other letters, unread, and on
a full disk."""

import os
import re
import subprocess
import sys

import pytest

from cpu3d.data.phantoms.command import write_phantom
from cpu3d.util.child import ROOT

POSIX = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ESTIMATE = ("memory_estimator", "--shape", "16", "16", "16", "--depth", "2")
MEASURED = ("--threads", "2", "--calibration", "avx512_bf16", "--engine", "itex")  # on any host


def call(*words, terminal=(), stdout=subprocess.PIPE):
    """The end of `python -m WORDS`, with what it printed in bytes."""
    environment = {name: os.environ[name] for name in ("PATH", "XDG_DATA_HOME")}
    environment.update(terminal, PYTHONPATH=str(ROOT))
    command = [sys.executable, "-m", *map(str, words)]
    return subprocess.run(command, env=environment, stdout=stdout, stderr=subprocess.PIPE)


def test_a_letter_that_the_terminal_lacks_is_replaced():
    for terminal, shown in ((POSIX, b"?"), ({"PYTHONIOENCODING": "latin-1:strict"}, b"\xb1")):
        assert shown in call(*ESTIMATE, *MEASURED, terminal=terminal).stdout


NAME = "Zoë_患者"


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """A data set with a case of this name, in a folder with other letters too."""
    raw = tmp_path_factory.mktemp("raw") / "données"
    write_phantom(raw, cases=3, shape=(24, 24, 24))
    for folder in ("imagesTr", "labelsTr"):
        (raw / folder / "BRATS_001.nii.gz").rename(raw / folder / f"{NAME}.nii.gz")
    text = (raw / "dataset.json").read_text("utf-8")
    (raw / "dataset.json").write_text(text.replace("BRATS_001", NAME), "utf-8")
    return raw


def test_a_name_with_other_letters_is_kept_in_files_and_stops_nothing(raw, tmp_path):
    store = tmp_path / "магазин"
    words = ("prepare", "--dataset", raw, "--store", store, "--split", "1", "1", "1")
    done = call("cpu3d", *words, terminal=POSIX)
    assert done.returncode == 0, done.stderr
    assert [path for path in store.rglob("*") if NAME in path.name]
    done = call("cpu3d", "status", "--run", tmp_path / NAME, terminal=POSIX)
    assert (done.returncode, b"config.json" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    "words",
    [ESTIMATE, ("cpu3d", "train", "--help"), ("memory_estimator", "--help")],
    ids=str,
)
def test_a_reader_that_has_gone_away_ends_a_command_without_a_word(words):
    reader, writer = os.pipe()
    os.close(reader)
    done = call(*words, stdout=writer)
    os.close(writer)
    assert done.stderr == b""
    assert done.returncode == (0 if "train" in words else 1)  # argparse itself passes over it


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_ends_with_1_and_one_line():
    with open("/dev/full", "w") as full:
        done = call(*ESTIMATE, *MEASURED, stdout=full)
    assert done.returncode == 1
    assert re.fullmatch(b"error: .*No space left on device; free space .*\n", done.stderr)
