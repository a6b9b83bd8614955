"""Count the training samples of an epoch in the data."""

from __future__ import annotations

from trainspec_cli.core.errors import Problem, RecipeError, TrainspecError
from trainspec_cli.core.reading.files import expand
from trainspec_cli.data.corpus.labelled import open_samples
from trainspec_cli.data.corpus.prepare import prepare, prepared_folder
from trainspec_cli.data.corpus.rows import open_rows
from trainspec_cli.data.corpus.sources import Collection
from trainspec_cli.recipe.keys.model import ConvModel
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.reporter.live import showing_progress
from trainspec_cli.session.console import PrintableConsole
from trainspec_cli.session.recipe.complete import EPOCHS, TOKENS


def count_samples(spec: RunSpec, folder: str | None) -> int:
    """Return the number of training samples of an epoch; text is tokenised for that. Raises RecipeError if they cannot
    be counted."""
    data = spec.data
    model = spec.model
    if data.is_own and folder is None and (found := prepared_folder(data)):
        folder = str(found)
    elif data.is_own and folder is None:
        message = f"`{EPOCHS}` is {spec.train.epochs:g}, and counting the samples of {data.source} would have to run it"
        hint = f"prepare its data first (trainspec data prepare), or type {TOKENS}=<tokens> instead"
        raise RecipeError(Problem("unsupported", message, EPOCHS, hint))
    if data.source == "mixture":
        message = f"`{EPOCHS}` is {spec.train.epochs:g}, and the parts of data=mixture have epochs of different lengths"
        raise RecipeError(Problem("unsupported", message, EPOCHS, f"type {TOKENS}=<tokens> instead"))
    try:
        if isinstance(model, ConvModel):
            return open_samples(data, model, expand(data.path) if data.path else None).count("train")
        with showing_progress(PrintableConsole(stderr=True)) as on_progress:
            tokens = Collection.open(folder or prepare(data, on_progress)).main
        return len(open_rows(tokens, "train", data))
    except TrainspecError as error:
        message = f"`{EPOCHS}` is {spec.train.epochs:g}, and the samples of an epoch cannot be counted: {error}"
        hint = f"type {TOKENS}=<tokens> instead, such as {TOKENS}=500e9"
        raise RecipeError(Problem("unknown_length", message, EPOCHS, hint)) from error
