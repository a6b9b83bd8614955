"""The one way to run an engine tool: a request goes to processes of its own, a result comes back, nothing is left.

    result = run_tool(TRACE, TraceRequest(plan, rank=3))

A private temporary folder holds request.json, the tool's log and tool_result.json. The processes are supervised as
a run's are: a request to stop ends them at once, and a guard ends them where this process is killed.
"""

from __future__ import annotations

import math
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from trainspec_cli.core.environment_names import LAUNCH_ID
from trainspec_cli.core.errors import Interrupted, MachineError, Problem
from trainspec_cli.recipe.canonical import from_plain, to_plain
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.results import tools as messages
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.probe import MachineProbe
from trainspec_cli.run.backend import OpenBackend
from trainspec_cli.run.backend.local import LocalBackend
from trainspec_cli.run.backend.nodes.backend import Examination, NodesBackend, Reach, build_nodes_job
from trainspec_cli.run.failure import find_failures, tail
from trainspec_cli.run.folder.files import read_json, write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import write_plan
from trainspec_cli.run.job.job import Job, build_job, own_modules
from trainspec_cli.run.supervise import supervise

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RequestT = TypeVar("RequestT", bound="DataclassInstance")
ResultT = TypeVar("ResultT")
TAIL_LINES = 15


@dataclass(frozen=True)
class Tool(Generic[RequestT, ResultT]):
    """One of the modules in `engine/tools`; its function `run` takes the request and returns the result."""

    name: str
    request: type[RequestT]
    result: type[ResultT]
    what: str
    """Its name in messages."""
    code: str
    """The code of the problem that a failure is."""
    hint: str = ""
    """The advice where it fails."""
    timeout_s: float | None = None
    """The tool is ended after this long; None: it may take as long as its request is large."""
    program: tuple[str, ...] = ("-m", "trainspec_cli.engine.tools")
    """Arguments of Python; the tool's name and the folder follow them."""

    @property
    def worker(self) -> tuple[str, ...]:
        return (*self.program, self.name)


PROBE = Tool(
    "probe",
    messages.ProbeRequest,
    MachineProbe,
    "the probe of this machine",
    "probe_failed",
    hint="TRAINSPEC_PROBE=off leaves it out",
    timeout_s=1800.0,
)
KERNELS = Tool(
    "kernels",
    messages.KernelRequest,
    messages.KernelResult,
    "the measurement of kernels",
    "probe_failed",
    hint="launch with kernels=default",
)
COUNT_BLOCK = Tool(
    "count_block",
    messages.BlockRequest,
    messages.BlockCount,
    "the count of a block's parameters",
    "block_failed",
    hint="type model.block_params=NUMBER to go without it",
    timeout_s=600.0,
)
TRACE = Tool("trace", messages.TraceRequest, messages.TraceResult, "the trace", "trace_failed")
EXPORT = Tool("export", messages.ExportRequest, messages.ExportResult, "the export of the weights", "export_failed")
SPEED = Tool(
    "speed",
    messages.SpeedRequest,
    messages.SpeedResult,
    "the measurement of this node's devices",
    "speed_failed",
    timeout_s=120.0,
)
LINKS = Tool(
    "links",
    messages.LinksRequest,
    messages.LinksResult,
    "the measurement of the links between the processes",
    "links_failed",
    hint="look at the interface that leads to the other nodes (ip route), at its firewall, and at `links` above",
    timeout_s=1800.0,
)
CERTIFY = Tool("certify_worker", messages.CertifyRequest, messages.CertifyResult, "the certification", "run_failed")
CHECKPOINT_RATES = Tool(
    "checkpoint_rates",
    messages.CheckpointRatesRequest,
    messages.CheckpointRates,
    "the measurement of checkpoints",
    "run_failed",
    timeout_s=600.0,
)
TOOLS: tuple[Tool[Any, Any], ...] = (
    PROBE,
    KERNELS,
    COUNT_BLOCK,
    TRACE,
    EXPORT,
    SPEED,
    LINKS,
    CERTIFY,
    CHECKPOINT_RATES,
)


Prepare = Callable[[Path, tuple[str, ...]], tuple[Job, OpenBackend]]
"""Given a folder and what Python is to run with it as the last argument, return the job and what starts it."""


