"""Each test that imports TensorFlow does so in a process of its own: an engine is chosen once per
process."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys

import pytest

from cpu3d.errors import InputError
from cpu3d.host.apply import apply, import_tensorflow, set_up
from cpu3d.host.thread_plan import KMP_AFFINITY, ThreadPlan, read_topology, thread_plans
from cpu3d.util.child import ROOT
from memory_estimator.host import read_host

TENSORFLOW = importlib.metadata.version("tensorflow")
HAS_ITEX = importlib.util.find_spec("intel_extension_for_tensorflow") is not None

SCRIPT = """
import json, os, sys, threading
from cpu3d.host import apply as host_apply
from cpu3d.host.thread_plan import thread_plan
from memory_estimator.host import read_host
host_apply.apply(thread_plan(read_host()), "itex")
tf = host_apply.import_tensorflow("itex")
try:
    second = host_apply.import_tensorflow("stock")
except RuntimeError as error:
    second = str(error)
image, filters = tf.ones((1, 32, 32, 32, 16)), tf.ones((3, 3, 3, 16, 16))
tf.function(tf.nn.conv3d)(image, filters, [1] * 5, "SAME").numpy()
inherited = []
later = threading.Thread(target=lambda: inherited.extend(os.sched_getaffinity(0)))
later.start()
later.join()
tasks = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
print(json.dumps({
    "cpus": [sorted(os.sched_getaffinity(0)), inherited],
    "bound": sum(len(cpus) == 1 for cpus in tasks),
    "name": host_apply.engine_name(tf),
    "threads": [
        tf.config.threading.get_intra_op_parallelism_threads(),
        tf.config.threading.get_inter_op_parallelism_threads(),
    ],
    "again_is_same": host_apply.import_tensorflow("itex") is tf,
    "second": second,
}))
"""


def run_python(script, *arguments, **environment):
    """The last line of a fresh process, without settings of this one, read as JSON."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TF_", "OMP_", "KMP_", "ITEX_"))
    }
    command = [sys.executable, "-c", script, *arguments]
    environment = {**clean, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not HAS_ITEX, reason="ITEX is not installed")
def test_itex_is_loaded_and_named_and_its_bound_threads_leave_those_of_python_free():
    """A step binds the thread of TensorFlow's pool that begins it, and not the one that has asked
    for it.

    Else every thread that reads data would inherit its one CPU.
    """
    answer = run_python(
        SCRIPT, KMP_AFFINITY=KMP_AFFINITY
    )  # as a plan sets it on hosts of several nodes
    assert answer["name"] == f"TensorFlow {TENSORFLOW}, oneDNN, ITEX 2.15.0.0"
    assert answer["threads"] == [read_host().usable_cores, 1]
    assert answer["again_is_same"]
    assert "stock on" in answer["second"]
    if read_host().logical_cpus > 1:
        assert answer["bound"] == read_host().usable_cores
        assert answer["cpus"] == [sorted(os.sched_getaffinity(0))] * 2


@pytest.fixture
def without_tensorflow(monkeypatch):
    """This process as it is before TensorFlow is imported; its environment is put back
    afterwards."""
    for name in [name for name in sys.modules if name == "tensorflow"]:
        monkeypatch.delitem(sys.modules, name)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(("engine", "onednn"), [(None, "7"), ("itex", "1"), ("stock", "1")])
def test_apply_sets_what_is_unset_and_only_onednn_by_the_engine(without_tensorflow, engine, onednn):
    os.environ.pop("KMP_BLOCKTIME", None)
    os.environ.update(OMP_NUM_THREADS="5", TF_ENABLE_ONEDNN_OPTS="7")
    plan = {"KMP_BLOCKTIME": "1", "OMP_NUM_THREADS": "4", "TF_ENABLE_ONEDNN_OPTS": "1"}
    apply(ThreadPlan(4, plan), engine)
    assert [os.environ[name] for name in plan] == ["1", "5", onednn]


def test_what_cannot_be_set_up_is_refused(without_tensorflow, monkeypatch):
    for use in (lambda: apply(ThreadPlan(1, {}), "mkl"), lambda: import_tensorflow("mkl")):
        with pytest.raises(InputError, match="engine must be one of itex, stock, got mkl"):
            use()
    with pytest.raises(InputError, match="workers must divide"):
        set_up(local=(0, 100000))
    monkeypatch.setattr("cpu3d.host.apply.itex_is_installed", lambda: False)
    with pytest.raises(InputError, match="engine must be installed, got itex"):
        import_tensorflow("itex")
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "all")
    with pytest.raises(InputError, match=r"INTRAOP_THREADS must be .*, got 'all'"):
        import_tensorflow("stock")


# --- CPUs: they are of a whole process and not given back ---


needs_two_cores = pytest.mark.skipif(
    read_host().cores < 2
    or read_host().sockets > 1
    or read_host().cpu_quota is not None
    or sys.platform != "linux",
    reason="needs two cores of one socket to itself",
)


@needs_two_cores
def test_a_worker_is_held_to_its_part_of_the_cores():
    """All threads of the process are held, those of TensorFlow too; a second set_up reads the part,
    not its half."""
    answer = run_python(
        """
import json, os, threading
thread = threading.Event()
threading.Thread(target=thread.wait, daemon=True).start()
before = os.sched_getaffinity(0)
from cpu3d.host.apply import set_up
host, plan, tf = set_up(local=(1, 2))
tf.linalg.matmul(tf.ones((64, 64)), tf.ones((64, 64)))
again = set_up(local=(1, 2))[1]
masks = {tuple(sorted(os.sched_getaffinity(int(task)))) for task in os.listdir("/proc/self/task")}
print(json.dumps({
    "before": sorted(before),
    "cpus": plan.cpus,
    "masks": sorted(masks),
    "again": again.cpus,
    "cores": host.cores,
    "intra": tf.config.threading.get_intra_op_parallelism_threads(),
    "threads": plan.intra_op,
}))
"""
    )
    expected = thread_plans(read_topology(), 2)[1]
    assert answer["cpus"] == answer["again"] == list(expected.cpus) != answer["before"]
    assert answer["masks"] == [list(expected.cpus)]
    assert answer["intra"] == answer["threads"] == expected.intra_op
    assert answer["cores"] == read_host().cores
