"""The job for a user's command: the processes that it starts, and the environment variables that it sets."""

from __future__ import annotations

import itertools
import math
import os
import re
import secrets
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainspec_cli.core.environment_names import GENERATION, LAUNCH_ID, OWN_PATH, OWN_SAFE_PATH, PROGRESS
from trainspec_cli.core.errors import Problem, RecipeError, closest
from trainspec_cli.core.reading.files import parse_json, unreadable
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.run import RunSection
from trainspec_cli.recipe.records import canonical_json, from_plain, to_plain
from trainspec_cli.run.backend.nodes.backend import Reach
from trainspec_cli.run.folder.files import read_versioned, write_versioned
from trainspec_cli.run.folder.generations import GenerationRecord, UnplannedWork
from trainspec_cli.run.folder.paths import COMMAND, RunDir
from trainspec_cli.run.job.job import (
    Job,
    growing_segments,
    keep_freed_memory,
    next_log_folder,
    own_modules,
)
from trainspec_cli.run.job.machine import NodePlace, interface_of, own_address
from trainspec_cli.wings.own_script.journal import count_steps

HOOK = Path(__file__).parent / "hook"
"""The folder that is added to PYTHONPATH, so that Python loads the hook."""
OUTPUT_LOG = "output.log"
"""Name of the log of the command's output on a node."""

PROCESS_OPTIONS = ("--nproc-per-node", "--nproc_per_node", "--num_processes", "--num-processes", "--num_gpus")
"""Options of torchrun, accelerate and deepspeed for the number of processes on this node."""
NODE_OPTIONS = ("--nnodes", "--num_machines", "--num-machines", "--num_nodes", "--hostfile")
USUAL_PROGRAMS = ("python", "python3", "torchrun", "accelerate", "deepspeed", "bash")
"""The most common first words of a command."""
_PYTHON = re.compile(r"python[0-9.]*$")
_ISOLATED = re.compile(r"-[a-zA-Z]*[IES][a-zA-Z]*$")
_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


@dataclass(frozen=True)
class CommandSettings:
    """The options of `trainspec run`, without the command."""

    max_restarts: int
    """Maximum number of restarts after failures during the entire job."""
    grace_s: float
    hang_s: float | None
    """A run is treated as hung after this many seconds without activity; None: never."""
    silent_s: float | None
    """Like `hang_s`, but for the time until the first step is counted."""
    work_s: float
    """If no steps are counted, a start is considered to have made progress once it has run for this many seconds."""
    join_timeout_s: float = RunSection.join_timeout_s
    """On several nodes: how long the first node and the other nodes wait for one another, in seconds."""


@dataclass(frozen=True)
class OwnCommandRecord:
    """A user's command, as run on every node."""

    command: tuple[str, ...]
    """The command as typed on the first node."""
    wanted: CommandSettings
    port: int
    """The port on the first node where processes rendezvous."""
    python_path: str
    """PYTHONPATH of the shell on the first node."""
    python_safe_path: str
    """PYTHONSAFEPATH of the shell on the first node."""


@dataclass(frozen=True)
class OwnJob:
    num_nodes: int
    wanted: CommandSettings
    max_requeues: int
    exclude: str | None
    """Nodes excluded by the user."""
    min_nodes: int | None = None
    """The smallest number of nodes on which the command continues after losses; None for `num_nodes`."""
    spare_nodes: int = 0
    """Nodes in addition to `num_nodes`, each of which waits until it replaces a lost one."""


def write_own_job(run: RunDir, job: OwnJob) -> None:
    write_versioned(run.own_job_json, to_plain(job))


def read_own_job(run: RunDir) -> OwnJob:
    """Return the job in the run folder. Raises UnreadableFileError."""
    try:
        return from_plain(OwnJob, read_versioned(run.own_job_json))
    except RecipeError as error:
        hint = "it is damaged, or another version of trainspec wrote it"
        raise unreadable(run.own_job_json, f"is not a job of this version: {error}", hint) from error


def check_command(command: Sequence[str], before: str = "trainspec run") -> None:
    """Raise RecipeError if the command is empty, cannot be started, or its script is missing. `before`: the words that
    precede the command."""
    if not command:
        hint = f"such as {before} -- python train.py"
        raise RecipeError(Problem("usage", "the command is missing; it must follow --", hint=hint))
    if shutil.which(command[0]):
        check_script(command)
        return
    program = Path(command[0])
    if program.is_file():
        message = "is a file that cannot be executed"
        hint = f"such as {before} -- python {command[0]}"
        if program.suffix != ".py":
            hint = f"make it executable: chmod +x {command[0]}"
    else:
        message = "is not a program on this machine"
        hint = "give its full path, or activate the environment that contains it"
        if "=" in command[0]:
            hint = f"variables go before trainspec ({command[0]} {before} ...), and options before --"
        elif command[0] in USUAL_PROGRAMS:
            hint = f"{command[0]} is not installed in this environment: install it, or activate another environment"
        elif near := closest(command[0], USUAL_PROGRAMS):
            hint = f"did you mean {near}? Otherwise {hint}"
    raise RecipeError(Problem("no_command", f"{command[0]} {message}", "COMMAND", hint))


