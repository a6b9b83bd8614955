"""Security clauses: a run as it is launched, and what a stranger who reaches its ports and its files can do to it."""

from __future__ import annotations

import ipaddress
import json
import shlex
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from trainspec_cli.certify.certificate import digest, write_certificate
from trainspec_cli.certify.performance import Bench, launch
from trainspec_cli.certify.standing import SECURITY, stand
from trainspec_cli.certify.verify import verify
from trainspec_cli.errors import EXIT_CODES, RecipeError
from trainspec_cli.launcher.program import Program, ProgramEnd, run_program
from trainspec_cli.rundir.event_types.training import StepEvent
from trainspec_cli.rundir.events import read_sound
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.rundir.record import read_result
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.json_text import json_text
from trainspec_cli.spec.results.certificate import Finding
from trainspec_cli.trust import PRIVATE_UMASK

STEPS, MOLESTED_AT = 40, 5
"""Steps of a run, and the step after which strangers come."""
IDLE = 32
"""Connections that a stranger opens to every port and leaves."""
RECIPE = (
    *("recipe=tiny", f"train.max_steps={STEPS}", "scheduler=off", "run.preflight=false", "resilience=none"),
    *("checkpoint.keep_last=1", "fault=slow(rank=0,step=1,seconds=0.1,steps=1000)"),
)
CONNECT_S, RESUMED_S = 10.0, 300.0

Figures = dict[str, float | str]


def pickled_code(marker: Path) -> bytes:
    """Return a pickle, of protocol 0, that makes a file where it is unpickled: it calls os.system."""
    return f"cos\nsystem\n(S{f'touch {shlex.quote(str(marker))}'!r}\ntR.".encode()


class Stranger:
    """Finds where a run listens while it goes on, and says there what it should not.

    `look` is called again and again.
    """

    def __init__(self, run: RunDir, marker: Path):
        self.ports: set[tuple[str, int]] = set()
        self._run, self._marker, self._held = run, marker, list[socket.socket]()

    def look(self) -> None:
        if self.ports or _last_step(self._run) < MOLESTED_AT:
            return
        self.ports = listening(psutil.Process())
        for port in sorted(self.ports):
            self._molest(port)

    def _molest(self, port: tuple[str, int]) -> None:
        for words in self._words():
            with suppress(OSError), socket.create_connection(port, CONNECT_S) as connection:
                connection.sendall(words)
        for _ in range(IDLE):
            with suppress(OSError):
                self._held.append(socket.create_connection(port, CONNECT_S))

    def _words(self) -> tuple[bytes, ...]:
        request = b'{"op": "set", "key": "k", "value": "v"}\n'
        return (
            b"\0" * 64,
            pickled_code(self._marker),
            b"x" * 2**16,
            request,
            b"POST /replica/00000/kill HTTP/1.1\r\nHost: x\r\n\r\n",
        )

    def leave(self) -> None:
        for connection in self._held:
            connection.close()


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """Return the address and port of every socket at which a process, or what it has started, listens."""
    found: set[tuple[str, int]] = set()
    for member in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):
            sockets = member.net_connections("tcp")
            found |= {(one.laddr.ip, one.laddr.port) for one in sockets if one.status == psutil.CONN_LISTEN}
    return found


def measure_security(bench: Bench, clauses: Sequence[str]) -> list[Finding]:
    """Measure the clauses that are wanted. Raises MachineError where a run fails, Interrupted where a stop is asked."""
    if not clauses:
        return []
    folder = bench.folder.absolute() / "security"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    alone, molested = RunDir(folder / "alone"), RunDir(folder / "molested")
    stranger = Stranger(molested, folder / "unpickled")
    try:
        _launch(bench, molested, stranger.look)
    finally:
        stranger.leave()
    found = {"SEC-1": lambda: _judge_ports(stranger.ports), "SEC-3": lambda: _judge_modes(molested.root)}
    found["SEC-2"] = lambda: _judge_strangers(bench, alone, molested, stranger, folder / "unpickled")
    found["SEC-4"] = lambda: _judge_alterations(bench, molested, folder)
    case = f"{bench.processes}-processes"
    return [stand(clause, case, found[clause]()) for clause in SECURITY if clause in clauses]


