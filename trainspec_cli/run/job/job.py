"""A job: everything needed to start the processes of one launch, including its torchrun command and environment."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import secrets
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path

import trainspec_cli
from trainspec_cli.core.environment_names import GENERATION, GROUP, LAUNCH_ID, NODE, START
from trainspec_cli.core.node import cpu_name, make_folder
from trainspec_cli.planner.memory.caching_allocator import GROWS_SEGMENTS
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.folder.generations import GenerationRecord
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.machine import NodePlace, communication_environment, interface_of, own_address
from trainspec_cli.run.recovery.recovery import FAILURE_GRACE_S

ENGINE = ("-m", "trainspec_cli.engine")
LOOPBACK = "127.0.0.1"
COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"
TORCHRUN = (sys.executable, "-m", "trainspec_cli.engine.comm.joining")


@dataclass(frozen=True)
class Job:
    root: Path
    """The absolute path of the run folder."""
    command: tuple[str, ...]
    """torchrun and the workers that it starts."""
    environment: Mapping[str, str]
    """Variables added to the inherited environment."""
    world_size: int
    stop_grace_s: float
    logs: Path
    """The folder for this launch's output."""
    worker: tuple[str, ...] = ()
    """The command that torchrun starts on every device."""
    ranks: range | None = None
    """Global ranks of a replica group; None for all ranks."""
    nodes: tuple[int, ...] = ()
    """With several nodes: their numbers, ordered by place. The nodes after those of the plan are spares."""
    num_nodes: int = 0
    """With several nodes and without a plan: the number of nodes that run the job. The nodes after them are spares."""
    allowed_nodes: range = range(0)
    """With several nodes and without a plan: the numbers of nodes that can run the job."""
    left_out: tuple[int, ...] = ()
    """Numbers of the nodes that were dropped because they were too slow."""
    lost: tuple[tuple[int, str], ...] = ()
    """Nodes that a start without them precedes, with their hostnames: this node has taken over the run from another."""
    is_restart: bool = False
    """Whether an earlier generation of the same supervisor has ended."""
    survives_lost_nodes: bool = False
    """Whether the run restarts within this job if a node other than the first is lost."""
    program: str = "torchrun"
    """Name of the program started on each node, for messages."""
    log: str = "torchrun.log"
    """Name of that program's output file on each node."""
    max_restarts: int | None = None
    """Maximum number of restarts after failures over the entire job; None if the plan's resilience settings decide."""
    earlier_steps: int = 0
    """Number of steps completed by earlier starts, for a job whose checkpoints trainspec does not know."""
    join_timeout_s: float | None = None
    """Time in seconds that the nodes wait for one another; None for the plan's value."""
    rejoin_s: float | None = None
    """Time in seconds after which a node that does not join this start is lost, because it took part in the last one
    and was not known to be lost; None if nodes are awaited longer."""
    begins_unseen: bool = False
    """True if the job may have something to save before it writes its first event."""

    @property
    def run(self) -> RunDir:
        return RunDir(self.root)

    @property
    def torchrun_log(self) -> Path:
        """The output of the program started on this node, or of the command that starts the nodes' agents."""
        return self.logs / ("torchrun.log" if self.nodes else self.log)

    @property
    def launch_id(self) -> str:
        """The id that every process of the job has in its environment, so that the process can be found."""
        return self.environment[LAUNCH_ID]


def build_job(plan: Plan, root: Path, machine: Machine, worker: Sequence[str] = ENGINE) -> Job:
    """Build the job. `worker`: the command that torchrun starts on every device; the run folder is appended as its last
    argument."""
    root = root.absolute()
    logs = next_log_folder(RunDir(root).logs)
    return Job(
        root=root,
        worker=(*worker, str(root)),
        command=torchrun_command(plan.group_size, logs, (*worker, str(root))),
        environment=job_environment(plan, machine, launch_id=secrets.token_hex(8)),
        world_size=plan.world_size,
        stop_grace_s=plan.spec.run.stop_grace_s,
        logs=logs,
    )


def build_node_job(plan: Plan, root: Path, machine: Machine, node: int, record: GenerationRecord) -> Job:
    """Return one node's part of a multi-node job whose generation is described by `record`. Raises MachineError if this
    node cannot resolve the first node's name."""
    place = NodePlace(node, record.num_nodes, record.head)
    worker = (*record.worker, str(root))
    logs = Path(record.logs) / f"node{node:05d}"
    environment = node_environment(plan, machine, f"{record.launch_id}-{node}", place)
    return Job(
        root=root,
        worker=worker,
        command=node_command(place, "workers", plan.devices_per_node, logs, worker),
        environment={
            **environment,
            **communication_environment(plan, RunDir(root)),
            **record.rendezvous,
            GENERATION: str(record.generation),
            NODE: str(record.nodes[node] if record.nodes else node),
        },
        world_size=plan.world_size,
        stop_grace_s=plan.spec.run.stop_grace_s,
        logs=logs,
    )