def check_script(command: Sequence[str]) -> None:
    """Raise RecipeError if the script for Python, a shell or a launcher does not exist, because torchrun and Slurm jobs
    would only report this later."""
    script = _script_of(command)
    if script is None or Path(script).is_file():
        return
    folder = Path(script).parent
    neighbours = [path.name for path in folder.glob(f"*{Path(script).suffix}")] if folder.is_dir() else []
    near = closest(Path(script).name, neighbours)
    hint = f"did you mean {folder / near}?" if near else "relative paths start in the current folder"
    raise RecipeError(Problem("no_script", f"{script} does not exist", "COMMAND", hint))


def _script_of(command: Sequence[str]) -> str | None:
    """Return the script of a command; None if it has none. The options of Python or a launcher end at the first word
    that is a script. A module (-m) or code (-c) does not count as a script."""
    programs = (*USUAL_PROGRAMS, "sh")
    at = next(
        (place for place, word in enumerate(command) if Path(word).name in programs or _PYTHON.fullmatch(word)), None
    )
    for place in range(at + 1 if at is not None else len(command), len(command)):
        word = command[place]
        if word == "-c" or (word == "-m" and command[place + 1 : place + 2] != ["torch.distributed.run"]):
            return None
        if word.endswith((".py", ".sh")) and not word.startswith("-"):
            return word
    return None


def wasted_gpus(command: Sequence[str], devices: int) -> str:
    """Return a warning if the job reserves several GPUs on a node but starts only one process. Empty if the command
    starts a launcher, or a program that may be one."""
    python = next((place for place, word in enumerate(command) if _PYTHON.fullmatch(Path(word).name)), None)
    script = _script_of(command)
    if devices < 2 or has_launcher(command) or python is None or script is None:
        return ""
    rest = shlex.join(command[list(command).index(script) :])
    return (
        f"the command starts one process, but the job reserves {devices} GPUs on its node; for a process per GPU, run "
        f"-- torchrun --nproc-per-node {devices} {rest}; for a single GPU run "
        "cluster.devices_per_node=1 cluster.slurm.exclusive=false"
    )


def build_own_job(command: Sequence[str], root: Path, machine: Machine, wanted: CommandSettings) -> Job:
    root = root.absolute()
    meeting: dict[str, str] = {}
    if _option(command, NODE_OPTIONS) in (None, "1", "1:1"):
        # The rendezvous of a single node uses a free local port.
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = str(found.getsockname()[1])
        interface = "lo0" if sys.platform == "darwin" else "lo"
        meeting = {"MASTER_PORT": port, "PET_MASTER_PORT": port, "GLOO_SOCKET_IFNAME": interface}
    return Job(
        root=root,
        command=tuple(command),
        environment={
            LAUNCH_ID: secrets.token_hex(8),
            **_hook_path(os.environ.get("PYTHONPATH", "")),
            **_environment(command, machine, wanted.grace_s, process_count(command)),
            **_unless_set(meeting),
        },
        world_size=process_count(command) or 1,
        stop_grace_s=wanted.grace_s,
        logs=next_log_folder(RunDir(root).logs),
        program=script_name(command),
        log=OUTPUT_LOG,
        begins_unseen=True,
        max_restarts=wanted.max_restarts,
        earlier_steps=count_steps(RunDir(root)),
    )


def build_own_nodes_job(command: Sequence[str], root: Path, reach: Reach, own: OwnJob, wanted: CommandSettings) -> Job:
    """Return the job for several nodes. `wanted`: settings with the remaining restarts."""
    root = root.absolute()
    nodes = own.num_nodes
    return Job(
        root=root,
        command=reach.start,
        environment={LAUNCH_ID: secrets.token_hex(8), **own_modules()},
        world_size=nodes * (process_count(command) or 1),
        stop_grace_s=wanted.grace_s,
        logs=next_log_folder(RunDir(root).logs),
        nodes=reach.nodes or tuple(range(nodes + own.spare_nodes)),
        num_nodes=nodes,
        allowed_nodes=range(own.min_nodes or nodes, nodes + 1),
        lost=reach.lost,
        survives_lost_nodes=reach.return_timeout_s > 0,
        join_timeout_s=wanted.join_timeout_s,
        program=script_name(command),
        log=OUTPUT_LOG,
        begins_unseen=True,
        max_restarts=wanted.max_restarts,
        earlier_steps=count_steps(RunDir(root)),
    )


