"""The doctor's report, its JSON, its exit codes; its warnings, and the lines about a process that
is set up."""

import dataclasses
import json
import os
import re

import pytest

from cpu3d.__main__ import main
from cpu3d.host import doctor
from cpu3d.host.doctor import host_checks, instruction_check
from cpu3d.host.self_test import Check
from cpu3d.host.thread_plan import THREADS, describe, read_topology, thread_plan, thread_plans
from models.native.library import NativeOperations
from tests.cpu3d.host.hosts import GIB, PAPER, QUOTA, SMALL, SNC4, XEON, masked
from tests.cpu3d.runs import run_command


@pytest.fixture
def tried(monkeypatch):
    """The self-test's results, made up."""
    results = []
    monkeypatch.setattr(
        doctor, "self_test", lambda engine: [*results, Check("engine", "ok", str(engine))]
    )
    monkeypatch.setattr(doctor, "versions", lambda: {"tensorflow": "2.15.1"})
    return results


@pytest.fixture
def checked(capsys, tried):
    """A function of words that runs the command: (exit code, topology, checks by their name)."""

    def run(*words):
        code = run_command(doctor, "--json", *words)
        content = json.loads(capsys.readouterr().out)
        return code, content["topology"], {check["name"]: check for check in content["checks"]}

    return run


# --- The command ---


def test_host_plan_and_checks_are_printed_and_a_failed_check_is_the_exit_code(
    capsys, monkeypatch, tried
):
    monkeypatch.setattr(doctor, "read_topology", lambda: PAPER)
    tried.append(Check("large tensor", "warn", "slow", "do something"))
    assert run_command(doctor, "--workers", "2") == 0
    tried.append(Check("large tensor", "fail", "wrong [bold]here[/bold]"))
    assert run_command(doctor) == 1
    text = capsys.readouterr().out
    for words in (
        "80 cores on 4 sockets",
        "plan of worker 1: CPUs 40-79,120-159",
        "plan of worker 3: CPUs 60-79,140-159",
        "-> do something",
        "[bold]here[/bold]",
    ):
        assert words in text


def test_nothing_is_tried_where_tensorflow_is_missing_or_nobody_wants_it(monkeypatch, checked):
    code, topology, checks = checked("--no-self-test")
    assert (code, "engine" in checks) == (0, False)
    assert len(topology["cpus"]) == read_topology().host.logical_cpus
    monkeypatch.setattr(doctor, "versions", dict)
    code, _, checks = checked()
    assert (code, checks["TensorFlow"]["state"], "engine" in checks) == (1, "fail", False)


def test_limits_and_settings_of_this_process_are_warned_of(monkeypatch, checked):
    for name in THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "333")
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (64 * GIB, 64 * GIB))
    checks = checked("--engine", "stock")[2]
    assert checks["engine"]["result"] == "stock"
    assert checks["environment"]["result"] == "OMP_NUM_THREADS=333"
    assert {checks[name]["state"] for name in ("ulimit -v", "ITEX", "environment")} == {"warn"}


# --- What is warned of ---


def checks_of(topology, workers=1):
    """(state, result) by the name of a check."""
    checks = host_checks(topology.host, thread_plans(topology, workers))
    return {check.name: (check.state, check.result) for check in checks}


@pytest.mark.parametrize(
    ("native", "chosen", "state", "words"),
    [
        (NativeOperations("avx512", "amx"), "", "ok", "^amx of"),
        (NativeOperations("avx512", "avx512"), "", "warn", "^avx512 .* has amx; build them"),
        (NativeOperations("avx2", "avx2"), "avx2", "warn", "has amx; unset CPU3D_INSTRUCTION_SET"),
        (NativeOperations(why="GLIBC_2.99 is not found"), "", "warn", "GLIBC_2.99.* has amx; inst"),
    ],
)
def test_a_library_that_is_not_the_cpu_s_best_or_not_there_is_warned_of(
    monkeypatch, native, chosen, state, words
):
    here = dataclasses.replace(SNC4.host, is_here=True)
    monkeypatch.setattr("memory_estimator.host.native_operations", lambda: native)
    monkeypatch.setenv("CPU3D_INSTRUCTION_SET", chosen)
    check = instruction_check(here)
    assert check.state == state
    assert re.search(words, f"{check.result}; {check.advice}")


def test_an_instruction_set_that_is_none_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("CPU3D_INSTRUCTION_SET", "avx-512")
    for command in ("doctor", "calibrate"):
        assert main([command]) == 2
        printed = capsys.readouterr().err
        assert re.fullmatch("error: CPU3D_INSTRUCTION_SET must .*, got 'avx-512'.*\n", printed)


def test_memory_and_threads_are_those_of_each_worker():
    host = dataclasses.replace(SMALL.host, available_bytes=12 * GIB)
    topology = dataclasses.replace(SMALL, host=host)
    assert {state for state, _ in checks_of(topology).values()} == {"ok"}
    old = dataclasses.replace(SMALL, host=dataclasses.replace(host, isa=()))
    assert checks_of(old)["instruction set"][0] == "note", "without AVX2 there is nothing to do"
    checks = checks_of(topology, workers=2)
    assert checks["free memory"] == ("warn", "6.00 GiB for each of 2 workers")
    checks = checks_of(masked(XEON, *range(7)), workers=2)
    assert checks["workers"] == ("warn", "3 to 4 threads: all wait for the slowest")


# --- The lines about a process that is set up ---


def test_the_description_says_what_is_in_force(monkeypatch):
    host = QUOTA.host
    plan = thread_plan(host)
    # one that is no number of threads is not warned of
    own = {**plan.environment, "OMP_NUM_THREADS": "1", "KMP_BLOCKTIME": "200"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5}, raising=False)
    *lines, warning = describe(host, plan, "TensorFlow 2.15.1, oneDNN")
    assert lines[:3] == [
        "host: 64 cores of a cloud, 64 cores on 1 socket and 1 NUMA node, 64 CPUs, quota 7 CPUs, "
        "no fast bfloat16",
        "memory: 256.00 GiB, limit 32.00 GiB, 28.00 GiB free",
        "engine: TensorFlow 2.15.1, oneDNN",
    ]
    assert "=1, KMP_BLOCKTIME=200" in lines[3]
    assert lines[4:] == ["CPUs: 0-2,5"]
    assert warning.startswith("warning: OMP_NUM_THREADS must be 7")
