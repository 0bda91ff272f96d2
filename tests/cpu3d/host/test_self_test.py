"""The self-test's own judgement, on small tensors; and what becomes of processes that die or
hang."""

import dataclasses
import json
import sys

import pytest

from cpu3d.host import self_test as module
from cpu3d.host.apply import set_up
from cpu3d.host.self_test import Check
from memory_estimator.host import Host
from models.native import operations, throughput
from tests.cpu3d.host.hosts import BFLOAT16, VNNI

GIB = 2**30
NAMES = ("engine", "native operations", "own speed")
HOST = Host("a CPU", 1, 2, 2, 1, 24 * GIB, 20 * GIB, None, 0, None, BFLOAT16)
SLOW_BFLOAT16 = dataclasses.replace(HOST, isa=VNNI[:3])  # a training there computes in float32


@pytest.fixture
def process(monkeypatch):
    """Put a script in the place of the program."""

    def put(script):
        monkeypatch.setattr(
            module, "PROGRAM", (sys.executable, "-c", f"import json, os, sys, time\n{script}")
        )
        return list(module.self_test())

    return put


def line(state, name="engine"):
    return (
        f"print({json.dumps(dataclasses.asdict(Check(name, state, 'TensorFlow')))!r}, flush=True)\n"
    )


def test_results_are_found_among_what_others_print(process):
    noise = "print('onednn_verbose,exec,cpu', '[1]', '7', '{\"name\": 1}', sep='\\n')\n"
    states = ("ok", "warn", "skipped")
    checks = process(noise + noise.join(map(line, states, NAMES)) + noise)
    assert [(check.name, check.state) for check in checks] == list(zip(NAMES, states))
    assert [check.state for check in process(line("fail") + line("ok"))] == ["fail"], (
        "nothing comes after a failure"
    )


@pytest.mark.parametrize(
    ("end", "result"),
    [
        ("sys.exit('cannot import')", "exit code 1: cannot import"),
        ("os.kill(os.getpid(), 9)", "SIGKILL"),
    ],
)
def test_a_process_that_dies_fails_the_test_it_was_at(process, end, result):
    first, second = process(line("ok") + end)
    assert (first.state, second.name, second.state) == ("ok", "native operations", "fail")
    assert result in second.result


def test_a_process_that_hangs_is_ended(process, monkeypatch):
    monkeypatch.setattr(module, "LIMIT_S", 0.5)
    (check,) = process("time.sleep(60)")
    assert (check.name, check.state, "after 0 s" in check.result) == ("engine", "fail", True)


@pytest.mark.parametrize(
    ("name", "engine", "itex", "state"),
    [
        ("TensorFlow 2.15.1, oneDNN, ITEX 2.15.0.0", None, True, "ok"),
        ("TensorFlow 2.15.1, oneDNN", None, True, "fail"),
        ("TensorFlow 2.15.1, oneDNN", "stock", True, "ok"),
        ("TensorFlow 2.21.0, oneDNN", None, False, "ok"),
        ("TensorFlow 2.21.0, no oneDNN", None, False, "fail"),
    ],
)
def test_the_engine_must_be_what_was_installed(monkeypatch, name, engine, itex, state):
    monkeypatch.setattr(module, "engine_name", lambda tf: name)
    monkeypatch.setattr(module, "installed", lambda engine: itex)
    assert module.engine_in_force(None, HOST, engine).state == state


@pytest.fixture(scope="module")
def tf():
    return set_up()[2]


@pytest.fixture(scope="module")
def compared(tf, needs_native):
    """The check of native operations in both dtypes."""
    return module.native_operations(tf, HOST, None)


def wrong(kind, dtypes):
    """Operations whose maps of a kind are 10 % too large in some dtypes."""
    operate = operations.operate

    def wrongly(of, source, *more, **others):
        made = operate(of, source, *more, **others)
        if of == kind and source.raw.dtype.name in dtypes:
            made = made._replace(map=1.1 * made.map)
        return made

    return wrongly


def test_native_operations_are_compared_with_tensorflow_s_layers(tf, compared, monkeypatch):
    assert compared.state == "ok"
    monkeypatch.setattr(operations, "operate", wrong("max_pool", ("float32", "bfloat16")))
    assert module.native_operations(tf, SLOW_BFLOAT16, None).state == "fail"


def test_without_native_operations_a_warning_says_how_to_build_them(tf, monkeypatch):
    monkeypatch.setattr(operations, "available", lambda: False)
    check = module.native_operations(tf, HOST, None)
    assert (check.state, "models.native.build" in check.advice) == ("warn", True)


def test_native_operations_are_tried_in_each_dtype_of_a_training(tf, compared, monkeypatch):
    assert "avx512 in float32" in compared.result
    assert "avx512_bf16 in bfloat16" in compared.result
    monkeypatch.setattr(operations, "operate", wrong("project", ("bfloat16",)))
    assert module.native_operations(tf, HOST, None).state == "fail"
    check = module.native_operations(tf, SLOW_BFLOAT16, None)
    assert (check.state, "bfloat16" in check.result) == ("ok", False)


@pytest.mark.parametrize(("share", "state"), [(0.7, "ok"), (0.1, "warn"), (1.47, "warn")])
def test_speed_is_named_with_the_instruction_set_and_the_share_of_the_limit(
    tf, needs_native, monkeypatch, share, state
):
    monkeypatch.setattr(throughput, "speed", lambda dtype: throughput.Speed(share * 2e11, 2e11))
    check = module.native_speed(tf, HOST, None)
    assert check.state == state
    for words in ("avx512 in float32", "avx512_bf16 in bfloat16", f"{share:.0%}", "200 GFLOP/s"):
        assert words in check.result


def test_speed_is_left_out_without_native_operations(tf, monkeypatch):
    monkeypatch.setattr(operations, "available", lambda: False)
    assert module.native_speed(tf, HOST, None).state == "skipped"
