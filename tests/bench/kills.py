"""Random faults on four emulated machines that train one long run together:
`python -m tests.bench.kills --kills 100 --seed 1 --mode restart|three|disk|spare|elastic --manager none|slurm|ray
--out DIR [--minutes M]`.

The faults are kills of workers, torchruns, agents, supervisors and whole machines, stopped workers and machines, pulled
cables, pairs of machines that cannot reach each other, a slow and a full disk. Whoever was killed is started again
after a random time, as a user would. The next fault comes some steps after all machines train again. The faults depend
only on --seed; call the command again with the same --out to continue after --minutes.

After the last fault, the run is stopped and checked: its losses are those of a run on one machine that nobody
disturbed, so no sample was lost or taken twice; nothing is left running; `report` and `diagnose` read the run. Writes
DIR/kills.jsonl (a line per fault) and prints a table. Ends with 1 if a check fails or a run had to be resumed by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from lab.cluster import ENDED, Cluster
from lab.groups import check_nothing_was_lost
from lab.hosts import Hosts
from lab.machines import Disk, Machine, Machines, Started, lacking
from lab.ray_hosts import READY

from trainspec_cli.core.reading.files import read_object
from trainspec_cli.run.backend.processes import workers_among
from trainspec_cli.run.folder.event_types.events import RecoveryEvent, StartEvent, StepEvent
from trainspec_cli.run.folder.events import EventTail, read_events
from trainspec_cli.run.folder.paths import RunDir

HOME = Path(__file__).parents[2]
MACHINES = 4
PORT = 29511
PATIENCE_S = 300.0
"""A run that does not train on all machines this long after a fault, its repair included, counts as lost."""
END_S = 120.0
POLL_S = 0.05
STEP_S = 0.15
"""Steps are slowed to this time, so that few of them have to be made again without faults."""
LOOK_S = 2.0
"""Interval at which Slurm is asked for the job's state."""
AGENT = "trainspec_cli.run.backend.nodes.agent"
LOG_STEPS = 20
BACK_S = (0.0, 1.0, 4.0, 12.0, 45.0)
"""Times until the user starts a command again. Within the shortest ones, no other machine takes over."""
RECIPE = (
    *("recipe=tiny", "cluster.devices_per_node=1", "data.seq_len=16", "batching.global_batch_size=12"),
    *("precision.compute=fp32", "optim.schedule.kind=constant", "optim.lr=1e-5", "run.preflight=false"),
)
LONG = (
    *("train.max_steps=1000000", f"train.log_interval_steps={LOG_STEPS}", "run.node_timeout_s=5"),
    *("resilience.max_restarts_per_hour=100000", f"fault=slow(step=0,seconds={STEP_S},steps=1000000)"),
)
COPIES = ("checkpoint.interval_steps=10", "checkpoint.memory_interval_steps=2")
TOLERANCE, OTHER_SAMPLE = 1e-5, 1e-3
"""Relative differences of a loss: what rounding explains, and what another sample would change at least (median)."""


@dataclass(frozen=True)
class Mode:
    recipe: tuple[str, ...]
    nnodes: int
    """The run's own nodes. Another machine is a spare, or idle (mode three, for Slurm)."""


MODES = {
    "restart": Mode(COPIES, MACHINES),
    "three": Mode(COPIES, MACHINES - 1),
    "disk": Mode(("checkpoint.interval_steps=10",), MACHINES),
    "spare": Mode((*COPIES, "cluster.reliability.spare_nodes=1"), MACHINES - 1),
    "elastic": Mode(
        (
            *("resilience=elastic", "resilience.replica_groups=4", "resilience.exchange_timeout_s=20"),
            *("resilience.heartbeat_timeout_s=5", "checkpoint.interval_steps=20"),
        ),
        MACHINES,
    ),
}


@dataclass(frozen=True)
class Drawn:
    """A fault as the seed has it."""

    kind: str
    machine: int
    other: int
    seconds: float
    """Duration of what is not a kill."""
    steps: int
    """Number of steps before the fault."""
    back_s: float
    """Time until the user starts a command that has ended again."""


