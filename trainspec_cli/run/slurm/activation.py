"""The Python environment that was active at submission, as the job's script takes it up again.

The job's Python is named by its full path and needs no activation; what it starts may need the environment's programs
and variables (a compiler, libraries' folders).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainspec_cli.core.printable import on_one_line


def activation_lines(
    environ: Mapping[str, str], prefix: str, python: str, *, of_command: bool = False
) -> Iterator[str]:
    """Yield the lines of the script, and comments that say which environment and why. `prefix` and `python` are those
    of the Python that runs trainspec. `of_command`: the environment is that of a command of the user's own, and
    trainspec need not be installed there."""
    if modules := environ.get("LOADEDMODULES"):
        names = on_one_line(", ".join(modules.split(":")))
        yield f"# Modules loaded at submission: {names}. sbatch passes their variables on; a site that does not"
        yield "# (--export=NONE) needs them in cluster.slurm.setup: the lines above come before the environment."
    virtual = environ.get("VIRTUAL_ENV")
    conda = environ.get("CONDA_PREFIX")
    holds = "." if of_command else ", and that trainspec is installed in."
    if virtual and (of_command or _is_same(virtual, prefix)) and Path(virtual, "bin/activate").is_file():
        yield f"# The virtual environment that was active at submission{holds}"
        yield f". {shlex.quote(f'{virtual}/bin/activate')}"
    elif (
        conda
        and (of_command or _is_same(conda, prefix))
        and (tool := environ.get("CONDA_EXE") or environ.get("MAMBA_EXE"))
    ):
        yield f"# The conda environment that was active at submission{holds}"
        yield from _activate_conda(tool, conda)
    elif not of_command:
        active = virtual or conda
        why = f"{on_one_line(active)} was active, and trainspec is not installed there" if active else "none was active"
        yield f"# No environment is activated: {why}. {on_one_line(python)} is named by its path."


def _activate_conda(tool: str, root: str) -> Iterator[str]:
    """Yield the lines that activate an environment. conda and mamba name the shell in different words: `conda
    shell.bash hook`, `micromamba shell hook --shell bash` (docs.conda.io, mamba.readthedocs.io)."""
    name = Path(tool).name
    hook = [tool, "shell.bash", "hook"] if name == "conda" else [tool, "shell", "hook", "--shell", "bash"]
    yield f'eval "$({shlex.join(hook)})"'
    yield f"{'conda' if name == 'conda' else shlex.quote(name)} activate {shlex.quote(root)}"


def _is_same(folder: str, prefix: str) -> bool:
    return Path(folder).resolve() == Path(prefix).resolve()
