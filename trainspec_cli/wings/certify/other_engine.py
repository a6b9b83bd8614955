"""Certify another engine through a small protocol. trainspec's own engine computes the reference.

Requests and answers are JSON records, with tensors in safetensors files. The model and its tensors use Hugging Face
names. docs/spec/engine-protocol.md describes the protocol. Answers are untrusted input, so every field is checked."""

from __future__ import annotations

import hashlib
import math
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from safetensors.numpy import save_file

from trainspec_cli.core.errors import Problem, RecipeError, TrainspecError, WorkerError
from trainspec_cli.core.node import is_plain_name
from trainspec_cli.core.reading.files import UnreadableFileError, read_object
from trainspec_cli.data.huggingface.config import write_config
from trainspec_cli.data.huggingface.safetensors import parameters, read_header
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import Recompute
from trainspec_cli.recipe.records import FieldError, read_record, to_plain
from trainspec_cli.recipe.results.certificate import Finding, NotOffered
from trainspec_cli.recipe.results.tools import Device
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.program import Program, run_program
from trainspec_cli.wings.certify.cases import CLIP_FROM, CLIP_NORM, SAVE_AT, STEPS, Case, name_layout
from trainspec_cli.wings.certify.clauses import make_finding
from trainspec_cli.wings.certify.families import PLAIN_DECODER, SEQ_LEN, measure_alone
from trainspec_cli.wings.certify.judge import format_figures, worst_gradient
from trainspec_cli.wings.certify.runs import Run, Tensors, device_of, loss_error, measure

# The protocol

SCHEMA = "trainspec.engine/1"
REQUEST = "request.json"
ANSWER = "answer.json"
READ = "read.json"
"""Marks a run whose answer has been read and found complete."""
MODEL = "model"
BATCHES = "batches.safetensors"
TOKENS = "tokens"
CHECKPOINT = "checkpoint"
RUN_S = 1800.0
"""Time limit for a run. A run takes at most 20 steps of a small model, so an engine that takes longer than this, even
with compilation, must be hung."""

Asked = Literal["losses", "gradients", "weights"]


@dataclass(frozen=True)
class EngineOptimizer:
    """The optimizer. Names and definitions are those of torch. All parameters share these settings."""

    name: Literal["sgd", "adamw"]
    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True)
class EngineRequest:
    """The content of request.json: a run of a few steps."""

    schema: str
    name: str
    """The name of the run."""
    device: Device
    processes: int
    layout: Layout
    """The degree of each kind of parallelism."""
    compute: Literal["fp32", "bf16"]
    recompute: Recompute
    compile: bool
    model: str
    """The folder with the model and its initial weights, in Hugging Face format."""
    batches: str
    """A file with the int64 tensor `tokens` of shape (steps, samples, length + 1); targets are the tokens shifted by
    one."""
    first_step: int
    """Number of steps already taken by the run that wrote the checkpoint; 0 for a new run."""
    steps: int
    """The run ends after this many steps in total, including those before `first_step`."""
    optimizer: EngineOptimizer
    clip_from: int | None
    """The first step (counted from 0) whose gradient is clipped to the global norm `clip_norm`; null: never."""
    clip_norm: float
    asks: tuple[Asked, ...]
    save_after: int | None = None
    """Write a checkpoint to the folder `save_to` after this many steps."""
    save_to: str = ""
    resume_from: str = ""
    """The folder of the checkpoint that the run starts from."""


@dataclass(frozen=True)
class EngineAnswer:
    """The content of answer.json: the results of a run, or why it was declined."""

    schema: str
    declined: str = ""
    """Why the engine does not support this run; empty if it carried out the run."""
    losses: tuple[float, ...] = ()
    """Mean loss of each step over all tokens, before the step's update."""
    gradients: str = ""
    """A file with the first step's fp32 gradients, before any update or clipping."""
    weights: str = ""
    """A file with the fp32 weights after the last step."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the engine and its libraries, for the certificate."""


# The runs that an engine is asked to carry out

OPTIMIZERS = {"sgd": EngineOptimizer("sgd", 0.1), "adamw": EngineOptimizer("adamw", 1e-3)}
LAYOUTS = (
    Layout(),
    Layout(dp_replicate=2),
    Layout(dp_shard=2),
    Layout(tp=2),
    Layout(cp=2),
    Layout(pp=2),
)
"""A single process, and each axis alone."""
KEPT = (Layout(), Layout(dp_replicate=2), Layout(dp_shard=2))
"""Layouts whose runs are repeated, and in which a run is also stopped and resumed."""
MOVES = ((Layout(dp_replicate=2), Layout()), (Layout(dp_shard=2), Layout(dp_replicate=2)))
"""Pairs of layouts: a run saves in the first layout and continues in the second."""


