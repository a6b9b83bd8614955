"""Performance levels: the grades that the training spec states, and the figures of launched runs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from trainspec_cli.core.errors import MachineError
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.run.folder.event_types.events import StepEvent
from trainspec_cli.run.folder.events import EventWriter
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.machine import detect
from trainspec_cli.session.recipe.load import load_for_planning
from trainspec_cli.wings.certify import launched
from trainspec_cli.wings.certify.clauses import LEVELS, Levels, make_finding, read_clauses
from trainspec_cli.wings.certify.launched import Bench, measure_performance

CPU = Machine("box", cpu_cores=4, memory_bytes=2**34)


def bench(folder: Path, processes: int = 2) -> Bench:
    return Bench(folder, CPU, processes, ("recipe=tiny",), 8)


@pytest.mark.parametrize(
    ("levels", "value", "grade"),
    [
        *((Levels("ratio", (1.15, 1.3, 1.6)), *one) for one in ((1.0, "A"), (1.15, "A"), (1.2, "B"), (1.6, "C"))),
        (Levels("ratio", (1.15, 1.3, 1.6)), 1.61, "-"),
        *((Levels("x", (0.9, 0.75, 0.5), rises=True), *one) for one in ((1.1, "A"), (0.9, "A"), (0.8, "B"))),
        *((Levels("x", (0.9, 0.75, 0.5), rises=True), *one) for one in ((0.5, "C"), (0.4, "-"))),
    ],
)
def test_grades(levels: Levels, value: float, grade: str) -> None:
    assert levels.grade(value) == grade


@pytest.mark.clause("PERF-1", "PERF-2", "PERF-3", "PERF-4", "PERF-5")
@pytest.mark.parametrize("clause", LEVELS)
def test_the_bounds_are_those_of_the_training_spec(clause: str) -> None:
    text = read_clauses()[clause].text
    stated = re.search(r"grade A \D*([\d.]+)[^,]*, B \D*([\d.]+)[^,]*, C \D*(\d+(?:\.\d+)?)", text)
    assert stated is not None, text
    assert tuple(map(float, stated.groups())) == LEVELS[clause].bounds
    assert read_clauses()[clause].level == "SHOULD"


def write_steps(run: RunDir, step_s: float, tokens: int) -> None:
    """Write steps of one length, after slow ones that compile."""
    writer = EventWriter(run.events(0), 0)
    for step in range(1, 11):
        seconds = 9.0 if step <= 3 else step_s
        writer.write(StepEvent(step=step, loss=1.0, grad_norm=1.0, tokens=tokens, step_time_s=seconds, time_s={}, skipped=False))  # fmt: skip # noqa: E501
    writer.close()
    run.result_json.write_text("{}")


@pytest.mark.clause("PERF-2")
def test_weak_scaling_compares_all_processes_with_one_that_has_its_share(tmp_path: Path) -> None:
    """Runs that an earlier certification finished are not repeated."""
    runs = {name: RunDir(tmp_path / "performance" / name) for name in ("together", "alone")}
    for name, step_s, tokens in (("together", 0.25, 512), ("alone", 0.2, 256)):
        runs[name].events_folder.mkdir(parents=True)
        write_steps(runs[name], step_s, tokens)
    figures = launched._scaling(bench(tmp_path), runs["together"])
    assert figures["together_per_s"] == pytest.approx(2048)
    assert figures["alone_per_s"] == pytest.approx(1280)
    finding = make_finding("PERF-2", "2-processes", figures)
    assert (finding.grade, finding.passed) == ("B", True)
    assert finding.measured == pytest.approx(0.8)
    low = make_finding("PERF-2", "2-processes", {**figures, "together_per_s": 0.6 * 1280})
    assert (low.grade, low.passed) == ("-", False)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux binds processes to cores")
def test_one_process_gets_its_share_of_the_cores_for_the_block(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    with launched._on_cores(bench(tmp_path, processes=len(before))):
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


def test_nothing_is_launched_without_clauses(tmp_path: Path) -> None:
    assert measure_performance(bench(tmp_path), []) == []
    assert list(tmp_path.iterdir()) == []


def test_a_failed_launch_is_reported_with_its_last_lines_and_the_command(tmp_path: Path) -> None:
    with pytest.raises(MachineError) as error:
        launched.launch(bench(tmp_path), "odd", ["recipe=nowhere"])
    (problem,) = error.value.problems
    assert problem.code == "run_failed" and "nowhere" in problem.message
    assert problem.hint.endswith("trainspec launch recipe=nowhere")


def test_the_default_recipe_of_launches_is_valid() -> None:
    size = ("cluster.devices_per_node=2", f"train.max_steps={launched.STEPS}")
    killed = ("fault=kill(rank=1,step=30)", f"checkpoint.interval_steps={launched.SAVE_EVERY}")
    assert load_for_planning([*launched.RECIPE, *size, *launched.SHORT, *killed]).spec.train.max_steps == launched.STEPS


@pytest.mark.clause("PERF-1", "PERF-2", "PERF-3", "PERF-4", "PERF-5")
@pytest.mark.slow
def test_every_level_is_measured_by_real_runs(tmp_path: Path) -> None:
    machine = detect(look_for_gpus=False)
    found = measure_performance(Bench(tmp_path, machine, 2, ("recipe=tiny",), 8), list(LEVELS))
    assert [finding.clause for finding in found] == list(LEVELS)
    figures = {finding.clause: finding.figures for finding in found}
    assert figures["PERF-1"]["step_s"] > 0 and figures["PERF-1"]["planned_s"] > 0
    assert figures["PERF-4"]["kind"] == "restart" and figures["PERF-4"]["lost_steps"] == 6
    assert 0 < figures["PERF-5"]["slower_gb_per_s"] <= figures["PERF-5"]["write_gb_per_s"]
    result = json.loads((tmp_path / "performance/together/result.json").read_text())
    assert result["steps"] == launched.STEPS
