"""Ask another engine for runs: write what is asked, start its command, and read what it answers without trusting it."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from trainspec_cli.certify.cases import CLIP_FROM, CLIP_NORM, SAVE_AT, STEPS
from trainspec_cli.certify.engine.cases import OPTIMIZERS, ProtocolRun
from trainspec_cli.certify.engine.protocol import (
    ANSWER,
    BATCHES,
    CHECKPOINT,
    MODEL,
    REQUEST,
    SCHEMA,
    EngineAnswer,
    EngineRequest,
)
from trainspec_cli.errors import Problem, TrainspecError, WorkerError
from trainspec_cli.huggingface.safetensors import read_header
from trainspec_cli.launcher.program import Program, run_program
from trainspec_cli.reading.files import UnreadableFileError, read_object
from trainspec_cli.rundir.files import write_json
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.records import FieldError, read_record
from trainspec_cli.spec.results.tools import Device
from trainspec_cli.trust import is_plain_name

READ = "read.json"
"""Stands in the folder of a run whose answer was read and found whole."""


@dataclass(frozen=True)
class Engine:
    """Another engine, and where it is asked."""

    command: tuple[str, ...]
    """The path of a request is appended to it."""
    folder: Path
    """Holds the model, the batches, and a folder for each run."""
    timeout_s: float
    device: Device
    shapes: Mapping[str, tuple[int, ...]]
    """The tensors of the model."""
    on_tick: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Answered:
    """What an engine has answered for a run."""

    folder: Path
    answer: EngineAnswer
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def declined(self) -> str:
        return self.answer.declined

    @property
    def losses(self) -> list[float]:
        return list(self.answer.losses)

    @cached_property
    def gradients(self) -> dict[str, np.ndarray]:
        return _read_tensors(self.folder, "gradients", self.answer.gradients, self.shapes)

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        return _read_tensors(self.folder, "weights", self.answer.weights, self.shapes)


def ask_all(engine: Engine, runs: Sequence[ProtocolRun], on_done: Callable[[int], None]) -> dict[ProtocolRun, Answered]:
    """Ask for all runs in turn; those that were answered before are not asked again.

    Raises WorkerError where an answer is wrong, MachineError where the command cannot be started, Interrupted where a
    stop was requested.
    """
    answered: dict[ProtocolRun, Answered] = {}
    for number, run in enumerate(runs):
        on_done(number)
        source = answered[run.resumes] if run.resumes else None
        if source is not None and source.declined:
            answer = EngineAnswer(SCHEMA, f"the run whose checkpoint it begins with was declined: {source.declined}")
            answered[run] = Answered(source.folder, answer, engine.shapes)
        else:
            answered[run] = ask(engine, run)
    on_done(len(runs))
    return answered


def ask(engine: Engine, run: ProtocolRun) -> Answered:
    folder = engine.folder / run.name
    if not (folder / READ).is_file():
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        write_json(folder / REQUEST, to_plain(request_of(engine, run)))
        _start(engine, run, folder)
    answered = read_answer(engine, run)
    write_json(folder / READ, {})
    return answered


def request_of(engine: Engine, run: ProtocolRun) -> EngineRequest:
    root, folder = engine.folder.absolute(), engine.folder.absolute() / run.name
    steps = 1 if run.is_one_step else STEPS
    clips = run.optimizer == "sgd" and not run.is_one_step
    return EngineRequest(
        schema=SCHEMA,
        name=run.name,
        device=engine.device,
        processes=run.layout.world_size,
        layout=run.layout,
        compute=run.compute,
        recompute=run.recompute,
        compile=run.compile,
        model=str(root / MODEL),
        batches=str(root / BATCHES),
        first_step=SAVE_AT if run.resumes else 0,
        steps=steps,
        optimizer=OPTIMIZERS[run.optimizer],
        clip_from=CLIP_FROM if clips else None,
        clip_norm=CLIP_NORM,
        asks=run.asks,
        save_after=SAVE_AT if run.saves else None,
        save_to=str(folder / CHECKPOINT) if run.saves else "",
        resume_from=str(root / run.resumes.name / CHECKPOINT) if run.resumes else "",
    )


def _start(engine: Engine, run: ProtocolRun, folder: Path) -> None:
    command = (*engine.command, str((folder / REQUEST).absolute()))
    program = Program(command, folder, f"the engine {engine.command[0]}", engine.timeout_s)
    end = run_program(program, {"OMP_NUM_THREADS": "1"}, engine.on_tick)
    if end.exit_code is None:
        hint = "give it more time: --engine-seconds S"
        raise _wrong(folder, f"the engine did not answer within {engine.timeout_s:g} s\n\n{end.output}", hint)
    if end.exit_code != 0:
        raise _wrong(folder, f"the engine ended with exit code {end.exit_code}\n\n{end.output}")


def read_answer(engine: Engine, run: ProtocolRun) -> Answered:
    """Read the answer for a run, and all that it names. Raises WorkerError that names the file and the field."""
    folder = engine.folder / run.name
    path = folder / ANSWER
    try:
        answer = read_record(EngineAnswer, read_object(path))
    except (UnreadableFileError, FieldError) as error:
        why = str(error) if isinstance(error, UnreadableFileError) else f"{path}: {error}"
        raise _wrong(folder, why) from error
    if answer.schema != SCHEMA:
        raise _wrong(folder, f"{path}: `schema` is {answer.schema!r}; {SCHEMA!r} is needed")
    answered = Answered(folder, answer, engine.shapes)
    if not answer.declined:
        _check_asked(answered, run, path)
    return answered


def _check_asked(answered: Answered, run: ProtocolRun, path: Path) -> None:
    if "losses" in run.asks:
        steps = STEPS - (SAVE_AT if run.resumes else 0)
        losses = answered.losses
        if len(losses) != steps:
            raise _wrong(
                path.parent, f"{path}: `losses` has {len(losses)} numbers; {steps} are needed, one for each step"
            )
        for step, loss in enumerate(losses):
            if not math.isfinite(loss):
                raise _wrong(path.parent, f"{path}: `losses[{step}]` is {loss}; a finite number is needed")
    if "gradients" in run.asks:
        _ = answered.gradients
    if "weights" in run.asks:
        _ = answered.weights


def _read_tensors(folder: Path, field: str, name: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Read a file of whole fp32 tensors. Raises WorkerError that names the file, the field and the tensor."""
    if not is_plain_name(name):
        raise _wrong(folder, f"{folder / ANSWER}: `{field}` is {name!r}; the name of a file beside it is needed")
    file = folder / name
    if not file.is_file():
        raise _wrong(folder, f"{folder / ANSWER}: `{field}` names {name}, and there is no such file")
    try:
        header = read_header(file)
    except TrainspecError as error:
        raise _wrong(folder, f"`{field}`: {error}") from error
    found = {}
    for tensor, shape in shapes.items():
        if (stored := header.get(tensor)) is None:
            raise _wrong(folder, f"{file} (`{field}`) has no tensor {tensor}")
        if stored.shape != tuple(shape) or stored.dtype != "F32":
            got = f"{stored.dtype} of {list(stored.shape)}"
            raise _wrong(folder, f"{file} (`{field}`): {tensor} is {got}; F32 of {list(shape)} is needed")
        found[tensor] = _read_floats(file, stored.start, shape)
        if not np.isfinite(found[tensor]).all():
            raise _wrong(folder, f"{file} (`{field}`): {tensor} holds numbers that are not finite")
    return found


def _read_floats(file: Path, start: int, shape: Sequence[int]) -> np.ndarray:
    values = np.fromfile(file, dtype="<f4", count=math.prod(shape), offset=start).reshape(shape)
    return values.astype(np.float32, copy=False) if sys.byteorder == "big" else values


def _wrong(folder: Path, message: str, hint: str = "") -> WorkerError:
    usual = f"ask for this run alone: COMMAND {folder / REQUEST}; docs/spec/engine-protocol.md says what is needed"
    return WorkerError(Problem("bad_answer", message, "--engine", hint or usual, file=str(folder)))
