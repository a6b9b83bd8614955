"""The only way to run an engine tool: separate processes receive a request and return their result.

    result = run_tool(TRACE, TraceRequest(plan, rank=3))

A private temporary folder contains request.json, the tool's log and tool_result.json. The processes are supervised like
those of a run: a stop request ends them immediately, and a guard ends them if this process is killed.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from trainspec_cli import __version__
from trainspec_cli.core.environment_names import LAUNCH_ID
from trainspec_cli.core.errors import Interrupted, MachineError, Problem, RecipeError
from trainspec_cli.core.node import cache_dir, cpu_name, make_cache
from trainspec_cli.recipe.json_text import finite_or_none
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.kernels import TORCH, KernelFigure, KernelTable, KernelTrial, KernelTrials
from trainspec_cli.recipe.records import canonical_json, from_plain, to_plain
from trainspec_cli.recipe.results import tools as messages
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tools import KernelRequest, MachineProbe, ProbeRequest, TraceRequest, TraceResult
from trainspec_cli.run.backend import OpenBackend
from trainspec_cli.run.backend.local import LocalBackend
from trainspec_cli.run.backend.nodes.backend import Examination, NodesBackend, Reach, build_nodes_job
from trainspec_cli.run.failure import find_failures, tail
from trainspec_cli.run.folder.files import read_json, write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import write_plan
from trainspec_cli.run.job.job import Job, build_job, own_modules
from trainspec_cli.run.signals import StopRequests
from trainspec_cli.run.supervise import supervise

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


RequestT = TypeVar("RequestT", bound="DataclassInstance")
ResultT = TypeVar("ResultT")
TAIL_LINES = 15


@dataclass(frozen=True)
class Tool(Generic[RequestT, ResultT]):
    """A module in `engine/tools` whose function `run` takes the request and returns the result."""

    name: str
    request: type[RequestT]
    result: type[ResultT]
    what: str
    """The tool's name in messages."""
    code: str
    """The problem code reported when the tool fails."""
    hint: str = ""
    """The advice given when the tool fails."""
    timeout_s: float | None = None
    """Time limit of the tool in seconds; None if the tool's duration depends on the request."""
    program: tuple[str, ...] = ("-m", "trainspec_cli.engine.tools")
    """Arguments for Python, followed by the tool's name and the folder."""

    @property
    def worker(self) -> tuple[str, ...]:
        return (*self.program, self.name)


PROBE = Tool(
    "probe",
    messages.ProbeRequest,
    MachineProbe,
    "the probe of this machine",
    "probe_failed",
    hint="TRAINSPEC_PROBE=off skips it",
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
    hint="set model.block_params=NUMBER to skip it",
    timeout_s=600.0,
)
COUNT_MODULE = Tool(
    "count_module",
    messages.ModuleRequest,
    messages.ModuleCount,
    "the count of a transformers module",
    "count_failed",
    timeout_s=1800.0,
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
    hint="check the interface that leads to the other nodes (ip route), its firewall, and `links` above",
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
    COUNT_MODULE,
    TRACE,
    EXPORT,
    SPEED,
    LINKS,
    CERTIFY,
    CHECKPOINT_RATES,
)


Prepare = Callable[[Path, tuple[str, ...]], tuple[Job, OpenBackend]]
"""Takes a folder and the arguments for Python (to which the folder is appended), and returns the job and the backend
that starts it."""


def one_process(environment: Mapping[str, str] | None = None) -> Prepare:
    """Run the tool in one process on this node. `environment` is added to this process's environment."""

    def prepare(root: Path, worker: tuple[str, ...]) -> tuple[Job, OpenBackend]:
        own = {LAUNCH_ID: secrets.token_hex(8), **own_modules(), **(environment or {})}
        command = (sys.executable, *worker, str(root))
        return Job(root, command, own, world_size=1, stop_grace_s=0.0, logs=RunDir(root).logs), LocalBackend

    return prepare


def torchrun(plan: Plan, machine: Machine, environment: Mapping[str, str] | None = None) -> Prepare:
    """Run the tool on one node with the number of processes in `plan` and the environment of a run."""

    def prepare(root: Path, worker: tuple[str, ...]) -> tuple[Job, OpenBackend]:
        job = build_job(plan, root, machine, worker=worker)
        return replace(job, environment={**job.environment, **(environment or {})}), LocalBackend

    return prepare


