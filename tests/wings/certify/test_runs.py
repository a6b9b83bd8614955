"""The jobs of a certification: their requests, and the report of a failed one; no job is started."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainspec_cli.core.errors import MachineError, Problem
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.tools import CertifyRequest, CertifyRunResult, TrainedSteps
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.wings.certify import runs
from trainspec_cli.wings.certify.cases import Case
from trainspec_cli.wings.certify.runs import Run, gradient_errors, loss_error, measure

CPU = Machine("box", 2, 2**34)
ONE, TWO, CUT = Run(Case("dense")), Run(Case("dense", Layout(dp_shard=2))), Run(Case("dense", Layout(tp=2)))
TRAINED = CertifyRunResult(TrainedSteps((2.0,), 1.0, "ab"), None)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[CertifyRequest]:
    """Collect the requests of all jobs, and write a result for each of their runs."""
    requests: list[CertifyRequest] = []

    def run_tool(tool: Any, request: CertifyRequest, where: Any, *, on_tick: Callable[[], None]) -> None:
        requests.append(request)
        on_tick()
        for name in request.runs:
            write_json(Path(request.folder) / name / "result.json", to_plain(TRAINED))

    monkeypatch.setattr(runs, "run_tool", run_tool)
    return requests


def test_each_number_of_processes_is_one_job_and_each_run_is_made_once(
    tmp_path: Path, asked: list[CertifyRequest]
) -> None:
    done: list[int] = []
    found = measure([ONE, TWO, CUT, TWO], tmp_path, CPU, done.append)
    assert {frozenset(request.runs) for request in asked} == {frozenset({ONE.name}), frozenset({TWO.name, CUT.name})}
    assert len(asked) == 2
    assert {request.folder for request in asked} == {str(tmp_path.absolute())}
    assert asked[0].runs | asked[1].runs == {run.name: run.request("cpu") for run in (ONE, TWO, CUT)}
    assert set(found) == {ONE, TWO, CUT}
    assert {run: measured.folder for run, measured in found.items()} == {run: tmp_path / run.name for run in found}
    assert found[CUT].losses == [2.0] and found[CUT].result == TRAINED
    assert done == sorted(done) and done[0] == 0 and done[-1] == 3


def test_finished_runs_are_not_repeated(tmp_path: Path, asked: list[CertifyRequest]) -> None:
    measure([ONE, TWO], tmp_path, CPU, lambda done: None)
    (tmp_path / TWO.name / "result.json").unlink()
    (tmp_path / TWO.name / "run").mkdir()
    asked.clear()
    done: list[int] = []
    found = measure([ONE, TWO, CUT], tmp_path, CPU, done.append)
    assert [name for request in asked for name in request.runs] == [TWO.name, CUT.name]
    assert not (tmp_path / TWO.name / "run").exists(), "an unfinished run is removed"
    assert done[0] == 1 and done[-1] == 3
    assert found[ONE].losses == [2.0]


def test_a_run_of_the_same_name_with_another_request_is_repeated(tmp_path: Path, asked: list[CertifyRequest]) -> None:
    measure([ONE], tmp_path, CPU, lambda done: None)
    asked.clear()
    other = replace(ONE, gradients=False)
    assert other.name == ONE.name
    measure([other], tmp_path, CPU, lambda done: None)
    assert [name for request in asked for name in request.runs] == [ONE.name]


def test_runs_use_the_gpus_of_the_machine(tmp_path: Path, asked: list[CertifyRequest]) -> None:
    measure([ONE], tmp_path, Machine("box", 2, 2**34, gpu_names=("NVIDIA H200",)), lambda done: None)
    assert asked[0].runs[ONE.name].plan.device == "cuda"


def test_a_failed_job_names_the_first_run_without_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_tool(tool: Any, request: CertifyRequest, where: Any, *, on_tick: Callable[[], None]) -> None:
        first, *_ = request.runs
        write_json(Path(request.folder) / first / "result.json", to_plain(TRAINED))
        raise MachineError(Problem("tool_failed", "it broke", hint="read the log"))

    monkeypatch.setattr(runs, "run_tool", run_tool)
    with pytest.raises(MachineError) as caught:
        measure([TWO, CUT], tmp_path, CPU, lambda done: None)
    (problem,) = caught.value.problems
    assert CUT.name in problem.message and "it broke" in problem.message
    assert problem.code == "tool_failed" and problem.hint.endswith(f"--only {CUT.name}")


def arrays(**gradients: list[float]) -> dict[str, np.ndarray]:
    return {name: np.array(values) for name, values in gradients.items()}


def test_an_error_is_relative_to_the_reference_and_infinite_without_one() -> None:
    reference = arrays(a=[3.0, 4.0], b=[0.0], c=[0.0])
    found = gradient_errors(arrays(a=[3.0, 5.0], b=[0.0], c=[1e-9]), reference)
    assert found == {"a": pytest.approx(0.2), "b": 0.0, "c": math.inf}
    assert gradient_errors(arrays(a=[math.nan, 4.0], b=[0.0], c=[0.0]), reference)["a"] == math.inf
    other = gradient_errors(arrays(b=[0.0], c=[0.0, 0.0], d=[1.0]), reference)
    assert (other["a"], other["c"], other["d"]) == (math.inf, math.inf, math.inf)


def test_the_worst_relative_error_of_a_loss_counts() -> None:
    assert loss_error([2.0, 3.0, 4.0], [2.0, 4.0, 5.0]) == pytest.approx(0.25)
    assert loss_error([-1.0], [-2.0]) == pytest.approx(0.5)
    assert loss_error([1.0, 2.0], [1.0]) == loss_error([1.0], [math.inf]) == loss_error([math.nan], [1.0]) == math.inf


def test_a_loss_that_was_not_finite_has_an_infinite_error(tmp_path: Path) -> None:
    found = CertifyRunResult(TrainedSteps((1.0, math.nan), None, ""), TrainedSteps((math.inf,), None, ""))
    write_json(tmp_path / "result.json", to_plain(found))
    measured = runs.Measured(tmp_path)
    assert loss_error(measured.losses, [1.0, 2.0]) == loss_error(measured.resumed_losses, [1.0]) == math.inf