def describe_own_command(command: Sequence[str], wanted: CommandSettings, port: int) -> UnplannedWork:
    """Return what every node runs. `port`: the rendezvous port on the first node."""
    path = os.environ.get(OWN_PATH, os.environ.get("PYTHONPATH", ""))
    safe_path = os.environ.get(OWN_SAFE_PATH, os.environ.get("PYTHONSAFEPATH", ""))
    record = OwnCommandRecord(tuple(command), wanted, port, path, safe_path)
    return UnplannedWork(COMMAND, canonical_json(to_plain(record)))


def read_own_command(record: GenerationRecord) -> OwnCommandRecord:
    assert record.own is not None and record.kind == COMMAND, "the generation runs a user's command"
    return from_plain(OwnCommandRecord, parse_json(record.own.work))


def build_own_node_job(root: Path, machine: Machine, place: NodePlace, record: GenerationRecord) -> Job:
    """Return one node's part of a job on several nodes, for the generation described by `record`. Raises MachineError
    if the first node's name cannot be resolved."""
    own = read_own_command(record)
    processes = process_count(own.command)
    if processes and _index_of_accelerate(own.command) is not None:  # its option sets the total over all nodes
        processes = max(1, processes // place.num_nodes)
    # torchrun reads PET_... variables. A command without a launcher runs as one rank per node. gloo and NCCL use the
    # network interface that leads to the first node.
    address = own_address(place.head)
    meeting = {"MASTER_ADDR": place.head, "MASTER_PORT": str(own.port)}
    node = {"NNODES": str(place.num_nodes), "NODE_RANK": str(place.node)}
    torchrun = {f"PET_{name}": value for name, value in {**meeting, **node, "LOCAL_ADDR": address}.items()}
    interface = interface_of(address)
    interfaces = {f"{name}_SOCKET_IFNAME": interface for name in ("GLOO", "NCCL") if interface}
    alone = {"RANK": str(place.node), "WORLD_SIZE": str(place.num_nodes), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    job = Job(
        root=root,
        command=command_on_node(own.command, place, own.port),
        environment={
            LAUNCH_ID: f"{record.launch_id}-{place.node}",
            GENERATION: str(record.generation),
            "PYTHONSAFEPATH": own.python_safe_path,
            **_hook_path(own.python_path),
            **_environment(own.command, machine, own.wanted.grace_s, processes),
            **_unless_set(
                {**meeting, **node, **torchrun, **interfaces, **({} if has_launcher(own.command) else alone)}
            ),
        },
        world_size=place.num_nodes,
        stop_grace_s=own.wanted.grace_s,
        logs=Path(record.logs) / f"node{place.node:05d}",
        program=script_name(own.command),
        log=OUTPUT_LOG,
        begins_unseen=True,
    )
    added = start_environment(job, record.generation, f"node{place.node:05d}")
    return replace(job, environment={**job.environment, **added})


def device_name(machine: Machine) -> str:
    """Return the name of the device that a node's ranks use, for display."""
    return machine.gpu_names[0] if machine.gpu_names else f"process ({machine.cpu_cores} cores)"


def start_environment(job: Job, generation: int, node: str = "", *, on_terminal: bool = False) -> dict[str, str]:
    """Return the environment variables for one start: the folders where its processes count their steps and torchrun
    writes logs. `node`: name of this node's folders in a job on several nodes. `on_terminal`: processes print directly
    to the terminal, because torchrun would turn each refresh of a progress bar into a new line."""
    progress = {PROGRESS: f"{job.launch_id}:{job.run.progress(generation) / node}"}
    logged = {"PET_LOG_DIR": str(job.logs / "ranks"), "PET_TEE": "3"}
    return progress if on_terminal else progress | _unless_set(logged)


def _environment(command: Sequence[str], machine: Machine, grace_s: float, processes: int | None) -> dict[str, str]:
    """Return variables for a node's environment, except for those set by the user. `processes`: number of processes on
    the node."""
    environment = {
        # Makes Python write its stack to the log when native code crashes.
        "PYTHONFAULTHANDLER": "1",
        # Makes output reach the log immediately, so that it survives if the program is killed.
        "PYTHONUNBUFFERED": "1",
        # torchrun kills workers that take longer than this to save.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(grace_s)),
    }
    if processes:
        environment["OMP_NUM_THREADS"] = str(max(1, machine.cpu_cores // processes))
    if not machine.gpu_names:
        environment |= keep_freed_memory()
    grown = growing_segments(machine) if machine.gpu_names else {}
    return {**grown, **_unless_set(environment)}


def _hook_path(python_path: str) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(HOOK), python_path)))}


