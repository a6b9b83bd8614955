"""The environment variables a job's processes get, and why."""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from pathlib import Path

import trainspec_cli
from trainspec_cli.environment_names import GROUP, LAUNCH_ID, START
from trainspec_cli.launch.job.place import NodePlace, interface_of, own_address
from trainspec_cli.policy.recovery import FAILURE_GRACE_S
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.results.plan import Plan
from trainspec_cli.trust import make_folder

COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def job_environment(plan: Plan, machine: Machine, launch_id: str) -> dict[str, str]:
    """Return what is set on top of this process' own environment. Raises MachineError where another user holds the
    folder that compiled code would be loaded from."""
    return {
        LAUNCH_ID: launch_id,
        COMPILE_CACHE: str(_compile_cache()),
        # Without it torchrun gives every process one thread.
        "OMP_NUM_THREADS": str(max(1, machine.cpu_cores // plan.devices_per_node)),
        # A crash in native code leaves its Python stack in the log.
        "PYTHONFAULTHANDLER": "1",
        # Each rank's last collectives, for the report of a step that hangs; it costs nothing that can be measured.
        "TORCH_FR_BUFFER_SIZE": "200",
        # torch 2.11 does not know it and waits 30 s.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(FAILURE_GRACE_S),
        # One node talks to itself: no hostname to resolve, and gloo's data sockets listen on the loopback alone.
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        **(_KEEP_FREED_MEMORY if plan.device == "cpu" else _growing_segments()),
        **own_modules(),
    }


def node_environment(plan: Plan, machine: Machine, launch_id: str, place: NodePlace) -> dict[str, str]:
    """Return the environment of one node of several: gloo takes the interface that leads to the first node."""
    interface = interface_of(own_address(place.head))
    found = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    alone = job_environment(plan, machine, launch_id)
    del alone["GLOO_SOCKET_IFNAME"]
    return alone | found


def group_environment(group: int, start: int) -> dict[str, str]:
    """Return what a replica group's processes get on top."""
    return {GROUP: str(group), START: str(start)}


_KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**26)}
"""glibc gives large blocks back to the kernel when they are freed, and every step then faults the same pages in again:
a 30M-parameter llama on two cores trained at 3,270 tokens/s with that and 4,150 without. Other systems ignore these."""


def _compile_cache() -> Path:
    """torch.compile loads code from this folder of a name that anyone can guess: it is made beforehand, or checked."""
    usual = Path(tempfile.gettempdir(), f"torchinductor_{os.geteuid()}")
    folder = Path(os.environ.get(COMPILE_CACHE, usual))
    make_folder(folder, f"set {COMPILE_CACHE} to a folder of your own")
    return folder


def _growing_segments() -> dict[str, str]:
    """Let a GPU's segments grow, so that tensors of changing sizes leave no holes; the user's own setting stays."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return {} if any(name in os.environ for name in names) else {names[0]: "expandable_segments:True"}


def own_modules() -> dict[str, str]:
    """Return what every Python that trainspec starts needs: its modules, and none from the folder one stands in, where
    a file such as random.py would stand in for the library's."""
    return {"PYTHONSAFEPATH": "1", **python_path()}


def python_path() -> dict[str, str]:
    """The workers run the same copy of trainspec as this process, also from a checkout."""
    home = str(Path(trainspec_cli.__file__).resolve().parent.parent)
    installed = {str(Path(sysconfig.get_path(kind)).resolve()) for kind in ("purelib", "platlib")}
    if home in installed:
        return {}
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (home, inherited)))}