@dataclass
class Outcome:
    number: int
    kind: str
    machine: int
    at: float
    step: int
    """The newest step at the fault."""
    seconds: float = 0.0
    first_step_s: float | None = None
    """From the fault to the first step of the first start after it; None if nothing restarted."""
    longest_gap_s: float = 0.0
    """The longest time between two steps."""
    all_back_s: float = 0.0
    """From the fault until the run trains on all machines again."""
    lost_steps: int = 0
    """Steps that were made again."""
    starts: list[list[Any]] = field(default_factory=list)
    """[step, world size, "memory" or "disk" or "none" or "peer"] of each start."""
    victim: str = ""
    """The command line of the process that was killed."""
    typed: list[int] = field(default_factory=list)
    """Machines on which the user started the command again."""
    recovered: bool = True
    """False if the whole run had ended, or did not train on all machines in time."""
    why: str = ""
    said: list[str] = field(default_factory=list)


def draw(seed: int, number: int, manager: str = "none") -> Drawn:
    chance = random.Random(f"{seed}:{number}")
    opens, kinds = MANAGERS[manager]
    (kind,) = chance.choices(list(kinds), [weight for weight, _ in kinds.values()])
    machines = range(opens.first, opens.first + MACHINES)
    machine = chance.choice(machines)
    other = chance.choice([one for one in machines if one != machine])
    return Drawn(kind, machine, other, chance.uniform(1, 14), chance.randint(6, 25), chance.choice(BACK_S))


class Bench:
    """The machines, the commands on them, and the run."""

    opens_machines: Callable[[int, Path], Any] = Machines
    first = 1
    """The first machine that trains."""

    def __init__(self, out: Path, mode: Mode):
        self.out = out
        self.mode = mode
        self.machines = self.opens_machines(self.first - 1 + MACHINES, out)
        self.run = RunDir(self.machines.disk.folder / "run")
        self.commands: dict[int, Started] = {}
        self.ended_at: dict[int, float] = {}
        self.environment = os.environ | {
            "TRAINSPEC_CACHE": str(out / "cache"),
            "XDG_STATE_HOME": str(out / "state"),
            "TRAINSPEC_PROBE": "off",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(HOME),
            "COLUMNS": "200",
        }
        self._tail = EventTail(self.run.events(0), None)
        self.starts: list[StartEvent] = []
        self.steps: list[tuple[float, int, int]] = []
        """(time, step, number of machines that took part) of each step."""
        self.lost_steps = 0
        """Steps that replica groups made again without one that had left."""
        self.victim = ""
        self.said_bytes = dict.fromkeys(self.machines.machines, 0)

    def __getitem__(self, number: int) -> Machine:
        return self.machines.machines[number]

    def command(self, number: int) -> list[str]:
        """What the user types on this machine."""
        program = [sys.executable, "-m", "trainspec_cli"]
        where = ["--nnodes", str(self.mode.nnodes), "--node-rank", str(number - 1)]
        where += ["--rdzv-endpoint", f"{self.machines.hosts.address(1)}:{PORT}"]
        if self.run.run_json.exists():
            return [*program, "resume", str(self.run.root), *where]
        return [*program, "launch", *RECIPE, *LONG, *self.mode.recipe, f"run.dir={self.run.root}", *where]

    def start(self) -> None:
        """Start or resume the run on all machines."""
        for number in self.machines.machines:
            self.type(number)

    def type(self, number: int) -> None:
        self.ended_at.pop(number, None)
        self.commands[number] = self[number].start(
            self.command(number), self.out, self.environment, self.said_file(number)
        )

    def said_file(self, number: int) -> Path:
        return self.out / f"node{number}.log"

    def said(self) -> list[str]:
        """Return what the machines have printed since the last call, without the lines of steps."""
        lines = []
        for number in self.machines.machines:
            with contextlib.suppress(FileNotFoundError), self.said_file(number).open("rb") as file:
                file.seek(self.said_bytes[number])
                text = file.read()
                self.said_bytes[number] += len(text)
                lines += [
                    f"{number}: {line}" for line in text.decode(errors="replace").splitlines() if _is_telling(line)
                ]
        return lines

    def read(self) -> None:
        """Take in the run's new events."""
        for event in self._tail.read():
            if isinstance(event, StartEvent):
                self.starts.append(event)
            elif isinstance(event, StepEvent):
                took_part = len(event.groups) if isinstance(event.groups, tuple) else self.starts[-1].world_size
                self.steps.append((event.time, event.step, took_part))
            elif isinstance(event, RecoveryEvent) and event.change == "left":
                self.lost_steps += event.lost_steps or 0

    def ended(self) -> list[int]:
        """Return the machines whose command has ended, and note when it did."""
        ended = [number for number, one in self.commands.items() if one.exit_code is not None]
        for number in ended:
            self.ended_at.setdefault(number, time.time())
        return ended

    def settled_steps(self, since: float) -> int:
        """Return the number of newest steps after `since` in which all of the run's machines took part."""
        if self.ended() or (self.starts and self.steps and self.starts[-1].time > self.steps[-1][0]):
            return 0
        count = 0
        for at, _, took_part in reversed(self.steps):
            if at < since or took_part < self.mode.nnodes:
                break
            count += 1
        return count

    def supervisor(self) -> int:
        """Return the machine that has the supervisor; 1 if no supervisor has claimed the run."""
        with contextlib.suppress(Exception):
            host = str(read_object(self.run.pid_json)["host"])
            return int(host.removeprefix("node"))
        return 1

    def end(self) -> dict[int, int | None]:
        """Ask the run to stop; return the commands' exit codes."""
        self.commands[self.supervisor()].interrupt()
        deadline = time.monotonic() + END_S
        while len(self.ended()) < len(self.commands) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return {number: one.exit_code for number, one in self.commands.items()}

    def left(self) -> list[str]:
        """Return what still runs."""
        found = {number: machine.processes() for number, machine in self.machines.machines.items()}
        return [f"{number}: {' '.join(_words(one))}" for number, here in found.items() for one in here]

    def start_over(self) -> None:
        """Switch all machines off and on, and resume the run on all of them."""
        for number, machine in self.machines.machines.items():
            machine.switch_off()
            self.machines.hosts.make_good(number)
            machine.switch_on()
        self.start()


