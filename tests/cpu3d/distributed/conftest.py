"""Slurm's `scontrol show hostnames`, made up."""

import os

import pytest

SCONTROL = r"""#!/bin/bash
# "n[1-3]" is n1, n2, n3; a list that ends early is refused, as by Slurm's own.
[ "${3: -1}" != - ] || exit 1
words=$(sed 's/\[\(.\)-\(.\)\]/{\1..\2}/g; s/,/ /g' <<<"$3")
eval printf "'%s\n'" $words
"""


@pytest.fixture(autouse=True)
def _scontrol(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "scontrol").write_text(SCONTROL)
    (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