def one_process(environment: Mapping[str, str] | None = None) -> Prepare:
    """Run the tool in one process on this node. `environment` is set on top of this process's own."""

    def prepare(root: Path, worker: tuple[str, ...]) -> tuple[Job, OpenBackend]:
        own = {LAUNCH_ID: secrets.token_hex(8), **own_modules(), **(environment or {})}
        command = (sys.executable, *worker, str(root))
        return Job(root, command, own, world_size=1, stop_grace_s=0.0, logs=RunDir(root).logs), LocalBackend

    return prepare


def torchrun(plan: Plan, machine: Machine, environment: Mapping[str, str] | None = None) -> Prepare:
    """Run the tool in as many processes as `plan` has on one node, with the environment that a run has."""

    def prepare(root: Path, worker: tuple[str, ...]) -> tuple[Job, OpenBackend]:
        job = build_job(plan, root, machine, worker=worker)
        return replace(job, environment={**job.environment, **(environment or {})}), LocalBackend

    return prepare


def on_nodes(plan: Plan, reach: Reach, examination: Examination) -> Prepare:
    """Run the tool in all processes of `plan` on several nodes, after each node was examined."""

    def prepare(root: Path, worker: tuple[str, ...]) -> tuple[Job, OpenBackend]:
        write_plan(RunDir(root), plan)  # a node's agent reads it

        # The backend gets this plan, and not the None by which `supervise` knows a job that is never started again.
        return build_nodes_job(plan, root, reach), lambda job, _: NodesBackend(
            job, plan, reach=reach, worker=worker, examination=examination
        )

    return prepare


def run_tool(
    tool: Tool[RequestT, ResultT],
    request: RequestT,
    prepare: Prepare | None = None,
    *,
    on_tick: Callable[[], None] = lambda: None,
    shared: Path | None = None,
) -> ResultT:
    """Run `tool` (in one process, unless `prepare` says otherwise) and return what it found.

    `on_tick` is called some ten times a second. `shared` is a folder in which the temporary one is made, where several
    nodes need to see it. Raises MachineError where the tool cannot be run, fails or exceeds its time, Interrupted where
    a stop was requested.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=f"trainspec-{tool.name}-", dir=shared) as folder:
            root = Path(folder).absolute()
            write_json(root / messages.REQUEST, to_plain(request))
            job, backend = (prepare or one_process())(root, tool.worker)
            _supervise(tool, job, backend, on_tick)
            return from_plain(tool.result, read_json(root / messages.RESULT))
    except OSError as error:
        hint = "see that the folder for temporary files (TMPDIR) can be written and has room"
        raise MachineError(Problem(tool.code, f"{tool.what} failed: {error}", hint=hint, environment=True)) from error


def _supervise(tool: Tool[Any, Any], job: Job, backend: OpenBackend, on_tick: Callable[[], None]) -> None:
    """Return when the tool has left its result."""
    deadline = time.monotonic() + (tool.timeout_s or math.inf)

    def watch(_: bool) -> None:
        on_tick()
        if time.monotonic() > deadline:
            raise MachineError(_problem(tool, job, f"did not end within {tool.timeout_s:g} s"))

    ending = supervise(job, None, backend, watch)
    if ending.stop_requested:
        raise Interrupted(f"{tool.what} was interrupted", code="interrupted")
    if ending.exit_code != 0:
        raise MachineError(_problem(tool, job, "failed"))
    if not (job.root / messages.RESULT).is_file():
        raise MachineError(_problem(tool, job, "ended without a result"))


def _problem(tool: Tool[Any, Any], job: Job, ending: str) -> Problem:
    """Say how the tool ended, and show the end of one log: that of the process which failed first."""
    message = f"{tool.what} {ending}\n\n{_last_lines(job)}".rstrip()
    return Problem(tool.code, message, hint=tool.hint, environment=True)


def _last_lines(job: Job) -> str:
    failures = find_failures(job)
    if failures:
        lines = failures[0].detail.splitlines()[-TAIL_LINES:]
        return "\n".join([f"{failures[0].who} {failures[0].summary}", *lines])
    return tail(job.torchrun_log, TAIL_LINES) if job.torchrun_log.is_file() else ""
