"""Engine tools: their result, how a failure is shown, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import psutil
import pytest
from lab.drawing import slow_after
from lab.problems import raises
from lab.waiting import wait_for

from trainspec_cli.core.errors import Interrupted, MachineError, RecipeError
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.kernels import KernelTrial, KernelTrials
from trainspec_cli.recipe.records import from_plain, to_plain
from trainspec_cli.recipe.results import tools as results
from trainspec_cli.recipe.results.doctor import NodeReport
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tools import SpeedRequest, SpeedResult
from trainspec_cli.run.tools import SPEED, TOOLS, Tool, one_process, run_tool, torchrun
from trainspec_cli.wings.certify.cases import Case
from trainspec_cli.wings.certify.runs import Run

STANDIN = str(Path(__file__).with_name("standin_tool.py"))
REQUEST = SpeedRequest("cpu", "fp32")


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def standin(mode: str, **changes: Any) -> Tool[SpeedRequest, SpeedResult]:
    return replace(SPEED, program=(STANDIN, mode), **changes)


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def test_a_result_comes_back_and_its_folder_was_for_this_user_alone(folders: Path) -> None:
    result = run_tool(standin("answer"), REQUEST)
    assert result == SpeedResult("fp32", None, None, 2, 1e12, float(0o700), 1)
    assert list(folders.glob("trainspec-*")) == []


@pytest.mark.slow
def test_under_torchrun_the_first_process_answers(
    folders: Path, make_plan: Callable[..., Plan], machine: Machine
) -> None:
    ticks: list[int] = []
    where = torchrun(make_plan(), machine)
    result = run_tool(standin("answer"), REQUEST, where, on_tick=lambda: ticks.append(1))
    assert result.devices == 2
    assert ticks
    assert list(folders.glob("trainspec-*")) == []


@pytest.mark.parametrize("processes", slow_after(1, [1, 2]))
def test_a_failure_shows_the_end_of_one_log(
    folders: Path, make_plan: Callable[..., Plan], machine: Machine, processes: int
) -> None:
    where = torchrun(make_plan(), machine) if processes > 1 else one_process()
    with pytest.raises(MachineError) as caught:
        run_tool(standin("fail", hint="cool it"), REQUEST, where)
    (problem,) = caught.value.problems
    assert (problem.code, problem.hint) == ("speed_failed", "cool it")
    first, *_, last = problem.message.splitlines()
    assert first.endswith(" failed")
    assert last == "ValueError: the chip is warm"
    assert problem.message.count(" is warm") == 1 + problem.message.count("raise ValueError")
    assert "line 99" in problem.message
    assert "line 80" not in problem.message
    assert list(folders.glob("trainspec-*")) == []


def test_a_tool_that_ends_without_a_result_has_failed(folders: Path) -> None:
    with pytest.raises(MachineError, match="ended without a result"):
        run_tool(standin("nothing"), REQUEST)
    assert list(folders.glob("trainspec-*")) == []


def test_a_folder_that_cannot_be_written_is_the_machines_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(MachineError, match="nowhere") as caught:
        run_tool(standin("answer"), REQUEST)
    assert "TMPDIR" in caught.value.problems[0].hint


def test_a_result_of_another_kind_is_refused(folders: Path) -> None:
    with pytest.raises(RecipeError, match="unknown key `colour`"):
        run_tool(standin("other"), REQUEST)


@pytest.mark.slow
def test_a_tool_that_takes_too_long_is_ended(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))
    with raises(MachineError, "speed_failed", "within 2 s"):
        run_tool(standin("hang", timeout_s=2.0), REQUEST)
    assert alive([int(pid) for pid in (tmp_path / "started").read_text().split()]) == []
    assert list(folders.glob("trainspec-*")) == []


def test_ctrl_c_leaves_nothing(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))

    def interrupt() -> None:
        wait_for((tmp_path / "started").is_file)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with raises(Interrupted, "interrupted"):
        run_tool(standin("hang"), REQUEST)
    thread.join()
    assert alive([int(pid) for pid in (tmp_path / "started").read_text().split()]) == []
    assert list(folders.glob("trainspec-*")) == []


def test_a_killed_caller_leaves_no_process(tmp_path: Path) -> None:
    code = (
        "from dataclasses import replace; from trainspec_cli.run.tools import SPEED, run_tool;"
        "from trainspec_cli.recipe.results.tools import SpeedRequest;"
        f"run_tool(replace(SPEED, program=({STANDIN!r}, 'hang')), SpeedRequest('cpu', 'fp32'))"
    )
    started = tmp_path / "started"
    environment = {**os.environ, "STARTED": str(started), "TMPDIR": str(tmp_path)}
    caller = subprocess.Popen([sys.executable, "-c", code], env=environment)
    wait_for(lambda: started.is_file() and started.read_text())
    caller.kill()
    caller.wait()
    wait_for(lambda: not alive([int(pid) for pid in started.read_text().split()]))


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_the_engine_answers_what_is_asked(tool: Tool[Any, Any]) -> None:
    """The types of both sides are the same."""
    hints = get_type_hints(import_module(f"trainspec_cli.engine.tools.{tool.name}").run)
    assert (hints["request"], hints["return"]) == (tool.request, tool.result)


def test_requests_and_results_pass_through_json() -> None:
    """A request with a plan in it, and results with tuples of dataclasses and losses that are not finite."""
    run = Run(Case("latent")).request("cpu")
    trained = results.TrainedSteps((1.0, None), None, "abc")
    trials = KernelTrials({"rope": ("2 x",)}, {"rope": {"torch": KernelTrial((1.0,), None, 1e-3)}})
    for value in (
        results.CertifyRequest("/tmp/x", {"a": run}),
        results.TraceRequest(run.plan, 3),
        results.CertifyRunResult(trained, None),
        results.KernelResult((trials, KernelTrials())),
        results.LinksResult((), (results.PairRate(("a", "b"), 1e9, (results.PingRate(4, 0.1, 40.0),)),)),
    ):
        assert round_trip(value) == value


def round_trip(value: Any) -> Any:
    return from_plain(type(value), json.loads(json_text(to_plain(value))))


def test_a_wrong_item_is_named_by_its_place() -> None:
    checks = [{"name": "disk", "status": "ok", "found": "9 GB"}, {"name": "clock", "status": "bad", "found": "late"}]
    with pytest.raises(RecipeError, match=r"`checks\.1\.status`.*'bad'"):
        from_plain(NodeReport, {"host": "a", "time": 0.0, "checks": checks})
