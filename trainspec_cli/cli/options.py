"""Arguments and options shared by several commands."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from trainspec_cli import __version__
from trainspec_cli.core.environment_names import MESSAGE, RUN, STATUS
from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.reporter.page.parts import PageOrigin

RecipeArguments = Annotated[
    list[str],
    typer.Argument(
        metavar="recipe=NAME|key=value",
        help="The recipe, and changes to it, such as optim.lr=3e-4, model=llama_6m, or ~key to remove a key.",
        show_default=False,
    ),
]
NumNodes = Annotated[
    int | None, typer.Option("--nnodes", metavar="N", help="Number of nodes; run the same command on each.")
]
NumNodesRange = Annotated[
    str | None,
    typer.Option(
        "--nnodes",
        metavar="[MIN:]N[+K]",
        help="Number of nodes; run the same command on each. With MIN, it continues on MIN or more nodes after losses. "
        "K additional nodes are spares: each replaces a lost node.",
    ),
]
NodeRank = Annotated[int, typer.Option("--node-rank", metavar="I", help="Number of this node, starting at 0.")]
Endpoint = Annotated[
    str | None,
    typer.Option(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="HOST:PORT: an address of the first node that the other nodes can reach, and a free port.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with charts.")]
Force = Annotated[bool, typer.Option("--force", help="Train even if the plan is predicted not to fit this machine.")]
Detach = Annotated[
    bool, typer.Option("--detach", help="Run in the background, and print how to follow and stop the run.")
]
Sweeps = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="KEY=A,B,...",
        help="One run per value, or per value of a range: 0..4, 0..1:5 (equal steps), 1e-4..1e-2:x5 (equal ratios); "
        "with several --sweep, one per combination.",
    ),
]
NotifyWhom = Annotated[
    str,
    typer.Option(
        "--notify",
        metavar="COMMAND|URL",
        help=f"When the run ends, run this shell line (with {STATUS}, {MESSAGE} and {RUN} in its environment), or "
        "post to this URL.",
        show_default=False,
    ),
]
HANG_S = 600.0
SILENT_S = 1800.0
MAX_RESTARTS = 3
GRACE_S = 60.0
WORK_S = 300.0
JOIN_TIMEOUT_S = 300.0
CommandFolder = Annotated[
    str | None,
    typer.Option("--dir", metavar="RUN", help="The run's folder; by default a new one below ./runs."),
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        "--max-restarts", metavar="N", min=0, help="Maximum number of restarts after failures in the whole job."
    ),
]
Grace = Annotated[
    float,
    typer.Option("--grace-s", metavar="S", min=0, help="Time allowed for saving and exiting after a request to stop."),
]
HangAfter = Annotated[
    float | None,
    typer.Option(
        "--hang-s",
        metavar="S",
        min=0,
        help="Seconds without a step or other activity after which the command is treated as hung; 0: never.",
        show_default=f"{HANG_S:g}; {SILENT_S:g} until a step is counted",
    ),
]
WorkFor = Annotated[
    float,
    typer.Option(
        "--work-s",
        metavar="S",
        min=0,
        help="Restart a job without counted steps only if it ran at least this many seconds.",
    ),
]
JoinTimeout = Annotated[
    float,
    typer.Option("--join-timeout-s", metavar="S", min=1, help="Seconds that each node waits for the others."),
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, its name, or `last` for the newest here.")
]


@dataclass(frozen=True)
class CommandOptions:
    """Options of `trainspec run`, and of `sbatch` for a command."""

    max_restarts: int
    grace_s: float
    hang_s: float | None
    """None if not specified; 0 means never."""
    work_s: float
    join_timeout_s: float


def check_new(output: Path) -> None:
    """Raise RecipeError unless the output folder is new or empty."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise not_empty(output)


def not_empty(output: Path) -> RecipeError:
    hint = f"choose another folder, or remove it first: rm -r {shlex.quote(str(output))}"
    return RecipeError(Problem("output_exists", f"{output} exists and is not empty", "--output", hint))


def page_origin() -> PageOrigin:
    """Return a page's statement of how it was created: the date, the version and the command."""
    # The page states the command that recreates it, because it may be read long after that command ran.
    command = shlex.join(["trainspec", *sys.argv[1:]])
    return PageOrigin(datetime.now(UTC).date().isoformat(), __version__, command)


def check_writable(file: Path, option: str) -> None:
    """Check that a file can be written, without changing it, before the long work whose result goes there. Raises
    RecipeError if it cannot."""
    is_new = not file.exists()
    try:
        file.open("ab").close()
        if is_new:
            file.unlink()
    except OSError as error:
        raise _not_writable(file, option, error) from error


def _not_writable(file: Path, option: str, error: OSError) -> RecipeError:
    message = f"{option} {file} cannot be written: {error.strerror}"
    return RecipeError(Problem("output_exists", message, hint="choose a file in an existing folder"))


def write_page(file: Path, page: str, option: str = "--html") -> None:
    """Write a page, replacing an existing file. Raises RecipeError if it cannot be written."""
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise _not_writable(file, option, error) from error