def next_log_folder(logs: Path) -> Path:
    """Return logs/launch_01 or, for a resume, the folder with the next number."""
    taken = [path.name for path in logs.glob("launch_*")]
    return logs / f"launch_{len(taken) + 1:02d}"


def group_job(job: Job, plan: Plan | None, group: int, number: int, place: NodePlace | None = None) -> Job:
    """Return the job of one start of a replica group, or of its part on the node at `place`. For a single-group run,
    this is `job` itself."""
    if plan is None or plan.replica_groups == 1:
        return job
    name = start_folder(group, number)
    ranks = ranks_of(plan, group)
    if place is None:
        logs = job.logs / name
        command = torchrun_command(len(ranks), logs, job.worker)
    else:
        nodes = plan.nodes_of_group(group)
        here = NodePlace(place.node - nodes.start, len(nodes), place.head)
        processes_here = len(ranks) // len(nodes)
        ranks = ranks[here.node * processes_here : (here.node + 1) * processes_here]
        logs = job.logs.parent / name / job.logs.name
        command = node_command(here, name, processes_here, logs, job.worker)
    environment = {**job.environment, GROUP: str(group), START: str(number), **devices_of(plan, group)}
    return replace(job, command=command, environment=environment, world_size=plan.group_size, logs=logs, ranks=ranks)


def start_folder(group: int, number: int) -> str:
    """Return the name of the log folder of one start."""
    return f"group{group:05d}_start{number:03d}"


def ranks_of(plan: Plan, group: int) -> range:
    """Return a group's global ranks."""
    return range(group * plan.group_size, (group + 1) * plan.group_size)


def devices_of(plan: Plan, group: int) -> dict[str, str]:
    """If several groups share a node, return the environment variable that makes only the group's own GPUs visible."""
    per_node = plan.replica_groups // plan.num_nodes
    if plan.device != "cuda" or per_node < 2:
        return {}
    shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(per_node * plan.group_size)))
    first = group % per_node * plan.group_size
    return {"CUDA_VISIBLE_DEVICES": ",".join(shown.split(",")[first : first + plan.group_size])}


# The command line of a job


def torchrun_command(processes: int, logs: Path, worker: Sequence[str]) -> tuple[str, ...]:
    """Return the command that starts `worker` (`-m module` or a script, with its arguments) `processes` times on this
    node.

    The processes rendezvous through a file, so no port is opened. Output goes to LOGS/workers_*/attempt_0/<local
    rank>/{stdout,stderr}.log."""
    return (*TORCHRUN, "--nnodes", "1", *_options("workers", processes, LOOPBACK, logs), *worker)


def node_command(place: NodePlace, name: str, processes: int, logs: Path, worker: Sequence[str]) -> tuple[str, ...]:
    """Return the command for one node of a multi-node job. Ranks follow the nodes' numbers. `name` distinguishes this
    start from other starts on the same rendezvous server. torchrun is given this node's address, because by default it
    resolves the node's name, which may yield a loopback address."""
    nodes = ("--nnodes", str(place.num_nodes), "--rdzv-conf", f"node={place.node}")
    return (*TORCHRUN, *nodes, *_options(name, processes, own_address(place.head), logs), *worker)


def _options(name: str, processes: int, address: str, logs: Path) -> tuple[str, ...]:
    return (
        *("--nproc-per-node", str(processes)),
        # torchrun itself restarts nothing, because it does not know about checkpoints. The supervisor restarts the
        # entire run.
        *("--max-restarts", "0"),
        *("--rdzv-backend", "trainspec"),
        *(
            "--rdzv-endpoint",
            "private",
        ),  # torchrun requires an endpoint, but the workers take the real address from the environment
        *("--rdzv-id", name),
        *("--local-addr", address),
        *("--log-dir", str(logs)),
        *("--redirects", "3"),
    )


