"""The data of a run, made ready on this node before any worker starts, or found again when a run goes on."""

from __future__ import annotations

from pathlib import Path

from trainspec_cli.core.errors import MachineError, Problem, TrainspecError
from trainspec_cli.data.corpus.chat import describe_formats
from trainspec_cli.data.corpus.labelled import find_samples
from trainspec_cli.data.corpus.prepare import check_text, prepare
from trainspec_cli.data.corpus.sources import Collection
from trainspec_cli.recipe.keys.run import DataSpec
from trainspec_cli.reporter.live import showing_progress
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_data_dir
from trainspec_cli.session.console import PrintableConsole
from trainspec_cli.session.recipe.load import Loaded

VALIDATED_BYTES = 16 * 2**20
"""Text of each source that is looked through before a launch asks for all of it."""


def prepare_data(loaded: Loaded, console: PrintableConsole) -> Path | None:
    """Return the folder to read, of tokens made now if need be; None where nothing is read. Problems are located as the
    recipe's own are."""
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
    """Return what the beginning of the data says of the formats of its conversations; nothing is made. Raises as
    `prepare_data` does where the data is not what the recipe says."""
    if loaded.spec.model.unit == "samples":
        return ""
    try:
        formats = check_text(loaded.spec.data, VALIDATED_BYTES)
    except TrainspecError as error:
        raise type(error)(loaded.composed.locate(error.problems)) from error
    return f"format of conversations: {describe_formats(formats)}" if formats else ""


def check_data_of(run: RunDir, data: DataSpec) -> None:
    """Find the folder that the run began with, or make it again just as it was; phantoms have none. Raises
    MachineError."""
    data_dir = read_data_dir(run)
    if data_dir is None or (folder := Path(data_dir)).is_dir():
        return
    if data.unit == "samples" or data.source == "tokens" or prepare(data) != folder:
        message = f"the data folder of this run is gone ({folder}), and its source is not what it was"
        hint = "put it back, or start a new run"
        raise MachineError(Problem("missing_data", message, "data", hint, environment=True))
