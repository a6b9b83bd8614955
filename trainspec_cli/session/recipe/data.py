"""Prepare a run's data on this node before its workers start, find it again for a resumed run, or count it."""

from __future__ import annotations

from pathlib import Path

from trainspec_cli.core.errors import MachineError, Problem, RecipeError, TrainspecError
from trainspec_cli.core.reading.files import expand
from trainspec_cli.data.corpus.chat import describe_formats
from trainspec_cli.data.corpus.labelled import find_samples, open_samples
from trainspec_cli.data.corpus.prepare import check_text, prepare, prepared_folder
from trainspec_cli.data.corpus.rows import open_rows
from trainspec_cli.data.corpus.sources import Collection
from trainspec_cli.recipe.keys.model import ConvModel
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec
from trainspec_cli.reporter.console import PrintableConsole
from trainspec_cli.reporter.live import showing_progress
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_data_dir
from trainspec_cli.session.recipe.load import EPOCHS, TOKENS, Loaded

VALIDATED_BYTES = 16 * 2**20
"""Number of bytes that `validate` reads from each source."""


def prepare_data(loaded: Loaded, console: PrintableConsole) -> Path | None:
    """Return the data folder, tokenising the data first if needed; None if the run reads no data. Problems refer to
    lines of the recipe."""
    spec = loaded.spec
    try:
        if spec.model.unit == "samples":
            return find_samples(spec.data, spec.model)
        with showing_progress(console) as on_progress:
            folder = prepare(spec.data, on_progress)
        for note in Collection.open(folder).check(spec.data, spec.model.vocab_size):
            console.report(note)
        return folder
    except TrainspecError as error:
        raise type(error)(loaded.composed.locate(error.problems)) from error


def check_data(loaded: Loaded) -> str:
    """Return a line about the conversation formats at the start of the data, without preparing the data. Raises the
    same errors as `prepare_data` if the data does not match the recipe."""
    if loaded.spec.model.unit == "samples":
        return ""
    try:
        formats = check_text(loaded.spec.data, VALIDATED_BYTES)
    except TrainspecError as error:
        raise type(error)(loaded.composed.locate(error.problems)) from error
    return f"conversation format: {describe_formats(formats)}" if formats else ""


def check_data_of(run: RunDir, data: DataSpec) -> None:
    """Check that the run's data folder exists; if not, prepare the same data again. Phantom data has no folder. Raises
    MachineError."""
    data_dir = read_data_dir(run)
    if data_dir is None or (folder := Path(data_dir)).is_dir():
        return
    if data.unit == "samples" or data.source == "tokens" or prepare(data) != folder:
        message = f"the data folder of this run is gone ({folder}), and its source has changed"
        hint = "restore it, or start a new run"
        raise MachineError(Problem("missing_data", message, "data", hint, environment=True))


def count_samples(spec: RunSpec, folder: str | None) -> int:
    """Return the number of training samples per epoch. Text must be tokenised to count them. Raises RecipeError if they
    cannot be counted."""
    data = spec.data
    model = spec.model
    if data.is_own and folder is None and (found := prepared_folder(data)):
        folder = str(found)
    elif data.is_own and folder is None:
        message = f"`{EPOCHS}` is {spec.train.epochs:g}, and counting its samples requires running {data.source}"
        hint = f"prepare its data first (trainspec data prepare), or set {TOKENS}=<tokens> instead"
        raise RecipeError(Problem("unsupported", message, EPOCHS, hint))
    if data.source == "mixture":
        message = f"`{EPOCHS}` is {spec.train.epochs:g}, and the parts of data=mixture have epochs of different lengths"
        raise RecipeError(Problem("unsupported", message, EPOCHS, f"set {TOKENS}=<tokens> instead"))
    try:
        if isinstance(model, ConvModel):
            return open_samples(data, model, expand(data.path) if data.path else None).count("train")
        with showing_progress(PrintableConsole(stderr=True)) as on_progress:
            tokens = Collection.open(folder or prepare(data, on_progress)).main
        return len(open_rows(tokens, "train", data))
    except TrainspecError as error:
        message = f"`{EPOCHS}` is {spec.train.epochs:g}, and the samples of an epoch cannot be counted: {error}"
        hint = f"set {TOKENS}=<tokens> instead, such as {TOKENS}=500e9"
        raise RecipeError(Problem("unknown_length", message, EPOCHS, hint)) from error
