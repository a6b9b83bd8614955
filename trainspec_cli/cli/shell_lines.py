"""Lines of a recipe that a batch script takes as they are, and whether they are the user's own.

Lines of shell that come from a file that another user owns, or that everyone may write, are submitted only with
--allow-setup. root's files are trusted, and so is the command line.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import indent

from trainspec_cli.cli.load import Loaded
from trainspec_cli.compose.origins import COMMAND_LINE, Origin, find_origin
from trainspec_cli.errors import Problem, RecipeError
from trainspec_cli.spec.recipe.run import RunSpec

ROOT = 0


def shell_lines(spec: RunSpec) -> dict[str, list[str]]:
    slurm = spec.cluster.slurm
    return {"setup": list(slurm.setup), "sbatch_lines": list(slurm.sbatch_lines)}


def render_shell_lines(loaded: Loaded) -> str:
    """The lines below their key and the file they come from; empty where there are none."""
    paragraphs = []
    for name, lines in shell_lines(loaded.spec).items():
        if lines:
            written = indent("\n".join(lines), "  ")
            paragraphs.append(f"cluster.slurm.{name} ({_origin(name, loaded)}):\n{written}\n")
    return "".join(paragraphs)


def check_own_lines(loaded: Sequence[Loaded]) -> None:
    """Raises RecipeError for lines that somebody else has written, or could have."""
    problems = [problem for one in loaded for problem in one.composed.locate(_not_own(one))]
    if problems:
        raise RecipeError(list(dict.fromkeys(problems)))


def _origin(name: str, loaded: Loaded) -> Origin | None:
    return find_origin(f"cluster.slurm.{name}", loaded.composed.origins)


def _not_own(loaded: Loaded) -> Iterator[Problem]:
    for name, lines in shell_lines(loaded.spec).items():
        why = _why_not_own(_origin(name, loaded), loaded.composed.cwd) if lines else ""
        if why:
            message = f"`cluster.slurm.{name}` would run as you, and {why}"
            hint = "read the lines above, and add --allow-setup; or copy the file, or give them on the command line"
            yield Problem("not_own", message, f"cluster.slurm.{name}", hint)


def _why_not_own(origin: Origin | None, cwd: Path) -> str:
    """Empty for a file that is the user's, or root's, and for the command line."""
    if origin is None:
        return "it is not known which file it comes from"
    if origin.file == COMMAND_LINE:
        return ""
    about = (cwd / origin.file).stat()
    if about.st_uid not in (ROOT, os.geteuid()):
        return f"{origin.file} belongs to another user ({_user_name(about.st_uid)})"
    return f"{origin.file} may be written by everyone" if about.st_mode & stat.S_IWOTH else ""


def _user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
