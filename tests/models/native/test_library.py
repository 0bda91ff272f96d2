"""The question which instruction set native operations compute with: of libraries that load, and of
those that do not."""

import shutil
import uuid

import pytest

from memory_estimator.host import instruction_set, read_host
from models.native import build
from models.native.instruction_sets import INSTRUCTION_SETS
from models.native.library import InstructionSetError, native_operations
from tests.test_imports import run_python

VARIABLE = "CPU3D_INSTRUCTION_SET"


@pytest.fixture
def pair(needs_native, tmp_path, monkeypatch):
    """A copy of the pair that computes here."""
    whole = build.existing()
    # The answer of a folder is kept, and pytest names the folder of a test as that of one before.
    monkeypatch.setattr(build, "BUILT", tmp_path / uuid.uuid4().hex)
    build.BUILT.mkdir()
    for path in (whole.kernels, whole.tf_ops):
        shutil.copy(path, build.BUILT)
    monkeypatch.delenv(VARIABLE, raising=False)
    return build.existing()


def test_the_library_s_answer_is_what_python_says_of_this_cpu(pair):
    host = read_host()
    flags = set(host.isa)
    for name, each in INSTRUCTION_SETS.items():
        if name not in pair.instruction_sets:
            flags -= set(each.needs[-1:])
    if "amx_tile" in flags:
        pytest.skip("the system may keep AMX from this process")
    best = instruction_set([flag for flag in host.isa if flag in flags], host.cpu_model)
    assert native_operations().bfloat16 == host.instructions == best


def test_a_known_name_computes_or_is_refused_for_a_flag_that_the_cpu_lacks(pair, monkeypatch):
    best = native_operations().float32
    for name, each in INSTRUCTION_SETS.items():
        monkeypatch.setenv(VARIABLE, name)
        try:
            native = native_operations()
            assert native.bfloat16 == name
            assert native.float32 == (best if each.bfloat16_alone else name)
        except InstructionSetError as error:
            lacking = str(error).split(f"got {name}, for which it lacks ")[1]
            assert any(flag in lacking for flag in set(each.needs) - set(read_host().isa))


def test_an_unknown_name_is_refused_with_all_that_are_known(pair, monkeypatch):
    monkeypatch.setenv(VARIABLE, "AVX2")
    rule = f"{VARIABLE} must be one of {', '.join(INSTRUCTION_SETS)}, got 'AVX2'"
    with pytest.raises(InstructionSetError, match=rule):
        native_operations()


@pytest.mark.parametrize("is_there", [False, True])
def test_a_library_of_other_sources_or_one_that_does_not_load_is_not_asked(pair, is_there):
    if is_there:
        pair.kernels.write_bytes(b"#!/bin/sh")
    else:
        pair.kernels.rename(pair.kernels.with_name("kernels-0123456789ab.avx2.so"))
    native = native_operations()
    assert (native.float32, native.bfloat16, native.tf_ops) == ("", "", None)
    assert (str(pair.kernels) in native.why) == is_there
    assert "run python -m models.native.build" in native.why


REFUSED = """
import tensorflow as tf
from models.native.library import native_operations

def refuse(path):
    raise tf.errors.NotFoundError(None, None, "undefined symbol: TF_New")

tf.load_op_library = refuse
from models.native import operations
print(operations.available(), native_operations().bfloat16 or "none")
print(native_operations().why)
"""


def test_where_tensorflow_refuses_it_the_answer_is_none_and_a_warning_says_so(needs_native):
    done = run_python(REFUSED)
    assert done.stdout.split()[:2] == ["False", "none"], done.stderr
    assert "undefined symbol" in done.stdout
    assert "warning: native operations" in done.stderr
