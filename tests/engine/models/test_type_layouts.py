"""Every model type of transformers in every layout that its sizes allow: a step's loss and gradients in two processes
are those of one."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engine.models import type_layouts_worker as worker
from lab.ranks import outputs

from trainspec_cli.recipe.keys.model import HybridModel

WORKER = Path(worker.__file__)
CASES = worker.cases()
LEGAL = [name for name, case in CASES.items() if not worker.refused(case)]
FP32 = 1e-6
"""Error of all gradients together, relative to their norm: sums in another order."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """ranks(name): what both ranks have found; all types of a layout are computed together."""

    @cache
    def computed(layout: str) -> list[dict[str, Any]]:
        file = tmp_path_factory.mktemp("layouts") / "meeting"
        names = [name for name in LEGAL if name.split(" ", 1)[1] == layout]
        return [json.loads(text.splitlines()[-1]) for text in outputs(WORKER, [(file, i, 2, *names) for i in (0, 1)])]

    return lambda name: [rank[name] for rank in computed(name.split(" ", 1)[1])]


@pytest.mark.slow
@pytest.mark.parametrize("name", LEGAL)
def test_two_ranks_compute_what_one_computes(name: str, ranks: Any) -> None:
    found = ranks(name)
    assert sum(rank["loss"] for rank in found) == pytest.approx(1.0, rel=1e-6)
    assert sum(rank["squared"] for rank in found) == pytest.approx(1.0, rel=1e-5)
    assert sorted({one for rank in found for one in rank["errors"]}) == found[0]["names"]
    assert max(rank["error"] for rank in found) < FP32


def test_layouts_are_refused_only_where_the_model_has_nothing_to_divide() -> None:
    refusals = {name: worker.refused(case) for name, case in CASES.items() if name not in LEGAL}
    expected = {name: reason for name in CASES if (reason := why_not(*name.split(" ", 1)))}
    assert refusals == expected


def why_not(family: str, layout: str) -> frozenset[str]:
    """Return the keys because of which a layout is impossible for a model type."""
    model = worker.MODELS[family]
    if layout == "experts" and model.experts is None:
        return frozenset({"layout.ep"})
    if isinstance(model, HybridModel):
        return hybrid_why_not(model, layout)
    if layout == "ring" and (model.sliding_window or model.mla or model.attention_sinks):  # ulysses has them
        return frozenset({"layout.context_method"})
    if ("tensor" in layout or layout == "ulysses") and model.num_kv_heads % 2:
        return frozenset({"layout.cp" if layout == "ulysses" else "layout.tp"})
    if layout == "tensor" and model.learned_positions:
        return frozenset({"layout.sequence_parallel"})
    if layout == "plain tensor" and model.experts is not None:  # every rank would route the same tokens
        return frozenset({"layout.sequence_parallel"})
    return frozenset()


def hybrid_why_not(model: HybridModel, layout: str) -> frozenset[str]:
    if layout in ("ring", "ulysses"):  # scans and convolutions need the tokens before
        return frozenset({"layout.cp"})
    if layout == "experts":
        return frozenset({"layout.ep"})
    return frozenset({"layout.tp"} if "tensor" in layout and model.mamba_groups % 2 else ())