def on_nodes(plan: Plan, reach: Reach, examination: Examination) -> Prepare:
    """Run the tool in all processes of `plan` on several nodes, after checking each node."""

    def prepare(root: Path, worker: tuple[str, ...]) -> tuple[Job, OpenBackend]:
        write_plan(RunDir(root), plan)  # the nodes' agents read it

        # The backend receives this plan, but `supervise` receives None, so that the job is never restarted.
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
    requests: StopRequests | None = None,
) -> ResultT:
    """Run `tool` (in one process, unless `prepare` specifies otherwise) and return its result.

    `on_tick` is called about 10 times per second. `shared` is a folder, visible to several nodes, where the temporary
    folder is created. `requests` counts requests to stop; pass it if the tool runs in a thread other than the main one,
    because only the main thread gets signals. Raises MachineError if the tool cannot be run, fails or exceeds its time
    limit, Interrupted if a stop was requested."""
    try:
        with tempfile.TemporaryDirectory(prefix=f"trainspec-{tool.name}-", dir=shared) as folder:
            root = Path(folder).absolute()
            write_json(root / messages.REQUEST, to_plain(request))
            job, backend = (prepare or one_process())(root, tool.worker)
            _supervise(tool, job, backend, on_tick, requests)
            return from_plain(tool.result, read_json(root / messages.RESULT))
    except OSError as error:
        hint = "check that the folder for temporary files (TMPDIR) is writable and has free space"
        raise MachineError(Problem(tool.code, f"{tool.what} failed: {error}", hint=hint, environment=True)) from error


def _supervise(
    tool: Tool[Any, Any],
    job: Job,
    backend: OpenBackend,
    on_tick: Callable[[], None],
    requests: StopRequests | None,
) -> None:
    """Wait until the tool has written its result."""
    deadline = time.monotonic() + (tool.timeout_s or math.inf)

    def watch(_: bool) -> None:
        on_tick()
        if time.monotonic() > deadline:
            raise MachineError(_problem(tool, job, f"did not end within {tool.timeout_s:g} s"))

    ending = supervise(job, None, backend, watch, requests=requests)
    if ending.stop_requested:
        raise Interrupted(f"{tool.what} was interrupted", code="interrupted")
    if ending.exit_code != 0:
        raise MachineError(_problem(tool, job, "failed"))
    if not (job.root / messages.RESULT).is_file():
        raise MachineError(_problem(tool, job, "ended without a result"))


def _problem(tool: Tool[Any, Any], job: Job, ending: str) -> Problem:
    """Describe how the tool ended, with the last lines of the log of the process that failed first."""
    lines = tail(job.torchrun_log, TAIL_LINES) if job.torchrun_log.is_file() else ""
    if failures := find_failures(job):
        last = failures[0].detail.splitlines()[-TAIL_LINES:]
        lines = "\n".join([f"{failures[0].who} {failures[0].summary}", *last])
    return Problem(tool.code, f"{tool.what} {ending}\n\n{lines}".rstrip(), hint=tool.hint, environment=True)


# Choose the backend that computes an operation: it must be correct, and clearly faster than torch's default.


MARGIN = 0.03
"""A backend must be faster by at least this fraction, because a smaller difference is within measurement noise."""


def judge(ranks: Sequence[KernelTrials]) -> dict[str, dict[str, KernelFigure]]:
    """Turn the processes' trials into a verdict for each operation and backend. Processes need not use the same
    operations (for example in different pipeline stages); those that use an operation decide."""
    ops = dict.fromkeys(op for rank in ranks for op in rank.trials)
    return {op: judge_operation([rank.trials[op] for rank in ranks if op in rank.trials]) for op in ops}


def judge_operation(ranks: Sequence[dict[str, KernelTrial]]) -> dict[str, KernelFigure]:
    figures = {backend: _judge(backend, [rank[backend] for rank in ranks]) for backend in ranks[0]}
    chosen = {backend: figure for backend, figure in figures.items() if figure.verdict == "chosen"}
    faster = {backend: figure.ratio for backend, figure in chosen.items() if figure.ratio}
    best = min(faster, key=lambda backend: faster[backend], default=TORCH)
    beaten = {backend for backend in faster if backend != best}
    return {
        backend: replace(figure, verdict="not faster", reason=best) if backend in beaten else figure
        for backend, figure in figures.items()
    }


def _judge(backend: str, trials: Sequence[KernelTrial]) -> KernelFigure:
    for trial in trials:
        if trial.untried:
            return KernelFigure("not tried", trial.untried)
        if trial.failure:
            return KernelFigure("failed", trial.failure)
    error = max(math.inf if trial.error is None else trial.error for trial in trials)
    allowed = min(trial.allowed_error or 0.0 for trial in trials)
    if not error <= allowed:  # this includes NaN
        reason = f"its error against fp64 is {error:.2g}; {allowed:.2g} is allowed for the format"
        return KernelFigure("wrong", reason, error=finite_or_none(error), allowed_error=allowed)
    ratios = [ratio for trial in trials for ratio in trial.ratios]
    ratio = median(ratios)
    spread = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    quartiles = (spread[0], spread[2])
    if backend == TORCH:
        return KernelFigure("default", "", ratio, quartiles, error, allowed)
    if ratio > 1 - MARGIN or quartiles[1] >= 1:
        return KernelFigure("not faster", TORCH, ratio, quartiles, error, allowed)
    return KernelFigure("chosen", "", ratio, quartiles, error, allowed)


# The measurements before a launch: this machine's probe and kernels, which are measured once and then cached, and the
# trace of a step.
#
# The processes and their environment are those that a run will have.