class RayBench(Bench):
    """A Ray cluster: machine 1 is its head and has the launch command, the others train. The head's state is on
    disk."""

    first = 2

    def __init__(self, out: Path, mode: Mode):
        super().__init__(out, mode)
        self.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a-token-of-the-lab-0123456789abcdef"}
        for name, value in {"period_ms": 500, "timeout_ms": 2000, "failure_threshold": 3}.items():
            self.environment[f"RAY_health_check_{name}"] = str(value)
        self.environment |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(out / "gcs")}
        (out / "gcs").mkdir(exist_ok=True)

    def start(self) -> None:
        for number in self.machines.machines:  # one by one, because Ray gives its processes 15 s to start
            self.type(number)
            deadline = time.monotonic() + PATIENCE_S
            while READY not in self.said_file(number).read_text(errors="replace"):
                assert time.monotonic() < deadline, f"Ray does not start: {self.said_file(number)}"
                if number in self.ended():
                    self.type(number)
                time.sleep(POLL_S)
        program = [sys.executable, "-m", "trainspec_cli"]
        command = [*program, "resume", str(self.run.root)]
        if not self.run.run_json.exists():
            nodes = ("cluster.manager=ray", f"cluster.num_nodes={self.mode.nnodes}")
            command = [*program, "launch", *RECIPE, *LONG, *self.mode.recipe, *nodes, f"run.dir={self.run.root}"]
        self._trainspec(command)

    def _trainspec(self, command: Sequence[str]) -> None:
        address = {"RAY_ADDRESS": f"{self.machines.hosts.address(1)}:{PORT}"}
        self[1].start(command, self.out, self.environment | address, self.out / "launch.log")

    def command(self, number: int) -> list[str]:
        of_head = ["--head", f"--port={PORT}", "--include-dashboard=false", "--num-cpus=0"]
        joins = [f"--address={self.machines.hosts.address(1)}:{PORT}", "--num-cpus=1"]
        return [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", *(of_head if number == 1 else joins)),
            *("--object-store-memory=80000000", f"--node-ip-address={self.machines.hosts.address(number)}"),
            *(f"--temp-dir=/tmp/ray{os.getpid()}_{number}", "--runtime-env-agent-port=6400"),
            *("--dashboard-agent-listen-port=6401", "--dashboard-agent-grpc-port=6402", "--metrics-export-port=6403"),
            *("--disable-usage-stats", "--no-monitor", "--include-log-monitor=false", "--block"),
        ]

    def supervisor(self) -> int:
        return next((number for number in self.machines.machines if actors("Supervisor")(self, number)), self.first)

    def end(self) -> dict[int, int | None]:
        """Stop the run by its folder, because the launch command has died with its machine."""
        self._trainspec([sys.executable, "-m", "trainspec_cli", "stop", str(self.run.root)])
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline and (self.left() or not self.run.result_json.exists()):
            time.sleep(POLL_S)
        ended = self.run.result_json.exists()
        return {1: read_object(self.run.result_json)["exit_code"] if ended else None}

    def left(self) -> list[str]:
        """Ray's own agents and its idle workers stay."""
        ours = ("trainspec_cli", "ray::AgentActor", "ray::SupervisorActor")
        return [one for one in super().left() if any(name in one for name in ours)]


