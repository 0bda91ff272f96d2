"""Correcting answers and training on, in docs/prediction.md, as its commands are given."""

import re
import shlex

from cpu3d.__main__ import main
from cpu3d.data.store import open_store
from cpu3d.run.config_json import load_config
from tests.test_readme import ROOT, shown_commands

PAGE = ROOT / "docs/prediction.md"


def test_the_loop_of_the_page_runs_and_its_second_run_starts_from_the_first(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    small = " --filters 4 --depth 2 --curriculum off"
    for line in [line for line in shown_commands(PAGE) if "loop/" in line]:
        line = re.sub(r"--steps \d+", "--steps 3" + small, line)
        assert main(shlex.split(line, comments=True)) == 0, capsys.readouterr().err
    record = load_config(tmp_path / "loop/run-2").init_record
    assert record.file == str(tmp_path / "loop/run-1/checkpoints/best.npz")
    assert len(open_store(tmp_path / "loop/store").manifest.cases) == 10
    assert (tmp_path / "loop/answers/BRATS_009.nii.gz").is_file()
