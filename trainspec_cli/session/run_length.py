"""The steps of a run that is asked for by tokens or by epochs."""

from __future__ import annotations

import math
from fractions import Fraction

from trainspec_cli.composer.alternatives import NAMES, SECTION, given, section_of
from trainspec_cli.composer.compose import Completion
from trainspec_cli.corpus.collection import Collection
from trainspec_cli.corpus.labelled import open_samples
from trainspec_cli.corpus.prepare import prepare, prepared_folder
from trainspec_cli.corpus.rows import open_rows
from trainspec_cli.errors import Problem, RecipeError, TrainspecError
from trainspec_cli.json_value import JsonObject
from trainspec_cli.reading.files import expand
from trainspec_cli.reporter.live import showing_progress
from trainspec_cli.session.console import PrintableConsole
from trainspec_cli.spec.recipe.model import ConvModel
from trainspec_cli.spec.recipe.run import RunSpec
from trainspec_cli.spec.rules.values import forget_out_of_range
from trainspec_cli.spec.structure import build
from trainspec_cli.spec.unknown import UnknownTouched

STEPS, TOKENS, EPOCHS = (f"{SECTION}.{name}" for name in NAMES)


def complete_steps(data: JsonObject, _unchosen: frozenset[str], folder: str | None = None) -> Completion:
    """`train.max_steps` where a recipe gives `train.tokens` or `train.epochs`, for which its data is counted.

    Steps that are given beside these, as in the record of a run, must be as many. `folder`: where the data was
    prepared before.
    """
    names = given(data)
    key = next((f"{SECTION}.{name}" for name in names if name != "max_steps"), "")
    if not key:
        return Completion({}, "")
    try:
        if {"tokens", "epochs"} <= set(names):
            raise RecipeError(_contradiction(TOKENS, EPOCHS))
        draft = forget_out_of_range(build(RunSpec, data)[0])[0]
        steps = count_steps(draft, folder)
        if "max_steps" in names and draft.train.max_steps != steps:
            raise RecipeError(_contradiction(STEPS, key, f" ({steps:,} steps)"))
    except UnknownTouched:  # what is wrong with the values that are needed is reported by itself
        return Completion({}, key, failed=frozenset({STEPS}))
    except RecipeError as error:
        return Completion({}, key, problems=tuple(error.problems), failed=frozenset({STEPS}))
    return Completion({SECTION: {"max_steps": steps}}, key)


def complete_changed_steps(
    data: JsonObject, unchosen: frozenset[str], own: JsonObject, folder: str | None
) -> Completion:
    """As `complete_steps`, for a run that goes on: its own steps stay where its length is not changed."""
    changed, before = ({name: section_of(values).get(name) for name in NAMES} for values in (data, own))
    return Completion({}, "") if changed == before else complete_steps(data, unchosen, folder)


def count_steps(spec: RunSpec, folder: str | None) -> int:
    """Return the steps of the first batch size that train at least the recipe's tokens or epochs. Raises RecipeError
    where the data cannot be counted."""
    tokens, epochs = spec.train.tokens, spec.train.epochs
    if tokens is not None:
        return math.ceil(tokens / (spec.batching.global_batch_size * spec.data.seq_len))
    assert epochs is not None, "the recipe says how much is trained"
    samples = Fraction(str(epochs)) * count_samples(spec, folder)  # 1.1 times 50,000 is 55,000, not a little more
    return math.ceil(samples / spec.batching.global_batch_size)


def count_samples(spec: RunSpec, folder: str | None) -> int:
    """Return the training samples of an epoch; text is prepared for that. Raises RecipeError where there are none to
    count."""
    data, model = spec.data, spec.model
    if data.is_own and folder is None and (found := prepared_folder(data)):
        folder = str(found)
    elif data.is_own and folder is None:
        message = f"`{EPOCHS}` is {spec.train.epochs:g}, and to count the samples of {data.source} it would have to run"
        hint = f"prepare its data first (trainspec data prepare), or type {TOKENS}=<tokens> in its place"
        raise RecipeError(Problem("unsupported", message, EPOCHS, hint))
    if data.source == "mixture":
        message = f"`{EPOCHS}` is {spec.train.epochs:g}, and the parts of data=mixture come round at different times"
        raise RecipeError(Problem("unsupported", message, EPOCHS, f"type {TOKENS}=<tokens> in its place"))
    try:
        if isinstance(model, ConvModel):
            return open_samples(data, model, expand(data.path) if data.path else None).count("train")
        with showing_progress(PrintableConsole(stderr=True)) as on_progress:
            tokens = Collection.open(folder or prepare(data, on_progress)).main
        return len(open_rows(tokens, "train", data))
    except TrainspecError as error:
        message = f"`{EPOCHS}` is {spec.train.epochs:g}, and the samples of an epoch cannot be counted: {error}"
        hint = f"type {TOKENS}=<tokens> in its place, such as {TOKENS}=500e9"
        raise RecipeError(Problem("unknown_length", message, EPOCHS, hint)) from error


def _contradiction(one: str, other: str, makes: str = "") -> Problem:
    message = f"`{one}` and `{other}`{makes} both say how long the run is"
    return Problem("contradiction", message, one, f"leave one of them out: ~{one} or ~{other}")