class SlurmMachines:
    """The nodes of a Slurm cluster with the interface of `Machines`."""

    def __init__(self, count: int, folder: Path):
        self.hosts = Hosts(count)
        self.disk = Disk(folder / "disk.img", folder / "disk")
        self.cluster = Cluster(Path(tempfile.mkdtemp(prefix="trainspec-slurm-")), count, self.hosts)
        self.machines = {number: SlurmNode(self.cluster, number) for number in self.hosts.numbers}

    def remove(self) -> None:
        self.cluster.stop()
        self.hosts.remove()
        self.disk.remove()


@dataclass(frozen=True)
class SlurmNode:
    cluster: Cluster
    number: int

    def processes(self) -> list[psutil.Process]:
        return self.cluster.processes_of(self.number)

    def switch_off(self) -> None:
        self.cluster.power_off(self.number)

    def switch_on(self) -> None:
        self.cluster.power_on(self.number)


class SlurmBench(Bench):
    """A real Slurm of four nodes, which requeues the job. If it does not, the user submits the script again."""

    opens_machines = SlurmMachines
    machines: SlurmMachines
    _job = ""
    _looked_s = 0.0

    def start(self) -> None:
        program = [*self.machines.hosts.beside_switch(), sys.executable, "-m", "trainspec_cli", "sbatch", "--submit"]
        slurm = ("exclusive=false", "cpus_per_task=1", "mem=100M", "max_requeues=1000")
        nodes = (f"cluster.num_nodes={self.mode.nnodes}", *(f"cluster.slurm.{setting}" for setting in slurm))
        environment = self.environment | {"SLURM_CONF": self.machines.cluster.environment["SLURM_CONF"]}
        if self.run.job_sbatch.exists():
            command = [*self.machines.hosts.beside_switch(), "sbatch", "--parsable", str(self.run.job_sbatch)]
        else:
            command = [*program, "--json", *RECIPE, *LONG, *self.mode.recipe, *nodes, f"run.dir={self.run.root}"]
        done = subprocess.run(command, cwd=self.out, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        self._job = done.stdout.strip() if done.stdout.strip().isdigit() else str(json.loads(done.stdout)["job_id"])

    def type(self, number: int) -> None:
        self.ended_at.clear()
        self.start()

    def ended(self) -> list[int]:
        if time.monotonic() > self._looked_s + LOOK_S:
            self._looked_s = time.monotonic()
            if self.machines.cluster.state(self._job) in ENDED:
                self.ended_at.setdefault(1, time.time())
        return list(self.ended_at)

    def said(self) -> list[str]:
        return []

    def end(self) -> dict[int, int | None]:
        """Cancel the job; a stopped run has exit code 6."""
        self.machines.cluster.run("scancel", self._job)
        ended = self.machines.cluster.wait(self._job)
        return {1: 6 if read_object(self.run.result_json)["status"] == "stopped" else int(ended["ExitCode"][0])}


def slurm_agents(bench: Bench, number: int) -> list[psutil.Process]:
    return [one for one in bench[number].processes() if _words(one)[1:3] == ["-m", AGENT]]


def slurm_supervisors(bench: Bench, _: int) -> list[psutil.Process]:
    pid = int(read_object(bench.run.pid_json)["pid"])
    return [psutil.Process(pid)]


def _is_telling(line: str) -> bool:
    return bool(line.strip()) and not re.match(r"\s*step \d+/", line)


# The faults: each is a context that lasts as long as the fault does

Break = Callable[[Bench, Drawn], AbstractContextManager[object]]


def kill(find: Callable[[Bench, int], list[psutil.Process]]) -> Break:
    """Kill one process on the machine or, if it has none, on the next one that has. A run that is just recovering may
    have none at first."""

    @contextmanager
    def breaks(bench: Bench, drawn: Drawn) -> Iterator[None]:
        deadline = time.monotonic() + PATIENCE_S
        machines = [(drawn.machine - bench.first + step) % MACHINES + bench.first for step in range(MACHINES)]
        while not (found := next(filter(None, (find(bench, machine) for machine in machines)), [])):
            assert time.monotonic() < deadline, f"nothing to kill: {drawn}"
            time.sleep(POLL_S)
        for process in found:
            bench.victim = f"{process.pid} {' '.join(_words(process))}"
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        yield

    return breaks


def workers(bench: Bench, number: int) -> list[psutil.Process]:
    return workers_among(bench[number].processes())


def torchruns(bench: Bench, number: int) -> list[psutil.Process]:
    found = [worker.parent() for worker in workers(bench, number)]
    return [one for one in found if one is not None]


def agents(bench: Bench, number: int) -> list[psutil.Process]:
    """On the supervisor's machine a process of its own, elsewhere the user's command."""
    if number != bench.supervisor():
        command = bench.commands[number].process
        return [command] if command else []
    return [one for one in bench[number].processes() if _words(one)[1:3] == ["-m", AGENT]]


def supervisors(bench: Bench, _: int) -> list[psutil.Process]:
    command = bench.commands[bench.supervisor()].process
    return [command] if command else []


def actors(name: str) -> Callable[[Bench, int], list[psutil.Process]]:
    return lambda bench, number: [one for one in bench[number].processes() if f"ray::{name}" in " ".join(_words(one))]


def raylets(bench: Bench, number: int) -> list[psutil.Process]:
    return _programs(bench[number], "/raylet")


def heads(bench: Bench, _: int) -> list[psutil.Process]:
    return _programs(bench[1], "/gcs_server")


def _programs(machine: Machine, name: str) -> list[psutil.Process]:
    return [one for one in machine.processes() if _words(one)[:1] and _words(one)[0].endswith(name)]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@contextmanager
def power_off(bench: Bench, drawn: Drawn) -> Iterator[None]:
    bench[drawn.machine].switch_off()
    yield
    bench[drawn.machine].switch_on()


@contextmanager
def power_off_supervisor(bench: Bench, drawn: Drawn) -> Iterator[None]:
    machine = bench[bench.supervisor()]
    machine.switch_off()
    yield
    machine.switch_on()


@contextmanager
def power_off_head(bench: Bench, drawn: Drawn) -> Iterator[None]:
    with power_off(bench, replace(drawn, machine=1)):
        yield


@contextmanager
def two_off(bench: Bench, drawn: Drawn) -> Iterator[None]:
    with power_off(bench, drawn), power_off(bench, replace(drawn, machine=drawn.other)):
        yield


@contextmanager
def kill_again(bench: Bench, drawn: Drawn) -> Iterator[None]:
    """Kill a worker, and another one while the run recovers."""
    again = kill(lambda bench, number: workers(bench, number)[:1])
    with again(bench, drawn):
        time.sleep(drawn.seconds)
    with again(bench, replace(drawn, machine=drawn.other)):
        yield


def stopped(find: Callable[[Bench, int], list[psutil.Process]]) -> Break:
    @contextmanager
    def breaks(bench: Bench, drawn: Drawn) -> Iterator[None]:
        held = find(bench, drawn.machine)
        _signal(held, signal.SIGSTOP)
        yield
        _signal(held, signal.SIGCONT)
        for command in bench.commands.values():
            command.resume()

    return breaks


def _signal(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def all_of(bench: Bench, number: int) -> list[psutil.Process]:
    return bench[number].processes()


@contextmanager
def cable(bench: Bench, drawn: Drawn) -> Iterator[None]:
    bench.machines.hosts.cut(drawn.machine)
    yield
    bench.machines.hosts.heal(drawn.machine)


@contextmanager
def pair(bench: Bench, drawn: Drawn) -> Iterator[None]:
    bench.machines.hosts.block(drawn.machine, drawn.other)
    yield
    bench.machines.hosts.make_good(drawn.machine)


@contextmanager
def slow_disk(bench: Bench, _: Drawn) -> Iterator[None]:
    with bench.machines.disk.slow():
        yield


@contextmanager
def full_disk(bench: Bench, _: Drawn) -> Iterator[None]:
    bench.machines.disk.fill()
    yield
    bench.machines.disk.empty()


KINDS: dict[str, tuple[int, Break]] = {
    "worker killed": (18, kill(lambda bench, number: workers(bench, number)[:1])),
    "torchrun killed": (12, kill(lambda bench, number: torchruns(bench, number)[:1])),
    "agent killed": (12, kill(agents)),
    "supervisor killed": (12, kill(supervisors)),
    "machine off": (12, power_off),
    "supervisor's machine off": (8, power_off_supervisor),
    "two machines off": (4, two_off),
    "worker killed twice": (6, kill_again),
    "worker stopped": (5, stopped(workers)),
    "machine stopped": (5, stopped(all_of)),
    "cable pulled": (6, cable),
    "pair cut": (4, pair),
    "disk slow": (3, slow_disk),
    "disk full": (3, full_disk),
}
RAY_KINDS = KINDS | {
    "agent killed": (12, kill(actors("Agent"))),
    "supervisor killed": (12, kill(actors("Supervisor"))),
    "raylet killed": (12, kill(raylets)),
    "head killed": (12, kill(heads)),
    "head off": (8, power_off_head),
}
SLURM_KINDS = KINDS | {"agent killed": (12, kill(slurm_agents)), "supervisor killed": (12, kill(slurm_supervisors))}
MANAGERS: dict[str, tuple[type[Bench], dict[str, tuple[int, Break]]]] = {
    "none": (Bench, KINDS),
    "ray": (RayBench, RAY_KINDS),
    "slurm": (SlurmBench, SLURM_KINDS),
}
OF_SUPERVISOR = ("supervisor killed", "supervisor's machine off")


def break_and_wait(bench: Bench, number: int, drawn: Drawn) -> Outcome:
    """Break something, put it right as a user would, and wait until the run trains on all machines again."""
    bench.read()
    bench.said()
    outcome = Outcome(number, drawn.kind, drawn.machine, time.time(), bench.steps[-1][1], drawn.seconds)
    if drawn.kind in OF_SUPERVISOR:
        outcome.machine = bench.supervisor()
    began, began_starts = len(bench.steps), len(bench.starts)
    breaks = next(kinds[drawn.kind][1] for opens, kinds in MANAGERS.values() if opens is type(bench))
    bench.victim = ""
    bench.lost_steps = 0
    with breaks(bench, drawn):
        end = time.time() + (drawn.back_s if drawn.kind.endswith("off") else drawn.seconds)
        while time.time() < end and "killed" not in drawn.kind:
            bench.ended()
            time.sleep(POLL_S)
    repaired = time.time()
    outcome.victim = bench.victim
    while True:
        bench.read()
        for machine in bench.ended():
            if time.time() >= bench.ended_at[machine] + drawn.back_s:
                outcome.typed.append(machine)
                bench.type(machine)
        if len(outcome.typed) >= 3 * MACHINES:
            outcome.recovered, outcome.why = False, "commands end again and again"
            break
        # A fault may be noticed late: at first, the steps go on.
        if bench.settled_steps(max(repaired, outcome.at + 2.0)) >= drawn.steps:
            break
        if time.time() > repaired + PATIENCE_S:
            outcome.recovered, outcome.why = False, f"not on all machines within {PATIENCE_S:.0f} s"
            break
        time.sleep(POLL_S)
    _measure(bench, outcome, began, began_starts)
    outcome.said = bench.said()
    if len(set(outcome.typed)) >= max(1, len(bench.commands)):
        outcome.recovered, outcome.why = False, outcome.why or "the run ended on all machines"
    if outcome.why.startswith(("not", "commands")):
        _show_state(bench, outcome)
        bench.start_over()
        wait_until_settled(bench, drawn.steps)
    return outcome


def _measure(bench: Bench, outcome: Outcome, began: int, began_starts: int) -> None:
    steps = bench.steps[began:]
    times = [outcome.at, *(at for at, _, _ in steps)]
    outcome.longest_gap_s = max((later - earlier for earlier, later in pairwise(times)), default=0.0)
    outcome.lost_steps = bench.lost_steps
    made = outcome.step
    starts = bench.starts[began_starts:]
    for place, start in enumerate(starts):
        until = starts[place + 1].time if place + 1 < len(starts) else float("inf")
        before = [step for at, step, _ in steps if at < start.time]
        outcome.lost_steps += max(0, (before[-1] if before else made) - start.step)
        source = start.restored_from or "none"
        place_of = "memory" if "/dev/shm" in source else "none" if source == "none" else "disk"
        outcome.starts.append([start.step, start.world_size, place_of])
        if place == 0:
            firsts = [at for at, _, _ in steps if start.time <= at < until]
            outcome.first_step_s = round(firsts[0] - outcome.at, 2) if firsts else None
    parts = [(at, took_part) for at, _, took_part in steps]
    full = [at for at, took_part in parts if took_part == bench.mode.nnodes]
    fewer = [at for at, took_part in parts if took_part < bench.mode.nnodes]
    if not starts and fewer:  # replica groups
        outcome.first_step_s = round(fewer[0] - outcome.at, 2)
    since = max([start.time for start in starts[-1:]] + fewer[-1:], default=outcome.at)
    outcome.all_back_s = round(next((at for at in full if at >= since), time.time()) - outcome.at, 2)
    outcome.longest_gap_s = round(outcome.longest_gap_s, 2)


def _show_state(bench: Bench, outcome: Outcome) -> None:
    """Keep what a person needs to find out why a run hangs."""
    folder = bench.out / f"lost{outcome.number:03d}"
    folder.mkdir(exist_ok=True)
    lines = []
    for number, machine in bench.machines.machines.items():
        for process in machine.processes():
            lines.append(f"{number} {process.pid} {_state(process)} {' '.join(_words(process))}")
    (folder / "processes.txt").write_text("\n".join(lines))
    subprocess.run(["cp", "-r", str(bench.run.root), str(folder / "run")], check=False)


def _state(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.Error:
        return "ended"


def wait_until_settled(bench: Bench, steps: int) -> None:
    since = time.time()
    while bench.settled_steps(since) < steps:
        bench.read()
        assert not bench.ended(), f"the run did not start: {bench.said()}"
        assert time.time() < since + PATIENCE_S, "the run does not start"
        time.sleep(POLL_S)


# The checks at the end


def check(bench: Bench, codes: dict[int, int | None]) -> list[str]:
    """Stop the run, and return what is wrong with it."""
    wrong = [] if set(codes.values()) == {6} else [f"exit codes of the stopped run: {codes}"]
    wrong += [f"still running: {one}" for one in bench.left()]
    events = list(read_events(bench.run.events(0)))
    losses: dict[int, float] = {}
    last = 0
    for event in events:
        if event["type"] == "start":
            if event["step"] > last:
                wrong.append(f"a start begins at step {event['step']}, after step {last}")
            last = event["step"]
        elif event["type"] == "step":
            if event["step"] != last + 1 and "groups" not in event:
                wrong.append(f"step {event['step']} comes after step {last}")
            last = event["step"]
            losses[last] = event["loss"]
    if sorted(losses) != list(range(1, len(losses) + 1)):
        wrong.append("steps are missing")
    if "elastic" in " ".join(bench.mode.recipe):
        try:
            check_nothing_was_lost(bench.run, may_lack_notes=True)
        except AssertionError as error:
            wrong.append(f"samples of replica groups: {error}")
    expected = undisturbed(bench, max(losses))
    off = {s: abs(losses[s] - expected[s]) / abs(expected[s]) for s in losses}
    moved = [abs(expected[s] - expected[s + 1]) / abs(expected[s]) for s in range(1, len(expected))]
    print(f"losses: {len(losses)} steps; largest relative difference {max(off.values()):.1e}; "
          f"another step's samples: median {median(moved):.1e}, fewer than {TOLERANCE:g} in "
          f"{sum(one < TOLERANCE for one in moved)} of {len(moved)}")  # fmt: skip
    wrong += [f"loss of step {s} differs by {by:.1e}" for s, by in off.items() if by > TOLERANCE][:10]
    if median(moved) < OTHER_SAMPLE:
        wrong.append("the losses would not show another sample")
    for command in ("report", "diagnose"):
        done = trainspec(bench, command, str(bench.run.root))
        if done.returncode not in (0, 1) or "Traceback" in done.stderr:
            wrong.append(f"{command} ends with {done.returncode}: {done.stdout[-400:]}{done.stderr[-800:]}")
    for number in bench.commands:
        if "Traceback" in (text := bench.said_file(number).read_text(errors="replace")):
            wrong.append(f"machine {number} printed a traceback: {text[text.index('Traceback') :][:800]}")
    return wrong


def undisturbed(bench: Bench, steps: int) -> dict[int, float]:
    """Return the losses of a run on one machine with one process."""
    alone = RunDir(bench.out / f"alone{steps}")
    if not alone.result_json.exists():
        subprocess.run(["rm", "-rf", str(alone.root)], check=True)
        elastic = [word for word in bench.mode.recipe if word.startswith("batching")]
        done = trainspec(
            *(bench, "launch", *RECIPE, *elastic, f"train.max_steps={steps}", f"run.dir={alone.root}"),
            "checkpoint.interval_steps=null",
            before=("taskset", "-c", "0"),  # on a busy machine, several threads would wait for one another
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return {event["step"]: event["loss"] for event in read_events(alone.events(0)) if event["type"] == "step"}


def trainspec(bench: Bench, *arguments: str, before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-m", "trainspec_cli", *arguments]
    return subprocess.run(command, cwd=bench.out, env=bench.environment, capture_output=True, text=True)


# The table


def describe(outcomes: Sequence[Outcome]) -> str:
    by_kind: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_kind[outcome.kind].append(outcome)
    rows = [("fault", "number", "recovered", "restarted", "first step s", "all back s", "gap s", "lost steps", "from")]
    for kind, found in [*sorted(by_kind.items()), ("all", list(outcomes))]:
        firsts = [one.first_step_s for one in found if one.first_step_s is not None]
        sources = Counter(start[2] for one in found for start in one.starts[:1])
        rows.append(
            (
                *(kind, str(len(found)), str(sum(one.recovered for one in found)), str(len(firsts))),
                *(_spread(firsts), _spread([one.all_back_s for one in found])),
                *(_spread([one.longest_gap_s for one in found]), _spread([float(one.lost_steps) for one in found])),
                " ".join(f"{count} {source}" for source, count in sorted(sources.items())),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)) for row in rows)


def _spread(values: list[float]) -> str:
    """Median, 90th percentile and maximum."""
    if not values:
        return "-"
    ordered = sorted(values)
    high = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return f"{median(ordered):.1f}/{high:.1f}/{ordered[-1]:.1f}"


def run(
    out: Path, mode: str, kills: int, seed: int, manager: str = "none", minutes: float = float("inf")
) -> tuple[list[Outcome], list[str]]:
    """Make the faults that are not yet recorded in `out`. Return all outcomes, and what is wrong with the run."""
    out.mkdir(parents=True, exist_ok=True)
    record = out / "kills.jsonl"
    lines = record.read_text().splitlines() if record.exists() else []
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    began = time.monotonic()
    done = 0
    with ExitStack() as stack:
        opens, _ = MANAGERS[manager]
        bench = opens(out, MODES[mode])
        stack.callback(bench.machines.remove)
        bench.start()
        wait_until_settled(bench, 8)
        for number in range(len(outcomes), kills):
            if time.monotonic() - began > 60 * minutes:
                break
            outcome = break_and_wait(bench, number, draw(seed, number, manager))
            outcomes.append(outcome)
            with record.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
            done += 1
            left_s = (time.monotonic() - began) / done * (kills - number - 1)
            first = "" if outcome.first_step_s is None else f", first step after {outcome.first_step_s:.1f} s"
            print(
                f"{time.strftime('%H:%M:%S')} {number + 1}/{kills} {outcome.kind} {outcome.machine}: "
                f"{'recovered' if outcome.recovered else 'LOST: ' + outcome.why}{first}, "
                f"all back after {outcome.all_back_s:.1f} s, {outcome.lost_steps} steps lost, {outcome.starts}, "
                f"typed on {outcome.typed}; about {left_s / 60:.0f} min left",
                flush=True,
            )
        codes = bench.end()
        return outcomes, check(bench, codes) if len(outcomes) >= kills else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mode", choices=MODES, default="restart")
    parser.add_argument("--manager", choices=MANAGERS, default="none")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the machines are removed
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would ours
    if why := lacking():
        sys.exit(why)
    outcomes, wrong = run(
        options.out.absolute(), options.mode, options.kills, options.seed, options.manager, options.minutes
    )
    print(describe(outcomes))
    print(*wrong, sep="\n")
    sys.exit(1 if wrong or not all(outcome.recovered for outcome in outcomes) else 0)


if __name__ == "__main__":
    main()
