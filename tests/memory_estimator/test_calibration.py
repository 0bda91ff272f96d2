"""Constants of hosts: which are found, how they are scaled, and which files are refused."""

import dataclasses
import itertools
import json

import pytest

from memory_estimator.calibration import (
    GROUPS,
    NAMED,
    SHIPPED,
    find_constants,
    host_file,
    load_constants,
    part_of,
    shipped_constants,
    to_json,
)
from memory_estimator.estimate import estimate
from memory_estimator.host import read_host
from memory_estimator.job import ENGINES, Job
from memory_estimator.step.onednn import Kernels
from memory_estimator.step.timing import FUSED, group_of
from memory_estimator.step.training_step import training_step
from models.config import DTYPES, NETWORKS, NORMS, POLICIES, UPS, UNetConfig

EPYC = SHIPPED / "epyc_avx512_bf16.json"


def host(**changes):
    return dataclasses.replace(read_host(), **changes)


@pytest.fixture
def own(tmp_path):
    """A file as `calibrate` measures on some host with one engine and one dtype."""
    shipped, path = load_constants(EPYC), tmp_path / "calibration.json"
    costs = {"stock": {"float32": {**shipped.speeds("stock", "float32"), "norm": {"cached": 1e-12, "traffic": 2e-12}}}}
    changes = {"name": "mine", "cpu": "Some CPU", "baseline_bytes": {"stock": 7}, "op_bytes": {"stock": 3}}
    path.write_text(json.dumps(to_json(dataclasses.replace(shipped, costs=costs, **changes))))
    return path


@pytest.mark.parametrize("file", NAMED.values())
def test_shipped_constants_know_every_engine_and_dtype_and_say_where_each_figure_is_from(file):
    found = load_constants(SHIPPED / file)
    for engine, dtype in itertools.product(ENGINES, DTYPES):
        assert set(GROUPS) <= set(found.speeds(engine, dtype))
    for field in ("costs", "baseline_bytes", "op_bytes", "cache_bytes", "saturating_threads", "kernels"):
        assert found.origins[field].startswith(("measured: ", "assumed: "))
    assert found.record
    assert found.date
    assert found == shipped_constants(found.kernels)


def test_an_assumed_host_differs_from_the_measured_one_by_the_factors_it_states():
    base, amx = load_constants(EPYC), load_constants(SHIPPED / "xeon_amx.json")
    stated = json.loads((SHIPPED / "xeon_amx.json").read_text())["faster"]
    for engine, dtype in itertools.product(ENGINES, DTYPES):
        for group, costs in base.speeds(engine, dtype).items():
            for feature, cost in costs.items():
                factor = {"work": stated[dtype], "traffic": stated["traffic"], "overhead": 1.0}[part_of(feature)]
                assert amx.speeds(engine, dtype)[group][feature] == pytest.approx(cost / factor)


def test_what_was_not_measured_is_answered_by_the_shipped_ones_under_their_own_name(own, monkeypatch, tmp_path):
    here = host(cpu_model="Some CPU", kernels=load_constants(EPYC).kernels)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    path = host_file(here, "stock")
    path.parent.mkdir(parents=True)
    own.rename(path)
    found, shipped = find_constants(here), load_constants(EPYC)
    assert found.speeds("itex", "bfloat16") == shipped.speeds("itex", "bfloat16")
    unet = UNetConfig(depth=3)
    for engine, dtype, name in (
        ("stock", "float32", "mine"), ("stock", "bfloat16", shipped.name), ("itex", "float32", shipped.name),
    ):  # fmt: skip
        job = Job(dataclasses.replace(unet, dtype=dtype), (32, 32, 32), engine=engine, threads=2)
        said = estimate(job, found)
        assert said.constants.name == name
        assert said == estimate(job, found.of(engine, dtype))


@pytest.mark.parametrize("changes", [{"cpu_model": "Another"}, {"isa": ("avx2",)}, {"cpu_quota": 1.0}])
def test_another_host_has_another_file(changes):
    here = host(cpu_model="Some CPU", isa=("avx512f",), cores=2, logical_cpus=2, cpu_quota=None)
    one = host_file(here, "stock")
    assert one == host_file(here, "stock")
    assert one != host_file(dataclasses.replace(here, **changes), "stock")


def test_every_operation_of_every_network_has_costs_in_every_file():
    """Groups come from `timing.group_of`, costs from a file: one without the other is a crash."""
    groups = {"every_op"}
    for network, norm, up, policy, engine in itertools.product(NETWORKS, NORMS, UPS, POLICIES, ENGINES):
        more = {"residual": up == "upsampling", "deep_supervision": norm == "batch", "dtype": "bfloat16"}
        unet = UNetConfig(filters=4, depth=3, network=network, norm=norm, up=up, policy=policy, **more)
        groups |= {group_of(op) for op in training_step(Job(unet, (16, 16, 16), batch=2, engine=engine)).ops}
    assert groups <= {*GROUPS, FUSED}


def test_a_missing_file_is_refused_and_a_number_of_threads_beyond_the_measured_one_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"none\.json must exist, got none"):
        load_constants(tmp_path / "none.json")
    measured = shipped_constants(Kernels())
    other = host(cpu_model="Another", kernels=Kernels("avx2"))
    assert measured.caveats() == measured.for_threads(8).for_threads(measured.threads).caveats() == []
    assert measured.basis().startswith(f"measured on {measured.cpu}")
    found = measured.for_threads(56)
    assert found.basis(other).startswith(f"assumed from measurements on {measured.cpu}; ")
    assert len(found.caveats(other)) == 2
    assert "56" in found.caveats(other)[1]
    with pytest.raises(ValueError, match="must know torch in float32"):
        measured.of("torch", "float32")


def changed(**changes):
    return lambda content: json.dumps({**content, **changes})


def with_costs(group, costs):
    """One group's costs replaced; None takes the group away."""

    def damage(content):
        groups = {**content["costs"]["stock"]["float32"], group: costs}
        return changed(costs={"stock": {"float32": {k: v for k, v in groups.items() if v is not None}}})(content)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: json.dumps(content)[:-40], "must be complete JSON"),
        (changed(schema=1), "must be complete JSON of schema 2, got schema 1"),
        (lambda content: json.dumps({k: v for k, v in content.items() if k != "costs"}), "must be complete"),
        (changed(costs={"stock": {"float32": {"conv": {"work": -1.0}}}}), "stock float32: conv work -1.0"),
        (with_costs("join", {}), "stock float32: no join cached"),
        (with_costs("norm", {"traffic": True}), "norm.traffic must be float, got true"),
        (changed(kernels={"isa": "avx512_core_amx", "l2_bytes": -5}), "kernels .*-5"),
        (changed(threads=0), "got threads 0"),
    ],
)
def test_a_damaged_file_is_refused(damage, message, own):
    own.write_text(damage(json.loads(own.read_text())))
    with pytest.raises(ValueError, match=message) as error:
        load_constants(own)
    assert str(own) in str(error.value)
