"""Measure the clauses that need launches like those of a user: security and performance.

For security, an untrusted client connects to a run's ports, and the run's files are altered. Performance is graded
using short runs, links and disks."""

from __future__ import annotations

import ipaddress
import json
import os
import shlex
import shutil
import socket
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from trainspec_cli.core.errors import EXIT_CODES, MachineError, Problem, RecipeError
from trainspec_cli.core.node import PRIVATE_UMASK
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.certificate import Finding
from trainspec_cli.recipe.results.tools import CheckpointRatesRequest, LinksRequest
from trainspec_cli.run.folder.accounting import WARMUP_STEPS
from trainspec_cli.run.folder.event_types.events import StepEvent
from trainspec_cli.run.folder.events import read_sound
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan, read_result
from trainspec_cli.run.program import Program, ProgramEnd, run_program
from trainspec_cli.run.tools import CHECKPOINT_RATES, LINKS, run_tool, torchrun
from trainspec_cli.wings.certify.certificate import digest, verify, write_certificate
from trainspec_cli.wings.certify.clauses import SECURITY, make_finding
from trainspec_cli.wings.certify.runs import device_of

RECIPE = ("recipe=quickstart",)
"""The recipe whose performance is measured if none is specified."""
STEPS = 36
SAVE_EVERY = 12
KILLED_AT = 30
"""The run's length in steps, its checkpoint interval, and the step after which one of its ranks is killed."""
SHORT = (
    *("sample.prompt=", "train.eval_interval_steps=null", "checkpoint.keep_last=1"),
    "optim.schedule.kind=constant",
)
"""Overrides that disable slow work outside the measurements. The warm-up schedule is also off, because the runs are too
short for it."""
TIMEOUT_S = 900.0

ATTACKED_STEPS = 40
ATTACKED_AT = 5
"""The length in steps of the attacked run, and the step after which the attack starts."""
IDLE = 32
"""Number of idle connections that the untrusted client keeps open at each port."""
ATTACKED_RECIPE = (
    *("recipe=tiny", f"train.max_steps={ATTACKED_STEPS}", "scheduler=off", "run.preflight=false", "resilience=none"),
    # A slow rank keeps the run alive long enough for all connections of the attack.
    *("checkpoint.keep_last=1", "fault=slow(rank=0,step=1,seconds=0.1,steps=1000)"),
)
CONNECT_S = 10.0
RESUMED_S = 300.0

Figures = dict[str, float | str]


@dataclass(frozen=True)
class Bench:
    """The machine, recipe and folder used to measure launched runs."""

    folder: Path
    machine: Machine
    processes: int
    recipe: tuple[str, ...]
    batch: int
    """The recipe's global batch size, in samples."""
    on_tick: Callable[[], None] = lambda: None


def launch(bench: Bench, name: str, arguments: Sequence[str], on_tick: Callable[[], None] = lambda: None) -> None:
    """Run `trainspec launch` to completion. Raises MachineError with its last lines if it fails."""

    def tick() -> None:
        bench.on_tick()
        on_tick()

    command = (sys.executable, "-m", "trainspec_cli", "launch", *arguments)
    program = Program(command, bench.folder / "launches" / name, f"the run {name}", TIMEOUT_S)
    end = run_program(program, {}, tick)
    if end.exit_code != 0:
        how = "did not end in time" if end.exit_code is None else f"ended with {end.exit_code}"
        typed = shlex.join(["trainspec", "launch", *arguments])
        problem = Problem("run_failed", f"the run {name} {how}\n\n{end.output}", hint=f"run it separately: {typed}")
        raise MachineError(problem)


# Performance


