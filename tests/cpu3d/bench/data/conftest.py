"""Tiny files for the benchmark of the data path, made once, and its workers in the tests' own process."""

import json

import pytest

from cpu3d.bench.data import augment_cost, ladder, many_cases, one_case, one_patch, patch_training, peers, whole_volumes
from cpu3d.bench.data.files import Files
from cpu3d.bench.data.scale import TINY

MODULES = (augment_cost, ladder, many_cases, one_case, one_patch, patch_training, peers, whole_volumes)


@pytest.fixture(scope="session")
def bench_files(tmp_path_factory) -> Files:
    return Files(tmp_path_factory.mktemp("bench") / "work", TINY)


@pytest.fixture
def in_this_process(monkeypatch):
    """Workers are called instead of started; what goes in and comes out passes through JSON all the same."""
    modules = {module.__name__.rpartition(".")[2]: module for module in MODULES}

    def call(name, request, cap=None):
        content = json.loads(json.dumps(request, default=str))
        return json.loads(json.dumps(modules[name].work(content, None)))

    for module in MODULES:
        monkeypatch.setattr(module, "in_fresh_process", call)
