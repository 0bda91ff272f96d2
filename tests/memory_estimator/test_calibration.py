"""Constants of hosts: which are found, how they are scaled, and which files are refused."""

import dataclasses
import json
import re

import pytest

from memory_estimator.calibration import (
    SHIPPED,
    find_constants,
    host_file,
    like_shipped,
    load_constants,
    shipped_constants,
)
from memory_estimator.host import INSTRUCTION_SETS, read_host
from memory_estimator.job import Job
from models.config import DTYPES, UNetConfig


def host(**changes):
    return dataclasses.replace(read_host(), **changes)


JOB = Job(UNetConfig(dtype="float32"), (64, 64, 64), threads=2)


@pytest.fixture
def native(tmp_path):
    """A file with figures of its own."""
    path = tmp_path / "calibration.json"
    path.write_text(
        json.dumps({**json.loads((SHIPPED / "avx512.json").read_text()), "name": "mine"})
    )
    return path


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_there_are_shipped_constants_for_every_instruction_set_and_each_has_its_origin(name):
    constants = load_constants(name)
    for field in ("costs", "baseline_bytes", "op_bytes", "saturating_threads"):
        assert constants.origins[field].startswith(("measured: ", "assumed: "))
    assert constants.record
    assert constants.date
    assert constants == shipped_constants(name)
    assert shipped_constants("") == shipped_constants("avx2")


def scale(**changes):
    return {
        "scale": 2.0,
        "quiet": True,
        "threads": 2,
        "date": "2026-11-26",
        "job": "some",
        **changes,
    }


@pytest.mark.usefixtures("needs_native")
def test_what_was_measured_on_a_host_is_found_there_and_a_damaged_file_is_said():
    here = host(cpu_model="Some CPU")
    path = host_file(here)
    shipped = shipped_constants(here.instructions)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**like_shipped(here), "scales": {"bfloat16": scale()}}))
    native = find_constants(here)
    for dtype in DTYPES:  # one that was not measured has the scale of the other
        job = JOB.with_unet(dtype=dtype)
        for kind, speeds in shipped.speeds(job).items():
            assert native.speeds(job)[kind] == pytest.approx(
                {name: 2 * cost for name, cost in speeds.items()}
            )
    assert re.match("scaled by 2.00 .*here.* 2026-11-26, some$", native.basis(JOB, here))
    assert re.match(
        "scaled by 2.00 .*Some CPU.* 2026-11-26, some$", load_constants(path).basis(JOB)
    )
    path.write_text("{")
    damaged = find_constants(here)
    assert damaged.costs == shipped.costs
    assert str(path) in damaged.basis(JOB, here)


@pytest.mark.usefixtures("needs_native")
@pytest.mark.parametrize("measured", [False, True])
def test_scratch_is_that_of_the_host_s_own_cache_and_of_its_shipped_one_where_it_is_not_known(
    measured,
):
    known = host(cpu_model="Some CPU", l2_bytes=3 * 2**20)
    if measured:
        path = host_file(known)
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({**like_shipped(known), "scales": {"bfloat16": scale()}}))
        assert load_constants(path).l2_bytes == 3 * 2**20
    assert find_constants(known).l2_bytes == 3 * 2**20
    unknown = dataclasses.replace(known, cpu_model="Other CPU", l2_bytes=0)
    assert find_constants(unknown).l2_bytes == shipped_constants(known.instructions).l2_bytes


@pytest.mark.parametrize(
    "changes", [{"cpu_model": "Another"}, {"isa": ("avx2",)}, {"cpu_quota": 1.0}]
)
def test_another_host_has_another_file(changes):
    here = host(cpu_model="Some CPU", isa=("avx512f",), cores=2, logical_cpus=2, cpu_quota=None)
    path = host_file(here)
    assert path == host_file(here)
    assert path != host_file(dataclasses.replace(here, **changes))


def test_a_number_of_threads_beyond_the_measured_one_is_said():
    measured = dataclasses.replace(shipped_constants("avx512"), origin="measured")
    other = host(cpu_model="Another")
    assert re.match(f"measured .*{measured.cpu}.* {measured.date}$", measured.basis(JOB))
    basis = measured.basis(dataclasses.replace(JOB, threads=56), other)
    assert re.match(f"assumed .*{measured.cpu}.* 2 threads to 56 ", basis)


def test_work_divides_among_threads_and_traffic_up_to_a_number_of_them():
    constants = dataclasses.replace(shipped_constants("avx512"), saturating_threads=8)
    few, many = (constants.speeds(dataclasses.replace(JOB, threads=threads)) for threads in (2, 56))
    assert many["convolve"]["work"] == pytest.approx(few["convolve"]["work"] / 28)
    assert many["pass"]["traffic"] == pytest.approx(few["pass"]["traffic"] / 4)
    assert many["every_op"] == few["every_op"]


def changed(**changes):
    return lambda content: json.dumps({**content, **changes})


def with_costs(kind, costs):
    """One kind's costs replaced."""

    def damage(content):
        return changed(
            costs={**content["costs"], "float32": {**content["costs"]["float32"], kind: costs}}
        )(content)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (with_costs("pass", {"traffic": -1.0}), "float32: pass traffic -1.0"),
        (with_costs("update", {"traffic": 1e-9}), "float32: update work missing"),
        (changed(op_bytes={"stock": 1}), "op_bytes of itex missing"),
        (changed(threads=0), "got threads 0"),
        (changed(like="avx2", shipped="0"), "scales of other constants"),
        (changed(scales={"float32": scale(scale=9.0)}), "got scale 9.0"),
    ],
)
def test_a_damaged_file_is_refused(damage, message, native):
    native.write_text(damage(json.loads(native.read_text())))
    with pytest.raises(ValueError, match=message) as error:
        load_constants(native)
    assert str(native) in str(error.value)
