"""The agents of a run's nodes as Ray actors, and what Ray reports about their machines."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from trainspec_cli.run.backend.nodes.agent import run_agent
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.job import Job
from trainspec_cli.wings.ray.cluster import Bundle, alive, locate

LOOK_S = 0.2
TABLE_S = 1.0
"""Interval at which Ray's table of machines is read."""
RETRY_S = 1.0


class AgentActor:
    """The process that holds a node's resources, and runs its agents one after the other. Agents run in a thread,
    because only the supervisor acts on signals."""

    def serve(self, root: str, generation: int, number: int) -> int:
        """Take part in one generation; return the agent's exit code."""
        return run_agent(RunDir(Path(root)), generation, number)


class Crew:
    """The agents of all places. It implements `Agents` for one generation after the other. A thread talks to Ray,
    because Ray's head may hang without the run's nodes being affected."""

    def __init__(self, places: Sequence[Bundle]):
        self._places = places
        node: Any = ray.remote(AgentActor)
        forever = {"max_restarts": -1, "max_concurrency": 2}
        self._nodes = [node.options(**forever, **place.options).remote() for place in places]
        self._lock = threading.Lock()
        self._losses: list[tuple[int, str]] = []
        self._start: tuple[str, int] | None = None
        self._serving: dict[int, Any] = {}
        """The running call of each node's agent."""
        self._where: dict[int, str] = {}
        """The id of the machine on which the node's agent runs; empty if it is dead and the call has yet to fail."""
        self._waits_until: dict[int, float] = {}
        threading.Thread(target=self._watch, name="ray", daemon=True).start()

    def open(self, job: Job, generation: int) -> Crew:
        """Start the agents of a generation."""
        with self._lock:
            self._start = (str(job.root), generation)
            self._losses.clear()
            self._where.clear()
            self._serving.clear()
            self._waits_until = dict.fromkeys(job.nodes, 0.0)
        return self

    # Agents

    def poll(self) -> None:
        return None

    def take_losses(self) -> list[tuple[int, str]]:
        with self._lock:
            losses = self._losses
            self._losses = []
        return losses

    def end(self, *, in_order: bool, is_fenced: bool) -> None:
        """The hub has ended the agents, or they notice that it is gone. Their actors stay for the next generation."""
        with self._lock:
            self._start = None
            self._waits_until.clear()

    # The thread

    def _watch(self) -> None:
        looked_s = 0.0
        while True:
            time.sleep(LOOK_S)
            try:
                table = None
                if time.monotonic() - looked_s > TABLE_S:
                    table = set(alive()), locate(self._places)
                    looked_s = time.monotonic()
                with self._lock:
                    if self._start is not None:
                        self._attend(*self._start, table)
            except RayError:  # the head is not reachable at the moment
                time.sleep(RETRY_S)

    def _attend(self, root: str, generation: int, table: tuple[set[str], list[str]] | None) -> None:
        """Start agents where none runs, and note which ones have failed."""
        now_s = time.monotonic()
        for number, until_s in self._waits_until.items():
            call = self._serving.get(number)
            if call is None:
                if now_s >= until_s:
                    self._serving[number] = self._nodes[number].serve.remote(root, generation, number)
                continue
            if table:
                machines, places = table
                where = self._where.get(number)
                if where is None and (where := places[number]):
                    self._where[number] = where
                if where and where not in machines:
                    # The call fails by itself. Another one would start a second agent on the node's next machine.
                    self._losses.append((number, "is dead, as Ray reports"))
                    self._where[number] = ""
            if not ray.wait([call], timeout=0)[0]:
                continue
            try:
                ray.get(call)
                self._waits_until[number] = float("inf")  # its end is known to the hub
                del self._serving[number]
            except RayActorError:
                # If the agent had joined, the hub knows. If not, its process is a new one that Ray is still starting,
                # and the node is not lost.
                self._where.pop(number, None)
                self._restart(number, now_s)
            except RayTaskError as error:
                self._losses.append((number, f"cannot run its agent: {error.cause}"))
                self._waits_until[number] = float("inf")
                del self._serving[number]

    def _restart(self, number: int, now_s: float) -> None:
        del self._serving[number]
        self._waits_until[number] = now_s + RETRY_S
