"""A slow disk: in a cgroup where one may be made, by a token bucket elsewhere."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cpu3d.bench.data import disk_cap as module
from cpu3d.bench.data.disk_cap import BUCKET, TokenBucket, disk_cap, join
from cpu3d.bench.data.measuring import drop_pages

ROOT = Path(__file__).resolve().parents[4]

READ = """
import json, sys, time
from pathlib import Path
from cpu3d.bench.data.disk_cap import join
from cpu3d.bench.data.measuring import read_through
join(json.loads(sys.argv[1]))
begin = time.perf_counter()
read_through([Path(sys.argv[2])])
print(time.perf_counter() - begin)
"""


def test_a_bucket_lets_no_more_pass_than_its_rate_and_saves_nothing_up(monkeypatch):
    now = [0.0]
    sleep = lambda seconds: now.append(now.pop() + seconds)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0], sleep=sleep))
    bucket = TokenBucket(1_000_000)
    sleep(0.1)
    for _ in range(4):
        bucket.take(50_000)
    assert now[0] == pytest.approx(0.1 + 0.2)


def test_a_cgroup_slows_the_process_that_joins_it_and_is_gone_afterwards(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(12_000_000))
    with disk_cap(tmp_path, 20_000_000) as cap:
        if cap["how"] == BUCKET:
            pytest.skip("needs leave to make a cgroup that throttles the disk")
        assert Path(cap["group"]).is_dir()
        if drop_pages([path]):
            pytest.skip("needs a file system whose pages can be dropped")
        command = [sys.executable, "-c", READ, json.dumps(cap), str(path)]
        took_s = float(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert took_s > 0.4
    assert not Path(cap["group"]).exists()


def test_without_a_cgroup_the_cap_is_a_bucket(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CGROUPS", tmp_path / "none")
    with disk_cap(tmp_path, 1000) as cap:
        assert cap == {"how": BUCKET, "group": "", "bytes_s": 1000}
        assert join(cap).bytes_s == 1000


def test_no_cap_is_no_bucket():
    assert join(None) is None