@dataclass(frozen=True)
class ProtocolRun:
    """A run that an engine is asked to carry out."""

    layout: Layout = field(default_factory=Layout)
    compute: Literal["fp32", "bf16"] = "fp32"
    recompute: Recompute = "none"
    compile: bool = False
    optimizer: Literal["sgd", "adamw"] = "sgd"
    asks: tuple[Asked, ...] = ("gradients",)
    saves: bool = False
    resumes: ProtocolRun | None = None
    """The run whose checkpoint this run starts from."""
    repetition: int = 0
    """0 for the first run; n for its nth repetition."""

    @property
    def name(self) -> str:
        words = [self.compute, name_layout(self.layout), self.optimizer]
        words += [self.recompute] if self.recompute != "none" else []
        words += ["compiled"] if self.compile else []
        words += ["one-step"] if self.is_one_step else []
        words += [f"from-{name_layout(self.resumes.layout)}"] if self.resumes else []
        words += [f"again{self.repetition}"] if self.repetition else []
        return "-".join(words)

    @property
    def is_one_step(self) -> bool:
        return self.asks == ("gradients",)


@dataclass(frozen=True)
class EngineCheck:
    """A clause applied to a run."""

    clause: str
    run: ProtocolRun
    baseline: ProtocolRun | None = None
    """The engine's own run to compare with; None to compare with trainspec's engine."""

    @property
    def runs(self) -> tuple[ProtocolRun, ...]:
        """The runs that the check needs, in execution order."""
        return tuple(run for run in (self.baseline, self.run) if run is not None)


def engine_checks(max_processes: int) -> list[EngineCheck]:
    return [check for check in _all_checks() if all(run.layout.world_size <= max_processes for run in check.runs)]


def _all_checks() -> Iterator[EngineCheck]:
    for layout in LAYOUTS:
        trained = ProtocolRun(layout, asks=("gradients", "losses"))
        yield EngineCheck("NUM-1", trained)
        yield EngineCheck("NUM-2", trained)
    for layout in (Layout(), Layout(dp_replicate=2)):
        yield EngineCheck("NUM-3", ProtocolRun(layout, "bf16"))
    yield EngineCheck("NUM-4", ProtocolRun(recompute="full"))
    yield EngineCheck("NUM-5", ProtocolRun(compile=True))
    for layout in KEPT:
        whole = _whole(layout)
        yield EngineCheck("NUM-6", replace(whole, repetition=1), whole)
        yield EngineCheck("CKPT-1", replace(whole, saves=False, resumes=whole), whole)
    for before, after in MOVES:
        yield EngineCheck(
            "CKPT-2", replace(_whole(before), layout=after, saves=False, resumes=_whole(before)), _whole(before)
        )


def _whole(layout: Layout) -> ProtocolRun:
    return ProtocolRun(layout, optimizer="adamw", asks=("losses", "weights"), saves=True)


# Measuring

FAMILY = "llama"
REFERENCE = Run(Case(FAMILY), inputs=True)
OWN_BF16 = Run(Case(FAMILY, compute="bf16"), losses=False)
EXACT = Run(Case(FAMILY, compute="fp64"), losses=False)
"""The reference runs of trainspec's engine, in a single process."""


@dataclass(frozen=True)
class EngineToCheck:
    """The command that starts another engine, and the checks to perform."""

    command: tuple[str, ...]
    checks: tuple[EngineCheck, ...]

    @property
    def runs(self) -> list[ProtocolRun]:
        """All runs without duplicates, each after the run whose checkpoint it needs."""
        return list(dict.fromkeys(run for check in self.checks for run in check.runs))


def select_checks(command: str, only: Sequence[str], processes: int) -> EngineToCheck:
    """Return the command and the checks, and restrict this process to a plain Llama, which all engines support.

    Raises RecipeError if the command cannot be run, or if a pattern matches nothing."""
    why = ""
    words: list[str] = []
    try:
        words = shlex.split(command)
    except ValueError as error:
        why = f"cannot be read: {error}"
    if not why and (not words or not command.isprintable()):
        why = "is not a command"
    elif not why and shutil.which(words[0]) is None:
        why = f"names the program {words[0]}, which is not installed"
    if why:
        message = f"--engine {command!r} {why}"
        raise RecipeError(Problem("usage", message, "--engine", "such as --engine 'python engine.py'"))
    found = engine_checks(processes)
    chosen = []
    for pattern in only or ["*"]:
        named = [one for one in found if fnmatchcase(one.clause, pattern) or fnmatchcase(one.run.name, pattern)]
        if not named:
            names = ", ".join(dict.fromkeys(check.clause for check in found))
            message = f"--only {pattern} matches no clause or case of another engine"
            raise RecipeError(Problem("unknown_value", message, "--only", f"clauses: {names}; --list names every case"))
        chosen += named
    measure_alone(FAMILY, PLAIN_DECODER)
    return EngineToCheck(tuple(words), tuple(check for check in found if check in chosen))


