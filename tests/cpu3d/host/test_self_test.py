"""The self-test's own judgement, on small tensors; and what becomes of processes that die or hang."""

import dataclasses
import json
import sys

import pytest

from cpu3d.host import self_test as module
from cpu3d.host.apply import set_up
from cpu3d.host.checks import Check
from memory_estimator.host import Host

GIB = 2**30
HOST = Host("a CPU", 1, 2, 2, 1, 24 * GIB, 20 * GIB, None, 0, None, ("avx512_bf16",))


@pytest.fixture
def process(monkeypatch):
    """Put a script in the place of the program."""

    def put(script):
        monkeypatch.setattr(module, "PROGRAM", (sys.executable, "-c", f"import json, os, sys, time\n{script}"))
        return list(module.self_test("auto"))

    return put


def line(state, name="engine"):
    return f"print({json.dumps(dataclasses.asdict(Check(name, state, 'TensorFlow')))!r}, flush=True)\n"


def test_results_come_one_by_one_and_are_as_many_as_there_are_tests(process):
    found = process(line("ok") + line("warn", "bfloat16") + line("skipped", "large tensor"))
    assert [check.name for check in found] == [name for name, _ in module.TESTS]
    assert [check.state for check in found] == ["ok", "warn", "skipped"]


def test_what_others_print_among_the_results_is_passed_over(process):
    noise = "print('onednn_verbose,exec,cpu', '[1]', '7', '{\"name\": 1}', sep='\\n')\n"
    found = process(noise + line("ok") + noise + line("ok") + line("ok") + noise)
    assert [check.state for check in found] == ["ok"] * 3


def test_a_result_comes_on_a_line_of_its_own(monkeypatch, capsys):
    """Behind a block of another's words that ended within a line."""
    monkeypatch.setattr(module, "set_up", lambda engine: (HOST, None, None))
    monkeypatch.setattr(module, "TESTS", (("engine", lambda *given: Check("engine", "ok", "TensorFlow")),))
    print("onednn_verbose,ex", end="")
    module.main("auto")
    assert [module._read_check(line) for line in capsys.readouterr().out.splitlines()] == [
        None,
        Check("engine", "ok", "TensorFlow"),
    ]


def test_nothing_comes_after_a_failure(process):
    assert [check.state for check in process(line("fail") + line("ok"))] == ["fail"]


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("print('cannot import', file=sys.stderr); sys.exit(2)", "the process ended with exit code 2: cannot import"),
        ("os.kill(os.getpid(), 9)", "the process ended with signal 9"),
    ],
)
def test_a_process_that_dies_fails_the_test_it_was_at(process, end, told):
    first, second = process(line("ok") + end)
    assert (first.state, second.name, second.state, second.found) == ("ok", "bfloat16", "fail", told)


def test_a_process_that_hangs_is_ended(process, monkeypatch):
    monkeypatch.setattr(module, "LIMIT_S", 0.5)
    (check,) = process("time.sleep(60)")
    assert (check.name, check.state, check.found) == ("engine", "fail", "not done after 0 s")


@pytest.mark.parametrize(
    ("name", "engine", "itex", "state"),
    [
        ("TensorFlow 2.15.1, oneDNN, ITEX 2.15.0.0", "auto", True, "ok"),
        ("TensorFlow 2.15.1, oneDNN", "auto", True, "fail"),
        ("TensorFlow 2.15.1, oneDNN", "stock", True, "ok"),
        ("TensorFlow 2.21.0, oneDNN", "auto", False, "ok"),
        ("TensorFlow 2.21.0, no oneDNN", "auto", False, "fail"),
    ],
)
def test_the_engine_must_be_what_was_installed(monkeypatch, name, engine, itex, state):
    monkeypatch.setattr(module, "engine_name", lambda tf: name)
    monkeypatch.setattr(module, "installed", lambda one: itex)
    assert module.engine_in_force(None, HOST, engine).state == state


@pytest.fixture(scope="module")
def tf():
    return set_up()[2]


@pytest.mark.parametrize(("gain", "state"), [(1.8, "ok"), (1.1, "warn")])
def test_bfloat16_is_measured_against_float32(tf, monkeypatch, gain, state):
    monkeypatch.setattr(module, "STEP_SHAPE", (8, 8, 8))
    seconds = iter([1.0 * gain, 1.0, 2.0 * gain, 2.0, *[9.0] * 4])
    monkeypatch.setattr(module, "_seconds", lambda step: (next(seconds), step()))
    check = module.bfloat16_gain(tf, HOST, "auto")
    assert check.state == state
    assert check.found.startswith(f"{gain:.2f} times as fast as float32: 1 s against {gain:.3g} s a small step")


def test_without_instructions_bfloat16_is_left_out(tf):
    assert module.bfloat16_gain(tf, dataclasses.replace(HOST, isa=()), "auto").state == "skipped"


@pytest.fixture
def small(monkeypatch):
    """A large tensor of 64 slices and a limit to match."""
    monkeypatch.setattr(module, "SLICE", (4, 4, 16))
    monkeypatch.setattr(module, "LIMIT_ELEMENTS", 64 * 4 * 4 * 16)


def test_a_convolution_that_is_right_to_its_end_is_well(tf, small):
    check = module.large_tensor(tf, HOST, "auto")
    assert check.state == "ok"
    assert check.found.startswith("1.016 x 2^31 elements")
    assert check.found.endswith("right to its far end")


def test_a_convolution_that_stops_early_is_found(tf, small, monkeypatch):
    """As one would that counts with 32 bits: what is beyond is left as it was."""
    convolve = tf.nn.conv3d

    def cut(image, *more):
        is_within = tf.reshape(tf.range(image.shape[1]) < 64, (1, -1, 1, 1, 1))
        return convolve(image, *more) * tf.cast(is_within, image.dtype)

    monkeypatch.setattr(tf.nn, "conv3d", cut)
    check = module.large_tensor(tf, HOST, "auto")
    assert check.state == "fail"
    assert check.found.endswith(": wrong at its far end")


def test_a_convolution_that_is_slow_above_the_limit_is_told(tf, small, monkeypatch):
    seconds = module._seconds
    times = iter([40.0, 0.5])
    monkeypatch.setattr(module, "_seconds", lambda work: (next(times), seconds(work)[1]))
    check = module.large_tensor(tf, HOST, "auto")
    assert check.state == "warn"
    assert check.found.endswith("convolved in 40 s, just below 2^31 in 0.5 s: right, but slow")


def test_a_large_tensor_is_left_out_where_memory_is_short(tf, monkeypatch):
    monkeypatch.setattr(module, "read_host", lambda: dataclasses.replace(HOST, available_bytes=GIB))
    check = module.large_tensor(tf, HOST, "auto")
    assert (check.state, check.found) == ("skipped", "needs 6.20 GiB, 1.00 GiB are free")
