"""The doctor's report, its JSON, its exit codes. What it finds and tries is tested with `cpu3d.host`."""

import argparse
import importlib.util
import json

import pytest

from cpu3d.errors import InputError
from cpu3d.host import doctor
from cpu3d.host.checks import Check
from cpu3d.host.example_hosts import EXAMPLE_HOSTS, topology_of
from cpu3d.host.self_test import self_test
from cpu3d.host.topology import from_json, read_topology


def run(*words):
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return doctor.run(parser.parse_args(words))


@pytest.fixture
def tried(monkeypatch):
    """The self-test's results, made up."""
    results = [Check("engine", "ok", "TensorFlow, oneDNN")]
    monkeypatch.setattr(doctor, "self_test", lambda engine: iter(results))
    monkeypatch.setattr(doctor, "installed_versions", lambda: ("2.15.1", None))
    return results


@pytest.mark.parametrize("columns", ["80", "120"])
@pytest.mark.parametrize("name", EXAMPLE_HOSTS)
def test_another_host_s_plan_is_printed_in_full(name, columns, capsys, monkeypatch, tried):
    monkeypatch.setenv("COLUMNS", columns)
    assert run("--on-host", name) == 0
    said = capsys.readouterr().out
    assert "What this host has" in said
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= int(columns)
    assert "oneDNN" not in said.replace("TF_ENABLE_ONEDNN_OPTS", "").partition("Checks")[2]  # this host's engine


def test_the_hosts_are_listed(capsys):
    assert run("--on-host", "list") == 0
    said = capsys.readouterr().out
    assert all(name in said for name in EXAMPLE_HOSTS)


def test_workers_can_be_chosen(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert run("--on-host", "paper-4x20", "--workers", "2") == 0
    said = capsys.readouterr().out
    assert "What it would set for 2 workers" in said
    assert "0-39,80-119" in said
    assert "nodes 0-1 in turns" in said
    assert "KMP_BLOCKTIME=1" in said
    assert "CUDA_DEVICE_ORDER" not in said  # goes for every host alike, and is no tuning
    assert "uneven" not in said
    with pytest.raises(InputError, match="use 1, 2, 4 or 8"):
        run("--on-host", "paper-4x20", "--workers", "3")


def test_workers_that_are_not_alike_are_told_below_their_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    run("--on-host", "amx-2x60-snc4", "--workers", "16")
    assert "uneven: 7 to 8 threads each" in capsys.readouterr().out.partition("Checks")[0]


def test_the_json_of_one_host_is_planned_for_on_another(capsys, tmp_path, tried):
    assert run("--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert from_json(said["topology"], "here").cpus == read_topology().cpus
    assert {"ulimit -v", "memory.high"} <= {check["name"] for check in said["checks"]}
    assert said["checks"][-1] == {"name": "engine", "state": "ok", "found": "TensorFlow, oneDNN", "advice": ""}
    assert run("--on-host", "amx-2x60-snc4", "--json") == 0
    (tmp_path / "host.json").write_text(capsys.readouterr().out)
    assert run("--on-host", str(tmp_path / "host.json"), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert from_json(said["topology"], "there") == topology_of("amx-2x60-snc4")
    assert [plan["memory_policy"] for plan in said["plans"]] == ["interleaved"] * 2
    assert {check["name"] for check in said["checks"]}.isdisjoint({"TensorFlow", "engine", "ulimit -v"})


def test_a_failed_check_is_the_exit_code_and_its_words_are_printed_as_they_are(capsys, monkeypatch, tried):
    monkeypatch.setenv("COLUMNS", "120")
    tried.append(Check("large tensor", "fail", "wrong [bold]here[/bold]", "do something"))
    assert run() == 1
    said = capsys.readouterr().out
    assert "wrong [bold]here[/bold]" in said
    assert "-> do something" in said


def test_warnings_are_no_failure(tried):
    tried.append(Check("large tensor", "warn", "slow", "do something"))
    tried.append(Check("large tensor", "skipped", "no room"))
    assert run("--json") == 0


def test_nothing_is_tried_where_tensorflow_is_missing_or_nobody_wants_it(capsys, monkeypatch, tried):
    assert run("--no-self-test", "--json") == 0
    assert "engine" not in [check["name"] for check in json.loads(capsys.readouterr().out)["checks"]]
    monkeypatch.setattr(doctor, "installed_versions", lambda: (None, None))
    assert run("--json") == 1
    assert json.loads(capsys.readouterr().out)["checks"][-1]["name"] == "TensorFlow"


def test_settings_of_the_user_s_own_are_told(capsys, monkeypatch, tried):
    monkeypatch.setenv("OMP_NUM_THREADS", "333")
    run("--json", "--no-self-test")
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert "OMP_NUM_THREADS=333" in checks["environment"]["found"]


@pytest.mark.skipif(importlib.util.find_spec("intel_extension_for_tensorflow") is not None, reason="ITEX is installed")
def test_an_engine_that_is_not_installed_is_refused():
    with pytest.raises(InputError, match="engine must be installed, got itex"):
        run("--engine", "itex")


@pytest.mark.slow
def test_this_host_passes():
    found = list(self_test("auto"))
    assert [check.state in ("ok", "warn", "skipped") for check in found] == [True] * 3, found
