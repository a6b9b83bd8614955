"""The batch script of a single run or of a sweep's array: Slurm options, environment, and one srun."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainspec_cli.core.environment_names import CACHE, HUB_MIRROR, OWN_PATH, OWN_SAFE_PATH
from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.node import cache_dir
from trainspec_cli.core.printable import on_one_line
from trainspec_cli.core.reading.hub_cache import hub_cache
from trainspec_cli.recipe.keys.cluster import ClusterSpec, SlurmSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.rules.run import gpus_of_node
from trainspec_cli.run.backend.nodes.backend import AGENT, agent_command
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.job import own_modules
from trainspec_cli.run.job.machine import describe_communication
from trainspec_cli.run.slurm import container

DRIVER = "trainspec_cli.session.slurm_job"
"""The module that the script runs last."""

ASKED = ("partition", "account", "qos", "time", "cpus_per_task", "mem", "constraint", "exclude", "dependency")
"""Fields of `cluster.slurm` that correspond to sbatch options of the same name."""
_PLAIN_WORD = re.compile(r"[\w.,:;/@%+=*&|()\[\]{}^~!?<>$-]+", re.ASCII)

TRAP = (
    """trap 'code=$?; if [ "${BASH_SOURCE[0]-}" = "$script" ]; then """
    """echo "cluster.slurm.setup failed with exit code $code: $BASH_COMMAND" >&2; exit $code; fi' ERR"""
)
"""Works like `set -e`, except in functions and sourced files, because those of `module` and `conda` contain commands
that may fail."""
KEPT = (CACHE, HUB_MIRROR)
"""Environment variables that the script copies from the submitting shell; the site sets all others."""


@dataclass(frozen=True)
class Asked:
    """The resources that a job requests from Slurm, for a recipe or a user-defined command."""

    slurm: SlurmSpec
    num_nodes: int
    devices_per_node: int | None
    """Number of devices on each node; None if unknown."""
    uses_gpus: bool
    gpu_vendor: str | None = None
    """Vendor of the GPUs; None if the accelerator is unknown."""
    outlives_nodes: bool = False
    """True if the run continues when a node fails. If so, Slurm must not kill the job."""
    by_hostfile: bool = False
    """True if the nodes are numbered by the hostfile that the job writes (`commands.py`)."""


def asked_by_plan(plan: Plan) -> Asked:
    chip = plan.spec.cluster.accelerator
    return Asked(
        slurm=plan.spec.cluster.slurm,
        num_nodes=plan.num_nodes,
        devices_per_node=plan.devices_per_node,
        uses_gpus=plan.device == "cuda",
        gpu_vendor=chip.vendor if chip else None,
        outlives_nodes=plan.replica_groups > 1,
        by_hostfile=places_nodes(plan),
    )


def render_script(
    plan: Plan,
    roots: Sequence[Path],
    recipe: str,
    argv: Sequence[str],
    folder: Path,
    needed: Sequence[Path] = (),
    *,
    force: bool = False,
) -> str:
    """Return the script. With several `roots`, the job is an array with one task for each. The job starts in `folder`.
    `needed`: paths that the runs read, in addition to `folder` and the run folders, and that a container must therefore
    see. `force`: train even if the plan is predicted not to fit. Raises RecipeError if a container cannot see a
    folder."""
    asked = asked_by_plan(plan)
    own = [root.parent if len(roots) > 1 else root for root in roots]
    # The agent on each node sets these variables for its workers. The job itself does not need them.
    communication = [
        line if line.startswith("#") else f"#   {line.replace(str(roots[0]), '$run')}"
        for line in describe_communication(plan, RunDir(roots[0]))
    ]
    srun, agent = _start(asked, folder, [folder, *own, *needed], _caches())
    lines = [
        *_head(asked, roots, recipe, argv, folder),
        *_exports(_variables()),
        *_environment(asked, activation_lines(os.environ, sys.prefix, sys.executable)),
        *_choose_root(roots),
        *communication,
        *_run_driver(["--force"] if force else [], srun, agent),
    ]
    return "\n".join(lines) + "\n"


def render_own_script(cluster: ClusterSpec, root: Path, name: str, argv: Sequence[str], folder: Path) -> str:
    """Return the script of a user-defined command whose run is recorded in `root`.

    Such a run has no plan, so the job requests what its cluster section states. `name`: the program's name, for
    messages. The command gets the PYTHONPATH of the job's shell, not the one that trainspec needs."""
    devices = cluster.devices_per_node
    asked = Asked(
        slurm=cluster.slurm,
        num_nodes=cluster.num_nodes,
        devices_per_node=devices if isinstance(devices, int) else None,
        uses_gpus=cluster.device == "cuda" or cluster.slurm.gpus_per_node is not None,
        gpu_vendor=cluster.accelerator.vendor if cluster.accelerator else None,
    )
    srun, agent = _start(asked, folder, [folder, root], {})
    variables = _variables()
    lines = [
        *_head(asked, [root], name, argv, folder),
        *_exports({name: variables[name] for name in KEPT if name in variables}),
        *_environment(asked, activation_lines(os.environ, sys.prefix, sys.executable, of_command=True)),
        *_choose_root([root]),
        f'export {OWN_PATH}="${{PYTHONPATH-}}" {OWN_SAFE_PATH}="${{PYTHONSAFEPATH-}}"',
        *_exports({name: value for name, value in variables.items() if name not in KEPT}),
        *_run_driver([], srun, agent),
    ]
    return "\n".join(lines) + "\n"


