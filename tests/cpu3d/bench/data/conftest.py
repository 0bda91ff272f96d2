"""Tiny files for the benchmark of the data path, made once, and its workers in the tests' own process."""

import json

import pytest

from cpu3d.bench.data import loading, training
from cpu3d.bench.data.files import TINY, Files


@pytest.fixture(scope="session")
def bench_files(tmp_path_factory) -> Files:
    return Files(tmp_path_factory.mktemp("bench") / "work", TINY)


@pytest.fixture
def in_this_process(monkeypatch):
    """Workers are called instead of started; what goes in and comes out passes through JSON all the same."""

    def call(work, cgroup="", **request):
        return json.loads(json.dumps(work(**json.loads(json.dumps(request, default=str)))))

    for module in (loading, training):
        monkeypatch.setattr(module, "in_fresh_process", call)
