"""Constants of hosts: which are found, how they are scaled, and which files are refused."""

import dataclasses
import itertools
import json

import pytest

from memory_estimator.calibration import (
    FEATURES,
    NAMED,
    find_constants,
    host_file,
    load_constants,
    named_constants,
    part_of,
    shipped_constants,
    to_json,
)
from memory_estimator.host import INSTRUCTION_SETS, read_host
from memory_estimator.job import Job
from memory_estimator.step.training_step import training_step
from models.config import DTYPES, NETWORKS, NORMS, POLICIES, UPS, UNetConfig


def host(**changes):
    return dataclasses.replace(read_host(), **changes)


@pytest.fixture
def own(tmp_path):
    """A file as `calibrate` writes it."""
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(to_json(dataclasses.replace(shipped_constants("avx512"), name="mine", cpu="Some CPU"))))
    return path


@pytest.mark.parametrize("name", NAMED)
def test_there_are_shipped_constants_for_every_instruction_set_and_they_say_where_each_figure_is_from(name):
    assert set(NAMED) == set(INSTRUCTION_SETS)
    found = named_constants(name)
    for field in ("costs", "baseline_bytes", "op_bytes", "saturating_threads"):
        assert found.origins[field].startswith(("measured: ", "assumed: "))
    assert found.record
    assert found.date
    assert found == shipped_constants(name)
    assert shipped_constants("") == shipped_constants("avx2")


def test_an_assumed_host_differs_from_the_measured_one_by_the_factors_it_states():
    base, avx2 = named_constants("avx512"), named_constants("avx2")
    for dtype, (kind, costs) in itertools.product(DTYPES, base.costs["float32"].items()):
        for feature in costs:
            factor = 2 if part_of(feature) == "work" else 1
            assert avx2.costs[dtype][kind][feature] == pytest.approx(factor * base.costs[dtype][kind][feature])


def test_what_was_measured_on_a_host_is_found_there_and_a_damaged_file_is_said(own, monkeypatch, tmp_path):
    here = host(cpu_model="Some CPU")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    path = host_file(here)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"schema": 3, "constants": json.loads(own.read_text())}))
    found = find_constants(here)
    assert (found.name, found.own) == ("mine", True)
    path.write_text("{")
    damaged = find_constants(here)
    assert damaged.costs == shipped_constants(here.instructions).costs
    assert str(path) in damaged.basis("float32", here)


@pytest.mark.parametrize("changes", [{"cpu_model": "Another"}, {"isa": ("avx2",)}, {"cpu_quota": 1.0}])
def test_another_host_has_another_file(changes):
    here = host(cpu_model="Some CPU", isa=("avx512f",), cores=2, logical_cpus=2, cpu_quota=None)
    one = host_file(here)
    assert one == host_file(here)
    assert one != host_file(dataclasses.replace(here, **changes))


def test_every_operation_of_every_network_has_costs():
    kinds = {"every_op"}
    for network, norm, up, policy, optimizer in itertools.product(NETWORKS, NORMS, UPS, POLICIES, ("muon", "sgd")):
        more = {"residual": up == "upsampling", "deep_supervision": norm == "batch", "dtype": "bfloat16"}
        unet = UNetConfig(filters=4, depth=3, network=network, norm=norm, up=up, policy=policy, **more)
        job = Job(unet, (16, 16, 16), batch=2, micro_batch=1, optimizer=optimizer)
        kinds |= {op.kind for op in training_step(job).ops}
    assert kinds == set(FEATURES)


def test_a_missing_file_is_refused_and_a_number_of_threads_beyond_the_measured_one_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"none\.json must exist, got none"):
        load_constants(tmp_path / "none.json")
    measured, other = dataclasses.replace(shipped_constants("avx512"), origin="measured"), host(cpu_model="Another")
    again = measured.for_threads(8).for_threads(measured.threads)
    assert measured.caveats("float32") == again.caveats("float32") == []
    assert measured.basis("float32").startswith(f"measured on {measured.cpu}")
    found = measured.for_threads(56).basis("float32", other)
    assert found == f"assumed from measurements on {measured.cpu}; from 2 threads to 56 by assumption"


def changed(**changes):
    return lambda content: json.dumps({**content, **changes})


def with_costs(kind, costs):
    """One kind's costs replaced."""

    def damage(content):
        return changed(costs={**content["costs"], "float32": {**content["costs"]["float32"], kind: costs}})(content)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: json.dumps(content)[:-40], "must be complete JSON"),
        (changed(schema=1), "must be complete JSON of schema 3, got schema 1"),
        (lambda content: json.dumps({k: v for k, v in content.items() if k != "costs"}), "must be complete"),
        (with_costs("pass", {"traffic": -1.0}), "float32: pass traffic -1.0"),
        (with_costs("update", {"traffic": 1e-9}), "float32: update work missing"),
        (with_costs("pass", {"traffic": True}), "pass.traffic must be float, got true"),
        (changed(op_bytes={"stock": 1}), "op_bytes of itex missing"),
        (changed(threads=0), "got threads 0"),
    ],
)
def test_a_damaged_file_is_refused(damage, message, own):
    own.write_text(damage(json.loads(own.read_text())))
    with pytest.raises(ValueError, match=message) as error:
        load_constants(own)
    assert str(own) in str(error.value)
