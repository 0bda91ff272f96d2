"""What the engines really said when a worker was lost, and what the user reads of it."""

import pytest

from cpu3d.distributed.cluster import Cluster
from cpu3d.distributed.lost import lost_rank, lost_worker, not_started
from cpu3d.errors import WorkerLostError

THREE = ("h0:29500", "h1:29500", "h2:29500")

GRAPH = """Graph execution error:

Detected at node CollectiveReduceV2 defined at (most recent call last):
  File "x.py", line 34, in <module>

Collective ops is aborted by: {said}
The error could be from a previous operation. Restart your program to reset.
\t [[{{{{node CollectiveReduceV2}}}}]] [Op:__inference_red_37]"""

KILLED_215 = """failed to connect to all addresses
Additional GRPC error information from remote target /job:worker/replica:0/task:2 while calling /tensorflow.WorkerService/RecvBuf:
:{"created":"@1795226903.719250855","description":"Failed to pick subchannel","file":"external/com_github_grpc_grpc/src/core/ext/filters/client_channel/client_channel.cc","file_line":3941}"""  # noqa: E501

KILLED_221 = """Collective ops is aborted by: failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:32940: Failed to connect to remote host: Connection refused
Additional GRPC error information from remote target /job:worker/replica:0/task:2 while calling /tensorflow.WorkerService/RecvBuf:
:UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:"failed to connect to all addresses"}"""  # noqa: E501

STOPPED_215 = (
    "Error reported from /job:worker/task:2: Task /job:worker/replica:0/task:2 heartbeat timeout. This indicates that "
    "the remote task has failed, got preempted, or crashed unexpectedly. Check the task logs for an earlier error."
)

STOPPED_221 = """Error reported from /job:worker/task:2: The following tasks are unhealthy (stopped sending heartbeats):
/job:worker/replica:0/task:2
The tasks have crashed. Check the task logs for an earlier error, or scheduler events (e.g. preemption, eviction)."""

CHIEF_STOPPED_215 = """Deadline Exceeded
Additional GRPC error information from remote target /job:worker/replica:0/task:0 while calling /tensorflow.CoordinationService/Heartbeat:
:{"created":"@1795225995.8","description":"Error received from peer ipv4:10.77.0.1:29600","grpc_message":"Deadline Exceeded","grpc_status":4}"""  # noqa: E501

CHIEF_STOPPED_221 = """Deadline Exceeded

RPC: /tensorflow.CoordinationService/Heartbeat"""

GONE, SILENT = "no connection: its process has ended", "no sign of life: it hangs or is cut off"


@pytest.mark.parametrize(
    ("said", "rank", "reason"),
    [
        (KILLED_215, 2, GONE),
        (KILLED_221, 2, GONE),
        (STOPPED_215, 2, SILENT),
        (STOPPED_221, 2, SILENT),
        (CHIEF_STOPPED_215, 0, SILENT),
        (CHIEF_STOPPED_221, 0, SILENT),
    ],
)
def test_the_worker_that_is_lost_is_named_with_its_address_and_how(said, rank, reason):
    error = lost_worker(GRAPH.format(said=said), Cluster(THREE, 1))
    assert error.exit_code == 6
    assert str(error) == (
        f"worker {rank} (h{rank}:29500) must answer worker 1, got {reason}{' or its host is gone' * (reason == GONE)}; "
        f"its log may tell why, the same command continues from the last checkpoint"
    )


def test_one_that_is_given_up_by_the_others_itself_says_so():
    said = str(lost_worker(GRAPH.format(said=STOPPED_221), Cluster(THREE, 2)))
    assert said.startswith("worker 2 (h2:29500), this one, must reach the others, got no sign of life")
    assert "mend its network" in said


def test_another_worker_is_blamed_before_oneself():
    assert lost_rank("/job:worker/task:1 lost /job:worker/replica:0/task:2", Cluster(THREE, 1)) == 2


def test_an_unknown_worker_is_not_named():
    said = str(lost_worker("/job:worker/task:7 failed: no such thing", Cluster(THREE, 1)))
    assert said.startswith("all 3 workers must answer each other, got /job:worker/task:7 failed: no such thing; their")


def test_horovod_names_nobody():
    said = (
        "{{function_node __wrapped__HorovodAllreduce_device_/job:localhost/replica:0/task:0/device:CPU:0}} Horovod has "
        "been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce"
    )
    assert "workers must answer each other, got no answer: one of them" in str(lost_worker(said, Cluster(THREE, 1)))


@pytest.mark.parametrize("said", ["", "\n", "x" * 5000, "Collective ops is aborted by:"])
def test_any_text_becomes_one_short_line(said):
    problem = str(lost_worker(said, Cluster(THREE, 1)))
    assert "\n" not in problem
    assert len(problem) < 400


def test_a_port_that_was_taken_meanwhile_is_bad_input_and_all_else_a_lost_worker():
    cluster = Cluster(THREE, 1)
    taken = not_started("Could not start gRPC server", cluster)
    assert taken.exit_code == 2
    assert str(taken).startswith("port 29500 of worker 1 (h1:29500) must be free until TensorFlow takes it")
    assert isinstance(not_started(STOPPED_215, cluster), WorkerLostError)
