"""Places without a way out: a network namespace with its loopback alone, or one that refuses and records each call.

Needs root, iproute2, nft and util-linux. The machine's own network is not touched.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab import name_server
from lab.hosts import run
from lab.name_server import ADDRESS

TOOLS = ("ip", "nft", "nsenter", "unshare")
RECORDING = """
table inet calls {
  set to4 { type ipv4_addr . inet_service; flags dynamic; }
  set to6 { type ipv6_addr . inet_service; flags dynamic; }
  chain out {
    type filter hook output priority 0; policy accept;
    oifname "lo" accept
    meta l4proto { tcp, udp } add @to4 { ip daddr . th dport } reject
    meta l4proto { tcp, udp } add @to6 { ip6 daddr . th dport } reject
    meta l4proto != ipv6-icmp counter reject
  }
}
"""


def lacking() -> str:
    """Why there can be no such place here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        return f"{', '.join(missing)} not installed (apt-get install iproute2 nftables util-linux)"
    probe = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True)
    return f"no network namespaces here: {probe.stderr.strip()}" if probe.returncode else ""


def require() -> None:
    """Skip the test where there can be no such place."""
    if why := lacking():
        pytest.skip(why)


def without_route(command: list[str]) -> list[str]:
    """Return a command that runs `command` where there is a loopback and nothing else: no route, no name server."""
    script = 'ip link set lo up; mount --bind /dev/null /etc/resolv.conf; exec "$@"'
    return ["unshare", "--net", "--mount", "sh", "-ec", script, "sh", *command]


class Listening:
    """A network namespace with a default route that leads nowhere: what takes it is refused and recorded, whichever
    process it is of. Names are resolved by a server that records them and knows none."""

    def __init__(self, folder: Path):
        self._name = f"tspec{os.getpid()}-calls"
        self._resolv, self._names_file = folder / "resolv.conf", folder / "names"
        self._resolv.write_text(f"nameserver {ADDRESS}\noptions timeout:1 attempts:1\n")
        self._names_file.touch()

    def inside(self, command: list[str]) -> list[str]:
        script = 'mount --bind "$0" /etc/resolv.conf; exec "$@"'
        own = ["unshare", "--mount", "sh", "-ec", script, str(self._resolv)]
        return ["nsenter", f"--net=/run/netns/{self._name}", *own, *command]

    def calls(self) -> list[str]:
        """Return the addresses that were called, with ports, and the names that were looked up."""
        listed = json.loads(run("ip", "netns", "exec", self._name, "nft", "-j", "list", "ruleset"))["nftables"]
        called = [element for entry in listed for element in entry.get("set", {}).get("elem", [])]
        addresses = [":".join(map(str, element["concat"])) for element in called]
        rules = [part for entry in listed for part in entry.get("rule", {}).get("expr", [])]
        others = sum(part["counter"]["packets"] for part in rules if "counter" in part)
        return sorted([*addresses, *self._names_file.read_text().split(), *["another protocol"] * others])

    @contextmanager
    def open(self) -> Iterator[Listening]:
        run("ip", "netns", "add", self._name)
        server = None
        try:
            self._connect()
            program = [sys.executable, name_server.__file__, str(self._names_file)]
            server = subprocess.Popen(self.inside(program), stdout=subprocess.PIPE)
            assert server.stdout is not None and server.stdout.readline() == b"ready\n", "no name server"
            yield self
        finally:
            if server is not None:
                server.kill()
                server.wait()
            run("ip", "netns", "del", self._name)

    def _connect(self) -> None:
        ip = ("ip", "-n", self._name)
        run(*ip, "link", "set", "lo", "up")
        run(*ip, "link", "add", "out", "type", "veth", "peer", "name", "nowhere")
        for link in ("out", "nowhere"):
            run(*ip, "link", "set", link, "up")
        run(*ip, "addr", "add", "192.0.2.1/24", "dev", "out")
        run(*ip, "route", "add", "default", "via", "192.0.2.254")
        run(*ip, "addr", "add", "2001:db8::1/64", "dev", "out", "nodad")
        run(*ip, "-6", "route", "add", "default", "via", "2001:db8::fe")
        inside = ["ip", "netns", "exec", self._name, "nft", "-f", "-"]
        subprocess.run(inside, input=RECORDING, text=True, check=True)
