"""One node's place in a job of several: its number, the first node's address, and its own as seen from there."""

from __future__ import annotations

import ipaddress
import resource
import socket
from dataclasses import dataclass

import psutil

from trainspec_cli.core.errors import MachineError, Problem

BACKLOG = 1024
SPARE_DESCRIPTORS = 512


@dataclass(frozen=True)
class NodePlace:
    node: int
    """0 is the node of the supervisor and the rendezvous server."""
    num_nodes: int
    head: str
    """The first node's name or address."""


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at this node's address `host` alone. Raises MachineError."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        message = f"{socket.gethostname()} cannot listen at {host or 'any address'}:{port}: {error.strerror or error}"
        hint = "give another port, that nobody listens on"
        raise MachineError(Problem("cannot_listen", message, hint=hint, environment=True)) from error


def allow_connections(connections: int) -> None:
    """Raise the limit of open files for so many more than a process usually has, as far as the system lets it."""
    wanted = connections + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    while soft != resource.RLIM_INFINITY and soft < allowed:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            break
        except (ValueError, OSError):  # macOS takes less than it says
            allowed //= 2


def listening_address(head: str) -> str:
    """Return the address at which the first node, this one, listens for the others: that of the job's interface.

    Where its own name means a loopback here (as in many an /etc/hosts) and another address elsewhere, it has to be
    every interface: "".
    """
    address = own_address(head)
    named = head != "localhost" and not _is_address(head)
    return "" if named and ipaddress.ip_address(address).is_loopback else address


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def own_address(head: str) -> str:
    """Return this node's address on the way to `head`; nothing is sent. Raises MachineError where there is no way."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(head, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as way:
            way.connect(address)
            return str(way.getsockname()[0])
    except OSError as error:
        message = f"{socket.gethostname()} finds no way to the first node, {head}: {error.strerror or error}"
        hint = f"check that its name is known here (getent hosts {head}) and the network is up (ip address)"
        raise MachineError(Problem("no_route", message, hint=hint, environment=True)) from error


def interface_of(address: str) -> str | None:
    """Return the network interface that holds `address`."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, held in interfaces if any(entry.address == address for entry in held)), None)