def _head(asked: Asked, roots: Sequence[Path], name: str, argv: Sequence[str], folder: Path) -> Iterator[str]:
    yield "#!/bin/bash"
    yield f"# trainspec {on_one_line(shlex.join(argv))}"
    yield from (f"#SBATCH {option}" for option in _options(asked, roots, name))
    yield ""
    yield f"cd {shlex.quote(str(folder))}"


def _exports(variables: Mapping[str, str]) -> Iterator[str]:
    yield from (f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items()))


def _environment(asked: Asked, activation: Iterator[str]) -> Iterator[str]:
    if asked.slurm.setup:
        yield "# If a line of cluster.slurm.setup fails, the job ends; append || true to a line that may fail."
        yield "script=${BASH_SOURCE[0]-}"
        yield TRAP
        yield from asked.slurm.setup
        yield "trap - ERR"
    yield from activation
    yield from container.exports(asked.slurm)
    yield ""


def _run_driver(options: Sequence[str], srun: Sequence[str], agent: Sequence[str]) -> Iterator[str]:
    yield "# Starts or resumes the run, supervises it, requeues it at the time limit, and exits with its exit code."
    yield f'exec {shlex.join([sys.executable, "-m", DRIVER, *options])} "$run" \\'
    yield f"  {shlex.join(srun)} \\"
    yield f"  {shlex.join(agent)}"


def check_folder(root: Path, named_by: str = "run.dir") -> None:
    """Raise RecipeError if sbatch could not write the log below `root` (`%j` fails next to a backslash), or if the
    script could not contain its name. `named_by`: the key or option that specifies the folder."""
    path = str(root)
    if "\\" in path or path != on_one_line(path):
        message = (
            f"sbatch accepts no backslash, line break or control character in the run's folder, {on_one_line(path)}"
        )
        raise RecipeError(
            Problem("bad_text", message, named_by, f"choose another {named_by}, or submit from another folder")
        )


def log_of(root: Path) -> Path:
    """Return the pattern for the log's file name. %j is the job's number, and a requeued job appends to the log."""
    return root / "logs" / "slurm-%j.log"


def array_log(roots: Sequence[Path]) -> Path:
    """Return the pattern for an array's logs, which are next to the runs, because a script has one pattern for all
    tasks."""
    return roots[0].parent / "slurm" / "%A_%a.log"


def _options(asked: Asked, roots: Sequence[Path], name: str) -> Iterator[str]:
    slurm = asked.slurm
    is_array = len(roots) > 1
    # squeue shows eight characters: those of the run folder if the user named it, otherwise those of the recipe or the
    # script.
    if not is_array and not re.fullmatch(r"\d{8}-\d{6}(-\d+)?|TIME", roots[0].name):
        name = roots[0].name
    yield _option("job-name", slurm.job_name or on_one_line(name))
    yield f"--nodes={asked.num_nodes}"
    yield "--ntasks-per-node=1"
    log = array_log(roots) if is_array else log_of(roots[0])
    # A percent sign in the folder's name must be escaped, because only the file name contains patterns such as %j.
    yield _option("output", f"{str(log.parent).replace('%', '%%')}/{log.name}")
    yield "--open-mode=append"
    if is_array:
        parallel = f"%{slurm.array_parallel}" if slurm.array_parallel else ""
        yield f"--array=0-{len(roots) - 1}{parallel}"
    yield from _asked(asked)
    if slurm.exclusive:
        yield "--exclusive"
    yield from _outliving(asked)
    yield f"--signal=B:USR2@{slurm.warn_s}"
    yield "--requeue" if slurm.max_requeues else "--no-requeue"
    yield from slurm.sbatch_lines


def _asked(asked: Asked) -> Iterator[str]:
    given = {name: getattr(asked.slurm, name) for name in ASKED}
    yield from (_option(name.replace("_", "-"), str(value)) for name, value in given.items() if value is not None)
    yield from _gpus(asked)


def _gpus(asked: Asked) -> Iterator[str]:
    """Yield the option that requests a node's GPUs, in the form that the site uses; srun inherits them from the job."""
    slurm = asked.slurm
    devices = asked.devices_per_node
    wanted = slurm.gpus_per_node or (str(devices) if asked.uses_gpus and devices else None)
    if wanted is None or slurm.gpu_request == "none":
        return
    gpus = gpus_of_node(wanted, devices) or wanted if devices else wanted
    is_gres = slurm.gpu_request == "gres"
    yield _option(slurm.gpu_request.replace("_", "-"), f"gpu:{gpus}" if is_gres else gpus)


