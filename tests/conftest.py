"""Fixtures of all tests. The host's plan is applied before any test module imports TensorFlow."""

import atexit
import gc
import itertools
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest

from cpu3d.host.apply import apply
from cpu3d.host.thread_plan import thread_plan
from memory_estimator.host import read_host
from models.native import build

# the first test that computes would take a card for all of them
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")


def fits_in_memory():
    """Whether /dev/shm takes what all tests write (0.5 GB), and programs may be run from it."""
    if not os.path.isdir("/dev/shm"):
        return False
    system = os.statvfs("/dev/shm")
    may_run = not system.f_flag & os.ST_NOEXEC
    return may_run and system.f_bavail * system.f_frsize >= 4 * 2**30


# Tests write 40,000 files. On a disk each costs milliseconds when it is synced, and again when it
# is deleted; in memory neither does. pytest's own variable names another folder.
if fits_in_memory():
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

# Where no bytecode may be written, as in many containers, every process that a test starts would
# compile the project again, and so would every collection: half its seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several processes share the cores: one thread each.
    os.environ.update(OMP_NUM_THREADS="1", TF_NUM_INTRAOP_THREADS="1", TF_NUM_INTEROP_THREADS="1")

if "tensorflow" not in sys.modules:  # a second collection in one process finds it there, set up
    apply(thread_plan(read_host()))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs so, and every process that a test starts and interrupts would
    # inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time, so that a change is judged by what it changes; and no limit on an
# example's time, which says how busy the machine is.
hypothesis.settings.register_profile("steady", derandomize=True, deadline=None)
hypothesis.settings.load_profile("steady")


def pytest_sessionstart(session):
    """Native operations are those of these sources, where there is a compiler."""
    computes = "PYTEST_XDIST_WORKER" not in os.environ and not session.config.option.collectonly
    if computes and build.existing() is None:
        build.main()


def pytest_collection_modifyitems(items):
    """The estimator's modules come last: most of them take a second or two, so that workers, which
    take a module at a time, end together."""
    items.sort(key=lambda item: "tests/memory_estimator/" in item.nodeid)


def pytest_collection_finish():
    """Modules stay: no collection of garbage looks at them again, which is a twentieth of the time
    of tests that build graphs."""
    gc.collect()
    gc.freeze()


DATA_HOME = tempfile.mkdtemp(prefix="cpu3d-tests-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
atexit.register(shutil.rmtree, DATA_HOME, ignore_errors=True)
# What runs show of this host is kept here, and not with the user's own.
os.environ["XDG_DATA_HOME"] = DATA_HOME
NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def _empty_data_home(monkeypatch):
    """No test reads what the runs of another one have shown of the host. Who writes there makes
    the folder."""
    monkeypatch.setenv("XDG_DATA_HOME", os.path.join(DATA_HOME, str(next(NUMBERS))))


@pytest.fixture(scope="session")
def needs_native():
    """The test is skipped where native operations do not compute."""
    from models.native import operations

    if not operations.available():
        pytest.skip("needs native operations: run python -m models.native.build")


@pytest.fixture(scope="session")
def real_cases():
    """The folder that CPU3D_REAL_DATA names; the test is skipped where it names none."""
    folder = os.environ.get("CPU3D_REAL_DATA", "")
    if not folder or not Path(folder).is_dir():
        pytest.skip("needs real cases: name their folder in CPU3D_REAL_DATA")
    return Path(folder)


@pytest.fixture(scope="session")
def phantom_store(tmp_path_factory):
    """A store of six small phantoms: four to train, one to validate, one to test. Read only."""
    from cpu3d.data.phantoms.command import write_phantom
    from cpu3d.data.store import open_store
    from cpu3d.data.stores.prepare import prepare

    folder = tmp_path_factory.mktemp("phantom")
    write_phantom(folder / "raw", cases=6, shape=(40, 48, 36), seed=5, workers=1)
    prepare(folder / "raw", folder / "store", workers=1)
    return open_store(folder / "store")
