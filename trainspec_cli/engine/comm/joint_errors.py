"""Share an error of one rank with the others, so that all end together with the same message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from trainspec_cli.engine.comm.json_collectives import gather_json
from trainspec_cli.errors import MachineError, Problem, RecipeError, TrainspecError, WorkerError
from trainspec_cli.spec.canonical import from_plain

KINDS = {kind.exit_code: kind for kind in (RecipeError, MachineError, WorkerError)}


def agree_on_error(error: TrainspecError | None) -> TrainspecError | None:
    """Return, on every rank, the error of the first rank that has one. Called by every rank together."""
    return next(filter(None, gather_json(error and _to_plain(error), _read)), None)


def raise_together(error: TrainspecError | None) -> None:
    """Raise on every rank the error of the first rank that has one."""
    if found := agree_on_error(error):
        raise found from error


@contextmanager
def errors_together() -> Iterator[None]:
    """Raise an error of one rank in the block on all ranks at its end. The block must contain no collective."""
    error = None
    try:
        yield
    except TrainspecError as own:
        error = own
    raise_together(error)


def _to_plain(error: TrainspecError) -> dict[str, Any]:
    return {"exit_code": error.exit_code, "problems": [asdict(problem) for problem in error.problems]}


def _read(content: Mapping[str, Any] | None) -> TrainspecError | None:
    if content is None:
        return None
    return KINDS[content["exit_code"]]([from_plain(Problem, problem) for problem in content["problems"]])