def measure_engine(
    wanted: EngineToCheck, folder: Path, machine: Machine, on_done: Callable[[int], None]
) -> tuple[list[Finding], list[NotOffered]]:
    """Return the findings and the declined checks; `on_done` receives the number of finished runs.

    Raises WorkerError if an answer is wrong, MachineError if a run or the command cannot be started, and Interrupted if
    a stop was requested."""
    results = measure((REFERENCE, OWN_BF16, EXACT), folder / "reference", machine, lambda done: None)
    model = PLAIN_DECODER
    root = folder / "engine"
    # All requests refer to these files: the model with its initial weights, and the batches of all steps.
    (root / MODEL).mkdir(parents=True, exist_ok=True)
    write_json(root / MODEL / "config.json", write_config(model, SEQ_LEN, "float32"))
    first = to_hugging_face(results[REFERENCE].first_weights, model)
    save_file(first, root / MODEL / "model.safetensors", {"format": "pt"})
    save_file({TOKENS: results[REFERENCE].tokens}, root / BATCHES)
    shapes = {piece.tensor: piece.tensor_shape for parameter in parameters(model) for piece in parameter.pieces}
    answers = ask_all(Engine(wanted.command, root, device_of(machine), shapes), wanted.runs, on_done)
    references = References(
        to_hugging_face(results[REFERENCE].gradients, model),
        results[REFERENCE].losses,
        to_hugging_face(results[OWN_BF16].gradients, model),
        to_hugging_face(results[EXACT].gradients, model),
    )
    judged = [judge_answers(check, answers, references) for check in wanted.checks]
    found = [one for one in judged if isinstance(one, Finding)]
    return found, [one for one in judged if isinstance(one, NotOffered)]


def to_hugging_face(arrays: Mapping[str, np.ndarray], model: DecoderModel) -> dict[str, np.ndarray]:
    """Return the engine's parameters as Hugging Face tensors."""
    found = {}
    for parameter in parameters(model):
        for piece in parameter.pieces:
            box = tuple(slice(low, low + size) for low, size in zip(piece.start, piece.shape, strict=True))
            held = arrays[parameter.name][box].reshape(piece.shape)
            found[piece.tensor] = np.ascontiguousarray(np.swapaxes(held, -1, -2) if piece.transposed else held)
    return found


# Requests and answers


@dataclass(frozen=True)
class Engine:
    """Another engine, and the folder for its requests."""

    command: tuple[str, ...]
    """The path of a request is appended to the command."""
    folder: Path
    """Contains the model, the batches, and a folder for each run."""
    device: Device
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the model's tensors, by name."""
    timeout_s: float = RUN_S
    on_tick: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Answered:
    """The checked answer for a run."""

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
    """Request all runs in order, except those whose answers an earlier certification has already read.

    Raises WorkerError if an answer is wrong, MachineError if the command cannot be started, and Interrupted if a stop
    was requested."""
    answered: dict[ProtocolRun, Answered] = {}
    for number, run in enumerate(runs):
        on_done(number)
        source = answered[run.resumes] if run.resumes else None
        if source is not None and source.declined:
            answer = EngineAnswer(SCHEMA, f"the run that provides its checkpoint was declined: {source.declined}")
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
        root = engine.folder.absolute()
        clips = run.optimizer == "sgd" and not run.is_one_step
        request = EngineRequest(
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
            steps=1 if run.is_one_step else STEPS,
            optimizer=OPTIMIZERS[run.optimizer],
            clip_from=CLIP_FROM if clips else None,
            clip_norm=CLIP_NORM,
            asks=run.asks,
            save_after=SAVE_AT if run.saves else None,
            save_to=str(root / run.name / CHECKPOINT) if run.saves else "",
            resume_from=str(root / run.resumes.name / CHECKPOINT) if run.resumes else "",
        )
        write_json(folder / REQUEST, to_plain(request))
        command = (*engine.command, str((folder / REQUEST).absolute()))
        program = Program(command, folder, f"the engine {engine.command[0]}", engine.timeout_s)
        end = run_program(program, {"OMP_NUM_THREADS": "1"}, engine.on_tick)
        if end.exit_code is None:
            raise _wrong(folder, f"the engine did not answer within {engine.timeout_s:g} s\n\n{end.output}")
        if end.exit_code != 0:
            raise _wrong(folder, f"the engine ended with exit code {end.exit_code}\n\n{end.output}")
    path = folder / ANSWER
    try:
        answer = read_record(EngineAnswer, read_object(path))
    except (UnreadableFileError, FieldError) as error:
        why = str(error) if isinstance(error, UnreadableFileError) else f"{path}: {error}"
        raise _wrong(folder, why) from error
    if answer.schema != SCHEMA:
        raise _wrong(folder, f"{path}: `schema` is {answer.schema!r}; {SCHEMA!r} is required")
    answered = Answered(folder, answer, engine.shapes)
    if not answer.declined:
        if "losses" in run.asks:
            steps = STEPS - (SAVE_AT if run.resumes else 0)
            if len(answer.losses) != steps:
                message = f"{path}: `losses` has {len(answer.losses)} numbers; {steps} are required, one for each step"
                raise _wrong(folder, message)
            for step, loss in enumerate(answer.losses):
                if not math.isfinite(loss):
                    raise _wrong(folder, f"{path}: `losses[{step}]` is {loss}; a finite number is required")
        # Reading a tensor also checks it.
        if "gradients" in run.asks:
            _ = answered.gradients
        if "weights" in run.asks:
            _ = answered.weights
    write_json(folder / READ, {})
    return answered