def _option(name: str, value: str) -> str:
    """Quote an option according to sbatch's rules for `#SBATCH` lines.

    Blanks end a word and `#` starts a comment, except between double quotes. A backslash escapes the next character,
    also between quotes."""
    if not _PLAIN_WORD.fullmatch(value):
        value = '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
    return f"--{name}={value}"


def _variables() -> dict[str, str]:
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    return {"PYTHONUNBUFFERED": "1", **own_modules(), **kept}


def _caches() -> dict[str, str]:
    """Return environment variables with the paths of the cache folders. The defaults would not work, because the home
    folder inside a container may differ from the one outside."""
    return {CACHE: str(cache_dir().absolute()), "HF_HUB_CACHE": str(hub_cache().absolute())}


def _choose_root(roots: Sequence[Path]) -> Iterator[str]:
    if len(roots) == 1:
        yield f"run={shlex.quote(str(roots[0]))}"
        return
    yield "runs=("
    yield from (f"  {shlex.quote(str(root))}" for root in roots)
    yield ")"
    yield "run=${runs[$SLURM_ARRAY_TASK_ID]}"


def start_command(plan: Plan, folder: Path, needed: Sequence[Path]) -> list[str]:
    """Return the command that starts an agent on each node. If there is a container, the agents run in it, and it sees
    `needed`. The nodes are not numbered by a hostfile."""
    srun, agent = _start(replace(asked_by_plan(plan), by_hostfile=False), folder, needed, _caches())
    return [*srun, *agent]


def _start(
    asked: Asked, folder: Path, needed: Sequence[Path], inside: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return srun with its options, followed by the command that it starts on each node. `inside`: environment
    variables inside a container in addition to the script's."""
    slurm = asked.slurm
    nodes = asked.num_nodes
    srun = [
        *("srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"),
        *([f"--cpus-per-task={slurm.cpus_per_task}"] if slurm.cpus_per_task else []),
        *_outliving(asked),
        *(["--distribution=arbitrary"] if asked.by_hostfile else []),
        # A failed task must not end the others, because the agents report it.
        *("--cpu-bind=none", "--kill-on-bad-exit=0", "--unbuffered", "--mpi=none"),
    ]
    if slurm.container_image is None:
        return srun, list(agent_command())
    mounted = container.mounts(slurm, needed)
    program = container.program(slurm, folder, mounted, uses_gpus=asked.uses_gpus, vendor=asked.gpu_vendor)
    python = container.python(slurm, {**_variables(), **inside})
    return [*srun, *container.srun_options(slurm, folder, mounted)], [*program, *python, *AGENT]


def places_nodes(plan: Plan) -> bool:
    """Return whether the step time depends on which nodes are neighbours. If so, the job numbers the nodes with a
    hostfile."""
    return plan.blueprint is not None and plan.blueprint.sorts_nodes


def _outliving(asked: Asked) -> Iterator[str]:
    if asked.outlives_nodes:
        yield "--no-kill"


# The Python environment that was active at submission, which the job's script activates again. The job's Python is
# specified by its full path and needs no activation. However, the programs that it starts may need the environment's
# programs and variables (a compiler, library folders).


def activation_lines(
    environ: Mapping[str, str], prefix: str, python: str, *, of_command: bool = False
) -> Iterator[str]:
    """Yield the script lines that activate the environment, with comments that state which one it is and why.

    `prefix` and `python` belong to the Python that runs trainspec. `of_command`: the environment belongs to a
    user-defined command, and trainspec need not be installed in it."""
    if modules := environ.get("LOADEDMODULES"):
        names = on_one_line(", ".join(modules.split(":")))
        yield f"# Modules loaded at submission: {names}. sbatch passes their variables on. If the site"
        yield "# disables that (--export=NONE), load them in cluster.slurm.setup, whose lines come before this one."
    virtual = environ.get("VIRTUAL_ENV")
    conda = environ.get("CONDA_PREFIX")
    holds = "." if of_command else ", in which trainspec is installed."
    if virtual and (of_command or _is_same(virtual, prefix)) and Path(virtual, "bin/activate").is_file():
        yield f"# The virtual environment that was active at submission{holds}"
        yield f". {shlex.quote(f'{virtual}/bin/activate')}"
    elif (
        conda
        and (of_command or _is_same(conda, prefix))
        and (tool := environ.get("CONDA_EXE") or environ.get("MAMBA_EXE"))
    ):
        yield f"# The conda environment that was active at submission{holds}"
        # conda and mamba specify the shell differently (docs.conda.io, mamba.readthedocs.io).
        name = Path(tool).name
        hook = [tool, "shell.bash", "hook"] if name == "conda" else [tool, "shell", "hook", "--shell", "bash"]
        yield f'eval "$({shlex.join(hook)})"'
        yield f"{'conda' if name == 'conda' else shlex.quote(name)} activate {shlex.quote(conda)}"
    elif not of_command:
        active = virtual or conda
        why = f"{on_one_line(active)} was active, and trainspec is not installed there" if active else "none was active"
        yield f"# No environment is activated: {why}. {on_one_line(python)} is called by its full path."


def _is_same(folder: str, prefix: str) -> bool:
    return Path(folder).resolve() == Path(prefix).resolve()
