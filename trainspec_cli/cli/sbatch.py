"""`trainspec sbatch`: submit a recipe's run or a user's own command as a Slurm job."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperCommand

from trainspec_cli.cli.options import (
    GRACE_S,
    JOIN_TIMEOUT_S,
    MAX_RESTARTS,
    WORK_S,
    AsJson,
    CommandFolder,
    CommandOptions,
    Force,
    Grace,
    HangAfter,
    JoinTimeout,
    MaxRestarts,
    Sweeps,
    WorkFor,
)
from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.core.wings import MISSING_WING, Point, parts_of
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.session.launching.sweep import read_sweep

if TYPE_CHECKING:
    from trainspec_cli.session.recipe.load import Loaded
    from trainspec_cli.session.slurm.submit import Submission

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="recipe=NAME|key=value... [-- COMMAND...]",
        help="A recipe, and changes to it; or cluster.* keys, and your own training command after --.",
        show_default=False,
    ),
]
Submit = Annotated[bool, typer.Option("--submit", help="Submit the script, and print the job's number.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the script without creating or submitting anything.")]
AllowSetup = Annotated[
    bool,
    typer.Option(
        "--allow-setup",
        help="Allow shell lines from a recipe file that another user owns or that everyone can write to.",
    ),
]
OF_RECIPE, OF_COMMAND = (
    ("sweep", "force"),
    ("folder", "max_restarts", "grace_s", "hang_s", "work_s", "join_timeout_s"),
)
"""Options that apply only to jobs for recipes, and options that apply only to jobs for a user's command."""


@dataclass(frozen=True)
class PreparedJob:
    """A checked job for which nothing has been written yet."""

    loaded: Sequence[Loaded]
    """The run folders, one for each task of an array."""
    warnings: Sequence[str]
    write: Callable[..., Submission]
    """Writes the job's files, and returns the submission. Takes `dry_run`."""


PrepareCommand = Callable[[Sequence[str], Sequence[str], str | None, CommandOptions], PreparedJob]
PREPARE_COMMAND: Point[PrepareCommand] = Point("prepare_command")
"""Checks the job for a user's training command. Takes the command, `key=value` arguments for the cluster, the run
folder, and the options."""


class CommandApart(TyperCommand):
    """Parses the words after `--` separately, because click's parser would mix them with the other arguments."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if "--" in args:
            # click drops `--`, after which the options of the user's command would look like options of sbatch.
            place = args.index("--")
            args, ctx.obj = args[:place], args[place + 1 :]
        return super().parse_args(ctx, args)


COMMAND_CLASS = CommandApart


def sbatch(
    context: typer.Context,
    arguments: Arguments = None,
    submit: Submit = False,
    dry_run: DryRun = False,
    allow_setup: AllowSetup = False,
    sweep: Sweeps = None,
    force: Force = False,
    folder: CommandFolder = None,
    max_restarts: MaxRestarts = MAX_RESTARTS,
    grace_s: Grace = GRACE_S,
    hang_s: HangAfter = None,
    work_s: WorkFor = WORK_S,
    join_timeout_s: JoinTimeout = JOIN_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Create a run's folder and the Slurm script that trains it, and print or submit the script.

    Every node must have access to the folder (run.dir; for a command --dir). cluster.slurm sets the options of the job.
    With --sweep, the runs are the tasks of one array. Shell lines of a recipe (cluster.slurm.setup) are shown on
    stderr. Submitting the script again continues the run. --dry-run shows the script and creates nothing. If the script
    was created but not submitted, the same command with --submit submits it.
    """
    from trainspec_cli.session.slurm import (
        submit as session,
    )  # import here: takes half a second, and the help does not need it

    command = context.obj
    if dry_run and submit:
        raise RecipeError(Problem("usage", "--dry-run submits nothing", "--submit", "leave one of them out"))
    # An option for the other kind of job would have no effect, and the user might notice that only after the job has
    # run.
    of_recipe = command is None
    others = OF_COMMAND if of_recipe else OF_RECIPE
    for option in context.command.params:
        source = context.get_parameter_source(str(option.name))
        if option.name in others and source and source.name == "COMMANDLINE":
            name = option.opts[0]
            message = f"{name} is for your own commands" if of_recipe else f"{name} is for recipes"
            hint = "put the command after --" if of_recipe else "leave it out, because the words after -- are a command"
            if name == "--dir" and of_recipe:
                hint = f"set run.dir={context.params[option.name]}; or put your own command after --"
            raise RecipeError(Problem("usage", message, name, hint))
    if command is None:
        made = _prepare_recipe(arguments or [], sweep or [], force=force)
    else:
        asked = CommandOptions(max_restarts, grace_s, hang_s, work_s, join_timeout_s)
        if not (prepares := parts_of(PREPARE_COMMAND)):
            hint = "name a recipe, or reinstall trainspec: the plug-in for commands is missing"
            raise MachineError(
                Problem(MISSING_WING, "this installation cannot run user-supplied commands", "COMMAND", hint)
            )
        made = prepares[0](command, arguments or [], folder, asked)
    first = made.loaded[0]
    # A recipe may come from someone else, and its shell lines run on the cluster, so they are always shown.
    print(session.render_shell_lines(first), end="", file=sys.stderr)
    if submit and not allow_setup:
        session.check_own_lines(made.loaded)
    submission = made.write(dry_run=dry_run)
    job_id = session.submit(submission) if submit else None
    folders = [str(root) for root in submission.roots]
    if as_json:
        shown = {"script": str(submission.script), "runs": folders, "job_id": job_id, "warnings": made.warnings}
        print(json_text({**shown, **session.shell_lines(first.spec)}))
    elif submit:
        print(job_id)
    else:
        print(submission.text, end="")
    # Shell lines go to stderr, because stdout, with the script or the job number, may be piped.
    lines = [*(f"run folder  {folder}" for folder in folders), f"script      {submission.script}"]
    if dry_run:
        lines = ["nothing was created; replace --dry-run with --submit to submit the job"]
    lines += [f"warning     {warning}" for warning in made.warnings]
    print("\n".join(lines), file=sys.stderr)


def _prepare_recipe(arguments: Sequence[str], sweeps: Sequence[str], *, force: bool) -> PreparedJob:
    from trainspec_cli.session.slurm import submit as session  # not needed by the help

    # A program or a script among the `key=value` arguments means that the `--` before a command is missing.
    for place, word in enumerate(arguments):
        if "=" not in word and not word.startswith("~") and (shutil.which(word) or Path(word).is_file()):
            hint = f"run {shlex.join(['trainspec', 'sbatch', *arguments[:place], '--', *arguments[place:]])}"
            raise RecipeError(Problem("usage", f"`{word}` is a command, which must follow --", "COMMAND", hint))
    if not arguments:
        hint = "such as trainspec sbatch recipe=quickstart, or trainspec sbatch cluster=h100 -- torchrun train.py"
        raise RecipeError(Problem("usage", "expected a recipe, or a command after --", hint=hint))
    runs = session.plan_runs(arguments, [read_sweep(one) for one in sweeps])
    write = partial(session.write_submission, runs, force=force)
    return PreparedJob([run.loaded for run in runs], session.warnings(runs), write)