def _unless_set(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in os.environ}


# Find out about a command without running it


def process_count(command: Sequence[str]) -> int | None:
    """Return the number of processes that a launcher starts; None if no option sets a number."""
    given = _option(command, PROCESS_OPTIONS)
    return int(given) if given and given.isdigit() and int(given) else None


def has_launcher(command: Sequence[str]) -> bool:
    """Return whether the command is a launcher that sets the ranks of its processes."""
    return not {*command, *(Path(word).name for word in command)}.isdisjoint(
        (*_LAUNCHERS, "accelerate", "accelerate.commands.launch", "deepspeed")
    )


def command_on_node(command: Sequence[str], place: NodePlace, port: int) -> tuple[str, ...]:
    """Return the command for one of several nodes: accelerate gets its node options, and all other launchers get
    environment variables."""
    launch = _index_of_accelerate(command)
    if launch is None:
        return tuple(command)
    options = {
        "num_machines": place.num_nodes,
        "machine_rank": place.node,
        "main_process_ip": place.head,
        "main_process_port": port,
    }
    added = [
        word
        for name, value in options.items()
        if _option(command, (f"--{name}", f"--{name.replace('_', '-')}")) is None
        for word in (f"--{name}", str(value))
    ]
    return (*command[: launch + 1], *added, *command[launch + 1 :])


def _index_of_accelerate(command: Sequence[str]) -> int | None:
    """Return the index of the word before the options of accelerate's launcher, or None."""
    for place, word in enumerate(command):
        if word == "accelerate.commands.launch":
            return place
        if Path(word).name == "accelerate" and list(command[place + 1 : place + 2]) == ["launch"]:
            return place + 1
    return None


NODE_NUMBERS = ("--node-rank", "--node_rank", "--machine_rank", "--machine-rank")


def check_for_nodes(command: Sequence[str], nodes: int, given_by: str = "--nnodes") -> None:
    """Raise RecipeError if the command contradicts the number of nodes in `given_by`, or starts the other nodes
    itself."""
    if option := next((word.partition("=")[0] for word in command if word.partition("=")[0] in NODE_NUMBERS), None):
        raise _misfit(f"the command has {option}", "remove it: each node gets its own number")
    if "--standalone" in command:
        raise _misfit(f"--standalone allows only one node, but {given_by} is {nodes}", "leave --standalone out")
    given = _option(command, [name for name in NODE_OPTIONS if name != "--hostfile"])
    if given is not None and given not in (str(nodes), f"{nodes}:{nodes}"):
        message = f"the command is for {given} nodes, but {given_by} is {nodes}"
        raise _misfit(message, "remove the number from the command")
    if any(Path(word).name == "deepspeed" for word in command[:1]):
        message = "deepspeed's launcher starts the other nodes itself, over ssh"
        raise _misfit(message, "start its script with torchrun --nproc-per-node N instead of deepspeed")


def _misfit(message: str, hint: str) -> RecipeError:
    return RecipeError(Problem("usage", message, "COMMAND", hint))


def _option(command: Sequence[str], names: Sequence[str]) -> str | None:
    for word, following in zip(command, [*command[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if name in names:
            return value or following
    return None


def script_name(command: Sequence[str]) -> str:
    """Return the name of the training program: the first script or module, otherwise the first word of the command."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word == "-m" and following and following not in _LAUNCHERS:
            return following
        if word.endswith((".py", ".sh")):
            return Path(word).name
    return Path(command[0]).name


def notes_on(command: Sequence[str]) -> list[str]:
    """Return why the steps of a command cannot be counted, and a warning if torchrun opens a port on all networks."""
    notes = []
    for place, word in enumerate(command):
        if _PYTHON.fullmatch(Path(word).name):
            given = itertools.takewhile(
                lambda word: word.startswith("-") and word not in ("-m", "-c"), command[place + 1 :]
            )
            if found := next(filter(_ISOLATED.fullmatch, given), None):
                notes.append(f"steps cannot be counted: python {found} ignores PYTHONPATH, which step counting needs")
                break
    words = list(itertools.takewhile(lambda word: not word.endswith(".py"), command))
    if not {*words, *(Path(word).name for word in words)}.isdisjoint(_LAUNCHERS):
        notes.append(
            "note: torchrun opens a store that anyone who can reach this machine can write to, and unpickles its "
            "content (docs/security.md)"
        )
    return notes
