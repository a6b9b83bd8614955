"""The job of a command of the user's own: what is set in its environment, on paper."""

from __future__ import annotations

import itertools
import math
import os
import re
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.environment_names import LAUNCH_ID, PROGRESS
from trainspec_cli.errors import Problem, RecipeError
from trainspec_cli.launcher.job.job import Job, OwnCommand, growing_segments, keep_freed_memory, next_log_folder
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.recipe.cluster import Machine

HOOK = Path(__file__).parent / "hook"
"""The folder on PYTHONPATH."""

PROCESS_OPTIONS = ("--nproc-per-node", "--nproc_per_node", "--num_processes", "--num-processes", "--num_gpus")
"""Options by which torchrun, accelerate and deepspeed are told how many processes to start here."""
NODE_OPTIONS = ("--nnodes", "--num_machines", "--num-machines", "--num_nodes", "--hostfile")
_PYTHON = re.compile(r"python[0-9.]*$")
_ISOLATED = re.compile(r"-[a-zA-Z]*[IES][a-zA-Z]*$")
_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


@dataclass(frozen=True)
class Wanted:
    """What `trainspec run` is asked for, beside the command."""

    max_restarts: int
    grace_s: float
    hang_s: float | None
    """None: never ended for a hang."""


def check_command(command: Sequence[str]) -> None:
    """Raise RecipeError where there is no command, or none that can be started."""
    if not command:
        hint = "such as trainspec run -- python train.py"
        raise RecipeError(Problem("usage", "there is no command to run; it stands after --", hint=hint))
    if shutil.which(command[0]):
        return
    program = Path(command[0])
    if program.is_file():
        message, hint = "is a file that cannot be executed", f"such as trainspec run -- python {command[0]}"
        if program.suffix != ".py":
            hint = f"make it executable: chmod +x {command[0]}"
    else:
        message, hint = "is no program here", "give its whole path, or activate the environment that holds it"
    raise RecipeError(Problem("no_command", f"{command[0]} {message}", "COMMAND", hint))


def build_own_job(command: Sequence[str], root: Path, machine: Machine, wanted: Wanted) -> Job:
    root = root.absolute()
    return Job(
        root=root,
        command=tuple(command),
        environment={
            **_environment(command, machine, secrets.token_hex(8)),
            # torchrun kills workers that save for longer than this.
            **_unless_set({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(wanted.grace_s))}),
        },
        world_size=process_count(command) or 1,
        stop_grace_s=wanted.grace_s,
        logs=next_log_folder(RunDir(root).logs),
        own=OwnCommand(script_name(command), wanted.max_restarts, wanted.hang_s),
    )


def start_environment(job: Job, generation: int) -> dict[str, str]:
    """Return what one start adds: where its processes count their steps, and where torchrun logs them."""
    return {
        PROGRESS: f"{job.launch_id}:{job.run.progress(generation)}",
        **_unless_set({"PET_LOG_DIR": str(job.logs / "ranks"), "PET_TEE": "3"}),
    }


def _environment(command: Sequence[str], machine: Machine, launch_id: str) -> dict[str, str]:
    """Return what is set on top of this process' own environment; what the user has set stays."""
    processes = process_count(command)
    environment = {
        # A crash in native code leaves its Python stack in the log.
        "PYTHONFAULTHANDLER": "1",
        # What a program prints is in its log at once, also where it is killed.
        "PYTHONUNBUFFERED": "1",
    }
    if processes:
        environment["OMP_NUM_THREADS"] = str(max(1, machine.cpu_cores // processes))
    if not machine.gpu_names:
        environment |= keep_freed_memory()
    if is_on_one_node(command):
        port = str(_free_port())
        environment |= {"MASTER_PORT": port, "PET_MASTER_PORT": port}
        environment |= {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    grown = growing_segments() if machine.gpu_names else {}
    path = os.pathsep.join(filter(None, (str(HOOK), os.environ.get("PYTHONPATH"))))
    return {LAUNCH_ID: launch_id, "PYTHONPATH": path, **grown, **_unless_set(environment)}


def _unless_set(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in os.environ}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# What can be seen of a command without running it


def process_count(command: Sequence[str]) -> int | None:
    """Return the processes that a launcher is told to start; None where no option says so in a number."""
    said = _option(command, PROCESS_OPTIONS)
    return int(said) if said and said.isdigit() and int(said) else None


def is_on_one_node(command: Sequence[str]) -> bool:
    return _option(command, NODE_OPTIONS) in (None, "1", "1:1")


def _option(command: Sequence[str], names: Sequence[str]) -> str | None:
    for word, following in zip(command, [*command[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if name in names:
            return value or following
    return None


def script_name(command: Sequence[str]) -> str:
    """Return the name of the program that trains: the first script or module, else the command's own."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word == "-m" and following and following not in _LAUNCHERS:
            return following
        if word.endswith((".py", ".sh")):
            return Path(word).name
    return Path(command[0]).name


def why_uncounted(command: Sequence[str]) -> str:
    """Return why the steps of a command cannot be counted, where that can be seen of it; else nothing."""
    for place, word in enumerate(command):
        if _PYTHON.fullmatch(Path(word).name):
            options = []
            for option in command[place + 1 :]:
                if not option.startswith("-") or option in ("-m", "-c"):
                    break
                options.append(option)
            if found := next((option for option in options if _ISOLATED.fullmatch(option)), None):
                return f"python {found} reads no PYTHONPATH, through which they are counted"
    return ""


def what_it_opens(command: Sequence[str]) -> str:
    """Return a warning of the port that torchrun opens to every network; nothing where it is not the launcher."""
    words = list(itertools.takewhile(lambda word: not word.endswith(".py"), command))
    names = {*words, *(Path(word).name for word in words)}
    if names.isdisjoint(_LAUNCHERS):
        return ""
    return (
        "torchrun opens a store that anyone who reaches this machine can write to, and unpickles what it finds there "
        "(docs/security.md)"
    )
