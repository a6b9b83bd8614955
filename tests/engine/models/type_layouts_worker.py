"""`type_layouts_worker.py FILE RANK RANKS NAME...`: `layout_worker.py` for the model types of transformers. A name is
`TYPE/NUMBER LAYOUT`, such as `gemma2/0 tensor`, with the layouts of `LAYOUTS`."""

from __future__ import annotations

from engine.models.test_model_types import CASES
from engine.parallel import layout_worker
from transformers import AutoConfig

from trainspec_cli.data.huggingface.config import read_model
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel, HybridModel
from trainspec_cli.recipe.records import from_plain
from trainspec_cli.wings.certify.cases import Case, refusals
from trainspec_cli.wings.certify.families import FAMILIES

LAYOUTS = {
    "shards": Layout(dp_shard=2),
    "tensor": Layout(tp=2),
    "plain tensor": Layout(tp=2, sequence_parallel=False),
    "ring": Layout(cp=2),
    "ulysses": Layout(cp=2, context_method="ulysses"),
    "pipeline": Layout(pp=2),
    "experts": Layout(dp_shard=2, ep=2),
}
MODELS: dict[str, DecoderModel | HybridModel] = {}
"""The models of the cases by `TYPE/NUMBER`; a process that runs cases adds them to `FAMILIES`."""
KINDS: dict[str, type[DecoderModel | HybridModel]] = {"decoder": DecoderModel, "hybrid": HybridModel}


def cases() -> dict[str, Case]:
    """Return every case by name, including those that the recipe rules refuse."""
    found = {}
    for kind, variants in CASES.items():
        for number, config in enumerate(variants):
            family = f"{kind}/{number}"
            values = read_model(AutoConfig.for_model(kind, **config).to_dict(), "config.json")
            MODELS[family] = from_plain(KINDS[str(values.get("family", "decoder"))], values)
            found |= {f"{family} {name}": Case(family, layout, micro_batch_size=4) for name, layout in LAYOUTS.items()}
    return found


def refused(case: Case) -> frozenset[str]:
    """Return the keys because of which the recipe rules refuse a case; empty if it is legal."""
    FAMILIES[case.family] = MODELS[case.family]
    try:
        return frozenset(problem.path for problem in refusals(case))
    finally:
        del FAMILIES[case.family]


if __name__ == "__main__":
    layout_worker.CASES |= cases()
    FAMILIES |= MODELS
    layout_worker.main()
