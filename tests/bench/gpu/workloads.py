"""The models that are trained, by their files in conf/model and what is changed of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from trainspec_cli.planner.hardware.rates import models
from trainspec_cli.planner.workload import count_params, flops_per_token
from trainspec_cli.recipe.keys.model import ConvModel, DecoderModel, HybridModel

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
    precision: str = "bf16"
    """A file of conf/precision."""
    changes: Changes = field(default_factory=dict)
    tiny: Changes = field(default_factory=dict)

    @property
    def model(self) -> DecoderModel | HybridModel | ConvModel:
        model = reduce(_changed, self.changes.items(), models()[self.base])
        assert isinstance(model, DecoderModel | HybridModel | ConvModel)
        return model

    @property
    def is_unet(self) -> bool:
        return isinstance(self.model, ConvModel)

    @property
    def units_a_step(self) -> int:
        """Tokens; of a U-Net volumes."""
        return self.batch_size if self.is_unet else self.batch_size * self.seq_len

    @property
    def flops_per_token(self) -> float:
        """Of a U-Net per volume."""
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
        size = f"{self.batch_size} volumes" if self.is_unet else f"{self.batch_size} samples of {self.seq_len} tokens"
        return f"{self.what}: {params:.2f}B parameters, {size} per step, {self.precision}"


def _changed(model: Any, change: tuple[str, Any]) -> Any:
    key, value = change
    first, _, rest = key.partition(".")
    return replace(model, **{first: _changed(getattr(model, first), (rest, value)) if rest else value})


def arguments_of(workload: Workload, device: str, *settings: str) -> list[str]:
    """Return the arguments of `launch` for a workload on one device, with all of a step's samples in one go. What
    `settings` name is as they say."""
    given = ["recipe=tiny_unet3d" if workload.is_unet else "recipe=tiny", f"model={workload.base}"]
    given += [] if workload.is_unet else [f"data.seq_len={workload.seq_len}", "sample.max_new_tokens=0"]
    given += [f"model.{key}={_text(value)}" for key, value in workload.changes.items()]
    given += [f"batching.global_batch_size={workload.batch_size}", f"batching.micro_batch_size={workload.batch_size}"]
    given += [*on_one(device), f"precision={workload.precision}", "scheduler=off"]
    named = {setting.partition("=")[0] for setting in settings}
    return [*(one for one in given if one.partition("=")[0] not in named), *settings]


def on_one(device: str) -> list[str]:
    return ["cluster=auto", f"cluster.device={device}", "cluster.devices_per_node=1"]


def unpredicted(device: str) -> list[str]:
    """Return what makes a CPU's run one that is not predicted: to probe the machine would take longer than the run."""
    return ["recompute=full"] if device == "cpu" else []


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def write_tokens(folder: Path, workload: Workload, count: int) -> Path:
    """Write ids drawn at random, as nanoGPT keeps them."""
    file = folder / "drawn_train.bin"
    highest = min(workload.model.vocab_size, 2**16)
    np.random.default_rng(0).integers(highest, size=count).astype(np.uint16).tofile(file)
    return file


_TINY = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "vocab_size": 512}
_TINY_DENSE = {**_TINY, "ffn_size": 128}


def _llama(what: str, batch_size: int, *sizes: int, **others: Any) -> Workload:
    """`sizes`: layers, width, heads, key and value heads, width of the feed-forward."""
    keys = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size")
    changes = {**dict(zip(keys, sizes, strict=True)), "head_dim": sizes[1] // sizes[2]}
    return Workload(
        "llama3_8b", what, batch_size, changes=changes | {"tied_embeddings": True}, tiny=_TINY_DENSE, **others
    )


_DENSE_1B = _llama("dense 1B (Llama 3.2's sizes)", 4, 16, 2048, 32, 8, 8192)
_DENSE_8B = Workload("llama3_8b", "8 layers as wide as Llama 3 8B's", 2, changes={"num_layers": 8}, tiny=_TINY_DENSE)
WORKLOADS = {
    "dense_8b": _DENSE_8B,
    "dense_1b": _DENSE_1B,
    "dense_8b_8k": replace(_DENSE_8B, batch_size=1, seq_len=8192),
    "dense_8b_fp8": replace(_DENSE_8B, precision="fp8"),
    "moe": Workload(
        "qwen3_30b_a3b",
        "6 layers of Qwen3 30B-A3B (128 experts, 8 per token)",
        batch_size=4,
        changes={"num_layers": 6},
        tiny={**_TINY_DENSE, "experts.num_experts": 8, "experts.top_k": 2, "experts.expert_ffn_size": 48},
    ),
    "mamba2": Workload(
        "mamba2_1b",
        "Mamba-2 1.3B",
        batch_size=4,
        tiny={"mamba_layers": 2, "hidden_size": 64, "vocab_size": 512, "mamba_head_dim": 16, "mamba_state_size": 16},
    ),
    "unet": Workload(
        "unet3d",
        "3-D U-Net on volumes of 128^3 voxels",
        batch_size=4,
        tiny={"input_size": (16, 16, 16), "widths": (4, 8)},
    ),
    "dense_1b_8k": replace(_DENSE_1B, batch_size=2, seq_len=8192),
    "dense_1b_fp8": replace(_DENSE_1B, precision="fp8"),
    "dense_8b_8k_fp8": replace(_DENSE_8B, batch_size=1, seq_len=8192, precision="fp8"),
}
"""In order of worth."""
MEMORY = {
    "1b": replace(_DENSE_1B, batch_size=2),
    "0.1b": _llama("dense 0.1B", 8, 12, 768, 12, 12, 2048),
    "3b": _llama("dense 3B (Llama 3.2's sizes)", 1, 28, 3072, 24, 8, 8192),
    "0.4b": _llama("dense 0.4B", 4, 24, 1024, 16, 16, 2816),
    "8b_half": replace(_DENSE_8B, what="half of Llama 3 8B's layers", batch_size=1, changes={"num_layers": 16}),
}
"""Five sizes, of which memory is measured."""
