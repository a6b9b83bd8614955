"""The models that gpu.py trains, by their files in conf/model and what is changed of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from trainspec_cli.planner.hardware.catalogue import models
from trainspec_cli.planner.workload import count_params, flops_per_token
from trainspec_cli.spec.recipe.model import DecoderModel, HybridModel

Changes = Mapping[str, Any]
"""Dotted keys of a model's file."""


@dataclass(frozen=True)
class Workload:
    base: str
    """A file of conf/model."""
    what: str
    batch_size: int
    """Samples a step, all in one micro-batch."""
    seq_len: int = 4096
    changes: Changes = field(default_factory=dict)
    tiny: Changes = field(default_factory=dict)

    @property
    def model(self) -> DecoderModel | HybridModel:
        model = reduce(_changed, self.changes.items(), models()[self.base])
        assert isinstance(model, DecoderModel | HybridModel)
        return model

    @property
    def flops_per_token(self) -> float:
        return flops_per_token(self.model, self.seq_len)

    @property
    def is_dense(self) -> bool:
        return isinstance(self.model, DecoderModel) and self.model.experts is None

    def shrunk(self) -> Workload:
        return replace(self, seq_len=128, batch_size=2, changes={**self.changes, **self.tiny})

    def with_batch(self, batch_size: int) -> Workload:
        return replace(self, batch_size=batch_size)

    def describe(self) -> str:
        params = count_params(self.model) / 1e9
        return f"{self.what}: {params:.2f}B parameters, {self.batch_size} samples of {self.seq_len} tokens a step"


def _changed(model: Any, change: tuple[str, Any]) -> Any:
    key, value = change
    first, _, rest = key.partition(".")
    return replace(model, **{first: _changed(getattr(model, first), (rest, value)) if rest else value})


_TINY = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "vocab_size": 512}
WORKLOADS = {
    "dense_1b": Workload(
        "llama3_8b",
        "dense 1B (Llama 3.2's sizes)",
        batch_size=4,
        changes={"num_layers": 16, "hidden_size": 2048, "head_dim": 64, "ffn_size": 8192, "tied_embeddings": True},
        tiny={**_TINY, "ffn_size": 128},
    ),
    "dense_8b_width": Workload(
        "llama3_8b",
        "8 layers as wide as Llama 3 8B's",
        batch_size=2,
        changes={"num_layers": 8},
        tiny={**_TINY, "ffn_size": 128},
    ),
    "moe": Workload(
        "qwen3_30b_a3b",
        "6 layers of Qwen3 30B-A3B (128 experts, 8 a token)",
        batch_size=4,
        changes={"num_layers": 6},
        tiny={**_TINY, "ffn_size": 128, "experts.num_experts": 8, "experts.top_k": 2, "experts.expert_ffn_size": 48},
    ),
    "mamba2": Workload(
        "mamba2_1b",
        "Mamba-2 1.3B",
        batch_size=4,
        tiny={"mamba_layers": 2, "hidden_size": 64, "vocab_size": 512, "mamba_head_dim": 16, "mamba_state_size": 16},
    ),
}
