"""The steps of a run that is asked for by tokens or by epochs, and of a warm-up that is a share of the run."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.recipe.compose.compose import NAMES, SECTION, Completion, given, section_of
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import UnknownTouched, build
from trainspec_cli.recipe.rules.run import forget_out_of_range

WARMUP = "optim.schedule.warmup_steps"
_PERCENT = re.compile(r"(\d+(?:\.\d*)?)\s*%")
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


def complete_warmup(data: JsonObject, _unchosen: frozenset[str]) -> Completion:
    """`optim.schedule.warmup_steps` where it is a share of the run, `3%` or `0.03`: that many steps, rounded up."""
    optim = data.get("optim")
    schedule = optim.get("schedule") if isinstance(optim, dict) else None
    asked = schedule.get("warmup_steps") if isinstance(schedule, dict) else None
    percent = _PERCENT.fullmatch(asked.strip()) if isinstance(asked, str) else None
    if percent is not None:
        share = Fraction(percent[1]) / 100
    elif isinstance(asked, float) and 0 < asked < 1:
        share = Fraction(str(asked))
    else:
        return Completion({}, "")
    total = section_of(data).get("max_steps")
    is_known = isinstance(total, (int, float)) and not isinstance(total, bool) and math.isfinite(total)
    # Where the length is wrong, which is reported by itself, nothing is reported of the warm-up.
    steps = math.ceil(share * int(total)) if is_known else 0  # type: ignore[arg-type]
    return Completion({"optim": {"schedule": {"warmup_steps": steps}}}, WARMUP)


def count_steps(spec: RunSpec, folder: str | None) -> int:
    """Return the steps of the first batch size that train at least the recipe's tokens or epochs. Raises RecipeError
    where the data cannot be counted."""
    tokens = spec.train.tokens
    epochs = spec.train.epochs
    if tokens is not None:
        return math.ceil(tokens / (spec.batching.global_batch_size * spec.data.seq_len))
    assert epochs is not None, "the recipe says how much is trained"
    from trainspec_cli.session.recipe.samples import (
        count_samples,  # loads the readers of data, which most plans do without
    )

    samples = Fraction(str(epochs)) * count_samples(spec, folder)  # 1.1 times 50,000 is 55,000, not a little more
    return math.ceil(samples / spec.batching.global_batch_size)


def _contradiction(one: str, other: str, makes: str = "") -> Problem:
    message = f"`{one}` and `{other}`{makes} both say how long the run is"
    return Problem("contradiction", message, one, f"leave one of them out: ~{one} or ~{other}")
