"""Constants of hosts: which are found, how they are scaled, and which files are refused."""

import dataclasses
import json

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

HOST = dataclasses.replace(
    read_host(),
    cpu_model="Some CPU",
    isa=("avx512f",),
    cores=2,
    logical_cpus=2,
    cpu_quota=None,
    l2_bytes=3 * 2**20,
)


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_there_are_shipped_constants_for_every_instruction_set_and_each_has_its_origin(name):
    constants = load_constants(name)
    for field in ("costs", "baseline_bytes", "op_bytes", "saturating_threads"):
        assert constants.origins[field].startswith(("measured: ", "assumed: "))
    assert shipped_constants("") == shipped_constants("avx2")


@pytest.mark.usefixtures("needs_native")
@pytest.mark.parametrize("measured", [False, True])
def test_scratch_is_that_of_the_host_s_own_cache_and_of_its_shipped_one_where_it_is_not_known(
    measured,
):
    if measured:
        path = host_file(HOST)
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(like_shipped(HOST)))
        assert load_constants(path).l2_bytes == 3 * 2**20
    assert find_constants(HOST).l2_bytes == 3 * 2**20
    unknown = dataclasses.replace(HOST, cpu_model="Other CPU", l2_bytes=0)
    assert find_constants(unknown).l2_bytes == shipped_constants(HOST.instructions).l2_bytes


@pytest.mark.parametrize(
    "changes", [{"cpu_model": "Another"}, {"isa": ("avx2",)}, {"cpu_quota": 1.0}]
)
def test_another_host_has_another_file(changes):
    assert host_file(HOST) != host_file(dataclasses.replace(HOST, **changes))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("costs", "float32", "pass", "traffic"), -1.0, "a figure below 0, -1"),
        (("costs", "float32", "update"), {"traffic": 1e-9}, "no 'work'"),
        (("op_bytes",), {"stock": 1}, "no 'itex'"),
        (("threads",), 0, "threads or l2_bytes below 1"),
        *(
            (
                ("scales",),
                {"float32": {"scale": scale, "threads": 1, "date": "", "job": ""}},
                f"scale {scale} of 1 threads",
            )
            for scale in (0.1, 9.0)
        ),
    ],
)
def test_a_damaged_file_is_refused(place, value, message, tmp_path):
    content = json.loads((SHIPPED / "avx512.json").read_text())
    part = content
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as error:
        load_constants(path)
    assert str(path) in str(error.value)
