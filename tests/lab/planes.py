"""Hosts on one machine that are joined by several planes: a veth port of each host on a switch of each plane.

Connections are spread over the planes by the kernel's multipath TCP (RFC 8684). It is no RDMA, and no packets are
sprayed: each connection has one subflow a plane, each with a congestion window of its own, and a scheduler puts the
next bytes on the one that has room. Needs root, iproute2, a C compiler and a kernel with MPTCP.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab import hosts
from lab.fabric import MTU
from lab.hosts import PREFIX, run

SWITCHES = f"{PREFIX}-planes"
NET = "10.79"
FIRST_PORT = 9000
"""On which a host listens on each plane for the further subflows of its connections."""
QUEUE_BYTES = 2**17
MPTCP = 262
SYSCTLS = (
    *("net.mptcp.enabled=1", "net.mptcp.stale_loss_cnt=1", "net.ipv4.tcp_congestion_control=reno"),
    *("net.ipv4.tcp_rto_max_ms=1000", "net.ipv4.tcp_retries2=200"),
    *("net.ipv4.tcp_pacing_ss_ratio=100", "net.ipv4.tcp_pacing_ca_ratio=100"),
    *("net.ipv4.tcp_rmem=4096 8388608 33554432", "net.ipv4.tcp_wmem=4096 8388608 33554432"),
)
"""A plane that loses what is sent on it is left out after one timeout, is tried again each second, and is not given up
for minutes. The scheduler takes a subflow's pacing rate for its speed: it is the measured one, also where nothing was
ever lost."""


def lacking() -> str:
    """Why planes cannot be made here; empty where they can."""
    if why := hosts.lacking():
        return why
    if not shutil.which("cc"):
        return "no C compiler (apt-get install gcc)"
    try:
        socket.socket(socket.AF_INET, socket.SOCK_STREAM, MPTCP).close()
    except OSError as error:
        return f"no multipath TCP in this kernel: {error}"
    return "" if Path("/proc/sys/net/ipv4/tcp_rto_max_ms").exists() else "the kernel is older than Linux 6.15"


class Planes:
    """`count` hosts with a port of `mbit_per_s` on each plane."""

    def __init__(self, count: int, planes: int, mbit_per_s: float):
        self.count, self.planes = count, planes
        run("ip", "netns", "add", SWITCHES)
        for plane in range(planes):
            kind = ("type", "bridge", "stp_state", 0, "forward_delay", 0)
            run("ip", "-n", SWITCHES, "link", "add", f"plane{plane}", *kind)
            run("ip", "-n", SWITCHES, "link", "set", f"plane{plane}", "mtu", MTU, "up")
        for host in range(count):
            run("ip", "netns", "add", namespace_of(host))
            run("ip", "-n", namespace_of(host), "link", "set", "lo", "up")
            run("ip", "netns", "exec", namespace_of(host), "sysctl", "-qw", *SYSCTLS)
            most = planes * 2
            run("ip", "-n", namespace_of(host), "mptcp", "limits", "set", "subflows", most, "add_addr_accepted", most)
            for plane in range(planes):
                self._plug_in(host, plane, mbit_per_s)

    def _plug_in(self, host: int, plane: int, mbit_per_s: float) -> None:
        name, link, port = namespace_of(host), f"eth{plane}", f"h{host}p{plane}"
        run("ip", "link", "add", link, "netns", name, "type", "veth", "peer", "name", port, "netns", SWITCHES)
        run("ip", "-n", name, "addr", "add", f"{address_of(host, plane)}/24", "dev", link)
        for namespace, end in ((name, link), (SWITCHES, port)):
            run("ip", "-n", namespace, "link", "set", end, "mtu", MTU, "up")
            limit = ("tbf", "rate", f"{mbit_per_s * 1e3:.0f}kbit", "burst", 2 * MTU, "limit", QUEUE_BYTES)
            run("tc", "-n", namespace, "qdisc", "replace", "dev", end, "root", *limit)
        run("ip", "-n", SWITCHES, "link", "set", port, "master", f"plane{plane}")
        if plane:  # the first carries the subflow that a connection begins with
            listens = ("dev", link, "port", FIRST_PORT + plane, "signal")
            run("ip", "-n", name, "mptcp", "endpoint", "add", address_of(host, plane), *listens)

    def cut(self, plane: int) -> None:
        """The plane's switch forwards nothing, and no host notices: its links stay up."""
        run("ip", "-n", SWITCHES, "link", "set", f"plane{plane}", "down")

    def heal(self, plane: int) -> None:
        run("ip", "-n", SWITCHES, "link", "set", f"plane{plane}", "up")

    def carried_bytes(self) -> list[int]:
        """Return what the first host's port on each plane has received since it was plugged in."""
        shown = (run("ip", "-n", SWITCHES, "-s", "-o", "link", "show", f"h0p{plane}") for plane in range(self.planes))
        return [int(line.partition("TX:")[2].split("\\")[1].split()[0]) for line in shown]

    def remove(self) -> None:
        for name in (*map(namespace_of, range(self.count)), SWITCHES):
            run("ip", "netns", "del", name)


def namespace_of(host: int) -> str:
    return f"{PREFIX}-n{host}"


def address_of(host: int, plane: int) -> str:
    return f"{NET}.{plane}.{host + 1}"


class Job:
    """Processes, one a host, that sum `message_bytes` by gloo's all-reduce again and again (`lab.summing`)."""

    def __init__(self, planes: Planes, message_bytes: int, folder: Path):
        here, library = Path(__file__).parent, folder / "multipath.so"
        compile_it = ("cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(here / "multipath.c"), "-ldl")
        subprocess.run(compile_it, check=True)
        environment = os.environ | {"LD_PRELOAD": str(library), "GLOO_SOCKET_IFNAME": "eth0"}
        self._processes = [
            subprocess.Popen(
                [
                    *("nsenter", f"--net=/run/netns/{namespace_of(host)}", "nice", "-n", "-10"),
                    *(sys.executable, "-W", "ignore"),
                    *(str(here / "summing.py"), str(host), str(planes.count), str(folder / "store")),
                    str(message_bytes),
                ],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=(folder / f"errors.{host}").open("w"),
            )
            for host in range(planes.count)
        ]
        self._folder = folder

    def next_end_s(self) -> float:
        """Return when the next sum was done, by the machine's clock. Raises AssertionError where the job has ended."""
        printed = self._processes[0].stdout
        assert printed is not None
        line = printed.readline()
        assert line, "".join((self._folder / f"errors.{host}").read_text() for host in range(len(self._processes)))
        return float(line)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@contextmanager
def open_job(count: int, planes: int, mbit_per_s: float, message_bytes: int) -> Iterator[tuple[Planes, Job]]:
    """Make hosts and planes, and start a job on them."""
    made = Planes(count, planes, mbit_per_s)
    try:
        with tempfile.TemporaryDirectory() as folder:
            job = Job(made, message_bytes, Path(folder))
            try:
                yield made, job
            finally:
                job.stop()
    finally:
        made.remove()
