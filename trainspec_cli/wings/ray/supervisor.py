"""The supervisor of a run as a Ray actor, which Ray restarts on another of the run's nodes if its own is lost."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import ray

from trainspec_cli.core.errors import TrainspecError
from trainspec_cli.core.node import check_tree
from trainspec_cli.core.printable import Style, printing_safely
from trainspec_cli.reporter.console import make_console
from trainspec_cli.reporter.problems import render_problems
from trainspec_cli.run.backend.nodes.backend import Reach
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan_of_all_nodes, read_result
from trainspec_cli.run.job.folder import drop_claim, read_claim
from trainspec_cli.run.notify import Notify
from trainspec_cli.run.signals import StopRequests
from trainspec_cli.session.launching.nodes import MANAGED, STALE_S, exit_code_of
from trainspec_cli.session.launching.resume import prepare_unchanged
from trainspec_cli.session.launching.session import start
from trainspec_cli.wings.ray.cluster import Bundle, alive, locate, own_ip, release
from trainspec_cli.wings.ray.crew import Crew

READ_S = 20.0
"""Time in seconds for the launch command to read the run's end, before the supervisor and its nodes are released."""
CLAIM_S = 60.0
"""Time in seconds that the processes of a lost supervisor may take to end."""
LOOK_S = 0.5
EXIT_BUG = 1
Said = list[tuple[str, str]]
"""Texts with the name of their stream."""


class FetchedStream(io.TextIOBase):
    """A stream whose text the launch command fetches."""

    encoding = "utf-8"

    def __init__(self, said: Said, name: str):
        self._said = said
        self._name = name

    def write(self, text: str) -> int:
        self._said.append((self._name, text))
        return len(text)


class SupervisorActor:
    """Created by the launch command, and by Ray whenever its node was lost."""

    def __init__(
        self, root: str, places: Sequence[Bundle], generation: int, notify: str, force: bool, as_json: bool, cwd: str
    ):
        """`generation`: the newest one when the run was handed over. `cwd`: the folder in which the user typed the
        command."""
        self._run = RunDir(Path(root))
        self._places = places
        self._generation = generation
        self._notify = Notify(notify)
        self._force = force
        self._as_json = as_json
        self._requests = StopRequests()
        self._said: Said = []
        self._exit_code: int | None = None
        self._was_read = threading.Event()
        self._since = time.time()
        if Path(cwd).is_dir():
            os.chdir(cwd)
        # Ray hides the GPUs from an actor that takes none, but the supervisor describes its node.
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            del os.environ["CUDA_VISIBLE_DEVICES"]
        sys.stdout = FetchedStream(self._said, "stdout")
        sys.stderr = FetchedStream(self._said, "stderr")
        threading.Thread(target=self._supervise, name="supervisor").start()

    def tell(self, since: float, position: int, stops: int) -> tuple[float, int, Said, int | None]:
        """Return when this supervisor began, the end of its output and the output from `position` on, and the run's
        exit code if it has ended. `stops`: how often the command was asked to stop."""
        self._requests.count = max(self._requests.count, stops)
        code = self._exit_code  # read before the output, which is complete then
        begin = position if since == self._since else 0
        said = self._said[begin:]
        if code is not None:
            self._was_read.set()
        return self._since, begin + len(said), said, code

    def ask_to_stop(self) -> None:
        self._requests.add()

    def _supervise(self) -> None:
        with printing_safely():
            try:
                code = self._train()
            except TrainspecError as error:
                print(render_problems(error.problems, Style.of(sys.stderr), "error"), file=sys.stderr)
                code = error.exit_code
            except BaseException:
                traceback.print_exc(file=sys.stderr)
                code = EXIT_BUG
        self._exit_code = code
        self._was_read.wait(READ_S)
        time.sleep(LOOK_S)  # the answer is on its way
        me = ray.get_runtime_context().current_actor
        release(self._places)  # this also ends this process, which Ray would then restart
        ray.kill(me, no_restart=True)

    def _train(self) -> int:
        """Start or continue the run on the nodes that it has; return its exit code."""
        run = self._run
        check_tree(run.root)
        is_restarted = generations.newest(run) > self._generation
        if is_restarted and run.result_json.is_file():  # the run had ended when this process's predecessor was lost
            return exit_code_of(run, read_result(run))
        plan = read_plan_of_all_nodes(run)
        machines = alive()
        here = ray.get_runtime_context().get_node_id()
        where = locate(self._places)
        own = where.index(here)
        live = [own, *(number for number, machine in enumerate(where) if machine in machines and number != own)]
        away = [number for number in range(len(where)) if number not in live]
        console = make_console(as_json=self._as_json)
        if is_restarted:
            console.report(f"node {own}: continues the run, because its supervisor was lost")
        reach = Reach(
            own_ip(),
            MANAGED.start,
            return_timeout_s=plan.spec.run.join_timeout_s,
            nodes=(*live, *away),
            lost=tuple((number, "") for number in away[: max(0, plan.num_nodes - len(live))]) if is_restarted else (),
            open_agents=Crew(self._places).open,
        )
        unchanged_since_s = time.monotonic()
        deadline_s = unchanged_since_s + CLAIM_S
        signs = read_claim(run)
        while True:
            if is_restarted and (newer := read_claim(run)) != signs:
                signs, unchanged_since_s = newer, time.monotonic()
            elif is_restarted and time.monotonic() > unchanged_since_s + STALE_S:
                drop_claim(run)  # Ray has found this process's predecessor dead, but a file server may keep its lock
            try:
                session = prepare_unchanged(
                    run, reach, console, force=self._force or is_restarted, as_json=self._as_json
                )
                return start(session, self._requests)
            except TrainspecError as error:
                is_held = error.problems[0].code == "still_running"
                if not (is_restarted and is_held) or time.monotonic() > deadline_s:
                    raise
            time.sleep(LOOK_S)
