"""Where one host stands in a job of several: its number, the first host's address, and its own as seen from there."""

from __future__ import annotations

import contextlib
import random
import socket
from dataclasses import dataclass

import psutil

from trainspec_cli.errors import MachineError, Problem

LISTENING_PORTS = (15_000, 32_000)
"""Below those that Linux (32768) and macOS (49152) give to outgoing connections."""


@dataclass(frozen=True)
class Place:
    node: int
    """0 is the host that torchrun's store stands on."""
    num_nodes: int
    head: str
    """The first host's name or address."""
    rendezvous_port: int


def free_port() -> int:
    """One that nobody listens on now, and that the kernel gives to no connection meanwhile: those are higher."""
    while True:
        port = random.randrange(*LISTENING_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def own_address(head: str) -> str:
    """This host's address on the way to `head`; nothing is sent. Raises MachineError where there is no way."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(head, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as way:
            way.connect(address)
            return str(way.getsockname()[0])
    except OSError as error:
        message = f"{socket.gethostname()} finds no way to the first host, {head}: {error.strerror or error}"
        hint = f"look whether its name is known here (getent hosts {head}) and the network is up (ip address)"
        raise MachineError(Problem("no_route", message, hint=hint, environment=True)) from error


def interface_of(address: str) -> str | None:
    """The network interface that holds `address`."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, held in interfaces if any(entry.address == address for entry in held)), None)
