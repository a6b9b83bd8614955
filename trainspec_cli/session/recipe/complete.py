"""Complete a composed recipe with its initial checkpoint's model, the number of steps, and absolute paths.

Each `complete_*` function is a step of `compose_arguments`, which calls it with the composed values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.core.reading.files import expand
from trainspec_cli.recipe.compose.compose import NAMES, SECTION, Complete, Completion, given
from trainspec_cli.recipe.field_types import MISSING
from trainspec_cli.recipe.keys.model import AUTO_FAMILY, derive_head_dim
from trainspec_cli.recipe.keys.run import HUGGING_FACE, RunSpec
from trainspec_cli.recipe.records import UnknownTouched, build
from trainspec_cli.recipe.rules.check import WING_KEYS
from trainspec_cli.recipe.rules.run import forget_out_of_range
from trainspec_cli.recipe.user_code import KINDS, absolute_reference
from trainspec_cli.session.recipe.load import EPOCHS, STEPS, TOKENS

INIT_FROM = "init.from"


def complete_model(data: JsonObject, unchosen: frozenset[str], *, to_run: bool = True) -> Completion:
    """Return the model and tokenizer of the checkpoint in `init.from`, to the extent that the recipe leaves them open.

    `model=auto`, with or without further keys, leaves the model open. So does a recipe without a model. A plan (not
    `to_run`) for a named model needs no checkpoint."""
    asked = {} if "model" in unchosen else section_of(data, "model")
    begins_with = section_of(data, "init").get("from")
    wants_module = "transformers" in (section_of(data, "model").get("backend"), asked.get("family"))
    if wants_module and (
        begins_with is None or (isinstance(begins_with, str) and begins_with.startswith(HUGGING_FACE))
    ):
        from trainspec_cli.session.recipe.module import complete_module  # deferred: starts processes

        return complete_module(data, begins_with, to_run=to_run)
    if begins_with == MISSING:
        is_named = asked.get("family", AUTO_FAMILY) != AUTO_FAMILY
        if is_named and not to_run:
            return Completion({"init": {"from": None}}, INIT_FROM)
        message = f"`{INIT_FROM}` has no value: the recipe trains an existing model"
        hint = f"set {INIT_FROM}=hf:FOLDER, the folder of a Hugging Face model; or "
        hint += f"{INIT_FROM}=null to train one from scratch" if to_run else "model=NAME to plan for another model"
        problem = Problem("missing_value", message, INIT_FROM, hint)
        return Completion({}, "", problems=(problem,)) if is_named else failed([problem])
    if isinstance(begins_with, str):
        from trainspec_cli.session.recipe.initial_checkpoint import complete_from  # deferred: loads the weight formats

        return complete_from(begins_with, data, asked, unchosen="model" in unchosen)
    if asked.get("family") != AUTO_FAMILY:
        return Completion({}, "")
    if len(asked) > 1:  # keys that specify the model suffice
        return Completion({"model": {"family": "decoder"}}, "")
    message = "no model is specified: `model` is auto, and `init.from` is null"
    hint = f"set {INIT_FROM}=hf:FOLDER, the folder of a Hugging Face model; or model=llama_6m, or another: "
    hint += "`trainspec list model` shows all"
    return failed([Problem("missing_value", message, "model", hint)])


def complete_head_dim(data: JsonObject, _unchosen: frozenset[str]) -> Completion:
    head_dim = derive_head_dim(section_of(data, "model"))
    return Completion({"model": {"head_dim": head_dim}}, "model.num_heads") if head_dim else Completion({}, "")


def check_weights(spec: RunSpec) -> Iterable[Problem]:
    """Return problems if the checkpoint in `init.from` does not contain the model's weights."""
    if spec.init.from_ is None:
        return []
    from trainspec_cli.session.recipe.initial_checkpoint import check_initial  # deferred, too

    return check_initial(spec)


def section_of(data: JsonObject, name: str) -> JsonObject:
    """Return the section, or an empty one if the value is not a section. Other checks report that."""
    section = data.get(name)
    return section if isinstance(section, dict) else {}


def failed(problems: Iterable[Problem]) -> Completion:
    """Return a completion with `problems`. The model's missing values are consequences of these problems, and are not
    reported."""
    return Completion({}, "", frozenset({"model"}), tuple(problems), frozenset({"model"}))


# The number of steps of a run whose length is specified in tokens or epochs, and of a warm-up specified as a fraction
# of the run.


WARMUP = "optim.schedule.warmup_steps"
_PERCENT = re.compile(r"(\d+(?:\.\d*)?)\s*%")


def complete_steps(data: JsonObject, _unchosen: frozenset[str], folder: str | None = None) -> Completion:
    """Return `train.max_steps` for a recipe with `train.tokens` or `train.epochs`; epochs require counting the data.

    If the number of steps is also specified, as in the record of a run, the two must agree. `folder`: folder of data
    that has already been prepared."""
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
    except UnknownTouched:  # problems with the required values are reported elsewhere
        return Completion({}, key, failed=frozenset({STEPS}))
    except RecipeError as error:
        return Completion({}, key, problems=tuple(error.problems), failed=frozenset({STEPS}))
    return Completion({SECTION: {"max_steps": steps}}, key)