def render_command(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> str:
    """Return shell code that is equivalent to the launch, with one variable or option per line."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    options: list[str] = []
    for word in map(shlex.quote, command):
        # Keep an option and its value on one line.
        if options and options[-1].startswith("-") and not word.startswith("-") and " " not in options[-1]:
            options[-1] += f" {word}"
        else:
            options.append(word)
    return " \\\n  ".join([f"cd {shlex.quote(str(folder))} && env", *settings, *options]) + "\n"


# The environment variables of a job


def job_environment(plan: Plan, machine: Machine, launch_id: str) -> dict[str, str]:
    """Return the variables to add to this process's environment. Raises MachineError if another user owns the folder
    that compiled code would be loaded from."""
    # torch.compile loads code from this folder. Its name is predictable, so it is created or checked beforehand.
    cache = Path(os.environ.get(COMPILE_CACHE, Path(tempfile.gettempdir(), f"torchinductor_{os.geteuid()}")))
    make_folder(cache, f"set {COMPILE_CACHE} to a folder that you own")
    return {
        LAUNCH_ID: launch_id,
        COMPILE_CACHE: str(cache),
        # Without this, torchrun limits each process to a single thread.
        "OMP_NUM_THREADS": str(max(1, machine.cpu_cores // plan.devices_per_node)),
        # With this, a crash in native code leaves its Python stack in the log.
        "PYTHONFAULTHANDLER": "1",
        # This records each rank's last collectives, for the report on a hanging step. The cost is too small to measure.
        "TORCH_FR_BUFFER_SIZE": "200",
        # When NCCL fails in one process, its watchdog uses the store to ask all others to write these records to a
        # file, and kills them some minutes later, including replica groups that survive the failure but share the
        # store. So turn this off.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        # torch 2.11 does not know this variable, and waits for 30 s.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(FAILURE_GRACE_S),
        # On a single node, there is no hostname to resolve, and gloo's data sockets listen only on the loopback
        # interface.
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        **(keep_freed_memory() if plan.device == "cpu" else growing_segments(machine)),
        **own_modules(),
    }


def node_environment(plan: Plan, machine: Machine, launch_id: str, place: NodePlace) -> dict[str, str]:
    """Return the environment of one node in a multi-node job, where gloo uses the interface that leads to the first
    node."""
    interface = interface_of(own_address(place.head))
    found = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    alone = job_environment(plan, machine, launch_id)
    # The loopback interface does not lead to other nodes. If no interface is found, gloo uses that of the node's
    # hostname.
    del alone["GLOO_SOCKET_IFNAME"]
    return alone | found


def keep_freed_memory() -> dict[str, str]:
    """Return settings that keep glibc from returning large freed blocks to the kernel, because otherwise every step
    would fault the same pages in again. With these settings, a 30M-parameter llama on two cores trained at 4,150
    instead of 3,270 tokens/s. Other systems ignore them."""
    return {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**26)}


def growing_segments(machine: Machine) -> dict[str, str]:
    """Let a GPU's memory segments grow if the vendor's torch builds support it, so that tensors of varying sizes do not
    fragment memory. The user's own setting takes precedence."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    is_amd = any(word in name.lower() for name in machine.gpu_names for word in ("amd", "instinct", "radeon"))
    if any(name in os.environ for name in names) or ("amd" if is_amd else "nvidia") not in GROWS_SEGMENTS:
        return {}
    return {names[0]: "expandable_segments:True"}


def own_modules() -> dict[str, str]:
    """Return the environment of every Python process that trainspec starts. It finds trainspec's modules, but none in
    the current folder, where a file such as random.py would shadow the standard library's module."""
    return {"PYTHONSAFEPATH": "1", **python_path()}


def python_path() -> dict[str, str]:
    """Return a path that makes workers run the same copy of trainspec as this process, even from a checkout."""
    home = str(Path(trainspec_cli.__file__).resolve().parent.parent)
    installed = {str(Path(sysconfig.get_path(kind)).resolve()) for kind in ("purelib", "platlib")}
    if home in installed:
        return {}
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (home, inherited)))}


# Record the software of a run: the versions of the interpreter and of every installed dependency, and the state of git.


GIT_TIMEOUT_S = 10.0
# Git runs no commands for these queries. The settings are for git versions that would run some.
_NO_COMMANDS = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)([^;]*)(?:;(.*))?")


def versions() -> dict[str, str]:
    """Return the versions of Python, the system, trainspec and all installed dependencies, without importing them."""
    found: dict[str, str] = {}
    wanted = ["trainspec"]
    while wanted:
        # Names are normalised, because `nvidia_ml_py`, `nvidia-ml-py` and `Nvidia.ml.py` are the same package (PEP
        # 503).
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name in found:
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # the dependency is for another system, or trainspec is run from a checkout
        found[name] = distribution.version
        needed = (_REQUIREMENT.match(line) for line in distribution.requires or ())
        wanted += [match.group(1) for match in needed if match and "extra" not in (match.group(3) or "")]
    return {"python": platform.python_version(), "system": platform.platform(), **dict(sorted(found.items()))}


@dataclass(frozen=True)
class GitState:
    """The state of a folder's repository."""

    commit: str
    branch: str | None
    """The current branch; None for a detached head."""
    dirty: bool | None
    """True if tracked files differ from the commit; None if unknown."""


@dataclass(frozen=True)
class GitRefusal:
    """Git refuses to read the repository."""

    refused: str
    """Git's message, which states the reason."""


