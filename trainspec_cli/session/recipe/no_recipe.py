"""The plan where no recipe is named: a model on a cluster, with what is usual for the rest."""

from __future__ import annotations

from collections.abc import Sequence

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.plan.workload import count_params
from trainspec_cli.recipe.compose.origins import RECIPE
from trainspec_cli.recipe.keys.model import DecoderModel, ModelSpec
from trainspec_cli.recipe.unknown import UnknownTouched
from trainspec_cli.session.recipe.load import examine, with_counted_block

DEFAULTS = "plan_defaults"
"""The recipe in the place of one (recipes/plan_defaults.yaml)."""
TOKENS_A_PARAMETER = 20
"""arXiv:2203.15556, table 3: what trains a model of its size best for the compute."""
SEQ_LEN, TOKENS_A_STEP = 4096, 2**22
POOLS = "cluster.pools"
"""Say what a cluster's nodes are, so that no other cluster stands in the place of what nobody has given."""
LENGTHS = ("train.max_steps", "train.tokens", "train.epochs")


def with_defaults(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """-> (the arguments with a recipe, the overrides among them that stand for what nobody has given).

    Those that name a recipe stay as they are. Raises RecipeError where neither a recipe nor a model is named.
    """
    given = {argument.partition("=")[0].lstrip("~+") for argument in arguments}
    if RECIPE in given:
        return list(arguments), ()
    if "model" not in given:
        hint = "type recipe=NAME, or model=NAME cluster=NAME: trainspec list shows both"
        raise RecipeError(Problem("missing_value", "neither a recipe nor a model is named", RECIPE, hint))
    named = [*arguments, f"{RECIPE}={DEFAULTS}"]
    if POOLS in given and "cluster" not in given:
        named.append("cluster=auto")
    try:
        examined = examine(named, to_run=False)
        counted = with_counted_block(named, examined)
        if len(counted) > len(named):  # the usual number of tokens follows from the parameters
            named = counted
            examined = examine(named, to_run=False)
        usual = _usual(examined.draft.model, arguments)
    except UnknownTouched:  # the model is wrong, which the plan reports
        return named, ()
    if given & set(LENGTHS):
        del usual["train.tokens"]
    overrides = tuple(f"{key}={value}" for key, value in usual.items() if key not in given)
    return [*named, *overrides], overrides


def _usual(model: ModelSpec, arguments: Sequence[str]) -> dict[str, str]:
    """Samples of 4,096 tokens, as far as the model's positions reach, four million tokens a step, 20 a parameter; of
    pictures, 90 times the 1.28 million of ImageNet."""
    if model.unit == "samples":
        return {"data.seq_len": "1", "train.tokens": "1.15e8"}
    learnt = model.learned_positions if isinstance(model, DecoderModel) else 0
    asked = next((value for key, _, value in (one.partition("=") for one in arguments) if key == "data.seq_len"), "")
    seq_len = int(asked) if asked.isdecimal() and int(asked) else min(SEQ_LEN, learnt or SEQ_LEN)
    return {
        "data.seq_len": f"{seq_len}",
        "batching.global_batch_size": f"{max(1, TOKENS_A_STEP // seq_len)}",
        "train.tokens": f"{float(f'{TOKENS_A_PARAMETER * count_params(model):.3g}'):g}",
    }
