"""Runs of the certify worker. For each number of processes, one torchrun job carries out all runs.

A certification keeps its runs in a folder, so that it can continue after an interruption. FOLDER/certification.json
states the versions, the machine and the models. The folder is rejected if any of these differ. FOLDER/NAME/ contains
one run; an unfinished run is removed and repeated."""

from __future__ import annotations

import fcntl
import hashlib
import math
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from trainspec_cli import __version__
from trainspec_cli.core.environment_names import DEVICE
from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.core.node import make_folder
from trainspec_cli.core.reading.files import UnreadableFileError, read_object
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.records import FieldError, canonical_json, from_plain, read_record, to_plain
from trainspec_cli.recipe.results.tools import DRAWN_BATCHES as BATCHES
from trainspec_cli.recipe.results.tools import DRAWN_TOKENS as TOKENS
from trainspec_cli.recipe.results.tools import CertifyRequest, CertifyResult, CertifyRun, CertifyRunResult, Device
from trainspec_cli.run.folder.files import read_json, write_json
from trainspec_cli.run.job.job import machine_identity, versions
from trainspec_cli.run.tools import CERTIFY, Tool, run_tool, torchrun
from trainspec_cli.wings.certify.cases import CLIP_FROM, CLIP_NORM, KILLED_AT, SAVE_AT, STEPS, Case, build_plan
from trainspec_cli.wings.certify.clauses import spec_version
from trainspec_cli.wings.certify.families import FAMILIES, LOSSES

HEADER = "certification.json"
LOCK = "lock"
RESULT = "result.json"
ASKED = "asked.json"
"""The file with the request's digest. The digest distinguishes a kept run from another run with the same name."""
PACKAGE = Path(__file__).parents[2]


@dataclass(frozen=True)
class Run:
    """A case, trained from the first step or from another run's checkpoint."""

    case: Case
    gradients: bool = True
    losses: bool = True
    resume: bool = False
    """Save a checkpoint in the middle, and repeat the second half from it."""
    continues: Run | None = None
    exchanges: int = 1
    """Number of times to exchange the first batch's gradients; the run writes the mean of all exchanges."""
    inputs: bool = False
    """Also write the initial weights and the batches."""
    repetition: int = 0
    """0 for the first run; n for its nth repetition."""

    @property
    def name(self) -> str:
        words = [self.case.name]
        if self.resume:
            words.append("resumed")
        if self.continues:
            words.append(f"from-{self.continues.case.name}")
        if not self.losses:
            words.append("one-step")
        if self.exchanges > 1:
            words.append(f"{self.exchanges}-exchanges")
        if self.inputs:
            words.append("with-inputs")
        if self.repetition:
            words.append(f"again{self.repetition}")
        return "-".join(words)

    @property
    def clips(self) -> bool:
        """True if later steps clip gradients. This is only the case for plain gradient descent, because adaptive
        optimizers hide gradients that are wrong by a constant factor."""
        return self.losses and self.case.optimizer == "sgd" and not self.case.ramp

    def request(self, device: Device) -> CertifyRun:
        live = self.case.live
        return CertifyRun(
            build_plan(self.case, device),
            steps=STEPS if self.losses else 0,
            gradients=self.gradients,
            exchanges=self.exchanges,
            clip_from=CLIP_FROM if self.clips else None,
            clip_norm=CLIP_NORM,
            save_at=SAVE_AT if self.resume else None,
            resume=self.resume,
            continues=self.continues.name if self.continues else None,
            weights=self.case.weights,
            inputs=self.inputs,
            live=live is not None,
            killed_at=KILLED_AT if live and live.disturbance == "killed" else None,
        )


