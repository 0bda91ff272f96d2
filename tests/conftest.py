"""What all tests share. The host's plan is applied before any test module imports TensorFlow."""

import dataclasses
import os
import signal
import sys
from pathlib import Path

import hypothesis
import pytest

from cpu3d import memory_plan
from cpu3d.host.apply import apply
from cpu3d.host.thread_plan import thread_plan
from memory_estimator.host import read_host
from memory_estimator.planner import with_policy
from memory_estimator.recipes import JOBS
from models.config import POLICIES, UNetConfig

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # the first test that computes would take a card for all of them

if "tensorflow" not in sys.modules:  # a second collection in one process finds it there, set up
    apply(thread_plan(read_host()))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs so, and every process that a test starts and interrupts would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time, so that a change is judged by what it changes; and no limit on an example's time, which
# says how busy the machine is. `--hypothesis-profile search` looks for others.
hypothesis.settings.register_profile("steady", derandomize=True, deadline=None)
hypothesis.settings.register_profile("search", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("steady")


def pytest_addoption(parser):
    parser.addoption(
        "--policy",
        choices=POLICIES,
        help="run the tests under this memory policy: that of every network which names none, of the recipes, and of "
        "every run that leaves it open; a process that a test starts is under the one that its command names",
    )


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "policy_left_open: about the default policy, or the one that is picked; --policy leaves it alone"
    )
    # Before any test module is imported, as they build networks while they are. What has been built by then are the
    # recipes' jobs, whichever conftest.py came first.
    if config.getoption("--policy"):
        make_default(config.getoption("--policy"))


def make_default(policy):
    """From now on `policy` is that of networks that name none, and of the recipes."""
    assert dataclasses.fields(UNetConfig)[-1].name == "policy"
    UNetConfig.__init__.__defaults__ = (*UNetConfig.__init__.__defaults__[:-1], policy)
    UNetConfig.policy = policy
    JOBS.update({name: with_policy(job, policy) for name, job in JOBS.items()})


OWN_DEFAULT, PICK = UNetConfig().policy, memory_plan.pick_policy


@pytest.fixture(scope="session", autouse=True)
def policy_of_the_tests(pytestconfig):
    """What --policy names is also what every run is given that leaves it open. None without."""
    policy = pytestconfig.getoption("--policy")
    with pytest.MonkeyPatch.context() as patch:
        if policy:
            given = lambda config, *more: (memory_plan.under(config, policy), f"policy {policy}: the tests'")
            patch.setattr(memory_plan, "pick_policy", given)
        yield policy


@pytest.fixture(autouse=True)
def policy_left_open(request, policy_of_the_tests):
    """Tests with this marker see the default and the picking as they are."""
    if policy_of_the_tests is None or request.node.get_closest_marker("policy_left_open") is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_plan, "pick_policy", PICK)
        make_default(OWN_DEFAULT)
        yield
        make_default(policy_of_the_tests)


@pytest.fixture(scope="session")
def real_cases() -> Path:
    """The folder of real cases: CPU3D_REAL_DATA, else one beside the checkout. Without it the test is skipped."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("CPU3D_REAL_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"needs real cases, found none in {folder}: name their folder in CPU3D_REAL_DATA")
    return folder


@pytest.fixture(scope="session")
def waits_for():
    """Whether an operation of a graph cannot begin before another is done: it reads what comes of it, or is told so."""

    def waits_for(operation, other):
        found, left = set(), [operation]
        while left:
            one = left.pop()
            before = {tensor.op for tensor in one.inputs} | set(one.control_inputs)
            left.extend(before - found)
            found |= before
        return other in found

    return waits_for


@pytest.fixture(scope="session")
def phantom_store(tmp_path_factory):
    """A store of six small phantoms: four to train, one to validate, one to test. Read only."""
    from cpu3d.data.store import open_store
    from cpu3d.data.stores.phantom import write_phantom
    from cpu3d.data.stores.prepare import prepare

    folder = tmp_path_factory.mktemp("phantom")
    write_phantom(folder / "raw", cases=6, shape=(40, 48, 36), seed=5, workers=1)
    prepare(folder / "raw", folder / "store", workers=1)
    return open_store(folder / "store")
