"""Hosts on one machine: a network namespace each, joined by cables (veth) to a switch in a namespace of its own.

Needs root, iproute2 and nft, which drops packets: not every kernel has netem (CONFIG_NET_SCH_NETEM). The machine's own
network is not touched.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

PREFIX, NET = f"tspec{os.getpid()}", "10.77.1"
"""Every session has names of its own, and a switch that joins no other's hosts."""
SWITCH = f"{PREFIX}-switch"
SWITCH_ADDRESS = f"{NET}.254"
HOSTS_FILES = Path("/run") / PREFIX
GSO_MAX_SEGS = 65535
"""The kernel's own."""


def lacking() -> str:
    """Why hosts cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "nft", "nsenter", "unshare") if not shutil.which(tool)]
    if missing:
        return f"{', '.join(missing)} not installed (apt-get install iproute2 nftables util-linux)"
    probe = subprocess.run(["ip", "netns", "add", f"{PREFIX}-probe"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", f"{PREFIX}-probe"], capture_output=True)
    return f"no network namespaces here: {probe.stderr.strip()}" if probe.returncode else ""


def run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


class Hosts:
    """Hosts 1 to `count`, named node1, node2, ... with addresses `NET`.1, .2, ..."""

    def __init__(self, count: int):
        self.count = count
        self._relays: list[subprocess.Popen[bytes]] = []
        HOSTS_FILES.mkdir(parents=True, exist_ok=True)
        names = "".join(f"{NET}.{i} node{i}\n" for i in self.numbers)
        self._hosts_file = HOSTS_FILES / "hosts"
        self._hosts_file.write_text(f"127.0.0.1 localhost\n{SWITCH_ADDRESS} switch\n{names}")
        run("ip", "netns", "add", SWITCH)
        run("ip", "-n", SWITCH, "link", "set", "lo", "up")
        run("ip", "-n", SWITCH, "link", "add", "br0", "type", "bridge", "stp_state", 0, "forward_delay", 0)
        run("ip", "-n", SWITCH, "addr", "add", f"{SWITCH_ADDRESS}/24", "dev", "br0")
        run("ip", "-n", SWITCH, "link", "set", "br0", "up")
        for number in self.numbers:
            self._plug_in(number)

    @property
    def numbers(self) -> range:
        return range(1, self.count + 1)

    @staticmethod
    def address(number: int) -> str:
        return f"{NET}.{number}"

    def inside(self, number: int) -> list[str]:
        """What goes before a command to run it on a host: its network, its name, its /etc/hosts.

        Not `ip netns exec`, which mounts a /sys of its own, without the control groups that slurmd wants.
        """
        script = 'hostname "$0"; mount --bind "$1" /etc/hosts; shift; exec "$@"'
        enter = ["nsenter", f"--net=/run/netns/{_name(number)}"]
        own = ["unshare", "--uts", "--mount", "--propagation", "slave"]
        return [*enter, *own, "sh", "-c", script, f"node{number}", str(self._hosts_file)]

    @staticmethod
    def beside_switch() -> list[str]:
        """For a program that every host reaches and none is (the controller)."""
        return ["nsenter", f"--net=/run/netns/{SWITCH}"]

    def cut(self, number: int) -> None:
        """Pull the cable: nothing goes in or out, and no program is notified."""
        run("ip", "-n", SWITCH, "link", "set", f"p{number}", "down")

    def heal(self, number: int) -> None:
        run("ip", "-n", SWITCH, "link", "set", f"p{number}", "up")

    def make_good(self, number: int) -> None:
        """A cable that is whole, loses nothing and has no limit, whatever was done to it."""
        self.heal(number)
        inside = ("ip", "netns", "exec", _name(number), "nft")
        run(*inside, "flush", "ruleset")
        run("ip", "-n", _name(number), "link", "set", "eth0", "gso_max_segs", GSO_MAX_SEGS)
        for namespace, link in self._ends(number):
            if "tbf" in run("tc", "-n", namespace, "qdisc", "show", "dev", link):
                run("tc", "-n", namespace, "qdisc", "del", "dev", link, "root")

    def limit_rate(self, number: int, rate: str) -> None:
        """Both ways, such as `100mbit`."""
        for namespace, link in self._ends(number):
            limit = ("tbf", "rate", rate, "burst", "128kb", "latency", "50ms")
            run("tc", "-n", namespace, "qdisc", "replace", "dev", link, "root", *limit)

    def lose(self, number: int, percent: float) -> None:
        """A part of what comes in is dropped at random, packet by packet, because packets are never merged."""
        for link in self.numbers:
            run("ip", "-n", _name(link), "link", "set", "eth0", "gso_max_segs", 1)
        table = "table inet trainspec { chain in { type filter hook input priority 0; policy accept; }; }"
        inside = ("ip", "netns", "exec", _name(number), "nft")
        subprocess.run([*inside, "-f", "-"], input=table, text=True, check=True)
        share = ("numgen", "random", "mod", 10000, "<", int(percent * 100), "counter", "drop")
        run(*inside, "add", "rule", "inet", "trainspec", "in", "iifname", "eth0", *share)

    def delay(self, number: int, milliseconds: float) -> None:
        """Delay each frame by this time, in both directions: the cable is plugged into a relay before the switch.

        Once for each host; the relay ends with `remove`.
        """
        ends = (f"ta{number}", f"tb{number}")
        relay = [sys.executable, str(Path(__file__).parent / "relay.py"), *ends, str(milliseconds)]
        started = subprocess.Popen([*self.beside_switch(), *relay], stdout=subprocess.PIPE)
        self._relays.append(started)
        assert started.stdout is not None and started.stdout.readline() == b"ready\n", "the relay did not start"
        run("ip", "netns", "exec", _name(number), "ip", "link", "set", "eth0", "gso_max_segs", 1)
        run("ip", "-n", SWITCH, "link", "add", f"d{number}", "type", "bridge", "stp_state", 0, "forward_delay", 0)
        run("ip", "-n", SWITCH, "link", "set", f"d{number}", "up")
        run("ip", "-n", SWITCH, "link", "set", ends[0], "master", f"d{number}", "up")
        run("ip", "-n", SWITCH, "link", "set", ends[1], "master", "br0", "up")
        run("ip", "-n", SWITCH, "link", "set", f"p{number}", "master", f"d{number}")

    def passed_bytes(self, number: int) -> int:
        """Return the bytes that the busier direction of a host's cable has carried."""
        (shown,) = json.loads(run("ip", "-n", SWITCH, "-s", "-j", "link", "show", f"p{number}"))
        return int(max(shown["stats64"][way]["bytes"] for way in ("rx", "tx")))

    def lost_packets(self, number: int) -> int:
        """Return the number of packets lost since the first `lose`."""
        shown = run("ip", "netns", "exec", _name(number), "nft", "list", "ruleset")
        return sum(map(int, re.findall(r"counter packets (\d+)", shown)))

    def remove(self) -> list[int]:
        """-> processes that still ran there; they are killed."""
        for relay in self._relays:
            relay.kill()
            relay.wait()
        left = _remove_all()
        shutil.rmtree(HOSTS_FILES, ignore_errors=True)
        return left

    @staticmethod
    def _ends(number: int) -> tuple[tuple[str, str], ...]:
        """The ends of a cable: (namespace, link)"""
        return (_name(number), "eth0"), (SWITCH, f"p{number}")

    def _plug_in(self, number: int) -> None:
        name = _name(number)
        run("ip", "netns", "add", name)
        run("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"p{number}", "netns", SWITCH)
        run("ip", "-n", SWITCH, "link", "set", f"p{number}", "master", "br0", "up")
        run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        run("ip", "-n", name, "link", "set", "eth0", "up")
        # Some congestion controls pass over loss, which is to be felt here.
        run("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno")


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _name(number: int) -> str:
    return f"{PREFIX}-{number}"


def node_processes(number: int) -> list[int]:
    """Return the ids of all processes on a host."""
    return _pids(_name(number))


def _pids(namespace: str) -> list[int]:
    return [int(pid) for pid in run("ip", "netns", "pids", namespace).split()]


def _remove_all() -> list[int]:
    left: list[int] = []
    for name in namespaces():
        left += _pids(name)
        for pid in _pids(name):
            kill(pid)
        run("ip", "netns", "del", name)
    return left


def namespaces() -> list[str]:
    """Of this session."""
    names = (line.split()[0] for line in run("ip", "netns", "list").splitlines())
    return [name for name in names if name.startswith(f"{PREFIX}-")]