@dataclass(frozen=True)
class Measured:
    """A finished run, read from its folder."""

    folder: Path

    @cached_property
    def result(self) -> CertifyRunResult:
        return from_plain(CertifyRunResult, read_json(self.folder / RESULT))

    @property
    def losses(self) -> list[float]:
        return [math.nan if loss is None else loss for loss in self.result.trained.losses]

    @property
    def resumed_losses(self) -> list[float]:
        steps = self.result.resumed.losses if self.result.resumed else ()
        return [math.nan if loss is None else loss for loss in steps]

    @cached_property
    def gradients(self) -> dict[str, np.ndarray]:
        return self._parameters("gradients")

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """Return the weights after the last step."""
        return self._parameters("weights")

    @cached_property
    def first_weights(self) -> dict[str, np.ndarray]:
        return self._parameters("first")

    @cached_property
    def tokens(self) -> np.ndarray:
        """Return the tokens of all steps, of shape (steps, samples, length + 1)."""
        with np.load(self.folder / BATCHES) as found:
            tokens: np.ndarray = found[TOKENS]
            return tokens

    def _parameters(self, what: str) -> dict[str, np.ndarray]:
        """Return the arrays written by the pipeline stages, by parameter."""
        found: dict[str, np.ndarray] = {}
        for path in sorted(self.folder.glob(f"{what}.stage*.npz")):
            with np.load(path) as stage:
                found.update(stage)
        return found


def measure(
    runs: Iterable[Run],
    folder: Path,
    machine: Machine,
    on_progress: Callable[[int], None],
    tool: Tool[CertifyRequest, CertifyResult] = CERTIFY,
    on_device: str = "",
) -> dict[Run, Measured]:
    """Carry out all runs that `folder` does not contain yet; `on_progress` receives the number of finished runs.

    `on_device`: a device that a plug-in provides, used instead of the machine's devices.

    Raises MachineError if a job fails, and Interrupted if a stop was requested."""
    wanted = list(dict.fromkeys(runs))
    device = device_of(machine)
    # The models are so small that additional threads would mostly wait for one another.
    environment = {"OMP_NUM_THREADS": "1"} | ({DEVICE: on_device} if on_device else {})
    left = []
    for run in wanted:
        kept = folder / run.name
        digest = {"sha256": _sha256(canonical_json(to_plain(run.request(device))))}
        try:
            if (kept / RESULT).is_file() and read_object(kept / ASKED) == digest:
                continue
        except UnreadableFileError:
            pass  # carry out an unfinished run again
        if kept.exists():
            shutil.rmtree(kept)
        kept.mkdir(parents=True)
        write_json(kept / ASKED, digest)
        left.append(run)

    def report_done() -> None:
        on_progress(sum((folder / run.name / RESULT).is_file() for run in wanted))

    report_done()
    for batch in _batches(left):
        request = CertifyRequest(str(folder.absolute()), {run.name: run.request(device) for run in batch})
        where = torchrun(request.runs[batch[0].name].plan, machine, environment)
        try:
            run_tool(tool, request, where, on_tick=report_done)
        except MachineError as error:
            # The first run without a result is the one that failed.
            failed = next((run.name for run in batch if not (folder / run.name / RESULT).is_file()), batch[-1].name)
            problem = error.problems[0]
            message = f"the run {failed} failed: {problem.message}"
            raise MachineError(replace(problem, message=message, hint=f"run only this one: --only {failed}")) from error
        report_done()
    return {run: Measured(folder / run.name) for run in wanted}


def device_of(machine: Machine) -> Device:
    return "cuda" if machine.gpu_names else "cpu"


def _batches(runs: Sequence[Run]) -> list[list[Run]]:
    """Group runs by their number of processes, largest first. Runs that continue other runs come after them."""
    batches: list[list[Run]] = []
    for later in (False, True):
        stage = []
        for run in runs:
            # A run that continues a run with fewer processes must wait for that run's job.
            source = run.continues.case.layout.world_size if run.continues else math.inf
            if (source < run.case.layout.world_size) is later:
                stage.append(run)
        sizes = sorted({run.case.layout.world_size for run in stage}, reverse=True)
        of_size = ([run for run in stage if run.case.layout.world_size == size] for size in sizes)
        batches += [sorted(batch, key=lambda run: run.continues is not None) for batch in of_size]
    return batches


# The folder of a certification


@dataclass(frozen=True)
class Subject:
    """What a certification measures, and on which machine. It can only be continued if all fields except `since`
    match."""

    trainspec: str
    code_sha256: str
    """Digest of trainspec's source files."""
    training_spec: str
    versions: dict[str, str]
    machine_id: str
    machine: Machine
    models_sha256: str
    """Digest of the models and losses that the clauses are measured on."""
    engine: str = ""
    """The command that starts another engine; empty for trainspec's own engine."""
    since: str = ""
    """The date when the certification's first run was measured."""