def measure_performance(bench: Bench, clauses: Sequence[str]) -> list[Finding]:
    """Measure the given performance clauses. Raises MachineError if a run fails, and Interrupted if a stop was
    requested."""
    if not clauses:
        return []
    # One run with all processes serves both the speed clauses and PERF-4. One of its ranks is killed near its end.
    killed = f"fault=kill(rank={bench.processes - 1},step={KILLED_AT})"
    more = (killed, f"checkpoint.interval_steps={SAVE_EVERY}")
    together = _launched(bench, "together", bench.processes, bench.batch, more)
    figures: dict[str, Figures] = {}
    if "PERF-1" in clauses and (predicted := read_plan(together).prediction) is not None:
        step_s = statistics.median(step.step_time_s for step in _steps(together))
        figures["PERF-1"] = {"step_s": step_s, "planned_s": predicted.step_time_s}
    if "PERF-2" in clauses:
        figures["PERF-2"] = _scaling(bench, together)
    if "PERF-3" in clauses:
        where = torchrun(read_plan(together), bench.machine)
        links = run_tool(LINKS, LinksRequest(device_of(bench.machine)), where, on_tick=bench.on_tick)
        largest = links.all_reduce[-1]
        figures["PERF-3"] = {
            "all_reduce_gb_per_s": largest.bus_bytes_per_s / 1e9,
            "at_bytes": float(largest.bytes),
            "small_message_us": links.all_reduce[0].seconds * 1e6,
        }
    if "PERF-4" in clauses:
        result = read_result(together)
        recoveries = result.recoveries if result else ()
        if not recoveries or not isinstance(recoveries, tuple) or recoveries[0].stall_s is None:
            message = f"{together.root} did not recover from the killed rank"
            raise MachineError(Problem("run_failed", message))
        (first, *_) = recoveries
        assert first.stall_s is not None
        lost_steps = float(first.lost_steps or 0)
        figures["PERF-4"] = {"recovery_s": first.stall_s, "lost_steps": lost_steps, "kind": first.kind}
    if "PERF-5" in clauses:
        # The tested disk is the one with the certification folder.
        plan = read_plan(together).as_one_group
        request = CheckpointRatesRequest(plan, str(bench.folder.absolute() / "performance" / "checkpoints"))
        rates = run_tool(CHECKPOINT_RATES, request, torchrun(plan, bench.machine), on_tick=bench.on_tick)
        figures["PERF-5"] = {
            "write_gb_per_s": rates.bytes / rates.write_s / 1e9,
            "read_gb_per_s": rates.bytes / rates.read_s / 1e9,
        }
    return [make_finding(clause, f"{bench.processes}-processes", found) for clause, found in figures.items()]


def _launched(bench: Bench, name: str, processes: int, batch: int, more: Sequence[str] = ()) -> RunDir:
    """Launch the recipe for a few steps, or return the run if an earlier certification finished it."""
    run = RunDir(bench.folder.absolute() / "performance" / name)
    if run.result_json.is_file():
        return run
    if run.root.exists():
        shutil.rmtree(run.root)
    size = (f"cluster.devices_per_node={processes}", "cluster.num_nodes=1", f"batching.global_batch_size={batch}")
    length = (f"train.max_steps={STEPS}", f"run.dir={run.root}", *SHORT)
    launch(bench, name, (*bench.recipe, *size, *length, *more))
    return run


def _steps(run: RunDir) -> list[StepEvent]:
    """Return the steps of a run except for the first ones, during which code is compiled and memory allocated."""
    return [event for event in read_sound(run.events(0)) if isinstance(event, StepEvent)][WARMUP_STEPS:]


