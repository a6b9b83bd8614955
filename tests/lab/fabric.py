"""A fabric of several tiers on one machine: devices are network namespaces, switches are bridges, links have rates.

The kernel's token buckets (tbf) limit the links. Delays come from a relay between two TAP devices, since not every
kernel has netem. Needs root and iproute2, as `lab.hosts` does; the machine's own network is not touched.
"""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lab.hosts import PREFIX, run

SWITCHES = f"{PREFIX}-fabric"
NET = "10.78.1"
MTU = 9000
QUEUE_BYTES = 32 * 2**20
"""Nothing is dropped: a sender is held back by its own buffer."""
SYSCTLS = (
    *("net.ipv4.tcp_congestion_control=reno", "net.ipv4.tcp_slow_start_after_idle=0"),
    *("net.ipv4.tcp_rmem=4096 8388608 33554432", "net.ipv4.tcp_wmem=4096 8388608 33554432"),
)
"""Windows are open from the start: exchanges of a job follow one another for days."""


@dataclass(frozen=True)
class Tier:
    """A tier of the fabric, in the terms of `cluster.fabric.tiers`."""

    devices: int
    """Below one of its elements, which is a switch."""
    mbit_per_s: float
    """A device's share, each way."""
    delay_ms: float = 0.0
    """Milliseconds that a message takes to cross the tier, one way."""


class EmulatedFabric:
    """Devices 0, 1, ... below switches of each tier; the first tier's share is a device's own link."""

    def __init__(self, tiers: Sequence[Tier]):
        self.devices = tiers[-1].devices
        self._relays: list[subprocess.Popen[bytes]] = []
        run("ip", "netns", "add", SWITCHES)
        for level, tier in enumerate(tiers):
            for element in range(self.devices // tier.devices):
                self._add_switch(f"s{level}-{element}")
        for device in range(self.devices):
            self._plug_in(device, f"s0-{device // tiers[0].devices}", tiers[0].mbit_per_s)
        for level, (below, tier) in enumerate(pairwise(tiers)):
            mbit_per_s = below.devices * tier.mbit_per_s
            for element in range(self.devices // below.devices):
                upper = f"s{level + 1}-{element * below.devices // tier.devices}"
                # A message passes two of these links.
                self._join(f"s{level}-{element}", upper, mbit_per_s, (tier.delay_ms - below.delay_ms) / 2)

    def remove(self) -> None:
        for relay in self._relays:
            relay.kill()
            relay.wait()
        for name in (*map(namespace_of, range(self.devices)), SWITCHES):
            run("ip", "netns", "del", name)

    def _add_switch(self, name: str) -> None:
        run("ip", "-n", SWITCHES, "link", "add", name, "type", "bridge", "stp_state", 0, "forward_delay", 0)
        run("ip", "-n", SWITCHES, "link", "set", name, "mtu", MTU, "up")

    def _plug_in(self, device: int, switch: str, mbit_per_s: float) -> None:
        name, port = namespace_of(device), f"d{device}"
        run("ip", "netns", "add", name)
        ends = ("type", "veth", "peer", "name", port, "netns", SWITCHES)
        run("ip", "link", "add", "eth0", "netns", name, *ends)
        for namespace, link in ((name, "eth0"), (SWITCHES, port)):
            run("ip", "-n", namespace, "link", "set", link, "mtu", MTU, "up")
            _limit_rate(namespace, link, mbit_per_s)
        run("ip", "-n", SWITCHES, "link", "set", port, "master", switch)
        run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", name, "addr", "add", f"{NET}.{device + 1}/24", "dev", "eth0")
        run("ip", "netns", "exec", name, "sysctl", "-qw", *SYSCTLS)

    def _join(self, lower: str, upper: str, mbit_per_s: float, delay_ms: float) -> None:
        ends = f"{lower}u", f"{lower}d"
        if delay_ms > 0:
            command = ("nsenter", f"--net=/run/netns/{SWITCHES}", sys.executable)
            script = str(Path(__file__).with_name("relay.py"))
            self._relays.append(subprocess.Popen([*command, script, *ends, str(delay_ms)], stdout=subprocess.PIPE))
            started = self._relays[-1].stdout
            assert started is not None and started.readline() == b"ready\n"
        else:
            run("ip", "-n", SWITCHES, "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for end, switch in zip(ends, (lower, upper), strict=True):
            run("ip", "-n", SWITCHES, "link", "set", end, "mtu", MTU, "up", "master", switch)
            _limit_rate(SWITCHES, end, mbit_per_s)


def namespace_of(device: int) -> str:
    return f"{PREFIX}-d{device}"


def enter(namespace: str) -> None:
    """Move this process, which has one thread, into a network namespace. Raises OSError."""
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    finally:
        os.close(descriptor)


def _limit_rate(namespace: str, link: str, mbit_per_s: float) -> None:
    """A burst of a millisecond, and of a packet at least, so that no message passes for nothing."""
    burst = max(2 * MTU, math.ceil(mbit_per_s * 1e6 / 8 / 1e3))
    limit = ("tbf", "rate", f"{mbit_per_s * 1e3:.0f}kbit", "burst", burst, "limit", QUEUE_BYTES)
    run("tc", "-n", namespace, "qdisc", "replace", "dev", link, "root", *limit)