def subject_of(machine: Machine, engine: str = "") -> Subject:
    models = {name: to_plain(model) for name, model in FAMILIES.items()}
    losses = {name: to_plain(section) for name, section in LOSSES.items()}
    files = sorted(PACKAGE.rglob("*.py"))
    code = "\n".join(f"{file.relative_to(PACKAGE)} {_sha256(file.read_text())}" for file in files)
    return Subject(
        trainspec=__version__,
        code_sha256=_sha256(code),
        training_spec=spec_version(),
        versions=versions(),
        machine_id=machine_identity(),
        machine=machine,
        models_sha256=_sha256(canonical_json({"models": models, "losses": losses})),
        engine=engine,
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def opened(folder: Path, subject: Subject, today: str) -> Iterator[str]:
    """Lock a certification's folder, creating it if needed, and yield the date when the certification was started.

    Raises RecipeError if the folder contains something else or another certification, or is in use, and MachineError if
    it belongs to another user."""
    if folder.exists() and not (folder / HEADER).exists() and (not folder.is_dir() or any(folder.iterdir())):
        message = f"{folder} is not the folder of a certification"
        raise RecipeError(Problem("other_certification", message, "--dir", "choose a new folder"))
    try:
        make_folder(folder, "choose your own folder: --dir FOLDER")
        lock = (folder / LOCK).open("w")
    except OSError as error:
        message = f"{folder} cannot be written: {error.strerror}"
        raise RecipeError(
            Problem("output_exists", message, "--dir", "choose a folder that you can write to")
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            message = f"another certification is running in {folder}"
            hint = "wait until it ends, or choose another folder"
            raise RecipeError(Problem("in_use", message, "--dir", hint)) from error
        if not (folder / HEADER).exists():
            write_json(folder / HEADER, to_plain(replace(subject, since=today)))
            yield today
            return
        try:
            theirs = read_record(Subject, read_object(folder / HEADER))
        except (UnreadableFileError, FieldError) as error:
            raise _refused(folder, f"{folder / HEADER} is damaged: {error}") from error
        differing = [name for name, value in vars(subject).items() if name != "since" and vars(theirs)[name] != value]
        if differing:
            message = f"{folder} contains the runs of another certification, which differs in: {', '.join(differing)}"
            raise _refused(folder, message)
        yield theirs.since


def _refused(folder: Path, message: str) -> RecipeError:
    hint = f"choose another folder, or delete it to start again: rm -r {shlex.quote(str(folder))}"
    return RecipeError(Problem("other_certification", message, "--dir", hint))


# Errors


Tensors = Mapping[str, np.ndarray]
"""Gradients or weights, by parameter."""


def gradient_errors(found: Tensors, reference: Tensors) -> dict[str, float]:
    """Return the relative Euclidean error of each gradient; infinite if it is missing or has the wrong shape."""
    errors: dict[str, float] = {}
    for name in reference.keys() | found.keys():
        theirs = reference.get(name)
        ours = found.get(name)
        if theirs is None or ours is None or theirs.shape != ours.shape:
            errors[name] = math.inf
            continue
        distance = np.linalg.norm(ours - theirs)
        size = np.linalg.norm(theirs)
        errors[name] = float(distance / size) if size else (0.0 if distance == 0 else math.inf)
    return {name: error if math.isfinite(error) else math.inf for name, error in sorted(errors.items())}


def whole_error(found: Tensors, reference: Tensors) -> float:
    """Return the relative Euclidean error of all parameters combined; infinite if one is missing or has the wrong
    shape."""
    if {name: array.shape for name, array in found.items()} != {name: array.shape for name, array in reference.items()}:
        return math.inf
    distance = math.hypot(*(float(np.linalg.norm(found[name] - reference[name])) for name in reference))
    error = distance / math.hypot(*(float(np.linalg.norm(array)) for array in reference.values()))
    return error if math.isfinite(error) else math.inf


def loss_error(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative error of any loss; infinite if the runs have different numbers of steps."""
    if len(losses) != len(reference):
        return math.inf
    errors = [abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, reference, strict=True)]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf
