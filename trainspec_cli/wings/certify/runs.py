"""Runs of the certify worker: real torchrun jobs, one for each number of processes, many runs in each.

They stand in the folder of a certification, which continues where it was stopped: runs that have ended are not made
again. FOLDER/certification.json states what it is of: another version of trainspec or torch, another machine or another
model is refused. FOLDER/NAME/ holds a run; one that did not end is removed and made from its beginning.
"""

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
"""Holds the digest of what a kept run was asked for, so that another one of its name is distinguished from it."""
PACKAGE = Path(__file__).parents[2]


@dataclass(frozen=True)
class Run:
    """A case, trained from the first step or from another run's checkpoint."""

    case: Case
    gradients: bool = True
    losses: bool = True
    resume: bool = False
    """Save in the middle, and go the second half again from there."""
    continues: Run | None = None
    exchanges: int = 1
    """How often the first batch's gradients are exchanged; their mean is what the run leaves."""
    inputs: bool = False
    """Leave the first weights and the batches too."""
    take: int = 0
    """The number of a repetition."""

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
        if self.take:
            words.append(f"again{self.take}")
        return "-".join(words)

    @property
    def clips(self) -> bool:
        """Return whether later steps clip: adaptive optimizers hide a gradient that is wrong by a factor."""
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
    """The folder of a run that has ended, and what it holds."""

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
        """Return the tokens of all steps, (steps, samples, length + 1)."""
        with np.load(self.folder / BATCHES) as found:
            tokens: np.ndarray = found[TOKENS]
            return tokens

    def _parameters(self, what: str) -> dict[str, np.ndarray]:
        """Read what the pipeline ranks left, by parameter."""
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
) -> dict[Run, Measured]:
    """Run all of them below `folder` but those that it holds already; `on_progress` gets the number of those that are
    done.

    Raises MachineError where a job fails, Interrupted where a stop was requested.
    """
    wanted = list(dict.fromkeys(runs))
    device = device_of(machine)
    left = []
    for run in wanted:
        place = folder / run.name
        asked = {"sha256": _sha256(canonical_json(to_plain(run.request(device))))}
        try:
            if (place / RESULT).is_file() and read_object(place / ASKED) == asked:
                continue
        except UnreadableFileError:
            pass  # it is made again
        if place.exists():
            shutil.rmtree(place)
        place.mkdir(parents=True)
        write_json(place / ASKED, asked)
        left.append(run)

    def report_done() -> None:
        on_progress(sum((folder / run.name / RESULT).is_file() for run in wanted))

    report_done()
    for batch in _batches(left):
        request = CertifyRequest(str(folder.absolute()), {run.name: run.request(device) for run in batch})
        # Threads of small work only wait.
        where = torchrun(request.runs[batch[0].name].plan, machine, {"OMP_NUM_THREADS": "1"})
        try:
            run_tool(tool, request, where, on_tick=report_done)
        except MachineError as error:
            # The first run without a result is the one that failed.
            failed = next((run.name for run in batch if not (folder / run.name / RESULT).is_file()), batch[-1].name)
            problem = error.problems[0]
            message = f"the run {failed} failed: {problem.message}"
            raise MachineError(replace(problem, message=message, hint=f"run it alone: --only {failed}")) from error
        report_done()
    return {run: Measured(folder / run.name) for run in wanted}


def device_of(machine: Machine) -> Device:
    return "cuda" if machine.gpu_names else "cpu"


def _batches(runs: Sequence[Run]) -> list[list[Run]]:
    """One torchrun serves all runs of as many processes, the most first; those that continue others come after them."""
    batches: list[list[Run]] = []
    for later in (False, True):
        stage = []
        for run in runs:
            # A run that continues one of fewer processes has to wait for that one's job.
            source = run.continues.case.layout.world_size if run.continues else math.inf
            if (source < run.case.layout.world_size) is later:
                stage.append(run)
        sizes = sorted({run.case.layout.world_size for run in stage}, reverse=True)
        of_size = ([run for run in stage if run.case.layout.world_size == size] for size in sizes)
        batches += [sorted(batch, key=lambda run: run.continues is not None) for batch in of_size]
    return batches


# The folder that runs stand in


@dataclass(frozen=True)
class Subject:
    """What a certification measures, and on what. Each field has to be the same when it continues."""

    trainspec: str
    code_sha256: str
    """Digest of trainspec's own code."""
    training_spec: str
    versions: dict[str, str]
    machine_id: str
    machine: Machine
    models_sha256: str
    """Digest of the models and the losses that the clauses are measured on."""
    engine: str = ""
    """The command of another engine; empty for trainspec's own."""
    since: str = ""
    """The day on which its first run was made, which may differ."""


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
    """Hold the folder of a certification for this process, made where it is missing; the value is the day on which it
    was begun.

    Raises RecipeError where it holds something else, another certification, or one that goes on; MachineError where it
    belongs to somebody else.
    """
    if folder.exists() and not (folder / HEADER).exists() and (not folder.is_dir() or any(folder.iterdir())):
        message = f"{folder} holds something else than a certification"
        raise RecipeError(Problem("other_certification", message, "--dir", "choose a folder that is not there yet"))
    try:
        make_folder(folder, "choose a folder of your own: --dir FOLDER")
        lock = (folder / LOCK).open("w")
    except OSError as error:
        message = f"{folder} cannot be written: {error.strerror}"
        raise RecipeError(Problem("output_exists", message, "--dir", "choose a folder that you may write")) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            message = f"another certification goes on in {folder}"
            raise RecipeError(
                Problem("in_use", message, "--dir", "wait for its end, or choose another folder")
            ) from error
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
            message = f"{folder} holds the runs of another certification: {', '.join(differing)} differ"
            raise _refused(folder, message)
        yield theirs.since


def _refused(folder: Path, message: str) -> RecipeError:
    hint = f"choose another folder, or begin anew: rm -r {shlex.quote(str(folder))}"
    return RecipeError(Problem("other_certification", message, "--dir", hint))


# Figures


Tensors = Mapping[str, np.ndarray]
"""Gradients or weights, by parameter."""


def gradient_errors(found: Tensors, reference: Tensors) -> dict[str, float]:
    """Relative Euclidean error of each parameter's gradient; infinite where it is missing or has another shape."""
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
    """Relative Euclidean error of all parameters together; infinite where one is missing or has another shape."""
    if {name: array.shape for name, array in found.items()} != {name: array.shape for name, array in reference.items()}:
        return math.inf
    distance = math.hypot(*(float(np.linalg.norm(found[name] - reference[name])) for name in reference))
    error = distance / math.hypot(*(float(np.linalg.norm(array)) for array in reference.values()))
    return error if math.isfinite(error) else math.inf


def loss_error(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest, relative to the reference's loss of the step."""
    if len(losses) != len(reference):
        return math.inf
    errors = [abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, reference, strict=True)]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf
