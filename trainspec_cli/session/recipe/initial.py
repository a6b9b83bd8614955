"""What a recipe leaves to the checkpoint that it begins with (`init.from`), and what it is without one."""

from __future__ import annotations

from collections.abc import Iterable

from trainspec_cli.core.errors import Problem
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.recipe.compose.compose import Completion
from trainspec_cli.recipe.field_types import MISSING
from trainspec_cli.recipe.keys.model import AUTO_FAMILY
from trainspec_cli.recipe.keys.run import RunSpec

INIT_FROM = "init.from"


def complete(data: JsonObject, unchosen: frozenset[str], *, to_run: bool = True) -> Completion:
    """The values that a composed recipe leaves to the checkpoint that it begins with.

    The model is left to it by `model=auto`, to which some keys may be added, and where no model is chosen at all. A
    plan (not `to_run`) of a model that is named needs no checkpoint.
    """
    asked = {} if "model" in unchosen else section_of(data, "model")
    begins_with = section_of(data, "init").get("from")
    if begins_with == MISSING:
        is_named = asked.get("family", AUTO_FAMILY) != AUTO_FAMILY
        if is_named and not to_run:
            return Completion({"init": {"from": None}}, INIT_FROM)
        message = f"`{INIT_FROM}` has no value: the recipe trains a model that you have"
        hint = f"type {INIT_FROM}=hf:FOLDER, the folder of a Hugging Face model; or "
        hint += f"{INIT_FROM}=null to train one from the beginning" if to_run else "model=NAME to plan for another"
        problem = Problem("missing_value", message, INIT_FROM, hint)
        return Completion({}, "", problems=(problem,)) if is_named else failed([problem])
    if isinstance(begins_with, str):
        from trainspec_cli.session.recipe.initial_checkpoint import complete_from  # loads the formats of weights

        return complete_from(begins_with, data, asked, unchosen="model" in unchosen)
    if asked.get("family") != AUTO_FAMILY:
        return Completion({}, "")
    if len(asked) > 1:  # a model that is written out key by key needs no group
        return Completion({"model": {"family": "decoder"}}, "")
    message = "no model is named: `model` is auto, and `init.from` is null"
    hint = f"type {INIT_FROM}=hf:FOLDER, the folder of a Hugging Face model; or model=llama_6m, or another: "
    hint += "`trainspec list model` shows all"
    return failed([Problem("missing_value", message, "model", hint)])


def check_weights(spec: RunSpec) -> Iterable[Problem]:
    """A rule: what `init.from` names holds the model's weights."""
    if spec.init.from_ is None:
        return []
    from trainspec_cli.session.recipe.initial_checkpoint import check_initial  # as above

    return check_initial(spec)


def section_of(data: JsonObject, name: str) -> JsonObject:
    """Return the section, or an empty one where something else stands there, which other checks report."""
    section = data.get(name)
    return section if isinstance(section, dict) else {}


def failed(problems: Iterable[Problem]) -> Completion:
    """Return a completion with `problems`; what the model then lacks follows from them and is not reported again."""
    return Completion({}, "", frozenset({"model"}), tuple(problems), frozenset({"model"}))
