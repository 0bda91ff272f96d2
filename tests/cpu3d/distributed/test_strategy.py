"""The exchange between real processes: the sum, its bits, and what is said when one of them is lost."""

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cpu3d.distributed.cluster import ALONE as ALONE_CLUSTER
from cpu3d.distributed.cluster import Cluster
from cpu3d.distributed.strategy import ALONE, join
from cpu3d.errors import InputError

ROOT = Path(__file__).resolve().parents[3]

WORKER = """
import dataclasses, hashlib, os, sys
from cpu3d.distributed.cluster import read_cluster
from cpu3d.distributed.strategy import join
from cpu3d.errors import InputError
from cpu3d.host.apply import import_tensorflow

tf = import_tensorflow()
try:
    cluster = dataclasses.replace(read_cluster(os.environ), engine=sys.argv[1])  # as between hosts
    exchange = join(cluster, meeting_s=60)
    assert (exchange.rank, exchange.count, exchange.is_chief) == (cluster.rank, cluster.workers, cluster.rank == 0)
    whole = exchange.sum(tf.range(9_000_001, dtype=tf.float32) % 1000 + 1000 * (exchange.rank + 1))
    print("whole", whole.shape[0], *(float(whole[i]) for i in (0, 1, 4_194_305, 9_000_000)), flush=True)
    print("empty", exchange.sum(tf.zeros([0])).shape[0], flush=True)
    for length in (1, 2, 5_000_000):
        noise = tf.random.stateless_normal([length], [exchange.rank, 5])
        print("noise", hashlib.sha256(exchange.sum(noise).numpy().tobytes()).hexdigest(), flush=True)
    if sys.argv[2] == "end":
        exchange.close()
        sys.exit(0)
    while True:
        exchange.sum(tf.ones([5_000_000]))
        print("step", flush=True)
except InputError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
"""


class Workers:
    """Processes that exchange, one thread each, and their words."""

    def __init__(self, folder, addresses, *, before=lambda rank: (), then="go on"):
        self.folder, self.addresses, self.processes = folder, addresses, []
        for rank in range(len(addresses)):
            with self.file(rank, "out").open("w") as out, self.file(rank, "err").open("w") as err:
                command = [*before(rank), sys.executable, "-c", WORKER, "tensorflow", then]
                self.processes.append(
                    subprocess.Popen(
                        command, env=environment(Cluster(addresses, rank)), stdout=out, stderr=err, cwd=folder
                    )
                )

    def file(self, rank, kind):
        return self.folder / f"{rank}.{kind}"

    def said(self, rank, kind="out"):
        """Lines; of the errors those that are the program's own, as TensorFlow 2.21 greets on its import."""
        lines = self.file(rank, kind).read_text().splitlines()
        return [line for line in lines if kind == "out" or line.startswith(("error", "Traceback"))]

    def steps(self):
        return [self.said(rank).count("step") for rank in range(len(self.processes))]

    def wait_for_steps(self, count):
        until(lambda: min(self.steps()) >= count or any(one.poll() is not None for one in self.processes), 90)
        assert min(self.steps()) >= count, self.said(0, "err") + self.said(1, "err")

    def ends(self, rank, within_s):
        """The exit code of a worker that ends by itself in time."""
        return self.processes[rank].wait(timeout=within_s)

    def end(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


def environment(cluster):
    one_thread = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}
    return {**os.environ, **one_thread, "PYTHONPATH": str(ROOT), "TF_CONFIG": cluster.as_tf_config()}


def until(condition, limit_s):
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)


