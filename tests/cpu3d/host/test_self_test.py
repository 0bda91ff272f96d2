"""The self-test's own judgement, on small tensors; and what becomes of a process that dies."""

import dataclasses

import pytest

from cpu3d.host import self_test as module
from cpu3d.host.apply import set_up
from models.native import operations
from tests.cpu3d.host.hosts import SMALL, VNNI

HOST = SMALL.host
SLOW_BFLOAT16 = dataclasses.replace(HOST, isa=VNNI[:3])  # a training there computes in float32


@pytest.mark.parametrize(
    ("script", "result"),
    [("1 / 0", "ZeroDivisionError: "), ("__import__('os')._exit(9)", "terminated abruptly")],
)
def test_a_process_that_dies_is_a_failed_check(monkeypatch, script, result):
    monkeypatch.setattr(module, "checks_here", eval)
    assert module.self_test("['well']") == ["well"]
    (check,) = module.self_test(script)
    assert (check.state, result in check.result) == ("fail", True)


@pytest.mark.parametrize(
    ("name", "engine", "itex", "state"),
    [
        ("TensorFlow 2.15.1, oneDNN, ITEX 2.15.0.0", None, True, "ok"),
        ("TensorFlow 2.15.1, oneDNN", None, True, "fail"),
        ("TensorFlow 2.15.1, oneDNN", "stock", True, "ok"),
        ("TensorFlow 2.21.0, no oneDNN", None, False, "fail"),
    ],
)
def test_the_engine_must_be_what_was_installed(monkeypatch, name, engine, itex, state):
    monkeypatch.setattr(module, "engine_name", lambda tf: name)
    monkeypatch.setattr(module, "installed", lambda engine: itex)
    assert module.engine_in_force(None, engine).state == state


@pytest.fixture(scope="module")
def tf():
    return set_up()[2]


def wrong(kind, dtypes, operate=operations.operate):
    """Operations whose maps of a kind are 10 % too large in some dtypes."""

    def wrongly(of, source, *more, **others):
        made = operate(of, source, *more, **others)
        if of == kind and source.raw.dtype.name in dtypes:
            made = made._replace(map=1.1 * made.map)
        return made

    return wrongly


@pytest.mark.usefixtures("needs_native")
def test_native_operations_are_compared_with_tensorflow_s_layers_in_each_dtype(tf, monkeypatch):
    check = module.native_operations(tf, HOST)
    assert check.state == "ok"
    assert "avx512 in float32" in check.result
    assert "avx512_bf16 in bfloat16" in check.result
    monkeypatch.setattr(operations, "operate", wrong("project", ("bfloat16",)))
    assert module.native_operations(tf, HOST).state == "fail"
    check = module.native_operations(tf, SLOW_BFLOAT16)
    assert (check.state, "bfloat16" in check.result) == ("ok", False)
    monkeypatch.setattr(operations, "operate", wrong("max_pool", ("float32",)))
    assert module.native_operations(tf, HOST).state == "fail"


def test_without_native_operations_a_warning_says_how_to_build_them(tf, monkeypatch):
    monkeypatch.setattr(operations, "available", lambda: False)
    check = module.native_operations(tf, HOST)
    assert (check.state, "models.native.build" in check.advice) == ("warn", True)
