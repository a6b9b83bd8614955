"""The torchrun command line, and its rendering as a text a person can paste into a shell."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainspec_cli.launch.place import Place, own_address

ENGINE = ("-m", "trainspec_cli.engine")

LOOPBACK = "127.0.0.1"


def torchrun_command(processes: int, logs: Path, worker: Sequence[str]) -> tuple[str, ...]:
    """Start `worker` (`-m module` or a script, and its arguments) `processes` times on this host.

    The rendezvous binds to port 0, so that torchrun itself takes a free one and no other process can snatch it
    in between. Output goes to files: LOGS/workers_*/attempt_0/<local rank>/{stdout,stderr}.log.
    """
    return (
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "1"),
        *("--nproc-per-node", str(processes)),
        *("--max-restarts", "0"),
        *("--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"{LOOPBACK}:0"),
        *("--rdzv-id", "workers"),
        *("--local-addr", LOOPBACK),
        *("--log-dir", str(logs)),
        *("--redirects", "3"),
        *worker,
    )


def node_command(place: Place, processes: int, logs: Path, worker: Sequence[str]) -> tuple[str, ...]:
    """One host's part of a job of several. Ranks follow the hosts' numbers; the first host's torchrun holds the store.

    torchrun is told this host's address: left to itself it asks for the name's, which may be a loopback.
    """
    return (
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(place.num_nodes)),
        *("--node-rank", str(place.node)),
        *("--nproc-per-node", str(processes)),
        *("--max-restarts", "0"),
        *("--rdzv-backend", "static"),
        *("--master-addr", place.head),
        *("--master-port", str(place.rendezvous_port)),
        *("--rdzv-id", "workers"),
        *("--local-addr", own_address(place.head)),
        *("--log-dir", str(logs)),
        *("--redirects", "3"),
        *worker,
    )


def render_command(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> str:
    """A shell text that does the same as the launch, one setting and one option a line."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    lines = [f"cd {shlex.quote(str(folder))} && env", *settings, *_option_lines(command)]
    return " \\\n  ".join(lines) + "\n"


def _option_lines(command: Sequence[str]) -> list[str]:
    """Keep an option and its value on one line."""
    lines: list[str] = []
    for word in map(shlex.quote, command):
        if lines and lines[-1].startswith("-") and not word.startswith("-") and " " not in lines[-1]:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
