"""Rules for text that becomes a line of a batch script, or the path of a folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from trainspec_cli.errors import Problem
from trainspec_cli.printable import is_printable, on_one_line
from trainspec_cli.spec.recipe.run import RunSpec


def slurm_text(spec: RunSpec) -> Iterator[Problem]:
    """A line break would begin a line of its own in job.sbatch; other control characters could hide what stands there.

    `setup` is shell, which may have several lines.
    """
    slurm = spec.cluster.slurm
    for field in fields(slurm):
        value, path = getattr(slurm, field.name), f"cluster.slurm.{field.name}"
        for text in value if isinstance(value, tuple) else (value,):
            yield from _check_text(path, text, may_have_lines=field.name == "setup")


def run_folder(spec: RunSpec) -> Iterator[Problem]:
    yield from _check_text("run.dir", spec.run.dir)


def _check_text(path: str, text: object, *, may_have_lines: bool = False) -> Iterator[Problem]:
    if not isinstance(text, str):  # a number, or of a wrong type, which is reported elsewhere
        return
    if is_printable(text) if may_have_lines else text == on_one_line(text):
        return
    what = "control characters" if may_have_lines else "line breaks or other control characters"
    message = f"`{path}` is `{on_one_line(text)}`; it cannot hold {what}"
    yield Problem("bad_text", message, path, "take out what is shown with a backslash")


TEXT_RULES = (slurm_text, run_folder)
