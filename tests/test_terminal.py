"""Both command lines on a terminal that is not UTF-8, unread, and on a full disk."""

import os
import re
import subprocess
import sys

import pytest

from cpu3d.util.child import ROOT

ESTIMATE = ("memory_estimator", "--shape", "16", "16", "16", "--depth", "2")
MEASURED = ("--threads", "2", "--calibration", "avx512_bf16", "--engine", "itex")  # on any host


def call(*words, terminal=(), stdout=subprocess.PIPE):
    """The end of `python -m WORDS`, with what it printed in bytes."""
    environment = {name: os.environ[name] for name in ("PATH", "XDG_DATA_HOME")}
    environment.update(terminal, PYTHONPATH=str(ROOT))
    command = [sys.executable, "-m", *map(str, words)]
    return subprocess.run(command, env=environment, stdout=stdout, stderr=subprocess.PIPE)


def test_a_letter_that_the_terminal_lacks_is_replaced():
    posix = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert b"?" in call(*ESTIMATE, *MEASURED, terminal=posix).stdout


@pytest.mark.parametrize("words", [ESTIMATE, ("cpu3d", "train", "--help")], ids=str)
def test_a_reader_that_has_gone_away_ends_a_command_without_a_word(words):
    reader, writer = os.pipe()
    os.close(reader)
    done = call(*words, stdout=writer)
    os.close(writer)
    assert done.stderr == b""
    assert done.returncode == (words is ESTIMATE)  # argparse itself passes over it


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_ends_with_1_and_one_line():
    with open("/dev/full", "w") as full:
        done = call(*ESTIMATE, *MEASURED, stdout=full)
    assert done.returncode == 1
    assert re.fullmatch(b"error: .*No space left on device; free space .*\n", done.stderr)
