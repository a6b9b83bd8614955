"""The table of model types in docs/fine-tuning.md is what the code says. `python tests/docs/test_model_types.py`, with
the tests' folder on PYTHONPATH, writes it again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.data.huggingface.config import HUB_TYPES, read_model
from trainspec_cli.data.huggingface.families import LEFT_OUT, HubType
from trainspec_cli.data.huggingface.family_rules import Only
from trainspec_cli.data.weights.naming import SUPPORTED
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel, HybridModel, TextModel
from trainspec_cli.recipe.records import build
from trainspec_cli.recipe.rules.layout import context_parallel
from trainspec_cli.wings.certify.cases import Case, build_plan

transformers = pytest.importorskip("transformers")

PAGE = Path(__file__).parents[2] / "docs" / "fine-tuning.md"
START, END = "<!-- types -->\n", "<!-- end of types -->\n"
UNSTATED = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention"]},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
}
"""Keys without a default in transformers, and layers without experts."""
USUAL = {"quantization_config"}
"""Keys that no type supports."""


def model_of(kind: str) -> TextModel:
    """Return a model of this type with the sizes that transformers takes if a config.json states none."""
    config = transformers.AutoConfig.for_model(kind, **UNSTATED.get(kind, {})).to_dict()
    content = read_model(config, "config.json")
    model, problems = build({"decoder": DecoderModel, "hybrid": HybridModel}[str(content["family"])], content)
    assert problems == []
    return model


def context_method(model: TextModel) -> str:
    """Return the first method of context parallelism that works."""
    spec = build_plan(Case("dense", Layout()), "cpu").spec
    spec = replace(spec, model=model, data=replace(spec.data, seq_len=4096))
    for method in ("ring", "ulysses"):
        layout: Any = replace(spec.layout, cp=2, context_method=method)
        if not any(one.code == "illegal_layout" for one in context_parallel(replace(spec, layout=layout))):
            return method
    return "none"


def exports(kind: str, names: HubType, model: TextModel) -> str:
    others = sorted({naming.partition("_")[0] for naming, kinds in SUPPORTED.items() if kind in kinds})
    is_plain = not (names.names.fused or names.names.transposed or "lora" in model.record.refuses)
    adapters = [] if not is_plain else ["peft"]
    return " ".join(["hf", *adapters, *others])


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield (type, layouts, formats of export, keys that are left out)."""
    for kind, hub_type in HUB_TYPES.items():
        model = model_of(kind)
        method = context_method(model)
        axes = ["tp", "pp", *([] if method == "none" else [f"cp ({method})"]), *(["ep"] if model.experts else [])]
        left_out = [one.name for one in hub_type.rules if isinstance(one, Only) and one.name not in USUAL]
        yield kind, " ".join(axes), exports(kind, hub_type, model), ", ".join(f"`{name}`" for name in left_out) or "-"


def table() -> str:
    lines = ["| type | layouts | exports | only the usual value of |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows()]
    reasons = [f"- {kind}: {reason}" for kind, reason in LEFT_OUT.items()]
    return "\n".join([*lines, "", "Left out:", "", *reasons, ""])


def test_the_table_of_model_types_is_that_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition(START)[2].partition(END)[0] == table()


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_types_that_are_left_out_exist_and_are_not_read(kind: str) -> None:
    assert kind in transformers.CONFIG_MAPPING and kind not in HUB_TYPES


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    PAGE.write_text(f"{before}{START}{table()}{END}{rest.partition(END)[2]}", encoding="utf-8")
