"""What steps show of a host: which operation a profiled event belongs to, and what is kept."""

import dataclasses

import pytest

from cpu3d.host import observe
from cpu3d.host.fitting import Run
from cpu3d.host.observe import Event, Observer, live_bytes, read_runs, record, seconds_of, trace
from memory_estimator.calibration import find_constants, host_file
from memory_estimator.host import read_host
from memory_estimator.job import Job
from memory_estimator.step.timing import CONVOLUTIONS
from memory_estimator.step.training_step import training_step
from models.config import UNetConfig

PROGRAM = training_step(Job(UNetConfig(depth=2, filters=8, policy="speed"), (32, 32, 32), engine="stock", threads=2))

CONVS = [op for op in PROGRAM.ops if op.kind in CONVOLUTIONS]


def test_operations_are_matched_by_order_and_type_and_the_rest_is_loss():
    norms = [op for op in PROGRAM.ops if op.kind == "norm"]
    kinds = ["Conv3DBackpropFilterV2" if op.kind.endswith("filter_gradient") else "Conv3D" for op in CONVS]
    events = [
        *(Event(f"{kind}_3", f"_MklNative{kind}", float(number)) for number, kind in enumerate(kinds)),
        *(Event(f"act{i}/FusedBatchNormV3", "_MklNativeFusedBatchNormEx", 1.0 + i) for i in range(len(norms))),
        Event("Softplus", "Softplus", 20.0),
        Event("Adam/mul_3", "Mul", 30.0),
        Event("unet3d/encoder0_conv1/Conv3D/Cast", "Cast", 1.0),
        Event("Sum_2", "Sum", 2.0),
        Event("a", "MaxPool3D", 1.0),
        Event("b", "MaxPool3D", 1.0),
    ]
    ops, groups = seconds_of(PROGRAM, 1, events)
    assert [ops[op.name] for op in CONVS] == list(range(len(CONVS)))
    assert [ops[op.name] for op in norms] == [1.0 + i for i in range(len(norms))]
    assert (groups["loss"], groups["update"]) == (22.0, 31.0)
    assert groups["pool"] == 2.0  # two for one: the group as a whole
    in_parts, of_parts = seconds_of(PROGRAM, 2, [*events[:-1], *events])
    assert in_parts == ops  # each time that it runs
    assert of_parts["loss"] == 22.0
    with pytest.raises(ValueError, match=rf"must run the {len(CONVS)} convolutions .* got {len(CONVS) - 1}"):
        seconds_of(PROGRAM, 1, events[1:])


# --- What is kept ---

JOB = Job(UNetConfig(depth=2, filters=8, policy="speed"), (32, 32, 32), engine="stock", threads=2)
HOST = read_host()


def run_of(job=JOB, step_s=1.0, **more):
    return Run(job, "train", "2026-01-02", step_s, **more)


def filters(number):
    return dataclasses.replace(JOB, unet=dataclasses.replace(JOB.unet, filters=number))


def test_a_run_changes_what_is_found_for_the_host_and_says_so():
    assumed = find_constants(2, HOST)
    path = record([run_of()], HOST)
    assert path == host_file(HOST, "stock", 2)
    found = find_constants(2, HOST)
    assert found.of("stock", "float32").basis(HOST) == "measured here on 2026-01-02 from 1 run"
    assert found.of("stock", "bfloat16").basis(HOST).startswith("assumed from ")
    assert found.of("itex", "float32") == assumed.of("itex", "float32")
    with_more = find_constants(6, HOST).of("stock", "float32").for_threads(6)
    assert with_more.basis(HOST) == "measured here on 2026-01-02 from 1 run; from 2 threads to 6 by assumption"
    other = dataclasses.replace(HOST, cpu_model="Another")
    assert find_constants(2, other).basis(other).startswith("assumed from ")


