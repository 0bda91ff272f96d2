"""Each test that imports TensorFlow does so in a process of its own: an engine is chosen once per
process."""

import json
import os
import subprocess
import sys
from unittest.mock import patch

import pytest

from cpu3d.errors import InputError
from cpu3d.host.apply import apply, import_tensorflow
from cpu3d.host.thread_plan import (
    KMP_AFFINITY,
    ThreadPlan,
    possible_workers,
    read_topology,
    thread_plans,
)
from cpu3d.util.child import ROOT
from memory_estimator.installed import itex_is_installed

TOPOLOGY = read_topology()
ALL_CPUS = [cpu.number for cpu in TOPOLOGY.cpus]


def run_python(script, **environment):
    """The last line of a fresh process, without settings of this one, read as JSON."""
    own = ("TF_", "OMP_", "KMP_", "ITEX_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    environment = {**clean, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


ITEX = """
import json, os, sys, threading
from cpu3d.host import apply as host_apply
from cpu3d.host.thread_plan import thread_plan
from memory_estimator.host import read_host
host_apply.apply(thread_plan(read_host()), "itex")
tf = host_apply.import_tensorflow("itex")
assert host_apply.import_tensorflow("itex") is tf
try:
    second = host_apply.import_tensorflow("stock")
except RuntimeError as error:
    second = str(error).partition(", got ")[2]
image, filters = tf.ones((1, 32, 32, 32, 16)), tf.ones((3, 3, 3, 16, 16))
tf.function(tf.nn.conv3d)(image, filters, [1] * 5, "SAME").numpy()
inherited = []
later = threading.Thread(target=lambda: inherited.extend(os.sched_getaffinity(0)))
later.start()
later.join()
tasks = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
threads = tf.config.threading
print(json.dumps({
    "name": host_apply.engine_name(tf),
    "second": second,
    "threads": [
        threads.get_intra_op_parallelism_threads(),
        threads.get_inter_op_parallelism_threads(),
    ],
    "bound": sum(len(cpus) == 1 for cpus in tasks),
    "cpus": [sorted(os.sched_getaffinity(0)), inherited],
}))
"""


@pytest.mark.skipif(not itex_is_installed() or len(ALL_CPUS) < 2, reason="needs ITEX and two CPUs")
def test_itex_is_loaded_and_named_and_its_bound_threads_leave_those_of_python_free():
    """A step binds the thread of TensorFlow's pool that begins it, and not the one that has asked
    for it.

    Else every thread that reads data would inherit its one CPU.
    """
    # as a plan sets it on hosts of several nodes
    assert run_python(ITEX, KMP_AFFINITY=KMP_AFFINITY) == {
        "name": "TensorFlow 2.15.1, oneDNN, ITEX 2.15.0.0",
        "second": "stock on TensorFlow 2.15.1, oneDNN, ITEX 2.15.0.0",
        "threads": [TOPOLOGY.host.usable_cores, 1],
        "bound": TOPOLOGY.host.usable_cores,
        "cpus": [ALL_CPUS] * 2,
    }


@pytest.fixture
def without_tensorflow(monkeypatch):
    """This process as it is before TensorFlow is imported; its environment is put back
    afterwards."""
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    with patch.dict(os.environ):
        yield


@pytest.mark.parametrize(("engine", "onednn"), [(None, "7"), ("itex", "1"), ("stock", "1")])
def test_apply_sets_what_is_unset_and_only_onednn_by_the_engine(without_tensorflow, engine, onednn):
    os.environ.pop("KMP_BLOCKTIME", None)
    os.environ.update(OMP_NUM_THREADS="5", TF_ENABLE_ONEDNN_OPTS="7")
    plan = {"KMP_BLOCKTIME": "1", "OMP_NUM_THREADS": "4", "TF_ENABLE_ONEDNN_OPTS": "1"}
    apply(ThreadPlan(4, plan), engine)
    assert [os.environ[name] for name in plan] == ["1", "5", onednn]


def test_what_cannot_be_set_up_is_refused(without_tensorflow, monkeypatch):
    monkeypatch.setattr("cpu3d.host.apply.itex_is_installed", lambda: False)
    with pytest.raises(InputError, match="engine must be installed, got itex"):
        import_tensorflow("itex")
    os.environ["TF_NUM_INTRAOP_THREADS"] = "all"
    with pytest.raises(InputError, match=r"INTRAOP_THREADS must be .*, got 'all'"):
        import_tensorflow("stock")


WORKER = """
import json, os, threading
thread = threading.Event()
threading.Thread(target=thread.wait, daemon=True).start()
from cpu3d.host.apply import set_up
host, plan, tf = set_up(local=(1, 2))
tf.linalg.matmul(tf.ones((64, 64)), tf.ones((64, 64)))
again = set_up(local=(1, 2))[1]
masks = {tuple(sorted(os.sched_getaffinity(int(task)))) for task in os.listdir("/proc/self/task")}
print(json.dumps({
    "cpus": [plan.cpus, again.cpus, *masks],
    "cores": host.cores,
    "threads": [plan.intra_op, tf.config.threading.get_intra_op_parallelism_threads()],
}))
"""


@pytest.mark.skipif(
    2 not in possible_workers(TOPOLOGY) or TOPOLOGY.host.cpu_quota is not None,
    reason="needs a host that two workers can divide",
)
def test_a_worker_is_held_to_its_part_of_the_cores():
    """All threads of the process are held, those of TensorFlow too; a second set_up reads the part,
    not its half. CPUs are of a whole process and not given back."""
    expected = thread_plans(TOPOLOGY, 2)[1]
    assert run_python(WORKER) == {
        "cpus": [list(expected.cpus)] * 3,
        "cores": TOPOLOGY.host.cores,
        "threads": [expected.intra_op] * 2,
    }
