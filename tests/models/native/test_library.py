"""The question which instruction set native operations compute with: of libraries that load, and of
those that do not."""

import os
import shutil
import subprocess
import sys
import uuid

import pytest

from memory_estimator.host import instruction_set, read_host
from models.native import build
from models.native.instruction_sets import INSTRUCTION_SETS
from models.native.library import InstructionSetError, load, native_operations

VARIABLE = "CPU3D_INSTRUCTION_SET"


@pytest.fixture(scope="module")
def whole(library):
    """A pair that loads here, on a CPU that it computes on."""
    if not build.existing() or not native_operations().tf_ops:
        pytest.skip("needs built operations, and a CPU with AVX2")
    return build.existing()[0]


@pytest.fixture
def pair(whole, tmp_path, monkeypatch):
    """A copy of it, which alone counts, on a host without a compiler."""
    # The answer of a folder is kept, and pytest names the folder of a test as that of one before.
    monkeypatch.setattr(build, "BUILT", tmp_path / uuid.uuid4().hex)
    build.BUILT.mkdir()
    for path in (whole.kernels, whole.tf_ops):
        shutil.copy(path, build.BUILT)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    return build.existing()[0]


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
    for name, each in INSTRUCTION_SETS.items():
        monkeypatch.setenv(VARIABLE, name)
        try:
            assert native_operations().bfloat16 == name
        except InstructionSetError as error:
            words = str(error)
            lacking = [flag for flag in each.needs if flag in words.split("lacks ")[1]]
            assert lacking
            assert name in words
            assert not set(lacking) <= set(read_host().isa)


@pytest.mark.parametrize("name", ["avx-512", "AVX2"])
def test_an_unknown_name_is_refused_with_all_that_are_known(pair, monkeypatch, name):
    monkeypatch.setenv(VARIABLE, name)
    with pytest.raises(InstructionSetError, match=rf"{VARIABLE} must .*, got '{name}'") as caught:
        native_operations()
    assert all(known in str(caught.value) for known in INSTRUCTION_SETS)


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh"])
def test_a_library_that_does_not_load_is_named(pair, content, capsys):
    pair.kernels.write_bytes(content)
    native = native_operations()
    assert (native.float32, native.bfloat16, native.tf_ops) == ("", "", None)
    assert str(pair.kernels) in native.why
    assert "C compiler" in native.why
    assert capsys.readouterr().err.count("\n") == 1


def test_a_library_whose_kinds_are_others_is_refused(pair, monkeypatch):
    monkeypatch.setattr("models.native.library.fingerprint", lambda: "of other kinds")
    with pytest.raises(OSError, match=r"must .* of other kinds, got [0-9a-f]{16}"):
        load(pair.kernels)
    assert native_operations().bfloat16 == ""


COMPILER = """#!/bin/sh
while [ $# -gt 1 ]; do
  case "$1 $2" in
    "-o "*/kernels) {cp} "$KERNELS" "$2" ;;
    "-o "*) echo > "$2" ;;
  esac
  shift
done
"""


def test_a_library_for_another_machine_is_built_again(pair, whole, monkeypatch, tmp_path):
    """Of the same name: only loading it shows that it needs another system."""
    pair.kernels.write_bytes(b"for another machine")
    (tmp_path / "cc").write_text(COMPILER.format(cp=shutil.which("cp", path=os.defpath)))
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    monkeypatch.setenv("KERNELS", str(whole.kernels))
    native = native_operations()
    assert native.bfloat16
    assert native.kernels.read_bytes() == whole.kernels.read_bytes()


def run_script(script, *words):
    environment = {**os.environ, "PYTHONPATH": str(build.HERE.parents[1])}
    command = [sys.executable, "-c", script, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_it_is_asked_without_tensorflow_and_numpy(pair):
    script = (
        "import sys\n"
        "sys.modules.update(tensorflow=None, numpy=None)\n"
        "from models.native.library import native_operations\n"
        "print(native_operations().bfloat16)\n"
    )
    done = run_script(script)
    assert done.stdout.strip() == native_operations().bfloat16


OPENED = """
import ctypes
from models.native.library import native_operations
ctypes.CDLL(str(native_operations().tf_ops))
from models.native import operations
from models.native.operations import Source
pooled = operations.operate('max_pool', Source(tf.ones((1, 2, 2, 2, 1)))).map
print(operations.available(), float(pooled))
"""


REFUSED = """
from models.native.library import native_operations

def refuse(path):
    raise tf.errors.NotFoundError(None, None, "undefined symbol: TF_New")

tf.load_op_library = refuse
from models.native import operations
print(operations.available(), native_operations().bfloat16 or "none")
print(native_operations().why)
"""


FORKED = """
import os, sys
import tensorflow as tf

scripts = sys.argv[2:]
for number, script in enumerate(scripts):
    if os.fork() == 0:
        for descriptor in (1, 2):
            file = os.open(f"{sys.argv[1]}/{number}.{descriptor}", os.O_WRONLY | os.O_CREAT)
            os.dup2(file, descriptor)
        exec(script)
        break
else:
    for _ in scripts:
        os.wait()
"""


@pytest.fixture(scope="module")
def answers(whole, tmp_path_factory):
    """What OPENED and REFUSED print and warn of, each in a process of its own; TensorFlow is
    imported for both."""
    folder = tmp_path_factory.mktemp("answers")
    done = run_script(FORKED, str(folder), OPENED, REFUSED)
    assert done.returncode == 0, done.stderr
    return [[(folder / f"{number}.{to}").read_text() for to in (1, 2)] for number in range(2)]


def test_a_library_that_the_process_has_opened_already_computes(answers):
    printed, warned = answers[0]
    assert printed.split() == ["True", "1.0"], warned


def test_where_tensorflow_refuses_it_the_answer_is_none_and_a_warning_says_so(answers):
    printed, warned = answers[1]
    assert printed.split()[:2] == ["False", "none"], warned
    assert "undefined symbol" in printed
    assert "warning: native operations" in warned
