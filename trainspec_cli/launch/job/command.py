"""The torchrun command line, and its rendering as a text a person can paste into a shell."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainspec_cli.launch.job.place import NodePlace, own_address

ENGINE = ("-m", "trainspec_cli.engine")

LOOPBACK = "127.0.0.1"


def torchrun_command(processes: int, logs: Path, worker: Sequence[str]) -> tuple[str, ...]:
    """Start `worker` (`-m module` or a script, and its arguments) `processes` times on this node.

    They meet in a file: no port is opened. Output goes to LOGS/workers_*/attempt_0/<local rank>/{stdout,stderr}.log.
    """
    return (*_TORCHRUN, "--nnodes", "1", *_options("workers", processes, LOOPBACK, logs), *worker)


def node_command(place: NodePlace, name: str, processes: int, logs: Path, worker: Sequence[str]) -> tuple[str, ...]:
    """Return one node's part of a job of several. Ranks follow the nodes' numbers.

    `name` tells this start from others that meet at the same rendezvous server. torchrun is given this node's address:
    left to itself it asks for the name's, which may be a loopback.
    """
    nodes = ("--nnodes", str(place.num_nodes), "--rdzv-conf", f"node={place.node}")
    return (*_TORCHRUN, *nodes, *_options(name, processes, own_address(place.head), logs), *worker)


_TORCHRUN = (sys.executable, "-m", "trainspec_cli.engine.comm.torchrun")


def _options(name: str, processes: int, address: str, logs: Path) -> tuple[str, ...]:
    return (
        *("--nproc-per-node", str(processes)),
        *("--max-restarts", "0"),
        *("--rdzv-backend", "trainspec"),
        *("--rdzv-endpoint", "private"),  # torchrun wants one; the environment says where they meet
        *("--rdzv-id", name),
        *("--local-addr", address),
        *("--log-dir", str(logs)),
        *("--redirects", "3"),
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
