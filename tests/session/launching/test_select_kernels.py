"""Kernels that a recipe leaves open are decided before the workers start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.kernels import KernelFigure, KernelTable
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.reporter.console import RunConsole
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan
from trainspec_cli.session.launching import session as module
from trainspec_cli.session.launching.session import select_kernels

TABLE = KernelTable("a chip", "fp32", "2.13", figures={"adamw": {"foreach": KernelFigure("chosen", ratio=0.5)}})


@pytest.fixture
def plan(make_run: Callable[..., RunDir]) -> Plan:
    made = read_plan(make_run())
    return replace(made, kernels=replace(made.kernels, adamw="auto"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is measured or read; a table is there after a measurement alone."""
    asked: list[str] = []

    def measure(plan: Plan, machine: Machine, begin: Callable[[], None]) -> KernelTable:
        begin()
        asked.append("measured")
        return TABLE

    def read(path: Path) -> Any:
        asked.append(f"read {path}")
        return TABLE if any(one.startswith("measured") for one in asked) else None

    monkeypatch.setattr(module, "measure_kernels", measure)
    monkeypatch.setattr(module, "read_table", read)
    monkeypatch.setattr(module, "table_path", lambda plan, machine: Path("table"))
    return asked


def test_where_nothing_is_left_open_nothing_is_measured(
    plan: Plan, here: Machine, console: RunConsole, shown: StringIO, asked: list[str]
) -> None:
    decided = replace(plan, kernels=replace(plan.kernels, adamw="foreach"))
    assert select_kernels(decided, here, console) == (decided, None)
    assert (asked, shown.getvalue()) == ([], "")


def test_a_launch_measures_and_says_what_it_chose(
    plan: Plan, here: Machine, console: RunConsole, shown: StringIO, asked: list[str]
) -> None:
    selected, table = select_kernels(plan, here, console)
    assert (selected.kernels.adamw, table) == ("foreach", TABLE)
    assert selected == replace(plan, kernels=selected.kernels)
    assert asked == ["measured"]
    first, second = shown.getvalue().splitlines()
    assert first.startswith("measuring kernels")
    assert second.startswith("kernels: ") and "foreach" in second


def test_a_rehearsal_measures_nothing(
    plan: Plan, here: Machine, console: RunConsole, shown: StringIO, asked: list[str]
) -> None:
    assert select_kernels(plan, here, console, may_measure=False) == (plan, None)
    assert asked == ["read table"]
    assert shown.getvalue().startswith("kernels: not measured")
    select_kernels(plan, here, console)
    assert select_kernels(plan, here, console, may_measure=False)[0].kernels.adamw == "foreach"