def git_state(folder: Path) -> GitState | GitRefusal | None:
    """Return the state of the repository that contains `folder`; None outside a repository or without git.

    No command from the repository's configuration is run, because the repository may be untrusted. Git refuses to read
    another user's repository, unless `safe.directory` allows it."""
    found = _git(folder, "rev-parse", *_FACTS)
    if found is None or found.returncode:
        return GitRefusal(found.stderr.strip().partition("\n")[0]) if found and _DUBIOUS in found.stderr else None
    commit, top, index, objects, object_format = found.stdout.splitlines()
    branch = _git(folder, "symbolic-ref", "--quiet", "--short", "HEAD")
    is_dirty = _is_dirty(commit, folder / top, folder / index, folder / objects, is_sha256=object_format == "sha256")
    return GitState(commit, branch.stdout.strip() or None if branch else None, is_dirty)


_FACTS = ("HEAD", "--show-toplevel", "--git-path", "index", "--git-path", "objects", "--show-object-format")
_DUBIOUS = "dubious ownership"
_COMPARISON = "filemode|symlinks|ignorecase|precomposeunicode|trustctime|checkstat|autocrlf|eol"
"""Keys of `core` that control how files are compared with the commit. None of them names a command."""


def _is_dirty(commit: str, top: Path, index: Path, objects: Path, *, is_sha256: bool) -> bool | None:
    """Return True if tracked files were changed; None if unknown, for example when a changed file has a filter
    (git-lfs).

    The repository's index, objects and files are compared through a temporary git folder, because the repository's
    configuration may name commands (filters, hooks, monitors, fetch helpers)."""
    comparison = _git(top, "config", "--null", "--get-regexp", rf"^core\.({_COMPARISON})$")
    pairs = (entry.partition("\n") for entry in comparison.stdout.split("\0") if entry) if comparison else ()
    settings = [part for key, _, value in pairs for part in ("-c", f"{key}={value or 'true'}")]
    with tempfile.TemporaryDirectory(prefix="trainspec-git-") as scratch:
        folder = Path(scratch)
        extensions = "[extensions]\n\tobjectformat = sha256\n" if is_sha256 else ""
        (folder / "refs").mkdir()
        (folder / "HEAD").write_text(f"{commit}\n")
        (folder / "config").write_text(f"[core]\n\trepositoryformatversion = {int(is_sha256)}\n{extensions}")
        own = {
            "GIT_DIR": scratch,
            "GIT_WORK_TREE": str(top),
            "GIT_INDEX_FILE": str(index),
            "GIT_OBJECT_DIRECTORY": str(objects),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
        }
        ask = partial(_git, top, *settings, environment=own)
        status = ask("status", "--porcelain", "-z", "--no-renames", "--untracked-files=no", "--ignore-submodules=dirty")
        if status is None or status.returncode:
            return None
        changed = [entry for entry in status.stdout.split("\0") if entry]
        touched = [entry[3:] for entry in changed if entry.startswith(" M")]
        if len(touched) < len(changed) or not touched:
            return bool(changed)
        filters = ask("check-attr", "-z", "--stdin", "filter", stdin="".join(f"{name}\0" for name in touched))
    unfiltered = {"unspecified", "unset"} & set(filters.stdout.split("\0")[2::3]) if filters else True
    return True if unfiltered else None


def _git(
    folder: Path, *arguments: str, environment: Mapping[str, str] | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str] | None:
    """Run git in `folder`; return None if git is missing or does not answer in time."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    quiet = {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "none"}
    try:
        return subprocess.run(
            ["git", "--no-pager", *_NO_COMMANDS, "-C", str(folder), *arguments],
            env={**inherited, **quiet, **(environment or {})},
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=GIT_TIMEOUT_S,
            input=stdin,
        )
    except (OSError, subprocess.SubprocessError):
        return None


# Identify this machine by a digest of the system's id. The id itself must stay private.


SYSTEM_IDS = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
_RANDOM = 1 << 40
"""The bit that the `uuid` module sets in the hardware address that it makes up if the machine has none."""
_PURPOSE = "trainspec machine 1"


def machine_identity(files: tuple[Path, ...] = SYSTEM_IDS) -> str:
    """Return 32 hexadecimal digits that stay the same until the system is reinstalled or the processor model changes;
    empty text if the system has neither an id nor a network address. The digest serves only this purpose, because the
    system's id itself must stay private."""
    identity = next(filter(None, map(_read, files)), "")
    if not identity and not (address := uuid.getnode()) & _RANDOM:
        identity = f"{address:012x}"
    if not identity:
        return ""
    return hashlib.sha256("\n".join((_PURPOSE, identity, cpu_name())).encode()).hexdigest()[:32]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
