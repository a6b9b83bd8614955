"""The batch script of one run or of a sweep's array: Slurm options, environment, and one srun."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainspec_cli.corpus.cache import cache_dir
from trainspec_cli.environment_names import CACHE, HUB_MIRROR
from trainspec_cli.errors import Problem, RecipeError
from trainspec_cli.launcher.backend.nodes.backend import AGENT, agent_command
from trainspec_cli.launcher.job.job import own_modules
from trainspec_cli.launcher.slurm import container
from trainspec_cli.launcher.slurm.activation import activation_lines
from trainspec_cli.printable import on_one_line
from trainspec_cli.reading.hub_cache import hub_cache
from trainspec_cli.spec.results.plan import Plan
from trainspec_cli.spec.rules.slurm import gpus_of_node

DRIVER = "trainspec_cli.session.slurm_job"
"""The module that the script finally executes."""

ASKED = ("partition", "account", "qos", "time", "cpus_per_task", "mem", "constraint", "exclude", "dependency")
"""Fields of `cluster.slurm` that are options of sbatch by the same names."""
_PLAIN_WORD = re.compile(r"[\w.,:;/@%+=*&|()\[\]{}^~!?<>$-]+", re.ASCII)

KEPT = (CACHE, HUB_MIRROR)
"""Variables of the submitting shell that the script sets; the rest comes from the site."""


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
    """Return the script. Several `roots` make an array with one task each; the job starts in `folder`. `needed`: what
    the runs read and a container must see, beside `folder` and their own folders. `force`: train although the plan is
    predicted not to fit. Raises RecipeError where a container cannot see a folder."""
    slurm, own = plan.spec.cluster.slurm, [root.parent if len(roots) > 1 else root for root in roots]
    srun, agent = _start(plan, folder, [folder, *own, *needed], by_hostfile=places_nodes(plan))
    lines = [
        "#!/bin/bash",
        f"# trainspec {on_one_line(shlex.join(argv))}",
        *(f"#SBATCH {option}" for option in _options(plan, roots, recipe)),
        "",
        f"cd {shlex.quote(str(folder))}",
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(_variables().items())),
        *slurm.setup,
        *activation_lines(os.environ, sys.prefix, sys.executable),
        *container.exports(slurm),
        "",
        *_choose_root(roots),
        "# Begins or resumes the run, watches over it, requeues it at the time limit, and ends with its exit code.",
        f'exec {shlex.join([sys.executable, "-m", DRIVER, *(["--force"] if force else [])])} "$run" \\',
        f"  {shlex.join(srun)} \\",
        f"  {shlex.join(agent)}",
    ]
    return "\n".join(lines) + "\n"


def check_folder(root: Path) -> None:
    """Raise RecipeError if sbatch could not write the log below `root` (`%j` fails beside a backslash), or the script
    could not name it."""
    path = str(root)
    if "\\" in path or path != on_one_line(path):
        message = f"sbatch takes no backslash, line break or control character in the run's folder, {on_one_line(path)}"
        raise RecipeError(Problem("bad_text", message, "run.dir", "choose another run.dir, or work in another folder"))


def log_of(root: Path) -> Path:
    """Return the log's pattern; %j is the job's number, and a requeued job appends."""
    return root / "logs" / "slurm-%j.log"


def array_log(roots: Sequence[Path]) -> Path:
    """Return the pattern of an array's logs, which lie beside the runs: a script has one pattern for all tasks."""
    return roots[0].parent / "slurm" / "%A_%a.log"


def _options(plan: Plan, roots: Sequence[Path], recipe: str) -> Iterator[str]:
    slurm = plan.spec.cluster.slurm
    is_array = len(roots) > 1
    yield _option("job-name", slurm.job_name or f"trainspec-{on_one_line(recipe)}")
    yield f"--nodes={plan.num_nodes}"
    yield "--ntasks-per-node=1"
    yield _option("output", _pattern(array_log(roots) if is_array else log_of(roots[0])))
    yield "--open-mode=append"
    if is_array:
        parallel = f"%{slurm.array_parallel}" if slurm.array_parallel else ""
        yield f"--array=0-{len(roots) - 1}{parallel}"
    yield from _asked(plan)
    if slurm.exclusive:
        yield "--exclusive"
    yield from _outliving(plan)
    yield f"--signal=B:USR2@{slurm.warn_s}"
    yield "--requeue" if slurm.max_requeues else "--no-requeue"
    yield from slurm.sbatch_lines


