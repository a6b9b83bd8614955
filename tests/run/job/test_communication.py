"""What a blueprint leaves in the run folder and the environment."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.results.blueprint import Blueprint, Setting, TunerRow
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.folder.generations import GenerationRecord
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.job import build_node_job
from trainspec_cli.run.job.machine import (
    communication_environment,
    describe_communication,
    write_communication,
)

SETTING = Setting("NCCL_CROSS_NIC", "0", "rails have switches of their own", "user guide")
ROWS = (
    TunerRow("allreduce", 0, 65536, "tree", 4, 32, "a tree is faster"),
    TunerRow("allreduce", 0, 4294967295, "ring", -1, -1, "all else"),
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    for name in ("NCCL_CROSS_NIC", "NCCL_TUNER_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    return RunDir(tmp_path)


@pytest.fixture
def plan(make_plan: Callable[..., Plan]) -> Plan:
    blueprint = Blueprint("rails", (), ("dp",), (), 1.0, 1.0, (), settings=(SETTING,), tuner=ROWS)
    return replace(make_plan(), blueprint=blueprint)


def with_tuner(plan: Plan) -> Plan:
    fabric = replace(plan.spec.cluster.fabric, nccl_tuner=True)
    return replace(plan, spec=replace(plan.spec, cluster=replace(plan.spec.cluster, fabric=fabric)))


def test_a_plan_without_a_blueprint_sets_and_writes_nothing(make_plan: Callable[..., Plan], run: RunDir) -> None:
    write_communication(make_plan(), run)
    assert communication_environment(make_plan(), run) == {}
    assert list(run.root.iterdir()) == []


def test_where_nothing_is_set_the_reason_is_written(plan: Plan, run: RunDir) -> None:
    assert plan.blueprint is not None
    bare = replace(plan, blueprint=replace(plan.blueprint, settings=(), tuner=()), device="cuda", num_nodes=2)
    write_communication(bare, run)
    assert communication_environment(bare, run) == {}
    assert "cluster.fabric.nic_wiring" in run.nccl_env.read_text()
    assert describe_communication(replace(bare, num_nodes=1), run) == []
    assert describe_communication(replace(bare, device="cpu"), run) == []


def test_what_is_set_is_written_with_its_reason_and_source(plan: Plan, run: RunDir) -> None:
    write_communication(plan, run)
    assert communication_environment(plan, run) == {"NCCL_CROSS_NIC": "0"}
    reason = "# rails have switches of their own (user guide)\nNCCL_CROSS_NIC=0\n"
    assert run.nccl_env.read_text().endswith(reason)


def test_what_the_user_has_set_stays(plan: Plan, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_CROSS_NIC", "2")
    assert communication_environment(plan, run) == {}


def test_the_tuners_table_has_the_plugins_ten_columns(plan: Plan, run: RunDir) -> None:
    write_communication(plan, run)
    lines = run.nccl_tuner_csv.read_text().splitlines()
    rows = list(csv.reader(line for line in lines if not line.startswith("#")))
    assert rows == [
        ["allreduce", "0", "65536", "tree", "simple", "-1", "4", "32", "-1", "-1"],
        ["allreduce", "0", "4294967295", "ring", "simple", "-1", "-1", "-1", "-1", "-1"],
    ]
    assert "# a tree is faster" in lines


def test_workers_are_told_of_the_table_only_where_that_is_wanted(plan: Plan, run: RunDir) -> None:
    found = communication_environment(with_tuner(plan), run)
    assert found == {"NCCL_CROSS_NIC": "0", "NCCL_TUNER_CONFIG_FILE": str(run.nccl_tuner_csv)}


def test_the_workers_of_a_node_get_them(plan: Plan, run: RunDir, machine: Machine) -> None:
    ways = {"at": 0.0, "host": "here", "head": "localhost", "hub_port": 1, "rendezvous": {}, "num_nodes": 2}
    record = GenerationRecord(1, **ways, launch_id="id", logs=str(run.logs), worker=("-m", "w"), examine=())  # type: ignore[arg-type]
    assert build_node_job(plan, run.root, machine, 1, record).environment["NCCL_CROSS_NIC"] == "0"
    without = replace(plan, blueprint=None)
    assert "NCCL_CROSS_NIC" not in build_node_job(without, run.root, machine, 1, record).environment