DISTURBED_HOLDS_S = 86_400.0
"""Time in seconds for which a probe that was disturbed by other programs stays valid. The probe reflects the speed of a
run alongside these programs, which may be gone a day later. With only 15 minutes, a machine that is always in use would
be probed before most launches."""
LIBRARIES = ("triton", "liger-kernel", "fla-core", "torchao")
Figures = TypeVar("Figures")


def probe_machine(plan: Plan, machine: Machine, on_start: Callable[[], None]) -> MachineProbe:
    """Return the cached probe, or measure now. `on_start` is called before a measurement. A probe that was disturbed by
    other programs is valid for `DISTURBED_HOLDS_S`. Raises MachineError if the probe fails, and Interrupted if a stop
    was requested."""
    path = probe_path(plan, machine)
    cached = read_probe(path)
    if cached is not None and (not cached.is_disturbed or time.time() - path.stat().st_mtime < DISTURBED_HOLDS_S):
        return cached
    on_start()
    probe = run_tool(PROBE, ProbeRequest(plan.compute), torchrun(plan, machine))
    _keep(path, probe)
    return probe


def measure_kernels(plan: Plan, machine: Machine, on_start: Callable[[], None], *, again: bool = False) -> KernelTable:
    """Return the cached table, or measure now. `on_start` is called before a measurement. In a multi-node run, this
    node measures for all nodes. Raises the same errors as `probe_machine`."""
    path = table_path(plan, machine)
    cached = None if again else read_table(path)
    if cached is not None:
        return cached
    on_start()
    alone = replace(plan.as_one_group, num_nodes=1)
    ranks = run_tool(KERNELS, KernelRequest(plan.as_one_group), torchrun(alone, machine)).ranks
    calls = {op: described for rank in reversed(ranks) for op, described in rank.calls.items()}
    table = KernelTable(_device(plan, machine), plan.compute, metadata.version("torch"), calls, judge(ranks))
    _keep(path, table)
    return table


def _device(plan: Plan, machine: Machine) -> str:
    return machine.gpu_names[0] if plan.device == "cuda" and machine.gpu_names else cpu_name()


def trace_plan(plan: Plan) -> TraceResult:
    """Trace a step of `plan` without a GPU, and return the counts of the traced rank that uses the most memory. Raises
    MachineError."""
    where = one_process({"OMP_NUM_THREADS": "1"})
    ranks = [run_tool(TRACE, TraceRequest(plan, rank), where) for rank in traced_ranks(plan)]
    return max(ranks, key=lambda traced: traced.peak_memory_bytes)


def traced_ranks(plan: Plan) -> list[int]:
    """Return a rank of the first pipeline stage and one of the last, because every stage in between holds less than one
    of these two. Along cp, the last rank is chosen, because its queries attend to all keys."""
    layout = plan.layout
    per_stage = plan.world_size // layout.pp
    along_cp = (layout.cp - 1) * layout.tp
    return sorted({along_cp, (layout.pp - 1) * per_stage + along_cp})


# The cache of measurements


def probe_path(plan: Plan, machine: Machine) -> Path:
    return figures_path("probe", plan, machine, {})


def read_probe(path: Path) -> MachineProbe | None:
    return read_figures(MachineProbe, path)


def known_probe(plan: Plan, machine: Machine) -> MachineProbe | None:
    """Return this machine's cached probe for plans of this kind; None if the machine has not been probed."""
    return read_probe(probe_path(plan, machine))


def table_path(plan: Plan, machine: Machine) -> Path:
    """Return the path of the kernel table. Its name also depends on a run's shapes and the kernels' libraries."""
    spec = to_plain(plan.spec)
    shapes = {key: spec[key] for key in ("model", "lora", "compile", "precision", "optim")}
    plain = to_plain(plan)
    shapes |= {key: plain[key] for key in ("layout", "micro_batch_size", "device", "offload", "recompute")}
    shapes |= {"seq_len": plan.spec.data.seq_len, "documents": plan.spec.data.masks_documents}
    libraries = {}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            libraries[name] = metadata.version(name)
    return figures_path("kernels", plan, machine, {"shapes": shapes, "libraries": libraries})


def read_table(path: Path) -> KernelTable | None:
    return read_figures(KernelTable, path)


def figures_path(kind: str, plan: Plan, machine: Machine, others: Mapping[str, object]) -> Path:
    """Return the path of a cache file. Its name depends on everything that determines the measurements: the machine,
    the versions, and `others`."""
    facts = {
        "machine": asdict(machine),
        "cpu": cpu_name(),
        "processes": plan.devices_per_node,
        "compute": plan.compute,
        "torch": metadata.version("torch"),
        "trainspec": __version__,
        **others,
    }
    name = hashlib.sha256(canonical_json(facts).encode()).hexdigest()[:16]
    return cache_dir() / "machine" / f"{kind}-{name}.json"


def read_figures(kind: type[Figures], path: Path) -> Figures | None:
    """Return the measurements; None if they do not exist or were written by another version of trainspec."""
    if not path.is_file():
        return None
    try:
        return from_plain(kind, read_json(path))
    except (RecipeError, ValueError):
        return None


def _keep(path: Path, figures: MachineProbe | KernelTable) -> None:
    make_cache()
    write_json(path, to_plain(figures))