def _launch(bench: Bench, run: RunDir, on_tick: Callable[[], None]) -> None:
    def tick() -> None:
        bench.on_tick()
        on_tick()

    size = (f"cluster.devices_per_node={bench.processes}", "cluster.num_nodes=1")
    launch(replace(bench, on_tick=tick), run.root.name, (*RECIPE, *size, f"run.dir={run.root}"))


def _last_step(run: RunDir) -> int:
    if not run.events(0).exists():
        return 0
    return max((event.step for event in read_sound(run.events(0)) if isinstance(event, StepEvent)), default=0)


# What is judged


def _judge_ports(ports: set[tuple[str, int]]) -> Figures:
    beyond = sorted({address for address, _ in ports if not ipaddress.ip_address(address).is_loopback})
    return {"listening": float(len(ports)), "beyond": ", ".join(beyond) or "none"}


def _judge_strangers(bench: Bench, alone: RunDir, molested: RunDir, stranger: Stranger, marker: Path) -> Figures:
    _launch(bench, alone, lambda: None)
    digests = [result.weights_sha256 if (result := read_result(run)) else None for run in (molested, alone)]
    result = read_result(molested)
    is_well = result is not None and result.status == "done" and not result.recoveries
    return {
        "ports": float(len(stranger.ports)),
        "sha256": str(digests[0]),
        "left_alone": str(digests[1]),
        "ended": "well" if is_well else "not well",
        "their_code": "was run" if marker.exists() else "was not run",
    }


def _judge_modes(root: Path) -> Figures:
    every = [root, *root.rglob("*")]
    opened = [path for path in every if not path.is_symlink() and path.stat().st_mode & PRIVATE_UMASK]
    figures: Figures = {"files": float(len(every)), "open": float(len(opened))}
    if opened:
        figures["first"] = str(opened[0].relative_to(root.parent))
    return figures


def _judge_alterations(bench: Bench, run: RunDir, folder: Path) -> Figures:
    """Alter a copy of the run in one place at a time, and have it resumed."""
    figures: Figures = {"certificate": _offer_certificate(bench, folder)}
    for name, alter in (("checkpoint", _alter_checkpoint), ("plan", _alter_plan)):
        copy = RunDir(folder / name)
        shutil.copytree(run.root, copy.root, symlinks=True)
        altered = alter(copy)
        end = _resume(bench, copy)
        known = end.exit_code not in (0, 1) and end.exit_code in EXIT_CODES
        is_named = altered.name in end.output and "Traceback" not in end.output
        figures[name] = "refused" if known and is_named else f"exit code {end.exit_code}: {end.output[-200:]}"
    return figures


def _alter_checkpoint(run: RunDir) -> Path:
    shard = min(run.checkpoint(max(run.checkpoint_steps())).glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    return shard


def _alter_plan(run: RunDir) -> Path:
    plan = json.loads(run.plan_json.read_text(encoding="utf-8"))
    plan["spec"]["optim"]["lr"] *= 2
    run.plan_json.write_text(json_text(plan), encoding="utf-8")
    return run.plan_json


def _resume(bench: Bench, run: RunDir) -> ProgramEnd:
    more = f"train.max_steps={STEPS + 2}"
    command = (sys.executable, "-m", "trainspec_cli", "resume", str(run.root), more)
    program = Program(command, bench.folder / "launches" / run.root.name, "a resume", RESUMED_S)
    return run_program(program, {}, bench.on_tick)


def _offer_certificate(bench: Bench, folder: Path) -> str:
    """Return what became of a certificate with another verdict, under the digest that anybody can make of it."""
    written = write_certificate((), bench.machine, date="2026-01-01", whole=False)
    body = to_plain(replace(written, verdict="broken"))
    altered = folder / "certificate.json"
    altered.write_text(json_text(body | {"digest": digest(body)}), encoding="utf-8")
    try:
        verify(altered)
    except RecipeError:
        return "refused"
    return "accepted"
