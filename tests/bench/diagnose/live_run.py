"""A run of a case while it goes on: its processes on each node, its steps, and its end."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from lab.hosts import Hosts

from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir

from .cases import Case

INSIDE = Path(__file__).parent / "inside"
PORT = 29500
POLL_S = 0.05
WARM_STEPS, RECENT_STEPS = 4, 10
STARTING_NICENESS = 10
"""A run that starts leaves the processors to the other jobs' runs, which are measured."""


class RunEndedError(RuntimeError):
    """The run ended, or made no step for too long, before the bench was done with it."""


@dataclass(frozen=True)
class Used:
    """What ranks and cables had done when `step` was done."""

    step: int
    processor_s: list[float]
    """Of each rank."""
    cable_bytes: list[int]
    """Of each node; empty where there is one."""


class LiveRun:
    def __init__(self, case: Case, given: Sequence[str], place: Path):
        self.case, self.place = case, place
        self.folder = RunDir(place / "run")
        self.hosts = Hosts(case.nodes) if case.nodes > 1 else None
        (place / "orders").mkdir(parents=True)
        self._outputs = [(place / f"node{node}.log").open("w") for node in range(case.nodes)]
        self._launchers = [self._launch(node, given) for node in range(case.nodes)]

    def _launch(self, node: int, given: Sequence[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "trainspec_cli", "launch", *given, f"run.dir={self.folder.root}"]
        if self.hosts:
            endpoint = f"{Hosts.address(1)}:{PORT}"
            several = ("--nnodes", str(self.case.nodes), "--node-rank", str(node), "--rdzv-endpoint", endpoint)
            command = [*self.hosts.inside(node + 1), *command, *several]
        inherited = os.environ.get("PYTHONPATH", "")
        own = {"TRAINSPEC_BENCH_ORDERS": str(self.place / "orders"), "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **own, "PYTHONPATH": f"{INSIDE}{os.pathsep}{inherited}"}
        output = self._outputs[node]
        started = subprocess.Popen(command, env=environment, cwd=self.place, stdout=output, stderr=subprocess.STDOUT)
        os.setpriority(os.PRIO_PROCESS, started.pid, STARTING_NICENESS)
        return started

    def start_is_over(self) -> None:
        """Give all threads of the run the priority that the bench itself has."""
        for process in self._family():
            for thread in process.threads():
                with contextlib.suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, thread.id, os.getpriority(os.PRIO_PROCESS, 0))

    def steps(self) -> list[dict[str, Any]]:
        events = self.folder.events(0)
        return [event for event in read_events(events) if event["type"] == "step"] if events.exists() else []

    def step(self) -> int:
        """Return the last step that rank 0 has written, 0 where there is none."""
        steps = self.steps()
        return int(steps[-1]["step"]) if steps else 0

    def recent_step_s(self) -> float:
        """Return what a step takes on this machine now; before the first ones, what its passes sleep."""
        times_s = [event["step_time_s"] for event in self.steps()[WARM_STEPS:]]
        return statistics.median(times_s[-RECENT_STEPS:]) if times_s else self.case.step_s

    def note_use(self) -> None:
        """Begin to measure what a step takes of processors and cables."""
        self._noted = self._used()

    def processor_step_s(self, rank: int) -> float:
        """Return the processor time that a rank has taken for a step since `note_use`."""
        noted, now = self._noted, self._used()
        return (now.processor_s[rank] - noted.processor_s[rank]) / (now.step - noted.step)

    def step_bytes(self, node: int) -> float:
        """Return the bytes that a node's cable has carried in a step since `note_use`, in its busier direction."""
        noted, now = self._noted, self._used()
        return (now.cable_bytes[node] - noted.cable_bytes[node]) / (now.step - noted.step)

    def _used(self) -> Used:
        times = [self.worker(rank).cpu_times() for rank in range(self.case.ranks)]
        passed = [self.hosts.passed_bytes(node + 1) for node in range(self.case.nodes)] if self.hosts else []
        return Used(self.step(), [used.user + used.system for used in times], passed)

    def await_step(self, step: int, timeout_s: float) -> None:
        """Wait until `step` is done. Raises RunEndedError where the run has ended, or it takes too long."""
        deadline = time.monotonic() + timeout_s
        while self.step() < step:
            if time.monotonic() > deadline or any(launcher.poll() is not None for launcher in self._launchers):
                raise RunEndedError(f"step {step} was not reached: {self._tail()}")
            time.sleep(POLL_S)

    def worker(self, rank: int) -> psutil.Process:
        (start, *_) = (event for event in read_events(self.folder.events(rank)) if event["type"] == "start")
        return psutil.Process(start["pid"])

    def order(self, rank: int, kind: str, strength: float) -> None:
        """Have something done within a rank (see `inside/sitecustomize.py`)."""
        path = self.place / "orders" / f"rank{rank}.json"
        orders = json.loads(path.read_text()) if path.exists() else []
        written = path.with_suffix(".new")
        order = {"kind": kind, "strength": strength, "step_s": self.recent_step_s()}
        written.write_text(json.dumps([*orders, order]))
        written.rename(path)

    def processor_s(self) -> float:
        """Return the processor time of all that the run has started and that lives, or has been waited for."""
        times = [process.cpu_times() for process in self._family()]
        return sum(used.user + used.system + used.children_user + used.children_system for used in times)

    def _family(self) -> list[psutil.Process]:
        """Return every process of the run: all of them descend from the launchers."""
        launchers = [psutil.Process(launcher.pid) for launcher in self._launchers if launcher.poll() is None]
        return [*launchers, *(child for process in launchers for child in process.children(recursive=True))]

    def end(self) -> None:
        """Kill every process of the run."""
        for process in self._family():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        for launcher in self._launchers:
            launcher.wait()
        for output in self._outputs:
            output.close()
        if self.hosts:
            self.hosts.remove()

    def _tail(self) -> str:
        return " | ".join((self.place / f"node{node}.log").read_text()[-600:] for node in range(self.case.nodes))
