"""The container where a job's agents and their processes run, started by Slurm's pyxis plugin or by Apptainer.

The supervisor stays outside, because it calls scontrol and srun. Inside, the image's own Python runs this copy of
trainspec, which is mounted into the container. Options: github.com/NVIDIA/pyxis (`srun --help` shows them), and
apptainer.org/docs/user/latest/cli/apptainer_exec.html."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import trainspec_cli
from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.printable import on_one_line
from trainspec_cli.recipe.keys.cluster import SlurmSpec

HOME = "/opt/trainspec"
"""The folder inside the container where trainspec is mounted. Python can import nothing else from it."""
INSIDE = {"PYTHONPATH": HOME, "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}
"""Environment variables inside the container. They hide the outer Python's modules, and those below a mounted home
folder, from the image's Python."""
OF_ENVIRONMENT = ("pyvenv.cfg", "conda-meta")
"""The files that mark the root of a virtual or conda environment."""
OF_SYSTEM = (Path("/"), Path("/usr"), Path("/usr/local"))
"""Folders that contain an image's own programs."""
PREFIXES = {"apptainer": "APPTAINERENV_", "singularity": "SINGULARITYENV_"}
"""Environment variables with this prefix are set inside the container without the prefix, and override the image's."""


def mounts(slurm: SlurmSpec, needed: Iterable[Path]) -> list[str]:
    """Return the mounts as SRC:DST[:FLAGS]: trainspec, the folders that the run needs (each at the same path), the
    environment of the container's Python, and the recipe's mounts. Raises RecipeError if a folder cannot be mounted
    because of its name."""
    package = Path(trainspec_cli.__file__).resolve().parent
    own = [_mount(package, f"{HOME}/{package.name}:ro")]
    folders = [*needed]
    # Mount the environment of the container's Python, if it is on this machine, and the installation that a virtual
    # environment is based on, if that is outside the system's folders.
    root = Path(slurm.container_python).parent.parent
    if Path(slurm.container_python).is_absolute() and any((root / name).exists() for name in OF_ENVIRONMENT):
        base = (root / "bin" / "python").resolve().parent.parent
        folders += [root, *([] if base in (*OF_SYSTEM, root.resolve()) else [base])]
    return [*own, *(_mount(source, str(target)) for source, target in _places(folders)), *_asked(slurm)]


def _places(folders: Iterable[Path]) -> Iterator[tuple[Path, Path]]:
    """Yield each folder at its real path, and also under its own name if a link outside all mounts leads there. A
    folder below another one is mounted with it."""
    by_name = {Path(os.path.normpath(folder)): folder.resolve() for folder in folders}
    real = _outermost(by_name.values())
    names = _outermost([*real, *(name for name in by_name if name not in real)])
    yield from ((folder, folder) for folder in real)
    yield from ((by_name[name], name) for name in names if name in by_name and name != by_name[name])


def _asked(slurm: SlurmSpec) -> Iterator[str]:
    for mount in slurm.container_mounts.split(",") if slurm.container_mounts else ():
        yield mount if ":" in mount else f"{mount}:{mount}"


def _mount(source: Path, target: str) -> str:
    path = str(source)
    if source == Path("/") or ":" in path or "," in path:
        message = f"the container needs {on_one_line(path)}, which cannot be mounted because of its name"
        hint = "use a folder below / whose path contains no colons or commas"
        raise RecipeError(Problem("bad_mount", message, "cluster.slurm.container_image", hint))
    return f"{path}:{target}"


def _outermost(folders: Iterable[Path]) -> list[Path]:
    """Return the folders that are not below any other of them. Mounting these is enough to mount all."""
    distinct = list(dict.fromkeys(folders))
    return [folder for folder in distinct if not any(other in folder.parents for other in distinct)]


def srun_options(slurm: SlurmSpec, folder: Path, mounted: Sequence[str]) -> list[str]:
    """Return srun's pyxis options; none without pyxis. `folder`: where the agents start."""
    if slurm.container_image is None or slurm.container_runtime != "pyxis":
        return []
    return [
        f"--container-image={slurm.container_image}",
        f"--container-mounts={','.join(mounted)}",
        f"--container-workdir={folder}",
        *([f"--container-env={','.join(slurm.container_env)}"] if slurm.container_env else []),
    ]


def program(
    slurm: SlurmSpec, folder: Path, mounted: Sequence[str], *, uses_gpus: bool, vendor: str | None
) -> list[str]:
    """Return the program that runs the rest of the command in the container; empty if srun itself does that. `vendor`:
    vendor of the GPUs; None if unknown."""
    if slurm.container_image is None or slurm.container_runtime == "pyxis":
        return []
    wanted = slurm.container_gpus
    if wanted == "auto" and uses_gpus:
        wanted = "amd" if vendor == "amd" else "nvidia"
    gpus = {"nvidia": ["--nv"], "amd": ["--rocm"]}.get(wanted, [])
    binds = [word for mount in mounted for word in ("--bind", mount)]
    return [
        slurm.container_runtime,
        "exec",
        *gpus,
        *binds,
        "--pwd",
        str(folder),
        slurm.container_image,
    ]


def python(slurm: SlurmSpec, variables: dict[str, str]) -> list[str]:
    """Return the command that runs the Python inside the container. It goes through `env`, which sets `variables` and
    trainspec's own variables regardless of the image's values."""
    given = {**variables, **INSIDE}
    return ["env", *(f"{name}={value}" for name, value in sorted(given.items())), slurm.container_python]


def exports(slurm: SlurmSpec) -> Iterator[str]:
    """Yield shell lines that make the variables in `container_env` override the image's under Apptainer."""
    prefix = PREFIXES.get(slurm.container_runtime)
    for name in slurm.container_env if prefix and slurm.container_image is not None else ():
        yield f'[ -z "${{{name}+set}}" ] || export {prefix}{name}="${name}"'
