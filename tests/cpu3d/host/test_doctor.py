"""The doctor's report, its JSON, its exit codes; its warnings, and the lines about a process that
is set up."""

import dataclasses
import json
import os
import re

import pytest

from cpu3d.__main__ import main
from cpu3d.errors import InputError
from cpu3d.host import doctor
from cpu3d.host.doctor import host_checks
from cpu3d.host.self_test import Check
from cpu3d.host.thread_plan import (
    THREADS,
    default_workers,
    describe,
    read_topology,
    thread_plan,
    thread_plans,
)
from models.native.library import NativeOperations
from tests.cpu3d.host.hosts import GIB, PAPER, QUOTA, SMALL, SNC4, XEON, masked
from tests.cpu3d.runs import run_command


def run(*words):
    return run_command(doctor, *words)


@pytest.fixture
def tried(monkeypatch):
    """The self-test's results, made up."""
    results = [Check("engine", "ok", "TensorFlow, oneDNN")]
    monkeypatch.setattr(doctor, "self_test", lambda engine: iter(results))
    monkeypatch.setattr(doctor, "versions", lambda: {"tensorflow": "2.15.1"})
    return results


def printed_json(capsys, *words):
    """(exit code, JSON) of a run."""
    code = run("--json", *words)
    return code, json.loads(capsys.readouterr().out)


# --- The command ---


def test_the_host_and_its_plan_are_printed(capsys, monkeypatch, tried):
    monkeypatch.setattr(doctor, "read_topology", lambda: PAPER)
    assert run("--workers", "2") == 0
    text = capsys.readouterr().out
    for words in ("80 cores on 4 sockets", "plan of worker 1: CPUs 40-79,120-159"):
        assert words in text
    with pytest.raises(InputError, match=" 1 or 2 or 4 or 8"):
        run("--workers", "3")


def test_a_failed_check_is_the_exit_code_and_a_warning_is_not(capsys, monkeypatch, tried):
    tried.append(Check("large tensor", "warn", "slow", "do something"))
    assert run() == 0
    tried.append(Check("large tensor", "fail", "wrong [bold]here[/bold]", "do something"))
    monkeypatch.setenv("COLUMNS", "120")
    capsys.readouterr()
    assert run() == 1
    assert "wrong [bold]here[/bold]" in capsys.readouterr().out


def test_nothing_is_tried_where_tensorflow_is_missing_or_nobody_wants_it(
    capsys, monkeypatch, tried
):
    code, content = printed_json(capsys, "--no-self-test")
    assert (code, content["checks"][-1]["name"]) == (0, "TensorFlow")
    assert len(content["topology"]["cpus"]) == read_topology().host.logical_cpus
    monkeypatch.setattr(doctor, "versions", dict)
    code, content = printed_json(capsys)
    last = content["checks"][-1]
    assert (code, last["name"], last["state"]) == (1, "TensorFlow", "fail")


def test_limits_and_settings_of_this_process_are_warned_of(capsys, monkeypatch, tried):
    for name in THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "333")
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (64 * GIB, 64 * GIB))
    checks = {check["name"]: check for check in printed_json(capsys, "--no-self-test")[1]["checks"]}
    assert "OMP_NUM_THREADS=333" in checks["environment"]["result"]
    assert {checks[name]["state"] for name in ("ulimit -v", "ITEX", "environment")} == {"warn"}


# --- What is warned of ---


def checks_of(topology, workers=None):
    plans = thread_plans(topology, workers or default_workers(topology))
    return {check.name: check for check in host_checks(topology, plans)}


@pytest.mark.parametrize(
    ("topology", "warned"),
    [
        *((host, set()) for host in (SMALL, PAPER, SNC4)),
        (XEON, {"swap"}),
        (QUOTA, {"CPU quota", "memory limit"}),
    ],
)
def test_hosts_are_warned_of_what_they_lack_and_told_what_to_do(topology, warned):
    checks = checks_of(topology).values()
    assert {check.name for check in checks if check.state == "warn"} == warned
    assert {check.name for check in checks if check.advice} == warned


@pytest.mark.parametrize(
    ("native", "state", "word"),
    [
        (NativeOperations("avx512", "amx"), "ok", "amx "),
        (NativeOperations("avx512", "avx512"), "warn", "avx512 "),
        (NativeOperations(why="GLIBC_2.99 is not found"), "warn", "GLIBC_2.99"),
    ],
)
def test_a_library_that_is_not_the_cpu_s_best_or_not_there_is_warned_of(
    monkeypatch, native, state, word
):
    here = dataclasses.replace(SNC4, host=dataclasses.replace(SNC4.host, is_here=True))
    monkeypatch.setattr("memory_estimator.host.native_operations", lambda: native)
    check = checks_of(here)["instruction set"]
    assert (check.state, bool(check.advice)) == (state, state == "warn")
    assert word in check.result
    assert "the CPU has amx" in check.result


def test_an_instruction_set_that_is_none_is_refused_before_anything_is_computed(
    phantom_store, monkeypatch, capsys, tmp_path
):
    monkeypatch.setenv("CPU3D_INSTRUCTION_SET", "avx-512")
    train = ["train", "--store", str(phantom_store.folder), "--run", str(tmp_path / "run")]
    for words in (["doctor"], ["calibrate"], train):
        assert main(words) == 2
        assert re.fullmatch(
            "error: CPU3D_INSTRUCTION_SET must .*, got 'avx-512'.*\n", capsys.readouterr().err
        )
    assert not (tmp_path / "run").exists()


def test_memory_and_threads_are_those_of_each_worker():
    host = dataclasses.replace(SMALL.host, available_bytes=12 * GIB)
    topology = dataclasses.replace(SMALL, host=host)
    assert checks_of(topology)["free memory"].state == "ok"
    check = checks_of(topology, workers=2)["free memory"]
    assert (check.state, "6.00 GiB" in check.result) == ("warn", True)
    check = checks_of(masked(XEON, *range(7)), workers=2)["workers"]
    assert (check.state, "3 to 4" in check.result) == ("warn", True)


# --- The lines about a process that is set up ---


def test_the_description_says_what_is_in_force(monkeypatch):
    host = dataclasses.replace(XEON.host, cpu_quota=7.0)
    plan = thread_plan(host)
    for name, value in {**plan.environment, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KMP_BLOCKTIME", "200")  # no number of threads, so not warned of
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5}, raising=False)
    *lines, warning = describe(host, plan, "TensorFlow 2.15.1, oneDNN")
    for words in ("quota 7 CPUs", "TensorFlow 2.15.1", "=1, KMP_BLOCKTIME=200", "CPUs: 0-2,5"):
        assert words in "\n".join(lines)
    assert "warning" not in "".join(lines)
    assert warning.startswith("warning: OMP_NUM_THREADS must be 7")