def _asked(plan: Plan) -> Iterator[str]:
    given = {name: getattr(plan.spec.cluster.slurm, name) for name in ASKED}
    yield from (_option(name.replace("_", "-"), str(value)) for name, value in given.items() if value is not None)
    yield from _gpus(plan)


def _gpus(plan: Plan) -> Iterator[str]:
    """Yield the option that asks for a node's GPUs, in the site's own way; srun takes them from the job."""
    slurm = plan.spec.cluster.slurm
    asked = slurm.gpus_per_node or (str(plan.devices_per_node) if plan.device == "cuda" else None)
    if asked is None or slurm.gpu_request == "none":
        return
    gpus = gpus_of_node(asked, plan.devices_per_node) or asked
    is_gres = slurm.gpu_request == "gres"
    yield _option(slurm.gpu_request.replace("_", "-"), f"gpu:{gpus}" if is_gres else gpus)


def _option(name: str, value: str) -> str:
    """Quote an option by sbatch's own rules for `#SBATCH` lines.

    Blanks end a word and `#` begins a comment, except between double quotes; a backslash escapes the next character,
    between quotes too.
    """
    if not _PLAIN_WORD.fullmatch(value):
        value = '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
    return f"--{name}={value}"


def _pattern(log: Path) -> str:
    """Escape per cent signs of the folder; only the file's name holds patterns such as %j."""
    return f"{str(log.parent).replace('%', '%%')}/{log.name}"


def _variables() -> dict[str, str]:
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    return {"PYTHONUNBUFFERED": "1", **own_modules(), **kept}


def _caches() -> dict[str, str]:
    """Return the folders of caches by name: a home inside a container need not be that outside."""
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
    """Return the command that starts an agent on each node, in the container if there is one, which sees `needed`."""
    srun, agent = _start(plan, folder, needed)
    return [*srun, *agent]


def _start(
    plan: Plan, folder: Path, needed: Sequence[Path], *, by_hostfile: bool = False
) -> tuple[list[str], list[str]]:
    """Return srun with its options, and what it starts on each node."""
    slurm, srun = plan.spec.cluster.slurm, srun_command(plan, by_hostfile=by_hostfile)
    if slurm.container_image is None:
        return srun, list(agent_command())
    mounted = container.mounts(slurm, needed)
    inside = [*container.program(plan, folder, mounted), *container.python(slurm, {**_variables(), **_caches()})]
    return [*srun, *container.srun_options(slurm, folder, mounted)], [*inside, *AGENT]


def srun_command(plan: Plan, *, by_hostfile: bool = False) -> list[str]:
    """Return the srun command with one task per node. A failed task does not end the others; their agents report.

    `by_hostfile`: tasks are numbered by the hostfile that the job writes (`placing.py`).
    """
    slurm, nodes = plan.spec.cluster.slurm, plan.num_nodes
    return [
        *("srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"),
        *([f"--cpus-per-task={slurm.cpus_per_task}"] if slurm.cpus_per_task else []),
        *_outliving(plan),
        *(["--distribution=arbitrary"] if by_hostfile else []),
        *("--cpu-bind=none", "--kill-on-bad-exit=0", "--unbuffered", "--mpi=none"),
    ]


def places_nodes(plan: Plan) -> bool:
    """Return whether the plan's cost depends on which nodes stand together: the job then numbers them by a hostfile."""
    return plan.blueprint is not None and plan.blueprint.sorts_nodes


def _outliving(plan: Plan) -> Iterator[str]:
    """Yield the option that lets replica groups go on when a node fails: Slurm must not kill the job."""
    if plan.replica_groups > 1:
        yield "--no-kill"
