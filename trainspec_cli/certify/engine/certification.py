"""Certify another engine: trainspec's own makes the reference, the other is asked, and its answers are judged."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from trainspec_cli.certify.engine.cases import EngineCheck, ProtocolRun, engine_checks
from trainspec_cli.certify.engine.exchange import Engine, ask_all
from trainspec_cli.certify.engine.judge import judge_answers, references
from trainspec_cli.certify.engine.model import OWN_RUNS, ask_for_plain_model, write_inputs
from trainspec_cli.certify.runs import device_of, measure
from trainspec_cli.errors import Problem, RecipeError
from trainspec_cli.huggingface.tensors import parameters
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.recipe.model import DecoderModel
from trainspec_cli.spec.results.certificate import Finding, NotOffered


@dataclass(frozen=True)
class EngineWanted:
    """What another engine is to be measured on."""

    command: tuple[str, ...]
    checks: tuple[EngineCheck, ...]
    timeout_s: float
    model: DecoderModel


def wanted_of(command: str, only: Sequence[str], processes: int, timeout_s: float) -> EngineWanted:
    """Raises RecipeError where the command cannot be, or a pattern names nothing."""
    words = _words(command)
    found = engine_checks(processes)
    for pattern in only:
        if not any(_named(check, pattern) for check in found):
            names = ", ".join(dict.fromkeys(check.clause for check in found))
            message = f"--only {pattern} names no clause or case that an engine is asked for"
            raise RecipeError(Problem("unknown_value", message, "--only", f"clauses: {names}; --list names every case"))
    chosen = [check for check in found if not only or any(_named(check, pattern) for pattern in only)]
    return EngineWanted(words, tuple(chosen), timeout_s, ask_for_plain_model())


def _words(command: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise _no_command(command, f"cannot be read: {error}") from error
    if not words or not command.isprintable():
        raise _no_command(command, "is no command")
    if shutil.which(words[0]) is None:
        raise _no_command(command, f"names {words[0]}, and there is no such program")
    return words


def _no_command(command: str, why: str) -> RecipeError:
    return RecipeError(
        Problem("usage", f"--engine {command!r} {why}", "--engine", "such as --engine 'python engine.py'")
    )


def _named(check: EngineCheck, pattern: str) -> bool:
    return fnmatchcase(check.clause, pattern) or fnmatchcase(check.run.name, pattern)


def measure_engine(
    wanted: EngineWanted, folder: Path, machine: Machine, on_done: Callable[[int], None]
) -> tuple[list[Finding], list[NotOffered]]:
    """Return what was found and what was declined; `on_done` gets the number of the runs that have ended.

    Raises WorkerError where an answer is wrong, MachineError where a run or the command cannot be started, Interrupted
    where a stop was requested.
    """
    results = measure(OWN_RUNS, folder / "reference", machine, lambda done: None)
    place = folder / "engine"
    write_inputs(results[OWN_RUNS[0]], wanted.model, place)
    shapes = {piece.tensor: piece.tensor_shape for parameter in parameters(wanted.model) for piece in parameter.pieces}
    engine = Engine(wanted.command, place, wanted.timeout_s, device_of(machine), shapes)
    answers = ask_all(engine, runs_of(wanted), on_done)
    own = references(results, wanted.model)
    judged = [judge_answers(check, answers, own) for check in wanted.checks]
    found = [one for one in judged if isinstance(one, Finding)]
    return found, [one for one in judged if isinstance(one, NotOffered)]


def runs_of(wanted: EngineWanted) -> list[ProtocolRun]:
    """Return each run once, after those whose checkpoints it needs."""
    return list(dict.fromkeys(run for check in wanted.checks for run in check.runs))