def _scaling(bench: Bench, together: RunDir) -> Figures:
    """Measure weak scaling: a single process gets the same number of samples and cores as each process in the full
    run."""
    share = max(1, bench.batch // bench.processes)
    with _on_cores(bench):
        alone = _launched(bench, "alone", 1, share)
    # Tokens (or samples) per second.
    alone_per_s = statistics.median(step.units / step.step_time_s for step in _steps(alone))
    together_per_s = statistics.median(step.units / step.step_time_s for step in _steps(together))
    return {"alone_per_s": alone_per_s, "together_per_s": together_per_s}


@contextmanager
def _on_cores(bench: Bench) -> Iterator[None]:
    """If processes share the cores, limit processes started in this block to one process's share of the cores."""
    if bench.machine.gpu_names or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[: max(1, len(before) // bench.processes)])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# Security


def pickled_code(marker: Path) -> bytes:
    """Return a protocol-0 pickle that calls os.system to create a file when it is unpickled."""
    return f"cos\nsystem\n(S{f'touch {shlex.quote(str(marker))}'!r}\ntR.".encode()


class UntrustedClient:
    """Waits until a run has taken a few steps, then sends malformed data to each port that it listens on."""

    def __init__(self, run: RunDir, marker: Path):
        self.ports: set[tuple[str, int]] = set()
        self._run = run
        self._marker = marker
        self._held: list[socket.socket] = []

    def poll(self) -> None:
        """Attack the run once it has progressed far enough. Call this repeatedly while the run is in progress."""
        if self.ports or not self._run.events(0).exists():
            return
        steps = (event.step for event in read_sound(self._run.events(0)) if isinstance(event, StepEvent))
        if max(steps, default=0) < ATTACKED_AT:
            return
        self.ports = listening(psutil.Process())
        for port in sorted(self.ports):
            self._attack(port)

    def _attack(self, port: tuple[str, int]) -> None:
        for content in (
            b"\0" * 64,
            pickled_code(self._marker),
            b"x" * 2**16,
            b'{"op": "set", "key": "k", "value": "v"}\n',
            b"POST /replica/00000/kill HTTP/1.1\r\nHost: x\r\n\r\n",
        ):
            with suppress(OSError), socket.create_connection(port, CONNECT_S) as connection:
                connection.sendall(content)
        for _ in range(IDLE):
            with suppress(OSError):
                self._held.append(socket.create_connection(port, CONNECT_S))

    def close(self) -> None:
        for connection in self._held:
            connection.close()


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """Return the address and port of every socket that a process or one of its descendants is listening on."""
    found: set[tuple[str, int]] = set()
    for member in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):
            sockets = member.net_connections("tcp")
            found |= {(one.laddr.ip, one.laddr.port) for one in sockets if one.status == psutil.CONN_LISTEN}
    return found


def measure_security(bench: Bench, clauses: Sequence[str]) -> list[Finding]:
    """Measure the given security clauses. Raises MachineError if a run fails, and Interrupted if a stop was
    requested."""
    if not clauses:
        return []
    folder = bench.folder.absolute() / "security"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    alone = RunDir(folder / "alone")
    attacked = RunDir(folder / "attacked")
    marker = folder / "unpickled"
    client = UntrustedClient(attacked, marker)
    size = (f"cluster.devices_per_node={bench.processes}", "cluster.num_nodes=1")
    try:
        launch(bench, "attacked", (*ATTACKED_RECIPE, *size, f"run.dir={attacked.root}"), client.poll)
    finally:
        client.close()
    found = []
    for clause in SECURITY:
        if clause not in clauses:
            continue
        if clause == "SEC-1":
            figures = judge_ports(client.ports)
        elif clause == "SEC-2":
            launch(bench, "alone", (*ATTACKED_RECIPE, *size, f"run.dir={alone.root}"))
            result = read_result(attacked)
            undisturbed = read_result(alone)
            is_well = result is not None and result.status == "done" and not result.recoveries
            figures = {
                "ports": float(len(client.ports)),
                "sha256": str(result and result.weights_sha256),
                "left_alone": str(undisturbed and undisturbed.weights_sha256),
                "ended": "well" if is_well else "not well",
                "their_code": "was run" if marker.exists() else "was not run",
            }
        elif clause == "SEC-3":
            figures = judge_modes(attacked.root)
        else:
            figures = _judge_alterations(bench, attacked, folder)
        found.append(make_finding(clause, f"{bench.processes}-processes", figures))
    return found


def judge_ports(ports: set[tuple[str, int]]) -> Figures:
    """Return the results for SEC-1: the number of ports, and the addresses that other machines can reach."""
    beyond = sorted({address for address, _ in ports if not ipaddress.ip_address(address).is_loopback})
    return {"listening": float(len(ports)), "beyond": ", ".join(beyond) or "none"}


def judge_modes(root: Path) -> Figures:
    """Return the results for SEC-3: the files below `root`, and how many of them other users can access."""
    every = [root, *root.rglob("*")]
    opened = [path for path in every if not path.is_symlink() and path.stat().st_mode & PRIVATE_UMASK]
    figures: Figures = {"files": float(len(every)), "open": float(len(opened))}
    if opened:
        figures["first"] = str(opened[0].relative_to(root.parent))
    return figures


def _judge_alterations(bench: Bench, run: RunDir, folder: Path) -> Figures:
    """Alter a certificate, a checkpoint and a plan, each in one place. Then try to verify them or resume from them."""
    # Anyone can compute the digest of a certificate with a different verdict.
    body = to_plain(write_certificate((), bench.machine, date="2026-01-01")) | {"verdict": "broken"}
    certificate = folder / "certificate.json"
    certificate.write_text(json_text(body | {"digest": digest(body)}), encoding="utf-8")
    figures: Figures = {"certificate": "accepted"}
    try:
        verify(certificate)
    except RecipeError:
        figures["certificate"] = "refused"
    for name in ("checkpoint", "plan"):
        # Each alteration is made in a separate copy of the run, so that a resume encounters only that one.
        copy = RunDir(folder / name)
        shutil.copytree(run.root, copy.root, symlinks=True)
        if name == "checkpoint":
            altered = min(copy.checkpoint(max(copy.checkpoint_steps())).glob("*.safetensors"))
            content = bytearray(altered.read_bytes())
            content[-1] ^= 1
            altered.write_bytes(content)
        else:
            altered = copy.plan_json
            plan = json.loads(altered.read_text(encoding="utf-8"))
            plan["spec"]["optim"]["lr"] *= 2
            altered.write_text(json_text(plan), encoding="utf-8")
        end = _resume(bench, copy)
        known = end.exit_code not in (0, 1) and end.exit_code in EXIT_CODES
        is_named = altered.name in end.output and "Traceback" not in end.output
        figures[name] = "refused" if known and is_named else f"exit code {end.exit_code}: {end.output[-200:]}"
    return figures


def _resume(bench: Bench, run: RunDir) -> ProgramEnd:
    more = f"train.max_steps={ATTACKED_STEPS + 2}"
    command = (sys.executable, "-m", "trainspec_cli", "resume", str(run.root), more)
    program = Program(command, bench.folder / "launches" / run.root.name, "a resume", RESUMED_S)
    return run_program(program, {}, bench.on_tick)
