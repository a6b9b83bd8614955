"""A sweep of runs on this node; the runs are processes that write a result immediately, or wait for a signal."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from lab.problems import raises
from lab.waiting import PATIENCE_S

from trainspec_cli.core.errors import EXIT_DONE, MachineError, RecipeError, Stopped, WorkerError
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.reporter.console import RunConsole
from trainspec_cli.run.folder.event_types.events import EvalEvent
from trainspec_cli.run.folder.events import EventWriter
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.session.launching import sweep_runs
from trainspec_cli.session.launching.session import Session
from trainspec_cli.session.launching.sweep import read_sweep
from trainspec_cli.session.launching.sweep_runs import launch_sweep

ENDS = "import sys; sys.exit(0)"
WAITS = (
    "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(6)); print('up', flush=True); signal.pause()"
)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1..4", ["1", "2", "3", "4"]),
        ("0..1:5", ["0", "0.25", "0.5", "0.75", "1"]),
        ("1e-4..1e-2:x3", ["0.0001", "0.001", "0.01"]),
        ("2,8..10", ["2", "8", "9", "10"]),
        ("data/../x,..", ["data/../x", ".."]),
    ],
)
def test_a_range_is_its_values(text: str, values: list[str]) -> None:
    assert read_sweep(f"a.b={text}") == ("a.b", values)


@pytest.mark.parametrize("text", ["4..1", "0..1:1", "0..1.5", "0..1:x3", "0..1000000", "1..1"])
def test_what_is_no_rising_range_is_refused(text: str) -> None:
    with raises(RecipeError, "usage", "rising range of 2 to 1000"):
        read_sweep(f"a={text}")


class Node:
    """This node, on which runs are processes of another program."""

    def __init__(self, folder: Path):
        self.folder, self.program = folder, ENDS
        self.written: list[Session] = []
        self.environments: list[Mapping[str, str]] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.most_at_once = 0
        self.heldout: dict[float, float] = {}
        """Held-out loss by learning rate; a run without one fails."""
        self.probed_after: list[int] = []
        """The runs that had ended when this machine was measured."""

    def probe(self, plan: Plan, machine: Machine, console: Any) -> None:
        self.probed_after.append(sum(one.poll() is not None for one in self.processes))

    def write_down(self, session: Session) -> RunDir:
        self.written.append(session)
        return RunDir(self.folder / f"run{len(self.written)}")

    def spawn(
        self, run: RunDir, arguments: list[str], *, force: bool, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        lr = self.written[int(run.root.name.removeprefix("run")) - 1].plan.spec.optim.lr
        loss = self.heldout.get(lr)
        if loss is not None:
            writer = EventWriter(run.events(0), 0)
            writer.write(EvalEvent(step=4, heldout_loss=loss, heldout_bits_per_byte=None))
            writer.close()
            status = "stopped" if self.program == WAITS else "done"
            run.result_json.write_text(json.dumps({"status": status, "steps": 4, "final_loss": 9.0}))
        self.environments.append(environment)
        process = subprocess.Popen([sys.executable, "-S", "-c", self.program], stdout=subprocess.PIPE)
        self.processes.append(process)
        if self.program == WAITS:
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
        self.most_at_once = max(self.most_at_once, sum(one.poll() is None for one in self.processes))
        return process


@pytest.fixture
def node(here: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.chdir(tmp_path)
    node = Node(tmp_path)
    monkeypatch.setattr(sweep_runs, "write_down", node.write_down)
    monkeypatch.setattr(sweep_runs, "spawn_resume", node.spawn)
    monkeypatch.setattr(sweep_runs, "probe_after_run", node.probe)
    return node


def sweep(lrs: list[str], *arguments: str, at_once: int = 1, as_json: bool = True) -> int:
    swept = [("optim.lr", lrs)]
    return launch_sweep(["recipe=tiny", *arguments], swept, side_by_side=at_once, force=False, as_json=as_json)


def test_the_table_has_the_best_first_and_a_run_that_failed_last(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    node.heldout = {0.1: 3.0, 0.3: 2.0}
    assert sweep(["0.1", "0.2", "0.3"]) == WorkerError.exit_code
    captured = capsys.readouterr()
    results = json.loads(captured.out)
    assert [(one["values"]["optim.lr"], one["status"], one["heldout_loss"]) for one in results] == [
        ("0.3", "done", 2.0),
        ("0.1", "done", 3.0),
        ("0.2", "failed", None),
    ]
    assert f"  trainspec resume {node.folder}/run2\n" in captured.err
    assert node.most_at_once == 1, "one after another"
    node.heldout = {0.1: 3.0, 0.3: 2.0}
    assert sweep(["0.1", "0.3"], as_json=False) == EXIT_DONE
    heading, best, *_ = capsys.readouterr().out.splitlines()[-3:]
    assert heading.split() == ["optim.lr", "held", "out", "loss", "steps", "status", "run"]
    assert best.split() == ["0.3", "2.0000", "9.0000", "4", "done", f"{node.folder}/run5"]


def test_a_stop_ends_what_runs_and_begins_nothing_more(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.program, node.heldout = WAITS, {0.1: 3.0, 0.2: 2.0}
    timer = threading.Thread(target=lambda: _when(lambda: len(node.processes) == 2, signal.SIGINT))
    timer.start()
    assert sweep(["0.1", "0.2", "0.3"], "cluster.devices_per_node=1", at_once=2) == Stopped.exit_code
    timer.join()
    assert [process.returncode for process in node.processes] == [6, 6]
    captured = capsys.readouterr()
    assert [(one["values"]["optim.lr"], one["status"]) for one in json.loads(captured.out)] == [
        ("0.2", "stopped"),
        ("0.1", "stopped"),
        ("0.3", "not started"),
    ]
    assert captured.err.count("trainspec resume ") == 3


def test_the_machine_is_measured_once_and_after_all_runs(node: Node) -> None:
    node.heldout = {0.1: 3.0, 0.2: 2.0}
    assert sweep(["0.1", "0.2"], "cluster.devices_per_node=1", at_once=2) == EXIT_DONE
    assert node.probed_after == [2]
    assert [given["TRAINSPEC_PROBE"] for given in node.environments] == ["off", "off"]


def test_a_terminal_shows_one_table_in_which_each_run_has_a_row(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = io.StringIO()
    monkeypatch.setattr(
        sweep_runs, "make_console", lambda **_: RunConsole(file=drawn, force_terminal=True, width=200, height=20)
    )
    monkeypatch.setattr(sweep_runs, "REDRAWN_S", 0.0)
    node.heldout = {0.1: 3.0, 0.2: 2.0}
    assert sweep(["0.1", "0.2"]) == EXIT_DONE
    states = [
        tuple(line.split()[4] if len(line.split()) == 6 else "not started" for line in frame.splitlines()[1:3])
        for frame in re.sub(r"\x1b\[[\d?;]*[a-zA-Z]|\r", "", drawn.getvalue()).split("optim.lr  held out")[1:]
    ]
    assert list(dict.fromkeys(states)) == [
        ("running", "not started"),
        ("done", "running"),
        ("done", "done"),
    ]
    assert "1 of 2 runs " in drawn.getvalue()
    assert ": starts in" not in drawn.getvalue()


def test_off_a_terminal_each_run_that_ends_says_what_is_left(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.heldout = {0.1: 3.0, 0.2: 2.0}
    assert sweep(["0.1", "0.2"], as_json=False) == EXIT_DONE
    first, last = (line for line in capsys.readouterr().out.splitlines() if ": done, " in line)
    assert "1 of 2 runs " in first and "about" in first and "about" not in last


def test_runs_that_would_share_a_name_are_numbered(node: Node) -> None:
    """A sweep that was made before has its numbers already; a swept name that another run has is refused."""
    earlier = RunDir(node.folder / "runs" / "tiny" / "earlier")
    write_json(earlier.run_json, {"recipe": "tiny", "created_at": 1.0})
    write_json(earlier.plan_json, {"spec": {"train": {"max_steps": 20}, "run": {"name": "lrs-2"}}})
    node.heldout = {0.1: 3.0, 0.2: 2.0, 0.3: 1.0}
    assert sweep(["0.1", "0.2", "0.3"], "run.name=lrs") == EXIT_DONE
    assert [session.plan.spec.run.name for session in node.written] == ["lrs-1", "lrs-3", "lrs-4"]
    named = [("run.name", ["mine", "lrs-2"])]
    with pytest.raises(RecipeError) as refused:
        launch_sweep(["recipe=tiny"], named, side_by_side=1, force=False, as_json=True)
    assert [problem.code for problem in refused.value.problems] == ["name_taken"]


def test_an_error_of_the_sweep_ends_what_runs(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.program, node.heldout = WAITS, {0.1: 3.0, 0.2: 2.0}

    def spawn_one(*arguments: Any, **about: Any) -> subprocess.Popen[bytes]:
        if node.processes:
            raise OSError(12, "Cannot allocate memory")
        return node.spawn(*arguments, **about)

    monkeypatch.setattr(sweep_runs, "spawn_resume", spawn_one)
    with pytest.raises(OSError, match="Cannot allocate"):
        sweep(["0.1", "0.2"], "cluster.devices_per_node=1", at_once=2)
    (process,) = node.processes
    assert process.wait(PATIENCE_S) == 6


def test_the_run_with_most_devices_says_what_each_has(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.heldout, given = {0.1: 3.0}, []
    monkeypatch.setattr(
        sweep_runs._Training, "_gpus", lambda training, _: given.append(training._plan.devices_per_node) or {}
    )
    swept = [("cluster.devices_per_node", ["1", "2"])]
    assert launch_sweep(["recipe=tiny", "optim.lr=0.1"], swept, side_by_side=1, force=False, as_json=True) == EXIT_DONE
    assert given == [2, 2]


def _when(condition: Callable[[], bool], number: signal.Signals) -> None:
    while not condition():
        threading.Event().wait(0.01)
    os.kill(os.getpid(), number)


def test_side_by_side_each_run_sees_its_own_devices(node: Node, here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    plan: Any = type("Plan", (), {"device": "cuda", "devices_per_node": 2})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    training = sweep_runs._Training([], None, plan, 2)  # type: ignore[arg-type]
    assert [training._gpus(slot) for slot in (0, 1)] == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "6,7"},
    ]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert training._gpus(1) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    alone = sweep_runs._Training([], None, plan, 1)  # type: ignore[arg-type]
    assert alone._gpus(0) == {}


def test_what_does_not_fit_is_refused_before_anything_is_made(node: Node) -> None:
    with raises(MachineError, "no_room", "3 runs", "3 cores", "has 2", path="--at-once") as refused:
        sweep(["0.1", "0.2", "0.3"], "cluster.devices_per_node=1", at_once=3)
    assert refused.value.problems[0].hint.startswith("pass --at-once 2,")
    with raises(RecipeError, "usage", path="run.dir"):
        sweep(["0.1", "0.2"], "run.dir=mine")
    with raises(RecipeError, "several_hosts", path="cluster.num_nodes"):
        sweep(["0.1", "0.2"], "cluster.num_nodes=2")
    with pytest.raises(RecipeError, match="a number"):
        sweep(["0.1", "much"])
    assert node.written == []