def test_the_newest_run_of_each_job_is_kept_and_one_that_says_more_is_not_lost():
    record([run_of(step_s=1.0), run_of(filters(16), op_s={"head": 0.5})], HOST)
    path = record([run_of(step_s=2.0), run_of(filters(16), step_s=3.0)], HOST)
    kept = read_runs(path)
    assert sorted((run.job.unet.filters, run.step_s) for run in kept) == [(8, 2.0), (16, 1.0)]
    record([run_of(filters(number)) for number in range(20, 70)], HOST)
    assert len(read_runs(path)) == 40


def test_a_damaged_file_is_said_and_mended_by_the_next_run():
    path = record([run_of()], HOST)
    path.write_text(path.read_text()[:-40])
    runs = path.with_name(path.name.replace(".json", ".runs.jsonl"))
    runs.write_text(runs.read_text() + '{"job": {}}\n{"jo')
    (caveat,) = find_constants(2, HOST).caveats(HOST)
    assert f"calibration {path} must be complete JSON" in caveat
    record([run_of(filters(16))], HOST)
    assert find_constants(2, HOST).of("stock", "float32").runs == 2


@pytest.mark.parametrize("place", ["file", "missing"])
def test_where_nothing_can_be_kept_a_line_says_it(place, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file" / "below") if place == "file" else "")
    monkeypatch.setenv("HOME", "nowhere")
    observer = Observer(JOB, "train", HOST)
    for _ in range(3):
        observer.note(observer.watch(lambda: 1.0))
    observer.record()
    assert capsys.readouterr().err.startswith("warning: ")


@pytest.mark.parametrize("steps_s", [[9.0, 1.0], [9.0, 1.0, 1.5, 2.0, 1.12]])
def test_steps_that_are_few_or_were_disturbed_are_not_kept(steps_s):
    observer = Observer(JOB, "train", HOST, warm_up=1)
    for seconds in steps_s:
        observer.note(seconds)
    observer.record()
    assert not host_file(HOST, "stock", 2).exists()


def test_a_profiler_that_fails_harms_no_step(monkeypatch):
    def fails(folder):
        raise RuntimeError("damaged")

    monkeypatch.setattr(observe, "_events", fails)
    assert trace(lambda: 7) == (7, None)
    within = trace(lambda: trace(lambda: 7, live_bytes), live_bytes)  # while somebody else profiles, who goes on
    assert (within[0], within[1] is None) == ((7, None), False)
    with pytest.raises(KeyError):
        trace({}.popitem)


def test_the_bytes_live_over_a_step_are_those_of_every_request():
    import tensorflow as tf

    value, found = trace(lambda: tf.reduce_sum(tf.ones([2**22]) + 1.0).numpy(), live_bytes)
    seconds, sizes = zip(*found)
    assert value == 2**23
    assert (sorted(seconds), sizes[-1]) == (list(seconds), min(sizes))
    assert max(sizes) - min(sizes) in (16 * 2**20, 32 * 2**20)  # the sum may be written over the ones


def test_what_40_jobs_show_does_not_replace_what_calibrate_saw_of_the_runtime(monkeypatch):
    monkeypatch.setattr(observe, "MOST_RUNS", 2)
    held = Run(JOB, "calibrate", "2026-01-02", runtime_bytes=10**9)
    jobs = [dataclasses.replace(JOB, shape=(16, 16, 16 * n)) for n in (1, 2, 3)]
    record([held, *(Run(job, "train", "2026-01-03", step_s=1.0) for job in jobs)], HOST)
    kept = read_runs(host_file(HOST, "stock", 2))
    assert [run.job for run in kept] == [JOB, *jobs[1:]]


def test_operations_of_the_input_pipeline_are_none_of_the_step_s(tmp_path):
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    plane = space.planes.add()
    for number, line in enumerate(("tf_Compute/1", "tf_data_private_threadpool/2", "python"), 1):
        plane.event_metadata[number].name = f"op{number}:Conv3D"
        plane.lines.add(name=line).events.add(metadata_id=number, duration_ps=10**9)
    (tmp_path / "host.xplane.pb").write_bytes(space.SerializeToString())
    assert observe._events(tmp_path) == [Event("op1", "Conv3D", 1e-3)]