def local_addresses(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return tuple(f"127.0.0.1:{one.getsockname()[1]}" for one in sockets)


@pytest.fixture
def started(tmp_path):
    """A function that starts workers, which end with the test."""
    with contextlib.ExitStack() as stack:

        def start(*arguments, **options):
            folder = tmp_path / str(len(list(tmp_path.iterdir())))
            folder.mkdir()
            workers = Workers(folder, *arguments, **options)
            stack.callback(workers.end)
            return workers

        yield start


def test_alone_the_sum_is_what_is_put_in_and_costs_nothing():
    assert join(ALONE_CLUSTER) is ALONE
    assert join(Cluster(("h0:29500",))) is ALONE
    vector = object()
    assert ALONE.sum(vector) is vector
    assert (ALONE.rank, ALONE.count, ALONE.is_chief) == (0, 1, True)
    ALONE.close()


def test_an_unknown_engine_is_refused():
    with pytest.raises(InputError, match="engine must be one of memory, tensorflow, horovod, got mpi"):
        Cluster(("h0:29500", "h1:29500"), engine="mpi")


@pytest.mark.skipif(importlib.util.find_spec("horovod") is not None, reason="Horovod is installed")
def test_without_horovod_its_set_up_is_named():
    with pytest.raises(InputError, match=r"horovod must be installed, .*run `./run.sh setup --horovod`"):
        join(Cluster(("h0:29500", "h1:29500"), engine="horovod"))


def test_three_workers_get_the_same_bits_and_name_the_one_that_is_killed(started):
    workers = started(local_addresses(3))
    workers.wait_for_steps(2)
    said = [[line for line in workers.said(rank) if line != "step"] for rank in range(3)]
    assert said[0][:2] == ["whole 9000001 6000.0 6003.0 6915.0 6000.0", "empty 0"]
    assert len(said[0]) == 5
    assert said[1] == said[2] == said[0]
    workers.processes[2].kill()
    address = workers.addresses[2]
    assert [workers.ends(rank, within_s=60) for rank in (0, 1)] == [6, 6]
    told = [workers.said(rank, "err") for rank in (0, 1)]
    assert [len(lines) for lines in told] == [1, 1], told
    # Whoever hears of it later may hear first of the one that has ended for it.
    assert any(
        lines[0]
        == f"error: worker 2 ({address}) must answer worker {rank}, got no connection: its process has ended or "
        "its host is gone; its log may tell why, the same command continues from the last checkpoint"
        for rank, lines in enumerate(told)
    ), told
    assert all(lines[0].startswith("error: ") for lines in told), told


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_worker_that_is_stopped_ends_the_others_within_a_minute(started, stopped):
    workers = started(local_addresses(2))
    workers.wait_for_steps(2)
    workers.processes[stopped].send_signal(signal.SIGSTOP)
    other = 1 - stopped
    assert workers.ends(other, within_s=50) == 6
    (problem,) = workers.said(other, "err")
    assert f"worker {stopped} ({workers.addresses[stopped]}) must answer worker {other}, got no sign of life" in problem
    workers.processes[stopped].send_signal(signal.SIGCONT)
    assert workers.ends(stopped, within_s=50) == 6


@pytest.mark.slow
def test_workers_that_reach_their_end_take_leave_in_peace(started):
    workers = started(local_addresses(3), then="end")
    assert [workers.ends(rank, within_s=90) for rank in range(3)] == [0, 0, 0]
    assert [workers.said(rank, "err") for rank in range(3)] == [[], [], []]


def ip(*arguments):
    return subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def two_hosts():
    """Two network namespaces with a cable between them: [(name, address)], and a function that (un)plugs it."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and the command ip, to make network namespaces")
    names, ends = [f"cpu3d-{os.getpid()}-{i}" for i in range(2)], [f"c3d{os.getpid() % 10**7}{i}" for i in range(2)]
    hosts = [(name, f"10.99.37.{1 + i}") for i, name in enumerate(names)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
        for (name, address), end in zip(hosts, ends):
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", end, "up")
        yield hosts, lambda state: ip("-n", names[0], "link", "set", ends[0], state)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.slow
def test_a_cut_cable_ends_both_sides_within_a_minute_and_mended_they_meet_again(started, two_hosts):
    hosts, cable = two_hosts
    addresses = tuple(f"{address}:29517" for _, address in hosts)
    inside = lambda rank: ("ip", "netns", "exec", hosts[rank][0])
    workers = started(addresses, before=inside)
    workers.wait_for_steps(2)
    cable("down")
    assert [workers.ends(rank, within_s=50) for rank in (0, 1)] == [6, 6]
    for rank in (0, 1):
        (problem,) = workers.said(rank, "err")
        other = f"worker {1 - rank} ({addresses[1 - rank]})"
        assert problem.startswith(f"error: {other} must answer worker {rank}, got no sign of life"), problem
    cable("up")
    started(addresses, before=inside).wait_for_steps(2)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="needs Horovod: ./run.sh setup --horovod")
def test_horovod_gives_the_same_sums(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    done = subprocess.run(
        [horovodrun, "--gloo", "-np", "3", "-H", "localhost:3", sys.executable, str(script), "horovod", "end"],
        env={name: value for name, value in environment(Cluster(())).items() if name != "TF_CONFIG"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = [[line.partition(f"[{rank}]<stdout>:")[2] for line in done.stdout.splitlines()] for rank in range(3)]
    said = [[line for line in lines if line] for lines in said]
    assert said[0][:2] == ["whole 9000001 6000.0 6003.0 6915.0 6000.0", "empty 0"]
    assert len(said[0]) == 5
    assert said[1] == said[2] == said[0]
