"""What a run learns of the machine's memory, for the launches that follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from lab.events import MEMORY, write_event

from trainspec_cli.core.errors import MachineError, Problem
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.kernels import KernelSpec
from trainspec_cli.recipe.results.plan import Plan, PlannedLayout
from trainspec_cli.recipe.results.tables import MemorySetting, Relief
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.memory_limits import LimitsWatch, forget_limits, list_limits, read_limits

EIGHT, FOUR, TWO = (MemorySetting(size, "none", "none") for size in (8, 4, 2))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def given(make_plan: Callable[..., Plan]) -> Plan:
    return make_plan()


def learn(folder: Path, plan: Plan, machine: Machine, *reliefs: Relief, at: float = 5.0) -> None:
    run = RunDir(folder)
    watch = LimitsWatch(run, plan, machine, lambda: at)
    for relief in reliefs:
        event = replace(MEMORY, layout=plan.layout.describe(), failed=relief.failed, taken=relief.taken, used_bytes=9)
        write_event(run.directives, event)
        watch.look()
    watch.look()


def test_what_a_run_learns_is_there_for_the_next(tmp_path: Path, given: Plan, machine: Machine) -> None:
    assert read_limits(given, machine).learned == ()
    learn(tmp_path / "run", given, machine, Relief(EIGHT, FOUR), Relief(FOUR, TWO))
    limits = read_limits(given, machine)
    assert limits.reliefs == [Relief(EIGHT, FOUR), Relief(FOUR, TWO)]
    first = limits.learned[0]
    assert (first.run, first.at, first.used_bytes, first.limit_bytes) == (str(tmp_path / "run"), 5.0, 9, None)
    learn(tmp_path / "later", given, machine, Relief(EIGHT, TWO), at=6.0)
    assert read_limits(given, machine).reliefs == [Relief(FOUR, TWO), Relief(EIGHT, TWO)], "once for each that failed"


def test_what_was_written_before_the_run_went_on_is_not_learned_again(
    tmp_path: Path, given: Plan, machine: Machine
) -> None:
    write_event(RunDir(tmp_path / "run").directives, replace(MEMORY, layout=given.layout.describe()))
    LimitsWatch(RunDir(tmp_path / "run"), given, machine).look()
    assert list_limits() == []


def test_a_shortage_after_a_change_of_layout_is_learned_of_that_layout(
    tmp_path: Path, given: Plan, machine: Machine
) -> None:
    change = PlannedLayout(9, replace(given.layout, dp_shard=1, tp=2), micro_batch_size=8, grad_accum_steps=1)
    run = RunDir(tmp_path / "run")
    watch = LimitsWatch(run, replace(given, changes=(change,)), machine)
    write_event(run.directives, replace(MEMORY, layout=change.layout.describe(), failed=EIGHT, taken=FOUR))
    watch.look()
    assert read_limits(given, machine).learned == ()
    assert read_limits(given.with_layout(change), machine).reliefs == [Relief(EIGHT, FOUR)]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MachineError(Problem("full", "no space"))])
def test_a_cache_that_cannot_be_written_is_reported_once_and_the_run_goes_on(
    tmp_path: Path, given: Plan, machine: Machine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr("trainspec_cli.run.memory_limits.write_json", refuse)
    run, reports = RunDir(tmp_path / "run"), list[str]()
    watch = LimitsWatch(run, given, machine)
    for _ in range(2):
        write_event(run.directives, replace(MEMORY, layout=given.layout.describe()))
        watch.look(reports.append)
    assert len(reports) == 1 and "no space" in reports[0].lower()


def test_it_holds_for_the_same_plan_on_the_same_machine(tmp_path: Path, given: Plan, machine: Machine) -> None:
    learn(tmp_path / "run", given, machine, Relief(EIGHT, FOUR))
    smaller = replace(given, micro_batch_size=1, recompute="full", kernels=KernelSpec(rope="halves"))
    assert read_limits(smaller, machine).reliefs, "whatever its setting is, and before its kernels are chosen"
    others = [
        (replace(given, layout=replace(given.layout, zero_stage=1, dp_shard=2, dp_replicate=1)), machine),
        (replace(given, spec=replace(given.spec, data=replace(given.spec.data, seq_len=4096))), machine),
        (given, replace(machine, memory_bytes=2 * machine.memory_bytes)),
    ]
    assert all(read_limits(*other).learned == () for other in others)


def test_injected_faults_teach_nothing(tmp_path: Path, given: Plan, machine: Machine) -> None:
    faulty = replace(given, spec=replace(given.spec, fault="oom(step=1,above=2)"))
    learn(tmp_path / "run", faulty, machine, Relief(EIGHT, FOUR))
    assert list_limits() == []


def test_it_is_listed_and_forgotten(tmp_path: Path, given: Plan, machine: Machine, cache: Path) -> None:
    learn(tmp_path / "run", given, machine, Relief(EIGHT, FOUR))
    write_json(cache / "machine" / "memory-0123.json", {"model": 7})
    ((path, limits),) = list_limits()
    assert limits == read_limits(given, machine)
    assert forget_limits() == 1
    assert not path.exists() and list_limits() == []
