"""The errors that users see, and the exit code of each.

    TrainspecError
    ├── RecipeError        2   the recipe or the command line is wrong (carries every problem found)
    ├── PlanError          3   the plan cannot fit
    ├── MachineError       4   something is missing on the machine (a GPU, disk space, a package)
    ├── WorkerError        5   a worker failed
    ├── Stopped            6   stopped on request, after writing a checkpoint
    └── Interrupted      130   interrupted before a checkpoint was written

The command line catches `TrainspecError`, prints it for people (or as JSON) and exits with `exit_code`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from trainspec_cli.core.intentions import closest as closest
from trainspec_cli.core.json_value import JsonObject

EXIT_DONE = 0


@dataclass(frozen=True)
class Problem:
    """One mistake in the input, and how to correct it."""

    code: str
    """A stable identifier for programs: `unknown_key`, `wrong_type`, `not_divisible`, ..."""
    message: str
    """The value found, and the allowed values."""
    path: str = ""
    """The dotted key with the problem, such as `optim.lr`."""
    hint: str = ""
    """What to do about the problem, such as the command or key to type."""
    file: str | None = None
    """The YAML file, or `command line`."""
    line: int | None = None
    """The line number in the file, from 1; on the command line, the number of the argument."""
    column: int | None = None
    excerpt: str = ""
    """The text of that line or argument, for display."""
    environment: bool = False
    """True if the recipe is valid but something is missing on the machine."""

    def as_json(self) -> JsonObject:
        fields = asdict(self)
        del fields["excerpt"], fields["environment"]
        return fields

    def where(self) -> str:
        """Return the position as `file:line:column`, without the parts that are unknown."""
        return ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)


class TrainspecError(Exception):
    """The base class of all errors that users see; never raised directly."""

    exit_code = 1

    def __init__(self, problems: str | Problem | Sequence[Problem], *, code: str = "error", hint: str = ""):
        if isinstance(problems, str):
            problems = Problem(code=code, message=problems, hint=hint)
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__(str(self))
        for problem in self.problems:
            if problem.hint:  # Python prints notes below the traceback of a user's script
                self.add_note(problem.hint)

    def __str__(self) -> str:
        """Return the messages, even if the error is also an OSError with a file name."""
        return "; ".join(problem.message for problem in self.problems)


class RecipeError(TrainspecError):
    exit_code = 2


class PlanError(TrainspecError):
    exit_code = 3


class MachineError(TrainspecError):
    exit_code = 4


class WorkerError(TrainspecError):
    exit_code = 5


class Stopped(TrainspecError):  # noqa: N818 - a request fulfilled, not an error
    exit_code = 6


class Interrupted(TrainspecError):  # noqa: N818 - also not an error
    exit_code = 130


ERRORS_OF_RUNS = {kind.exit_code: kind for kind in (RecipeError, PlanError, MachineError, WorkerError)}
"""The errors that end a run, by the exit code of its process."""
EXIT_CODES = {
    EXIT_DONE: "done",
    RecipeError.exit_code: "the recipe or the command line is wrong",
    PlanError.exit_code: "the plan cannot fit",
    MachineError.exit_code: "something is missing on the machine",
    WorkerError.exit_code: "a worker failed",
    Stopped.exit_code: "stopped on request with a checkpoint written",
    Interrupted.exit_code: "interrupted before the first checkpoint",
}


def did_you_mean(got: str, allowed: Iterable[str]) -> str:
    """Return a hint that suggests a similar allowed word, or ""."""
    word = closest(got, allowed)
    return f"did you mean `{word}`?" if word else ""