def _read_tensors(folder: Path, field: str, name: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Read a file of fp32 tensors. The WorkerError for an invalid file names the file, the field and the tensor."""
    if not is_plain_name(name):
        raise _wrong(
            folder, f"{folder / ANSWER}: `{field}` is {name!r}; the name of a file in the same folder is required"
        )
    file = folder / name
    if not file.is_file():
        raise _wrong(folder, f"{folder / ANSWER}: `{field}` names {name}, which does not exist")
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
            raise _wrong(folder, f"{file} (`{field}`): {tensor} is {got}; F32 of {list(shape)} is required")
        values = np.fromfile(file, dtype="<f4", count=math.prod(shape), offset=stored.start).reshape(shape)
        found[tensor] = values.astype(np.float32, copy=False) if sys.byteorder == "big" else values
        if not np.isfinite(found[tensor]).all():
            raise _wrong(folder, f"{file} (`{field}`): {tensor} has values that are not finite")
    return found


def _wrong(folder: Path, message: str) -> WorkerError:
    hint = f"repeat only this request: COMMAND {folder / REQUEST}; docs/spec/engine-protocol.md describes the protocol"
    return WorkerError(Problem("bad_answer", message, "--engine", hint, file=str(folder)))


# Judging


@dataclass(frozen=True)
class References:
    """Gradients and losses from trainspec's engine. The tensors have Hugging Face names."""

    gradients: Tensors
    losses: list[float]
    own_bf16: Tensors
    exact: Tensors


def judge_answers(
    check: EngineCheck, answers: Mapping[ProtocolRun, Answered], references: References
) -> Finding | NotOffered:
    """Return the finding of a check, or a record that the engine declined one of its runs."""
    for run in check.runs:
        if reason := answers[run].declined:
            return NotOffered(check.clause, check.run.name, reason)
    found = answers[check.run]
    figures: dict[str, float | str]
    if check.clause in ("NUM-1", "NUM-4", "NUM-5"):
        figures = worst_gradient(found.gradients, references.gradients)
    elif check.clause == "NUM-2":
        figures = {"worst_loss_error": loss_error(found.losses, references.losses)}
    elif check.clause == "NUM-3":
        figures = format_figures(found.gradients, references.own_bf16, references.exact)
    else:
        # The remaining clauses compare the engine with itself.
        assert check.baseline is not None
        baseline = answers[check.baseline]
        expected = baseline.losses[SAVE_AT:] if check.run.resumes else baseline.losses
        error = loss_error(found.losses, expected)
        digests = {}
        if check.clause != "CKPT-2":
            digests = {"sha256": weights_sha256(found.weights), "beside": weights_sha256(baseline.weights)}
        figures = {**digests, "worst_loss_error": error}
    return make_finding(check.clause, check.run.name, figures, of_engine=True)


def weights_sha256(weights: Mapping[str, np.ndarray]) -> str:
    """Return the SHA-256 of the tensors in name order, each as its name followed by its little-endian bytes."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name}\n".encode() + weights[name].astype("<f4", copy=False).tobytes())
    return digest.hexdigest()
