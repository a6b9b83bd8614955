"""A real Slurm on one machine: munged, slurmctld and a slurmd for each node, with ports and files of its own.

`Cluster(n)` gives every node 127.0.0.1; `Cluster(n, hosts)` puts each into a network namespace, with a name, an address
and a cable. Needs root, and Debian's slurm-wlm and munge.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from lab.hosts import SWITCH_ADDRESS, Hosts
from lab.waiting import PATIENCE_S
from trainspec_cli.run.backend.processes import rank_of

DAEMONS = ("munged", "slurmctld", "slurmd")
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 20.0
"""A step's daemon waits for its processes before it ends."""
GRACE_S = 60
"""Seconds that a preempted job has to save."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


def lacking() -> str:
    """Why there can be no Slurm here; empty where there can."""
    if os.geteuid() != 0:
        return "slurmd runs as root"
    missing = [daemon for daemon in DAEMONS if not shutil.which(daemon)]
    return f"{', '.join(missing)} not installed (apt-get install slurm-wlm munge)" if missing else ""


class Cluster:
    def __init__(
        self,
        folder: Path,
        nodes: int,
        hosts: Hosts | None = None,
        slurmd_timeout_s: int = 10,
        switches: Sequence[str] = (),
    ):
        """`switches`: lines of topology.conf; none leaves Slurm without a topology."""
        self.folder, self.count, self.hosts, self._switches = folder, nodes, hosts, switches
        self._slurmd_timeout_s = slurmd_timeout_s
        for name in ("state", "spool", "log", "dev"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        self._daemons: dict[str, psutil.Process] = {}
        self._port = _free_ports(nodes + 1)
        self._write_files()
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    @property
    def beside_controller(self) -> list[str]:
        """What goes before a client's command, so that it reaches the controller."""
        return self.hosts.beside_switch() if self.hosts else []

    # What a user does

    def run(self, *command: object, user: str | None = None, check: bool = True, **more: object) -> str:
        """A client command, where it can reach the controller; -> what it prints."""
        before = [*self.beside_controller, *_as(user)]
        done = subprocess.run(
            [*before, *map(str, command)],
            env=self.environment | dict(more.pop("env", {})),  # type: ignore[call-overload]
            capture_output=True,
            text=True,
            timeout=120,
            **more,  # type: ignore[call-overload]
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def show(self, job: str) -> dict[str, str]:
        words = self.run("scontrol", "show", "job", job, "--oneliner").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, job: str) -> str:
        return self.show(job)["JobState"]

    def wait(self, job: str) -> dict[str, str]:
        """Until the job has ended for good; -> what Slurm says of it."""
        self.wait_until(lambda: self.state(job) in ENDED, f"job {job} to end")
        return self.show(job)

    def wait_until(self, holds: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, f"waited in vain for {what}\n{self.run('squeue')}\n{self.run('sinfo')}"
            time.sleep(0.1)

    # What happens to hardware

    def power_off(self, node: int) -> None:
        """Kill everything on the node together: its daemon, the steps, and all that they started."""
        daemon = self._daemons.pop(f"node{node}")
        steps = self._steps_of(node)
        victims = [child for process in steps for child in _below(process)]
        for process in [daemon, *steps, *victims, *self._strays(node)]:
            _kill(process)

    def power_on(self, node: int) -> None:
        self._start_node(node)

    def processes_of(self, node: int) -> list[psutil.Process]:
        return [child for process in self._steps_of(node) for child in _below(process)]

    def worker_on(self, node: int) -> psutil.Process:
        """The one with a rank of its own, of a job of one process a node."""
        return next(process for process in self.processes_of(node) if rank_of(process) is not None)

    def daemon_of(self, node: int) -> psutil.Process:
        return self._daemons[f"node{node}"]

    @staticmethod
    def environment_of(process: psutil.Process) -> dict[str, str]:
        """Empty for one that has ended."""
        try:
            return dict(process.environ())
        except (psutil.Error, OSError):
            return {}

    def reset(self) -> None:
        """No jobs, all nodes idle."""
        self.run("scancel", "--user=root", "--signal=KILL", "--full", check=False)
        self.run("scancel", "--user=root", check=False)
        for job in self.run("squeue", "--noheader", "--format=%A").split():
            self.run("scancel", job, check=False)
        for node in range(1, self.count + 1):
            if f"node{node}" not in self._daemons:
                self.power_on(node)
        self.wait_until(self._all_idle, "idle nodes")

    def stop(self) -> list[str]:
        """-> what still ran when no job was left and the daemons had ended; it is killed."""
        subprocess.run(
            [*self.beside_controller, "scancel", "--user=root"], env=self.environment, timeout=30, capture_output=True
        )
        for name in sorted(self._daemons, reverse=True):
            _terminate(self._daemons[name])
        deadline = time.monotonic() + END_TIMEOUT_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in left:
            _kill(process)
        return [str(process) for process in left]

    # Starting

    def _start(self) -> None:
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        munge = {name: self.folder / f"munged.{name}" for name in ("pid", "log", "seed")}
        files = (f"--pid-file={munge['pid']}", f"--log-file={munge['log']}", f"--seed-file={munge['seed']}")
        self._call("munged", "--force", f"--socket={self._socket}", f"--key-file={key}", *files)
        self._daemons["munged"] = _daemon(munge["pid"])
        self._call(*self.beside_controller, "slurmctld")
        self._daemons["slurmctld"] = _daemon(self.folder / "slurmctld.pid")
        for node in range(1, self.count + 1):
            self._start_node(node)
        self.wait_until(self._all_idle, "idle nodes")

    def _start_node(self, node: int) -> None:
        inside = self.hosts.inside(node) if self.hosts else []
        (self.folder / f"slurmd.node{node}.pid").unlink(missing_ok=True)
        self._call(*inside, "slurmd", "-N", f"node{node}")
        self._daemons[f"node{node}"] = _daemon(self.folder / f"slurmd.node{node}.pid")

    def _all_idle(self) -> bool:
        states = self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T", check=False).split()
        return states == ["idle"] * self.count

    def _call(self, *command: str) -> None:
        subprocess.run(command, env=self.environment, check=True, timeout=60, cwd=self.folder)

    def _steps_of(self, node: int) -> list[psutil.Process]:
        """A step daemon keeps its node's log open."""
        log = f"slurmd.node{node}.log"
        return [p for p in psutil.process_iter(["name"]) if p.info["name"] == "slurmstepd" and self._holds_log(p, log)]

    def _left(self) -> list[psutil.Process]:
        """All that the daemons have started knows the cluster by its environment."""
        ours = self.environment["SLURM_CONF"]
        return [p for p in psutil.process_iter() if self.environment_of(p).get("SLURM_CONF") == ours]

    def _holds_log(self, process: psutil.Process, name: str) -> bool:
        try:
            return any(file.path.startswith(str(self.folder / "log" / name)) for file in process.open_files())
        except psutil.Error:
            return False

    def _strays(self, node: int) -> list[psutil.Process]:
        """Processes that have left their step's family; they still know the node by its environment."""
        return [process for process in psutil.process_iter() if self._stands_on(process, node)]

    def _stands_on(self, process: psutil.Process, node: int) -> bool:
        environment = self.environment_of(process)
        ours = environment.get("SLURM_CONF") == self.environment["SLURM_CONF"]
        return ours and environment.get("SLURMD_NODENAME") == f"node{node}"

    @property
    def _socket(self) -> Path:
        return self.folder / "munge.socket"

    def _write_files(self) -> None:
        (self.folder / "slurm.conf").write_text("\n".join(self._settings()) + "\n")
        (self.folder / "gres.conf").write_text("\n".join(self._devices()) + "\n")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        if self._switches:
            (self.folder / "topology.conf").write_text("\n".join(self._switches) + "\n")

    def _devices(self) -> Iterator[str]:
        """Two GPUs a node, which are /dev/null by other names."""
        for node in range(1, self.count + 1):
            for gpu in range(2):
                device = self.folder / "dev" / f"node{node}-gpu{gpu}"
                if not device.exists():
                    os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))
            yield f"NodeName=node{node} Name=gpu File={self.folder}/dev/node{node}-gpu[0-1]"

    def _settings(self) -> Iterator[str]:
        name = socket.gethostname()
        folder = self.folder
        values: Mapping[str, object] = {
            "ClusterName": "trainspec",
            "SlurmctldHost": f"{name}({SWITCH_ADDRESS if self.hosts else '127.0.0.1'})",
            "SlurmctldPort": self._port,
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            # A requeued job waits until its old credential has run out: 120 s by default.
            "AuthInfo": f"socket={self._socket},cred_expire=5",
            "CredType": "cred/munge",
            "MpiDefault": "none",
            "MailProg": "/bin/true",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU_Memory",
            "DefMemPerCPU": 100,
            "SchedulerParameters": "sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0",
            "GresTypes": "gpu",
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "REQUEUE",
            "JobRequeue": 1,
            "ReturnToService": 2,
            "SlurmdTimeout": self._slurmd_timeout_s,
            "MessageTimeout": 10,
            "KillWait": 10,
            "OverTimeLimit": 0,
            "MinJobAge": 3600,
            "StateSaveLocation": folder / "state",
            "SlurmdSpoolDir": folder / "spool" / "%n",
            "SlurmctldPidFile": folder / "slurmctld.pid",
            "SlurmdPidFile": folder / "slurmd.%n.pid",
            "SlurmctldLogFile": folder / "log" / "slurmctld.log",
            "SlurmdLogFile": folder / "log" / "slurmd.%n.log",
            "SlurmdParameters": "config_overrides",
        }
        if self._switches:
            values = {**values, "TopologyPlugin": "topology/tree"}
        yield from (f"{key}={value}" for key, value in values.items())
        for node in range(1, self.count + 1):
            (folder / "spool" / f"node{node}").mkdir(exist_ok=True)
            here = f"NodeHostname={name} NodeAddr=127.0.0.1 Port={self._port + node}"
            there = f"NodeAddr={Hosts.address(node)} Port={self._port + 1}"
            yield f"NodeName=node{node} {there if self.hosts else here} CPUs=8 RealMemory=8000 Gres=gpu:2"
        common = "Nodes=ALL DefaultTime=10 MaxTime=120 State=UP OverSubscribe=NO"
        yield f"PartitionName=main {common} Default=YES PriorityTier=1 GraceTime={GRACE_S}"
        yield f"PartitionName=urgent {common} PriorityTier=2 PreemptMode=OFF"


def _free_ports(count: int) -> int:
    """-> the first of so many in a row that nobody listens on; sessions beside this one have theirs."""
    while True:
        first = random.randrange(10_000, 15_000)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("", port))
        except OSError:
            continue
        return first


def _as(user: str | None) -> list[str]:
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"] if user else []


def _daemon(pid_file: Path) -> psutil.Process:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (pid_file.is_file() and pid_file.read_text().strip()):
        assert time.monotonic() < deadline, f"{pid_file} did not appear"
        time.sleep(0.05)
    return psutil.Process(int(pid_file.read_text()))


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _terminate(process: psutil.Process, wait_s: float = 10) -> None:
    try:
        process.send_signal(signal.SIGTERM)
        process.wait(wait_s)
    except psutil.NoSuchProcess:
        return
    except psutil.TimeoutExpired:
        _kill(process)


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
