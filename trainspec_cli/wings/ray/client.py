"""The launch command's part of a run on a Ray cluster."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainspec_cli.core.errors import EXIT_DONE, Interrupted, MachineError, Problem, RecipeError, WorkerError
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.reporter.console import RunConsole, make_console
from trainspec_cli.run.backend.nodes.backend import build_nodes_job
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_result
from trainspec_cli.run.job.folder import check_free, is_running, make_folder, storage, write_launch
from trainspec_cli.run.notify import Notify
from trainspec_cli.run.signals import StopRequests, on_stop_signal
from trainspec_cli.session.launching.nodes import MANAGED, exit_code_of
from trainspec_cli.session.launching.session import describe_detached, prepare_on
from trainspec_cli.session.manager import RecordChanges
from trainspec_cli.session.recipe.data import prepare_data
from trainspec_cli.session.recipe.load import Loaded, check_start
from trainspec_cli.session.runs.find import check_name_free
from trainspec_cli.wings.ray.cluster import NAMESPACE, Bundle, connect, release, reserve
from trainspec_cli.wings.ray.supervisor import SupervisorActor

FOLLOW_S = 0.3
ANSWER_TIMEOUT_S = 5.0
RELEASE_S = 2.0
"""Time in seconds in which a supervisor that was told so releases its nodes."""


class RayRuns:
    def launch(self, loaded: Loaded, notify: Notify, *, force: bool, as_json: bool, detach: bool) -> int:
        console = make_console(as_json=as_json)
        spec = loaded.spec
        check_start(spec)
        check_free(spec.run.dir)
        check_name_free(spec.run.name)
        connect()
        with reserve(spec, console) as (places, machine):
            plan = prepare_on(machine, loaded, MANAGED, console, force=force, as_json=as_json).plan
            data_folder = prepare_data(loaded, console)
            with storage(spec.run.dir):
                root = make_folder(spec.run.dir, loaded.composed.recipe).absolute()
                write_launch(build_nodes_job(plan, root, MANAGED), plan, loaded.origin, data_folder)
            run = RunDir(root)
            supervisor = _hand_over(run, spec, places, notify, force=force, as_json=as_json)
        return _finish(run, supervisor, places, console, as_json=as_json, detach=detach)

    def resume(
        self,
        run: RunDir,
        spec: RunSpec,
        record: RecordChanges | None,
        notify: Notify,
        *,
        force: bool,
        as_json: bool,
        detach: bool,
    ) -> int:
        console = make_console(as_json=as_json)
        connect()
        if _is_supervised(run):
            hint = f"follow it: trainspec watch {run.root}"
            raise RecipeError(Problem("still_running", f"the run in {run.root} is still running", hint=hint))
        with reserve(spec, console) as (places, machine):
            if record:
                record(machine, MANAGED.start)
            supervisor = _hand_over(run, spec, places, notify, force=force, as_json=as_json)
        return _finish(run, supervisor, places, console, as_json=as_json, detach=detach)

    def ask_to_stop(self, run: RunDir) -> None:
        connect()
        if (supervisor := _find(run)) is None:
            message = f"Ray has no supervisor for the run in {run.root}"
            raise MachineError(Problem("not_running", message, environment=True))
        ray.get(supervisor.ask_to_stop.remote(), timeout=ANSWER_TIMEOUT_S)


RAY_RUNS = RayRuns()


def _hand_over(
    run: RunDir, spec: RunSpec, places: Sequence[Bundle], notify: Notify, *, force: bool, as_json: bool
) -> Any:
    """Create the run's supervisor, which owns the nodes from now on."""
    outlives_node = spec.resilience.survives_lost_nodes or spec.resilience.survives_first_node
    actor = ray.remote(SupervisorActor).options(
        name=_name(run),
        lifetime="detached",
        max_restarts=-1 if outlives_node else 0,
        max_concurrency=4,
        num_cpus=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(places[0].group),
    )
    about = (str(run.root.absolute()), tuple(places), generations.newest(run))
    return actor.remote(*about, notify.whom, force, as_json, str(Path.cwd()))


def _finish(
    run: RunDir, supervisor: Any, places: Sequence[Bundle], console: RunConsole, *, as_json: bool, detach: bool
) -> int:
    if not detach:
        return _follow(run, supervisor, places, console)
    print(describe_detached(run, None, as_json=as_json))
    return EXIT_DONE


def _follow(run: RunDir, supervisor: Any, places: Sequence[Bundle], console: RunConsole) -> int:
    """Print what the supervisor prints until the run has ended; return its exit code."""
    since = 0.0
    position = 0
    requests = StopRequests()
    is_away = False
    with on_stop_signal(requests.add):
        while True:
            try:
                asked = supervisor.tell.remote(since, position, requests.count)
                since, position, said, code = ray.get(asked, timeout=ANSWER_TIMEOUT_S)
            except (GetTimeoutError, ActorUnavailableError):
                if since and not is_away:
                    console.report(
                        "the supervisor does not answer; if its node is lost, Ray restarts it on another node"
                    )
                is_away = bool(since)
                if requests.count > bool(since):  # nobody is there who could stop the run
                    console.report(f"the run was not stopped; to stop it later: trainspec stop {run.root}")
                    return Interrupted.exit_code
                time.sleep(FOLLOW_S)
                continue
            except RayActorError as error:  # Ray does not restart it
                release(places)
                if run.result_json.is_file():
                    return exit_code_of(run, read_result(run))
                message = f"the run's supervisor was lost: {str(error).strip().splitlines()[-1]}"
                hint = f"continue the run: trainspec resume {run.root}"
                raise WorkerError(Problem("supervisor_lost", message, hint=hint)) from error
            is_away = False
            for stream, text in said:
                getattr(sys, stream).write(text)
            sys.stdout.flush()
            if code is not None:
                release(places)
                _remove(supervisor)
                return int(code)
            time.sleep(FOLLOW_S)


def _is_supervised(run: RunDir) -> bool:
    """Return whether the run has a supervisor that has not ended; if it has, remove what is left of it."""
    supervisor = _find(run)
    if supervisor is None:
        return False
    try:
        *_, code = ray.get(supervisor.tell.remote(0.0, 0, 0), timeout=ANSWER_TIMEOUT_S)
        if code is None:
            return True
        time.sleep(RELEASE_S)
    except RayError:
        # Without its nodes, Ray would restart it forever.
        if is_running(run):
            return True
    _remove(supervisor)
    return False


def _remove(supervisor: Any) -> None:
    with suppress(RayError):  # it may have ended by itself
        ray.kill(supervisor, no_restart=True)


def _find(run: RunDir) -> Any:
    """Return the run's supervisor; None if it has none."""
    try:
        return ray.get_actor(_name(run), NAMESPACE)
    except ValueError:
        return None


def _name(run: RunDir) -> str:
    return str(run.root.resolve())