def complete_changed_steps(
    data: JsonObject, unchosen: frozenset[str], own: JsonObject, folder: str | None
) -> Completion:
    """Complete the steps of a resumed run as `complete_steps` does. If the run's length is unchanged, its number of
    steps stays the same."""
    changed = section_of(data, SECTION)
    before = section_of(own, SECTION)
    if all(changed.get(name) == before.get(name) for name in NAMES):
        return Completion({}, "")
    return complete_steps(data, unchosen, folder)


def complete_warmup(data: JsonObject, _unchosen: frozenset[str]) -> Completion:
    """Return `optim.schedule.warmup_steps` for a fraction of the run, such as `3%` or `0.03`, rounded up to an
    integer."""
    asked = section_of(section_of(data, "optim"), "schedule").get("warmup_steps")
    percent = _PERCENT.fullmatch(asked.strip()) if isinstance(asked, str) else None
    if percent is not None:
        share = Fraction(percent[1]) / 100
    elif isinstance(asked, float) and 0 < asked < 1:
        share = Fraction(str(asked))
    else:
        return Completion({}, "")
    total = section_of(data, SECTION).get("max_steps")
    is_known = isinstance(total, (int, float)) and not isinstance(total, bool) and math.isfinite(total)
    # An invalid length is reported elsewhere, so do not report the warm-up as well.
    steps = math.ceil(share * int(total)) if is_known else 0  # type: ignore[arg-type]
    return Completion({"optim": {"schedule": {"warmup_steps": steps}}}, WARMUP)


def count_steps(spec: RunSpec, folder: str | None) -> int:
    """Return the number of steps, at the first batch size, needed to train on at least the recipe's tokens or epochs.
    Raises RecipeError if the data cannot be counted."""
    tokens = spec.train.tokens
    epochs = spec.train.epochs
    if tokens is not None:
        return math.ceil(tokens / (spec.batching.global_batch_size * spec.data.seq_len))
    assert epochs is not None, "the recipe says how much is trained"
    from trainspec_cli.session.recipe.data import (
        count_samples,  # deferred: loads the data readers, which most plans do not need
    )

    samples = Fraction(str(epochs)) * count_samples(
        spec, folder
    )  # exact, because as floats 1.1 * 50,000 is slightly above 55,000
    return math.ceil(samples / spec.batching.global_batch_size)


def _contradiction(one: str, other: str, makes: str = "") -> Problem:
    message = f"`{one}` and `{other}`{makes} both set the length of the run"
    return Problem("contradiction", message, one, f"leave one of them out: ~{one} or ~{other}")


# Absolute paths for files of user code and of plug-ins, so that every process finds them.


GROUPS = ("mixture", "validation")
"""Data sections that contain several named sources."""


def absolute_code(cwd: Path | None = None) -> list[Complete]:
    """Return the steps that make paths absolute, for each key that may name a file of user code or of a plug-in. Like
    other paths in a recipe, relative paths are relative to `cwd`."""
    folder = cwd or Path.cwd()
    files = [f"{wing.section}.{name}" for wing in WING_KEYS for name in wing.files]
    of_keys = [*(_of_key(kind.key, folder) for kind in KINDS), *(_of_key(path, folder, is_file=True) for path in files)]
    return [*of_keys, *(_of_parts(group, folder) for group in GROUPS)]


def _of_key(path: str, cwd: Path, *, is_file: bool = False) -> Complete:
    def complete(data: JsonObject, _unchosen: frozenset[str]) -> Completion:
        value: JsonValue = data
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        whole = _absolute(value, cwd)
        if is_file and isinstance(value, str):
            whole = str(cwd / expand(value))
        return Completion({} if whole == value else _nested(path, whole), path)

    return complete


def _nested(path: str, value: JsonValue) -> JsonObject:
    section, _, inside = path.partition(".")
    return {section: _nested(inside, value) if inside else value}


def _of_parts(group: str, cwd: Path) -> Complete:
    """Return the step that makes paths absolute in the named sources of a mixture or of the validation sets."""

    def complete(data: JsonObject, _unchosen: frozenset[str]) -> Completion:
        parts = section_of(section_of(data, "data"), group)
        found: JsonObject = {}
        for name in parts:
            source = section_of(parts, name).get("source")
            if (whole := _absolute(source, cwd)) != source:
                found[name] = {"source": whole}
        return Completion({"data": {group: found}} if found else {}, f"data.{group}")

    return complete


def _absolute(value: JsonValue, cwd: Path) -> JsonValue:
    if isinstance(value, list):
        return [_absolute(item, cwd) for item in value]
    return absolute_reference(value, cwd) if isinstance(value, str) else value
